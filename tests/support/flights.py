"""Our messages sent over plain Arrow Flight, by a client that never retries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparklog import errors
from sparklog.client.flight_client import failure_of
from sparklog.formats import flight_messages
from tests.support.brokers import payload


class BrokerClient:
    """A channel to a broker. Refusals are raised as the broker's own errors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.flight = flight.FlightClient(
            f"grpc://{address}", generic_options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def close(self) -> None:
        self.flight.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def action(self, name: str, request: msgspec.Struct | None = None) -> Any:
        """Returns the reply."""
        return flight_messages.decode(
            flight_messages.ACTIONS[name][1],
            self.raw_action(name, flight_messages.encode(request or flight_messages.Empty())),
        )

    def raw_action(self, name: str, body: bytes) -> bytes:
        """Returns the reply's bytes."""
        try:
            (result,) = self.flight.do_action(flight.Action(name, body))
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self.address) from None
        return result.body.to_pybytes()

    def create(
        self, topic: str = "t", partitions: int = 1, **config: str
    ) -> flight_messages.TopicInfo:
        """Creates a topic; underscores in keys of `config` stand for dots."""
        named = {key.replace("_", "."): value for key, value in config.items()}
        request = flight_messages.CreateTopic(topic=topic, partitions=partitions, config=named)
        info: flight_messages.TopicInfo = self.action("topics.create", request)
        return info

    def describe(self, topic: str = "t") -> flight_messages.TopicInfo:
        info: flight_messages.TopicInfo = self.action(
            "topics.describe", flight_messages.TopicName(topic=topic)
        )
        return info

    def append(
        self, values: Sequence[str | bytes | None], *, topic: str = "t", partition: int = 0
    ) -> flight_messages.AppendReply:
        """Appends one batch in its own stream. Raises the error that refused it."""
        batch = payload(values)
        with Stream(self, topic, batch.schema) as stream:
            return stream.append(batch, flight_messages.AppendHeader(partition=partition))

    def read(
        self, start: int, end: int, *, topic: str = "t", partition: int = 0, **options: Any
    ) -> pa.Table:
        """Reads the rows of a range."""
        ticket = flight_messages.ReadTicket(
            topic=topic, partition=partition, start=start, end=end, **options
        )
        return self.raw_read(flight_messages.encode(ticket))

    def raw_read(self, ticket: bytes) -> pa.Table:
        """Reads any ticket."""
        try:
            return self.flight.do_get(flight.Ticket(ticket)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self.address) from None

    def values(self, topic: str = "t", partition: int = 0) -> list[bytes | None]:
        """All values of a partition; asserts that its offsets rise by one from 0."""
        end = self.describe(topic).partitions[partition].end
        rows = self.read(0, end, topic=topic, partition=partition)
        assert rows.column("offset").to_pylist() == list(range(end))
        found: list[bytes | None] = rows.column("value").to_pylist()
        return found

    def tail(
        self, request: flight_messages.TailRequest
    ) -> Iterator[tuple[pa.RecordBatch, flight_messages.TailHeader]]:
        """Yields batches until the caller stops."""
        descriptor = flight.FlightDescriptor.for_command(flight_messages.encode(request))
        writer, reader = self.flight.do_exchange(descriptor)
        try:
            while True:
                chunk = reader.read_chunk()
                yield (
                    chunk.data,
                    flight_messages.decode(
                        flight_messages.TailHeader, memoryview(chunk.app_metadata)
                    ),
                )
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self.address) from None
        finally:
            reader.cancel()
            with contextlib.suppress(pa.ArrowException):
                writer.close()


class Stream:
    """A DoPut stream to one topic."""

    def __init__(self, door: BrokerClient, topic: str, schema: pa.Schema) -> None:
        self._address = door.address
        command = flight_messages.encode(flight_messages.AppendStream(topic=topic))
        descriptor = flight.FlightDescriptor.for_command(command)
        try:
            self.writer, self.reader = door.flight.do_put(descriptor, schema)
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self._address) from None

    def send(self, batch: pa.RecordBatch, header: flight_messages.AppendHeader) -> None:
        """Sends a batch whose reply is read later."""
        self.writer.write_with_metadata(batch, flight_messages.encode(header))

    def reply(self) -> flight_messages.AppendReply:
        """Returns the next reply. Raises the error that refused the batch."""
        try:
            answer = self.reader.read()
            if answer is None:
                self.writer.close()  # which raises the reason
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self._address) from None
        if answer is None:
            raise errors.BrokerUnavailable(address=self._address, reason="the stream has ended")
        found = flight_messages.decode(flight_messages.AppendReply, memoryview(answer))
        if found.error is not None:
            raise found.error.exception()
        return found

    def append(
        self, batch: pa.RecordBatch, header: flight_messages.AppendHeader
    ) -> flight_messages.AppendReply:
        """Sends one batch and returns its reply."""
        try:
            self.send(batch, header)
        except (pa.ArrowException, OSError) as error:
            raise failure_of(error, self._address) from None
        return self.reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.writer.close()
        except (pa.ArrowException, OSError):
            if error is None:
                raise
