"""Batches that clients send: Arrow's messages as record batches, with bounded dictionaries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.flight import protocol
from sparklog.broker.flight.grpc.call import Call, Message
from sparklog.broker.flight.protocol import FlightData
from sparklog.broker.flight.streams import OpenStream

_DICTIONARY_BYTES = 32 * limits.MIB  # of columns that foreign clients send with dictionaries


class Dictionaries:
    """The memory for Arrow dictionaries of all streams together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held_bytes = 0

    def keep(self, size_bytes: int) -> None:
        """Counts a dictionary. Raises `BadRequest` if that would exceed the limit."""
        with self._lock:
            if self._held_bytes + size_bytes > _DICTIONARY_BYTES:
                raise errors.BadRequest(
                    reason="dictionaries take too much memory: send columns without dictionaries"
                )
            self._held_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= size_bytes


class StreamBatches:
    """Reads the batches of one stream with their app metadata. Raises `BadRequest` and `PeerGone`.

    Batches without dictionaries, as sparklog's clients send them, are read in place. For others,
    Arrow rereads the schema and dictionaries with each batch, as one stream.
    """

    def __init__(self, call: Call, stream: OpenStream, dictionaries: Dictionaries) -> None:
        self._call = call
        self._stream = stream
        self._dictionaries = dictionaries
        self._start: list[pa.Buffer] = []
        """The encoded schema and dictionaries."""
        self._kept_bytes = 0
        first = call.read()
        flight_data = FlightData() if first is None else protocol.read_flight_data(first.data)
        self.command = flight_data.command
        """The command in the stream's descriptor."""
        self._schema: pa.Schema | None = None
        self._has_dictionaries = False
        if flight_data.metadata:
            self._begin(flight_data)

    def next(self) -> tuple[pa.RecordBatch | None, bytes | None] | None:
        """Returns (batch or None, app metadata) of the next message; None at the stream's end."""
        while True:
            self._stream.waits()
            message = self._call.read()
            self._stream.advance()
            if message is None:
                return None
            flight_data = protocol.read_flight_data(message.data)
            if not flight_data.metadata:
                return None, flight_data.app_metadata
            kind = protocol.message_type(flight_data.metadata)
            if kind == protocol.RECORD_BATCH:
                return self._batch(message, flight_data), flight_data.app_metadata
            if kind != protocol.DICTIONARY_BATCH or not self._has_dictionaries:
                raise errors.BadRequest(reason="an Arrow message is not a batch")
            self._keep(flight_data)

    def close(self) -> None:
        """Releases the dictionaries."""
        self._start.clear()
        self._dictionaries.give(self._kept_bytes)
        self._kept_bytes = 0

    def _begin(self, flight_data: FlightData) -> None:
        if protocol.message_type(flight_data.metadata or b"") != protocol.SCHEMA:
            raise errors.BadRequest(reason="a stream of batches begins with its schema")
        start = protocol.encapsulated(flight_data)
        with _malformed_arrow():
            self._schema = pa.ipc.read_schema(start)
        self._has_dictionaries = any(_has_dictionary(each.type) for each in self._schema)
        self._start.append(start)

    def _keep(self, flight_data: FlightData) -> None:
        kept = protocol.encapsulated(flight_data)
        self._dictionaries.keep(kept.size)
        self._kept_bytes += kept.size
        self._start.append(kept)

    def _batch(self, message: Message, flight_data: FlightData) -> pa.RecordBatch:
        if self._schema is None:
            raise errors.BadRequest(reason="a stream of batches begins with its schema")
        data = protocol.in_place(message.buffer, message.start, flight_data)
        with _malformed_arrow():
            if not self._has_dictionaries:
                return pa.ipc.read_record_batch(data, self._schema)
            whole = pa.py_buffer(b"".join([*self._start, data]))
            return pa.ipc.open_stream(whole).read_next_batch()


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))


@contextlib.contextmanager
def _malformed_arrow() -> Iterator[None]:
    """Turns Arrow's exceptions for malformed bytes into `BadRequest`."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise errors.BadRequest(reason=str(error)) from error
