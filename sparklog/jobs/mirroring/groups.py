"""Offsets of consumer groups, copied unchanged: a mirror has the offsets of its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sparklog import errors
from sparklog.client.offsets import OffsetAndMetadata, TopicPartition
from sparklog.jobs.mirroring.plan import Pair
from sparklog.jobs.mirroring.sides import Source, Target

Offsets: TypeAlias = Mapping[TopicPartition, OffsetAndMetadata]


@dataclass(slots=True)
class GroupsCopied:
    """The outcome for the groups with committed offsets in mirrored topics, by name."""

    copied: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Groups with members at the source, whose offsets may still advance."""
    refused: dict[str, str] = field(default_factory=dict)
    """Groups whose offsets the target does not accept, with the reason."""
    ahead: list[str] = field(default_factory=list)
    """Groups with offsets that the target does not have yet; their other offsets were copied."""


def translated(offsets: Offsets, pairs: Iterable[Pair]) -> tuple[Offsets, bool]:
    """Returns the offsets in mirrored topics, under the target's topic names and up to its ends.

    Also returns whether some are beyond those ends.
    """
    by_topic = {pair.topic: pair for pair in pairs}
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    is_ahead = False
    for (topic, partition), committed in offsets.items():
        pair = by_topic.get(topic)
        if pair is None:
            continue
        if committed.offset <= pair.position(partition):
            found[pair.name, partition] = committed
        else:
            is_ahead = True
    return found, is_ahead


class GroupOffsets:
    """Copies the offsets of groups whose names match."""

    def __init__(self, source: Source, target: Target, groups: re.Pattern[str]) -> None:
        self._source = source
        self._target = target
        self._groups = groups

    def copy(self, pairs: Iterable[Pair]) -> GroupsCopied:
        """Commits the groups' offsets in the target if they differ."""
        pairs = list(pairs)
        outcome = GroupsCopied()
        for group in self._source.groups():
            name = group.group
            if not self._groups.fullmatch(name):
                continue
            offsets, is_ahead = translated(self._source.group_offsets(name), pairs)
            if not offsets and not is_ahead:
                continue
            if group.has_members:
                outcome.active.append(name)
            if is_ahead:
                outcome.ahead.append(name)
            if self._differs(name, offsets):
                try:
                    self._target.log.commit_group_offsets(name, offsets)
                except errors.GroupRefused as error:
                    has_members = error.error == "NON_EMPTY_GROUP"
                    outcome.refused[name] = "has members here" if has_members else str(error)
                    continue
            outcome.copied.append(name)
        return outcome

    def _differs(self, group: str, offsets: Offsets) -> bool:
        found = self._target.group_offsets(group)
        return any(found.get(place) != wanted for place, wanted in offsets.items())
