"""Packs columns of a data frame into one JSON object per row. No Spark, no I/O.

The output is that of Spark's `to_json(struct(*))` with the session time zone set to UTC: null
fields are omitted, also within structs, but are `null` in arrays and maps; binary is base64;
non-finite numbers are "NaN", "Infinity" and "-Infinity". There are two differences: timestamps keep
their microseconds, which `to_json` truncates to milliseconds, and a number's exponent may be
formatted differently.

All of this is done column by column in Arrow: no Python object per row, except for binary columns.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow, errors

_SHORT: Final = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
_FIRST_PRINTABLE: Final = 0x20


def pack(rows: pa.RecordBatch, roles: Collection[str]) -> pa.RecordBatch:
    """Packs all columns but `roles` into one binary column, `value`: a UTF-8 JSON object per row.

    Raises `WrongSchema` for a column of a type without a JSON representation.
    """
    kept = [name for name in rows.schema.names if name in roles]
    packed = [name for name in rows.schema.names if name not in roles]
    value = _object(packed, [rows.column(name) for name in packed], rows.num_rows)
    columns = {**{name: rows.column(name) for name in kept}, "value": value.cast(pa.binary())}
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


# ------------------------------------------------------------------------------ any column


def _texts(column: pa.Array) -> pa.Array:
    """Returns the JSON of each value as a string; null if the value is null."""
    if not len(column):
        return pa.nulls(0, pa.string())  # an array without rows may have no buffers
    for fits, write in _WRITERS:
        if fits(column.type):
            return write(column)
    raise errors.WrongSchema(reason=f"a column of type {column.type} has no JSON representation")


def _plain(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())


def _floats(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.string())
    if _any(pc.equal(pc.trunc(column), column)):
        # A whole number keeps its decimal point, or it would be read back as an integer.
        texts = pc.replace_substring_regex(texts, r"^(-?\d+)$", r"\1.0")
    if _any(pc.invert(pc.is_finite(column))):
        texts = pc.replace_substring_regex(texts, "^-?nan$", '"NaN"')
        texts = pc.replace_substring_regex(texts, "^(-?)inf$", r'"\1Infinity"')
    return texts


def _strings(column: pa.Array) -> pa.Array:
    return _quoted(_escaped(_mended(column.cast(pa.string()))))


def _blobs(column: pa.Array) -> pa.Array:
    """Encodes as base64, which Arrow does not support."""
    found = [
        binascii.b2a_base64(value or b"", newline=False)
        for value in column.cast(pa.binary()).to_pylist()
    ]
    return _quoted(_masked(arrow.strings(found), column))


def _dates(column: pa.Array) -> pa.Array:
    return _quoted(column.cast(pa.string()))


def _timestamps(column: pa.Array) -> pa.Array:
    """Formats as ISO 8601 with three or six fractional digits, as needed; with `Z` for instants."""
    instants = column.cast(pa.timestamp("us", tz=column.type.tz)).view(pa.int64())
    naive = instants.view(pa.timestamp("us"))
    texts = naive.cast(pa.string())
    at = instants.offset * np.dtype(np.int64).itemsize
    finer = np.frombuffer(instants.buffers()[1], np.int64, len(column), at) % 1_000 != 0
    if not finer.all():
        shorter = naive.cast(pa.timestamp("ms"), safe=False).cast(pa.string())
        texts = pc.if_else(arrow.booleans(finer), texts, shorter)
    texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
    return _quoted(texts, end='Z"' if column.type.tz else '"')


def _structs(column: pa.Array) -> pa.Array:
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    return _masked(_object(names, column.flatten(), len(column)), column)


def _lists(column: pa.Array) -> pa.Array:
    return _bracketed(column, _or_null(_texts(column.flatten())), "[]")


def _maps(column: pa.Array) -> pa.Array:
    # Arrow's own cast miscounts values of the null type, which may crash the process.
    fields = [column.type.key_field, column.type.item_field]
    pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=fields)
    entries = pa.Array.from_buffers(
        pa.list_(pairs.type),
        len(column),
        column.buffers()[:2],
        offset=column.offset,
        children=[pairs],
    )
    keys, values = entries.flatten().flatten()
    return _bracketed(entries, _joined([_strings(keys), _or_null(_texts(values))], ":"), "{}")


_WRITERS: Final[Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]]]] = (
    (pa.types.is_string, _strings),
    (pa.types.is_integer, _plain),
    (pa.types.is_floating, _floats),
    (pa.types.is_boolean, _plain),
    (pa.types.is_decimal, _plain),
    (pa.types.is_timestamp, _timestamps),
    (pa.types.is_date32, _dates),
    (pa.types.is_null, _plain),
    (pa.types.is_struct, _structs),
    (pa.types.is_list, _lists),
    (pa.types.is_map, _maps),
    (pa.types.is_binary, _blobs),
    (pa.types.is_large_string, _strings),
    (pa.types.is_large_binary, _blobs),
)


# ------------------------------------------------------------------------------ text


def _object(names: Sequence[str], columns: Sequence[pa.Array], count: int) -> pa.Array:
    """Returns an object for each of `count` rows, without null fields."""
    if not columns:
        return pc.fill_null(pa.nulls(count, pa.string()), arrow.string("{}"))
    fields = [
        _joined([arrow.string(f",{msgspec.json.encode(name).decode()}:"), _texts(column)])
        for name, column in zip(names, columns, strict=True)
    ]
    # The brackets are joined with the fields: Arrow drops a row that has only nulls.
    whole = _joined([arrow.string("{"), *fields, arrow.string("}")], null_handling="skip")
    return pc.replace_substring(whole, "{,", "{", max_replacements=1)


def _bracketed(column: pa.Array, elements: pa.Array, brackets: str) -> pa.Array:
    """Returns each list's elements, joined with commas and in brackets."""
    none = arrow.number(0, pa.int32())
    lengths = arrow.as_numpy(pc.fill_null(pc.list_value_length(column), none))
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    lists = pa.Array.from_buffers(
        pa.list_(pa.string()), len(column), [None, pa.py_buffer(offsets)], children=[elements]
    )
    return _masked(_wrapped(pc.binary_join(lists, arrow.string(",")), brackets), column)


def _mended(texts: pa.Array) -> pa.Array:
    """Replaces bytes that are not UTF-8: Spark does not validate its strings."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        found = [
            (value or b"").decode("utf-8", "replace").encode()
            for value in texts.cast(pa.binary()).to_pylist()
        ]
        return _masked(arrow.strings(found), texts)
    return texts


def _escaped(texts: pa.Array) -> pa.Array:
    """Escapes quotes, backslashes and control characters for JSON, if there are any."""
    data = texts.buffers()[2]
    there = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    for character in '\\"':
        if (there == ord(character)).any():
            texts = pc.replace_substring(texts, character, f"\\{character}")
    controls = there[there < _FIRST_PRINTABLE]
    for code in np.unique(controls).tolist():
        texts = pc.replace_substring(texts, chr(code), _SHORT.get(code, f"\\u{code:04X}"))
    return texts


def _quoted(texts: pa.Array, end: str = '"') -> pa.Array:
    return _joined([arrow.string('"'), texts, arrow.string(end)])


def _wrapped(texts: pa.Array, brackets: str) -> pa.Array:
    return _joined([arrow.string(brackets[0]), texts, arrow.string(brackets[1])])


def _or_null(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, arrow.string("null"))


def _masked(texts: pa.Array, column: pa.Array) -> pa.Array:
    if not column.null_count:
        return texts
    return pc.if_else(column.is_valid(), texts, pa.nulls(1, pa.string())[0])


def _joined(
    texts: Sequence[pa.Array | pa.Scalar], separator: str = "", *, null_handling: str = "emit_null"
) -> pa.Array:
    return pc.binary_join_element_wise(*texts, arrow.string(separator), null_handling=null_handling)


def _any(found: pa.Array) -> bool:
    return pc.any(found).as_py() is True
