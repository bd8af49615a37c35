"""The producer: records and tables in, futures out. Any number of threads may use one.

`send` only adds the record to a list, so a single thread can send several hundred thousand per
second; hashing, splitting and writing are done for whole batches by the topic's sender (`sender`).
A record that `send` itself rejects has no effect. A record that it accepts is delivered exactly
once, in the order of sending within its partition, or its future reports the failure.
"""

from __future__ import annotations

import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import errors, limits
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.json_frames import json_records
from sparklog.client.producer.batch import (
    Header,
    OnDelivery,
    RecordFuture,
    RecordMetadata,
    TableFuture,
    delivery_callback,
)
from sparklog.client.producer.buffer_pool import BufferPool, ProducerIds
from sparklog.client.producer.sender import SendingOptions, TopicSender
from sparklog.client.producer.statistics import ProducerStatistics
from sparklog.client.serialize import Serializer
from sparklog.client.times import Timestamp, timestamp_us
from sparklog.display import html_table
from sparklog.formats import flight_messages
from sparklog.formats.partitioner import NO_KEY
from sparklog.formats.record import check_record_sizes, conform_payload
from sparklog.formats.topic_names import check_topic_name

_TABLE_BATCH_BYTES = 4 * limits.MIB

Headers = Mapping[str, bytes | None] | Sequence[Header]
Partitioner = Callable[[str, bytes | None, int], int]
"""Returns the partition for a topic, a key and the number of partitions."""

_Named = npt.NDArray[np.int32] | None
"""The partition given for each row; -1, or None for all rows: none is given."""

__all__ = ["Headers", "Partitioner", "Producer", "RecordFuture", "RecordMetadata", "TableFuture"]


class Producer:
    """Sends records idempotently: retries cause neither duplicates nor reordering.

    Args:
        connection: to the brokers; stays open when the producer is closed.
        linger_ms: how long a record may wait for others to fill its batch. Waiting for its future
            sends it immediately.
        batch_rows: maximum number of records in a batch.
        batch_bytes: maximum size of a batch's keys and values, in bytes.
        buffer_bytes: memory for records that are not yet acked; when it is full, `send` blocks.
        max_block_seconds: how long `send` blocks for memory, or for a broker to describe a topic.
        delivery_timeout_seconds: the time after which a record is given up, sent or not.
        partitioner: called for each record without a partition; None: murmur2 of the key, as in
            Kafka's Java client; records without a key go to one partition per batch, in turn.
        key_serializer: returns the bytes of a key that is not None.
        value_serializer: returns the bytes of a value that is not None.
        on_delivery: called for each record, like that of `send`.

    Raises `BadOption` for an invalid argument, `BadRequest` if the connection is closed.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        linger_ms: float = limits.PRODUCER_LINGER_MS,
        batch_rows: int = limits.PRODUCER_BATCH_ROWS,
        batch_bytes: int = limits.PRODUCER_BATCH_BYTES,
        buffer_bytes: int = limits.PRODUCER_BUFFER_BYTES,
        max_block_seconds: float = limits.MAX_BLOCK_SECONDS,
        delivery_timeout_seconds: float = limits.DELIVERY_TIMEOUT_SECONDS,
        partitioner: Partitioner | None = None,
        key_serializer: Serializer | None = None,
        value_serializer: Serializer | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        self._senders: dict[str, TopicSender] = {}
        connection.check_open()  # it makes no request before the first record
        batch_rows = arguments.whole("batch_rows", batch_rows, least=1)
        batch_bytes = arguments.whole("batch_bytes", batch_bytes, least=1)
        buffer_bytes = arguments.whole("buffer_bytes", buffer_bytes, least=1)
        self._connection = connection
        self._options = SendingOptions(
            linger_seconds=arguments.number("linger_ms", linger_ms, least=0) / 1000,
            max_block_seconds=arguments.number("max_block_seconds", max_block_seconds, least=0),
            delivery_timeout_seconds=arguments.number(
                "delivery_timeout_seconds", delivery_timeout_seconds, above=0
            ),
        )
        self._last_row = min(batch_rows, limits.MAX_BATCH_ROWS) - 1
        self._batch_bytes = min(batch_bytes, limits.MAX_BATCH_BYTES // 2)
        self._partitioner = arguments.function("partitioner", partitioner)
        self._key_serializer = arguments.function("key_serializer", key_serializer)
        self._value_serializer = arguments.function("value_serializer", value_serializer)
        self._on_delivery = arguments.function("on_delivery", on_delivery)
        self._serializes = bool(key_serializer or value_serializer)
        self._asks_each = bool(partitioner or on_delivery)
        self._pool = BufferPool(buffer_bytes, connection.clock)
        self._producer_ids = ProducerIds(connection)
        self._lock = threading.Lock()
        self._refusal: errors.SparklogError | None = None
        self._closed_senders: list[TopicSender] = []
        _producers.add(self)

    # -------------------------------------------------------------------------- records

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        headers: Headers | None = None,
        timestamp: Timestamp | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> RecordFuture:
        """Sends a record in the background; returns immediately unless the buffer is full.

        Args:
            topic: must exist.
            value: bytes, or a value for `value_serializer`; None is a tombstone.
            key: bytes, or a key for `key_serializer`; records with the same key keep their order.
            headers: names and bytes, as pairs or a mapping.
            timestamp: a datetime with a zone, a time in ISO 8601 (UTC without a zone), or an int of
                *milliseconds* since 1970, as in Kafka's clients; None: the time of arrival at the
                broker.
            partition: None: chosen by the partitioner.
            on_delivery: called with (error or None, `RecordMetadata` or None) on the producer's
                thread. Exceptions that it raises are logged; it must not wait for deliveries to
                this topic.

        Raises:
            errors.WrongSchema: key, value, headers or timestamp has the wrong type.
            errors.RecordTooLarge: key, value and headers together exceed the broker's limit.
            errors.BadTopicName, errors.UnknownTopic, errors.UnknownPartition: the topic or
                partition does not exist.
            errors.TimedOut: the buffer stayed full for `max_block_seconds`.
            errors.BrokerUnavailable: no broker described the topic in that time.
            errors.BadRequest: the producer is closed.
        """
        try:
            sender = self._senders.get(topic) or self._sender_of(topic)
        except TypeError:  # it is not hashable
            check_topic_name(topic)
            raise
        if (
            type(value) is not bytes
            or (key is not None and type(key) is not bytes)
            or self._serializes
        ):
            key = _bytes_of("key", key, self._key_serializer)
            value = _bytes_of("value", value, self._value_serializer)
        size = 0 if value is None else len(value)
        if key is not None:
            size += len(key)
        if (
            headers is not None
            or timestamp is not None
            or partition is not None
            or on_delivery is not None
            or self._asks_each
        ):
            return self._send_with_details(
                sender, value, key, size, headers, timestamp, partition, on_delivery
            )
        if size > sender.max_record_bytes:
            raise errors.RecordTooLarge(bytes=size, limit_bytes=sender.max_record_bytes)
        with sender.lock:
            batch = sender.open or sender.open_batch()
            values = batch.values
            row = len(values)
            values.append(value)
            if key is not None:
                keys = batch.keys
                if len(keys) != row:
                    keys.extend([None] * (row - len(keys)))
                keys.append(key)
            batch.bytes += size
            if row >= self._last_row or batch.bytes >= self._batch_bytes:
                sender.seal()
        if sender.is_eager:
            sender.send_at_once(batch)
        return RecordFuture(batch, row)

    def _send_with_details(
        self,
        sender: TopicSender,
        value: bytes | None,
        key: bytes | None,
        size: int,
        headers: Headers | None,
        timestamp: Timestamp | None,
        partition: int | None,
        on_delivery: OnDelivery | None,
    ) -> RecordFuture:
        # This runs for each record, so it does no work for fields that the record does not have.
        pairs = None
        if headers is not None:
            pairs = _pairs(headers)
            size += sum(_utf8_bytes(name) + len(data or b"") for name, data in pairs)
        if size > sender.max_record_bytes:
            raise errors.RecordTooLarge(bytes=size, limit_bytes=sender.max_record_bytes)
        own_us = None if timestamp is None else timestamp_us(timestamp)
        if partition is None and self._partitioner is not None:
            partition = self._partitioner(sender.topic, key, sender.partition_count)
        if partition is not None:
            partition = _whole_number(partition)
            sender.check_partition(partition)
        callbacks: tuple[Callable[[RecordFuture], object], ...] = ()
        if on_delivery is not None or self._on_delivery is not None:
            arguments.function("on_delivery", on_delivery)
            both = self._on_delivery, on_delivery
            callbacks = tuple(delivery_callback(each) for each in both if each is not None)
        with sender.lock:
            batch = sender.open_batch()
            row = len(batch.values)
            batch.values.append(value)
            if key is not None:
                batch.keys.extend([None] * (row - len(batch.keys)))
                batch.keys.append(key)
            batch.add_details(row, pairs, own_us, partition, callbacks)
            batch.bytes += size
            if row >= self._last_row or batch.bytes >= self._batch_bytes:
                sender.seal()
        if sender.is_eager:
            sender.send_at_once(batch)
        return RecordFuture(batch, row)

    # -------------------------------------------------------------------------- tables

    def send_table(
        self, topic: str, data: Any, *, as_json: bool = False, key: str | None = None
    ) -> TableFuture:
        """Sends the rows of a table in the background, after all records already sent to the topic.

        It does no work per row, so it is the fastest way to send many. Serializers and
        `on_delivery` are not called.

        Args:
            topic: must exist.
            data: a `pa.Table`, `RecordBatch` or `RecordBatchReader`, a polars or pandas data frame,
                or anything else with `__arrow_c_stream__`. Columns: `value` (binary or string),
                and any of `key` (binary or string), `headers` (list of structs of key and value),
                `timestamp` (timestamp), `partition` (integer; null: by the key).
            as_json: send each row as one JSON object with a field for each column of `data`. A null
                field is omitted, and binary is base64.
            key: with `as_json`, the column of text, integers or bytes that becomes the record key.

        Raises:
            The errors that `send` raises. From a reader, the batches before the invalid one are
            sent; from any other table, no row is.
        """
        if not arguments.flag("as_json", as_json) and key is not None:
            reason = "it is only for as_json=True; without it, the key column must be named 'key'"
            raise errors.BadOption(option="key", value=repr(key), reason=reason)
        sender = self._senders.get(topic) or self._sender_of(topic)
        pieces: Iterable[tuple[pa.RecordBatch, _Named]] = (
            self._conformed(sender, piece)
            for batch in _batches(data)
            for records in (json_records(batch, key) if as_json else (batch,))
            for piece in _pieces(records)
        )
        if not isinstance(data, pa.RecordBatchReader):
            pieces = list(pieces)
        return TableFuture(topic, [sender.add_table(*piece) for piece in pieces])

    def _conformed(
        self, sender: TopicSender, batch: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, _Named]:
        index = batch.schema.get_field_index("partition")
        named = None
        if index >= 0:
            named = _partition_numbers(batch.column(index))
            batch = batch.drop_columns(["partition"])
        payload = conform_payload(batch)
        check_record_sizes(payload, sender.max_record_bytes)
        if self._partitioner is not None:
            named = self._named_by_partitioner(sender, payload, named)
        if named is not None and len(named):
            sender.check_partition(max(int(named.max()), 0))
        return payload, named

    def _named_by_partitioner(
        self,
        sender: TopicSender,
        payload: pa.RecordBatch,
        named: _Named,
    ) -> npt.NDArray[np.int32]:
        assert self._partitioner is not None
        unnamed = np.full(payload.num_rows, NO_KEY, np.int32)
        chosen = unnamed if named is None else named.copy()
        index = payload.schema.get_field_index("key")
        keys = payload.column(index).to_pylist() if index >= 0 else [None] * payload.num_rows
        for row in np.flatnonzero(chosen == NO_KEY):
            partition = _whole_number(
                self._partitioner(sender.topic, keys[row], sender.partition_count)
            )
            sender.check_partition(partition)
            chosen[row] = partition
        return chosen

    # -------------------------------------------------------------------------- the end

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every record sent so far is acked or has failed, and its callbacks have run.

        Raises `StillSending` after `timeout` seconds; None: no limit. The futures report failures.
        """
        timeout = arguments.timeout("timeout", timeout)
        deadline = None if timeout is None else self._connection.clock.monotonic() + timeout
        for sender in list(self._senders.values()):
            if not sender.flush(deadline):
                what = "a record that was sent before the flush"
                raise errors.StillSending(what=what, timeout_seconds=timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flushes for up to `timeout` seconds, gives up remaining records, and stops the threads.

        Raises `OutcomeUnknown` if records were given up: some of them may be in the log. The
        futures report the failure of each.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = errors.BadRequest(reason="the producer is closed")
        try:
            self.flush(timeout)
        except errors.StillSending as error:
            reason = f"the producer was closed after {timeout} s"
            raise errors.OutcomeUnknown(what="the last records", reason=reason) from error
        finally:
            with self._lock:
                senders, self._senders = self._senders, {}
                self._closed_senders += senders.values()
            for sender in senders.values():
                sender.close()

    # -------------------------------------------------------------------------- statistics

    def statistics(self) -> ProducerStatistics:
        """Returns counts for all topics together, even after `close`."""
        senders = [*self._closed_senders, *list(self._senders.values())]
        total = ProducerStatistics.total(sender.statistics() for sender in senders)
        return replace(total, buffered_bytes=self._pool.used_bytes)

    def __repr__(self) -> str:
        if self._refusal is not None:
            return "Producer(closed)"
        topics = ", ".join(sorted(self._senders)) or "no topic yet"
        undecided = sum(sender.undecided_rows for sender in list(self._senders.values()))
        return f"Producer({topics}; {undecided:,} records without an ack)"

    def _repr_html_(self) -> str:
        counts = asdict(self.statistics())
        return html_table(repr(self), ("count", "value"), counts.items())

    # -------------------------------------------------------------------------- end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        senders = getattr(self, "_senders", {})
        undecided = sum(sender.undecided_rows for sender in senders.values())
        for sender in senders.values():
            sender.end()
        if undecided:
            warnings.warn(
                f"a producer was dropped before {undecided} of its records were acked: flush() or"
                " close() it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # -------------------------------------------------------------------------- topics

    def _sender_of(self, topic: str) -> TopicSender:
        check_topic_name(topic)
        if self._refusal is not None:
            raise self._refusal
        info: flight_messages.TopicInfo = self._connection.action(
            "topics.describe",
            flight_messages.TopicName(topic=topic),
            timeout_seconds=self._options.max_block_seconds,
        )
        self._connection.learn_leaders(info)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            sender = self._senders.get(topic)
            if sender is None:
                sender = self._senders[topic] = TopicSender(
                    info,
                    connection=self._connection,
                    producer_ids=self._producer_ids,
                    pool=self._pool,
                    options=self._options,
                )
            return sender

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._refusal = errors.BadRequest(reason="this producer belongs to the parent process")
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.after_fork()


# ------------------------------------------------------------------------------ records in


def _bytes_of(what: str, value: Any, serializer: Serializer | None) -> bytes | None:
    if value is None:
        return None
    if serializer is not None:
        value = serializer(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise errors.WrongSchema(
        reason=f"a record's {what} must be bytes, not {type(value).__name__}; encode it, or give"
        f" the producer a {what}_serializer"
    )


def _whole_number(partition: Any) -> int:
    try:
        if isinstance(partition, bool):
            raise TypeError
        return operator.index(partition)
    except TypeError as error:
        raise errors.WrongSchema(reason=f"a partition must be an int, not {partition!r}") from error


def _pairs(headers: Headers) -> list[Header]:
    items: Iterable[Any] = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(items, Iterable):
        raise errors.WrongSchema(reason=f"headers must be pairs of name and bytes, not {headers!r}")
    pairs = []
    for item in items:
        match item:
            case (str() as name, (bytes() | None) as data):
                pairs.append((name, data))
            case _:
                raise errors.WrongSchema(reason=f"a header must be a name and bytes, not {item!r}")
    return pairs


def _utf8_bytes(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as error:
        raise errors.WrongSchema(reason=f"a header's name is not UTF-8: {error}") from error


# ------------------------------------------------------------------------------ tables in


def _batches(data: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        yield data
        return
    if type(data).__module__.partition(".")[0] == "pandas":
        data = pa.Table.from_pandas(data, preserve_index=False)
    if isinstance(data, pa.Table):
        yield from data.to_batches()
    elif isinstance(data, pa.RecordBatchReader):
        yield from data
    elif hasattr(data, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(data)
    else:
        raise errors.WrongSchema(
            reason=f"a table must be from Arrow, polars or pandas, not {type(data).__name__}"
        )


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields `batch` in pieces of at most `TABLE_BATCH_ROWS` and `_TABLE_BATCH_BYTES`."""
    rows = batch.num_rows
    is_small = rows <= limits.TABLE_BATCH_ROWS and batch.nbytes <= _TABLE_BATCH_BYTES
    if is_small or rows == 1:
        if rows:
            yield batch
        return
    yield from _pieces(batch.slice(0, rows // 2))
    yield from _pieces(batch.slice(rows // 2))


def _partition_numbers(column: pa.Array) -> npt.NDArray[np.int32]:
    """Returns the numbers as int32, -1 for null."""
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise errors.WrongSchema(reason=f"column 'partition' is {column.type}, not an integer")
    try:
        numbers = column.cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise errors.WrongSchema(reason=f"column 'partition': {error}") from error
    lowest = pc.min(numbers).as_py()
    if lowest is not None and lowest < 0:
        raise errors.WrongSchema(reason=f"column 'partition' has {lowest}; null means by the key")
    named: npt.NDArray[np.int32] = pc.fill_null(numbers, NO_KEY).to_numpy(zero_copy_only=False)
    return named


# ------------------------------------------------------------------------------ forks

_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
