"""What a task gives to Spark: the columns of a read, in Spark's own Arrow types."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sparklog import arrow, errors, limits
from sparklog.sources.options import CORRUPT, Place, SourceOptions
from sparklog.sources.reader import read_slices
from sparklog.sources.values import BadValues, ValueFormat, ValueParser, json_type
from sparklog.sources.versions import arrow_schema
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import Slice

_TYPES: Mapping[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
    CORRUPT: BinaryType(),
}
"""As in Spark's Kafka source (`KafkaRecordToRowConverter`)."""

_MADE_HERE = ("topic", "partition", CORRUPT)
"""Columns that are not read."""


def ddl(options: SourceOptions) -> str:
    """The columns that the options ask for, as DDL: Spark parses `valueSchema` with it."""
    values = {"json": f"STRUCT<{options.value_schema}>", "string": "STRING"}
    kinds = {name: kind.simpleString() for name, kind in _TYPES.items()}
    kinds["value"] = values.get(options.value_format, kinds["value"])
    return ", ".join(f"`{name}` {kinds[name]}" for name in options.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All that a task must know besides its slices."""

    place: Place
    schema: pa.Schema
    """The columns wanted, in Spark's own Arrow types."""
    values: ValueParser | None
    """None: they stay bytes."""
    fail_on_data_loss: bool

    def batches(self, slices: Sequence[Slice]) -> Iterator[pa.RecordBatch]:
        """Batches of `schema`, of `SCAN_BATCH_ROWS` at most, in the order of the slices.

        Raises what `read_slices` raises, and `BadValue`.
        """
        stored = [name for name in self.schema.names if name not in (*_MADE_HERE, "offset")]
        for piece, rows in read_slices(
            self.place,
            slices,
            columns=["offset", *stored],
            fail_on_data_loss=self.fail_on_data_loss,
        ):
            for first in range(0, rows.num_rows, limits.SCAN_BATCH_ROWS):
                yield self._shape(rows.slice(first, limits.SCAN_BATCH_ROWS), piece)

    def _shape(self, rows: pa.RecordBatch, piece: Slice) -> pa.RecordBatch:
        made = {
            "topic": functools.partial(_constant, piece.topic, rows.num_rows),
            "partition": functools.partial(_constant, piece.partition, rows.num_rows),
        }
        parsed = self._parsed(rows, piece)
        columns = []
        for field in self.schema:
            if field.name in parsed:
                columns.append(parsed[field.name])
            elif field.name in made:
                columns.append(made[field.name](field.type))
            else:
                columns.append(rows.column(field.name))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _parsed(self, rows: pa.RecordBatch, piece: Slice) -> Mapping[str, pa.Array]:
        """What values become, and the bad ones; nothing where they stay bytes."""
        if self.values is None:
            return {}

        def place(row: int) -> tuple[str, int, int]:
            return piece.topic, piece.partition, rows.column("offset")[row].as_py()

        value, corrupt = self.values.parse(rows.column("value"), place)
        return {"value": value} if corrupt is None else {"value": value, CORRUPT: corrupt}


def scan(options: SourceOptions, wanted: StructType) -> Scan:
    """Raises `BadOption` where a schema asks for what rows do not have, or values cannot become."""
    values = None
    for field in wanted:
        if field.name == "value" and options.value_format != "binary":
            values = _parser(options, field.dataType)
        elif _TYPES.get(field.name) != field.dataType or not _is_there(field.name, options):
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items())
            found = f"{field.name} {field.dataType.simpleString()}"
            raise errors.BadOption(option="schema", value=found, reason=f"a row has {known}")
    if values is None and CORRUPT in wanted.names:
        raise errors.BadOption(option="schema", value=CORRUPT, reason="it comes beside value")
    return Scan(
        place=_absolute(options.place),
        schema=arrow_schema(wanted),
        values=values,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def _is_there(name: str, options: SourceOptions) -> bool:
    return name != CORRUPT or options.bad_values == BadValues.COLUMN


def _parser(options: SourceOptions, wanted: DataType) -> ValueParser:
    made = ValueFormat(options.value_format)
    if made is ValueFormat.JSON and isinstance(wanted, StructType):
        kind = json_type(wanted)
    elif made is ValueFormat.STRING and wanted == StringType():
        kind = pa.string()
    else:
        reason = f"valueFormat = {made} makes no {wanted.simpleString()}"
        raise errors.BadOption(option="schema", value="value", reason=reason)
    return ValueParser(format=made, kind=kind, bad=BadValues(options.bad_values))


def _absolute(place: Place) -> Place:
    """The same for an executor, which may have another working folder."""
    if place.root is None:
        return place
    return replace(place, root=open_store(place.root, dict(place.storage)).uri)


@functools.lru_cache(maxsize=16)
def _constant(value: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """Most batches are of one length, so their constant columns are one array."""
    return arrow.repeated(value, count, kind)
