"""The lane alone: no thread, no socket; a strict broker's rules as the other side."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import errors, limits, wire
from sparklog.client.batch import Part
from sparklog.client.lane import Lane

TOO_LARGE = errors.RecordTooLarge(bytes=2, limit_bytes=1)
BUSY = errors.QueueFull(queue="writer", bytes=1, setting="x")
LATE = errors.TimedOut(what="delivery", timeout_seconds=1)


def _part(count: int = 1) -> Part:
    batch: Any = SimpleNamespace(deadline=float("inf"))
    return Part(batch, 0, SimpleNamespace(num_rows=count), None)


def _out_of_order(found: int = 1, expected: int = 0) -> errors.OutOfOrderSequence:
    return errors.OutOfOrderSequence(
        topic="t", partition=0, producer_id=1, found=found, expected=expected
    )


def _lane(*counts: int) -> tuple[Lane, list[Part]]:
    """A lane with an identity, and parts of these counts of records in its queue."""
    lane = Lane("t", 0)
    parts = [_part(count) for count in counts]
    for part in parts:
        lane.add(part)
    lane.renew(wire.ProducerIdentity(producer_id=1))
    return lane, parts


def _send_all(lane: Lane) -> list[Part]:
    sent = []
    while lane.sendable is not None:
        sent.append(lane.send())
    return sent


def test_sequences_count_records() -> None:
    """The sequence of a part is the number of records sent before it."""
    lane, _ = _lane(3, 2, 5)
    assert [part.sequence for part in _send_all(lane)] == [0, 3, 5]


def test_sequences_wrap() -> None:
    """After 2³¹ - 1 comes 0, as in Kafka."""
    lane, _ = _lane(2**31 - 2, 4, 1)
    assert [part.sequence for part in _send_all(lane)] == [0, 2**31 - 2, 2]


def test_window() -> None:
    """No more parts are in flight than a broker remembers."""
    lane, parts = _lane(*[1] * (limits.PRODUCER_WINDOW + 2))
    assert len(_send_all(lane)) == limits.PRODUCER_WINDOW
    assert lane.acked(parts[0])
    assert _send_all(lane) == [parts[limits.PRODUCER_WINDOW]]


def test_broken_connection() -> None:
    """What was in flight goes again first, in order, under the same sequences."""
    lane, parts = _lane(1, 1, 1)
    lane.send()
    lane.send()
    before = [part.sequence for part in parts[:2]]
    lane.broke()
    assert _send_all(lane) == parts
    assert [part.sequence for part in parts[:2]] == before


def test_refusal_that_may_pass() -> None:
    """Nothing is sent before all that is in flight was answered; then all goes again in order."""
    lane, parts = _lane(1, 1, 1)
    lane.send()
    lane.send()
    assert lane.refused(parts[0], BUSY) is None
    assert lane.sendable is None
    assert lane.refused(parts[1], _out_of_order()) is None
    assert _send_all(lane) == parts
    assert [part.sequence for part in parts] == [0, 1, 2]


def test_refusal_for_good() -> None:
    """Only the refused part fails; those behind it go again under a new identity, from 0."""
    lane, parts = _lane(4, 1, 1)
    _send_all(lane)
    assert lane.refused(parts[0], TOO_LARGE) is TOO_LARGE
    assert lane.refused(parts[1], _out_of_order()) is None
    assert not lane.wants_identity
    assert lane.refused(parts[2], _out_of_order()) is None
    assert lane.wants_identity
    lane.renew(wire.ProducerIdentity(producer_id=2))
    assert _send_all(lane) == parts[1:]
    assert [(part.identity, part.sequence) for part in parts[1:]] == [
        (wire.ProducerIdentity(producer_id=2), 0),
        (wire.ProducerIdentity(producer_id=2), 1),
    ]


def test_lost_answer_behind_a_gap() -> None:
    """A part whose answer was lost is asked for under its old identity before it gets a new one."""
    lane, parts = _lane(1, 1, 1)
    _send_all(lane)
    lane.refused(parts[0], TOO_LARGE)
    lane.refused(parts[1], _out_of_order())
    lane.broke()
    assert not lane.wants_identity
    assert _send_all(lane) == [parts[2]]
    assert parts[2].identity == wire.ProducerIdentity(producer_id=1)
    assert lane.refused(parts[2], _out_of_order()) is None
    assert lane.wants_identity
    lane.renew(wire.ProducerIdentity(producer_id=2))
    assert _send_all(lane) == parts[1:]


def test_broker_lost_the_sequence() -> None:
    """Out of order for no cause of ours tells nothing of a part of which an answer was lost."""
    lane, parts = _lane(1, 1, 1)
    lane.send()
    lane.broke()
    _send_all(lane)
    failure = lane.refused(parts[0], _out_of_order())
    assert isinstance(failure, errors.OutcomeUnknown)
    assert lane.refused(parts[1], _out_of_order()) is None
    assert lane.refused(parts[2], _out_of_order()) is None
    assert lane.wants_identity


def test_fenced_producer() -> None:
    """An identity that was taken over is left, and its parts go again under another."""
    lane, parts = _lane(1)
    lane.send()
    fenced = errors.ProducerFenced(producer_id=1, epoch=0, current=1)
    assert lane.refused(parts[0], fenced) is None
    assert lane.wants_identity


def test_topic_gone_after_a_lost_answer() -> None:
    """Whether a batch was appended to a topic that is now deleted, nobody knows."""
    lane, parts = _lane(1, 1)
    lane.send()
    lane.broke()
    _send_all(lane)
    gone = errors.UnknownTopic(topic="t")
    assert isinstance(lane.refused(parts[0], gone), errors.OutcomeUnknown)
    assert lane.refused(parts[1], gone) is gone


@pytest.mark.parametrize("sent", [False, True])
def test_giving_up(sent: bool) -> None:
    """What was never sent fails as late; what was sent may stand, and says so."""
    lane, parts = _lane(1)
    if sent:
        lane.send()
    parts[0].deadline = 10.0
    assert lane.give_up(9.9, LATE) == []
    [(part, failure)] = lane.give_up(10.0, LATE)
    assert part is parts[0]
    assert isinstance(failure, errors.OutcomeUnknown if sent else errors.TimedOut)
    assert lane.is_idle


def test_late_ack_of_what_was_given_up() -> None:
    """An answer to a part that was given up changes nothing."""
    lane, parts = _lane(1, 1)
    _send_all(lane)
    parts[0].deadline = 0.0
    lane.give_up(1.0, LATE)
    assert not lane.acked(parts[0])
    assert lane.refused(parts[0], BUSY) is None
    assert lane.acked(parts[1])


# ------------------------------------------------------------------------------ simulation

Copy = tuple[Part, wire.ProducerIdentity, int]


@dataclass
class StrictBroker:
    """Appends parts as `FakeLog` does batches; `poisoned` ones it refuses for good."""

    poisoned: set[Part] = field(default_factory=set)
    log: list[Part] = field(default_factory=list)
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
    """One lane against one broker, over connections that break and deliver late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.broker = StrictBroker()
        self.lane = Lane("t", 0)
        self.parts: list[Part] = []
        self.acked: dict[Part, int] = {}
        self.failed: dict[Part, errors.SparklogError] = {}
        self.stream: deque[Copy] = deque()
        self.answers: deque[tuple[Part, int | errors.SparklogError]] = deque()
        self.late: list[deque[Copy]] = []
        self.identities = 0

    def add(self) -> None:
        part = _part(self.random.randint(1, 3))
        if self.random.random() < 0.1:
            self.broker.poisoned.add(part)
        self.parts.append(part)
        self.lane.add(part)

    def send(self) -> None:
        if self.lane.wants_identity:
            self.identities += 1
            self.lane.renew(wire.ProducerIdentity(producer_id=self.identities))
        if self.lane.sendable is not None:
            part = self.lane.send()
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
            if self.lane.acked(part):
                self.acked[part] = answer
        else:
            failure = self.lane.refused(part, answer)
            if failure is not None:
                self.failed[part] = failure

    def break_off(self) -> None:
        self.late.append(self.stream)
        self.stream, self.answers = deque(), deque()
        self.lane.broke()

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
            self.failed.update(self.lane.give_up(1.0, LATE))

    def run(self) -> None:
        often = [self.add, self.send, self.arrive, self.answer]
        steps = often * 5 + [self.break_off, self.arrive_late, self.give_up]
        for _ in range(self.random.randint(1, 300)):
            self.random.choice(steps)()
        while not self.lane.is_idle:
            self.send()
            self.arrive(may_refuse=False)
            self.answer()
        while any(self.late):
            self.arrive_late()


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_exactly_once_over_any_faults(random: Random) -> None:
    """What was acked stands once and in order, what failed does not, and nothing stands twice."""
    simulation = Simulation(random)
    simulation.run()
    log = simulation.broker.log
    assert len(set(log)) == len(log)
    assert simulation.acked.keys() | simulation.failed.keys() == set(simulation.parts)
    for part, base_offset in simulation.acked.items():
        assert log[base_offset] is part
    for part, failure in simulation.failed.items():
        assert isinstance(failure, errors.OutcomeUnknown) or part not in log
    places = [part.place for part in log if part in simulation.acked]
    assert places == sorted(places)
