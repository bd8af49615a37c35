"""The command line of the benchmarks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measures import MEASURES
from sparklog.bench.command import run_measures
from sparklog.bench.report import BenchOptions

app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Measures to run: {', '.join(MEASURES)}; or kafka, flight, spark, wide or"
            " cluster for a whole group. Default: all measures."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Duration of a timed measure in seconds; the longest takes 4 ×.")
    ] = 10.0,
    rows: Annotated[
        int, typer.Option(help="Rows of the bulk measures; each uses a fixed share.")
    ] = 20_000_000,
    versions: Annotated[
        int,
        typer.Option(help="Table version that the measure spark-age compares with version 50."),
    ] = 5_000,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for all data, on the disk to measure. Default: the temporary folder."
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the report as a Markdown table.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="File for the figures as JSON, as plotted by benchmarks.plots."),
    ] = None,
) -> None:
    """Compare sparklog with a real Kafka and with Spark's Kafka connector on this machine.

    The first run downloads the jars of Kafka, the connector and Delta through Spark's Ivy.

    Example: python -m benchmarks kafka --rows 10000000 --seconds 8
    """
    options = BenchOptions(
        folder=folder or Path(tempfile.gettempdir()), seconds=seconds, rows=rows, versions=versions
    )
    run_measures(MEASURES, names or (), options, as_markdown=as_markdown, save=save)
