"""Queries and consumer groups: one begins where a group is, and shows its lag as a group does."""

from __future__ import annotations

from pathlib import Path

import kafka
import pytest
from kafka.structs import OffsetAndMetadata, TopicPartition
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

import sparklog
from sparklog.client.log import Log
from sparklog.sources import dataframe
from tests.support.harvest import Collected, send, sent, start, values
from tests.support.kafkas import broker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.spark

GROUP = {"startingOffsets": "group", "group.id": "g"}


@pytest.fixture(name="log")
def _log(log: Log) -> Log:
    send(log, 0, 10)
    return log


def read(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A batch read of topic `t`."""
    given = {"root": str(root), "subscribe": "t"} | options
    return spark.read.format("sparklog").options(**given).load()


def stream(spark: SparkSession, root: Path, /, **options: str) -> DataFrame:
    """A stream of topic `t`."""
    given = {"root": str(root), "subscribe": "t"} | options
    return spark.readStream.format("sparklog").options(**given).load()


def drain(frame: DataFrame, checkpoint: Path) -> list[str]:
    """Returns the records of a query that reads to the current end."""
    collected = Collected()
    query = start(frame, checkpoint, collected, availableNow=True)
    assert query.awaitTermination(60)
    return collected.once()


@pytest.mark.since("4.2")
def test_a_query_takes_over_from_a_kafka_consumer(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    """It begins where the consumer's group is, shows its lag there, and from then on goes by its
    checkpoint, whatever becomes of the group."""
    with broker(root) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
        send(log, 0, 10)
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=agent.kafka_address, group_id="g", enable_auto_commit=False
        )
        places = {TopicPartition("t", 0): 2, TopicPartition("t", 1): 3}
        consumer.assign(places)
        consumer.commit({place: OffsetAndMetadata(at, "", -1) for place, at in places.items()})
        frame = stream(spark, root, **GROUP, commitToGroup="g")
        assert drain(frame, tmp_path / "checkpoint") == ["v4", "v6", "v7", "v8", "v9"]
        assert {place: consumer.committed(place) for place in places} == dict.fromkeys(places, 5)
        consumer.close()

        log.delete_group("g")
        send(log, 10, 14)
        assert drain(frame, tmp_path / "checkpoint") == sent(10, 14)
        assert log.group_offsets("g") == {("t", 0): 7, ("t", 1): 7}


@pytest.mark.since("4.2")
def test_a_running_query_has_no_lag_when_it_is_idle(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """The end of each batch is committed, the last one too, though Spark plans none after it."""
    collected = Collected()
    frame = stream(spark, root, startingOffsets="earliest", commitToGroup="lag")
    query = start(frame, tmp_path / "checkpoint", collected)
    try:
        for end in (5, 8):
            wait_until(
                lambda end=end: log.group_offsets("lag") == {("t", 0): end, ("t", 1): end},  # type: ignore[misc]
                f"the group was at {end}",
            )
            send(log, 2 * end, 16)
        assert query.isActive
        assert collected.once() == sent(0, 16)
    finally:
        query.stop()
    with pytest.raises(Exception, match=r"commitToGroup = 'lag'.*a stream commits"):
        read(spark, root, commitToGroup="lag").collect()


@pytest.mark.delta
def test_a_group_is_found_without_a_broker(
    spark: SparkSession, root: Path, log: Log, tmp_path: Path
) -> None:
    """By batch, stream and large scan alike, from nothing but the root; a report waits for one."""
    log.commit_group_offsets("g", {("t", 0): 1, ("t", 1): 4})
    log.flush_to_table()
    log.commit_group_offsets("g", {("t", 0): 4})
    address = log.connection.address
    expected = ["v8", "v9"]
    by_broker = spark.read.format("sparklog").options(bootstrap=address, subscribe="t", **GROUP)
    assert values(by_broker.load()) == expected
    log.close()
    assert values(read(spark, root, **GROUP)) == expected
    assert values(dataframe(spark, str(root), "t", **GROUP)) == expected
    frame = stream(spark, root, **GROUP, commitToGroup="g")
    assert drain(frame, tmp_path / "checkpoint") == expected
    with pytest.raises(
        AnalysisException, match=r"group.id = 'h': the consumer group does not exist"
    ):
        read(spark, root, **(GROUP | {"group.id": "h"})).collect()


def test_a_topic_created_again_is_read_from_its_start(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """Commits of a group for the earlier topic do not count; a loss is an error or allowed."""
    log.commit_group_offsets("g", {("t", 0): 3, ("t", 1): 3})
    log.delete_topic("t")
    log.create_topic("t", partitions=2)
    send(log, 0, 8)
    assert values(read(spark, root, **GROUP)) == sent(0, 8)
    assert read(spark, root, **GROUP, groupOffsetReset="latest").count() == 0
    log.commit_group_offsets("g", {("t", 0): 1, ("t", 1): 9})
    with pytest.raises(AnalysisException, match="Offsets 4 to 9 of t-1 no longer exist"):
        read(spark, root, **GROUP).collect()
    allowed = read(spark, root, **GROUP, failOnDataLoss="false")
    assert values(allowed) == ["v2", "v4", "v6"]
