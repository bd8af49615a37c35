"""States in which the broker refuses work, for its log, its status, its metrics and the alerts.

A state begins with the first refusal, and ends once nothing was refused for some seconds. So one
that comes and goes has one line in the log when it begins and one when it ends. Topics whose table
cannot be written are states of those topics: `LedPartitions.hold_back`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from sparklog.clock import Clock

REFUSED_SECONDS = 5.0  # without a refusal, after which work counts as accepted again

_log = structlog.get_logger("sparklog.broker")


class Work(enum.StrEnum):
    """Work that a broker may refuse."""

    WRITES = "writes"
    """Appends: no space, no rights, a read-only or silent store, or a full queue or backlog."""
    HEARTBEATS = "heartbeats"
    """Heartbeats cannot be written, so other brokers have to ask whether this one is alive."""
    CONNECTIONS = "connections"
    """Connections of Kafka clients: `kafka.max_connections` and its bound for an address."""
    STREAMS = "streams"
    """Streams of sparklog's own clients: `flight.max_streams`."""


@dataclass(slots=True)
class _State:
    reason: str
    since: float
    last_at: float


class RefusedWork:
    """The states of one broker. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.look: Callable[[], object] = lambda: None
        """Notes what would be refused now, though nothing was tried; set by the owner."""
        self._lock = threading.Lock()
        self._states: dict[Work, _State] = {}

    def note(self, work: Work, reason: str) -> None:
        """Notes a refusal, or that the next work of the kind would be refused."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._states.get(work)
            if known is not None:
                known.reason, known.last_at = reason, now
                return
            self._states[work] = _State(reason, now, now)
        _log.error(f"{work} are refused", reason=reason)

    def tick(self) -> None:
        """Ends the states in which nothing was refused lately."""
        now = self._clock.monotonic()
        with self._lock:
            over = {
                work: each
                for work, each in self._states.items()
                if now - each.last_at > REFUSED_SECONDS
            }
            for work in over:
                del self._states[work]
        for work, each in over.items():
            seconds = round(each.last_at - each.since, 1)
            _log.info(f"{work} are accepted again", refused_for_seconds=seconds)

    def states(self) -> dict[Work, str]:
        """Returns the work that is refused now, with the reasons.

        Looks again first: the thread that looks regularly may hang at the store.
        """
        self.look()
        self.tick()
        with self._lock:
            return {work: self._states[work].reason for work in Work if work in self._states}
