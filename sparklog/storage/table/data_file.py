"""Encodes, names and puts the Parquet files of a topic's table.

Rules:

- This module knows nothing about commits: a new file becomes part of the table only when
  `TopicTable.commit` adds it, and is an orphan otherwise. So its name is random, and no file is
  ever overwritten.
- Offsets are strictly increasing within a file; this is checked before a byte is written.
- Row groups are bounded in rows and bytes, and none spans a multiple of `ROW_GROUP_ROWS` rows of
  its file, so that a file can be split there between row groups.
- Offset and timestamp have statistics, which let readers skip data. Offsets and timestamps are
  delta-encoded, and repeated keys are dictionary-encoded. Incompressible values are stored
  unchanged, which costs nothing to write or read.
- Each page has a CRC32, so that compaction never copies bytes that a disk has damaged.
- A file with few rows omits the column of keys or headers if all of them are null, as Delta allows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import arrow, limits
from sparklog.clock import Clock
from sparklog.formats.record import FILE_SCHEMA
from sparklog.storage.objects import Store, claim
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table.names import file_suffix, table_folder

FAST_LEVEL: Final = 1
"""The zstd level for files to be merged soon: 5 million short records per second per core."""
SMALL_LEVEL: Final = 6
"""The zstd level for other files: an eighth smaller than at level 1, at a quarter of its speed."""

_SAMPLE_BYTES: Final = 32 * limits.KIB
_SAMPLE_ROWS: Final = 1_024
_WORTH_COMPRESSING: Final = 0.9
_WORTH_A_DICTIONARY: Final = 0.5
_SMALL_BYTES: Final = 8 * limits.KIB
_PACKED: Final = dict.fromkeys(("offset", "timestamp", "timestampType"), "DELTA_BINARY_PACKED")
_LACKED: Final = ("key", "headers")
_SMALL_OPTIONS: Final[dict[str, Any]] = {
    "use_dictionary": False,
    "column_encoding": _PACKED,
    "compression": "none",
    "write_statistics": ["offset", "timestamp"],
    "write_page_checksum": True,
    "store_schema": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The bytes of a data file and the facts for its log entry; both bounds are inclusive."""

    data: pa.Buffer
    rows: int
    first: int
    last: int
    min_timestamp_us: int
    max_timestamp_us: int


class Encoder:
    """Encodes one Parquet file batch by batch; buffers the encoded bytes and one row group."""

    def __init__(self, *, level: int = FAST_LEVEL, capacity_bytes: int | None = None) -> None:
        """With `capacity_bytes`, which must suffice, memory is allocated once and never moved."""
        self._level = level
        self._room = None if capacity_bytes is None else pa.allocate_buffer(capacity_bytes)
        self._sink = (
            pa.BufferOutputStream() if self._room is None else pa.FixedSizeBufferWriter(self._room)
        )
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._rows = 0
        self._first = 0
        self._last = -1
        self._min_timestamp_us = limits.TIMESTAMP_MAX_US
        self._max_timestamp_us = limits.TIMESTAMP_MIN_US

    def add(self, batch: pa.RecordBatch) -> None:
        """Appends rows of `ROW_SCHEMA` or `FILE_SCHEMA`."""
        for piece in _pieces(batch.select(FILE_SCHEMA.names)):
            # Large pieces become row groups of their own: joining would copy them.
            if self._waiting_bytes + piece.nbytes > limits.ROW_GROUP_BYTES and self._waiting:
                self._write(self._waiting_rows)
            self._waiting.append(piece)
            self._waiting_rows += piece.num_rows
            self._waiting_bytes += piece.nbytes
            while self._waiting_rows >= self._missing_rows:
                self._write(self._missing_rows)
            if self._waiting_bytes >= limits.ROW_GROUP_BYTES:
                self._write(self._waiting_rows)

    @property
    def size_bytes(self) -> int:
        """The size of the row groups encoded so far."""
        return int(self._sink.tell())

    @property
    def _missing_rows(self) -> int:
        """The maximum number of rows in the next row group."""
        return limits.ROW_GROUP_ROWS - self._rows % limits.ROW_GROUP_ROWS

    def _write(self, rows: int) -> None:
        """Writes the first `rows` of the waiting rows as one row group."""
        waiting = pa.Table.from_batches(self._waiting)
        self._waiting = waiting.slice(rows).to_batches()
        self._waiting_rows -= rows
        self._waiting_bytes = sum(each.nbytes for each in self._waiting)
        table = waiting.slice(0, rows).combine_chunks()  # each chunk of each column has a cost
        del waiting  # otherwise the combined rows are in memory twice
        self._note(table)
        if self._writer is None:
            options = _options(table, self._level)
            self._writer = pq.ParquetWriter(self._sink, FILE_SCHEMA, **options)
        self._writer.write_table(table, row_group_size=limits.ROW_GROUP_ROWS)

    def _note(self, table: pa.Table) -> None:
        offsets = arrow.as_numpy(table.column("offset"))
        assert offsets[0] > self._last, f"offset {offsets[0]} follows {self._last}"
        assert bool(np.all(offsets[1:] > offsets[:-1])), "offsets do not rise"
        times = table.column("timestamp")
        assert not times.null_count, "a record without a time"
        bounds = pc.min_max(times.cast(pa.int64()))
        if not self._rows:
            self._first = int(offsets[0])
        self._last = int(offsets[-1])
        self._rows += table.num_rows
        self._min_timestamp_us = min(self._min_timestamp_us, bounds["min"].as_py())
        self._max_timestamp_us = max(self._max_timestamp_us, bounds["max"].as_py())

    def finish(self) -> Encoded:
        """Returns the whole file. Raises AssertionError if no row was added."""
        if self._waiting_rows:
            self._write(self._waiting_rows)
        assert self._writer is not None, "no rows"
        self._writer.close()
        if self._room is None:
            data = self._sink.getvalue()
        else:
            data = self._room.slice(0, self._sink.tell())
        return Encoded(
            data=data,
            rows=self._rows,
            first=self._first,
            last=self._last,
            min_timestamp_us=self._min_timestamp_us,
            max_timestamp_us=self._max_timestamp_us,
        )


def encode(batches: Sequence[pa.RecordBatch], *, level: int = FAST_LEVEL) -> Encoded:
    """Encodes batches in offset order, with at least one row, as a Parquet file of `FILE_SCHEMA`.

    Raises AssertionError if offsets are not strictly increasing.
    """
    size_bytes = sum(batch.nbytes for batch in batches)
    if size_bytes <= _SMALL_BYTES and level == FAST_LEVEL:
        return _encode_small(batches)
    # Plain values take as many bytes as in Arrow; the rest is page headers and the footer.
    encoder = Encoder(level=level, capacity_bytes=size_bytes + size_bytes // 16 + limits.MIB)
    for batch in batches:
        encoder.add(batch)
    return encoder.finish()


def _encode_small(batches: Sequence[pa.RecordBatch]) -> Encoded:
    """Encodes a few rows in an eighth of the time: they are not worth compressing.

    The file omits `key` and `headers` if they are null in all rows, as Delta allows.
    """
    rows = [batch.select(FILE_SCHEMA.names) for batch in batches if batch.num_rows]
    whole = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
    offsets = arrow.as_numpy(whole.column("offset"))
    assert bool(np.all(offsets[1:] > offsets[:-1])), "offsets do not rise"
    assert not whole.column("timestamp").null_count, "a record without a time"
    times = arrow.as_numpy(whole.column("timestamp").view(pa.int64()))
    sink = pa.BufferOutputStream()
    # Each column costs time to write and to read.
    lacking = {name for name in _LACKED if whole.column(name).null_count == whole.num_rows}
    names = [name for name in FILE_SCHEMA.names if name not in lacking]
    with pq.ParquetWriter(sink, _schema(tuple(names)), **_SMALL_OPTIONS) as writer:
        writer.write_batch(whole.select(names))
    return Encoded(
        data=sink.getvalue(),
        rows=whole.num_rows,
        first=int(offsets[0]),
        last=int(offsets[-1]),
        min_timestamp_us=int(times.min()),
        max_timestamp_us=int(times.max()),
    )


@functools.cache
def _schema(names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([FILE_SCHEMA.field(name) for name in names])


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields the batch in pieces no larger than a row group, except for a larger single row."""
    at = 0
    while at < batch.num_rows:
        piece = batch.slice(at)
        while piece.num_rows > 1 and piece.nbytes > limits.ROW_GROUP_BYTES:
            piece = piece.slice(0, piece.num_rows // 2)
        yield piece
        at += piece.num_rows


def _options(table: pa.Table, level: int) -> dict[str, Any]:
    is_final = level > FAST_LEVEL
    codecs = {path: "zstd" if is_final or _has_any(table, path) else "none" for path in _leaves()}
    if not _shrinks(table.column("value").chunk(0)):
        codecs["value"] = "none"
    return {
        "use_dictionary": ["key"] if _repeats(table.column("key").chunk(0)) else False,
        "column_encoding": _PACKED,
        "compression": codecs,
        "compression_level": {path: level for path, codec in codecs.items() if codec == "zstd"},
        "write_statistics": ["offset", "timestamp"],
        "write_page_checksum": True,
        "store_schema": False,  # Parquet's types suffice
    }


@functools.cache
def _leaves() -> tuple[str, ...]:
    """Returns the column paths in the notation of the Parquet writer's options."""
    sink = pa.BufferOutputStream()
    pq.write_table(FILE_SCHEMA.empty_table(), sink)
    found = pq.read_metadata(sink.getvalue()).schema
    return tuple(found.column(number).path for number in range(len(found.names)))


def _has_any(table: pa.Table, path: str) -> bool:
    column = table.column(path.partition(".")[0])
    return bool(column.null_count < len(column))


def _shrinks(values: pa.Array) -> bool:
    """Returns whether zstd shrinks a sample of the values by more than a tenth."""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(values) + 1, 4 * values.offset)
    size = min(int(bounds[-1] - bounds[0]), _SAMPLE_BYTES)
    if not size:
        return True
    sample = data.slice(int(bounds[0]), size)
    return pa.Codec("zstd", FAST_LEVEL).compress(sample).size < _WORTH_COMPRESSING * size


def _repeats(keys: pa.Array) -> bool:
    sample = keys.slice(0, _SAMPLE_ROWS)
    return pc.count_distinct(sample).as_py() <= _WORTH_A_DICTIONARY * len(sample)


# ------------------------------------------------------------------------------ files


def new_file(
    encoded: Encoded,
    *,
    topic_id: str,
    partition: int,
    clock: Clock,
    preparation: int | None = None,
) -> TableFile:
    """Returns the entry of a file under a new name; the file still has to be put."""
    # A name of this form marks a file as ours: `names.is_our_file`.
    name = f"{topic_id}-{encoded.first}-{encoded.last}-{file_suffix(preparation)}.parquet"
    return TableFile(
        path=f"partition={partition}/{name}",
        partition=partition,
        size_bytes=encoded.data.size,
        rows=encoded.rows,
        first=encoded.first,
        last=encoded.last,
        min_timestamp_us=encoded.min_timestamp_us,
        max_timestamp_us=encoded.max_timestamp_us,
        # Its age counts from before the put; the log stores milliseconds.
        modified_us=clock.now_us() // 1_000 * 1_000,
    )


def put_file(
    store: Store,
    encoded: Encoded,
    *,
    topic: str,
    topic_id: str,
    partition: int,
    clock: Clock,
    preparation: int | None = None,
) -> TableFile:
    """Puts the file durably under a new name. Raises what `claim` raises."""
    file = new_file(
        encoded, topic_id=topic_id, partition=partition, clock=clock, preparation=preparation
    )
    ours = claim(store, f"{table_folder(topic)}/{file.path}", encoded.data, clock=clock)
    assert ours, file.path
    return file


def write_file(
    store: Store,
    *,
    topic: str,
    topic_id: str,
    partition: int,
    batches: Sequence[pa.RecordBatch],
    clock: Clock,
    level: int = FAST_LEVEL,
    preparation: int | None = None,
) -> TableFile:
    """Puts rows of one partition as a data file, which a commit still has to add.

    `batches` are of `ROW_SCHEMA` or `FILE_SCHEMA`, in offset order, with at least one row. Raises
    what `claim` raises.
    """
    encoded = encode(batches, level=level)
    return put_file(
        store,
        encoded,
        topic=topic,
        topic_id=topic_id,
        partition=partition,
        clock=clock,
        preparation=preparation,
    )
