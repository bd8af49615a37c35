"""Records as consumers see them, and reads of bounded ranges."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from sparklog import errors
from sparklog.client import arguments
from sparklog.client.connection import Connection, is_of_the_broker
from sparklog.client.offsets import describe
from sparklog.client.producer.batch import Header
from sparklog.client.serialize import Deserializer
from sparklog.client.times import utc
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA

if TYPE_CHECKING:
    from sparklog.formats.values.columns import Plan
    from sparklog.formats.values.typed import Schemas


class Record(NamedTuple):
    """A record of the log. A tuple, because millions of them are created."""

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
    """Like `key`; None: a tombstone."""
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
    """Yields the rows of `batch`, which has a column `offset`; columns that it lacks are None.

    Raises `DeserializationFailed` after the rows before the bad one; that ends the iterator.
    """
    offsets: list[int] = batch.column("offset").to_numpy().tolist()
    keys = _objects(batch, "key")
    values = _objects(batch, "value")
    if key_deserializer is not None:
        keys = _deserialized("key", keys, key_deserializer, topic, partition, offsets)
    if value_deserializer is not None:
        values = _deserialized("value", values, value_deserializer, topic, partition, offsets)
    return map(
        Record,
        repeat(topic),
        repeat(partition),
        offsets,
        _integers(batch, "timestamp"),
        _integers(batch, "timestampType"),
        keys,
        values,
        _headers(batch),
    )


def _deserialized(
    part: str,
    stored: Iterable[bytes | None],
    deserializer: Deserializer,
    topic: str,
    partition: int,
    offsets: list[int],
) -> Iterator[Any]:
    for offset, data in zip(offsets, stored, strict=False):  # a column of nulls is endless
        try:
            found = None if data is None else deserializer(data)
        except Exception as error:  # a deserializer may raise anything
            raise errors.DeserializationFailed(
                topic=topic,
                partition=partition,
                offset=offset,
                part=part,
                reason=": ".join(filter(None, (type(error).__name__, str(error)))),
            ) from error
        yield found


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
    # Through numpy, which creates the objects in a compiled loop.
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
    """Returns the columns to fetch, including `offset`, from which a broken stream is resumed.

    Raises `WrongSchema` for an unknown column.
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


def check_columns(info: flight_messages.TopicInfo, names: Iterable[str]) -> dict[str, pa.Field]:
    """Returns the columns of a topic by name, the typed ones last.

    Raises `WrongSchema` for a name that is not one of them.
    """
    plan = info.plan
    known = {field.name: field for field in (*ROW_SCHEMA, *(plan.fields if plan else ()))}
    for name in names:
        if name not in known:
            raise errors.WrongSchema(
                reason=f"topic {info.topic} has no column {name!r}; it has {', '.join(known)}"
            )
    return known


def with_typed_columns(rows: pa.RecordBatch, plan: Plan, schemas: Schemas) -> pa.RecordBatch:
    """Returns rows with values, and their typed columns. Raises what `schemas` raises."""
    from sparklog.formats.values.typed import typed_columns  # it loads msgspec and kernels

    typed = typed_columns(plan, rows.column("value"), schemas)
    columns = [*rows.columns, *typed.columns]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*rows.schema, *plan.fields]))


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
    """Yields the rows from `start` to `end` (exclusive), in order, once each.

    Args:
        columns: including `offset`; None: all of `ROW_SCHEMA`.

    Raises:
        errors.OffsetOutOfRange: the range does not exist, or no longer exists.
        errors.TopicChanged: the topic has been re-created since `info`.
        errors.Retriable: nothing arrived for as long as the connection retries.
    """
    retry = connection.retry()
    while start < end:
        try:
            for batch in _one_stream(connection, info, partition, start, end, columns):
                retry.reset()
                start = batch.column("offset")[-1].as_py() + 1
                yield batch
            return
        except errors.SparklogError as error:
            retry.wait_or_raise(error)
            if connection.may_have_moved(error):
                topic_id, info = info.topic_id, describe(connection, info.topic)
                info.check_id(topic_id)


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
        failure = channel.failure_of(error)
        if is_of_the_broker(failure):
            connection.broke(channel)
        raise failure from error
    finally:
        if reader is not None:
            reader.cancel()
