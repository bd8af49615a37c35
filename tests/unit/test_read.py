"""Reading files that another engine has written: their rows, or what is wrong with them by name."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.record import FILE_SCHEMA, ROW_SCHEMA
from sparklog.storage.objects import MemoryStore
from sparklog.storage.read import read_slice
from sparklog.storage.snapshot import Slice, Source, TableFile
from sparklog.storage.table import data_path
from tests.support import tables

TOPIC = "t"


@pytest.fixture
def store() -> MemoryStore:
    """An empty root."""
    return MemoryStore(ManualClock())


def rows(first: int, count: int, **more: int) -> pa.Table:
    """What a data file of ours would hold."""
    batch = tables.record_batch(0, first, count, **more)
    return pa.Table.from_batches([batch]).select(FILE_SCHEMA.names)


def put(store: MemoryStore, found: pa.Table, name: str = "x") -> TableFile:
    """The rows as a file of which nobody tells anything."""
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


def read(store: MemoryStore, *files: TableFile, end: int = 20) -> list[pa.RecordBatch]:
    """All rows of the files up to `end`."""
    piece = Slice(
        topic=TOPIC, topic_id="id", partition=0, first=0, end=end, source=Source.FILES, files=files
    )
    return list(read_slice(store, piece))


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


def test_files_of_different_columns_are_merged(store: MemoryStore) -> None:
    """Where offsets of two files overlap, each may lack what the other has."""
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
    monkeypatch.setattr(limits, "FILE_BATCH_BYTES", 10_000)
    batches = read(store, put(store, rows(0, 100, value_bytes=1_000)), end=100)
    assert sum(batch.num_rows for batch in batches) == 100
    assert all(batch.nbytes < 20_000 for batch in batches)
