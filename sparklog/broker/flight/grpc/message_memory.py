"""Memory for large incoming messages, shared by all connections of a server."""

from __future__ import annotations

import threading
from typing import Protocol


class Receiver(Protocol):
    """A call that receives a large message, and is granted memory for it in steps."""

    is_dead: bool
    granted: int
    """The granted bytes of the message being received."""
    held_bytes: int
    """The bytes of this memory that the call holds."""

    @property
    def lock(self) -> threading.Lock:
        """Held while `granted` and `held_bytes` change."""
        ...

    def next_step(self, *, is_ample: bool) -> int:
        """Returns the bytes to grant next; 0 for none. Requires the lock.

        `is_ample`: the step may exceed the bytes that have arrived.
        """
        ...

    def on_grant(self) -> None:
        """Called after a grant, with no lock held."""
        ...


class MessageMemory:
    """The memory for large messages while they are received and read. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._waiting: dict[Receiver, None] = {}
        self._overdrawn: Receiver | None = None
        """The call that may exceed the limit, up to the end of its message."""

    @property
    def is_short(self) -> bool:
        """True if a call waits for memory."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        """The bytes currently granted."""
        return self._held_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    def request_step(self, call: Receiver) -> None:
        """Grants the next step of a message, now or when memory is released."""
        with self._lock:
            # A message that has begun takes precedence over messages that have not.
            is_granted = (not self._waiting or call.granted > 0) and self._grant(call)
            if is_granted:
                self._waiting.pop(call, None)
            elif not call.is_dead:
                self._waiting[call] = None
        if is_granted:
            call.on_grant()

    def _grant(self, call: Receiver) -> bool:
        with call.lock:
            size = call.next_step(is_ample=True)
            if self._held_bytes + size > self._limit_bytes // 2:
                # Half of the memory is kept for bytes that have arrived.
                size = call.next_step(is_ample=False)
            if size and self._held_bytes + size > self._limit_bytes:
                if self._overdrawn is None:
                    self._overdrawn = call
                elif self._overdrawn is not call or not call.granted:
                    return False
            self._held_bytes += size
            call.held_bytes += size
            call.granted += size
            return True

    def release(self, size: int, closed: Receiver | None = None) -> None:
        """Returns the memory of a message that was read, or of a call that has ended."""
        granted_calls = []
        with self._lock:
            self._held_bytes -= size
            if closed is not None:
                self._waiting.pop(closed, None)
            if self._overdrawn is not None and (
                self._overdrawn.is_dead or not self._overdrawn.held_bytes
            ):
                self._overdrawn = None
            while self._waiting:
                call = next(iter(self._waiting))
                if not self._grant(call):
                    break
                del self._waiting[call]
                granted_calls.append(call)
        for call in granted_calls:
            call.on_grant()
