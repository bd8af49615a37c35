"""Derives typed columns from the values of records: JSON objects, by the rules of `json_rules`.

- Each column is decoded alone. A field that is absent or null is null. One that does not fit is
  null too, and the row's error names it.
- A value is bad as a whole, and all its columns are null, if it is not UTF-8, not one JSON object,
  nested deeper than 128 levels (`checks`), or needs far more memory than its size (`sizes`).
- A null value is null in every column, and has no error.
- The result depends on the bytes and the columns only: not on other rows, the time zone data of the
  machine, or the depth of the caller's stack, as long as 400 frames are free.

msgspec decodes a value straight to the fields. It accepts a subset of what the rules accept, with
the same result. A value that it refuses is decoded field by field: by msgspec again, and a field
that it refuses by the rules. That takes ten times as long, all of it in Python, so a process whose
other threads must not wait sets a pause (`set_pause`).
"""

from __future__ import annotations

import decimal
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow
from sparklog.formats.values import json_rules
from sparklog.formats.values.checks import MAX_DEPTH, bytes_of, is_deep, may_be_deep, utf8_texts
from sparklog.formats.values.json_rules import JsonNumber, ValueMismatch
from sparklog.formats.values.msgspec_types import leaf_type, python_type, row_type
from sparklog.formats.values.sizes import SLOT_BYTES_FACTOR, SlotLimit
from sparklog.formats.values.typed_arrays import Build, builder_of
from sparklog.gc_pause import paused_gc

ERROR_CHARACTERS: Final = 200

NOT_UTF8: Final = "not UTF-8"
NOT_JSON: Final = "not a single JSON value"
NOT_OBJECT: Final = "not a JSON object"
TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels"
TOO_LARGE: Final = f"more than {SLOT_BYTES_FACTOR} times as large in columns"
MISFIT: Final = "a field does not fit"

_BLOCK_ROWS: Final = 1_024
_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bounds of one block, which exists as Python objects before it becomes columns."""
PAUSE_ROWS: Final = 64
"""Refused values after which other threads have a turn: 1 to 2 ms of work."""
_STEP_ROWS: Final = 256
"""Rows that become cells of columns together. More do not fit in a processor's cache."""
_SHOWN_CHARACTERS: Final = 40
NAMED_MISFITS: Final = 10
"""Columns whose reasons fill an error: each takes at least 23 characters."""
_REFUSALS: Final = (msgspec.MsgspecError, ValueError, ArithmeticError)
"""`ArithmeticError`: an exponent that is too large for `decimal`."""
_as_tuple: Final = msgspec.structs.astuple


_pause: Callable[[], None] | None = None


def set_pause(pause: Callable[[], None] | None) -> None:
    """Sets what derivers of this process call after `PAUSE_ROWS` values that msgspec refuses.

    Python lets another thread run after its switch interval, but takes the interpreter back at once
    when that thread waits for a disk or a socket. A request that waits ten times then takes ten
    intervals, unless it finds a pause.
    """
    global _pause
    _pause = pause


class Derived(NamedTuple):
    """The columns of some values."""

    columns: list[pa.Array]
    """One for each field, of its type."""
    error: pa.StringArray
    """Why a value does not fit, in up to `ERROR_CHARACTERS`; null if it fits or is null."""
    bad_by_reason: Mapping[str, int]
    """Rows with an error, by reason: one that the deriver's module names."""
    waiting: frozenset[int] = frozenset()
    """The ids of schemas that are not known yet. Their rows have an error that says so."""

    @property
    def bad_rows(self) -> int:
        """The number of rows with an error."""
        return sum(self.bad_by_reason.values())


class Deriver:
    """Derives the columns of one set of fields. Thread-safe."""

    def __init__(self, fields: Sequence[pa.Field], *, paths: Sequence[str] | None = None) -> None:
        """Compiles decoders, which takes milliseconds.

        Args:
            fields: the columns, of types that `ddl.parse` returns.
            paths: the field of the JSON object that fills each column; the column's name by
                default. Several columns may have the same.
        """
        self._fields = list(fields)
        self._paths = [field.name for field in fields] if paths is None else list(paths)
        kinds = [field.type for field in fields]
        self._limit = SlotLimit(list(zip(self._paths, kinds, strict=True)))
        columns = [
            _column(number, *each)
            for number, each in enumerate(zip(self._fields, self._paths, strict=True))
        ]
        self._layers = [_Layer(each) for each in _with_unique_paths(columns)]

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Deriver, paths=self._paths), (self._fields,)

    def derive(self, values: pa.BinaryArray) -> Derived:
        """Returns the columns of these values. No bytes raise an error."""
        found = []
        for block in blocks(values, _BLOCK_ROWS, _BLOCK_BYTES):
            with paused_gc():  # it took a quarter of the time for values with arrays
                found.append(_Block(block, self._limit).derived(self._fields, self._layers))
        return joined(found)


def joined(blocks: Sequence[Derived]) -> Derived:
    """Returns the columns of several blocks, of which there is at least one, as those of one."""
    if len(blocks) == 1:
        return blocks[0]
    by_reason: Counter[str] = Counter()
    for block in blocks:
        by_reason.update(block.bad_by_reason)
    columns = zip(*(block.columns for block in blocks), strict=True)
    return Derived(
        [*map(pa.concat_arrays, columns)],
        pa.concat_arrays([block.error for block in blocks]),
        by_reason,
        frozenset().union(*(block.waiting for block in blocks)),
    )


def blocks(values: pa.BinaryArray, rows: int, size: int) -> Iterator[pa.BinaryArray]:
    """Yields the values in order, in at least one block, of at most so many rows and bytes.

    A single value may have more bytes.
    """
    _, offsets = bytes_of(values)
    start = 0
    while True:
        fitting = int(np.searchsorted(offsets, offsets[start] + size, "right")) - 1
        stop = min(len(values), start + rows, max(fitting, start + 1))
        yield values[start:stop]
        start = stop
        if start >= len(values):
            return


# ------------------------------------------------------------------------------ columns


class _Column(NamedTuple):
    number: int
    name: str
    path: str
    kind: pa.DataType
    decode_by_rules: json_rules.Decode
    build: Build


def _column(number: int, field: pa.Field, path: str) -> _Column:
    by_rules = json_rules.decoder_of(field.type, json_rules.typed_leaf_decoder)
    return _Column(number, field.name, path, field.type, by_rules, builder_of(field.type))


def _decoder(wanted: Any) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(wanted, float_hook=decimal.Decimal).decode


def _leaf(kind: pa.DataType) -> Any:
    return Any if pa.types.is_decimal(kind) else leaf_type(kind)


def _with_unique_paths(columns: Sequence[_Column]) -> list[list[_Column]]:
    """Returns the columns in as few groups as possible, each path once in a group."""
    layers: list[list[_Column]] = [[]]
    seen: Counter[str] = Counter()
    for column in columns:
        depth = seen[column.path]
        seen[column.path] += 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(column)
    return layers


class _Layer:
    """Columns of different fields, which msgspec decodes together."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        self.columns = columns
        self.row = row_type([(each.path, python_type(each.kind, _leaf) | None) for each in columns])
        """A row: a cell for each column, in their order."""
        self.paths = [each.path for each in columns]
        self.rules = [each.decode_by_rules for each in columns]
        self.decode = _decoder(self.row)
        self.decoders = [_decoder(python_type(each.kind, _leaf) | None) for each in columns]
        """Decode the JSON of each column's field."""
        raw_row = row_type([(each.path, msgspec.Raw) for each in columns])
        self.decode_raw = msgspec.json.Decoder(raw_row).decode
        """Returns a row whose cells are JSON."""


# ------------------------------------------------------------------------------ a block


class _Block:
    """Values that are derived together."""

    def __init__(self, values: pa.BinaryArray, limit: SlotLimit) -> None:
        """Finds the values that are bad as a whole, other than those that are not JSON objects."""
        self._values: list[bytes | None] = values.to_pylist()
        """Without those that are bad as a whole."""
        self._parsed: dict[int, dict[str, Any]] = {}
        """Values that were parsed by the rules, by row."""
        self._bad: dict[int, str] = {}
        """The reasons of values that are bad as a whole, by row."""
        self._refused = 0
        """The number of values that msgspec refused, which decides when to pause."""
        self._misfits: dict[int, dict[int, str]] = {}
        """Reasons of fields that do not fit, of the first columns, by row and column number."""
        _, not_utf8 = utf8_texts(values)
        if not_utf8.any():
            for row in np.flatnonzero(not_utf8).tolist():
                self._refuse(row, NOT_UTF8)
        if (suspects := may_be_deep(values)) is not None:
            for row in np.flatnonzero(suspects).tolist():
                if (value := self._values[row]) is not None and is_deep(value):
                    self._refuse(row, TOO_DEEP)
        if limit.is_needed:
            self._find_large(limit)

    def _find_large(self, limit: SlotLimit) -> None:
        for row, value in enumerate(self._values):
            if value is not None and limit.may_exceed(value):
                parsed = self._object(row)
                if parsed is not None and limit.is_exceeded(len(value), parsed):
                    self._refuse(row, TOO_LARGE)

    def _refuse(self, row: int, reason: str) -> None:
        self._bad[row] = reason
        self._values[row] = None
        self._parsed.pop(row, None)

    def _object(self, row: int) -> dict[str, Any] | None:
        """Returns a value parsed by the rules; None if it is not a JSON object."""
        if row not in self._parsed and (value := self._values[row]) is not None:
            try:
                parsed = json_rules.parse(value.decode())
            except ValueMismatch:
                self._refuse(row, NOT_JSON)
                return None
            if not isinstance(parsed, dict):
                self._refuse(row, NOT_OBJECT)
                return None
            self._parsed[row] = parsed
        return self._parsed.get(row)

    def derived(self, fields: Sequence[pa.Field], layers: Sequence[_Layer]) -> Derived:
        """Returns the columns."""
        columns: list[Any] = [None] * len(fields)
        for layer in layers:
            cells: list[list[Any]] = [[] for _ in layer.columns]
            for start in range(0, len(self._values), _STEP_ROWS):
                rows = self._decoded(layer, start)
                for known, new in zip(cells, zip(*map(_as_tuple, rows), strict=True), strict=True):
                    known += new
            for place, column in enumerate(layer.columns):
                columns[column.number] = self._built(layer, place, cells[place])
        reasons = Counter(self._bad.values())
        if self._misfits:
            reasons[MISFIT] = len(self._misfits)
        return Derived(columns, self._errors(), reasons)

    # ------------------------------------------------------------------------------ decoding

    def _decoded(self, layer: _Layer, start: int) -> list[msgspec.Struct]:
        """Returns the rows of one step, with nulls for values that are bad."""
        rows: list[msgspec.Struct] = []
        append, decode, nothing = rows.append, layer.decode, layer.row()
        for value in self._values[start : start + _STEP_ROWS]:
            if value is None:
                append(nothing)
                continue
            try:
                append(decode(value))
            except _REFUSALS:
                append(self._decoded_by_field(layer, start + len(rows), value))
        return rows

    def _decoded_by_field(self, layer: _Layer, row: int, value: bytes) -> msgspec.Struct:
        """Returns the row of a value that msgspec refuses to decode as a whole."""
        self._refused += 1
        if _pause is not None and not self._refused % PAUSE_ROWS:
            _pause()
        try:
            raws = _as_tuple(layer.decode_raw(value))
        except _REFUSALS:
            parsed = self._object(row) or {}
            given = [parsed.get(path) for path in layer.paths]
            try:
                cells = [
                    None if each is None else decode(each)
                    for decode, each in zip(layer.rules, given, strict=True)
                ]
            except ValueMismatch:
                pairs = zip(layer.columns, given, strict=True)
                cells = [self._ruled(column, row, each) for column, each in pairs]
        else:
            cells = []
            for place, (decode, raw) in enumerate(zip(layer.decoders, raws, strict=True)):
                try:
                    cells.append(None if raw is None else decode(raw))
                except _REFUSALS:
                    parsed = json_rules.parse(bytes(raw).decode())
                    cells.append(self._ruled(layer.columns[place], row, parsed))
        return layer.row(*cells)

    def _ruled(self, column: _Column, row: int, parsed: Any) -> Any:
        """Returns the value of a field by the rules; None, and notes it, if it does not fit."""
        if parsed is None:
            return None
        try:
            return column.decode_by_rules(parsed)
        except ValueMismatch as mismatch:
            self._note_misfit(column, row, mismatch)
            return None

    def _note_misfit(self, column: _Column, row: int, mismatch: ValueMismatch) -> None:
        """Adds the reason, unless those of enough columns before this one are known."""
        known = self._misfits.setdefault(row, {})
        if len(known) == NAMED_MISFITS:
            if column.number > (last := max(known)):
                return
            del known[last]
        known[column.number] = misfit_text(column.name, mismatch)

    def _built(self, layer: _Layer, place: int, cells: Sequence[Any]) -> pa.Array:
        column = layer.columns[place]
        misfits: set[int] = set()
        rows = np.arange(len(cells), dtype=np.int32)
        built = column.build(cells, rows, misfits)
        if not misfits:
            return built
        for row in misfits:
            self._ruled(column, row, self._field(layer, place, row))
        fits = np.isin(rows, [*misfits], invert=True)
        return pc.if_else(arrow.booleans(fits), built, pa.nulls(1, column.kind)[0])

    def _field(self, layer: _Layer, place: int, row: int) -> Any:
        """Returns the value of a field as the rules parse it."""
        value = self._values[row]
        assert value is not None
        try:
            raw = _as_tuple(layer.decode_raw(value))[place]
            return json_rules.parse(bytes(raw).decode())
        except _REFUSALS:
            return (self._object(row) or {}).get(layer.columns[place].path)

    # ------------------------------------------------------------------------------ errors

    def _errors(self) -> pa.StringArray:
        if not (self._bad or self._misfits):
            return pa.nulls(len(self._values), pa.string())
        found: list[str | None] = [None] * len(self._values)
        for row, by_number in self._misfits.items():
            found[row] = error_text([by_number[number] for number in sorted(by_number)])
        for row, reason in self._bad.items():
            found[row] = reason
        return pa.array(found, pa.string())


def error_text(reasons: Sequence[str]) -> str:
    """Returns a row's error."""
    return _cut("; ".join(reasons), ERROR_CHARACTERS)


def misfit_text(name: str, mismatch: ValueMismatch) -> str:
    """Returns why a field does not fit the column of this name."""
    inside = [_cut(each, _SHOWN_CHARACTERS) for each in mismatch.path]
    text = f"{'.'.join((name, *inside))}: {_shown(mismatch.value)} is not {mismatch.wanted}"
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    """Returns the beginning of a parsed value's JSON."""
    if isinstance(value, dict):
        return "{…}"
    if isinstance(value, list):
        return "[…]"
    if type(value) is JsonNumber:
        return _cut(value, _SHOWN_CHARACTERS)
    if isinstance(value, str):
        return json.dumps(_cut(value, _SHOWN_CHARACTERS), ensure_ascii=False)
    return json.dumps(value)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
