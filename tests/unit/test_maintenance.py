"""Maintenance: the files that are removed, and above all those that never are."""

from __future__ import annotations

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.maintenance.file_compaction import FileGroup, compact
from sparklog.storage.maintenance.sweeping import TABLE_LOG_KEPT_SECONDS
from sparklog.storage.objects import Fault, MemoryStore, NoFaults, ScriptedFaults
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file, delta_log
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path, end_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.tables import append, create, publish_rows, record_batch

LOG = "topics/t/_delta_log"


@pytest.fixture
def table(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """A topic of one empty partition."""
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    return table


def another(table: TopicTable) -> TopicTable:
    """A second process's view of the same table."""
    return TopicTable(table.store, table.topic, clock=table.clock)


def commits(table: TopicTable) -> list[int]:
    """The versions whose commits stand."""
    names = [stat.name for stat in table.store.list_after(LOG)]
    return sorted(delta_log.read_names(names).commits)


def data_files(table: TopicTable) -> set[str]:
    """Returns the files in the table's folder alongside the log."""
    found = (stat.name for stat in table.store.walk(table.folder))
    return {name for name in found if not name.startswith("_delta")}


# ------------------------------------------------------------------------------ the log


def test_checkpoint_is_due_every_so_many_commits(table: TopicTable) -> None:
    """A checkpoint is due when enough commits came since the newest one."""
    append(table, 4)
    assert not maintenance.checkpoint_due(table, every=5)
    append(table)
    assert maintenance.checkpoint_due(table, every=5)
    table.checkpoint()
    assert not maintenance.checkpoint_due(table, every=5)
    assert not maintenance.checkpoint_due(another(table), every=5)


def checkpointed(table: TopicTable, *versions: int) -> None:
    """Appends up to the last of these versions, with a checkpoint at each."""
    for version in versions:
        append(table, version - table.snapshot.version)
        table.checkpoint()


def test_log_is_cleaned_up_to_a_checkpoint(table: TopicTable) -> None:
    """Beyond the kept versions, all below the newest checkpoint that they need goes."""
    checkpointed(table, 5, 10, 15, 20)
    append(table, 3)
    assert maintenance.clean_log(table, kept_versions=12) == 11
    assert commits(table) == list(range(10, 24))
    assert another(table).refresh() == table.snapshot
    assert maintenance.clean_log(table, kept_versions=12) == 0


def test_two_checkpoints_stay(table: TopicTable) -> None:
    """However few versions are to be kept, a second checkpoint remains."""
    checkpointed(table, 5, 10, 15)
    append(table)
    maintenance.clean_log(table, kept_versions=1)
    assert commits(table)[0] == 10
    store, newest = table.store, f"{LOG}/{delta_log.checkpoint_name(15)}"
    store.put(newest, store.get(newest).to_pybytes()[:-9])
    assert another(table).refresh() == table.snapshot


def test_damaged_checkpoints_do_not_count(table: TopicTable) -> None:
    """A checkpoint that cannot be read is no reason to remove what it would stand for."""
    checkpointed(table, 5, 10, 15)
    for version in (10, 15):
        path = f"{LOG}/{delta_log.checkpoint_name(version)}"
        table.store.put(path, table.store.get(path).to_pybytes()[:100])
    assert maintenance.clean_log(table, kept_versions=1) == 0
    assert another(table).refresh() == table.snapshot


def test_log_is_kept_by_age(table: TopicTable, clock: ManualClock) -> None:
    """A version goes when it is old, even if there are few."""
    checkpointed(table, 5, 10)
    clock.advance(TABLE_LOG_KEPT_SECONDS + 1)
    append(table)
    assert maintenance.clean_log(table) == 5
    assert commits(table) == list(range(5, 12))


def test_young_log_stays(table: TopicTable) -> None:
    """Within age and number nothing goes."""
    checkpointed(table, 5, 10, 15)
    assert maintenance.clean_log(table) == 0


def test_log_without_checkpoint_stays(table: TopicTable, clock: ManualClock) -> None:
    """Without a checkpoint every commit is needed."""
    append(table, 5)
    clock.advance(TABLE_LOG_KEPT_SECONDS + 1)
    assert maintenance.clean_log(table) == 0


def test_cleaning_goes_from_old_to_new(table: TopicTable, store: MemoryStore) -> None:
    """A clean-up that stops anywhere leaves no gap: while a commit exists, all later ones do."""
    checkpointed(table, 5, 10, 15)
    down = errors.StorageUnavailable(operation="delete", path="x", reason="down")
    faults = ScriptedFaults(Fault(operation="delete", error=down, count=4))
    shaky = TopicTable(store.view(faults), "t", clock=table.clock)
    shaky.refresh()
    with pytest.raises(errors.StorageUnavailable):
        maintenance.clean_log(shaky, kept_versions=1)
    assert commits(table) == list(range(3, 16))
    assert another(table).refresh() == table.snapshot


# ------------------------------------------------------------------------------ replaced files


def merged(table: TopicTable) -> TableFile:
    """Two files merged into one, which the result is; the two are then replaced."""
    publish_rows(table, 0, 10)
    publish_rows(table, 0, 10)
    group = FileGroup(
        topic_id=tables.TOPIC_ID,
        partition=0,
        files=table.snapshot.files[0],
        end=table.snapshot.ends[0],
        is_last=True,
    )
    (found,) = compact(table, [group])
    return found


def test_replaced_files_go_after_the_grace(table: TopicTable, clock: ManualClock) -> None:
    """A replaced file stays for its grace, and is then removed and forgotten."""
    found = merged(table)
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS - 1)
    assert maintenance.sweep_replaced(table) == 0
    clock.advance(2)
    assert maintenance.sweep_replaced(another(table)) == 2
    assert data_files(table) == {found.path}
    assert maintenance.sweep_replaced(table) == 2
    assert maintenance.sweep_replaced(table) == 0
    table.checkpoint()
    assert not table.log_reader.read_checkpoint([delta_log.checkpoint_name(3)]).removes


def test_file_that_came_back_stays(table: TopicTable, clock: ManualClock) -> None:
    """A file that another engine restored is active again, whatever was said before."""
    file = publish_rows(table, 0, 10)
    table.commit(lambda _: TableChange(removes=(file,)))
    back = delta_log.Actions(adds=[delta_log.add_of(file, data_change=True)])
    info = delta_log.CommitInfo(
        timestamp=0,
        operation="RESTORE",
        operation_parameters={},
        is_blind_append=False,
        engine_info="x",
        txn_id="x",
    )
    table.store.put_new(f"{LOG}/{3:020d}.json", delta_log.encode_commit(info, back))
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + 1)
    assert maintenance.sweep_replaced(table) == 0
    assert data_files(table) == {file.path}


def test_a_sweep_that_failed_is_done_again(
    table: TopicTable, store: MemoryStore, clock: ManualClock
) -> None:
    """Objects that the store fails to remove are removed by the next sweep."""
    found = merged(table)
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + 1)
    down = errors.StorageUnavailable(operation="delete", path="x", reason="down")
    faults = ScriptedFaults(Fault(operation="delete", error=down))
    janitors = TopicTable(store.view(faults), "t", clock=clock)
    with pytest.raises(errors.StorageUnavailable):
        maintenance.sweep_replaced(janitors)
    assert maintenance.sweep_replaced(janitors) == 2
    assert data_files(table) == {found.path}


def test_a_commit_that_was_just_read_is_read_back_before_files_go(
    table: TopicTable, store: MemoryStore, clock: ManualClock
) -> None:
    """Another engine may write over it, and the files that it replaced are then of the table."""
    merged(table)
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + 1)
    before = data_files(table)
    newest = f"{LOG}/{delta_log.commit_name(table.snapshot.version)}"

    class WritesOver(NoFaults):
        def after(self, operation: str, path: str) -> None:
            if (operation, path) == ("get", newest):
                store.put(newest, b'{"commitInfo":{}}\n')

    with pytest.raises(errors.ForeignTable):
        maintenance.sweep_replaced(TopicTable(store.view(WritesOver()), "t", clock=clock))
    assert data_files(table) == before


# ------------------------------------------------------------------------------ orphans


def put_orphan(table: TopicTable, topic_id: str = tables.TOPIC_ID) -> TableFile:
    """A file whose writer has not committed it."""
    return data_file.write_file(
        table.store,
        topic=table.topic,
        topic_id=topic_id,
        partition=0,
        batches=[record_batch(0, table.snapshot.ends[0], 10)],
        clock=table.clock,
    )


def test_orphans_go_after_the_grace(table: TopicTable, clock: ManualClock) -> None:
    """A file that no commit names is removed after the grace, and no other."""
    kept = publish_rows(table, 0, 10)
    put_orphan(table)
    put_orphan(table, topic_id="of-a-dead-topic")
    clock.advance(limits.ORPHAN_GRACE_SECONDS - 1)
    young = put_orphan(table)
    assert maintenance.sweep_orphans(table) == 0
    clock.advance(2)
    assert maintenance.sweep_orphans(another(table)) == 2
    assert data_files(table) == {kept.path, young.path}


def test_replaced_files_are_no_orphans(table: TopicTable, clock: ManualClock) -> None:
    """A file within its grace of being replaced stays, however old it is."""
    publish_rows(table, 0, 10)
    clock.advance(limits.ORPHAN_GRACE_SECONDS)
    file = publish_rows(table, 0, 10)
    clock.advance(limits.ORPHAN_GRACE_SECONDS + 1)
    table.commit(lambda _: TableChange(removes=(file,)))
    assert maintenance.sweep_orphans(table) == 0


def test_other_engines_files_are_left_alone(table: TopicTable, clock: ManualClock) -> None:
    """A file with a foreign name may be committed by its engine hours later, so it stays."""
    table.store.put_new(f"{table.folder}/partition=0/part-00000-c000.snappy.parquet", b"x")
    table.store.put_new(f"{table.folder}/_change_data/x.parquet", b"x")
    clock.advance(30 * 24 * 3600.0)
    assert maintenance.sweep_orphans(table) == 0


def test_idle_table_gets_a_commit_first(table: TopicTable, clock: ManualClock) -> None:
    """If no commit followed, an empty one blocks a frozen writer."""
    put_orphan(table)
    clock.advance(limits.ORPHAN_GRACE_SECONDS + 1)
    assert maintenance.sweep_orphans(table) == 1
    assert table.snapshot.version == 1
    assert maintenance.sweep_orphans(table) == 0
    assert table.snapshot.version == 1


def test_early_commit_is_no_bar(table: TopicTable, clock: ManualClock) -> None:
    """A commit from within half the grace does not count: the writer may have checked after it."""
    put_orphan(table)
    clock.advance(limits.ORPHAN_GRACE_SECONDS / 3)
    publish_rows(table, 0, 10)
    clock.advance(limits.ORPHAN_GRACE_SECONDS)
    assert maintenance.sweep_orphans(table) == 1
    assert table.snapshot.version == 2


def test_busy_table_needs_no_commit(table: TopicTable, clock: ManualClock) -> None:
    """A commit that came late enough serves as well."""
    put_orphan(table)
    clock.advance(limits.ORPHAN_GRACE_SECONDS - 1)
    publish_rows(table, 0, 10)
    clock.advance(2)
    assert maintenance.sweep_orphans(table) == 1
    assert table.snapshot.version == 1


def test_frozen_writer_cannot_commit_a_swept_file(
    table: TopicTable, clock: ManualClock, store: MemoryStore
) -> None:
    """A writer that froze between its check and its put loses the put, and then the check."""
    file = put_orphan(table)
    slept: list[int] = []

    class Freeze(ScriptedFaults):
        def before(self, operation: object, path: str) -> None:
            if operation == "put_new" and not slept:
                clock.advance(limits.ORPHAN_GRACE_SECONDS + 1)
                slept.append(maintenance.sweep_orphans(table))

    frozen = TopicTable(store.view(Freeze()), "t", clock=clock)
    with pytest.raises(errors.TimedOut):
        frozen.commit(lambda _: TableChange(adds=(file,)))
    assert slept == [1]
    assert table.refresh().files == ((),)


def test_writer_that_was_faster_keeps_its_file(
    table: TopicTable, clock: ManualClock, store: MemoryStore
) -> None:
    """A file that is committed while the sweeper looks around is not removed."""
    file = put_orphan(table)
    writer = another(table)
    writer.refresh()
    clock.advance(limits.ORPHAN_GRACE_SECONDS / 2 - 1)
    raced: list[TableSnapshot] = []

    class Race(ScriptedFaults):
        def before(self, operation: object, path: str) -> None:
            if operation == "put_new" and not raced:
                # As if it had been issued before: its check was in time.
                writer.orphan_grace_seconds *= 10
                txns = {end_app_id(tables.TOPIC_ID, 0): 10}
                raced.append(writer.commit(lambda _: TableChange(adds=(file,), txns=txns)))

    sweeper = TopicTable(store.view(Race()), "t", clock=clock)
    clock.advance(limits.ORPHAN_GRACE_SECONDS / 2 + 2)
    assert maintenance.sweep_orphans(sweeper) == 0
    assert raced[0].files == ((file,),)
    assert table.store.stat(data_path("t", file)).size_bytes == file.size_bytes


def test_topic_that_never_was(store: MemoryStore, clock: ManualClock) -> None:
    """Upkeep of a table that does not exist does nothing, and makes none."""
    table = TopicTable(store, "none", clock=clock)
    assert not maintenance.checkpoint_due(table)
    assert maintenance.clean_log(table) == 0
    assert maintenance.sweep_replaced(table) == 0
    assert maintenance.sweep_orphans(table) == 0
    table.checkpoint()
    assert not list(store.walk(""))


def test_files_without_a_table_are_left_alone(store: MemoryStore, clock: ManualClock) -> None:
    """A folder without a log is left alone: the log may be missing in the middle of a restore."""
    table = TopicTable(store, "none", clock=clock)
    file = data_file.write_file(
        store,
        topic="none",
        topic_id=tables.TOPIC_ID,
        partition=0,
        batches=[record_batch(0, 0, 10)],
        clock=clock,
    )
    clock.advance(2 * limits.ORPHAN_GRACE_SECONDS)
    assert maintenance.sweep_orphans(table) == 0
    assert [stat.name for stat in store.walk(table.folder)] == [file.path]


# ------------------------------------------------------------------------------ deleted topics


class Recorder(NoFaults):
    """Notes the operations of a store in their order."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []

    def before(self, operation: str, path: str) -> None:
        self.operations.append((operation, path))


def test_removals_are_durable_before_an_emptied_table_is_noted(clock: ManualClock) -> None:
    """No sweep looks for the files of a deleted topic that a power cut brings back after it."""
    recorder = Recorder()
    store = MemoryStore(clock, faults=recorder)
    table = TopicTable(store, "t", clock=clock)
    create(table, 2)
    store.put("topics/t/partition=1/of another program", b"keeps the folder")
    assert not maintenance.is_emptied(store, "t")
    recorder.operations.clear()
    maintenance.note_emptied(table)
    noted = recorder.operations.index(("put", "topics/t/_emptied"))
    for folder in (LOG, "topics/t/partition=1"):
        assert ("sync_folder", folder) in recorder.operations[:noted]
    assert maintenance.is_emptied(store, "t")
