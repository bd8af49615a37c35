"""Which WAL objects, and which staged batches, some entries still need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from sparklog.storage.snapshot import BatchId, Located

_Key = TypeVar("_Key")


class Needs:
    """Counts entries by the object that holds them, and by the batch of a query they are of."""

    def __init__(self) -> None:
        self._objects: dict[tuple[int, int], dict[int, int]] = {}
        """By (broker, epoch), then by sequence, in the order in which they were first held."""
        self._batches: dict[BatchId, int] = {}

    def hold(self, located: Located) -> None:
        """One more entry needs its object."""
        at, batch_id = located.at, located.entry.batch_id
        of_epoch = self._objects.setdefault((at.broker, at.epoch), {})
        of_epoch[at.sequence] = of_epoch.get(at.sequence, 0) + 1
        if batch_id is not None:
            self._batches[batch_id] = self._batches.get(batch_id, 0) + 1

    def release(self, located: Located) -> None:
        """An entry that was held needs its object no more."""
        at, batch_id = located.at, located.entry.batch_id
        of_epoch = self._objects[at.broker, at.epoch]
        _decrement(of_epoch, at.sequence)
        if not of_epoch:
            del self._objects[at.broker, at.epoch]
        if batch_id is not None:
            _decrement(self._batches, batch_id)

    def sequences(self, broker: int, epoch: int) -> set[int]:
        """The objects of that epoch which are needed."""
        return set(self._objects.get((broker, epoch), ()))

    def oldest(self, broker: int, epoch: int) -> Iterator[int]:
        """The same in the order in which they were first needed: of one's own epoch, rising."""
        return iter(self._objects.get((broker, epoch), ()))

    def has_epoch(self, broker: int, epoch: int) -> bool:
        """Whether any object of that epoch is needed."""
        return (broker, epoch) in self._objects

    def has_batch(self, batch_id: BatchId) -> bool:
        """Whether an entry of that batch is held."""
        return batch_id in self._batches


def _decrement(counts: dict[_Key, int], key: _Key) -> None:
    """Counts one less; what is counted down to nothing is forgotten."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
