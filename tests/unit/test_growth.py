"""Growth watches: notified exactly when partitions have grown by enough, and cheap before that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.log.growth import Growth, GrowthWatch


@given(
    st.integers(1, 5),
    st.integers(1, 2_000),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=60),
    st.integers(0, 60),
)
def test_a_watch_is_notified_exactly_when_the_bytes_are_there(
    partitions: int, lacking: int, grown: list[tuple[int, int]], begins: int
) -> None:
    """A watch is notified exactly once, also for bytes before its start, and leaves nothing."""
    growths = [Growth() for _ in range(partitions)]
    notified: list[int] = []
    total = 0
    watch = GrowthWatch([(each, 0) for each in growths], lacking, lambda: notified.append(total))
    started = False
    for step, (number, size) in enumerate(grown):
        if step == begins:
            watch.start()
            started = True
            assert len(notified) == (total >= lacking)
        total += size
        growths[number % partitions].add(size, step)
        assert len(notified) == (started and total >= lacking)
    watch.stop()
    assert not any(len(each) for each in growths)


def test_a_growing_partition_checks_few_watches() -> None:
    """A flush checks few watches, or its cost would rise with the number of waiting clients."""
    growth, checks = Growth(), 0

    class Counted(GrowthWatch):
        def used_up(self, growth: Growth) -> None:
            nonlocal checks
            checks += 1
            super().used_up(growth)

    watches = [Counted([(growth, 0)], 1 << 30, lambda: None) for _ in range(100)]
    for each in watches:
        each.start()
    for _ in range(10_000):
        growth.add(100, 0)
    assert checks == 0
    growth.add(1 << 30, 0)
    assert (checks, len(growth)) == (100, 0)


def test_a_watch_of_many_partitions_is_checked_rarely() -> None:
    """Each round halves the missing bytes, so 64,000 steps of one byte check the watch rarely."""
    growths, checks, notified = [Growth() for _ in range(10)], 0, []

    class Counted(GrowthWatch):
        def used_up(self, growth: Growth) -> None:
            nonlocal checks
            checks += 1
            super().used_up(growth)

    Counted([(each, 0) for each in growths], 64_000, lambda: notified.append(1)).start()
    for step in range(63_999):
        growths[step % 10].add(1, step)
    assert not notified
    growths[0].add(1, 0)
    assert notified
    assert checks < 400


def test_a_watch_of_a_deleted_topic_is_notified() -> None:
    """A watch is notified if its topic is deleted, or was recreated since it was looked at."""
    notified: list[str] = []
    gone, again = Growth(), Growth()
    GrowthWatch([(gone, 0)], 10, lambda: notified.append("gone")).start()
    gone.close()
    GrowthWatch([(again, 5)], 10, lambda: notified.append("again")).start()
    assert notified == ["gone", "again"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=3_000), st.integers(-5, 3_005))
def test_bytes_from_an_offset_are_known_closely(sizes: list[int], wanted: int) -> None:
    """The result is never less than the bytes that exist, and not much more."""
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
