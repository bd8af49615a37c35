"""Adds columns for the fields of a schema to those that a table has.

- A field that has no column gets one. A column that is no longer filled is filled again.
- A column keeps its type: a field with another one is reported, and does not fit its column where
  their values differ.

Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from sparklog.formats.values import columns, ddl
from sparklog.formats.values.columns import AVRO, Column, ColumnSet
from sparklog.formats.values.proposal import ColumnRoom, Proposal, ProposedColumn

if TYPE_CHECKING:
    from sparklog.formats.values.avro.schema import AvroSchema


@dataclass(frozen=True, slots=True)
class Evolved:
    """The columns with the fields of a schema."""

    columns: ColumnSet | None
    """Equal to those before, if no column is added."""
    left_out: Sequence[str]
    """Fields that did not become columns, each with the reason."""


def with_schema(known: ColumnSet | None, fields: Sequence[pa.Field]) -> Evolved:
    """Returns the columns of values of Avro that also fill those of these fields."""
    types = {each.field: each.type for each in (known.columns if known is not None else ())}
    wanted = [each.as_source_field for each in (known.filled if known is not None else ())]
    names = {field.name for field in wanted}
    room = ColumnRoom(wanted)
    left_out: list[str] = []
    for field in fields:
        kind = ddl.ddl_of(field.type)
        if (column := types.get(field.name, kind)) != kind:
            left_out.append(f"{field.name}: its column is {column}, and the field {kind}")
        elif field.name in names:
            continue
        elif reason := room.take(field.name, field.type):
            left_out.append(f"{field.name}: {reason}")
        else:
            wanted.append(pa.field(field.name, field.type))
            names.add(field.name)
            types[field.name] = kind
    return Evolved(columns.with_fields(known, wanted, AVRO), left_out)


def propose(
    rows: Mapping[int, int],
    schemas: Mapping[int, AvroSchema | str],
    known: Sequence[Column],
    records: int,
) -> Proposal:
    """Proposes columns for the fields of schemas that have none yet.

    Args:
        rows: the number of records with each schema.
        schemas: those that are known.
        known: all typed columns of the table; those that have been dropped are not proposed.
        records: the number of records that were examined.
    """
    from sparklog.formats.values.avro.schema import fields_of

    columns: dict[str, ProposedColumn] = {}
    types = {each.field: each.type for each in known}
    filled = [each.as_source_field for each in known if each.is_filled]
    room = ColumnRoom(filled)
    left_out: dict[str, None] = {}
    for number, schema in sorted(schemas.items()):
        if isinstance(schema, str):
            left_out[f"schema {number}: {schema}"] = None
            continue
        found = fields_of(schema)
        left_out |= dict.fromkeys(f"{path}: {reason}" for path, reason in found.left_out)
        for field in found.fields:
            kind = ddl.ddl_of(field.type)
            if (other := types.get(field.name, kind)) != kind:
                reason = f"it is {kind} in schema {number}, and its column {other}"
                left_out[f"{field.name}: {reason}"] = None
            elif field.name in columns:
                before = columns[field.name]
                columns[field.name] = replace(before, records=before.records + rows[number])
            elif field.name in types:
                continue
            elif reason := room.take(field.name, field.type):
                left_out[f"{field.name}: {reason}"] = None
            else:
                types[field.name] = kind
                columns[field.name] = ProposedColumn(
                    field=pa.field(field.name, field.type),
                    records=rows[number],
                    example=f"schema {number}",
                )
    return Proposal(
        columns=[*columns.values()],
        left_out=[*left_out],
        records=records,
        objects=sum(rows[each] for each in schemas),
        known=filled,
    )
