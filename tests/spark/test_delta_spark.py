"""delta-spark reads and maintains a topic's table, and sparklog continues on the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.storage.maintenance import file_compaction, key_compaction
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import LocalStore
from sparklog.storage.table.changes import TableChange, delete_change, describe_change
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.tables import create, publish_rows

pytest.importorskip("delta", reason="delta-spark is not installed")
from delta.tables import DeltaTable

pytestmark = [pytest.mark.spark, pytest.mark.delta]


@pytest.fixture
def table(tmp_path: Path) -> TopicTable:
    """A topic of two partitions: five files of twenty rows in the first, one in the second."""
    table = TopicTable(LocalStore(tmp_path), "t", clock=SystemClock())
    create(table)
    for _ in range(5):
        publish_rows(table, 0, 20)
    publish_rows(table, 1, 20)
    return table


def root_of(table: TopicTable) -> str:
    """The table's own folder, as other engines want to have it named."""
    assert isinstance(table.store, LocalStore)
    return f"{table.store.root}/{table.folder}"


def read(spark: SparkSession, table: TopicTable) -> DataFrame:
    """The table as Spark opens it, natively."""
    return spark.read.format("delta").load(root_of(table))


def offsets(found: DataFrame, partition: int = 0) -> list[int]:
    """The partition's offsets, in order."""
    rows = found.where(f"partition = {partition}").select("offset").collect()
    return sorted(row.offset for row in rows)


def rows_in(table: TopicTable, partition: int = 0) -> int:
    """Returns the number of rows in the statistics."""
    return sum(file.rows or 0 for file in table.snapshot.files[partition])


@pytest.mark.parametrize(
    "prepare", [lambda _: None, TopicTable.checkpoint], ids=["commits", "checkpoint"]
)
def test_spark_reads_our_table(
    spark: SparkSession, table: TopicTable, prepare: Callable[[TopicTable], None]
) -> None:
    """Spark sees our rows with their exact types and values, from commits or from a checkpoint."""
    prepare(table)
    if table.checkpoint_version > 0:
        table.store.delete(f"{table.log_folder}/{version:020d}.json" for version in range(6))
    found = read(spark, table)
    assert [field.simpleString() for field in found.schema] == [
        "partition:int",
        "offset:bigint",
        "timestamp:timestamp",
        "timestampType:int",
        "key:binary",
        "value:binary",
        "headers:array<struct<key:string,value:binary>>",
    ]
    assert offsets(found) == list(range(100))
    row = found.where("partition = 1 and offset = 7").collect()[0]
    expected = tables.record_batch(1, 0, 20).slice(7, 1).to_pylist()[0]
    assert (bytes(row.key), bytes(row.value)) == (expected["key"], expected["value"])
    micros = found.where("partition = 1 and offset = 7").selectExpr("unix_micros(timestamp)")
    assert micros.collect()[0][0] == tables.START_US + 7
    assert bytes(row.headers[0].value) == b"7"


def test_spark_reads_files_that_lack_columns_of_nulls(
    spark: SparkSession, table: TopicTable
) -> None:
    """A file of a few rows lacks `key` and `headers` if they are null in all of its rows."""
    publish_rows(table, 1, 5, nulls=["key", "headers"])
    found = read(spark, table).where("partition = 1").orderBy("offset").collect()
    assert [row.offset for row in found] == list(range(25))
    assert [row.key is None and row.headers is None for row in found] == [False] * 20 + [True] * 5
    assert all(row.value is not None for row in found)
    DeltaTable.forPath(spark, root_of(table)).optimize().executeCompaction()
    assert read(spark, table).where("partition = 1 and key is null").count() == 5


def test_spark_skips_by_our_statistics(spark: SparkSession, table: TopicTable) -> None:
    """A filter on offset, or on time to the microsecond, opens one file of five."""
    for condition in ("offset = 45", f"timestamp < timestamp_micros({tables.START_US + 20})"):
        found = read(spark, table).where("partition = 0").where(condition)
        assert len(found.collect()) in (1, 20)
        scanned = found._jdf.queryExecution().executedPlan().collectLeaves().head()
        assert scanned.metrics().apply("numFiles").value() == 1


def test_a_native_stream_passes_over_a_key_compaction(
    spark: SparkSession, table: TopicTable, tmp_path: Path
) -> None:
    """It reports removed rows; with `ignoreDeletes` it continues and reads none twice."""
    config = {"cleanup.policy": "compact"}
    table.commit(lambda before: describe_change(before, 2, config))

    def stream(**options: str) -> StreamingQuery:
        source = spark.readStream.format("delta").options(**options).load(root_of(table))
        writer = source.writeStream.format("parquet").trigger(availableNow=True)
        return writer.option("checkpointLocation", f"{tmp_path}/state").start(f"{tmp_path}/read")

    stream().awaitTermination(60)
    publish_rows(table, 0, 20)
    passes = key_compaction.choose(table, everything=True)
    assert [key_compaction.compact(table, each) for each in passes] == [113, 13]
    publish_rows(table, 0, 10)
    assert sorted(offsets(read(spark, table))) == [*range(113, 130)]
    with pytest.raises(StreamingQueryException, match=r"IGNORE_DELETE|ignoreDeletes"):
        stream().awaitTermination(60)
    stream(ignoreDeletes="true").awaitTermination(60)
    assert offsets(spark.read.parquet(f"{tmp_path}/read")) == list(range(130))


def test_we_go_on_after_spark_maintenance(spark: SparkSession, table: TopicTable) -> None:
    """OPTIMIZE, Z-ORDER, DELETE and a checkpoint by Spark come through; we read, merge, commit."""
    theirs = DeltaTable.forPath(spark, root_of(table))
    theirs.optimize().executeCompaction()
    assert rows_in(table) == 100
    table.refresh()
    assert [file.rows for file in table.snapshot.files[0]] == [100]
    theirs.delete("partition = 0 and offset >= 10 and offset < 15")
    theirs.optimize().executeZOrderBy("timestamp")
    assert table.refresh().ends == (100, 20)
    assert rows_in(table) == 95
    theirs.delete("partition = 1 and offset = 3")
    assert table.refresh().version == 10  # every tenth version Spark writes a checkpoint
    table.store.delete(f"{table.log_folder}/{version:020d}.json" for version in range(10))
    known = dataclasses.replace(table.snapshot, gaps={})  # Spark's checkpoint has none
    assert TopicTable(table.store, "t", clock=table.clock).refresh() == known
    for _ in range(3):
        publish_rows(table, 0, 5)
    groups = file_compaction.choose(table.snapshot, everything=True)
    assert len(groups) == 2
    for group in groups:
        assert file_compaction.compact(table, [group])
    table.checkpoint()
    assert offsets(read(spark, table)) == [*range(10), *range(15, 115)]
    assert offsets(read(spark, table), 1) == [0, 1, 2, *range(4, 20)]


def test_spark_follows_our_compaction_as_no_change(
    spark: SparkSession, table: TopicTable, tmp_path: Path
) -> None:
    """A native stream on the table passes over a compaction without reading a row twice."""
    checkpoint = str(tmp_path / "stream")

    def drain() -> int:
        count: list[int] = []
        stream = spark.readStream.format("delta").load(root_of(table))
        query = (
            stream.writeStream.foreachBatch(lambda batch, _: count.append(batch.count()))
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(count)

    assert drain() == 120
    for group in file_compaction.choose(table.snapshot, everything=True):
        file_compaction.compact(table, [group])
    publish_rows(table, 0, 5)
    assert drain() == 5


@pytest.mark.timeout(300)
def test_spark_vacuum_takes_only_what_is_replaced(
    spark: SparkSession, table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VACUUM honours sparklog's tombstones, and sparklog notices the removed files.

    Files that a merge replaced stay until the date in its commit.
    """
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    vacuum = f"VACUUM delta.`{root_of(table)}` RETAIN 0 HOURS"
    old = [file.path for file in table.snapshot.files[0]]

    def merge() -> None:
        for group in file_compaction.choose(table.refresh(), everything=True):
            file_compaction.compact(table, [group])

    def are_there() -> list[bool]:
        return [Path(root_of(table), path).exists() for path in old]

    merge()
    spark.sql(vacuum)
    assert all(are_there())
    for file in table.snapshot.files[0]:
        Path(root_of(table), file.path).unlink()
    with pytest.raises(errors.CorruptObject, match="in the table again"):
        maintenance.sweep_replaced(table)
    monkeypatch.setattr(limits, "REPLACED_KEPT_SECONDS", 0.0)
    merge()
    spark.sql(vacuum)
    assert not any(are_there())
    assert offsets(read(spark, table)) == list(range(100))


def test_spark_upgrade_is_refused_by_name(spark: SparkSession, table: TopicTable) -> None:
    """Deletion vectors, switched on from Spark, stop the topic and are named."""
    good = table.snapshot
    spark.sql(
        f"ALTER TABLE delta.`{root_of(table)}` "
        "SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    with pytest.raises(errors.ForeignTable, match="deletionVectors"):
        table.refresh()
    assert table.snapshot == good


def test_spark_comment_is_welcome(spark: SparkSession, table: TopicTable) -> None:
    """A property or comment that touches nothing of ours stays, also through our own changes."""
    root = root_of(table)
    spark.sql(f"ALTER TABLE delta.`{root}` SET TBLPROPERTIES ('team' = 'us')")
    spark.sql(f"COMMENT ON TABLE delta.`{root}` IS 'flights'")
    spark.sql(f"ALTER TABLE delta.`{root}` ALTER COLUMN value COMMENT 'json'")
    table.refresh()
    table.commit(lambda _: TableChange(properties={"sparklog.config": '{"a":"b"}'}))
    table.checkpoint()
    detail = spark.sql(f"DESCRIBE DETAIL delta.`{root}`").collect()[0]
    assert detail.description == "flights"
    assert detail.properties["team"] == "us"
    assert detail.properties["sparklog.config"] == '{"a":"b"}'
    assert (detail.minReaderVersion, detail.minWriterVersion) == (1, 2)


def test_spark_sees_a_topic_return(spark: SparkSession, table: TopicTable) -> None:
    """A topic that was deleted and created again shows only its new records, and its history."""
    table.commit(delete_change)
    assert read(spark, table).count() == 0
    create(table, 1, topic_id="second")
    publish_rows(table, 0, 3)
    assert offsets(read(spark, table)) == [0, 1, 2]
    history = spark.sql(f"DESCRIBE HISTORY delta.`{root_of(table)}`").collect()
    assert [row.operation for row in history[:3]] == ["WRITE", "CREATE TABLE", "DELETE"]
