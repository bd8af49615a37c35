"""A planner's view of a log, and its implementation for a root, which needs no broker.

A view is for use by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.formats import consumer_offsets
from sparklog.formats.values.columns import Plan
from sparklog.storage.follow import TABLE_AGE_SECONDS, RootFollower
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.reading.read import first_since, read_slice, row_groups
from sparklog.storage.snapshot import GapCause, RowGroup, Slice, TableSnapshot


class TopicView(msgspec.Struct, frozen=True):
    """A topic as of a refresh, with one entry per partition."""

    id: str
    starts: tuple[int, ...]
    """Log start offsets."""
    published: tuple[int, ...]
    """Ends of the table: all offsets below are published, and none from there on."""
    ends: tuple[int, ...]
    """High watermarks."""
    absent_below: tuple[int, ...]
    """Offsets below may never have existed here: the topic is or was a mirror, whose source had no
    records there. 0 for other topics."""
    version: int | None = None
    """Version of the Delta table; None if unknown, as through a broker."""
    typed: Plan | None = None
    """The typed columns that new records fill."""


class Committed(msgspec.Struct, frozen=True):
    """Offset that a consumer group has committed for a partition."""

    topic_id: str
    """Id of the topic; a newer topic of the same name has other offsets."""
    offset: int


GroupOffsets = Mapping[tuple[str, int], Committed]
"""By topic and partition."""

Choose = Callable[[Iterable[str]], list[str]]
"""Returns the selected names of those that exist."""


class LogView(Protocol):
    """A log as of the last `refresh`."""

    poll_interval_seconds: float
    """Default interval at which a stream polls for new records."""

    def names(self) -> Collection[str]:
        """Returns the existing topics. Raises what `refresh` raises, except `UnknownTopic`."""

    def refresh(self, choose: Choose, *, from_scratch: bool) -> Mapping[str, TopicView]:
        """Returns the chosen topics as of now; `from_scratch` bypasses all caches.

        Raises `UnknownTopic`, `NotARoot`, `Retriable` errors from store and network, and `Corrupt`.
        """

    def slices(self, topic: str, partition: int, first: int, end: int) -> list[Slice]:
        """Returns the slices that cover an existing range of offsets."""

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        """Returns the row groups of each slice's file; empty if unknown."""

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """Returns the lowest offset of a record that is not older, or None if there is none."""

    def committed(self, group: str) -> GroupOffsets | None:
        """Returns the offsets that a group has committed, or None if the group does not exist.

        It may leave out topics that were not refreshed. Raises what `refresh` raises.
        """


class RootView:
    """View that reads the WAL and the tables under the root."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._follower: RootFollower | None = None
        self._snapshots: Mapping[str, TableSnapshot] = {}
        self.poll_interval_seconds = 0.0 if store.is_local else limits.POLL_INTERVAL_REMOTE_SECONDS
        self._table_age_seconds = 0.0 if store.is_local else TABLE_AGE_SECONDS

    def names(self) -> Collection[str]:
        return RootFollower(self._store, clock=self._clock).metadata.topics

    def refresh(self, choose: Choose, *, from_scratch: bool) -> Mapping[str, TopicView]:
        follower = self._follower
        if follower is None or from_scratch:
            follower = RootFollower(self._store, clock=self._clock)
        while True:
            names = choose(follower.metadata.topics)
            snapshots = follower.refresh(names, table_age_seconds=self._table_age_seconds)
            if choose(follower.metadata.topics) == names:
                break
        self._follower, self._snapshots = follower, snapshots
        return {
            name: TopicView(
                each.topic_id or "",
                each.starts,
                each.ends,
                follower.ends(each),
                tuple(
                    each.gaps.get((number, GapCause.SOURCE), 0) for number in range(each.partitions)
                ),
                each.version,
                None if each.columns is None else each.columns.plan_for_readers(),
            )
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
            return ()  # the task that reads it replans, or reports the error

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
        raise errors.MissingObject(path=path, reason="the log still refers to it")

    def committed(self, group: str) -> GroupOffsets | None:
        # A follower for this call only: adding a topic to an existing one rereads all logs.
        follower = RootFollower(self._store, clock=self._clock)
        if consumer_offsets.TOPIC not in follower.metadata.topics:
            return None
        for _ in range(limits.REPLAN_ATTEMPTS):
            try:
                return self._read_committed(follower, group)
            except ObjectMissing as missing:  # compacted or trimmed since
                path = missing.path
        raise errors.MissingObject(path=path, reason="the log still refers to it")

    def _read_committed(self, follower: RootFollower, group: str) -> GroupOffsets | None:
        topic = consumer_offsets.TOPIC
        snapshot = follower.refresh([topic])[topic]
        number = consumer_offsets.partition_of(group, snapshot.partitions)
        start, end = snapshot.starts[number], follower.ends(snapshot)[number]
        last: dict[bytes, bytes | None] = {}
        for piece in follower.plan(topic, snapshot, number, start, end):
            for batch in read_slice(self._store, piece, columns=("key", "value")):
                mine = consumer_offsets.of_group(batch, group)
                keys, values = mine.column("key").to_pylist(), mine.column("value").to_pylist()
                last.update(zip(keys, values, strict=True))
        current = {key: value for key, value in last.items() if value is not None}
        found = {}
        for data, value in current.items():
            key = consumer_offsets.decode_key(data)
            if isinstance(key, consumer_offsets.OffsetKey):
                offset = consumer_offsets.decode_offset(value)
                found[key.topic, key.partition] = Committed(offset.topic_id, offset.offset)
        return found if current else None

    def _refresh_snapshots(self) -> None:
        """Refreshes the same topics. Raises `TopicChanged` if one was recreated."""
        assert self._follower is not None
        known, self._snapshots = self._snapshots, self._follower.refresh(self._snapshots)
        for name, snapshot in self._snapshots.items():
            if snapshot.topic_id != known[name].topic_id:
                raise errors.TopicChanged(
                    topic=name, expected=known[name].topic_id, found=snapshot.topic_id
                )
