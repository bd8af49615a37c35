"""Descriptions of partitions for administrators: leader epochs, sizes, producers."""

from __future__ import annotations

import pytest

from sparklog import errors
from sparklog.broker.log.partition import LEADER_EPOCHS_REMEMBERED
from sparklog.broker.log.producer_state import ProducerState, SequencedBatch
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore
from tests.support import tables
from tests.support.brokers import Rig

LENGTHS = (3, 2, 4)
"""Records of the epochs 0, 1 and 2."""


def rig_of_three_epochs(*, published_after: int | None = None) -> Rig:
    """Returns a broker in epoch 2; records up to the end of one epoch may be in the table."""
    clock = tables.manual_clock()
    assert isinstance(clock, ManualClock)
    rig = Rig(MemoryStore(clock), clock)
    rig.create()
    for epoch, count in enumerate(LENGTHS):
        rig = rig.successor() if epoch else rig
        for _ in range(count):
            rig.append(["v"])
        if epoch == published_after:
            rig.publish()
    return rig


def ends(rig: Rig) -> list[tuple[int, int]]:
    """Returns the answers for the epochs 0 to 3."""
    return [rig.broker.partitions.epoch_end("t", 0, epoch) for epoch in range(4)]


def test_ends_of_epochs_that_wait_for_the_table_are_exact() -> None:
    """The write-ahead log names the epoch of every entry."""
    assert ends(rig_of_three_epochs()) == [(0, 3), (1, 5), (2, 9), (-1, -1)]


@pytest.mark.parametrize("published_after", [0, 1, 2])
def test_ends_of_epochs_outlive_the_write_ahead_log(published_after: int) -> None:
    """Checkpoints have the beginnings of leader epochs, whose entries are published and gone."""
    rig = rig_of_three_epochs(published_after=published_after)
    assert ends(rig) == [(0, 3), (1, 5), (2, 9), (-1, -1)]
    rig.publish()
    rig.trim()
    assert ends(rig.successor()) == [(0, 3), (1, 5), (2, 9), (3, 9)]


def test_an_epoch_without_records_ends_where_the_one_before_it_ends() -> None:
    """The answer names that one, as in Kafka."""
    rig = rig_of_three_epochs().successor().successor()
    assert rig.broker.partitions.epoch_end("t", 0, 3) == (2, 9)
    assert rig.broker.partitions.epoch_end("t", 0, 4) == (4, 9)
    rig.append(["v"])
    assert rig.broker.partitions.epoch_end("t", 0, 3) == (2, 9)
    assert rig.broker.partitions.epoch_end("t", 0, 4) == (4, 10)


def test_the_newest_epochs_are_remembered() -> None:
    """The end of an older one may be too high, and never too low."""
    rig = rig_of_three_epochs()
    for _ in range(LEADER_EPOCHS_REMEMBERED):
        rig = rig.successor()
        rig.append(["v"])
    newest = 2 + LEADER_EPOCHS_REMEMBERED
    assert rig.broker.partitions.epoch_end("t", 0, 1) == (1, 9)
    assert rig.broker.partitions.epoch_end("t", 0, 0) == (0, 9)
    assert rig.broker.partitions.epoch_end("t", 0, newest - 1) == (newest - 1, rig.end() - 1)


def test_a_new_partition_knows_its_own() -> None:
    """It begins at 0, and its end rises."""
    rig = rig_of_three_epochs()
    rig.create("u")
    assert rig.broker.partitions.epoch_end("u", 0, 0) == (0, 0)
    rig.append(["v"], topic="u")
    assert rig.broker.partitions.epoch_end("u", 0, 0) == (0, 1)
    assert rig.broker.partitions.epoch_end("u", 0, 1) == (-1, -1)
    assert rig.broker.partitions.epoch_end("u", 0, -1) == (-1, -1)


def test_who_means_another_epoch_is_told() -> None:
    """One that is over, and one that is to come."""
    rig = rig_of_three_epochs()
    for fine in (-1, 2):
        rig.broker.partitions.check_leader_epoch("t", 0, fine)
    with pytest.raises(errors.FencedLeaderEpoch):
        rig.broker.partitions.check_leader_epoch("t", 0, 1)
    with pytest.raises(errors.UnknownLeaderEpoch):
        rig.broker.partitions.check_leader_epoch("t", 0, 3)


def test_a_partition_takes_what_waits_and_what_is_in_the_table() -> None:
    """Bytes of records in the write-ahead log, then of files; nothing of a deleted topic."""
    clock = tables.manual_clock()
    rig = Rig(MemoryStore(clock), clock)
    rig.create("t", 2)
    rig.create("u")
    assert rig.broker.partitions.log_bytes() == {"t": {0: 0, 1: 0}, "u": {0: 0}}
    rig.append(["v" * 1_000], partition=1)
    waiting = rig.broker.partitions.log_bytes()["t"]
    assert waiting[0] == 0
    assert 1_000 < waiting[1] < 2_000
    rig.publish()
    table_bytes = rig.broker.topics.describe("t").table_bytes
    assert rig.broker.partitions.log_bytes()["t"] == {0: 0, 1: table_bytes}
    rig.append(["v" * 1_000], partition=1)
    assert rig.broker.partitions.log_bytes()["t"] == {0: 0, 1: table_bytes + waiting[1]}
    rig.broker.topics.delete("t")
    assert rig.broker.partitions.log_bytes() == {"u": {0: 0}}


def test_the_producers_of_a_partition() -> None:
    """By their ids, each with its newest epoch and sequence, which wraps, and its time."""
    clock = tables.manual_clock()
    assert isinstance(clock, ManualClock)
    rig = Rig(MemoryStore(clock), clock)
    rig.create("t", 2)
    rig.append(["v"] * 3, producer_sequence=(9, 0, 0))
    rig.append(["v"] * 2, producer_sequence=(9, 0, 3))
    rig.append(["v"], producer_sequence=(9, 1, 0))
    began_us = clock.now_us()
    clock.advance(1)
    rig.append(["v"] * 4, producer_sequence=(8, 0, 0))
    found = [
        (each.producer_id, each.epoch, each.last_sequence, each.last_us)
        for each in rig.successor().broker.partitions.producers("t", 0)
    ]
    assert found == [(8, 0, 3, clock.now_us()), (9, 1, 0, began_us)]
    assert not rig.broker.partitions.producers("t", 1)
    with pytest.raises(errors.UnknownPartition):
        rig.broker.partitions.producers("t", 2)
    wrapped = ProducerState(0, (SequencedBatch(2**31 - 2, 2, 0, 0),))
    assert wrapped.last_sequence == 2**31 - 1
