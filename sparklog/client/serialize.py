"""Serializers and deserializers: functions from values to the bytes of a record, and back.

Any such function works. They are not called for None: null keys and tombstones. A deserializer's
exception becomes the cause of the consumer's `DeserializationFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


def json_serializer(value: Any) -> bytes:
    """Returns JSON in UTF-8; supports all of msgspec's types, such as datetimes and dataclasses."""
    return msgspec.json.encode(value)


def json_deserializer(data: bytes) -> Any:
    """Returns the decoded JSON value. Raises `msgspec.DecodeError` if the bytes are not JSON."""
    return msgspec.json.decode(data)


def string_serializer(value: str) -> bytes:
    """Returns the string in UTF-8."""
    return value.encode()


def string_deserializer(data: bytes) -> str:
    """Returns the decoded string. Raises `UnicodeDecodeError` if the bytes are not UTF-8."""
    return data.decode()
