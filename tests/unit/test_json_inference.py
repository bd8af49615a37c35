"""Columns for fields of JSON objects that no schema names."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from sparklog import errors
from sparklog.formats.values.inference import (
    INFERRED_DEPTH,
    INFERRED_FIELDS,
    FieldFinder,
    Kind,
    find_fields,
    kind_of,
    merged,
    merged_fields,
)
from sparklog.formats.values.json_rules import ObjectDecoder
from sparklog.sources.json_inference import ddl_of, with_new_fields
from sparklog.sources.values import json_type

_EMPTY = pa.struct([])
_numbers = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63) - 1, 2**70]) | st.floats()
_leaves = st.none() | st.booleans() | _numbers | st.text(max_size=3)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=8,
)
_objects = st.dictionaries(st.sampled_from("abcd"), _values, max_size=4)


def found(objects: list[Any], known: pa.StructType = _EMPTY) -> dict[str, Kind]:
    """The fields that are new in these objects."""
    finder = FieldFinder(known)
    finder.look([None if each is None else json.dumps(each) for each in objects])
    return finder.found


def schema_of(kinds: dict[str, Kind]) -> str:
    """The columns of these fields, as DDL."""
    return ddl_of(with_new_fields(StructType([]), kinds)[0])


@given(st.lists(_objects, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_objects_does_not_count(objects: list[Any], chance: Any) -> None:
    """The types are those of all objects, in any order and in any number of parts."""
    expected: Kind = {}
    for each in objects:
        expected = merged(expected, kind_of(each))
    assert found(objects) == expected
    chance.shuffle(objects)
    cut = chance.randint(0, len(objects))
    assert merged_fields([found(objects[:cut]), found(objects[cut:])]) == expected


@given(st.lists(_objects, min_size=1, max_size=6))
def test_each_object_fits_the_columns_that_are_found(objects: list[Any]) -> None:
    """No value is bad by them, and another look finds nothing."""
    schema, left_out = with_new_fields(StructType([]), found(objects))
    assert not left_out
    if schema.fields:
        kind = json_type(schema)
        for each in objects:
            ObjectDecoder(kind).decode(json.dumps(each))
        assert with_new_fields(schema, found(objects, kind))[0] == schema


@pytest.mark.parametrize(
    ("objects", "ddl"),
    [
        ([{"a": 1}, {"a": None}], "`a` bigint"),
        ([{"a": 1}, {"a": 1.5}], "`a` double"),
        ([{"a": 1}, {"a": "x"}], "`a` string"),
        ([{"a": True}, {"a": 1}], "`a` string"),
        ([{"a": 2**63}], "`a` string"),
        ([{"a": 1.5}, {"a": 2**70}], "`a` string"),
        ([{"a": 2**70}, {"a": 1.5}], "`a` string"),
        ([{"a": None, "b": [], "c": {}, "d": [None]}], ""),
        ([{"a": []}, {"a": [{"b": 1}]}, {"a": [{}]}], "`a` ARRAY<STRUCT<`b` bigint>>"),
        ([{"a": {"b": {"c": [1.5]}}}], "`a` STRUCT<`b` STRUCT<`c` ARRAY<double>>>"),
        ([[1], "x", None, 7], ""),
    ],
)  # fmt: skip
def test_types(objects: list[Any], ddl: str) -> None:
    """A value that differs from others makes its field a STRING; nothing known, no column."""
    assert schema_of(found(objects)) == ddl


def test_a_field_nested_too_deeply_is_text() -> None:
    """The columns of the table have a bounded depth."""
    value: Any = 1
    for _ in range(INFERRED_DEPTH + 5):
        value = [value]
    assert schema_of(found([{"a": value}])).count("ARRAY") == INFERRED_DEPTH - 1


def test_known_fields_stay_and_new_ones_are_added_inside() -> None:
    """Objects that do not fit the known columns add none."""
    known = pa.struct([("a", pa.int32()), ("s", pa.struct([("x", pa.string())]))])
    objects = [{"a": 1, "s": {"x": 5, "y": 2}}, {"a": "no number", "evil": 1}, {"a": 1}]
    kinds = found(objects, known)
    assert "evil" not in kinds
    batch = pa.RecordBatch.from_pydict({"value": [json.dumps(each) for each in objects] + [None]})
    (rows,) = find_fields(known, [batch])
    assert json.loads(rows.column(0)[0].as_py()) == kinds
    assert kinds["s"] == {"x": "BIGINT", "y": "BIGINT"}


def test_names_that_no_column_can_have_are_left_out() -> None:
    """Those that Delta refuses, and those that differ in case only."""
    kinds = found(
        [{"a b": 1, "Id": 1, "id": 2, "_offset": 3, "": 4, "\ud800": 5, "s": {"x,": 1, "y": 1}}]
    )
    schema, left_out = with_new_fields(StructType([]), kinds, ["_offset"])
    assert ddl_of(schema) == "`Id` bigint, `s` STRUCT<`y` bigint>"
    assert sorted(left_out) == ["", "_offset", "a b", "id", "s.x,"]


def test_too_many_fields_are_refused() -> None:
    """A producer of random names does not make a table of as many columns."""
    with pytest.raises(errors.BadRequest, match="more than 1,000 new fields"):
        found([{f"f{number}": 1 for number in range(INFERRED_FIELDS + 1)}])
