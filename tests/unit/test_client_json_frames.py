"""JSON both ways: data frames sent as JSON objects, and values read as text or JSON."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sparklog import errors, testing
from sparklog.client.log import Log


@pytest.fixture(name="broker", scope="module")
def _broker() -> Iterator[testing.Broker]:
    with testing.broker() as broker:
        yield broker


@pytest.fixture(name="log")
def _log(broker: testing.Broker) -> Iterator[Log]:
    with broker.connect() as log:
        log.create_topic("t", partitions=2)
        yield log
        for topic in log.topics():
            log.delete_topic(topic)


class Frame:
    """A foreign data frame: nothing but Arrow's PyCapsule interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def _send(log: Log, topic: str, values: Sequence[bytes | None]) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send(topic, value, partition=0)


ROWS: list[dict[str, Any]] = [
    {"carrier": "UA", "delay": 11, "on_time": False},
    {"carrier": 'Ö\n"x"', "delay": None, "on_time": True},
]


@pytest.mark.parametrize(
    "make",
    [pa.Table.from_pylist, lambda rows: Frame(pa.Table.from_pylist(rows)), pl.DataFrame],
    ids=["arrow", "capsule", "polars"],
)
def test_frames_round_trip_as_json(log: Log, make: Any) -> None:
    """A frame sent as JSON is read back with its columns, its key alongside it."""
    with log.producer() as producer:
        producer.send_table("t", make(ROWS), as_json=True, key="carrier").result()
    table = log.read("t", values="json")
    found = dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert found == {str(row["carrier"]).encode(): row for row in ROWS}


def test_pandas_frame_as_json(log: Log) -> None:
    """A pandas frame goes without its index; NaN and NaT are left out, categories are text."""
    frame = pd.DataFrame(
        {
            "at": pd.to_datetime(["2013-01-01T05:00:00.123456789", None]),
            "delay": [1.5, float("nan")],
            "carrier": pd.Categorical(["UA", "AA"]),
        },
        index=[7, 8],
    )
    with log.producer() as producer:
        producer.send_table("t", frame, as_json=True).result()
    texts = log.read("t", values="text", columns=["value"])["value"].to_pylist()
    assert texts == [
        '{"at":"2013-01-01T05:00:00.123456","delay":1.5,"carrier":"UA"}',
        '{"carrier":"AA"}',
    ]


NESTED = pa.struct([("a", pa.large_list(pa.large_string()))])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None], pa.string_view()), "a"),
        (pa.array(["a", None], pa.large_string()), "a"),
        (pa.array(["a", None]).dictionary_encode(), "a"),
        (pa.array([b"\x00\xff", None], pa.binary_view()), "AP8="),
        (pa.array([b"\x00\xff", None], pa.binary(2)), "AP8="),
        (pa.array([[1, None], None], pa.large_list(pa.int8())), [1, None]),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), [1, 2]),
        (
            pa.array([{"a": ["x"]}, None], pa.struct([("a", pa.large_list(pa.large_string()))])),
            {"a": ["x"]},
        ),
        (pa.array([dt.date(2013, 1, 1), None], pa.date64()), "2013-01-01"),
        (pa.array([dt.time(5, 30), None]), "05:30:00.000000"),
        (pa.array([Decimal("1.50"), None]), 1.5),
        (pa.array([2**63, None], pa.uint64()), 2**63),
        (pa.nulls(2), None),
    ],
    ids=lambda each: str(each.type) if isinstance(each, pa.Array) else None,
)
def test_types_of_frames(log: Log, column: pa.Array, expected: object) -> None:
    """Each type that data frames use has a JSON form; null is a field that is left out."""
    with log.producer() as producer:
        producer.send_table("t", pa.table({"x": column}), as_json=True).result()
    texts = log.read("t", values="text")["value"].to_pylist()
    assert [json.loads(text) for text in texts] == [{} if expected is None else {"x": expected}, {}]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(pa.int32(), b"7"), (pa.string_view(), b"7"), (pa.binary(), b"7"), (pa.large_string(), b"7")],
)
def test_keys_of_frames(log: Log, kind: pa.DataType, expected: bytes) -> None:
    """Keys are text, integers or bytes; null is not a key."""
    column = pa.array(["7", None]).cast(kind)
    with log.producer() as producer:
        producer.send_table("t", pa.table({"id": column}), as_json=True, key="id").result()
    assert set(log.read("t")["key"].to_pylist()) == {expected, None}


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (pa.table({"a": [1]}), {"as_json": True, "key": "b"}, "'b' is not a column.* a"),
        (pa.table({"a": [1.5]}), {"as_json": True, "key": "a"}, "'a' is double"),
        (pa.table({"a": [dt.timedelta(1)]}), {"as_json": True}, "duration"),
        (pa.table([[1], [2]], names=["a", "a"]), {"as_json": True}, "two columns are named 'a'"),
        (pa.table({"value": [b""]}), {"key": "value"}, "key = .*as_json=True"),
        ("text", {"as_json": True}, "not str"),
    ],
)
def test_frames_that_are_refused(
    log: Log, table: Any, options: dict[str, Any], message: str
) -> None:
    """A frame that cannot be sent as JSON is refused by column, and no row of it is sent."""
    with log.producer() as producer, pytest.raises(errors.Invalid, match=message):
        producer.send_table("t", table, **options)
    assert log.read("t").num_rows == 0


def test_large_frames_keep_their_order(log: Log) -> None:
    """A frame of several blocks arrives whole and in order."""
    log.create_topic("one", partitions=1)
    rows = 70_000
    with log.producer() as producer:
        frame = pl.DataFrame({"n": range(rows)})
        ranges = producer.send_table("one", frame, as_json=True).result()
    assert sum(each.rows for each in ranges) == rows
    table = log.read("one", values="json", columns=["value"])
    assert table["value"].combine_chunks().field("n").to_pylist() == list(range(rows))


# ------------------------------------------------------------------------------ reading


def test_values_as_text(log: Log) -> None:
    """Values are strings, a tombstone is null, and other columns stay as they are."""
    _send(log, "t", ["tëa".encode(), None])
    table = log.read("t", values="text")
    assert table.schema.field("value").type == pa.string()
    assert table["value"].to_pylist() == ["tëa", None]
    assert table.drop(["value"]).equals(log.read("t").drop(["value"]))


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([b"1", b" 2.5 ", None], pa.float64(), [1.0, 2.5, None]),
        ([b"[1]", b"[]"], pa.list_(pa.int64()), [[1], []]),
        ([b"null", b'"x"'], pa.string(), [None, "x"]),
        (
            [b'{"a":1}', b'{"b":"2013-01-01"}'],
            pa.struct([("a", pa.int64()), ("b", pa.string())]),
            [{"a": 1, "b": None}, {"a": None, "b": "2013-01-01"}],
        ),
        ([], pa.null(), []),
    ],
)
def test_values_as_json(
    log: Log, values: list[bytes | None], kind: pa.DataType, expected: list[object]
) -> None:
    """The type of the column is inferred from all values; texts are not taken for times."""
    _send(log, "t", values)
    table = log.read("t", values="json", columns=["value", "offset"])
    assert table.schema.names == ["value", "offset"]
    assert table.schema.field("value").type == kind
    assert table["value"].to_pylist() == expected


ROW_COUNT = 1_003


@pytest.mark.parametrize(
    ("values", "bad", "reason"),
    [("json", b"{'a':1}", "is not JSON"), ("text", b"\xff", "is not UTF-8"), ("json", b"", "JSON")],
)
def test_bad_values_are_named(log: Log, values: Any, bad: bytes, reason: str) -> None:
    """A value that does not fit is an error with its partition and offset."""
    _send(log, "t", [b"1"] * ROW_COUNT + [bad])
    with pytest.raises(errors.BadValue, match=reason) as raised:
        log.read("t", values=values)
    facts = raised.value.facts
    assert (facts["topic"], facts["partition"], facts["offset"]) == ("t", 0, ROW_COUNT)


@pytest.mark.parametrize("values", [[b"1", b'"x"'], [b'{"a":1}', b'{"a":[]}'], [b"%d" % 2**70]])
def test_values_without_a_common_type(log: Log, values: list[bytes | None]) -> None:
    """Values that no Arrow type holds together are refused with advice."""
    _send(log, "t", values)
    with pytest.raises(errors.WrongSchema, match=r"no common type.*values='text'"):
        log.read("t", values="json")


def test_values_without_the_column(log: Log) -> None:
    """A format of values has no effect where the column is not read; an unknown one is refused."""
    _send(log, "t", [b"no JSON"])
    assert log.read("t", values="json", columns=["offset"]).num_rows == 1
    unknown: Any = "avro"
    with pytest.raises(errors.BadOption, match=r"values = .*'bytes', 'text', 'json'"):
        log.read("t", values=unknown)
