"""The ways to the brokers: the stream to each, and the partitions that take turns on it.

A Flight stream has one schema. It is opened with the columns that its first part needs; a part that
needs more ends it, and the next is as wide as any part so far.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import pyarrow as pa

from sparklog import errors, wire
from sparklog.client.batch import Part
from sparklog.client.connection import Backoff, Channel, failure_of
from sparklog.client.lane import Lane
from sparklog.record import PAYLOAD_SCHEMA

_log = logging.getLogger(__name__)


class Stream:
    """One DoPut. `write_lock` keeps writing and closing apart, which Flight does not."""

    __slots__ = (
        "awaiting",
        "channel",
        "columns",
        "reader",
        "retiring",
        "schema",
        "write_lock",
        "writer",
    )

    def __init__(self, channel: Channel, topic: str, columns: frozenset[str]) -> None:
        self.channel = channel
        self.columns = columns
        self.schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in columns])
        self.awaiting: deque[tuple[SendingPartition, Part]] = deque()
        """Sent, not answered; answers come in this order."""
        self.retiring = False
        self.write_lock = threading.Lock()
        self.writer, self.reader = channel.append(topic, self.schema)

    def write(self, part: Part, payload: pa.RecordBatch, *, pipelined: bool) -> None:
        identity = part.identity
        assert identity is not None
        header = wire.AppendHeader(
            partition=part.partition,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=part.sequence,
            pipelined=pipelined,
        )
        if payload.schema.names != self.schema.names:
            payload = _widened(payload, self.schema)
        with self.write_lock:
            self.writer.write_with_metadata(payload, wire.encode(header))

    def read(self) -> wire.AppendReply | None:
        """The next answer; None: the stream ended, and `close` tells why."""
        data = self.reader.read()
        return None if data is None else wire.decode(wire.AppendReply, data)

    def retire(self) -> None:
        """No more batches; the reading thread sees the end after the last answer."""
        self.retiring = True
        with self.write_lock:
            try:
                self.writer.done_writing()
            except (pa.ArrowException, OSError):
                _log.debug("a stream to %s was broken already", self.channel.address)

    def fits(self, part: Part) -> bool:
        return self.columns.issuperset(part.payload.schema.names)

    def close(self) -> errors.SparklogError | None:
        """What ended the stream; None: we did."""
        with self.write_lock:
            try:
                self.writer.close()
            except (pa.ArrowException, OSError) as error:
                return failure_of(error, self.channel.address)
        return None


def _widened(payload: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        index = payload.schema.get_field_index(field.name)
        absent = index < 0
        columns.append(pa.nulls(payload.num_rows, field.type) if absent else payload.column(index))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class SendingPartition:
    """A lane, and the way it takes now."""

    __slots__ = ("backoff", "in_line", "lane", "retry_at", "route")

    def __init__(self, lane: Lane, route: Route, backoff: Backoff) -> None:
        self.lane = lane
        self.route = route
        self.backoff = backoff
        self.retry_at = 0.0
        """Held until then, monotonic seconds; 0: not held."""
        self.in_line = False

    @property
    def may_send(self) -> bool:
        ready = self.lane.sendable is not None or self.lane.wants_identity
        return ready and self.retry_at == 0.0


class Route:
    """The way to one broker."""

    __slots__ = ("backoff", "broker", "careful", "line", "retry_at", "stream")

    def __init__(self, broker: int, backoff: Backoff) -> None:
        self.broker = broker
        self.backoff = backoff
        self.retry_at = 0.0
        """Not used before then, monotonic seconds."""
        self.stream: Stream | None = None
        self.line: deque[SendingPartition] = deque()
        """Those that may have something to send; they take turns."""
        self.careful = False
        """One part at a time: the last stream was refused, and any of several may be the cause."""

    @property
    def may_write(self) -> bool:
        """Whether the first in line may send now, whatever `retry_at` says."""
        while self.line and not self.line[0].may_send:
            self.line.popleft().in_line = False
        stream = self.stream
        if not self.line or stream is None:
            return bool(self.line)
        return not (stream.retiring or (self.careful and stream.awaiting))

    @property
    def may_write_here(self) -> bool:
        """Whether the first in line may send now, on the stream as it is."""
        part = self.line[0].lane.sendable if self.may_write else None
        return part is not None and self.stream is not None and self.stream.fits(part)
