"""Serializers and deserializers: functions from values to the bytes of a record, and back.

Any such function will do. They are not called for None, a null key or a tombstone. The exception
of a deserializer is the cause of the consumer's `DeserializationFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


def json_serializer(value: Any) -> bytes:
    """Returns JSON in UTF-8; also for datetimes, UUIDs, dataclasses and others of msgspec."""
    return msgspec.json.encode(value)


def json_deserializer(data: bytes) -> Any:
    """Returns a value of JSON's types. Raises `msgspec.DecodeError` if the bytes are not JSON."""
    return msgspec.json.decode(data)


def string_serializer(value: str) -> bytes:
    """Returns the text in UTF-8."""
    return value.encode()


def string_deserializer(data: bytes) -> str:
    """Returns the text of UTF-8 bytes. Raises `UnicodeDecodeError` for others."""
    return data.decode()
