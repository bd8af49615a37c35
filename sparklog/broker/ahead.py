"""Batches of Kafka's made before they are asked for: a consumer that reads old records asks on.

Reading the table and encoding its rows is worth it only for many rows at a time, and a fetch wants
few. What is left of them waits here for the next fetch. Bounded by bytes: what nobody has asked for
yet keeps its place for some seconds, because throwing it away would have it made again; what has
been given out serves whoever reads the same a little later, and goes when room is wanted.
Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from sparklog.clock import Clock

_PATIENCE_SECONDS: Final = 10.0


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
        self._fresh: dict[_Key, tuple[Made, float]] = {}
        """Not asked for yet, with the time of their coming; oldest first."""
        self._given: dict[_Key, Made] = {}
        """Asked for once at least, or for too long not at all; the next to go first."""
        self._fresh_bytes = 0
        self._given_bytes = 0

    @property
    def room_bytes(self) -> int:
        """So much may be put."""
        with self._lock:
            self._tire()
            return self._limit_bytes - self._fresh_bytes

    def put(self, place: Place, offset: int, batches: Iterable[Made]) -> None:
        """Batches that follow one another from `offset` on; those that find no room are dropped."""
        with self._lock:
            self._tire()
            now = self._clock.monotonic()
            for made in batches:
                if self._fresh_bytes + made.size > self._limit_bytes:
                    break
                self._remove((*place, offset))
                self._fresh[*place, offset] = made, now
                self._fresh_bytes += made.size
                offset = made.end
            while self._fresh_bytes + self._given_bytes > self._limit_bytes:
                self._remove(next(iter(self._given)))

    def run(self, place: Place, offset: int, *, limit_bytes: int) -> list[bytearray]:
        """Batches from `offset` on, no more than `limit_bytes` but for the first."""
        found: list[bytearray] = []
        with self._lock:
            while True:
                made = self._find((*place, offset))
                if made is None:
                    return found
                limit_bytes -= len(made.batch)
                if found and limit_bytes < 0:
                    return found
                self._give((*place, offset), made)
                found.append(made.batch)
                offset = made.end

    def _find(self, key: _Key) -> Made | None:
        fresh = self._fresh.get(key)
        return fresh[0] if fresh is not None else self._given.get(key)

    def _give(self, key: _Key, made: Made) -> None:
        self._remove(key)
        self._given[key] = made
        self._given_bytes += made.size

    def _remove(self, key: _Key) -> None:
        if key in self._fresh:
            self._fresh_bytes -= self._fresh.pop(key)[0].size
        elif key in self._given:
            self._given_bytes -= self._given.pop(key).size

    def _tire(self) -> None:
        """Who asked for the batch before has left, or is very slow."""
        oldest = self._clock.monotonic() - _PATIENCE_SECONDS
        while self._fresh:
            key, (made, came) = next(iter(self._fresh.items()))
            if came > oldest:
                return
            self._give(key, made)
