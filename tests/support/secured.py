"""Brokers whose clients log in, and changes of their users, ACLs and quotas in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog.broker.agent import Agent
from sparklog.client.connection import ask
from sparklog.security import users
from sparklog.security.acl import Acl
from sparklog.security.credentials import Security
from sparklog.security.policies import with_ca
from sparklog.security.quota import QuotaKey
from sparklog.security.quotas import changed, entity_of
from sparklog.security.state import Mode
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, TlsSettings
from sparklog.storage.objects import LocalStore, open_store
from tests.support.acls import set_acls
from tests.support.certificates import Authority
from tests.support.users import PASSWORD, change_users
from tests.support.waiting import wait_until


class Secured:
    """A broker that is not started yet, its user alice, and files for her to log in with."""

    def __init__(self, folder: Path, authority: Authority, password: str = PASSWORD) -> None:
        self.root = folder / "root"
        self.store = open_store(str(self.root), {})
        change_users(self.store, users.added("alice", users.credentials_of(password)))
        change_users(self.store, with_ca(Path(authority.path).read_text()))
        certificate, key = authority.sign("broker")
        self.password = folder / "alice.password"
        self.password.write_text(password + "\n")
        self.security = Security(ca=authority.path, user="alice", password_file=str(self.password))
        self.anonymous = Security(ca=authority.path)
        self.agent = Agent(
            BrokerSettings(
                root=str(self.root),
                flight=FlightSettings(listen="SASL_SSL://127.0.0.1:0"),
                kafka=KafkaSettings(listen=""),
                tls=TlsSettings(certificate=certificate, key=key),
            ),
            ask=ask,
        )

    @property
    def address(self) -> str:
        return self.agent.address

    def connect(self, security: Security | None = None) -> sparklog.Log:
        return sparklog.connect(self.address, security=security or self.security)

    def set_acls(self, *acls: Acl, mode: Mode = Mode.ENFORCE, **more: Any) -> None:
        """Replaces the ACLs, and has the broker go by them, if it is running."""
        set_acls(self.store, acls, mode=mode, **more)
        if self.agent._is_serving:
            see(self.agent)


def see(agent: Agent) -> None:
    """Has a broker look at its users, ACLs and quotas, as it does ten times a second."""
    agent._meta.refresh()
    agent._access.watch.refresh()


def follow_acls(agent: Agent, *acls: Acl, mode: Mode = Mode.ENFORCE) -> None:
    """Replaces the ACLs and the policy of a root, and has its broker go by them."""
    set_acls(LocalStore(Path(agent.settings.root)), acls, mode=mode)
    see(agent)


def set_quota(agent: Agent, parts: Mapping[str, str | None], **values: float | None) -> None:
    """Changes quotas of an entity, and has the broker go by them."""
    entity = entity_of(parts)
    wanted = {key: None if value is None else float(value) for key, value in values.items()}
    change_users(LocalStore(Path(agent.settings.root)), changed(entity, wanted))

    def is_in_force() -> bool:
        see(agent)
        found = agent._access.quotas._seen.get(entity, {})
        return all(found.get(QuotaKey(key)) == value for key, value in wanted.items())

    wait_until(is_in_force, "the quota is in force")


def forget_use(agent: Agent) -> None:
    """Drops what clients have used of their quotas, with their debts."""
    quotas = agent._access.quotas
    for rates in (quotas._bytes, quotas._mutations, quotas._connections):
        for each in (rates._named, rates._names, rates._of_groups):
            each.clear()


def flight_agent(
    request: pytest.FixtureRequest, folder: Path, *, has_login: bool
) -> tuple[Agent, *tuple[str, ...]]:
    """Returns a broker for Flight clients of others, which ends with the test.

    With a login, the file of its CA, and a user with the password, follow; the user may do
    everything.
    """
    if not has_login:
        found: Agent = request.getfixturevalue("agent")
        return (found,)
    authority = Authority(folder)
    secured = Secured(folder, authority)
    secured.set_acls(super_users=("User:alice",))
    secured.agent.start()
    request.addfinalizer(secured.agent.stop)
    return secured.agent, authority.path, "alice", PASSWORD


def check_nothing_is_held(agent: Agent) -> None:
    """Waits until the Flight listener serves no call; none may have left memory behind."""
    listener = agent.listeners.flight
    assert listener is not None
    wait_until(lambda: listener.open_calls == 0, "no call is served any more")
    assert listener._server._calls == 0
    assert listener._server.message_memory._held_bytes == 0
