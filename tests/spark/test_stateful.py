"""Stateful queries over topics, each continued from its checkpoint: what state has seen is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from sparklog.client.log import Log
from sparklog.spark_compat import STREAMS_HAVE_LIMITS
from tests.support.harvest import AT, start

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def send(log: Log, topic: str, *records: tuple[str, int]) -> None:
    """Records of (key, seconds after `AT`)."""
    with log.producer() as producer:
        for key, seconds in records:
            at = AT + timedelta(seconds=seconds)
            producer.send(topic, key.encode(), key=key.encode(), timestamp=at)


def stream(spark: SparkSession, root: Path, topic: str) -> DataFrame:
    """Key, partition and time of the topic's records, at most 10 s late."""
    given = {"root": str(root), "subscribe": topic, "startingOffsets": "earliest"}
    frame = spark.readStream.format("sparklog").options(**given).load()
    columns = ("cast(key as string) as key", "partition", "timestamp")
    return frame.selectExpr(*columns).withWatermark("timestamp", "10 seconds")


class Sink:
    """Rows of all batches; the first batch fails if `fails`."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.rows: list[tuple[Any, ...]] = []

    def __call__(self, batch: DataFrame, number: int) -> None:
        rows = [tuple(row) for row in batch.collect()]
        if self.fails:
            assert number == 0
            raise RuntimeError("the sink is down")
        self.rows += rows


def run(frame: DataFrame, checkpoint: Path, sink: Sink) -> None:
    """Runs the query on all available records, and continues from its checkpoint."""
    query = start(frame, checkpoint, sink, availableNow=True)
    assert query.awaitTermination(100)


def test_windows_of_distinct_records_continue_from_a_cloned_checkpoint(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Duplicates before and after the restart count once."""
    windows = (
        stream(spark, root, "t")
        .dropDuplicates(["key", "timestamp"])
        .groupBy(f.window("timestamp", "10 seconds"))
        .count()
        .selectExpr("unix_seconds(window.start) as start", "count")
    )
    sink = Sink()
    send(log, "t", ("a", 1), ("b", 2), ("a", 1), ("c", 15))
    run(windows, tmp_path / "first", sink)
    assert sink.rows == []  # the watermark is 5 s, and no window has ended
    shutil.copytree(tmp_path / "first", tmp_path / "clone")
    shutil.rmtree(tmp_path / "first")
    send(log, "t", ("a", 1), ("c", 15), ("d", 6), ("e", 100))
    run(windows, tmp_path / "clone", sink)
    send(log, "t", ("f", 101))  # before Spark 4.2, these end the windows
    run(windows, tmp_path / "clone", sink)
    base = int(AT.timestamp())
    assert sorted(sink.rows) == [(base, 3), (base + 10, 1)]


def test_two_topics_are_joined_across_a_failure_and_a_restart(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """A first batch that failed is repeated, and a record waits in state for its partner."""
    log.create_topic("u", partitions=2)
    left, right = stream(spark, root, "t").alias("l"), stream(spark, root, "u").alias("r")
    soon = "r.timestamp between l.timestamp and l.timestamp + interval 5 seconds"
    near = f.expr(f"l.key = r.key and {soon}")
    joined = left.join(right, near).selectExpr("l.key", "unix_seconds(r.timestamp)")
    send(log, "t", ("a", 0), ("b", 0))
    send(log, "u", ("a", 3))
    sink = Sink(fails=True)
    with pytest.raises(StreamingQueryException, match="the sink is down"):
        run(joined, tmp_path / "checkpoint", sink)
    sink.fails = False
    send(log, "u", ("b", 4), ("a", 60))
    run(joined, tmp_path / "checkpoint", sink)
    if not STREAMS_HAVE_LIMITS:  # a run repeats the failed micro-batch, and is over
        run(joined, tmp_path / "checkpoint", sink)
    base = int(AT.timestamp())
    assert sorted(sink.rows) == [("a", base + 3), ("b", base + 4)]
    send(log, "t", ("a", 58))
    run(joined, tmp_path / "checkpoint", sink)
    assert sorted(sink.rows) == [("a", base + 3), ("a", base + 60), ("b", base + 4)]


class Running(StatefulProcessor):
    """A running count by key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[Row]:
        del timerValues
        known = self._count.get()
        count = (known[0] if known else 0) + sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(key=key[0], n=count)

    def close(self) -> None:
        pass


@pytest.mark.since("4.1")
def test_arbitrary_state_continues_after_a_restart(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """transformWithState counts on where the first run ended."""
    provider = "spark.sql.streaming.stateStore.providerClass"
    package = "org.apache.spark.sql.execution.streaming.state"
    spark.conf.set(provider, f"{package}.RocksDBStateStoreProvider")
    sink = Sink()
    try:
        counts = (
            stream(spark, root, "t")
            .groupBy("key")
            .transformWithState(Running(), "key string, n long", "Update", "None")
        )
        send(log, "t", ("a", 1), ("b", 2), ("a", 3))
        run(counts, tmp_path / "checkpoint", sink)
        assert sorted(sink.rows) == [("a", 2), ("b", 1)]
        send(log, "t", ("a", 4))
        run(counts, tmp_path / "checkpoint", sink)
        assert sink.rows[-1] == ("a", 3)
    finally:
        spark.conf.unset(provider)
