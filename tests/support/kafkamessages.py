"""Messages of Kafka's protocol, of any kind and version, with arbitrary values."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import random
import types
import uuid
from typing import Any, Final, Union, get_args, get_origin

NUMBERS: Final = {"i8": 7, "i16": 15, "i32": 31, "i64": 63, "u8": 7, "u16": 15, "u32": 31}


def message(schema: Any, at: random.Random, depth: int = 0) -> Any:
    """Returns an entity of that schema with arbitrary values."""
    fields = {field.name: value(field.type, at, depth + 1) for field in dataclasses.fields(schema)}
    return schema(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Fixed values for the fields of a message, one for each type."""

    number: int = 0
    """For numbers, and for durations in milliseconds."""
    text: str = ""
    items: int = 0
    """The number of items of each array."""
    nulls: bool = False
    """True for null wherever that is allowed."""

    def message(self, schema: Any) -> Any:
        """Returns an entity of that schema."""
        return schema(**{each.name: self._value(each.type) for each in dataclasses.fields(schema)})

    def _value(self, kind: Any) -> Any:
        name = getattr(kind, "__name__", "")
        if get_origin(kind) in (Union, types.UnionType):
            options = get_args(kind)
            if type(None) in options and self.nulls:
                return None
            return self._value(next(each for each in options if each is not type(None)))
        if get_origin(kind) is tuple:
            return (self._value(get_args(kind)[0]),) * self.items
        if hasattr(kind, "__api_key__"):
            return self.message(kind)
        if kind is uuid.UUID:
            return uuid.UUID(int=self.number)
        if kind is bytes or name == "Records":
            return b""
        if "Timedelta" in name:
            return kind(dt.timedelta(milliseconds=self.number))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return next(iter(kind))
        if name == "f64":
            return kind(float(self.number))
        return kind(self.text if isinstance(kind, type) and issubclass(kind, str) else self.number)


def value(kind: Any, at: random.Random, depth: int) -> Any:
    """Returns an arbitrary value of a field's type."""
    if get_origin(kind) in (Union, types.UnionType):
        options = get_args(kind)
        if type(None) in options and at.random() < 0.3:
            return None
        return value(next(each for each in options if each is not type(None)), at, depth)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(
            value(inner, at, depth) for _ in range(at.choice([0, 1, 1, 2]) if depth < 5 else 0)
        )
    if hasattr(kind, "__api_key__"):
        return message(kind, at, depth)
    return scalar(kind, at)


def scalar(kind: Any, at: random.Random) -> Any:
    """Returns an arbitrary value of a type without nested parts."""
    if kind is bool:
        return at.random() < 0.5
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return at.choice(list(kind))
    if kind is uuid.UUID:
        return uuid.UUID(int=at.getrandbits(128))
    if kind is bytes or getattr(kind, "__name__", "") == "Records":
        return at.randbytes(at.choice([0, 1, 30]))
    name = getattr(kind, "__name__", str(kind))
    if "Timedelta" in name:
        return kind(dt.timedelta(milliseconds=at.randrange(1_000)))
    if "Datetime" in name or "DateTime" in name:
        return kind(dt.datetime(2024, 1, 1, tzinfo=dt.UTC))
    if name in NUMBERS:
        return kind(at.choice([0, 1, at.getrandbits(NUMBERS[name])]))
    if name == "f64":
        return kind(at.random())
    if isinstance(kind, type) and issubclass(kind, int):
        return kind(at.getrandbits(15))
    return kind("".join(at.choices("abc-_é", k=at.choice([0, 1, 8]))))
