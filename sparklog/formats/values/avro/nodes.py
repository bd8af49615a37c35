"""The types of an Avro schema, as a graph that its JSON text is parsed to.

Rules:

- A named type (record, enum, fixed) is one node, wherever the text refers to it, so the graph may
  have cycles.
- What a writer's schema does not need is ignored: defaults, aliases, docs, the order of sorting.
- A logical type that is unknown, or not valid for its type, is ignored, as Avro's specification
  says. So is a decimal with more than 38 digits after the point, which no DECIMAL has.
- Names are not checked: the schema was accepted by a registry, and what a table cannot have as a
  name is left out of the columns.

Source: https://avro.apache.org/docs/1.12.0/specification/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MAX_DEPTH: Final = 64
"""Types inside types, in the text."""
MAX_NODES: Final = 5_000
_MAX_FIXED_BYTES: Final = 2**31 - 1
_MAX_SCALE: Final = 38
_SHOWN_PATH: Final = 200


class Kind(StrEnum):
    """Avro's types, by the name that a schema has for them."""

    NULL = "null"
    BOOLEAN = "boolean"
    INT = "int"
    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    BYTES = "bytes"
    STRING = "string"
    RECORD = "record"
    ENUM = "enum"
    ARRAY = "array"
    MAP = "map"
    FIXED = "fixed"
    UNION = "union"


class Logical(StrEnum):
    """The logical types that have a meaning here."""

    DATE = "date"
    TIME_MILLIS = "time-millis"
    TIME_MICROS = "time-micros"
    TIMESTAMP_MILLIS = "timestamp-millis"
    TIMESTAMP_MICROS = "timestamp-micros"
    TIMESTAMP_NANOS = "timestamp-nanos"
    LOCAL_TIMESTAMP_MILLIS = "local-timestamp-millis"
    LOCAL_TIMESTAMP_MICROS = "local-timestamp-micros"
    LOCAL_TIMESTAMP_NANOS = "local-timestamp-nanos"
    DECIMAL = "decimal"
    UUID = "uuid"


@dataclass(slots=True, eq=False)
class Node:
    """A type. It does not change once the schema is parsed."""

    kind: Kind
    logical: Logical | None = None
    name: str = ""
    """The full name of a record, enum or fixed."""
    fields: tuple[tuple[str, Node], ...] = ()
    """The fields of a record, in the order of its encoding."""
    symbols: tuple[str, ...] = ()
    """The symbols of an enum."""
    branches: tuple[Node, ...] = ()
    """The types of a union."""
    item: Node | None = None
    """The type of an array's elements, or of a map's values."""
    size: int = 0
    """Bytes of a fixed."""
    scale: int = 0
    """Digits of a decimal after the point."""
    is_empty: bool = False
    """True if every value of the type takes no bytes."""

    @property
    def inner(self) -> Node:
        """The type of an array's elements, or of a map's values."""
        assert self.item is not None
        return self.item


class InvalidSchema(ValueError):
    """A text is not an Avro schema that can be used; its message says why."""


_PRIMITIVES: Final = {
    kind.value: kind
    for kind in (
        *(Kind.NULL, Kind.BOOLEAN, Kind.INT, Kind.LONG),
        *(Kind.FLOAT, Kind.DOUBLE, Kind.BYTES, Kind.STRING),
    )
}
_OF_LONGS: Final = (
    *(Logical.TIME_MICROS, Logical.TIMESTAMP_MILLIS, Logical.TIMESTAMP_MICROS),
    *(Logical.TIMESTAMP_NANOS, Logical.LOCAL_TIMESTAMP_MILLIS),
    *(Logical.LOCAL_TIMESTAMP_MICROS, Logical.LOCAL_TIMESTAMP_NANOS),
)
_VALID_LOGICAL: Final = frozenset(
    (
        *((Kind.INT, each) for each in (Logical.DATE, Logical.TIME_MILLIS)),
        *((Kind.LONG, each) for each in _OF_LONGS),
        *((Kind.BYTES, Logical.DECIMAL), (Kind.FIXED, Logical.DECIMAL)),
        *((Kind.STRING, Logical.UUID), (Kind.FIXED, Logical.UUID)),
    )
)
_LOGICAL: Final = {each.value: each for each in Logical}
_UUID_BYTES: Final = 16


def graph_of(parsed: Any) -> Node:
    """Returns the type of a schema's parsed JSON. Raises `InvalidSchema`."""
    return _Graph().node(parsed, "", 1)


class _Graph:
    def __init__(self) -> None:
        self._named: dict[str, Node] = {}
        self._nodes = 0

    def node(self, parsed: Any, namespace: str, depth: int) -> Node:
        """Returns the type; `namespace`: of the type that surrounds it."""
        if depth > MAX_DEPTH:
            raise InvalidSchema(f"types are nested deeper than {MAX_DEPTH} levels")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise InvalidSchema(f"there are more than {MAX_NODES} types")
        if isinstance(parsed, str):
            return self._referred(parsed, namespace)
        if isinstance(parsed, list):
            branches = tuple(self.node(each, namespace, depth + 1) for each in parsed)
            if any(each.kind is Kind.UNION for each in branches):
                raise InvalidSchema("a union is directly inside a union")
            return Node(Kind.UNION, branches=branches)
        if isinstance(parsed, dict):
            return self._defined(parsed, namespace, depth)
        raise InvalidSchema(f"{_shown(parsed)} is not a type")

    def _referred(self, name: str, namespace: str) -> Node:
        if name in _PRIMITIVES:
            return Node(_PRIMITIVES[name], is_empty=name == Kind.NULL)
        found = self._named.get(_full_name(name, namespace)) or self._named.get(name)
        if found is None:
            raise InvalidSchema(
                f"the type {_shown(name)} is not defined before it is used; references to other"
                " subjects are not followed"
            )
        return found

    def _defined(self, parsed: Mapping[str, Any], namespace: str, depth: int) -> Node:
        kind = parsed.get("type")
        if not isinstance(kind, str):
            if kind is None:
                raise InvalidSchema("an object without a type")
            return self.node(kind, namespace, depth + 1)
        if kind in ("record", "error"):
            return self._record(parsed, namespace, depth)
        if kind == "enum":
            symbols = parsed.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
                raise InvalidSchema("an enum needs a list of symbols")
            return self._add(parsed, namespace, Node(Kind.ENUM, symbols=tuple(symbols)))
        if kind == "fixed":
            size = parsed.get("size")
            if type(size) is not int or not 0 <= size <= _MAX_FIXED_BYTES:
                raise InvalidSchema("a fixed needs a size in bytes")
            fixed = Node(Kind.FIXED, size=size, is_empty=size == 0)
            return self._add(parsed, namespace, _with_logical(fixed, parsed))
        if kind in ("array", "map"):
            attribute = "items" if kind == "array" else "values"
            if attribute not in parsed:
                raise InvalidSchema(f"an {kind} needs {attribute}".replace("an map", "a map"))
            return Node(Kind(kind), item=self.node(parsed[attribute], namespace, depth + 1))
        if kind in _PRIMITIVES:
            return _with_logical(self._referred(kind, namespace), parsed)
        return self._referred(kind, namespace)

    def _record(self, parsed: Mapping[str, Any], namespace: str, depth: int) -> Node:
        given = parsed.get("fields")
        if not isinstance(given, list):
            raise InvalidSchema("a record needs a list of fields")
        record = self._add(parsed, namespace, Node(Kind.RECORD))
        inside = record.name.rpartition(".")[0]
        fields: dict[str, Node] = {}
        for each in given:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or "type" not in each:
                raise InvalidSchema(f"a field of {_shown(record.name)} has no name or no type")
            if name in fields:
                raise InvalidSchema(f"{_shown(record.name)} has two fields {_shown(name)}")
            try:
                fields[name] = self.node(each["type"], inside, depth + 1)
            except InvalidSchema as error:
                raise _inside(name, error) from None
        record.fields = tuple(fields.items())
        # A record that contains itself is not: its own flag is not set yet.
        record.is_empty = all(each.is_empty for each in fields.values())
        return record

    def _add(self, parsed: Mapping[str, Any], namespace: str, node: Node) -> Node:
        name, own = parsed.get("name"), parsed.get("namespace")
        if not isinstance(name, str) or not name:
            raise InvalidSchema(f"the {node.kind} has no name")
        node.name = _full_name(name, own if isinstance(own, str) else namespace)
        if node.name in self._named:
            raise InvalidSchema(f"the type {_shown(node.name)} is defined twice")
        self._named[node.name] = node
        return node


def _with_logical(node: Node, parsed: Mapping[str, Any]) -> Node:
    given = parsed.get("logicalType")
    logical = _LOGICAL.get(given) if isinstance(given, str) else None
    if logical is None or (node.kind, logical) not in _VALID_LOGICAL:
        return node
    if logical is Logical.UUID and node.kind is Kind.FIXED and node.size != _UUID_BYTES:
        return node
    if logical is Logical.DECIMAL:
        precision, scale = parsed.get("precision"), parsed.get("scale", 0)
        if type(precision) is not int or type(scale) is not int:
            return node
        if not 0 <= scale <= min(precision, _MAX_SCALE) or precision < 1:
            return node
        node.scale = scale
    node.logical = logical
    return node


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _inside(field: str, error: InvalidSchema) -> InvalidSchema:
    """Returns the error with the field before it, unless enough fields are."""
    text = str(error)
    return error if len(text) > _SHOWN_PATH else InvalidSchema(f"{field[:40]}: {text}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


# ------------------------------------------------------------------------------ questions


def is_plain(union: Node) -> bool:
    """Returns whether the union is a nullable type, or whole numbers only, or floating ones only.

    Its column has the type of its branches. That of another union is a STRUCT.
    """
    kinds = {(each.kind, each.logical) for each in union.branches} - {(Kind.NULL, None)}
    numbers = (Kind.INT, None), (Kind.LONG, None)
    floats = (Kind.FLOAT, None), (Kind.DOUBLE, None)
    not_null = [each for each in union.branches if each.kind is not Kind.NULL]
    return len(not_null) <= 1 or kinds == {*numbers} or kinds == {*floats}


def member_names(branches: tuple[Node, ...]) -> list[str]:
    """Returns the name of each branch's field in the STRUCT of a union.

    It is the name of the branch's type, without its namespace. `int` counts as `long`, and `float`
    as `double`, so that a writer may widen them; not if either of the whole numbers is a time. Of
    names that differ in case at most, the first branch has the short one, the others have their
    namespace before it.
    """
    names: list[str] = []
    taken: set[str] = set()
    has_time = any(each.kind is Kind.LONG and each.logical is not None for each in branches)
    for each in branches:
        name = each.name.rpartition(".")[2] or each.kind.value
        if each.kind is Kind.INT and each.logical is None and not has_time:
            name = Kind.LONG.value
        elif each.kind is Kind.FLOAT:
            name = Kind.DOUBLE.value
        if each.name and name.lower() in taken:
            name = each.name.replace(".", "_")
        taken.add(name.lower())
        names.append(name)
    return names
