"""The budget of puts on a store that bills each of them, shared by the log and the tables.

Both need fewer puts if they wait: a flush then has the records of a longer time, as has a file of a
table. The log comes first, because producers wait for it. The tables get the puts that it leaves,
and at least half of the budget. All waits follow from the rates alone: acks slow down smoothly, and
a broker that was idle puts its next record at once.

Pure, with the time as an argument. One thread at a time flushes, and another one publishes.
"""

from __future__ import annotations

import math
from typing import Final

LOG_SHARE: Final = 0.4
"""The share of the budget at which flushes wait for as long as they may."""
TABLES_SHARE: Final = 0.5
"""The share of the budget that publishing gets however busy the log is."""
UPKEEP_SHARE: Final = 0.1
"""The share that neither of them uses: heartbeats, checkpoints, merged files."""
_MEMORY_SECONDS: Final = 2.0
"""The least time constant of the average rate of flushes."""
_MEMORY_WAITS: Final = 4
"""The least time constant, in longest waits: a shorter one would forget flushes during a wait."""
_SAVED_SECONDS: Final = 1.0
"""The time for which puts that were not made may be made up for."""


class PutBudget:
    """Spaces flushes and publications so that they stay within so many puts a second."""

    def __init__(self, puts_per_second: float, *, longest_wait_seconds: float) -> None:
        """Creates the budget of a broker.

        Args:
            puts_per_second: the budget.
            longest_wait_seconds: between two flushes; longer only if the log's share of the budget
                is less than one put in that time.
        """
        self._puts_per_second = puts_per_second
        self._log_puts_per_second = puts_per_second * LOG_SHARE
        self._longest_wait_seconds = max(longest_wait_seconds, 1 / self._log_puts_per_second)
        self._memory_seconds = max(_MEMORY_SECONDS, _MEMORY_WAITS * self._longest_wait_seconds)
        self._flushed = (-math.inf, 0.0)
        """The time of the last flush in monotonic seconds, and the rate of flushes then."""
        self._left_for_tables = 0.0
        """Puts that tables may still make, as of `_counted_at`; negative after a large topic."""
        self._counted_at = -math.inf

    def flushes_per_second(self, now: float) -> float:
        """Returns the rate of the latest flushes."""
        at, rate = self._flushed
        return rate * math.exp((at - now) / self._memory_seconds)

    def note_flush(self, now: float) -> None:
        """Counts a flush that starts."""
        self._flushed = now, self.flushes_per_second(now) + 1 / self._memory_seconds

    def flush_wait_seconds(self, now: float) -> float:
        """Returns the time until the next flush should start; negative if it is overdue.

        The wait between two flushes is proportional to their rate. A rate that would exceed the
        log's share therefore settles below it: at 5.7 flushes per second, of 20 puts and 250 ms.
        """
        # Of flushes at even intervals, the average is half of one too low right before the next.
        rate = self.flushes_per_second(now) + 0.5 / self._memory_seconds
        share = min(rate / self._log_puts_per_second, 1.0)
        return self._flushed[0] + self._longest_wait_seconds * share - now

    # -------------------------------------------------------------------------- tables

    def publish_seconds(self, puts: int, now: float) -> float:
        """Returns the time in which the budget allows so many puts to tables."""
        return puts / self._tables_per_second(now)

    def puts_for_tables(self, now: float) -> float:
        """Returns how many puts the tables may make now; some at least if the result is positive.

        Unused puts are lost after a second, so that a pause is not followed by a burst.
        """
        rate = self._tables_per_second(now)
        added = rate * min(now - self._counted_at, _SAVED_SECONDS)
        self._left_for_tables = min(self._left_for_tables + added, rate * _SAVED_SECONDS)
        self._counted_at = now
        return self._left_for_tables

    def note_published(self, puts: int) -> None:
        """Counts puts to tables."""
        self._left_for_tables -= puts

    def _tables_per_second(self, now: float) -> float:
        left = self._puts_per_second * (1 - UPKEEP_SHARE) - self.flushes_per_second(now)
        return max(left, self._puts_per_second * TABLES_SHARE)
