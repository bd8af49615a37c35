"""Files and commits that vanish between our step and the next: what the WAL still holds is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage import compaction, upkeep
from sparklog.storage.objects import DelayedStore, MemoryStore, NoFaults
from sparklog.storage.objects.memory import Operation
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import Change, Table
from tests.support.brokers import Rig, RigOptions, paths, rows_of_root, rows_of_table

LOG = "topics/t/_delta_log"
COLD = RigOptions(hot_bytes=0)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> MemoryStore:
    """An empty root, on a disk or on an object store."""
    return MemoryStore(clock, is_local=request.param)


class Vacuum(NoFaults):
    """Another engine removes each data file right after its put, so many times."""

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
    """Has the publisher's files removed between their put and their commit."""
    assert isinstance(rig.store, MemoryStore)
    vacuum = Vacuum(rig.store, count)
    rig.publisher._store = rig.store.view(vacuum)
    return vacuum


# ------------------------------------------------------------------------------ data files


@pytest.mark.parametrize("when", ["here", "by a successor"])
def test_a_file_that_goes_before_its_commit_is_written_again(
    store: MemoryStore, clock: ManualClock, when: str
) -> None:
    """VACUUM without retention between our put and our commit loses no record."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t", 2)
    rig.append(["a", "b"])
    rig.append(["c"], partition=1)
    rig.adopt([(0, ["d"]), (1, ["e"])], batch=1)
    vacuum = vacuumed(rig, count=2)
    rig.publish()
    assert len(vacuum.removed) == 2
    if when == "by a successor":
        rig.keeper._store = store.view(NoFaults())
        rig = rig.successor()
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
        file.path for files in Table(store, "t", clock=clock).refresh().files for file in files
    }
    assert not {path.removeprefix("topics/t/") for path in vacuum.removed} & named


def test_nothing_is_trimmed_before_files_are_seen(store: MemoryStore, clock: ManualClock) -> None:
    """While nobody can look at data files, the WAL keeps their rows; other topics are let go."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.create("u")
    rig.append(["a"])
    rig.append(["x"], topic="u")
    rig.publish()

    class Down(NoFaults):
        def before(self, operation: Operation, path: str) -> None:
            if operation in ("stat", "list_after") and path.startswith("topics/t/partition"):
                raise errors.StorageUnavailable(operation=operation, path=path, reason="down")

    rig.confirmer._store = store.view(Down())
    rig.keeper.checkpoint()
    assert rig.ledger.needed(1, 1) == [1]
    rig.confirmer._store = store
    rig.append(["b"])
    rig.publish()
    rig.keeper.checkpoint()
    assert rig.ledger.needed(1, 1) == []


@pytest.mark.parametrize("heals", [True, False])
def test_a_file_whose_rows_are_nowhere_holds_its_topic_back(
    store: MemoryStore, clock: ManualClock, *, heals: bool
) -> None:
    """It is named, and published on once it is there again; other topics go on."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.create("u")
    rig.append(["a"])
    rig.publish()
    rig.trim()
    rig.append(["b"])
    rig.publish()
    table = Table(store, "t", clock=clock)
    (group,) = compaction.choose(table.refresh(), everything=True)
    merged = compaction.compact(table, group)
    assert merged is not None
    rig.publisher.table(rig.ledger.topic("t")).refresh()
    path = f"topics/t/{merged.path}"
    data = store.get(path)
    store.delete([path])
    rig.append(["c"])
    rig.append(["x"], topic="u")
    rig.keeper.checkpoint()
    with pytest.raises(errors.MissingObject) as missing:
        rig.publisher.publish(rig.ledger.topic("t"))
    assert missing.value.path == path
    rig.publisher.publish(rig.ledger.topic("u"))
    assert rows_of_table(store, clock, "u") == [(0, b"x")]
    if heals:
        store.put(path, data)
        rig.append(["d"])
        rig.keeper.checkpoint()
        rig.publish()
        assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    else:
        assert rig.append(["d"]).base_offset == 3
        assert rows_of_table_beyond(rig) == [b"c", b"d"]


def rows_of_table_beyond(rig: Rig) -> list[bytes | None]:
    """What is not published yet, as the broker serves it."""
    published = rig.ledger.topic("t").partition(0).published
    return [value for _, value in rig.read(start=published)]


def test_each_file_is_asked_for_once(clock: ManualClock) -> None:
    """Confirmation costs a request for a new file, and a listing where there are many."""
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
    with pytest.raises(errors.ForeignTable, match="written over commit 1"):
        rig.publisher.publish(rig.ledger.topic("t"))
    rig.publisher.publish(rig.ledger.topic("u"))
    successor = rig.successor()
    successor.publish()
    assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize("how", ["file", "commit"])
def test_what_a_merge_has_replaced_stays_until_the_merge_is_seen(
    clock: ManualClock, how: str
) -> None:
    """Where the merged file is gone, or its commit written over, the old files are not removed."""
    store = MemoryStore(clock)
    rig = Rig(store, clock)
    rig.create()
    for value in ("a", "b"):
        rig.append([value])
        rig.publish()
    table = Table(store, "t", clock=clock)
    (group,) = compaction.choose(table.refresh(), everything=True)
    merged = compaction.compact(table, group)
    assert merged is not None
    before = paths(store, "topics/t/partition=0")
    janitors = Table(store, "t", clock=clock)
    janitors.refresh()
    lose: dict[str, Callable[[], None]] = {
        "file": lambda: store.delete([f"topics/t/{merged.path}"]),
        "commit": lambda: store.put(f"{LOG}/{3:020d}.json", store.get(f"{LOG}/{2:020d}.json")),
    }
    lose[how]()
    clock.advance(3_600.0)
    for each in (table, janitors):
        with pytest.raises(errors.Corrupt):
            upkeep.sweep_replaced(each)
    left = paths(store, "topics/t/partition=0")
    assert left == [name for name in before if how == "commit" or name not in merged.path]


@pytest.mark.parametrize("trimmed", [True, False])
def test_what_another_engine_has_replaced_stays_where_its_file_is_torn(
    clock: ManualClock, *, trimmed: bool
) -> None:
    """A power cut may take a file's bytes and keep the commit that names it, as nobody flushed."""
    store = MemoryStore(clock, is_local=True)
    rig = Rig(store, clock, options=COLD)
    rig.create()
    for value in ("a", "b"):
        rig.append([value])
        rig.publish()
    if trimmed:
        rig.trim()
    table = Table(store, "t", clock=clock)
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
    table.commit(lambda now: Change(adds=(merged,), removes=now.files[0], data_change=False))
    path = f"topics/t/{merged.path}"
    store.settle("topics/t/partition=0")
    store.lose_unsynced(lambda lost: lost == path)
    assert store.stat(path).size_bytes < 1_000
    clock.advance(3_600.0)
    successor = rig.successor()
    if trimmed:
        with pytest.raises(errors.CorruptObject, match="part-00000"):
            upkeep.sweep_replaced(Table(store, "t", clock=clock))
        clock.advance(limits.TOMBSTONE_SECONDS + 3_600.0)
        late = Table(store, "t", clock=clock)
        late.refresh()
        late.checkpoint()  # forgets what was replaced so long ago
        for sweep in (upkeep.sweep_replaced, upkeep.sweep_orphans):
            with contextlib.suppress(errors.CorruptObject):
                sweep(late)
        assert all(store.stat(each).size_bytes for each in before)
    else:
        successor.confirmer.confirm()
        assert rows_of_table(store, clock) == [(0, b"a"), (1, b"b")]


def test_what_was_read_back_is_forgotten(clock: ManualClock) -> None:
    """Commits wait for their confirmation no longer than until the next sweep."""
    store = MemoryStore(clock)
    rig = Rig(store, clock)
    rig.create()
    for value in ("a", "b", "c"):
        rig.append([value])
        rig.publish()
    table = Table(store, "t", clock=clock)
    (group,) = compaction.choose(table.refresh(), everything=True)
    compaction.compact(table, group)
    assert table._unconfirmed
    upkeep.sweep_replaced(table)
    assert not table._unconfirmed
