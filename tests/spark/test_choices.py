"""Options of a read: topics and partitions, times, sizes, columns, and losses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

import sparklog
from sparklog.client.log import Log
from tests.support.harvest import AT, Collected, send, sent, start, values

pytestmark = pytest.mark.spark

MS = int(AT.timestamp() * 1000)


def read(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A batch read."""
    return spark.read.format("sparklog").options(root=str(root), **options).load()


def stream(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A stream from the beginning."""
    given = {"root": str(root), "startingOffsets": "earliest"} | options
    return spark.readStream.format("sparklog").options(**given).load()


# ------------------------------------------------------------------------------ what and where


def test_partitions_may_be_assigned(spark: SparkSession, root: Path, log: Log) -> None:
    """Only these are read, and bounds name only these."""
    send(log, 0, 10)
    odd = {"assign": '{"t": [1]}', "startingOffsets": '{"t": {"1": 2}}'}
    assert values(read(spark, root, **odd)) == ["v5", "v7", "v9"]
    with pytest.raises(Exception, match="'t' has no partition 2: its partitions are 0 to 1"):
        read(spark, root, assign='{"t": [2]}').collect()


def test_topics_that_appear_are_picked_up(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A stream by a pattern reads them from their beginning; one that is deleted ends it."""
    collected = Collected()
    send(log, 0, 4)
    frame = stream(spark, root, subscribePattern="t|later.*")
    query = start(frame.where("topic = 't' or offset >= 0"), tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        log.create_topic("later1", partitions=2)
        send(log, 4, 8, topic="later1")
        query.processAllAvailable()
        assert sorted(row[2] for row in collected.rows) == sent(0, 8)
        log.delete_topic("later1")
        with pytest.raises(StreamingQueryException, match="'later1' was deleted"):
            query.awaitTermination(60)
    finally:
        query.stop()


def test_a_broker_may_be_asked_where_the_root_is_out_of_reach(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Batch and stream by a Flight address: the same rows as from the root."""
    send(log, 0, 30)
    log.flush_to_table()
    send(log, 30, 40)
    address = log.connection.address
    given = {"bootstrap": address, "subscribe": "t"}
    assert values(spark.read.format("sparklog").options(**given).load()) == sent(0, 40)
    by_time = given | {"startingTimestamp": str(MS), "endingOffsets": '{"t": {"0": 3, "1": 4}}'}
    found = spark.read.format("sparklog").options(**by_time, minPartitions="4").load()
    assert found.count() == 7
    collected = Collected()
    streamed = spark.readStream.format("sparklog").options(**given, startingOffsets="earliest")
    frame = streamed.option("pollInterval", "10ms").load()
    query = start(frame, tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        send(log, 40, 50)
        query.processAllAvailable()
        assert collected.once() == sent(0, 50)
    finally:
        query.stop()


# ------------------------------------------------------------------------------ from and to


def test_times_bound_a_read(spark: SparkSession, root: Path, log: Log) -> None:
    """For all partitions or for each; a time after the last record is an error, or the end."""
    send(log, 0, 10)
    send(log, 10, 20, at=AT + timedelta(seconds=10))
    send(log, 20, 30, at=AT + timedelta(seconds=20))
    between = {"startingTimestamp": str(MS + 1), "endingTimestamp": str(MS + 20_000)}
    assert values(read(spark, root, subscribe="t", **between)) == sent(10, 20)
    each = {"startingOffsetsByTimestamp": json.dumps({"t": {"0": MS + 20_000, "1": MS + 5_000}})}
    found = read(spark, root, subscribe="t", **each).groupBy("partition").count().collect()
    assert {tuple(row) for row in found} == {(0, 5), (1, 10)}
    late = {"subscribe": "t", "startingTimestamp": str(MS + 60_000)}
    with pytest.raises(Exception, match="no record of t-0 is that late"):
        read(spark, root, **late).collect()
    assert read(spark, root, **late, startingOffsetsByTimestampStrategy="latest").count() == 0
    iso = {"startingTimestamp": (AT + timedelta(seconds=15)).isoformat(), "endingOffsets": "-3"}
    assert values(read(spark, root, subscribe="t", **iso)) == sent(20, 24)
    ago = {"startingOffsets": "earliest", "endingTimestamp": "10 minutes ago"}
    assert read(spark, root, subscribe="t", **ago).count() == 30


# ------------------------------------------------------------------------------ how much


def test_a_task_has_no_more_records_than_allowed(spark: SparkSession, root: Path, log: Log) -> None:
    """maxRecordsPerPartition and minPartitions shape the tasks, not the rows."""
    send(log, 0, 40)
    frame = read(spark, root, subscribe="t", maxRecordsPerPartition="7")
    sizes = [
        row.n
        for row in frame.groupBy(f.spark_partition_id()).agg(f.count("*").alias("n")).collect()
    ]
    assert max(sizes) == 7
    assert values(frame) == sent(0, 40)


@pytest.mark.since("4.2")
def test_a_trigger_that_runs_once_knows_no_limit(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Trigger.Once takes all there is in one micro-batch, whatever the options say."""
    collected = Collected()
    send(log, 0, 20)
    limits = {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "5"}
    frame = stream(spark, root, subscribe="t", startingOffsets="-8", **limits)
    for _ in range(2):
        query = start(frame, tmp_path / "checkpoint", collected, once=True)
        assert query.awaitTermination(60)
        send(log, 20, 21)
    assert collected.sizes == [16, 1]


@pytest.mark.since("4.2")
def test_enough_records_are_waited_for(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """minOffsetsPerTrigger holds a micro-batch back until maxTriggerDelay is over."""
    collected = Collected()
    frame = stream(spark, root, subscribe="t", minOffsetsPerTrigger="10", maxTriggerDelay="4s")
    send(log, 0, 1)
    query = start(frame, tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        send(log, 1, 9)
        while len(collected.sizes) < 2:  # the test's own time is the limit
            assert not query.awaitTermination(1)
        assert collected.once() == sent(0, 9)
        assert collected.sizes == [1, 8]
    finally:
        query.stop()


# ------------------------------------------------------------------------------ filters


def test_frames_of_one_load_know_nothing_of_each_other_s_filters(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """In a session that hands filters on to Python sources, too."""
    send(log, 0, 10)
    setting = "spark.sql.python.filterPushdown.enabled"
    for pushing in ("true", "false"):
        spark.conf.set(setting, pushing)
        try:
            frame = read(spark, root, subscribe="t")
            assert values(frame.where("partition = 0 and offset > 2")) == ["v6", "v8"]
            both = frame.where("partition = 0").unionAll(frame.where("partition = 1"))
            assert values(both) == values(frame) == sent(0, 10)
        finally:
            spark.conf.unset(setting)


# ------------------------------------------------------------------------------ losses


def test_what_is_gone_ends_a_query_or_is_passed_over(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A checkpoint beyond the end names partition and offsets; failOnDataLoss=false continues."""
    send(log, 0, 10)
    checkpoint = tmp_path / "checkpoint"
    query = start(stream(spark, root, subscribe="t"), checkpoint, Collected(), availableNow=True)
    assert query.awaitTermination(60)
    _rewrite_offsets(checkpoint, lambda offset: offset + 3)
    query = start(stream(spark, root, subscribe="t"), checkpoint, Collected(), availableNow=True)
    with pytest.raises(StreamingQueryException, match="Offsets 5 to 8 of t-0 no longer exist"):
        query.awaitTermination(60)
    send(log, 10, 14)
    collected = Collected()
    going_on = stream(spark, root, subscribe="t", failOnDataLoss="false")
    query = start(going_on, checkpoint, collected, availableNow=True)
    assert query.awaitTermination(60)
    assert collected.rows == []
    send(log, 14, 16)
    query = start(going_on, checkpoint, collected, availableNow=True)
    assert query.awaitTermination(60)
    assert collected.once() == sent(14, 16)


def _rewrite_offsets(checkpoint: Path, moved: Any) -> None:
    """As if the query had been elsewhere: the newest offsets of its checkpoint, changed."""
    newest = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    *head, last = newest.read_text("utf-8").splitlines()
    position = json.loads(last)
    offsets = position["t"]["offsets"]
    position["t"]["offsets"] = {number: moved(offset) for number, offset in offsets.items()}
    newest.write_text("\n".join([*head, json.dumps(position)]), "utf-8")
    for stale in (checkpoint / "offsets").glob(".*.crc"):
        stale.unlink()


# ------------------------------------------------------------------------------ values


@pytest.fixture(name="mixed")
def _mixed(root: Path) -> Iterator[Path]:
    """JSON objects, a tombstone, and values that are none."""
    sent = [b'{"id": 1, "who": {"name": "a"}}', b"{}", None, b"{no", b'{"id": "x"}', b"\xff"]
    with sparklog.connect(root) as log:
        log.create_topic("mixed", partitions=1)
        with log.producer() as producer:
            for value in sent:
                producer.send("mixed", value=value)
        yield root


JSON = {
    "subscribe": "mixed",
    "valueFormat": "json",
    "valueSchema": "id INT, who STRUCT<name: STRING>",
}


def test_values_may_come_as_rows(spark: SparkSession, mixed: Path) -> None:
    """valueFormat=json reads them as valueSchema says; a bad one is null."""
    frame = read(spark, mixed, **JSON).orderBy("offset")
    assert frame.schema["value"].dataType.simpleString() == "struct<id:int,who:struct<name:string>>"
    assert [row.value for row in frame.where("offset < 3").collect()] == [
        Row(id=1, who=Row(name="a")),
        Row(id=None, who=None),
        None,
    ]
    assert frame.where("value is null").count() == 4
    assert frame.select("value.id").where("id = 1").count() == 1


def test_bad_values_may_be_kept_or_refused(
    spark: SparkSession, mixed: Path, tmp_path: Path
) -> None:
    """badValues=column has their bytes next to the good ones; error ends the read at the first."""
    frame = read(spark, mixed, **JSON, badValues="column").orderBy("offset")
    assert [row["_corrupt"] for row in frame.collect()][3:] == [b"{no", b'{"id": "x"}', b"\xff"]
    with pytest.raises(PythonException, match=r"mixed-0.*3.*\{no"):
        read(spark, mixed, **JSON, badValues="error").collect()
    query = start(stream(spark, mixed, **JSON), tmp_path / "checkpoint", Collected())
    query.processAllAvailable()
    query.stop()


def test_values_may_come_as_strings(spark: SparkSession, mixed: Path) -> None:
    """valueFormat=string; a value that is not UTF-8 is null."""
    frame = read(spark, mixed, subscribe="mixed", valueFormat="string").orderBy("offset")
    assert [row.value for row in frame.collect()][1:] == ["{}", None, "{no", '{"id": "x"}', None]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id INT,", "PARSE_SYNTAX_ERROR"),
        ("id INT, at INTERVAL DAY", "valueSchema = 'at'"),
        ("id INT>, other STRUCT<id: INT", "schema = 'other struct<id:int>'"),
    ],
)
def test_a_wrong_schema_of_values_is_told_before_a_task_starts(
    spark: SparkSession, mixed: Path, schema: str, message: str
) -> None:
    """By Spark's own parser, or by the name of the field."""
    with pytest.raises(Exception, match=message):
        read(spark, mixed, **(JSON | {"valueSchema": schema})).count()
