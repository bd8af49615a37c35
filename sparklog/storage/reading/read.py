"""Reads a slice, from Parquet files or a WAL entry, as Arrow batches of rows in offset order.

Names in a slice are hints. `ObjectMissing` means that a slice's file or object was compacted or
trimmed after it was planned: plan the same offsets again. Readers rely only on offsets and
statistics, never on the name or order of a file, since another engine may have rewritten it. They
check the CRC32 of each page that has one.

Another engine's files may be large and unordered. Only row groups with offsets in the slice are
decoded, batch by batch and up to the last of these offsets; unordered rows are sorted in bounded
memory (`storage.reading.sorting`).
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparklog import arrow, errors, limits
from sparklog.formats.record import ROW_SCHEMA, between, rows
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store, in_parallel
from sparklog.storage.reading import sorting
from sparklog.storage.reading.decode_bounds import light_rows
from sparklog.storage.reading.plan import latest_timestamp_us
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import ReadSource, RowGroup, Slice, TableFile
from sparklog.storage.table.names import data_path

SORT_OFFSETS_ROWS = 1_048_576  # of a file whose offsets are read at a time
SORT_FIRST_ROWS = 65_536  # offsets that are sorted first if not all may be needed
_SORT_GROWS = 4  # the factor by which that number grows
FILES_OPEN = 64  # files that are open at the same time
BUFFERED_GROUP_BYTES = 32 * limits.MIB  # of a row group's column; larger ones are buffered
_BUFFER_BYTES = 1 * limits.MIB
_BUFFER_REMOTE_BYTES = 8 * limits.MIB
SMALL_FILES_AT_ONCE = 16  # that one reader requests concurrently from an object store


def read_slice(
    store: Store,
    piece: Slice,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = limits.SCAN_BATCH_ROWS,
    wants_all: bool = False,
    shared: SharedReads | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields batches of `ROW_SCHEMA`, or of `columns` in their order, with the offsets of `piece`.

    Args:
        store: the store with the slice's file or object.
        piece: the slice.
        columns: names of `ROW_SCHEMA`; None: all.
        batch_rows: the maximum number of rows per batch.
        wants_all: the caller consumes all batches. Otherwise unordered rows are sorted in portions
            of increasing size, so that the first ones are cheap.
        shared: reads the entry of a slice of the log, along with those of other slices.

    Raises `ObjectMissing` (plan again), `CorruptObject` (with object and check), and
    `StorageUnavailable` if rows that do not fit in memory cannot be written to disk.
    """
    wanted = list(columns) if columns is not None else ROW_SCHEMA.names
    if piece.source is ReadSource.WAL:
        whole = _read_entry(shared or SharedReads(store, ()), piece)
        for start in range(0, whole.num_rows, batch_rows):
            yield whole.slice(start, batch_rows).select(wanted)
    else:
        with _Files(store, piece) as files:
            yield from _read_files(files, piece, wanted, batch_rows, wants_all)


def neighbours(
    slices: Iterable[Slice], batch_rows: int, *, with_gaps: bool
) -> Iterator[list[Slice]]:
    """Groups slices that are read together: up to a batch of rows of one partition.

    These are either small files of its table, one per slice, or entries of its log. Their bytes are
    bounded too, because an Arrow column holds at most 2 GiB. `with_gaps`: offsets between two
    slices of a group may be in neither.
    """
    run: list[Slice] = []
    size_bytes = 0
    for each in slices:
        if each.entry is not None:
            more_bytes, most_bytes = each.entry.entry.memory_bytes, limits.READ_RUN_BYTES
        else:
            more_bytes = sum(file.size_bytes for file in each.files)
            most_bytes = limits.SMALL_FILE_BYTES
        if run and not (
            _may_be_joined(each)
            and _may_be_joined(run[0])
            and each.source is run[0].source
            and (each.topic_id, each.partition) == (run[0].topic_id, run[0].partition)
            and (with_gaps or each.first == run[-1].end)
            and each.end - run[0].first <= batch_rows
            and size_bytes + more_bytes <= most_bytes
        ):
            yield run
            run, size_bytes = [], 0
        run.append(each)
        size_bytes += more_bytes
    if run:
        yield run


def _may_be_joined(piece: Slice) -> bool:
    """Returns whether the slice may be joined with others.

    Several files of one slice overlap, and have to be merged; a broker is asked for each slice.
    """
    return piece.source is not ReadSource.BROKER and len(piece.files) <= 1


def read_slices(
    store: Store,
    pieces: Sequence[Slice],
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = limits.SCAN_BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of neighbouring slices of a partition's table, as `read_slice` does.

    Slices of small files become one batch, as in `read_runs`. An error is raised after the rows
    before it.
    """
    if len(pieces) > 1:
        (together,) = read_runs(store, [pieces], columns=columns, batch_rows=batch_rows)
        if together is not None:
            yield together
            return
    for piece in pieces:
        yield from read_slice(store, piece, columns=columns, batch_rows=batch_rows)


def read_runs(
    store: Store,
    runs: Sequence[Sequence[Slice]],
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = limits.SCAN_BATCH_ROWS,
) -> list[pa.RecordBatch | None]:
    """Returns a batch for each run of neighbouring slices of small files, or None for a run.

    None means that `read_slices` has to find the rows, or the error. Many files are requested from
    an object store concurrently. Most of the time for a small file is per-call overhead, much of it
    from instruction cache misses. So the files of a run are handled together, and each step is done
    for all runs.
    """
    wanted = list(columns) if columns is not None else ROW_SCHEMA.names
    tables: list[list[pa.Table]] = []
    left_bytes = limits.READ_RUN_BYTES
    ahead = _read_ahead(store, runs)
    for run in runs:
        decoded = _decode_run(store, run, wanted, batch_rows, left_bytes, ahead)
        left_bytes -= sum(table.get_total_buffer_size() for table in decoded)
        tables.append(decoded)
    return [
        _in_order(of_run, run, wanted) if of_run else None
        for of_run, run in zip(tables, runs, strict=True)
    ]


def first_since(store: Store, pieces: Iterable[Slice], timestamp_us: int) -> int | None:
    """Returns the lowest offset with at least the given timestamp, as in Kafka's `ListOffsets`.

    None if no record of the slices is that late. Raises what `read_slice` raises.
    """
    for piece in pieces:
        if latest_timestamp_us(piece) >= timestamp_us:
            for rows in read_slice(store, piece, columns=("offset", "timestamp")):
                offset = first_row_since(rows, timestamp_us)
                if offset is not None:
                    return offset
    return None


def first_row_since(rows: pa.RecordBatch, timestamp_us: int) -> int | None:
    """Returns the first offset at or after a timestamp in rows with these two columns, or None."""
    timestamps_us = arrow.as_numpy(rows.column("timestamp").view(pa.int64()))
    late = np.flatnonzero(timestamps_us >= timestamp_us)
    return int(rows.column("offset")[int(late[0])].as_py()) if len(late) else None


def _read_entry(shared: SharedReads, piece: Slice) -> pa.RecordBatch:
    assert piece.entry is not None
    entry = piece.entry.entry
    payload = wal.decode_payload(entry, shared.payload(piece.entry))
    return rows(
        between(payload, piece.first, piece.end, base_offset=entry.base_offset),
        partition=piece.partition,
        base_offset=piece.first,
        timestamp_us=entry.arrival_us,
        timestamp_type=entry.timestamp_type,
    )


def row_groups(store: Store, piece: Slice) -> list[RowGroup]:
    """Returns the row groups of the slice's only file; none if their offsets are unknown.

    Raises `ObjectMissing` and `CorruptObject`.
    """
    (file,) = piece.files
    with _Files(store, piece) as files, files.reading(file) as parquet:
        found = []
        for number in range(parquet.metadata.num_row_groups):
            bounds = _bounds(parquet.metadata, number)
            if bounds is None:
                return []
            rows = parquet.metadata.row_group(number).num_rows
            found.append(RowGroup(first=bounds[0], last=bounds[1], rows=rows))
        return found


def _read_files(
    files: _Files, piece: Slice, columns: list[str], batch_rows: int, wants_all: bool
) -> Iterator[pa.RecordBatch]:
    """Yields rows in offset order; skips row groups outside the slice, and cuts off other rows.

    The offsets are read first: they determine where to cut, and whether the file is in order at
    all. A small file is read whole.
    """
    small = _read_small(files, piece, columns, batch_rows)
    if small is not None:
        if small.num_rows:
            yield small
        return
    groups = [group for file in piece.files for group in _groups(files, file, piece)]
    if len(piece.files) == 1 and _are_in_order(groups):
        if groups:
            yield from _stream(files, piece, groups, columns, batch_rows)
        return
    names = list(dict.fromkeys(["offset", *columns]))
    for first, end in [(piece.first, piece.end)] if wants_all else _steps(piece, batch_rows):
        inside = groups
        if (first, end) != (piece.first, piece.end):
            part = msgspec.structs.replace(piece, first=first, end=end)
            inside = [found for file in piece.files for found in _groups(files, file, part)]
        parts = [
            sorting.RowChunk(
                first=group.first,
                last=group.last,
                rises=group.rises,
                read=functools.partial(
                    _read_group, files, group, piece.partition, names, first, end
                ),
            )
            for group in inside
        ]
        for batch in sorting.in_order(parts, batch_rows=batch_rows):
            yield batch if names == columns else batch.select(columns)


def _steps(piece: Slice, batch_rows: int) -> Iterator[tuple[int, int]]:
    """Yields parts of the slice's range, each `_SORT_GROWS` times as long as the one before."""
    first, span = piece.first, max(batch_rows, SORT_FIRST_ROWS)
    while first < piece.end:
        end = min(first + span, piece.end)
        yield first, end
        first, span = end, span * _SORT_GROWS


# ------------------------------------------------------------------------------ offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A row group, and which of its rows have offsets in a slice."""

    file: TableFile
    number: int
    low: int
    """The first row that has one."""
    high: int
    """The row after the last that has one."""
    rows: int
    """The total number of rows in the row group."""
    first: int
    """The lowest of these offsets."""
    last: int
    """The highest of these offsets."""
    rises: bool
    """True if these offsets increase from row to row."""
    is_whole: bool
    """True if every row from `low` to `high` has an offset in the slice."""


def _groups(files: _Files, file: TableFile, piece: Slice) -> list[_Group]:
    """Returns the row groups of a file with offsets in the slice, reading only offsets."""
    found = []
    with files.reading(file) as parquet:
        metadata = parquet.metadata
        for numbers in _runs(metadata, _row_groups(parquet, piece)):
            column = parquet.read_row_groups(numbers, columns=["offset"])["offset"]
            offsets = arrow.as_numpy(column.cast(pa.int64()))
            at = 0
            for number in numbers:
                rows = metadata.row_group(number).num_rows
                group = _group(file, number, offsets[at : at + rows], piece)
                at += rows
                if group is not None:
                    found.append(group)
    return found


def _runs(metadata: pq.FileMetaData, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yields row groups whose offsets are read together."""
    run: list[int] = []
    rows = 0
    for number in numbers:
        more = metadata.row_group(number).num_rows
        if run and rows + more > SORT_OFFSETS_ROWS:
            yield run
            run, rows = [], 0
        run.append(number)
        rows += more
    if run:
        yield run


def _group(
    file: TableFile, number: int, offsets: npt.NDArray[np.int64], piece: Slice
) -> _Group | None:
    """Returns the row group, or None if no row is in the slice."""
    if _rises(offsets):
        low, high = (int(at) for at in np.searchsorted(offsets, [piece.first, piece.end]))
        if low == high:
            return None
        first, last, rises, is_whole = int(offsets[low]), int(offsets[high - 1]), True, True
    else:
        inside = np.flatnonzero((offsets >= piece.first) & (offsets < piece.end))
        if not len(inside):
            return None
        low, high = int(inside[0]), int(inside[-1]) + 1
        wanted = offsets[inside]
        first, last = int(wanted.min()), int(wanted.max())
        rises, is_whole = _rises(wanted), len(inside) == high - low
    return _Group(
        file=file,
        number=number,
        low=low,
        high=high,
        rows=len(offsets),
        first=first,
        last=last,
        rises=rises,
        is_whole=is_whole,
    )


def _are_in_order(groups: Sequence[_Group]) -> bool:
    """Returns whether the rows of the slice are in order, with no other rows in between."""
    return all(group.rises and group.is_whole for group in groups) and all(
        before.last < after.first and before.high == before.rows and not after.low
        for before, after in itertools.pairwise(groups)
    )


def _rises(offsets: npt.NDArray[np.int64]) -> bool:
    return bool(np.all(offsets[1:] > offsets[:-1]))


# ------------------------------------------------------------------------------ rows


def _stream(
    files: _Files, piece: Slice, groups: Sequence[_Group], columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file that is in order."""
    with files.reading(groups[0].file) as parquet:
        numbers = [group.number for group in groups]
        before = sum(parquet.metadata.row_group(number).num_rows for number in numbers[:-1])
        yield from _decoded(
            parquet,
            numbers,
            groups[0].low,
            before + groups[-1].high,
            partition=piece.partition,
            columns=columns,
            batch_rows=batch_rows,
        )


def _read_small(
    files: _Files, piece: Slice, columns: list[str], batch_rows: int
) -> pa.RecordBatch | None:
    """Returns all rows of the slice if its file has few rows and is in order; else None."""
    table = _decode_small(files, piece, columns, batch_rows)
    if table is None:
        return None
    if not table.num_rows:
        return pa.RecordBatch.from_pylist([], _schema(tuple(columns)))
    with files.reading(piece.files[0]):
        return _shaped(table, [table.num_rows], [piece], columns)


def _read_ahead(store: Store, runs: Sequence[Sequence[Slice]]) -> dict[str, pa.Buffer]:
    """Returns the first small files from an object store, by path; none if there is an error.

    The error is raised when the file is decoded: another engine's path may be invalid for the
    store.
    """
    if store.is_local:
        return {}
    paths: list[str] = []
    left_bytes = limits.READ_RUN_BYTES
    for piece in itertools.chain.from_iterable(runs):
        for file in piece.files:
            left_bytes -= file.size_bytes
            if left_bytes >= 0 and file.size_bytes < limits.SMALL_FILE_BYTES:
                paths.append(data_path(piece.topic, file))

    def read(path: str) -> pa.Buffer | None:
        try:
            return _first_bytes(store, path)
        except ObjectMissing:
            return None

    try:
        found = in_parallel(store, read, paths, at_once=SMALL_FILES_AT_ONCE)
    except (errors.SparklogError, OSError, ValueError):
        return {}  # the other files would have to wait for the store's retries too
    return {path: data for path, data in zip(paths, found, strict=True) if data is not None}


def _first_bytes(store: Store, path: str) -> pa.Buffer:
    """Reads all of a file, if it is as small as the table's log says."""
    return store.get_range(path, 0, limits.SMALL_FILE_BYTES)


def _decode_run(
    store: Store,
    pieces: Sequence[Slice],
    columns: list[str],
    batch_rows: int,
    most_bytes: int,
    ahead: Mapping[str, pa.Buffer],
) -> list[pa.Table]:
    """Returns the rows of each slice's file if each has few rows; else an empty list.

    The list is also empty if there is an error, or if the rows take more memory than `most_bytes`.
    `ahead`: the bytes of files that have already been read, by path.
    """
    tables: list[pa.Table] = []
    try:
        with _Files(store, pieces[0], ahead) as files:
            for piece in pieces:
                table = _decode_small(files, piece, columns, batch_rows)
                if table is None or not table.num_rows:
                    return []
                most_bytes -= table.get_total_buffer_size()
                if most_bytes < 0:
                    return []
                tables.append(table)
    except (errors.SparklogError, ObjectMissing):
        return []
    return tables


def _decode_small(
    files: _Files, piece: Slice, columns: list[str], batch_rows: int
) -> pa.Table | None:
    """Returns all rows of the slice's file if it has few rows; else None."""
    file = piece.files[0]
    if len(piece.files) > 1 or file.size_bytes > limits.SMALL_FILE_BYTES:
        return None
    with files.reading(file) as parquet:
        rows = parquet.metadata.num_rows
        if rows > min(batch_rows, light_rows(parquet.metadata, range(parquet.num_row_groups))):
            return None
        stored = [name for name in dict.fromkeys(["offset", *columns]) if name != "partition"]
        # Other threads would take longer to start than this one takes to decode it.
        return parquet.read(stored, use_threads=False)


def _in_order(
    tables: Sequence[pa.Table], pieces: Sequence[Slice], columns: list[str]
) -> pa.RecordBatch | None:
    """Returns the rows of neighbouring slices; None if they are not in order, or there are none."""
    try:
        # Some files may lack a column.
        whole = pa.concat_tables(tables, promote_options="default")
        found = _shaped(whole, [table.num_rows for table in tables], pieces, columns)
    except pa.ArrowException:  # other engines' files, with columns that differ or cannot be cast
        return None
    return found if found is not None and found.num_rows else None


def _shaped(
    table: pa.Table, counts: Sequence[int], pieces: Sequence[Slice], columns: list[str]
) -> pa.RecordBatch | None:
    """Returns the rows of the given slices; None if unordered. `counts`: rows from each file."""
    (batch,) = table.combine_chunks().to_batches()
    column = batch.column("offset")
    if column.null_count:
        return None
    offsets = arrow.as_numpy(column if column.type == pa.int64() else column.cast(pa.int64()))
    if not _rises(offsets):
        return None
    joints = itertools.accumulate(counts)
    for (piece, after), at in zip(itertools.pairwise(pieces), joints, strict=False):
        if offsets[at - 1] >= piece.end or offsets[at] < after.first:
            return None  # a file has offsets outside its slice
    low, high = (int(at) for at in np.searchsorted(offsets, [pieces[0].first, pieces[-1].end]))
    return _shape(batch.slice(low, high - low), pieces[0].partition, columns)


def _read_group(
    files: _Files, group: _Group, partition: int, columns: list[str], first: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a row group that are in the range, in file order."""
    with files.reading(group.file) as parquet:
        for batch in _decoded(
            parquet,
            [group.number],
            group.low,
            group.high,
            partition=partition,
            columns=columns,
            batch_rows=limits.ROW_GROUP_ROWS,
        ):
            if group.is_whole:
                yield batch
            else:
                offsets = arrow.as_numpy(batch.column("offset"))
                inside = batch.filter(arrow.booleans((offsets >= first) & (offsets < end)))
                if inside.num_rows:
                    yield inside


def _decoded(
    parquet: pq.ParquetFile,
    groups: list[int],
    low: int,
    high: int,
    *,
    partition: int,
    columns: list[str],
    batch_rows: int,
) -> Iterator[pa.RecordBatch]:
    """Yields rows `low` to `high` of the row groups, decoding none after them."""
    stored = [name for name in dict.fromkeys(columns) if name != "partition"]
    at = 0
    for batch in parquet.iter_batches(
        batch_size=min(batch_rows, light_rows(parquet.metadata, groups)),
        row_groups=groups,
        columns=stored or ["offset"],
    ):
        first, last = max(low - at, 0), min(high - at, batch.num_rows)
        at += batch.num_rows
        if first < last:
            yield _shape(batch.slice(first, last - first), partition, columns)
        if at >= high:
            return


# ------------------------------------------------------------------------------ files


class _Files:
    """The files of a slice, opened when they are read, a bounded number at a time."""

    def __init__(
        self, store: Store, piece: Slice, ahead: Mapping[str, pa.Buffer] = MappingProxyType({})
    ) -> None:
        """`ahead`: the bytes of small files that have already been read, by path."""
        self._store = store
        self._topic = piece.topic
        self._ahead = ahead
        self._open: OrderedDict[str, tuple[ExitStack, pq.ParquetFile]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stack, _ in self._open.values():
            stack.close()

    @contextmanager
    def reading(self, file: TableFile) -> Iterator[pq.ParquetFile]:
        """Yields the file, and adds its path to errors in reading it."""
        path = data_path(self._topic, file)
        try:
            yield self._opened(path, file)
        except errors.SparklogError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissing(path) from error
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            check = f"it is not a complete data file: {error}"
            raise errors.CorruptObject(path=path, check=check) from error

    def _opened(self, path: str, file: TableFile) -> pq.ParquetFile:
        known = self._open.get(path)
        if known is not None:
            self._open.move_to_end(path)
            return known[1]
        while len(self._open) >= FILES_OPEN:
            _, (oldest, _) = self._open.popitem(last=False)
            oldest.close()
        with ExitStack() as stack:
            source = stack.enter_context(self._source(path, file))
            parquet = open_parquet(source, is_local=self._store.is_local)
            if "offset" not in parquet.schema_arrow.names:
                raise errors.CorruptObject(path=path, check="it has no column 'offset'")
            count = parquet.metadata.num_rows
            if file.rows is not None and count != file.rows:
                raise errors.CorruptObject(
                    path=path, check=f"it holds {count} rows, but the table's log says {file.rows}"
                )
            self._open[path] = stack.pop_all(), parquet
        return parquet

    def _source(self, path: str, file: TableFile) -> pa.NativeFile:
        data = self._ahead.get(path)
        if data is not None and data.size < limits.SMALL_FILE_BYTES:
            return pa.BufferReader(data)
        return open_data_file(self._store, path, file)


def open_data_file(
    store: Store, path: str, file: TableFile, *, whole_bytes: int = limits.SMALL_FILE_BYTES
) -> pa.NativeFile:
    """Opens a data file for random access; one below `whole_bytes` is read with one request.

    Raises `ObjectMissing`, and the store's errors.
    """
    if file.size_bytes < whole_bytes:
        data = store.get_range(path, 0, whole_bytes)
        if data.size < whole_bytes:  # it is as small as the table's log says
            return pa.BufferReader(data)
    return store.open(path)


def open_parquet(
    source: pa.NativeFile, *, is_local: bool, pre_buffer: bool | None = None
) -> pq.ParquetFile:
    """Opens a data file from any writer. Spark writes timestamps as INT96, in ns.

    Columns of large row groups are read as they are used, others in full. `pre_buffer`: fetch all
    columns of a row group together; None: only from a store that is not local.
    """

    def opened(
        *, pre_buffer: bool, buffer_size: int = 0, metadata: pq.FileMetaData | None = None
    ) -> pq.ParquetFile:
        return pq.ParquetFile(
            source,
            metadata=metadata,
            buffer_size=buffer_size,
            pre_buffer=pre_buffer,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",
        )

    found = opened(pre_buffer=not is_local if pre_buffer is None else pre_buffer)
    metadata = found.metadata
    if any(_is_large(metadata.row_group(each)) for each in range(metadata.num_row_groups)):
        size = _BUFFER_BYTES if is_local else _BUFFER_REMOTE_BYTES
        return opened(pre_buffer=False, buffer_size=size, metadata=metadata)
    return found


def _is_large(group: pq.RowGroupMetaData) -> bool:
    return any(
        group.column(index).total_compressed_size > BUFFERED_GROUP_BYTES
        for index in range(group.num_columns)
    )


def _row_groups(parquet: pq.ParquetFile, piece: Slice) -> list[int]:
    """Returns the row groups that may have offsets in the slice, according to their statistics."""
    found = []
    for number in range(parquet.metadata.num_row_groups):
        bounds = _bounds(parquet.metadata, number)
        if bounds is None or (bounds[0] < piece.end and bounds[1] >= piece.first):
            found.append(number)
    return found


def _bounds(metadata: pq.FileMetaData, number: int) -> tuple[int, int] | None:
    """Returns the lowest and highest offset of a row group; None if unknown.

    A footer has no checksum: statistics that leave too few offsets for the rows are ignored.
    """
    group = metadata.row_group(number)
    statistics = group.column(_offset_leaf(metadata)).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    if statistics.max - statistics.min + 1 < group.num_rows:
        return None
    return statistics.min, statistics.max


def _offset_leaf(metadata: pq.FileMetaData) -> int:
    leaves = (metadata.schema.column(index).path for index in range(metadata.num_columns))
    return next(index for index, path in enumerate(leaves) if path == "offset")


def _shape(batch: pa.RecordBatch, partition: int, columns: list[str]) -> pa.RecordBatch:
    """Returns `batch` with exactly `columns` and the types of `ROW_SCHEMA`.

    Delta allows a file to lack a column that is null in all of its rows.
    """
    schema, names = _schema(tuple(columns)), batch.schema.names
    arrays = []
    for field in schema:
        if field.name == "partition":
            arrays.append(arrow.repeated(partition, batch.num_rows, field.type))
        elif field.name not in names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(field.name)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@functools.cache
def _schema(columns: tuple[str, ...]) -> pa.Schema:
    return pa.schema([ROW_SCHEMA.field(name) for name in columns])
