"""Who of a consumer group reads which partitions, and the bytes in which members tell it.

The leader of a group, whatever client it is, assigns for all, so what stands here is Kafka's to the
byte and to the order: `ConsumerProtocolSubscription.json` and `ConsumerProtocolAssignment.json` of
`clients/src/main/resources/common/message`, `RangeAssignor`, `RoundRobinAssignor` and
`AbstractPartitionAssignor.MemberInfo`. All versions of both messages begin alike; what we write is
version 0, and what comes after it is not needed to assign.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sparklog import errors
from sparklog.client.reading import TopicPartition

PROTOCOL_TYPE: Final = "consumer"
_VERSION: Final = 0
_NULL: Final = -1

Assignment: TypeAlias = dict[str, list[TopicPartition]]
"""Of each member, by its id: its partitions."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member, as far as it matters for assigning."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[str]

    @property
    def rank(self) -> tuple[bool, str]:
        """Static members come first, by their instance ids, which outlive their member ids."""
        if self.instance_id is None:
            return True, self.member_id
        return False, self.instance_id


# ------------------------------------------------------------------------------ assignors


def by_range(partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
    """Of each topic a run of neighbours for each member; the first ones get one more.

    Args:
        partitions: how many each topic has; a topic that is missing is assigned to nobody.
        members: all of the group.
    """
    found: Assignment = {member.member_id: [] for member in members}
    for topic, count in sorted(partitions.items()):
        wanting = sorted((each for each in members if topic in each.topics), key=_rank)
        if not wanting:
            continue
        least, larger = divmod(count, len(wanting))
        first = 0
        for place, member in enumerate(wanting):
            end = first + least + (place < larger)
            found[member.member_id] += [(topic, number) for number in range(first, end)]
            first = end
    return found


def by_round_robin(partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
    """All partitions of all topics in turn; who does not want a topic is passed over.

    Args as of `by_range`.
    """
    found: Assignment = {member.member_id: [] for member in members}
    wanted = {topic for member in members for topic in member.topics}
    turns = itertools.cycle(sorted(members, key=_rank))
    for topic, count in sorted(partitions.items()):
        if topic in wanted:
            for number in range(count):
                member = next(each for each in turns if topic in each.topics)
                found[member.member_id].append((topic, number))
    return found


def _rank(member: Member) -> tuple[bool, str]:
    return member.rank


ASSIGNORS: Final[Mapping[str, Callable[[Mapping[str, int], Sequence[Member]], Assignment]]] = {
    "range": by_range,
    "roundrobin": by_round_robin,
}
"""By the names that Kafka's clients give them."""


# ------------------------------------------------------------------------------ bytes


def encode_subscription(topics: Iterable[str]) -> bytes:
    """`ConsumerProtocolSubscription`, without user data."""
    names = list(topics)
    parts = [struct.pack(">hi", _VERSION, len(names)), *map(_string, names)]
    return b"".join([*parts, struct.pack(">i", _NULL)])


def decode_subscription(data: bytes) -> list[str]:
    """The topics, from any version. Raises `CorruptRecord`."""
    reader = _Reader("a member's subscription", data)
    reader.version()
    return [reader.string() for _ in range(reader.count())]


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """`ConsumerProtocolAssignment`, without user data."""
    by_topic = defaultdict(list)
    for topic, number in partitions:
        by_topic[topic].append(number)
    parts = [struct.pack(">hi", _VERSION, len(by_topic))]
    for topic, numbers in by_topic.items():
        parts += [_string(topic), struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)]
    return b"".join([*parts, struct.pack(">i", _NULL)])


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """The partitions, sorted, from any version; without bytes there are none.

    Raises `CorruptRecord`.
    """
    if not data:
        return []
    reader = _Reader("a member's assignment", data)
    reader.version()
    found = []
    for _ in range(reader.count()):
        topic = reader.string()
        found += [(topic, reader.number(">i")) for _ in range(reader.count())]
    return sorted(found)


def _string(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


class _Reader:
    def __init__(self, what: str, data: bytes) -> None:
        self._what = what
        self._data = data
        self._at = 0

    def version(self) -> None:
        if self.number(">h") < 0:
            raise errors.CorruptRecord(what=self._what, reason="a negative version")

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def count(self) -> int:
        return self.number(">i")

    def string(self) -> str:
        try:
            return self._take(self.number(">h")).decode()
        except UnicodeDecodeError as error:
            raise errors.CorruptRecord(what=self._what, reason=str(error)) from error

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + max(size, 0)]
        if size < 0 or len(data) < size:
            raise errors.CorruptRecord(
                what=self._what, reason=f"{size} bytes wanted at {self._at} of {len(self._data)}"
            )
        self._at += size
        return data
