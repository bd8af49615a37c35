"""One gRPC call: assembles its messages, and decides how many more bytes its client may send.

The server's reading thread feeds bytes to a call; the thread that serves the call reads whole
messages and writes responses. A client may send messages of up to `FREE_BYTES` without permission.
For a larger one, `next_step` returns the bytes to request from `message_memory`, and
`target_window` the size of the stream's HTTP/2 window. A window counts bytes on the wire, and an
empty message takes a hundred times its five bytes in memory, so the number of messages has its own
limit.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from sparklog import limits
from sparklog.broker.flight.grpc.admission import Admission
from sparklog.broker.flight.grpc.message_memory import MessageMemory
from sparklog.broker.flight.grpc.status import (
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    GrpcError,
    PeerGone,
)
from sparklog.clock import Clock
from sparklog.listeners import Listener
from sparklog.security.x500 import CertificatePrincipal

Bytes: TypeAlias = bytes | memoryview
Serve: TypeAlias = Callable[["Call"], None]

FREE_BYTES: Final = 64 * limits.KIB
"""The bytes that each stream may send without permission; gRPC's initial window."""
UNADMITTED_MESSAGE_BYTES: Final = 64 * limits.KIB
"""The maximum size of a message of a client that is not admitted."""
PREFIX: Final = struct.Struct(">BI")
"""The prefix of each message: a flag for compression, and the length."""
PREFIX_BYTES: Final = 5
UNREAD_MESSAGES: Final = 512
"""The maximum number of unread messages of a call. Flight's messages are more than a hundred bytes
long, so a window has no room for that many."""
_STEP_BYTES: Final = 4 * limits.MIB
_ALIGNMENT_BYTES: Final = 64
_PEEKED_BYTES: Final = 16 * limits.KIB
"""The part of a message that is searched for the start of its body."""
_GONE: Final = (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of the service, and the bounds on its messages.

    Args:
        serve: serves one call, in its own thread. It may raise `GrpcError` and `PeerGone`; other
            exceptions are logged, and end the call. It admits the client, where that is needed.
        message_bytes: the maximum size of a message.
        too_large: returns the error for a message, given its size and the limit.
        body_at: returns the position in a message to align in memory, given the message's first
            bytes (0: any alignment will do).
    """

    serve: Serve
    message_bytes: int
    too_large: Callable[[int, int], GrpcError]
    is_open: bool = True
    """False if a call without a token is refused at once, at a listener that needs one."""
    body_at: Callable[[Bytes], int] = lambda _: 0


class Refusal(NamedTuple):
    """The HTTP response to a non-gRPC request: status, headers and text."""

    status: int
    headers: list[tuple[str, bytes]]
    text: bytes


class Message(NamedTuple):
    """A received message, which begins at `start` in a buffer that belongs to its reader."""

    buffer: memoryview
    start: int

    @property
    def data(self) -> memoryview:
        return self.buffer[self.start :]


class Connection(Protocol):
    """The connection of a call, which sends its messages and updates its window."""

    host: str
    peer: str
    listener: Listener
    lock: threading.Lock
    served: int
    """The number of threads that serve its calls."""
    admission: Admission
    calls: dict[int, Call]
    """Its open calls, by stream."""

    @property
    def principal(self) -> CertificatePrincipal | None: ...

    @property
    def peer_window(self) -> int:
        """The initial window of a stream, as set by the client."""
        ...

    def send(self, call: Call, pieces: list[memoryview], size: int) -> None: ...

    def send_soon(self, call: Call, pieces: list[memoryview], size: int) -> bool: ...

    def update_window(self, call: Call) -> None: ...

    def release_read(self, call: Call) -> None: ...

    def refuse(self, call: Call) -> None: ...

    def log_limited(self, event: str, **facts: object) -> None: ...

    def admitted(self, call: Call) -> None: ...

    def end(
        self, call: Call, code: int, message: str, trailers: Iterable[tuple[str, bytes]]
    ) -> None: ...


class Call:
    """One call of a client. The thread that serves it reads messages and writes responses."""

    __slots__ = (
        "_assembling",
        "_clock",
        "_filled",
        "_handed_bytes",
        "_memory",
        "_messages",
        "_method",
        "_occupied_bytes",
        "_prefix",
        "_queued_large",
        "_start",
        "authorization",
        "began",
        "connection",
        "deadline",
        "granted",
        "has_ended",
        "has_started",
        "held_bytes",
        "is_admitted",
        "is_dead",
        "is_detached",
        "is_served",
        "length_left",
        "listener",
        "on_progress",
        "outgoing",
        "peer",
        "principal",
        "refusal",
        "send_window",
        "size",
        "stalled_since",
        "stream_id",
        "trailers",
        "wants_grant",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        stream_id: int,
        method: Method,
        *,
        memory: MessageMemory,
        clock: Clock,
    ) -> None:
        self.connection = connection
        self._memory = memory
        self._clock = clock
        self.peer = connection.peer
        """The client's `host:port`."""
        self.listener = connection.listener
        """The listener that it has connected to."""
        self.principal = connection.principal
        """That of the client's certificate."""
        self.authorization = ""
        """The header of this name; empty without one."""
        self.is_admitted = True
        """False until the client is admitted: its messages are small until then."""
        self.trailers: list[tuple[str, bytes]] = []
        """Sent at the end of a call that succeeds."""
        self.stream_id = stream_id
        self._method = method
        self.is_dead = False
        """True if the client or this broker has ended the call."""
        self.is_served = False
        self.is_detached = False
        """True if the call no longer occupies a thread; `Server.finish` ends it."""
        self.on_progress: Callable[[], None] | None = None
        """Called in any thread when the message of `write_soon` has been sent, and when the call
        ends. It must not block."""
        self.has_ended = False
        """True if the client has half-closed its stream: it will send nothing more."""
        self.has_started = False
        """True if the response headers have been sent."""
        self.send_window = connection.peer_window
        self.window = FREE_BYTES
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._prefix = b""
        self._assembling: memoryview | None = None
        self.size = 0
        self._filled = 0
        self._occupied_bytes = 0
        """The bytes of `FREE_BYTES` used by messages that have not been read yet."""
        self._handed_bytes = 0
        """The size of the message that was read last; negative for a large one."""
        self.granted = 0
        """The granted bytes of the message being received; 0 for a small one."""
        self.wants_grant = False
        self.held_bytes = 0
        """The bytes of `message_memory` for the message being received and the unreleased one."""
        self._queued_large = False
        self.began = self._clock.monotonic()
        """When the call, or the message being received, began."""
        self.outgoing: deque[memoryview] = deque()
        """The unsent part of the message being sent."""
        self.stalled_since: float | None = None
        """When the client stopped reading the message being sent."""
        self.deadline: float | None = None
        """When the call ends with DEADLINE_EXCEEDED (`grpc-timeout`)."""
        self.length_left: int | None = None
        """The remainder of the request's content-length; None if it has none."""
        self.refusal: Refusal | None = None
        """The response to a non-gRPC request."""
        self._start = 0

    # ---------------------------------------------------------------------- for the call's thread

    def serve(self) -> None:
        """Calls its method."""
        self._method.serve(self)

    def read(self) -> Message | None:
        """Returns the next message, or None after the last one. Raises `PeerGone`.

        Releases the memory of the previous message: its reader must not keep it, because it is no
        longer counted.
        """
        self.release_message()
        entry = self._messages.get()
        if entry is None:
            self._messages.put(None)
            return None
        with self.connection.lock:
            if self.is_dead:  # the memory of its messages has been released
                self._messages.put(_GONE)
                raise PeerGone
            message: Message
            message, self._handed_bytes = entry
            if self._handed_bytes < 0:
                self._queued_large = False
        if self.wants_grant:
            self._memory.request_step(self)
        return message

    def write(self, parts: Iterable[Bytes]) -> None:
        """Sends a message. Returns once the system has accepted all of it. Raises `PeerGone`."""
        pieces = [memoryview(each).cast("B") for each in parts]
        self.connection.send(self, pieces, sum(map(len, pieces)))

    def write_soon(self, parts: Iterable[Bytes]) -> bool:
        """Sends a message without waiting. Returns whether all of it was sent. Raises `PeerGone`.

        The rest is sent as the client reads; then `on_progress` is called. Until then, no other
        message may be sent.
        """
        pieces = [memoryview(each).cast("B") for each in parts]
        return self.connection.send_soon(self, pieces, sum(map(len, pieces)))

    def detach(self, on_progress: Callable[[], None]) -> None:
        """Frees the thread that serves the call, once it returns; `Server.finish` ends the call."""
        self.is_detached = True
        self.on_progress = on_progress

    @property
    def is_of_known_client(self) -> bool:
        """True if a call of the same connection was admitted before."""
        return self.connection.admission.is_admitted

    def admit(self) -> None:
        """Notes that the client was admitted."""
        self.is_admitted = True
        self.connection.admission.is_admitted = True
        self.connection.admitted(self)

    def count_unadmitted(self) -> None:
        """Notes a call that was refused for lack of a login, or that may come without one."""
        self.connection.admission.count_refused()

    def log_limited(self, event: str, **facts: object) -> None:
        """Logs a warning, at most one per second, because clients can cause them."""
        self.connection.log_limited(event, **facts)

    def cancel(self) -> None:
        """Ends the call with UNAVAILABLE; may be called from any thread."""
        self.connection.end(self, UNAVAILABLE, "the broker has ended the stream", [])

    def expire(self) -> None:
        """Ends the call because its deadline has passed."""
        self.connection.end(self, DEADLINE_EXCEEDED, "the call's deadline has passed", [])

    def release_message(self) -> None:
        """Releases the memory of the message that was read last."""
        if self._handed_bytes:
            self.connection.release_read(self)

    # ---------------------------------------------------------------------- for the reading thread

    def feed(self, data: memoryview) -> int:
        """Processes received bytes. Returns the number of completed messages.

        Raises `GrpcError` for a message that is too large or compressed, and for too many messages.
        """
        count = 0
        at, end = 0, len(data)
        while at < end and not self.is_dead:
            buffer = self._assembling
            if buffer is None:
                lacking = PREFIX_BYTES - len(self._prefix)
                self._prefix += data[at : at + lacking]
                at += lacking
                if len(self._prefix) < PREFIX_BYTES:
                    break
                prefix, self._prefix = self._prefix, b""
                compressed, size = PREFIX.unpack(prefix)
                buffer = self._begin(compressed, size, data[at:])
                if not self.size:
                    self._complete(buffer)
                    count += 1
                    continue
            taken = min(end - at, self.size - self._filled)
            to = self._start + self._filled
            if to + taken > len(buffer):
                buffer = self._enlarged(buffer)
            buffer[to : to + taken] = data[at : at + taken]
            self._filled += taken
            at += taken
            if self._filled == self.size:
                self._complete(buffer)
                count += 1
        return count

    def is_whole(self, prefix: memoryview, size: int) -> bool:
        """Returns whether a frame with this size and prefix is exactly one small, valid message."""
        return (
            self._assembling is None
            and not self._prefix
            and PREFIX_BYTES <= size <= FREE_BYTES
            and PREFIX.unpack(prefix) == (0, size - PREFIX_BYTES)
            and size - PREFIX_BYTES <= self._message_bytes
            and self.length_left is None
            and self._messages.qsize() < UNREAD_MESSAGES
        )

    @property
    def _message_bytes(self) -> int:
        """The maximum size of a message."""
        bound = self._method.message_bytes
        return bound if self.is_admitted else min(bound, UNADMITTED_MESSAGE_BYTES)

    def take_whole(self, message: bytearray) -> None:
        """Queues a message for which `is_whole` returned True. Requires the lock."""
        occupied = PREFIX_BYTES + len(message)
        self._occupied_bytes += occupied
        self._messages.put((Message(memoryview(message), 0), occupied))

    def _begin(self, compressed: int, size: int, beside: memoryview) -> memoryview:
        """Prepares a buffer for a message. `beside` are the bytes received after its prefix."""
        if self._messages.qsize() >= UNREAD_MESSAGES:
            reason = f"{UNREAD_MESSAGES} messages are waiting to be read: send fewer, larger ones"
            raise GrpcError(RESOURCE_EXHAUSTED, reason)
        if compressed:
            raise GrpcError(UNIMPLEMENTED, "messages must not be compressed")
        if size > self._message_bytes and not self.is_admitted:
            # Its token may be one that this broker does not know yet: the client tries again.
            raise GrpcError(UNAVAILABLE, f"{size} bytes were sent before the client was admitted")
        if size > self._message_bytes:
            raise self._method.too_large(size, self._message_bytes)
        is_large = size + PREFIX_BYTES > FREE_BYTES
        body_at = self._method.body_at(beside[:_PEEKED_BYTES]) if is_large else 0
        # Large arrays of numpy begin 16 bytes after the start of a page.
        self._start = _ALIGNMENT_BYTES - 16 + -body_at % _ALIGNMENT_BYTES
        # Small at first: a huge page for each message that has only begun would be too much.
        buffer = memoryview(bytearray(self._start + min(size, FREE_BYTES)))
        self.size, self._filled, self._assembling = size, 0, buffer
        self.began = self._clock.monotonic()
        self.wants_grant = is_large
        return buffer

    def _enlarged(self, buffer: memoryview) -> memoryview:
        """Returns a buffer for the whole message, with the bytes received so far."""
        whole = np.empty(self._start + self.size, np.uint8).data
        end = self._start + self._filled
        whole[:end] = buffer[:end]
        self._assembling = whole
        return whole

    def _complete(self, buffer: memoryview) -> None:
        message = Message(buffer=buffer, start=self._start)
        with self.connection.lock:
            self._assembling = None
            if self.is_dead:
                return
            if self.granted:
                occupied = -self.granted
                self._queued_large = True
            else:
                occupied = PREFIX_BYTES + self.size
                self._occupied_bytes += occupied
            self.granted = self.size = self._filled = 0
            self.wants_grant = False
            self._messages.put((message, occupied))

    @property
    def is_partial(self) -> bool:
        """True if a message has begun but is not complete."""
        return self._assembling is not None or bool(self._prefix)

    @property
    def lacks_window(self) -> bool:
        """True if the rest of a small message exceeds the window."""
        return self._assembling is not None and self.size - self._filled > self.window

    def finish_reading(self) -> None:
        """Records that the client has half-closed its stream."""
        self.has_ended = True
        self._messages.put(None)

    # ---------------------------------------------------------------------- memory

    @property
    def lock(self) -> threading.Lock:
        """The lock of the connection."""
        return self.connection.lock

    def on_grant(self) -> None:
        """Lets the client send as much as has been granted."""
        self.connection.update_window(self)

    # ---------------------------------------------------------------------- windows, under the lock

    def target_window(self) -> int:
        """Returns the bytes that the client may send from now on."""
        if self.granted:
            return FREE_BYTES - self._occupied_bytes + self.granted - self._filled
        partial = (
            self._filled + len(self._prefix) + (PREFIX_BYTES if self._assembling is not None else 0)
        )
        return FREE_BYTES - self._occupied_bytes - partial

    def next_step(self, *, is_ample: bool) -> int:
        """Returns the bytes to request from `message_memory` now; 0 for none.

        Without ample memory, at most as many as have arrived: a client that announces a lot but
        sends little then holds little. Larger steps save the client a round trip each.
        """
        if not self.wants_grant or self._queued_large or self.is_dead:
            return 0
        left = self.size - self.granted
        step = _STEP_BYTES if is_ample else min(max(self._filled, FREE_BYTES), _STEP_BYTES)
        if left <= 0 or self.granted - self._filled > step // 2:
            return 0
        return min(left, step)

    def released(self) -> int:
        """Releases the message that was read. Returns the bytes of `message_memory` it held."""
        handed, self._handed_bytes = self._handed_bytes, 0
        if handed < 0:
            self._queued_large = False
            self.held_bytes += handed
            return -handed
        self._occupied_bytes -= handed
        return 0

    def die(self) -> int:
        """Drops all messages. Returns their bytes of `message_memory`, except the one in use."""
        self.is_dead = True
        self._assembling = None
        with contextlib.suppress(Empty):
            while True:
                self._messages.get_nowait()
        self._messages.put(_GONE)
        handed = max(-self._handed_bytes, 0)
        freed, self.held_bytes = self.held_bytes - handed, handed
        return freed
