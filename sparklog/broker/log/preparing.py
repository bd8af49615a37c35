"""Checks and encodes records for the log, in the client's thread and without a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log.appends import Append
from sparklog.broker.log.producer_state import NO_PRODUCER, ProducerSequence
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.formats.record import (
    LOG_APPEND_TIME,
    check_record_sizes,
    conform_payload,
    count_keyless,
    timestamp_range_us,
)
from sparklog.storage import wal
from sparklog.storage.snapshot import Encoding

if TYPE_CHECKING:
    from sparklog.formats.record_batch import CheckedBatch

KAFKA_QUICK_BYTES = 32 * limits.KIB  # of a compressed batch that is checked on the event loop
KAFKA_QUICK_RECORDS_BYTES = 256 * limits.KIB  # the same, decompressed
KAFKA_RECORD_ERRORS = 1_000  # the maximum number of invalid records that an error names

NO_TIMESTAMP: Final = -1
"""The timestamp, in ms, that Kafka clients send with a record that has none."""
_EXCESS_BYTES: Final = 64 * limits.KIB
"""Memory that a batch may keep alive beyond twice its size; Flight messages need some."""


class WouldBlock(Exception):
    """The check would take too long for the event loop; repeat it in a thread."""


class AppendPreparer:
    """Prepares appends from native and Kafka clients. May be called from any thread."""

    def __init__(self, *, clock: Clock, max_record_bytes: int, max_batch_bytes: int) -> None:
        self._clock = clock
        self._max_record_bytes = max_record_bytes
        self._max_batch_bytes = max_batch_bytes
        self.decoding = DecodeMemory(limits.DECODE_BYTES)
        """The memory of batches that are decoded to be checked."""

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
            # A client's buffers may point anywhere; nothing later checks them.
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise errors.WrongSchema(reason=f"the batch is invalid Arrow data: {error}") from error
        if not 1 <= batch.num_rows <= limits.MAX_BATCH_ROWS:
            raise errors.BadRequest(
                reason=f"the batch has {batch.num_rows} records; send 1 to {limits.MAX_BATCH_ROWS}"
            )
        batch = conform_payload(batch, limit_bytes=self._max_batch_bytes)
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
        maximum timestamp, or if the topic requires a different codec.

        Raises `UnknownPartition`, `MessageTooLarge`, `RecordTooLarge`, `KeylessRecord`, and what
        `record_batch.check` raises. If individual records are rejected, the error's `records` has
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
        limit_bytes = self._max_batch_bytes
        if only_quick:
            found = _checked_quickly(data, topic.compression, limit_bytes)
            return self._prepared(topic, partition, data, found)
        # The decompressed size is unknown. Try with the size that needs no reservation; a larger
        # batch waits for its share of the decode memory.
        try:
            found = record_batch.check(data, limit_bytes=min(limits.LARGE_BYTES, limit_bytes))
        except errors.BatchTooLarge:
            with self.decoding.hold(limit_bytes):
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
            reason = f"a producer's batch begins at offset 0, but this one at {header.base_offset}"
            raise errors.BadBatch(reason=reason)
        if found.largest_bytes > self._max_record_bytes:
            raise errors.RecordTooLarge(
                bytes=found.largest_bytes, limit_bytes=self._max_record_bytes
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
        if size > self._max_batch_bytes:
            raise errors.BatchTooLarge(bytes=size, limit_bytes=self._max_batch_bytes)
        check_record_sizes(batch, self._max_record_bytes)
        # Batching is our choice; in Kafka each record could arrive alone. So the topic's limit
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
    """Checks a batch if that is quick. Raises `WouldBlock` and what `record_batch.check` raises.

    The size of a compressed batch is known only after decompression, so it is decompressed up to a
    small limit. Checking an uncompressed batch takes about as long as reading it did.
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
    """Raises `BadTimestamp` for timestamps that the topic rejects, or that the table cannot hold.

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
    reason = f"topic {topic.name} is compacted, so every record needs a key"
    raise errors.KeylessRecord(
        topic=topic.name,
        partition=partition,
        count=batch.header.record_count - batch.keys,
        records=[
            (index, reason) for index in (~has_key).nonzero()[0][:KAFKA_RECORD_ERRORS].tolist()
        ],
    )
