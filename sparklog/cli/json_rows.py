"""Arrow rows as lines of JSON, computed by column instead of by row.

Rules:

- A row becomes one object with its columns in order. Null is `null`, as are NaN and the infinities,
  which JSON lacks.
- Numbers keep Arrow's digits. Times become ISO 8601, with `Z` if the column has a time zone. Bytes
  become text, or `{"base64":"…"}` if a value is not UTF-8.
- Structs and maps become objects, the latter with their keys as strings; lists become arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow

_NULL: Final = "null"
_CONTROL: Final = "[\\x00-\\x1f]"
_NAMED_CONTROLS: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_NUMBER: Final = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
"""RFC 8259, section 6."""


def json_rows(values: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Joins JSON columns into one object per row, such as `{"carrier":"UA","delay":11}`."""
    parts: list[Any] = []
    for name, column in zip(names, values, strict=True):
        before = "," if parts else "{"
        parts += [pa.scalar(f"{before}{_text(name)}:"), column]
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def json_values(column: pa.Array) -> pa.Array:
    """Returns each value of `column` as JSON text; the result has no nulls."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return json_values(column.dictionary_decode())
    if pa.types.is_null(kind):
        return pa.repeat(_NULL, len(column))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        texts = column.cast(pa.string())
    elif pa.types.is_floating(kind):
        finite = pc.fill_null(pc.is_finite(column), False)
        texts = pc.if_else(finite, column.cast(pa.string()), _NULL)
    elif _is_text(kind):
        texts = quoted(column)
    elif _is_bytes(kind):
        texts = _json_bytes(column)
    elif pa.types.is_timestamp(kind):
        texts = quoted(iso_times(column))
    elif pa.types.is_date(kind) or pa.types.is_time(kind):
        texts = quoted(column.cast(pa.string()))
    elif pa.types.is_struct(kind):
        members = [json_values(each) for each in column.flatten()]
        texts = json_rows(members, [field.name for field in kind]) if members else "{}"
        texts = pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))
    elif pa.types.is_map(kind):
        texts = _json_maps(column)
    elif _is_list(kind):
        texts = _json_lists(column)
    else:
        texts = pa.array([_text(value) for value in column.to_pylist()], pa.string())
    return pc.fill_null(texts, _NULL)


def loose_values(column: pa.Array) -> pa.Array:
    """Returns strings as JSON, those that are JSON numbers as numbers.

    The digits do not change: `007` and `1,000` remain strings, and 1.50 keeps its zero.
    """
    is_number = pc.fill_null(pc.match_substring_regex(column, _NUMBER), False)
    return pc.if_else(is_number, column, json_values(column))


def iso_times(column: pa.Array) -> pa.Array:
    """Returns timestamps as ISO 8601, in UTC with a `Z` if the column has a time zone."""
    kind = column.type
    if kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, tz="UTC"))
    return pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)


def quoted(column: pa.Array) -> pa.Array:
    """Returns text as JSON strings (RFC 8259, section 7), and nulls as nulls."""
    column = column.cast(pa.string())
    for character, escape in (("\\", "\\\\"), ('"', '\\"')):
        if pc.any(pc.match_substring(column, character)).as_py():
            column = pc.replace_substring(column, character, escape)
    if pc.any(pc.match_substring_regex(column, _CONTROL)).as_py():
        for code in range(0x20):
            control = chr(code)
            escape = _NAMED_CONTROLS.get(control, f"\\u{code:04x}")
            column = pc.replace_substring(column, control, escape)
    quote = pa.scalar('"')
    return pc.binary_join_element_wise(quote, column, quote, pa.scalar(""))


def _json_lists(column: pa.Array) -> pa.Array:
    items = json_values(column.flatten())
    return _joined(column, pc.list_value_length(column), items, "[", "]")


def _json_maps(column: pa.Array) -> pa.Array:
    lists = column.cast(
        pa.list_(pa.struct([("k", column.type.key_type), ("v", column.type.item_type)]))
    )
    keys, values = lists.flatten().flatten()
    names = json_values(keys if _is_text(keys.type) else keys.cast(pa.string()))
    members = pc.binary_join_element_wise(names, json_values(values), pa.scalar(":"))
    return _joined(column, pc.list_value_length(lists), members, "{", "}")


def _joined(column: pa.Array, lengths: pa.Array, items: pa.Array, start: str, end: str) -> pa.Array:
    """Returns the items of each row in brackets; they are those of all rows that are not null."""
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(arrow.as_numpy(pc.fill_null(lengths, 0)), out=offsets[1:])
    rows = pa.ListArray.from_arrays(pa.array(offsets), items, mask=column.is_null())
    joined = pc.binary_join(rows, ",")
    return pc.binary_join_element_wise(pa.scalar(start), joined, pa.scalar(end), pa.scalar(""))


def _json_bytes(column: pa.Array) -> pa.Array:
    try:
        return quoted(column.cast(pa.string()))
    except pa.ArrowInvalid:
        return pa.array(map(_json_of_bytes, column.to_pylist()), pa.string())


def _json_of_bytes(value: bytes | None) -> str:
    try:
        return _text(None if value is None else value.decode())
    except UnicodeDecodeError:
        return _text({"base64": value})


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind == pa.binary_view()
    )
