"""Compiled loops over the bytes of Kafka's records: no Python object per record.

A record is `length, attributes, timestamp delta, offset delta, key, value, headers`, with lengths
and deltas as zigzag varints; a length of -1 is a null.
Source: https://kafka.apache.org/documentation/#recordbatch and KIP-98.

All loops are pure, release the GIL unless their name ends in `small`, and are compiled once per
machine: numba saves them in `CACHE`, if there is such a folder. No input is trusted: every read is
within bounds, provided that `measure` runs before `take`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from sparklog.formats import kernel_cache

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _nothing() -> None:
    """Represents the loops of this file in the search for a folder to save them in."""


CACHE: Final = kernel_cache.folder_for(_nothing)
"""The folder of the compiled loops; None: each process compiles them again."""


def _compiled(loop: _Loop) -> _Loop:
    return cast("_Loop", njit(cache=CACHE is not None, nogil=True)(loop))


def _compiled_held(loop: _Loop) -> _Loop:
    return cast("_Loop", njit(cache=CACHE is not None)(loop))


# ------------------------------------------------------------------------------ error codes

FINE: Final = 0
CUT_OFF: Final = 1
BAD_VARINT: Final = 2
BAD_LENGTH: Final = 3
BAD_ATTRIBUTES: Final = 4
BAD_OFFSET: Final = 5
TRAILING: Final = 6

PROBLEMS: Final = {
    CUT_OFF: "ends in the middle of a record",
    BAD_VARINT: "has a number with too many bytes",
    BAD_LENGTH: "has a record whose parts do not add up to its length",
    BAD_ATTRIBUTES: "has a record with attributes, which are not allowed",
    BAD_OFFSET: "has offsets that do not increase by one from 0",
    TRAILING: "has bytes after its last record",
}

# ------------------------------------------------------------------------------ measuring

STATUS: Final = 0
KEYS: Final = 1
KEY_BYTES: Final = 2
VALUE_BYTES: Final = 3
VALUES: Final = 4
HEADERS: Final = 5
HEADER_KEY_BYTES: Final = 6
HEADER_VALUE_BYTES: Final = 7
MIN_DELTA: Final = 8
MAX_DELTA: Final = 9
LARGEST: Final = 10
MEASURES: Final = 11


@_compiled
def _varint(data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """Returns (value, end); a negative end is an error code."""
    raw = np.uint64(0)
    shift = np.uint64(0)
    while at < end:
        byte = np.uint64(data[np.uint64(at)])
        at += 1
        raw |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), at
        shift += np.uint64(7)
        if shift > np.uint64(63):
            return 0, -BAD_VARINT
    return 0, -CUT_OFF


@_compiled
def _part(data: Bytes, at: int, end: int, least: int) -> tuple[int, int]:
    """Returns (length, start) of a part that ends by `end`; a negative start is an error code."""
    length, at = _varint(data, at, end)
    if at < 0:
        return 0, at
    if length < least or length > end - at:
        return 0, -BAD_LENGTH
    return length, at


@_compiled
def _measure_headers(data: Bytes, at: int, end: int, found: Longs) -> tuple[int, int]:
    """Returns (size, end) of the headers; a negative end is an error code."""
    size = 0
    count, at = _part(data, at, end, 0)
    if at < 0:
        return 0, at
    found[HEADERS] += count
    for _ in range(count):
        length, at = _part(data, at, end, 0)
        if at < 0:
            return 0, at
        at += length
        size += length
        found[HEADER_KEY_BYTES] += length
        length, at = _part(data, at, end, -1)
        if at < 0:
            return 0, at
        length = max(length, 0)
        at += length
        size += length
        found[HEADER_VALUE_BYTES] += length
    return size, at


@_compiled
def _measure_record(data: Bytes, at: int, end: int, number: int, found: Longs) -> int:
    """Returns the end of the record whose length was just read; a negative one is an error code."""
    if at == end or data[at] != 0:
        return -BAD_ATTRIBUTES
    delta, at = _varint(data, at + 1, end)
    if at < 0:
        return at
    offset, at = _varint(data, at, end)
    if at < 0:
        return at
    if offset != number:
        return -BAD_OFFSET
    key, at = _part(data, at, end, -1)
    if at < 0:
        return at
    at += max(key, 0)
    value, at = _part(data, at, end, -1)
    if at < 0:
        return at
    at += max(value, 0)
    headers, at = _measure_headers(data, at, end, found)
    if at < 0:
        return at
    found[KEYS] += key >= 0
    found[KEY_BYTES] += max(key, 0)
    found[VALUES] += value >= 0
    found[VALUE_BYTES] += max(value, 0)
    found[MIN_DELTA] = min(found[MIN_DELTA], delta)
    found[MAX_DELTA] = max(found[MAX_DELTA], delta)
    found[LARGEST] = max(found[LARGEST], max(key, 0) + max(value, 0) + headers)
    return at


@_compiled
def measure(data: Bytes, ends: Longs, counts: Longs, found: Longs) -> None:
    """Scans the records of consecutive batches, and fills `found`.

    Args:
        data: the records of all batches, and nothing else.
        ends: where each batch's records end.
        counts: the number of records in each batch.
        found: `MEASURES`; `LARGEST` is the greatest sum of key, value and headers of a record.
    """
    found[:] = 0
    found[MIN_DELTA] = 2**62
    found[MAX_DELTA] = -(2**62)
    at = 0
    for batch in range(len(counts)):
        size = ends[batch]
        for number in range(counts[batch]):
            length, at = _varint(data, at, size)
            if at < 0 or length > size - at:
                found[STATUS] = CUT_OFF if at >= 0 else -at
                return
            if length < 0:
                found[STATUS] = BAD_LENGTH
                return
            end = at + length
            at = _measure_record(data, at, end, number, found)
            if at != end:
                found[STATUS] = -at if at < 0 else BAD_LENGTH
                return
        if at != size:
            found[STATUS] = TRAILING
            return


@_compiled_held
def measure_small(data: Bytes, ends: Longs, counts: Longs, found: Longs) -> None:
    """Measures without releasing the GIL.

    Reacquiring it from other threads takes longer than measuring a few kilobytes.
    """
    measure(data, ends, counts, found)


# ------------------------------------------------------------------------------ taking apart


@_compiled
def _copy(source: Bytes, first: int, target: Bytes, at: int, length: int) -> None:
    # A signed index may count from the end, and checking for that is twenty times as expensive.
    source_at, target_at = np.uint64(first), np.uint64(at)
    for each in range(np.uint64(length)):
        target[target_at + each] = source[source_at + each]


@_compiled
def _take(data: Bytes, at: int, end: int, target: Bytes, target_at: int) -> tuple[int, int]:
    """Copies a part's bytes to `target`; returns (length, end) of the part."""
    length, at = _varint(data, at, end)
    if length > 0:
        _copy(data, at, target, target_at, length)
        at += length
    return length, at


@_compiled
def take(
    data: Bytes,
    deltas: Longs,
    key_ends: Ints,
    keys: Bytes,
    has_key: Flags,
    value_ends: Ints,
    values: Bytes,
    has_value: Flags,
) -> None:
    """Extracts timestamp deltas, keys and values of records that `measure` has found to be valid.

    Every target is as long as was measured; `key_ends` and `value_ends` have one number more than
    there are records, the first of which is already 0.
    """
    size = len(data)
    at, key_at, value_at = 0, 0, 0
    for number in range(len(deltas)):
        length, at = _varint(data, at, size)
        end = at + length
        deltas[number], at = _varint(data, at + 1, end)
        _, at = _varint(data, at, end)
        length, at = _take(data, at, end, keys, key_at)
        has_key[number] = length >= 0
        key_at += max(length, 0)
        key_ends[number + 1] = key_at
        length, at = _take(data, at, end, values, value_at)
        has_value[number] = length >= 0
        value_at += max(length, 0)
        value_ends[number + 1] = value_at
        at = end


@_compiled
def take_headers(
    data: Bytes,
    list_ends: Ints,
    name_ends: Ints,
    names: Bytes,
    value_ends: Ints,
    values: Bytes,
    has_value: Flags,
) -> None:
    """Extracts the headers of the same records; `list_ends` counts those up to each record."""
    size = len(data)
    at, header, name_at, value_at = 0, 0, 0, 0
    for number in range(len(list_ends) - 1):
        length, at = _varint(data, at, size)
        end = at + length
        _, at = _varint(data, at + 1, end)
        _, at = _varint(data, at, end)
        for _ in range(2):
            length, at = _varint(data, at, end)
            at += max(length, 0)
        count, at = _varint(data, at, end)
        for _ in range(count):
            length, at = _take(data, at, end, names, name_at)
            name_at += length
            name_ends[header + 1] = name_at
            length, at = _take(data, at, end, values, value_at)
            has_value[header] = length >= 0
            value_at += max(length, 0)
            value_ends[header + 1] = value_at
            header += 1
        list_ends[number + 1] = header


# ------------------------------------------------------------------------------ putting together


@_compiled
def _zigzag(value: int) -> Any:
    return np.uint64((np.int64(value) << np.int64(1)) ^ (np.int64(value) >> np.int64(63)))


@_compiled
def _size_of(value: int) -> int:
    raw = _zigzag(value)
    size = 1
    while raw >= np.uint64(0x80):
        raw >>= np.uint64(7)
        size += 1
    return size


@_compiled
def _put(target: Bytes, at: int, value: int) -> int:
    raw = _zigzag(value)
    while raw >= np.uint64(0x80):
        target[at] = np.uint8((raw & np.uint64(0x7F)) | np.uint64(0x80))
        raw >>= np.uint64(7)
        at += 1
    target[at] = np.uint8(raw)
    return at + 1


@_compiled
def _length(ends: Ints, number: int, there: bool) -> int:
    """Returns the length of a part as Kafka writes it: -1 for a null."""
    return ends[number + 1] - ends[number] if there else -1


@_compiled
def _part_size(length: int) -> int:
    return _size_of(length) + max(length, 0)


@_compiled
def _put_part(target: Bytes, at: int, source: Bytes, first: int, length: int) -> int:
    at = _put(target, at, length)
    if length > 0:
        _copy(source, first, target, at, length)
        at += length
    return at


@_compiled
def sizes(
    offsets: Longs,
    stamps: Longs,
    key_ends: Ints,
    has_key: Flags,
    value_ends: Ints,
    has_value: Flags,
    list_ends: Ints,
    name_ends: Ints,
    header_ends: Ints,
    has_header: Flags,
    bodies: Longs,
) -> int:
    """Fills `bodies` with each record's length field; returns the size of all records in bytes.

    `offsets` and `stamps` are deltas. `list_ends` is empty if no record has headers; otherwise the
    four header arguments are as in Arrow, starting at 0.
    """
    total = 0
    for number in range(len(offsets)):
        size = 1 + _size_of(stamps[number]) + _size_of(offsets[number])
        size += _part_size(_length(key_ends, number, has_key[number]))
        size += _part_size(_length(value_ends, number, has_value[number]))
        if len(list_ends):
            first, end = list_ends[number], list_ends[number + 1]
            size += _size_of(end - first)
            for header in range(first, end):
                size += _part_size(_length(name_ends, header, True))
                size += _part_size(_length(header_ends, header, has_header[header]))
        else:
            size += 1
        bodies[number] = size
        total += size + _size_of(size)
    return total


@_compiled
def put(
    target: Bytes,
    bodies: Longs,
    offsets: Longs,
    stamps: Longs,
    key_ends: Ints,
    keys: Bytes,
    has_key: Flags,
    value_ends: Ints,
    values: Bytes,
    has_value: Flags,
    list_ends: Ints,
    name_ends: Ints,
    names: Bytes,
    header_ends: Ints,
    header_values: Bytes,
    has_header: Flags,
) -> int:
    """Writes the records that `sizes` has measured; returns where they end."""
    at = 0
    for number in range(len(offsets)):
        at = _put(target, at, bodies[number])
        target[at] = 0
        at = _put(target, at + 1, stamps[number])
        at = _put(target, at, offsets[number])
        length = _length(key_ends, number, has_key[number])
        at = _put_part(target, at, keys, key_ends[number], length)
        length = _length(value_ends, number, has_value[number])
        at = _put_part(target, at, values, value_ends[number], length)
        if not len(list_ends):
            target[at] = 0
            at += 1
            continue
        at = _put(target, at, list_ends[number + 1] - list_ends[number])
        for header in range(list_ends[number], list_ends[number + 1]):
            length = _length(name_ends, header, True)
            at = _put_part(target, at, names, name_ends[header], length)
            length = _length(header_ends, header, has_header[header])
            at = _put_part(target, at, header_values, header_ends[header], length)
    return at
