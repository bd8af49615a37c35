"""What a planner sees of a log, and how its root shows it, with no broker.

A view belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import msgspec

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.read import first_since
from sparklog.storage.snapshot import Slice, TableSnapshot


class TopicView(msgspec.Struct, frozen=True):
    """A topic as of a look, per partition."""

    id: str
    starts: tuple[int, ...]
    """Log start offsets."""
    published: tuple[int, ...]
    """Offsets below are in the table, and none from there on."""
    ends: tuple[int, ...]
    """High watermarks."""


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

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        """The least offset of a record that is not older; None: there is none."""


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

    def _refresh_snapshots(self) -> None:
        """Looks at the same topics again; raises `TopicChanged` where one is another now."""
        assert self._follower is not None
        known, self._snapshots = self._snapshots, self._follower.refresh(self._snapshots)
        for name, snapshot in self._snapshots.items():
            if snapshot.topic_id != known[name].topic_id:
                raise errors.TopicChanged(
                    topic=name, expected=known[name].topic_id, found=snapshot.topic_id
                )
