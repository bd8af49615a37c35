"""`sparklog.sources.foreach_dataframe`: micro-batches of a stream through Delta's scan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sparklog import errors
from sparklog.client.log import Log
from sparklog.sources import foreach_dataframe, lag, native
from sparklog.sources.batch import planner_of
from tests.support.harvest import Collected, send, sent, start, values

pytestmark = [pytest.mark.spark, pytest.mark.delta, pytest.mark.since("4.2")]

Function = Callable[[DataFrame, int], None]


@pytest.fixture(name="begin")
def _begin(spark: SparkSession, root: Path, tmp_path: Path) -> Callable[..., StreamingQuery]:
    """Starts an `availableNow` query of topic `t` from its beginning."""

    def begin(function: Function, **options: object) -> StreamingQuery:
        given = {"startingOffsets": "earliest"} | options
        writer = foreach_dataframe(spark, str(root), "t", function, **given)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(availableNow=True).start()

    return begin


@pytest.fixture(name="drain")
def _drain(begin: Callable[..., StreamingQuery]) -> Callable[..., StreamingQuery]:
    """Runs such a query to its end."""

    def drain(function: Function, **options: object) -> StreamingQuery:
        query = begin(function, **options)
        assert query.awaitTermination(120)
        return query

    return drain


def stream(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    """A stream of topic `t` through `format("sparklog")`."""
    given = {"root": str(root), "subscribe": "t"} | options
    return spark.readStream.format("sparklog").options(**given).load()


def test_each_record_comes_once(drain: Callable[..., StreamingQuery], log: Log) -> None:
    """Within the limits of a micro-batch, from the table, from both, and from the log alone."""
    send(log, 0, 10)
    log.flush_to_table()
    send(log, 10, 20)
    collected = Collected()
    query = drain(collected, maxOffsetsPerTrigger=8)
    assert collected.once() == sent(0, 20)
    assert collected.sizes == [8, 8, 4]
    found = lag(query)
    assert found is not None
    assert (found.total, found.partitions[1].committed) == (0, 10)


def test_rows_have_the_columns_of_the_stream(
    spark: SparkSession, root: Path, drain: Callable[..., StreamingQuery], log: Log
) -> None:
    """Also in a micro-batch without records, which a query that begins at the end has first."""
    send(log, 0, 2)
    log.flush_to_table()
    found: list[tuple[Any, int]] = []

    def take(batch: DataFrame, number: int) -> None:
        assert number == len(found)
        found.append((batch.schema, batch.count()))

    drain(take, startingOffsets="latest", includeHeaders=True)
    send(log, 2, 4)
    drain(take, includeHeaders=True, valueFormat="binary")
    expected = stream(spark, root, includeHeaders="true").schema
    assert found == [(expected, 0), (expected, 2)]


def test_repeated_micro_batch_has_the_same_records(
    spark: SparkSession,
    root: Path,
    begin: Callable[..., StreamingQuery],
    drain: Callable[..., StreamingQuery],
    log: Log,
    tmp_path: Path,
) -> None:
    """Later records are in the next one, and `format("sparklog")` continues the checkpoint."""
    send(log, 0, 10)
    seen: list[list[str]] = []

    def fail(batch: DataFrame, number: int) -> None:
        assert number == 0
        seen.append(values(batch))
        raise RuntimeError("the sink is down")

    with pytest.raises(StreamingQueryException, match="the sink is down"):
        begin(fail).awaitTermination(120)
    log.flush_to_table()
    send(log, 10, 20)
    log.flush_to_table()
    collected = Collected()
    drain(collected)
    assert collected.sizes == [10, 10]
    assert collected.once() == sent(0, 20)
    assert seen == [sent(0, 10)]
    send(log, 20, 24)
    query = start(stream(spark, root), tmp_path / "checkpoint", collected, availableNow=True)
    assert query.awaitTermination(120)
    assert collected.once() == sent(0, 24)
    assert collected.sizes == [10, 10, 4]


def test_table_may_change_while_a_micro_batch_is_processed(
    drain: Callable[..., StreamingQuery], log: Log
) -> None:
    """Neither later records, nor retention, nor a new topic of that name change its records."""
    send(log, 0, 10)
    log.flush_to_table()
    seen: list[list[str]] = []

    def take(batch: DataFrame, _: int) -> None:
        send(log, 10, 20)
        log.add_partitions("t", 3)
        with log.producer() as producer:
            producer.send("t", value=b"v20", partition=2)
        log.flush_to_table()
        seen.append(values(batch))
        log.delete_records("t", {0: 3})
        log.flush_to_table()
        seen.append(values(batch))
        log.delete_topic("t")
        log.create_topic("t", partitions=1)
        with log.producer() as producer:
            for _ in range(20):
                producer.send("t", value=b"v99")
        log.flush_to_table()
        seen.append(values(batch))

    drain(take)
    assert seen == [sent(0, 10)] * 3


def test_new_partitions_are_read_from_their_beginning(
    drain: Callable[..., StreamingQuery], log: Log
) -> None:
    """As by `format("sparklog")`; micro-batches of some partitions have no rows of others."""
    collected = Collected()
    send(log, 0, 4)
    log.flush_to_table()
    drain(collected)
    log.add_partitions("t", 3)
    with log.producer() as producer:
        producer.send("t", value=b"v4", partition=2)
        producer.send("t", value=b"v5", partition=1)
    log.flush_to_table()
    drain(collected)
    assert collected.once() == sent(0, 6)
    assert collected.sizes == [4, 2]


def test_records_that_are_lost_after_the_plan_are_reported(
    spark: SparkSession, root: Path, log: Log
) -> None:
    """A micro-batch lacks records only by `failOnDataLoss=false`."""
    send(log, 0, 10)
    log.flush_to_table()
    planner = planner_of(native._frames(str(root), "t", {}).options)
    planner.refresh()
    topic_id = planner.latest()["t"].id
    log.delete_records("t", {0: 3})

    def call(topic_id: str, **options: object) -> list[str]:
        """Calls the function for offsets 0 to 5 of partition 0."""
        seen: list[str] = []
        frames = native._frames(str(root), "t", options)
        call = native._MicroBatches(frames, lambda frame, _: seen.extend(values(frame)))
        rows = [("t", topic_id, 0, 0, 5)]
        call(SimpleNamespace(sparkSession=spark, collect=lambda: rows), 0)  # type: ignore[arg-type]
        return seen

    with pytest.raises(errors.DataLoss, match="Offsets 0 to 3 of t-0"):
        call(topic_id)
    assert call(topic_id, failOnDataLoss=False) == ["v6", "v8"]
    with pytest.raises(errors.TopicGone):
        call("another")
    assert call("another", failOnDataLoss=False) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets"),
        ({"valueFormat": "string"}, "from_json"),
        ({"Subscribe": "u"}, "name the topics with the argument"),
        ({"maxOffsetPerTrigger": "1"}, "Did you mean 'maxOffsetsPerTrigger'"),
    ],
)
def test_wrong_options_are_refused(
    spark: SparkSession, root: Path, log: Log, options: dict[str, str], message: str
) -> None:
    """At once, by name."""
    with pytest.raises(errors.Invalid, match=message):
        foreach_dataframe(spark, str(root), "t", Collected(), **options)
