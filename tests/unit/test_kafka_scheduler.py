"""Long work in the event loop: one turn in each round of the loop, in order."""

from __future__ import annotations

import asyncio

from sparklog.broker.kafka.scheduler import TURN_SECONDS, LoopScheduler
from sparklog.clock import ManualClock
from sparklog.limits import KAFKA_LITTLE_ITEMS

MANY = KAFKA_LITTLE_ITEMS + 1


def test_one_turn_is_given_in_each_round() -> None:
    """Each round of the event loop gives one turn, in the order of the requests."""

    async def work() -> None:
        shared, done, rounds = LoopScheduler(ManualClock()), [], 0

        async def one(number: int) -> None:
            async for _ in shared.iterate(range(MANY)):
                pass
            done.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(50)]
        before = 0
        while len(done) < len(tasks):
            await asyncio.sleep(0)
            rounds += 1
            assert len(done) <= before + 1
            before = len(done)
        assert done == list(range(50))
        assert rounds <= 2 * len(tasks)

    asyncio.run(work())


def test_a_task_that_has_used_its_turn_up_continues_behind_the_others() -> None:
    """Long work delays no task that came after it by more than a turn."""

    async def work() -> None:
        clock = ManualClock()
        shared, seen = LoopScheduler(clock), []

        async def one(name: str) -> None:
            async for item in shared.iterate(range(MANY)):
                seen.append((item, name))
                clock.advance(2 * TURN_SECONDS)

        await asyncio.gather(shared.wait_turn(), one("a"), one("b"), one("c"))
        assert seen == [(item, name) for item in range(MANY) for name in "abc"]

    asyncio.run(work())


def test_a_task_keeps_its_turn_until_its_time_is_over() -> None:
    """Its steps share one turn; after that it waits like the others."""

    async def work() -> None:
        clock = ManualClock()
        shared, seen = LoopScheduler(clock), []

        async def one(name: str) -> None:
            for _ in range(10):
                await shared.wait_turn()
                async for _ in shared.iterate(range(MANY)):
                    pass
            seen.append(name)
            clock.advance(2 * TURN_SECONDS)
            await shared.wait_turn()
            seen.append(name)

        await asyncio.gather(shared.wait_turn(), one("a"), one("b"))
        assert seen == ["a", "b", "a", "b"]

    asyncio.run(work())


def test_few_items_do_not_wait() -> None:
    """They do not wait even if many tasks are queued."""

    async def work() -> None:
        shared = LoopScheduler(ManualClock())
        others = [asyncio.create_task(shared.wait_turn()) for _ in range(10)]
        await asyncio.sleep(0)
        async for _ in shared.iterate(range(KAFKA_LITTLE_ITEMS)):
            pass
        assert sum(each.done() for each in others) <= 1
        await asyncio.gather(*others)

    asyncio.run(work())


def test_an_iterable_without_length_waits_for_a_turn() -> None:
    """The scheduler treats it as long work."""

    async def work() -> None:
        shared = LoopScheduler(ManualClock())
        other = asyncio.create_task(shared.wait_turn())
        await asyncio.sleep(0)
        async for _ in shared.iterate(iter(())):
            pass
        assert other.done()
        await asyncio.gather(asyncio.create_task(shared.wait_turn()), other)

    asyncio.run(work())


def test_a_cancelled_task_does_not_delay_the_others() -> None:
    """It may be cancelled before its turn, or when the turn has just been given."""

    async def work() -> None:
        shared = LoopScheduler(ManualClock())
        tasks = [asyncio.create_task(shared.wait_turn()) for _ in range(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await tasks[1]
        tasks[2].cancel()
        async with asyncio.timeout(5):
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await shared.wait_turn()
        cancelled = [number for number, each in enumerate(found) if each is not None]
        assert cancelled in ([2, 3], [3])

    asyncio.run(work())
