"""States in which the broker refuses work, for its log, its status, its metrics and the alerts.

A state begins with the first refusal, and ends once nothing has been refused for some seconds. So
an intermittent one is logged once when it begins and once when it ends. A table that cannot be
written is a state of its topic instead: `LedPartitions.hold_back`.
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
    """Appends: no space, no permission, a read-only or silent store, or a full queue or backlog."""
    HEARTBEATS = "heartbeats"
    """Heartbeats cannot be written, so other brokers have to ask whether this one is alive."""
    CONNECTIONS = "connections"
    """Connections from Kafka clients: `kafka.max_connections` and its per-address limit."""
    LOGINS = "logins"
    """Logins of Kafka clients: the security state of the root cannot be read. Or logins by OAuth:
    the keys of the issuer cannot be fetched."""
    REQUESTS = "requests"
    """Requests of all clients, if ACLs are enforced: the security state cannot be read."""
    STREAMS = "streams"
    """Streams from sparklog's own clients: `flight.max_streams`."""
    AUDIT_LINES = "audit_lines"
    """Lines of the audit file, which cannot be written."""


@dataclass(slots=True)
class _State:
    reason: str
    since: float
    last_at: float


class RefusedWork:
    """The states of one broker. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: tuple[Callable[[], object], ...] = ()
        self._lock = threading.Lock()
        self._states: dict[Work, _State] = {}

    def watch(self, *parts: Callable[[], object]) -> None:
        """Sets functions that note work which would be refused now, even if none is attempted."""
        self._watched = parts

    def note(self, work: Work, reason: str) -> None:
        """Notes a refusal, or that the next work of this kind would be refused."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._states.get(work)
            if known is not None:
                known.reason, known.last_at = reason, now
                return
            self._states[work] = _State(reason, now, now)
        _log.error(f"{work} are refused", reason=reason)

    def tick(self) -> None:
        """Ends the states in which nothing has been refused recently."""
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
        """Returns the work that is currently refused, with the reasons.

        Checks the watched parts first: the thread that does so regularly may be blocked by the
        store.
        """
        for note_if_refused in self._watched:
            note_if_refused()
        self.tick()
        with self._lock:
            return {work: self._states[work].reason for work in Work if work in self._states}
