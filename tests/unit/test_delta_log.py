"""The Delta log's language, both ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import delta_log
from sparklog.storage.table.delta_log import Actions, Add, CommitInfo, Remove, Txn

INFO = CommitInfo(
    timestamp=1,
    operation="WRITE",
    operation_parameters={},
    is_blind_append=True,
    engine_info="x",
    txn_id="y",
)

texts = st.text(max_size=20)
longs = st.integers(-(2**63), 2**63 - 1)
maps = st.dictionaries(texts, st.none() | texts, max_size=3)
adds = st.builds(
    Add,
    path=texts,
    partition_values=maps,
    size=longs,
    modification_time=longs,
    data_change=st.booleans(),
    stats=st.none() | texts,
    tags=st.none() | maps,
)
removes = st.builds(
    Remove,
    path=texts,
    deletion_timestamp=st.none() | longs,
    data_change=st.booleans(),
    extended_file_metadata=st.none() | st.booleans(),
    partition_values=st.none() | maps,
    size=st.none() | longs,
)
txns = st.builds(Txn, app_id=texts, version=longs, last_updated=st.none() | longs)
metadata = st.builds(
    delta_log.Metadata,
    id=texts,
    name=st.none() | texts,
    description=st.none() | texts,
    format=st.builds(delta_log.Format, provider=texts, options=st.dictionaries(texts, texts)),
    schema_string=texts,
    partition_columns=st.lists(texts, max_size=2),
    configuration=maps,
    created_time=st.none() | longs,
)
all_actions = st.builds(
    Actions,
    adds=st.lists(adds, max_size=3),
    removes=st.lists(removes, max_size=3),
    txns=st.lists(txns, max_size=3),
    protocol=st.none() | st.just(delta_log.PROTOCOL),
    metadata=st.none() | metadata,
)
microseconds = st.integers(limits.TIMESTAMP_MIN_US, limits.TIMESTAMP_MAX_US)
files = st.builds(
    TableFile,
    path=st.just("partition=3/x.parquet"),
    partition=st.just(3),
    size_bytes=st.integers(0, 2**62),
    rows=st.integers(0, 2**62),
    first=st.integers(0, 2**62),
    last=st.integers(0, 2**62),
    min_timestamp_us=microseconds,
    max_timestamp_us=microseconds,
    modified_us=st.integers(0, 2**50).map(lambda ms: 1_000 * ms),
)


@given(all_actions)
def test_commit_round_trip(actions: Actions) -> None:
    """A commit says after decoding what it said before encoding."""
    assert delta_log.decode_commit(delta_log.encode_commit(INFO, actions), "x") == actions


@given(all_actions)
def test_checkpoint_round_trip(actions: Actions) -> None:
    """A checkpoint keeps every action, nulls and empty maps included."""
    assert delta_log.decode_checkpoint(delta_log.encode_checkpoint(actions), "x") == actions


@given(all_actions, st.booleans())
def test_removed_files_are_passed_over(actions: Actions, foreign: bool) -> None:
    """All else is there, also of a checkpoint of an engine that keeps them among the others."""
    checkpoint = delta_log.encode_checkpoint(actions)
    if foreign:
        sink = pa.BufferOutputStream()
        pq.write_table(pq.read_table(checkpoint), sink)
        checkpoint = sink.getvalue()
    found = delta_log.decode_checkpoint(checkpoint, "x", removes=False)
    assert found == dataclasses.replace(actions, removes=())


def test_removed_files_cost_a_reader_nothing() -> None:
    """They have row groups of their own, which are not even decoded: damage there is not seen."""
    removed = [Remove(path=f"{number:064x}", data_change=False) for number in range(100)]
    data = delta_log.encode_checkpoint(Actions(adds=[add()], removes=removed)).to_pybytes()
    group = pq.ParquetFile(pa.py_buffer(data)).metadata.row_group(1)
    paths = next(
        column
        for column in map(group.column, range(group.num_columns))
        if column.path_in_schema == "remove.path"
    )
    first, end = paths.data_page_offset, paths.data_page_offset + paths.total_compressed_size // 2
    torn = pa.py_buffer(data[:first] + bytes(end - first) + data[end:])
    assert delta_log.decode_checkpoint(torn, "x", removes=False).adds == [add()]
    with pytest.raises(errors.CorruptObject):
        delta_log.decode_checkpoint(torn, "x")


@given(files)
def test_file_round_trip(file: TableFile) -> None:
    """A file's entry survives the log to the microsecond, in all the years there are."""
    assert delta_log.file_of(delta_log.add_of(file, data_change=True)) == file


def test_statistics_of_columns_are_in_the_log_alone() -> None:
    """Numbers are not rounded on their way, and snapshots do not keep them in memory."""
    low, high, nulls = '"a":-0.1234567890123456789', '"s":{"b":true}', '"s":{"b":7}'
    file = dataclasses.replace(
        delta_log.file_of(add()),
        first=1,
        statistics=f'{{"minValues":{{{low}}},"maxValues":{{{high}}},"nullCount":{{{nulls}}}}}',
    )
    added = delta_log.add_of(file, data_change=True)
    assert added.stats is not None
    for part in (f'"minValues":{{"offset":1,{low}}}', high, f'"timestamp":0,{nulls}}}'):
        assert part in added.stats
    assert delta_log.file_of(added).statistics is None


def add(**more: Any) -> Add:
    """An add action of partition 0."""
    plain = Add(
        path="x", partition_values={"partition": "0"}, size=1, modification_time=0, data_change=True
    )
    return msgspec.structs.replace(plain, **more)


@pytest.mark.parametrize(
    ("text", "low_us", "high_us"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000, 1_001_000),
        ("1970-01-01T00:00:00.123Z", 123_000, 124_000),
        ("1970-01-01T00:00:00.123000Z", 123_000, 123_000),
        ("1970-01-01T00:00:00.123456Z", 123_456, 123_456),
        ("1970-01-01T02:00:00.123456+02:00", 123_456, 123_456),
        ("1970-01-01T00:00:00.123456", 123_456, 123_456),
        ("1969-12-31T23:59:59.999Z", -1_000, 0),
        ("in the beginning", None, None),
    ],
)
def test_foreign_times_are_widened(text: str, low_us: int | None, high_us: int | None) -> None:
    """A bound that another engine cut to milliseconds is taken for the widest that it may mean."""
    stats = f'{{"minValues":{{"timestamp":"{text}"}},"maxValues":{{"timestamp":"{text}"}}}}'
    file = delta_log.file_of(add(stats=stats))
    assert (file.min_timestamp_us, file.max_timestamp_us) == (low_us, high_us)


@pytest.mark.parametrize(
    "stats", [None, "", "{", "[]", '{"minValues":{"offset":1}}', '{"maxValues":{"offset":"x"}}']
)
def test_useless_statistics_are_none(stats: str | None) -> None:
    """Statistics that are absent, broken or half there leave both bounds open."""
    file = delta_log.file_of(add(stats=stats))
    assert (file.first, file.last) == (None, None)


def test_names_are_sorted_out() -> None:
    """Only complete multi-part checkpoints count, and unknown names are ignored."""
    listing = delta_log.read_names(
        [
            "_last_checkpoint",
            f"{3:020d}.json",
            f"{3:020d}.crc",
            f"{4:020d}.{9:020d}.compacted.json",
            f"{4:020d}.json",
            f"{3:020d}.checkpoint.parquet",
            f"{4:020d}.checkpoint.{1:010d}.{2:010d}.parquet",
            f"{5:020d}.checkpoint.{1:010d}.{2:010d}.parquet",
            f"{5:020d}.checkpoint.{2:010d}.{2:010d}.parquet",
            f"{6:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json",
        ]
    )
    assert listing.commits == {3, 4}
    assert list(listing.checkpoints) == [3, 5]
    assert len(listing.checkpoints[5]) == 2
    assert len(listing.v2_checkpoints) == 1


@pytest.mark.parametrize(
    ("name", "version"),
    [(f"{7:020d}.json", 7), (f"{7:020d}.checkpoint.parquet", 7), ("_last_checkpoint", None)],
)
def test_version_of(name: str, version: int | None) -> None:
    """The version is the first twenty digits of a name."""
    assert delta_log.version_of(name) == version


def test_unknown_action_does_not_hide_the_others() -> None:
    """An action of a kind that we do not know is noticed by name, and the rest is read."""
    found = delta_log.decode_commit(b'{"cdc":{"path":"y"}}\n{"txn":{"appId":"a","version":1}}', "x")
    assert found.unknown == {"cdc"}
    assert found.txns == [Txn(app_id="a", version=1)]


@given(st.integers(0, 400))
def test_cut_commit_is_never_something_else(kept_bytes: int) -> None:
    """A commit that was cut off is refused, or is a beginning of what it was."""
    actions = Actions(adds=[add(path="a"), add(path="b")], txns=[Txn(app_id="t", version=1)])
    data = delta_log.encode_commit(INFO, actions)[:kept_bytes]
    try:
        found = delta_log.decode_commit(data, "x")
    except errors.CorruptObject:
        return
    assert list(found.adds) == list(actions.adds)[: len(found.adds)]
    assert data.rstrip(b"\n").endswith(b"}}")


def test_joined_parts_are_the_whole() -> None:
    """Parts of a checkpoint add up, whichever of them has the protocol."""
    whole = Actions(
        adds=[add(path="a"), add(path="b")],
        protocol=delta_log.PROTOCOL,
        metadata=delta_log.new_metadata(table_id="x", created_ms=1),
    )
    first = dataclasses.replace(whole, adds=[whole.adds[0]], protocol=None)
    second = dataclasses.replace(whole, adds=[whole.adds[1]], metadata=None)
    joined = delta_log.joined([first, second])
    assert (joined.adds, joined.protocol, joined.metadata) == (
        whole.adds,
        whole.protocol,
        whole.metadata,
    )
