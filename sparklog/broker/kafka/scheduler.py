"""Cooperative scheduling of long work in the event loop of the Kafka listener.

Work on more than `KAFKA_LITTLE_ITEMS` items waits for a turn in one queue. In each round of the
event loop, the first task in the queue gets a turn of at most `TURN_SECONDS`; a task that needs
more time goes to the end of the queue. So a round is delayed by at most one turn, however many
connections have long work. Work on fewer items does not queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sized
from typing import TypeVar

from sparklog.clock import Clock
from sparklog.limits import KAFKA_LITTLE_ITEMS

TURN_SECONDS = 0.003  # for which one request may occupy the event loop

_T = TypeVar("_T")


class LoopScheduler:
    """Grants turns to the tasks of one event loop, in the order of their requests."""

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._queue: deque[asyncio.Future[None]] = deque()
        self._is_active = False
        """True if a turn was granted in this round of the loop, or the queue is not empty."""
        self._owner: asyncio.Task[object] | None = None
        self._turn_end = 0.0
        """When the owner's turn ends, by the clock."""

    async def iterate(self, items: Iterable[_T]) -> AsyncIterator[_T]:
        """Yields the items, and waits for another turn whenever the current one is over.

        Also waits for a first turn if there are more than `KAFKA_LITTLE_ITEMS` items, or if `items`
        has no length.
        """
        if not isinstance(items, Sized) or len(items) > KAFKA_LITTLE_ITEMS:
            await self.wait_turn()
        turn_end = self._turn_end if self._owns_turn else self._monotonic() + TURN_SECONDS
        for item in items:
            if self._monotonic() >= turn_end:
                await self.wait_turn()
                turn_end = self._turn_end
            yield item

    async def wait_turn(self) -> None:
        """Waits for a turn. Returns immediately if the task's current turn is not over."""
        if self._owns_turn and self._monotonic() < self._turn_end:
            return
        loop = asyncio.get_running_loop()
        if self._is_active:
            turn: asyncio.Future[None] = loop.create_future()
            self._queue.append(turn)
            await turn
        else:
            self._is_active = True
            loop.call_soon(self._next_round)
        self._owner = asyncio.current_task()
        self._turn_end = self._monotonic() + TURN_SECONDS

    @property
    def _owns_turn(self) -> bool:
        return self._owner is not None and self._owner is asyncio.current_task()

    def _next_round(self) -> None:
        """Grants the turn of the loop's next round to the first task still waiting."""
        self._owner = None
        self._is_active = False
        while self._queue and not self._is_active:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                self._is_active = True
        if self._is_active:
            asyncio.get_running_loop().call_soon(self._next_round)
