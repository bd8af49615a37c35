"""Payloads of WAL entries: the records of one entry, encoded, with their checksum.

A payload is an Arrow IPC stream of one batch, or a Kafka record batch as received. An entry that
kept the offsets of its rows may have fewer rows than offsets. Its payload then contains their
offsets in a column; without rows, the payload is empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c
import msgspec
import pyarrow as pa

from sparklog import arrow, errors
from sparklog.formats.record import LOG_APPEND_TIME, OFFSET, PAYLOAD_SCHEMA
from sparklog.storage.snapshot import Encoding, Entry

_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)


@dataclass(frozen=True, slots=True)
class Payload:
    """An entry's bytes, in pieces, with their length and checksum."""

    pieces: tuple[bytes | pa.Buffer, ...]
    length: int
    crc32c: int


EMPTY = Payload((), 0, 0)
_TYPES = {field.name: field.type for field in PAYLOAD_SCHEMA}
_WITH_OFFSETS = _TYPES | {OFFSET.name: OFFSET.type}
_NO_ROWS = pa.RecordBatch.from_arrays(
    [pa.nulls(0, field.type) for field in PAYLOAD_SCHEMA], schema=PAYLOAD_SCHEMA
)
_schema_messages: dict[tuple[str, ...], bytes] = {}


def joined(
    entries: Sequence[tuple[Entry, Payload]],
) -> tuple[list[Entry], list[bytes | pa.Buffer], int]:
    """Returns the entries with their byte ranges, the bytes in order, and their total length."""
    with_ranges: list[Entry] = []
    pieces: list[bytes | pa.Buffer] = []
    start = 0
    for entry, payload in entries:
        with_ranges.append(
            msgspec.structs.replace(
                entry, start=start, length=payload.length, crc32c=payload.crc32c
            )
        )
        pieces.extend(payload.pieces)
        start += payload.length
    return with_ranges, pieces, start


def encode_payload(batch: pa.RecordBatch) -> Payload:
    """Encodes `batch`, a conforming payload, as an Arrow IPC stream of one batch."""
    names = tuple(batch.schema.names)
    head = _schema_messages.get(names)
    if head is None:
        head = _schema_messages[names] = batch.schema.serialize().to_pybytes()
    body = batch.serialize()
    crc = crc32c.crc32c(_END_OF_STREAM, crc32c.crc32c(body, crc32c.crc32c(head)))
    return Payload((head, body, _END_OF_STREAM), len(head) + body.size + len(_END_OF_STREAM), crc)


def decode_body(schema: pa.Schema, payload: Payload) -> pa.RecordBatch:
    """Decodes a batch of `schema` that `encode_payload` encoded, without copying."""
    _, body, _ = payload.pieces
    return pa.ipc.read_record_batch(body, schema)


def decode_payload(entry: Entry, data: pa.Buffer) -> pa.RecordBatch:
    """Decodes the records of an entry as a payload; Arrow data is not copied.

    Drops the producer's timestamps if the entry uses LogAppendTime, unless it kept the offsets of
    its rows. Raises `CorruptObject` if `data` is not the batch that the entry describes.
    """
    if entry.encoding is Encoding.KAFKA:
        return decode_kafka([entry], [data])
    if not entry.rows:
        return _NO_ROWS
    try:
        batch = pa.ipc.open_stream(data).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise _not_as_described(entry, f"it is not an Arrow stream: {error}") from error
    if batch.num_rows != entry.rows:
        raise _not_as_described(entry, f"it has {batch.num_rows} rows instead of {entry.rows}")
    names = batch.schema.names
    has_gaps = entry.rows != entry.count
    types = _WITH_OFFSETS if has_gaps else _TYPES
    if len(set(names)) != len(names) or any(
        types.get(field.name) != field.type for field in batch.schema
    ):
        raise _not_as_described(entry, f"its columns are {batch.schema.to_string()}")
    if has_gaps:
        _check_offsets(entry, batch)
    if entry.timestamp_type == LOG_APPEND_TIME and entry.kept_rows < 0 and "timestamp" in names:
        batch = batch.drop_columns(["timestamp"])  # staged files keep the original timestamps
    return batch


def _check_offsets(entry: Entry, batch: pa.RecordBatch) -> None:
    """Raises `CorruptObject` unless the rows' offsets increase, and are within the entry's."""
    at = batch.schema.get_field_index(OFFSET.name)
    if at < 0 or batch.column(at).null_count:
        raise _not_as_described(entry, "it has gaps, and its rows have no offsets")
    offsets = arrow.as_numpy(batch.column(at))
    first, last = int(offsets[0]), int(offsets[-1])
    if first < entry.base_offset or last >= entry.end or not (offsets[1:] > offsets[:-1]).all():
        check = f"the offsets of its rows, {first} to {last}, do not rise within those of the entry"
        raise _not_as_described(entry, check)


def encode_kafka(batch: bytes | bytearray) -> Payload:
    """Wraps a Kafka record batch unchanged. Its offsets are ignored; those of the entry count."""
    return Payload((batch,), len(batch), crc32c.crc32c(batch))


def decode_kafka(
    entries: Sequence[Entry], batches: Sequence[bytes | bytearray | pa.Buffer]
) -> pa.RecordBatch:
    """Decodes consecutive entries in Kafka's encoding to one payload.

    Entries with LogAppendTime must be passed one at a time, because their records have no
    timestamps. Raises `CorruptObject` if one is not the batch that its entry describes, or if they
    are too large together, and `NotInstalled` if a package needed for decoding is missing.
    """
    try:
        from sparklog.formats import (
            record_batch,  # imported late: its compiled loops are slow to load
        )
    except ModuleNotFoundError as error:
        raise errors.NotInstalled(
            what="decoding records that Kafka clients wrote",
            missing=error.name or str(error),
            hint="pip install 'sparklog[spark]', or 'sparklog[broker]' for a broker",
        ) from error

    try:
        payload = record_batch.decode(*batches)
    except (errors.Invalid, errors.DamagedBatch) as error:
        raise _not_as_described(entries[0], str(error)) from error
    count = sum(entry.count for entry in entries)
    if payload.num_rows != count:
        raise _not_as_described(entries[0], f"it has {payload.num_rows} rows instead of {count}")
    return payload


def _not_as_described(entry: Entry, check: str) -> errors.CorruptObject:
    where = entry.staged.path if entry.staged is not None else "a log entry"
    return errors.CorruptObject(path=where, check=f"{offsets_of(entry)}: {check}")


def offsets_of(entry: Entry) -> str:
    """Names the offsets of an entry, for messages."""
    return f"offsets {entry.base_offset} to {entry.end} of partition {entry.partition}"
