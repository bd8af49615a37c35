"""`sparklog.formats.values.avro`: typed columns of Avro, by the rules and by the compiled loop.

fastavro is the oracle of values that fit. Everything else is stated here for the rules, and the
loop must have the same result.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.formats.values import ddl
from sparklog.formats.values.avro import derive, loops, rules
from sparklog.formats.values.avro.derive import AvroDeriver
from sparklog.formats.values.avro.schema import AvroSchema, fields_of, parse
from sparklog.formats.values.derive import ERROR_CHARACTERS, MISFIT, Derived
from tests.support.avro_values import FRAME, Case, cases, decoded, encoded, expected, has_column

few = settings(max_examples=25)
MIN_LONG, MAX_LONG = -(2**63), 2**63 - 1


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """The loop is used for few values as well."""
    assert loops.load() is None


def derived(
    values: Sequence[bytes | None] | pa.BinaryArray,
    schemas: Mapping[int, AvroSchema | str],
    fields: Sequence[pa.Field] | str,
    paths: Sequence[str] | None = None,
) -> Derived:
    """The columns of these values, by the loop and by the rules, checked for what always holds."""
    columns: Sequence[pa.Field] = ddl.parse(fields) if isinstance(fields, str) else list(fields)
    deriver = AvroDeriver(columns, paths=[e.name for e in columns] if paths is None else paths)
    given = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
    by_loop = deriver.derive(given, schemas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops._State, "kernel", None)
        found = deriver.derive(given, schemas)
    assert shown(rows_of(by_loop)) == shown(rows_of(found))
    assert by_loop.bad_by_reason == found.bad_by_reason
    assert by_loop.waiting == found.waiting
    for each in (by_loop, found):
        assert [column.type for column in each.columns] == [field.type for field in columns]
        for column in (*each.columns, each.error):
            column.validate(full=True)
            assert len(column) == len(values)
    texts = [text for text in found.error.to_pylist() if text is not None]
    assert len(texts) == found.bad_rows
    assert all(0 < len(text) <= ERROR_CHARACTERS for text in texts)
    return by_loop


def rows_of(found: Derived) -> list[tuple[Any, ...]]:
    """Each row: its columns, and its error."""
    columns = [column.to_pylist() for column in found.columns]
    return list(zip(*columns, found.error.to_pylist(), strict=True))


def shown(value: Any) -> str:
    """Values as text, so that NaN equals NaN, and -0.0 does not equal 0.0."""
    return repr(value).replace("zoneinfo.ZoneInfo(key='UTC')", repr(dt.UTC))


def record(**fields: Any) -> dict[str, Any]:
    """A record's schema."""
    named = [{"name": name, "type": kind} for name, kind in fields.items()]
    return {"type": "record", "name": "R", "fields": named}


def schema_of(parsed: Any) -> AvroSchema:
    """A schema of this JSON."""
    return parse(json.dumps(parsed))


def number(value: int) -> bytes:
    """A zigzag varint."""
    raw = value << 1 ^ value >> 63
    found = bytearray()
    while raw > 0x7F:
        found.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes((*found, raw))


def text(value: bytes) -> bytes:
    """The encoding of a string, or of bytes."""
    return number(len(value)) + value


def framed(payload: bytes, schema: int = 1) -> bytes:
    """A value with this encoding."""
    return FRAME.pack(0, schema) + payload


# ------------------------------------------------------------------------------ properties


@few
@given(cases())
def test_values_are_those_that_fastavro_reads(case: Case) -> None:
    """In each column of the schema's own types, without an error."""
    schema = parse(case.text)
    values = [encoded(case.schema, each) for each in case.values]
    found = derived(values, {1: schema}, fields_of(schema).fields)
    wanted = [
        (
            *(
                expected(each["type"], decoded(case.schema, value)[each["name"]])
                for each in case.schema["fields"]
                if has_column(each["type"])
            ),
            None,
        )
        for value in values
    ]
    assert shown(rows_of(found)) == shown(wanted)


@few
@given(cases(rows=3), st.randoms(use_true_random=False))
def test_loop_and_rules_agree_on_damaged_values(case: Case, chance: random.Random) -> None:
    """On every truncation, and on flipped, added and repeated bytes."""
    schema = parse(case.text)
    values: list[bytes] = []
    for each in case.values:
        value = encoded(case.schema, each)
        values += [value[:size] for size in range(len(value))] + [value + b"\x00"]
        for _ in range(40):
            damaged = bytearray(value)
            for _ in range(chance.choice((1, 1, 2, 4))):
                place = chance.randrange(len(damaged))
                damaged[place] = chance.choice((0, 1, 2, 0x80, 0xFF, chance.randrange(256)))
                if chance.random() < 0.2:
                    damaged[place:place] = damaged[chance.randrange(len(damaged)) :]
            values.append(bytes(damaged))
    derived(values, {1: schema}, fields_of(schema).fields)


@few
@given(cases(rows=2), cases(rows=2), st.randoms(use_true_random=False))
def test_loop_and_rules_agree_on_columns_of_another_schema(
    one: Case, other: Case, chance: random.Random
) -> None:
    """Values of two schemas in the columns of both, several of which have the same path."""
    schemas = {1: parse(one.text), 2: parse(other.text)}
    fields = [field for schema in schemas.values() for field in fields_of(schema).fields]
    paths = [field.name for field in fields]
    names = [f"c{place}" for place in range(len(fields))]
    columns = [pa.field(name, field.type) for name, field in zip(names, fields, strict=True)]
    values: list[bytes | None] = [encoded(one.schema, each) for each in one.values]
    values += [encoded(other.schema, each, 2) for each in other.values]
    values += [None, b"", framed(b"", 3)]
    chance.shuffle(values)
    derived(values, schemas, columns, paths)


@few
@given(cases(rows=6), st.randoms(use_true_random=False))
def test_neighbours_do_not_matter(case: Case, chance: random.Random) -> None:
    """Each value has the same row alone, in any slice, and among values that are undone."""
    schema = parse(case.text)
    fields = fields_of(schema).fields
    values: list[bytes | None] = []
    for each in case.values:
        value = encoded(case.schema, each)
        values += chance.sample([value, value[:-1], None, value + b"x", framed(b"", 9)], 4)
    whole = rows_of(derived(values, {1: schema}, fields))
    array = pa.array(values, pa.binary())
    start = chance.randrange(len(values))
    size = chance.randrange(len(values) - start + 1)
    assert shown(rows_of(derived(array.slice(start, size), {1: schema}, fields))) == shown(
        whole[start : start + size]
    )
    for place, each in enumerate(values):
        assert shown(rows_of(derived([each], {1: schema}, fields))) == shown([whole[place]])


# ------------------------------------------------------------------------------ whole values

LISTED = record(n="long", l={"type": "array", "items": "string"}, u=["null", "double"])
GOOD = number(7) + number(1) + text(b"a") + number(0) + number(0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, None),
        (framed(GOOD), None),
        (b"", derive.NOT_FRAMED),
        (b"\x00\x00\x00\x00", derive.NOT_FRAMED),
        (b'{"n":1}', derive.NOT_FRAMED),
        (b"\x01" + framed(GOOD)[1:], derive.NOT_FRAMED),
        (framed(b""), rules.CUT_OFF),
        (framed(GOOD[:-1]), rules.CUT_OFF),
        (framed(GOOD[:-1] + number(1) + bytes(7)), rules.CUT_OFF),
        (framed(GOOD + b"\x00"), rules.TRAILING),
        (framed(number(7) + number(1) + number(99) + b"a"), rules.BAD_LENGTH),
        (framed(number(7) + number(1) + number(-1) + b"a"), rules.BAD_LENGTH),
        (framed(number(7) + number(1) + number(MAX_LONG) + b"a"), rules.BAD_LENGTH),
        (framed(number(7) + number(MAX_LONG) + text(b"a")), rules.CUT_OFF),
        (framed(GOOD[:-1] + number(2)), rules.BAD_BRANCH),
        (framed(GOOD[:-1] + number(-1)), rules.BAD_BRANCH),
        (framed(b"\xff" * 9 + b"\x02" + GOOD[1:]), rules.BAD_NUMBER),
        (framed(b"\x80" * 10 + b"\x00" + GOOD[1:]), rules.BAD_NUMBER),
        (framed(number(7) + number(-1) + number(2) + text(b"a") + bytes(2)), None),
        (framed(number(7) + number(-1) + number(3) + text(b"a") + bytes(2)), rules.BAD_BLOCK),
        (framed(number(7) + number(-1) + number(-9) + text(b"a") + bytes(2)), rules.BAD_BLOCK),
        (framed(number(7) + number(MIN_LONG) + number(2) + text(b"a")), rules.CUT_OFF),
    ],
)
def test_values_that_are_bad_as_a_whole(value: bytes | None, reason: str | None) -> None:
    """Those whose bytes cannot be taken apart, whether or not a column has the field."""
    for fields in ("n BIGINT, l ARRAY<STRING>, u DOUBLE", "n BIGINT", "u DOUBLE", "x BIGINT"):
        found = derived([framed(GOOD), value, framed(GOOD)], {1: schema_of(LISTED)}, fields)
        assert found.error.to_pylist() == [None, reason, None]
        assert found.bad_by_reason == ({} if reason is None else {reason: 1})
        if reason is not None or value is None:
            assert [column[1].as_py() for column in found.columns] == [None] * len(found.columns)


def test_values_without_a_usable_schema() -> None:
    """They wait, or are bad for the reason that is given."""
    reason = "schema 8 is not of type AVRO"
    values = [framed(GOOD), framed(GOOD, 7), framed(GOOD, 8), framed(GOOD, 2**32 - 1)]
    found = derived(values, {1: schema_of(LISTED), 8: reason}, "n BIGINT")
    assert rows_of(found) == [
        (7, None),
        (None, "waiting: schema 7 is not known yet"),
        (None, reason),
        (None, "waiting: schema 4294967295 is not known yet"),
    ]
    assert found.waiting == {7, 2**32 - 1}
    assert found.bad_by_reason == {derive.WAITING: 2, derive.UNUSABLE_SCHEMA: 1}


@pytest.mark.parametrize("field", ["next", "other"])
def test_nesting_is_counted(field: str) -> None:
    """128 levels fit in a field that no column has, at any depth of the caller's stack."""
    schema = schema_of(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "n", "type": "long"},
                {"name": "next", "type": ["null", {"type": "map", "values": "R"}]},
                {"name": "other", "type": ["null", "R"]},
            ],
        }
    )
    inner, levels = (number(1) + number(0) + number(0)), 1
    per_level = 2 if field == "next" else 1
    values = {}
    while levels <= 129:
        # The record around all others is not counted.
        values[levels] = framed(inner)
        levels += per_level
        entry = number(1) + text(b"k") + inner + number(0)
        if field == "next":
            inner = number(1) + number(1) + entry + number(0)
        else:
            inner = number(1) + number(0) + number(1) + inner

    def run(frames: int) -> Derived:
        return run(frames - 1) if frames else derived([*values.values()], {1: schema}, "n BIGINT")

    assert sys.getrecursionlimit() <= 1_000
    found = run(400).error.to_pylist()
    wanted = [rules.TOO_DEEP if each - 1 > 128 else None for each in values]
    assert found == wanted


@pytest.mark.parametrize(
    ("schema", "fields", "payload"),
    [
        # Elements without bytes: of null, of an empty record, and of a record of nulls.
        (
            {"type": "array", "items": "null"},
            "data ARRAY<DOUBLE>",
            number(1 << 62) + number(0),
        ),
        (
            {"type": "array", "items": record(x="null")},
            "data ARRAY<STRUCT<x: DOUBLE>>",
            number(1 << 62) + number(0),
        ),
        (
            {"type": "array", "items": {"type": "enum", "name": "E", "symbols": ["A" * 70_000]}},
            "data ARRAY<STRING>",
            number(9) + bytes(10),
        ),
        (
            {"type": "map", "values": record(x=["null", "long"])},
            f"data MAP<STRING, STRUCT<{', '.join(f'c{n}: DOUBLE' for n in range(99))}, x: DOUBLE>>",
            number(300) + b"".join(text(b"%x" % n) + number(0) for n in range(300)) + number(0),
        ),
    ],
)
def test_columns_are_not_far_larger_than_the_record(
    schema: Any, fields: str, payload: bytes
) -> None:
    """A few bytes do not become gigabytes, nor take long if no column has the field."""
    found = derived([framed(payload)], {1: schema_of(schema)}, fields)
    assert rows_of(found) == [(None, rules.TOO_LARGE)]
    assert rows_of(derived([framed(payload)], {1: schema_of(schema)}, "x BIGINT")) == [(None, None)]


def test_many_elements_make_blocks_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that need more memory than one block may have are decoded in several."""
    monkeypatch.setattr(loops, "MEMORY_BYTES", 1 << 16)
    schema = schema_of({"type": "array", "items": ["null", "long"]})
    payload = framed(number(500) + bytes(500) + number(0))
    found = derived([payload] * 30, {1: schema}, "data ARRAY<BIGINT>")
    assert rows_of(found) == [([None] * 500, None)] * 30


# ------------------------------------------------------------------------------ fields

DATE = {"type": "int", "logicalType": "date"}


def logical(kind: str, name: str, **more: int) -> dict[str, Any]:
    """The schema of a logical type."""
    return {"type": kind, "logicalType": name, **more}


DECIMAL = logical("bytes", "decimal", precision=9, scale=2)
ENUM = {"type": "enum", "name": "E", "symbols": ["RED", "GREEN"]}
NANOS = logical("long", "timestamp-nanos")
UUID = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}
FLOAT_TENTH = bytes.fromhex("cdcccc3d")
LONGS = {"type": "array", "items": "long"}


@pytest.mark.parametrize(
    ("kind", "payload", "column", "wanted"),
    [
        ("boolean", b"\x01", "STRING", "true"),
        ("boolean", b"\x02", "BOOLEAN", "a: 2 is not a valid boolean"),
        ("boolean", b"\x01", "BIGINT", "a: true is not a valid BIGINT"),
        ("int", number(-5), "STRING", "-5"),
        ("int", number(2**31), "BIGINT", "a: 2147483648 is not a valid int"),
        ("int", number(300), "TINYINT", "a: 300 is not a valid TINYINT"),
        ("int", number(300), "SMALLINT", 300),
        ("long", number(MIN_LONG), "BIGINT", MIN_LONG),
        ("long", number(2**53 + 1), "DOUBLE", float(2**53)),
        ("long", number(12), "DECIMAL(38,2)", Decimal("12.00")),
        ("long", number(1234), "DECIMAL(5,2)", "a: 1234 is not a valid DECIMAL(5,2)"),
        ("long", number(0), "TIMESTAMP", "a: 0 is not a valid TIMESTAMP"),
        ("float", FLOAT_TENTH, "STRING", "0.1"),
        ("float", FLOAT_TENTH, "DECIMAL(38,3)", Decimal("0.100")),
        ("float", FLOAT_TENTH, "BIGINT", "a: 0.1 is not a valid BIGINT"),
        ("double", b"\x00" * 6 + b"\xf8\x7f", "STRING", "NaN"),
        ("double", b"\x00" * 6 + b"\xf0\xff", "DECIMAL(38,3)", "a: -Infinity is not a valid DEC"),
        ("string", text(b"1.255"), "DECIMAL(38,2)", Decimal("1.26")),
        ("string", text(b"2024-02-29T01:00:00+01:00"), "DATE", dt.date(2024, 2, 29)),
        ("string", text(b"x"), "BINARY", b"x"),
        ("string", text(b"1"), "BIGINT", 'a: "1" is not a valid BIGINT'),
        ("string", text(b"\xed\xa0\x80"), "STRING", "a: 0xeda080 is not valid UTF-8"),
        ("string", text(b"\xff"), "BINARY", "a: 0xff is not valid UTF-8"),
        ("bytes", text(b"\xc3\xa9"), "STRING", "é"),
        ("bytes", text(b"\xff" * 20), "STRING", f"a: 0x{'ff' * 16}… is not valid UTF-8"),
        (ENUM, number(1), "STRING", "GREEN"),
        (ENUM, number(2), "STRING", "a: 2 is not the number of a symbol"),
        (ENUM, number(-1), "STRING", "a: -1 is not the number of a symbol"),
        (UUID, bytes(range(16)), "STRING", "00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (DATE, number(19_000), "DATE", dt.date(2022, 1, 8)),
        (DATE, number(19_000), "STRING", "2022-01-08"),
        (DATE, number(2_932_897), "DATE", "a: 2932897 is not a valid DATE"),
        (NANOS, number(-1), "STRING", "1969-12-31T23:59:59.999999Z"),
        (NANOS, number(-1), "TIMESTAMP", dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC)),
        (NANOS, number(-1), "BIGINT", 'a: "1969-12-31T23:59:59.999999Z" is not a'),
        (
            logical("long", "timestamp-millis"),
            number(2**62),
            "TIMESTAMP",
            "a: 46116860184273879040",
        ),
        (logical("long", "local-timestamp-millis"), number(-2), "BIGINT", -2_000),
        (logical("long", "local-timestamp-millis"), number(MAX_LONG), "BIGINT", "a: 9223372036854"),
        (logical("long", "local-timestamp-nanos"), number(-2_001), "BIGINT", -3),
        (logical("int", "time-millis"), number(5), "DOUBLE", 5_000.0),
        (DECIMAL, text(b"\xff\x85"), "DECIMAL(38,2)", Decimal("-1.23")),
        (DECIMAL, text(b"\xff\x85"), "DECIMAL(38,1)", Decimal("-1.2")),
        (DECIMAL, text(b""), "DECIMAL(38,2)", Decimal("0.00")),
        (DECIMAL, text(b"\x00\x7b"), "STRING", "1.23"),
        (DECIMAL, text(b"\x00\x7b"), "DOUBLE", 1.23),
        (DECIMAL, text(b"\x00\x7b"), "BIGINT", "a: 1.23 is not a valid BIGINT"),
        (DECIMAL, text(b"\x00" * 30 + b"\x7b"), "DECIMAL(38,2)", Decimal("1.23")),
        (
            DECIMAL,
            text((10**38 - 1).to_bytes(16, "big")),
            "DECIMAL(38,2)",
            Decimal("9" * 36 + ".99"),
        ),
        (DECIMAL, text((10**38).to_bytes(16, "big")), "DECIMAL(38,2)", "a: 0x4b3b4ca85a86c47a"),
        (DECIMAL, text((-(10**38)).to_bytes(16, "big", signed=True)), "DECIMAL(38,2)", "a: 0xb4c4"),
        (["int", "long"], number(1) + number(5), "BIGINT", 5),
        (["null", "int", "string"], number(2) + text(b"x"), "STRING", "x"),
        (["int", "string"], number(1) + text(b"x"), "STRUCT<string: STRING>", {"string": "x"}),
        (["int", "string"], number(0) + number(1), "STRUCT<string: STRING>", {"string": None}),
        (
            "string",
            text(b"x"),
            "STRUCT<long: BIGINT, string: STRING>",
            {"long": None, "string": "x"},
        ),
        ("int", number(4), "STRUCT<long: BIGINT, string: STRING>", {"long": 4, "string": None}),
        ("string", text(b"x"), "STRUCT<long: BIGINT>", 'a: "x" is not a STRUCT'),
        (
            {**record(x="long", y="long"), "name": "Q"},
            number(1) * 2,
            "STRUCT<y: BIGINT, z: BIGINT>",
            {"y": 1, "z": None},
        ),
        (
            {**record(x="long"), "name": "Q"},
            number(1),
            "STRUCT<Q: STRUCT<x: BIGINT>, s: BIGINT>",
            {"Q": {"x": 1}, "s": None},
        ),
        ({**record(x="long"), "name": "Q"}, number(1), "BIGINT", "a: {…} is not a valid BIGINT"),
        (LONGS, number(1) * 2 + b"\0", "ARRAY<STRING>", ["1"]),
        (LONGS, number(1) * 2 + b"\0", "MAP<STRING, STRING>", "a: […] is not a MAP"),
        (
            {"type": "array", "items": "string"},
            number(2) + text(b"") + text(b"\xff") + b"\0",
            "ARRAY<STRING>",
            "a.1: 0xff is not valid UTF-8",
        ),
        (
            {"type": "map", "values": "int"},
            number(3) + text(b"a") + number(1) + text(b"b") + number(2) + text(b"a") + b"\x06\x00",
            "MAP<STRING, BIGINT>",
            [("a", 3), ("b", 2)],
        ),
        (
            {"type": "map", "values": "int"},
            number(1) + text(b"\xff") + number(1) + b"\x00",
            "MAP<STRING, BIGINT>",
            "a: 0xff is not valid UTF-8",
        ),
    ],
)
def test_conversions(kind: Any, payload: bytes, column: str, wanted: Any) -> None:
    """A value fits the columns of `conversions`; a misfit does not affect the other fields."""
    schema = schema_of(record(before="long", a=kind, after="string"))
    value = framed(number(1) + payload + text(b"z"))
    fields = f"before BIGINT, a {column}, after STRING"
    ((before, a, after, error),) = rows_of(derived([value], {1: schema}, fields))
    assert (before, after) == (1, "z")
    if error is None:
        assert (a, type(a)) == (wanted, type(wanted))
    else:
        assert a is None
        assert error.startswith(wanted)
    if not isinstance(kind, list):
        nullable = schema_of(record(before="long", a=["null", kind], after="string"))
        value = framed(number(1) + number(1) + payload + text(b"z"))
        null = framed(number(1) + number(0) + text(b"z"))
        found = rows_of(derived([null, value, null], {1: nullable}, fields))
        assert found == [(1, None, "z", None), (1, a, "z", error), (1, None, "z", None)]


def test_each_column_of_a_path_is_filled() -> None:
    """Those that take the value have it, and the error names the others."""
    schema = schema_of(record(a="string", b="long"))
    columns = ddl.parse("text STRING, when DATE, number BIGINT, b BIGINT")
    value = framed(text(b"2024-01-01") + number(3))
    found = derived([value], {1: schema}, columns, ["a", "a", "a", "b"])
    error = 'number: "2024-01-01" is not a valid BIGINT'
    assert rows_of(found) == [("2024-01-01", dt.date(2024, 1, 1), None, 3, error)]
    assert found.bad_by_reason == {MISFIT: 1}


def test_evolution_by_id() -> None:
    """Each value is decoded by its own schema; a field that it lacks is null, not its default."""
    old = schema_of(record(a="int", gone="string"))
    new = schema_of(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "new", "type": "string", "default": "x"},
                {"name": "a", "type": ["null", "long"]},
            ],
        }
    )
    values = [
        framed(number(1) + text(b"g"), 1),
        framed(text(b"n") + number(1) + number(2**40), 2),
        framed(text(b"n") + number(0), 2),
    ]
    found = derived(values, {1: old, 2: new}, "a BIGINT, gone STRING, new STRING")
    assert rows_of(found) == [
        (1, "g", None, None),
        (2**40, None, "n", None),
        (None, None, "n", None),
    ]


def test_a_schema_that_is_not_a_record_fills_one_column() -> None:
    """`data` has its value."""
    schema = schema_of(["null", "string"])
    (field,) = fields_of(schema).fields
    assert field == pa.field("data", pa.string())
    values = [framed(number(0)), framed(number(1) + text(b"x"))]
    assert rows_of(derived(values, {1: schema}, [field])) == [(None, None), ("x", None)]


def test_errors_name_the_first_columns() -> None:
    """A hundred misfits fill the error without exceeding its size."""
    names = [f"f{place}" for place in range(100)]
    schema = schema_of(record(**dict.fromkeys(names, "string")))
    value = framed(text(b"x" * 300) * 100)
    found = derived([value], {1: schema}, ", ".join(f"{name} BIGINT" for name in names))
    (error,) = found.error.to_pylist()
    assert error.startswith('f0: "xxx')
    assert len(error) == ERROR_CHARACTERS


# ------------------------------------------------------------------------------ loading


def test_sizes_of_one_block_do_not_bind_the_next() -> None:
    """Buffers that were empty, or very large, are as large as the next values need."""
    schema = schema_of(record(s=["null", "string"], l={"type": "array", "items": "string"}))
    deriver = AvroDeriver(fields_of(schema).fields, paths=["s", "l"])
    nothing: tuple[bytes, Any] = framed(number(0) + number(0)), (None, [], None)
    short = (
        framed(number(1) + text(b"ab") + number(1) + text(b"c") + number(0)),
        ("ab", ["c"], None),
    )
    many = framed(number(0) + number(900) + text(b"x" * 9) * 900 + number(0))
    longs = many, (None, ["x" * 9] * 900, None)
    for value, row in (nothing, short, nothing, longs, short, longs):
        assert rows_of(deriver.derive(pa.array([value] * 100), {1: schema})) == [row] * 100


def test_derivers_and_schemas_can_be_pickled() -> None:
    """A publishing process gets both, and derives the same."""
    schema = schema_of(LISTED)
    deriver = AvroDeriver(fields_of(schema).fields, paths=["n", "l", "u"])
    copied: AvroDeriver = pickle.loads(pickle.dumps(deriver))
    known = pickle.loads(pickle.dumps({1: schema}))
    assert known == {1: schema}
    values = pa.array([framed(GOOD)])
    assert rows_of(copied.derive(values, known)) == rows_of(deriver.derive(values, known))


def test_more_schemas_than_are_kept() -> None:
    """The programs of schemas that are no longer used are dropped."""
    schemas = {
        number: schema_of(record(a="long", **{f"f{number}": "long"})) for number in range(200)
    }
    deriver = AvroDeriver(ddl.parse("a BIGINT, f7 BIGINT"), paths=["a", "f7"])
    for start in range(0, 200, 50):
        values = [framed(number(each) * 2, each) for each in range(start, start + 50)]
        found = rows_of(deriver.derive(pa.array(values), schemas))
        assert found == [(n, 7 if n == 7 else None, None) for n in range(start, start + 50)]
    assert len(deriver._loop._program.starts) <= loops._KEPT_SCHEMAS


def test_a_schema_that_is_too_large_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are decoded by the rules, others in the same block by the loop."""
    monkeypatch.setattr("sparklog.formats.values.avro.program.MAX_INSTRUCTIONS", 10)
    large = schema_of(record(**{f"f{place}": "long" for place in range(20)}))
    schemas = {1: schema_of(record(f3="long")), 2: large}
    values = [framed(number(1)), framed(number(2) * 20, 2), framed(number(3))]
    assert rows_of(derived(values, schemas, "f3 BIGINT")) == [(1, None), (2, None), (3, None)]


def test_loops_are_compiled_for_all_that_comes() -> None:
    """No type of array is met later that they were not compiled for before."""
    assert loops._State.kernel is not None
    before = loops._State.kernel.decode.signatures
    schema = schema_of(LISTED)
    writable = pa.Array.from_buffers(
        pa.binary(),
        1,
        [None, pa.py_buffer(bytearray(bytes(4) + b"\x0c\0\0\0")), pa.py_buffer(bytearray(20))],
    )
    for values in (pa.array([framed(GOOD)] * 9)[3:7], writable, pa.array([], pa.binary())):
        AvroDeriver(fields_of(schema).fields, paths=["n", "l", "u"]).derive(values, {1: schema})
    assert loops._State.kernel.decode.signatures == before


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import pyarrow as pa
from sparklog.formats.values.avro import derive, loops, schema
deriver = derive.AvroDeriver([pa.field("data", pa.int64())], paths=["data"])
values = pa.array([bytes(5) + b"\\x02"] * loops.MIN_ROWS)
print(set(deriver.derive(values, {0: schema.parse('"long"')}).columns[0].to_pylist()), loops.load())
"""


def test_values_are_derived_without_numba() -> None:
    """It is an optional dependency."""
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout == "{1} None\n"
    )


@pytest.mark.soak(mode="limits")
def test_loop_stays_within_its_arrays(tmp_path: Path) -> None:
    """Thousands of damaged values do not make it read or write outside of an array."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", "-m", "hypothesis", __file__]
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "SPARKLOG_EXAMPLES": "20",
    }
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stdout
