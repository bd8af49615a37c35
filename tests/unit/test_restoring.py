"""Merges whose files another engine's VACUUM takes are undone, and no row is lost by any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.maintenance import file_compaction, key_compaction, restoring, retention
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table.changes import TableChange, create_change
from sparklog.storage.table.names import tombstones_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support import engines, tables
from tests.support.tables import create, publish_rows

ROWS = 10


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> MemoryStore:
    """An empty root, on a disk or on an object store."""
    return MemoryStore(clock, is_local=request.param)


@pytest.fixture
def table(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """A compacted topic of one partition, with three files."""
    table = TopicTable(store, "t", clock=clock)
    config = {"cleanup.policy": "compact", "delete.retention.ms": "1000"}
    table.commit(lambda _: create_change(tables.TOPIC_ID, 1, config))
    for _ in range(3):
        publish_rows(table, 0, ROWS)
    return table


class Vacuums(NoFaults):
    """Another engine runs VACUUM without retention after each put of one of these kinds."""

    def __init__(self, store: MemoryStore, clock: ManualClock, *suffixes: str) -> None:
        self._table = TopicTable(store, "t", clock=clock)
        self._suffixes = suffixes

    def after(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.endswith(self._suffixes):
            engines.vacuum(self._table)


def beset(table: TopicTable, *suffixes: str) -> TopicTable:
    """Returns the same table for a process alongside whose puts another engine runs VACUUM."""
    assert isinstance(table.store, MemoryStore)
    assert isinstance(table.clock, ManualClock)
    faults = Vacuums(table.store, table.clock, *suffixes)
    found = TopicTable(table.store.view(faults), "t", clock=table.clock)
    found.refresh()
    return found


def offsets(table: TopicTable) -> list[int]:
    """All offsets that the files of the newest version have."""
    files = TopicTable(table.store, "t", clock=table.clock).refresh().files[0]
    return sorted(
        offset for each in files for offset in engines.rows_in(table, each)["offset"].to_pylist()
    )


def merge(table: TopicTable) -> TableFile | None:
    """All files become one."""
    (group,) = file_compaction.choose(table.refresh(), everything=True)
    return next(iter(file_compaction.compact(table, [group])), None)


def put_in_order(table: TopicTable, border: int = 15) -> None:
    """All files become two, which meet at the border."""
    snapshot = table.refresh()
    group = file_compaction.FileGroup(
        topic_id=tables.TOPIC_ID,
        partition=0,
        files=snapshot.files[0],
        end=snapshot.ends[0],
        is_last=True,
    )
    file_compaction.put_in_order(table, group, border=border)


def compact_keys(table: TopicTable) -> None:
    """The last record of each key stays."""
    for each in key_compaction.choose(table, everything=True):
        key_compaction.compact(table, each)


def delete(table: TopicTable) -> None:
    """Deletes up to the middle of the second file."""
    retention.delete_records(table, tables.TOPIC_ID, {0: 15})


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A change that puts rows into other files."""

    run: Callable[[TopicTable], object]
    needed: frozenset[int]
    """Offsets that are in the table after it, whatever becomes of it."""


REWRITINGS = {
    "merge": Rewriting(merge, frozenset(range(30))),
    "put in order": Rewriting(put_in_order, frozenset(range(30))),
    "keys": Rewriting(compact_keys, frozenset(range(23, 30))),
    "delete": Rewriting(delete, frozenset(range(15, 30))),
}


@pytest.mark.parametrize("rewriting", REWRITINGS.values(), ids=REWRITINGS)
@pytest.mark.parametrize("suffixes", [(".parquet",), (".parquet", ".json")], ids=["one", "two"])
def test_no_vacuum_takes_a_row(
    table: TopicTable, clock: ManualClock, rewriting: Rewriting, suffixes: tuple[str, ...]
) -> None:
    """One VACUUM removes uncommitted files; those after the commit keep the replaced ones."""
    janitors = beset(table, *suffixes)
    with pytest.raises((errors.CorruptObject, errors.StorageUnavailable)):
        rewriting.run(janitors)
    engines.vacuum(TopicTable(table.store, "t", clock=clock))
    assert rewriting.needed <= set(offsets(table))
    table.refresh()
    rewriting.run(table)
    maintenance.sweep_replaced(table)
    assert rewriting.needed <= set(offsets(table))


@pytest.mark.parametrize("rewriting", REWRITINGS.values(), ids=REWRITINGS)
def test_a_vacuum_that_takes_its_time(
    table: TopicTable, clock: ManualClock, rewriting: Rewriting
) -> None:
    """It removes the new files long after the commit, when they were seen: they are missed."""
    before = {file.path for file in table.snapshot.files[0]}
    rewriting.run(table)
    maintenance.sweep_replaced(table)
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS - 1)
    new = {file.path for file in table.snapshot.files[0]} - before
    table.store.delete([f"topics/t/{path}" for path in new])
    engines.vacuum(TopicTable(table.store, "t", clock=clock))
    clock.advance(2)
    successor = TopicTable(table.store, "t", clock=clock)
    for each in (table, successor):
        each.refresh()
    with pytest.raises(errors.CorruptObject, match="in the table again"):
        maintenance.sweep_replaced(table)
    assert rewriting.needed <= set(offsets(table))
    maintenance.sweep_replaced(successor)
    assert rewriting.needed <= set(offsets(table))


def test_what_was_replaced_goes_by_the_time_of_its_commit(
    table: TopicTable, clock: ManualClock
) -> None:
    """Our own sweeper does not wait for the date in the log, whichever way it has learned of it."""
    merged = merge(table)
    assert merged is not None
    table.checkpoint()
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + 1)
    late = TopicTable(table.store, "t", clock=clock)
    late.refresh()
    assert late.checkpoint_version == table.snapshot.version
    assert maintenance.sweep_replaced(late) == 3
    stored = [stat.name for stat in table.store.walk("topics/t/partition=0")]
    assert [f"partition=0/{name}" for name in stored] == [merged.path]


def test_a_file_is_looked_at_until_its_grace_is_over(
    table: TopicTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweep looks at young files, and the first one after their grace for the last time.

    On an object store only at those that have replaced others: the log still has the rows of the
    rest when they are confirmed.
    """
    assert merge(table) is not None
    for _ in range(2):
        publish_rows(table, 0, ROWS)
    due = 3 if table.store.is_local else 1
    looks: list[int] = []

    def look(store: MemoryStore, sizes: dict[str, int]) -> set[str]:
        looks.append(len(sizes))
        return torn(store, sizes)

    torn = restoring.torn
    monkeypatch.setattr(restoring, "torn", look)
    grace = limits.REMOVED_FILE_GRACE_SECONDS
    for seconds in (0.0, grace / 2, grace, 0.0, grace):
        clock.advance(seconds)
        maintenance.sweep_replaced(table)
        assert table.may_be_swept() == (len(looks) < 3)
    assert looks == [due, due, due, 0, 0]


def test_what_is_not_there_is_not_put_back(table: TopicTable, clock: ManualClock) -> None:
    """If a replaced file is lost too, the table stays as it is, and no sweep removes more."""
    first, *others = table.snapshot.files[0]
    merged = merge(table)
    assert merged is not None
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + 1)
    table.store.delete([f"topics/t/{merged.path}", f"topics/t/{first.path}"])
    for _ in range(2):
        with pytest.raises(errors.CorruptObject, match="could not be put back"):
            maintenance.sweep_replaced(table)
    assert table.refresh().files == ((merged,),)
    assert all(table.store.stat(f"topics/t/{each.path}").size_bytes for each in others)


@pytest.mark.parametrize("border", [10, 15])
def test_a_part_of_a_commit_is_undone(table: TopicTable, border: int) -> None:
    """One file of it is gone, and the other was merged on: unless an old file has rows of both."""
    put_in_order(table, border)
    low, high = table.snapshot.files[0]
    publish_rows(table, 0, ROWS)
    group = file_compaction.FileGroup(
        topic_id=tables.TOPIC_ID,
        partition=0,
        files=table.snapshot.files[0][1:],
        end=table.snapshot.ends[0],
        is_last=True,
    )
    assert file_compaction.compact(table, [group])
    assert (low.last, high.first) == (border - 1, border)
    table.store.delete([f"topics/t/{low.path}"])
    can_be = "in the table again" if border == 10 else "could not be put back"
    with pytest.raises(errors.CorruptObject, match=can_be):
        maintenance.sweep_replaced(table)
    if border == 10:
        assert offsets(table) == [*range(40)]
    else:
        assert low in table.refresh().files[0]


@pytest.mark.parametrize("data_change", [True, False])
def test_what_another_engine_has_changed_is_not_undone(
    table: TopicTable, clock: ManualClock, *, data_change: bool
) -> None:
    """Rows that it has deleted do not come back, though its file is gone; what it merged does."""
    without = range(5) if data_change else ()
    engines.rewrite(table, table.refresh().files[0], without=without)
    (theirs,) = table.refresh().files[0]
    table.store.delete([f"topics/t/{theirs.path}"])
    with pytest.raises(errors.CorruptObject):
        maintenance.sweep_replaced(table)
    if data_change:
        assert table.refresh().files == ((theirs,),)
    else:
        assert offsets(table) == [*range(30)]


def test_tombstones_wait_again(table: TopicTable, clock: ManualClock) -> None:
    """Lost files may be restored by hand, so a reader has all of the grace period to see them."""
    app_id = tombstones_app_id(tables.TOPIC_ID, 0)
    table.commit(lambda _: TableChange(txns={app_id: 20}))
    merged = merge(table)
    assert merged is not None
    clock.advance(5.0)
    table.store.delete([f"topics/t/{merged.path}"])
    with pytest.raises(errors.CorruptObject):
        maintenance.sweep_replaced(table)
    txn = table.txn(app_id)
    assert txn is not None
    assert (txn.version, txn.last_updated) == (20, clock.now_us() // 1_000)


def test_a_restored_file_has_all_of_its_statistics(table: TopicTable) -> None:
    """They are read from its footer, as they were in the log before."""
    before = table.snapshot.files[0]
    merged = merge(table)
    assert merged is not None
    table.store.delete([f"topics/t/{merged.path}"])
    with pytest.raises(errors.CorruptObject):
        maintenance.sweep_replaced(table)
    assert table.refresh().files[0] == before


def test_what_comes_back_is_durable(clock: ManualClock) -> None:
    """It may be another engine's own file, which that has not flushed."""
    store = MemoryStore(clock, is_local=True)
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    publish_rows(table, 0, ROWS)
    for _ in range(2):
        engines.rewrite(
            TopicTable(store, "t", clock=clock),
            TopicTable(store, "t", clock=clock).refresh().files[0],
        )
    later = TopicTable(store, "t", clock=clock)
    (theirs,) = later.refresh().files[0]
    store.delete([f"topics/t/{theirs.path}"])
    for path, found in store._objects.items():
        if "part-" in path:
            found.flushed = False
    with pytest.raises(errors.CorruptObject, match="in the table again"):
        maintenance.sweep_replaced(later)
    store.lose_unsynced(lambda _: True)
    assert offsets(table) == [*range(ROWS)]
