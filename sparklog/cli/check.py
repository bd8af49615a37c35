"""`sparklog check`: whether a Kafka broker keeps what it says, by clients that remember it all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from sparklog.cli.shared import ExitCode

_Tell: TypeAlias = Callable[[str, float, int, int], None]


def check(
    bootstrap: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address of a Kafka broker, ours or any other; several with commas between.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long clients are at work.")] = 10.0,
    producers: Annotated[int, typer.Option(min=1, max=64, help="How many send.")] = 3,
    consumers: Annotated[int, typer.Option(min=0, max=64, help="How many read alone.")] = 2,
    groups: Annotated[int, typer.Option(min=0, max=16, help="How many groups read.")] = 1,
    members: Annotated[int, typer.Option(min=1, max=16, help="Of each group.")] = 2,
    partitions: Annotated[int, typer.Option(min=1, max=1_000, help="Of the topic.")] = 4,
    rate: Annotated[
        float, typer.Option(min=1.0, help="Records a second that a producer sends at most.")
    ] = 5_000.0,
    topic_prefix: Annotated[
        str, typer.Option(help="Of the topic's name, which ends in random digits.")
    ] = "sparklog-check",
    keep_topic: Annotated[
        bool, typer.Option("--keep-topic", help="Do not delete it, even if nothing was found.")
    ] = False,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write what clients saw to this file.", show_default=False
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Drive nothing; analyse what --history wrote.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one line of JSON.")
    ] = False,
) -> None:
    """Check a Kafka broker: producers, consumers and groups work on it, and remember all they see.

    Finds lost, doubled, moved, reordered and skipped records, and commits that went back. Makes a
    topic of its own, and deletes it again if nothing was found. Ends with 1 for any finding.

    Example: sparklog check --bootstrap 127.0.0.1:9092 --seconds 30
    """
    if (bootstrap is None) == (replay is None):
        raise typer.BadParameter("give --bootstrap, or --replay to analyse a history again")
    from sparklog.check import report
    from sparklog.check.analysis import analyse
    from sparklog.check.driving import Workload, delete_topic, drive
    from sparklog.check.history import load, save

    topic = ""
    problems: tuple[str, ...] = ()
    if replay is not None:
        seen = load(replay)
        findings = analyse(seen)
    else:
        workload = Workload(
            bootstrap=bootstrap or "",
            seconds=seconds,
            producers=producers,
            consumers=consumers,
            groups=groups,
            members=members,
            partitions=partitions,
            rate=rate,
            topic_prefix=topic_prefix,
        )
        with _meter() as tell:
            outcome = drive(workload, tell)
            topic, problems, seen = outcome.topic, outcome.problems, outcome.history
            if history is not None:
                save(seen, history)
            tell("analysing", 1.0, seen.acked, len(seen.reads))
            findings = analyse(seen)
        if not findings and not keep_topic:
            delete_topic(workload, topic)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(report.as_json(findings, problems, seen, topic)))
    else:
        report.show(findings, problems, seen, topic)
    if report.verdict(findings, problems, seen) != "clean":
        raise typer.Exit(ExitCode.FAILED)


@contextlib.contextmanager
def _meter() -> Iterator[_Tell]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[acked]:,} acked, {task.fields[read]:,} read"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = progress.add_task("", total=1.0, acked=0, read=0)

    def tell(what: str, over: float, acked: int, read: int) -> None:
        progress.update(task, description=what, completed=over, acked=acked, read=read)

    with progress:
        yield tell
