"""Copies of records whose values do not fit the typed columns of their topic.

A copy has the bytes, the timestamp and the headers of its record, and four more headers, which are
those of the dead letters of the job `to_table`: `sparklog.reason`, the text of `_error`, and the
record's place, `sparklog.topic`, `sparklog.partition` and `sparklog.offset`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from sparklog import arrow
from sparklog.client.consumer.reading import with_typed_columns
from sparklog.formats.record import HEADERS, PAYLOAD_SCHEMA
from sparklog.formats.values.columns import ERROR

if TYPE_CHECKING:
    from sparklog.formats.values.columns import Plan
    from sparklog.formats.values.typed import Schemas

_NAMES: Final = (
    "sparklog.reason",
    "sparklog.topic",
    "sparklog.partition",
    "sparklog.offset",
)


def dead_letters(rows: pa.RecordBatch, plan: Plan, topic: str, schemas: Schemas) -> pa.RecordBatch:
    """Returns the copies of those rows that do not fit, as `PAYLOAD_SCHEMA`, in their order.

    Raises what `schemas` raises.

    Args:
        rows: of `ROW_SCHEMA`.
        plan: the typed columns of their topic.
        topic: its name.
        schemas: returns those that values refer to. A row whose schema is not known does not fit.
    """
    reasons = with_typed_columns(rows, plan, schemas).column(ERROR)
    misfits = reasons.is_valid()
    bad = rows.filter(misfits)
    origin = (
        reasons.filter(misfits),
        arrow.repeated(topic, bad.num_rows, pa.string()),
        bad.column("partition").cast(pa.string()),
        bad.column("offset").cast(pa.string()),
    )
    headers = _with_headers(bad.column("headers"), [each.cast(pa.binary()) for each in origin])
    columns = [bad.column(name) for name in PAYLOAD_SCHEMA.names if name != "headers"]
    return pa.RecordBatch.from_arrays([*columns, headers], schema=PAYLOAD_SCHEMA)


def _with_headers(known: pa.ListArray, added: list[pa.Array]) -> pa.ListArray:
    """Returns the headers of each row, and after them one of each of `_NAMES`."""
    rows, width = len(known), len(_NAMES)
    lengths = arrow.as_numpy(known.value_lengths().fill_null(0))
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths + width, out=offsets[1:])
    is_added = np.zeros(offsets[-1], np.bool_)
    is_added[(offsets[1:, None] - width + np.arange(width)).ravel()] = True
    old = known.flatten()
    order = np.empty(offsets[-1], np.int64)
    order[~is_added] = np.arange(len(old))
    order[is_added] = len(old) + (np.arange(rows)[:, None] + rows * np.arange(width)).ravel()
    names = pa.concat_arrays([arrow.repeated(name, rows, pa.string()) for name in _NAMES])
    pairs = [names, pa.concat_arrays(added)]
    new = pa.StructArray.from_arrays(pairs, fields=[*HEADERS.value_type])
    items = pa.concat_arrays([old, new]).take(arrow.numbers(order, pa.int64()))
    return pa.ListArray.from_arrays(arrow.numbers(offsets, pa.int32()), items).cast(HEADERS)
