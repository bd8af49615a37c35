"""How much memory requests and replies may take: of a connection, and of all together."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """So many bytes. Who wants more than is left waits, in turn; it belongs to one event loop.

    Who wants more than there are in all waits until nobody holds anything.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def take(self, size: int) -> None:
        """Returns when there is room."""
        if not self._waiting and self._has_room(size):
            self._held_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self.give(size if turn.done() and not turn.cancelled() else 0)
            raise

    def give(self, size: int) -> None:
        """Back, for others."""
        self._held_bytes -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._has_room(wanted):
                    return
                self._held_bytes += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def _has_room(self, size: int) -> bool:
        return not self._held_bytes or self._held_bytes + size <= self._limit_bytes
