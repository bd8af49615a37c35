"""Duplicate detection: the idempotent producers and Spark batches that partitions remember.

As in Kafka, a partition remembers the last batches of each producer. If a partition or the broker
has too many producers, the least recently active ones are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping

import msgspec

from sparklog.broker.log import checkpoint_state
from sparklog.broker.log.checkpoint_changes import CheckpointChanges
from sparklog.broker.log.checkpoint_state import Batches, ChangedState, StateSnapshot
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.producer_state import (
    NO_PRODUCER,
    ProducerState,
    SequencedBatch,
    advance,
)
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.snapshot import Entry

_PRODUCER_EXPIRY_SECONDS = 24 * 3600.0  # idle idempotent producers; checked at each WAL checkpoint
PRODUCERS_PER_PARTITION = 20_000  # the least recently active ones are dropped first
PRODUCERS_IN_ALL = 100_000  # across all partitions: ~1 kB each
_PRODUCERS_FORGOTTEN = 2_000  # the maximum number of expired producers dropped per checkpoint


class Duplicates:
    """The producers and Spark batches that all partitions of a broker remember.

    The lock of the `LedPartitions` guards all of it.
    """

    def __init__(self, changes: CheckpointChanges, *, clock: Clock) -> None:
        """`clock`: its monotonic time decides when producers expire."""
        self._changes = changes
        self._clock = clock
        self._producers: OrderedDict[tuple[Partition, int], str] = OrderedDict()
        """Topic ids by (partition, producer id), least recently active first."""
        self._with_batches: dict[Partition, Topic] = {}
        """Partitions with Spark batches, which may expire."""

    def record(self, topic: Topic, partition: Partition, entry: Entry) -> None:
        """Records the producer and the Spark batch of a durable entry."""
        if entry.carried:
            return  # recorded when it was first written
        if entry.producer_id != NO_PRODUCER:
            state = partition.producers.get(entry.producer_id)
            written = SequencedBatch(
                entry.base_sequence, entry.count, entry.base_offset, entry.arrival_us
            )
            state = advance(state, entry.producer_epoch, written, seen_ms=self._now_ms())
            self._put(topic, partition, entry.producer_id, state)
        if entry.batch_id is not None:
            partition.batches.remember(entry, published=partition.published)
            topic.spark_batches.record(entry.batch_id, entry.batch_kind, entry.arrival_us)
            self._changes.note_state(topic.topic_id, partition)
            self._with_batches[partition] = topic

    def leave(self, partition: Partition) -> None:
        """Stops counting the producers of a partition, because another broker takes it over."""
        for producer_id in partition.producers:
            del self._producers[partition, producer_id]
        self._with_batches.pop(partition, None)

    def rejoin(self, topic: Topic, partition: Partition) -> None:
        """Resumes counting the producers of a partition whose handover failed."""
        for producer_id in partition.producers:
            self._producers[partition, producer_id] = topic.topic_id
        if partition.batches:
            self._with_batches[partition] = topic

    def forget(self, partition: Partition) -> None:
        """Forgets the batches of a partition whose topic was deleted."""
        self._with_batches.pop(partition, None)

    def forget_producers(self, partition: Partition) -> None:
        """Forgets the producers of a partition whose topic was deleted."""
        for producer_id in partition.producers:
            self._producers.pop((partition, producer_id), None)

    # -------------------------------------------------------------------------- checkpoints

    def snapshot(self, *, now_us: int, topics: Mapping[str, Topic]) -> StateSnapshot:
        """Returns the states for the next checkpoint. Drops expired ones first.

        A snapshot contains only the changes since the previous one, so all snapshots must be passed
        to the same `StateEncoder`. `topics`: all topics, by id.
        """
        now_ms = self._now_ms()
        self.expire_producers(now_ms - round(_PRODUCER_EXPIRY_SECONDS * 1e3))
        for partition, topic in list(self._with_batches.items()):
            if partition.batches.expire(now_us, published=partition.published):
                self._changes.note_state(topic.topic_id, partition)
            if not partition.batches:
                del self._with_batches[partition]
        for topic in topics.values():
            topic.spark_batches.expire(now_us)
        changed, dropped = self._changes.take_states()
        return StateSnapshot(
            dropped=dropped,
            now_ms=now_ms,
            alive=frozenset(topics),
            changed={
                (topic_id, partition.number): ChangedState(
                    producers=partition.producers.changed(), batches=partition.batches.state()
                )
                for partition, topic_id in changed.items()
            },
        )

    def restore(
        self,
        states: Iterable[tuple[bytes, Container[tuple[str, int]]]],
        restored: Mapping[tuple[str, int], tuple[Topic, Partition]],
    ) -> None:
        """Restores states from earlier checkpoints into partitions that are not served yet.

        `states`: each with the (topic id, partition) pairs to use from it; no pair is in two sets.
        """
        now_ms = self._now_ms()
        seen: list[tuple[int, Topic, Partition, int, ProducerState]] = []
        for data, wanted in states:
            state = checkpoint_state.decode(data)
            for each in state.partitions:
                key = each.topic_id, each.partition
                if key not in wanted or key not in restored:
                    continue
                topic, partition = restored[key]
                self._restore_batches(topic, partition, each.batches)
                for block in each.producers:
                    for producer_id, known in block.items():
                        silent_ms = max(state.now_ms - known.seen_ms, 0)
                        seen.append((now_ms - silent_ms, topic, partition, producer_id, known))
        for seen_ms, topic, partition, producer_id, known in sorted(seen, key=lambda x: x[0]):
            known = msgspec.structs.replace(known, seen_ms=seen_ms)
            self._put(topic, partition, producer_id, known)

    def restore_entries(
        self,
        topic: Topic,
        partition: Partition,
        epochs: Iterable[tuple[int, int]],
        entries: Iterable[Entry],
    ) -> None:
        """Applies later entries, in the order of offsets, to a restored state.

        `epochs`: the earlier leader epochs, with their first offsets.
        """
        partition.epochs = list(epochs)
        for entry in entries:
            self.record(topic, partition, entry)
            partition.note_epoch(entry)

    def _restore_batches(self, topic: Topic, partition: Partition, batches: Batches) -> None:
        partition.batches.restore(batches)
        self._with_batches[partition] = topic
        for batch in partition.batches:
            topic.spark_batches.record(batch.batch_id, batch.kind, batch.arrival_us)
        self._changes.note_state(topic.topic_id, partition)

    # -------------------------------------------------------------------------- bounds

    def _put(
        self, topic: Topic, partition: Partition, producer_id: int, state: ProducerState
    ) -> None:
        """Sets a producer's state; if there are too many, drops the least recently active one."""
        key = partition, producer_id
        partition.producers.put(producer_id, state)
        self._producers[key] = topic.topic_id
        self._producers.move_to_end(key)
        self._changes.note_state(topic.topic_id, partition)
        if len(partition.producers) > PRODUCERS_PER_PARTITION:
            oldest = partition.producers.oldest()
            assert oldest is not None
            self._drop(partition, oldest)
        if len(self._producers) > PRODUCERS_IN_ALL:
            self._drop(*next(iter(self._producers)))

    def _drop(self, partition: Partition, producer_id: int) -> None:
        self._changes.note_state(self._producers.pop((partition, producer_id)), partition)
        partition.producers.drop(producer_id)

    def expire_producers(self, horizon_ms: int) -> None:
        """Drops producers that were last seen before `horizon_ms`, on the monotonic clock.

        Drops a bounded number per call, because other threads are waiting for the lock.
        """
        for _ in range(_PRODUCERS_FORGOTTEN):
            oldest = next(iter(self._producers), None)
            if oldest is None:
                return
            partition, producer_id = oldest
            state = partition.producers.get(producer_id)
            if state is not None and state.seen_ms >= horizon_ms:
                return
            self._drop(partition, producer_id)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1e3)
