"""Generated Avro schemas with values, and what their columns must have, by fastavro as the oracle.

Unions have at most one branch of each Python type, so that the value that fastavro reads names its
branch.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

import fastavro
from hypothesis import strategies as st

Json = Any
FRAME = struct.Struct(">bI")
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Case(NamedTuple):
    """A record's schema, and values of it."""

    schema: Json
    values: list[Any]

    @property
    def text(self) -> str:
        return json.dumps(self.schema)


def encoded(schema: Json, value: Any, number: int = 1) -> bytes:
    """A framed value, as Confluent's serializers write it."""
    out = io.BytesIO()
    out.write(FRAME.pack(0, number))
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def decoded(schema: Json, value: bytes) -> Any:
    """The value as fastavro reads it."""
    source = io.BytesIO(value)
    source.seek(FRAME.size)
    return fastavro.schemaless_reader(source, fastavro.parse_schema(schema), None)


# ------------------------------------------------------------------------------ generating

_longs = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
_times = st.datetimes(EPOCH.replace(year=1, tzinfo=None), EPOCH.replace(year=9999, tzinfo=None))


def _millis(at: dt.datetime) -> dt.datetime:
    return at.replace(microsecond=at.microsecond // 1_000 * 1_000)


def _decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    top = 10**precision - 1
    exact = Context(prec=precision)
    return st.integers(-top, top).map(lambda unscaled: Decimal(unscaled).scaleb(-scale, exact))


def _logical(kind: str, logical: str, **more: int) -> Json:
    return {"type": kind, "logicalType": logical, **more}


_LEAVES: list[tuple[str, Json, st.SearchStrategy[Any]]] = [
    ("bool", "boolean", st.booleans()),
    ("int", "int", st.integers(-(2**31), 2**31 - 1)),
    ("int", "long", _longs),
    ("float", "float", st.floats(width=32)),
    ("float", "double", st.floats()),
    ("bytes", "bytes", st.binary(max_size=20)),
    ("str", "string", st.text(max_size=20)),
    ("str", _logical("int", "date"), st.dates()),  # fastavro takes strings for dates
    ("time", _logical("int", "time-millis"), _times.map(_millis).map(dt.datetime.time)),
    ("time", _logical("long", "time-micros"), st.times()),
    (
        "time",
        _logical("long", "timestamp-millis"),
        _times.map(_millis).map(lambda at: at.replace(tzinfo=dt.UTC)),
    ),
    (
        "time",
        _logical("long", "timestamp-micros"),
        _times.map(lambda at: at.replace(tzinfo=dt.UTC)),
    ),
    ("time", _logical("long", "local-timestamp-micros"), _times),
    ("decimal", _logical("bytes", "decimal", precision=10, scale=3), _decimals(10, 3)),
    ("decimal", _logical("bytes", "decimal", precision=38), _decimals(38, 0)),
    ("str", _logical("string", "uuid"), st.uuids()),
]


class _Names:
    """Gives each named type of a schema its name."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> str:
        self.count += 1
        return f"N{self.count}"


@st.composite
def _types(draw: st.DrawFn, names: _Names, depth: int) -> tuple[str, Json, st.SearchStrategy[Any]]:
    """A type: the Python type of its values, its schema, and its values."""
    shape = draw(st.integers(0, 9 if depth > 0 else 6))
    if shape <= 4:
        return draw(st.sampled_from(_LEAVES))
    if shape == 5:
        symbols = draw(
            st.lists(
                st.from_regex("[A-Za-z]{1,8}", fullmatch=True), min_size=1, max_size=4, unique=True
            )
        )
        schema: Json = {"type": "enum", "name": names.next(), "symbols": symbols}
        return "str", schema, st.sampled_from(symbols)
    if shape == 6:
        size = draw(st.integers(1, 18))
        schema = {"type": "fixed", "name": names.next(), "size": size}
        return "bytes", schema, st.binary(min_size=size, max_size=size)
    if shape == 7:
        _, inner, values = draw(_fields(names, depth - 1))
        if draw(st.booleans()):
            return "list", {"type": "array", "items": inner}, st.lists(values, max_size=4)
        keys = st.text(max_size=5)
        return "dict", {"type": "map", "values": inner}, st.dictionaries(keys, values, max_size=3)
    if shape == 8:
        schema, values = draw(records(names, depth - 1))
        return "dict", schema, values
    return draw(_fields(names, depth - 1))


@st.composite
def _fields(draw: st.DrawFn, names: _Names, depth: int) -> tuple[str, Json, st.SearchStrategy[Any]]:
    """A type that may be a union."""
    count = draw(st.sampled_from([1, 1, 2, 2, 2, 3, 4]))
    if count == 1 or depth < 0:
        return draw(_types(names, max(depth, 0)).filter(lambda each: each[0] != "union"))
    kinds: dict[str, tuple[Json, st.SearchStrategy[Any]]] = {"null": ("null", st.none())}
    for _ in range(count - 1):
        python, schema, values = draw(_types(names, depth))
        if python != "union":
            kinds.setdefault(python, (schema, values))
    branches = draw(st.permutations(list(kinds.values())))
    if draw(st.booleans()) and len(branches) > 2:
        branches = [each for each in branches if each[0] != "null"]
    if len({_branch_type(each[0]) for each in branches}) < len(branches):
        branches = branches[:1]
    schemas, values = [each[0] for each in branches], st.one_of(*(each[1] for each in branches))
    return "union", schemas, values


def _branch_type(schema: Json) -> str:
    kind = schema if isinstance(schema, str) else schema["type"]
    return schema["name"] if kind in ("record", "enum", "fixed") else kind


@st.composite
def records(draw: st.DrawFn, names: _Names, depth: int) -> tuple[Json, st.SearchStrategy[Any]]:
    """A record's schema and its values."""
    name = names.next()
    fields, values = [], {}
    for number in range(draw(st.integers(1, 5))):
        _, schema, inner = draw(_fields(names, depth))
        fields.append({"name": f"f{number}", "type": schema})
        values[f"f{number}"] = inner
    return {"type": "record", "name": name, "fields": fields}, st.fixed_dictionaries(values)


@st.composite
def cases(draw: st.DrawFn, rows: int = 5) -> Case:
    """A record's schema, and some values."""
    schema, values = draw(records(_Names(), 2))
    return Case(schema, draw(st.lists(values, min_size=1, max_size=rows)))


# ------------------------------------------------------------------------------ what columns have


def expected(schema: Json, value: Any) -> Any:
    """Returns the cell of a column of the schema's own type, for a value that fastavro reads."""
    if isinstance(schema, list):
        return _of_union(schema, value)
    kind = schema if isinstance(schema, str) else schema["type"]
    if value is None or kind == "null":
        return None
    if kind == "record":
        return _of_record(schema, value)
    if kind == "array":
        return [expected(schema["items"], each) for each in value]
    if kind == "map":
        return [(key, expected(schema["values"], each)) for key, each in value.items()]
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, dt.time):
        value = dt.datetime.combine(dt.date(1970, 1, 1), value)
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return (value.replace(tzinfo=dt.UTC) - EPOCH) // dt.timedelta(microseconds=1)
    return value


def _of_record(schema: Json, value: Mapping[str, Any]) -> dict[str, Any] | None:
    found = {
        each["name"]: expected(each["type"], value[each["name"]])
        for each in schema["fields"]
        if has_column(each["type"])
    }
    return found or None


def has_column(schema: Json) -> bool:
    """Returns whether one of these schemas has a column."""
    if isinstance(schema, list):
        return any(has_column(each) for each in schema)
    if isinstance(schema, str):
        return schema != "null"
    if schema["type"] == "record":
        return any(has_column(each["type"]) for each in schema["fields"])
    inner = schema.get("items", schema.get("values"))
    return inner is None or has_column(inner)


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "int": int,
    "long": int,
    "float": float,
    "double": float,
    "bytes": bytes,
    "fixed": bytes,
    "string": str,
    "enum": str,
    "array": list,
    "map": dict,
    "record": dict,
    "date": dt.date,
    "time-millis": dt.time,
    "time-micros": dt.time,
    "timestamp-millis": dt.datetime,
    "timestamp-micros": dt.datetime,
    "local-timestamp-micros": dt.datetime,
    "decimal": Decimal,
    "uuid": uuid.UUID,
}


def _of_union(branches: Sequence[Json], value: Any) -> Any:
    usable = [each for each in branches if each != "null"]
    if value is None:
        return None
    if len(usable) == 1:
        return expected(usable[0], value)
    found = {}
    for each in usable:
        if has_column(each):
            is_this = _is_of(each, value)
            found[_member(each, usable)] = expected(each, value) if is_this else None
    return found or None


def _is_of(schema: Json, value: Any) -> bool:
    kind = schema if isinstance(schema, str) else schema["type"]
    if not isinstance(schema, str):
        kind = schema.get("logicalType", kind)
    is_this = isinstance(value, _PYTHON_TYPES[kind])
    if kind in ("int", "long"):
        return is_this and not isinstance(value, bool)
    return is_this and not (kind == "date" and isinstance(value, dt.datetime))


def _member(schema: Json, branches: Sequence[Json]) -> str:
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind in ("record", "enum", "fixed"):
        return str(schema["name"])
    is_time = any(isinstance(each, dict) and each["type"] == "long" for each in (schema, *branches))
    widened = {"int": "int" if is_time or schema != "int" else "long", "float": "double"}
    return str(widened.get(kind, kind))
