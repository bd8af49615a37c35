from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.formats.record import (
    CREATE_TIME,
    HEADERS,
    LOG_APPEND_TIME,
    PAYLOAD_SCHEMA,
    ROW_SCHEMA,
    TIMESTAMP,
    check_record_sizes,
    conform_payload,
    largest_record_bytes,
    rows,
    rows_of_run,
    timestamp_range_us,
)
from sparklog.formats.topic_names import check_topic_name
from tests.support.brokers import payload

VALUE = pa.array([b"v"], pa.binary())


def one_row(**columns: pa.Array) -> pa.RecordBatch:
    """A batch of one row, with a value unless one is given."""
    return pa.record_batch({"value": VALUE, **columns})


def stamps(kind: pa.DataType, *values: int) -> pa.RecordBatch:
    """One row for each time, counted in the units of `kind`."""
    times = pa.array(values, pa.int64()).view(kind)
    return pa.record_batch({"value": pa.array([b"v"] * len(values)), "timestamp": times})


def times_us(batch: pa.RecordBatch) -> list[int | None]:
    """The timestamps, in µs."""
    times: list[int | None] = batch.column("timestamp").view(pa.int64()).to_pylist()
    return times


# ------------------------------------------------------------------------------ topic names


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "...", "a" * 249])
def test_a_topic_name_by_kafkas_rule(name: str) -> None:
    """Letters, digits, dots, dashes and underscores make a name, up to 249 of them."""
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a" * 250, "a/b", "a b", "ä", "a\n", "../a", "a\0", None, 7]
)
def test_no_topic_name(name: object) -> None:
    """All other types are refused, and the error names the given type."""
    with pytest.raises(errors.BadTopicName) as refused:
        check_topic_name(name)
    assert refused.value.topic == name


# ------------------------------------------------------------------------------ conforming


def test_what_conforms_is_not_copied() -> None:
    """Columns of the right types keep their memory."""
    batch = payload([b"a", None], key=[b"k", None], timestamp=[1, None], headers=[None, []])
    conformed = conform_payload(batch)
    assert conformed.equals(batch)
    for before, after in zip(batch.columns, conformed.columns, strict=True):
        found = [each and each.address for each in after.buffers()]
        assert found == [each and each.address for each in before.buffers()]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["v"]),
        pa.array(["v"], pa.large_string()),
        pa.array(["v"], pa.string_view()),
        pa.array([b"v"], pa.large_binary()),
        pa.array([b"v"], pa.binary_view()),
        pa.array([b"v"]).dictionary_encode(),
        pa.array(["v"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_texts_and_blobs_become_binary(name: str, column: pa.Array) -> None:
    """Strings go as UTF-8, and large, view and dictionary types as the plain one."""
    conformed = conform_payload(one_row(**{name: column}))
    assert conformed.schema.field(name) == PAYLOAD_SCHEMA.field(name)
    assert conformed.column(name).to_pylist() == [b"v"]


@pytest.mark.parametrize("name", ["key", "value", "timestamp", "headers"])
def test_a_column_of_type_null_is_all_nulls(name: str) -> None:
    """A column of type null has no values."""
    conformed = conform_payload(one_row(**{name: pa.nulls(1)}))
    assert conformed.schema.field(name) == PAYLOAD_SCHEMA.field(name)
    assert conformed.column(name).null_count == 1


def headers_as(kind: pa.DataType) -> pa.Array:
    """One row with a header k=v, of that type."""
    if pa.types.is_struct(kind.value_type):
        return pa.array([[{"key": "k", "value": "v"}]], kind)
    return pa.array([[1]], kind)


KEY, VALUE_FIELD = pa.field("key", pa.string()), pa.field("value", pa.string())


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.struct([KEY, VALUE_FIELD])),
        pa.list_(pa.struct([VALUE_FIELD, KEY])),
        pa.list_(pa.struct([pa.field("key", pa.large_string()), pa.field("value", pa.binary())])),
        pa.list_(pa.field("element", pa.struct([KEY, VALUE_FIELD]), nullable=False)),
    ],
    ids=str,
)
def test_headers_of_another_spelling(kind: pa.DataType) -> None:
    """Lists of structs with key and value are headers, whatever their order and widths."""
    conformed = conform_payload(one_row(headers=headers_as(kind)))
    assert conformed.schema.field("headers").type == HEADERS
    assert conformed.column("headers").to_pylist() == [[{"key": "k", "value": b"v"}]]


def misnamed(batch: pa.RecordBatch, name: bytes) -> pa.RecordBatch:
    """The batch as a peer may send it, with a name in it that is not UTF-8."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data = sink.getvalue().to_pybytes().replace(name, b"\xff" + name[1:])
    return pa.ipc.open_stream(data).read_next_batch()


NO_NAME = misnamed(one_row(key=VALUE), b"key")

WRONG: dict[str, pa.RecordBatch] = {
    "no value": pa.record_batch({"key": VALUE}),
    "a column that is unknown": one_row(topic=VALUE),
    "an offset": one_row(offset=pa.array([1])),
    "a name that is not UTF-8": NO_NAME,
    "a name within headers that is not UTF-8": misnamed(
        one_row(headers=pa.array([[{"key": "k", "worth": b"v"}]])), b"worth"
    ),
    "a column twice": pa.RecordBatch.from_arrays([VALUE, VALUE], ["value", "value"]),
    "a number as value": one_row(value=pa.array([1])),
    "bytes of a fixed size": one_row(value=pa.array([b"v"], pa.binary(1))),
    "an extension type": one_row(
        key=pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))
    ),
    "run ends": one_row(value=pa.RunEndEncodedArray.from_arrays([1], VALUE)),
    "a list as key": one_row(key=pa.array([[b"k"]])),
    "a dictionary of numbers": one_row(key=pa.array([1]).dictionary_encode()),
    "a number as time": one_row(timestamp=pa.array([1])),
    "a date as time": one_row(timestamp=pa.array([dt.date(2024, 1, 1)])),
    "a text as time": one_row(timestamp=pa.array(["2024-01-01"])),
    "a text as headers": one_row(headers=pa.array(["k=v"])),
    "a list of numbers as headers": one_row(headers=headers_as(pa.list_(pa.int64()))),
    "a map as headers": one_row(
        headers=pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary()))
    ),
    "headers with other names": one_row(headers=pa.array([[{"name": "k", "value": b"v"}]])),
    "headers with more": one_row(headers=pa.array([[{"key": "k", "value": b"v", "note": b""}]])),
    "headers without a value": one_row(headers=pa.array([[{"key": "k"}]])),
    "a header that is null": one_row(headers=pa.array([[None]], HEADERS)),
    "a header whose key is null": one_row(headers=pa.array([[{"key": None}]], HEADERS)),
    "a header key that is not UTF-8": one_row(
        headers=pa.array([[{"key": b"\xff", "value": b"v"}]])
    ),
    "a time before the year 1": stamps(TIMESTAMP, limits.TIMESTAMP_MIN_US - 1),
    "a time after the year 9999": stamps(TIMESTAMP, 0, limits.TIMESTAMP_MAX_US + 1),
    "seconds that wrap around in µs": stamps(pa.timestamp("s"), 2**64 // 1_000_000 + 1),
    "milliseconds beyond the year 9999": stamps(pa.timestamp("ms"), 253_402_300_800_000),
}


@pytest.mark.parametrize("what", WRONG)
def test_no_payload(what: str) -> None:
    """A table that is not a payload is refused as a wrong schema, and never becomes other data."""
    with pytest.raises(errors.WrongSchema):
        conform_payload(WRONG[what])


@pytest.mark.parametrize("bound", [limits.TIMESTAMP_MIN_US, limits.TIMESTAMP_MAX_US])
def test_the_first_and_the_last_time(bound: int) -> None:
    """The bounds of Spark's TIMESTAMP are times."""
    assert times_us(conform_payload(stamps(TIMESTAMP, bound))) == [bound]


@pytest.mark.parametrize(
    ("kind", "value", "us"),
    [
        (pa.timestamp("s"), -1, -1_000_000),
        (pa.timestamp("ms", "Europe/Berlin"), 1_234, 1_234_000),
        (pa.timestamp("us"), 1_234, 1_234),
        (pa.timestamp("us", "+02:00"), 1_234, 1_234),
        (pa.timestamp("ns"), 1_234_999, 1_234),
        (pa.timestamp("ns", "UTC"), 1_700_000_000_000_000_001, 1_700_000_000_000_000),
    ],
    ids=str,
)
def test_times_become_microseconds_utc(kind: pa.DataType, value: int, us: int) -> None:
    """Any timestamp is taken, one without a zone as UTC; nanoseconds are cut."""
    assert times_us(conform_payload(stamps(kind, value))) == [us]


# ------------------------------------------------------------------------------ rows

texts = st.none() | st.binary(max_size=5)
times = st.integers(limits.TIMESTAMP_MIN_US, limits.TIMESTAMP_MAX_US)
headers = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=3), "value": texts}), max_size=2
)


@st.composite
def payloads(draw: st.DrawFn) -> pa.RecordBatch:
    """Payloads of few rows, with any of the columns."""
    count = draw(st.integers(1, 4))

    def column(values: st.SearchStrategy[Any]) -> Sequence[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    columns: dict[str, Sequence[Any]] = {}
    if draw(st.booleans()):
        columns["timestamp"] = column(st.none() | times)
    if draw(st.booleans()):
        columns["key"] = column(texts)
    if draw(st.booleans()):
        columns["headers"] = column(headers)
    return payload(column(texts), **columns)


def test_rows_have_every_column() -> None:
    """Missing columns of a payload are null, except the time, which is the arrival time."""
    batch = rows(
        payload([b"a", b"b"]),
        partition=3,
        base_offset=7,
        timestamp_us=5,
        timestamp_type=LOG_APPEND_TIME,
    )
    assert batch.schema == ROW_SCHEMA
    assert batch.select(["partition", "offset", "timestampType", "key", "value"]).to_pydict() == {
        "partition": [3, 3],
        "offset": [7, 8],
        "timestampType": [1, 1],
        "key": [None, None],
        "value": [b"a", b"b"],
    }
    assert times_us(batch) == [5, 5]


def test_only_a_missing_time_is_filled() -> None:
    """A row's own time stays alongside one that has none."""
    batch = payload([b"a", b"b"], timestamp=[-9, None])
    found = rows(batch, partition=0, base_offset=0, timestamp_us=5, timestamp_type=CREATE_TIME)
    assert times_us(found) == [-9, 5]


@given(st.lists(st.tuples(payloads(), st.integers(0, 9), st.integers(0, 1)), min_size=1))
def test_a_run_is_its_batches_one_after_another(
    run: list[tuple[pa.RecordBatch, int, int]],
) -> None:
    """Payloads that are joined give the same rows as each alone."""
    placed = []
    offset = 5
    for batch, arrival_us, kind in run:
        placed.append((offset, arrival_us, kind, batch))
        offset += batch.num_rows
    alone = [
        rows(batch, partition=1, base_offset=first, timestamp_us=arrival_us, timestamp_type=kind)
        for first, arrival_us, kind, batch in placed
    ]
    joined = rows_of_run(placed, partition=1)
    assert pa.Table.from_batches(joined) == pa.Table.from_batches(alone)


def test_small_neighbours_are_joined() -> None:
    """A thousand records sent one by one come out as one batch."""
    run = [(offset, 5, CREATE_TIME, payload([b"v"])) for offset in range(1_000)]
    assert [batch.num_rows for batch in rows_of_run(run, partition=0)] == [1_000]


def test_large_neighbours_are_not_joined() -> None:
    """Few rows may be many bytes, and a column of more than 2 GiB cannot be."""
    large = payload([bytes(16 << 20)] * 4)
    run = [(4 * number, 5, CREATE_TIME, large) for number in range(33)]
    assert [batch.num_rows for batch in rows_of_run(run, partition=0)] == [4] * 33


@given(payloads(), times)
def test_the_range_of_times_holds_each_row(batch: pa.RecordBatch, arrival_us: int) -> None:
    """Least and greatest time are those of the rows, arrivals included."""
    low, high = timestamp_range_us(batch, arrival_us)
    found = times_us(
        rows(batch, partition=0, base_offset=0, timestamp_us=arrival_us, timestamp_type=0)
    )
    known = [time for time in found if time is not None]
    assert (low, high) == (min(known), max(known))


# ------------------------------------------------------------------------------ sizes


def test_the_largest_record_is_found() -> None:
    """Key, value and headers of a record count together, nulls for nothing, in a slice as well."""
    batch = payload(
        [b"", b"xx", None, b"x"],
        key=[b"k" * 9, None, b"k", b""],
        headers=[
            None,
            [{"key": "ab", "value": b"123"}, {"key": "c", "value": None}],
            [],
            [{"key": "abcd", "value": b"12"}],
        ],
    )
    assert largest_record_bytes(batch) == 9
    assert largest_record_bytes(batch.slice(1)) == 8
    assert largest_record_bytes(batch.slice(2)) == 7
    assert largest_record_bytes(batch.slice(2, 1)) == 1
    assert largest_record_bytes(batch.slice(4)) == 0


def test_a_record_over_the_limit_is_refused() -> None:
    """Headers count as key and value do, in bytes; and many small records are not a large one."""
    headers = [[{"key": "é", "value": b"1234"}]]
    batch = payload([b"v" * 4], key=[b"kk"], headers=headers)
    check_record_sizes(batch, 12)
    with pytest.raises(errors.RecordTooLarge) as refused:
        check_record_sizes(batch, 11)
    assert refused.value.facts == {"bytes": 12, "limit_bytes": 11}
    check_record_sizes(payload([b"v" * 11] * 100), 11)
