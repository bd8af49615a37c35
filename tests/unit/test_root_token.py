"""Tokens of programs that can read the security state."""

from __future__ import annotations

import msgspec
import pytest

from sparklog.security.root_token import ROOT_TOKENS, RootClaims, verify
from sparklog.security.signed_token import BadToken

KEY = b"k" * 32
CLAIMS = RootClaims(
    chain_id="c1", broker=1, epoch=7, address="h:1", who="Root:x@y", expires_at=1_000
)


def read(header: str, *, key: bytes = KEY, **changes: object) -> RootClaims:
    """Verifies a token at broker 1 in epoch 7."""
    facts: dict[str, object] = {"chain_id": "c1", "broker": 1, "epoch": 7, "address": "h:1"}
    facts["now_seconds"] = 999.0
    return verify(key, header, **{**facts, **changes})  # type: ignore[arg-type]


def test_a_token_is_for_one_broker_and_some_minutes() -> None:
    """Promise: it is accepted where it belongs, and nowhere else."""
    token = ROOT_TOKENS.sign(KEY, CLAIMS)
    assert read(token) == CLAIMS
    for changes in ({"broker": 2}, {"epoch": 8}, {"chain_id": "c2"}, {"now_seconds": 1_000.0}):
        with pytest.raises(BadToken):
            read(token, **changes)
    with pytest.raises(BadToken, match="another key"):
        read(token, key=b"l" * 32)
    with pytest.raises(BadToken, match="another key"):
        read(ROOT_TOKENS.sign(b"", CLAIMS), key=b"")  # a root without a key


def test_a_changed_token_is_refused() -> None:
    """Promise: no part of it can be changed, and no bytes but those of a token are accepted."""
    token = ROOT_TOKENS.sign(KEY, CLAIMS)
    for at in range(len(token)):
        changed = token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]
        try:
            found = read(changed)
        except BadToken:
            continue
        assert found == CLAIMS, "another spelling of the same bytes"
    other = ROOT_TOKENS.sign(KEY, msgspec.structs.replace(CLAIMS, epoch=8)).partition(".")[0]
    with pytest.raises(BadToken):
        read(other + "." + token.partition(".")[2])
    for junk in ("", "Basic eDp5", "sparklog-root ", "sparklog-root a.b", "sparklog-root ü.ü"):
        with pytest.raises(BadToken):
            read(junk)
    with pytest.raises(BadToken):
        read(token + "A" * 2_000)


def test_a_token_of_another_release_is_refused() -> None:
    """Promise: claims that this release does not know are not left out of consideration."""

    class Wider(RootClaims, frozen=True, kw_only=True):
        only: str = "topics.list"

    wider = Wider(**msgspec.structs.asdict(CLAIMS), only="status")
    with pytest.raises(BadToken, match="another release"):
        read(ROOT_TOKENS.sign(KEY, wider))
