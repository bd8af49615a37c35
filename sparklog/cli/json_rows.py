"""Arrow rows as lines of JSON, computed by column instead of by row.

Rules:

- A row becomes one object with its columns in order. Null is `null`, as are NaN and the infinities,
  which JSON lacks.
- Numbers keep Arrow's digits. Times become ISO 8601, with `Z` if the column has a time zone. Bytes
  become text, or `{"base64":"…"}` if a value is not UTF-8.
- Values of nested columns are converted one by one in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

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


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind == pa.binary_view()
    )
