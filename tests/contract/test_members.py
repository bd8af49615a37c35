"""Members of a cluster, each a whole broker: what clients of all kinds see of them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from kio.schema.errors import ErrorCode

import sparklog
from sparklog import connecting, errors, limits
from sparklog.broker import agent as agents
from sparklog.broker.access_control import AskWithCredentials
from sparklog.broker.agent import Agent
from sparklog.broker.broker import Broker, PendingAppend
from sparklog.broker.failover.handover import Handovers
from sparklog.broker.failover.reconciler import Reconciler
from sparklog.broker.kafka import leaders
from sparklog.broker.log import recovery
from sparklog.broker.log.histories import Histories
from sparklog.client import connection
from sparklog.clock import SystemClock
from sparklog.formats import flight_messages
from sparklog.jobs import targets
from sparklog.security.credentials import Credentials
from sparklog.settings import (
    BrokerSettings,
    ClusterSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    LogSettings,
    PublisherSettings,
)
from sparklog.sinks import commit as commits
from sparklog.sinks.options import to_topic
from sparklog.storage.metadata.leadership import inherited_by
from sparklog.storage.metadata.liveness import LeaderState, LeaderWatch, Sighting
from sparklog.storage.metadata.model import BrokerKind, ClusterMetadata, Epoch
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, MemoryStore, NoFaults, SyncFailed
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import BatchKind
from sparklog.storage.staging import manifest
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import payload
from tests.support.comparing import metadata_fields, name_of
from tests.support.kafkarequests import (
    CREATE_TOPICS,
    batch,
    create,
    create_fields,
    fetch_fields,
    produce,
    produce_fields,
)
from tests.support.kafkas import Frames, frames
from tests.support.waiting import wait_until

CLOCK = SystemClock()
PRODUCE, FETCH, METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER = 0, 1, 3, 10, 60


def until(is_reached: Callable[[], bool]) -> None:
    """Waits for a change that several members make together."""
    wait_until(is_reached, "the members agree")


def settings(broker: int, *, join: bool = True) -> BrokerSettings:
    """Settings of a member on any port, which is dead after two seconds of silence."""
    return BrokerSettings(
        root="memory://x",
        id=broker,
        flight=FlightSettings(listen="127.0.0.1:0"),
        kafka=KafkaSettings(listen="127.0.0.1:0"),
        liveness=LivenessSettings(heartbeat_seconds=0.2, dead_after_seconds=2.0),
        publisher=PublisherSettings(interval_seconds=0.2),
        janitor=JanitorSettings(interval_seconds=0.2),
        log=LogSettings(level="error"),
        cluster=ClusterSettings(join=join, rack=f"rack {broker}"),
    )


class Members:
    """Members of one root in memory, by id."""

    def __init__(self, *, is_local: bool = False, ask: AskWithCredentials | None = None) -> None:
        self.ask = ask
        self.store = MemoryStore(CLOCK, is_local=is_local, has_files=is_local)
        self.agents: dict[int, Agent] = {}

    def start(self, broker: int) -> Agent:
        agent = self.agents[broker] = Agent(settings(broker), store=self.store, ask=self.ask)
        agent.start()
        return agent

    def wait_for_members(self, agent: Agent) -> None:
        """Waits until a member knows all others."""
        core = agent.parts.broker
        until(lambda: core.members.up().keys() == self.agents.keys())

    def wait_for_topic(self, agent: Agent, topic: str) -> None:
        """Waits until a member serves a topic that another one has created."""
        core = agent.parts.broker
        until(lambda: core.topics.exists(topic))

    @property
    def metadata(self) -> ClusterMetadata:
        return MetadataStore(self.store, clock=CLOCK).reload()

    @property
    def addresses(self) -> str:
        return ",".join(agent.address for agent in self.agents.values())

    def leaders(self, topic: str) -> tuple[int, ...]:
        return self.metadata.topics[topic].leaders

    def kill(self, broker: int) -> None:
        self.agents.pop(broker).crash()


@contextlib.contextmanager
def members(
    *brokers: int, is_local: bool = False, ask: AskWithCredentials | None = None
) -> Iterator[Members]:
    """Runs members with these ids, which send requests to each other by `ask`."""
    found = Members(is_local=is_local, ask=ask)
    try:
        for broker in brokers:
            found.start(broker)
        for agent in found.agents.values():
            found.wait_for_members(agent)
        yield found
    finally:
        for agent in found.agents.values():
            agent.stop()


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[Members]:
    with members(1, 2, 3) as found:
        yield found


def values(log: sparklog.Log, topic: str, count: int) -> Counter[bytes]:
    """Reads so many values from the start of a topic."""
    found: Counter[bytes] = Counter()
    with log.consumer(topic) as consumer:
        while found.total() < count:
            for record in consumer.poll(timeout=10.0):
                found[record.value] += 1
    return found


def write(log: sparklog.Log, topic: str, wanted: range, partitions: int) -> None:
    """Writes numbers to the partitions in turn."""
    with log.producer() as producer:
        for number in wanted:
            producer.send(topic, b"%d" % number, partition=number % partitions)
        producer.flush(30.0)


def test_partitions_are_dealt_out(cluster: Members) -> None:
    """Each member leads its share of a new topic, and all of them tell the same."""
    with sparklog.connect(cluster.agents[2].address) as log:
        log.create_topic("t", 6)
        assert Counter(cluster.leaders("t")) == {1: 2, 2: 2, 3: 2}
        write(log, "t", range(60), 6)
        assert values(log, "t", 60) == Counter(b"%d" % n for n in range(60))
    for agent in cluster.agents.values():
        cluster.wait_for_topic(agent, "t")
        with sparklog.connect(agent.address) as log:
            leaders = [each.leader for each in log.describe("t").partitions]
            assert tuple(leaders) == cluster.leaders("t")


def test_a_member_serves_new_topics_while_its_loops_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A topic that another member creates meanwhile is not denied, and its partitions take records.

    The first start on a machine compiles the loops over Kafka's records, which takes many seconds.
    """
    with members(1) as cluster:
        starting = Agent(settings(2), store=cluster.store)
        written: list[Counter[bytes]] = []

        def ask() -> None:
            with sparklog.connect(cluster.agents[1].address) as log:
                log.create_topic("t", partitions=2)
            with sparklog.connect(starting.address) as log:
                write(log, "t", range(20), partitions=2)
                written.append(values(log, "t", 20))

        monkeypatch.setattr(agents, "compile_loops", ask)
        cluster.agents[2] = starting
        starting.start()
        assert written == [Counter(b"%d" % number for number in range(20))]
        assert {*cluster.leaders("t")} == {1, 2}


def test_kafka_clients_see_all(cluster: Members) -> None:
    """Brokers, racks and leaders are in the metadata of each, which names itself the controller."""
    assert cluster.metadata.controller != 2
    with frames(cluster.agents[2]) as client:
        create(client, "t", 3)
        found = client.ask(
            METADATA, 7, {"topics": [{"name": "t"}], "allow_auto_topic_creation": False}
        )
        described = client.ask(
            DESCRIBE_CLUSTER, 0, {"include_cluster_authorized_operations": False}
        )
    ports = {agent.kafka_address for agent in cluster.agents.values()}
    assert {f"{each.host}:{each.port}" for each in found.brokers} == ports
    assert {each.rack for each in found.brokers} == {"rack 1", "rack 2", "rack 3"}
    assert found.controller_id == described.controller_id == 2
    (topic,) = found.topics
    leaders = {each.partition_index: each.leader_id for each in topic.partitions}
    assert tuple(leaders[n] for n in range(3)) == cluster.leaders("t")
    assert {each.broker_id for each in described.brokers} == {1, 2, 3}


def test_partitions_are_reassigned() -> None:
    """Any broker has the leaders move partitions to the first broker that is named for each.

    A partition that cannot move is refused by itself, and records of the moved ones stay. A leader
    that hangs holds the request for a bounded time, whatever the client allows.
    """
    allowed: list[float] = []

    def ask(
        address: str,
        action: str,
        request: msgspec.Struct,
        *,
        timeout_seconds: float,
        credentials: Credentials | None = None,
    ) -> object:
        if action == "cluster.move":
            allowed.append(timeout_seconds)
        return connection.ask(
            address, action, request, timeout_seconds=timeout_seconds, credentials=credentials
        )

    with members(1, 2, ask=ask) as cluster, frames(cluster.agents[1]) as client:
        create(client, "t", 4)
        numbers = {broker: cluster.leaders("t").index(broker) for broker in (1, 2)}
        cluster.wait_for_topic(cluster.agents[2], "t")
        with sparklog.connect(cluster.agents[1].address) as log:
            write(log, "t", range(40), 4)
            wanted = {numbers[1]: (2,), numbers[2]: (1, 2), 9: (1,)}
            assert reassigned(client, "t", wanted) == {
                numbers[1]: "none",
                numbers[2]: "none",
                9: "unknown_topic_or_partition",
            }
            leaders = cluster.leaders("t")
            assert {leaders[numbers[1]], leaders[numbers[2]]} == {1, 2}
            assert (leaders[numbers[1]], leaders[numbers[2]]) == (2, 1)
            assert reassigned(client, "t", wanted | {9: None})[numbers[2]] == "none"
            assert cluster.leaders("t") == leaders
            assert [0.0 < each <= limits.ACTION_TIMEOUT_SECONDS for each in allowed] == [True]
            write(log, "t", range(40, 80), 4)
            assert values(log, "t", 80) == Counter(b"%d" % number for number in range(80))
        cluster.kill(2)
        until(lambda: {*cluster.leaders("t")} == {1})
        assert reassigned(client, "t", {0: (2,)}) == {0: "invalid_replica_assignment"}


def reassigned(
    client: Frames, topic: str, wanted: Mapping[int, Sequence[int] | None]
) -> dict[int, str]:
    """The errors of AlterPartitionReassignments, by partition."""
    partitions = [{"partition_index": n, "replicas": each} for n, each in wanted.items()]
    fields = {
        "timeout": dt.timedelta(milliseconds=2**31 - 1),
        "topics": [{"name": topic, "partitions": partitions}],
    }
    reply = client.ask(45, 0, fields)
    (found,) = reply.responses
    return {each.partition_index: name_of(each.error_code) for each in found.partitions}


def test_a_dead_member_is_replaced(cluster: Members) -> None:
    """Its partitions move to the others, with all records, and clients continue by themselves."""
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("t", 6)
        write(log, "t", range(60), 6)
        cluster.kill(2)
        write(log, "t", range(60, 120), 6)
        assert Counter(cluster.leaders("t")) == {1: 3, 3: 3}
        assert values(log, "t", 120) == Counter(b"%d" % n for n in range(120))


def test_a_dead_controller_is_replaced(cluster: Members) -> None:
    """Another member becomes the controller, and gives its partitions to both."""
    with frames(next(iter(cluster.agents.values()))) as client:
        create(client, "t", 6)
    controller = cluster.metadata.controller
    cluster.kill(controller)
    until(lambda: controller not in cluster.leaders("t"))
    assert cluster.metadata.controller != controller


def test_an_admin_client_outlives_the_broker_it_uses(cluster: Members) -> None:
    """The requests of librdkafka's AdminClient do not wait for a broker that has died.

    It asks for the controller only with new connections, and has one to the controller.
    """
    bootstrap = ",".join(agent.kafka_address for agent in cluster.agents.values())
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    controller = admin.describe_cluster().result(10.0).controller
    cluster.kill(controller.id)
    created = admin.create_topics([NewTopic("t", 3)], request_timeout=10.0)
    created["t"].result(20.0)
    assert len(cluster.leaders("t")) == 3


def test_the_last_member_leads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leads in the end all that three have led, and the logs of the others are closed."""
    monkeypatch.setattr(limits, "CONFIRM_AFTER_SECONDS", 0.1)
    with members(1, 2, 3) as cluster:
        with sparklog.connect(cluster.agents[3].address) as log:
            log.create_topic("t", 6)
            write(log, "t", range(60), 6)
            cluster.kill(1)
            until(lambda: 1 not in cluster.leaders("t"))
            cluster.kill(2)
            until(lambda: set(cluster.leaders("t")) == {3})
            write(log, "t", range(60, 66), 6)
            log.flush_to_table()
            assert values(log, "t", 66) == Counter(b"%d" % n for n in range(66))

        def has_left_others() -> bool:
            cluster.agents[3].parts.wal_cleaner.checkpoint()
            return not inherited_by(cluster.metadata, 3)

        until(has_left_others)
        assert {each.broker for each in cluster.metadata.open_epochs} == {3}


def test_a_member_that_stops_is_replaced_at_once(cluster: Members) -> None:
    """Its partitions move before it ends; when it returns, it gets partitions of new topics."""
    with sparklog.connect(cluster.agents[1].address) as log:
        log.create_topic("t", 6)
        write(log, "t", range(60), 6)
        cluster.agents.pop(2).stop()
        until(lambda: 2 not in cluster.leaders("t"))
        assert values(log, "t", 60).total() == 60
        cluster.wait_for_members(cluster.start(2))
        log.create_topic("u", 6)
    assert 2 in cluster.leaders("u")


def test_a_member_that_stops_names_the_new_leaders(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with them for a while, instead of closing connections under its clients."""
    monkeypatch.setattr("sparklog.broker.agent.REDIRECT_SECONDS", 5.0)
    with frames(cluster.agents[1]) as client:
        create(client, "t", 3)
    number = cluster.leaders("t").index(2)
    stopping = cluster.agents.pop(2)
    with frames(stopping) as client, ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stopping.stop)
        until(lambda: cluster.leaders("t")[number] != 2)
        leader = cluster.leaders("t")[number]
        wanted = leader, cluster.agents[leader].kafka_address
        reply = client.ask(PRODUCE, 10, produce_fields("t", number, batch([b"x"])))
        ((part,),) = (each.partition_responses for each in reply.responses)
        assert part.error_code == ErrorCode.not_leader_or_follower
        assert named_leader(reply, part) == wanted
        assert not stopped.done()
    stopped.result()


def test_others_read_the_log_of_a_member_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so before its partitions move, so that the move takes no longer than it must."""
    monkeypatch.setattr(limits, "PREPARE_SECONDS", 3.0)
    monkeypatch.setattr("sparklog.broker.agent.REDIRECT_SECONDS", 0.0)
    read: list[int] = []
    before: list[int] = []
    read_ahead, drain = Histories.read_ahead, Handovers.drain

    def note(histories: Histories, epoch: Epoch) -> None:
        read_ahead(histories, epoch)
        read.append(epoch.broker)

    def drain_and_note(handovers: Handovers, *values: Any, **named: Any) -> int:
        before.extend(read)
        return drain(handovers, *values, **named)

    with members(1, 2, 3, is_local=True) as cluster:
        with frames(cluster.agents[1]) as client:
            create(client, "t", 6)  # so that each of the others gets one
        monkeypatch.setattr(Histories, "read_ahead", note)
        monkeypatch.setattr(Handovers, "drain", drain_and_note)
        stopping = cluster.agents.pop(2)
        with frames(stopping):
            until(stopping.listeners.has_clients)
            stopping.stop()
        assert before == [2, 2]
        assert 2 not in cluster.leaders("t")


def test_a_member_without_clients_stops_at_once(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client has to learn the new leaders."""
    monkeypatch.setattr("sparklog.broker.agent.REDIRECT_SECONDS", 1_000.0)
    monkeypatch.setattr(limits, "PREPARE_SECONDS", 1_000.0)
    with frames(cluster.agents[1]) as client:
        create(client, "t", 3)
    stopping = cluster.agents.pop(2)
    kafka = stopping.listeners.kafka
    until(lambda: kafka is not None and not kafka.connection_count)
    stopping.stop()
    assert 2 not in cluster.leaders("t")


@pytest.mark.parametrize("in_group", [False, True])
def test_consumers_continue(cluster: Members, *, in_group: bool) -> None:
    """A consumer follows its partitions to other leaders, and its group to another coordinator."""
    found: Counter[bytes] = Counter()
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("t", 6)
        write(log, "t", range(60), 6)
        with log.consumer("t", group="g" if in_group else None) as consumer:

            def poll(count: int) -> None:
                while found.total() < count:
                    found.update(each.value for each in consumer.poll(timeout=20.0))

            poll(60)
            cluster.agents.pop(2).stop()
            write(log, "t", range(60, 120), 6)
            poll(120)
            cluster.kill(cluster.metadata.controller)
            write(log, "t", range(120, 180), 6)
            poll(180)
    assert found == Counter(b"%d" % number for number in range(180))


def test_groups_have_coordinators(cluster: Members) -> None:
    """Members of groups find their coordinator, and the next one when it dies, with its offsets."""
    names = [f"g{number}" for number in range(12)]
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("t", 3)
        write(log, "t", range(30), 3)
        for name in names:
            with log.consumer("t", group=name, auto_commit=False) as consumer:
                while len(consumer.poll(timeout=10.0)) == 0:
                    pass
            log.commit_group_offsets(name, {("t", 0): 4})
        coordinators = set(cluster.leaders("__consumer_offsets"))
        assert coordinators == {1, 2, 3}
        assert [each.group for each in log.groups()] == sorted(names)
        cluster.kill(1)
        until(lambda: 1 not in cluster.leaders("__consumer_offsets"))
        for name in names:
            assert log.group_offsets(name)["t", 0] == 4
    with frames(cluster.agents[2]) as client:
        found = client.ask(FIND_COORDINATOR, 1, {"key": names[0], "key_type": 0})
        assert found.node_id in (2, 3)


def test_producers_are_remembered(cluster: Members) -> None:
    """A retry of a batch that a dead leader has acked is a duplicate at its offset."""
    with frames(cluster.agents[1]) as client:
        create(client, "t", 3)
    number = cluster.leaders("t").index(2)
    data = batch([b"x"], producer_id=7_000, producer_epoch=0, base_sequence=0)

    def offset() -> int:
        """Sends the batch to the leader, which may not know yet that it is."""
        leader = cluster.agents.get(cluster.leaders("t")[number])
        if leader is not None:
            with contextlib.suppress(ConnectionError, AssertionError), frames(leader) as client:
                answer = produce(client, "t", number, data)
                return int(answer.base_offset)
        return -1

    until(lambda: offset() == 0)
    cluster.kill(2)
    until(lambda: cluster.leaders("t")[number] != 2)
    until(lambda: offset() == 0)
    with sparklog.connect(cluster.addresses) as log:
        assert log.describe("t").partitions[number].end == 1


def other_than(cluster: Members, leader: int) -> Agent:
    """A member that does not lead, and serves the topic."""
    found = next(agent for broker, agent in cluster.agents.items() if broker != leader)
    cluster.wait_for_topic(found, "t")
    return found


def fetch_of_any_version(topic: str, partition: int = 0) -> dict[str, Any]:
    """Fetch from the beginning of a partition."""
    return fetch_fields(topic, partition, 0) | {"forgotten_topics_data": (), "rack_id": ""}


def named_leader(reply: Any, part: Any) -> tuple[int, str]:
    """The leader that a reply names for a partition, and its address."""
    (node,) = reply.node_endpoints
    assert node.node_id == part.current_leader.leader_id
    return node.node_id, f"{node.host}:{node.port}"


def test_refusals_name_the_leader(cluster: Members) -> None:
    """A client that asks the wrong broker learns the leader and its address (KIP-951)."""
    with frames(cluster.agents[1]) as client:
        create(client, "t", 1)
    (leader,) = cluster.leaders("t")
    wanted = leader, cluster.agents[leader].kafka_address
    with frames(other_than(cluster, leader)) as client:
        reply = client.ask(PRODUCE, 10, produce_fields("t", 0, batch([b"x"])))
        ((part,),) = (each.partition_responses for each in reply.responses)
        assert part.error_code == ErrorCode.not_leader_or_follower
        assert part.current_leader.leader_epoch == 0
        assert named_leader(reply, part) == wanted
        older = client.ask(PRODUCE, 9, produce_fields("t", 0, batch([b"x"])))
        assert older.responses[0].partition_responses[0].error_code == part.error_code
        asked = metadata_fields(["t"])
        topic_id = client.ask(METADATA, 12, asked).topics[0].topic_id
        fields = fetch_of_any_version("t")
        fields["topics"][0]["topic_id"] = topic_id
        for version in (15, 16, 17):
            reply = client.ask(FETCH, version, fields)
            ((part,),) = (each.partitions for each in reply.responses)
            assert part.error_code == ErrorCode.not_leader_or_follower
            if version >= 16:
                assert named_leader(reply, part) == wanted


def test_kafka_clients_ask_for_what_another_broker_has_just_changed(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the newest answer on the same connection, though their broker had not heard yet."""
    monkeypatch.setattr(Reconciler, "tick", lambda _: None)  # only requests make a member look
    asked = metadata_fields(["t"])
    with contextlib.ExitStack() as closing:
        first, *others = [closing.enter_context(frames(cluster.agents[n])) for n in (1, 2, 3)]
        for client in others:
            assert client.ask(METADATA, 12, asked).topics[0].partitions == ()
        create(first, "t", 3)
        (found,) = others[0].ask(METADATA, 12, asked).topics
        assert sorted(each.leader_id for each in found.partitions) == [1, 2, 3]
        (again,) = others[1].ask(CREATE_TOPICS, 7, create_fields("t", 3)).topics
        assert again.error_code == ErrorCode.topic_already_exists
        for client in (first, *others):
            assert len(client.ask(METADATA, 12, asked).topics[0].partitions) == 3


def test_replies_without_doubt_are_sent_when_another_is_proven(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client asks for a topic that is new to its broker, while another one's fetch waits."""
    monkeypatch.setattr(Reconciler, "tick", lambda _: None)  # only requests make a member look
    with frames(cluster.agents[1]) as first:
        create(first, "t", 3)
        number = cluster.leaders("t").index(2)
        with (
            ThreadPoolExecutor() as pool,
            frames(cluster.agents[2]) as waiting,
            frames(cluster.agents[2]) as asking,
        ):
            assert len(asking.ask(METADATA, 12, metadata_fields(["t"])).topics[0].partitions) == 3
            fetch = pool.submit(waiting.ask, FETCH, 12, fetch_of_any_version("t", number))
            time.sleep(0.3)  # it has come, and waits for records
            create(first, "u", 3)
            (found,) = asking.ask(METADATA, 12, metadata_fields(["u"])).topics
            assert len(found.partitions) == 3
            ((part,),) = (each.partitions for each in fetch.result(20.0).responses)
            assert part.error_code == ErrorCode.none


class Held:
    """A step of a move that waits."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *values: Any, **named: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(20.0)
        return self._step(*values, **named)


@pytest.fixture(name="patience")
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits long for a partition that moves."""
    monkeypatch.setattr(leaders, "MOVE_WAIT_SECONDS", 20.0)


def about_to_move(cluster: Members) -> tuple[int, int, Handovers]:
    """The leader of the only partition of topic t, another member, and what moves it."""
    with frames(cluster.agents[1]) as client:
        create(client, "t", 1)
    (giver,) = cluster.leaders("t")
    cluster.wait_for_topic(cluster.agents[giver], "t")
    handovers = cluster.agents[giver].cluster.handovers
    return giver, next(each for each in cluster.agents if each != giver), handovers


@pytest.mark.usefixtures("patience")
def test_requests_wait_for_the_end_of_a_move(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old leader answers when it knows the new one, and names it."""
    giver, target, handovers = about_to_move(cluster)
    held = Held(handovers._save_states)
    monkeypatch.setattr(handovers, "_save_states", held)
    with ThreadPoolExecutor() as pool, frames(cluster.agents[giver]) as client:
        move = pool.submit(handovers.move, {("t", 0): target})
        assert held.begun.wait(20.0)
        asked = pool.submit(client.ask, PRODUCE, 10, produce_fields("t", 0, batch([b"x"])))
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        held.may_end.set()
        assert move.result(20.0) == 1
        reply = asked.result(20.0)
    ((part,),) = (each.partition_responses for each in reply.responses)
    assert part.error_code == ErrorCode.not_leader_or_follower
    assert part.current_leader.leader_epoch == 1
    assert named_leader(reply, part) == (target, cluster.agents[target].kafka_address)


@pytest.mark.usefixtures("patience")
def test_requests_wait_until_a_partition_is_restored(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that comes early to the new leader is served once that is possible, not refused."""
    _, target, handovers = about_to_move(cluster)
    held = Held(recovery.restore)
    monkeypatch.setattr(recovery, "restore", held)
    with ThreadPoolExecutor() as pool, frames(cluster.agents[target]) as client:
        assert handovers.move({("t", 0): target}) == 1
        assert held.begun.wait(20.0)
        fetched = pool.submit(client.ask, FETCH, 12, fetch_of_any_version("t"))
        with frames(cluster.agents[target]) as other:
            asked = pool.submit(other.ask, PRODUCE, 10, produce_fields("t", 0, batch([b"x"])))
            with pytest.raises(TimeoutError):
                asked.result(0.3)
            held.may_end.set()
            ((part,),) = (each.partition_responses for each in asked.result(20.0).responses)
        assert (part.error_code, part.base_offset) == (ErrorCode.none, 0)
        ((found,),) = (each.partitions for each in fetched.result(20.0).responses)
        assert found.error_code == ErrorCode.none


def test_records_of_a_new_topic_keep_their_order(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that hears of a topic while it refuses the first batch lets no later one pass."""
    heard: list[int] = []
    append = Broker.append

    def append_and_hear(broker: Broker, *arguments: Any) -> PendingAppend:
        try:
            return append(broker, *arguments)
        except errors.UnknownTopic:
            broker.metadata.follow()  # as another thread may, before the refusal is sent
            heard.append(broker.broker_id)
            time.sleep(0.1)  # so that later batches are on their way
            raise

    monkeypatch.setattr(Broker, "append", append_and_hear)
    monkeypatch.setattr(Reconciler, "tick", lambda _: None)  # only requests make a member look
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("new", partitions=3)
        with log.producer() as producer:
            for number in range(60):
                producer.send("new", b"%d" % number, partition=number % 3)
                time.sleep(0.005)  # so that there are several batches
            producer.flush(30.0)
        assert len(heard) >= 2
        for partition in range(3):
            found = log.read("new", partitions=[partition])["value"].to_pylist()
            assert found == [b"%d" % number for number in range(partition, 60, 3)]


def test_spark_batches_reach_all_leaders(cluster: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch begun before a member dies is completed by a rerun, over real connections, once."""
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("t", 6)
        cluster.wait_for_topic(cluster.agents[2], "t")
        monkeypatch.setattr(commits, "open_store", lambda *_: cluster.store)
        monkeypatch.setattr(commits, "_connect", lambda *_: log)

        def commit(batch_number: int, value: str) -> None:
            staging = manifest.StagingWriter(
                cluster.store, query="q", batch=batch_number, clock=CLOCK
            )
            for number in range(6):
                staging.add("t", number, payload([f"{value} {number}"]))
            sections = staging.finish()
            known = cluster.metadata.topics
            commits.commit(
                *("root", {}),
                query="q",
                batch=batch_number,
                sections=sections,
                topics=manifest.destinations(known),
            )

        commit(0, "first")
        assert set(cluster.leaders("t")) == {1, 2, 3}
        with monkeypatch.context() as driver:
            driver.setattr(commits, "_left", lambda _: [])  # it dies after the first leader
            commit(1, "second")
        cluster.store.delete(["staging/q/1/appended.json"])
        cluster.kill(3)
        commit(1, "again")
        batches = ("first", "second")
        expected = {f"{each} {number}".encode() for each in batches for number in range(6)}
        assert values(log, "t", 12) == Counter(expected)


def test_a_run_of_a_job_is_known_in_a_cluster(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose parts several leaders have appended is one that its job has made.

    One that another topic of that name had is not.
    """
    with sparklog.connect(cluster.addresses) as log:
        log.create_topic("t", 6)
        cluster.wait_for_topic(cluster.agents[2], "t")
        monkeypatch.setattr(commits, "open_store", lambda *_: cluster.store)
        monkeypatch.setattr(commits, "_connect", lambda *_: log)
        monkeypatch.setattr(targets, "open_store", lambda *_: cluster.store)
        monkeypatch.setattr(sparklog, "connect", lambda *_, **__: contextlib.nullcontext(log))
        target = targets.Target(root="root", topic="t", partitions=None)
        assert set(cluster.leaders("t")) == {1, 2, 3}
        assert not target.has("run")
        name = to_topic(target.name_of("run"), "t")
        staging = manifest.StagingWriter(cluster.store, query=name, batch=0, clock=CLOCK)
        for number in range(6):
            staging.add("t", number, payload([b"%d" % number]))
        commits.commit(
            *("root", {}),
            query=name,
            batch=0,
            sections=staging.finish(),
            topics=manifest.destinations(cluster.metadata.topics),
            kind=BatchKind.NAMED,
        )
        assert target.has("run")
        assert not target.has("another")
        log.delete_topic("t")
        log.create_topic("t", 6)
        cluster.wait_for_topic(cluster.agents[2], "t")
        assert not target.has("run")


def test_topics_of_others(cluster: Members) -> None:
    """A topic that is created, changed, widened and deleted on one broker is so on all."""
    first, second = (
        sparklog.connect(cluster.agents[1].address),
        sparklog.connect(cluster.agents[2].address),
    )
    core = cluster.agents[3].parts.broker
    with first, second:
        first.create_topic("t", 2)
        with pytest.raises(errors.TopicExists):
            second.create_topic("t", 2)
        second.add_partitions("t", 6)
        first.alter("t", {"retention.ms": "100000"})
        until(lambda: core.topics.exists("t") and core.partitions.count("t") == 6)
        until(lambda: core.topics.describe("t").config == {"retention.ms": "100000"})
        assert Counter(cluster.leaders("t")) == {1: 2, 2: 2, 3: 2}
        write(first, "t", range(60), 6)
        assert values(second, "t", 60).total() == 60
        second.delete_topic("t")
        until(lambda: not core.topics.exists("t"))
        first.create_topic("t", 3)
        assert [each.end for each in first.describe("t").partitions if each.end >= 0]


def test_topics_that_another_broker_has_just_deleted(cluster: Members) -> None:
    """A broker that has not seen a deletion yet looks before it says that the topic exists."""
    first, second = (
        sparklog.connect(cluster.agents[1].address),
        sparklog.connect(cluster.agents[2].address),
    )
    with first, second:
        for _ in range(5):
            first.create_topic("t", 1)
            second.delete_topic("t")
        assert not cluster.metadata.topics


def test_configurations_that_two_brokers_change(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata and table have both of two changes that are made at the same time."""
    first, second = cluster.agents[1].parts.broker, cluster.agents[2].parts.broker
    with sparklog.connect(cluster.agents[1].address) as log:
        log.create_topic("t", 1)
    cluster.wait_for_topic(cluster.agents[2], "t")
    change = first.metadata.change_topics

    def change_late(edit: Any) -> ClusterMetadata:
        other = flight_messages.AlterTopic(topic="t", config={"retention.bytes": "200000"})
        second.topics.alter(other)
        return change(edit)

    with monkeypatch.context() as patch:
        patch.setattr(first.metadata, "change_topics", change_late)
        first.topics.alter(flight_messages.AlterTopic(topic="t", config={"retention.ms": "100000"}))
    both = {"retention.bytes": "200000", "retention.ms": "100000"}
    assert cluster.metadata.topics["t"].config == both
    assert TopicTable(cluster.store, "t", clock=CLOCK).refresh().config == both
    assert first.topics.describe("t").config == both
    until(lambda: second.topics.describe("t").config == both)


class Requests(NoFaults):
    """Counts the requests to an object store."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def before(self, operation: Operation, path: str, /) -> None:
        self.counts[operation, path.partition("/")[0]] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heartbeats", "most"),
    # A minute has the chores that come once in one; a few seconds may have those of a minute.
    [(3, 10), pytest.param(30, 8, marks=pytest.mark.soak(mode="limits"))],
)
def test_an_idle_cluster_costs_little(heartbeats: int, most: int) -> None:
    """Three members without clients make at most eight requests a second to an object store."""
    cluster, requests = Members(), Requests()
    liveness = LivenessSettings()
    for broker in (1, 2, 3):
        usual = msgspec.structs.replace(settings(broker), liveness=liveness)
        agent = Agent(usual, store=cluster.store.view(requests))
        cluster.agents[broker] = agent
        agent.start()
    try:
        for agent in cluster.agents.values():
            cluster.wait_for_members(agent)
        with sparklog.connect(cluster.agents[1].address) as log:
            log.create_topic("t", 6)
            write(log, "t", range(60), 6)
            log.flush_to_table()
        time.sleep(2.0)  # the last checkpoints
        requests.counts.clear()
        began = time.monotonic()
        count = len(cluster.agents) * heartbeats
        wait_until(lambda: requests.counts["put", "heartbeats"] >= count, "heartbeats are sent")
        seconds = time.monotonic() - began  # more, where the machine itself was stopped
        assert requests.counts.total() <= most * seconds, requests.counts
    finally:
        for agent in cluster.agents.values():
            agent.stop()


def test_a_member_that_was_fenced_may_return(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was silent for too long joins again, unless another process has its id."""
    silent = cluster.agents.pop(2)
    monkeypatch.setattr(silent._heartbeats, "write", lambda **_: None)
    with pytest.raises(errors.BrokerFenced):
        silent.wait(20.0)
    assert silent.may_return()
    again = cluster.start(2)
    cluster.wait_for_members(again)
    assert not silent.may_return()
    newer = Agent(settings(2), store=cluster.store, take_over=True)
    newer.start()
    cluster.agents[2] = newer
    with pytest.raises(errors.BrokerFenced):
        again.wait(20.0)
    assert not again.may_return()


def test_a_member_whose_log_was_deleted_may_return(
    cluster: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was suspended until its log was deleted notices that before it sees why."""
    gone = SyncFailed("wal/2/0000000001/00000000.seg", "its file was moved or removed")
    silent = cluster.agents.pop(2)
    monkeypatch.setattr(silent._heartbeats, "write", lambda **_: None)
    fail = silent._on_failure
    monkeypatch.setattr(silent, "_on_failure", lambda _: fail(gone))
    with pytest.raises(errors.BrokerFenced, match="was replaced by broker 1"):
        silent.wait(20.0)
    assert silent.may_return()

    leading = cluster.agents.pop(1)
    leading._on_failure(gone)
    with pytest.raises(SyncFailed):
        leading.wait(20.0)


def test_a_client_by_root_outlives_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is another controller, it uses any live member, and starts no broker."""
    with contextlib.ExitStack() as closing:
        for broker in (1, 2):
            own = msgspec.structs.replace(settings(broker), root=str(tmp_path / "root"))
            closing.enter_context(Agent(own))
        known = MetadataStore(LocalStore(tmp_path / "root"), clock=CLOCK)
        until(lambda: len(known.reload().brokers) == 2)
        metadata, poll = known.reload(), LeaderWatch.poll
        (other,) = metadata.brokers.keys() - {metadata.controller}

        def poll_the_dead(watch: LeaderWatch, *values: Any) -> Sighting | None:
            found = poll(watch, *values)
            assert found is not None
            return dataclasses.replace(found, state=LeaderState.DEAD)

        monkeypatch.setattr(LeaderWatch, "poll", poll_the_dead)
        session = connecting._RootSession(str(tmp_path / "root"), given=None)
        assert session.resolve() == metadata.brokers[other].flight


def test_members_and_other_brokers() -> None:
    """A member refuses its own id while it lives, and a broker that would lead alone."""
    with members(1, 2) as cluster:
        for agent in (
            Agent(settings(2), store=cluster.store),
            Agent(settings(3, join=False), store=cluster.store),
            Agent(settings(3), store=cluster.store, kind=BrokerKind.EMBEDDED),
        ):
            with pytest.raises(errors.BrokerAlive):
                agent.start()
        cluster.kill(cluster.metadata.controller)
        guest = Agent(settings(3), store=cluster.store, kind=BrokerKind.EMBEDDED)
        with pytest.raises(errors.BrokerAlive):  # the other one lives
            guest.start()


def test_a_broker_that_leads_alone() -> None:
    """It refuses members while it is alive; the first one after it leads what it has led."""
    store = MemoryStore(CLOCK)
    alone = Agent(settings(9, join=False), store=store)
    alone.start()
    with sparklog.connect(alone.address) as log:
        log.create_topic("t", 2)
        write(log, "t", range(6), 2)
    with pytest.raises(errors.BrokerAlive):
        Agent(settings(1), store=store).start()
    alone.stop()
    with Agent(settings(1), store=store) as member, sparklog.connect(member.address) as log:
        assert values(log, "t", 6).total() == 6


def test_a_member_replaces_a_guest() -> None:
    """A broker of a program gives way to a member, which leads all that it led."""
    cluster = Members()
    guest = Agent(settings(9), store=cluster.store, kind=BrokerKind.EMBEDDED)
    guest.start()
    with sparklog.connect(guest.address) as log:
        log.create_topic("t", 2)
        write(log, "t", range(6), 2)
    agent = cluster.start(1)
    try:
        assert cluster.leaders("t") == (1, 1)
        with sparklog.connect(agent.address) as log:
            assert values(log, "t", 6).total() == 6
    finally:
        agent.stop()
    with pytest.raises(errors.BrokerFenced):
        guest.wait(10.0)
