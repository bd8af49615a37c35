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
- A file with few rows omits columns that are null in all of them, as Delta allows.
- Typed columns are computed here, from the values, for each program that writes files. They are
  never taken from another file, so a rewrite fills columns that its inputs lack. Their statistics
  go to the Delta log (`column_statistics`).
- Values with schemas of a registry need the schemas. Rows whose schema is not known yet have null
  columns, and the file's tag names the schema. No rewrite makes rows wait that did not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import arrow, errors, limits
from sparklog.clock import Clock
from sparklog.formats.record import FILE_SCHEMA
from sparklog.formats.values.columns import ColumnSet, Plan, waiting_of, with_waiting
from sparklog.formats.values.typed import Schemas, Typed, no_schemas, typed_columns
from sparklog.storage.objects import Store, claim
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table.column_statistics import StatisticsCollector
from sparklog.storage.table.names import file_suffix, is_our_file, table_folder

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
_SCHEMAS_NAMED: Final = 256
_PIECE_ROWS: Final = 4_096
_PIECE_BYTES: Final = 4 * limits.MIB
"""Bounds of the values whose typed columns are computed at a time."""
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
    columns: str | None = None
    """The tag of its typed columns."""
    misfits: int = 0
    """The number of its rows with an error in a typed column."""
    statistics: str | None = None
    """See `TableFile.statistics`."""
    schemas: tuple[int, ...] = ()
    """See `TableFile.schemas`."""


class Encoder:
    """Encodes one Parquet file batch by batch; buffers the encoded bytes and one row group."""

    def __init__(
        self,
        *,
        level: int = FAST_LEVEL,
        capacity_bytes: int | None = None,
        plan: Plan | None = None,
        schemas: Schemas = no_schemas,
    ) -> None:
        """Creates an encoder.

        Args:
            level: of zstd.
            capacity_bytes: the memory for the file, allocated once and never moved. It must suffice
                for a file without typed columns; one with such columns ignores it.
            plan: the typed columns of the file.
            schemas: returns those that values refer to.
        """
        self._level = level
        self._plan = plan
        self._schemas = schemas
        self._statistics = None if plan is None else StatisticsCollector(plan)
        self._typed = _TypedFacts()
        is_bounded = capacity_bytes is not None and plan is None
        self._room = pa.allocate_buffer(capacity_bytes) if is_bounded else None
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
        for group in [table] if self._plan is None else self._with_columns(table, self._plan):
            if self._writer is None:
                options = _options(group, self._level)
                self._writer = pq.ParquetWriter(self._sink, group.schema, **options)
            self._writer.write_table(group, row_group_size=limits.ROW_GROUP_ROWS)

    def _with_columns(self, table: pa.Table, plan: Plan) -> Iterator[pa.Table]:
        """Yields row groups with typed columns, which may take far more memory than the values."""
        values = table.column("value").chunk(0)
        parts: list[list[pa.Array]] = []
        first = at = size_bytes = 0
        while at < table.num_rows:
            piece = values.slice(at, _PIECE_ROWS)
            while len(piece) > 1 and piece.nbytes > _PIECE_BYTES:
                piece = piece.slice(0, len(piece) // 2)
            typed = typed_columns(plan, piece, self._schemas)
            self._typed.add(typed)
            if self._statistics is not None:
                self._statistics.add(typed.columns)
            parts.append(typed.columns)
            size_bytes += sum(column.nbytes for column in typed.columns)
            at += len(piece)
            if size_bytes >= limits.ROW_GROUP_BYTES or at == table.num_rows:
                group = table.slice(first, at - first)
                for field, chunks in zip(plan.fields, zip(*parts, strict=True), strict=True):
                    group = group.append_column(field, pa.chunked_array(chunks, field.type))
                yield group
                first, size_bytes = at, 0
                parts.clear()

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
            columns=self._typed.tag(self._plan),
            misfits=self._typed.misfits,
            statistics=None if self._statistics is None else self._statistics.finish(),
            schemas=self._typed.named_schemas,
        )


class _TypedFacts:
    """Facts of the values of a file with typed columns."""

    def __init__(self) -> None:
        self.misfits = 0
        self._waiting: Counter[int] = Counter()
        self._schemas: set[int] = set()

    def add(self, typed: Typed) -> None:
        """Adds the facts of some values."""
        self.misfits += typed.misfits
        self._waiting.update(typed.waiting)
        if len(self._schemas) < _SCHEMAS_NAMED:
            self._schemas |= typed.schemas

    def tag(self, plan: Plan | None) -> str | None:
        """Returns the tag of the file."""
        return None if plan is None else with_waiting(plan.tag, self._waiting)

    @property
    def named_schemas(self) -> tuple[int, ...]:
        """See `TableFile.schemas`."""
        return tuple(sorted(self._schemas)[:_SCHEMAS_NAMED])


def encode(
    batches: Sequence[pa.RecordBatch],
    *,
    level: int = FAST_LEVEL,
    plan: Plan | None = None,
    schemas: Schemas = no_schemas,
) -> Encoded:
    """Encodes batches in offset order, with at least one row, as a Parquet file.

    The file has the columns of `FILE_SCHEMA` and the typed ones of the plan. Raises AssertionError
    if offsets are not strictly increasing, and what `schemas` raises.
    """
    size_bytes = sum(batch.nbytes for batch in batches)
    if size_bytes <= _SMALL_BYTES and level == FAST_LEVEL:
        return _encode_small(batches, plan, schemas)
    # Plain values take as many bytes as in Arrow; the rest is page headers and the footer.
    capacity_bytes = size_bytes + size_bytes // 16 + limits.MIB
    encoder = Encoder(level=level, capacity_bytes=capacity_bytes, plan=plan, schemas=schemas)
    for batch in batches:
        encoder.add(batch)
    return encoder.finish()


def _encode_small(
    batches: Sequence[pa.RecordBatch], plan: Plan | None, schemas: Schemas
) -> Encoded:
    """Encodes a few rows in an eighth of the time: they are not worth compressing.

    The file omits `key`, `headers` and typed columns that are null in all rows, as Delta allows.
    """
    filled = [batch.select(FILE_SCHEMA.names) for batch in batches if batch.num_rows]
    whole = filled[0] if len(filled) == 1 else pa.concat_batches(filled)
    offsets = arrow.as_numpy(whole.column("offset"))
    assert bool(np.all(offsets[1:] > offsets[:-1])), "offsets do not rise"
    assert not whole.column("timestamp").null_count, "a record without a time"
    times = arrow.as_numpy(whole.column("timestamp").view(pa.int64()))
    sink = pa.BufferOutputStream()
    # Each column costs time to write and to read.
    lacking = {name for name in _LACKED if whole.column(name).null_count == whole.num_rows}
    names = [name for name in FILE_SCHEMA.names if name not in lacking]
    schema, rows = _schema(tuple(names)), whole.select(names)
    facts, statistics = _TypedFacts(), None
    if plan is not None:
        typed = typed_columns(plan, whole.column("value"), schemas)
        facts.add(typed)
        collector = StatisticsCollector(plan)
        collector.add(typed.columns)
        statistics = collector.finish()
        for field, column in zip(plan.fields, typed.columns, strict=True):
            if column.null_count < whole.num_rows:
                schema, rows = schema.append(field), rows.append_column(field, column)
    with pq.ParquetWriter(sink, schema, **_SMALL_OPTIONS) as writer:
        writer.write_batch(rows)
    return Encoded(
        data=sink.getvalue(),
        rows=whole.num_rows,
        first=int(offsets[0]),
        last=int(offsets[-1]),
        min_timestamp_us=int(times.min()),
        max_timestamp_us=int(times.max()),
        columns=facts.tag(plan),
        misfits=facts.misfits,
        statistics=statistics,
        schemas=facts.named_schemas,
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
    leaves = _leaves(table.schema)
    codecs = {
        path: "zstd" if is_final or _has_any(table.column(name)) else "none"
        for path, name in leaves.items()
    }
    if not _shrinks(table.column("value").chunk(0)):
        codecs["value"] = "none"
    typed = [path for path, name in leaves.items() if name not in FILE_SCHEMA.names]
    with_dictionary = ["key"] if _repeats(table.column("key").chunk(0)) else []
    return {
        "use_dictionary": [*with_dictionary, *typed] or False,
        "column_encoding": _PACKED,
        "compression": codecs,
        "compression_level": {path: level for path, codec in codecs.items() if codec == "zstd"},
        "write_statistics": ["offset", "timestamp", *typed],
        "write_page_checksum": True,
        "store_schema": False,  # Parquet's types suffice
    }


@functools.lru_cache(maxsize=64)
def _leaves(schema: pa.Schema) -> dict[str, str]:
    """Returns the name of each leaf's column, by path in the notation of the writer's options."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    found = pq.read_metadata(sink.getvalue()).schema
    paths = [found.column(number).path for number in range(len(found.names))]
    return {  # a column's name may have dots too
        path: max((name for name in schema.names if f"{path}.".startswith(f"{name}.")), key=len)
        for path in paths
    }


def _has_any(column: pa.ChunkedArray) -> bool:
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


def plan_for(columns: ColumnSet | None, files: Iterable[TableFile]) -> Plan | None:
    """Returns the typed columns of a file with the rows of these files.

    They include all that the files have: a rewrite removes no values.
    """
    if columns is None:
        return None
    found = list(files)
    if all(is_our_file(unquote(file.path)) for file in found):
        return columns.plan(file.columns for file in found)
    return columns.plan_for_foreign()


def check_rewrite(encoded: Encoded, files: Sequence[TableFile]) -> None:
    """Checks that no row of these files, which the encoded one replaces, begins to wait.

    Its schema was known when it was written, so it has been removed since, or is in doubt. Raises
    `SchemaLost`.
    """
    after = waiting_of(encoded.columns)
    if not after.by_schema:
        return
    before: Counter[int] = Counter()
    for file in files:
        waiting = waiting_of(file.columns)
        if waiting.others:
            return  # not all schemas are named
        if file.columns is None and is_our_file(unquote(file.path)):
            return  # none of its rows had columns
        before.update(waiting.by_schema)
    for schema, rows in after.by_schema.items():
        if rows > before[schema]:
            raise errors.SchemaLost(schema=schema, file=files[0].path)


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
        columns=encoded.columns,
        misfits=None if encoded.columns is None else encoded.misfits,
        statistics=encoded.statistics,
        schemas=encoded.schemas,
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
    plan: Plan | None = None,
    schemas: Schemas = no_schemas,
) -> TableFile:
    """Puts rows of one partition as a data file, which a commit still has to add.

    `batches` are of `ROW_SCHEMA` or `FILE_SCHEMA`, in offset order, with at least one row. Raises
    what `claim` raises.
    """
    encoded = encode(batches, level=level, plan=plan, schemas=schemas)
    return put_file(
        store,
        encoded,
        topic=topic,
        topic_id=topic_id,
        partition=partition,
        clock=clock,
        preparation=preparation,
    )
