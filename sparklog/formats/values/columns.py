"""The typed columns of a topic's table: their names, types and history.

Rules:

- A typed column is computed from the record alone (`derive`), so any writer of a file can fill it,
  and a rewrite computes it again instead of copying it.
- Columns are only added. A name keeps its field and its type as long as the topic exists, so each
  data file fits each later version of the table, which needs no Delta feature.
- A column that is no longer wanted stops being filled in new files. A rewrite of a file in which it
  was filled fills it again: no rewrite removes values.
- A file's tag names the sets of columns that it was written with. A tag that is not in the set's
  history is unknown: another engine has restored the table to a version before that set.
- Behind a `?`, the tag has the number of rows that wait for a schema, and names the schemas, so
  that the file is written again once one of them is known, and is left alone until then.
- A set says how values are decoded from each generation on. A rewrite decodes values in each of the
  ways in which its files were written: no JSON begins like a value with the id of a schema.

Pure: no I/O. The set is stored in the table's properties, and is part of the format.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from sparklog.formats.record import ROW_SCHEMA
from sparklog.formats.values import ddl

ERROR: Final = "_error"
"""The column with the reasons that a record's value does not fit; null if it does."""
RULES: Final = 1
"""The version of the rules by which values are derived (`derive`)."""

JSON: Final = "json"
AVRO: Final = "avro"
"""Avro behind the id of its schema, as Confluent's serializers write it."""
WAITS_NAMED: Final = 32
"""Schemas that a file's tag names. If its rows wait for more, the others are only counted in."""
_WAITS: Final = "?"
_OTHERS: Final = "*"

_RESERVED: Final = frozenset((*(name.lower() for name in ROW_SCHEMA.names), ERROR))


class Column(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A typed column of a table."""

    name: str
    field: str
    """The top-level field of the JSON object that fills it."""
    type: str
    """As DDL, in the form that `ddl.ddl_of` returns."""
    filled: tuple[int, ...]
    """Generations at which filling began and ended, alternately: (2, 5) is 2 to 4, (2,) from 2."""

    @property
    def is_filled(self) -> bool:
        """True if new files have its values."""
        return len(self.filled) % 2 == 1

    def is_filled_at(self, generation: int) -> bool:
        """Returns whether files of that generation have its values."""
        return sum(each <= generation for each in self.filled) % 2 == 1

    @property
    def as_field(self) -> pa.Field:
        return pa.field(self.name, _type_of(self.type))

    @property
    def as_source_field(self) -> pa.Field:
        """The field of the values, under its own name."""
        return pa.field(self.field, _type_of(self.type))


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """The columns to fill in a new file, and its tag."""

    columns: tuple[Column, ...]
    tag: str
    formats: tuple[str, ...] = (JSON,)
    """The ways in which values are decoded, in no particular order."""
    withheld: tuple[int, ...] = ()
    """Schemas that are not used, because the registry has another text under their ids."""

    @property
    def fields(self) -> list[pa.Field]:
        """The error column and the typed columns, in the order of the table."""
        return [ERROR_FIELD, *(each.as_field for each in self.columns)]


class ColumnSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All typed columns that a table has had since its topic was created."""

    generation: int
    """Rises with each change."""
    columns: tuple[Column, ...]
    """In the order of the table."""
    history: tuple[tuple[int, str], ...]
    """Each generation, and the checksum of the columns that were filled then."""
    formats: tuple[tuple[int, str], ...] = ()
    """The way in which values are decoded from a generation on; before the first one, as JSON."""

    @property
    def fields(self) -> list[pa.Field]:
        """The columns that follow those of every topic, in the order of the table."""
        return [ERROR_FIELD, *(each.as_field for each in self.columns)]

    @property
    def format(self) -> str:
        """The way in which values of new files are decoded."""
        return self.formats[-1][1] if self.formats else JSON

    @property
    def all_formats(self) -> tuple[str, ...]:
        """The ways in which values of any file were decoded."""
        return tuple(dict.fromkeys(self._format_at(each) for each, _ in self.history))

    def _format_at(self, generation: int) -> str:
        known = [each for since, each in self.formats if since <= generation]
        return known[-1] if known else JSON

    @property
    def filled(self) -> tuple[Column, ...]:
        """The columns that new files have."""
        return tuple(each for each in self.columns if each.is_filled)

    def is_known(self, tag: str | None) -> bool:
        """Returns whether a file with this tag may be added to the table."""
        return all(each is not None for each in self._generations(tag))

    def is_full(self, tag: str | None) -> bool:
        """Returns whether a file with this tag has all columns that new files have."""
        sets = [each for each in self._generations(tag) if each is not None]
        return all(any(map(each.is_filled_at, sets)) for each in self.filled)

    def plan(self, tags: Iterable[str | None] = ()) -> Plan | None:
        """Returns what a new file with the rows of files with these tags must have.

        None: only the columns of every topic. Without tags, for rows that were in no file.
        """
        # Without a column, values with the ids of schemas are decoded too: to find the first ones.
        sets = {self.generation} if self.filled or self.format == AVRO else set()
        for tag in tags:
            sets |= {each for each in self._generations(tag) if each is not None}
        columns = tuple(each for each in self.columns if any(map(each.is_filled_at, sets)))
        needed = self._smallest(columns, sorted(sets, reverse=True))
        if not needed:
            return None
        formats = tuple(dict.fromkeys(map(self._format_at, needed)))
        return Plan(columns, ",".join(map(self._tag, needed)), formats)

    def _smallest(self, columns: Sequence[Column], sets: Sequence[int]) -> list[int]:
        """Returns as few of the generations, newest first, as suffice for columns and formats."""
        missing, needed, formats = list(columns), list[int](), set[str]()
        for generation in sets:
            left = [each for each in missing if not each.is_filled_at(generation)]
            form = self._format_at(generation)
            is_new = form == AVRO and form not in formats
            if len(left) < len(missing) or is_new:
                needed.append(generation)
                missing = left
                formats.add(form)
        return needed

    def plan_for_readers(self) -> Plan | None:
        """Returns the columns that new files have, for records of any age; it has no tag."""
        found = self.plan()
        return None if found is None else Plan(found.columns, "", self.all_formats)

    def plan_for_foreign(self) -> Plan | None:
        """Returns the plan for rows of another engine's file, which may have any of the columns."""
        return self.plan(self._tag(generation) for generation, _ in self.history)

    def _tag(self, generation: int) -> str:
        return f"{generation}.{dict(self.history)[generation]}.{RULES}"

    def _generations(self, tag: str | None) -> list[int | None]:
        """Returns the generations that a tag names; None for each that is not in the history."""
        if tag is None:
            return []
        found: list[int | None] = []
        for part in tag.partition(_WAITS)[0].split(","):
            generation, _, rest = part.partition(".")
            checksum = rest.partition(".")[0]
            is_known = generation.isdecimal() and (int(generation), checksum) in self.history
            found.append(int(generation) if is_known else None)
        return found

    def encode(self) -> str:
        """Returns the value of the table's property."""
        return _encoder.encode(self).decode()


ERROR_FIELD: Final = pa.field(ERROR, pa.string())
_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(ColumnSet)


@functools.lru_cache(maxsize=64)
def decode(text: str) -> ColumnSet:
    """Decodes the value of the table's property. Raises `msgspec.MsgspecError`, `ValueError`."""
    found = _decoder.decode(text)
    for each in found.columns:
        each.as_field  # noqa: B018 (raises for a type that this release does not know)
    return found


@functools.lru_cache(maxsize=1_024)
def _type_of(text: str) -> pa.DataType:
    (field,) = ddl.parse(f"c {text}")
    return field.type


class Waiting(NamedTuple):
    """The rows of a file that wait for a schema."""

    by_schema: Mapping[int, int]
    """Rows, by schema."""
    others: int = 0
    """Rows that wait for further schemas."""

    @property
    def rows(self) -> int:
        """All rows that wait."""
        return sum(self.by_schema.values()) + self.others


def with_waiting(tag: str, rows: Mapping[int, int]) -> str:
    """Returns the tag of a file with rows that wait: their number, by schema."""
    if not rows:
        return tag
    ids = sorted(rows)
    parts = [f"{each}:{rows[each]}" for each in ids[:WAITS_NAMED]]
    if others := sum(rows[each] for each in ids[WAITS_NAMED:]):
        parts.append(f"{_OTHERS}:{others}")
    return f"{tag}{_WAITS}{','.join(parts)}"


@functools.lru_cache(maxsize=1_024)
def waiting_of(tag: str | None) -> Waiting:
    """Returns which rows of a file with this tag wait."""
    found: dict[int, int] = {}
    others = 0
    _, _, text = (tag or "").partition(_WAITS)
    for part in text.split(","):
        schema, _, rows = part.partition(":")
        if schema.isdecimal() and rows.isdecimal():
            found[int(schema)] = int(rows)
        elif schema == _OTHERS and rows.isdecimal():
            others = int(rows)
    return Waiting(found, others)


# ------------------------------------------------------------------------------ changes


class ChangedType(Exception):
    """A field is wanted with another type than its column has."""

    def __init__(self, column: Column, wanted: str) -> None:
        super().__init__(column, wanted)
        self.column = column
        self.wanted = wanted


def with_fields(
    known: ColumnSet | None, wanted: Sequence[pa.Field], form: str = JSON
) -> ColumnSet | None:
    """Returns the set in which new files have exactly the wanted fields of values.

    `form`: how values are decoded. None: there has never been a typed column. Raises `ChangedType`.
    """
    columns = known.columns if known is not None else ()
    types = {field.name: ddl.ddl_of(field.type) for field in wanted}
    by_field = {each.field: each for each in columns}
    for name, kind in types.items():
        if name in by_field and by_field[name].type != kind:
            raise ChangedType(by_field[name], kind)
    generation = known.generation + 1 if known is not None else 1
    changed = [
        msgspec.structs.replace(each, filled=(*each.filled, generation))
        if each.is_filled != (each.field in types)
        else each
        for each in columns
    ]
    for name, kind in types.items():
        if name not in by_field:
            taken = {each.name.lower() for each in changed}
            column = Column(
                name=column_name(name, taken), field=name, type=kind, filled=(generation,)
            )
            changed.append(column)
    formats = known.formats if known is not None else ()
    if form != (known.format if known is not None else JSON):
        formats = (*formats, (generation, form))
    if tuple(changed) == columns and formats == (known.formats if known is not None else ()):
        return known
    filled = [each for each in changed if each.is_filled]
    history = known.history if known is not None else ()
    return ColumnSet(
        generation=generation,
        columns=tuple(changed),
        history=(*history, (generation, _checksum(filled, form))),
        formats=formats,
    )


def column_name(field: str, taken: Iterable[str] = ()) -> str:
    """Returns the name of a field's column; `taken`: names of other columns, in lower case.

    Delta's names are case-insensitive.
    """
    others = {*taken}
    name = f"value_{field}" if field.lower() in _RESERVED else field
    found, number = name, 2
    while found.lower() in _RESERVED or found.lower() in others:
        found, number = f"{name}_{number}", number + 1
    return found


def _checksum(columns: Iterable[Column], form: str) -> str:
    text = _encoder.encode([(each.name, each.field, each.type) for each in columns])
    if form != JSON:
        text += form.encode()
    return f"{zlib.crc32(text):08x}"
