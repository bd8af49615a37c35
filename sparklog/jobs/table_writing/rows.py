"""Converts records of a topic to rows of a Delta table, and finds the records that have no row.

A row has internal columns in addition to the table's: `BAD` marks a record without a row, `DELETED`
one that deletes the row of its key, and `ORDER` is its place in the topic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from sparklog import arrow
from sparklog.jobs.ranges import Range, Source
from sparklog.sources.json_inference import ddl_of
from sparklog.sources.values import ValueFormat, ValueParser, json_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

ORIGIN: Final = {"_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}
_REJECTED_DDL: Final = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT,"
    " timestamp TIMESTAMP_LTZ, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING"
)
BAD: Final = "_sparklog_bad"
DELETED: Final = "_sparklog_deleted"
ORDER: Final = "_sparklog_order"
INTERNAL: Final = frozenset((BAD, DELETED, ORDER))
_HEADERS: Final = "array<struct<key:string,value:binary>>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The mapping of records to rows."""

    fields: StructType
    """The fields of the objects, which are columns."""
    key: str | None
    """The column of the record's key, by which rows are replaced; None: rows are added."""
    key_type: DataType | None
    has_origin: bool

    @property
    def columns(self) -> StructType:
        """The columns of the table."""
        from pyspark.sql.types import IntegerType, LongType, StructField, StructType, TimestampType

        key = [StructField(self.key, self.key_type)] if self.key and self.key_type else []
        kinds = (IntegerType(), LongType(), TimestampType()) if self.has_origin else ()
        origin = [StructField(name, kind) for name, kind in zip(ORIGIN, kinds, strict=False)]
        return StructType([*key, *self.fields, *origin])

    def rows(self, source: Source, spark: SparkSession, part: Range) -> DataFrame:
        """Returns a row for each record, with the columns of the table and internal ones."""
        from pyspark.sql import functions as f

        needed = ["value", "_corrupt"]
        needed += ["key"] if self.key else []
        needed += ["partition", "offset"] if self.key or self.has_origin else []
        needed += ["timestamp"] if self.has_origin else []
        records = source.frame(
            spark,
            part,
            columns=",".join(needed),
            valueFormat="json",
            valueSchema=ddl_of(self.fields),
            badValues="column",
        )
        columns = [f.col("value")[each.name].alias(each.name) for each in self.fields]
        if self.has_origin:
            columns += [f.col(name).alias(column) for column, name in ORIGIN.items()]
        is_corrupt, is_null = f.col("_corrupt").isNotNull(), f.col("value").isNull()
        if self.key is None:
            return records.select(*columns, is_null.alias(BAD))  # corrupt ones are null too
        return records.select(
            self._key().alias(self.key),
            *columns,
            (is_corrupt | self._key().isNull()).alias(BAD),
            is_null.alias(DELETED),
            f.struct("partition", "offset").alias(ORDER),
        )

    def _key(self) -> Column:
        """Returns the record's key as a value of its column, null if it is not a valid one."""
        from pyspark.sql import functions as f

        assert self.key_type is not None
        if self.key_type.typeName() == "binary":
            return f.col("key")
        text = f.try_validate_utf8(f.col("key").cast("string"))
        return text.try_cast(self.key_type)

    def rejected(self, source: Source, spark: SparkSession, part: Range) -> DataFrame:
        """Returns the records without a row, with the reason."""
        from pyspark.sql import functions as f

        records = source.frame(
            spark, part, columns="key,value,topic,partition,offset,timestamp,headers"
        )
        if self.key_type is not None:
            is_binary = self.key_type.typeName() == "binary"
            said = "null" if is_binary else f"not a valid {self.key_type.simpleString().upper()}"
            said = f"its key is {said}"
            reason = f.when(self._key().isNull(), said)
        else:
            reason = f.when(f.col("value").isNull(), "its value is null")
        parser = ValueParser(format=ValueFormat.JSON, kind=json_type(self.fields))
        return records.withColumn("reason", reason).mapInArrow(
            functools.partial(_rejected, parser), _REJECTED_DDL
        )


def _rejected(parser: ValueParser, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows that already have a reason, or whose value is bad."""
    for batch in batches:
        given = batch.column("reason").to_pylist()
        found = [
            of_value or other
            for of_value, other in zip(parser.reasons(batch.column("value")), given, strict=True)
        ]
        kept = batch.filter(arrow.booleans(np.array([each is not None for each in found])))
        reasons = arrow.strings([each.encode() for each in found if each is not None])
        yield kept.set_column(kept.num_columns - 1, "reason", reasons)


def dead_letters(rejected: DataFrame) -> DataFrame:
    """Returns the records with their reason and their origin as additional headers."""
    from pyspark.sql import functions as f

    names = ("reason", "topic", "partition", "offset")
    more = [
        f.struct(
            f.lit(f"sparklog.{name}").alias("key"),
            f.col(name).cast("string").cast("binary").alias("value"),
        )
        for name in names
    ]
    headers = f.concat(f.coalesce("headers", f.array().cast(_HEADERS)), f.array(*more))
    return rejected.select("key", "value", "timestamp", headers.cast(_HEADERS).alias("headers"))
