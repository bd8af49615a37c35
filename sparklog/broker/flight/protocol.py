"""Arrow Flight's messages as bytes: the few protobuf fields that the Flight listener needs; pure.

The fields are those of Flight.proto. A batch is Arrow's encapsulated message (Columnar Format,
"Serialization and Interprocess Communication") in two fields, metadata and body. Their declared
sizes are checked before Arrow reads them, so no function uses more memory than the message does.
Functions raise `BadRequest` for malformed bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from sparklog import errors

Bytes: TypeAlias = bytes | memoryview

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BODY: Final = 1000
_DESCRIPTOR, _METADATA, _APP_METADATA = 1, 2, 3
_COMMAND: Final = 2
_EMPTY: Final = memoryview(b"")
_CONTINUATION: Final = struct.pack("<I", 0xFFFFFFFF)
MAX_METADATA_BYTES: Final = 1 << 20
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
"""Types of Arrow messages, as in Message.fbs."""


class FlightData(NamedTuple):
    """One message of a stream of batches."""

    command: bytes | None = None
    """The command of the descriptor; empty for any other descriptor, None without one."""
    metadata: bytes | None = None
    """Arrow's metadata, a flatbuffer."""
    app_metadata: bytes | None = None
    body: memoryview = _EMPTY
    body_at: int = 0
    """The position of the body in the message."""


# ------------------------------------------------------------------------------ protobuf


def _fields(data: Bytes) -> Iterator[tuple[int, Bytes | int, int]]:
    """Yields (number, value, position) of each field. Varints are integers; fixed-size fields
    are left out."""
    at, end = 0, len(data)
    try:
        while at < end:
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _LENGTH:
                size, at = _varint(data, at)
                if size > end - at:
                    raise errors.BadRequest(reason="a message ends within a field")
                yield tag >> 3, data[at : at + size], at
                at += size
            elif kind == _VARINT:
                value, at = _varint(data, at)
                yield tag >> 3, value, at
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise errors.BadRequest(reason=f"a field of unknown type {kind}")
    except IndexError as error:
        raise errors.BadRequest(reason="a message ends within a field") from error


def field(data: Bytes, number: int) -> Bytes:
    """Returns the last value of a bytes field; empty if the field is absent."""
    last: Bytes = b""
    for each, value, _ in _fields(data):
        if each == number and not isinstance(value, int):
            last = value
    return last


def read_flight_data(data: memoryview) -> FlightData:
    """Parses a message of a stream. All fields but the body are copied. Raises `BadRequest`."""
    command: bytes | None = None
    metadata: bytes | None = None
    app_metadata: bytes | None = None
    body, body_at = _EMPTY, 0
    for number, value, at in _fields(data):
        if isinstance(value, int):
            continue
        if number == _BODY:
            body, body_at = memoryview(value), at
            continue
        if number > _APP_METADATA:
            continue
        if len(value) > MAX_METADATA_BYTES:
            raise errors.BadRequest(reason="the metadata is larger than 1 MiB")
        if number == _METADATA:
            metadata = bytes(value)
        elif number == _APP_METADATA:
            app_metadata = bytes(value)
        elif number == _DESCRIPTOR:
            command = bytes(field(value, _COMMAND))
    return FlightData(command, metadata, app_metadata, body, body_at)


def body_at(data: Bytes) -> int:
    """Returns the position of the body in a message that begins with `data`; 0 if unknown."""
    at, end = 0, len(data)
    try:
        while at < end:
            tag, at = _varint(data, at)
            if tag & 7 != _LENGTH:
                return 0
            size, at = _varint(data, at)
            if tag >> 3 == _BODY:
                return at
            at += size
    except (IndexError, errors.BadRequest):
        return 0
    return 0


def _varint(data: Bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise errors.BadRequest(reason="a number of more than 64 bits")


def _number(value: int) -> bytes:
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _field_head(number: int, size_bytes: int) -> bytes:
    """Returns the tag and the length that precede the value of a bytes field."""
    return _number(number << 3 | _LENGTH) + _number(size_bytes)


def bytes_field(number: int, value: bytes) -> bytes:
    """Encodes a bytes field, or a string field in UTF-8."""
    return _field_head(number, len(value)) + value


# ------------------------------------------------------------------------------ Arrow


def encapsulated(message: FlightData) -> pa.Buffer:
    """Returns a copy of the message as Arrow's encapsulated message in one buffer."""
    prefix = _message_prefix(message.metadata or b"")
    return pa.py_buffer(b"".join((prefix, message.body)))


def in_place(buffer: memoryview, start: int, message: FlightData) -> pa.Buffer:
    """Returns Arrow's encapsulated message without copying its body.

    Overwrites the bytes of `buffer` before the body. `start` is the message's position in it.
    """
    prefix = _message_prefix(message.metadata or b"")
    at = start + message.body_at - len(prefix)
    if not message.body_at or at < 0:
        return encapsulated(message)
    buffer[at : at + len(prefix)] = prefix
    return pa.py_buffer(buffer[at : start + message.body_at + len(message.body)])


def _message_prefix(metadata: bytes) -> bytes:
    """Returns the bytes before the body: marker, length, and the metadata with its padding."""
    padding = -len(metadata) % 8
    return _CONTINUATION + struct.pack("<I", len(metadata) + padding) + metadata + bytes(padding)


def message_type(metadata: Bytes) -> int:
    """Returns the type of a message, such as `RECORD_BATCH`. Raises `BadRequest` for a compressed
    batch."""
    try:
        table = _table(metadata, 0)
        kind_at = _field(metadata, table, 1)
        kind = metadata[kind_at] if kind_at else 0
        if kind in (DICTIONARY_BATCH, RECORD_BATCH):
            header = _table(metadata, _field(metadata, table, 2))
            if kind == DICTIONARY_BATCH:
                header = _table(metadata, _field(metadata, header, 1))
            if _field(metadata, header, 3):
                raise errors.BadRequest(
                    reason="a batch is compressed; send Arrow batches without compression"
                )
    except (struct.error, IndexError) as error:
        raise errors.BadRequest(reason="not the metadata of an Arrow message") from error
    return kind


def _table(data: Bytes, at: int) -> int:
    position: int = at + struct.unpack_from("<I", data, at)[0]
    return position


def _field(data: Bytes, table: int, number: int) -> int:
    """Returns the position of a field in a flatbuffer's table; 0 if the field is absent."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if vtable < 0:
        raise IndexError
    (size,) = struct.unpack_from("<H", data, vtable)
    at = 4 + 2 * number
    if at >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + at)
    return table + offset if offset else 0


def write_flight_data(message: pa.Buffer, app_metadata: bytes = b"") -> list[Bytes]:
    """Encodes an encapsulated Arrow message as a `FlightData`, in consecutive parts."""
    view = memoryview(message).cast("B")
    (size,) = struct.unpack_from("<I", view, 4)
    body = view[8 + size :]
    start = _field_head(2, size) + bytes(view[8 : 8 + size])
    if app_metadata:
        start += bytes_field(3, app_metadata)
    return [start + _field_head(_BODY, len(body)), body]
