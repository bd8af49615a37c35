"""WAL writer: group commit over all topics of a broker.

Appends queue while a flush is under way. The next flush takes the queued appends, assigns offsets,
puts one WAL object, and only then answers. If no flush is under way, the thread that waits for an
append leads one itself, so a lone producer pays no hand-over between threads, and many share a put.

- Offsets are assigned in the order of the queue.
- A flush is applied only after its object is durable. So a refused flush has no effect, and its
  appends may be sent again.
- On an object store several flushes are under way at the same time. Threads of the broker lead them
  beside those that wait, because a listener may have one thread that waits for all its clients.
- Each of these flushes is judged on the state that those before it leave, and is applied and
  answered after them, in order. Once a flush was planned, the one before it is not refused any
  more: it is put until it is durable or fenced. If it is fenced, so are all after it, whatever
  became of their objects.
- A fenced put, or a failed local fsync, ends the writer for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.counts import Budget
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log.flush_pace import FlushPace
from sparklog.broker.log.hot_tail import HotRecords, HotTail
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.partitions import PartitionTable
from sparklog.broker.log.producer_state import (
    NO_PRODUCER,
    ProducerSequence,
    ProducerState,
    Refusals,
    SequencedBatch,
    advance,
    find_duplicate,
    skips,
)
from sparklog.broker.log.topic import Topic
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock
from sparklog.formats.record import (
    LOG_APPEND_TIME,
    check_record_sizes,
    conform_payload,
    count_keyless,
    timestamp_range_us,
)
from sparklog.storage import wal
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import (
    BatchId,
    BatchKind,
    Encoding,
    Entry,
    EntryKind,
    Located,
    StagedRef,
)

if TYPE_CHECKING:
    from sparklog.formats.record_batch import CheckedBatch

_FLUSH_INTERVAL_REMOTE_SECONDS = 0.01  # between two puts under way: 8.6 million a day at most
QUICK_FLUSH_BYTES = 64 * limits.KIB  # of a flush that the Kafka listener's event loop leads itself
_TOPIC_HELD_BYTES = 1 * limits.GIB
_TOPIC_HELD_STAGED_BYTES = 8 * limits.GIB
FREE_SPACE_SECONDS = 0.1  # between two looks at the free space while twice the reserve is free
PRODUCER_MOVE_SECONDS = 15.0  # after a partition has come, in which refused batches come again
KAFKA_QUICK_BYTES = 32 * limits.KIB  # of a compressed batch that is checked on the event loop
KAFKA_QUICK_RECORDS_BYTES = 256 * limits.KIB  # the same, decompressed
KAFKA_RECORD_ERRORS = 1_000  # invalid records of a batch that an error names

_Found = TypeVar("_Found")

NO_TIMESTAMP: Final = -1
"""In ms: the timestamp that Kafka clients give a record that has none."""


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """The first offset of an append that keeps its offsets, and the number of its rows.

    Offsets without a row are gaps.
    """

    first: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Records for one partition, checked and encoded, without offsets."""

    topic: str
    topic_id: str
    partition: int
    count: int
    arrival_us: int
    min_timestamp_us: int
    max_timestamp_us: int
    timestamp_type: int
    payload: wal.Payload = wal.EMPTY
    encoding: Encoding = Encoding.ARROW
    hot_records: HotRecords | None = None
    """The records for the hot tail; None for staged records."""
    decoded_bytes: int = 0
    """Bytes of the records as Arrow columns, decompressed; 0 if unknown."""
    producer_sequence: ProducerSequence | None = None
    staged: StagedRef | None = None
    batch_id: BatchId | None = None
    batch_kind: BatchKind = BatchKind.NUMBERED
    kept: KeptOffsets | None = None
    """Its offsets, if it keeps them; `count` of them."""

    def entry(self, *, base_offset: int, leader_epoch: int) -> Entry:
        producer_sequence = self.producer_sequence
        return Entry(
            kind=EntryKind.RECORDS if self.staged is None else EntryKind.STAGED,
            topic_id=self.topic_id,
            partition=self.partition,
            base_offset=base_offset,
            count=self.count,
            min_timestamp_us=self.min_timestamp_us,
            max_timestamp_us=self.max_timestamp_us,
            arrival_us=self.arrival_us,
            timestamp_type=self.timestamp_type,
            leader_epoch=leader_epoch,
            producer_id=producer_sequence.producer_id if producer_sequence else NO_PRODUCER,
            producer_epoch=producer_sequence.epoch if producer_sequence else -1,
            base_sequence=producer_sequence.base_sequence if producer_sequence else -1,
            batch_id=self.batch_id,
            batch_kind=self.batch_kind,
            encoding=self.encoding,
            staged=self.staged,
            decoded_bytes=self.decoded_bytes,
            kept_rows=self.kept.rows if self.kept is not None else -1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedEntry:
    """An older entry that is appended again with its offsets, so that its object can go."""

    located: Located
    payload: wal.Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyObject:
    """An object without records.

    A checkpoint can follow it as it would follow one with records, and it is durable after all
    appends before it.
    """

    payload: wal.Payload = wal.EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """Offsets of an append. `duplicate`: an earlier append had already written the records."""

    base_offset: int
    count: int
    arrival_us: int
    timestamp_type: int
    duplicate: bool = False


class WouldBlock(Exception):
    """The check would take too long for the event loop; repeat it in a thread."""


class PendingAppend:
    """Appends that become durable together or not at all, and their results."""

    __slots__ = (
        "appends",
        "bytes",
        "done",
        "error",
        "gate",
        "is_queued",
        "is_staged",
        "results",
        "waiting",
    )

    def __init__(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        self.appends = appends
        self.bytes = sum(each.payload.length for each in appends)
        self.is_staged = any(isinstance(each, Append) and each.staged for each in appends)
        self.results: list[AppendResult] = []
        self.error: BaseException | None = None
        self.is_queued = True
        """False once a flush has taken it."""
        self.done = False
        self.waiting = False
        self.gate = threading.Lock()
        self.gate.acquire()

    def outcome(self) -> list[AppendResult]:
        """Returns one result per append. Raises their error; `OutcomeUnknown` if it is unclear."""
        assert self.done
        if self.error is None:
            return self.results
        if isinstance(self.error, errors.SparklogError):
            raise self.error
        raise errors.OutcomeUnknown(what="an append", reason=repr(self.error)) from self.error


class _Flush:
    """A flush in preparation: the entries, and the states that apply once they are durable."""

    def __init__(
        self,
        partition_table: PartitionTable,
        refusals: Refusals,
        *,
        bounds: WriterLimits,
        now_seconds: float,
        pending_appends: Sequence[PendingAppend] = (),
        previous: _Flush | None = None,
    ) -> None:
        """`previous`: the flush before it, if that is still under way."""
        self.pending_appends = pending_appends
        self.previous = previous
        self.planned: wal.PlannedFlush | None = None
        self.is_done = False
        self.failure: BaseException | None = None
        """The error of a flush that is done and does not count."""
        self._partition_table = partition_table
        self._refusals = refusals
        self._bounds = bounds
        self._now_seconds = now_seconds
        self._ends: dict[tuple[str, int], int] = {}
        self._states: dict[tuple[str, int, int], ProducerState] = {}
        self._batches: dict[tuple[str, int, BatchId], AppendResult] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """By topic id and query: the newest batch numbers in this flush."""
        self.entries: list[tuple[Entry, wal.Payload]] = []
        self.hot_records: list[HotRecords | None] = []

    def add(self, pending: PendingAppend) -> None:
        """Assigns offsets to the appends of `pending`, or refuses all of them."""
        mark = len(self.entries)
        # A refused single append changes nothing, and copies would be expensive for many of them.
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

    def _find(self, look: Callable[[_Flush], _Found | None]) -> _Found | None:
        """Returns the newest state in this flush and those under way before it."""
        flush: _Flush | None = self
        while flush is not None:
            found = look(flush)
            if found is not None:
                return found
            flush = flush.previous
        return None

    def _carry(self, carry: CarriedEntry) -> None:
        """Copies an entry that is still to be published by this broker.

        A copy behind the resignation of its partition would be taken for the original by the next
        leader, although nothing of ours keeps it.
        """
        if not self._partition_table.backlog.may_carry(carry.located):
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
        """Raises `EarlierBatchMissing` if the batch before may have been refused during a move."""
        since_seconds = self._now_seconds - partition.taken_seconds
        if since_seconds < PRODUCER_MOVE_SECONDS and skips(state, producer_sequence):
            raise errors.EarlierBatchMissing(
                topic=append.topic,
                partition=append.partition,
                producer_id=producer_sequence.producer_id,
            )

    def _append(self, append: Append) -> AppendResult:
        topic = self._partition_table.by_id(append.topic_id)
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

        And for a part that the partition could not remember for as long as it has to. Raises
        `MetadataChanged` for the whole of a batch of which another attempt is written, or has just
        written a part because the topic had several leaders: the next attempt finds it.
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
        # Another partition may have a part of this batch already, but none may have the whole.
        whole = topic.spark_batches.newest(batch_id.query)
        newest = max(begun - 1, whole) if kind.is_part else begun
        if kind.is_numbered and batch_id.batch <= newest:
            known = (each.batches.find(batch_id) for each in topic.partitions.values())
            has_part = any(each is not None and each.kind.is_part for each in known)
            if not kind.is_part and (has_part or batch_id.batch == under_way):
                raise errors.MetadataChanged
            reason = (
                f"batch {batch_id.batch} of {batch_id.query} comes after batch {newest}:"
                " two drivers write batches of one query; stop one of them"
            )
            raise errors.BadRequest(reason=reason)


def _check_offsets(topic: Topic, append: Append, end: int) -> None:
    """Checks that a mirror gets the records of its source, which continue it, and no others.

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


_EXCESS_BYTES: Final = 64 * limits.KIB
"""Memory that a batch may keep alive beyond twice its size; Flight messages have some."""


def _without_excess_memory(batch: pa.RecordBatch, payload: wal.Payload) -> pa.RecordBatch:
    """Returns the batch, copied if it keeps much more memory alive than it has data.

    Its buffers may be small slices of a large message, and the hot tail counts only the slices.
    """
    kept_bytes = 0
    for column in batch.columns:
        for buffer in column.buffers():
            while buffer is not None and buffer.parent is not None:
                buffer = buffer.parent
            kept_bytes = max(kept_bytes, buffer.size if buffer is not None else 0)
    if kept_bytes <= 2 * payload.length + _EXCESS_BYTES:
        return batch
    return wal.decode_body(batch.schema, payload)


def _check_message(topic: Topic, batch: bytes | bytearray) -> None:
    """Raises `MessageTooLarge`."""
    limit = topic.max_message_bytes
    if limit is not None and len(batch) > limit:
        raise errors.MessageTooLarge(
            what="a batch", bytes=len(batch), limit_bytes=limit, topic=topic.name
        )


def _checked_quickly(data: bytes, wanted: tuple[str, int] | None, limit_bytes: int) -> CheckedBatch:
    """Checks a batch if that is quick. Raises `WouldBlock` and the errors of `record_batch.check`.

    The size of a compressed batch is known only after decompression, so it is decompressed up to a
    small limit. An uncompressed batch is checked about as fast as it was read.
    """
    from sparklog.formats import record_batch

    codec = record_batch.read_header(data).codec
    if wanted is not None and codec != record_batch.Codec[wanted[0].upper()]:
        raise WouldBlock
    if codec == record_batch.Codec.NONE and len(data) <= limits.LARGE_BYTES:
        return record_batch.check(data, limit_bytes=limit_bytes)
    if len(data) > KAFKA_QUICK_BYTES:
        raise WouldBlock
    quick_bytes = min(KAFKA_QUICK_RECORDS_BYTES, limit_bytes)
    try:
        return record_batch.check(data, limit_bytes=quick_bytes)
    except errors.BatchTooLarge:
        raise WouldBlock from None


def _check_times(topic: Topic, batch: CheckedBatch, now_us: int) -> None:
    """Raises `BadTimestamp` for timestamps that the topic refuses, or that the table cannot hold.

    As in Kafka's `LogValidator`, a record without a timestamp (-1 ms) is not too early.
    """
    first_ms, last_ms = topic.time_bounds_ms(now_us)
    first_ms = max(first_ms, limits.TIMESTAMP_MIN_US // 1_000)
    last_ms = min(last_ms, limits.TIMESTAMP_MAX_US // 1_000)
    low_ms, high_ms = batch.min_timestamp_ms, batch.max_timestamp_ms
    if first_ms <= low_ms and high_ms <= last_ms:
        return
    from sparklog.formats import record_batch

    stamps_ms, _ = record_batch.stamps_and_keys(batch)
    refused = ((stamps_ms < first_ms) | (stamps_ms > last_ms)) & (stamps_ms != NO_TIMESTAMP)
    records = [
        (index, f"{stamps_ms[index]} ms is not within {first_ms} to {last_ms} ms")
        for index in refused.nonzero()[0][:KAFKA_RECORD_ERRORS].tolist()
    ]
    # Timestamps beyond an int64 wrap around in the array; only the bounds show them.
    if records or high_ms > last_ms or low_ms < min(first_ms, NO_TIMESTAMP):
        reason = f"{low_ms} to {high_ms} ms is not within {first_ms} to {last_ms} ms"
        raise errors.BadTimestamp(reason=reason, records=records)


def _refuse_keyless(topic: Topic, partition: int, batch: CheckedBatch) -> NoReturn:
    """Raises `KeylessRecord`, with the indexes of the records."""
    from sparklog.formats import record_batch

    _, has_key = record_batch.stamps_and_keys(batch)
    reason = f"topic {topic.name} is compacted, and every record of it needs a key"
    raise errors.KeylessRecord(
        topic=topic.name,
        partition=partition,
        count=batch.header.record_count - batch.keys,
        records=[
            (index, reason) for index in (~has_key).nonzero()[0][:KAFKA_RECORD_ERRORS].tolist()
        ],
    )


def _duplicate(append: Append, base_offset: int, arrival_us: int) -> AppendResult:
    return AppendResult(
        base_offset=base_offset,
        count=append.count,
        arrival_us=arrival_us,
        timestamp_type=append.timestamp_type,
        duplicate=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    flush_max_bytes: int = limits.FLUSH_MAX_BYTES
    flush_max_entries: int = limits.FLUSH_MAX_ENTRIES
    linger_seconds: float = 0.0
    flushes_at_once: int = 1
    """More than 1 only if the appender can plan flushes."""
    flush_interval_seconds: float = _FLUSH_INTERVAL_REMOTE_SECONDS
    """The time between two flushes that are under way together."""
    queue_bytes: int = limits.QUEUE_BYTES
    unpublished_bytes: int = limits.UNPUBLISHED_BYTES
    staged_bytes: int = limits.STAGED_BYTES
    topic_held_bytes: int = _TOPIC_HELD_BYTES
    topic_held_staged_bytes: int = _TOPIC_HELD_STAGED_BYTES
    max_record_bytes: int = limits.MAX_RECORD_BYTES
    max_batch_bytes: int = limits.MAX_BATCH_BYTES
    free_space_reserve_bytes: int = limits.FREE_SPACE_RESERVE_BYTES


class Writer:
    """Appends to the WAL of one epoch. `submit` and `wait` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        appender: wal.Appender,
        partition_table: PartitionTable,
        hot: HotTail,
        *,
        clock: Clock,
        bounds: WriterLimits,
        on_flush: Callable[[wal.WalObject, float], None] = lambda _object, _seconds: None,
        refused: RefusedWork | None = None,
    ) -> None:
        self._store = store
        self._appender = appender
        self._partition_table = partition_table
        self._hot = hot
        self._clock = clock
        self._bounds = bounds
        self._on_flush = on_flush
        self._refused = refused or RefusedWork(clock)
        self._mutex = threading.Lock()
        self._not_full = threading.Condition(self._mutex)
        self._queue: deque[PendingAppend] = deque()
        self._queued_bytes = 0
        self._decoding = DecodeMemory(limits.DECODE_BYTES)
        self._planner = appender if isinstance(appender, wal.PlanningAppender) else None
        self._at_once = bounds.flushes_at_once if self._planner is not None else 1
        self._landed = threading.Condition(self._mutex)
        """Notified when a flush is done, if several may be under way."""
        self._due = threading.Condition(self._mutex)
        """Notified when a flush may begin, for the threads in `lead_flushes`."""
        self._leading = False
        """True while a thread chooses the next flush."""
        self._planning = False
        self._under_way = 0
        self._last: _Flush | None = None
        """The flush that was planned last, until it is done."""
        self._planned_at = -float("inf")
        self._pace = FlushPace()
        """Written by the leader of a flush only, as the next field."""
        self._space_until = -float("inf")
        """Until when enough space is free for certain, in monotonic seconds."""
        self._refusals = Refusals()
        """Guarded by the lock of the partition table."""
        self._closed: errors.SparklogError | None = None
        self.failure: BaseException | None = None
        """Set once, when the writer has ended for good."""

    @property
    def max_record_bytes(self) -> int:
        """Limit of a record's key, value and headers together."""
        return self._bounds.max_record_bytes

    def budgets(self) -> list[Budget]:
        """Returns the memory of records on their way to the log and to their tables."""
        bounds, backlog = self._bounds, self._partition_table.backlog
        return [
            Budget("writer_queue", self._queued_bytes, bounds.queue_bytes),
            Budget("unpublished", backlog.unpublished_bytes, bounds.unpublished_bytes),
            Budget("staged", backlog.staged_bytes, bounds.staged_bytes),
            Budget("write_decoding", self._decoding.held_bytes, self._decoding.limit_bytes),
        ]

    def open(self) -> None:
        """Puts the first object of the epoch; no append is accepted before it.

        Raises `BrokerFenced` if a successor has fenced the epoch, and the errors of the store.
        """
        self._partition_table.apply(
            self._appender.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
        )

    # -------------------------------------------------------------------------- appending

    def prepare(
        self,
        topic: Topic,
        partition: int,
        batch: pa.RecordBatch,
        producer_sequence: ProducerSequence | None,
    ) -> Append:
        """Checks and encodes a payload batch, in the caller's thread and without a lock.

        Raises `BadRequest`, `WrongSchema`, `UnknownPartition`, `MessageTooLarge`, `RecordTooLarge`,
        `BatchTooLarge`, `KeylessRecord`, `BadTimestamp`.
        """
        topic.partition(partition)
        timestamp_type = topic.timestamp_type  # read once: an administrator may change it
        if producer_sequence is not None and (
            producer_sequence.epoch < 0 or producer_sequence.base_sequence < 0
        ):
            raise errors.BadRequest(
                reason=f"{producer_sequence} is invalid: epoch and sequence begin at 0"
            )
        try:
            # A client's buffers may point anywhere; nothing after this checks them.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise errors.WrongSchema(reason=f"the batch is invalid Arrow data: {error}") from error
        if not 1 <= batch.num_rows <= limits.MAX_BATCH_ROWS:
            raise errors.BadRequest(
                reason=f"the batch has {batch.num_rows} records; send 1 to {limits.MAX_BATCH_ROWS}"
            )
        batch = conform_payload(batch, limit_bytes=self._bounds.max_batch_bytes)
        if timestamp_type == LOG_APPEND_TIME and "timestamp" in batch.schema.names:
            batch = batch.drop_columns(["timestamp"])
        size = self._check_size(topic, batch)
        topic.check_keys(partition, count_keyless(batch))
        arrival_us = self._clock.now_us()
        low, high = timestamp_range_us(batch, arrival_us)
        if timestamp_type != LOG_APPEND_TIME:
            topic.check_times(low, high, arrival_us)
        payload = wal.encode_payload(batch)
        return Append(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=partition,
            count=batch.num_rows,
            arrival_us=arrival_us,
            min_timestamp_us=low,
            max_timestamp_us=high,
            timestamp_type=timestamp_type,
            payload=payload,
            hot_records=_without_excess_memory(batch, payload),
            decoded_bytes=size,
            producer_sequence=producer_sequence,
        )

    def prepare_kafka(
        self, topic: Topic, partition: int, data: bytes, *, only_quick: bool = False
    ) -> Append:
        """Checks a Kafka record batch, in the caller's thread, and keeps its bytes.

        The bytes change only if the topic uses LogAppendTime, if the batch's header has a wrong
        maximum timestamp, or if the topic wants another codec.

        Raises `UnknownPartition`, `MessageTooLarge`, `RecordTooLarge`, `KeylessRecord`, and the
        errors of `record_batch.check`. If single records are refused, the error's `records` has
        (index in the batch, reason) for each.

        Args:
            only_quick: raises `WouldBlock` rather than work for more than a few milliseconds.
        """
        try:
            return self._checked_kafka(topic, partition, data, only_quick=only_quick)
        except errors.SparklogError as error:
            refusal = errors.bare(error)
        raise refusal  # without its traceback, which would keep the records in memory

    def _checked_kafka(
        self, topic: Topic, partition: int, data: bytes, *, only_quick: bool
    ) -> Append:
        from sparklog.formats import record_batch  # compiled loops; only Kafka batches need them

        topic.partition(partition)
        _check_message(topic, data)
        limit_bytes = self._bounds.max_batch_bytes
        if only_quick:
            found = _checked_quickly(data, topic.compression, limit_bytes)
            return self._prepared(topic, partition, data, found)
        # The decompressed size is unknown. Try with the size that needs no reservation; a larger
        # batch waits for its share of the decode memory.
        try:
            found = record_batch.check(data, limit_bytes=min(limits.LARGE_BYTES, limit_bytes))
        except errors.BatchTooLarge:
            with self._decoding.hold(limit_bytes):
                found = record_batch.check(data, limit_bytes=limit_bytes)
                return self._prepared(topic, partition, data, found)
        return self._prepared(topic, partition, data, found)

    def _prepared(self, topic: Topic, partition: int, data: bytes, found: CheckedBatch) -> Append:
        from sparklog.formats import record_batch

        timestamp_type = topic.timestamp_type
        wanted = topic.compression
        header = found.header
        if header.is_transactional:
            raise errors.BadBatch(reason="it is transactional, and transactions are not supported")
        if header.base_offset:
            reason = f"a producer's batch begins at offset 0, and this one at {header.base_offset}"
            raise errors.BadBatch(reason=reason)
        if found.largest_bytes > self._bounds.max_record_bytes:
            raise errors.RecordTooLarge(
                bytes=found.largest_bytes, limit_bytes=self._bounds.max_record_bytes
            )
        if found.keys < header.record_count and topic.is_compacted:
            _refuse_keyless(topic, partition, found)
        arrival_us = self._clock.now_us()
        low_us, high_us = found.min_timestamp_ms * 1_000, found.max_timestamp_ms * 1_000
        batch: bytes | bytearray = data
        if wanted is not None and header.codec != record_batch.Codec[wanted[0].upper()]:
            codec = record_batch.Codec[wanted[0].upper()]
            batch = record_batch.compressed(data, found.records, codec, wanted[1])
            _check_message(topic, batch)
        if timestamp_type == LOG_APPEND_TIME:
            now_ms = arrival_us // 1_000
            low_us = high_us = arrival_us = now_ms * 1_000
            batch = record_batch.with_times(batch, max_timestamp_ms=now_ms, append_time=True)
        elif header.has_append_time:
            raise errors.BadTimestamp(reason="only the broker may set LogAppendTime in a batch")
        else:
            _check_times(topic, found, arrival_us)
            if found.max_timestamp_ms != header.max_timestamp_ms:
                batch = record_batch.with_times(
                    batch, max_timestamp_ms=found.max_timestamp_ms, append_time=False
                )
        producer_sequence = None
        if header.producer_id != NO_PRODUCER:
            producer_sequence = ProducerSequence(
                header.producer_id, header.producer_epoch, header.base_sequence
            )
        return Append(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=partition,
            count=header.record_count,
            arrival_us=arrival_us,
            min_timestamp_us=low_us,
            max_timestamp_us=high_us,
            timestamp_type=timestamp_type,
            payload=wal.encode_kafka(batch),
            encoding=Encoding.KAFKA,
            hot_records=batch,
            decoded_bytes=found.decoded_bytes,
            producer_sequence=producer_sequence,
        )

    def _check_size(self, topic: Topic, batch: pa.RecordBatch) -> int:
        """Returns the bytes of the batch. Raises `BatchTooLarge` and the errors for its records."""
        size = batch.nbytes
        if size > self._bounds.max_batch_bytes:
            raise errors.BatchTooLarge(bytes=size, limit_bytes=self._bounds.max_batch_bytes)
        check_record_sizes(batch, self._bounds.max_record_bytes)
        # Batching is our choice; in Kafka each record could come alone. So the topic's limit
        # applies to each record.
        limit = topic.max_message_bytes
        if limit is not None:
            try:
                check_record_sizes(batch, limit)
            except errors.RecordTooLarge as error:
                raise errors.MessageTooLarge(
                    what="a record", bytes=error.bytes, limit_bytes=limit, topic=topic.name
                ) from None
        return int(size)

    def submit(
        self,
        appends: Sequence[Append | CarriedEntry | EmptyObject],
        *,
        timeout_seconds: float = 0.0,
        is_bounded: bool = True,
    ) -> PendingAppend:
        """Queues `appends` to become durable together; waits for space up to the timeout.

        With a timeout of 0 it does no I/O, and leaves the flush to the threads that wait.

        Args:
            appends: of any partitions; all are written, or none.
            timeout_seconds: how long to wait for space in the queue.
            is_bounded: False queues the appends even if there is no space.

        Raises `QueueFull`, and the error that ended the writer.
        """
        pending = PendingAppend(appends)
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            with self._not_full:
                self._check_accepting()
                full = self._why_full(pending) if is_bounded else None
                if full is None:
                    self._queue.append(pending)
                    self._queued_bytes += pending.bytes
                    self._notify_due()
                    return pending
                # If all callers with queued appends wait here too, one of them must lead a flush.
                leads = timeout_seconds > 0 and self._takes_lead()
                left_seconds = deadline - self._clock.monotonic()
                refused = not leads and (left_seconds <= 0 or not self._not_full.wait(left_seconds))
            if refused:
                assert full is not None
                if timeout_seconds > 0:  # a caller that does not wait here tries again
                    self._refused.note(Work.WRITES, str(full))
                self._record_refusals(appends)
                raise full
            if leads:
                self._lead()

    def _why_full(self, pending: PendingAppend) -> errors.QueueFull | None:
        """Returns the error if `pending` cannot be queued at present."""
        if self._queued_bytes > self._bounds.queue_bytes:
            return errors.QueueFull(
                queue="the writer's queue", bytes=self._queued_bytes, setting="writer.queue_bytes"
            )
        if self._partition_table.backlog.unpublished_bytes > self._bounds.unpublished_bytes:
            return errors.QueueFull(
                queue="the backlog of unpublished records",
                bytes=self._partition_table.backlog.unpublished_bytes,
                setting="publisher.unpublished_bytes",
            )
        if (
            pending.is_staged
            and self._partition_table.backlog.staged_bytes > self._bounds.staged_bytes
        ):
            return errors.QueueFull(
                queue="the backlog of staged records",
                bytes=self._partition_table.backlog.staged_bytes,
                setting="publisher.staged_bytes",
            )
        return None

    def _takes_lead(self) -> bool:
        """Makes the caller, which holds the mutex, the leader of the next flush, if one is due."""
        if not self._is_due():
            return False
        self._leading = True
        return True

    def _is_due(self) -> bool:
        return not self._leading and self._under_way < self._at_once and bool(self._queue)

    def _notify_due(self) -> None:
        if self._closed is not None:
            self._due.notify_all()  # all of them end when the queue is empty
        elif self._at_once > 1 and self._is_due():
            self._due.notify()

    @property
    def leaders(self) -> int:
        """The number of threads to run `lead_flushes`; 0 if the waiting threads lead all flushes.

        With several flushes under way a hand-over between threads costs little beside a put.
        """
        return self._at_once if self._at_once > 1 else 0

    def lead_flushes(self) -> None:
        """Leads flushes whenever one may begin, until the writer has ended."""
        while True:
            with self._mutex:
                while not self._takes_lead():
                    if self.failure is not None or (self._closed is not None and not self._queue):
                        return
                    self._due.wait()
            self._lead()

    def notify_published(self) -> None:
        """Wakes the threads that wait for space, after the publisher freed some."""
        with self._not_full:
            self._not_full.notify_all()

    def wait(self, pending: PendingAppend) -> list[AppendResult]:
        """Returns when the appends are durable; leads flushes if no other thread does."""
        while True:
            with self._mutex:
                if pending.done:
                    break
                pending.waiting = True
                # To lead a later flush would delay the answer.
                leads = pending.is_queued and self._takes_lead()
            if leads:
                self._lead()
            else:
                pending.gate.acquire()
        return pending.outcome()

    def flush_if_quick(self) -> None:
        """Writes the queued appends if that delays the caller, an event loop, by very little.

        Does nothing if they are many bytes, if flushes have been slow or linger, or while another
        thread leads a flush. Appends that are not done afterwards need a `wait`. Never raises.
        """
        with self._mutex:
            if (
                self._bounds.linger_seconds
                or self._under_way
                or self._queued_bytes > QUICK_FLUSH_BYTES
                or not self._pace.is_quick(self._clock.monotonic())
                or not self._takes_lead()
            ):
                return
        self._lead()

    def _lead(self) -> None:
        """Runs one flush, and wakes the next waiting thread to lead as soon as one may."""
        is_leading = True
        try:
            wait_seconds = self._bounds.linger_seconds
            if self._under_way:
                since_seconds = self._clock.monotonic() - self._planned_at
                interval_seconds = self._bounds.flush_interval_seconds - since_seconds
                wait_seconds = max(wait_seconds, interval_seconds)
            if wait_seconds > 0:
                self._clock.sleep(wait_seconds)
            flush = self._plan()
            if flush is not None:
                if self._at_once > 1:
                    is_leading = False
                    self._end_lead(is_leading=True)
                self._finish(flush)
        finally:
            self._end_lead(is_leading=is_leading)

    def _end_lead(self, *, is_leading: bool) -> None:
        """Wakes a thread that waits for an append to lead the next flush, if it may."""
        with self._not_full:
            if is_leading:
                self._leading = False
            self._not_full.notify_all()
            self._notify_due()
            if self._under_way < self._at_once:
                for pending in self._queue:
                    if pending.waiting:
                        _wake(pending)
                        break

    # -------------------------------------------------------------------------- flushing

    def flush(self) -> int:
        """Writes the queued appends, up to the bounds of one object, and answers them.

        Returns the number of entries. Never raises: errors become the outcome of the appends. One
        caller at a time.
        """
        flush = self._plan()
        if flush is None:
            return 0
        self._finish(flush)
        return len(flush.entries)

    def _plan(self) -> _Flush | None:
        """Chooses the next flush. Returns None if nothing is queued, or if all was refused."""
        pending_appends = self._take_queued()
        if not pending_appends:
            return None
        with self._mutex:
            self._planning = True
            previous = self._last
        flush = _Flush(
            self._partition_table,
            self._refusals,
            bounds=self._bounds,
            now_seconds=self._clock.monotonic(),
            pending_appends=pending_appends,
            previous=previous,
        )
        failure: BaseException | None = None
        try:
            self._check_running()
            self._check_space()
            self._partition_table.exclusively(flush.add, pending_appends)
            if flush.entries and self._planner is not None and self._at_once > 1:
                flush.planned = self._planner.plan(flush.entries)
        except BaseException as error:
            failure = self._failure_of(error)
        with self._mutex:
            self._planning = False
            if failure is None:
                self._last = flush
                self._under_way += 1
                self._planned_at = self._clock.monotonic()
        if failure is not None:
            self._conclude(flush, failure)
            return None
        return flush

    def _finish(self, flush: _Flush) -> None:
        """Writes a flush, and applies and answers it after those before it."""
        failure: BaseException | None = None
        try:
            began = self._clock.monotonic()
            written: wal.WalObject | None = None
            if flush.planned is not None:
                written = flush.planned.write(gives_up=lambda: self._gives_up(flush))
            elif flush.entries:
                written = self._appender.append(flush.entries)
            ended = self._clock.monotonic()
            failure = self._wait_for_previous(flush)
            if failure is not None:
                # It was judged on a state that never was, refused appends too.
                for pending in flush.pending_appends:
                    pending.error = failure
            elif written is not None:
                self._pace.record(ended - began, ended)
                self._apply(written, flush)
                self._on_flush(written, ended - began)
        except BaseException as error:
            failure = self._failure_of(error)
        finally:
            with self._mutex:
                flush.is_done, flush.failure, flush.previous = True, failure, None
                self._under_way -= 1
                if self._last is flush:
                    self._last = None
                self._landed.notify_all()
        self._conclude(flush, failure)

    def _wait_for_previous(self, flush: _Flush) -> BaseException | None:
        """Waits until the flush before this one is done. Returns its error, if it has one."""
        previous = flush.previous
        if previous is None:
            return None
        with self._landed:
            self._landed.wait_for(lambda: previous.is_done)
        return previous.failure

    def _gives_up(self, flush: _Flush) -> bool:
        """Returns whether a flush that surely was not put may be refused.

        It may not once an object was planned on its state. If it may, its sequence is free. Flushes
        of nothing but duplicates and refused appends have no object; they fail with it.
        """
        with self._mutex:
            last = self._last
            while last is not None and last is not flush and not last.entries:
                last = last.previous
            if self._planning or last is not flush:
                return False
            assert self._planner is not None
            assert flush.planned is not None
            self._planner.take_back(flush.planned)
            previous = flush.previous
            self._last = None if previous is None or previous.is_done else previous
            for pending in flush.pending_appends:
                if pending.error is None:  # before the next flush is judged
                    self._record_refusals(pending.appends)
            return True

    def _failure_of(self, error: BaseException) -> BaseException:
        """Returns the outcome of the appends of a flush that failed; may end the writer."""
        if isinstance(error, errors.Retriable):
            return error
        if isinstance(error, errors.RootNotWritable):
            # It surely had no effect, and may pass: a store's 403 can be temporary.
            return errors.StorageUnavailable(operation="append", path="wal", reason=str(error))
        self.fail(error)
        return error

    def _conclude(self, flush: _Flush, failure: BaseException | None) -> None:
        if isinstance(failure, errors.Retriable) and self._closed is None:
            self._refused.note(Work.WRITES, str(failure))
        for pending in flush.pending_appends:
            refusal = pending.error or failure
            if refusal is not None:
                self._count_failures(pending.appends)
            if isinstance(refusal, errors.Retriable):
                self._record_refusals(pending.appends)
        self._answer(flush.pending_appends, failure)

    def _count_failures(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        for each in appends:
            if isinstance(each, Append):
                topic = self._partition_table.by_id(each.topic_id)
                if topic is not None:
                    topic.counts.failed_produces += 1

    def _record_refusals(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        """Keeps back later batches of unknown producers whose refused batch will be retried."""
        self._partition_table.exclusively(self._record_refusal, appends)

    def _record_refusal(self, append: Append | CarriedEntry | EmptyObject) -> None:
        if not isinstance(append, Append) or append.producer_sequence is None:
            return
        topic = self._partition_table.by_id(append.topic_id)
        partition = topic.partitions.get(append.partition) if topic is not None else None
        if partition is None:
            return
        if partition.producers.get(append.producer_sequence.producer_id) is None:
            self._refusals.record(
                append.topic_id,
                append.partition,
                append.producer_sequence,
                self._clock.monotonic(),
            )

    def _take_queued(self) -> list[PendingAppend]:
        taken: list[PendingAppend] = []
        size = entries = 0
        with self._not_full:
            while self._queue:
                pending = self._queue[0]
                size += pending.bytes
                entries += len(pending.appends)
                if taken and (
                    size > self._bounds.flush_max_bytes or entries > self._bounds.flush_max_entries
                ):
                    break
                pending.is_queued = False
                taken.append(self._queue.popleft())
                self._queued_bytes -= pending.bytes
            self._not_full.notify_all()
        return taken

    def _apply(self, written: wal.WalObject, flush: _Flush) -> None:
        for located, records in zip(written.located, flush.hot_records, strict=True):
            if records is not None:
                self._hot.add(located.entry, records)
        self._partition_table.apply(written)

    def _answer(
        self, pending_appends: Sequence[PendingAppend], failure: BaseException | None
    ) -> None:
        with self._mutex:
            for pending in pending_appends:
                if failure is not None and pending.error is None:
                    pending.error = failure
                pending.done = True
                if pending.waiting:
                    _wake(pending)

    def check_space(self) -> int | None:
        """Returns the free space, if it is known. May be called at any time.

        Raises `StorageFull` below the reserve: appends are refused.
        """
        free, reserve = self._store.free_bytes(), self._bounds.free_space_reserve_bytes
        if free is not None and free < reserve:
            raise errors.StorageFull(root=self._store.uri, free_bytes=free, reserve_bytes=reserve)
        return free

    def _check_space(self) -> None:
        """Raises `StorageFull` below the reserve.

        While twice the reserve is free, one look counts for `FREE_SPACE_SECONDS`: no disk writes
        the rest in that time.
        """
        now = self._clock.monotonic()
        if now < self._space_until:
            return
        free = self.check_space()
        if free is not None and free >= 2 * self._bounds.free_space_reserve_bytes:
            self._space_until = now + FREE_SPACE_SECONDS

    # -------------------------------------------------------------------------- ending

    def close(self, error: errors.SparklogError) -> None:
        """Refuses new appends with `error`; returns when all queued ones are written."""
        with self._not_full:
            self._closed = self._closed or error
            self._not_full.notify_all()
            self._due.notify_all()
        while True:
            with self._not_full:
                leads = self._takes_lead()
                if not leads and not self._leading and not self._under_way:
                    return
                if not leads:
                    self._not_full.wait()
            if leads:
                self._lead()

    def fail(self, error: BaseException) -> None:
        """Ends the writer: refuses all queued and all future appends with `error`."""
        with self._not_full:
            if self.failure is None:
                self.failure = error
            pending_appends, self._queue = list(self._queue), deque()
            self._queued_bytes = 0
            self._not_full.notify_all()
            self._due.notify_all()
        self._answer(pending_appends, self.failure)

    def _check_running(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _check_accepting(self) -> None:
        failure = self.failure
        if isinstance(failure, errors.SparklogError):
            raise failure
        if failure is not None:
            raise errors.StorageUnavailable(
                operation="append", path="wal", reason=f"the broker is stopping: {failure!r}"
            ) from failure
        if self._closed is not None:
            raise self._closed


def _wake(pending: PendingAppend) -> None:
    if pending.gate.locked():
        pending.gate.release()
