"""Compares the answers of our broker and of a real Kafka to the same requests, valid and invalid.

A scenario sends requests to one side and yields each answer under a name. Intended differences are
listed in `DIFFERENT`, with both answers and the reason.
"""

from __future__ import annotations

import datetime as dt
import itertools
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pytest
from kio.schema.errors import ErrorCode

from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog.broker.kafka.registry import APIS
from sparklog.broker.logging import configure
from sparklog.settings import GroupSettings, LogSettings, TopicSettings
from tests.support.batches import Record, built, changed, read
from tests.support.comparing import Answers, Differs, check_answers, metadata_fields, name_of
from tests.support.kafkarequests import (
    AT_MS,
    TIMEOUT,
    batch,
    create,
    create_fields,
    new_producer,
    produce_fields,
)
from tests.support.kafkas import Frames, broker
from tests.support.logs import logging_restored
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(300)]

Answer: TypeAlias = tuple[object, ...]

GROUPS: Final = GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=1_000)
KAFKA: Final = {
    "group.initial.rebalance.delay.ms": "100",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "8",
    "num.partitions": "4",
}
"""Addresses of a Kafka."""
CLOSED: Final = "the connection is closed"
SILENCE: Final = "there is no answer"
PATIENCE_SECONDS: Final = 5.0
MISSING: Final = "none-such"
SESSION: Final = dt.timedelta(seconds=10)
UNKNOWN_ID: Final = uuid.UUID(int=77)


class Side:
    """One of the two brokers, and a connection to it that is opened again after it was closed."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.frames = Frames(address, PATIENCE_SECONDS)

    def ask(self, key: int, version: int, fields: Mapping[str, Any]) -> Any:
        """Returns the answer; `CLOSED` or `SILENCE` if there is none."""
        try:
            return self.frames.ask(key, version, fields)
        except TimeoutError:
            found = SILENCE
        except (AssertionError, ConnectionError):
            found = CLOSED
        self.frames.close()
        self.frames = Frames(self.address, PATIENCE_SECONDS)
        return found


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    topics = TopicSettings(auto_create=False)
    folder = tmp_path_factory.mktemp("sides")
    with (
        broker(folder / "root", groups=GROUPS, topics=topics) as agent,
        KafkaProcess(found.broker, folder / "kafka", {**KAFKA, "broker.id": "1"}) as kafka,
    ):
        both = Side("ours", agent.kafka_address), Side("theirs", kafka.address)
        for side in both:
            coordinated(side)
        yield both
        for side in both:
            side.frames.close()


# ------------------------------------------------------------------------------ produce


def produced(side: Side, topic: str, records: bytes | None, **more: Any) -> object:
    """(error, base offset) of one partition, which is 0 unless another is given."""
    fields = produce_fields(topic, more.pop("partition", 0), records)
    reply = side.ask(0, more.pop("version", 9), fields | more)
    if isinstance(reply, str):
        return reply
    ((found,),) = (each.partition_responses for each in reply.responses)
    return name_of(found.error_code), found.base_offset


def configured(side: Side, topic: str, **configs: str) -> None:
    """A topic with that configuration; underscores stand for dots."""
    wanted = [{"name": k.replace("_", "."), "value": v} for k, v in configs.items()]
    (found,) = side.ask(19, 7, create_fields(topic, configs=wanted)).topics
    assert name_of(found.error_code) == "none", found
    await_leaders(side, topic, 1)


def made(side: Side, topic: str, count: int) -> None:
    """A topic that is served."""
    create(side.frames, topic, count)
    await_leaders(side, topic, count)


def await_leaders(side: Side, topic: str, count: int) -> None:
    """Returns when each of its partitions is served; a Kafka takes a while for that."""

    def are_served() -> bool:
        answers = [listed(side, topic, -1, partition_index=number) for number in range(count)]
        return all(answer[0] == "none" for answer in answers)

    wait_until(are_served, f"{topic} is served")


def produce(side: Side) -> Answers:
    """Record batches, whole and broken."""
    made(side, "p", 60)
    numbers = itertools.count(2)

    def sent(records: bytes | None, **more: Any) -> object:
        """To a partition that nothing was sent to before."""
        return produced(side, "p", records, **{"partition": next(numbers), **more})

    good = batch([b"a", b"b"])
    yield "good", sent(good)
    yield "another good one", sent(good, partition=2)
    yield "acks=1", sent(good, acks=1)
    yield "acks=2", sent(good, acks=2)
    yield "acks=-2", sent(good, acks=-2)
    yield "no topic", produced(side, MISSING, good)
    yield "no partition", sent(good, partition=60)
    yield "partition -1", sent(good, partition=-1)
    yield "no name", produced(side, "", good)
    yield "a bad name", produced(side, "a/b", good)
    yield "records null", sent(None)
    yield "records empty", sent(b"")
    yield "bad CRC", sent(changed(good, 17, ">I", 1, checksum=False))
    yield "a byte more", sent(good + b"\0")
    yield "a byte less", sent(good[:-1])
    yield "half of it", sent(good[: len(good) // 2])
    yield "two batches", sent(good + good)
    for magic in (0, 1, 3, -1):
        yield f"magic {magic}", sent(changed(good, 16, ">b", magic, checksum=False))
    yield "count too high", sent(changed(good, 57, ">i", 3))
    yield "count too low", sent(changed(good, 57, ">i", 1))
    yield "count negative", sent(changed(good, 57, ">i", -1))
    yield "count 0", sent(changed(good, 57, ">i", 0))
    yield "last offset too high", sent(changed(good, 23, ">i", 7))
    yield "last offset too low", sent(changed(good, 23, ">i", 0))
    yield "base offset 7", sent(changed(good, 0, ">q", 7, checksum=False))
    yield "leader epoch 7", sent(changed(good, 12, ">i", 7, checksum=False))
    for codec in (5, 7):
        yield f"codec {codec}", sent(changed(good, 21, ">h", codec))
    zstd = batch([b"a", b"b"], codec=4)
    for version in (3, 6, 7):
        yield f"in zstd, version {version}", sent(zstd, version=version)
    yield "said to be gzip", sent(changed(good, 21, ">h", 1))
    yield "said to be zstd", sent(changed(good, 21, ">h", 4))
    yield "a control batch", sent(changed(good, 21, ">h", 0x20))
    yield "said to be appended", sent(changed(good, 21, ">h", 0x08))
    gzip = batch([b"a", b"b"], codec=1)
    yield "said to be appended, in gzip", sent(changed(gzip, 21, ">h", 0x09))
    old = built([Record(-5, None, b"a")])
    yield "a time before 1970", sent(old)
    none = built([Record(AT_MS, None, None)])
    yield "neither key nor value", sent(none)
    for codec in (0, 1, 2, 3, 4):
        yield f"good with codec {codec}", sent(batch([b"x" * 50] * 9, codec))
    yield "to the offsets topic", produced(side, "__consumer_offsets", good)


def limits(side: Side) -> Answers:
    """Values that a topic's configuration refuses."""
    configured(side, "p.compact", cleanup_policy="compact")
    keyed = built([Record(AT_MS, b"k", b"a"), Record(AT_MS, b"k", None)])
    mixed = built([Record(AT_MS, b"k", b"a"), Record(AT_MS, None, b"a")])
    yield "keys, compacted", produced(side, "p.compact", keyed)
    yield "no key, compacted", produced(side, "p.compact", batch([b"a"]))
    yield "one without a key", produced(side, "p.compact", mixed)
    reply = side.ask(0, 9, produce_fields("p.compact", 0, mixed))
    (found,) = reply.responses[0].partition_responses
    yield "which one", [each.batch_index for each in found.record_errors]
    configured(side, "p.small", max_message_bytes="1000")
    yield "cut to what may be", produced(side, "p.small", batch([b"x" * 1000])[:1000])
    yield "too large", produced(side, "p.small", batch([b"x" * 1000]))
    yield "too large, many", produced(side, "p.small", batch([b"x" * 100] * 12))
    yield "large but compressed", produced(side, "p.small", batch([b"x" * 2000], 1))
    configured(side, "p.times", message_timestamp_before_max_ms="1000")
    yield "a time too early", produced(side, "p.times", batch([b"a"]))
    configured(side, "p.appended", message_timestamp_type="LogAppendTime")
    reply = side.ask(0, 9, produce_fields("p.appended", 0, batch([b"a"])))
    (found,) = reply.responses[0].partition_responses
    yield "the time of the append", found.log_append_time is not None
    reply = side.ask(0, 9, produce_fields("p.small", 0, batch([b"a"])))
    (found,) = reply.responses[0].partition_responses
    yield "no time of the append", found.log_append_time


def idempotence(side: Side) -> Answers:
    """Sequences and epochs of producers."""
    made(side, "i", 2)

    def new(**more: Any) -> Any:
        fields = {"transactional_id": None, "transaction_timeout": TIMEOUT}
        return side.ask(22, 4, fields | more)

    first, second = new(), new()
    yield "a producer", (name_of(first.error_code), first.producer_epoch, first.producer_id >= 0)
    yield "another one", first.producer_id != second.producer_id
    again = new(producer_id=first.producer_id, producer_epoch=0)
    yield (
        "it asks again",
        (
            name_of(again.error_code),
            again.producer_epoch,
            again.producer_id != first.producer_id,
        ),
    )
    empty = new(transactional_id="")
    yield "an empty transactional id", (name_of(empty.error_code), empty.producer_epoch)

    def send(
        sequence: int, count: int = 1, epoch: int = 0, who: Any = first, at: int = 0
    ) -> object:
        records = batch(
            [b"%d" % sequence] * count,
            producer_id=who.producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        return produced(side, "i", records, partition=at)

    yield "0", send(0)
    yield "0 again", send(0)
    yield "1 to 3", send(1, 3)
    yield "1 to 3 again", send(1, 3)
    yield "1 to 2", send(1, 2)
    yield "2", send(2)
    yield "a gap", send(5)
    yield "4", send(4)
    for sequence in range(5, 10):
        yield f"{sequence}", send(sequence)
    yield "5 again", send(5)
    yield "4 again, beyond the window", send(4)
    yield "0 again, beyond the window", send(0)
    yield "epoch 1 at 10", send(10, epoch=1)
    yield "epoch 1 at 0", send(0, epoch=1)
    yield "epoch 1 at 0 again", send(0, epoch=1)
    yield "epoch 0 at 10", send(10)
    yield "epoch 0 at 9 again", send(9)
    yield "epoch 7 at 0", send(0, epoch=7)
    yield "epoch 1 at 1", send(1, epoch=1)
    yield "another partition at 0", send(0, epoch=7, at=1)
    yield "unknown, at 5", send(5, who=second)
    yield "unknown, at 0", send(0, who=second, at=1)
    yield "sequence -1", send(-1, who=second, at=1)
    yield "epoch -1", send(1, epoch=-1, who=second, at=1)
    producer_sequence = {"producer_id": second.producer_id, "producer_epoch": 0, "base_sequence": 1}
    part = batch([b"a"], **producer_sequence)
    yield (
        "in a transaction that is none",
        produced(side, "i", changed(part, 21, ">h", 0x10), partition=1),
    )
    yield (
        "without an id, with a sequence",
        produced(
            side, "i", batch([b"a"], producer_id=-1, producer_epoch=0, base_sequence=3), partition=1
        ),
    )


# ------------------------------------------------------------------------------ fetch, offsets


def fetch_fields(topic: str, offset: int, **more: Any) -> dict[str, Any]:
    """Fetch of partition 0 unless another is given; what a partition has not is the request's."""
    of_partition = {
        "partition": 0,
        "fetch_offset": offset,
        "partition_max_bytes": 1 << 20,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
    }
    taken = {name: more.pop(name) for name in list(more) if name in of_partition}
    return {
        "replica_id": -1,
        "max_wait": TIMEOUT * 0,
        "min_bytes": 0,
        "max_bytes": 1 << 20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [of_partition | taken]}],
        "forgotten_topics_data": (),
        "rack_id": "",
        **more,
    }


def fetched(side: Side, topic: str, offset: int, version: int = 12, **more: Any) -> Answer:
    """Error, watermarks, aborted transactions, and offset and value of each record.

    A broker may send records below the offset, which are of the same batch.
    """
    reply = side.ask(1, version, fetch_fields(topic, offset, **more))
    if isinstance(reply, str):
        return (reply,)
    if name_of(getattr(reply, "error_code", ErrorCode.none)) != "none":
        return name_of(reply.error_code), len(reply.responses)
    ((found,),) = (each.partitions for each in reply.responses)
    data, records = bytes(found.records or b""), []
    while len(data) > 12:
        size = 12 + int.from_bytes(data[8:12], "big")
        if size > len(data):
            break
        records += read(data[:size])
        data = data[size:]
    return (
        name_of(found.error_code),
        found.high_watermark,
        found.last_stable_offset,
        getattr(found, "log_start_offset", None),
        found.aborted_transactions,
        [(at, each.value) for at, each in records if at >= offset],
    )


def fetch(side: Side) -> Answers:
    """From anywhere, in any way."""
    made(side, "f", 2)
    yield "nothing yet", fetched(side, "f", 0)
    for number in range(3):
        produced(side, "f", batch([b"%d" % number, b"x" * 100]))
    for offset in (0, 1, 2, 5, 6, 7, 100, -1, -2):
        yield f"from {offset}", fetched(side, "f", offset)
    yield "no topic", fetched(side, MISSING, 0)
    yield "no partition", fetched(side, "f", 0, partition=2)
    yield "partition -1", fetched(side, "f", 0, partition=-1)
    yield "no name", fetched(side, "", 0)
    yield "a few bytes of the partition", fetched(side, "f", 0, partition_max_bytes=1)
    yield "a few bytes of all", fetched(side, "f", 0, max_bytes=1)
    yield "no bytes", fetched(side, "f", 0, max_bytes=0, partition_max_bytes=0)
    yield "200 bytes", fetched(side, "f", 0, partition_max_bytes=200)
    yield "read committed", fetched(side, "f", 0, isolation_level=1)[5]
    yield "read committed, at the end", fetched(side, "f", 6, isolation_level=1)
    yield "isolation level 7", fetched(side, "f", 6, isolation_level=7)
    yield "a future leader epoch", fetched(side, "f", 0, current_leader_epoch=1 << 20)
    yield "session 7, which does not exist", fetched(side, "f", 0, session_id=7, session_epoch=1)
    yield "a session's epoch without one", fetched(side, "f", 0, session_id=0, session_epoch=5)
    yield (
        "an end of a session that does not exist",
        fetched(side, "f", 0, session_id=7, session_epoch=-1),
    )
    reply = side.ask(1, 12, fetch_fields("f", 0, session_epoch=0))
    yield "a session", reply.session_id != 0
    nothing = {**fetch_fields("f", 0, session_epoch=-1), "topics": ()}
    for session in (0, reply.session_id):
        reply = side.ask(1, 12, nothing | {"session_id": session})
        yield (
            f"no partitions, {'of a session' if session else 'and no session'}",
            (name_of(reply.error_code), reply.session_id, reply.responses),
        )
    yield "version 4", fetched(side, "f", 4, version=4)
    configured(side, "f.zstd", compression_type="zstd")
    produced(side, "f.zstd", batch([b"0"]))
    for version in (4, 9, 10):
        yield f"of a topic in zstd, version {version}", fetched(side, "f.zstd", 0, version=version)
    deleted = {"name": "f", "partitions": [{"partition_index": 0, "offset": 3}]}
    side.ask(21, 2, {"topics": [deleted], "timeout": TIMEOUT})
    for offset in (0, 2, 3, 4):
        yield f"from {offset}, the first 3 deleted", fetched(side, "f", offset)[:4]
    fields = fetch_fields("f", 3)
    fields["topics"][0]["topic_id"] = None
    reply = side.ask(1, 13, fields)
    yield "no topic id", [name_of(each.partitions[0].error_code) for each in reply.responses]


def listed(side: Side, topic: str, timestamp: int, **more: Any) -> Answer:
    """(error, time, offset, leader epoch or none)."""
    version = more.pop("version", 10)
    of_partition = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
    taken = {name: more.pop(name) for name in list(more) if name in of_partition}
    fields = {
        "replica_id": -1,
        "isolation_level": 0,
        "topics": [{"name": topic, "partitions": [of_partition | taken]}],
        "timeout": TIMEOUT,
        **more,
    }
    reply = side.ask(2, version, fields)
    if isinstance(reply, str):
        return (reply,)
    ((found,),) = (each.partitions for each in reply.topics)
    has_epoch = getattr(found, "leader_epoch", -1) >= 0
    return name_of(found.error_code), found.timestamp, found.offset, has_epoch


def list_offsets(side: Side) -> Answers:
    """By time and by name."""
    made(side, "l", 2)
    for timestamp in (-1, -2, -3, -4, -5, 0, AT_MS):
        yield f"{timestamp} of nothing", listed(side, "l", timestamp)
    for at in (10, 30, 20):
        produced(side, "l", built([Record(AT_MS + at, None, b"a"), Record(AT_MS + at, None, b"b")]))
    for timestamp in (-1, -2, -3, -4, -5, -6, -7, 0):
        yield f"{timestamp}", listed(side, "l", timestamp)
    for at in (0, 10, 11, 20, 21, 30, 31):
        yield f"the time {at}", listed(side, "l", AT_MS + at)
    yield "the end, read committed", listed(side, "l", -1, isolation_level=1)
    yield "no topic", listed(side, MISSING, -1)
    yield "no partition", listed(side, "l", -1, partition_index=2)
    yield "a future leader epoch", listed(side, "l", -1, current_leader_epoch=1 << 20)
    yield "a future leader epoch, by time", listed(side, "l", AT_MS, current_leader_epoch=1 << 20)
    for version in (1, 3, 5, 7):
        yield f"the end in version {version}", listed(side, "l", -1, version=version)[:3]
    yield "-4 in version 7", listed(side, "l", -4, version=7)
    yield "-3 in version 5", listed(side, "l", -3, version=5)
    double = [{"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}] * 2
    reply = side.ask(
        2,
        10,
        {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": "l", "partitions": double}],
            "timeout": TIMEOUT,
        },
    )
    yield "twice", [name_of(each.error_code) for each in reply.topics[0].partitions]
    deleted = {"name": "l", "partitions": [{"partition_index": 0, "offset": 3}]}
    side.ask(21, 2, {"topics": [deleted], "timeout": TIMEOUT})
    for timestamp in (-1, -2, -3, -4, AT_MS, AT_MS + 25):
        yield f"{timestamp}, the first 3 deleted", listed(side, "l", timestamp)


def leader_epochs(side: Side) -> Answers:
    """OffsetForLeaderEpoch."""
    made(side, "e", 1)
    produced(side, "e", batch([b"a"] * 3))
    (now,) = side.ask(3, 12, metadata_fields(["e"])).topics[0].partitions

    def ask(epoch: int, current: int = -1, topic: str = "e", partition: int = 0) -> object:
        of_partition = {
            "partition": partition,
            "current_leader_epoch": current,
            "leader_epoch": epoch,
        }
        fields = {"replica_id": -2, "topics": [{"topic": topic, "partitions": [of_partition]}]}
        ((found,),) = (each.partitions for each in side.ask(23, 4, fields).topics)
        same = found.leader_epoch == now.leader_epoch
        return name_of(found.error_code), same, found.end_offset

    yield "now's", ask(now.leader_epoch)
    yield "now's, and known", ask(now.leader_epoch, now.leader_epoch)
    yield "a later one", ask(now.leader_epoch + 1)
    yield "from a later one", ask(now.leader_epoch, now.leader_epoch + 1)
    yield "-1", ask(-1)
    yield "no topic", ask(0, topic=MISSING)
    yield "no partition", ask(0, partition=1)


# ------------------------------------------------------------------------------ topics


def metadata(side: Side) -> Answers:
    """Requests for topics that exist and for others."""
    made(side, "m", 3)

    def ask(*topics: Any, version: int = 12, **more: Any) -> object:
        reply = side.ask(3, version, metadata_fields(topics, **more))
        if isinstance(reply, str):
            return reply
        return [
            (
                name_of(each.error_code),
                each.name,
                each.is_internal,
                each.topic_authorized_operations if version < 13 else None,
                [
                    (name_of(of.error_code), of.partition_index, of.leader_id, of.replica_nodes)
                    for of in sorted(each.partitions, key=lambda of: of.partition_index)
                ],
            )
            for each in sorted(reply.topics, key=lambda each: each.name or "")
        ]

    yield "a topic", ask("m")
    yield "with authorized operations", ask("m", include_topic_authorized_operations=True)
    yield "no topic", ask(MISSING)
    yield "creation is off here", ask(MISSING, allow_auto_topic_creation=True)
    for name in ("", "a/b", ".", "..", "x" * 250):
        yield f"the name {name[:9]!r}", ask(name)
    yield "an unknown id", ask({"name": None, "topic_id": UNKNOWN_ID})
    yield "twice", ask("m", "m")
    yield "none", ask()
    (known,) = side.ask(3, 12, metadata_fields(["m"])).topics
    yield "by id", ask({"name": None, "topic_id": known.topic_id})
    yield "version 13", ask("m", version=13)
    reply = side.ask(3, 9, {**metadata_fields(["m"]), "topics": [{"name": "m"}]})
    yield (
        "the cluster",
        (
            [each.node_id for each in reply.brokers],
            reply.controller_id,
            bool(reply.cluster_id),
            reply.cluster_authorized_operations,
        ),
    )


def creation(side: Side) -> Answers:
    """CreateTopics."""

    def ask(name: str, version: int = 7, *, only_checks: bool = False, **more: Any) -> object:
        fields = create_fields(name, **more)
        if "count" in more:
            fields["topics"][0]["num_partitions"] = fields["topics"][0].pop("count")
        fields["validate_only"] = only_checks
        (found,) = side.ask(19, version, fields).topics
        return (
            name_of(found.error_code),
            found.num_partitions,
            found.replication_factor,
            found.configs is None,
        )

    def config(**pairs: str | None) -> list[dict[str, Any]]:
        return [{"name": k.replace("_", "."), "value": v} for k, v in pairs.items()]

    yield "good", ask("c")
    yield "there already", ask("c")
    yield "there already, checked", ask("c", only_checks=True)
    yield "checked", ask("c.checked", only_checks=True)
    yield "after a check", ask("c.checked")
    for name in ("", ".", "..", "a/b", "a b", "ä", "x" * 249, "x" * 250):
        yield f"the name {name[:9]!r}, {len(name)}", ask(name)
    yield "a name like another's", ask("c_checked")
    for name in ("__consumer_offsets", "__transaction_state", "__cluster_metadata"):
        yield f"the name {name}", ask(name)
    for count in (0, -1, -2):
        yield f"{count} partitions", ask(f"c.n{count}", count=count)
    for factor in (0, -1, -2, 3):
        yield f"{factor} replicas", ask(f"c.r{factor}", replication_factor=factor)
    usual: dict[str, Any] = {"count": -1, "replication_factor": -1}
    one = [{"partition_index": 0, "broker_ids": (1,)}]
    yield "assigned", ask("c.a1", assignments=one, **usual)
    yield "assigned and counted", ask("c.a2", assignments=one)
    gap = [{"partition_index": 1, "broker_ids": (1,)}]
    yield "assigned with a gap", ask("c.a3", assignments=gap, **usual)
    double = [{"partition_index": 0, "broker_ids": (1,)}] * 2
    yield "assigned twice", ask("c.a4", assignments=double, **usual)
    nobody = [{"partition_index": 0, "broker_ids": ()}]
    yield "assigned to no broker", ask("c.a5", assignments=nobody, **usual)
    other = [{"partition_index": 0, "broker_ids": (99,)}]
    yield "assigned to a broker that is not there", ask("c.a6", assignments=other, **usual)
    same = [{"partition_index": 0, "broker_ids": (1, 1)}]
    yield "assigned to the same broker twice", ask("c.a7", assignments=same, **usual)
    yield "configured", ask("c.k1", configs=config(retention_ms="1000"))
    yield "an unknown key", ask("c.k2", configs=config(no_such_key="1"))
    yield "no number", ask("c.k3", configs=config(retention_ms="soon"))
    yield "out of bounds", ask("c.k4", configs=config(retention_ms="-2"))
    yield "no value", ask("c.k5", configs=config(retention_ms=None))
    yield "an unknown policy", ask("c.k6", configs=config(cleanup_policy="burn"))
    yield "an empty policy", ask("c.k7", configs=config(cleanup_policy=""))
    yield "a codec", ask("c.k8", configs=config(compression_type="zstd"))
    yield "an unknown codec", ask("c.k9", configs=config(compression_type="rar"))
    twice = config(retention_ms="1") + config(retention_ms="2")
    yield "a key twice", ask("c.k10", configs=twice)
    wanted = create_fields("c.twice")
    wanted["topics"] *= 2
    reply = side.ask(19, 7, wanted)
    yield "named twice", [(each.name, name_of(each.error_code)) for each in reply.topics]
    yield (
        "old version",
        [name_of(each.error_code) for each in side.ask(19, 4, create_fields("c.old")).topics],
    )


def deletion(side: Side) -> Answers:
    """DeleteTopics, CreatePartitions and DeleteRecords."""
    made(side, "d", 2)
    made(side, "d.gone", 1)
    made(side, "d.id", 1)
    configured(side, "d.compact", cleanup_policy="compact")

    def widen(name: str, count: int, assignments: Any = None, *, only_checks: bool = False) -> str:
        topic = {"name": name, "count": count, "assignments": assignments}
        fields = {"topics": [topic], "timeout": TIMEOUT, "validate_only": only_checks}
        return name_of(side.ask(37, 3, fields).results[0].error_code)

    yield "wider", widen("d", 3)
    yield "as wide", widen("d", 3)
    yield "narrower", widen("d", 1)
    for count in (0, -1):
        yield f"{count} partitions", widen("d", count)
    yield "no topic is wider", widen(MISSING, 3)
    yield "checked", widen("d", 5, only_checks=True)
    yield "assigned", widen("d", 4, [{"broker_ids": (1,)}])
    yield "assigned too little", widen("d", 6, [{"broker_ids": (1,)}])
    yield "assigned to no broker", widen("d", 5, [{"broker_ids": ()}])
    yield "assigned to a broker that is not there", widen("d", 5, [{"broker_ids": (99,)}])

    def shorten(name: str, *offsets: tuple[int, int]) -> object:
        of_topic = [{"partition_index": number, "offset": at} for number, at in offsets]
        topic = {"name": name, "partitions": of_topic}
        reply = side.ask(21, 2, {"topics": [topic], "timeout": TIMEOUT})
        return [
            (each.partition_index, name_of(each.error_code), each.low_watermark)
            for topic in reply.topics
            for each in sorted(topic.partitions, key=lambda each: each.partition_index)
        ]

    produced(side, "d", batch([b"a"] * 5))
    yield "the first two", shorten("d", (0, 2))
    yield "the first two again", shorten("d", (0, 2))
    yield "less than is gone", shorten("d", (0, 1))
    yield "more than there is", shorten("d", (0, 6))
    yield "offset -2", shorten("d", (0, -2))
    yield "all", shorten("d", (0, -1))
    yield "of nothing", shorten("d", (1, 0))
    yield "no partition", shorten("d", (9, 0))
    yield "no topic", shorten(MISSING, (0, 0))
    yield "some good", shorten("d", (0, 5), (1, 7), (2, 0))
    produced(side, "d.compact", built([Record(AT_MS, b"k", b"v")]))
    yield "compacted", shorten("d.compact", (0, 1))

    def delete(name: str | None, topic_id: Any = None) -> object:
        topics = [{"name": name, "topic_id": topic_id}]
        (found,) = side.ask(20, 6, {"topics": topics, "timeout": TIMEOUT}).responses
        return name_of(found.error_code), found.name

    (known,) = side.ask(3, 12, metadata_fields(["d.id"])).topics
    yield "deleted", delete("d.gone")
    yield "deleted again", delete("d.gone")
    yield "deleted by id", delete(None, known.topic_id)
    yield "deleted by id again", delete(None, known.topic_id)
    yield "an unknown id", delete(None, UNKNOWN_ID)
    yield "neither name nor id", delete(None)
    yield "both", delete("d", known.topic_id)
    reply = side.ask(20, 6, {"topics": [{"name": "d", "topic_id": None}] * 2, "timeout": TIMEOUT})
    yield "named twice", [name_of(each.error_code) for each in reply.responses]


def configs(side: Side) -> Answers:
    """DescribeConfigs, AlterConfigs and IncrementalAlterConfigs."""
    made(side, "k", 1)

    def edit(*changes: tuple[str, int, str | None], kind: int = 2, name: str = "k") -> str:
        of = [{"name": k, "config_operation": op, "value": v} for k, op, v in changes]
        resource = {"resource_type": kind, "resource_name": name, "configs": of}
        reply = side.ask(44, 1, {"resources": [resource], "validate_only": False})
        return name_of(reply.responses[0].error_code)

    yield "set", edit(("retention.ms", 0, "1000"))
    yield "unset", edit(("retention.ms", 1, None))
    yield "append", edit(("cleanup.policy", 2, "compact"))
    yield "subtract", edit(("cleanup.policy", 3, "delete"))
    yield "append to a key that is not a list", edit(("retention.ms", 2, "1"))
    yield "no value", edit(("retention.ms", 0, None))
    yield "no operation", edit(("retention.ms", 9, "1"))
    yield "an unknown key", edit(("no.such", 0, "1"))
    yield "an unknown key unset", edit(("no.such", 1, None))
    yield "no number", edit(("retention.ms", 0, "soon"))
    yield "a key twice", edit(("retention.ms", 0, "1"), ("retention.ms", 0, "2"))
    yield "nothing", edit()
    yield "no topic", edit(("retention.ms", 0, "1"), name=MISSING)
    yield "a bad name", edit(("retention.ms", 0, "1"), name="a/b")
    yield "no name", edit(("retention.ms", 0, "1"), name="")
    yield "an unknown kind", edit(("retention.ms", 0, "1"), kind=99)
    rates = [(f"{whose}.replication.throttled.rate", 1, None) for whose in ("leader", "follower")]
    yield "throttles that a broker does not have unset", edit(*rates, kind=4, name="1")

    def described(kind: int, name: str, keys: Sequence[str] | None = None) -> object:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        fields = {
            "resources": [resource],
            "include_synonyms": False,
            "include_documentation": False,
        }
        (found,) = side.ask(32, 4, fields).results
        values = [(each.name, each.value, each.config_source) for each in found.configs]
        return name_of(found.error_code), sorted(values) if keys is not None else bool(values)

    def told(kind: int, name: str) -> Answer:
        fields = {
            "resources": [
                {"resource_type": kind, "resource_name": name, "configuration_keys": None}
            ],
            "include_synonyms": True,
            "include_documentation": False,
        }
        (found,) = side.ask(32, 4, fields).results
        return name_of(found.error_code), sorted(
            (
                *(each.name, each.value, each.config_source, each.config_type, each.read_only),
                [(it.name, it.value, it.source) for it in each.synonyms],
            )
            for each in found.configs
        )

    yield "all", described(2, "k")
    yield "one", described(2, "k", ["cleanup.policy"])
    yield "none", described(2, "k", ["no.such"])
    yield "describe no topic", described(2, MISSING)
    yield "describe a bad name", described(2, "a/b")
    yield "describe no name", described(2, "")
    yield "describe a broker", described(4, "1")
    yield "describe another broker", described(4, "99")
    yield "describe no broker", described(4, "x")
    yield "describe an unknown kind", described(99, "k")
    for kind, what in ((16, "metrics"), (32, "group")):
        yield f"describe {what} of a name", told(kind, "k")
        yield f"describe {what} without a name", told(kind, "")
        yield f"describe a key of {what}", described(kind, "k", ["interval.ms"])
    reply = side.ask(
        32,
        4,
        {
            "resources": [{"resource_type": 2, "resource_name": "k", "configuration_keys": None}],
            "include_synonyms": False,
            "include_documentation": False,
        },
    )
    yield (
        "the keys and their types",
        sorted(
            (each.name, each.config_type, each.read_only, each.is_sensitive)
            for each in reply.results[0].configs
        ),
    )
    for each in sorted(reply.results[0].configs, key=lambda each: each.name):
        yield f"the value of {each.name}", each.value

    def replace(*pairs: tuple[str, str | None], name: str = "k") -> str:
        of = [{"name": k, "value": v} for k, v in pairs]
        resource = {"resource_type": 2, "resource_name": name, "configs": of}
        reply = side.ask(33, 2, {"resources": [resource], "validate_only": False})
        return name_of(reply.responses[0].error_code)

    yield "replace", replace(("retention.ms", "1000"))
    yield "replace by nothing", replace()
    yield "replace, no value", replace(("retention.ms", None))
    yield "replace an unknown key", replace(("no.such", "1"))
    yield "replace of no topic", replace(("retention.ms", "1"), name=MISSING)


def loggers(side: Side) -> Answers:
    """DescribeConfigs, IncrementalAlterConfigs, AlterConfigs and ListConfigResources of loggers."""

    def edit(value: str | None, operation: int = 0, key: str = "root", name: str = "1") -> str:
        of = [{"name": key, "config_operation": operation, "value": value}]
        resource = {"resource_type": 8, "resource_name": name, "configs": of}
        reply = side.ask(44, 1, {"resources": [resource], "validate_only": False})
        return name_of(reply.responses[0].error_code)

    def described(name: str) -> Answer:
        resource = {"resource_type": 8, "resource_name": name, "configuration_keys": ["root"]}
        fields = {"resources": [resource], "include_synonyms": True, "include_documentation": True}
        (found,) = side.ask(32, 4, fields).results
        return name_of(found.error_code), [
            (each.name, each.value, each.config_source, each.read_only, each.synonyms)
            for each in found.configs
        ]

    for level in ("WARN", "ERROR"):
        yield f"set {level}", edit(level)
        yield f"describe {level}", described("1")
    yield "a level in small letters", edit("info")
    yield "no level", edit("loud")
    yield "no value", edit(None)
    yield "delete the root's", edit(None, 1)
    yield "append", edit("INFO", 2)
    yield "subtract", edit("INFO", 3)
    yield "an unknown logger", edit("INFO", key="no.such")
    yield "delete an unknown logger", edit(None, 1, key="no.such")
    yield "another broker", edit("INFO", name="99")
    yield "no broker", edit("INFO", name="")
    yield "a name that is not a number", edit("INFO", name="x")
    yield "describe another broker's", described("99")
    yield "describe no broker's", described("")
    yield "describe a name that is not a number", described("x")
    resource = {"resource_type": 8, "resource_name": "1"}
    resource |= {"configs": [{"name": "root", "value": "INFO"}]}
    reply = side.ask(33, 2, {"resources": [resource], "validate_only": False})
    yield "replace", name_of(reply.responses[0].error_code)
    yield "still", described("1")
    listed = side.ask(74, 1, {"resource_types": (8,)}).config_resources
    yield "list", [(each.resource_type, each.resource_name) for each in listed]


def group_configs(side: Side) -> Answers:
    """Requests for the configuration of groups."""

    def reply_to(key: int, version: int, name: str, entries: list[Any], **more: Any) -> str:
        resource = {"resource_type": 32, "resource_name": name, "configs": entries}
        fields = {"resources": [resource], "validate_only": False, **more}
        return name_of(side.ask(key, version, fields).responses[0].error_code)

    def edit(*changes: tuple[str, int, str | None], name: str = "g", **more: Any) -> str:
        of = [{"name": k, "config_operation": op, "value": v} for k, op, v in changes]
        return reply_to(44, 1, name, of, **more)

    def replace(*pairs: tuple[str, str | None], name: str = "g", **more: Any) -> str:
        return reply_to(33, 2, name, [{"name": k, "value": v} for k, v in pairs], **more)

    def described(name: str = "g") -> Answer:
        resource = {"resource_type": 32, "resource_name": name, "configuration_keys": None}
        fields = {"resources": [resource], "include_synonyms": True, "include_documentation": False}
        (found,) = side.ask(32, 4, fields).results
        return name_of(found.error_code), sorted(
            (
                each.name,
                each.value,
                each.config_source,
                [(it.name, it.value, it.source) for it in each.synonyms],
            )
            for each in found.configs
        )

    def listed() -> object:
        found = side.ask(74, 1, {"resource_types": (32,)}).config_resources
        return sorted((each.resource_type, each.resource_name) for each in found)

    session, reset = "consumer.session.timeout.ms", "share.auto.offset.reset"
    yield "only checked", edit((session, 0, "50000"), validate_only=True)
    yield "still the defaults", described()
    yield "set", edit((session, 0, "50000"), (reset, 0, "earliest"))
    yield "described", described()
    yield "another group", described("other")
    yield "listed", listed()
    bounds = {
        session: ("44999", "45000", "60000", "60001", "soon"),
        "consumer.heartbeat.interval.ms": ("4999", "5000", "15000", "15001"),
        "share.session.timeout.ms": ("44999", "45000", "60000", "60001"),
        "share.heartbeat.interval.ms": ("4999", "5000", "15000", "15001"),
        "share.record.lock.duration.ms": ("14999", "15000", "60000", "60001"),
        "streams.session.timeout.ms": ("44999", "45000", "60000", "60001"),
        "streams.heartbeat.interval.ms": ("4999", "5000", "15000", "15001"),
        "streams.num.standby.replicas": ("-1", "0", "2", "3"),
        "share.isolation.level": ("read_committed", "read_uncommitted", "none"),
        reset: ("latest", "none", "by_duration:PT1H", "by_duration:P7D", "by_duration:1h",
                "by_duration:P", "by_duration:", "by_duration:-PT1H", "by_duration:PT1.5S"),
    }  # fmt: skip
    for key, values in bounds.items():
        for value in values:
            yield f"{key} = {value}", edit((key, 0, value))
    yield "an unknown key", edit(("retention.ms", 0, "1"))
    yield "an unknown key unset", edit(("no.such", 1, None))
    yield "append", edit((session, 2, "50000"))
    yield "no value", edit((session, 0, None))
    yield "a key twice", edit((session, 0, "50000"), (session, 0, "50001"))
    yield "nothing", edit()
    yield "no name", edit((session, 0, "50000"), name="")
    yield "unset", edit((session, 1, None))
    yield "replace", replace((session, "55000"))
    yield "after that", described()
    yield "replace by a bad value", replace((session, "1"))
    yield "replace, no value", replace((session, None))
    yield "replace by nothing", replace()
    yield "the defaults again", described()
    yield "listed again", listed()


# ------------------------------------------------------------------------------ groups


def subscription(*topics: str) -> bytes:
    """`ConsumerProtocolSubscription`, version 0."""
    names = b"".join(struct.pack(">h", len(each)) + each.encode() for each in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


@dataclass
class Member:
    """A member of a group, over a connection of its own: a join may wait for others."""

    side: Side
    group: str
    id: str = ""
    instance: str | None = None
    generation: int = -1

    def __post_init__(self) -> None:
        self.frames = Frames(self.side.address)

    def ask(self, key: int, version: int, fields: Mapping[str, Any]) -> Any:
        return self.frames.ask(key, version, fields)

    def join(self, version: int = 9, **more: Any) -> Any:
        """JoinGroup; a member id that is given is taken, and asked with at once."""
        fields = {
            "group_id": self.group,
            "session_timeout": SESSION,
            "rebalance_timeout": SESSION,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription("g")}],
            "reason": None,
            **more,
        }
        reply = self.ask(11, version, fields)
        if name_of(reply.error_code) == "member_id_required" and not self.id:
            self.id = reply.member_id
            return self.join(version, **{**more, "member_id": self.id})
        if name_of(reply.error_code) == "none":
            self.id, self.generation = reply.member_id, reply.generation_id
        return reply

    def sync(self, assignments: Mapping[str, bytes] | None = None, **more: Any) -> Any:
        fields = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [
                {"member_id": each, "assignment": part}
                for each, part in (assignments or {}).items()
            ],
            **more,
        }
        return self.ask(14, 5, fields)

    def beat(self, **more: Any) -> str:
        fields = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            **more,
        }
        return name_of(self.ask(12, 4, fields).error_code)

    def commit(self, offset: int = 1, topic: str = "g", partition: int = 0, **more: Any) -> object:
        version = more.pop("version", 9)
        place = {
            "partition_index": partition,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": more.pop("metadata", ""),
        }
        fields = {
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "topics": [{"name": topic, "partitions": [place]}],
            **more,
        }
        reply = self.ask(8, version, fields)
        return [name_of(of.error_code) for each in reply.topics for of in each.partitions]

    def leave(self, **more: Any) -> object:
        member = {"member_id": self.id, "group_instance_id": self.instance, "reason": None, **more}
        reply = self.ask(13, 5, {"group_id": self.group, "members": [member]})
        return name_of(reply.error_code), [name_of(each.error_code) for each in reply.members]

    def close(self) -> None:
        self.frames.close()


def joined(reply: Any, *, ids: Mapping[str, str] | None = None) -> object:
    """Returns the parts of a join's answer that both sides must agree on; member ids by name."""
    called = dict(ids or {})
    return (
        name_of(reply.error_code),
        reply.generation_id,
        reply.protocol_type,
        reply.protocol_name,
        called.get(reply.leader, bool(reply.leader)),
        called.get(reply.member_id, bool(reply.member_id)),
        sorted((called.get(of.member_id, True), of.group_instance_id) for of in reply.members),
        getattr(reply, "skip_assignment", None),
    )


def synced(reply: Any) -> object:
    """All that a sync says."""
    return (
        name_of(reply.error_code),
        reply.protocol_type,
        reply.protocol_name,
        bytes(reply.assignment),
    )


def coordinated(side: Side) -> None:
    """Returns when producers and groups are served, and the topic g is there for these."""
    made(side, "g", 3)
    asking = Member(side, "asking", id="x", generation=1)
    wait_until(lambda: name_of(new_producer(side.frames).error_code) == "none", "ids are given")
    fields = {"key_type": 0, "coordinator_keys": [asking.group]}

    def is_found() -> bool:
        (found,) = side.ask(10, 4, fields).coordinators
        return name_of(found.error_code) == "none"

    wait_until(is_found, "there is a coordinator")
    wait_until(lambda: asking.beat() == "unknown_member_id", "it coordinates")
    asking.close()


def strangers(side: Side) -> Answers:
    """Requests of a client that is not a member."""
    one = Member(side, "g.none", id="x", generation=1)
    yield "heartbeat", one.beat()
    yield "heartbeat without a generation", one.beat(generation_id=-1)
    yield "heartbeat of an instance", one.beat(group_instance_id="i")
    yield "heartbeat without a group", one.beat(group_id="")
    for group in ("", "g.none"):
        for topics in ((), ({"name": "t", "partitions": ({"partition_index": 0},)},)):
            reply = side.ask(47, 0, {"group_id": group, "topics": topics})
            yield (
                f"delete offsets of {group!r}, {len(topics)} topics",
                (name_of(reply.error_code), reply.topics),
            )
    yield "sync", synced(one.sync())
    yield "sync without a group", synced(one.sync(group_id=""))
    yield "leave", one.leave()
    yield "leave of an instance", one.leave(member_id="", group_instance_id="i")
    yield "join", joined(one.join(member_id="x"))
    yield "join without a group", joined(one.join(group_id="", member_id=""))
    for milliseconds in (0, 999, 10_000_000):
        yield (
            f"a session of {milliseconds} ms",
            joined(one.join(session_timeout=SESSION / 10_000 * milliseconds, member_id="")),
        )
    yield "no protocols", joined(one.join(protocols=(), member_id=""))
    yield "no protocol type", joined(one.join(protocol_type="", member_id=""))
    fresh = Member(side, "g.fresh", id="x", generation=1)
    yield "commit with a generation", fresh.commit()
    yield "commit with a generation, version 8", fresh.commit(version=8)
    yield "commit without one, as a member", fresh.commit(generation_id_or_member_epoch=-1)
    simple = Member(side, "g.simple")
    yield "commit without a member", simple.commit(5)
    yield "commit of an instance", simple.commit(6, group_instance_id="i")
    yield "commit without a group", simple.commit(group_id="")
    yield "commit of no topic", simple.commit(topic=MISSING)
    yield "commit of no partition", simple.commit(partition=3)
    yield "commit of too much metadata", simple.commit(metadata="x" * 4097)
    yield "commit of metadata", simple.commit(7, metadata="x" * 4096)
    yield "commit of null metadata", simple.commit(7, metadata=None)
    yield "commit backwards", simple.commit(2)
    yield "commit of a negative offset", simple.commit(-7, partition=1)

    def fetched_offsets(group: str, topics: Any, version: int = 7) -> object:
        fields: dict[str, Any] = {"group_id": group, "topics": topics, "require_stable": True}
        reply = side.ask(9, version, fields)
        return (
            name_of(reply.error_code) if version >= 2 else None,
            sorted(
                (
                    each.name,
                    of.partition_index,
                    of.committed_offset,
                    getattr(of, "committed_leader_epoch", None),
                    of.metadata,
                    name_of(of.error_code),
                )
                for each in reply.topics
                for of in each.partitions
            ),
        )

    some = [{"name": "g", "partition_indexes": (0, 2, 9)}]
    yield "offsets", fetched_offsets("g.simple", some)
    yield "all offsets", fetched_offsets("g.simple", None)
    yield "offsets of no group", fetched_offsets("g.nobody", some)
    yield "all offsets of no group", fetched_offsets("g.nobody", None)
    yield (
        "offsets of no topic",
        fetched_offsets("g.simple", [{"name": MISSING, "partition_indexes": (0,)}]),
    )
    yield "offsets of an empty name", fetched_offsets("", None)
    yield "offsets, version 1", fetched_offsets("g.simple", some, 1)

    def described(group: str, version: int) -> object:
        fields = {"groups": (group,), "include_authorized_operations": False}
        (found,) = side.ask(15, version, fields).groups
        return (
            name_of(found.error_code),
            found.group_state,
            found.protocol_type,
            found.protocol_data,
            len(found.members),
        )

    yield "describe nobody", described("g.nobody", 5)
    yield "describe an unknown group, version 6", described("g.nobody", 6)
    yield "describe an empty name", described("", 5)
    yield "describe who has committed", described("g.simple", 5)

    def deleted(*groups: str) -> object:
        reply = side.ask(42, 2, {"groups_names": groups})
        return [(each.group_id, name_of(each.error_code)) for each in reply.results]

    def forgotten(group: str, topic: str, partition: int = 0) -> object:
        topics = [{"name": topic, "partitions": [{"partition_index": partition}]}]
        reply = side.ask(47, 0, {"group_id": group, "topics": topics})
        found = [name_of(of.error_code) for each in reply.topics for of in each.partitions]
        return name_of(reply.error_code), found

    yield "forget", forgotten("g.simple", "g", 1)
    yield "forget an unknown topic", forgotten("g.simple", "g", 2)
    yield "forget of no topic", forgotten("g.simple", MISSING)
    yield "forget of an unknown group", forgotten("g.nobody", "g")
    yield "delete nobody", deleted("g.nobody")
    yield "delete an empty name", deleted("")
    yield "delete", deleted("g.simple")
    yield "delete again", deleted("g.simple")
    for each in (one, fresh, simple):
        each.close()


def membership(side: Side) -> Answers:
    """One member, then two, and their generations."""
    first, second = Member(side, "g.two"), Member(side, "g.two")
    required = first.ask(
        11,
        9,
        {
            "group_id": "g.two",
            "session_timeout": SESSION,
            "rebalance_timeout": SESSION,
            "member_id": "",
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription("g")}],
            "reason": None,
        },
    )
    yield "an id is required", joined(required)
    first.id = required.member_id
    yield "a pending one beats", first.beat(generation_id=0)
    yield "alone", joined(first.join(), ids={first.id: "first"})
    yield "beats before it has synced", first.beat()
    yield "commits before it has synced", first.commit()
    yield "syncs with another protocol", synced(first.sync(protocol_name="roundrobin"))
    yield "syncs with another type", synced(first.sync(protocol_type="connect"))
    yield "syncs without a protocol", synced(first.sync(protocol_name=None))
    yield "syncs without a type", synced(first.sync(protocol_type=None))
    yield "syncs in another generation", synced(first.sync(generation_id=7))
    yield "syncs", synced(first.sync({first.id: b"all"}))
    yield "syncs again", synced(first.sync({first.id: b"none"}))
    yield "beats", first.beat()
    yield "beats in a generation before", first.beat(generation_id=0)
    yield "beats in a generation to come", first.beat(generation_id=2)
    yield "beats as another", first.beat(member_id="x")
    yield "beats as an instance", first.beat(group_instance_id="i")
    yield "commits", first.commit(3)
    yield "commits in another generation", first.commit(4, generation_id_or_member_epoch=2)
    yield "commits as another", first.commit(4, member_id="x")
    yield (
        "a client commits without a generation",
        first.commit(4, generation_id_or_member_epoch=-1, member_id=""),
    )
    yield "it commits without a generation", first.commit(4, generation_id_or_member_epoch=-1)
    stranger = Member(side, "g.two")
    yield (
        "joins with another protocol",
        joined(stranger.join(protocols=[{"name": "other", "metadata": b""}])),
    )
    yield "joins with another type", joined(stranger.join(protocol_type="connect"))
    yield "joins with an unknown id", joined(stranger.join(member_id="x"))
    with ThreadPoolExecutor() as pool:
        coming: Future[Any] = pool.submit(second.join)
        while (beat := first.beat()) == "none":
            pass
        yield "has to join again", beat
        yield "commits while others join", first.commit(5)
        yield "syncs while others join", synced(first.sync({first.id: b"all"}))
        again = first.join()
        arrived = coming.result()
        ids = {first.id: "first", second.id: "second"}
        yield "the first of two", joined(again, ids=ids)
        yield "the second of two", joined(arrived, ids=ids)
        yield "commits before the sync", second.commit(5)
        waiting: Future[Any] = pool.submit(second.sync)
        yield "the leader syncs", synced(first.sync({first.id: b"one", second.id: b"two"}))
        yield "the other one syncs", synced(waiting.result())
        yield "beats of two", (first.beat(), second.beat())
        fields = {"groups": ("g.two",), "include_authorized_operations": True}
        (found,) = side.ask(15, 5, fields).groups
        yield (
            "described",
            (
                found.authorized_operations,
                name_of(found.error_code),
                found.group_state,
                found.protocol_type,
                found.protocol_data,
                sorted(
                    (
                        ids[each.member_id],
                        each.client_id,
                        bytes(each.member_metadata),
                        bytes(each.member_assignment),
                        each.client_host,
                    )
                    for each in found.members
                ),
            ),
        )
        reply = side.ask(42, 2, {"groups_names": ("g.two",)})
        yield "deleted with members", [name_of(each.error_code) for each in reply.results]
        topics = [{"name": name, "partitions": [{"partition_index": 0}]} for name in ("g", MISSING)]
        reply = side.ask(47, 0, {"group_id": "g.two", "topics": topics})
        yield (
            "offsets deleted with members",
            (
                name_of(reply.error_code),
                sorted(
                    (each.name, name_of(of.error_code))
                    for each in reply.topics
                    for of in each.partitions
                ),
            ),
        )
        yield "a member that is not the leader joins again", joined(second.join(), ids=ids)
        yield "no member has to join for that", (first.beat(), second.beat())
        changed_one = [{"name": "range", "metadata": subscription("g", "h")}]
        coming = pool.submit(second.join, protocols=changed_one)
        while (beat := first.beat()) == "none":
            pass
        yield "with another subscription", beat
        leaving = first.leave()
        yield "one leaves", leaving
        yield "the other one is the leader", joined(coming.result(), ids=ids)
        yield "the one that left beats", first.beat()
        yield "the one that left commits", first.commit(9)
        yield "the one that left leaves", first.leave()
        yield "the leader of one syncs", synced(second.sync({second.id: b"all"}))
        coming = pool.submit(second.join)
        yield "a leader joins again", joined(coming.result(), ids=ids)
        yield "a sync without assignments", synced(second.sync())
        yield "the last one leaves", second.leave()
    (found,) = side.ask(15, 5, fields).groups
    yield "no member is left", (found.group_state, found.protocol_type, found.protocol_data)
    reply = side.ask(16, 5, {"states_filter": ("empty",), "types_filter": ()})
    yield (
        "listed",
        [
            (each.group_id, each.protocol_type, each.group_state, each.group_type)
            for each in reply.groups
            if each.group_id == "g.two"
        ],
    )
    yield "listed in an unknown state", _listed(side, ("asleep",), ())
    yield "listed of an unknown type", _listed(side, (), ("modern",))
    third = Member(side, "g.two")
    yield "the next generation continues", joined(third.join(), ids={third.id: "third"})
    for each in (first, second, third, stranger):
        each.close()


def _listed(side: Side, states: Sequence[str], types: Sequence[str]) -> object:
    reply = side.ask(16, 5, {"states_filter": states, "types_filter": types})
    return name_of(reply.error_code), len(reply.groups)


def old_members(side: Side) -> Answers:
    """Versions of clients of long ago."""
    for version in (0, 1, 3, 4, 5, 6, 7, 8):
        one = Member(side, f"g.v{version}")
        reply = one.join(version)
        yield f"joins in version {version}", joined_before(reply)
        one.close()


def joined_before(reply: Any) -> object:
    """Requests of an old version."""
    return (
        name_of(reply.error_code),
        reply.generation_id,
        getattr(reply, "protocol_type", None),
        reply.protocol_name,
        reply.leader == reply.member_id,
        len(reply.members),
    )


def statics(side: Side) -> Answers:
    """Static members, and processes that replace them."""
    old = Member(side, "g.static", instance="one")
    yield "joins at once", joined(old.join(), ids={old.id: "old"})
    yield "syncs", synced(old.sync({old.id: b"all"}))
    new = Member(side, "g.static", instance="one")
    reply = new.join()
    ids = {old.id: "old", new.id: "new"}
    yield "is replaced", joined(reply, ids=ids)
    yield "the new one gets the same", synced(new.sync())
    yield "the old one beats", old.beat()
    yield "the old one syncs", synced(old.sync())
    yield "the old one commits", old.commit()
    yield "the old one joins", joined(old.join(), ids=ids)
    yield "the old one leaves", old.leave()
    yield "the new one beats", new.beat()
    yield "the new one commits", new.commit(3)
    older = Member(side, "g.static", instance="one")
    reply = older.join(8)
    yield (
        "is replaced in version 8",
        (
            name_of(reply.error_code),
            reply.generation_id,
            reply.leader == older.id,
            len(reply.members),
        ),
    )
    yield "another instance beats", older.beat(group_instance_id="two")
    yield "leaves by its instance", older.leave(member_id="")
    yield "leaves by its instance again", older.leave(member_id="")
    for each in (old, new, older):
        each.close()


# ------------------------------------------------------------------------------ known differences


def placement(side: Side) -> Answers:
    """ElectLeaders, reassignments, DescribeQuorum and AlterReplicaLogDirs."""
    made(side, "r", 2)

    def elect(*partitions: int, topic: str = "r", kind: int = 0) -> object:
        topics = [{"topic": topic, "partitions": partitions}]
        fields = {"election_type": kind, "topic_partitions": topics, "timeout": TIMEOUT}
        return elected(side.ask(43, 2, fields))

    yield "elect", elect(0)
    yield "elect two", elect(1, 0)
    yield "elect one twice", elect(0, 0)
    yield "elect uncleanly", elect(0, kind=1)
    yield "elect in an unknown way", elect(0, kind=7)
    yield "elect no partition", elect(9)
    yield "elect no topic", elect(0, topic=MISSING)
    yield "elect nothing", elect()
    for name, these in (("all", None), ("no topics", ())):
        fields = {"election_type": 0, "topic_partitions": these, "timeout": TIMEOUT}
        yield f"elect {name}", elected(side.ask(43, 2, fields))
    older = {"topic_partitions": [{"topic": "r", "partitions": (0,)}], "timeout": TIMEOUT}
    (of_topic,) = side.ask(43, 0, older).replica_election_results
    yield "elect by version 0", name_of(of_topic.partition_result[0].error_code)

    def assign(replicas: Sequence[int] | None, partition: int = 0, topic: str = "r") -> object:
        wanted = {"partition_index": partition, "replicas": replicas}
        topics = [{"name": topic, "partitions": [wanted]}]
        fields = {"timeout": TIMEOUT, "allow_replication_factor_change": True, "topics": topics}
        reply = side.ask(45, 1, fields)
        ((found,),) = (each.partitions for each in reply.responses)
        return name_of(reply.error_code), found.partition_index, name_of(found.error_code)

    yield "assign its broker", assign((1,))
    yield "cancel", assign(None)
    yield "assign nobody", assign(())
    yield "assign one twice", assign((1, 1))
    yield "assign an unknown broker", assign((99,))
    yield "assign an unknown broker too", assign((1, 99))
    yield "assign broker -1", assign((-1,))
    yield "assign no partition", assign((1,), 9)
    yield "cancel no partition", assign(None, 9)
    yield "assign no topic", assign((1,), topic=MISSING)
    yield "cancel no topic", assign(None, topic=MISSING)
    asked: list[dict[str, Any]] = [
        {"name": "r", "partition_indexes": (0, 9)},
        {"name": MISSING, "partition_indexes": (0,)},
    ]
    for name, listed in (("all", None), ("nothing", []), ("some", asked)):
        reply = side.ask(46, 0, {"timeout": TIMEOUT, "topics": listed})
        yield f"assignments of {name}", (name_of(reply.error_code), list(reply.topics))

    def quorum(*topics: tuple[str, Sequence[int]], version: int = 2) -> object:
        wanted = [
            {"topic_name": name, "partitions": [{"partition_index": each} for each in partitions]}
            for name, partitions in topics
        ]
        reply = side.ask(55, version, {"topics": wanted})
        return name_of(reply.error_code), [
            (
                *(name_of(each.error_code), each.partition_index, each.leader_id),
                [it.replica_id for it in each.current_voters],
                each.high_watermark > 0,
                all(it.log_end_offset == each.high_watermark for it in each.current_voters),
            )
            for topic in reply.topics
            for each in topic.partitions
        ]

    metadata_log = "__cluster_metadata"
    for version in (0, 1, 2):
        yield f"the quorum, version {version}", quorum((metadata_log, [0]), version=version)
    yield "the quorum of partition 1", quorum((metadata_log, [1]))
    yield "the quorum of two partitions", quorum((metadata_log, [0, 1]))
    yield "the quorum of a topic", quorum(("r", [0]))
    yield "the quorum of nothing", quorum()
    yield "the quorum of no partition", quorum((metadata_log, []))

    own = side.ask(35, 4, {"topics": None}).results[0].log_dir
    for path, where in ((own, "its folder"), ("/nowhere", "another"), ("", "nowhere")):
        for topic, partition in (("r", 0), ("r", 9), (MISSING, 0), ("a/b", 0)):
            moved = {"name": topic, "partitions": (partition,)}
            reply = side.ask(34, 2, {"dirs": [{"path": path, "topics": [moved]}]})
            ((found,),) = (each.partitions for each in reply.results)
            yield f"{topic}-{partition} to {where}", name_of(found.error_code)


def elected(reply: Any) -> Answer:
    """The errors of an election; topics without one are left out."""
    return name_of(reply.error_code), [
        (each.topic, it.partition_id, name_of(it.error_code))
        for each in reply.replica_election_results
        for it in each.partition_result
    ]


def coordinators(side: Side) -> Answers:
    """FindCoordinator."""

    def ask(key: str, kind: int = 0) -> object:
        reply = side.ask(10, 4, {"key_type": kind, "coordinator_keys": [key]})
        if isinstance(reply, str):
            return reply
        return [
            (each.key, name_of(each.error_code), each.node_id, each.port >= 0)
            for each in reply.coordinators
        ]

    yield "of a group", ask("g")
    yield "of an empty name", ask("")
    yield "of an unknown kind", ask("g", 9)
    yield "of a share group without a partition", ask("g", 2)
    many = side.ask(10, 4, {"key_type": 0, "coordinator_keys": ["b", "a", "b"]})
    yield "of many", sorted((each.key, name_of(each.error_code)) for each in many.coordinators)


def strange_versions(side: Side) -> Answers:
    """ApiVersions."""
    client = {"client_software_name": "frames", "client_software_version": "1"}
    reply = side.ask(18, 3, client)
    yield "good", name_of(reply.error_code)
    listed = {each.api_key: (each.min_version, each.max_version) for each in reply.api_keys}
    for api in APIS.values():
        yield f"the versions of {api.name}", listed[api.key]
    bad = {"client_software_name": "a b/", "client_software_version": "1"}
    yield "a bad name", name_of(side.ask(18, 3, bad).error_code)
    bad = {"client_software_name": "", "client_software_version": ""}
    yield "no name", name_of(side.ask(18, 3, bad).error_code)


_TRUNCATED: Final = "half a batch was damaged on its way, so its producer may try again"
_CODEC: Final = "the codec is named, where Kafka reports an internal error"
_CUT: Final = "as much as is there of a batch that does not decompress is damaged"
_ASSIGNED: Final = "the brokers agree on who leads what"
_DEFAULT: Final = "another default; docs/kafka.md says why"

DIFFERENT: Final[Mapping[tuple[str, str], Differs]] = {
    ("produce", "records null"): Differs(
        ("invalid_record", -1), SILENCE, "Kafka's request handler fails and never answers"
    ),
    ("produce", "a byte more"): Differs(
        ("invalid_record", -1), ("none", 0), "bytes that are not a batch are refused, not ignored"
    ),
    ("produce", "a byte less"): Differs(
        ("corrupt_message", -1), ("invalid_record", -1), _TRUNCATED
    ),
    ("produce", "half of it"): Differs(("corrupt_message", -1), ("invalid_record", -1), _TRUNCATED),
    ("produce", "magic -1"): Differs(
        ("invalid_record", -1), ("corrupt_message", -1), "nor will it be another one if sent again"
    ),
    ("produce", "codec 5"): Differs(
        ("unsupported_compression_type", -1), ("unknown_server_error", -1), _CODEC
    ),
    ("produce", "codec 7"): Differs(
        ("unsupported_compression_type", -1), ("unknown_server_error", -1), _CODEC
    ),
    ("produce", "said to be gzip"): Differs(
        ("corrupt_message", -1), ("unknown_server_error", -1), _CUT
    ),
    ("produce", "said to be zstd"): Differs(
        ("corrupt_message", -1), ("unknown_server_error", -1), _CUT
    ),
    ("produce", "said to be appended"): Differs(
        ("invalid_timestamp", -1), ("none", 0), "only a broker knows when it was appended"
    ),
    ("produce", "said to be appended, in gzip"): Differs(
        ("invalid_timestamp", -1), ("none", 0), "only a broker knows when it was appended"
    ),
    ("limits", "cut to what may be"): Differs(
        ("corrupt_message", -1), ("invalid_record", -1), _TRUNCATED
    ),
    ("idempotence", "epoch -1"): Differs(
        ("invalid_record", -1),
        ("invalid_producer_epoch", -1),
        "an id without an epoch is not a stamp",
    ),
    ("idempotence", "in a transaction that is none"): Differs(
        ("invalid_record", -1),
        ("transactional_id_authorization_failed", -1),
        "there are no transactions",
    ),
    ("fetch", "isolation level 7"): Differs(
        ("none", 6, 6, 0, None, []),
        ("unknown_server_error", 1),
        "all offsets are committed, whichever client asks",
    ),
    ("list_offsets", "-3, the first 3 deleted"): Differs(
        ("none", AT_MS + 30, 3, True),
        ("none", AT_MS + 30, 2, True),
        "a deleted record is not described",
    ),
    ("creation", "a name like another's"): Differs(
        ("none", 1, 1, False),
        ("invalid_topic_exception", -1, -1, False),
        "Kafka's metrics take points for underscores; a topic is a folder here",
    ),
    ("creation", "the name __consumer_offsets"): Differs(
        ("invalid_topic_exception", -1, -1, False),
        ("topic_already_exists", -1, -1, False),
        "only the broker creates it, whether it exists or not",
    ),
    ("creation", "the name __transaction_state"): Differs(
        ("invalid_topic_exception", -1, -1, False),
        ("none", 1, 1, False),
        "there are no transactions, whose state it would hold",
    ),
    ("creation", "3 replicas"): Differs(
        ("none", 1, 1, False),
        ("invalid_replication_factor", -1, -1, False),
        "the root's storage replicates; topics.refuse_replication refuses it",
    ),
    ("creation", "assigned to a broker that is not there"): Differs(
        ("none", 1, 1, False), ("invalid_replica_assignment", -1, -1, False), _ASSIGNED
    ),
    ("deletion", "assigned to a broker that is not there"): Differs(
        "none", "invalid_replica_assignment", _ASSIGNED
    ),
    ("configs", "no operation"): Differs(
        "invalid_request", "unknown_server_error", "it is the request that is wrong"
    ),
    ("configs", "the value of max.message.bytes"): Differs("67108864", "1048588", _DEFAULT),
    ("configs", "the value of message.timestamp.after.max.ms"): Differs(
        str(2**63 - 1), "3600000", _DEFAULT
    ),
    ("group_configs", "listed again"): Differs(
        [], [(32, "g")], "Kafka lists a group that once had a configuration"
    ),
    ("configs", "the value of retention.ms"): Differs("-1", "604800000", _DEFAULT),
}
"""By scenario and name; of these, docs/kafka.md has what clients meet in earnest."""

SCENARIOS: Final[Sequence[Callable[[Side], Answers]]] = [
    produce,
    limits,
    idempotence,
    fetch,
    list_offsets,
    leader_epochs,
    metadata,
    creation,
    deletion,
    configs,
    group_configs,
    placement,
    coordinators,
    strangers,
    membership,
    old_members,
    statics,
    strange_versions,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_kafka_answers_the_same(
    sides: tuple[Side, Side], scenario: Callable[[Side], Answers]
) -> None:
    """Compares error codes and everything else that must agree, except for known differences."""
    ours, theirs = sides
    name = scenario.__name__
    known = {at: each for (of, at), each in DIFFERENT.items() if of == name}
    check_answers(scenario(ours), scenario(theirs), known)


def test_a_kafka_alters_its_loggers_alike(sides: tuple[Side, Side]) -> None:
    """Compares error codes and levels, where the logging is that of a standing broker."""
    ours, theirs = sides
    with logging_restored():
        configure(LogSettings(level="error"))
        check_answers(loggers(ours), loggers(theirs), {})
