"""Rejected appends, which may be sent again: their counts, and their producers' sequences."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.broker.log.appends import Append, CarriedEntry, EmptyObject
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.producer_state import Refusals
from sparklog.clock import Clock


class RefusedAppends:
    """Remembers the rejected batches from producers that a partition does not know."""

    def __init__(self, led_partitions: LedPartitions, clock: Clock) -> None:
        self._led_partitions = led_partitions
        self._clock = clock
        self.known = Refusals()
        """Guarded by the lock of the led partitions."""

    def count(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        """Counts failed appends by topic."""
        for each in appends:
            if isinstance(each, Append):
                topic = self._led_partitions.by_id(each.topic_id)
                if topic is not None:
                    topic.counts.failed_produces += 1

    def record(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        """Rejects later batches from unknown producers until the rejected one is retried."""
        self._led_partitions.exclusively(self._record, appends)

    def _record(self, append: Append | CarriedEntry | EmptyObject) -> None:
        if not isinstance(append, Append) or append.producer_sequence is None:
            return
        topic = self._led_partitions.by_id(append.topic_id)
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
