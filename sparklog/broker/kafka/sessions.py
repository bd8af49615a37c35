"""Fetch sessions (KIP-227): a consumer names its partitions once, and from then on what changes.

A session lives in the door, not in a connection, and belongs to one event loop.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sparklog import limits

Key: TypeAlias = tuple[object, int]
"""A topic, by name or id as the version has it, and a partition."""

_FIRST_EPOCH: Final = 1
_LAST_EPOCH: Final = 2**31 - 1


@dataclass(slots=True)
class Session:
    """What a client asks for; who was given records last comes last, so that all get some."""

    number: int
    epoch: int = _FIRST_EPOCH
    """Of the next request."""
    wishes: dict[Key, Any] = field(default_factory=dict)
    used_at: float = 0.0

    def move_on(self) -> None:
        """A request of this epoch has been taken."""
        self.epoch = self.epoch + 1 if self.epoch < _LAST_EPOCH else _FIRST_EPOCH
        self.used_at = time.monotonic()

    def put_last(self, key: Key) -> None:
        if key in self.wishes:
            self.wishes[key] = self.wishes.pop(key)


class Sessions:
    """Bounded: a new one takes the place of the one that was used longest ago, if that is old."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def has_room(self, more: int) -> bool:
        """Whether so many partitions more may be named, in all sessions together."""
        named = sum(len(each.wishes) for each in self._sessions.values())
        return named + more <= limits.KAFKA_FETCH_SESSION_PARTITIONS

    def find(self, number: int) -> Session | None:
        return self._sessions.get(number)

    def end(self, number: int) -> None:
        self._sessions.pop(number, None)

    def open(self, wishes: dict[Key, Any]) -> Session | None:
        """A session with those wishes; None where there are too many already."""
        if len(self._sessions) >= limits.KAFKA_FETCH_SESSIONS and not self._evict():
            return None
        while not self.has_room(len(wishes)):
            if not self._sessions or not self._evict():
                return None
        number = random.randint(1, 2**31 - 1)
        while number in self._sessions:
            number = random.randint(1, 2**31 - 1)
        session = Session(number, wishes=wishes, used_at=time.monotonic())
        self._sessions[number] = session
        return session

    def _evict(self) -> bool:
        oldest = min(self._sessions.values(), key=lambda session: session.used_at)
        if time.monotonic() - oldest.used_at < limits.KAFKA_FETCH_SESSION_KEPT_SECONDS:
            return False
        del self._sessions[oldest.number]
        return True
