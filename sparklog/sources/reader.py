"""Reads the records of slices in a task, from the root or from a broker.

The object names in a slice are hints. If an object has been compacted or trimmed since the slice
was planned, the task replans the rest of the slice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.formats.record import between, rows_of_run
from sparklog.formats.values.columns import Plan
from sparklog.formats.values.typed import Schemas
from sparklog.sources.options import LogLocation
from sparklog.sources.planner import Planner
from sparklog.sources.selection import Selection
from sparklog.sources.task_credentials import TaskCredentials
from sparklog.sources.views import LogView, RootView
from sparklog.storage import schema_texts, wal
from sparklog.storage.objects import ObjectMissing, Store, open_store
from sparklog.storage.reading import read as storage_read
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import Located, ReadSource, Slice

_GONE = (ObjectMissing, errors.OffsetOutOfRange, errors.TopicChanged, errors.UnknownTopic)
"""Errors for a slice whose objects were removed after it was planned."""

Rows = Iterator[tuple[Slice, pa.RecordBatch]]
"""Batches of the requested columns, each with a slice of its topic and partition."""


def view_of(location: LogLocation) -> LogView:
    """Returns the view that reads are planned on."""
    if location.bootstrap is not None:
        from sparklog.sources import (
            brokers,  # imports Flight, which reads from the root do not need
        )

        return brokers.BrokerView(brokers.connection(location))
    return RootView(_store(location), clock=SystemClock())


def task_credentials_for(location: LogLocation, slices: Iterable[Slice]) -> TaskCredentials | None:
    """Returns the credentials of tasks that read the slices; None if they need none.

    Raises what a request to a broker raises.
    """
    if location.bootstrap is None:
        return None
    from sparklog.sources import brokers

    return brokers.task_credentials_for(location, {each.topic for each in slices})


def absolute(location: LogLocation) -> LogLocation:
    """Returns the location with an absolute root: executors may have a different working folder."""
    if location.root is None:
        return location
    return replace(location, root=open_store(location.root, dict(location.storage)).uri)


def read_slices(
    location: LogLocation, slices: Sequence[Slice], *, columns: list[str], fail_on_data_loss: bool
) -> Rows:
    """Yields the records of the slices, in their order.

    Args:
        columns: of `ROW_SCHEMA`, with `offset`.
        fail_on_data_loss: the option `failOnDataLoss`.

    Raises `TopicGone` and `DataLoss` for lost records, and store and broker errors.
    """
    shared = _shared_reads(location, slices)
    for run in _runs(slices):
        yield from _read_run(
            location, run, columns, fail_on_data_loss, limits.REPLAN_ATTEMPTS, shared
        )


def schemas_of(location: LogLocation, plan: Plan, topic: str) -> Schemas:
    """Returns the schemas of the values of a topic, for typed columns."""
    if location.bootstrap is None:
        return schema_texts.for_rewrite(_store(location), plan)
    from sparklog.sources import brokers

    return brokers.schemas_of(location, topic)


def _read_run(
    location: LogLocation,
    run: Sequence[Slice],
    columns: list[str],
    fail_on_data_loss: bool,
    attempts: int,
    shared: SharedReads | None,
) -> Rows:
    """Yields the rows of consecutive slices, replanning if an object is gone."""
    at = run[0].first
    try:
        for batch in _batches(location, run, columns, shared):
            if batch.num_rows:
                yield run[0], batch
                at = batch.column("offset")[-1].as_py() + 1
        return
    except _GONE as gone:
        if not attempts:
            reason = f"it was named by each of {limits.REPLAN_ATTEMPTS} plans"
            path = gone.path if isinstance(gone, ObjectMissing) else str(gone)
            raise errors.MissingObject(path=path, reason=reason) from gone
    left = _planner(location, run[0].topic, fail_on_data_loss)
    left.refresh(from_scratch=True)
    again = left.range(run[0].topic, run[0].topic_id, run[0].partition, at, run[-1].end)
    shared = _shared_reads(location, again)
    for each in _runs(again):
        yield from _read_run(location, each, columns, fail_on_data_loss, attempts - 1, shared)


def _shared_reads(location: LogLocation, slices: Iterable[Slice]) -> SharedReads | None:
    """Returns the reads of all entries of the log in the slices; None if there are none."""
    entries = [each.entry for each in slices if each.entry is not None]
    return SharedReads(_store(location), entries) if entries else None


def _runs(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Groups slices such that the rest of each group is one range if it must be replanned."""
    return storage_read.neighbours(slices, limits.SCAN_BATCH_ROWS, with_gaps=False)


def _batches(
    location: LogLocation, run: Sequence[Slice], columns: list[str], shared: SharedReads | None
) -> Iterator[pa.RecordBatch]:
    if run[0].source is ReadSource.BROKER:
        from sparklog.sources import brokers

        return brokers.read(location, run[0], columns)
    if run[0].source is ReadSource.WAL:
        assert shared is not None
        return iter(_read_entries(_store(location), run, shared))
    if len(run) > 1:
        return storage_read.read_slices(_store(location), run, columns=columns)
    return storage_read.read_slice(_store(location), run[0], columns=columns, wants_all=True)


# ------------------------------------------------------------------------------ entries of the log


def _read_entries(store: Store, run: Sequence[Slice], shared: SharedReads) -> list[pa.RecordBatch]:
    """Returns consecutive entries, joined into as few batches as their columns allow."""
    located = [piece.entry for piece in run if piece.entry is not None]
    read = functools.partial(_read_entry, shared)
    one_by_one = store.is_local or len(located) == 1
    payloads = map(read, located) if one_by_one else _threads().map(read, located)
    parts = []
    for piece, each, payload in zip(run, located, payloads, strict=True):
        entry = each.entry
        wanted = between(payload, piece.first, piece.end, base_offset=entry.base_offset)
        parts.append((piece.first, entry.arrival_us, entry.timestamp_type, wanted))
    return rows_of_run(parts, partition=run[0].partition)


def _read_entry(shared: SharedReads, located: Located) -> pa.RecordBatch:
    return wal.decode_payload(located.entry, shared.payload(located))


# ------------------------------------------------------------------------------ one worker process


@functools.lru_cache(maxsize=4)
def _store(location: LogLocation) -> Store:
    assert location.root is not None
    return open_store(location.root, dict(location.storage))


@functools.lru_cache(maxsize=4)
def _planner(location: LogLocation, topic: str, fail_on_data_loss: bool) -> Planner:
    selection = Selection(topics=(topic,))
    return Planner(view_of(location), selection, fail_on_data_loss=fail_on_data_loss)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Returns the threads that read from an object store, which is slow one request at a time."""
    return ThreadPoolExecutor(limits.READ_THREADS, thread_name_prefix="sparklog-read")
