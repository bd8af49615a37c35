"""Records, batches and offsets that a topic does not accept or does not have."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.errors.base import Invalid


class OffsetsDoNotContinue(Invalid):
    """A write with offsets must begin where its partition ends: read the end again."""

    code = "offsets_do_not_continue"
    needs_proof = True
    template = (
        "A write with offsets begins at {first} in {topic}-{partition}, which ends at {end}."
        " Begin at its end: these records have already been written, or others would be missing."
    )
    first: int
    topic: str
    partition: int
    end: int


class OffsetOutOfRange(Invalid):
    """The partition has no such offset: choose one within its range."""

    code = "offset_out_of_range"
    needs_proof = True
    template = "Offset {offset} of {topic}-{partition} is outside the range {start} to {end}."
    offset: int
    topic: str
    partition: int
    start: int
    end: int


class OutOfOrderSequence(Invalid):
    """A producer skipped or repeated a sequence number: create a new producer."""

    code = "out_of_order_sequence"
    needs_proof = True
    template = (
        "Producer {producer_id} sent sequence {found} to {topic}-{partition}, where {expected}"
        " comes next. Create a new producer."
    )
    producer_id: int
    found: int
    topic: str
    partition: int
    expected: int


class RecordTooLarge(Invalid):
    """A record exceeds the broker's limit: send smaller records, or raise the limit."""

    code = "record_too_large"
    template = (
        "A record of {bytes} bytes exceeds writer.max_record_bytes = {limit_bytes}. Send smaller"
        " records, or raise the setting."
    )
    bytes: int
    limit_bytes: int


class BatchTooLarge(Invalid):
    """A batch exceeds the broker's limit: send smaller batches, or raise the limit."""

    code = "batch_too_large"
    template = (
        "A batch of {bytes} bytes exceeds writer.max_batch_bytes = {limit_bytes}. Send smaller"
        " batches, or raise the setting."
    )
    bytes: int
    limit_bytes: int


class MessageTooLarge(Invalid):
    """A batch or record exceeds the topic's limit, though not the broker's: send smaller ones."""

    code = "message_too_large"
    template = (
        "Topic {topic!r} refuses {what} of {bytes} bytes: its max.message.bytes is {limit_bytes}."
        " Send less at a time, or raise it."
    )
    topic: str
    what: str
    bytes: int
    limit_bytes: int


class KeylessRecord(Invalid):
    """A record for a compacted topic has no key: set one.

    Kafka's `INVALID_RECORD`. No later record can supersede one without a key.
    """

    code = "keyless_record"
    template = (
        "Topic {topic!r} is compacted (cleanup.policy=compact), so each of its records needs a"
        " key; {count} of those sent to partition {partition} have none. Set a key."
    )
    topic: str
    count: int
    records: Sequence[tuple[int, str]] = ()
    """As in `BadTimestamp`."""
    partition: int


class BadTimestamp(Invalid):
    """The topic does not accept the timestamp of a record: correct it."""

    code = "bad_timestamp"
    template = "The timestamp of a record is refused: {reason}."
    reason: str
    records: Sequence[tuple[int, str]] = ()
    """Index in the batch of each invalid record, and the reason; at most `KAFKA_RECORD_ERRORS`."""


class WrongSchema(Invalid):
    """The columns of a batch or their types are wrong: correct the batch."""

    code = "wrong_schema"
    template = "{reason}"
    reason: str


class BadValue(Invalid):
    """The value of a record does not match the format that the reader expects."""

    code = "bad_value"
    template = "Cannot read the value at {topic}-{partition}, offset {offset}: {reason}."
    topic: str
    partition: int
    offset: int
    reason: str


class DeserializationFailed(Invalid):
    """A consumer's deserializer rejected a key or a value: correct it, or skip the record.

    `part` is "key" or "value", and the deserializer's own exception is the cause. The consumer
    stays at the record; `consumer.seek(error.topic, error.partition, error.offset + 1)` skips it.
    """

    code = "deserialization_failed"
    template = (
        "Cannot deserialize the {part} at {topic}-{partition}, offset {offset}: {reason}. Correct"
        " the deserializer, or seek to the next offset to skip the record."
    )
    part: str
    topic: str
    partition: int
    offset: int
    reason: str


class BadAcks(Invalid):
    """`acks` has an unknown value: use a valid one."""

    code = "bad_acks"
    template = "acks = {acks} is invalid: use -1, 0 or 1."
    acks: int


class BadBatch(Invalid):
    """A record batch breaks the format's rules: correct the client that encodes it."""

    code = "bad_batch"
    template = "The broker refuses a record batch: {reason}."
    reason: str


class UnknownCodec(Invalid):
    """A record batch names a compression that does not exist: use one that does."""

    code = "unknown_codec"
    template = "Compression {codec} is unknown: use 0 to 4 (none, gzip, snappy, lz4, zstd)."
    codec: int


class CodecTooNew(Invalid):
    """The version of the request does not allow this compression: use a newer client."""

    code = "codec_too_new"
    template = (
        "Compression {codec} needs version {needed} of this request, not {version}. Use a newer"
        " client, or another compression."
    )
    codec: str
    needed: int
    version: int
