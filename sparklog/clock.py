"""Time as an argument: code that reads the time or waits uses a `Clock`, so tests never sleep."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol


class Clock(Protocol):
    """Wall time for records and people, monotonic time for intervals."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed point; never goes backwards."""
        ...

    def sleep(self, seconds: float) -> None: ...


class ThreadClock(Clock, Protocol):
    """A clock for threads that wait for each other until a deadline."""

    def wait_until(self, condition: threading.Condition, deadline: float | None) -> None:
        """Waits until `condition`, which is held, is notified, or `monotonic()` reaches `deadline`.

        May return earlier; None: no deadline.
        """
        ...


def unix_seconds(clock: Clock) -> float:
    """Returns the wall time in seconds since 1970, as certificates and tokens have their ends."""
    return clock.now_us() / 1e6


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on both clocks: the monotonic one stops while a machine sleeps."""

    monotonic_seconds: float = -math.inf
    wall_us: int = 0

    @classmethod
    def now(cls, clock: Clock) -> Moment:
        return cls(clock.monotonic(), clock.now_us())

    def age_seconds(self, clock: Clock) -> float:
        """Returns the time since then. The wall clock also counts a machine's suspension."""
        since_us = clock.now_us() - self.wall_us
        return max(clock.monotonic() - self.monotonic_seconds, since_us / 1e6)


NEVER: Final = Moment()
"""Earlier than any other moment."""


class SystemClock:
    """The machine's own clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, condition: threading.Condition, deadline: float | None) -> None:
        condition.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))


class ManualClock:
    """A clock that only `advance` and `sleep` move; they wake the threads that wait for it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._start_us = now_us
        self._elapsed_us = 0
        self._waiting: Counter[threading.Condition] = Counter()
        self._lock = threading.Lock()

    def now_us(self) -> int:
        return self._start_us + self._elapsed_us

    def monotonic(self) -> float:
        return self._elapsed_us / 1e6

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait_until(self, condition: threading.Condition, deadline: float | None) -> None:
        # Counted before it reads the time: either `advance` finds it, or it sees the new time.
        with self._lock:
            self._waiting[condition] += 1
        try:
            if deadline is None or deadline > self.monotonic():
                condition.wait()
        finally:
            with self._lock:
                self._waiting -= Counter({condition: 1})

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._elapsed_us += round(seconds * 1e6)
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()
