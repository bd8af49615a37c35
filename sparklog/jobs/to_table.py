"""Writes JSON values of a topic as rows of a Delta table, each record once.

    spark-submit jobs/to_table.py --root s3://bucket/log --topic orders --checkpoint ./c \\
        --dead-letters orders.dead s3a://bucket/tables/orders

The topic is read in windows of offsets, each written atomically. A run can be killed at any point;
the next one with its checkpoint continues (`table_writing/job.py` has the rules).
"""

from __future__ import annotations

import enum
import re
import time
from pathlib import Path
from typing import Annotated, Final

import typer

import sparklog
from sparklog.display import counted
from sparklog.jobs.ranges import EARLIEST, Source
from sparklog.jobs.running import run, spark_session
from sparklog.jobs.table_writing.job import WINDOW_RECORDS, Job
from sparklog.jobs.table_writing.table import Table
from sparklog.jobs.targets import DryRunOption, PartitionsOption, Target, last_line, root_for_spark
from sparklog.jobs.windows import Checkpoint
from sparklog.terminal.options import RootOption, root_metadata

_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")


class NewFields(enum.StrEnum):
    """Handling of fields of the objects that the table has no column for."""

    ADD = "add"
    IGNORE = "ignore"


PathArgument = Annotated[
    str | None,
    typer.Argument(metavar="PATH", help="The folder of the Delta table.", show_default=False),
]

TopicOption = Annotated[
    str, typer.Option(metavar="TOPIC", help="The topic to read.", show_default=False)
]

CheckpointOption = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="A folder that records which records were read, for this job alone.",
        show_default=False,
    ),
]

TableOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A table of the catalog instead of a path.", show_default=False
    ),
]

SchemaOption = Annotated[
    str | None,
    typer.Option(
        metavar="DDL",
        help="Fields of the objects: 'id BIGINT, name STRING'. Default: the table's columns,"
        " and the fields found in the objects.",
        show_default=False,
    ),
]

NewFieldsOption = Annotated[
    NewFields | None,
    typer.Option(
        metavar="add|ignore",
        help="Add columns for fields without one, or ignore these fields. Default: ignore with"
        " --schema, otherwise add.",
        show_default=False,
    ),
]

DeadLettersOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOPIC",
        help="Write records that do not fit the table to this topic. Default: the first one ends"
        " the run.",
        show_default=False,
    ),
]

UpsertOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Keep one row for each record key, which is in this column: a record replaces the"
        " row of its key, and a null value deletes it.",
        show_default=False,
    ),
]

OriginOption = Annotated[
    bool, typer.Option("--origin", help="Add the columns _partition, _offset and _timestamp.")
]

StartOption = Annotated[
    str,
    typer.Option(
        metavar="POINT",
        help="Where a new checkpoint starts: earliest, latest, a time in ISO 8601, or offsets"
        ' of all partitions as JSON: \'{"0": 17, "1": 4}\'.',
    ),
]

EveryOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        help="Continue until stopped, and check for new records this often.",
        show_default=False,
    ),
]

MaxRecordsOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="The maximum number of records in one commit to the table."
    ),
]


def to_table(
    path: PathArgument = None,
    root: RootOption = None,
    topic: TopicOption = ...,  # type: ignore[assignment]
    checkpoint: CheckpointOption = ...,  # type: ignore[assignment]
    table: TableOption = None,
    schema: SchemaOption = None,
    new_fields: NewFieldsOption = None,
    dead_letters: DeadLettersOption = None,
    partitions: PartitionsOption = None,
    upsert: UpsertOption = None,
    origin: OriginOption = False,
    start: StartOption = EARLIEST,
    every: EveryOption = None,
    max_records: MaxRecordsOption = WINDOW_RECORDS,
    dry_run: DryRunOption = False,
) -> None:
    """Writes the JSON values of a topic to a Delta table.

    Each record is written once, to the table or to the dead-letter topic. A run writes the records
    that are new since the last one with its checkpoint.

    Example: spark-submit jobs/to_table.py --topic orders --checkpoint ./orders.c ./orders
    """
    source_root = root_for_spark(root)
    target = _table(path, table)
    if dead_letters is None and partitions is not None:
        raise typer.BadParameter("--partitions is for the topic that --dead-letters names")
    if dead_letters == topic:
        raise typer.BadParameter("--dead-letters must name a different topic than --topic")
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
            "dead letters": dead_letters,  # without it no window has any, so it can be added later
            "upsert": upsert or "",
            "origin": str(origin),
        }
        kept = Checkpoint(checkpoint)
        noted = kept.check(pinned)
        last, is_done = kept.last()
        found = dead.find() if dead is not None else None
        spark = spark_session(f"to_table {topic}", with_delta=True)
        adds = new_fields is NewFields.ADD or (new_fields is None and schema is None)
        job = Job(
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


def _table(path: str | None, name: str | None) -> Table:
    """Raises a usage error unless exactly one of them is given."""
    if (path is None) == (name is None):
        raise typer.BadParameter("pass exactly one of a path and --table")
    if path is not None and not _SCHEME.match(path):
        path = str(Path(path).absolute())  # Delta's SQL accepts no relative path
    return Table(path=path, name=name)


def main() -> None:
    """The program."""
    run(to_table, "to_table")


if __name__ == "__main__":
    main()
