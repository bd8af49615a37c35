"""The order and the sequences of one partition's parts: which may be sent now, and under what name.

Pure: events in, state out; sockets, clocks and locks belong to the caller. The rules:

- A part keeps identity and sequence from its first sending on, so a broker that has it already
  says so. Sequences count records, from 0, and wrap at 2³¹ as Kafka's do.
- Parts are answered in the order they were sent. After a lost answer, or a refusal that may pass,
  nothing new is sent until all that is in flight is decided; then it goes again, in order.
- A part that is refused for good leaves a gap in the sequences, so those behind it are refused as
  out of order, without effect. They go again under a *new* identity, from 0, never under other
  sequences of the old one: a late copy of an old sending would fit there, and be appended twice.
- A gap may also be *doubtful*: a part was given up without an answer and its late copy may yet
  fill the gap, or the broker's idea of the sequences is another. Behind such a gap "out of order"
  proves nothing for a part of which an answer was lost: its outcome is unknown, and reported so.
  A part whose every sending was refused surely had no effect, and goes again.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from sparklog import errors, limits, wire
from sparklog.client.batch import Part

_SEQUENCES: Final = 2**31

Failed = tuple[Part, errors.SparklogError]


class Lane:
    """The parts of one partition that are not decided."""

    __slots__ = (
        "_added",
        "_gap_is_doubtful",
        "_next_sequence",
        "_returned",
        "identity",
        "in_flight",
        "needs_identity",
        "partition",
        "queue",
        "topic",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.identity: wire.ProducerIdentity | None = None
        self.needs_identity = True
        """There is none, or it has a gap: no new sequence may be given before `renew`."""
        self.queue: deque[Part] = deque()
        """To be sent, in order of `add`."""
        self.in_flight: deque[Part] = deque()
        self._returned: list[Part] = []
        """Go again as soon as nothing is in flight."""
        self._added = 0
        self._next_sequence = 0
        self._gap_is_doubtful = False

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self.in_flight or self._returned)

    @property
    def wants_identity(self) -> bool:
        """It cannot go on without a new identity."""
        waits = self.needs_identity and bool(self.queue)
        return waits and not (self.in_flight or self._returned) and self._named() is None

    @property
    def sendable(self) -> Part | None:
        """What `send` would send."""
        if not self.queue or self._returned or len(self.in_flight) >= limits.PRODUCER_WINDOW:
            return None
        # Before a new identity is taken, all that was sent under the old one is decided.
        return self._named() if self.needs_identity else self.queue[0]

    def _named(self) -> Part | None:
        """The first part in the queue that has a sequence."""
        # All that were ever sent and are undecided are the oldest, and no more than the window.
        oldest = islice(self.queue, limits.PRODUCER_WINDOW)
        return next((part for part in oldest if part.sequence >= 0), None)

    # -------------------------------------------------------------------------- sending

    def add(self, part: Part) -> None:
        part.place = self._added
        self._added += 1
        self.queue.append(part)

    def renew(self, identity: wire.ProducerIdentity) -> None:
        assert self.wants_identity
        self.identity = identity
        self.needs_identity = False
        self._next_sequence = 0
        self._gap_is_doubtful = False

    def send(self) -> Part:
        """The next part, with its sequence, now in flight."""
        part = self.sendable
        assert part is not None
        self.queue.remove(part)
        if part.sequence < 0:
            part.identity = self.identity
            part.sequence = self._next_sequence
            self._next_sequence = (self._next_sequence + part.count) % _SEQUENCES
        self.in_flight.append(part)
        return part

    # -------------------------------------------------------------------------- answers

    def acked(self, part: Part) -> bool:
        """False if the part was given up before."""
        landed = self._land(part)
        self._take_back()
        return landed

    def refused(self, part: Part, error: errors.SparklogError) -> errors.SparklogError | None:
        """What the part fails with; None: it goes again, or was given up before."""
        if not self._land(part):
            return None
        if isinstance(error, errors.OutOfOrderSequence | errors.ProducerFenced):
            failure = self._displaced(part, error)
        elif isinstance(error, errors.Invalid | errors.Corrupt):
            failure = self._rejected(part, error)
        else:
            failure = None
            part.unanswered |= not isinstance(error, errors.Retriable)
        if failure is None:
            self._returned.append(part)
        self._take_back()
        return failure

    def broke(self) -> None:
        """The answers to all that is in flight are lost."""
        for part in self.in_flight:
            part.unanswered = True
        self._returned.extend(self.in_flight)
        self.in_flight.clear()
        self._take_back()

    def give_up(self, now: float, reason: errors.SparklogError) -> list[Failed]:
        """The parts whose deadline has come, and what they fail with: `reason` if surely unsent."""
        given_up: list[Failed] = []
        for parts in (self.in_flight, self._returned, self.queue):
            for part in [each for each in parts if each.deadline <= now]:
                parts.remove(part)
                if part.unanswered or parts is self.in_flight:
                    failure: errors.SparklogError = self._unknown(part, reason)
                    self._leave_gap(is_doubtful=True)
                else:
                    failure = reason
                    if part.sequence >= 0:
                        self._leave_gap(is_doubtful=False)
                given_up.append((part, failure))
        self._take_back()
        return given_up

    def _land(self, part: Part) -> bool:
        if not self.in_flight or self.in_flight[0] is not part:
            return False
        self.in_flight.popleft()
        return True

    def _displaced(self, part: Part, error: errors.SparklogError) -> errors.SparklogError | None:
        """The broker expects another sequence, or another identity."""
        expected = isinstance(error, errors.OutOfOrderSequence)
        if expected and self._returned and not self.needs_identity:
            return None
        if not (expected and self.needs_identity):
            self._leave_gap(is_doubtful=True)
        if part.unanswered and self._gap_is_doubtful:
            return self._unknown(part, error)
        part.identity, part.sequence, part.unanswered = None, -1, False
        return None

    def _rejected(self, part: Part, error: errors.SparklogError) -> errors.SparklogError:
        # A broker looks for a repetition before it judges; but in a topic that is gone it cannot.
        gone = isinstance(error, errors.UnknownTopic | errors.TopicChanged | errors.Corrupt)
        is_doubtful = part.unanswered and gone
        self._leave_gap(is_doubtful=is_doubtful)
        return self._unknown(part, error) if is_doubtful else error

    def _leave_gap(self, *, is_doubtful: bool) -> None:
        self.needs_identity = True
        self._gap_is_doubtful |= is_doubtful

    def _take_back(self) -> None:
        if self._returned and not self.in_flight:
            self.queue = deque(sorted([*self._returned, *self.queue], key=lambda part: part.place))
            self._returned.clear()

    def _unknown(self, part: Part, error: errors.SparklogError) -> errors.OutcomeUnknown:
        return errors.OutcomeUnknown(
            what=f"{part.count} records to {self.topic}-{self.partition}", reason=str(error)
        )
