"""Configuration of consumer groups: every group key of Kafka 4.1 (KIP-848, KIP-932, KIP-1071).

Bounds and defaults are those of Kafka's brokers by default (`GroupConfig`,
`GroupCoordinatorConfig`). The keys are for group protocols that are not served, so none has an
effect; they are accepted, checked and described, so that programs written for Kafka run unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sparklog.formats import config_rules
from sparklog.formats.config_rules import ConfigType, Edit, Rule, int_rule, one_of

GROUPS_WITH_CONFIG = 10_000
GROUP_NAME_BYTES = 249  # of a group with a configuration; Kafka's limit for the names of topics
IDLE: Final = "no effect here: only classic groups are served"
_WHAT: Final = "a group's configuration"
_DURATION: Final = re.compile(
    r"P(?=.)(\d{1,19}D)?(T(?=\d)(\d{1,19}H)?(\d{1,19}M)?(\d{1,19}(\.\d{1,9})?S)?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """One key: its default, and the rule that a value must satisfy."""

    default: str
    rule: Rule


def _read_reset(value: str) -> str | None:
    """Returns a position: the last form is ISO 8601's, as Java's `Duration.parse` reads it."""
    kind, colon, duration = value.partition(":")
    if kind == "by_duration" and colon:
        return value if _DURATION.fullmatch(duration) else None
    return value if value in ("earliest", "latest") else None


_SESSION: Final = GroupKey(default="45000", rule=int_rule(45_000, 60_000))
_HEARTBEAT: Final = GroupKey(default="5000", rule=int_rule(5_000, 15_000))
KEYS: Final[Mapping[str, GroupKey]] = {
    "consumer.heartbeat.interval.ms": _HEARTBEAT,
    "consumer.session.timeout.ms": _SESSION,
    "share.auto.offset.reset": GroupKey(
        default="latest",
        rule=Rule(
            kind=ConfigType.STRING,
            expected="earliest, latest, or by_duration: with an ISO 8601 duration such as P7D",
            read=_read_reset,
        ),
    ),
    "share.heartbeat.interval.ms": _HEARTBEAT,
    "share.isolation.level": GroupKey(
        default="read_uncommitted", rule=one_of("read_committed", "read_uncommitted")
    ),
    "share.record.lock.duration.ms": GroupKey(default="30000", rule=int_rule(15_000, 60_000)),
    "share.session.timeout.ms": _SESSION,
    "streams.heartbeat.interval.ms": _HEARTBEAT,
    "streams.num.standby.replicas": GroupKey(default="0", rule=int_rule(0, 2)),
    "streams.session.timeout.ms": _SESSION,
}


def edited(
    config: Mapping[str, str], edits: Iterable[tuple[Edit, str, str | None]]
) -> dict[str, str]:
    """Returns a group's configuration after the edits; see `config_rules.edited`."""
    return config_rules.edited(_WHAT, KEYS, config, edits)


def check(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration with normalised values.

    Raises `UnknownOption` and `BadOption`, which name the key.
    """
    return config_rules.normalised(_WHAT, KEYS, config)
