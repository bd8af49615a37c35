"""Secrets that cannot be printed, encoded or pickled by accident."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import msgspec
import pytest

from sparklog import errors
from sparklog.security.secret import Secret

PLANTED = "hunter2-planted"


class _Holder(msgspec.Struct):
    secret: Secret


def test_it_is_not_printed() -> None:
    """By no way in which a string comes into a log line or an error."""
    secret = Secret(PLANTED)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", f"{secret:>40}"]
    shown += ["%s" % secret, repr({"password": secret}), repr(_Holder(secret))]  # noqa: UP031
    assert not any(PLANTED in each for each in shown)
    assert secret.reveal() == PLANTED


@pytest.mark.parametrize(
    "encode",
    [
        json.dumps,
        msgspec.json.encode,
        msgspec.msgpack.encode,
        msgspec.to_builtins,
        pickle.dumps,
        lambda secret: msgspec.json.encode(_Holder(secret)),
        lambda secret: pickle.dumps(_Holder(secret)),
        vars,
    ],
)
def test_nothing_encodes_it(encode) -> None:  # type: ignore[no-untyped-def]
    """An encoder that meets one must fail: its output would contain the secret."""
    with pytest.raises(TypeError):
        encode(Secret(PLANTED))


def test_a_reference_is_pickled_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that gets it reads the secret itself, where it is by then."""
    file = tmp_path / "password"
    file.write_text(f"{PLANTED}\n")
    monkeypatch.setenv("PLANTED", PLANTED)
    for secret in (Secret.from_file(file), Secret.from_variable("PLANTED")):
        pickled = pickle.dumps(secret)
        assert PLANTED.encode() not in pickled
        again = pickle.loads(pickled)
        assert (again.reveal(), again.source) == (PLANTED, secret.source)
        assert again == secret
        assert copy.deepcopy(again) is again
    file.write_text("rotated")
    assert Secret.from_file(file).reveal() == "rotated"


def test_equality() -> None:
    """Secrets compare by value, have no hash, and equal no string."""
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    with pytest.raises(TypeError):
        hash(Secret("a"))


def test_references_that_cannot_be_read(tmp_path: Path) -> None:
    """The error names the file or the variable, and nothing of the content."""
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    (tmp_path / "binary").write_bytes(b"\xff" + PLANTED.encode())
    for secret, reason in (
        (Secret.from_file(tmp_path / "none"), "none.*cannot be read"),
        (Secret.from_file(tmp_path / "large"), "more than 65536 bytes"),
        (Secret.from_file(tmp_path / "binary"), "not UTF-8"),
        (Secret.from_variable("SPARKLOG_NOT_SET"), "SPARKLOG_NOT_SET.*not set"),
    ):
        with pytest.raises(errors.BadOption, match=reason) as failed:
            secret.reveal()
        assert PLANTED not in str(failed.value)
