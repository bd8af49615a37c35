"""MirrorMaker 2, unmodified, between a real Kafka and a broker of ours, both ways at once.

At ours it logs in as a user that has no other rights than those that mirroring needs.

MirrorMaker and Kafka come from Maven's repositories by Spark's Ivy; where they cannot be got, the
test says so. Of each way, Connect keeps its topics on the side that it writes to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import deltalake
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
)

from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog.security import users
from sparklog.security.acl import CLUSTER_NAME, Operation, ResourceType
from sparklog.settings import GroupSettings, KafkaSettings
from sparklog.storage.objects import open_store
from tests.support.acls import acl, set_acls
from tests.support.jvms import Program, class_path, running
from tests.support.kafkas import broker
from tests.support.users import PASSWORD, add_alice, change_users
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(400)]

GROUPS: Final = GroupSettings(initial_rebalance_delay_ms=200, min_session_timeout_ms=1_000)
KAFKA: Final = {"group.initial.rebalance.delay.ms": "200"}
MIRROR_MAKER: Final = "org.apache.kafka.connect.mirror.MirrorMaker"
TERMINATED: Final = 128 + 15
TOPIC: Final = "orders"
GROUP: Final = "g"
CONFIG: Final = {"max.message.bytes": "2000000", "delete.retention.ms": "7200000"}
HOUR_MS: Final = 3_600_000
SECONDS: Final = 30.0
LOADING: Final = {
    confluent_kafka.KafkaError.NOT_COORDINATOR,
    confluent_kafka.KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
"""State of a new group in Kafka."""
PROPERTIES: Final = {
    "clusters": "kafka,ours",
    "kafka->ours.enabled": "true",
    "ours->kafka.enabled": "true",
    "topics": TOPIC,
    "groups": GROUP,
    "replication.factor": "1",
    **{
        f"{topic}.replication.factor": "1"
        for topic in ("checkpoints.topic", "heartbeats.topic", "offset-syncs.topic")
    },
    **{f"{kind}.storage.replication.factor": "1" for kind in ("offset", "status", "config")},
    "sync.group.offsets.enabled": "true",
    # To continue after a group's last record, the last offset must be translated.
    "offset.lag.max": "0",
    **{
        f"{what}.interval.seconds": "1"
        for what in (
            "emit.checkpoints",
            "refresh.groups",
            "refresh.topics",
            "sync.group.offsets",
            "sync.topic.configs",
        )
    },
    # Kafka's retention is a week where nothing is said, and ours is none.
    "ours->kafka.use.defaults.from": "source",
}

LOGIN: Final = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "alice",
    "sasl.password": PASSWORD,
}
MIRROR: Final = "mirror"
LOGIN_OF_MIRROR: Final = {
    "ours.security.protocol": "SASL_PLAINTEXT",
    "ours.sasl.mechanism": "SCRAM-SHA-256",
    "ours.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule"
    f' required username="{MIRROR}" password="{PASSWORD}";',
}
RIGHTS: Final = [
    acl(resource, name, operation, principal=f"User:{MIRROR}")
    for resource, name, operations in (
        (
            ResourceType.TOPIC,
            "*",
            (
                *(Operation.READ, Operation.WRITE, Operation.CREATE, Operation.ALTER),
                *(Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS),
            ),
        ),
        (ResourceType.GROUP, "*", (Operation.READ,)),
        (ResourceType.CLUSTER, CLUSTER_NAME, (Operation.DESCRIBE,)),  # it copies ACLs, too
    )
    for operation in operations
]

Record = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
"""Time, key, value, headers."""


def written(first: int, count: int) -> list[Record]:
    """Records of the last hour; what may be null is, now and then, and what may be empty."""
    start = int(time.time() * 1_000) - HOUR_MS
    return [
        (
            start + number,
            None if number % 3 == 0 else b"k%d" % number,
            None if number % 5 == 0 else b"v%d" % number if number % 7 else b"",
            (("h", b"%d" % number), ("h", None), ("e", b"")) if number % 2 else (),
        )
        for number in range(first, first + count)
    ]


@dataclass(frozen=True)
class Side:
    """One of the two clusters, as librdkafka sees it."""

    name: str
    address: str
    login: Mapping[str, str]
    """Settings of librdkafka."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, **self.login}

    @cached_property
    def admin(self) -> Any:
        return AdminClient(self.settings)

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        new = NewTopic(topic, partitions, 1, config=dict(config))
        for created in self.admin.create_topics([new]).values():
            created.result(SECONDS)

    def widen(self, topic: str, partitions: int) -> None:
        new = NewPartitions(topic, partitions)
        for widened in self.admin.create_partitions([new]).values():
            widened.result(SECONDS)

    def partitions(self, topic: str) -> int:
        """Returns the number of records; 0 if the topic does not exist."""
        topics = self.admin.list_topics(timeout=SECONDS).topics
        return len(topics[topic].partitions) if topic in topics else 0

    def config(self, topic: str) -> dict[str, str]:
        """Returns the topic's own configuration."""
        resource = _resource(topic)
        (told,) = self.admin.describe_configs([resource]).values()
        dynamic = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return {
            entry.name: entry.value
            for entry in told.result(SECONDS).values()
            if entry.source == dynamic
        }

    def set(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = _resource(topic, incremental_configs=[entry])
        (altered,) = self.admin.incremental_alter_configs([resource]).values()
        altered.result(SECONDS)

    def send(self, topic: str, records: Sequence[Record], partitions: int) -> None:
        failed: list[Any] = []
        producer = confluent_kafka.Producer(self.settings)
        for number, (at_ms, key, value, headers) in enumerate(records):
            producer.produce(
                topic,
                value,
                key,
                partition=number % partitions,
                timestamp=at_ms,
                headers=list(headers),
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
        assert producer.flush(SECONDS) == 0
        assert not failed

    def read(self, topic: str) -> dict[int, list[tuple[int, Record]]]:
        """By partition: the offsets and records, from the first to the last."""
        with self._consumer("none") as consumer:
            places = [
                confluent_kafka.TopicPartition(topic, number, 0)
                for number in range(self.partitions(topic))
            ]
            ends = {
                each.partition: consumer.get_watermark_offsets(each, SECONDS)[1] for each in places
            }
            found: dict[int, list[tuple[int, Record]]] = {number: [] for number in ends}
            consumer.assign(places)
            deadline = time.monotonic() + SECONDS
            while sum(map(len, found.values())) < sum(ends.values()):
                assert time.monotonic() < deadline, f"{topic} ends early: {found}"
                for message in consumer.consume(1_000, 0.1):
                    found[message.partition()].append((message.offset(), _record(message)))
            return found

    def commit(self, topic: str, offsets: Mapping[int, int]) -> None:
        """As a consumer of the group would."""
        places = [
            confluent_kafka.TopicPartition(topic, number, offset)
            for number, offset in offsets.items()
        ]
        with self._consumer(GROUP) as consumer:

            def committed() -> bool:
                try:
                    consumer.commit(offsets=places, asynchronous=False)
                except confluent_kafka.KafkaException as error:
                    if error.args[0].code() not in LOADING:
                        raise
                    return False
                return True

            wait_until(committed, "the offsets were committed")

    def committed(self, topic: str) -> dict[int, int]:
        """Returns the offsets that the group has committed for a topic."""
        asked = confluent_kafka.ConsumerGroupTopicPartitions(GROUP)
        (told,) = self.admin.list_consumer_group_offsets([asked]).values()
        found = told.result(SECONDS).topic_partitions
        return {each.partition: each.offset for each in found if each.topic == topic}

    def consume(self, topic: str, count: int) -> list[Record]:
        """Returns the next `count` records that the group has not read."""
        found: list[Record] = []
        with self._consumer(GROUP) as consumer:
            consumer.subscribe([topic])

            def enough() -> bool:
                found.extend(map(_record, consumer.consume(1_000, 0.1)))
                return len(found) >= count

            wait_until(enough, f"{count} records of {topic} were consumed")
        return found

    @contextmanager
    def _consumer(self, group: str) -> Iterator[Any]:
        rest = {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = confluent_kafka.Consumer({**self.settings, "group.id": group, **rest})
        try:
            yield consumer
        finally:
            consumer.close()


def _resource(topic: str, **options: Any) -> Any:
    return ConfigResource(ConfigResource.Type.TOPIC, topic, **options)


def _record(message: Any) -> Record:
    assert message.error() is None, message.error()
    headers = tuple(message.headers() or ())
    return message.timestamp()[1], message.key(), message.value(), headers


@pytest.fixture(name="sides")
def _sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    """A real Kafka, and ours."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    store = open_store(str(tmp_path / "root"), {})
    credentials = users.credentials_of(PASSWORD)
    add_alice(store)
    change_users(store, users.added(MIRROR, credentials))
    set_acls(store, RIGHTS, super_users=("User:alice",))
    listener = KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0")
    with (
        broker(tmp_path / "root", groups=GROUPS, kafka=listener) as agent,
        KafkaProcess(found.broker, tmp_path / "kafka", KAFKA) as kafka,
    ):
        yield Side("kafka", kafka.address, {}), Side("ours", agent.kafka_address, LOGIN)


@contextmanager
def mirroring(sides: tuple[Side, Side], path: Path) -> Iterator[Program]:
    """MirrorMaker at work; it has to meet no error, and to end in good order."""
    addresses = {f"{side.name}.bootstrap.servers": side.address for side in sides}
    given = {**PROPERTIES, **addresses, **LOGIN_OF_MIRROR}
    path.write_text("".join(f"{name}={value}\n" for name, value in given.items()), "utf-8")
    with running(class_path("connect-mirror"), MIRROR_MAKER, str(path)) as program:
        yield program
        # While it ends, some of its threads ask clients that are closed already.
        assert " ERROR " not in program.output, program.output
        assert program.terminate() == TERMINATED, program.output


@dataclass(frozen=True)
class Way:
    """From one side to the other."""

    source: Side
    target: Side

    @property
    def mirrored(self) -> str:
        """Returns the topic's name at the target."""
        return f"{self.source.name}.{TOPIC}"

    def wait_for(self, committed: Mapping[int, int]) -> None:
        """Returns once all records are there, and the group's offsets."""
        records = self.source.read(TOPIC)
        wait_until(
            lambda: self.target.partitions(self.mirrored) == len(records), "it had its partitions"
        )
        wait_until(lambda: self.target.read(self.mirrored) == records, "it had its records")
        wait_until(lambda: self.target.committed(self.mirrored) == committed, "so had the group")

    def wait_for_config(self, name: str, value: str) -> None:
        wait_until(lambda: self.target.config(self.mirrored)[name] == value, f"{name} was synced")


def test_a_mirror_both_ways(sides: tuple[Side, Side], tmp_path: Path) -> None:
    """Topics, records, configurations and groups are mirrored, and continue after a restart."""
    kafka, ours = sides
    ways = [Way(kafka, ours), Way(ours, kafka)]
    for side in sides:
        side.create(TOPIC, 3, CONFIG)
        side.send(TOPIC, written(0, 100), 3)
        side.commit(TOPIC, {0: 34, 1: 33, 2: 33})

    with mirroring(sides, tmp_path / "mirror.properties"):
        for way in ways:
            way.wait_for({0: 34, 1: 33, 2: 33})
        assert ours.config(f"kafka.{TOPIC}") == CONFIG
        assert kafka.config(f"ours.{TOPIC}").items() >= {**CONFIG, "retention.ms": "-1"}.items()
        for side in sides:
            side.widen(TOPIC, 4)
            side.set(TOPIC, "max.message.bytes", "3000000")
            side.send(TOPIC, written(100, 40), 4)
            side.commit(TOPIC, {0: 44, 1: 43, 2: 43, 3: 10})
        for way in ways:
            way.wait_for({0: 44, 1: 43, 2: 43, 3: 10})
            way.wait_for_config("max.message.bytes", "3000000")

    for topic in ("mm2-configs", "mm2-offsets", "mm2-status"):
        assert ours.config(f"{topic}.kafka.internal") == {"cleanup.policy": "compact"}
    last = written(140, 20)
    for side in sides:
        side.send(TOPIC, last, 4)
    with mirroring(sides, tmp_path / "mirror.properties"):
        for way in ways:
            way.wait_for({0: 44, 1: 43, 2: 43, 3: 10})
    _check_table(tmp_path / "root", f"kafka.{TOPIC}", kafka.read(TOPIC))
    for way in ways:
        found = way.target.consume(way.mirrored, len(last))
        assert sorted(found, key=repr) == sorted(last, key=repr)


def _check_table(root: Path, topic: str, records: Mapping[int, list[tuple[int, Record]]]) -> None:
    """Mirrored records are in the Delta table too, the same in all columns."""

    def found() -> dict[int, list[tuple[int, Record]]]:
        table = deltalake.DeltaTable(str(root / "topics" / topic)).to_pyarrow_table()
        rows: dict[int, list[tuple[int, Record]]] = {number: [] for number in records}
        for row in table.sort_by("offset").to_pylist():
            headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
            at_ms = round(row["timestamp"].timestamp() * 1_000)
            record = (at_ms, row["key"], row["value"], headers)
            rows[row["partition"]].append((row["offset"], record))
        return rows

    wait_until(lambda: found() == records, "all was in the table")
