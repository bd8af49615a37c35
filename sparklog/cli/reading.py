"""Files as batches of records, ready for `Producer.send_table`.

Rules of this room:

- A line of text or of JSON *is* the value, byte for byte; a row of CSV or Parquet becomes a JSON
  object. Only a Parquet file that has nothing but a record's own columns is taken for records.
- Key and time of a record are copied from fields of it, which stay in the value. A number is its
  own digits as a key, and milliseconds since 1970 as a time; a time without a zone is UTC.
- A line of JSON is checked before it is sent. Where one is wrong, all lines before it are handed
  on and none after it, or it is written elsewhere: going on at that line sends nothing twice.
- A field that is named must be in every record; where it is null, so is the key, and the time is
  that of arrival.
- What comes from a pipe is handed on as it comes: nobody waits for a block to fill.
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
import pyarrow.csv
import pyarrow.parquet as pq

from sparklog import errors, limits
from sparklog.cli.formats import Fields, InputFormat
from sparklog.cli.jsonrows import json_rows, json_values, loose_values
from sparklog.client.times import timestamp_us
from sparklog.record import PAYLOAD_SCHEMA, ROW_SCHEMA, TIMESTAMP

_READ_BYTES: Final = limits.MIB
_START_BYTES: Final = 4 * limits.KIB
_EXCERPT_BYTES: Final = 80
_CALLED: Final = {
    InputFormat.JSONL: "lines of JSON",
    InputFormat.TEXT: "lines of text",
    InputFormat.CSV: "CSV",
}


@dataclass(slots=True)
class Lines:
    """Which lines of an input are read, how far reading has come, and what becomes of bad ones."""

    first: int = 1
    """Lines before it are passed over."""
    at: int = 1
    """The first line of the batch that was handed on last."""
    next: int = 1
    """The first line that is not handed on yet."""
    bad: BinaryIO | None = None
    """Where lines that cannot be sent are written; None: the first of them is an error."""
    bad_count: int = 0
    is_line_wrong: bool = False
    """A line ended the reading, which `bad` would have taken; not the input as a whole."""


def read(
    stream: BufferedIOBase,
    kind: InputFormat,
    *,
    fields: Fields,
    name: str,
    is_guessed: bool = False,
    lines: Lines | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of `record.PAYLOAD_SCHEMA`'s columns, perhaps with `partition`, in order.

    Args:
        stream: what is read.
        kind: its format.
        fields: which fields are key and time.
        name: of the input, for errors.
        is_guessed: nobody has said the format: what cannot be lines of text is no text.
        lines: which lines, of a format that has lines; it is kept up to date.

    Raises:
        errors.BadRequest: the content is not what `kind` says, or lacks a field; the reason names
            the place. All that comes before that place in a format of lines was handed on.
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
    """Its first bytes, which stay to be read."""
    if hasattr(stream, "peek"):
        start: bytes = stream.peek(_START_BYTES)
        return start
    start = stream.read(_START_BYTES)
    stream.seek(-len(start), os.SEEK_CUR)
    return start


def _check_start(start: bytes, kind: InputFormat, is_guessed: bool) -> None:
    """Raises `_Wrong` for what cannot be lines of text, or only after something is done to it."""
    if kind is InputFormat.TEXT and not is_guessed:
        return  # byte for byte, whatever they are
    for mark, encoding in _OTHER_MARKS.items():
        if start.startswith(mark):
            convert = f"convert it to UTF-8 first, as by iconv -f {encoding} -t UTF-8"
            raise _Wrong(f"it begins with a byte order mark of {encoding}: {convert}")
    if start.startswith(_UTF8_MARK) and kind is not InputFormat.CSV:
        without = "leave it out, as by tail -c +4"
        raise _Wrong(f"it begins with a byte order mark, which is in no line's value: {without}")
    for magic, (compression, command) in _COMPRESSED.items():
        if start.startswith(magic):
            raise _Wrong(f"it is a file compressed by {compression}: send the output of {command}")
    if start.startswith(_PARQUET):
        raise _Wrong("it is a Parquet file: say so by --format parquet")
    if b"\0" in start:
        advice = "; --format text sends its lines as they are" if is_guessed else ""
        raise _Wrong(f"it is a binary file, not {_CALLED[kind]}{advice}")


# ------------------------------------------------------------------------------ lines


def _read_text(stream: BufferedIOBase, lines: Lines) -> Iterator[pa.RecordBatch]:
    for begin, block in _blocks_of_lines(stream, lines):
        values = _split(block)
        lines.at, lines.next = begin, begin + len(values)
        yield _payload({"value": pa.array(values, pa.binary())})


def _read_jsonl(stream: BufferedIOBase, fields: Fields, lines: Lines) -> Iterator[pa.RecordBatch]:
    parse = _line_parser(fields)
    for begin, block in _blocks_of_lines(stream, lines):
        check = _nothing if _is_utf8(block) else bytes.decode
        rows = _Rows()
        wrong = None
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
                    wrong = _Wrong(f"line {number}: {error}: {_excerpt(line)}")
                    break
                lines.bad.write(line + b"\n")
                lines.bad_count += 1
            else:
                rows.values.append(line)
        else:
            lines.next += 1
        if rows.values:
            yield rows.payload()
        if wrong is not None:
            raise wrong


def _is_utf8(block: bytes) -> bool:
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _nothing(_: bytes) -> None:
    pass


def _excerpt(line: bytes) -> str:
    text = line[:_EXCERPT_BYTES].decode(errors="backslashreplace")
    return text if len(line) <= _EXCERPT_BYTES else f"{text}…"


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


def _line_parser(fields: Fields) -> Callable[[bytes, _Rows], None]:
    """Checks a line, and appends its key and time; what else is in it is not built."""
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
        # Both before either is kept: a line that is wrong leaves no half of itself.
        micros = _moment_us(found.timestamp) if has_timestamp else None
        key = _raw_key(found.key) if has_key else None
        if has_timestamp:
            rows.micros.append(micros)
        if has_key:
            rows.keys.append(key)

    return parse


def _blocks_of_lines(stream: BufferedIOBase, lines: Lines) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, whole lines without the last one's end), as they come.

    The last line may lack an end.
    """
    number = 1
    for block in _whole_lines(stream):
        count = block.count(b"\n") + 1
        passed = min(max(lines.first - number, 0), count)
        if passed < count:
            yield number + passed, block.split(b"\n", passed)[passed] if passed else block
        number += count


def _whole_lines(stream: BufferedIOBase) -> Iterator[bytes]:
    begun: list[bytes] = []
    while data := stream.read1(_READ_BYTES):
        whole, end, rest = data.rpartition(b"\n")
        if not end:
            begun.append(data)
            continue
        yield b"".join((*begun, whole))
        begun = [rest] if rest else []
    if begun:
        yield b"".join(begun)


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
