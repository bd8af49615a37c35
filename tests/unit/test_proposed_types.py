"""Types of the columns that are proposed for the fields of JSON values."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.formats.values import ddl, evolution
from sparklog.formats.values.avro import schema
from sparklog.formats.values.columns import Column
from sparklog.formats.values.derive import Deriver
from sparklog.formats.values.inferred_times import MIN_TIMES, TIMES, kind_of_text
from sparklog.formats.values.proposal import MAP_KEYS, propose

TIME, DAY = "2026-01-02T03:04:05Z", "2026-01-02"


def proposed(values: Iterable[Any]) -> dict[str, str]:
    """The type that is proposed for each field of these values."""
    found = propose(json.dumps(value).encode() for value in values)
    return {each.field.name: each.type for each in found.columns}


def times(*others: Any, count: int = MIN_TIMES) -> list[dict[str, Any]]:
    """Records with a field `at`: as many times, and then the others."""
    return [{"at": value} for value in [TIME] * count + [*others]]


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        (times(), "TIMESTAMP"),
        (times(None), "TIMESTAMP"),
        (times(count=MIN_TIMES - 1), "STRING"),
        (times(None, count=MIN_TIMES - 1), "STRING"),
        (times("n/a"), "STRING"),
        (times(""), "STRING"),
        (times(DAY), "STRING"),
        (times(1_700_000_000), "STRING"),
        (times([TIME]), "STRING"),
        ([{"at": DAY}] * MIN_TIMES, "DATE"),
        ([{"at": [TIME, TIME]}] * MIN_TIMES, "ARRAY<TIMESTAMP>"),
        ([{"at": [TIME] * MIN_TIMES}], "ARRAY<STRING>"),
        ([{"at": [TIME, DAY]}] * MIN_TIMES, "ARRAY<STRING>"),
        (
            [{"at": {"a": TIME, "b": DAY, "c": 1}}] * MIN_TIMES,
            "STRUCT<a: TIMESTAMP, b: DATE, c: BIGINT>",
        ),
        (
            [{"at": {"a": TIME, "b": [{"c": TIME}]}}] + [{"at": {"b": [{"c": TIME}]}}] * MIN_TIMES,
            "STRUCT<a: STRING, b: ARRAY<STRUCT<c: TIMESTAMP>>>",
        ),
    ],
)
def test_times_need_many_values_and_no_other(records: list[dict[str, Any]], kind: str) -> None:
    """Records count, not elements, so that one record alone does not decide."""
    assert proposed(records) == {"at": kind}
    assert proposed(reversed(records)) == {"at": kind}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TIME, "TIMESTAMP"),
        ("2026-01-02T03:04:05.123456789+14:00", "TIMESTAMP"),
        ("9999-12-31T23:59:59.999999Z", "TIMESTAMP"),
        ("2024-02-29T00:00:00-00:30", "TIMESTAMP"),
        (DAY, "DATE"),
        ("0001-01-01", "DATE"),
        *(
            (odd, "STRING")
            for odd in (
                "2026-01-02T03:04:05",  # of which zone?
                "2026-01-02 03:04:05Z",
                "2026-01-02T03:04Z",
                "2026-01-02T24:00:00Z",
                "2026-01-02T23:59:60Z",
                "2026-01-02T03:04:05z",
                "2026-01-02T03:04:05.Z",
                "2026-01-02T03:04:05.1234567890Z",
                "2026-01-02T03:04:05+0100",
                "2026-01-02T03:04:05+25:00",
                "2026-01-02T03:04:05 UTC",
                "0001-01-01T00:00:00+00:01",
                "2026-02-29",
                "2026-1-2",
                "20260102",
                "2026",
                f" {DAY}",
                f"{DAY}\n",
                "٢٠٢٦-01-02",
            )
        ),
    ],
)
def test_only_strict_times_are_times(text: str, kind: str) -> None:
    """Spark accepts most of these texts, but they may mean something else."""
    assert kind_of_text(text) == kind


texts = (
    st.from_regex(r"[0-2][0-9]{3}-[01]\d-[0-3]\d(T[0-2]\d:[0-6]\d:[0-6]\dZ)?", fullmatch=True)
    | st.dates().map(dt.date.isoformat)
    | st.datetimes(timezones=st.timezones()).map(dt.datetime.isoformat)
)


@given(texts)
def test_times_fit_their_column(text: str) -> None:
    """The column has the value that Python reads from the text."""
    kind = kind_of_text(text)
    if kind in TIMES:
        value = json.dumps({"at": text}).encode()
        column = Deriver([pa.field("at", TIMES[kind])]).derive(pa.array([value])).columns[0]
        expected = (
            dt.date.fromisoformat(text) if kind == "DATE" else dt.datetime.fromisoformat(text)
        )
        assert column.to_pylist() == [expected]


def test_a_proposal_names_what_it_has_seen() -> None:
    """Records, those that are objects, how many have a field, and the first of its values."""
    values = [None, b"[]", b"\xff", b'{"a": null}', b'{"a": "%s"}' % (b"x" * 50), b'{"a": 1}']
    found = propose(values)
    assert (found.records, found.objects) == (5, 3)
    (column,) = found.columns
    assert (column.field.name, column.type, column.records) == ("a", "STRING", 2)
    assert column.example == '"' + "x" * 39 + "…"
    assert found.schema == "a STRING"


def test_known_fields_are_kept() -> None:
    """They are not proposed again, and no other field may differ from them only in case."""
    known = [Column(name="value_key", field="key", type="INT", filled=(1,))]
    found = propose([b'{"key": "x", "KEY": 1, "a": 1.5}'], known)
    assert found.schema == "key INT, a DOUBLE"
    assert found.left_out == ["KEY: another field differs only in case"]


def test_fields_without_a_possible_column_are_named() -> None:
    """Inside an object they are left out, and an object without other fields has no type."""
    inner = {"ok": 1, "OK": 2, "a b": 3, "none": None}
    value = {"s": inner, "t": {"x": {}, "y": []}, "u": [[]], "b;": 1, "A": 1, "a": 2}
    found = propose([json.dumps(value).encode()] * 2)
    assert found.schema == "s STRUCT<OK: BIGINT>, A BIGINT"
    assert found.left_out == [
        "t: its values are empty",
        "u: its values are empty",
        "b;: Delta does not accept the name",
        "a: another field differs only in case",
    ]


def test_many_keys_are_a_map() -> None:
    """In all values together, with a type that accepts the values of all keys."""
    records = [{"m": {f"k{number}": number}} for number in range(MAP_KEYS)]
    assert proposed(records)["m"].startswith("STRUCT<")
    assert proposed([*records, {"m": {"more": 0.5}}]) == {"m": "MAP<STRING, DOUBLE>"}
    assert proposed([*records, {"m": {"more": None}}]) == {"m": "MAP<STRING, BIGINT>"}
    assert proposed([{"m": dict.fromkeys(map(str, range(MAP_KEYS + 1)))}]) == {}


def test_a_table_has_a_bounded_width() -> None:
    """Fields inside objects, and the keys and values of maps, count."""
    wide = {"s": {str(number): 1 for number in range(MAP_KEYS)}, "m": [{"a": 1}]}
    value = wide | {f"f{number}": 1 for number in range(ddl.MAX_LEAVES - MAP_KEYS)}
    found = propose([json.dumps(value).encode()])
    assert len(ddl.parse(found.schema)) == ddl.MAX_LEAVES - MAP_KEYS + 1
    assert [each.partition(":")[0] for each in found.left_out] == [
        f"f{ddl.MAX_LEAVES - MAP_KEYS - 1}"
    ]
    assert "at most 500 columns" in found.left_out[0]


def test_order_decides_nothing() -> None:
    """The types are the same for any order of the values."""
    values = [{"a": 1}, {"a": 1.5}, {"b": {"x": 1}}, {"b": {"y": "z"}}, {"c": []}, {"c": [True]}]
    expected = {"a": "DOUBLE", "b": "STRUCT<x: BIGINT, y: STRING>", "c": "ARRAY<BOOLEAN>"}
    assert proposed(values) == proposed(reversed(values)) == expected


def column(name: str, kind: str, *filled: int) -> Column:
    """A column of the field with the same name."""
    return Column(name=name, field=name, type=kind, filled=filled)


@pytest.mark.parametrize(
    ("known", "schema", "left_out"),
    [
        ([], "a BIGINT, b STRING", 0),
        ([column("a", "DOUBLE", 1)], "a DOUBLE, b STRING", 0),
        ([column("a", "STRING", 1, 2)], "a STRING, b STRING", 0),
        ([column("a", "STRING", 1, 2), column("b", "BINARY", 1)], "b BINARY", 1),
    ],
)
def test_columns_keep_their_types(known: Sequence[Column], schema: str, left_out: int) -> None:
    """A dropped column comes back only if its topic has no columns at all, with its only type."""
    found = propose([b'{"a": 1, "b": "x"}'], known)
    assert found.schema == schema
    assert [*map(str, found.left_out)] == [
        "a: its column was dropped; to fill it again, add it to value.schema"
    ][:left_out]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (r"\ud800", "Delta does not accept the name"),
        (r"a\nb", "Delta does not accept the name"),
        (r"\u001b[31m", "its name has characters that cannot be printed"),
    ],
)
def test_names_of_refused_fields_can_be_printed(name: str, reason: str) -> None:
    """Names are chosen by the senders of records, and none reaches a terminal as it is."""
    found = propose([b'{"%s": 1, "a": 1}' % name.encode()])
    assert found.schema == "a BIGINT"
    assert found.left_out == [f'"{name}": {reason}']


def test_columns_of_a_table_are_bounded_together() -> None:
    """Those that it has count too: a configuration with more would be refused."""
    known = [column(f"c{number}", "STRING", 1) for number in range(499)]
    found = propose([b'{"a": 1, "b": 1}'], known)
    assert [each.field.name for each in found.columns] == ["a"]
    assert found.left_out == ["b: a table has at most 500 columns and nested fields"]


def test_columns_for_schemas_are_bounded_likewise() -> None:
    """A proposal that no configuration could have would be refused as a whole."""
    known = [column(f"c{number}", "STRING", 1) for number in range(499)]
    text = '{"type": "record", "name": "R", "fields": [%s]}'
    field = '{"name": "%s", "type": "string"}'
    written = schema.parse(text % ", ".join(field % name for name in ("a", "b")))
    found = evolution.propose({7: 1}, {7: written}, known, records=1)
    assert [each.field.name for each in found.columns] == ["a"]
    assert found.left_out == ["b: a table has at most 500 columns and nested fields"]
