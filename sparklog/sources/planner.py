"""What there is to read now, judged against where a query has been.

Records that a query has not read and never will are a *loss*: by `failOnDataLoss` it ends the
query, naming what is gone, or is logged, and the query goes on from what is left. Before a loss is
believed everything is looked at anew, because a reader may for a moment see less than there is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from sparklog import errors
from sparklog.sources.bounds import EARLIEST, LATEST, AtTime, OfGroup, Point, Start
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.selection import Selection
from sparklog.sources.views import TopicView, View
from sparklog.storage.snapshot import RowGroup, Slice

_log = logging.getLogger("sparklog.sources")


class Planner:
    """Plans reads of what is selected. Belongs to one thread."""

    def __init__(self, view: View, selection: Selection, *, fail_on_data_loss: bool) -> None:
        self._view = view
        self._selection = selection
        self._fail_on_data_loss = fail_on_data_loss
        self._topics: Mapping[str, TopicView] = {}
        self._pending: frozenset[str] = frozenset()
        """Topics that are not selected any more, but planned."""
        self._told: set[str] = set()
        self.poll_interval_seconds = view.poll_interval_seconds

    # -------------------------------------------------------------------------- what there is

    def refresh(self, *, anew: bool = False) -> None:
        """Looks again; `anew`: trusting nothing that is remembered.

        A topic that does not exist is left out. Raises what else `View.refresh` raises.
        """
        missing: set[str] = set()

        def choose(existing: Iterable[str]) -> list[str]:
            there = set(existing) - missing
            wanted = {*self._selection.names(there), *self._pending}
            return sorted(wanted & there)

        while True:
            try:
                self._topics = self._view.refresh(choose, anew=anew)
                return
            except errors.UnknownTopic as error:
                missing.add(error.topic)

    def check_topics(self) -> None:
        """Raises `UnknownTopic` where one that was named does not exist, unless that is allowed."""
        self._check_named(self._topics)

    def check_names(self) -> None:
        """As `check_topics`, before the first look and without its cost: no table is opened."""
        self._check_named(self._view.names())

    def _check_named(self, existing: Container[str]) -> None:
        for name in self._selection.topics:
            if name not in existing:
                self._lose(errors.UnknownTopic(topic=name))

    def earliest(self) -> Position:
        """The log start of every partition."""
        return self._position(lambda _, topic, number: topic.starts[number])

    def published(self) -> Position:
        """Where the table of every partition ends."""
        return self._position(lambda _, topic, number: topic.published[number])

    def latest(self) -> Position:
        """The high watermark of every partition."""
        return self._position(lambda _, topic, number: topic.ends[number])

    def resolve(
        self, option: str, given: Start | None, *, otherwise: int, late_is_latest: bool
    ) -> Position:
        """The position that the user meant by `option`, or `otherwise` where nothing was given.

        `late_is_latest`: a time that no record reaches means the end of the log.

        Raises `BadOption` for a time that no record reaches, for a group that does not exist, and
        where a bound by partition names other partitions than are read; `UnknownTopic`,
        `OffsetOutOfRange` and `DataLoss`, unless losses are allowed.
        """
        self.check_topics()
        if isinstance(given, OfGroup):
            return self._of_group(given)
        bound = otherwise if given is None else given
        if isinstance(bound, Mapping):
            self._check_names(option, bound)

        def point(name: str, topic: TopicView, number: int) -> int:
            asked = bound[name][number] if isinstance(bound, Mapping) else bound
            if isinstance(asked, AtTime):
                found = self._view.first_since(name, number, asked.timestamp_us)
                if found is None and not late_is_latest:
                    raise _too_late(option, name, number, asked)
                # What came since the last look is not read yet.
                return topic.ends[number] if found is None else min(found, topic.ends[number])
            return self._offset(name, topic, number, asked)

        return self._position(point)

    def _of_group(self, given: OfGroup) -> Position:
        committed = self._view.committed(given.group)
        if committed is None:
            reason = (
                "there is no such consumer group, or what it had committed has expired;"
                " startingOffsets = earliest or latest needs none"
            )
            raise errors.BadOption(option="group.id", value=given.group, reason=reason)
        if not all(
            self._holds(name, each.topic_id, number, each.offset)
            for (name, number), each in committed.items()
            if self._selection.selects(name)
        ):
            # The group may have read what came since the last look.
            self.refresh(anew=True)
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
            reason = f"group {given.group!r} has committed nothing of {', '.join(lacking)}"
            if given.otherwise is None:
                raise errors.BadOption(option="groupOffsetReset", value="error", reason=reason)
            where = "start" if given.otherwise == EARLIEST else "end"
            _log.warning("%s: read from the %s on, as groupOffsetReset says", reason, where)
        return position

    def _check_names(self, option: str, bound: Mapping[str, Mapping[int, Point]]) -> None:
        read = {name: set(self._partitions(name)) for name in self._topics}
        if {name: set(places) for name, places in bound.items()} != read:
            wanted = {name: sorted(numbers) for name, numbers in read.items()}
            reason = f"name all partitions that are read, and no others: {wanted}"
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

    # -------------------------------------------------------------------------- what is left

    def reconcile(self, position: Position) -> Position:
        """`position` as it can be read on from: every topic and partition that there is now.

        What is new begins at offset 0. Raises `UnknownTopic`, `TopicGone` and `DataLoss`,
        unless losses are allowed.
        """
        if not all(
            self._holds(name, each.id, number, offset)
            for name, each in position.items()
            if self._selection.selects(name)
            for number, offset in each.offsets.items()
        ):
            self.refresh(anew=True)
        for name, was in position.items():
            self._check_is_read(name, was)
        if not self._topics.keys() | position.keys() >= set(self._selection.topics):
            self.check_topics()

        def left(name: str, topic: TopicView, number: int) -> int:
            known = position.get(name)
            if known is None or known.id != topic.id or number not in known.offsets:
                return self._first_left(name, number, 0)
            return self._first_left(name, number, known.offsets[number])

        return self._position(left)

    def _check_is_read(self, name: str, was: TopicOffsets) -> None:
        """Raises `TopicGone`, unless losses are allowed, where the query leaves its place."""
        topic = self._topics.get(name)
        if not self._selection.selects(name):
            self._lose(_gone(name, was, "is not selected any more"))
        elif topic is None:
            self._lose(_gone(name, was, "was deleted"))
        elif topic.id != was.id:
            self._lose(_gone(name, was, "was deleted and created again"))
        else:
            read = set(self._partitions(name))
            dropped = {number: at for number, at in was.offsets.items() if number not in read}
            if dropped:
                reason = f"is not read in partitions {sorted(dropped)} any more"
                self._lose(_gone(name, TopicOffsets(was.id, dropped), reason))

    def _holds(self, name: str, topic_id: str, number: int, offset: int) -> bool:
        """Whether that is a place in the log as it is known now."""
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
            self._lose_range(name, number, offset, start, "the log starts later now")
        elif offset > end:
            self._lose_range(name, number, end, offset, "the log ends before them")
        return min(max(offset, start), end)

    def _lose_range(self, name: str, number: int, first: int, end: int, reason: str) -> None:
        hint = f"{reason}; failOnDataLoss=false goes on with what is left"
        self._lose(errors.DataLoss(topic=name, partition=number, start=first, end=end, reason=hint))

    def _lose(self, loss: errors.SparklogError) -> None:
        if self._fail_on_data_loss:
            raise loss
        if str(loss) not in self._told:
            self._told.add(str(loss))
            _log.warning("%s; going on, because failOnDataLoss is false", loss)

    # -------------------------------------------------------------------------- slices

    def slices(self, start: Position, end: Position) -> list[Slice]:
        """All that lies between the positions, partition after partition.

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

    def range(
        self, name: str, topic_id: str, partition: int, first: int | None, end: int
    ) -> list[Slice]:
        """Slices that hold what is left of the offsets; `first` None: from the log start.

        Raises `TopicGone` and `DataLoss`, unless losses are allowed.
        """
        if not all(
            self._holds(name, topic_id, partition, offset)
            for offset in (end, first)
            if offset is not None
        ):
            self.refresh(anew=True)
        topic = self._topics.get(name)
        if topic is None or topic.id != topic_id:
            was = TopicOffsets(topic_id, {partition: first or 0})
            reason = "was deleted" if topic is None else "was deleted and created again"
            self._lose(_gone(name, was, reason))
            return []
        low = self._first_left(name, partition, first or 0)
        high = self._first_left(name, partition, end)
        return self._view.slices(name, partition, low, high) if low < high else []

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        """The row groups of the one file of each slice; none where they are not known.

        Raises the `Retriable` errors of the store.
        """
        return self._view.row_groups(slices)


def _gone(name: str, was: TopicOffsets, reason: str) -> errors.TopicGone:
    return errors.TopicGone(topic=name, reason=reason, at=dict(was.offsets))


def _too_late(option: str, name: str, number: int, asked: AtTime) -> errors.BadOption:
    reason = (
        f"no record of {name}-{number} is that late;"
        " startingOffsetsByTimestampStrategy = latest would begin at its end"
    )
    return errors.BadOption(option=option, value=asked.timestamp_us // 1000, reason=reason)
