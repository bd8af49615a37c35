"""A year of a root on a clock that a test moves: its costs at the end, and soon after the start."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pytest

from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AppendStaged
from sparklog.settings import JanitorSettings
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import DelayedStore, MemoryStore, Store
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Manifest, Receipt, StagingWriter
from tests.support.brokers import Rig, RigOptions, payload
from tests.support.processes import MIB, resident_bytes

YEAR_SECONDS: Final = 365 * 24 * 3600.0
DAY_SECONDS: Final = 24 * 3600.0
TOPICS: Final = {
    "events": {"retention_ms": f"{7 * DAY_SECONDS * 1e3:.0f}"},
    "state": {"cleanup_policy": "compact"},
}
KEYS: Final = 200
BURST: Final = 5
"""Publishes that follow each other by a second; then nothing comes until the next ones."""
ROUNDS: Final = 50
"""Bursts among which the costs of one moment are taken, for log checkpoints come in between."""


@dataclass
class Moment:
    """Costs at one time of the year, in ms of processor time, and the objects of the root."""

    ack_ms: list[float] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)
    open_ms: list[float] = field(default_factory=list)
    """A reader that begins: newest checkpoints, and what follows them."""
    start_ms: list[float] = field(default_factory=list)
    """A broker that takes over."""
    rss_bytes: int = 0
    objects: Counter[str] = field(default_factory=Counter)
    """By kind: the first folder of the path, and the extension."""
    epochs: int = 0
    """Epochs of the log; the end of each stays forever."""

    @property
    def costs(self) -> dict[str, float]:
        """The medians of the times, and the memory of the process."""
        times = {
            "ack": self.ack_ms,
            "plan": self.plan_ms,
            "open": self.open_ms,
            "start": self.start_ms,
        }
        found = {name: statistics.median(each) for name, each in times.items()}
        return found | {"MiB": self.rss_bytes / MIB}


class Year:
    """A broker that publishes at regular intervals, with all its upkeep; it restarts each month."""

    def __init__(self, publishes: int) -> None:
        self.publishes = publishes
        self.clock = ManualClock()
        self.store: Store = MemoryStore(self.clock)
        self.appends = self.published = self.days = self.months = 0
        self.sequences: Counter[tuple[str, int]] = Counter()
        """Records of each idempotent producer in each topic."""
        self.rig = Rig(self.store, self.clock, options=RigOptions(janitor=JanitorSettings()))
        for name, config in TOPICS.items():
            self.rig.create(name, 1, **config)
        self.follower = RootFollower(self.store, clock=self.clock)

    def live(self, publishes: int) -> None:
        """Lives through so many publishes, of each topic in turn."""
        end = self.published + publishes
        while self.published < end:
            for _ in range(BURST):
                self.clock.advance(1.0)
                self._append()
                self.rig.publish()
            self.published += BURST
            self.clock.advance(BURST * (YEAR_SECONDS / self.publishes - 1.0))
            self.rig.janitor.tick()
            self.rig.wal_cleaner.carry()
            self.rig.wal_cleaner.tick()
            days = int(self.clock.monotonic() / DAY_SECONDS)
            if days > self.days:
                self.days = days
                self.rig.append_staged([(0, [f"day {days}"])], batch=days, topic="events")
                self.end_day()
            if days > 30 * (self.months + 1):
                self.months += 1
                self.restart()

    def end_day(self) -> None:
        """Does nothing more."""

    def restart(self) -> None:
        """Another broker takes over, with its own epoch of the log."""
        self.rig = self.rig.successor(store=self.store)

    def _append(self) -> None:
        self.appends += 1
        topic = list(TOPICS)[self.appends % len(TOPICS)]
        number = self.appends % KEYS
        producer = 1_000 + self.days
        sequence = self.sequences[topic, producer]
        self.sequences[topic, producer] += 2
        values = [f"{self.appends}", f"{self.appends} again"]
        keys = [b"%d" % number, b"%d" % (number // 2)]
        self.rig.append(values, topic=topic, key=keys, producer_sequence=(producer, 0, sequence))

    def moment(self) -> Moment:
        """Takes the costs of this time, over some publishes."""
        found = Moment()
        for number in range(ROUNDS):
            for _ in range(BURST):
                found.ack_ms.append(_cpu_ms(self._append))
            self.live(BURST)
            found.plan_ms.append(_cpu_ms(lambda: self._plan(self.follower)))
            found.open_ms.append(
                _cpu_ms(lambda: self._plan(RootFollower(self.store, clock=self.clock)))
            )
            if number % (ROUNDS // 5) == 0:
                found.start_ms.append(_cpu_ms(self.restart))
        found.epochs = self.rig.leadership.epoch
        found.rss_bytes = resident_bytes(os.getpid())
        for stat in self.store.walk(""):
            head, _, name = stat.name.partition("/")
            found.objects[f"{head} {name.rpartition('.')[2]}" if "." in name else head] += 1
        return found

    def _plan(self, follower: RootFollower) -> None:
        for topic in TOPICS:
            snapshot = follower.refresh([topic])[topic]
            end = follower.ends(snapshot)[0]
            first = max(end - 1_000, snapshot.starts[0])
            follower.plan(topic, snapshot, 0, first, end)


class Habits(Year):
    """A year in which, each day, a topic and a query end, and the broker restarts three times."""

    def __init__(self, publishes: int) -> None:
        super().__init__(publishes)
        self.counted = self.store = DelayedStore(self.store, 0.0, self.clock)
        self.restart()

    def end_day(self) -> None:
        self.rig.create(f"of{self.days}", 1)
        self.rig.append(["a"], topic=f"of{self.days}")
        if self.days > 3:
            self.rig.broker.topics.delete(f"of{self.days - 3}")
        writer = StagingWriter(self.store, query=f"q{self.days}", batch=0, clock=self.clock)
        writer.add("events", 0, payload(["of a query"]))
        topic_ids = {"events": self.rig.led_partitions.topic("events").topic_id}
        batch = Manifest(
            query=f"q{self.days}", batch=0, sections=tuple(writer.finish()), topic_ids=topic_ids
        )
        manifest.write(self.store, batch, self.clock)
        reply = self.rig.broker.staged.append(AppendStaged(manifest=batch.path))
        Receipt(ranges=reply.ranges, topic_ids=topic_ids).put(self.store, batch, self.clock)
        for _ in range(3):
            self.clock.advance(1.0)
            self.restart()

    def requests(self, run: Callable[[], None]) -> int:
        """Returns the number of requests of a piece of work."""
        before = self.counted.requests.total()
        run()
        return self.counted.requests.total() - before

    def live_a_day(self) -> None:
        days = self.days
        while self.days == days:
            self.live(BURST)


def _cpu_ms(run: Callable[[], None]) -> float:
    began = time.thread_time()
    run()
    return (time.thread_time() - began) * 1e3


def lived(publishes: int, *, young_at: float) -> tuple[Moment, Moment]:
    """Returns the costs after that part of the year, and at its end."""
    year = Year(publishes)
    year.live(int(publishes * young_at))
    young = year.moment()
    year.live(publishes - year.published)
    return young, year.moment()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_year_leaves_no_more_objects_than_half_of_it() -> None:
    """Retention, both compactions, log upkeep and trimming keep the number of objects in bounds."""
    young, old = lived(2_000, young_at=0.5)
    print(young.objects, old.objects)  # noqa: T201
    old.objects["wal"] -= old.epochs - young.epochs
    del old.objects["meta json"]  # a version for each start, of which the newest 100 are kept
    for kind, count in old.objects.items():
        more = 250 if kind == "topics json" else 20  # the log of a table is cleaned now and then
        assert count <= 1.2 * young.objects[kind] + more, kind


@pytest.mark.soak(mode="limits")
@pytest.mark.timeout(3_600)
def test_a_year_of_publishes_costs_no_more_at_its_end() -> None:
    """Acks, plans, opening, starts and memory are the same after 200,000 publishes."""
    young, old = lived(200_000, young_at=0.1)
    print(young.objects, old.objects, young.costs, old.costs, sep="\n")  # noqa: T201
    for name, cost in old.costs.items():
        assert cost <= 1.2 * young.costs[name], name


@pytest.mark.soak(mode="limits")
@pytest.mark.timeout(3_600)
def test_a_year_of_ends_costs_no_more_at_its_end() -> None:
    """Topics are deleted, queries end, and a thousand brokers restart: requests and memory stay.

    Requests, because a store in memory goes through all its objects for each listing.
    """
    found = []
    year = Habits(2_000)
    for part in (0.1, 1.0):
        year.live(round(2_000 * part) - year.published)
        found.append(
            {
                "requests of a day": statistics.median(
                    year.requests(year.live_a_day) for _ in range(10)
                ),
                "requests of a start": statistics.median(
                    year.requests(year.restart) for _ in range(10)
                ),
                "MiB": resident_bytes(os.getpid()) / MIB,
            }
        )
    print(year.rig.leadership.epoch, *found, sep="\n")  # noqa: T201
    young, old = found
    for name, cost in old.items():
        assert cost <= 1.2 * young[name], name
