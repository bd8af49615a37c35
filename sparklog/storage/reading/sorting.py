"""Sorts another engine's unordered rows by offset, in bounded memory.

The rows come in chunks, such as row groups, whose lowest offset is known beforehand. Each chunk is
read once, in the order of these offsets. Rows wait until no unread chunk can contain a lower
offset. Waiting rows beyond `SORT_MEMORY_BYTES` are spilled to an unnamed temporary file, which the
system removes with the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, errors, limits

SORT_MEMORY_BYTES = 64 * limits.MIB  # of rows that wait in memory; others are spilled to disk


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunk:
    """Rows that are read together, in any order."""

    first: int
    """The lowest offset."""
    last: int
    """The highest offset."""
    rises: bool
    """True if `read` yields the rows in offset order."""
    read: Callable[[], Iterator[pa.RecordBatch]]
    """Yields the rows, with a column `offset`, in batches no larger than a row group."""


def in_order(parts: Sequence[RowChunk], *, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yields all rows in offset order, in batches of at most `batch_rows`.

    Raises any read error, and `StorageUnavailable` if the temporary file cannot be written.
    """
    waiting = sorted(parts, key=lambda part: part.first)
    pending = _Pending()
    for number, part in enumerate(waiting):
        horizon = waiting[number + 1].first if number + 1 < len(waiting) else None
        if part.rises and not pending and (horizon is None or part.last < horizon):
            for batch in part.read():
                for at in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(at, batch_rows)
            continue
        for batch in part.read():
            pending.add(batch)
        yield from pending.take(horizon, batch_rows)


@dataclass(slots=True)
class _Run:
    """Rows in offset order; those before `at` have been yielded."""

    offsets: npt.NDArray[np.int64]
    rows: pa.RecordBatch
    at: int = 0

    @property
    def next(self) -> int:
        return int(self.offsets[self.at])


class _Pending:
    """Rows that have been read but not yet yielded."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._in_memory: list[_Run] = []
        self._in_memory_bytes = 0
        self._span = 0
        """The offset range of the last batch."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        run = _sorted(rows)
        self._runs.append(run)
        self._in_memory.append(run)
        self._in_memory_bytes += run.rows.nbytes
        if self._in_memory_bytes > SORT_MEMORY_BYTES:
            self._spill()

    def _spill(self) -> None:
        found = [run for run in self._in_memory if run.at < len(run.offsets)]
        for run, rows in zip(found, _on_disk([run.rows for run in found]), strict=True):
            run.rows, run.offsets = rows, arrow.as_numpy(rows.column("offset"))
        self._in_memory, self._in_memory_bytes = [], 0

    def take(self, horizon: int | None, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows below `horizon`, or all rows, in offset order; may hold back a few."""
        while self._runs:
            if horizon is not None and 2 * self._below(horizon) <= batch_rows:
                return
            low = min(run.next for run in self._runs)
            self._span = self._span or batch_rows
            while True:
                high = low + self._span if horizon is None else min(low + self._span, horizon)
                ends = [int(np.searchsorted(run.offsets, high)) for run in self._runs]
                pieces = [
                    run.rows.slice(run.at, end - run.at)
                    for run, end in zip(self._runs, ends, strict=True)
                    if end > run.at
                ]
                rows = sum(piece.num_rows for piece in pieces)
                size_bytes = sum(piece.nbytes for piece in pieces)
                is_small = rows <= batch_rows and size_bytes <= limits.ROW_GROUP_BYTES
                if is_small or high - low <= 1:
                    break
                self._span = (high - low) // 2
            for run, end in zip(self._runs, ends, strict=True):
                run.at = end
            self._runs = [run for run in self._runs if run.at < len(run.offsets)]
            if 2 * rows <= batch_rows and 2 * size_bytes <= limits.ROW_GROUP_BYTES:
                self._span *= 2  # offsets are sparse
            yield _merged(pieces)
        self._in_memory, self._in_memory_bytes = [], 0

    def _below(self, horizon: int) -> int:
        return sum(int(np.searchsorted(run.offsets, horizon)) - run.at for run in self._runs)


def _sorted(rows: pa.RecordBatch) -> _Run:
    offsets = arrow.as_numpy(rows.column("offset"))
    if not bool(np.all(offsets[1:] > offsets[:-1])):
        order = np.argsort(offsets, kind="stable")
        rows = rows.take(arrow.numbers(order, pa.int64()))
        offsets = offsets[order]
    return _Run(offsets, rows)


def _merged(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    (joined,) = pa.Table.from_batches(pieces).combine_chunks().to_batches()
    return _sorted(joined).rows


def _on_disk(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Returns the batches, memory-mapped from a temporary file."""
    if not batches:
        return []
    # In a Spark worker, Spark's folders for such files.
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    folder = next((each for each in folders if each and Path(each).is_dir()), None)
    try:
        with (
            tempfile.TemporaryFile(prefix="sparklog-sort-", dir=folder) as file,
            pa.PythonFile(file, mode="w") as sink,
        ):
            with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        location = folder or "the folder for temporary files"
        raise errors.StorageUnavailable(
            operation="sorting", path=location, reason=str(error)
        ) from error
    return list(pa.ipc.open_stream(pa.py_buffer(mapped)))
