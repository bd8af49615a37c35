"""Followers and watches of partitions, which wait for records to be appended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from sparklog.broker.log.growth import Growth, GrowthWatch
from sparklog.broker.log.partition import Partition


class Growths:
    """Starts and stops followers and watches, under the lock that guards the partitions."""

    def __init__(self, lock: threading.RLock, find: Callable[[str, int], Partition]) -> None:
        """`find`: returns a partition by topic and number, or raises an error."""
        self._lock = lock
        self._find = find

    def follow(
        self, partitions: Iterable[Partition], followers: Iterable[Callable[[], None]]
    ) -> list[Growth]:
        """Has a follower called when its partition grows; see `Growth.follow`."""
        with self._lock:
            growths = [partition.growth for partition in partitions]
            for growth, follower in zip(growths, followers, strict=True):
                growth.follow(follower)
        return growths

    def unfollow(self, growths: Iterable[Growth], followers: Iterable[Callable[[], None]]) -> None:
        """Undoes `follow`."""
        with self._lock:
            for growth, follower in zip(growths, followers, strict=True):
                growth.unfollow(follower)

    def watch(
        self,
        seen: Mapping[tuple[str, int], int],
        lacking_bytes: int,
        notify: Callable[[], None],
    ) -> GrowthWatch:
        """Begins a `GrowthWatch` over partitions, by topic and number.

        Raises `UnknownTopic`, `UnknownPartition`, `NotLeader`.
        """
        with self._lock:
            growths = [(self._find(*place).growth, before) for place, before in seen.items()]
            watch = GrowthWatch(growths, lacking_bytes, notify)
            watch.start()
        return watch

    def stop(self, watch: GrowthWatch) -> None:
        """Ends a watch."""
        with self._lock:
            watch.stop()
