"""Builds Arrow columns from decoded JSON values.

A value of a column is `None` or:

| type | value |
|---|---|
| BOOLEAN, whole and floating numbers, STRING, BINARY | bool, int, float, str, bytes |
| DATE, TIMESTAMP, TIMESTAMP_NTZ | str in ISO 8601 |
| DECIMAL | int: the number times 10 to the power of its scale |
| STRUCT | a tuple, or a msgspec struct, of the fields in order |
| ARRAY, MAP | list, dict |

Columns are built from buffers, because `pa.array` imports pandas (`sparklog.arrow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow
from sparklog.limits import TIMESTAMP_MAX_US, TIMESTAMP_MIN_US

_DAY_MIN: Final = TIMESTAMP_MIN_US // 86_400_000_000
_DAY_MAX: Final = TIMESTAMP_MAX_US // 86_400_000_000


def to_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns the values as a column of type `kind`.

    Raises `pa.ArrowInvalid` for a date or time that Arrow cannot parse, or that is outside Spark's
    range. Arrow parses a column of times only if all of them have a zone, or none has.
    """
    if None not in values:
        return _build(values, kind, None)
    is_valid = np.array([value is not None for value in values], np.bool_)
    filler = _filler(kind)
    filled = [filler if value is None else value for value in values]
    return _build(filled, kind, arrow.booleans(is_valid).buffers()[1])


def _filler(kind: pa.DataType) -> Any:
    """Returns the placeholder for a null."""
    if pa.types.is_struct(kind):
        return (None,) * kind.num_fields
    if pa.types.is_map(kind):
        return {}
    if pa.types.is_list(kind):
        return ()
    if pa.types.is_string(kind) or pa.types.is_temporal(kind):
        return ""
    return b"" if pa.types.is_binary(kind) else 0


def _build(values: Sequence[Any], kind: pa.DataType, validity: pa.Buffer | None) -> pa.Array:
    """Returns a column of these values, none of which is `None`."""
    if pa.types.is_temporal(kind):
        return _to_times(_build(values, pa.string(), validity), kind)
    buffers: list[Any] = []
    children = None
    if pa.types.is_struct(kind):
        children = _fields(values, kind)
    elif pa.types.is_map(kind):
        keys = to_column([*chain.from_iterable(values)], kind.key_type)
        items = to_column([item for each in values for item in each.values()], kind.item_type)
        fields = [kind.key_field, kind.item_field]
        buffers = [list_offsets(values)]
        children = [pa.StructArray.from_arrays([keys, items], fields=fields)]
    elif pa.types.is_list(kind):
        buffers = [list_offsets(values)]
        children = [to_column([*chain.from_iterable(values)], kind.value_type)]
    elif pa.types.is_string(kind):
        text = "".join(values)
        if not text.isascii():
            values = [value.encode() for value in values]
        buffers = [list_offsets(values), text.encode()]
    elif pa.types.is_binary(kind):
        buffers = [list_offsets(values), b"".join(values)]
    elif pa.types.is_boolean(kind):
        buffers = [np.packbits(np.array(values, np.bool_), bitorder="little")]
    elif pa.types.is_decimal(kind):
        width = kind.byte_width
        buffers = [b"".join([value.to_bytes(width, "little", signed=True) for value in values])]
    else:
        letter = "f" if pa.types.is_floating(kind) else "i"
        with np.errstate(over="ignore"):  # a number beyond FLOAT becomes infinite
            buffers = [np.array(values, f"{letter}{kind.byte_width}")]
    wrapped = [validity, *map(pa.py_buffer, buffers)]
    return pa.Array.from_buffers(kind, len(values), wrapped, children=children)


def _fields(rows: Sequence[Any], kind: pa.StructType) -> list[pa.Array]:
    as_tuple = msgspec.structs.astuple
    fields = [row if type(row) is tuple else as_tuple(row) for row in rows]
    columns = zip(*fields, strict=True) if fields else ((),) * kind.num_fields
    return [to_column(each, field.type) for each, field in zip(columns, kind, strict=True)]


def list_offsets(values: Sequence[Any]) -> npt.NDArray[np.int32]:
    """Returns where each value begins and ends, counted in elements from 0."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return offsets


# ------------------------------------------------------------------------------ times


def _to_times(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_date(kind):
        dates = texts.cast(kind)
        _check_range(dates.view(pa.int32()), _DAY_MIN, _DAY_MAX)
        return dates
    times = _to_instants(texts) if kind.tz is not None else texts.cast(kind)
    _check_range(times.view(pa.int64()), TIMESTAMP_MIN_US, TIMESTAMP_MAX_US)
    return times.cast(kind)


def _to_instants(texts: pa.StringArray) -> pa.TimestampArray:
    """Returns times in UTC, which is assumed for those without a zone."""
    try:
        return texts.cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:
        return texts.cast(pa.timestamp("us")).view(pa.timestamp("us", "UTC"))


def _check_range(column: pa.Array, low: int, high: int) -> None:
    bounds = pc.min_max(column)
    least, most = bounds["min"].as_py(), bounds["max"].as_py()
    if least is not None and not low <= least <= most <= high:
        raise pa.ArrowInvalid("out of range")
