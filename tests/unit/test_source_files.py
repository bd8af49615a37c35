"""The small files of a table, as a task of Spark reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats.record import FILE_SCHEMA
from sparklog.sources import reader
from sparklog.sources.options import LogLocation
from sparklog.storage.objects import DelayedStore, MemoryStore
from sparklog.storage.reading.read import SMALL_FILES_AT_ONCE
from sparklog.storage.snapshot import ReadSource, Slice
from sparklog.storage.table.names import data_path
from tests.support import tables

PLACE = LogLocation(root="s3://bucket/log")


def put(store: MemoryStore, partition: int, first: int) -> Slice:
    """Puts a file of three rows, and returns its slice."""
    file = tables.table_file(ManualClock(), partition, first, first + 2)
    sink = pa.BufferOutputStream()
    batch = tables.record_batch(partition, first, 3).select(FILE_SCHEMA.names)
    pq.write_table(pa.Table.from_batches([batch]), sink)
    store.put_new(data_path("t", file), sink.getvalue())
    return Slice(
        topic="t",
        topic_id="id",
        partition=partition,
        first=first,
        end=first + 3,
        source=ReadSource.FILES,
        files=(file,),
    )


@pytest.fixture(name="store")
def _store() -> MemoryStore:
    return MemoryStore(ManualClock())


def use(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """Makes it the store of the root."""
    monkeypatch.setattr(reader, "_store", lambda _: store)


def read(slices: Sequence[Slice]) -> list[tuple[int, list[int]]]:
    """Returns the partition and the offsets of each batch."""
    found = reader.read_slices(PLACE, slices, columns=["offset", "value"], fail_on_data_loss=True)
    return [(piece.partition, batch["offset"].to_pylist()) for piece, batch in found]


def test_neighbours_are_read_together(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one batch, for which a bucket is asked at the same time, of one partition only."""
    slices = [put(store, number, first) for number in (0, 1) for first in range(0, 60, 3)]
    bucket = DelayedStore(store, 0.05, SystemClock())
    use(monkeypatch, bucket)
    assert read(slices) == [(0, list(range(60))), (1, list(range(60)))]
    assert 4 < bucket.most_at_once <= SMALL_FILES_AT_ONCE
    assert bucket.requests == {"get_range": 40}


def test_a_gap_is_no_neighbour(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets may be left out between two slices."""
    use(monkeypatch, store)
    slices = [put(store, 0, 0), put(store, 0, 6), put(store, 0, 9)]
    assert read(slices) == [(0, [0, 1, 2]), (0, [6, 7, 8, 9, 10, 11])]


def test_slices_of_several_files_stay_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that overlap are merged; each file is asked for once."""
    slices = [put(store, 0, first) for first in range(0, 15, 3)]
    slices[2] = msgspec.structs.replace(
        slices[2], files=(*slices[2].files, *put(store, 0, 6).files)
    )
    bucket = DelayedStore(store, 0.0, SystemClock())
    use(monkeypatch, bucket)
    assert [offset for _, each in read(slices) for offset in sorted(set(each))] == list(range(15))
    assert bucket.requests["get_range"] == 6


def test_the_rest_is_planned_again_where_a_file_is_gone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been merged with others since the plan; no row is given twice."""
    use(monkeypatch, store)
    slices = [put(store, 0, first) for first in range(0, 15, 3)]
    merged = [put(store, 0, first) for first in range(6, 15, 3)]
    store.delete([data_path("t", slices[2].files[0])])
    asked: list[tuple[int, int]] = []

    class Again:
        def refresh(self, *, from_scratch: bool) -> None:
            assert from_scratch

        def range(self, *place: Any) -> list[Slice]:
            asked.append(place[-2:])
            return merged

    monkeypatch.setattr(reader, "_planner", lambda *_: Again())
    offsets = [offset for _, each in read(slices) for offset in each]
    assert offsets == list(range(15))
    assert asked == [(6, 15)]


def test_a_file_that_stays_away_is_an_error(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some plans the reader gives up, and names it."""
    use(monkeypatch, store)
    slices = [put(store, 0, first) for first in range(0, 9, 3)]
    store.delete([data_path("t", slices[1].files[0])])

    class Again:
        def refresh(self, **_: Any) -> None:
            pass

        def range(self, *_: Any) -> list[Slice]:
            return slices[1:]

    monkeypatch.setattr(reader, "_planner", lambda *_: Again())
    with pytest.raises(errors.MissingObject, match="it was named by each of"):
        read(slices)


def test_a_path_of_another_engine_is_an_error_with_its_name(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses it, and the rows before it are given."""
    use(monkeypatch, store)
    slices = [put(store, 0, first) for first in range(0, 9, 3)]
    (file,) = slices[1].files
    strange = dataclasses.replace(file, path="partition=0/../strange.parquet")
    slices[1] = msgspec.structs.replace(slices[1], files=(strange,))
    with pytest.raises(errors.CorruptObject, match="strange"):
        read(slices)
