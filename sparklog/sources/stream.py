"""Stream reader.

It allows for the way Spark 4.2 calls a Python stream reader:

- An error in `latestOffset` ends the query for good, so the reader retries retriable errors itself.
- An idle query calls `latestOffset` about eighty times a second, and each call costs more than a
  poll of the log. So a call waits for new records, backing off while none arrive, but only briefly,
  because the sources of one query wait for each other (ADR 9).
- Spark pickles a reader before and after planning, so the planner is created on first use.
- Spark calls `commit` when it plans the next batch, so never for the last one. But the batch that
  `latestOffset` starts from is finished: it is in Spark's commit log.
- Spark logs the end of a batch before running it, but not the start of the first batch. If that
  batch is repeated, Spark asks for the initial offset again, by which time the end of the log or a
  group's offsets may have moved. So the end of the first batch also contains its start (ADR 19).
- Spark asks for the initial offset before it is known whether the query is new, and does not store
  the offset. So it is a marker, and the start is resolved only when a new query needs it: a
  repeated first batch does not depend on an option that no longer resolves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from sparklog import errors
from sparklog.clock import Clock, SystemClock
from sparklog.sources import offsets, tasks
from sparklog.sources.batch import planner_of
from sparklog.sources.groups import GroupReporter, sender
from sparklog.sources.offsets import Position
from sparklog.sources.options import SourceOptions
from sparklog.sources.planner import Planner, patiently
from sparklog.sources.ranges import RangeScan
from sparklog.sources.reader import task_credentials_for
from sparklog.sources.scan import Scan
from sparklog.sources.starting_offsets import LATEST
from sparklog.spark_compat import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from sparklog.spark_errors import rows_sentence_first, sentence_first

STREAM_WAIT_MIN_SECONDS = 0.002
STREAM_WAIT_MAX_SECONDS = 0.2
STREAM_LOOK_SECONDS = 0.1
POLL_BLOCKS_SECONDS = 1.0
GROUP_REPORT_LAST_SECONDS = 5.0  # how long the end of a query waits for the last report

_log = logging.getLogger("sparklog.sources")
_T = TypeVar("_T")

_UNRESOLVED: Final[dict[str, Any]] = {"startingOffsets": "not resolved"}
"""Marker for the initial offset; never a position, in which a topic's value is an object."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Planner of a stream: one long-lived object in one process on the driver's machine."""

    def __init__(
        self, options: SourceOptions, scan: Scan | RangeScan, clock: Clock | None = None
    ) -> None:
        self._options = options
        self._scan = scan
        self._clock = clock or SystemClock()
        self._planner: Planner | None = None
        self._poll_interval_seconds = 0.0
        self._looked_at = -float("inf")
        self._moved_at = self._clock.monotonic()
        self._triggered_at = -float("inf")
        """Time of the last micro-batch that `minOffsetsPerTrigger` or `maxTriggerDelay` started."""
        self._target: Position | None = None
        """End of the query, if it runs with `availableNow`."""
        self._end: Position = {}
        """End of the last planned micro-batch."""
        self._start: Position | None = None
        """Start of a new query, once resolved."""
        self._reporter: GroupReporter | None = None
        self._reporter_patience_seconds = GROUP_REPORT_LAST_SECONDS
        """Total time for which the end of the query may still wait for the reporter."""

    # -------------------------------------------------------------------------- position

    @sentence_first
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Returns a marker for the start of the first micro-batch, without resolving it.

        Spark also calls this when it repeats that batch, whose end contains the start.
        """
        return dict(_UNRESOLVED)

    def _resolved(self) -> Position:
        """Returns the start of a new query, which stays fixed even if a group's offsets advance.

        Raises what `Planner.resolve` raises.
        """
        if self._start is None:
            options, planner = self._options, self._refreshed()
            self._start = self._patiently(
                lambda: planner.resolve(
                    "startingOffsets",
                    options.starting,
                    otherwise=LATEST,
                    late_is_latest=options.late_start_is_latest,
                )
            )
        return self._start

    def _position(self, start: dict[str, Any]) -> Position:
        return self._resolved() if start == _UNRESOLVED else offsets.decode(start)

    @sentence_first
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit that Spark passes to `latestOffset` by default.

        If the options set several, it is one of them: a Python source has no composite limit.
        """
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    @sentence_first
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._refreshed().latest()

    @sentence_first
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        position = self._position(start)
        end = self._latest(position, limit)
        self._report(position, is_last=self._target is not None and end == position)
        if start == _UNRESOLVED:
            return offsets.encode_first(position, end)
        # Spark compares strings: another encoding of the same position would start a batch.
        return start if end == position else offsets.encode(end)

    def _latest(self, position: Position, limit: ReadLimit) -> Position:
        end = self._advance(position, limit)
        if self._target is None and not self._poll_interval_seconds:
            left_seconds = self._idle_wait_seconds()
            while end == position and left_seconds > 0:
                self._clock.sleep(min(left_seconds, STREAM_LOOK_SECONDS))
                left_seconds -= STREAM_LOOK_SECONDS
                end = self._advance(position, limit)
        self._end = end
        if end != position:
            self._moved_at = self._clock.monotonic()
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Returns the end of the log for the query's progress: see `sources.query_lag`."""
        if self._planner is None:
            return None
        return offsets.encode_latest(self._planner.latest(), self._planner.unread_since(self._end))

    def _advance(self, position: Position, limit: ReadLimit) -> Position:
        """Returns the end within the limits, or `position` while the store does not respond."""
        planner = self._planner_of_query()
        if self._target is None and not self._is_time_to_look(planner, position):
            return position
        try:
            start = self._patiently(lambda: self._look(planner, position))
        except errors.Retriable as error:
            if self._target is not None:  # the query must not end as if all had been read
                raise
            _log.warning("%s; trying again", error)
            return position
        end = planner.latest()
        if self._target is not None:
            end = offsets.upto(start, end, self._target)
        elif not isinstance(limit, ReadAllAvailable) and not self._is_due(start, end):
            return start
        return end if isinstance(limit, ReadAllAvailable) else self._limited(planner, start, end)

    def _limited(self, planner: Planner, start: Position, end: Position) -> Position:
        """Returns `end`, or an earlier position if the options' limits require it."""
        options = self._options
        if options.max_offsets_per_trigger is not None:
            end = offsets.share(start, end, options.max_offsets_per_trigger)
        most_bytes = options.max_bytes_per_trigger
        if most_bytes is None:
            return end
        return self._patiently(lambda: planner.within_bytes(start, end, most_bytes))

    def _is_due(self, start: Position, end: Position) -> bool:
        """Returns whether enough records are waiting, or `maxTriggerDelay` has passed.

        Does not apply to `availableNow`, which reads everything.
        """
        least = self._options.min_offsets_per_trigger
        if least is None:
            return True
        now = self._clock.monotonic()
        waited_seconds = now - self._triggered_at
        if (
            waited_seconds < self._options.max_trigger_delay_seconds
            and offsets.count(start, end) < least
        ):
            return False
        self._triggered_at = now
        return True

    def _idle_wait_seconds(self) -> float:
        idle_seconds = self._clock.monotonic() - self._moved_at
        wait_seconds = max(idle_seconds / 20, STREAM_WAIT_MIN_SECONDS)
        return min(wait_seconds, STREAM_WAIT_MAX_SECONDS)

    # -------------------------------------------------------------------------- progress

    @sentence_first
    def commit(self, end: dict[str, Any]) -> None:
        self._report(offsets.decode(end))

    def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.close(GROUP_REPORT_LAST_SECONDS)

    def _report(self, done: Position, *, is_last: bool = False) -> None:
        """Reports the position to the group of `commitToGroup`, if any. Never raises."""
        group = self._options.commit_to_group
        if group is None:
            return
        if self._reporter is None:
            self._reporter = GroupReporter(group, sender(self._options.location, group))
        self._reporter.report(done)
        if is_last:  # Spark may end this process as soon as this call returns
            began = self._clock.monotonic()
            self._reporter.flush(self._reporter_patience_seconds)
            waited_seconds = self._clock.monotonic() - began
            left_seconds = self._reporter_patience_seconds - waited_seconds
            self._reporter_patience_seconds = max(left_seconds, 0.0)

    # -------------------------------------------------------------------------- a micro-batch

    @sentence_first
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, last = offsets.start_within(end), offsets.decode(end)
        first = self._position(start) if begin is None or start == end else begin
        # After a restart, a query plans before any refresh.
        planner = self._refreshed() if self._planner is None else self._planner
        slices = self._patiently(lambda: planner.slices(first, last))
        if self._options.rows_are_ranges:
            return [InputPartition(tasks.encode(tasks.ranges(slices)))]
        packed = tasks.pack_in_order(
            slices,
            parallelism=self._options.parallelism,
            row_groups=planner.row_groups,
            least=self._options.min_partitions,
            most_records=self._options.max_records_per_partition,
        )
        credentials = self._patiently(lambda: task_credentials_for(self._options.location, slices))
        return [InputPartition(tasks.encode(each, credentials)) for each in packed]

    @rows_sentence_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._scan.batches(tasks.decode(partition.value))

    # -------------------------------------------------------------------------- polling

    def _planner_of_query(self) -> Planner:
        if self._planner is None:
            self._planner = planner_of(self._options)
            given_seconds = self._options.poll_interval_seconds
            self._poll_interval_seconds = (
                self._planner.poll_interval_seconds if given_seconds is None else given_seconds
            )
        return self._planner

    def _is_time_to_look(self, planner: Planner, position: Position) -> bool:
        """Returns whether a poll is due, or known records are unread. Waits briefly."""
        left_seconds = self._left_seconds()
        if left_seconds > 0 and planner.latest() == position:
            self._clock.sleep(min(left_seconds, POLL_BLOCKS_SECONDS))
            return self._left_seconds() <= 0
        return True

    def _left_seconds(self) -> float:
        """Returns the time until the next poll is due."""
        return self._looked_at + self._poll_interval_seconds - self._clock.monotonic()

    def _look(self, planner: Planner, position: Position) -> Position:
        """Returns `position` reconciled with the log, after a refresh if a poll is due."""
        if self._target is None and self._left_seconds() <= 0:
            planner.refresh()
            self._looked_at = self._clock.monotonic()
        return planner.reconcile(position)

    def _refreshed(self) -> Planner:
        planner = self._planner_of_query()
        self._patiently(planner.refresh)
        return planner

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        return patiently(ask, self._clock)


class EarlierStreamReader(StreamReader):
    """Stream reader for Spark before 4.2, which calls `latestOffset` without the query's position.

    So a loss is detected when a micro-batch is planned, and the start resolved when Spark asks.
    """

    _last: dict[str, Any] | None = None

    @sentence_first
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return offsets.encode(self._resolved())

    @sentence_first
    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        if self._last is None:
            self._last = offsets.encode(self._refreshed().latest())
        else:
            # From the last returned end: only `commit` receives the query's own position.
            self._last = offsets.encode(
                self._latest(offsets.decode(self._last), ReadAllAvailable())
            )
        return self._last

    @sentence_first
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        planner = self._refreshed() if self._planner is None else self._planner
        self._patiently(lambda: planner.reconcile(offsets.decode(start)))
        return super().partitions(start, end)


class RefusedReader(DataSourceStreamReader):
    """Raises the error for invalid options when Spark first calls it.

    Spark would hide an error raised by `streamReader` itself behind another one.
    """

    def __init__(self, refusal: errors.SparklogError) -> None:
        self._refusal = refusal

    @sentence_first
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._refusal

    @sentence_first
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        raise self._refusal

    @sentence_first
    def latestOffset(self, *_: object) -> dict[str, Any]:  # noqa: N802
        raise self._refusal

    @rows_sentence_first
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        del partition
        raise self._refusal
