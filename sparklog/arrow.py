"""Conversions between Arrow values and those of numpy and Python, through buffers.

pyarrow's own conversions (`pa.array`, `pa.scalar`, `to_numpy`, numbers as arguments of
`pyarrow.compute`) import pandas if it is installed. That takes up to a second in each of Spark's
workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Returns `values`, whose width is that of `kind`, as an array, without copying."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def booleans(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """Returns an array with one bit for each value."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def strings(values: Sequence[bytes]) -> pa.StringArray:
    """Returns an array of strings from their UTF-8 bytes."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.StringArray.from_buffers(
        len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(values))
    )


def number(value: int, kind: pa.DataType) -> pa.Scalar:
    """Returns a scalar of an integer or timestamp type."""
    return numbers(np.array([value], f"i{kind.byte_width}"), kind)[0]


def string(value: str) -> pa.StringScalar:
    """Returns a string scalar."""
    return strings([value.encode()])[0]


def repeated(value: int | str, count: int, kind: pa.DataType) -> pa.Array:
    """Returns an array of one value, repeated `count` times."""
    return pa.repeat(string(value) if isinstance(value, str) else number(value, kind), count)


def as_numpy(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns numbers without nulls as a read-only array; copies only if there are chunks."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    assert not array.null_count
    return np.from_dlpack(array)


def as_mask(array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Returns booleans without nulls as an array."""
    assert not array.null_count
    bits, (skipped, shift) = array.buffers()[1], divmod(array.offset, 8)
    if bits is None:  # there are no rows
        return np.zeros(0, np.bool_)
    octets = np.frombuffer(bits, np.uint8, -(-(shift + len(array)) // 8), skipped)
    return np.unpackbits(octets, count=shift + len(array), bitorder="little")[shift:].view(np.bool_)
