"""What a planner sees of a log, and how its root shows it, with no broker.

A view belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from sparklog import consumeroffsets, errors, limits
from sparklog.clock import Clock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.read import first_since, read_slice, row_groups
from sparklog.storage.snapshot import RowGroup, Slice, TableSnapshot


class TopicView(msgspec.Struct, frozen=True):
    """A topic as of a look, per partition."""

    id: str
    starts: tuple[int, ...]
    """Log start offsets."""
    published: tuple[int, ...]
    """Offsets below are in the table, and none from there on."""
    ends: tuple[int, ...]
    """High watermarks."""


class Committed(msgspec.Struct, frozen=True):
    """The next offset that a consumer group wants of a partition."""

    topic_id: str
    """Of which topic it is: another that has the name now has other offsets."""
    offset: int


GroupOffsets = Mapping[tuple[str, int], Committed]
"""By topic and partition."""

Choose = Callable[[Iterable[str]], list[str]]
"""Of the names that exist, those that are meant."""


class View(Protocol):
    """A log as it was at the last `refresh`."""

    poll_interval_seconds: float
    """How often a stream looks, unless it was asked to look otherwise."""

    def names(self) -> Collection[str]:
        """The topics that exist now. Raises what `refresh` raises, but for `UnknownTopic`."""

    def refresh(self, choose: Choose, *, anew: bool) -> Mapping[str, TopicView]:
        """Looks at the topics meant; `anew`: trusting nothing that is remembered.

        Raises `UnknownTopic`, `NotARoot`, `Retriable` errors of store and network, and `Corrupt`.
        """

    def slices(self, topic: str, partition: int, first: int, end: int) -> list[Slice]:
        """What holds the offsets of a range that exists."""

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        """The row groups of the one file of each slice; none where they are not known."""

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """The least offset of a record that is not older; None: there is none."""

    def committed(self, group: str) -> GroupOffsets | None:
        """What a consumer group has committed by now; None: there is no such group.

        May leave out topics that were not looked at. Raises as `refresh` does.
        """


class RootView:
    """Reads WAL and tables under the root itself."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._follower: RootFollower | None = None
        self._snapshots: Mapping[str, TableSnapshot] = {}
        self.poll_interval_seconds = 0.0 if store.is_local else limits.POLL_INTERVAL_REMOTE_SECONDS

    def names(self) -> Collection[str]:
        return RootFollower(self._store, clock=self._clock).metadata.topics

    def refresh(self, choose: Choose, *, anew: bool) -> Mapping[str, TopicView]:
        follower = self._follower
        if follower is None or anew:
            follower = self._follower = RootFollower(self._store, clock=self._clock)
        while True:
            names = choose(follower.metadata.topics)
            self._snapshots = follower.refresh(names)
            if choose(follower.metadata.topics) == names:
                break
        return {
            name: TopicView(each.topic_id or "", each.starts, each.ends, follower.ends(each))
            for name, each in self._snapshots.items()
        }

    def slices(self, topic: str, partition: int, first: int, end: int) -> list[Slice]:
        assert self._follower is not None
        return self._follower.plan(topic, self._snapshots[topic], partition, first, end)

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        if self._store.is_local or len(slices) < 2:
            return [self._row_groups(each) for each in slices]
        with ThreadPoolExecutor(limits.READ_THREADS) as threads:
            return list(threads.map(self._row_groups, slices))

    def _row_groups(self, piece: Slice) -> Sequence[RowGroup]:
        try:
            return row_groups(self._store, piece)
        except (ObjectMissing, errors.Corrupt):
            return ()  # the task that reads it plans again, or names what is wrong

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        assert self._follower is not None
        for _ in range(limits.REPLAN_ATTEMPTS):
            snapshot = self._snapshots[topic]
            first, end = snapshot.starts[partition], self._follower.ends(snapshot)[partition]
            try:
                return first_since(
                    self._store, self.slices(topic, partition, first, end), timestamp_us
                )
            except ObjectMissing as missing:  # compacted or trimmed since
                path = missing.path
                self._refresh_snapshots()
        raise errors.MissingObject(path=path, reason="the log names it still")

    def committed(self, group: str) -> GroupOffsets | None:
        # Of its own: who follows another topic reads all logs anew, and a stream asks this once.
        follower = RootFollower(self._store, clock=self._clock)
        if consumeroffsets.TOPIC not in follower.metadata.topics:
            return None
        for _ in range(limits.REPLAN_ATTEMPTS):
            try:
                return self._read_committed(follower, group)
            except ObjectMissing as missing:  # compacted or trimmed since
                path = missing.path
        raise errors.MissingObject(path=path, reason="the log names it still")

    def _read_committed(self, follower: RootFollower, group: str) -> GroupOffsets | None:
        topic = consumeroffsets.TOPIC
        snapshot = follower.refresh([topic])[topic]
        number = consumeroffsets.partition_of(group, snapshot.partitions)
        start, end = snapshot.starts[number], follower.ends(snapshot)[number]
        last: dict[bytes, bytes | None] = {}
        for piece in follower.plan(topic, snapshot, number, start, end):
            for batch in read_slice(self._store, piece, columns=("key", "value")):
                mine = consumeroffsets.of_group(batch, group)
                keys, values = mine.column("key").to_pylist(), mine.column("value").to_pylist()
                last.update(zip(keys, values, strict=True))
        stands = {key: value for key, value in last.items() if value is not None}
        found = {}
        for data, value in stands.items():
            key = consumeroffsets.decode_key(data)
            if isinstance(key, consumeroffsets.OffsetKey):
                offset = consumeroffsets.decode_offset(value)
                found[key.topic, key.partition] = Committed(offset.topic_id, offset.offset)
        return found if stands else None

    def _refresh_snapshots(self) -> None:
        """Looks at the same topics again; raises `TopicChanged` where one is another now."""
        assert self._follower is not None
        known, self._snapshots = self._snapshots, self._follower.refresh(self._snapshots)
        for name, snapshot in self._snapshots.items():
            if snapshot.topic_id != known[name].topic_id:
                raise errors.TopicChanged(
                    topic=name, expected=known[name].topic_id, found=snapshot.topic_id
                )
