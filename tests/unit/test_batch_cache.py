"""Read-ahead of encoded Kafka batches: bounded, and no batch is evicted before it is fetched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.log.batch_cache import BatchCache, EncodedBatch
from sparklog.clock import ManualClock

PARTITION = ("id", 0)
BATCH_BYTES = EncodedBatch(bytearray(10), 0).size
"""Memory of one batch that `batches_from` returns."""


@pytest.fixture(name="cache")
def _cache(clock: ManualClock) -> BatchCache:
    return BatchCache(limit_bytes=10 * BATCH_BYTES, clock=clock)


def batches_from(first: int, count: int) -> list[EncodedBatch]:
    """Batches of ten bytes and ten offsets each, from `first` on."""
    return [
        EncodedBatch(bytearray([number] * 10), first + 10 * (number + 1)) for number in range(count)
    ]


def free_batches(cache: BatchCache) -> int:
    """The free space that a reader can reserve, in batches."""
    with cache.reserve(1_000 * BATCH_BYTES) as found:
        return found // BATCH_BYTES


def test_a_run_continues_where_the_last_one_ended(cache: BatchCache) -> None:
    """A run ends at its byte limit, but has at least one batch."""
    batches = batches_from(5, 4)
    cache.put(PARTITION, 5, batches)
    assert cache.run(PARTITION, 5, limit_bytes=25) == batches[:2]
    assert cache.run(PARTITION, 25, limit_bytes=1) == [batches[2]]
    assert cache.run(PARTITION, 35, limit_bytes=1_000) == [batches[3]]
    assert cache.run(PARTITION, 45, limit_bytes=1_000) == []
    assert cache.run(("id", 1), 5, limit_bytes=1_000) == []
    assert cache.run(PARTITION, 7, limit_bytes=1_000) == [], "no batch begins in the middle"


def test_fetched_batches_serve_other_readers_until_space_is_needed(cache: BatchCache) -> None:
    """The batch that was fetched first is evicted first."""
    cache.put(PARTITION, 0, batches_from(0, 6))
    cache.run(PARTITION, 0, limit_bytes=1_000)
    assert free_batches(cache) == 10
    assert len(cache.run(PARTITION, 0, limit_bytes=1_000)) == 6
    cache.put(("other", 0), 0, batches_from(0, 6))
    kept = [bool(cache.run(PARTITION, first, limit_bytes=1)) for first in range(0, 60, 10)]
    assert kept == [False, False, True, True, True, True]


def test_a_batch_that_was_not_fetched_is_not_evicted(cache: BatchCache) -> None:
    """Otherwise many readers at once would have each batch encoded repeatedly."""
    cache.put(PARTITION, 0, batches_from(0, 8))
    assert free_batches(cache) == 2
    cache.put(("other", 0), 0, batches_from(0, 8))
    assert len(cache.run(PARTITION, 0, limit_bytes=10)) == 1
    assert len(cache.run(PARTITION, 10, limit_bytes=1_000)) == 7
    assert len(cache.run(("other", 0), 0, limit_bytes=1_000)) == 2


@pytest.mark.parametrize("given_out", [False, True])
def test_nothing_is_kept_for_long(cache: BatchCache, clock: ManualClock, given_out: bool) -> None:
    """A batch expires, because its rows may leave the table; a fetch does not renew it."""
    cache.put(PARTITION, 0, batches_from(0, 8))
    clock.advance(9)
    if given_out:
        assert len(cache.run(PARTITION, 0, limit_bytes=1_000)) == 8
        cache.put(PARTITION, 100, batches_from(100, 1))
        cache.run(PARTITION, 100, limit_bytes=1_000)
        assert len(cache.run(PARTITION, 0, limit_bytes=1_000)) == 8
    clock.advance(1)
    assert cache.run(PARTITION, 0, limit_bytes=1_000) == []
    assert free_batches(cache) == 10


def test_free_space_is_reserved_by_one_reader_at_a_time(cache: BatchCache) -> None:
    """Otherwise all readers at once would fill the same space."""
    with cache.reserve(7 * BATCH_BYTES) as first, cache.reserve(7 * BATCH_BYTES) as second:
        assert (first, second) == (7 * BATCH_BYTES, 3 * BATCH_BYTES)
        assert free_batches(cache) == 0
        cache.put(PARTITION, 0, batches_from(0, 10))
        assert free_batches(cache) == 0
    cache.run(PARTITION, 0, limit_bytes=1_000)
    assert free_batches(cache) == 10


_Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "run", "wait"]), st.integers(0, 5), st.integers(1, 40)),
        max_size=60,
    )
)
def test_the_cache_keeps_within_its_limit(steps: list[_Step]) -> None:
    """The cache keeps within its limit, and returns batches in order and within theirs."""
    clock = ManualClock()
    limit_bytes = 5 * BATCH_BYTES
    cache = BatchCache(limit_bytes=limit_bytes, clock=clock)
    for step, at, size in steps:
        if step == "wait":
            clock.advance(size / 4)
        elif step == "put":
            batches = [EncodedBatch(bytearray(size), 10 * (at + n + 1)) for n in range(3)]
            cache.put(PARTITION, 10 * at, batches)
        else:
            found = cache.run(PARTITION, 10 * at, limit_bytes=size)
            assert sum(len(each.batch) for each in found[1:]) <= size
            assert [each.end for each in found] == [10 * (at + n + 1) for n in range(len(found))]
        held = [*cache._unread._held.values(), *cache._fetched._held.values()]
        assert sum(each.size for each, _ in held) <= limit_bytes
        assert not cache._unread._held.keys() & cache._fetched._held.keys()
        assert 0 <= free_batches(cache) <= limit_bytes // BATCH_BYTES
