"""The producer: records and tables in, futures out. Any number of threads may use one.

`send` only puts the record into a list, so a single thread sends several hundred thousand a second;
hashing, splitting and writing are done for whole batches by the topic's sender (`client.sender`).
A record that is refused by `send` itself left no trace; one that was taken is delivered exactly
once, in the order of sending in its partition, or its future tells what is known of it.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import errors, limits, wire
from sparklog.client import arguments
from sparklog.client.batch import (
    Header,
    OnDelivery,
    RecordFuture,
    RecordMetadata,
    TableFuture,
    delivery_callback,
)
from sparklog.client.connection import Connection
from sparklog.client.sender import SendingOptions, TopicSender
from sparklog.client.serialize import Serializer
from sparklog.client.shared import BufferPool, Identities
from sparklog.client.times import Timestamp, timestamp_us
from sparklog.partitioner import NO_KEY
from sparklog.record import check_record_sizes, check_topic_name, conform_payload

Headers = Mapping[str, bytes | None] | Sequence[Header]
Partitioner = Callable[[str, bytes | None, int], int]
"""From topic, key and number of partitions to the partition."""

_Named = npt.NDArray[np.int32] | None
"""The partition of each row; -1, or None for all: not named."""

__all__ = ["Headers", "Partitioner", "Producer", "RecordFuture", "RecordMetadata", "TableFuture"]


class Producer:
    """Sends records, idempotently: a retry is never appended twice, and never overtakes.

    Args:
        connection: to the brokers; stays open when the producer is closed.
        linger_ms: how long a record may wait for company. Waiting for its future sends it at once.
        batch_rows: a batch is sent when it has that many records,
        batch_bytes: or that many bytes of keys and values.
        buffer_bytes: what may wait for acks; when it is full, `send` waits.
        max_block_seconds: for how long; also for how long `send` waits for a broker that can tell
            about a topic.
        delivery_timeout_seconds: after it a record is given up, sent or not.
        partitioner: called for each record that names no partition; None: murmur2 of the key, as
            Kafka's Java client does, and a whole batch without keys to one partition, in turn.
        key_serializer: makes bytes of every key but None.
        value_serializer: makes bytes of every value but None.
        on_delivery: called for each record of `send`: see there.
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
        self._pool = BufferPool(buffer_bytes)
        self._identities = Identities(connection)
        self._lock = threading.Lock()
        self._refusal: errors.SparklogError | None = None
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
        """Takes a record to be sent; returns at once, unless the buffer is full.

        Args:
            topic: must exist.
            value: bytes, or what `value_serializer` takes; None is a tombstone.
            key: bytes, or what `key_serializer` takes; records with the same key keep their order.
            headers: names and bytes, as pairs or a mapping.
            timestamp: a datetime with a zone, a time in ISO 8601 (UTC without a zone), or an int of
                *milliseconds* since 1970, as in Kafka's clients; None: the time of arrival at the
                broker.
            partition: None: by the key, or any.
            on_delivery: called with (error or None, `RecordMetadata` or None) on the producer's
                thread. What it raises is logged; it must not wait for records of this topic.

        Raises:
            errors.WrongSchema: key, value, headers or timestamp is of another type.
            errors.RecordTooLarge: key, value and headers are over the broker's limit together.
            errors.BadTopicName, errors.UnknownTopic, errors.UnknownPartition: there is no such.
            errors.TimedOut: the buffer stayed full for `max_block_seconds`.
            errors.BrokerUnavailable: no broker could tell about the topic in that time.
            errors.BadRequest: the producer is closed.
        """
        try:
            sender = self._senders.get(topic) or self._sender_of(topic)
        except TypeError:  # it cannot even be looked up
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
        # What a record lacks costs it nothing: this runs for each one.
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

    def send_table(self, topic: str, data: Any) -> TableFuture:
        """Takes the rows of a table to be sent, after all that was sent to the topic before.

        Nothing is done for each row, so this is the way for bulk. Serializers and `on_delivery`
        are not asked.

        Args:
            topic: must exist.
            data: a `pa.Table`, `RecordBatch` or `RecordBatchReader`, a polars or pandas data frame,
                or anything else with `__arrow_c_stream__`. Columns: `value` (binary or string),
                and any of `key` (binary or string), `headers` (list of structs of key and value),
                `timestamp` (timestamp), `partition` (integer; null: by the key).

        Raises:
            As `send`. Rows of a reader that came before the wrong ones are sent; of all others
            nothing is.
        """
        sender = self._senders.get(topic) or self._sender_of(topic)
        pieces: Iterable[tuple[pa.RecordBatch, _Named]] = (
            self._conformed(sender, piece) for batch in _batches(data) for piece in _pieces(batch)
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
        """Returns when all that was sent before is decided, and its callbacks have run.

        Raises `TimedOut` after `timeout` seconds; None: waits as long as it takes. Failures are for
        the futures to tell.
        """
        timeout = arguments.timeout("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        for sender in list(self._senders.values()):
            if not sender.flush(deadline):
                raise errors.TimedOut(what="flush", timeout_seconds=timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flushes for up to `timeout` seconds, gives up what is left, and ends the threads.

        Raises `TimedOut` if something was left.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = errors.BadRequest(reason="the producer is closed")
        try:
            self.flush(timeout)
        finally:
            with self._lock:
                senders, self._senders = self._senders, {}
            for sender in senders.values():
                sender.close()

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
        info: wire.TopicInfo = self._connection.action(
            "topics.describe",
            wire.TopicName(topic=topic),
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
                    identities=self._identities,
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
        reason=f"a record's {what} is bytes, not {type(value).__name__}; encode it, or give the"
        f" producer a {what}_serializer"
    )


def _whole_number(partition: Any) -> int:
    try:
        if isinstance(partition, bool):
            raise TypeError
        return operator.index(partition)
    except TypeError as error:
        raise errors.WrongSchema(reason=f"a partition is an int, not {partition!r}") from error


def _pairs(headers: Headers) -> list[Header]:
    items: Iterable[Any] = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(items, Iterable):
        raise errors.WrongSchema(reason=f"headers are pairs of a name and bytes, not {headers!r}")
    pairs = []
    for item in items:
        match item:
            case (str() as name, (bytes() | None) as data):
                pairs.append((name, data))
            case _:
                raise errors.WrongSchema(reason=f"a header is a name and bytes, not {item!r}")
    return pairs


def _utf8_bytes(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as error:
        raise errors.WrongSchema(reason=f"a header's name is no UTF-8: {error}") from error


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
            reason=f"a table is Arrow's, polars' or pandas', not {type(data).__name__}"
        )


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """`batch`, in pieces that are good to send."""
    rows = batch.num_rows
    is_small = rows <= limits.TABLE_BATCH_ROWS and batch.nbytes <= limits.TABLE_BATCH_BYTES
    if is_small or rows == 1:
        if rows:
            yield batch
        return
    yield from _pieces(batch.slice(0, rows // 2))
    yield from _pieces(batch.slice(rows // 2))


def _partition_numbers(column: pa.Array) -> npt.NDArray[np.int32]:
    """-1 where there is none."""
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
