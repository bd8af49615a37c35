"""The budget of puts: what flushes and publications wait."""

from __future__ import annotations

import itertools

import pytest

from sparklog import limits
from sparklog.broker.log.publish_loop import PublishPace
from sparklog.broker.log.put_budget import PutBudget
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore, NoFaults, PutUnresolved
from sparklog.storage.objects.faults import Operation
from tests.support.brokers import Rig, publishing


def flush_times(budget: PutBudget, *, every: float, seconds: float) -> list[float]:
    """Returns when flushes start if a record comes in these intervals.

    The wait is asked for again and again, as the writer does.
    """
    times: list[float] = []
    now = 0.0
    while now < seconds:
        while (left_seconds := budget.flush_wait_seconds(now)) > 0:
            now += min(max(left_seconds, 0.001), 0.01)
        budget.note_flush(now)
        times.append(now)
        now += every
    return times


def rate(times: list[float]) -> float:
    """Returns the flushes per second among the second half of them."""
    late = times[len(times) // 2 :]
    return (len(late) - 1) / (late[-1] - late[0])


@pytest.mark.parametrize(
    ("every", "least", "most"),
    [(0.001, 5.0, 8.0), (0.1, 4.0, 8.0), (0.5, 1.8, 2.1), (5.0, 0.1, 0.3)],
)
def test_flushes_stay_within_the_share_of_the_log(every: float, least: float, most: float) -> None:
    """Promise: 40 % of 20 puts a second, however fast records arrive; few records hardly wait."""
    budget = PutBudget(20.0, longest_wait_seconds=0.25)
    assert least <= rate(flush_times(budget, every=every, seconds=60.0)) <= most


@pytest.mark.parametrize("puts_per_second", [0.1, 0.5, 3.0, 20.0, 1_000.0])
@pytest.mark.parametrize("linger_seconds", [0.25, 5.0])
def test_no_budget_is_exceeded_by_the_log(puts_per_second: float, linger_seconds: float) -> None:
    """Promise: 40 % of any budget, also where a wait is longer than the memory of flushes."""
    budget = PutBudget(puts_per_second, longest_wait_seconds=linger_seconds)
    times = flush_times(budget, every=0.001, seconds=max(60 / puts_per_second, 5.0))
    assert rate(times) <= 1.03 * 0.4 * puts_per_second


def test_acks_slow_down_smoothly() -> None:
    """Promise: no two flushes in a row differ by a step, and none waits longer than the most."""
    budget = PutBudget(20.0, longest_wait_seconds=0.25)
    times = flush_times(budget, every=0.001, seconds=30.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) <= 0.25
    assert all(abs(after - before) < 0.02 for before, after in itertools.pairwise(gaps))


def test_a_tiny_budget_is_kept() -> None:
    """Promise: a budget of one put a second acks and publishes; flushes wait longer than usual."""
    budget = PutBudget(1.0, longest_wait_seconds=0.25)
    assert rate(flush_times(budget, every=0.001, seconds=120.0)) == pytest.approx(0.4, rel=0.05)
    assert budget.publish_seconds(5, 120.0) == pytest.approx(10.0, abs=0.5)


def test_an_idle_broker_puts_at_once() -> None:
    """Promise: a budget keeps no debts: after a pause, the next record does not wait."""
    budget = PutBudget(1.0, longest_wait_seconds=0.25)
    assert budget.flush_wait_seconds(0.0) < 0
    last = flush_times(budget, every=0.001, seconds=60.0)[-1]
    assert budget.flush_wait_seconds(last + 0.001) > 2
    assert budget.flush_wait_seconds(last + 2.5) <= 0


def test_tables_get_what_the_log_leaves() -> None:
    """Promise: at least half of the budget, and 90 % while no record is written."""
    budget = PutBudget(20.0, longest_wait_seconds=0.25)
    assert budget.publish_seconds(180, 0.0) == pytest.approx(10.0)
    for number in range(1_000):  # full flushes do not wait
        budget.note_flush(number / 100)
    assert budget.publish_seconds(180, 10.0) == pytest.approx(18.0)


def test_the_interval_of_publishing_is_told() -> None:
    """A hundred topics of four partitions are published as often as 18 puts a second allow."""
    budget = PutBudget(20.0, longest_wait_seconds=0.25)
    pace = PublishPace(10.0, ManualClock(), budget)
    assert pace.interval_seconds(500, 0.25) == 10.0
    assert pace.expected_seconds(5, 0.25) == 10.0
    assert pace.expected_seconds(500, 0.25) == pytest.approx(500 / 18)
    assert pace.expected_seconds(10_000, 0.25) == pytest.approx(10_000 / 18), "no bound, as for CPU"


def test_tables_save_no_puts_for_a_burst() -> None:
    """Promise: after an hour without records, a second's worth of puts is left."""
    budget = PutBudget(20.0, longest_wait_seconds=0.25)
    assert budget.puts_for_tables(0.0) == pytest.approx(18.0)
    assert budget.puts_for_tables(3_600.0) == pytest.approx(18.0)
    budget.note_published(100)
    assert budget.puts_for_tables(3_601.0) == pytest.approx(-64.0)


@pytest.mark.rig(topics={f"t{number}": 4 for number in range(10)})
def test_topics_take_turns_within_the_budget(rig: Rig, clock: ManualClock) -> None:
    """Promise: each topic has its turn, whatever others request, and though some fail."""
    budget = PutBudget(10.0, longest_wait_seconds=0.25)
    loop = publishing(rig, pace=PublishPace(1.0, clock, budget))
    topics = rig.led_partitions.topics()
    failing, requested, *waiting = topics
    for tick in range(600):
        loop._backoff.failed(failing.topic_id)
        if tick % 5 == 0:
            for topic in topics:
                for partition in range(4):
                    rig.append(["a"], topic=topic.name, partition=partition)
        rig.led_partitions.backlog.request(requested)
        loop.tick()
        clock.advance(0.1)
    versions = {topic.name: topic.table.snapshot.version for topic in topics}
    rounds = [versions[topic.name] for topic in waiting]
    assert max(rounds) - min(rounds) <= 1
    assert sum(rounds) * 5 <= 60 * 9 + 5 * len(waiting), "the versions that create tables count too"
    assert sum(rounds) * 5 >= 60 * 9 * 0.8
    assert versions[requested.name] > 2 * max(rounds)
    assert versions[failing.name] == min(versions.values())


class Puts(NoFaults):
    """Counts puts of files and commits; every `lost`-th answer to the put of a file is lost."""

    def __init__(self, lost: int = 0) -> None:
        self.count = 0
        self._files = 0
        self._lost = lost

    def after(self, operation: Operation, path: str, /) -> None:
        if operation != "put_new":
            return
        self.count += 1
        if path.endswith(".parquet") and self._lost:
            self._files += 1
            if not self._files % self._lost:
                raise PutUnresolved(path, "no answer")


def puts_under_load(rig: Rig, store: MemoryStore, clock: ManualClock, puts: Puts) -> int:
    """Returns the puts of a minute in which all partitions always wait, at 2 puts per second."""
    rig.publish_to(store.view(puts))
    loop = publishing(rig, pace=PublishPace(1.0, clock, PutBudget(2.0, longest_wait_seconds=0.25)))
    for tick in range(600):
        if tick % 10 == 0:
            for topic in rig.led_partitions.topics():
                for partition in range(topic.count):
                    rig.append(["a"], topic=topic.name, partition=partition)
        loop.tick()
        clock.advance(0.1)
    return puts.count


@pytest.mark.rig(topics={"wide": 5})
def test_all_turns_of_a_wide_topic_count(
    rig: Rig, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a topic whose partitions take several turns stays within the budget."""
    monkeypatch.setattr(limits, "PUBLISH_PARTITIONS_TOGETHER", 2)
    assert puts_under_load(rig, store, clock, Puts()) <= 60 * 1.8 + 8


@pytest.mark.rig(topics={"t": 2})
def test_files_that_are_written_again_count(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Promise: puts whose answers were lost stay within the budget, though they are repeated."""
    assert puts_under_load(rig, store, clock, Puts(lost=2)) <= 60 * 1.8 + 5
