"""What all topics of one producer share: room for what is not acked, and its identities."""

from __future__ import annotations

import threading

from sparklog import wire
from sparklog.client.connection import Connection


class BufferPool:
    """How many bytes of all topics wait for their acks. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._room = threading.Condition()

    @property
    def is_full(self) -> bool:
        return self._used_bytes >= self.limit_bytes

    def take(self, count_bytes: int) -> None:
        """Never waits, so the limit may be passed by the batch that was filling."""
        with self._room:
            self._used_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        with self._room:
            self._used_bytes -= count_bytes
            if not self.is_full:
                self._room.notify_all()

    def wait_for_room(self, timeout_seconds: float) -> bool:
        with self._room:
            return self._room.wait_for(lambda: not self.is_full, timeout_seconds)


class Identities:
    """The producer's identity, and new ones for partitions that have to leave it. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._shared: wire.ProducerIdentity | None = None

    def shared(self, *, timeout_seconds: float) -> wire.ProducerIdentity:
        with self._lock:
            if self._shared is None:
                self._shared = self.fresh(timeout_seconds=timeout_seconds)
            return self._shared

    def fresh(self, *, timeout_seconds: float) -> wire.ProducerIdentity:
        identity: wire.ProducerIdentity = self._connection.action(
            "producers.new", timeout_seconds=timeout_seconds
        )
        return identity
