"""Frames of Kafka's protocol to messages and back; pure.

kio knows every message in every version. A reply is given as plain mappings and sequences by field
name, and takes the shape of the version that was asked for: a field which that version has not is
left out.
Source: https://kafka.apache.org/protocol
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from sparklog import errors
from sparklog.broker.kafka import lengths

Fields: TypeAlias = Mapping[str, Any]
Raw: TypeAlias = bytes | bytearray | memoryview

_START: Final = struct.Struct(">hhi")
"""Of every request: API key, its version, correlation id."""
LENGTH_BYTES: Final = 4
"""A frame begins with its length, as so many bytes."""
_LARGE_BYTES: Final = 4_096
"""From this size on a copy costs more than one more piece for the socket."""
API_VERSIONS: Final = 18
UNSUPPORTED_VERSION: Final = ErrorCode.unsupported_version
"""Said to ApiVersions in version 0, so that the client asks again in one that we read (KIP-511)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it came. `body` is kio's message of that version."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str
    client_host: str
    """As Kafka shows it, `/127.0.0.1`; empty where nobody knows."""
    body: Any
    reserve: Callable[[int], Awaitable[None]]
    """Waits for room for a reply of so many bytes, before it is made."""


def read_start(frame: bytes) -> tuple[int, int, int]:
    """(API key, version, correlation id), which every frame begins with. Raises `BadRequest`."""
    if len(frame) < _START.size:
        raise errors.BadRequest(reason=f"a request of {len(frame)} bytes")
    found: tuple[int, int, int] = _START.unpack_from(frame)
    return found


async def _reserve_nothing(_: int) -> None:
    """For requests that did not come over a connection."""


def read_request(
    frame: bytes,
    client_host: str = "",
    reserve: Callable[[int], Awaitable[None]] = _reserve_nothing,
) -> Request:
    """Raises `BadRequest` for bytes that are no such message."""
    api_key, version, correlation_id = read_start(frame)
    schema: Any = _request_schema(api_key, version)
    frame = lengths.checked(frame, schema.__header_schema__, schema)
    try:
        header, at = _reader(schema.__header_schema__)(frame, 0)
        body, _ = _reader(schema)(frame, at)  # librdkafka may send some bytes more
    except Exception as error:  # whatever kio's native decoder makes of bytes that make no sense
        reason = f"not a request {schema.__name__} of version {version}: {error!r}"
        raise errors.BadRequest(reason=reason) from error
    return Request(
        api_key=api_key,
        version=version,
        correlation_id=correlation_id,
        client_id=getattr(header, "client_id", None) or "",
        client_host=client_host,
        body=body,
        reserve=reserve,
    )


class Pieces:
    """A field's bytes in pieces that follow one another, for `write_reply` to hand on as they are.

    Records of a megabyte that were copied once for each layer would cost more than all else.
    """

    __slots__ = ("_size", "pieces")

    def __init__(self, pieces: Sequence[Raw]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size


class _Frame:
    """What kio writes to: small writes are gathered, large pieces stay what they are."""

    def __init__(self) -> None:
        self._first = self._gathered = bytearray(LENGTH_BYTES)
        self._pieces: list[Raw] = [self._first]

    def write(self, data: Raw | Pieces) -> None:
        if isinstance(data, Pieces):
            for piece in data.pieces:
                self.write(piece)
        elif len(data) < _LARGE_BYTES:
            self._gathered += data
        else:
            self._gathered = bytearray()
            self._pieces += data, self._gathered

    def ended(self) -> list[Raw]:
        size = sum(map(len, self._pieces))
        self._first[:LENGTH_BYTES] = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
        return self._pieces


def write_reply(api_key: int, version: int, correlation_id: int, fields: Fields) -> list[Raw]:
    """The whole frame, its length before it, in pieces that follow one another."""
    schema: Any = _response_schema(api_key, version)
    frame = _Frame()
    header_schema: Any = schema.__header_schema__
    _writer(header_schema)(frame, header_schema(correlation_id=correlation_id))
    _writer(schema)(frame, _maker(schema)(fields))
    return frame.ended()


_request_schema: Final = functools.cache(load_request_schema)
_response_schema: Final = functools.cache(load_response_schema)


@functools.cache
def _reader(schema: Any) -> Callable[[bytes, int], tuple[Any, int]]:
    return entity_reader(schema)


@functools.cache
def _writer(schema: Hashable) -> Callable[[_Frame, Any], None]:
    kind: Any = schema
    write: Any = entity_writer(kind)
    return cast("Callable[[_Frame, Any], None]", write)


@functools.cache
def _maker(schema: Hashable) -> Callable[[Fields], Any]:
    """Makes a message of `schema`, whatever is nested in it included."""
    kind: Any = schema
    makers: dict[str, Callable[[Any], Any] | None] = {}
    for field in dataclasses.fields(kind):
        makers[field.name] = _maker_of(field.type)

    def make(fields: Fields) -> Any:
        taken = {}
        for name, maker in makers.items():
            if name in fields:
                value = fields[name]
                taken[name] = value if maker is None or value is None else maker(value)
        return kind(**taken)

    return make


def _maker_of(kind: Any) -> Callable[[Any], Any] | None:
    """Makes a field of that type; None where there is nothing to be made of its value."""
    if _is_schema(kind):
        return _maker(kind)
    found = [each for each in map(_maker_of, get_args(kind)) if each is not None]
    if not found:
        return None
    # Of an array that may be null, as of a message that may be, the other type is that of nulls.
    return functools.partial(_make_each, found[0]) if get_origin(kind) is tuple else found[0]


def _make_each(maker: Callable[[Fields], Any], values: Any) -> tuple[Any, ...]:
    return tuple(maker(value) for value in values)


def _is_schema(kind: Any) -> bool:
    return hasattr(kind, "__api_key__")
