"""Rules for configurations of `key=value`, with Kafka's types and edits."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from sparklog import errors

_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")


class ConfigType(enum.Enum):
    """The type of a value, in the terms of Kafka's `ConfigDef`."""

    BOOLEAN = "boolean"
    STRING = "string"
    INT = "int"
    SHORT = "short"
    LONG = "long"
    DOUBLE = "double"
    LIST = "list"
    PASSWORD = "password"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The values that a key accepts."""

    kind: ConfigType
    expected: str
    """The accepted values in words, for an error."""
    read: Callable[[str], str | None]
    """Returns the normalised value, or None if it is invalid."""


class Key(Protocol):
    """One key of a configuration."""

    @property
    def default(self) -> str: ...

    @property
    def rule(self) -> Rule: ...


# ------------------------------------------------------------------------------ rules


def _integer(kind: ConfigType, low: int, high: int, *, also: int | None = None) -> Rule:
    def read(value: str) -> str | None:
        if _INTEGER.fullmatch(value) is None:
            return None
        number = int(value)
        return str(number) if low <= number <= high or number == also else None

    expected = f"an integer from {low} to {high}" + (f", or {also}" if also is not None else "")
    return Rule(kind=kind, expected=expected, read=read)


def int_rule(low: int = 0, high: int = _INT_MAX, *, also: int | None = None) -> Rule:
    """Returns the rule of a key that accepts a range of integers, and `also` one outside it."""
    return _integer(ConfigType.INT, low, high, also=also)


def long_rule(low: int = 0) -> Rule:
    """Returns the rule of a key that accepts 64-bit integers from `low` on."""
    return _integer(ConfigType.LONG, low, _LONG_MAX)


def one_of(*allowed: str) -> Rule:
    """Returns the rule of a key that accepts these strings only."""
    return Rule(
        kind=ConfigType.STRING,
        expected=f"one of {', '.join(allowed)}",
        read=lambda value: value if value in allowed else None,
    )


# ------------------------------------------------------------------------------ edits


class Edit(enum.Enum):
    """A change to one key, in Kafka's terms; the last two change the elements of a list."""

    SET = "set"
    DELETE = "delete"
    APPEND = "append"
    SUBTRACT = "subtract"


def edited(
    what: str,
    keys: Mapping[str, Key],
    config: Mapping[str, str],
    edits: Iterable[tuple[Edit, str, str | None]],
) -> dict[str, str]:
    """Returns `config` after the edits, each (edit, key, value).

    `what` names the configuration in errors. If a list is not set, elements are added to, or
    removed from, its default. Raises `UnknownOption` for a key that does not exist, unless it is
    deleted, and `BadOption` for a missing value, or for elements of a key that is not a list;
    values are not checked otherwise.
    """
    found = dict(config)
    for edit, key, value in edits:
        if edit is Edit.DELETE:
            found.pop(key, None)
            continue
        check_key(what, keys, key)
        if value is None:
            raise errors.BadOption(option=key, value=None, reason="it needs a value")
        found[key] = value if edit is Edit.SET else _list(keys, found, key, edit, value)
    return found


def _list(
    keys: Mapping[str, Key], config: Mapping[str, str], key: str, edit: Edit, value: str
) -> str:
    if keys[key].rule.kind is not ConfigType.LIST:
        reason = f"{edit.value} applies only to keys whose value is a list"
        raise errors.BadOption(option=key, value=value, reason=reason)
    elements = [each for each in config.get(key, keys[key].default).split(",") if each]
    given = [each.strip() for each in value.split(",")]
    if edit is Edit.SUBTRACT:
        return ",".join(each for each in elements if each not in given)
    return ",".join([*elements, *(each for each in given if each not in elements)])


def normalised(what: str, keys: Mapping[str, Key], config: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration with normalised values.

    Raises `UnknownOption` and `BadOption`, which name the key.
    """
    found = {}
    for key, value in config.items():
        check_key(what, keys, key)
        rule = keys[key].rule
        accepted = rule.read(value.strip())
        if accepted is None:
            raise errors.BadOption(option=key, value=value, reason=rule.expected)
        found[key] = accepted
    return found


def check_key(what: str, keys: Mapping[str, Key], key: str) -> None:
    """Raises `UnknownOption`, which suggests the nearest key."""
    if key not in keys:
        raise errors.UnknownOption.among(what, key, keys)
