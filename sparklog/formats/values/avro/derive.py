"""Derives typed columns from the values of records: Avro in Confluent's framing.

A value is a zero byte, the id of the writer's schema in four bytes, big endian, and Avro's binary
encoding. Each value is decoded by its own writer's schema.

- The result is defined by `rules`: a value is bad as a whole if its bytes cannot be taken apart by
  the schema; a field that does not fit its column is null in it, and the row's error names it.
- A value whose schema is not known yet is null in every column. Its error begins with `waiting:`.
- A null value is null in every column, and has no error.
- The result depends on the bytes, the columns, and the texts of the schemas only.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow
from sparklog.formats.values.arrow_columns import to_column
from sparklog.formats.values.avro import loops
from sparklog.formats.values.avro.rules import FRAME_BYTES, BadValue, Decoder
from sparklog.formats.values.avro.schema import AvroSchema
from sparklog.formats.values.checks import bytes_of
from sparklog.formats.values.derive import (
    MISFIT,
    NAMED_MISFITS,
    Derived,
    blocks,
    error_text,
    joined,
    misfit_text,
)
from sparklog.formats.values.json_rules import ValueMismatch
from sparklog.gc_pause import paused_gc
from sparklog.limits import MIB

Longs: TypeAlias = npt.NDArray[np.int64]
Schemas: TypeAlias = Mapping[int, AvroSchema | str]
"""Writer schemas by id; a text for one that can never be used, which says why."""

NOT_FRAMED: Final = "does not begin with a zero byte and the id of a schema"
WAITING: Final = "waiting for its schema"
UNUSABLE_SCHEMA: Final = "its schema cannot be used"

_BLOCK_ROWS: Final = 1_024
_BLOCK_BYTES: Final = 4 * MIB
"""Bounds of values that exist as Python objects before they become columns."""
_LOOP_ROWS: Final = 32_768
_LOOP_BYTES: Final = 8 * MIB
"""Bounds of values that the compiled loop decodes in one call."""
_KEPT_SCHEMAS: Final = 64
_NULL: Final = -1
_UNFRAMED: Final = -2


class AvroDeriver:
    """Derives the columns of one set of fields. Thread-safe."""

    def __init__(self, fields: Sequence[pa.Field], *, paths: Sequence[str]) -> None:
        """Args:
        fields: the columns, of types that `ddl.parse` returns.
        paths: the field of the record that fills each column, or `data` for a schema that is not a
            record. Several columns may have the same.
        """
        self._fields = list(fields)
        self._paths = list(paths)
        self._kinds = [field.type for field in fields]
        self._decoder = functools.lru_cache(_KEPT_SCHEMAS)(self._new_decoder)
        self._loop = loops.LoopColumns(self._paths, self._kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AvroDeriver, paths=self._paths), (self._fields,)

    def _new_decoder(self, schema: AvroSchema) -> Decoder:
        return Decoder(schema, self._paths, self._kinds)

    def derive(self, values: pa.BinaryArray, schemas: Schemas) -> Derived:
        """Returns the columns of these framed values. No bytes raise an error."""
        kernel = loops.kernel_for(len(values))
        bounds = (_BLOCK_ROWS, _BLOCK_BYTES) if kernel is None else (_LOOP_ROWS, _LOOP_BYTES)
        left = [*blocks(values, *bounds)]
        left.reverse()
        found = []
        while left:
            block = _Block(left.pop(), schemas, [field.name for field in self._fields])
            if kernel is None:
                columns = self._by_rules(block, np.arange(len(block.values)))
            elif (by_loop := self._by_loop(kernel, block)) is not None:
                columns = by_loop
            else:
                middle = len(block.values) // 2
                left += [block.values[middle:], block.values[:middle]]
                continue
            found.append(block.derived(columns))
        return joined(found)

    def _by_loop(self, kernel: ModuleType, block: _Block) -> list[pa.Array] | None:
        """Returns the columns of a block; None if they need too much memory for one block."""
        decoded = self._loop.decode(kernel, block.values, block.schemas, block.which)
        if decoded is None:
            return None if len(block.values) > 1 else self._by_rules(block, np.zeros(1, np.int64))
        slow = np.flatnonzero(decoded.is_slow)
        if not len(slow):
            return decoded.columns
        # The rows of slow values come after the others, until `take` puts them in order.
        steps = range(0, len(slow), _BLOCK_ROWS)
        parts = [self._by_rules(block, slow[start : start + _BLOCK_ROWS]) for start in steps]
        order = np.arange(len(block.values), dtype=np.int64)
        order[slow] = np.arange(len(slow)) + len(order)
        indices = arrow.numbers(order, pa.int64())
        return [
            pa.concat_arrays(each).take(indices)
            for each in zip(decoded.columns, *parts, strict=True)
        ]

    def _by_rules(self, block: _Block, rows: Longs) -> list[pa.Array]:
        """Returns the columns of some rows of a block, and adds their errors to it."""
        decoders: dict[int, Decoder] = {}
        found: list[Sequence[Any]] = []
        nothing = [None] * len(self._fields)
        values = block.values.take(arrow.numbers(rows, pa.int64())).to_pylist()
        with paused_gc():
            which = block.which[rows].tolist()
            for row, place, value in zip(rows.tolist(), which, values, strict=True):
                schema = block.schemas[place]
                if schema is None:
                    found.append(nothing)
                    continue
                if place not in decoders:
                    decoders[place] = self._decoder(schema)
                try:
                    cells, misfits = decoders[place].decode(value)
                except BadValue as error:
                    block.errors.add(row, error.reason)
                    found.append(nothing)
                    continue
                found.append(cells)
                if misfits:
                    block.errors.add_misfits(row, misfits)
            columns = zip(*found, strict=True) if found else [()] * len(self._fields)
            return [
                to_column(cells, kind) for cells, kind in zip(columns, self._kinds, strict=True)
            ]


class _Block:
    """Values that are derived together."""

    def __init__(self, values: pa.BinaryArray, schemas: Schemas, names: Sequence[str]) -> None:
        self.values = values
        self.errors = _Errors(names)
        ids, which = np.unique(schema_ids(values), return_inverse=True)
        self.which = which.reshape(-1)
        """For each value, its place in `schemas`."""
        given = [schemas.get(number) if number >= 0 else None for number in ids.tolist()]
        self.schemas = [each if isinstance(each, AvroSchema) else None for each in given]
        is_bad = np.array([each is None for each in self.schemas], np.bool_) & (ids != _NULL)
        for row in np.flatnonzero(is_bad[self.which]).tolist() if is_bad.any() else ():
            place = self.which[row]
            self.errors.add_undecodable(row, int(ids[place]), given[place])

    def derived(self, columns: list[pa.Array]) -> Derived:
        """Returns the result, once all rows are decoded."""
        errors = self.errors
        error = errors.column(len(self.values))
        return Derived(columns, error, errors.by_reason, errors.waiting)


def schema_ids(values: pa.BinaryArray) -> Longs:
    """Returns the id of each value's schema; a negative number if it is null or not framed."""
    data, offsets = bytes_of(values)
    starts = offsets[:-1].astype(np.int64)
    is_framed = np.diff(offsets) >= FRAME_BYTES
    ids = np.full(len(values), _UNFRAMED, np.int64)
    framed = starts[is_framed]
    if len(framed):
        found = np.zeros(len(framed), np.int64)
        for place in range(1, FRAME_BYTES):
            found = found << 8 | data[framed + place]
        found[data[framed] != 0] = _UNFRAMED
        ids[is_framed] = found
    if values.null_count:
        ids[arrow.as_mask(values.is_null())] = _NULL
    return ids


class _Errors:
    """The errors of a block's rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._texts: dict[int, str] = {}
        self._waiting: set[int] = set()
        self.by_reason: Counter[str] = Counter()

    @property
    def waiting(self) -> frozenset[int]:
        """The ids of schemas that are not known yet."""
        return frozenset(self._waiting)

    def add(self, row: int, reason: str, text: str | None = None) -> None:
        """Adds a row that is bad as a whole."""
        self._texts[row] = error_text([reason if text is None else text])
        self.by_reason[reason] += 1

    def add_undecodable(self, row: int, number: int, schema: AvroSchema | str | None) -> None:
        """Adds a row without a schema that can be used; `number`: of `schema_ids`."""
        if number == _NULL:
            return
        if number == _UNFRAMED:
            self.add(row, NOT_FRAMED)
        elif schema is None:
            self._waiting.add(number)
            self.add(row, WAITING, f"waiting: schema {number} is not known yet")
        else:
            assert isinstance(schema, str)
            self.add(row, UNUSABLE_SCHEMA, schema)

    def add_misfits(self, row: int, misfits: Mapping[int, ValueMismatch]) -> None:
        """Adds a row of which some fields do not fit, by their columns' numbers."""
        numbers = sorted(misfits)[:NAMED_MISFITS]
        texts = [misfit_text(self._names[number], misfits[number]) for number in numbers]
        self._texts[row] = error_text(texts)
        self.by_reason[MISFIT] += 1

    def column(self, rows: int) -> pa.StringArray:
        """Returns the column of errors."""
        if not self._texts:
            return pa.nulls(rows, pa.string())
        return pa.array([self._texts.get(row) for row in range(rows)], pa.string())
