"""Files and commits that vanish after they were written: the rows that the WAL has are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import DelayedStore, MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TOMBSTONE_SECONDS, TopicTable
from tests.support.brokers import Rig, RigOptions, paths, rows_of_root, rows_of_table

LOG = "topics/t/_delta_log"
COLD = RigOptions(hot_bytes=0)


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> MemoryStore:
    """An empty root, on a disk or on an object store."""
    return MemoryStore(clock, is_local=request.param)


class Vacuum(NoFaults):
    """Another engine that removes each data file right after its put, `count` times."""

    def __init__(self, store: MemoryStore, count: int = 1) -> None:
        self._store = store
        self._count = count
        self.removed: list[str] = []

    def after(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.endswith(".parquet") and self._count:
            self._count -= 1
            self.removed.append(path)
            self._store.delete([path])


def vacuumed(rig: Rig, *, count: int = 1) -> Vacuum:
    """Removes the publisher's files between their put and their commit."""
    assert isinstance(rig.store, MemoryStore)
    vacuum = Vacuum(rig.store, count)
    rig.publish_to(rig.store.view(vacuum))
    return vacuum


class Down(NoFaults):
    """Fails every request for the data files of topic t, except their puts, while it is down."""

    is_down = True

    def before(self, operation: Operation, path: str) -> None:
        asks = operation in ("stat", "list_after")
        if self.is_down and asks and path.startswith("topics/t/partition"):
            raise errors.StorageUnavailable(operation=operation, path=path, reason="down")


# ------------------------------------------------------------------------------ data files


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("when", ["here", "by a successor"])
def test_a_file_removed_before_its_commit_is_written_again(
    store: MemoryStore, clock: ManualClock, when: str, times: int
) -> None:
    """VACUUM without retention between our put and our commit loses no record.

    The second time it removes the file that was written again.
    """
    rig = Rig(store, clock, options=COLD)
    rig.create("t", 2)
    rig.append(["a", "b"])
    rig.append(["c"], partition=1)
    rig.append_staged([(0, ["d"]), (1, ["e"])], batch=1)
    vacuum = vacuumed(rig, count=2 * times)
    rig.publish()
    assert len(vacuum.removed) == 2
    if when == "by a successor":
        rig.wal_cleaner._store = store.view(NoFaults())
        rig = rig.successor()
        rig.publish_to(store.view(vacuum))
    rig.append(["f"])
    rig.publish()
    for _ in range(2):
        rig.trim()
        rig.append(["g"])
    rig.publish()
    rig.trim()
    expected = [(0, b"a"), (1, b"b"), (2, b"d"), (3, b"f"), (4, b"g"), (5, b"g")]
    assert rows_of_table(store, clock) == expected
    assert rows_of_table(store, clock, partition=1) == [(0, b"c"), (1, b"e")]
    assert rig.successor().read() == rows_of_root(store, clock) == expected
    named = {
        file.path for files in TopicTable(store, "t", clock=clock).refresh().files for file in files
    }
    assert not {path.removeprefix("topics/t/") for path in vacuum.removed} & named


def slow_vacuum(store: MemoryStore) -> None:
    """Removes files that another engine listed before their commit, long after it."""
    folder = "topics/t/partition=0"
    names = paths(store, folder)
    assert names
    store.delete(f"{folder}/{name}" for name in names)


def test_a_file_that_is_written_again_has_the_columns_that_it_had(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Typed columns that are no longer filled keep the values of a lost file."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t", value_format="json", value_schema="n BIGINT")
    rig.append(['{"n": 1}'])
    vacuumed(rig)
    rig.publish()
    unset: dict[str, str | None] = {"value.format": None, "value.schema": None}
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="t", config=unset))
    rig.trim()
    ((file,),) = TopicTable(store, "t", clock=clock).refresh().files
    found = pq.read_table(store.open(data_path("t", file)), partitioning=None)
    assert found.column("n").to_pylist() == [1]


def test_a_file_that_begins_within_an_entry_is_written_again(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Records that were deleted from the beginning of an entry stay deleted."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.append(["a", "b", "c", "d"])
    rig.publish()
    request = flight_messages.DeleteRecords(topic="t", offsets={0: 2}, timeout_seconds=1.0)
    rig.broker.deletion.delete(request)
    topic = rig.led_partitions.topic("t")
    (file,) = topic.table.refresh().files[0]
    store.delete([f"topics/t/{file.path}"])
    rig.confirmer.confirm()
    assert rows_of_table(store, clock) == rig.read(start=2) == [(2, b"c"), (3, b"d")]


@pytest.mark.parametrize("step_seconds", [1.0, 4.0, 9.0])
def test_a_file_is_checked_some_time_after_its_commit(
    store: MemoryStore, clock: ManualClock, step_seconds: float
) -> None:
    """A VACUUM that began before the commit may remove a file until its check."""
    rig = Rig(store, clock, options=dataclasses.replace(COLD, confirm_after_seconds=10.0))
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    seconds = 0.0
    while seconds + step_seconds < 10.0:
        rig.confirmer.confirm()
        clock.advance(step_seconds)
        seconds += step_seconds
    rig.confirmer.confirm()
    assert rig.led_partitions.backlog.unconfirmed_count == 1
    slow_vacuum(store)
    rig.append(["b"])
    rig.publish()
    for _ in range(round(40.0 / step_seconds)):
        clock.advance(step_seconds)
        rig.confirmer.confirm()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]
    assert rig.led_partitions.backlog.unconfirmed_count == 0


@pytest.mark.parametrize("times", [1, 3])
def test_a_file_that_was_written_again_is_checked_as_late(
    store: MemoryStore, clock: ManualClock, times: int
) -> None:
    """The VACUUM that took the first file may take the next one too."""
    rig = Rig(store, clock, options=dataclasses.replace(COLD, confirm_after_seconds=10.0))
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    rig.confirmer.confirm()
    for _ in range(times):
        slow_vacuum(store)
        for _ in range(2):
            clock.advance(10.0)
            rig.confirmer.confirm()
        assert rows_of_table(store, clock) == [(0, b"a")]
    slow_vacuum(store)
    assert rig.led_partitions.backlog.unconfirmed_count == 1
    for _ in range(4):
        clock.advance(10.0)
        rig.confirmer.confirm()
    assert rows_of_table(store, clock) == [(0, b"a")]
    assert rig.led_partitions.backlog.unconfirmed_count == 0


def test_a_commit_is_read_back_some_time_after_it(clock: ManualClock) -> None:
    """An engine without conditional commits may overwrite ours some seconds after we put it."""
    store = MemoryStore(clock)
    rig = Rig(store, clock, options=dataclasses.replace(COLD, confirm_after_seconds=10.0))
    rig.create("t")
    for number in range(11):
        rig.append([f"{number}"])
        rig.publish()
        rig.confirmer.confirm()
        clock.advance(1)
    path = f"{LOG}/{11:020d}.json"
    store.put(path, store.get(f"{LOG}/{10:020d}.json"))
    for _ in range(2):
        clock.advance(10)
        rig.confirmer.confirm()
    with pytest.raises(errors.ForeignTable, match="overwritten commit 11"):
        rig.publisher.publish(rig.led_partitions.topic("t"))


def test_a_sweep_does_not_spare_a_young_commit_the_later_check(clock: ManualClock) -> None:
    """The janitor reads all commits back, but the put of another engine may come after that."""
    store = MemoryStore(clock)
    rig = Rig(store, clock, options=dataclasses.replace(COLD, confirm_after_seconds=10.0))
    topic = rig.create("t")
    rig.append(["a"])
    rig.publish()
    rig.confirmer.confirm()
    maintenance.sweep_replaced(topic.table)
    path = f"{LOG}/{1:020d}.json"
    store.put(path, store.get(f"{LOG}/{0:020d}.json"))
    for _ in range(2):
        clock.advance(10)
        rig.confirmer.confirm()
    assert rig.led_partitions.backlog.unconfirmed_count == 1
    with pytest.raises(errors.ForeignTable, match="overwritten commit 1"):
        rig.publisher.publish(topic)


def test_what_is_published_while_the_check_begins_waits_for_the_next(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry is confirmed whose commit is younger than those that are read back."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    rig.append(["b"])

    def asked() -> float:
        now = clock.monotonic()
        clock.advance(1)
        rig.publish()
        return now

    monkeypatch.setattr(rig.confirmer, "_clock", SimpleNamespace(monotonic=asked))
    rig.confirmer.confirm()
    assert rig.led_partitions.backlog.unconfirmed_count == 1


def test_a_check_that_ends_after_its_topic_leaves_nothing(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The reason why a topic is not published is forgotten with the topic."""
    rig = Rig(store, clock, options=COLD)
    topic = rig.create("t")
    rig.broker.topics.delete("t")
    rig.publisher.set_refusal(topic, errors.UnknownTopic(topic="t"))
    assert not rig.publisher._refused


def test_unconfirmed_entries_are_bounded(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If more is published in that time, files are checked sooner."""
    monkeypatch.setattr(limits, "UNCONFIRMED_ENTRIES", 3)
    rig = Rig(store, clock, options=dataclasses.replace(COLD, confirm_after_seconds=10.0))
    rig.create("t")
    for number in range(10):
        rig.append([f"{number}"])
        rig.publish()
        rig.confirmer.confirm()
        assert rig.led_partitions.backlog.unconfirmed_count < 3


def test_nothing_is_trimmed_before_files_are_seen(store: MemoryStore, clock: ManualClock) -> None:
    """While data files cannot be checked, the WAL keeps their rows; other topics are trimmed."""
    down = Down()
    rig = Rig(store.view(down), clock, options=COLD)
    rig.create("t")
    rig.create("u")
    rig.append(["a"])
    rig.append(["x"], topic="u")
    rig.publish()

    rig.wal_cleaner.checkpoint()
    assert rig.led_partitions.backlog.objects.needed(1, 1) == [1]
    down.is_down = False
    rig.append(["b"])
    rig.publish()
    rig.wal_cleaner.checkpoint()
    assert rig.led_partitions.backlog.objects.needed(1, 1) == []


def test_an_epoch_that_was_closed_hides_no_record(store: MemoryStore, clock: ManualClock) -> None:
    """A checkpoint may name older entries that are gone; later files are still checked."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    down = Down()
    second = rig.successor(store=store.view(down))
    second.wal_cleaner.checkpoint()
    down.is_down = False
    second.confirmer.confirm()
    second.wal_cleaner._close_inherited()
    third = second.successor()
    third.append(["b"])
    assert len(vacuumed(third).removed) == 0
    third.publish()
    fourth = third.successor()
    fourth.append(["c"])
    fourth.publish()
    fourth.trim()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_failing_check_is_logged_once(
    store: MemoryStore, clock: ManualClock, logged: Callable[[], list[tuple[str, str | None]]]
) -> None:
    """The log has one line when the failure begins, and one when it is over."""
    down = Down()
    rig = Rig(store.view(down), clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    before = len(logged())
    for _ in range(3):
        rig.confirmer.confirm()
    assert logged()[before:] == [("cannot check data files", "t")]
    down.is_down = False
    rig.confirmer.confirm()
    assert logged()[before + 1 :] == [("data files of published records exist again", "t")]


@pytest.mark.parametrize("first", [0, 1])
def test_a_partition_that_was_blocked_hides_no_record(
    store: MemoryStore, clock: ManualClock, first: int
) -> None:
    """Entries that came into its table meanwhile are checked before the log drops their rows."""
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for value in ("a", "b")[:first]:
        rig.append([value])
        rig.publish()
    for value in ("a", "b", "c")[first:]:
        rig.append([value])
    second = rig.successor()
    topic = second.led_partitions.topic("t")
    partition, moved = topic.partition(0), errors.ForeignTable(topic="t", reason="its txn moved")
    second.led_partitions.backlog.block(topic, partition, moved, end=partition.end)
    topic.held_back = str(moved)
    vacuumed(rig)
    rig.publisher.publish(rig.led_partitions.topic("t"))  # a commit that was under way
    second.publisher.publish(topic)
    assert partition.blocked is None
    assert (partition.published, partition.end) == (3, 3)
    assert [each.entry.base_offset for each in partition.unconfirmed] == [0, 1, 2]
    assert second.led_partitions.backlog.unconfirmed_count == 3
    assert second.append(["d"]).base_offset == 3
    second.publish()
    for _ in range(2):
        second.trim()
        second.append(["e"])
    second.publish()
    expected = [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d"), (4, b"e"), (5, b"e")]
    assert rows_of_table(store, clock) == second.successor().read() == expected


@pytest.mark.parametrize("heals", [True, False])
def test_a_file_whose_rows_are_nowhere_holds_its_topic_back(
    store: MemoryStore, clock: ManualClock, *, heals: bool
) -> None:
    """The file is named, and the topic published again once it exists; other topics continue."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    rig.trim()
    rig.append(["b"])
    rig.publish()
    table = TopicTable(store, "t", clock=clock)
    (group,) = file_compaction.choose(table.refresh(), everything=True)
    (merged,) = file_compaction.compact(table, [group])
    rig.led_partitions.topic("t").table.refresh()
    path = f"topics/t/{merged.path}"
    data = store.get(path)
    store.delete([path, *(f"topics/t/{file.path}" for file in group.files)])
    rig.append(["c"])
    rig.append(["x"], topic="u")
    rig.wal_cleaner.checkpoint()
    with pytest.raises(errors.MissingObject) as missing:
        rig.publisher.publish(rig.led_partitions.topic("t"))
    assert missing.value.path == path
    rig.publisher.publish(rig.led_partitions.topic("u"))
    assert rows_of_table(store, clock, "u") == [(0, b"x")]
    if heals:
        store.put(path, data)
        rig.append(["d"])
        rig.wal_cleaner.checkpoint()
        rig.publish()
        assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    else:
        assert rig.append(["d"]).base_offset == 3
        assert rows_of_table_beyond(rig) == [b"c", b"d"]


def rows_of_table_beyond(rig: Rig) -> list[bytes | None]:
    """The unpublished values, as the broker serves them."""
    published = rig.led_partitions.topic("t").partition(0).published
    return [value for _, value in rig.read(start=published)]


def test_each_file_is_asked_for_once(clock: ManualClock) -> None:
    """Confirmation costs a request per new file, and a listing if there are many."""
    inner = MemoryStore(clock)
    rig = Rig(inner, clock)
    rig.create()
    far = DelayedStore(inner, 0.0, clock)
    rig.confirmer._store = far
    for files, stats, lists in ((3, 3, 0), (1, 1, 0), (20, 0, 1)):
        for _ in range(files):
            rig.append(["a"])
            rig.publish()
        far.requests.clear()
        rig.confirmer.confirm()
        rig.confirmer.confirm()
        assert (far.requests["stat"], far.requests["list_after"]) == (stats, lists)


# ------------------------------------------------------------------------------ commits


def test_a_commit_that_is_written_over_is_published_again(clock: ManualClock) -> None:
    """On an object store the topic stops, and the next broker finds all of it in the WAL."""
    store = MemoryStore(clock)
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    store.put(f"{LOG}/{1:020d}.json", b'{"commitInfo": {"operation": "OPTIMIZE"}}\n')
    rig.append(["b"])
    rig.append(["x"], topic="u")
    rig.trim()
    with pytest.raises(errors.ForeignTable, match="overwritten commit 1"):
        rig.publisher.publish(rig.led_partitions.topic("t"))
    rig.publisher.publish(rig.led_partitions.topic("u"))
    successor = rig.successor()
    successor.publish()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize("how", ["file", "commit"])
def test_files_that_a_merge_replaced_stay_until_it_is_confirmed(
    clock: ManualClock, how: str
) -> None:
    """If the merged file or its commit is gone, the old files are not removed.

    If only the file is gone, they are put back.
    """
    store = MemoryStore(clock)
    rig = Rig(store, clock)
    rig.create()
    for value in ("a", "b"):
        rig.append([value])
        rig.publish()
    table = TopicTable(store, "t", clock=clock)
    (group,) = file_compaction.choose(table.refresh(), everything=True)
    (merged,) = file_compaction.compact(table, [group])
    before = paths(store, "topics/t/partition=0")
    janitors = TopicTable(store, "t", clock=clock)
    janitors.refresh()
    lose: dict[str, Callable[[], None]] = {
        "file": lambda: store.delete([f"topics/t/{merged.path}"]),
        "commit": lambda: store.put(f"{LOG}/{3:020d}.json", store.get(f"{LOG}/{2:020d}.json")),
    }
    lose[how]()
    clock.advance(3_600.0)
    with pytest.raises(errors.Corrupt):
        maintenance.sweep_replaced(table)
    if how == "commit":
        with pytest.raises(errors.Corrupt):
            maintenance.sweep_replaced(janitors)
    else:
        maintenance.sweep_replaced(janitors)
        assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]
    left = paths(store, "topics/t/partition=0")
    assert left == [name for name in before if how == "commit" or name not in merged.path]


@pytest.mark.parametrize("lost_bytes", [1_000, 600, 0], ids=["all", "some", "zeroed"])
@pytest.mark.parametrize("trimmed", [True, False])
def test_files_that_another_engine_replaced_come_back_if_its_file_is_torn(
    clock: ManualClock, lost_bytes: int, *, trimmed: bool
) -> None:
    """A power cut may truncate a file that no engine flushed, and keep the commit that names it.

    Some file systems keep the file's length, and fill it with zeros.
    """
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for value in ("a", "b"):
        rig.append([value])
        rig.publish()
    if trimmed:
        rig.trim()
    table = TopicTable(store, "t", clock=clock)
    snapshot = table.refresh()
    before = [f"topics/t/{file.path}" for file in snapshot.files[0]]
    merged = TableFile(
        path="partition=0/part-00000.parquet",
        partition=0,
        size_bytes=1_000,
        rows=2,
        first=0,
        last=1,
        modified_us=clock.now_us(),
    )
    store.put_unflushed(f"topics/t/{merged.path}", bytes(1_000))
    table.commit(lambda now: TableChange(adds=(merged,), removes=now.files[0], data_change=False))
    path = f"topics/t/{merged.path}"
    store.sync_folder("topics/t/partition=0")
    store.lose_unsynced(lambda lost: lost == path)
    assert store.stat(path).size_bytes < 1_000
    store.put(path, bytes(1_000 - lost_bytes))
    clock.advance(3_600.0)
    successor = rig.successor()
    if trimmed:
        with pytest.raises(errors.CorruptObject, match=r"part-00000.*in the table again"):
            maintenance.sweep_replaced(TopicTable(store, "t", clock=clock))
        clock.advance(TOMBSTONE_SECONDS + 3_600.0)
        late = TopicTable(store, "t", clock=clock)
        late.refresh()
        late.checkpoint()  # drops the record of files that were replaced so long ago
        for sweep in (maintenance.sweep_replaced, maintenance.sweep_orphans):
            sweep(late)
        assert all(store.stat(each).size_bytes for each in before)
    else:
        successor.confirmer.confirm()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]


def test_the_log_is_kept_until_another_engines_file_is_durable(clock: ManualClock) -> None:
    """After an OPTIMIZE without a flush and a VACUUM at once, a power cut loses no record."""
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock, options=COLD)
    rig.create()
    rig.append(["a"])
    rig.publish()
    table = TopicTable(store, "t", clock=clock)
    (ours,) = table.refresh().files[0]
    theirs = dataclasses.replace(ours, path="partition=0/part-00000.parquet")
    store.put_unflushed(f"topics/t/{theirs.path}", store.get(f"topics/t/{ours.path}"))
    table.commit(lambda _: TableChange(adds=(theirs,), removes=(ours,), data_change=False))
    store.delete([f"topics/t/{ours.path}"])
    rig.trim()
    store.lose_unsynced(lambda _: True)
    assert rig.successor().read() == rows_of_table(store, clock) == [(0, b"a")]


def test_confirmed_commits_are_dropped(clock: ManualClock) -> None:
    """The record of confirmed commits is dropped with the next sweep."""
    store = MemoryStore(clock)
    rig = Rig(store, clock)
    rig.create()
    for value in ("a", "b", "c"):
        rig.append([value])
        rig.publish()
    table = TopicTable(store, "t", clock=clock)
    (group,) = file_compaction.choose(table.refresh(), everything=True)
    file_compaction.compact(table, [group])
    assert table._read_backs.due(None)
    clock.advance(limits.CONFIRM_AFTER_SECONDS)
    maintenance.sweep_replaced(table)
    assert not table._read_backs.due(None)
