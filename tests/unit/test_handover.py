"""Partitions that move from one member to another, and what both keep of them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec
import pytest
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker import live_members, topics
from sparklog.broker.backoff import RETRY_MAX_SECONDS
from sparklog.broker.failover.controller import Controller
from sparklog.broker.failover.handover import BALANCE_SECONDS
from sparklog.broker.failover.reconciler import STUCK_SECONDS, UNFIT_SECONDS
from sparklog.broker.log.flush import PRODUCER_MOVE_SECONDS
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.janitor import BUSY_AFTER_TAKEOVER_SECONDS, SWEEP_EVERY_SECONDS
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.topic import Topic
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AddPartitions, AppendStaged
from sparklog.storage.metadata import leadership, liveness
from sparklog.storage.metadata.leadership import inherited_by
from sparklog.storage.metadata.liveness import Leader, Phase, Readiness, readiness
from sparklog.storage.metadata.model import ClusterMetadata, Epoch
from sparklog.storage.metadata.observer import Observer
from sparklog.storage.metadata.placement import UNEVEN_LEADERS
from sparklog.storage.metadata.processes import Fate
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.staging import manifest
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.objects import newest_checkpoint
from tests.support.brokers import (
    GRACE_SECONDS,
    Rig,
    RigOptions,
    all_serve,
    beat,
    led_by,
    payload,
    rows_of_root,
    rows_of_table,
)

MEMBER = RigOptions(is_member=True)
SECONDS = 30.0
"""Far more than anything here takes."""
Members = tuple[Rig, Rig]


@pytest.fixture(name="members")
def _members(store: MemoryStore, clock: ManualClock) -> Members:
    """Two members. Each of the four partitions of t has a record in its table and one in a log."""
    first = Rig(store, clock, broker=1, options=MEMBER)
    second = Rig(store, clock, broker=2, options=MEMBER)
    first.reconciler.tick()
    first.create("t", 4)
    second.reconciler.tick()
    for sequence, value in enumerate("ab"):
        for number in range(4):
            ids = (9, 0, sequence)
            rig = first if leader(first, number) == 1 else second
            rig.append([value], partition=number, producer_sequence=ids)
        if not sequence:
            first.publish()
            second.publish()
    return first, second


def leader(rig: Rig, number: int) -> int:
    """The leader of a partition in the newest metadata."""
    return MetadataStore(rig.store, clock=rig.clock).reload().topics["t"].leaders[number]


def give(first: Rig, second: Rig) -> int:
    """Moves a partition, and returns its number."""
    number = led_by(first)
    assert first.handovers.move({("t", number): second.leadership.broker}) == 1
    second.reconciler.tick()
    first.reconciler.tick()
    return number


def test_topics_are_shared(members: Members) -> None:
    """Each member leads half of the partitions, and names the leader of the others."""
    first, second = members
    assert [len(rig.led_partitions.topic("t").partitions) for rig in members] == [2, 2]
    with pytest.raises(errors.NotLeader, match="broker 2"):
        first.append(["x"], partition=led_by(second))
    assert first.broker.members.up().keys() == second.broker.members.up().keys() == {1, 2}


def test_a_lone_member_refuses_a_gap_in_a_topic_that_it_has_just_created(
    store: MemoryStore, clock: ManualClock
) -> None:
    """No other broker could have refused the batch before, whichever thread adds the topic."""
    rig = Rig(store, clock, broker=1, options=MEMBER)
    rig.reconciler.tick()
    add, apply = rig.led_partitions.add_topic, rig.reconciler.apply

    def add_late(topic: Topic) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(rig.led_partitions, "add_topic", add)
            apply(rig.meta.reload())
        if rig.led_partitions.by_id(topic.topic_id) is None:
            add(topic)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(rig.led_partitions, "add_topic", add_late)
    rig.create("t", 1)
    monkeypatch.undo()
    rig.append(["a"], producer_sequence=(1, 0, 0))
    with pytest.raises(errors.OutOfOrderSequence):
        rig.append(["c"], producer_sequence=(1, 0, 5))


@pytest.mark.parametrize("deleter", ["dies", "fails"])
def test_a_deletion_that_another_member_leaves_is_finished_by_the_creator(
    members: Members, monkeypatch: pytest.MonkeyPatch, deleter: str
) -> None:
    """Its name is free for every member after the creator's next tick."""
    first, second = members
    by = second if deleter == "dies" else first

    def lose_table(_topic: Topic) -> NoReturn:
        raise errors.OutcomeUnknown(what="deletion", reason="no answer")

    with monkeypatch.context() as patched:
        patched.setattr(by.broker.topics, "_end", lose_table)
        with pytest.raises(errors.OutcomeUnknown):
            by.broker.topics.delete("t")
    first.reconciler.tick()
    second.reconciler.tick()
    with pytest.raises(errors.TopicExists):
        second.create("t")
    first.janitor.tick()
    second.create("t")
    first.reconciler.tick()
    first.janitor.tick()
    assert TopicTable(first.store, "t", clock=first.clock).refresh().creator == (
        2,
        second.leadership.epoch,
    )


def test_merging_waits_for_the_backlog_of_partitions_that_came(
    members: Members, clock: ManualClock
) -> None:
    """Clients send what they could not send meanwhile; files are merged when they have done so."""
    first, second = members
    first.janitor._settings = msgspec.structs.replace(first.janitor._settings, compact_files=3)
    number = led_by(first)
    for value in "cdef":
        first.append([value], partition=number)
        first.publish()
    give(second, first)
    first.janitor.tick()
    files = first.led_partitions.topic("t").table.refresh().files
    clock.advance(BUSY_AFTER_TAKEOVER_SECONDS)
    first.janitor.tick()
    merged = first.led_partitions.topic("t").table.refresh().files
    assert sum(map(len, merged)) < sum(map(len, files))


def test_acks_do_not_wait_for_the_tables_of_a_takeover(members: Members) -> None:
    """A table whose lock is held over a slow put delays its own partitions alone."""
    first, second = members
    first.create("u", 2)
    second.reconciler.tick()
    number = give(first, second)
    arrived, may_end = threading.Event(), threading.Event()
    table = first.led_partitions.topic("t").table

    def hold() -> None:
        with table._lock:
            arrived.set()
            assert may_end.wait(SECONDS)

    holding = threading.Thread(target=hold)
    holding.start()
    assert arrived.wait(SECONDS)
    assert second.handovers.move({("t", number): 1}) == 1
    taking = threading.Thread(target=first.reconciler.tick)
    taking.start()
    (own,) = first.led_partitions.topic("u").partitions
    for value in range(20):
        first.append([f"{value}"], topic="u", partition=own)
    assert taking.is_alive()
    may_end.set()
    taking.join(SECONDS)
    holding.join(SECONDS)
    assert number in first.led_partitions.topic("t").partitions


def test_a_member_that_has_just_died_gets_no_new_topic(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has ended on this machine, and the metadata still have it as up."""
    first, _ = members
    ended = first.meta.current.brokers[2].process
    monkeypatch.setattr(
        topics, "fate_of", lambda each: Fate.GONE if each is ended else Fate.UNKNOWN
    )
    first.create("u", 4)
    assert first.meta.reload().topics["u"].leaders == (1, 1, 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(topics, "fate_of", lambda _: Fate.GONE)
        first.create("v", 2)
    assert first.meta.reload().topics["v"].leaders == (1, 1)


def test_a_partition_moves_whole(members: Members) -> None:
    """The new leader has all records, wherever they are, the producers, and a new leader epoch."""
    first, second = members
    number = give(first, second)
    for request in (
        lambda: first.append(["x"], partition=number),
        lambda: first.read(partition=number),
    ):
        with pytest.raises(errors.NotLeader, match="broker 2"):
            request()
    assert second.read(partition=number) == [(0, b"a"), (1, b"b")]
    again = second.append(["b"], partition=number, producer_sequence=(9, 0, 1))
    assert (again.base_offset, again.duplicate) == (1, True)
    assert second.append(["c"], partition=number, producer_sequence=(9, 0, 2)).base_offset == 2
    assert second.broker.partitions.status("t", number).leader_epoch == 1
    assert second.broker.partitions.epoch_end("t", number, 0) == (0, 2)
    assert rows_of_root(second.store, second.clock, partition=number)[-1] == (2, b"c")


def test_the_old_leader_keeps_what_is_needed(members: Members, clock: ManualClock) -> None:
    """Its log and its checkpoints have the partition until the new leader has it all itself."""
    first, second = members
    number = led_by(first)
    assert first.handovers.move({("t", number): 2}) == 1
    for _ in range(3):  # the new leader is slow
        first.append(["x"], partition=led_by(first))
        first.publish()
        first.trim()
        first.handovers.tick()
    retained = first.led_partitions.resignations.retained
    assert retained() == [(first.led_partitions.topic("t").topic_id, number)]
    kept = led_by(first)
    assert [first.broker.partitions.has_resigned("t", each) for each in (number, kept)] == [
        True,
        False,
    ]
    second.reconciler.tick()
    assert second.read(partition=number) == [(0, b"a"), (1, b"b")]
    assert second.append(["b"], partition=number, producer_sequence=(9, 0, 1)).duplicate

    second.publish()
    second.wal_cleaner.tick()
    second.wal_cleaner.checkpoint()
    clock.advance(GRACE_SECONDS)
    second.wal_cleaner.tick()
    assert not inherited_by(second.meta.reload(), 2)
    first.reconciler.tick()
    first.handovers.tick()
    assert retained() == []
    assert not first.broker.partitions.has_resigned("t", number)
    first.append(["x"], partition=led_by(first))
    first.publish()
    first.wal_cleaner.checkpoint()
    found = newest_checkpoint(first.store, 1, first.leadership.epoch)
    assert found is not None
    topic = first.led_partitions.topic("t")
    assert found.bounds is not None
    assert found.bounds[topic.topic_id][number].leader_epoch == -1
    assert not first.led_partitions.backlog.objects.needed(1, first.leadership.epoch)


def test_a_partition_comes_back(members: Members) -> None:
    """Its state is that of the leader in between, not the one of the time when it was given."""
    first, second = members
    number = give(first, second)
    second.append(["c"], partition=number, producer_sequence=(9, 0, 2))
    assert second.handovers.move({("t", number): 1}) == 1
    first.reconciler.tick()
    assert first.append(["c"], partition=number, producer_sequence=(9, 0, 2)).duplicate
    assert first.append(["d"], partition=number, producer_sequence=(9, 0, 3)).base_offset == 3
    assert first.broker.partitions.status("t", number).leader_epoch == 2
    first.wal_cleaner.checkpoint()
    third = Rig(first.store, first.clock, broker=1, options=MEMBER)
    assert third.append(["d"], partition=number, producer_sequence=(9, 0, 3)).duplicate
    assert third.read(partition=number) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]


def test_the_new_leader_dies_at_once(members: Members) -> None:
    """The next one continues from the log of the leader before, which lives on."""
    first, second = members
    number = led_by(first)
    assert first.handovers.move({("t", number): 2}) == 1
    third = Rig(first.store, first.clock, broker=3, options=MEMBER)
    fail_over(first, second, third)
    first.reconciler.tick()
    third.reconciler.tick()
    rig = first if leader(first, number) == 1 else third
    assert rig.read(partition=number) == [(0, b"a"), (1, b"b")]
    assert rig.append(["b"], partition=number, producer_sequence=(9, 0, 1)).duplicate


def fail_over(controller: Rig, dead: Rig, *_others: Rig) -> None:
    """Moves the partitions of a member that is taken for dead."""
    metadata = controller.broker.metadata.reload()
    controller.controller._fail_over(metadata, dead.leadership.broker, dead.leadership.epoch)


def test_a_target_that_is_not_up(members: Members) -> None:
    """The partition is served again by its leader, in the same leader epoch."""
    first, _ = members
    number = led_by(first)
    with pytest.raises(errors.LeadersChanged, match="broker 7"):
        first.handovers.move({("t", number): 7})
    with pytest.raises(errors.NotLeader):
        first.append(["x"], partition=number)
    first.reconciler.tick()  # it is not taken for a partition of another broker
    assert number not in first.led_partitions.topic("t").partitions
    first.handovers.tick()
    assert first.append(["x"], partition=number).base_offset == 2
    assert first.append(["b"], partition=number, producer_sequence=(9, 0, 1)).duplicate
    first.publish()
    assert not first.led_partitions.backlog.unpublished_bytes
    assert first.broker.partitions.status("t", number).leader_epoch == 0


@pytest.mark.parametrize("has_effect", [True, False])
def test_an_unknown_outcome(
    members: Members, monkeypatch: pytest.MonkeyPatch, *, has_effect: bool
) -> None:
    """The partition waits until it is known which of the two leads it; then one serves it."""
    first, second = members
    number, change = led_by(first), first.broker.metadata.change

    def lose(decide: Callable[[ClusterMetadata], Any]) -> ClusterMetadata:
        if has_effect:
            change(decide)
        raise errors.OutcomeUnknown(what="a change", reason="no answer")

    with monkeypatch.context() as patch:
        patch.setattr(first.broker.metadata, "change", lose)
        with pytest.raises(errors.OutcomeUnknown):
            first.handovers.move({("t", number): 2})
    with pytest.raises(errors.MetadataChanged):  # one after another
        first.handovers.move({("t", number + 2): 2})
    first.handovers.tick()
    first.reconciler.tick()
    second.reconciler.tick()
    leading, other = (second, first) if has_effect else (first, second)
    assert leading.append(["x"], partition=number).base_offset == 2
    with pytest.raises(errors.NotLeader):
        other.append(["x"], partition=number)


def test_appends_that_come_too_late(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends that are queued when the move begins are refused, and the new leader takes them."""
    first, second = members
    number = led_by(first)
    queued = [first.submit(["c"], partition=number, producer_sequence=(9, 0, 2))]
    topic, finish = first.led_partitions.topic("t"), first.handovers._finish_appends
    prepared = first.writer.preparer.prepare(topic, number, payload(["d"]), None)

    def submit_late() -> None:
        finish()
        queued.append(first.writer.submit([prepared]))

    monkeypatch.setattr(first.handovers, "_finish_appends", submit_late)
    assert first.handovers.move({("t", number): 2}) == 1
    for each in queued:
        with pytest.raises(errors.NotLeader):
            first.broker.wait(each)
    second.reconciler.tick()
    assert second.append(["c"], partition=number, producer_sequence=(9, 0, 2)).base_offset == 2


def test_a_refused_batch_of_a_partition_that_moves(members: Members) -> None:
    """All appends of a flush are answered, also where one is of an unknown producer."""
    first, _ = members
    number = led_by(first)
    topic = first.led_partitions.topic("t")
    refused = first.submit(["x"], partition=number, producer_sequence=(77, 0, 0))
    written = first.submit(["y"], partition=max(topic.partitions))
    first.led_partitions.resignations.begin(topic, number)
    assert first.broker.wait(written)[0].base_offset == 2
    with pytest.raises(errors.NotLeader):
        first.broker.wait(refused)


def test_the_writer_has_ended(members: Members) -> None:
    """A member that was fenced gives nothing; its partitions are its successor's."""
    first, _ = members
    number = led_by(first)
    Rig(first.store, first.clock, broker=1, options=MEMBER)
    with pytest.raises(errors.BrokerFenced):
        first.handovers.move({("t", number): 2})
    assert number in first.led_partitions.topic("t").partitions
    assert not first.led_partitions.resignations.undecided()


def test_members_that_stop_together(members: Members, clock: ManualClock) -> None:
    """A member gives nothing to those that stop at the same time, and does not wait for others."""
    first, _ = members
    before = first.meta.reload().version, clock.monotonic()
    first.handovers.drain(clock.monotonic() + 10.0, leaving={2})
    assert (first.meta.reload().version, clock.monotonic()) == before
    assert len(first.led_partitions.topic("t").partitions) == 2
    third = Rig(first.store, first.clock, broker=3, options=MEMBER)
    first.handovers.drain(clock.monotonic() + 10.0, leaving={2})
    third.reconciler.tick()
    assert len(third.led_partitions.topic("t").partitions) == 2


def test_members_are_levelled(members: Members, clock: ManualClock) -> None:
    """After a while without a move, a member gives partitions to one that leads fewer."""
    first, second = members
    first.create("u", 12)
    second.reconciler.tick()
    first.handovers.drain(clock.monotonic() + 1.0)
    second.reconciler.tick()
    assert not any(topic.partitions for topic in first.led_partitions.topics())
    second.handovers.tick()
    clock.advance(BALANCE_SECONDS)
    second.handovers.tick()
    first.reconciler.tick()
    counts = [rig.led_partitions.partition_count for rig in members]
    assert sum(counts) == 16
    assert max(counts) - min(counts) <= UNEVEN_LEADERS
    clock.advance(BALANCE_SECONDS / 2)
    before = second.meta.reload().version
    second.handovers.tick()
    assert second.meta.reload().version == before


def test_older_leaders_are_ignored(members: Members) -> None:
    """A version from before a topic was widened removes none of its partitions."""
    first, second = members
    before = first.meta.current
    first.broker.topics.add_partitions(AddPartitions(topic="t", partitions=6))
    table: LedPartitions = first.led_partitions
    table.lead(table.topic("t"), before.topics["t"], version=before.version)
    assert table.topic("t").count == 6
    second.reconciler.tick()
    assert second.led_partitions.topic("t").count == 6


def test_a_log_that_cannot_be_read(members: Members, clock: ManualClock) -> None:
    """The partition waits, the others are served, and the failure is logged once."""
    first, second = members
    number = led_by(first)
    assert first.handovers.move({("t", number): 2}) == 1
    path = f"wal/1/{first.leadership.epoch:010d}/"
    damaged = [stat.name for stat in second.store.list_after(path[:-1]) if "check" in stat.name]
    sound = second.store.get(path + damaged[-1])
    second.store.put(path + damaged[-1], b"garbage")
    with capture_logs() as logs:
        for _ in range(5):
            second.reconciler.tick()
            clock.advance(1.0)
    assert [each["event"] for each in logs] == ["cannot take over partitions of another broker"]
    second.append(["x"], partition=led_by(second))
    with pytest.raises(errors.NotLeader):
        second.append(["x"], partition=number)
    second.store.put(path + damaged[-1], sound)
    clock.advance(RETRY_MAX_SECONDS)
    second.reconciler.tick()
    assert second.read(partition=number) == [(0, b"a"), (1, b"b")]


def stage(rig: Rig, *partitions: int) -> AppendStaged:
    """A staged batch with a row for each of these partitions."""
    writer = manifest.StagingWriter(rig.store, query="q", batch=1, clock=rig.clock)
    for number in partitions:
        writer.add("t", number, payload(["staged"]))
    found = manifest.Manifest(query="q", batch=1, sections=tuple(writer.finish()))
    return AppendStaged(manifest=manifest.write(rig.store, found, rig.clock).path)


def test_staged_files_of_partitions_that_moved(members: Members, clock: ManualClock) -> None:
    """A successor that has published its part keeps the files: another one may still need them."""
    first, second = members
    assert second.handovers.move(dict.fromkeys([("t", n) for n in range(4)], 1)) == 2
    first.reconciler.tick()
    assert not first.broker.staged.append(stage(first, 0, 1, 2, 3)).skipped
    third = Rig(first.store, clock, broker=3, options=MEMBER)
    second.reconciler.tick()
    fail_over(second, first)
    second.reconciler.tick()
    assert leader(second, led_by(second)) == 2
    for _ in range(3):
        second.publish()
        second.wal_cleaner.tick()
        second.wal_cleaner.checkpoint()
        clock.advance(SWEEP_EVERY_SECONDS)
        second.janitor.tick()
    third.reconciler.tick()
    number = led_by(third)
    assert third.read(partition=number)[-1] == (2, b"staged")
    third.publish()
    assert rows_of_table(third.store, clock, partition=number)[-1] == (2, b"staged")


def test_a_table_that_cannot_be_read(members: Members, clock: ManualClock) -> None:
    """A new topic of another member is served, and held back until its table is sound."""
    first, second = members
    first.create("u", 2)
    path = "topics/u/_delta_log/00000000000000000000.json"
    sound = second.store.get(path)
    second.store.put(path, b"garbage")
    second.reconciler.tick()
    topic = second.led_partitions.topic("u")
    assert topic.held_back is not None
    (number,) = topic.partitions
    assert second.append(["x"], topic="u", partition=number).base_offset == 0
    second.append(["x"], partition=led_by(second))
    second.store.put(path, sound)
    second.publish()
    assert topic.partitions[number].published == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.RootNotWritable(root="s3://b/r", reason="permission denied"),
        errors.StorageUnavailable(operation="list", path="topics/u", reason="EIO"),
    ],
    ids=["forbidden", "broken"],
)
def test_a_table_that_one_member_cannot_read(
    members: Members, monkeypatch: pytest.MonkeyPatch, error: errors.SparklogError
) -> None:
    """The member follows all other changes of the metadata."""
    first, second = members
    first.create("u", 2)

    def refuse(table: TopicTable) -> None:
        if table.topic == "u":
            raise error

    monkeypatch.setattr(TopicTable, "refresh", refuse)
    second.reconciler.tick()
    assert second.led_partitions.topic("u").held_back is not None
    monkeypatch.undo()
    first.create("v", 2)
    second.reconciler.tick()
    (number,) = second.led_partitions.topic("v").partitions
    assert second.append(["x"], topic="v", partition=number).base_offset == 0


# ------------------------------------------------------------------------------ controllers


def pass_time(clock: ManualClock, seconds: float, *ticks: Callable[[], object]) -> None:
    """Calls `ticks` ten times a second."""
    for _ in range(round(seconds * 10)):
        clock.advance(0.1)
        for tick in ticks:
            tick()


def test_a_silent_member_is_failed_over(members: Members, clock: ManualClock) -> None:
    """One that beats keeps its partitions; one that does not loses them after its time."""
    first, second = members
    third = Rig(first.store, clock, broker=3, options=MEMBER)
    beating = [lambda: beat(second), lambda: beat(third), first.reconciler.tick]
    pass_time(clock, 6.0, *beating, first.controller.tick)
    assert leader(first, led_by(second)) == 2
    number = led_by(second)
    pass_time(clock, 4.9, *beating[1:], first.controller.tick)
    assert leader(first, number) == 2
    pass_time(clock, 1.0, *beating[1:], first.controller.tick)
    assert leader(first, number) in (1, 3)
    with pytest.raises(errors.BrokerFenced):
        second.append(["x"], partition=number)


def test_a_member_that_has_stopped(members: Members) -> None:
    """Its last heartbeat says so, and no time has to pass."""
    first, second = members
    number = led_by(second)
    beat(second, stopped=True)
    first.controller.tick()
    assert leader(first, number) == 1


def test_the_log_of_a_dead_member_whose_topic_is_deleted(
    members: Members, clock: ManualClock
) -> None:
    """Promise: it is closed, although its partitions were gone before they were taken over."""
    first, second = members
    fail_over(first, second)
    first.broker.topics.delete("t")
    first.reconciler.tick()
    assert inherited_by(first.meta.reload(), 1)
    first.wal_cleaner.tick()
    first.wal_cleaner.checkpoint()
    clock.advance(GRACE_SECONDS)
    first.wal_cleaner.tick()
    assert [each.broker for each in first.meta.reload().open_epochs] == [1]


def test_an_observer_that_was_suspended(members: Members, clock: ManualClock) -> None:
    """A look that comes late proves no silence: observations begin again, but those of the dead."""
    first, _ = members
    observer = Observer(first.store, clock=clock, dead_after_seconds=5.0)
    metadata = first.meta.reload()
    assert observer.dead(metadata, [2]) == {}
    clock.advance(60.0)
    assert observer.dead(metadata, [2]) == {}
    found: list[dict[int, int]] = []
    pass_time(clock, 4.9, lambda: found.append(observer.dead(metadata, [2])))
    assert not any(found)
    pass_time(clock, 1.0, lambda: found.append(observer.dead(metadata, [2])))
    assert found[-1] == {2: metadata.brokers[2].epoch}
    clock.advance(60.0)  # a failover that fails may take so long
    assert observer.dead(metadata, [2]) == found[-1]
    observer.forget()
    assert observer.dead(metadata, [2]) == {}


def test_a_silent_member_that_answers_is_not_dead(members: Members, clock: ManualClock) -> None:
    """An answer is a sign of life as a heartbeat is: the next question comes after as long."""
    first, _ = members
    replies, asked = [True, False], list[float]()

    def answers(_: Leader) -> bool:
        asked.append(clock.monotonic())
        return replies.pop(0)

    observer = Observer(first.store, clock=clock, dead_after_seconds=5.0, answers=answers)
    metadata, began = first.meta.reload(), clock.monotonic()
    found: list[dict[int, int]] = []
    pass_time(clock, 9.9, lambda: found.append(observer.dead(metadata, [2])))
    assert not any(found)
    pass_time(clock, 1.0, lambda: found.append(observer.dead(metadata, [2])))
    assert found[-1] == {2: metadata.brokers[2].epoch}
    assert [round(each - began) for each in asked] == [5, 10]
    observer.dead(metadata, [2])
    assert not replies


def test_a_silent_member_is_looked_at_when_it_counts_as_dead(
    members: Members, clock: ManualClock
) -> None:
    """Looks cost requests on a bucket, so they are rare; the last one comes in time."""
    first, _ = members
    controller = Controller(
        first.store,
        first.broker.metadata,
        first.leadership,
        clock=clock,
        dead_after_seconds=5.0,
        is_sound=lambda: True,
        histories=Histories(first.store, clock=clock),
        readiness=all_serve,
        every_seconds=1.2,
    )
    assert math.isinf(controller.seconds_to_death())
    controller.tick()
    began = clock.monotonic()
    assert controller.seconds_to_death() == 5.0
    pass_time(clock, 4.9, controller.tick)
    assert first.meta.reload().topics["t"].leaders.count(2) == 2
    clock.advance(0.001 + controller.seconds_to_death())
    controller.tick()
    assert first.meta.reload().topics["t"].leaders.count(2) == 0
    assert clock.monotonic() - began < 5.1
    assert math.isinf(controller.seconds_to_death())


def test_a_failover_reads_the_log_before(members: Members, clock: ManualClock) -> None:
    """Once a member has been silent for half of its time; the failover reads only the rest."""
    first, second = members
    (epoch,) = leadership.unfenced_epochs(first.meta.reload(), 2)
    ahead = first.histories._ahead
    pass_time(clock, 2.0, first.controller.tick)
    assert not ahead
    pass_time(clock, 2.0, first.controller.tick)
    (kept,) = ahead.values()
    assert len(kept) == len(first.histories.read(epoch)[1])
    number = led_by(second)
    second.append(["c"], partition=number)
    pass_time(clock, 2.0, first.controller.tick)
    first.reconciler.tick()
    assert first.read(partition=number) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_what_cannot_be_read_before_a_failover(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the failover reads the log by itself."""
    first, second = members
    number = led_by(second)

    def fail(_epoch: object) -> None:
        raise errors.StorageUnavailable(operation="read", path="x", reason="down")

    monkeypatch.setattr(first.histories, "read_ahead", fail)
    with capture_logs() as lines:
        pass_time(clock, 6.0, first.controller.tick)
    assert leader(first, number) == 1
    assert any("cannot prepare for a failover" in each["event"] for each in lines)


def test_a_log_that_takes_long_to_read_delays_no_failover(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silence begins again after a pause between two looks, and each such read is one."""
    first, second = members
    number = led_by(second)
    reads: list[tuple[int, int]] = []

    def read_slowly(epoch: Epoch) -> None:
        reads.append(epoch.id)
        clock.advance(3.0)

    monkeypatch.setattr(first.histories, "read_ahead", read_slowly)
    pass_time(clock, 8.0, first.controller.tick)
    assert leader(first, number) == 1
    assert reads == [(2, second.leadership.epoch)]


def test_no_partition_goes_to_a_member_that_is_dead_too(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log cannot be closed, so the metadata has it as up."""
    first, second = members
    third = Rig(first.store, clock, broker=3, options=MEMBER)
    first.create("u", 12)
    assert leadership.is_up(first.meta.reload(), 3)
    seal = first.histories.seal

    def seal_others(epoch: Epoch) -> None:
        if epoch.broker == 3:
            raise errors.CorruptObject(path="x", check="its checksum is wrong")
        seal(epoch)

    monkeypatch.setattr(first.histories, "seal", seal_others)
    before = first.meta.reload().topics["u"].leaders
    assert {*before} == {1, 2, 3}
    pass_time(clock, 6.0, first.controller.tick)
    after = first.meta.reload().topics["u"].leaders
    assert after == tuple(1 if each == 2 else each for each in before)
    assert third.leadership.broker in after
    assert not leadership.is_up(first.meta.reload(), second.leadership.broker)


@pytest.mark.parametrize("is_put", [True, False], ids=["fence put", "no fence"])
def test_a_member_that_answers_during_its_failover(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, is_put: bool
) -> None:
    """It is replaced if its log has the fence, which it would not notice; else it stays."""
    first, second = members
    number = led_by(second)
    seal = first.histories.seal

    def fail(epoch: Epoch) -> None:
        if is_put:
            seal(epoch)
        raise errors.StorageUnavailable(operation="list", path="wal", reason="busy")

    with monkeypatch.context() as patched:
        patched.setattr(first.histories, "seal", fail)
        pass_time(clock, 6.0, first.controller.tick)
    assert leader(first, number) == 2
    pass_time(clock, 2.0, lambda: beat(second), first.controller.tick)
    assert leader(first, number) == (1 if is_put else 2)
    assert leadership.is_up(first.meta.reload(), 2) is not is_put
    assert first.controller._begun == set()


def test_a_silent_controller_is_replaced(members: Members, clock: ManualClock) -> None:
    """Another member takes its place, and moves its partitions in the same look."""
    first, second = members
    number = led_by(first)
    for _ in range(80):
        pass_time(clock, 0.1, second.reconciler.tick, second.controller.tick)
        if second.meta.reload().controller == 2:
            break
    assert leader(second, number) == 2
    second.reconciler.tick()
    assert second.read(partition=number) == [(0, b"a"), (1, b"b")]


def test_a_member_that_is_lost_with_the_controller(members: Members, clock: ManualClock) -> None:
    """Its silence counts from before there is another controller: half of its time is left."""
    first, second = members
    third = Rig(first.store, clock, broker=3, options=MEMBER)
    assert leader(third, led_by(second)) == 2
    began = clock.monotonic()
    while {*third.meta.reload().topics["t"].leaders} != {3}:
        pass_time(clock, 0.1, lambda: beat(third), third.reconciler.tick, third.controller.tick)
        assert clock.monotonic() - began < 8.0
    assert third.meta.reload().controller == 3


def test_a_member_that_started_again_is_spared(members: Members) -> None:
    """A failover that was decided on an older epoch changes nothing."""
    first, second = members
    metadata = first.meta.reload()
    again = Rig(first.store, first.clock, broker=2, options=MEMBER)
    first.controller._fail_over(metadata, 2, second.leadership.epoch)
    assert leadership.is_up(first.meta.reload(), 2)
    again.append(["x"], partition=led_by(again))


def test_a_member_that_is_about_to_stop_gets_nothing(members: Members, clock: ManualClock) -> None:
    """Neither a levelling nor a drain gives it a partition, although the metadata has it as up."""
    first, second = members
    first.create("u", 4)
    Rig(first.store, clock, broker=3, options=MEMBER)
    asked: list[list[int]] = []

    def all_leaders() -> Counter[int]:
        topics = first.meta.reload().topics.values()
        return Counter(leader for topic in topics for leader in topic.leaders)

    def level() -> None:
        first.reconciler.tick()
        first.handovers.tick()
        clock.advance(BALANCE_SECONDS)
        first.handovers.tick()

    def say(metadata: ClusterMetadata, brokers: Iterable[int]) -> dict[int, Readiness]:
        asked.append(sorted(brokers))
        return {**all_serve(metadata, asked[-1]), 3: Readiness.LEAVES}

    first.handovers._readiness = say
    level()
    assert (asked, all_leaders()) == ([[1, 2, 3]], Counter({1: 4, 2: 4}))
    first.handovers.drain(clock.monotonic() + 10.0)
    assert all_leaders() == Counter({2: 8})
    second.reconciler.tick()
    second.handovers.tick()
    clock.advance(BALANCE_SECONDS)
    second.handovers.tick()
    assert all_leaders()[3] > 0


def refuse(_epoch: Epoch) -> NoReturn:
    """A log that this member may not read."""
    raise errors.StorageUnavailable(operation="get", path="wal", reason="no permission")


def waits_for_3(metadata: ClusterMetadata, brokers: Iterable[int]) -> dict[int, Readiness]:
    """Broker 3 has just registered."""
    return {**all_serve(metadata, brokers), 3: Readiness.WAITS}


def test_a_member_that_does_not_serve_yet_gets_nothing(
    members: Members, clock: ManualClock
) -> None:
    """Neither a levelling, nor a drain, nor a failover gives it a partition: clients would wait
    for it.
    """
    first, second = members
    first.create("u", 4)
    Rig(first.store, clock, broker=3, options=MEMBER)

    def leaders() -> set[int]:
        topics = first.meta.reload().topics.values()
        return {leader for topic in topics for leader in topic.leaders}

    for each in members:
        each.handovers._readiness = each.controller._readiness = waits_for_3
        each.reconciler.tick()
        each.handovers.tick()
    clock.advance(BALANCE_SECONDS)
    for each in members:
        each.handovers.tick()
    assert leaders() == {1, 2}
    first.handovers.drain(clock.monotonic() + 10.0)
    assert leaders() == {2}
    first.controller._fail_over(first.meta.reload(), 2, second.leadership.epoch)
    assert leaders() == {1}


def test_a_member_that_does_not_serve_yet_gets_what_nobody_else_can(
    members: Members, clock: ManualClock
) -> None:
    """It will serve soon, and no other broker will."""
    first, second = members
    Rig(first.store, clock, broker=3, options=MEMBER)
    first.handovers._readiness = first.controller._readiness = waits_for_3
    metadata, epoch = first.meta.reload(), second.leadership.epoch
    first.controller._fail_over(metadata, 2, epoch, gone={1})
    assert {*first.meta.reload().topics["t"].leaders} == {1, 3}
    first.reconciler.tick()
    first.handovers.drain(clock.monotonic() + 10.0)
    assert {*first.meta.reload().topics["t"].leaders} == {3}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, Readiness.SERVES),
        ({"phase": Phase.STARTING}, Readiness.WAITS),
        ({"is_stuck": True}, Readiness.WAITS),
        ({"phase": Phase.DRAINING}, Readiness.LEAVES),
        ({"phase": Phase.DRAINING, "is_stuck": True}, Readiness.LEAVES),
        ({"stopped": True}, Readiness.LEAVES),
        ({"stopped": True, "epoch": 9}, Readiness.WAITS),
    ],
    ids=str,
)
def test_members_say_what_they_do_with_partitions(
    members: Members, changed: dict[str, Any], found: Readiness
) -> None:
    """A heartbeat of the registered epoch says so; a member without one has just registered."""
    first, _ = members
    beat(first, **changed)
    states = readiness(first.store, first.meta.current, [1, 2, 7])
    assert states == {1: found, 2: Readiness.WAITS}


def test_a_member_passes_on_what_it_cannot_take_over(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute without success; it gets nothing more for some time, and needs no log."""
    first, second = members
    number = led_by(first)
    first.append(["x"], partition=number)
    third = Rig(first.store, clock, broker=3, options=MEMBER)
    second.reconciler._readiness = all_serve

    monkeypatch.setattr(second.histories, "read", refuse)
    assert first.handovers.move({("t", number): 2}) == 1
    second.reconciler.tick()
    assert second.led_partitions.is_takeover_stuck
    pass_time(clock, STUCK_SECONDS - 1.0, second.reconciler.tick)
    assert leader(second, number) == 2
    pass_time(clock, 12.0, second.reconciler.tick)
    assert leader(second, number) == 3
    third.reconciler.tick()
    assert third.read(partition=number) == [(0, b"a"), (1, b"b"), (2, b"x")]

    assert second.led_partitions.is_takeover_stuck
    assert inherited_by(second.meta.reload(), 2)
    second.wal_cleaner.tick()
    second.wal_cleaner.checkpoint()
    second.wal_cleaner.tick()
    assert not inherited_by(second.meta.reload(), 2)
    pass_time(clock, 1.0, second.reconciler.tick)
    clock.advance(UNFIT_SECONDS)
    give(third, first)
    second.reconciler.tick()
    assert not second.led_partitions.is_takeover_stuck


def test_a_member_keeps_what_nobody_else_can_take_over(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries for as long as all others wait as well, and serves once it can."""
    first, second = members
    number = led_by(first)
    with monkeypatch.context() as broken:
        broken.setattr(second.histories, "read", refuse)
        assert first.handovers.move({("t", number): 2}) == 1
        pass_time(clock, 3 * STUCK_SECONDS, second.reconciler.tick)  # no member beats
    assert leader(second, number) == 2
    pass_time(clock, 12.0, second.reconciler.tick)
    assert second.read(partition=number) == [(0, b"a"), (1, b"b")]
    assert not second.led_partitions.is_takeover_stuck


def test_a_member_whose_process_has_ended_is_one_that_leaves(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata has it as up until its partitions move."""
    first, _ = members
    monkeypatch.setattr(liveness, "fate_of", lambda _: Fate.GONE)
    found = dict.fromkeys([1, 2], Readiness.LEAVES)
    assert readiness(first.store, first.meta.current, [1, 2, 7]) == found


def test_a_member_whose_process_has_ended_is_not_up(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are not sent to it while it is replaced; of a process elsewhere nothing is known."""
    first, _ = members
    for fate, up in ((Fate.UNKNOWN, [1, 2]), (Fate.GONE, [1]), (Fate.RUNS, [1, 2])):
        clock.advance(0.01)
        monkeypatch.setattr(live_members, "fate_of", lambda _, fate=fate: fate)
        assert list(first.broker.members.up()) == up
        assert set(first.broker.members.up_or_just_gone()) == {1, 2}


def test_clients_hear_for_a_moment_of_a_member_that_has_gone(
    members: Members, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They drop their connection to it only after they have moved to other leaders."""
    first, _ = members
    assert set(first.broker.members.up_or_just_gone()) == {1, 2}
    monkeypatch.setattr(live_members, "fate_of", lambda _: Fate.GONE)
    pass_time(clock, 5.0, first.broker.members.up)
    assert set(first.broker.members.up_or_just_gone()) == {1, 2}
    clock.advance(0.02)
    assert set(first.broker.members.up_or_just_gone()) == {1}
    monkeypatch.setattr(live_members, "fate_of", lambda _: Fate.RUNS)
    clock.advance(3600.0)
    assert set(first.broker.members.up()) == {1, 2}
    monkeypatch.setattr(live_members, "fate_of", lambda _: Fate.GONE)
    clock.advance(3600.0)  # without a call: it may have gone long ago
    assert set(first.broker.members.up_or_just_gone()) == {1}


def test_a_batch_whose_predecessor_was_refused_comes_again(
    members: Members, clock: ManualClock
) -> None:
    """For some time after a move it is refused for now; an error would restart its producer."""
    first, second = members
    number = give(first, second)
    late, unknown = (9, 0, 3), (10, 0, 5)
    for ids in (late, unknown):  # the new leader has refused the batches before them
        with pytest.raises(errors.EarlierBatchMissing):
            second.append(["later"], partition=number, producer_sequence=ids)
    assert second.append(["c"], partition=number, producer_sequence=(9, 0, 2)).base_offset == 2
    assert second.append(["d"], partition=number, producer_sequence=late).base_offset == 3
    clock.advance(PRODUCER_MOVE_SECONDS)
    with pytest.raises(errors.OutOfOrderSequence):
        second.append(["later"], partition=number, producer_sequence=(9, 0, 7))
    assert second.append(["x"], partition=number, producer_sequence=unknown).base_offset == 4


def test_a_partition_that_has_moved_is_not_blocked(members: Members) -> None:
    """The publisher may find its table damaged just after it was resigned: its next leader will."""
    first, _ = members
    number, topic = led_by(first), first.led_partitions.topic("t")
    partition = topic.partitions[number]
    first.led_partitions.resignations.begin(topic, number)
    assert first.led_partitions.resignations.complete(topic, number)
    damage = errors.ForeignTable(topic="t", reason="another engine has moved its txn")
    first.led_partitions.backlog.block(topic, partition, damage, end=100)
    assert (partition.blocked, partition.end, topic.held_back) == (None, 2, None)
    first.led_partitions.reinstate(topic.topic_id, number)
    assert first.append(["c"], partition=number).base_offset == 2


def test_a_batch_after_a_move_in_vain_comes_again(members: Members) -> None:
    """A batch is refused for now where the partition stays: others were refused meanwhile."""
    first, _ = members
    number, topic = led_by(first), first.led_partitions.topic("t")
    first.led_partitions.resignations.begin(topic, number)
    assert first.led_partitions.resignations.complete(topic, number)
    first.led_partitions.reinstate(topic.topic_id, number)
    with pytest.raises(errors.EarlierBatchMissing):
        first.append(["later"], partition=number, producer_sequence=(9, 0, 3))
    assert first.append(["c"], partition=number, producer_sequence=(9, 0, 2)).base_offset == 2


def test_a_batch_whose_predecessor_was_refused_in_a_new_topic_comes_again(
    members: Members, clock: ManualClock
) -> None:
    """A topic that another member creates may get its second batch first, but only for a while."""
    first, second = members
    first.create("u", 2)
    second.reconciler.tick()
    number = led_by(second, "u")
    for later in ((9, 0, 1), (9, 0, 2)):
        with pytest.raises(errors.EarlierBatchMissing):
            second.append(["b"], topic="u", partition=number, producer_sequence=later)
    for sequence in range(2):
        ids = 9, 0, sequence
        found = second.append(["a"], topic="u", partition=number, producer_sequence=ids)
        assert found.base_offset == sequence
    clock.advance(PRODUCER_MOVE_SECONDS)
    found = second.append(["x"], topic="u", partition=number, producer_sequence=(10, 0, 5))
    assert found.base_offset == 2


def test_a_refusal_from_before_a_change_is_not_proven(members: Members) -> None:
    """A request may have been judged on what the member knew until another thread followed."""
    first, second = members
    metadata = second.broker.metadata
    judged_at = metadata.looks
    first.create("u", 2)
    metadata.follow()
    with pytest.raises(errors.MetadataChanged):
        metadata.prove(judged_at)
    metadata.prove(metadata.looks)


def test_our_own_changes_are_no_news(members: Members) -> None:
    """A request that was judged by them needs no repetition; by those of another member it does."""
    first, second = members
    first.create("u", 2)
    first.broker.topics.add_partitions(AddPartitions(topic="u", partitions=3))
    metadata = first.broker.metadata
    metadata.prove(metadata.looks)
    second.reconciler.tick()
    second.broker.topics.delete("u")
    with pytest.raises(errors.MetadataChanged):
        metadata.prove(metadata.looks)
    metadata.prove(metadata.looks)
