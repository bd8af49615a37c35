"""The responses of a connection's calls as frames, as far as the client's windows allow.

A message that does not fit remains in its call's `outgoing`. It continues when a window grows or
the socket accepts more: in the call's thread, which waits for it, or, for a message of `send_soon`
and the text of a refusal, in the reading thread. Nothing here waits or takes a lock; all methods
require the connection's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Final

from sparklog import limits
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.call import PREFIX, PREFIX_BYTES, Call
from sparklog.broker.flight.grpc.foreign_requests import GRPC, end_of_text
from sparklog.broker.flight.grpc.header_blocks import HeaderBlocks
from sparklog.broker.flight.grpc.idle_frames import IdleFrames
from sparklog.broker.flight.grpc.status import PeerGone
from sparklog.broker.flight.grpc.transport import Transport
from sparklog.clock import Clock

_SMALL_BYTES: Final = 16 * limits.KIB
_JOINED_PARTS: Final = 512
_CONTENT_TYPE: Final = ("content-type", GRPC)
_LAST_HEADERS: Final = http2.END_HEADERS | http2.END_STREAM
_STARTED: Final = http2.head_block([_CONTENT_TYPE], with_status=True)


class ResponseWriter:
    """The responses of one connection, and the windows that its client has set."""

    def __init__(
        self, transport: Transport, blocks: HeaderBlocks, idle_frames: IdleFrames, clock: Clock
    ) -> None:
        self.stream_window = http2.WINDOW_BYTES
        """The initial window of a stream."""
        self._window = http2.WINDOW_BYTES
        self._frame_bytes = http2.FRAME_BYTES
        self._transport = transport
        self._blocks = blocks
        self._idle_frames = idle_frames
        self._clock = clock
        self._unsent: dict[Call, None] = {}
        """Calls with a message of `send_soon` that is not completely sent, oldest first."""

    # ---------------------------------------------------------------------- windows

    def apply(self, settings: Iterable[tuple[int, int]], calls: Iterable[Call]) -> None:
        """Applies the client's settings. `calls`: the open ones, whose windows change too."""
        window = self.stream_window
        for name, value in settings:
            if name == http2.INITIAL_WINDOW_SIZE:
                window = value
            elif name == http2.MAX_FRAME_SIZE:
                self._frame_bytes = min(value, limits.MIB)
            elif name == http2.HEADER_TABLE_SIZE:
                self._blocks.set_table_bytes(value)
        if window != self.stream_window:  # once, however many values there were
            for call in calls:
                call.send_window += window - self.stream_window
            self.stream_window = window

    def enlarge_window(self, size: int) -> None:
        """Lets all streams together send more. Raises `ProtocolError`."""
        self._window += size
        if self._window > http2.MAX_WINDOW:
            raise http2.ProtocolError(http2.FLOW_CONTROL_ERROR, "a window too large")

    # ---------------------------------------------------------------------- messages

    def send(self, call: Call, pieces: list[memoryview], size: int) -> bool:
        """Begins a message, for which a thread waits. Returns whether it was written at once.

        If not, the thread calls `advance` until all of it is written. Raises `PeerGone`.
        """
        return self._begin(call, pieces, size, is_waited_for=True)

    def send_soon(self, call: Call, pieces: list[memoryview], size: int) -> bool:
        """Sends as much of a message as possible. Returns whether all was sent.

        The rest is sent by the reading thread. Raises `PeerGone`.
        """
        is_written = self._begin(call, pieces, size, is_waited_for=False)
        if is_written and not self._transport.has_pending:
            return True
        call.stalled_since = self._clock.monotonic()
        self._unsent[call] = None
        self._send_unsent(call)
        return call not in self._unsent

    def _begin(
        self, call: Call, pieces: list[memoryview], size: int, *, is_waited_for: bool
    ) -> bool:
        """Writes a small message immediately, or queues it. Returns whether it was written."""
        transport = self._transport
        if call.is_dead or transport.is_closed:
            raise PeerGone
        total = size + PREFIX_BYTES
        start = b""
        if not call.has_started:
            block = self._blocks.answer(_STARTED)
            start = http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream_id, block)
        allowed = min(call.send_window, self._window, self._frame_bytes)
        if total <= allowed and total <= _SMALL_BYTES and not transport.has_pending:
            call.has_started = True
            call.send_window -= total
            self._window -= total
            self._idle_frames.answered += 1
            before = start + http2.header(http2.DATA, 0, call.stream_id, total)
            transport.write([memoryview(b"".join((before, PREFIX.pack(0, size), *pieces)))])
            return True
        if start:
            call.has_started = True
            transport.write([memoryview(start)], is_waited_for=is_waited_for)
        call.outgoing.append(memoryview(PREFIX.pack(0, size)))
        call.outgoing += pieces
        return False

    def advance(self, call: Call) -> bool:
        """Writes the next frames of a call's message. Returns False if its windows allow none.

        Raises `PeerGone`. Its caller flushes the transport first, and afterwards.
        """
        frames = self._frames(call)
        if frames:
            self._transport.write(frames, is_waited_for=True)
        return bool(frames)

    def resume(self, call: Call) -> bool:
        """Sends as much as larger windows allow.

        Returns whether the call's thread has to be woken: all is sent, or the socket is full.
        """
        if call in self._unsent:
            self._resume_unsent(call)
            return False
        if not call.outgoing or call.is_dead:
            return False
        if call.refusal:  # a short text, for which no thread waits
            while frames := self._frames(call):
                self._transport.control(b"".join(frames))
            return False
        with contextlib.suppress(PeerGone):
            while not self._transport.has_pending and self.advance(call):
                pass
        return not call.outgoing or self._transport.has_pending

    def resume_unsent(self) -> None:
        """Continues to send messages of `send_soon`, once no bytes are pending for the socket."""
        for call in [*self._unsent]:
            if self._transport.has_pending:
                return
            self._resume_unsent(call)

    def _resume_unsent(self, call: Call) -> None:
        self._send_unsent(call)
        if call not in self._unsent and call.on_progress is not None:
            call.on_progress()

    def _send_unsent(self, call: Call) -> None:
        """Continues to send a message of `send_soon`, for which no thread waits."""
        with contextlib.suppress(PeerGone):
            while not self._transport.has_pending and (frames := self._frames(call)):
                self._transport.write(frames)
        if not call.outgoing and not self._transport.has_pending:
            self._unsent.pop(call, None)
            call.stalled_since = None

    def _frames(self, call: Call) -> list[memoryview]:
        """Returns frames with the part of the call's message that may be sent now."""
        pieces = call.outgoing
        frames: list[memoryview] = []
        left = self._transport.write_bytes
        while pieces and len(frames) < _JOINED_PARTS:
            allowed = min(call.send_window, self._window, self._frame_bytes, left)
            if allowed <= 0:
                break
            payload, size = _cut(pieces, allowed)
            call.send_window -= size
            self._window -= size
            self._idle_frames.answered += 1
            left -= size
            frames.append(memoryview(http2.header(http2.DATA, 0, call.stream_id, size)))
            frames += payload
        return frames

    # ---------------------------------------------------------------------- ends

    def begin_refusal(self, call: Call) -> None:
        """Responds to a non-gRPC request, with as much text as the windows allow."""
        assert call.refusal is not None
        status, headers, text = call.refusal
        block = self._blocks.answer(http2.head_block(headers, with_status=True, status=status))
        start = http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream_id, block)
        self._transport.control(start)
        call.has_started = True
        if text:
            call.outgoing.append(memoryview(text))
            self.resume(call)

    def end(
        self, call: Call, code: int, message: str, trailers: Iterable[tuple[str, bytes]]
    ) -> None:
        """Ends the response of a call, with a gRPC status or with the end of its text."""
        out = end_of_text(call) if call.refusal else self._status(call, code, message, trailers)
        self._transport.control(out)

    def _status(
        self, call: Call, code: int, message: str, trailers: Iterable[tuple[str, bytes]]
    ) -> bytes:
        headers = [("grpc-status", str(code).encode()), *trailers]
        if message:
            headers.insert(1, ("grpc-message", http2.percent_encoded(message)))
        if not call.has_started:
            headers.insert(0, _CONTENT_TYPE)
        block = self._blocks.answer(http2.head_block(headers, with_status=not call.has_started))
        self._idle_frames.answered += 1
        out = http2.frame(http2.HEADERS, _LAST_HEADERS, call.stream_id, block)
        return out if call.has_ended else out + http2.reset(call.stream_id, http2.NO_ERROR)

    def drop(self, call: Call) -> None:
        """Drops the message of `send_soon` of a call that has ended."""
        if self._unsent.pop(call, call) is None:
            call.outgoing.clear()  # no thread waits to do that


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
