"""Topics and partitions of a read: `subscribe`, `subscribePattern` or `assign`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors
from sparklog.formats.topic_names import INTERNAL_TOPICS, check_topic_name
from sparklog.options import ConnectorOptions

_OPTIONS: Final = ("subscribe", "subscribePattern", "assign")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Topics by name or by pattern, and their partitions if those are named."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None

    def names(self, existing: Iterable[str]) -> list[str]:
        """Returns the named topics, or those of `existing` that match the pattern, in order."""
        if self.pattern is None:
            return list(self.topics)
        return sorted(name for name in existing if self.selects(name))

    def selects(self, topic: str) -> bool:
        """Returns whether a topic of this name is selected. Internal topics match no pattern."""
        if self.pattern is None:
            return topic in self.topics
        return topic not in INTERNAL_TOPICS and re.fullmatch(self.pattern, topic) is not None

    def partitions(self, topic: str, count: int) -> Iterable[int]:
        """Returns the selected partitions out of `count`. Raises `UnknownPartition`."""
        if self.assigned is None:
            return range(count)
        wanted = self.assigned[topic]
        if wanted[-1] >= count:
            raise errors.UnknownPartition(topic=topic, partition=wanted[-1], last=count - 1)
        return wanted


def parse(options: ConnectorOptions) -> Selection:
    """Returns the selection. Raises `BadTopicName`, and `BadOption` unless exactly one is given."""
    given = [name for name in _OPTIONS if options.get(name) is not None]
    if len(given) != 1:
        option = given[1] if given else "subscribe"
        reason = f"set exactly one of {', '.join(_OPTIONS)}"
        raise _bad(option, options.get(option), reason)
    value = options.get(given[0]) or ""
    match given[0]:
        case "subscribe":
            names = options.names("subscribe")
            if not names:
                raise _bad("subscribe", value, "expected names of topics, separated by commas")
            return Selection(topics=tuple(sorted(check_topic_name(name) for name in names)))
        case "subscribePattern":
            return Selection(pattern=_pattern(value))
        case _:
            assigned = _assigned(value)
            return Selection(topics=tuple(assigned), assigned=assigned)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise _bad("subscribePattern", value, f"it is not a regular expression: {error}") from None
    if not value:
        raise _bad("subscribePattern", value, "an empty pattern matches no topic")
    return value


def _assigned(value: str) -> dict[str, tuple[int, ...]]:
    try:
        found = msgspec.json.decode(value, type=dict[str, list[int]])
    except msgspec.MsgspecError:
        found = {}
    if not found or not all(found.values()) or any(min(each) < 0 for each in found.values()):
        raise _bad("assign", value, 'expected partitions of topics, such as {"flights": [0, 1]}')
    return {check_topic_name(topic): tuple(sorted(set(found[topic]))) for topic in sorted(found)}


def _bad(option: str, value: str | None, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
