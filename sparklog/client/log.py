"""The log that `sparklog.connect` returns: topics, groups, producers, consumers and tables.

All calls block and use plain threads, so they work in a notebook, where an event loop is already
running. The modules of producers, consumers and tables are loaded by the calls that need them,
because a program that only administers topics starts in half the time without them.
"""

from __future__ import annotations

import contextlib
import html
import re
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Self

from sparklog import errors, limits
from sparklog.client import arguments
from sparklog.client.admin import Admin
from sparklog.client.connection import Connection
from sparklog.client.offsets import Points, Start, check_time, describe, everywhere, offsets_of
from sparklog.client.serialize import Deserializer, Serializer
from sparklog.display import html_table
from sparklog.formats import flight_messages, topic_config
from sparklog.formats.topic_names import INTERNAL_TOPICS

if TYPE_CHECKING:
    import pyarrow as pa

    from sparklog.client.consumer.consumer import Consumer
    from sparklog.client.consumer.group_fetcher import OnPartitions
    from sparklog.client.json_frames import ValueFormat
    from sparklog.client.producer.batch import OnDelivery
    from sparklog.client.producer.producer import Partitioner, Producer
    from sparklog.formats.values.proposal import Proposal

_REPR_SECONDS = 1.0
"""Time limit for all requests of one notebook display together."""
_REPR_TOPICS = 50
_ANSWER_SECONDS = 5.0


class Log(Admin):
    """A client for one cluster, and the owner of the producers and consumers that it opens.

    Args:
        connection: to the brokers; closed with the log.
        root: the root or address that was given; shown by `repr`.
        on_close: called last by `close`, for example to stop an embedded broker.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        root: str = "",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(connection)
        self.root = root
        self._on_close = on_close
        self._clients: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()

    # -------------------------------------------------------------------------- records

    @arguments.suggests_keywords
    def producer(
        self,
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
    ) -> Producer:
        """Opens an idempotent producer, which any number of threads may share.

        Args:
            linger_ms: how long a record may wait for others to fill its batch, in milliseconds; 5
                by default. Waiting for a record's future sends its batch immediately.
            batch_rows: maximum number of records in a batch; 10,000 by default.
            batch_bytes: maximum size of a batch's keys and values, in bytes; 1 MiB by default.
            buffer_bytes: memory for records that are not yet acked; 64 MiB by default. When it is
                full, `send` blocks.
            max_block_seconds: how long `send` blocks for memory, or for a broker to describe the
                topic; 60 s by default.
            delivery_timeout_seconds: how long a record may wait for its ack; 120 s by default.
                After that its future raises `TimedOut` or `OutcomeUnknown`.
            partitioner: chooses the partition of a record sent without one, from its topic, its key
                (bytes or None) and the number of partitions. None: murmur2 of the key, as in
                Kafka's Java client; records without a key go to one partition per batch, in turn.
            key_serializer: returns the bytes of a key that is not None.
            value_serializer: returns the bytes of a value that is not None.
            on_delivery: called for each record of `send` with (error or None, `RecordMetadata` or
                None), on one of the producer's threads.

        Raises:
            errors.BadOption: an argument has the wrong type or is out of range.
            errors.BadRequest: the log is closed.
            TypeError: an unknown keyword; the message names the nearest parameter.
        """
        from sparklog.client.producer.producer import Producer

        producer = Producer(
            self.connection,
            linger_ms=linger_ms,
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            max_block_seconds=max_block_seconds,
            delivery_timeout_seconds=delivery_timeout_seconds,
            partitioner=partitioner,
            key_serializer=key_serializer,
            value_serializer=value_serializer,
            on_delivery=on_delivery,
        )
        self._clients.add(producer)
        return producer

    @arguments.suggests_keywords
    def consumer(
        self,
        topics: str | Iterable[str] | re.Pattern[str] | None = None,
        *,
        start: Start = "earliest",
        follow: bool = True,
        columns: Iterable[str] | None = None,
        max_poll_rows: int = limits.CONSUMER_POLL_ROWS,
        buffer_bytes: int = limits.CONSUMER_BUFFER_BYTES,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        metadata_age_seconds: float = limits.METADATA_AGE_SECONDS,
        group: str | None = None,
        auto_commit: bool = True,
        auto_commit_seconds: float = limits.AUTO_COMMIT_SECONDS,
        assignors: Iterable[str] = ("range", "roundrobin"),
        instance_id: str | None = None,
        client_id: str = "sparklog",
        session_timeout_seconds: float = limits.SESSION_TIMEOUT_SECONDS,
        heartbeat_seconds: float = limits.GROUP_HEARTBEAT_SECONDS,
        max_poll_interval_seconds: float = limits.MAX_POLL_INTERVAL_SECONDS,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
    ) -> Consumer:
        """Opens a consumer, standalone or as a member of a group, for use by a single thread.

        Kafka's own consumers can be members of the same group. If a deserializer rejects a record,
        `DeserializationFailed` is raised; `Consumer.poll` describes how to skip it.

        Args:
            topics: one or more names, which must exist; in a group also a compiled pattern, which
                matches whole names. None: only without a group; `assign` sets the partitions.
            start: "earliest" (the default), "latest", an offset, a time (a datetime with a zone, or
                ISO 8601), or one of these by partition: `{("t", 0): 12}` or `{"t": {0: 12}}`;
                partitions not listed begin at the earliest offset. In a group it applies only to
                partitions without a valid committed offset; "error" raises for them.
            follow: wait for new records indefinitely (the default). False: stop at the end offsets
                as of when the consumer is opened or, in a group, is assigned the partition.
            columns: the columns to fetch; all by default. A `Record` has None for the others. For a
                single topic also typed columns of its table, which only `batches` returns: those
                that the topic has when the consumer is opened.
            max_poll_rows: maximum number of records that one `poll` returns; 1,000 by default.
            buffer_bytes: memory for records that are read ahead; 32 MiB by default.
            key_deserializer: returns a key from its bytes; a null key stays None.
            value_deserializer: returns a value from its bytes; a tombstone stays None.
            metadata_age_seconds: how often to check for new partitions and, with a pattern, for new
                topics; 30 s by default.
            group: the name of a consumer group, whose members share the partitions. None: the
                consumer reads all partitions.
            auto_commit: commit positions periodically and before partitions are revoked (the
                default). False: commit only when `commit` is called.
            auto_commit_seconds: the interval between these commits; 5 s by default.
            assignors: those that the leader of the group may use, in order of preference: "range",
                "roundrobin" and "cooperative-sticky". With only the last one, members keep reading
                the partitions that do not move (KIP-429).
            instance_id: makes the consumer a static member (KIP-345), which keeps its partitions if
                it returns within the session timeout.
            client_id: the name that `describe_group` and the broker's log show.
            session_timeout_seconds: after this time without a heartbeat the group removes the
                member; 45 s by default, within the bounds of the broker's settings.
            heartbeat_seconds: the interval of heartbeats; 3 s by default.
            max_poll_interval_seconds: after this time without a `poll` the consumer leaves the
                group, and rejoins at the next one; 300 s by default. A rebalance waits for that
                long for members to join.
            on_assign: called with newly assigned partitions; it may `seek` in them.
            on_revoke: called with the partitions that the consumer is about to lose; it may
                `commit`.
            on_lost: called with the partitions lost when the group has removed the consumer, which
                can no longer commit there. None: `on_revoke` is called.

        Raises:
            errors.UnknownTopic, errors.UnknownPartition: a topic or partition does not exist.
            errors.OffsetOutOfRange: a start beyond the end of a partition, without `follow`.
            errors.WrongSchema: an unknown column.
            errors.BadOption: an argument has the wrong type or is out of range, or applies only to
                members of a group and `group` is None.
            errors.BadRequest: the log is closed.
            TypeError: an unknown keyword; the message names the nearest parameter.
        """
        from sparklog.client.consumer.consumer import Consumer

        consumer = Consumer(
            self.connection,
            topics,
            start=start,
            follow=follow,
            columns=columns,
            max_poll_rows=max_poll_rows,
            buffer_bytes=buffer_bytes,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            metadata_age_seconds=metadata_age_seconds,
            group=group,
            auto_commit=auto_commit,
            auto_commit_seconds=auto_commit_seconds,
            assignors=assignors,
            instance_id=instance_id,
            client_id=client_id,
            session_timeout_seconds=session_timeout_seconds,
            heartbeat_seconds=heartbeat_seconds,
            max_poll_interval_seconds=max_poll_interval_seconds,
            on_assign=on_assign,
            on_revoke=on_revoke,
            on_lost=on_lost,
        )
        self._clients.add(consumer)
        return consumer

    def read(
        self,
        topic: str,
        start: Points | None = None,
        end: Points | None = None,
        columns: Iterable[str] | None = None,
        partitions: Iterable[int] | None = None,
        *,
        values: ValueFormat = "bytes",
    ) -> pa.Table:
        """Reads records of a topic into a table, in order of partition and offset.

        Args:
            topic: must exist.
            start: the first offset, or a time (a datetime with a zone, or ISO 8601), or one of
                these by partition; None: the earliest.
            end: like `start`, but exclusive; None: the end at the time of the call.
            columns: the columns to return, in this order; None: all, the typed ones last.
            partitions: their numbers; None: all.
            values: the type of the column `value`. "bytes": binary; "text": string; "json": the
                common type of all decoded values, a struct for objects. A tombstone is null.

        Raises:
            errors.UnknownTopic, errors.UnknownPartition: the topic or partition does not exist.
            errors.WrongSchema: an unknown column; or JSON values without a common type, such as a
                number in one record and a string in another.
            errors.BadValue: a value is not UTF-8 or JSON; the error names its partition and offset.
            errors.OffsetOutOfRange: start or end is outside a partition's offsets.
            errors.BadOption: a start after the end.
        """
        # pyarrow.compute and JSON, which no other method needs.
        from sparklog.client.table_reading import read_table

        return read_table(
            self.connection,
            topic,
            start=start,
            end=end,
            columns=columns,
            partitions=partitions,
            values=values,
        )

    def propose_columns(self, topic: str, records: int = 1_000) -> Proposal:
        """Returns typed columns for fields of the newest records that the table has none for.

        Its values are JSON objects, or with `value.format=avro` Avro with schemas of a registry.
        `log.alter(topic, {"value.format": "json", "value.schema": proposal.schema})` adds the
        columns; the format is that of the topic. Raises what `read` raises.

        Args:
            topic: must exist.
            records: how many to examine, of all partitions together.
        """
        from sparklog.client.schemas import BrokerSchemas
        from sparklog.client.table_reading import propose_of_schemas, read_newest
        from sparklog.formats.values.proposal import propose

        info = describe(self.connection, arguments.topic(topic))
        count = arguments.whole("records", records)
        values = read_newest(self.connection, info, count).column("value")
        if topic_config.is_avro(info.config):
            schemas = BrokerSchemas(self.connection, topic)
            return propose_of_schemas(values, schemas, info.known_columns)
        return propose(values.to_pylist(), info.known_columns)

    def offsets_for_times(self, topic: str, when: datetime | str) -> dict[int, int]:
        """Returns, by partition, the offset of the first record at `when` or later, or the end.

        Raises `BadOption` if `when` is neither a datetime with a zone nor a time in ISO 8601.
        """
        when = check_time("when", when)
        info = describe(self.connection, arguments.topic(topic))
        points = dict.fromkeys(range(len(info.partitions)), when)
        return offsets_of(self.connection, info, points)

    def flush_to_table(
        self, topics: str | Iterable[str] | None = None, *, timeout_seconds: float = 60.0
    ) -> None:
        """Waits until all records acked so far are in the topics' Delta tables.

        Args:
            topics: one name or several; None: all topics.
            timeout_seconds: after this time `TimedOut` is raised; publishing continues.
        """
        names = [topics] if isinstance(topics, str) else topics
        timeout_seconds = arguments.number("timeout_seconds", timeout_seconds, least=0)
        request = flight_messages.PublishNow(
            topics=None if names is None else arguments.texts("topics", names),
            timeout_seconds=timeout_seconds,
        )
        for _ in range(2):  # records may have moved to a broker that had already answered
            # The broker applies the timeout; the extra time is for its answer.
            replies = everywhere(
                self.connection,
                "publish.now",
                request,
                timeout_seconds=timeout_seconds + _ANSWER_SECONDS,
            )
            if len(replies) == 1:
                return

    # -------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Flushes and closes the producers, closes the consumers and the connection."""
        with contextlib.ExitStack() as stack:
            # Clients first, the broker last; each is closed even if closing another one fails.
            if self._on_close is not None:
                stack.callback(self._on_close)
                self._on_close = None
            stack.callback(self.connection.close)
            for client in list(self._clients):
                stack.callback(client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------- display

    def __repr__(self) -> str:
        return f"Log({self.root!r})"

    def _repr_html_(self) -> str:
        deadline = self.connection.clock.monotonic() + _REPR_SECONDS
        rows: list[tuple[object, ...]] = []
        try:
            found = self.connection.action("topics.list", timeout_seconds=_REPR_SECONDS)
            names = [name for name in sorted(found.topics) if name not in INTERNAL_TOPICS]
            for name in names[:_REPR_TOPICS]:
                left_seconds = deadline - self.connection.clock.monotonic()
                if left_seconds <= 0:
                    break
                info = self.connection.action(
                    "topics.describe",
                    flight_messages.TopicName(topic=name),
                    timeout_seconds=left_seconds,
                )
                count = sum(each.end - each.start for each in info.partitions)
                rows.append((name, len(info.partitions), count))
        except errors.SparklogError as error:
            return f"<b>{html.escape(repr(self))}</b> {html.escape(str(error))}"
        if len(rows) < len(names):
            rows.append((f"… and {len(names) - len(rows):,} more", None, None))
        return html_table(repr(self), ("topic", "partitions", "offsets"), rows)
