"""Threads and members that meet in the middle of a move, a takeover or a creation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sparklog import errors, limits
from sparklog.broker import live_members
from sparklog.broker.failover import reconciler
from sparklog.broker.flight.listener import _proven
from sparklog.broker.groups.coordinator import Commit, Coordinator
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.log import recovery, takeover
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AddPartitions, PublishNow, TailPosition
from sparklog.settings import GroupSettings
from sparklog.storage.metadata import leadership
from sparklog.storage.metadata.liveness import Phase
from sparklog.storage.metadata.processes import Fate
from sparklog.storage.objects import MemoryStore, Store
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.objects import ObjectFollower
from tests.support.brokers import Rig, RigOptions, beat, follow, led_by, rows_of_root

MEMBER = RigOptions(is_member=True)
OFFSETS = "__consumer_offsets"
PAST_MOVES_SECONDS = 60.0


@pytest.fixture(name="members")
def _members(store: MemoryStore, clock: ManualClock) -> list[Rig]:
    """Four members that share the eight partitions of t."""
    members = [Rig(store, clock, broker=number, options=MEMBER) for number in (1, 2, 3, 4)]
    follow(members)
    members[0].create("t", 8)
    follow(members)
    return members


def during_takeover(monkeypatch: pytest.MonkeyPatch, event: Callable[[], object]) -> None:
    """Has something happen once, after a member has read what it inherits."""
    read = takeover.read_inherited
    pending = [event]

    def read_inherited(*values: Any, **named: Any) -> takeover.Taken:
        found = read(*values, **named)
        if pending:
            pending.pop()()
        return found

    monkeypatch.setattr(takeover, "read_inherited", read_inherited)


def test_a_partition_of_a_busy_leader_is_taken(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a leader that writes on is read as far as is needed, not to its end."""
    giver, taker, *_ = members
    number = led_by(giver)
    giver.append(["x"], partition=number)
    giver.handovers.move({("t", number): 2})
    kept, poll, polls = led_by(giver), ObjectFollower.poll, 0

    def poll_while_it_writes(follower: ObjectFollower, **named: Any) -> Any:
        nonlocal polls
        polls += 1
        assert polls < 10, "it follows the giver forever"
        giver.append(["y"], partition=kept)
        return poll(follower, **named)

    monkeypatch.setattr(ObjectFollower, "poll", poll_while_it_writes)
    taker.reconciler.tick()
    assert [row[1] for row in taker.read(partition=number)] == [b"x"]


def prepare(giver: Rig, *takers: Rig) -> None:
    """Has the takers read what they need once the giver stops, which says that it is about to."""
    for each, phase in ((giver, Phase.DRAINING), *((taker, Phase.SERVING) for taker in takers)):
        beat(each, phase=phase)
    for taker in takers:
        taker.reconciler.prepare()


def test_a_prepared_takeover_misses_nothing(members: list[Rig]) -> None:
    """The giver writes on, publishes, and gets a partition, after the taker has read its log."""
    giver, taker, third, _ = members
    number, kept = led_by(giver), led_by(third)
    giver.append(["a"], partition=number, producer_sequence=(9, 0, 0))
    third.append(["a"], partition=kept, producer_sequence=(9, 0, 0))
    prepare(giver, taker)

    giver.append(["b"], partition=number, producer_sequence=(9, 0, 1))
    giver.publish()
    giver.append(["c"], partition=number, producer_sequence=(9, 0, 2))
    third.publish()
    third.handovers.move({("t", kept): 1})
    giver.reconciler.tick()
    for each in (giver, third):  # the state of the partition is nowhere but in the giver's log
        each.publish()
        each.wal_cleaner.tick()
        each.trim()
    third.reconciler.tick()
    third.handovers.tick()
    assert not third.led_partitions.resignations.retained()

    giver.handovers.move({("t", number): 2, ("t", kept): 2})
    taker.reconciler.tick()
    assert [row[1] for row in taker.read(partition=number)] == [b"a", b"b", b"c"]
    assert taker.append(["c"], partition=number, producer_sequence=(9, 0, 2)).duplicate
    assert [row[1] for row in taker.read(partition=kept)] == [b"a"]
    assert taker.append(["a"], partition=kept, producer_sequence=(9, 0, 0)).duplicate


def test_no_more_is_prepared_than_comes(
    members: list[Rig], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of topics that go to others are not read, and no table is read twice."""
    giver, *takers = members
    names = [f"alone-{each}" for each in range(12)]  # of one partition each
    for each in names:
        giver.create(each, 1)
    follow(members)
    led = {each for each in names if giver.led_partitions.topic(each).partitions}
    assert len(led) > 1
    read: list[str] = []
    refresh_all = recovery.refresh_all

    def note(store: Store, tables: Sequence[TopicTable]) -> Any:
        read.extend(each.topic for each in tables)
        return refresh_all(store, tables)

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "refresh_all", note)
        prepare(giver, *takers)
        assert sorted(each for each in read if each != "t") == sorted(led)
        read.clear()
        clock.advance(limits.WATCH_SECONDS)
        prepare(giver, *takers)
        assert not read

    giver.handovers.drain(clock.monotonic() + 10.0)
    follow(takers)
    served = {
        each for taker in takers for each in names if taker.led_partitions.topic(each).partitions
    }
    assert led <= served


def test_tables_are_read_ahead_for_a_while(
    members: list[Rig], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further tables are read ahead once the time is over."""
    giver, taker, *_ = members
    for each in range(120):
        giver.create(f"alone-{each}", 1)
    follow(members)
    read: list[int] = []

    def slowly(_store: Store, tables: Sequence[TopicTable]) -> Any:
        read.append(len(tables))
        clock.advance(limits.PREPARE_SECONDS)

    monkeypatch.setattr(recovery, "refresh_all", slowly)
    monkeypatch.setattr(reconciler, "_TABLES_AT_ONCE", 2)
    prepare(giver, taker)
    assert read == [2]


@pytest.mark.parametrize(
    "failure",
    [errors.StorageUnavailable(operation="get", path="wal", reason="503"), OSError("no memory")],
    ids=["of the store", "of another kind"],
)
def test_a_takeover_that_cannot_be_prepared(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """It is made as if nothing had been tried before."""
    giver, taker, *_ = members
    number = led_by(giver)
    giver.append(["a"], partition=number)

    def refuse(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFollower, "poll", refuse)
        prepare(giver, taker)
    giver.handovers.move({("t", number): 2})
    taker.reconciler.tick()
    assert [row[1] for row in taker.read(partition=number)] == [b"a"]


def test_a_takeover_overwrites_no_newer_leaders(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may follow a newer version while the partitions of an older one come."""
    first, second, third, _ = members
    other = led_by(second)
    first.handovers.move({("t", led_by(first)): 3})

    def move_another() -> None:
        second.handovers.move({("t", other): 4})
        with pytest.raises(errors.MetadataChanged):
            third.broker.metadata.prove(third.broker.metadata.looks)

    during_takeover(monkeypatch, move_another)
    third.reconciler.tick()
    assert third.broker.partitions.leader_of("t", other)[0] == 4


def test_partitions_are_added_by_a_version_that_is_not_the_newest(members: list[Rig]) -> None:
    """Another thread may have recorded the leaders of a newer version, but only of known ones."""
    first, second, third, _ = members
    first.broker.topics.add_partitions(AddPartitions(topic="t", partitions=12))
    added = first.meta.reload()
    third.handovers.move({("t", led_by(third)): 4})
    newest = first.meta.reload()
    assert newest.topics["t"].leaders != added.topics["t"].leaders
    second.reconciler.lead(newest)
    second.reconciler.apply(added)
    topic = second.led_partitions.topic("t")
    assert topic.count == 12
    number = max(topic.partitions)
    assert number >= 8
    second.append(["x"], partition=number)
    for version in (added, newest):
        second.reconciler.lead(version)
        second.reconciler.apply(version)
    assert topic.leaders == newest.topics["t"].leaders
    assert [row[1] for row in second.read(partition=number)] == [b"x"]


def test_a_topic_that_is_created_again_during_a_takeover(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition of the old topic is not served under the name of the new one."""
    first, second, third, _ = members
    number = led_by(first)
    first.append(["old"], partition=number)
    first.handovers.move({("t", number): 3})

    def create_again() -> None:
        second.reconciler.tick()
        while second.led_partitions.topic("t").leaders[number] == 3:
            second.broker.topics.delete("t")
            second.create("t", 8)
        with pytest.raises(errors.MetadataChanged):
            third.broker.metadata.prove(third.broker.metadata.looks)

    during_takeover(monkeypatch, create_again)
    third.reconciler.tick()
    follow(members)
    topic = third.led_partitions.topic("t")
    assert {n for n, leader in enumerate(topic.leaders) if leader == 3} == topic.partitions.keys()
    leader = next(each for each in members if number in each.led_partitions.topic("t").partitions)
    assert leader.append(["new"], partition=number).base_offset == 0
    rows = rows_of_root(third.store, third.clock, partition=number)
    assert [row[1] for row in rows] == [b"new"]


def test_a_partition_is_not_released_while_it_moves(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's thread may look at resigned partitions at any moment of a move."""
    first, second, *_ = members
    number = led_by(first)
    for sequence in range(3):
        first.append([f"{sequence}"], partition=number, producer_sequence=(9, 0, sequence))
    resignations = first.led_partitions.resignations
    complete = resignations.complete

    def complete_and_release(*values: Any) -> bool:
        is_complete = complete(*values)
        first.handovers._release()
        return is_complete

    monkeypatch.setattr(resignations, "complete", complete_and_release)
    first.handovers.move({("t", number): 2})
    second.reconciler.tick()
    assert [row[1] for row in second.read(partition=number)] == [b"0", b"1", b"2"]
    assert second.append(["2"], partition=number, producer_sequence=(9, 0, 2)).duplicate


def test_a_move_that_fails_keeps_the_order_of_producers(
    members: list[Rig], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that were refused before it failed come again, and later ones wait for them."""
    first, *_ = members
    number = led_by(first)
    clock.advance(PAST_MOVES_SECONDS)
    first.append(["a"], partition=number, producer_sequence=(9, 0, 0))

    def refuse_and_fail() -> None:
        for ids in ((9, 0, 1), (10, 0, 0)):
            with pytest.raises(errors.NotLeader):
                first.append(["b"], partition=number, producer_sequence=ids)
        raise errors.StorageUnavailable(operation="append", path="wal", reason="503")

    monkeypatch.setattr(first.handovers, "_finish_appends", refuse_and_fail)
    with pytest.raises(errors.StorageUnavailable):
        first.handovers.move({("t", number): 2})
    for ids in ((9, 0, 2), (10, 0, 1)):
        with pytest.raises(errors.EarlierBatchMissing):
            first.append(["c"], partition=number, producer_sequence=ids)
    for ids in ((9, 0, 1), (9, 0, 2), (10, 0, 0), (10, 0, 1)):
        first.append(["d"], partition=number, producer_sequence=ids)


def test_a_tail_of_a_partition_that_was_away_for_a_moment(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, so that its client asks again: it would not hear of new records."""
    first, *_ = members
    away, busy = sorted(first.led_partitions.topic("t").partitions)
    for value in ("a", "b"):
        first.append([value], partition=busy)
    positions = [TailPosition(topic="t", partition=n, offset=0) for n in (away, busy)]
    tail = first.broker.tail(positions, batch_rows=1)
    assert tail.next() is not None  # it is in the middle of the other partition

    def refuse(*_: object) -> None:
        raise errors.LeadersChanged(reason="broker 2 cannot take partitions")

    with monkeypatch.context() as patched:
        patched.setattr(leadership, "resign", refuse)
        with pytest.raises(errors.LeadersChanged):
            first.handovers.move({("t", away): 2})
    first.handovers.tick()
    assert away in first.led_partitions.topic("t").partitions
    with pytest.raises(errors.MetadataChanged):
        list(iter(tail.next, None))
    tail.close()


def test_producers_that_are_ahead_of_the_creator(
    members: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others know what a member creates a moment before it serves that itself.

    Batches keep their order, and no refusal is final.
    """
    first, second, *_ = members
    add = first.led_partitions.add_partitions
    judged: list[tuple[errors.SparklogError, int, int]] = []

    def add_late(topic: Any, *values: Any, **named: Any) -> None:
        second.reconciler.tick()
        leaders = second.led_partitions.topic("u").leaders
        number = max(n for n, leader in enumerate(leaders) if leader == 1)
        looks = first.broker.metadata.looks
        with pytest.raises(errors.Invalid) as refused:
            first.append(["a"], topic="u", partition=number, producer_sequence=(9, 0, 0))
        judged.append((refused.value, number, looks))
        add(topic, *values, **named)

    monkeypatch.setattr(first.led_partitions, "add_partitions", add_late)
    first.create("u", 4)
    first.broker.topics.add_partitions(AddPartitions(topic="u", partitions=8))
    kinds = [type(error) for error, _, _ in judged]
    assert kinds == [errors.UnknownTopic, errors.UnknownPartition]
    for error, number, looks in judged:
        assert isinstance(_proven(first.broker, error, looks), errors.MetadataChanged)
        with pytest.raises(errors.EarlierBatchMissing):
            first.append(["b"], topic="u", partition=number, producer_sequence=(9, 0, 1))
        for sequence in range(2):
            ids = 9, 0, sequence
            first.append(["c"], topic="u", partition=number, producer_sequence=ids)


def test_records_without_a_leader_are_not_said_to_be_published(
    members: list[Rig], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that serves nothing of a partition does not know if all of it is in the table."""
    first, second, *_ = members
    number = led_by(first)
    first.append(["a"], partition=number)
    request = PublishNow(topics=["t"], timeout_seconds=0.0)
    first.handovers.move({("t", number): 2})
    second.broker.metadata.follow()
    with pytest.raises(errors.MetadataChanged):  # it comes
        second.broker.publishing.publish(request)
    second.reconciler.tick()
    second.publish()
    second.broker.publishing.publish(request)
    monkeypatch.setattr(live_members, "fate_of", lambda _: Fate.GONE)
    clock.advance(1.0)
    with pytest.raises(errors.MetadataChanged):  # others are replaced
        second.broker.publishing.publish(request)


def test_a_coordinator_that_does_not_know_its_topic_yet(
    members: list[Rig], clock: ManualClock
) -> None:
    """Its members wait until it has seen what another broker has created, and nothing fails."""
    giver, taker, *_ = members
    first, second = (
        Coordinator(each.broker, settings=GroupSettings(), clock=clock) for each in (giver, taker)
    )
    first.open()
    second.tick(0.0)
    offsets = {("t", 0): Commit(offset=1)}
    loading = {("t", 0): GroupError.COORDINATOR_LOAD_IN_PROGRESS}
    assert second.commit("g", offsets).result(0) == loading
    follow(members)
    second.tick(0.0)
    leaders = (
        giver.broker.partitions.leader_of(OFFSETS, n)[0] for n in range(limits.OFFSETS_PARTITIONS)
    )
    led = list(leaders).index(2)
    name = next(each for each in map(str, range(1_000)) if first._topic.partition_of(each) == led)
    for _ in range(limits.OFFSETS_PARTITIONS):
        second.tick(0.0)
    sent = second.commit(name, offsets)
    second.tick(0.0)
    assert sent.result(0) == {("t", 0): None}


def test_groups_of_other_partitions_continue(
    members: list[Rig], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition of `__consumer_offsets` that cannot be read holds up only its own groups."""
    giver, taker, *_ = members
    settings = GroupSettings()
    first, second = (
        Coordinator(each.broker, settings=settings, clock=clock) for each in (giver, taker)
    )
    first.open()
    follow(members)

    def tick() -> None:
        for _ in range(2 * len(giver.broker.partitions.led(OFFSETS)) + 2):
            first.tick(0.0)
            second.tick(0.0)

    tick()
    moved, kept = (min(each.broker.partitions.led(OFFSETS)) for each in (giver, taker))
    names = {first._topic.partition_of(name): name for name in map(str, range(1_000))}
    sent = first.commit(names[moved], {("t", 0): Commit(offset=1)})
    tick()
    assert sent.result(0) == {("t", 0): None}
    giver.handovers.move({(OFFSETS, moved): 2})
    taker.reconciler.tick()
    read = taker.broker.read

    def read_others(topic: str, number: int, *values: Any, **named: Any) -> Any:
        if number == moved:
            raise errors.MissingObject(path="x", reason="it is gone")
        return read(topic, number, *values, **named)

    with monkeypatch.context() as patched:
        patched.setattr(taker.broker, "read", read_others)
        sent = second.commit(names[kept], {("t", 0): Commit(offset=2)})
        tick()
        assert sent.result(0) == {("t", 0): None}
        assert second.commit(names[moved], {("t", 0): Commit(offset=2)}).result(0) != {
            ("t", 0): None
        }
    clock.advance(PAST_MOVES_SECONDS)  # it is read again
    tick()
    sent = second.commit(names[moved], {("t", 0): Commit(offset=3)})
    tick()
    assert sent.result(0) == {("t", 0): None}
