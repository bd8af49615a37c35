"""The stream to one broker, on which batches of a topic are written and their answers read."""

from __future__ import annotations

import logging
import threading

import pyarrow as pa

from sparklog import errors
from sparklog.client.connection import Channel, failure_of
from sparklog.client.producer.batch import PartitionBatch
from sparklog.client.producer.schedule import StreamState
from sparklog.formats import flight_messages
from sparklog.formats.record import PAYLOAD_SCHEMA

_log = logging.getLogger(__name__)


class ProducerStream(StreamState):
    """One DoPut. `write_lock` keeps writing and closing apart, which Flight does not."""

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
        """Returns the next answer; None: the stream ended, and `close` returns why."""
        data = self.reader.read()
        return None if data is None else flight_messages.decode(flight_messages.AppendReply, data)

    def end_writing(self) -> None:
        """Writes no more batches; the reading thread sees the end after the last answer."""
        self.is_ending = True
        with self.write_lock:
            try:
                self.writer.done_writing()
            except (pa.ArrowException, OSError):
                _log.debug("a stream to %s was broken already", self.channel.address)

    def close(self) -> errors.SparklogError | None:
        """Returns the failure that ended the stream; None: this side ended it."""
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
        is_absent = index < 0
        columns.append(
            pa.nulls(payload.num_rows, field.type) if is_absent else payload.column(index)
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema)
