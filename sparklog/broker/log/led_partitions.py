"""The topics of a root, and those of their partitions that this broker leads.

One lock guards all of this state, here and in `backlog`, `duplicates`, `resignations` and
`checkpoint_changes`. Acks wait for it, so no thread holds it during I/O, nor while acquiring a lock
that is held during I/O, such as that of a topic's table. No other module acquires it. Only durable
facts are recorded: the writer applies a flush once its object is durable, the publisher a commit
once it is in the Delta log.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sparklog import errors
from sparklog.broker.counts import TopicCounts
from sparklog.broker.log.backlog import Backlog
from sparklog.broker.log.checkpoint_changes import CheckpointChanges
from sparklog.broker.log.checkpoint_state import StateSnapshot
from sparklog.broker.log.duplicates import Duplicates
from sparklog.broker.log.growths import Growths
from sparklog.broker.log.partition import Partition, payload_bytes
from sparklog.broker.log.partition_state import MOVING, PartitionEvent, PartitionState
from sparklog.broker.log.producer_state import ProducerState
from sparklog.broker.log.resignations import Resignations
from sparklog.broker.log.spark_batches import SparkBatch
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock, SystemClock
from sparklog.storage.metadata import placement
from sparklog.storage.metadata.model import ClusterMetadata, TopicMetadata
from sparklog.storage.snapshot import (
    BatchId,
    BatchKind,
    Bounds,
    Entry,
    EntryKind,
    Located,
    TableSnapshot,
)
from sparklog.storage.wal import WalObject

_DELETED_NAME_SECONDS = 1.0  # in which a client's mention does not recreate a deleted topic

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The content of a WAL checkpoint, as of one moment."""

    sequence: int
    """The newest object that it reflects."""
    references: Sequence[int]
    """Sequences of the objects with entries not yet confirmed; see `NeededObjects.references`."""
    bounds: Mapping[str, tuple[Bounds, ...]]
    """Bounds of each partition, by topic id."""
    states: StateSnapshot
    led: Mapping[str, Mapping[int, int]]
    """The leader epoch of each partition that this broker leads, by topic id and number."""

    @property
    def needed(self) -> list[int]:
        """The sequences of the objects with entries not yet confirmed, sorted."""
        return sorted(set(self.references))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The reason why a partition accepts no records, and its known entries."""

    reason: errors.SparklogError
    end: int
    stranded: Sequence[Located]
    is_end_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedPartition:
    """A partition as found in its table and the logs of earlier epochs."""

    partition: Partition
    tail: Sequence[Located] = ()
    """Entries that continue the table."""
    unconfirmed: Sequence[Located] = ()
    """Published entries whose data files have not been seen since."""
    block: Block | None = None
    epochs: Sequence[tuple[int, int]]
    """(leader epoch, its first offset), as of the checkpoint."""
    later: Sequence[Entry]
    """Entries that the checkpoint does not reflect, in the order of offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedTopic:
    """A topic with partitions that this broker takes over."""

    topic: Topic
    known: TopicMetadata
    held_back: str | None
    """The reason the topic's table cannot be written; None if it can."""
    batches: Sequence[tuple[BatchId, BatchKind, int]]
    """See `TopicTable.batches`."""
    are_batches_known: bool
    partitions: Sequence[InheritedPartition]


class LedPartitions:
    """All topics, the partitions that this broker leads, and the WAL objects that they need."""

    def __init__(self, broker: int, *, clock: Clock | None = None) -> None:
        """`clock`: its monotonic time decides when producers expire."""
        self.broker = broker
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._changes = CheckpointChanges()
        self.backlog = Backlog(self._lock, self._changes, self.by_id, clock=self._clock)
        """The entries that wait to be written to the tables."""
        self._duplicates = Duplicates(self._changes, clock=self._clock)
        self.growths = Growths(
            self._lock, lambda topic, number: self.topic(topic).partition(number)
        )
        self.resignations = Resignations(
            self._lock, self._changes, self.backlog, self._duplicates, self.by_id, clock=self._clock
        )
        """Partitions that are moving, or have moved, from this broker to others."""
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[str, Topic] = {}
        self._removed: dict[str, float] = {}
        """When the topics of the last `_DELETED_NAME_SECONDS` were removed (monotonic), by name."""
        self.topics_version = 0
        """Increases whenever a topic is added or removed."""
        self.on_leaders: Callable[[], None] = lambda: None
        """Called when partitions have new leaders, or begin to be served."""
        self.is_takeover_stuck = False
        """True while partitions assigned to this broker cannot be restored, and some time after."""
        self.taken_seconds = -math.inf
        """When this broker last took over a partition of a predecessor (monotonic seconds)."""
        self.applied_sequence = -1
        """The newest object of our own WAL that is reflected here."""
        self._removed_counts = TopicCounts()
        """The totals of deleted topics, so that the broker's totals never decrease."""

    # -------------------------------------------------------------------------- topics

    def topics(self) -> list[Topic]:
        with self._lock:
            return list(self._topics.values())

    def topics_and_removed(self) -> tuple[list[Topic], TopicCounts]:
        """Returns the topics, and the totals of deleted ones; each topic is in only one of them."""
        with self._lock:
            removed = TopicCounts()
            removed.add(self._removed_counts)
            return self.topics(), removed

    def topic(self, name: str) -> Topic:
        """Raises `UnknownTopic`."""
        found = self._topics.get(name)
        if found is None:
            raise errors.UnknownTopic(topic=name)
        return found

    def has_topic(self, name: str) -> bool:
        return name in self._topics

    def by_id(self, topic_id: str) -> Topic | None:
        return self._by_id.get(topic_id)

    def was_just_removed(self, name: str) -> bool:
        """Returns whether a topic of that name was removed within `_DELETED_NAME_SECONDS`."""
        removed = self._removed.get(name)
        now = self._clock.monotonic()
        return removed is not None and now - removed < _DELETED_NAME_SECONDS

    @property
    def partition_count(self) -> int:
        """The number of partitions that this broker leads."""
        return sum(len(topic.partitions) for topic in self.topics())

    def add_topic(self, topic: Topic) -> None:
        """Adds a topic, unless it is already present."""
        with self._lock:
            if topic.topic_id in self._by_id:
                return
            self._topics[topic.name] = topic
            self._by_id[topic.topic_id] = topic
            self.backlog.update_waiting(topic)  # it may already be held back
            for partition in topic.partitions.values():
                self._changes.note_bounds(topic, partition)
            self.topics_version += 1

    def add_partitions(
        self,
        topic: Topic,
        snapshot: TableSnapshot,
        metadata: ClusterMetadata,
    ) -> None:
        """Adds the partitions that `metadata` has beyond those of `topic`.

        Of these, it serves the ones that this broker leads and that no broker has led before, with
        the bounds of `snapshot`. Those of a predecessor are restored by `recovery`. If there are
        other brokers, their clients may have known the partitions before this broker did.
        """
        known = metadata.topics[topic.name]
        are_others = any(each.broker != self.broker for each in placement.candidates(metadata))
        taken_seconds = self._clock.monotonic() if are_others else -math.inf
        with self._lock:
            added = {
                number: Partition(
                    number,
                    leader_epoch=0,
                    start=snapshot.starts[number],
                    published=snapshot.ends[number],
                    since_version=snapshot.version,
                )
                for number in range(topic.count, known.partition_count)
                if known.leaders[number] == self.broker and not known.leader_epochs[number]
            }
            for partition in added.values():
                partition.taken_seconds = taken_seconds
            self.lead(topic, known, added, version=metadata.version)

    def set_config(self, topic: Topic, config: Mapping[str, str]) -> None:
        """Replaces the configuration of a topic."""
        with self._lock:
            topic.config = dict(config)
            self.backlog.reconsider(topic)

    def remove_topic(self, topic: Topic) -> None:
        """Removes a topic, if it is present. The entries of a deleted topic count as published."""
        with self._lock:
            if self._by_id.get(topic.topic_id) is not topic:
                return
            if self._topics.get(topic.name) is topic:
                del self._topics[topic.name]
                self._note_removed(topic.name)
            del self._by_id[topic.topic_id]
            self.topics_version += 1
            self._changes.forget_topic(topic.topic_id)
            self._removed_counts.add(topic.counts)
            self.backlog.forget_topic(topic)
            for partition in topic.partitions.values():
                self._changes.forget(partition)
                self._duplicates.forget(partition)
                partition.growth.close()
            self.resignations.forget_topic(topic)
        for partition in topic.partitions.values():
            with self._lock:  # for one at a time, because other threads wait for it
                self._duplicates.forget_producers(partition)

    def _note_removed(self, name: str) -> None:
        now = self._clock.monotonic()
        while self._removed and not self.was_just_removed(next(iter(self._removed))):
            del self._removed[next(iter(self._removed))]
        self._removed.pop(name, None)
        self._removed[name] = now  # the newest last

    # -------------------------------------------------------------------------- leaders

    def lead(
        self,
        topic: Topic,
        known: TopicMetadata,
        added: Mapping[int, Partition] | None = None,
        *,
        version: int,
    ) -> None:
        """Records the leaders of a topic's partitions, and begins to serve those of `added`.

        The states of these must be complete, because other threads find them without the lock.
        If the metadata's `version` is older than the recorded one, only the leaders of partitions
        beyond the recorded ones are new: `lead_known` has recorded the newer version without them.
        """
        with self._lock:
            for number in added or ():
                # Our checkpoints may have its state from an earlier term: it is not continued.
                self.resignations.release(topic.topic_id, number)
            if added:
                assert not added.keys() & topic.partitions.keys(), "their records would be lost"
                topic.partitions = dict(sorted({**topic.partitions, **added}.items()))
                for partition in added.values():
                    if partition.state is PartitionState.AWAITED:
                        partition.move(PartitionEvent.RESTORED)
                    self._changes.note_bounds(topic, partition)
            if version >= topic.version:
                assert all(known.leaders[number] == self.broker for number in topic.partitions)
                topic.version = version
                # In this order: `count` is the number of leaders, and is read without the lock.
                topic.leader_epochs = known.leader_epochs
                topic.leaders = known.leaders
                self.resignations.note_leaders(topic)
            elif known.partition_count > topic.count:
                topic.leader_epochs += known.leader_epochs[topic.count :]
                topic.leaders += known.leaders[topic.count :]
        self.on_leaders()

    def lead_known(self, topic: Topic, known: TopicMetadata, *, version: int) -> bool:
        """Records the leaders of the topic's existing partitions, as `lead` does.

        Returns whether they have changed.
        """
        with self._lock:
            was, count = (topic.leaders, topic.leader_epochs), topic.count
            if known.partition_count > count:
                known = msgspec.structs.replace(
                    known, leaders=known.leaders[:count], leader_epochs=known.leader_epochs[:count]
                )
            self.lead(topic, known, version=version)
            return (topic.leaders, topic.leader_epochs) != was

    def inherit(
        self,
        inherited: Sequence[InheritedTopic],
        states: Iterable[tuple[bytes, Container[tuple[str, int]]]],
        *,
        version: int,
        now_seconds: float,
    ) -> list[Located]:
        """Begins to serve partitions of predecessors, all at the same moment.

        Returns their unpublished entries.

        Args:
            inherited: the topics; those deleted since are skipped.
            states: encoded states of checkpoints, each with the (topic id, partition) pairs to use.
            version: the version of the metadata that names this broker as the leader.
            now_seconds: the monotonic time, if this broker already serves clients.
        """
        restored: dict[tuple[str, int], tuple[Topic, Partition]] = {}
        with self._lock:
            alive = [each for each in inherited if self.by_id(each.topic.topic_id) is each.topic]
            for each in alive:
                if each.held_back is not None:
                    self.backlog.hold_back(each.topic, each.held_back)
                each.topic.spark_batches.record_all(each.batches)
                each.topic.spark_batches.is_known = each.are_batches_known
                for found in each.partitions:
                    self._connect(each.topic, found)
                    found.partition.taken_seconds = now_seconds
                    key = each.topic.topic_id, found.partition.number
                    restored[key] = each.topic, found.partition
            if restored:
                self.taken_seconds = now_seconds
            self._duplicates.restore(states, restored)
            for each in alive:
                for found in each.partitions:
                    self._duplicates.restore_entries(
                        each.topic, found.partition, found.epochs, found.later
                    )
            for each in inherited:
                added = {
                    found.partition.number: found.partition
                    for found in each.partitions
                    if (each.topic.topic_id, found.partition.number) in restored
                }
                self.lead(each.topic, each.known, added, version=version)
            return [waiting for _, each in restored.values() for waiting in each.unpublished]

    def _connect(self, topic: Topic, found: InheritedPartition) -> None:
        """Adds the entries of an inherited partition, or blocks it."""
        found.partition.move(PartitionEvent.RESTORED)
        block = found.block
        if block is None:
            self.backlog.restore_tail(topic, found.partition, found.tail)
            self.backlog.add_unconfirmed(topic, found.partition, found.unconfirmed)
            return
        self.backlog.block(
            topic,
            found.partition,
            block.reason,
            end=block.end,
            stranded=block.stranded,
            is_end_known=block.is_end_known,
        )
        if block.is_end_known:
            self.backlog.hold_back(topic, topic.held_back or str(block.reason))

    # -------------------------------------------------------------------------- states

    def state(self, topic: Topic, number: int) -> PartitionState:
        """Returns the state of an existing partition, as this broker knows it."""
        found = topic.partitions.get(number)
        if found is not None:
            return found.state
        if self.resignations.is_undecided(topic, number):
            return PartitionState.RESIGNED
        is_ours = topic.leaders[number] == self.broker
        return PartitionState.AWAITED if is_ours else PartitionState.ELSEWHERE

    def is_moving(self, topic: Topic, number: int) -> bool:
        """Returns whether a partition is in a `MOVING` state; False for one that is unknown."""
        return 0 <= number < topic.count and self.state(topic, number) in MOVING

    def reinstate(self, topic_id: str, number: int) -> None:
        """Resumes serving a resigned partition, because no other broker has led it since."""
        if self.resignations.revoke(topic_id, number):
            self.on_leaders()

    # -------------------------------------------------------------------------- durable facts

    def exclusively(self, work: Callable[[_Item], object], items: Iterable[_Item]) -> None:
        """Calls `work` for each item with the lock held. It must not block."""
        with self._lock:
            for each in items:
                work(each)

    def apply(self, written: WalObject) -> None:
        """Applies the next durable object of our WAL."""
        with self._lock:
            self.applied_sequence = written.at.sequence
            self.backlog.note_flush(written)
            for each in written.located:
                entry = each.entry
                if entry.kind is not EntryKind.RECORDS and entry.kind is not EntryKind.STAGED:
                    continue
                topic = self._by_id.get(entry.topic_id)
                if topic is None:
                    continue  # deleted while the flush was under way
                if entry.carried and entry.partition not in topic.partitions:
                    continue  # handed over to another broker while the flush was under way
                partition = topic.partitions[entry.partition]
                self._duplicates.record(topic, partition, entry)
                if entry.carried:
                    self.backlog.replace_with_copy(partition, each)
                    continue
                partition.note_epoch(entry)
                assert entry.base_offset == partition.end, (
                    f"{topic.name}-{entry.partition}: {entry.base_offset} after {partition.end}"
                )
                partition.end = entry.end
                self.backlog.add(topic, partition, each)
                size = payload_bytes(entry)
                partition.growth.add(size, entry.base_offset)
                counts = topic.counts
                counts.batches_in += 1
                counts.records_in += entry.rows
                counts.bytes_in += size

    def advance_start(self, topic: Topic, starts: Sequence[int]) -> None:
        """Records the log starts in a durable version of the table, one per partition.

        A start never moves back. A start beyond our end was set by a successor of this broker.
        """
        with self._lock:
            for number, partition in topic.partitions.items():
                # Partitions may have been added since that version.
                start = starts[number] if number < len(starts) else 0
                if start > partition.start:
                    partition.start = max(partition.start, min(start, partition.end))
                    self._changes.note_bounds(topic, partition)

    def checkpoint(
        self, *, after: int, broker: int, epoch: int, now_us: int
    ) -> CheckpointContent | None:
        """Returns the content of the next checkpoint of our WAL.

        None if no object follows the one with sequence `after`. Each content has only the state
        changes since the previous one, so all must be passed to the same `StateEncoder`.
        """
        with self._lock:
            if self.applied_sequence < 0 or self.applied_sequence == after:
                return None
            return CheckpointContent(
                sequence=self.applied_sequence,
                references=self.backlog.objects.references(broker, epoch),
                bounds=self.bounds(),
                states=self.snapshot_states(now_us=now_us),
                led={
                    topic.topic_id: {n: each.leader_epoch for n, each in topic.partitions.items()}
                    for topic in self._topics.values()
                },
            )

    def bounds(self) -> dict[str, tuple[Bounds, ...]]:
        """Returns the bounds of each partition of each topic, by topic id.

        Recomputes only those of the partitions that have changed since the last call.
        """
        with self._lock:
            return self._changes.bounds(lambda each: self._by_id.get(each.topic_id) is each)

    def snapshot_states(self, *, now_us: int) -> StateSnapshot:
        """Returns the producers and Spark batches for a checkpoint; see `Duplicates.snapshot`."""
        with self._lock:
            return self._duplicates.snapshot(now_us=now_us, topics=self._by_id)

    # -------------------------------------------------------------------------- memory of producers

    def epoch_end(self, partition: Partition, leader_epoch: int) -> tuple[int, int]:
        """Returns the end of a leader epoch; see `Partition.epoch_end`."""
        with self._lock:
            return partition.epoch_end(leader_epoch)

    def producers(self, partition: Partition) -> list[Mapping[int, ProducerState]]:
        """Returns the producers that a partition remembers, by id, in blocks."""
        with self._lock:
            return [*filter(None, partition.producers.blocks())]

    def expire_producers(self, horizon_ms: int) -> None:
        """Drops some of the producers that were last seen before `horizon_ms`."""
        with self._lock:
            self._duplicates.expire_producers(horizon_ms)

    def batches(
        self, partitions: Collection[Partition], batch_id: BatchId
    ) -> dict[int, SparkBatch]:
        """Returns the Spark batch as partitions of a topic remember it, by partition number."""
        with self._lock:
            found = {each.number: each.batches.find(batch_id) for each in partitions}
        return {number: each for number, each in found.items() if each is not None}

    def record_batches(
        self, topic: Topic, batches: Iterable[tuple[BatchId, BatchKind, int]]
    ) -> None:
        """Records the batches that a topic's table lists; see `TopicTable.batches`."""
        with self._lock:
            topic.spark_batches.record_all(batches)
