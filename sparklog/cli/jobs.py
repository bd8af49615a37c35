"""`sparklog jobs`: names the programs for Spark, and their files for `spark-submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparklog import jobs
from sparklog.cli.shared import Command, print_columns

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List the programs for Spark, and find their files.",
)


@app.command("list", cls=Command)
def list_() -> None:
    """Lists the jobs.

    Each is run by python -m sparklog.jobs.NAME, or by spark-submit with the file that sparklog jobs
    path NAME prints.

    Example: sparklog jobs list
    """
    print_columns([("JOB", "WHAT IT DOES"), *jobs.JOBS.items()])


@app.command(cls=Command)
def path(
    job: Annotated[str, typer.Argument(metavar="NAME", help="The job.", show_default=False)],
) -> None:
    """Prints the path of a job's file, for spark-submit.

    Example: sparklog jobs path produce
    """
    if job not in jobs.JOBS:
        raise typer.BadParameter(f"there is no job {job!r}; sparklog jobs list names them")
    typer.echo(Path(jobs.__file__).with_name(f"{job}.py"))
