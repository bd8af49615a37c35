"""Determines whether a staged batch is over, so that its files can be removed.

It is once its records are in their tables, or if they never can be. The brokers that lead its
partitions need its files until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.spark_batches import memory_seconds
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.metadata.model import TopicMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import BatchId, BatchKind
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Manifest, Receipt, Section
from sparklog.storage.table.topic_table import OpenTable


class StagedOutcomes:
    """The outcomes of staged batches, as this broker and the metadata know them."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        meta: MetadataStore,
        *,
        clock: Clock,
        open_table: OpenTable,
    ) -> None:
        """Takes the root's store and metadata, and the opener of tables that others lead."""
        self._store = store
        self._led_partitions = led_partitions
        self._meta = meta
        self._clock = clock
        self._open_table = open_table

    def is_published(self, batch: Manifest, decided_us: int, receipt: Receipt | None) -> bool:
        """Returns whether the batch's records are in their tables, or can never be.

        They are if some topic has the batch or a later one of its query, and no log entry of the
        batch is still waiting for its table. Writes without a batch number are forgotten after a
        time, and can no longer be committed by then.
        """
        topics = self._meta.refresh().topics
        batch_id = batch.batch_id
        if receipt is not None:
            is_over = self._has_received(topics, receipt)
            return is_over and not self._led_partitions.backlog.objects.is_staged(batch_id)
        gone = batch.topics_gone(manifest.destinations(topics))
        sections = [each for each in batch.sections if each.topic not in gone]
        if any(self._is_led_elsewhere(topics, each) for each in sections):
            return False  # their leader may need the files for its table
        alive = [topic for each in topics.values() if (topic := self._ours(each))]
        forgotten_us = self._clock.now_us() - round(memory_seconds(batch.kind) * 1e6)
        is_over = (
            any(topic.spark_batches.is_past(batch_id) for topic in alive)
            or (batch.kind is not BatchKind.NUMBERED and decided_us < forgotten_us)
            or self._have(topics, batch_id, sections)
            or not sections  # their topics were deleted
        )
        # Checked last: a batch that is only appended after this check cannot be over.
        return is_over and not self._led_partitions.backlog.objects.is_staged(batch_id)

    def _have(
        self,
        topics: Mapping[str, TopicMetadata],
        batch_id: BatchId,
        sections: Iterable[Section],
    ) -> bool:
        """Returns whether a partition has the batch as a whole, not a part: then all have it.

        Parts need a receipt. Without one, the driver still has to ask for the batch.
        """
        for section in sections:
            known = topics.get(section.topic)
            topic = self._ours(known) if known is not None else None
            partition = topic.partitions.get(section.partition) if topic is not None else None
            if partition is not None:
                found = self._led_partitions.batches([partition], batch_id)
                if any(not each.kind.is_part for each in found.values()):
                    return True
        return False

    def _has_received(self, topics: Mapping[str, TopicMetadata], receipt: Receipt) -> bool:
        """Returns whether the tables contain everything that several brokers have appended."""
        for name, ranges in receipt.ranges.items():
            known = topics.get(name)
            if known is None or known.topic_id != receipt.topic_ids.get(name):
                continue  # deleted
            ends = self._open_table(name).through(self._store).refresh().ends
            if any(ends[number] < first + count for number, (first, count) in ranges.items()):
                return False
        return True

    def _is_led_elsewhere(self, topics: Mapping[str, TopicMetadata], section: Section) -> bool:
        """Returns whether another broker leads the section's partition, or soon will."""
        known = topics.get(section.topic)
        if known is None or section.partition >= known.partition_count:
            return False
        topic = self._ours(known)
        return topic is None or section.partition not in topic.partitions

    def _ours(self, known: TopicMetadata) -> Topic | None:
        return self._led_partitions.by_id(known.topic_id)
