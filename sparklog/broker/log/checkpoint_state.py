"""The producers and Spark batches of partitions, as stored in WAL checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog.broker.log.producer_state import ProducerState
from sparklog.broker.log.spark_batches import SparkBatch

Batches = Mapping[str, tuple[SparkBatch, ...]]


class PartitionState(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: tuple[dict[int, ProducerState], ...]
    """In blocks, each encoded by a separate call."""
    batches: dict[str, tuple[SparkBatch, ...]]


class State(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    """Time of the checkpoint, by the clock of `ProducerState.seen_ms`. Brokers' clocks differ."""
    partitions: tuple[PartitionState, ...]


class _EncodedPartition(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: list[msgspec.Raw]
    batches: msgspec.Raw


class _EncodedState(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    partitions: list[_EncodedPartition]


class _PartitionStateV1(msgspec.Struct, frozen=True, array_like=True):
    """Format 1: a checkpoint is a plain list of such values, without a leading version."""

    topic_id: str
    partition: int
    producers: dict[int, ProducerState]
    batches: dict[str, tuple[SparkBatch, ...]]


_STATE_MARK: Final = b"\xc1\x02"
"""Precedes a state and includes its format number; no msgpack value begins with 0xC1."""
_state_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(State)
_state_v1_decoder = msgspec.msgpack.Decoder(tuple[_PartitionStateV1, ...])
_NO_BATCHES: Final = msgspec.Raw(_state_encoder.encode({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedState:
    """Changes to a partition's state since the last checkpoint."""

    producers: Mapping[int, Mapping[int, ProducerState]]
    """Blocks by number; an empty block was removed."""
    batches: Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Immutable producer and Spark batch states at one moment."""

    now_ms: int
    alive: frozenset[str]
    """Ids of all topics."""
    changed: Mapping[tuple[str, int], ChangedState]
    """By topic id and partition."""
    dropped: frozenset[tuple[str, int]] = frozenset()
    """Partitions whose earlier states no successor needs any longer."""


class _Encoded:
    """The encoded blocks of a partition's state, and the changes not yet encoded."""

    __slots__ = ("batches", "blocks", "changed_batches", "changed_blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, msgspec.Raw] = {}
        self.batches = _NO_BATCHES
        self.changed_blocks: dict[int, Mapping[int, ProducerState]] = {}
        self.changed_batches: Batches | None = None

    def encode(self) -> None:
        """Encodes block by block, so that other threads can run in between."""
        while self.changed_blocks:
            number, block = next(iter(self.changed_blocks.items()))
            if block:
                self.blocks[number] = msgspec.Raw(_state_encoder.encode(block))
            else:
                self.blocks.pop(number, None)
            del self.changed_blocks[number]
        if self.changed_batches is not None:
            self.batches = msgspec.Raw(_state_encoder.encode(self.changed_batches))
            self.changed_batches = None

    @property
    def is_empty(self) -> bool:
        return not self.blocks and self.batches == _NO_BATCHES


class StateEncoder:
    """Encodes a broker's snapshots, in order. Re-encodes only changed blocks.

    Works without the lock of the led partitions, in many small steps: a single call to the encoder
    would block all threads of the process for its whole duration.
    """

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], _Encoded] = {}

    def encode(self, snapshot: StateSnapshot) -> bytes:
        """Returns the state for a WAL checkpoint."""
        for key in snapshot.dropped:
            self._partitions.pop(key, None)
        # If this call fails later, the next one continues with the changes recorded here.
        for key, changed in snapshot.changed.items():
            known = self._partitions.setdefault(key, _Encoded())
            known.changed_blocks.update(changed.producers)
            known.changed_batches = changed.batches
        for known in self._partitions.values():
            known.encode()
        self._partitions = {
            key: each
            for key, each in self._partitions.items()
            if key[0] in snapshot.alive and not each.is_empty
        }
        partitions = [
            _EncodedPartition(topic_id, number, list(each.blocks.values()), each.batches)
            for (topic_id, number), each in self._partitions.items()
        ]
        return _STATE_MARK + _state_encoder.encode(_EncodedState(snapshot.now_ms, partitions))


def decode(data: bytes) -> State:
    """Returns the state that a checkpoint stores."""
    if data.startswith(_STATE_MARK):
        return _state_decoder.decode(memoryview(data)[len(_STATE_MARK) :])
    partitions = tuple(
        PartitionState(each.topic_id, each.partition, (each.producers,), each.batches)
        for each in _state_v1_decoder.decode(data)
    )
    return State(0, partitions)  # format 1 has no times: each producer counts as just seen
