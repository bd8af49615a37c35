from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker.log import recovery, takeover
from sparklog.clock import Clock, ManualClock
from sparklog.formats import flight_messages
from sparklog.storage import wal
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.format import (
    Delta,
    content_of,
    decode_version,
    encode_delta,
    encode_snapshot,
)
from sparklog.storage.metadata.liveness import Heartbeat, write_heartbeat
from sparklog.storage.metadata.model import ClusterMetadata, Epoch, TopicMetadata
from sparklog.storage.metadata.processes import Process, this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Fault, MemoryStore, NoFaults, ScriptedFaults, Store, SyncFailed
from sparklog.storage.objects.faults import Moment, Operation
from sparklog.storage.snapshot import Bounds, Entry, EntryKind, WalKind, WalPosition
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal import objects
from sparklog.storage.wal.base import object_path
from sparklog.storage.wal.objects import ObjectAppender
from tests.support.brokers import (
    GRACE_SECONDS,
    Rig,
    flip,
    open_ids,
    paths,
    registration,
    rows_of_root,
    rows_of_table,
)

LOG = "topics/t/_delta_log"


def acquire(
    store: MemoryStore, clock: ManualClock, broker: int = 1, *, take_over: bool = False
) -> takeover.Leadership:
    """Takes the root over, unless a live leader refuses it."""
    meta = MetadataStore(store, clock=clock)
    leadership = register(meta, store, clock, broker, take_over=take_over)
    return takeover.take(store, meta, leadership, clock=clock).leadership


def register(
    meta: MetadataStore,
    store: Store,
    clock: Clock,
    broker: int,
    *,
    take_over: bool = True,
    is_member: bool = False,
) -> takeover.Leadership:
    """Registers the next epoch, and takes nothing over yet."""
    return takeover.acquire(
        store,
        meta,
        broker,
        registration(broker, process=this_process(), is_member=is_member),
        clock=clock,
        take_over=take_over,
    )


def lead(meta: MetadataStore, broker: int) -> None:
    """Creates a topic in the metadata, led by that broker."""
    topic = TopicMetadata(topic_id="id", leaders=(broker,), leader_epochs=(0,))
    meta.change(lambda before: msgspec.structs.replace(before, topics={"t": topic}))


def beat(store: MemoryStore, clock: ManualClock, broker: int = 1) -> None:
    """Writes a heartbeat of that broker in its first epoch."""
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
    """Each start takes the next epoch of its id, and inherits all open epochs, oldest first."""
    found = [acquire(store, clock)]
    lead(MetadataStore(store, clock=clock), 1)
    found += [acquire(store, clock, broker, take_over=True) for broker in (1, 2, 1)]
    assert [(each.broker, each.epoch) for each in found] == [(1, 1), (1, 2), (2, 1), (1, 3)]
    assert [each.id for each in found[-1].inherited] == [(1, 1), (1, 2), (2, 1)]
    assert {(each.fenced, each.heirs) for each in found[-1].inherited} == {(True, (1,))}
    metadata = MetadataStore(store, clock=clock).reload()
    assert (metadata.controller, metadata.brokers[1].flight) == (1, "h:1")


def test_a_live_broker_refuses_a_second_id(store: MemoryStore, clock: ManualClock) -> None:
    """A second id is refused with the live broker's address and the setting; nothing changes."""
    acquire(store, clock, 1)
    beat(store, clock, 1)
    before = paths(store, "")
    with pytest.raises(errors.BrokerAlive) as refused:
        acquire(store, clock, 2)
    assert (refused.value.broker, refused.value.address) == (1, "h:1")
    assert str(refused.value).endswith(" share a root unless one of them has cluster.join = false.")
    assert paths(store, "") == before
    clock.advance(5.1)
    assert [each.id for each in acquire(store, clock, 2).inherited] == [(1, 1)]


def test_silent_members_are_waited_for_together(store: MemoryStore, clock: ManualClock) -> None:
    """A broker that leads alone starts after the time of one of them, however many have died."""
    for broker in (1, 2, 3):
        takeover.acquire(
            store,
            MetadataStore(store, clock=clock),
            broker,
            registration(broker, process=Process(host="elsewhere", pid=broker), is_member=True),
            clock=clock,
        )
    began = clock.monotonic()
    found = acquire(store, clock, 9)
    assert {each.broker for each in found.inherited} == {1, 2, 3}
    assert 5.0 < clock.monotonic() - began < 6.0


def test_the_same_id_is_refused_too(store: MemoryStore, clock: ManualClock) -> None:
    """A second start with the id of a live broker is refused, unless `take_over` is set."""
    acquire(store, clock, 1)
    beat(store, clock, 1)
    with pytest.raises(errors.BrokerAlive, match=r"different --id share a root\.$"):
        acquire(store, clock, 1)
    assert acquire(store, clock, 1, take_over=True).epoch == 2


def test_leader_epochs_rise(rig: Rig) -> None:
    """A takeover begins a new leader epoch of every partition."""
    second = rig.successor(broker=2)
    topic = second.meta.current.topic("t")
    assert (topic.leaders, topic.leader_epochs) == ((2,), (1,))
    assert second.broker.topics.describe("t").partitions[0].leader_epoch == 1


def test_a_replaced_broker_can_change_nothing(rig: Rig) -> None:
    """After a takeover the predecessor can ack nothing, and change neither topics nor epochs."""
    rig.append(["a"])
    rig.successor()
    for attempt in (
        lambda: rig.append(["b"]),
        lambda: rig.create("u"),
        lambda: rig.broker.topics.delete("t"),
        rig.broker.producer_ids.new,
        lambda: takeover.leave_epochs(rig.meta, rig.leadership, (Epoch(1, 2),), covered={}),
    ):
        with pytest.raises(errors.BrokerFenced):
            attempt()
    metadata = MetadataStore(rig.store, clock=rig.clock).reload()
    assert sorted(metadata.topics) == ["t"]
    assert open_ids(rig.meta) == [(1, 1), (1, 2)]
    assert rows_of_root(rig.store, rig.clock) == [(0, b"a")]


def test_a_broker_that_wakes_in_a_removed_epoch_is_fenced(clock: ManualClock) -> None:
    """Its segments were removed with their fence, and nothing refuses its first flush."""
    store = MemoryStore(clock, is_local=True, has_files=True)
    meta = MetadataStore(store, clock=clock)
    first, second = (
        takeover.acquire(
            store,
            meta,
            broker,
            registration(broker),
            clock=clock,
            take_over=True,
            choose_log=lambda: WalKind.SEGMENTS,
        )
        for broker in (1, 2)
    )
    log = wal.of(store, clock, WalKind.SEGMENTS)
    second = takeover.take(store, meta, second, clock=clock).leadership
    takeover.leave_epochs(meta, second, second.inherited, covered={})
    store.delete(log.retired(lambda: ()))
    log.appender(first.broker, first.epoch).append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
    with pytest.raises(errors.BrokerFenced):
        takeover.check_opened(MetadataStore(store, clock=clock), first)
    log.appender(second.broker, second.epoch).append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
    takeover.check_opened(meta, second)


def test_a_start_that_is_overtaken_raises(store: MemoryStore, clock: ManualClock) -> None:
    """A broker whose epoch is fenced before it began raises `BrokerFenced`."""
    slow = acquire(store, clock)
    Rig(store, clock)
    log = wal.of(store, clock).appender(1, slow.epoch)
    with pytest.raises(errors.BrokerFenced):
        log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])


# ------------------------------------------------------------------------------ steps of a start


class Killed(BaseException):
    """The process ends."""


@pytest.mark.parametrize("broker", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_a_start_that_is_killed_is_repeated(
    rig: Rig, broker: int, number: int, moment: Moment
) -> None:
    """Between any two steps: the next start finds every record, and leads all in a new epoch."""
    rig.append(["a"])
    kill = Fault(operation="put_new", error=Killed(), moment=moment, count=number + 1)
    assert isinstance(rig.store, MemoryStore)
    with pytest.raises(Killed):
        rig.successor(broker=broker, store=rig.store.view(ScriptedFaults(kill)))
    metadata = MetadataStore(rig.store, clock=rig.clock).reload()
    is_registered = (number, moment) != (0, "before")
    has_taken = number > 2 or (number, moment) == (2, "after")
    assert (metadata.controller != 1 or metadata.brokers[1].epoch == 2) is is_registered
    assert metadata.topics["t"].leader_epochs == (int(has_taken),)
    third = rig.successor(broker=1)
    third.append(["b"])
    assert third.read() == rows_of_root(rig.store, rig.clock) == [(0, b"a"), (1, b"b")]
    assert third.meta.current.topics["t"].leader_epochs == (1 + int(has_taken),)
    third.publish()
    third.trim()
    assert open_ids(third.meta) == [(1, third.leadership.epoch)]


@pytest.mark.parametrize("number", range(1, 4))
def test_a_change_of_a_start_whose_outcome_is_unknown_is_made_again(rig: Rig, number: int) -> None:
    """A version that cannot be read back may be there; the start takes the root over either way."""
    rig.append(["a"])
    down = errors.StorageUnavailable(operation="?", path="?", reason="down")
    fault = Fault(operation="list_after", error=down, prefix="meta", count=number)
    assert isinstance(rig.store, MemoryStore)
    with capture_logs() as logged:
        try:
            second = rig.successor(broker=2, store=rig.store.view(ScriptedFaults(fault)))
        except errors.StorageUnavailable:
            second = rig.successor(broker=2)
    repeated = [line for line in logged if line["event"] == "repeating a change to the metadata"]
    assert len(repeated) == (number in (2, 3))
    second.append(["b"])
    assert second.read() == rows_of_root(rig.store, rig.clock) == [(0, b"a"), (1, b"b")]
    metadata = second.meta.reload()
    assert metadata.topics["t"].leaders == (2,)
    assert metadata.topics["t"].leader_epochs == (1,)
    with pytest.raises(errors.BrokerFenced):
        rig.append(["c"])


@pytest.mark.parametrize("is_member", [True, False])
def test_a_start_is_not_refused_by_its_own_registration(
    store: MemoryStore, clock: ManualClock, is_member: bool
) -> None:
    """It does not wait to see whether the broker of a first attempt is alive: it is that itself."""
    down = errors.StorageUnavailable(operation="?", path="?", reason="down")
    faulty = store.view(
        ScriptedFaults(Fault(operation="list_after", error=down, prefix="meta", count=2))
    )
    with capture_logs() as logged:
        first = register(
            MetadataStore(faulty, clock=clock),
            faulty,
            clock,
            1,
            take_over=False,
            is_member=is_member,
        )
    events = [line["event"] for line in logged]
    assert events == ["created a new log", "repeating a change to the metadata"]
    assert first.epoch == 2


class OneFolderIsDown(NoFaults):
    """A store that does not answer below a prefix, as a bucket's 503 or a broken disk's EIO."""

    def __init__(self, prefix: str) -> None:
        self.prefix: str | None = prefix

    def before(self, operation: Operation, path: str) -> None:
        if self.prefix is not None and path.startswith(self.prefix):
            raise errors.StorageUnavailable(operation=operation, path=path, reason="EIO")


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_table_whose_folder_does_not_answer_stops_no_other(rig: Rig, is_trimmed: bool) -> None:
    """Its topic is held back and continues in the log; it is published once its folder answers."""
    rig.create("u")
    for name in ("t", "u"):
        rig.append(["a"], topic=name)
    if is_trimmed:
        rig.publish()
        rig.trim()
    assert isinstance(rig.store, MemoryStore)
    faults = OneFolderIsDown("topics/u/")
    second = rig.successor(broker=2, store=rig.store.view(faults))
    assert second.append(["b"]).base_offset == 1
    assert second.read() == [(0, b"a"), (1, b"b")]
    topic = second.led_partitions.topic("u")
    assert topic.held_back is not None
    assert "EIO" in topic.held_back
    assert second.append(["b"], topic="u").base_offset == 1
    faults.prefix = None
    second.publish()
    assert rows_of_root(rig.store, rig.clock, "u") == [(0, b"a"), (1, b"b")]


def test_a_store_that_does_not_answer_at_all_fails_the_start(rig: Rig) -> None:
    """An outage holds no topic back: the next start finds all tables."""
    rig.append(["a"])
    assert isinstance(rig.store, MemoryStore)
    faults = OneFolderIsDown("topics/")
    view = rig.store.view(faults)
    read = recovery.refresh_all

    def fail_from_here(store: Store, tables: Sequence[TopicTable]) -> dict[str, Exception | None]:
        faults.prefix = ""
        return read(store, tables)

    with (
        mock.patch.object(recovery, "refresh_all", fail_from_here),
        pytest.raises(errors.StorageUnavailable),
    ):
        rig.successor(broker=2, store=view)


@pytest.mark.parametrize("second", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_of_two_starters_the_later_one_serves(
    store: MemoryStore, clock: ManualClock, second: int, steps: int
) -> None:
    """The earlier one raises `BrokerFenced` with the later one's name, wherever it was."""
    meta, other = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    acquire(store, clock)
    lead(meta, 1)
    first = register(meta, store, clock, 1)
    if steps > 0:
        first = takeover.take(store, meta, first, clock=clock).leadership
    log = wal.of(store, clock).appender(1, first.epoch)
    if steps > 1:
        log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
    later = register(other, store, clock, second)
    if not steps:
        with pytest.raises(errors.BrokerFenced, match=f"replaced by broker {second}"):
            takeover.take(store, meta, first, clock=clock)
    taken = takeover.take(store, other, later, clock=clock)
    assert taken.metadata.topics["t"].leaders == (second,)
    with pytest.raises(errors.BrokerFenced):
        log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
    with pytest.raises(errors.BrokerFenced, match=f"replaced by broker {second}"):
        takeover.check_leadership(meta.reload(), first)
    assert str(takeover.replaced(meta.current, first)).count(f"broker {second} (standing")


def test_a_registration_alone_takes_nothing(rig: Rig) -> None:
    """A leader that is about to be replaced serves until its log has a fence."""
    meta = MetadataStore(rig.store, clock=rig.clock)
    second = register(meta, rig.store, rig.clock, 2)
    rig.append(["a"])
    rig.create("u")
    rig.publish()
    takeover.check_leadership(rig.meta.reload(), rig.leadership)
    taken = takeover.take(rig.store, meta, second, clock=rig.clock)
    assert {each.leaders for each in taken.metadata.topics.values()} == {(2,)}
    with pytest.raises(errors.BrokerFenced):
        rig.append(["b"])
    assert rows_of_root(rig.store, rig.clock) == [(0, b"a")]


OLD = """{
  "version": 3, "change_id": "old",
  "brokers": {"1": {"epoch": 2, "flight": "h:1"}, "2": {"epoch": 1, "flight": "h:2"}},
  "open_epochs": [[1, 1, "objects"], [1, 2, "objects"], [2, 1, "objects"]], "controller": 2,
  "topics": {"t": {"topic_id": "id", "partitions": [{"leader": 2, "leader_epoch": 2}]}}
}"""


DELTA = Delta(version=3, change_id="old", previous="before", topics=())


def put_whole(store: MemoryStore, clock: ManualClock) -> None:
    """A root of format 1 or 2."""
    store.put(f"meta/{3:020d}.json", OLD.encode())


def put_snapshot(store: MemoryStore, clock: ManualClock) -> None:
    """A root of format 3, before epochs had heirs."""
    old = decode_version(3, pa.py_buffer(OLD.encode()))
    assert isinstance(old, ClusterMetadata)
    store.put(f"meta/{3:020d}.json", encode_delta(DELTA))
    store.put(f"meta/{3:020d}.snapshot", encode_snapshot(old, content_of(old)))


@pytest.mark.parametrize("put", [put_whole, put_snapshot])
@pytest.mark.parametrize("broker", [1, 2, 3])
def test_a_root_without_heirs_is_taken_over(
    store: MemoryStore, clock: ManualClock, put: Callable[..., None], broker: int
) -> None:
    """The leader had inherited every epoch, whether or not it came to fence them."""
    open_cluster(store, clock=clock, create=True)
    put(store, clock)
    found = acquire(store, clock, broker, take_over=True)
    assert [each.id for each in found.inherited] == [(1, 1), (1, 2), (2, 1)]
    for each in found.inherited:
        assert each.heirs == (broker,)
        assert wal.of(store, clock).follower(*each.id).poll()[-1].is_fence
    topic = MetadataStore(store, clock=clock).reload().topics["t"]
    assert (topic.leaders, topic.leader_epochs) == ((broker,), (3,))


# ------------------------------------------------------------------------------ recovery


def test_everything_acked_is_found(rig: Rig) -> None:
    """Records of every epoch, published or not, keep their offsets, and the log continues."""
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
    """A retry is recognised whether its batch is published, trimmed or neither."""
    sequences = [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    rig.append(["published and trimmed"], producer_sequence=sequences[0])
    rig.append_staged([(0, ["staged"])], batch=1)
    rig.publish()
    rig.trim()
    rig.append(["published"], producer_sequence=sequences[1])
    rig.publish()
    rig.append(["neither"], producer_sequence=sequences[2])
    for broker in (2, 1):
        rig = rig.successor(broker=broker)
        for producer_sequence, offset in zip(sequences, (0, 2, 3), strict=True):
            again = rig.append(["again"], producer_sequence=producer_sequence)
            assert (again.base_offset, again.duplicate) == (offset, True)
        assert rig.append_staged([(0, ["staged"])], batch=1)[0].duplicate
        rig.trim()
    assert rig.end() == 4


def test_the_newest_epochs_memory_counts(rig: Rig) -> None:
    """A producer that wrote under two brokers continues after its newest batch."""
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.trim()
    second = rig.successor()
    second.append(["b"], producer_sequence=(1, 0, 1))
    third = second.successor()
    assert third.append(["b"], producer_sequence=(1, 0, 1)).duplicate
    assert third.append(["a"], producer_sequence=(1, 0, 0)).duplicate
    assert not third.append(["c"], producer_sequence=(1, 0, 2)).duplicate


def test_the_newest_leaders_memory_counts(rig: Rig) -> None:
    """The leader epoch decides which checkpoint is newest, not the order of the starts."""
    rig.append(["a"], producer_sequence=(1, 0, 0))
    rig.wal_cleaner.checkpoint()
    second = rig.successor(broker=2)
    second.append(["b"], producer_sequence=(1, 0, 1))
    second.wal_cleaner.checkpoint()
    second.meta.change(
        lambda found: msgspec.structs.replace(found, open_epochs=found.open_epochs[::-1])
    )
    third = second.successor()
    assert [each.id for each in third.leadership.inherited] == [(2, 1), (1, 1)]
    assert third.append(["b"], producer_sequence=(1, 0, 1)).duplicate
    assert not third.append(["c"], producer_sequence=(1, 0, 2)).duplicate


def _without_epochs(bounds: Mapping[str, Sequence[Bounds]]) -> Mapping[str, Sequence[Bounds]]:
    return {
        topic_id: [Bounds(each.start, each.published, each.end) for each in partitions]
        for topic_id, partitions in bounds.items()
    }


def _without_ends(bounds: Mapping[str, Sequence[Bounds]]) -> Mapping[str, Sequence[Bounds]]:
    return {
        topic_id: [Bounds(each.start, each.published, -1) for each in partitions]
        for topic_id, partitions in bounds.items()
    }


@pytest.mark.parametrize("as_written", [_without_epochs, _without_ends, lambda _: None])
def test_checkpoints_of_older_releases_are_restored(
    rig: Rig, as_written: Callable[[Mapping[str, Sequence[Bounds]]], object]
) -> None:
    """They name no leader epochs, and some no ends: entries after them are added once."""
    put = ObjectAppender.checkpoint

    def put_older(
        self: ObjectAppender, sequence: int, needed: Any, state: bytes, bounds: Any
    ) -> None:
        put(self, sequence, needed, state, as_written(bounds))  # type: ignore[arg-type]

    with mock.patch.object(ObjectAppender, "checkpoint", put_older):
        for first in (0, 2):
            rig.append(["a"], producer_sequence=(1, 0, first))
            rig.append_staged([(0, ["b"])], batch=first)
            rig.wal_cleaner.checkpoint()
            rig.append(["c"], producer_sequence=(1, 0, first + 1))
            rig.append_staged([(0, ["d"])], batch=first + 1)
            rig = rig.successor()
    known = rig.led_partitions.topic("t").partitions[0].producers.get(1)
    assert known is not None
    assert [each.base_sequence for each in known.recent] == [0, 1, 2, 3]
    assert [each.base_offset for each in known.recent] == [0, 2, 4, 6]
    assert rig.append_staged([(0, ["d"])], batch=3)[0].duplicate
    assert rig.end() == 8


def test_producers_are_forgotten_after_a_day(rig: Rig, clock: ManualClock) -> None:
    """A producer that has been silent for a day may begin with any sequence again."""
    rig.append(["a"], producer_sequence=(1, 0, 0))
    clock.advance(24 * 3600.0 + 1)
    rig.append(["b"], producer_sequence=(2, 0, 0))
    rig.wal_cleaner.checkpoint()
    successor = rig.successor()
    assert successor.append(["b"], producer_sequence=(2, 0, 0)).duplicate
    assert not successor.append(["c"], producer_sequence=(1, 0, 0)).duplicate


def test_a_broker_that_stops_while_it_starts_changes_nothing(
    rig: Rig, store: MemoryStore, clock: ManualClock
) -> None:
    """A takeover that stops at any point leaves everything for the next one to find."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"], producer_sequence=(1, 0, 0))
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
    assert last.append(["b"], producer_sequence=(1, 0, 0)).duplicate
    assert last.read() == [(0, b"a"), (1, b"b")]


# ------------------------------------------------------------------------------ damage


def test_a_corrupt_object_stops_the_start(rig: Rig, store: MemoryStore) -> None:
    """A corrupt object stops the start, with an error that names the object."""
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
    """If only an entry's payload is corrupt, the broker starts and serves the entries before it."""
    rig.create("u")
    rig.append(["a"])
    rig.append(["b"])
    rig.append(["x"], topic="u")
    located = list(rig.led_partitions.topic("t").partition(0).unpublished)[1]
    path = object_path(located.at)
    flip(store, path, located.origin + located.entry.length - 20)
    successor = rig.successor()
    assert successor.read("u") == [(0, b"x")]
    first = next(successor.broker.read("t", 0, 0, 1))
    assert first.rows.column("value").to_pylist() == [b"a"]
    with pytest.raises(errors.CorruptObject) as corrupt:
        successor.read("t", start=1)
    assert corrupt.value.path == path
    assert successor.append(["c"]).base_offset == 2


def test_a_hole_is_named(rig: Rig, store: MemoryStore) -> None:
    """If acked records are in neither table nor log, the error names their offsets."""
    rig.append(["a"])
    rig.append(["b"])
    rig.wal_cleaner.checkpoint()
    store.delete([f"wal/1/0000000001/{1:020d}"])
    with pytest.raises(errors.MissingObject) as missing:
        rig.successor()
    assert missing.value.path == f"wal/1/0000000001/{1:020d}"


def test_a_table_that_was_set_back_blocks_its_partition(rig: Rig, store: MemoryStore) -> None:
    """Offsets that a table has lost are reported and not reused; other partitions are served."""
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
            broker.publisher.publish(broker.led_partitions.topic("t"))
        assert missing.value.path == "t-0, offsets 0 to 1"
        broker.append(["y"], topic="u", partition=1)
        broker.publisher.publish(broker.led_partitions.topic("u"))
        broker.trim()
    store.put_new(lost, commit)
    broker.led_partitions.topic("t").held_back = "as the agent notes it"
    broker.publisher.publish(broker.led_partitions.topic("t"))
    assert broker.append(["c"]).base_offset == 2
    assert broker.read() == [(0, b"a"), (1, b"b"), (2, b"c")]
    broker.publish()
    assert rows_of_table(store, rig.clock) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert rows_of_table(store, rig.clock, "u", 1) == [(0, b"x"), (1, b"y"), (2, b"y")]


def test_offsets_that_a_table_has_lost_are_not_reused(rig: Rig, store: MemoryStore) -> None:
    """Offsets are not reused even if all records were trimmed: the checkpoint knows the end."""
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    rig.trim()
    rig.append(["x"], topic="u")
    rig.trim()
    lost = f"{LOG}/{1:020d}.json"
    commit = store.get(lost)
    store.delete([lost])
    broker = rig.successor()
    with pytest.raises(errors.TopicHeldBack, match="t-0, offsets 0 to 1"):
        broker.append(["c"])
    store.put_new(lost, commit)
    with contextlib.suppress(errors.MissingObject):
        broker.publisher.publish(broker.led_partitions.topic("t"))
    assert rig.successor().append(["c"]).base_offset == 1


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_offsets_continue_if_a_table_is_missing(
    rig: Rig, store: MemoryStore, *, is_trimmed: bool
) -> None:
    """The checkpoint of the write-ahead log says where the partitions of a lost table end."""
    rig.append(["a", "b"])
    if is_trimmed:
        rig.publish()
        rig.trim()
    rig.append(["c"])
    store.delete([f"topics/t/{name}" for name in paths(store, "topics/t")])
    for offset in (3, 4):
        rig = rig.successor()
        topic = rig.led_partitions.topic("t")
        assert topic.held_back is not None
        assert topic.partition(0).published == (2 if is_trimmed else 0)
        assert rig.append(["d"]).base_offset == offset
        with pytest.raises(errors.ForeignTable):
            rig.publish()
        rig.wal_cleaner.checkpoint()


def test_an_unknown_end_blocks_its_partition(rig: Rig, store: MemoryStore) -> None:
    """If neither table nor checkpoint says where a partition ends, writes to it are refused."""
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    with mock.patch.object(
        rig.led_partitions, "bounds", return_value=None
    ):  # as an earlier release wrote
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
    rig.publisher.publish(rig.led_partitions.topic("t"))
    assert rig.append(["c"]).base_offset == 2
    assert rig.read() == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_power_cut_below_a_foreign_commit_gives_no_offset_twice(clock: ManualClock) -> None:
    """A hole in one table's log, such as a power cut can leave, holds back that topic alone."""
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
    rig.led_partitions.topic("t").table.store = rig.led_partitions.topic(
        "t"
    ).table.log_reader.store = store.view(ScriptedFaults(fault))
    with pytest.raises(SyncFailed):
        rig.publish()
    store.put_unflushed(f"{LOG}/{3:020d}.json", b'{"commitInfo": {"operation": "OPTIMIZE"}}\n')
    store.lose_unsynced(lambda path: path == f"{LOG}/{2:020d}.json")
    second = rig.successor()
    assert second.append(["x"], topic="u").base_offset == 0
    assert second.append(["c"]).base_offset == 2
    with pytest.raises(errors.Corrupt):
        second.publisher.publish(second.led_partitions.topic("t"))
    second.publisher.publish(second.led_partitions.topic("u"))
    assert rows_of_table(store, clock, "u") == [(0, b"x")]
    store.delete([f"{LOG}/{3:020d}.json"])
    second.publish()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_partitions_that_came_after_the_last_checkpoint_are_found(rig: Rig) -> None:
    """A partition that the last checkpoint does not name is recovered from the logs alone."""
    rig.append(["a"])
    rig.wal_cleaner.checkpoint()
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
    rig.append(["b"], partition=1)
    successor = rig.successor()
    assert successor.read() == [(0, b"a")]
    assert successor.read(partition=1) == [(0, b"b")]
    assert successor.append(["c"], partition=2).base_offset == 0


@pytest.mark.parametrize("when", ["before the start", "after the start", "before a look"])
def test_a_power_cut_takes_no_record_that_a_dead_brokers_commit_holds(
    clock: ManualClock, when: str
) -> None:
    """The log keeps the records of a commit that was seen before it was durable."""
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock)
    rig.create()
    rig.append(["a"])
    died = SyncFailed("?", "the process dies between link and fsync")
    fault = Fault(operation="put_new", error=died, moment="between", prefix=LOG)
    rig.led_partitions.topic("t").table.store = rig.led_partitions.topic(
        "t"
    ).table.log_reader.store = store.view(ScriptedFaults(fault))
    if when != "before the start":
        successor = rig.successor()
    with pytest.raises(SyncFailed):
        rig.publish()
    if when == "before the start":
        successor = rig.successor()
    elif when == "before a look":
        successor.led_partitions.topic("t").table.refresh()
    successor.publish()
    successor.trim()
    store.lose_unsynced(lambda _: True)
    assert successor.successor().read() == [(0, b"a")]


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
def test_an_error_in_one_table_does_not_affect_the_others(
    rig: Rig, store: MemoryStore, error: Exception
) -> None:
    """An unexpected error in one topic's table holds back that topic, by name, and no other."""
    rig.create("u")
    rig.append(["a"])
    rig.append(["x"], topic="u")
    fault = Fault(operation="list_after", error=error, prefix="topics/t")
    second = rig.successor(store=store.view(ScriptedFaults(fault)))
    reason = second.led_partitions.topic("t").held_back
    assert reason is not None
    assert str(error) in reason
    assert second.led_partitions.topic("u").held_back is None
    assert second.append(["b"]).base_offset == 1
    second.publish()  # it was out of sorts only once
    assert rows_of_table(store, rig.clock) == [(0, b"a"), (1, b"b")]


def test_a_torn_table_does_not_stop_the_start(rig: Rig, store: MemoryStore) -> None:
    """The topic continues in the log, held back with the reason, until its table is repaired."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    torn = f"{LOG}/{2:020d}.json"
    store.put(torn, b'{"add": {"pa')
    successor = rig.successor()
    reason = successor.led_partitions.topic("t").held_back
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
    """A table that another program has made unusable holds its topic back; offsets continue."""
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
            TopicTable(store, "t", clock=clock).commit(lambda _: TableChange(properties=properties))
    successor = rig.successor()
    assert successor.led_partitions.topic("t").held_back is not None
    assert successor.led_partitions.topic("u").held_back is None
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
    """Reads records that exist only in the table, as a client does."""
    for _ in rig.broker.read("t", 0, 0, 1):
        pass


def test_old_epochs_end(rig: Rig, store: MemoryStore, clock: ManualClock) -> None:
    """Brokers that start and stop without a record leave no epochs for their successors to read."""
    for _ in range(5):
        rig = rig.successor()
        rig.wal_cleaner.checkpoint()
        rig.wal_cleaner.tick()
    assert rig.meta.reload().open_epochs == (Epoch(1, rig.leadership.epoch),)
    clock.advance(GRACE_SECONDS)
    rig.wal_cleaner.tick()
    closed = [name for name in paths(store, "wal/1") if not name.startswith(f"{6:010d}")]
    assert len(closed) == 5
    for name in closed:
        epoch, _, sequence = name.partition("/")
        found = objects.read_object(store, WalPosition(1, int(epoch), int(sequence)))
        assert found.is_fence
