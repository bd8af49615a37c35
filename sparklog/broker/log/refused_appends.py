"""Appends that were refused and may be sent again: their counts, and their producers' sequences."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.broker.log.appends import Append, CarriedEntry, EmptyObject
from sparklog.broker.log.partitions import PartitionTable
from sparklog.broker.log.producer_state import Refusals
from sparklog.clock import Clock


class RefusedAppends:
    """Remembers the refused batches of producers that a partition does not know."""

    def __init__(self, partition_table: PartitionTable, clock: Clock) -> None:
        self._partition_table = partition_table
        self._clock = clock
        self.known = Refusals()
        """Guarded by the lock of the partition table."""

    def count(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        """Counts appends that failed, by their topics."""
        for each in appends:
            if isinstance(each, Append):
                topic = self._partition_table.by_id(each.topic_id)
                if topic is not None:
                    topic.counts.failed_produces += 1

    def record(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        """Keeps back later batches of unknown producers whose refused batch will be retried."""
        self._partition_table.exclusively(self._record, appends)

    def _record(self, append: Append | CarriedEntry | EmptyObject) -> None:
        if not isinstance(append, Append) or append.producer_sequence is None:
            return
        topic = self._partition_table.by_id(append.topic_id)
        partition = topic.partitions.get(append.partition) if topic is not None else None
        if partition is None:
            return
        if partition.producers.get(append.producer_sequence.producer_id) is None:
            self.known.record(
                append.topic_id,
                append.partition,
                append.producer_sequence,
                self._clock.monotonic(),
            )
