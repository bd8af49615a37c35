"""How much memory the door's requests and replies may take, of all connections together.

There are four rooms, and what a request needs of them it takes in this order:

1. `arriving`: the bytes of requests, as they come, and of producers until they are answered.
2. `taken_apart`: requests of many items, as objects.
3. `records`: replies to fetches.
4. `replies`: all other replies.

**Nobody waits for ever.** A grant is whole, or it is not given. Nobody who holds part of a room
queues for more of it, and nobody goes back to a room before the one that it holds. So whoever waits
in a room waits for those who hold part of it and need nothing of it, nor of a room before it, to go
on; what is in the last rooms leaves as clients read, and those that do not are dropped.

There is one exception: a request that arrives takes memory in steps, only so much at a time as has
come already, because a client may announce what it never sends. Where there is no room for the next
step, *one* connection at a time may go beyond it, up to the end of its request. It goes on as fast
as its client sends, or is dropped.

What is small is not counted: each connection has `KAFKA_FREE_BYTES` of its own, so heartbeats,
metadata and small sends wait for nobody. Their sum is bounded by the number of connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from sparklog import limits

_ARRIVING_SHARE: Final = 3 / 8
_RECORDS_SHARE: Final = 3 / 8
_OTHER_SHARE: Final = 1 / 8


class Budget:
    """So many bytes. Who wants more than is left waits, in turn; it belongs to one event loop.

    Who wants more than there are in all waits until nobody holds anything.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    async def take(self, size: int) -> None:
        """Returns when there is room."""
        if not self._waiting and self._has_room(size):
            self._held_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self.give(size if turn.done() and not turn.cancelled() else 0)
            raise

    def give(self, size: int) -> None:
        """Back, for others."""
        self._held_bytes -= size
        assert self._held_bytes >= 0, "more was given back than was taken"
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._has_room(wanted):
                    return
                self._held_bytes += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def _has_room(self, size: int) -> bool:
        return not self._held_bytes or self._held_bytes + size <= self._limit_bytes


class Arriving:
    """One request's part of the room for requests that arrive."""

    __slots__ = ("beyond_bytes", "held_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.beyond_bytes = 0
        """Of the one that may go beyond the limit."""


class Arrivals:
    """Room for requests that arrive in steps; see the head of this module.

    Args:
        beyond_bytes: of `limit_bytes`, kept for the one request that may go beyond the rest.
    """

    def __init__(self, limit_bytes: int, beyond_bytes: int) -> None:
        self._limit_bytes = limit_bytes - beyond_bytes
        self._held_bytes = 0
        self._beyond: Arriving | None = None
        self._waiting: deque[tuple[Arriving, int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether somebody waits, or has gone beyond the limit."""
        return bool(self._waiting) or self._beyond is not None

    @property
    def held_bytes(self) -> int:
        beyond = self._beyond.beyond_bytes if self._beyond is not None else 0
        return self._held_bytes + beyond

    async def grow(self, part: Arriving, size: int) -> None:
        """Returns when there is room for so many bytes more. One step of a request at a time."""
        if part is self._beyond:
            part.beyond_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((part, size, turn))
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            turn.cancel()
            self._go_on()
            raise

    def give(self, part: Arriving) -> None:
        """All of it back, for others."""
        self._held_bytes -= part.held_bytes
        part.held_bytes = 0
        if part is self._beyond:
            self._beyond = None
            part.beyond_bytes = 0
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            part, size, turn = self._waiting[0]
            if not turn.done():
                if self._held_bytes + size <= self._limit_bytes:
                    part.held_bytes += size
                    self._held_bytes += size
                elif self._beyond is None:
                    self._beyond = part
                    part.beyond_bytes = size
                else:
                    return
                turn.set_result(None)
            self._waiting.popleft()


class Memory:
    """The door's rooms, `limit_bytes` together."""

    def __init__(self, limit_bytes: int, *, request_max_bytes: int) -> None:
        arriving_bytes = int(limit_bytes * _ARRIVING_SHARE)
        beyond_bytes = min(request_max_bytes, arriving_bytes // 2)
        self.arriving = Arrivals(arriving_bytes, beyond_bytes)
        self.taken_apart = Budget(int(limit_bytes * _OTHER_SHARE))
        self.records = Budget(int(limit_bytes * _RECORDS_SHARE))
        self.replies = Budget(int(limit_bytes * _OTHER_SHARE))

    @property
    def is_short(self) -> bool:
        """Whether somebody waits for some of it."""
        rooms = self.arriving, self.taken_apart, self.records, self.replies
        return any(room.is_short for room in rooms)

    @property
    def held_bytes(self) -> int:
        """Of all rooms."""
        rooms = self.arriving, self.taken_apart, self.records, self.replies
        return sum(room.held_bytes for room in rooms)


class Hold:
    """What one request and its reply hold, from its first byte until its reply is sent."""

    __slots__ = ("_free", "_free_bytes", "_memory", "_part", "_room", "_sizes", "is_waiting")

    def __init__(self, memory: Memory, free: Free) -> None:
        self._memory = memory
        self._free = free
        self._free_bytes = 0
        self._part: Arriving | None = None
        self._sizes: dict[Budget, int] = {}
        self._room = 0
        """The number of the last room that was taken of."""
        self.is_waiting = False
        """For memory: what does not come meanwhile is not the client's fault."""

    def take_free(self, size: int) -> bool:
        """Whether it is small enough to be held without being counted."""
        if size > self._free.left_bytes:
            return False
        self._free.left_bytes -= size
        self._free_bytes += size
        return True

    async def arrive(self, size: int) -> None:
        """Room for so many bytes more of the request."""
        assert self._room == 0, "a request arrives before it is taken apart"
        self._part = self._part or Arriving()
        await self._waited(self._memory.arriving.grow(self._part, size))

    def give_arrived(self) -> None:
        """The request is not held any more."""
        self._free.left_bytes += self._free_bytes
        self._free_bytes = 0
        if self._part is not None:
            self._memory.arriving.give(self._part)
            self._part = None

    async def take_apart(self, size: int) -> None:
        """Room for the request as objects."""
        await self._take(1, self._memory.taken_apart, size)

    def give_apart(self) -> None:
        """Those objects are not held any more, or are somebody else's."""
        self._shrink(self._memory.taken_apart, 0)

    async def take_records(self, size: int) -> None:
        """Room for records of a reply."""
        await self._take(2, self._memory.records, size)

    def give_records(self, left_bytes: int = 0) -> None:
        """Keeps no more of it than so much; of all given back, it may be taken again."""
        self._shrink(self._memory.records, left_bytes)
        if not left_bytes and self._room == 2:
            self._room = 1

    async def take_reply(self, size: int) -> None:
        """Room for a reply of another kind."""
        await self._take(3, self._memory.replies, size)

    def shrink_reply(self, left_bytes: int) -> None:
        """It is no larger than that."""
        self._shrink(self._memory.replies, left_bytes)

    @property
    def records_bytes(self) -> int:
        """Of records, that are taken."""
        return self._sizes.get(self._memory.records, 0)

    def give_all(self) -> None:
        """Nothing is held any more; may be called again."""
        self.give_arrived()
        for room in tuple(self._sizes):
            room.give(self._sizes.pop(room))

    async def _take(self, number: int, room: Budget, size: int) -> None:
        assert number > self._room, "who holds some of a room queues for no more of it"
        await self._waited(room.take(size))
        self._room = number
        self._sizes[room] = size

    async def _waited(self, taking: Coroutine[Any, Any, None]) -> None:
        self.is_waiting = True
        try:
            await taking
        finally:
            self.is_waiting = False

    def _shrink(self, room: Budget, left_bytes: int) -> None:
        size = self._sizes.pop(room, 0)
        left_bytes = min(size, left_bytes)
        if left_bytes:
            self._sizes[room] = left_bytes
        room.give(size - left_bytes)


class Free:
    """What a connection may hold without being counted."""

    __slots__ = ("left_bytes",)

    def __init__(self) -> None:
        self.left_bytes = limits.KAFKA_FREE_BYTES
