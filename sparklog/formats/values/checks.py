"""Checks of whole values before they are decoded as JSON: UTF-8, nesting, and memory.

Each is a function of one value's bytes, evaluated for a block of values at a time.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow

Mask: TypeAlias = npt.NDArray[np.bool_]

MAX_DEPTH: Final = 128
"""Levels of arrays and objects in a value of a typed topic."""

_QUOTE, _OPEN, _CLOSE = b'"'[0], b"{"[0], b"}"[0]
_BRACKET_BIT: Final = 0x20
"""`[` and `{`, and `]` and `}`, differ in this bit only."""
_STEP_BYTES: Final = 1 << 20

# ------------------------------------------------------------------------------ UTF-8


def utf8_texts(values: pa.BinaryArray) -> tuple[pa.StringArray, Mask]:
    """Returns the values as strings, null for invalid UTF-8, and a mask of the invalid ones."""
    try:
        return values.cast(pa.string()), np.zeros(len(values), np.bool_)
    except pa.ArrowInvalid:
        bad = np.array([not _is_utf8(value) for value in values.to_pylist()], np.bool_)
        nulls = pa.nulls(1, pa.binary())[0]
        return pc.if_else(arrow.booleans(~bad), values, nulls).cast(pa.string()), bad


def _is_utf8(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


# ------------------------------------------------------------------------------ nesting


def may_be_deep(values: pa.Array) -> Mask | None:
    """Returns a mask of the values that may be JSON nested deeper than `MAX_DEPTH`, None if empty.

    They have more opening brackets, and twice as many bytes. `values` is a binary or string array.
    """
    data, offsets = bytes_of(values)
    sizes = np.diff(offsets)
    if not len(sizes) or sizes.max() <= 2 * MAX_DEPTH:
        return None
    opening = np.flatnonzero((data | _BRACKET_BIT) == _OPEN)
    if len(opening) <= MAX_DEPTH:
        return None
    narrowest = int((opening[MAX_DEPTH:] - opening[:-MAX_DEPTH]).min())
    if narrowest >= sizes.max():
        return None
    counts = np.diff(np.searchsorted(opening, offsets))
    deep: Mask = (counts > MAX_DEPTH) & (sizes > 2 * MAX_DEPTH)
    return deep if deep.any() else None


def bytes_of(values: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Returns the bytes of a binary or string array, and where each value begins and ends."""
    _, offsets, data = values.buffers()
    if not len(values) or data is None:
        return np.zeros(0, np.uint8), np.zeros(len(values) + 1, np.int32)
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, 4 * values.offset)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], ends - ends[0]


def is_deep(value: bytes) -> bool:
    """Returns whether arrays and objects are nested deeper than `MAX_DEPTH`.

    Brackets in strings do not count. For bytes that are not JSON, the result has no meaning, but
    is still a function of the bytes.
    """
    if b"\\" in value:  # so that each quote left is the beginning or the end of a string
        value = value.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(value, np.uint8)
    depth, is_inside = 0, np.False_
    for start in range(0, len(data), _STEP_BYTES):
        step = data[start : start + _STEP_BYTES]
        strings = np.logical_xor.accumulate(step == _QUOTE) ^ is_inside
        folded: Any = step | _BRACKET_BIT
        change = (folded == _OPEN).astype(np.int8) - (folded == _CLOSE).astype(np.int8)
        levels = depth + np.cumsum(np.where(strings, 0, change), dtype=np.int32)
        if levels.max() > MAX_DEPTH:
            return True
        depth, is_inside = int(levels[-1]), strings[-1]
    return False
