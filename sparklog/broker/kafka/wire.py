"""Parts of Kafka's responses that are written without kio; pure.

Source: https://kafka.apache.org/protocol, "Protocol Primitive Types".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

NO_ID: Final = bytes(16)
"""The id of a topic without one."""
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_SHORT: Final = 0x80
_TWO_BYTES: Final = 1 << 14


def count(number: int, *, is_flexible: bool) -> bytes:
    """Encodes the length of an array or of bytes; -1 stands for null."""
    return varint(number + 1) if is_flexible else _INT32.pack(number)


def topic_head(topic: Mapping[str, Any], name: str, *, has_id: bool, is_flexible: bool) -> bytes:
    """Encodes the identity of a topic: its `topic_id`, or the string in the field `name`."""
    if has_id:
        topic_id = topic["topic_id"]
        return NO_ID if topic_id is None else bytes(topic_id.bytes)
    text = topic[name].encode()
    return (varint(len(text) + 1) if is_flexible else _INT16.pack(len(text))) + bytes(text)


def text(value: str) -> bytes:
    """Encodes a string for a flexible version."""
    data = value.encode()
    return varint(len(data) + 1) + data


def varint(value: int) -> bytes:
    """Encodes an unsigned integer in seven bits per byte."""
    if value < _SHORT:
        return bytes((value,))
    if value < _TWO_BYTES:
        return bytes((value & 0x7F | 0x80, value >> 7))
    found = bytearray()
    while value >= _SHORT:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
