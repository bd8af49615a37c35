"""Kafka's record batches, as aiokafka's producer builds and its consumer reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from sparklog.formats import record, record_batch


@dataclass(frozen=True, slots=True)
class Record:
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def built(given: Sequence[Record], codec: int = 0, **more: int) -> bytes:
    """Builds a batch as aiokafka's producer would send it."""
    producer_sequence = {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1} | more
    builder = DefaultRecordBatchBuilder(
        2, codec, is_transactional=0, batch_size=1 << 26, **producer_sequence
    )
    for offset, each in enumerate(given):
        added = builder.append(offset, each.timestamp_ms, each.key, each.value, list(each.headers))
        assert added is not None
    return bytes(builder.build())


def bomb(size_bytes: int, *, value_bytes: int = 1_000) -> bytes:
    """Returns this many zero bytes in zstd: a few kilobytes on the wire."""
    count = size_bytes // value_bytes
    values = pa.array([bytes(value_bytes)], pa.binary()).take(pa.array(np.zeros(count, np.int32)))
    return _packed(pa.record_batch([values], names=["value"]))


def bomb_of_headers(count: int) -> bytes:
    """Returns a record with this many empty headers, larger in columns than on the wire."""
    keys = pa.array([""], pa.string()).take(pa.array(np.zeros(count, np.int32)))
    pairs = pa.StructArray.from_arrays(
        [keys, pa.nulls(count, pa.binary())], fields=list(record.HEADERS.value_type)
    )
    headers = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pairs)
    return _packed(pa.record_batch([pa.array([b"v"]), headers], names=["value", "headers"]))


def _packed(payload: pa.RecordBatch) -> bytes:
    rows = record.rows(
        payload,
        partition=0,
        base_offset=0,
        timestamp_us=1_700_000_000_000_000,
        timestamp_type=record.CREATE_TIME,
    )
    (batch,) = record_batch.encode(rows, leader_epoch=0, limit_bytes=1 << 30)
    return bytes(record_batch.encoded_in(batch, record_batch.Codec.ZSTD, 3))


def split(pieces: Sequence[Any]) -> list[bytes]:
    """Splits the concatenated pieces into batches."""
    data, found = b"".join(pieces), []
    while data:
        (length,) = struct.unpack_from(">i", data, 8)
        found.append(data[: 12 + length])
        data = data[12 + length :]
    return found


def read(batch: Any) -> list[tuple[int, Record]]:
    """Reads a batch as aiokafka's consumer does, with offsets; nothing of a control batch."""
    found = DefaultRecordBatch(bytes(batch))
    assert found.validate_crc()
    if found.is_control_batch:
        return []
    return [
        (each.offset, Record(each.timestamp, each.key, each.value, tuple(each.headers)))
        for each in found
    ]


def changed(batch: bytes, at: int, form: str, value: int, *, checksum: bool = True) -> bytes:
    """Returns the batch with another number at `at`."""
    found = bytearray(batch)
    struct.pack_into(form, found, at, value)
    if checksum:
        struct.pack_into(">I", found, 17, crc32c.crc32c(bytes(found[21:])))
    return bytes(found)
