"""The hot tail: the newest batches of all partitions in memory, bounded by bytes.

A pure cache: evicted batches are read from the WAL or the table. The oldest batch across all
partitions is evicted first. Thread-safe.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from sparklog.storage import wal
from sparklog.storage.snapshot import Entry

_OVERHEAD_BYTES = 1_024
"""Memory of a batch in addition to its data: Python and Arrow objects, measured on one row."""


HotRecords: TypeAlias = pa.RecordBatch | bytes | bytearray
"""A payload, or a Kafka record batch, in the encoding that its entry names."""


class HotBatch(NamedTuple):
    entry: Entry
    records: HotRecords

    @property
    def payload(self) -> pa.RecordBatch:
        """The records as Arrow columns."""
        if isinstance(self.records, pa.RecordBatch):
            return self.records
        return wal.decode_payload(self.entry, pa.py_buffer(self.records))


_Key = tuple[str, int, int]


class HotTail:
    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._batches: dict[_Key, tuple[HotBatch, int]] = {}
        """By (topic id, partition, base offset), in arrival order."""
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    def add(self, entry: Entry, records: HotRecords) -> None:
        size = records.nbytes if isinstance(records, pa.RecordBatch) else len(records)
        size += _OVERHEAD_BYTES
        with self._lock:
            self._batches[_key(entry)] = HotBatch(entry, records), size
            self._bytes += size
            while self._bytes > self._limit_bytes and self._batches:
                _, evicted = self._batches.pop(next(iter(self._batches)))
                self._bytes -= evicted

    def find(self, entry: Entry) -> HotBatch | None:
        """Returns the batch of `entry`, if it is still here."""
        found = self._batches.get(_key(entry))
        return found[0] if found is not None else None

    def run(
        self,
        topic_id: str,
        partition: int,
        offset: int,
        *,
        rows: int,
        limit_bytes: int,
        only_kafka: bool = False,
        most_batches: int | None = None,
    ) -> list[HotBatch]:
        """Returns consecutive batches from exactly `offset` on, until they have `rows` rows.

        Together the batches are at most `limit_bytes` long, but the first is returned whatever its
        size. Empty if no batch here begins at `offset`.

        Args:
            rows: the number of rows to reach; the last batch may exceed it.
            limit_bytes: counts batches decoded, as Arrow columns; with `only_kafka`, as encoded.
            only_kafka: stops before the first batch that is not in Kafka's encoding.
            most_batches: the maximum number of batches, for partitions with many small ones.
        """
        found: list[HotBatch] = []
        while rows > 0 and len(found) != most_batches:
            cached = self._batches.get((topic_id, partition, offset))
            if cached is None:
                break
            batch, size = cached
            if only_kafka and isinstance(batch.records, pa.RecordBatch):
                break
            limit_bytes -= size - _OVERHEAD_BYTES if only_kafka else batch.entry.memory_bytes
            if found and limit_bytes < 0:
                break
            found.append(batch)
            rows -= batch.entry.count
            offset = batch.entry.end
        return found


def _key(entry: Entry) -> _Key:
    return entry.topic_id, entry.partition, entry.base_offset
