"""Tails of partitions: what wakes them, and what they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sparklog import errors
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.tailing import Tail
from sparklog.broker.log.topic import Topic
from tests.support.tables import no_table


class Log:
    """Led partitions of one topic, whose records are the numbers of their offsets."""

    def __init__(self, partitions: int) -> None:
        self.table = LedPartitions(1)
        self.topic = Topic("t", "id", {}, no_table())
        for number in range(partitions):
            added = Partition(number, leader_epoch=0, start=0, published=0)
            self.topic.partitions[number] = added
        self.table.add_topic(self.topic)
        self.reads: Counter[int] = Counter()
        self.is_quick = True

    def append(self, number: int, count: int = 1) -> None:
        """Appends records to a partition."""
        self.table.exclusively(lambda each: self._append(each, count), [number])

    def _append(self, number: int, count: int) -> None:
        partition = self.topic.partitions[number]
        base, partition.end = partition.end, partition.end + count
        partition.growth.add(count, base)

    def tail(self, numbers: list[int], wakes: list[None]) -> Tail:
        """A tail from the beginning of some partitions."""
        return Tail(
            self.table,
            [(self.topic, self.topic.partitions[number]) for number in numbers],
            [0] * len(numbers),
            self._next_batches,
            lambda: wakes.append(None),
        )

    def _next_batches(
        self, topic: Topic, partition: Partition, start: int, end: int
    ) -> tuple[Iterator[Any], bool]:
        assert topic is self.topic
        self.reads[partition.number] += 1
        return iter([cast("Any", Batch(partition.number, start, end))]), self.is_quick


class Batch:
    """A batch of offsets."""

    def __init__(self, partition: int, first: int, end: int) -> None:
        self.partition, self.first, self.end = partition, first, end


def drained(tail: Tail) -> list[tuple[int, int, int]]:
    """Everything that the tail has now, as (partition, first, end)."""
    found = []
    while (batch := cast("Any", tail.next())) is not None:
        found.append((batch.partition, batch.first, batch.end))
    return found


def test_a_flush_wakes_the_tails_of_its_partitions_only() -> None:
    """Each is woken once for each flush, and reads no other partition again."""
    log = Log(2)
    wakes: list[list[None]] = [[], []]
    tails = [log.tail([number], wakes[number]) for number in range(2)]
    for tail in tails:
        assert drained(tail) == []
    log.append(1)
    assert [len(each) for each in wakes] == [0, 1]
    assert drained(tails[1]) == [(1, 0, 1)]
    log.append(1, 2)
    assert drained(tails[1]) == [(1, 1, 3)]
    assert (log.reads, [len(each) for each in wakes]) == ({1: 2}, [0, 2])
    for tail in tails:
        tail.close()
    log.append(0)
    log.append(1)
    assert [len(each) for each in wakes] == [0, 2]


def test_a_tail_of_many_partitions_looks_at_those_that_have_grown() -> None:
    """Partitions without records cost nothing; those with records have turns."""
    log = Log(1_000)
    tail = log.tail(list(range(1_000)), [])
    assert drained(tail) == []
    for number in (7, 3, 7):
        log.append(number)
    assert drained(tail) == [(7, 0, 2), (3, 0, 1)]
    assert log.reads == {7: 1, 3: 1}


def test_records_that_come_while_a_batch_is_read_are_not_missed() -> None:
    """They are read after the other partitions."""
    log = Log(2)
    tail = log.tail([0, 1], [])
    log.append(0)
    log.append(1)
    first = cast("Any", tail.next())
    log.append(0)
    assert (first.partition, first.end) == (0, 1)
    assert drained(tail) == [(1, 0, 1), (0, 1, 2)]


def test_a_tail_skips_what_its_caller_has() -> None:
    """Skipped records are not read."""
    log = Log(1)
    tail = log.tail([0], [])
    log.append(0, 5)
    place = tail.place()
    assert place == ("id", 0, 0, 5)
    tail.skip(3)
    assert drained(tail) == [(0, 3, 5)]
    assert tail.place() is None


def test_slow_reads_are_told_from_quick_ones() -> None:
    """A tail at its end is quick."""
    log = Log(1)
    log.is_quick = False
    tail = log.tail([0], [])
    assert tail.is_quick()
    log.append(0)
    assert not tail.is_quick()
    assert drained(tail) == [(0, 0, 1)]
    assert tail.is_quick()


def test_a_deleted_topic_ends_its_tails() -> None:
    """They are woken to notice it."""
    log = Log(1)
    wakes: list[None] = []
    tail = log.tail([0], wakes)
    assert drained(tail) == []
    log.table.remove_topic(log.topic)
    assert wakes
    with pytest.raises(errors.UnknownTopic):
        tail.next()
