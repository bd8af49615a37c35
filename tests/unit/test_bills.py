"""The bill of an object store while nothing happens: what a broker, a cluster and topics cost."""

from __future__ import annotations

import pytest

from sparklog.broker.backoff import LookSchedule
from sparklog.broker.log.janitor import LOOK_MOST_EXPIRING, SWEEP_EVERY_SECONDS
from sparklog.clock import ManualClock
from sparklog.storage.objects import DelayedStore, MemoryStore
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.topic_table import TopicTable
from tests.support.bills import Bucket
from tests.support.brokers import Rig, RigOptions

QUIET_SECONDS = 20.0
HOUR_SECONDS = 3600.0
DAY_SECONDS = 24 * HOUR_SECONDS


# ------------------------------------------------------------------------------ whole brokers


def test_an_idle_broker() -> None:
    """Promise: a broker without topics costs less than 5 dollars per month, and puts heartbeats."""
    with Bucket() as bucket:
        bucket.start()
        bucket.pass_time(60)
        bill = bucket.bill(10)
    assert bill.dollars < 5, bill
    assert bill.of("put") == bill.of("put", "heartbeats/") == pytest.approx(15, abs=0.5), bill
    assert bill.of("list") < 2.5, bill


def test_a_member_beats_faster_than_a_lone_broker() -> None:
    """Promise: a broker that others watch beats three times before it would count as dead.

    It notices by itself that it is no longer alone, or that it is again.
    """
    with Bucket() as bucket:
        first = bucket.start()
        bucket.pass_time(60)
        bucket.start()
        bucket.pass_time(60)
        assert bucket.bill(5).of("put", "heartbeats/") == pytest.approx(40, abs=1)
        assert {0, 1} == first.parts.broker.members.up().keys()
        bucket.stop(1)
        bucket.pass_time(60)
        assert bucket.bill(5).of("put", "heartbeats/") == pytest.approx(15, abs=0.5)


def test_the_death_of_a_member_is_found_in_time() -> None:
    """Promise: the partitions of a member that dies on a bucket move within 15 seconds."""
    with Bucket() as bucket:
        agents = [bucket.start() for _ in range(3)]
        bucket.create(["t"], 6)
        bucket.pass_time(60)
        metadata = agents[1].parts.broker.metadata
        assert set(metadata.known.topics["t"].leaders) == {0, 1, 2}
        bucket.kill(0)
        bucket.pass_time(15)
        assert set(metadata.known.topics["t"].leaders) == {1, 2}


# ------------------------------------------------------------------------------ idle topics


@pytest.fixture
def store(clock: ManualClock) -> DelayedStore:
    """An object store that counts."""
    return DelayedStore(MemoryStore(clock), 0.0, clock)


@pytest.fixture
def rig(store: DelayedStore, clock: ManualClock) -> Rig:
    """A broker whose janitor looks at a table every 20 seconds, or less often."""
    return Rig(store, clock, options=RigOptions(quiet_seconds=QUIET_SECONDS))


def live(rig: Rig, seconds: float) -> dict[str, int]:
    """Lets the janitor tick for so long, and returns its requests by kind."""
    assert isinstance(rig.store, DelayedStore)
    assert isinstance(rig.clock, ManualClock)
    before = rig.store.requests.copy()
    step_seconds = QUIET_SECONDS if seconds < HOUR_SECONDS else SWEEP_EVERY_SECONDS
    end = rig.clock.monotonic() + seconds
    while rig.clock.monotonic() < end:
        rig.clock.advance(step_seconds)
        rig.janitor.tick()
    return dict(rig.store.requests - before)


def test_idle_topics_are_looked_at_less_and_less(rig: Rig) -> None:
    """Promise: a topic that does not change costs two probes per hour, and a listing per day."""
    for number in range(3):
        rig.create(f"t{number}")
        rig.append(["a"], topic=f"t{number}")
    rig.publish()
    live(rig, 3 * DAY_SECONDS)
    found = live(rig, DAY_SECONDS)
    assert found["stat"] == pytest.approx(3 * 25, abs=6)  # the second of two probes
    sweeps = DAY_SECONDS / SWEEP_EVERY_SECONDS  # of staged files, and each of deleted topics
    assert found["walk"] - sweeps == pytest.approx(3, abs=2)
    assert found["get"] < 3 * 25 + 4 * sweeps
    assert not {"put", "put_new"} & found.keys()


def test_topics_with_retention_are_looked_at_more_often(rig: Rig) -> None:
    """Promise: where others may move the log start, it is followed within five minutes."""
    rig.create("t", retention_ms=f"{365 * DAY_SECONDS * 1e3:.0f}")
    rig.append(["a", "b", "c"])
    rig.publish()
    live(rig, DAY_SECONDS)
    table = TopicTable(rig.store, "t", clock=rig.clock)
    table.refresh()
    start = {f"sparklog/{table.snapshot.topic_id}/0/start": 2}
    table.commit(lambda _: TableChange(txns=start, operation="RETENTION"))
    live(rig, LOOK_MOST_EXPIRING * QUIET_SECONDS + 60)
    assert rig.led_partitions.topic("t").partition(0).start == 2


def test_own_commits_end_the_pause(rig: Rig, clock: ManualClock) -> None:
    """Promise: after a commit of ours, those of others are found within two minutes."""
    rig.create("t")
    live(rig, DAY_SECONDS)
    rig.append(["a"])
    rig.publish()
    table = TopicTable(rig.store, "t", clock=clock)
    table.refresh()
    version = table.commit(lambda _: TableChange(operation="OPTIMIZE")).version
    live(rig, 120)
    assert rig.led_partitions.topic("t").table.snapshot.version == version


def test_a_read_finds_what_another_engine_has_deleted(rig: Rig, clock: ManualClock) -> None:
    """Promise: a minute after another engine's commit, readers of the broker see it.

    However rarely the janitor looks at the table, because a read of an old view looks first.
    """
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    rig.publish()
    rig = rig.successor()  # whose hot tail is empty
    live(rig, HOUR_SECONDS / 2)
    table = TopicTable(rig.store, "t", clock=clock)
    deleted = table.refresh().files[0][:1]
    table.commit(lambda _: TableChange(removes=tuple(deleted), operation="DELETE"))
    clock.advance(61)
    assert rig.read() == [(1, b"b")]


def test_a_busy_topic_is_not_looked_at(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a commit of ours shows that no other writer has committed, and saves the look."""
    looks = 0
    refresh = TopicTable.refresh

    def counted(table: TopicTable) -> TableSnapshot:
        nonlocal looks
        looks += 1
        return refresh(table)

    rig.create("t")
    monkeypatch.setattr(TopicTable, "refresh", counted)
    for _ in range(10):
        rig.append(["a"])
        rig.publish()
        live(rig, 2 * QUIET_SECONDS)
    assert looks <= 4  # of two sweeps, before they remove anything


def test_the_pause_between_looks() -> None:
    """It doubles while nothing is found, up to the bound, and a change ends it."""
    looks, now, pauses = LookSchedule(), 0.0, []
    for found in (True, False, False, False, False, True, False):
        waited = 0.0
        while not looks.is_due(now, first_seconds=1.0):
            now, waited = now + 1.0, waited + 1.0
        pauses.append(waited)
        looks.looked(now, found=found, first_seconds=1.0, most_seconds=5.0)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 1.0]
    assert not looks.is_due(now + 1.0, first_seconds=1.0)
    looks.changed()
    assert looks.is_due(now + 1.0, first_seconds=1.0)
