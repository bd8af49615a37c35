"""Reading files of other engines: their rows, or an error that names the problem."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats.record import FILE_SCHEMA, ROW_SCHEMA
from sparklog.storage.objects import DelayedStore, MemoryStore, ObjectMissing
from sparklog.storage.reading.read import (
    SMALL_FILES_AT_ONCE,
    read_runs,
    read_slice,
    read_slices,
    row_groups,
)
from sparklog.storage.snapshot import ReadSource, Slice, TableFile
from sparklog.storage.table.names import data_path
from tests.support import tables

TOPIC = "t"


def rows(first: int, count: int, **more: int) -> pa.Table:
    """Returns the rows of a data file as sparklog writes it."""
    batch = tables.record_batch(0, first, count, **more)
    return pa.Table.from_batches([batch]).select(FILE_SCHEMA.names)


def put(store: MemoryStore, found: pa.Table, name: str = "x") -> TableFile:
    """Puts the rows as a file without statistics."""
    file = TableFile(
        path=f"partition=0/{name}.parquet",
        partition=0,
        size_bytes=1,
        rows=None,
        first=None,
        last=None,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(found, sink)
    store.put_new(data_path(TOPIC, file), sink.getvalue())
    return file


def slice_of(*files: TableFile, first: int = 0, end: int) -> Slice:
    """A slice of partition 0, of these files."""
    return Slice(
        topic=TOPIC,
        topic_id="id",
        partition=0,
        first=first,
        end=end,
        source=ReadSource.FILES,
        files=files,
    )


def read(store: MemoryStore, *files: TableFile, end: int = 20) -> list[pa.RecordBatch]:
    """All rows of the files up to `end`."""
    return list(read_slice(store, slice_of(*files, end=end)))


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("lacking", [["headers"], ["key", "timestampType"], ["value", "headers"]])
def test_lacking_columns_are_null(store: MemoryStore, lacking: list[str], order: str) -> None:
    """A file need not have a column that is null in all of its rows."""
    given = rows(0, 20).drop_columns(lacking)
    (batch,) = read(store, put(store, given.sort_by([("offset", order)])))
    assert batch.schema.equals(ROW_SCHEMA)
    found = pa.Table.from_batches([batch])
    assert found.select(given.schema.names).equals(given)
    assert all(found[name].null_count == 20 for name in lacking)


def test_a_small_file_is_decoded_at_once(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offsets are not read before, and no part of it by another thread."""
    calls: list[dict[str, Any]] = []
    whole = pq.ParquetFile.read

    def reading(parquet: pq.ParquetFile, *columns: Any, **options: Any) -> pa.Table:
        calls.append(options)
        return whole(parquet, *columns, **options)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a second call for the same file")

    monkeypatch.setattr(pq.ParquetFile, "read", reading)
    for name in ("read_row_groups", "iter_batches"):
        monkeypatch.setattr(pq.ParquetFile, name, refuse)
    file = put(store, rows(0, 20).slice(3, 14))
    for first, end, expected in ((0, 20, range(3, 17)), (5, 9, range(5, 9)), (17, 20, range(0))):
        found = list(read_slice(store, slice_of(file, first=first, end=end), columns=["offset"]))
        assert [n for batch in found for n in batch.column("offset").to_pylist()] == list(expected)
        assert all(batch.schema.names == ["offset"] for batch in found)
    assert calls == [{"use_threads": False}] * 3


@pytest.mark.parametrize("columns", [None, ["value", "headers"], ["partition", "offset"]])
def test_small_neighbours_are_read_together(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None
) -> None:
    """Their rows are one batch, whatever columns each file lacks."""
    given = rows(0, 20)
    pieces = []
    for first, end, lacking in ((0, 5, ["headers"]), (5, 9, []), (11, 20, ["key", "headers"])):
        part = given.slice(first, end - first).drop_columns(lacking)
        file = put(store, part, str(first))
        pieces.append(slice_of(file, first=max(first, 2), end=min(end, 18)))
    alone = [batch for piece in pieces for batch in read_slice(store, piece, columns=columns)]
    opened: list[int] = []
    init = pq.ParquetFile.__init__

    def counted(parquet: pq.ParquetFile, *source: Any, **options: Any) -> None:
        opened.append(1)
        init(parquet, *source, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", counted)
    (found,) = read_slices(store, pieces, columns=columns)
    assert found.equals(pa.concat_batches(alone))
    assert found.num_rows == 3 + 4 + 7
    assert len(opened) == 3


def test_an_object_store_is_asked_for_many_small_files_at_once(store: MemoryStore) -> None:
    """A partition may have hundreds of them, and each request takes some time."""
    ends = range(1, 41)
    pieces = [slice_of(put_numbered(store, str(n), [n - 1]), first=n - 1, end=n) for n in ends]
    bucket = DelayedStore(store, 0.05, SystemClock())
    found = [n for batch in read_slices(bucket, pieces) for n in batch["offset"].to_pylist()]
    assert found == list(range(40))
    assert 4 < bucket.most_at_once <= SMALL_FILES_AT_ONCE
    assert bucket.requests == {"get_range": 40}


def put_numbered(store: MemoryStore, name: str, offsets: Sequence[int]) -> TableFile:
    """Puts a file of these offsets in this order."""
    return put(store, rows(0, 50).take(pa.array(offsets, pa.int64())), name)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([5, 6, 7, 8], list(range(12))),
        ([8, 7, 6, 5], list(range(12))),
        ([4, 5, 6, 7, 8], list(range(12))),
        ([5, 6, 7, 8, 9], list(range(12))),
        ([5, 8], [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]),
        ([], [0, 1, 2, 3, 4, 9, 10, 11]),
    ],
    ids=["plain", "unordered", "below", "above", "gap", "empty"],
)
@pytest.mark.parametrize("taken", [slice(0, 2), slice(1, 3), slice(0, 3)])
def test_files_that_are_not_what_they_seem_are_read_one_by_one(
    store: MemoryStore, offsets: list[int], expected: list[int], taken: slice
) -> None:
    """Each slice has its offsets and no others, wherever such a file is among its neighbours."""
    given = [(range(5), 0, 5), (offsets, 5, 9), (range(9, 12), 9, 12)]
    pieces = [
        slice_of(put_numbered(store, str(first), each), first=first, end=end)
        for each, first, end in given
    ][taken]
    found = [n for batch in read_slices(store, pieces) for n in batch["offset"].to_pylist()]
    assert found == [n for n in expected if pieces[0].first <= n < pieces[-1].end]


@pytest.mark.parametrize("what", ["missing", "corrupt"])
def test_an_error_comes_after_the_rows_before_it(store: MemoryStore, what: str) -> None:
    """A reader of several small files gets what can be read of them."""
    pieces = [
        slice_of(put_numbered(store, str(first), range(first, first + 5)), first=first, end=end)
        for first, end in ((0, 5), (5, 10), (10, 15))
    ]
    path = data_path(TOPIC, pieces[1].files[0])
    store.delete([path])
    if what == "corrupt":
        store.put_new(path, b"PAR1 and no more")
    reading = read_slices(store, pieces)
    assert next(reading)["offset"].to_pylist() == list(range(5))
    with pytest.raises(ObjectMissing if what == "missing" else errors.CorruptObject):
        next(reading)


def test_runs_that_cannot_be_read_together_leave_the_others(store: MemoryStore) -> None:
    """Each run is its own: one may be missing, have null offsets, or a column of another type."""
    fine = slice_of(put_numbered(store, "fine", range(5)), end=5)
    missing = slice_of(put_numbered(store, "missing", range(5)), end=5)
    store.delete([data_path(TOPIC, missing.files[0])])
    given = rows(0, 5)
    null = given.set_column(0, given.schema.field("offset"), pa.nulls(5, pa.int64()))
    text = given.set_column(4, "value", pa.array(list("abcde")))
    runs = [[fine], [missing], [slice_of(put(store, null, "null"), end=5)]]
    runs += [[fine, slice_of(put(store, text, "text"), first=5, end=10)], [fine]]
    found = read_runs(store, runs, columns=["offset", "value"])
    assert [each is not None for each in found] == [True, False, False, False, True]
    assert found[0] == found[4] == next(read_slice(store, fine, columns=["offset", "value"]))


def test_files_that_are_large_together_are_read_one_by_one(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is in memory than the bound of rows that are read as one batch, and one file."""
    pieces = [
        slice_of(put_numbered(store, str(first), range(first, first + 5)), first=first, end=end)
        for first, end in ((0, 5), (5, 10), (10, 15))
    ]
    (whole,) = read_slices(store, pieces)
    monkeypatch.setattr(limits, "READ_RUN_BYTES", whole.nbytes // 2)
    assert [batch.num_rows for batch in read_slices(store, pieces)] == [5, 5, 5]


@pytest.mark.parametrize("columns", [None, ["offset"], ["partition"]])
def test_a_file_without_rows_has_none(store: MemoryStore, columns: list[str] | None) -> None:
    """Other engines leave such files."""
    found = slice_of(put(store, rows(0, 20).slice(0, 0)), end=20)
    assert list(read_slice(store, found, columns=columns)) == []


def test_a_file_that_is_larger_than_its_size_in_the_log_is_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more of it than of a small file is in memory at once."""
    monkeypatch.setattr(limits, "SMALL_FILE_BYTES", 1_000)
    (batch,) = read(store, put(store, rows(0, 20, value_bytes=500)))
    assert batch.num_rows == 20


def test_files_of_different_columns_are_merged(store: MemoryStore) -> None:
    """With overlapping offsets in two files, each file may lack rows of the other."""
    even = rows(0, 20).take(list(range(0, 20, 2))).drop_columns(["headers"])
    odd = rows(0, 20).take(list(range(1, 20, 2))).drop_columns(["key"])
    (batch,) = read(store, put(store, even, "even"), put(store, odd, "odd"))
    assert batch.column("offset").to_pylist() == list(range(20))
    assert (batch.column("headers").null_count, batch.column("key").null_count) == (10, 10)


def test_a_file_without_offsets_is_named(store: MemoryStore) -> None:
    """Rows without a place in the log are corruption, and no rows at all."""
    for files in (1, 2):
        given = [
            put(store, rows(0, 5).drop_columns(["offset"]), f"{files}-{n}") for n in range(files)
        ]
        with pytest.raises(errors.CorruptObject, match="no column 'offset'"):
            read(store, *given)


def test_heavy_rows_come_in_light_batches(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is bounded by bytes too, whatever the row groups of the file."""
    monkeypatch.setattr("sparklog.storage.reading.decode_bounds.FILE_BATCH_BYTES", 10_000)
    batches = read(store, put(store, rows(0, 100, value_bytes=1_000)), end=100)
    assert sum(batch.num_rows for batch in batches) == 100
    assert all(batch.nbytes < 20_000 for batch in batches)


def repeated(count: int, value_bytes: int) -> pa.Table:
    """Rows of one value, as another engine writes it: once, and named by each row."""
    found = rows(0, count)
    values = pa.array([bytes(value_bytes)], pa.binary()).take(pa.array([0] * count))
    return found.set_column(found.schema.get_field_index("value"), "value", values)


def test_values_that_rows_share_are_heavy_in_each(store: MemoryStore) -> None:
    """A dictionary makes a file of kilobytes whose rows are gigabytes."""
    count, value_bytes = 10_000, 20_000
    file = put(store, repeated(count, value_bytes))
    assert store.stat(data_path(TOPIC, file)).size_bytes < 1_000_000
    batches = read(store, file, end=count)
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.nbytes for batch in batches) < 64 << 20


# ------------------------------------------------------------------------------ no order


class Decoded:
    """Counts the rows that are decoded, but for those of which only the offset is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        iter_batches = pq.ParquetFile.iter_batches

        def counted(parquet: pq.ParquetFile, **how: Any) -> Iterator[pa.RecordBatch]:
            for batch in iter_batches(parquet, **how):
                self.rows += batch.num_rows
                yield batch

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)


def put_shuffled(
    store: MemoryStore, offsets: Sequence[int], *, group_rows: int, name: str, statistics: bool
) -> TableFile:
    """A file with rows of those offsets in that order."""
    count = max(offsets) + 1
    found = rows(0, count).take(pa.array(offsets))
    file = TableFile(
        path=f"partition=0/{name}.parquet",
        partition=0,
        size_bytes=1,
        rows=len(offsets),
        first=min(offsets),
        last=max(offsets),
    )
    sink = pa.BufferOutputStream()
    pq.write_table(found, sink, row_group_size=group_rows, write_statistics=statistics)
    store.put_new(data_path(TOPIC, file), sink.getvalue())
    return file


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("bounds", [(0, 3), (1, 4), (1, 3)])
def test_rows_outside_the_slice_between_its_row_groups(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], bounds: tuple[int, int]
) -> None:
    """A row that is outside the slice may end one row group or begin the next."""
    monkeypatch.setattr(limits, "SMALL_FILE_BYTES", 0)
    store = MemoryStore(ManualClock())
    file = put_shuffled(store, order, group_rows=2, name="0", statistics=True)
    first, end = bounds
    found = pa.Table.from_batches(read_slice(store, slice_of(file, first=first, end=end)))
    assert found["offset"].to_pylist() == list(range(first, end))


@settings(max_examples=200, deadline=None)
@given(
    files=st.lists(st.sets(st.integers(0, 200), min_size=1), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    disorder=st.sampled_from(["none", "runs", "all"]),
    group_rows=st.integers(1, 60),
    bounds=st.tuples(st.integers(0, 201), st.integers(0, 201)),
    columns=st.sampled_from([None, ["value"], ["partition", "value"], ["timestamp", "offset"]]),
    batch_rows=st.integers(1, 50),
    memory_bytes=st.sampled_from([0, 2_000, 10**9]),
    wants_all=st.booleans(),
    statistics=st.booleans(),
)
def test_rows_in_any_order_come_in_the_order_of_offsets(
    files: list[set[int]],
    order: random.Random,
    disorder: str,
    group_rows: int,
    bounds: tuple[int, int],
    columns: list[str] | None,
    batch_rows: int,
    memory_bytes: int,
    wants_all: bool,
    statistics: bool,
) -> None:
    """With any foreign files and any memory limit, each row of the range is
    returned once; it is decoded once if all rows are wanted or the file is in order."""
    store = MemoryStore(ManualClock())
    first, end = min(bounds), max(bounds)
    seen: set[int] = set()
    put_files = []
    for number, wished in enumerate(files):
        offsets = sorted(wished - seen)
        seen |= wished
        if not offsets:
            continue
        if disorder == "all":
            order.shuffle(offsets)
        elif disorder == "runs":
            cut = order.randrange(len(offsets))
            offsets = offsets[cut:] + offsets[:cut]
        put_files.append(
            put_shuffled(
                store, offsets, group_rows=group_rows, name=str(number), statistics=statistics
            )
        )
    wanted = [offset for offset in sorted(seen) if first <= offset < end]
    piece = slice_of(*put_files, first=first, end=end)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sparklog.storage.reading.sorting.SORT_MEMORY_BYTES", memory_bytes)
        patched.setattr("sparklog.storage.reading.read.SORT_OFFSETS_ROWS", 50)
        patched.setattr("sparklog.storage.reading.read.SORT_FIRST_ROWS", 7)
        patched.setattr("sparklog.storage.reading.read.FILES_OPEN", 2)
        patched.setattr("sparklog.storage.reading.read.BUFFERED_GROUP_BYTES", memory_bytes)
        decoded = Decoded(patched)
        found = list(
            read_slice(store, piece, columns=columns, batch_rows=batch_rows, wants_all=wants_all)
        )
    schema = ROW_SCHEMA if columns is None else pa.schema([ROW_SCHEMA.field(c) for c in columns])
    expected = pa.Table.from_batches([tables.record_batch(0, 0, 201)]).select(schema.names)
    expected = expected.take(pa.array(wanted, pa.int64())).cast(schema)
    assert all(0 < batch.num_rows <= batch_rows and batch.schema == schema for batch in found)
    assert pa.Table.from_batches(found, schema).equals(expected)
    if wants_all or (disorder == "none" and len(put_files) == 1):
        groups = sum(-(-len(each) // group_rows) for each in files)
        assert decoded.rows <= len(seen)
        assert wanted or not decoded.rows or groups


def test_few_offsets_need_few_row_groups(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the needed runs of an unordered file are decoded, and only as far as needed."""
    offsets = [*range(600, 1000), *range(300), *range(300, 600)]
    file = put_shuffled(store, offsets, group_rows=100, name="runs", statistics=True)
    monkeypatch.setattr("sparklog.storage.reading.decode_bounds.FILE_BATCH_BYTES", 1_000)
    decoded = Decoded(monkeypatch)
    piece = slice_of(file, first=295, end=305)
    found = [row for each in read_slice(store, piece) for row in each.column("offset").to_pylist()]
    assert found == list(range(295, 305))
    assert decoded.rows <= 100 + 40


def test_a_reader_that_takes_the_first_rows_pays_for_few(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch takes some rows of a long slice; what it leaves is neither sorted nor put aside."""
    offsets = [*range(5_000, 10_000), *range(5_000)]
    file = put_shuffled(store, offsets, group_rows=500, name="runs", statistics=True)
    monkeypatch.setattr("sparklog.storage.reading.read.SORT_FIRST_ROWS", 400)
    decoded = Decoded(monkeypatch)
    piece = slice_of(file, end=10_000)
    reading = read_slice(store, piece, batch_rows=100)
    assert next(iter(reading)).column("offset").to_pylist() == list(range(100))
    assert decoded.rows <= 500


def test_rows_that_cannot_be_put_aside_are_no_damage(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported as such, and can be retried."""
    offsets = [*range(50, 100), *range(50)]
    file = put_shuffled(store, offsets, group_rows=100, name="runs", statistics=True)
    monkeypatch.setattr("sparklog.storage.reading.sorting.SORT_MEMORY_BYTES", 0)

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(errors.StorageUnavailable, match="No space left on device"):
        read(store, file, end=100)


def test_row_groups_tell_where_a_file_may_be_cut(store: MemoryStore) -> None:
    """Without statistics no bounds are known."""
    offsets = [*range(10, 20), *range(10)]
    for statistics, expected in ((True, [(10, 19, 10), (0, 9, 10)]), (False, [])):
        name = str(statistics)
        file = put_shuffled(store, offsets, group_rows=10, name=name, statistics=statistics)
        piece = slice_of(file, end=20)
        found = row_groups(store, piece)
        assert [(group.first, group.last, group.rows) for group in found] == expected
