"""Spark batches that a topic contains, so that a repeated commit is recognised.

- The newest numbered batch of a query is known for as long as its topic exists: each commit that
  publishes a batch records it in the topic's table (`storage.table.query_app_id`), and the
  write-ahead log has the unpublished batches. Numbers increase, so the newest is enough.
- A write with an idempotency key is known for `BATCH_MEMORY_SECONDS` from its publication; a topic
  retains only the newest `KEYS_REMEMBERED` keys.
- Any other write has a name that only its own driver knows. The driver may repeat the commit, so
  the write is known for a day; each partition retains only the newest ones.
- A write without a batch number is rejected if it arrives so long after its manifest that an
  earlier commit of it may have been forgotten.
- The offsets of a batch in each partition are retained for the latest batches only. If one broker
  has appended the whole batch, they only serve to answer a repeated commit, and decide nothing.
- A batch for several leaders is appended in parts, and each partition decides by what it remembers.
  So parts are forgotten by age alone, and a partition that remembers too many rejects new ones. A
  part is rejected if its manifest is so old that an earlier commit of it may have been forgotten.

The lock of the led partitions guards all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from sparklog import limits
from sparklog.storage.snapshot import BatchId, BatchKind, Entry

BATCHES_REMEMBERED = 16  # per query, with their offsets
QUERIES_REMEMBERED = 1_000  # per partition
SINGLES_REMEMBERED = 256  # published writes outside queries, per partition
PARTS_REMEMBERED = 4_096  # of writes outside queries to several leaders, per partition
SINGLE_MEMORY_SECONDS = 24 * 3600.0  # a driver repeats within a minute, unless it was suspended
APPEND_STAGED_SECONDS = limits.BATCH_MEMORY_SECONDS - 24 * 3600.0  # a write with a key
SINGLE_APPEND_STAGED_SECONDS = SINGLE_MEMORY_SECONDS - 12 * 3600.0  # a write without a name
_BATCHES_FORGOTTEN = 1_000  # dropped at a time

_Value = TypeVar("_Value")


def memory_seconds(kind: BatchKind) -> float:
    """Returns for how long a write without a batch number is known."""
    unnamed = kind is BatchKind.UNNAMED
    return SINGLE_MEMORY_SECONDS if unnamed else limits.BATCH_MEMORY_SECONDS


def append_within_seconds(kind: BatchKind) -> float:
    """Returns how old a manifest may be when its batch is appended.

    The rest of the time for which the batch is known allows for clock skew.
    """
    if kind in (BatchKind.UNNAMED, BatchKind.UNNAMED_PART, BatchKind.NAMED_PART):
        return SINGLE_APPEND_STAGED_SECONDS
    return math.inf if kind is BatchKind.NUMBERED else APPEND_STAGED_SECONDS


class SparkBatch(msgspec.Struct, frozen=True, array_like=True):
    """A query's batch in one partition: one entry, or several with consecutive offsets."""

    batch_id: BatchId
    base_offset: int
    count: int
    arrival_us: int
    kind: BatchKind = BatchKind.NUMBERED

    @property
    def end(self) -> int:
        return self.base_offset + self.count


class PartitionSparkBatches:
    """Offsets of the latest batches in one partition."""

    __slots__ = ("_numbered", "_parts", "_single")

    def __init__(self) -> None:
        # All in the order of their newest batch, so that the first is the next to expire.
        self._numbered: dict[str, tuple[SparkBatch, ...]] = {}
        self._single: dict[str, SparkBatch] = {}
        self._parts: dict[str, SparkBatch] = {}
        """Parts of single writes."""

    def __iter__(self) -> Iterator[SparkBatch]:
        for batches in self._numbered.values():
            yield from batches
        yield from self._single.values()
        yield from self._parts.values()

    def __bool__(self) -> bool:
        return bool(self._numbered or self._single or self._parts)

    def remember(self, entry: Entry, *, published: int) -> None:
        """Records rows of a batch. Call it with entries in the order of offsets.

        `published`: the end of the partition's table. Batches beyond it are never forgotten.
        """
        batch_id = entry.batch_id
        assert batch_id is not None
        batch = SparkBatch(
            batch_id, entry.base_offset, entry.count, entry.arrival_us, entry.batch_kind
        )
        if entry.batch_kind.is_numbered:
            known = self._numbered.pop(batch_id.query, ())
            if known and known[-1].batch_id == batch_id:
                known, batch = known[:-1], _extended(known[-1], entry)
            self._numbered[batch_id.query] = (*known, batch)[-BATCHES_REMEMBERED:]
            self._drop_queries()
            return
        of_kind = self._parts if entry.batch_kind.is_part else self._single
        before = of_kind.pop(batch_id.query, None)
        if before is not None and before.batch_id == batch_id:
            batch = _extended(before, entry)
        of_kind[batch_id.query] = batch
        while len(self._single) > SINGLES_REMEMBERED:
            oldest = next(iter(self._single.values()))
            if oldest.end > published:
                break
            del self._single[oldest.batch_id.query]

    def _drop_queries(self) -> None:
        """If there are too many queries, forgets the least recently active one without parts."""
        if len(self._numbered) > QUERIES_REMEMBERED:
            for query, batches in self._numbered.items():
                if not batches[-1].kind.is_part:
                    del self._numbered[query]
                    return

    def find(self, batch_id: BatchId) -> SparkBatch | None:
        """Returns the batch, or None if it is unknown or forgotten."""
        for each in self._numbered.get(batch_id.query, ()):
            if each.batch_id == batch_id:
                return each
        single = self._single.get(batch_id.query) or self._parts.get(batch_id.query)
        return single if single is not None and single.batch_id == batch_id else None

    def has_space(self, batch_id: BatchId, kind: BatchKind) -> bool:
        """Returns whether there is space to remember a further part for the required time."""
        if kind.is_numbered:
            if batch_id.query in self._numbered:
                return True
            of_parts = sum(each[-1].kind.is_part for each in self._numbered.values())
            return of_parts < QUERIES_REMEMBERED
        return batch_id.query in self._parts or len(self._parts) < PARTS_REMEMBERED

    def expire(self, now_us: int, *, published: int) -> bool:
        """Forgets batches that are too old, a bounded number per call. Returns whether it did."""
        count = 0
        horizon_us = now_us - round(limits.BATCH_MEMORY_SECONDS * 1e6)
        for batches in list(islice(self._numbered.values(), _BATCHES_FORGOTTEN)):
            if batches[-1].arrival_us >= horizon_us:
                break
            del self._numbered[batches[-1].batch_id.query]
            count += 1
        horizon_us = now_us - round(SINGLE_MEMORY_SECONDS * 1e6)
        for of_kind in (self._single, self._parts):
            for batch in list(islice(of_kind.values(), _BATCHES_FORGOTTEN)):
                if batch.arrival_us >= horizon_us or batch.end > published:
                    break
                del of_kind[batch.batch_id.query]
                count += 1
        return bool(count)

    def state(self) -> dict[str, tuple[SparkBatch, ...]]:
        """Returns all batches by query, for a checkpoint."""
        found = dict(self._numbered)
        for of_kind in (self._single, self._parts):
            for query, batch in of_kind.items():
                found[query] = (*found.get(query, ()), batch)
        return found

    def restore(self, state: Mapping[str, tuple[SparkBatch, ...]]) -> None:
        """Adds the batches from a checkpoint."""
        for query, batches in state.items():
            numbered = tuple(each for each in batches if each.kind.is_numbered)
            if numbered:
                self._numbered[query] = numbered
            for each in batches:
                if not each.kind.is_numbered:
                    of_kind = self._parts if each.kind.is_part else self._single
                    of_kind[query] = each


class TopicSparkBatches:
    """The batches that one topic contains, in any partition."""

    __slots__ = ("_begun", "_keys", "_newest", "is_known")

    def __init__(self) -> None:
        self.is_known = True
        """True if the topic's table could be read."""
        self._newest: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        """The newest batch of each query of which the topic has a part."""
        self._keys: dict[str, int] = {}
        """When each key was last written, in µs; oldest first."""

    def record(self, batch_id: BatchId, kind: BatchKind, at_us: int) -> None:
        """Records that the topic contains a batch."""
        query = batch_id.query
        if kind is BatchKind.NUMBERED:
            self._newest[query] = max(self._newest.get(query, -1), batch_id.batch)
        elif kind is BatchKind.NUMBERED_PART:
            self._begun[query] = max(self._begun.get(query, -1), batch_id.batch)
        elif kind is BatchKind.NAMED:
            self._keys.pop(query, None)
            self._keys[query] = at_us
            _drop_first(self._keys, limits.KEYS_REMEMBERED)

    def record_all(self, batches: Iterable[tuple[BatchId, BatchKind, int]]) -> None:
        """Records the batches in the topic's table."""
        for batch_id, kind, at_us in batches:
            self.record(batch_id, kind, at_us)
        self.is_known = True

    def newest(self, query: str) -> int:
        """Returns the number of the query's newest batch; -1 if it has none here."""
        return self._newest.get(query, -1)

    def begun(self, query: str) -> int:
        """Returns the newest batch of which the topic has a part or the whole; -1: none."""
        return max(self._begun.get(query, -1), self.newest(query))

    def has(self, batch_id: BatchId) -> bool:
        """Returns whether the topic surely contains the batch; nothing is known of older ones."""
        if batch_id.query in self._keys and batch_id.batch == 0:
            return True
        return self._newest.get(batch_id.query) == batch_id.batch

    def is_past(self, batch_id: BatchId) -> bool:
        """Returns whether the topic contains the batch or a later one of its query."""
        return self.has(batch_id) or self.newest(batch_id.query) > batch_id.batch

    def expire(self, now_us: int) -> None:
        """Forgets keys that are too old, a bounded number per call."""
        if not self._keys:
            return  # most topics have none, and the caller asks all of them under the lock
        horizon_us = now_us - round(limits.BATCH_MEMORY_SECONDS * 1e6)
        for query, at_us in list(islice(self._keys.items(), _BATCHES_FORGOTTEN)):
            if at_us >= horizon_us:
                break
            del self._keys[query]


def _extended(batch: SparkBatch, entry: Entry) -> SparkBatch:
    return msgspec.structs.replace(batch, count=entry.end - batch.base_offset)


def _drop_first(known: dict[str, _Value], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
