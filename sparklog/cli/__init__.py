"""The command line, `sparklog`: a broker, topics, groups, records in and out, and their care.

Every command that speaks to a log takes `--root URI` or `--bootstrap HOST:PORT`, or finds them in
`SPARKLOG_ROOT` and `SPARKLOG_BOOTSTRAP`. Exit codes are those of `shared.ExitCode`:

    0    all went well
    1    sparklog refused or failed, and said why in one line on standard error; or `check` has
         found something
    2    the command line is wrong
    3    `doctor` found a problem; or `status` found topics that are held back, or a silent broker
    4    `status` found that no broker leads the root
    130  interrupted by Ctrl-C
    141  the reader of a pipe has gone
"""

from __future__ import annotations

import typer

from sparklog.cli import groups, maintenance, topics
from sparklog.cli.check import check
from sparklog.cli.consume import consume
from sparklog.cli.produce import produce
from sparklog.cli.shared import EXIT_CODES, Commands
from sparklog.cli.status import status

__all__ = ["app", "main"]

app = typer.Typer(
    name="sparklog",
    cls=Commands,
    no_args_is_help=True,
    help="A distributed log in the manner of Kafka whose topics are Delta tables.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
)
app.callback()(maintenance.common)
app.command()(maintenance.broker)
app.add_typer(topics.app, name="topics")
app.add_typer(groups.app, name="groups")
app.command()(produce)
app.command()(consume)
app.command()(status)
app.command()(maintenance.doctor)
app.command()(check)
app.command(context_settings=maintenance.PASS_ON, add_help_option=False)(maintenance.bench)
app.command()(maintenance.version)


def main() -> None:
    """The console script."""
    app(prog_name="sparklog")
