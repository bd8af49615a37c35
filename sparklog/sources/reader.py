"""What an executor does: slices to batches of Spark's rows.

Names in a slice are hints. Where one is gone, compacted or trimmed since it was planned, the rest
of the slice is planned anew here, from the root, and nobody notices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.record import rows_of_run
from sparklog.sources.planner import Planner
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store, open_store
from sparklog.storage.read import read_slice
from sparklog.storage.snapshot import Located, Slice, Source

_Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All that a task must know besides its slices.

    `schema` has the columns that are wanted, by the names of `ROW_SCHEMA` and `topic`, in Spark's
    own Arrow types.
    """

    root: str
    storage: Mapping[str, str]
    schema: pa.Schema
    fail_on_data_loss: bool

    def batches(self, slices: Sequence[Slice]) -> Iterator[pa.RecordBatch]:
        """Batches of `schema`, of `SCAN_BATCH_ROWS` at most, in the order of the slices.

        Raises `TopicChanged` and `DataLoss` for what is gone for good, and what the store raises.
        """
        for run in _runs(slices):
            for batch in self._rows(run, limits.REPLAN_ATTEMPTS):
                for first in range(0, batch.num_rows, limits.SCAN_BATCH_ROWS):
                    yield self._shape(batch.slice(first, limits.SCAN_BATCH_ROWS), run[0])

    def _rows(self, run: Sequence[Slice], attempts: int) -> Iterator[pa.RecordBatch]:
        """Rows of slices that follow one another; planned again where something is gone."""
        store = _store(self.root, _hashable(self.storage))
        at = run[0].first
        try:
            for batch in self._read(store, run):
                if batch.num_rows:
                    yield batch
                    at = batch.column("offset")[-1].as_py() + 1
        except ObjectMissing as missing:
            if not attempts:
                reason = f"planned {limits.REPLAN_ATTEMPTS} times, and each time it was named"
                raise errors.MissingObject(path=missing.path, reason=reason) from missing
            for again in _runs(self._replan(run[0], at, run[-1].end)):
                yield from self._rows(again, attempts - 1)

    def _read(self, store: Store, run: Sequence[Slice]) -> Iterator[pa.RecordBatch]:
        if run[0].source is Source.WAL:
            return iter(_read_entries(store, run))
        return read_slice(store, run[0], columns=self._stored)

    @property
    def _stored(self) -> list[str]:
        """What must be read: constant columns cost less here; offsets tell how far we are."""
        constant = ("topic", "partition", "offset")
        return ["offset", *(name for name in self.schema.names if name not in constant)]

    def _replan(self, piece: Slice, first: int, end: int) -> list[Slice]:
        planner = _planner(self.root, _hashable(self.storage), piece.topic, self.fail_on_data_loss)
        planner.refresh()
        return planner.range(piece.topic, piece.topic_id, piece.partition, first, end)

    def _shape(self, rows: pa.RecordBatch, piece: Slice) -> pa.RecordBatch:
        columns = []
        for field in self.schema:
            if field.name == "topic":
                columns.append(_constant(piece.topic, rows.num_rows, field.type))
            elif field.name == "partition":
                columns.append(_constant(piece.partition, rows.num_rows, field.type))
            else:
                columns.append(rows.column(field.name))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


@functools.lru_cache(maxsize=16)
def _constant(value: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """Most batches are of one length, so their constant columns are one array."""
    return pa.repeat(pa.scalar(value, kind), count)


# ------------------------------------------------------------------------------ entries of the log


def _runs(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Slices that are read in one go: neighbours in the log up to a batch of rows; a file alone."""
    run: list[Slice] = []
    for each in slices:
        if run and not (
            each.source is run[0].source is Source.WAL
            and (each.topic_id, each.partition) == (run[0].topic_id, run[0].partition)
            and each.first == run[-1].end
            and each.end - run[0].first <= limits.SCAN_BATCH_ROWS
        ):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _read_entries(store: Store, run: Sequence[Slice]) -> list[pa.RecordBatch]:
    """Entries that follow one another, joined to as few batches as their columns allow."""
    located = [piece.entry for piece in run if piece.entry is not None]
    read = functools.partial(_read_entry, store)
    one_by_one = store.is_local or len(located) == 1
    payloads = map(read, located) if one_by_one else _threads().map(read, located)
    parts = []
    for piece, each, payload in zip(run, located, payloads, strict=True):
        entry = each.entry
        payload = payload.slice(piece.first - entry.base_offset, piece.end - piece.first)
        parts.append((piece.first, entry.arrival_us, entry.timestamp_type, payload))
    return rows_of_run(parts, partition=run[0].partition)


def _read_entry(store: Store, located: Located) -> pa.RecordBatch:
    return wal.decode_payload(located.entry, wal.read_payload(store, located))


# ------------------------------------------------------------------------------ one worker process


def _hashable(options: Mapping[str, str]) -> _Options:
    return tuple(sorted(options.items()))


@functools.lru_cache(maxsize=4)
def _store(root: str, storage: _Options) -> Store:
    return open_store(root, dict(storage))


@functools.lru_cache(maxsize=4)
def _planner(root: str, storage: _Options, topic: str, fail_on_data_loss: bool) -> Planner:
    store = _store(root, storage)
    return Planner(store, [topic], fail_on_data_loss=fail_on_data_loss, clock=SystemClock())


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """An object store answers many small reads at once, and slowly one by one."""
    return ThreadPoolExecutor(limits.READ_THREADS, thread_name_prefix="sparklog-read")
