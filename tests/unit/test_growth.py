"""Who waits for partitions to grow is told exactly when they have, and costs nothing before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.growth import Growth, Watch


@given(
    st.integers(1, 5),
    st.integers(1, 2_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=60),
    st.integers(0, 60),
)
def test_a_watch_is_told_exactly_when_the_bytes_are_there(
    partitions: int, lacking: int, grown: list[tuple[int, int]], begins: int
) -> None:
    """Wherever they come, also before it waits; once, and nothing is left of it then."""
    growths = [Growth() for _ in range(partitions)]
    told: list[int] = []
    total = 0
    watch = Watch([(each, 0) for each in growths], lacking, lambda: told.append(total))
    started = False
    for step, (number, size) in enumerate(grown):
        if step == begins:
            watch.start()
            started = True
            assert len(told) == (total >= lacking)
        total += size
        growths[number % partitions].add(size, step)
        assert len(told) == (started and total >= lacking)
    watch.stop()
    assert not any(len(each) for each in growths)


def test_a_partition_that_grows_looks_at_few_of_those_who_wait() -> None:
    """Or each flush would cost as much as there are clients that wait for much."""
    growth, looks = Growth(), 0

    class Counted(Watch):
        def used_up(self, growth: Growth) -> None:
            nonlocal looks
            looks += 1
            super().used_up(growth)

    watches = [Counted([(growth, 0)], 1 << 30, lambda: None) for _ in range(100)]
    for each in watches:
        each.start()
    for _ in range(10_000):
        growth.add(100, 0)
    assert looks == 0
    growth.add(1 << 30, 0)
    assert (looks, len(growth)) == (100, 0)


def test_a_watch_of_many_partitions_is_looked_at_rarely() -> None:
    """Rounds halve what is lacking: of 64,000 bytes in steps of one few are looked at."""
    growths, looks, told = [Growth() for _ in range(10)], 0, []

    class Counted(Watch):
        def used_up(self, growth: Growth) -> None:
            nonlocal looks
            looks += 1
            super().used_up(growth)

    Counted([(each, 0) for each in growths], 64_000, lambda: told.append(1)).start()
    for step in range(63_999):
        growths[step % 10].add(1, step)
    assert not told
    growths[0].add(1, 0)
    assert told
    assert looks < 400


def test_who_waits_for_what_ends_is_told() -> None:
    """A topic that is deleted, and one that was made again since it was looked at."""
    told: list[str] = []
    gone, again = Growth(), Growth()
    Watch([(gone, 0)], 10, lambda: told.append("gone")).start()
    gone.end()
    Watch([(again, 5)], 10, lambda: told.append("again")).start()
    assert told == ["gone", "again"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=3_000), st.integers(-5, 3_005))
def test_bytes_from_an_offset_are_known_closely(sizes: list[int], wanted: int) -> None:
    """Never fewer than there are, and few more, however long it has grown."""
    growth = Growth()
    for number, size in enumerate(sizes):
        growth.add(size, 100 + number)
    offset = 100 + wanted
    found = growth.bytes_from(offset)
    if wanted < 0:
        assert found is None
        return
    there = sum(sizes[wanted:])
    assert found is not None
    assert there <= found <= there + 50 + sum(sizes) / 100
