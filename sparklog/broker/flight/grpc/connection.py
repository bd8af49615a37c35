"""A client's connection: turns HTTP/2 frames into its calls' messages, and responses into frames.

The server's reading thread passes in received bytes, and the calls' threads send. With TLS, both
use the connection's engine, one at a time, under the connection's lock. The rules are those of RFC
9113 and of gRPC over HTTP/2. A client that violates HTTP/2 causes a `ProtocolError`,
which ends its connection; an error in one call ends only that call. A non-gRPC request gets a
human-readable HTTP response once it is complete or has used up its window.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Final, Protocol

from sparklog import limits
from sparklog.broker import http1
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.admission import Admission
from sparklog.broker.flight.grpc.call import FREE_BYTES, PREFIX, PREFIX_BYTES, Call, Method
from sparklog.broker.flight.grpc.foreign_requests import (
    FOREIGN,
    GRPC,
    NOT_GRPC,
    end_of_text,
    refusal_of,
)
from sparklog.broker.flight.grpc.header_blocks import MAX_BLOCK_BYTES, HeaderBlocks
from sparklog.broker.flight.grpc.idle_frames import IdleFrames
from sparklog.broker.flight.grpc.message_memory import MessageMemory
from sparklog.broker.flight.grpc.status import INTERNAL, OK, UNIMPLEMENTED, GrpcError, PeerGone
from sparklog.broker.tls.engine import HANDSHAKE, STEP_BYTES, TlsEngine, TlsFailed
from sparklog.clock import Clock
from sparklog.listeners import Listener
from sparklog.security.x500 import CertificatePrincipal

_MAX_FRAME_BYTES: Final = 4 * limits.MIB
_OUT_BYTES: Final = 64 * limits.KIB
"""The maximum number of control-frame bytes left unread by a client before its connection ends."""
_REMEMBERED_STREAMS: Final = 256
"""The number of ended streams that are remembered for late frames."""
_SETTINGS_BYTES: Final = 60
"""The bytes of settings that count as one frame: clients send up to ten settings, once."""
_CALLS_AT_ONCE: Final = 256
"""A frame may have to visit all open calls; this many of them count as another frame."""
_DRAIN_MS: Final = 250
_SMALL_BYTES: Final = 16 * limits.KIB
_JOINED_PARTS: Final = 512
_WRITE_BYTES: Final = 1 * limits.MIB
"""The maximum number of bytes of a message that are written at once. With TLS it is `STEP_BYTES`:
what the system does not accept is kept as ciphertext."""
_CONTENT_TYPE: Final = ("content-type", GRPC)
_SETTINGS: Final = http2.settings(
    [
        (http2.INITIAL_WINDOW_SIZE, FREE_BYTES),
        (http2.MAX_FRAME_SIZE, _MAX_FRAME_BYTES),
        (http2.MAX_HEADER_LIST_SIZE, MAX_BLOCK_BYTES),
        (http2.MAX_CONCURRENT_STREAMS, limits.FLIGHT_CONNECTION_CALLS),
    ]
) + http2.window_update(0, http2.MAX_WINDOW - http2.WINDOW_BYTES)
_LAST_HEADERS: Final = http2.END_HEADERS | http2.END_STREAM
_STARTED: Final = http2.head_block([_CONTENT_TYPE], with_status=True)
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
        self.socket = sock
        self.listener = listener
        """The listener that the client has connected to."""
        self.host = host
        self.peer = f"{host}:{port}"
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a window grows, pending bytes have been sent, or a call ends."""
        self.calls: dict[int, Call] = {}
        self.peer_window = http2.WINDOW_BYTES
        self._clock = server.clock
        self._tls = tls
        self.is_shaking_hands = tls is not None
        """True until the TLS handshake is complete."""
        self._first = b""
        """The first bytes of a client that should use TLS."""
        self._write_bytes = _WRITE_BYTES if tls is None else STEP_BYTES
        self.began = self.idle_since = self._clock.monotonic()
        """`idle_since`: when the last call ended, if none is open."""
        self.served = 0
        """The number of threads that serve calls; those of reset calls end later."""
        self.admission = Admission(is_needed=listener.has_sasl)
        self.handshake: Future[bool] | None = None
        """The step of the TLS handshake in the other thread, until it is over."""
        self.is_http2 = False
        self.is_closed = False
        self._blocks = HeaderBlocks()
        self._idle_frames = IdleFrames(self._clock)
        self._peer_frame_bytes = http2.FRAME_BYTES
        self._send_window = http2.WINDOW_BYTES
        self._window = http2.MAX_WINDOW
        self._last_stream = 0
        self._out: deque[memoryview] = deque()
        self._unsent: dict[Call, None] = {}
        """Calls with a message of `send_soon` that is not completely sent, oldest first."""
        self._unread_bytes = 0
        """The bytes of control frames since all pending bytes were last sent."""
        self.wants_write = False
        self._rest = b""
        self._data_call: Call | None = None
        self._data_flags = 0
        self._data_left = 0
        self._padding_left = 0
        self._has_settings = False
        self._ended_streams: deque[int] = deque(maxlen=_REMEMBERED_STREAMS)
        """Streams that the client has ended: it must send nothing more on them."""
        self._cut_streams: deque[int] = deque(maxlen=_REMEMBERED_STREAMS)
        """Streams that the broker has ended: frames that the client sent earlier are ignored."""
        self._refused: dict[int, Call] = {}
        """Non-gRPC requests."""

    def go_away(self, code: int, reason: str = "") -> None:
        """Sends GOAWAY with the reason: the client may open no more streams."""
        if self.is_http2:
            with self.lock:
                self._control(http2.goaway(self._last_stream, code, reason))

    def admitted(self, call: Call) -> None:
        """Notes that the client of a call was admitted."""
        self.server.admitted(call)

    def log_limited(self, event: str, **facts: object) -> None:
        """Logs a warning, at most one per second, because clients can cause them."""
        self.server.log_limited(event, **facts)

    # ---------------------------------------------------------------------- TLS

    def shake_hands(self, data: bytes) -> bool:
        """Continues the handshake with received bytes; returns whether it is complete.

        Raises `TlsFailed`. May take milliseconds of processor time, in any thread.
        """
        assert self._tls is not None
        self._first = self._first or data[: len(http2.PREFACE)]
        return self._tls.handshake(data)

    def answer_handshake(self, *, is_complete: bool) -> None:
        """Sends what TLS has to say after a step of the handshake."""
        with self.lock:
            self._send_outgoing()
        self.is_shaking_hands = not is_complete

    def refuse_without_tls(self) -> None:
        """Sends the reason to a client that does not use TLS, in its own protocol."""
        reason = f"this port uses TLS: connect to {self.listener.client_address}"
        with self.lock, contextlib.suppress(PeerGone):
            if self._first == http2.PREFACE:
                refusal = http2.goaway(0, http2.INADEQUATE_SECURITY, reason)
            else:
                refusal = http1.refusal(self._first, f"{reason}\n".encode())
            self._write_raw([memoryview(refusal)])

    def receive_encrypted(self, ciphertext: memoryview, plaintext: memoryview) -> None:
        """Processes received bytes of TLS. Raises `TlsFailed` and `ProtocolError`.

        `plaintext`: a buffer for the decrypted bytes.
        """
        assert self._tls is not None
        with self.lock:
            self._tls.receive(ciphertext)
        while True:
            with self.lock:
                size = self._decrypt(self._tls, plaintext)
                self._send_outgoing()
            if not size:
                return
            self.receive(plaintext[:size])

    @staticmethod
    def _decrypt(tls: TlsEngine, plaintext: memoryview) -> int:
        """Returns the number of bytes that could be decrypted, up to the size of the buffer."""
        size = 0
        while size < len(plaintext) and (count := tls.read_into(plaintext[size:])):
            size += count
        return size

    @property
    def principal(self) -> CertificatePrincipal | None:
        """The principal of the client's certificate."""
        return self._tls.principal if self._tls is not None else None

    @property
    def is_encrypted(self) -> bool:
        return self._tls is not None

    @property
    def has_ended(self) -> bool:
        """True if the client has ended its data within TLS."""
        return self._tls is not None and self._tls.is_over

    def _send_outgoing(self) -> None:
        assert self._tls is not None
        if outgoing := self._tls.take_outgoing():
            with contextlib.suppress(PeerGone):
                self._write_raw([memoryview(outgoing)])
            if self._out:
                self._count_unread(len(outgoing))

    # ---------------------------------------------------------------------- reading

    def receive(self, data: memoryview) -> None:
        """Processes received bytes. Raises `ProtocolError`."""
        self.admission.count_bytes(len(data))
        if self._rest:
            data = memoryview(self._rest + data)
            self._rest = b""
        at, end = 0, len(data)
        if not self.is_http2:
            at = self._begin_http2(data)
        while at < end and self.is_http2:
            if self._data_left or self._padding_left:
                at = self._receive_data(data, at, end)
                continue
            if end - at < http2.HEADER_BYTES:
                break
            size, kind, flags, stream = http2.read_header(data, at)
            if self._blocks.received is not None and kind != http2.CONTINUATION:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "a header block is interrupted")
            if kind == http2.DATA:
                if (at := self._begin_data(data, at, end, size, flags, stream)) < 0:
                    at = ~at
                    break
                continue
            if size > http2.FRAME_BYTES:
                raise http2.ProtocolError(http2.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - at - http2.HEADER_BYTES < size:
                break
            at += http2.HEADER_BYTES
            self._frame(kind, flags, stream, data[at : at + size])
            at += size
        if at < end:
            self._rest = bytes(data[at:])

    def _check_unread(self) -> None:
        if self._unread_bytes > _OUT_BYTES:
            raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, "answers are not read")

    def _begin_http2(self, data: memoryview) -> int:
        """Returns the position of the first frame; 0 if the preface is not complete.

        Sends the server's settings, its first frame. An HTTP/1 client gets a text response instead.
        """
        size = len(http2.PREFACE)
        with self.lock:
            if data[:size] != http2.PREFACE[: len(data)]:
                self._control(http1.refusal(data, NOT_GRPC))
                spoken = "it uses TLS, and this port does not" if _is_tls(data) else "not HTTP/2"
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, spoken)
            if len(data) < size:
                return 0
            self.is_http2 = True
            self._control(_SETTINGS)
        return size

    def _take_whole(self, data: memoryview, at: int, end: int, stream: int) -> bool:
        """Accepts a frame that is one small message, as most are; returns False for others."""
        size = end - at
        call = self.calls.get(stream)
        if call is None or not call.is_whole(data[at : at + PREFIX_BYTES], size):
            return False
        with self.lock:
            is_low = self._window < http2.MAX_WINDOW // 2
            if is_low or call.is_dead or call.has_ended or size > call.window:
                return False
            self._window -= size
            call.window -= size
            call.take_whole(bytearray(data[at + PREFIX_BYTES : end]))
        if not call.is_served:
            self.server.serve(call)
        return True

    def _begin_data(
        self, data: memoryview, at: int, end: int, size: int, flags: int, stream: int
    ) -> int:
        """Returns the position to continue at; the complement of `at` if more bytes are needed."""
        padding, beside = 0, http2.HEADER_BYTES
        after = at + beside + size
        if not flags and after <= end and self._take_whole(data, at + beside, after, stream):
            return after
        if flags & http2.PADDED:
            if end - at <= beside:
                return ~at
            padding = data[at + beside]
            beside += 1
            if padding + 1 > size:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "padding longer than its frame")
        if size > _MAX_FRAME_BYTES:
            raise http2.ProtocolError(http2.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        self._check_begun(stream)
        self._data_call = call = self.calls.get(stream)
        self._data_flags = flags
        self._data_left = size - padding - (beside - http2.HEADER_BYTES)
        self._padding_left = padding
        self._use_window(call, stream, size)
        if not self._data_left:
            self._idle_frames.add()
            if not padding:
                self._end_data()
        return at + beside

    def _use_window(self, call: Call | None, stream: int, size: int) -> None:
        with self.lock:
            self._window -= size
            if self._window < http2.MAX_WINDOW // 2:
                self._control(http2.window_update(0, http2.MAX_WINDOW - self._window))
                self._window = http2.MAX_WINDOW
            if stream in self._ended_streams if call is None else call.has_ended:
                raise http2.ProtocolError(http2.STREAM_CLOSED, "data after a stream's end")
            if call is None:
                return
            call.window -= size
            if call.window < 0:
                raise http2.ProtocolError(http2.FLOW_CONTROL_ERROR, "more than the window allows")
            if call.length_left is not None:
                call.length_left -= self._data_left

    def _receive_data(self, data: memoryview, at: int, end: int) -> int:
        taken = min(self._data_left, end - at)
        call = self._data_call
        if taken:
            self._data_left -= taken
            if call is not None and not call.is_dead:
                self._feed(call, data[at : at + taken])
            at += taken
        skipped = min(self._padding_left, end - at) if not self._data_left else 0
        self._padding_left -= skipped
        if not self._data_left and not self._padding_left:
            self._end_data()
        return at + skipped

    def _end_data(self) -> None:
        call, self._data_call = self._data_call, None
        if call is None or call.is_dead:
            return
        if self._data_flags & http2.END_STREAM:
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

    def _feed(self, call: Call, data: memoryview) -> None:
        if call.refusal:
            return
        try:
            count = call.feed(data)
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

    def _frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        self._check_unread()
        http2.check_frame(kind, flags, stream, len(payload))
        if not self._has_settings:
            if kind != http2.SETTINGS or flags & http2.ACK:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
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
                self._control(http2.frame(http2.PING, http2.ACK, 0, bytes(payload)))
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
        window = self.peer_window
        with self.lock:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == http2.INITIAL_WINDOW_SIZE:
                    if value > http2.MAX_WINDOW:
                        raise http2.ProtocolError(http2.FLOW_CONTROL_ERROR, "a window too large")
                    window = value
                elif name == http2.MAX_FRAME_SIZE:
                    if not http2.FRAME_BYTES <= value < 1 << 24:
                        raise http2.ProtocolError(http2.PROTOCOL_ERROR, "not a valid frame size")
                    self._peer_frame_bytes = min(value, limits.MIB)
                elif name == http2.ENABLE_PUSH:
                    if value > 1:
                        raise http2.ProtocolError(http2.PROTOCOL_ERROR, "push is 0 or 1")
                elif name == http2.HEADER_TABLE_SIZE:
                    self._blocks.set_table_bytes(value)
            if window != self.peer_window:  # once, however many values there were
                for call in self.calls.values():
                    call.send_window += window - self.peer_window
                self.peer_window = window
            # First: data that larger windows allow is too much for a peer that has no ACK yet.
            self._control(http2.frame(http2.SETTINGS, http2.ACK, 0, b""))
            for call in self.calls.values():
                self._send_on(call)
        self._end_refused()

    def _window_update(self, stream: int, payload: memoryview) -> None:
        size = int.from_bytes(payload, "big") & http2.MAX_WINDOW
        if not stream:
            if not size:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "a window increment of 0")
            with self.lock:
                self._send_window += size
                if self._send_window > http2.MAX_WINDOW:
                    raise http2.ProtocolError(http2.FLOW_CONTROL_ERROR, "a window too large")
                for each in self.calls.values():
                    self._send_on(each)
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
                    self._send_on(call)
            if code is not None:
                self._reset(call, code)
        self._end_refused()

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
                self._control(http2.reset(stream, error.code))
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
                self._control(http2.reset(stream, http2.REFUSED_STREAM))
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
                self._control(http2.reset(call.stream_id, code))
                call.is_dead = True  # nothing may follow
        self._remove(call)

    def _refuse(self, call: Call) -> None:
        """Responds to a non-gRPC request, with as much text as the windows allow."""
        assert call.refusal is not None
        with self.lock:
            if call.is_dead or call.has_started or self.is_closed:
                return
            status, headers, text = call.refusal
            block = self._blocks.answer(http2.head_block(headers, with_status=True, status=status))
            self._control(http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream_id, block))
            call.has_started = True
            if text:
                call.outgoing.append(memoryview(text))
                self._send_on(call)
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
            coming = self._data_left if self._data_call is call else 0
            size = call.target_window() - call.window - coming
            is_due = size >= FREE_BYTES // 2 or (size > 0 and call.lacks_window)
            if is_due and not call.is_dead and not call.has_ended:
                call.window += size
                self._control(http2.window_update(call.stream_id, size))

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
            if not self._begin_message(call, pieces, size, is_waited_for=True):
                self._send_large(call)

    def send_soon(self, call: Call, pieces: list[memoryview], size: int) -> bool:
        """Sends as much of a message as possible without blocking. Returns whether all was sent.

        The rest is sent by the reading thread. Raises `PeerGone`.
        """
        with self.lock:
            if self._begin_message(call, pieces, size, is_waited_for=False) and not self._out:
                return True
            call.stalled_since = self._clock.monotonic()
            self._unsent[call] = None
            self._send_unsent(call)
            return call not in self._unsent

    def _begin_message(
        self, call: Call, pieces: list[memoryview], size: int, *, is_waited_for: bool
    ) -> bool:
        """Writes a small message immediately, or queues it. Returns whether it was written."""
        if call.is_dead or self.is_closed:
            raise PeerGone
        total = size + PREFIX_BYTES
        start = b""
        if not call.has_started:
            block = self._blocks.answer(_STARTED)
            start = http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream_id, block)
        allowed = min(call.send_window, self._send_window, self._peer_frame_bytes)
        if total <= allowed and total <= _SMALL_BYTES and not self._out:
            call.has_started = True
            call.send_window -= total
            self._send_window -= total
            self._idle_frames.answered += 1
            before = start + http2.header(http2.DATA, 0, call.stream_id, total)
            self._write([memoryview(b"".join((before, PREFIX.pack(0, size), *pieces)))])
            return True
        if start:
            call.has_started = True
            self._write([memoryview(start)], is_waited_for=is_waited_for)
        call.outgoing.append(memoryview(PREFIX.pack(0, size)))
        call.outgoing += pieces
        return False

    def _send_unsent(self, call: Call) -> None:
        """Continues to send a message of `send_soon`, for which no thread waits."""
        with contextlib.suppress(PeerGone):
            while not self._out and (frames := self._frames(call)):
                self._write(frames)
        if not call.outgoing and not self._out:
            self._unsent.pop(call, None)
            call.stalled_since = None

    def _continue_unsent(self) -> None:
        """Continues to send messages of `send_soon`, once no bytes are pending for the socket."""
        for call in [*self._unsent]:
            if self._out:
                return
            self._send_unsent(call)
            if call not in self._unsent and call.on_progress is not None:
                call.on_progress()

    def _send_large(self, call: Call) -> None:
        try:
            while call.outgoing or self._out:
                if call.is_dead or self.is_closed:
                    raise PeerGone
                if self._out:
                    self._drain(call)
                elif frames := self._frames(call):
                    self._write(frames, is_waited_for=True)
                else:
                    call.stalled_since = call.stalled_since or self._clock.monotonic()
                    self.changed.wait()
        finally:
            call.outgoing.clear()
            call.stalled_since = None
            if self._out and not self.wants_write and not self.is_closed:
                self.wants_write = True
                self.server.write_later(self)

    def _send_on(self, call: Call) -> None:
        """Sends as much as the windows allow, and wakes the call's thread once all is sent."""
        if call in self._unsent:
            self._send_unsent(call)
            if call not in self._unsent and call.on_progress is not None:
                call.on_progress()
            return
        if not call.outgoing or call.is_dead:
            return
        if call.refusal:  # a short text, for which no thread waits
            while frames := self._frames(call):
                self._control(b"".join(frames))
            return
        with contextlib.suppress(PeerGone):
            while not self._out and (frames := self._frames(call)):
                self._write(frames, is_waited_for=True)
        if not call.outgoing or self._out:
            self.changed.notify_all()

    def _frames(self, call: Call) -> list[memoryview]:
        """Returns frames with the part of the call's message that may be sent now."""
        pieces = call.outgoing
        frames: list[memoryview] = []
        left = self._write_bytes
        while pieces and len(frames) < _JOINED_PARTS:
            allowed = min(call.send_window, self._send_window, self._peer_frame_bytes, left)
            if allowed <= 0:
                break
            payload, size = _cut(pieces, allowed)
            call.send_window -= size
            self._send_window -= size
            self._idle_frames.answered += 1
            left -= size
            frames.append(memoryview(http2.header(http2.DATA, 0, call.stream_id, size)))
            frames += payload
        return frames

    def _drain(self, call: Call) -> None:
        """Waits for the socket and writes pending bytes, without the reading thread."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
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

    def end(
        self, call: Call, code: int, message: str, trailers: Iterable[tuple[str, bytes]]
    ) -> None:
        """Ends a call with a gRPC status."""
        headers = [("grpc-status", str(code).encode()), *trailers]
        if message:
            headers.insert(1, ("grpc-message", http2.percent_encoded(message)))
        with self.lock:
            if not call.is_dead and not self.is_closed:
                out = end_of_text(call) if call.refusal else self._end_of_answer(call, headers)
                self._control(out)
                call.is_dead = True  # nothing may follow
        self._remove(call)

    def _end_of_answer(self, call: Call, headers: list[tuple[str, bytes]]) -> bytes:
        if not call.has_started:
            headers.insert(0, _CONTENT_TYPE)
        block = self._blocks.answer(http2.head_block(headers, with_status=not call.has_started))
        self._idle_frames.answered += 1
        out = http2.frame(http2.HEADERS, _LAST_HEADERS, call.stream_id, block)
        return out if call.has_ended else out + http2.reset(call.stream_id, http2.NO_ERROR)

    def _remove(self, call: Call) -> None:
        with self.lock:
            if self.calls.pop(call.stream_id, None) is None:
                return
            self._refused.pop(call.stream_id, None)
            (self._ended_streams if call.has_ended else self._cut_streams).append(call.stream_id)
            freed = call.die()
            if not self.calls:
                self.idle_since = self._clock.monotonic()
            if self._unsent.pop(call, call) is None:
                call.outgoing.clear()  # no thread waits to do that
            self.changed.notify_all()
        self.server.closed(call, freed)
        if call.on_progress is not None:
            call.on_progress()

    def _control(self, data: bytes) -> None:
        """Writes a control frame. Never blocks. Requires the lock."""
        with contextlib.suppress(PeerGone):
            self._write([memoryview(data)])
        if self._out:
            self._count_unread(len(data))

    def _count_unread(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > _OUT_BYTES:
            self.server.close_later(self)

    def _write(self, parts: list[memoryview], *, is_waited_for: bool = False) -> None:
        """Sends bytes, and queues those that the system does not accept yet. Requires the lock."""
        if self.is_closed:
            raise PeerGone
        if self._tls is not None:
            parts = self._encrypted(self._tls, parts)
        self._write_raw(parts, is_waited_for=is_waited_for)

    def _encrypted(self, tls: TlsEngine, parts: list[memoryview]) -> list[memoryview]:
        whole = parts if len(parts) == 1 else [b"".join(parts)]  # one record, not one for each
        try:
            return [memoryview(each) for each in tls.encrypt(whole)]
        except TlsFailed:  # after a record that was not valid
            self.server.close_later(self)
            raise PeerGone from None

    def _write_raw(self, parts: list[memoryview], *, is_waited_for: bool = False) -> None:
        if self.is_closed:
            raise PeerGone
        if not self._out:
            try:
                sent = self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.server.close_later(self)
                raise PeerGone from None
            done = 0
            while done < len(parts) and sent >= len(parts[done]):
                sent -= len(parts[done])
                done += 1
            if done == len(parts):
                return
            parts = parts[done:]
            parts[0] = parts[0][sent:]
        self._out.extend(parts)
        if not self.wants_write and not is_waited_for:
            self.wants_write = True
            self.server.write_later(self)

    def flush(self) -> bool:
        """Sends pending bytes. Returns whether all were sent. Raises OSError."""
        with self.lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._out:
            parts = [self._out[index] for index in range(min(len(self._out), 512))]
            try:
                sent = self.socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                break
            while sent:
                first = self._out[0]
                if sent < len(first):
                    self._out[0] = first[sent:]
                    break
                sent -= len(first)
                self._out.popleft()
        if not self._out:
            self.changed.notify_all()
            self.wants_write = False
            self._unread_bytes = 0
            if self._unsent:
                self._continue_unsent()
        return not self._out

    def close(self) -> None:
        """Closes the connection and ends its calls. Called once, by the reading thread."""
        with self.lock:
            if self._tls is not None and not self.is_shaking_hands and not self._out:
                with contextlib.suppress(OSError):
                    self.socket.send(self._tls.close())
            self.is_closed = True
            self._out.clear()
            self.changed.notify_all()
        if self.handshake is not None:
            self.handshake.cancel()
        for call in list(self.calls.values()):
            self._remove(call)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _is_tls(data: memoryview) -> bool:
    return bytes(data[: len(HANDSHAKE)]) == HANDSHAKE


def _cut(pieces: deque[memoryview], size: int) -> tuple[list[memoryview], int]:
    """Removes up to `size` bytes from the beginning of `pieces`. Returns them and their size."""
    taken, total = [], 0
    while pieces and total < size:
        first = pieces.popleft()
        if len(first) > size - total:
            pieces.appendleft(first[size - total :])
            first = first[: size - total]
        taken.append(first)
        total += len(first)
    return taken, total
