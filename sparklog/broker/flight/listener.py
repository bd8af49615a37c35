"""The Arrow Flight listener: translates messages into calls to `broker`, results into messages.

A rejected batch gets an error reply in its turn and does not end its stream. Any other error ends
the call, with an `ErrorReply` in its status. Malformed bytes end the call that sent them, never the
broker. Message sizes are checked by `grpc` before messages are received, and by `protocol` before
Arrow reads them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Self

import msgspec
import pyarrow as pa
import structlog

from sparklog import errors, limits
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.broker import NO_PRODUCER, Broker, PendingAppend, ProducerSequence, ReadBatch
from sparklog.broker.counts import Budget
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.flight import protocol, tails
from sparklog.broker.flight.actions import actions
from sparklog.broker.flight.audited import audited
from sparklog.broker.flight.batches import Dictionaries, StreamBatches
from sparklog.broker.flight.caller import OPEN, Caller
from sparklog.broker.flight.gate import NO_TOKEN, AuthorizedStream, Gate
from sparklog.broker.flight.grpc.call import UNADMITTED_MESSAGE_BYTES, Call, Method, Serve
from sparklog.broker.flight.grpc.server import Server, ServerBounds
from sparklog.broker.flight.grpc.status import (
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNKNOWN,
    GrpcError,
    PeerGone,
)
from sparklog.broker.flight.hooks import Request, RequestHooks
from sparklog.broker.flight.logins import Logins
from sparklog.broker.flight.protocol import FlightData
from sparklog.broker.flight.rights import check_rights, shown
from sparklog.broker.flight.streams import OpenStream, OpenStreams, StreamBounds
from sparklog.broker.flight.tails import ServedTail, Tails
from sparklog.broker.flight.throttle import MUTATIONS, Throttles
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.quotas import Quotas
from sparklog.broker.refused_work import Work
from sparklog.clock import SystemClock, ThreadClock
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA
from sparklog.security.acl import Operation

_OTHER_CALLS = 256  # of all clients, in addition to streams and waiting actions
BESIDE_BYTES = 1 * limits.MIB  # of a message in addition to its batch
_REQUEST_BYTES = 16 * limits.MIB  # of an action or other request


class _Append(NamedTuple):
    """A pending append, or the error that rejected it; `looks` dates from its arrival."""

    looks: int
    pending: PendingAppend | errors.SparklogError


_log = structlog.get_logger("sparklog.flight")
_SERVICE: Final = "/arrow.flight.protocol.FlightService/"
_WINDOW_BATCHES: Final = 16
"""The number of batches of one stream that may await replies while the stream is read."""
_CLOSE_SECONDS: Final = 0.3
"""The time for calls to end when the listener closes, before their connections are cut."""
_CLIENT_CHECK_SECONDS: Final = 0.5
"""The interval at which a waiting action checks that its client is still connected."""
_IO_ERROR: Final = b"5"
"""Arrow's status code for an IO error."""
_MESSAGE_LENGTH: Final = 1_000
"""The maximum length of an error message: clients accept a few thousand bytes of trailers."""
_OF_MEMBERS: Final = frozenset({"groups.join", "groups.sync", "groups.heartbeat", "groups.leave"})
_WITHOUT_SIGHT: Final = _OF_MEMBERS | {"root.prove"}
"""Actions served without sight of the metadata: a group outlives a store outage, and other
brokers ask whether this one is alive."""
_WITHOUT_SECURITY: Final = _OF_MEMBERS | {"status", "figures"}
"""Actions served while the security state cannot be read, which they show."""
_OPEN_METHODS: Final = frozenset({"DoAction", "Handshake"})
"""Methods that may be called without a token: for `_WITHOUT_ADMISSION`, and for a login."""
_WITHOUT_ADMISSION: Final = frozenset({"root.prove"})
"""Actions served to everybody: a program asks which root a broker serves before it trusts the
broker with a token."""
_NEEDING_PROOF: Final = frozenset({"groups.offsets"})
"""Actions whose reply may lack what another broker knows, and so needs proof of leadership."""


class FlightListener:
    """Serves a broker and its groups to Flight clients, from construction to `close`.

    Args:
        acceptors: listening sockets, which the listener takes over.
        clock: None: the machine's own.
        gate: admits calls; None: all are served.
        logins: logs clients in; None: no listener asks for a login.
        quotas: of the clients; None if they have none.
        hooks: called for each request; None: no hooks.
    """

    def __init__(
        self,
        broker: Broker,
        groups: Coordinator,
        acceptors: Sequence[Acceptor],
        *,
        bounds: StreamBounds | None = None,
        max_batch_bytes: int = limits.MAX_BATCH_BYTES,
        clock: ThreadClock | None = None,
        gate: Gate | None = None,
        logins: Logins | None = None,
        quotas: Quotas | None = None,
        hooks: RequestHooks | None = None,
    ) -> None:
        self._broker = broker
        self._gate = gate
        self._hooks = hooks
        clock = clock or SystemClock()
        bounds = bounds or StreamBounds()
        self._throttles = (
            Throttles(quotas, most=bounds.streams // 2, clock=clock) if quotas is not None else None
        )
        self._max_batch_bytes = max_batch_bytes
        self._reply_memory = DecodeMemory(bounds.held_bytes)
        """The memory for large batches on their way to clients."""
        self._streams = OpenStreams(
            bounds,
            clock=clock,
            is_short=lambda: self._reply_memory.is_short,
            on_refusal=lambda reason: broker.refused.note(Work.STREAMS, reason),
        )
        self._tails = Tails(self._reply_memory, clock=clock)
        if quotas is not None:
            quotas.on_change.append(self._tails.end_throttles)
        self._proofs = ThreadPoolExecutor(1, thread_name_prefix="sparklog-proof")
        self._dictionaries = Dictionaries()
        self._waiting_actions = 0
        self._counting = threading.Lock()
        self._actions = audited(actions(broker, groups, gate), gate)
        self.calls = 0
        self.open_calls = 0
        batch_bytes = max_batch_bytes + BESIDE_BYTES
        methods: dict[str, tuple[Callable[[Call], None], int]] = {
            "DoPut": (self.do_put, batch_bytes),
            "DoGet": (self.do_get, _REQUEST_BYTES),
            "DoExchange": (self.do_exchange, _REQUEST_BYTES),
            "DoAction": (self.do_action, _REQUEST_BYTES),
            "ListActions": (self.list_actions, _REQUEST_BYTES),
            "Handshake": (
                self.handshake if logins is None else logins.serve,
                UNADMITTED_MESSAGE_BYTES,
            ),
        }
        self._server = Server(
            acceptors,
            {
                _SERVICE + name: Method(
                    serve=self._counted(serve),
                    message_bytes=message_bytes,
                    too_large=self._too_large,
                    is_open=name in _OPEN_METHODS,
                    body_at=protocol.body_at,
                )
                for name, (serve, message_bytes) in methods.items()
            },
            ServerBounds(calls=bounds.streams + limits.FLIGHT_WAITING_ACTIONS + _OTHER_CALLS),
            tick=self._tick,
            recognises=gate.recognises if gate is not None else lambda _: True,
            without_token=lambda: _status(errors.NotAuthenticated(reason=NO_TOKEN)),
            clock=clock,
        )
        self._server.start()

    def _tick(self) -> None:
        self._streams.tick()
        if self._gate is not None:
            self._gate.check_streams()

    def budgets(self) -> list[Budget]:
        """Returns the memory budgets for large messages from and to clients."""
        replies, requests = self._reply_memory, self._server.message_memory
        return [
            Budget("flight_replies", replies.held_bytes, replies.limit_bytes),
            Budget("flight_requests", requests.held_bytes, requests.limit_bytes),
        ]

    @property
    def stream_count(self) -> int:
        """The number of open streams."""
        return self._streams.count

    def close(self) -> None:
        """Ends all calls. Streams that do not end soon, such as those of producers, are cut."""
        if self._throttles is not None:
            self._throttles.close()
        self._tails.close()
        self._proofs.shutdown()
        if not self._server.close(_CLOSE_SECONDS):
            _log.warning("calls continue although their connections are cut", calls=self.open_calls)

    def cut_connections(self) -> None:
        """Closes all connections without notice, as a network failure would; accepts new ones."""
        self._server.cut_connections()

    # -------------------------------------------------------------------------- append

    def do_put(self, call: Call) -> None:
        caller = self._admit(call)
        with (
            self._streams.open(call.peer, sends=True, cut=call.cancel) as stream,
            contextlib.closing(StreamBatches(call, stream, self._dictionaries)) as batches,
            contextlib.ExitStack() as ending,
        ):
            topic = flight_messages.decode(flight_messages.AppendStream, batches.command).topic
            ending.enter_context(self._authorized(call, caller, Operation.WRITE, [topic]))
            if (throttles := self._throttles_in_force) is not None:
                throttles.append(call, caller, 0)  # for what its earlier calls have sent
            requests: deque[Request] = deque()  # empty without hooks

            def answer(append: _Append) -> None:
                reply = flight_messages.encode(self._reply(append))
                if self._hooks is not None:
                    self._hooks.after(requests.popleft())
                call.write([protocol.bytes_field(1, reply)])

            with _Answers(answer, self._reply, call.cancel) as answers:
                while (entry := batches.next()) is not None:
                    batch, beside = entry
                    header = _append_header(batch, beside)
                    if self._hooks is not None:
                        requests.append(_append_request(topic, header, batch))
                    throttles = self._throttles_in_force
                    size = batch.nbytes if throttles is not None and batch is not None else 0
                    append = self._append(topic, header, batch)
                    # Otherwise they stay in memory while the client reads no reply, or sends
                    # nothing.
                    del entry, batch
                    call.release_message()
                    answers.add(append, pipelined=header.pipelined)
                    del append
                    if throttles is not None:
                        throttles.append(call, caller, size)

    def _append(
        self, topic: str, header: flight_messages.AppendHeader, batch: pa.RecordBatch
    ) -> _Append:
        looks, producer_sequence = self._broker.metadata.looks, None
        if header.producer_id != NO_PRODUCER:
            producer_sequence = ProducerSequence(
                header.producer_id, header.producer_epoch, header.base_sequence
            )
        try:
            if self._gate is not None:
                self._gate.check_fresh()
            if self._hooks is not None:
                self._hooks.before(_append_request(topic, header, batch))
            pending = self._broker.append(topic, header.partition, batch, producer_sequence)
        except errors.SparklogError as error:
            return _Append(looks, errors.bare(error))
        return _Append(looks, pending)

    def _reply(self, append: _Append) -> flight_messages.AppendReply:
        try:
            if isinstance(append.pending, errors.SparklogError):
                raise append.pending
            result = self._broker.wait(append.pending)[0]
        except errors.SparklogError as error:
            proven = _proven(self._broker, error, append.looks)
            return flight_messages.AppendReply(error=flight_messages.ErrorReply.of(proven))
        return flight_messages.AppendReply(
            base_offset=result.base_offset,
            timestamp_us=result.arrival_us,
            timestamp_type=result.timestamp_type,
        )

    # -------------------------------------------------------------------------- read

    def do_get(self, call: Call) -> None:
        caller = self._admit(call)
        request = flight_messages.decode(flight_messages.ReadTicket, _request(call, 1))
        with (
            self._authorized(call, caller, Operation.READ, [request.topic]),
            self._streams.open(call.peer, sends=False, cut=call.cancel) as stream,
        ):
            self._check_sight()
            schema = _schema(request.columns)
            batches = self._broker.read(
                request.topic,
                request.partition,
                request.start,
                request.end,
                columns=request.columns,
                topic_id=request.topic_id,
            )
            call.write(protocol.write_flight_data(schema.serialize()))
            self._send_batches(call, caller, stream, batches, request)

    def _send_batches(
        self,
        call: Call,
        caller: Caller,
        stream: OpenStream,
        batches: Iterator[ReadBatch],
        request: flight_messages.ReadTicket,
    ) -> None:
        if (throttles := self._throttles_in_force) is not None:
            throttles.send(call, caller, 0)  # for what its earlier calls were sent
        for batch in batches:
            rows = batch.rows
            self._before_sending("read", batch, request)
            del batch
            with self._memory_for(rows):
                data = rows.serialize()
                del rows  # otherwise two copies exist while the client does not read
                size = data.size
                stream.waits(size)
                call.write(protocol.write_flight_data(data))
                stream.advance()
                del data
            if (throttles := self._throttles_in_force) is not None:
                throttles.send(call, caller, size)

    @property
    def _throttles_in_force(self) -> Throttles | None:
        """The throttles of clients; None while there are no quotas at all."""
        throttles = self._throttles
        return throttles if throttles is not None and throttles.has_quotas else None

    def _sent_ms(self, caller: Caller, size_bytes: int) -> int:
        """Counts records that a tail has sent, and returns its throttle in ms."""
        throttles = self._throttles_in_force
        return throttles.sent_ms(caller, size_bytes) if throttles is not None else 0

    def _before_sending(self, name: str, batch: ReadBatch, message: msgspec.Struct) -> None:
        if self._hooks is not None:
            self._hooks.before(
                Request(
                    name=name,
                    topic=batch.topic,
                    partition=batch.partition,
                    rows=batch.rows,
                    message=message,
                )
            )

    def _memory_for(self, rows: pa.RecordBatch) -> contextlib.AbstractContextManager[None]:
        """Returns a context that holds memory for encoding the rows, if they are large."""
        size = rows.nbytes
        if size <= limits.FLIGHT_FREE_ROWS_BYTES:
            return contextlib.nullcontext()
        return self._reply_memory.hold(size)

    def do_exchange(self, call: Call) -> None:
        caller = self._admit(call)
        with contextlib.ExitStack() as ending:
            stream = ending.enter_context(
                self._streams.open(call.peer, sends=False, cut=call.cancel)
            )
            first = call.read()
            flight_data = FlightData() if first is None else protocol.read_flight_data(first.data)
            request = flight_messages.decode(flight_messages.TailRequest, flight_data.command)
            topics = [each.topic for each in request.positions]
            ending.enter_context(self._authorized(call, caller, Operation.READ, topics))
            self._check_sight()
            looks = self._broker.metadata.looks
            schema = _schema(request.columns)
            call.write(protocol.write_flight_data(schema.serialize()))
            idle_rows = (schema.empty_table().to_batches() or [_empty(schema)])[0]
            served = ServedTail(
                call=call,
                stream=stream,
                shape=(
                    tuple(request.columns) if request.columns is not None else None,
                    request.max_batch_rows,
                ),
                idle=tails.encoded(idle_rows, flight_messages.TailHeader(idle=True)),
                idle_seconds=request.heartbeat_ms / 1e3,
                finish=lambda failure: self._finish_tail(call, failure, looks),
                throttle=lambda size: self._sent_ms(caller, size),
                before=None
                if self._hooks is None
                else lambda batch: self._before_sending("tail", batch, request),
            )
            served.tail = self._broker.tail(
                request.positions,
                lambda: self._tails.wake(served),
                columns=request.columns,
                batch_rows=request.max_batch_rows,
            )
            ending.callback(served.tail.close)
            served.ending = ending.pop_all()
            call.detach(lambda: self._tails.progress(served))
            with self._counting:
                self.open_calls += 1  # until it is finished
            self._tails.add(served)

    def _finish_tail(self, call: Call, failure: BaseException | None, looks: int) -> None:
        def end() -> None:
            with _as_status(self._broker, looks):
                if failure is not None:
                    raise failure

        with self._counting:
            self.open_calls -= 1
        if isinstance(failure, errors.SparklogError) and failure.needs_proof:
            # The tails' thread must not wait for the store.
            self._proofs.submit(self._server.finish, call, end)
        else:
            self._server.finish(call, end)

    # -------------------------------------------------------------------------- admin

    def do_action(self, call: Call) -> None:
        message = call.read()
        data = b"" if message is None else message.data
        name = bytes(protocol.field(data, 1)).decode(errors="replace")
        known = flight_messages.ACTIONS.get(name)
        if known is None or name in _WITHOUT_ADMISSION:
            call.count_unadmitted()
        if known is None:
            reason = f"{flight_messages.NO_ACTION}{name[:_MESSAGE_LENGTH]!r}"
            raise errors.BadRequest(reason=reason)
        caller = OPEN
        if name not in _WITHOUT_ADMISSION:
            caller = self._admit(call, needs_fresh=name not in _WITHOUT_SECURITY)
        request = flight_messages.decode(known[0], protocol.field(data, 2) or b"{}")
        del message, data
        check_rights(name, caller, request)
        hooked = Request(name=name, topic=getattr(request, "topic", ""), message=request)
        if self._hooks is not None:
            self._hooks.before(hooked)
        if name not in _WITHOUT_SIGHT:
            self._check_sight()
        if name in MUTATIONS and (throttles := self._throttles_in_force) is not None:
            throttles.count_mutations(self._broker, caller, request)
        looks = self._broker.metadata.looks
        reply = self._actions[name](caller, request)
        if isinstance(reply, Future):
            reply = self._wait_for(reply, call)
        reply = shown(name, caller, reply)
        if name in _WITHOUT_ADMISSION and call.listener.has_sasl:
            reply = msgspec.structs.replace(reply, root="")  # strangers do not learn the place
        if name in _NEEDING_PROOF:
            self._broker.metadata.prove(looks)
        if self._hooks is not None:
            self._hooks.after(hooked)
        call.write([protocol.bytes_field(1, flight_messages.encode(reply))])

    def list_actions(self, call: Call) -> None:
        self._admit(call)
        for name, (request, _) in flight_messages.ACTIONS.items():
            described = request.__name__.encode()
            call.write(
                [protocol.bytes_field(1, name.encode()) + protocol.bytes_field(2, described)]
            )

    def _wait_for(self, reply: Future[Any], call: Call) -> msgspec.Struct:
        """Returns the reply's value. Cancels the reply if the client has disconnected."""
        with self._waiting(reply):
            while True:
                try:
                    value: msgspec.Struct = reply.result(timeout=_CLIENT_CHECK_SECONDS)
                    return value
                except TimeoutError:
                    if call.is_dead:
                        reply.cancel()
                        raise PeerGone from None

    @contextlib.contextmanager
    def _waiting(self, reply: Future[Any]) -> Iterator[None]:
        """Counts a waiting action. Raises `TooManyStreams` if too many wait: each uses a thread."""
        with self._counting:
            if self._waiting_actions >= limits.FLIGHT_WAITING_ACTIONS and not reply.done():
                reply.cancel()
                raise errors.TooManyStreams(
                    what="waiting actions", open=self._waiting_actions, setting="their pauses"
                )
            self._waiting_actions += 1
        try:
            yield
        finally:
            with self._counting:
                self._waiting_actions -= 1

    # -------------------------------------------------------------------------- calls

    def _counted(self, serve: Callable[[Call], None]) -> Serve:
        def counted(call: Call) -> None:
            with self._counting:
                self.calls += 1
                self.open_calls += 1
            try:
                with _as_status(self._broker, self._broker.metadata.looks):
                    serve(call)
            finally:
                with self._counting:
                    self.open_calls -= 1

        return counted

    @staticmethod
    def handshake(_call: Call) -> None:
        raise errors.NotAuthenticated(reason="this broker asks for no login: connect without one")

    def _admit(self, call: Call, *, needs_fresh: bool = True) -> Caller:
        """Returns the client of a call. Raises what `Gate.admit` raises."""
        if self._gate is None:
            return OPEN
        try:
            caller = self._gate.admit(call, needs_fresh=needs_fresh)
        except errors.NotAuthenticated:
            call.count_unadmitted()
            raise
        call.admit()
        return caller

    @contextlib.contextmanager
    def _authorized(
        self, call: Call, caller: Caller, operation: Operation, topics: Sequence[str]
    ) -> Iterator[None]:
        """Checks that a client may use the topics of a stream, now and while it is open."""
        if self._gate is None:
            yield
            return
        stream = AuthorizedStream(
            caller=caller, operation=operation, topics=(*dict.fromkeys(topics),), cut=call.cancel
        )
        with self._gate.watched(stream):
            yield

    def _check_sight(self) -> None:
        """Calls `LeaderMetadata.regain_sight` if the broker may have been replaced."""
        if not self._broker.metadata.has_sight:
            self._broker.metadata.regain_sight()

    def _too_large(self, size_bytes: int, limit_bytes: int) -> GrpcError:
        if limit_bytes == _REQUEST_BYTES:
            reason = f"a request is {size_bytes:,} bytes long; the limit is {limit_bytes:,}"
            return _status(errors.BadRequest(reason=reason))
        return _status(errors.BatchTooLarge(bytes=size_bytes, limit_bytes=self._max_batch_bytes))


class _Answers:
    """Replies to the appends from one stream, in order.

    For a client that waits for each reply, the thread that reads the stream replies itself, without
    a thread switch. For a client that pipelines, a second thread replies concurrently.
    """

    def __init__(
        self,
        answer: Callable[[_Append], None],
        wait: Callable[[_Append], object],
        cancel: Callable[[], None],
    ) -> None:
        """Creates a sender of replies.

        After a reply that could not be sent, no other may be sent: the client identifies replies by
        their order.

        Args:
            answer: waits for an append, and sends the reply.
            wait: only waits for it.
            cancel: ends the stream, for a client that sends nothing until it has its replies.
        """
        self._answer = answer
        self._wait = wait
        self._cancel = cancel
        self._queue: queue.Queue[_Append | None] = queue.Queue(_WINDOW_BATCHES)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, append: _Append, *, pipelined: bool) -> None:
        """Replies immediately, or queues the reply; blocks while a whole window is queued.

        Raises the error of an earlier reply that could not be sent.
        """
        if not pipelined and not self._queue.unfinished_tasks and self._failure is None:
            self._answer(append)
            return
        if self._thread is None and not self._start():
            self._answer(append)
            return
        # Before any error is raised: each append in the writer's queue has to be waited for.
        self._queue.put(append)
        if self._failure is not None:
            raise self._failure

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="sparklog-answers", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system cannot start a thread
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (append := self._queue.get()) is not None:
            # Even after a failure, each append in the writer's queue has to be waited for.
            act = self._answer if self._failure is None else self._wait
            try:
                act(append)
            except BaseException as error:
                self._failure = self._failure or error
                self._cancel()
            self._queue.task_done()
            append = None  # otherwise it is kept until the next one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure


@contextlib.contextmanager
def _as_status(broker: Broker, looks: int) -> Iterator[None]:
    """Turns the exceptions of a call into `GrpcError`; `looks` dates from the call's arrival."""
    try:
        yield
    except (PeerGone, GrpcError):
        raise
    except errors.SparklogError as error:
        raise _status(_proven(broker, error, looks)) from error
    except Exception as error:
        _log.error("call failed", exc_info=error)
        reply = flight_messages.ErrorReply(
            code="error", facts={"reason": repr(error)[:_MESSAGE_LENGTH]}
        )
        raise _status_of(reply, repr(error)) from error


def _proven(broker: Broker, error: errors.SparklogError, looks: int) -> errors.SparklogError:
    """Returns the error for the client: the proof's own error, if it needs a proof that fails.

    `looks` dates from the request's arrival, because the metadata may have changed since the
    request was judged.
    """
    if error.needs_proof:
        try:
            broker.metadata.prove(looks)
        except errors.SparklogError as unproven:
            return unproven
    if isinstance(error, errors.UnknownTopic | errors.UnknownPartition):
        with contextlib.suppress(errors.Invalid):
            broker.partitions.leader_of(error.facts["topic"], error.facts.get("partition", 0))
            return errors.MetadataChanged()  # this broker was just creating it
    return error


def _status(error: errors.SparklogError) -> GrpcError:
    # Arrow's clients find the reply in the trailers, except after a login.
    code = UNKNOWN
    if isinstance(error, errors.NotAuthenticated):
        code = UNAUTHENTICATED
    elif isinstance(error, errors.NotAuthorized):
        code = PERMISSION_DENIED
    elif isinstance(error, errors.SecurityNotRead | errors.TokenKeysNotRead):
        code = UNAVAILABLE
    return _status_of(flight_messages.ErrorReply.of(error), str(error), code)


def _status_of(reply: flight_messages.ErrorReply, message: str, code: int = UNKNOWN) -> GrpcError:
    """Returns the error as Arrow's servers send it: the reply is its extra info."""
    message = message[:_MESSAGE_LENGTH]
    return GrpcError(
        code,
        message,
        [
            ("grpc-status-details-bin", flight_messages.encode(reply)),
            ("x-arrow-status", _IO_ERROR),
            ("x-arrow-status-message-bin", message.encode(errors="replace")),
            ("x-arrow-status-detail-bin", b"Failed"),
        ],
    )


def _append_header(
    batch: pa.RecordBatch | None, beside: bytes | None
) -> flight_messages.AppendHeader:
    if batch is None or beside is None:
        raise errors.BadRequest(reason="each batch needs an AppendHeader, and each header a batch")
    return flight_messages.decode(flight_messages.AppendHeader, beside)


def _append_request(
    topic: str, header: flight_messages.AppendHeader, batch: pa.RecordBatch
) -> Request:
    return Request(
        name="append", topic=topic, partition=header.partition, rows=batch, message=header
    )


def _request(call: Call, number: int) -> protocol.Bytes:
    """Returns a field of the call's only message."""
    message = call.read()
    return b"" if message is None else protocol.field(message.data, number)


def _schema(columns: list[str] | None) -> pa.Schema:
    if columns is None:
        return ROW_SCHEMA
    unknown = [name for name in columns if name not in ROW_SCHEMA.names]
    if unknown or not columns:
        raise errors.BadRequest(
            reason=f"columns {unknown or columns}: choose from {ROW_SCHEMA.names}"
        )
    return pa.schema([ROW_SCHEMA.field(name) for name in columns])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
