"""`sparklog bench`: what the log does on this machine, measured the same way every time.

Each measure stands by itself: it starts a broker of its own as a process, on a fresh root, and ends
it. Figures compare on one machine, in one run; the report names the machine.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sparklog.bench.measures import MEASURES, named, run
from sparklog.bench.report import Figure, Options, machine, markdown

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Which measures: {', '.join(MEASURES)}; kafka or spark: all that begin so."
            " None: all of them."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long a timed measure runs; the longest take six times that.")
    ] = 10.0,
    rows: Annotated[int, typer.Option(help="Rows of the bulk measures.")] = 20_000_000,
    versions: Annotated[int, typer.Option(help="Table versions that count as old.")] = 5_000,
    folder: Annotated[
        Path | None, typer.Option(help="Where roots are made: on the disk to be measured.")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The report as a Markdown table.")
    ] = False,
) -> None:
    """Measure this machine; --seconds, --rows and --versions make a minute enough for a look.

    `kafka` and `spark` measure beside a real Kafka, whose jars are downloaded the first time.

    Example: sparklog bench latency burst --seconds 3 --rows 2000000
    """
    try:
        chosen = [each for name in names or () for each in named(name)]
    except KeyError as unknown:
        raise typer.BadParameter(
            f"no measure {unknown.args[0]}; there are {', '.join(MEASURES)}"
        ) from None
    options = Options(
        folder=folder or Path(tempfile.gettempdir()), seconds=seconds, rows=rows, versions=versions
    )
    progress = Console(stderr=True)
    with _ended_in_order():
        figures = run(chosen, options, on_figure=lambda each: progress.print(_line(each)))
    if as_markdown:
        typer.echo(f"{machine()}\n\n{markdown(figures)}")
        return
    table = Table("what", "at least", "measured", "", title=machine())
    for each in figures:
        table.add_row(each.name, each.target, _value(each), _mark(each))
    Console().print(table)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, with the brokers: they are processes of their own."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(figure: Figure) -> str:
    return f"{_mark(figure) or '·'} {figure.name}: {_value(figure)}"


def _value(figure: Figure) -> str:
    return f"{figure.value} ({figure.detail})" if figure.detail else figure.value


def _mark(figure: Figure) -> str:
    return {True: "✓", False: "✗", None: ""}[figure.met]
