"""JSON in Python: data frames as records, and the values of `log.read(values=…)` as columns.

Spark's `valueFormat` is in `sources.values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from sparklog import errors
from sparklog.formats.json_values import pack

ValueFormat = Literal["bytes", "text", "json"]
VALUE_FORMATS: Final = ("bytes", "text", "json")

_BLOCK_ROWS: Final = 65_536
"""Rows converted at a time, so that the text of a block stays far below 2 GiB."""
_SHOWN_BYTES: Final = 80


# ------------------------------------------------------------------------------ to records


def json_records(rows: pa.RecordBatch, key: str | None) -> Iterator[pa.RecordBatch]:
    """Yields batches with `value`, a UTF-8 JSON object per row, and `key` (both binary).

    A null field is omitted; binary is base64; a timestamp is ISO 8601, to the microsecond.

    Args:
        rows: each column is a field of the object, including the key.
        key: the column whose values, as text or bytes, are the records' keys; None: no keys.

    Raises:
        errors.WrongSchema: the key is not a column, or not text, integers or bytes; two columns
            have the same name; or a column has a type that JSON cannot express.
    """
    names = rows.schema.names
    for name in names:
        if names.count(name) > 1:
            raise errors.WrongSchema(reason=f"two columns are named {name!r}: rename one")
    if key is not None and key not in names:
        raise errors.WrongSchema(
            reason=f"the key {key!r} is not a column; the columns are {', '.join(names)}"
        )
    for start in range(0, rows.num_rows, _BLOCK_ROWS):
        block = rows.slice(start, _BLOCK_ROWS)
        fields = [_cast(column, _json_type(column.type)) for column in block.columns]
        value = pack(pa.RecordBatch.from_arrays(fields, names=names), ()).column("value")
        columns = {"value": value}
        if key is not None:
            columns["key"] = _keys(key, block.column(key))
        yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _keys(name: str, column: pa.Array) -> pa.Array:
    kind = _json_type(column.type)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _cast(column, pa.binary())
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    ):
        raise errors.WrongSchema(
            reason=f"the key {name!r} is {column.type}: use a column of text, integers or bytes"
        )
    return _cast(column, pa.string()).cast(pa.binary())


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        # Nanoseconds are truncated to microseconds; no other cast here loses anything.
        return column.cast(kind, safe=not pa.types.is_timestamp(column.type))
    except pa.ArrowException as error:
        raise errors.WrongSchema(
            reason=f"a column of type {column.type} cannot be sent as JSON: {error}"
        ) from error


def _json_type(kind: pa.DataType) -> pa.DataType:
    """The type that `pack` accepts for a data frame's column; unchanged if there is no match."""
    if pa.types.is_dictionary(kind):
        return _json_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(_json_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_json_type(field.type)) for field in kind])
    return kind


# ------------------------------------------------------------------------------ from records


class ValueReader:
    """Collects the values of one read and returns them as one column.

    JSON is decoded value by value and its type inferred from all of them: objects become structs
    with the fields of all objects, and a field that an object lacks is null.
    """

    def __init__(self, topic: str, value_format: ValueFormat) -> None:
        self._topic = topic
        self._decode = _text if value_format == "text" else msgspec.json.Decoder().decode
        self._kind = pa.string() if value_format == "text" else None

    def decode(self, partition: int, rows: pa.RecordBatch) -> list[Any]:
        """Returns the decoded values of `rows`, which has columns `value` and `offset`.

        Raises `BadValue`, which names partition and offset, for a value that is not UTF-8 or JSON.
        """
        found: list[Any] = []
        values = rows.column("value").to_pylist()
        try:
            found.extend(None if value is None else self._decode(value) for value in values)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            bad: bytes = values[len(found)]
            shown = repr(bad[:_SHOWN_BYTES]) + ("…" if len(bad) > _SHOWN_BYTES else "")
            wanted = "JSON" if self._kind is None else "UTF-8"
            raise errors.BadValue(
                topic=self._topic,
                partition=partition,
                offset=rows.column("offset")[len(found)].as_py(),
                reason=f"the value {shown} is not {wanted} ({error})",
            ) from error
        return found

    def column(self, decoded: Sequence[Any]) -> pa.ChunkedArray:
        """Returns all decoded values as one column.

        Raises `WrongSchema` if no Arrow type holds all of them.
        """
        try:
            column = pa.array(decoded, self._kind)
        except (pa.ArrowException, OverflowError) as error:
            reason = (
                f"the values of topic {self._topic!r} have no common type ({error}): read them"
                " with values='text' and decode them yourself"
            )
            raise errors.WrongSchema(reason=reason) from error
        return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


def _text(value: bytes) -> str:
    return value.decode()
