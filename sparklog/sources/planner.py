"""What there is to read now, judged against where a query has been.

The planner follows the root itself, with no broker. Records that a query has not read and never
will are a *loss*: by `failOnDataLoss` it ends the query, naming what is gone, or is logged, and the
query goes on from what is left. Before a loss is believed everything is listed anew, because a
reader may for a moment see less than there is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from sparklog import errors
from sparklog.clock import Clock
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.options import EARLIEST, LATEST, Bound
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import Slice, TableSnapshot

_log = logging.getLogger("sparklog.sources")


class Planner:
    """Plans reads of `topics`. Belongs to one thread."""

    def __init__(
        self, store: Store, topics: Sequence[str], *, fail_on_data_loss: bool, clock: Clock
    ) -> None:
        self.store = store
        self._topics = tuple(topics)
        self._fail_on_data_loss = fail_on_data_loss
        self._clock = clock
        self._follower: RootFollower | None = None
        self._snapshots: Mapping[str, TableSnapshot] = {}
        self._ends: Mapping[str, tuple[int, ...]] = {}
        self._told: set[str] = set()

    # -------------------------------------------------------------------------- what there is

    def refresh(self, *, anew: bool = False) -> None:
        """Looks again; `anew`: forgets what it knows, and lists everything.

        Raises `NotARoot`, and what `RootFollower.refresh` raises; `UnknownTopic` is a loss.
        """
        if self._follower is None or anew:
            self._follower = RootFollower(self.store, clock=self._clock)
        follower, wanted = self._follower, list(self._topics)
        while True:
            try:
                self._snapshots = follower.refresh(wanted)
                break
            except errors.UnknownTopic as error:
                self._lose(error)
                wanted.remove(error.topic)
        self._ends = {topic: follower.ends(snapshot) for topic, snapshot in self._snapshots.items()}

    def earliest(self) -> Position:
        """The log start of every partition."""
        return {
            topic: TopicOffsets(snapshot.topic_id or "", snapshot.starts)
            for topic, snapshot in self._snapshots.items()
        }

    def latest(self) -> Position:
        """The high watermark of every partition."""
        return {
            topic: TopicOffsets(snapshot.topic_id or "", self._ends[topic])
            for topic, snapshot in self._snapshots.items()
        }

    def resolve(self, option: str, given: Bound | None, *, otherwise: int) -> Position:
        """The position that the user meant by `option`, or `otherwise` where nothing was given.

        Raises `BadOption` for a partition that is missing or too many, and `OffsetOutOfRange`.
        """
        bound = otherwise if given is None else given
        if bound == EARLIEST:
            return self.earliest()
        if bound == LATEST:
            return self.latest()
        assert not isinstance(bound, int)
        return {
            topic: TopicOffsets(snapshot.topic_id or "", self._offsets(option, topic, bound[topic]))
            for topic, snapshot in self._snapshots.items()
        }

    def _offsets(self, option: str, topic: str, asked: Mapping[int, int]) -> tuple[int, ...]:
        starts, ends = self._snapshots[topic].starts, self._ends[topic]
        if asked.keys() != set(range(len(ends))):
            reason = (
                f"{topic} has partitions 0 to {len(ends) - 1}: name each, with -2 or -1 if need be"
            )
            raise errors.BadOption(option=option, value=dict(asked), reason=reason)
        found = []
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            offset = {EARLIEST: start, LATEST: end}.get(asked[number], asked[number])
            if not start <= offset <= end:
                self._lose(
                    errors.OffsetOutOfRange(
                        topic=topic, partition=number, offset=offset, start=start, end=end
                    )
                )
            found.append(min(max(offset, start), end))
        return tuple(found)

    # -------------------------------------------------------------------------- what is left

    def reconcile(self, position: Position) -> Position:
        """`position` as it can be read on from: every topic and partition that there is now.

        What is new begins at its log start. Raises `TopicChanged` and `DataLoss`, unless losses are
        allowed.
        """
        if not all(
            self._holds(topic, each.id, number, offset)
            for topic, each in position.items()
            if topic in self._topics
            for number, offset in enumerate(each.offsets)
        ):
            self.refresh(anew=True)
        found = {}
        for topic, snapshot in self._snapshots.items():
            known = position.get(topic)
            if known is not None and known.id != snapshot.topic_id:
                self._lose(
                    errors.TopicChanged(topic=topic, expected=known.id, found=snapshot.topic_id)
                )
                known = None
            offsets = known.offsets if known is not None else ()
            found[topic] = TopicOffsets(
                snapshot.topic_id or "",
                tuple(
                    self._first_left(topic, number, offsets[number])
                    if number < len(offsets)
                    else start
                    for number, start in enumerate(snapshot.starts)
                ),
            )
        return found

    def _holds(self, topic: str, topic_id: str, number: int, offset: int) -> bool:
        """Whether that is a place in the log as it is known now."""
        snapshot = self._snapshots.get(topic)
        return (
            snapshot is not None
            and snapshot.topic_id == topic_id
            and number < snapshot.partitions
            and snapshot.starts[number] <= offset <= self._ends[topic][number]
        )

    def _first_left(self, topic: str, number: int, offset: int) -> int:
        start, end = self._snapshots[topic].starts[number], self._ends[topic][number]
        if offset < start:
            self._lose_range(topic, number, offset, start, "the log starts later now")
        elif offset > end:
            self._lose_range(topic, number, end, offset, "the log ends before them")
        return min(max(offset, start), end)

    def _lose_range(self, topic: str, number: int, first: int, end: int, reason: str) -> None:
        hint = f"{reason}; failOnDataLoss=false goes on with what is left"
        self._lose(
            errors.DataLoss(topic=topic, partition=number, start=first, end=end, reason=hint)
        )

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
        found = []
        for topic, upto in end.items():
            known = start.get(topic)
            firsts = known.offsets if known is not None and known.id == upto.id else ()
            for number, last in enumerate(upto.offsets):
                first = firsts[number] if number < len(firsts) else None
                if first is None or first < last:
                    found += self.range(topic, upto.id, number, first, last)
        return found

    def range(
        self, topic: str, topic_id: str, partition: int, first: int | None, end: int
    ) -> list[Slice]:
        """Slices that hold what is left of the offsets; `first` None: from the log start.

        Raises `TopicChanged` and `DataLoss`, unless losses are allowed.
        """
        if not all(
            self._holds(topic, topic_id, partition, offset)
            for offset in (end, first)
            if offset is not None
        ):
            self.refresh(anew=True)
        snapshot = self._snapshots.get(topic)
        if snapshot is None:
            return []
        if snapshot.topic_id != topic_id:
            self._lose(errors.TopicChanged(topic=topic, expected=topic_id, found=snapshot.topic_id))
            return []
        low = snapshot.starts[partition] if first is None else first
        low = self._first_left(topic, partition, low)
        high = self._first_left(topic, partition, end)
        if low >= high:
            return []
        assert self._follower is not None
        return self._follower.plan(topic, snapshot, partition, low, high)
