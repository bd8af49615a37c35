"""The writer: group commit over all topics of a broker.

Appends queue up while a flush is under way; the next flush takes what has queued, gives offsets,
puts one WAL object, and only then answers. Whoever waits for an append leads a flush when none is
under way, so that a lone producer pays no hand-over between threads, and many share one put.

- One flush at a time; offsets are given in the order of the queue.
- Nothing of a flush is applied before its object stands. So a refused flush leaves no trace, and
  its appends may be sent again.
- A put that was fenced, or a local fsync that failed, ends the writer for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.hot import Held, HotTail
from sparklog.broker.partitions import Ledger, Topic
from sparklog.broker.producers import (
    NO_PRODUCER,
    ProducerState,
    Refusals,
    Stamp,
    Written,
    advance,
    find_duplicate,
)
from sparklog.broker.room import Room
from sparklog.clock import Clock
from sparklog.record import (
    LOG_APPEND_TIME,
    check_record_sizes,
    conform_payload,
    count_keyless,
    timestamp_range_us,
)
from sparklog.storage import wal
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import BatchId, BatchKind, Encoding, Entry, Kind, Located, StagedRef

if TYPE_CHECKING:
    from sparklog.recordbatch import Checked

NO_TIMESTAMP: Final = -1
"""In ms: what Kafka's clients give a record that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Records for one partition, ready to be written: all that is known before their offsets."""

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
    held: Held | None = None
    """The same records for the hot tail; None for staged ones."""
    decoded_bytes: int = 0
    """Bytes of the records as Arrow columns, out of compression; 0: not known."""
    stamp: Stamp | None = None
    staged: StagedRef | None = None
    batch_id: BatchId | None = None
    batch_kind: BatchKind = BatchKind.NUMBERED

    def entry(self, *, base_offset: int, leader_epoch: int) -> Entry:
        stamp = self.stamp
        return Entry(
            kind=Kind.RECORDS if self.staged is None else Kind.STAGED,
            topic_id=self.topic_id,
            partition=self.partition,
            base_offset=base_offset,
            count=self.count,
            min_timestamp_us=self.min_timestamp_us,
            max_timestamp_us=self.max_timestamp_us,
            arrival_us=self.arrival_us,
            timestamp_type=self.timestamp_type,
            leader_epoch=leader_epoch,
            producer_id=stamp.producer_id if stamp else NO_PRODUCER,
            producer_epoch=stamp.epoch if stamp else -1,
            base_sequence=stamp.base_sequence if stamp else -1,
            batch_id=self.batch_id,
            batch_kind=self.batch_kind,
            encoding=self.encoding,
            staged=self.staged,
            decoded_bytes=self.decoded_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """An older entry to be appended again, offsets and all, so that its object can go."""

    located: Located
    payload: wal.Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Where an append stands. `duplicate`: it stood there before."""

    base_offset: int
    count: int
    arrival_us: int
    timestamp_type: int
    duplicate: bool = False


class TakesLong(Exception):
    """What was wanted only if it is quick is not."""


class Ticket:
    """Appends that become durable together, or not at all."""

    __slots__ = ("appends", "bytes", "done", "error", "gate", "is_staged", "results", "waiting")

    def __init__(self, appends: Sequence[Append | Carry]) -> None:
        self.appends = appends
        self.bytes = sum(each.payload.length for each in appends)
        self.is_staged = any(isinstance(each, Append) and each.staged for each in appends)
        self.results: list[Appended] = []
        self.error: BaseException | None = None
        self.done = False
        self.waiting = False
        self.gate = threading.Lock()
        self.gate.acquire()

    def outcome(self) -> list[Appended]:
        """One result an append. Raises what refused them; `OutcomeUnknown` where nobody can say."""
        assert self.done
        if self.error is None:
            return self.results
        if isinstance(self.error, errors.SparklogError):
            raise self.error
        raise errors.OutcomeUnknown(what="an append", reason=repr(self.error)) from self.error


class _Flush:
    """A flush in the making: states as they will be once it is durable."""

    def __init__(
        self, ledger: Ledger, refusals: Refusals, *, bounds: WriterLimits, now_seconds: float
    ) -> None:
        self._ledger = ledger
        self._refusals = refusals
        self._bounds = bounds
        self._now_seconds = now_seconds
        self._ends: dict[tuple[str, int], int] = {}
        self._states: dict[tuple[str, int, int], ProducerState] = {}
        self._batches: dict[tuple[str, int, BatchId], Appended] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """By topic id and query, of what this flush brings."""
        self.entries: list[tuple[Entry, wal.Payload]] = []
        self.held: list[Held | None] = []

    def add(self, ticket: Ticket) -> None:
        """Gives offsets to the appends of `ticket`, or refuses all of them."""
        mark = len(self.entries)
        # What is refused alone has changed nothing yet, and copies would make many small ones dear.
        alone = len(ticket.appends) == 1
        before = None if alone else (dict(self._ends), dict(self._states))
        batches: dict[tuple[str, int, BatchId], Appended] = {}
        try:
            for each in ticket.appends:
                if isinstance(each, Carry):
                    self._carry(each)
                    continue
                placed = self._place(each)
                ticket.results.append(placed)
                if each.batch_id is not None and not placed.duplicate:
                    batches.setdefault((each.topic_id, each.partition, each.batch_id), placed)
        except errors.SparklogError as error:
            ticket.error = error
            if before is not None:
                del self.entries[mark:], self.held[mark:]
                self._ends, self._states = before
        else:
            self._batches.update(batches)  # for the tickets behind: a batch has several appends
            for topic_id, _, batch_id in batches:
                self._newest[topic_id, batch_id.query] = batch_id.batch

    def _carry(self, carry: Carry) -> None:
        self.entries.append(
            (msgspec.structs.replace(carry.located.entry, carried=True), carry.payload)
        )
        self.held.append(None)

    def _place(self, append: Append) -> Appended:
        topic = self._ledger.by_id(append.topic_id)
        if topic is None:
            raise errors.UnknownTopic(topic=append.topic)
        if topic.held_back and self._is_too_much(topic, append):
            raise errors.TopicHeldBack(topic=topic.name, reason=topic.held_back)
        partition = topic.partition(append.partition)
        if partition.blocked is not None:
            raise errors.TopicHeldBack(topic=topic.name, reason=str(partition.blocked))
        key = append.topic_id, append.partition
        base = self._ends.get(key, partition.end)
        if append.batch_id is not None:
            batch = partition.batches.find(append.batch_id) or self._batches.get(
                (*key, append.batch_id)
            )
            if batch is not None:
                return _stands(append, batch.base_offset, batch.arrival_us)
            self._check_newest(topic, append.batch_id, append.batch_kind)
        stamp = append.stamp
        if stamp is not None:
            state_key = (*key, stamp.producer_id)
            state = self._states.get(state_key, partition.producers.get(stamp.producer_id))
            written = find_duplicate(
                state, stamp, append.count, topic=topic.name, partition=append.partition
            )
            if written is not None:
                return _stands(append, written.base_offset, written.arrival_us)
            if state is None:
                self._refusals.check(*key, stamp, self._now_seconds, topic=topic.name)
            written = Written(stamp.base_sequence, append.count, base, append.arrival_us)
            self._states[state_key] = advance(state, stamp.epoch, written)
        self._ends[key] = base + append.count
        self.entries.append(
            (append.entry(base_offset=base, leader_epoch=partition.leader_epoch), append.payload)
        )
        self.held.append(append.held)
        return Appended(
            base_offset=base,
            count=append.count,
            arrival_us=append.arrival_us,
            timestamp_type=append.timestamp_type,
        )

    def _is_too_much(self, topic: Topic, append: Append) -> bool:
        if append.staged is not None:
            return topic.staged_bytes > self._bounds.topic_held_staged_bytes
        return topic.unpublished_bytes > self._bounds.topic_held_bytes

    def _check_newest(self, topic: Topic, batch_id: BatchId, kind: BatchKind) -> None:
        """Raises `BadRequest` for a batch that another commit of its query has overtaken."""
        newest = max(
            topic.standing.newest(batch_id.query),
            self._newest.get((topic.topic_id, batch_id.query), -1),
        )
        if kind is BatchKind.NUMBERED and batch_id.batch <= newest:
            reason = (
                f"batch {batch_id.batch} of {batch_id.query} comes after batch {newest}:"
                " two drivers write batches of one query; stop one of them"
            )
            raise errors.BadRequest(reason=reason)


_WASTE_BYTES: Final = 64 * limits.KIB
"""What may be kept beside a batch; messages of Flight have some."""


def _unshared(batch: pa.RecordBatch, payload: wal.Payload) -> pa.RecordBatch:
    """The batch, without memory that is kept for it and holds nothing of it.

    Its buffers may be small parts of a large message, and the hot tail counts the parts.
    """
    kept = 0
    for column in batch.columns:
        for buffer in column.buffers():
            while buffer is not None and buffer.parent is not None:
                buffer = buffer.parent
            kept = max(kept, buffer.size if buffer is not None else 0)
    if kept <= 2 * payload.length + _WASTE_BYTES:
        return batch
    return wal.decode_body(batch.schema, payload)


def _check_message(topic: Topic, batch: bytes | bytearray) -> None:
    """Raises `MessageTooLarge`."""
    limit = topic.max_message_bytes
    if limit is not None and len(batch) > limit:
        raise errors.MessageTooLarge(
            what="a batch", bytes=len(batch), limit_bytes=limit, topic=topic.name
        )


def _checked_quickly(data: bytes, wanted: tuple[str, int] | None, limit_bytes: int) -> Checked:
    """Raises `TakesLong`, and what `recordbatch.check` raises.

    How much a compressed batch holds is known only by taking it out, so that goes as far as is
    quick. A plain one is gone through as fast as it has been read.
    """
    from sparklog import recordbatch

    codec = recordbatch.read_header(data).codec
    if wanted is not None and codec != recordbatch.Codec[wanted[0].upper()]:
        raise TakesLong
    if codec == recordbatch.Codec.NONE and len(data) <= limits.LARGE_BYTES:
        return recordbatch.check(data, limit_bytes=limit_bytes)
    if len(data) > limits.KAFKA_QUICK_BYTES:
        raise TakesLong
    quick_bytes = min(limits.KAFKA_QUICK_RECORDS_BYTES, limit_bytes)
    try:
        return recordbatch.check(data, limit_bytes=quick_bytes)
    except errors.BatchTooLarge:
        raise TakesLong from None


def _check_times(topic: Topic, batch: Checked, now_us: int) -> None:
    """Raises `BadTimestamp` for times that the topic does not take now, or the table cannot hold.

    As in Kafka's `LogValidator`, a record without a time (-1 ms) is not too early.
    """
    first_ms, last_ms = topic.time_bounds_ms(now_us)
    first_ms = max(first_ms, limits.TIMESTAMP_MIN_US // 1_000)
    last_ms = min(last_ms, limits.TIMESTAMP_MAX_US // 1_000)
    low_ms, high_ms = batch.min_timestamp_ms, batch.max_timestamp_ms
    if first_ms <= low_ms and high_ms <= last_ms:
        return
    from sparklog import recordbatch

    stamps_ms, _ = recordbatch.stamps_and_keys(batch)
    refused = ((stamps_ms < first_ms) | (stamps_ms > last_ms)) & (stamps_ms != NO_TIMESTAMP)
    records = [
        (index, f"{stamps_ms[index]} ms is not within {first_ms} to {last_ms} ms")
        for index in refused.nonzero()[0][: limits.KAFKA_RECORD_ERRORS].tolist()
    ]
    # Times beyond an int64, which only bounds can tell, come out as others.
    if records or high_ms > last_ms or low_ms < min(first_ms, NO_TIMESTAMP):
        reason = f"{low_ms} to {high_ms} ms is not within {first_ms} to {last_ms} ms"
        raise errors.BadTimestamp(reason=reason, records=records)


def _refuse_keyless(topic: Topic, partition: int, batch: Checked) -> NoReturn:
    """Raises `KeylessRecord`."""
    from sparklog import recordbatch

    _, has_key = recordbatch.stamps_and_keys(batch)
    reason = f"a compacted topic takes no record without a key, and this is {topic.name}"
    raise errors.KeylessRecord(
        topic=topic.name,
        partition=partition,
        count=batch.header.record_count - batch.keys,
        records=[
            (index, reason)
            for index in (~has_key).nonzero()[0][: limits.KAFKA_RECORD_ERRORS].tolist()
        ],
    )


def _stands(append: Append, base_offset: int, arrival_us: int) -> Appended:
    return Appended(
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
    queue_bytes: int = limits.QUEUE_BYTES
    unpublished_bytes: int = limits.UNPUBLISHED_BYTES
    staged_bytes: int = limits.STAGED_BYTES
    topic_held_bytes: int = limits.TOPIC_HELD_BYTES
    topic_held_staged_bytes: int = limits.TOPIC_HELD_STAGED_BYTES
    max_record_bytes: int = limits.MAX_RECORD_BYTES
    max_batch_bytes: int = limits.MAX_BATCH_BYTES
    free_space_reserve_bytes: int = limits.FREE_SPACE_RESERVE_BYTES


class Writer:
    """Appends to the WAL of one epoch. `submit` and `wait` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        appender: wal.Appender,
        ledger: Ledger,
        hot: HotTail,
        *,
        clock: Clock,
        bounds: WriterLimits,
        on_flush: Callable[[wal.WalObject, float], None] = lambda _object, _seconds: None,
    ) -> None:
        self._store = store
        self._appender = appender
        self._ledger = ledger
        self._hot = hot
        self._clock = clock
        self._bounds = bounds
        self._on_flush = on_flush
        self._mutex = threading.Lock()
        self._room = threading.Condition(self._mutex)
        self._queue: deque[Ticket] = deque()
        self._queued_bytes = 0
        self._decoding = Room(limits.DECODE_BYTES)
        self._flushing = False
        self._refusals = Refusals()
        """Guarded by the ledger's lock."""
        self._closed: errors.SparklogError | None = None
        self.failure: BaseException | None = None
        """Set once, when nothing can be written any more."""

    @property
    def max_record_bytes(self) -> int:
        """Of key, value and headers together."""
        return self._bounds.max_record_bytes

    def open(self) -> None:
        """Begins the epoch: its first object, before which nothing is accepted.

        Raises `BrokerFenced` where the epoch has ended before it began, and what the store raises.
        """
        self._ledger.wrote(self._appender.append([(Entry(kind=Kind.OPEN), wal.EMPTY)]))

    # -------------------------------------------------------------------------- appending

    def prepare(
        self, topic: Topic, partition: int, batch: pa.RecordBatch, stamp: Stamp | None
    ) -> Append:
        """Checks and encodes a payload batch; done by the caller's thread, outside any lock.

        Raises `BadRequest`, `WrongSchema`, `UnknownPartition`, `MessageTooLarge`, `RecordTooLarge`,
        `BatchTooLarge`, `KeylessRecord`, `BadTimestamp`.
        """
        topic.partition(partition)
        timestamp_type = topic.timestamp_type  # once: an administrator may change it meanwhile
        if stamp is not None and (stamp.epoch < 0 or stamp.base_sequence < 0):
            raise errors.BadRequest(reason=f"{stamp}: epochs and sequences begin at 0")
        try:
            # A peer's buffers may point anywhere; nothing after this looks where they point.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise errors.WrongSchema(reason=f"not a valid Arrow batch: {error}") from error
        if not 1 <= batch.num_rows <= limits.MAX_BATCH_ROWS:
            raise errors.BadRequest(
                reason=f"a batch of {batch.num_rows} records: 1 to {limits.MAX_BATCH_ROWS} go"
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
            held=_unshared(batch, payload),
            decoded_bytes=size,
            stamp=stamp,
        )

    def prepare_kafka(
        self, topic: Topic, partition: int, data: bytes, *, only_quick: bool = False
    ) -> Append:
        """The same of a record batch in Kafka's encoding, which is kept as it came.

        Only its times are set where the topic's time is that of the append, or where its header
        has another greatest time than its records; and it is compressed anew where the topic wants
        another codec.

        Raises `UnknownPartition`, `MessageTooLarge`, `RecordTooLarge`, `KeylessRecord`, and what
        `recordbatch.check` raises. Where single records are refused, the fact `records` names them:
        (index in the batch, why).

        Args:
            only_quick: raises `TakesLong` rather than work for more than some milliseconds.
        """
        try:
            return self._checked_kafka(topic, partition, data, only_quick=only_quick)
        except errors.SparklogError as error:
            refusal = errors.bare(error)
        raise refusal  # whoever keeps it shall not keep the records that were looked at

    def _checked_kafka(
        self, topic: Topic, partition: int, data: bytes, *, only_quick: bool
    ) -> Append:
        from sparklog import recordbatch  # compiled loops, which only this door needs

        topic.partition(partition)
        _check_message(topic, data)
        limit_bytes = self._bounds.max_batch_bytes
        if only_quick:
            found = _checked_quickly(data, topic.compression, limit_bytes)
            return self._prepared(topic, partition, data, found)
        # How much it holds is known only once it is out of compression: first as much as anybody
        # may have at any time, and what is larger has its turn.
        try:
            found = recordbatch.check(data, limit_bytes=min(limits.LARGE_BYTES, limit_bytes))
        except errors.BatchTooLarge:
            with self._decoding.hold(limit_bytes):
                found = recordbatch.check(data, limit_bytes=limit_bytes)
                return self._prepared(topic, partition, data, found)
        return self._prepared(topic, partition, data, found)

    def _prepared(self, topic: Topic, partition: int, data: bytes, found: Checked) -> Append:
        from sparklog import recordbatch

        timestamp_type = topic.timestamp_type
        wanted = topic.compression
        header = found.header
        if header.is_transactional:
            raise errors.BadBatch(reason="there are no transactions here")
        if found.largest_bytes > self._bounds.max_record_bytes:
            raise errors.RecordTooLarge(
                bytes=found.largest_bytes, limit_bytes=self._bounds.max_record_bytes
            )
        if found.keys < header.record_count and topic.is_compacted:
            _refuse_keyless(topic, partition, found)
        arrival_us = self._clock.now_us()
        low_us, high_us = found.min_timestamp_ms * 1_000, found.max_timestamp_ms * 1_000
        batch: bytes | bytearray = data
        if wanted is not None and header.codec != recordbatch.Codec[wanted[0].upper()]:
            codec = recordbatch.Codec[wanted[0].upper()]
            batch = recordbatch.compressed(data, found.records, codec, wanted[1])
            _check_message(topic, batch)
        if timestamp_type == LOG_APPEND_TIME:
            now_ms = arrival_us // 1_000
            low_us = high_us = arrival_us = now_ms * 1_000
            batch = recordbatch.with_times(batch, max_timestamp_ms=now_ms, append_time=True)
        elif header.has_append_time:
            raise errors.BadTimestamp(reason="only the broker may set the time of the append")
        else:
            _check_times(topic, found, arrival_us)
            if found.max_timestamp_ms != header.max_timestamp_ms:
                batch = recordbatch.with_times(
                    batch, max_timestamp_ms=found.max_timestamp_ms, append_time=False
                )
        stamp = None
        if header.producer_id != NO_PRODUCER:
            stamp = Stamp(header.producer_id, header.producer_epoch, header.base_sequence)
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
            held=batch,
            decoded_bytes=found.decoded_bytes,
            stamp=stamp,
        )

    def _check_size(self, topic: Topic, batch: pa.RecordBatch) -> int:
        """Bytes of the batch. Raises what its size is refused with."""
        size = batch.nbytes
        if size > self._bounds.max_batch_bytes:
            raise errors.BatchTooLarge(bytes=size, limit_bytes=self._bounds.max_batch_bytes)
        check_record_sizes(batch, self._bounds.max_record_bytes)
        # How many of our records lie in a batch is our own affair; in Kafka each could go alone.
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
        appends: Sequence[Append | Carry],
        *,
        timeout_seconds: float = 0.0,
        is_bounded: bool = True,
    ) -> Ticket:
        """Queues `appends` to become durable together; waits for room up to the timeout.

        Where that is 0 it does no I/O, and leaves the flush to those whose appends are queued.

        Args:
            is_bounded: False for what is taken even where there is no room.

        Raises `QueueFull`, and what ended the writer.
        """
        ticket = Ticket(appends)
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            with self._room:
                self._check_accepting()
                full = self._full(ticket) if is_bounded else None
                if full is None:
                    self._queue.append(ticket)
                    self._queued_bytes += ticket.bytes
                    return ticket
                # Those whose appends are queued may all be here, and then nobody makes room.
                leads = timeout_seconds > 0 and self._takes_lead()
                left_seconds = deadline - self._clock.monotonic()
                refused = not leads and (left_seconds <= 0 or not self._room.wait(left_seconds))
            if refused:
                self._note_refused(appends)
                raise full
            if leads:
                self._lead()

    def _full(self, ticket: Ticket) -> errors.QueueFull | None:
        """Why the ticket is not taken at the moment."""
        if self._queued_bytes > self._bounds.queue_bytes:
            return errors.QueueFull(
                queue="the writer's queue", bytes=self._queued_bytes, setting="writer.queue_bytes"
            )
        if self._ledger.unpublished_bytes > self._bounds.unpublished_bytes:
            return errors.QueueFull(
                queue="what waits to be published",
                bytes=self._ledger.unpublished_bytes,
                setting="publisher.unpublished_bytes",
            )
        if ticket.is_staged and self._ledger.staged_bytes > self._bounds.staged_bytes:
            return errors.QueueFull(
                queue="what is staged and waits to be published",
                bytes=self._ledger.staged_bytes,
                setting="publisher.staged_bytes",
            )
        return None

    def _takes_lead(self) -> bool:
        """Whether the caller, who holds the mutex, is to lead the next flush."""
        if self._flushing or not self._queue:
            return False
        self._flushing = True
        return True

    def published_more(self) -> None:
        """Wakes those who wait for room after the publisher made some."""
        with self._room:
            self._room.notify_all()

    def wait(self, ticket: Ticket) -> list[Appended]:
        """Returns when the ticket's appends are durable; leads flushes until then if need be."""
        while True:
            with self._mutex:
                if ticket.done:
                    break
                ticket.waiting = True
                leads = self._takes_lead()
            if leads:
                self._lead()
            else:
                ticket.gate.acquire()
        return ticket.outcome()

    def _lead(self) -> None:
        """One flush, then the lead passes to whoever waits next."""
        try:
            if self._bounds.linger_seconds:
                self._clock.sleep(self._bounds.linger_seconds)
            self.flush()
        finally:
            with self._room:
                self._flushing = False
                self._room.notify_all()
                for ticket in self._queue:
                    if ticket.waiting:
                        _wake(ticket)
                        break

    # -------------------------------------------------------------------------- flushing

    def flush(self) -> int:
        """Puts what is queued, up to the bounds of one object; answers; returns its entries.

        Never raises: what goes wrong is the outcome of the tickets. One caller at a time.
        """
        tickets = self._take()
        if not tickets:
            return 0
        flush = _Flush(
            self._ledger,
            self._refusals,
            bounds=self._bounds,
            now_seconds=self._clock.monotonic(),
        )
        failure: BaseException | None = None
        try:
            self._check_running()
            self._check_space()
            with self._ledger.lock:
                for ticket in tickets:
                    flush.add(ticket)
            if flush.entries:
                began = self._clock.monotonic()
                written = self._appender.append(flush.entries)
                self._apply(written, flush)
                self._on_flush(written, self._clock.monotonic() - began)
        except errors.Retriable as error:
            failure = error
        except errors.RootNotWritable as error:
            # Surely no effect, and perhaps one refusal of many: a store's 403 may pass.
            failure = errors.StorageUnavailable(operation="append", path="wal", reason=str(error))
        except BaseException as error:
            failure = error
            self.fail(error)
        for ticket in tickets:
            if isinstance(ticket.error or failure, errors.Retriable):
                self._note_refused(ticket.appends)
        self._answer(tickets, failure)
        return len(flush.entries)

    def _note_refused(self, appends: Sequence[Append | Carry]) -> None:
        """Lets nothing of a producer pass what is refused now and will be sent again."""
        with self._ledger.lock:
            for each in appends:
                if isinstance(each, Append) and each.stamp is not None:
                    topic = self._ledger.by_id(each.topic_id)
                    if topic is None:
                        continue
                    known = topic.partition(each.partition).producers.get(each.stamp.producer_id)
                    if known is None:
                        self._refusals.note(
                            each.topic_id, each.partition, each.stamp, self._clock.monotonic()
                        )

    def _take(self) -> list[Ticket]:
        taken: list[Ticket] = []
        size = entries = 0
        with self._room:
            while self._queue:
                ticket = self._queue[0]
                size += ticket.bytes
                entries += len(ticket.appends)
                if taken and (
                    size > self._bounds.flush_max_bytes or entries > self._bounds.flush_max_entries
                ):
                    break
                taken.append(self._queue.popleft())
                self._queued_bytes -= ticket.bytes
            self._room.notify_all()
        return taken

    def _apply(self, written: wal.WalObject, flush: _Flush) -> None:
        for located, held in zip(written.located, flush.held, strict=True):
            if held is not None:
                self._hot.add(located.entry, held)
        self._ledger.wrote(written)

    def _answer(self, tickets: Sequence[Ticket], failure: BaseException | None) -> None:
        with self._mutex:
            for ticket in tickets:
                if failure is not None and ticket.error is None:
                    ticket.error = failure
                ticket.done = True
                if ticket.waiting:
                    _wake(ticket)

    def _check_space(self) -> None:
        free = self._store.free_bytes()
        if free is not None and free < self._bounds.free_space_reserve_bytes:
            raise errors.StorageFull(
                root=self._store.uri,
                free_bytes=free,
                reserve_bytes=self._bounds.free_space_reserve_bytes,
            )

    # -------------------------------------------------------------------------- ending

    def close(self, error: errors.SparklogError) -> None:
        """Refuses what comes with `error`; returns when all that was queued is written."""
        with self._room:
            self._closed = self._closed or error
            self._room.notify_all()
        while True:
            with self._room:
                leads = self._takes_lead()
                if not leads and not self._flushing:
                    return
                if not leads:
                    self._room.wait()
            if leads:
                self._lead()

    def fail(self, error: BaseException) -> None:
        """Ends the writer: everything queued, and everything to come, is refused with `error`."""
        with self._room:
            if self.failure is None:
                self.failure = error
            tickets, self._queue = list(self._queue), deque()
            self._queued_bytes = 0
            self._room.notify_all()
        self._answer(tickets, self.failure)

    def _check_running(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _check_accepting(self) -> None:
        failure = self.failure
        if isinstance(failure, errors.SparklogError):
            raise failure
        if failure is not None:
            raise errors.StorageUnavailable(
                operation="append", path="wal", reason=f"the broker stops: {failure!r}"
            ) from failure
        if self._closed is not None:
            raise self._closed


def _wake(ticket: Ticket) -> None:
    if ticket.gate.locked():
        ticket.gate.release()
