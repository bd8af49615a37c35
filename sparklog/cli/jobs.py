"""`sparklog jobs`: lists and runs the Spark jobs, and prints their paths for `spark-submit`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from sparklog import jobs
from sparklog.terminal.commands import PASS_ON, Command
from sparklog.terminal.printing import print_columns

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List and run the Spark jobs, and find their files.",
)

_RUN: Final = {**PASS_ON, "allow_interspersed_args": False}

JobArgument = Annotated[str, typer.Argument(metavar="NAME", help="The job.", show_default=False)]


@app.command("list", cls=Command)
def list_() -> None:
    """List the jobs.

    Run one here with sparklog jobs run NAME, or on a cluster with spark-submit and the file that
    sparklog jobs path NAME prints.

    Example: sparklog jobs list
    """
    print_columns([("JOB", "WHAT IT DOES"), *jobs.JOBS.items()])


@app.command(cls=Command, context_settings=_RUN)
def run(job: JobArgument, context: typer.Context) -> None:
    """Run a job on this machine, or through Spark Connect if SPARK_REMOTE names a server.

    All arguments after NAME are passed to the job: sparklog jobs run NAME --help lists them. This
    is equivalent to python -m sparklog.jobs.NAME.

    Example: sparklog jobs run produce --topic orders --format json orders.json
    """
    _check(job)
    # The same process, so that signals and exit code are the job's.
    os.execv(sys.executable, [sys.executable, "-m", f"{jobs.__name__}.{job}", *context.args])


@app.command(cls=Command)
def path(job: JobArgument) -> None:
    """Print the path of a job's file, for spark-submit.

    Example: sparklog jobs path produce
    """
    _check(job)
    typer.echo(Path(jobs.__file__).with_name(f"{job}.py"))


def _check(job: str) -> None:
    """Raises a usage error if there is no such job."""
    if job not in jobs.JOBS:
        raise typer.BadParameter(f"there is no job {job!r}; sparklog jobs list names them")
