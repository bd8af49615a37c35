"""A Structured Streaming query that keeps running while the broker is killed under it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.brokers import Row
from tests.support.killing import PARTITIONS, PATIENCE_SECONDS, TOPIC, Follower, Log, survive

pytestmark = pytest.mark.spark


class Stream:
    """A query on the root, and all that it has handed to its sink."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._query: StreamingQuery | None = None
        self._seen: list[list[Row]] = [[] for _ in range(PARTITIONS)]
        self._batches = 0
        self._progress = threading.Event()

    def begin(self, root: Path, address: str) -> None:
        del address
        frame = (
            self._spark.readStream.format("sparklog")
            .options(root=str(root), subscribe=TOPIC, startingOffsets="earliest")
            .load()
        )
        writer = frame.writeStream.foreachBatch(self._take)
        self._query = writer.option("checkpointLocation", str(self._checkpoint)).start()

    def _take(self, batch: DataFrame, number: int) -> None:
        assert number == self._batches, "a batch came again"
        self._batches += 1
        self._progress.set()
        for row in batch.select("partition", "offset", "value").orderBy("offset").collect():
            self._seen[row.partition].append((row.offset, bytes(row.value)))

    def go_on(self) -> None:
        assert self._progress.wait(PATIENCE_SECONDS), "the query has come to a stop"
        self._progress.clear()

    def end(self, log: Log) -> None:
        query = self._query
        assert query is not None
        try:
            assert query.isActive, query.exception()
            query.processAllAvailable()
        finally:
            query.stop()
        assert self._seen == log


@pytest.mark.slow
def test_a_stream_lives_through_kills(spark: SparkSession, tmp_path: Path) -> None:
    """Through three kills of the broker the query continues, and sees each record once."""
    stream = Stream(spark, tmp_path / "checkpoint")
    survive(tmp_path / "root", kills=3, minutes=0.0, seed=11, witnesses=[stream, Follower()])


@pytest.mark.soak(mode="kills")
def test_a_stream_lives_through_many_kills(spark: SparkSession, tmp_path: Path) -> None:
    """The promises hold for twenty kills, and for as many minutes as configured."""
    minutes = float(os.environ.get("SPARKLOG_SOAK_MINUTES", "0"))
    seed = int.from_bytes(os.urandom(4))
    stream = Stream(spark, tmp_path / "checkpoint")
    survive(tmp_path / "root", kills=20, minutes=minutes, seed=seed, witnesses=[stream, Follower()])
