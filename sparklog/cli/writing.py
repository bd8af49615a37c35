"""Records as lines or as an Arrow stream, written batch by batch.

Rules:

- Text is for people and for line-based pipes: bytes unchanged, separated by tabs; null is empty.
- A line of JSON is unambiguous. Null differs from empty text. A value that is a JSON object or
  array is JSON, and any other is a string, so that the bytes `null` differ from a tombstone. Bytes
  that are not UTF-8 are `{"base64":"…"}`; a value that is such an object itself is a string.
- Typed columns take the place of the value: in text as one JSON object, in a line of JSON as
  its members.
- Only values that look like JSON need Python code per record; all else is done by column.
- Each batch is flushed, because a reader may wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.cli.formats import OutputFormat
from sparklog.cli.json_rows import iso_times, json_rows, json_values
from sparklog.formats.record import ROW_SCHEMA

_TAB: Final = pa.scalar(b"\t")
_NEWLINE: Final = pa.scalar(b"\n")
_NOTHING: Final = pa.scalar(b"")
_JSON_START: Final = r"^[ \t\r\n]*[\[{]"
_LINE_BREAKS: Final = bytes.maketrans(b"\r\n", b"  ")

_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def write(
    batches: Iterable[pa.RecordBatch],
    out: BinaryIO,
    output: OutputFormat,
    typed: Sequence[pa.Field] = (),
) -> None:
    """Writes each batch as it arrives.

    Its columns are from `record.ROW_SCHEMA`, and then the typed ones; Arrow needs them all.
    """
    if output is OutputFormat.ARROW:
        with pa.ipc.new_stream(out, pa.schema([*ROW_SCHEMA, *typed])) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(None))
                out.flush()
        return
    lines: Callable[[pa.RecordBatch], pa.Array]
    lines = _text_lines if output is OutputFormat.TEXT else _json_lines
    for batch in batches:
        out.write(_content(lines(batch)))
        out.flush()


def _text_lines(batch: pa.RecordBatch) -> pa.Array:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    typed = [name for name in columns if name not in ROW_SCHEMA.names]
    if typed:
        values = [json_values(columns.pop(name)) for name in typed]
        columns["value"] = json_rows(values, typed)
    parts: list[Any] = []
    for name, column in columns.items():
        parts += [_TAB] if parts else []
        parts.append(pc.fill_null(_as_bytes(name, column), b""))
    return pc.binary_join_element_wise(*parts, _NEWLINE, _NOTHING)


def _as_bytes(name: str, column: pa.Array) -> pa.Array:
    if name == "headers":
        return pa.array(map(_header_text, column.to_pylist()), pa.binary())
    if name == "timestamp":
        column = iso_times(column)
    if pa.types.is_binary(column.type):
        return column
    return column.cast(pa.string()).cast(pa.binary())


def _header_text(headers: Sequence[dict[str, Any]] | None) -> bytes:
    pairs = [header["key"].encode() + b"=" + (header["value"] or b"") for header in headers or ()]
    return b",".join(pairs)


def _json_lines(batch: pa.RecordBatch) -> pa.Array:
    values = [
        _json_documents(column) if name == "value" else json_values(column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    lines = json_rows(values, batch.schema.names)
    return pc.binary_join_element_wise(lines, pa.scalar("\n"), pa.scalar(""))


def _json_documents(column: pa.Array) -> pa.Array:
    """Returns values as JSON: objects and arrays unchanged, all others as `json_values`."""
    texts = json_values(column)
    looks_like_json = pc.fill_null(pc.match_substring_regex(column, _JSON_START), False)
    if not looks_like_json.true_count:
        return texts
    documents = [
        _json_document(value) if candidate else None
        for value, candidate in zip(column.to_pylist(), looks_like_json.to_pylist(), strict=True)
    ]
    return pc.coalesce(pa.array(documents, pa.string()), texts)


def _json_document(value: bytes) -> str | None:
    """Returns the value on one line, or None if it is not JSON in UTF-8, or is a base64 object."""
    try:
        text = value.translate(_LINE_BREAKS).decode()  # in JSON, only whitespace has line breaks
        _check_json(value)
        if b'"base64"' in value and msgspec.json.decode(value).keys() == {"base64"}:
            return None
    except (UnicodeDecodeError, msgspec.DecodeError, AttributeError):
        return None
    return text


def _content(lines: pa.Array) -> memoryview:
    """Returns the bytes of all `lines`, which are contiguous."""
    size = pc.sum(pc.binary_length(lines)).as_py() or 0
    return memoryview(lines.buffers()[2] or b"")[:size]
