"""`sparklog consume`: writes a topic's records to standard output.

In a group the command commits only records that it has written. On Ctrl-C it commits the batches
that were written completely, so that the next command repeats at most the last one.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog import errors
from sparklog.cli.formats import OutputFormat
from sparklog.terminal.options import (
    BootstrapOption,
    OnlyPartitionsOption,
    RootOption,
    TopicArgument,
    WaitOption,
    open_log,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from sparklog.client.consumer.consumer import Consumer
    from sparklog.client.log import Log
    from sparklog.client.offsets import Point

FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="POINT",
        help="Where to start: earliest, latest, an offset, or a time in ISO 8601 (UTC by"
        " default), which starts at the first record that is not older. In a group this"
        " applies to partitions without a committed offset.",
    ),
]

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")
]

MaxRecordsOption = Annotated[
    int | None,
    typer.Option(
        "--max", "-n", metavar="N", min=0, help="Stop after this many records.", show_default=False
    ),
]

OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        metavar="FORMAT",
        help="text: values unchanged, one per line. jsonl: a JSON object per record and line."
        " arrow: an Arrow IPC stream of all columns.",
    ),
]

GroupOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Join this consumer group: read the partitions that it assigns, from its"
        " committed offsets, and commit.",
        show_default=False,
    ),
]

KeysOption = Annotated[bool, typer.Option("--keys", help="Also print keys.")]

HeadersOption = Annotated[bool, typer.Option("--headers", help="Also print headers.")]

MetadataOption = Annotated[
    bool, typer.Option("--metadata", help="Also print partition, offset and timestamp.")
]

TypedOption = Annotated[
    bool,
    typer.Option(
        "--typed",
        help="Print the typed columns of the topic's table instead of the value: in text as a JSON"
        " object. With arrow, after all other columns.",
    ),
]


def consume(
    topic: TopicArgument,
    start: FromOption = "earliest",
    follow: FollowOption = False,
    max_records: MaxRecordsOption = None,
    output: OutputOption = OutputFormat.TEXT,
    partition: OnlyPartitionsOption = None,
    group: GroupOption = None,
    keys: KeysOption = False,
    headers: HeadersOption = False,
    metadata: MetadataOption = False,
    typed: TypedOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Print the records of a topic.

    The command stops at the current end of the topic, unless --follow is given. The records of a
    partition are printed in order. Keys, headers and metadata precede the value. In
    jsonl, a value that is a JSON object or array is printed as JSON, and any other as a string.

    Example: sparklog consume flights --from 2013-06-01 --max 10 --root ./data
    """
    point = _point(start)
    if output is OutputFormat.ARROW and sys.stdout.isatty():
        raise typer.BadParameter("an Arrow stream is binary: redirect standard output")
    if group is not None and partition:
        raise typer.BadParameter("--partition and --group exclude each other: a group assigns them")
    columns = None if output is OutputFormat.ARROW else _columns(keys, headers, metadata)
    with open_log(root, bootstrap, wait) as log:
        from sparklog.cli.writing import write

        fields = _typed_fields(log, topic) if typed else []
        if fields:
            columns = _with_typed(columns, [field.name for field in fields])
        if group is None:
            with _consumer(log, topic, point, partition, follow=follow, columns=columns) as alone:
                write(_up_to(alone, max_records), sys.stdout.buffer, output, fields)
            return
        needed = None if columns is None else list(dict.fromkeys(("partition", "offset", *columns)))
        with log.consumer(topic, start=point, follow=follow, group=group, columns=needed) as member:
            batches = _GroupBatches(member, topic, columns, max_records)
            try:
                write(batches, sys.stdout.buffer, output, fields)
            except KeyboardInterrupt:
                batches.commit_written()
                raise


def _consumer(
    log: Log,
    topic: str,
    point: Point,
    partitions: list[int] | None,
    *,
    follow: bool,
    columns: list[str] | None,
) -> Consumer:
    if not partitions:
        return log.consumer(topic, start=point, follow=follow, columns=columns)
    others = set(range(len(log.describe(topic).partitions))) - set(partitions)
    consumer = log.consumer(
        topic,
        start={topic: {**dict.fromkeys(others, "latest"), **dict.fromkeys(partitions, point)}},
        follow=follow,
        columns=columns,
        metadata_age_seconds=math.inf,  # ignore partitions that are added later
    )
    if follow and others:
        consumer.pause(topic, *others)
    return consumer


def _point(text: str) -> Point:
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        reason = (
            f"--from {text!r} is invalid: use earliest, latest, an offset, or a time in ISO 8601"
        )
        raise typer.BadParameter(reason) from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _columns(keys: bool, headers: bool, metadata: bool) -> list[str]:
    wanted = ["partition", "offset", "timestamp"] if metadata else []
    wanted += ["key"] if keys else []
    wanted += ["headers"] if headers else []
    return [*wanted, "value"]


def _typed_fields(log: Log, topic: str) -> list[pa.Field]:
    """Returns the topic's typed columns. Raises `WrongSchema` if there are none."""
    plan = log.describe(topic).plan
    if plan is None:
        add = f"sparklog topics columns {topic} --accept"
        raise errors.WrongSchema(reason=f"topic {topic} has no typed columns; to add some: {add}")
    return plan.fields


def _with_typed(columns: list[str] | None, typed: list[str]) -> list[str]:
    """Adds typed columns: all, or, except for Arrow, those with values before the error."""
    if columns is None:
        from sparklog.formats.record import ROW_SCHEMA

        return [*ROW_SCHEMA.names, *typed]
    error, *others = typed
    return [*(name for name in columns if name != "value"), *others, error]


def _up_to(consumer: Consumer, max_records: int | None) -> Iterator[pa.RecordBatch]:
    if max_records is None:
        yield from consumer.batches()
        return
    left = max_records
    if left:
        for batch in consumer.batches():
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return


class _GroupBatches:
    """The batches of a group member, and the offsets after those that have been written.

    A batch counts as written once the next one is requested.
    """

    def __init__(
        self, consumer: Consumer, topic: str, columns: list[str] | None, max_records: int | None
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._columns = columns
        self._left = math.inf if max_records is None else max_records
        self._written: dict[tuple[str, int], int] = {}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        batches = self._consumer.batches() if self._left else iter(())
        for whole in batches:
            batch = whole.slice(0, int(min(self._left, whole.num_rows)))
            partition = batch.column("partition")[0].as_py()
            next_offset = batch.column("offset")[-1].as_py() + 1
            if batch.num_rows < whole.num_rows:  # the group continues after the last one printed
                self._consumer.seek(self._topic, partition, next_offset)
            yield batch if self._columns is None else batch.select(self._columns)
            self._written[self._topic, partition] = next_offset
            self._left -= batch.num_rows
            if not self._left:
                return

    def commit_written(self) -> None:
        """Commits the offsets after the written batches, for partitions still assigned."""
        with contextlib.suppress(errors.SparklogError):
            assigned = set(self._consumer.assignment)
            written = {each: at for each, at in self._written.items() if each in assigned}
            if written:
                self._consumer.commit(written)
