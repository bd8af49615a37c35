"""When to repeat work: after a failure of one topic or thread, and while there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

import crc32c

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.objects import SyncFailed

RETRY_MAX_SECONDS = 10.0  # between attempts after repeated failures

ENDS_THE_BROKER: Final = (errors.BrokerFenced, SyncFailed)
"""Errors after which no ack can be trusted. Any other error concerns only the work that hit it."""


def run_each(steps: Iterable[Callable[[], object]]) -> None:
    """Runs all steps even if one of them fails, and then raises the first failure.

    So work that frees space does not wait for work that needs it. An error that ends the broker is
    raised immediately.
    """
    failure: Exception | None = None
    for step in steps:
        try:
            step()
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


class RetrySchedule:
    """When to retry failed work, by name: the delay doubles each time, up to a bound."""

    def __init__(
        self,
        clock: Clock,
        *,
        first_seconds: float,
        most_seconds: float | None = None,
    ) -> None:
        self._clock = clock
        self._first_seconds = first_seconds
        bound_seconds = RETRY_MAX_SECONDS if most_seconds is None else most_seconds
        self._most_seconds = max(bound_seconds, first_seconds)
        self._failures: dict[str, tuple[int, float]] = {}
        """Consecutive failures, and the time of the next attempt in monotonic seconds, by name."""

    def is_waiting(self, name: str) -> bool:
        """Returns true if it is too early to retry."""
        found = self._failures.get(name)
        return found is not None and self._clock.monotonic() < found[1]

    def failed(self, name: str) -> None:
        """Schedules the next attempt. If many fail at once, their retries are spread out."""
        count = self._failures.get(name, (0, 0.0))[0] + 1
        doubled = self._first_seconds * 2.0 ** min(count - 1, 32)
        jitter = crc32c.crc32c(f"{name} {count}".encode()) / 2**32
        seconds = min(doubled, self._most_seconds) * (1 - jitter / 4)
        self._failures[name] = count, self._clock.monotonic() + seconds

    def succeeded(self, name: str) -> None:
        """Forgets the failures of `name`."""
        self._failures.pop(name, None)

    def retain(self, names: Collection[str]) -> None:
        """Forgets all names but these."""
        for gone in self._failures.keys() - set(names):
            self._failures.pop(gone, None)  # a worker may have removed it concurrently


class LookSchedule:
    """When to look for changes again: the pause doubles while looks find none, up to a bound."""

    def __init__(self) -> None:
        self._pause_seconds = 0.0
        self._looked_at = -float("inf")

    def is_due(self, now: float, *, first_seconds: float) -> bool:
        """Returns whether it is time for a look. `first_seconds`: the pause after a change."""
        return now - self._looked_at >= max(self._pause_seconds, first_seconds)

    def looked(self, now: float, *, found: bool, first_seconds: float, most_seconds: float) -> None:
        """Records a look, and whether it has found a change."""
        doubled = 2 * max(self._pause_seconds, first_seconds)
        self._pause_seconds = first_seconds if found else min(doubled, most_seconds)
        self._looked_at = now

    def changed(self) -> None:
        """Records a change: the next look is due after the first pause, counted from the last."""
        self._pause_seconds = 0.0


class FailureLog:
    """Reasons for failures that were logged, by name, so that the same one is not logged again."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def is_new(self, name: str, reason: str) -> bool:
        """Returns true if `name` had not failed before, or had for a different reason."""
        before = self._reasons.get(name)
        self._reasons[name] = reason
        return before != reason

    def has(self, reason: str) -> bool:
        """Returns true if any name currently fails for that reason."""
        return reason in self._reasons.values()

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def recovered(self, name: str) -> bool:
        """Records that `name` succeeds now; returns true if it had failed before."""
        return self._reasons.pop(name, None) is not None

    def retain(self, names: Collection[str]) -> None:
        """Forgets all names but these."""
        for gone in self._reasons.keys() - set(names):
            del self._reasons[gone]
