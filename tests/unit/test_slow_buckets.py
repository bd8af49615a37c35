"""A bucket that throttles for minutes or answers slowly, and a tiny budget: nothing is lost.

S3 answers 503 (Slow Down), which leaves a put unresolved. It bills no such request, and
`RemoteStore` repeats no conditional put by itself, so only the log and the tables repeat them.
"""

from __future__ import annotations

from collections import deque

from sparklog import errors
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.publish_loop import PublishLoop, PublishPace
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.wal_cleaner import WalCleanerLimits
from sparklog.clock import ManualClock
from sparklog.storage.objects import DelayedStore, MemoryStore, NoFaults, PutUnresolved, Store
from sparklog.storage.objects.faults import Operation
from tests.support.brokers import Rig, RigOptions, publishing, rows_of_table

MINUTES = 180.0
TOPICS = [f"t{number}" for number in range(5)]


class Throttling(NoFaults):
    """Refuses puts below a prefix until some time, and notes when puts succeed."""

    def __init__(self, clock: ManualClock, prefix: str) -> None:
        self._clock = clock
        self._prefix = prefix
        self.until = 0.0
        self.refused = 0
        self.done: list[float] = []

    def before(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new" and path.startswith(self._prefix):
            if self._clock.monotonic() < self.until:
                self.refused += 1
                self.on_refused()
                raise PutUnresolved(path, "503 Slow Down")
            self.done.append(self._clock.monotonic())

    def on_refused(self) -> None:
        """Is called before each refusal."""


def most_at_once(times: list[float], seconds: float) -> int:
    """Returns the most puts in a time of this length."""
    most, recent = 0, deque[float]()
    for time in times:
        recent.append(time)
        while recent[0] <= time - seconds:
            recent.popleft()
        most = max(most, len(recent))
    return most


def broker(
    store: Store, clock: ManualClock, puts_per_second: float, **bounds: int
) -> tuple[Rig, PublishLoop]:
    """Returns a broker with such a budget and five topics of two partitions, and its publisher."""
    budget = PutBudget(puts_per_second, longest_wait_seconds=0.25)
    options = RigOptions(
        writer=WriterLimits(**bounds),
        wal_cleaner=WalCleanerLimits(checkpoint_every_objects=8, trim_grace_seconds=10.0),
        budget=budget,
    )
    rig = Rig(store, clock, options=options)
    for topic in TOPICS:
        rig.create(topic, 2)
    return rig, publishing(rig, pace=PublishPace(1.0, clock, budget))


def fill(rig: Rig) -> float:
    """Appends to each partition of each topic, and returns how long the last ack took."""
    began = rig.clock.monotonic()
    sent = [rig.submit(["a"], topic=topic, partition=each) for topic in TOPICS for each in (0, 1)]
    for each in sent:
        rig.broker.wait(each)
    return rig.clock.monotonic() - began


def published(store: Store, clock: ManualClock) -> list[int]:
    """Returns the number of records in the table of each partition."""
    return [len(rows_of_table(store, clock, topic, each)) for topic in TOPICS for each in (0, 1)]


def test_acks_wait_for_a_store_that_throttles(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: after minutes of 503, each record is there once, in the puts of few flushes."""
    throttling = Throttling(clock, "wal/")
    rig, _ = broker(store, clock, 20.0, queue_bytes=20_000)
    rig.append_to(store.view(throttling))
    throttling.until = clock.monotonic() + MINUTES
    queued, full = [], 0

    def send_more() -> None:
        nonlocal full
        for _ in range(10):
            try:
                queued.append(rig.submit(["b"], topic="t0"))
            except errors.QueueFull:  # retriable
                full += 1

    throttling.on_refused = send_more  # type: ignore[method-assign]
    assert fill(rig) >= MINUTES
    for each in queued:
        rig.broker.wait(each)
    assert full > 10 * len(queued), "the queue stays bounded, and clients try again"
    assert rig.end("t0") == 1 + len(queued)
    assert throttling.refused <= MINUTES * 8 / 7, "a put is repeated less and less often"
    assert len(throttling.done) <= 3


def test_tables_are_published_without_a_burst_after_a_throttle(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Promise: tables that a store has refused for minutes catch up within the budget of puts."""
    throttling = Throttling(clock, "topics/")
    rig, loop = broker(store, clock, 5.0)
    rig.publish_to(store.view(throttling))
    throttling.until = clock.monotonic() + MINUTES
    rounds = 0
    while clock.monotonic() < throttling.until:
        fill(rig)
        rounds += 1
        loop.tick()
        clock.advance(5.0)
    assert rounds > 5
    assert throttling.refused <= 5 * MINUTES
    for _ in range(60):  # more than the budget could publish each second
        fill(rig)
        rounds += 1
        for _ in range(10):
            loop.tick()
            clock.advance(0.1)
    for _ in range(600):
        loop.tick()
        clock.advance(0.1)
    assert published(store, clock) == [rounds] * 10
    saved, debt = 4.5, 3
    for seconds in (1.0, 5.0, 20.0):
        assert most_at_once(throttling.done, seconds) <= 4.5 * seconds + saved + debt


def test_a_store_that_answers_in_two_seconds(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: acks take no longer than the wait of the budget and the put itself."""
    slow = DelayedStore(store, 2.0, clock)
    rig, loop = broker(slow, clock, 20.0)
    for _ in range(10):
        assert fill(rig) <= 2.0 + 0.25
    for _ in range(20):
        loop.tick()
        clock.advance(1.0)
    rig.trim()
    assert published(store, clock) == [10] * 10


def test_a_budget_of_one_put_per_second(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: a tiny budget delays acks and tables, and the log is still trimmed."""
    puts = Throttling(clock, "")
    rig, loop = broker(store.view(puts), clock, 1.0)
    began = clock.monotonic()
    del puts.done[:]
    acks: list[float] = []
    for _ in range(100):
        acks.append(fill(rig))
        loop.tick()
        rig.wal_cleaner.tick()
    seconds = clock.monotonic() - began
    assert max(acks) <= 2.5 + 0.01
    log = [path for path in store._objects if path.startswith("wal/")]
    assert len(log) < len(acks) / 2, "the log is trimmed"
    checkpoints = len(acks) / 8
    assert len(puts.done) <= seconds * 1.0 + checkpoints + 10
    assert min(published(store, clock)) >= 0.6 * len(acks)
    for _ in range(600):
        loop.tick()
        clock.advance(0.1)
    assert published(store, clock) == [len(acks)] * 10
