"""Bounds the memory that one record's columns take, in proportion to its size.

`[{},{},…]` is three bytes for each element, which has a slot in every column of the element's
type. A record whose slots need more than `SLOT_BYTES_FACTOR` × its size + `FREE_SLOT_BYTES` is bad
as a whole. Strings are not counted, because a column never has more of them than the record.

A slot counts as 8 bytes, that of a DECIMAL as 16. With these figures, an array of structs of up to
twelve scalars cannot exceed the limit, and most types need no check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

SLOT_BYTES_FACTOR: Final = 32
FREE_SLOT_BYTES: Final = 64 * 1024

_ELEMENT_BYTES: Final = len("{},")  # that an element of an array of structs takes at least
_ENTRY_BYTES: Final = len('"":{},')
_SLOT: Final = 8
_SCALARS_FACTOR: Final = 8
"""A bound for arrays of scalars: 16 bytes for a DECIMAL, of which two bytes are JSON."""
_NULL_ELEMENT: Final = re.compile(rb"[\[,]\s*null")
_NULL: Final = re.compile(rb"null")


class SlotLimit:
    """The check for records of some fields."""

    def __init__(self, fields: Sequence[tuple[str, pa.DataType]]) -> None:
        """Args:
        fields: the field of the JSON object that fills each column, and the column's type.
        """
        self._counters = [(name, _counter(kind)) for name, kind in fields]
        self._width = sum(slot_width(kind) for _, kind in fields)
        self._widest = max((_widest(kind) for _, kind in fields), default=0)
        """The width of the widest struct that can exceed the limit; 0: none can."""
        has_map = any(_has_map(kind) for _, kind in fields)
        self._null = _NULL if has_map else _NULL_ELEMENT

    @property
    def is_needed(self) -> bool:
        """True if any record can exceed the limit."""
        return self._widest > 0

    def may_exceed(self, value: bytes) -> bool:
        """Returns whether the record could exceed the limit, from counts of its bytes."""
        size = len(value)
        spare = slot_limit(size) - self._width - _SCALARS_FACTOR * size
        if self._widest * size // _ELEMENT_BYTES <= spare:
            return False
        elements = value.count(b"{") + len(self._null.findall(value))
        return self._widest * elements > spare

    def is_exceeded(self, size: int, record: dict[str, Any]) -> bool:
        """Returns whether the record exceeds the limit.

        Args:
            size: its size in bytes.
            record: its fields, as `json_rules.parse` returns them.
        """
        slots = sum(count(record.get(name)) for name, count in self._counters)
        return slots > slot_limit(size)


def slot_limit(size: int) -> int:
    """Returns the bytes that the slots of a record of this size may take."""
    return SLOT_BYTES_FACTOR * size + FREE_SLOT_BYTES


def slot_width(kind: pa.DataType) -> int:
    """Returns the bytes of a slot without the elements of arrays and maps."""
    if pa.types.is_struct(kind):
        return sum(slot_width(field.type) for field in kind)
    return 2 * _SLOT if pa.types.is_decimal(kind) else _SLOT


def _widest(kind: pa.DataType) -> int:
    """Returns the width of the widest struct in an array or map that can exceed the limit, or 0."""
    if pa.types.is_struct(kind):
        return max(_widest(field.type) for field in kind)
    if pa.types.is_map(kind):
        width, least, inner = _SLOT + slot_width(kind.item_type), _ENTRY_BYTES, kind.item_type
    elif pa.types.is_list(kind):
        width, least, inner = slot_width(kind.value_type), _ELEMENT_BYTES, kind.value_type
    else:
        return 0
    can_exceed = pa.types.is_struct(inner) and width > SLOT_BYTES_FACTOR * least
    return max(width if can_exceed else 0, _widest(inner))


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_map(field.type) for field in kind)
    return pa.types.is_map(kind) or (pa.types.is_list(kind) and _has_map(kind.value_type))


def _counter(kind: pa.DataType) -> Callable[[Any], int]:
    """Returns a function that counts the bytes of a parsed value's slots.

    It takes time in proportion to the value. One that does not fit has the slot of a scalar.
    """
    width = slot_width(kind)
    if pa.types.is_struct(kind):
        return _struct_counter(kind, width)
    if pa.types.is_list(kind):
        element = _counter(kind.value_type)
        return lambda value: width + sum(map(element, value)) if isinstance(value, list) else width
    if pa.types.is_map(kind):
        item = _counter(kind.item_type)
        return lambda value: (
            width + _SLOT * len(value) + sum(map(item, value.values()))
            if isinstance(value, dict)
            else width
        )
    return lambda _value: width


def _struct_counter(kind: pa.StructType, width: int) -> Callable[[Any], int]:
    # Absent fields are in the width, so that only those of the value are visited.
    nested = {
        field.name: (_counter(field.type), slot_width(field.type))
        for field in kind
        if pa.types.is_nested(field.type)
    }

    def count(value: Any) -> int:
        if not isinstance(value, dict):
            return width if value is None else _SLOT
        found = width
        for name, each in value.items() if nested else ():
            if name in nested:
                inner, known = nested[name]
                found += inner(each) - known
        return found

    return count
