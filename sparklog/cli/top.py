"""`sparklog top`: shows metrics of a cluster's brokers, topics and groups, live."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.cli.cluster import view
from sparklog.terminal.commands import ExitCode
from sparklog.terminal.options import BootstrapOption, JsonOption, RootOption

if TYPE_CHECKING:
    from sparklog.cli.top_picture import Member
    from sparklog.cluster import View
    from sparklog.formats.flight_messages import BrokerDescription, BrokerFigures

_FIRST_SECONDS: Final = 1.0
"""The time over which the first rates are measured."""
_ANSWER_SECONDS: Final = 3.0
"""The time that a broker has to answer."""
_MEMBERS_SECONDS: Final = 10.0
"""The time between two refreshes of the broker list."""
_ASKED_AT_ONCE: Final = 32


def top(
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    broker: Annotated[
        int | None,
        typer.Option(
            metavar="ID", min=0, help="Show one broker in detail.", show_default="all brokers"
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one snapshot and exit, even into a pipe."),
    ] = False,
    as_json: JsonOption = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.5, max=3600, help="The time between two updates."),
    ] = 2.0,
    rows: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=1, max=1000, help="Maximum number of topics and groups to show."
        ),
    ] = 15,
) -> None:
    """Show what the brokers of a log do: records, lag, files, groups and memory, live.

    Topics with the most records per second come first. A narrow terminal omits the less important
    columns. Several brokers have a line each, and topic metrics cover all brokers that answer;
    --broker shows one in detail. The command starts no broker, and brokers need no port for
    metrics. Stop it with Ctrl-C. Without a terminal it prints one snapshot, as with --once; --json
    prints each broker's counts since its start, one line per broker. Exits with 4 if no broker
    answers.

    Example: sparklog top --root ./data --once
    """
    import msgspec

    cluster = _Cluster(view(root, bootstrap, is_quiet=True), broker)
    now = cluster.look()
    answered = {each.broker: each.figures for each in now if each.figures is not None}
    if not answered:
        if broker is None and not any(each.silence for each in now):
            typer.echo(f"sparklog: no broker serves {cluster.root}", err=True)
        _report_silent(now)
        raise typer.Exit(ExitCode.NO_BROKER)
    if as_json:
        for figures in answered.values():
            typer.echo(msgspec.json.encode(figures).decode())
        _report_silent(now)
        return
    from rich.console import Console

    from sparklog.cli.top_picture import picture

    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        time.sleep(_FIRST_SECONDS)
        console.print(picture(answered, cluster.look(), rows=rows))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _show(console, cluster, answered, interval=interval, rows=rows)


def _report_silent(members: list[Member]) -> None:
    """Prints which brokers have no metrics, and the reasons."""
    for each in members:
        if each.figures is None:
            reason = f"does not answer: {each.silence}" if each.silence else f"is {each.state}"
            typer.echo(f"sparklog: broker {each.broker} {reason}", err=True)


def _show(
    console: object,
    cluster: _Cluster,
    before: dict[int, BrokerFigures],
    *,
    interval: float,
    rows: int,
) -> None:
    from rich.console import Console
    from rich.live import Live

    from sparklog.cli.top_picture import picture

    assert isinstance(console, Console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        wait_seconds = _FIRST_SECONDS
        while True:
            time.sleep(wait_seconds)
            wait_seconds = interval
            cluster.follow()
            now = cluster.look()
            live.update(picture(before, now, rows=rows), refresh=True)
            before |= {each.broker: each.figures for each in now if each.figures is not None}


class _Cluster:
    """The brokers to show, which are polled concurrently.

    A broker that has failed to answer is not waited for again: it is polled alongside the others,
    and shown once it answers.
    """

    def __init__(self, view: View, only: int | None) -> None:
        """`only`: the broker to show; None: all. Raises what `View.describe` raises."""
        self._view = view
        self._only = only
        self._description = view.describe()
        known = [each.broker for each in self._description.brokers]
        if only is not None and only not in known:
            ids = f"the ids are {', '.join(map(str, known))}" if known else "there is none"
            raise typer.BadParameter(f"there is no broker {only}: {ids}")
        self._described_at = time.monotonic()
        self._following: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(_ASKED_AT_ONCE)
        self._asked: dict[int, Future[BrokerFigures]] = {}
        self._silences: dict[int, str] = {}
        """Reasons that brokers did not answer their last poll."""
        self._followed_silent: frozenset[int] = frozenset()
        """Brokers that had not answered when the description was last refreshed."""
        self._alive: set[int] = set()
        """Brokers that were alive at some point since the command started."""

    @property
    def root(self) -> str:
        """The root of the cluster."""
        return self._description.root

    def follow(self) -> None:
        """Refreshes the list of brokers in another thread, if due or if other ones are silent."""
        silent = frozenset(self._silences)
        is_due = time.monotonic() - self._described_at >= _MEMBERS_SECONDS
        is_busy = self._following is not None and self._following.is_alive()
        if is_busy or not (is_due or silent != self._followed_silent):
            return
        self._followed_silent = silent
        self._following = threading.Thread(target=self._describe, daemon=True)
        self._following.start()

    def _describe(self) -> None:
        with contextlib.suppress(errors.SparklogError):  # keep the last description
            self._description = self._view.describe()
        self._described_at = time.monotonic()

    def look(self) -> list[Member]:
        """Returns all brokers to show, with their current metrics."""
        from sparklog import status
        from sparklog.cli.top_picture import Member
        from sparklog.storage.metadata.overview import ENDED

        members = [*self._members()]
        living = {each.broker: each for each in members if each.state not in ENDED}
        for broker, each in living.items():
            if broker not in self._asked:
                self._asked[broker] = self._pool.submit(
                    status.figures_of,
                    each.address,
                    timeout_seconds=_ANSWER_SECONDS,
                    credentials=self._view.credentials,
                )
        wait([self._asked[broker] for broker in living if broker not in self._silences])
        for broker in self._silences.keys() - living.keys():
            del self._silences[broker]
        return [
            Member(
                broker=each.broker,
                state=each.state,
                address=each.address,
                leads=each.partitions,
                figures=self._answer_of(each.broker) if each.broker in living else None,
                silence=self._silences.get(each.broker, ""),
            )
            for each in members
        ]

    def _members(self) -> Iterator[BrokerDescription]:
        """Yields the brokers to show: those that are or were alive, or still lead partitions."""
        from sparklog.storage.metadata.overview import ENDED

        for each in self._description.brokers:
            if each.state not in ENDED:
                self._alive.add(each.broker)
            if self._only is None:
                if each.broker in self._alive or each.partitions:
                    yield each
            elif each.broker == self._only:
                yield each

    def _answer_of(self, broker: int) -> BrokerFigures | None:
        """Returns a polled broker's answer, or None; records the reason if it failed."""
        if not self._asked[broker].done():
            return None
        try:
            figures = self._asked.pop(broker).result()
        except errors.SparklogError as error:
            self._silences[broker] = str(error.facts.get("reason", error))
            return None
        if figures.broker.broker != broker:
            self._silences[broker] = f"broker {figures.broker.broker} has its address"
            return None
        self._silences.pop(broker, None)
        return figures
