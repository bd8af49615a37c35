"""Whether the lengths in a message can be true, to be known before kio reads it; pure.

kio makes room at once for as many items as an array says that it has. A request of thirty bytes may
say four billion, and memory that cannot be had ends the process, not the request. So a step for
each field goes over the bytes first, and finds where the field ends.
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
    """A request has more items than were to be gone over at once."""


class Checked(NamedTuple):
    """A request whose lengths add up, and how many items its arrays have together."""

    data: bytes
    items: int


class _Walk:
    """Over one message: how many more items its arrays may have, and tags that nobody knows."""

    __slots__ = ("edits", "left")

    def __init__(self, most_items: int) -> None:
        self.left = most_items
        self.edits: list[tuple[int, int, bytes]] = []
        """(from, to, what shall stand there), in order."""


Step: TypeAlias = Callable[[bytes, int, _Walk], int]
"""(message, where the field begins, …) to where it ends, which may be behind the message's end."""

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


def checked(data: bytes, header: Any, schema: Any, *, most_items: int = KAFKA_ITEMS) -> Checked:
    """A request of that header and schema, without tagged fields that the schema does not know.

    Newer clients may send some, which kio does not pass over. Raises `BadRequest` where lengths
    cannot be true, and `ManyItems` where they may be, but there are more than `most_items`.
    """
    walk = _Walk(most_items)
    end = _checker(schema)(data, _checker(header)(data, 0, walk), walk)
    if end > len(data):
        raise errors.BadRequest(reason=f"{schema.__name__}: {len(data)} bytes are not all of it")
    items = most_items - walk.left
    if not walk.edits:
        return Checked(data, items)
    parts, at = [], 0
    for first, last, instead in walk.edits:
        parts += [data[at:first], instead]
        at = last
    return Checked(b"".join((*parts, data[at:])), items)


@functools.cache
def _checker(schema: Hashable) -> Step:
    """A step over a whole message, or a header."""
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
        # A header's client id has the old form in every version, so that anybody can read it.
        is_client_id = field.name == "client_id" and kind.__name__ == "RequestHeader"
        steps.append(_step(field, is_flexible=is_flexible and not is_client_id))
    if fixed:
        steps.append(_skip(fixed))
    if is_flexible:
        steps.append(functools.partial(_tags, tagged))
    return functools.partial(_all, tuple(steps))


def _fixed_size(field: dataclasses.Field[Any]) -> int:
    """0 for what has no size of its own."""
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
    is_there = int.from_bytes(data[at : at + 1], "big", signed=True) > 0
    return step(data, at + 1, walk) if is_there else at + 1


def _array(
    count_of: Callable[[bytes, int], tuple[int, int]],
    item: Step,
    size: int,
    data: bytes,
    at: int,
    walk: _Walk,
) -> int:
    """`size`: of each item, or 0 where they differ; all have a byte at least."""
    count, at = count_of(data, at)
    walk.left -= count
    if count * max(size, 1) > len(data) - at or count > KAFKA_ITEMS:
        raise _lie(count, data, at)
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
        raise _lie(count, data, at)
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
                raise errors.BadRequest(reason=f"unknown tags within tag {tag}")
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
    raise errors.BadRequest(reason=f"no number at byte {at} of a request of {len(data)}")


def _as_varint(value: int) -> bytes:
    """Of a number below 128: no message has so many tags that are known."""
    return bytes([value])


def _lie(count: int, data: bytes, at: int) -> errors.BadRequest:
    there = f"{count} items in the last {len(data) - at} bytes of a request"
    return errors.BadRequest(reason=f"{there}; {KAFKA_ITEMS} are the most altogether")
