"""Assignment of partitions to the members of a group, and the bytes that members exchange.

The leader of a group, whichever client it is, assigns for all members, so bytes and order match
Kafka's exactly: `ConsumerProtocolSubscription.json` and `ConsumerProtocolAssignment.json` of
`clients/src/main/resources/common/message`, `RangeAssignor`, `RoundRobinAssignor` and
`AbstractPartitionAssignor.MemberInfo`. All versions of both messages begin alike. Subscriptions are
written in version 0, and in version 2 for cooperative members, which name the partitions that they
own (KIP-429) and the generation that assigned them (KIP-792).
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sparklog import errors
from sparklog.client.offsets import TopicPartition

PROTOCOL_TYPE: Final = "consumer"
COOPERATIVE: Final = frozenset({"cooperative-sticky"})
"""The assignors whose members keep their partitions while they join."""
NO_GENERATION: Final = -1
_VERSION: Final = 0
_COOPERATIVE_VERSION: Final = 2
_NULL: Final = -1

Assignment: TypeAlias = dict[str, list[TopicPartition]]
"""The partitions of each member, by member id."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member, as an assignor sees it."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[str]
    owned: tuple[TopicPartition, ...] = ()
    """The partitions that it keeps while it joins."""
    generation: int = NO_GENERATION
    """The generation that assigned them."""

    @property
    def rank(self) -> tuple[bool, str]:
        """Static members come first, by instance id, which outlives the member id."""
        if self.instance_id is None:
            return True, self.member_id
        return False, self.instance_id


# ------------------------------------------------------------------------------ assignors


def by_range(partitions: Mapping[str, int], members: Sequence[Member]) -> Assignment:
    """Assigns each member a range of each topic's partitions; the first members get any remainder.

    Args:
        partitions: the number of partitions of each topic; a missing topic is not assigned.
        members: all members of the group.
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
    """Assigns the partitions of all topics in turn to the members that subscribe to the topic.

    The arguments are those of `by_range`.
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


def by_cooperative_stickiness(
    partitions: Mapping[str, int], members: Sequence[Member]
) -> Assignment:
    """Spreads the partitions evenly, and moves as few as possible (`CooperativeStickyAssignor`).

    A partition that moves is left out while its old owner claims it: the owner gives it up and
    rejoins, and the next generation assigns it. The arguments are those of `by_range`.
    """
    owners = _owners(partitions, members)
    found: Assignment = {member.member_id: [] for member in members}
    for partition, owner in sorted(owners.items()):
        found[owner].append(partition)
    by_topic = {
        topic: [each.member_id for each in sorted(members, key=_rank) if topic in each.topics]
        for topic in partitions
    }
    for topic, count in sorted(partitions.items()):
        for number in range(count) if by_topic[topic] else ():
            if (topic, number) not in owners:
                least = min(by_topic[topic], key=lambda each: len(found[each]))
                found[least].append((topic, number))
    while _move_one_round(found, by_topic):
        pass
    return {
        member_id: sorted(each for each in given if owners.get(each, member_id) == member_id)
        for member_id, given in found.items()
    }


def _owners(partitions: Mapping[str, int], members: Sequence[Member]) -> dict[TopicPartition, str]:
    """Returns the owner of each partition: the only claimant of the latest generation, if unique.

    Claims do not count if the member no longer subscribes to the topic, or if the partition does
    not exist.
    """
    claims: dict[TopicPartition, list[tuple[int, str]]] = defaultdict(list)
    for member in members:
        for topic, number in member.owned:
            if topic in member.topics and number < partitions.get(topic, 0):
                claims[topic, number].append((member.generation, member.member_id))
    owners = {}
    for partition, claimed in claims.items():
        latest = max(generation for generation, _ in claimed)
        holders = [member_id for generation, member_id in claimed if generation == latest]
        if len(holders) == 1:
            owners[partition] = holders[0]
    return owners


def _move_one_round(found: Assignment, by_topic: Mapping[str, Sequence[str]]) -> bool:
    """Moves partitions to members that have at least two fewer; returns False if there are none.

    Each move makes the loads more even, so the rounds terminate.
    """
    has_moved = False
    for member_id in sorted(found, key=lambda each: (-len(found[each]), each)):
        for partition in list(reversed(found[member_id])):
            least = min(by_topic[partition[0]], key=lambda each: len(found[each]))
            if len(found[least]) + 1 < len(found[member_id]):
                found[member_id].remove(partition)
                found[least].append(partition)
                has_moved = True
    return has_moved


def _rank(member: Member) -> tuple[bool, str]:
    return member.rank


ASSIGNORS: Final[Mapping[str, Callable[[Mapping[str, int], Sequence[Member]], Assignment]]] = {
    "cooperative-sticky": by_cooperative_stickiness,
    "range": by_range,
    "roundrobin": by_round_robin,
}
"""By their names in Kafka's clients."""


# ------------------------------------------------------------------------------ bytes


def encode_subscription(
    topics: Iterable[str],
    *,
    owned: Iterable[TopicPartition] | None = None,
    generation: int = NO_GENERATION,
) -> bytes:
    """Encodes a `ConsumerProtocolSubscription`.

    Args:
        topics: their names.
        owned: the partitions of a cooperative member, for version 2, which also has the generation
            as user data, where assignors for version 1 expect it. None: version 0.
        generation: the generation that assigned them.
    """
    names = list(topics)
    version = _VERSION if owned is None else _COOPERATIVE_VERSION
    parts = [struct.pack(">hi", version, len(names)), *map(_string, names)]
    if owned is None:
        return b"".join([*parts, struct.pack(">i", _NULL)])
    parts += [struct.pack(">ii", 4, generation), _partitions(owned), struct.pack(">i", generation)]
    return b"".join(parts)


def decode_subscription(data: bytes) -> list[str]:
    """Returns the topics, from any version. Raises `CorruptRecord`."""
    reader = _Reader("a member's subscription", data)
    reader.version()
    return [reader.string() for _ in range(reader.count())]


def decode_member(member_id: str, instance_id: str | None, subscription: bytes) -> Member:
    """Returns a member with its subscription, of any version. Raises `CorruptRecord`."""
    reader = _Reader("a member's subscription", subscription)
    version = reader.version()
    topics = frozenset(reader.string() for _ in range(reader.count()))
    owned: tuple[TopicPartition, ...] = ()
    generation = NO_GENERATION
    if version >= 1:
        user_data = reader.nullable()
        owned = tuple(reader.partitions())
        if version >= 2:
            generation = reader.number(">i")
        elif len(user_data) == 4:
            generation = int.from_bytes(user_data, "big", signed=True)
    return Member(
        member_id=member_id,
        instance_id=instance_id,
        topics=topics,
        owned=owned,
        generation=generation,
    )


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """Encodes a `ConsumerProtocolAssignment`, without user data."""
    return struct.pack(">h", _VERSION) + _partitions(partitions) + struct.pack(">i", _NULL)


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """Returns the partitions, sorted, from any version; none if there are no bytes.

    Raises `CorruptRecord`.
    """
    if not data:
        return []
    reader = _Reader("a member's assignment", data)
    reader.version()
    return sorted(reader.partitions())


def _partitions(partitions: Iterable[TopicPartition]) -> bytes:
    by_topic = defaultdict(list)
    for topic, number in partitions:
        by_topic[topic].append(number)
    parts = [struct.pack(">i", len(by_topic))]
    for topic, numbers in by_topic.items():
        parts += [_string(topic), struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)]
    return b"".join(parts)


def _string(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


class _Reader:
    def __init__(self, what: str, data: bytes) -> None:
        self._what = what
        self._data = data
        self._at = 0

    def version(self) -> int:
        version = self.number(">h")
        if version < 0:
            raise errors.CorruptRecord(what=self._what, reason="a negative version")
        return version

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

    def nullable(self) -> bytes:
        """Returns nullable bytes; empty for null."""
        size = self.number(">i")
        return b"" if size < 0 else self._take(size)

    def partitions(self) -> list[TopicPartition]:
        found = []
        for _ in range(self.count()):
            topic = self.string()
            found += [(topic, self.number(">i")) for _ in range(self.count())]
        return found

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + max(size, 0)]
        if size < 0 or len(data) < size:
            raise errors.CorruptRecord(
                what=self._what, reason=f"{size} bytes expected at {self._at} of {len(self._data)}"
            )
        self._at += size
        return data
