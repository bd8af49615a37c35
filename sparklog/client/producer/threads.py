"""The threads of one topic's sender: one writes, and one per stream reads the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sparklog.client.producer.deliveries import Deliveries
from sparklog.client.producer.schedule import SendSchedule
from sparklog.clock import ThreadClock


class SenderThreads:
    """Starts the threads, and wakes the one that writes. Requires `lock`, except for `join`.

    Holds no reference to the sender, which would be a cycle.
    """

    def __init__(
        self, schedule: SendSchedule[Any], deliveries: Deliveries, clock: ThreadClock
    ) -> None:
        self.lock = threading.Lock()
        """The sender's lock."""
        self.is_signalled = False
        self.is_ending = False
        self._schedule = schedule
        self._deliveries = deliveries
        self._clock = clock
        self._changed = threading.Condition(self.lock)
        self._started: list[threading.Thread] = []
        """Every thread that may still be running, even past this package's code."""

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
        """Starts a thread that `join` waits for."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        self._started = [*(each for each in self._started if each.is_alive()), thread]
        return thread

    def notify(self) -> None:
        """Has the writing thread recompute when it should wake up."""
        self._changed.notify()

    def signal(self) -> None:
        """Has the writing thread do a round."""
        self.is_signalled = True
        self._changed.notify()

    def signal_if_ready(self) -> None:
        if self._schedule.has_ready or self._deliveries.has_callbacks or self.is_ending:
            self.signal()

    def wait_until(self, deadline: float) -> None:
        self._clock.wait_until(self._changed, deadline)

    def join(self, timeout_seconds: float) -> None:
        """Waits for all threads except the caller's, for at most this long in total."""
        deadline = self._clock.monotonic() + timeout_seconds
        with self.lock:
            threads = list(self._started)
        for each in threads:
            if each is not threading.current_thread():
                each.join(max(deadline - self._clock.monotonic(), 0.0))
