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


def room(ahead: Ahead) -> int:
    """As much as anybody could be given, in batches."""
    with ahead.reserved(1_000 * BATCH_BYTES) as found:
        return found // BATCH_BYTES


def test_a_run_goes_on_where_the_last_one_ended(ahead: Ahead) -> None:
    """Within its limit, but for the first batch."""
    batches = made(5, 4)
    ahead.put(PLACE, 5, batches)
    assert ahead.run(PLACE, 5, limit_bytes=25) == batches[:2]
    assert ahead.run(PLACE, 25, limit_bytes=1) == [batches[2]]
    assert ahead.run(PLACE, 35, limit_bytes=1_000) == [batches[3]]
    assert ahead.run(PLACE, 45, limit_bytes=1_000) == []
    assert ahead.run(("id", 1), 5, limit_bytes=1_000) == []
    assert ahead.run(PLACE, 7, limit_bytes=1_000) == [], "no batch begins in the middle"


def test_what_was_given_out_serves_the_next_reader_until_room_is_wanted(ahead: Ahead) -> None:
    """The one given out first goes first."""
    ahead.put(PLACE, 0, made(0, 6))
    ahead.run(PLACE, 0, limit_bytes=1_000)
    assert room(ahead) == 10
    assert len(ahead.run(PLACE, 0, limit_bytes=1_000)) == 6
    ahead.put(("other", 0), 0, made(0, 6))
    kept = [bool(ahead.run(PLACE, first, limit_bytes=1)) for first in range(0, 60, 10)]
    assert kept == [False, False, True, True, True, True]


def test_what_nobody_has_asked_for_is_not_thrown_away(ahead: Ahead) -> None:
    """Or many readers at once would have each batch made again and again."""
    ahead.put(PLACE, 0, made(0, 8))
    assert room(ahead) == 2
    ahead.put(("other", 0), 0, made(0, 8))
    assert len(ahead.run(PLACE, 0, limit_bytes=10)) == 1
    assert len(ahead.run(PLACE, 10, limit_bytes=1_000)) == 7
    assert len(ahead.run(("other", 0), 0, limit_bytes=1_000)) == 2


@pytest.mark.parametrize("given_out", [False, True])
def test_nothing_is_kept_for_long(ahead: Ahead, clock: ManualClock, given_out: bool) -> None:
    """What was read then may have left the table since; being asked for makes it no younger."""
    ahead.put(PLACE, 0, made(0, 8))
    clock.advance(9)
    if given_out:
        assert len(ahead.run(PLACE, 0, limit_bytes=1_000)) == 8
        ahead.put(PLACE, 100, made(100, 1))
        ahead.run(PLACE, 100, limit_bytes=1_000)
        assert len(ahead.run(PLACE, 0, limit_bytes=1_000)) == 8
    clock.advance(1)
    assert ahead.run(PLACE, 0, limit_bytes=1_000) == []
    assert room(ahead) == 10


def test_room_is_given_to_one_reader_at_a_time(ahead: Ahead) -> None:
    """Or all who read at once would fill the same room, each for himself."""
    with ahead.reserved(7 * BATCH_BYTES) as first, ahead.reserved(7 * BATCH_BYTES) as second:
        assert (first, second) == (7 * BATCH_BYTES, 3 * BATCH_BYTES)
        assert room(ahead) == 0
        ahead.put(PLACE, 0, made(0, 10))
        assert room(ahead) == 0
    ahead.run(PLACE, 0, limit_bytes=1_000)
    assert room(ahead) == 10


_Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "run", "wait"]), st.integers(0, 5), st.integers(1, 40)),
        max_size=60,
    )
)
def test_it_holds_no_more_than_it_may(steps: list[_Step]) -> None:
    """And what it gives is in order, and within the limit that was asked for."""
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
            assert sum(len(each.batch) for each in found[1:]) <= size
            assert [each.end for each in found] == [10 * (at + n + 1) for n in range(len(found))]
        held = [*ahead._waiting._held.values(), *ahead._given._held.values()]
        assert sum(each.size for each, _ in held) <= limit_bytes
        assert not ahead._waiting._held.keys() & ahead._given._held.keys()
        assert 0 <= room(ahead) <= limit_bytes // BATCH_BYTES
