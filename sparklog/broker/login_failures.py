"""Failed logins: the delay before each is answered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from sparklog.clock import Clock

FAILURE_SECONDS = (0.1, 1.0)  # until a failed login is answered: at first, and after several
FAILURES_REMEMBERED = 4_096
_FAILURE_FORGOTTEN_SECONDS: Final = 60.0
_NAME_REMEMBERED: Final = 255


class FailureDelays:
    """The delays before failed logins are answered: longer for an address or a user with several.

    They slow down those who guess; a login that succeeds is never delayed, and no user is locked.
    Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        """(count, time of the last) of each ("address", …) and ("user", …)."""

    def next_seconds(self, address: str, user: str) -> float:
        """Notes a failure, and returns its delay."""
        with self._lock:
            most = self._note(address, user)
        shortest, longest = FAILURE_SECONDS
        return min(shortest * 2.0 ** min(most - 1, 16), longest)

    def _note(self, address: str, user: str) -> int:
        """Returns the number of recent failures of the address, or of the user if it has more."""
        now, most = self._clock.monotonic(), 0
        for key in (("address", address), ("user", user[:_NAME_REMEMBERED])):
            count, last_at = self._failures.pop(key, (0, now))
            count = count + 1 if now - last_at < _FAILURE_FORGOTTEN_SECONDS else 1
            self._failures[key] = count, now
            most = max(most, count)
        while len(self._failures) > FAILURES_REMEMBERED or (
            now - next(iter(self._failures.values()))[1] >= _FAILURE_FORGOTTEN_SECONDS
        ):
            self._failures.popitem(last=False)
        return most
