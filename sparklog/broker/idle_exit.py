"""The exit of a broker that was started on demand, once no client has called it for long enough.

Before it stops, it publishes the records that wait: a large batch takes longer than a stop may, and
the next broker would have to start it over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sparklog.clock import Clock


class Calls(Protocol):
    """The calls of clients to a listener."""

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        ...

    @property
    def open_calls(self) -> int:
        """The number of calls that are not over."""
        ...


class IdleExit:
    """Decides when a broker is idle. One caller at a time."""

    def __init__(
        self,
        *,
        after_seconds: float,
        clock: Clock,
        publish_all: Callable[[], bool],
        stop_soon: Callable[[str], None],
    ) -> None:
        """Begins the idle time.

        Args:
            after_seconds: the time without a call after which the broker stops; 0: never.
            clock: the broker's clock.
            publish_all: requests to publish all records that wait; returns whether there are any.
            stop_soon: stops the broker for a reason.
        """
        self._after_seconds = after_seconds
        self._clock = clock
        self._publish_all = publish_all
        self._stop_soon = stop_soon
        self._busy_at = clock.monotonic()
        self._calls = -1

    def tick(self, flight: Calls) -> bool:
        """Returns whether the broker is idle, and stops; publishes first if it has to."""
        now = self._clock.monotonic()
        if flight.calls != self._calls or flight.open_calls:
            self._busy_at, self._calls = now, flight.calls
        idle_seconds = now - self._busy_at
        if not 0 < self._after_seconds < idle_seconds or self._publish_all():
            return False
        self._stop_soon(f"no client for {idle_seconds:.0f} s")
        return True
