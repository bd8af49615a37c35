"""Values as strings and as JSON objects, against `json.loads`; no Spark."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types

from sparklog import errors
from sparklog.formats.values import json_reader
from sparklog.formats.values.arrow_columns import to_column
from sparklog.sources.values import BadValues, ValueFormat, ValueParser, json_type

MICROS = pa.timestamp("us", "UTC")
BAD = object()


def parse(
    values: Sequence[bytes | str | None],
    kind: pa.DataType,
    *,
    format: ValueFormat = ValueFormat.JSON,
    bad: BadValues = BadValues.COLUMN,
) -> list[Any]:
    """Returns the parsed values, `BAD` for a bad one."""
    parser = pickle.loads(pickle.dumps(ValueParser(format=format, kind=kind, bad=bad)))
    given = pa.array([v.encode() if isinstance(v, str) else v for v in values], pa.binary())
    found, corrupt = parser.parse(given, lambda row: ("t", 3, 1_000 + row))
    found.validate(full=True)
    corrupt.validate(full=True)
    assert (found.type, corrupt.type) == (kind, pa.binary())
    result = []
    for value, parsed, raw in zip(given, found.to_pylist(), corrupt, strict=True):
        if raw.is_valid:
            assert raw.equals(value)
            assert parsed is None
        result.append(BAD if raw.is_valid else parsed)
    return result


def one(text: bytes | str, kind: pa.DataType) -> Any:
    """Parses the only field of an object, `a`, alone and among good and bad objects."""
    row = pa.struct([pa.field("a", kind)])
    (alone,) = parse([text], row)
    among = parse(["{}", text, '{"a":', None, text], row)
    assert repr([among[0], among[2], among[3]]) == repr([{"a": None}, BAD, None])
    assert repr(among[1]) == repr(among[4]) == repr(alone)
    return alone if alone is BAD else alone["a"]


# ------------------------------------------------------------------------------ other formats


def test_binary_stays_as_it_is() -> None:
    """Bytes are bytes, and never bad."""
    values = [b"\xff", None, b""]
    assert parse(values, pa.binary(), format=ValueFormat.BINARY) == values


def test_strings_are_utf8() -> None:
    """A value that is not UTF-8 is bad; a tombstone is null, and not bad."""
    found = parse(
        [b"a\xc3\xa9", b"\xff", None, b"", b"\xed\xa0\x80"], pa.string(), format=ValueFormat.STRING
    )
    assert found == ["aé", BAD, None, "", BAD]


@given(st.lists(st.none() | st.binary(max_size=4) | st.text(max_size=4), max_size=300))
def test_any_strings(values: list[bytes | str | None]) -> None:
    """A string is what Python decodes it to, or bad."""
    expected: list[Any] = []
    for value in values:
        try:
            expected.append(value.decode() if isinstance(value, bytes) else value)
        except UnicodeDecodeError:
            expected.append(BAD)
    assert parse(values, pa.string(), format=ValueFormat.STRING) == expected


# ------------------------------------------------------------------------------ objects and others


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "\n", "null", "5", "true", '"x"', "[]", '[{"a":"x"}]', "NaN"),
        *('{"a":"x"', '{"a":"x"}}', '{"a":"x",}', "{'a':'x'}", "{a:1}", '{"a"}', '{"a":01}'),
        *('{"a":"x"} {"a":"y"}', '{"a":"x"}{}', "{} null", "{}null {}", '{"a":"x"}\n{"a":"y"}'),
        *('{"a":"x"} // no', '/**/{"a":"x"}', '\ufeff{"a":"x"}', '\x0b{"a":"x"}', '{"a":"x"}\x00'),
        *('{"a":"x\ny"}', '{"a":"x\ry"}', '{"a":"x\ty"}', '{"a":"x\x00"}', '{"a":"\\x"}'),
        *(b'{"a":"\xff"}', b'{"b":"\xff"}', b'{"a":"\xed\xa0\x80"}', '{"a":"\\ud800"}'),
        *('{"b":1.}', '{"b":+1}', '{"b":.5}', '{"a":"x","b":}', "{}}", "{{}", "}{"),
    ],
)
def test_what_is_no_object_is_bad(text: bytes | str) -> None:
    """Only one object, and nothing else, is good; a row alongside it does not notice."""
    assert one(text, pa.string()) is BAD


@pytest.mark.parametrize(
    "text",
    [
        *('{"a":"x"}', ' \t\r\n{"a":"x"}\r\n', '{\n"a"\r:\n"x"\n}', '{"\\u0061":"x"}'),
        *(
            '{"b":[1,{"a":"y"},null],"a":"x"}',
            '{"b":{"a":"y"},"a":"x","":0}',
            '{"b":1e999,"a":"x"}',
        ),
        *('{"b":NaN,"a":"x"}', '{"b":1,"b":2,"a":"x"}', '{"a":"y","a":"x"}', '{"a":null,"a":"x"}'),
        *('{"b":"} null","a":"x"}', '{"b":"{} {}","a":"x"}', '{"b":"\\ud83d\\ude00","a":"x"}'),
    ],
)
def test_what_is_an_object_is_good(text: str) -> None:
    """White space, unselected fields and duplicate keys are accepted."""
    assert one(text, pa.string()) == "x"


@pytest.mark.parametrize("depth", [10, 500])
def test_ignored_fields_may_be_nested(depth: int) -> None:
    """The nesting of a field that is not in the schema does not matter, up to 500 levels."""
    assert one(f'{{"b":{"[" * depth}{"]" * depth},"a":"x"}}', pa.string()) == "x"


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_values_nested_too_deeply_are_bad(depth: int) -> None:
    """A value nested deeper than Spark reads, which is 1,000 levels, is bad."""
    text = f'{{"b":{"[" * depth}{"]" * depth},"carrier":"x"}}'
    assert one(text, pa.string()) is BAD
    parser = ValueParser(format=ValueFormat.JSON, kind=FLIGHT, bad=BadValues.ERROR)
    with pytest.raises(errors.BadValue, match="nested too deeply"):
        parser.parse(pa.array([text.encode()], pa.binary()), lambda row: ("t", 0, row))


@pytest.mark.parametrize(
    "values",
    [
        ['{"a":"x"', '"b":1}{"a":"y"}{"a":"z"}'],
        ['{"a":"1"}{"a":"2"}', "", '{"a":"3"}'],
        ['{"a":"1"} {"a":"2"}', '{"a":"3"}\x00}', '{"a":"4"}'],
        ['{"a":"1"} {}', '{"a":"2"}\x00 {}'],
        ['{"a":[', "]}"],
        ['{"a":"', '"}'],
        ['{"a":"1"} null {}', "null"],
    ],
)
def test_no_row_takes_another_s_place(values: list[str]) -> None:
    """Values that are not objects, but make as many when one follows another, are all bad."""
    good = [f'{{"a":"{number}"}}' for number in range(3)]
    expected = [BAD if text != '{"a":"4"}' and text != '{"a":"3"}' else text[6] for text in values]
    found = parse([good[0], *values, *good[1:]], pa.struct([pa.field("a", pa.string())]))
    assert [each if each is BAD else each["a"] for each in found] == ["0", *expected, "1", "2"]


# ------------------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("kind", "literal", "expected"),
    [
        (pa.string(), '"é\\n\\u0000"', "é\n\0"),
        (pa.string(), "1.50", "1.50"),
        (pa.string(), "-12345678901234567890123", "-12345678901234567890123"),
        (pa.string(), "true", "true"),
        (pa.string(), '{"k": [1.0, "é", null]}', '{"k":[1.0,"é",null]}'),
        (pa.string(), "null", None),
        (pa.int8(), "-128", -128),
        (pa.int8(), "128", BAD),
        (pa.int16(), "32767", 32767),
        (pa.int16(), "-32769", BAD),
        (pa.int32(), "-0", 0),
        (pa.int32(), "2147483648", BAD),
        (pa.int32(), "1.0", BAD),
        (pa.int32(), "1e2", BAD),
        (pa.int32(), '"1"', BAD),
        (pa.int32(), "true", BAD),
        (pa.int32(), "NaN", BAD),
        (pa.int64(), "9223372036854775807", 2**63 - 1),
        (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.int64(), "9223372036854775808", BAD),
        (pa.int64(), "9" * 5_000, BAD),
        (pa.float64(), "1", 1.0),
        (pa.float64(), "0.1", 0.1),
        (pa.float64(), "-1e400", -math.inf),
        (pa.float64(), "1e-400", 0.0),
        (pa.float64(), "NaN", math.nan),
        (pa.float64(), '"-INF"', -math.inf),
        (pa.float64(), '"1.5"', BAD),
        (pa.float32(), "1e39", math.inf),
        (pa.float32(), "16777217", 16777216.0),
        (pa.bool_(), "false", False),
        (pa.bool_(), "0", BAD),
        (pa.bool_(), '"true"', BAD),
        (pa.decimal128(10, 2), "1.5", Decimal("1.50")),
        (pa.decimal128(10, 2), '"1,000.5"', Decimal("1000.50")),
        (pa.decimal128(10, 2), "-1.555", Decimal("-1.56")),
        (pa.decimal128(10, 2), "99999999.99", Decimal("99999999.99")),
        (pa.decimal128(10, 2), "99999999.995", BAD),
        (pa.decimal128(10, 2), "2147483648", BAD),
        (pa.decimal128(10, 2), "1e999999999", BAD),
        (pa.decimal128(10, 2), "NaN", BAD),
        (pa.decimal128(10, 2), '" 1"', BAD),
        (pa.decimal128(10, 2), '"1_0"', BAD),
        (pa.decimal128(38, 0), "1e38", BAD),
        (pa.decimal128(38, 37), "0.1", Decimal("0.1" + "0" * 36)),
        (pa.binary(), '""', b""),
        (pa.binary(), '"YWI="', b"ab"),
        (pa.binary(), '"YR=="', b"a"),
        (pa.binary(), '"YWJj\\n"', b"abc"),
        (pa.binary(), '"YWI"', BAD),
        (pa.binary(), '"Y==="', BAD),
        (pa.binary(), '"YQ==YQ=="', BAD),
        (pa.binary(), '"YW=j"', BAD),
        (pa.binary(), '"_-8="', BAD),
        (pa.date32(), '"2013-02-28"', dt.date(2013, 2, 28)),
        (pa.date32(), '"2013-02-28T23:59:59-12:00"', dt.date(2013, 2, 28)),
        (pa.date32(), '"2013-2"', dt.date(2013, 2, 1)),
        (pa.date32(), '"2013-02-29"', BAD),
        (pa.date32(), '"0000-01-01"', BAD),
        (pa.date32(), "15000", BAD),
        (pa.date32(), '""', BAD),
        (pa.list_(pa.int32()), "[1,null]", [1, None]),
        (pa.list_(pa.int32()), "[]", []),
        (pa.list_(pa.int32()), '[1,"x"]', BAD),
        (pa.list_(pa.int32()), "1", BAD),
        (pa.list_(pa.date32()), '["2013-01-01",null]', [dt.date(2013, 1, 1), None]),
        (pa.list_(pa.list_(pa.binary())), '[["YWI="],null,[]]', [[b"ab"], None, []]),
        (pa.struct([("b", pa.int32())]), '{"b":1,"c":2}', {"b": 1}),
        (pa.struct([("b", pa.int32())]), "{}", {"b": None}),
        (pa.struct([("b", pa.int32())]), "null", None),
        (pa.struct([("b", pa.int32())]), '{"b":"x"}', BAD),
        (pa.struct([("b", pa.int32())]), "[1]", BAD),
        (pa.map_(pa.string(), pa.int32()), '{"k":1,"":null}', [("k", 1), ("", None)]),
        (pa.map_(pa.string(), pa.int8()), '{"k":-128,"m":127}', [("k", -128), ("m", 127)]),
        (pa.map_(pa.string(), pa.int8()), '{"k":128}', BAD),
        (pa.map_(pa.string(), pa.int8()), '{"k":-129}', BAD),
        (pa.map_(pa.string(), pa.int64()), '{"k":9223372036854775808}', BAD),
        (pa.map_(pa.string(), pa.int32()), "{}", []),
        (pa.map_(pa.string(), pa.int32()), "null", None),
        (pa.map_(pa.string(), pa.int32()), '{"k":"x"}', BAD),
        (pa.map_(pa.string(), pa.int32()), '[{"key":"k","value":1}]', BAD),
        (pa.map_(pa.string(), pa.date32()), '{"k":"2013-01-01"}', [("k", dt.date(2013, 1, 1))]),
    ],
)
def test_a_field(kind: pa.DataType, literal: str, expected: object) -> None:
    """Each type takes what `from_json` takes of Spark; for what it does not, the value is bad."""
    assert repr(one(f'{{"a":{literal}}}', kind)) == repr(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2013-01-01T05:15:00Z", "2013-01-01T05:15:00"),
        ("2013-01-01T05:15:00", "2013-01-01T05:15:00"),
        ("2013-01-01 05:15", "2013-01-01T05:15:00"),
        ("2013-01-01", "2013-01-01T00:00:00"),
        ("2013", "2013-01-01T00:00:00"),
        ("2013-1-2 3:4:5", "2013-01-02T03:04:05"),
        ("2013-01-01T05:15:00.5+02:00", "2013-01-01T03:15:00.500000"),
        ("2013-01-01T05:15:00-0530", "2013-01-01T10:45:00"),
        ("2013-01-01T05:15:00+00:59", "2013-01-01T04:16:00"),
        ("2013-01-01T05:15:00 UTC", "2013-01-01T05:15:00"),
        ("2013-07-01T05:15:00 America/New_York", "2013-07-01T09:15:00"),
        ("2013-01-01T05:15:00.123456789Z", "2013-01-01T05:15:00.123456"),
        ("1969-12-31T23:59:59.9999999", "1969-12-31T23:59:59.999999"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00"),
        ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999"),
        *((text, None) for text in ("", "n/a", "2013-02-30", "2013-01-01T24:00:00", "05:15:00")),
        *((text, None) for text in ("0000-01-01", "0001-01-01T00:00:00+01:00", "20130101")),
        *((text, None) for text in ("2013-01-01T05:15:00+25:00", "2013-01-01T05:15:00 Mars/X")),
        ("2013-01-01T05:15:00+00:60", None),
    ],
)
def test_a_time(text: str, expected: str | None) -> None:
    """A timestamp is UTC where it has no zone, and is cut to microseconds."""
    found = one(json.dumps({"a": text}), MICROS)
    assert found is BAD if expected is None else found.replace(tzinfo=None).isoformat() == expected


def test_a_time_without_a_zone() -> None:
    """TIMESTAMP_NTZ takes the same times, and no zone."""
    naive = pa.timestamp("us")
    for text in ("2013-01-01T05:15:00.123456789", "2013-1-1 5:15:0.123456"):
        found = one(json.dumps({"a": text}), naive)
        assert found.isoformat() == "2013-01-01T05:15:00.123456"
    for text in ("2013-01-01T05:15:00Z", "2013-01-01T05:15:00 UTC", "2013-01-01T05:15:00+01", "x"):
        assert one(json.dumps({"a": text}), naive) is BAD


def test_a_number_of_seconds_is_a_time() -> None:
    """As Spark has it: whole seconds since 1970."""
    assert one('{"a":-3}', MICROS) == dt.datetime(1969, 12, 31, 23, 59, 57, tzinfo=dt.UTC)
    for literal in ("1.5", "true", "1e3", "99999999999999", "9" * 400):
        assert one(f'{{"a":{literal}}}', MICROS) is BAD


@given(
    st.lists(
        st.tuples(
            st.datetimes(*(dt.datetime.fromisoformat(day) for day in ("0001-01-02", "9999-12-30"))),
            st.sampled_from(["", "Z", "+05:30", "-0800"]),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_times(given_times: list[tuple[dt.datetime, str, int]]) -> None:
    """Times of all years, with zones and without in one column, digits cut."""
    texts, expected = [], []
    for at, zone, digits in given_times:
        part = f".{at.microsecond:06d}999"[: digits + 1] if digits else ""
        text = at.replace(microsecond=0).isoformat() + part
        at = at.replace(microsecond=int(part[1:7].ljust(6, "0")) if digits else 0)
        offset = dt.datetime.fromisoformat(f"2000-01-01T00:00:00{zone}").utcoffset()
        texts.append(json.dumps({"a": text + zone}))
        expected.append((at - (offset or dt.timedelta())).replace(tzinfo=dt.UTC))
    found = parse(texts, pa.struct([pa.field("a", MICROS)]))
    assert [each["a"] for each in found] == expected


@given(st.lists(st.none() | st.binary(max_size=20), max_size=20))
def test_any_bytes(values: list[bytes | None]) -> None:
    """Bytes come back from base64."""
    texts = [
        json.dumps({"a": None if value is None else base64.b64encode(value).decode()})
        for value in values
    ]
    found = parse(texts, pa.struct([pa.field("a", pa.binary())]))
    assert [each["a"] for each in found] == values


def test_a_number_does_not_depend_on_other_fields() -> None:
    """A whole zero has no sign, whether msgspec or the rules decode the record."""
    kind = pa.struct([pa.field("a", pa.float64()), pa.field("b", pa.string())])
    found = parse(['{"a":-0,"b":"x"}', '{"a":-0,"b":5}', '{"a":-0.0,"b":5}'], kind)
    assert repr([row["a"] for row in found]) == "[0.0, 0.0, -0.0]"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.decimal128(10, 2), f'"{"9" * 500_000}x"'),
        (pa.decimal128(10, 2), "9" * 500_000),
        (pa.date32(), f'"2013-01-01{" " * 500_000}\\nx"'),
        (MICROS, f'"2013-01-01T05{" " * 500_000}x"'),
        (MICROS, f'"2013-01-01T05:15:00.{"9" * 500_000}x"'),
        (pa.binary(), f'"{"A" * 500_000}=x"'),
    ],
    ids=lambda each: str(each)[:20],
)
def test_long_texts_are_refused_in_linear_time(kind: pa.DataType, text: str) -> None:
    """In quadratic time, a record of a megabyte would occupy its reader for hours."""
    assert one(f'{{"a":{text}}}', kind) is BAD


# ------------------------------------------------------------------------------ anything

KIND = pa.struct(
    [
        pa.field("i", pa.int32()),
        pa.field("d", pa.float64()),
        pa.field("b", pa.bool_()),
        pa.field("s", pa.string()),
        pa.field("l", pa.list_(pa.int64())),
        pa.field("o", pa.struct([pa.field("i", pa.int8()), pa.field("s", pa.string())])),
    ]
)
MAP_KIND = pa.struct([*KIND, pa.field("m", pa.map_(pa.string(), pa.int64()))])

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-200, 200),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=5),
)
_ANYTHING = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("idbslomx"), inner, max_size=4)
    ),
    max_leaves=8,
)
_FITTING = st.fixed_dictionaries(
    {},
    optional={
        "i": st.integers(-(2**31), 2**31 - 1),
        "d": st.floats(allow_nan=False) | st.integers(-(2**70), 2**70),
        "b": st.booleans(),
        "s": st.text(max_size=8),
        "l": st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=3),
        "o": st.none() | st.fixed_dictionaries({"i": st.integers(-128, 127)}),
        "m": st.dictionaries(st.text(max_size=2), st.none() | st.integers(0, 9), max_size=3),
        "x": _ANYTHING,
    },
)
_OBJECTS = _FITTING | st.dictionaries(st.sampled_from("idbslomx"), _ANYTHING, max_size=4)
_TOKENS = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", '"', "null", "true", "NaN", "1", ".", "e", "-", "0", "\\"),
        *(" ", "\n", "\r", "\x00", "{}", '"i"', '{"i":1}', "} null", "\ufeff", "1e999"),
        '"\\ud800"',
    ]
)


@st.composite
def _texts(draw: st.DrawFn) -> bytes | None:
    """A value: mostly a JSON object, often with something put in or taken out."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.none() | st.binary(max_size=6))
    indent = draw(st.sampled_from([None, None, 1]))
    text = json.dumps(draw(_OBJECTS), ensure_ascii=draw(st.booleans()), indent=indent)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(_TOKENS) + text[at + draw(st.sampled_from([0, 0, 1, 3])) :]
    return text.encode("utf-8", "surrogatepass")


class _Digits(str):
    """A number as it was written."""

    __slots__ = ()


def expected_of(value: bytes | None, kind: pa.StructType) -> Any:
    """By `json.loads`, and by the rules in words."""
    if value is None:
        return None
    try:
        read = json.loads(value.decode(), parse_float=_Digits, parse_int=_Digits)
        found = _fit(read, kind)
        # Half of a surrogate pair has no UTF-8.
        json.dumps(found, ensure_ascii=False, default=str).encode()
        return found
    except ValueError:
        return BAD


def _fit(read: Any, kind: pa.DataType) -> Any:
    if read is None and kind not in (KIND, MAP_KIND):
        return None
    if pa.types.is_struct(kind) and isinstance(read, dict):
        return {field.name: _fit(read.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind) and isinstance(read, dict):
        return [(key, _fit(each, kind.item_type)) for key, each in read.items()]
    if pa.types.is_list(kind) and isinstance(read, list):
        return [_fit(each, kind.value_type) for each in read]
    if pa.types.is_boolean(kind) and isinstance(read, bool):
        return read
    if pa.types.is_string(kind):
        return str(read) if isinstance(read, str) else _compact(read)
    return _fit_number(read, kind)


def _fit_number(read: Any, kind: pa.DataType) -> Any:
    is_number = isinstance(read, _Digits | float)  # NaN and the infinities come as floats
    if pa.types.is_floating(kind) and (is_number or read in ("NaN", "Infinity", "-Infinity")):
        return float(read)
    if pa.types.is_integer(kind) and isinstance(read, _Digits):
        top = 2 ** (kind.bit_width - 1)
        if -top <= int(read) < top:
            return int(read)
    raise ValueError


def _compact(read: Any) -> str:
    if isinstance(read, dict):
        parts = (f"{json.dumps(k, ensure_ascii=False)}:{_compact(v)}" for k, v in read.items())
        return f"{{{','.join(parts)}}}"
    if isinstance(read, list):
        return f"[{','.join(map(_compact, read))}]"
    return str(read) if isinstance(read, _Digits) else json.dumps(read, ensure_ascii=False)


@settings(max_examples=150)
@given(
    st.sampled_from([KIND, MAP_KIND]),
    st.lists(_texts(), min_size=1, max_size=12),
    st.integers(0, 9),
)
def test_any_values(kind: pa.StructType, values: list[bytes | None], copies: int) -> None:
    """Any value is read as `json.loads` reads it, or is bad; in small and in large batches."""
    expected = [expected_of(value, kind) for value in values]
    assert repr(parse(values, kind)) == repr(expected)
    good = [value for value, found in zip(values, expected, strict=True) if found is not BAD]
    many = (values + good * copies) * 4
    found = dict(zip(values, expected, strict=True))
    with pytest.MonkeyPatch.context() as patch:  # so that a batch of this size is a large one
        patch.setattr(json_reader, "_BLOCK_ROWS", 5)
        assert repr(parse(many, kind)) == repr([found[value] for value in many])


# ------------------------------------------------------------------------------ cost

FLIGHT = pa.struct([pa.field("carrier", pa.string()), pa.field("at", MICROS)])
GOOD = b'{"carrier":"UA","at":"2013-01-01T05:15:00Z"}'


@pytest.mark.parametrize(
    ("odd", "by_rules"),
    [
        (GOOD, 0),
        (b'{\n"carrier":"UA"}', 0),
        (b"\xff", 0),
        (None, 0),
        (b'{"at":"2013-01-01T05:15:00"}', 0),
        (b'{"at":"2013-01-01T05:15:00.123456789"}', 0),
        (b'{"carrier":"UA","carrier":"UA"}', 0),
        (b"not JSON", 200),
        (b'{"carrier":5}', 200),
        (b'{"carrier":"UA"} {}', 200),
    ],
)
def test_few_odd_rows_cost_little(
    monkeypatch: pytest.MonkeyPatch, odd: bytes | None, by_rules: int
) -> None:
    """Only the rows that msgspec refuses are decoded by the slow rules, each once."""
    values = [odd if row % 100 == 50 else GOOD for row in range(20_000)]
    reader = json_reader.object_reader(FLIGHT)
    decode, seen = reader._decode_by_rules, []

    def counted(text: str) -> Any:
        seen.append(text)
        return decode(text)

    monkeypatch.setattr(reader, "_decode_by_rules", counted)
    parse(values, FLIGHT)
    assert len(seen) == by_rules


def test_times_of_all_sorts_in_one_column() -> None:
    """Times that Arrow does not read as one column are decoded one by one, and only bad ones are
    bad."""
    texts = [
        *("2013-01-01T05:15:00Z", "2013-01-01T05:15:00", "2013-1-1", "n/a"),
        *("2013-01-01T06:15:00+01:00", "2013-02-30"),
    ]
    found = parse([json.dumps({"at": text}) for text in texts], FLIGHT)
    at = dt.datetime(2013, 1, 1, 5, 15, tzinfo=dt.UTC)
    midnight = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)
    times = [each if each is BAD else each["at"] for each in found]
    assert times == [at, at, midnight, BAD, at, BAD]


def test_large_values_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of more bytes than a block may have are read in parts."""
    monkeypatch.setattr(json_reader, "_BLOCK_BYTES", 1_000)
    blocks = []

    def counted(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        blocks.append(len(values))
        return to_column(values, kind)

    monkeypatch.setattr(json_reader, "to_column", counted)
    values = [json.dumps({"carrier": "x" * size}) for size in (0, 10, 900, 3_000, 400, 400, 400)]
    assert [each["carrier"] for each in parse(values, FLIGHT)] == [
        json.loads(value)["carrier"] for value in values
    ]
    assert len(blocks) > 3


def test_no_values() -> None:
    """An empty batch is an empty column."""
    assert parse([], FLIGHT) == []
    assert parse([None, None], FLIGHT) == [None, None]


def test_slices_are_read_as_slices() -> None:
    """A batch may be a part of a larger one."""
    values = pa.array([b"{}", b'{"carrier":"a"}', b"x", None, b'{"carrier":"b"}'], pa.binary())
    parser = ValueParser(format=ValueFormat.JSON, kind=FLIGHT, bad=BadValues.COLUMN)
    found, corrupt = parser.parse(values[1:4], lambda row: ("t", 0, row))
    assert found.field("carrier").to_pylist()[0] == "a"
    assert found.is_null().to_pylist() == [False, True, True]
    assert corrupt is not None
    assert corrupt.to_pylist() == [None, b"x", None]


def test_good_values_need_no_pandas() -> None:
    """Importing it takes an executor a second."""
    program = f"""
import io, sys
import pyarrow as pa
from sparklog.sources.values import BadValues, ValueFormat, ValueParser

table = pa.ipc.open_stream(io.BytesIO({_stream([b'{"a":1,"at":"2013-01-01"}', b"x", None])!r}))
values = table.read_all()["value"].chunk(0)
fields = [pa.field("a", pa.decimal128(9, 2)), pa.field("at", pa.timestamp("us", "UTC"))]
for format, kind in (("json", pa.struct(fields)), ("string", pa.string())):
    parser = ValueParser(format=ValueFormat(format), kind=kind, bad=BadValues.COLUMN)
    print(parser.parse(values, lambda row: ("t", 0, row))[0].null_count)
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == [b"2", b"1", b"False"]


def _stream(values: list[bytes | None]) -> bytes:
    batch = pa.record_batch({"value": pa.array(values, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


# ------------------------------------------------------------------------------ bad values


def test_bad_values_are_null_and_no_more() -> None:
    """Without a wish there is no second column."""
    values = pa.array([b"x", b"{}"], pa.binary())
    parser = ValueParser(format=ValueFormat.JSON, kind=FLIGHT)
    found, corrupt = parser.parse(values, lambda row: ("t", 0, row))
    assert found.is_null().to_pylist() == [True, False]
    assert corrupt is None


@pytest.mark.parametrize(
    ("values", "format", "told"),
    [
        (
            [b"{}", b'{"carrier":"UA","at":"n/a"}'],
            ValueFormat.JSON,
            't-3, offset 1001: at: n/a is not a valid TIMESTAMP: b\'{"carrier":"UA","at":"n/a"}\'',
        ),
        (
            [None, b"[]", b"x" * 100],
            ValueFormat.JSON,
            "t-3, offset 1001: [] is not a JSON object: b'[]'; 2 of 3 values here are bad",
        ),
        (
            [b"", b"{}"],
            ValueFormat.JSON,
            "t-3, offset 1000:  is not valid JSON: b''",
        ),
        (
            [b"\xff" + b"x" * 100],
            ValueFormat.STRING,
            f"t-3, offset 1000: it is not UTF-8: b'\\xff{'x' * 79}'…",
        ),
    ],
)
def test_a_bad_value_may_end_the_read(
    values: list[bytes | None], format: ValueFormat, told: str
) -> None:
    """The error names the first bad value: its offset, beginning and problem, and the count."""
    kind = FLIGHT if format is ValueFormat.JSON else pa.string()
    parser = ValueParser(format=format, kind=kind, bad=BadValues.ERROR)
    with pytest.raises(errors.BadValue) as raised:
        parser.parse(pa.array(values, pa.binary()), lambda row: ("t", 3, 1_000 + row))
    message = f"Cannot read the value at {told}" + ("" if told.endswith("…") else ".")
    assert str(raised.value) == message
    assert str(pickle.loads(pickle.dumps(raised.value))) == message
    good = pa.array([b"{}", None], pa.binary())
    assert parser.parse(good, lambda row: ("t", 3, row))[1] is None


# ------------------------------------------------------------------------------ schema


def _fields(**kinds: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, kind) for name, kind in kinds.items()])


def test_a_schema_has_sparks_own_types() -> None:
    """Every type that JSON is read as becomes what Spark wants to have from Arrow."""
    found = json_type(
        _fields(
            a=types.TimestampType(),
            b=types.TimestampNTZType(),
            c=types.DecimalType(12, 3),
            d=types.ArrayType(_fields(x=types.DateType())),
            e=types.MapType(types.StringType(), types.BinaryType()),
        )
    )
    element = pa.field("element", pa.struct([pa.field("x", pa.date32())]))
    assert found == pa.struct(
        [
            pa.field("a", MICROS),
            pa.field("b", pa.timestamp("us")),
            pa.field("c", pa.decimal128(12, 3)),
            pa.field("d", pa.list_(element)),
            pa.field("e", pa.map_(pa.string(), pa.binary())),
        ]
    )


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (_fields(), "has no fields"),
        (_fields(a=types.VariantType()), "'a': its type variant is not supported in JSON"),
        (_fields(a=types.NullType()), "'a': its type void is"),
        (
            _fields(a=_fields(b=types.DayTimeIntervalType())),
            "'a.b': its type interval day to second",
        ),
        (_fields(a=types.ArrayType(types.TimeType())), "'a[]': its type time(6) is"),
        (
            _fields(a=types.MapType(types.IntegerType(), types.StringType())),
            "'a': its type is map<int,string>, but keys in JSON are strings",
        ),
        (
            _fields(a=types.MapType(types.StringType(), types.CharType(3))),
            "'a{}': its type char(3) is",
        ),
        (
            types.StructType([types.StructField("a", types.LongType(), nullable=False)]),
            "'a': it is NOT NULL, but objects may lack it",
        ),
        (
            types.StructType([types.StructField("a", types.LongType())] * 2),
            "'a': the name is used twice",
        ),
    ],
)
def test_a_schema_may_be_refused(schema: types.StructType, told: str) -> None:
    """Before anything is read, with the field's name and type."""
    with pytest.raises(errors.BadOption, match="valueSchema") as raised:
        json_type(schema)
    assert told in str(raised.value)
