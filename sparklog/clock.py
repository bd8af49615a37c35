"""Time as an argument: whoever needs to know or wait asks a `Clock`, so no test has to sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records and people, monotonic time for intervals."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when it is told to; `sleep` moves it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._start_us = now_us
        self._elapsed_us = 0

    def now_us(self) -> int:
        return self._start_us + self._elapsed_us

    def monotonic(self) -> float:
        return self._elapsed_us / 1e6

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._elapsed_us += round(seconds * 1e6)
