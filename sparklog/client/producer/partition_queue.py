"""Order and sequences of the batches of one partition: which may be sent now, and under which id.

Pure: events in, state out; sockets, clocks and locks belong to the caller. A *part* is the batch of
one partition (`PartitionBatch`), an *identity* a producer id with its epoch. The rules:

- Once sent, a part keeps its identity and sequence, so a broker that already has it acks it as a
  duplicate. Sequences count records, from 0, and wrap at 2³¹ as Kafka's do.
- Parts are answered in the order in which they were sent. After a lost answer, or a temporary
  rejection, no new part is sent until none is in flight; then the parts without an ack are resent,
  in order.
- A part that is rejected permanently leaves a gap in the sequences, so the parts behind it are
  rejected as out of order, without effect. A part ahead of every gap is out of order only until the
  parts before it are resent: it keeps its sequence, because a late copy of it may still be
  appended. Parts behind a gap are resent under a *new* identity, from 0, never under different
  sequences of the old one: a late copy of an earlier attempt would fit there, and be appended
  twice.
- A gap is *doubtful* if a part was given up before it was answered, so that a late copy of it may
  still fill the gap, or if the broker expects a sequence for no known reason. Behind such a gap
  "out of order" proves nothing about a part with a lost answer: its outcome is reported as unknown.
  A part whose every attempt was rejected certainly had no effect, and is resent.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from sparklog import errors, limits
from sparklog.client.producer.batch import PartitionBatch
from sparklog.formats import flight_messages

_SEQUENCES: Final = 2**31

Failed = tuple[PartitionBatch, errors.SparklogError]


class PartitionQueue:
    """The outstanding parts of one partition."""

    __slots__ = (
        "_added",
        "_first_gap",
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
        self.identity: flight_messages.ProducerIdentity | None = None
        self.needs_identity = True
        """True if there is none, or it has a gap: no new sequence is assigned before `renew`."""
        self.queue: deque[PartitionBatch] = deque()
        """To be sent, in order of `add`."""
        self.in_flight: deque[PartitionBatch] = deque()
        self._returned: list[PartitionBatch] = []
        """To be resent as soon as no part is in flight."""
        self._added = 0
        self._next_sequence = 0
        self._first_gap: int | None = None
        """`order` of the first part that left a gap in the identity's sequences."""
        self._gap_is_doubtful = False

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self.in_flight or self._returned)

    @property
    def wants_identity(self) -> bool:
        """True if it can send nothing without a new identity."""
        waits = self.needs_identity and bool(self.queue)
        return waits and not (self.in_flight or self._returned) and self._first_sequenced() is None

    @property
    def sendable(self) -> PartitionBatch | None:
        """The part that `send` would send."""
        if not self.queue or self._returned:
            return None
        # All parts that were sent under the old identity are complete before a new one is used.
        part = self._first_sequenced() if self.needs_identity else self.queue[0]
        return part if part is not None and self._fits_window(part) else None

    def _fits_window(self, part: PartitionBatch) -> bool:
        """Returns whether the broker still recognises the oldest part in flight after this one.

        Acked parts between them count: a rejected part may be resent after its successor was acked.
        """
        if not self.in_flight:
            return True
        return part.order - self.in_flight[0].order < limits.PRODUCER_WINDOW

    def _first_sequenced(self) -> PartitionBatch | None:
        """Returns the first part in the queue that has a sequence."""
        # The outstanding parts that were sent before are the oldest, and at most a window of them.
        oldest = islice(self.queue, limits.PRODUCER_WINDOW)
        return next((part for part in oldest if part.sequence >= 0), None)

    # -------------------------------------------------------------------------- sending

    def add(self, part: PartitionBatch) -> None:
        part.order = self._added
        self._added += 1
        self.queue.append(part)

    def renew(self, identity: flight_messages.ProducerIdentity) -> None:
        assert self.wants_identity
        self.identity = identity
        self.needs_identity = False
        self._next_sequence = 0
        self._first_gap = None
        self._gap_is_doubtful = False

    def send(self) -> PartitionBatch:
        """Returns the next part, with its sequence; it is in flight from now on."""
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

    def acked(self, part: PartitionBatch) -> bool:
        """Records an ack; returns False if the part had already been given up."""
        is_waiting = self._take_answered(part)
        self._requeue()
        return is_waiting

    def refused(
        self, part: PartitionBatch, error: errors.SparklogError
    ) -> errors.SparklogError | None:
        """Returns the failure of the part; None: it is resent, or had already been given up."""
        if not self._take_answered(part):
            return None
        if isinstance(error, errors.OutOfOrderSequence | errors.ProducerFenced):
            failure = self._out_of_order(part, error)
        elif isinstance(error, errors.Invalid | errors.Corrupt):
            failure = self._rejected(part, error)
        else:
            failure = None
            part.unanswered |= not isinstance(error, errors.Retriable)
        if failure is None:
            self._returned.append(part)
        self._requeue()
        return failure

    def lose_answers(self) -> None:
        """Records that the answers to all parts in flight are lost."""
        for part in self.in_flight:
            part.unanswered = True
        self._returned.extend(self.in_flight)
        self.in_flight.clear()
        self._requeue()

    def give_up(self, now: float, reason: errors.SparklogError) -> list[Failed]:
        """Removes expired parts; `reason` is the failure of those that surely had no effect."""
        given_up: list[Failed] = []
        for parts in (self.in_flight, self._returned, self.queue):
            for part in [each for each in parts if each.deadline <= now]:
                parts.remove(part)
                if part.unanswered or parts is self.in_flight:
                    failure: errors.SparklogError = self._unknown(part, reason)
                    self._leave_gap(part, is_doubtful=True)
                else:
                    failure = reason
                    if part.sequence >= 0:
                        self._leave_gap(part, is_doubtful=False)
                given_up.append((part, failure))
        self._requeue()
        return given_up

    def _take_answered(self, part: PartitionBatch) -> bool:
        if not self.in_flight or self.in_flight[0] is not part:
            return False
        self.in_flight.popleft()
        return True

    def _out_of_order(
        self, part: PartitionBatch, error: errors.SparklogError
    ) -> errors.SparklogError | None:
        """Returns the failure of a part with a sequence or identity that the broker rejects."""
        is_fenced = isinstance(error, errors.ProducerFenced)
        is_behind_gap = self._first_gap is not None and part.order > self._first_gap
        if not (is_fenced or is_behind_gap) and self._waits_for_others():
            return None
        if is_fenced or not is_behind_gap:
            self._leave_gap(part, is_doubtful=True)
        if part.unanswered and self._gap_is_doubtful:
            return self._unknown(part, error)
        part.identity, part.sequence, part.unanswered = None, -1, False
        return None

    def _rejected(self, part: PartitionBatch, error: errors.SparklogError) -> errors.SparklogError:
        # A broker checks for a duplicate before it validates a batch; in a deleted topic it cannot.
        gone = isinstance(error, errors.UnknownTopic | errors.TopicChanged | errors.Corrupt)
        is_doubtful = part.unanswered and gone
        self._leave_gap(part, is_doubtful=is_doubtful)
        return self._unknown(part, error) if is_doubtful else error

    def _waits_for_others(self) -> bool:
        """Returns True if parts before it will be resent under the same sequences."""
        return any(each.sequence >= 0 for each in self._returned)

    def _leave_gap(self, part: PartitionBatch, *, is_doubtful: bool) -> None:
        self.needs_identity = True
        if self._first_gap is None or part.order < self._first_gap:
            self._first_gap = part.order
        self._gap_is_doubtful |= is_doubtful

    def _requeue(self) -> None:
        if self._returned and not self.in_flight:
            self.queue = deque(sorted([*self._returned, *self.queue], key=lambda part: part.order))
            self._returned.clear()

    def _unknown(self, part: PartitionBatch, error: errors.SparklogError) -> errors.OutcomeUnknown:
        return errors.OutcomeUnknown(
            what=f"{part.count} records to {self.topic}-{self.partition}", reason=str(error)
        )
