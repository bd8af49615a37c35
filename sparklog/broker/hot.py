"""The hot tail: the newest batches of all partitions in memory, bounded by bytes.

A cache and nothing more: what was evicted is read from WAL or table. The oldest batch of all
partitions goes first. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from sparklog.storage import wal
from sparklog.storage.snapshot import Entry

_OVERHEAD_BYTES = 1_024
"""What a batch costs beside its data: objects of Python and Arrow, measured on one-row batches."""


Held: TypeAlias = pa.RecordBatch | bytes | bytearray
"""A payload, or a record batch of Kafka's: in the encoding that its entry names."""


class HotBatch(NamedTuple):
    entry: Entry
    held: Held

    @property
    def payload(self) -> pa.RecordBatch:
        """The records in columns."""
        if isinstance(self.held, pa.RecordBatch):
            return self.held
        return wal.decode_payload(self.entry, pa.py_buffer(self.held))


_Key = tuple[str, int, int]


class HotTail:
    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._batches: dict[_Key, tuple[HotBatch, int]] = {}
        """By (topic id, partition, base offset), in the order of arrival."""
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def add(self, entry: Entry, held: Held) -> None:
        size = held.nbytes if isinstance(held, pa.RecordBatch) else len(held)
        size += _OVERHEAD_BYTES
        with self._lock:
            self._batches[_key(entry)] = HotBatch(entry, held), size
            self._bytes += size
            while self._bytes > self._limit_bytes and self._batches:
                _, evicted = self._batches.pop(next(iter(self._batches)))
                self._bytes -= evicted

    def find(self, entry: Entry) -> HotBatch | None:
        """What `entry` holds, if it is still here."""
        held = self._batches.get(_key(entry))
        return held[0] if held is not None else None

    def run(
        self,
        topic_id: str,
        partition: int,
        offset: int,
        *,
        rows: int,
        limit_bytes: int,
        only_kafkas: bool = False,
        most_batches: int | None = None,
    ) -> list[HotBatch]:
        """Batches that follow one another from exactly `offset`, some `rows` rows of them.

        No more than `limit_bytes`, but for the first. Empty where no batch here begins at `offset`.

        Args:
            limit_bytes: of the batches as rows in memory, decoded; with `only_kafkas`, as they are.
            only_kafkas: up to the first that is not in Kafka's encoding.
            most_batches: no more than so many, where there may be a great many small ones.
        """
        found: list[HotBatch] = []
        while rows > 0 and len(found) != most_batches:
            held = self._batches.get((topic_id, partition, offset))
            if held is None:
                break
            batch, size = held
            if only_kafkas and isinstance(batch.held, pa.RecordBatch):
                break
            limit_bytes -= size - _OVERHEAD_BYTES if only_kafkas else batch.entry.memory_bytes
            if found and limit_bytes < 0:
                break
            found.append(batch)
            rows -= batch.entry.count
            offset = batch.entry.end
        return found


def _key(entry: Entry) -> _Key:
    return entry.topic_id, entry.partition, entry.base_offset
