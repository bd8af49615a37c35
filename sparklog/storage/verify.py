"""Checks stored records: the files of a topic's table, and its entries in the write-ahead log.

- A file must exist and match the Delta log: its size, its number of rows, and the bounds of its
  offsets and timestamps, which let readers skip it.
- Each offset occurs once. Files with overlapping offsets, as other engines may write them, are
  checked together.
- A write-ahead log entry must decode, and match its checksum and its number of rows.

A missing file or entry may have been compacted or trimmed since it was planned: plan the same
offsets again, as when reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow, errors
from sparklog.formats.record import FILE_SCHEMA
from sparklog.storage.maintenance.file_compaction import read_rows
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.reading.read import read_slice
from sparklog.storage.snapshot import ReadSource, Slice, TableFile
from sparklog.storage.table.names import data_path

_SHOWN: Final = 100
"""The maximum number of a slice's gaps that are reported individually."""
_MILLISECOND_US: Final = 1_000
"""Another engine may truncate timestamp bounds to milliseconds."""
_INDEX: Final = ("offset", "timestamp")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A problem with stored records."""

    what: str
    advice: str


class SliceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a slice; `first` and `last` are -1 if it has no rows."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int = 0
    first: int = -1
    last: int = -1
    gaps: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """The first few ranges of offsets without a row between `first` and `last`.

    Excludes those below the offset up to which gaps are explained.
    """
    missing: int = 0
    """The number of offsets in all such ranges."""
    explained: int = 0
    """The number of other offsets without a row between `first` and `last`."""
    faults: list[Fault] = msgspec.field(default_factory=list)
    gone: str = ""
    """A file or object that no longer exists: plan again."""


def check_slice(
    store: Store, piece: Slice, *, end: int, explained: int, reads_all: bool
) -> SliceReport:
    """Checks the rows of a slice, and the files that contain them.

    Args:
        store: the store with the slice's files or object.
        piece: a slice of a whole file, of overlapping files, or of an entry.
        end: the partition's end in the table.
        explained: the offset below which gaps are explained.
        reads_all: read all columns with their checksums, instead of only offsets and timestamps.

    Raises `StorageUnavailable`.
    """
    report = SliceReport(
        topic=piece.topic, partition=piece.partition, start=piece.first, end=piece.end
    )
    faults: list[Fault] = []
    found: list[npt.NDArray[np.int64]] = []
    try:
        if piece.source is ReadSource.WAL:
            found += _entry_offsets(store, piece, faults)
        else:
            for file in piece.files:
                found += _file_offsets(store, piece.topic, file, end, faults, reads_all=reads_all)
    except ObjectMissing as missing:
        return msgspec.structs.replace(report, gone=missing.path)
    except errors.MissingObject as missing:
        return msgspec.structs.replace(report, gone=missing.path)
    offsets = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(found) > 1 and len(offsets) and not bool(np.all(np.diff(offsets) > 0)):
        offsets = np.sort(offsets)
    steps = np.diff(offsets)
    twice = np.flatnonzero(steps == 0)
    if len(twice):
        faults.append(
            Fault(
                what=f"{_place(piece)}: {len(twice):,} offsets occur twice, the first is"
                f" {offsets[twice[0]]}, in {', '.join(file.path for file in piece.files)}",
                advice="restore the table to a version before another engine last changed it",
            )
        )
    offsets = offsets[np.searchsorted(offsets, piece.first) : np.searchsorted(offsets, piece.end)]
    begins, ends = offsets[:-1] + 1, offsets[1:]
    without = int(np.maximum(ends - begins, 0).sum())
    begins = np.maximum(begins, explained)
    holes = np.flatnonzero(begins < ends)
    begins, ends = begins[holes], ends[holes]
    unexplained = int((ends - begins).sum())
    return msgspec.structs.replace(
        report,
        rows=len(offsets),
        first=int(offsets[0]) if len(offsets) else -1,
        last=int(offsets[-1]) if len(offsets) else -1,
        gaps=list(zip(begins[:_SHOWN].tolist(), ends[:_SHOWN].tolist(), strict=True)),
        missing=unexplained,
        explained=without - unexplained,
        faults=faults,
    )


def _place(piece: Slice) -> str:
    return f"{piece.topic}-{piece.partition}, offsets {piece.first} to {piece.end - 1}"


def _entry_offsets(
    store: Store, piece: Slice, faults: list[Fault]
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the offsets of an entry; reports a fault if they are not strictly increasing."""
    assert piece.entry is not None
    entry = piece.entry.entry
    count, before = 0, piece.first - 1
    try:
        for batch in read_slice(store, piece, columns=("offset",)):
            offsets = arrow.as_numpy(batch.column("offset"))
            if len(offsets) and (offsets[0] <= before or bool(np.any(np.diff(offsets) <= 0))):
                faults.append(_damaged(piece, "its offsets do not rise"))
            before = int(offsets[-1]) if len(offsets) else before
            count += len(offsets)
            yield offsets
    except errors.CorruptObject as error:
        faults.append(_damaged(piece, f"{error.path}: {error.check}"))
        return
    if (piece.first, piece.end) == (entry.base_offset, entry.end) and count != entry.rows:
        faults.append(_damaged(piece, f"it has {count} rows, but its index says {entry.rows}"))


def _damaged(piece: Slice, reason: str) -> Fault:
    return Fault(
        what=f"{_place(piece)}, in the write-ahead log: {reason}",
        advice="restore the log from a backup; these records are not in the table yet",
    )


def _file_offsets(
    store: Store,
    topic: str,
    file: TableFile,
    end: int,
    faults: list[Fault],
    *,
    reads_all: bool,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the offsets of a file in order."""
    path = data_path(topic, file)
    columns: Sequence[str] = tuple(FILE_SCHEMA.names) if reads_all else _INDEX
    earliest = latest = None
    try:
        if (size := store.stat(path).size_bytes) != file.size_bytes:
            check = f"it is {size} bytes long, but the table's log says {file.size_bytes}"
            raise errors.CorruptObject(path=path, check=check)
        for batch in read_rows(store, path, file, end, columns=columns):
            yield arrow.as_numpy(batch.column("offset"))
            times = pc.min_max(batch.column("timestamp").cast(pa.timestamp("us")).view(pa.int64()))
            low, high = times["min"].as_py(), times["max"].as_py()
            if low is not None:
                earliest = low if earliest is None else min(earliest, low)
                latest = high if latest is None else max(latest, high)
    except errors.CorruptObject as error:
        advice = "restore the file from a backup, or the table to a version before it"
        faults.append(Fault(what=f"{error.path}: {error.check}", advice=advice))
        return
    low_us, high_us = file.min_timestamp_us, file.max_timestamp_us
    if (low_us is not None and earliest is not None and earliest < low_us - _MILLISECOND_US) or (
        high_us is not None and latest is not None and latest > high_us + _MILLISECOND_US
    ):
        faults.append(
            Fault(
                what=f"{path}: its timestamps are from {earliest} to {latest} us, but the table's"
                f" log says {low_us} to {high_us}",
                advice="reads by time skip its records: rewrite the file with OPTIMIZE",
            )
        )
