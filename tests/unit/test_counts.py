"""Counts of the broker: distributions and their quantiles."""

from __future__ import annotations

import pytest

from sparklog.broker.counts import Distribution, RecentQuantiles, TopicCounts


def test_numbers_fall_into_buckets_of_an_eighth() -> None:
    """The quantile of a single number is within a sixteenth of it."""
    for value in [*range(300), 1_000, 12_345, 999_999, 2**30 + 1]:
        found = Distribution()
        found.add(value)
        (middle,) = RecentQuantiles(found).at(0.0, [0.5])
        assert abs(middle - value) <= value / 16, value
        assert (found.count, found.total) == (1, value)


def test_counts_below_powers_of_two_are_exact() -> None:
    """The buckets of a histogram are exact, because they end at powers of two."""
    found = Distribution()
    for value in range(1_000):
        found.add(value)
    assert [found.below(power) for power in range(11)] == [*(2**n for n in range(10)), 1_000]


def test_numbers_out_of_range_are_counted() -> None:
    """Negative numbers count as 0, and huge ones in the last bucket."""
    found = Distribution()
    found.add(-5)
    found.add(2**60)
    assert (found.count, found.total, found.below(0)) == (2, 2**60, 1)


def test_quantiles_are_those_of_the_last_minute() -> None:
    """Older numbers do not count, however many they are."""
    found = Distribution()
    recent = RecentQuantiles(found)
    assert recent.at(0.0, [0.5, 0.99]) == [0.0, 0.0]
    for _ in range(1_000):
        found.add(3)
    assert recent.at(10.0, [0.5, 0.99]) == [3.0, 3.0]
    for value in (7, 7, 7, 9):
        found.add(value)
    for seconds in range(20, 75, 10):
        recent.at(float(seconds), [0.5])
    assert recent.at(75.0, [0.5, 0.75, 1.0]) == [7.0, 7.0, 9.0]


@pytest.mark.parametrize("seconds", [10.0, 65.0, 1_000.0])
def test_quantiles_need_no_regular_reader(seconds: float) -> None:
    """A reader that comes seldom gets the numbers since its last time."""
    found = Distribution()
    recent = RecentQuantiles(found)
    found.add(1)
    recent.at(0.0, [0.5])
    found.add(5)
    assert recent.at(seconds, [0.5]) == [1.0 if seconds < 60 else 5.0]


def test_counts_of_topics_add_up() -> None:
    """Every count is in the sum."""
    total, topic = TopicCounts(), TopicCounts()
    for number, name in enumerate(TopicCounts.__slots__):
        setattr(topic, name, number + 1)
    total.add(topic)
    total.add(topic)
    assert [getattr(total, name) for name in TopicCounts.__slots__] == [2, 4, 6, 8, 10, 12, 14]
