"""`sparklog broker`: runs a broker, drains one of a cluster, or changes a broker's log level."""

from __future__ import annotations

import enum
import gc
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparklog.cli.cluster import ClusterRootOption, view
from sparklog.display import counted
from sparklog.options import ROOT_VARIABLE
from sparklog.terminal.commands import Command, CommandGroup
from sparklog.terminal.options import BootstrapOption

if TYPE_CHECKING:
    from msgspec import Struct

    from sparklog.security.credentials import Credentials

BROKER_PROCESSES = 64  # of `sparklog broker --processes`

app = typer.Typer(
    cls=CommandGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
)

NewRootOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="The root of the log: a folder, or s3://…, gs://…, az://…. It is created if it"
        f" does not exist. Default: {ROOT_VARIABLE}.",
        show_default=False,
    ),
]

IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="N",
        help="The id of the broker in the cluster; auto: the ordinal at the end of the host"
        " name, times the number of --processes. Default: SPARKLOG_ID, or 0.",
        show_default=False,
    ),
]

FlightOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The address of the Flight listener; SSL://HOST:PORT for TLS, SASL_SSL://HOST:PORT for"
        " TLS and logins; port 0 takes a free one."
        " Default: SPARKLOG_FLIGHT_LISTEN, or 127.0.0.1:8815.",
        show_default=False,
    ),
]

KafkaOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The address of the Kafka listener; SSL://HOST:PORT for TLS, SASL_SSL://HOST:PORT for"
        " TLS and logins; '' disables it. Default: SPARKLOG_KAFKA_LISTEN, or 127.0.0.1:9092.",
        show_default=False,
    ),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file like conf/broker.toml; options and the environment override it.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=BROKER_PROCESSES,
        help="Run N brokers, to use the cores of this machine. Ids and ports count up from those"
        " of the first; bounds on memory and connections apply to all of them together. One that"
        " dies is restarted. Default: this process is the only broker.",
        show_default=False,
    ),
]

TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Replace the live broker with this id; it stops. Brokers embedded in programs are"
        " replaced without this option.",
    ),
]

AllowNonEmptyOption = Annotated[
    bool,
    typer.Option(
        "--allow-non-empty",
        help="Create the root in a folder that holds other files. Needed only once.",
    ),
]

SupervisedOption = Annotated[bool, typer.Option("--supervised", hidden=True)]

BrokerIdOption = Annotated[
    int, typer.Option("--id", metavar="N", help="The id of the broker.", show_default=False)
]


@app.callback()
def broker(
    context: typer.Context,
    root: NewRootOption = None,
    number: IdOption = None,
    flight: FlightOption = None,
    kafka: KafkaOption = None,
    config: ConfigOption = None,
    processes: ProcessesOption = None,
    take_over: TakeOverOption = False,
    allow_non_empty: AllowNonEmptyOption = False,
    supervised: SupervisedOption = False,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C, which shut it down cleanly.

    Brokers with different --id share a root, and take over from each other. A broker refuses to
    start while another one with its id is alive, unless --take-over is given, and in a folder that
    is neither empty nor a root, unless --allow-non-empty is given.

    With --processes 3, brokers 0, 1 and 2 listen for Kafka clients on ports 9092, 9093 and 9094,
    and for Flight clients on 8815, 8816 and 8817.

    Example: sparklog broker --root ./data --kafka 127.0.0.1:9092 --processes 3
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    # The first process of a container ignores SIGTERM until there is a handler, and the packages
    # of a broker take a while to load.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
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
    settings = load_settings(config, os.environ, given, brokers=processes or 1)
    if processes is not None:
        from sparklog.broker.supervisor import supervise

        raise typer.Exit(
            supervise(settings, processes, take_over=take_over, allow_non_empty=allow_non_empty)
        )
    _prepare_start()
    from sparklog.broker.running import run_broker

    run_broker(settings, take_over=take_over, allow_non_empty=allow_non_empty, ask=_ask)


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
        ask=_ask,
    )


def _ask(
    address: str,
    action: str,
    request: Struct,
    *,
    timeout_seconds: float,
    credentials: Credentials | None = None,
) -> object:
    """Sends a request to another broker. Only a broker with peers needs the gRPC client."""
    from sparklog.client.connection import ask

    return ask(
        address,
        action,
        request,
        timeout_seconds=timeout_seconds,
        is_probed=False,
        credentials=credentials,
    )


def _prepare_start() -> None:
    # Until the broker serves, nearly all new objects belong to modules: garbage collection would
    # make the start a tenth longer. `run_broker` enables it again.
    gc.disable()


def _refuse_options(context: typer.Context) -> None:
    """Raises a usage error for broker options that precede the name of another command."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if names:
        raise typer.BadParameter(
            f"pass options after {context.invoked_subcommand!r}: those before it run a broker"
        )


@app.command(cls=Command)
def drain(
    number: BrokerIdOption,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Also stop a broker whose partitions no other broker takes. They are not served"
            " until the next broker starts.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Fail after this time; the drain continues."),
    ] = 120,
    root: ClusterRootOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Stop a broker of a cluster, once the others lead its partitions.

    The broker stops as on SIGTERM: it hands over its partitions, publishes its records to their
    tables, and exits. The command returns once it has stopped and leads nothing.

    Example: sparklog broker drain --id 2 --root ./data
    """
    from sparklog import cluster
    from sparklog.clock import SystemClock

    last = -1

    def progress(count: int) -> None:
        nonlocal last
        if count != last:
            typer.echo(f"sparklog: broker {number} leads {counted(count, 'partition')}", err=True)
            last = count

    drained = cluster.drain(
        view(root, bootstrap),
        SystemClock(),
        number,
        alone=alone,
        timeout_seconds=timeout,
        progress=progress,
    )
    if drained.had_stopped:
        typer.echo(f"broker {number} had already stopped")
    else:
        typer.echo(f"broker {number} has stopped; {_moved(drained.moved)}")
    if drained.epoch >= 0:
        again = f"broker {number} was started again (epoch {drained.epoch})"
        typer.echo(f"sparklog: {again}, by a supervisor: stop it there", err=True)
    if drained.left:
        left = counted(drained.left, "partition is", "partitions are")
        typer.echo(f"{left} not served until the next broker starts")


class Level(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.command(name="log-level", cls=Command)
def log_level(
    number: BrokerIdOption,
    level: Annotated[
        Level | None,
        typer.Argument(
            metavar="[LEVEL]",
            help="debug, info, warning or error. Without it, the current level is shown.",
            show_default=False,
        ),
    ] = None,
    root: ClusterRootOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Show or change the log level of a running broker, until it restarts.

    At debug the broker logs each request of a Kafka client. Kafka's tools can do the same:
    kafka-configs.sh --entity-type broker-loggers. The broker logs the change.

    Example: sparklog broker log-level debug --id 2 --root ./data
    """
    from sparklog import cluster

    found = cluster.log_level(view(root, bootstrap), number, level.value if level else "")
    typer.echo(f"broker {number}: {found or 'as configured by its program'}")


def _moved(moved: Mapping[int, int]) -> str:
    parts = [f"{count} to broker {broker}" for broker, count in sorted(moved.items())]
    words = f"{counted(sum(moved.values()), 'partition')} moved"
    return f"{words}: {', '.join(parts)}" if parts else words
