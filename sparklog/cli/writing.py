"""Records as lines or as an Arrow stream, a batch at a time: nothing is done for each record.

Rules of this room:

- Text is for people, and for pipes of lines: bytes as they are, tabs between, null is empty.
- A line of JSON tells all apart: null from empty, and bytes that are no UTF-8 from text.
- Every batch is flushed, because somebody may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc

from sparklog.cli.formats import OutputFormat
from sparklog.cli.jsonrows import iso_times, json_rows, json_values
from sparklog.record import ROW_SCHEMA

_TAB: Final = pa.scalar(b"\t")
_NEWLINE: Final = pa.scalar(b"\n")
_NOTHING: Final = pa.scalar(b"")


def write(batches: Iterable[pa.RecordBatch], out: BinaryIO, output: OutputFormat) -> None:
    """Writes every batch as it comes. Its columns are of `record.ROW_SCHEMA`, for Arrow all."""
    if output is OutputFormat.ARROW:
        with pa.ipc.new_stream(out, ROW_SCHEMA) as writer:
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
    parts: list[Any] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
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
    values = [_json_column(*each) for each in zip(batch.schema.names, batch.columns, strict=True)]
    lines = json_rows(values, batch.schema.names)
    return pc.binary_join_element_wise(lines, pa.scalar("\n"), pa.scalar(""))


def _json_column(name: str, column: pa.Array) -> pa.Array:
    if name == "headers" and column.null_count < len(column):
        return _json_headers(column)
    return json_values(column)


def _json_headers(column: pa.Array) -> pa.Array:
    """A list of `{"key":…,"value":…}` each, as a topic may have the same header twice."""
    flat = column.flatten()
    objects = json_rows([json_values(each) for each in flat.flatten()], ["key", "value"])
    rows = pa.ListArray.from_arrays(_offsets(column), objects, mask=column.is_null())
    joined = pc.binary_join(rows, ",")
    listed = pc.binary_join_element_wise(pa.scalar("["), joined, pa.scalar("]"), pa.scalar(""))
    return pc.fill_null(listed, "null")


def _offsets(column: pa.Array) -> pa.Array:
    """Of the lists in what `flatten` gives, which leaves out what nulls cover."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = pc.cumulative_sum(lengths)
    return pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])


def _content(lines: pa.Array) -> memoryview:
    """The bytes of all `lines`, which stand one after the other already."""
    size = pc.sum(pc.binary_length(lines)).as_py() or 0
    return memoryview(lines.buffers()[2] or b"")[:size]
