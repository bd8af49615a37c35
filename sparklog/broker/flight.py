"""The Arrow Flight door: `wire`'s messages to calls of `core`, and back. It decides nothing.

A refused batch is answered in its turn and does not end its stream; anything else that is wrong
ends the call with an error that carries `wire.ErrorReply`. Bytes that make no sense never stop the
broker: they end the call that brought them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final, Self, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import structlog

from sparklog import errors, limits, wire
from sparklog.broker import flightgroups
from sparklog.broker.coordinator import Coordinator
from sparklog.broker.core import Batch, Core, Ticket
from sparklog.broker.producers import NO_PRODUCER, Stamp
from sparklog.broker.streams import Stream, StreamBounds, Streams
from sparklog.clock import Clock, SystemClock
from sparklog.record import ROW_SCHEMA

_Append: TypeAlias = Ticket | errors.SparklogError
"""An append that was queued, or refused."""

_log = structlog.get_logger("sparklog.flight")
_WINDOW_BATCHES: Final = 16
"""Batches of one stream that may wait for their answer while the stream is read on."""
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_PATIENCE_SECONDS: Final = 0.3
"""How long calls may go on when the door closes, before their connections are cut."""
_CUTS: Final = 30
_AFTER_FAILURE_SECONDS: Final = 60.0
_LOOKS_OF_TIME: Final = 50
"""Of so much time at most one part is spent on looking after streams."""
_RECEIVED_AT: Final = 128
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""
_INFO_BYTES: Final = 256
_LOOK_SECONDS: Final = 0.5
"""How often an action that waits looks whether its client is still there."""


class FlightDoor(flight.FlightServerBase):
    """Serves core and groups at `listen` (`host:port`; port 0: a free one) from construction on."""

    def __init__(
        self,
        core: Core,
        groups: Coordinator,
        listen: str,
        *,
        bounds: StreamBounds | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._core = core
        self._ending = threading.Event()
        self._connections = _Connections()
        self._streams = Streams(
            bounds or StreamBounds(),
            clock=clock or SystemClock(),
            connections=self._connections,
        )
        self._waiting_actions = 0
        self._host = listen.rpartition(":")[0] or "127.0.0.1"
        self._counting = threading.Lock()
        self._actions: dict[str, Callable[[Any], flightgroups.Answer]] = {
            "cluster": lambda _: core.cluster(),
            "status": lambda _: core.status(),
            "topics.list": lambda _: core.topics(),
            "topics.create": core.create_topic,
            "topics.describe": lambda request: core.describe(request.topic),
            "topics.alter": core.alter,
            "topics.add_partitions": core.add_partitions,
            "topics.delete": _silently(lambda request: core.delete_topic(request.topic)),
            "topics.compact": lambda request: core.compact(request.topic),
            "records.delete": core.delete_records,
            "offsets.for_times": core.offsets_for_times,
            "producers.new": lambda _: core.new_producer(),
            "batches.adopt": core.adopt,
            "publish.now": _silently(core.publish_all),
            **flightgroups.actions(groups),
        }
        self.calls = 0
        self.open_calls = 0
        super().__init__(f"grpc://{listen}")
        self._connections.port = self.port
        threading.Thread(target=self._watch, name="sparklog-streams", daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port`, with the port that was taken."""
        return f"{self._host}:{self.port}"

    def close(self) -> None:
        """Returns when nobody is served any more; a stream that does not end by itself is cut off.

        Flight waits for open calls without an end, and a producer may keep its stream for ever.
        """
        self._ending.set()
        connections = _Connections(self.port)
        ending = threading.Thread(target=self.shutdown, name="sparklog-door", daemon=True)
        ending.start()
        for _ in range(_CUTS):
            ending.join(_PATIENCE_SECONDS)
            if not ending.is_alive():
                return
            connections.cut_all()
        _log.warning("calls go on although their connections are cut", open_calls=self.open_calls)

    def _watch(self) -> None:
        pause_seconds = limits.FLIGHT_LOOK_SECONDS
        while not self._ending.wait(pause_seconds):
            began = time.monotonic()
            try:
                self._streams.tick()
            except Exception as error:  # nothing of it may end the broker
                _log.error("cannot look after the open streams", exc_info=error)
                pause_seconds = _AFTER_FAILURE_SECONDS
                continue
            # A process with thousands of connections takes milliseconds for it.
            spent_seconds = time.monotonic() - began
            pause_seconds = max(limits.FLIGHT_LOOK_SECONDS, _LOOKS_OF_TIME * spent_seconds)

    # -------------------------------------------------------------------------- append

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._call(), self._streams.open(_peer(context), sends=True) as stream:
            topic = wire.decode(wire.AppendStream, descriptor.command).topic

            def answer(append: _Append) -> None:
                reply = wire.encode(self._reply(append))
                with _peers_fault():
                    writer.write(reply)

            with _Answers(answer) as answers:
                for chunk in _chunks(reader, stream):
                    header = _append_header(chunk)
                    answers.add(self._append(topic, header, chunk.data), pipelined=header.pipelined)
                    del chunk  # or it is kept while the client sends nothing

    def _append(self, topic: str, header: wire.AppendHeader, batch: pa.RecordBatch) -> _Append:
        stamp = None
        if header.producer_id != NO_PRODUCER:
            stamp = Stamp(header.producer_id, header.producer_epoch, header.base_sequence)
        try:
            return self._core.append(topic, header.partition, batch, stamp)
        except errors.SparklogError as error:
            return errors.bare(error)

    def _reply(self, append: _Append) -> wire.AppendReply:
        try:
            if isinstance(append, errors.SparklogError):
                raise append
            result = self._core.wait(append)[0]
        except errors.SparklogError as error:
            return wire.AppendReply(error=wire.ErrorReply.of(error))
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
            return flight.GeneratorStream(schema, self._rows(batches, _peer(context)))

    def _rows(self, batches: Iterator[Batch], peer: str) -> Iterator[pa.RecordBatch]:
        with self._call(), self._streams.open(peer, sends=False) as stream:
            for batch in batches:
                stream.waits(batch.rows.nbytes)
                yield batch.rows
                stream.goes_on()

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        _reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._call(), self._streams.open(_peer(context), sends=False) as stream:
            request = wire.decode(wire.TailRequest, descriptor.command)
            schema = _schema(request.columns)
            with _peers_fault():
                writer.begin(schema)
            idle = schema.empty_table().to_batches() or [_empty(schema)]
            for batch in self._core.tail(
                request.positions,
                columns=request.columns,
                batch_rows=request.max_batch_rows,
                idle_seconds=request.heartbeat_ms / 1e3,
            ):
                if context.is_cancelled():
                    return
                rows, header = idle[0], wire.TailHeader(idle=True)
                if batch is not None:
                    rows = batch.rows
                    header = wire.TailHeader(
                        topic=batch.topic,
                        partition=batch.partition,
                        first=batch.first,
                        end=batch.end,
                        high_watermark=batch.high_watermark,
                    )
                stream.waits(rows.nbytes)
                with _peers_fault():
                    writer.write_with_metadata(rows, wire.encode(header))
                stream.goes_on()

    # -------------------------------------------------------------------------- admin

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> list[flight.Result]:
        self._streams.came(_peer(context))
        with self._call():
            known = wire.ACTIONS.get(action.type)
            if known is None:
                raise errors.BadRequest(reason=f"no action is named {action.type!r}")
            request = wire.decode(known[0], action.body.to_pybytes() or b"{}")
            reply = self._actions[action.type](request)
            if isinstance(reply, Future):
                reply = self._awaited(reply, context)
            return [flight.Result(pa.py_buffer(wire.encode(reply)))]

    def list_actions(self, _context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return [(name, request.__name__) for name, (request, _) in wire.ACTIONS.items()]

    def _awaited(self, reply: Future[Any], context: flight.ServerCallContext) -> msgspec.Struct:
        """What it comes to; nothing more is done for a client that has gone."""
        with self._waiting(reply):
            while True:
                try:
                    found: msgspec.Struct = reply.result(timeout=_LOOK_SECONDS)
                    return found
                except TimeoutError:
                    if context.is_cancelled():
                        reply.cancel()
                        raise flight.FlightCancelledError("the client has gone") from None

    @contextlib.contextmanager
    def _waiting(self, reply: Future[Any]) -> Iterator[None]:
        """Raises `TooManyStreams` where too many wait already: each has a thread of its own."""
        with self._counting:
            if self._waiting_actions >= limits.FLIGHT_WAITING_ACTIONS and not reply.done():
                reply.cancel()
                raise errors.TooManyStreams(
                    what="actions that wait", open=self._waiting_actions, setting="their pauses"
                )
            self._waiting_actions += 1
        try:
            yield
        finally:
            with self._counting:
                self._waiting_actions -= 1

    # -------------------------------------------------------------------------- calls

    def begin_call(self) -> None:
        with self._counting:
            self.calls += 1
            self.open_calls += 1

    def end_call(self) -> None:
        with self._counting:
            self.open_calls -= 1

    def _call(self) -> _Call:
        return _Call(self)


class _Answers:
    """The answers to one stream of appends, in the order of the appends.

    Who waits for each answer is answered by the thread that reads the stream, and pays for no
    hand-over. Where more is on its way, a second thread answers while the first one reads on.
    """

    def __init__(self, answer: Callable[[_Append], None]) -> None:
        self._answer = answer
        self._queue: queue.Queue[_Append | None] = queue.Queue(_WINDOW_BATCHES)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, append: _Append, *, pipelined: bool) -> None:
        """Answers now or soon; waits while a window of others is unanswered.

        Raises what an answer was refused with: the peer has gone.
        """
        if not pipelined and not self._queue.unfinished_tasks:
            self._answer(append)
            return
        if self._thread is None and not self._start():
            self._answer(append)
            return
        # First of all: whatever was queued for the writer is waited for.
        self._queue.put(append)
        if self._failure is not None:
            raise self._failure

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="sparklog-answers", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (append := self._queue.get()) is not None:
            # A stream that broke leaves nothing in the writer's queue that nobody waits for.
            try:
                self._answer(append)
            except BaseException as error:
                self._failure = self._failure or error
            self._queue.task_done()
            append = None  # or it is kept until the next one comes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure


class _Call:
    """One call: counted while it runs, and whatever it raises in the wire's form."""

    def __init__(self, door: FlightDoor) -> None:
        self._door = door

    def __enter__(self) -> None:
        self._door.begin_call()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._door.end_call()
        if error is None or isinstance(error, (flight.FlightError, GeneratorExit)):
            return
        if isinstance(error, errors.SparklogError):
            reply = wire.ErrorReply.of(error)
        elif isinstance(error, Exception):
            _log.error("call failed", exc_info=error)
            reply = wire.ErrorReply(code="error", facts={"reason": repr(error)})
        else:
            return
        raise flight.FlightServerError(str(error), extra_info=wire.encode(reply)) from error


@contextlib.contextmanager
def _peers_fault() -> Iterator[None]:
    """For what Flight raises when the peer has gone, or has sent what is no Arrow."""
    try:
        yield
    except flight.FlightError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise errors.BadRequest(reason=str(error)) from error


def _chunks(
    reader: flight.MetadataRecordBatchReader, stream: Stream
) -> Iterator[flight.FlightStreamChunk]:
    while True:
        stream.waits()
        with _peers_fault():
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
        stream.goes_on()
        yield chunk
        del chunk


def _append_header(chunk: flight.FlightStreamChunk) -> wire.AppendHeader:
    if chunk.data is None or chunk.app_metadata is None:
        raise errors.BadRequest(reason="each batch needs an AppendHeader, and each header a batch")
    return wire.decode(wire.AppendHeader, memoryview(chunk.app_metadata))


def _silently(work: Callable[[Any], None]) -> Callable[[Any], wire.Empty]:
    def answer(request: Any) -> wire.Empty:
        work(request)
        return wire.Empty()

    return answer


class _Connections:
    """The connections that gRPC has accepted at the door, found among all that are open."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._names: dict[int, str | None] = {}
        """By inode, what a socket's client is called; None where it is no client of the door."""
        self._open: dict[str, int] = {}
        """By that name, the descriptor."""

    def received_bytes(self) -> Mapping[str, int]:
        names: dict[int, str | None] = {}
        self._open = {}
        found = {}
        for number in _descriptors():
            try:
                status = os.fstat(number)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                inode = status.st_ino
                name = self._names[inode] if inode in self._names else self._name(number)
                names[inode] = name
                if name is not None:
                    self._open[name] = number
                    if (size := _received_bytes(number)) is not None:
                        found[name] = size
            except OSError:
                continue  # closed meanwhile
        self._names = names
        return found

    def cut(self, peer: str) -> None:
        number = self._open.get(peer)
        with contextlib.suppress(OSError):
            if number is not None and self._name(number) == peer:
                with socket.socket(fileno=os.dup(number)) as found:
                    found.shutdown(socket.SHUT_RDWR)

    def cut_all(self) -> None:
        """Ends every connection."""
        self.received_bytes()
        for peer in self._open:
            self.cut(peer)

    def _name(self, number: int) -> str | None:
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family not in _INTERNET or found.getsockname()[1] != self.port:
                return None
            try:
                host, port = found.getpeername()[:2]
            except OSError:
                return None  # the listening socket has none, and is left alone
            return f"{host.partition('%')[0].removeprefix('::ffff:')}:{port}"


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - Path takes twice as long


def _received_bytes(number: int) -> int | None:
    if not hasattr(socket, "TCP_INFO"):
        return None
    with socket.socket(fileno=os.dup(number)) as found:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    received = info[_RECEIVED_AT : _RECEIVED_AT + 8]
    return int.from_bytes(received, sys.byteorder) if len(received) == 8 else None


def _peer(context: flight.ServerCallContext) -> str:
    """The client's `host:port`; gRPC says `ipv4:host:port` or `ipv6:[host]:port`."""
    host, _, port = urllib.parse.unquote(context.peer().partition(":")[2]).rpartition(":")
    return f"{host.strip('[]').partition('%')[0].removeprefix('::ffff:')}:{port}"


def _schema(columns: list[str] | None) -> pa.Schema:
    if columns is None:
        return ROW_SCHEMA
    unknown = [name for name in columns if name not in ROW_SCHEMA.names]
    if unknown or not columns:
        raise errors.BadRequest(reason=f"columns {unknown or columns}: of {ROW_SCHEMA.names}")
    return pa.schema([ROW_SCHEMA.field(name) for name in columns])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
