"""`sparklog topics`: make, look at, change, trim and delete topics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.broker.topicconfig import described
from sparklog.cli.shared import (
    BootstrapOption,
    RootOption,
    TopicArgument,
    WaitOption,
    config_pairs,
    open_log,
    print_columns,
)

if TYPE_CHECKING:
    from sparklog import wire
    from sparklog.client import Log

app = typer.Typer(
    no_args_is_help=True, help="Create, list, describe, change, compact, trim and delete topics."
)

_KEYS: Final = "\n\n".join(["Keys of a topic's config:", *described()])

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: one line of JSON.")]


@app.command(epilog=_KEYS)
def create(
    topic: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(min=1, help="How many; without it the broker's default.", show_default=False),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the topic; may be given several times."),
    ] = None,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="No error if the topic exists already.")
    ] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Make a topic, and its root too if there is none yet.

    Example: sparklog topics create flights --partitions 4 --root ./data
    """
    pairs = config_pairs(config or ())
    with open_log(root, bootstrap, wait, create=True) as log:
        info = log.create_topic(topic, partitions, pairs, if_absent=if_absent)
    typer.echo(f"{info.topic}: {_partitions(info)}")
    for difference in _differences(info, partitions, pairs):
        typer.echo(f"sparklog: warning: {topic} exists already, {difference}", err=True)


def _differences(
    info: wire.TopicInfo, partitions: int | None, config: Mapping[str, str]
) -> Iterator[str]:
    """How a topic that was there already is not what was asked for."""
    count = len(info.partitions)
    if partitions is not None and count < partitions:
        add = f"sparklog topics add-partitions {info.topic} {partitions}"
        yield f"with {count} partitions, not {partitions}; more are added by: {add}"
    elif partitions is not None and count > partitions:
        yield f"with {count} partitions, not {partitions}; there is no way to fewer"
    for key, value in config.items():
        found = info.config.get(key)
        if found != value:
            set_it = f"sparklog topics alter {info.topic} --set {key}={value}"
            what = "without" if found is None else f"with {key}={found}, not"
            yield f"{what} {key}={value}; it is set by: {set_it}"


@app.command("list")
def list_topics(
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Name all topics, one a line.

    Example: sparklog topics list --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        names = log.topics()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(names))
    else:
        for name in names:
            typer.echo(name)


@app.command()
def describe(
    topic: TopicArgument,
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Show a topic's partitions with their offsets, its config and its Delta table.

    Example: sparklog topics describe flights --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.describe(topic)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(msgspec.to_builtins(info)))
    else:
        _print_topic(info)


@app.command()
def ddl(
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC", show_default=False)] = None,
    all_topics: Annotated[bool, typer.Option("--all", help="All topics that there are.")] = False,
    catalog: Annotated[
        str | None, typer.Option(help="Of the table; needs --schema.", show_default=False)
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(help="Of the table; without it the session's own.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Of the table, for one topic; without it the topic's, where all but letters,"
            " digits and underscores are underscores.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        bool,
        typer.Option("--view", help="Also a view NAME_text, with key and value as text."),
    ] = False,
    spark_root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The root as Spark names it, if that is another name: s3a://bucket/log,"
            " abfss://container@account.dfs.core.windows.net/log.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Print SQL that makes topics' tables known to a catalog of Spark or Databricks.

    Nothing is copied: a table stays where it is, and DROP TABLE leaves the topic untouched.

    Example: sparklog topics ddl orders --catalog main --schema events --root s3://bucket/log
    """
    from sparklog.cli.catalog import location, statements, table_names

    chosen = list(dict.fromkeys(topics or ()))
    if bool(chosen) == all_topics:
        raise typer.BadParameter("name topics, or give --all")
    if catalog and not schema:
        raise typer.BadParameter("--catalog needs --schema")
    if name and len(chosen) != 1:
        raise typer.BadParameter("--name is for one topic")
    with open_log(root, bootstrap, wait) as log:
        infos = [log.describe(topic) for topic in (log.topics() if all_topics else chosen)]
    names = {chosen[0]: name} if name else table_names([info.topic for info in infos])
    where = [part for part in (catalog, schema) if part]
    for info in infos:
        at = location(info.table_uri, root=spark_root)
        table = (*where, names[info.topic])
        typer.echo("\n".join(statements(info.topic, at, table, with_view=view)))


@app.command(epilog=_KEYS)
def alter(
    topic: TopicArgument,
    config: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A new value; may be given several times."),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Back to the default; may be given several times."),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Change a topic's config.

    Example: sparklog topics alter flights --set message.timestamp.type=LogAppendTime --root ./data
    """
    changes: dict[str, str | None] = {**config_pairs(config or ())}
    twice = changes.keys() & set(unset or ())
    if twice:
        raise typer.BadParameter(f"{', '.join(sorted(twice))} cannot be set and unset")
    changes |= dict.fromkeys(unset or ())
    if not changes:
        raise typer.BadParameter("nothing to change: give --set or --unset")
    with open_log(root, bootstrap, wait) as log:
        info = log.alter(topic, changes)
    typer.echo(f"{info.topic}: {_config(info)}")


@app.command("add-partitions")
def add_partitions(
    topic: TopicArgument,
    partitions: Annotated[
        int, typer.Argument(metavar="TOTAL", min=1, help="How many there are to be then.")
    ],
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Give a topic more partitions. Records stay where they are; keys may go elsewhere from now on.

    Example: sparklog topics add-partitions flights 8 --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.add_partitions(topic, partitions)
    typer.echo(f"{info.topic}: {_partitions(info)}")


@app.command()
def compact(
    topic: TopicArgument,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Merge the small files of a topic's table now; a broker does so in time by itself.

    Where cleanup.policy is compact, records that a later one of their key supersedes go as well.

    Example: sparklog topics compact flights --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.compact(topic)
    typer.echo(f"{info.topic}: {info.table_files} file{'' if info.table_files == 1 else 's'}")


@app.command()
def trim(
    topic: TopicArgument,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET",
            help="The first that stays; or latest, to delete all that there are now.",
            show_default=False,
        ),
    ] = None,
    before_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="In ISO 8601, UTC without a zone: the first record that is not older stays, and"
            " all after it.",
            show_default=False,
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only this one; may be given several times.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show where the log would start.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Delete a topic's oldest records, for good; shows what would go, and asks first.

    The log starts later then, for every reader; offsets stay as they are.

    Example: sparklog topics trim flights --before-time 2013-06-01 --dry-run --root ./data
    """
    if (before is None) == (before_time is None):
        raise typer.BadParameter("give --before or --before-time")
    point = _offset(before) if before is not None else _time(before_time or "")
    if not yes and not dry_run and not sys.stdin.isatty():
        raise typer.BadParameter("there is nobody to ask: give --yes")
    with open_log(root, bootstrap, wait) as log:
        info = log.describe(topic)
        if isinstance(point, int) and not partition and len(info.partitions) > 1:
            raise typer.BadParameter(f"{topic} has {_partitions(info)}: give --partition")
        starts = _starts(log, info, point, sorted(set(partition or range(len(info.partitions)))))
        _print_starts(info, starts)
        count = sum(start - info.partitions[number].start for number, start in starts.items())
        if dry_run or not count:
            return
        if not yes:
            typer.confirm(f"Delete {_offsets(count)} of {topic}, for good?", abort=True)
        log.delete_records(topic, starts)
    typer.echo(f"{topic}: {_offsets(count)} deleted")


def _offset(text: str) -> int | str:
    if text == "latest" or text.isdecimal():
        return text if text == "latest" else int(text)
    raise typer.BadParameter(f"--before: {text!r} is not an offset, nor latest")


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"--before-time: {text!r} is not a time in ISO 8601") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _starts(
    log: Log, info: wire.TopicInfo, point: int | str | datetime, partitions: list[int]
) -> dict[int, int]:
    """Where the partitions that were named are to start; none starts earlier than it does.

    Raises `UnknownPartition`, and `OffsetOutOfRange` for an offset beyond the end.
    """
    from sparklog.client.reading import offsets_of

    found = offsets_of(log.connection, info, dict.fromkeys(partitions, point))
    for number, offset in found.items():
        known = info.partitions[number]
        if offset > known.end:
            raise errors.OffsetOutOfRange(
                topic=info.topic, partition=number, offset=offset, start=known.start, end=known.end
            )
    return {number: max(offset, info.partitions[number].start) for number, offset in found.items()}


@app.command()
def delete(
    topic: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Delete a topic with all its records; asks first.

    Example: sparklog topics delete flights --yes --root ./data
    """
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("there is nobody to ask: give --yes")
        typer.confirm(f"Delete {topic} and all its records?", abort=True)
    with open_log(root, bootstrap, wait) as log:
        log.delete_topic(topic)
    typer.echo(f"{topic}: deleted")


# ------------------------------------------------------------------------------ words


def _print_topic(info: wire.TopicInfo) -> None:
    typer.echo(f"topic   {info.topic}")
    typer.echo(f"id      {info.topic_id}")
    typer.echo(f"config  {_config(info)}")
    if info.table_uri:
        typer.echo(
            f"table   {info.table_uri} (version {info.table_version},"
            f" {info.table_files} files, {info.table_bytes} bytes)"
        )
    heading = ("partition", "leader", "start", "end", "published")
    rows = [(p.partition, p.leader, p.start, p.end, p.published) for p in info.partitions]
    print_columns([heading, *rows])


def _print_starts(info: wire.TopicInfo, starts: Mapping[int, int]) -> None:
    heading = ("partition", "start", "new start", "end")
    known = info.partitions
    rows = [(number, known[number].start, to, known[number].end) for number, to in starts.items()]
    print_columns([heading, *rows])


def _offsets(count: int) -> str:
    return f"{count:,} offset{'' if count == 1 else 's'}"


def _partitions(info: wire.TopicInfo) -> str:
    count = len(info.partitions)
    return f"{count} partition{'' if count == 1 else 's'}"


def _config(info: wire.TopicInfo) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(info.config.items())) or "defaults"
