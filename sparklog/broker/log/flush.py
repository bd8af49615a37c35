"""A flush in preparation: validates appends, assigns offsets, and holds the resulting states.

The states apply once the flush is durable. Partitions are read under their lock. Earlier flushes
that are still in flight count: the newest one to change a partition or producer has its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sparklog import errors, limits
from sparklog.broker.log.appends import (
    Append,
    AppendResult,
    CarriedEntry,
    EmptyObject,
    PendingAppend,
)
from sparklog.broker.log.hot_tail import HotRecords
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.producer_state import (
    ProducerSequence,
    ProducerState,
    Refusals,
    SequencedBatch,
    advance,
    find_duplicate,
    skips,
)
from sparklog.broker.log.topic import Topic
from sparklog.storage import wal
from sparklog.storage.snapshot import BatchId, BatchKind, Entry, EntryKind

_FLUSH_INTERVAL_REMOTE_SECONDS = 0.01  # between concurrent puts: at most 8.6 million a day
_TOPIC_HELD_BYTES = 1 * limits.GIB
_TOPIC_HELD_STAGED_BYTES = 8 * limits.GIB
PRODUCER_MOVE_SECONDS = 15.0  # after a partition arrives, while clients retry rejected batches

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    flush_max_bytes: int = limits.FLUSH_MAX_BYTES
    flush_max_entries: int = limits.FLUSH_MAX_ENTRIES
    linger_seconds: float = 0.0
    flushes_at_once: int = 1
    """More than 1 only if the appender can plan flushes."""
    flush_interval_seconds: float = _FLUSH_INTERVAL_REMOTE_SECONDS
    """The minimum time between the starts of two concurrent flushes."""
    queue_bytes: int = limits.QUEUE_BYTES
    unpublished_bytes: int = limits.UNPUBLISHED_BYTES
    staged_bytes: int = limits.STAGED_BYTES
    topic_held_bytes: int = _TOPIC_HELD_BYTES
    topic_held_staged_bytes: int = _TOPIC_HELD_STAGED_BYTES
    max_record_bytes: int = limits.MAX_RECORD_BYTES
    max_batch_bytes: int = limits.MAX_BATCH_BYTES
    free_space_reserve_bytes: int = limits.FREE_SPACE_RESERVE_BYTES


class Flush:
    """A flush in preparation: the entries, and the states that apply once they are durable."""

    def __init__(
        self,
        led_partitions: LedPartitions,
        refusals: Refusals,
        *,
        bounds: WriterLimits,
        now_seconds: float,
        pending_appends: Sequence[PendingAppend] = (),
        previous: Flush | None = None,
    ) -> None:
        """`previous`: the preceding flush, if it is still under way."""
        self.pending_appends = pending_appends
        self.previous = previous
        self.planned: wal.PlannedFlush | None = None
        self.is_done = False
        self.failure: BaseException | None = None
        """The error of a finished flush that does not count."""
        self._led_partitions = led_partitions
        self._refusals = refusals
        self._bounds = bounds
        self._now_seconds = now_seconds
        self._ends: dict[tuple[str, int], int] = {}
        self._states: dict[tuple[str, int, int], ProducerState] = {}
        self._batches: dict[tuple[str, int, BatchId], AppendResult] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """By topic id and query: the newest batch number in this flush."""
        self.entries: list[tuple[Entry, wal.Payload]] = []
        self.hot_records: list[HotRecords | None] = []

    def add(self, pending: PendingAppend) -> None:
        """Assigns offsets to the appends of `pending`, or rejects all of them."""
        mark = len(self.entries)
        # A rejected single append changes nothing, and copying for each of many would be expensive.
        alone = len(pending.appends) == 1
        before = None if alone else (dict(self._ends), dict(self._states))
        batches: dict[tuple[str, int, BatchId], AppendResult] = {}
        try:
            for each in pending.appends:
                if isinstance(each, CarriedEntry):
                    self._carry(each)
                    continue
                if isinstance(each, EmptyObject):
                    self.entries.append((Entry(kind=EntryKind.OPEN), each.payload))
                    self.hot_records.append(None)
                    continue
                result = self._append(each)
                pending.results.append(result)
                if each.batch_id is not None and not result.duplicate:
                    batches.setdefault((each.topic_id, each.partition, each.batch_id), result)
        except errors.SparklogError as error:
            pending.error = error
            if before is not None:
                del self.entries[mark:], self.hot_records[mark:]
                self._ends, self._states = before
        else:
            self._batches.update(batches)  # only now: a batch may have several appends
            for topic_id, _, batch_id in batches:
                self._newest[topic_id, batch_id.query] = batch_id.batch

    def _find(self, look: Callable[[Flush], _Found | None]) -> _Found | None:
        """Returns the newest state in this flush and the earlier ones that are under way."""
        flush: Flush | None = self
        while flush is not None:
            found = look(flush)
            if found is not None:
                return found
            flush = flush.previous
        return None

    def _carry(self, carry: CarriedEntry) -> None:
        """Copies an entry that this broker still has to publish.

        If the copy followed its partition's resignation, the next leader would mistake it for the
        original, although this broker does not retain it.
        """
        if not self._led_partitions.backlog.objects.may_carry(carry.located):
            return
        self.entries.append(
            (msgspec.structs.replace(carry.located.entry, carried=True), carry.payload)
        )
        self.hot_records.append(None)

    def _check_predecessor(
        self,
        append: Append,
        partition: Partition,
        state: ProducerState | None,
        producer_sequence: ProducerSequence,
    ) -> None:
        """Raises `EarlierBatchMissing` if the previous batch may have been rejected in a move."""
        since_seconds = self._now_seconds - partition.taken_seconds
        if since_seconds < PRODUCER_MOVE_SECONDS and skips(state, producer_sequence):
            raise errors.EarlierBatchMissing(
                topic=append.topic,
                partition=append.partition,
                producer_id=producer_sequence.producer_id,
            )

    def _append(self, append: Append) -> AppendResult:
        topic = self._led_partitions.by_id(append.topic_id)
        if topic is None:
            raise errors.UnknownTopic(topic=append.topic)
        if topic.in_doubt is not None:
            raise errors.TopicHeldBack(topic=topic.name, reason=topic.in_doubt)
        if topic.held_back and self._exceeds_held_bytes(topic, append):
            raise errors.TopicHeldBack(topic=topic.name, reason=topic.held_back)
        partition = topic.partition(append.partition)
        if partition.blocked is not None:
            raise errors.TopicHeldBack(topic=topic.name, reason=str(partition.blocked))
        key = append.topic_id, append.partition
        base = self._find(lambda flush: flush._ends.get(key))
        if base is None:
            base = partition.end
        if append.batch_id is not None:
            batch_key = *key, append.batch_id
            batch = partition.batches.find(append.batch_id) or self._find(
                lambda flush: flush._batches.get(batch_key)
            )
            if batch is not None:
                return _duplicate(append, batch.base_offset, batch.arrival_us)
            self._check_batch(topic, partition, append.batch_id, append.batch_kind)
        _check_offsets(topic, append, base)
        producer_sequence = append.producer_sequence
        if producer_sequence is not None:
            state_key = (*key, producer_sequence.producer_id)
            state = self._find(lambda flush: flush._states.get(state_key))
            if state is None:
                state = partition.producers.get(producer_sequence.producer_id)
            self._check_predecessor(append, partition, state, producer_sequence)
            written = find_duplicate(
                state, producer_sequence, append.count, topic=topic.name, partition=append.partition
            )
            if written is not None:
                return _duplicate(append, written.base_offset, written.arrival_us)
            if state is None:
                self._refusals.check(*key, producer_sequence, self._now_seconds, topic=topic.name)
            written = SequencedBatch(
                producer_sequence.base_sequence, append.count, base, append.arrival_us
            )
            self._states[state_key] = advance(state, producer_sequence.epoch, written)
        self._ends[key] = base + append.count
        self.entries.append(
            (append.entry(base_offset=base, leader_epoch=partition.leader_epoch), append.payload)
        )
        self.hot_records.append(append.hot_records)
        return AppendResult(
            base_offset=base,
            count=append.count,
            arrival_us=append.arrival_us,
            timestamp_type=append.timestamp_type,
        )

    def _exceeds_held_bytes(self, topic: Topic, append: Append) -> bool:
        if append.staged is not None:
            return topic.staged_bytes > self._bounds.topic_held_staged_bytes
        return topic.unpublished_bytes > self._bounds.topic_held_bytes

    def _check_batch(
        self, topic: Topic, partition: Partition, batch_id: BatchId, kind: BatchKind
    ) -> None:
        """Raises `BadRequest` for a batch that a newer commit of its query has overtaken.

        Also for a part that the partition could not remember for the required time. Raises
        `MetadataChanged` for a whole batch if another attempt at it is being written, or has just
        written a part of it because the topic had several leaders: the next attempt finds it.
        """
        if kind.is_part and not partition.batches.has_space(batch_id, kind):
            reason = (
                f"{topic.name}-{partition.number} has too many Spark writes that went to several"
                " brokers, and would forget one: write with fewer query names, or later"
            )
            raise errors.BadRequest(reason=reason)
        key = topic.topic_id, batch_id.query
        under_way = self._find(lambda flush: flush._newest.get(key))
        begun = max(
            topic.spark_batches.begun(batch_id.query), -1 if under_way is None else under_way
        )
        # Another partition may already have a part of this batch, but none may have all of it.
        whole = topic.spark_batches.newest(batch_id.query)
        newest = max(begun - 1, whole) if kind.is_part else begun
        if kind.is_numbered and batch_id.batch <= newest:
            known = (each.batches.find(batch_id) for each in topic.partitions.values())
            has_part = any(each is not None and each.kind.is_part for each in known)
            if not kind.is_part and (has_part or batch_id.batch == under_way):
                raise errors.MetadataChanged
            reason = (
                f"batch {batch_id.batch} of {batch_id.query} arrived after batch {newest}:"
                " two drivers write batches of one query; stop one of them"
            )
            raise errors.BadRequest(reason=reason)


def _check_offsets(topic: Topic, append: Append, end: int) -> None:
    """Checks that a mirror receives only records of its source, and that they continue it.

    Raises `TopicIsMirror`, `NotAMirror`, `OffsetsDoNotContinue`.
    """
    source, kept = topic.mirror_source, append.kept
    if kept is None:
        if source is not None:
            raise errors.TopicIsMirror(topic=topic.name, source=source)
        return
    if source is None:
        raise errors.NotAMirror(topic=topic.name)
    if kept.first != end:
        raise errors.OffsetsDoNotContinue(
            topic=topic.name, partition=append.partition, first=kept.first, end=end
        )


def _duplicate(append: Append, base_offset: int, arrival_us: int) -> AppendResult:
    return AppendResult(
        base_offset=base_offset,
        count=append.count,
        arrival_us=arrival_us,
        timestamp_type=append.timestamp_type,
        duplicate=True,
    )
