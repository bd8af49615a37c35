"""`sparklog groups`: lists, describes, resets and deletes consumer groups."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from sparklog import errors
from sparklog.display import counted
from sparklog.terminal.commands import Command
from sparklog.terminal.options import (
    BootstrapOption,
    JsonOption,
    RootOption,
    WaitOption,
    YesOption,
    confirm,
    open_log,
)
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.client.lag import GroupLag, PartitionLag
    from sparklog.client.log import Log
    from sparklog.client.offsets import Point
    from sparklog.formats import flight_messages, group_messages

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, describe, reset and delete consumer groups.",
)

GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", help="The name of the group.", show_default=False)
]

_TopicPartition: TypeAlias = tuple[str, int]
_Topics: TypeAlias = "dict[str, flight_messages.TopicInfo]"
_NONE: Final = "-"


@app.command("list", cls=Command)
def list_groups(
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """List all groups with their members, topics and total lag.

    Example: sparklog groups list --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        topics: _Topics = {}
        rows = [_summary(log, each.group, topics) for each in log.groups()]
    if as_json:
        _print_json(rows)
        return
    heading = ("group", "state", "members", "protocol", "topics", "lag")
    print_columns(
        [
            heading,
            *(
                (
                    row["group"],
                    row["state"],
                    row["members"],
                    row["protocol"] or _NONE,
                    ",".join(row["topics"]) or _NONE,
                    row["lag"],
                )
                for row in rows
            ),
        ]
    )


@app.command(cls=Command)
def describe(
    group: GroupArgument,
    members: Annotated[
        bool, typer.Option("--members", help="Show the members and their partitions.")
    ] = False,
    as_json: JsonOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Show a group's committed offset, lag and member for each partition.

    The lag is a difference of offsets. The column "behind" is the age of the first unread record.

    Example: sparklog groups describe billing --root ./data
    """
    with open_log(root, bootstrap, wait) as log:
        info = log.describe_group(group)
        parts = [] if members and not as_json else _parts(log, info)
    if as_json:
        _print_json(
            {
                "group": info.group,
                "state": info.state,
                "protocol": info.protocol,
                "generation": info.generation,
                "members": [_member(each) for each in info.members],
                "partitions": [asdict(part) for part in parts],
            }
        )
    elif members:
        _print_members(info)
    else:
        _print_parts(info, parts)


TopicOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOPIC[:P,P…]",
        help="Reset this topic, or some of its partitions; repeat it for more topics.",
        show_default=False,
    ),
]

AllTopicsOption = Annotated[
    bool, typer.Option("--all-topics", help="Reset every partition with a committed offset.")
]

ToEarliestOption = Annotated[
    bool, typer.Option("--to-earliest", help="To the log start: read all records again.")
]

ToLatestOption = Annotated[
    bool, typer.Option("--to-latest", help="To the end: skip all existing records.")
]

ToCurrentOption = Annotated[
    bool,
    typer.Option(
        "--to-current",
        help="To the committed offset, or to the end if there is none. For --export.",
    ),
]

ToOffsetOption = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="To this offset.", show_default=False)
]

ToTimeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="To the first record that is not older than this time: ISO 8601 (UTC by"
        " default), or milliseconds since 1970.",
        show_default=False,
    ),
]

ShiftByOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Forward from the committed offset by this number, or back if negative.",
        show_default=False,
    ),
]

FromFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV",
        help="To the offsets in a file of topic,partition,offset lines, as --export prints them.",
        show_default=False,
    ),
]

ExecuteOption = Annotated[
    bool, typer.Option("--execute", help="Commit the offsets; by default they are only shown.")
]

ExportOption = Annotated[
    bool, typer.Option("--export", help="Print lines of topic,partition,offset for --from-file.")
]


@app.command(cls=Command)
def reset(
    group: GroupArgument,
    topic: TopicOption = None,
    all_topics: AllTopicsOption = False,
    to_earliest: ToEarliestOption = False,
    to_latest: ToLatestOption = False,
    to_current: ToCurrentOption = False,
    to_offset: ToOffsetOption = None,
    to_time: ToTimeOption = None,
    shift_by: ShiftByOption = None,
    from_file: FromFileOption = None,
    execute: ExecuteOption = False,
    export: ExportOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Set the committed offsets of a group without members; --execute commits them.

    An offset outside the log becomes the log start or the end. A group that does not exist is
    created.

    Example: sparklog groups reset audit --topic orders --to-latest --root ./data
    """
    targets: dict[str, _Target | None] = {
        "--to-earliest": _point("earliest") if to_earliest else None,
        "--to-latest": _point("latest") if to_latest else None,
        "--to-current": _current if to_current else None,
        "--to-offset": None if to_offset is None else _point(to_offset),
        "--to-time": None if to_time is None else _to_time(to_time),
        "--shift-by": None if shift_by is None else _shifted(shift_by),
        "--from-file": None if from_file is None else _from_file(from_file),
    }
    chosen = [target for target in targets.values() if target is not None]
    if len(chosen) != 1:
        raise typer.BadParameter(f"pass exactly one of {', '.join(targets)}")
    if from_file is not None and (topic or all_topics):
        raise typer.BadParameter(
            "--from-file already names the partitions: omit --topic and --all-topics"
        )
    if from_file is None and bool(topic) == all_topics:
        raise typer.BadParameter("pass --topic or --all-topics")
    scope = _scope(topic or ())
    with open_log(root, bootstrap, wait) as log:
        _check_empty(log, group)
        committed = log.group_offsets(group)
        topics: _Topics = {}
        if from_file is None:
            wanted = sorted(committed) if all_topics else _partitions_of(log, scope, topics)
        else:
            wanted = []
        if all_topics and not wanted:
            raise errors.BadRequest(
                reason=f"Group {group!r} has no committed offsets: name topics with --topic."
            )
        changes = _clamped(log, committed, chosen[0](log, wanted, committed, topics), topics)
        if export:
            _export(changes)
        else:
            _print_changes(changes)
        if execute:
            log.commit_group_offsets(
                group, {each.partition: each.to for each in changes if each.to is not None}
            )
            typer.echo(f"{group}: reset", err=True)
        else:
            typer.echo("nothing was changed; --execute commits these offsets", err=True)
            if not committed and _group(log, group).state == "Dead":
                typer.echo(
                    f"there is no group {group!r} yet, and --execute creates it"
                    " (`sparklog groups list` shows the groups)",
                    err=True,
                )


@app.command(cls=Command)
def delete(
    groups: Annotated[
        list[str],
        typer.Argument(metavar="GROUP", help="The names of groups.", show_default=False),
    ],
    offsets_of: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Delete only the committed offsets of this topic; keep the group.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Delete groups without members and their committed offsets, after confirmation.

    Example: sparklog groups delete billing --yes --root ./data
    """
    if not yes:
        what = f" the offsets of {offsets_of} committed by" if offsets_of else ""
        confirm(f"Delete{what} {', '.join(groups)}?")
    with open_log(root, bootstrap, wait) as log:
        for group in groups:
            if offsets_of is None:
                log.delete_group(group)
                typer.echo(f"{group}: deleted")
                continue
            places = [place for place in log.group_offsets(group) if place[0] == offsets_of]
            log.forget_group_offsets(group, places)
            typer.echo(f"{group}: {counted(len(places), 'offset')} of {offsets_of} deleted")


# ------------------------------------------------------------------------------ describing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The progress of a group in one partition."""

    topic: str
    partition: int
    committed: int | None
    start: int
    end: int
    lag: int | None
    """The number of offsets not yet read."""
    behind_seconds: float | None
    """The age of the first unread record; None if unknown."""
    member: str = ""
    client: str = ""
    host: str = ""


def _lag(
    log: Log,
    info: group_messages.GroupInfo,
    committed: Mapping[_TopicPartition, int],
    topics: _Topics,
) -> GroupLag:
    """Returns the lag as `Log.lag` does; adds the topics that it describes to `topics`."""
    from sparklog.client.lag import group_lag, partitions_of

    for topic, _ in partitions_of(info, committed):
        with contextlib.suppress(errors.UnknownTopic):  # it may still be assigned
            _known(log, topics, topic)
    return group_lag(info, committed, topics)


def _summary(log: Log, group: str, topics: _Topics) -> dict[str, Any]:
    from sparklog.client.lag import partitions_of

    committed = log.group_offsets(group)
    info = _group(log, group)
    return {
        "group": group,
        "state": info.state,
        "members": len(info.members),
        "protocol": info.protocol,
        "topics": sorted({topic for topic, _ in partitions_of(info, committed)}),
        "lag": _lag(log, info, committed, topics).total,
    }


def _group(log: Log, group: str) -> group_messages.GroupInfo:
    """Returns the group, or an empty one if it does not exist."""
    from sparklog.formats import group_messages

    try:
        return log.describe_group(group)
    except errors.GroupRefused as error:
        if error.error != "GROUP_ID_NOT_FOUND":
            raise
        return group_messages.GroupInfo(group=group, state="Dead")


def _parts(log: Log, info: group_messages.GroupInfo) -> list[_Part]:
    from sparklog.client.lag import assigned

    owners = {partition: each for each in info.members for partition in assigned(each)}
    topics: _Topics = {}
    parts = []
    for each in _lag(log, info, log.group_offsets(info.group), topics):
        owner = owners.get((each.topic, each.partition))
        parts.append(
            _Part(
                topic=each.topic,
                partition=each.partition,
                committed=each.committed,
                start=topics[each.topic].partitions[each.partition].start,
                end=each.end,
                lag=each.lag,
                behind_seconds=_behind(log, topics[each.topic], each),
                member=owner.member_id if owner else "",
                client=owner.client_id if owner else "",
                host=owner.client_host if owner else "",
            )
        )
    return parts


def _behind(log: Log, info: flight_messages.TopicInfo, lag: PartitionLag) -> float | None:
    """Returns the age in seconds of the first unread record; None if unknown or deleted."""
    from sparklog.client.consumer.reading import read_range

    if not lag.lag:
        return None if lag.lag is None else 0.0
    partition, start, end = lag.partition, lag.end - lag.lag, lag.end
    columns = ["offset", "timestamp"]
    batches = read_range(log.connection, info, partition, start=start, end=end, columns=columns)
    try:
        batch = next(batches, None)
    except errors.OffsetOutOfRange:  # retention has removed it
        return None
    finally:
        batches.close()
    if batch is None:
        return None
    timestamp_us = batch.column("timestamp")[0].value
    return max(log.connection.clock.now_us() - timestamp_us, 0) / 1e6


def _member(member: group_messages.GroupMember) -> dict[str, Any]:
    from sparklog.client.lag import assigned

    return {
        "member": member.member_id,
        "instance": member.instance_id,
        "client": member.client_id,
        "host": member.client_host,
        "partitions": [list(place) for place in assigned(member)],
    }


def _known(log: Log, topics: _Topics, topic: str) -> flight_messages.TopicInfo:
    if topic not in topics:
        topics[topic] = log.describe(topic)
    return topics[topic]


# ------------------------------------------------------------------------------ resetting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    partition: _TopicPartition
    current: int | None
    to: int | None
    """The new offset; None: unchanged."""
    note: str = ""


_Offsets: TypeAlias = "dict[_TopicPartition, int | None]"
_Target: TypeAlias = (
    "Callable[[Log, list[_TopicPartition], Mapping[_TopicPartition, int], _Topics], _Offsets]"
)
"""Returns the new offset of each partition; None if it has none."""


def _point(point: Point) -> _Target:
    def target(
        log: Log,
        wanted: list[_TopicPartition],
        _committed: Mapping[_TopicPartition, int],
        topics: _Topics,
    ) -> dict[_TopicPartition, int | None]:
        from sparklog.client.offsets import offsets_of

        points: dict[str, dict[int, Point]] = defaultdict(dict)
        for topic, partition in wanted:
            points[topic][partition] = point
        return {
            (topic, partition): offset
            for topic, of_topic in points.items()
            for partition, offset in offsets_of(
                log.connection, _known(log, topics, topic), of_topic
            ).items()
        }

    return target


def _current(
    log: Log,
    wanted: list[_TopicPartition],
    committed: Mapping[_TopicPartition, int],
    topics: _Topics,
) -> dict[_TopicPartition, int | None]:
    latest = _point("latest")(log, wanted, committed, topics)
    return {place: committed.get(place, latest[place]) for place in wanted}


def _to_time(text: str) -> _Target:
    from sparklog.cli.reading import moment_us
    from sparklog.client.times import utc

    try:
        when = utc(moment_us(text))
    except (ValueError, OverflowError):
        reason = f"--to-time {text!r} is invalid: use a time in ISO 8601, or milliseconds"
        raise typer.BadParameter(reason) from None
    return _point(when)


def _shifted(by: int) -> _Target:
    def target(
        _log: Log,
        wanted: list[_TopicPartition],
        committed: Mapping[_TopicPartition, int],
        _topics: _Topics,
    ) -> dict[_TopicPartition, int | None]:
        return {place: committed[place] + by if place in committed else None for place in wanted}

    return target


def _from_file(file: Path) -> _Target:
    """Raises a usage error if the file cannot be read, or is malformed."""
    found: dict[_TopicPartition, int | None] = {}
    try:
        with file.open(newline="") as lines:
            for number, row in enumerate(csv.reader(lines), 1):
                if row:
                    try:
                        topic, partition, offset = (word.strip() for word in row)
                        found[topic, int(partition)] = int(offset)
                    except ValueError:
                        raise typer.BadParameter(
                            f"{file}, line {number}: expected topic,partition,offset"
                        ) from None
    except FileNotFoundError:
        raise typer.BadParameter(f"file {str(file)!r} does not exist") from None
    except OSError as error:
        raise typer.BadParameter(f"cannot read file {str(file)!r}: {error.strerror}") from None

    def target(*_: object) -> dict[_TopicPartition, int | None]:
        return found

    return target


def _scope(given: Iterable[str]) -> dict[str, set[int]]:
    """Returns the partitions by topic; an empty set means all."""
    scope: dict[str, set[int]] = {}
    for text in given:
        topic, colon, partitions = text.partition(":")
        words = [word.strip() for word in partitions.split(",")] if colon else []
        if not topic or not all(word.isdecimal() for word in words):
            raise typer.BadParameter(f"--topic {text!r} is invalid: use TOPIC or TOPIC:P,P")
        numbers = {int(word) for word in words}
        if topic in scope and not (numbers and scope[topic]):
            scope[topic] = set()
        else:
            scope.setdefault(topic, set()).update(numbers)
    return scope


def _partitions_of(
    log: Log, scope: Mapping[str, set[int]], topics: _Topics
) -> list[_TopicPartition]:
    return [
        (topic, partition)
        for topic, numbers in scope.items()
        for partition in sorted(numbers or range(len(_known(log, topics, topic).partitions)))
    ]


def _clamped(
    log: Log,
    committed: Mapping[_TopicPartition, int],
    found: Mapping[_TopicPartition, int | None],
    topics: _Topics,
) -> list[_Change]:
    """Limits offsets to the log. Raises `UnknownTopic`, `UnknownPartition`."""
    changes = []
    for place, wanted in sorted(found.items()):
        topic, partition = place
        partitions = _known(log, topics, topic).partitions
        if partition >= len(partitions):
            raise errors.UnknownPartition(
                topic=topic, partition=partition, last=len(partitions) - 1
            )
        known = partitions[partition]
        to, note = wanted, ""
        if wanted is None:
            note = "no committed offset to shift from"
        elif wanted < known.start:
            to, note = known.start, f"{wanted} is below the log start"
        elif wanted > known.end:
            to, note = known.end, f"{wanted} is beyond the end"
        changes.append(_Change(partition=place, current=committed.get(place), to=to, note=note))
    return changes


def _check_empty(log: Log, group: str) -> None:
    """Raises `GroupRefused` if the group has members, which would overwrite the offsets."""
    info = _group(log, group)
    if info.members:
        clients = ", ".join(
            sorted({f"{each.client_id} at {each.client_host or '?'}" for each in info.members})
        )
        hint = (
            f": it has {counted(len(info.members), 'member')} ({clients}); stop them, or wait until"
            " the sessions of dead ones time out, and try again"
        )
        raise errors.GroupRefused(group=group, error="NON_EMPTY_GROUP", hint=hint)


# ------------------------------------------------------------------------------ output


def _print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value))


def _print_parts(info: group_messages.GroupInfo, parts: Iterable[_Part]) -> None:
    _print_group(info)
    heading = (
        *("topic", "partition", "committed", "end", "lag", "behind"),
        *("member", "client", "host"),
    )
    rows = [
        (
            each.topic,
            each.partition,
            _or_none(each.committed),
            each.end,
            _or_none(each.lag),
            _duration(each.behind_seconds),
            each.member or _NONE,
            each.client or _NONE,
            each.host or _NONE,
        )
        for each in parts
    ]
    print_columns([heading, *rows])


def _print_members(info: group_messages.GroupInfo) -> None:
    from sparklog.client.lag import assigned

    _print_group(info)
    rows = [
        (
            each.member_id,
            each.instance_id or _NONE,
            each.client_id or _NONE,
            each.client_host or _NONE,
            _listed(assigned(each)),
        )
        for each in info.members
    ]
    print_columns([("member", "instance", "client", "host", "partitions"), *rows])


def _print_group(info: group_messages.GroupInfo) -> None:
    typer.echo(f"group     {info.group}")
    typer.echo(f"state     {info.state}")
    typer.echo(f"protocol  {info.protocol or _NONE}")
    typer.echo(f"members   {len(info.members)}")


def _print_changes(changes: Iterable[_Change]) -> None:
    rows = [
        (*each.partition, _or_none(each.current), _or_none(each.to), each.note) for each in changes
    ]
    print_columns([("topic", "partition", "committed", "new", ""), *rows])


def _export(changes: Iterable[_Change]) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerows((*each.partition, each.to) for each in changes if each.to is not None)


def _listed(places: Iterable[_TopicPartition]) -> str:
    by_topic: dict[str, list[str]] = defaultdict(list)
    for topic, partition in places:
        by_topic[topic].append(str(partition))
    return " ".join(f"{topic}:{','.join(each)}" for topic, each in by_topic.items()) or _NONE


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {whole_seconds}s"


def _or_none(value: int | None) -> str:
    return _NONE if value is None else str(value)
