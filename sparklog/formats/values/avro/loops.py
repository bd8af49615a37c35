"""Decodes blocks of values by the compiled loop, if there is one.

The loop needs numba, an optional dependency. A process that imports numba waits for half a second,
and the first one on a machine compiles the loop for several seconds. So it is loaded for a large
block of values, or ahead of them by `load`. Until then, while another thread loads it, and if there
is no numba, the rules decode all values, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.formats.values.avro import schema as avro_schema
from sparklog.formats.values.avro.layout import Sizes, arrays
from sparklog.formats.values.avro.program import (
    NO_SCHEMA,
    Compiler,
    Ints,
    Longs,
    Program,
    outputs_of,
)
from sparklog.formats.values.avro.schema import AvroSchema
from sparklog.formats.values.checks import bytes_of
from sparklog.formats.values.sizes import slot_width
from sparklog.limits import MIB

MIN_ROWS: Final = 4_096
"""Values for which it is worth to load the loop."""
MEMORY_BYTES: Final = 64 * MIB
"""Bound of the columns of a block."""
_KEPT_SCHEMAS: Final = 64
_KEPT_INSTRUCTIONS: Final = 200_000
_COMPILED: Final = 100
"""More than the number of loops."""


class _State:
    kernel: ModuleType | None = None
    is_settled = False
    """True if the kernel is loaded, is being loaded, or cannot be."""


def kernel_for(rows: int) -> ModuleType | None:
    """Returns the loops to decode so many values with; None: decode them by the rules."""
    if not _State.is_settled and rows >= MIN_ROWS:
        load()
    return _State.kernel


def load() -> OSError | None:
    """Compiles the loops, or loads them from `kernel.CACHE`. Does nothing without numba.

    Takes a second, and several the first time on a machine. Returns the error that prevented the
    compiled loops from being saved, if any; in that case the next process compiles them again.
    """
    if _State.is_settled:
        return None
    _State.is_settled = True
    try:
        from sparklog.formats.values.avro import kernel
    except ImportError:
        return None
    failure = None
    for _ in range(_COMPILED):
        try:
            _use(kernel)
            break
        except OSError as error:  # by then numba has compiled one more
            failure = error
    _State.kernel = kernel
    return failure


def _use(kernel: ModuleType) -> None:
    """Uses the loops, so that they are compiled for exactly the types that occur later."""
    writer = avro_schema.parse('"long"')
    columns = LoopColumns([avro_schema.WHOLE_VALUE], [pa.int64()])
    found = columns.decode(
        kernel, pa.array([bytes(6)], pa.binary()), [writer], np.zeros(1, np.int64)
    )
    assert found is not None


class Decoded(NamedTuple):
    """The columns of some values."""

    columns: list[pa.Array]
    is_slow: npt.NDArray[np.bool_]
    """The values that are left to the rules, whose rows are null."""


class LoopColumns:
    """Fills columns by the loop. Thread-safe: of two threads, one may do a work in vain."""

    def __init__(self, paths: Sequence[str], kinds: Sequence[pa.DataType]) -> None:
        """Takes the field that fills each column, and the column's type."""
        self._kinds = list(kinds)
        self._compiler = Compiler(paths, kinds)
        self._outputs = outputs_of(kinds)
        self._width = sum(map(slot_width, kinds))
        self._sizes = Sizes(self._outputs)
        self._program = self._compiler.empty

    def decode(
        self,
        kernel: ModuleType,
        values: pa.BinaryArray,
        schemas: Sequence[AvroSchema | None],
        which: Longs,
    ) -> Decoded | None:
        """Returns the columns of a block; None if they take more than `MEMORY_BYTES`.

        Args:
            kernel: the loops, from `kernel_for`.
            values: framed values.
            schemas: their schemas; without one, a row is null.
            which: for each value, its place in `schemas`.
        """
        program = self._with({each for each in schemas if each is not None})
        starts = [NO_SCHEMA if each is None else program.starts[each] for each in schemas]
        return self._decoded(kernel, values, program, np.array(starts, np.int32)[which])

    def _with(self, schemas: set[AvroSchema]) -> Program:
        """Returns the program with all of these schemas."""
        program = self._program
        missing = schemas - program.starts.keys()
        if not missing:
            return program
        is_full = len(program.starts) + len(missing) > _KEPT_SCHEMAS
        if is_full or len(program.code) > _KEPT_INSTRUCTIONS:
            program, missing = self._compiler.empty, schemas
        for each in missing:
            program = self._compiler.extended(program, each)
        self._program = program
        return program

    def _decoded(
        self,
        kernel: ModuleType,
        values: pa.BinaryArray,
        program: Program,
        starts: Ints,
    ) -> Decoded | None:
        data, offsets = bytes_of(values)
        data = data.view()
        data.flags.writeable = False  # the type that the loops are compiled for
        is_slow = np.zeros(len(values), np.bool_)
        sizes = self._sizes.copy()
        while True:
            buffers = sizes.buffers(len(values), MEMORY_BYTES)
            if buffers is None:
                return None
            full = kernel.decode(
                data,
                offsets,
                starts,
                self._width,
                *program[:4],
                self._outputs,
                buffers,
                is_slow,
            )
            if full == kernel.DONE:
                self._sizes = sizes.learn(buffers)
                return Decoded(arrays(self._kinds, self._outputs, buffers), is_slow)
            sizes.double(full)
