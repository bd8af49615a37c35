"""Records as they are read: their form, the points to begin at, and bounded ranges."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Generator, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa

from sparklog import errors
from sparklog.client import arguments
from sparklog.client.connection import Connection, failure_of, is_of_the_broker
from sparklog.client.producer.batch import Header
from sparklog.client.serialize import Deserializer
from sparklog.client.times import datetime_us, moment, utc
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA

TopicPartition = tuple[str, int]


class OffsetAndMetadata(NamedTuple):
    """The next offset that a group reads of a partition, and a text that is kept with it."""

    offset: int
    metadata: str = ""
    """Up to 4,096 characters, as in Kafka (`offset.metadata.max.bytes`)."""


Point = int | str | datetime
"""An offset, "earliest", "latest", or a time, which means the first record that is not older: a
datetime with a zone, or ISO 8601, which is UTC if it names no zone."""

Start = Point | Mapping[TopicPartition, Point] | Mapping[str, Mapping[int, Point]]
"""A point for all partitions, or one for some: `{("t", 0): 12}` or `{"t": {0: 12}}`."""


class Record(NamedTuple):
    """A record of the log. It is a tuple, because millions of them are made."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
    """Microseconds since 1970-01-01 UTC."""
    timestamp_type: int
    """`record.CREATE_TIME` or `record.LOG_APPEND_TIME`."""
    key: Any
    """bytes, or the deserializer's value; None: a null key."""
    value: Any
    """As `key`; None: a tombstone."""
    headers: tuple[Header, ...]

    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as in Kafka's clients."""
        return self.timestamp_us // 1000

    @property
    def datetime(self) -> datetime:
        return utc(self.timestamp_us)


def records_of(
    topic: str,
    partition: int,
    batch: pa.RecordBatch,
    key_deserializer: Deserializer | None = None,
    value_deserializer: Deserializer | None = None,
) -> Iterator[Record]:
    """Yields the rows of `batch`, which has a column `offset`; columns that it lacks are None."""
    keys = _objects(batch, "key")
    values = _objects(batch, "value")
    if key_deserializer is not None:
        keys = (None if key is None else key_deserializer(key) for key in keys)
    if value_deserializer is not None:
        values = (None if value is None else value_deserializer(value) for value in values)
    return map(
        Record,
        repeat(topic),
        repeat(partition),
        batch.column("offset").to_numpy().tolist(),
        _integers(batch, "timestamp"),
        _integers(batch, "timestampType"),
        keys,
        values,
        _headers(batch),
    )


def _integers(batch: pa.RecordBatch, name: str) -> Iterable[Any]:
    index = batch.schema.get_field_index(name)
    if index < 0:
        return repeat(None)
    column = batch.column(index)
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    numbers: list[int] = column.to_numpy(zero_copy_only=False).tolist()
    return numbers


def _objects(batch: pa.RecordBatch, name: str) -> Iterable[Any]:
    index = batch.schema.get_field_index(name)
    if index < 0:
        return repeat(None)
    column = batch.column(index)
    if column.null_count == len(column):
        return repeat(None)
    # By way of numpy, which makes the objects in a compiled loop.
    objects: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return objects


def _headers(batch: pa.RecordBatch) -> Iterable[tuple[Header, ...]]:
    index = batch.schema.get_field_index("headers")
    if index < 0:
        return repeat(())
    column = batch.column(index)
    if column.null_count == len(column):
        return repeat(())
    return [
        tuple((header["key"], header["value"]) for header in headers or ())
        for headers in column.to_pylist()
    ]


# ------------------------------------------------------------------------------ columns


def wire_columns(columns: Iterable[str] | None) -> list[str] | None:
    """Returns the columns to fetch, with `offset`, from which a broken stream is resumed.

    Raises `WrongSchema` for a column that rows do not have.
    """
    if columns is None:
        return None
    names = arguments.texts("columns", columns)
    for name in names:
        if name not in ROW_SCHEMA.names:
            raise errors.WrongSchema(
                reason=f"rows have no column {name!r}; they have {', '.join(ROW_SCHEMA.names)}"
            )
    return names if "offset" in names else [*names, "offset"]


# ------------------------------------------------------------------------------ topics


def describe(connection: Connection, topic: str) -> flight_messages.TopicInfo:
    """Describes a topic; the connection knows the addresses of its leaders afterwards."""
    info: flight_messages.TopicInfo = connection.action(
        "topics.describe", flight_messages.TopicName(topic=topic)
    )
    connection.learn_leaders(info)
    return info


def offsets_of(
    connection: Connection, info: flight_messages.TopicInfo, points: Mapping[int, Point]
) -> dict[int, int]:
    """Returns the offset of each partition's point.

    Raises `UnknownPartition`, and `BadOption` for a value that is no point. Whether an offset
    exists is not checked: reading does that.
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
    if timestamps_us:
        request = flight_messages.OffsetsForTimes(topic=info.topic, timestamps_us=timestamps_us)
        found: flight_messages.Offsets = connection.action("offsets.for_times", request)
        for partition, offset in found.offsets.items():
            offsets[partition] = info.partitions[partition].end if offset < 0 else offset
    return offsets


def check_point(option: str, point: Any, *, others: tuple[str, ...] = ()) -> Point:
    """Returns `point` as an int, "earliest", "latest", one of `others`, or a datetime with a zone.

    Raises `BadOption`, with the name `option`.
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
    """Returns a datetime with a zone. Raises `BadOption` for any other value but ISO 8601."""
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
    """Returns the points of a start that names partitions, in either form. Raises `BadOption`."""
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


# ------------------------------------------------------------------------------ ranges


def read_range(
    connection: Connection,
    info: flight_messages.TopicInfo,
    partition: int,
    *,
    start: int,
    end: int,
    columns: list[str] | None,
) -> Generator[pa.RecordBatch, None, None]:
    """Yields the rows from `start` to `end` (excluded), in order, once each.

    Args:
        columns: with `offset`; None: all of `ROW_SCHEMA`.

    Raises:
        errors.OffsetOutOfRange: the range does not exist, or not any more.
        errors.TopicChanged: the topic was created again since `info`.
        errors.Retriable: nothing came for as long as the connection retries.
    """
    retry = connection.retry()
    while start < end:
        try:
            for batch in _one_stream(connection, info, partition, start, end, columns):
                retry.reset()
                start = batch.column("offset")[-1].as_py() + 1
                yield batch
            return
        except errors.NotLeader as error:
            retry.wait_or_raise(error)
            info = describe(connection, info.topic)
        except errors.SparklogError as error:
            retry.wait_or_raise(error)


def _one_stream(
    connection: Connection,
    info: flight_messages.TopicInfo,
    partition: int,
    start: int,
    end: int,
    columns: list[str] | None,
) -> Iterator[pa.RecordBatch]:
    ticket = flight_messages.ReadTicket(
        topic=info.topic,
        partition=partition,
        start=start,
        end=end,
        columns=columns,
        topic_id=info.topic_id,
    )
    channel = connection.channel(info.partitions[partition].leader)
    reader = None
    try:
        reader = channel.read(ticket)
        while True:
            batch = reader.read_chunk().data
            if batch.num_rows:
                yield batch
    except StopIteration:
        reader = None
    except (pa.ArrowException, OSError) as error:
        reader = None
        failure = failure_of(error, channel.address)
        if is_of_the_broker(failure):
            connection.broke(channel)
        raise failure from error
    finally:
        if reader is not None:
            reader.cancel()
