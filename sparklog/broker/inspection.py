"""Values that describe partitions and producers to listeners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from sparklog.broker.log.producer_state import ProducerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """A partition's leader, log start offset and high watermark."""

    leader: int
    leader_epoch: int
    start: int
    end: int
    appended_bytes: int
    """Bytes of records appended since this broker leads the partition, for `watch_growth`."""


class PartitionStatuses(Sequence[PartitionStatus]):
    """Statuses of partitions, each computed when it is accessed."""

    __slots__ = ("_numbers", "_status_of")

    def __init__(self, numbers: Sequence[int], status_of: Callable[[int], PartitionStatus]) -> None:
        self._numbers = numbers
        self._status_of = status_of

    @overload
    def __getitem__(self, index: int) -> PartitionStatus: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PartitionStatus]: ...

    def __getitem__(self, index: int | slice) -> PartitionStatus | Sequence[PartitionStatus]:
        if isinstance(index, slice):
            return PartitionStatuses(self._numbers[index], self._status_of)
        return self._status_of(self._numbers[index])

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveProducer:
    """An idempotent producer, as a partition remembers it."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_us: int
    """When its newest batch arrived, µs since the Unix epoch."""


class ActiveProducers(Collection[ActiveProducer]):
    """Producers of consecutive blocks of ids, each created when it is accessed."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Mapping[int, ProducerState]]) -> None:
        self._blocks = blocks

    def __contains__(self, other: object) -> bool:
        return any(each == other for each in self)

    def __iter__(self) -> Iterator[ActiveProducer]:
        for block in self._blocks:
            for producer_id, state in sorted(block.items()):
                yield ActiveProducer(
                    producer_id=producer_id,
                    epoch=state.epoch,
                    last_sequence=state.last_sequence,
                    last_us=state.last_us,
                )

    def __len__(self) -> int:
        return sum(map(len, self._blocks))
