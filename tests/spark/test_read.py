"""spark.read and readStream of a root: Spark sees each sent record once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from sparklog.client.log import Log
from sparklog.sources import LagListener, QueryLag, lag, register_functions
from sparklog.spark_compat import STREAMS_HAVE_LIMITS
from tests.support.harvest import AT, Collected, send, sent, start, values
from tests.support.waiting import wait_until

pytestmark = pytest.mark.spark

KAFKA_SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint,"
    " timestamp timestamp, timestampType int"
)


def read(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A batch read of topic `t`."""
    given = {"root": str(root), "subscribe": "t"} | options
    return spark.read.format("sparklog").options(**given).load()


def stream(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A stream of topic `t` from its beginning."""
    given = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"} | options
    return spark.readStream.format("sparklog").options(**given).load()


# ------------------------------------------------------------------------------ batch


def test_rows_are_those_of_spark_s_kafka_source(spark: SparkSession, root: Path, log: Log) -> None:
    """Names, types and values are what `format("kafka")` would give."""
    send(log, 0, 4)
    expected = spark.createDataFrame(
        [
            (b"k%d" % number, b"v%d" % number, "t", number % 2, number // 2, AT, 0)
            for number in range(4)
        ],
        KAFKA_SCHEMA,
    )
    assert_df_equality(read(spark, root), expected, ignore_row_order=True)


def test_timestamps_are_timestamps_whatever_the_session_prefers(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """TIMESTAMP means TIMESTAMP_NTZ in DDL of such a session, which no column of a record is."""
    send(log, 0, 2)
    options = {"includeHeaders": "true", "valueFormat": "json", "valueSchema": "delay INT"}
    collected = Collected()
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        for given in ({}, options):
            found = read(spark, root, **given)
            assert dict(found.dtypes)["timestamp"] == "timestamp"
            times = found.selectExpr("unix_micros(timestamp) AS us").collect()
            assert [row.us for row in times] == [int(AT.timestamp()) * 1_000_000] * 2
        frame = stream(spark, root)
        assert dict(frame.dtypes)["timestamp"] == "timestamp"
        assert start(frame, tmp_path, collected, availableNow=True).awaitTermination(60)
        assert collected.once() == sent(0, 2)
    finally:
        spark.conf.unset("spark.sql.timestampType")


def test_headers_and_single_columns_are_a_choice(spark: SparkSession, root: Path, log: Log) -> None:
    """includeHeaders adds the column of Spark's Kafka source; columns takes only some."""
    send(log, 0, 2)
    with_headers = read(spark, root, includeHeaders="true").select("headers", "offset")
    expected = spark.createDataFrame(
        [([("h", bytearray(b"0"))], 0), ([("h", bytearray(b"1"))], 0)],
        "headers array<struct<key:string,value:binary>>, offset bigint",
    )
    assert_df_equality(with_headers, expected, ignore_row_order=True)
    assert read(spark, root, columns="offset,topic").columns == ["offset", "topic"]
    assert read(spark, root, columns="topic").count() == 2


def test_reading_needs_nobody_but_the_root(spark: SparkSession, root: Path, log: Log) -> None:
    """Not yet published, published, or without any broker: the same rows."""
    send(log, 0, 50)
    assert values(read(spark, root)) == sent(0, 50)
    log.flush_to_table()
    send(log, 50, 60)
    assert values(read(spark, root)) == sent(0, 60)
    log.close()
    assert values(read(spark, root)) == sent(0, 60)


def test_a_batch_has_the_bounds_that_it_was_given(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """startingOffsets and endingOffsets cut each partition by itself."""
    send(log, 0, 40)
    bounds = {
        "startingOffsets": json.dumps({"t": {"0": 3, "1": -2}}),
        "endingOffsets": json.dumps({"t": {"0": -1, "1": 4}}),
    }
    found = read(spark, root, **bounds).groupBy("partition").agg({"offset": "min", "*": "count"})
    assert {tuple(row) for row in found.collect()} == {(0, 3, 17), (1, 0, 4)}


def test_a_topic_is_a_view_for_sql(spark: SparkSession, root: Path, log: Log) -> None:
    """SQL asks it like any table, and the refusal of a table names the view; groups have a lag."""
    send(log, 0, 10)
    statement = (
        "create or replace temporary view flights using sparklog"
        f" options (root '{root}', subscribe 't')"
    )
    spark.sql(statement)
    (row,) = spark.sql("select count(*) as n, max(offset) as last from flights").collect()
    assert (row.n, row.last) == (10, 4)
    send(log, 10, 12)
    if STREAMS_HAVE_LIMITS:  # an earlier Spark reads up to the end of the log each time
        assert spark.table("flights").count() == 10
    spark.sql(statement)
    assert spark.table("flights").count() == 12
    for how in (f"options (root '{root}', subscribe 't')", f"location '{root}'", ""):
        with pytest.raises(AnalysisException, match="use CREATE TEMPORARY VIEW name USING"):
            spark.sql(f"create table flights_table using sparklog {how}")
    spark.sql(f"create table listed (offset bigint) using sparklog options (root '{root}')")
    by_delta = "sparklog is not a valid Spark SQL Data Source"  # with the catalog of Delta
    with pytest.raises(AnalysisException, match=f"use CREATE TEMPORARY VIEW name|{by_delta}"):
        spark.table("listed").count()
    spark.sql("drop table listed")
    register_functions(spark, str(root))
    log.commit_group_offsets("g", {("t", 0): 4, ("t", 1): 6})
    found = spark.sql("select * from sparklog_lag('g') order by partition").collect()
    assert [tuple(each) for each in found] == [("t", 0, 4, 6, 2), ("t", 1, 6, 6, 0)]
    with pytest.raises(PythonException, match="group = 'h': the consumer group does not exist"):
        spark.sql("select * from sparklog_lag('h')").collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOfsets": "latest"}, "Did you mean 'startingOffsets'"),
        ({"subscribe": "u"}, "Topic 'u' does not exist"),
        ({"startingOffsets": "latest"}, "a batch that starts at the end of the log has no records"),
        ({"assign": '{"t": [0]}'}, "exactly one of subscribe"),
        ({"root": "/nowhere"}, "is not a sparklog root"),
        (
            {"startingOffsets": '{"t": {"0": 9, "1": 0}}'},
            "Offset 9 of t-0 is outside the range 0 to 0",
        ),
    ],
)
def test_a_wrong_option_is_told_by_name(
    spark: SparkSession, root: Path, log: Log, options: dict[str, str], message: str
) -> None:
    """The user reads our own message, from `load` or the first use, and no frames before it."""
    with pytest.raises(AnalysisException, match=message) as failure:
        read(spark, root, **options).collect()
    first = str(failure.value).splitlines()[0]
    assert message in first
    assert "Traceback" not in str(failure.value)


# ------------------------------------------------------------------------------ stream


@pytest.mark.since("4.2")
def test_a_stream_sees_what_is_appended(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Records come while it runs, from log and table, and from partitions that are added."""
    collected = Collected()
    send(log, 0, 10)
    query = start(stream(spark, root), tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        assert collected.once() == sent(0, 10)
        send(log, 10, 20)
        log.flush_to_table()
        send(log, 20, 30)
        query.processAllAvailable()
        assert collected.once() == sent(0, 30)
        log.add_partitions("t", 3)
        with log.producer() as producer:
            producer.send("t", value=b"v30", partition=2)
        query.processAllAvailable()
        assert collected.once() == sent(0, 31)
        progress = query.lastProgress
        assert progress is not None
        source = progress["sources"][0]
        assert json.loads(source["latestOffset"])["t"]["offsets"] == {"0": 15, "1": 15, "2": 1}
    finally:
        query.stop()


@pytest.mark.since("4.2")
def test_a_restarted_stream_gives_each_record_once(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """From its checkpoint, in steps of maxOffsetsPerTrigger, whatever became of log and table."""
    collected = Collected()
    for first, end in ((0, 25), (25, 40)):
        send(log, first, end)
        limited = stream(spark, root, maxOffsetsPerTrigger="7")
        query = start(limited, tmp_path / "checkpoint", collected, availableNow=True)
        assert query.awaitTermination(60)
        log.flush_to_table()
    assert collected.once() == sent(0, 40)
    assert max(collected.sizes) in (6, 7)  # two partitions share it


@pytest.mark.since("4.2")
def test_available_now_keeps_to_a_limit_of_bytes(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """maxBytesPerTrigger makes several micro-batches of what waits; the lag falls with each."""
    collected = Collected()
    send(log, 0, 300)
    log.flush_to_table()
    send(log, 300, 340)
    limited = stream(spark, root, maxBytesPerTrigger="2k")
    lags: list[QueryLag] = []
    listener = LagListener(lags.append)
    spark.streams.addListener(listener)
    try:
        query = start(limited, tmp_path / "checkpoint", collected, availableNow=True)
        assert query.awaitTermination(60)
        assert collected.once() == sent(0, 340)
        assert len(collected.sizes) > 2
        last = lag(query)
        assert last is not None
        assert (last.query, last.total, last.lag_seconds) == (str(query.id), 0, 0)
        wait_until(lambda: bool(lags) and lags[-1] == last, "the listener has it")
    finally:
        spark.streams.removeListener(listener)
    # A late event of an earlier test's query may have come first.
    lags = [each for each in lags if each.query == last.query]
    assert [each.total for each in lags] == [
        340 - done for done in itertools.accumulate(collected.sizes)
    ]
    assert all(each.lag_seconds and each.lag_seconds > 86_400 for each in lags[:-1])


def test_available_now_reads_what_there_is_and_ends(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """One run reads all and stops; the next has nothing to do."""
    collected = Collected()
    send(log, 0, 12)
    for _ in range(2):
        query = start(stream(spark, root), tmp_path / "checkpoint", collected, availableNow=True)
        assert query.awaitTermination(60)
    assert collected.once() == sent(0, 12)


def test_a_new_query_begins_at_the_end(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Without startingOffsets a stream returns new records only, as Spark's Kafka source does."""
    collected = Collected()
    send(log, 0, 5)
    given = {"root": str(root), "subscribe": "t"}
    frame = spark.readStream.format("sparklog").options(**given).load()
    query = start(frame, tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        send(log, 5, 9)
        query.processAllAvailable()
    finally:
        query.stop()
    assert collected.once() == sent(5, 9)


def test_a_topic_that_was_created_again_ends_the_query(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Its records are other records; with failOnDataLoss=false they are read from the start."""
    collected = Collected()
    send(log, 0, 10)
    query = start(stream(spark, root), tmp_path / "checkpoint", collected, availableNow=True)
    assert query.awaitTermination(60)
    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    send(log, 10, 13)
    query = start(stream(spark, root), tmp_path / "checkpoint", collected, availableNow=True)
    with pytest.raises(StreamingQueryException, match="'t' was deleted and created again"):
        query.awaitTermination(60)
    again = Collected()
    going_on = stream(spark, root, failOnDataLoss="false")
    query = start(going_on, tmp_path / "checkpoint", again, availableNow=True)
    assert query.awaitTermination(60)
    assert again.once() == sent(10, 13)


def test_a_stream_s_wrong_option_is_told_by_name(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A refusal that needs a running stream is the query's own error."""
    query = start(stream(spark, root, endingOffsets="latest"), tmp_path / "checkpoint", Collected())
    with pytest.raises(StreamingQueryException, match="a stream has no end") as failure:
        query.awaitTermination(60)
    assert "a stream has no end" in str(failure.value).splitlines()[0]
    assert "Traceback" not in str(failure.value)
