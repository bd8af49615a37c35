"""The objects of the write-ahead log that are still needed, and the staged batches.

An object is needed while it has an entry whose data file has not been confirmed; entries of blocked
partitions count as well. The WAL cleaner removes the others. So that few old entries do not retain
many objects, it carries them: it writes copies to a newer object.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable

from sparklog.broker.log.partition import base_of
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_references import WalReferences
from sparklog.storage.snapshot import BatchId, Located


class NeededObjects:
    """The objects that a backlog needs. Each method reads at one moment."""

    def __init__(self, lock: threading.RLock, find: Callable[[str], Topic | None]) -> None:
        """`lock`: the lock of the `LedPartitions`; `find`: returns a topic by its id."""
        self._lock = lock
        self._find = find
        self.of_unpublished = WalReferences()
        """References of unpublished entries. The backlog counts them, under the lock."""
        self.of_unconfirmed = WalReferences()
        """References of unconfirmed and stranded entries. Likewise."""

    def is_staged(self, batch_id: BatchId) -> bool:
        """Returns whether an entry not yet confirmed names the batch and so needs its files."""
        return self.of_unpublished.has_batch(batch_id) or self.of_unconfirmed.has_batch(batch_id)

    def needed(self, broker: int, epoch: int) -> list[int]:
        """Returns the sorted sequences of that epoch's objects with entries not yet confirmed."""
        return sorted(set(self.references(broker, epoch)))

    def references(self, broker: int, epoch: int) -> list[int]:
        """Returns the sequences that are `needed`, in any order, and some of them twice.

        Acks wait meanwhile, so this does no more than copy them.
        """
        with self._lock:
            return [
                *self.of_unpublished.sequences(broker, epoch),
                *self.of_unconfirmed.sequences(broker, epoch),
            ]

    def is_needed(self, broker: int, epoch: int) -> bool:
        """Returns whether `needed` is not empty for that epoch."""
        with self._lock:
            unpublished = self.of_unpublished.has_epoch(broker, epoch)
            return unpublished or self.of_unconfirmed.has_epoch(broker, epoch)

    # -------------------------------------------------------------------------- carrying

    def oldest_unpublished(self, broker: int, epoch: int, count: int) -> list[int]:
        """Returns the sequences of our epoch's `count` oldest objects with unpublished entries."""
        with self._lock:
            return list(itertools.islice(self.of_unpublished.oldest(broker, epoch), count))

    def is_unpublished(self, located: Located) -> bool:
        """Returns whether this very entry, not a copy of it, is still unpublished."""
        entry = located.entry
        with self._lock:
            topic = self._find(entry.topic_id)
            if topic is None:
                return False
            partition = topic.partitions.get(entry.partition)
            waiting = partition.unpublished if partition is not None else []
            index = bisect_left(waiting, entry.base_offset, key=base_of)
            return index < len(waiting) and waiting[index].at == located.at

    def may_carry(self, located: Located) -> bool:
        """Returns whether an entry may be carried: it is unpublished and not about to move."""
        with self._lock:
            topic = self._find(located.entry.topic_id)
            if topic is None:
                return False
            partition = topic.partitions.get(located.entry.partition)
            if partition is None or partition.state is PartitionState.RESIGNING:
                return False
            return self.is_unpublished(located)
