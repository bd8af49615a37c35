"""The streams to the brokers, on which batches of a topic are written and their answers read."""

from __future__ import annotations

import logging
import threading
from typing import Final

import pyarrow as pa

from sparklog import errors
from sparklog.client.connection import (
    Channel,
    Connection,
    RetryLog,
    is_of_the_broker,
)
from sparklog.client.producer.batch import PartitionBatch
from sparklog.client.producer.buffer_pool import ProducerIds
from sparklog.client.producer.deliveries import Deliveries
from sparklog.client.producer.schedule import (
    NEVER,
    EndStream,
    GetProducerId,
    GivenUp,
    OpenStream,
    Route,
    SendingPartition,
    SendSchedule,
    StreamState,
    Write,
    is_final,
)
from sparklog.client.producer.threads import SenderThreads
from sparklog.formats import flight_messages
from sparklog.formats.record import PAYLOAD_SCHEMA

_log = logging.getLogger(__name__)
_REFUSALS: Final = (
    errors.QueueFull,
    errors.StorageFull,
    errors.StorageUnavailable,
    errors.TopicHeldBack,
)
"""Errors that may last until an operator acts."""

REQUEST_SECONDS: Final = 5.0
"""The maximum time that the sender thread waits for metadata or a producer id."""


class ProducerStream(StreamState):
    """One DoPut. `write_lock` serializes writing and closing, which Flight does not."""

    __slots__ = ("channel", "reader", "schema", "write_lock", "writer")

    def __init__(self, channel: Channel, topic: str, columns: frozenset[str]) -> None:
        super().__init__(columns)
        self.channel = channel
        self.schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in columns])
        self.write_lock = threading.Lock()
        self.writer, self.reader = channel.append(topic, self.schema)

    def write(self, part: PartitionBatch, payload: pa.RecordBatch, *, pipelined: bool) -> None:
        identity = part.identity
        assert identity is not None
        header = flight_messages.AppendHeader(
            partition=part.partition,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=part.sequence,
            pipelined=pipelined,
        )
        if payload.schema.names != self.schema.names:
            payload = _widened(payload, self.schema)
        with self.write_lock:
            self.writer.write_with_metadata(payload, flight_messages.encode(header))

    def read(self) -> flight_messages.AppendReply | None:
        """Returns the next answer; None: the stream ended, and `close` returns the reason."""
        data = self.reader.read()
        return None if data is None else flight_messages.decode(flight_messages.AppendReply, data)

    def end_writing(self) -> None:
        """Writes no more batches; the reading thread sees the end after the last answer."""
        self.is_ending = True
        with self.write_lock:
            try:
                self.writer.done_writing()
            except (pa.ArrowException, OSError):
                _log.debug("a stream to %s was already broken", self.channel.address)

    def close(self) -> errors.SparklogError | None:
        """Returns the failure that ended the stream; None: this side ended it."""
        with self.write_lock:
            try:
                self.writer.close()
            except (pa.ArrowException, OSError) as error:
                return self.channel.failure_of(error)
        return None


_Route = Route[ProducerStream]


class TopicStreams:
    """Writes the batches of one topic to streams to the brokers, and handles the answers.

    `lock` is the sender's. Each stream has its own thread, which reads the answers.
    """

    def __init__(
        self,
        topic: str,
        connection: Connection,
        producer_ids: ProducerIds,
        schedule: SendSchedule[ProducerStream],
        deliveries: Deliveries,
        threads: SenderThreads,
    ) -> None:
        self._topic = topic
        self._connection = connection
        self._producer_ids = producer_ids
        self._schedule = schedule
        self._deliveries = deliveries
        self._threads = threads
        self._lock = threads.lock
        self._now = connection.clock.monotonic
        self._retry_log = RetryLog(connection.clock)
        self._left: list[ProducerStream] = []
        """Streams that are no longer used; the sender thread ends them."""

    def write_all(self, *, may_wait: bool = True) -> None:
        """Writes everything that may be sent now.

        Only the sender thread may wait for a producer id or for a stream to open.
        """
        for route in self._schedule.routes:
            self._write_route(route, may_wait=may_wait)

    def _write_route(self, route: _Route, *, may_wait: bool) -> None:
        while True:
            with self._lock:
                step = self._schedule.next_write(route, self._now())
            match step:
                case Write():
                    self._write(step)
                case EndStream():
                    step.stream.end_writing()
                case GetProducerId() if may_wait:
                    self._get_producer_id(step.partition)
                case OpenStream() if may_wait:
                    self._open_stream(step)
                case _:
                    return

    def _write(self, step: Write[ProducerStream]) -> None:
        stream = step.stream
        try:
            for part, payload in step.batches:
                stream.write(part, payload, pipelined=step.is_pipelined)
        except (pa.ArrowException, OSError) as error:
            # The reading thread sees the stream end, and handles the unanswered batches.
            _log.debug("a stream to %s broke: %s", stream.channel.address, error)
            stream.end_writing()
        except BaseException:
            # A signal interrupted a caller that writes.
            stream.end_writing()
            raise

    def _get_producer_id(self, partition: SendingPartition) -> None:
        failure: errors.SparklogError | None = None
        try:
            is_first = partition.queue.identity is None
            ask = self._producer_ids.shared if is_first else self._producer_ids.fresh
            identity = ask(timeout_seconds=REQUEST_SECONDS)
        except errors.SparklogError as error:
            failure = error
        with self._lock:
            if failure is None:
                self._schedule.producer_id_granted(partition, identity)
            elif is_final(failure):
                self.give_up(NEVER, failure)
            else:
                _log.warning("no producer id for topic %s: %s", self._topic, failure)
                self._schedule.producer_id_failed(partition, failure, self._now())

    def _open_stream(self, step: OpenStream[ProducerStream]) -> None:
        route = step.route
        try:
            channel = self._connection.channel(route.broker)
        except errors.SparklogError as error:
            self._route_failed(route, None, error)
            return
        try:
            stream = ProducerStream(channel, self._topic, step.columns)
        except (pa.ArrowException, OSError) as error:
            self._route_failed(route, channel, channel.failure_of(error))
            return
        with self._lock:
            self._schedule.stream_opened(route, stream)
            self._threads.start(f"sparklog-acks-{self._topic}", self._read_answers, route, stream)

    def _route_failed(
        self, route: _Route, channel: Channel | None, error: errors.SparklogError
    ) -> None:
        """Delays the next use of `route`; gives up if no retry can help."""
        if channel is not None and not isinstance(error, errors.Invalid | errors.Corrupt):
            self._connection.broke(channel)
        with self._lock:
            if channel is None and is_final(error):
                self.give_up(NEVER, error)
            else:
                if self._retry_log.is_due():
                    _log.warning("sending to topic %s is retried: %s", self._topic, error)
                self._schedule.route_failed(
                    route,
                    error,
                    self._now(),
                    may_have_moved=self._connection.may_have_moved(error),
                )

    # -------------------------------------------------------------------------- answers

    def _read_answers(self, route: _Route, stream: ProducerStream) -> None:
        failure: errors.SparklogError | None = None
        try:
            while (reply := stream.read()) is not None:
                self._answered(route, stream, reply)
        except (pa.ArrowException, OSError, errors.SparklogError) as error:
            failure = stream.channel.failure_of(error)
        failure = stream.close() or failure
        with self._lock:
            self._threads.signal()
            if route.stream is not stream:
                return
            if failure is None and stream.awaiting:
                failure = errors.BrokerUnavailable(
                    address=stream.channel.address, reason="it ended the stream early"
                )
            self._deliveries.decide(
                self._schedule.stream_ended(route, stream, failure, self._now())
            )
        if failure is not None:
            self._route_failed(route, stream.channel, failure)

    def _answered(
        self, route: _Route, stream: ProducerStream, reply: flight_messages.AppendReply
    ) -> None:
        error = None if reply.error is None else reply.error.exception()
        with self._lock:
            if route.stream is not stream:
                return
            decided = self._schedule.answered(route, stream, error, self._now())
            if error is not None and not decided and self._retry_log.is_due():
                level = logging.WARNING if isinstance(error, _REFUSALS) else logging.INFO
                _log.log(level, "records to %s are sent again: %s", self._topic, error)
            self._deliveries.decide(decided, reply)
            self._threads.signal_if_ready()
        if error is not None and is_of_the_broker(error):
            self._connection.broke(stream.channel)
            stream.end_writing()

    # -------------------------------------------------------------------------- giving up

    def give_up(self, now: float, reason: errors.SparklogError) -> None:
        """Fails the batches whose deadline has passed by `now`. Requires `lock`."""
        given_up: GivenUp[ProducerStream] = self._schedule.give_up(now, reason)
        self._deliveries.decide(given_up.failed)
        self._deliveries.fail_late_unsplit(now, reason)
        for stream in given_up.abandoned:
            self._connection.broke(stream.channel)
        self._left += given_up.abandoned
        if self._left:
            self._threads.signal()
        self._threads.signal_if_ready()

    def leave_all(self) -> None:
        """Forgets the batches to be sent, and abandons the streams. Requires `lock`."""
        self._left += self._schedule.clear()

    def leave_idle(self) -> None:
        """Abandons the streams, on which nothing is in flight. Requires `lock`."""
        self._left += self._schedule.end_idle_streams()

    def end_left(self) -> None:
        """Ends abandoned streams; this takes time, so it does not hold the lock."""
        with self._lock:
            streams, self._left = self._left, []
        for stream in streams:
            stream.end_writing()


def _widened(payload: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        index = payload.schema.get_field_index(field.name)
        is_absent = index < 0
        columns.append(
            pa.nulls(payload.num_rows, field.type) if is_absent else payload.column(index)
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema)
