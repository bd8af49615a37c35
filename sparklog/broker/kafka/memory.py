"""Memory bounds for the requests and replies of all Kafka connections together.

There are four pools, one with a reserve (`small_records`). A request draws on them in this order:

1. `requests`: the bytes of requests while they are received; those of Produce until the reply.
2. `parsed`: requests with more than a few items, as Python objects, until the reply is written.
3. `records`: replies to Fetch.
4. `replies`: all other replies.

**No deadlock.** A grant is all or nothing. A request that holds part of a pool never queues for
more of that pool, nor for an earlier one in the order. So a request that waits for a pool waits
only for requests that need nothing more from that pool or an earlier one. The last pools drain as
clients read, and a client that does not read is disconnected.

There is one exception. The memory of a request is granted in steps; after the first, none is larger
than the bytes already received, because a client may announce more than it ever sends. If there is
no memory for the next step, *one* request at a time may overdraw the pool, until it is complete. It
advances as fast as its client sends, or its client is disconnected.

Part of `requests` is reserved for requests that are received in one step, as most Produce requests
are: they do not queue behind large ones, some of which may have stalled. Likewise, part of
`records` is reserved for small replies, such as those to a consumer at the end of its log.

Small amounts are not counted: each connection has an allowance of `KAFKA_FREE_BYTES`, so
heartbeats, metadata and small Produce requests never wait for memory. The sum of the allowances is
bounded by the limit on connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from sparklog import limits
from sparklog.broker.counts import Budget

_REQUESTS_SHARE: Final = 3 / 8
_RECORDS_SHARE: Final = 3 / 8
_OTHER_SHARE: Final = 1 / 8
_PARSED, _RECORDS, _REPLY = 1, 2, 3
"""Positions of the pools in the order above, after `requests` (0)."""
_OUT_OF_ORDER: Final = "a request takes from each pool once, in order"


class MemoryPool:
    """A bounded number of bytes, granted first come, first served, in one event loop.

    A grant that is larger than the whole pool waits until nothing else is held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """True if a task waits for memory."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    async def take(self, size: int) -> None:
        """Waits until `size` bytes are granted."""
        if not self._waiting and self._fits(size):
            self._held_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self.release(size if turn.done() and not turn.cancelled() else 0)
            raise

    def release(self, size: int) -> None:
        """Returns `size` bytes to the pool, and grants them to waiting tasks."""
        self._held_bytes -= size
        assert self._held_bytes >= 0, "more bytes were released than taken"
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(size):
                    return
                self._held_bytes += size
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, size: int) -> bool:
        return not self._held_bytes or self._held_bytes + size <= self._limit_bytes


class RequestShare:
    """The bytes of `RequestMemory` that one request holds."""

    __slots__ = ("held_bytes", "overdraft_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.overdraft_bytes = 0
        """Bytes beyond the limit; only one request at a time has any."""


class RequestMemory:
    """The pool for requests that are received in steps; see the head of this module.

    Args:
        overdraft_bytes: the part of `limit_bytes` for the one request that may overdraw the rest.
        one_step_bytes: the part of that rest that only one-step requests may use.
    """

    def __init__(self, limit_bytes: int, overdraft_bytes: int, one_step_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._limit_bytes = limit_bytes - overdraft_bytes
        self._large_limit_bytes = self._limit_bytes - one_step_bytes
        self._held_bytes = 0
        self._overdrawn: RequestShare | None = None
        self._waiting: deque[tuple[RequestShare, int, asyncio.Future[None]]] = deque()
        self._waiting_one_step: deque[tuple[RequestShare, int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """True if a request waits for memory, or has overdrawn the pool."""
        return bool(self._waiting or self._waiting_one_step) or self._overdrawn is not None

    @property
    def held_bytes(self) -> int:
        overdraft_bytes = self._overdrawn.overdraft_bytes if self._overdrawn is not None else 0
        return self._held_bytes + overdraft_bytes

    async def grow(self, share: RequestShare, size: int, *, is_all: bool = False) -> None:
        """Waits until `size` more bytes are granted, for one step of a request.

        Args:
            is_all: True if the step is the only one of its request.
        """
        if share is self._overdrawn:
            share.overdraft_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._waiting_one_step if is_all else self._waiting).append((share, size, turn))
        self._grant_all()
        try:
            await turn
        except asyncio.CancelledError:
            turn.cancel()
            self._grant_all()
            raise

    def release(self, share: RequestShare) -> None:
        """Returns all bytes of a request to the pool."""
        self._held_bytes -= share.held_bytes
        share.held_bytes = 0
        if share is self._overdrawn:
            self._overdrawn = None
            share.overdraft_bytes = 0
        self._grant_all()

    def _grant_all(self) -> None:
        self._grant(self._waiting_one_step, self._limit_bytes)
        self._grant(self._waiting, self._large_limit_bytes)

    def _grant(
        self, waiting: deque[tuple[RequestShare, int, asyncio.Future[None]]], limit_bytes: int
    ) -> None:
        while waiting:
            share, size, turn = waiting[0]
            if not turn.done():
                if self._held_bytes + size <= limit_bytes:
                    share.held_bytes += size
                    self._held_bytes += size
                elif self._overdrawn is None:
                    self._overdrawn = share
                    share.overdraft_bytes = size
                else:
                    return
                turn.set_result(None)
            waiting.popleft()


class ListenerMemory:
    """The pools of the Kafka listener, `limit_bytes` in total."""

    def __init__(self, limit_bytes: int, *, request_max_bytes: int) -> None:
        requests_bytes = int(limit_bytes * _REQUESTS_SHARE)
        overdraft_bytes = min(request_max_bytes, requests_bytes // 2)
        one_step_bytes = (requests_bytes - overdraft_bytes) // 4
        self.requests = RequestMemory(requests_bytes, overdraft_bytes, one_step_bytes)
        self.parsed = MemoryPool(int(limit_bytes * _OTHER_SHARE))
        records_bytes = int(limit_bytes * _RECORDS_SHARE)
        self.records = MemoryPool(records_bytes * 3 // 4)
        self.small_records = MemoryPool(records_bytes // 4)
        self.replies = MemoryPool(int(limit_bytes * _OTHER_SHARE))

    @property
    def is_short(self) -> bool:
        """True if a request waits for memory that slow clients may hold.

        `parsed` does not count: it is released when a request is answered, however slow its client.
        """
        pools = self.requests, self.records, self.small_records, self.replies
        return any(pool.is_short for pool in pools)

    def budgets(self) -> list[Budget]:
        """Returns the pools, by name."""
        return [
            Budget(f"kafka_{name}", pool.held_bytes, pool.limit_bytes)
            for name, pool in (
                ("requests", self.requests),
                ("parsed", self.parsed),
                ("records", self.records),
                ("small_records", self.small_records),
                ("replies", self.replies),
            )
        ]

    @property
    def held_bytes(self) -> int:
        """The bytes held in all pools."""
        pools = (
            self.requests,
            self.parsed,
            self.records,
            self.small_records,
            self.replies,
        )
        return sum(pool.held_bytes for pool in pools)


class MemoryGrant:
    """The memory of a request and its reply, from its first byte until the reply is sent."""

    __slots__ = (
        "_allowance",
        "_free_bytes",
        "_free_records_bytes",
        "_memory",
        "_request_share",
        "_sizes",
        "_stage",
        "is_waiting",
    )

    def __init__(self, memory: ListenerMemory, allowance: FreeAllowance) -> None:
        self._memory = memory
        self._allowance = allowance
        self._free_bytes = 0
        self._free_records_bytes = 0
        """Bytes of the connection's allowance, for the request and for the records of its reply."""
        self._request_share: RequestShare | None = None
        self._sizes: dict[MemoryPool, int] = {}
        self._stage = 0
        """The position of the pool that was last taken from."""
        self.is_waiting = False
        """True while it waits for memory: the client is not to blame for sending nothing then."""

    def take_free(self, size: int) -> bool:
        """Takes `size` bytes of the connection's allowance. Returns False if too few are left."""
        if size > self._allowance.left_bytes:
            return False
        self._allowance.left_bytes -= size
        self._free_bytes += size
        return True

    async def grow_request(self, size: int, *, is_all: bool = False) -> None:
        """Waits for memory for the next `size` bytes of the request.

        Args:
            is_all: True if these are the whole request.
        """
        assert self._stage == 0, _OUT_OF_ORDER
        self._request_share = self._request_share or RequestShare()
        await self._wait(self._memory.requests.grow(self._request_share, size, is_all=is_all))

    def release_request(self) -> None:
        """Releases the memory of the request's bytes."""
        self._allowance.left_bytes += self._free_bytes
        self._free_bytes = 0
        if self._request_share is not None:
            self._memory.requests.release(self._request_share)
            self._request_share = None

    async def take_parsed(self, size: int) -> None:
        """Waits for memory for the request as Python objects."""
        await self._take(_PARSED, self._memory.parsed, size)

    def release_parsed(self) -> None:
        """Releases the memory of the parsed request, or leaves it to another owner to bound."""
        self._shrink(self._memory.parsed, 0)

    async def take_records(self, size: int) -> None:
        """Waits for memory for the records of the reply."""
        assert self._stage < _RECORDS, _OUT_OF_ORDER
        if size <= self._allowance.left_bytes:
            self._allowance.left_bytes -= size
            self._free_records_bytes = size
            self._stage = _RECORDS
            return
        is_small = size <= limits.KAFKA_SHORT_RECORDS_BYTES
        pool = self._memory.small_records if is_small else self._memory.records
        await self._take(_RECORDS, pool, size)

    def release_records(self, left_bytes: int = 0) -> None:
        """Releases the records' memory, except for `left_bytes`. At 0, it may be taken again."""
        if self._free_records_bytes:
            self._allowance.left_bytes += max(self._free_records_bytes - left_bytes, 0)
            self._free_records_bytes = min(self._free_records_bytes, left_bytes)
        for pool in (self._memory.records, self._memory.small_records):
            self._shrink(pool, left_bytes)
        if not left_bytes and self._stage == _RECORDS:
            self._stage = _PARSED

    async def take_reply(self, size: int) -> None:
        """Waits for memory for a reply, not counting its records."""
        await self._take(_REPLY, self._memory.replies, size)

    def shrink_reply(self, left_bytes: int) -> None:
        """Releases the memory of the reply, except for `left_bytes`."""
        self._shrink(self._memory.replies, left_bytes)

    def release_reply(self) -> None:
        """Releases the memory of the reply, which may be taken again for a different one."""
        self.shrink_reply(0)
        self._stage = min(self._stage, _RECORDS)

    @property
    def records_bytes(self) -> int:
        """The bytes held for records."""
        pools = self._memory.records, self._memory.small_records
        return sum(self._sizes.get(pool, 0) for pool in pools) + self._free_records_bytes

    def release_all(self) -> None:
        """Releases all memory; may be called repeatedly."""
        self.release_request()
        self._allowance.left_bytes += self._free_records_bytes
        self._free_records_bytes = 0
        for pool in tuple(self._sizes):
            pool.release(self._sizes.pop(pool))

    async def _take(self, stage: int, pool: MemoryPool, size: int) -> None:
        assert stage > self._stage, _OUT_OF_ORDER
        await self._wait(pool.take(size))
        self._stage = stage
        self._sizes[pool] = size

    async def _wait(self, taking: Coroutine[Any, Any, None]) -> None:
        self.is_waiting = True
        try:
            await taking
        finally:
            self.is_waiting = False

    def _shrink(self, pool: MemoryPool, left_bytes: int) -> None:
        size = self._sizes.pop(pool, 0)
        left_bytes = min(size, left_bytes)
        if left_bytes:
            self._sizes[pool] = left_bytes
        pool.release(size - left_bytes)


class FreeAllowance:
    """The bytes that the requests of one connection may still hold without being counted."""

    __slots__ = ("left_bytes",)

    def __init__(self) -> None:
        self.left_bytes = limits.KAFKA_FREE_BYTES
