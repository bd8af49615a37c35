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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow
from sparklog.formats.values.arrow_columns import to_column
from sparklog.formats.values.avro.rules import FRAME_BYTES, BadValue, Decoder
from sparklog.formats.values.avro.schema import AvroSchema
from sparklog.formats.values.checks import bytes_of
from sparklog.formats.values.derive import MISFIT, NAMED_MISFITS, error_text, misfit_text
from sparklog.formats.values.json_rules import ValueMismatch

Longs: TypeAlias = npt.NDArray[np.int64]

NOT_FRAMED: Final = "does not begin with a zero byte and the id of a schema"
WAITING: Final = "waiting for its schema"
UNUSABLE_SCHEMA: Final = "its schema cannot be used"

_BLOCK_ROWS: Final = 1_024
_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bounds of one block, which may exist as Python objects before it becomes columns."""
_KEPT_SCHEMAS: Final = 64
_NULL: Final = -1
_UNFRAMED: Final = -2


class AvroDerived(NamedTuple):
    """The columns of some values."""

    columns: list[pa.Array]
    """One for each field, of its type."""
    error: pa.StringArray
    """Why a value does not fit, in up to 200 characters; null if it fits or is null."""
    bad_by_reason: Mapping[str, int]
    """Rows with an error, by reason: one that this module or `rules` names, or `derive.MISFIT`."""
    waiting: frozenset[int]
    """The ids of schemas that are not known yet. Their rows count as `WAITING`."""

    @property
    def bad_rows(self) -> int:
        """The number of rows with an error."""
        return sum(self.bad_by_reason.values())


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

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AvroDeriver, paths=self._paths), (self._fields,)

    def _new_decoder(self, schema: AvroSchema) -> Decoder:
        return Decoder(schema, self._paths, self._kinds)

    def derive(
        self, values: pa.BinaryArray, schemas: Mapping[int, AvroSchema | str]
    ) -> AvroDerived:
        """Returns the columns of these values. No bytes raise an error.

        Args:
            values: the framed values.
            schemas: by id; a text for a schema that can never be used, which says why.
        """
        blocks = [self._derived(block, schemas) for block in _blocks(values)]
        if len(blocks) == 1:
            return blocks[0]
        by_reason: Counter[str] = Counter()
        for each in blocks:
            by_reason.update(each.bad_by_reason)
        columns = zip(*(each.columns for each in blocks), strict=True)
        return AvroDerived(
            [*map(pa.concat_arrays, columns)],
            pa.concat_arrays([each.error for each in blocks]),
            by_reason,
            frozenset().union(*(each.waiting for each in blocks)),
        )

    def _derived(
        self, values: pa.BinaryArray, schemas: Mapping[int, AvroSchema | str]
    ) -> AvroDerived:
        """Returns the columns of one block."""
        errors = _Errors([field.name for field in self._fields])
        decoders: dict[int, Decoder | None] = {}
        ids = schema_ids(values)
        rows: list[list[Any]] = []
        nothing = [None] * len(self._fields)
        for row, (number, value) in enumerate(zip(ids.tolist(), values.to_pylist(), strict=True)):
            decoder = None
            if number >= 0:
                if number not in decoders:
                    schema = schemas.get(number)
                    is_usable = isinstance(schema, AvroSchema)
                    decoders[number] = self._decoder(schema) if is_usable else None
                decoder = decoders[number]
            if decoder is None:
                errors.add_undecodable(row, number, schemas.get(number))
                rows.append(nothing)
                continue
            try:
                cells, misfits = decoder.decode(value)
            except BadValue as error:
                errors.add(row, error.reason)
                rows.append(nothing)
                continue
            rows.append(cells)
            if misfits:
                errors.add_misfits(row, misfits)
        columns = zip(*rows, strict=True) if rows else ((),) * len(self._fields)
        built = [to_column(cells, kind) for cells, kind in zip(columns, self._kinds, strict=True)]
        return AvroDerived(built, errors.column(len(values)), errors.by_reason, errors.waiting)


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


def _blocks(values: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """Yields the values in order, in at least one block."""
    _, offsets = bytes_of(values)
    start = 0
    while True:
        fitting = int(np.searchsorted(offsets, offsets[start] + _BLOCK_BYTES, "right")) - 1
        stop = min(len(values), start + _BLOCK_ROWS, max(fitting, start + 1))
        yield values[start:stop]
        start = stop
        if start >= len(values):
            return


class _Errors:
    """The errors of a block's rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._texts: dict[int, str] = {}
        self._waiting: set[int] = set()
        self.by_reason: Counter[str] = Counter()

    @property
    def waiting(self) -> frozenset[int]:
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
