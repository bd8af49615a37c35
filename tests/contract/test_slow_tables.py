"""A table whose store is slow, alongside others: the lag of their tables, and the time of acks."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import pytest

from sparklog.broker.agent import Agent
from sparklog.clock import ManualClock, SystemClock
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.objects import MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from tests.support.brokers import Rig, RigOptions, payload
from tests.support.flights import BrokerClient

pytestmark = pytest.mark.soak(mode="limits")

HANG_SECONDS = 60.0
TOPICS = [f"light{number}" for number in range(20)]


class Hangs(NoFaults):
    """Puts of one topic's data files that take a minute."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.startswith("topics/heavy/partition="):
            self.began.set()
            self.ended.wait(HANG_SECONDS)


def test_tables_of_light_topics_beside_puts_that_hang() -> None:
    """The time from an ack to the commit with its record, of twenty topics for a minute."""
    store, hangs = MemoryStore(SystemClock()), Hangs()
    flight, kafka = FlightSettings(listen="127.0.0.1:0"), KafkaSettings(listen="")
    settings = BrokerSettings(root="memory://x", id=1, flight=flight, kafka=kafka)
    agent = Agent(settings, store=store.view(hangs))
    agent.start()
    lags: list[float] = []
    try:
        with BrokerClient(agent.address) as client:
            for name in ("heavy", *TOPICS):
                client.create(name, 1)
            for _ in range(64):
                client.append(["x" * 1_000_000], topic="heavy")
            assert hangs.began.wait(30.0)
            until = time.monotonic() + HANG_SECONDS
            waiting: dict[str, deque[tuple[int, float]]] = {name: deque() for name in TOPICS}
            while time.monotonic() < until:
                for name, acked in waiting.items():
                    offset = client.append(["a"], topic=name).base_offset
                    acked.append((offset, time.monotonic()))
                for name, acked in waiting.items():
                    (found,) = client.describe(name).partitions
                    while acked and acked[0][0] < found.published:
                        lags.append(time.monotonic() - acked.popleft()[1])
            now = time.monotonic()
            lags += [now - at for acked in waiting.values() for _, at in acked]
    finally:
        hangs.ended.set()
        agent.stop()
    p50, p99 = np.percentile(lags, [50, 99])
    print(f"{len(lags)} records: from ack to table {p50:.2f} s, p99 {p99:.2f} s")  # noqa: T201
    assert p99 <= 3.0


def test_acks_while_tables_of_a_takeover_are_slow() -> None:
    """A leader acks records of its other partitions while a table it takes over answers nothing."""
    clock = ManualClock()
    store = MemoryStore(clock)
    options = RigOptions(is_member=True)
    first, second = (Rig(store, clock, broker=number, options=options) for number in (1, 2))
    first.reconciler.tick()
    first.create("t", 2)
    first.create("u", 2)
    second.reconciler.tick()
    (number,) = second.led_partitions.topic("t").partitions
    table = first.led_partitions.topic("t").table
    held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with table._lock:
            held.set()
            may_end.wait(30.0)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(30.0)
    assert second.handovers.move({("t", number): 1}) == 1
    taking = threading.Thread(target=first.reconciler.tick)
    taking.start()
    (own,) = first.led_partitions.topic("u").partitions
    taken: list[float] = []
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        began = time.perf_counter()
        first.broker.wait(first.broker.append("u", own, payload(["a"])))
        taken.append(time.perf_counter() - began)
    assert taking.is_alive()
    may_end.set()
    taking.join(30.0)
    holding.join(30.0)
    p99, most = np.percentile(taken, 99) * 1e3, max(taken) * 1e3
    print(f"{len(taken)} acks: p99 {p99:.2f} ms, at most {most:.1f} ms")  # noqa: T201
    assert p99 <= 20.0
