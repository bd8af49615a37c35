"""Decides from recent flushes whether an event loop may wait for the next one.

A flush that the event loop leads itself saves two hand-overs between threads, which take longer
than flushing a few records to a fast disk. On a slow disk it would delay every connection.

Pure; `Writer` guards it.
"""

from __future__ import annotations

from typing import Final

QUICK_FLUSH_SECONDS = 0.000_5  # flushes are quick if they average less than this,
SLOW_FLUSH_SECONDS = 0.005  # and none has taken longer than this
SLOW_FLUSH_PAUSE_SECONDS = 1.0  # within this time


_WEIGHT: Final = 0.125
"""The weight of the newest flush in the average."""


class FlushPace:
    """Times of the recent flushes of a writer; not quick before the first one."""

    __slots__ = ("_average_seconds", "_slow_until")

    def __init__(self) -> None:
        self._average_seconds: float | None = None
        self._slow_until = float("-inf")

    def record(self, seconds: float, now: float) -> None:
        """Adds a flush that took `seconds` and ended at `now`, by a monotonic clock."""
        if seconds > SLOW_FLUSH_SECONDS:
            self._slow_until = now + SLOW_FLUSH_PAUSE_SECONDS
            return  # one outlier says nothing about flushes after the pause
        if self._average_seconds is None:
            self._average_seconds = seconds
        else:
            self._average_seconds += _WEIGHT * (seconds - self._average_seconds)

    def is_quick(self, now: float) -> bool:
        """Returns true if the next small flush will likely take under `QUICK_FLUSH_SECONDS`."""
        average_seconds = self._average_seconds
        return (
            average_seconds is not None
            and average_seconds < QUICK_FLUSH_SECONDS
            and now >= self._slow_until
        )
