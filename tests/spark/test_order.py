"""The order of records in a micro-batch, and how many tasks read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import sparklog
from sparklog.client.log import Log
from tests.support.harvest import start

pytestmark = pytest.mark.spark

RECORDS = 80_000
"""Records in each of two partitions: enough for several tasks, by their size."""


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("order")


@pytest.fixture(name="log", scope="module")
def _log(root: Path) -> Iterator[Log]:
    """Half of the records are in the table, half in the log alone."""
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=2)
        for half in range(2):
            with log.producer() as producer:
                for number in range(RECORDS):
                    producer.send("t", b"%0200d" % number, partition=number % 2)
            if not half:
                log.flush_to_table()
        yield log


def places(
    spark: SparkSession, root: Path, checkpoint: Path, **options: str
) -> list[tuple[int, int, int]]:
    """(task, partition, offset) of each row of one micro-batch, as its tasks give them."""
    given = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"} | options
    frame = spark.readStream.format("sparklog").options(**given).load()
    found: list[tuple[int, int, int]] = []

    def take(batch: DataFrame, number: int) -> None:
        assert number == 0
        rows = batch.selectExpr("spark_partition_id() as task", "partition", "offset").toArrow()
        columns = (rows[name].to_pylist() for name in ("task", "partition", "offset"))
        found.extend(zip(*columns, strict=True))

    query = start(frame, checkpoint, take, availableNow=True)
    assert query.awaitTermination(120)
    return found


def test_a_partition_is_one_task_in_order(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """As in Spark's Kafka source: a task sees the records of a partition as they were appended."""
    found = places(spark, root, tmp_path / "checkpoint")
    for partition in range(2):
        mine = [(task, offset) for task, number, offset in found if number == partition]
        assert len({task for task, _ in mine}) == 1
        assert [offset for _, offset in mine] == list(range(RECORDS))


def test_the_user_may_give_the_order_up(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """For more tasks than there are partitions; each is in order still."""
    found = places(spark, root, tmp_path / "checkpoint", minPartitions="4")
    assert len({task for task, _, _ in found}) >= 4
    assert sorted(row[1:] for row in found) == [
        (partition, offset) for partition in range(2) for offset in range(RECORDS)
    ]
    for task in {task for task, _, _ in found}:
        mine = [row[1:] for row in found if row[0] == task]
        assert mine == sorted(mine)
