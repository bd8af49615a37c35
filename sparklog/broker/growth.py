"""Tells those who wait that partitions have grown, by bytes, and asks nobody else.

A watch waits until its partitions have grown by so many bytes together. To look at all watches of
a partition at each flush would cost as much as there are clients that wait. So a watch lends each
of its partitions a share of what it lacks, and is looked at when a partition has used its share up:
as long as none has, the sum cannot be there. Shares are half of what is lacking, dealt out among
the partitions, so that each round of n looks halves what is lacking.

Pure, without a lock of its own: `Ledger.lock` guards it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, TypeAlias

_numbers = count()
_MARKS: Final = 512


class Growth:
    """One partition's: how many bytes of records were ever appended, and who waits for more."""

    __slots__ = ("_marks", "_step_bytes", "_watches", "grown_bytes")

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._marks: list[tuple[int, int]] = []
        """Offsets, and `grown_bytes` before what begins there; more apart the more there are."""
        self._step_bytes = 1
        self._watches: list[_Place] = []
        """Sorted by the `grown_bytes` at which a watch is to be looked at."""

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, size: int, offset: int) -> None:
        """So many bytes more, of what begins at that offset."""
        if not self._marks or self.grown_bytes - self._marks[-1][1] >= self._step_bytes:
            self._marks.append((offset, self.grown_bytes))
            if len(self._marks) > _MARKS:
                self._marks = self._marks[::2]
                self._step_bytes *= 2
        self.grown_bytes += size
        while self._watches and self._watches[0][0] <= self.grown_bytes:
            self._watches.pop(0)[2].used_up(self)

    def bytes_from(self, offset: int) -> int | None:
        """Bytes from that offset on, or somewhat more; None where it lies before all that grew.

        May be called without the lock.
        """
        marks, grown_bytes = self._marks, self.grown_bytes
        index = bisect_right(marks, offset, key=lambda each: each[0])
        return grown_bytes - marks[index - 1][1] if index else None

    def end(self) -> None:
        """There will be no more: whoever waits is told."""
        for _, _, watch in self._watches.copy():
            watch.tell()

    def put(self, place: _Place) -> None:
        insort(self._watches, place)

    def remove(self, place: _Place) -> None:
        index = bisect_left(self._watches, place[:2], key=lambda each: each[:2])
        if index < len(self._watches) and self._watches[index][2] is place[2]:
            del self._watches[index]


class Watch:
    """Calls `tell` once partitions have grown by `lacking_bytes` since they were seen.

    Args:
        seen: each partition's growth, and its `grown_bytes` when it was looked at.
        tell: called once at most, under the lock: it must not wait for anything.
    """

    __slots__ = (
        "_is_over",
        "_lacking_bytes",
        "_left_bytes",
        "_number",
        "_places",
        "_seen",
        "_tell",
    )

    def __init__(
        self, seen: Iterable[tuple[Growth, int]], lacking_bytes: int, tell: Callable[[], None]
    ) -> None:
        self._seen = tuple(seen)
        self._lacking_bytes = lacking_bytes
        self._tell = tell
        self._number = next(_numbers)
        self._places: dict[Growth, tuple[int, int]] = {}
        """Of each partition: its `grown_bytes` when it was looked at, and its share."""
        self._left_bytes = 0
        """As many more may be used up before everything is counted again."""
        self._is_over = False

    def start(self) -> None:
        """Waits from now on; tells at once where the bytes are there, or others are looked at."""
        grown = [growth.grown_bytes - before for growth, before in self._seen]
        lacking = self._lacking_bytes - sum(grown)
        if lacking <= 0 or min(grown, default=0) < 0:  # a topic of that name was made again
            self.tell()
            return
        self._left_bytes = (lacking + 1) // 2
        share = max(lacking // (2 * len(self._seen)), 1) if len(self._seen) > 1 else lacking
        for growth, _ in self._seen:
            self._lend(growth, share)

    def used_up(self, growth: Growth) -> None:
        """A partition has grown by its share."""
        before, share = self._places.pop(growth)
        self._left_bytes -= growth.grown_bytes - before
        if self._left_bytes > 0:
            self._lend(growth, share)
            return
        self._leave()
        self.start()

    def tell(self) -> None:
        """It is over, whatever is there."""
        if not self._is_over:
            self.stop()
            self._tell()

    def stop(self) -> None:
        """Nobody waits any more."""
        self._is_over = True
        self._leave()

    def _lend(self, growth: Growth, share: int) -> None:
        at = growth.grown_bytes
        self._places[growth] = at, share
        growth.put((at + share, self._number, self))

    def _leave(self) -> None:
        for growth, (at, share) in self._places.items():
            growth.remove((at + share, self._number, self))
        self._places.clear()


_Place: TypeAlias = tuple[int, int, Watch]
"""The `grown_bytes` at which a watch is to be looked at, and its number, which orders them."""
