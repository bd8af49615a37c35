"""write and writeStream into topics: every row of a batch once, whatever is run again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import sparklog
from sparklog import spark_compat
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.formats.partitioner import murmur2, to_positive
from sparklog.sinks import foreach_batch, write_batch
from sparklog.storage.metadata.liveness import read_heartbeats
from sparklog.storage.objects import LocalStore
from sparklog.storage.staging import manifest, query_run

pytestmark = pytest.mark.spark

IN_STEPS = {"maxOffsetsPerTrigger": "20"} if spark_compat.STREAMS_HAVE_LIMITS else {}
"""Several micro-batches, where a Spark can limit them."""

RECORD = (
    "key string, value string, headers array<struct<key:string,value:binary>>, timestamp timestamp"
)
AT = datetime(2013, 1, 1, 5, 15, tzinfo=UTC)
KEEP = {"offsets": "keep", "offsetRanges": '{"t": {"0": [0, 100], "1": [0, 100]}}'}
PLACED = ["value", "int(key) % 2 as partition", "bigint(key) as offset"]


@pytest.fixture(name="log")
def _log(root: Path) -> Iterator[Log]:
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=3)
        log.create_topic("u", partitions=2)
        yield log


def numbers(spark: SparkSession, count: int) -> DataFrame:
    """Keyed records, in two partitions of Spark's."""
    return spark.range(count, numPartitions=2).selectExpr(
        "cast(id as string) as key", "concat('v', id) as value"
    )


def write(frame: DataFrame, root: Path, /, **options: str) -> None:
    """A batch write."""
    frame.write.format("sparklog").options(root=str(root), **options).mode("append").save()


def read(spark: SparkSession, root: Path, topic: str) -> DataFrame:
    """All of a topic."""
    given = {"root": str(root), "subscribe": topic, "includeHeaders": "true"}
    return spark.read.format("sparklog").options(**given).load()


def values(log: Log, topic: str = "t") -> list[str]:
    """The topic's values as the client reads them, sorted."""
    return sorted(value.decode() for value in log.read(topic)["value"].to_pylist())


def staged_files(root: Path) -> list[str]:
    """Returns the staged files, except manifests and notes of runs."""
    return [
        stat.name
        for stat in LocalStore(root).walk("staging")
        if not stat.name.endswith(("manifest.json", query_run.NAME))
    ]


def newest_run(root: Path, query: str) -> str | None:
    """Returns the newest run of a query that writes to `u`."""
    found = query_run.load(LocalStore(root), query)
    return None if found is None else found.run


# ------------------------------------------------------------------------------ batch


def test_what_is_written_is_what_is_read(spark: SparkSession, root: Path, log: Log) -> None:
    """Key, value, headers and timestamp come back as they were; offsets are whole."""
    rows = [
        ("k1", "v1", [("h", bytearray(b"x"))], AT),
        (None, "v2", None, AT),
        ("k3", None, [], AT),
    ]
    frame = spark.createDataFrame(rows, RECORD)
    write(frame, root, topic="u")
    back = read(spark, root, "u")
    same = back.selectExpr(
        "cast(key as string) as key", "cast(value as string) as value", "headers", "timestamp"
    )
    assert_df_equality(same, frame, ignore_row_order=True)
    places = [tuple(row) for row in back.select("partition", "offset").collect()]
    assert all((partition, offset - 1) in places for partition, offset in places if offset)


def test_keys_go_where_kafka_s_producers_send_them(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """A key's partition is murmur2 mod count; the column `partition` goes before."""
    write(numbers(spark, 300), root, topic="t")
    for row in read(spark, root, "t").collect():
        assert row.partition == to_positive(murmur2(bytes(row.key))) % 3
    write(numbers(spark, 5).selectExpr("key", "value", "1 as partition"), root, topic="u")
    assert {row.partition for row in read(spark, root, "u").collect()} == {1}


def test_rows_may_choose_their_topic(spark: SparkSession, root: Path, log: Log) -> None:
    """One write feeds several topics."""
    frame = numbers(spark, 10).selectExpr("value", "if(cast(key as int) < 4, 't', 'u') as topic")
    write(frame, root)
    assert (len(values(log, "t")), len(values(log, "u"))) == (4, 6)


def test_a_named_batch_is_written_once(spark: SparkSession, root: Path, log: Log) -> None:
    """With idempotencyKey a second write is skipped, for each topic by itself."""
    for _ in range(2):
        write(numbers(spark, 20), root, topic="t", idempotencyKey="2013-01")
        write(numbers(spark, 20), root, topic="u", idempotencyKey="2013-01")
    assert (len(values(log, "t")), len(values(log, "u"))) == (20, 20)
    write(numbers(spark, 20), root, topic="t")
    assert len(values(log, "t")) == 40


def test_each_version_of_a_named_write_is_written_once(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """With txnAppId and txnVersion, as a Delta table has them; version 0 is an idempotencyKey's."""
    for version in ("0", "1", "1", "0"):
        write(numbers(spark, 20), root, topic="t", txnAppId="copy", txnVersion=version)
    write(numbers(spark, 20), root, topic="t", idempotencyKey="copy")
    assert len(values(log)) == 40


def test_options_of_spark_s_kafka_sink_do_no_harm(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """A job that moves over may keep them."""
    moved = {"kafka.bootstrap.servers": "k:9092", "kafka.acks": "all", "includeHeaders": "true"}
    write(numbers(spark, 5), root, topic="t", **moved)
    assert len(values(log)) == 5


def test_a_failing_task_leaves_nothing(spark: SparkSession, root: Path, log: Log) -> None:
    """No row of the batch appears, and a task takes away what it has staged."""
    alone = numbers(spark, 100).coalesce(1)  # others may still stage when the batch has failed
    frame = alone.selectExpr("value", "if(key = '99', null, 't') as topic")
    with pytest.raises(PythonException, match="topic is null") as failure:
        write(frame, root)
    assert "Traceback" not in str(failure.value)
    assert values(log) == []
    assert staged_files(root) == []


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["value"], {"topic": "nowhere"}, "Topic 'nowhere' does not exist"),
        (["value"], {"topik": "t"}, "Did you mean 'topic'"),
        (["value"], {}, "set option 'topic'"),
        (["key"], {"topic": "t"}, "a record needs a column 'value'"),
        (["1.5 as value"], {"topic": "t"}, r"column 'value' is decimal\(2,1\)"),
        (["value", "null as topic"], {}, "'topic' is null in every row"),
        (["value", "1 as topic"], {}, "'topic' is int, not string"),
        (["value", "1L as partition"], {"topic": "t"}, "'partition' is bigint, not int"),
        (["value"], {"topic": "t", "offsets": "keep"}, "with offsets = keep, name the offsets"),
        (["value"], {"topic": "t", "offsetRanges": "{}"}, "it applies to offsets = keep only"),
        (["value", "1 as partition"], {"topic": "t", **KEEP}, "needs a column 'offset'"),
        (["value", "1L as offset"], {"topic": "t", **KEEP}, "needs a column 'partition'"),
        (
            ["value", "1 as partition", "1 as offset"],
            {"topic": "t", **KEEP},
            "column 'offset' is int, not bigint",
        ),
        (PLACED, {"topic": "u", **KEEP}, "names topic 't', but the write goes to 'u'"),
        (PLACED, {**KEEP, "topic": "t", "valueFormat": "json"}, "remove the option"),
        (
            PLACED,
            {"topic": "t", "offsets": "keep", "offsetRanges": '{"t": {"3": [0, 1]}}'},
            "has no partition 3",
        ),
    ],
)
def test_a_wrong_write_is_refused_before_it_begins(
    spark: SparkSession,
    root: Path,
    log: Log,
    columns: list[str],
    options: dict[str, str],
    message: str,
) -> None:
    """The user reads our own message, and no task has run."""
    with pytest.raises(AnalysisException, match=message) as failure:
        write(numbers(spark, 3).selectExpr(*columns), root, **options)
    assert re.search(message, str(failure.value).splitlines()[0])
    assert "Traceback" not in str(failure.value)


def test_a_log_is_only_appended_to(spark: SparkSession, root: Path, log: Log) -> None:
    """Other modes are refused, by Spark itself also its default."""
    writer = numbers(spark, 3).write.format("sparklog").options(root=str(root), topic="t")
    with pytest.raises(AnalysisException, match=r'"ErrorIfExists" mode\. Please use .*"Append"'):
        writer.save()
    with pytest.raises(AnalysisException, match="a log is only appended to"):
        writer.mode("overwrite").save()


# ------------------------------------------------------------------------------ kept offsets


def test_offsets_are_kept(spark: SparkSession, root: Path, log: Log) -> None:
    """Each row at its offset, gaps before, between and after them, from several tasks; once."""
    log.create_topic("m", 3, config={"mirror.source": "cluster c, topic m"})
    wanted = "int(key) between 7 and 80 and key % 5 < 3"
    frame = numbers(spark, 90).where(wanted).selectExpr(*PLACED)
    ranges = '{"m": {"0": [0, 100], "1": [0, 1000], "2": [0, 50]}}'
    write(frame, root, topic="m", offsets="keep", offsetRanges=ranges)
    columns = ["partition", "offset", "cast(value as string) as value"]
    assert_df_equality(
        read(spark, root, "m").selectExpr(*columns),
        frame.selectExpr(*columns),
        ignore_row_order=True,
        ignore_nullable=True,
    )
    assert [each.end for each in log.describe("m").partitions] == [100, 1000, 50]
    with pytest.raises(AnalysisException, match="begins at 0 in m-0, which ends at 100"):
        write(frame, root, topic="m", offsets="keep", offsetRanges=ranges)
    nothing = spark.createDataFrame([], frame.schema)
    write(nothing, root, topic="m", offsets="keep", offsetRanges='{"m": {"2": [50, 60]}}')
    assert [each.end for each in log.describe("m").partitions] == [100, 1000, 60]
    with pytest.raises(AnalysisException, match="is a mirror of cluster c, topic m"):
        write(frame, root, topic="m")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["value", "0 as partition", "100 - id as offset"], "sortWithinPartitions"),
        (["value", "0 as partition", "id % 10 as offset"], "sortWithinPartitions"),
        (["value", "0 as partition", "(id - 50) * id as offset"], "sortWithinPartitions"),
        (["value", "0 as partition", "id % 50 as offset"], "two tasks have rows of t-0"),
        (["value", "0 as partition", "id + 60 as offset"], "offsetRanges covers 0 to 99"),
        (["value", "2 as partition", "id as offset"], "rows of t-2, which offsetRanges"),
        (["value", "if(id = 9, null, 0) as partition", "id as offset"], "without nulls"),
        (["value", "0 as partition", "if(id = 9, null, id) as offset"], "without nulls"),
    ],
)
def test_offsets_that_are_no_sequence_are_refused(
    spark: SparkSession, root: Path, log: Log, columns: list[str], message: str
) -> None:
    """By a task or the driver, before any row is written; nothing staged is left."""
    frame = numbers(spark, 100).selectExpr("*", "bigint(key) as id").selectExpr(*columns)
    with pytest.raises((AnalysisException, PythonException), match=message):
        write(frame, root, topic="t", **KEEP)
    assert values(log) == []
    if "sort" not in message and "nulls" not in message:  # other tasks may still stage
        assert staged_files(root) == []


@pytest.mark.since("4.1")
def test_a_stream_keeps_no_offsets(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """The error names foreachBatch."""
    stream = spark.readStream.format("rate").load().selectExpr("'v' as value")
    query = stream.writeStream.format("sparklog").options(root=str(root), topic="t", **KEEP)
    with pytest.raises(StreamingQueryException, match="use foreachBatch"):
        query.option("checkpointLocation", str(tmp_path)).start().awaitTermination(100)


# ------------------------------------------------------------------------------ JSON

EVERYTHING = (
    "id",
    "id % 3 = 0 as boolean",
    "cast(id as byte) as byte",
    "cast(id as short) as short",
    "cast(id as int) as int",
    "id / 8 as double",
    "cast(id / 8 as float) as float",
    "if(id = 5, double('NaN'), double('-Infinity')) as none",
    "cast(id / 8 as decimal(20, 6)) as decimal",
    r"""if(id % 4 = 0, null, concat('line\n"', id, '"\\\\ é')) as text""",
    "encode(cast(id as string), 'utf-8') as binary",
    "date_add(date'2013-01-01', cast(id as int)) as date",
    "timestamp_millis(1357017300123 + id) as instant",
    "cast('2013-01-01 05:15:00' as timestamp_ntz) as wall",
    "null as void",
    "named_struct('a', id, 'b', if(id % 2 = 0, null, 'b')) as struct",
    "if(id % 5 = 0, null, array(id, null)) as array",
    "array(named_struct('c', null)) as structs",
    "map('k', id, 'n', null) as map",
    "map('m', map('n', array('\"'))) as deep",
)


def test_json_is_spark_s_own(spark: SparkSession, root: Path, log: Log) -> None:
    """A value is what `to_json(struct(*))` writes, to the letter."""
    frame = spark.range(20, numPartitions=2).selectExpr(*EVERYTHING)
    write(frame.selectExpr("*", "cast(id as string) as key"), root, topic="t", valueFormat="json")
    found = read(spark, root, "t").selectExpr("key", "cast(value as string) as value")
    own = frame.selectExpr(
        "encode(cast(id as string), 'utf-8') as key", "to_json(struct(*)) as value"
    )
    assert_df_equality(found, own, ignore_row_order=True, ignore_nullable=True)


# ------------------------------------------------------------------------------ stream


def copy(spark: SparkSession, root: Path, checkpoint: Path, /, **options: str) -> StreamingQuery:
    """Runs the query that copies new records of `t` to `u`, and returns it."""
    source = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"} | options
    target = source.pop("to", "u")
    frame = spark.readStream.format("sparklog").options(**source).load().select("key", "value")
    query = (
        frame.writeStream.format("sparklog")
        .options(root=str(root), topic=target, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    return query


@pytest.mark.since("4.1")
def test_a_stream_writes_each_record_once(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Each record is copied once, in several batches and over a restart."""
    write(numbers(spark, 50), root, topic="t")
    copy(spark, root, tmp_path / "checkpoint", **IN_STEPS)
    assert values(log, "u") == values(log, "t")
    write(numbers(spark, 10), root, topic="t")
    copy(spark, root, tmp_path / "checkpoint")
    assert values(log, "u") == values(log, "t")
    assert len(values(log, "u")) == 60


@pytest.mark.since("4.1")
def test_a_batch_that_is_run_again_is_skipped(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A query that dies between our commit and its own log of it repeats the batch, unnoticed."""
    checkpoint = tmp_path / "checkpoint"
    write(numbers(spark, 30), root, topic="t")
    copy(spark, root, checkpoint)
    files = staged_files(root)
    for forgotten in (checkpoint / "commits").iterdir():
        forgotten.unlink()
    query = copy(spark, root, checkpoint)
    assert values(log, "u") == values(log, "t")
    assert sorted(staged_files(root)) == sorted(files)
    assert newest_run(root, f"{query.id}@u") == str(query.runId)


@pytest.mark.since("4.1")
@pytest.mark.parametrize("was_given_up", [False, True])
def test_a_query_with_a_copied_checkpoint_writes_to_its_own_topic(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path, was_given_up: bool
) -> None:
    """Its batches are not reruns of the first query's, also where a sweeper gave one of them up."""
    log.create_topic("v", partitions=2)
    write(numbers(spark, 30), root, topic="t")
    copy(spark, root, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    commits = tmp_path / "second" / "commits"
    last = max(int(path.name) for path in commits.glob("[0-9]*"))
    for forgotten in (f"{last}", f".{last}.crc"):
        (commits / forgotten).unlink()
    if was_given_up:
        query = json.loads((tmp_path / "second" / "metadata").read_text())["id"]
        within = f"staging/{query}@v/{last}"
        manifest.refuse(LocalStore(root), within, clock=SystemClock())
    copy(spark, root, tmp_path / "second", to="v")
    assert values(log, "v") == values(log, "u") == values(log, "t")


@pytest.mark.since("4.1")
def test_complete_mode_appends_the_whole_result_each_time(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """As Spark's Kafka sink does; columns of no record are left out."""
    source = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"}
    counts = spark.readStream.format("sparklog").options(**source).load().groupBy("topic").count()
    for _ in range(2):
        write(numbers(spark, 3), root, topic="t")
        query = (
            counts.selectExpr("cast(count as string) as value", "count")
            .writeStream.format("sparklog")
            .options(root=str(root), topic="u", checkpointLocation=str(tmp_path / "checkpoint"))
            .outputMode("complete")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    assert values(log, "u") == ["3", "6"]


@pytest.mark.since("4.1")
def test_update_mode_is_refused_by_spark_itself(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """The sink is not asked, and the documentation has this message."""
    source = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"}
    counts = spark.readStream.format("sparklog").options(**source).load().groupBy("topic").count()
    query = (
        counts.selectExpr("cast(count as string) as value")
        .writeStream.format("sparklog")
        .options(root=str(root), topic="u", checkpointLocation=str(tmp_path / "checkpoint"))
        .outputMode("update")
        .start()
    )
    refusal = "requirement failed: sparklog does not support Update mode"
    with pytest.raises(StreamingQueryException, match=refusal):
        query.awaitTermination(60)


def test_update_mode_appends_what_has_changed_through_foreach_batch(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """The groups of a micro-batch have a record each; the others, which stay, have none."""
    source = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"}
    rows = spark.readStream.format("sparklog").options(**source).load()
    counts = rows.groupBy("key").count().selectExpr("key", "cast(count as string) as value")
    once = foreach_batch(name="counts", root=str(root), topic="u")
    for keys in (["a", "b"], ["b"]):
        given = [(key, "v") for key in keys]
        frame = spark.createDataFrame(given, "key string, value string")
        write(frame, root, topic="t")
        query = (
            counts.writeStream.outputMode("update")
            .foreachBatch(once)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    found = log.read("u").select(["key", "value"]).to_pylist()
    assert sorted((row["key"], row["value"]) for row in found) == [
        (b"a", b"1"),
        (b"b", b"1"),
        (b"b", b"2"),
    ]


def hand_over(
    spark: SparkSession, root: Path, checkpoint: Path, take: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    """Runs the query that passes new records of `t` to `take`, in batches of 20, and returns it."""
    source = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"}
    frame = spark.readStream.format("sparklog").options(**source, **IN_STEPS).load()
    writer = frame.selectExpr("key", "value").writeStream.foreachBatch(take)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination(100)
    return query


def test_foreach_batch_writes_each_row_once(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A query that dies after the write repeats the micro-batch; a new query writes again."""
    write(numbers(spark, 30), root, topic="t")
    once = foreach_batch(name="copy", root=str(root), topic="u")

    def dying(frame: DataFrame, batch_id: int) -> None:
        once(frame, batch_id)
        if batch_id == len(IN_STEPS):
            raise RuntimeError("the driver dies")

    with pytest.raises(StreamingQueryException, match="the driver dies"):
        hand_over(spark, root, tmp_path / "checkpoint", dying)
    assert values(log, "u") == values(log, "t")
    query = hand_over(spark, root, tmp_path / "checkpoint", once)
    assert values(log, "u") == values(log, "t")
    assert newest_run(root, f"copy.{query.id}@u") == str(query.runId)
    hand_over(spark, root, tmp_path / "another", once)
    assert len(values(log, "u")) == 60


def test_foreach_batch_may_write_a_topic_twice(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Two writes of one micro-batch are distinguished by their names."""

    def split(frame: DataFrame, batch_id: int) -> None:
        for name, which in (("even", 0), ("odd", 1)):
            part = frame.where(f"cast(cast(key as string) as int) % 2 = {which}")
            write_batch(part, batch_id, name=name, root=str(root), topic="u")

    write(numbers(spark, 20), root, topic="t")
    hand_over(spark, root, tmp_path / "checkpoint", split)
    assert values(log, "u") == values(log, "t")


def test_a_topic_is_copied_with_all_its_columns(spark: SparkSession, root: Path, log: Log) -> None:
    """Offset and timestamp type of the source are ignored; the copy has its own."""
    write(numbers(spark, 20).selectExpr("*", "1 as partition"), root, topic="t")
    frame = read(spark, root, "t")
    write(frame, root, topic="u", **{"kafka.bootstrap.servers": "k:9092"})
    columns = ["key", "value", "partition", "timestamp", "headers"]
    copied = read(spark, root, "u").select(columns)
    assert_df_equality(copied, frame.select(columns), ignore_row_order=True)


# ------------------------------------------------------------------------------ no broker


@pytest.fixture(name="left_alone")
def _left_alone(root: Path) -> Iterator[Path]:
    """A root with a topic and no broker; the one that is started is ended with the test."""
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=3)
    yield root
    for heartbeat in read_heartbeats(LocalStore(root)).values():
        if not heartbeat.stopped and heartbeat.process.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(heartbeat.process.pid, signal.SIGTERM)


def test_a_sink_without_a_broker_starts_one(spark: SparkSession, left_alone: Path) -> None:
    """The detached broker appends the batch, and serves the next."""
    write(numbers(spark, 10), left_alone, topic="t")
    write(numbers(spark, 10), left_alone, topic="t")
    assert read(spark, left_alone, "t").count() == 20
    brokers = [
        each for each in read_heartbeats(LocalStore(left_alone)).values() if not each.stopped
    ]
    assert len(brokers) == 1
    assert brokers[0].process.pid != os.getpid()
