"""Records of the topic `__consumer_offsets`: groups and their committed offsets.

Keys and values are bytes in Kafka's own formats, so that its tools can read them too. The last
record of a key counts; one without a value deletes the key.

| key | value |
|---|---|
| int16 1, group, topic, int32 partition | int16 4, offset, leader epoch, metadata, commit time |
| int16 2, group | int16 3, type, generation, protocol, leader, time of the state, members |

Version 4 of an offset's value ends with tagged fields; tag 0 is the topic id, so that an offset
never counts for a topic that was recreated under the old name.
Source: `group-coordinator/src/main/resources/common/message` in Kafka's repository.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import arrow, errors

TOPIC: Final = "__consumer_offsets"

_OFFSET_KEY: Final = 1
_GROUP_KEY: Final = 2
_OF_GROUPS: Final = (0, _OFFSET_KEY, _GROUP_KEY)
"""Kinds of keys that start with the name of a group; 0 is an older form of `_OFFSET_KEY`."""
_OFFSET_VALUE: Final = 4
_OFFSET_VALUES: Final = range(5)
_GROUP_VALUE: Final = 3
_TOPIC_ID_TAG: Final = 0
_TOPIC_ID_PREFIX: Final = b"sparklog"
"""Topic ids are 8 bytes long; Kafka's are 16, of which this is the first half."""
_UNKNOWN_TOPIC_ID: Final = bytes(16)

MAX_STRING_BYTES: Final = 2**15 - 1
"""The maximum length of a name or id in UTF-8 bytes; the length field is an int16."""

COMMITTED_SCHEMA: Final = pa.schema(
    [
        pa.field("group", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("leaderEpoch", pa.int32()),
        pa.field("metadata", pa.string()),
        pa.field("committed", pa.timestamp("ms", tz="UTC")),
        pa.field("topicId", pa.string()),
    ]
)


class OffsetKey(msgspec.Struct, frozen=True):
    group: str
    topic: str
    partition: int


class GroupKey(msgspec.Struct, frozen=True):
    group: str


Key: TypeAlias = OffsetKey | GroupKey


class CommittedOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The next offset that a group will read from a partition."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int
    """Milliseconds since the Unix epoch."""
    topic_id: str = ""
    """Empty if unknown."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of a group that a coordinator restores. Compared by identity, not by content."""

    generation: int
    protocol_type: str | None
    protocol: str | None
    leader: str | None
    members: tuple[MemberRecord, ...]


Value: TypeAlias = CommittedOffset | tuple[GroupRecord, int]
"""The value of an `OffsetKey`, or that of a `GroupKey` with its time in ms since the Unix epoch."""


def fits(name: str | None) -> bool:
    """Returns true if the name or id fits in a record."""
    return name is None or len(name.encode()) <= MAX_STRING_BYTES


# ------------------------------------------------------------------------------ partitions


def partition_of(group: str, count: int) -> int:
    """Returns which of the topic's `count` partitions contains a group's records."""
    return _java_hash(group) % count


@functools.lru_cache(maxsize=65_536)
def _java_hash(text: str) -> int:
    """Returns Kafka's `Utils.abs(text.hashCode())`, which determines a group's partition."""
    found = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        found = (found * 31 + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    if found < 1 << 31:
        return found
    return (1 << 32) - found if found > 1 << 31 else 0


def of_group(rows: pa.RecordBatch, group: str) -> pa.RecordBatch:
    """Returns those of `rows`, with a column `key` (binary), that belong to a group."""
    if not fits(group):
        return rows.slice(0, 0)
    name = _string(group)
    mine = functools.reduce(
        pc.or_,
        (pc.starts_with(rows.column("key"), _int16(kind) + name) for kind in _OF_GROUPS),
    )
    return rows.filter(mine)


# ------------------------------------------------------------------------------ keys


def encode_key(key: Key) -> bytes:
    """Returns the encoded key; its names must fit."""
    if isinstance(key, GroupKey):
        return _int16(_GROUP_KEY) + _string(key.group)
    return b"".join(
        (_int16(_OFFSET_KEY), _string(key.group), _string(key.topic), _int32(key.partition))
    )


def decode_key(data: bytes) -> Key | None:
    """Returns the decoded key; None if it is of an unknown kind. Raises `CorruptRecord`."""
    reader = _Reader(data)
    kind = reader.number(">h")
    if kind in (0, _OFFSET_KEY):
        return OffsetKey(reader.string(), reader.string(), reader.number(">i"))
    return GroupKey(reader.string()) if kind == _GROUP_KEY else None


# ------------------------------------------------------------------------------ values


def encode_value(value: Value) -> bytes:
    """Returns the encoded value; its names must fit."""
    return encode_offset(value) if isinstance(value, CommittedOffset) else encode_group(*value)


# ------------------------------------------------------------------------------ offsets


def encode_offset(value: CommittedOffset) -> bytes:
    """Returns the value of an `OffsetKey`. `metadata` must be shorter than 2**31 bytes."""
    metadata = value.metadata.encode()
    parts = [
        _int16(_OFFSET_VALUE),
        struct.pack(">qi", value.offset, value.leader_epoch),
        varint(len(metadata) + 1),
        metadata,
        struct.pack(">q", value.commit_ms),
    ]
    if value.topic_id:
        topic_id = _TOPIC_ID_PREFIX + bytes.fromhex(value.topic_id)
        parts += [varint(1), varint(_TOPIC_ID_TAG), varint(len(topic_id)), topic_id]
    else:
        parts.append(varint(0))
    return b"".join(parts)


def decode_offset(data: bytes) -> CommittedOffset:
    """Decodes the value of an `OffsetKey`. Raises `CorruptRecord`."""
    reader = _Reader(data)
    version = reader.number(">h")
    if version not in _OFFSET_VALUES:
        raise errors.CorruptRecord(what="a committed offset", reason=f"version {version}")
    offset = reader.number(">q")
    leader_epoch = reader.number(">i") if version >= 3 else -1
    is_flexible = version >= _OFFSET_VALUE
    metadata = reader.compact_string() if is_flexible else reader.string()
    commit_ms = reader.number(">q")
    tags = dict(reader.tags()) if is_flexible else {}
    topic_id = tags.get(_TOPIC_ID_TAG, _UNKNOWN_TOPIC_ID)
    return CommittedOffset(
        offset=offset,
        leader_epoch=leader_epoch,
        metadata=metadata,
        commit_ms=commit_ms,
        topic_id=topic_id[8:].hex() if topic_id.startswith(_TOPIC_ID_PREFIX) else "",
    )


# ------------------------------------------------------------------------------ groups


def encode_group(record: GroupRecord, state_ms: int) -> bytes:
    """Returns the value of a `GroupKey`; `state_ms`: when the state began, in Unix ms."""
    parts = [
        _int16(_GROUP_VALUE),
        _string(record.protocol_type or ""),
        _int32(record.generation),
        _string(record.protocol),
        _string(record.leader),
        struct.pack(">qi", state_ms, len(record.members)),
    ]
    for each in record.members:
        parts += [
            _string(each.member_id),
            _string(each.instance_id),
            _string(each.client_id),
            _string(each.client_host),
            struct.pack(">ii", each.rebalance_timeout_ms, each.session_timeout_ms),
            _int32(len(each.subscription)),
            each.subscription,
            _int32(len(each.assignment)),
            each.assignment,
        ]
    return b"".join(parts)


def decode_group(data: bytes) -> tuple[GroupRecord, int]:
    """Returns the group, and when its state began, in ms or -1. Raises `CorruptRecord`."""
    reader = _Reader(data)
    version = reader.number(">h")
    if version not in (2, _GROUP_VALUE):
        raise errors.CorruptRecord(what="a group", reason=f"version {version}")
    protocol_type = reader.string()
    generation = reader.number(">i")
    protocol, leader = reader.nullable_string(), reader.nullable_string()
    state_ms = reader.number(">q")
    members = tuple(_member(reader, version) for _ in range(reader.number(">i")))
    record = GroupRecord(
        generation=generation,
        protocol_type=protocol_type or None,
        protocol=protocol,
        leader=leader,
        members=members,
    )
    return record, state_ms


def _member(reader: _Reader, version: int) -> MemberRecord:
    return MemberRecord(
        member_id=reader.string(),
        instance_id=reader.nullable_string() if version >= _GROUP_VALUE else None,
        client_id=reader.string(),
        client_host=reader.string(),
        rebalance_timeout_ms=reader.number(">i"),
        session_timeout_ms=reader.number(">i"),
        subscription=reader.octets(),
        assignment=reader.octets(),
    )


def subscribed_topics(subscription: bytes) -> list[str]:
    """Returns the topics that a consumer group's member subscribes to. Raises `CorruptRecord`.

    Source: `ConsumerProtocolSubscription.json`; all versions start the same way.
    """
    reader = _Reader(subscription)
    reader.number(">h")
    return [reader.string() for _ in range(reader.number(">i"))]


def assigned_partitions(assignment: bytes) -> Iterator[tuple[str, int]]:
    """Yields the topics and partitions assigned to a member of a consumer group.

    An empty assignment has none. Source: `ConsumerProtocolAssignment.json`; all versions start the
    same way. Raises `CorruptRecord`.
    """
    if not assignment:
        return
    reader = _Reader(assignment)
    reader.number(">h")
    for _ in range(reader.number(">i")):
        topic = reader.string()
        for _ in range(reader.number(">i")):
            yield topic, reader.number(">i")


# ------------------------------------------------------------------------------ for display


def committed(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Returns the committed offsets as `COMMITTED_SCHEMA`, sorted by group, topic, partition.

    Args:
        rows: columns `key` and `value` (binary) of `__consumer_offsets`, and `partition` and
            `offset`, which determine the last record of each key; in any order, all or some.

    Raises:
        CorruptRecord: a record does not follow Kafka's format.
    """
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    found: list[tuple[str, str, int, CommittedOffset]] = []
    for data, value in last_of_each_key(table):
        key = decode_key(data)
        if isinstance(key, OffsetKey) and value is not None:
            found.append((key.group, key.topic, key.partition, decode_offset(value)))
    found.sort(key=lambda each: each[:3])
    values = [each[3] for each in found]
    columns: list[list[object]] = [
        [each[0] for each in found],
        [each[1] for each in found],
        [each[2] for each in found],
        [each.offset for each in values],
        [each.leader_epoch for each in values],
        [each.metadata for each in values],
        [each.commit_ms for each in values],
        [each.topic_id for each in values],
    ]
    arrays = [
        pa.array(column, field.type)
        for column, field in zip(columns, COMMITTED_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=COMMITTED_SCHEMA)


def last_of_each_key(table: pa.Table) -> Iterator[tuple[bytes, bytes | None]]:
    """Yields (key, value) of each key's last record; needs key, value, partition and offset."""
    ordered = table.sort_by([("partition", "ascending"), ("offset", "ascending")])
    rows = ordered.append_column("row", arrow.numbers(np.arange(ordered.num_rows), pa.int64()))
    last = rows.group_by(["partition", "key"], use_threads=False).aggregate([("row", "max")])
    chosen = ordered.select(["key", "value"]).take(last.column("row_max"))
    yield from zip(
        chosen.column("key").to_pylist(), chosen.column("value").to_pylist(), strict=True
    )


# ------------------------------------------------------------------------------ bytes


def _int16(value: int) -> bytes:
    return struct.pack(">h", value)


def _int32(value: int) -> bytes:
    return struct.pack(">i", value)


def _string(value: str | None) -> bytes:
    if value is None:
        return _int16(-1)
    data = value.encode()
    return _int16(len(data)) + data


def varint(value: int) -> bytes:
    """Encodes a non-negative number with seven bits per byte, lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def nullable_string(self) -> str | None:
        size = self.number(">h")
        return None if size < 0 else self._text(size)

    def string(self) -> str:
        return self.nullable_string() or ""

    def compact_string(self) -> str:
        return self._text(self._varint() - 1)

    def octets(self) -> bytes:
        return self._take(self.number(">i"))

    def tags(self) -> Iterable[tuple[int, bytes]]:
        for _ in range(self._varint()):
            yield self._varint(), self._take(self._varint())

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            octet = self._take(1)[0]
            value |= (octet & 0x7F) << shift
            if octet < 0x80:
                return value
        raise errors.CorruptRecord(what="a number", reason="more than five bytes")

    def _text(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise errors.CorruptRecord(what="a name", reason=str(error)) from error

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if size < 0 or len(data) < size:
            raise errors.CorruptRecord(
                what="a record of groups", reason=f"{size} bytes wanted at {self._at}"
            )
        self._at += size
        return data
