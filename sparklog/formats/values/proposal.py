"""Proposes typed columns for fields of JSON objects that no column has yet.

- A proposal depends on the values alone, not on their order.
- An object with more than `MAP_KEYS` keys in all values together is a MAP: its keys are data.
- A field of strings is a TIMESTAMP or DATE if all of its values are (`inferred_times`).
- A field that cannot be a column is named with the reason: one that is always null, or whose name
  Delta does not accept. So is one whose column was dropped.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import pyarrow as pa

from sparklog.formats.values import ddl
from sparklog.formats.values.columns import Column
from sparklog.formats.values.inference import Kind, merged
from sparklog.formats.values.inferred_times import TIMES, TimeCounts

MAP_KEYS: Final = 50
_SHOWN: Final = 40
_DROPPED: Final = "its column was dropped; to fill it again, add it to value.schema"
_EMPTY: Final = "its values are empty"
_TOO_MANY: Final = f"a table has at most {ddl.MAX_LEAVES} columns and nested fields"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedColumn:
    """A field that could become a column."""

    field: pa.Field
    records: int
    """The number of records that have the field, and not null."""
    example: str
    """One of its values, as the beginning of its JSON."""

    @property
    def type(self) -> str:
        """As in SQL."""
        return ddl.ddl_of(self.field.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The fields of some records that no column has yet."""

    columns: Sequence[ProposedColumn]
    left_out: Sequence[str]
    """The names of fields that cannot be columns, each with the reason."""
    records: int
    """The number of records that were examined, without tombstones."""
    objects: int
    """The number of records whose values are JSON objects."""

    known: Sequence[pa.Field] = ()
    """The fields that have columns."""

    @property
    def schema(self) -> str:
        """All columns, those that exist and the proposed ones, for `value.schema`."""
        return ddl.of_fields([*self.known, *(each.field for each in self.columns)])


def propose(values: Iterable[bytes | None], known: Sequence[Column] = ()) -> Proposal:
    """Proposes columns for the fields of these values that have none yet.

    Args:
        values: of records.
        known: all typed columns of the table. Without one that is filled, the columns that are not
            filled are proposed again, with their types; otherwise they have been dropped one by
            one, and are not proposed.
    """
    found: dict[str, tuple[Kind, int, str]] = {}
    times = TimeCounts()
    filled = [each for each in known if each.is_filled]
    unfilled = {each.field: each for each in known if not each.is_filled}
    skipped = frozenset(each.field for each in filled)
    records = objects = 0
    for value in values:
        if value is None:
            continue
        records += 1
        members = _object(value)
        if members is None:
            continue
        objects += 1
        for name, each in members.items():
            if name not in skipped and each is not None:
                kind, count, example = found.get(name, (None, 0, _shown(each)))
                found[name] = merged(kind, times.kind_of(name, each)), count + 1, example
    columns: list[ProposedColumn] = []
    left_out: list[str] = []
    known_fields = [each.as_source_field for each in filled]
    room = ColumnRoom(known_fields)
    for name, (kind, count, example) in found.items():
        column = (
            unfilled[name].as_field.type if name in unfilled else _type(times.checked(name, kind))
        )
        if name in unfilled and filled:
            reason = _DROPPED
        else:
            reason = _EMPTY if column is None else room.take(name, column)
        if column is None or reason:
            left_out.append(f"{_printable(name)}: {reason}")
            continue
        field = pa.field(name, column)
        columns.append(ProposedColumn(field=field, records=count, example=example))
    return Proposal(
        columns=columns, left_out=left_out, records=records, objects=objects, known=known_fields
    )


class ColumnRoom:
    """The names, and the number of nested fields, that are left for further columns of a table."""

    def __init__(self, filled: Iterable[pa.Field]) -> None:
        """`filled`: the fields that have columns."""
        self._names: set[str] = set()
        self._leaves = 0
        for field in filled:
            self._names.add(field.name.lower())
            self._leaves += _leaves(field.type)

    def take(self, name: str, kind: pa.DataType) -> str:
        """Takes the room for a field's column; returns why the field cannot have one, if so."""
        leaves = self._leaves + _leaves(kind)
        reason = _refusal(name, self._names) or (_TOO_MANY if leaves > ddl.MAX_LEAVES else "")
        if not reason:
            self._names.add(name.lower())
            self._leaves = leaves
        return reason


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _printable(name: str) -> str:
    return name if name.isprintable() else json.dumps(name)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _refusal(name: str, taken: Container[str]) -> str:
    if not ddl.is_usable(name):
        return "Delta does not accept the name"
    if not name.isprintable():
        return "its name has characters that cannot be printed"
    if name.lower() in taken:
        return "another field differs only in case"
    return ""


def _type(kind: Kind) -> pa.DataType | None:
    """Returns the type of a field; None if its values do not determine one."""
    if isinstance(kind, dict):
        if len(kind) > MAP_KEYS:
            value = _type(reduce(merged, kind.values(), None))
            return None if value is None else pa.map_(pa.string(), value)
        return _struct(kind)
    if isinstance(kind, list):
        element = _type(kind[0])
        return None if element is None else ddl.list_of(element)
    return None if kind is None else _TYPES[kind]


def _leaves(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def _struct(kind: dict[str, Kind]) -> pa.DataType | None:
    fields: dict[str, pa.Field] = {}
    for name, each in kind.items():
        inner = _type(each)
        if inner is not None and not _refusal(name, fields):
            fields[name.lower()] = pa.field(name, inner)
    return pa.struct([*fields.values()]) if fields else None


_TYPES: Final = {
    "BOOLEAN": pa.bool_(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    **TIMES,
}
