"""The commands around a log: its broker, the doctor, the benchmarks, the version."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sparklog.cli.shared import ExitCode
from sparklog.options import ROOT_VARIABLE, storage_options


def broker(
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help=f"A folder, or s3://…, gs://…, az://…; made if need be. Or {ROOT_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--id",
            metavar="N",
            help="Which broker of the cluster. Or SPARKLOG_ID.",
            show_default=False,
        ),
    ] = None,
    flight: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the Arrow Flight door listens; port 0 is any. Or SPARKLOG_FLIGHT_LISTEN.",
            show_default=False,
        ),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the Kafka door listens; '' closes it. Or SPARKLOG_KAFKA_LISTEN.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings, as in conf/broker.toml; the environment and options go before them.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Replace a broker that serves the root, which stops. Brokers that programs"
            " started for themselves are replaced without it.",
        ),
    ] = False,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C, which it takes for a request to leave in good order.

    It refuses to start while another broker serves the root, unless --take-over is given.

    Example: sparklog broker --root ./data --kafka 127.0.0.1:9092
    """
    from sparklog.broker.agent import run_broker
    from sparklog.settings import load_settings

    given: dict[str, Any] = {
        "root": root,
        "id": number,
        "flight.listen": flight,
        "kafka.listen": kafka,
    }
    run_broker(load_settings(config, os.environ, given), take_over=take_over)


def doctor(
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help=f"Also look at this root; writes below its doctor/, and removes it again."
            f" Or {ROOT_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check this machine, and a root: one line for each check, with what to do about it.

    Ends with 3 if a check failed; a warning is none.

    Example: sparklog doctor --root ./data
    """
    from sparklog.clock import SystemClock
    from sparklog.doctor import State, examine_machine, examine_root
    from sparklog.storage.objects import open_store

    findings = examine_machine(os.environ)
    target = root or os.environ.get(ROOT_VARIABLE)
    if target:
        store = open_store(target, storage_options(target))
        findings = chain(findings, examine_root(store, SystemClock()))
    failed = False
    for finding in findings:
        failed |= finding.state is State.FAIL
        state = typer.style(f"{finding.state:<5}", **_STYLES[finding.state])
        advice = f": {finding.advice}" if finding.advice else ""
        typer.echo(f"{state} {finding.check:<16} {finding.found}{advice}")
    if failed:
        raise typer.Exit(ExitCode.UNHEALTHY)


_STYLES: Final[dict[str, dict[str, Any]]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
}


PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For a command whose arguments are another's."""


def bench(context: typer.Context) -> None:
    """Measure what this machine gives: `sparklog bench --help` lists the benchmarks.

    Example: sparklog bench latency
    """
    try:
        from sparklog.bench import app
    except ImportError as missing:
        typer.echo(f"sparklog: the benchmarks are not here ({missing})", err=True)
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
            help="Print the version, and no more.",
        ),
    ] = False,
) -> None:
    """What may be said before any command; its help is the program's."""
