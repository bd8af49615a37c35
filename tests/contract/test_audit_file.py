"""The audit file of a broker: clients of both listeners, and changes at the root."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.flight import rights
from sparklog.broker.flight.audited import AUDITED as AUDITED_ACTIONS
from sparklog.broker.kafka.audited import AUDITED as AUDITED_APIS
from sparklog.broker.kafka.registry import APIS
from sparklog.security import users
from sparklog.security.acl import Acl, Operation, ResourceType
from sparklog.security.credentials import Security
from sparklog.settings import FlightSettings, KafkaSettings, SecuritySettings
from sparklog.storage.objects import LocalStore
from tests.support.acls import acl
from tests.support.kafkas import broker
from tests.support.secured import follow_acls
from tests.support.users import PASSWORD, add_alice, change_users
from tests.support.waiting import wait_until

ALICE = "User:alice"


class World:
    """A broker at which alice logs in, and its audit file."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "root")
        self.path = folder / "audit.json"
        self.password = folder / "password"
        self.password.write_text(PASSWORD)
        self.agent: Agent

    @contextlib.contextmanager
    def serving(self) -> Iterator[Agent]:
        """Yields the broker, which is stopped then."""
        with broker(
            Path(self.store.root),
            id=7,
            kafka=KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0"),
            flight=FlightSettings(listen="SASL_PLAINTEXT://127.0.0.1:0"),
            security=SecuritySettings(audit_file=str(self.path)),
        ) as self.agent:
            yield self.agent

    def lines(self) -> list[dict[str, Any]]:
        complete = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""
        return [json.loads(each) for each in complete.splitlines()]

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """Returns the first line that has these fields."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [each for each in self.lines() if wanted.items() <= each.items()]
            return bool(found)

        wait_until(is_there, f"a line with {wanted}")
        return found[0]

    def admin(self, password: str = PASSWORD) -> AdminClient:
        return AdminClient(
            {
                "bootstrap.servers": self.agent.kafka_address,
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "alice",
                "sasl.password": password,
                "socket.timeout.ms": 5_000,
            }
        )

    def connect(self, user: str = "alice") -> sparklog.Log:
        security = Security(user=user, password_file=str(self.password))
        return sparklog.connect(self.agent.address, security=security)


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    world = World(tmp_path)
    add_alice(world.store)
    return world


def everything(principal: str = ALICE) -> list[Acl]:
    """Returns ACLs that allow a user everything."""
    wanted = (ResourceType.CLUSTER, "kafka-cluster"), (ResourceType.TOPIC, "*")
    return [acl(*each, Operation.ALL, principal=principal) for each in wanted]


def test_clients_of_kafka_are_audited(world: World) -> None:
    """Promise: logins, refusals and administrative requests, with user, address and outcome."""
    with world.serving():
        follow_acls(world.agent, *everything())
        admin = world.admin()
        entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
        retention = ConfigResource("topic", "orders", incremental_configs=[entry])
        for request in (  # one after the other: librdkafka may send them in another order
            lambda: admin.create_topics([NewTopic("orders", 2), NewTopic("bad name", 1)]),
            lambda: admin.create_partitions([NewPartitions("orders", 3)]),
            lambda: admin.incremental_alter_configs([retention]),
            lambda: admin.delete_topics(["orders"]),
        ):
            for future in request().values():
                with contextlib.suppress(KafkaException):
                    future.result(10)
        with pytest.raises(KafkaException):
            world.admin("wrong").list_topics(timeout=2)
        follow_acls(world.agent)
        refused = admin.create_topics([NewTopic("orders", 1)])
        with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
            refused["orders"].result(10)
        host, listener = "127.0.0.1", "SASL_PLAINTEXT"
        login = world.wait_for(event="login", outcome="success", principal=ALICE)
        assert (login["host"], login["listener"], login["mechanism"]) == (host, listener, "PLAIN")
        assert login["broker"] == 7
        failed = world.wait_for(event="login", outcome="failure", principal=ALICE)
        assert "the password is wrong" in failed["reason"]
        world.wait_for(
            event="refusal",
            outcome="refused",
            principal=ALICE,
            operation="CREATE",
            resource="TOPIC",
            name="orders",
            host=host,
        )
        of_alice = {"event": "request", "principal": ALICE, "host": host, "listener": listener}
        world.wait_for(**of_alice, action="CreateTopics", names=["orders"], outcome="NONE")
        world.wait_for(
            **of_alice, action="CreateTopics", names=["bad name"], outcome="INVALID_TOPIC_EXCEPTION"
        )
        world.wait_for(
            **of_alice,
            action="CreatePartitions",
            outcome="NONE",
            details={"orders": {"partitions": 3}},
        )
        world.wait_for(
            **of_alice,
            action="IncrementalAlterConfigs",
            resource="TOPIC",
            details={"orders": {"retention.ms": "1000"}},
        )
        world.wait_for(**of_alice, action="DeleteTopics", names=["orders"], outcome="NONE")
    requests = [each for each in world.lines() if each["event"] == "request"]
    assert all(each["outcome"] != "TOPIC_AUTHORIZATION_FAILED" for each in requests)
    assert PASSWORD not in world.path.read_text()


def test_native_clients_and_programs_at_the_root_are_audited(world: World) -> None:
    """Promise: the same for Flight; the name of a program with the root's keys is a claim."""
    with world.serving():
        follow_acls(world.agent, *everything())
        with world.connect() as log:
            log.create_topic("orders", 1)
            log.delete_topic("orders")
            with pytest.raises(errors.UnknownTopic):
                log.delete_topic("orders")
        with pytest.raises(errors.NotAuthenticated), world.connect("mallory") as log:
            log.topics()
        with sparklog.connect(str(world.store.root)) as log:
            log.create_topic("at-the-root", 1)
        of_alice = {"event": "request", "principal": ALICE, "host": "127.0.0.1"}
        world.wait_for(event="login", outcome="success", mechanism="SCRAM-SHA-256")
        world.wait_for(event="login", outcome="failure", principal="User:mallory")
        world.wait_for(**of_alice, action="topics.create", names=["orders"], outcome="NONE")
        world.wait_for(**of_alice, action="topics.delete", names=["orders"], outcome="NONE")
        world.wait_for(**of_alice, action="topics.delete", outcome="UnknownTopic")
        created = world.wait_for(event="request", action="topics.create", names=["at-the-root"])
        assert created["claimed_principal"].startswith("Root:")
        assert "principal" not in created
        called = world.wait_for(event="root")
        assert called["claimed_principal"] == created["claimed_principal"]


def test_changes_at_the_root_are_audited(world: World) -> None:
    """Promise: a running broker notes each version with its author, also several between two looks;
    one that starts notes those that were made while it was down.
    """
    with world.serving() as agent:
        with agent._access.watch._lock:  # no look meanwhile
            change_users(world.store, users.disabled("alice", True))
            change_users(world.store, users.disabled("alice", False))
        disabled = world.wait_for(event="change", users={"alice": "disabled"})
        world.wait_for(event="change", users={"alice": "enabled"})
        assert disabled["claimed_principal"] == "Root:test"
    before = len(world.lines())
    change_users(world.store, users.removed("alice"))
    with world.serving():
        change, started = world.wait_for(event="change", users={"alice": "removed"}), {}
        wait_until(lambda: world.lines()[-1]["event"] == "started", "the broker has started")
        started = world.lines()[-1]
    assert started["version"] == change["version"]
    assert [each["event"] for each in world.lines()[before:]] == ["change", "started"]


def test_requests_that_administer_are_complete() -> None:
    """Promise: every request and action that changes something is audited, or is listed here."""
    of_records_and_groups = {
        "produce", "fetch", "offset_commit", "join_group", "heartbeat", "leave_group", "sync_group",
        "init_producer_id", "sasl_handshake", "sasl_authenticate",
    }  # fmt: skip
    versions_of_the_state = {
        "create_acls", "delete_acls", "alter_client_quotas", "alter_user_scram_credentials",
    }  # fmt: skip
    without_effect = {"alter_replica_log_dirs", "elect_leaders"}
    only_read = {"metadata", "api_versions", "find_coordinator", "offset_fetch"}
    for key, api in APIS.items():
        if api.name.startswith(("describe_", "list_", "offset_for_")):
            only_read.add(api.name)
        others = of_records_and_groups | versions_of_the_state | without_effect | only_read
        assert (key in AUDITED_APIS) != (api.name in others), api.name
    others = {
        "batches.append_staged", "cluster", "cluster.describe", "figures", "groups.commit",
        "groups.describe", "groups.find", "groups.heartbeat", "groups.join", "groups.leave",
        "groups.list", "groups.offsets", "groups.sync", "offsets.for_times", "offsets.lag",
        "producers.new", "publish.now", "root.prove", "status", "tokens.new", "topics.describe",
        "topics.list", "topics.schemas",
    }  # fmt: skip
    assert AUDITED_ACTIONS.keys() | others == rights.RIGHTS.keys()
    assert not AUDITED_ACTIONS.keys() & others


def test_a_broker_without_an_audit_has_none(tmp_path: Path) -> None:
    """Promise: the default costs no thread and no wrapped action."""
    with broker(tmp_path) as agent:
        assert agent._access.audit is None
        assert agent._access.authorization.audit is None
        assert agent.listeners.kafka is not None
        assert agent.listeners.kafka.audit is None
