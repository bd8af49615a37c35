"""Records of slices, in a task: from the root, or from a broker.

Names in a slice are hints. Where one is gone, compacted or trimmed since it was planned, the rest
of the slice is planned anew here, and nobody notices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.record import rows_of_run
from sparklog.sources.options import Place
from sparklog.sources.planner import Planner
from sparklog.sources.selection import Selection
from sparklog.sources.views import RootView, View
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store, open_store
from sparklog.storage.read import read_slice
from sparklog.storage.snapshot import Located, Slice, Source

_GONE = (ObjectMissing, errors.OffsetOutOfRange, errors.TopicChanged, errors.UnknownTopic)
"""What a task may find of a slice that was planned a while ago."""

Rows = Iterator[tuple[Slice, pa.RecordBatch]]
"""Batches with the columns asked for, each with a slice that tells topic and partition."""


def view_of(place: Place) -> View:
    """Where planning looks."""
    if place.bootstrap is not None:
        from sparklog.sources import brokers  # Flight, which reading by the root never needs

        return brokers.BrokerView(brokers.connection(place.bootstrap))
    return RootView(_store(place), clock=SystemClock())


def read_slices(
    place: Place, slices: Sequence[Slice], *, columns: list[str], fail_on_data_loss: bool
) -> Rows:
    """The records of the slices, in their order.

    Args:
        columns: of `ROW_SCHEMA`, `offset` among them: it tells how far we are.
        fail_on_data_loss: as the option says.

    Raises `TopicGone` and `DataLoss` for what is gone for good, and what store and broker raise.
    """
    for run in _runs(slices):
        yield from _read_run(place, run, columns, fail_on_data_loss, limits.REPLAN_ATTEMPTS)


def _read_run(
    place: Place,
    run: Sequence[Slice],
    columns: list[str],
    fail_on_data_loss: bool,
    attempts: int,
) -> Rows:
    """Rows of slices that follow one another; planned again where something is gone."""
    at = run[0].first
    try:
        for batch in _batches(place, run, columns):
            if batch.num_rows:
                yield run[0], batch
                at = batch.column("offset")[-1].as_py() + 1
        return
    except _GONE as gone:
        if not attempts:
            reason = f"planned {limits.REPLAN_ATTEMPTS} times, and each time it was named"
            path = gone.path if isinstance(gone, ObjectMissing) else str(gone)
            raise errors.MissingObject(path=path, reason=reason) from gone
    left = _planner(place, run[0].topic, fail_on_data_loss)
    left.refresh(anew=True)
    again = left.range(run[0].topic, run[0].topic_id, run[0].partition, at, run[-1].end)
    for each in _runs(again):
        yield from _read_run(place, each, columns, fail_on_data_loss, attempts - 1)


def _batches(place: Place, run: Sequence[Slice], columns: list[str]) -> Iterator[pa.RecordBatch]:
    if run[0].source is Source.BROKER:
        from sparklog.sources import brokers

        assert place.bootstrap is not None
        return brokers.read(place.bootstrap, run[0], columns)
    if run[0].source is Source.WAL:
        return iter(_read_entries(_store(place), run))
    return read_slice(_store(place), run[0], columns=columns, wants_all=True)


# ------------------------------------------------------------------------------ entries of the log


def _runs(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Slices that are read in one go: neighbours in the log up to a batch of rows; a file alone.

    What is joined is bounded in memory too: a column of it must not exceed what Arrow can hold.
    """
    run: list[Slice] = []
    size_bytes = 0
    for each in slices:
        more_bytes = 0 if each.entry is None else each.entry.entry.memory_bytes
        if run and not (
            each.source is run[0].source is Source.WAL
            and (each.topic_id, each.partition) == (run[0].topic_id, run[0].partition)
            and each.first == run[-1].end
            and each.end - run[0].first <= limits.SCAN_BATCH_ROWS
            and size_bytes + more_bytes <= limits.READ_RUN_BYTES
        ):
            yield run
            run, size_bytes = [], 0
        run.append(each)
        size_bytes += more_bytes
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


@functools.lru_cache(maxsize=4)
def _store(place: Place) -> Store:
    assert place.root is not None
    return open_store(place.root, dict(place.storage))


@functools.lru_cache(maxsize=4)
def _planner(place: Place, topic: str, fail_on_data_loss: bool) -> Planner:
    selection = Selection(topics=(topic,))
    return Planner(view_of(place), selection, fail_on_data_loss=fail_on_data_loss)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """An object store answers many small reads at once, and slowly one by one."""
    return ThreadPoolExecutor(limits.READ_THREADS, thread_name_prefix="sparklog-read")
