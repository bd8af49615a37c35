"""One Kafka connection: handles its requests in order, and answers in the same order.

A connection holds the requests that it has not answered, and the replies that its client has not
read. Their memory is bounded as described at the head of `memory`; the connection reads no further
while none is available. Requests and replies with many items are processed in turns (`scheduler`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import structlog

from sparklog import errors, limits
from sparklog.broker import logging
from sparklog.broker.authentication import Identity
from sparklog.broker.kafka import apis, fetch_codec, messages
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.audited import note_request
from sparklog.broker.kafka.error_codes import ANYWHERE, CodeCount, count_for
from sparklog.broker.kafka.foreign_protocols import refuse_foreign
from sparklog.broker.kafka.frame_check import CheckedFrame, ManyItems
from sparklog.broker.kafka.memory import FreeAllowance, ListenerMemory, MemoryGrant, MemoryPool
from sparklog.broker.kafka.messages import Fields, Origin, Raw, Request
from sparklog.broker.kafka.reauthentication import ExpiringSession
from sparklog.broker.kafka.registry import APIS, HandlerContext, Reply, ServedApi, WorkerPool
from sparklog.broker.kafka.sasl_logins import SaslLogins
from sparklog.broker.kafka.socket_stream import SocketStream
from sparklog.broker.kafka.throttle import UNTHROTTLED
from sparklog.broker.tls.engine import TlsFailed
from sparklog.clock import Clock
from sparklog.listeners import Listener

_PIPELINED = 16  # replies of a connection that can be pending while it reads further requests
_CONNECTION_BYTES = 32 * limits.MIB  # of requests per connection; a larger request is read alone
STEP_BYTES = 64 * limits.KIB  # first step of an arriving request; then as much as has arrived
_REPLY_BYTES = 32 * limits.MIB  # of one reply, not counting records
_ITEM_BYTES = 1_000  # of memory per item until the request is answered
STALLED_SECONDS = 30  # for which a client may leave its replies unread
STALLED_SHORT_SECONDS = 1  # the same, while other requests wait for memory
SLOWEST_BYTES_PER_SECOND = 1 * limits.MIB  # the slowest rate at which a large request may arrive
_CLIENT_ID_BYTES = 4_096  # of a client id that is read before its request
IDLE_SECONDS = 600  # Kafka's connections.max.idle.ms

_log = structlog.get_logger("sparklog.kafka")
_RequestHeader = tuple[int, int, int]
"""API key, version and correlation id."""


class _Moment(NamedTuple):
    """The moment at which a request arrived: a proof of leadership must be later."""

    looks: int
    codes: CodeCount
    """Counts the codes in its reply that need a proof."""
    codes_anywhere: int
    """The number of such codes, up to that moment, that may belong to any reply."""

    @property
    def is_doubtful(self) -> bool:
        """Returns whether a code of the reply may need a proof."""
        return bool(self.codes.needing_proof) or self.codes_anywhere != ANYWHERE.needing_proof


class _QueuedReply(NamedTuple):
    """A reply queued in request order: an encoded frame, or fields that are still awaited."""

    frame: Sequence[Raw]
    pending: Awaitable[Reply] | None
    header: _RequestHeader
    grant: MemoryGrant
    request_bytes: int
    """The size of the request, which counts against this connection's limit."""
    received_at: float
    """When the request's last byte was read, in monotonic seconds."""
    arrival: _Moment
    logged_for: str
    """The client, for the request's log line; empty if there is none."""


class _DisconnectFlag:
    """A flag that is set once the client has disconnected.

    Group members hold it beyond the life of the connection, so it refers to nothing else.
    """

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True


class KafkaConnection:
    """A client's connection. `serve` returns once the connection has ended for any reason."""

    def __init__(
        self,
        context: HandlerContext,
        stream: SocketStream,
        memory: ListenerMemory,
        *,
        listener: Listener,
        request_max_bytes: int,
        clock: Clock,
        logins: SaslLogins | None = None,
    ) -> None:
        self._context = context
        self._stream = stream
        self._memory = memory
        self._listener = listener
        self.identity: Identity | None = None
        """The user of the connection, once it has logged in."""
        self._logins = logins
        self._session: ExpiringSession | None = None
        """The session of a user that has to log in again; None if it does not."""
        self.throttle = UNTHROTTLED
        """The throttle of the client, once it is known."""
        self._request_max_bytes = request_max_bytes
        self._clock = clock
        self._unanswered = MemoryPool(_CONNECTION_BYTES)
        """Bounds the unanswered requests, so that no connection takes all the memory."""
        self._allowance = FreeAllowance()
        self._disconnected = _DisconnectFlag()
        self._grants: set[MemoryGrant] = set()
        self._replies: asyncio.Queue[_QueuedReply] = asyncio.Queue(_PIPELINED)
        self._unsent = 0
        """The number of replies that `_send` has not written yet."""
        self._in_progress: tuple[ServedApi, MemoryGrant] | None = None
        """The request being handled, until its reply is queued."""
        self._incoming: MemoryGrant | None = None
        """The grant of the request being received; the next three fields describe that request."""
        self._incoming_bytes = 0
        self._incoming_since = 0.0
        self._late_seconds = 0.0
        """Its delay relative to a request that arrives at the lowest allowed rate."""
        self._sending_bytes = 0
        self._sending_seconds = 0.0
        self._last_progress = (0, 0)
        """(unread bytes of replies, received bytes) at the last check."""
        self._idle_seconds = 0.0

    async def serve(self, identity: Identity | None = None) -> None:
        """Receives, handles and answers requests until the connection ends.

        `identity`: the user that has logged in; None if the listener asks for none.
        """
        self.identity = identity
        if identity is not None and identity.ends_at != math.inf:
            self._session = ExpiringSession(identity, self._stream, self._logins, self._clock)
        task = asyncio.current_task()
        assert task is not None
        self._stream.left = lambda: self._client_left(task)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_without_frames(self._receive))
                both.create_task(_without_frames(self._send))
        except* TlsFailed as group:
            self._log_closed(str(group.exceptions[0]))
        except* ConnectionError:
            pass  # the client has left
        except* asyncio.CancelledError:
            pass  # the listener is closing
        except* errors.SparklogError as group:
            self._log_closed(str(group.exceptions[0]))
        except* Exception:
            _log.exception("a connection is closed")
        finally:
            self._disconnected.set()
            self._stream.close()
            for grant in self._grants:
                grant.release_all()
            while not self._replies.empty():
                pending = self._replies.get_nowait().pending
                if asyncio.iscoroutine(pending):
                    pending.close()

    def _client_left(self, task: asyncio.Task[None]) -> None:
        """Cancels the connection if it waits for memory, or for other clients.

        Otherwise requests that have been received are still handled: a client that wants no
        response (acks=0) may leave right after sending.
        """
        self.throttle.end()
        grant = self._incoming
        may_wait = False
        if self._in_progress is not None:
            api, grant = self._in_progress
            may_wait = api.may_wait
        if may_wait or (grant is not None and grant.is_waiting):
            task.cancel()

    def check_progress(self, passed_seconds: float) -> None:
        """Ends the connection if it has made no progress for too long; called periodically.

        A client that does not read its replies, or stops in the middle of a request, is allowed
        `STALLED_SECONDS`, or `STALLED_SHORT_SECONDS` while other requests wait for memory. A client
        without open requests is allowed `IDLE_SECONDS`, as in Kafka, unless it is throttled.

        Args:
            passed_seconds: the time since the last call, except while the event loop was busy and
                read nothing.
        """
        unread_bytes = self._stream.transport.get_write_buffer_size()
        received_bytes = self._stream.read_bytes - self._last_progress[1]
        progress = unread_bytes, self._stream.read_bytes
        is_idle = progress == self._last_progress
        self._idle_seconds = self._idle_seconds + passed_seconds if is_idle else 0.0
        self._last_progress = progress
        if self._incoming is not None and not self._incoming.is_waiting:
            # Fast arrival earns no time to stall later: a large request holds more memory.
            since_seconds = min(passed_seconds, self._clock.monotonic() - self._incoming_since)
            late_seconds = self._late_seconds + since_seconds - _allowed_seconds(received_bytes)
            self._late_seconds = max(late_seconds, 0.0)
        if self._sending_bytes:
            self._sending_seconds += passed_seconds
        is_short = self._memory.is_short
        patience_seconds: float = STALLED_SECONDS
        if is_short:
            patience_seconds = STALLED_SHORT_SECONDS
        if self._incoming is not None and self._late_seconds > patience_seconds:
            received, seconds = self._incoming_bytes, self._late_seconds
            self.cut(f"a request is {seconds:.0f} s late after its first {received} bytes")
        elif unread_bytes and (
            self._idle_seconds >= patience_seconds
            or (
                is_short
                and self._sending_seconds > patience_seconds + _allowed_seconds(self._sending_bytes)
            )
        ):
            seconds = self._idle_seconds
            self.cut(f"{unread_bytes} bytes of replies were not read for {seconds:.0f} s")
        elif not self._grants and not self.throttle.is_on and self._idle_seconds >= IDLE_SECONDS:
            self._stream.transport.abort()

    def cut(self, reason: str = "") -> None:
        """Aborts the connection without notice. `reason`: for the log; empty: it is not logged."""
        if reason:
            self._log_closed(reason)
        self._stream.transport.abort()

    def _log_closed(self, reason: str) -> None:
        self._context.log_closed(self._stream.peer, reason)

    # -------------------------------------------------------------------------- requests

    async def _receive(self) -> None:
        host = f"/{self._stream.peer}" if self._stream.peer else ""
        access = self._context.access_of(self.identity, self._stream.peer)
        self.throttle = throttle = self._context.throttle_of(access.user)
        origin = Origin(host, self._listener, access, throttle)
        while True:
            if throttle.is_on:
                await self._wait_while_throttled()
            length = await self._stream.read(messages.LENGTH_BYTES)
            if length[0]:  # a request of 16 MiB or more, or another protocol
                flight = self._context.broker.cluster().brokers[0].address
                await refuse_foreign(self._stream, bytes(length), self._listener, flight)
            size = int.from_bytes(length, "big", signed=True)
            if not 0 <= size <= self._request_max_bytes:
                reason = (
                    f"a request is {size} bytes long; at most {self._request_max_bytes} are allowed"
                )
                raise errors.BadRequest(reason=reason)
            if throttle.has_quotas and not throttle.has_produced:
                await self._wait_like_others(size)
            await self._unanswered.take(size)
            grant = MemoryGrant(self._memory, self._allowance)
            self._grants.add(grant)
            self._incoming, self._incoming_bytes, self._late_seconds = grant, 0, 0.0
            self._incoming_since = self._clock.monotonic()
            reply = await self._handle(await self._read_frame(size, grant), origin, grant)
            if reply.pending is None and not self._unsent:
                await self._write(reply.frame, grant, reply.request_bytes)
                self._count(reply.header, reply.received_at, reply.logged_for)
            else:
                self._unsent += 1
                await self._replies.put(reply)
            del reply  # otherwise its records would be retained until the next request

    async def _wait_while_throttled(self) -> None:
        """Waits until the throttle is over, unless the client has left: nothing would end it."""
        if not self._stream.is_over:
            await self.throttle.wait()
            self._idle_seconds = 0.0

    async def _wait_like_others(self, size: int) -> None:
        """Waits before the first Produce request is read, if its client id is throttled."""
        if size < messages.HEADER_BEGIN_BYTES:
            return
        begin = await self._stream.peek(messages.HEADER_BEGIN_BYTES)
        if int.from_bytes(begin[:2], "big") != messages.PRODUCE:
            return
        client_bytes = messages.client_id_bytes(begin)
        if client_bytes <= min(size - len(begin), _CLIENT_ID_BYTES):
            name = (await self._stream.peek(len(begin) + client_bytes))[len(begin) :]
            self.throttle.begin_as_others(name.decode(errors="replace"))
            if self.throttle.is_on:
                await self._wait_while_throttled()
                self._stream.check_open()  # otherwise a client that leaves at once evades it

    async def _read_frame(self, size: int, grant: MemoryGrant) -> bytes:
        """Returns the request's bytes. No step but the first exceeds the bytes already received."""
        if grant.take_free(size):
            frame = bytes(await self._stream.read(size))
            self._incoming = None
            return frame
        parts: list[bytes | bytearray] = []
        while self._incoming_bytes < size:
            step = max(self._incoming_bytes, STEP_BYTES)
            step = min(step, size - self._incoming_bytes)
            self._stream.check(step)
            await grant.grow_request(step, is_all=step == size)
            parts.append(await self._stream.read(step))
            self._incoming_bytes += step
        self._incoming = None
        return b"".join(parts)

    async def _handle(self, frame: bytes, origin: Origin, grant: MemoryGrant) -> _QueuedReply:
        received_at = self._clock.monotonic()
        arrival = self._moment()
        header = api_key, version, correlation_id = messages.read_header(frame)
        request_bytes = len(frame)
        if self._session is not None and self._session.begins_login(api_key):
            await self._log_in_again(self._session, frame, origin.access)
            return _QueuedReply((), None, header, grant, request_bytes, received_at, arrival, "")
        api = _served_api(api_key, version)
        reply: Reply | Awaitable[Reply]
        request: Request | None = None
        if api is None:
            header, reply = (
                (api_key, 0, correlation_id),
                apis.api_versions.answer(messages.UNSUPPORTED_VERSION),
            )
        else:
            self._in_progress = api, grant
            broker = self._context.broker
            if not (api.is_blind or broker.metadata.has_sight):
                await self._context.run_blocking(WorkerPool.PROOF, broker.metadata.regain_sight)
                arrival = arrival._replace(looks=broker.metadata.looks)
            request, items = await self._parse(api, frame, origin, grant)
            del frame
            origin.access.check_fresh(is_of_member=api.needs_no_acls)
            if not api.is_pipelined:
                await self._replies.join()  # it may read what an earlier request writes
            if items > limits.KAFKA_LITTLE_ITEMS:
                await self._context.scheduler.wait_turn()
            if api.may_wait and self._stream.is_over:
                raise ConnectionResetError("the client has left")
            reply = await api.handler(self._context, request)
            if self._context.audit is not None:
                await note_request(self._context.audit, request, reply, self._context.scheduler)
            if api.follows:
                arrival = arrival._replace(looks=self._context.broker.metadata.looks)
        logged_for = request.client if request is not None and logging.is_debug() else ""
        about = header, grant, request_bytes, received_at, arrival, logged_for
        if isinstance(reply, Awaitable):
            self._in_progress = None
            if APIS[api_key].may_wait:
                grant.release_parsed()  # it may wait for minutes
            return _QueuedReply((), reply, *about)
        reply_frame = await self._encode(header, reply, grant, arrival, request)
        grant.release_parsed()
        self._in_progress = None
        return _QueuedReply(reply_frame, None, *about)

    async def _log_in_again(self, session: ExpiringSession, frame: bytes, access: Access) -> None:
        """Has the client log in again, after its earlier requests were answered."""
        counts = self._context.counts
        await self._replies.join()
        try:
            access.identity = self.identity = await session.log_in(frame)
        except errors.NotAuthenticated:
            counts.reauthentications_failed += 1
            raise
        counts.reauthentications += 1

    def _moment(self) -> _Moment:
        """Starts counting the codes of a reply, and returns the current moment."""
        codes = CodeCount()
        count_for(codes)
        return _Moment(self._context.broker.metadata.looks, codes, ANYWHERE.needing_proof)

    async def _parse(
        self, api: ServedApi, frame: bytes, origin: Origin, grant: MemoryGrant
    ) -> tuple[Request, int]:
        """Returns the parsed request and the number of its items.

        A request with more than `KAFKA_LITTLE_ITEMS` items waits for memory and for a turn; one
        with more than `KAFKA_QUICK_ITEMS` is parsed in a thread.
        """
        is_gone = self._disconnected.is_set
        quick = messages.read_quickly(frame, origin, grant, is_gone)
        if quick is not None:
            grant.release_request()
            return quick
        try:
            checked = messages.check_request(frame, limits.KAFKA_LITTLE_ITEMS)
        except ManyItems:
            checked = await self._check_large(frame)
        if checked.items > limits.KAFKA_LITTLE_ITEMS:
            await grant.take_parsed(len(frame) + checked.items * _ITEM_BYTES)
        if checked.items > limits.KAFKA_QUICK_ITEMS:
            request = await self._context.run_blocking(
                WorkerPool.LARGE_REQUEST, messages.parse_request, checked, origin, grant, is_gone
            )
        elif checked.items > limits.KAFKA_LITTLE_ITEMS:
            await self._context.scheduler.wait_turn()
            request = messages.parse_request(checked, origin, grant, is_gone)
        else:
            request = messages.parse_request(checked, origin, grant, is_gone)
            if not api.keeps_frame and len(frame) > limits.KAFKA_FREE_BYTES:
                await grant.take_parsed(len(frame))
        if not api.keeps_frame:
            grant.release_request()
        return request, checked.items

    async def _check_large(self, frame: bytes) -> CheckedFrame:
        await self._context.scheduler.wait_turn()
        try:
            return messages.check_request(frame, limits.KAFKA_QUICK_ITEMS)
        except ManyItems:
            return await self._context.run_blocking(
                WorkerPool.LARGE_REQUEST, messages.check_request, frame, limits.KAFKA_ITEMS
            )

    # -------------------------------------------------------------------------- replies

    async def _send(self) -> None:
        while True:
            reply = await self._replies.get()
            frame, pending, header, grant, request_bytes, received_at, arrival, logged_for = reply
            del reply
            if pending is not None:
                count_for(arrival.codes)
                frame = await self._encode(header, await pending, grant, arrival)
                grant.release_parsed()
            await self._write(frame, grant, request_bytes)
            self._count(header, received_at, logged_for)
            del frame, pending
            self._unsent -= 1
            self._replies.task_done()

    def _count(self, header: _RequestHeader, received_at: float, logged_for: str) -> None:
        seconds = self._clock.monotonic() - received_at
        self._context.counts.answered(header[0], header[1], seconds)
        if logged_for:
            _log.debug(
                "answered a request",
                api=APIS[header[0]].name,
                version=header[1],
                client=logged_for,
                milliseconds=round(seconds * 1e3, 3),
            )

    async def _write(self, frame: Sequence[Raw], grant: MemoryGrant, request_bytes: int) -> None:
        """Writes a reply, and releases its memory and that of its request."""
        if frame:
            self._sending_bytes, self._sending_seconds = sum(map(len, frame)), 0.0
            await self._stream.write(frame)
            self._sending_bytes = 0
        grant.release_all()
        self._grants.discard(grant)
        self._unanswered.release(request_bytes)

    async def _encode(
        self,
        header: _RequestHeader,
        reply: Reply,
        grant: MemoryGrant,
        arrival: _Moment,
        request: Request | None = None,
    ) -> Sequence[Raw]:
        """Returns the frame in chunks; none if the client wants no response.

        A frame that needs a proof of leadership waits for it. A `request` that changes nothing is
        handled once more if another broker has changed the metadata behind the answer.
        """
        if reply is None:
            return ()
        frame = await self._write_frame(header, reply, grant)
        api = APIS[header[0]]
        if api.needs_proof or arrival.is_doubtful:
            try:
                await self._prove_leadership(arrival)
            except errors.MetadataChanged:
                if request is None or not api.is_repeatable:
                    raise
                grant.release_reply()
                arrival = self._moment()
                later = await api.handler(self._context, request)
                assert not isinstance(later, Awaitable), "repeatable requests wait in their handler"
                return await self._encode(header, later, grant, arrival)
        return frame

    async def _prove_leadership(self, arrival: _Moment) -> None:
        """Raises if nothing is proven: the client reconnects, perhaps to another broker."""
        broker = self._context.broker
        if not broker.metadata.is_proven(arrival.looks):
            prove = broker.metadata.prove
            await self._context.run_blocking(WorkerPool.PROOF, prove, arrival.looks)

    async def _write_frame(
        self, header: _RequestHeader, reply: Fields, grant: MemoryGrant
    ) -> Sequence[Raw]:
        """Returns the frame in chunks. A reply with many items is encoded in turns."""
        code = reply.get("error_code")
        if code:
            self._context.counts.errors[header[0], code.name] += 1
        if messages.is_large(reply, limits.KAFKA_LITTLE_ITEMS):
            return await self._encode_large(messages.reply_writer(*header, reply), grant)
        frame = messages.write_reply(*header, reply)
        await _take_reply_memory(grant, sum(map(len, frame)) - grant.records_bytes)
        return frame

    async def _encode_large(
        self, writer: messages.ReplyWriter | fetch_codec.Writer, grant: MemoryGrant
    ) -> Sequence[Raw]:
        """Returns the frame. Replies beyond `KAFKA_FREE_BYTES` are encoded one at a time.

        Such a reply acquires memory for a reply of the maximum size before it continues.
        """
        records_bytes = grant.records_bytes
        steps = self._context.scheduler.iterate(writer)
        async for _ in steps:
            if writer.written_bytes - records_bytes > limits.KAFKA_FREE_BYTES:
                break
        else:
            await _take_reply_memory(grant, writer.written_bytes - records_bytes)
            return writer.finish()
        async with self._context.large_reply_lock:
            await grant.take_reply(_REPLY_BYTES)
            async for _ in steps:
                if writer.written_bytes - records_bytes > _REPLY_BYTES:
                    most = _REPLY_BYTES
                    reason = f"the reply is larger than {most} bytes: request fewer items"
                    raise errors.BadRequest(reason=reason)
            grant.shrink_reply(writer.written_bytes)
        return writer.finish()


def _served_api(api_key: int, version: int) -> ServedApi | None:
    """Returns the API of a request; None for ApiVersions of a version that is not supported.

    Raises `BadRequest` for other APIs and versions that are not.
    """
    api = APIS.get(api_key)
    if api is None:
        raise errors.BadRequest(reason=f"API key {api_key} is not supported")
    if api.min_version <= version <= api.max_version:
        return api
    if api_key == messages.API_VERSIONS:
        return None
    supported = f"{api.min_version} to {api.max_version}"
    reason = f"{api.name}: version {version} is not supported; use {supported}"
    raise errors.BadRequest(reason=reason)


async def _without_frames(work: Callable[[], Awaitable[None]]) -> None:
    """Runs `work`. Its errors carry no traceback, whose frames would retain requests' bytes.

    A connection's error is part of a reference cycle, which Python frees late.
    """
    try:
        await work()
    except (ConnectionError, asyncio.CancelledError, errors.SparklogError) as error:
        raise error.with_traceback(None) from None


async def _take_reply_memory(grant: MemoryGrant, size: int) -> None:
    """Acquires memory for a reply of `size` bytes, not counting its records."""
    if size > 0 and not grant.take_free(size):
        await grant.take_reply(size)


def _allowed_seconds(size: int) -> float:
    """Returns the time within which `size` bytes must be transferred."""
    return size / SLOWEST_BYTES_PER_SECOND
