"""The limit on frames without data, which cost the server work and the client nothing."""

from __future__ import annotations

from typing import Final

from sparklog.broker.flight.grpc import http2
from sparklog.clock import Clock

_IDLE_FRAMES: Final = 2_000
_IDLE_FRAMES_SECONDS: Final = 1.0
_IDLE_FRAMES_ANSWERED: Final = 3
"""The frames without data that each frame of a response permits: a ping, and updates of its two
windows.
"""


class IdleFrames:
    """The frames without data of one connection, counted by its reading thread."""

    __slots__ = ("_allowed_used", "_clock", "_count", "_since", "answered")

    def __init__(self, clock: Clock) -> None:
        self.answered = 0
        """The response frames sent so far; guarded by the connection's lock."""
        self._clock = clock
        self._since = clock.monotonic()
        self._count = self._allowed_used = 0

    def add(self, work: int = 1) -> None:
        """Counts a frame without data. Raises `ProtocolError` if there are too many per second.

        A frame that is more work than others counts as several: one with many settings, or one
        while there are many calls. Each response frame permits a few more, at any time, because
        gRPC's clients may answer each.
        """
        if self._allowed_used < _IDLE_FRAMES_ANSWERED * self.answered:
            self._allowed_used += work
            return
        self._count += work
        if self._count > _IDLE_FRAMES:
            now = self._clock.monotonic()
            if now - self._since < _IDLE_FRAMES_SECONDS:
                raise http2.ProtocolError(http2.ENHANCE_YOUR_CALM, "too many frames without data")
            self._count, self._since = 0, now
