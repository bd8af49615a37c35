"""Command line of a set of measures: runs them and prints their figures."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from sparklog.bench.report import BenchOptions, Measurement, Report, machine, markdown

Measure: TypeAlias = Callable[[BenchOptions], Iterable[Measurement]]
"""Yields its figures, each as soon as it is known."""


def run_measures(
    measures: Mapping[str, Measure],
    names: Sequence[str],
    options: BenchOptions,
    *,
    as_markdown: bool = False,
    save: Path | None = None,
) -> None:
    """Runs the named measures, or all if none is named, and prints their figures.

    Each figure goes to standard error as soon as it is known, the report to standard output.

    Args:
        names: names of measures or of groups of them, as in `select`.
        save: the file to write the figures to, as a JSON `Report`.

    Raises:
        typer.BadParameter: No measure has one of these names.
    """
    try:
        selected = [each for name in names for each in select(measures, name)]
    except KeyError as unknown:
        raise typer.BadParameter(
            f"There is no measure {unknown.args[0]!r}: use one of {', '.join(measures)}."
        ) from None
    progress = Console(stderr=True)
    figures = []
    with _exit_on_sigterm():
        for name in selected or measures:
            for figure in measures[name](options):
                progress.print(_line(figure))
                figures.append(figure)
    if save is not None:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        report = Report(machine=machine(), command=command, figures=tuple(figures))
        save.write_bytes(report.to_json())
    if as_markdown:
        typer.echo(f"{machine()}\n\n{markdown(figures)}")
        return
    table = Table("measure", "target", "measured", "", title=machine())
    for figure in figures:
        table.add_row(figure.name, figure.target, _value(figure), _mark(figure))
    Console().print(table)


def select(measures: Mapping[str, Measure], name: str) -> list[str]:
    """Returns the measures of a name: one for `spark-age`, all beginning with `spark-` for `spark`.

    Raises KeyError if there is none.
    """
    found = [each for each in measures if each == name or each.startswith(f"{name}-")]
    if not found:
        raise KeyError(name)
    return found


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Ends the run on SIGTERM as on Ctrl-C, so that broker processes are stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(figure: Measurement) -> str:
    return f"{_mark(figure) or '·'} {figure.name}: {_value(figure)}"


def _value(figure: Measurement) -> str:
    return f"{figure.value} ({figure.detail})" if figure.detail else figure.value


def _mark(figure: Measurement) -> str:
    return {True: "✓", False: "✗", None: ""}[figure.met]
