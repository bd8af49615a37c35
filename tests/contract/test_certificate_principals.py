"""Clients that are known by their certificates, at a real broker.

Promises: the subject of a certificate is a principal that ACLs allow or deny, the same at both
listeners; a user of that name is only meant if it lists the method; a session ends when the user is
disabled, and when the certificate expires.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import confluent_kafka
import pytest
from structlog.testing import capture_logs

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.kafka.reauthentication import SESSION_ENDED
from sparklog.client.connection import ask
from sparklog.security import users
from sparklog.security.acl import Operation, ResourceType
from sparklog.security.credentials import Security
from sparklog.security.login_method import LoginMethod
from sparklog.security.policies import with_ca
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    KafkaSettings,
    SecuritySettings,
    TlsSettings,
)
from sparklog.storage.objects import Store, open_store
from tests.support.acls import acl, set_acls
from tests.support.certificates import Authority
from tests.support.users import change_users
from tests.support.waiting import wait_until

APP: Final = "CN=app,O=Tea"
SHORT_SECONDS: Final = 3.0
"""For which a certificate is valid that expires in a test: TLS counts whole seconds."""


@dataclass(frozen=True)
class World:
    """A broker with TLS listeners that ask for certificates; ACLs allow `APP` the topic tea."""

    authority: Authority
    agent: Agent
    store: Store

    def kafka(self, files: tuple[str, str] | None = None) -> confluent_kafka.Consumer:
        """Returns a client with a certificate and its key."""
        own = {} if files is None else dict(zip(("certificate", "key"), files, strict=True))
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.agent.kafka_address,
                "security.protocol": "SSL",
                "ssl.ca.location": self.authority.path,
                "group.id": "unused",
                "log_level": 0,
                **{f"ssl.{name}.location": path for name, path in own.items()},
            }
        )

    def flight(self, files: tuple[str, str] | None = None) -> sparklog.Log:
        """Returns a client with a certificate and its key."""
        own = {} if files is None else dict(zip(("certificate", "key"), files, strict=True))
        return sparklog.connect(
            self.agent.address, security=Security(ca=self.authority.path, **own)
        )

    def topics(self, files: tuple[str, str] | None = None) -> tuple[set[str], set[str]]:
        """Returns the topics that a client sees as a Kafka and as a native one."""
        listed = self.kafka(files).list_topics(timeout=10).topics
        with self.flight(files) as log:
            return {*listed}, {*log.topics()}

    def change(self, what: users.Change) -> None:
        change_users(self.store, what)


@pytest.fixture(name="app", scope="module")
def _app(authority: Authority) -> tuple[str, str]:
    return authority.sign("app", is_client=True, organization="Tea")


@pytest.fixture(name="world")
def _world(tmp_path: Path, authority: Authority) -> Iterator[World]:
    root = tmp_path / "root"
    store = open_store(str(root), {})
    tea = [
        acl(ResourceType.TOPIC, "tea", each, principal=f"User:{APP}")
        for each in (Operation.CREATE, Operation.READ, Operation.WRITE)
    ]
    set_acls(store, tea)
    change_users(store, with_ca(Path(authority.path).read_text()))
    certificate, key = authority.sign("broker")
    tls = TlsSettings(certificate=certificate, key=key, ca=authority.path, client_auth="requested")
    settings = BrokerSettings(
        root=str(root),
        flight=FlightSettings(listen="SSL://127.0.0.1:0"),
        kafka=KafkaSettings(listen="SSL://127.0.0.1:0"),
        tls=tls,
        security=SecuritySettings(audit_file=str(tmp_path / "audit.json")),
    )
    with Agent(settings, ask=ask) as agent, sparklog.connect(root) as log:
        for name in ("tea", "coffee"):
            log.create_topic(name, partitions=1)
        yield World(authority, agent, store)


def test_the_subject_is_the_principal(world: World, app: tuple[str, str], tmp_path: Path) -> None:
    """ACLs allow one certificate its topic; another one, and no certificate, see nothing.

    The audit has the logins.
    """
    assert world.topics(app) == ({"tea"}, {"tea"})
    other = world.authority.sign("app-2", is_client=True, organization="Tea")
    assert world.topics(other) == (set(), set())
    with pytest.raises(errors.NotAuthenticated, match="allow nothing without a login"):
        world.topics()
    with world.flight(app) as log, log.producer() as producer:
        assert producer.send("tea", b"green").result().offset == 0
        with pytest.raises(errors.TopicNotAuthorized, match=f"User:{APP}"):
            producer.send("coffee", b"black").result()
    lines = [
        f'"mechanism":"SSL","principal":"User:{subject}","host":"127.0.0.1"'
        for subject in (APP, "CN=app-2,O=Tea")
    ]
    audit = tmp_path / "audit.json"
    wait_until(
        lambda: min(map(audit.read_text().count, lines)) >= 2, "lines of logins at both listeners"
    )


def is_cut(kafka: confluent_kafka.Consumer) -> bool:
    """Returns whether a client has lost its connection, and gets no other one."""
    try:
        kafka.list_topics(timeout=1)
    except confluent_kafka.KafkaException:
        return True
    return False


def test_a_user_of_that_name_lists_the_method(world: World, app: tuple[str, str]) -> None:
    """A certificate does not make its owner a user that logs in otherwise; that user may permit it.

    Disabling the user ends the connections by certificate too.
    """
    kafka, flight = world.kafka(app), world.flight(app)
    assert {*kafka.list_topics(timeout=10).topics} == {"tea"}
    with capture_logs() as logs:
        world.change(users.added(APP, users.credentials_of("secret")))
        wait_until(lambda: is_cut(kafka), "the connection is cut")
        with pytest.raises(errors.NotAuthenticated, match="does not log in by certificate"):
            flight.topics()
        assert any("does not log in by certificate" in e.get("reason", "") for e in logs)
        world.change(users.with_methods(APP, [LoginMethod.CERTIFICATE]))
        wait_until(lambda: world.topics(app) == ({"tea"}, {"tea"}), "is permitted")
        assert {*kafka.list_topics(timeout=10).topics} == {"tea"}
        world.change(users.disabled(APP, True))
        wait_until(lambda: is_cut(kafka), "the connection is cut")
        with pytest.raises(errors.NotAuthenticated, match="is disabled"):
            flight.topics()
    flight.close()


def test_a_session_ends_with_the_certificate(world: World) -> None:
    """A Kafka connection is cut, and a native client's stream and calls are refused."""
    days = SHORT_SECONDS / 86_400
    files = world.authority.sign("app", is_client=True, organization="Tea", days=days)
    with capture_logs() as logs, world.flight(files) as log:
        kafka = world.kafka(files)
        assert {*kafka.list_topics(timeout=10).topics} == {"tea"}
        ends = f"the certificate of User:{APP} has expired", SESSION_ENDED  # idle, or not

        def has_ended() -> bool:
            reasons = [each.get("reason", "") for each in logs]
            return any(end in reason for end in ends for reason in reasons)

        wait_until(has_ended, "the end of the connection")
        with pytest.raises(errors.SparklogError, match=r"certificate (has )?expired"):
            log.topics()


def test_a_certificate_for_servers_names_nobody(world: World) -> None:
    """Extended key usage: a broker's own certificate is none of a client."""
    with pytest.raises(errors.BrokerNotTrusted):
        world.flight(world.authority.sign("app-3"))
