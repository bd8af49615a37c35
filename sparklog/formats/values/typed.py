"""Computes the typed columns of a table from the values of its records.

A value that begins with a zero byte has the id of its schema in the next four, as Confluent's
serializers write it. No JSON begins like that, so values of both kinds can be in one file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow
from sparklog.formats.values.columns import JSON, Column, Plan
from sparklog.formats.values.derive import Deriver

if TYPE_CHECKING:  # it compiles loops, which topics without Avro do without
    from sparklog.formats.values.avro.derive import AvroDeriver
    from sparklog.formats.values.avro.schema import AvroSchema

Schemas: TypeAlias = "Callable[[Iterable[int]], Mapping[int, AvroSchema | str]]"
"""Returns the known ones of some schemas; a text says why values cannot be decoded by a schema."""


class Typed(NamedTuple):
    """The typed columns of some records."""

    columns: list[pa.Array]
    """Those of `Plan.fields`."""
    misfits: int
    """The number of records that do not fit."""
    waiting: Mapping[int, int] = {}
    """The number of records that wait for a schema, by schema: they have only null columns."""
    schemas: frozenset[int] = frozenset()
    """The schemas of the records, known or not."""


def no_schemas(_: Iterable[int]) -> Mapping[int, AvroSchema | str]:
    """The schemas of a program that knows none."""
    return {}


def typed_columns(plan: Plan, values: pa.BinaryArray, schemas: Schemas = no_schemas) -> Typed:
    """Returns the columns of `plan.fields` for these values.

    `schemas` is called only if the plan has Avro, and raises what it likes.
    """
    if plan.formats == (JSON,):
        derived = _deriver(plan.columns).derive(values)
        return _typed(derived.columns, derived.error)
    from sparklog.formats.values.avro.derive import schema_ids

    ids = schema_ids(values)
    is_framed = ids >= 0
    numbers, counts = np.unique(ids[is_framed], return_counts=True)
    rows = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    found = frozenset(rows)
    wanted = found.difference(plan.withheld)
    avro = _avro_deriver(plan.columns).derive(values, schemas(wanted) if wanted else {})
    columns, error = list(avro.columns), avro.error
    if JSON in plan.formats and not is_framed.all():
        json = _deriver(plan.columns).derive(values)
        framed = arrow.booleans(is_framed)
        columns = [
            pc.if_else(framed, ours, others)
            for ours, others in zip(columns, json.columns, strict=True)
        ]
        error = pc.if_else(framed, error, json.error)
    waiting = {each: rows[each] for each in avro.waiting}
    return _typed(columns, error)._replace(waiting=waiting, schemas=found)


def _typed(columns: list[pa.Array], error: pa.StringArray) -> Typed:
    misfits = len(error) - error.null_count
    if misfits:
        error = pc.binary_join_element_wise("value", error, ": ")
    return Typed([error, *columns], misfits)


@functools.lru_cache(maxsize=64)
def _deriver(columns: tuple[Column, ...]) -> Deriver:
    return Deriver([each.as_field for each in columns], paths=[each.field for each in columns])


@functools.lru_cache(maxsize=64)
def _avro_deriver(columns: tuple[Column, ...]) -> AvroDeriver:
    from sparklog.formats.values.avro.derive import AvroDeriver

    return AvroDeriver([each.as_field for each in columns], paths=[each.field for each in columns])
