"""A connection's bytes: as many are read as are asked for, and no more than a few before.

What is read ahead of being asked for is bounded by `KAFKA_READ_BYTES`, which asyncio's own streams
exceed by whatever the socket has; large parts of requests are read right into their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from sparklog.broker.kafka.messages import Raw
from sparklog.limits import KAFKA_READ_BYTES


class Link(asyncio.BufferedProtocol):
    """Belongs to one event loop; `opened` is called once it is connected."""

    def __init__(self, opened: Callable[[Link], None]) -> None:
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(KAFKA_READ_BYTES)
        self._first = self._last = 0
        """What has been read and not been asked for yet."""
        self._is_paused = False
        self._target: memoryview | None = None
        """What is still to be filled, where bytes are read right into their place."""
        self._reading: asyncio.Future[None] | None = None
        self._draining: asyncio.Future[None] | None = None
        self._is_full = False
        self._is_over = False
        self.left: Callable[[], None] | None = None
        """Called when the client will send nothing more."""
        self.read_bytes = 0
        """Ever."""

    # -------------------------------------------------------------------------- the transport's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        if self._target is not None:
            return self._target
        if self._first:  # to the front; little is left, if anything
            left = self._buffer[self._first : self._last]
            self._buffer[: len(left)] = left
            self._first, self._last = 0, len(left)
        return memoryview(self._buffer)[self._last :]

    def buffer_updated(self, nbytes: int) -> None:
        self.read_bytes += nbytes
        if self._target is not None:
            self._target = self._target[nbytes:]
            if not len(self._target):
                self._target = None
                self._wake()
            return
        self._last += nbytes
        if self._last == len(self._buffer) and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._end()
        return True  # what is being written may still be written

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
        self._wake()
        if self.left is not None:
            self.left()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # -------------------------------------------------------------------------- a connection's

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "it is not connected yet"
        return self._transport

    @property
    def peer(self) -> str:
        """The client's address, without its port; empty where nobody knows."""
        found = self.transport.get_extra_info("peername")
        return str(found[0]) if found else ""

    @property
    def is_over(self) -> bool:
        """Whether the client sends nothing more; what it has sent may still be read."""
        return self._is_over

    def check(self, size: int) -> None:
        """Raises `ConnectionResetError` where the client has left, and so much will not come."""
        if self._is_over and self._last - self._first < size:
            raise ConnectionResetError("the client has left")

    async def read(self, size: int) -> bytes | bytearray:
        """Exactly so many bytes. Raises `ConnectionResetError` where the client has left."""
        if size <= len(self._buffer) // 2:
            while self._last - self._first < size:
                await self._more()
            found = bytes(memoryview(self._buffer)[self._first : self._first + size])
            self._first += size
            self._go_on()
            return found
        place = bytearray(size)
        have = min(self._last - self._first, size)
        place[:have] = self._buffer[self._first : self._first + have]
        self._first += have
        if have < size:
            self._target = memoryview(place)[have:]
            try:
                while self._target is not None:
                    await self._more()
            finally:
                self._target = None
        self._go_on()
        return place

    async def _more(self) -> None:
        if self._is_over:
            raise ConnectionResetError("the client has left")
        self._reading = self._loop.create_future()
        self._go_on()
        try:
            await self._reading
        finally:
            self._reading = None

    def _go_on(self) -> None:
        if self._is_paused and (self._target is not None or self._first or not self._last):
            self._is_paused = False
            self.transport.resume_reading()

    async def write(self, pieces: Sequence[Raw]) -> None:
        """Returns when the client has read most of it. Raises `ConnectionResetError`."""
        if self.transport.is_closing():
            raise ConnectionResetError("the client has left")
        self.transport.writelines(pieces)
        if self._is_full:
            self._draining = self._loop.create_future()
            try:
                await self._draining
            finally:
                self._draining = None
