"""Memory that threads share while they decode large data.

A grant is all or nothing, so that no thread waits while holding part of the memory that others
need. A thread that holds a grant must not request a second one. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DecodeMemory:
    """A byte budget, granted in the order of the requests.

    A request for more than the limit is granted once no other grant is held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Callable[[], bool]]] = deque()

    @property
    def is_short(self) -> bool:
        """True if a thread is waiting for a grant."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        """The bytes currently held."""
        return self._held_bytes

    @property
    def limit_bytes(self) -> int:
        """The maximum number of bytes held at a time, unless a single grant is larger."""
        return self._limit_bytes

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Waits until `size_bytes` are free, and holds them while the context is open."""
        turn = threading.Lock()
        turn.acquire()

        def granted() -> bool:
            turn.release()
            return True

        if not self.request(size_bytes, granted):
            turn.acquire()
        try:
            yield
        finally:
            self.release(size_bytes)

    def request(self, size_bytes: int, granted: Callable[[], bool]) -> bool:
        """Returns True if `size_bytes` are held now; otherwise `granted` is called once they are.

        It is called in the thread that releases other bytes, and must not block. It returns whether
        the bytes are still wanted; if so, they are held until they are passed to `release`.
        """
        with self._lock:
            if not self._waiting and self._has_room(size_bytes):
                self._held_bytes += size_bytes
                return True
            self._waiting.append((size_bytes, granted))
            return False

    def release(self, size_bytes: int) -> None:
        """Frees bytes that `request` has granted."""
        while ready := self._free(size_bytes):
            # Calling this method from `granted` would nest once per waiting request.
            size_bytes = sum(size for size, granted in ready if not granted())

    def _free(self, size_bytes: int) -> list[tuple[int, Callable[[], bool]]]:
        """Frees bytes, and returns the requests that are granted as a result."""
        ready: list[tuple[int, Callable[[], bool]]] = []
        with self._lock:
            self._held_bytes -= size_bytes
            while self._waiting and self._has_room(self._waiting[0][0]):
                ready.append(self._waiting.popleft())
                self._held_bytes += ready[-1][0]
        return ready

    def _has_room(self, size_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes
