"""The open streams of the Flight listener: how many, how long they stand still, how much they send.

Arrow gives gRPC's server no bound on any of it, and a stream that waits for its client cannot be
ended from within. So the connection of a client that goes too far is cut, with a line in the log:

- a message that grows beyond all that is taken: seen by what the connection has received since the
  last whole message, or the last request;
- a stream that has waited for its client for long: for a message, or until what it gives is read.
  Where streams or memory are short, seconds are too long, and the longest waits go first.

More streams than there may be are refused, retriably. Thread-safe; `tick` is called again and
again, by one thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from sparklog import errors, limits
from sparklog.clock import Clock

_log = structlog.get_logger("sparklog.flight")
_FREED = 16
"""Where streams are short, one of so many is freed of clients that do nothing with theirs."""


class Connections(Protocol):
    """The connections of the listener's clients, by the names that gRPC gives them."""

    def received_bytes(self) -> Mapping[str, int]:
        """Bytes that have ever come, of each connection of which the system says it."""
        ...

    def cut(self, peer: str) -> None:
        """Ends a connection, and all calls of its client with it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBounds:
    streams: int = limits.FLIGHT_STREAMS
    held_bytes: int = limits.FLIGHT_HELD_BYTES
    message_bytes: int = limits.FLIGHT_MESSAGE_BYTES
    idle_seconds: float = limits.FLIGHT_IDLE_SECONDS
    idle_short_seconds: float = limits.FLIGHT_IDLE_SHORT_SECONDS
    pressed_seconds: float = limits.FLIGHT_PRESSED_SECONDS


class Stream:
    """One open stream, as the thread that serves it tells of it."""

    __slots__ = ("_clock", "held_bytes", "is_cut", "messages", "peer", "sends", "waits_since")

    def __init__(self, clock: Clock, peer: str, *, sends: bool) -> None:
        self._clock = clock
        self.peer = peer
        self.sends = sends
        """Whether its client sends messages, or reads them."""
        self.waits_since: float | None = None
        self.held_bytes = 0
        self.messages = 0
        self.is_cut = False

    def waits(self, held_bytes: int = 0) -> None:
        """Nothing goes on until the client does something; so much memory is kept meanwhile."""
        self.held_bytes = held_bytes
        self.waits_since = self._clock.monotonic()

    def goes_on(self) -> None:
        """The client has sent a message, or read one."""
        self.waits_since = None
        self.held_bytes = 0
        self.messages += 1


@dataclass(slots=True)
class _Peer:
    """What a connection had received, and how many messages were whole, when that changed last."""

    messages: int
    received_bytes: int
    is_cut: bool = False


class Streams:
    def __init__(self, bounds: StreamBounds, *, clock: Clock, connections: Connections) -> None:
        self._bounds = bounds
        self._clock = clock
        self._connections = connections
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._requests: Counter[str] = Counter()
        """Of each peer: requests that came, and messages of streams that have ended."""
        self._peers: dict[str, _Peer] = {}
        self._pressed_until = 0.0

    @property
    def count(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self, peer: str, *, sends: bool) -> Iterator[Stream]:
        """A stream for as long as the block lasts. Raises `TooManyStreams`."""
        stream = Stream(self._clock, peer, sends=sends)
        with self._lock:
            if len(self._streams) >= self._bounds.streams:
                self._pressed_until = self._clock.monotonic() + self._bounds.pressed_seconds
                raise errors.TooManyStreams(
                    what="streams", open=len(self._streams), setting="flight.max_streams"
                )
            self._streams.add(stream)
            self._requests[peer] += 1
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)
                self._requests[peer] += stream.messages

    def came(self, peer: str) -> None:
        """A whole request has come."""
        with self._lock:
            self._requests[peer] += 1

    def tick(self) -> None:
        """Cuts the connections that have gone too far."""
        received = self._connections.received_bytes()
        with self._lock:
            streams = list(self._streams)
            requests = self._requests.copy()
        self._cut_oversized(streams, requests, received)
        self._cut_waiting(streams)

    def _cut_oversized(
        self, streams: Iterable[Stream], requests: Counter[str], received: Mapping[str, int]
    ) -> None:
        sending: Counter[str] = Counter()
        for stream in streams:
            requests[stream.peer] += stream.messages
            sending[stream.peer] += stream.sends
        for name, size in received.items():
            peer = self._peers.setdefault(name, _Peer(0, 0))
            if requests[name] != peer.messages:
                peer.messages, peer.received_bytes = requests[name], size
                continue
            limit_bytes = self._bounds.message_bytes * max(sending[name], 1)
            if size - peer.received_bytes > limit_bytes and not peer.is_cut:
                peer.is_cut = True
                self._cut(name, "a client sends a message that is too large", bytes=limit_bytes)
        for name in self._peers.keys() - received.keys():
            del self._peers[name]
            with self._lock:
                del self._requests[name]

    def _cut_waiting(self, streams: list[Stream]) -> None:
        now = self._clock.monotonic()
        waiting = sorted(
            (since, id(stream), stream)
            for stream in streams
            if not stream.is_cut and (since := stream.waits_since) is not None
        )
        held_bytes = sum(stream.held_bytes for stream in streams if not stream.is_cut)
        count = sum(not stream.is_cut for stream in streams)
        # As many as are to be left where one was refused.
        enough = self._bounds.streams - max(self._bounds.streams // _FREED, 1)
        is_pressed = now < self._pressed_until
        for since, _, stream in waiting:
            is_short = is_pressed and count > enough
            is_much = held_bytes > self._bounds.held_bytes and stream.held_bytes > 0
            waited = now - since
            if waited > self._bounds.idle_seconds or (
                (is_short or is_much) and waited > self._bounds.idle_short_seconds
            ):
                what = "sends nothing" if stream.sends else "does not read what it asked for"
                stream.is_cut = True
                self._cut(stream.peer, f"a client {what}", seconds=round(waited))
                held_bytes -= stream.held_bytes
                count -= 1

    def _cut(self, name: str, why: str, **facts: object) -> None:
        _log.warning(f"{why}: its connection is closed", peer=name, **facts)
        self._connections.cut(name)
