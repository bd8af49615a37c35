"""Memory that threads share while they decode large data.

A grant is whole or not at all, so that no thread waits while it holds a part of the memory that
others need. A thread that holds a grant must not ask for a second one. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class DecodeMemory:
    """A number of bytes, granted in the order of the requests.

    A request for more than all of it is granted once no other grant is held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def is_short(self) -> bool:
        """True if a thread waits for a grant."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        """The bytes that are held now."""
        return self._held_bytes

    @property
    def limit_bytes(self) -> int:
        """The bytes that may be held at a time, unless one grant alone is larger."""
        return self._limit_bytes

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Waits until `size_bytes` are free, and holds them while the context is open."""
        turn = None
        with self._lock:
            if self._waiting or not self._has_room(size_bytes):
                turn = threading.Lock()
                turn.acquire()
                self._waiting.append((size_bytes, turn))
            else:
                self._held_bytes += size_bytes
        if turn is not None:
            turn.acquire()  # released once the bytes are held for this thread
        try:
            yield
        finally:
            with self._lock:
                self._held_bytes -= size_bytes
                while self._waiting and self._has_room(self._waiting[0][0]):
                    size, next_turn = self._waiting.popleft()
                    self._held_bytes += size
                    next_turn.release()

    def _has_room(self, size_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes
