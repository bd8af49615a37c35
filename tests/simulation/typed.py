"""Values of typed topics, and a model of the columns that follow from them.

A value says in its field `at`, or as the whole of it, what `history.Value` says. Its shape depends
on that alone: objects with more and fewer fields, with fields of two types, other JSON, no JSON,
and tombstones, whose key says it.

The model knows no more types than the topics have, and shares no code with the product.
"""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tests.simulation.history import Value

FOUND: Final = "the columns that the broker finds"
SCHEMAS: Final = (
    "at STRING, n BIGINT",
    "n BIGINT, amount DOUBLE",
    "at STRING, amount STRING, city STRING",
    "n STRING, flag BOOLEAN, timestamp BIGINT",
    "n BIGINT, items ARRAY<BIGINT>",
)
"""Schemas that topics have and get. Two of them differ in the type of a field."""
_RATE: Final = 0.3
_SHAPES: Final = 8
_DELTA_TYPES: Final[dict[str, Any]] = {
    "STRING": "string",
    "BIGINT": "long",
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "ARRAY<BIGINT>": {"type": "array", "elementType": "long", "containsNull": True},
}


def draw(chance: random.Random, count: int) -> tuple[str, ...]:
    """Returns the schema of each of so many topics; (): none of them is typed, as in most runs."""
    if chance.random() > _RATE:
        return ()
    kinds = ["", FOUND, *SCHEMAS]
    return tuple(chance.choice(kinds) for _ in range(count))


def encode(value: Value) -> bytes | None:
    """Returns the bytes of a value; None: it is a tombstone."""
    at = value.encode()
    number = zlib.crc32(at)
    fields: dict[str, Any] = {"at": at.decode(), "n": number}
    match number // 7 % _SHAPES:
        case 0:
            fields |= {"amount": number / 4}
        case 1:
            fields |= {"amount": 2, "city": "Bern", "flag": True}
        case 2:
            fields |= {"n": "n/a", "amount": 0.5}
        case 3:
            fields |= {"amount": None, "flag": "x", "timestamp": number}
        case 4:
            fields |= {"items": [1, number], "timestamp": 1.5}
        case 5:
            return json.dumps(at.decode()).encode()
        case 6:
            return at
        case _:
            return None
    return json.dumps(fields, separators=(",", ":")).encode()


class Column(NamedTuple):
    """A typed column, as the table's property has it."""

    name: str
    field: str
    type: str
    filled: tuple[int, ...]

    @property
    def delta_type(self) -> Any:
        return _DELTA_TYPES[self.type]

    def is_filled_at(self, generation: int) -> bool:
        """Returns whether the files of a generation have its values."""
        begun = [each for each in self.filled if each <= generation]
        return len(begun) % 2 == 1


def fields_of(schema: str) -> set[str]:
    """Returns the fields that a schema names."""
    return {each.split()[0].strip("`") for each in schema.replace("ARRAY<", "").split(", ") if each}


def cells(value: bytes | None, columns: Sequence[Column]) -> tuple[list[Any], bool]:
    """Returns the cells of a value, and whether it fits all of the columns."""
    if value is None:
        return [None] * len(columns), True
    fields = _fields(value)
    if fields is None:
        return [None] * len(columns), False
    found = [_cell(fields.get(each.field), each.type) for each in columns]
    fits = all(
        cell is not None or fields.get(each.field) is None
        for cell, each in zip(found, columns, strict=True)
    )
    return found, fits


@functools.lru_cache(maxsize=4_096)
def _fields(value: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _cell(value: Any, kind: str) -> Any:
    """Returns what a column has of a field's value: None also if it does not fit."""
    if value is None:
        return None
    if kind == "STRING":
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if kind == "BOOLEAN":
        return value if isinstance(value, bool) else None
    if kind == "ARRAY<BIGINT>":
        return value if isinstance(value, list) else None
    if isinstance(value, bool | str | list):
        return None
    if kind == "DOUBLE":
        return float(value)
    return value if isinstance(value, int) else None
