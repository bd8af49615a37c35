"""Resolves the starts and ends of reads, detects losses, and plans the slices to read.

Records that a query has not read and can no longer read are a *loss*. Depending on
`failOnDataLoss`, a loss ends the query with an error that names the records, or is logged and the
query continues with the remaining ones. Before a loss is reported, the view is refreshed without
caches, because a reader can briefly see less than exists.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.formats.topic_names import unknown_topic
from sparklog.formats.values.columns import Plan
from sparklog.sources import offsets, tasks
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.selection import Selection
from sparklog.sources.starting_offsets import (
    EARLIEST,
    LATEST,
    AtTime,
    FromEnd,
    OfGroup,
    Pinned,
    Point,
    Start,
)
from sparklog.sources.views import LogView, TopicView
from sparklog.storage.snapshot import RowGroup, Slice

_log = logging.getLogger("sparklog.sources")
_T = TypeVar("_T")

_RECORD_BYTES: Final = 64
"""Stored bytes of a small record, from which `within_bytes` estimates its first step."""


class Planner:
    """Plans reads of the selected topics. Not thread-safe."""

    def __init__(self, view: LogView, selection: Selection, *, fail_on_data_loss: bool) -> None:
        self._view = view
        self._selection = selection
        self._fail_on_data_loss = fail_on_data_loss
        self._topics: Mapping[str, TopicView] = {}
        self._pending: frozenset[str] = frozenset()
        """Topics that a plan still needs although they are no longer selected."""
        self._logged_losses: set[str] = set()
        self.poll_interval_seconds = view.poll_interval_seconds

    # -------------------------------------------------------------------------- positions

    def refresh(self, *, from_scratch: bool = False) -> None:
        """Refreshes the view; `from_scratch` bypasses all caches.

        A topic that does not exist is left out. Raises the other errors that `LogView.refresh`
        raises.
        """
        missing: set[str] = set()

        def choose(existing: Iterable[str]) -> list[str]:
            there = set(existing) - missing
            wanted = {*self._selection.names(there), *self._pending}
            return sorted(wanted & there)

        while True:
            try:
                self._topics = self._view.refresh(choose, from_scratch=from_scratch)
                return
            except errors.UnknownTopic as error:
                missing.add(error.topic)

    def check_topics(self) -> None:
        """Raises `UnknownTopic` if a named topic does not exist, unless losses are allowed."""
        self._check_named(self._topics)

    def check_names(self) -> None:
        """Runs the check of `check_topics` before the first refresh, without opening tables."""
        self._check_named(self._view.names())

    def _check_named(self, existing: Container[str]) -> None:
        for name in self._selection.topics:
            if name not in existing:
                self._lose(unknown_topic(name, self._view.names()))

    def typed_columns(self) -> Plan:
        """Returns the typed columns of the topic. Raises `BadOption` if there are none."""
        (name,) = self._selection.topics
        self.check_topics()
        found = self._topics[name].typed if name in self._topics else None
        if found is None:
            reason = (
                f"topic {name} has no typed columns; to add some: sparklog topics columns {name}"
                " --accept"
            )
            raise errors.BadOption(option="valueFormat", value="typed", reason=reason)
        return found

    def earliest(self) -> Position:
        """Returns the log start of every partition."""
        return self._position(lambda _, topic, number: topic.starts[number])

    def published(self) -> Position:
        """Returns the end of every partition in its table."""
        return self._position(lambda _, topic, number: topic.published[number])

    def versions(self) -> Mapping[str, int]:
        """Returns the version of every table whose version is known."""
        return {
            name: topic.version for name, topic in self._topics.items() if topic.version is not None
        }

    def latest(self) -> Position:
        """Returns the high watermark of every partition."""
        return self._position(lambda _, topic, number: topic.ends[number])

    def resolve(
        self, option: str, given: Start | None, *, otherwise: int, late_is_latest: bool
    ) -> Position:
        """Returns the position that `option` names, or `otherwise` if it is not given.

        Args:
            late_is_latest: whether a time after the newest record means the end of the log.

        Raises `BadOption` for such a time if not `late_is_latest`, for a group that does not exist,
        and if a bound by partition does not name exactly the partitions that are read;
        `TopicChanged` if it names other topic ids; `UnknownTopic`, `OffsetOutOfRange` and
        `DataLoss`, unless losses are allowed.
        """
        self.check_topics()
        if isinstance(given, OfGroup):
            return self._of_group(given)
        bound = otherwise if given is None else given
        if isinstance(bound, Pinned):
            self._check_ids(bound.ids)
            bound = bound.points
        if isinstance(bound, Mapping):
            self._check_names(option, bound)

        def point(name: str, topic: TopicView, number: int) -> int:
            asked = bound[name][number] if isinstance(bound, Mapping) else bound
            if isinstance(asked, AtTime):
                found = self._view.first_since(name, number, asked.timestamp_us)
                if found is None and not late_is_latest:
                    raise _too_late(name, number, asked, of_all=bound is asked)
                # Records written since the last refresh are not read yet.
                return topic.ends[number] if found is None else min(found, topic.ends[number])
            if isinstance(asked, FromEnd):
                return max(topic.ends[number] - asked.count, topic.starts[number])
            return self._offset(name, topic, number, asked)

        return self._position(point)

    def _of_group(self, given: OfGroup) -> Position:
        committed = self._view.committed(given.group)
        if committed is None:
            reason = (
                "the consumer group does not exist, or its offsets have expired; correct the"
                " name, or use startingOffsets = earliest or latest"
            )
            raise errors.BadOption(option="group.id", value=given.group, reason=reason)
        if not all(
            self._holds(name, each.topic_id, number, each.offset)
            for (name, number), each in committed.items()
            if self._selection.selects(name)
        ):
            # The group may have read records that arrived after the last refresh.
            self.refresh(from_scratch=True)
            self.check_topics()
        lacking = []

        def point(name: str, topic: TopicView, number: int) -> int:
            found = committed.get((name, number))
            if found is not None and found.topic_id == topic.id:
                return self._first_left(name, number, found.offset)
            lacking.append(f"{name}-{number}")
            return topic.starts[number] if given.otherwise == EARLIEST else topic.ends[number]

        position = self._position(point)
        if lacking:
            reason = f"group {given.group!r} has no committed offset for {', '.join(lacking)}"
            if given.otherwise is None:
                raise errors.BadOption(option="groupOffsetReset", value="error", reason=reason)
            where = "start" if given.otherwise == EARLIEST else "end"
            _log.warning("%s: starting at the %s of the log (groupOffsetReset)", reason, where)
        return position

    def _check_ids(self, ids: Mapping[str, str]) -> None:
        for name, topic in self._topics.items():
            if topic.id != ids.get(name, topic.id):
                raise errors.TopicChanged(topic=name, expected=ids[name], found=topic.id)

    def _check_names(self, option: str, bound: Mapping[str, Mapping[int, Point]]) -> None:
        read = {name: set(self._partitions(name)) for name in self._topics}
        if {name: set(places) for name, places in bound.items()} != read:
            wanted = {name: sorted(numbers) for name, numbers in read.items()}
            reason = f"name exactly the partitions that are read: {wanted}"
            shown = {name: sorted(places) for name, places in bound.items()}
            raise errors.BadOption(option=option, value=shown, reason=reason)

    def _offset(self, name: str, topic: TopicView, number: int, asked: int) -> int:
        start, end = topic.starts[number], topic.ends[number]
        offset = {EARLIEST: start, LATEST: end}.get(asked, asked)
        if not start <= offset <= end:
            self._lose(
                errors.OffsetOutOfRange(
                    topic=name, partition=number, offset=offset, start=start, end=end
                )
            )
        return min(max(offset, start), end)

    def _position(self, offset: Callable[[str, TopicView, int], int]) -> Position:
        return {
            name: TopicOffsets(
                topic.id,
                {number: offset(name, topic, number) for number in self._partitions(name)},
            )
            for name, topic in self._topics.items()
            if self._selection.selects(name)
        }

    def _partitions(self, name: str) -> Iterable[int]:
        return self._selection.partitions(name, len(self._topics[name].ends))

    # -------------------------------------------------------------------------- losses

    def reconcile(self, position: Position) -> Position:
        """Returns `position` adjusted to the topics and partitions that exist now.

        New ones start at offset 0, or at the log start of a mirror whose source had no earlier
        records. Raises `UnknownTopic`, `TopicGone` and `DataLoss`, unless losses are allowed.
        """
        if not all(
            self._holds(name, each.id, number, offset)
            for name, each in position.items()
            if self._selection.selects(name)
            for number, offset in each.offsets.items()
        ):
            self.refresh(from_scratch=True)
        for name, was in position.items():
            self._check_is_read(name, was)
        self._check_named({*self._topics, *position})

        def left(name: str, topic: TopicView, number: int) -> int:
            known = position.get(name)
            if known is None or known.id != topic.id or number not in known.offsets:
                return self._first_of_new(name, number)
            return self._first_left(name, number, known.offsets[number])

        return self._position(left)

    def _check_is_read(self, name: str, was: TopicOffsets) -> None:
        """Raises `TopicGone`, unless losses are allowed, if a topic or partition is gone."""
        topic = self._topics.get(name)
        if not self._selection.selects(name):
            self._lose(_gone(name, was, "is no longer selected"))
        elif topic is None:
            self._lose(_gone(name, was, "was deleted"))
        elif topic.id != was.id:
            self._lose(_gone(name, was, "was deleted and created again"))
        else:
            read = set(self._partitions(name))
            dropped = {number: at for number, at in was.offsets.items() if number not in read}
            if dropped:
                reason = f"is no longer read in partitions {sorted(dropped)}"
                self._lose(_gone(name, TopicOffsets(was.id, dropped), reason))

    def _holds(self, name: str, topic_id: str, number: int, offset: int) -> bool:
        """Returns whether the offset exists in the log as of the last refresh."""
        topic = self._topics.get(name)
        return (
            topic is not None
            and topic.id == topic_id
            and number < len(topic.ends)
            and topic.starts[number] <= offset <= topic.ends[number]
        )

    def _first_left(self, name: str, number: int, offset: int) -> int:
        topic = self._topics[name]
        start, end = topic.starts[number], topic.ends[number]
        if offset < start:
            self._lose_range(name, number, offset, start, "the log now starts later")
        elif offset > end:
            self._lose_range(name, number, end, offset, "the log ends before these records")
        return min(max(offset, start), end)

    def _first_of_new(self, name: str, number: int) -> int:
        """Returns the offset at which a query starts reading a partition that is new to it."""
        topic = self._topics[name]
        start = topic.starts[number]
        if start <= topic.absent_below[number]:
            return start
        return self._first_left(name, number, 0)

    def _lose_range(self, name: str, number: int, first: int, end: int, reason: str) -> None:
        hint = f"{reason}; set failOnDataLoss=false to continue with the remaining records"
        self._lose(errors.DataLoss(topic=name, partition=number, start=first, end=end, reason=hint))

    def _lose(self, loss: errors.SparklogError) -> None:
        if self._fail_on_data_loss:
            raise loss
        if str(loss) not in self._logged_losses:
            self._logged_losses.add(str(loss))
            _log.warning("%s; the query continues, because failOnDataLoss is false", loss)

    # -------------------------------------------------------------------------- slices

    def within_bytes(self, start: Position, end: Position, most_bytes: int) -> Position:
        """Returns a position between `start` and `end`, about `most_bytes` after `start`.

        Bytes are as stored, and shared among partitions as in `offsets.share`: in proportion to
        their backlogs, with at least one offset for each that has any. Raises what `slices` raises.
        """
        count = most_bytes // _RECORD_BYTES + 1
        while True:  # plans roughly the part to return, not the whole backlog
            upto = offsets.share(start, end, count)
            sizes = [(each, tasks.stored_bytes(each)) for each in self.slices(start, upto)]
            total = sum(size for _, size in sizes)
            if total > most_bytes:
                return _cut(start, upto, sizes, most_bytes / total)
            if upto == end:
                return end
            count *= 4

    def slices(self, start: Position, end: Position) -> list[Slice]:
        """Returns the slices between the positions, grouped by partition.

        Raises what `range` raises.
        """
        planned = frozenset(name for name in end if not self._selection.selects(name))
        if not planned <= self._topics.keys():
            self._pending = planned
            self.refresh()
        found = []
        for name, upto in end.items():
            known = start.get(name)
            firsts = known.offsets if known is not None and known.id == upto.id else {}
            for number, last in upto.offsets.items():
                first = firsts.get(number)
                if first is None or first < last:
                    found += self.range(name, upto.id, number, first, last)
        return found

    def left(self, ranges: Iterable[tuple[str, str, int, int, int]]) -> list[Slice]:
        """Returns slices of the offsets that remain in the given ranges, as of one refresh.

        Args:
            ranges: name and id of the topic, partition, first offset and end.

        Raises what `range` raises.
        """
        wanted = list(ranges)
        while True:
            found = [piece for each in wanted for piece in self.range(*each)]
            # A refresh for one range may have moved the log start of those before it.
            if all(
                self._holds(each.topic, each.topic_id, each.partition, each.first) for each in found
            ):
                return found

    def unread_since(self, position: Position) -> Mapping[str, Mapping[int, int]]:
        """Returns the estimated times of the first records from `position` on, in ms since 1970.

        By topic and partition, for those with unread records of known time, as of the last refresh.
        Reads nothing. A partition whose records are no longer in the view is left out: a progress
        report must not end a query.
        """
        found: dict[str, dict[int, int]] = {name: {} for name in position if name in self._topics}
        for name, times in found.items():
            for number, offset in position[name].offsets.items():
                is_there = self._holds(name, position[name].id, number, offset)
                if is_there and offset < self._topics[name].ends[number]:
                    try:
                        pieces = self._view.slices(name, number, offset, offset + 1)
                    except errors.OffsetOutOfRange:  # a failed refresh has advanced the view
                        continue
                    time_us = _first_timestamp_us(pieces[0]) if pieces else None
                    if time_us is not None:
                        times[number] = time_us // 1_000
        return found

    def range(
        self, name: str, topic_id: str, partition: int, first: int | None, end: int
    ) -> list[Slice]:
        """Returns slices of the remaining offsets; `first` None: from a new partition's first.

        Raises `TopicGone` and `DataLoss`, unless losses are allowed.
        """
        if not all(
            self._holds(name, topic_id, partition, offset)
            for offset in (end, first)
            if offset is not None
        ):
            self.refresh(from_scratch=True)
        topic = self._topics.get(name)
        if topic is None or topic.id != topic_id:
            was = TopicOffsets(topic_id, {partition: first or 0})
            reason = "was deleted" if topic is None else "was deleted and created again"
            self._lose(_gone(name, was, reason))
            return []
        if first is None:
            low = self._first_of_new(name, partition)
        else:
            low = self._first_left(name, partition, first)
        high = self._first_left(name, partition, end)
        return self._view.slices(name, partition, low, high) if low < high else []

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        """Returns the row groups of each slice's file; empty if unknown.

        Raises the store's `Retriable` errors.
        """
        return self._view.row_groups(slices)


def patiently(ask: Callable[[], _T], clock: Clock) -> _T:
    """Returns the result of `ask`, retrying `Retriable` errors for `SPARK_PATIENCE_SECONDS`."""
    deadline = clock.monotonic() + limits.SPARK_PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except errors.Retriable:
            if clock.monotonic() > deadline:
                raise
            clock.sleep(limits.BACKOFF_MAX_SECONDS)


def _cut(
    start: Position, end: Position, sizes: Iterable[tuple[Slice, float]], part: float
) -> Position:
    """Returns the position that includes the fraction `part` of each partition's bytes.

    Args:
        sizes: the slices from `start` to `end`, grouped by partition, and their bytes.
    """
    found = {name: dict(each.offsets) for name, each in end.items()}
    by_partition = itertools.groupby(sizes, lambda each: (each[0].topic, each[0].partition))
    for (name, number), group in by_partition:
        pieces = list(group)
        left_bytes = part * sum(size for _, size in pieces)
        for piece, size in pieces:
            if size > left_bytes:
                taken = int((piece.end - piece.first) * left_bytes / size)
                least = start[name].offsets[number] + 1
                found[name][number] = max(piece.first + taken, least)
                break
            left_bytes -= size
    return {name: TopicOffsets(each.id, found[name]) for name, each in end.items()}


def _first_timestamp_us(piece: Slice) -> int | None:
    """Estimates the time of the slice's first record from the bounds of its entry or file.

    Assumes that times rise linearly with the offsets of a file.
    """
    if piece.entry is not None:
        return piece.entry.entry.min_timestamp_us
    if len(piece.files) != 1:
        return None
    (file,) = piece.files
    earliest_us, latest_us = file.min_timestamp_us, file.max_timestamp_us
    if file.first is None or file.last is None or earliest_us is None or latest_us is None:
        return None
    part = (piece.first - file.first) / (file.last - file.first + 1)
    return earliest_us + round(part * (latest_us - earliest_us))


def _gone(name: str, was: TopicOffsets, reason: str) -> errors.TopicGone:
    return errors.TopicGone(topic=name, reason=reason, at=dict(was.offsets))


def _too_late(name: str, number: int, asked: AtTime, *, of_all: bool) -> errors.BadOption:
    """Builds the error; `of_all`: a single time was given for all partitions."""
    option = "startingTimestamp" if of_all else "startingOffsetsByTimestamp"
    reason = (
        f"no record of {name}-{number} is that late; to start at its end, set"
        " startingOffsetsByTimestampStrategy = latest"
    )
    return errors.BadOption(option=option, value=asked.timestamp_us // 1000, reason=reason)
