"""Rows of Arrow as lines of JSON, column by column: nothing is done for each row.

Rules of this room:

- A row becomes one object, its columns in their order; null is `null`, and so are NaN and the
  infinities, which JSON lacks.
- Numbers keep the digits that Arrow gives them, times become ISO 8601 (with `Z` where the column
  knows its zone), and bytes text, or where they are no UTF-8 `{"base64":"…"}`, each for itself.
- Nested columns go through Python, one value at a time.
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
    """An object for each row, such as `{"carrier":"UA","delay":11}`, of columns of JSON values."""
    parts: list[Any] = []
    for name, column in zip(names, values, strict=True):
        before = "," if parts else "{"
        parts += [pa.scalar(f"{before}{_text(name)}:"), column]
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def json_values(column: pa.Array) -> pa.Array:
    """Each value of `column` as JSON; no null is left."""
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
    """As `json_values`, of texts without types: what JSON would read as a number stands as one.

    Nothing is lost by it: `007` and `1,000` stay texts, and 1.50 keeps its zero.
    """
    is_number = pc.fill_null(pc.match_substring_regex(column, _NUMBER), False)
    return pc.if_else(is_number, column, json_values(column))


def iso_times(column: pa.Array) -> pa.Array:
    """Timestamps as ISO 8601: in UTC and with a `Z` where the column knows its zone."""
    kind = column.type
    if kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, tz="UTC"))
    return pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)


def quoted(column: pa.Array) -> pa.Array:
    """Texts as JSON strings (RFC 8259, section 7); a null stays one."""
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
