"""The command line, `sparklog`: brokers, topics, groups, records in and out, and diagnosis.

A command that uses a log takes `--root URI` or `--bootstrap HOST:PORT`; the defaults are
`SPARKLOG_ROOT` and `SPARKLOG_BOOTSTRAP`. Exit codes are those of `terminal.commands.ExitCode`:

    0    success
    1    an error, printed as one line on standard error; or `check` found an anomaly
    2    a usage error
    3    `doctor` found a problem; or `status` found topics that are held back, or a silent broker;
         or `cluster describe` found partitions without a live leader
    4    `status`, `top` or `cluster describe` found no broker
    130  interrupted by Ctrl-C
    141  the reader of a pipe has exited
"""

from __future__ import annotations

import gc

import typer

from sparklog import pandas_import
from sparklog.cli import (
    acls,
    broker,
    cluster,
    groups,
    jobs,
    maintenance,
    quotas,
    security,
    topics,
    users,
)
from sparklog.cli.check import check
from sparklog.cli.consume import consume
from sparklog.cli.produce import produce
from sparklog.cli.status import status
from sparklog.cli.top import top
from sparklog.terminal.commands import EXIT_CODES, PASS_ON, Command, Commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="sparklog",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A distributed log like Kafka, whose topics are Delta tables.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)
app.callback()(maintenance.common)
app.add_typer(broker.app, name="broker")
app.add_typer(cluster.app, name="cluster")
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")
app.add_typer(users.app, name="users")
app.add_typer(acls.app, name="acls")
app.add_typer(quotas.app, name="quotas")
app.add_typer(security.app, name="security")
app.add_typer(jobs.app, name="jobs")
app.command(cls=Command)(produce)
app.command(cls=Command)(consume)
app.command(cls=Command)(status)
app.command(cls=Command)(top)
app.command(cls=Command)(maintenance.doctor)
app.command(cls=Command)(check)
app.command(cls=Command, context_settings=PASS_ON, add_help_option=False)(maintenance.bench)
app.command(cls=Command)(maintenance.version)


def main() -> None:
    """The console script."""
    pandas_import.block()
    try:
        app(prog_name="sparklog")
    finally:
        # The process is exiting: a final garbage collection would slow a short command by a tenth.
        gc.freeze()
