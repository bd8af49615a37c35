"""Small Fetch requests, and responses of any size, read and written without kio; pure.

A consumer at the end of its log sends one Fetch for each batch that arrives, so hundreds of
consumers send thousands of requests per second. kio would take four fifths of the time of such a
request and its response, and a tenth of a millisecond per partition of a large response. So this
module reads and writes their fields itself. `read` returns None for a request that is not small and
plain; kio then reads it, and rejects it if it is malformed.
Source: https://kafka.apache.org/protocol, "Fetch API (Key: 1)", versions 4 to 18.
"""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from sparklog.broker.kafka import wire
from sparklog.broker.kafka.times import to_ms
from sparklog.limits import KAFKA_LITTLE_ITEMS

Raw: TypeAlias = bytes | bytearray | memoryview
FETCH: Final = 1
_FIRST, _LAST = 4, 18
_WITH_LOG_STARTS: Final = 5
_WITH_LEADER_EPOCHS: Final = 9
_FLEXIBLE: Final = 12
"""The first version with compact lengths and tagged fields."""
_WITH_SESSIONS: Final = 7
_WITH_TOPIC_IDS: Final = 13
_WITHOUT_REPLICA: Final = 15
_WITH_RACKS: Final = 11
_WITH_LEADERS: Final = 16
"""The first version that names the leaders of partitions that have moved (KIP-951)."""
_LONGEST_BYTES: Final = 4_096
_SHORT_VARINT: Final = 0x80
"""Lengths from here on take more than one byte."""
_CLIENT_AT: Final = 8
"""The position of the client id in a request, after API key, version and correlation id."""
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_SESSION: Final = struct.Struct(">hi")
"""Error code and session id."""
_CURRENT_LEADER: Final = b"\1\1\x09"
"""One tagged field of a partition: its tag and its length."""
_LEADER: Final = struct.Struct(">iix")
"""Leader id, leader epoch, no tags."""
_LENGTH_BYTES: Final = 4
_JOINED_BYTES: Final = 4_096
"""Smaller chunks of records are copied: cheaper than another buffer in the system call."""


class FetchPartition(NamedTuple):
    """A partition of a request, with the fields of kio's message that are used."""

    partition: int
    current_leader_epoch: int
    fetch_offset: int
    partition_max_bytes: int


class TopicByName(NamedTuple):
    topic: str
    partitions: Sequence[FetchPartition]


class TopicById(NamedTuple):
    topic_id: uuid.UUID | None
    partitions: Sequence[FetchPartition]


class FetchBody(NamedTuple):
    """A request, with the fields of kio's message that are used."""

    max_wait: dt.timedelta
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: Sequence[TopicByName | TopicById]
    items: int
    """The number of items in its arrays."""
    client_id: str
    forgotten_topics_data: Sequence[Any] = ()


class _Layout(NamedTuple):
    """The fixed parts of one version."""

    head: struct.Struct
    partition: struct.Struct
    answer: struct.Struct
    """A partition of the response, up to the number of aborted transactions."""


def _layout(version: int) -> _Layout:
    head = ">" + ("" if version >= _WITHOUT_REPLICA else "4x") + "iiib"
    head += "ii" if version >= _WITH_SESSIONS else ""
    partition = (
        ">i"
        + ("i" if version >= _WITH_LEADER_EPOCHS else "")
        + "q"
        + ("4x" if version >= _FLEXIBLE else "")
    )
    partition += ("8x" if version >= _WITH_LOG_STARTS else "") + "i"
    answer = ">ihqq" + ("q" if version >= _WITH_LOG_STARTS else "")
    return _Layout(struct.Struct(head), struct.Struct(partition), struct.Struct(answer))


_LAYOUTS: Final = {version: _layout(version) for version in range(_FIRST, _LAST + 1)}


# ------------------------------------------------------------------------------ requests


def read(frame: bytes, version: int) -> FetchBody | None:
    """Returns a request of this version with at most `KAFKA_LITTLE_ITEMS` items.

    Returns None if it has more, has tagged fields or forgotten topics, or is malformed.
    """
    layout = _LAYOUTS.get(version)
    if layout is None or len(frame) > _LONGEST_BYTES:
        return None
    try:
        return _read(frame, version, layout)
    except (struct.error, IndexError, ValueError):
        return None


def _read(frame: bytes, version: int, layout: _Layout) -> FetchBody:
    """Raises ValueError, IndexError or `struct.error` for a request that kio has to read."""
    is_flexible = version >= _FLEXIBLE
    (size,) = _INT16.unpack_from(frame, _CLIENT_AT)
    at = _CLIENT_AT + 2 + max(size, 0)
    client_id = _text(frame, _CLIENT_AT + 2, at)
    if is_flexible:
        _check_no_tags(frame, at)
        at += 1
    head = layout.head.unpack_from(frame, at)
    at += layout.head.size
    session_id, session_epoch = head[4:6] if version >= _WITH_SESSIONS else (0, -1)
    topics: list[TopicByName | TopicById] = []
    count, at = _count(frame, at, KAFKA_LITTLE_ITEMS, is_flexible=is_flexible)
    left = KAFKA_LITTLE_ITEMS - count
    for _ in range(count):
        topic, at = _read_topic(frame, at, version, layout, left)
        left -= len(topic.partitions)
        topics.append(topic)
    if version >= _WITH_SESSIONS:
        _, at = _count(frame, at, 0, is_flexible=is_flexible)  # forgotten topics
    if version >= _WITH_RACKS:
        start, at = _bounds(frame, at, is_flexible=is_flexible)
        _text(frame, start, at)
    if is_flexible:
        _check_no_tags(frame, at)
    return FetchBody(
        max_wait=dt.timedelta(milliseconds=head[0]),
        min_bytes=head[1],
        max_bytes=head[2],
        isolation_level=head[3],
        session_id=session_id,
        session_epoch=session_epoch,
        topics=topics,
        items=KAFKA_LITTLE_ITEMS - left,
        client_id=client_id,
    )


def _read_topic(
    frame: bytes, at: int, version: int, layout: _Layout, most: int
) -> tuple[TopicByName | TopicById, int]:
    """Returns a topic with at most `most` partitions, and the position after it."""
    is_flexible = version >= _FLEXIBLE
    name, topic_id = "", None
    if version >= _WITH_TOPIC_IDS:
        octets = frame[at : at + len(wire.NO_ID)]
        at += len(wire.NO_ID)
        topic_id = uuid.UUID(bytes=octets) if octets != wire.NO_ID else None
    else:
        start, at = _bounds(frame, at, is_flexible=is_flexible)
        name = _text(frame, start, at)
    partitions = []
    count, at = _count(frame, at, most, is_flexible=is_flexible)
    for _ in range(count):
        fields = layout.partition.unpack_from(frame, at)
        at += layout.partition.size
        if is_flexible:
            _check_no_tags(frame, at)
            at += 1
        if version >= _WITH_LEADER_EPOCHS:
            partitions.append(FetchPartition(*fields))
        else:
            partitions.append(FetchPartition(fields[0], -1, fields[1], fields[2]))
    if is_flexible:
        _check_no_tags(frame, at)
        at += 1
    if version >= _WITH_TOPIC_IDS:
        return TopicById(topic_id, partitions), at
    return TopicByName(name, partitions), at


def _check_no_tags(frame: bytes, at: int) -> None:
    """Raises ValueError if there are tagged fields."""
    if frame[at]:
        raise ValueError("tagged fields")


def _count(frame: bytes, at: int, most: int, *, is_flexible: bool) -> tuple[int, int]:
    """Returns the length of an array, and the position after it.

    Raises ValueError for null, and for more than `most` items.
    """
    if is_flexible:
        count = frame[at] - 1
        at += 1
    else:
        (count,) = _INT32.unpack_from(frame, at)
        at += _INT32.size
    if not 0 <= count <= most:
        raise ValueError("not a small array")
    return count, at


def _bounds(frame: bytes, at: int, *, is_flexible: bool) -> tuple[int, int]:
    """Returns the start and end of a string. Raises ValueError for null and for a long string."""
    if is_flexible:
        size = frame[at]
        at += 1
        if size >= _SHORT_VARINT:
            size = (size & 0x7F) | frame[at] << 7
            if frame[at] >= _SHORT_VARINT:
                raise ValueError("a long string")
            at += 1
        size -= 1
    else:
        (size,) = _INT16.unpack_from(frame, at)
        at += _INT16.size
    if size < 0:
        raise ValueError("a null string")
    return at, at + size


def _text(frame: bytes, start: int, end: int) -> str:
    """Returns a string. Raises ValueError if it is cut off, or not UTF-8."""
    if end > len(frame):
        raise ValueError("the string is cut off")
    return frame[start:end].decode()


# ------------------------------------------------------------------------------ responses


def write(version: int, correlation_id: int, fields: Mapping[str, Any]) -> list[Raw]:
    """Returns a response's frame, prefixed with its length, in chunks. Copies no large chunk.

    Args:
        fields: the response's fields, as for `messages.write_reply`.
    """
    writer = Writer(version, correlation_id, fields)
    for _ in writer:
        pass
    return writer.finish()


def _leader(partition: Mapping[str, Any]) -> bytes:
    """Returns the tagged fields of a partition: its leader, if that is a different broker."""
    leader = partition.get("current_leader")
    if leader is None:
        return b"\0"
    return _CURRENT_LEADER + _LEADER.pack(leader["leader_id"], leader["leader_epoch"])


def _endpoints(nodes: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the tagged fields of a response: the addresses of leaders."""
    array = wire.varint(len(nodes) + 1) + b"".join(
        _INT32.pack(each["node_id"])
        + wire.text(each["host"])
        + _INT32.pack(each["port"])
        + (b"\0" if each["rack"] is None else wire.text(each["rack"]))
        + b"\0"
        for each in nodes
    )
    return b"\1\0" + wire.varint(len(array)) + array


class Writer:
    """Writes a response in steps: iterating writes it, after which `finish` returns the frame."""

    def __init__(self, version: int, correlation_id: int, fields: Mapping[str, Any]) -> None:
        """`fields`: the response's fields, as for `messages.write_reply`."""
        self._version = version
        self._layout = _LAYOUTS[version]
        self._is_flexible = version >= _FLEXIBLE
        self._fields = fields
        self._first = self._gathered = bytearray(_LENGTH_BYTES) + _INT32.pack(correlation_id)
        self._chunks: list[Raw] = [self._first]
        self._gathered_before_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Bytes written so far, not counting large chunks."""
        return self._gathered_before_bytes + len(self._gathered)

    def __iter__(self) -> Iterator[None]:
        version, is_flexible, fields = self._version, self._is_flexible, self._fields
        if is_flexible:
            self._gathered += b"\0"  # no tags
        self._gathered += _INT32.pack(to_ms(fields["throttle_time"]))
        if version >= _WITH_SESSIONS:
            self._gathered += _SESSION.pack(fields["error_code"], fields["session_id"])
        responses = fields["responses"]
        self._gathered += wire.count(len(responses), is_flexible=is_flexible)
        has_id = version >= _WITH_TOPIC_IDS
        for topic in responses:
            head = wire.topic_head(topic, "topic", has_id=has_id, is_flexible=is_flexible)
            self._gathered += head + wire.count(len(topic["partitions"]), is_flexible=is_flexible)
            for each in topic["partitions"]:
                self._write_partition(each)
                yield
            if is_flexible:
                self._gathered += b"\0"
        if is_flexible:
            nodes = fields.get("node_endpoints") if version >= _WITH_LEADERS else ()
            self._gathered += _endpoints(nodes) if nodes else b"\0"

    def _write_partition(self, each: Mapping[str, Any]) -> None:
        version, is_flexible = self._version, self._is_flexible
        numbers = [each["partition_index"], each["error_code"], each["high_watermark"]]
        numbers.append(each["last_stable_offset"])
        if version >= _WITH_LOG_STARTS:
            numbers.append(each["log_start_offset"])
        self._gathered += self._layout.answer.pack(*numbers)
        aborted = each["aborted_transactions"]
        assert not aborted, "there are no transactions"
        self._gathered += wire.count(-1 if aborted is None else 0, is_flexible=is_flexible)
        if version >= _WITH_RACKS:
            self._gathered += b"\xff\xff\xff\xff"  # no preferred read replica
        records = each["records"]
        self._gathered += wire.count(len(records), is_flexible=is_flexible)
        for chunk in records.chunks:
            if len(chunk) < _JOINED_BYTES:
                self._gathered += chunk
            else:
                self._gathered_before_bytes += len(self._gathered)
                self._gathered = bytearray()
                self._chunks += chunk, self._gathered
        if is_flexible:
            self._gathered += _leader(each) if version >= _WITH_LEADERS else b"\0"

    def finish(self) -> list[Raw]:
        """Returns the frame, prefixed with its length, in chunks. Copies no large chunk."""
        self._first[:_LENGTH_BYTES] = _INT32.pack(sum(map(len, self._chunks)) - _LENGTH_BYTES)
        return self._chunks
