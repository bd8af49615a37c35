"""Several named listeners of a broker: each client gets the addresses of the one it came by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import msgspec
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from sparklog import errors, limits, listeners
from sparklog.broker.agent import Agent
from sparklog.broker.live_members import LiveMembers
from sparklog.clock import SystemClock
from sparklog.settings import (
    BrokerSettings,
    ClusterSettings,
    FlightSettings,
    KafkaSettings,
    LivenessSettings,
    TlsSettings,
)
from sparklog.storage.objects import MemoryStore
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

SECONDS: Final = 30.0
BOTH: Final = "IN=PLAINTEXT://127.0.0.1:0,OUT=SSL://127.0.0.1:0"


class Cluster:
    """Members of one root in memory."""

    def __init__(self, authority: Authority) -> None:
        self._files = authority.sign("broker")
        self.ca = authority.path
        self.store = MemoryStore(SystemClock())
        self.agents: dict[int, Agent] = {}

    def start(self, broker: int, listen: str = BOTH) -> Agent:
        """Starts a member, and waits until all members know each other."""
        has_tls = "SSL" in listen
        certificate, key = self._files if has_tls else ("", "")
        settings = BrokerSettings(
            root="memory://x",
            id=broker,
            flight=FlightSettings(listen="127.0.0.1:0"),
            kafka=KafkaSettings(listen=listen),
            tls=TlsSettings(certificate=certificate, key=key),
            liveness=LivenessSettings(heartbeat_seconds=0.2, dead_after_seconds=2.0),
            cluster=ClusterSettings(join=True),
        )
        agent = self.agents[broker] = Agent(settings, store=self.store)
        agent.start()
        for each in self.agents.values():
            known = each.parts.broker.members
            wait_until(partial(self._are_all_in, known), "the members agree")
        return agent

    def _are_all_in(self, known: LiveMembers) -> bool:
        return known.up().keys() == self.agents.keys()

    def address(self, broker: int, name: str) -> str:
        """The address of a listener."""
        open_now = self.agents[broker].listeners.kafka_open
        return next(each.address for each in open_now if each.name == name)

    def client(self, broker: int, name: str) -> dict[str, Any]:
        """Settings of librdkafka that name a listener of one member."""
        found: dict[str, Any] = {"bootstrap.servers": self.address(broker, name)}
        if name == "OUT":
            found |= {"security.protocol": "SSL", "ssl.ca.location": self.ca}
        return found

    def brokers(self, broker: int, name: str) -> dict[int, str]:
        """The brokers in the metadata that a client of that listener gets."""
        found = AdminClient(self.client(broker, name)).list_topics(timeout=SECONDS).brokers
        return {number: f"{each.host}:{each.port}" for number, each in found.items()}


@pytest.fixture(name="cluster")
def _cluster(authority: Authority) -> Iterator[Cluster]:
    with ExitStack() as ending:
        cluster = Cluster(authority)
        yield cluster
        for each in cluster.agents.values():
            ending.callback(each.stop)


def test_clients_stay_at_the_listener_that_they_came_by(cluster: Cluster) -> None:
    """Promise: each listener leads to all members, and records are the same through both."""
    for broker in (1, 2):
        cluster.start(broker)
    for name in ("IN", "OUT"):
        expected = {broker: cluster.address(broker, name) for broker in (1, 2)}
        assert cluster.brokers(1, name) == cluster.brokers(2, name) == expected
    admin = AdminClient(cluster.client(1, "IN"))
    admin.create_topics([NewTopic("t", 4)])["t"].result(SECONDS)
    for name in ("IN", "OUT"):
        client = cluster.client(1, name) | {"enable.idempotence": True}
        producer = confluent_kafka.Producer(client)
        for partition in range(4):
            producer.produce("t", name, partition=partition)
        assert producer.flush(SECONDS) == 0
    for name in ("IN", "OUT"):
        consumer = confluent_kafka.Consumer(cluster.client(2, name) | {"group.id": name})
        consumer.assign([confluent_kafka.TopicPartition("t", number, 0) for number in range(4)])
        found = Counter(each.value() for each in consumer.consume(8, SECONDS))
        consumer.close()
        assert found == {b"IN": 4, b"OUT": 4}


def test_a_member_without_the_listener_is_not_told(cluster: Cluster) -> None:
    """Its partitions have no leader for those clients, as in Kafka, and the others do."""
    cluster.start(1)
    cluster.start(2, "IN=PLAINTEXT://127.0.0.1:0")
    assert cluster.brokers(1, "OUT") == {1: cluster.address(1, "OUT")}
    assert cluster.brokers(1, "IN").keys() == {1, 2}
    admin = AdminClient(cluster.client(1, "OUT"))
    admin.create_topics([NewTopic("t", 4)])["t"].result(SECONDS)

    def leaders() -> set[tuple[int, str]]:
        found = admin.list_topics("t", timeout=SECONDS).topics["t"].partitions.values()
        return {(each.leader, each.error.name() if each.error else "") for each in found}

    wait_until(lambda: len(leaders()) == 2, "both members lead partitions")
    assert leaders() == {(1, ""), (-1, "LISTENER_NOT_FOUND")}


def test_several_listeners_of_a_member_need_level_2(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of an older release would not know which address to tell; one listener is fine."""
    monkeypatch.setattr(limits, "LEVEL", 1)
    first = cluster.start(1, "IN=PLAINTEXT://127.0.0.1:0")
    membership = first._meta.current.brokers[1].membership
    assert membership is not msgspec.UNSET
    assert membership.listeners == {}
    monkeypatch.setattr(limits, "LEVEL", 2)
    with pytest.raises(errors.NeedsFeatureLevel, match="cluster upgrade"):
        cluster.start(2)
    del cluster.agents[2]
    cluster.start(2, "IN=PLAINTEXT://127.0.0.1:0")
    assert cluster.brokers(2, "IN").keys() == {1, 2}


def test_status_knows_all_listeners(cluster: Cluster) -> None:
    """Each with the address that its clients connect to."""
    agent = cluster.start(1)
    (broker,) = agent.parts.broker.cluster().brokers
    assert listeners.parse(broker.kafka_listeners) == tuple(agent.listeners.kafka_open)
    assert broker.kafka == cluster.address(1, "IN")


def test_a_taken_port_is_named(tmp_path: Path, authority: Authority) -> None:
    """Also that of a second listener; nothing stays bound."""
    certificate, key = authority.sign("other")
    first = BrokerSettings(
        root=str(tmp_path / "a"),
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen=BOTH),
        tls=TlsSettings(certificate=certificate, key=key),
    )
    with Agent(first) as agent:
        taken = agent.listeners.kafka_open[1]
        second = msgspec.structs.replace(
            first,
            root=str(tmp_path / "b"),
            kafka=KafkaSettings(listen=f"IN=PLAINTEXT://127.0.0.1:0,{taken}"),
        )
        with pytest.raises(errors.BadOption, match=f"{taken.port}") as refused:
            Agent(second).start()
        assert refused.value.option == "kafka.listen"
