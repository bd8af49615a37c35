"""Parts that Kafka connections share: memory pools and fetch sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.kafka import sessions
from sparklog.broker.kafka.memory import MemoryPool
from sparklog.broker.kafka.sessions import FETCH_SESSION_KEPT_SECONDS, FetchSessions
from sparklog.clock import ManualClock


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Runs a coroutine in its own event loop."""

    async def all_of_it() -> None:
        await work()

    asyncio.run(all_of_it())


# ------------------------------------------------------------------------------ memory


def test_grants_are_given_in_their_order() -> None:
    """A small grant does not overtake a large one that came first, which could starve otherwise."""

    async def work() -> None:
        pool = MemoryPool(10)
        await pool.take(6)
        large = asyncio.create_task(pool.take(8))
        small = asyncio.create_task(pool.take(1))
        await asyncio.sleep(0)
        assert (large.done(), small.done(), pool.is_short) == (False, False, True)
        pool.release(6)
        await asyncio.sleep(0)
        assert (large.done(), small.done(), pool.is_short) == (True, True, False)

    run(work)


def test_a_grant_larger_than_the_pool_is_given_alone() -> None:
    """It waits until nothing else is held, because it could never be given otherwise."""

    async def work() -> None:
        pool = MemoryPool(10)
        await pool.take(1)
        huge = asyncio.create_task(pool.take(50))
        await asyncio.sleep(0)
        assert not huge.done()
        pool.release(1)
        await asyncio.sleep(0)
        assert huge.done()
        other = asyncio.create_task(pool.take(1))
        await asyncio.sleep(0)
        assert not other.done()
        pool.release(50)
        await other

    run(work)


def test_cancelling_the_first_waiter_lets_the_others_continue() -> None:
    """They continue although no memory is released at that time."""

    async def work() -> None:
        pool = MemoryPool(100)
        await pool.take(60)
        large = asyncio.create_task(pool.take(90))
        small = asyncio.create_task(pool.take(10))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait_for(small, 1.0)
        assert not pool.is_short

    run(work)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 3)), max_size=40),
)
def test_cancelled_grants_leave_no_trace(grants: list[tuple[int, bool, int]]) -> None:
    """A task that is cancelled before or just after its grant loses no memory."""

    async def work() -> None:
        pool = MemoryPool(10)
        takers = []
        for size, gives_up, steps in grants:
            task = asyncio.create_task(pool.take(size))
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
            assert done, "a task waits although all memory was released"
            takers = [each for each in takers if not each[1].done()]
            for size, task in done:
                if not task.cancelled():
                    pool.release(size)
        assert not pool.is_short
        await asyncio.wait_for(pool.take(10), 1.0)

    run(work)


# ------------------------------------------------------------------------------ sessions


def test_full_sessions_are_replaced_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new session replaces the least recently used one, if that has been idle for long enough."""
    monkeypatch.setattr("sparklog.broker.kafka.sessions.FETCH_SESSIONS", 2)
    clock = ManualClock()
    all_sessions = FetchSessions(clock)
    first, second = all_sessions.open({}, "User:x"), all_sessions.open({}, "User:x")
    assert first is not None
    assert second is not None
    assert all_sessions.open({}, "User:x") is None
    clock.advance(FETCH_SESSION_KEPT_SECONDS - 1)
    all_sessions.advance(first)
    assert all_sessions.open({}, "User:x") is None
    clock.advance(1)
    assert all_sessions.open({}, "User:x") is not None
    assert (
        all_sessions.find(first.session_id, "User:x"),
        all_sessions.find(second.session_id, "User:x"),
    ) == (
        first,
        None,
    )
    assert len(all_sessions) == 2


def test_a_session_belongs_to_a_user() -> None:
    """Promise: another user that guesses its id neither reads through it nor closes it."""
    all_sessions = FetchSessions(ManualClock())
    session = all_sessions.open({}, "User:alice")
    assert session is not None
    assert all_sessions.find(session.session_id, "User:bob") is None
    all_sessions.close(session.session_id, "User:bob")
    assert all_sessions.find(session.session_id, "User:alice") is session


def test_epochs_wrap_around_to_1() -> None:
    """The epochs 0 and -1 are reserved."""
    session = sessions.FetchSession(1, "User:x", epoch=2**31 - 2)
    session.advance(0.0)
    assert session.epoch == 2**31 - 1
    session.advance(0.0)
    assert session.epoch == 1
