"""Memory that threads share."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sparklog.broker.decode_memory import DecodeMemory

SECONDS = 10.0


def test_no_more_is_held_than_there_is() -> None:
    """Threads that want more together take turns, and each gets one."""
    memory = DecodeMemory(100)
    lock = threading.Lock()
    held, most = 0, 0

    def work(size: int) -> None:
        nonlocal held, most
        with memory.hold(size):
            with lock:
                held += size
                most = max(most, held)
            with lock:
                held -= size

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(work, 10 + number % 60) for number in range(2_000)]:
            each.result(SECONDS)
    assert most <= 100


def test_what_is_larger_than_all_goes_alone() -> None:
    """It waits until no memory is held; later requests do not overtake it."""
    memory = DecodeMemory(100)
    order: list[str] = []
    started = [threading.Event(), threading.Event()]

    def work(name: str, size: int, event: threading.Event) -> None:
        event.set()
        with memory.hold(size):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[None]] = []
        with memory.hold(50):
            waiting.append(pool.submit(work, "large", 500, started[0]))
            started[0].wait(SECONDS)
            while not memory.is_short:
                pass
            waiting.append(pool.submit(work, "small", 1, started[1]))
            started[1].wait(SECONDS)
            assert order == []
        for each in waiting:
            each.result(SECONDS)
    assert order == ["large", "small"]


def test_what_fails_gives_its_room_back() -> None:
    """The next one is not kept waiting by an error."""
    memory = DecodeMemory(10)
    with pytest.raises(ZeroDivisionError), memory.hold(10):
        _ = 1 / 0
    with memory.hold(10):
        assert not memory.is_short
