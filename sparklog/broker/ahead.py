"""Batches of Kafka's made before they are asked for: a consumer that reads old records asks on.

Reading the table and encoding its rows is worth it only for many rows at a time, and a fetch wants
few. What is left of them waits here for the next fetch, for some seconds: no longer, because rows
may leave the table (a compacted key, another engine's DELETE), and a slow consumer can afford to
have them read again. Bounded by bytes: what nobody has asked for yet keeps its place, because
throwing it away would have it made again; what has been given out serves whoever reads the same a
little later, and goes when room is wanted. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from sparklog.clock import Clock

_KEPT_SECONDS: Final = 10.0
_OVERHEAD_BYTES: Final = 384
"""What a batch costs beside its bytes, in objects of Python's: 325 were measured."""


class Made(NamedTuple):
    """A batch, and the offset that a consumer asks for after it."""

    batch: bytearray
    end: int

    @property
    def size(self) -> int:
        """Bytes that it takes here."""
        return len(self.batch) + _OVERHEAD_BYTES


Place: TypeAlias = tuple[str, int]
"""Topic id and partition."""
_Key: TypeAlias = tuple[str, int, int]


class Ahead:
    def __init__(self, *, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = _Batches()
        """Not asked for yet; oldest first."""
        self._given = _Batches()
        """Asked for once at least; the next to go first."""
        self._reserved_bytes = 0

    @contextmanager
    def reserved(self, size: int) -> Iterator[int]:
        """So much of `size` as there is room for, which nobody else is given meanwhile."""
        with self._lock:
            self._drop_old()
            room = self._limit_bytes - self._waiting.bytes - self._reserved_bytes
            found = max(min(size, room), 0)
            self._reserved_bytes += found
        try:
            yield found
        finally:
            with self._lock:
                self._reserved_bytes -= found

    def put(self, place: Place, offset: int, batches: Iterable[Made]) -> None:
        """Batches that follow one another from `offset` on; those that find no room are dropped."""
        with self._lock:
            self._drop_old()
            now = self._clock.monotonic()
            for made in batches:
                if self._waiting.bytes + made.size > self._limit_bytes:
                    break
                key = *place, offset
                self._given.remove(key)
                self._waiting.put(key, made, now)
                offset = made.end
            while self._waiting.bytes + self._given.bytes > self._limit_bytes:
                self._given.remove(self._given.first)

    def run(self, place: Place, offset: int, *, limit_bytes: int) -> list[Made]:
        """Batches from `offset` on, no more than `limit_bytes` but for the first."""
        found: list[Made] = []
        with self._lock:
            oldest = self._drop_old()
            while True:
                key = *place, offset
                held = self._waiting.get(key) or self._given.get(key)
                if held is None or held[1] <= oldest:
                    return found
                made, since = held
                limit_bytes -= len(made.batch)
                if found and limit_bytes < 0:
                    return found
                self._waiting.remove(key)
                self._given.put(key, made, since)
                found.append(made)
                offset = made.end

    def _drop_old(self) -> float:
        """From when on a batch is too old."""
        oldest = self._clock.monotonic() - _KEPT_SECONDS
        for batches in (self._waiting, self._given):
            batches.drop_until(oldest)
        return oldest


class _Batches:
    """With the time that each was made at, in the order in which they were put here."""

    def __init__(self) -> None:
        self.bytes = 0
        self._held: dict[_Key, tuple[Made, float]] = {}

    @property
    def first(self) -> _Key:
        return next(iter(self._held))

    def get(self, key: _Key) -> tuple[Made, float] | None:
        return self._held.get(key)

    def put(self, key: _Key, made: Made, since: float) -> None:
        self.remove(key)
        self._held[key] = made, since
        self.bytes += made.size

    def remove(self, key: _Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.bytes -= held[0].size

    def drop_until(self, oldest: float) -> None:
        """Of those at the front: whoever stands behind a younger one has his turn later."""
        while self._held:
            key, (_, since) = next(iter(self._held.items()))
            if since > oldest:
                return
            self.remove(key)
