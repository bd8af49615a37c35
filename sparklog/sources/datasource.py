"""What Spark asks of a Python source, answered by planner and reader.

Traps of Spark 4.2 that this room knows:

- A `streamReader` that raises is masked by another error, so its refusal is kept until Spark asks.
- An error in `latestOffset` ends the query for good, so trouble that may pass is waited out there.
- An idle query asks some eighty times a second, so the answer waits a little, longer the longer
  nothing came; with two sources in a query each waits for the other, so it is never long.
- Spark pickles a reader before and after it plans, so what follows the root is made when needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparklog import errors, limits
from sparklog.clock import Clock, SystemClock
from sparklog.sources import offsets, tasks
from sparklog.sources.offsets import Position
from sparklog.sources.options import EARLIEST, LATEST, SourceOptions, parse
from sparklog.sources.planner import Planner
from sparklog.sources.reader import Scan
from sparklog.storage.objects import open_store

_log = logging.getLogger("sparklog.sources")
_T = TypeVar("_T")

_TYPES: Mapping[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
}
"""As in Spark's Kafka source (`KafkaRecordToRowConverter`)."""


def schema(given: Mapping[str, str]) -> StructType:
    """The columns that the options ask for; here a wrong option or topic is told first.

    Raises what `options.parse` raises, `NotARoot` and `UnknownTopic`.
    """
    options = parse(given)
    _planner(options).refresh()
    return StructType([StructField(name, _TYPES[name]) for name in options.columns])


def batch_reader(given: Mapping[str, str], wanted: StructType) -> BatchReader:
    """Raises what `options.parse` raises, and `BadOption`."""
    options = parse(given)
    options.check_batch()
    return BatchReader(options, _scan(options, wanted))


def stream_reader(given: Mapping[str, str], wanted: StructType) -> DataSourceStreamReader:
    """Raises nothing: a reader that refuses says why."""
    try:
        options = parse(given)
        options.check_stream()
        return StreamReader(options, _scan(options, wanted))
    except errors.SparklogError as error:
        return RefusedReader(error)


def _planner(options: SourceOptions) -> Planner:
    return Planner(
        open_store(options.root, options.storage),
        options.topics,
        fail_on_data_loss=options.fail_on_data_loss,
        clock=SystemClock(),
    )


def _scan(options: SourceOptions, wanted: StructType) -> Scan:
    for field in wanted:
        if _TYPES.get(field.name) != field.dataType:
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items())
            found = f"{field.name} {field.dataType.simpleString()}"
            raise errors.BadOption(option="schema", value=found, reason=f"a row has {known}")
    return Scan(
        # An executor may have another working folder.
        root=open_store(options.root, options.storage).uri,
        storage=options.storage,
        schema=to_arrow_schema(wanted, timezone="UTC"),
        fail_on_data_loss=options.fail_on_data_loss,
    )


def _partitions(
    planner: Planner, options: SourceOptions, start: Position, end: Position
) -> list[InputPartition]:
    packed = tasks.pack(
        planner.slices(start, end), cores=os.cpu_count() or 1, least=options.min_partitions
    )
    return [InputPartition(tasks.encode(slices)) for slices in packed]


def _read(scan: Scan, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    return scan.batches(tasks.decode(partition.value) if partition.value else ())


# ------------------------------------------------------------------------------ batch


class BatchReader(DataSourceReader):
    """Everything between two positions, as of planning."""

    def __init__(self, options: SourceOptions, scan: Scan) -> None:
        self._options = options
        self._scan = scan

    def partitions(self) -> list[InputPartition]:
        options = self._options
        planner = _planner(options)
        planner.refresh()
        start = planner.resolve("startingOffsets", options.starting, otherwise=EARLIEST)
        end = planner.resolve("endingOffsets", options.ending, otherwise=LATEST)
        _check_order(start, end)
        return _partitions(planner, options, start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._scan, partition)


def _check_order(start: Position, end: Position) -> None:
    for topic, each in end.items():
        for number, (first, last) in enumerate(
            zip(start[topic].offsets, each.offsets, strict=True)
        ):
            if first > last:
                reason = f"{topic}-{number} would end before it starts, at {first}"
                raise errors.BadOption(option="endingOffsets", value=last, reason=reason)


# ------------------------------------------------------------------------------ stream


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream's planner: one long-lived object in one process of the driver's machine."""

    def __init__(self, options: SourceOptions, scan: Scan, clock: Clock | None = None) -> None:
        self._options = options
        self._scan = scan
        self._clock = clock or SystemClock()
        self._planner: Planner | None = None
        self._target: Position | None = None
        """Where a query that reads what is available now ends."""
        self._moved_at = self._clock.monotonic()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        start = self._options.starting
        found = self._refreshed().resolve("startingOffsets", start, otherwise=LATEST)
        return offsets.encode(found)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._refreshed().latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        position = offsets.decode(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = self._advance(position, most)
        if end == position and self._target is None:
            self._clock.sleep(self._wait_seconds())
            end = self._advance(position, most)
        if end != position:
            self._moved_at = self._clock.monotonic()
        return offsets.encode(end)

    def _advance(self, position: Position, most: int | None) -> Position:
        """As far as the limit lets; the same position while the store does not answer."""
        planner = self._planner_of_query()
        try:
            if self._target is None:
                planner.refresh()
            start = planner.reconcile(position)
        except errors.Retriable as error:
            _log.warning("%s; trying again", error)
            return position
        end = planner.latest()
        if self._target is not None:
            end = _upto(start, end, self._target)
        return end if most is None else offsets.share(start, end, most)

    def _wait_seconds(self) -> float:
        is_local = self._planner_of_query().store.is_local
        longest = (
            limits.STREAM_WAIT_MAX_SECONDS if is_local else limits.STREAM_WAIT_MAX_REMOTE_SECONDS
        )
        idle_seconds = self._clock.monotonic() - self._moved_at
        return min(max(idle_seconds / 20, limits.STREAM_WAIT_MIN_SECONDS), longest)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._planner is None else offsets.encode(self._planner.latest())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        first, last = offsets.decode(start), offsets.decode(end)
        planner = self._refreshed()
        return self._patiently(lambda: _partitions(planner, self._options, first, last))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._scan, partition)

    def _planner_of_query(self) -> Planner:
        if self._planner is None:
            self._planner = _planner(self._options)
        return self._planner

    def _refreshed(self) -> Planner:
        planner = self._planner_of_query()
        self._patiently(planner.refresh)
        return planner

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        """What `ask` says, once the store answers; raises `Retriable` after a long time only."""
        deadline = self._clock.monotonic() + limits.SPARK_PATIENCE_SECONDS
        while True:
            try:
                return ask()
            except errors.Retriable:
                if self._clock.monotonic() > deadline:
                    raise
                self._clock.sleep(limits.BACKOFF_MAX_SECONDS)


def _upto(start: Position, end: Position, target: Position) -> Position:
    """`end`, but nowhere beyond `target`, nor before `start`; what the target lacks stays put."""
    found = {}
    for topic, each in end.items():
        goal = target.get(topic)
        goals = goal.offsets if goal is not None and goal.id == each.id else ()
        found[topic] = offsets.TopicOffsets(
            each.id,
            tuple(
                max(first, min(last, goals[number] if number < len(goals) else first))
                for number, (first, last) in enumerate(
                    zip(start[topic].offsets, each.offsets, strict=True)
                )
            ),
        )
    return found


class RefusedReader(DataSourceStreamReader):
    """Says what was wrong with the options, when Spark asks for the first time."""

    def __init__(self, refusal: errors.SparklogError) -> None:
        self._refusal = refusal

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._refusal

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        raise self._refusal

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        del partition
        raise self._refusal
