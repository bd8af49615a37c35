"""Idempotent producers: what each has written last to a partition, so that a retry is recognised.

The rules are Kafka's (KIP-98): a batch carries producer id, epoch and the sequence of its first
record; sequences rise by one a record and wrap after 2**31 - 1. The last five batches are kept. A
batch that stands already is acked with its first offset; a gap is refused; a lower epoch is fenced;
a new epoch begins at 0. So does a producer that is not known, new or expired, where Kafka takes any
sequence: of two first batches under way, the second must not stand when the first is refused.

States are immutable: a flush works on new ones and keeps them only if it becomes durable.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sparklog import errors, limits

NO_PRODUCER: Final = -1
_SEQUENCES: Final = 2**31


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What an idempotent producer writes beside a batch."""

    producer_id: int
    epoch: int
    base_sequence: int


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A batch that stands in the partition."""

    base_sequence: int
    count: int
    base_offset: int
    arrival_us: int

    @property
    def next_sequence(self) -> int:
        return (self.base_sequence + self.count) % _SEQUENCES


class ProducerState(msgspec.Struct, frozen=True, array_like=True):
    """One producer in one partition; `recent` is in order, the newest last."""

    epoch: int
    recent: tuple[Written, ...]

    @property
    def last_us(self) -> int:
        return self.recent[-1].arrival_us

    @property
    def last_sequence(self) -> int:
        """That of the newest record."""
        return (self.recent[-1].next_sequence - 1) % _SEQUENCES


def find_duplicate(
    state: ProducerState | None, stamp: Stamp, count: int, *, topic: str, partition: int
) -> Written | None:
    """The batch that stands already, or None for a new one that may be appended.

    Raises `OutOfOrderSequence`, `ProducerFenced`, and `UnknownProducer`: one that was silent for
    `PRODUCER_EXPIRY_SECONDS` was forgotten, and begins anew with another epoch or id. Kafka takes
    any sequence there; but of two first batches that are under way, the second must not stand when
    the first was refused.
    """
    if state is not None and stamp.epoch < state.epoch:
        raise errors.ProducerFenced(
            producer_id=stamp.producer_id, epoch=stamp.epoch, current=state.epoch
        )
    if state is None or stamp.epoch > state.epoch:
        expected = 0
    else:
        for written in state.recent:
            if (written.base_sequence, written.count) == (stamp.base_sequence, count):
                return written
        expected = state.recent[-1].next_sequence
    if stamp.base_sequence != expected:
        kind = errors.UnknownProducer if state is None else errors.OutOfOrderSequence
        raise kind(
            topic=topic,
            partition=partition,
            producer_id=stamp.producer_id,
            found=stamp.base_sequence,
            expected=expected,
        )
    return None


def advance(state: ProducerState | None, epoch: int, written: Written) -> ProducerState:
    """The state after `written` was appended."""
    recent = state.recent if state is not None and state.epoch == epoch else ()
    return ProducerState(epoch, (*recent, written)[-limits.PRODUCER_WINDOW :])
