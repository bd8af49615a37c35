"""The first micro-batch of a query, repeated after a failure: it begins where it began."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader

import sparklog
from sparklog.client.log import Log
from tests.support.harvest import Collected, send, sent, start

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sparklog.sources.offsets import Position

pytestmark = [pytest.mark.spark, pytest.mark.since("4.2")]


@pytest.fixture(name="log")
def _log(log: Log) -> Log:
    send(log, 0, 10)
    return log


class Failing(Collected):
    """Fails on the first batch that has records, after it has seen them."""

    has_failed = False

    def __call__(self, batch: DataFrame, number: int) -> None:
        if not self.has_failed and batch.count():
            self.has_failed = True
            assert number == 0
            raise RuntimeError("the sink is down")
        super().__call__(batch, number)


def register_slow_source(spark: SparkSession, address: str, mark: Path) -> None:
    """`format("slow")`: records come right after a new query has found the end of the log."""

    class Slow(DataSource):
        @classmethod
        def name(cls) -> str:
            return "slow"

        def schema(self) -> str:
            from sparklog.sources.datasource import schema

            return schema(self.options)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
            from sparklog.sources.options import parse
            from sparklog.sources.scan import scan
            from sparklog.sources.stream import StreamReader

            class SlowReader(StreamReader):
                def _resolved(self) -> Position:
                    found = super()._resolved()
                    if not mark.exists():
                        mark.touch()
                        with sparklog.connect(address) as log, log.producer() as producer:
                            for number in range(10, 16):
                                producer.send("t", value=b"v%d" % number, partition=number % 2)
                    return found

            options = parse(self.options)
            return SlowReader(options, scan(options, schema))

    spark.dataSource.register(Slow)


@pytest.mark.parametrize("trigger", [{}, {"availableNow": True}, {"once": True}])
def test_records_of_a_first_batch_that_failed_are_read_again(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path, trigger: Mapping[str, bool]
) -> None:
    """A query that begins at the end of the log fails in batch 0; its next run sees all of it.

    AvailableNow fixes its end before the start is known, so it sees the records in the next run.
    """
    register_slow_source(spark, log.connection.address, tmp_path / "mark")
    frame = spark.readStream.format("slow").options(root=str(root), subscribe="t").load()
    collected = Failing()
    query = start(frame, tmp_path / "checkpoint", collected, **trigger)
    if "availableNow" in trigger:
        assert query.awaitTermination(60)
        assert not collected.has_failed
    else:
        with pytest.raises(StreamingQueryException, match="the sink is down"):
            query.awaitTermination(60)
    send(log, 16, 20)
    collected.has_failed = True
    for _ in range(2):
        query = start(frame, tmp_path / "checkpoint", collected, availableNow=True)
        assert query.awaitTermination(60)
    assert collected.once() == sent(10, 20)
    if "availableNow" not in trigger:
        first, *others = collected.sizes
        assert (first, sum(others)) == (6, 4)


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"once": True}])
def test_a_first_batch_from_a_group_is_repeated_from_where_the_group_was(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path, trigger: Mapping[str, bool]
) -> None:
    """The start stays while the group and the log's end move on during the query's downtime."""
    log.commit_group_offsets("g", {("t", 0): 1, ("t", 1): 4})
    options = {"startingOffsets": "group", "group.id": "g"}
    frame = spark.readStream.format("sparklog").options(root=str(root), subscribe="t", **options)
    collected = Failing()
    query = start(frame.load(), tmp_path / "checkpoint", collected, **trigger)
    with pytest.raises(StreamingQueryException, match="the sink is down"):
        query.awaitTermination(60)
    log.commit_group_offsets("g", {("t", 0): 5, ("t", 1): 5})
    send(log, 10, 12)
    query = start(frame.load(), tmp_path / "checkpoint", collected, availableNow=True)
    assert query.awaitTermination(60)
    assert collected.once() == ["v2", "v4", "v6", "v8", "v9", "v10", "v11"]
    assert collected.sizes == [5, 2]


def test_a_first_batch_is_repeated_although_its_start_resolves_no_longer(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """The option names the partitions of then; the checkpoint has the start, and needs no option.

    The new partition is read from its start, by the next batch.
    """
    frame = spark.readStream.format("sparklog").options(root=str(root), subscribe="t")
    frame = frame.option("startingOffsets", '{"t": {"0": 1, "1": 4}}')
    collected = Failing()
    query = start(frame.load(), tmp_path / "checkpoint", collected, availableNow=True)
    with pytest.raises(StreamingQueryException, match="the sink is down"):
        query.awaitTermination(60)
    log.add_partitions("t", 3)
    with log.producer() as producer:
        producer.send("t", value=b"v10", partition=2)
    query = start(frame.load(), tmp_path / "checkpoint", collected, availableNow=True)
    assert query.awaitTermination(60)
    assert collected.once() == ["v2", "v4", "v6", "v8", "v9", "v10"]
    assert collected.sizes == [5, 1]
    new = start(frame.load(), tmp_path / "new", collected, availableNow=True)
    with pytest.raises(StreamingQueryException, match="name exactly the partitions"):
        new.awaitTermination(60)


def test_a_query_that_waits_has_one_empty_batch(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """Spark always runs batch 0; the text of its end makes no second one.

    Records of two partitions may come in one batch or in two.
    """
    collected = Collected()
    frame = spark.readStream.format("sparklog").options(root=str(root), subscribe="t").load()
    query = start(frame, tmp_path / "checkpoint", collected)
    try:
        query.processAllAvailable()
        query.processAllAvailable()
        assert collected.sizes == [0]
        progress = query.lastProgress
        assert progress is not None
        end = json.loads(progress["sources"][0]["endOffset"])["t"]
        assert end["offsets"] == end["from"] == {"0": 5, "1": 5}
        send(log, 10, 12)
        query.processAllAvailable()
        progress = query.lastProgress
        assert progress is not None
        assert "from" not in json.loads(progress["sources"][0]["endOffset"])["t"]
    finally:
        query.stop()
    sizes = list(collected.sizes)
    assert sizes[0] == 0
    assert all(sizes[1:])
    assert sum(sizes) == 2
    assert collected.once() == sent(10, 12)
    query = start(frame, tmp_path / "checkpoint", collected, availableNow=True)
    assert query.awaitTermination(60)
    assert collected.sizes == sizes
