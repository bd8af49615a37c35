"""Builds Arrow columns of decoded JSON values, and finds the rows whose value does not fit.

msgspec has checked everything but two things, which Arrow checks much faster for a whole column
than the rules of `json_rules` do for each value: that a text is a date or a time, and that a number
is a DECIMAL. Arrow accepts a subset of what the rules accept. The rules decode what it refuses.

A value of a column is `None` or:

| type | value |
|---|---|
| BOOLEAN, whole and floating numbers, STRING, BINARY | bool, int, float, str, bytes |
| DATE, TIMESTAMP | str |
| DECIMAL | anything that msgspec decodes JSON to, with `decimal.Decimal` for fractions |
| STRUCT | a tuple, or a msgspec struct, of the fields in order |
| ARRAY, MAP | list, dict |
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow
from sparklog.formats.values.arrow_columns import list_offsets
from sparklog.formats.values.json_rules import ValueMismatch, decimal_rounder, typed_leaf_decoder
from sparklog.limits import TIMESTAMP_MAX_US, TIMESTAMP_MIN_US

Rows: TypeAlias = npt.NDArray[np.int32]
Build: TypeAlias = Callable[[Sequence[Any], Rows, set[int]], pa.Array]
"""Returns the values as a column.

Takes the values, the row that each belongs to, and a set to which it adds the rows that do not fit;
what the column has in these is undefined.
"""


def builder_of(kind: pa.DataType) -> Build:
    """Returns the builder of columns of a type that `ddl.parse` returns."""
    if _is_checked(kind):
        return lambda values, _rows, _misfits: pa.array(values, kind)
    for fits, builder in _BUILDERS:
        if fits(kind):
            return builder(kind)
    raise AssertionError(f"{kind} is not a type of a typed column")


def _is_checked(kind: pa.DataType) -> bool:
    """Returns whether Arrow builds columns of the type from any values that msgspec returns."""
    if pa.types.is_list(kind):
        return _is_checked(kind.value_type)
    return not (pa.types.is_nested(kind) or pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


# ------------------------------------------------------------------------------ nested


def _struct_builder(kind: pa.StructType) -> Build:
    builders = [builder_of(field.type) for field in kind]
    nothing = (None,) * kind.num_fields
    as_tuple = msgspec.structs.astuple

    def build(values: Sequence[Any], rows: Rows, misfits: set[int]) -> pa.Array:
        validity = None
        try:
            columns: Any = [*zip(*map(as_tuple, values), strict=True)]
        except TypeError:  # there are nulls, or tuples
            validity = _validity(values)
            tuples = [
                each if type(each) is tuple else nothing if each is None else as_tuple(each)
                for each in values
            ]
            columns = [*zip(*tuples, strict=True)]
        columns = columns or [()] * kind.num_fields
        children = [
            inner(each, rows, misfits) for inner, each in zip(builders, columns, strict=True)
        ]
        return pa.Array.from_buffers(kind, len(values), [validity], children=children)

    return build


def _list_builder(kind: pa.ListType) -> Build:
    inner = builder_of(kind.value_type)

    def build(values: Sequence[Any], rows: Rows, misfits: set[int]) -> pa.Array:
        lists = [() if each is None else each for each in values]
        offsets = list_offsets(lists)
        elements = inner([*chain.from_iterable(lists)], _spread(rows, offsets), misfits)
        buffers = [_validity(values), pa.py_buffer(offsets)]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])

    return build


def _map_builder(kind: pa.MapType) -> Build:
    inner = builder_of(kind.item_type)
    fields = [kind.key_field, kind.item_field]

    def build(values: Sequence[Any], rows: Rows, misfits: set[int]) -> pa.Array:
        maps = [{} if each is None else each for each in values]
        offsets = list_offsets(maps)
        keys = pa.array([*chain.from_iterable(maps)], pa.string())
        given = [*chain.from_iterable(each.values() for each in maps)]
        items = inner(given, _spread(rows, offsets), misfits)
        entries = pa.StructArray.from_arrays([keys, items], fields=fields)
        buffers = [_validity(values), pa.py_buffer(offsets)]
        return pa.Array.from_buffers(kind, len(values), buffers, children=[entries])

    return build


def _spread(rows: Rows, offsets: npt.NDArray[np.int32]) -> Rows:
    """Returns the row of each element."""
    return np.repeat(rows, np.diff(offsets))


def _validity(values: Sequence[Any]) -> pa.Buffer | None:
    if None not in values:
        return None
    return arrow.booleans(np.array([each is not None for each in values], np.bool_)).buffers()[1]


# ------------------------------------------------------------------------------ decimals

_NUMBERS: Final = frozenset((int, decimal.Decimal, type(None)))


def _decimal_builder(kind: pa.Decimal128Type) -> Build:
    rounded, decode = decimal_rounder(kind), typed_leaf_decoder(kind)

    def build(values: Sequence[Any], rows: Rows, misfits: set[int]) -> pa.Array:
        # Without `rounded`, Arrow would read foreign memory for 1e-77, and crash for 1e-999999999.
        if _NUMBERS.issuperset(map(type, values)):
            try:
                return pa.array([None if each is None else rounded(each) for each in values], kind)
            except decimal.InvalidOperation:
                pass  # a number does not fit
        found: list[decimal.Decimal | None] = [None] * len(values)
        for place, value in enumerate(values):
            try:
                if value is not None:
                    found[place] = rounded(value) if type(value) in _NUMBERS else decode(value)
            except (decimal.InvalidOperation, ValueMismatch):
                misfits.add(int(rows[place]))
        return pa.array(found, kind)

    return build


# ------------------------------------------------------------------------------ dates and times

_DAY: Final = (
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
"""Without 29 February, which not every year has."""
_DAY_US: Final = 86_400_000_000
_ZONE: Final = r"(?:Z|[+-]\d\d:\d\d)$"
_HAS_ZONE: Final = re.compile(_ZONE)


class _TextBuilder:
    """Builds a column of dates or times from texts.

    Texts that stop Arrow from converting a column are set apart by a regular expression.
    """

    kind: pa.DataType
    number: pa.DataType
    """The type of the numbers that are stored."""
    low: int
    high: int
    """Bounds of these numbers."""
    usual: str
    """A regular expression of texts that `_converted` takes, once `_trimmed` has trimmed them."""

    def __init__(self, kind: pa.DataType) -> None:
        self._decode = typed_leaf_decoder(kind)

    def __call__(self, values: Sequence[Any], rows: Rows, misfits: set[int]) -> pa.Array:
        texts = pa.array(values, pa.string())
        try:
            found = self._converted_at_once(texts)
        except pa.ArrowInvalid:
            found = self._converted_apart(texts, rows, misfits)
        numbers = found.view(self.number)
        bounds = pc.min_max(numbers)
        least, most = bounds["min"].as_py(), bounds["max"].as_py()
        if least is not None and not self.low <= least <= most <= self.high:
            each = arrow.as_numpy(numbers.fill_null(arrow.number(self.low, self.number)))
            misfits.update(rows[(each < self.low) | (each > self.high)].tolist())
        return found

    def _converted_apart(self, texts: pa.StringArray, rows: Rows, misfits: set[int]) -> pa.Array:
        trimmed = self._trimmed(texts)
        usual = pc.match_substring_regex(trimmed, self.usual)
        is_odd = ~arrow.as_mask(usual.fill_null(True))
        odd: list[str | None] = []
        for number in np.flatnonzero(is_odd).tolist():
            try:
                odd.append(self._decode(texts[number].as_py()))
            except ValueMismatch:
                odd.append(None)
                misfits.add(int(rows[number]))
        replaced = pc.replace_with_mask(trimmed, arrow.booleans(is_odd), pa.array(odd, pa.string()))
        return self._converted(replaced)

    def _converted_at_once(self, texts: pa.StringArray) -> pa.Array:
        """Returns the values of texts. Raises `pa.ArrowInvalid` if it cannot convert them all."""
        return texts.cast(self.kind)

    def _trimmed(self, texts: pa.StringArray) -> pa.StringArray:
        """Returns the texts without parts that have no influence on the value."""
        raise NotImplementedError

    def _converted(self, texts: pa.StringArray) -> pa.Array:
        """Returns the values of usual texts."""
        return texts.cast(self.kind)


class _DateBuilder(_TextBuilder):
    kind = pa.date32()
    number = pa.int32()
    low, high = TIMESTAMP_MIN_US // _DAY_US, TIMESTAMP_MAX_US // _DAY_US
    usual = f"^{_DAY}$"

    def _trimmed(self, texts: pa.StringArray) -> pa.StringArray:
        return pc.replace_substring_regex(texts, f"^({_DAY})[T ].*$", r"\1")


class _TimestampBuilder(_TextBuilder):
    kind = pa.timestamp("us", "UTC")
    number = pa.int64()
    low, high = TIMESTAMP_MIN_US, TIMESTAMP_MAX_US
    usual = (
        rf"^{_DAY}[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{{1,6}})?"
        r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)?$"
    )

    def _converted_at_once(self, texts: pa.StringArray) -> pa.Array:
        # Arrow converts them if all of them have a zone, or none has.
        first = next((each.as_py() for each in texts if each.is_valid), "Z")
        if _HAS_ZONE.search(first):
            return texts.cast(self.kind)
        return texts.cast(pa.timestamp("us")).view(self.kind)

    def _trimmed(self, texts: pa.StringArray) -> pa.StringArray:
        return pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")

    def _converted(self, texts: pa.StringArray) -> pa.Array:
        has_zone = pc.match_substring_regex(texts, _ZONE)
        utc = pc.binary_join_element_wise(texts, arrow.string("Z"), arrow.string(""))
        return pc.if_else(has_zone, texts, utc).cast(self.kind)


_BUILDERS: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], Build]], ...]] = (
    (pa.types.is_struct, _struct_builder),
    (pa.types.is_map, _map_builder),
    (pa.types.is_list, _list_builder),
    (pa.types.is_decimal, _decimal_builder),
    (pa.types.is_date, _DateBuilder),
    (pa.types.is_timestamp, _TimestampBuilder),
)
