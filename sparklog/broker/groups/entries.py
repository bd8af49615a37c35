"""A group with its committed offsets, and views of them while the group may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.groups.committed_offsets import (
    CommittedOffsets,
    TopicPartition,
    flatten,
    get_offset,
)
from sparklog.broker.groups.group import Group
from sparklog.formats.consumer_offsets import CommittedOffset


@dataclass(slots=True)
class GroupEntry:
    """A group with the offsets that it has committed."""

    group: Group
    offsets: CommittedOffsets = field(default_factory=CommittedOffsets)
    committing: dict[object, Mapping[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    """The offsets of each commit whose records are being stored."""
    changes: int = 0
    """A number that rises whenever the offsets may have changed."""
    changed_ms: int = -1
    """When the group was last recorded, in ms since the Unix epoch."""

    @property
    def is_nothing(self) -> bool:
        """True if the group was never used: it has no member, id, record or offset."""
        return (
            self.group.is_deserted
            and self.group.generation == 0
            and self.changed_ms < 0
            and not self.changes
            and not self.committing
            and not self.offsets
        )


class OffsetsSnapshot:
    """The offsets of a group at one moment; create it while no thread changes them."""

    __slots__ = ("changes", "committing", "entry", "offsets")

    def __init__(self, entry: GroupEntry) -> None:
        self.entry = entry
        self.changes = entry.changes
        self.offsets = entry.offsets.snapshot()
        self.committing = tuple(entry.committing.values())

    def has(self, partition: TopicPartition) -> bool:
        """Returns true if the partition has an offset, or one is being stored."""
        return get_offset(self.offsets, partition) is not None or any(
            partition in each for each in self.committing
        )

    def partitions(self) -> list[TopicPartition]:
        """Returns all partitions that have an offset, or one that is being stored."""
        found = dict.fromkeys(each for each, _ in flatten(self.offsets))
        for each in self.committing:
            found.update(dict.fromkeys(each))
        return list(found)


class TopicLookup:
    """Ids of topics, each looked up once while many offsets are checked."""

    __slots__ = ("_broker", "_known")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: dict[str, tuple[str, int] | None] = {}

    def id_of(self, partition: TopicPartition) -> str | None:
        """Returns the id of the topic, or None if it does not have that partition."""
        topic, number = partition
        if topic not in self._known:
            try:
                self._known[topic] = (
                    self._broker.partitions.id_of(topic),
                    self._broker.partitions.count(topic),
                )
            except errors.Invalid:
                self._known[topic] = None
        known = self._known[topic]
        return known[0] if known is not None and 0 <= number < known[1] else None

    def has(self, partition: TopicPartition, value: CommittedOffset) -> bool:
        """Returns true if the offset belongs to the current topic of that name."""
        topic_id = self.id_of(partition)
        return topic_id is not None and value.topic_id in ("", topic_id)
