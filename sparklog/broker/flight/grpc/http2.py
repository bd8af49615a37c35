"""HTTP/2 for a gRPC server, as bytes: frames, headers and codes (RFC 9113, RFC 7541); pure.

Request headers are decoded by `hpack`. Responses have few headers, which are encoded without a
dynamic table, so that calls can send them in any order.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
FRAME_BYTES: Final = 16_384
"""The largest frame that a peer accepts by default."""
WINDOW_BYTES: Final = 65_535
"""The default initial window of a stream and of a connection."""
MAX_WINDOW: Final = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = 0, 1, 2, 3, 4, 5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
"""Frame types."""

END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
"""Frame flags."""

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
"""Settings."""

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0, 1, 2, 3, 5
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11
INADEQUATE_SECURITY: Final = 12
"""Error codes."""

_HEADER: Final = struct.Struct(">IBI")
"""Length and type, flags, stream."""
_OK: Final = b"\x88"
"""`:status: 200`, entry 8 of the static table."""
_STATUS: Final = b"\x08\x03"
"""`:status`, with its name from the static table and a value of three bytes."""
NO_TABLE: Final = b"\x20"
"""Begins a header block that sets the size of the dynamic table to 0."""
TABLE_BYTES: Final = 4_096
"""The default size of a dynamic table."""

_OF_CONNECTIONS: Final = frozenset((SETTINGS, PING, GOAWAY))
_OF_STREAMS: Final = frozenset((HEADERS, PRIORITY, RST_STREAM, CONTINUATION))
_SIZES: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_GOAWAY_BYTES: Final = 8

_NAME: Final = re.compile(rb":?[\x21-\x39\x3b-\x40\x5b-\x7e]+").fullmatch
_VALUE: Final = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])").fullmatch
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_NEEDED: Final = (b":method", b":scheme", b":path")
_SHOWN_BYTES: Final = 40
_LENGTH_DIGITS: Final = 18
_OF_HTTP1: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class ProtocolError(Exception):
    """The peer violated the protocol: its connection ends with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamError(Exception):
    """The peer violated the protocol on one stream, which ends with `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def header(kind: int, flags: int, stream: int, size_bytes: int) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(size_bytes << 8 | kind, flags, stream)


def read_header(data: bytes | memoryview, at: int) -> tuple[int, int, int, int]:
    """Returns (payload size, type, flags, stream) of the frame at `at`."""
    first, flags, stream = _HEADER.unpack_from(data, at)
    return first >> 8, first & 0xFF, flags, stream & MAX_WINDOW


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A whole frame."""
    return header(kind, flags, stream, len(payload)) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame with these (name, value) pairs."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in values))


def read_settings(payload: bytes | memoryview) -> list[tuple[int, int]]:
    """Returns the (name, value) pairs of a client's SETTINGS frame. Raises `ProtocolError`."""
    values: list[tuple[int, int]] = [*struct.iter_unpack(">HI", payload)]
    for name, value in values:
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ProtocolError(FLOW_CONTROL_ERROR, "a window too large")
        if name == MAX_FRAME_SIZE and not FRAME_BYTES <= value < 1 << 24:
            raise ProtocolError(PROTOCOL_ERROR, "not a valid frame size")
        if name == ENABLE_PUSH and value > 1:
            raise ProtocolError(PROTOCOL_ERROR, "push is 0 or 1")
    return values


def window_update(stream: int, size_bytes: int) -> bytes:
    """A frame that allows more bytes on a stream; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size_bytes))


def reset(stream: int, code: int) -> bytes:
    """A frame that ends a stream in both directions."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def goaway(last_stream: int, code: int, reason: str = "") -> bytes:
    """A frame that announces the connection's end; `last_stream` is the last one processed."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + reason.encode())


def check_frame(kind: int, flags: int, stream: int, size_bytes: int) -> None:
    """Raises `ProtocolError` for a frame, other than DATA, that a client must not send.

    A PRIORITY frame of the wrong size ends the connection, although it need only end its stream
    (RFC 9113, 5.4.1).
    """
    if kind == PUSH_PROMISE:
        raise ProtocolError(PROTOCOL_ERROR, "a client cannot push")
    if stream and kind in _OF_CONNECTIONS:
        raise ProtocolError(PROTOCOL_ERROR, f"a frame of type {kind} must not have a stream")
    if not stream and kind in _OF_STREAMS:
        raise ProtocolError(PROTOCOL_ERROR, f"a frame of type {kind} needs a stream")
    is_sized = size_bytes == _SIZES.get(kind, size_bytes)
    if kind == SETTINGS:
        is_sized = not (size_bytes % 6 or (flags & ACK and size_bytes))
    elif kind == GOAWAY:
        is_sized = size_bytes >= _GOAWAY_BYTES
    if not is_sized:
        reason = f"a frame of type {kind} cannot be {size_bytes} bytes long"
        raise ProtocolError(FRAME_SIZE_ERROR, reason)


def request_headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the headers of a request by name; the last one of those with the same name.

    Raises `StreamError` if they are malformed (RFC 9113, 8.2 and 8.3).
    """
    headers = _checked(pairs, _PSEUDO)
    needed = (b":method",) if headers.get(b":method") == b"CONNECT" else _NEEDED
    if missing := [name.decode() for name in needed if not headers.get(name)]:
        raise StreamError(PROTOCOL_ERROR, f"a request without {missing[0]}")
    return headers


def check_trailers(pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises `StreamError` for malformed trailers of a request (RFC 9113, 8.1)."""
    _checked(pairs, frozenset())


def _checked(pairs: Iterable[tuple[bytes, bytes]], pseudo: frozenset[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    has_regular = False
    for name, value in pairs:
        if not _NAME(name) or not _VALUE(value):
            raise StreamError(
                PROTOCOL_ERROR, f"header {name[:_SHOWN_BYTES]!r} has invalid characters"
            )
        if name[:1] == b":":
            if name not in pseudo or name in headers or has_regular:
                raise StreamError(
                    PROTOCOL_ERROR, f"header {name[:_SHOWN_BYTES]!r} is not allowed here"
                )
        else:
            has_regular = True
            if name in _OF_HTTP1 or (name == b"te" and value != b"trailers"):
                raise StreamError(PROTOCOL_ERROR, f"header {name!r} belongs to HTTP/1.1")
        headers[name] = value
    return headers


def content_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Returns the content-length of a request; None if it has none. Raises `StreamError`."""
    text = headers.get(b"content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > _LENGTH_DIGITS:
        raise StreamError(PROTOCOL_ERROR, "content-length is not a number")
    return int(text)


def unpadded(payload: bytes | memoryview, flags: int) -> bytes | memoryview:
    """Returns the payload of a HEADERS frame without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise ProtocolError(FRAME_SIZE_ERROR, "a padded frame without its padding's length")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise ProtocolError(PROTOCOL_ERROR, "padding that is longer than its frame")
    return payload[start:end]


def head_block(
    headers: Iterable[tuple[str, bytes]], *, with_status: bool, status: int = 200
) -> bytes:
    """Returns a header block of a response, with an HTTP status for the first block of a stream.

    The value of a name that ends in `-bin` is encoded in base64, as gRPC requires.
    """
    block = bytearray()
    if with_status:
        block += _OK if status == 200 else _STATUS + str(status).encode()
    for name, value in headers:
        if name.endswith("-bin"):
            value = base64.b64encode(value).rstrip(b"=")
        block.append(0)
        for text in (name.encode(), value):
            block += _length(len(text))
            block += text
    return bytes(block)


def _length(size: int) -> bytes:
    """Encodes an HPACK integer with a 7-bit prefix. The bit before it, 0, means no Huffman code."""
    if size < 0x7F:
        return bytes((size,))
    octets = bytearray((0x7F,))
    size -= 0x7F
    while size >= 0x80:
        octets.append(size & 0x7F | 0x80)
        size >>= 7
    octets.append(size)
    return bytes(octets)


_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])").fullmatch
_SECONDS: Final = {b"H": 3_600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def timeout_seconds(text: bytes) -> float:
    """Parses a `grpc-timeout`: up to eight digits and a unit. Raises ValueError."""
    match = _TIMEOUT(text)
    if match is None:
        raise ValueError(f"malformed grpc-timeout: {text[:_SHOWN_BYTES]!r}")
    return int(match[1]) * _SECONDS[match[2]]


def percent_encoded(text: str) -> bytes:
    """Encodes a `grpc-message`: bytes other than printable ASCII, and "%", become %XX."""
    return "".join(
        chr(each) if 0x20 <= each <= 0x7E and each != 0x25 else f"%{each:02X}"
        for each in text.encode(errors="replace")
    ).encode()
