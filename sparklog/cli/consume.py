"""`sparklog consume`: a topic's records to standard output."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog.cli.formats import OutputFormat
from sparklog.cli.shared import BootstrapOption, RootOption, TopicArgument, WaitOption, open_log

if TYPE_CHECKING:
    import pyarrow as pa

    from sparklog.client import Consumer, Log
    from sparklog.client.reading import Point


def consume(
    topic: TopicArgument,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="POINT",
            help="earliest, latest, an offset, or a time in ISO 8601 (UTC without a zone), which"
            " is the first record that is not older.",
        ),
    ] = "earliest",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")
    ] = False,
    max_records: Annotated[
        int | None,
        typer.Option("--max", "-n", min=0, help="Stop after so many.", show_default=False),
    ] = None,
    output: Annotated[
        OutputFormat,
        typer.Option(
            help="text: values as they are, a line each. jsonl: an object each, a line each."
            " arrow: an IPC stream of all columns."
        ),
    ] = OutputFormat.TEXT,
    partition: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only this one; may be given several times.", show_default=False),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Also keys.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Also headers.")] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Also partition, offset and timestamp.")
    ] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Print a topic's records; ends at the last one that stands now, unless told to follow.

    Within a partition they come in order; what is asked for beside the value stands before it.

    Example: sparklog consume flights --from 2013-06-01 --keys --max 10 --root ./data
    """
    point = _point(start)
    if output is OutputFormat.ARROW and sys.stdout.isatty():
        raise typer.BadParameter("an Arrow stream is nothing for a terminal; redirect it")
    columns = None if output is OutputFormat.ARROW else _columns(keys, headers, metadata)
    with (
        open_log(root, bootstrap, wait) as log,
        _consumer(log, topic, point, partition, follow=follow, columns=columns) as consumer,
    ):
        from sparklog.cli.writing import write

        write(_up_to(consumer, max_records), sys.stdout.buffer, output)


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
        metadata_age_seconds=math.inf,  # partitions that are added later are others, too
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
        reason = f"--from: {text!r} is not earliest, latest, an offset, or a time in ISO 8601"
        raise typer.BadParameter(reason) from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _columns(keys: bool, headers: bool, metadata: bool) -> list[str]:
    wanted = ["partition", "offset", "timestamp"] if metadata else []
    wanted += ["key"] if keys else []
    wanted += ["headers"] if headers else []
    return [*wanted, "value"]


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
