"""Offsets that a consumer group has committed, by topic and partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from sparklog.formats.consumer_offsets import CommittedOffset

TopicPartition: TypeAlias = tuple[str, int]
"""A topic's name and a partition's number."""
OffsetsByTopic: TypeAlias = Mapping[str, Mapping[int, CommittedOffset]]

NO_OFFSETS: Final[OffsetsByTopic] = {}
_NO_PARTITIONS: Final[Mapping[int, CommittedOffset]] = {}


class CommittedOffsets:
    """The committed offsets of one group.

    If a snapshot holds a topic's offsets, they are copied before they change. So a snapshot costs
    one reference per topic, however many partitions there are.
    """

    __slots__ = ("_own", "_topics")

    def __init__(self) -> None:
        self._topics: dict[str, dict[int, CommittedOffset]] = {}
        self._own: set[str] = set()
        """Topics whose offsets no snapshot holds."""

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def get(self, partition: TopicPartition) -> CommittedOffset | None:
        """Returns the offset of a partition, or None."""
        return self._topics.get(partition[0], _NO_PARTITIONS).get(partition[1])

    def put(self, partition: TopicPartition, value: CommittedOffset) -> None:
        """Sets the offset of a partition."""
        self._writable(partition[0])[partition[1]] = value

    def drop(self, partition: TopicPartition) -> None:
        """Removes the offset of a partition, if there is one."""
        topic, number = partition
        if self.get(partition) is not None:
            of_topic = self._writable(topic)
            del of_topic[number]
            if not of_topic:
                del self._topics[topic]
                self._own.discard(topic)

    def snapshot(self) -> OffsetsByTopic:
        """Returns all offsets; later changes do not affect the result."""
        self._own.clear()
        return dict(self._topics)

    def _writable(self, topic: str) -> dict[int, CommittedOffset]:
        if topic not in self._own:
            self._own.add(topic)
            self._topics[topic] = dict(self._topics.get(topic, _NO_PARTITIONS))
        return self._topics[topic]


def get_offset(offsets: OffsetsByTopic, partition: TopicPartition) -> CommittedOffset | None:
    """Returns the offset of a partition, or None."""
    return offsets.get(partition[0], _NO_PARTITIONS).get(partition[1])


def select(
    get: Callable[[TopicPartition], CommittedOffset | None], partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, CommittedOffset]:
    """Returns the offsets of the partitions that have one."""
    found = ((each, get(each)) for each in partitions)
    return {partition: value for partition, value in found if value is not None}


def flatten(offsets: OffsetsByTopic) -> Iterator[tuple[TopicPartition, CommittedOffset]]:
    """Yields all offsets with their partitions."""
    for topic, of_topic in offsets.items():
        for number, value in of_topic.items():
            yield (topic, number), value
