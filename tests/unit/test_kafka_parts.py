"""What connections of the Kafka door share: a budget of memory, and fetch sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import limits
from sparklog.broker.kafka import sessions
from sparklog.broker.kafka.memory import Budget
from sparklog.broker.kafka.sessions import Sessions


def run(work: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own."""

    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


# ------------------------------------------------------------------------------ memory


def test_who_wants_more_than_is_left_waits_in_turn() -> None:
    """A small one does not slip past a large one that came before, or the large one starves."""

    async def work() -> None:
        budget = Budget(10)
        await budget.take(6)
        large = asyncio.create_task(budget.take(8))
        small = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        assert (large.done(), small.done(), budget.is_short) == (False, False, True)
        budget.give(6)
        await asyncio.sleep(0)
        assert (large.done(), small.done(), budget.is_short) == (True, True, False)

    run(work)


def test_more_than_the_whole_budget_has_its_turn_alone() -> None:
    """Or it could never be served."""

    async def work() -> None:
        budget = Budget(10)
        await budget.take(1)
        huge = asyncio.create_task(budget.take(50))
        await asyncio.sleep(0)
        assert not huge.done()
        budget.give(1)
        await asyncio.sleep(0)
        assert huge.done()
        other = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        assert not other.done()
        budget.give(50)
        await other

    run(work)


def test_who_gives_up_at_the_head_lets_the_others_on() -> None:
    """Nobody gives anything back then, and there is room all the same."""

    async def work() -> None:
        budget = Budget(100)
        await budget.take(60)
        large = asyncio.create_task(budget.take(90))
        small = asyncio.create_task(budget.take(10))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait_for(small, 1.0)
        assert not budget.is_short

    run(work)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 3)), max_size=40),
)
def test_nothing_is_lost_by_those_who_give_up(wishes: list[tuple[int, bool, int]]) -> None:
    """Whoever is cancelled, before or just after its turn came, leaves no trace."""

    async def work() -> None:
        budget = Budget(10)
        takers = []
        for size, gives_up, steps in wishes:
            task = asyncio.create_task(budget.take(size))
            takers.append((size, task))
            for _ in range(steps):
                await asyncio.sleep(0)
            if gives_up:
                task.cancel()
            held = sum(size for size, each in takers if each.done() and not each.cancelled())
            largest = max((size for size, each in takers if each.done()), default=0)
            assert held <= max(10, largest)
        while takers:
            await asyncio.sleep(0)
            done = [each for each in takers if each[1].done()]
            assert done, "somebody waits though everything was given back"
            takers = [each for each in takers if not each[1].done()]
            for size, task in done:
                if not task.cancelled():
                    budget.give(size)
        assert not budget.is_short
        await asyncio.wait_for(budget.take(10), 1.0)

    run(work)


# ------------------------------------------------------------------------------ sessions


def test_a_full_house_gives_no_session_until_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes."""
    now = 1_000.0
    monkeypatch.setattr(limits, "KAFKA_FETCH_SESSIONS", 2)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    house = Sessions()
    first, second = house.open({}), house.open({})
    assert first is not None
    assert second is not None
    assert house.open({}) is None
    now += limits.KAFKA_FETCH_SESSION_KEPT_SECONDS - 1
    first.move_on()
    now += 2
    assert house.open({}) is not None
    assert (house.find(first.number), house.find(second.number)) == (first, None)
    assert len(house) == 2


def test_epochs_begin_anew_at_their_end() -> None:
    """At 1: 0 and -1 mean something else."""
    session = sessions.Session(1, epoch=2**31 - 2)
    session.move_on()
    assert session.epoch == 2**31 - 1
    session.move_on()
    assert session.epoch == 1
