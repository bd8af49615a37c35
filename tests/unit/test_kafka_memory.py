"""The door's memory: nobody waits for ever, and all of it comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import limits
from sparklog.broker.kafka.memory import Arrivals, Arriving, Free, Hold, Memory

MIB = 1 << 20


def run(work: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own."""

    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


async def steps(count: int = 3) -> None:
    """Lets all others go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_request_goes_beyond_what_all_others_hold() -> None:
    """They hold parts and wait for more; it ends, and then the next goes on."""

    async def work() -> None:
        room = Arrivals(10, 4)
        parts = [Arriving() for _ in range(3)]
        for each in parts:
            await room.grow(each, 2)
        more = [asyncio.create_task(room.grow(each, 4)) for each in parts]
        await steps()
        assert [each.done() for each in more] == [True, False, False]
        await room.grow(parts[0], 4)  # on to its end, without a turn
        room.give(parts[0])
        await steps()
        assert [each.done() for each in more] == [True, True, False]
        room.give(parts[1])
        room.give(parts[2])
        await asyncio.gather(*more)
        for each in parts:
            room.give(each)
        assert (room.held_bytes, room.is_short) == (0, False)

    run(work)


def test_who_gives_up_lets_the_next_on() -> None:
    """Also the one that has gone beyond, and one that waits at the head."""

    async def work() -> None:
        room = Arrivals(10, 4)
        held, beyond, gone, last = (Arriving() for _ in range(4))
        await room.grow(held, 6)
        await room.grow(beyond, 4)
        waiting = asyncio.create_task(room.grow(gone, 5))
        after = asyncio.create_task(room.grow(last, 1))
        await steps()
        waiting.cancel()
        await steps()
        assert not after.done()
        room.give(gone)
        room.give(beyond)
        await asyncio.wait_for(after, 1.0)
        for each in (held, last):
            room.give(each)
        assert room.held_bytes == 0

    run(work)


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_nobody_waits_for_ever(seed: int, clients: int) -> None:
    """Requests of any size come in steps, are taken apart and answered; some leave at any time.

    Each goes on as soon as it may, as clients do that are not dropped: then all come to an end,
    whatever the order, and everything is given back.
    """

    async def work() -> None:
        chance = random.Random(seed)
        memory = Memory(100 * MIB, request_max_bytes=60 * MIB)

        async def client() -> None:
            free = Free()
            for _ in range(3):
                hold = Hold(memory, free)
                size = chance.choice((100, 20_000, MIB, 30 * MIB, 60 * MIB))
                try:
                    come = 0
                    while come < size and not hold.take_free(size):
                        step = min(max(come, limits.KAFKA_STEP_BYTES), size - come)
                        await hold.arrive(step)
                        await steps(chance.randrange(2))
                        come += step
                        assert come <= size
                    if chance.random() < 0.5:
                        await hold.take_apart(chance.choice((MIB, 12 * MIB, 90 * MIB)))
                    if chance.random() < 0.5:
                        hold.give_arrived()
                    if chance.random() < 0.5:
                        await hold.take_records(8 * MIB)
                        await steps(chance.randrange(2))
                        if chance.random() < 0.5:
                            hold.give_records()
                            await hold.take_records(chance.choice((MIB, 64 * MIB)))
                        hold.give_records(MIB)
                    if not hold.take_free(1_000) or chance.random() < 0.5:
                        await hold.take_reply(32 * MIB)
                        hold.shrink_reply(MIB)
                    await steps(chance.randrange(3))
                finally:
                    hold.give_all()
                    hold.give_all()

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


def test_who_holds_some_of_a_room_takes_no_more_of_it() -> None:
    """Nor of a room before it: or two could wait for one another."""

    async def work() -> None:
        hold = Hold(Memory(100 * MIB, request_max_bytes=MIB), Free())
        await hold.take_records(1)
        with pytest.raises(AssertionError):
            await hold.take_records(1)
        with pytest.raises(AssertionError):
            await hold.take_apart(1)
        with pytest.raises(AssertionError):
            await hold.arrive(1)
        hold.give_records()
        await hold.take_records(2)
        hold.give_all()

    run(work)


def test_what_is_small_is_not_counted_but_bounded() -> None:
    """For each connection, over all that it has sent and not been answered."""
    memory, free = Memory(100 * MIB, request_max_bytes=MIB), Free()
    first, second = Hold(memory, free), Hold(memory, free)
    assert first.take_free(limits.KAFKA_FREE_BYTES - 1)
    assert not second.take_free(2)
    first.give_all()
    assert second.take_free(2)
    assert memory.held_bytes == 0
