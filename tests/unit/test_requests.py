"""Requests to an object store: how many each operation costs, by kind, and which are parallel.

On an object store the number of requests is the price, in money and, where they follow one another,
in time. So the numbers here are exact, and a changed cost is a failing test.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparklog import limits
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats.flight_messages import AddPartitions, AlterTopic, DeleteRecords
from sparklog.storage.follow import RootFollower
from sparklog.storage.maintenance import file_compaction, restoring
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    DelayedStore,
    MemoryStore,
    ObjectMissing,
    Purpose,
    Stat,
    in_parallel,
    total,
    usages,
)
from sparklog.storage.reading.read_ahead import ReadAhead
from sparklog.storage.table import delta_log
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.version_chain import LOOK_SECONDS
from sparklog.storage.wal.base import object_path
from tests.support.brokers import Rig, rows_of_table


@pytest.fixture
def store(clock: ManualClock) -> DelayedStore:
    """An object store that counts."""
    return DelayedStore(MemoryStore(clock), 0.0, clock)


@contextlib.contextmanager
def costs(store: DelayedStore, **expected: int) -> Iterator[None]:
    """Asserts that the block makes exactly these requests, for any purpose."""
    before = total(usages(store).values())
    yield
    assert total(usages(store).values()).since(before).requests == expected


def fill(rig: Rig, partitions: int, flushes: int, *, topic: str = "t") -> None:
    """Puts so many flushes, to each partition in turn."""
    for number in range(flushes):
        rig.append([f"{number}"], topic=topic, partition=number % partitions)


# ------------------------------------------------------------------------------ writing


def test_an_append(store: DelayedStore, clock: ManualClock) -> None:
    """A flush is one put, for any number of topics and records."""
    rig = Rig(store, clock)
    rig.create("t")
    rig.create("u")
    with costs(store, put_new=1):
        rig.append(["a", "b"])
    with costs(store, put_new=1):
        pending = [rig.submit(["a"], topic=topic) for topic in ("t", "u")]
        for each in pending:
            rig.broker.wait(each)


@pytest.mark.parametrize("partitions", [1, 4])
def test_publishing(store: DelayedStore, clock: ManualClock, partitions: int) -> None:
    """Publishing a topic puts a file for each partition and a commit, and probes once.

    The probe finds the commit before ours, so that ours is not in the removed past of the log.
    """
    rig = Rig(store, clock)
    rig.create("t", partitions)
    for _ in range(3):
        fill(rig, partitions, 2 * partitions)
        with costs(store, put_new=partitions + 1, stat=1):
            rig.publish()


def test_confirming(store: DelayedStore, clock: ManualClock) -> None:
    """Each commit is read back once, and each file looked at: many by a listing."""
    rig = Rig(store, clock)
    rig.create("t")
    for _ in range(3):
        fill(rig, 1, 1)
        rig.publish()
    with costs(store, get=4, stat=3):
        rig.confirmer.confirm()
    with costs(store):
        rig.confirmer.confirm()
    for _ in range(20):
        fill(rig, 1, 1)
        rig.publish()
    with costs(store, get=20, list_after=1):
        rig.confirmer.confirm()


def test_a_checkpoint_of_the_log(store: DelayedStore, clock: ManualClock) -> None:
    """A checkpoint is one put; trimming lists nothing, and deletes up to 1,000 in a request."""
    rig = Rig(store, clock)
    rig.create("t")
    fill(rig, 1, 10)
    rig.publish()
    rig.confirmer.confirm()
    with costs(store, put_new=1):
        rig.wal_cleaner.checkpoint()
    with costs(store, list_after=1, get=3, walk=1):  # the first looks whether many epochs are left
        rig.wal_cleaner.tick()
    clock.advance(15)
    with costs(store, get=1, walk=1, delete=1):  # and this one ends old epochs
        rig.wal_cleaner.tick()
    fill(rig, 1, 1)
    rig.publish()
    rig.confirmer.confirm()
    rig.wal_cleaner.checkpoint()
    clock.advance(15)
    with costs(store, delete=1):
        rig.wal_cleaner.tick()
    with costs(store):
        rig.wal_cleaner.tick()


def test_a_table_through_another_view(store: DelayedStore, clock: ManualClock) -> None:
    """Its requests count there, and both have one state: neither reads what the other has."""
    rig = Rig(store, clock)
    table = rig.create("t").table
    other = table.through(store.counted_as(Purpose.UPKEEP))
    fill(rig, 1, 1)
    with costs(store, put_new=2, stat=1):
        rig.publish()
    assert other.snapshot is table.snapshot
    before = usages(store)[Purpose.UPKEEP]
    with costs(store, put_new=1, get=2, put=1):
        other.checkpoint()
    assert usages(store)[Purpose.UPKEEP].since(before).puts == 2
    assert table.checkpoint_version == other.checkpoint_version == table.snapshot.version
    fill(rig, 1, 1)
    rig.publish()
    assert other.snapshot is table.snapshot
    assert table.through(store) is table


def test_a_merge(store: DelayedStore, clock: ManualClock) -> None:
    """A merge reads each small file with one request, puts one, commits it, and looks at it."""
    rig = Rig(store, clock)
    rig.create("t")
    for _ in range(16):
        fill(rig, 1, 1)
        rig.publish()
    table = rig.led_partitions.topic("t").table
    with costs(store, get_range=16, put_new=2, stat=2):
        file_compaction.compact(table, file_compaction.choose(table.snapshot))
    assert len(table.snapshot.files[0]) == 1


def test_files_are_looked_at_one_by_one_or_listed(store: DelayedStore) -> None:
    """A listing costs as much as 12 looks, so files are looked at while that is cheaper."""
    for partitions in (1, 4):
        paths = [f"topics/t/partition={n % partitions}/{n}" for n in range(12 * partitions)]
        with costs(store, stat=12 * partitions):
            restoring.torn(store, dict.fromkeys(paths, 1))
        with costs(store, list_after=partitions):
            restoring.torn(store, dict.fromkeys([*paths, f"{paths[0]}-more"], 1))


# ------------------------------------------------------------------------------ starting


def test_a_first_start(store: DelayedStore, clock: ManualClock) -> None:
    """The first start of an empty root."""
    with costs(store, get=4, walk=1, put_new=3, list_after=2):
        Rig(store, clock)


def test_creating_a_topic(store: DelayedStore, clock: ManualClock) -> None:
    """A topic costs two puts, however many there are and whatever its number of partitions."""
    rig = Rig(store, clock)
    rig.create("t0")
    for number in range(1, 5):
        with costs(store, put_new=2, get=7, list_after=4):
            rig.create(f"t{number}", 4 * number)


@pytest.mark.parametrize("topics", [0, 1, 10])
def test_a_start_with_topics(store: DelayedStore, clock: ManualClock, topics: int) -> None:
    """A start reads each table: hint, listing, commit, and two probes for the end of its log."""
    rig = Rig(store, clock)
    for number in range(topics):
        rig.create(f"t{number}", 4)
    with costs(
        store,
        put_new=4,  # of the metadata, the fence, the metadata again and the first object
        get=8 + 4 * topics,  # one of the metadata, which has no snapshot yet
        list_after=6 + topics,
        get_range=3,
        **({"stat": topics} if topics else {}),
    ):
        rig.successor()


@pytest.mark.parametrize(("flushes", "probes"), [(1, 1), (10, 4), (100, 26)])
def test_recovery(store: DelayedStore, clock: ManualClock, flushes: int, probes: int) -> None:
    """A recovery reads each flush that is not trimmed once, and up to 32 at a time.

    So it probes for up to 31 flushes beyond the last one.
    """
    rig = Rig(store, clock)
    rig.create("t", 4)
    fill(rig, 4, flushes)
    with costs(store, put_new=4, get=12, list_after=7, stat=1, get_range=3 + flushes + probes):
        rig.successor()


# ------------------------------------------------------------------------------ keeping


def test_a_janitors_tick_without_work(store: DelayedStore, clock: ManualClock) -> None:
    """An idle topic costs two probes for its next commit in each tick."""
    rig = Rig(store, clock)
    for number in range(5):
        rig.create(f"t{number}")
    rig.janitor.tick()
    clock.advance(1)
    with costs(store, get=5, stat=5):
        rig.janitor.tick()


def test_a_janitors_tick_after_commits(store: DelayedStore, clock: ManualClock) -> None:
    """The broker's own commits are known to the janitor, which probes for those of others only."""
    rig = Rig(store, clock)
    rig.create("t")
    rig.janitor.tick()
    for _ in range(3):
        fill(rig, 1, 1)
        rig.publish()
    with costs(store, get=1, stat=1):
        rig.janitor.tick()


def test_administration(store: DelayedStore, clock: ManualClock) -> None:
    """A change of a topic replays no table: it is a commit, and a change of the metadata."""
    rig = Rig(store, clock)
    rig.create("t")
    fill(rig, 1, 4)
    rig.publish()
    with costs(store, put_new=2, get=3, stat=1, list_after=1):
        rig.broker.topics.alter(AlterTopic(topic="t", config={"retention.ms": "1000"}))
    with costs(store, put_new=2, get=2, stat=1, list_after=1):
        rig.broker.topics.add_partitions(AddPartitions(topic="t", partitions=2))
    with costs(store, put_new=1, get=2, stat=2):
        rig.broker.deletion.delete(DeleteRecords(topic="t", offsets={0: 4}, timeout_seconds=1.0))


def test_looking_for_newer_metadata(store: DelayedStore, clock: ManualClock) -> None:
    """A broker that looks whether it still leads, with each heartbeat, makes one probe."""
    rig = Rig(store, clock)
    rig.create("t")
    meta = MetadataStore(store, clock=clock)
    with costs(store, list_after=1, get=3):
        meta.refresh()
    with costs(store, get=1):
        meta.refresh()
    rig.create("u")
    with costs(store, get=2):
        meta.refresh()
    for _ in range(30):
        with costs(store, get=1):
            clock.advance(1.0)
            meta.refresh()
    clock.advance(LOOK_SECONDS)
    with costs(store, get=1, list_after=1):
        meta.refresh()


# ------------------------------------------------------------------------------ reading


def test_a_reader_without_a_broker(store: DelayedStore, clock: ManualClock) -> None:
    """A reader's refresh costs four probes and one request for each flush; at times it lists."""
    rig = Rig(store, clock)
    rig.create("t", 4)
    fill(rig, 4, 8)
    rig.publish()
    follower = RootFollower(store, clock=clock)
    with costs(store, get=6, list_after=2, stat=1, get_range=16):
        follower.refresh(["t"])
    with costs(store, get=2, stat=1, get_range=1):
        follower.refresh(["t"])
    fill(rig, 4, 1)
    with costs(store, get=2, stat=1, get_range=2):
        follower.refresh(["t"])
    clock.advance(6)
    with costs(store, get=2, list_after=1, stat=1, get_range=1):
        follower.refresh(["t"])


def test_a_read_of_the_broker(store: DelayedStore, clock: ManualClock) -> None:
    """Records in the hot tail cost nothing; others one request for each flush or file."""
    rig = Rig(store, clock)
    rig.create("t")
    fill(rig, 1, 5)
    with costs(store):
        assert len(rig.read()) == 5
    rig = rig.successor()
    with costs(store, get_range=5):
        assert len(rig.read()) == 5
    rig.publish()
    with costs(store, get_range=1):  # the publisher's view of the table is the readers' too
        assert len(rig.read()) == 5


# ------------------------------------------------------------------------------ in parallel


class Meeting:
    """Calls that wait until `count` of them are under way."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=10)

    def __call__(self, number: int) -> int:
        self._barrier.wait()
        return number


def test_as_many_at_once_as_the_store_takes(store: DelayedStore, clock: ManualClock) -> None:
    """Calls run at once up to the bound, and their results have the order of the items."""
    assert in_parallel(store, Meeting(32), range(96)) == list(range(96))
    assert in_parallel(store, Meeting(4), range(8), at_once=4) == list(range(8))
    with pytest.raises(threading.BrokenBarrierError):
        in_parallel(store, _impatient(5), range(8), at_once=4)
    two = DelayedStore(MemoryStore(clock), 0.0, clock, requests_at_once=2)
    with pytest.raises(threading.BrokenBarrierError):
        in_parallel(two, _impatient(3), range(8), at_once=4)


def _impatient(count: int) -> Meeting:
    meeting = Meeting(count)
    meeting._barrier = threading.Barrier(count, timeout=0.05)
    return meeting


def test_a_store_that_gains_nothing_gets_no_threads(clock: ManualClock) -> None:
    """On a disk or in memory, calls run in the caller's thread, in order."""
    ran: list[tuple[int, int]] = []
    in_parallel(
        MemoryStore(clock), lambda number: ran.append((number, threading.get_ident())), range(4)
    )
    assert ran == [(number, threading.get_ident()) for number in range(4)]


def test_the_first_error_in_order_is_raised(store: DelayedStore) -> None:
    """The error of the first item that failed is raised, after calls under way have ended."""
    ended: list[int] = []
    second = threading.Event()

    def call(number: int) -> None:
        if number == 0:
            second.wait(10)
        try:
            if number < 2:
                raise ValueError(number)
        finally:
            ended.append(number)
            if number == 1:
                second.set()

    with pytest.raises(ValueError, match="0"):
        in_parallel(store, call, range(3))
    assert {0, 1} <= set(ended)


def test_counted_as_a_bucket_bills(store: DelayedStore) -> None:
    """Listings and deletions count once for each 1,000 objects, and listings once if empty."""
    with costs(store, list_after=1, folders=1, walk=1):
        store.list_after("f")
        store.folders("f")
        assert list(store.walk("f")) == []
    paths = [f"f/{number:04}" for number in range(1_001)]
    for path in paths:
        store.put_new(path, b"")
    with costs(store, list_after=2, walk=2, delete=2):
        assert len(store.list_after("f")) == 1_001
        assert len(list(store.walk("f"))) == 1_001
        store.delete(paths)


def test_the_most_requests_at_once(clock: ManualClock) -> None:
    """A delayed store records how many requests were under way together."""
    meeting = Meeting(8)

    class Waiting(ManualClock):
        def sleep(self, seconds: float) -> None:
            meeting(0)

    far = DelayedStore(MemoryStore(clock), 0.0, Waiting())
    in_parallel(far, far.list_after, ["f"] * 16, at_once=8)
    assert far.most_at_once == 8


# ------------------------------------------------------------------------------ reads in parallel


@pytest.fixture
def slow() -> DelayedStore:
    """An object store where each request takes 5 ms, so that requests meet."""
    return DelayedStore(MemoryStore(SystemClock()), 0.005)


def quick(slow: DelayedStore) -> MemoryStore:
    """Returns the store inside, to prepare objects without the delay."""
    assert isinstance(slow._inner, MemoryStore)
    return slow._inner


def test_tables_are_read_in_parallel(slow: DelayedStore) -> None:
    """A start reads the tables of many topics at once, and so does a reader of many topics."""
    rig = Rig(quick(slow), SystemClock())
    for number in range(40):
        rig.create(f"t{number}", 2)
    rig.append(["a"], topic="t7", partition=1)
    slow.most_at_once = 0
    rig = rig.successor(store=slow)
    assert 8 <= slow.most_at_once <= limits.STORE_REQUESTS_AT_ONCE
    assert [rig.end(f"t{number}", 1) for number in range(40)] == [0] * 7 + [1] + [0] * 32
    slow.most_at_once = 0
    follower = RootFollower(slow, clock=SystemClock())
    found = follower.refresh([f"t{number}" for number in range(40)])
    assert 8 <= slow.most_at_once <= limits.STORE_REQUESTS_AT_ONCE
    assert follower.ends(found["t7"]) == (0, 1)


def test_the_log_is_recovered_in_parallel(slow: DelayedStore) -> None:
    """A start reads the flushes of its predecessor many at a time, and keeps their order."""
    rig = Rig(quick(slow), SystemClock())
    rig.create("t")
    fill(rig, 1, 100)
    slow.most_at_once = 0
    rig = rig.successor(store=slow)
    assert 8 <= slow.most_at_once <= limits.STORE_REQUESTS_AT_ONCE
    assert rig.read() == [(number, f"{number}".encode()) for number in range(100)]


def test_commits_are_read_in_parallel(slow: DelayedStore) -> None:
    """A table with many commits is replayed in order from reads in parallel, a few at a time."""
    rig = Rig(quick(slow), SystemClock())
    rig.create("t")
    for _ in range(30):
        fill(rig, 1, 1)
        rig.publish()
    slower = DelayedStore(quick(slow), 0.05)  # requests meet on a busy machine too
    table = TopicTable(slower, "t", clock=SystemClock())
    assert table.refresh().ends == (30,)
    assert [file.first for file in table.snapshot.files[0]] == list(range(30))
    assert slower.most_at_once == limits.TABLE_REQUESTS_AT_ONCE


def test_a_commit_that_was_not_found_yet_ends_the_read(clock: ManualClock) -> None:
    """A later commit does not count before the one that it follows, however they arrive."""

    class Hiding(MemoryStore):
        """A store whose first answer for a path is that it is absent."""

        requests_at_once = 4
        hidden = ""

        def get(self, path: str) -> pa.Buffer:
            if path == self.hidden:
                self.hidden = ""
                raise ObjectMissing(path)
            return super().get(path)

    store = Hiding(clock)
    rig = Rig(store, clock)
    rig.create("t")
    for _ in range(12):
        fill(rig, 1, 1)
        rig.publish()
    for hidden in range(13):
        table = TopicTable(store, "t", clock=clock)
        store.hidden = f"{table.log_folder}/{delta_log.commit_name(hidden)}"
        table.refresh()
        assert table.refresh().version == 12
        assert [file.first for file in table.snapshot.files[0]] == list(range(12))


def test_files_are_confirmed_in_parallel(slow: DelayedStore) -> None:
    """Commits and files of many topics are checked at once."""
    rig = Rig(quick(slow), SystemClock())
    for number in range(20):
        rig.create(f"t{number}")
        fill(rig, 1, 1, topic=f"t{number}")
    rig.publish()
    for topic in rig.led_partitions.topics():
        topic.table.store = topic.table.log_reader.store = slow
    rig.confirmer._store = slow
    rig.confirmer.confirm()
    assert slow.most_at_once >= 8
    assert rig.led_partitions.backlog.unconfirmed_count == 0


def test_a_backlog_is_read_in_parallel(slow: DelayedStore) -> None:
    """Flushes that are not in memory are read at once, by readers and by the publisher."""
    rig = Rig(quick(slow), SystemClock())
    rig.create("t")
    fill(rig, 1, 60)
    values = [(number, f"{number}".encode()) for number in range(60)]
    rig = rig.successor(store=slow)
    slow.most_at_once = 0
    assert rig.read() == values
    assert 8 <= slow.most_at_once <= limits.STORE_REQUESTS_AT_ONCE
    slow.most_at_once = 0
    slow.requests.clear()
    rig.publish()
    assert slow.requests["get_range"] == 60
    assert 8 <= slow.most_at_once <= limits.STORE_REQUESTS_AT_ONCE
    assert rows_of_table(slow, SystemClock()) == values


def test_read_ahead_is_bounded(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are read ahead up to a number of bytes, and an error only counts for its entry."""
    rig = Rig(store, clock)
    rig.create("t")
    fill(rig, 1, 6)
    partition = rig.led_partitions.topic("t").partition(0)
    entries = list(partition.unpublished)
    path = object_path(entries[2].at)
    monkeypatch.setattr(
        "sparklog.storage.reading.read_ahead.READ_AHEAD_BYTES", 3 * entries[0].entry.length
    )
    ahead = ReadAhead(store, entries, is_wanted=lambda each: each is not entries[1])
    store.delete([path])
    with costs(store, get_range=3):
        ahead.payload(entries[0])
    with costs(store), pytest.raises(ObjectMissing, match=path):
        ahead.payload(entries[2])
    with costs(store):
        ahead.payload(entries[3])
    with costs(store, get_range=2):
        ahead.payload(entries[4])
        ahead.payload(entries[5])


def test_commits_of_many_topics_are_checked_in_parallel() -> None:
    """Each commit of a round needs a probe, and these are made at once."""

    class Watching(DelayedStore):
        """Records how many probes are under way together."""

        probes = most_probes = 0

        def stat(self, path: str) -> Stat:
            self.probes += 1
            self.most_probes = max(self.most_probes, self.probes)
            try:
                return super().stat(path)
            finally:
                self.probes -= 1

    store = Watching(MemoryStore(SystemClock()), 0.005)
    rig = Rig(quick(store), SystemClock())
    for number in range(20):
        rig.create(f"t{number}")
    rig = rig.successor(store=store)
    for number in range(20):
        fill(rig, 1, 1, topic=f"t{number}")
    store.most_probes = 0
    topics = rig.led_partitions.topics()
    assert rig.publisher.publish_together(topics) == [None] * 20
    assert store.most_probes >= 8
    assert rows_of_table(store, SystemClock(), "t19") == [(0, b"0")]
