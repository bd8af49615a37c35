"""Frames of Kafka's protocol to messages and back; pure.

kio knows every message in every version. A reply is given as plain mappings and sequences by field
name, and takes the shape of the version that was asked for: a field which that version has not is
left out.
Source: https://kafka.apache.org/protocol
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import struct
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import contextmanager
from typing import (
    Any,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer, writers
from kio.serial._serialize import get_field_writer

from sparklog import errors
from sparklog.broker.kafka import lengths
from sparklog.broker.kafka.lengths import Checked, ManyItems
from sparklog.limits import KAFKA_ITEMS, KAFKA_QUICK_ITEMS

_T = TypeVar("_T")

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
    room: Room
    """For the records of its reply, before they are read."""


class Room(Protocol):
    """Memory for the records of one reply."""

    async def take_records(self, size: int) -> None:
        """Waits for room for so many bytes; not to be called again before they are given back."""

    def give_records(self, left_bytes: int = 0) -> None:
        """Keeps no more of it than so much."""


class _Boundless:
    """For requests that did not come over a connection."""

    async def take_records(self, size: int) -> None:
        del size

    def give_records(self, left_bytes: int = 0) -> None:
        del left_bytes


def read_start(frame: bytes) -> tuple[int, int, int]:
    """(API key, version, correlation id), which every frame begins with. Raises `BadRequest`."""
    if len(frame) < _START.size:
        raise errors.BadRequest(reason=f"a request of {len(frame)} bytes")
    found: tuple[int, int, int] = _START.unpack_from(frame)
    return found


def check_request(frame: bytes, most_items: int = KAFKA_ITEMS) -> Checked:
    """A request whose lengths add up. Raises `BadRequest`; `ManyItems` for more than that."""
    api_key, version, _ = read_start(frame)
    schema: Any = _request_schema(api_key, version)
    try:
        return lengths.checked(frame, schema.__header_schema__, schema, most_items=most_items)
    except ManyItems:
        if most_items < KAFKA_ITEMS:
            raise
        reason = f"{schema.__name__}: more than {KAFKA_ITEMS} items"
        raise errors.BadRequest(reason=reason) from None


def read_request(frame: bytes) -> Request:
    """A request that did not come over a connection. Raises `BadRequest`."""
    return read_checked(check_request(frame))


def read_checked(checked: Checked, client_host: str = "", room: Room | None = None) -> Request:
    """Raises `BadRequest` for bytes that are no such message."""
    frame = checked.data
    api_key, version, correlation_id = read_start(frame)
    schema: Any = _request_schema(api_key, version)
    try:
        with _uncollected(checked.items):
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
        room=room or _Boundless(),
    )


@contextmanager
def _uncollected(items: int) -> Iterator[None]:
    """Keeps Python's collector from going over everything while many objects are made.

    kio makes them in one go, and nothing else runs meanwhile: of 150,000 items four fifths of the
    time went there.
    """
    if items <= KAFKA_QUICK_ITEMS or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


class Each(Generic[_T]):
    """Items of a reply that are made one by one as they are written, out of what they are of.

    A hundred thousand of them are never there at the same time, and the loop goes on in between.

    Args:
        is_slow: to make one takes so long that two are not made in one go.
    """

    __slots__ = ("_make", "_of", "is_slow")

    def __init__(
        self, make: Callable[[_T], Any], of: Collection[_T], *, is_slow: bool = False
    ) -> None:
        self._make = make
        self._of = of
        self.is_slow = is_slow

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._of)


def is_large(reply: Fields, most_items: int) -> bool:
    """Whether it has more items than that, or slow ones; no more are made to find out."""
    return _left(reply, most_items) < 0


def _left(value: Any, left: int) -> int:
    if isinstance(value, Mapping):
        within: Iterable[Any] = value.values()
    else:
        left -= len(value)
        within = value
        if isinstance(value, Each) and value.is_slow and len(value) > 1:
            return -1
    if left < 0:
        return left
    for each in within:
        if isinstance(each, (Mapping, list, tuple, Each)):
            left = _left(each, left)
            if left < 0:
                return left
    return left


class _Frame:
    """What kio writes to: small writes are gathered, large pieces stay what they are."""

    def __init__(self) -> None:
        self._first = self._gathered = bytearray(LENGTH_BYTES)
        self._pieces: list[Raw] = [self._first]
        self._before_bytes = 0

    @property
    def made_bytes(self) -> int:
        """Bytes that were gathered; pieces that stay what they are were there before."""
        return self._before_bytes + len(self._gathered)

    def write(self, data: Raw | Pieces) -> None:
        if isinstance(data, Pieces):
            for piece in data.pieces:
                self.write(piece)
        elif len(data) < _LARGE_BYTES:
            self._gathered += data
        else:
            self._before_bytes += len(self._gathered)
            self._gathered = bytearray()
            self._pieces += data, self._gathered

    def ended(self) -> list[Raw]:
        size = sum(map(len, self._pieces))
        self._first[:LENGTH_BYTES] = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
        return self._pieces


def write_reply(api_key: int, version: int, correlation_id: int, fields: Fields) -> list[Raw]:
    """The whole frame, its length before it, in pieces that follow one another."""
    schema: Any = _response_schema(api_key, version)
    frame = _begun(schema, correlation_id)
    _writer(schema)(frame, _maker(schema)(fields))
    return frame.ended()


class Writing:
    """The same in steps: iterating writes, and the frame is `ended` when the iteration has."""

    def __init__(self, api_key: int, version: int, correlation_id: int, fields: Fields) -> None:
        self._schema: Any = _response_schema(api_key, version)
        self._fields = fields
        self._frame = _begun(self._schema, correlation_id)

    def __iter__(self) -> Iterator[None]:
        return _written(self._schema, self._fields, self._frame)

    @property
    def made_bytes(self) -> int:
        """Of the frame, so far."""
        return self._frame.made_bytes

    def ended(self) -> list[Raw]:
        """The whole frame."""
        return self._frame.ended()


def _begun(schema: Any, correlation_id: int) -> _Frame:
    frame = _Frame()
    header_schema: Any = schema.__header_schema__
    _writer(header_schema)(frame, header_schema(correlation_id=correlation_id))
    return frame


class _Plan(NamedTuple):
    """How a message with arrays of messages is written in steps."""

    make: Callable[[Fields], Any]
    """A message without what is in those arrays."""
    steps: Sequence[tuple[str, Callable[[_Frame, Any], None] | None, Any]]
    """By field: how it is written, or the messages that it is an array of."""
    tags: frozenset[str]
    """Fields that are written only where they are given, which none of our replies does."""
    is_flexible: bool


def _written(schema: Any, fields: Fields, frame: _Frame) -> Iterator[None]:
    plan = _plan(schema)
    assert plan.tags.isdisjoint(fields), f"{schema.__name__}: tagged fields in a large reply"
    message = plan.make(fields)
    for name, write, inner in plan.steps:
        if write is not None:
            write(frame, getattr(message, name))
            continue
        items = fields.get(name, ())
        _write_count(frame, items, is_flexible=plan.is_flexible)
        in_steps = any(step is None for _, step, _ in _plan(inner).steps)
        make, write_item = _maker(inner), _writer(inner)
        for item in items or ():
            if in_steps:
                yield from _written(inner, item, frame)
            else:
                write_item(frame, make(item))
            yield
    if plan.is_flexible:
        writers.write_unsigned_varint(cast("Any", frame), cast("Any", 0))


def _write_count(frame: _Frame, items: Sized | None, *, is_flexible: bool) -> None:
    count = -1 if items is None else len(items)
    if is_flexible:
        writers.write_unsigned_varint(cast("Any", frame), cast("Any", count + 1))
    else:
        writers.write_int32(cast("Any", frame), cast("Any", count))


@functools.cache
def _plan(schema: Any) -> _Plan:
    is_flexible = bool(schema.__flexible__)
    steps: list[tuple[str, Callable[[_Frame, Any], None] | None, Any]] = []
    arrays: dict[str, tuple[()]] = {}
    tags = []
    for field in dataclasses.fields(schema):
        if "tag" in field.metadata:
            tags.append(field.name)
            continue
        inner = _array_of(field.type)
        if inner is not None:
            steps.append((field.name, None, inner))
            arrays[field.name] = ()
            continue
        write: Any = get_field_writer(
            field, flexible=is_flexible, is_request_header=False, is_tag=False
        )
        steps.append((field.name, write, None))
    make = _maker(schema)
    return _Plan(
        make=lambda fields: make({**fields, **arrays}),
        steps=steps,
        tags=frozenset(tags),
        is_flexible=is_flexible,
    )


def _array_of(kind: Any) -> Any:
    """The messages that a field of that type is an array of, null or not; None for others."""
    for each in (kind, *get_args(kind)):
        if get_origin(each) is tuple and _is_schema(get_args(each)[0]):
            return get_args(each)[0]
    return None


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
