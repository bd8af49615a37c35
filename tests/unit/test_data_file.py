"""Rows to data files."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import limits
from sparklog.formats.record import FILE_SCHEMA, PAYLOAD_SCHEMA, rows
from sparklog.formats.values import ddl
from sparklog.formats.values.columns import with_fields
from sparklog.storage.objects import MemoryStore
from sparklog.storage.table import data_file
from tests.support.tables import START_US, manual_clock, record_batch

blobs = st.none() | st.binary(max_size=30)
payload_rows = st.fixed_dictionaries(
    {
        "timestamp": st.integers(limits.TIMESTAMP_MIN_US, limits.TIMESTAMP_MAX_US),
        "key": blobs,
        "value": blobs,
        "headers": st.none()
        | st.lists(st.fixed_dictionaries({"key": st.text(max_size=5), "value": blobs}), max_size=3),
    }
)


def payload(found: list[dict[str, object]]) -> pa.RecordBatch:
    """Records as a producer sends them."""
    columns = [
        pa.array([row[name] for row in found], pa.int64()).view(kind)
        if name == "timestamp"
        else pa.array([row[name] for row in found], kind)
        for name, kind in zip(PAYLOAD_SCHEMA.names, PAYLOAD_SCHEMA.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)


@given(st.lists(payload_rows, min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 2**62))
def test_round_trip(found: list[dict[str, object]], batch_rows: int, base_offset: int) -> None:
    """Any records come back as columns of `FILE_SCHEMA`, whatever the batches they came in.

    A file of a few rows may lack `key` and `headers` if they are null in all rows.
    """
    whole = rows(
        payload(found),
        partition=0,
        base_offset=base_offset,
        timestamp_us=0,
        timestamp_type=0,
    )
    batches = [whole.slice(start, batch_rows) for start in range(0, len(found), batch_rows)]
    encoded = data_file.encode(batches)
    read = pq.read_table(encoded.data, page_checksum_verification=True)
    names = [
        name
        for name in FILE_SCHEMA.names
        if name not in ("key", "headers") or whole.column(name).null_count < len(found)
    ]
    assert read.equals(pa.Table.from_batches([whole.select(names)]))
    assert read.schema.equals(pa.schema([FILE_SCHEMA.field(name) for name in names]))
    times = [row["timestamp"] for row in found]
    assert (encoded.min_timestamp_us, encoded.max_timestamp_us) == (min(times), max(times))  # type: ignore[type-var]
    assert (encoded.rows, encoded.first, encoded.last) == (
        len(found),
        base_offset,
        base_offset + len(found) - 1,
    )


@pytest.mark.parametrize("batch_rows", [1_000, 70_000, 150_000])
def test_row_groups_are_full(batch_rows: int) -> None:
    """Row groups have the size that lookups want, however the rows arrive."""
    count = 150_000
    column = pa.array(np.arange(count), pa.int64())
    payload = pa.record_batch({"value": column.cast(pa.string()).cast(pa.binary())})
    whole = rows(payload, partition=0, base_offset=7, timestamp_us=START_US, timestamp_type=0)
    encoded = data_file.encode(
        [whole.slice(start, batch_rows) for start in range(0, count, batch_rows)]
    )
    metadata = pq.read_metadata(encoded.data)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [
        limits.ROW_GROUP_ROWS,
        limits.ROW_GROUP_ROWS,
        count - 2 * limits.ROW_GROUP_ROWS,
    ]
    bounds = [(found.min, found.max) for group in groups if (found := group.column(0).statistics)]
    assert bounds[1] == (7 + limits.ROW_GROUP_ROWS, 7 + 2 * limits.ROW_GROUP_ROWS - 1)
    assert pq.read_table(encoded.data)["value"].to_pylist() == whole.column("value").to_pylist()


@pytest.mark.parametrize("batch_rows", [1, 7, 300])
def test_heavy_rows_make_small_row_groups(monkeypatch: pytest.MonkeyPatch, batch_rows: int) -> None:
    """A row group is bounded by its bytes too, however the rows arrive."""
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 64 * limits.KIB)
    whole = record_batch(0, 7, 300, value_bytes=4_000)
    encoded = data_file.encode(
        [whole.slice(start, batch_rows) for start in range(0, 300, batch_rows)]
    )
    metadata = pq.read_metadata(encoded.data)
    sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    assert max(sizes) < 2 * limits.ROW_GROUP_BYTES
    assert min(sizes[:-1]) > limits.ROW_GROUP_BYTES // 3
    expected = pa.Table.from_batches([whole.select(FILE_SCHEMA.names)])
    assert pq.read_table(encoded.data).equals(expected)


def test_a_row_heavier_than_a_row_group_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that cannot be truncated are written as they are."""
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 1_000)
    encoded = data_file.encode([record_batch(0, 0, 5, value_bytes=4_000)])
    assert pq.read_metadata(encoded.data).num_row_groups == 5


def test_row_groups_end_where_files_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """However heavy the rows, a row group ends at every multiple of `ROW_GROUP_ROWS`."""
    monkeypatch.setattr(limits, "ROW_GROUP_ROWS", 50)
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 32 * limits.KIB)
    whole = record_batch(0, 0, 160, value_bytes=1_000)
    encoded = data_file.encode([whole.slice(start, 9) for start in range(0, 160, 9)])
    metadata = pq.read_metadata(encoded.data)
    counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert len(counts) > 4
    assert {50, 100, 150, 160} <= set(itertools.accumulate(counts))


def column_of(encoded: data_file.Encoded, name: str) -> pq.ColumnChunkMetaData:
    """Returns the encodings of a column of the first row group."""
    group = pq.read_metadata(encoded.data).row_group(0)
    found = {group.column(number).path_in_schema: number for number in range(group.num_columns)}
    return group.column(found[name])


def test_values_that_do_not_shrink_are_left_alone() -> None:
    """Incompressible values cost no codec, compressible ones and keys are compressed."""
    hard = data_file.encode([record_batch(0, 0, 5_000, value_bytes=100)])
    soft = data_file.encode(
        [
            rows(
                pa.record_batch({"value": pa.array([b'{"delay": 11}'] * 5_000, pa.binary())}),
                partition=0,
                base_offset=0,
                timestamp_us=START_US,
                timestamp_type=0,
            )
        ]
    )
    assert column_of(hard, "value").compression == "UNCOMPRESSED"
    assert column_of(hard, "key").compression == "ZSTD"
    one = data_file.encode([record_batch(0, 0, 1, value_bytes=100_000)])
    assert column_of(one, "value").compression == "UNCOMPRESSED"
    assert column_of(soft, "value").compression == "ZSTD"
    assert soft.data.size < 5_000
    assert column_of(soft, "key").compression == "UNCOMPRESSED"  # there is none


def test_sample_is_taken_from_the_slice() -> None:
    """A batch that is a view into a larger one is judged by its own values."""
    soft, hard = [b"0" * 100] * 1_000, record_batch(0, 0, 1_000, value_bytes=100).column("value")
    both = pa.concat_arrays([pa.array(soft, pa.binary()), hard])
    whole = rows(
        pa.record_batch({"value": both}),
        partition=0,
        base_offset=0,
        timestamp_us=START_US,
        timestamp_type=0,
    )
    assert column_of(data_file.encode([whole.slice(0, 1_000)]), "value").compression == "ZSTD"
    assert column_of(data_file.encode([whole.slice(1_000)]), "value").compression == "UNCOMPRESSED"


def test_keys_that_repeat_become_a_dictionary() -> None:
    """A dictionary is made for keys that repeat, and not for those that hardly do."""
    repeated = data_file.encode([record_batch(0, 0, 1_000)])
    values = pa.array([b"%d" % number for number in range(1_000)], pa.binary())
    unique = rows(
        pa.record_batch({"key": values, "value": values}),
        partition=0,
        base_offset=0,
        timestamp_us=START_US,
        timestamp_type=0,
    )
    assert column_of(repeated, "key").has_dictionary_page
    assert not column_of(data_file.encode([unique]), "key").has_dictionary_page


@pytest.mark.parametrize("starts", [(0, 0), (10, 5), (5, 9)])
def test_offsets_must_rise(starts: tuple[int, int]) -> None:
    """A file whose offsets do not rise strictly is never written."""
    with pytest.raises(AssertionError):
        data_file.encode([record_batch(0, start, 5) for start in starts])


def test_offsets_must_rise_across_row_groups() -> None:
    """Bytes that are written already count too."""
    encoder = data_file.Encoder()
    encoder.add(record_batch(0, 0, limits.ROW_GROUP_ROWS))
    encoder.add(record_batch(0, 5, 5))
    with pytest.raises(AssertionError):
        encoder.finish()


def test_gaps_are_fine() -> None:
    """Offsets may have gaps, as key compaction leaves them."""
    encoded = data_file.encode([record_batch(0, start, 5) for start in (0, 100)])
    assert (encoded.rows, encoded.first, encoded.last) == (10, 0, 104)


def test_written_file_is_told_as_it_stands() -> None:
    """`write_file` puts a new object each time, and reports what the log is to say of it."""
    clock = manual_clock()
    store = MemoryStore(clock)
    files = [
        data_file.write_file(
            store,
            topic="t",
            topic_id="id",
            partition=3,
            batches=[record_batch(3, 40, 10)],
            clock=clock,
        )
        for _ in range(2)
    ]
    for one, other in itertools.permutations(files):
        assert re.fullmatch(r"partition=3/id-40-49-[0-9a-f]{16}\.parquet", one.path)
        assert one.path != other.path
        assert store.stat(f"topics/t/{one.path}").size_bytes == one.size_bytes
        assert (one.rows, one.first, one.last, one.partition) == (10, 40, 49, 3)
        assert (one.min_timestamp_us, one.max_timestamp_us) == (START_US + 40, START_US + 49)
        assert one.modified_us == clock.now_us()


def test_row_groups_are_bounded_with_their_typed_columns() -> None:
    """Which may be thousands of times as large as the values."""
    fields = [pa.field(f"c{number}", pa.float64()) for number in range(200)]
    columns = with_fields(None, fields)
    assert columns is not None
    count = 2 * limits.ROW_GROUP_BYTES // (200 * 8)
    whole = rows(
        payload([{"timestamp": 0, "key": None, "value": b'{"c1": 1}', "headers": None}] * count),
        partition=0,
        base_offset=0,
        timestamp_us=0,
        timestamp_type=0,
    )
    encoded = data_file.encode([whole], plan=columns.plan())
    parquet = pq.ParquetFile(pa.BufferReader(encoded.data))
    assert parquet.num_row_groups >= 2
    assert encoded.misfits == 0
    assert parquet.read(columns=["c1"])["c1"].to_pylist() == [1.0] * count
    assert parquet.read(columns=["c2"])["c2"].null_count == count


@pytest.mark.parametrize("level", [data_file.FAST_LEVEL, data_file.SMALL_LEVEL])
def test_names_of_columns_have_dots(level: int) -> None:
    """The writer's options identify columns by dotted paths."""
    known = with_fields(None, ddl.parse("`x.y` INT, a STRUCT<c: INT>, `value.x` INT"))
    assert known is not None
    value = b'{"x.y": 1, "a": {"c": 2}, "value.x": 3}'
    whole = rows(
        pa.record_batch({"value": [value] * 1_000}),
        partition=0,
        base_offset=0,
        timestamp_us=START_US,
        timestamp_type=0,
    )
    read = pq.read_table(data_file.encode([whole], level=level, plan=known.plan()).data)
    assert [read[name][-1].as_py() for name in ("x.y", "a", "value.x")] == [1, {"c": 2}, 3]
    assert read.num_rows == len(whole)
