"""Reference counts of WAL objects and of staged Spark batches, by the entries that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from sparklog.storage.snapshot import BatchId, Located

_Key = TypeVar("_Key")


class WalReferences:
    """Counts the entries that need each WAL object and each staged Spark batch."""

    def __init__(self) -> None:
        self._objects: dict[tuple[int, int], dict[int, int]] = {}
        """By (broker, epoch), then by sequence, in the order in which they were first needed."""
        self._batches: dict[BatchId, int] = {}

    def add(self, located: Located) -> None:
        """Counts an entry that needs its object."""
        at, batch_id = located.at, located.entry.batch_id
        of_epoch = self._objects.setdefault((at.broker, at.epoch), {})
        of_epoch[at.sequence] = of_epoch.get(at.sequence, 0) + 1
        if batch_id is not None:
            self._batches[batch_id] = self._batches.get(batch_id, 0) + 1

    def remove(self, located: Located) -> None:
        """Uncounts an entry that was previously added."""
        at, batch_id = located.at, located.entry.batch_id
        of_epoch = self._objects[at.broker, at.epoch]
        _decrement(of_epoch, at.sequence)
        if not of_epoch:
            del self._objects[at.broker, at.epoch]
        if batch_id is not None:
            _decrement(self._batches, batch_id)

    def sequences(self, broker: int, epoch: int) -> list[int]:
        """Returns the sequences of that epoch's needed objects, in any order."""
        return list(self._objects.get((broker, epoch), ()))

    def oldest(self, broker: int, epoch: int) -> Iterator[int]:
        """Iterates over the needed objects, first needed first: in our own epoch, ascending."""
        return iter(self._objects.get((broker, epoch), ()))

    def has_epoch(self, broker: int, epoch: int) -> bool:
        """Returns whether any object of that epoch is needed."""
        return (broker, epoch) in self._objects

    def has_batch(self, batch_id: BatchId) -> bool:
        """Returns whether any entry of that batch is counted."""
        return batch_id in self._batches


def _decrement(counts: dict[_Key, int], key: _Key) -> None:
    """Decrements a count; a key that reaches 0 is removed."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
