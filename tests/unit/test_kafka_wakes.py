"""Fetches that wait for records: they are woken in turns, and once for each flush."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, cast

import pytest

from sparklog.broker.acceptors import Acceptor
from sparklog.broker.kafka.listener import WAKE_SECONDS, WOKEN_FETCHES, KafkaListener
from sparklog.clock import Clock, ManualClock
from sparklog.limits import MIB
from sparklog.listeners import Listener
from sparklog.settings import KafkaSettings

FETCHES: Final = 5 * WOKEN_FETCHES
SEEN: Final[Mapping[tuple[str, int], int]] = {("t", 0): 0}


class Broker:
    """The part of a broker that waiting fetches use."""

    def __init__(self) -> None:
        self.watching: list[Callable[[], None]] = []
        self.stopped = 0

    def watch_growth(self, seen: Any, lacking_bytes: int, notify: Callable[[], None]) -> object:
        del seen, lacking_bytes
        self.watching.append(notify)
        return notify

    def stop_watching(self, watch: object) -> None:
        del watch
        self.stopped += 1

    def flush(self) -> None:
        """Notifies all watches."""
        watching, self.watching = self.watching, []
        for notify in watching:
            notify()


class Listening:
    """A listener whose loop runs in this thread, with the calls from other threads counted."""

    def __init__(self, sock: socket.socket, clock: Clock | None = None) -> None:
        self.broker = Broker()
        self.listener = KafkaListener(
            cast("Any", self.broker),
            cast("Any", None),
            [Acceptor(listener=Listener("PLAINTEXT", "PLAINTEXT", "127.0.0.1:1"), listening=sock)],
            settings=KafkaSettings(request_max_bytes=MIB, memory_bytes=MIB),
            clock=clock,
        )
        self.wakes = 0
        call_in_loop = self.listener._call_in_loop

        def counted(call: Callable[..., object], *values: Any) -> None:
            self.wakes += 1
            call_in_loop(call, *values)

        cast("Any", self.listener)._call_in_loop = counted

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.listener._loop.run_until_complete(work)

    def fetch(self, seconds: float = 60.0) -> asyncio.Task[bool]:
        return asyncio.create_task(self.listener.wait_for_append(SEEN, 1, seconds))


@pytest.fixture
def listening() -> Iterator[Listening]:
    """A listener that is closed at the end."""
    with socket.socket() as sock:
        found = Listening(sock)
        yield found
        found.listener.close()


def test_a_flush_wakes_the_loop_once_and_its_fetches_in_turns(listening: Listening) -> None:
    """Between two turns of a few fetches the loop serves others."""

    async def work() -> None:
        fetches = [listening.fetch() for _ in range(FETCHES)]
        await asyncio.sleep(0)
        listening.broker.flush()
        assert listening.wakes == 1
        before = 0
        while before < FETCHES:
            await asyncio.sleep(0)
            done = sum(fetch.done() for fetch in fetches)
            assert done - before <= WOKEN_FETCHES
            before = done
        assert all([await fetch for fetch in fetches])
        assert listening.broker.stopped == FETCHES

    listening.run(work())


def test_fetches_are_woken_at_a_limited_rate() -> None:
    """The loop has time for others, however many fetches wait: it wakes some, and then pauses."""
    clock = ManualClock()

    async def work(listening: Listening) -> None:
        fetches = [listening.fetch() for _ in range(FETCHES)]
        await asyncio.sleep(0)
        clock.advance(60.0)  # a long pause earns no more than one turn
        listening.broker.flush()
        for turn in range(1, FETCHES // WOKEN_FETCHES + 1):
            for _ in range(5):
                listening.listener._wake()
                await asyncio.sleep(0)
            assert sum(fetch.done() for fetch in fetches) == turn * WOKEN_FETCHES
            clock.advance((WOKEN_FETCHES + 0.5) * WAKE_SECONDS)

    with socket.socket() as sock:
        listening = Listening(sock, clock)
        listening.run(work(listening))
        listening.listener.close()


def test_fetches_that_find_records_have_turns_too() -> None:
    """Those beyond the rate wait, in their order."""
    clock = ManualClock()

    async def work(listening: Listening) -> None:
        listener = listening.listener
        clock.advance(60.0)
        assert not any([await listener.wait_fetch_turn() for _ in range(WOKEN_FETCHES)])
        order: list[str] = []

        async def find(name: str) -> None:
            assert await listener.wait_fetch_turn()
            order.append(name)

        tasks = [asyncio.create_task(find(name)) for name in "ab"]
        await asyncio.sleep(0)
        assert order == []
        clock.advance(3 * WAKE_SECONDS)
        await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        assert order == ["a", "b"]

    with socket.socket() as sock:
        listening = Listening(sock, clock)
        listening.run(work(listening))
        listening.listener.close()


def test_fetches_of_a_later_flush_wait_behind_those_of_an_earlier_one(listening: Listening) -> None:
    """No fetch is forgotten, and the longest waiting one is first."""

    async def work() -> None:
        order: list[int] = []

        async def fetch(number: int) -> None:
            await listening.listener.wait_for_append(SEEN, 1, 60.0)
            order.append(number)

        tasks = [asyncio.create_task(fetch(number)) for number in range(FETCHES)]
        await asyncio.sleep(0)
        listening.broker.flush()
        tasks += [asyncio.create_task(fetch(number)) for number in range(FETCHES, 2 * FETCHES)]
        await asyncio.sleep(0)
        listening.broker.flush()
        await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        assert order == list(range(2 * FETCHES))

    listening.run(work())


def test_a_fetch_ends_with_its_timeout(listening: Listening) -> None:
    """Its watch is stopped then."""

    async def work() -> None:
        assert await listening.fetch(0.001)
        assert listening.broker.stopped == 1
        listening.broker.flush()  # too late
        await asyncio.sleep(0)

    listening.run(work())
