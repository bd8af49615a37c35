"""The memory and the producer ids that all topics of one producer share."""

from __future__ import annotations

import threading

from sparklog.client.connection import Connection
from sparklog.clock import ThreadClock
from sparklog.formats import flight_messages


class BufferPool:
    """Counts the bytes of all topics that await their acks. Thread-safe."""

    def __init__(self, limit_bytes: int, clock: ThreadClock) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._used_bytes = 0
        self._changed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_full(self) -> bool:
        return self._used_bytes >= self.limit_bytes

    def take(self, count_bytes: int) -> None:
        """Adds bytes without waiting, so the batch being filled may exceed the limit."""
        with self._changed:
            self._used_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        with self._changed:
            self._used_bytes -= count_bytes
            if not self.is_full:
                self._changed.notify_all()

    def wait_for_memory(self, deadline: float) -> bool:
        """Waits until the pool has memory; returns False at `deadline`, monotonic seconds."""
        with self._changed:
            while self.is_full:
                if self._clock.monotonic() >= deadline:
                    return False
                self._clock.wait_until(self._changed, deadline)
            return True


class ProducerIds:
    """The producer's id, and new ones for partitions that cannot continue with it. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._shared: flight_messages.ProducerIdentity | None = None

    def shared(self, *, timeout_seconds: float) -> flight_messages.ProducerIdentity:
        with self._lock:
            if self._shared is None:
                self._shared = self.fresh(timeout_seconds=timeout_seconds)
            return self._shared

    def fresh(self, *, timeout_seconds: float) -> flight_messages.ProducerIdentity:
        identity: flight_messages.ProducerIdentity = self._connection.action(
            "producers.new", timeout_seconds=timeout_seconds
        )
        return identity
