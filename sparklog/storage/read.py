"""Reading a slice: from Parquet files or a WAL entry to Arrow batches of rows in offset order.

Names in a slice are hints. `ObjectMissing` from here means that the slice's file or object has been
compacted or trimmed since it was planned: plan the same offsets again. The readers trust offsets
and statistics only, never a file's name or inner order: another engine may have rewritten it. They
check what each page says of its own bytes, as far as its writer has told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import arrow, errors, limits
from sparklog.record import ROW_SCHEMA, rows
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.plan import latest_timestamp_us
from sparklog.storage.snapshot import Slice, Source, TableFile
from sparklog.storage.table import data_path


def read_slice(
    store: Store,
    piece: Slice,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = limits.SCAN_BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Batches of `ROW_SCHEMA`, or of `columns` in their order, with offsets in `piece`'s range.

    Raises `ObjectMissing` (plan again) and `CorruptObject` (naming object and check).
    """
    wanted = list(columns) if columns is not None else ROW_SCHEMA.names
    if piece.source is Source.WAL:
        whole = _read_entry(store, piece)
        for start in range(0, whole.num_rows, batch_rows):
            yield whole.slice(start, batch_rows).select(wanted)
    elif len(piece.files) == 1:
        yield from _read_file(store, piece, piece.files[0], wanted, batch_rows)
    else:
        yield from _merge_files(store, piece, wanted, batch_rows)


def first_since(store: Store, pieces: Iterable[Slice], timestamp_us: int) -> int | None:
    """The least offset whose timestamp is not before the one given, as in Kafka's `ListOffsets`.

    None where no record of the slices is that late. Raises what `read_slice` raises.
    """
    for piece in pieces:
        if latest_timestamp_us(piece) >= timestamp_us:
            for rows in read_slice(store, piece, columns=("offset", "timestamp")):
                offset = first_row_since(rows, timestamp_us)
                if offset is not None:
                    return offset
    return None


def first_row_since(rows: pa.RecordBatch, timestamp_us: int) -> int | None:
    """The same within rows that have an offset and a timestamp."""
    stamps = arrow.as_numpy(rows.column("timestamp").view(pa.int64()))
    late = np.flatnonzero(stamps >= timestamp_us)
    return int(rows.column("offset")[int(late[0])].as_py()) if len(late) else None


def _read_entry(store: Store, piece: Slice) -> pa.RecordBatch:
    assert piece.entry is not None
    entry = piece.entry.entry
    payload = wal.decode_payload(entry, wal.read_payload(store, piece.entry))
    batch = rows(
        payload,
        partition=piece.partition,
        base_offset=entry.base_offset,
        timestamp_us=entry.arrival_us,
        timestamp_type=entry.timestamp_type,
    )
    return batch.slice(piece.first - entry.base_offset, piece.end - piece.first)


def _read_file(
    store: Store, piece: Slice, file: TableFile, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """One file in offset order; row groups outside the slice are skipped, other rows cut off.

    The offsets are read first: they tell where to cut, and whether the file is in order at all.
    """
    stored = [name for name in dict.fromkeys(columns) if name != "partition"]
    with _opened(store, piece, file) as parquet:
        groups = _row_groups(parquet, piece)
        offsets = arrow.as_numpy(parquet.read_row_groups(groups, columns=["offset"])["offset"])
        if not _rises(offsets):
            yield from _merge_files(store, piece, columns, batch_rows)
            return
        low = int(np.searchsorted(offsets, piece.first))
        high = int(np.searchsorted(offsets, piece.end))
        at = 0
        for batch in parquet.iter_batches(
            batch_size=min(batch_rows, _light_rows(parquet.metadata, groups)),
            row_groups=groups,
            columns=stored or ["offset"],
        ):
            first, last = max(low - at, 0), min(high - at, batch.num_rows)
            at += batch.num_rows
            if first < last:
                yield _shape(batch.slice(first, last - first), piece.partition, columns)


@contextmanager
def _opened(store: Store, piece: Slice, file: TableFile) -> Iterator[pq.ParquetFile]:
    """The file, and what goes wrong with it by its name. Spark writes times as INT96, in ns."""
    path = data_path(piece.topic, file)
    try:
        with store.open(path) as source:
            parquet = pq.ParquetFile(
                source,
                pre_buffer=not store.is_local,
                page_checksum_verification=True,
                coerce_int96_timestamp_unit="us",
            )
            if "offset" not in parquet.schema_arrow.names:
                raise errors.CorruptObject(path=path, check="has no column 'offset'")
            count = parquet.metadata.num_rows
            if file.rows is not None and count != file.rows:
                raise errors.CorruptObject(
                    path=path, check=f"holds {count} rows, and the table's log says {file.rows}"
                )
            yield parquet
    except errors.SparklogError:
        raise
    except FileNotFoundError as error:
        raise ObjectMissing(path) from error
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise errors.CorruptObject(path=path, check=f"is no whole data file: {error}") from error


def _row_groups(parquet: pq.ParquetFile, piece: Slice) -> list[int]:
    """Row groups that may hold offsets of the slice, by their statistics.

    A footer has no checksum: statistics that leave too few offsets for the rows do not count.
    """
    metadata = parquet.metadata
    leaves = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    index = leaves["offset"]
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(index).statistics
        if (
            statistics is None
            or not statistics.has_min_max
            or statistics.max - statistics.min + 1 < group.num_rows
            or (statistics.min < piece.end and statistics.max >= piece.first)
        ):
            found.append(number)
    return found


def _light_rows(metadata: pq.FileMetaData, groups: Sequence[int]) -> int:
    """As many rows as are no heavier than `FILE_BATCH_BYTES`, by their average."""
    found = [metadata.row_group(number) for number in groups]
    size_bytes = sum(group.total_byte_size for group in found)
    rows = sum(group.num_rows for group in found)
    return max(limits.FILE_BATCH_BYTES * rows // max(size_bytes, 1), 1)


def _merge_files(
    store: Store, piece: Slice, columns: list[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Files out of order or overlapping: rare (another engine wrote them), so sorted in memory."""
    names = list(dict.fromkeys(["offset", *columns]))
    batches = []
    for file in piece.files:
        with _opened(store, piece, file) as parquet:
            found = parquet.read(columns=names).to_batches()
            batches += [_shape(batch, piece.partition, names) for batch in found]
    table = pa.Table.from_batches(batches, schema=_schema(names))
    inside = pc.and_(
        pc.greater_equal(table["offset"], arrow.number(piece.first, pa.int64())),
        pc.less(table["offset"], arrow.number(piece.end, pa.int64())),
    )
    ordered = table.filter(inside).sort_by("offset").combine_chunks()
    for batch in ordered.to_batches(max_chunksize=batch_rows):
        yield _shape(batch, piece.partition, columns)


def _rises(offsets: npt.NDArray[np.int64]) -> bool:
    return bool(np.all(offsets[1:] > offsets[:-1]))


def _shape(batch: pa.RecordBatch, partition: int, columns: list[str]) -> pa.RecordBatch:
    """`batch` with exactly `columns`, of exactly `ROW_SCHEMA`'s types.

    Delta has a file lack a column that is null in all of its rows.
    """
    schema = _schema(columns)
    arrays = []
    for field in schema:
        if field.name == "partition":
            arrays.append(arrow.repeated(partition, batch.num_rows, field.type))
        elif field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(field.name)
            arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([ROW_SCHEMA.field(name) for name in columns])
