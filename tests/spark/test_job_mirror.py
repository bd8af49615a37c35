"""`sparklog.jobs.mirror`: topics of a real Kafka, and of another log, with the same offsets.

Kafka and Spark's connector come from Maven's repositories by Spark's Ivy; where they cannot be got,
the tests that need them are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
    NewTopic,
)
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner, Result

import sparklog
from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog.client.log import Log
from sparklog.jobs import mirror as jobs
from sparklog.jobs.mirroring import sides
from sparklog.jobs.mirroring.plan import Bounds, Pair, Range, Ranges, SourceTopic, TargetTopic
from sparklog.jobs.mirroring.verify import verify
from sparklog.jobs.running import app_of
from tests.support.jobs import KILLS, failed, succeeded, survive
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

_APP = app_of(jobs.mirror)
_JOB: Final = Path(jobs.__file__)
_AT = datetime(2026, 1, 2, 3, 4, 5, 6_000, tzinfo=UTC)
_SECONDS: Final = 30.0

Record = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
"""Offset, time in ms, key, value, headers."""


@dataclass(frozen=True)
class Kafka:
    """A real Kafka, as librdkafka sees it."""

    address: str
    jars: Sequence[str]

    @cached_property
    def admin(self) -> Any:
        return AdminClient({"bootstrap.servers": self.address})

    def create(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        new = NewTopic(topic, partitions, 1, config=dict(config or {}))
        self._wait(self.admin.create_topics([new]))

    def delete(self, topic: str) -> None:
        self._wait(self.admin.delete_topics([topic]))
        wait_until(lambda: topic not in self.admin.list_topics().topics, "it was deleted")

    def widen(self, topic: str, partitions: int) -> None:
        self._wait(self.admin.create_partitions([NewPartitions(topic, partitions)]))

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        place = confluent_kafka.TopicPartition(topic, partition, before)
        self._wait(self.admin.delete_records([place]))

    @staticmethod
    def _wait(futures: Mapping[Any, Any]) -> None:
        for future in futures.values():
            future.result(_SECONDS)

    def send(self, topic: str, first: int, count: int, partitions: int = 1) -> None:
        """Sends records with and without keys, values and headers, to the partitions in turn."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.address})
        for number in range(first, first + count):
            self._produce(producer, topic, number, number % partitions)
        assert producer.flush(_SECONDS) == 0

    def send_in_transactions(self, topic: str, partition: int) -> None:
        """Sends 3 records, 4 that are aborted, and 2; each transaction ends with a marker."""
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.address, "transactional.id": f"{topic}-{partition}"}
        )
        producer.init_transactions(_SECONDS)
        for count, ends in ((3, "commit"), (4, "abort"), (2, "commit")):
            producer.begin_transaction()
            for number in range(count):
                self._produce(producer, topic, number, partition)
            assert producer.flush(_SECONDS) == 0
            getattr(producer, f"{ends}_transaction")(_SECONDS)

    def send_at(self, topic: str, *times_ms: int) -> None:
        """Creates the topic, and sends a record with each of the times."""
        self.create(topic, 1, {"message.timestamp.after.max.ms": str(2**63 - 1)})
        producer = confluent_kafka.Producer({"bootstrap.servers": self.address})
        for time_ms in times_ms:
            producer.produce(topic, b"v", partition=0, timestamp=time_ms)
        assert producer.flush(_SECONDS) == 0

    @staticmethod
    def _produce(producer: Any, topic: str, number: int, partition: int) -> None:
        producer.produce(
            topic,
            None if number % 5 == 4 else b"v%d" % number if number % 7 else b"",
            None if number % 3 == 2 else b"k%d" % number,
            partition=partition,
            timestamp=int((_AT + timedelta(milliseconds=number)).timestamp() * 1_000),
            headers=[("h", b"%d" % number), ("h", None), ("e", b"")] if number % 2 else [],
        )

    def read(self, topic: str) -> dict[int, list[Record]]:
        """By partition: the committed records."""
        settings = {"bootstrap.servers": self.address, "group.id": "read"}
        more = {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = confluent_kafka.Consumer({**settings, **more, "enable.partition.eof": True})
        numbers = self.admin.list_topics(topic).topics[topic].partitions
        found: dict[int, list[Record]] = {number: [] for number in numbers}
        waiting = set(found)
        consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in found])
        deadline = time.monotonic() + _SECONDS
        while waiting:
            assert time.monotonic() < deadline
            each: Any
            for each in consumer.consume(1_000, 0.1):
                if each.error() is not None:
                    assert each.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                    waiting.discard(each.partition())
                    continue
                headers = tuple(each.headers() or ())
                record = each.offset(), each.timestamp()[1], each.key(), each.value(), headers
                found[each.partition()].append(record)
        consumer.close()
        return found

    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commits offsets as a consumer of the group that has left."""
        places = [
            confluent_kafka.TopicPartition(topic, number, offset)
            for number, offset in offsets.items()
        ]
        asked = confluent_kafka.ConsumerGroupTopicPartitions(group, places)

        def committed() -> bool:
            (altered,) = self.admin.alter_consumer_group_offsets([asked]).values()
            try:
                found = altered.result(_SECONDS)
            except confluent_kafka.KafkaException:  # its coordinator is loading
                return False
            return all(each.error is None for each in found.topic_partitions)

        wait_until(committed, "the offsets were committed")


@pytest.fixture(name="kafka", scope="module")
def _kafka(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """One Kafka for all tests, and its connector in the session."""
    found = jars.find()
    if not found.broker or not found.connector:
        pytest.skip("; ".join(found.missing))
    for path in found.connector:
        spark.sql(f"ADD JAR '{path}'")
    folder = tmp_path_factory.mktemp("kafka") / "broker"
    # It looks for records that are too old after five minutes, and those of the tests are.
    forever = {"log.retention.ms": "-1"}
    with KafkaProcess(found.broker, folder, forever) as process:
        yield Kafka(process.address, found.connector)


@pytest.fixture(name="log")
def _log(root: Path) -> Iterator[Log]:
    with sparklog.connect(root) as log:
        yield log


def run(root: Path, *arguments: object) -> Result:
    """Runs the job in this process, with its session."""
    return CliRunner().invoke(_APP, ["--root", str(root), *map(str, arguments)])


def succeed(root: Path, *arguments: object) -> str:
    """Returns the job's last line."""
    return succeeded(run(root, *arguments))


def fail(root: Path, *arguments: object, code: int = 1) -> str:
    """Returns what the job reports, in one line of words."""
    return failed(run(root, *arguments), code)


def records(log: Log, topic: str) -> dict[int, list[Record]]:
    """By partition: the records."""
    found: dict[int, list[Record]] = {each.partition: [] for each in log.describe(topic).partitions}
    for row in log.read(topic).sort_by("offset").to_pylist():
        headers = tuple((each["key"], each["value"]) for each in row["headers"] or ())
        at_ms = round(row["timestamp"].timestamp() * 1_000)
        found[row["partition"]].append((row["offset"], at_ms, row["key"], row["value"], headers))
    return found


def bounds(log: Log, topic: str) -> list[tuple[int, int]]:
    """Log start and end of each partition."""
    return [(each.start, each.end) for each in log.describe(topic).partitions]


# ------------------------------------------------------------------------------ a real Kafka


def test_a_mirror_has_the_offsets_of_its_source(kafka: Kafka, root: Path, log: Log) -> None:
    """Records keep all that they have, gaps stay, and new partitions and topics are followed."""
    config = {
        "retention.ms": "-1",
        "segment.ms": "600000",
        "follower.replication.throttled.replicas": "*",
    }
    kafka.create("one.orders", 3, config)
    kafka.create("one.skipped", 1)
    kafka.send("one.orders", 0, 60, partitions=3)
    kafka.send_in_transactions("one.orders", 1)
    kafka.delete_records("one.orders", 2, 7)
    kafka.commit("one", "one.orders", {0: 5, 1: 32})
    arguments = [f"--from=kafka://{kafka.address}", r"--topics=one\..*", "--exclude=.*skipped"]
    arguments += [r"--rename=one\.(.*)=eu.\1", "--groups=one", "--config=retention.bytes=-1"]
    log.topics()

    dry = run(root, *arguments, "--dry-run")
    assert "one.orders to eu.orders, to be created, 3 partitions, lag 65" in dry.stderr
    assert log.topics() == []

    last = succeed(root, *arguments, "--round-records=20")
    assert last.startswith("58 records in ")
    assert records(log, "eu.orders") == kafka.read("one.orders")
    assert bounds(log, "eu.orders") == [(0, 20), (0, 32), (7, 20)]
    info = log.describe("eu.orders")
    assert info.config.items() >= {**config, "retention.bytes": "-1"}.items()
    assert log.group_offsets("one") == {("eu.orders", 0): 5, ("eu.orders", 1): 32}

    kafka.widen("one.orders", 4)
    kafka.create("one.more", 1)
    kafka.send("one.orders", 60, 40, partitions=4)
    kafka.send("one.more", 0, 3)
    assert succeed(root, *arguments).startswith("43 records in ")
    assert succeed(root, *arguments).startswith("0 records in ")
    assert log.topics() == ["eu.more", "eu.orders"]
    assert records(log, "eu.orders") == kafka.read("one.orders")
    assert succeed(root, *arguments, "--verify", "--round-records=10").startswith("101 records")


def test_faults_of_a_source_are_named(kafka: Kafka, root: Path, log: Log) -> None:
    """Records that were deleted too early, and a topic that was created again."""
    kafka.create("two.deleted", 1)
    kafka.create("two.again", 1)
    for topic in ("two.deleted", "two.again"):
        kafka.send(topic, 0, 5)
    log.create_topic("two.foreign", partitions=1)
    arguments = [f"--from=kafka://{kafka.address}", r"--topics=two\..*"]
    succeed(root, *arguments)

    kafka.send("two.deleted", 5, 5)
    kafka.delete_records("two.deleted", 0, 8)
    kafka.delete("two.again")
    kafka.create("two.again", 1)
    kafka.send("two.again", 0, 9)
    kafka.create("two.foreign", 1)
    with log.producer() as producer:
        producer.send("two.foreign", b"ours")
    said = fail(root, *arguments)
    assert "two.deleted: not mirrored: the source has deleted offsets 5 to 7 of partition 0" in said
    assert "two.again: not mirrored: it was deleted and created again at the source" in said
    assert "'two.foreign' of the target has records and is not a mirror" in said
    assert bounds(log, "two.again") == bounds(log, "two.deleted") == [(0, 5)]

    deleted = [arguments[0], "--topics=two.deleted"]
    assert succeed(root, *deleted, "--skip-deleted").startswith("2 records in ")
    assert [each[0] for each in records(log, "two.deleted")[0]] == [0, 1, 2, 3, 4, 8, 9]


def test_a_timestamp_after_the_year_9999(kafka: Kafka, root: Path, log: Log) -> None:
    """Its record is named; it can be written with the last time that there is, or be left out."""
    late, last = 253_402_300_800_005, 253_402_300_799_999
    at = int(_AT.timestamp() * 1_000)
    kafka.send_at("late.orders", at, late, at)
    kafka.send_at("late.nanoseconds", at, at * 1_000_000)
    source = f"--from=kafka://{kafka.address}"
    said = fail(root, source, "--patience=60", r"--topics=late\..*")
    assert f"The record at late.orders-0, offset 1, has the timestamp {late} ms" in said
    assert "--late-timestamps clamp or skip" in said
    assert f"late.nanoseconds-0, offset 1: its timestamp is {at * 1_000_000} ms" in said
    for choice, times in (("clamp", [at, last, at]), ("skip", [at, at])):
        name = f"--rename=(.*)=\\1.{choice}"
        arguments = [source, "--topics=late.orders", name, f"--late-timestamps={choice}"]
        assert succeed(root, *arguments).startswith(f"{len(times)} records in ")
        found = records(log, f"late.orders.{choice}")[0]
        assert [time_ms for _, time_ms, *_ in found] == times
        assert bounds(log, f"late.orders.{choice}") == [(0, 3)]
        assert succeed(root, *arguments, "--verify").startswith(f"{len(times)} records")


def test_a_cutover_moves_producers_and_groups(kafka: Kafka, root: Path, log: Log) -> None:
    """The topic has all records and takes others after it; the group continues at its offset."""
    kafka.create("three", 1)
    kafka.send("three", 0, 10)
    kafka.commit("three", "three", {0: 7})
    arguments = [f"--from=kafka://{kafka.address}", "--topics=three"]
    succeed(root, *arguments)
    kafka.send("three", 10, 3)
    result = run(root, *arguments, "--cutover", "--groups=three", "--quiet=0.5")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "1 topic was cut over"
    assert "switch clients of three to bootstrap.servers=" in result.stderr
    assert records(log, "three") == kafka.read("three")
    with log.producer() as producer:
        assert producer.send("three", b"new").result().offset == 13
    with log.consumer("three", group="three", follow=False) as consumer:
        assert [each.offset for each in consumer] == [7, 8, 9, 10, 11, 12, 13]
    assert succeed(root, *arguments, "--verify").startswith("13 records")
    assert "is not a mirror" in fail(root, *arguments)


def test_a_kafka_that_is_not_there(kafka: Kafka, root: Path, log: Log) -> None:
    """The job says so, with the address, and no secret of the options."""
    log.topics()
    arguments = ["--from=kafka://127.0.0.1:1", "--topics=.*", "--kafka-option"]
    said = fail(
        root,
        *arguments,
        "sasl.jaas.config=hush",
        "--kafka-option=default.api.timeout.ms=2000",
        "--kafka-option=request.timeout.ms=1000",
        "--patience=0",
    )
    assert "127.0.0.1:1" in said
    assert "put sasl.jaas.config into the file of --kafka-properties" in said
    assert "hush" not in said


def test_a_scan_of_kafka(
    kafka: Kafka, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes Spark's second interface and the user's options, and its plan shows no secret."""
    kafka.create("scan", 1)
    kafka.send("scan", 0, 3)
    setting = spark.conf.get("spark.sql.sources.useV1SourceList")
    given: dict[str, str] = {}
    ranges_frame = sides._ranges_frame

    def noted(session: SparkSession, source: str, options: Mapping[str, str], *rest: Any) -> Any:
        given.update(options)
        return ranges_frame(session, source, options, *rest)

    monkeypatch.setattr(sides, "_ranges_frame", noted)
    options = {"max.poll.records": "2", "ssl.key.password": "hush"}
    with contextlib.closing(sides.KafkaSource(spark, kafka.address, options)) as source:
        frame = source.frame(spark, {"scan": {0: Range(0, 3, 0)}})
        plan = frame._jdf.queryExecution().toString()
        assert frame.count() == 3
        group = given["kafka.group.id"]
        source.frame(spark, {"scan": {0: Range(0, 3, 0)}})
    assert given["kafka.group.id"] == group, "Spark would keep consumers for each scan"
    assert "BatchScan" in plan
    assert "hush" not in plan
    assert given["kafka.max.poll.records"] == "2"
    assert spark.conf.get("spark.sql.sources.useV1SourceList") == setting


# ------------------------------------------------------------------------------ killed


@pytest.mark.timeout(1_800)
@pytest.mark.spark_program
@pytest.mark.soak(mode="jobs")
def test_a_mirror_that_is_killed_is_run_again(kafka: Kafka, tmp_path: Path) -> None:
    """Whenever it is killed, each record is there once, at its offset."""
    root, topic = tmp_path / "root", f"killed-{KILLS}"
    kafka.create(topic, 2)
    command = [str(Path(sys.executable).with_name("spark-submit")), "--jars", ",".join(kafka.jars)]
    command += ["--conf", "spark.ui.enabled=false", str(_JOB), f"--root={root}"]
    command += [f"--from=kafka://{kafka.address}", f"--topics={topic}", "--round-records=4000"]
    with sparklog.connect(root) as log:
        log.topics()
        survive(
            command,
            kills=KILLS,
            pauses=(5.0, 12.0),
            seed=int.from_bytes(os.urandom(4)),
            before=lambda number: kafka.send(topic, number * 20_000, 20_000, partitions=2),
        )
        assert records(log, topic) == kafka.read(topic)
        assert bounds(log, topic) == [(0, KILLS * 10_000)] * 2


# ------------------------------------------------------------------------------ another log


@pytest.fixture(name="other")
def _other(tmp_path: Path) -> Iterator[Log]:
    """A log with a topic of two partitions and 20 records."""
    with sparklog.connect(tmp_path / "other") as log:
        log.create_topic("t", partitions=2, config={"retention.ms": 10**12})
        with log.producer() as producer:
            for number in range(20):
                producer.send(
                    "t",
                    b"%d" % number,
                    key=b"k" if number % 3 else None,
                    headers=[("n", b"%d" % number), ("null", None)],
                    partition=number % 2,
                    timestamp=_AT + timedelta(microseconds=number),
                )
        yield log


def test_records_of_all_sizes(
    spark: SparkSession,
    other: Log,
    root: Path,
    log: Log,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark's batches for Python are bounded in bytes from a write on that has a large record."""
    bounds_bytes: list[str | None] = []
    write = sides.Target.write

    def noted(self: sides.Target, *arguments: Any) -> None:
        bounds_bytes.append(spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch", None))
        write(self, *arguments)

    monkeypatch.setattr(sides.Target, "write", noted)
    usual = spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch", None)
    other.create_topic("s", partitions=1)
    headers: list[list[tuple[str, bytes | None]]] = [[], [("h", b"h" * 20_000)], [("h", None)] * 5]
    with other.producer() as producer:
        for some in headers:
            producer.send("s", b"small", headers=some, timestamp=_AT)
        for key, value in ((None, b"v" * 20_000), (b"k" * 20_000, None), (b"k", b"v")):
            producer.send("s", value, key=key, timestamp=_AT)
    log.topics()
    arguments = [f"--from={tmp_path / 'other'}", "--topics=s", "--round-records=1"]
    assert succeed(root, *arguments).startswith("6 records in ")
    assert records(log, "s") == records(other, "s")
    assert bounds_bytes == [str(2**31 - 1)] * 2 + [usual] * 5


def test_a_log_is_mirrored_into_another(
    spark: SparkSession, other: Log, root: Path, log: Log, tmp_path: Path
) -> None:
    """By the same rules as a Kafka, and with its log start and groups."""
    other.delete_records("t", {1: 4})
    other.commit_group_offsets("g", {("t", 0): sparklog.OffsetAndMetadata(3, "text")})
    log.topics()
    arguments = [f"--from={tmp_path / 'other'}", "--topics=t", "--groups=.*"]
    assert succeed(root, *arguments).startswith("16 records in ")
    assert records(log, "t") == records(other, "t")
    assert bounds(log, "t") == [(0, 10), (4, 10)]
    with log.consumer("t", group="g") as consumer:
        assert consumer.committed_metadata() == {("t", 0): (3, "text")}
    assert succeed(root, *arguments, "--verify") == "16 records are the same on both sides"


@pytest.mark.parametrize(
    ("policy", "same"),
    [("delete", False), ("compact", False), ("compact", True)],
)
def test_a_difference_is_found(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path, policy: str, *, same: bool
) -> None:
    """With its range; of a compacted topic only the last records of keys count."""
    values = [b"a", b"b", b"c", b"d"]
    with sparklog.connect(tmp_path / "other") as other:
        for each, changed in ((other, b"b"), (log, b"x")):
            each.create_topic("t", partitions=1, config={"cleanup.policy": policy})
            with each.producer() as producer:
                for number, value in enumerate(values):
                    last = changed if value == b"b" else value
                    key = b"k" if same else b"k%d" % number
                    producer.send("t", last, key=key, timestamp=_AT)
        arguments = [f"--from={tmp_path / 'other'}", "--topics=t", "--verify", "--round-records=2"]
        if same:
            assert succeed(root, *arguments) == "1 record is the same on both sides"
            return
        said = fail(root, *arguments)
        assert "t: partition 0, offsets 0 up to 2: 2 records with hash" in said
        assert "offsets 2 up to 4" not in said
        assert "differ in t" in said


@dataclass(frozen=True)
class Frames:
    """A side whose records are given."""

    rows: Sequence[tuple[Any, ...]]

    def frame(self, spark: SparkSession, parts: Ranges) -> DataFrame:
        schema = (
            "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY,"
            " value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
        )
        (range_,) = parts["t"].values()
        rows = [each for each in self.rows if range_.start <= each[2] < range_.until]
        return spark.createDataFrame(rows, schema)


def record(offset: int, **changed: object) -> tuple[Any, ...]:
    """A row of partition 0 of topic t."""
    usual = {"timestamp": _AT, "key": b"k", "value": b"v", "headers": [("h", b"1")]}
    return ("t", 0, offset, *{**usual, **changed}.values())


def both_sides(theirs: int, ours: int, config: Mapping[str, str] | None = None) -> Pair:
    """Topic t with the ends of its partition on both sides."""
    source = SourceTopic(topic="t", topic_id="i", partitions={0: Bounds(0, theirs)})
    partitions = {0: Bounds(0, ours)}
    target = TargetTopic(topic="t", origin=None, config=config or {}, partitions=partitions)
    return Pair(source=source, cluster="c", name="t", target=target)


def test_each_kind_of_difference_is_found(spark: SparkSession) -> None:
    """A record that is missing, and one that differs in anything, if only null from empty."""
    headers: list[object] = [[], [("h", None)], [("h", b"")], [("h", b"1")] * 2, [("i", b"1")]]
    changes: list[dict[str, object]] = [
        {"timestamp": _AT + timedelta(microseconds=1)},
        {"key": None},
        {"key": b""},
        {"value": None},
        {"value": b""},
        {"key": b"v", "value": b"k"},
        *({"headers": each} for each in headers),
    ]
    ours = [record(number, **each) for number, each in enumerate(changes)]
    end = len(ours) + 3
    ours += [record(end - 3), record(end - 1)]
    theirs = [record(number) for number in range(end)]
    found = verify(spark, Frames(theirs), Frames(ours), both_sides(end, end), 1)  # type: ignore[arg-type]
    assert {each.first for each in found.differences} == {*range(len(changes)), end - 2}


def test_a_compacted_mirror_that_lags_does_not_differ(spark: SparkSession) -> None:
    """Its source has removed records that a later one supersedes, which the mirror has not yet.

    A record without a key may be on one side only, and a deleted key may have left a tombstone.
    """
    removed = record(0, key=b"a"), record(1, key=None), record(2, key=b"d", value=None)
    pair = both_sides(5, 4, {"cleanup.policy": "compact"})
    theirs = [record(3, key=b"b"), record(4, key=b"a")]
    for kept, count in (([record(3, key=b"b")], 0), ([record(3, key=b"b", value=b"x")], 1)):
        found = verify(spark, Frames(theirs), Frames([*removed, *kept]), pair, 2)  # type: ignore[arg-type]
        assert [each.first for each in found.differences] == [2] * count
        assert found.records == 1


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--from=kafka://h", "--topics=t"], 1, "expected host:port"),
        (["--from=localhost:9092", "--topics=t"], 1, "Did you mean kafka://localhost:9092"),
        (["--from=/no/such/root", "--topics=t"], 1, "is not a sparklog root"),
        (["--from=kafka://h:1", "--topics=("], 1, "--topics"),
        (["--from=kafka://h:1", "--topics=t", "--rename=a"], 2, "REGEX=NAME"),
        (["--from=kafka://h:1", "--topics=t", "--config=retention=1"], 1, "retention.ms"),
        (["--from=kafka://h:1", "--topics=t", "--follow", "--verify"], 2, "not both"),
    ],
)
def test_a_wrong_argument_is_refused(
    spark: SparkSession, root: Path, log: Log, arguments: list[str], code: int, words: str
) -> None:
    """Before anything is created."""
    log.topics()
    assert words in fail(root, *arguments, code=code)
    assert log.topics() == []


def test_a_log_is_not_mirrored_into_itself(spark: SparkSession, root: Path, log: Log) -> None:
    """Its topics would grow without an end."""
    log.topics()
    assert "into itself" in fail(root, f"--from={root}", "--topics=t", code=2)
