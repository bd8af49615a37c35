"""Files as batches of records, ready for `Producer.send_table`.

Rules of this room:

- A line of text or of JSON *is* the value, byte for byte; a row of CSV or Parquet becomes a JSON
  object. Only a Parquet file that has nothing but a record's own columns is taken for records.
- Key and time of a record are copied from fields of it, which stay in the value. A number is its
  own digits as a key, and milliseconds since 1970 as a time; a time without a zone is UTC.
- A field that is named must be in every record; where it is null, so is the key, and the time is
  that of arrival.
- What comes from a pipe is handed on as it comes: nobody waits for a block to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedIOBase
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from sparklog import errors, limits
from sparklog.cli.formats import Fields, InputFormat
from sparklog.cli.jsonrows import json_rows, json_values, loose_values
from sparklog.client.times import timestamp_us
from sparklog.record import PAYLOAD_SCHEMA, ROW_SCHEMA, TIMESTAMP

_READ_BYTES: Final = limits.MIB


def read(
    stream: BufferedIOBase, kind: InputFormat, *, fields: Fields, name: str
) -> Iterator[pa.RecordBatch]:
    """Batches of `record.PAYLOAD_SCHEMA`'s columns, perhaps with `partition`, in order.

    Raises `BadRequest` where the content is not what `kind` says, or lacks a field; the reason
    names the place.
    """
    try:
        match kind:
            case InputFormat.TEXT:
                yield from _read_text(stream)
            case InputFormat.JSONL:
                yield from _read_jsonl(stream, fields)
            case InputFormat.CSV:
                yield from _read_csv(stream, fields)
            case InputFormat.PARQUET:
                yield from _read_parquet(stream, fields)
    except (_Wrong, pa.ArrowInvalid, pa.ArrowNotImplementedError) as wrong:
        raise errors.BadRequest(reason=f"{name}: {wrong}") from wrong


def moment_us(moment: str | int) -> int:
    """Microseconds since 1970 of ISO 8601, or of milliseconds; a time without a zone is UTC.

    Raises ValueError where it is neither, or outside the years 1 to 9999.
    """
    if isinstance(moment, str):
        if moment.removeprefix("-").isdecimal():
            moment = int(moment)
        else:
            when = datetime.fromisoformat(moment)
            return timestamp_us(when if when.tzinfo else when.replace(tzinfo=UTC))
    return timestamp_us(moment)


class _Wrong(Exception):
    """What is wrong with the input, and where."""


# ------------------------------------------------------------------------------ lines


def _read_text(stream: BufferedIOBase) -> Iterator[pa.RecordBatch]:
    for lines in _blocks_of_lines(stream):
        yield _payload({"value": pa.array(lines, pa.binary())})


def _read_jsonl(stream: BufferedIOBase, fields: Fields) -> Iterator[pa.RecordBatch]:
    parse = _line_parser(fields)
    first = 1
    for lines in _blocks_of_lines(stream):
        rows = _Rows()
        for number, line in enumerate(lines, first):
            if not line or line.isspace():
                continue
            if parse is not None:
                try:
                    parse(line, rows)
                except (msgspec.MsgspecError, ValueError) as error:
                    raise _Wrong(f"line {number}: {error}") from error
            rows.values.append(line)
        if rows.values:
            yield rows.payload()
        first += len(lines)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns under construction; keys and times stay empty where no field is asked for."""

    values: list[bytes] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    micros: list[int | None] = field(default_factory=list)

    def payload(self) -> pa.RecordBatch:
        columns = {}
        if self.micros:
            columns["timestamp"] = pa.array(self.micros, pa.int64()).view(TIMESTAMP)
        if self.keys:
            columns["key"] = pa.array(self.keys, pa.binary())
        columns["value"] = pa.array(self.values, pa.binary())
        return _payload(columns)


def _line_parser(fields: Fields) -> Callable[[bytes, _Rows], None] | None:
    """Appends key and time of a line; what else is in the line is skipped, not built."""
    wanted = [
        (name, kind, field)
        for name, kind, field in (
            ("key", msgspec.Raw, fields.key),
            ("timestamp", str | int | None, fields.timestamp),
        )
        if field is not None
    ]
    if not wanted:
        return None
    line_type = msgspec.defstruct(
        "Line",
        [(name, kind) for name, kind, _ in wanted],
        rename={name: field for name, _, field in wanted},
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(line_type).decode
    has_key, has_timestamp = fields.key is not None, fields.timestamp is not None

    def parse(line: bytes, rows: _Rows) -> None:
        found = decode(line)
        if has_timestamp:
            rows.micros.append(_moment_us(found.timestamp))
        if has_key:
            rows.keys.append(_raw_key(found.key))

    return parse


def _blocks_of_lines(stream: BufferedIOBase) -> Iterator[list[bytes]]:
    """Whole lines without their ends, as they come; the last may lack one."""
    begun: list[bytes] = []
    while data := stream.read1(_READ_BYTES):
        whole, end, rest = data.rpartition(b"\n")
        if not end:
            begun.append(data)
            continue
        yield _lines(b"".join((*begun, whole)))
        begun = [rest] if rest else []
    if begun:
        yield _lines(b"".join(begun))


def _lines(block: bytes) -> list[bytes]:
    lines = block.split(b"\n")
    if b"\r" in block:
        return [line.removesuffix(b"\r") for line in lines]
    return lines


def _raw_key(raw: msgspec.Raw) -> bytes | None:
    text = bytes(raw)
    if text == b"null":
        return None
    if text.startswith(b'"'):
        return msgspec.json.decode(text, type=str).encode()
    return text


def _moment_us(moment: str | int | None) -> int | None:
    return None if moment is None else moment_us(moment)


# ------------------------------------------------------------------------------ tables


def _read_csv(stream: BufferedIOBase, fields: Fields) -> Iterator[pa.RecordBatch]:
    reader = pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=_READ_BYTES),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        # As text, because a guess from the first block may be wrong in the second.
        convert_options=pyarrow.csv.ConvertOptions(
            default_column_type=pa.string(), strings_can_be_null=True, null_values=[""]
        ),
    )
    _check_fields(reader.schema, fields)
    first = 1
    for batch in reader:
        loose = [loose_values(column) for column in batch.columns]
        yield _rows_as_records(batch, json_rows(loose, batch.schema.names), fields, first)
        first += batch.num_rows


def _read_parquet(stream: BufferedIOBase, fields: Fields) -> Iterator[pa.RecordBatch]:
    source = stream if stream.seekable() else pa.BufferReader(stream.read())
    with pq.ParquetFile(source) as file:
        schema = file.schema_arrow
        _check_fields(schema, fields)
        are_records = fields == Fields() and _holds_records(schema)
        wanted = [*PAYLOAD_SCHEMA.names, "partition"] if are_records else schema.names
        first = 1
        for batch in file.iter_batches(
            limits.TABLE_BATCH_ROWS, columns=[name for name in schema.names if name in wanted]
        ):
            if are_records:
                yield batch
            else:
                values = [json_values(column) for column in batch.columns]
                yield _rows_as_records(batch, json_rows(values, batch.schema.names), fields, first)
            first += batch.num_rows


def _holds_records(schema: pa.Schema) -> bool:
    """Whether the rows are records already, as in the files of a topic's own table."""
    if "value" not in schema.names or not set(schema.names) <= set(ROW_SCHEMA.names):
        return False
    kind = schema.field("value").type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string(kind)


def _check_fields(schema: pa.Schema, fields: Fields) -> None:
    for column in (fields.key, fields.timestamp):
        if column is not None and column not in schema.names:
            raise _Wrong(f"no column {column!r}; there is {', '.join(schema.names)}")


def _rows_as_records(
    batch: pa.RecordBatch, values: pa.Array, fields: Fields, first: int
) -> pa.RecordBatch:
    columns = {}
    if fields.timestamp is not None:
        columns["timestamp"] = _moment_column(batch.column(fields.timestamp), first)
    if fields.key is not None:
        columns["key"] = _key_column(batch.column(fields.key))
    columns["value"] = values.cast(pa.binary())
    return _payload(columns)


def _key_column(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type):
        return column
    return column.cast(pa.string()).cast(pa.binary())


def _moment_column(column: pa.Array, first: int) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return column.cast(pa.timestamp("us", tz=getattr(kind, "tz", None))).cast(TIMESTAMP)
    if pa.types.is_integer(kind):
        return pc.multiply_checked(column.cast(pa.int64()), 1_000).view(TIMESTAMP)
    micros = []
    for number, moment in enumerate(column.cast(pa.string()).to_pylist(), first):
        try:
            micros.append(_moment_us(moment))
        except (ValueError, errors.SparklogError) as error:
            raise _Wrong(f"row {number}: {error}") from error
    return pa.array(micros, pa.int64()).view(TIMESTAMP)


def _payload(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    fields = [PAYLOAD_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
