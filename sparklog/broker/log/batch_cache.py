"""Read-ahead cache of encoded Kafka batches, for consumers of old records.

Reading the table and encoding its rows pays off only for many rows at a time, but a fetch returns
few. The rest waits here for the next fetch, but only a few seconds: rows may be removed from the
table (key compaction, another engine's DELETE), and a slow consumer can afford a second read.

Bounded by bytes. A batch that no consumer has fetched yet is never evicted, because it would have
to be encoded again. A fetched batch still serves other consumers that read the same offsets a
little later, and is evicted when space is needed. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from sparklog.clock import Clock

KEPT_SECONDS: Final = 10.0
_OVERHEAD_BYTES: Final = 384
"""Memory of a batch's Python objects in addition to its bytes: 325 bytes were measured."""


class EncodedBatch(NamedTuple):
    """A batch, and the offset that a consumer fetches after it."""

    batch: bytearray
    end: int

    @property
    def size(self) -> int:
        """Memory that the batch takes in the cache."""
        return len(self.batch) + _OVERHEAD_BYTES


TopicPartition: TypeAlias = tuple[str, int]
"""(topic id, partition)."""
_Key: TypeAlias = tuple[str, int, int]


class BatchCache:
    def __init__(self, *, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._unread = _PartitionBatches()
        """Batches that no consumer has fetched yet, oldest first."""
        self._fetched = _PartitionBatches()
        """Batches that have been fetched at least once, the next to be evicted first."""
        self._reserved_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of all batches, plus the reserved bytes."""
        return self._unread.bytes + self._fetched.bytes + self._reserved_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @contextmanager
    def reserve(self, size: int) -> Iterator[int]:
        """Reserves up to `size` bytes for this caller; yields how many it was granted."""
        with self._lock:
            self._expire()
            free = self._limit_bytes - self._unread.bytes - self._reserved_bytes
            found = max(min(size, free), 0)
            self._reserved_bytes += found
        try:
            yield found
        finally:
            with self._lock:
                self._reserved_bytes -= found

    def put(self, partition: TopicPartition, offset: int, batches: Iterable[EncodedBatch]) -> None:
        """Adds consecutive batches from `offset` on; drops those that do not fit."""
        with self._lock:
            self._expire()
            now = self._clock.monotonic()
            for encoded in batches:
                if self._unread.bytes + encoded.size > self._limit_bytes:
                    break
                key = *partition, offset
                self._fetched.remove(key)
                self._unread.put(key, encoded, now)
                offset = encoded.end
            while self._unread.bytes + self._fetched.bytes > self._limit_bytes:
                self._fetched.remove(self._fetched.first)

    def run(
        self, partition: TopicPartition, offset: int, *, limit_bytes: int
    ) -> list[EncodedBatch]:
        """Returns consecutive batches from `offset` on: at most `limit_bytes`, or one batch."""
        found: list[EncodedBatch] = []
        with self._lock:
            expired_at = self._expire()
            while True:
                key = *partition, offset
                held = self._unread.get(key) or self._fetched.get(key)
                if held is None or held[1] <= expired_at:
                    return found
                encoded, since = held
                limit_bytes -= len(encoded.batch)
                if found and limit_bytes < 0:
                    return found
                self._unread.remove(key)
                self._fetched.put(key, encoded, since)
                found.append(encoded)
                offset = encoded.end

    def _expire(self) -> float:
        """Drops old batches. Returns the time at or before which a batch is too old."""
        expired_at = self._clock.monotonic() - KEPT_SECONDS
        for batches in (self._unread, self._fetched):
            batches.drop_until(expired_at)
        return expired_at


class _PartitionBatches:
    """Batches, each with the time at which it was encoded, in insertion order."""

    def __init__(self) -> None:
        self.bytes = 0
        self._held: dict[_Key, tuple[EncodedBatch, float]] = {}

    @property
    def first(self) -> _Key:
        return next(iter(self._held))

    def get(self, key: _Key) -> tuple[EncodedBatch, float] | None:
        return self._held.get(key)

    def put(self, key: _Key, encoded: EncodedBatch, since: float) -> None:
        self.remove(key)
        self._held[key] = encoded, since
        self.bytes += encoded.size

    def remove(self, key: _Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.bytes -= held[0].size

    def drop_until(self, expired_at: float) -> None:
        """Drops expired batches from the front; those behind a younger one are dropped later."""
        while self._held:
            key, (_, since) = next(iter(self._held.items()))
            if since > expired_at:
                return
            self.remove(key)
