"""What fails of one topic, or of one chore, is tried again later, and ends nothing else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import crc32c

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import SyncFailed

ENDS_THE_BROKER: Final = (errors.BrokerFenced, SyncFailed)
"""After these no ack can be trusted. Any other error is of the one that it happened to."""


class Backoff:
    """When to try again what has failed, by name: after twice as long each time, up to a bound."""

    def __init__(
        self,
        clock: Clock,
        *,
        first_seconds: float,
        most_seconds: float | None = None,
    ) -> None:
        self._clock = clock
        self._first_seconds = first_seconds
        bound_seconds = limits.RETRY_MAX_SECONDS if most_seconds is None else most_seconds
        self._most_seconds = max(bound_seconds, first_seconds)
        self._failures: dict[str, tuple[int, float]] = {}
        """How often it has failed in a row, and when it is tried again (monotonic seconds)."""

    def is_waiting(self, name: str) -> bool:
        """Whether it is too early to try."""
        found = self._failures.get(name)
        return found is not None and self._clock.monotonic() < found[1]

    def failed(self, name: str) -> None:
        """It is tried again later. Where many fail at once, they do not come back together."""
        count = self._failures.get(name, (0, 0.0))[0] + 1
        doubled = self._first_seconds * 2.0 ** min(count - 1, 32)
        jitter = crc32c.crc32c(f"{name} {count}".encode()) / 2**32
        seconds = min(doubled, self._most_seconds) * (1 - jitter / 4)
        self._failures[name] = count, self._clock.monotonic() + seconds

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all but these."""
        for gone in self._failures.keys() - set(names):
            del self._failures[gone]
