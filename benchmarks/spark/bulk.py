"""Ten million rows: written, scanned, counted, and drained by a stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.compare import faster
from benchmarks.progress import doing
from benchmarks.spark.setup import SparkSetup, needs_spark, start
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.bench.writing import values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Work = Callable[[], object]

_ROWS: Final = 10_000_000
_WARM_SHARE: Final = 10
_CHUNK_ROWS: Final = 500_000
_RUNS: Final = 3
_DRAINS: Final = 2
_SEEN_SECONDS: Final = 60.0
_TOPIC: Final = "bulk"
_WARM_TOPIC: Final = "warm"


@needs_spark
def bulk(options: BenchOptions) -> Iterator[Measurement]:
    """Bulk work on rows of 100 bytes that barely compress.

    The sides take turns, so that a change in the machine's speed affects all of them; the last run
    of each counts.
    """
    rows = min(_ROWS, options.rows)
    with start(options) as here:
        yield from here.report_missing()
        yield _write(here, rows)
        yield from _scan(here, rows)
        yield from _count(here, rows)
        yield from _drain(here, rows)


def _in_turns(works: Mapping[str, Work], runs: int) -> Mapping[str, float]:
    """Returns the seconds of each side's last run, by name."""
    seconds = {}
    for run in range(runs):
        for name, work in works.items():
            with doing(f"{name}, run {run + 1} of {runs}"):
                seconds[name] = _timed(work)
    return seconds


def _timed(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _millions(rows: int) -> str:
    return f"{rows / 1e6:g} M"


def _check(found: int, rows: int) -> None:
    """Raises RuntimeError if the number of rows read is wrong."""
    if found != rows:
        raise RuntimeError(f"{found:,} rows were read, but {rows:,} were written")


# ------------------------------------------------------------------------------ writing


def _write(here: SparkSetup, rows: int) -> Measurement:
    """Writes a Parquet file to a topic with each side's sink, after a warm-up with a tenth of it.

    Ours is done when a reader has counted the rows, Kafka's when the write returns.
    """
    _written(here, _WARM_TOPIC, max(rows // _WARM_SHARE, 1))
    ours, kafka = _written(here, _TOPIC, rows)
    return faster(
        f"batch write of {_millions(rows)} rows, ours until they are counted",
        rows,
        ours,
        kafka,
        least=2,
        than="Kafka",
    )


def _written(here: SparkSetup, topic: str, rows: int) -> tuple[float, float | None]:
    """Returns our seconds and Kafka's. Ours runs first, so Kafka benefits from the warm-up."""
    here.create_topic(topic)
    frame = here.spark.read.parquet(write_values(here.folder / f"{topic}.parquet", rows))
    with doing(f"sparklog writes {_millions(rows)} rows"):
        ours = _timed(lambda: _write_ours(here, frame, topic, rows))
    with doing("its broker publishes and merges them"):
        here.ours.wait_until_quiet(topic)
    kafka = here.kafka
    if kafka is None:
        return ours, None
    with doing(f"Kafka writes {_millions(rows)} rows"):
        theirs = _timed(lambda: kafka.write(frame, topic))
    os.sync()
    return ours, theirs


def _write_ours(here: SparkSetup, frame: DataFrame, topic: str, rows: int) -> None:
    here.ours.write(frame, topic)
    deadline = time.monotonic() + _SEEN_SECONDS
    while (seen := here.ours.read(topic, columns="offset").count()) < rows:
        if time.monotonic() > deadline:
            break
    _check(seen, rows)


def write_values(path: Path, rows: int) -> str:
    """Writes a Parquet file of this many values that costs next to nothing to read."""
    schema = pa.schema([("value", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, rows, _CHUNK_ROWS):
            chunk = values(min(_CHUNK_ROWS, rows - first), seed=first)
            writer.write_table(pa.table({"value": chunk}))
    return str(path)


# ------------------------------------------------------------------------------ reading


def _sides(here: SparkSetup, **only: str) -> Mapping[str, Callable[[], DataFrame]]:
    """Returns all available ways to read the topic, by name; `only`: options of our source."""
    sides: dict[str, Callable[[], DataFrame]] = {}
    if here.kafka is not None:
        kafka = here.kafka
        sides["Kafka"] = lambda: kafka.read(_TOPIC)
    sides["sparklog"] = lambda: here.ours.read(_TOPIC, **only)
    if here.has_delta:
        sides["sources.dataframe"] = lambda: here.ours.dataframe(_TOPIC)
        sides["plain Delta"] = lambda: here.ours.delta(_TOPIC)
    return sides


def _scan(here: SparkSetup, rows: int) -> Iterator[Measurement]:
    """Scans all columns into Spark's sink that drops everything."""

    def work(frame: Callable[[], DataFrame]) -> Work:
        return lambda: frame().write.format("noop").mode("overwrite").save()

    seconds = _in_turns({name: work(each) for name, each in _sides(here).items()}, _RUNS)
    kafka = seconds.get("Kafka")
    yield faster(
        f'batch scan of {_millions(rows)} rows through format("sparklog"), all columns, noop,'
        " third run",
        rows,
        seconds["sparklog"],
        kafka,
        least=2.5,
        than="Kafka",
    )
    if here.has_delta:
        name = f"batch scan of {_millions(rows)} rows through sources.dataframe"
        ours = seconds["sources.dataframe"]
        yield faster(name, rows, ours, kafka, least=4, than="Kafka")
        yield faster(name, rows, ours, seconds["plain Delta"], least=0.8, than="plain Delta")


def _count(here: SparkSetup, rows: int) -> Iterator[Measurement]:
    def work(frame: Callable[[], DataFrame]) -> Work:
        return lambda: _check(frame().count(), rows)

    sides = _sides(here, columns="offset")
    works = {name: work(each) for name, each in sides.items() if name != "plain Delta"}
    seconds = _in_turns(works, _RUNS)
    kafka = seconds.get("Kafka")
    yield faster(
        f'count() of {_millions(rows)} rows through format("sparklog"), columns=offset, third run',
        rows,
        seconds["sparklog"],
        kafka,
        least=7,
        than="Kafka",
    )
    if here.has_delta:
        name, ours = "count() through sources.dataframe", seconds["sources.dataframe"]
        yield faster(name, rows, ours, kafka, least=10, than="Kafka")


def _drain(here: SparkSetup, rows: int) -> Iterator[Measurement]:
    """Measures a query over the whole topic, from its start to its end."""

    def work(frame: Callable[[], DataFrame]) -> Work:
        return lambda: _drained(here, frame(), rows)

    works = {}
    if here.kafka is not None:
        kafka = here.kafka
        works["Kafka"] = work(lambda: kafka.stream(_TOPIC, "earliest"))
    works["sparklog"] = work(lambda: here.ours.stream(_TOPIC, "earliest"))
    if here.has_delta:
        works["sources.foreach_dataframe"] = lambda: _drained_by_frames(here, rows)
    seconds = _in_turns(works, _DRAINS)
    theirs = seconds.get("Kafka")
    name = f"AvailableNow drain of {_millions(rows)} rows into noop"
    yield faster(f"{name}, second run", rows, seconds["sparklog"], theirs, least=2.5, than="Kafka")
    if here.has_delta:
        ours = seconds["sources.foreach_dataframe"]
        name = f"{name} through sources.foreach_dataframe, second run"
        yield faster(name, rows, ours, theirs, least=2.5, than="Kafka")


def _drained(here: SparkSetup, frame: DataFrame, rows: int) -> None:
    query = _run(here, frame.writeStream.format("noop"))
    _check(sum(each.numInputRows for each in query.recentProgress), rows)


def _drained_by_frames(here: SparkSetup, rows: int) -> None:
    from sparklog.sources import lag

    def drop(frame: DataFrame, _batch_id: int) -> None:
        frame.write.format("noop").mode("overwrite").save()

    found = lag(_run(here, here.ours.foreach_dataframe(_TOPIC, drop)))
    _check(sum(each.committed or 0 for each in found.partitions) if found else 0, rows)


def _run(here: SparkSetup, writer: DataStreamWriter) -> StreamingQuery:
    """Runs a query over the whole topic to its end, and returns it."""
    writer = writer.option("checkpointLocation", here.checkpoint())
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return query
