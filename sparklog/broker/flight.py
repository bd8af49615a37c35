"""The Arrow Flight door: `wire`'s messages to calls of `core`, and back. It decides nothing.

A refused batch is answered in its turn and does not end its stream; anything else that is wrong
ends the call with an error that carries `wire.ErrorReply`. Bytes that make no sense never stop the
broker: they end the call that brought them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import structlog

from sparklog import errors, wire
from sparklog.broker.core import Batch, Core
from sparklog.broker.producers import NO_PRODUCER, Stamp
from sparklog.broker.writer import Ticket
from sparklog.record import ROW_SCHEMA

_log = structlog.get_logger("sparklog.flight")
_WINDOW_BATCHES = 16
"""Batches of one stream that may wait for their ack while the stream is read on."""


class FlightDoor(flight.FlightServerBase):  # type: ignore[misc]
    """Serves `core` at `listen` (`host:port`; port 0 takes a free one) from construction on."""

    def __init__(self, core: Core, listen: str) -> None:
        self._core = core
        self._host = listen.rpartition(":")[0] or "127.0.0.1"
        self.calls = 0
        self.open_calls = 0
        super().__init__(f"grpc://{listen}")

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    # -------------------------------------------------------------------------- append

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._call():
            topic = wire.decode(wire.AppendStream, descriptor.command).topic
            waiting: deque[Ticket | errors.SparklogError] = deque()
            try:
                for chunk in reader:
                    header = _append_header(chunk.app_metadata)
                    waiting.append(self._append(topic, header, chunk.data))
                    while waiting and not (header.more and len(waiting) < _WINDOW_BATCHES):
                        writer.write(wire.encode(self._reply(waiting.popleft())))
            finally:
                # A stream that broke leaves nothing in the queue that nobody waits for.
                for ticket in waiting:
                    self._reply(ticket)

    def _append(
        self, topic: str, header: wire.AppendHeader, batch: pa.RecordBatch
    ) -> Ticket | errors.SparklogError:
        stamp = None
        if header.producer_id != NO_PRODUCER:
            stamp = Stamp(header.producer_id, header.producer_epoch, header.base_sequence)
        try:
            return self._core.append(topic, header.partition, batch, stamp)
        except errors.SparklogError as error:
            return error

    def _reply(self, waiting: Ticket | errors.SparklogError) -> wire.AppendReply:
        try:
            if isinstance(waiting, errors.SparklogError):
                raise waiting
            result = self._core.wait(waiting)[0]
        except errors.SparklogError as error:
            return wire.AppendReply(error=wire.ErrorReply.of(error))
        except Exception as error:  # the writer ended: its error is about to stop the broker
            unknown = errors.OutcomeUnknown(what="the append", reason=str(error))
            return wire.AppendReply(error=wire.ErrorReply.of(unknown))
        return wire.AppendReply(
            base_offset=result.base_offset,
            timestamp_us=result.arrival_us,
            timestamp_type=result.timestamp_type,
        )

    # -------------------------------------------------------------------------- read

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        with self._call():
            request = wire.decode(wire.ReadTicket, ticket.ticket)
            schema = _schema(request.columns)
            batches = self._core.read(
                request.topic,
                request.partition,
                request.start,
                request.end,
                columns=request.columns,
                topic_id=request.topic_id,
            )
            return flight.GeneratorStream(schema, self._rows(batches))

    def _rows(self, batches: Iterator[Batch]) -> Iterator[pa.RecordBatch]:
        with self._call():
            for batch in batches:
                yield batch.rows

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._call():
            request = wire.decode(wire.TailRequest, descriptor.command)
            schema = _schema(request.columns)
            writer.begin(schema)
            idle = schema.empty_table().to_batches() or [_empty(schema)]
            for batch in self._core.tail(
                request.positions,
                columns=request.columns,
                idle_seconds=request.heartbeat_ms / 1e3,
            ):
                if context.is_cancelled():
                    return
                if batch is None:
                    writer.write_with_metadata(idle[0], wire.encode(wire.TailHeader(idle=True)))
                    continue
                header = wire.TailHeader(
                    topic=batch.topic,
                    partition=batch.partition,
                    first=batch.first,
                    end=batch.end,
                    high_watermark=batch.high_watermark,
                )
                writer.write_with_metadata(batch.rows, wire.encode(header))

    # -------------------------------------------------------------------------- admin

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> list[flight.Result]:
        with self._call():
            known = wire.ACTIONS.get(action.type)
            if known is None:
                raise errors.BadRequest(reason=f"no action is named {action.type!r}")
            request = wire.decode(known[0], action.body.to_pybytes() or b"{}")
            reply = self._answer(action.type, request)
            return [flight.Result(pa.py_buffer(wire.encode(reply)))]

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [(name, request.__name__) for name, (request, _) in wire.ACTIONS.items()]

    def _answer(self, name: str, request: Any) -> msgspec.Struct:
        core = self._core
        match name:
            case "cluster":
                return core.cluster()
            case "topics.list":
                return core.topics()
            case "topics.create":
                return core.create_topic(request)
            case "topics.describe":
                return core.describe(request.topic)
            case "topics.alter":
                return core.alter(request)
            case "topics.add_partitions":
                return core.add_partitions(request)
            case "topics.delete":
                core.delete_topic(request.topic)
                return wire.Empty()
            case "topics.compact":
                return core.compact(request.topic)
            case "offsets.for_times":
                return core.offsets_for_times(request)
            case "producers.new":
                return core.new_producer()
            case "batches.adopt":
                return core.adopt(request)
            case "publish.now":
                core.publish_all(request)
                return wire.Empty()
        raise errors.BadRequest(reason=f"action {name!r} is not served here")

    def _call(self) -> _Call:
        return _Call(self)


class _Call:
    """One call: counted while it runs, and whatever it raises in the wire's form."""

    def __init__(self, door: FlightDoor) -> None:
        self._door = door

    def __enter__(self) -> None:
        self._door.calls += 1
        self._door.open_calls += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._door.open_calls -= 1
        if error is None or isinstance(error, (flight.FlightError, GeneratorExit)):
            return
        if isinstance(error, errors.SparklogError):
            reply = wire.ErrorReply.of(error)
        elif isinstance(error, pa.ArrowException):  # the peer went, or sent what is no Arrow
            reply = wire.ErrorReply.of(errors.BadRequest(reason=str(error)))
        elif isinstance(error, Exception):
            _log.error("call failed", exc_info=error)
            reply = wire.ErrorReply(code="error", facts={"reason": repr(error)})
        else:
            return
        raise flight.FlightServerError(str(error), extra_info=wire.encode(reply)) from error


def _append_header(metadata: pa.Buffer | None) -> wire.AppendHeader:
    if metadata is None:
        raise errors.BadRequest(reason="a batch without AppendHeader")
    return wire.decode(wire.AppendHeader, memoryview(metadata))


def _schema(columns: list[str] | None) -> pa.Schema:
    if columns is None:
        return ROW_SCHEMA
    unknown = [name for name in columns if name not in ROW_SCHEMA.names]
    if unknown or not columns:
        raise errors.BadRequest(reason=f"columns {unknown or columns}: of {ROW_SCHEMA.names}")
    return pa.schema([ROW_SCHEMA.field(name) for name in columns])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
