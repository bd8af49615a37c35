"""Spark maintains a topic's table while it grows and a stream reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest
from pyspark.sql import DataFrame, SparkSession

import sparklog
from sparklog.client.producer.producer import RecordFuture
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from sparklog.storage.table.topic_table import TopicTable
from tests.support.harvest import Collected, start
from tests.support.killing import BrokerProcess
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytest.importorskip("delta", reason="delta-spark is not installed")
from delta.exceptions.base import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
)

pytestmark = [pytest.mark.spark, pytest.mark.delta]

PARTITIONS: Final = 2
ATTEMPTS: Final = 20
RECORDS_PER_ROUND: Final = 400
IN_FLIGHT: Final = 800
BATCH: Final = 200
REFUSALS: Final = (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
)
"""The conflict errors of an engine whose files were merged, or whose partition has new ones."""

Row = tuple[int, int, str]
"""Partition, offset and value."""


class Producer:
    """Sends numbered records: as fast as they are read, and otherwise a few all the time."""

    def __init__(self, address: str, reader: Maintenance) -> None:
        self._address = address
        self._reader = reader
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._sent: list[tuple[str, RecordFuture]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with sparklog.connect(self._address) as log, log.producer(linger_ms=1) as producer:
                while not self._ended.wait(0.1):
                    ahead = len(self._sent) - len(self._reader.collected.rows)
                    for _ in range(200 if ahead < IN_FLIGHT else 1):
                        number = len(self._sent)
                        value, partition = f"v{number}", number % PARTITIONS
                        if self._reader.at_work_on == partition:
                            partition = (partition + 1) % PARTITIONS
                        future = producer.send("t", value.encode(), partition=partition)
                        self._sent.append((value, future))
                    self._sent[-1][1].result(PATIENCE_SECONDS)
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)

    def end(self) -> list[Row]:
        """All that was acked, and where it is."""
        self.stop()
        assert self._failures == []
        acked = [(value, future.result(0.0)) for value, future in self._sent]
        return sorted((place.partition, place.offset, value) for value, place in acked)


class Maintenance:
    """A stream's reader which, now and then, rewrites the table between a batch's plan and read."""

    def __init__(self, spark: SparkSession, root: Path, *, rounds: int) -> None:
        self.collected = Collected()
        self.deleted: set[tuple[int, int]] = set()
        self.rounds = 0
        self.at_work_on: int | None = None
        """A partition that gets no records now: or every rewrite of it might come too late."""
        self._spark = spark
        self._most = rounds
        self._store = LocalStore(root)
        self._path = f"{root}/topics/t"

    def __call__(self, batch: DataFrame, number: int) -> None:
        if not self.is_done and len(self.collected.rows) > RECORDS_PER_ROUND * self.rounds:
            self.at_work_on = self.rounds % PARTITIONS
            self._maintain(self.at_work_on)
            self.at_work_on = None
            self.rounds += 1
        self.collected(batch, number)

    @property
    def is_done(self) -> bool:
        return self.rounds == self._most

    def _maintain(self, partition: int) -> None:
        before = self._table().refresh().version
        self._run(f"OPTIMIZE delta.`{self._path}` WHERE partition = {partition}")
        self._delete(partition)
        replaced = self._replaced_by_spark(before)
        assert replaced
        # LITE takes what commits have removed. Without it, VACUUM would take a file, too, that the
        # broker's next commit is about to name.
        self._run(f"VACUUM delta.`{self._path}` LITE RETAIN 0 HOURS")
        assert not {name for name in replaced if Path(self._path, name).exists()}

    def _run(self, statement: str) -> None:
        """Again where the broker was faster with something that concerns it."""
        for _ in range(ATTEMPTS):
            try:
                self._spark.sql(statement).collect()
            except REFUSALS:
                continue
            return
        raise AssertionError(f"another commit was faster {ATTEMPTS} times")

    def _delete(self, partition: int) -> None:
        """Deletes ten records that the stream has read and the table contains."""
        seen = sorted(row[1] for row in self.collected.rows if row[0] == partition)
        wait_until(
            lambda: self._table().refresh().ends[partition] > seen[-1],
            "the records read are in the table",
        )
        chosen = seen[-20:-10]
        condition = f"partition = {partition} AND offset IN {tuple(chosen)}"
        self._run(f"DELETE FROM delta.`{self._path}` WHERE {condition}")
        self.deleted |= {(partition, offset) for offset in chosen}

    def _table(self) -> TopicTable:
        return TopicTable(self._store, "t", clock=SystemClock())

    def _replaced_by_spark(self, after: int) -> set[str]:
        """Files that Spark's commits after a version removed, by the log itself."""
        replaced: set[str] = set()
        for version in range(after + 1, self._table().refresh().version + 1):
            lines = Path(self._path, "_delta_log", f"{version:020d}.json").read_text().splitlines()
            actions = [json.loads(line) for line in lines]
            engines = [each["commitInfo"]["engineInfo"] for each in actions if "commitInfo" in each]
            if engines[0].startswith("Apache-Spark/"):
                removes = [each["remove"] for each in actions if "remove" in each]
                replaced |= {unquote(remove["path"]) for remove in removes}
        return replaced

    def is_published(self) -> bool:
        """Returns true if the table ends where the log does."""
        follower = RootFollower(self._store, clock=SystemClock())
        snapshot = follower.refresh(["t"])["t"]
        return snapshot.ends == follower.ends(snapshot)


@contextmanager
def checks_off(spark: SparkSession) -> Iterator[None]:
    """Lets VACUUM remove replaced files of any age."""
    name = "spark.databricks.delta.retentionDurationCheck.enabled"
    spark.conf.set(name, "false")
    yield
    spark.conf.unset(name)


def rows_of(frame: DataFrame) -> list[Row]:
    """Every row, in order."""
    found = frame.selectExpr("partition", "offset", "cast(value as string)").collect()
    return sorted((row[0], row[1], row[2]) for row in found)


@pytest.mark.since("4.2")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.soak(mode="jobs"))])
def test_maintenance_by_spark_disturbs_nobody(
    spark: SparkSession, tmp_path: Path, rounds: int
) -> None:
    """With OPTIMIZE, DELETE of read records and VACUUM during a batch, the stream sees each record
    once, a batch read sees all that remain, and the broker continues publishing."""
    root = tmp_path / "root"
    broker = BrokerProcess(
        root,
        {"SPARKLOG_JANITOR_COMPACT_FILES": "6", "SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "2"},
    )
    maintained = Maintenance(spark, root, rounds=rounds)
    given = {"root": str(root), "subscribe": "t", "startingOffsets": "earliest"}
    broker.start()
    try:
        with sparklog.connect(broker.address) as log:
            log.create_topic("t", partitions=PARTITIONS)
        producer = Producer(broker.address, maintained)
        stream = spark.readStream.format("sparklog").options(**given, maxOffsetsPerTrigger=BATCH)
        query = start(stream.load(), tmp_path / "checkpoint", maintained)
        try:
            with checks_off(spark):

                def is_maintained() -> bool:
                    assert query.isActive, query.exception()
                    return maintained.is_done

                # Each round has three jobs of Spark, which take long on a machine that is busy.
                wait_until(is_maintained, "all maintenance is done", patience_seconds=300.0)
            acked = producer.end()
            query.processAllAvailable()
        finally:
            producer.stop()
            query.stop()
        wait_until(maintained.is_published, "the table has all")
        left = [row for row in acked if row[:2] not in maintained.deleted]
        assert sorted(maintained.collected.rows) == acked
        assert rows_of(spark.read.format("sparklog").options(**given).load()) == left
        assert rows_of(spark.read.format("delta").load(f"{root}/topics/t")) == left
        assert len(acked) - len(left) == 10 * rounds
    finally:
        broker.stop()
