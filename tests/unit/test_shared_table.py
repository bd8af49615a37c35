"""Members that write, maintain and leave one topic's table: steps that are cut short, or meet."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from sparklog import errors
from sparklog.broker.log.appends import EmptyObject
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.upkeep_duties import Duties
from sparklog.broker.log.wal_cleaner import WalCleanerLimits
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AlterTopic
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.storage.objects import MemoryStore
from sparklog.storage.table.names import data_path
from sparklog.storage.table.together import sync_all
from sparklog.storage.table.topic_table import TopicTable
from tests.support.brokers import (
    GRACE_SECONDS,
    Rig,
    RigOptions,
    follow,
    led_by,
    rows_of_table,
)

MEMBER = RigOptions(is_member=True)
UPKEEP_SECONDS = 400.0
"""Longer than the pause between two sweeps."""


def two(store: MemoryStore, clock: ManualClock, options: RigOptions = MEMBER) -> list[Rig]:
    """Two members that share the four partitions of t."""
    members = [Rig(store, clock, broker=number, options=options) for number in (1, 2)]
    for each in members:
        each.janitor._duties = Duties(is_controller=partial(_is_controller, each))
    follow(members)
    members[0].create("t", 4)
    follow(members)
    return members


def _is_controller(rig: Rig) -> bool:
    return rig.broker.metadata.known.controller == rig.leadership.broker


def pass_time(members: list[Rig], clock: ManualClock, times: int = 3) -> None:
    """Has all members maintain their tables several times."""
    for _ in range(times):
        clock.advance(UPKEEP_SECONDS)
        follow(members)
        for each in members:
            each.janitor.tick()


def test_an_entry_that_moves_is_not_carried(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy behind the resignation would mislead the next leader: nothing of ours keeps it."""
    limits = WalCleanerLimits(trim_grace_seconds=GRACE_SECONDS, checkpoint_every_objects=4)
    options = RigOptions(is_member=True, hot_bytes=0, wal_cleaner=limits)
    first, second = two(store, clock, options)
    number = led_by(first)
    first.append(["acked"], partition=number)
    for _ in range(12):
        first.writer.wait(first.writer.submit([EmptyObject()]))
        first.wal_cleaner.checkpoint()
        clock.advance(100.0)
        first.wal_cleaner._record_age()
    read, moved = first.wal_cleaner._payload, list[int]()

    def read_during_a_move(located: Any) -> Any:
        data = read(located)
        if located.entry.partition == number and not moved:
            moved.append(first.handovers.move({("t", number): 2}))
        return data

    monkeypatch.setattr(first.wal_cleaner, "_payload", read_during_a_move)
    carried = first.wal_cleaner.carry()
    if carried is not None:
        first.writer.wait(carried)
    assert moved == [1]
    second.reconciler.tick()
    first.writer.wait(first.writer.submit([EmptyObject()]))
    first.trim()
    assert [row[1] for row in second.read(partition=number)] == [b"acked"]
    second.publish()
    assert [row[1] for row in rows_of_table(store, clock, partition=number)] == [b"acked"]


def test_a_partition_that_is_blocked_just_now_does_not_move(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do, and it is served again later moves permitting."""
    first, _ = two(store, clock)
    bad, good = sorted(first.led_partitions.topic("t").partitions)
    topic, finish = first.led_partitions.topic("t"), first.handovers._finish_appends

    def finish_and_block() -> None:
        finish()
        damage = errors.ForeignTable(topic="t", reason="another engine has moved its txn")
        first.led_partitions.backlog.block(topic, topic.partitions[bad], damage, end=0)

    monkeypatch.setattr(first.handovers, "_finish_appends", finish_and_block)
    assert first.handovers.move({("t", bad): 2, ("t", good): 2}) == 1
    assert set(topic.partitions) == {bad}
    assert topic.partitions[bad].state is PartitionState.BLOCKED
    first.handovers.tick()


def test_a_refusal_ends_when_its_partition_has_moved(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data file that is missing stops the table of its leader only."""
    first, second = two(store, clock)
    topic = first.led_partitions.topic("t")
    bad, good = sorted(topic.partitions)
    first.append(["lost"], partition=bad)
    first.publish()
    (file,) = topic.table.snapshot.files[bad]
    store.delete([data_path("t", file)])

    def refuse(*_: object, **_options: object) -> None:
        raise errors.MissingObject(path="wal", reason="it is damaged, too")

    with monkeypatch.context() as patched:
        patched.setattr(first.publisher, "rewrite", refuse)
        first.confirmer.confirm()
    first.append(["sound"], partition=good)
    with pytest.raises(errors.MissingObject):
        first.publisher.publish(topic)
    first.handovers.move({("t", bad): second.leadership.broker})
    follow([first, second])
    first.confirmer.confirm()
    first.publisher.publish(topic)
    assert [row[1] for row in rows_of_table(store, clock, partition=good)] == [b"sound"]


def test_retention_obeys_the_metadata(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that only the table got was cut short: its client got an error."""
    members = two(store, clock)
    for each in members:
        each.append(["kept"], partition=led_by(each))
        each.publish()

    def refuse(_: object) -> None:
        raise errors.StorageUnavailable(operation="put", path="meta", reason="503")

    with monkeypatch.context() as patched:
        patched.setattr(members[0].broker.metadata, "change", refuse)
        with pytest.raises(errors.StorageUnavailable):
            members[0].broker.topics.alter(AlterTopic(topic="t", config={"retention.ms": "1000"}))
    pass_time(members, clock)
    for each in members:
        rows = rows_of_table(store, clock, partition=led_by(each))
        assert [row[1] for row in rows] == [b"kept"]
    members[1].broker.topics.alter(AlterTopic(topic="t", config={"retention.ms": "1000"}))
    pass_time(members, clock)
    assert not any(rows_of_table(store, clock, partition=led_by(each)) for each in members)


def test_a_creator_ends_a_topic_that_another_has_deleted(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other broker may empty the table, and only the controller would look for it."""
    members = two(store, clock)
    first, second = members
    assert first.broker.metadata.known.controller == 1
    second.create("u", 2)
    follow(members)

    def die(_: object) -> None:
        raise errors.OutcomeUnknown(what="deletion", reason="the store did not answer")

    with monkeypatch.context() as patched:
        patched.setattr(first.broker.topics, "_end", die)
        with pytest.raises(errors.OutcomeUnknown):
            first.broker.topics.delete("u")
    for each in members:
        topic = each.broker.topics
        if topic.exists("u"):
            each.led_partitions.remove_topic(each.led_partitions.topic("u"))
    pass_time(members, clock)
    assert TopicTable(store, "u", clock=clock).refresh().topic_id is None
    first.create("u", 1)


def test_a_topic_that_others_lead_becomes_no_mirror(store: MemoryStore, clock: ManualClock) -> None:
    """They may have records, and take more until they hear of it."""
    first, _ = two(store, clock)
    change = AlterTopic(topic="t", config={MIRROR_SOURCE: "a source"})
    with pytest.raises(errors.BadOption, match="several brokers lead"):
        first.broker.topics.alter(change)


def test_a_later_version_is_not_taken_for_durable(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read on while tables are made durable together."""
    first, second = two(store, clock)
    table, sync = first.led_partitions.topic("t").table, store.sync_files
    second.append(["a"], partition=led_by(second))
    second.publish()
    table.refresh()
    synced: list[str] = []

    def sync_and_read_on(paths: Any) -> None:
        synced.extend(paths)
        sync(synced)
        second.append(["b"], partition=led_by(second))
        second.publish()
        table.refresh()

    monkeypatch.setattr(store, "sync_files", sync_and_read_on)
    sync_all(store, [table])
    assert set(table.unsynced().log) - set(synced)
