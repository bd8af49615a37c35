"""`sparklog bench`: measures the log on this machine, the same way each time.

Each measure is independent: it starts and stops its own broker process, on a fresh root.
Compare figures only within one run on one machine; the report names the machine.

Comparisons with Kafka and with Spark's Kafka connector are in `benchmarks/` of the source tree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sparklog.bench.command import run_measures
from sparklog.bench.measures import COMPARISONS, MEASURES
from sparklog.bench.report import BenchOptions, Workload
from sparklog.limits import MIB
from sparklog.settings import load_settings

_ONE = Workload(topics=1)
"""The workload of which the user gives parts."""

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
    topics: Annotated[
        int | None, typer.Option(help="`cost`: topics that get records.", min=1, max=10_000)
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(help="`cost`: partitions of each topic.", min=1, max=1_000)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="`cost`: records per second to each topic.", min=0.01, max=1_000_000),
    ] = None,
    record_bytes: Annotated[
        int | None, typer.Option(help="`cost`: bytes of a record.", min=1, max=MIB)
    ] = None,
    brokers: Annotated[
        int | None, typer.Option(help="`cost`: brokers that share the root.", min=1, max=16)
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="`cost`: a setting of the brokers, such as requests.profile=fast or"
            " prices.store=gcs-standard. May be repeated.",
        ),
    ] = None,
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

    The measure `cost` prices the requests of brokers to an object store: of documented cases, which
    take ten minutes, or of your own rates.

    Example: sparklog bench latency burst --seconds 3 --rows 2000000

    Example: sparklog bench cost --topics 20 --rate 500 --record-bytes 1000
    """
    workload = None
    if any(each is not None for each in (topics, partitions, rate, record_bytes, brokers)):
        workload = Workload(
            topics=topics or _ONE.topics,
            partitions=partitions or _ONE.partitions,
            records_per_second=rate or _ONE.records_per_second,
            record_bytes=record_bytes or _ONE.record_bytes,
            brokers=brokers or _ONE.brokers,
        )
    _check(names or (), is_of_cost=workload is not None or bool(setting))
    options = BenchOptions(
        folder=folder or Path(tempfile.gettempdir()),
        seconds=seconds,
        rows=rows,
        versions=versions,
        workload=workload,
        settings=_settings(setting or ()),
    )
    run_measures(MEASURES, names or (), options, as_markdown=as_markdown)


def _check(names: Sequence[str], *, is_of_cost: bool) -> None:
    """Raises `BadParameter` for measures that cannot run.

    `is_of_cost`: there are options that only the measure `cost` has.
    """
    if is_of_cost and tuple(names) != ("cost",):
        raise typer.BadParameter(
            "--topics, --partitions, --rate, --record-bytes, --brokers and --setting are for the"
            " measure `cost` alone: sparklog bench cost --topics 20"
        )
    for name in names:
        if name.partition("-")[0] in COMPARISONS:
            raise typer.BadParameter(
                f"The measure {name!r} is not part of the installed package: run"
                f" `python -m benchmarks {name}` in a source checkout of sparklog."
            )


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    """Returns settings by name, and checks them. Raises `BadOption` and `UnknownOption`."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--setting {pair}: write KEY=VALUE")
        found[name] = value
    load_settings(None, {}, {"root": "memory://", **found})
    return found
