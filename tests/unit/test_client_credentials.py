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
