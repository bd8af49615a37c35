"""Offsets as programs specify them: a number, a named point, a time, or committed by a group."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from sparklog import errors
from sparklog.client import arguments
from sparklog.client.connection import Connection, may_pass
from sparklog.client.times import datetime_us, moment
from sparklog.formats import flight_messages

TopicPartition = tuple[str, int]


class OffsetAndMetadata(NamedTuple):
    """The next offset that a group will read from a partition, and a string stored with it."""

    offset: int
    metadata: str = ""
    """Up to 4,096 characters, as in Kafka (`offset.metadata.max.bytes`)."""


Point = int | str | datetime
"""An offset, "earliest", "latest", or a time, which means the first record at that time or later: a
datetime with a zone, or ISO 8601, which is UTC if it names no zone."""

Points = Point | Mapping[int, Point]
"""A point for all partitions, or one for each of some."""

Start = Point | Mapping[TopicPartition, Point] | Mapping[str, Mapping[int, Point]]
"""A point for all partitions, or one for some: `{("t", 0): 12}` or `{"t": {0: 12}}`."""


# ------------------------------------------------------------------------------ at the broker


def describe(connection: Connection, topic: str) -> flight_messages.TopicInfo:
    """Describes a topic; afterwards the connection knows the addresses of its leaders.

    A broker knows only the offsets of the partitions that it leads, so each leader is asked.
    """
    request, retry = flight_messages.TopicName(topic=topic), None
    while True:
        info: flight_messages.TopicInfo = connection.action("topics.describe", request)
        connection.learn_leaders(info)
        found = {each.partition: each for each in info.partitions if each.end >= 0}
        leaders = {each.leader for each in info.partitions if each.end < 0}
        if not leaders:
            return info
        retry = retry or connection.retry()
        try:
            for leader in leaders:
                answer: flight_messages.TopicInfo = connection.attempt(
                    "topics.describe", request, timeout_seconds=retry.left_seconds, broker=leader
                )
                if answer.topic_id == info.topic_id:
                    found |= {each.partition: each for each in answer.partitions if each.end >= 0}
            for each in info.partitions:
                if each.partition not in found:  # it is moving to another leader
                    raise errors.NotLeader(
                        topic=topic, partition=each.partition, leader=each.leader
                    )
        except errors.SparklogError as error:
            retry.wait_or_raise(error)
        else:
            partitions = [found[each.partition] for each in info.partitions]
            return msgspec.structs.replace(info, partitions=partitions)


def ask_leaders(
    connection: Connection,
    topic: str,
    partitions: Collection[int],
    ask: Callable[[int, list[int]], None],
) -> None:
    """Calls `ask` for each leader of these partitions.

    `ask` receives a broker's id and the numbers of its partitions, and raises `NotLeader`, without
    any effect, if that broker does not lead all of them. The first call receives -1, for the broker
    in use, and all partitions, since one broker may lead them all. If a leader has died, `ask` is
    called again for its successor.
    """
    retry, routes = connection.retry(), {-1: sorted(partitions)} if partitions else {}
    while routes:
        broker, numbers = routes.popitem()
        try:
            ask(broker, numbers)
        except errors.SparklogError as error:
            # `ask` has already retried with the broker in use for as long as the caller waits.
            may_help = connection.may_have_moved(error) or (broker >= 0 and may_pass(error))
            if not may_help or isinstance(error, errors.TimedOut):
                raise
            if broker >= 0 or not isinstance(error, errors.NotLeader):
                retry.wait_or_raise(error)
            request = flight_messages.TopicName(topic=topic)
            info: flight_messages.TopicInfo = connection.action("topics.describe", request)
            connection.learn_leaders(info)
            for number in numbers:
                routes.setdefault(info.partitions[number].leader, []).append(number)


def everywhere(
    connection: Connection,
    name: str,
    request: msgspec.Struct,
    *,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Performs an action on each broker that is up, sequentially, and returns the replies.

    Skips brokers that stop meanwhile, and starts over if partitions move.
    """
    retry, replies = connection.retry(timeout_seconds), dict[int, Any]()
    while True:
        brokers = connection.brokers()
        try:
            for each in brokers if len(brokers) > 1 else [-1]:
                if each not in replies:
                    replies[each] = ask(
                        connection, name, request, each, timeout_seconds=retry.left_seconds
                    )
        except errors.SparklogError as error:
            if isinstance(error, errors.TimedOut):  # the time is used up
                raise
            if isinstance(error, errors.MetadataChanged):
                replies.clear()
            retry.wait_or_raise(error)
        else:
            return list(replies.values())


def ask(
    connection: Connection,
    name: str,
    request: msgspec.Struct,
    broker: int,
    *,
    timeout_seconds: float | None = None,
) -> Any:
    """Performs an action on the broker in use (-1), or once on another one, which may be down."""
    if broker < 0:
        return connection.action(name, request, timeout_seconds=timeout_seconds)
    seconds = connection.retry(timeout_seconds).left_seconds
    return connection.attempt(name, request, timeout_seconds=seconds, broker=broker)


def offsets_of(
    connection: Connection, info: flight_messages.TopicInfo, points: Mapping[int, Point]
) -> dict[int, int]:
    """Returns the offset of each partition's point.

    Raises `UnknownPartition`, and `BadOption` for a value that is not a point. Does not check that
    an offset exists: reading does that.
    """
    offsets, timestamps_us = {}, {}
    for number, given in points.items():
        partition = arguments.whole("partition", number)
        point = check_point("offset", given)
        if not 0 <= partition < len(info.partitions):
            raise errors.UnknownPartition(
                topic=info.topic, partition=partition, last=len(info.partitions) - 1
            )
        known = info.partitions[partition]
        match point:
            case "earliest":
                offsets[partition] = known.start
            case "latest":
                offsets[partition] = known.end
            case datetime():
                timestamps_us[partition] = datetime_us(point)
            case int():
                offsets[partition] = point
    for partition, offset in offsets_for_times(connection, info.topic, timestamps_us).items():
        offsets[partition] = info.partitions[partition].end if offset < 0 else offset
    return offsets


def offsets_for_times(
    connection: Connection, topic: str, timestamps_us: Mapping[int, int]
) -> dict[int, int]:
    """Returns, by partition, the first offset at or after the given timestamp; -1 if none."""
    offsets: dict[int, int] = {}

    def ask_for_some(broker: int, partitions: list[int]) -> None:
        request = flight_messages.OffsetsForTimes(
            topic=topic, timestamps_us={each: timestamps_us[each] for each in partitions}
        )
        found: flight_messages.Offsets = ask(connection, "offsets.for_times", request, broker)
        offsets.update(found.offsets)

    ask_leaders(connection, topic, timestamps_us, ask_for_some)
    return offsets


# ------------------------------------------------------------------------------ checks


def check_point(option: str, point: Any, *, others: tuple[str, ...] = ()) -> Point:
    """Returns `point` as an int, "earliest", "latest", one of `others`, or a datetime with a zone.

    Raises `BadOption`, which names `option`.
    """
    words = ("earliest", "latest", *others)
    hint = ""
    if isinstance(point, datetime):
        datetime_us(point)
        return point
    if isinstance(point, str):
        if point in words:
            return point
        try:
            return moment(point)
        except ValueError:
            nearest = difflib.get_close_matches(point.lower(), words, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    elif not isinstance(point, bool):
        try:
            return operator.index(point)
        except TypeError:
            pass
    listed = ", ".join(map(repr, words))
    raise errors.BadOption(
        option=option,
        value=point if isinstance(point, str | int | float | bool | None) else repr(point),
        reason=f"expected an offset, {listed}, a datetime, or a time in ISO 8601{hint}",
    )


def check_start(start: Any, *, others: tuple[str, ...] = ()) -> Start:
    """Returns `start` with each of its points checked. Raises `BadOption`."""
    if not isinstance(start, Mapping):
        return check_point("start", start, others=others)
    return {key: check_point("start", point) for key, point in points_by_partition(start).items()}


def check_time(option: str, when: Any) -> datetime:
    """Returns a datetime with a zone. Raises `BadOption` if `when` is neither one nor ISO 8601."""
    found = when
    if isinstance(when, str):
        try:
            found = moment(when)
        except ValueError:
            found = None
    if not isinstance(found, datetime):
        raise errors.BadOption(
            option=option,
            value=when if isinstance(when, str) else repr(when),
            reason="expected a datetime with a zone, or a time in ISO 8601",
        )
    datetime_us(found)
    return found


def check_offsets(offsets: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    """Returns offsets to commit, by (topic, partition). Raises `BadOption`."""
    given = arguments.mapping("offsets", offsets, "{(topic, partition): offset}")
    found = {}
    for key, value in given.items():
        topic, partition = arguments.topic_partition("offsets", key)
        option = f"offset of {topic}-{partition}"
        offset, metadata = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
        if not isinstance(metadata, str):
            raise errors.BadOption(
                option=option, value=repr(value), reason="expected an offset, or (offset, text)"
            )
        offset = arguments.whole(option, offset, least=0)
        found[topic, partition] = OffsetAndMetadata(offset, metadata)
    return found


def points_by_partition(points: Mapping[Any, Any]) -> dict[TopicPartition, Point]:
    """Returns the points in a start that names partitions, in either form. Raises `BadOption`."""
    found: dict[TopicPartition, Point] = {}
    for key, value in points.items():
        if isinstance(key, tuple):
            found[arguments.topic_partition("start", key)] = value
        elif isinstance(key, str) and isinstance(value, Mapping):
            found |= {
                (key, arguments.partition("start", partition)): point
                for partition, point in value.items()
            }
        else:
            reason = "expected offsets by partition: {topic: {partition: offset}}"
            raise errors.BadOption(option="start", value=repr(points), reason=reason)
    return found
