"""What a topic can be told: its configuration keys, under Kafka's names where Kafka has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import errors, limits


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicKey:
    """One key: its default, what it does, and the check that a value must pass."""

    default: str
    about: str
    problem: Callable[[str], str | None]
    """What is wrong with a value, or None."""


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


def _integer(low: int, high: int) -> Callable[[str], str | None]:
    def problem(value: str) -> str | None:
        is_one = _INTEGER.fullmatch(value) is not None and low <= int(value) <= high
        return None if is_one else f"an integer from {low} to {high}"

    return problem


def _share(value: str) -> str | None:
    is_one = _DECIMAL.fullmatch(value) is not None and 0.0 <= float(value) <= 1.0
    return None if is_one else "a number from 0 to 1"


_INTEGER: Final = re.compile(r"[0-9]{1,19}")
_DECIMAL: Final = re.compile(r"[0-9]{1,19}(\.[0-9]{1,19})?")
_MILLISECONDS: Final = _integer(0, limits.MILLISECONDS_MAX)

KEYS: Final[Mapping[str, TopicKey]] = {
    "message.timestamp.type": TopicKey(
        default="CreateTime",
        about="CreateTime: the producer's time; LogAppendTime: the broker's, for every record",
        problem=_one_of("CreateTime", "LogAppendTime"),
    ),
    "cleanup.policy": TopicKey(
        default="delete",
        about="compact: of each key the last record stays; every record needs a key then",
        problem=_one_of("delete", "compact"),
    ),
    "min.cleanable.dirty.ratio": TopicKey(
        default=str(limits.MIN_CLEANABLE_DIRTY_RATIO),
        about="the share of a partition's bytes above which keys are compacted, from 0 to 1",
        problem=_share,
    ),
    "min.compaction.lag.ms": TopicKey(
        default=str(limits.MIN_COMPACTION_LAG_MS),
        about="how long a record stays at least, though there is a later one of its key",
        problem=_MILLISECONDS,
    ),
    "delete.retention.ms": TopicKey(
        default=str(limits.DELETE_RETENTION_MS),
        about="how long a record without a value, which deletes its key, stays at least",
        problem=_MILLISECONDS,
    ),
}


def described() -> list[str]:
    """A line for each key, for those who look for one."""
    return [f"{name} (default {key.default}): {key.about}" for name, key in KEYS.items()]


def check(config: Mapping[str, str]) -> dict[str, str]:
    """The same configuration. Raises `UnknownOption` and `BadOption` by the key's name."""
    for key, value in config.items():
        check_key(key)
        problem = KEYS[key].problem(value)
        if problem is not None:
            raise errors.BadOption(option=key, value=value, reason=problem)
    return dict(config)


def check_key(key: str) -> None:
    """Raises `UnknownOption`, with the nearest key that there is."""
    if key not in KEYS:
        raise errors.UnknownOption.among("a topic", key, KEYS)
