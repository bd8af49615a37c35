"""`sparklog topics`: creates, lists, describes, changes, trims and deletes topics."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.cli.dead_letters import dead_letters
from sparklog.display import counted
from sparklog.formats import topic_config
from sparklog.formats.topic_config import AVRO, JSON, VALUE_FORMAT, VALUE_SCHEMA, described
from sparklog.formats.topic_names import unknown_topic
from sparklog.terminal.commands import Command
from sparklog.terminal.options import (
    CANNOT_ASK,
    BootstrapOption,
    JsonOption,
    OnlyPartitionsOption,
    RootOption,
    TopicArgument,
    WaitOption,
    YesOption,
    config_pairs,
    confirm,
    log_target,
    open_log,
    root_metadata,
)
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.client.log import Log
    from sparklog.formats import flight_messages
    from sparklog.formats.values.proposal import Proposal

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create, list, describe, change, compact, trim and delete topics.",
)

_KEYS: Final = "\n\n".join(["Keys of a topic's configuration:", *described()])


@app.command(cls=Command, epilog=_KEYS)
def create(
    topic: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="The number of partitions. Default: the broker's topics.default_partitions.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A key of the topic's configuration; repeat it for more."
        ),
    ] = None,
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Succeed if the topic already exists.")
    ] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Create a topic, and its root if it does not exist.

    Example: sparklog topics create flights --partitions 4 --root ./data
    """
    pairs = config_pairs(config or ())
    with open_log(root, bootstrap, wait, create=True) as log:
        info = log.create_topic(topic, partitions, pairs, if_absent=if_absent)
    typer.echo(f"{info.topic}: {_partitions(info)}")
    for difference in _differences(info, partitions, pairs):
        typer.echo(f"sparklog: warning: topic {topic!r} already exists, {difference}", err=True)


def _differences(
    info: flight_messages.TopicInfo, partitions: int | None, config: Mapping[str, str]
) -> Iterator[str]:
    """Describes how an existing topic differs from the requested one."""
    count = len(info.partitions)
    if partitions is not None and count < partitions:
        add = f"sparklog topics add-partitions {info.topic} {partitions}"
        yield f"with {count} partitions, not {partitions}; to add some: {add}"
    elif partitions is not None and count > partitions:
        yield f"with {count} partitions, not {partitions}; partitions cannot be removed"
    for key, value in config.items():
        found = info.config.get(key)
        if found != value:
            set_it = f"sparklog topics alter {info.topic} --set {key}={value}"
            state = "without" if found is None else f"with {key}={found}, not"
            yield f"{state} {key}={value}; to set it: {set_it}"


@app.command("list", cls=Command)
def list_topics(
    internal: Annotated[
        bool, typer.Option("--internal", help="Include topics that brokers use internally.")
    ] = False,
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """List the names of all topics, one per line.

    With --root, the command reads the metadata of the root and needs no broker.

    Example: sparklog topics list --root ./data
    """
    from sparklog.formats.topic_names import INTERNAL_TOPICS

    root, bootstrap = log_target(root, bootstrap, wait)
    if root is not None:
        names = sorted(root_metadata(root).reload().topics)
    else:
        with open_log(root, bootstrap, wait) as log:
            names = log.topics(internal=True)
    if not internal:
        names = [name for name in names if name not in INTERNAL_TOPICS]
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(names))
    else:
        for name in names:
            typer.echo(name)


@app.command(cls=Command)
def describe(
    topic: TopicArgument,
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Show a topic's partitions and offsets, its configuration and its Delta table.

    Example: sparklog topics describe flights --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.describe(topic)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(msgspec.to_builtins(info)))
    else:
        _print_topic(info)


@app.command(cls=Command)
def ddl(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC", help="The names of topics.", show_default=False),
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all", help="Print SQL for all topics.")] = False,
    catalog: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The catalog of the table; requires --schema.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The schema of the table. Default: the session's.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TOPIC=]NAME",
            help="The name of a topic's table, without TOPIC for a single topic; repeat it for"
            " more. Default: the topic's name, in which underscores replace all but letters, digits"
            " and underscores.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        bool,
        typer.Option(
            "--view",
            help="Also create a view NAME_text with key and value as strings; for a topic with"
            " typed columns, with these instead of the value.",
        ),
    ] = False,
    spark_root: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The root in Spark's notation, if it differs: s3a://bucket/log,"
            " abfss://container@account.dfs.core.windows.net/log.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Print SQL that registers topics' tables in a catalog of Spark or Databricks.

    No data is copied, and DROP TABLE leaves the topic untouched. No two topics share the name of a
    table or view, ignoring case: topics that would share one need a --name.

    Example: sparklog topics ddl orders --schema events --root s3://bucket/log
    """
    from sparklog.cli.catalog import location, statements, table_names

    chosen = list(dict.fromkeys(topics or ()))
    if bool(chosen) == all_topics:
        raise typer.BadParameter("no topic is named: name some, or pass --all")
    if catalog and not schema:
        raise typer.BadParameter("--catalog requires --schema")
    given = _table_names(name or (), chosen)
    with open_log(root, bootstrap, wait) as log:
        infos = [log.describe(topic) for topic in (log.topics() if all_topics else chosen)]
        every = log.topics(internal=True)
    for unknown in given.keys() - {*every}:
        raise unknown_topic(unknown, every)
    names = table_names([info.topic for info in infos], every, given)
    where = [part for part in (catalog, schema) if part]
    for info in infos:
        at = location(info.table_uri, root=spark_root)
        table = (*where, names[info.topic])
        typed = [each.name for each in info.columns if each.is_filled]
        typer.echo("\n".join(statements(info.topic, at, table, with_view=view, typed=typed)))


def _table_names(given: Iterable[str], chosen: Sequence[str]) -> dict[str, str]:
    """Parses `[TOPIC=]NAME` strings. A missing TOPIC is a usage error with several topics."""
    names = {}
    for text in given:
        topic, equals, name = text.partition("=")
        if not equals:
            if len(chosen) != 1:
                raise typer.BadParameter("--name NAME allows a single topic only: use TOPIC=NAME")
            topic, name = chosen[0], text
        if not topic or not name:
            raise typer.BadParameter(f"expected [TOPIC=]NAME, not {text!r}")
        names[topic] = name
    return names


@app.command(cls=Command, epilog=_KEYS)
def alter(
    topic: TopicArgument,
    config: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key; repeat it for more."),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Restore the default of a key; repeat it for more."),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Change a topic's configuration.

    Example: sparklog topics alter orders --set retention.ms=3600000 --root ./data
    """
    changes: dict[str, str | None] = {**config_pairs(config or ())}
    twice = changes.keys() & set(unset or ())
    if twice:
        raise typer.BadParameter(f"{', '.join(sorted(twice))} cannot be set and unset")
    changes |= dict.fromkeys(unset or ())
    if not changes:
        raise typer.BadParameter("nothing to change: pass --set or --unset")
    with open_log(root, bootstrap, wait) as log:
        info = log.alter(topic, changes)
    typer.echo(f"{info.topic}: {_config(info)}")


@app.command("add-partitions", cls=Command)
def add_partitions(
    topic: TopicArgument,
    partitions: Annotated[
        int, typer.Argument(metavar="TOTAL", min=1, help="The new total number of partitions.")
    ],
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Add partitions to a topic.

    Existing records stay in their partitions; new records of a key may go to a different one.

    Example: sparklog topics add-partitions flights 8 --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.add_partitions(topic, partitions)
    typer.echo(f"{info.topic}: {_partitions(info)}")


@app.command(cls=Command)
def compact(
    topic: TopicArgument,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Merge the small files of a topic's table now, which brokers also do on their own.

    If cleanup.policy is compact, this also removes records that a later record with the same key
    supersedes.

    Example: sparklog topics compact flights --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.compact(topic)
    typer.echo(f"{info.topic}: {counted(info.table_files, 'file')}")


@app.command(cls=Command)
def columns(
    topic: TopicArgument,
    records: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Look for new fields in about N of the newest records."
        ),
    ] = 1_000,
    accept: Annotated[
        bool, typer.Option("--accept", help="Add a column for each new field.")
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Stop filling a column; repeat it for more. Existing values stay.",
            show_default=False,
        ),
    ] = None,
    backfill: Annotated[
        bool,
        typer.Option(
            "--backfill",
            help="Then rewrite the table's files so that old records have the columns.",
        ),
    ] = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Show the typed columns of a topic's table, and fields of its values without one.

    On a topic without typed columns, --accept adds them.

    Example: sparklog topics columns orders --accept --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.describe(topic)
        proposal = log.propose_columns(topic, records)
        changed = _changed_columns(info, proposal, set(drop or ()), accepts=accept)
        if changed is not None:
            info = log.alter(topic, changed)
        if backfill:
            info = log.compact(topic)
        if info.columns:
            _print_columns(info)
        if not accept:
            _print_proposal(info, proposal)


app.command("dead-letters", cls=Command)(dead_letters)


def _changed_columns(
    info: flight_messages.TopicInfo, proposal: Proposal, drops: set[str], *, accepts: bool
) -> dict[str, str | None] | None:
    """Returns the change to the topic's configuration; None if there is nothing to change.

    Raises `typer.BadParameter` for a column that does not exist.
    """
    from sparklog.formats.values.ddl import of_fields

    filled = {each.name: each for each in info.columns if each.is_filled}
    if unknown := sorted(drops - filled.keys()):
        raise typer.BadParameter(
            f"{unknown[0]} is not a filled column of {info.topic}"
            f" ({', '.join(filled) or 'it has none'})",
            param_hint="--drop",
        )
    kept = [each for each in proposal.known if each.name not in {filled[d].field for d in drops}]
    added = [each.field for each in proposal.columns] if accepts else []
    if not drops and not added:
        return None
    if not kept and not added:
        return {VALUE_FORMAT: None, VALUE_SCHEMA: None}
    form = AVRO if topic_config.is_avro(info.config) else JSON
    return {VALUE_FORMAT: form, VALUE_SCHEMA: of_fields([*kept, *added])}


def _print_proposal(info: flight_messages.TopicInfo, proposal: Proposal) -> None:
    if info.columns and (proposal.columns or proposal.left_out):
        typer.echo()
    if not proposal.objects:
        is_avro = topic_config.is_avro(info.config)
        wanted = "has a known schema" if is_avro else "is a JSON object"
        typer.echo(f"None of the {counted(proposal.records, 'newest record')} {wanted}.")
        return
    if proposal.columns:
        typer.echo(f"Fields without a column in the newest {counted(proposal.records, 'record')}:")
        heading = ("field", "type", "records", "example")
        rows = [(c.field.name, c.type, c.records, c.example) for c in proposal.columns]
        print_columns([heading, *rows])
        typer.echo(f"To add them: sparklog topics columns {info.topic} --accept")
    for each in proposal.left_out:
        typer.echo(f"Not possible as a column: {each}")


@app.command(cls=Command)
def trim(
    topic: TopicArgument,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET",
            help="Delete records below this offset; latest deletes all existing records.",
            show_default=False,
        ),
    ] = None,
    before_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Delete records before the first one that is not older than this time, in ISO"
            " 8601 (UTC by default).",
            show_default=False,
        ),
    ] = None,
    partition: OnlyPartitionsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the new start offsets.")
    ] = False,
    yes: YesOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Delete a topic's oldest records permanently, after confirmation.

    Each partition's log then starts later for all readers. Offsets do not change.

    Example: sparklog topics trim flights --before-time 2013-06-01 --root ./data
    """
    if (before is None) == (before_time is None):
        raise typer.BadParameter("pass --before or --before-time")
    point = _offset(before) if before is not None else _time(before_time or "")
    if not yes and not dry_run and not sys.stdin.isatty():
        raise typer.BadParameter(CANNOT_ASK)
    with open_log(root, bootstrap, wait) as log:
        info = log.describe(topic)
        if isinstance(point, int) and not partition and len(info.partitions) > 1:
            raise typer.BadParameter(f"{topic!r} has {_partitions(info)}: pass --partition")
        starts = _starts(log, info, point, sorted(set(partition or range(len(info.partitions)))))
        _print_starts(info, starts)
        count = sum(start - info.partitions[number].start for number, start in starts.items())
        if dry_run or not count:
            return
        if not yes:
            typer.confirm(f"Delete {counted(count, 'offset')} of {topic} permanently?", abort=True)
        log.delete_records(topic, starts)
    typer.echo(f"{topic}: {counted(count, 'offset')} deleted")


def _offset(text: str) -> int | str:
    if text == "latest" or text.isdecimal():
        return text if text == "latest" else int(text)
    raise typer.BadParameter(f"--before {text!r} is invalid: use an offset, or latest")


def _time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"--before-time {text!r} is invalid: use a time in ISO 8601"
        ) from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _starts(
    log: Log, info: flight_messages.TopicInfo, point: int | str | datetime, partitions: list[int]
) -> dict[int, int]:
    """Returns the new start offset of each partition, which is never below the current one.

    Raises `UnknownPartition`, and `OffsetOutOfRange` for an offset beyond the end.
    """
    from sparklog.client.offsets import offsets_of

    found = offsets_of(log.connection, info, dict.fromkeys(partitions, point))
    for number, offset in found.items():
        known = info.partitions[number]
        if offset > known.end:
            raise errors.OffsetOutOfRange(
                topic=info.topic, partition=number, offset=offset, start=known.start, end=known.end
            )
    return {number: max(offset, info.partitions[number].start) for number, offset in found.items()}


@app.command(cls=Command)
def delete(
    topic: TopicArgument,
    yes: YesOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Delete a topic with all its records, after confirmation.

    Example: sparklog topics delete flights --yes --root ./data
    """
    if not yes:
        confirm(f"Delete {topic} and all its records?")
    with open_log(root, bootstrap, wait) as log:
        log.delete_topic(topic)
    typer.echo(f"{topic}: deleted")


# ------------------------------------------------------------------------------ output


def _print_topic(info: flight_messages.TopicInfo) -> None:
    typer.echo(f"topic   {info.topic}")
    typer.echo(f"id      {info.topic_id}")
    typer.echo(f"config  {_config(info)}")
    if info.table_uri:
        typer.echo(
            f"table   {info.table_uri} (version {info.table_version},"
            f" {counted(info.table_files, 'file')}, {info.table_bytes} bytes)"
        )
    if info.publish_interval_seconds >= 0:
        typer.echo(f"publish every {info.publish_interval_seconds:g} s")
    heading = ("partition", "leader", "start", "end", "published")
    rows = [(p.partition, p.leader, p.start, p.end, p.published) for p in info.partitions]
    print_columns([heading, *rows])
    if info.columns:
        typer.echo()
        _print_columns(info)


def _print_columns(info: flight_messages.TopicInfo) -> None:
    heading = ("column", "type", "field", "new records")
    states = {True: "filled", False: "null"}
    print_columns(
        [heading, *((c.name, c.type, c.field, states[c.is_filled]) for c in info.columns)]
    )
    if info.misfits:
        typer.echo(
            f"{counted(info.misfits, 'record')} in the table do not fit: those fields are null,"
            " and _error says why"
        )
    if info.waiting_rows:
        typer.echo(
            f"{counted(info.waiting_rows, 'record')} of these wait for a schema of the registry:"
            " `sparklog status` shows whether it answers"
        )
    if info.unfilled_rows:
        typer.echo(
            f"{counted(info.unfilled_rows, 'record')} in the table were written before a column was"
            " added, and have null there until their files are rewritten"
        )


def _print_starts(info: flight_messages.TopicInfo, starts: Mapping[int, int]) -> None:
    heading = ("partition", "start", "new start", "end")
    known = info.partitions
    rows = [(number, known[number].start, to, known[number].end) for number, to in starts.items()]
    print_columns([heading, *rows])


def _partitions(info: flight_messages.TopicInfo) -> str:
    return counted(len(info.partitions), "partition")


def _config(info: flight_messages.TopicInfo) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(info.config.items())) or "defaults"
