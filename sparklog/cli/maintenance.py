"""The commands `broker`, `doctor`, `bench` and `version`."""

from __future__ import annotations

import gc
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sparklog import limits
from sparklog.cli.shared import ExitCode
from sparklog.options import ROOT_VARIABLE, storage_options

if TYPE_CHECKING:
    from sparklog.doctor import CheckResult


def broker(
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The root of the log: a folder, or s3://…, gs://…, az://…. It is created if it"
            f" does not exist. Default: {ROOT_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="N",
            help="The id of the broker in the cluster; auto: the ordinal at the end of the host"
            " name. Default: SPARKLOG_ID, or 0.",
            show_default=False,
        ),
    ] = None,
    flight: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address of the Flight listener; port 0 takes a free one. Default:"
            " SPARKLOG_FLIGHT_LISTEN, or 127.0.0.1:8815.",
            show_default=False,
        ),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address of the Kafka listener; '' disables it. Default:"
            " SPARKLOG_KAFKA_LISTEN, or 127.0.0.1:9092.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file like conf/broker.toml; options and the environment override it.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=limits.BROKER_PROCESSES,
            help="Run N brokers, for the cores of this machine. Ids and ports count up from those"
            " of the first; bounds on memory and connections are for all of them together. One that"
            " dies is started again. Default: this process is the only broker.",
            show_default=False,
        ),
    ] = 0,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Replace the live broker with this id; it stops. Brokers that programs run for"
            " themselves are replaced without this option.",
        ),
    ] = False,
    allow_non_empty: Annotated[
        bool,
        typer.Option(
            "--allow-non-empty",
            help="Create the root in a folder that holds other files. Needed only once.",
        ),
    ] = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C, which shut it down cleanly.

    Brokers with different --id share a root, and take over from each other. A broker refuses to
    start while another one with its id is alive, unless --take-over is given, and in a folder that
    is neither empty nor a root, unless --allow-non-empty is given.

    With --processes 3, brokers 0, 1 and 2 listen for Kafka clients at the ports 9092, 9093 and
    9094, and for Flight clients at 8815, 8816 and 8817.

    Example: sparklog broker --root ./data --kafka 127.0.0.1:9092 --processes 3
    """
    if supervised:
        _run_supervised()
        return
    from sparklog.settings import load_settings

    given: dict[str, Any] = {
        "root": root,
        "id": number,
        "flight.listen": flight,
        "kafka.listen": kafka,
    }
    settings = load_settings(config, os.environ, given)
    if processes:
        from sparklog.broker.supervisor import supervise

        raise typer.Exit(
            supervise(settings, processes, take_over=take_over, allow_non_empty=allow_non_empty)
        )
    _prepare_start()
    from sparklog.broker.running import run_broker

    run_broker(settings, take_over=take_over, allow_non_empty=allow_non_empty)


def _run_supervised() -> None:
    """Runs one of the brokers of `--processes`."""
    from sparklog.broker.supervisor import read_assignment

    assignment = read_assignment()
    _prepare_start()
    from sparklog.broker.running import run_broker

    run_broker(
        assignment.settings,
        take_over=assignment.take_over,
        allow_non_empty=assignment.allow_non_empty,
        stops_with=assignment.stops_with,
    )


def _prepare_start() -> None:
    # Until the broker serves, nearly all new objects are of modules: a search for unused ones would
    # make the start a tenth longer. `run_broker` enables it again.
    gc.disable()


def doctor(
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Also check this root, by writing and removing files below its doctor/. Default:"
            f" {ROOT_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check this machine and a root: one line per check, with advice.

    Exits with 3 if a check failed. A warning is not a failure.

    Example: sparklog doctor --root ./data
    """
    from sparklog.clock import SystemClock
    from sparklog.doctor import CheckState, examine_machine, examine_root
    from sparklog.storage.objects import open_store

    findings = examine_machine(os.environ)
    target = root or os.environ.get(ROOT_VARIABLE)
    if target:
        store = open_store(target, storage_options(target))
        findings = chain(findings, examine_root(store, SystemClock()))
    failed = False
    for finding in findings:
        failed |= finding.state is CheckState.FAIL
        print_finding(finding)
    if failed:
        raise typer.Exit(ExitCode.UNHEALTHY)


def print_finding(finding: CheckResult) -> None:
    """Prints the line of a check."""
    state = typer.style(f"{finding.state:<5}", **_STYLES[finding.state])
    advice = f": {finding.advice}" if finding.advice else ""
    typer.echo(f"{state} {finding.check:<16} {finding.found}{advice}")


_STYLES: Final[dict[str, dict[str, Any]]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
}


PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context settings of a command that passes its arguments on."""


def bench(context: typer.Context) -> None:
    """Run benchmarks on this machine.

    `sparklog bench --help` lists them.

    Example: sparklog bench latency
    """
    try:
        from sparklog.bench import app
    except ImportError as missing:
        typer.echo(f"sparklog: The benchmarks are not installed ({missing}).", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    app(context.args, prog_name="sparklog bench")


def version() -> None:
    """Print the version.

    Example: sparklog version
    """
    import sparklog

    typer.echo(f"sparklog {sparklog.__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Options of the program itself; the program's help replaces this text."""
