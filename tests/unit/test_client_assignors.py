"""Assignors and protocol bytes, with those of Kafka's clients as oracles."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor as AioRoundRobin
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.protocol.consumer.metadata import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)

from sparklog import errors
from sparklog.client.consumer.assignors import (
    ASSIGNORS,
    Assignment,
    Member,
    by_cooperative_stickiness,
    by_range,
    by_round_robin,
    decode_assignment,
    decode_member,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

TOPICS = ["a", "b", "c", "gone"]

counts = st.fixed_dictionaries({topic: st.integers(1, 9) for topic in TOPICS[:3]})
wanted = st.frozensets(st.sampled_from(TOPICS))


@st.composite
def groups(draw: st.DrawFn, *, alike: bool = False) -> list[Member]:
    """Draws members, some of them static, in any order; `alike`: all want the same topics."""
    ids = draw(st.lists(st.text("mnop0123456789-", min_size=1), min_size=1, unique=True))
    common = draw(wanted)
    members = [
        Member(
            member_id=member_id,
            instance_id=f"i{number}" if draw(st.booleans()) else None,
            topics=common if alike else draw(wanted),
        )
        for number, member_id in enumerate(ids)
    ]
    return draw(st.permutations(members))


class Cluster:
    """Metadata of a client, as far as assignors read them."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(self._counts[topic])) if topic in self._counts else None


def _by_kafka_python(assignor: Any, counts: dict[str, int], members: list[Member]) -> Assignment:
    # It takes static members for one group only where they come together.
    together = sorted(members, key=lambda each: each.instance_id is None)
    given_members = [
        SimpleNamespace(
            member_id=each.member_id,
            group_instance_id=each.instance_id,
            metadata=SimpleNamespace(topics=list(each.topics)),
        )
        for each in together
    ]
    found = assignor.assign(Cluster(counts), given_members)
    return {key: decode_assignment(value.encode()) for key, value in found.items()}


def _sorted(assignment: Assignment) -> Assignment:
    return {key: sorted(value) for key, value in assignment.items()}


# ------------------------------------------------------------------------------ assignors


@given(counts, groups())
def test_range_is_kafkas(counts: dict[str, int], members: list[Member]) -> None:
    """Range assignments are those of Kafka's clients, for static members too."""
    expected = _by_kafka_python(RangePartitionAssignor, counts, members)
    assert _sorted(by_range(counts, members)) == expected


@given(counts, groups(alike=True))
def test_round_robin_is_kafkas(counts: dict[str, int], members: list[Member]) -> None:
    """Round-robin assignments are those of Kafka's clients, for static members too."""
    expected = _by_kafka_python(RoundRobinPartitionAssignor, counts, members)
    assert _sorted(by_round_robin(counts, members)) == expected


@given(counts, groups())
def test_round_robin_of_unlike_members_is_kafkas(
    counts: dict[str, int], members: list[Member]
) -> None:
    """Members that do not want a topic are passed over, as in Kafka's clients."""
    dynamic = [Member(member_id=each.member_id, topics=each.topics) for each in members]
    metadata = {
        each.member_id: ConsumerProtocolMemberMetadata(0, list(each.topics), b"")
        for each in dynamic
    }
    found = AioRoundRobin.assign(Cluster(counts), metadata)
    expected = {key: decode_assignment(value.encode()) for key, value in found.items()}
    assert _sorted(by_round_robin(counts, dynamic)) == expected


@pytest.mark.parametrize("name", ASSIGNORS)
@given(counts, groups())
def test_each_partition_has_one_reader(
    name: str, counts: dict[str, int], members: list[Member]
) -> None:
    """Every partition of a wanted topic goes to one member that wants it, and no other goes out."""
    found = ASSIGNORS[name](counts, members)
    given_out = list(itertools.chain.from_iterable(found.values()))
    expected = {
        (topic, number)
        for topic, count in counts.items()
        if any(topic in each.topics for each in members)
        for number in range(count)
    }
    assert len(given_out) == len(expected)
    assert set(given_out) == expected
    for member in members:
        assert {topic for topic, _ in found[member.member_id]} <= member.topics


def _next_generation(
    counts: dict[str, int], members: list[Member], generation: int
) -> tuple[list[Member], Assignment]:
    """Assigns once, and lets every member own the partitions that it gets."""
    found = by_cooperative_stickiness(counts, members)
    owning = [
        msgspec.structs.replace(each, owned=tuple(found[each.member_id]), generation=generation)
        for each in members
    ]
    return owning, found


@given(counts, groups(), groups())
def test_cooperative_rebalance(
    counts: dict[str, int], members: list[Member], others: list[Member]
) -> None:
    """A partition never goes to a member while another owns it, and all are assigned in the end."""
    members, _ = _next_generation(counts, members, 1)
    ids = {each.member_id for each in members}
    members = members[len(members) // 3 :] + [each for each in others if each.member_id not in ids]
    for generation in range(2, 5):
        before = {partition: each.member_id for each in members for partition in each.owned}
        members, found = _next_generation(counts, members, generation)
        for member_id, given_out in found.items():
            assert all(before.get(each, member_id) == member_id for each in given_out)
    assert by_cooperative_stickiness(counts, members) == found
    given_out = list(itertools.chain.from_iterable(found.values()))
    expected = {
        (topic, number)
        for topic, count in counts.items()
        if any(topic in each.topics for each in members)
        for number in range(count)
    }
    assert len(given_out) == len(expected)
    assert set(given_out) == expected
    for member in members:
        for topic, _ in found[member.member_id]:
            for other in members:
                if topic in other.topics:
                    assert len(found[other.member_id]) + 1 >= len(found[member.member_id])


def test_cooperative_members_keep_what_does_not_move() -> None:
    """A third member gets its share, and the others lose no more than that."""
    everything = [("t", number) for number in range(9)]
    members = [
        Member(member_id="a", topics=frozenset("t"), owned=tuple(everything[:5]), generation=3),
        Member(member_id="b", topics=frozenset("t"), owned=tuple(everything[5:]), generation=3),
        Member(member_id="c", topics=frozenset("t")),
    ]
    members, found = _next_generation({"t": 9}, members, 4)
    assert {key: len(value) for key, value in found.items()} == {"a": 3, "b": 3, "c": 0}
    assert set(found["a"]) <= set(everything[:5])
    assert set(found["b"]) <= set(everything[5:])
    _, last = _next_generation({"t": 9}, members, 5)
    assert (last["a"], last["b"]) == (found["a"], found["b"])
    assert len(last["c"]) == 3


def test_cooperative_claims() -> None:
    """The later generation decides between two claims of a partition; a tie counts for neither."""
    old = Member(member_id="a", topics=frozenset("t"), owned=(("t", 0), ("t", 1)), generation=1)
    new = Member(member_id="b", topics=frozenset("t"), owned=(("t", 0),), generation=2)
    assert by_cooperative_stickiness({"t": 2}, [old, new]) == {"a": [("t", 1)], "b": [("t", 0)]}
    same = msgspec.structs.replace(old, member_id="c")
    found = by_cooperative_stickiness({"t": 2}, [old, same])
    assert sorted(map(len, found.values())) == [1, 1]


# ------------------------------------------------------------------------------ bytes

names = st.text("abcé._-", min_size=1, max_size=20)
places = st.lists(st.tuples(names, st.integers(0, 2**31 - 1)), unique=True)


@given(st.lists(names))
def test_subscription_goes_there_and_back(topics: list[str]) -> None:
    """Kafka's clients read what we write, and we read what they write, in every version."""
    ours = encode_subscription(topics)
    assert decode_subscription(ours) == topics
    assert ConsumerProtocolSubscription.decode(ours).topics == topics
    for version in range(4):
        theirs = ConsumerProtocolSubscription(
            version=version, topics=topics, user_data=b"x", owned_partitions=[]
        )
        assert decode_subscription(theirs.encode()) == topics


@given(st.lists(names), places, st.integers(-1, 2**31 - 1))
def test_cooperative_subscription(
    topics: list[str], owned: list[tuple[str, int]], generation: int
) -> None:
    """Kafka's clients read owned partitions and their generation, and we read theirs."""
    ours = encode_subscription(topics, owned=owned, generation=generation)
    theirs = ConsumerProtocolSubscription.decode(ours)
    assert theirs.topics == topics
    assert theirs.generation_id == generation
    found = [(each.topic, n) for each in theirs.owned_partitions for n in each.partitions]
    assert sorted(found) == sorted(owned)
    for data in (ours, theirs.encode()):
        member = decode_member("m", None, data)
        assert (member.topics, sorted(member.owned)) == (frozenset(topics), sorted(owned))
        assert member.generation == generation


def test_generation_in_user_data() -> None:
    """A subscription of version 1 has the generation of its owned partitions as user data."""
    data = ConsumerProtocolSubscription(
        version=1, topics=["t"], user_data=(7).to_bytes(4, "big"), owned_partitions=[]
    ).encode()
    assert decode_member("m", None, data).generation == 7


@given(places)
def test_assignment_goes_there_and_back(partitions: list[tuple[str, int]]) -> None:
    """Kafka's clients read what we write, and we read what they write."""
    ours = encode_assignment(partitions)
    assert decode_assignment(ours) == sorted(partitions)
    theirs = ConsumerProtocolAssignment.decode(ours)
    assert sorted(
        (each.topic, number) for each in theirs.assigned_partitions for number in each.partitions
    ) == sorted(partitions)
    assert decode_assignment(theirs.encode()) == sorted(partitions)


def test_no_assignment() -> None:
    """A member that the leader gave nothing has no bytes at all."""
    assert decode_assignment(b"") == []


@given(st.binary(max_size=40))
def test_bytes_that_make_no_sense(data: bytes) -> None:
    """A member's bytes are decoded, or refused as corrupt."""
    for decode in (decode_subscription, decode_assignment):
        with contextlib.suppress(errors.CorruptRecord):
            decode(data)


@given(places, st.data())
def test_bytes_that_are_cut_off(partitions: list[tuple[str, int]], data: st.DataObject) -> None:
    """An assignment that is cut off before its end is never taken for a smaller one."""
    whole = encode_assignment(partitions)
    without_user_data = len(whole) - 4
    cut = data.draw(st.integers(1, without_user_data - 1))
    with pytest.raises(errors.CorruptRecord):
        decode_assignment(whole[:cut])
