"""Writer schemas: their text, and the columns that a table gets for them.

| Avro | column |
|---|---|
| boolean | BOOLEAN |
| int, long | BIGINT |
| float, double | DOUBLE |
| bytes, fixed | BINARY |
| string, enum, uuid | STRING |
| decimal | DECIMAL(38, s) |
| date | DATE |
| timestamp-millis, -micros, -nanos | TIMESTAMP |
| local-timestamp-…, time-millis, time-micros | BIGINT, in microseconds |
| array, map, record | ARRAY, MAP with STRING keys, STRUCT |
| a union of one type and null; of int and long; of float and double | the column of that type |
| another union | a STRUCT with a field for each branch (`nodes.member_names`) |

There is one type for all whole numbers, and one for all floating ones, because a later schema may
widen them, and a column keeps its type. A record has a column for each field; a schema that is not
a record has one column, `data`.

Left out are types that contain themselves, types without a value other than null, names that Delta
refuses or that differ from another one in case only, and types with more leaves or levels than
`ddl` allows. A field inside a column is left out alone; with too many leaves, the whole column is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from sparklog.formats.values import ddl
from sparklog.formats.values.avro.nodes import (
    InvalidSchema,
    Kind,
    Logical,
    Node,
    graph_of,
    is_plain,
    member_names,
)
from sparklog.formats.values.checks import MAX_DEPTH as MAX_JSON_DEPTH
from sparklog.formats.values.checks import is_deep
from sparklog.limits import MIB

__all__ = ["AvroSchema", "Fields", "InvalidSchema", "fields_of", "parse"]

MAX_TEXT_BYTES: Final = MIB
WHOLE_VALUE: Final = "data"
"""The column of a schema that is not a record."""
_MAX_VISITS: Final = 20_000
"""Types that `fields_of` visits: a type that is used twice is visited twice."""


class AvroSchema:
    """A writer's schema. Equal to another one with the same text."""

    __slots__ = ("root", "text")

    def __init__(self, text: str, root: Node) -> None:
        self.text = text
        self.root = root

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, AvroSchema) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.text,)

    @property
    def fields(self) -> tuple[tuple[str, Node], ...]:
        """The fields that may fill columns, in the order of their encoding."""
        is_record = self.root.kind is Kind.RECORD
        return self.root.fields if is_record else ((WHOLE_VALUE, self.root),)


class Fields(NamedTuple):
    """The columns for a schema."""

    fields: list[pa.Field]
    """In the schema's order, of types that `ddl` has."""
    left_out: list[tuple[str, str]]
    """The path of each part that is not in a column, and why."""


def parse(text: str) -> AvroSchema:
    """Returns the schema of a JSON text of at most 1 MiB. Raises `InvalidSchema`."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise InvalidSchema("the text is not valid Unicode") from None
    if len(encoded) > MAX_TEXT_BYTES:
        raise InvalidSchema("the text is larger than 1 MiB")
    if is_deep(encoded):
        raise InvalidSchema(f"the text is nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        parsed = msgspec.json.decode(encoded)
    except msgspec.MsgspecError as error:
        raise InvalidSchema(f"the text is not JSON: {error}") from None
    return AvroSchema(text, graph_of(parsed))


def fields_of(schema: AvroSchema) -> Fields:
    """Returns the columns that a table gets for the schema."""
    return _Columns().of(schema)


class _Columns:
    """Finds the columns of one schema."""

    def __init__(self) -> None:
        self._left_out: list[tuple[str, str]] = []
        self._leaves = 0
        self._visits = 0
        self._open: set[Node] = set()
        """The records around the current type."""

    def of(self, schema: AvroSchema) -> Fields:
        """Returns the columns."""
        found: list[pa.Field] = []
        names: set[str] = set()
        around = {schema.root} if schema.root.kind is Kind.RECORD else set()
        for name, node in schema.fields:
            self._open = set(around)
            leaves, left_out = self._leaves, len(self._left_out)
            try:
                self._add(found, names, name, name, node, 1)
            except _TooLarge as error:
                self._leaves = leaves
                del self._left_out[left_out:]
                self._left_out.append((name, str(error)))
        return Fields(found, self._left_out)

    def _add(
        self, fields: list[pa.Field], names: set[str], name: str, path: str, node: Node, depth: int
    ) -> None:
        """Appends the field of a record or union, unless it is left out."""
        if not ddl.is_usable(name):
            self._left_out.append((path, f"Delta does not accept the name {name!r}"))
        elif name.lower() in names:
            self._left_out.append((path, "another name differs from it in case only"))
        elif (kind := self._type(node, path, depth)) is not None:
            names.add(name.lower())
            fields.append(pa.field(name, kind))

    def _type(self, node: Node, path: str, depth: int) -> pa.DataType | None:
        """Returns the type of the column; None if it is left out."""
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise _TooLarge(f"the schema has more than {_MAX_VISITS} types")
        if depth > ddl.MAX_DEPTH:
            return self._without(path, f"types are nested deeper than {ddl.MAX_DEPTH} levels")
        if node.kind is Kind.RECORD:
            return self._struct_of_record(node, path, depth)
        if node.kind is Kind.ARRAY:
            element = self._type(node.inner, f"{path}[]", depth + 1)
            return None if element is None else ddl.list_of(element)
        if node.kind is Kind.MAP:
            self._count_leaf()
            item = self._type(node.inner, f"{path}{{}}", depth + 1)
            return None if item is None else pa.map_(pa.string(), item)
        if node.kind is Kind.UNION:
            return self._of_union(node, path, depth)
        if node.kind is Kind.NULL:
            return self._without(path, "it is always null")
        self._count_leaf()
        return leaf_type(node)

    def _struct_of_record(self, node: Node, path: str, depth: int) -> pa.DataType | None:
        if node in self._open:
            return self._without(path, f"the type {node.name} contains itself")
        self._open.add(node)
        fields: list[pa.Field] = []
        names: set[str] = set()
        for name, inner in node.fields:
            self._add(fields, names, name, f"{path}.{name}", inner, depth + 1)
        self._open.remove(node)
        return pa.struct(fields) if fields else self._without(path, "it has no field with a column")

    def _of_union(self, node: Node, path: str, depth: int) -> pa.DataType | None:
        branches = [each for each in node.branches if each.kind is not Kind.NULL]
        if not branches:
            return self._without(path, "it is always null")
        if is_plain(node):
            return self._type(branches[0], path, depth)
        fields: list[pa.Field] = []
        names: set[str] = set()
        known: set[str] = set()
        for branch, name in zip(node.branches, member_names(node.branches), strict=True):
            if branch.kind is not Kind.NULL and name not in known:
                known.add(name)
                self._add(fields, names, name, f"{path}.{name}", branch, depth + 1)
        return pa.struct(fields) if fields else self._without(path, "no branch has a column")

    def _count_leaf(self) -> None:
        self._leaves += 1
        if self._leaves > ddl.MAX_LEAVES:
            raise _TooLarge(f"there are more than {ddl.MAX_LEAVES} columns and nested fields")

    def _without(self, path: str, reason: str) -> pa.DataType | None:
        self._left_out.append((path, reason))
        return None


class _TooLarge(Exception):
    """A column has too many leaves."""


def leaf_type(node: Node) -> pa.DataType:
    """Returns the column's type of a type that contains no other one."""
    if node.logical is Logical.DECIMAL:
        return pa.decimal128(38, node.scale)
    if node.logical in _LOGICAL_TYPES:
        return _LOGICAL_TYPES[node.logical]
    return _TYPES[node.kind]


_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_TYPES: Final = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.INT: pa.int64(),
    Kind.LONG: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.DOUBLE: pa.float64(),
    Kind.BYTES: pa.binary(),
    Kind.FIXED: pa.binary(),
    Kind.STRING: pa.string(),
    Kind.ENUM: pa.string(),
}
_LOGICAL_TYPES: Final = {
    Logical.DATE: pa.date32(),
    Logical.TIMESTAMP_MILLIS: _TIMESTAMP,
    Logical.TIMESTAMP_MICROS: _TIMESTAMP,
    Logical.TIMESTAMP_NANOS: _TIMESTAMP,
    Logical.UUID: pa.string(),
}
