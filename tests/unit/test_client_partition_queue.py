"""A partition's queue alone: no thread, no socket; the other side has a strict broker's rules."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.client.producer.batch import PartitionBatch
from sparklog.client.producer.partition_queue import PartitionQueue
from sparklog.formats import flight_messages

TOO_LARGE = errors.RecordTooLarge(bytes=2, limit_bytes=1)
BUSY = errors.QueueFull(queue="writer", bytes=1, setting="x")
LATE = errors.TimedOut(what="delivery", timeout_seconds=1)


def _part(count: int = 1) -> PartitionBatch:
    batch: Any = SimpleNamespace(deadline=float("inf"))
    return PartitionBatch(batch, 0, SimpleNamespace(num_rows=count), None)


def _out_of_order(found: int = 1, expected: int = 0) -> errors.OutOfOrderSequence:
    return errors.OutOfOrderSequence(
        topic="t", partition=0, producer_id=1, found=found, expected=expected
    )


def _queue_of(*counts: int) -> tuple[PartitionQueue, list[PartitionBatch]]:
    """Returns a queue with an identity, and its parts, with these numbers of records."""
    queue = PartitionQueue("t", 0)
    parts = [_part(count) for count in counts]
    for part in parts:
        queue.add(part)
    queue.renew(flight_messages.ProducerIdentity(producer_id=1))
    return queue, parts


def _send_all(queue: PartitionQueue) -> list[PartitionBatch]:
    sent = []
    while queue.sendable is not None:
        sent.append(queue.send())
    return sent


def test_sequences_count_records() -> None:
    """The sequence of a part is the number of records sent before it."""
    queue, _ = _queue_of(3, 2, 5)
    assert [part.sequence for part in _send_all(queue)] == [0, 3, 5]


def test_sequences_wrap() -> None:
    """After 2³¹ - 1 the next sequence is 0, as in Kafka."""
    queue, _ = _queue_of(2**31 - 2, 4, 1)
    assert [part.sequence for part in _send_all(queue)] == [0, 2**31 - 2, 2]


def test_window() -> None:
    """No more parts are in flight than a broker remembers."""
    queue, parts = _queue_of(*[1] * (limits.PRODUCER_WINDOW + 2))
    assert len(_send_all(queue)) == limits.PRODUCER_WINDOW
    assert queue.acked(parts[0])
    assert _send_all(queue) == [parts[limits.PRODUCER_WINDOW]]


def test_window_after_a_refused_repetition() -> None:
    """A part whose successors are acked is sent alone: behind a window more of them, the broker
    would not recognise it."""
    queue, parts = _queue_of(*[1] * (limits.PRODUCER_WINDOW + 2))
    first, *others = _send_all(queue)
    queue.lose_answers()
    assert _send_all(queue) == [first, *others]
    assert queue.refused(first, BUSY) is None
    assert all(queue.acked(each) for each in others)
    assert _send_all(queue) == [first]
    assert queue.acked(first)
    assert _send_all(queue) == parts[limits.PRODUCER_WINDOW :]


def test_broken_connection() -> None:
    """The parts in flight are sent again first, in order, under the same sequences."""
    queue, parts = _queue_of(1, 1, 1)
    queue.send()
    queue.send()
    before = [part.sequence for part in parts[:2]]
    queue.lose_answers()
    assert _send_all(queue) == parts
    assert [part.sequence for part in parts[:2]] == before


def test_refusal_that_may_pass() -> None:
    """Parts are sent again, in order, only after all parts in flight are answered."""
    queue, parts = _queue_of(1, 1, 1)
    queue.send()
    queue.send()
    assert queue.refused(parts[0], BUSY) is None
    assert queue.sendable is None
    assert queue.refused(parts[1], _out_of_order()) is None
    assert _send_all(queue) == parts
    assert [part.sequence for part in parts] == [0, 1, 2]


def test_refusal_for_good() -> None:
    """Only the refused part fails; the parts behind it are sent under a new identity, from 0."""
    queue, parts = _queue_of(4, 1, 1)
    _send_all(queue)
    assert queue.refused(parts[0], TOO_LARGE) is TOO_LARGE
    assert queue.refused(parts[1], _out_of_order()) is None
    assert not queue.wants_identity
    assert queue.refused(parts[2], _out_of_order()) is None
    assert queue.wants_identity
    queue.renew(flight_messages.ProducerIdentity(producer_id=2))
    assert _send_all(queue) == parts[1:]
    assert [(part.identity, part.sequence) for part in parts[1:]] == [
        (flight_messages.ProducerIdentity(producer_id=2), 0),
        (flight_messages.ProducerIdentity(producer_id=2), 1),
    ]


def test_lost_answer_behind_a_gap() -> None:
    """A part with a lost answer is sent under its old identity before it gets a new one."""
    queue, parts = _queue_of(1, 1, 1)
    _send_all(queue)
    queue.refused(parts[0], TOO_LARGE)
    queue.refused(parts[1], _out_of_order())
    queue.lose_answers()
    assert not queue.wants_identity
    assert _send_all(queue) == [parts[2]]
    assert parts[2].identity == flight_messages.ProducerIdentity(producer_id=1)
    assert queue.refused(parts[2], _out_of_order()) is None
    assert queue.wants_identity
    queue.renew(flight_messages.ProducerIdentity(producer_id=2))
    assert _send_all(queue) == parts[1:]


def test_part_before_a_gap_keeps_its_sequence() -> None:
    """A part that is out of order before the gap is sent again unchanged: a late copy may land."""
    queue, parts = _queue_of(1, 1, 1)
    _send_all(queue)
    queue.lose_answers()
    _send_all(queue)
    assert queue.refused(parts[0], BUSY) is None
    assert queue.refused(parts[1], BUSY) is None
    assert queue.refused(parts[2], TOO_LARGE) is TOO_LARGE
    assert _send_all(queue) == parts[:2]
    assert queue.refused(parts[0], BUSY) is None
    assert queue.refused(parts[1], _out_of_order()) is None
    assert [(part.identity, part.sequence) for part in parts[:2]] == [
        (parts[2].identity, 0),
        (parts[2].identity, 1),
    ]
    assert _send_all(queue) == parts[:2]
    assert queue.acked(parts[0])
    assert queue.acked(parts[1])


def test_broker_lost_the_sequence() -> None:
    """Out of order for no known reason proves nothing for a part with a lost answer."""
    queue, parts = _queue_of(1, 1, 1)
    queue.send()
    queue.lose_answers()
    _send_all(queue)
    failure = queue.refused(parts[0], _out_of_order())
    assert isinstance(failure, errors.OutcomeUnknown)
    assert queue.refused(parts[1], _out_of_order()) is None
    assert queue.refused(parts[2], _out_of_order()) is None
    assert queue.wants_identity


def test_fenced_producer() -> None:
    """The parts of an identity that was fenced are sent again under another."""
    queue, parts = _queue_of(1)
    queue.send()
    fenced = errors.ProducerFenced(producer_id=1, epoch=0, current=1)
    assert queue.refused(parts[0], fenced) is None
    assert queue.wants_identity


def test_topic_gone_after_a_lost_answer() -> None:
    """The outcome of a part with a lost answer is unknown when its topic is deleted."""
    queue, parts = _queue_of(1, 1)
    queue.send()
    queue.lose_answers()
    _send_all(queue)
    gone = errors.UnknownTopic(topic="t")
    assert isinstance(queue.refused(parts[0], gone), errors.OutcomeUnknown)
    assert queue.refused(parts[1], gone) is gone


@pytest.mark.parametrize("sent", [False, True])
def test_giving_up(sent: bool) -> None:
    """A part that was never sent fails as late; the outcome of one that was sent is unknown."""
    queue, parts = _queue_of(1)
    if sent:
        queue.send()
    parts[0].deadline = 10.0
    assert queue.give_up(9.9, LATE) == []
    [(part, failure)] = queue.give_up(10.0, LATE)
    assert part is parts[0]
    assert isinstance(failure, errors.OutcomeUnknown if sent else errors.TimedOut)
    assert queue.is_idle


def test_late_ack_of_what_was_given_up() -> None:
    """An answer to a part that was given up changes nothing."""
    queue, parts = _queue_of(1, 1)
    _send_all(queue)
    parts[0].deadline = 0.0
    queue.give_up(1.0, LATE)
    assert not queue.acked(parts[0])
    assert queue.refused(parts[0], BUSY) is None
    assert queue.acked(parts[1])


# ------------------------------------------------------------------------------ simulation

Copy = tuple[PartitionBatch, flight_messages.ProducerIdentity, int]


@dataclass
class StrictBroker:
    """Appends parts as `FakeLog` does batches, and refuses `poisoned` ones for good."""

    poisoned: set[PartitionBatch] = field(default_factory=set)
    log: list[PartitionBatch] = field(default_factory=list)
    states: dict[int, tuple[int, deque[tuple[int, int]]]] = field(default_factory=dict)

    def append(self, copy: Copy) -> int | errors.SparklogError:
        part, identity, sequence = copy
        expected, recent = self.states.get(
            identity.producer_id, (0, deque(maxlen=limits.PRODUCER_WINDOW))
        )
        for known, base_offset in recent:
            if known == sequence:
                return base_offset
        if part in self.poisoned:
            return TOO_LARGE
        if sequence != expected:
            return _out_of_order(sequence, expected)
        base_offset = len(self.log)
        self.log.append(part)
        recent.append((sequence, base_offset))
        self.states[identity.producer_id] = (sequence + part.count, recent)
        return base_offset


class Simulation:
    """One queue against one broker, over connections that break and deliver late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.broker = StrictBroker()
        self.queue = PartitionQueue("t", 0)
        self.parts: list[PartitionBatch] = []
        self.acked: dict[PartitionBatch, int] = {}
        self.failed: dict[PartitionBatch, errors.SparklogError] = {}
        self.stream: deque[Copy] = deque()
        self.answers: deque[tuple[PartitionBatch, int | errors.SparklogError]] = deque()
        self.late: list[deque[Copy]] = []
        self.identities = 0

    def add(self) -> None:
        part = _part(self.random.randint(1, 3))
        if self.random.random() < 0.1:
            self.broker.poisoned.add(part)
        self.parts.append(part)
        self.queue.add(part)

    def send(self) -> None:
        if self.queue.wants_identity:
            self.identities += 1
            self.queue.renew(flight_messages.ProducerIdentity(producer_id=self.identities))
        if self.queue.sendable is not None:
            part = self.queue.send()
            assert part.identity is not None
            self.stream.append((part, part.identity, part.sequence))

    def arrive(self, *, may_refuse: bool = True) -> None:
        if self.stream:
            copy = self.stream.popleft()
            busy = may_refuse and self.random.random() < 0.2
            self.answers.append((copy[0], BUSY if busy else self.broker.append(copy)))

    def answer(self) -> None:
        if not self.answers:
            return
        part, answer = self.answers.popleft()
        if isinstance(answer, int):
            if self.queue.acked(part):
                self.acked[part] = answer
        else:
            failure = self.queue.refused(part, answer)
            if failure is not None:
                self.failed[part] = failure

    def break_off(self) -> None:
        self.late.append(self.stream)
        self.stream, self.answers = deque(), deque()
        self.queue.lose_answers()

    def arrive_late(self) -> None:
        waiting = [stream for stream in self.late if stream]
        if waiting:
            self.broker.append(self.random.choice(waiting).popleft())

    def give_up(self) -> None:
        undecided = [part for part in self.parts if part not in self.acked | self.failed]
        if undecided:
            # The oldest go first, as they do when their time is over.
            for part in undecided[: self.random.randint(1, 2)]:
                part.deadline = 0.0
            self.failed.update(self.queue.give_up(1.0, LATE))

    def run(self) -> None:
        often = [self.add, self.send, self.arrive, self.answer]
        steps = often * 5 + [self.break_off, self.arrive_late, self.give_up]
        for _ in range(self.random.randint(1, 300)):
            self.random.choice(steps)()
        while not self.queue.is_idle:
            self.send()
            self.arrive(may_refuse=False)
            self.answer()
        while any(self.late):
            self.arrive_late()


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_exactly_once_over_any_faults(random: Random) -> None:
    """Acked parts are in the log once and in order, failed parts are not in the log."""
    simulation = Simulation(random)
    simulation.run()
    log = simulation.broker.log
    assert len(set(log)) == len(log)
    assert simulation.acked.keys() | simulation.failed.keys() == set(simulation.parts)
    for part, base_offset in simulation.acked.items():
        assert log[base_offset] is part
    for part, failure in simulation.failed.items():
        assert isinstance(failure, errors.OutcomeUnknown) or part not in log
    places = [part.order for part in log if part in simulation.acked]
    assert places == sorted(places)
