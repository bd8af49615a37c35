"""Arrow values from numpy's and Python's, and back, by way of buffers.

pyarrow's own ways (`pa.array`, `pa.scalar`, `to_numpy`, a number given to a function of
`pyarrow.compute`) look whether pandas is installed, and that imports it: up to a second, which each
of Spark's workers would wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """`values`, of the width of `kind`, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def booleans(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """One bit for each."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def strings(values: Sequence[bytes]) -> pa.StringArray:
    """Texts from their UTF-8."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.StringArray.from_buffers(
        len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(values))
    )


def number(value: int, kind: pa.DataType) -> pa.Scalar:
    """Of an integer's or a timestamp's type."""
    return numbers(np.array([value], f"i{kind.byte_width}"), kind)[0]


def string(value: str) -> pa.StringScalar:
    """A text as Arrow has it."""
    return strings([value.encode()])[0]


def repeated(value: int | str, count: int, kind: pa.DataType) -> pa.Array:
    """The same value `count` times."""
    return pa.repeat(string(value) if isinstance(value, str) else number(value, kind), count)


def as_numpy(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Numbers without nulls; a copy only where there are several chunks. Read-only."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    assert not array.null_count
    return np.from_dlpack(array)


def as_mask(array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Without nulls."""
    return as_numpy(array.cast(pa.uint8())).astype(np.bool_)
