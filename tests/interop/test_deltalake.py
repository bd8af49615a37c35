"""delta-rs reads what we commit, and we read what delta-rs commits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import DeltaError
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.formats.record import FILE_SCHEMA
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import LocalStore, Payload
from sparklog.storage.snapshot import GapCause, TableSnapshot
from sparklog.storage.table.changes import TableChange, delete_change
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.tables import append, appending, create, publish_rows, record_batch


@pytest.fixture
def table(tmp_path: Path) -> TopicTable:
    """A topic's table in a folder, not created yet."""
    return TopicTable(LocalStore(tmp_path), "t", clock=SystemClock())


def root_of(table: TopicTable) -> str:
    """The table's own folder, as other engines want to have it named."""
    assert isinstance(table.store, LocalStore)
    return f"{table.store.root}/{table.folder}"


def theirs(table: TopicTable) -> DeltaTable:
    """The table as delta-rs opens it."""
    return DeltaTable(root_of(table))


def fresh(table: TopicTable) -> TableSnapshot:
    """The table as another process of ours opens it."""
    return TopicTable(table.store, table.topic, clock=table.clock).refresh()


def our_paths(snapshot: TableSnapshot) -> set[str]:
    """The active files, as we see them."""
    return {file.path for files in snapshot.files for file in files}


def their_paths(found: DeltaTable) -> set[str]:
    """The active files, as delta-rs sees them."""
    return {path.partition("/topics/t/")[2] for path in found.file_uris()}


def by_offset(found: pa.Table) -> pa.Table:
    """The rows in the order of the log."""
    return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


def test_delta_rs_reads_rows(table: TopicTable) -> None:
    """Rows, types, files, `txn` and properties are what we wrote, before and after a checkpoint."""
    create(table)
    for partition in (0, 1, 0):
        publish_rows(table, partition, 50)
    expected = pa.Table.from_batches(
        [record_batch(0, 0, 50), record_batch(0, 50, 50), record_batch(1, 0, 50)]
    )
    for _ in range(2):
        found = theirs(table)
        assert found.version() == 3
        assert by_offset(found.to_pyarrow_table()).select(expected.schema.names).equals(expected)
        assert their_paths(found) == our_paths(table.snapshot)
        assert found.transaction_version(end_app_id(tables.TOPIC_ID, 0)) == 100
        assert found.metadata().configuration["sparklog.topicId"] == tables.TOPIC_ID
        assert found.protocol().min_writer_version == 2
        table.checkpoint()


def test_delta_rs_skips_by_our_statistics(table: TopicTable) -> None:
    """A filter on offset or time opens only the files that may hold it."""
    create(table, 1)
    for _ in range(4):
        publish_rows(table, 0, 10)
    actions = pa.table(theirs(table).get_add_actions(flatten=True)).sort_by("min.offset")
    assert actions["num_records"].to_pylist() == [10] * 4
    assert actions["min.offset"].to_pylist() == [0, 10, 20, 30]
    assert actions["max.offset"].to_pylist() == [9, 19, 29, 39]
    lows = actions["min.timestamp"].cast(pa.int64()).to_pylist()
    assert lows == [tables.START_US + first for first in (0, 10, 20, 30)]


def test_duckdb_and_polars_read_files(table: TopicTable) -> None:
    """Our Parquet encodings are read by engines that are not Arrow's."""
    create(table, 1)
    file = publish_rows(table, 0, 500)
    path = f"{root_of(table)}/{file.path}"
    with duckdb.connect() as connection:
        query = f"select count(value), max(\"offset\") from '{path}'"
        assert connection.execute(query).fetchall() == [(500, 499)]
    expected = record_batch(0, 0, 500).column("value").to_pylist()
    assert pl.read_parquet(path)["value"].to_list() == expected


@pytest.mark.parametrize("folder", ["a b", "a%b", "a#b", "a=b", "a?b", "ä"])
def test_polars_reads_tables_below_any_folder_by_way_of_arrow(tmp_path: Path, folder: str) -> None:
    """With `use_pyarrow`, polars reads a table whose path its own reader misreads (its guide).

    Where polars' own reader is right too, docs/guides/delta-readers.md needs the advice no longer.
    """
    table = TopicTable(LocalStore(tmp_path / folder), "t", clock=SystemClock())
    create(table)
    for partition in (0, 1):
        publish_rows(table, partition, 50)
    path = f"{tmp_path}/{folder}/{table.folder}"
    with pytest.raises((FileNotFoundError, pl.exceptions.SchemaFieldNotFoundError)):
        pl.read_delta(path)
    assert pl.read_delta(path, use_pyarrow=True).height == 100
    found = pl.scan_delta(path, use_pyarrow=True)
    found = found.filter(pl.col("partition") == 1, pl.col("offset") >= 40).select("value")
    expected = record_batch(1, 0, 50).column("value").to_pylist()[40:]
    assert found.collect()["value"].to_list() == expected
    assert len(DeltaTable(path).to_pandas()) == 100


def test_delta_rs_decodes_paths(tmp_path: Path) -> None:
    """A folder whose name looks encoded is another folder to delta-rs, as the guide says."""
    table = TopicTable(LocalStore(tmp_path / "a%20b"), "t", clock=SystemClock())
    create(table)
    with pytest.raises(DeltaError, match="a b/topics/t/_delta_log"):
        theirs(table)


def test_engines_read_files_that_lack_columns_of_nulls(table: TopicTable) -> None:
    """A file of a few rows lacks `key` and `headers` if they are null in all of its rows."""
    create(table, 1)
    nulls = ("key", "headers")
    files = [
        publish_rows(table, 0, 5, nulls=nulls),
        publish_rows(table, 0, 5),
        publish_rows(table, 0, 5, nulls=["headers"]),
    ]
    lacking = [
        set(FILE_SCHEMA.names) - set(pq.read_schema(f"{root_of(table)}/{file.path}").names)
        for file in files
    ]
    assert lacking == [{"key", "headers"}, set(), {"headers"}]
    expected = pa.Table.from_batches(
        [
            tables.with_nulls(record_batch(0, 0, 5), nulls),
            record_batch(0, 5, 5),
            tables.with_nulls(record_batch(0, 10, 5), ["headers"]),
        ]
    )
    found = by_offset(theirs(table).to_pyarrow_table()).select(expected.schema.names)
    assert found.equals(expected)
    frame = pl.read_delta(root_of(table)).sort("offset").select("offset", "key", "value", "headers")
    assert frame.to_dicts() == expected.select(frame.columns).to_pylist()
    theirs(table).optimize.compact()
    assert theirs(table).to_pyarrow_table().sort_by("offset")["key"].equals(expected["key"])
    assert len(our_paths(fresh(table))) == 1


def test_delta_rs_follows_250_commits_with_cleanup(table: TopicTable) -> None:
    """Checkpoints and clean-up as the janitor does them leave a log that delta-rs opens."""
    create(table)
    removed = 0
    for _ in range(250):
        table.commit(appending(table.clock))
        if maintenance.checkpoint_due(table):
            table.checkpoint()
            removed += maintenance.clean_log(table, kept_versions=20)
    assert removed == 100
    found = theirs(table)
    assert found.version() == 250
    assert their_paths(found) == our_paths(table.snapshot)
    assert found.transaction_version(end_app_id(tables.TOPIC_ID, 1)) == 2_500
    assert fresh(table) == table.snapshot


def test_delta_rs_sees_a_deleted_topic_empty(table: TopicTable) -> None:
    """A deleted topic is an empty table without a topic id."""
    create(table)
    append(table, 2)
    table.commit(delete_change)
    found = theirs(table)
    assert found.file_uris() == []
    assert "sparklog.topicId" not in found.metadata().configuration


def test_we_follow_delta_rs_maintenance(table: TopicTable) -> None:
    """An OPTIMIZE, a DELETE, a checkpoint and a clean-up by delta-rs succeed, and the log
    continues.
    """
    create(table, 1)
    for _ in range(6):
        publish_rows(table, 0, 10)
    theirs(table).optimize.compact()
    theirs(table).delete("offset >= 10 and offset < 15")
    theirs(table).create_checkpoint()
    found = table.refresh()
    assert dict(found.gaps) == {(0, GapCause.ENGINE): 60}  # a checkpoint has none of it
    assert dataclasses.replace(found, gaps={}) == fresh(table)
    assert their_paths(theirs(table)) == our_paths(table.snapshot)
    assert table.snapshot.ends == (60,)
    assert sum(file.rows or 0 for file in table.snapshot.files[0]) == 55
    publish_rows(table, 0, 10)
    offsets = by_offset(theirs(table).to_pyarrow_table())["offset"].to_pylist()
    assert offsets == [*range(10), *range(15, 70)]


class Vacuumed(LocalStore):
    """Has delta-rs run a full VACUUM without retention after each put of a file or a commit."""

    def put_new(self, path: str, data: Payload) -> None:
        super().put_new(path, data)
        vacuum(TopicTable(self, "t", clock=SystemClock()))


def vacuum(table: TopicTable) -> list[str]:
    """A full VACUUM by delta-rs, without retention; the files that it has removed."""
    found = theirs(table).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    return [str(path) for path in found]


def test_vacuum_beside_a_merge_takes_no_row(table: TopicTable) -> None:
    """One takes the merged file before its commit, and the next, after it, leaves the old files."""
    create(table, 1)
    for _ in range(3):
        publish_rows(table, 0, 10)
    assert isinstance(table.store, LocalStore)
    beset = TopicTable(Vacuumed(table.store.root), "t", clock=table.clock)
    (group,) = file_compaction.choose(beset.refresh(), everything=True)
    with pytest.raises(errors.CorruptObject, match="are in the table again"):
        file_compaction.compact(beset, [group])
    assert vacuum(table) == []
    assert by_offset(theirs(table).to_pyarrow_table())["offset"].to_pylist() == [*range(30)]
    assert fresh(table) == beset.refresh()
    assert file_compaction.compact(table, [group])
    assert by_offset(theirs(table).to_pyarrow_table())["offset"].to_pylist() == [*range(30)]


def test_rows_that_delta_rs_appends_are_named_until_they_are_gone(table: TopicTable) -> None:
    """A table takes rows from the log only; what delta-rs has added alongside it, it can delete."""
    create(table, 1)
    handle = theirs(table)
    append(table, 3)
    batch = record_batch(0, 1_000, 5)
    write_deltalake(
        handle,
        pa.Table.from_batches([batch]),
        mode="append",
        writer_properties=WriterProperties(compression="ZSTD"),
        commit_properties=CommitProperties(app_transactions=[Transaction("theirs", 7)]),
    )
    with pytest.raises(errors.ForeignTable, match="up to offset 1004, but ends at 30"):
        table.refresh()
    theirs(table).delete("offset >= 1000")
    seen = table.refresh()
    assert seen.version == 5
    assert seen.ends == (30,)
    table.checkpoint()
    assert theirs(table).transaction_version("theirs") == 7


Step = Callable[[TopicTable], object]


def removing(number: int) -> Step:
    """Removes the file of that number, counted round all that there are."""

    def remove(table: TopicTable) -> None:
        def decide(snapshot: TableSnapshot) -> TableChange | None:
            files = [file for each in snapshot.files for file in each]
            return TableChange(removes=(files[number % len(files)],)) if files else None

        table.commit(decide)

    return remove


def merging(partition: int) -> Step:
    """Replaces the first two files of a partition by one, without change of data."""

    def merge(table: TopicTable) -> None:
        def decide(snapshot: TableSnapshot) -> TableChange | None:
            files = snapshot.files[partition][:2] if snapshot.topic_id else ()
            if len(files) < 2:
                return None
            first, last = files[0].first or 0, files[1].last or 0
            merged = tables.table_file(table.clock, partition, first, last)
            return TableChange(adds=(merged,), removes=files, data_change=False)

        table.commit(decide)

    return merge


def recreate(table: TopicTable) -> None:
    """Deletes the topic and creates it again under another id."""
    table.commit(delete_change)
    create(table, topic_id=f"id{table.snapshot.version}")


steps = st.one_of(
    st.just(append),
    st.just(append),
    st.builds(removing, st.integers(0, 50)),
    st.builds(merging, st.integers(0, 1)),
    st.just(recreate),
    st.just(TopicTable.checkpoint),
    st.just(lambda table: maintenance.clean_log(table, kept_seconds=0, kept_versions=3)),
)


@given(changes=st.lists(steps, min_size=1, max_size=25))
@settings(max_examples=25)
def test_all_views_agree(tmp_path_factory: pytest.TempPathFactory, changes: list[Step]) -> None:
    """A follower, a newcomer and delta-rs see the same table after any sequence of changes."""
    store = LocalStore(tmp_path_factory.mktemp("root"))
    table = TopicTable(store, "t", clock=SystemClock())
    create(table)
    follower = TopicTable(store, "t", clock=table.clock)
    for change in changes:
        change(table)
        assert follower.refresh() == table.snapshot
    assert fresh(table) == table.snapshot
    found = theirs(table)
    assert found.version() == table.snapshot.version
    assert their_paths(found) == our_paths(table.snapshot)
    for partition, end in enumerate(table.snapshot.ends):
        app_id = end_app_id(table.snapshot.topic_id or "", partition)
        assert found.transaction_version(app_id) == end
