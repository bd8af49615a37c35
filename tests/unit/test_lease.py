from __future__ import annotations

import contextlib
from unittest import mock

import pyarrow as pa
import pytest

from sparklog import errors
from sparklog.broker import lease as leases
from sparklog.clock import ManualClock
from sparklog.storage import wal
from sparklog.storage.liveness import Heartbeat, write_heartbeat
from sparklog.storage.meta import Epoch, MetaStore
from sparklog.storage.objects import Fault, MemoryStore, ScriptedFaults, SyncFailed
from sparklog.storage.processes import this_process
from sparklog.storage.snapshot import Entry, Kind, WalPosition
from sparklog.storage.table import Change, Table
from tests.support.brokers import GRACE_SECONDS, Rig, flip, paths, rows_of_root, rows_of_table

LOG = "topics/t/_delta_log"


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root."""
    return MemoryStore(clock)


@pytest.fixture
def rig(store: MemoryStore, clock: ManualClock) -> Rig:
    """A broker with topic t of one partition."""
    found = Rig(store, clock)
    found.create()
    return found


def acquire(
    store: MemoryStore, clock: ManualClock, broker: int = 1, *, take_over: bool = False
) -> leases.Lease:
    """The next epoch, if nobody is in the way."""
    meta = MetaStore(store, clock=clock)
    return leases.acquire(
        store,
        meta,
        broker=broker,
        flight=f"h:{broker}",
        clock=clock,
        dead_after_seconds=5.0,
        process=this_process(),
        take_over=take_over,
    )


def beat(store: MemoryStore, clock: ManualClock, broker: int = 1) -> None:
    """That broker is alive, in its first epoch."""
    heartbeat = Heartbeat(
        broker=broker,
        epoch=1,
        flight=f"h:{broker}",
        at_us=clock.now_us(),
        monotonic_seconds=clock.monotonic(),
        process=this_process(),
    )
    write_heartbeat(store, heartbeat)


# ------------------------------------------------------------------------------ the right to write


def test_epochs_rise(store: MemoryStore, clock: ManualClock) -> None:
    """Each start takes the next epoch of its id, and inherits all that are open, oldest first."""
    found = [acquire(store, clock, broker, take_over=True) for broker in (1, 1, 2, 1)]
    assert [(each.broker, each.epoch) for each in found] == [(1, 1), (1, 2), (2, 1), (1, 3)]
    assert found[-1].inherited == (Epoch(1, 1), Epoch(1, 2), Epoch(2, 1))
    metadata = MetaStore(store, clock=clock).reload()
    assert (metadata.controller, metadata.brokers[1].flight) == (1, "h:1")


def test_a_living_broker_is_in_the_way(store: MemoryStore, clock: ManualClock) -> None:
    """A second id on the root is refused, with the first one's address, and changes nothing."""
    acquire(store, clock, 1)
    beat(store, clock, 1)
    before = paths(store, "")
    with pytest.raises(errors.BrokerAlive) as refused:
        acquire(store, clock, 2)
    assert (refused.value.broker, refused.value.address) == (1, "h:1")
    assert paths(store, "") == before
    clock.advance(5.1)
    assert acquire(store, clock, 2).inherited == (Epoch(1, 1),)


def test_the_same_id_is_refused_too(store: MemoryStore, clock: ManualClock) -> None:
    """A live broker's id that is started again is refused, unless it was told to take over."""
    acquire(store, clock, 1)
    beat(store, clock, 1)
    with pytest.raises(errors.BrokerAlive):
        acquire(store, clock, 1)
    assert acquire(store, clock, 1, take_over=True).epoch == 2


def test_leader_epochs_rise(rig: Rig) -> None:
    """A takeover is a new leader epoch of every partition."""
    second = rig.successor(broker=2)
    (partition,) = second.meta.current.topic("t").partitions
    assert (partition.leader, partition.leader_epoch) == (2, 1)
    assert second.core.describe("t").partitions[0].leader_epoch == 1


def test_the_older_one_can_do_nothing_any_more(rig: Rig) -> None:
    """After a takeover the predecessor acks nothing, and changes neither topics nor epochs."""
    rig.append(["a"])
    rig.successor()
    for attempt in (
        lambda: rig.append(["b"]),
        lambda: rig.create("u"),
        lambda: rig.core.delete_topic("t"),
        rig.core.new_producer,
        lambda: leases.close_epochs(rig.meta, rig.lease, (Epoch(1, 2),)),
    ):
        with pytest.raises(errors.BrokerFenced):
            attempt()
    metadata = MetaStore(rig.store, clock=rig.clock).reload()
    assert (sorted(metadata.topics), metadata.open_epochs) == (["t"], (Epoch(1, 1), Epoch(1, 2)))
    assert rows_of_root(rig.store, rig.clock) == [(0, b"a")]


def test_a_start_that_is_overtaken_serves_nobody(store: MemoryStore, clock: ManualClock) -> None:
    """Of two that start, the one whose epoch is fenced before it began is told so."""
    slow = acquire(store, clock)
    Rig(store, clock)
    log = wal.Appender(store, broker=1, epoch=slow.epoch, clock=clock)
    with pytest.raises(errors.BrokerFenced):
        log.append([(Entry(kind=Kind.OPEN), wal.EMPTY)])


# ------------------------------------------------------------------------------ what is found


def test_everything_acked_is_found(rig: Rig) -> None:
    """Published or not, in whatever epoch, records keep their offsets, and the log goes on."""
    rig.append(["a", "b"])
    rig.publish()
    rig.append(["c"])
    second = rig.successor(broker=2)
    second.append(["d"])
    third = second.successor(broker=1)
    assert third.append(["e"]).base_offset == 4
    expected = [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d"), (4, b"e")]
    assert third.read() == rows_of_root(rig.store, rig.clock) == expected
    third.publish()
    assert rows_of_table(rig.store, rig.clock) == expected


def test_producers_are_remembered(rig: Rig) -> None:
    """Whether their batches are published, trimmed or neither, retries are known ever after."""
    stamps = [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    rig.append(["published and trimmed"], stamp=stamps[0])
    rig.adopt([(0, ["staged"])], batch=1)
    rig.publish()
    rig.trim()
    rig.append(["published"], stamp=stamps[1])
    rig.publish()
    rig.append(["neither"], stamp=stamps[2])
    for broker in (2, 1):
        rig = rig.successor(broker=broker)
        for stamp, offset in zip(stamps, (0, 2, 3), strict=True):
            again = rig.append(["again"], stamp=stamp)
            assert (again.base_offset, again.duplicate) == (offset, True)
        assert rig.adopt([(0, ["staged"])], batch=1)[0].duplicate
        rig.trim()
    assert rig.end() == 4


def test_the_newest_epochs_memory_counts(rig: Rig) -> None:
    """A producer that wrote under two brokers goes on after its newest batch."""
    rig.append(["a"], stamp=(1, 0, 0))
    rig.trim()
    second = rig.successor()
    second.append(["b"], stamp=(1, 0, 1))
    third = second.successor()
    assert third.append(["b"], stamp=(1, 0, 1)).duplicate
    assert third.append(["a"], stamp=(1, 0, 0)).duplicate
    assert not third.append(["c"], stamp=(1, 0, 2)).duplicate


def test_producers_are_forgotten_after_a_day(rig: Rig, clock: ManualClock) -> None:
    """Who has not written for so long begins anew."""
    rig.append(["a"], stamp=(1, 0, 0))
    clock.advance(24 * 3600.0 + 1)
    rig.append(["b"], stamp=(2, 0, 0))
    rig.keeper.checkpoint()
    successor = rig.successor()
    assert successor.append(["b"], stamp=(2, 0, 0)).duplicate
    assert not successor.append(["c"], stamp=(1, 0, 0)).duplicate


def test_a_broker_that_stops_while_it_starts_changes_nothing(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """Wherever a takeover breaks off, the next one finds everything."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"], stamp=(1, 0, 0))
    down = errors.StorageUnavailable(operation="?", path="?", reason="down")
    starts = 0
    for operation in ("put_new", "get", "get_range", "list_after"):
        for count in range(1, 30):
            fault = Fault(operation=operation, error=down, count=count)
            try:
                Rig(store.view(ScriptedFaults(fault)), clock)
            except (errors.StorageUnavailable, errors.OutcomeUnknown):
                starts += 1
                continue
            break
    assert starts > 10
    last = Rig(store, clock)
    assert last.append(["b"], stamp=(1, 0, 0)).duplicate
    assert last.read() == [(0, b"a"), (1, b"b")]


# ------------------------------------------------------------------------------ what is damaged


def test_a_corrupt_object_stops_the_start(rig: Rig, store: MemoryStore) -> None:
    """The next broker names the object, and does not begin without what it holds."""
    rig.append(["a"])
    damaged = f"wal/1/0000000001/{1:020d}"
    flip(store, damaged, 20)
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            rig.successor()
        assert corrupt.value.path == damaged
    flip(store, damaged, 20)
    assert rig.successor().read() == [(0, b"a")]


def test_a_corrupt_entry_stops_its_partition_only(rig: Rig, store: MemoryStore) -> None:
    """Where just an entry's bytes are damaged, the broker begins, and serves what precedes them."""
    rig.create("u")
    rig.append(["a"])
    rig.append(["b"])
    rig.append(["x"], topic="u")
    located = list(rig.ledger.topic("t").partition(0).unpublished)[1]
    path = wal.object_path(located.at)
    flip(store, path, located.origin + located.entry.length - 20)
    successor = rig.successor()
    assert successor.read("u") == [(0, b"x")]
    first = next(successor.core.read("t", 0, 0, 1))
    assert first.rows.column("value").to_pylist() == [b"a"]
    with pytest.raises(errors.CorruptObject) as corrupt:
        successor.read("t", start=1)
    assert corrupt.value.path == path
    assert successor.append(["c"]).base_offset == 2


def test_a_hole_is_named(rig: Rig, store: MemoryStore) -> None:
    """Where acked records are in neither table nor log, the next broker says which."""
    rig.append(["a"])
    rig.append(["b"])
    rig.keeper.checkpoint()
    store.delete([f"wal/1/0000000001/{1:020d}"])
    with pytest.raises(errors.MissingObject) as missing:
        rig.successor()
    assert missing.value.path == f"wal/1/0000000001/{1:020d}"


def test_a_table_that_was_set_back_blocks_its_partition(rig: Rig, store: MemoryStore) -> None:
    """Offsets that a table has lost are told, and given to nobody else; the others go on."""
    rig.create("u", 2)
    rig.append(["a"])
    rig.publish()
    rig.trim()
    rig.append(["b"])
    rig.append(["x"], topic="u", partition=1)
    lost = f"{LOG}/{1:020d}.json"
    commit = store.get(lost)
    store.delete([lost])
    broker = rig
    for _ in range(2):
        broker = broker.successor()
        with pytest.raises(errors.TopicHeldBack) as refused:
            broker.append(["c"])
        assert "t-0, offsets 0 to 1" in refused.value.reason
        with pytest.raises(errors.MissingObject) as missing:
            broker.publisher.publish(broker.ledger.topic("t"))
        assert missing.value.path == "t-0, offsets 0 to 1"
        broker.append(["y"], topic="u", partition=1)
        broker.publisher.publish(broker.ledger.topic("u"))
        broker.trim()
    store.put_new(lost, commit)
    broker.ledger.topic("t").held_back = "as the agent notes it"
    broker.publisher.publish(broker.ledger.topic("t"))
    assert broker.append(["c"]).base_offset == 2
    assert broker.read() == [(0, b"a"), (1, b"b"), (2, b"c")]
    broker.publish()
    assert rows_of_table(store, rig.clock) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert rows_of_table(store, rig.clock, "u", 1) == [(0, b"x"), (1, b"y"), (2, b"y")]


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_offsets_go_on_where_a_table_is_missing(
    rig: Rig, store: MemoryStore, *, is_trimmed: bool
) -> None:
    """The write-ahead logs' checkpoints tell where the partitions of a lost table end."""
    rig.append(["a", "b"])
    if is_trimmed:
        rig.publish()
        rig.trim()
    rig.append(["c"])
    store.delete([f"topics/t/{name}" for name in paths(store, "topics/t")])
    for offset in (3, 4):
        rig = rig.successor()
        topic = rig.ledger.topic("t")
        assert topic.held_back is not None
        assert topic.partition(0).published == (2 if is_trimmed else 0)
        assert rig.append(["d"]).base_offset == offset
        with pytest.raises(errors.ForeignTable):
            rig.publish()
        rig.keeper.checkpoint()


def test_an_end_that_nobody_knows_blocks_its_partition(rig: Rig, store: MemoryStore) -> None:
    """Where neither table nor checkpoint tells it, writes are refused until the table does."""
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    with mock.patch.object(rig.ledger, "bounds", return_value=None):  # as an earlier release wrote
        rig.trim()
    rig.append(["b"])
    hidden = {
        f"topics/t/{name}": store.get(f"topics/t/{name}") for name in paths(store, "topics/t")
    }
    store.delete(hidden)
    for _ in range(2):
        rig = rig.successor()
        with pytest.raises(errors.TopicHeldBack) as refused:
            rig.append(["c"])
        assert "the end of t-0" in refused.value.reason
        rig.append(["x"], topic="u")
        rig.trim()
    for path, data in hidden.items():
        store.put_new(path, data)
    rig.publisher.publish(rig.ledger.topic("t"))
    assert rig.append(["c"]).base_offset == 2
    assert rig.read() == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_power_cut_below_a_foreign_commit_gives_no_offset_twice(clock: ManualClock) -> None:
    """A hole in one table's log, as a power cut can leave it, holds back that topic alone."""
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock)
    rig.create()
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    rig.trim()
    rig.append(["b"])
    died = SyncFailed("?", "the process dies between link and fsync")
    fault = Fault(operation="put_new", error=died, moment="between", prefix=LOG)
    rig.publisher.table(rig.ledger.topic("t")).store = store.view(ScriptedFaults(fault))
    with pytest.raises(SyncFailed):
        rig.publish()
    store.put_new(f"{LOG}/{3:020d}.json", b'{"commitInfo": {"operation": "OPTIMIZE"}}\n')
    store.lose_unsynced(lambda _: True)
    second = rig.successor()
    assert second.append(["x"], topic="u").base_offset == 0
    assert second.append(["c"]).base_offset == 2
    with pytest.raises(errors.Corrupt):
        second.publisher.publish(second.ledger.topic("t"))
    second.publisher.publish(second.ledger.topic("u"))
    assert rows_of_table(store, clock, "u") == [(0, b"x")]
    store.delete([f"{LOG}/{3:020d}.json"])
    second.publish()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowInvalid("a checkpoint"),
        MemoryError("a checkpoint"),
        errors.RootNotWritable(root="s3://b", reason="403"),
        AssertionError("no rows"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_wrong_with_one_table_the_others_are_served(
    rig: Rig, store: MemoryStore, error: Exception
) -> None:
    """A surprise in one topic's table holds that topic back, by name, and no other."""
    rig.create("u")
    rig.append(["a"])
    rig.append(["x"], topic="u")
    fault = Fault(operation="list_after", error=error, prefix="topics/t")
    second = rig.successor(store=store.view(ScriptedFaults(fault)))
    reason = second.ledger.topic("t").held_back
    assert reason is not None
    assert str(error) in reason
    assert second.ledger.topic("u").held_back is None
    assert second.append(["b"]).base_offset == 1
    second.publish()  # it was out of sorts only once
    assert rows_of_table(store, rig.clock) == [(0, b"a"), (1, b"b")]


def test_a_torn_table_does_not_stop_the_start(rig: Rig, store: MemoryStore) -> None:
    """The topic goes on in the log, held back with the reason, until its table is mended."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    torn = f"{LOG}/{2:020d}.json"
    store.put(torn, b'{"add": {"pa')
    successor = rig.successor()
    reason = successor.ledger.topic("t").held_back
    assert reason is not None
    assert torn in reason
    assert successor.append(["c"]).base_offset == 2
    assert successor.read() == [(0, b"a"), (1, b"b"), (2, b"c")]
    with pytest.raises(errors.CorruptObject):
        successor.publish()
    store.delete([torn])
    successor.publish()
    assert rows_of_table(store, rig.clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


@pytest.mark.parametrize("how", ["protocol", "topic id", "partitions"])
def test_a_foreign_table_does_not_stop_the_start(
    rig: Rig, store: MemoryStore, clock: ManualClock, how: str
) -> None:
    """A table that somebody has made unusable holds its topic back; the offsets go on."""
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    spoiled = f"{LOG}/{2:020d}.json"
    if how == "protocol":
        store.put(spoiled, b'{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7}}\n')
    else:
        properties: dict[str, str | None] = (
            {"sparklog.topicId": None} if how == "topic id" else {"sparklog.partitions": "0"}
        )
        with contextlib.suppress(errors.ForeignTable):  # it sees what it has done
            Table(store, "t", clock=clock).commit(lambda _: Change(properties=properties))
    successor = rig.successor()
    assert successor.ledger.topic("t").held_back is not None
    assert successor.ledger.topic("u").held_back is None
    assert successor.append(["c"]).base_offset == 2
    with pytest.raises(errors.Corrupt):
        successor.publish()
    with pytest.raises(errors.ForeignTable):
        rows_of_table_through(successor)
    store.delete([spoiled])
    mended = successor.successor()
    mended.publish()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


def rows_of_table_through(rig: Rig) -> None:
    """What a client gets that asks for records which are only in the table."""
    for _ in rig.core.read("t", 0, 0, 1):
        pass


def test_old_epochs_end(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """Brokers that come and go without a record leave nothing to read for those who follow."""
    for _ in range(5):
        rig = rig.successor()
        rig.keeper.checkpoint()
        rig.keeper.tick()
    assert rig.meta.reload().open_epochs == (Epoch(1, rig.lease.epoch),)
    clock.advance(GRACE_SECONDS)
    rig.keeper.tick()
    closed = [name for name in paths(store, "wal/1") if not name.startswith(f"{6:010d}")]
    assert len(closed) == 5
    for name in closed:
        epoch, _, sequence = name.partition("/")
        found = wal.read_object(store, WalPosition(1, int(epoch), int(sequence)))
        assert found.is_fence
