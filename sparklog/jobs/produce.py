"""Writes rows that Spark reads to a topic: files, a table or a query, once or as a stream.

    spark-submit jobs/produce.py --root s3://bucket/log --topic orders --key customer_id \\
        --timestamp ordered_at s3a://landing/orders/

Each row is a record. Its value is the row as a JSON object, or the column `value` if there is one,
or any SQL expression; key, headers, time and partition are expressions as well.

A batch is written once: atomically, at its end, under a name derived from its files and these
options. A run that is stopped leaves nothing, and one that is repeated finds its records. With a
checkpoint the rows are a stream, and each run writes those that are new since the last one. The
checkpoint records the topic, and is rejected with a different one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.display import counted
from sparklog.jobs.inputs import FileSet, Input, files_of, identity_of, literal
from sparklog.jobs.running import echo, progress, run, spark_session
from sparklog.jobs.targets import (
    DryRunOption,
    PartitionsOption,
    Target,
    check_run_name,
    last_line,
    root_for_spark,
)
from sparklog.terminal.options import RootOption, config_pairs

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import DataType

_BYTES: Final = ("binary", "string")
_MICROSECONDS: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]XXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
    "timeZone": "UTC",
}
_LOOK_SECONDS: Final = 1
_NOTE: Final = "sparklog-topic"
"""A folder in the checkpoint of a stream, alongside those of Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressions:
    """SQL over the columns of a row, for each part of a record that is not the default."""

    value: str | None = None
    key: str | None = None
    headers: str | None = None
    timestamp: str | None = None
    partition: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Rows that are ready for the sink, which converts them to JSON values if `as_json`."""

    frame: DataFrame
    as_json: bool

    @property
    def options(self) -> dict[str, str]:
        return {"valueFormat": "json" if self.as_json else "binary"}


def records(rows: DataFrame, given: Expressions) -> Records:
    """Returns the records of `rows`.

    Without an expression for it, the value is the column `value` if that is binary or a string;
    columns named key, headers, timestamp and partition are then used, too. Otherwise the value is
    the row as a JSON object.

    Raises `WrongSchema`; `AnalysisException` for a column that does not exist.
    """
    from pyspark.sql import functions as f

    from sparklog.sinks.columns import ROLES, check_columns

    roles = [each.name for each in fields(given) if each.name != "value"]
    expressions = {role: text for role in roles if (text := getattr(given, role)) is not None}
    has_value = "value" in rows.columns and rows.schema["value"].dataType.simpleString() in _BYTES
    parts: dict[str, Column] = {role: f.expr(text) for role, text in expressions.items()}
    as_json = False
    if given.value is not None:
        parts["value"] = f.expr(given.value)
    elif has_value:
        parts = {name: f.col(name) for name in ("value", *roles) if name in rows.columns} | parts
    # The sink would omit such columns from the object. SQL ignores the case of names.
    elif ROLES.keys() & {name.lower() for name in rows.columns}:
        parts["value"] = f.to_json(f.struct("*"), _MICROSECONDS)
    else:
        as_json = True
    found = rows.select(*(["*"] if as_json else []), *map(_named, parts, parts.values()))
    for name in parts:
        found = _converted(found, name)
    check_columns(found.schema, as_json=as_json, needs_topic=False)
    return Records(frame=found, as_json=as_json)


def _named(name: str, column: Column) -> Column:
    return column.alias(name)


def _converted(frame: DataFrame, name: str) -> DataFrame:
    """Returns the frame with the column in a type that the sink accepts, if the intent is clear."""
    from pyspark.sql import functions as f

    column, kind = f.col(name), frame.schema[name].dataType
    wanted = _wanted(name, kind)
    if wanted is None:
        return frame
    if name == "headers":
        entries = f.map_entries(column)
        return frame.withColumn(name, entries.cast(wanted))
    return frame.withColumn(name, column.cast(wanted))


def _wanted(name: str, kind: DataType) -> str | None:
    """Returns the type to which a column is converted; None if it stays."""
    word = kind.simpleString()
    if word == "void":
        return None
    if name == "headers":
        return "array<struct<key:string,value:binary>>" if kind.typeName() == "map" else None
    if name in ("key", "value"):
        return None if word in _BYTES or kind.typeName() in ("array", "map", "struct") else "string"
    return {"timestamp": "timestamp_ltz", "partition": "int"}[name]


# ------------------------------------------------------------------------------ the job


PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH", help="Files, folders or patterns, as Spark reads them.", show_default=False
    ),
]

TopicOption = Annotated[str, typer.Option(metavar="TOPIC", help="The topic.", show_default=False)]

FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Format of the paths: parquet, csv, json, text, orc, delta, or another that Spark"
        " supports.",
    ),
]

TableOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Read a table instead of paths.", show_default=False),
]

QueryOption = Annotated[
    str | None, typer.Option(metavar="SQL", help="Read the result of a query.", show_default=False)
]

SchemaOption = Annotated[
    str | None,
    typer.Option(
        metavar="DDL",
        help="The columns of the paths: 'id BIGINT, name STRING'. Default: Spark infers them.",
        show_default=False,
    ),
]

ReaderOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="An option of Spark's reader, such as header=true; repeat it for more.",
    ),
]

ChangeFeedOption = Annotated[
    bool,
    typer.Option(
        "--change-feed",
        help="Read the change data feed of a Delta table: a row for each change, with the"
        " columns _change_type, _commit_version and _commit_timestamp.",
    ),
]

WhereOption = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="Write only the rows that match.", show_default=False),
]

ValueOption = Annotated[
    str | None,
    typer.Option(
        metavar="SQL",
        help="The record's value. Default: the column value if it is binary or a string,"
        " otherwise the row as a JSON object.",
        show_default=False,
    ),
]

KeyOption = Annotated[
    str | None, typer.Option(metavar="SQL", help="The record's key.", show_default=False)
]

HeadersOption = Annotated[
    str | None,
    typer.Option(
        metavar="SQL", help="Headers: a map, or an array of (key, value).", show_default=False
    ),
]

TimestampOption = Annotated[
    str | None,
    typer.Option(
        metavar="SQL", help="The record's time. Default: time of arrival.", show_default=False
    ),
]

PartitionOption = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="The partition. Default: by the key.", show_default=False),
]

OnceAsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name the run: records of a run with this name are written once within 30 days."
        " Default: a name derived from the files and these options.",
        show_default=False,
    ),
]

AgainOption = Annotated[
    bool, typer.Option("--again", help="Write even if the same run was written before.")
]

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Read a stream: the rows that are new since the last run with this checkpoint.",
        show_default=False,
    ),
]

EveryOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        help="With --checkpoint: continue until stopped, and check for new rows this often.",
        show_default=False,
    ),
]


def produce(
    paths: PathsArgument = None,
    root: RootOption = None,
    topic: TopicOption = ...,  # type: ignore[assignment]
    partitions: PartitionsOption = None,
    input_format: FormatOption = "parquet",
    table: TableOption = None,
    query: QueryOption = None,
    schema: SchemaOption = None,
    option: ReaderOption = None,
    change_feed: ChangeFeedOption = False,
    where: WhereOption = None,
    value: ValueOption = None,
    key: KeyOption = None,
    headers: HeadersOption = None,
    timestamp: TimestampOption = None,
    partition: PartitionOption = None,
    once_as: OnceAsOption = None,
    again: AgainOption = False,
    checkpoint: CheckpointOption = None,
    every: EveryOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Writes rows that Spark reads to a topic.

    Each row is a record. A batch is written once, atomically: a run that is stopped leaves
    nothing, and one that is repeated writes nothing more. With --checkpoint the rows are a stream.

    Example: spark-submit jobs/produce.py --topic orders --key customer ./landing/*.parquet
    """
    target_root = root_for_spark(root)
    source = Input(
        paths=paths or (),
        table=table,
        query=query,
        format=input_format,
        schema=schema,
        options=config_pairs(option or ()) | ({"readChangeFeed": "true"} if change_feed else {}),
    )
    _check_once(once_as, checkpoint, every, again=again)
    given = Expressions(
        value=value, key=key, headers=headers, timestamp=timestamp, partition=partition
    )
    target = Target(root=target_root, topic=topic, partitions=partitions)
    found = target.find()
    spark = spark_session(f"produce {topic}", with_delta=source.needs_delta)
    is_stream = checkpoint is not None
    rows = source.read_stream(spark) if is_stream else source.read(spark)
    if where is not None:
        rows = rows.where(where)
    made = records(rows, given)
    files, run_name = None, once_as
    if not (is_stream or again or once_as):  # only the run's name needs them
        # A query may depend on more than files: on the time, or on what a subquery reads.
        files = None if source.query else files_of(spark, rows)
        run_name = identity_of(files, *source.reading, where, given)
    noted = None
    if checkpoint is not None:
        noted = _noted(spark, checkpoint)
        _check_noted(noted, checkpoint, target, is_new=found is None)
    _describe(source, files, made, topic, found or partitions, is_new=found is None)
    is_done = run_name is not None and found is not None and target.has(run_name)
    if dry_run:
        typer.echo(
            f"{topic}: the rows are already in the topic"
            if is_done
            else f"{topic}: nothing was written, because of --dry-run"
        )
        return
    if is_done:
        typer.echo(f"{topic}: nothing to write, this run's records are in the topic")
        return
    if found is None:
        target.create()
    if checkpoint is not None:
        if noted is None:
            _note(spark, checkpoint, target)
        _write_stream(made, target, checkpoint, every)
    else:
        _write(spark, made, target, run_name)


def _check_once(
    once_as: str | None, checkpoint: str | None, every: float | None, *, again: bool
) -> None:
    """Raises a usage error for mutually exclusive options, and `BadOption` for a bad name."""
    if every is not None and checkpoint is None:
        raise typer.BadParameter(
            "--every needs --checkpoint, which remembers the rows that were read"
        )
    if checkpoint is not None and (once_as or again):
        raise typer.BadParameter("--once-as and --again are for batches, not for --checkpoint")
    if once_as and again:
        raise typer.BadParameter("pass --once-as or --again, not both")
    check_run_name(once_as)


def _describe(
    source: Input,
    files: FileSet | None,
    made: Records,
    topic: str,
    partitions: int | None,
    *,
    is_new: bool,
) -> None:
    size = "" if files is None else f", {files.bytes / 2**20:,.1f} MiB"
    echo(f"from {source}" + (f": {counted(files.count, 'file')}{size}" if files else ""))
    kinds = {field.name: field.dataType.simpleString() for field in made.frame.schema}
    if made.as_json:
        roles = {each.name for each in fields(Expressions)} - {"value"}
        members = [name for name in kinds if name not in roles]
        kinds = {"value": f"a JSON object of {', '.join(members)}"} | {
            name: kind for name, kind in kinds.items() if name in roles
        }
    count = counted(partitions or 0, "partition")
    echo(f"to   {topic}, {'to be created with ' if is_new else ''}{count}")
    for name, kind in kinds.items():
        echo(f"     {name}: {kind}")


def _write(spark: SparkSession, made: Records, target: Target, run_name: str | None) -> None:
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    began = time.perf_counter()
    observed = Observation()
    rows = made.frame.observe(observed, f.count(f.lit(1)).alias("count"))
    options = made.options
    if run_name is not None:
        options["idempotencyKey"] = target.name_of(run_name)
    with progress(spark, f"produce {target.topic}"):
        target.writer(rows, **options).save()
    seconds = time.perf_counter() - began
    count = observed.get["count"]
    typer.echo(last_line(target.topic, count, seconds))


# ------------------------------------------------------------------------------ a stream


def _noted(spark: SparkSession, checkpoint: str) -> str | None:
    """Returns the name and id of a checkpoint's topic; None for a new or an older checkpoint."""
    from pyspark.errors import AnalysisException

    try:
        found = spark.read.text(literal(f"{checkpoint}/{_NOTE}")).first()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    return str(found[0]) if found else None


def _note(spark: SparkSession, checkpoint: str, target: Target) -> None:
    """Writes the topic into the checkpoint with Spark, which alone may have access to it."""
    note = spark.createDataFrame([(f"{target.topic} {target.topic_id()}",)], "value STRING")
    note.coalesce(1).write.mode("overwrite").text(f"{checkpoint}/{_NOTE}")


def _check_noted(noted: str | None, checkpoint: str, target: Target, *, is_new: bool) -> None:
    """Raises `BadRequest` if the rows of the checkpoint are in a different topic."""
    if noted is None:
        return
    name, _, topic_id = noted.partition(" ")
    if name == target.topic and not is_new and topic_id == target.topic_id():
        return
    other = repr(name) if name != target.topic else f"an earlier or another topic {name!r}"
    raise errors.BadRequest(
        reason=f"The checkpoint {checkpoint} belongs to {other}, which has the rows up to there."
        f" Give topic {target.topic!r} its own --checkpoint."
    )


def _write_stream(
    made: Records, target: Target, checkpoint: str, every_seconds: float | None
) -> None:
    writer = (
        made.frame.writeStream.format("sparklog")
        .outputMode("append")
        .option("checkpointLocation", checkpoint)
        .options(root=target.root, topic=target.topic, **made.options)
    )
    if every_seconds is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{every_seconds} seconds")
    began = time.perf_counter()
    query = writer.start()
    try:
        count = _follow(query)
    except KeyboardInterrupt:
        query.stop()
        typer.echo(f"{target.topic}: stopped; a run with this checkpoint continues here")
        raise
    typer.echo(last_line(target.topic, count, time.perf_counter() - began))


def _follow(query: StreamingQuery) -> int:
    """Waits for the end of the query, and prints each batch. Returns the number of rows."""
    count, last = 0, -1
    is_over = False
    while not is_over:
        is_over = bool(query.awaitTermination(_LOOK_SECONDS))
        for each in query.recentProgress:
            if each["batchId"] > last and each["numInputRows"]:
                last = each["batchId"]
                count += each["numInputRows"]
                echo(f"batch {last}: {counted(each['numInputRows'], 'record')}")
    return count


def main() -> None:
    """The program."""
    run(produce, "produce")


if __name__ == "__main__":
    main()
