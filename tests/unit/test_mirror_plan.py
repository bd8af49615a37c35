"""The plan of a mirror: names, faults, configuration and the offsets of a round."""

from __future__ import annotations

import re
from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sparklog.formats.topic_config import PUBLISH_INTERVAL
from sparklog.jobs.mirroring.plan import (
    Bounds,
    Pair,
    Range,
    Selection,
    SourceTopic,
    TargetTopic,
    config_changes,
    goal_of,
    is_reached,
    ranges,
    split_config,
)
from sparklog.jobs.ranges import fair_shares

CLUSTER = "kafka:c"
ORIGIN = "kafka:c/id/orders"


def source(*partitions: tuple[int, int], topic: str = "orders") -> SourceTopic:
    """A topic with the log start and end of each partition."""
    bounds = {number: Bounds(*each) for number, each in enumerate(partitions)}
    return SourceTopic(topic=topic, topic_id="id", partitions=bounds)


def target(*ends: int, origin: str | None = ORIGIN) -> TargetTopic:
    """A topic with these ends."""
    bounds = {number: Bounds(0, end) for number, end in enumerate(ends)}
    return TargetTopic(topic="orders", origin=origin, config={}, partitions=bounds)


def pair(found: SourceTopic, target: TargetTopic | None) -> Pair:
    """Both sides under one name."""
    return Pair(source=found, cluster=CLUSTER, name=found.topic, target=target)


# ------------------------------------------------------------------------------ names


def test_a_selection_matches_whole_names_and_renames_them() -> None:
    """The first expression that matches gives the name; others keep theirs."""
    selection = Selection(
        topics=re.compile("orders.*|sales"),
        exclude=re.compile(".*-dlq"),
        renames=[(re.compile("orders-(.*)"), r"\1.orders"), (re.compile("orders-eu"), "never")],
    )
    topics = ["sales", "orders-eu", "orders-dlq", "more-orders", "presales"]
    assert selection.names(topics) == ({"orders-eu": "eu.orders", "sales": "sales"}, {})


def test_topics_without_a_name_of_their_own_are_faults() -> None:
    """The first of two topics gets the name; another has one that no topic may have."""
    renames = [(re.compile("[ab]"), "one"), (re.compile("c"), "c c")]
    names, faults = Selection(topics=re.compile(".*"), renames=renames).names(["c", "b", "a", "d"])
    assert names == {"a": "one", "d": "d"}
    assert faults.keys() == {"b", "c"}
    assert "it and 'a' would both be 'one'" in faults["b"]
    assert "'c c' is invalid" in faults["c"]


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("partitions", "found", "words"),
    [
        ([(0, 5)], target(3, origin=None), "is not a mirror"),
        ([(0, 5)], target(3, origin="kafka:c/old/orders"), "deleted and created again"),
        ([(0, 5)], target(3, origin="kafka:d/id/orders"), "mirror of another topic"),
        ([(0, 5)], target(3, origin="somebody else's"), "mirror of another topic"),
        ([(0, 5)], target(3, 0), "has 2 partitions, the source only 1"),
        ([(0, 5)], target(0, 0, origin=None), "has 2 partitions, the source only 1"),
        ([(0, 5)], target(6), "has lost records"),
        ([(4, 5)], target(3), "deleted offsets 3 to 3 of partition 0"),
    ],
)
def test_a_fault_is_named(
    partitions: list[tuple[int, int]], found: TargetTopic, words: str
) -> None:
    """A topic that cannot be mirrored has a reason."""
    reason = pair(source(*partitions), found).fault(skips_deleted=False)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("partitions", "found"),
    [
        ([(0, 5)], None),
        ([(7, 9)], target(0)),  # a mirror that has just begun
        ([(7, 9)], target(0, origin=None)),  # an empty topic becomes a mirror
        ([(0, 5), (0, 0)], target(5)),  # a new partition
        ([(3, 5)], target(3)),
    ],
)
def test_a_topic_without_a_fault(
    partitions: list[tuple[int, int]], found: TargetTopic | None
) -> None:
    """An empty target, a new partition and a log start that moved are none."""
    assert pair(source(*partitions), found).fault(skips_deleted=False) is None


def test_deleted_records_may_be_skipped() -> None:
    """The gap belongs to the next range, which is read from the log start on."""
    behind = pair(source((4, 9)), target(3))
    assert behind.fault(skips_deleted=True) is None
    assert ranges([behind], 100) == {"orders": {0: Range(first=3, until=9, start=4)}}
    assert behind.lag == 5


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (target(5, 7, origin=None), True),
        (target(6, 7, origin=None), True),
        (target(4, 7, origin=None), False),
        (target(5, 7), False),
        (target(0, 0, origin=None), False),
        (None, False),
    ],
)
def test_a_topic_that_was_cut_over(found: TargetTopic | None, *, expected: bool) -> None:
    """It is not a mirror and has all offsets of its source."""
    assert pair(source((0, 5), (2, 7)), found).was_cut_over is expected


# ------------------------------------------------------------------------------ configuration


def test_a_configuration_is_split() -> None:
    """Keys and values that topics here have are taken; those that Kafka lacks are not copied."""
    own = {
        "retention.ms": "1000",
        "remote.storage.enable": "true",
        "confluent.key": "1",
        "mirror.source": "kafka:c/id/t",
        "publish.interval.ms": "5",
        "value.format": "json",
        "value.schema": "a STRING",
    }
    assert split_config(own) == (
        {"retention.ms": "1000"},
        ["confluent.key", "remote.storage.enable"],
    )


def test_changes_make_a_configuration_the_wanted_one() -> None:
    """Values are set, and those of other keys go back to their defaults."""
    changes = config_changes({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "3", "d": "4"})
    assert changes == {"b": "3", "c": None, "d": "4"}


def test_the_publish_interval_of_a_target_stays() -> None:
    """A Kafka topic cannot have one, so it says nothing about it; another sparklog's can."""
    assert config_changes({PUBLISH_INTERVAL: "5", "retention.ms": "1"}, {}) == {
        "retention.ms": None
    }
    assert config_changes({PUBLISH_INTERVAL: "5"}, {PUBLISH_INTERVAL: "6"}) == {
        PUBLISH_INTERVAL: "6"
    }


# ------------------------------------------------------------------------------ ranges


def test_a_round_is_shared_among_partitions() -> None:
    """Those with little to copy leave their share to the others."""
    both = pair(source((0, 2), (0, 100), (0, 100)), None)
    parts = ranges([both], 22)["orders"]
    assert parts == {0: Range(0, 2, 0), 1: Range(0, 10, 0), 2: Range(0, 10, 0)}


def test_a_partition_whose_records_are_all_deleted_is_covered() -> None:
    """Its range has no records, so that the target's end becomes that of the source."""
    assert ranges([pair(source((7, 7)), None)], 10) == {"orders": {0: Range(0, 7, 7)}}


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 100), st.integers(0, 150)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 60),
)
def test_rounds_reach_the_ends(states: list[tuple[int, int, int]], limit: int) -> None:
    """Ranges continue the target without gap or overlap, have a bounded size, and end."""
    partitions = [(start, start + size) for start, size, _ in states]
    ends = [min(at, end) for (_, end), (_, _, at) in zip(partitions, states, strict=True)]
    found = source(*partitions)
    goal = goal_of([pair(found, None)])
    for _ in range(1_000):
        both = pair(found, target(*ends))
        parts: Mapping[int, Range] = ranges([both], limit, goal).get("orders", {})
        assert is_reached([both], goal) == (not parts)
        if not parts:
            break
        assert sum(each.until - each.start for each in parts.values()) <= max(limit, len(ends))
        for number, each in parts.items():
            assert each.first == ends[number]
            assert each.first <= each.start <= each.until
            assert each.start >= partitions[number][0]
            assert each.first < each.until
            ends[number] = each.until
    assert ends == [end for _, end in partitions]


@pytest.mark.parametrize(
    ("sizes", "most", "shares"),
    [
        ([10, 10], 10, [5, 5]),
        ([1, 100, 3], 54, [1, 50, 3]),
        ([0, 7], 5, [0, 5]),
        ([4, 4, 4], 2, [1, 1, 1]),
        ([2, 3], 100, [2, 3]),
        ([], 5, []),
    ],
)
def test_shares_are_fair(sizes: list[int], most: int, shares: list[int]) -> None:
    """Those with less leave theirs to the others, and each advances."""
    assert fair_shares(sizes, most) == shares
