"""One connection: requests are handled in their order, and answered in their order.

It holds what it has read and not yet answered, and answers that its client has not yet read; both
are bounded, for itself and for all connections together. Where there is no room it is not read on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple

import structlog

from sparklog import errors, limits
from sparklog.broker.kafka import apis, messages
from sparklog.broker.kafka.memory import Budget
from sparklog.broker.kafka.messages import Raw
from sparklog.broker.kafka.registry import APIS, Door, Reply
from sparklog.wire import WRONG_PORT

_log = structlog.get_logger("sparklog.kafka")
_OTHER_CLIENT: Final = b"PRI "
"""How HTTP/2 begins, and so our own clients; as a length it would be more than any."""


class _Answer(NamedTuple):
    """A frame that is ready, in pieces, or what it will be made of."""

    frame: Sequence[Raw]
    later: Awaitable[Reply] | None
    api_key: int
    version: int
    correlation_id: int
    size: int
    """Bytes that it holds: the frame's, or the request's while that is at work."""


class Connection:
    """`serve` returns when it has ended, for whatever reason."""

    def __init__(
        self,
        door: Door,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        memory: Budget,
        *,
        request_max_bytes: int,
    ) -> None:
        self._door = door
        self._reader = reader
        self._writer = writer
        self._memory = memory
        self._request_max_bytes = request_max_bytes
        self._own = Budget(limits.KAFKA_CONNECTION_BYTES)
        self._held_bytes = 0
        self._reserved_bytes = 0
        """Of what is held: room for the reply that is being made."""
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue(limits.KAFKA_PIPELINED)
        self._coming_bytes = 0
        """Size of the request that is being read, and for how long it has been."""
        self._coming_seconds = 0
        self._seen: tuple[int, int] = (0, 0)
        self._frames = 0
        self._still_seconds = 0

    async def serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._receive())
                both.create_task(self._send())
        except* (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        except* asyncio.CancelledError:
            pass  # the door closes
        except* errors.SparklogError as group:
            self._say(str(group.exceptions[0]))
        except* Exception:
            _log.exception("a connection is closed")
        finally:
            self._writer.close()
            self._memory.give(self._held_bytes)
            while not self._answers.empty():
                later = self._answers.get_nowait().later
                if asyncio.iscoroutine(later):
                    later.close()

    def look(self) -> None:
        """To be called each second: ends the connection when nothing has moved for too long.

        A client that does not read its answers, or leaves off in the middle of a request, is given
        less time, and very little while others wait for the memory that these take; one that asks
        nothing has as long as Kafka gives it.
        """
        unread = self._writer.transport.get_write_buffer_size()
        seen = unread, self._frames
        self._still_seconds = self._still_seconds + 1 if seen == self._seen else 0
        self._seen = seen
        self._coming_seconds = self._coming_seconds + 1 if self._coming_bytes else 0
        patience_seconds: float = limits.KAFKA_STALLED_SECONDS
        if self._memory.is_short:
            patience_seconds = limits.KAFKA_STALLED_SHORT_SECONDS
        slowest_seconds = self._coming_bytes / limits.KAFKA_SLOWEST_BYTES_PER_SECOND
        if self._coming_seconds > patience_seconds + slowest_seconds:
            size, seconds = self._coming_bytes, self._coming_seconds
            self._end(f"a request of {size} bytes had not come after {seconds} s")
        elif unread and self._still_seconds >= patience_seconds:
            self._end(f"{unread} bytes were not read for {self._still_seconds} s")
        elif not self._held_bytes and self._still_seconds >= limits.KAFKA_IDLE_SECONDS:
            self._writer.transport.abort()

    def _end(self, reason: str) -> None:
        self._say(reason)
        self._writer.transport.abort()

    def _say(self, reason: str) -> None:
        peer = str(self._writer.get_extra_info("peername"))
        _log.warning("a connection is closed", peer=peer, reason=reason)

    # -------------------------------------------------------------------------- requests

    async def _receive(self) -> None:
        peer = self._writer.get_extra_info("peername")
        host = f"/{peer[0]}" if peer else ""
        while True:
            length = await self._reader.readexactly(messages.LENGTH_BYTES)
            if length == _OTHER_CLIENT:
                flight = self._door.core.cluster().brokers[0].address
                self._writer.write(f"{WRONG_PORT}{flight}\n".encode())
                raise errors.BadRequest(reason="a client that speaks HTTP/2, not Kafka's protocol")
            size = int.from_bytes(length, "big", signed=True)
            if not 0 <= size <= self._request_max_bytes:
                reason = f"a request of {size} bytes; {self._request_max_bytes} are the most"
                raise errors.BadRequest(reason=reason)
            await self._take(size)
            self._coming_bytes, self._coming_seconds = size, 0
            frame = await self._reader.readexactly(size)
            self._coming_bytes = 0
            self._frames += 1
            await self._answers.put(await self._handled(frame, host))

    async def _handled(self, frame: bytes, host: str) -> _Answer:
        api_key, version, correlation_id = messages.read_start(frame)
        api = APIS.get(api_key)
        if api is None:
            raise errors.BadRequest(reason=f"API key {api_key} is not served")
        reply: Reply | Awaitable[Reply]
        if not api.first <= version <= api.last:
            if api_key != messages.API_VERSIONS:
                raise errors.BadRequest(reason=f"{api.name} is not served in version {version}")
            version, reply = 0, apis.api_versions.answer(messages.UNSUPPORTED_VERSION)
        else:
            request = messages.read_request(frame, host, self._reserve)
            if not api.overlaps:
                await self._answers.join()  # what it reads may be what an earlier one writes
            reply = await api.handle(self._door, request)
        start = api_key, version, correlation_id
        if isinstance(reply, Awaitable):
            return _Answer((), reply, *start, len(frame))
        self._give(len(frame))
        written = _frame(*start, reply)
        size = sum(map(len, written))
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        if size > reserved:
            await self._take(size - reserved)
        else:
            self._give(reserved - size)
        return _Answer(written, None, *start, size)

    # -------------------------------------------------------------------------- answers

    async def _send(self) -> None:
        while True:
            frame, later, api_key, version, correlation_id, size = await self._answers.get()
            if later is not None:
                frame = _frame(api_key, version, correlation_id, await later)
            if frame:
                if self._writer.is_closing():
                    raise ConnectionResetError("the client has left")
                self._writer.writelines(frame)
                await self._writer.drain()
            self._give(size)
            self._answers.task_done()

    # -------------------------------------------------------------------------- memory

    async def _reserve(self, size: int) -> None:
        """Room for the reply to the request that is being handled."""
        await self._take(size)
        self._reserved_bytes += size

    async def _take(self, size: int) -> None:
        await self._own.take(size)
        await self._memory.take(size)
        self._held_bytes += size

    def _give(self, size: int) -> None:
        self._held_bytes -= size
        self._own.give(size)
        self._memory.give(size)


def _frame(api_key: int, version: int, correlation_id: int, reply: Reply) -> Sequence[Raw]:
    """Empty where no answer is wanted."""
    if reply is None:
        return ()
    return messages.write_reply(api_key, version, correlation_id, reply)
