"""JSON values of a topic become rows of a Delta table, each record once.

    spark-submit jobs/to_table.py --root s3://bucket/log --topic orders --checkpoint ./c \\
        --dead-letters orders.dead s3a://bucket/tables/orders

The topic is read in windows of offsets. A window is planned in the checkpoint, with its columns,
before it is written. Its rows are one commit of the table, which carries the window's number as
`txn`, and then its records without a row are one write to the topic of dead letters, under that
number too. A run that follows one that was killed looks for the last window's commit. If the table
has it, only the dead letters may be missing. If not, the window is written with the same offsets,
and the columns of this run: arguments that could not be written do not stay.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
import pyarrow as pa
import typer

import sparklog
from sparklog import arrow, errors
from sparklog.display import counted
from sparklog.jobs.ranges import EARLIEST, LATEST, Range, Source, fair_shares, range_of
from sparklog.jobs.running import echo, progress, run, spark_error_kinds, spark_session
from sparklog.jobs.targets import PartitionsOption, Target, last_line, root_for_spark
from sparklog.jobs.windows import Checkpoint, Head, Window
from sparklog.sources.json_inference import (
    Kind,
    ddl_of,
    find_fields,
    is_usable,
    merged_fields,
    quoted,
    with_new_fields,
)
from sparklog.sources.values import ValueFormat, ValueParser, json_type
from sparklog.terminal.options import RootOption, root_metadata

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import DataType, StructType

    from sparklog.client.log import Log
    from sparklog.formats.flight_messages import TopicInfo

WINDOW_RECORDS = 5_000_000  # that a job writes to a table by one commit

_ORIGIN: Final = {"_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}
_REJECTED_DDL: Final = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT,"
    " timestamp TIMESTAMP_LTZ, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING"
)
_NO_TABLE: Final = ("TABLE_OR_VIEW_NOT_FOUND", "PATH_NOT_FOUND", "DELTA_PATH_DOES_NOT_EXIST")
_ONLY_FOLDER: Final = "DELTA_TABLE_NOT_FOUND"
_BAD: Final = "_sparklog_bad"
_DELETED: Final = "_sparklog_deleted"
_ORDER: Final = "_sparklog_order"
_INTERNAL: Final = frozenset((_BAD, _DELETED, _ORDER))
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")
_REFUSED: Final = "sparklog: a record without a row"
_NOT_SKIPPED: Final = "sparklog: a write that must fail"
_OBSERVED_SECONDS: Final = 10.0
_CASE_RECORDS: Final = 1_000
"""Records of a new checkpoint whose fields are compared with those of --schema."""
_TXN: Final = "spark.databricks.delta.write.txn"


class NewFields(enum.StrEnum):
    """Fields of the objects that the table has no column for."""

    ADD = "add"
    IGNORE = "ignore"


# ------------------------------------------------------------------------------ records to rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The way in which records become rows."""

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
        origin = [StructField(name, kind) for name, kind in zip(_ORIGIN, kinds, strict=False)]
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
            columns += [f.col(name).alias(column) for column, name in _ORIGIN.items()]
        is_corrupt, is_null = f.col("_corrupt").isNotNull(), f.col("value").isNull()
        if self.key is None:
            return records.select(*columns, is_null.alias(_BAD))  # corrupt ones are null too
        return records.select(
            self._key().alias(self.key),
            *columns,
            (is_corrupt | self._key().isNull()).alias(_BAD),
            is_null.alias(_DELETED),
            f.struct("partition", "offset").alias(_ORDER),
        )

    def _key(self) -> Column:
        """Returns the record's key as a value of its column, null if it is none."""
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
            said = "null" if is_binary else f"no {self.key_type.simpleString().upper()}"
            said = f"its key is {said}"
            reason = f.when(self._key().isNull(), said)
        else:
            reason = f.when(f.col("value").isNull(), "its value is null")
        parser = ValueParser(format=ValueFormat.JSON, kind=json_type(self.fields))
        return records.withColumn("reason", reason).mapInArrow(
            functools.partial(_rejected, parser), _REJECTED_DDL
        )


def _rejected(parser: ValueParser, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows that have a reason already, or whose value is bad."""
    for batch in batches:
        given = batch.column("reason").to_pylist()
        found = [
            of_value or other
            for of_value, other in zip(parser.reasons(batch.column("value")), given, strict=True)
        ]
        kept = batch.filter(arrow.booleans(np.array([each is not None for each in found])))
        reasons = arrow.strings([each.encode() for each in found if each is not None])
        yield kept.set_column(kept.num_columns - 1, "reason", reasons)


def _dead_letters(rejected: DataFrame) -> DataFrame:
    """Returns the records with their reason and their origin as further headers."""
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


# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A Delta table: a path, or a name in the catalog."""

    path: str | None
    name: str | None

    def __str__(self) -> str:
        return self.path or self.name or ""

    @property
    def _identifier(self) -> str:
        return f"delta.{quoted(self.path)}" if self.path else self.name or ""

    def schema(self, spark: SparkSession, *, is_new: bool = False) -> StructType | None:
        """Returns its columns, none of them NOT NULL; None if there is no table.

        Objects may lack any field, and Delta checks the rows. Raises `BadRequest` for the table of
        a topic and, with `is_new`, for a folder that is none. A first write that is killed leaves
        such a folder behind.
        """
        from pyspark.errors import AnalysisException

        try:
            found = spark.read.table(self._identifier).schema
            properties = spark.sql(f"SHOW TBLPROPERTIES {self._identifier}").collect()
        except AnalysisException as error:
            if error.getCondition() == _ONLY_FOLDER and is_new:
                raise errors.BadRequest(
                    reason=f"{self} is a folder, but not a Delta table. Name a table, or a folder"
                    " that does not exist. If a run of this job was stopped in its first commit,"
                    " give its --checkpoint, or remove the folder."
                ) from None
            if error.getCondition() in (*_NO_TABLE, _ONLY_FOLDER):
                return None
            raise
        if any(row["key"].startswith("sparklog.") for row in properties):
            raise errors.BadRequest(
                reason=f"{self} is the table of a topic, which only brokers write. Name another."
            )
        return spark.createDataFrame([], ddl_of(found)).schema

    def has(self, spark: SparkSession, columns: StructType) -> bool:
        """Returns whether it has the columns. Raises `WrongSchema` if one has another type."""
        found = self.schema(spark)
        if found is None:
            return False
        check_fits(found, columns)
        return _has(found, columns)

    def check_takes(self, spark: SparkSession, columns: StructType) -> None:
        """Raises Spark's error if Delta refuses columns that the table does not have.

        In a table of the catalog they are found by the write: the optimizer runs the row first.
        """
        if (found := self.schema(spark)) is not None and not _has(found, columns):
            # A new table is not tried: the folder would stay.
            self._is_skipped(spark.sql("VALUES (1)"), columns)

    def is_written(self, spark: SparkSession, name: str, number: int) -> bool:
        """Returns whether it has the write of this name with this number, or a later one."""
        from pyspark.errors import AnalysisException

        columns = self.schema(spark)
        if columns is None:
            return False
        options = {"txnAppId": name, "txnVersion": str(number)}
        try:
            # The optimizer would run a literal row before Delta looks for the number.
            return self._is_skipped(spark.range(1, numPartitions=1), columns, **options)
        except AnalysisException:  # it was not skipped, for other programs' reasons
            return False

    def _is_skipped(self, row: DataFrame, columns: StructType, **options: str) -> bool:
        """Returns whether Delta skips a write of the columns, which fails otherwise.

        SQL cannot ask for a `txn`, but Delta looks for it before it runs a write. It checks the
        columns before that, too.
        """
        from pyspark.sql import functions as f

        fails = f.raise_error(f.lit(_NOT_SKIPPED))
        rows = row.select(*(fails.cast(each.dataType).alias(each.name) for each in columns))
        try:
            self._save(rows, **options)
        except spark_error_kinds() as error:
            if _NOT_SKIPPED in str(error):
                return False
            raise
        return True

    def widen(self, spark: SparkSession, columns: StructType) -> None:
        """Makes the table if there is none, and adds the columns that it does not have."""
        if not self.has(spark, columns):
            self._save(spark.createDataFrame([], columns))

    def append(self, rows: DataFrame, name: str, number: int) -> None:
        """Adds rows and columns, unless a write of this name with this number or a later did."""
        self._save(rows, txnAppId=name, txnVersion=str(number))

    def _save(self, rows: DataFrame, **options: str) -> None:
        writer = rows.write.format("delta").mode("append").options(mergeSchema="true", **options)
        if self.path is not None:
            writer.save(self.path)
        else:
            writer.saveAsTable(self.name or "")

    def merge(self, rows: DataFrame, key: str, name: str, number: int) -> None:
        """Replaces and deletes rows by the newest one of each key, once as `append` does."""
        from pyspark.sql import Window as Over
        from pyspark.sql import functions as f

        newest = Over.partitionBy(quoted(key)).orderBy(f.desc(_ORDER))
        columns = [each for each in rows.columns if each not in _INTERNAL]
        latest = rows.withColumn(_ORDER, f.row_number().over(newest)).where(f"{_ORDER} = 1")
        view = f"sparklog_to_table_{name}"
        latest.drop(_BAD, _ORDER).createOrReplaceTempView(view)
        names = [quoted(each) for each in columns]
        session = rows.sparkSession
        session.conf.set(f"{_TXN}AppId", name)
        session.conf.set(f"{_TXN}Version", str(number))
        try:
            session.sql(
                # Evolution lets a struct lack fields of the table's.
                f"MERGE WITH SCHEMA EVOLUTION INTO {self._identifier} t USING {view} s"
                f" ON t.{quoted(key)} = s.{quoted(key)}"
                f" WHEN MATCHED AND s.{_DELETED} THEN DELETE"
                f" WHEN MATCHED THEN UPDATE SET {', '.join(f't.{n} = s.{n}' for n in names)}"
                f" WHEN NOT MATCHED AND NOT s.{_DELETED} THEN INSERT ({', '.join(names)})"
                f" VALUES ({', '.join(f's.{n}' for n in names)})"
            )
        finally:
            session.conf.unset(f"{_TXN}AppId")
            session.conf.unset(f"{_TXN}Version")
            session.catalog.dropTempView(view)


def check_names(wanted: StructType, found: StructType) -> None:
    """Raises `WrongSchema` if Delta would refuse a name as that of a new field of `found`."""
    known = _types(found)
    names = [field.name.lower() for field in wanted]
    for field in wanted:
        name = field.name.lower()
        if names.count(name) > 1 or not (name in known or is_usable(name)):
            raise errors.WrongSchema(
                reason=f"The field {field.name!r} of --schema cannot be a column: its name occurs"
                " twice, differs from another one in case only, or has a character that Delta"
                " refuses."
            )
        _check_names_in(field.dataType, known.get(name))


def _check_names_in(wanted: DataType, found: DataType | None) -> None:
    """Checks the names of structs, which may be in arrays and maps."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(wanted, StructType):
        check_names(wanted, found if isinstance(found, StructType) else StructType([]))
    elif isinstance(wanted, ArrayType):
        element = found.elementType if isinstance(found, ArrayType) else None
        _check_names_in(wanted.elementType, element)
    elif isinstance(wanted, MapType):
        known = found if isinstance(found, MapType) else None
        _check_names_in(wanted.keyType, known and known.keyType)
        _check_names_in(wanted.valueType, known and known.valueType)


def _check_readable(fields: StructType) -> None:
    """Raises `BadOption` if a field has a type that JSON values are not read as."""
    try:
        json_type(fields)
    except errors.BadOption as error:  # it names the option of Spark's source
        raise errors.BadOption(
            option="--schema", value=error.value, reason=str(error.reason)
        ) from None


def other_case(fields: DataType, found: Kind, path: str = "") -> tuple[str, str] | None:
    """Returns a field and the name that objects have for it, in other letters; None: there is none.

    Names in JSON are case-sensitive, as in Spark's `from_json`.
    """
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(fields, ArrayType) and isinstance(found, list):
        return other_case(fields.elementType, found[0], path)
    if not (isinstance(fields, StructType) and isinstance(found, dict)):
        return None
    names = {name.lower(): name for name in found}
    for field in fields:
        name = names.get(field.name.lower())
        if name is not None and field.name not in found and name not in fields.names:
            return f"{path}{field.name}", f"{path}{name}"
        inside = other_case(field.dataType, found.get(field.name), f"{path}{field.name}.")
        if inside is not None:
            return inside
    return None


def check_fits(found: StructType, wanted: StructType, path: str = "") -> None:
    """Raises `WrongSchema` if a field of `wanted` has another type in `found`."""
    known = _types(found)
    for field in wanted:
        if (kind := known.get(field.name.lower())) is not None:
            _check_type(f"{path}{field.name}", kind, field.dataType)


def _with_fields_of(schema: StructType, other: StructType) -> StructType:
    """Returns the schema with those fields of another one that it does not have."""
    from pyspark.sql.types import StructType

    known = _types(schema)
    return StructType([*schema, *(each for each in other if each.name.lower() not in known)])


def _types(schema: StructType) -> dict[str, DataType]:
    return {field.name.lower(): field.dataType for field in schema}


def _check_type(path: str, found: DataType, wanted: DataType) -> None:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(found, StructType) and isinstance(wanted, StructType):
        check_fits(found, wanted, f"{path}.")
    elif isinstance(found, ArrayType) and isinstance(wanted, ArrayType):
        _check_type(f"{path}[]", found.elementType, wanted.elementType)
    elif isinstance(found, MapType) and isinstance(wanted, MapType):
        _check_type(f"{path}{{}}", found.valueType, wanted.valueType)
    elif found != wanted:
        raise errors.WrongSchema(
            reason=f"The table's column {path} is {found.simpleString().upper()}, and the job's is"
            f" {wanted.simpleString().upper()}. Give the table's type in --schema."
        )


def _has(found: DataType, wanted: DataType) -> bool:
    """Returns whether a type has all fields of another, which fits it."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(found, StructType) and isinstance(wanted, StructType):
        known = _types(found)
        return all(
            (kind := known.get(each.name.lower())) is not None and _has(kind, each.dataType)
            for each in wanted
        )
    if isinstance(found, ArrayType) and isinstance(wanted, ArrayType):
        return _has(found.elementType, wanted.elementType)
    if isinstance(found, MapType) and isinstance(wanted, MapType):
        return _has(found.valueType, wanted.valueType)
    return True


# ------------------------------------------------------------------------------ the job


def to_table(
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="The folder of the Delta table.", show_default=False),
    ] = None,
    root: RootOption = None,
    topic: Annotated[
        str, typer.Option(metavar="TOPIC", help="The topic to read.", show_default=False)
    ] = ...,  # type: ignore[assignment]
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A folder that remembers the records that were read, of this job alone.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
    table: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A table of the catalog instead of a path.", show_default=False
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="DDL",
            help="Fields of the objects: 'id BIGINT, name STRING'. Default: the table's columns,"
            " and what the objects have.",
            show_default=False,
        ),
    ] = None,
    new_fields: Annotated[
        NewFields | None,
        typer.Option(
            metavar="add|ignore",
            help="Fields without a column get one, or are left out. Default: ignore with --schema,"
            " otherwise add.",
            show_default=False,
        ),
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Write records that do not fit to this topic. Default: the first one ends the"
            " run.",
            show_default=False,
        ),
    ] = None,
    partitions: PartitionsOption = None,
    upsert: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Keep one row for each record key, which is this column: a record replaces the"
            " row of its key, and a null value deletes it.",
            show_default=False,
        ),
    ] = None,
    origin: Annotated[
        bool,
        typer.Option("--origin", help="Add the columns _partition, _offset and _timestamp."),
    ] = False,
    start: Annotated[
        str,
        typer.Option(
            metavar="POINT",
            help="Where a new checkpoint begins: earliest, latest, a time in ISO 8601, or offsets"
            ' of all partitions as JSON: \'{"0": 17, "1": 4}\'.',
        ),
    ] = EARLIEST,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="Continue until stopped, and look for records this often.",
            show_default=False,
        ),
    ] = None,
    max_records: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="The most records in one commit of the table."),
    ] = WINDOW_RECORDS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")
    ] = False,
) -> None:
    """Writes the JSON values of a topic to a Delta table.

    Each record is written once, to the table or to the topic of dead letters. A run writes the
    records that are new since the last one with its checkpoint.

    Example: spark-submit jobs/to_table.py --topic orders --checkpoint ./orders.c ./orders
    """
    source_root = root_for_spark(root)
    if (path is None) == (table is None):
        raise typer.BadParameter("give a path, or --table: exactly one of them")
    if dead_letters is None and partitions is not None:
        raise typer.BadParameter("--partitions is for the topic that --dead-letters names")
    if dead_letters == topic:
        raise typer.BadParameter("dead letters go to another topic than they come from")
    if path is not None and not _SCHEME.match(path):
        path = str(Path(path).absolute())  # Delta takes no relative one in SQL
    target = Table(path=path, name=table)
    dead = None
    if dead_letters is not None:
        dead = Target(root=source_root, topic=dead_letters, partitions=partitions)
    root_metadata(source_root)  # a misspelt path does not become a root
    with sparklog.connect(source_root, detached=True) as log:
        topic_id = log.describe(topic).topic_id
        source = Source(root=source_root, topic=topic, topic_id=topic_id)
        pinned = {
            "topic": f"{topic} {topic_id}",
            "table": str(target),
            "dead letters": dead_letters,  # without it no window has any, so it may come later
            "upsert": upsert or "",
            "origin": str(origin),
        }
        kept = Checkpoint(checkpoint)
        noted = kept.check(pinned)
        last, is_done = kept.last()
        found = dead.find() if dead is not None else None
        spark = spark_session(f"to_table {topic}", with_delta=True)
        adds = new_fields is NewFields.ADD or (new_fields is None and schema is None)
        job = _Job(
            log,
            spark,
            source,
            target,
            dead,
            upsert=upsert,
            has_origin=origin,
            adds_fields=adds,
        )
        job.prepare(schema, last, start, noted)
        if is_done:  # otherwise the last window comes first
            job.waiting()
        if dry_run:
            typer.echo(f"{target}: nothing was written, because of --dry-run")
            return
        if dead is not None and found is None:
            dead.create()
        began = time.perf_counter()
        unfinished = None if is_done else last
        try:
            name = kept.open(pinned, start=start, starts=job.starts)
            job.run(kept, name, unfinished, max_records=max_records, every_seconds=every)
        except KeyboardInterrupt:
            typer.echo(f"{target}: stopped; a run with this checkpoint continues here")
            raise
    said = last_line(str(target), job.count, time.perf_counter() - began)
    typer.echo(f"{said}; {counted(job.rejected, 'dead letter')}" if job.rejected else said)


class _Job:
    """One run."""

    def __init__(
        self,
        log: Log,
        spark: SparkSession,
        source: Source,
        table: Table,
        dead_letters: Target | None,
        *,
        upsert: str | None,
        has_origin: bool,
        adds_fields: bool,
    ) -> None:
        self._log = log
        self._spark = spark
        self._source = source
        self._table = table
        self._dead_letters = dead_letters
        self._upsert = upsert
        self._has_origin = has_origin
        self._adds_fields = adds_fields
        self._fields: StructType
        self._key_type: DataType | None = None
        self._number = 0
        """The number of the next window."""
        self._at: Mapping[int, int] = {}
        """The first offset of each partition that no window has; absent: its first one."""
        self.starts: Mapping[int, int] | None = None
        """The offsets that `--start` means; None: it does not apply."""
        self._earlier: Window | None = None
        """The plan of the window that is written, by a run before with other columns, if any.

        Its commit may still be on its way, and then ours is skipped.
        """
        self._looked: Mapping[int, int] = {}
        """The offsets up to which no object has a field."""
        self._left_out: set[str] = set()
        self.count = 0
        self.rejected = 0

    # -------------------------------------------------------------------------- before

    def prepare(
        self, given: str | None, last: Window | None, start: str, noted: Head | None = None
    ) -> None:
        """Checks columns and offsets, and shows them.

        `noted`: what the runs before have noted. A `--start` that they had is not resolved again.

        Raises `WrongSchema`, `BadRequest` and `BadOption`, and Spark's errors.
        """
        from pyspark.sql.types import StructType

        wanted = self._spark.createDataFrame([], given).schema if given else StructType([])
        found = self._table.schema(self._spark, is_new=last is None)
        self._check_names(wanted)
        check_names(wanted, found or StructType([]))
        if self._upsert is not None:
            self._key_type = self._type_of_key(self._upsert, wanted, found or StructType([]))
        taken = self._taken()
        self._fields = StructType([each for each in wanted if each.name.lower() not in taken])
        if self._adds_fields and found is not None:
            own = StructType([each for each in found if each.name.lower() not in taken])
            self._fields = _with_fields_of(self._fields, own)
        if self._fields.fields:
            _check_readable(self._fields)
        shape = self._shape(self._fields)
        if found is not None:
            check_fits(found, shape.columns)
            self._table.check_takes(self._spark, shape.columns)
        info = self._source.describe(self._log)
        # Not of a later look, which may show windows that another run has planned since.
        if last is not None:  # the start may not resolve any more, and does not apply
            self._number, self._at = last.number + 1, last.ends
        else:
            if noted is not None and noted.starts is not None and noted.start == start:
                self.starts = noted.starts
            elif start == EARLIEST:
                self.starts = {}
            else:
                self.starts = range_of(self._log, info, start, LATEST).starts
            self._number, self._at = 0, self.starts
        is_new = "" if found is not None else ", to be created"
        waiting = counted(self._waiting(info).count, "record")
        echo(f"from {self._source.topic}, at most {waiting}")
        echo(f"to   {self._table}{is_new}")
        for field in shape.columns:
            echo(f"     {field.name}: {field.dataType.simpleString()}")
        if self._adds_fields:
            echo("     and new fields of the objects")

    def _check_names(self, wanted: StructType) -> None:
        for field in wanted:
            if field.name.lower() in (_INTERNAL | (_ORIGIN.keys() if self._has_origin else set())):
                raise errors.WrongSchema(
                    reason=f"The field {field.name} has the name of a column that the job makes."
                    " Leave it out of --schema."
                )

    def _taken(self) -> set[str]:
        """Returns names that are not of fields, in lower case."""
        return {
            *_INTERNAL,
            *(_ORIGIN if self._has_origin else ()),
            *([self._upsert.lower()] if self._upsert else ()),
        }

    @staticmethod
    def _type_of_key(name: str, *schemas: StructType) -> DataType:
        from pyspark.sql.types import StringType

        for schema in schemas:
            for field in schema:
                if field.name.lower() == name.lower():
                    return field.dataType
        return StringType()

    def _shape(self, fields: StructType) -> Shape:
        return Shape(
            fields=fields, key=self._upsert, key_type=self._key_type, has_origin=self._has_origin
        )

    # -------------------------------------------------------------------------- windows

    def run(
        self,
        kept: Checkpoint,
        name: str,
        unfinished: Window | None,
        *,
        max_records: int,
        every_seconds: float | None,
    ) -> None:
        """Writes the windows that wait, and those that come if `every_seconds` is given.

        Raises `TopicChanged` if the topic is created again meanwhile.
        """
        if unfinished is not None:
            self._finish(kept, unfinished, name)
        is_told = False
        while True:
            waiting = self.waiting()
            while (part := _part(waiting, max_records)).count:
                if not self._find_fields(part, waiting):
                    if every_seconds is None:
                        raise errors.BadRequest(
                            reason=f"No field was found in {counted(waiting.count, 'record')}. Give"
                            " the fields by --schema."
                        )
                    if not is_told:
                        echo("no record has fields yet; waiting for one, or give --schema")
                        is_told = True
                    break
                if not self._number:
                    self._check_case(part)
                self._check_writable(part)
                plan = kept.plan(self._number, part, self._fields.json())
                self._write(kept, plan, name)
                self._number += 1
                self._at = part.ends
                waiting = Range(starts=part.ends, ends=waiting.ends)
            if every_seconds is None:
                return
            time.sleep(every_seconds)

    def waiting(self) -> Range:
        """Returns the records that no window has. Raises `DataLoss` if some of them are gone."""
        info = self._source.describe(self._log)
        found = self._waiting(info)
        found.check_exists(info, "a new --checkpoint")
        return found

    def _waiting(self, info: TopicInfo) -> Range:
        """Returns the records that no window has."""
        starts = {
            each.partition: self._at.get(each.partition, each.start) for each in info.partitions
        }
        return Range(starts=starts, ends={each.partition: each.end for each in info.partitions})

    def _find_fields(self, part: Range, waiting: Range) -> bool:
        """Adds columns for fields that the objects have. Returns whether there is any column.

        The first ones may be of later records that wait: a topic may begin with tombstones, or with
        bad values.
        """
        if self._adds_fields:
            with progress(self._spark, f"columns of {self._source.topic}"):
                looked = None
                while not self._fields.fields:
                    self._looked = {**waiting.starts, **self._looked}
                    looked = _part(waiting.between(self._looked, waiting.ends), WINDOW_RECORDS)
                    if not looked.count:
                        return False
                    self._add_fields(looked)
                    self._looked = looked.ends
                if looked != part:
                    self._add_fields(part)
        return bool(self._fields.fields)

    def _add_fields(self, part: Range) -> None:
        found = merged_fields(self._found(part))
        if self._upsert is not None:
            found.pop(self._upsert, None)
        self._fields, left_out = with_new_fields(self._fields, found, self._taken())
        for each in sorted({*left_out} - self._left_out):
            self._left_out.add(each)
            echo(f"the field {each!r} is left out: no column can have its name")

    def _found(self, part: Range) -> Iterator[dict[str, Kind]]:
        """Yields the fields that objects have, from each task that has read some of them."""
        known = json_type(self._fields) if self._fields.fields else pa.struct([])
        texts = self._source.frame(
            self._spark, part, columns="value", valueFormat="string"
        ).mapInArrow(functools.partial(find_fields, known), "found STRING")
        for row in texts.collect():
            yield json.loads(row["found"])

    def _check_case(self, part: Range) -> None:
        """Raises `WrongSchema` if the first objects have a field in other letters.

        Its column would be null in each row. Where new fields are added, such a one is reported.
        """
        if self._adds_fields:
            return
        for found in self._found(_part(part, _CASE_RECORDS)):
            other = other_case(self._fields, found)
            if other is not None:
                field, name = other
                raise errors.WrongSchema(
                    reason=f"The objects have the field {name!r}, and --schema names {field!r}:"
                    " names in JSON are case-sensitive. Correct --schema, or leave the field out."
                )

    def _check_writable(self, part: Range) -> None:
        """Raises the errors of a window that can be found before it is planned.

        They are `WrongSchema` if another program has given a column another type, and `BadValue`.
        A first commit that fails leaves a folder that is no table. Later ones leave nothing, and
        their values are decoded once.
        """
        shape = self._shape(self._fields)
        has_columns = self._table.has(self._spark, shape.columns)
        if has_columns or self._dead_letters is not None:
            return
        is_new = self._table.schema(self._spark) is None
        if is_new and _counted(shape.rows(self._source, self._spark, part)).bad:
            raise self._refusal(shape, part)

    def _finish(self, kept: Checkpoint, plan: Window, name: str) -> None:
        """Writes a window that a run before has planned, as far as it is not written.

        Raises `DataLoss` if its records are gone. If only their rows are written, the next run
        continues.
        """
        info = self._source.describe(self._log)
        if not self._table.is_written(self._spark, name, plan.number):
            plan.part.check_exists(info, "a new --checkpoint")
            ends = {each.partition: each.end for each in info.partitions}
            waiting = Range(starts=plan.starts, ends={n: ends[n] for n in plan.starts})
            if self._find_fields(plan.part, waiting):
                if not plan.number:
                    self._check_case(plan.part)
                self._check_writable(plan.part)
                self._earlier = plan if plan.schema != self._fields.json() else None
                plan = kept.replan(plan, self._fields.json())
            self._write(kept, plan, name)
            self._earlier = None
            return
        gone, dead = plan.part.gone(info), self._dead_letters
        newest = None if gone is None or dead is None else dead.newest(name)
        starts = {each.partition: each.start for each in info.partitions}
        rest, counts = plan.part.between(starts, plan.ends), _Counts(0, 0)
        if rest.count:
            shape = self._shape(_fields_of(plan))
            counts = _counted(shape.rows(self._source, self._spark, rest))
            self._write_dead_letters(shape, rest, plan, name, counts)
        self._end(kept, plan, counts)
        # Without a topic of dead letters, a record without a row would have ended the run.
        if gone is not None and dead is not None and (newest is None or newest < plan.number):
            partition, start, end = gone
            raise errors.DataLoss(
                topic=info.topic,
                partition=partition,
                start=start,
                end=end,
                reason="their rows are in the table, but records without a row are not in topic"
                f" {dead.topic!r}. The next run continues",
            )

    def _write(self, kept: Checkpoint, plan: Window, name: str) -> None:
        shape = self._shape(_fields_of(plan))
        rows = shape.rows(self._source, self._spark, plan.part)
        with progress(self._spark, f"window {plan.number}"):
            if self._upsert is not None:
                counts = self._merge(rows, self._upsert, shape, plan, name)
            else:
                counts = self._append(kept, rows, shape, plan, name)
            self._write_dead_letters(shape, plan.part, plan, name, counts)
        self._end(kept, plan, counts)

    def _write_dead_letters(
        self, shape: Shape, part: Range, plan: Window, name: str, counts: _Counts
    ) -> None:
        if counts.bad and self._dead_letters is not None:
            letters = _dead_letters(shape.rejected(self._source, self._spark, part))
            app = self._dead_letters.name_of(name)
            self._dead_letters.writer(letters, txnAppId=app, txnVersion=str(plan.number)).save()

    def _end(self, kept: Checkpoint, plan: Window, counts: _Counts) -> None:
        kept.finish(plan.number)
        self.count += counts.good
        self.rejected += counts.bad
        echo(f"window {plan.number}: {counted(counts.good, 'record')}")

    def _append(
        self, kept: Checkpoint, rows: DataFrame, shape: Shape, plan: Window, name: str
    ) -> _Counts:
        """Decodes the records once, and counts them as they are written."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        self._table.has(self._spark, shape.columns)
        observed = Observation()
        is_good = ~f.col(_BAD)
        if self._dead_letters is None:
            refused = f.raise_error(f.lit(_REFUSED)).cast("boolean")
            is_good = f.when(f.col(_BAD), refused).otherwise(f.lit(True))
        good = rows.observe(observed, *_count_columns()).where(is_good).drop(_BAD)
        try:
            self._table.append(good, name, plan.number)
        except spark_error_kinds() as error:
            if _REFUSED in str(error):
                raise self._refusal(shape, plan.part) from None
            raise
        # Nothing is observed in a commit that Delta skips, because the table has its number.
        counts = _observed(observed)
        if counts is None and self._earlier is not None:
            kept.replan(self._earlier, self._earlier.schema)
            raise errors.BadRequest(
                reason=f"An earlier run has written window {plan.number} meanwhile, with its own"
                " columns. Run this again: it continues after that window."
            )
        return counts or _counted(rows)

    def _merge(self, rows: DataFrame, key: str, shape: Shape, plan: Window, name: str) -> _Counts:
        """Keeps the rows meanwhile, because MERGE reads them twice."""
        rows = rows.persist()
        try:
            counts = _counted(rows)
            if counts.bad and self._dead_letters is None:
                raise self._refusal(shape, plan.part)
            self._table.widen(self._spark, shape.columns)
            self._table.merge(rows.where(f"NOT {_BAD}"), key, name, plan.number)
        finally:
            rows.unpersist()
        return counts

    def _refusal(self, shape: Shape, part: Range) -> errors.BadValue:
        rejected = shape.rejected(self._source, self._spark, part)
        first = rejected.select("partition", "offset", "reason").first()
        assert first is not None
        error = errors.BadValue(
            topic=self._source.topic, partition=first[0], offset=first[1], reason=first[2]
        )
        error.add_note(
            "To write such records to a topic, give --dead-letters TOPIC. If the columns are wrong,"
            " run again with another --schema."
        )
        return error


class _Counts(NamedTuple):
    """Records of a window, with and without a row."""

    good: int
    bad: int


def _count_columns() -> list[Column]:
    from pyspark.sql import functions as f

    bad = f.count_if(_BAD)
    return [(f.count(f.lit(1)) - bad).alias("good"), bad.alias("bad")]


def _counted(rows: DataFrame) -> _Counts:
    return _Counts(*rows.agg(*_count_columns()).collect()[0])


def _observed(observation: Observation) -> _Counts | None:
    """Returns what a query has counted; None if it counted nothing, for which Spark would wait."""
    found: list[_Counts] = []

    def wait() -> None:
        found.append(_Counts(**observation.get))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(_OBSERVED_SECONDS)
    return found[0] if found else None


def _fields_of(plan: Window) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(plan.schema))


def _part(waiting: Range, most: int) -> Range:
    """Returns the first records of each partition, about `most` of them."""
    sizes = [waiting.ends[each] - start for each, start in waiting.starts.items()]
    shares = fair_shares(sizes, most)
    ends = {
        each: start + share
        for (each, start), share in zip(waiting.starts.items(), shares, strict=True)
    }
    return Range(starts=waiting.starts, ends=ends)


def main() -> None:
    """The program."""
    run(to_table, "to_table")


if __name__ == "__main__":
    main()
