"""The open streams of the Flight listener, bounded in number and in idle time.

A stream is ended, with a line in the log, if it has waited too long for its client to send a
message or to read one: after `idle_seconds`, or after `idle_short_seconds` while streams or memory
are scarce. Those that have waited longest end first. Streams beyond the limit are refused with a
retriable error. Thread-safe; one thread calls `tick` periodically.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from sparklog import errors, limits
from sparklog.clock import Clock

_HELD_BYTES = 256 * limits.MIB  # of rows that clients have requested but do not read
_PRESSED_SECONDS = 5.0  # for which streams count as scarce after a refusal

_log = structlog.get_logger("sparklog.flight")
_FREED = 16
"""While streams are scarce, idle ones are ended until one in this many is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBounds:
    """The limits of `OpenStreams`; `pressed_seconds` is how long a refusal counts as a shortage."""

    streams: int = limits.FLIGHT_STREAMS
    held_bytes: int = _HELD_BYTES
    idle_seconds: float = limits.FLIGHT_IDLE_SECONDS
    idle_short_seconds: float = limits.FLIGHT_IDLE_SHORT_SECONDS
    pressed_seconds: float = _PRESSED_SECONDS


class OpenStream:
    """One open stream. The thread that serves it reports when it waits and when it continues."""

    __slots__ = ("_clock", "cut", "held_bytes", "is_cut", "peer", "sends", "waits_since")

    def __init__(self, clock: Clock, peer: str, *, sends: bool, cut: Callable[[], None]) -> None:
        self._clock = clock
        self.peer = peer
        self.sends = sends
        """True if its client sends messages, False if it reads them."""
        self.cut = cut
        """Ends the stream; may be called from any thread."""
        self.waits_since: float | None = None
        self.held_bytes = 0
        self.is_cut = False

    def waits(self, held_bytes: int = 0) -> None:
        """Reports that the stream is waiting for its client, while holding `held_bytes`."""
        self.held_bytes = held_bytes
        self.waits_since = self._clock.monotonic()

    def advance(self) -> None:
        """Reports that the client has sent a message, or read one."""
        self.waits_since = None
        self.held_bytes = 0


class OpenStreams:
    """All open streams of a listener.

    Args:
        is_short: returns whether a stream is waiting for memory for batches to clients.
        on_refusal: called with the reason if there are too many streams.
    """

    def __init__(
        self,
        bounds: StreamBounds,
        *,
        clock: Clock,
        is_short: Callable[[], bool] = lambda: False,
        on_refusal: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        self._bounds = bounds
        self._is_short = is_short
        self._on_refusal = on_refusal
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: set[OpenStream] = set()
        self._pressed_until = 0.0

    @property
    def count(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self, peer: str, *, sends: bool, cut: Callable[[], None]) -> Iterator[OpenStream]:
        """Returns a context manager for one open stream. Raises `TooManyStreams`."""
        stream = OpenStream(self._clock, peer, sends=sends, cut=cut)
        with self._lock:
            if len(self._streams) >= self._bounds.streams:
                self._pressed_until = self._clock.monotonic() + self._bounds.pressed_seconds
                refusal = errors.TooManyStreams(
                    what="streams", open=len(self._streams), setting="flight.max_streams"
                )
                self._on_refusal(str(refusal))
                raise refusal
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def tick(self) -> None:
        """Ends the streams that have waited too long for their clients."""
        with self._lock:
            streams = list(self._streams)
        now = self._clock.monotonic()
        waiting = sorted(
            (since, id(stream), stream)
            for stream in streams
            if not stream.is_cut and (since := stream.waits_since) is not None
        )
        held_bytes = sum(stream.held_bytes for stream in streams if not stream.is_cut)
        count = sum(not stream.is_cut for stream in streams)
        # The number of streams to retain after one has been refused.
        enough = self._bounds.streams - max(self._bounds.streams // _FREED, 1)
        is_pressed = now < self._pressed_until
        is_memory_short = self._is_short()
        for since, _, stream in waiting:
            is_needed = is_pressed and count > enough
            if is_memory_short or held_bytes > self._bounds.held_bytes:
                is_needed = is_needed or stream.held_bytes > 0
            waited_seconds = now - since
            if waited_seconds > self._bounds.idle_seconds or (
                is_needed and waited_seconds > self._bounds.idle_short_seconds
            ):
                action = "sends nothing" if stream.sends else "does not read what it asked for"
                _log.warning(
                    f"a client {action}: its stream is ended",
                    peer=stream.peer,
                    seconds=round(waited_seconds),
                )
                stream.is_cut = True
                held_bytes -= stream.held_bytes
                count -= 1
                stream.cut()
