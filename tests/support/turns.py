"""Work of an event loop that has to let others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.clock import SystemClock

_T = TypeVar("_T")


def in_turns(work: Callable[[LoopScheduler], Awaitable[_T]]) -> tuple[_T, int]:
    """Returns the result, and the turns of the event loop that others had meanwhile."""

    async def run() -> tuple[_T, int]:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(count_turns())
        found = await work(LoopScheduler(SystemClock()))
        others.cancel()
        return found, turns

    return asyncio.run(run())
