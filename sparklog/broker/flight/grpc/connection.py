"""A client's connection: its calls, and the HTTP/2 frames that begin, feed and end them.

The server's reading thread passes in received bytes, and the calls' threads send. They share the
connection's lock. The modules beneath take no lock: `frame_reader` and `header_blocks` belong to
the reading thread, `transport` and `response_writer` require the lock.

The rules are those of RFC 9113 and of gRPC over HTTP/2. A client that violates HTTP/2 causes a
`ProtocolError`, which ends its connection; an error in one call ends only that call. A non-gRPC
request gets a human-readable HTTP response once it is complete or has used up its window.
"""

from __future__ import annotations

import functools
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from sparklog import limits
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.admission import Admission
from sparklog.broker.flight.grpc.call import FREE_BYTES, PREFIX_BYTES, Call, Method
from sparklog.broker.flight.grpc.foreign_requests import (
    FOREIGN,
    refusal_of,
    refusal_of_protocol,
)
from sparklog.broker.flight.grpc.frame_reader import MAX_DATA_FRAME_BYTES, FrameReader
from sparklog.broker.flight.grpc.header_blocks import MAX_BLOCK_BYTES, HeaderBlocks
from sparklog.broker.flight.grpc.idle_frames import IdleFrames
from sparklog.broker.flight.grpc.message_memory import MessageMemory
from sparklog.broker.flight.grpc.response_writer import ResponseWriter
from sparklog.broker.flight.grpc.status import INTERNAL, OK, UNIMPLEMENTED, GrpcError, PeerGone
from sparklog.broker.flight.grpc.transport import Transport
from sparklog.broker.tls.engine import TlsEngine
from sparklog.clock import Clock
from sparklog.listeners import Listener
from sparklog.security.x500 import CertificatePrincipal

_REMEMBERED_STREAMS: Final = 256
"""The number of ended streams that are remembered for late frames."""
_SETTINGS_BYTES: Final = 60
"""The bytes of settings that count as one frame: clients send up to ten settings, once."""
_CALLS_AT_ONCE: Final = 256
"""A frame may have to visit all open calls; this many of them count as another frame."""
_DRAIN_MS: Final = 250
_SETTINGS: Final = http2.settings(
    [
        (http2.INITIAL_WINDOW_SIZE, FREE_BYTES),
        (http2.MAX_FRAME_SIZE, MAX_DATA_FRAME_BYTES),
        (http2.MAX_HEADER_LIST_SIZE, MAX_BLOCK_BYTES),
        (http2.MAX_CONCURRENT_STREAMS, limits.FLIGHT_CONNECTION_CALLS),
    ]
) + http2.window_update(0, http2.MAX_WINDOW - http2.WINDOW_BYTES)
_UNKNOWN_METHOD: Final = Method(
    serve=lambda _: None,
    message_bytes=0,
    too_large=lambda _size, _limit: GrpcError(UNIMPLEMENTED, "there is no such method"),
)


class ConnectionServer(Protocol):
    """A connection's server: its methods, its counts, and the work of its reading thread."""

    clock: Clock
    methods: dict[bytes, Method]
    message_memory: MessageMemory

    def admit_call(self, call: Call) -> bool: ...

    def end_excess(self) -> None: ...

    def recognises(self, call: Call) -> bool: ...

    def without_token(self) -> GrpcError: ...

    def admitted(self, call: Call) -> None: ...

    def serve(self, call: Call) -> None: ...

    def closed(self, call: Call, freed_bytes: int) -> None: ...

    def write_later(self, connection: GrpcConnection) -> None: ...

    def close_later(self, connection: GrpcConnection) -> None: ...

    def log_limited(self, event: str, **facts: object) -> None: ...


class GrpcConnection:
    """A client's connection. The reading thread calls `receive`; the calls' threads write."""

    def __init__(
        self,
        server: ConnectionServer,
        sock: socket.socket,
        host: str,
        port: int,
        *,
        listener: Listener,
        tls: TlsEngine | None = None,
    ) -> None:
        """`tls`: encrypts the connection once `shake_hands` has returned True."""
        self.server = server
        self.listener = listener
        """The listener that the client has connected to."""
        self.host = host
        self.peer = f"{host}:{port}"
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a window grows, pending bytes have been sent, or a call ends."""
        self.transport = Transport(
            sock,
            tls,
            write_later=functools.partial(server.write_later, self),
            close_later=functools.partial(server.close_later, self),
        )
        self.admission = Admission(is_needed=listener.has_sasl)
        self.calls: dict[int, Call] = {}
        self._clock = server.clock
        self.began = self.idle_since = self._clock.monotonic()
        """`idle_since`: when the last call ended, if none is open."""
        self.served = 0
        """The number of threads that serve calls; those of reset calls end later."""
        self._blocks = HeaderBlocks()
        self._idle_frames = IdleFrames(self._clock)
        self._frames = FrameReader(self._blocks)
        self._responses = ResponseWriter(
            self.transport, self._blocks, self._idle_frames, self._clock
        )
        self._window = http2.MAX_WINDOW
        """The bytes that the client may send on all streams."""
        self._last_stream = 0
        self._data_call: Call | None = None
        """The call of the DATA frame that is being received."""
        self._ended_streams: deque[int] = deque(maxlen=_REMEMBERED_STREAMS)
        """Streams that the client has ended: it must send nothing more on them."""
        self._cut_streams: deque[int] = deque(maxlen=_REMEMBERED_STREAMS)
        """Streams that the broker has ended: frames that the client sent earlier are ignored."""
        self._refused: dict[int, Call] = {}
        """Non-gRPC requests."""

    @property
    def principal(self) -> CertificatePrincipal | None:
        """The principal of the client's certificate."""
        return self.transport.principal

    @property
    def peer_window(self) -> int:
        """The initial window of a stream, as set by the client."""
        return self._responses.stream_window

    @property
    def is_http2(self) -> bool:
        """True once the client has sent the preface of HTTP/2."""
        return self._frames.has_begun

    @property
    def is_closed(self) -> bool:
        return self.transport.is_closed

    def go_away(self, code: int, reason: str = "") -> None:
        """Sends GOAWAY with the reason: the client may open no more streams."""
        if self.is_http2:
            with self.lock:
                self.transport.control(http2.goaway(self._last_stream, code, reason))

    def admitted(self, call: Call) -> None:
        """Notes that the client of a call was admitted."""
        self.server.admitted(call)

    def log_limited(self, event: str, **facts: object) -> None:
        """Logs a warning, at most one per second, because clients can cause them."""
        self.server.log_limited(event, **facts)

    # ---------------------------------------------------------------------- TLS

    def answer_handshake(self, *, is_complete: bool) -> None:
        """Sends what TLS has to say after a step of the handshake."""
        with self.lock:
            self.transport.answer_handshake(is_complete=is_complete)

    def refuse_without_tls(self) -> None:
        """Sends the reason to a client that does not use TLS, in its own protocol."""
        reason = f"this port uses TLS: connect to {self.listener.client_address}"
        with self.lock:
            self.transport.refuse_without_tls(reason)

    def receive_encrypted(self, ciphertext: memoryview, plaintext: memoryview) -> None:
        """Processes received bytes of TLS. Raises `TlsFailed` and `ProtocolError`.

        `plaintext`: a buffer for the decrypted bytes.
        """
        with self.lock:
            self.transport.receive(ciphertext)
        while True:
            with self.lock:
                size = self.transport.read_into(plaintext)
            if not size:
                return
            self.receive(plaintext[:size])

    # ---------------------------------------------------------------------- reading

    def receive(self, data: memoryview) -> None:
        """Processes received bytes. Raises `ProtocolError`."""
        self.admission.count_bytes(len(data))
        self._frames.receive(data, self)

    def begin(self) -> None:
        """Sends the server's settings, its first frame."""
        with self.lock:
            self.transport.control(_SETTINGS)

    def foreign(self, data: memoryview) -> http2.ProtocolError:
        """Answers a client that does not use HTTP/2; returns the error that ends its connection."""
        text, spoken = refusal_of_protocol(data)
        with self.lock:
            self.transport.control(text)
        return http2.ProtocolError(http2.PROTOCOL_ERROR, spoken)

    def whole_data(self, stream: int, payload: memoryview) -> bool:
        """Accepts a frame that is one small message, as most are; returns False for others."""
        call, size = self.calls.get(stream), len(payload)
        if call is None or not call.is_whole(payload[:PREFIX_BYTES], size):
            return False
        with self.lock:
            is_low = self._window < http2.MAX_WINDOW // 2
            if is_low or call.is_dead or call.has_ended or size > call.window:
                return False
            self._window -= size
            call.window -= size
            call.take_whole(bytearray(payload[PREFIX_BYTES:]))
        if not call.is_served:
            self.server.serve(call)
        return True

    def begin_data(self, stream: int, size: int, data_bytes: int) -> None:
        """Uses the windows for a DATA frame of `size` bytes, of which `data_bytes` are data."""
        self._check_begun(stream)
        self._data_call = call = self.calls.get(stream)
        with self.lock:
            self._window -= size
            if self._window < http2.MAX_WINDOW // 2:
                more = http2.MAX_WINDOW - self._window
                self.transport.control(http2.window_update(0, more))
                self._window = http2.MAX_WINDOW
            if stream in self._ended_streams if call is None else call.has_ended:
                raise http2.ProtocolError(http2.STREAM_CLOSED, "data after a stream's end")
            if call is not None:
                call.window -= size
                if call.window < 0:
                    reason = "more than the window allows"
                    raise http2.ProtocolError(http2.FLOW_CONTROL_ERROR, reason)
                if call.length_left is not None:
                    call.length_left -= data_bytes
        if not data_bytes:
            self._idle_frames.add()

    def data(self, part: memoryview) -> None:
        """Passes the next part of a DATA frame to its call."""
        call = self._data_call
        if call is None or call.is_dead or call.refusal:
            return
        try:
            count = call.feed(part)
        except GrpcError as status:
            self.server.log_limited("a call is refused", peer=self.peer, reason=str(status))
            self.end(call, status.code, str(status), status.trailers)
            return
        if count:
            self.server.serve(call)
        if call.wants_grant:
            self.server.message_memory.request_step(call)
        elif call.lacks_window:
            self.update_window(call)

    def end_data(self, flags: int) -> None:
        """Ends a DATA frame, and with it the call's request if the flags say so."""
        call, self._data_call = self._data_call, None
        if call is None or call.is_dead:
            return
        if flags & http2.END_STREAM:
            self._half_close(call)
        elif call.refusal and call.window <= 0:
            self._refuse(call)  # its client must not send more, and waits

    def _half_close(self, call: Call) -> None:
        call.finish_reading()
        if call.length_left:
            self._reset(call, http2.PROTOCOL_ERROR)
        elif call.refusal:
            self._refuse(call)
        elif call.is_partial:
            self.end(call, INTERNAL, "the request ends within a message", [])
        else:
            self.server.serve(call)

    def frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        """Processes a frame other than DATA. Raises `ProtocolError`."""
        self.transport.check_unread()
        if kind == http2.HEADERS:
            self._blocks.begin(stream, flags, payload)
            if flags & http2.END_HEADERS:
                self._end_block()
            return
        self._idle_frames.add(
            1 + len(payload) // _SETTINGS_BYTES + len(self.calls) // _CALLS_AT_ONCE
        )
        if kind == http2.WINDOW_UPDATE:
            self._window_update(stream, payload)
        elif kind == http2.CONTINUATION:
            self._blocks.continue_with(stream, payload)
            if flags & http2.END_HEADERS:
                self._end_block()
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            self._settings(payload)
        elif kind == http2.PING and not flags & http2.ACK:
            with self.lock:
                self.transport.control(http2.frame(http2.PING, http2.ACK, 0, bytes(payload)))
        elif kind == http2.RST_STREAM:
            self._check_begun(stream)
            call = self.calls.get(stream)
            if call is not None:
                call.has_ended = True
                self._remove(call)

    def _check_begun(self, stream: int) -> None:
        if stream > self._last_stream or not stream % 2:
            raise http2.ProtocolError(http2.PROTOCOL_ERROR, f"stream {stream} has not begun")

    def _settings(self, payload: memoryview) -> None:
        settings = http2.read_settings(payload)
        with self.lock:
            self._responses.apply(settings, self.calls.values())
            # First: data that larger windows allow is too much for a peer that has no ACK yet.
            self.transport.control(http2.frame(http2.SETTINGS, http2.ACK, 0, b""))
            self._resume(self.calls.values())
        self._end_refused()

    def _window_update(self, stream: int, payload: memoryview) -> None:
        size = int.from_bytes(payload, "big") & http2.MAX_WINDOW
        if not stream:
            if not size:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "a window increment of 0")
            with self.lock:
                self._responses.enlarge_window(size)
                self._resume(self.calls.values())
        else:
            self._check_begun(stream)
            if (call := self.calls.get(stream)) is None:
                return
            with self.lock:
                call.send_window += size
                code = http2.FLOW_CONTROL_ERROR if call.send_window > http2.MAX_WINDOW else None
                if not size:
                    code = http2.PROTOCOL_ERROR
                if code is None:
                    self._resume([call])
            if code is not None:
                self._reset(call, code)
        self._end_refused()

    def _resume(self, calls: Iterable[Call]) -> None:
        """Sends what larger windows allow, and wakes the threads that wait for it."""
        wakes = [self._responses.resume(each) for each in calls]
        if any(wakes):
            self.changed.notify_all()

    def _end_block(self) -> None:
        """Processes the headers of a complete block: those of a new request, or its trailers."""
        stream, flags, headers = self._blocks.end()
        if (call := self.calls.get(stream)) is not None:
            self._trailers(call, flags, headers)
            return
        with self.lock:
            if stream in self._ended_streams:
                raise http2.ProtocolError(http2.STREAM_CLOSED, "headers behind a stream's end")
            if stream in self._cut_streams:  # sent before the client learnt of its end
                return
        if not stream % 2 or stream <= self._last_stream:
            raise http2.ProtocolError(http2.PROTOCOL_ERROR, f"{stream} cannot be a new stream")
        self._last_stream = stream
        self.admission.count_call()
        try:
            self._open(stream, flags, http2.request_headers(headers))
        except http2.StreamError as error:
            self._idle_frames.add()
            self.server.log_limited("a request is refused", peer=self.peer, reason=str(error))
            with self.lock:
                self.transport.control(http2.reset(stream, error.code))
                self._cut_streams.append(stream)

    def _trailers(self, call: Call, flags: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Processes the headers that end a request."""
        if call.has_ended:
            raise http2.ProtocolError(http2.STREAM_CLOSED, "headers behind a stream's end")
        try:
            http2.check_trailers(headers)
            if not flags & http2.END_STREAM:
                raise http2.StreamError(http2.PROTOCOL_ERROR, "trailers without END_STREAM")
        except http2.StreamError as error:
            self.server.log_limited("a request is refused", peer=self.peer, reason=str(error))
            self._reset(call, error.code)
            return
        if not call.is_dead:
            self._half_close(call)

    def _open(self, stream: int, flags: int, headers: Mapping[bytes, bytes]) -> None:
        """Begins a call. Raises `StreamError`."""
        server = self.server
        length = http2.content_length(headers)
        refusal = refusal_of(headers)
        method = FOREIGN if refusal else server.methods.get(headers.get(b":path", b""))
        call = Call(
            self,
            stream,
            method or _UNKNOWN_METHOD,
            memory=server.message_memory,
            clock=self._clock,
        )
        call.length_left = length
        call.authorization = headers.get(b"authorization", b"").decode(errors="replace")
        call.is_admitted = known = refusal is None and server.recognises(call)
        self.admission.is_admitted |= known
        with self.lock:
            if not server.admit_call(call):
                self.transport.control(http2.reset(stream, http2.REFUSED_STREAM))
                self._cut_streams.append(stream)
                return
            self.calls[stream] = call
        server.end_excess()
        if refusal:
            call.refusal = refusal
            self._refused[stream] = call
        elif method is None:
            self.end(call, UNIMPLEMENTED, "there is no such method", [])
        elif not (known or call.authorization or method.is_open):
            self.admission.count_refused()
            status = server.without_token()
            self.end(call, status.code, str(status), status.trailers)
        elif headers.get(b"grpc-encoding", b"identity") != b"identity":
            self.end(call, UNIMPLEMENTED, "messages must not be compressed", [])
        elif (timeout := headers.get(b"grpc-timeout")) is not None:
            self._set_deadline(call, timeout)
        if flags & http2.END_STREAM and not call.is_dead:
            self._half_close(call)

    def _set_deadline(self, call: Call, timeout: bytes) -> None:
        try:
            seconds = http2.timeout_seconds(timeout)
        except ValueError as error:
            self.end(call, INTERNAL, str(error), [])
            return
        call.deadline = call.began + seconds
        if not seconds:
            call.expire()

    # ---------------------------------------------------------------------- refusing

    def refuse(self, call: Call) -> None:
        """Resets the stream of a call that was never served: its client may retry."""
        self._reset(call, http2.REFUSED_STREAM)

    def _reset(self, call: Call, code: int) -> None:
        """Resets the stream of a call whose client violates the protocol on it."""
        with self.lock:
            if not call.is_dead and not self.is_closed:
                self.transport.control(http2.reset(call.stream_id, code))
                call.is_dead = True  # nothing may follow
        self._remove(call)

    def _refuse(self, call: Call) -> None:
        """Responds to a non-gRPC request, with as much text as the windows allow."""
        with self.lock:
            if call.is_dead or call.has_started or self.is_closed:
                return
            self._responses.begin_refusal(call)
        self._end_refused()

    def _end_refused(self) -> None:
        """Ends the calls whose refusals have been sent."""
        for call in [*self._refused.values()] if self._refused else ():
            if call.has_started and not call.outgoing:
                self.end(call, OK, "", [])

    # ---------------------------------------------------------------------- windows

    def update_window(self, call: Call) -> None:
        """Lets the client send more, in large steps unless a message needs a small one."""
        with self.lock:
            coming = self._frames.data_left if self._data_call is call else 0
            size = call.target_window() - call.window - coming
            is_due = size >= FREE_BYTES // 2 or (size > 0 and call.lacks_window)
            if is_due and not call.is_dead and not call.has_ended:
                call.window += size
                self.transport.control(http2.window_update(call.stream_id, size))

    def release_read(self, call: Call) -> None:
        """Releases the message that a call has read, and lets its client continue."""
        with self.lock:
            freed = call.released()
        if freed:
            self.server.message_memory.release(freed)
        if call.wants_grant:
            self.server.message_memory.request_step(call)
        else:
            self.update_window(call)

    # ---------------------------------------------------------------------- writing

    def send(self, call: Call, pieces: list[memoryview], size: int) -> None:
        """Sends a message. Raises `PeerGone`."""
        with self.lock:
            if not self._responses.send(call, pieces, size):
                self._send_rest(call)

    def send_soon(self, call: Call, pieces: list[memoryview], size: int) -> bool:
        """Sends as much of a message as possible without blocking. Returns whether all was sent.

        The rest is sent by the reading thread. Raises `PeerGone`.
        """
        with self.lock:
            return self._responses.send_soon(call, pieces, size)

    def _send_rest(self, call: Call) -> None:
        """Sends the rest of a message, and waits for its windows and the socket."""
        transport = self.transport
        try:
            while call.outgoing or transport.has_pending:
                if call.is_dead or transport.is_closed:
                    raise PeerGone
                if transport.has_pending:
                    self._drain(call)
                elif not self._responses.advance(call):
                    call.stalled_since = call.stalled_since or self._clock.monotonic()
                    self.changed.wait()
        finally:
            call.outgoing.clear()
            call.stalled_since = None
            if transport.has_pending and not transport.is_closed:
                transport.request_write()

    def _drain(self, call: Call) -> None:
        """Waits for the socket and writes pending bytes, without the reading thread."""
        poll = select.poll()
        poll.register(self.transport.socket, select.POLLOUT)
        call.stalled_since = call.stalled_since or self._clock.monotonic()
        self.lock.release()
        try:
            ready = poll.poll(_DRAIN_MS)
        finally:
            self.lock.acquire()
        if ready and not self.is_closed:
            try:
                self._flush()
            except OSError:
                self.server.close_later(self)
                raise PeerGone from None

    def flush(self) -> bool:
        """Sends pending bytes. Returns whether all were sent. Raises OSError."""
        with self.lock:
            return self._flush()

    def _flush(self) -> bool:
        if self.transport.flush():
            self.changed.notify_all()
            self._responses.resume_unsent()
        return not self.transport.has_pending

    # ---------------------------------------------------------------------- ending

    def end(
        self, call: Call, code: int, message: str, trailers: Iterable[tuple[str, bytes]]
    ) -> None:
        """Ends a call with a gRPC status."""
        with self.lock:
            if not call.is_dead and not self.is_closed:
                self._responses.end(call, code, message, trailers)
                call.is_dead = True  # nothing may follow
        self._remove(call)

    def _remove(self, call: Call) -> None:
        with self.lock:
            if self.calls.pop(call.stream_id, None) is None:
                return
            self._refused.pop(call.stream_id, None)
            (self._ended_streams if call.has_ended else self._cut_streams).append(call.stream_id)
            freed = call.die()
            if not self.calls:
                self.idle_since = self._clock.monotonic()
            self._responses.drop(call)
            self.changed.notify_all()
        self.server.closed(call, freed)
        if call.on_progress is not None:
            call.on_progress()

    def close(self) -> None:
        """Closes the connection and ends its calls. Called once, by the reading thread."""
        with self.lock:
            self.transport.end()
            self.changed.notify_all()
        for call in list(self.calls.values()):
            self._remove(call)
        self.transport.close()
