"""The queries of Spark's Kafka integration guide, with another format and an address.

https://spark.apache.org/docs/latest/streaming/structured-streaming-kafka-integration.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import sparklog
from sparklog.client.log import Log

pytestmark = pytest.mark.spark

FORMAT = "sparklog"
SERVERS = {"kafka.bootstrap.servers": "host1:port1,host2:port2"}
"""Left where it was: it has no effect, and a warning says so."""


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture(name="log")
def _log(root: str) -> Iterator[Log]:
    """Two topics with a record each."""
    with sparklog.connect(root) as log:
        for topic in ("topic1", "topic2"):
            log.create_topic(topic, partitions=1)
            with log.producer() as producer:
                producer.send(
                    topic,
                    key=topic[-1:].encode(),
                    value=b"of " + topic.encode(),
                    headers=[("h", b"x")],
                )
        yield log


def drained(df: DataFrame, tmp_path: Path, name: str) -> list[tuple[object, ...]]:
    """Returns the results of a streaming query up to the current end, in order."""
    query = (
        df.writeStream.format("memory")
        .queryName(name)
        .option("checkpointLocation", str(tmp_path / name))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    return sorted(tuple(row) for row in df.sparkSession.table(name).collect())


ONE = ("1", "of topic1")
BOTH = [ONE, ("2", "of topic2")]


def test_reading_streams(spark: SparkSession, root: str, log: Log, tmp_path: Path) -> None:
    """One topic, one with headers, several topics, and those of a pattern."""
    reader = spark.readStream.format(FORMAT).options(**SERVERS)
    reader = reader.option("root", root).option("startingOffsets", "earliest")

    df = reader.option("subscribe", "topic1").load()
    df = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    assert drained(df, tmp_path, "one") == [ONE]

    df = reader.option("subscribe", "topic1").option("includeHeaders", "true").load()
    df = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)", "headers")
    ((*record, headers),) = drained(df, tmp_path, "with_headers")
    assert (tuple(record), [tuple(each) for each in headers]) == (ONE, [("h", b"x")])  # type: ignore[attr-defined]

    df = reader.option("subscribe", "topic1,topic2").load()
    df = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    assert drained(df, tmp_path, "several") == BOTH

    reader = spark.readStream.format(FORMAT).options(**SERVERS)
    df = reader.options(root=root, startingOffsets="earliest", subscribePattern="topic.*").load()
    df = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    assert drained(df, tmp_path, "pattern") == BOTH


def test_reading_batches(spark: SparkSession, root: str, log: Log) -> None:
    """By default from earliest to latest, between offsets, and by a pattern."""

    def rows(df: DataFrame) -> list[tuple[object, ...]]:
        found = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)").collect()
        return sorted(tuple(row) for row in found)

    reader = spark.read.format(FORMAT).options(**SERVERS).option("root", root)
    assert rows(reader.option("subscribe", "topic1").load()) == [ONE]
    df = (
        reader.option("subscribe", "topic1,topic2")
        .option("startingOffsets", """{"topic1":{"0":1},"topic2":{"0":-2}}""")
        .option("endingOffsets", """{"topic1":{"0":1},"topic2":{"0":-1}}""")
        .load()
    )
    assert rows(df) == BOTH[1:]
    df = (
        spark.read.format(FORMAT)
        .options(**SERVERS)
        .option("root", root)
        .option("subscribePattern", "topic.*")
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
    )
    assert rows(df) == BOTH


@pytest.mark.since("4.1")
def test_writing(spark: SparkSession, root: str, log: Log, tmp_path: Path) -> None:
    """To a topic that an option names, or to those that the rows name; batch and stream."""
    options = SERVERS | {"root": root}
    df = spark.createDataFrame([("k", "v", "topic2")], "key string, value string, topic string")
    (
        df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
        .write.format(FORMAT)
        .options(**options)
        .option("topic", "topic1")
        .mode("append")
        .save()
    )
    (
        df.selectExpr("topic", "CAST(key AS STRING)", "CAST(value AS STRING)")
        .write.format(FORMAT)
        .options(**options)
        .mode("append")
        .save()
    )
    source = spark.readStream.format(FORMAT).options(**options, startingOffsets="earliest")
    ds = (
        source.option("subscribe", "topic1")
        .load()
        .selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
        .writeStream.format(FORMAT)
        .options(**options)
        .option("topic", "topic2")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert ds.awaitTermination(60)
    assert sorted(log.read("topic1")["value"].to_pylist()) == [b"of topic1", b"v"]
    assert sorted(log.read("topic2")["value"].to_pylist()) == [
        b"of topic1",
        b"of topic2",
        b"v",
        b"v",
    ]
