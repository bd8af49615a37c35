"""Kafka's record batch, version 2: checks batches, decodes them to columns, and encodes rows.

A client's batch is kept byte for byte; only its base offset and leader epoch are set, which its CRC
does not cover. Older message sets (versions 0 and 1) are rejected, as in Kafka 4.
Source: https://kafka.apache.org/documentation/#recordbatch, KIP-98, and Kafka's `LogValidator`.

No I/O and no state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import cramjam
import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, errors, limits
from sparklog.formats import record_kernels
from sparklog.formats.consumer_offsets import varint
from sparklog.formats.record import HEADERS, LOG_APPEND_TIME, TIMESTAMP
from sparklog.formats.record import rows as rows_of
from sparklog.formats.record_kernels import Bytes, Flags, Ints, Longs

Raw: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

HEADER_BYTES: Final = 61
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_MAGIC: Final = 2
_LENGTH_FROM: Final = 12
"""A batch's length field counts the bytes after itself."""
_CRC_FROM: Final = 21
"""Offset of the first byte that the CRC covers."""
_CODEC: Final = 0x07
_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_NO_PRODUCER: Final = -1
_END_BYTES: Final = 4
"""Bytes of a value's end offset in its column."""
_VALUE_BYTES: Final = _END_BYTES + 1
"""Bytes of an end offset and a validity bit, with the padding of short columns."""
_STAMP_BYTES: Final = 8
_SMALL_BYTES: Final = 64 * limits.KIB
"""Up to this size, records are measured in a few microseconds."""


class Codec(IntEnum):
    """Compression codecs of a batch, with Kafka's numbers."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_CODECS: Final = frozenset(map(int, Codec))


class Header(NamedTuple):
    """The first 61 bytes of a batch."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Size of the whole batch in bytes."""
        return self.length + _LENGTH_FROM

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC

    @property
    def has_append_time(self) -> bool:
        return bool(self.attributes & _APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBatch:
    """A valid batch, and a summary of its contents."""

    header: Header
    min_timestamp_ms: int
    max_timestamp_ms: int
    keys: int
    """Number of records that have a key."""
    largest_bytes: int
    """Largest sum of key, value and headers of one record, in bytes."""
    decoded_bytes: int
    """Size of the result of `decode`, as Arrow counts it (`nbytes`)."""
    records: Bytes
    """The decompressed records."""


# ------------------------------------------------------------------------------ checking


def read_header(data: Raw) -> Header:
    """Reads a batch's header. Raises `DamagedBatch` if there are too few bytes."""
    if len(data) < HEADER_BYTES:
        raise errors.DamagedBatch(reason=f"{len(data)} bytes are fewer than its header")
    return Header._make(_HEADER.unpack_from(data))


def check(data: Raw, *, limit_bytes: int = limits.MAX_BATCH_BYTES) -> CheckedBatch:
    """Checks that `data` is exactly one batch from a producer, intact down to the last record.

    Args:
        limit_bytes: the limit of the decompressed records, and of the columns that `decode` makes
            of them: many empty headers are small on the wire and large in memory.

    Raises `DamagedBatch`, `BadBatch`, `UnknownCodec`, and `BatchTooLarge`.
    """
    header = read_header(data)
    _check_header(header, data)
    records = _records(header, data, limit_bytes)
    measures = _measured([header], [records], records)
    decoded_bytes = _decoded_bytes(header, measures)
    if decoded_bytes > limit_bytes:
        raise errors.BatchTooLarge(bytes=decoded_bytes, limit_bytes=limit_bytes)
    if measures[record_kernels.HEADERS]:
        _headers(records, measures, header.record_count)
    return CheckedBatch(
        header=header,
        min_timestamp_ms=header.base_timestamp_ms + int(measures[record_kernels.MIN_DELTA]),
        max_timestamp_ms=header.base_timestamp_ms + int(measures[record_kernels.MAX_DELTA]),
        keys=int(measures[record_kernels.KEYS]),
        largest_bytes=int(measures[record_kernels.LARGEST]),
        decoded_bytes=decoded_bytes,
        records=records,
    )


def _decoded_bytes(header: Header, measures: Longs) -> int:
    """Returns the size of the columns that `decode` makes of a batch."""
    count = header.record_count
    size = int(measures[record_kernels.KEY_BYTES]) + int(measures[record_kernels.VALUE_BYTES])
    size += count * _VALUE_BYTES
    if not header.has_append_time:
        size += count * _STAMP_BYTES
    if measures[record_kernels.KEYS]:
        size += count * _VALUE_BYTES
    if measures[record_kernels.HEADERS]:
        pairs = int(measures[record_kernels.HEADERS])
        size += count * _END_BYTES + pairs * (_END_BYTES + _VALUE_BYTES)
        size += int(measures[record_kernels.HEADER_KEY_BYTES])
        size += int(measures[record_kernels.HEADER_VALUE_BYTES])
    return size


def _check_header(header: Header, data: Raw) -> None:
    if header.magic < _MAGIC:  # a message set has its magic in the same place
        reason = f"it is a message set of version {header.magic}, but only version 2 is accepted"
        raise errors.BadBatch(reason=reason)
    if header.magic > _MAGIC or header.size > len(data) or header.length < HEADER_BYTES - 12:
        raise errors.DamagedBatch(reason=f"{len(data)} bytes are not a batch: {header}")
    if header.size < len(data):
        raise errors.BadBatch(reason="only one batch at a time is accepted, but more follows")
    if crc32c.crc32c(_slice(data, _CRC_FROM)) != header.crc:
        raise errors.DamagedBatch(reason="its CRC32C is wrong")
    if header.attributes & _CONTROL:
        raise errors.BadBatch(reason="only the broker may write control records")
    if not 1 <= header.record_count <= limits.MAX_BATCH_ROWS:
        reason = f"a batch of {header.record_count} records, not 1 to {limits.MAX_BATCH_ROWS}"
        raise errors.BadBatch(reason=reason)
    if header.last_offset_delta != header.record_count - 1:
        reason = (
            f"{header.record_count} records, but the last has offset {header.last_offset_delta}"
        )
        raise errors.BadBatch(reason=reason)
    if header.producer_id != _NO_PRODUCER and (
        header.producer_id < 0 or header.producer_epoch < 0 or header.base_sequence < 0
    ):
        raise errors.BadBatch(reason="an idempotent producer needs an id, an epoch and a sequence")
    if header.codec not in _CODECS:
        raise errors.UnknownCodec(codec=header.codec)


def _measured(headers: Sequence[Header], parts: Sequence[Bytes], records: Bytes) -> Longs:
    """Returns the measures of batches whose records are `parts`, concatenated in `records`."""
    found = np.empty(record_kernels.MEASURES, np.int64)
    ends = np.array([*accumulate(map(len, parts))], np.int64)
    counts = np.array([header.record_count for header in headers], np.int64)
    is_small = len(records) <= _SMALL_BYTES
    measure = record_kernels.measure_small if is_small else record_kernels.measure
    measure(records, _sealed(ends), _sealed(counts), found)
    if found[record_kernels.STATUS] != record_kernels.FINE:
        raise errors.BadBatch(
            reason=f"it {record_kernels.PROBLEMS[int(found[record_kernels.STATUS])]}"
        )
    return found


def placed(data: Raw, *, base_offset: int, leader_epoch: int) -> tuple[bytes, memoryview]:
    """Returns the batch with its place in the log set, in two pieces: new start, unchanged rest."""
    whole = memoryview(data)
    places = base_offset.to_bytes(8, "big"), leader_epoch.to_bytes(4, "big")
    return b"".join((places[0], whole[8:12], places[1])), whole[16:]


def with_times(data: Raw, *, max_timestamp_ms: int, append_time: bool) -> bytearray:
    """Returns the batch with a new maximum timestamp, which `append_time` gives to every record."""
    found = bytearray(data)
    (attributes,) = struct.unpack_from(">h", found, 21)
    attributes = attributes | _APPEND_TIME if append_time else attributes & ~_APPEND_TIME
    struct.pack_into(">h", found, 21, attributes)
    struct.pack_into(">q", found, 35, max_timestamp_ms)
    _seal(found)
    return found


def _seal(batch: bytearray) -> None:
    """Sets the CRC of the batch."""
    struct.pack_into(">I", batch, 17, crc32c.crc32c(memoryview(batch)[_CRC_FROM:]))


# ------------------------------------------------------------------------------ compression

_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_BYTES: Final = 16
"""The magic and two versions that precede length-prefixed blocks in the Java client's framing."""
_XERIAL_VERSIONS: Final = struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1_024


def compressed(data: Raw, records: Bytes, codec: Codec, level: int) -> bytearray:
    """Returns the batch, compressed.

    Args:
        records: the uncompressed records of `data`.
        level: the codec's level, on Kafka's scale; -1 for gzip's own default.
    """
    packed = _PACKERS[codec](records.data, level)
    found = bytearray(HEADER_BYTES + len(packed))
    found[:HEADER_BYTES] = _slice(data, 0)[:HEADER_BYTES]
    found[HEADER_BYTES:] = packed
    (attributes,) = struct.unpack_from(">h", found, 21)
    struct.pack_into(">h", found, 21, attributes & ~_CODEC | codec)
    struct.pack_into(">i", found, 8, len(found) - _LENGTH_FROM)
    _seal(found)
    return found


def encoded_in(batch: bytearray, codec: Codec, level: int) -> bytearray:
    """Returns a batch from `encode`, compressed with that codec."""
    if codec == Codec.NONE:
        return batch
    return compressed(batch, np.frombuffer(batch, np.uint8)[HEADER_BYTES:], codec, level)


def _gzip(records: memoryview, level: int) -> memoryview:
    return memoryview(cramjam.gzip.compress(records, level=None if level < 0 else level))


def _snap(records: memoryview, _level: int) -> bytes:
    """Compresses in the Java client's framing, which all clients can read."""
    parts = [_XERIAL, _XERIAL_VERSIONS]
    for at in range(0, len(records), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(records[at : at + _XERIAL_BLOCK_BYTES]))
        parts += [len(block).to_bytes(4, "big"), block]
    return b"".join(parts)


def _lz4(records: memoryview, level: int) -> memoryview:
    # The Java client cannot read blocks that refer to earlier ones.
    packer = cramjam.lz4.Compressor(level=level, content_checksum=False, block_linked=False)
    packer.compress(bytes(records))  # it accepts no other buffer
    return memoryview(packer.finish())


def _zstd(records: memoryview, level: int) -> memoryview:
    return memoryview(cramjam.zstd.compress(records, level=level))


_PACKERS: Final[dict[int, Callable[[memoryview, int], bytes | memoryview]]] = {
    Codec.NONE: lambda records, _level: bytes(records),
    Codec.GZIP: _gzip,
    Codec.SNAPPY: _snap,
    Codec.LZ4: _lz4,
    Codec.ZSTD: _zstd,
}


def _records(header: Header, data: Raw, limit_bytes: int) -> Bytes:
    """Returns the records' decompressed bytes."""
    packed = _slice(data, HEADER_BYTES)
    if len(packed) > limit_bytes:
        raise errors.BatchTooLarge(bytes=len(packed), limit_bytes=limit_bytes)
    if header.codec == Codec.NONE:
        return _sealed(np.frombuffer(packed, np.uint8))
    # Unwritten pages cost no memory: the system maps pages as they are touched.
    target = np.empty(limit_bytes, np.uint8)
    try:
        if header.codec == Codec.SNAPPY:
            size = _unsnap(packed, target)
        else:
            size = _STREAMS[header.codec](packed, target)
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error):
            raise errors.BatchTooLarge(bytes=limit_bytes + 1, limit_bytes=limit_bytes) from error
        reason = f"its {Codec(header.codec).name} does not decompress: {error}"
        raise errors.DamagedBatch(reason=reason) from error
    return _sealed(target[:size])


_STREAMS: Final[dict[int, Callable[[Any, Any], int]]] = {
    Codec.GZIP: cramjam.gzip.decompress_into,
    Codec.LZ4: cramjam.lz4.decompress_into,
    Codec.ZSTD: cramjam.zstd.decompress_into,
}


def _unsnap(packed: memoryview, target: npt.NDArray[np.uint8]) -> int:
    if bytes(packed[: len(_XERIAL)]) != _XERIAL:
        return _unsnap_block(packed, target)
    at, size = _XERIAL_BYTES, 0
    while at < len(packed):
        if at + 4 > len(packed):
            raise cramjam.DecompressionError("a block without its length")
        (length,) = struct.unpack_from(">I", packed, at)
        block = packed[at + 4 : at + 4 + length]
        if len(block) < length:
            raise cramjam.DecompressionError("a block is cut off")
        size += _unsnap_block(block, target[size:])
        at += 4 + length
    return size


def _unsnap_block(block: memoryview, target: npt.NDArray[np.uint8]) -> int:
    into: Any = target
    if cramjam.snappy.decompress_raw_len(block) > len(target):
        raise cramjam.DecompressionError("failed to write whole buffer")
    return int(cramjam.snappy.decompress_raw_into(block, into))


# ------------------------------------------------------------------------------ to columns


def decode(*batches: Raw) -> pa.RecordBatch:
    """Returns the records of consecutive batches as one payload (`record.PAYLOAD_SCHEMA`).

    Columns that are null throughout are omitted, and so is `timestamp` if a batch has its append
    time: `max_timestamp_ms` is then the timestamp of every record, so such batches must come one at
    a time. Decoding several small batches together costs far less than decoding each separately.

    Raises what `check` raises; also `BatchTooLarge` if the batches are too large together.
    """
    headers = []
    parts = []
    for data in batches:
        header = read_header(data)
        _check_header(header, data)
        headers.append(header)
        # An accepted batch was within the limit at that time, which may have been higher.
        parts.append(_records(header, data, limits.BUFFER_MAX_BYTES))
    size = sum(len(part) for part in parts)
    if size > limits.BUFFER_MAX_BYTES:
        raise errors.BatchTooLarge(bytes=size, limit_bytes=limits.BUFFER_MAX_BYTES)
    records = parts[0] if len(parts) == 1 else _sealed(np.concatenate(parts))
    measures = _measured(headers, parts, records)
    count = sum(header.record_count for header in headers)
    taken = _take(headers, records, measures)
    columns = {}
    if not headers[0].has_append_time:
        columns["timestamp"] = arrow.numbers(taken.stamps_ms * 1_000, TIMESTAMP)
    if measures[record_kernels.KEYS]:
        columns["key"] = _column(pa.binary(), taken.key_ends, taken.keys, taken.has_key)
    columns["value"] = _column(pa.binary(), taken.value_ends, taken.values, taken.has_value)
    if measures[record_kernels.HEADERS]:
        columns["headers"] = _headers(records, measures, count)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


class _Taken(NamedTuple):
    """The columns of records, without their headers."""

    stamps_ms: Longs
    key_ends: Ints
    keys: Bytes
    has_key: Flags
    value_ends: Ints
    values: Bytes
    has_value: Flags


def _take(headers: Sequence[Header], records: Bytes, measures: Longs) -> _Taken:
    counts = [header.record_count for header in headers]
    bases_ms = np.repeat([header.base_timestamp_ms for header in headers], counts)
    count = len(bases_ms)
    deltas = np.empty(count, np.int64)
    key_ends, value_ends = np.zeros(count + 1, np.int32), np.zeros(count + 1, np.int32)
    keys = np.empty(measures[record_kernels.KEY_BYTES], np.uint8)
    values = np.empty(measures[record_kernels.VALUE_BYTES], np.uint8)
    has_key, has_value = np.empty(count, np.bool_), np.empty(count, np.bool_)
    record_kernels.take(records, deltas, key_ends, keys, has_key, value_ends, values, has_value)
    return _Taken(deltas + bases_ms, key_ends, keys, has_key, value_ends, values, has_value)


def stamps_and_keys(batch: CheckedBatch) -> tuple[Longs, Flags]:
    """Returns (timestamp in ms, has a key) of each record, for errors that name records."""
    records = batch.records
    taken = _take([batch.header], records, _measured([batch.header], [records], records))
    return taken.stamps_ms, taken.has_key


def _headers(records: Bytes, measures: Longs, count: int) -> pa.ListArray:
    headers = int(measures[record_kernels.HEADERS])
    list_ends = np.zeros(count + 1, np.int32)
    name_ends, value_ends = np.zeros(headers + 1, np.int32), np.zeros(headers + 1, np.int32)
    names = np.empty(measures[record_kernels.HEADER_KEY_BYTES], np.uint8)
    values = np.empty(measures[record_kernels.HEADER_VALUE_BYTES], np.uint8)
    has_value = np.empty(headers, np.bool_)
    record_kernels.take_headers(records, list_ends, name_ends, names, value_ends, values, has_value)
    pairs = pa.StructArray.from_arrays(
        [
            _column(pa.string(), name_ends, names, np.ones(headers, np.bool_)),
            _column(pa.binary(), value_ends, values, has_value),
        ],
        fields=list(HEADERS.value_type),
    )
    try:
        pairs.field("key").validate(full=True)
    except pa.ArrowInvalid as error:
        raise errors.BadBatch(reason=f"a header's key is not UTF-8: {error}") from error
    ends = arrow.numbers(list_ends, pa.int32())
    # A record without headers has an empty list; null is for rows that came without the column.
    return pa.ListArray.from_arrays(ends, pairs, type=HEADERS)


def _column(kind: pa.DataType, ends: Ints, data: Bytes, there: Flags) -> pa.Array:
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(there), buffers)


# ------------------------------------------------------------------------------ from rows


_MARKER: Final = b"\x08\0\0\0\x01" + b"\x0c\0\0\0\0\0\0" + b"\0"
"""A control record's key (version 0, type 1: a commit), value (version 0, coordinator epoch 0) and
empty headers, with their lengths."""
_EMPTY: Final = Header(
    base_offset=0,
    length=HEADER_BYTES - _LENGTH_FROM,
    leader_epoch=-1,
    magic=_MAGIC,
    crc=0,
    attributes=0,
    last_offset_delta=-1,
    base_timestamp_ms=-1,
    max_timestamp_ms=-1,
    producer_id=_NO_PRODUCER,
    producer_epoch=-1,
    base_sequence=-1,
    record_count=0,
)
"""The initial header of a batch that is made here: no producer, no codec, no records yet."""


COLUMNS: Final = ("offset", "timestamp", "timestampType", "key", "value", "headers")
"""The columns of `record.ROW_SCHEMA` that are encoded."""


def encode(rows: pa.RecordBatch, *, leader_epoch: int, limit_bytes: int) -> Iterator[bytearray]:
    """Yields rows of the log as uncompressed batches of `limit_bytes` or a little less.

    Args:
        rows: the `COLUMNS`, with increasing offsets. Timestamps are truncated to milliseconds, the
            finest unit that Kafka has; rows with append time go into one batch per timestamp.
        limit_bytes: a batch contains at least one record, however large it is.
    """
    parts = _Parts(rows)
    for first, end in parts.runs():
        while first < end:
            last = int(np.searchsorted(parts.bounds, parts.bounds[first] + limit_bytes, "right"))
            until = min(max(last - 1, first + 1), end)
            yield _batch(parts, slice(first, until), leader_epoch)
            first = until


def gap(first: int, end: int, *, leader_epoch: int) -> bytearray:
    """Returns a batch up to `end` that moves consumers past offsets without records.

    It is a control batch: its only record, at the last offset, ends a transaction that does not
    exist. All clients skip it, but move past its offset. An empty batch, as Kafka keeps it if all
    of its records are removed, does not move the position of librdkafka's consumers. One batch
    spans at most 2³¹ offsets: earlier ones are missing, like those of a batch that Kafka has
    removed.
    """
    base_offset = max(first, end - (1 << 31))
    delta = end - base_offset - 1
    # Numbers in a record are zigzag-encoded: twice the number if it is not negative.
    record = b"\0\0" + varint(2 * delta) + _MARKER
    record = varint(2 * len(record)) + record
    header = _EMPTY._replace(
        base_offset=base_offset,
        length=_EMPTY.length + len(record),
        leader_epoch=leader_epoch,
        attributes=_CONTROL | _TRANSACTIONAL,
        last_offset_delta=delta,
        record_count=1,
    )
    found = bytearray(_HEADER.pack(*header)) + record
    _seal(found)
    return found


class _Parts:
    """The rows as the loops expect them; `ends` have one more than there are rows, headers, …"""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.offsets: Longs = arrow.as_numpy(rows.column("offset"))
        stamps_us = arrow.as_numpy(rows.column("timestamp").view(pa.int64()))
        self.stamps_ms: Longs = stamps_us // 1_000
        self.types: Ints = arrow.as_numpy(rows.column("timestampType"))
        self.key_ends, self.keys, self.has_key = _parts(rows.column("key"))
        self.value_ends, self.values, self.has_value = _parts(rows.column("value"))
        headers = rows.column("headers")
        pairs = headers.flatten()  # values under nulls are omitted
        self.name_ends, self.names, _ = _parts(pairs.field("key"))
        self.header_ends, self.header_values, self.has_header = _parts(pairs.field("value"))
        if headers.null_count < len(headers):
            lengths = headers.value_lengths().fill_null(arrow.number(0, pa.int32()))
            self.list_ends = np.append(0, np.cumsum(arrow.as_numpy(lengths))).astype(np.int32)
        else:
            self.list_ends = np.zeros(len(headers) + 1, np.int32)
        self.bounds = self._bounds()
        """Upper bounds on the total size of the records before each one."""

    def _bounds(self) -> Longs:
        found = np.arange(len(self.offsets) + 1, dtype=np.int64) * _RECORD_BYTES
        found += self.key_ends - self.key_ends[0]
        found += self.value_ends - self.value_ends[0]
        found += self.list_ends.astype(np.int64) * _RECORD_HEADER_BYTES
        for ends in (self.name_ends, self.header_ends):
            found += (ends - ends[0])[self.list_ends]
        return found

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields ranges of rows that may share a batch: same timestamp type, same append time."""
        changed = np.diff(self.types) != 0
        changed |= (np.diff(self.stamps_ms) != 0) & (self.types[1:] == LOG_APPEND_TIME)
        changed |= np.diff(self.offsets >> _DELTA_BITS) != 0
        return pairwise([0, *(np.flatnonzero(changed) + 1).tolist(), len(self.offsets)])


_RECORD_BYTES: Final = 40
"""Upper bound on a record's overhead: its length, four more numbers, attributes."""
_RECORD_HEADER_BYTES: Final = 10
_DELTA_BITS: Final = 30
"""An offset's delta is an int32."""


def _parts(column: pa.Array) -> tuple[Ints, Bytes, Flags]:
    """Returns (ends, bytes, validity) of a binary or string column."""
    _, offsets, data = column.buffers()
    first, end = column.offset, column.offset + len(column) + 1
    ends = np.frombuffer(offsets, np.int32)[first:end] if offsets else np.zeros(1, np.int32)
    octets = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    return ends, octets, arrow.as_mask(column.is_valid())


def _batch(parts: _Parts, taken: slice, leader_epoch: int) -> bytearray:
    offsets, stamps_ms = parts.offsets[taken], parts.stamps_ms[taken]
    base_offset, base_ms, count = int(offsets[0]), int(stamps_ms[0]), len(offsets)
    with_end = slice(taken.start, taken.stop + 1)
    list_ends = parts.list_ends[with_end]
    if list_ends[0] == list_ends[-1]:
        list_ends = list_ends[:0]
    deltas, stamps = _sealed(offsets - base_offset), _sealed(stamps_ms - base_ms)
    keys = _sealed(parts.key_ends[with_end]), _sealed(parts.has_key[taken])
    values = _sealed(parts.value_ends[with_end]), _sealed(parts.has_value[taken])
    lists, names, headers = map(_sealed, (list_ends, parts.name_ends, parts.header_ends))
    has_header = _sealed(parts.has_header)
    bodies = np.empty(count, np.int64)
    size = record_kernels.sizes(
        deltas, stamps, *keys, *values, lists, names, headers, has_header, bodies
    )
    found = bytearray(HEADER_BYTES + size)
    target = np.frombuffer(found, np.uint8)[HEADER_BYTES:]
    end = record_kernels.put(
        target,
        bodies,
        deltas,
        stamps,
        keys[0],
        _sealed(parts.keys),
        keys[1],
        values[0],
        _sealed(parts.values),
        values[1],
        lists,
        names,
        _sealed(parts.names),
        headers,
        _sealed(parts.header_values),
        has_header,
    )
    assert end == size
    header = _EMPTY._replace(
        base_offset=base_offset,
        length=HEADER_BYTES + size - _LENGTH_FROM,
        leader_epoch=leader_epoch,
        attributes=_APPEND_TIME if parts.types[taken.start] == LOG_APPEND_TIME else 0,
        last_offset_delta=int(deltas[-1]),
        base_timestamp_ms=base_ms,
        max_timestamp_ms=int(stamps_ms.max()),
        record_count=count,
    )
    _HEADER.pack_into(found, 0, *header)
    _seal(found)
    return found


def _slice(data: Raw, first: int) -> memoryview:
    return memoryview(data)[first:]


def _sealed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Makes the array read-only, which is the type that the loops are compiled for."""
    values.flags.writeable = False
    return values


# ------------------------------------------------------------------------------ compiling


_LOOPS: Final = 100
"""More than the number of loops."""


def compile_loops() -> OSError | None:
    """Compiles every loop that is used here, or loads it from `record_kernels.CACHE`.

    Takes a few seconds at most. Returns the error that prevented the compiled loops from being
    saved, if any; in that case the next process compiles them again.
    """
    failure = None
    for _ in range(_LOOPS):
        try:
            _use_loops()
            break
        except OSError as error:  # by then numba has compiled one more
            failure = error
    return failure


def _use_loops() -> None:
    """Uses every loop, so that it is compiled for exactly the types that occur later."""
    values = [b"", None, bytes(_SMALL_BYTES)]
    pairs = [[("key", b"value"), ("key", None)], [], None]
    for headers in (pa.array(pairs, HEADERS), pa.nulls(len(values), HEADERS)):
        columns = {
            "key": pa.array(values, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": headers,
        }
        payload = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        whole = rows_of(payload, partition=0, base_offset=0, timestamp_us=0, timestamp_type=0)
        for size in (1, len(values)):
            for batch in encode(whole.slice(0, size), leader_epoch=0, limit_bytes=limits.GIB):
                stamps_and_keys(check(batch))
                decode(batch)
