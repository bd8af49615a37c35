"""Converts Kafka protocol frames to messages and back; pure.

kio provides the schemas of all messages in all versions. A reply consists of plain mappings, keyed
by field name, and sequences; fields that the response's version lacks are left out.
Source: https://kafka.apache.org/protocol
"""

from __future__ import annotations

import dataclasses
import functools
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
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
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
from sparklog.broker.kafka import access, fetch_codec, frame_check, produce_codec
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.frame_check import CheckedFrame, ManyItems
from sparklog.broker.kafka.throttle import UNTHROTTLED, Mutations, Throttle
from sparklog.gc_pause import paused_gc
from sparklog.limits import KAFKA_ITEMS, KAFKA_QUICK_ITEMS
from sparklog.listeners import PLAINTEXT, Listener
from sparklog.security.acl import ANONYMOUS

_T = TypeVar("_T")

Fields: TypeAlias = Mapping[str, Any]
Raw: TypeAlias = bytes | bytearray | memoryview

_HEADER: Final = struct.Struct(">hhi")
"""The first fields of every request: API key, version and correlation id."""
PRODUCE: Final = 0
LENGTH_BYTES: Final = 4
"""The size of the length before each frame."""
_LARGE_BYTES: Final = 4_096
"""The size at which copying bytes starts to cost more than passing the socket another chunk."""
_CLIENT_ID_SHOWN: Final = 100
"""The maximum length of a client id in a log line, in characters."""
API_VERSIONS: Final = 18
_TEXTS: Final = frozenset({"error_message", "batch_index_error_message"})
"""The reply fields that contain an error message."""
_TEXT_CHARACTERS: Final = 2_000
"""Well below the limit of a string in the versions before KIP-482: 32,767 bytes."""
UNSUPPORTED_VERSION: Final = ErrorCode.unsupported_version
"""The error of the version 0 response to an ApiVersions request of an unknown version: the client
then retries with a supported version (KIP-511)."""


class Origin(NamedTuple):
    """The client and the listener that a request came from."""

    host: str
    """The client's address in Kafka's format; empty if unknown."""
    listener: Listener
    access: Access
    """Authorizes the client, and names its user."""
    throttle: Throttle = UNTHROTTLED
    """Counts what the client does, for its quotas."""


NO_ORIGIN: Final = Origin("", Listener(PLAINTEXT, PLAINTEXT, ""), access.OPEN)
"""The origin of a request that did not arrive over a connection."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A parsed request. `body` is kio's message of its version, or `fetch_codec`'s of a Fetch."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str
    origin: Origin
    body: Any
    memory: ReplyMemory
    """The memory for the records of the reply, acquired before they are read."""
    size_bytes: int = 0
    """The size of the request; 0 for a Fetch, whose records count instead."""
    is_gone: Callable[[], bool] = lambda: False
    """Returns whether the client has disconnected."""

    @property
    def client_host(self) -> str:
        """The client's address in Kafka's format, `/127.0.0.1`; empty if unknown."""
        return self.origin.host

    @property
    def listener(self) -> Listener:
        """The listener that the client has connected to."""
        return self.origin.listener

    @property
    def access(self) -> Access:
        """Authorizes the client."""
        return self.origin.access

    @property
    def throttle(self) -> Throttle:
        """Counts what the client does, for its quotas."""
        return self.origin.throttle

    def mutations(self, *, first_strict: int | None) -> Mutations:
        """Returns a count of the partitions that the request creates or deletes (KIP-599).

        `first_strict`: the first version whose clients know THROTTLING_QUOTA_EXCEEDED; None: none.
        """
        is_strict = first_strict is not None and self.version >= first_strict
        return Mutations(self.throttle, self.client_id, is_strict=is_strict)

    @property
    def client(self) -> str:
        """The client id, which the client chooses, its user and its address, for the log."""
        principal = self.access.principal
        user = f" ({principal})" if principal != ANONYMOUS else ""
        return f"{self.client_id[:_CLIENT_ID_SHOWN]!r}{user} at {self.client_host.lstrip('/')}"


class ReplyMemory(Protocol):
    """The memory of one request and of the records in its reply."""

    async def take_records(self, size: int) -> None:
        """Waits for `size` bytes of memory. All of it must be released before the next call."""

    def release_records(self, left_bytes: int = 0) -> None:
        """Releases the memory of the records, except for `left_bytes`."""

    def release_parsed(self) -> None:
        """Stops counting the parsed request: its handler bounds it in some other way."""


class _UnlimitedMemory:
    """The `ReplyMemory` of requests that did not arrive over a connection."""

    async def take_records(self, size: int) -> None:
        del size

    def release_records(self, left_bytes: int = 0) -> None:
        del left_bytes

    def release_parsed(self) -> None:
        pass


def read_header(frame: bytes) -> tuple[int, int, int]:
    """Returns (API key, version, correlation id) of a request. Raises `BadRequest`."""
    if len(frame) < _HEADER.size:
        raise errors.BadRequest(reason=f"a request of {len(frame)} bytes has no complete header")
    header: tuple[int, int, int] = _HEADER.unpack_from(frame)
    return header


HEADER_BEGIN_BYTES: Final = _HEADER.size + 2
"""The first fields of a request, and the length of its client id."""


def client_id_bytes(begin: bytes) -> int:
    """Returns the length of the client id of a request with these first bytes; 0 for null."""
    return max(int.from_bytes(begin[_HEADER.size :], "big", signed=True), 0)


def check_request(frame: bytes, most_items: int = KAFKA_ITEMS) -> CheckedFrame:
    """Checks the lengths in a request before it is parsed.

    Raises `BadRequest` if they exceed the frame, and `ManyItems` for more than `most_items`.
    """
    api_key, version, _ = read_header(frame)
    schema: Any = _request_schema(api_key, version)
    try:
        return frame_check.checked(frame, schema.__header_schema__, schema, most_items=most_items)
    except ManyItems:
        if most_items < KAFKA_ITEMS:
            raise
        reason = f"{schema.__name__} has more than {KAFKA_ITEMS} items: send several requests"
        raise errors.BadRequest(reason=reason) from None


def read_quickly(
    frame: bytes, origin: Origin, memory: ReplyMemory, is_gone: Callable[[], bool]
) -> tuple[Request, int] | None:
    """Returns a small Fetch request and the number of its items; None for other requests."""
    api_key, version, correlation_id = read_header(frame)
    body = fetch_codec.read(frame, version) if api_key == fetch_codec.FETCH else None
    if body is None:
        return None
    request = Request(
        api_key=api_key,
        version=version,
        correlation_id=correlation_id,
        client_id=body.client_id,
        origin=origin,
        body=body,
        memory=memory,
        is_gone=is_gone,
    )
    return request, body.items


def read_request(frame: bytes) -> Request:
    """Parses a request outside a served connection. Raises `BadRequest`."""
    return parse_request(check_request(frame))


def parse_request(
    checked: CheckedFrame,
    origin: Origin = NO_ORIGIN,
    memory: ReplyMemory | None = None,
    is_gone: Callable[[], bool] = lambda: False,
) -> Request:
    """Parses a request with kio. Raises `BadRequest` for bytes that are not such a message."""
    frame = checked.data
    api_key, version, correlation_id = read_header(frame)
    schema: Any = _request_schema(api_key, version)
    try:
        with _paused_gc(checked.items):
            header, at = _reader(schema.__header_schema__)(frame, 0)
            body, _ = _reader(schema)(frame, at)  # librdkafka may send a few extra bytes
    except Exception as error:  # kio's native decoder raises many kinds of errors
        reason = f"not a valid {schema.__name__} of version {version}: {error!r}"
        raise errors.BadRequest(reason=reason) from error
    return Request(
        api_key=api_key,
        version=version,
        correlation_id=correlation_id,
        client_id=getattr(header, "client_id", None) or "",
        origin=origin,
        body=body,
        size_bytes=len(frame),
        memory=memory or _UnlimitedMemory(),
        is_gone=is_gone,
    )


def _paused_gc(items: int) -> AbstractContextManager[None]:
    """Disables the garbage collector while kio creates many objects.

    With 150,000 items the collector took 80 % of the time.
    """
    return paused_gc() if items > KAFKA_QUICK_ITEMS else nullcontext()


class ChunkedBytes:
    """The bytes of one field in consecutive chunks, which `write_reply` does not copy.

    Copying a megabyte of records in each layer would cost more than everything else.
    """

    __slots__ = ("_size", "chunks")

    def __init__(self, chunks: Sequence[Raw]) -> None:
        self.chunks = chunks
        self._size = sum(map(len, chunks))

    def __len__(self) -> int:
        return self._size


class LazyArray(Generic[_T]):
    """An array in a reply whose items are created one at a time, as they are written.

    A hundred thousand items never exist at the same time, and the event loop runs in between.

    Args:
        make: returns the fields of one item.
        source: one value per item, which is passed to `make`.
        is_slow: True if creating an item takes long enough that each needs a turn.
    """

    __slots__ = ("_make", "_source", "is_slow")

    def __init__(
        self, make: Callable[[_T], Any], source: Collection[_T], *, is_slow: bool = False
    ) -> None:
        self._make = make
        self._source = source
        self.is_slow = is_slow

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._source)


class ConstantReply(dict[str, Any]):
    """A reply that never changes. It is encoded once per version."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.encoded: dict[int, bytes] = {}
        """The encoded fields by version, without the header."""


class FetchReply(dict[str, Any]):
    """A response to Fetch, for `fetch_codec`."""

    def __init__(self, fields: Fields, item_count: int) -> None:
        super().__init__(fields)
        self.item_count = item_count
        """The number of its topics and partitions."""


class PlainProduceReply(dict[str, Any]):
    """A response to Produce without errors and of few items, for `produce_codec`."""


def is_large(reply: Fields, most_items: int) -> bool:
    """Returns whether a reply has over `most_items` items, or slow ones, without creating all."""
    if isinstance(reply, PlainProduceReply):
        return False
    if isinstance(reply, FetchReply):
        return reply.item_count > most_items
    return not isinstance(reply, ConstantReply) and _left_items(reply, most_items) < 0


def _left_items(value: Any, left: int) -> int:
    """Returns `left` minus the items in `value`; any negative number if the result is below 0."""
    if isinstance(value, Mapping):
        children: Iterable[Any] = value.values()
    else:
        left -= len(value)
        children = value
        if isinstance(value, LazyArray) and value.is_slow and len(value):
            return -1
    if left < 0:
        return left
    for child in children:
        if isinstance(child, (Mapping, list, tuple, LazyArray)):
            left = _left_items(child, left)
            if left < 0:
                return left
    return left


class _FrameWriter:
    """The buffer that kio writes a frame to. Gathers small writes; does not copy large chunks."""

    def __init__(self) -> None:
        self._first = self._gathered = bytearray(LENGTH_BYTES)
        self._chunks: list[Raw] = [self._first]
        self._gathered_before_bytes = 0

    @property
    def written_bytes(self) -> int:
        """Bytes gathered so far. Large chunks are not counted: they existed before."""
        return self._gathered_before_bytes + len(self._gathered)

    def write(self, data: Raw | ChunkedBytes) -> None:
        if isinstance(data, ChunkedBytes):
            for chunk in data.chunks:
                self.write(chunk)
        elif len(data) < _LARGE_BYTES:
            self._gathered += data
        else:
            self._gathered_before_bytes += len(self._gathered)
            self._gathered = bytearray()
            self._chunks += data, self._gathered

    def finish(self) -> list[Raw]:
        """Returns the frame, prefixed with its length."""
        size = sum(map(len, self._chunks))
        self._first[:LENGTH_BYTES] = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
        return self._chunks


def write_reply(api_key: int, version: int, correlation_id: int, fields: Fields) -> list[Raw]:
    """Returns a reply's frame, prefixed with its length, in consecutive chunks."""
    if isinstance(fields, FetchReply):
        return fetch_codec.write(version, correlation_id, fields)
    if isinstance(fields, PlainProduceReply):
        return [produce_codec.write(version, correlation_id, fields)]
    schema: Any = _response_schema(api_key, version)
    frame = _start_frame(schema, correlation_id)
    if not isinstance(fields, ConstantReply):
        _writer(schema)(frame, _maker(schema)(fields))
        return frame.finish()
    if version not in fields.encoded:
        body = _FrameWriter()
        _writer(schema)(body, _maker(schema)(fields))
        fields.encoded[version] = b"".join(body.finish())[LENGTH_BYTES:]
    frame.write(fields.encoded[version])
    return frame.finish()


def reply_writer(
    api_key: int, version: int, correlation_id: int, fields: Fields
) -> ReplyWriter | fetch_codec.Writer:
    """Returns a writer that writes a reply in steps."""
    if isinstance(fields, FetchReply):
        return fetch_codec.Writer(version, correlation_id, fields)
    return ReplyWriter(api_key, version, correlation_id, fields)


class ReplyWriter:
    """Writes a reply in steps: iterating writes it, after which `finish` returns the frame."""

    def __init__(self, api_key: int, version: int, correlation_id: int, fields: Fields) -> None:
        self._schema: Any = _response_schema(api_key, version)
        self._fields = fields
        self._frame = _start_frame(self._schema, correlation_id)

    def __iter__(self) -> Iterator[None]:
        return _write_steps(self._schema, self._fields, self._frame)

    @property
    def written_bytes(self) -> int:
        """Bytes written so far, not counting large chunks."""
        return self._frame.written_bytes

    def finish(self) -> list[Raw]:
        """Returns the frame in consecutive chunks."""
        return self._frame.finish()


def _start_frame(schema: Any, correlation_id: int) -> _FrameWriter:
    frame = _FrameWriter()
    header_schema: Any = schema.__header_schema__
    _writer(header_schema)(frame, header_schema(correlation_id=correlation_id))
    return frame


class _WritePlan(NamedTuple):
    """The steps in which a message with arrays of messages is written."""

    make: Callable[[Fields], Any]
    """Creates the message with empty arrays."""
    steps: Sequence[tuple[str, Callable[[_FrameWriter, Any], None] | None, Any]]
    """(field, its writer, None), or (field, None, schema) for an array of messages."""
    tags: Sequence[tuple[int, str, Callable[[Any, Any], None]]]
    """(tag, field, its writer) of the tagged fields, in order. Absent ones are left out."""
    is_flexible: bool


def _write_steps(schema: Any, fields: Fields, frame: _FrameWriter) -> Iterator[None]:
    plan = _plan(schema)
    message = plan.make(fields)
    for name, write, inner in plan.steps:
        if write is not None:
            write(frame, getattr(message, name))
            continue
        items = fields.get(name, ())
        _write_count(frame, items, is_flexible=plan.is_flexible)
        is_nested = any(step is None for _, step, _ in _plan(inner).steps)
        make, write_item = _maker(inner), _writer(inner)
        for item in items or ():
            if is_nested:
                yield from _write_steps(inner, item, frame)
            else:
                write_item(frame, make(item))
            yield
    if plan.is_flexible:
        present = [each for each in plan.tags if each[1] in fields]
        writers.write_unsigned_varint(cast("Any", frame), cast("Any", len(present)))
        for tag, name, write in present:
            value = getattr(message, name)
            writers.write_tagged_field(cast("Any", frame), cast("Any", tag), write, value)


def _write_count(frame: _FrameWriter, items: Sized | None, *, is_flexible: bool) -> None:
    count = -1 if items is None else len(items)
    if is_flexible:
        writers.write_unsigned_varint(cast("Any", frame), cast("Any", count + 1))
    else:
        writers.write_int32(cast("Any", frame), cast("Any", count))


@functools.cache
def _plan(schema: Any) -> _WritePlan:
    is_flexible = bool(schema.__flexible__)
    steps: list[tuple[str, Callable[[_FrameWriter, Any], None] | None, Any]] = []
    arrays: dict[str, tuple[()]] = {}
    tags: list[tuple[int, str, Callable[[Any, Any], None]]] = []
    for field in dataclasses.fields(schema):
        if "tag" in field.metadata:
            tagged: Any = get_field_writer(
                field, flexible=is_flexible, is_request_header=False, is_tag=True
            )
            tags.append((field.metadata["tag"], field.name, tagged))
            continue
        inner = _item_schema(field.type)
        if inner is not None:
            steps.append((field.name, None, inner))
            arrays[field.name] = ()
            continue
        write: Any = get_field_writer(
            field, flexible=is_flexible, is_request_header=False, is_tag=False
        )
        steps.append((field.name, write, None))
    make = _maker(schema)
    return _WritePlan(
        make=lambda fields: make({**fields, **arrays}),
        steps=steps,
        tags=sorted(tags, key=itemgetter(0)),
        is_flexible=is_flexible,
    )


def _item_schema(kind: Any) -> Any:
    """Returns the item schema of an array of messages, nullable or not; None for other types."""
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
def _writer(schema: Hashable) -> Callable[[_FrameWriter, Any], None]:
    kind: Any = schema
    write: Any = entity_writer(kind)
    return cast("Callable[[_FrameWriter, Any], None]", write)


@functools.cache
def _maker(schema: Hashable) -> Callable[[Fields], Any]:
    """Returns a function that creates a message of `schema`, with its nested messages."""
    kind: Any = schema
    makers: dict[str, Callable[[Any], Any] | None] = {}
    for field in dataclasses.fields(kind):
        makers[field.name] = _cut if field.name in _TEXTS else _maker_of(field.type)

    def make(fields: Fields) -> Any:
        values = {}
        for name, maker in makers.items():
            if name in fields:
                value = fields[name]
                values[name] = value if maker is None or value is None else maker(value)
        return kind(**values)

    return make


def _cut(text: str) -> str:
    """Shortens an error message, which may quote client input of any length."""
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}…"


def _maker_of(kind: Any) -> Callable[[Any], Any] | None:
    """Returns a function that creates a field of this type; None if its value is used as is."""
    if _is_schema(kind):
        return _maker(kind)
    makers = [maker for maker in map(_maker_of, get_args(kind)) if maker is not None]
    if not makers:
        return None
    # The other type of a nullable array or message is None, which needs no maker.
    return functools.partial(_make_each, makers[0]) if get_origin(kind) is tuple else makers[0]


def _make_each(maker: Callable[[Fields], Any], values: Any) -> tuple[Any, ...]:
    return tuple(maker(value) for value in values)


def _is_schema(kind: Any) -> bool:
    return hasattr(kind, "__api_key__")
