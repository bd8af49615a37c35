"""Idempotent producers: recognises the retry of a batch that is already in a partition.

The rules are Kafka's (KIP-98, KIP-360; `ProducerAppendInfo.checkSequence`). A batch carries the
producer id, the producer epoch and the sequence of its first record. Sequences increase by one per
record and wrap after 2**31 - 1. For each producer, the last five batches are remembered:

- A batch that is already in the log is acked with its first offset.
- A gap in the sequences is rejected, and a lower epoch is fenced.
- A new epoch of a known producer begins at sequence 0.
- A producer that the partition does not know may begin with any sequence: it is new, its state has
  expired, or the topic was recreated.

The last rule leaves a loophole, which Kafka has too: if an unknown producer has two batches in
flight and the first is temporarily rejected, the second would be accepted, and the retry of the
first would then be out of order. `Refusals` closes it for as long as clients retry.

A partition that moves, or that another broker has created, leaves another loophole: its leader may
reject a batch that arrives too early, and receive the next one once it serves the partition. For
some time after that, a batch whose predecessor is missing must be sent again (`skips`), even if its
producer is unknown. An out-of-order error would make librdkafka begin a new epoch, in which batches
that are already in the log are not recognised.

States are immutable: a flush works on new states, which are kept only if it becomes durable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from sparklog import errors, limits

PRODUCERS_PER_BLOCK = 256  # with adjacent ids, encoded together in a checkpoint
PRODUCER_REFUSAL_SECONDS = 120.0  # in which clients retry a batch: Kafka's delivery.timeout.ms
PRODUCER_REFUSALS = 10_000  # rejected batches that are remembered

NO_PRODUCER: Final = -1
_SEQUENCES: Final = 2**31


class ProducerSequence(msgspec.Struct, frozen=True, array_like=True):
    """The identity that an idempotent producer gives a batch."""

    producer_id: int
    epoch: int
    base_sequence: int


class SequencedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch in the partition."""

    base_sequence: int
    count: int
    base_offset: int
    arrival_us: int

    @property
    def next_sequence(self) -> int:
        return (self.base_sequence + self.count) % _SEQUENCES


class ProducerState(msgspec.Struct, frozen=True, array_like=True):
    """State of one producer in one partition; `recent` is in order, newest last."""

    epoch: int
    recent: tuple[SequencedBatch, ...]
    seen_ms: int = 0
    """When its newest batch arrived, by the broker's monotonic clock: wall clocks can jump."""

    @property
    def last_us(self) -> int:
        return self.recent[-1].arrival_us

    @property
    def last_sequence(self) -> int:
        """The sequence of the newest record."""
        return (self.recent[-1].next_sequence - 1) % _SEQUENCES


def find_duplicate(
    state: ProducerState | None,
    producer_sequence: ProducerSequence,
    count: int,
    *,
    topic: str,
    partition: int,
) -> SequencedBatch | None:
    """Returns the earlier batch that this one repeats; None for a new batch that may be appended.

    Raises `OutOfOrderSequence` and `ProducerFenced`.
    """
    if state is None:
        return None
    if producer_sequence.epoch < state.epoch:
        raise errors.ProducerFenced(
            producer_id=producer_sequence.producer_id,
            epoch=producer_sequence.epoch,
            current=state.epoch,
        )
    if producer_sequence.epoch > state.epoch:
        expected = 0
    else:
        for written in state.recent:
            if (written.base_sequence, written.count) == (producer_sequence.base_sequence, count):
                return written
        expected = state.recent[-1].next_sequence
    if producer_sequence.base_sequence != expected:
        raise _out_of_order(topic, partition, producer_sequence, expected)
    return None


def skips(state: ProducerState | None, producer_sequence: ProducerSequence) -> bool:
    """Returns whether batches are missing between those in the log and this one."""
    if state is None or producer_sequence.epoch > state.epoch:
        return producer_sequence.base_sequence != 0
    is_same = producer_sequence.epoch == state.epoch
    return is_same and _comes_after(producer_sequence.base_sequence, state.recent[-1].next_sequence)


def advance(
    state: ProducerState | None, epoch: int, written: SequencedBatch, *, seen_ms: int = 0
) -> ProducerState:
    """Returns the state after appending `written`."""
    recent = state.recent if state is not None and state.epoch == epoch else ()
    return ProducerState(epoch, (*recent, written)[-limits.PRODUCER_WINDOW :], seen_ms)


def _out_of_order(
    topic: str, partition: int, producer_sequence: ProducerSequence, expected: int
) -> errors.OutOfOrderSequence:
    return errors.OutOfOrderSequence(
        topic=topic,
        partition=partition,
        producer_id=producer_sequence.producer_id,
        found=producer_sequence.base_sequence,
        expected=expected,
    )


# ------------------------------------------------------------------------------ of a partition


class Producers:
    """The producers of one partition, least recently active first.

    Producers are stored in blocks of adjacent ids. A block that `changed` or `blocks` has returned
    is copied before it changes, so a snapshot costs one reference per block.
    """

    __slots__ = ("_blocks", "_changed", "_order", "_unshared")

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, ProducerState]] = {}
        self._order: OrderedDict[int, None] = OrderedDict()
        self._unshared: set[int] = set()
        """Blocks that are in no snapshot."""
        self._changed: set[int] = set()
        """Blocks that differ from those that `changed` last returned."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def get(self, producer_id: int) -> ProducerState | None:
        block = self._blocks.get(producer_id // PRODUCERS_PER_BLOCK)
        return None if block is None else block.get(producer_id)

    def put(self, producer_id: int, state: ProducerState) -> None:
        self._writable(producer_id)[producer_id] = state
        self._order[producer_id] = None
        self._order.move_to_end(producer_id)

    def drop(self, producer_id: int) -> None:
        """Removes a producer, if it is known."""
        if producer_id in self._order:
            del self._order[producer_id]
            del self._writable(producer_id)[producer_id]

    def oldest(self) -> int | None:
        """Returns the id of the least recently active producer."""
        return next(iter(self._order), None)

    def _writable(self, producer_id: int) -> dict[int, ProducerState]:
        number = producer_id // PRODUCERS_PER_BLOCK
        self._changed.add(number)
        if number not in self._unshared:
            self._unshared.add(number)
            self._blocks[number] = dict(self._blocks.get(number, ()))
        return self._blocks[number]

    def blocks(self) -> Sequence[Mapping[int, ProducerState]]:
        """Returns all blocks. They never change afterwards."""
        self._unshared.clear()
        return list(self._blocks.values())

    def changed(self) -> dict[int, Mapping[int, ProducerState]]:
        """Returns the blocks changed since the last call, by number; an empty one was removed."""
        numbers, self._changed = self._changed, set()
        self._unshared -= numbers
        found: dict[int, Mapping[int, ProducerState]] = {}
        for number in numbers:
            found[number] = block = self._blocks[number]
            if not block:
                del self._blocks[number]
        return found


# ------------------------------------------------------------------------------ refused in flight


class Refusals:
    """Rejected first batches from unknown producers, which their clients will retry.

    A client has several batches in flight, and each is checked on arrival. Later batches from such
    a producer are rejected until the rejected one is retried, for as long as clients retry by
    default (`delivery.timeout.ms`). After that, any sequence is accepted. Not thread-safe.
    """

    __slots__ = ("_refused",)

    def __init__(self) -> None:
        self._refused: OrderedDict[tuple[str, int, int], tuple[int, int, float]] = OrderedDict()
        """(topic id, partition, producer id) to (epoch, sequence, expiry in monotonic seconds)."""

    def record(
        self, topic_id: str, partition: int, producer_sequence: ProducerSequence, now_seconds: float
    ) -> None:
        """Records a rejected batch that its client will retry."""
        key = topic_id, partition, producer_sequence.producer_id
        known = self._refused.pop(key, None)
        sequence = producer_sequence.base_sequence
        if (
            known is not None
            and known[0] == producer_sequence.epoch
            and _comes_after(sequence, known[1])
        ):
            sequence = known[1]
        until = now_seconds + PRODUCER_REFUSAL_SECONDS
        self._refused[key] = producer_sequence.epoch, sequence, until
        if len(self._refused) > PRODUCER_REFUSALS:
            self._refused.popitem(last=False)

    def check(
        self,
        topic_id: str,
        partition: int,
        producer_sequence: ProducerSequence,
        now_seconds: float,
        *,
        topic: str,
    ) -> None:
        """Raises `OutOfOrderSequence` for an unknown producer's batch that follows a rejected one.

        A retry of the rejected batch itself clears its record.
        """
        if not self._refused:
            return
        key = topic_id, partition, producer_sequence.producer_id
        known = self._refused.get(key)
        if known is None:
            return
        epoch, sequence, until = known
        if (
            now_seconds < until
            and producer_sequence.epoch == epoch
            and _comes_after(producer_sequence.base_sequence, sequence)
        ):
            raise _out_of_order(topic, partition, producer_sequence, sequence)
        del self._refused[key]


def _comes_after(sequence: int, other: int) -> bool:
    """Returns whether `sequence` comes after `other`, possibly across the wrap."""
    return 0 < (sequence - other) % _SEQUENCES < _SEQUENCES // 2
