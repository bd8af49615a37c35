"""The bytes of one Kafka connection, as a stream with bounded read-ahead.

At most `READ_BYTES` are buffered ahead of `read`; asyncio's own streams exceed their limit by as
much as the socket has available. A large part of a request is read directly into the buffer that
`read` returns.

With TLS, ciphertext is received into a buffer that all connections of a loop share, and decrypted
immediately into the same two places. If there is no room for the plaintext, its ciphertext waits in
the connection's engine, at most `STEP_BYTES` of it, and nothing more is received.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from sparklog import limits
from sparklog.broker.kafka.messages import Raw
from sparklog.broker.tls.engine import STEP_BYTES, TlsEngine, TlsFailed

READ_BYTES = 32 * limits.KIB  # the maximum read ahead from a connection
_UNREAD_BYTES = 4 * STEP_BYTES
"""More than this is unread only if a client causes answers of TLS itself and does not read them."""


class SocketStream(asyncio.BufferedProtocol):
    """Exact reads and flow-controlled writes over one socket, in one event loop.

    Args:
        opened: called with the stream once it is connected.
    """

    def __init__(self, opened: Callable[[SocketStream], None]) -> None:
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(READ_BYTES)
        self._first = self._last = 0
        """The range of the buffer that `read` has not returned yet."""
        self._is_paused = False
        self._target: memoryview | None = None
        """The part of a large `read` that is still to be filled."""
        self._reading: asyncio.Future[None] | None = None
        self._draining: asyncio.Future[None] | None = None
        self._is_full = False
        self._is_over = False
        self._tls: TlsEngine | None = None
        self._failure: TlsFailed | None = None
        self.peer = ""
        """The client's address without its port; empty if unknown."""
        self.left: Callable[[], None] | None = None
        """Called when the client will send nothing more."""
        self.read_bytes = 0
        """Bytes received since the connection was opened."""

    # -------------------------------------------------------------------------- for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Now, because a transport has no address once its client has reset the connection.
        with contextlib.suppress(OSError, ValueError):
            self.peer = str((self._transport.get_extra_info("peername") or ("",))[0])
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._room() if self._tls is None else _of_loop.ciphertext

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over:
            return  # after the end of the client's data, or a record that was not valid
        self.read_bytes += nbytes
        if self._tls is None:
            self._add(nbytes)
        else:
            self._tls.receive(_of_loop.ciphertext[:nbytes])
            self._decrypt()
        self._pause_if_filled()

    def _pause_if_filled(self) -> None:
        if self._is_filled and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    @property
    def _is_filled(self) -> bool:
        """True if there is no room for another byte."""
        return self._target is None and self._last - self._first == len(self._buffer)

    def _room(self) -> memoryview:
        """Returns the place for the next bytes."""
        if self._target is not None:
            return self._target
        if self._first:  # moves the few unread bytes to the front
            unread = self._buffer[self._first : self._last]
            self._buffer[: len(unread)] = unread
            self._first, self._last = 0, len(unread)
        return memoryview(self._buffer)[self._last :]

    def _add(self, size: int) -> None:
        """Notes that `size` bytes are in the place that `_room` has returned."""
        if self._target is None:
            self._last += size
        else:
            self._target = self._target[size:]
            if len(self._target):
                return
            self._target = None
        self._wake_reader()

    def _decrypt(self) -> None:
        """Decrypts received bytes, as far as there is room for them."""
        assert self._tls is not None
        try:
            while size := self._tls.read_into(self._room()):
                self._add(size)
        except TlsFailed as error:
            self._failure = error
            self._end()
            return
        self._send_outgoing(self._tls)
        if self._tls.is_over:
            self._end()

    def eof_received(self) -> bool:
        if self._tls is not None:
            self._tls.end()
            self._decrypt()
        self._end()
        return True  # replies may still be written

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._end()
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    def _end(self) -> None:
        self._is_over = True
        self._wake_reader()
        if self.left is not None:
            self.left()

    def _wake_reader(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # -------------------------------------------------------------------------- for the connection

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "the stream is not connected yet"
        return self._transport

    @property
    def is_over(self) -> bool:
        """True if the client will send nothing more; bytes already received can still be read."""
        return self._is_over

    def check_open(self) -> None:
        """Raises `ConnectionResetError` if the client has left."""
        if self._is_over:
            raise ConnectionResetError("the client has left")

    def check(self, size: int) -> None:
        """Raises `ConnectionResetError` if the client has left and `size` bytes will not arrive."""
        if self._is_over and self._last - self._first < size:
            raise ConnectionResetError("the client has left")

    async def read(self, size: int) -> bytes | bytearray:
        """Returns exactly `size` bytes. Raises `ConnectionResetError` if the client has left."""
        if size <= len(self._buffer) // 2:
            while self._last - self._first < size:
                await self._receive_more()
            data = bytes(memoryview(self._buffer)[self._first : self._first + size])
            self._first += size
            self._resume_reading()
            return data
        large = bytearray(size)
        buffered = min(self._last - self._first, size)
        large[:buffered] = self._buffer[self._first : self._first + buffered]
        self._first += buffered
        if buffered < size:
            self._target = memoryview(large)[buffered:]
            try:
                while self._target is not None:
                    await self._receive_more()
            finally:
                self._target = None
        self._resume_reading()
        return large

    async def peek(self, size: int) -> bytes:
        """Returns the next bytes, which stay unread. Raises `ConnectionResetError`, as `read`."""
        while self._last - self._first < size:
            await self._receive_more()
        return bytes(memoryview(self._buffer)[self._first : self._first + size])

    async def start_tls(
        self, engine: TlsEngine, run: Callable[[Callable[[bytes], bool], bytes], Awaitable[bool]]
    ) -> None:
        """Completes a handshake; everything that is read and written from then on is encrypted.

        Raises `TlsFailed`, and `ConnectionResetError` if the client has left.

        Args:
            engine: the TLS of this connection.
            run: calls the function in a thread, because a step of the handshake takes long.
        """
        is_complete = False
        while not is_complete:
            while self._first == self._last:
                await self._receive_more()
            try:
                is_complete = await run(engine.handshake, self._take_buffered())
            except TlsFailed:
                self._send_outgoing(engine)  # the alert
                raise
            # Not if cancelled: the thread may still be using the engine.
            self._send_outgoing(engine)
        self._tls = engine
        engine.receive(self._take_buffered())  # arrived during the last step
        self._decrypt()
        self._pause_if_filled()
        self._resume_reading()

    def _send_outgoing(self, engine: TlsEngine) -> None:
        """Sends what TLS itself has to say, unless the client does not read it."""
        if self.transport.is_closing() or not (outgoing := engine.take_outgoing()):
            return
        self.transport.write(outgoing)
        if self.transport.get_write_buffer_size() > _UNREAD_BYTES:
            self.transport.abort()

    def _take_buffered(self) -> bytes:
        data = bytes(memoryview(self._buffer)[self._first : self._last])
        self._first = self._last = 0
        self._resume_reading()
        return data

    def close(self) -> None:
        """Closes the connection, and frees the read-ahead buffer."""
        if self._tls is not None and not self.transport.is_closing():
            self.transport.write(self._tls.close())
        self.transport.close()
        self.left = None
        self._buffer = bytearray()
        self._first = self._last = 0

    async def _receive_more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.check_open()
        self._reading = self._loop.create_future()
        self._resume_reading()
        try:
            await self._reading
        finally:
            self._reading = None

    def _resume_reading(self) -> None:
        if not self._is_paused or self._is_filled:
            return
        if self._tls is not None:
            self._decrypt()  # first the bytes that have waited in the engine
            if self._is_filled:
                return
        self._is_paused = False
        self.transport.resume_reading()

    async def write(self, chunks: Sequence[Raw]) -> None:
        """Writes the chunks. Returns when the client has read most of them.

        Raises `ConnectionResetError` if the connection is closed.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._tls is None:
            self.transport.writelines(chunks)
            await self._drain()
            return
        for ciphertext in self._tls.encrypt(chunks):
            if self.transport.is_closing():
                raise ConnectionResetError("the client has left")
            self.transport.write(ciphertext)
            await self._drain()

    async def _drain(self) -> None:
        if self._is_full:
            self._draining = self._loop.create_future()
            try:
                await self._draining
            finally:
                self._draining = None


class _OfLoop(threading.local):
    """The buffer for received ciphertext of each event loop, which has a thread of its own."""

    def __init__(self) -> None:
        self.ciphertext = memoryview(bytearray(STEP_BYTES))


_of_loop = _OfLoop()
