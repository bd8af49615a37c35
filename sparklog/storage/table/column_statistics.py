"""Statistics of typed columns for the Delta log, computed while a data file is encoded.

Rules:

- Each value lies within its bounds, in the order of every engine that skips files by them. Bounds
  are exact, because Spark answers queries for a minimum from them, except that strings are cut: the
  upper bound becomes the next text that does not begin in the same way, or is omitted.
- Each file with typed columns has them. delta-rs takes a missing bound for a null, and skips files
  by it (`to_pyarrow_dataset`). So booleans have bounds too, and each struct is an object, even if
  none of its fields has a bound.
- A column with NaN in the file has no bounds, because Spark and polars sort NaN above all numbers
  and Arrow does not.
- As in Delta by default, the first 32 columns and fields of structs of the table have statistics.
  Arrays and maps count as one and have none; binary values have only a null count.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Per-file Statistics".
"""

from __future__ import annotations

import decimal
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.formats.record import FILE_SCHEMA
from sparklog.formats.values.columns import ERROR_FIELD, Column, Plan
from sparklog.storage.table import delta_log

CHARACTERS: Final = 32
"""The maximum length of a bound of a string."""

_INDEXED: Final = 32 - len(FILE_SCHEMA.names)
"""The default of `delta.dataSkippingNumIndexedCols`, without the columns of every topic."""
_FEW_ROWS: Final = 64
"""Python finds the bounds of so few values several times as fast as Arrow."""
_SURROGATES: Final = range(0xD800, 0xE000)
_LAST_CHARACTER: Final = 0x10FFFF


class StatisticsCollector:
    """Collects the statistics of the typed columns of one file."""

    def __init__(self, plan: Plan) -> None:
        self._leaves = _leaves(plan.columns)
        self._nulls = [0] * len(self._leaves)
        self._bounds: dict[int, tuple[Any, Any]] = {}
        """The lowest and the highest value of each leaf that has any, by its number."""
        self._with_nan: set[int] = set()

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Adds rows: arrays of `Plan.fields`."""
        arrays = itertools.chain.from_iterable(map(_flattened, columns))
        for number, (leaf, values) in enumerate(zip(self._leaves, arrays, strict=False)):
            if leaf is None:
                continue
            nulls = values.null_count
            self._nulls[number] += nulls
            if leaf.form is None or nulls == len(values) or number in self._with_nan:
                continue
            found = _range(values)
            if found is None:
                self._with_nan.add(number)
                continue
            low, high = found
            if number in self._bounds:
                least, most = self._bounds[number]
                low, high = min(low, least), max(high, most)
            self._bounds[number] = low, high

    def finish(self) -> str:
        """Returns `TableFile.statistics` of the file."""
        found = delta_log.ColumnStatistics()
        for number, leaf in enumerate(self._leaves):
            if leaf is None:
                continue
            _parent(found.null_count, leaf)[leaf.name] = self._nulls[number]
            lows, highs = _parent(found.min_values, leaf), _parent(found.max_values, leaf)
            if leaf.form is not None and number in self._bounds and number not in self._with_nan:
                low, high = self._bounds[number]
                lows[leaf.name] = leaf.form.lower(low)
                upper = leaf.form.upper(high)
                if upper is not None:
                    highs[leaf.name] = upper
        return found.encode()


def _flattened(array: pa.Array) -> Iterator[pa.Array]:
    """Yields the array, or the fields of its structs, which are null where a struct is null."""
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _flattened(child)
    else:
        yield array


def _range(values: pa.Array) -> tuple[Any, Any] | None:
    """Returns the lowest and the highest value, of which there is one; None if one is NaN.

    Timestamps are in microseconds. Strings have no more characters than decide their bounds.
    """
    if pa.types.is_timestamp(values.type):
        values = values.view(pa.int64())
    is_floating = pa.types.is_floating(values.type)
    if len(values) <= _FEW_ROWS:
        found = [each for each in values.to_pylist() if each is not None]
        if is_floating and any(map(math.isnan, found)):
            return None
        low, high = min(found), max(found)
    else:
        if is_floating and pc.any(pc.is_nan(values)).as_py():
            return None
        bounds = pc.min_max(values)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if isinstance(low, str):  # of a record with megabytes
        low, high = low[: CHARACTERS + 1], high[: CHARACTERS + 1]
    return low, high


# ------------------------------------------------------------------------------ leaves


class _Form(NamedTuple):
    """The form of a type's bounds in JSON."""

    lower: Callable[[Any], Any]
    """Returns the lower bound for the lowest value."""
    upper: Callable[[Any], Any]
    """Returns the upper bound for the highest value; None if there is none."""


class _Leaf(NamedTuple):
    """A column, or a field of a struct."""

    structs: tuple[str, ...]
    """The names of the structs that it is in, from the outermost one."""
    name: str
    form: _Form | None
    """None: it has no bounds."""


@functools.lru_cache(maxsize=64)
def _leaves(columns: tuple[Column, ...]) -> tuple[_Leaf | None, ...]:
    """Returns the leaves with statistics in the order of `_flattened`; None for arrays and maps."""
    fields = [ERROR_FIELD, *(each.as_field for each in columns)]
    return tuple(leaf for field in fields for leaf in _leaves_of(field, ()))[:_INDEXED]


def _leaves_of(field: pa.Field, structs: tuple[str, ...]) -> Iterator[_Leaf | None]:
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from _leaves_of(child, (*structs, field.name))
    elif pa.types.is_nested(field.type):
        yield None
    else:
        yield _Leaf(structs, field.name, _form_of(field.type))


def _parent(values: dict[str, Any], leaf: _Leaf) -> dict[str, Any]:
    """Returns the object of the struct that the leaf is in, and creates it if necessary."""
    for name in leaf.structs:
        values = values.setdefault(name, {})
    return values


# ------------------------------------------------------------------------------ forms


def _form_of(kind: pa.DataType) -> _Form | None:
    if pa.types.is_binary(kind):
        return None
    if pa.types.is_string(kind):
        return _Form(_prefix, _raised)
    if pa.types.is_floating(kind):
        return _Form(_lower_number, _upper_number)
    if pa.types.is_timestamp(kind):
        return _Form(delta_log.iso, delta_log.iso)
    if pa.types.is_decimal(kind):
        return _Form(_decimal, _decimal)
    return _Form(_unchanged, _unchanged)  # whole numbers, booleans and dates


def _unchanged(value: Any) -> Any:
    return value


def _decimal(value: decimal.Decimal) -> msgspec.Raw:
    """Returns an exact number, without an exponent."""
    return msgspec.Raw(format(value, "f").encode())


def _lower_number(value: float) -> float | str:
    if value == 0:
        return -0.0  # engines differ in whether it is below 0.0
    return value if math.isfinite(value) else _infinity(value)


def _upper_number(value: float) -> float | str:
    if value == 0:
        return 0.0
    return value if math.isfinite(value) else _infinity(value)


def _infinity(value: float) -> str:
    return "Infinity" if value > 0 else "-Infinity"  # as Spark writes it


def _prefix(text: str) -> str:
    return text[:CHARACTERS]


def _raised(text: str) -> str | None:
    """Returns the text, or if it is too long, a short one that follows it by code points.

    None: there is none, because the text begins with nothing but the last code point.
    """
    if len(text) <= CHARACTERS:
        return text
    for end in range(CHARACTERS, 0, -1):
        following = ord(text[end - 1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _LAST_CHARACTER:
            return text[: end - 1] + chr(following)
    return None
