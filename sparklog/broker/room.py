"""Memory that threads share: who is about to decode something large waits for its turn.

A grant is whole or not at all, so that nobody waits with a part of what others need. Whoever holds
one asks for no second. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """So many bytes, granted in the order in which they are asked for.

    A grant that is larger than all of it is given when nobody holds another.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Waits until there is room for `size_bytes`, and gives it back in the end."""
        turn = None
        with self._lock:
            if self._waiting or not self._has_room(size_bytes):
                turn = threading.Lock()
                turn.acquire()
                self._waiting.append((size_bytes, turn))
            else:
                self._held_bytes += size_bytes
        if turn is not None:
            turn.acquire()  # the size is held for us when it is released
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
