"""`sparklog.formats.values.derive`: typed columns of JSON, against the rules applied to each field.

The rules themselves are tested in test_values.py, and against Spark in tests/spark.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import json
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.formats.values import checks, ddl, derive, json_rules
from sparklog.formats.values.arrow_columns import to_column
from sparklog.formats.values.derive import ERROR_CHARACTERS, Derived, Deriver

MISFIT = object()
time = functools.partial(dt.datetime, tzinfo=dt.UTC)


def shown(value: Any) -> str:
    """Values as text, so that NaN equals NaN, and -0.0 does not equal 0.0."""
    return repr(value).replace("zoneinfo.ZoneInfo(key='UTC')", repr(dt.UTC))


def derived(
    values: Sequence[bytes | str | None],
    fields: Sequence[pa.Field] | str,
    paths: Sequence[str] | None = None,
) -> Derived:
    """The columns of these values, checked for what holds for all columns."""
    columns: Sequence[pa.Field] = ddl.parse(fields) if isinstance(fields, str) else list(fields)
    given = pa.array([v.encode() if isinstance(v, str) else v for v in values], pa.binary())
    found = Deriver(columns, paths=paths).derive(given)
    assert [column.type for column in found.columns] == [field.type for field in columns]
    for column in (*found.columns, found.error):
        column.validate(full=True)
        assert len(column) == len(values)
    texts = [text for text in found.error.to_pylist() if text is not None]
    assert len(texts) == found.bad_rows
    assert all(0 < len(text) <= ERROR_CHARACTERS for text in texts)
    return found


def rows_of(found: Derived) -> list[tuple[Any, ...]]:
    """Each row: its columns, and its error."""
    columns = [column.to_pylist() for column in found.columns]
    return list(zip(*columns, found.error.to_pylist(), strict=True))


def one(literal: str, kind: str) -> Any:
    """The value of a column, alone and among others; `MISFIT` if it does not fit."""
    text = f'{{"a":{literal},"b":1}}'
    fields = f"a {kind}, b INT"
    ((alone, other, error),) = rows_of(derived([text], fields))
    among = rows_of(derived(["{}", text, '{"a":', None, text], fields))
    assert repr([among[1], among[4]]) == repr([(alone, other, error)] * 2)
    assert other == 1  # a column that fits is not affected
    assert error is None or (alone is None and error.startswith(("a: ", "a.")))
    return alone if error is None else MISFIT


# ------------------------------------------------------------------------------ whole values


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, None),
        (b"{}", None),
        (b' \t\r\n{"a":null,"b":{"c":[1,{}]}}\n', None),
        (b"", derive.NOT_JSON),
        (b'{"a":1', derive.NOT_JSON),
        (b'{"a":1,}', derive.NOT_JSON),
        (b"{a:1}", derive.NOT_JSON),
        (b'{"b":01}', derive.NOT_JSON),
        (b'{"b":"\t"}', derive.NOT_JSON),
        (b'{"b":"\\x"}', derive.NOT_JSON),
        (b'{"a":1} {"a":2}', derive.NOT_JSON),
        (b'{"a":1}\x00', derive.NOT_JSON),
        (b'\xef\xbb\xbf{"a":1}', derive.NOT_JSON),
        (b"\x00\x00\x00\x00\x07{}", derive.NOT_JSON),
        (b"null", derive.NOT_OBJECT),
        (b"5", derive.NOT_OBJECT),
        (b"NaN", derive.NOT_OBJECT),
        (b'[{"a":1}]', derive.NOT_OBJECT),
        (b'{"a":"\xff"}', derive.NOT_UTF8),
        (b'{"b":"\xed\xa0\x80"}', derive.NOT_UTF8),
        (b'{"b":"\xc3"}', derive.NOT_UTF8),
        (b"[" * 200, derive.NOT_JSON),
        (b"[" * 2_000, derive.TOO_DEEP),
        (b'{"b":' + b"[" * 2_000 + b"]" * 2_000 + b"}", derive.TOO_DEEP),
    ],
)
def test_values_that_are_bad_as_a_whole(value: bytes | None, reason: str | None) -> None:
    """Those that are not one JSON object in UTF-8; a null value is not bad."""
    for fields in ("a INT", "a INT, b STRING"):
        found = derived([value], fields)
        assert [column.null_count for column in found.columns if value != b"{}"] or reason is None
        assert found.error.to_pylist() == [reason]
        assert found.bad_by_reason == ({} if reason is None else {reason: 1})
        if reason is not None:
            assert all(column.null_count == 1 for column in found.columns)


@pytest.mark.parametrize("where", ["ignored", "text", "limited"])
@pytest.mark.parametrize("frames", [0, 500])
def test_nesting_is_counted(where: str, frames: int) -> None:
    """128 levels fit in ignored and in STRING fields, at any depth of the caller's stack."""
    good, bad = ("[" * depth + "1" + "]" * depth for depth in (127, 128))
    fields = {"ignored": "a INT", "text": "x STRING", "limited": f"a INT, {_WIDE}"}[where]

    def run(frames: int) -> Derived:
        return run(frames - 1) if frames else derived([f'{{"x":{t}}}' for t in (good, bad)], fields)

    assert sys.getrecursionlimit() <= 1_000
    found = run(frames)
    assert found.error.to_pylist() == [None, derive.TOO_DEEP]
    assert where != "text" or found.columns[0].to_pylist() == [good, None]


@pytest.mark.parametrize(
    "inside",
    [
        *('"{"', '"[\\\\"', '"\\"["', '"\\\\\\"["', '"[[",1,"]]"', '"\u00e9[\\u005b"'),
        *('{"[":0,"{":{}}', "[[],{}]", '[" "]'),
    ],
)
def test_brackets_in_strings_are_no_nesting(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, also where a step of the scan begins in a string."""
    monkeypatch.setattr(checks, "_STEP_BYTES", 61)
    many = f'{{"a":7,"x":[{",".join([inside] * 400)}]}}'
    deep = f'{{"x":[{",".join([inside] * 50)}],"y":{"[" * 128}{"]" * 128}}}'
    assert rows_of(derived([many, deep], "a INT")) == [(7, None), (None, derive.TOO_DEEP)]


@given(
    st.recursive(
        st.text('"\\\\[]{}a', max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text('"\\\\[{', max_size=3), inner, max_size=2)
        ),
        max_leaves=12,
    ),
    st.integers(1, 9),
)
def test_levels_are_those_of_the_parsed_value(value: Any, step: int) -> None:
    """The scan, which parses nothing, counts as many."""

    def levels(value: Any) -> int:
        if isinstance(value, str):
            return 0
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(levels, inner), default=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "MAX_DEPTH", 3)
        patch.setattr(checks, "_STEP_BYTES", step)
        assert checks.is_deep(json.dumps(value).encode()) is (levels(value) > 3)


_WIDE = f"l ARRAY<STRUCT<{', '.join(f'c{number}: DOUBLE' for number in range(20))}>>"
_MAP = f"l MAP<STRING, STRUCT<{', '.join(f'c{number}: DOUBLE' for number in range(99))}>>"
_INSIDE = f"o STRUCT<{_WIDE.replace('l ', 'l: ', 1)}>"


@pytest.mark.parametrize(
    ("fields", "outside", "element", "is_bad"),
    [
        (_WIDE, '{"l":[%s]}', "{}", True),
        (_MAP.replace("MAP<STRING, ", "ARRAY<"), '{"l":[ %s]}', " null", True),
        (_INSIDE, '{"o":{"l":[%s]}}', "{}", True),
        (_MAP, '{"l":{%s}}', '"#":{}', True),
        (_MAP, '{"l":{%s}}', '"#": null', True),
        (_MAP, '{"l":{%s}}', '"":{}', False),  # one key
        (_WIDE, '{"l":[%s]}', '" {} "', False),  # a misfit
        (_WIDE, '{"l":[%s],"l":[]}', "{}", False),  # the last one counts
        (_WIDE, '{"x":[%s]}', "{}", False),
        (_WIDE, '{"l":[%s]}', '{"c1":1,"c2":2}', False),
        ("l ARRAY<STRUCT<c1: DOUBLE>>", '{"l":[%s]}', "{}", False),
        ("l ARRAY<DECIMAL(38,0)>", '{"l":[%s]}', "1", False),
        ("l ARRAY<ARRAY<INT>>", '{"l":[%s]}', "[]", False),
    ],
)
def test_columns_are_not_far_larger_than_the_record(
    fields: str, outside: str, element: str, is_bad: bool
) -> None:
    """`[{},{},…]` is three bytes for each element, which has a slot in every column of its type."""
    for count in (20, 20_000):  # of 20, the slots take less than 64 KiB
        elements = ",".join(element.replace("#", str(number)) for number in range(count))
        value = outside % elements
        found = derived(["{}", value, None], f"a INT, {fields}")
        refused = (found.error[1].as_py() or "") == derive.TOO_LARGE
        assert refused is (is_bad and count > 20)
        assert found.error[0].as_py() is found.error[2].as_py() is None
        assert sum(column.nbytes for column in found.columns) < 32 * len(value) + 65_536


def test_a_record_too_large_for_columns_is_not_decoded_to_them() -> None:
    """Its Python objects are bounded too: parsed JSON, but no element with a cell per column."""
    columns = ", ".join(f"c{number}: BOOLEAN" for number in range(400))
    value = f'{{"l":[{"{}," * 20_000}{{}}]}}'
    deriver = Deriver(ddl.parse(f"l ARRAY<STRUCT<{columns}>>"))
    tracemalloc.start()
    try:
        found = deriver.derive(pa.array([value.encode()], pa.binary()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.error.to_pylist() == [derive.TOO_LARGE]
    assert peak < 40 * len(value)


# ------------------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("kind", "literal", "expected"),
    [
        ("STRING", "1.50", "1.50"),
        ("STRING", '{"k": [1.0, NaN, "é", null]}', '{"k":[1.0,NaN,"é",null]}'),
        ("STRING", '"\\ud83d\\ude00\\u0000"', "😀\0"),
        ("STRING", '"\\ud800"', MISFIT),
        ("STRING", '["\\udc00"]', MISFIT),
        ("BOOLEAN", "1", MISFIT),
        ("TINYINT", "-129", MISFIT),
        ("INT", "-0", 0),
        ("INT", "1.0", MISFIT),
        ("BIGINT", "9223372036854775807", 2**63 - 1),
        ("BIGINT", "9223372036854775808", MISFIT),
        ("BIGINT", "9" * 5_000, MISFIT),
        ("FLOAT", "3.4028236e38", float("inf")),
        ("FLOAT", "-1e39", float("-inf")),
        ("FLOAT", "1e-46", 0.0),
        ("DOUBLE", "-0", 0.0),
        ("DOUBLE", "-0.0", -0.0),
        ("DOUBLE", "1e400", float("inf")),
        ("DOUBLE", "NaN", float("nan")),
        ("DOUBLE", '"-INF"', float("-inf")),
        ("DOUBLE", '"1.5"', MISFIT),
        ("DOUBLE", "9007199254740993", 9007199254740992.0),
        ("DOUBLE", "18446744073709551616.0", 18446744073709551616.0),
        ("DOUBLE", "9" * 5_000, float("inf")),
        ("DECIMAL(10,2)", "1", Decimal("1.00")),
        ("DECIMAL(10,2)", "-1.555", Decimal("-1.56")),
        ("DECIMAL(10,2)", '"1,000.5"', Decimal("1000.50")),
        ("DECIMAL(10,2)", "99999999.995", MISFIT),
        ("DECIMAL(10,2)", "1e-77", Decimal("0.00")),
        ("DECIMAL(10,2)", "1e-999999999", Decimal("0.00")),
        ("DECIMAL(10,2)", "1e999999999", MISFIT),
        ("DECIMAL(10,2)", "1e99999999999999999999", MISFIT),
        ("DECIMAL(10,2)", "9" * 5_000, MISFIT),
        ("DECIMAL(10,2)", "true", MISFIT),
        ("DECIMAL(10,2)", "{}", MISFIT),
        ("DECIMAL(38,0)", "9" * 38, Decimal("9" * 38)),
        ("ARRAY<DECIMAL(3,1)>", '[1, "2.25", null]', [Decimal("1.0"), Decimal("2.3"), None]),
        ("ARRAY<DECIMAL(3,1)>", "[1, 1000]", MISFIT),
        ("BINARY", '"YWI="', b"ab"),
        ("BINARY", '"YWI"', MISFIT),
        ("DATE", '"2024-02-29"', dt.date(2024, 2, 29)),
        ("DATE", '"2024-02-29T23:59:59-12:00"', dt.date(2024, 2, 29)),
        ("DATE", '"2013-2"', dt.date(2013, 2, 1)),
        ("DATE", '"2013-02-29"', MISFIT),
        ("DATE", '"0000-01-01"', MISFIT),
        ("TIMESTAMP", "-3", time(1969, 12, 31, 23, 59, 57)),
        ("TIMESTAMP", "1700000000000", MISFIT),
        ("ARRAY<INT>", '[1, "x"]', MISFIT),
        ("ARRAY<INT>", "{}", MISFIT),
        ("STRUCT<x: INT, y: DATE>", '{"y": "2013", "z": 1}', {"x": None, "y": dt.date(2013, 1, 1)}),
        ("STRUCT<x: INT, y: TIMESTAMP>", '{"x": 1, "y": "n/a"}', MISFIT),
        ("MAP<STRING, DATE>", '{"k": "x", "k": null}', [("k", None)]),
        ("MAP<STRING, DATE>", '{"": "2013-1-1"}', [("", dt.date(2013, 1, 1))]),
        ("MAP<STRING, INT>", '{"\\ud800": 1}', MISFIT),
        ("MAP<STRING, INT>", "[]", MISFIT),
    ],
)  # fmt: skip
def test_a_field(kind: str, literal: str, expected: object) -> None:
    """A value that does not fit its column is null, with an error."""
    assert shown(one(literal, kind)) == shown(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2013-07-01T05:15:00Z", "2013-07-01T05:15:00"),
        ("2013-07-01 05:15:00.123456789", "2013-07-01T05:15:00.123456"),
        ("2013-07-01T05:15:00-05:30", "2013-07-01T10:45:00"),
        ("2013-07-01T05:15:00 UTC", "2013-07-01T05:15:00"),
        ("2013-07-01T05:15:00GMT", "2013-07-01T05:15:00"),
        ("2013-07-01T05:15:00 +2", "2013-07-01T03:15:00"),
        ("2013-07-01T05:15:00 America/New_York", None),
        ("2013-07-01T05:15:00 EST", None),
        ("2013-07-01T05:15:00 Etc/UTC", None),
        ("2013-07-01T24:00:00", None),
        ("0001-01-01T00:00:00+00:01", None),
        ("9999-12-31T23:59:59-00:01", None),
        ("0000-06-01T00:00:00Z", None),
        ("n/a", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("kind", ["TIMESTAMP", "ARRAY<TIMESTAMP>"])
def test_times_have_fixed_offsets(kind: str, text: str, expected: str | None) -> None:
    """A time is the same on every machine: no zone is looked up by its name."""
    is_array = kind.startswith("ARRAY")
    found = one(json.dumps([text] if is_array else text), kind)
    time = None if expected is None else dt.datetime.fromisoformat(f"{expected}+00:00")
    assert found == (MISFIT if time is None else [time] if is_array else time)


@given(
    st.text("0123456789-:T. Z+", max_size=26)
    | st.builds(
        "{}{}{}".format,
        st.sampled_from(["2013-01-01", "0000-01-01", "2012-02-29", "2013-1-1"]),
        st.sampled_from(["", "T", " ", "T05", " 05:15", "T05:15:60", "T05:15:07", "T23:59:59."]),
        st.text("0123456789-+:Z. ", max_size=8),
    )
)
@settings(max_examples=300)
def test_arrow_parses_no_time_otherwise(text: str) -> None:
    """The rules take every text that Arrow takes as a date or a time, with the same value."""
    for kind in (pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            by_arrow = pa.array([text], pa.string()).cast(kind).cast(
                pa.date32() if pa.types.is_date(kind) else pa.timestamp("us", "UTC")
            )[0].as_py()  # fmt: skip
        except (pa.ArrowInvalid, ValueError, OverflowError):  # as_py: the year 0
            continue
        name = "DATE" if pa.types.is_date(kind) else "TIMESTAMP"
        assert one(json.dumps(text), name) == by_arrow


def test_several_columns_of_one_field() -> None:
    """A value fills each column that takes it; the error names the others."""
    fields = "n BIGINT, s STRING, n_double DOUBLE, n_time TIMESTAMP, other INT"
    values = ['{"n":1,"o":7}', '{"n":1.5}', '{"n":"2013-01-01"}', '{"n":NaN}', "{}", None, "x"]
    found = derived(values, fields, ["n", "n", "n", "n", "o"])
    *columns, _, error = (column.to_pylist() for column in (*found.columns, found.error))
    nothing = [None] * 3
    assert shown(columns) == shown(
        [
            [1, None, None, None, *nothing],
            ["1", "1.5", "2013-01-01", "NaN", *nothing],
            [1.0, 1.5, None, float("nan"), *nothing],
            [time(1970, 1, 1, 0, 0, 1), None, time(2013, 1, 1), None, *nothing],
        ]
    )
    assert error == [
        None,
        "n: 1.5 is not a valid BIGINT; n_time: 1.5 is not a valid TIMESTAMP",
        'n: "2013-01-01" is not a valid BIGINT; n_double: "2013-01-01" is not a valid DOUBLE',
        "n: NaN is not a valid BIGINT; n_time: NaN is not a valid TIMESTAMP",
        *(None, None, derive.NOT_JSON),
    ]
    assert found.bad_by_reason == {derive.MISFIT: 3, derive.NOT_JSON: 1}


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('{"d":"x"}', 'd: "x" is not a valid DOUBLE'),
        ('{"d":true,"n":[1]}', "d: true is not a valid DOUBLE; n: […] is not a valid DECIMAL(5,1)"),
        ('{"s":{"t":["2013",{}]}}', "s.t.1: {…} is not a valid TIMESTAMP"),
        ('{"d":"a\\n\\u0000\\"é\\ud800"}', 'd: "a\\n\\u0000\\"é\\ud800" is not a valid DOUBLE'),
        ('{"m":{"k\\ud800":1}}', 'm: "k\\ud800" is not valid Unicode text'),
        (f'{{"d":"{"é" * 999}"}}', f'd: "{"é" * 39}…" is not a valid DOUBLE'),
        (f'{{"n":{"9" * 999}}}', f"n: {'9' * 39}… is not a valid DECIMAL(5,1)"),
        (f'{{"m":{{"{"k" * 999}":"x"}}}}', f'm.{"k" * 39}…: "x" is not a valid INT'),
    ],
)
def test_errors(value: str, error: str) -> None:
    """An error names the column, the field inside it, and the value."""
    found = derived(
        [value], "d DOUBLE, n DECIMAL(5,1), s STRUCT<t: ARRAY<TIMESTAMP>>, m MAP<STRING, INT>"
    )
    assert found.error.to_pylist() == [error]


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_names_the_first_columns(order: int) -> None:
    """In the order of the columns, although times are checked after numbers, and in parts."""
    kinds = ["TIMESTAMP", "INT"][::order]
    fields = ", ".join(f"{name} {kinds[place % 2]}" for place, name in enumerate("abcdefghijklmn"))
    value = json.dumps(dict.fromkeys("abcdefghijklmn", ""))
    (error,) = derived([value], fields, list("abcdefghijklmn")).error.to_pylist()
    texts = [f'{name}: "" is not a valid {kinds[n % 2]}' for n, name in enumerate("abcdefghijklmn")]
    assert error == "; ".join(texts)[: ERROR_CHARACTERS - 1] + "…"


@pytest.mark.parametrize(("length", "shown_text"), [(40, "x" * 40), (41, "x" * 39 + "…")])
def test_an_error_shows_the_beginning_of_a_value(length: int, shown_text: str) -> None:
    """A text that is just short enough is complete."""
    (error,) = derived([json.dumps({"a": "x" * length})], "a INT").error.to_pylist()
    assert error == f'a: "{shown_text}" is not a valid INT'


def test_an_error_is_cut_between_characters() -> None:
    """The first of many misfits are named."""
    fields = ", ".join(f"column_{number} INT" for number in range(20))
    value = json.dumps({f"column_{number}": "😀" * 30 for number in range(20)}, ensure_ascii=False)
    (error,) = derived([value], fields).error.to_pylist()
    assert len(error) == ERROR_CHARACTERS
    assert error.startswith(f'column_0: "{"😀" * 30}" is not a valid INT; column_1: "😀')
    assert error.endswith("…")


# ------------------------------------------------------------------------------ anything

_COLUMNS = ddl.parse(
    "a INT, b STRING, c DOUBLE, d DECIMAL(6,2), e TIMESTAMP, f DATE, g BINARY, h FLOAT,"
    " i ARRAY<STRUCT<x: DECIMAL(3,1), y: ARRAY<TIMESTAMP>>>, j MAP<STRING, STRUCT<x: DATE>>,"
    " k STRUCT<x: BIGINT, y: STRING, z: TIMESTAMP>, l ARRAY<STRING>, m BOOLEAN"
)
_NUMBERS = st.one_of(
    st.integers(-300, 300).map(str),
    st.integers(-(2**65), 2**65).map(str),
    st.floats().map(json.dumps),
    st.sampled_from([2**31, 2**63, 10**38])
    .flatmap(lambda n: st.sampled_from([n - 1, n, -n]))
    .map(str),
    st.builds("{}.{}e{}".format, st.integers(-9, 99), st.integers(0, 999), st.integers(-400, 400)),
    st.sampled_from(["-0", "-0.0", "01", "1.", "-", "1e", "1e400", "1e-99", "1e-999999999"]),
)
_TIMES = st.builds(
    "{}{}{}{}".format,
    st.dates().map(str) | st.sampled_from(["2013-02-29", "2013-1-2", "2013", "0000-01-01"]),
    st.sampled_from(["", "T05:15:07", " 23:59:59", "T5:1", "T24:00:00", "T05:15:60"]),
    st.sampled_from(["", "", ".5", ".123456", ".123456789", "."]),
    st.sampled_from(["", "Z", "Z", "+05:30", "-0800", " UTC", " Europe/Berlin", "+24:00", "\n"]),
)  # fmt: skip
_STRINGS = st.one_of(
    _TIMES.map(json.dumps),
    st.text(max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.binary(max_size=4).map(lambda each: f'"{base64.b64encode(each).decode()}"'),
    st.sampled_from(['"\\ud800"', '"\\x"', '"\t"', '"NaN"', '"1,000.5"', '"-INF"', '""', '"YR="']),
)
_LITERALS = st.recursive(
    _NUMBERS | _STRINGS | st.sampled_from(["null", "true", "false", "nul"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]")
        | st.lists(st.builds('"{}":{}'.format, st.sampled_from("xyz"), inner), max_size=3).map(
            lambda each: f"{{{','.join(each)}}}"
        )
    ),
    max_leaves=5,
)
_OF_COLUMNS = {
    **dict.fromkeys("acdh", _NUMBERS),
    **dict.fromkeys("bgl", _STRINGS),
    **dict.fromkeys("ef", _TIMES.map(json.dumps)),
    "i": st.builds('[{{"x":{},"y":[{}]}}]'.format, _NUMBERS, _TIMES.map(json.dumps)),
    "j": st.builds('{{"k":{{"x":{}}}}}'.format, _TIMES.map(json.dumps)),
    "k": st.builds('{{"x":{},"z":{}}}'.format, _NUMBERS, _TIMES.map(json.dumps)),
}


@st.composite
def _records(draw: st.DrawFn) -> bytes | None:
    """Mostly a JSON object, sometimes with something put in or taken out."""
    if draw(st.integers(0, 24)) == 0:
        return draw(st.none() | st.binary(max_size=6))
    names = draw(st.lists(st.sampled_from("abcdefghijklmn"), max_size=4))
    items = [f'"{n}": {draw(_OF_COLUMNS.get(n, _LITERALS) | _LITERALS)}' for n in names]
    text = f"{{{','.join(items)}}}"
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from([*'{}[],:"\\ 0\n', "{}", " NaN "])) + text[at + 1 :]
    return text.encode("utf-8", "surrogatepass")


def _leaf_rules(kind: pa.DataType) -> json_rules.Decode:
    is_decimal = pa.types.is_decimal(kind)
    return json_rules.leaf_decoder(kind) if is_decimal else json_rules.typed_leaf_decoder(kind)


_DERIVER = Deriver(_COLUMNS)
_RULES = [json_rules.decoder_of(field.type, _leaf_rules) for field in _COLUMNS]


def by_rules(value: bytes | None) -> tuple[list[Any], set[str] | str | None]:
    """The columns of a value by the rules alone, and its reason, or the columns that do not fit."""
    nothing = [None] * len(_COLUMNS)
    try:
        parsed = {} if value is None else json_rules.parse(value.decode())
    except UnicodeDecodeError:
        return nothing, derive.NOT_UTF8
    except json_rules.ValueMismatch:
        return nothing, derive.NOT_JSON
    if not isinstance(parsed, dict):
        return nothing, derive.NOT_OBJECT
    row, misfits = [], set()
    for field, decode in zip(_COLUMNS, _RULES, strict=True):
        cell = parsed.get(field.name)
        try:
            decoded = None if cell is None else decode(cell)
        except json_rules.ValueMismatch:
            decoded = None
            misfits.add(field.name)
        row.append(to_column([decoded], field.type)[0].as_py())
    return row, misfits or None


@given(st.lists(_records(), max_size=10), st.data())
@settings(max_examples=100)
def test_any_values_are_derived_as_by_the_rules(values: list[bytes | None], data: Any) -> None:
    """In blocks of any size and any cut, a row is what the rules make of each of its fields."""
    given = pa.array(values, pa.binary())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive, "_BLOCK_ROWS", data.draw(st.sampled_from([2, 3, 1_024])))
        patch.setattr(derive, "_BLOCK_BYTES", data.draw(st.sampled_from([60, 4_096])))
        patch.setattr(derive, "_STEP_ROWS", data.draw(st.sampled_from([1, 2, 256])))
        rows = rows_of(_DERIVER.derive(given))
    cut = data.draw(st.integers(0, len(values)))
    parts = [rows_of(_DERIVER.derive(part)) for part in (given[:cut], given[cut:])]
    assert repr(parts[0] + parts[1]) == repr(rows)
    for value, (*row, error) in zip(values, rows, strict=True):
        expected, reason = by_rules(value)
        assert repr(row) == repr(expected)
        if not isinstance(reason, set):
            assert error == reason
        elif len(error) < ERROR_CHARACTERS:
            assert (
                reason == {part.partition(":")[0][0] for part in error.split("; ")}
                or '"; ' in error
            )


# ------------------------------------------------------------------------------ cost, form

_FLIGHT = ddl.parse(
    "carrier STRING, at TIMESTAMP, delay DECIMAL(6,1), legs ARRAY<STRUCT<to: STRING>>"
)
_GOOD = b'{"carrier":"UA","at":"2013-01-01T05:15:00Z","delay":2.5,"legs":[{"to":"IAH"}],"x":[{}]}'


@pytest.mark.parametrize(
    ("odd", "by_rules"),
    [
        (_GOOD, 0),
        (None, 0),
        (b"\xff", 0),
        (b'{"at":"2013-01-01T05:15:00.123456789+02:00"}', 0),
        (b'{"at":"2013-01-01 05:15:00"}', 0),
        (b'{"at":"2013-1-1"}', 0),
        (b'{"delay":"2.5"}', 0),
        (b'{"at":"n/a"}', 1),
        (b'{"delay":"n/a"}', 1),
        (b'{"carrier":5,"at":"2013-01-01T05:15:00Z"}', 1),
        (b'{"carrier":5,"at":1}', 2),
        (b'{"legs":5,"x":1}', 1),
        (b'{"carrier":NaN}', 1),
        (b"not JSON", 1),
    ],
)
def test_few_odd_rows_cost_little(
    monkeypatch: pytest.MonkeyPatch, odd: bytes | None, by_rules: int
) -> None:
    """Only a field that msgspec or Arrow refuses is parsed for the rules, once."""
    parse, seen = json_rules.parse, []

    def counted(text: str) -> Any:
        seen.append(text)
        return parse(text)

    monkeypatch.setattr(json_rules, "parse", counted)
    values = [odd if row % 100 == 50 else _GOOD for row in range(3_000)]
    found = Deriver(_FLIGHT).derive(pa.array(values, pa.binary()))
    assert len(seen) == 30 * by_rules
    assert found.columns[0][49].as_py() == "UA"


def test_a_large_value_is_a_block_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python objects of a block are bounded by the bytes of its values."""
    sizes: list[int] = []
    build: Callable[..., Any] = derive._Block

    def counted(values: pa.BinaryArray, limit: Any) -> Any:
        sizes.append(sum(len(value.as_py() or b"") for value in values))
        return build(values, limit)

    monkeypatch.setattr(derive, "_Block", counted)
    values = [json.dumps({"a": "é" * size}, ensure_ascii=False) for size in (1, 5_000_000, 2, 3)]
    found = derived([*values, None], "a STRING")
    assert [len(text or "") for text in found.columns[0].to_pylist()] == [1, 5_000_000, 2, 3, 0]
    assert len(sizes) == 3
    assert sorted(sizes)[1] < 100


def test_a_single_block_that_fits_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most calls have few values, and most values fit."""
    made: list[Derived] = []
    of_block = derive._Block.derived

    def noted(*arguments: Any) -> Derived:
        made.append(of_block(*arguments))
        return made[-1]

    monkeypatch.setattr(derive._Block, "derived", noted)
    monkeypatch.setattr("pyarrow.compute.if_else", None)  # it replaces values that do not fit
    assert derived(['{"a": 1}'], "a INT") is made[0]


def test_no_values() -> None:
    """No rows, and no columns."""
    assert rows_of(derived([], "a INT, s STRUCT<x: DATE>, l ARRAY<STRUCT<x: INT>>")) == []
    assert derived([None, b"{}", b"x"], []).error.to_pylist() == [None, None, derive.NOT_JSON]
    many = derived([None] * 3_000, "s STRUCT<x: DATE>, m MAP<STRING, DATE>, d DECIMAL(3,1)")
    assert all(column.null_count == 3_000 for column in many.columns)


def test_slices_are_derived_as_slices() -> None:
    """Values may be a part of a larger array."""
    values = pa.array([b"x", b'{"a":1}', b"\xff", None, b'{"a":2}', b"y"], pa.binary())
    found = Deriver(ddl.parse("a INT")).derive(values[1:5])
    assert rows_of(found) == [(1, None), (None, derive.NOT_UTF8), (None, None), (2, None)]


def test_a_deriver_is_picklable() -> None:
    """For other processes."""
    deriver = pickle.loads(pickle.dumps(Deriver(ddl.parse("a INT, b INT"), paths=["x", "x"])))
    assert rows_of(deriver.derive(pa.array([b'{"x":1}'], pa.binary()))) == [(1, 1, None)]


def test_other_threads_have_turns_between_slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time enough rows of a block were slow; others cost no pause."""
    turns: list[int] = []
    monkeypatch.setattr(derive, "_pause", None)
    derive.set_pause(lambda: turns.append(1))
    slow = ['{"a": "x"}', '{"a": NaN}', '{"a": 1}', None]
    derived(slow * derive.PAUSE_ROWS, "a INT")
    assert len(turns) == 2
    derived(['{"a": 1}'] * 4 * derive.PAUSE_ROWS, "a INT")
    assert len(turns) == 2
