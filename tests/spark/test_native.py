"""`sparklog.sources.dataframe`: Delta's scan and the source for the tail are one topic."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from sparklog import errors
from sparklog.client.log import Log
from sparklog.sources import dataframe, native
from sparklog.sources.options import LogLocation
from tests.support.harvest import AT, send, sent, values

pytestmark = [pytest.mark.spark, pytest.mark.delta]


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> str:
    return str(tmp_path / "our root")


def through_source(spark: SparkSession, root: str, **options: str) -> DataFrame:
    """A batch read of `t`."""
    return spark.read.format("sparklog").options(root=root, subscribe="t", **options).load()


def test_spark_may_name_the_root_otherwise(
    spark: SparkSession, root: str, log: Log, tmp_path: Path
) -> None:
    """As s3a:// is another name of s3://: Delta's scan uses it."""
    send(log, 0, 4)
    log.flush_to_table()
    send(log, 4, 6)
    (tmp_path / "alias").symlink_to(root, target_is_directory=True)
    frame = dataframe(spark, root, "t", sparkRoot=f"file://{tmp_path}/alias/")
    assert values(frame) == sent(0, 6)
    assert all("/alias/" in name for name in frame.inputFiles())
    with pytest.raises(errors.BadOption, match=r"sparkRoot.*cannot open nowhere://bucket; pass"):
        dataframe(spark, root, "t", sparkRoot="nowhere://bucket")


def test_the_setting_is_for_the_root_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another root is another log: the variable does not apply to it."""

    def uri(root: str, spark_root: str | None = None) -> str:
        return native._spark_uri(spark_root, LogLocation(root=root))

    monkeypatch.setenv("SPARKLOG_ROOT", "s3://bucket/log")
    assert uri("s3://bucket/log") == "s3://bucket/log"
    monkeypatch.setenv("SPARKLOG_SPARK_ROOT", "s3a://bucket/log/")
    assert uri("s3://bucket/log") == "s3a://bucket/log"
    assert uri("s3://bucket/log", "s3n://bucket/log") == "s3n://bucket/log"
    assert uri("/a b/log") == "file:///a b/log"  # Spark decodes no percent escapes
    with pytest.raises(errors.BadOption, match=r"sparkRoot.*abfss://"):
        uri("az://container/log")


@pytest.mark.parametrize("published", ["none", "half", "all"])
def test_it_is_what_the_source_gives(
    spark: SparkSession, root: str, log: Log, published: str
) -> None:
    """Same schema and rows, whatever part of them is in the table."""
    send(log, 0, 10)
    if published != "none":
        log.flush_to_table()
    if published == "half":
        send(log, 10, 20)
    for options in ({}, {"includeHeaders": "true"}, {"columns": "offset,topic"}):
        found = dataframe(spark, root, "t", **options)
        expected = through_source(spark, root, **options)
        assert_df_equality(found, expected, ignore_row_order=True)


@pytest.fixture(name="few", params=[native._FEW_PARTITIONS, 0], ids=["few", "many"])
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of few partitions, and of many, are looked up in different ways."""
    monkeypatch.setattr(native, "_FEW_PARTITIONS", request.param)


@pytest.mark.usefixtures("few")
def test_it_stays_as_it_was(spark: SparkSession, root: str, log: Log) -> None:
    """Records and partitions that come later are not in it, also when it is read again."""
    send(log, 0, 10)
    log.flush_to_table()
    send(log, 10, 20)
    frame, before = dataframe(spark, root, "t"), dataframe(spark, root, "t")
    assert values(before) == sent(0, 20)
    send(log, 20, 30)
    log.add_partitions("t", 3)
    with log.producer() as producer:
        producer.send("t", value=b"v30", partition=2)
    log.flush_to_table()
    assert values(frame) == values(before) == sent(0, 20)
    assert values(dataframe(spark, root, "t")) == sent(0, 31)


@pytest.mark.usefixtures("few")
def test_bounds_and_several_topics(spark: SparkSession, root: str, log: Log) -> None:
    """Options that say from where to where mean what they mean to the source."""
    log.create_topic("u", partitions=2)
    send(log, 0, 10)
    send(log, 10, 20, topic="u", at=AT + timedelta(hours=1))
    log.flush_to_table()
    send(log, 20, 30, at=AT + timedelta(hours=2))
    assert values(dataframe(spark, root, ["t", "u"])) == sent(0, 30)
    later = int((AT + timedelta(minutes=1)).timestamp() * 1000)
    options = {"startingTimestamp": later, "endingOffsets": '{"t": {"0": 7, "1": -1}}'}
    assert values(dataframe(spark, root, "t", **options)) == [
        f"v{number}" for number in (20, 21, 22, 23, 25, 27, 29)
    ]


def test_deleted_records_are_in_none_of_them(spark: SparkSession, root: str, log: Log) -> None:
    """Neither through the source, nor in the frame, nor in the table as Delta reads it."""
    send(log, 0, 20)
    log.flush_to_table()
    send(log, 20, 30)
    starts = {0: 3, 1: 12}
    assert log.delete_records("t", starts) == starts
    left = [f"v{number}" for number in range(30) if number // 2 >= starts[number % 2]]
    assert values(dataframe(spark, root, "t")) == values(through_source(spark, root)) == left
    log.flush_to_table()
    assert values(dataframe(spark, root, "t")) == left
    assert values(spark.read.format("delta").load(f"{root}/topics/t")) == left
    before = {"startingOffsets": '{"t": {"0": 0, "1": 12}}'}
    with pytest.raises(errors.OffsetOutOfRange):
        dataframe(spark, root, "t", **before)
    assert values(dataframe(spark, root, "t", failOnDataLoss=False, **before)) == left


def test_spark_prunes_and_pushes_by_itself(spark: SparkSession, root: str, log: Log) -> None:
    """The bulk is Delta's own scan: only the columns that are asked for, and fewer files."""
    for first in range(0, 50, 10):
        send(log, first, first + 10)
        log.flush_to_table()
    frame = dataframe(spark, root, "t").where("offset >= 23").select("offset")
    assert sorted(row.offset for row in frame.collect()) == [23, 23, 24, 24]
    (leaf,) = _leaves(frame)
    assert leaf.metrics().apply("numFiles").value() == 2
    assert "value" not in leaf.requiredSchema().simpleString()


def _leaves(frame: DataFrame) -> list[Any]:
    leaves = frame._jdf.queryExecution().executedPlan().collectLeaves()
    return [leaves.apply(index) for index in range(leaves.size())]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"startingOffsets": "latest"}, "no records"),
        ({"valueFormat": "string"}, "from_json"),
        ({"subscribe": "u"}, "name the topics with the argument"),
    ],
)
def test_wrong_options_are_refused(
    spark: SparkSession, root: str, log: Log, options: dict[str, str], message: str
) -> None:
    """At once, by name."""
    with pytest.raises(errors.Invalid, match=message):
        dataframe(spark, root, "t", **options)
    with pytest.raises(errors.UnknownTopic, match="'u'"):
        dataframe(spark, root, "u", failOnDataLoss=False)
    with pytest.raises(errors.UnknownTopic, match=r"'tt' .* Did you mean 't'\?"):
        dataframe(spark, root, "tt")


def test_a_session_without_delta_is_refused(
    spark: SparkSession, root: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the settings that are missing, also where Spark's own has only a stack."""
    send(log, 0, 2)
    log.flush_to_table()
    given = DataFrameReader.format
    monkeypatch.setattr(
        DataFrameReader, "format", lambda reader, name: given(reader, f"absent_{name}")
    )
    with pytest.raises(errors.BadRequest, match=r"no Delta\. .* spark\.sql\.extensions="):
        dataframe(spark, root, "t")
