"""Fetch sessions (KIP-227): a consumer names its partitions once, and then only the changes.

A session belongs to the listener and to a user, not to a connection. Sessions are used in one event
loop.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sparklog.clock import Clock

FETCH_SESSIONS = 1_000  # Kafka's max.incremental.fetch.session.cache.slots
FETCH_SESSION_PARTITIONS = 100_000  # of all sessions together
FETCH_SESSION_KEPT_SECONDS = 120.0  # for which an idle session is not evicted

Key: TypeAlias = tuple[object, int]
"""A topic (name or id, depending on the request's version) and a partition."""

_FIRST_EPOCH: Final = 1
_LAST_EPOCH: Final = 2**31 - 1
_SESSION_IDS: Final = 2**31
"""A session id is a positive int32."""


@dataclass(slots=True)
class FetchSession:
    """The partitions of one consumer, in the order in which they are read.

    Partitions that have just returned records move to the end, so that each gets its share.
    """

    session_id: int
    principal: str
    """The user that has opened it; no other one can use it."""
    epoch: int = _FIRST_EPOCH
    """The epoch that the next request must carry."""
    partitions: dict[Key, Any] = field(default_factory=dict)
    last_used_seconds: float = 0.0
    """By the monotonic clock."""

    def advance(self, now_seconds: float) -> None:
        """Moves to the epoch of the next request. The last epoch wraps to 1: 0 is reserved."""
        self.epoch = self.epoch + 1 if self.epoch < _LAST_EPOCH else _FIRST_EPOCH
        self.last_used_seconds = now_seconds

    def move_last(self, key: Key) -> None:
        """Moves a partition to the end, if the session contains it."""
        if key in self.partitions:
            self.partitions[key] = self.partitions.pop(key)


class FetchSessions:
    """All fetch sessions of a listener, bounded in number and in partitions.

    At either limit, a new session replaces the least recently used one, if that has been idle for
    at least `FETCH_SESSION_KEPT_SECONDS`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[int, FetchSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def has_capacity(self, more_partitions: int) -> bool:
        """Returns whether the sessions together can hold this many more partitions."""
        count = sum(len(session.partitions) for session in self._sessions.values())
        return count + more_partitions <= FETCH_SESSION_PARTITIONS

    def find(self, session_id: int, principal: str) -> FetchSession | None:
        """Returns a session of this user."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.principal == principal else None

    def advance(self, session: FetchSession) -> None:
        """Moves a session to the epoch of its next request."""
        session.advance(self._clock.monotonic())

    def close(self, session_id: int, principal: str) -> None:
        """Closes a session, if this user has it."""
        if self.find(session_id, principal) is not None:
            del self._sessions[session_id]

    def open(self, partitions: dict[Key, Any], principal: str) -> FetchSession | None:
        """Returns a new session with these partitions, or None if there is no capacity for it."""
        if len(self._sessions) >= FETCH_SESSIONS and not self._evict():
            return None
        while not self.has_capacity(len(partitions)):
            if not self._sessions or not self._evict():
                return None
        session_id = random.randrange(1, _SESSION_IDS)
        while session_id in self._sessions:
            session_id = random.randrange(1, _SESSION_IDS)
        session = FetchSession(
            session_id, principal, partitions=partitions, last_used_seconds=self._clock.monotonic()
        )
        self._sessions[session_id] = session
        return session

    def _evict(self) -> bool:
        """Closes the least recently used session. Returns False if it was used too recently."""
        oldest = min(self._sessions.values(), key=lambda session: session.last_used_seconds)
        idle_seconds = self._clock.monotonic() - oldest.last_used_seconds
        if idle_seconds < FETCH_SESSION_KEPT_SECONDS:
            return False
        del self._sessions[oldest.session_id]
        return True
