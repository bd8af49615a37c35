"""Received bytes as HTTP/2 frames: whole ones, except that DATA is passed on as it arrives.

RFC 9113, sections 3.4 and 4. It checks all that concerns no particular stream: the preface, the
first frame, the sizes of frames, and that no header block is interrupted. It owns no socket and
takes no lock; only the server's reading thread calls it.
"""

from __future__ import annotations

from typing import Final, Protocol

from sparklog import limits
from sparklog.broker.flight.grpc import http2
from sparklog.broker.flight.grpc.header_blocks import HeaderBlocks

MAX_DATA_FRAME_BYTES: Final = 4 * limits.MIB
"""The largest DATA frame; other frames have HTTP/2's default limit."""


class FrameHandler(Protocol):
    """Processes the frames of a connection. Each method may raise `ProtocolError`."""

    def begin(self) -> None:
        """Called once the client has sent the preface."""
        ...

    def foreign(self, data: memoryview) -> http2.ProtocolError:
        """Answers a client that does not use HTTP/2; returns the error that ends its connection."""
        ...

    def frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        """Processes a frame other than DATA."""
        ...

    def whole_data(self, stream: int, payload: memoryview) -> bool:
        """Accepts a DATA frame without flags; returns False to receive it in parts instead."""
        ...

    def begin_data(self, stream: int, size: int, data_bytes: int) -> None:
        """Called at the beginning of a DATA frame.

        `size` includes its padding, and counts towards the windows; `data_bytes` does not.
        """
        ...

    def data(self, part: memoryview) -> None:
        """Processes the next part of the data."""
        ...

    def end_data(self, flags: int) -> None:
        """Called at the end of a DATA frame, behind its padding."""
        ...


class FrameReader:
    """The frames that one client sends."""

    def __init__(self, blocks: HeaderBlocks) -> None:
        """`blocks`: has the header block that is being received."""
        self.has_begun = False
        """True once the client has sent the preface."""
        self.data_left = 0
        """The bytes of the current DATA frame that have not arrived yet, without its padding."""
        self._padding_left = 0
        self._data_flags = 0
        self._blocks = blocks
        self._has_settings = False
        self._rest = b""
        """The bytes of a frame that is not complete."""

    def receive(self, data: memoryview, to: FrameHandler) -> None:
        """Passes the frames of received bytes to a handler. Raises `ProtocolError`."""
        if self._rest:
            data = memoryview(self._rest + data)
            self._rest = b""
        end = len(data)
        at = before = 0 if self.has_begun else self._begin(data, to)
        while at < end and self.has_begun:
            at = self._next(data, at, end, to)
            if at == before:
                break
            before = at
        if at < end:
            self._rest = bytes(data[at:])

    def _next(self, data: memoryview, at: int, end: int, to: FrameHandler) -> int:
        """Processes the next frame, or a part of its data.

        Returns the position to continue at; `at` if more bytes are needed.
        """
        if self.data_left or self._padding_left:
            return self._continue_data(data, at, end, to)
        start = at + http2.HEADER_BYTES
        if end < start:
            return at
        size, kind, flags, stream = http2.read_header(data, at)
        if self._blocks.received is not None and kind != http2.CONTINUATION:
            raise http2.ProtocolError(http2.PROTOCOL_ERROR, "a header block is interrupted")
        after = start + size
        if kind == http2.DATA:
            if not flags and after <= end and to.whole_data(stream, data[start:after]):
                return after
            if flags & http2.PADDED and end == start:
                return at  # the length of its padding has not arrived
            return self._begin_data(data, start, size, flags, stream, to)
        if size > http2.FRAME_BYTES:
            raise http2.ProtocolError(http2.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        if end < after:
            return at
        self._check(kind, flags, stream, size)
        to.frame(kind, flags, stream, data[start:after])
        return after

    def _begin(self, data: memoryview, to: FrameHandler) -> int:
        """Returns the position of the first frame; 0 if the preface is not complete."""
        size = len(http2.PREFACE)
        if data[:size] != http2.PREFACE[: len(data)]:
            raise to.foreign(data)
        if len(data) < size:
            return 0
        self.has_begun = True
        to.begin()
        return size

    def _check(self, kind: int, flags: int, stream: int, size: int) -> None:
        http2.check_frame(kind, flags, stream, size)
        if not self._has_settings:
            if kind != http2.SETTINGS or flags & http2.ACK:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True

    def _begin_data(
        self, data: memoryview, at: int, size: int, flags: int, stream: int, to: FrameHandler
    ) -> int:
        """Begins a DATA frame whose payload is at `at`. Returns the position of its data."""
        padding, data_bytes = 0, size
        if flags & http2.PADDED:
            padding = data[at]
            if padding + 1 > size:
                raise http2.ProtocolError(http2.PROTOCOL_ERROR, "padding longer than its frame")
            at += 1
            data_bytes -= padding + 1
        if size > MAX_DATA_FRAME_BYTES:
            raise http2.ProtocolError(http2.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        self._data_flags = flags
        self.data_left, self._padding_left = data_bytes, padding
        to.begin_data(stream, size, data_bytes)
        if not data_bytes and not padding:
            to.end_data(flags)
        return at

    def _continue_data(self, data: memoryview, at: int, end: int, to: FrameHandler) -> int:
        taken = min(self.data_left, end - at)
        if taken:
            self.data_left -= taken
            to.data(data[at : at + taken])
            at += taken
        skipped = min(self._padding_left, end - at) if not self.data_left else 0
        self._padding_left -= skipped
        if not self.data_left and not self._padding_left:
            to.end_data(self._data_flags)
        return at + skipped
