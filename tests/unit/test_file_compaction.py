"""File compaction: the choice of files, and that merging neither loses nor doubles a record."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.formats.record import FILE_SCHEMA, TIMESTAMP
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.maintenance.file_compaction import (
    FILES_BEFORE_SPANS_END,
    FileGroup,
    choose,
    compact,
    disordered,
    put_in_order,
    together,
)
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    ScriptedFaults,
    Store,
    put_together,
)
from sparklog.storage.reading.sorting import SORT_MEMORY_BYTES
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import TableChange, delete_change
from sparklog.storage.table.names import data_path, end_app_id, maintenance_app_id
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.tables import create, publish_rows

KIB = limits.KIB
MIB = limits.MIB

# ------------------------------------------------------------------------------ choice of files


def snapshot_of(*sizes: int, ages: list[int] | None = None) -> TableSnapshot:
    """One partition of files of ten offsets each, with these sizes and times."""
    files = tuple(
        TableFile(
            path=str(number),
            partition=0,
            size_bytes=size,
            rows=10,
            first=10 * number,
            last=10 * number + 9,
            modified_us=ages[number] if ages else 1_000,
        )
        for number, size in enumerate(sizes)
    )
    return TableSnapshot(
        version=1, topic_id="id", partitions=1, ends=(10 * len(sizes),), starts=(0,), files=(files,)
    )


def chosen(snapshot: TableSnapshot, **how: int) -> list[list[int]]:
    """The numbers of the files in each group; 16 files make a pack, 128 MiB is the target."""
    settings = {"compact_files": 16, "target_bytes": 128 * MIB} | how
    groups = choose(snapshot, **settings)  # type: ignore[arg-type]
    return [[int(file.path) for file in group.files] for group in groups]


def test_few_files_wait() -> None:
    """Fewer than `compact_files` small files are left to become more."""
    assert chosen(snapshot_of(*[MIB] * 15)) == []


def test_enough_files_merge() -> None:
    """`compact_files` neighbours of a size are merged."""
    assert chosen(snapshot_of(*[MIB] * 16)) == [list(range(16))]


def test_partitions_that_were_looked_at_are_skipped() -> None:
    """Only partitions whose files have changed since an earlier snapshot are looked at."""
    old, new = snapshot_of(*[MIB] * 16), snapshot_of(*[KIB] * 16)
    files = (*old.files, *new.files)
    snapshot = dataclasses.replace(old, partitions=2, ends=(160, 160), starts=(0, 0), files=files)
    assert [group.partition for group in choose(snapshot)] == [0, 1]
    assert [group.partition for group in choose(snapshot, old)] == [1]
    assert choose(snapshot, snapshot) == []


def test_big_file_is_not_rewritten_for_small_ones() -> None:
    """A large neighbour stays out of a merge of small files."""
    assert chosen(snapshot_of(20 * MIB, *[KIB] * 16)) == [list(range(1, 17))]
    assert chosen(snapshot_of(20 * MIB, *[KIB] * 15)) == []


def test_full_files_are_left_alone() -> None:
    """A file of at least half the target size is never merged again."""
    assert chosen(snapshot_of(*[65 * MIB] * 40)) == []


def test_target_is_kept() -> None:
    """No merge goes beyond the target."""
    assert chosen(snapshot_of(*[30 * MIB] * 9)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_only_neighbours_merge() -> None:
    """A full file in the middle separates its neighbours."""
    assert chosen(snapshot_of(*[MIB] * 15, 100 * MIB, *[MIB] * 15)) == []


def test_files_that_share_an_offset_stay_apart() -> None:
    """Neighbours that overlap, if only by one offset, are not merged as if they followed."""
    snapshot = snapshot_of(*[MIB] * 4)
    assert chosen(snapshot, compact_files=2) == [[0, 1, 2, 3]]
    assert chosen(snapshot_of(MIB, MIB), compact_files=2) == [[0, 1]]
    files = list(snapshot.files[0])
    files[2] = dataclasses.replace(files[2], first=files[1].last)
    overlapping = dataclasses.replace(snapshot, files=(tuple(files),))
    assert chosen(overlapping, compact_files=2) == []


def test_settled_files_merge_when_old() -> None:
    """A few files without additions are merged once they are old, down to falling sizes."""
    sizes = (40 * MIB, MIB, MIB, MIB)
    young = snapshot_of(*sizes, ages=[0, 0, 50, 50])
    assert chosen(young) == []
    assert chosen(young, settled_before_us=10) == []
    assert chosen(young, settled_before_us=100) == [[1, 2, 3]]
    assert chosen(snapshot_of(40 * MIB, 3 * MIB), settled_before_us=100) == []


def test_a_file_spans_no_more_time_than_it_should() -> None:
    """Neighbours that lie too far apart in time stay apart, unless that leaves too many files."""

    def spread(count: int, seconds: int) -> TableSnapshot:
        snapshot = snapshot_of(*[MIB] * count)
        files = tuple(
            dataclasses.replace(
                file,
                min_timestamp_us=number * seconds * 1_000_000,
                max_timestamp_us=(number * seconds + 1) * 1_000_000,
            )
            for number, file in enumerate(snapshot.files[0])
        )
        return dataclasses.replace(snapshot, files=(files,))

    assert chosen(spread(40, 1), compact_files=4) == [list(range(40))]
    spans = chosen(spread(40, 1), compact_files=4, span_us=10_000_000)
    assert spans == [list(range(first, first + 10)) for first in range(0, 40, 10)]
    assert chosen(spread(40, 60), compact_files=4, span_us=10_000_000) == []
    enough = spread(FILES_BEFORE_SPANS_END, 60)
    assert chosen(enough, compact_files=4, span_us=10_000_000) == []
    many = spread(FILES_BEFORE_SPANS_END + 1, 60)
    assert chosen(many, compact_files=4, span_us=10_000_000) != []


def test_records_without_a_time_do_not_keep_files_apart() -> None:
    """They count as written with their file: alongside younger neighbours it may be merged."""
    mixed: dict[str, Any] = {
        "min_timestamp_us": -1_000,
        "max_timestamp_us": 1_000_000,
        "modified_us": 0,
    }
    none: dict[str, Any] = {
        "min_timestamp_us": -1_000,
        "max_timestamp_us": -1_000,
        "modified_us": 2_000_000,
    }
    old: dict[str, Any] = {
        "min_timestamp_us": -1_000,
        "max_timestamp_us": -1_000,
        "modified_us": 90_000_000,
    }
    snapshot = snapshot_of(*[MIB] * 4)
    for others, expected in ((none, [[0, 1, 2, 3]]), (old, [])):
        changes = (mixed, none, mixed, others)
        files = tuple(
            dataclasses.replace(file, **change)
            for file, change in zip(snapshot.files[0], changes, strict=True)
        )
        found = dataclasses.replace(snapshot, files=(files,))
        assert chosen(found, compact_files=4, span_us=10_000_000) == expected


def test_everything_is_encoded_anew() -> None:
    """A full compaction takes all files below half of the target, even a single one."""
    assert chosen(snapshot_of(100 * MIB, MIB, 2 * KIB, 90 * MIB, KIB), everything=True) == [
        [1, 2],
        [4],
    ]


def test_overlapping_files_are_left_alone() -> None:
    """Files whose offsets overlap are not merged, nor is anything across them."""
    snapshot = snapshot_of(*[MIB] * 20)
    files = list(snapshot.files[0])
    files[10] = dataclasses.replace(files[10], first=95)
    assert chosen(dataclasses.replace(snapshot, files=(tuple(files),))) == []
    assert chosen(dataclasses.replace(snapshot, files=(tuple(files),)), compact_files=9) == [
        list(range(9)),
        list(range(11, 20)),
    ]


def test_unknown_file_gets_statistics() -> None:
    """A file without statistics is encoded again by itself, and merged later."""
    snapshot = snapshot_of(MIB, MIB)
    unknown = dataclasses.replace(snapshot.files[0][0], first=None, last=None)
    assert chosen(dataclasses.replace(snapshot, files=((unknown, snapshot.files[0][1]),))) == [[0]]


@given(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=400))
def test_writing_is_amplified_a_little(sizes: list[int]) -> None:
    """However sizes vary, a byte is rewritten a few times only, and few files remain."""
    target, fan_in = 16 * MIB, 8
    files: list[TableFile] = []
    rewrites = Counter[int]()
    for number, size in enumerate(sizes):
        files.append(
            TableFile(
                path=str(number),
                partition=0,
                size_bytes=size,
                rows=1,
                first=number,
                last=number,
            )
        )
        snapshot = TableSnapshot(
            version=1, topic_id="id", partitions=1, ends=(0,), starts=(0,), files=(tuple(files),)
        )
        for group in choose(snapshot, compact_files=fan_in, target_bytes=target):
            first, last = group.files[0].first or 0, group.files[-1].last or 0
            rewrites.update(range(first, last + 1))
            merged = dataclasses.replace(
                group.files[0], last=last, size_bytes=sum(f.size_bytes for f in group.files)
            )
            start = files.index(group.files[0])
            files[start : start + len(group.files)] = [merged]
    assert max(rewrites.values(), default=0) <= math.log2(target)
    written = sum(rewrites[number] * size for number, size in enumerate(sizes))
    assert written <= 5 * sum(sizes)
    small = sum(file.size_bytes <= target // 2 for file in files)
    assert small <= 2 * fan_in * (1 + math.log(target, fan_in))


# ------------------------------------------------------------------------------ merging


@pytest.fixture
def clock() -> ManualClock:
    """A fixed clock, close to the time stamps that a local store gives its files."""
    return tables.manual_clock(at_us=time.time_ns() // 1_000)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Store:
    """An empty store of each kind."""
    return LocalStore(tmp_path) if request.param == "local" else MemoryStore(clock)


@pytest.fixture
def table(store: Store, clock: ManualClock) -> TopicTable:
    """A topic of one empty partition."""
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    return table


def rows_of(table: TopicTable) -> pa.Table:
    """All rows of partition 0, as its files hold them."""
    parts = [
        pq.read_table(table.store.get(data_path(table.topic, file)))
        for file in table.snapshot.files[0]
    ]
    return pa.concat_tables(parts).sort_by("offset")


def whole(table: TopicTable) -> FileGroup:
    """All files of partition 0 as one group."""
    return FileGroup(
        topic_id=table.snapshot.topic_id or "",
        partition=0,
        files=table.snapshot.files[0],
        end=table.snapshot.ends[0],
        is_last=True,
    )


def data_files(table: TopicTable) -> set[str]:
    """Returns the files in the table's folder alongside the log."""
    return {
        stat.name for stat in table.store.walk(table.folder) if not stat.name.startswith("_delta")
    }


def test_merge_keeps_every_row(table: TopicTable) -> None:
    """The rows before are the rows after, in one file, whose commit changes no data."""
    for _ in range(5):
        publish_rows(table, 0, 20)
    before, inputs = rows_of(table), data_files(table)
    (merged,) = compact(table, [whole(table)])
    assert table.snapshot.files == ((merged,),)
    assert rows_of(table).equals(before)
    assert (merged.first, merged.last, merged.rows) == (0, 99, 100)
    assert table.snapshot.ends == (100,)
    assert inputs < data_files(table)
    commit = table.store.get(f"{table.log_folder}/{6:020d}.json").to_pybytes()
    assert b'"dataChange":true' not in commit
    assert maintenance_app_id(tables.TOPIC_ID).encode() in commit


def test_merge_goes_on_beside_the_publisher(table: TopicTable, clock: ManualClock) -> None:
    """A publish between the merge and its commit is not a conflict."""
    publish_rows(table, 0, 20)
    publish_rows(table, 0, 20)
    slow = TopicTable(table.store, "t", clock=clock)
    slow.refresh()
    group = whole(table)
    publish_rows(table, 0, 20)
    assert compact(slow, [group])
    assert [file.first for file in table.refresh().files[0]] == [0, 40]


def test_two_merges_of_the_same_files(table: TopicTable, clock: ManualClock) -> None:
    """One of two merges of the same files lands; the other leaves nothing behind."""
    publish_rows(table, 0, 20)
    publish_rows(table, 0, 20)
    group = whole(table)
    late = TopicTable(table.store, "t", clock=clock)
    late.refresh()
    assert compact(table, [group])
    files = data_files(table)
    assert compact(late, [group]) == []
    assert data_files(table) == files
    assert rows_of(table).num_rows == 40


def test_merge_yields_to_retention_and_deletion(table: TopicTable, clock: ManualClock) -> None:
    """A merge of files that have left the table meanwhile is given up."""
    publish_rows(table, 0, 20)
    publish_rows(table, 0, 20)
    group = whole(table)
    table.commit(lambda snapshot: TableChange(removes=snapshot.files[0][:1]))
    assert compact(table, [group]) == []
    assert [file.first for file in table.refresh().files[0]] == [20]
    table.commit(delete_change)
    assert compact(table, [group]) == []
    create(table, 1, topic_id="second")
    assert compact(table, [group]) == []
    assert table.refresh().files == ((),)


def test_swept_input_gives_the_merge_up(table: TopicTable) -> None:
    """Inputs that were replaced and swept while the merge waited are not an error."""
    publish_rows(table, 0, 20)
    publish_rows(table, 0, 20)
    group = whole(table)
    compact(table, [group])
    table.store.delete(data_path("t", file) for file in group.files)
    assert compact(table, [group]) == []


def test_missing_active_file_is_reported(table: TopicTable) -> None:
    """A missing file that the table names is reported, not skipped."""
    file = publish_rows(table, 0, 20)
    table.store.delete([data_path("t", file)])
    with pytest.raises(errors.MissingObject):
        compact(table, [whole(table)])


def add_foreign(table: TopicTable, found: pa.Table, **told: int | None) -> TableFile:
    """A file as another engine might have written it, committed with those statistics."""
    sink = pa.BufferOutputStream()
    pq.write_table(found, sink, compression="snappy")
    first, end = table.snapshot.ends[0], table.snapshot.ends[0] + found.num_rows
    file = dataclasses.replace(
        tables.table_file(table.clock, 0, first, end - 1),
        path=f"partition=0/part-{first}.parquet",
        **told,  # type: ignore[arg-type]
    )
    table.store.put_new(data_path("t", file), sink.getvalue())
    txns = {end_app_id(tables.TOPIC_ID, 0): end}
    return table.commit(lambda _: TableChange(adds=(file,), txns=txns)).files[0][-1]


def test_foreign_order_and_types_are_put_right(table: TopicTable) -> None:
    """Rows and columns in any order, and INT96 times, come out as `FILE_SCHEMA` has them."""
    publish_rows(table, 0, 20)
    batch = tables.record_batch(0, 20, 30).select(FILE_SCHEMA.names)
    far_us = pa.array([limits.TIMESTAMP_MAX_US - row for row in range(30)], TIMESTAMP)
    batch = batch.set_column(1, FILE_SCHEMA.field("timestamp"), far_us)
    sink = pa.BufferOutputStream()
    shuffled = pa.Table.from_batches([batch]).sort_by(
        [("key", "ascending"), ("offset", "descending")]
    )
    pq.write_table(
        shuffled.select(FILE_SCHEMA.names[::-1]), sink, use_deprecated_int96_timestamps=True
    )
    file = tables.table_file(table.clock, 0, 20, 49)
    table.store.put_new(data_path("t", file), sink.getvalue())
    txns = {end_app_id(tables.TOPIC_ID, 0): 50}
    table.commit(lambda _: TableChange(adds=(file,), txns=txns))
    assert compact(table, [whole(table)])
    expected = [tables.record_batch(0, 0, 20).select(FILE_SCHEMA.names), batch]
    assert rows_of(table).equals(pa.Table.from_batches(expected))


def test_wrong_count_is_not_committed(table: TopicTable) -> None:
    """A file that holds other rows than the log says is reported, and stays as it is."""
    good = pa.Table.from_batches([tables.record_batch(0, 0, 20)]).select(FILE_SCHEMA.names)
    add_foreign(table, good, rows=19)
    with pytest.raises(errors.CorruptObject, match="holds 20 rows"):
        compact(table, [whole(table)])
    assert table.refresh().version == 1


def test_doubled_offset_is_not_committed(table: TopicTable) -> None:
    """A file that holds an offset twice is reported."""
    half = pa.Table.from_batches([tables.record_batch(0, 0, 10)]).select(FILE_SCHEMA.names)
    add_foreign(table, pa.concat_tables([half, half]))
    with pytest.raises(errors.CorruptObject, match="an offset twice"):
        compact(table, [whole(table)])


def plain_rows(first: int, count: int) -> pa.Table:
    """Returns the rows of a data file as sparklog writes it."""
    return pa.Table.from_batches([tables.record_batch(0, first, count)]).select(FILE_SCHEMA.names)


UNTOLD: dict[str, int | None] = {"rows": None, "first": None, "last": None}
"""A file without statistics."""


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("lacking", [["headers"], ["key", "timestampType"], ["value", "headers"]])
def test_lacking_columns_are_null(table: TopicTable, lacking: list[str], is_sorted: bool) -> None:
    """A file need not have a column that is null in all of its rows, and the merged one has it."""
    before = plain_rows(0, 20)
    given = before.drop_columns(lacking)
    order = "ascending" if is_sorted else "descending"
    add_foreign(table, given.sort_by([("offset", order)]), **UNTOLD)
    (merged,) = compact(table, choose(table.snapshot)[:1])
    assert (merged.first, merged.last, merged.rows) == (0, 19, 20)
    found = rows_of(table)
    assert found.schema.equals(FILE_SCHEMA)
    assert found.drop_columns(lacking).equals(given)
    assert all(found[name].null_count == 20 for name in lacking)


def without_times(rows: pa.Table) -> pa.Table:
    """The rows, none of which has a timestamp."""
    return rows.set_column(1, FILE_SCHEMA.field("timestamp"), pa.nulls(len(rows), TIMESTAMP))


def from_far_away(rows: pa.Table) -> pa.Table:
    """The rows in the year 10000."""
    far_us = pa.array([limits.TIMESTAMP_MAX_US + 1] * len(rows), TIMESTAMP)
    return rows.set_column(1, FILE_SCHEMA.field("timestamp"), far_us)


def moved(rows: pa.Table, by: int | None) -> pa.Table:
    """The rows with other offsets, or with none."""
    offsets = [None if by is None else each + by for each in rows["offset"].to_pylist()]
    return rows.set_column(0, FILE_SCHEMA.field("offset"), pa.array(offsets, pa.int64()))


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda rows: rows.drop_columns(["offset"]), "offset"),
        (lambda rows: rows.drop_columns(["timestamp"]), "without a time"),
        (without_times, "without a time"),
        (from_far_away, "outside the years"),
        (lambda rows: moved(rows, None), "without an offset"),
        (lambda rows: moved(rows, -5), "offsets -5 to 14"),
        (lambda rows: moved(rows, 1), "offsets 1 to 20, but its partition ends at 20"),
        (lambda rows: rows.append_column("value", rows["key"]), "value"),
        (
            lambda rows: rows.set_column(4, "value", pa.array([1] * 20)),
            "it is not a complete data file",
        ),
    ],
    ids=lambda _: "",
)
def test_odd_files_are_named(table: TopicTable, spoil: Any, check: str) -> None:
    """A foreign file that cannot be merged is reported by name, and left as it is."""
    file = add_foreign(table, spoil(plain_rows(0, 20)), **UNTOLD)
    files = data_files(table)
    with pytest.raises(errors.CorruptObject, match=check) as found:
        compact(table, choose(table.snapshot)[:1])
    assert found.value.path == data_path("t", file)
    assert data_files(table) == files
    assert table.refresh().files == ((file,),)


def test_lying_statistics_are_named(table: TopicTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two files overlap despite the log, the inconsistent one is named."""
    monkeypatch.setattr(limits, "ROW_GROUP_ROWS", 10)
    publish_rows(table, 0, 20)
    file = add_foreign(table, plain_rows(15, 20))
    assert (file.first, file.last) == (20, 39)
    with pytest.raises(errors.CorruptObject, match="offsets 15 to 34") as found:
        compact(table, [whole(table)])
    assert found.value.path == data_path("t", file)


def test_heavy_rows_are_merged_a_few_at_a_time(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the row groups of the inputs are, little of them is in memory at once."""
    heavy = pa.Table.from_batches([tables.record_batch(0, 0, 400, value_bytes=4_000)])
    add_foreign(table, heavy.select(FILE_SCHEMA.names))
    publish_rows(table, 0, 20)
    before = rows_of(table)
    batch_bytes = 64 * limits.KIB
    monkeypatch.setattr("sparklog.storage.reading.decode_bounds.FILE_BATCH_BYTES", batch_bytes)
    sizes: list[int] = []
    add = data_file.Encoder.add

    def watch(encoder: data_file.Encoder, batch: pa.RecordBatch) -> None:
        sizes.append(batch.nbytes)
        add(encoder, batch)

    monkeypatch.setattr(data_file.Encoder, "add", watch)
    assert compact(table, [whole(table)])
    assert rows_of(table).equals(before)
    assert max(sizes) < 2 * batch_bytes


def test_damaged_page_is_not_copied(table: TopicTable) -> None:
    """A flipped bit in a page is found by its checksum before it is written again."""
    file = publish_rows(table, 0, 5_000)
    path = data_path("t", file)
    data = bytearray(table.store.get(path).to_pybytes())
    data[len(data) // 2] ^= 1
    table.store.put(path, bytes(data))
    with pytest.raises(errors.CorruptObject) as found:
        compact(table, [whole(table)])
    assert found.value.path == path


def test_file_without_rows_goes(table: TopicTable) -> None:
    """An empty file of another engine just leaves the table."""
    publish_rows(table, 0, 20)
    add_foreign(table, FILE_SCHEMA.empty_table(), rows=0, first=None, last=None)
    groups = choose(table.snapshot)
    assert [len(group.files) for group in groups] == [1]
    assert compact(table, groups[:1]) == []
    assert [file.first for file in table.refresh().files[0]] == [0]


def test_merge_too_slow_to_commit_leaves_nothing(
    table: TopicTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that froze for half of the orphan grace removes its output and says so."""
    publish_rows(table, 0, 20)
    files = data_files(table)

    def freeze(*args: Any, **more: Any) -> None:
        put_together(*args, **more)
        clock.advance(limits.ORPHAN_GRACE_SECONDS / 2 + 1)

    monkeypatch.setattr(file_compaction, "put_together", freeze)
    with pytest.raises(errors.TimedOut):
        compact(table, [whole(table)])
    assert data_files(table) == files


# ------------------------------------------------------------------------------ merging together


@pytest.fixture
def wide(store: Store, clock: ManualClock) -> TopicTable:
    """A topic of three partitions with three files each."""
    table = TopicTable(store, "w", clock=clock)
    create(table, 3)
    for partition in range(3):
        for _ in range(3):
            publish_rows(table, partition, 5)
    return table


def counts(table: TopicTable) -> list[int]:
    """The number of files of each partition."""
    return [len(files) for files in table.refresh().files]


def test_small_groups_are_merged_by_one_commit(wide: TopicTable) -> None:
    """Groups of several partitions take one commit, with a merged file for each."""
    groups = choose(wide.snapshot, compact_files=3)
    version = wide.snapshot.version
    merged = compact(wide, groups)
    assert [(file.partition, file.first, file.last) for file in merged] == [
        (partition, 0, 14) for partition in range(3)
    ]
    assert wide.snapshot.version == version + 1
    assert wide.snapshot.files == tuple((file,) for file in merged)


def test_merges_together_are_bounded(monkeypatch: pytest.MonkeyPatch, wide: TopicTable) -> None:
    """Lists of groups are bounded in number and in bytes; a larger group is alone."""
    groups = choose(wide.snapshot, compact_files=3)
    assert list(together(groups)) == [groups]
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.COMPACT_GROUPS_TOGETHER", 2)
    assert list(together(groups)) == [groups[:2], groups[2:]]
    size = sum(file.size_bytes for group in groups[:2] for file in group.files)
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.COMPACT_GROUPS_TOGETHER", 9)
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.COMPACT_TOGETHER_BYTES", size)
    assert list(together(groups)) == [groups[:2], groups[2:]]
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.COMPACT_TOGETHER_BYTES", 1)
    assert list(together(groups)) == [groups[:1], groups[1:2], groups[2:]]
    assert list(together([])) == []


def test_a_file_that_cannot_be_merged_stops_no_other(wide: TopicTable) -> None:
    """The other groups are merged, and then the error names the damaged or missing file."""
    groups = choose(wide.snapshot, compact_files=3)
    gone = data_path("w", groups[0].files[1])
    damaged = data_path("w", groups[1].files[1])
    wide.store.delete([gone])
    wide.store.put(damaged, b"PAR1")
    with pytest.raises((errors.MissingObject, errors.CorruptObject), match=r"partition=[01]/"):
        compact(wide, groups)
    assert counts(wide) == [3, 3, 1]
    wide.store.delete([damaged])
    with pytest.raises(errors.MissingObject, match=gone.rpartition("/")[2]):
        compact(wide, groups[:1])


def test_a_group_that_has_changed_is_left_out(wide: TopicTable, clock: ManualClock) -> None:
    """A merge of a group whose files another commit replaced leaves no file; the others count."""
    groups = choose(wide.snapshot, compact_files=3)
    assert compact(TopicTable(wide.store, "w", clock=clock), groups[1:2])
    merged = compact(wide, groups)
    assert [file.partition for file in merged] == [0, 2]
    assert counts(wide) == [1, 1, 1]
    named = {file.path for files in wide.snapshot.files for file in files}
    assert data_files(wide) == named | {file.path for group in groups for file in group.files}


def test_a_refused_put_leaves_no_merged_file(clock: ManualClock) -> None:
    """If one of the merged files cannot be put, none is committed, and none remains."""
    store = MemoryStore(clock)
    table = TopicTable(store, "t", clock=clock)
    create(table, 2)
    for partition in (0, 0, 1, 1):
        publish_rows(table, partition, 5)
    files = data_files(table)
    groups = choose(table.snapshot, compact_files=2)
    full = errors.StorageFull(root="?", free_bytes=0, reserve_bytes=0)
    fault = Fault(operation="put_new", error=full, prefix="topics/t/partition=1")
    other = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    with pytest.raises(errors.StorageFull):
        compact(other, groups)
    assert data_files(table) == files
    assert counts(table) == [2, 2]


# ------------------------------------------------------------------------------ putting in order


def found_disordered(table: TopicTable, in_order: set[str] | None = None) -> FileGroup | None:
    """Returns the files that are not in order."""
    known = set() if in_order is None else in_order
    return disordered(table.store, "t", table.snapshot, in_order=known)


def add_part(table: TopicTable, rows: pa.Table, name: str, *, end: int | None = None) -> TableFile:
    """A file of rows in the order given, under a name of another engine's."""
    offsets = rows["offset"].to_numpy()
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, row_group_size=100)
    file = dataclasses.replace(
        tables.table_file(table.clock, 0, int(offsets.min()), int(offsets.max())),
        path=f"partition=0/part-{name}.parquet",
        rows=rows.num_rows,
        size_bytes=sink.getvalue().size,
    )
    table.store.put_new(data_path("t", file), sink.getvalue())
    change = TableChange(adds=(file,))
    if end is not None:
        change = dataclasses.replace(change, txns={end_app_id(tables.TOPIC_ID, 0): end})
    table.commit(lambda _: change)
    return file


@pytest.mark.parametrize("memory_bytes", [0, SORT_MEMORY_BYTES])
def test_a_file_out_of_order_is_put_in_order_once(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """Its rows come out as several files of ours, however little memory there is, and stay."""
    monkeypatch.setattr("sparklog.storage.reading.sorting.SORT_MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(limits, "ROW_GROUP_ROWS", 64)
    publish_rows(table, 0, 50)
    order = np.random.default_rng(1).permutation(1_000)
    add_part(table, plain_rows(50, 1_000).take(pa.array(order)), "shuffled", end=1_050)
    before = rows_of(table)
    group = found_disordered(table)
    assert group is not None
    made = put_in_order(table, group, target_bytes=3_000)
    assert len(made) > 2
    assert rows_of(table).equals(before)
    bounds = [(file.first, file.last) for file in table.snapshot.files[0]]
    assert bounds == sorted(bounds)
    for file in table.snapshot.files[0]:
        offsets = pq.read_table(table.store.get(data_path("t", file)))["offset"].to_pylist()
        assert offsets == list(range(file.first or 0, (file.last or 0) + 1))
    assert found_disordered(table) is None
    commit = table.store.get(f"{table.log_folder}/{table.snapshot.version:020d}.json").to_pybytes()
    assert b'"dataChange":true' not in commit


def test_files_that_overlap_are_put_in_order(table: TopicTable) -> None:
    """Every second row in another file: together they are in order, each offset once."""
    rows = plain_rows(0, 400)
    even, odd = (rows.take(pa.array(range(first, 400, 2))) for first in (0, 1))
    add_part(table, even, "even", end=400)
    add_part(table, odd, "odd")
    before = rows_of(table)
    group = found_disordered(table)
    assert group is not None
    assert len(group.files) == 2
    assert put_in_order(table, group)
    assert rows_of(table).equals(before)
    assert len(table.snapshot.files[0]) == 1


def test_a_file_in_order_is_looked_over_once(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And left as its engine made it; what the table does not name any more is forgotten."""
    known: set[str] = {"partition=0/gone.parquet"}
    file = add_part(table, plain_rows(0, 100), "good", end=100)
    assert found_disordered(table, known) is None
    assert known == {file.path}
    monkeypatch.setattr(pq, "ParquetFile", None)
    assert found_disordered(table, known) is None


def test_huge_row_groups_are_cut(table: TopicTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of few rows decodes most of such a group, in order or not."""
    add_part(table, plain_rows(0, 100), "good", end=100)
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.FOREIGN_GROUP_BYTES", 100)
    group = found_disordered(table)
    assert group is not None
    assert put_in_order(table, group)
    assert found_disordered(table) is None


def test_no_file_in_order_reaches_over_a_border(table: TopicTable) -> None:
    """Files that a log compaction has covered are not merged with others."""
    rows = plain_rows(0, 100).take(pa.array(range(99, -1, -1)))
    add_part(table, rows, "descending", end=100)
    group = found_disordered(table)
    assert group is not None
    made = put_in_order(table, group, border=40)
    assert [(file.first, file.last) for file in made] == [(0, 39), (40, 99)]


def test_putting_in_order_yields(table: TopicTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge yields to a stopping broker and to a commit that replaced a file, and leaves
    nothing behind.
    """
    monkeypatch.setattr(limits, "ROW_GROUP_ROWS", 10)
    rows = plain_rows(0, 100).take(pa.array(range(99, -1, -1)))
    file = add_part(table, rows, "descending", end=100)
    files = data_files(table)
    group = found_disordered(table)
    assert group is not None
    assert put_in_order(table, group, target_bytes=1, should_stop=lambda: True) == ()
    assert data_files(table) == files
    table.commit(lambda _: TableChange(removes=(file,)))
    assert put_in_order(table, group, target_bytes=1) == ()
    assert data_files(table) == files


def test_an_offset_in_two_files_is_told(table: TopicTable) -> None:
    """After an unknown outcome both sets of files stay as they are."""
    add_part(table, plain_rows(0, 60), "one", end=100)
    add_part(table, plain_rows(50, 50), "other")
    files = data_files(table)
    group = found_disordered(table)
    assert group is not None
    with pytest.raises(errors.CorruptObject, match=r"an offset twice.*part-one.*part-other"):
        put_in_order(table, group)
    assert data_files(table) == files


def test_more_than_can_be_sorted_is_left_alone(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sort that outlasts its orphan grace would begin again forever."""
    add_part(table, plain_rows(0, 100).take(pa.array(range(99, -1, -1))), "x", end=100)
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.SORT_FILES_BYTES", 1)
    assert found_disordered(table) is None
