"""Logins of native clients: when they happen, and where tokens are sent.

Promises: a token is renewed long before it ends, by few logins even while they fail; a client that
has logged in over TLS sends its token nowhere else; a child of a fork can log in.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from sparklog import errors
from sparklog.client import credentials
from sparklog.client.credentials import ClientCredentials
from sparklog.clock import ManualClock
from sparklog.security.credentials import Security


class Broker:
    """Answers logins, unless they fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logins = itertools.count()
        self.count = 0
        self.fails = False
        monkeypatch.setattr(credentials, "log_in", self.log_in)

    def log_in(self, _address: str, _security: Security) -> str:
        self.count += 1
        if self.fails:
            raise errors.NotAuthenticated(reason="the user name or the password is wrong")
        return f"Bearer {next(self.logins)}"


@pytest.fixture(name="broker")
def _broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


@pytest.fixture(name="security")
def _security(tmp_path: Path) -> Security:
    (tmp_path / "password").write_text("secret")
    return Security(user="alice", password_file=str(tmp_path / "password"))


def test_a_token_is_renewed_by_few_logins(broker: Broker, security: Security) -> None:
    """Each call would otherwise wait for a login that fails, once the password has changed."""
    clock = ManualClock()
    client = ClientCredentials(security, clock=clock)
    source = client.token_source("tls://a:1")
    other = client.token_source("tls://b:1")
    assert source is not None
    assert other is not None
    assert (source(), other(), broker.count) == ("Bearer 0", "Bearer 0", 1)
    clock.advance(1_201.0)
    assert (source(), other(), broker.count) == ("Bearer 1", "Bearer 1", 2)
    clock.advance(1_201.0)
    broker.fails = True
    assert [source() for _ in range(10)] == ["Bearer 1"] * 10
    assert broker.count == 3
    clock.advance(61.0)
    broker.fails = False
    assert (source(), broker.count) == ("Bearer 2", 4)
    renewed = client.new_token_source("tls://a:1")
    assert renewed is not None
    assert (renewed(), broker.count) == ("Bearer 3", 5)


def test_a_token_that_was_got_over_tls_stays_there(broker: Broker, security: Security) -> None:
    """The address of another broker may be a loopback address, of any program on this machine."""
    client = ClientCredentials(security)
    assert client.token_source("127.0.0.1:1") is not None
    assert client.token_source("tls://a:1") is not None
    with pytest.raises(errors.BrokerNotTrusted, match="has logged in over TLS"):
        client.token_source("127.0.0.1:1")
    assert broker.count == 1


def test_a_child_of_a_fork_can_log_in(broker: Broker, security: Security) -> None:
    """Although another thread of the parent was logging in."""
    client = ClientCredentials(security)
    client._first_login.acquire()
    client.after_fork()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(client.token_source("tls://a:1")))
    thread.start()
    thread.join(10.0)
    assert len(found) == 1
    assert broker.count == 1


# ------------------------------------------------------------------------------ token files


def test_a_token_in_a_file_is_sent_with_each_call(broker: Broker, tmp_path: Path) -> None:
    """A file that is replaced, also by a symbolic link, is read again; no login is needed."""
    one, two, link = (tmp_path / name for name in ("one", "two", "link"))
    one.write_text("a.b.c\n")
    two.write_text("d.e.f\n")
    link.symlink_to(one)
    client = ClientCredentials(Security(token_file=str(link)))
    source = client.token_source("tls://a:1")
    assert source is not None
    assert source() == "Bearer a.b.c"
    link.unlink()
    assert source() == "Bearer a.b.c", "it is just being replaced"
    link.symlink_to(two)
    assert source() == "Bearer d.e.f"
    two.write_text("")
    assert source() == "Bearer d.e.f"
    assert broker.count == 0
    with pytest.raises(errors.BrokerNotTrusted, match="has logged in over TLS"):
        client.token_source("127.0.0.1:1")


def test_a_token_in_a_file_that_is_refused(tmp_path: Path) -> None:
    """It is tried once more, as it may have just been replaced, and then until the file changes."""
    path = tmp_path / "token"
    path.write_text("a.b.c")
    client = ClientCredentials(Security(token_file=str(path)))
    assert client.token_source("tls://a:1") is not None
    assert client.new_token_source("tls://a:1") is not None
    assert client.new_token_source("tls://a:1") is None
    path.write_text("longer.b.c")
    source = client.new_token_source("tls://a:1")
    assert source is not None
    assert source() == "Bearer longer.b.c"


@pytest.mark.parametrize("content", [None, b"", b"\n", b"a b", b"\xff", "é".encode(), b"a\nb"])
def test_files_without_a_token(tmp_path: Path, content: bytes | None) -> None:
    """The error names the file, before a broker is asked."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    client = ClientCredentials(Security(token_file=str(path)))
    with pytest.raises(errors.BadOption, match="token_file"):
        client.token_source("tls://a:1")


def test_tokens_of_an_issuer_need_tls(tmp_path: Path) -> None:
    """They are not sent where they could be read on the way; and a token names its client."""
    path = tmp_path / "token"
    path.write_text("a.b.c")
    security = Security(token_file=str(path))
    with pytest.raises(errors.BadOption, match="a login needs TLS"):
        ClientCredentials(security).token_source("broker.example.org:1")
    with pytest.raises(errors.BadOption, match="leave out user, or token_file"):
        Security(token_file=str(path), user="alice")
    assert Security.from_environment({"SPARKLOG_CLIENT_TOKEN_FILE": str(path)}) == security
