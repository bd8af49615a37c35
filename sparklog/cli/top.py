"""`sparklog top`: shows the figures of a broker, its topics and its groups, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.cli.shared import BootstrapOption, ExitCode, JsonOption, RootOption, log_target
from sparklog.options import check_bootstrap, storage_options

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

    from sparklog.formats.flight_messages import BrokerFigures, BrokerInfo
    from sparklog.status import StatusReport

_FIRST_SECONDS: Final = 1.0
"""The time over which the first rates are measured."""
_BETWEEN: Final = 2
"""The spaces between two columns."""
_LESS_IMPORTANT: Final = ("small", "size", "files", "partitions", "out/s", "in/s", "age")
"""Columns about topics that a narrow terminal leaves out, the first one first."""
_OTHERS_SHOWN: Final = 8
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def top(
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one picture and exit, also into a pipe."),
    ] = False,
    as_json: JsonOption = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.5, max=3600, help="The time between two pictures."),
    ] = 2.0,
    rows: Annotated[
        int,
        typer.Option(metavar="NUMBER", min=1, max=1000, help="The most topics and groups to show."),
    ] = 15,
) -> None:
    """Show what a broker does: records, lag, files, groups and memory, live.

    Topics with most records per second come first. A narrow terminal lacks the less important
    columns. Of several brokers on a root it shows one, and the addresses of the others for
    --bootstrap. The command starts no broker, and the broker needs no port for metrics. End it by
    Ctrl-C. Without a terminal it prints one picture, as with
    --once; --json prints the counts since the broker's start. Exits with 4 if there is no broker.

    Example: sparklog top --root ./data --once
    """
    import msgspec

    broker = _Broker(*log_target(root, bootstrap))
    before = broker.figures()
    if as_json:
        typer.echo(msgspec.json.encode(before).decode())
        return
    from rich.console import Console

    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        time.sleep(_FIRST_SECONDS)
        console.print(picture(before, broker.figures(), rows=rows, others=broker.others))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _show(console, broker, before, interval=interval, rows=rows)


def _show(
    console: object,
    broker: _Broker,
    before: BrokerFigures,
    *,
    interval: float,
    rows: int,
) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    assert isinstance(console, Console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        wait_seconds = _FIRST_SECONDS
        while True:
            time.sleep(wait_seconds)
            wait_seconds = interval
            try:
                now = broker.figures()
            except (errors.SparklogError, typer.Exit) as error:
                reason = str(error) if isinstance(error, errors.SparklogError) else "no broker"
                live.update(Text(f"no answer: {reason}"), refresh=True)
                continue
            if (now.broker.broker, now.broker.epoch) != (before.broker.broker, before.broker.epoch):
                before = now  # another one's counts say nothing about rates
            live.update(picture(before, now, rows=rows, others=broker.others), refresh=True)
            before = now


class _Broker:
    """The broker that is shown: the one at an address, or one of a root that answers."""

    def __init__(self, root: str | None, bootstrap: str | None) -> None:
        self._root = root
        self._address = check_bootstrap("bootstrap", bootstrap) if bootstrap is not None else ""
        self.others: list[BrokerInfo] = []
        """The other brokers of the root when it was last asked for one."""

    def figures(self) -> BrokerFigures:
        """Returns the present figures. Raises `typer.Exit` if there is no broker."""
        from sparklog import status

        if self._root is None:
            return status.figures_of(self._address)
        if self._address:  # another one may serve the root by now
            with contextlib.suppress(errors.SparklogError):
                return status.figures_of(self._address)
        report = _report(self._root)
        if report.state != "served" or report.broker is None:
            typer.echo(f"sparklog: no broker serves {report.root}", err=True)
            raise typer.Exit(ExitCode.NO_BROKER)
        self._address = report.broker.address
        self.others = [each for each in report.answered if each.broker != report.broker.broker]
        return status.figures_of(self._address)


def _report(root: str) -> StatusReport:
    from sparklog.clock import SystemClock
    from sparklog.status import of_root
    from sparklog.storage.objects import open_store

    store = open_store(root, storage_options(root))
    return of_root(store, SystemClock(), waits=lambda _leader, _seconds: None)


# ------------------------------------------------------------------------------ the picture


def picture(
    before: BrokerFigures, now: BrokerFigures, *, rows: int, others: Sequence[BrokerInfo] = ()
) -> RenderableType:
    """Returns the figures as tables, with rates between two moments.

    `others` are brokers of the same root, which are named with their addresses.
    """
    from rich.console import Group
    from rich.text import Text

    parts = [_summary(before, now)]
    if others:
        where = ", ".join(f"{each.broker} at {each.address}" for each in others[:_OTHERS_SHOWN])
        more = f" and {len(others) - _OTHERS_SHOWN} more" if len(others) > _OTHERS_SHOWN else ""
        parts.append(Text(f"not shown: broker {where}{more} (--bootstrap HOST:PORT shows it)"))
    parts.append(_topics(before, now, rows))
    if now.groups:
        parts.append(_groups(now, rows))
    return Group(*parts)


def _rate(before: int, now: int, seconds: float) -> float:
    """Returns the rate of a count; a count that fell began again with the broker."""
    return (now - before if now >= before else now) / seconds


def _summary(before: BrokerFigures, now: BrokerFigures) -> RenderableType:
    from rich.table import Table

    seconds = _seconds(before, now)
    broker = now.broker
    requests = sum(now.store_requests.values()), sum(before.store_requests.values())
    full = max(now.memory, key=lambda each: each.held_bytes / max(each.limit_bytes, 1))
    fullest = f"fullest budget {full.budget} {full.held_bytes / max(full.limit_bytes, 1):.0%}"
    flushes = f"flushes {_rate(before.flushes, now.flushes, seconds):,.0f}/s, p50"
    flushes += f" {now.flush_p50_seconds * 1e3:.1f} ms, p99 {now.flush_p99_seconds * 1e3:.1f} ms"
    table = Table.grid(padding=(0, 3))
    for row in (
        (
            f"broker {broker.broker} ({broker.kind}) at {broker.address}",
            f"up {now.uptime_seconds:,.0f} s",
            f"{now.topic_count:,} topics, {now.partition_count:,} partitions",
            f"{now.connections:,} Kafka clients, {now.streams:,} streams",
        ),
        (
            f"in {_rate(before.records_in, now.records_in, seconds):,.0f} records/s",
            f"{_bytes(_rate(before.bytes_in, now.bytes_in, seconds))}/s",
            f"out {_bytes(_rate(before.bytes_out, now.bytes_out, seconds))}/s",
            flushes,
        ),
        (
            f"unpublished {_bytes(now.unpublished_bytes)}",
            f"amplification {now.amplification:.1f}",
            f"storage {_rate(requests[1], requests[0], seconds):,.0f} operations/s",
            f"loop delay p99 {now.loop_delay_p99_seconds * 1e3:.1f} ms; {fullest}",
        ),
    ):
        table.add_row(*row)
    return table


def _topics(before: BrokerFigures, now: BrokerFigures, rows: int) -> RenderableType:
    seconds = _seconds(before, now)
    earlier = {each.topic: each for each in before.topics}
    found = []
    for each in now.topics:
        then = earlier.get(each.topic, each)
        records = _rate(then.records_in, each.records_in, seconds)
        found.append(
            (
                records,
                (
                    each.topic,
                    f"{each.partitions:,}",
                    f"{records:,.0f}",
                    f"{_bytes(_rate(then.bytes_in, each.bytes_in, seconds))}",
                    f"{_bytes(_rate(then.bytes_out, each.bytes_out, seconds))}",
                    f"{each.lag_records:,}",
                    f"{each.lag_seconds:.1f} s",
                    f"{each.files:,}",
                    f"{each.small_files:,}",
                    _bytes(each.table_bytes),
                    "held back" if each.held_back else "",
                ),
            )
        )
    found.sort(key=lambda pair: -pair[0])
    headings = (
        "topic", "partitions", "records/s", "in/s", "out/s", "not in table", "age", "files",
        "small", "size", "",
    )  # fmt: skip
    shown = [row for _, row in found[:rows]]
    return _Columns(headings, shown, less_important=_LESS_IMPORTANT)


def _groups(now: BrokerFigures, rows: int) -> RenderableType:
    found = [
        (
            each.group,
            each.state,
            f"{each.members:,}",
            f"{each.lag:,}" if each.is_whole else f"at least {each.lag:,}",
            "" if each.lag_seconds is None else f"{each.lag_seconds:,.1f} s",
        )
        for each in now.groups[:rows]
    ]
    headings = ("group", "state", "members", "lag", "lag in seconds")
    return _Columns(headings, found, less_important=("members", "state", "lag in seconds"))


class _Columns:
    """A table that leaves out its less important columns where the terminal is too narrow.

    The first column, of names, stays as wide as its longest text, or as wide as there is room.
    """

    def __init__(
        self,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        less_important: Sequence[str],
    ) -> None:
        """`less_important`: the headings to leave out, the first one first."""
        self._headings = headings
        self._rows = rows
        self._less_important = less_important

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        columns = [*zip(self._headings, *self._rows, strict=True)]
        kept = {column[0]: column for column in columns}
        widths = {column[0]: max(map(cell_len, column)) + _BETWEEN for column in columns}
        for heading in self._less_important:
            if sum(widths[each] for each in kept) <= options.max_width:
                break
            del kept[heading]
        table = Table(box=None, header_style="bold", padding=(0, _BETWEEN, 0, 0))
        for number, heading in enumerate(kept):
            is_name = number == 0
            justify: JustifyMethod = "left" if is_name else "right"
            table.add_column(heading, justify=justify, no_wrap=not is_name)
        for row in zip(*(column[1:] for column in kept.values()), strict=True):
            table.add_row(*map(Text, row))
        yield table


def _seconds(before: BrokerFigures, now: BrokerFigures) -> float:
    return max((now.at_us - before.at_us) / 1e6, 1e-3)


def _bytes(size: float) -> str:
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError
