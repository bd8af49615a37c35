"""The batches of Spark queries that are in the log, and for how long that is known.

Rules of this room:

- Of a query with numbered batches the newest one is known for as long as its topic lives: each
  commit that publishes a batch says so in the topic's table (`storage.table.query_app_id`), and
  the write-ahead log has what is not published. Numbers rise, so that one number is enough.
- A write with an idempotency key is known for `BATCH_MEMORY_SECONDS` from its publication, and
  only the newest `KEYS_REMEMBERED` of a topic are.
- Any other write has a name that nobody else can know. It is remembered only for its own driver,
  which may ask again while it commits.
- Where a batch is, by partition and offset, is known of the latest ones only: it is what a repeated
  commit is answered with, and decides nothing.

The ledger's lock guards all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from sparklog import limits
from sparklog.storage.snapshot import BatchId, BatchKind, Entry

_Value = TypeVar("_Value")


class WrittenBatch(msgspec.Struct, frozen=True, array_like=True):
    """A query's batch in one partition, in one entry or in several without a hole."""

    batch_id: BatchId
    base_offset: int
    count: int
    arrival_us: int
    kind: BatchKind = BatchKind.NUMBERED

    @property
    def end(self) -> int:
        return self.base_offset + self.count


class Batches:
    """Where the latest batches are in one partition."""

    __slots__ = ("_numbered", "_single")

    def __init__(self) -> None:
        # Both in order of the newest batch, so that what is to be forgotten comes first.
        self._numbered: dict[str, tuple[WrittenBatch, ...]] = {}
        self._single: dict[str, WrittenBatch] = {}

    def __iter__(self) -> Iterator[WrittenBatch]:
        for batches in self._numbered.values():
            yield from batches
        yield from self._single.values()

    def __bool__(self) -> bool:
        return bool(self._numbered or self._single)

    def remember(self, entry: Entry, *, published: int) -> None:
        """Takes note of rows of a batch; entries come in order of offsets.

        `published`: where the partition's table ends. What is not in it is never forgotten.
        """
        batch_id = entry.batch_id
        assert batch_id is not None
        batch = WrittenBatch(
            batch_id, entry.base_offset, entry.count, entry.arrival_us, entry.batch_kind
        )
        if entry.batch_kind is BatchKind.NUMBERED:
            known = self._numbered.pop(batch_id.query, ())
            if known and known[-1].batch_id == batch_id:
                known, batch = known[:-1], _longer(known[-1], entry)
            self._numbered[batch_id.query] = (*known, batch)[-limits.BATCHES_REMEMBERED :]
            _forget_first(self._numbered, limits.QUERIES_REMEMBERED)
            return
        before = self._single.pop(batch_id.query, None)
        if before is not None and before.batch_id == batch_id:
            batch = _longer(before, entry)
        self._single[batch_id.query] = batch
        while len(self._single) > limits.SINGLES_REMEMBERED:
            oldest = next(iter(self._single.values()))
            if oldest.end > published:
                break
            del self._single[oldest.batch_id.query]

    def find(self, batch_id: BatchId) -> WrittenBatch | None:
        """The batch, as far as it is remembered."""
        for each in self._numbered.get(batch_id.query, ()):
            if each.batch_id == batch_id:
                return each
        single = self._single.get(batch_id.query)
        return single if single is not None and single.batch_id == batch_id else None

    def forget(self, now_us: int, *, published: int) -> bool:
        """Forgets what is too old, some of it at a time; whether anything was."""
        if not self:
            return False
        gone = 0
        horizon_us = now_us - round(limits.BATCH_MEMORY_SECONDS * 1e6)
        for batches in list(islice(self._numbered.values(), limits.BATCHES_FORGOTTEN)):
            if batches[-1].arrival_us >= horizon_us:
                break
            del self._numbered[batches[-1].batch_id.query]
            gone += 1
        horizon_us = now_us - round(limits.SINGLE_MEMORY_SECONDS * 1e6)
        for batch in list(islice(self._single.values(), limits.BATCHES_FORGOTTEN)):
            if batch.arrival_us >= horizon_us or batch.end > published:
                break
            del self._single[batch.batch_id.query]
            gone += 1
        return bool(gone)

    def state(self) -> dict[str, tuple[WrittenBatch, ...]]:
        """All of it, for a checkpoint."""
        found = dict(self._numbered)
        for query, batch in self._single.items():
            found[query] = (*found.get(query, ()), batch)
        return found

    def restore(self, state: Mapping[str, tuple[WrittenBatch, ...]]) -> None:
        """Takes over what a checkpoint remembers."""
        for query, batches in state.items():
            numbered = tuple(each for each in batches if each.kind is BatchKind.NUMBERED)
            if numbered:
                self._numbered[query] = numbered
            self._single.update(
                (query, each) for each in batches if each.kind is not BatchKind.NUMBERED
            )


class Standing:
    """Which batches are in one topic, whatever their partitions remember."""

    __slots__ = ("_keys", "_newest", "is_known")

    def __init__(self) -> None:
        self.is_known = True
        """Whether the topic's table could be asked."""
        self._newest: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        """When each key was last written, µs; in that order."""

    def note(self, batch_id: BatchId, kind: BatchKind, at_us: int) -> None:
        """A batch is in the topic."""
        query = batch_id.query
        if kind is BatchKind.NUMBERED:
            self._newest[query] = max(self._newest.get(query, -1), batch_id.batch)
        elif kind is BatchKind.NAMED:
            self._keys.pop(query, None)
            self._keys[query] = at_us
            _forget_first(self._keys, limits.KEYS_REMEMBERED)

    def learn(self, batches: Iterable[tuple[BatchId, BatchKind, int]]) -> None:
        """Takes note of what the topic's table has."""
        for batch_id, kind, at_us in batches:
            self.note(batch_id, kind, at_us)
        self.is_known = True

    def newest(self, query: str) -> int:
        """The number of the query's newest batch; -1 where it has none here."""
        return self._newest.get(query, -1)

    def has(self, batch_id: BatchId) -> bool:
        """Whether the batch is in the topic for sure: an older one of its query may not be."""
        if batch_id.query in self._keys and batch_id.batch == 0:
            return True
        return self._newest.get(batch_id.query) == batch_id.batch

    def is_past(self, batch_id: BatchId) -> bool:
        """Whether the batch is in the topic, or a later one of its query."""
        return self.has(batch_id) or self.newest(batch_id.query) > batch_id.batch

    def forget(self, now_us: int) -> None:
        """Forgets keys that are too old, some of them at a time."""
        horizon_us = now_us - round(limits.BATCH_MEMORY_SECONDS * 1e6)
        for query, at_us in list(islice(self._keys.items(), limits.BATCHES_FORGOTTEN)):
            if at_us >= horizon_us:
                break
            del self._keys[query]


def _longer(batch: WrittenBatch, entry: Entry) -> WrittenBatch:
    return msgspec.structs.replace(batch, count=entry.end - batch.base_offset)


def _forget_first(known: dict[str, _Value], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
