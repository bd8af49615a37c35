"""`valueFormat = json`: the JSON of a row says what the row says, whatever its columns are."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors
from sparklog.formats.json_values import pack
from sparklog.sinks.columns import ROLES


def packed(columns: dict[str, pa.Array]) -> list[str]:
    """The text of each row."""
    values = pack(pa.record_batch(columns), ROLES).column("value")
    assert values.type == pa.binary()
    return [value.decode() for value in values.to_pylist()]


# ------------------------------------------------------------------------------ any row


@dataclass(frozen=True, slots=True)
class Kind:
    """A column's type, what it may hold, and whether the JSON of a value that is there is right."""

    type: pa.DataType
    values: st.SearchStrategy[Any]
    is_right: Callable[[Any, Any], bool]


def is_equal(found: Any, value: Any) -> bool:
    """Returns true if both are equal and of the same type."""
    return type(found) is type(value) and found == value


def is_float(found: Any, value: float) -> bool:
    """Returns true for the same number as a float, or for the name of a non-finite one."""
    if not math.isfinite(value):
        return found == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return isinstance(found, Decimal) and float(found) == value


def is_float32(found: Any, value: float) -> bool:
    """Returns true for the same number in single precision."""
    return is_float(found if isinstance(found, str) else Decimal(float(np.float32(found))), value)


def is_decimal(found: Any, value: Decimal) -> bool:
    """Returns true for the same number, to the last digit."""
    return isinstance(found, Decimal | int) and found == value


def is_instant(found: Any, value: datetime) -> bool:
    """In UTC, with three digits, or six where they are needed."""
    digits = 3 if value.microsecond % 1_000 == 0 else 6
    return len(found) == 21 + digits and found[-1] == "Z" and is_moment(found, value)


def is_wall_time(found: Any, value: datetime) -> bool:
    """Without a zone."""
    return found[-1] != "Z" and is_moment(found, value)


def is_moment(found: Any, value: datetime) -> bool:
    """ISO 8601."""
    return found[10] == "T" and datetime.fromisoformat(found) == value


MOMENTS = st.datetimes() | st.datetimes().map(lambda each: each.replace(microsecond=0))
LEAVES = [
    Kind(pa.int8(), st.integers(-128, 127), is_equal),
    Kind(pa.int16(), st.integers(-(2**15), 2**15 - 1), is_equal),
    Kind(pa.int32(), st.integers(-(2**31), 2**31 - 1), is_equal),
    Kind(pa.int64(), st.integers(-(2**63), 2**63 - 1), is_equal),
    Kind(pa.float32(), st.floats(width=32), is_float32),
    Kind(pa.float64(), st.floats() | st.integers(-9, 9).map(float), is_float),
    Kind(pa.bool_(), st.booleans(), is_equal),
    Kind(pa.string(), st.text() | st.text(alphabet='\\"\n\x00\x1f{},:é', max_size=9), is_equal),
    Kind(pa.large_string(), st.text(), is_equal),
    Kind(
        pa.binary(),
        st.binary(),
        lambda found, value: base64.b64decode(found, validate=True) == value,
    ),
    Kind(pa.decimal128(38, 18), st.decimals(-(10**19), 10**19, places=18), is_decimal),
    Kind(pa.decimal128(20, 0), st.integers(-(10**19), 10**19).map(Decimal), is_decimal),
    Kind(pa.date32(), st.dates(), lambda found, value: date.fromisoformat(found) == value),
    Kind(
        pa.timestamp("us", tz="Europe/Berlin"),
        MOMENTS.map(lambda each: each.replace(tzinfo=UTC)),
        is_instant,
    ),
    Kind(pa.timestamp("us"), MOMENTS, is_wall_time),
    Kind(pa.null(), st.none(), is_equal),
]


def struct_of(names: list[str], kinds: list[Kind]) -> Kind:
    """Structs of such fields."""
    fields = dict(zip(names, kinds, strict=False))
    values = {name: st.none() | kind.values for name, kind in fields.items()}
    return Kind(
        pa.struct([pa.field(name, kind.type) for name, kind in fields.items()]),
        st.fixed_dictionaries(values),
        lambda found, value: is_object(found, value, fields),
    )


def list_of(kind: Kind) -> Kind:
    """Arrays of such elements, or nulls."""

    def is_right(found: Any, value: Any) -> bool:
        return len(found) == len(value) and all(map(is_element, found, value))

    def is_element(found: Any, value: Any) -> bool:
        return found is None if value is None else kind.is_right(found, value)

    return Kind(pa.list_(kind.type), st.lists(st.none() | kind.values, max_size=4), is_right)


def map_of(kind: Kind) -> Kind:
    """Maps from text to such values, or nulls."""
    elements = list_of(kind)

    def is_right(found: Any, value: Any) -> bool:
        ordered = dict(value)
        return list(found) == list(ordered) and elements.is_right(
            list(found.values()), list(ordered.values())
        )

    values = st.dictionaries(st.text(max_size=5), st.none() | kind.values, max_size=4)
    return Kind(pa.map_(pa.string(), kind.type), values.map(lambda each: [*each.items()]), is_right)


def is_object(found: Any, value: dict[str, Any], fields: dict[str, Kind]) -> bool:
    """The fields that are there, in order; one that is null is left out."""
    there = [name for name in fields if value[name] is not None]
    return list(found) == there and all(
        fields[name].is_right(found[name], value[name]) for name in there
    )


NAMES = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True)
KINDS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.builds(struct_of, NAMES, st.lists(inner, min_size=4, max_size=4))
        | inner.map(list_of)
        | inner.map(map_of)
    ),
    max_leaves=6,
)


@given(st.data())
def test_json_says_what_the_row_says(data: st.DataObject) -> None:
    """Every type, nested in any way, with nulls anywhere, and in a slice of a batch."""
    row = struct_of(data.draw(NAMES), data.draw(st.lists(KINDS, min_size=4, max_size=4)))
    rows = data.draw(st.lists(row.values, max_size=6))
    cut = data.draw(st.integers(0, len(rows)))
    batch = pa.RecordBatch.from_struct_array(pa.array(rows, row.type)).slice(cut)
    texts = pack(batch, ()).column("value").to_pylist()
    assert len(texts) == len(rows) - cut
    for text, each in zip(texts, rows[cut:], strict=True):
        assert row.is_right(json.loads(text, parse_float=Decimal), each), text


# ------------------------------------------------------------------------------ the text itself


def test_columns_with_a_role_keep_it() -> None:
    """Key, topic, partition, headers and timestamp stay as they are, and are not in the value."""
    batch = pa.record_batch({"key": ["k"], "n": [1], "partition": [2], "value": ["v"], "a": ["b"]})
    assert pack(batch, ROLES).to_pydict() == {
        "key": ["k"],
        "partition": [2],
        "value": [b'{"n":1,"value":"v","a":"b"}'],
    }


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array(['a\n\t"\\/é\x01\x1f\u2028']), '"a\\n\\t\\"\\\\/é\\u0001\\u001F\u2028"'),
        (pa.array([1.0]), "1.0"),
        (pa.array([-0.0]), "-0.0"),
        (pa.array([0.1], pa.float32()), "0.1"),
        (pa.array([math.nan]), '"NaN"'),
        (pa.array([-math.inf]), '"-Infinity"'),
        (pa.array([Decimal("1.50")]), "1.50"),
        (pa.array([b"\x00\xff"]), '"AP8="'),
        (pa.array([date(2013, 1, 1)]), '"2013-01-01"'),
        (pa.array([0], pa.timestamp("us", tz="UTC")), '"1970-01-01T00:00:00.000Z"'),
        (pa.array([-1], pa.timestamp("us", tz="UTC")), '"1969-12-31T23:59:59.999999Z"'),
        (pa.array([1_000], pa.timestamp("us")), '"1970-01-01T00:00:00.001"'),
        (pa.array([[1, None]]), "[1,null]"),
        (pa.array([[]], pa.list_(pa.string())), "[]"),
        (pa.array([{"x": 1, "y": None}]), '{"x":1}'),
        (pa.array([{"x": None}], pa.struct([("x", pa.string())])), "{}"),
        (pa.array([[("k", None)]], pa.map_(pa.string(), pa.int32())), '{"k":null}'),
        (
            pa.array([[("k", [None, None])]], pa.map_(pa.string(), pa.list_(pa.null()))),
            '{"k":[null,null]}',
        ),
        (pa.array([[("j", 1)], [("k", 2)]], pa.map_(pa.string(), pa.int32()))[1:], '{"k":2}'),
    ],
)
def test_a_value_s_text(column: pa.Array, text: str) -> None:
    """As Spark's `to_json` writes it, to the letter."""
    assert packed({"a": column}) == [f'{{"a":{text}}}']


def test_null_is_left_out() -> None:
    """A row of nothing but nulls is an empty object."""
    columns = {"a": pa.array([1, None, None]), "b": pa.array([None, "x", None])}
    assert packed(columns) == ['{"a":1}', '{"b":"x"}', "{}"]


def test_a_string_that_is_no_utf_8_is_mended() -> None:
    """Spark lets any bytes be a string; JSON does not."""
    texts = pa.array([b"caf\xe9", None, b"fine"]).view(pa.string())
    assert packed({"a": texts}) == ['{"a":"caf\ufffd"}', "{}", '{"a":"fine"}']


def test_a_type_without_json_is_refused() -> None:
    """The driver has judged the frame, so nothing else comes; what does is not written as if."""
    with pytest.raises(errors.WrongSchema, match="type duration"):
        pack(pa.record_batch({"a": pa.array([1], pa.duration("us"))}), ROLES)


PANDAS_FREE = """
import io, sys
import pyarrow as pa
from sparklog.formats.json_values import pack
batch = pa.ipc.open_stream(io.BytesIO(sys.stdin.buffer.read())).read_next_batch()
pack(batch, ())
print("pandas" in sys.modules)
"""


def test_packing_does_not_load_pandas() -> None:
    """Each worker of Spark's would pay for it, and nothing here needs it."""
    at = [datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 1, 1, 0, 0, 0, 1, tzinfo=UTC)]
    columns = {
        "s": ["a\n", None],
        "f": [1.0, math.nan],
        "b": [b"x", None],
        "t": at,
        "l": [[1], None],
        "n": [{"x": None}, None],
    }
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    answer = subprocess.run(
        [sys.executable, "-c", PANDAS_FREE],
        input=sink.getvalue().to_pybytes(),
        check=True,
        capture_output=True,
    )
    assert answer.stdout.strip() == b"False"
