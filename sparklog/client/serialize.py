"""From values to the bytes of a record and back. None is a null key or a tombstone: never passed.

Any function from a value to bytes is a serializer, any from bytes to a value a deserializer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


def json_serializer(value: Any) -> bytes:
    """UTF-8 JSON; besides JSON's own types also datetimes, UUIDs, dataclasses and the like."""
    return msgspec.json.encode(value)


def json_deserializer(data: bytes) -> Any:
    """JSON's own types. Raises `msgspec.DecodeError` where it is no JSON."""
    return msgspec.json.decode(data)


def string_serializer(value: str) -> bytes:
    """UTF-8."""
    return value.encode()


def string_deserializer(data: bytes) -> str:
    """Raises `UnicodeDecodeError` where it is no UTF-8."""
    return data.decode()
