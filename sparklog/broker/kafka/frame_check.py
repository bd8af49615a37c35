"""Checks the lengths in a request before kio parses it; pure.

kio allocates as many items for an array as its length claims. A request of thirty bytes may claim
four billion, and a failed allocation ends the process, not the request. So this module first walks
over the bytes, with one step per field that finds the field's end.
Source: https://kafka.apache.org/protocol, "Protocol Primitive Types" and KIP-482.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_origin

from sparklog import errors
from sparklog.limits import KAFKA_ITEMS


class ManyItems(Exception):
    """Raised for a request with more items than the caller allows."""


class CheckedFrame(NamedTuple):
    """A request with valid lengths, and the number of items in all its arrays."""

    data: bytes
    items: int


class _Walk:
    """The state of a walk over one message."""

    __slots__ = ("edits", "left")

    def __init__(self, most_items: int) -> None:
        self.left = most_items
        """The number of items that the message's arrays may still contain."""
        self.edits: list[tuple[int, int, bytes]] = []
        """Replacements (start, end, new bytes) that remove unknown tags, in order."""


Step: TypeAlias = Callable[[bytes, int, _Walk], int]
"""Takes a message and a field's start; returns the field's end, which may exceed the message."""

_SIZES: Final = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "error_code": 2,
    "int32": 4,
    "uint32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "uuid": 16,
}
_LONGEST_VARINT: Final = 5
_NULL: Final = b"\xff"
"""The marker of a null message. To kio, any other byte means that the message is present."""


def checked(
    data: bytes, header: Any, schema: Any, *, most_items: int = KAFKA_ITEMS
) -> CheckedFrame:
    """Checks a request of this header and schema, and removes tagged fields unknown to the schema.

    Newer clients may send such fields, which kio does not skip. Raises `BadRequest` for lengths
    that exceed the request, and `ManyItems` for more than `most_items` items.
    """
    walk = _Walk(most_items)
    end = _checker(schema)(data, _checker(header)(data, 0, walk), walk)
    if end > len(data):
        raise errors.BadRequest(reason=f"{schema.__name__} is cut off after {len(data)} bytes")
    items = most_items - walk.left
    if not walk.edits:
        return CheckedFrame(data, items)
    parts, at = [], 0
    for start, stop, replacement in walk.edits:
        parts += [data[at:start], replacement]
        at = stop
    return CheckedFrame(b"".join((*parts, data[at:])), items)


@functools.cache
def _checker(schema: Hashable) -> Step:
    """Returns a step over a whole message, or a header."""
    kind: Any = schema
    is_flexible = bool(kind.__flexible__)
    steps: list[Step] = []
    tagged: dict[int, Step] = {}
    fixed = 0
    for field in dataclasses.fields(kind):
        tag = field.metadata.get("tag")
        if tag is not None:
            tagged[tag] = _step(field, is_flexible=is_flexible, is_tag=True)
            continue
        size = _fixed_size(field)
        if size:
            fixed += size
            continue
        if fixed:
            steps.append(_skip(fixed))
            fixed = 0
        # The client id in a header uses the old encoding in all versions (KIP-482).
        is_header = kind.__name__ == "RequestHeader"
        steps.append(_step(field, is_flexible=is_flexible and not is_header))
    if fixed:
        steps.append(_skip(fixed))
    if is_flexible:
        steps.append(functools.partial(_tags, tagged))
    return functools.partial(_all, tuple(steps))


def _fixed_size(field: dataclasses.Field[Any]) -> int:
    """Returns the size of a fixed-size field; 0 for others."""
    is_array = get_origin(_unless_null(field.type)) is tuple
    return 0 if is_array else _SIZES.get(field.metadata.get("kafka_type", ""), 0)


def _step(field: dataclasses.Field[Any], *, is_flexible: bool, is_tag: bool = False) -> Step:
    kind: Any = _unless_null(field.type)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        size = 0 if _is_schema(inner) else _SIZES.get(field.metadata["kafka_type"], 0)
        item = _checker(inner) if _is_schema(inner) else _text(field, is_flexible=is_flexible)
        return functools.partial(_array, _count if is_flexible else _old_count, item, size)
    if _is_schema(kind):
        is_nullable = kind is not field.type and not is_tag
        return functools.partial(_nullable, _checker(kind)) if is_nullable else _checker(kind)
    size = _fixed_size(field)
    return _skip(size) if size else _text(field, is_flexible=is_flexible)


def _text(field: dataclasses.Field[Any], *, is_flexible: bool) -> Step:
    if is_flexible:
        return _compact
    return _string if field.metadata.get("kafka_type") == "string" else _octets


def _unless_null(kind: Any) -> Any:
    if get_origin(kind) is tuple or not get_args(kind):
        return kind
    return next(each for each in get_args(kind) if each is not type(None))


def _is_schema(kind: Any) -> bool:
    return hasattr(kind, "__api_key__")


# ------------------------------------------------------------------------------ steps


def _all(steps: tuple[Step, ...], data: bytes, at: int, walk: _Walk) -> int:
    for step in steps:
        at = step(data, at, walk)
    return at


def _skip(size: int) -> Step:
    return lambda _data, at, _walk: at + size


def _string(data: bytes, at: int, _walk: _Walk) -> int:
    return at + 2 + max(int.from_bytes(data[at : at + 2], "big", signed=True), 0)


def _octets(data: bytes, at: int, _walk: _Walk) -> int:
    return at + 4 + max(int.from_bytes(data[at : at + 4], "big", signed=True), 0)


def _compact(data: bytes, at: int, _walk: _Walk) -> int:
    length, at = _varint(data, at)
    return at + max(length - 1, 0)


def _nullable(step: Step, data: bytes, at: int, walk: _Walk) -> int:
    is_null = data[at : at + 1] == _NULL
    return at + 1 if is_null else step(data, at + 1, walk)


def _array(
    count_of: Callable[[bytes, int], tuple[int, int]],
    item: Step,
    size: int,
    data: bytes,
    at: int,
    walk: _Walk,
) -> int:
    """Steps over an array. `size` is the size of each item, or 0 if it varies (from 1 up)."""
    count, at = count_of(data, at)
    walk.left -= count
    if count * max(size, 1) > len(data) - at or count > KAFKA_ITEMS:
        raise _too_many_items(count, data, at)
    if walk.left < 0:
        raise ManyItems
    if size:
        return at + count * size
    for _ in range(count):
        at = item(data, at, walk)
    return at


def _old_count(data: bytes, at: int) -> tuple[int, int]:
    return max(int.from_bytes(data[at : at + 4], "big", signed=True), 0), at + 4


def _count(data: bytes, at: int) -> tuple[int, int]:
    length, at = _varint(data, at)
    return max(length - 1, 0), at


def _tags(known: dict[int, Step], data: bytes, at: int, walk: _Walk) -> int:
    first = at
    count, at = _varint(data, at)
    walk.left -= count
    if count > len(data) - at or count > KAFKA_ITEMS:
        raise _too_many_items(count, data, at)
    if walk.left < 0:
        raise ManyItems
    kept = []
    for _ in range(count):
        begin = at
        tag, at = _varint(data, at)
        size, at = _varint(data, at)
        if tag in known:
            edits = len(walk.edits)
            known[tag](data, at, walk)
            if len(walk.edits) > edits:
                raise errors.BadRequest(reason=f"there are unknown tags within tag {tag}")
            kept.append(data[begin : at + size])
        at += size
    if len(kept) < count:
        walk.edits.append((first, at, b"".join((_as_varint(len(kept)), *kept))))
    return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for number, octet in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (octet & 0x7F) << (7 * number)
        if octet < 0x80:
            return value, at + number + 1
    raise errors.BadRequest(reason=f"byte {at} of {len(data)} does not begin a varint")


def _as_varint(value: int) -> bytes:
    """Encodes a number below 128: no message has more known tags."""
    return bytes([value])


def _too_many_items(count: int, data: bytes, at: int) -> errors.BadRequest:
    left_bytes = len(data) - at
    reason = f"an array of {count} items in {left_bytes} bytes; the limit is {KAFKA_ITEMS} items"
    return errors.BadRequest(reason=reason)
