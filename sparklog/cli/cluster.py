"""`sparklog cluster`: describes, balances and upgrades the brokers that share a root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog.display import counted
from sparklog.options import ROOT_VARIABLE, STORAGE_PREFIX, check_bootstrap, storage_options
from sparklog.terminal.commands import Command, ExitCode
from sparklog.terminal.options import BootstrapOption, JsonOption, log_target
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.cluster import View
    from sparklog.formats.flight_messages import BrokerDescription, ClusterDescription
    from sparklog.storage.metadata.liveness import Leader

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, balance and upgrade the brokers that share a root.",
)

ClusterRootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="URI",
        help="The root of the cluster: a folder, or s3://…, gs://…, az://…. No broker is started."
        f" Default: {ROOT_VARIABLE}. Options of the object store come from"
        f" {STORAGE_PREFIX}<OPTION>.",
        show_default=False,
    ),
]

_NONE: Final = "-"
_LOST_SHOWN: Final = 20


@app.command(cls=Command)
def describe(
    topics: Annotated[
        bool, typer.Option("--topics", "-v", help="Also show the leaders of each topic.")
    ] = False,
    as_json: JsonOption = False,
    root: ClusterRootOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Show the brokers of a cluster and what they lead.

    The command starts no broker. Exits with 0 if every partition has a live leader, with 3 if one
    has none, and with 4 if no broker is alive.

    The heartbeat's age is only a guide: it depends on the clocks of two hosts. The last table
    lists the write-ahead logs that other brokers, their heirs, still need.

    Example: sparklog cluster describe --root ./data
    """
    import msgspec

    found = view(root, bootstrap).describe(topics=topics)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        _print(found)
    raise typer.Exit(_exit_code(found))


@app.command(cls=Command)
def balance(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the moves without making them.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Fail after this time."),
    ] = 120,
    root: ClusterRootOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Move partitions until the brokers of a cluster lead about equally many.

    Brokers do so on their own half a minute after the last move. Like them, the command moves
    nothing while the numbers of partitions that brokers lead differ by at most two, or by at most
    a tenth of the average. Exits with 3 if leaders do not hand over some of the partitions.

    Example: sparklog cluster balance --dry-run --root ./data
    """
    from sparklog import cluster
    from sparklog.clock import SystemClock

    target = view(root, bootstrap)
    if dry_run:
        found = cluster.plan(target)
        if found.left:
            moves = [(each.topic, each.partition, each.leader, each.target) for each in found.left]
            print_columns([("topic", "partition", "from", "to"), *moves])
            typer.echo()
    else:

        def progress(moved: int) -> None:
            typer.echo(f"sparklog: {counted(moved, 'partition')} moved", err=True)

        found = cluster.balance(target, SystemClock(), timeout_seconds=timeout, progress=progress)
    brokers = sorted({**found.before, **found.after})
    rows = [(each, found.before.get(each, 0), found.after.get(each, 0)) for each in brokers]
    print_columns([("broker", "before", "after"), *rows])
    if dry_run:
        typer.echo(f"{counted(len(found.left), 'partition')} would move")
        return
    typer.echo(f"{counted(found.moved, 'partition')} moved")
    if found.left:
        reason = "their leaders do not hand them over now; their logs say why"
        typer.echo(
            f"sparklog: {counted(len(found.left), 'partition')} should move: {reason}", err=True
        )
        raise typer.Exit(ExitCode.UNHEALTHY)


@app.command(cls=Command)
def upgrade(
    root: ClusterRootOption = None,
    bootstrap: BootstrapOption = None,
) -> None:
    """Raise the feature level of a root to the highest that all its brokers support.

    Run it once all brokers run a newer release. Only from then on are a level's additions to the
    formats written, and releases that do not support the level refuse to start. A level never
    falls. Readers of an older release stop with an error about a damaged file of `meta/`: update
    them, and leave the file as it is.

    Example: sparklog cluster upgrade --root ./data
    """
    from sparklog import cluster
    from sparklog.storage.metadata.overview import ENDED

    target = view(root, bootstrap)
    reply = cluster.upgrade(target)
    if reply.after > reply.before:
        typer.echo(f"feature level {reply.after}, previously {reply.before}")
        return
    alive = [each for each in target.describe().brokers if each.state not in ENDED]
    holding = ", ".join(str(each.broker) for each in alive if each.level <= reply.after)
    typer.echo(
        f"feature level {reply.after}: brokers {holding or 'that ended'} support no higher level"
    )


def view(root: str | None, bootstrap: str | None, *, is_quiet: bool = False) -> View:
    """Returns the cluster that the command line or the environment names.

    `is_quiet`: do not announce the wait to see whether its brokers are alive.
    """
    from sparklog.clock import SystemClock
    from sparklog.cluster import BrokerView, RootView
    from sparklog.storage.objects import open_store

    root, bootstrap = log_target(root, bootstrap)
    if bootstrap is not None:
        return BrokerView(check_bootstrap("bootstrap", bootstrap))
    assert root is not None

    def waits(leaders: Sequence[Leader], seconds: float) -> None:
        if is_quiet:
            return
        named = ", ".join(str(each.broker) for each in leaders)
        waiting = f"waiting up to {seconds:g} s to see whether these brokers are alive: {named}"
        typer.echo(f"sparklog: {waiting}", err=True)

    return RootView(open_store(root, storage_options(root)), SystemClock(), waits=waits)


def _exit_code(cluster: ClusterDescription) -> ExitCode:
    from sparklog.storage.metadata.overview import ENDED

    if all(each.state in ENDED for each in cluster.brokers):
        return ExitCode.NO_BROKER
    return ExitCode.UNHEALTHY if cluster.lost_partitions else ExitCode.OK


def _print(cluster: ClusterDescription) -> None:
    for name, words in _lines(cluster):
        typer.echo(f"{name:<14} {words}")
    if cluster.brokers:
        typer.echo()
        print_columns([_HEADING, *map(_row, cluster.brokers)])
    states = _states(cluster)
    waiting = [each for each in cluster.epochs if each.heirs]
    if waiting:
        typer.echo()
        print_columns(
            [
                ("WAL of", "epoch", "fenced", "heirs"),
                *(
                    (
                        f"broker {each.broker}",
                        each.epoch,
                        "yes" if each.fenced else "no",
                        ", ".join(_named(heir, states) for heir in each.heirs),
                    )
                    for each in waiting
                ),
            ]
        )
    if cluster.leaders is not None:
        typer.echo()
        rows = [(name, len(led), _counts(led)) for name, led in cluster.leaders.items()]
        print_columns([("topic", "partitions", "leaders"), *rows])


_HEADING: Final = (
    "broker",
    "state",
    "epoch",
    "leads",
    "kind",
    "Flight",
    "Kafka",
    "rack",
    "process",
    "version",
    "heartbeat",
)


def _row(broker: BrokerDescription) -> tuple[object, ...]:
    return (
        broker.broker,
        broker.state,
        broker.epoch,
        broker.partitions,
        broker.kind,
        broker.address or _NONE,
        broker.kafka or _NONE,
        broker.rack or _NONE,
        f"{broker.pid}@{broker.host}" if broker.pid else _NONE,
        broker.version or _NONE,
        _age(broker.heartbeat_age_seconds),
    )


def _age(seconds: float | None) -> str:
    from sparklog.storage.metadata.liveness import age

    return _NONE if seconds is None else f"{age(round(seconds * 1e6))} ago"


def _named(broker: int, states: Mapping[int, str]) -> str:
    """Returns the id of a broker, and its state unless it is up."""
    state = states.get(broker, "unknown")
    return str(broker) if state == "up" else f"{broker} ({state})"


def _states(cluster: ClusterDescription) -> dict[int, str]:
    return {each.broker: each.state for each in cluster.brokers}


def _counts(leaders: Sequence[int]) -> str:
    counts = sorted(Counter(leaders).items())
    return ", ".join(f"{count} by broker {broker}" for broker, count in counts)


def _lines(cluster: ClusterDescription) -> Iterator[tuple[str, str]]:
    yield "root", cluster.root
    yield "cluster", cluster.cluster_id
    named = f"broker {_named(cluster.controller, _states(cluster))}"
    yield "controller", named if cluster.controller >= 0 else "no broker yet"
    yield "feature level", str(cluster.level)
    yield "topics", f"{cluster.topics}, of {cluster.partitions} partitions"
    shown = cluster.lost[:_LOST_SHOWN]
    for each in shown:
        yield "no leader", f"{each.topic}-{each.partition}: broker {each.leader} does not serve it"
    if cluster.lost_partitions > len(shown):
        yield "no leader", f"and {cluster.lost_partitions - len(shown)} more partitions"
