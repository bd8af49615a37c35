"""Compares the answers of three brokers of ours and of a real Kafka of three nodes.

The same requests go to the leader of a partition, or to the coordinator of a group, and to a broker
that is neither; in the end the leader is killed.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import jars
from benchmarks.kafka_process import KafkaCluster
from tests.support.batches import read
from tests.support.clusterkilling import BROKERS, Cluster
from tests.support.comparing import Answers, Differs, check_answers, metadata_fields, name_of
from tests.support.kafkarequests import (
    TIMEOUT,
    batch,
    commit_fields,
    create_fields,
    fetch_fields,
    new_producer,
    produce_fields,
)
from tests.support.kafkas import Frames
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(600)]

KAFKA: Final = {
    "broker.session.timeout.ms": "3000",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "9",
}
TOPIC: Final = "c"
PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, HEARTBEAT = 8, 9, 10, 12
DESCRIBE_GROUPS, LIST_GROUPS, CREATE_TOPICS, DELETE_TOPICS = 15, 16, 19, 20
DELETE_RECORDS, EPOCH_END, CREATE_PARTITIONS, ALTER_CONFIGS = 21, 23, 37, 44
DELETE_GROUPS, DESCRIBE_CLUSTER, DESCRIBE_PRODUCERS = 42, 60, 61


class Side:
    """One of the two clusters, with a connection to each broker."""

    def __init__(self, addresses: Mapping[int, str], kill: Callable[[int], None]) -> None:
        self._addresses = addresses
        self._kill = kill
        self._frames: dict[int, Frames] = {}
        self.alive = list(addresses)

    def frames(self, node: int) -> Frames:
        if node not in self._frames:
            self._frames[node] = Frames(self._addresses[node])
        return self._frames[node]

    def ask(self, node: int, key: int, version: int, fields: Mapping[str, Any]) -> Any:
        return self.frames(node).ask(key, version, fields)

    def kill(self, node: int) -> None:
        self._kill(node)
        self.alive.remove(node)

    def close(self) -> None:
        for each in self._frames.values():
            each.close()

    # -------------------------------------------------------------------------- its state

    def topic(self, node: int, name: str = TOPIC) -> Any:
        """A topic, as a broker describes it."""
        (found,) = self.ask(node, METADATA, 12, metadata_fields([name])).topics
        return found

    def leaders(self, node: int, name: str = TOPIC) -> dict[int, int]:
        """The leader of each partition; none of those without one."""
        return {
            each.partition_index: each.leader_id
            for each in self.topic(node, name).partitions
            if name_of(each.error_code) == "none"
        }

    def await_leaders(self, name: str, count: int) -> None:
        """Returns when all brokers agree on who leads the partitions, and these are served."""

        def are_known() -> bool:
            views = [self.leaders(node, name) for node in self.alive]
            if len(views[0]) != count or any(each != views[0] for each in views):
                return False
            ends = [self.end(leader, name, number) for number, leader in views[0].items()]
            return all(error == "none" for error, _ in ends)

        wait_until(are_known, f"{name} is served")

    def end(self, node: int, name: str = TOPIC, partition: int = 0) -> tuple[str, int]:
        """ListOffsets: error and end of a partition, as a broker has it."""
        place = {"partition_index": partition, "timestamp": -1, "current_leader_epoch": -1}
        fields = {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": name, "partitions": [place]}],
            "timeout": TIMEOUT,
        }
        (topic,) = self.ask(node, LIST_OFFSETS, 9, fields).topics
        (found,) = topic.partitions
        return name_of(found.error_code), found.offset

    def coordinator(self, node: int, group: str) -> int:
        """The broker that is named; -1 if none is."""
        fields = {"key_type": 0, "coordinator_keys": [group]}
        (found,) = self.ask(node, FIND_COORDINATOR, 4, fields).coordinators
        return int(found.node_id)


@contextmanager
def _ours(folder: Path) -> Iterator[Side]:
    cluster = Cluster(folder / "root", folder / "logs")
    try:
        cluster.start()
        addresses = {number: each.kafka_address for number, each in cluster.brokers.items()}
        yield Side(addresses, lambda node: cluster.brokers[node].kill())
    finally:
        cluster.close()


@contextmanager
def _theirs(folder: Path) -> Iterator[Side]:
    with KafkaCluster(jars.find().broker, folder, KAFKA) as cluster:
        addresses = {number: each.address for number, each in cluster.brokers.items()}
        yield Side(addresses, lambda node: cluster.brokers[node].kill())


# ------------------------------------------------------------------------------ the answers


def answers(side: Side) -> Answers:
    """All that is compared; brokers are called by what they are for partition 0."""
    _create(side, TOPIC)
    leader = side.leaders(1)[0]
    other = next(each for each in side.alive if each != leader)
    called = {each: "leader" if each == leader else "another" for each in side.alive}

    yield from _views(side, called)
    yield from _of_partitions(side, leader, other, called)
    yield from _of_groups(side)
    yield from _changes(side)
    yield from _after_a_kill(side, leader, other)


def _create(side: Side, name: str, node: int = 1) -> None:
    fields = create_fields(name, 3, replication_factor=-1)
    (found,) = side.ask(node, CREATE_TOPICS, 7, fields).topics
    assert name_of(found.error_code) == "none", found
    side.await_leaders(name, 3)


def _views(side: Side, called: Mapping[int, str]) -> Answers:
    """Each broker's view of the cluster."""
    replies = [side.ask(node, METADATA, 12, metadata_fields([TOPIC])) for node in side.alive]
    yield "brokers", [sorted(each.node_id for each in reply.brokers) for reply in replies]
    yield "one cluster", len({reply.cluster_id for reply in replies})
    yield "a controller", [reply.controller_id in called for reply in replies]
    leaders = [side.leaders(node) for node in side.alive]
    yield "leaders agree", [each == leaders[0] for each in leaders]
    yield "each leads one partition", sorted(leaders[0].values())
    fields = {"include_cluster_authorized_operations": False, "endpoint_type": 1}
    described = [side.ask(node, DESCRIBE_CLUSTER, 1, fields) for node in side.alive]
    yield "described", [sorted(each.broker_id for each in reply.brokers) for reply in described]
    ids = [_producer(side, node).producer_id for node in side.alive]
    yield "producer ids differ", len(set(ids))


def _producer(side: Side, node: int) -> Any:
    """A new producer's id, which a Kafka gives only a while after its start."""
    found: list[Any] = []

    def is_given() -> bool:
        found[:] = [new_producer(side.frames(node))]
        return name_of(found[0].error_code) == "none"

    wait_until(is_given, "producers get ids")
    return found[0]


def _produced(side: Side, node: int, version: int = 9, **producer_sequence: int) -> tuple[Any, Any]:
    """The reply, and its part for partition 0."""
    fields = produce_fields(TOPIC, 0, batch([b"a"], **producer_sequence))
    reply = side.ask(node, PRODUCE, version, fields)
    ((found,),) = (each.partition_responses for each in reply.responses)
    return reply, found


def _fetched(side: Side, node: int, **place: int) -> tuple[str, bytes | None]:
    """Fetch from the start of partition 0: its error, and the first record's value."""
    fields = fetch_fields(TOPIC, 0, 0) | {
        "session_id": 0,
        "session_epoch": -1,
        "forgotten_topics_data": (),
        "rack_id": "",
        "max_wait": dt.timedelta(0),
        "min_bytes": 0,
    }
    more = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
    fields["topics"][0]["partitions"][0] |= more | place
    (topic,) = side.ask(node, FETCH, 12, fields).responses
    (found,) = topic.partitions
    data = bytes(found.records or b"")
    size = 12 + int.from_bytes(data[8:12], "big")
    return name_of(found.error_code), read(data[:size])[0][1].value if data else None


def _epoch_end(side: Side, node: int, epoch: int, current: int = -1) -> tuple[str, int]:
    """OffsetForLeaderEpoch of partition 0: error and end."""
    place = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
    fields = {"replica_id": -1, "topics": [{"topic": TOPIC, "partitions": [place]}]}
    (topic,) = side.ask(node, EPOCH_END, 4, fields).topics
    (found,) = topic.partitions
    return name_of(found.error_code), found.end_offset


def _of_partitions(side: Side, leader: int, other: int, called: Mapping[int, str]) -> Answers:
    """Requests that only the leader serves."""
    _, found = _produced(side, leader)
    yield "produce", (name_of(found.error_code), found.base_offset)
    _, found = _produced(side, other)
    yield "produce elsewhere", (name_of(found.error_code), found.base_offset)
    reply, found = _produced(side, other, version=10)
    yield "the leader that it names", called.get(found.current_leader.leader_id)
    addressed = [called[each.node_id] for each in reply.node_endpoints]
    yield "its address", addressed
    yield "fetch", _fetched(side, leader)
    yield "fetch elsewhere", _fetched(side, other)[0]
    yield "the end", side.end(leader)
    yield "the end elsewhere", side.end(other)
    yield "the end of an epoch elsewhere", _epoch_end(side, other, 0)

    def deleted(node: int) -> list[str]:
        place = {"partition_index": 0, "offset": 0}
        topic = {"name": TOPIC, "partitions": [place]}
        (found,) = side.ask(node, DELETE_RECORDS, 2, {"topics": [topic], "timeout": TIMEOUT}).topics
        return [name_of(each.error_code) for each in found.partitions]

    yield "delete records", deleted(leader)
    yield "delete records elsewhere", deleted(other)

    def producers(node: int) -> list[str]:
        fields = {"topics": [{"name": TOPIC, "partition_indexes": [0]}]}
        (topic,) = side.ask(node, DESCRIBE_PRODUCERS, 0, fields).topics
        return [name_of(each.error_code) for each in topic.partitions]

    yield "producers", producers(leader)
    yield "producers elsewhere", producers(other)


def _of_groups(side: Side) -> Answers:
    """Requests that only the coordinator of a group serves."""
    group = "g"
    wait_until(lambda: side.coordinator(1, group) in side.alive, "the group has a coordinator")
    coordinator = side.coordinator(1, group)
    other = next(each for each in side.alive if each != coordinator)
    wait_until(
        lambda: all(side.coordinator(node, group) == coordinator for node in side.alive),
        "all brokers know the coordinator",
    )

    def committed(node: int) -> list[str]:
        reply = side.ask(node, OFFSET_COMMIT, 8, commit_fields(group, TOPIC, 0, 1))
        return [name_of(of.error_code) for each in reply.topics for of in each.partitions]

    wait_until(lambda: committed(coordinator) == ["none"], "the coordinator has loaded the group")
    yield "commit elsewhere", committed(other)
    yield "offsets", _offsets(side, coordinator, group)
    yield "offsets elsewhere", _offsets(side, other, group)
    fields: dict[str, Any] = {
        "group_id": group,
        "generation_id": 1,
        "member_id": "x",
        "group_instance_id": None,
    }
    for node, where in ((coordinator, ""), (other, " elsewhere")):
        yield "heartbeat" + where, name_of(side.ask(node, HEARTBEAT, 4, fields).error_code)
        described = {"groups": (group,), "include_authorized_operations": False}
        (found,) = side.ask(node, DESCRIBE_GROUPS, 5, described).groups
        yield "describe" + where, (name_of(found.error_code), found.group_state)
        listed = side.ask(node, LIST_GROUPS, 4, {"states_filter": ()})
        yield "list" + where, [each.group_id for each in listed.groups]
    for node, where in ((other, " elsewhere"), (coordinator, "")):
        (found,) = side.ask(node, DELETE_GROUPS, 2, {"groups_names": (group,)}).results
        yield "delete" + where, name_of(found.error_code)


def _offsets(side: Side, node: int, group: str) -> tuple[str, list[int]]:
    topics = [{"name": TOPIC, "partition_indexes": (0,)}]
    fields = {"group_id": group, "topics": topics, "require_stable": True}
    reply = side.ask(node, OFFSET_FETCH, 7, fields)
    found = [of.committed_offset for each in reply.topics for of in each.partitions]
    return name_of(reply.error_code), found


def _changes(side: Side) -> Answers:
    """Changes of topics, which any broker takes."""
    for node in side.alive:
        _create(side, f"made-{node}", node)
    yield "created on each", [len(side.leaders(1, f"made-{node}")) for node in side.alive]
    fields = create_fields("made-1", 3, replication_factor=-1)
    found = [side.ask(node, CREATE_TOPICS, 7, fields).topics[0] for node in side.alive]
    yield "created again", [name_of(each.error_code) for each in found]
    topic = {"name": "made-1", "count": 5, "assignments": None}
    fields = {"topics": [topic], "timeout": TIMEOUT, "validate_only": False}
    (result,) = side.ask(2, CREATE_PARTITIONS, 3, fields).results
    yield "widened", name_of(result.error_code)
    side.await_leaders("made-1", 5)
    configs = [{"name": "retention.ms", "config_operation": 0, "value": "123456"}]
    resource = {"resource_type": 2, "resource_name": "made-1", "configs": configs}
    fields = {"resources": [resource], "validate_only": False}
    (response,) = side.ask(3, ALTER_CONFIGS, 1, fields).responses
    yield "configured", name_of(response.error_code)
    gone = {"topics": [{"name": "made-1", "topic_id": None}], "timeout": TIMEOUT}
    (response,) = side.ask(2, DELETE_TOPICS, 6, gone).responses
    yield "deleted", name_of(response.error_code)
    wait_until(
        lambda: all(
            name_of(side.topic(node, "made-1").error_code) == "unknown_topic_or_partition"
            for node in side.alive
        ),
        "all brokers know that it is gone",
    )
    (response,) = side.ask(1, DELETE_TOPICS, 6, gone).responses
    yield "deleted again", name_of(response.error_code)


def _after_a_kill(side: Side, leader: int, other: int) -> Answers:
    """The knowledge of a partition's next leader, and of a group's next coordinator."""
    producer = _producer(side, other)
    ids = {"producer_id": producer.producer_id, "producer_epoch": 0}
    offsets = [_produced(side, leader, base_sequence=at, **ids)[1].base_offset for at in range(2)]
    names = (f"g{number}" for number in itertools.count())
    group = next(name for name in names if side.coordinator(other, name) == leader)
    fields = commit_fields(group, TOPIC, 0, 2)
    wait_until(
        lambda: (
            name_of(side.ask(leader, OFFSET_COMMIT, 8, fields).topics[0].partitions[0].error_code)
            == "none"
        ),
        "the offset is committed",
    )
    before = {each.partition_index: each.leader_epoch for each in side.topic(other).partitions}
    side.kill(leader)
    wait_until(lambda: side.leaders(other).get(0, leader) != leader, "another broker leads")
    side.await_leaders(TOPIC, 3)
    successor = side.leaders(other)[0]
    now = {each.partition_index: each.leader_epoch for each in side.topic(other).partitions}
    yield "the epoch of its partition rises", now[0] > before[0]

    def is_known() -> bool:
        reply = side.ask(other, METADATA, 12, metadata_fields([]))
        return len(reply.brokers) == len(side.alive)

    wait_until(is_known, "it is not a broker of the cluster any more")
    yield "the end after it", side.end(successor)
    wait_until(lambda: _fetched(side, successor)[1] is not None, "its records are served")
    yield "fetch after it", _fetched(side, successor)
    yield "its epoch is over", _fetched(side, successor, current_leader_epoch=before[0])
    yield "a later epoch", _fetched(side, successor, current_leader_epoch=now[0] + 1)
    yield "where its epoch ended", _epoch_end(side, successor, before[0])

    def sent(sequence: int) -> tuple[str, bool, int]:
        _, found = _produced(side, successor, base_sequence=sequence, **ids)
        return name_of(found.error_code), found.base_offset in offsets, found.base_offset

    yield "its last batch again", sent(1)[:2]
    yield "a batch after a gap", sent(5)
    yield "the next batch", sent(2)

    def coordinator() -> int:
        return side.coordinator(other, group)

    wait_until(lambda: coordinator() in side.alive, "the group has another coordinator")
    wait_until(lambda: _offsets(side, coordinator(), group)[0] == "none", "it has loaded the group")
    yield "offsets after it", _offsets(side, coordinator(), group)


DIFFERENT: Final[Mapping[str, Differs]] = {
    "fetch elsewhere": Differs(
        "not_leader_or_follower",
        "none",
        "a partition has no replicas; the root's storage has the copies",
    ),
    "producers elsewhere": Differs(
        ["not_leader_or_follower"], ["none"], "only the leader has the state of producers"
    ),
    "a batch after a gap": Differs(
        ("not_leader_or_follower", False, -1),
        ("out_of_order_sequence_number", False, -1),
        "for some time after a move: librdkafka would begin a new epoch, and write records twice",
    ),
}
"""By name."""


def test_a_kafka_of_three_nodes_answers_the_same(tmp_path: Path) -> None:
    """Compares error codes and everything else that must agree, except for known differences."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    given = []
    for cluster in (_ours, _theirs):
        with cluster(tmp_path / cluster.__name__) as side:
            assert tuple(side.alive) == BROKERS
            given.append(list(answers(side)))
            side.close()
    check_answers(given[0], given[1], DIFFERENT)
