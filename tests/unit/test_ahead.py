"""What is kept of Kafka's batches for who reads on: bounded, and never thrown away unused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.ahead import Ahead, Made
from sparklog.clock import ManualClock

PLACE = ("id", 0)
BATCH_BYTES = Made(bytearray(10), 0).size
"""What one of those takes that `made` makes."""


@pytest.fixture(name="clock")
def _clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(name="ahead")
def _ahead(clock: ManualClock) -> Ahead:
    return Ahead(limit_bytes=10 * BATCH_BYTES, clock=clock)


def made(first: int, count: int) -> list[Made]:
    """Batches of ten bytes and ten offsets each, from `first` on."""
    return [Made(bytearray([number] * 10), first + 10 * (number + 1)) for number in range(count)]


def test_a_run_goes_on_where_the_last_one_ended(ahead: Ahead) -> None:
    """Within its limit, but for the first batch."""
    batches = made(5, 4)
    ahead.put(PLACE, 5, batches)
    assert ahead.run(PLACE, 5, limit_bytes=25) == [each.batch for each in batches[:2]]
    assert ahead.run(PLACE, 25, limit_bytes=1) == [batches[2].batch]
    assert ahead.run(PLACE, 35, limit_bytes=1_000) == [batches[3].batch]
    assert ahead.run(PLACE, 45, limit_bytes=1_000) == []
    assert ahead.run(("id", 1), 5, limit_bytes=1_000) == []
    assert ahead.run(PLACE, 7, limit_bytes=1_000) == [], "no batch begins in the middle"


def test_what_was_given_out_serves_the_next_reader_until_room_is_wanted(ahead: Ahead) -> None:
    """The one given out first goes first."""
    ahead.put(PLACE, 0, made(0, 6))
    ahead.run(PLACE, 0, limit_bytes=1_000)
    assert ahead.room_bytes == 10 * BATCH_BYTES
    assert len(ahead.run(PLACE, 0, limit_bytes=1_000)) == 6
    ahead.put(("other", 0), 0, made(0, 6))
    assert [bool(ahead.run(PLACE, first, limit_bytes=1)) for first in range(0, 60, 10)] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_what_nobody_has_asked_for_is_not_thrown_away(ahead: Ahead, clock: ManualClock) -> None:
    """Or many readers at once would have each batch made again and again; but not for ever."""
    ahead.put(PLACE, 0, made(0, 8))
    assert ahead.room_bytes == 2 * BATCH_BYTES
    ahead.put(("other", 0), 0, made(0, 8))
    assert len(ahead.run(PLACE, 0, limit_bytes=10)) == 1
    assert len(ahead.run(PLACE, 10, limit_bytes=1_000)) == 7
    assert len(ahead.run(("other", 0), 0, limit_bytes=1_000)) == 2
    ahead.put(PLACE, 100, made(100, 8))
    clock.advance(9)
    assert ahead.room_bytes == 2 * BATCH_BYTES
    clock.advance(2)
    assert ahead.room_bytes == 10 * BATCH_BYTES
    ahead.put(("other", 0), 0, made(0, 10))
    assert len(ahead.run(("other", 0), 0, limit_bytes=1_000)) == 10
    assert ahead.run(PLACE, 100, limit_bytes=1_000) == []


_Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "run", "wait"]), st.integers(0, 5), st.integers(1, 40)),
        max_size=60,
    )
)
def test_it_holds_no_more_than_it_may(steps: list[_Step]) -> None:
    """And what it gives is what was put there, in order."""
    clock = ManualClock()
    limit_bytes = 5 * BATCH_BYTES
    ahead = Ahead(limit_bytes=limit_bytes, clock=clock)
    for step, at, size in steps:
        if step == "wait":
            clock.advance(size / 4)
        elif step == "put":
            batches = [Made(bytearray(size), 10 * (at + n + 1)) for n in range(3)]
            ahead.put(PLACE, 10 * at, batches)
        else:
            found = ahead.run(PLACE, 10 * at, limit_bytes=size)
            assert sum(map(len, found[1:])) <= size
        held = [*(made for made, _ in ahead._fresh.values()), *ahead._given.values()]
        size = sum(made.size for made in held)
        assert size == ahead._fresh_bytes + ahead._given_bytes <= limit_bytes
        assert not ahead._fresh.keys() & ahead._given.keys()
        assert 0 <= ahead.room_bytes <= limit_bytes
