"""Idempotent producers: what each has written last to a partition, so that a retry is recognised.

The rules are Kafka's (KIP-98, KIP-360; `ProducerAppendInfo.checkSequence`): a batch carries
producer id, epoch and the sequence of its first record; sequences rise by one a record and wrap
after 2**31 - 1. The last five batches are kept. A batch that is already in the log is acked with
its first offset; a gap is refused; a lower epoch is fenced; a new epoch of a known producer begins
at 0. A producer that the partition does not know, because it is new, expired, or the topic was
created again, may begin with any sequence.

That leaves one gap, which Kafka has too: of two first batches in flight, the second would be
accepted after the first was refused, and the retry of the first would then be out of order.
`Refusals` closes it for as long as a client retries.

States are immutable: a flush works on new ones and keeps them only if it becomes durable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
    seen_ms: int = 0
    """When its newest batch came, on the broker's monotonic clock: wall clocks may jump."""

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

    Raises `OutOfOrderSequence` and `ProducerFenced`.
    """
    if state is None:
        return None
    if stamp.epoch < state.epoch:
        raise errors.ProducerFenced(
            producer_id=stamp.producer_id, epoch=stamp.epoch, current=state.epoch
        )
    if stamp.epoch > state.epoch:
        expected = 0
    else:
        for written in state.recent:
            if (written.base_sequence, written.count) == (stamp.base_sequence, count):
                return written
        expected = state.recent[-1].next_sequence
    if stamp.base_sequence != expected:
        raise _out_of_order(topic, partition, stamp, expected)
    return None


def advance(
    state: ProducerState | None, epoch: int, written: Written, *, seen_ms: int = 0
) -> ProducerState:
    """The state after `written` was appended."""
    recent = state.recent if state is not None and state.epoch == epoch else ()
    return ProducerState(epoch, (*recent, written)[-limits.PRODUCER_WINDOW :], seen_ms)


def _out_of_order(
    topic: str, partition: int, stamp: Stamp, expected: int
) -> errors.OutOfOrderSequence:
    return errors.OutOfOrderSequence(
        topic=topic,
        partition=partition,
        producer_id=stamp.producer_id,
        found=stamp.base_sequence,
        expected=expected,
    )


# ------------------------------------------------------------------------------ of a partition


class Producers:
    """The producers of one partition, from the longest silent to the newest.

    They are kept in blocks of neighbouring ids. A block that was given out by `changed` or `blocks`
    is copied before it changes, so a snapshot of many producers costs one reference a block.
    """

    __slots__ = ("_blocks", "_changed", "_order", "_own")

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, ProducerState]] = {}
        self._order: OrderedDict[int, None] = OrderedDict()
        self._own: set[int] = set()
        """Blocks that nobody else holds."""
        self._changed: set[int] = set()
        """Blocks that `changed` has not given out as they are now."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def get(self, producer_id: int) -> ProducerState | None:
        block = self._blocks.get(producer_id // limits.PRODUCERS_PER_BLOCK)
        return None if block is None else block.get(producer_id)

    def put(self, producer_id: int, state: ProducerState) -> None:
        self._writable(producer_id)[producer_id] = state
        self._order[producer_id] = None
        self._order.move_to_end(producer_id)

    def drop(self, producer_id: int) -> None:
        """Forgets one, if it is known."""
        if producer_id in self._order:
            del self._order[producer_id]
            del self._writable(producer_id)[producer_id]

    def oldest(self) -> int | None:
        """The id of the one that has been silent for longest."""
        return next(iter(self._order), None)

    def _writable(self, producer_id: int) -> dict[int, ProducerState]:
        number = producer_id // limits.PRODUCERS_PER_BLOCK
        self._changed.add(number)
        if number not in self._own:
            self._own.add(number)
            self._blocks[number] = dict(self._blocks.get(number, ()))
        return self._blocks[number]

    def blocks(self) -> Sequence[Mapping[int, ProducerState]]:
        """All of them, which will not change any more."""
        self._own.clear()
        return list(self._blocks.values())

    def changed(self) -> dict[int, Mapping[int, ProducerState]]:
        """Blocks by number that differ from what the last call gave; empty: the block is gone."""
        numbers, self._changed = self._changed, set()
        self._own -= numbers
        found: dict[int, Mapping[int, ProducerState]] = {}
        for number in numbers:
            found[number] = block = self._blocks[number]
            if not block:
                del self._blocks[number]
        return found


# ------------------------------------------------------------------------------ refused in flight


class Refusals:
    """First batches of unknown producers that were refused, and that their clients send again.

    What such a producer has sent behind them must wait for them: a client sends several batches at
    once, and each is judged when it comes. Kept for as long as clients retry by default
    (`delivery.timeout.ms`); after that any sequence is taken again. Not thread-safe.
    """

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: OrderedDict[tuple[str, int, int], tuple[int, int, float]] = OrderedDict()
        """(topic id, partition, producer id): epoch, sequence, and when it is forgotten."""

    def note(self, topic_id: str, partition: int, stamp: Stamp, now_seconds: float) -> None:
        """A batch was refused that will come again."""
        key = topic_id, partition, stamp.producer_id
        known = self._noted.pop(key, None)
        sequence = stamp.base_sequence
        if known is not None and known[0] == stamp.epoch and _is_behind(sequence, known[1]):
            sequence = known[1]
        until = now_seconds + limits.PRODUCER_REFUSAL_SECONDS
        self._noted[key] = stamp.epoch, sequence, until
        if len(self._noted) > limits.PRODUCER_REFUSALS:
            self._noted.popitem(last=False)

    def check(
        self, topic_id: str, partition: int, stamp: Stamp, now_seconds: float, *, topic: str
    ) -> None:
        """Raises `OutOfOrderSequence` for what an unknown producer has sent behind a refused batch.

        The refused batch itself ends its refusal.
        """
        if not self._noted:
            return
        key = topic_id, partition, stamp.producer_id
        known = self._noted.get(key)
        if known is None:
            return
        epoch, sequence, until = known
        if (
            now_seconds < until
            and stamp.epoch == epoch
            and _is_behind(stamp.base_sequence, sequence)
        ):
            raise _out_of_order(topic, partition, stamp, sequence)
        del self._noted[key]


def _is_behind(sequence: int, other: int) -> bool:
    """Whether `sequence` comes after `other`, which may be before the wrap."""
    return 0 < (sequence - other) % _SEQUENCES < _SEQUENCES // 2
