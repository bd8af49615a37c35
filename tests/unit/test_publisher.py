from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import crc32c
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log import run_writer
from sparklog.broker.log.publisher import PUBLISH_QUIET_SECONDS
from sparklog.broker.log.run_writer import Run, RunWriter, WrittenRun
from sparklog.broker.log.wal_cleaner import WalCleanerLimits
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages
from sparklog.formats.record_batch import Codec
from sparklog.formats.values.columns import Plan
from sparklog.formats.values.typed import Schemas
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import (
    Fault,
    Faults,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    Store,
)
from sparklog.storage.objects.base import CLAIM_ATTEMPTS
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import BatchId, TableSnapshot
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import Decide, TableChange
from sparklog.storage.table.data_file import Encoded
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support.batches import Record, built
from tests.support.brokers import Rig, RigOptions, Row, due, flip, paths, rows_of_table

LOG = "topics/t/_delta_log"
SECONDS = 30.0
"""Far more than anything here takes."""


@pytest.fixture(params=[0, 2], ids=["one thread", "two threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    """Runs each test with and without a pool for writing files in parallel."""
    if not request.param:
        yield None
        return
    with ThreadPoolExecutor(request.param) as found:
        yield found


@pytest.fixture
def rig(store: MemoryStore, clock: ManualClock, pool: Executor | None) -> Rig:
    """A broker with topic t of two partitions, and an empty hot tail."""
    found = Rig(store, clock, options=RigOptions(hot_bytes=0, pool=pool))
    found.create("t", 2)
    return found


def publish_once(rig: Rig) -> tuple[int, int]:
    """The rows and files of one commit."""
    published = rig.publisher.publish(rig.led_partitions.topic("t"))
    return published.rows, published.files


def table(rig: Rig, partition: int = 0) -> list[Row]:
    """The rows of the table."""
    return rows_of_table(rig.store, rig.clock, partition=partition)


def faulty(rig: Rig, *script: Fault) -> None:
    """Makes the publisher's own requests fail from now on."""
    assert isinstance(rig.store, MemoryStore)
    faults: Faults = ScriptedFaults(*script)
    rig.publish_to(rig.store.view(faults))
    for topic in rig.led_partitions.topics():
        topic.table.store = topic.table.log_reader.store = rig.publisher._store


def files(store: Store) -> list[str]:
    """The data files in the store, committed or not."""
    return [name for name in paths(store, "topics/t") if name.endswith(".parquet")]


# ------------------------------------------------------------------------------ due topics


def test_nothing_is_due_without_records(rig: Rig) -> None:
    """A topic without new records is not due, and publishing it does nothing."""
    assert due(rig.led_partitions.backlog, 0.0) == []
    before = paths(rig.store, LOG)
    assert publish_once(rig) == (0, 0)
    assert paths(rig.store, LOG) == before


def test_a_topic_that_is_deleted_while_it_is_published_gets_no_further_turn(rig: Rig) -> None:
    """Promise: neither held back nor blocked, it costs the publisher nothing from then on."""
    rig.append(["0"])
    topic, backlog = rig.led_partitions.topic("t"), rig.led_partitions.backlog
    partition = topic.partitions[0]
    backlog.hold_back(topic, "the store refuses")
    rig.led_partitions.remove_topic(topic)
    backlog.advance_published(topic, [(partition, 1)])
    reason = errors.OffsetOutOfRange(topic="t", partition=0, offset=0, start=1, end=1)
    backlog.block(topic, partition, reason, end=1)
    assert not backlog.reconnect(topic, partition, 1)
    assert backlog.waiting() == []
    assert due(backlog, 0.0) == []


def test_old_records_and_large_backlogs_are_due(rig: Rig, clock: ManualClock) -> None:
    """A topic is due after the interval, or when enough bytes are unpublished."""
    topic = rig.led_partitions.topic("t")
    rig.append(["a"])
    assert due(rig.led_partitions.backlog, 1.0) == []
    assert due(rig.led_partitions.backlog, 1.0, publish_bytes=1) == [topic]
    clock.advance(1.0)
    rig.append(["b"], partition=1)
    assert due(rig.led_partitions.backlog, 1.0) == [topic]
    rig.publish()
    assert due(rig.led_partitions.backlog, 0.0) == []


def test_records_from_the_future_are_due(store: MemoryStore) -> None:
    """A record from a predecessor whose clock is ahead is due at once."""
    ahead, ours = ManualClock(2_000_000_000_000_000), ManualClock(1_999_000_000_000_000)
    first = Rig(store, ahead)
    first.create()
    first.append(["a"])
    second = Rig(store, ours)
    assert len(due(second.led_partitions.backlog, 1.0)) == 1


# ------------------------------------------------------------------------------ one commit


def test_a_commit_has_all_unpublished_records(rig: Rig) -> None:
    """Each partition gets one file in offset order, from the hot tail and from the log alike."""
    for number in range(3):
        rig.append([f"{number}a", f"{number}b"], partition=number % 2)
    assert publish_once(rig) == (6, 2)
    assert table(rig) == [(0, b"0a"), (1, b"0b"), (2, b"2a"), (3, b"2b")]
    assert table(rig, 1) == [(0, b"1a"), (1, b"1b")]
    snapshot = TopicTable(rig.store, "t", clock=rig.clock).refresh()
    assert (snapshot.ends, rig.led_partitions.backlog.unpublished_bytes) == ((4, 2), 0)


def test_a_commit_is_bounded(store: MemoryStore, clock: ManualClock) -> None:
    """A large backlog takes several commits, and a large commit several files."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0, commit_bytes=450, file_bytes=300))
    rig.create()
    for number in range(6):
        rig.append([b"%d" % number * 100])
    commits = []
    while any(each.unpublished for each in rig.led_partitions.topic("t").partitions.values()):
        commits.append(publish_once(rig))
    assert sum(rows for rows, _ in commits) == 6
    assert len(commits) > 1
    assert max(count for _, count in commits) > 1
    assert [offset for offset, _ in table(rig)] == list(range(6))


def zeros(count: int, size: int, codec: int = Codec.ZSTD) -> bytes:
    """A Kafka batch with `count` records of zeros."""
    return built([Record(1_700_000_000_000, None, bytes(size))] * count, codec)


def watch_files(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size_of: Callable[[pa.RecordBatch], int]
) -> list[int]:
    """Records the size of each file that is written, as `size_of` counts its batches."""
    written: list[int] = []
    encode = data_file.encode

    def watch(batches: Sequence[pa.RecordBatch], *, plan: Plan | None, schemas: Schemas) -> Encoded:
        assert plan is None
        written.append(sum(map(size_of, batches)))
        return encode(batches)

    monkeypatch.setattr(run_writer, "encode", watch)
    return written


def test_a_put_that_hangs_keeps_no_memory_from_other_topics(rig: Rig, store: MemoryStore) -> None:
    """Another topic's rows are decoded and put while a large file is on its way."""
    rig.create("u")
    rig.append(["x" * 1_000_000])
    rig.append(["y" * 1_000_000], topic="u")
    arrived, may_end = threading.Event(), threading.Event()

    class Hangs(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and path.startswith("topics/t/partition="):
                arrived.set()
                assert may_end.wait(SECONDS)

    memory = DecodeMemory(1)
    runs = RunWriter(
        store.view(Hangs()), rig.hot, clock=rig.clock, memory=memory, file_bytes=1 << 26
    )

    def written(name: str) -> WrittenRun:
        topic = rig.led_partitions.topic(name)
        entries = tuple(topic.partition(0).unpublished)
        return WrittenRun(
            Run(topic=name, topic_id=topic.topic_id, partition=0, first=0, entries=entries)
        )

    slow, light = written("t"), written("u")
    light.encoded = []
    putting = threading.Thread(target=runs.write, args=(slow,))
    putting.start()
    assert arrived.wait(SECONDS)
    runs.write(light)
    assert light.is_complete
    assert len(light.encoded) == 1
    may_end.set()
    putting.join(SECONDS)
    assert slow.is_complete
    assert memory.held_bytes == 0


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20], ids=["from the log", "from memory"])
def test_a_commit_and_a_file_are_bounded_as_rows_in_memory(
    store: MemoryStore, clock: ManualClock, hot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that decode to megabytes are bounded as such, also after a restart."""
    options = RigOptions(hot_bytes=hot_bytes, commit_bytes=4 << 20, file_bytes=1 << 20)
    rig = Rig(store, clock, options=options)
    rig.create()
    batch = zeros(100, 4_000)
    assert len(batch) < 2_000
    for _ in range(40):
        rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
    if not hot_bytes:
        rig = rig.successor()
    written = watch_files(rig, monkeypatch, lambda batch: batch.nbytes)
    commits = []
    while any(each.unpublished for each in rig.led_partitions.topic("t").partitions.values()):
        commits.append(publish_once(rig))
    assert sum(rows for rows, _ in commits) == 4_000
    assert max(rows for rows, _ in commits) * 4_000 <= 4 << 20
    assert max(written) <= 1 << 20


def test_entries_of_unknown_size_make_bounded_files(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry without a recorded size is counted once it is decoded."""
    options = RigOptions(hot_bytes=0, commit_bytes=1 << 30, file_bytes=1 << 20)
    rig = Rig(store, clock, options=options)
    rig.create()
    for _ in range(10):
        append = rig.broker.prepare_kafka("t", 0, zeros(100, 4_000))
        rig.broker.wait(rig.broker.submit(dataclasses.replace(append, decoded_bytes=0)))
    written = watch_files(rig, monkeypatch, lambda batch: batch.num_rows)
    assert publish_once(rig)[0] == 1_000
    assert max(written) <= 300  # one batch more than is within the bound


def test_an_entry_larger_than_a_commit_is_published(store: MemoryStore, clock: ManualClock) -> None:
    """A commit has at least one entry of a partition, however large it is."""
    rig = Rig(store, clock, options=RigOptions(commit_bytes=1))
    rig.create()
    rig.append([b"x" * 1_000])
    rig.append([b"y" * 1_000])
    assert publish_once(rig) == (1, 1)
    assert publish_once(rig) == (1, 1)


batches = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(batches, st.integers(1, 3_000))
def test_no_commit_splits_a_querys_batch(
    appended: list[tuple[int, list[int], bool]], commit_bytes: int
) -> None:
    """At every version of the table a Spark batch is in all of its partitions, or in none."""
    clock = ManualClock()
    store = MemoryStore(clock)
    rig = Rig(store, clock, options=RigOptions(commit_bytes=commit_bytes))
    topic = rig.create("t", 3)
    entries: dict[BatchId, list[tuple[int, int, int]]] = {}
    expected: list[list[bytes]] = [[], [], []]
    for number, (size, partitions, staged) in enumerate(appended):
        value = f"{number}" * 10**size
        if not staged:
            rig.append([value], partition=partitions[0])
            expected[partitions[0]].append(value.encode())
            continue
        results = rig.append_staged(
            [(partition, [value]) for partition in partitions], batch=number
        )
        for partition, result in zip(partitions, results, strict=True):
            expected[partition].append(value.encode())
            span = partition, result.base_offset, result.base_offset + 1
            entries.setdefault(BatchId("q", number), []).append(span)
    while any(each.unpublished for each in topic.partitions.values()):
        rig.publisher.publish(topic)
        ends = TopicTable(store, "t", clock=clock).refresh().ends
        for spans in entries.values():
            assert len({ends[partition] >= end for partition, _, end in spans}) == 1
    for partition in range(3):
        found = rows_of_table(store, clock, partition=partition)
        assert [value for _, value in found] == expected[partition]


# ------------------------------------------------------------------------------ large batches

SECTION = "x" * 300_000


def large(store: MemoryStore, clock: ManualClock) -> Rig:
    """A broker that writes one file of about 500 kB a turn, and a batch of 10 for topic t."""
    options = RigOptions(
        hot_bytes=0,
        commit_bytes=500_000,
        file_bytes=500_000,
        wal_cleaner=WalCleanerLimits(checkpoint_every_objects=1, carry_after_seconds=300.0),
    )
    rig = Rig(store, clock, options=options)
    rig.create("t", 2)
    rig.create("u")
    sections = [(number % 2, [SECTION + f"{number}"]) for number in range(10)]
    rig.append_staged(sections, batch=1)
    return rig


def values(partition: int) -> list[Row]:
    """The rows of that batch."""
    return [
        (offset, f"{SECTION}{number}".encode())
        for offset, number in enumerate(range(partition, 10, 2))
    ]


def turns(rig: Rig, *, between: Callable[[], object] = lambda: None) -> int:
    """Publishes topic t until it commits, and returns the number of turns."""
    for turn in range(1, 100):
        if rig.publisher.publish(rig.led_partitions.topic("t")).rows:
            return turn
        assert rows_of_table(rig.store, rig.clock) == []
        between()
    raise AssertionError("it never ends")


def test_other_topics_are_published_during_a_large_batch(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The files of a large batch are written in many turns, and one commit adds them all."""
    rig = large(store, clock)
    waits: list[int] = []

    def other() -> None:
        rig.append([f"{len(waits)}"], topic="u")
        assert rig.publisher.publish(rig.led_partitions.topic("u")).rows == 1
        waits.append(len(files(store)))

    assert turns(rig, between=other) == 10
    assert waits == list(range(1, 10))
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]
    found = rig.led_partitions.topic("t").table
    assert not found.open_preparations
    assert rig.publisher.publish(rig.led_partitions.topic("t")).rows == 0


def test_two_leaders_write_large_batches_of_one_topic_at_once(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Neither ends the files that the other prepares, in whatever turns they work."""
    options = RigOptions(commit_bytes=500_000, file_bytes=500_000, is_member=True)
    rigs = [Rig(store, clock, broker=broker, options=options) for broker in (1, 2)]
    rigs[0].reconciler.tick()
    rigs[0].create("t", 2)
    rigs[1].reconciler.tick()
    for rig in rigs:
        (own,) = rig.led_partitions.topic("t").partitions
        sections = [(own, [SECTION + f"{number}"]) for number in range(5)]
        rig.append_staged(sections, batch=1, query=f"q{own}")
    rows = [0, 0]
    for _ in range(20):
        for number, rig in enumerate(rigs):
            rows[number] += rig.publisher.publish(rig.led_partitions.topic("t")).rows
    assert rows == [5, 5]


def test_a_large_batch_outlives_the_graces(store: MemoryStore, clock: ManualClock) -> None:
    """No sweeper takes a file although each takes half an hour, and the batch begins only once."""
    rig = large(store, clock)
    predecessor = TopicTable(store, "t", clock=clock)

    def sweep() -> None:
        clock.advance(limits.ORPHAN_GRACE_SECONDS / 2)
        rig.janitor.tick()
        assert maintenance.sweep_orphans(predecessor) == 0

    assert turns(rig, between=sweep) == 10
    assert len(files(store)) == 10
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]


def test_a_large_batch_of_a_dead_broker_is_written_again(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The successor writes the batch again, and the dead broker does no harm if it wakes up."""
    rig = large(store, clock)
    for _ in range(7):
        assert publish_once(rig) == (0, 0)
    successor = rig.successor()
    for _ in range(3):
        assert publish_once(successor) == (0, 0)
    assert len(files(store)) == 10
    with pytest.raises(errors.TimedOut):
        turns(rig)
    assert len(files(store)) == 3
    assert turns(successor) == 7
    clock.advance(limits.ORPHAN_GRACE_SECONDS + 1)
    maintenance.sweep_orphans(TopicTable(store, "t", clock=clock))
    assert len(files(store)) == 10
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]


def test_a_preparation_that_is_not_renewed_ends(store: MemoryStore, clock: ManualClock) -> None:
    """The files of a broker that died within a large batch are swept in the end."""
    rig = large(store, clock)
    for _ in range(4):
        publish_once(rig)
    found = TopicTable(store, "t", clock=clock)
    clock.advance(limits.ORPHAN_GRACE_SECONDS - 60)
    assert maintenance.sweep_orphans(found) == 0
    assert [*found.open_preparations] == [1]
    clock.advance(120)
    assert maintenance.sweep_orphans(found) == 4
    assert files(store) == []
    with pytest.raises(errors.TimedOut):
        publish_once(rig)
    assert turns(rig) == 10


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (errors.StorageUnavailable(operation="put", path="", reason="a fault"), True),
        (PutUnresolved("", "a fault"), True),
        (errors.StorageFull(root="", free_bytes=0, reserve_bytes=0), False),
        (RuntimeError("a mistake"), False),
    ],
)
def test_an_error_in_a_large_batch(
    store: MemoryStore, clock: ManualClock, error: Exception, is_kept: bool
) -> None:
    """Written files are kept if the next turn may succeed, and removed otherwise."""
    rig = large(store, clock)
    for _ in range(4):
        publish_once(rig)
    count = 20 if isinstance(error, PutUnresolved) else 1
    faulty(
        rig,
        *(
            Fault(operation="put_new", error=error, count=number + 1, prefix="topics/t/partition")
            for number in range(count)
        ),
    )
    with pytest.raises(Exception, match=r"a fault|bytes are free|a mistake"):
        publish_once(rig)
    assert len(files(store)) == (4 if is_kept else 0)
    rig.publish_to(store)
    for topic in rig.led_partitions.topics():
        topic.table.store = topic.table.log_reader.store = store
    assert turns(rig) == (6 if is_kept else 10)
    assert len(files(store)) == 10


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_commit_of_a_large_batch_that_gets_no_answer(
    store: MemoryStore, clock: ManualClock, moment: Any
) -> None:
    """The next turn finds out whether the commit landed, and writes no file again."""
    rig = large(store, clock)
    for _ in range(9):
        publish_once(rig)
    lost = PutUnresolved("", "a fault")
    gone = errors.StorageUnavailable(operation="get", path="", reason="a fault")
    faulty(
        rig,
        *(
            fault
            for number in range(CLAIM_ATTEMPTS)
            for fault in (
                Fault(operation="put_new", error=lost, count=number + 1, prefix=LOG, moment=moment),
                Fault(operation="get", error=gone, count=number + 1, prefix=LOG),
            )
        ),
    )
    with pytest.raises(errors.OutcomeUnknown):
        publish_once(rig)
    rig.publish_to(store)
    for topic in rig.led_partitions.topics():
        topic.table.store = topic.table.log_reader.store = store
    publish_once(rig)
    assert len(files(store)) == 10
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]
    assert not any(each.unpublished for each in rig.led_partitions.topic("t").partitions.values())


@pytest.mark.parametrize("ends_by", ["a renewal", "a full disk", "a deletion"])
def test_files_of_a_commit_that_may_have_landed_stay(
    store: MemoryStore, clock: ManualClock, ends_by: str
) -> None:
    """The files of a commit without an answer remain, however the large batch ends.

    If the commit landed, the next turn finds that, and neither fails nor counts the files again.
    """
    rig = large(store, clock)
    for _ in range(9):
        publish_once(rig)
    lost = PutUnresolved("", "a fault")
    gone = errors.StorageUnavailable(operation="get", path="", reason="a fault")
    silent = [
        fault
        for number in range(CLAIM_ATTEMPTS)
        for fault in (
            Fault(operation="put_new", error=lost, count=number + 1, prefix=LOG, moment="after"),
            Fault(operation="get", error=gone, count=number + 1, prefix=LOG),
        )
    ]
    full = errors.StorageFull(root="", free_bytes=0, reserve_bytes=0)
    count = 1 + CLAIM_ATTEMPTS
    faulty(rig, *silent, Fault(operation="put_new", error=full, count=count, prefix=LOG))
    with pytest.raises(errors.OutcomeUnknown):
        publish_once(rig)
    if ends_by == "a renewal":
        clock.advance(limits.ORPHAN_GRACE_SECONDS / 3)
        rig.publish_to(store)
        for topic in rig.led_partitions.topics():
            topic.table.store = topic.table.log_reader.store = store
    if ends_by == "a deletion":
        rig.publisher.remove_topic(rig.led_partitions.topic("t"))
    else:
        assert publish_once(rig) == (0, 0)
    assert len(files(store)) == 10
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]


def test_a_large_batch_outlives_a_failed_look_at_its_files(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A short failure of the store before the commit does not start the batch again."""
    rig = large(store, clock)
    for _ in range(9):
        publish_once(rig)
    down = errors.StorageUnavailable(operation="stat", path="", reason="a fault")
    faulty(
        rig,
        Fault(operation="stat", error=down, prefix="topics/t/partition"),
        Fault(operation="list_after", error=down, prefix="topics/t/partition"),
    )
    with pytest.raises(errors.StorageUnavailable):
        publish_once(rig)
    assert publish_once(rig) == (10, 10)
    assert len(files(store)) == 10


def test_a_vacuum_of_another_engine_takes_no_large_batch(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A VACUUM without retention removes uncommitted files; they are written again."""
    rig = large(store, clock)
    for _ in range(4):
        publish_once(rig)
    store.delete([f"topics/t/{name}" for name in files(store)[:2]])
    for _ in range(5):
        publish_once(rig)
    assert publish_once(rig) == (0, 0)
    assert files(store) == []
    assert turns(rig) == 10
    assert [table(rig, partition) for partition in (0, 1)] == [values(0), values(1)]


def test_a_topic_that_is_deleted_takes_its_large_batch_along(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The uncommitted files of a deleted topic are removed at once."""
    rig = large(store, clock)
    for _ in range(4):
        publish_once(rig)
    rig.broker.topics.delete("t")
    assert files(store) == []


def test_a_topic_is_deleted_although_files_of_its_large_batch_cannot_be(
    store: MemoryStore, clock: ManualClock
) -> None:
    """If the store refuses to remove them, the sweeper does, and the topic is deleted."""
    rig = large(store, clock)
    rig.publisher.publish(rig.led_partitions.topic("t"))
    faulty(rig, Fault(operation="delete", error=errors.RootNotWritable(root="r", reason="403")))
    rig.broker.topics.delete("t")
    assert TopicTable(store, "t", clock=clock).refresh().topic_id is None
    rig.create("t")
    assert rig.append(["a"]).base_offset == 0


def test_a_large_batch_is_published_behind_carried_entries(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The batch is published although its entries are carried to newer objects meanwhile."""
    rig = large(store, clock)
    rig = rig.successor()

    def carry() -> None:
        clock.advance(400)
        rig.wal_cleaner.checkpoint()
        pending = rig.wal_cleaner.carry()
        if pending is not None:
            rig.writer.wait(pending)
        rig.append(["later"])
        rig.trim()

    assert turns(rig, between=carry) == 10
    assert table(rig)[:5] == values(0)
    rig.publish()
    assert [value for _, value in table(rig)[5:]] == [b"later"] * 9


def test_added_partitions_are_published(rig: Rig) -> None:
    """Records of a partition that was added to the table since are published."""
    rig.append(["a"])
    rig.publish()
    rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
    rig.append(["b"], partition=2)
    rig.append(["c"])
    assert publish_once(rig) == (2, 2)
    assert table(rig, 2) == [(0, b"b")]


def test_partitions_may_be_added_right_after_a_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that the publisher has made before is not a sign of a foreign table."""
    rig.append(["a"])
    commit = TopicTable.commit

    def widened(table: TopicTable, decide: Decide) -> TableSnapshot:
        monkeypatch.undo()
        found = commit(table, decide)
        rig.broker.topics.add_partitions(flight_messages.AddPartitions(topic="t", partitions=3))
        return found

    monkeypatch.setattr(TopicTable, "commit", widened)
    assert publish_once(rig) == (1, 1)
    partitions = rig.led_partitions.topic("t").partitions
    assert [each.published for each in partitions.values()] == [1, 0, 0]


# ------------------------------------------------------------------------------ damage


def damage_entry(rig: Rig, number: int) -> None:
    """Flips a byte of an unpublished entry of partition 0."""
    located = list(rig.led_partitions.topic("t").partition(0).unpublished)[number]
    path = f"wal/1/0000000001/{located.at.sequence:020d}"
    flip(rig.store, path, located.origin + located.entry.start + located.entry.length - 20)


def test_entries_before_a_corrupt_one_are_published(rig: Rig) -> None:
    """The error names entry and object; that partition stops there, and the other continues."""
    for value in ("a", "b", "c"):
        rig.append([value])
    rig.append(["x"], partition=1)
    damage_entry(rig, 1)
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            publish_once(rig)
        assert corrupt.value.path.startswith("wal/1/0000000001/")
        assert "offsets 1 to 2 of partition 0" in corrupt.value.check
    assert (table(rig), table(rig, 1)) == ([(0, b"a")], [(0, b"x")])
    damage_entry(rig, 0)
    assert publish_once(rig) == (2, 1)
    assert table(rig) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_files_that_cannot_be_written_are_no_commit(rig: Rig) -> None:
    """If one partition's file is refused, nothing is committed; the next try commits all."""
    rig.append(["a"])
    rig.append(["b"], partition=1)
    full = errors.StorageFull(root="memory://", free_bytes=0, reserve_bytes=0)
    faulty(rig, Fault(operation="put_new", error=full, prefix="topics/t/partition=0"))
    with pytest.raises(errors.StorageFull):
        publish_once(rig)
    assert (table(rig), table(rig, 1), files(rig.store)) == ([], [], [])
    assert publish_once(rig) == (2, 2)
    assert (table(rig), table(rig, 1)) == ([(0, b"a")], [(0, b"b")])


def test_a_commit_that_is_refused_leaves_no_files(rig: Rig) -> None:
    """Uncommitted files are removed, or a try per second would fill a full disk."""
    rig.append(["a"])
    full = errors.StorageFull(root="memory://", free_bytes=0, reserve_bytes=0)
    faulty(rig, Fault(operation="put_new", error=full, prefix=LOG))
    with pytest.raises(errors.StorageFull):
        publish_once(rig)
    assert files(rig.store) == []
    assert publish_once(rig) == (1, 1)


def test_nothing_is_written_for_a_table_that_is_held_back(rig: Rig) -> None:
    """While a table cannot be written, each new try costs a look at it and no files."""
    rig.append(["a"])
    rig.led_partitions.topic("t").held_back = "it was foreign"
    upgrade = b'{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7}}\n'
    rig.store.put(f"{LOG}/{1:020d}.json", upgrade)
    for _ in range(3):
        with pytest.raises(errors.ForeignTable):
            publish_once(rig)
    assert files(rig.store) == []


def test_a_request_for_one_topic_hurries_no_other(rig: Rig) -> None:
    """A requested topic is due until it is published; other topics keep their interval."""
    rig.create("other", 1)
    rig.append(["a"])
    rig.append(["b"], topic="other")
    topic = rig.led_partitions.topic("t")
    backlog = rig.led_partitions.backlog
    backlog.request(topic)
    for _ in range(2):
        assert due(backlog, 60.0) == [topic]
    rig.publisher.publish(topic)
    rig.append(["c"])
    assert due(rig.led_partitions.backlog, 60.0) == []


class CountingPool(ThreadPoolExecutor):
    """A pool that counts its tasks."""

    asked = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().submit(*args, **kwargs)


def test_a_burst_keeps_the_cores(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a local root one thread writes while records come in, and two when it is quiet."""
    monkeypatch.setattr("sparklog.broker.log.publisher.PUBLISH_IN_PARALLEL_BYTES", 1)
    with CountingPool(2) as pool:
        store = MemoryStore(clock, is_local=True)
        rig = Rig(store, clock, options=RigOptions(pool=pool))
        rig.create("t", 2)
        for asked, pause_seconds in ((0, 0.0), (2, 2 * PUBLISH_QUIET_SECONDS)):
            rig.append(["a"])
            rig.append(["b"], partition=1)
            clock.advance(pause_seconds)
            assert publish_once(rig) == (2, 2)
            assert pool.asked == asked
        monkeypatch.setattr("sparklog.broker.log.publisher.PUBLISH_PRESSED_BYTES", 1)
        rig.append(["a"])
        assert publish_once(rig) == (1, 1)
        assert pool.asked == 3


def test_files_of_many_partitions_are_put_together(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files of a commit share rounds of flushes; so many are encoded at a time."""
    rig.create("wide", 8)
    for partition in range(8):
        rig.append([f"{partition}"], topic="wide", partition=partition)
    rig.append(["x" * 4_000], topic="wide", partition=7)
    monkeypatch.setattr(limits, "PUBLISH_SMALL_BYTES", 2_000)
    monkeypatch.setattr(limits, "PUBLISH_ENCODED_BYTES", 8_000)
    put: list[int] = []
    put_all_new = rig.store.put_all_new

    def note(objects: Sequence[tuple[str, Any]]) -> list[Exception | None]:
        put.append(len(objects))
        return put_all_new(objects)

    monkeypatch.setattr(rig.store, "put_all_new", note)
    assert rig.publisher.publish(rig.led_partitions.topic("wide")).files == 8
    assert put == [4, 3]  # and the large file alone
    for partition in range(8):
        rows = rows_of_table(rig.store, rig.clock, "wide", partition)
        assert rows == rig.read("wide", partition)


def test_a_refused_file_of_many_leaves_none(rig: Rig) -> None:
    """If a file that is put with others is refused, the commit is not made, and no file remains."""
    topic = rig.create("wide", 3)
    for partition in range(3):
        rig.append(["a"], topic="wide", partition=partition)
    full = errors.StorageFull(root="?", free_bytes=0, reserve_bytes=0)
    fault = Fault(operation="put_new", error=full, prefix="topics/wide/partition=1")
    assert isinstance(rig.store, MemoryStore)
    whole = rig.publisher._store
    rig.publish_to(rig.store.view(ScriptedFaults(fault)))
    with pytest.raises(errors.StorageFull):
        rig.publisher.publish(topic)
    assert not [name for name in paths(rig.store, "topics/wide") if name.endswith(".parquet")]
    rig.publish_to(whole)
    assert rig.publisher.publish(topic).files == 3


def test_a_missing_object_is_named(rig: Rig) -> None:
    """An object that is missing before its records are in the table is an error that names it."""
    appended = rig.append(["a"])
    assert appended.base_offset == 0
    (located,) = rig.led_partitions.topic("t").partition(0).unpublished
    path = f"wal/1/0000000001/{located.at.sequence:020d}"
    rig.store.delete([path])
    with pytest.raises(errors.MissingObject) as missing:
        publish_once(rig)
    assert missing.value.path == path


def test_entries_that_a_predecessor_published_may_be_unreadable(rig: Rig) -> None:
    """An object may be missing without an error if all of it is in the table by now."""
    rig.append(["a"])
    (located,) = rig.led_partitions.topic("t").partition(0).unpublished
    successor = rig.successor()
    rig.publish()
    rig.store.delete([f"wal/1/0000000001/{located.at.sequence:020d}"])
    successor.publisher.publish(successor.led_partitions.topic("t"))
    assert successor.led_partitions.topic("t").partition(0).unpublished == []
    assert table(successor) == [(0, b"a")]


@pytest.mark.parametrize("is_together", [False, True])
def test_a_batch_that_a_predecessor_published_may_be_unreadable_in_part(
    rig: Rig, *, is_together: bool
) -> None:
    """The predecessor is stopped while it removes the staged files of what it has published."""
    rig.append_staged([(0, ["a"]), (1, ["b"])], batch=1)
    successor = rig.successor()
    rig.publish()
    name = next(name for name in paths(rig.store, "staging") if "/0-" in name)
    rig.store.delete([f"staging/{name}"])
    topic = successor.led_partitions.topic("t")
    if is_together:
        assert successor.publisher.publish_together([topic]) == [None]
    else:
        successor.publisher.publish(topic)
    assert not topic.waiting
    assert (table(successor), table(successor, 1)) == ([(0, b"a")], [(0, b"b")])


def test_a_corrupt_staged_file_stops_its_batch(rig: Rig) -> None:
    """A damaged staged file is named in the error, and only records before its batch are added."""
    rig.append(["b"], partition=1)
    rig.append_staged([(0, ["a"]), (1, ["c"])], batch=1)
    rig.append(["d"], partition=1)
    name = next(name for name in paths(rig.store, "staging") if "/0-" in name)
    flip(rig.store, f"staging/{name}", 100)
    with pytest.raises(errors.CorruptObject) as corrupt:
        publish_once(rig)
    assert corrupt.value.path == f"staging/{name}"
    assert (table(rig), table(rig, 1)) == ([], [(0, b"b")])


@pytest.mark.parametrize("is_together", [False, True])
def test_a_batch_behind_an_unreadable_one_is_whole(rig: Rig, *, is_together: bool) -> None:
    """A batch is not added in part if an entry before one of its parts cannot be read."""
    topic = rig.led_partitions.topic("t")
    rig.append_staged([(1, ["a"])], batch=1)
    (name,) = [name for name in paths(rig.store, "staging") if "manifest" not in name]
    rig.append(["b"])
    rig.append_staged([(0, ["c"]), (1, ["d"])], batch=2)
    data = rig.store.get(f"staging/{name}")
    rig.store.delete([f"staging/{name}"])
    for _ in range(2):
        if is_together:
            (error,) = rig.publisher.publish_together([topic])
            assert isinstance(error, errors.MissingObject)
        else:
            with pytest.raises(errors.MissingObject):
                rig.publisher.publish(topic)
        assert (table(rig), table(rig, 1)) == ([(0, b"b")], [])
        assert len(paths(rig.store, "topics/t/partition=0")) == 1
    rig.store.put_new(f"staging/{name}", data)
    rig.publisher.publish(topic)
    assert (table(rig), table(rig, 1)) == ([(0, b"b"), (1, b"c")], [(0, b"a"), (1, b"d")])


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_batch_with_a_part_in_a_blocked_partition_waits(
    rig: Rig, store: MemoryStore, *, is_restarted: bool
) -> None:
    """A partition that does not connect to its table keeps its batches out of the whole table."""
    rig.append(["lost"])
    rig.publish()
    rig.trim()
    rig.append(["b"], partition=1)
    rig.append_staged([(0, ["c"]), (1, ["d"])], batch=1)
    lost = f"{LOG}/{1:020d}.json"
    commit = store.get(lost)
    store.delete([lost])
    if is_restarted:
        rig = rig.successor()
    else:
        topic = rig.led_partitions.topic("t")
        reason = errors.ForeignTable(topic="t", reason="its txn was moved")
        rig.led_partitions.backlog.block(topic, topic.partition(0), reason, end=2)
        topic.table = TopicTable(store, "t", clock=rig.clock)
    topic = rig.led_partitions.topic("t")
    for _ in range(2):
        with pytest.raises((errors.MissingObject, errors.ForeignTable)):
            rig.publisher.publish(topic)
        assert table(rig, 1) == [(0, b"b")]
        topic.held_back = "as the agent notes it"
    store.put_new(f"{LOG}/{2:020d}.json", commit)
    rig.publisher.publish(topic)
    assert (table(rig), table(rig, 1)) == (
        [(0, b"lost"), (1, b"c")],
        [(0, b"b"), (1, b"d")],
    )


@pytest.mark.parametrize("is_together", [False, True])
def test_an_unreadable_part_of_a_batch_costs_files_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, is_together: bool
) -> None:
    """While an entry stays unreadable, no file is written again that could not be committed."""
    topic = rig.led_partitions.topic("t")
    rig.append_staged([(0, ["a"]), (1, ["b"])], batch=1)
    name = next(name for name in paths(rig.store, "staging") if "/0-" in name)
    flip(rig.store, f"staging/{name}", 100)
    written = watch_files(rig, monkeypatch, lambda batch: batch.num_rows)
    for _ in range(3):
        if is_together:
            (error,) = rig.publisher.publish_together([topic])
            assert isinstance(error, errors.CorruptObject)
        else:
            with pytest.raises(errors.CorruptObject):
                rig.publisher.publish(topic)
        assert written == [1]
        assert not topic.partition(1).published
    flip(rig.store, f"staging/{name}", 100)
    rig.append(["c"], partition=1)
    if is_together:
        assert rig.publisher.publish_together([topic]) == [None]
    else:
        rig.publisher.publish(topic)
    assert (table(rig), table(rig, 1)) == ([(0, b"a")], [(0, b"b"), (1, b"c")])


def test_a_topic_with_an_unreadable_entry_may_be_deleted_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that ends after its topic finds nothing to publish, and leaves nothing."""
    topic = rig.led_partitions.topic("t")
    rig.append_staged([(0, ["a"]), (1, ["b"])], batch=1)
    name = next(name for name in paths(rig.store, "staging") if "/0-" in name)
    flip(rig.store, f"staging/{name}", 100)
    with pytest.raises(errors.CorruptObject):
        rig.publisher.publish(topic)
    refresh = topic.table.refresh

    def deleted() -> TableSnapshot:
        monkeypatch.undo()
        found = refresh()
        rig.broker.topics.delete("t")
        return found

    monkeypatch.setattr(topic.table, "refresh", deleted)
    rig.publisher.publish(topic)
    assert not rig.publisher._unreadable


def test_a_staged_file_of_another_schema_is_corrupt(rig: Rig) -> None:
    """Intact bytes of a wrong type stop the partition, and not the broker."""
    (append,) = rig.stage([(0, ["a"])], batch=1)
    assert append.staged is not None
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"value": pa.array([7])})
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data = sink.getvalue()
    rig.store.put(append.staged.path, data)
    staged = msgspec.structs.replace(
        append.staged, length=data.size, crc32c=crc32c.crc32c(data.to_pybytes())
    )
    rig.writer.wait(rig.writer.submit([dataclasses.replace(append, staged=staged)]))
    with pytest.raises(errors.CorruptObject) as corrupt:
        publish_once(rig)
    assert corrupt.value.path == append.staged.path


def test_a_table_that_is_set_back_is_named(rig: Rig, store: MemoryStore) -> None:
    """A table from which another engine has removed records, by a restore, is an error."""
    rig.append(["a"])
    rig.publish()
    topic = rig.led_partitions.topic("t")
    (file,) = TopicTable(store, "t", clock=rig.clock).refresh().files[0]
    app_id = end_app_id(topic.topic_id, 0)
    actions = [
        {"remove": {"path": file.path, "deletionTimestamp": 1, "dataChange": True}},
        {"txn": {"appId": app_id, "version": 0}},
    ]
    commit = b"\n".join(map(msgspec.json.encode, actions))
    store.put(f"{LOG}/{2:020d}.json", commit)
    rig.append(["b"])
    with pytest.raises(errors.ForeignTable) as foreign:
        publish_once(rig)
    assert "ends at 0 in the table, and was published up to 1" in foreign.value.reason


def test_nothing_is_published_before_it_is_durable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is synced first, because the WAL is trimmed by the published ends."""
    sync = TopicTable.sync
    partition = rig.led_partitions.topic("t").partition(0)
    for failing in range(10):
        rig.append(["a"])
        before, calls = partition.published, itertools.count()

        def refuse(table: TopicTable, failing: int = failing, calls: Iterator[int] = calls) -> None:
            if next(calls) == failing:
                raise errors.StorageUnavailable(operation="sync_files", path="t", reason="down")
            sync(table)

        with monkeypatch.context() as patched:
            patched.setattr(TopicTable, "sync", refuse)
            try:
                publish_once(rig)
            except errors.StorageUnavailable:
                assert partition.published == before
                publish_once(rig)
            else:
                break
        assert partition.published == before + 1
    assert failing, "nothing was synced"


def test_a_table_torn_by_another_writer_holds_back(rig: Rig, store: MemoryStore) -> None:
    """Nothing is published above a torn commit, and everything once it is repaired."""
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])
    torn = f"{LOG}/{2:020d}.json"
    store.put(torn, b'{"commitInfo": {"timest')
    for _ in range(2):
        with pytest.raises(errors.CorruptObject) as corrupt:
            publish_once(rig)
        assert corrupt.value.path == torn
    rig.append(["c"])
    assert rig.read() == [(0, b"a"), (1, b"b"), (2, b"c")]
    store.delete([torn])
    assert publish_once(rig) == (2, 1)
    assert table(rig) == [(0, b"a"), (1, b"b"), (2, b"c")]


@pytest.mark.parametrize(
    "properties",
    [{"sparklog.topicId": None}, {"sparklog.topicId": "other"}, {"sparklog.partitions": "1"}],
    ids=str,
)
def test_a_table_that_is_no_longer_ours_is_named(
    rig: Rig, store: MemoryStore, properties: dict[str, str | None]
) -> None:
    """A table whose topic id or partitions were changed is refused, without orphans."""
    TopicTable(store, "t", clock=rig.clock).commit(lambda _: TableChange(properties=properties))
    rig.append(["a"])
    with pytest.raises(errors.ForeignTable) as foreign:
        publish_once(rig)
    assert foreign.value.topic == "t"
    assert files(store) == []


# ------------------------------------------------------------------------------ races


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("prefix", [LOG, "topics/t/partition=0"])
def test_an_ambiguous_put_doubles_nothing(rig: Rig, moment: str, prefix: str) -> None:
    """If a file or commit gets no answer, each record is still in the table once."""
    rig.append(["a", "b"])
    error = PutUnresolved("?", "no answer")
    faulty(rig, Fault(operation="put_new", error=error, moment=moment, prefix=prefix))  # type: ignore[arg-type]
    publish_once(rig)
    assert table(rig) == [(0, b"a"), (1, b"b")]
    assert rig.led_partitions.topic("t").partition(0).published == 2


def test_a_commit_of_unknown_outcome_is_looked_for(rig: Rig) -> None:
    """After a commit that may have landed, the next round finds where the table ends."""
    rig.append(["a"])
    down = errors.StorageUnavailable(operation="stat", path="?", reason="down")
    faulty(rig, Fault(operation="stat", error=down, prefix=LOG))
    with pytest.raises(errors.OutcomeUnknown):
        publish_once(rig)
    rig.append(["b"])
    rig.publish()
    assert table(rig) == [(0, b"a"), (1, b"b")]


@given(st.lists(st.sampled_from(["append", "old", "new"]), max_size=12))
def test_a_predecessor_that_still_publishes_does_no_harm(steps: list[str]) -> None:
    """Whichever of the two commits when, each record is in the table once and in order."""
    clock = ManualClock()
    store = MemoryStore(clock)
    old = Rig(store, clock, options=RigOptions(commit_bytes=1))
    old.create()
    for number in range(4):
        old.append([f"{number}"])
    new = old.successor()
    count = 4
    for step in steps:
        if step == "append":
            new.append([f"{count}"])
            count += 1
        elif step == "new":
            publish_once(new)
        else:
            with contextlib.suppress(errors.PublisherFenced):  # it finds out
                publish_once(old)
    new.publish()
    assert rows_of_table(store, clock) == [(n, b"%d" % n) for n in range(count)]


def test_a_table_ahead_of_all_we_know_is_a_successors(rig: Rig) -> None:
    """If the table ends beyond our own end, a newer broker writes it, and we stop."""
    rig.append(["a"])
    successor = rig.successor()
    successor.append(["b"])
    successor.publish()
    with pytest.raises(errors.PublisherFenced) as fenced:
        publish_once(rig)
    assert (fenced.value.topic, fenced.value.partition) == ("t", 0)
    assert (fenced.value.end, fenced.value.found) == (1, 2)


def test_losing_to_another_engine_loses_nothing(rig: Rig, store: MemoryStore) -> None:
    """A foreign commit in between is rebased over, and the file is not written again."""
    rig.append(["a"])
    other = TopicTable(store, "t", clock=rig.clock)
    other.commit(lambda _: TableChange(operation="SOMETHING ELSE"))
    assert publish_once(rig) == (1, 1)
    assert table(rig) == [(0, b"a")]
    assert len(files(store)) == 1


def test_a_topic_deleted_meanwhile_leaves_no_orphans(rig: Rig, store: MemoryStore) -> None:
    """Files that were written for a deleted topic are removed, and the broker continues."""
    rig.append(["a"])
    topic = rig.led_partitions.topic("t")
    real = rig.publisher._runs._write_file

    def deleting(*args: object, **options: object) -> object:
        written = real(*args, **options)  # type: ignore[arg-type]
        rig.broker.topics.delete("t")
        return written

    rig.publisher._runs._write_file = deleting  # type: ignore[method-assign,assignment]
    rig.publisher.publish(topic)
    assert files(store) == []
    assert (topic.unpublished_bytes, rig.led_partitions.backlog.unpublished_bytes) == (0, 0)


def test_a_table_of_several_leaders_is_read_before_a_commit(rig: Rig, store: MemoryStore) -> None:
    """Others have committed since our last commit, so it would lose its race each time."""
    topic = rig.led_partitions.topic("t")
    rig.led_partitions.resignations.begin(topic, 1)
    assert rig.led_partitions.resignations.complete(topic, 1)
    rig.append(["a"])
    TopicTable(rig.store, "t", clock=rig.clock).commit(
        lambda _: TableChange(txns={end_app_id(topic.topic_id, 1): 7})
    )
    puts: list[str] = []

    class Noted(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation == "put_new" and path.startswith(LOG):
                puts.append(path)

    rig.publish_to(store.view(Noted()))
    assert rig.publisher.publish_together([topic]) == [None]
    assert puts == [f"{LOG}/{2:020d}.json"]
    assert table(rig) == [(0, b"a")]
