"""`sparklog bench`: measures the log on this machine, the same way each time.

Each measure is independent: it starts and stops its own broker process, on a fresh root.
Compare figures only within one run on one machine; the report names the machine.

Comparisons with Kafka and with Spark's Kafka connector are in `benchmarks/` of the source tree.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sparklog.bench.command import run_measures
from sparklog.bench.measures import COMPARISONS, MEASURES
from sparklog.bench.report import BenchOptions

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Measures to run: {', '.join(MEASURES)}. Default: all of them."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(help="Seconds that a timed measure takes; `sustained` and `memory` take 6 ×."),
    ] = 10.0,
    rows: Annotated[int, typer.Option(help="Rows that the measure `burst` writes.")] = 20_000_000,
    versions: Annotated[
        int, typer.Option(help="Table version that the measure `age` compares with version 50.")
    ] = 5_000,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for roots, on the disk to measure. Default: the temporary folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the report as a Markdown table.")
    ] = False,
) -> None:
    """Measure the log on this machine.

    For a quick run of about a minute, lower --seconds, --rows and --versions. To compare with Kafka
    or with Spark's Kafka connector, run `python -m benchmarks` in a source checkout.

    Example: sparklog bench latency burst --seconds 3 --rows 2000000
    """
    for name in names or ():
        if name.partition("-")[0] in COMPARISONS:
            raise typer.BadParameter(
                f"The measure {name!r} is not part of the installed package: run"
                f" `python -m benchmarks {name}` in a source checkout of sparklog."
            )
    options = BenchOptions(
        folder=folder or Path(tempfile.gettempdir()), seconds=seconds, rows=rows, versions=versions
    )
    run_measures(MEASURES, names or (), options, as_markdown=as_markdown)
