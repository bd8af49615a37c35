"""Notifies waiting fetches when partitions have grown by enough bytes.

A watch waits until its partitions together have grown by a number of bytes. Checking all watches of
a partition at each flush would cost time for each waiting client. Instead, a watch assigns each of
its partitions a share of the missing bytes, and a partition checks the watch only once it has grown
by that share: until then, the sum cannot be reached. The shares add up to half of the missing
bytes, so each round of n checks halves them.

Pure, and without a lock: `LedPartitions.lock` guards it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, TypeAlias

_numbers = count()
_MARKS: Final = 512


class Growth:
    """Bytes ever appended to one partition, and the watches that wait for more."""

    __slots__ = ("_followers", "_marks", "_step_bytes", "_watches", "appended_bytes")

    def __init__(self) -> None:
        self.appended_bytes = 0
        self._marks: list[tuple[int, int]] = []
        """(offset, `appended_bytes` before that offset); thinned out as they accumulate."""
        self._step_bytes = 1
        self._watches: list[_Waiter] = []
        """Sorted by the `appended_bytes` at which each watch is checked."""
        self._followers: dict[Callable[[], None], None] = {}
        """Called whenever the partition grows; a dictionary preserves their order."""

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, size: int, offset: int) -> None:
        """Adds `size` bytes of records that begin at `offset`."""
        if not self._marks or self.appended_bytes - self._marks[-1][1] >= self._step_bytes:
            self._marks.append((offset, self.appended_bytes))
            if len(self._marks) > _MARKS:
                self._marks = self._marks[::2]
                self._step_bytes *= 2
        self.appended_bytes += size
        while self._watches and self._watches[0][0] <= self.appended_bytes:
            self._watches.pop(0)[2].used_up(self)
        self.notify_followers()

    def bytes_from(self, offset: int) -> int | None:
        """Returns the bytes from `offset` on, or slightly more; None if it precedes all marks.

        May be called without the lock.
        """
        marks, appended_bytes = self._marks, self.appended_bytes
        index = bisect_right(marks, offset, key=lambda each: each[0])
        return appended_bytes - marks[index - 1][1] if index else None

    def close(self) -> None:
        """Notifies all watches and followers: no more bytes will arrive."""
        for _, _, watch in self._watches.copy():
            watch.notify()
        self.notify_followers()

    def follow(self, follower: Callable[[], None]) -> None:
        """Calls `follower` whenever records are appended, until `unfollow`. It must not block."""
        self._followers[follower] = None

    def unfollow(self, follower: Callable[[], None]) -> None:
        self._followers.pop(follower, None)

    def notify_followers(self) -> None:
        """Has the followers check the partition again."""
        for follower in self._followers:
            follower()

    def put(self, waiter: _Waiter) -> None:
        insort(self._watches, waiter)

    def remove(self, waiter: _Waiter) -> None:
        index = bisect_left(self._watches, waiter[:2], key=lambda each: each[:2])
        if index < len(self._watches) and self._watches[index][2] is waiter[2]:
            del self._watches[index]


class GrowthWatch:
    """Calls `on_growth` once partitions have grown by `lacking_bytes` in total.

    Args:
        seen: each partition's growth, and its `appended_bytes` when the caller read it.
        lacking_bytes: the bytes to wait for, counted from `seen`.
        on_growth: called at most once, with the lock held: it must not block.
    """

    __slots__ = (
        "_is_over",
        "_lacking_bytes",
        "_left_bytes",
        "_number",
        "_on_growth",
        "_seen",
        "_shares",
    )

    def __init__(
        self, seen: Iterable[tuple[Growth, int]], lacking_bytes: int, on_growth: Callable[[], None]
    ) -> None:
        self._seen = tuple(seen)
        self._lacking_bytes = lacking_bytes
        self._on_growth = on_growth
        self._number = next(_numbers)
        self._shares: dict[Growth, tuple[int, int]] = {}
        """By partition: its `appended_bytes` when the share was assigned, and the share."""
        self._left_bytes = 0
        """Bytes that may still arrive before all partitions are summed up again."""
        self._is_over = False

    def start(self) -> None:
        """Starts waiting; notifies at once if the bytes are there, or a topic was recreated."""
        growth_bytes = [growth.appended_bytes - before for growth, before in self._seen]
        lacking = self._lacking_bytes - sum(growth_bytes)
        if lacking <= 0 or min(growth_bytes, default=0) < 0:  # negative: the topic was recreated
            self.notify()
            return
        self._left_bytes = (lacking + 1) // 2
        share = max(lacking // (2 * len(self._seen)), 1) if len(self._seen) > 1 else lacking
        for growth, _ in self._seen:
            self._give_share(growth, share)

    def used_up(self, growth: Growth) -> None:
        """Checks the watch: a partition has grown by its share."""
        before, share = self._shares.pop(growth)
        self._left_bytes -= growth.appended_bytes - before
        if self._left_bytes > 0:
            self._give_share(growth, share)
            return
        self._remove_shares()
        self.start()

    def notify(self) -> None:
        """Ends the watch and calls `on_growth`, however many bytes have arrived."""
        if not self._is_over:
            self.stop()
            self._on_growth()

    def stop(self) -> None:
        """Ends the watch without a notification."""
        self._is_over = True
        self._remove_shares()

    def _give_share(self, growth: Growth, share: int) -> None:
        at = growth.appended_bytes
        self._shares[growth] = at, share
        growth.put((at + share, self._number, self))

    def _remove_shares(self) -> None:
        for growth, (at, share) in self._shares.items():
            growth.remove((at + share, self._number, self))
        self._shares.clear()


_Waiter: TypeAlias = tuple[int, int, GrowthWatch]
"""(`appended_bytes` at which to check the watch, its number as a tie-breaker, the watch)."""
