"""The plan of a round: the state of each topic on both sides, faults, and the offsets to copy.

A mirror keeps no state. The target's end offsets are its position, and the target's configuration
names the source: cluster, topic id and topic. So a plan follows from the current state of both
sides, and can be computed again at any time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sparklog import errors, limits
from sparklog.client.offsets import TopicPartition
from sparklog.display import counted
from sparklog.formats import topic_config
from sparklog.formats.topic_names import check_topic_name
from sparklog.jobs.ranges import fair_shares


class Bounds(NamedTuple):
    """Log start and end offsets of a partition."""

    start: int
    end: int


class Range(NamedTuple):
    """Offsets of a partition that a round covers: from `first` up to `until`.

    Records are read from `start` on, which exceeds `first` if the source has none before it.
    """

    first: int
    until: int
    start: int


Ranges = Mapping[str, Mapping[int, Range]]
"""By source topic and partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTopic:
    """A topic to mirror. The end of a partition is that of its committed records."""

    topic: str
    topic_id: str
    partitions: Mapping[int, Bounds]
    """Those that have a leader."""
    leaderless: Sequence[int] = ()
    """Partitions whose offsets are unknown until they have a leader."""

    @property
    def count(self) -> int:
        """The number of partitions."""
        return len(self.partitions) + len(self.leaderless)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTopic:
    """A topic of the target's root; `origin`: the value of `mirror.source`, if it is a mirror."""

    topic: str
    origin: str | None
    config: Mapping[str, str]
    """Its own configuration, without `mirror.source`."""
    partitions: Mapping[int, Bounds]

    @property
    def is_empty(self) -> bool:
        return not any(each.end for each in self.partitions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A topic on both sides. `cluster`: the source's, as in `kafka:<cluster id>`."""

    source: SourceTopic
    cluster: str
    name: str
    """The topic's name in the target."""
    target: TargetTopic | None
    """None if it does not exist yet."""

    @property
    def topic(self) -> str:
        return self.source.topic

    @property
    def origin(self) -> str:
        return f"{self.cluster}/{self.source.topic_id}/{self.topic}"

    def position(self, partition: int) -> int:
        """Returns the next offset to copy."""
        found = None if self.target is None else self.target.partitions.get(partition)
        return 0 if found is None else found.end

    @property
    def lag(self) -> int:
        """The number of offsets that the source has and the target lacks."""
        return sum(
            max(bounds.end - max(self.position(number), bounds.start), 0)
            for number, bounds in self.source.partitions.items()
        )

    @property
    def was_cut_over(self) -> bool:
        """True if the target's topic is not a mirror and has all offsets of the source."""
        found = self.target
        if found is None or found.origin is not None or found.is_empty or self.source.leaderless:
            return False
        return not any(
            self.position(number) < bounds.end for number, bounds in self.source.partitions.items()
        )

    def fault(self, *, skips_deleted: bool) -> str | None:
        """Returns the reason that the topic cannot be mirrored; None if it can.

        `skips_deleted`: records that the source deleted before they were copied are not a fault.
        """
        target = self.target
        if target is None:
            return None
        if target.origin is None and not target.is_empty:
            return self._foreign()
        if target.origin is not None and target.origin != self.origin:
            return self._of_another_source(target.origin)
        if len(target.partitions) > self.source.count:
            return (
                f"the target has {counted(len(target.partitions), 'partition')}, the source only"
                f" {self.source.count}"
            )
        return self._lost(skips_deleted=skips_deleted)

    def _foreign(self) -> str:
        return (
            f"topic {self.name!r} of the target has records and is not a mirror: delete it, or"
            " choose a different name with --rename"
        )

    def _of_another_source(self, origin: str) -> str:
        cluster, topic_id, topic = origin_parts(origin)
        if (cluster, topic) == (self.cluster, self.topic):
            return (
                f"it was deleted and created again at the source: its id was {topic_id} and is"
                f" {self.source.topic_id}. Delete topic {self.name!r} of the target to mirror it"
                " from its start, or keep that one and choose a different name with --rename"
            )
        return (
            f"topic {self.name!r} of the target is the mirror of another topic, {origin}: choose"
            " a different name with --rename"
        )

    def _lost(self, *, skips_deleted: bool) -> str | None:
        for number, bounds in self.source.partitions.items():
            position = self.position(number)
            if position > bounds.end:
                return (
                    f"partition {number} ends at {bounds.end} at the source and at {position} in"
                    " the target: the source has lost records that were mirrored"
                )
            if 0 < position < bounds.start and not skips_deleted:
                return (
                    f"the source has deleted offsets {position} to {bounds.start - 1} of"
                    f" partition {number} before they were mirrored: --skip-deleted continues with"
                    " a gap"
                )
        return None


def origin_parts(origin: str) -> tuple[str, str, str]:
    """Returns cluster, topic id and topic of a value of `mirror.source`; empty if unknown."""
    cluster, _, rest = origin.partition("/")
    topic_id, _, topic = rest.partition("/")
    return cluster, topic_id, topic


# ------------------------------------------------------------------------------ names


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The topics to mirror, and their names in the target."""

    topics: re.Pattern[str]
    exclude: re.Pattern[str] | None = None
    renames: Sequence[tuple[re.Pattern[str], str]] = ()
    """Patterns of whole names, and the new names, with groups as \\1. The first match counts."""

    def names(self, topics: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the topics that match, with their names in the target, and faults.

        A fault is the reason that a topic cannot have its name: the name is invalid, or taken by
        another topic, which comes first in the order of the source's names.
        """
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        faults: dict[str, str] = {}
        for topic in sorted(filter(self._has, topics)):
            name = self._renamed(topic)
            try:
                check_topic_name(name)
            except errors.BadTopicName as error:
                faults[topic] = str(error)
                continue
            if name in taken:
                faults[topic] = (
                    f"it and {taken[name]!r} would both be {name!r}: choose a different name with"
                    " --rename"
                )
                continue
            found[topic] = name
            taken[name] = topic
        return found, faults

    def _has(self, topic: str) -> bool:
        if self.exclude is not None and self.exclude.fullmatch(topic):
            return False
        return self.topics.fullmatch(topic) is not None

    def _renamed(self, topic: str) -> str:
        for pattern, name in self.renames:
            match = pattern.fullmatch(topic)
            if match is not None:
                return match.expand(name)
        return topic


# ------------------------------------------------------------------------------ configuration


def split_config(own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the source's configuration that a topic here accepts, and the other keys.

    Both are sorted by key. Keys that Kafka does not have are in neither: how its table looks, and
    when it is written, is for each log to decide.
    """
    taken: dict[str, str] = {}
    left = []
    for name, value in sorted(own.items()):
        if name in topic_config.OWN_KEYS:
            continue
        try:
            taken |= topic_config.check({name: value})
        except errors.Invalid:
            left.append(name)
    return taken, left


def config_changes(target: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the changes that turn the target's own configuration into the wanted one.

    Keys that Kafka does not have stay as they are, unless they are wanted.
    """
    changes: dict[str, str | None] = {
        name: value for name, value in wanted.items() if target.get(name) != value
    }
    return changes | dict.fromkeys(target.keys() - wanted.keys() - topic_config.OWN_KEYS)


# ------------------------------------------------------------------------------ ranges


Goal = Mapping[str, Mapping[int, int]]
"""End offsets up to which a run copies, by source topic and partition."""


def goal_of(pairs: Iterable[Pair]) -> Goal:
    """Returns the current ends of the sources."""
    return {
        pair.topic: {number: each.end for number, each in pair.source.partitions.items()}
        for pair in pairs
    }


def with_ends_of(goal: Goal, pairs: Iterable[Pair], places: Collection[TopicPartition]) -> Goal:
    """Returns the goal, plus the current ends of those of `places` that it lacks."""
    more = {
        pair.topic: {
            n: b.end for n, b in pair.source.partitions.items() if (pair.topic, n) in places
        }
        for pair in pairs
    }
    return {topic: {**more.get(topic, {}), **ends} for topic, ends in goal.items()}


def leaderless(pairs: Iterable[Pair], goal: Goal) -> dict[str, list[int]]:
    """Returns the partitions without a leader that may have records up to `goal`, by topic."""
    found = {
        pair.topic: [
            number
            for number in pair.source.leaderless
            if pair.position(number) < goal.get(pair.topic, {}).get(number, math.inf)
        ]
        for pair in pairs
    }
    return {topic: numbers for topic, numbers in found.items() if numbers}


def named(numbers: Sequence[int]) -> str:
    """Returns the subject of a sentence about partitions, and its verb."""
    listed = ", ".join(map(str, numbers))
    return f"partition {listed} has" if len(numbers) == 1 else f"partitions {listed} have"


UNKNOWN_BYTES: Final = limits.MIB
"""The assumed size of an offset in a topic of which nothing has been copied yet."""


def ranges(
    pairs: Iterable[Pair],
    records: int,
    goal: Goal | None = None,
    *,
    most_bytes: int = limits.GIB,
    sizes: Mapping[str, float] | None = None,
) -> Ranges:
    """Returns the next offsets to copy, of all topics together.

    Partitions receive equal shares; those with less to copy leave the rest to the others.

    Args:
        pairs: the topics.
        records: the approximate maximum number of offsets.
        goal: the ends up to which to copy; None: those of the sources.
        most_bytes: the approximate maximum size in bytes, if `sizes` are accurate.
        sizes: bytes per offset by source topic; None: bytes are not limited.
    """
    waiting = list(_waiting(pairs, goal))
    shares = fair_shares([whole.until - whole.start for *_, whole in waiting], records)
    if sizes is not None:
        each = [max(math.ceil(sizes.get(topic, UNKNOWN_BYTES)), 1) for topic, *_ in waiting]
        wanted = [share * size for share, size in zip(shares, each, strict=True)]
        granted = fair_shares(wanted, most_bytes)
        shares = [
            min(share, max(part // size, 1))
            for share, part, size in zip(shares, granted, each, strict=True)
        ]
    found: dict[str, dict[int, Range]] = {}
    for (topic, number, whole), share in zip(waiting, shares, strict=True):
        found.setdefault(topic, {})[number] = whole._replace(until=whole.start + share)
    return found


def _waiting(pairs: Iterable[Pair], goal: Goal | None) -> Iterator[tuple[str, int, Range]]:
    for pair in pairs:
        for number, bounds in pair.source.partitions.items():
            first = pair.position(number)
            end = bounds.end if goal is None else min(bounds.end, _end(goal, pair.topic, number))
            if first < end:
                start = min(max(first, bounds.start), end)
                yield pair.topic, number, Range(first=first, until=end, start=start)


def _end(goal: Goal, topic: str, partition: int) -> int:
    return goal.get(topic, {}).get(partition, 0)


def is_reached(pairs: Iterable[Pair], goal: Goal) -> bool:
    """Returns whether the target has everything up to `goal`."""
    return not any(True for _ in _waiting(pairs, goal))
