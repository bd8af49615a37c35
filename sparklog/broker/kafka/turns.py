"""Long work in the event loop, in turns, so that nobody waits long for it.

Whoever has kept the loop for a turn stands in one line with all others that have: of them one goes
on each time that the loop comes round, however many there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from sparklog.limits import KAFKA_TURN_SECONDS

_T = TypeVar("_T")


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()

    async def over(self, items: Iterable[_T]) -> AsyncIterator[_T]:
        """The items, with a pause between two where the loop was kept for too long."""
        ends = time.monotonic() + KAFKA_TURN_SECONDS
        for item in items:
            yield item
            if time.monotonic() >= ends:
                await self.pause()
                ends = time.monotonic() + KAFKA_TURN_SECONDS

    async def pause(self) -> None:
        """Lets the others go on, and then one of those who pause."""
        async with self._line:
            await asyncio.sleep(0)
