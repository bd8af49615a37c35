"""The two sides of a mirror: a source, which is a Kafka cluster or a log, and the target, a log.

A source reports states, and supplies Spark with the records of exact offset ranges. Kafka's side
is the Java admin client in Spark's JVM, which comes with Spark's Kafka connector: both take the
same options, including those for security.

Each method raises `Retriable` or `OutcomeUnknown` if a side does not answer for now, and `Invalid`
if it rejects a request.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

import sparklog
from sparklog import errors, limits
from sparklog.client.offsets import OffsetAndMetadata, TopicPartition
from sparklog.formats import group_messages
from sparklog.formats.topic_names import INTERNAL_TOPICS, MIRROR_SOURCE
from sparklog.jobs.mirroring.plan import Bounds, Ranges, SourceTopic, TargetTopic
from sparklog.jobs.running import setting
from sparklog.sources.starting_offsets import encode, encode_partitions, encode_pinned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparklog.client.log import Log

COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
_EMPTY: Final = "Empty"
"""State of a group without members, in Kafka and here."""
_DEAD: Final = "Dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A consumer group of the source."""

    group: str
    has_members: bool


class Source(Protocol):
    """The side that is read."""

    cluster: str
    """Kind and id of the cluster, without a slash."""

    def names(self) -> list[str]:
        """Returns the topics, without internal ones."""
        ...

    def topics(self, names: Iterable[str]) -> dict[str, SourceTopic]:
        """Returns the states of topics that exist, with the ends of committed records."""
        ...

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns the topic-level configuration of topics that exist, without cluster defaults."""
        ...

    def high_watermarks(self, topics: Iterable[SourceTopic]) -> dict[TopicPartition, int]:
        """Returns the ends, including records of open transactions."""
        ...

    def groups(self) -> list[Group]: ...

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]: ...

    def frame(self, spark: SparkSession, parts: Ranges, *, tasks: int = 1) -> DataFrame:
        """Returns the records of the ranges, with `COLUMNS`, read by at least `tasks` tasks."""
        ...

    def fault(self, error: Exception, parts: Ranges) -> errors.BadValue | None:
        """Returns the record of the ranges that caused an error, if Spark does not name it."""
        ...


def _ranges_frame(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    parts: Ranges,
    tasks: int,
    ids: Mapping[str, str] = MappingProxyType({}),
) -> DataFrame:
    """Returns the records of `parts`; the options of both connectors have the same names.

    `ids`: the ids of the topics that the offsets belong to, for a source that checks them.
    """
    starts = {t: {n: r.start for n, r in each.items()} for t, each in parts.items()}
    ends = {t: {n: r.until for n, r in each.items()} for t, each in parts.items()}
    are_known = parts.keys() <= ids.keys()
    encoded = [encode_pinned(each, ids) if are_known else encode(each) for each in (starts, ends)]
    given = {
        "assign": encode_partitions({topic: sorted(each) for topic, each in parts.items()}),
        "startingOffsets": encoded[0],
        "endingOffsets": encoded[1],
        "includeHeaders": "true",
        "minPartitions": str(max(tasks, 1)),
    }
    return spark.read.format(source).options(**options, **given).load().select(*COLUMNS)


# ------------------------------------------------------------------------------ Kafka

_ADMIN_MS: Final = {"default.api.timeout.ms": "20000", "request.timeout.ms": "10000"}
"""Short, since the job itself retries a broker that is down, and reports it."""
_POLL_MS: Final = "60000"
_CONSUMER: Final = {
    "max.poll.records": "10000",  # Spark's connector fetches both ends of a log after each poll
    "max.partition.fetch.bytes": str(4 * limits.MIB),
    "receive.buffer.bytes": str(limits.MIB),
}
_V1_SOURCES: Final = "spark.sql.sources.useV1SourceList"
_NOT_FOUND: Final = "UnknownTopicOrPartitionException"
_TOO_LATE: Final = "which is after the year 9999"
_OVERFLOW: Final = ("long overflow", "UnknownReason")
"""Errors for a timestamp whose microseconds exceed 63 bits. Since 4.2 Spark names the record, but
its driver does not receive that error.
"""
_OVERFLOW_MS: Final = 2**63 // 1_000 + 1
_LAST_MS: Final = limits.TIMESTAMP_MAX_US // 1_000


class LateTimestamps(enum.StrEnum):
    """Handling of Kafka records with timestamps after the year 9999, the last possible one here.

    Producers that send microseconds create such records. Nanoseconds are later than Spark's
    connector can read.
    """

    REFUSE = "refuse"
    CLAMP = "clamp"
    SKIP = "skip"


def without_late_timestamps(records: DataFrame, late: LateTimestamps) -> DataFrame:
    """Returns the records with timestamps that a topic here can have.

    A late one fails the read with the record's place, or becomes the last possible one, or its
    record is dropped.
    """
    from pyspark.sql import functions as f

    at, last = f.col("timestamp"), f.timestamp_micros(f.lit(_LAST_MS * 1_000))
    is_late = f.coalesce(at > last, f.lit(False))
    if late is LateTimestamps.SKIP:
        return records.where(~is_late)
    if late is LateTimestamps.CLAMP:
        return records.withColumn("timestamp", f.least(at, last))
    # On its own line, like Python worker errors.
    said = f.concat(
        f.lit("\nsparklog.errors.BadValue: The record at "),
        f.concat_ws("-", "topic", "partition"),
        f.lit(", offset "),
        f.col("offset").cast("string"),
        f.lit(", has the timestamp "),
        f.unix_millis(at).cast("string"),
        f.lit(f" ms, {_TOO_LATE}: --late-timestamps clamp or skip continues.\n"),
    )
    fails = f.raise_error(said).cast("timestamp_ltz")
    return records.withColumn("timestamp", f.when(is_late, fails).otherwise(at))


class KafkaSource:
    """A Kafka cluster.

    Args:
        spark: a session with a JVM that has Spark's Kafka connector.
        address: bootstrap servers.
        options: options of Kafka's clients, by Kafka's names.
        properties: a file of further options, as Kafka's own tools accept it.
        late: how to handle records with timestamps after the year 9999.
    """

    def __init__(
        self,
        spark: SparkSession,
        address: str,
        options: Mapping[str, str],
        properties: Path | None = None,
        late: LateTimestamps = LateTimestamps.REFUSE,
    ) -> None:
        self._address = address
        self._late = late
        self._jvm: Any = _jvm(spark)
        more = {} if properties is None else self._read(properties)
        self._options = {**more, **options, "bootstrap.servers": address}
        # Spark caches up to 64 consumers, with the records they have fetched, for 5 minutes, and
        # finds one by its group. By default each scan has its own group, and the heap fills up.
        # The group has no members and no offsets.
        self._group = f"sparklog-mirror-{uuid.uuid4()}"
        self._gateway: Any = spark.sparkContext._gateway
        self._kafka: Any = self._jvm.org.apache.kafka
        with self._errors():
            client = self._kafka.clients.admin.AdminClient
            self._admin: Any = client.create({**_ADMIN_MS, **self._options})
            cluster = self._admin.describeCluster().clusterId().get()
        self.cluster = f"kafka:{cluster}"

    def _read(self, properties: Path) -> dict[str, str]:
        found = self._jvm.java.util.Properties()
        found.load(self._jvm.java.io.StringReader(properties.read_text("utf-8")))
        return {name: found.getProperty(name) for name in found.stringPropertyNames()}

    def close(self) -> None:
        self._admin.close()

    def _list(self, collection: Any) -> Any:
        """Returns a Java collection as a list, since py4j iterates only over lists."""
        return self._jvm.java.util.ArrayList(collection)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from py4j.protocol import Py4JJavaError

        try:
            yield
        except Py4JJavaError as error:
            cause = error.java_exception
            while (deeper := cause.getCause()) is not None:
                cause = deeper
            said = f"{cause.getClass().getSimpleName()}: {cause.getMessage()}"
            if _is(self._gateway, cause, "org.apache.kafka.common.errors.RetriableException"):
                raise errors.BrokerUnavailable(address=self._address, reason=said) from None
            reason = f"Kafka at {self._address} refuses: {said}"
            raise errors.BadRequest(reason=reason) from None

    def names(self) -> list[str]:
        with self._errors():
            return sorted(set(self._admin.listTopics().names().get()) - INTERNAL_TOPICS)

    def topics(self, names: Iterable[str]) -> dict[str, SourceTopic]:
        wanted = list(names)
        with self._errors():
            described = self._admin.describeTopics(wanted).topicNameValues()
            found: dict[str, tuple[str, list[int]]] = {}
            leaderless: dict[str, list[int]] = {}
            for name in wanted:
                topic = self._unless_missing(described[name])
                if topic is not None:
                    has_leader = {e.partition(): e.leader() is not None for e in topic.partitions()}
                    numbers = sorted(number for number, has in has_leader.items() if has)
                    found[name] = topic.topicId().toString(), numbers
                    # Kafka's client would wait for a leader, and delay all other partitions.
                    leaderless[name] = sorted(has_leader.keys() - {*numbers})
        places = [(name, number) for name, (_, numbers) in found.items() for number in numbers]
        starts = self._offsets(places, "earliest")
        ends = self._offsets(places, "latest", committed=True)
        return {
            name: SourceTopic(
                topic=name,
                topic_id=topic_id,
                partitions={
                    number: Bounds(starts[name, number], ends[name, number]) for number in numbers
                },
                leaderless=leaderless[name],
            )
            for name, (topic_id, numbers) in found.items()
        }

    def _unless_missing(self, future: Any) -> Any | None:
        from py4j.protocol import Py4JJavaError

        try:
            return future.get()
        except Py4JJavaError as error:
            cause = error.java_exception.getCause()
            if cause is not None and cause.getClass().getSimpleName() == _NOT_FOUND:
                return None
            raise

    def _offsets(
        self, places: Iterable[TopicPartition], point: str, *, committed: bool = False
    ) -> dict[TopicPartition, int]:
        spec = getattr(self._kafka.clients.admin.OffsetSpec, point)()
        found = self._listed(places, spec, committed=committed)
        return {place: each.offset() for place, each in found.items()}

    def _listed(
        self, places: Iterable[TopicPartition], spec: Any, *, committed: bool = False
    ) -> dict[TopicPartition, Any]:
        level = self._kafka.common.IsolationLevel
        isolation = level.READ_COMMITTED if committed else level.READ_UNCOMMITTED
        partition = self._kafka.common.TopicPartition
        asked = {place: partition(*place) for place in places}
        with self._errors():
            result = self._admin.listOffsets(
                dict.fromkeys(asked.values(), spec),
                self._kafka.clients.admin.ListOffsetsOptions(isolation),
            )
            return {place: result.partitionResult(each).get() for place, each in asked.items()}

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        resource = self._kafka.common.config.ConfigResource
        asked = {name: resource(resource.Type.TOPIC, name) for name in names}
        with self._errors():
            result = self._admin.describeConfigs(list(asked.values())).values()
            described = {name: self._unless_missing(result[each]) for name, each in asked.items()}
            return {
                name: {
                    entry.name(): entry.value()
                    for entry in self._list(config.entries())
                    if entry.source().name() == "DYNAMIC_TOPIC_CONFIG"
                }
                for name, config in described.items()
                if config is not None
            }

    def high_watermarks(self, topics: Iterable[SourceTopic]) -> dict[TopicPartition, int]:
        return self._offsets(_places(topics), "latest")

    def groups(self) -> list[Group]:
        with self._errors():
            listed = self._list(self._admin.listConsumerGroups().all().get())
            return sorted(
                (
                    Group(
                        group=each.groupId(),
                        has_members=each.state().get().toString() not in (_EMPTY, _DEAD),
                    )
                    for each in listed
                ),
                key=lambda each: each.group,
            )

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        with self._errors():
            result = self._admin.listConsumerGroupOffsets(group)
            found = result.partitionsToOffsetAndMetadata().get()
            return {
                (place.topic(), place.partition()): OffsetAndMetadata(
                    committed.offset(), committed.metadata()
                )
                for place, committed in found.items()
                if committed is not None
            }

    def frame(self, spark: SparkSession, parts: Ranges, *, tasks: int = 1) -> DataFrame:
        consumer = {**_CONSUMER, "group.id": self._group, **self._options}
        given = {f"kafka.{name}": value for name, value in consumer.items()}
        given |= {
            "kafka.isolation.level": "read_committed",
            "kafkaConsumer.pollTimeoutMs": _POLL_MS,
            "failOnDataLoss": "true",
        }
        with _as_v2(spark, "kafka"):
            records = _ranges_frame(spark, "kafka", given, parts, tasks)
        return without_late_timestamps(records, self._late)

    def fault(self, error: Exception, parts: Ranges) -> errors.BadValue | None:
        if not any(each in str(error) for each in _OVERFLOW):
            return None
        spec = self._kafka.clients.admin.OffsetSpec.forTimestamp(_OVERFLOW_MS)
        places = [(topic, number) for topic, each in parts.items() for number in each]
        for (topic, number), found in self._listed(places, spec).items():
            part = parts[topic][number]
            if part.start <= found.offset() < part.until:
                return errors.BadValue(
                    topic=topic,
                    partition=number,
                    offset=found.offset(),
                    reason=f"its timestamp is {found.timestamp()} ms, {_TOO_LATE} and more than"
                    " Spark can read",
                )
        return None


@contextlib.contextmanager
def _as_v2(spark: SparkSession, source: str) -> Iterator[None]:
    """Makes Spark load a source through its DataSource V2 interface.

    With V1, the default for batch reads from Kafka, each row is converted to Scala objects and
    back, which costs as much as the rest of the scan.
    """
    known = spark.conf.get(_V1_SOURCES) or ""
    others = [each for each in known.split(",") if each.strip().lower() != source]
    with setting(spark, _V1_SOURCES, ",".join(others)):
        yield


def _places(topics: Iterable[SourceTopic]) -> list[TopicPartition]:
    return [(each.topic, number) for each in topics for number in each.partitions]


def _is(gateway: Any, value: Any, name: str) -> bool:
    from py4j.java_gateway import is_instance_of

    return bool(is_instance_of(gateway, value, name))


def kafka_connector() -> str:
    """Returns the coordinates of Spark's Kafka connector for the installed Spark."""
    from pyspark import __version__

    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{__version__}"


def _jvm(spark: SparkSession) -> Any:
    """Returns Spark's JVM. Raises `NotInstalled` if there is none, or it lacks the connector."""
    try:
        jvm: Any = spark._jvm
    except Exception:  # Spark Connect raises its own error for what it lacks
        jvm = None
    if jvm is None:
        hint = "run the job with spark-submit: Spark Connect has no JVM to query Kafka with"
        raise errors.NotInstalled(what="a mirror of Kafka", missing="a JVM", hint=hint)
    loaded = jvm.org.apache.kafka.clients.admin
    if not hasattr(loaded.AdminClient, "create"):
        connector = kafka_connector()
        hint = f"run spark-submit with --packages {connector}"
        raise errors.NotInstalled(what="a mirror of Kafka", missing=connector, hint=hint)
    return jvm


# ------------------------------------------------------------------------------ sparklog


class LogSource:
    """The log of a root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._log = sparklog.connect(root, detached=True)
        self._ids: dict[str, str] = {}
        """The id of each topic when it was last described."""
        self.cluster = f"sparklog:{self._log.cluster().cluster_id}"

    def close(self) -> None:
        self._log.close()

    def names(self) -> list[str]:
        return self._log.topics()

    def topics(self, names: Iterable[str]) -> dict[str, SourceTopic]:
        found = {}
        for name in names:
            with contextlib.suppress(errors.UnknownTopic):
                info = self._log.describe(name)
                self._ids[name] = info.topic_id
                found[name] = SourceTopic(
                    topic=name,
                    topic_id=info.topic_id,
                    partitions={p.partition: Bounds(p.start, p.end) for p in info.partitions},
                )
        return found

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        found = {}
        for name in names:
            with contextlib.suppress(errors.UnknownTopic):
                found[name] = dict(self._log.describe(name).config)
        return found

    def high_watermarks(self, topics: Iterable[SourceTopic]) -> dict[TopicPartition, int]:
        return {
            (each.topic, number): bounds.end
            for each in self.topics(each.topic for each in topics).values()
            for number, bounds in each.partitions.items()
        }

    def groups(self) -> list[Group]:
        return [
            Group(group=each.group, has_members=each.state not in (_EMPTY, _DEAD))
            for each in self._log.groups()
        ]

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return _group_offsets(self._log, group)

    def frame(self, spark: SparkSession, parts: Ranges, *, tasks: int = 1) -> DataFrame:
        return _ranges_frame(spark, "sparklog", {"root": self._root}, parts, tasks, self._ids)

    def fault(self, error: Exception, parts: Ranges) -> errors.BadValue | None:
        del error, parts  # a log names the records itself
        return None


def _group_offsets(log: Log, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
    found: group_messages.GroupOffsets = log.connection.action(
        "groups.offsets", group_messages.GroupName(group=group)
    )
    return {
        (each.topic, each.partition): OffsetAndMetadata(each.offset, each.metadata)
        for each in found.offsets
    }


class Target:
    """The log of a root, to which topics are mirrored."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.log: Log = sparklog.connect(root, detached=True)
        self.cluster_id = self.log.cluster().cluster_id

    def close(self) -> None:
        self.log.close()

    def topics(self, names: Iterable[str]) -> dict[str, TargetTopic]:
        """Returns the states of the topics that exist."""
        found = {}
        existing = {*self.log.topics(internal=True)}
        for name in filter(existing.__contains__, names):
            with contextlib.suppress(errors.UnknownTopic):  # it was just deleted
                info = self.log.describe(name)
                config = dict(info.config)
                found[name] = TargetTopic(
                    topic=name,
                    origin=config.pop(MIRROR_SOURCE, None),
                    config=config,
                    partitions={p.partition: Bounds(p.start, p.end) for p in info.partitions},
                )
        return found

    def group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return _group_offsets(self.log, group)

    def first_offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Returns the offset of the first record of each partition, or its end if it has none.

        Requires that the partitions have the log start 0.
        """
        numbers = sorted(partitions)
        begin = self.log.read(
            topic,
            start=dict.fromkeys(numbers, 0),
            end=dict.fromkeys(numbers, 1),
            columns=["partition"],
            partitions=numbers,
        )
        found = dict.fromkeys(begin.column("partition").to_pylist(), 0)
        for number in numbers:
            if number not in found:  # one at a time, since each reads ahead
                with self.log.consumer(start=0, follow=False, columns=["offset"]) as consumer:
                    consumer.assign([(topic, number)])
                    end = self.log.describe(topic).partitions[number].end
                    found[number] = next((each.offset for each in consumer), end)
        return found

    def write(self, records: DataFrame, parts: Ranges, names: Mapping[str, str]) -> None:
        """Appends records of `parts` at their offsets; `names`: target names by source topic."""
        from pyspark.sql import functions as f

        options = {}
        if len(parts) == 1:  # without the column a record takes a tenth less time
            records = records.drop("topic")
            ((topic, _),) = parts.items()
            options["topic"] = names[topic]
        elif any(topic != names[topic] for topic in parts):
            words = [f.lit(each) for topic in parts for each in (topic, names[topic])]
            records = records.withColumn("topic", f.create_map(*words)[f.col("topic")])
        covered = {
            names[topic]: {str(n): [r.first, r.until] for n, r in each.items()}
            for topic, each in parts.items()
        }
        writer = records.write.format("sparklog").mode("append").options(**options)
        ranges = msgspec.json.encode(covered).decode()
        writer.options(root=self.root, offsets="keep", offsetRanges=ranges).save()
