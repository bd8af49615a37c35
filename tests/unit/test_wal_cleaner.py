from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.log import takeover
from sparklog.broker.log.appends import CarriedEntry
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_cleaner import CLOSED_EPOCHS, INHERITED_EPOCHS, WalCleanerLimits
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AddPartitions
from sparklog.storage import wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.model import ClusterMetadata, Epoch, TopicMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Fault, MemoryStore, ScriptedFaults
from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.snapshot import Bounds, TableSnapshot, WalKind
from sparklog.storage.wal.base import object_path
from sparklog.storage.wal.objects import ObjectAppender, newest_checkpoint
from tests.support.brokers import (
    GRACE_SECONDS,
    Rig,
    RigOptions,
    Row,
    flip,
    open_ids,
    paths,
    registration,
    rows_followed,
    rows_of_root,
    rows_of_table,
)
from tests.support.tables import no_table

pytestmark = pytest.mark.rig(hot_bytes=0)

CARRY_SECONDS = 300.0
EAGER = WalCleanerLimits(
    checkpoint_every_objects=1,
    checkpoint_every_seconds=1e9,
    trim_grace_seconds=GRACE_SECONDS,
    carry_after_seconds=CARRY_SECONDS,
)


def objects(rig: Rig, epoch: int | None = None) -> list[str]:
    """The objects in the log of an epoch: ours, unless another is named."""
    names = paths(rig.store, wal.folder(rig.leadership.broker, epoch or rig.leadership.epoch))
    return [name.lstrip("0") or "0" for name in names if not name.startswith("checkpoint")]


def checkpoints(rig: Rig) -> int:
    """The number of checkpoints in our epoch."""
    names = paths(rig.store, wal.folder(rig.leadership.broker, rig.leadership.epoch))
    return len([name for name in names if name.startswith("checkpoint")])


def bounds_of_all(rig: Rig) -> dict[str, tuple[Bounds, ...]]:
    """The bounds of all partitions, each looked at now."""
    return {
        topic.topic_id: tuple(
            Bounds(
                each.start,
                each.unconfirmed[0].entry.base_offset if each.unconfirmed else each.published,
                each.end if each.is_end_known else -1,
                each.leader_epoch,
                tuple(each.epochs),
            )
            for each in topic.partitions.values()
        )
        for topic in rig.led_partitions.topics()
    }


def carry(rig: Rig) -> int:
    """Carries once, and returns how many entries were carried durably."""
    pending = rig.wal_cleaner.carry()
    if pending is None:
        return 0
    rig.writer.wait(pending)
    return len(pending.appends)


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_comes_after_so_many_objects(store: MemoryStore, clock: ManualClock) -> None:
    """A checkpoint is due at the configured number of objects since the last one, not before."""
    wal_cleaner = WalCleanerLimits(checkpoint_every_objects=3, checkpoint_every_seconds=1e9)
    rig = Rig(store, clock, options=RigOptions(wal_cleaner=wal_cleaner))
    rig.create()
    for expected in (0, 1, 1, 1, 2):
        rig.append(["a"])
        rig.wal_cleaner.tick()
        assert checkpoints(rig) == expected


def test_a_checkpoint_comes_after_some_time(rig: Rig, clock: ManualClock) -> None:
    """A checkpoint is due after the configured time, but only if something was written."""
    for seconds, appends, sequence in ((9.9, 0, -1), (0.1, 0, 0), (99, 0, 0), (0, 1, 1), (9, 1, 1)):
        clock.advance(seconds)
        for _ in range(appends):
            rig.append(["a"])
        rig.wal_cleaner.tick()
        found = newest_checkpoint(rig.store, 1, 1)
        newest = found.sequence if found is not None else -1
        assert newest == sequence
    assert rig.successor().read() == [(0, b"a"), (1, b"a")]


def test_the_log_stays_short(rig: Rig) -> None:
    """Published objects are deleted a grace after the next checkpoint, except the newest."""
    for _ in range(5):
        rig.append(["a"])
    rig.publish()
    rig.wal_cleaner.checkpoint()
    rig.wal_cleaner.tick()
    assert objects(rig) == [str(number) for number in range(6)]
    rig.trim()
    assert objects(rig) == ["5"]
    rig.append(["b"])
    rig.trim()
    assert objects(rig) == ["6"]
    assert checkpoints(rig) == 1
    assert rig.successor().read() == rows_of_root(rig.store, rig.clock)


def test_an_idle_log_is_trimmed(rig: Rig, clock: ManualClock) -> None:
    """Objects published after the last checkpoint are deleted although nothing more is written."""
    for _ in range(3):
        rig.append(["a"])
    rig.wal_cleaner.checkpoint()
    rig.publish()
    for _ in range(4):
        clock.advance(EAGER.checkpoint_every_seconds)
        rig.wal_cleaner.tick()
        carry(rig)
    assert objects(rig) == ["4"]
    assert checkpoints(rig) == 1
    assert rig.successor().read() == rows_of_root(rig.store, rig.clock)


def test_an_idle_log_grows_by_no_needless_object(rig: Rig, clock: ManualClock) -> None:
    """No object is added if none can be deleted: neither alongside a backlog nor after trimming."""
    rig.append(["a"])
    rig.wal_cleaner.checkpoint()
    added = []
    for step in range(8):
        if step == 4:
            rig.publish()
        clock.advance(limits.CHECKPOINT_EVERY_SECONDS)
        rig.wal_cleaner.tick()
        added.append(carry(rig))
    assert added == [0, 0, 0, 0, 1, 0, 0, 0]
    assert objects(rig) == ["2"]


def test_an_unpublished_entry_keeps_its_object(rig: Rig) -> None:
    """An object with one unpublished entry is needed, whatever other entries it has."""
    rig.create("u")
    pending_appends = [rig.submit(["a"]), rig.submit(["x"], topic="u")]
    for pending in pending_appends:
        rig.broker.wait(pending)
    rig.append(["b"])
    rig.publisher.publish(rig.led_partitions.topic("t"))
    rig.append(["c"])
    rig.trim()
    assert objects(rig) == ["1", "3"]
    assert rig.successor().read("u") == [(0, b"x")]


def test_a_failed_trim_is_repeated(rig: Rig) -> None:
    """If the store fails to delete, the objects are deleted after the next checkpoint."""
    assert isinstance(rig.store, MemoryStore)
    rig.append(["a"])
    rig.publish()
    down = errors.StorageUnavailable(operation="delete", path="?", reason="down")
    appender = rig.wal_cleaner._appender
    assert isinstance(appender, ObjectAppender)
    appender._store = rig.store.view(ScriptedFaults(Fault(operation="delete", error=down)))
    with pytest.raises(errors.StorageUnavailable):
        rig.trim()
    rig.append(["b"])
    rig.publish()
    rig.trim()
    assert objects(rig) == ["2"]


def test_a_log_is_trimmed_although_no_checkpoint_can_be_put(rig: Rig, clock: ManualClock) -> None:
    """A full disk is freed by what older checkpoints allow, and by logs of closed epochs."""
    rig.append(["a"])
    rig.publish()
    second = rig.successor()
    second.wal_cleaner.checkpoint()
    second.wal_cleaner.tick()
    second.append(["b"])
    second.publish()
    clock.advance(3_600.0)
    assert isinstance(rig.store, MemoryStore)
    full = errors.StorageFull(root="memory://", free_bytes=0, reserve_bytes=0)
    faults = ScriptedFaults(Fault(operation="put_new", error=full))
    appender = second.wal_cleaner._appender
    assert isinstance(appender, ObjectAppender)
    appender._store = rig.store.view(faults)
    with pytest.raises(errors.StorageFull):
        second.wal_cleaner.tick()
    assert objects(second, 1) == ["2"]  # the fence


# ------------------------------------------------------------------------------ inherited epochs


def test_an_inherited_epoch_ends_when_it_is_published(rig: Rig) -> None:
    """An epoch stays open while its records are only in it, and closes after our checkpoint."""
    rig.append(["a"])
    second = rig.successor()
    second.wal_cleaner.checkpoint()
    second.wal_cleaner.tick()
    assert (1, 1) in open_ids(second.meta)
    second.publish()
    second.wal_cleaner.tick()
    assert (1, 1) in open_ids(second.meta)
    second.confirmer.confirm()
    second.wal_cleaner.tick()
    assert second.meta.reload().open_epochs == (Epoch(1, 2),)
    assert objects(second, 1) == ["0", "1", "2"]
    second.trim()
    assert objects(second, 1) == ["2"]


def test_an_epoch_is_not_closed_before_our_checkpoint(rig: Rig) -> None:
    """Until our checkpoint, only the old epoch holds the producers' states."""
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.publish()
    second = rig.successor()
    second.wal_cleaner._close_inherited()
    third = second.successor()
    assert third.append(["a"], producer_sequence=(1, 0, 0)).duplicate


def test_a_replaced_broker_closes_nothing(rig: Rig) -> None:
    """A replaced broker neither closes an epoch that its successor inherited nor deletes it."""
    rig.append(["a"])
    second = rig.successor()
    second.publish()
    second.wal_cleaner.checkpoint()
    third = second.successor()
    with pytest.raises(errors.BrokerFenced):
        second.wal_cleaner.tick()
    assert (1, 1) in open_ids(third.meta)


def test_a_broker_that_is_about_to_be_replaced_closes_nothing(rig: Rig) -> None:
    """Its successor may have read its log already, before the checkpoint with the states."""
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.publish()
    second = rig.successor()
    third = takeover.acquire(
        rig.store,
        MetadataStore(rig.store, clock=rig.clock),
        2,
        registration(2),
        clock=rig.clock,
        take_over=True,
    )
    second.wal_cleaner.checkpoint()
    with pytest.raises(errors.BrokerFenced, match="replaced by broker 2"):
        second.wal_cleaner.tick()
    assert open_ids(second.meta) == [(1, 1), (1, 2), (third.broker, third.epoch)]


def test_an_epoch_stays_for_a_partition_that_came_meanwhile(rig: Rig) -> None:
    """The checkpoint does not have its state yet, which that epoch may have."""
    rig.append(["a"])
    rig.publish()
    second = rig.successor()
    second.wal_cleaner.checkpoint()

    def give(before: ClusterMetadata) -> ClusterMetadata:
        again = msgspec.structs.replace(before.topics["t"], leader_epochs=(2,))
        return msgspec.structs.replace(before, topics={"t": again})

    second.meta.change(give)
    second.wal_cleaner.tick()
    assert open_ids(second.meta) == [(1, 1), (1, 2)]


def test_leftovers_of_closed_epochs_are_removed(rig: Rig, clock: ManualClock) -> None:
    """Objects that a stopped broker could not delete are deleted by its successor."""
    rig.append(["a"])
    rig.publish()
    second = rig.successor()
    second.wal_cleaner.checkpoint()
    second.wal_cleaner.tick()
    third = second.successor()
    third.wal_cleaner.checkpoint()
    third.wal_cleaner.tick()
    assert third.meta.reload().open_epochs == (Epoch(1, 3),)
    assert objects(third, 1) == ["0", "1", "2"]
    clock.advance(GRACE_SECONDS)
    third.wal_cleaner.tick()
    assert (objects(third, 1), objects(third, 2)) == (["2"], ["1"])


# ------------------------------------------------------------------------------ carrying


def test_entries_that_wait_too_long_are_carried(store: MemoryStore, clock: ManualClock) -> None:
    """Records of a topic that cannot be published are carried, and the old objects deleted."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    rig.create("t", 2)
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.append(["b"], partition=1)
    rig.append_staged([(0, ["c"])], batch=1)
    assert carry(rig) == 0
    clock.advance(CARRY_SECONDS)
    rig.append(["d"])
    assert carry(rig) == 0
    rig.wal_cleaner.checkpoint()
    rig.append(["e"])
    rig.wal_cleaner.checkpoint()
    assert carry(rig) == 3
    assert carry(rig) == 0
    rig.trim()
    assert objects(rig) == ["4", "5", "6"]
    for reader in (rig, rig.successor(), rig.successor(broker=2)):
        assert reader.read() == [(0, b"a"), (1, b"c"), (2, b"d"), (3, b"e")]
    last = rig.successor()
    assert last.append(["a"], producer_sequence=(1, 0, 0)).duplicate
    assert not last.append(["f"], producer_sequence=(1, 0, 1)).duplicate
    assert last.append_staged([(0, ["c"])], batch=1)[0].duplicate
    last.publish()
    found = rows_of_table(store, clock)
    assert found == [(0, b"a"), (1, b"c"), (2, b"d"), (3, b"e"), (4, b"f")]
    assert rows_of_table(store, clock, partition=1) == [(0, b"b")]


def test_an_inherited_epoch_is_carried_away(store: MemoryStore, clock: ManualClock) -> None:
    """Carrying its entries closes an inherited epoch, although its topic is held back."""
    first = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    first.create()
    first.append(["a"])
    second = first.successor(broker=2)
    clock.advance(CARRY_SECONDS + 1)
    assert carry(second) == 1
    second.trim()
    assert second.meta.reload().open_epochs == (Epoch(2, 1),)
    second.trim()
    assert objects(second) == ["1"]
    assert paths(store, wal.folder(1, 1)) == [f"{2:020d}"]
    assert second.successor(broker=1).read() == [(0, b"a")]


def test_entries_of_older_epochs_are_carried_first(store: MemoryStore, clock: ManualClock) -> None:
    """If a carry has little room, entries of older epochs come before our own old entries."""
    wal_cleaner = WalCleanerLimits(
        checkpoint_every_objects=0, carry_after_seconds=CARRY_SECONDS, carry_bytes=1
    )
    first = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=wal_cleaner))
    first.create("t", 2)
    first.append(["a"])
    second = first.successor(broker=2)
    second.append(["b"], partition=1)
    second.wal_cleaner.checkpoint()
    assert carry(second) == 0
    clock.advance(CARRY_SECONDS + 1)
    carried = []
    for _ in range(2):
        pending = second.wal_cleaner.carry()
        assert pending is not None
        second.writer.wait(pending)
        for each in pending.appends:
            assert isinstance(each, CarriedEntry)
            carried.append(each.located.entry.partition)
        second.wal_cleaner.checkpoint()
    assert carried == [0, 1]


def test_carrying_is_bounded_per_object(store: MemoryStore, clock: ManualClock) -> None:
    """Carried entries make no object larger than a flush."""
    wal_cleaner = WalCleanerLimits(
        checkpoint_every_objects=0, carry_after_seconds=CARRY_SECONDS, carry_bytes=500
    )
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=wal_cleaner))
    rig.create()
    for number in range(7):
        rig.append(["a"], producer_sequence=(1, 0, number))
    assert carry(rig) == 0
    clock.advance(CARRY_SECONDS + 1)
    carried: list[int] = []
    while True:
        rig.wal_cleaner.checkpoint()
        count = carry(rig)
        carried.append(count)
        if sum(carried) >= 7:
            break
        # A copy does not count as the newest batch of its producer.
        assert rig.append(["a"], producer_sequence=(1, 0, 6)).duplicate
        assert not rig.append(["b"], producer_sequence=(2, 0, len(carried) - 1)).duplicate
    assert max(carried) < 4
    successor = rig.successor()
    assert [value for _, value in successor.read()][:7] == [b"a"] * 7
    assert not successor.append(["a"], producer_sequence=(1, 0, 7)).duplicate


def test_a_carried_entry_rests(store: MemoryStore, clock: ManualClock) -> None:
    """An entry is carried once in each period, however much is written meanwhile."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    rig.create("t", 2)
    rig.append(["a"])
    carried = []
    for _ in range(40):
        clock.advance(CARRY_SECONDS / 10)
        for _ in range(5):
            rig.append(["b"], partition=1)
        rig.wal_cleaner.checkpoint()
        pending = rig.wal_cleaner.carry()
        if pending is None:
            carried.append(0)
            continue
        rig.writer.wait(pending)
        entries = [each.located.entry for each in pending.appends if isinstance(each, CarriedEntry)]
        carried.append(sum(entry.partition == 0 for entry in entries))
    assert sum(carried) in (3, 4)
    assert max(carried) == 1


@pytest.mark.parametrize("count", [1, 4_096])
def test_a_predecessors_clock_keeps_nothing_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Records with future arrival times are carried after the time that we have waited."""
    monkeypatch.setattr(limits, "FLUSH_MAX_ENTRIES", count)
    ahead, ours = ManualClock(2_000_000_000_000_000), ManualClock(1_999_999_900_000_000)
    first = Rig(store, ahead, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    first.create()
    first.append(["a"])
    Rig(store, ours).append(["b"])
    rig = Rig(store, ours, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    assert carry(rig) == 0
    ours.advance(CARRY_SECONDS - 1)
    assert carry(rig) == 0
    ours.advance(2)
    assert sum(carry(rig) for _ in range(3)) == 2
    rig.wal_cleaner.checkpoint()
    rig.wal_cleaner.tick()
    assert rig.meta.reload().open_epochs == (Epoch(1, 3),)
    assert rig.successor().read() == [(0, b"a"), (1, b"b")]


def test_a_failed_carry_is_repeated(rig: Rig, clock: ManualClock) -> None:
    """Entries that a full disk has refused are carried when there is space again."""
    assert isinstance(rig.store, MemoryStore)
    rig.append(["a"])
    second = rig.successor()
    clock.advance(CARRY_SECONDS + 1)
    full = errors.StorageFull(root="?", free_bytes=0, reserve_bytes=0)
    second.append_to(rig.store.view(ScriptedFaults(Fault(operation="put_new", error=full))))
    with pytest.raises(errors.StorageFull):
        carry(second)
    assert carry(second) == 1
    assert carry(second) == 0


def test_a_carry_that_was_not_queued_is_repeated(rig: Rig, clock: ManualClock) -> None:
    """An entry stays in the queue if the store fails to read the next one."""
    assert isinstance(rig.store, MemoryStore)
    rig.append(["a"])
    rig.append(["b"])
    second = rig.successor()
    clock.advance(CARRY_SECONDS + 1)
    down = errors.StorageUnavailable(operation="get_range", path="?", reason="down")
    faults = ScriptedFaults(Fault(operation="get_range", error=down, count=2))
    second.wal_cleaner._store = rig.store.view(faults)
    with pytest.raises(errors.StorageUnavailable):
        carry(second)
    assert carry(second) == 2
    assert carry(second) == 0


def test_entries_of_a_full_log_are_carried(rig: Rig, clock: ManualClock) -> None:
    """Entries are carried even while the log is full and producers wait."""
    rig.append(["a"])
    second = rig.successor(
        hot_bytes=0, wal_cleaner=EAGER, writer=WriterLimits(queue_bytes=1, unpublished_bytes=1)
    )
    with pytest.raises(errors.QueueFull):
        second.append(["b"])
    clock.advance(CARRY_SECONDS + 1)
    assert carry(second) == 1
    second.trim()
    assert second.meta.reload().open_epochs == (Epoch(1, 2),)


def test_entries_published_meanwhile_are_not_needed_again(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A copy of an entry that was published meanwhile is not needed."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    rig.create()
    rig.append(["a"])
    rig.append(["b"])
    rig.wal_cleaner.checkpoint()
    clock.advance(CARRY_SECONDS + 1)
    pending = rig.wal_cleaner.carry()
    assert pending is not None
    rig.publish()
    rig.writer.wait(pending)
    rig.confirmer.confirm()
    assert rig.led_partitions.backlog.objects.needed(1, 1) == []
    assert rig.led_partitions.backlog.unpublished_bytes == 0
    assert rig.successor().read() == [(0, b"a"), (1, b"b")]


def test_a_damaged_entry_is_not_carried(store: MemoryStore, clock: ManualClock) -> None:
    """A damaged entry stays in its object for an operator; the others are carried."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, wal_cleaner=EAGER))
    rig.create()
    for value in ("a", "b", "c"):
        rig.append([value])
    rig.wal_cleaner.checkpoint()
    located = rig.led_partitions.topic("t").partition(0).unpublished[1]
    flip(store, object_path(located.at), located.origin + located.entry.length - 20)
    clock.advance(CARRY_SECONDS + 1)
    assert carry(rig) == 1
    rig.wal_cleaner.checkpoint()
    assert carry(rig) == 1
    assert carry(rig) == 0
    rig.trim()
    assert "2" in objects(rig)


# ------------------------------------------------------------------------------ bounds


def test_bounds_follow_every_change(store: MemoryStore, clock: ManualClock) -> None:
    """A checkpoint has the bounds of new, deleted, extended, moved and blocked partitions."""
    rig = Rig(store, clock)
    table = rig.led_partitions
    topic, gone = rig.create("t", 2), rig.create("gone")
    assert table.bounds() == bounds_of_all(rig)
    rig.append(["a", "b"], partition=1)
    rig.append(["c"], topic="gone")
    assert table.bounds() == bounds_of_all(rig)
    rig.broker.topics.add_partitions(AddPartitions(topic="t", partitions=3))
    rig.publish()
    assert table.bounds() == bounds_of_all(rig)
    rig.wal_cleaner.checkpoint()
    assert table.bounds() == bounds_of_all(rig)
    table.advance_start(topic, [0, 1, 0])
    assert table.bounds()[topic.topic_id][1] == Bounds(1, 2, 2, 0, ((0, 0),))
    reason = errors.MissingObject(path="x", reason="it was removed")
    table.backlog.block(topic, topic.partitions[2], reason, end=5, is_end_known=False)
    assert table.bounds()[topic.topic_id][2] == Bounds(0, 0, -1, 0)
    assert table.backlog.reconnect(topic, topic.partitions[2], 5)
    assert table.bounds() == bounds_of_all(rig)
    rig.append(["d"], topic="gone")
    rig.broker.topics.delete("gone")
    table.backlog.advance_published(gone, [(gone.partitions[0], 1)])  # a commit that was under way
    assert table.bounds() == bounds_of_all(rig)
    assert table.bounds().keys() == {topic.topic_id}


def test_bounds_of_a_topic_that_is_being_created(rig: Rig) -> None:
    """A checkpoint between two steps of a creation does not keep its topic from the next one."""
    table, topic = rig.led_partitions, Topic("new", "id", {}, no_table("new"))
    snapshot = TableSnapshot(version=0, topic_id="id", partitions=2, ends=(0, 0), starts=(0, 0))
    known = TopicMetadata(topic_id="id", leaders=(1, 1), leader_epochs=(0, 0))
    metadata = rig.meta.reload()
    topics = {**metadata.topics, "new": known}
    table.add_partitions(topic, snapshot, msgspec.structs.replace(metadata, topics=topics))
    table.bounds()
    table.add_topic(topic)
    assert table.bounds() == bounds_of_all(rig)


def test_a_checkpoint_looks_only_at_changed_partitions(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions without a change since the last checkpoint cost it nothing."""
    topic = rig.create("wide", 50)
    rig.led_partitions.bounds()
    rig.append(["a"], topic="wide", partition=7)
    rig.append(["b"], topic="wide", partition=7)
    looked_at: list[Partition] = []
    bounds_of = Partition.bounds

    def look(partition: Partition) -> Bounds:
        looked_at.append(partition)
        return bounds_of(partition)

    monkeypatch.setattr(Partition, "bounds", look)
    assert rig.led_partitions.bounds() == bounds_of_all(rig)
    assert looked_at == [topic.partitions[7]]


# ------------------------------------------------------------------------------ all together

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("retry"), st.integers(0, 1), st.integers(0, 4)),
        st.tuples(st.just("adopt"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("publish"), st.just(0), st.just(0)),
        st.tuples(st.just("checkpoint"), st.just(0), st.just(0)),
        st.tuples(st.just("tick"), st.sampled_from([0, 11, 301]), st.just(0)),
        st.tuples(st.just("carry"), st.just(0), st.just(0)),
        st.tuples(st.just("takeover"), st.integers(1, 2), st.just(0)),
        st.tuples(st.just("power cut"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


class Model:
    """The expected content of the log, and a broker that receives the same steps."""

    def __init__(self, kinds: Sequence[WalKind] = (WalKind.OBJECTS,)) -> None:
        """`kinds`: the storage of the log of each broker, in turn."""
        self.clock = ManualClock()
        self.kinds = itertools.cycle(kinds)
        self.store = MemoryStore(self.clock, is_local=True, has_files=True)
        wal_cleaner = WalCleanerLimits(
            checkpoint_every_objects=2,
            checkpoint_every_seconds=1e9,
            trim_grace_seconds=GRACE_SECONDS,
            carry_after_seconds=CARRY_SECONDS,
            carry_bytes=400,
        )
        options = RigOptions(
            hot_bytes=1_500,
            wal_cleaner=wal_cleaner,
            commit_bytes=500,
            file_bytes=300,
            log=next(self.kinds),
        )
        self.rig = Rig(self.store, self.clock, options=options)
        self.rig.create("t", 2)
        self.follower = RootFollower(self.store, clock=self.clock)
        self.log: list[list[bytes]] = [[], []]
        self.sent: list[list[tuple[int, list[str], int]]] = [[], []]
        self.sequence = [0, 0]
        self.batches: list[list[tuple[int, list[str]]]] = []

    def step(self, what: str, first: int, second: int) -> None:
        match what:
            case "append":
                self.append(first, second)
            case "retry" if second < len(self.sent[first]):
                sequence, values, offset = self.sent[first][-1 - second]
                again = self.rig.append(values, partition=first, producer_sequence=(1, 0, sequence))
                assert (again.base_offset, again.duplicate) == (offset, True)
            case "adopt":
                self.append_staged(first, second)
            case "publish":
                self.rig.publisher.publish(self.rig.led_partitions.topic("t"))
            case "checkpoint":
                self.rig.wal_cleaner.checkpoint()
            case "tick":
                self.clock.advance(first)
                self.rig.wal_cleaner.tick()
            case "carry":
                self.clock.advance(CARRY_SECONDS + 1)
                self.rig.wal_cleaner.checkpoint()
                carry(self.rig)
            case "takeover":
                self.take_over(first)
            case "power cut":
                self.store.lose_unsynced(lambda _: True)
                self.take_over(self.rig.leadership.broker)

    def take_over(self, broker: int) -> None:
        """Starts another broker, whose log may be of another kind."""
        options = dataclasses.replace(self.rig.options, log=next(self.kinds))
        self.rig = Rig(self.store, self.clock, broker=broker, options=options)

    def append(self, partition: int, count: int) -> None:
        base = len(self.log[partition])
        values = [f"{partition}:{base + number}" for number in range(count)]
        sequence = self.sequence[partition]
        result = self.rig.append(values, partition=partition, producer_sequence=(1, 0, sequence))
        assert (result.base_offset, result.duplicate) == (base, False)
        self.sent[partition].append((sequence, values, base))
        self.sequence[partition] += count
        self.log[partition] += [value.encode() for value in values]

    def append_staged(self, age: int, partition: int) -> None:
        """Appends a new batch of a query, or, with an age, repeats an earlier one."""
        if age and age <= len(self.batches):
            number = len(self.batches) - age
            assert all(
                each.duplicate
                for each in self.rig.append_staged(self.batches[number], batch=number)
            )
            return
        number = len(self.batches)
        sections = [(partition, [f"batch {number}"]), (0, ["x", "y"]), (1, ["z"])]
        self.batches.append(sections)
        assert not any(each.duplicate for each in self.rig.append_staged(sections, batch=number))
        for place, values in sections:
            self.log[place] += [value.encode() for value in values]

    def expected(self, partition: int) -> list[Row]:
        return list(enumerate(self.log[partition]))

    def check(self) -> None:
        assert self.rig.led_partitions.bounds() == bounds_of_all(self.rig)
        for partition in (0, 1):
            expected = self.expected(partition)
            assert self.rig.read(partition=partition) == expected
            assert rows_of_root(self.store, self.clock, partition=partition) == expected
            assert rows_followed(self.follower, self.store, partition=partition) == expected


@pytest.mark.parametrize(
    "kinds", [["objects"], ["segments"], ["objects", "segments"]], ids="-".join
)
@settings(max_examples=40)
@given(taken=steps)
def test_no_upkeep_changes_the_log(kinds: list[str], taken: list[tuple[str, int, int]]) -> None:
    """The log reads the same after any appends, commits, checkpoints, trims and takeovers.

    Also where the logs of consecutive brokers are of different kinds.
    """
    with mock.patch("sparklog.storage.wal.segments.SEGMENT_BYTES", 5 * BLOCK_BYTES):
        run_steps([WalKind(each) for each in kinds], taken)


def run_steps(kinds: Sequence[WalKind], taken: list[tuple[str, int, int]]) -> None:
    """Takes the steps, and then removes all that can be removed."""
    model = Model(kinds)
    for step in taken:
        model.step(*step)
        model.check()
    # And in the end there is nothing left but the tables.
    model.take_over(model.rig.leadership.broker)
    rig = model.rig
    model.check()
    rig.publish()
    rig.trim()
    rig.trim()
    for partition in (0, 1):
        found = rows_of_table(model.store, model.clock, partition=partition)
        assert found == model.expected(partition)
    own = rig.leadership
    assert rig.meta.reload().open_epochs == (Epoch(own.broker, own.epoch, own.log),)
    assert len(objects(rig)) == 1
    for broker, epoch in {
        (int(name.split("/")[0]), int(name.split("/")[1])) for name in paths(model.store, "wal")
    } - {(rig.leadership.broker, rig.leadership.epoch)}:
        (fence,) = paths(model.store, wal.folder(broker, epoch))
        assert fence.isdigit()


def test_brokers_that_live_for_seconds_free_their_epochs(clock: ManualClock) -> None:
    """None lives until a checkpoint, a check of its files, or a deletion is due; with records."""
    options = RigOptions(
        hot_bytes=0,
        confirm_after_seconds=10.0,
        wal_cleaner=dataclasses.replace(EAGER, checkpoint_every_objects=1_000),
    )
    rig = Rig(MemoryStore(clock, is_local=True), clock, options=options)
    rig.create("t", 1)
    most_open = most_kept = 0
    for life in range(40):
        rig.append([f"{life}"])
        rig.publish()
        rig.wal_cleaner.tick()
        clock.advance(4.0)
        rig = rig.successor()
        most_open = max(most_open, len(open_ids(rig.meta)))
        folders = [paths(rig.store, f"wal/1/{name}") for name in rig.store.folders("wal/1")]
        most_kept = max(most_kept, sum(len(names) > 1 for names in folders))  # a fence stays
    assert most_open <= INHERITED_EPOCHS + 2
    assert most_kept <= most_open + CLOSED_EPOCHS + 2
    assert [value for _, value in rig.read()] == [b"%d" % life for life in range(40)]


@pytest.mark.parametrize("closed", [5, 8, 10])
def test_a_start_deletes_no_epoch_that_was_just_closed(clock: ManualClock, closed: int) -> None:
    """Readers may have planned to read the newest ones; those beyond are long gone."""
    rig = Rig(MemoryStore(clock, is_local=True), clock, options=RigOptions(wal_cleaner=EAGER))
    for _ in range(closed):
        rig.append(["a"]) if rig.led_partitions.topics() else rig.create("t", 1)
        rig.publish()
        rig.wal_cleaner.checkpoint()
        rig.wal_cleaner._close_inherited()
        rig = rig.successor()
    rig.append(["a"])
    rig.publish()
    rig.wal_cleaner.tick()
    left = [len(paths(rig.store, f"wal/1/{name}")) > 1 for name in rig.store.folders("wal/1")]
    assert sum(left) >= min(closed, CLOSED_EPOCHS)
    assert len(left) - sum(left) <= max(closed - CLOSED_EPOCHS, 0)


@pytest.mark.parametrize(("seconds", "confirmed"), [((11.0, 1.0), 1), ((1.0, 1.0), 0)])
def test_only_old_commits_of_a_predecessor_are_confirmed_at_once(
    clock: ManualClock, seconds: tuple[float, ...], confirmed: int
) -> None:
    """A VACUUM that began before a young one may still take its file."""
    options = RigOptions(hot_bytes=0, confirm_after_seconds=10.0)
    rig = Rig(MemoryStore(clock, is_local=True), clock, options=options)
    rig.create("t", 1)
    for each in seconds:
        rig.append(["a"])
        rig.publish()
        clock.advance(each)
    rig = rig.successor()
    rig.confirmer.confirm()
    assert rig.led_partitions.backlog.unconfirmed_count == len(seconds) - confirmed
