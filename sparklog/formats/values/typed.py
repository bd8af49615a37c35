"""Computes the typed columns of a table from the values of its records."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sparklog.formats.values.columns import Column, Plan
from sparklog.formats.values.derive import Deriver


class Typed(NamedTuple):
    """The typed columns of some records."""

    columns: list[pa.Array]
    """Those of `Plan.fields`."""
    misfits: int
    """The number of records that do not fit."""


def typed_columns(plan: Plan, values: pa.BinaryArray) -> Typed:
    """Returns the columns of `plan.fields` for these values."""
    derived = _deriver(plan.columns).derive(values)
    error = derived.error
    misfits = len(error) - error.null_count
    if misfits:
        error = pc.binary_join_element_wise("value", error, ": ")
    return Typed([error, *derived.columns], misfits)


@functools.lru_cache(maxsize=64)
def _deriver(columns: tuple[Column, ...]) -> Deriver:
    return Deriver([each.as_field for each in columns], paths=[each.field for each in columns])
