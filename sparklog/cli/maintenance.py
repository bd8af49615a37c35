"""The commands `doctor`, `bench` and `version`."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from sparklog.options import ROOT_VARIABLE, storage_options
from sparklog.terminal.commands import ExitCode
from sparklog.terminal.printing import print_finding


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
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also check the root and the files of a broker with these settings.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check this machine and a root: one line per check, with advice.

    With --config, also check the root that the file names, whether others can read the files with
    keys that it names, and what a broker with these settings may cost on an object store. Exits
    with 3 if a check failed. A warning is not a failure.

    Example: sparklog doctor --root ./data
    """
    from sparklog.clock import SystemClock
    from sparklog.doctor import CheckState, examine_machine, examine_root, examine_secrets
    from sparklog.settings import load_settings
    from sparklog.storage.objects import open_store

    settings = None
    if config is not None:
        settings = load_settings(config, os.environ, {"root": root})
    findings = chain(examine_machine(os.environ), examine_secrets(os.environ, settings))
    target = settings.root if settings is not None else root or os.environ.get(ROOT_VARIABLE)
    if target:
        storage = settings.storage if settings is not None else storage_options(target)
        store = open_store(target, storage)
        findings = chain(findings, examine_root(store, SystemClock(), settings))
    failed = False
    for finding in findings:
        failed |= finding.state is CheckState.FAIL
        print_finding(finding)
    if failed:
        raise typer.Exit(ExitCode.UNHEALTHY)


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
