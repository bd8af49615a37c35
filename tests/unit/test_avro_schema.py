"""`sparklog.formats.values.avro.schema`: writer schemas, and the columns for them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from sparklog.formats.values import ddl
from sparklog.formats.values.avro.nodes import MAX_DEPTH, MAX_NODES
from sparklog.formats.values.avro.schema import InvalidSchema, fields_of, parse


def columns(parsed: Any) -> tuple[str, dict[str, str]]:
    """The columns as DDL, and the parts that are left out."""
    fields, left_out = fields_of(parse(json.dumps(parsed)))
    text = ddl.of_fields(fields)
    assert not fields or ddl.parse(text) == fields
    assert len(dict(left_out)) == len(left_out)
    return text, dict(left_out)


def record(name: str = "R", **fields: Any) -> dict[str, Any]:
    """A record's schema."""
    named = [{"name": field, "type": kind} for field, kind in fields.items()]
    return {"type": "record", "name": name, "fields": named}


def logical(kind: str, name: str, /, **more: Any) -> dict[str, Any]:
    """The schema of a logical type."""
    return {"type": kind, "logicalType": name, **more}


ENUM = {"type": "enum", "name": "E", "symbols": ["A"]}


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        *[("boolean", "BOOLEAN"), ("int", "BIGINT"), ("long", "BIGINT"), ("float", "DOUBLE")],
        *[("double", "DOUBLE"), ("bytes", "BINARY"), ("string", "STRING"), (ENUM, "STRING")],
        ({"type": "fixed", "name": "F", "size": 3}, "BINARY"),
        ({"type": {"type": "long"}}, "BIGINT"),
        (logical("bytes", "decimal", precision=9, scale=2), "DECIMAL(38,2)"),
        (logical("bytes", "decimal", precision=60), "DECIMAL(38,0)"),
        # Logical types that are not valid, or unknown, are ignored.
        (logical("bytes", "decimal", precision=60, scale=39), "BINARY"),
        (logical("bytes", "decimal", precision=2, scale=3), "BINARY"),
        (logical("bytes", "decimal"), "BINARY"),
        (logical("string", "date"), "STRING"),
        (logical("fixed", "duration", name="F", size=12), "BINARY"),
        (logical("fixed", "uuid", name="F", size=15), "BINARY"),
        (logical("fixed", "uuid", name="F", size=16), "STRING"),
        (logical("string", "uuid"), "STRING"),
        (logical("int", "date"), "DATE"),
        (logical("int", "time-millis"), "BIGINT"),
        (logical("long", "time-micros"), "BIGINT"),
        *[
            (logical("long", f"timestamp-{unit}s"), "TIMESTAMP")
            for unit in ("milli", "micro", "nano")
        ],
        *[(logical("long", f"local-timestamp-{unit}s"), "BIGINT") for unit in ("milli", "nano")],
        ({"type": "array", "items": ["null", "int"]}, "ARRAY<BIGINT>"),
        ({"type": "map", "values": record("Q", x="int")}, "MAP<STRING, STRUCT<x: BIGINT>>"),
        (["null", "string"], "STRING"),
        (["string"], "STRING"),
        (["int", "long", "null"], "BIGINT"),
        (["float", "double"], "DOUBLE"),
        (
            ["int", logical("long", "timestamp-millis")],
            "STRUCT<int: BIGINT, long: TIMESTAMP>",
        ),
        (["int", "null", "double"], "STRUCT<long: BIGINT, double: DOUBLE>"),
        (["int", "long", "string"], "STRUCT<long: BIGINT, string: STRING>"),
        (
            [logical("int", "date"), "long", ENUM, {"type": "array", "items": "int"}],
            "STRUCT<int: DATE, long: BIGINT, E: STRING, array: ARRAY<BIGINT>>",
        ),
        (
            [record("a.Q", x="int"), record("b.Q", y="int"), {**ENUM, "name": "c.q"}],
            "STRUCT<Q: STRUCT<x: BIGINT>, b_Q: STRUCT<y: BIGINT>, c_q: STRING>",
        ),
    ],
)
def test_types(kind: Any, column: str) -> None:
    """Each Avro type has one column type, in a record and as a whole value."""
    assert columns(record(a=kind)) == (f"a {column}", {})
    assert columns(kind) == (f"data {column}", {})


def test_names_are_resolved_in_their_namespace() -> None:
    """A name without dots is in the namespace of the type around it, or of the whole schema."""
    inner = {"type": "enum", "name": "E", "namespace": "other", "symbols": ["A"]}
    schema = record("shop.R", a=record("Q", x=inner, y="other.E"), b="Q", c="shop.Q", d="other.E")
    struct = "STRUCT<x: STRING, y: STRING>"
    assert columns(schema) == (f"a {struct}, b {struct}, c {struct}, d STRING", {})


def test_parts_that_are_left_out() -> None:
    """Each is named, with its reason; the fields next to it stay."""
    node = record("Node", value="int", next=["null", "Node"])
    schema = record(
        a="int",
        A="int",
        nothing="null",
        nothings={"type": "array", "items": "null"},
        empty=record("Empty"),
        list=["null", node],
        tree={"type": "map", "values": record("Tree", children={"type": "array", "items": "Tree"})},
        again=["null", "R"],
    )
    schema["fields"].append({"name": "x y", "type": "int"})
    text, left_out = columns(schema)
    assert text == "a BIGINT, list STRUCT<value: BIGINT>"
    assert left_out == {
        "A": "another name differs from it in case only",
        "nothing": "it is always null",
        "nothings[]": "it is always null",
        "empty": "it has no field with a column",
        "list.next": "the type Node contains itself",
        "tree{}.children[]": "the type Tree contains itself",
        "tree{}": "it has no field with a column",
        "again": "the type R contains itself",
        "x y": "Delta does not accept the name 'x y'",
    }


def test_more_leaves_or_levels_than_a_table_has() -> None:
    """A column with too many leaves is left out, and one that fits follows it."""
    wide = record("Wide", **{f"f{number}": "int" for number in range(400)})
    deep: Any = "int"
    for _ in range(16):
        deep = {"type": "array", "items": deep}
    text, left_out = columns(record(first=wide, second="Wide", deep=deep, last="string"))
    assert text.startswith("first STRUCT<f0: BIGINT")
    assert text.endswith("f399: BIGINT>, last STRING")
    assert left_out == {
        "second": f"there are more than {ddl.MAX_LEAVES} columns and nested fields",
        "deep" + "[]" * 16: f"types are nested deeper than {ddl.MAX_DEPTH} levels",
    }


def test_types_that_are_used_exponentially_often() -> None:
    """A few bytes of schema do not take long, whether or not their types have leaves."""
    for leaf in ("int", "null"):
        kind: Any = leaf
        for level in range(14):
            first = {"name": "f0", "type": kind}
            name = kind["name"] if isinstance(kind, dict) else kind
            more = [{"name": f"f{number}", "type": name} for number in range(1, 20)]
            kind = {"type": "record", "name": f"L{level}", "fields": [first, *more]}
        text, left_out = columns(record(bomb=kind, a="int"))
        assert text == ("a BIGINT" if leaf == "int" else "")
        assert "more than" in left_out["bomb"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ('"\ud800"', "not valid Unicode"),
        ("5", "5 is not a type"),
        ('"strin"', "the type 'strin' is not defined"),
        ("{}", "an object without a type"),
        ('{"type": "array"}', "an array needs items"),
        ('{"type": "map"}', "a map needs values"),
        ('{"type": "enum", "name": "E"}', "an enum needs a list of symbols"),
        ('{"type": "enum", "symbols": []}', "the enum has no name"),
        ('{"type": "fixed", "name": "F", "size": -1}', "a fixed needs a size"),
        ('{"type": "fixed", "name": "F", "size": true}', "a fixed needs a size"),
        ('{"type": "record", "name": "R"}', "a record needs a list of fields"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a"}]}', "a field of 'R'"),
        (json.dumps(record(a=["null", ["int"]])), "a: a union is directly inside a union"),
        (json.dumps(record(a=ENUM, b=ENUM)), "b: the type 'E' is defined twice"),
        (json.dumps(record(a=record("Q", b="X"))), "a: b: the type 'X' is not defined"),
        (
            json.dumps(
                {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}] * 2}
            ),
            "'R' has two fields 'a'",
        ),
        (json.dumps([f"{'x' * 2_000_000}"]), "larger than 1 MiB"),
        ("[" * 500_000, "nested deeper than 128 levels"),
        ('{"type":' * (MAX_DEPTH + 1) + '"int"' + "}" * (MAX_DEPTH + 1), "nested deeper than 64"),
        (json.dumps(["int"] * (MAX_NODES + 1)), f"more than {MAX_NODES} types"),
    ],
)
def test_texts_that_are_not_schemas(text: str, reason: str) -> None:
    """The message names the fault and its place."""
    with pytest.raises(InvalidSchema) as error:
        parse(text)
    assert reason in str(error.value)
    assert len(str(error.value)) < 500


def test_schemas_are_values() -> None:
    """Those with the same text are equal, also after pickling."""
    text = json.dumps(record(a=["null", "R"]))
    schema = parse(text)
    assert {schema, parse(text), pickle.loads(pickle.dumps(schema))} == {schema}
    assert schema != parse('"int"')
