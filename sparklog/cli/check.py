"""`sparklog check`: checks a Kafka broker by the history that its clients observe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from sparklog.terminal.commands import ExitCode
from sparklog.terminal.options import JsonOption

if TYPE_CHECKING:
    from sparklog.check.analysis import Anomaly
    from sparklog.check.driving import RunResult, Workload

_Report: TypeAlias = Callable[[str, float, int, int], None]

KafkaBootstrapOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The address of any Kafka broker; several are separated by commas.",
        show_default=False,
    ),
]

SecondsOption = Annotated[
    float, typer.Option(metavar="S", min=1.0, help="How long the clients run.")
]

ProducersOption = Annotated[
    int, typer.Option(metavar="N", min=1, max=64, help="The number of producers, 1 to 64.")
]

ConsumersOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=64, help="The number of consumers without a group, 0 to 64."
    ),
]

GroupsOption = Annotated[
    int, typer.Option(metavar="N", min=0, max=16, help="The number of consumer groups, 0 to 16.")
]

MembersOption = Annotated[
    int, typer.Option(metavar="N", min=1, max=16, help="The members of each group, 1 to 16.")
]

PartitionsOption = Annotated[
    int, typer.Option(metavar="N", min=1, max=1_000, help="The partitions of the topic, 1 to 1000.")
]

RateOption = Annotated[
    float,
    typer.Option(
        metavar="N", min=1.0, help="The maximum rate of a producer, in records per second."
    ),
]

TopicPrefixOption = Annotated[
    str, typer.Option(metavar="NAME", help="The prefix of the topic's name; random digits follow.")
]

KeepTopicOption = Annotated[
    bool, typer.Option("--keep-topic", help="Keep the topic even if no anomaly is found.")
]

HistoryOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the history of the clients to this file.", show_default=False
    ),
]

ReplayOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Analyse a history that --history wrote, without running clients.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]


def check(
    bootstrap: KafkaBootstrapOption = None,
    seconds: SecondsOption = 10.0,
    producers: ProducersOption = 3,
    consumers: ConsumersOption = 2,
    groups: GroupsOption = 1,
    members: MembersOption = 2,
    partitions: PartitionsOption = 4,
    rate: RateOption = 5_000.0,
    topic_prefix: TopicPrefixOption = "sparklog-check",
    keep_topic: KeepTopicOption = False,
    history: HistoryOption = None,
    replay: ReplayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a Kafka broker against the history of its clients.

    The command runs producers, consumers and groups, and analyses their history. It finds lost,
    duplicate, moved, reordered and skipped records, and commits that went backwards.
    It creates a topic, and deletes it if no anomaly is found. It exits with 1 for any anomaly.

    Example: sparklog check --bootstrap 127.0.0.1:9092 --seconds 30
    """
    if (bootstrap is None) == (replay is None):
        raise typer.BadParameter("pass either --bootstrap, or --replay to analyse a history")
    from sparklog.check import report
    from sparklog.check.analysis import analyse
    from sparklog.check.driving import Workload
    from sparklog.check.history import load

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
            keep_topic=keep_topic,
        )
        outcome, findings = _run_clients(workload, history)
        topic, problems, seen = outcome.topic, outcome.problems, outcome.history
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(report.as_json(findings, problems, seen, topic)))
    else:
        report.show(findings, problems, seen, topic)
    if report.verdict(findings, problems, seen) != "clean":
        raise typer.Exit(ExitCode.FAILED)


def _run_clients(workload: Workload, file: Path | None) -> tuple[RunResult, list[Anomaly]]:
    """Runs the clients, and analyses their history. Removes the topic if no anomaly is found."""
    from sparklog.check.analysis import analyse
    from sparklog.check.driving import drive, remove_topic
    from sparklog.check.history import save

    topic = ""
    try:
        with _meter() as show_progress:
            outcome = drive(workload, show_progress)
            topic, seen = outcome.topic, outcome.history
            if file is not None:
                save(seen, file)
            show_progress("analysing", 1.0, seen.acked, len(seen.reads))
            findings = analyse(seen)
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [])
        state = notes[0] if notes else remove_topic(workload, topic) if topic else "no topic"
        typer.echo(f"sparklog: interrupted; {state}", err=True)
        raise
    if not findings:
        remove_topic(workload, topic)
    return outcome, findings


@contextlib.contextmanager
def _meter() -> Iterator[_Report]:
    """Yields a function that updates a progress bar on standard error, if it is a terminal."""
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

    def show_progress(what: str, over: float, acked: int, read: int) -> None:
        progress.update(task, description=what, completed=over, acked=acked, read=read)

    with progress:
        yield show_progress
