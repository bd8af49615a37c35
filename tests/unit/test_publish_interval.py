"""Topics with an interval of their own: `publish.interval.ms`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog import errors, limits
from sparklog.broker.log import publish_queue, wal_cleaner
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.publish_loop import PublishLoop, PublishPace
from sparklog.broker.log.put_budget import PutBudget
from sparklog.clock import ManualClock
from sparklog.formats.config_rules import Edit
from sparklog.formats.flight_messages import AlterTopic, PublishNow
from sparklog.formats.topic_config import PUBLISH_INTERVAL
from sparklog.storage import wal
from sparklog.storage.objects import LocalStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.snapshot import WalKind
from sparklog.storage.wal import segments
from sparklog.storage.wal.objects import _HELD_BYTES
from tests.support.brokers import (
    Rig,
    RigOptions,
    due,
    led_by,
    paths,
    publishing,
    rows_of_table,
)

pytestmark = pytest.mark.rig(topics={})

HOUR = "3600000"
HOUR_SECONDS = 3_600.0


def thrifty(rig: Rig, clock: ManualClock, puts_per_second: float = 10.0) -> PublishLoop:
    """A publish loop with a budget and the interval that goes with it."""
    budget = PutBudget(puts_per_second, longest_wait_seconds=0.25)
    return publishing(rig, pace=PublishPace(10.0, clock, budget))


def run(loop: PublishLoop, clock: ManualClock, seconds: float, step_seconds: float = 0.5) -> None:
    """Lets the publisher look at its topics for some time."""
    for _ in range(round(seconds / step_seconds)):
        clock.advance(step_seconds)
        loop.tick()


def versions(rig: Rig, topic: str) -> int:
    """The number of commits of records to a topic's table."""
    return rig.led_partitions.topic(topic).table.snapshot.version


def alter(rig: Rig, topic: str, interval_ms: str | None) -> None:
    """Changes the interval as `sparklog topics alter` does."""
    request = AlterTopic(topic=topic, config={PUBLISH_INTERVAL: interval_ms})
    rig.broker.topics.alter(request)


# ------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "thrifty"])
def test_a_topic_waits_for_its_hour(
    rig: Rig, store: MemoryStore, clock: ManualClock, is_local: bool
) -> None:
    """Promise: it is published once an hour, with all its records; consumers see them at once."""
    rig.create("t", 1, publish_interval_ms=HOUR)
    loop = publishing(rig) if is_local else thrifty(rig, clock)
    rig.append(["a"])
    run(loop, clock, HOUR_SECONDS - 1.0, 1.0)
    rig.append(["b"])
    loop.tick()
    assert rows_of_table(store, clock) == []
    assert rig.read() == [(0, b"a"), (1, b"b")]
    run(loop, clock, 2.0, 0.5)
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]
    rig.append(["c"])
    run(loop, clock, HOUR_SECONDS - 1.0, 1.0)
    assert len(rows_of_table(store, clock)) == 2
    run(loop, clock, 2.0, 0.5)
    assert len(rows_of_table(store, clock)) == 3


@pytest.mark.parametrize(
    ("interval_ms", "least", "most"), [("1000", 38, 41), ("0", 78, 81)], ids=["1 s", "0"]
)
def test_a_topic_has_its_second_although_puts_are_few(
    rig: Rig, clock: ManualClock, interval_ms: str, least: int, most: int
) -> None:
    """Promise: in addition to the budget, of which the others keep what they had."""
    names = [f"u{number}" for number in range(5)]
    for name in names:
        rig.create(name, 1)
    budgeted = []
    for has_prompt in (False, True):
        if has_prompt:
            rig.create("t", 1, publish_interval_ms=interval_ms)
            names.append("t")
        loop = thrifty(rig, clock, puts_per_second=0.8)
        before: dict[str, int] = {}
        for step in range(120):
            if step == 40:
                before = {name: versions(rig, name) for name in names}
            for name in names:
                rig.append(["a"], topic=name)
            run(loop, clock, 0.5)
        done = {name: versions(rig, name) - before[name] for name in names}
        budgeted.append(sum(done.values()) - done.get("t", 0))
    assert least <= done["t"] <= most
    assert budgeted[1] == pytest.approx(budgeted[0], abs=2)
    assert budgeted[1] * 2 == pytest.approx(40 * 0.8 * 0.9, abs=4), "a commit takes two puts"


def test_many_topics_without_an_interval_leave_time_for_acks(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing those with an interval of 0 takes no greater share of the time than usual."""
    for number in range(8):
        rig.create(f"t{number}", 1, publish_interval_ms="0")
    pace = PublishPace(1.0, clock)
    loop = publishing(rig, pace=pace)
    # A file or commit takes 50 ms: 16 of them take 0.8 s, a quarter of 3.2 s.
    monkeypatch.setattr(pace, "_seconds_per_object", 0.05)
    monkeypatch.setattr(pace, "note", lambda *_: None)
    for _ in range(64):
        for number in range(8):
            rig.append(["a"], topic=f"t{number}")
        run(loop, clock, 0.5)
    assert all(8 <= versions(rig, f"t{number}") <= 11 for number in range(8))


def test_a_changed_interval_counts_for_records_that_wait(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """In either direction, through sparklog's and Kafka's requests, and when it is removed."""
    rig.create("t", 1, publish_interval_ms=HOUR)
    loop = publishing(rig)
    rig.append(["a"])
    run(loop, clock, 60.0)
    alter(rig, "t", "500")
    loop.tick()
    assert len(rows_of_table(store, clock)) == 1
    rig.append(["b"])
    edits = [(Edit.SET, PUBLISH_INTERVAL, HOUR)]
    rig.broker.topics.config_changes.edit("t", edits, only_checks=False)
    run(loop, clock, 60.0)
    assert len(rows_of_table(store, clock)) == 1
    alter(rig, "t", None)
    run(loop, clock, 1.0)
    assert len(rows_of_table(store, clock)) == 2


# ------------------------------------------------------------------------------ who does not wait


def test_nobody_who_needs_the_table_waits_for_the_interval(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Promise: `flush_to_table`, a stop, and an on-demand broker that ends publish at once."""
    rig.create("t", 1, publish_interval_ms=HOUR)
    loop = publishing(rig)
    rig.broker.publishing.publish_now = loop.tick
    rig.append(["a"])
    rig.broker.publishing.publish(PublishNow(topics=["t"], timeout_seconds=1.0))
    assert len(rows_of_table(store, clock)) == 1
    rig.append(["b"])
    assert rig.led_partitions.backlog.request_all()
    loop.tick()
    assert len(rows_of_table(store, clock)) == 2
    rig.append(["c"])
    loop.publish_everything(clock.monotonic() + 10.0)
    assert len(rows_of_table(store, clock)) == 3


def test_a_large_backlog_does_not_wait(rig: Rig, clock: ManualClock) -> None:
    """Promise: a topic with `publish_bytes` is published before its time, and it alone."""
    for name in ("small", "large"):
        rig.create(name, 1, publish_interval_ms=HOUR)
        rig.append(["x" * 1_000], topic=name)
    backlog = rig.led_partitions.backlog
    assert due(backlog, 1.0, publish_bytes=20_000) == []
    while rig.led_partitions.topic("large").unpublished_bytes < 20_000:
        rig.append(["x" * 1_000], topic="large")
    assert due(backlog, 1.0, publish_bytes=20_000) == [rig.led_partitions.topic("large")]


def test_writes_are_not_refused_because_topics_wait(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: well before `unpublished_bytes` is reached, the largest of them are published."""
    bound = 100_000
    rig = Rig(store, clock, options=RigOptions(writer=WriterLimits(unpublished_bytes=bound)))
    names = [f"t{number}" for number in range(8)]
    for name in names:
        rig.create(name, 1, publish_interval_ms=HOUR)
    rig.create("quiet", 1, publish_interval_ms=HOUR)
    loop = publishing(rig, unpublished_bytes=bound)
    rig.append(["a"], topic="quiet")
    most = 0
    for number in range(600):
        rig.append(["x" * 500], topic=names[number % 8])
        most = max(most, rig.led_partitions.backlog.unpublished_bytes)
        run(loop, clock, 0.1, 0.1)
    assert bound / 8 < most < bound / 2
    assert versions(rig, "quiet") == 0, "it has less than the others"
    rows = sum(len(rows_of_table(store, clock, name)) for name in names)
    assert rows * 1_140 > 600 * 1_140 - bound / 2


def test_a_table_that_fails_is_tried_again_before_the_interval(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Its records have waited for an hour already."""

    class Failing(NoFaults):
        error: Exception | None = errors.RootNotWritable(root="s3://b", reason="403")

        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and self.error is not None:
                raise self.error

    faults = Failing()
    rig.create("t", 1, publish_interval_ms=HOUR)
    loop = publishing(rig)
    rig.append(["a"])
    rig.publish_to(store.view(faults))
    run(loop, clock, HOUR_SECONDS + 1.0, 1.0)
    topic = rig.led_partitions.topic("t")
    assert topic.held_back is not None
    faults.error = None
    run(loop, clock, 15.0)
    assert topic.held_back is None
    assert len(rows_of_table(store, clock)) == 1


def test_what_a_commit_leaves_is_not_left_for_another_hour(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A commit is bounded; the rest of the hour's records follow at the usual interval."""
    rig = Rig(store, clock, options=RigOptions(commit_bytes=3_000))
    rig.create("t", 1, publish_interval_ms=HOUR)
    for _ in range(5):
        rig.append(["x" * 1_000])
    loop = publishing(rig)
    run(loop, clock, HOUR_SECONDS + 0.5, 1.0)
    done = len(rows_of_table(store, clock))
    assert 0 < done < 5
    rig.append(["later"])
    run(loop, clock, 5.0)
    assert len(rows_of_table(store, clock)) >= 5


# ------------------------------------------------------------------------------ other brokers


@pytest.mark.parametrize("broker", [1, 2], ids=["restart", "another broker"])
def test_records_that_wait_survive_a_restart(
    rig: Rig, store: MemoryStore, clock: ManualClock, broker: int
) -> None:
    """Promise: all are read at once, and published in the successor's first turns."""
    rig.create("t", 2, publish_interval_ms=HOUR)
    loop = publishing(rig)
    for number in range(10):
        rig.append([str(number)], partition=number % 2)
        run(loop, clock, 60.0, 10.0)
    second = rig.successor(broker=broker)
    expected = [[(at, str(2 * at + number).encode()) for at in range(5)] for number in range(2)]
    assert [second.read(partition=number) for number in range(2)] == expected
    loop = publishing(second)
    loop.tick()
    assert [rows_of_table(store, clock, "t", number) for number in range(2)] == expected
    second.append(["x"])
    run(loop, clock, HOUR_SECONDS - 1.0, 10.0)
    assert len(rows_of_table(store, clock)) == 5
    run(loop, clock, 2.0)
    assert len(rows_of_table(store, clock)) == 6


def test_records_that_wait_survive_a_move(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: a member that receives a partition publishes its records at once."""
    members = [
        Rig(store, clock, broker=broker, options=RigOptions(is_member=True)) for broker in (1, 2)
    ]
    first, second = members
    first.reconciler.tick()
    first.create("t", 2, publish_interval_ms=HOUR)
    second.reconciler.tick()
    number = led_by(first)
    loops = [publishing(each) for each in members]
    first.append(["a"], partition=number)
    second.append(["b"], partition=led_by(second))
    run(loops[0], clock, 60.0, 10.0)
    assert first.handovers.move({("t", number): 2}) == 1
    second.reconciler.tick()
    first.reconciler.tick()
    loops[1].tick()
    assert [rows_of_table(store, clock, "t", each) for each in range(2)] == [
        [(0, b"a" if number == 0 else b"b")],
        [(0, b"b" if number == 0 else b"a")],
    ]


def test_a_takeover_stays_within_the_budget(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Promise: topics of a predecessor take turns; each has had its turn when all could have."""
    names = [f"t{number}" for number in range(10)]
    for name in names:
        rig.create(name, 4)
        for partition in range(4):
            rig.append(["a"], topic=name, partition=partition)
    second = rig.successor()
    loop = thrifty(second, clock)
    loop.tick()
    assert sum(versions(second, name) for name in names) <= 2
    run(loop, clock, 5.5)
    assert all(versions(second, name) == 1 for name in names)


# ------------------------------------------------------------------------------ the log


@pytest.mark.parametrize("kind", WalKind)
def test_a_topic_that_waits_retains_a_bounded_part_of_the_log(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: WalKind
) -> None:
    """Promise: one record that waits for an hour does not keep the log of other topics for it.

    It is published before that. Nothing is carried, which would cost more than a commit.
    """
    held_bytes = _HELD_BYTES if kind is WalKind.OBJECTS else 2 * BLOCK_BYTES
    monkeypatch.setattr(limits, "PUBLISH_HELD_LOG_BYTES", 20 * held_bytes)
    monkeypatch.setattr(wal_cleaner, "_CARRY_AFTER_BYTES", 40 * held_bytes)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4 * held_bytes)
    store = MemoryStore(clock) if kind is WalKind.OBJECTS else LocalStore(tmp_path)
    bounds = wal_cleaner.WalCleanerLimits(
        checkpoint_every_objects=1, checkpoint_every_seconds=1.0, carry_after_seconds=5.0
    )
    rig = Rig(store, clock, options=RigOptions(log=kind, wal_cleaner=bounds))
    rig.create("slow", 1, publish_interval_ms=HOUR)
    rig.create("busy", 1)
    loop = publishing(rig)
    spans, files = [], []
    for number in range(52):
        if number == 16:
            rig.append(["a"], topic="slow")
        rig.append(["b" * 5_000], topic="busy")
        run(loop, clock, 1.0)
        rig.wal_cleaner.tick()
        assert rig.wal_cleaner.carry() is None, "it was carried"
        oldest = rig.led_partitions.backlog.objects.oldest_unpublished(1, rig.leadership.epoch, 1)
        spans.append(rig.led_partitions.applied_sequence - min(oldest, default=10**9))
        files.append(len(paths(store, wal.folder(1, 1))))
    assert rows_of_table(store, clock, "slow") == [(0, b"a")]
    assert 18 <= max(spans) <= 22
    assert files[-1] <= max(files[:16]) + 1, "of the ten seconds for which all of the log is kept"


def test_a_log_that_a_failing_topic_holds_is_carried_although_others_sleep(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the bound of what a topic holds is there for one that cannot be published too."""
    monkeypatch.setattr(wal_cleaner, "_CARRY_AFTER_BYTES", 10 * _HELD_BYTES)
    bounds = wal_cleaner.WalCleanerLimits(checkpoint_every_objects=1, carry_after_seconds=5.0)
    rig = Rig(store, clock, options=RigOptions(wal_cleaner=bounds))
    rig.create("t", 1)
    rig.create("slow", 1, publish_interval_ms=HOUR)
    rig.append(["a"])
    rig.led_partitions.backlog.hold_back(rig.led_partitions.topic("t"), "403")
    carried = []
    for number in range(20):
        rig.append(["b"], topic="slow")
        clock.advance(2.0)
        rig.wal_cleaner.tick()
        pending = rig.wal_cleaner.carry()
        if pending is not None:
            rig.writer.wait(pending)
            carried.append(number)
    assert carried
    assert carried[0] >= 9
    assert rig.read() == [(0, b"a")]


def test_the_batches_that_a_restart_reads_are_bounded(
    rig: Rig, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: and with them the memory that they take until then."""
    monkeypatch.setattr(publish_queue, "ASLEEP_ENTRIES", 50)
    for number in range(4):
        rig.create(f"t{number}", 1, publish_interval_ms=HOUR)
    loop = publishing(rig)
    most = 0
    for number in range(300):
        rig.append(["a"], topic=f"t{number % 4}")
        run(loop, clock, 0.1, 0.1)
        topics = rig.led_partitions.topics()
        most = max(most, sum(each.waiting for each in topics))
    assert 50 <= most <= 50 + 2 * 10, "the usual interval of a second, and ten records in it"
    assert most > 40
