"""Reads files as batches of records for `Producer.send_table`.

Rules:

- A line of text or JSON is the value, byte for byte. A row of CSV or Parquet becomes a JSON object.
  A Parquet file is read as records only if all of its columns are columns of records.
- Key and timestamp are copied from fields, which stay in the value. A number as key is its digits;
  as timestamp, milliseconds since 1970. A time without a zone is UTC.
- A line of JSON is validated before it is sent. At an invalid line, either all lines before it are
  yielded and none after it, so that a command can continue there without duplicates; or the line
  is written to a file.
- Each record must have the named fields. A null key field yields a null key, and a null timestamp
  field the time of arrival.
- Input from a pipe is yielded as it arrives, without waiting for a full block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedIOBase
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import errors, limits
from sparklog.cli.formats import Fields, InputFormat
from sparklog.cli.json_rows import json_rows, json_values, loose_values
from sparklog.client.times import timestamp_us
from sparklog.formats.record import PAYLOAD_SCHEMA, ROW_SCHEMA, TIMESTAMP

_READ_BYTES: Final = limits.MIB
_START_BYTES: Final = 4 * limits.KIB
_EXCERPT_BYTES: Final = 80
_FORMAT_NAMES: Final = {
    InputFormat.JSONL: "lines of JSON",
    InputFormat.TEXT: "lines of text",
    InputFormat.CSV: "CSV",
}


@dataclass(slots=True)
class Lines:
    """The range of lines to read, the progress of reading, and the file for invalid lines."""

    first: int = 1
    """Lines before this one are skipped."""
    at: int = 1
    """The first line of the last batch."""
    next: int = 1
    """The line after the last batch."""
    count: int | None = None
    """The number of lines of the input, once its end has been read."""
    bad: BinaryIO | None = None
    """The file for invalid lines; None: the first one is an error."""
    bad_count: int = 0
    is_line_wrong: bool = False
    """An invalid line, which could have been written to `bad`, has ended the reading."""


def read(
    stream: BufferedIOBase,
    kind: InputFormat,
    *,
    fields: Fields,
    name: str,
    is_guessed: bool = False,
    lines: Lines | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields batches with columns of `record.PAYLOAD_SCHEMA`, and possibly `partition`, in order.

    Args:
        stream: the input.
        kind: its format.
        fields: the fields that are key and timestamp.
        name: the name of the input for errors.
        is_guessed: the format was derived from the name: reject binary input as text.
        lines: the lines to read, in a line-based format; updated while reading.

    Raises:
        errors.BadRequest: the content does not have the format `kind`, or lacks a field; the reason
            names the position. In a line-based format, everything before it has been yielded.
    """
    lines = lines or Lines()
    lines.at = lines.next = lines.first
    try:
        if kind is not InputFormat.PARQUET:
            _check_start(_start_of(stream), kind, is_guessed)
        match kind:
            case InputFormat.TEXT:
                yield from _read_text(stream, lines)
            case InputFormat.JSONL:
                yield from _read_jsonl(stream, fields, lines)
            case InputFormat.CSV:
                yield from _read_csv(stream, fields)
            case InputFormat.PARQUET:
                yield from _read_parquet(stream, fields)
    except (_BadInput, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise errors.BadRequest(reason=f"{name}: {error}") from error


def moment_us(moment: str | int) -> int:
    """Returns microseconds since 1970 for ISO 8601 (UTC by default) or milliseconds.

    Raises ValueError for other text, and for times outside the years 1 to 9999.
    """
    if isinstance(moment, str):
        if moment.removeprefix("-").isdecimal():
            moment = int(moment)
        else:
            when = datetime.fromisoformat(moment)
            return timestamp_us(when if when.tzinfo else when.replace(tzinfo=UTC))
    return timestamp_us(moment)


class _BadInput(Exception):
    """A defect of the input, with its position."""


# ------------------------------------------------------------------------------ beginnings

_UTF8_MARK: Final = b"\xef\xbb\xbf"
_OTHER_MARKS: Final = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_COMPRESSED: Final = {
    b"\x1f\x8b": ("gzip", "zcat"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstdcat"),
    b"BZh": ("bzip2", "bzcat"),
    b"\xfd7zXZ\x00": ("xz", "xzcat"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
_PARQUET: Final = b"PAR1"


def _start_of(stream: BufferedIOBase) -> bytes:
    """Returns the first bytes of the stream without consuming them."""
    if hasattr(stream, "peek"):
        start: bytes = stream.peek(_START_BYTES)
        return start
    start = stream.read(_START_BYTES)
    stream.seek(-len(start), os.SEEK_CUR)
    return start


def _check_start(start: bytes, kind: InputFormat, is_guessed: bool) -> None:
    """Raises `_BadInput` if the input is not lines of text, or must be converted first."""
    if kind is InputFormat.TEXT and not is_guessed:
        return  # any bytes are allowed
    for mark, encoding in _OTHER_MARKS.items():
        if start.startswith(mark):
            convert = f"convert it to UTF-8, for example with iconv -f {encoding} -t UTF-8"
            raise _BadInput(f"it begins with a byte order mark of {encoding}: {convert}")
    if start.startswith(_UTF8_MARK) and kind is not InputFormat.CSV:
        without = "remove it, for example with tail -c +4"
        raise _BadInput(
            f"it begins with a byte order mark, which would become part of a value: {without}"
        )
    for magic, (compression, command) in _COMPRESSED.items():
        if start.startswith(magic):
            raise _BadInput(f"it is compressed with {compression}: send the output of {command}")
    if start.startswith(_PARQUET):
        raise _BadInput("it is a Parquet file: pass --format parquet")
    if b"\0" in start:
        advice = "; --format text sends its lines unchanged" if is_guessed else ""
        raise _BadInput(f"it is a binary file, not {_FORMAT_NAMES[kind]}{advice}")


# ------------------------------------------------------------------------------ lines


def _read_text(stream: BufferedIOBase, lines: Lines) -> Iterator[pa.RecordBatch]:
    for begin, block in _blocks_of_lines(stream, lines):
        values = _split(block)
        lines.at, lines.next = begin, begin + len(values)
        yield _payload({"value": pa.array(values, pa.binary())})


def _read_jsonl(stream: BufferedIOBase, fields: Fields, lines: Lines) -> Iterator[pa.RecordBatch]:
    parse = _line_parser(fields)
    for begin, block in _blocks_of_lines(stream, lines):
        check = _accept if _is_utf8(block) else bytes.decode
        rows = _Rows()
        failure = None
        lines.at = lines.next = begin
        for number, line in enumerate(_split(block), begin):
            lines.next = number
            if not line or line.isspace():
                continue
            try:
                check(line)
                parse(line, rows)
            except (msgspec.MsgspecError, ValueError) as error:
                if lines.bad is None:
                    lines.is_line_wrong = True
                    failure = _BadInput(f"line {number}: {error}: {_excerpt(line)}")
                    break
                lines.bad.write(line + b"\n")
                lines.bad_count += 1
            else:
                rows.values.append(line)
        else:
            lines.next += 1
        if rows.values:
            yield rows.payload()
        if failure is not None:
            raise failure


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _accept(_: bytes) -> None:
    pass


def _excerpt(line: bytes) -> str:
    text = line[:_EXCERPT_BYTES].decode(errors="backslashreplace")
    return text if len(line) <= _EXCERPT_BYTES else f"{text}…"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns under construction; keys and timestamps stay empty without their fields."""

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


def _line_parser(fields: Fields) -> Callable[[bytes, _Rows], None]:
    """Returns a function that checks a line and appends its key and timestamp."""
    wanted = [
        (name, kind, field)
        for name, kind, field in (
            ("key", msgspec.Raw, fields.key),
            ("timestamp", str | int | None, fields.timestamp),
        )
        if field is not None
    ]
    if not wanted:
        check = msgspec.json.Decoder(msgspec.Raw).decode

        def only_check(line: bytes, _: _Rows) -> None:
            check(line)

        return only_check
    line_type = msgspec.defstruct(
        "Line",
        [(name, kind) for name, kind, _ in wanted],
        rename={name: field for name, _, field in wanted},
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(line_type).decode
    has_key, has_timestamp = fields.key is not None, fields.timestamp is not None

    def parse(line: bytes, rows: _Rows) -> None:
        found = decode(line)
        # Both are parsed before either is appended, so that an invalid line adds nothing.
        micros = _moment_us(found.timestamp) if has_timestamp else None
        key = _raw_key(found.key) if has_key else None
        if has_timestamp:
            rows.micros.append(micros)
        if has_key:
            rows.keys.append(key)

    return parse


def _blocks_of_lines(stream: BufferedIOBase, lines: Lines) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the first line, lines without the last line ending), as they arrive.

    The last line of the input may lack a line ending.
    """
    number = 1
    for block in _whole_lines(stream):
        count = block.count(b"\n") + 1
        skipped = min(max(lines.first - number, 0), count)
        if skipped < count:
            yield number + skipped, block.split(b"\n", skipped)[skipped] if skipped else block
        number += count
    lines.count = number - 1


def _whole_lines(stream: BufferedIOBase) -> Iterator[bytes]:
    partial: list[bytes] = []
    while data := stream.read1(_READ_BYTES):
        whole, end, rest = data.rpartition(b"\n")
        if not end:
            partial.append(data)
            continue
        yield b"".join((*partial, whole))
        partial = [rest] if rest else []
    if partial:
        yield b"".join(partial)


def _split(block: bytes) -> list[bytes]:
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
    import pyarrow.csv

    reader = pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=_READ_BYTES),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        # As text, because a type inferred from the first block may not fit later ones.
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
    import pyarrow.parquet as pq

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
    """Returns whether the rows are records, as in the files of a topic's table."""
    if "value" not in schema.names or not set(schema.names) <= set(ROW_SCHEMA.names):
        return False
    kind = schema.field("value").type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string(kind)


def _check_fields(schema: pa.Schema, fields: Fields) -> None:
    for column in (fields.key, fields.timestamp):
        if column is not None and column not in schema.names:
            raise _BadInput(f"it has no column {column!r}, only {', '.join(schema.names)}")


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
            raise _BadInput(f"row {number}: {error}") from error
    return pa.array(micros, pa.int64()).view(TIMESTAMP)


def _payload(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    fields = [PAYLOAD_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
