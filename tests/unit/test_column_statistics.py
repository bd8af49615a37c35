"""Statistics of typed columns: no value is outside its bounds, as readers of Delta parse them."""

from __future__ import annotations

import datetime as dt
import json
import math
import string
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.formats.values import columns, ddl
from sparklog.formats.values.columns import Plan
from sparklog.storage.table import column_statistics
from sparklog.storage.table.column_statistics import CHARACTERS, StatisticsCollector

LEAVES = {
    "BOOLEAN": st.booleans(),
    "TINYINT": st.integers(-(2**7), 2**7 - 1),
    "INT": st.integers(-(2**31), 2**31 - 1),
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "FLOAT": st.floats(width=32),
    "DOUBLE": st.floats(),
    "DECIMAL(5,0)": st.decimals(-99_999, 99_999, places=0),
    "DECIMAL(38,38)": st.decimals(Decimal("-0.99"), Decimal("0.99"), places=38),
    "STRING": st.text(max_size=40)
    | st.text("ab\x00\ud7ff\ue000\uffff\U0010ffff", min_size=28, max_size=36),
    "DATE": st.dates(),
    "TIMESTAMP": st.datetimes(timezones=st.just(dt.UTC)),
}


def plan(text: str) -> Plan:
    """The plan for a table with these columns."""
    found = columns.with_fields(None, ddl.parse(text))
    assert found is not None
    made = found.plan()
    assert made is not None
    return made


def statistics(made: Plan, *groups: Sequence[pa.Array]) -> tuple[Any, Any, Any]:
    """Minimum, maximum and null count of all columns; of row groups without errors."""
    collector = StatisticsCollector(made)
    for group in groups:
        collector.add([pa.nulls(len(group[0]), pa.string()), *group])
    # Readers parse decimals exactly. Python's `float` is correctly rounded, as are their parsers.
    found = json.loads(collector.finish(), parse_float=str, parse_int=str)
    return found["minValues"], found["maxValues"], found["nullCount"]


def of(text: str, *values: Any) -> tuple[Any, Any, Any]:
    """Minimum, maximum and null count of a column `c` of this type, parsed; None if omitted."""
    made = plan(f"c {text}")
    kind = made.columns[0].as_field.type
    low, high, nulls = statistics(made, [pa.array(values, kind)])
    return parsed(low.get("c"), kind), parsed(high.get("c"), kind), int(nulls["c"])


def parsed(bound: Any, kind: pa.DataType) -> Any:
    """A bound as a reader has it: of the column's type."""
    if bound is None:
        return None
    if pa.types.is_integer(kind):
        return int(bound)
    if pa.types.is_floating(kind):
        return float(np.float32(bound)) if kind == pa.float32() else float(bound)
    if pa.types.is_decimal(kind):
        assert set(bound) <= {*string.digits, "-", "."}
        return Decimal(bound)
    if pa.types.is_date(kind):
        return dt.date.fromisoformat(bound)
    if pa.types.is_timestamp(kind):
        return dt.datetime.fromisoformat(bound)
    return bound


@pytest.mark.parametrize("text", LEAVES)
@given(data=st.data())
def test_no_value_is_outside_its_bounds(text: str, data: st.DataObject) -> None:
    """At the top and in structs, some of them null, with any row groups; other bounds are exact."""
    made = plan(f"c {text}, s STRUCT<x: ARRAY<INT>, t: STRUCT<y: BINARY, c: {text}>>")
    kind, struct = (each.as_field.type for each in made.columns)
    rows = st.tuples(st.none() | LEAVES[text], st.integers(0, 2))
    groups = data.draw(st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_statistics, "_FEW_ROWS", data.draw(st.sampled_from([0, 64])))
        low, high, nulls = statistics(
            made,
            *(
                [
                    pa.array([cell for cell, _ in group], kind),
                    pa.array(
                        [(None, {}, {"t": {"c": cell}})[depth] for cell, depth in group], struct
                    ),
                ]
                for group in groups
            ),
        )
    top = [cell for group in groups for cell, _ in group]
    inner = [cell if depth == 2 else None for group in groups for cell, depth in group]
    assert low.keys() | high.keys() <= {"c", "s"}
    assert "x" not in nulls["s"]
    assert low["s"]["t"].keys() | high["s"]["t"].keys() <= {"c"}
    for values, bounds, count in (
        (top, (low.get("c"), high.get("c")), nulls["c"]),
        (inner, (low["s"]["t"].get("c"), high["s"]["t"].get("c")), nulls["s"]["t"]["c"]),
    ):
        assert int(count) == values.count(None)
        assert_between([each for each in values if each is not None], bounds, kind)


def assert_between(values: list[Any], bounds: tuple[Any, Any], kind: pa.DataType) -> None:
    """Checks the bounds of a column with these values, none of them null."""
    lower, upper = (parsed(each, kind) for each in bounds)
    if not values or any(isinstance(each, float) and math.isnan(each) for each in values):
        assert (lower, upper) == (None, None)
        return
    least, most = min(values), max(values)
    if not isinstance(least, str):
        assert (lower, upper) == (least, most)
        return
    assert lower == least[:CHARACTERS]
    if upper is None:
        assert most[:CHARACTERS] == "\U0010ffff" * CHARACTERS
        return
    # By code points and by the bytes of UTF-8, which raises for half of a surrogate pair.
    assert upper >= most
    assert upper.encode() >= most.encode()
    assert len(upper) <= CHARACTERS
    assert upper == most or len(most) > CHARACTERS


@pytest.mark.parametrize(
    ("text", "values", "bounds"),
    [
        ("DOUBLE", (1.5, math.nan), (None, None)),
        ("DOUBLE", (1.5, math.inf), (1.5, math.inf)),
        ("STRING", ("a" * 33,), ("a" * 32, "a" * 31 + "b")),
        ("STRING", ("\ud7ff" * 33,), ("\ud7ff" * 32, "\ud7ff" * 31 + "\ue000")),
        ("STRING", ("a" + "\U0010ffff" * 40,), ("a" + "\U0010ffff" * 31, "b")),
        ("STRING", ("\U0010ffff" * 33,), ("\U0010ffff" * 32, None)),
        ("DECIMAL(38,10)", (Decimal("0E-10"),), (Decimal(0), Decimal(0))),
    ],
)
def test_bounds(text: str, values: tuple[Any, ...], bounds: tuple[Any, Any]) -> None:
    """Those that are cut, omitted, or not a plain number in JSON."""
    assert of(text, *values, None) == (*bounds, 1)


def test_zeros_are_widened() -> None:
    """Engines differ in whether -0.0 is below 0.0."""
    for zero in (0.0, -0.0):
        low, high, _ = of("DOUBLE", zero)
        assert (math.copysign(1, low), math.copysign(1, high)) == (-1, 1)


def test_engines_know_the_same_columns() -> None:
    """Delta readers parse the first 32 columns of a table, six of them of every topic.

    They count arrays and maps as one, and the fields of structs each; `_error` comes first.
    """
    kinds = ("INT", "ARRAY<STRUCT<a: INT, b: INT>>", "BINARY", "STRUCT<a: INT, b: ARRAY<INT>>")
    made = plan(", ".join(f"c{number} {kinds[number % 4]}" for number in range(40)))
    arrays = [pa.array([None], each.as_field.type) for each in made.columns]
    _, _, nulls = statistics(made, arrays)
    counts = ("1", None, "1", {"a": "1"})
    expected = {f"c{number}": counts[number % 4] for number in range(20) if number % 4 != 1}
    assert nulls == {"_error": "1"} | expected
