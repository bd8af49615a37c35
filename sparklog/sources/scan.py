"""Batches that a task returns to Spark: the columns of a read, in Spark's own Arrow types."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
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
from sparklog.formats.values.columns import Plan
from sparklog.formats.values.typed import typed_columns
from sparklog.sources.json_inference import ddl_of
from sparklog.sources.options import CORRUPT, TYPED, LogLocation, SourceOptions
from sparklog.sources.reader import absolute, read_slices, schemas_of
from sparklog.sources.tasks import Task
from sparklog.sources.values import BadValues, ValueFormat, ValueParser, json_type
from sparklog.spark_compat import arrow_schema
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
"""Types of Spark's Kafka source (`KafkaRecordToRowConverter`)."""

_COMPUTED = ("topic", "partition", CORRUPT)
"""Columns that are not stored in the log's rows."""


def ddl(options: SourceOptions, typed: Plan | None = None) -> str:
    """Returns the columns of the options as DDL, so that Spark parses `valueSchema`.

    In DDL, TIMESTAMP depends on `spark.sql.timestampType`; TIMESTAMP_LTZ does not. `typed`: the
    typed columns of the topic, for `valueFormat = typed`. Raises `BadOption` for a column that the
    topic does not have.
    """
    values = {"json": f"STRUCT<{options.value_schema}>", "string": "STRING"}
    kinds = {name: kind.simpleString() for name, kind in _TYPES.items()}
    kinds["timestamp"] = "TIMESTAMP_LTZ"
    kinds["value"] = values.get(options.value_format, kinds["value"])
    known = {name: f"`{name}` {kind}" for name, kind in kinds.items()}
    names = options.columns
    if typed is not None:
        del known[CORRUPT]
        for field in from_arrow_schema(pa.schema(typed.fields)):
            known[field.name] = ddl_of(StructType([field]))
        if not options.names_columns:
            names += tuple(field.name for field in typed.fields)
        for name in names:
            if name not in known:
                reason = f"use columns of {', '.join(known)}"
                raise errors.BadOption(option="columns", value=name, reason=reason)
    return ", ".join(known[name] for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Parameters of a task, apart from its slices."""

    location: LogLocation
    schema: pa.Schema
    """The requested columns, in Spark's own Arrow types."""
    values: ValueParser | None
    """None if values remain bytes."""
    fail_on_data_loss: bool
    typed: Plan | None = None
    """The typed columns in `schema`."""

    def batches(self, task: Task) -> Iterator[pa.RecordBatch]:
        """Yields batches of `schema`, of at most `SCAN_BATCH_ROWS`, in the order of the slices.

        Raises what `read_slices` raises, and `BadValue`.
        """
        typed = [field.name for field in self.typed.fields] if self.typed is not None else []
        others = (*_COMPUTED, "offset", *typed)
        stored = [name for name in self.schema.names if name not in others]
        if typed and "value" not in stored:
            stored.append("value")
        for piece, rows in read_slices(
            replace(self.location, task_credentials=task.credentials),
            task.slices,
            columns=["offset", *stored],
            fail_on_data_loss=self.fail_on_data_loss,
        ):
            for first in range(0, rows.num_rows, limits.SCAN_BATCH_ROWS):
                yield self._shape(rows.slice(first, limits.SCAN_BATCH_ROWS), piece)

    def _shape(self, rows: pa.RecordBatch, piece: Slice) -> pa.RecordBatch:
        computed = {
            "topic": functools.partial(_constant, piece.topic, rows.num_rows),
            "partition": functools.partial(_constant, piece.partition, rows.num_rows),
        }
        parsed = self._parsed(rows, piece)
        if self.typed is not None:
            names = (field.name for field in self.typed.fields)
            schemas = schemas_of(self.location, self.typed, piece.topic)
            columns = typed_columns(self.typed, rows.column("value"), schemas).columns
            parsed = dict(zip(names, columns, strict=True))
        columns = []
        for field in self.schema:
            if field.name in parsed:
                columns.append(parsed[field.name])
            elif field.name in computed:
                columns.append(computed[field.name](field.type))
            else:
                columns.append(rows.column(field.name))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _parsed(self, rows: pa.RecordBatch, piece: Slice) -> Mapping[str, pa.Array]:
        """Returns the decoded values and the bytes of bad ones; nothing if values remain bytes."""
        if self.values is None:
            return {}

        def locate(row: int) -> tuple[str, int, int]:
            return piece.topic, piece.partition, rows.column("offset")[row].as_py()

        value, corrupt = self.values.parse(rows.column("value"), locate)
        return {"value": value} if corrupt is None else {"value": value, CORRUPT: corrupt}


def scan(options: SourceOptions, wanted: StructType, typed: Plan | None = None) -> Scan:
    """Returns the scan. Raises `BadOption` for a schema that the rows or values do not match.

    `typed`: the typed columns of the topic, for `valueFormat = typed`.
    """
    values = None
    known_types = {field.name: field.type for field in typed.fields} if typed is not None else {}
    schema = arrow_schema(wanted)
    for field in wanted:
        if schema.field(field.name).type == known_types.get(field.name):
            continue
        if options.is_typed and field.name in known_types:
            reason = "the column has another type in the topic's table"
            found = f"{field.name} {field.dataType.simpleString()}"
            raise errors.BadOption(option="schema", value=found, reason=reason)
        if field.name == "value" and options.value_format not in ("binary", TYPED):
            values = _parser(options, field.dataType)
        elif _TYPES.get(field.name) != field.dataType or not _is_there(field.name, options):
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items())
            found = f"{field.name} {field.dataType.simpleString()}"
            raise errors.BadOption(option="schema", value=found, reason=f"use columns of {known}")
    if values is None and CORRUPT in wanted.names:
        raise errors.BadOption(option="schema", value=CORRUPT, reason="add the column value")
    return Scan(
        location=absolute(options.location),
        schema=schema,
        values=values,
        fail_on_data_loss=options.fail_on_data_loss,
        typed=typed if known_types.keys() & set(schema.names) else None,
    )


def _is_there(name: str, options: SourceOptions) -> bool:
    return name != CORRUPT or options.bad_values == BadValues.COLUMN


def _parser(options: SourceOptions, wanted: DataType) -> ValueParser:
    value_format = ValueFormat(options.value_format)
    if value_format is ValueFormat.JSON and isinstance(wanted, StructType):
        kind = json_type(wanted)
    elif value_format is ValueFormat.STRING and wanted == StringType():
        kind = pa.string()
    else:
        reason = f"valueFormat = {value_format} does not return {wanted.simpleString()}"
        raise errors.BadOption(option="schema", value="value", reason=reason)
    return ValueParser(format=value_format, kind=kind, bad=BadValues(options.bad_values))


@functools.lru_cache(maxsize=16)
def _constant(value: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """Returns a column of one value, cached because most batches have the same length."""
    return arrow.repeated(value, count, kind)
