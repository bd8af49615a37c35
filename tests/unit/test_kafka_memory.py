"""Memory of the Kafka listener: there is no deadlock, and all of it is released."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import limits
from sparklog.broker.kafka.connection import STEP_BYTES
from sparklog.broker.kafka.memory import (
    FreeAllowance,
    ListenerMemory,
    MemoryGrant,
    RequestMemory,
    RequestShare,
)

MIB = 1 << 20


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Runs a coroutine in its own event loop."""

    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


def test_a_connection_has_an_allowance_that_is_not_counted() -> None:
    """The allowance can be used up exactly, and not exceeded."""

    async def work() -> None:
        free = FreeAllowance()
        grant = MemoryGrant(ListenerMemory(100 * MIB, request_max_bytes=MIB), free)
        assert not grant.take_free(free.left_bytes + 1)
        assert grant.take_free(free.left_bytes)
        assert not grant.take_free(1)
        grant.release_all()
        assert free.left_bytes == limits.KAFKA_FREE_BYTES

    run(work)


async def steps(count: int = 3) -> None:
    """Lets other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_request_may_overdraw_the_pool() -> None:
    """While all requests wait for more, one continues to its end, and then the next one does."""

    async def work() -> None:
        memory = RequestMemory(10, 4)
        parts = [RequestShare() for _ in range(3)]
        for each in parts:
            await memory.grow(each, 2)
        more = [asyncio.create_task(memory.grow(each, 4)) for each in parts]
        await steps()
        assert [each.done() for each in more] == [True, False, False]
        await memory.grow(parts[0], 4)  # on to its end, without a turn
        memory.release(parts[0])
        await steps()
        assert [each.done() for each in more] == [True, True, False]
        memory.release(parts[1])
        memory.release(parts[2])
        await asyncio.gather(*more)
        for each in parts:
            memory.release(each)
        assert (memory.held_bytes, memory.is_short) == (0, False)

    run(work)


def test_requests_of_one_step_do_not_queue_behind_large_ones() -> None:
    """They have a reserved part of the pool, and large requests continue in their order."""

    async def work() -> None:
        memory = RequestMemory(20, 4, 6)
        large, beyond, may_wait, short, last = (RequestShare() for _ in range(5))
        await memory.grow(large, 10)
        await memory.grow(beyond, 4)
        waiting = asyncio.create_task(memory.grow(may_wait, 4))
        await steps()
        await memory.grow(short, 6, is_all=True)
        none_left = asyncio.create_task(memory.grow(last, 1, is_all=True))
        await steps()
        assert not waiting.done()
        assert not none_left.done()
        memory.release(short)
        await none_left
        await steps()
        assert not waiting.done()
        memory.release(large)
        await waiting
        for each in (beyond, may_wait, last):
            memory.release(each)
        assert (memory.held_bytes, memory.is_short) == (0, False)

    run(work)


def test_small_replies_wait_for_no_slow_reader() -> None:
    """Very few records are not counted, and small replies have a reserved pool."""

    async def work() -> None:
        memory = ListenerMemory(100 * MIB, request_max_bytes=MIB)
        slow, free = MemoryGrant(memory, FreeAllowance()), FreeAllowance()
        await slow.take_records(64 * MIB)
        few = MemoryGrant(memory, FreeAllowance())
        await few.take_records(limits.KAFKA_SHORT_RECORDS_BYTES)
        assert few.records_bytes == limits.KAFKA_SHORT_RECORDS_BYTES
        few.release_records(10)
        assert few.records_bytes == 10
        few.release_all()
        grant = MemoryGrant(memory, free)
        await grant.take_records(10_000)
        assert grant.records_bytes == 10_000
        grant.release_records(4_000)
        assert (grant.records_bytes, free.left_bytes) == (4_000, limits.KAFKA_FREE_BYTES - 4_000)
        grant.release_records()
        await grant.take_records(100)
        grant.release_all()
        assert free.left_bytes == limits.KAFKA_FREE_BYTES
        slow.release_all()
        assert memory.held_bytes == 0

    run(work)


def test_a_cancelled_request_lets_the_next_one_continue() -> None:
    """This holds for the request that has overdrawn the pool, and for the first that waits."""

    async def work() -> None:
        memory = RequestMemory(10, 4)
        held, beyond, gone, last = (RequestShare() for _ in range(4))
        await memory.grow(held, 6)
        await memory.grow(beyond, 4)
        waiting = asyncio.create_task(memory.grow(gone, 5))
        after = asyncio.create_task(memory.grow(last, 1))
        await steps()
        waiting.cancel()
        await steps()
        assert not after.done()
        memory.release(gone)
        memory.release(beyond)
        await asyncio.wait_for(after, 1.0)
        for each in (held, last):
            memory.release(each)
        assert memory.held_bytes == 0

    run(work)


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_there_is_no_deadlock(seed: int, clients: int) -> None:
    """Requests of random sizes are received, parsed and answered, and some are cancelled.

    Each releases its memory as soon as it can, like clients that are not dropped. Then all requests
    end in any order, and all memory is released.
    """

    async def work() -> None:
        chance = random.Random(seed)
        memory = ListenerMemory(100 * MIB, request_max_bytes=60 * MIB)

        async def client() -> None:
            free = FreeAllowance()
            for _ in range(3):
                grant = MemoryGrant(memory, free)
                size = chance.choice((100, 20_000, MIB, 30 * MIB, 60 * MIB))
                try:
                    come = 0
                    while come < size and not grant.take_free(size):
                        step = min(max(come, STEP_BYTES), size - come)
                        await grant.grow_request(step, is_all=step == size)
                        await steps(chance.randrange(2))
                        come += step
                        assert come <= size
                    if chance.random() < 0.5:
                        await grant.take_parsed(chance.choice((MIB, 12 * MIB, 90 * MIB)))
                    if chance.random() < 0.5:
                        grant.release_request()
                    if chance.random() < 0.5:
                        await grant.take_records(chance.choice((500, 100_000, 8 * MIB)))
                        await steps(chance.randrange(2))
                        if chance.random() < 0.5:
                            grant.release_records()
                            await grant.take_records(chance.choice((MIB, 64 * MIB)))
                        grant.release_records(MIB)
                    if not grant.take_free(1_000) or chance.random() < 0.5:
                        await grant.take_reply(32 * MIB)
                        grant.shrink_reply(MIB)
                    await steps(chance.randrange(3))
                finally:
                    grant.release_all()
                    grant.release_all()

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        for each in tasks:
            if chance.random() < 0.2:
                await steps(chance.randrange(20))
                each.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10.0)
        assert not any(
            isinstance(each.exception(), AssertionError) for each in tasks if not each.cancelled()
        )
        assert memory.held_bytes == 0
        assert not memory.is_short

    run(work)


def test_a_request_takes_from_the_pools_in_order() -> None:
    """A request that took more from the same or an earlier pool could cause a deadlock."""

    async def work() -> None:
        grant = MemoryGrant(ListenerMemory(100 * MIB, request_max_bytes=MIB), FreeAllowance())
        await grant.take_records(1)
        with pytest.raises(AssertionError):
            await grant.take_records(1)
        with pytest.raises(AssertionError):
            await grant.take_parsed(1)
        with pytest.raises(AssertionError):
            await grant.grow_request(1)
        grant.release_records()
        await grant.take_records(2)
        grant.release_all()

    run(work)


def test_the_allowance_bounds_all_requests_of_a_connection() -> None:
    """The allowance covers all requests of a connection that are not answered yet."""
    memory, free = ListenerMemory(100 * MIB, request_max_bytes=MIB), FreeAllowance()
    first, second = MemoryGrant(memory, free), MemoryGrant(memory, free)
    assert first.take_free(limits.KAFKA_FREE_BYTES - 1)
    assert not second.take_free(2)
    first.release_all()
    assert second.take_free(2)
    assert memory.held_bytes == 0
