"""The compiled loop over Avro values: no Python object per record.

It runs a `program` for each value, and lays out the buffers of the Arrow columns, in one call for a
block of values that does not hold the GIL. A value that it cannot decode is slow: what it has
written for it is undone, its row is null, and the rules decode it. A value that it decodes has the
result of the rules.

No input is trusted. Every byte is read within its value, every buffer is checked before it is
written to, and a value with so many elements that the rules refuse it is slow. If a buffer is full,
the call ends and names it, and is repeated with a larger one.

Imports numba. The loop is compiled once per machine: numba saves it in `CACHE`, if there is such a
folder. `loops` decides whether and when to import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from sparklog.formats import kernel_cache
from sparklog.formats.values.avro.conversions import INT_MAX, INT_MIN
from sparklog.formats.values.avro.layout import Buffers
from sparklog.formats.values.avro.program import (
    BEGIN_ELEMENTS,
    BEGIN_STRUCT,
    BITS,
    BRANCH,
    CALL,
    END,
    GO_BACK,
    JUMP,
    LISTS,
    NEXT,
    NEXT_ELEMENT,
    NO_SCHEMA,
    NULL_BRANCH,
    NUMBERS,
    OPERATION,
    OUTPUT,
    PUT_BOOLEAN,
    PUT_BYTES,
    PUT_DATE,
    PUT_DECIMAL,
    PUT_DOUBLE,
    PUT_FIXED,
    PUT_FLOAT,
    PUT_NULL,
    PUT_SYMBOL,
    PUT_TEXT,
    PUT_TIME,
    PUT_WHOLE,
    PUT_WHOLE_AS_DOUBLE,
    REMEMBER,
    RETURN,
    SKIP_BYTES,
    SKIP_COUNTS,
    SKIP_NUMBER,
    SKIP_TEXT,
    TEXTS,
    A,
    B,
    Bytes,
    C,
    Ints,
    Longs,
    Outputs,
)
from sparklog.formats.values.avro.rules import FRAME_BYTES
from sparklog.formats.values.sizes import FREE_SLOT_BYTES, SLOT_BYTES_FACTOR
from sparklog.limits import TIMESTAMP_MAX_US, TIMESTAMP_MIN_US

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def _nothing() -> None:
    """Represents the loops of this file in the search for a folder to save them in."""


CACHE: Final = kernel_cache.folder_for(_nothing)
"""The folder of the compiled loops; None: each process compiles them again."""


def _compiled(loop: _Loop) -> _Loop:
    return cast("_Loop", njit(cache=CACHE is not None, nogil=True)(loop))


DONE: Final = -1
_SLOW: Final = -2
_MAX_FRAMES: Final = 100
"""Calls and lists around a value. With the 17 records and unions of its column, there are fewer
levels than the rules allow."""
_MAP_ENTRIES: Final = 32
"""Maps with more entries are slow, because every pair of keys is compared."""
_DAY_US: Final = 86_400_000_000
_DAY_MIN: Final = TIMESTAMP_MIN_US // _DAY_US
_DAY_MAX: Final = TIMESTAMP_MAX_US // _DAY_US
_LONG_MAX: Final = 2**63 - 1
_DECIMAL_BYTES: Final = 16
_DECIMAL_HIGH: Final = 10**38 >> 64
"""The upper half of the least number that has too many digits."""

# ------------------------------------------------------------------------------ reading


@_compiled
def _long_number(data: Bytes, at: Any, end: Any) -> tuple[Any, int]:
    raw = np.uint64(0)
    shift = np.uint64(0)
    while at < end:
        byte = np.uint64(data[np.uint64(at)])
        at += 1
        raw |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            if shift == np.uint64(63) and byte > np.uint64(1):
                return np.int64(0), -1
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), at
        shift += np.uint64(7)
        if shift > np.uint64(63):
            return np.int64(0), -1
    return np.int64(0), -1


@_compiled
def _number(data: Bytes, at: Any, end: Any) -> tuple[Any, int]:
    """Reads a zigzag varint; returns it, and where it ends: a negative number if it does not."""
    if at >= end:
        return np.int64(0), -1
    byte = np.int64(data[np.uint64(at)])
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at + 1
    return _long_number(data, at, end)


@_compiled
def _fixed_bits(data: Bytes, at: Any, size: Any) -> Any:
    """Returns so many bytes as a number, little endian."""
    bits = np.uint64(0)
    for each in range(np.uint64(size)):
        byte = np.uint64(data[np.uint64(at) + each])
        bits |= byte << (np.uint64(8) * each)
    return bits


@_compiled
def _is_utf8(data: Bytes, at: Any, end: Any) -> bool:
    while at < end:
        lead = data[np.uint64(at)]
        at += 1
        if lead < 0x80:
            continue
        low, high, more = 0x80, 0xBF, 1
        if lead < 0xC2 or lead > 0xF4:
            return False
        if lead >= 0xF0:
            more = 3
            low = 0x90 if lead == 0xF0 else 0x80
            high = 0x8F if lead == 0xF4 else 0xBF
        elif lead >= 0xE0:
            more = 2
            low = 0xA0 if lead == 0xE0 else 0x80
            high = 0x9F if lead == 0xED else 0xBF
        if more > end - at:
            return False
        if data[np.uint64(at)] < low or data[np.uint64(at)] > high:
            return False
        for each in range(1, more):
            if data[np.uint64(at + each)] & 0xC0 != 0x80:
                return False
        at += more
    return True


# ------------------------------------------------------------------------------ writing
#
# Each function takes the buffers that it needs one by one: taking them from a tuple would count a
# reference every time, which takes longer than everything else.


@_compiled
def _end_cell(octets: Bytes, validity: Longs, cell_count: Longs, output: Any) -> None:
    """Ends a cell that is not null."""
    cell = cell_count[output]
    cell_count[output] = cell + 1
    place = np.uint64(validity[output] + (cell >> 3))
    octets[place] |= np.uint8(1 << (cell & 7))


@_compiled
def _put_nulls(
    kinds: Ints,
    ends: Ints,
    widths: Ints,
    octets: Bytes,
    ints: Ints,
    longs: Longs,
    validity: Longs,
    cells: Longs,
    cell_count: Longs,
    data_count: Longs,
    output: Any,
) -> None:
    """Writes a null to an output, and to those inside, other than the elements of lists."""
    end = ends[output]
    while output < end:
        cell, start, kind = cell_count[output], cells[output], kinds[output]
        cell_count[output] = cell + 1
        bit = np.uint8(~(1 << (cell & 7)) & 0xFF)
        octets[np.uint64(validity[output] + (cell >> 3))] &= bit
        if kind == NUMBERS:
            width = widths[output]
            if width == 8:
                longs[np.uint64((start >> 3) + cell)] = 0
            else:
                for each in range(width):
                    octets[np.uint64(start + cell * width + each)] = 0
        elif kind == TEXTS:
            ints[np.uint64((start >> 2) + cell + 1)] = data_count[output]
        elif kind == LISTS:
            ints[np.uint64((start >> 2) + cell + 1)] = cell_count[output + 1]
            output = ends[output]
            continue
        elif kind == BITS:
            octets[np.uint64(start + (cell >> 3))] &= bit
        output += 1


@_compiled
def _copy(source: Bytes, at: Any, target: Bytes, to: Any, size: Any) -> Any:
    """Copies bytes; returns all of their bits that occur."""
    first, begin = np.uint64(at), np.uint64(to)
    bits = np.uint8(0)
    for each in range(np.uint64(size)):
        byte = source[first + each]
        target[begin + each] = byte
        bits |= byte
    return bits


@_compiled
def _put_decimal(data: Bytes, at: Any, size: Any, longs: Longs, place: Any) -> bool:
    """Writes a big-endian number of at most 16 bytes; returns false if it has too many digits."""
    is_negative = size > 0 and data[np.uint64(at)] >= 0x80
    fill = np.uint64(0xFFFFFFFFFFFFFFFF) if is_negative else np.uint64(0)
    low, high = fill, fill
    for each in range(size):
        high = (high << np.uint64(8)) | (low >> np.uint64(56))
        low = (low << np.uint64(8)) | np.uint64(data[np.uint64(at + each)])
    if size == _DECIMAL_BYTES:
        # Some numbers of 38 digits are refused as well, which the rules accept.
        signed = np.int64(high)
        if signed >= _DECIMAL_HIGH or signed < -_DECIMAL_HIGH:
            return False
    longs[np.uint64(place)] = np.int64(low)
    longs[np.uint64(place + 1)] = np.int64(high)
    return True


@_compiled
def _has_equal_keys(octets: Bytes, ints: Ints, ends: Any, data: Any, first: Any, last: Any) -> bool:
    """Returns whether two of a map's keys are equal, which are the cells from first to last."""
    for one in range(first + 1, last):
        start = ints[np.uint64(ends + one)]
        size = ints[np.uint64(ends + one + 1)] - start
        for other in range(first, one):
            begin = ints[np.uint64(ends + other)]
            if ints[np.uint64(ends + other + 1)] - begin != size:
                continue
            same = 0
            while same < size and (
                octets[np.uint64(data + start + same)] == octets[np.uint64(data + begin + same)]
            ):
                same += 1
            if same == size:
                return True
    return False


# ------------------------------------------------------------------------------ values


@_compiled
def _decode(  # noqa: C901 (one instruction after the other)
    data: Bytes,
    offsets: Ints,
    starts: Ints,
    width: int,
    code: Ints,
    table: Ints,
    symbol_ends: Longs,
    symbols: Bytes,
    kinds: Ints,
    ends: Ints,
    widths: Ints,
    octets: Bytes,
    ints: Ints,
    longs: Longs,
    doubles: npt.NDArray[np.float64],
    validity: Longs,
    cells: Longs,
    texts: Longs,
    cell_room: Longs,
    data_room: Longs,
    cell_count: Longs,
    data_count: Longs,
    value: Longs,
    kept_cells: Longs,
    kept_data: Longs,
    frames: Longs,
) -> int:
    """Decodes values, up to the first one that it cannot decode.

    Returns `_SLOW` if there is such a value, or none for which there is an instruction, `DONE`, or
    the number of a buffer that is full.

    Args:
        value: the number of the first value, a list of one; of that value afterwards.
        kept_cells, kept_data: how much of the buffers is used before that value, afterwards.
        frames: for each call or list around the current place, the instruction to go back to or
            that began it, the elements left in its block, and the first key of a map.
    """
    at: Any = np.int64(0)
    end: Any = np.int64(0)
    slots: Any = np.int64(0)
    pc: Any = np.int64(0)
    depth: Any = np.int64(0)
    remembered: Any = np.int64(0)
    is_next = True
    while True:
        if is_next:
            number = value[0]
            if number == len(starts):
                return DONE
            for each in range(len(kinds)):
                kept_cells[each] = cell_count[each]
                kept_data[each] = data_count[each]
            pc = np.int64(starts[number])
            if pc < 0:
                return _SLOW
            at, end = np.int64(offsets[number]), np.int64(offsets[number + 1])
            slots = SLOT_BYTES_FACTOR * (end - at) + FREE_SLOT_BYTES - width
            at += FRAME_BYTES
            depth = 0
            is_next = False
        step = np.uint64(pc)
        operation, output = code[step, OPERATION], code[step, OUTPUT]
        own = np.uint64(output)
        null = code[step, NULL_BRANCH]
        if null >= 0:
            if at >= end:
                return _SLOW
            branch = data[np.uint64(at)]
            at += 1
            if branch != 0 and branch != 2:
                return _SLOW
            if branch >> 1 == null:
                if output >= 0:
                    _put_nulls(
                        kinds,
                        ends,
                        widths,
                        octets,
                        ints,
                        longs,
                        validity,
                        cells,
                        cell_count,
                        data_count,
                        output,
                    )
                pc = code[step, NEXT]
                continue

        if operation == PUT_WHOLE:
            number, at = _number(data, at, end)
            if at < 0 or (code[step, A] and (number < INT_MIN or number > INT_MAX)):
                return _SLOW
            longs[np.uint64((cells[own] >> 3) + cell_count[own])] = number

        elif operation in (PUT_TEXT, PUT_BYTES):
            size, at = _number(data, at, end)
            if at < 0 or size < 0 or size > end - at:
                return _SLOW
            if data_count[own] + size > data_room[own]:
                return 2 * output + 1
            bits = _copy(data, at, octets, texts[own] + data_count[own], size)
            data_count[own] += size
            ints[np.uint64((cells[own] >> 2) + cell_count[own] + 1)] = data_count[own]
            if bits >= 0x80 and operation == PUT_TEXT and not _is_utf8(data, at, at + size):
                return _SLOW
            at += size

        elif operation in (PUT_DOUBLE, PUT_FLOAT):
            size = 8 if operation == PUT_DOUBLE else 4
            if size > end - at:
                return _SLOW
            if size == 8:
                place = (cells[own] >> 3) + cell_count[own]
                longs[np.uint64(place)] = np.int64(_fixed_bits(data, at, 8))
            else:
                # The rules convert it in the same way, so a signaling NaN becomes a quiet one too.
                bits32 = np.uint32(_fixed_bits(data, at, 4))
                place = (cells[own] >> 3) + cell_count[own]
                doubles[np.uint64(place)] = np.float64(bits32.view(np.float32))
            at += size

        elif operation == PUT_NULL:
            _put_nulls(
                kinds,
                ends,
                widths,
                octets,
                ints,
                longs,
                validity,
                cells,
                cell_count,
                data_count,
                output,
            )

        elif operation == PUT_BOOLEAN:
            if at >= end or data[np.uint64(at)] > 1:
                return _SLOW
            cell = cell_count[own]
            place = cells[own] + (cell >> 3)
            bit = np.uint8(1 << (cell & 7))
            if data[np.uint64(at)]:
                octets[np.uint64(place)] |= bit
            else:
                octets[np.uint64(place)] &= np.uint8(~bit & 0xFF)
            at += 1

        elif operation == PUT_TIME:
            number, at = _number(data, at, end)
            if at < 0 or (code[step, A] and (number < INT_MIN or number > INT_MAX)):
                return _SLOW
            factor = np.int64(code[step, B])
            if factor < 0:
                number = number // -factor
            elif number > _LONG_MAX // factor or number < -(_LONG_MAX // factor):
                return _SLOW
            else:
                number *= factor
            if code[step, C] and (number < TIMESTAMP_MIN_US or number > TIMESTAMP_MAX_US):
                return _SLOW
            longs[np.uint64((cells[own] >> 3) + cell_count[own])] = number

        elif operation == PUT_DATE:
            number, at = _number(data, at, end)
            if at < 0 or number < _DAY_MIN or number > _DAY_MAX:
                return _SLOW
            ints[np.uint64((cells[own] >> 2) + cell_count[own])] = number

        elif operation == PUT_WHOLE_AS_DOUBLE:
            number, at = _number(data, at, end)
            if at < 0 or (code[step, A] and (number < INT_MIN or number > INT_MAX)):
                return _SLOW
            doubles[np.uint64((cells[own] >> 3) + cell_count[own])] = np.float64(number)

        elif operation == PUT_FIXED:
            size = np.int64(code[step, A])
            if size > end - at:
                return _SLOW
            if data_count[own] + size > data_room[own]:
                return 2 * output + 1
            _copy(data, at, octets, texts[own] + data_count[own], size)
            data_count[own] += size
            ints[np.uint64((cells[own] >> 2) + cell_count[own] + 1)] = data_count[own]
            at += size

        elif operation == PUT_SYMBOL:
            number, at = _number(data, at, end)
            if at < 0 or number < 0 or number >= code[step, B]:
                return _SLOW
            symbol = code[step, A] + number
            begin = symbol_ends[np.uint64(symbol)]
            size = symbol_ends[np.uint64(symbol + 1)] - begin
            slots -= size
            if slots < 0:
                return _SLOW
            if data_count[own] + size > data_room[own]:
                return 2 * output + 1
            _copy(symbols, begin, octets, texts[own] + data_count[own], size)
            data_count[own] += size
            ints[np.uint64((cells[own] >> 2) + cell_count[own] + 1)] = data_count[own]

        elif operation == PUT_DECIMAL:
            size = np.int64(code[step, A])
            if size < 0:
                size, at = _number(data, at, end)
            if at < 0 or size < 0 or size > end - at or size > _DECIMAL_BYTES:
                return _SLOW
            place = (cells[own] >> 3) + 2 * cell_count[own]
            if not _put_decimal(data, at, size, longs, place):
                return _SLOW
            at += size

        elif operation == BEGIN_STRUCT:
            pass

        elif operation == SKIP_NUMBER:
            number, at = _number(data, at, end)
            if at < 0:
                return _SLOW

        elif operation == SKIP_BYTES:
            at += code[step, A]
            if at > end:
                return _SLOW

        elif operation == SKIP_TEXT:
            size, at = _number(data, at, end)
            if at < 0 or size < 0 or size > end - at:
                return _SLOW
            at += size

        elif operation in (BEGIN_ELEMENTS, NEXT_ELEMENT):
            if operation == BEGIN_ELEMENTS:
                if depth == _MAX_FRAMES:
                    return _SLOW
                frames[depth, 0] = pc
                frames[depth, 1] = 0
                if code[step, B]:
                    frames[depth, 2] = cell_count[own + np.uint64(1)]
                depth += 1
            else:
                pc = code[step, A]
                step = np.uint64(pc)
                output = code[step, OUTPUT]
                own = np.uint64(output)
            left = frames[depth - 1, 1]
            if left == 0:
                left, at = _number(data, at, end)
                if at < 0 or left < 0:
                    return _SLOW
            if left > 0:
                frames[depth - 1, 1] = left - 1
                if output >= 0:
                    slots -= code[step, A]
                    if slots < 0:
                        return _SLOW
                    if cell_count[own + np.uint64(1)] >= cell_room[own + np.uint64(1)]:
                        return 2 * (output + 1)
                pc += 1
                continue
            depth -= 1
            if output >= 0:
                if code[step, B]:
                    first = frames[depth, 2]
                    if cell_count[own + np.uint64(1)] - first > _MAP_ENTRIES:
                        return _SLOW
                    if _has_equal_keys(
                        octets,
                        ints,
                        cells[own + np.uint64(2)] >> 2,
                        texts[own + np.uint64(2)],
                        first,
                        cell_count[own + np.uint64(2)],
                    ):
                        return _SLOW
                place = (cells[own] >> 2) + cell_count[own] + 1
                ints[np.uint64(place)] = cell_count[own + np.uint64(1)]
                _end_cell(octets, validity, cell_count, own)
            pc = code[step, NEXT]
            continue

        elif operation == SKIP_COUNTS:
            left = np.int64(1)
            while left != 0:
                left, at = _number(data, at, end)
                if at < 0 or left < 0:
                    return _SLOW

        elif operation == BRANCH:
            number, at = _number(data, at, end)
            if at < 0 or number < 0 or number >= code[step, B]:
                return _SLOW
            pc = table[np.uint64(code[step, A] + number)]
            continue

        elif operation == JUMP:
            pc = code[step, NEXT]
            continue

        elif operation == CALL:
            if depth == _MAX_FRAMES:
                return _SLOW
            frames[depth, 0] = pc + 1
            depth += 1
            pc = code[step, A]
            continue

        elif operation == RETURN:
            depth -= 1
            pc = frames[depth, 0]
            continue

        elif operation == REMEMBER:
            remembered = at

        elif operation == GO_BACK:
            at = remembered

        elif operation == END:
            if at != end:
                return _SLOW
            value[0] += 1
            is_next = True
            continue

        else:
            return _SLOW
        if PUT_BOOLEAN <= operation <= BEGIN_STRUCT:
            _end_cell(octets, validity, cell_count, own)
        pc += 1


@_compiled
def decode(
    data: Bytes,
    offsets: Ints,
    starts: Ints,
    width: int,
    code: Ints,
    table: Ints,
    symbol_ends: Longs,
    symbols: Bytes,
    outputs: Outputs,
    to: Buffers,
    is_slow: npt.NDArray[np.bool_],
) -> int:
    """Decodes a block of values, and marks those that are slow, whose rows are null.

    Args:
        data, offsets: the framed values.
        starts: the first instruction for each; if negative, its row is null, and it is slow if its
            schema has no program.
        width: bytes that the columns count in each row, without elements.
        to: buffers with room for as many cells as there are values, for all outputs that are not
            inside a list. Their contents are undefined.

    Returns `DONE`, or the buffer that is full: twice the number of its output if there is no room
    for more cells, and one more if there is none for more bytes of texts.
    """
    kinds, ends, widths = outputs.kinds, outputs.ends, outputs.widths
    octets, ints, longs, doubles = to.octets, to.ints, to.longs, to.doubles
    validity, cells, texts = to.validity, to.cells, to.data
    cell_room, data_room = to.cell_room, to.data_room
    cell_count, data_count = to.cell_count, to.data_count
    count = len(kinds)
    cell_count[:] = 0
    data_count[:] = 0
    for output in range(count):
        if kinds[output] == TEXTS or kinds[output] == LISTS:
            ints[np.uint64(cells[output] >> 2)] = 0
    kept_cells, kept_data = np.zeros(count, np.int64), np.zeros(count, np.int64)
    frames = np.zeros((_MAX_FRAMES, 3), np.int64)
    value = np.zeros(1, np.int64)
    is_slow[:] = False
    while True:
        found = _decode(
            data,
            offsets,
            starts,
            width,
            code,
            table,
            symbol_ends,
            symbols,
            kinds,
            ends,
            widths,
            octets,
            ints,
            longs,
            doubles,
            validity,
            cells,
            texts,
            cell_room,
            data_room,
            cell_count,
            data_count,
            value,
            kept_cells,
            kept_data,
            frames,
        )
        if found != _SLOW:
            return found
        cell_count[:] = kept_cells
        data_count[:] = kept_data
        is_slow[value[0]] = starts[value[0]] != NO_SCHEMA
        output = 0
        while output < count:
            _put_nulls(
                kinds,
                ends,
                widths,
                octets,
                ints,
                longs,
                validity,
                cells,
                cell_count,
                data_count,
                output,
            )
            output = ends[output]
        value[0] += 1
