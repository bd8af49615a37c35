"""One connection: requests are handled in their order, and answered in their order.

It holds what it has read and not yet answered, and answers that its client has not yet read; how
much, and who waits for whom, is told at the head of `memory`. Where there is no room it is not read
on. What takes long, because a request or its reply has many items, is done in turns with others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple

import structlog

from sparklog import errors, limits
from sparklog.broker.kafka import apis, messages
from sparklog.broker.kafka.lengths import ManyItems
from sparklog.broker.kafka.link import Link
from sparklog.broker.kafka.memory import Budget, Free, Hold, Memory
from sparklog.broker.kafka.messages import Raw, Request
from sparklog.broker.kafka.registry import APIS, Api, Door, Reply, Work
from sparklog.wire import WRONG_PORT

_log = structlog.get_logger("sparklog.kafka")
_OUR_CLIENT: Final = b"PRI "
"""How HTTP/2 begins, and so our own clients; as a length it would be more than any."""
_HTTP: Final = frozenset(
    method.encode()[: messages.LENGTH_BYTES]
    for method in ("GET ", "HEAD", "POST", "PUT ", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE")
)
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""How a TLS client begins, whatever its version (RFC 8446, 5.1)."""
_Start = tuple[int, int, int]
"""API key, version and correlation id."""


class _Answer(NamedTuple):
    """A frame that is ready, in pieces, or what it will be made of."""

    frame: Sequence[Raw]
    later: Awaitable[Reply] | None
    start: _Start
    hold: Hold
    own_bytes: int
    """Of the request, as the connection counts it for itself."""


class Connection:
    """`serve` returns when it has ended, for whatever reason."""

    def __init__(self, door: Door, link: Link, memory: Memory, *, request_max_bytes: int) -> None:
        self._door = door
        self._link = link
        self._memory = memory
        self._request_max_bytes = request_max_bytes
        self._own = Budget(limits.KAFKA_CONNECTION_BYTES)
        """Requests that are not answered yet: one connection must not have all the room."""
        self._free = Free()
        self._holds: set[Hold] = set()
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue(limits.KAFKA_PIPELINED)
        self._handling: tuple[Api, Hold] | None = None
        """A request that has come, and has no answer yet that could wait for its turn."""
        self._coming: Hold | None = None
        """Of the request that is being read, with what has come of it."""
        self._come_bytes = 0
        self._late_seconds = 0.0
        """By how much it is behind a request that comes as slowly as one may."""
        self._sending_bytes = 0
        self._sending_seconds = 0.0
        self._looked_at = time.monotonic()
        self._seen = (0, 0)
        self._still_seconds = 0.0

    async def serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._link.left = lambda: self._left(task)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._receive())
                both.create_task(self._send())
        except* ConnectionError:
            pass  # the client has left
        except* asyncio.CancelledError:
            pass  # the door closes
        except* errors.SparklogError as group:
            self._say(str(group.exceptions[0]))
        except* Exception:
            _log.exception("a connection is closed")
        finally:
            self._link.transport.close()
            for hold in self._holds:
                hold.give_all()
            while not self._answers.empty():
                later = self._answers.get_nowait().later
                if asyncio.iscoroutine(later):
                    later.close()

    def _left(self, task: asyncio.Task[None]) -> None:
        """The client has: nobody waits for it. What it has sent is handled where it does not wait,
        because a client that wants no answer to what it sends may leave at once.
        """
        hold = self._coming
        waits = False
        if self._handling is not None:
            api, hold = self._handling
            waits = api.waits
        if waits or (hold is not None and hold.is_waiting):
            task.cancel()

    def look(self) -> None:
        """To be called now and then: ends the connection when nothing has moved for too long.

        A client that does not read its answers, or leaves off in the middle of a request, is given
        less time, and very little while others wait for the memory that these take; one that asks
        nothing has as long as Kafka gives it.
        """
        now = time.monotonic()
        passed_seconds, self._looked_at = now - self._looked_at, now
        unread = self._link.transport.get_write_buffer_size()
        come_bytes = self._link.read_bytes - self._seen[1]
        seen = unread, self._link.read_bytes
        self._still_seconds = self._still_seconds + passed_seconds if seen == self._seen else 0.0
        self._seen = seen
        if self._coming is not None and not self._coming.is_waiting:
            # What has come fast earns no time to stand still in: it holds the more memory.
            late_seconds = self._late_seconds + passed_seconds - _slowest_seconds(come_bytes)
            self._late_seconds = max(late_seconds, 0.0)
        if self._sending_bytes:
            self._sending_seconds += passed_seconds
        is_short = self._memory.is_short
        patience_seconds: float = limits.KAFKA_STALLED_SECONDS
        if is_short:
            patience_seconds = limits.KAFKA_STALLED_SHORT_SECONDS
        if self._coming is not None and self._late_seconds > patience_seconds:
            come, seconds = self._come_bytes, self._late_seconds
            self._end(f"a request is {seconds:.0f} s late after {come} bytes of it")
        elif unread and (
            self._still_seconds >= patience_seconds
            or (
                is_short
                and self._sending_seconds > patience_seconds + _slowest_seconds(self._sending_bytes)
            )
        ):
            self._end(f"{unread} bytes were not read for {self._still_seconds:.0f} s")
        elif not self._holds and self._still_seconds >= limits.KAFKA_IDLE_SECONDS:
            self._link.transport.abort()

    def _end(self, reason: str) -> None:
        self._say(reason)
        self._link.transport.abort()

    def _say(self, reason: str) -> None:
        self._door.say_closed(self._link.peer, reason)

    # -------------------------------------------------------------------------- requests

    async def _receive(self) -> None:
        host = f"/{self._link.peer}" if self._link.peer else ""
        while True:
            length = await self._link.read(messages.LENGTH_BYTES)
            if length[0]:  # a request of 16 MiB or more, or another protocol
                await self._check_is_kafka(bytes(length))
            size = int.from_bytes(length, "big", signed=True)
            if not 0 <= size <= self._request_max_bytes:
                reason = f"a request of {size} bytes; {self._request_max_bytes} are the most"
                raise errors.BadRequest(reason=reason)
            await self._own.take(size)
            hold = Hold(self._memory, self._free)
            self._holds.add(hold)
            self._coming, self._come_bytes, self._late_seconds = hold, 0, 0.0
            await self._answers.put(await self._handled(await self._come(size, hold), host, hold))

    async def _check_is_kafka(self, begin: bytes) -> None:
        """Raises `BadRequest` for a client that begins as one of another protocol does."""
        if begin == _OUR_CLIENT:
            flight = self._door.core.cluster().brokers[0].address
            await self._link.write([f"{WRONG_PORT}{flight}\n".encode()])
            spoken = f"gRPC (HTTP/2); Flight clients connect to {flight}"
        elif begin in _HTTP:
            told = b"this is a Kafka port, and no HTTP is spoken here\n"
            await self._link.write([b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", told])
            spoken = "HTTP"
        elif begin.startswith(_TLS_HANDSHAKE):
            spoken = "TLS; set security.protocol=PLAINTEXT in that client"
        else:
            return
        raise errors.BadRequest(reason=f"not a Kafka client: it speaks {spoken}")

    async def _come(self, size: int, hold: Hold) -> bytes:
        """The request's bytes. Memory is taken for as much more as has come already."""
        if hold.take_free(size):
            frame = bytes(await self._link.read(size))
            self._coming = None
            return frame
        parts: list[bytes | bytearray] = []
        while self._come_bytes < size:
            step = max(self._come_bytes, limits.KAFKA_STEP_BYTES)
            step = min(step, size - self._come_bytes)
            self._link.check(step)
            await hold.arrive(step)
            parts.append(await self._link.read(step))
            self._come_bytes += step
        self._coming = None
        return b"".join(parts)

    async def _handled(self, frame: bytes, host: str, hold: Hold) -> _Answer:
        start = api_key, version, correlation_id = messages.read_start(frame)
        own_bytes = len(frame)
        api = APIS.get(api_key)
        if api is None:
            raise errors.BadRequest(reason=f"API key {api_key} is not served")
        reply: Reply | Awaitable[Reply]
        if not api.first <= version <= api.last:
            if api_key != messages.API_VERSIONS:
                raise errors.BadRequest(reason=f"{api.name} is not served in version {version}")
            start, reply = (
                (api_key, 0, correlation_id),
                apis.api_versions.answer(messages.UNSUPPORTED_VERSION),
            )
        else:
            self._handling = api, hold
            request = await self._request(api, frame, host, hold)
            del frame
            if not api.overlaps:
                await self._answers.join()  # what it reads may be what an earlier one writes
            if api.waits and self._link.is_over:
                raise ConnectionResetError("the client has left")
            reply = await api.handle(self._door, request)
        if isinstance(reply, Awaitable):
            self._handling = None
            if api.waits:
                hold.give_apart()  # it may wait for others for minutes
            return _Answer((), reply, start, hold, own_bytes)
        written = await self._frame(start, reply, hold)
        self._handling = None
        return _Answer(written, None, start, hold, own_bytes)

    async def _request(self, api: Api, frame: bytes, host: str, hold: Hold) -> Request:
        """Takes it apart: one of many items in a thread, and only when there is room for them."""
        try:
            checked = messages.check_request(frame, limits.KAFKA_QUICK_ITEMS)
        except ManyItems:
            checked = await self._door.blocking(
                Work.ASIDE, messages.check_request, frame, limits.KAFKA_ITEMS
            )
        if checked.items <= limits.KAFKA_QUICK_ITEMS:
            request = messages.read_checked(checked, host, hold)
            if not api.keeps_bytes and len(frame) > limits.KAFKA_FREE_BYTES:
                await hold.take_apart(len(frame))
        else:
            await hold.take_apart(len(frame) + checked.items * limits.KAFKA_ITEM_BYTES)
            request = await self._door.blocking(
                Work.ASIDE, messages.read_checked, checked, host, hold
            )
        if not api.keeps_bytes:
            hold.give_arrived()
        return request

    # -------------------------------------------------------------------------- answers

    async def _send(self) -> None:
        while True:
            frame, later, start, hold, own_bytes = await self._answers.get()
            if later is not None:
                frame = await self._frame(start, await later, hold)
            if frame:
                self._sending_bytes, self._sending_seconds = sum(map(len, frame)), 0.0
                await self._link.write(frame)
                self._sending_bytes = 0
            del frame, later
            hold.give_all()
            self._holds.discard(hold)
            self._own.give(own_bytes)
            self._answers.task_done()

    async def _frame(self, start: _Start, reply: Reply, hold: Hold) -> Sequence[Raw]:
        """Empty where no answer is wanted. A large one is made in turns with others, one a time."""
        if reply is None:
            return ()
        if not messages.is_large(reply, limits.KAFKA_QUICK_REPLY_ITEMS):
            written = messages.write_reply(*start, reply)
            size = sum(map(len, written)) - hold.records_bytes
            if size > 0 and not hold.take_free(size):
                await hold.take_reply(size)
            return written
        async with self._door.large:
            await hold.take_reply(limits.KAFKA_REPLY_BYTES)
            writing = messages.Writing(*start, reply)
            async for _ in self._door.turns.over(writing):
                if writing.made_bytes > limits.KAFKA_REPLY_BYTES:
                    reason = f"a reply of more than {limits.KAFKA_REPLY_BYTES} bytes: ask for less"
                    raise errors.BadRequest(reason=reason)
            hold.shrink_reply(writing.made_bytes)
        return writing.ended()


def _slowest_seconds(size: int) -> float:
    """In which so many bytes have to pass."""
    return size / limits.KAFKA_SLOWEST_BYTES_PER_SECOND
