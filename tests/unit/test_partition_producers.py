"""Producer states of a broker: how long they are kept, over restarts, and at what cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sparklog import errors
from sparklog.broker.log.checkpoint_state import StateEncoder
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.producer_state import (
    PRODUCER_REFUSAL_SECONDS,
    PRODUCERS_PER_BLOCK,
    ProducerState,
    SequencedBatch,
)
from sparklog.broker.log.spark_batches import SparkBatch
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_cleaner import WalCleanerLimits
from sparklog.clock import ManualClock
from sparklog.storage.objects import Fault, MemoryStore, ScriptedFaults
from sparklog.storage.snapshot import BatchId, Entry, EntryKind, Located, WalPosition
from sparklog.storage.wal import WalObject
from tests.support.brokers import Rig, RigOptions
from tests.support.tables import no_table

DAY_SECONDS = 24 * 3600.0


class JumpingClock(ManualClock):
    """A clock whose wall time can be set, as an administrator or NTP does."""

    def set_forward(self, seconds: float) -> None:
        self._start_us += round(seconds * 1e6)


# Checkpoints are written only on request.
pytestmark = pytest.mark.rig(
    wal_cleaner=WalCleanerLimits(checkpoint_every_objects=10**9, checkpoint_every_seconds=1e9)
)


@pytest.fixture
def clock() -> JumpingClock:
    """A clock that advances only when the test says so."""
    return JumpingClock()


# ------------------------------------------------------------------------------ unknown ones


def test_a_producer_continues_after_a_quiet_day(rig: Rig, clock: JumpingClock) -> None:
    """After a day the state has expired, so any sequence counts as the producer's first."""
    rig.append(["a"] * 3, producer_sequence=(9, 0, 0))
    clock.advance(DAY_SECONDS + 1)
    rig.append(["other"])
    rig.wal_cleaner.checkpoint()
    assert not rig.broker.partitions.producers("t", 0)
    assert rig.append(["b"], producer_sequence=(9, 0, 3)).base_offset == 4
    assert rig.append(["c"], producer_sequence=(9, 0, 4)).base_offset == 5
    assert rig.append(["c"], producer_sequence=(9, 0, 4)).duplicate


def test_a_producer_continues_in_a_topic_that_was_created_again(rig: Rig) -> None:
    """A topic that was created again knows none of the producers of the old one."""
    rig.append(["a"] * 3, producer_sequence=(9, 0, 0))
    rig.broker.topics.delete("t")
    rig.create()
    assert rig.append(["b"], producer_sequence=(9, 0, 3)).base_offset == 0


@pytest.mark.parametrize("refusal", ["queue", "flush", "topic"])
def test_a_second_first_batch_waits_for_the_first(clock: JumpingClock, refusal: str) -> None:
    """Batches of an unknown producer wait for an earlier one that was refused for now."""
    store = MemoryStore(clock)
    bounds = WriterLimits(queue_bytes=1, topic_held_bytes=0)
    rig = Rig(store, clock, options=RigOptions(writer=bounds))
    topic = rig.create()
    if refusal == "queue":
        filling = rig.submit(["x"])
        with pytest.raises(errors.QueueFull):
            rig.submit(["a"], producer_sequence=(9, 0, 7))
        rig.broker.wait(filling)
    elif refusal == "flush":
        full = errors.StorageFull(root="r", free_bytes=0, reserve_bytes=1)
        usual = rig.append_to(store.view(ScriptedFaults(Fault(operation="put_new", error=full))))
        with pytest.raises(errors.StorageFull):
            rig.append(["a"], producer_sequence=(9, 0, 7))
        rig.append_to(usual)
    else:
        rig.append(["x"])
        topic.held_back = "its table is locked"
        with pytest.raises(errors.TopicHeldBack):
            rig.append(["a"], producer_sequence=(9, 0, 7))
        topic.held_back = None
    with pytest.raises(errors.OutOfOrderSequence):
        rig.append(["b"], producer_sequence=(9, 0, 8))
    first = rig.append(["a"], producer_sequence=(9, 0, 7))
    assert rig.append(["b"], producer_sequence=(9, 0, 8)).base_offset == first.base_offset + 1


def test_a_client_that_gives_up_is_not_kept_waiting(clock: JumpingClock) -> None:
    """The client continues with a new epoch, or with any sequence once retries have ended."""
    rig = Rig(MemoryStore(clock), clock, options=RigOptions(writer=WriterLimits(queue_bytes=1)))
    rig.create()
    for producer_id in (8, 9):
        filling = rig.submit(["x"])
        with pytest.raises(errors.QueueFull):
            rig.submit(["a"], producer_sequence=(producer_id, 0, 0))
        rig.broker.wait(filling)
    rig.append(["b"], producer_sequence=(8, 1, 0))
    with pytest.raises(errors.OutOfOrderSequence):
        rig.append(["b"], producer_sequence=(9, 0, 1))
    clock.advance(PRODUCER_REFUSAL_SECONDS)
    rig.append(["b"], producer_sequence=(9, 0, 1))


# ------------------------------------------------------------------------------ clocks


def test_a_wall_clock_that_jumps_expires_no_producer(rig: Rig, clock: JumpingClock) -> None:
    """The clock may jump while the broker runs, or between two brokers."""
    rig.append(["a"], producer_sequence=(9, 0, 0))
    clock.set_forward(2 * DAY_SECONDS)
    rig.append(["other"])
    rig.wal_cleaner.checkpoint()
    assert rig.append(["a"], producer_sequence=(9, 0, 0)).duplicate
    clock.set_forward(2 * DAY_SECONDS)
    successor = rig.successor()
    successor.append(["other"])
    successor.wal_cleaner.checkpoint()
    assert successor.append(["a"], producer_sequence=(9, 0, 0)).duplicate
    clock.set_forward(-9 * DAY_SECONDS)
    assert successor.successor().append(["a"], producer_sequence=(9, 0, 0)).duplicate


def test_silence_is_counted_over_restarts(rig: Rig, clock: JumpingClock) -> None:
    """A broker that restarts every hour still expires producers: checkpoints have their age."""
    rig.append(["a"], producer_sequence=(9, 0, 0))
    for _ in range(25):
        clock.advance(3600)
        rig.append(["other"])
        rig.wal_cleaner.checkpoint()
        rig.publish()
        known = len(rig.broker.partitions.producers("t", 0))
        rig = rig.successor()
    assert known == 0


def test_states_of_the_first_format_are_read(rig: Rig) -> None:
    """A checkpoint of an earlier version, a list of partitions without a clock, is read."""
    producers = {9: (0, ((0, 1, 5, 7),))}
    batches = {"q": ((("q", 3), 6, 2, 8),)}
    topic = rig.led_partitions.topic("t")
    data = msgspec.msgpack.encode([(topic.topic_id, 0, producers, batches)])
    key = topic.topic_id, 0
    rig.led_partitions._duplicates.restore([(data, {key})], {key: (topic, topic.partitions[0])})
    (found,) = rig.broker.partitions.producers("t", 0)
    assert (found.producer_id, found.last_sequence, found.last_us) == (9, 0, 7)
    batch = topic.partitions[0].batches.find(BatchId("q", 3))
    assert batch == SparkBatch(BatchId("q", 3), 6, 2, 8)
    rig.led_partitions._duplicates.restore([(b"\x90", set())], {})


# ------------------------------------------------------------------------------ many


def test_as_many_are_remembered_as_agreed(
    rig: Rig, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits per partition and in all hold; the longest silent producers are dropped first."""
    monkeypatch.setattr("sparklog.broker.log.duplicates.PRODUCERS_PER_PARTITION", 3)
    monkeypatch.setattr("sparklog.broker.log.duplicates.PRODUCERS_IN_ALL", 5)
    rig.create("u", 2)

    def known(topic: str, partition: int) -> list[int]:
        return [each.producer_id for each in rig.broker.partitions.producers(topic, partition)]

    for producer_id in (1, 2, 3):
        rig.append(["a"], producer_sequence=(producer_id, 0, 0))
    rig.append(["a"], producer_sequence=(1, 0, 1))
    rig.append(["a"], producer_sequence=(4, 0, 0))
    assert known("t", 0) == [1, 3, 4]
    for producer_id in (5, 6, 7):
        rig.append(
            ["a"], topic="u", partition=producer_id % 2, producer_sequence=(producer_id, 0, 0)
        )
    assert (known("t", 0), known("u", 0), known("u", 1)) == ([1, 4], [6], [5, 7])
    rig.wal_cleaner.checkpoint()
    rig = rig.successor()
    assert (known("t", 0), known("u", 0), known("u", 1)) == ([1, 4], [6], [5, 7])
    rig.append(["a"], producer_sequence=(8, 0, 0))
    assert (known("t", 0), known("u", 1)) == ([4, 8], [5, 7])
    rig.broker.topics.delete("u")
    for producer_id in (10, 11):
        rig.append(["a"], producer_sequence=(producer_id, 0, 0))
    assert known("t", 0) == [8, 10, 11]


def test_each_checkpoint_holds_everything(rig: Rig, clock: JumpingClock) -> None:
    """A checkpoint is complete although only changes are encoded: added, dropped, deleted."""
    rig.create("u", 2)
    for number in range(40):
        where = {"topic": "u", "partition": 1} if number % 3 == 0 else {}
        rig.append(["a"], producer_sequence=(number * 97, 0, 0), **where)
        clock.advance(DAY_SECONDS / 20)
        if number == 30:
            rig.broker.topics.delete("u")
            rig.create("u", 2)
        rig.wal_cleaner.checkpoint()
        expected = [
            list(rig.broker.partitions.producers(topic, n))
            for topic, n in (("t", 0), ("u", 0), ("u", 1))
        ]
        if number % 4 == 0:
            rig = rig.successor()
        found = [
            list(rig.broker.partitions.producers(topic, n))
            for topic, n in (("t", 0), ("u", 0), ("u", 1))
        ]
        assert found == expected
        assert sum(map(len, found)) <= 21


def test_a_state_that_cannot_be_encoded_is_not_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint continues where the failed one ended."""
    rig.append(["a"], producer_sequence=(9, 0, 0))
    with monkeypatch.context() as patched:
        patched.setattr("sparklog.broker.log.checkpoint_state._state_encoder", _Failing())
        with pytest.raises(MemoryError):
            rig.wal_cleaner.checkpoint()
    rig.append(["b"])
    rig.wal_cleaner.checkpoint()
    assert rig.successor().append(["a"], producer_sequence=(9, 0, 0)).duplicate


class _Failing:
    def encode(self, _: object) -> bytes:
        raise MemoryError


def _table_of_many(count: int) -> LedPartitions:
    led_partitions = LedPartitions(1)
    topic = Topic("t", "00", {}, no_table())
    topic.partitions = {
        number: Partition(number, leader_epoch=0, start=0, published=0) for number in range(10)
    }
    led_partitions.add_topic(topic)
    for at in _writes(topic, range(count)):
        led_partitions.apply(at)
    return led_partitions


def _writes(topic: Topic, producer_ids: range) -> Iterator[WalObject]:
    """One batch of five records per producer, spread over the partitions, 1,000 per object."""
    for first in range(producer_ids.start, producer_ids.stop, 1_000):
        at = WalPosition(1, 1, first)
        located = []
        ends = [each.end for each in topic.partitions.values()]
        for producer_id in range(first, min(first + 1_000, producer_ids.stop)):
            number = producer_id % 10
            for sequence in range(5):
                entry = Entry(
                    kind=EntryKind.RECORDS,
                    topic_id="00",
                    partition=number,
                    base_offset=ends[number],
                    count=1,
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=sequence,
                )
                ends[number] += 1
                located.append(Located(entry, at, 0))
        yield WalObject(at=at, written_us=0, located=tuple(located))


def test_many_producers_do_not_stop_acks() -> None:
    """The lock is held for references only, and unchanged states are not encoded again."""
    led_partitions = _table_of_many(30_000)
    encoder = StateEncoder()
    held: list[float] = []
    encoded: list[float] = []
    for _ in range(3):
        began = time.thread_time()
        snapshot = led_partitions.snapshot_states(now_us=0)
        held.append(time.thread_time() - began)
        began = time.thread_time()
        data = encoder.encode(snapshot)
        encoded.append(time.thread_time() - began)
        restored = LedPartitions(1)
        topic = Topic("t", "00", {}, no_table())
        topic.partitions = {
            number: Partition(number, leader_epoch=0, start=0, published=0) for number in range(10)
        }
        restored.add_topic(topic)
        wanted = {("00", number): (topic, each) for number, each in topic.partitions.items()}
        restored._duplicates.restore([(data, wanted)], wanted)
        states = [each.producers.blocks() for each in led_partitions.topic("t").partitions.values()]
        found = [each.producers.blocks() for each in topic.partitions.values()]
        assert _by_id(found).keys() == _by_id(states).keys()
        assert len(_by_id(found)) == 30_000
        for each in _writes(led_partitions.topic("t"), range(1)):
            led_partitions.apply(each)
    assert held[0] < 0.02
    assert min(held[1:]) < 0.002
    assert min(encoded[1:]) < encoded[0] / 2


def _by_id(partitions: Any) -> dict[int, ProducerState]:
    return {k: v for blocks in partitions for block in blocks for k, v in block.items()}


class _Counting:
    """An encoder of states that records the largest number of producers in one call."""

    def __init__(self) -> None:
        self.most = 0

    def encode(self, value: Any) -> bytes:
        if isinstance(value, dict):
            self.most = max(self.most, len(value))
        return msgspec.msgpack.encode(value)


def test_no_call_encodes_many_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads can run between two calls of the encoder, and never within one."""
    counting = _Counting()
    monkeypatch.setattr("sparklog.broker.log.checkpoint_state._state_encoder", counting)
    StateEncoder().encode(_table_of_many(5_000).snapshot_states(now_us=0))
    assert 0 < counting.most <= PRODUCERS_PER_BLOCK


def test_written_batches_have_five_numbers() -> None:
    """A producer's state keeps the form that checkpoints of earlier versions have."""
    state = ProducerState(1, (SequencedBatch(2, 3, 4, 5),), 6)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == [1, [[2, 3, 4, 5]], 6]
