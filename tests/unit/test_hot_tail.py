"""The hot tail: which batches it returns, and which it evicts."""

from __future__ import annotations

import pytest

from sparklog.broker.log.hot_tail import HotBatch, HotTail
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore
from tests.support.batches import Record, built
from tests.support.brokers import Rig, RigOptions

pytestmark = pytest.mark.rig(topics={"t": 2})

BATCHES = 5
ROWS = 2
"""Records per batch."""
BYTES = 1 << 20


@pytest.fixture(name="rig")
def _rig(rig: Rig) -> Rig:
    for number in range(BATCHES):
        rig.append([f"{number}"] * ROWS)
    return rig


def run(rig: Rig, offset: int = 0, *, rows: int = 100, **bounds: int | bool | None) -> list[int]:
    """The base offsets of consecutive batches from `offset` on."""
    given = {"limit_bytes": BYTES, **bounds}
    topic_id = rig.led_partitions.topic("t").topic_id
    found: list[HotBatch] = rig.hot.run(topic_id, 0, offset, rows=rows, **given)  # type: ignore[arg-type]
    return [each.entry.base_offset for each in found]


def test_a_run_begins_with_a_batch_and_ends_with_the_last(rig: Rig) -> None:
    """A run is empty where no batch begins, and in another partition."""
    assert run(rig) == [0, 2, 4, 6, 8]
    assert run(rig, 6) == [6, 8]
    assert run(rig, 5) == run(rig, 10) == []
    assert rig.hot.run("another", 0, 0, rows=1, limit_bytes=BYTES) == []


@pytest.mark.parametrize(
    ("bounds", "batches"),
    [
        ({"rows": 0}, 0),
        ({"rows": 1}, 1),
        ({"rows": ROWS}, 1),
        ({"rows": ROWS + 1}, 2),
        ({"most_batches": 0}, 0),
        ({"most_batches": 3}, 3),
        ({"rows": 1, "most_batches": 3}, 1),
        ({"rows": 100, "most_batches": 1}, 1),
        ({"limit_bytes": 1}, 1),
    ],
)
def test_each_bound_of_a_run_holds(rig: Rig, bounds: dict[str, int], batches: int) -> None:
    """A run ends at the first bound of rows, batches and bytes, but has at least one batch."""
    assert run(rig, **bounds) == [ROWS * number for number in range(batches)]


def test_a_run_may_be_as_large_as_its_limit(rig: Rig) -> None:
    """A run may reach its limit exactly; a limit that is one byte less has one batch less."""
    topic_id = rig.led_partitions.topic("t").topic_id
    two = rig.hot.run(topic_id, 0, 0, rows=2 * ROWS, limit_bytes=BYTES)
    size = sum(each.entry.memory_bytes for each in two)
    assert run(rig, limit_bytes=size) == [0, 2]
    assert run(rig, limit_bytes=size - 1) == [0]


def test_a_run_of_kafkas_batches_ends_before_rows(rig: Rig) -> None:
    """A run of Kafka batches ends before a batch that is stored as Arrow columns."""
    batch = built([Record(1, None, b"v")], 0)
    for _ in range(2):
        rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka("t", 0, batch)))
    rig.append(["rows"])
    assert run(rig, 10, only_kafka=True) == [10, 11]
    assert run(rig, 10, only_kafka=True, limit_bytes=2 * len(batch)) == [10, 11]
    assert run(rig, 10, only_kafka=True, limit_bytes=2 * len(batch) - 1) == [10]
    assert run(rig, 10) == [10, 11, 12]
    assert run(rig, only_kafka=True) == []


def test_the_oldest_batches_are_evicted_first() -> None:
    """The oldest batches of all partitions are evicted when the limit is exceeded."""
    clock = ManualClock()
    first = Rig(MemoryStore(clock), clock)
    first.create("t", 2)
    for number in range(3):
        first.append(["x" * 100], partition=number % 2)
    limit_bytes = first.hot.bytes
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(hot_bytes=limit_bytes))
    rig.create("t", 2)
    entries = []
    for number in range(5):
        rig.append(["x" * 100], partition=number % 2)
        entries.append(rig.led_partitions.topic("t").partition(number % 2).unpublished[-1].entry)
        assert rig.hot.bytes <= limit_bytes
    assert [rig.hot.find(each) is not None for each in entries] == [False, False, True, True, True]
    nothing = HotTail(limit_bytes=0)
    assert (nothing.bytes, nothing.find(entries[0])) == (0, None)
