"""The memory that the compiled loop fills: the buffers of all outputs in one array, as Arrow's.

Outputs inside a list need room for all elements of a block, and texts for all of their bytes, which
is not known before. `Sizes` estimates them, and doubles those that were not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.formats.values.avro.program import (
    BITS,
    LISTS,
    NUMBERS,
    TEXTS,
    Bytes,
    Ints,
    Longs,
    Outputs,
    children_of,
)

_ELEMENTS: Final = 4  # for each cell of a list, at first
_TEXT_BYTES: Final = 12  # for each cell of texts, at first
_SPARE: Final = 1.3
_MORE: Final = 4  # in addition to twice as many, of which there may have been none
_LEAST: Final = 16
_ALIGNMENT: Final = 64


class Buffers(NamedTuple):
    """The buffers of all outputs, in one array, and how much of them is used."""

    octets: Bytes
    ints: Ints
    """A view of the same memory, as are the next two."""
    longs: Longs
    doubles: npt.NDArray[np.float64]
    validity: Longs
    """The places where the validity bits of each output begin: multiples of 64 bytes, as below."""
    cells: Longs
    """The places where its values begin; for texts and lists, the offsets."""
    data: Longs
    """The places where the bytes of texts begin."""
    cell_room: Longs
    """The number of cells that each output has room for."""
    data_room: Longs
    """The number of bytes of texts that it has room for."""
    cell_count: Longs
    """Cells that are used."""
    data_count: Longs
    """Bytes of texts that are used."""


class Sizes:
    """Sizes of buffers, estimated from those of the last block, and doubled on demand."""

    def __init__(self, outputs: Outputs) -> None:
        count = len(outputs.kinds)
        self.outputs = outputs
        self.lists = np.full(count, -1, np.int64)
        """The innermost list around each output, or -1."""
        for output in range(count):
            if outputs.kinds[output] == LISTS:
                self.lists[output + 1 : outputs.ends[output]] = output
        self._elements = np.full(count, float(_ELEMENTS))
        """Elements for each cell of the list around an output, in the output of the elements."""
        self._text_bytes = np.full(count, float(_TEXT_BYTES))
        """Bytes for each cell of texts."""

    def copy(self) -> Sizes:
        """Returns sizes that may be doubled."""
        found = Sizes.__new__(Sizes)
        found.outputs, found.lists = self.outputs, self.lists
        found._elements, found._text_bytes = self._elements.copy(), self._text_bytes.copy()
        return found

    def double(self, buffer: int) -> None:
        """Makes a buffer larger, which has the number that `kernel.decode` returned."""
        found = self._text_bytes if buffer % 2 else self._elements
        found[buffer // 2] = 2 * found[buffer // 2] + _MORE

    def learn(self, used: Buffers) -> Sizes:
        """Returns the sizes that suffice for a block like the one in these buffers."""
        found = self.copy()
        cells = np.maximum(used.cell_count, 1)
        found._elements = _SPARE * used.cell_count / cells[self.lists]
        found._text_bytes = _SPARE * used.data_count / cells
        return found

    def buffers(self, rows: int, limit_bytes: int) -> Buffers | None:
        """Returns buffers for so many rows; None if they take more bytes than the limit."""
        outputs = self.outputs
        cell_room: list[int] = []
        data_room: list[int] = []
        starts: list[tuple[int, int, int]] = []
        size = 0
        kinds, widths = outputs.kinds.tolist(), outputs.widths.tolist()
        elements, text_bytes = self._elements.tolist(), self._text_bytes.tolist()
        for output, (kind, around) in enumerate(zip(kinds, self.lists.tolist(), strict=True)):
            room = rows
            if around == output - 1 >= 0:
                room = int(cell_room[around] * elements[output]) + _LEAST
            elif around >= 0:  # the room of the elements, which come next after their list
                room = cell_room[around + 1]
            texts = int(room * text_bytes[output]) + _LEAST if kind == TEXTS else 0
            cells = {BITS: -(-room // 8), NUMBERS: room * widths[output]}.get(kind, 4 * (room + 1))
            first = []
            for each in (-(-room // 8), cells, texts):
                first.append(size)
                size += -(-each // _ALIGNMENT) * _ALIGNMENT
            if size > limit_bytes:
                return None
            cell_room.append(room)
            data_room.append(texts)
            starts.append((first[0], first[1], first[2]))
        octets = np.empty(size, np.uint8)
        validity, cells_at, data = np.array(starts, np.int64).reshape(-1, 3).T.copy()
        return Buffers(
            octets,
            octets.view(np.int32),
            octets.view(np.int64),
            octets.view(np.float64),
            validity,
            cells_at,
            data,
            np.array(cell_room, np.int64),
            np.array(data_room, np.int64),
            np.zeros(len(kinds), np.int64),
            np.zeros(len(kinds), np.int64),
        )


def arrays(kinds: Sequence[pa.DataType], outputs: Outputs, buffers: Buffers) -> list[pa.Array]:
    """Returns the columns that were written, without copying."""
    memory = pa.py_buffer(buffers.octets)
    counts, texts = buffers.cell_count.tolist(), buffers.data_count.tolist()
    starts = [each.tolist() for each in (buffers.validity, buffers.cells, buffers.data)]

    def array(kind: pa.DataType, output: int, is_nullable: bool = True) -> pa.Array:
        rows = counts[output]
        valid_at, cells_at, data_at = (each[output] for each in starts)
        validity = memory.slice(valid_at, -(-rows // 8)) if is_nullable else None
        kept: list[Any] = [validity]
        children = None
        output_kind = outputs.kinds[output]
        if output_kind == BITS:
            kept.append(memory.slice(cells_at, -(-rows // 8)))
        elif output_kind == NUMBERS:
            kept.append(memory.slice(cells_at, rows * int(outputs.widths[output])))
        elif output_kind == TEXTS:
            kept.append(memory.slice(cells_at, 4 * (rows + 1)))
            kept.append(memory.slice(data_at, texts[output]))
        else:
            if output_kind == LISTS:
                kept.append(memory.slice(cells_at, 4 * (rows + 1)))
            children, inner = [], output + 1
            for place, each in enumerate(children_of(kind)):
                # Neither the entries of a map nor their keys are ever null.
                is_map = pa.types.is_map(kind)
                is_key = not is_nullable and place == 0
                children.append(array(each, inner, not (is_map or is_key)))
                inner = int(outputs.ends[inner])
        return pa.Array.from_buffers(kind, rows, kept, children=children)

    found, output = [], 0
    for kind in kinds:
        found.append(array(kind, output))
        output = int(outputs.ends[output])
    return found
