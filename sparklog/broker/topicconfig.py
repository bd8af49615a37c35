"""What a topic can be told: its configuration keys, under Kafka's names where Kafka has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicKey:
    """One key: its default, what it does, and the check that a value must pass."""

    default: str
    about: str
    problem: Callable[[str], str | None]
    """What is wrong with a value, or None."""


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


KEYS: Final[Mapping[str, TopicKey]] = {
    "message.timestamp.type": TopicKey(
        default="CreateTime",
        about="CreateTime: the producer's time; LogAppendTime: the broker's, for every record",
        problem=_one_of("CreateTime", "LogAppendTime"),
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
