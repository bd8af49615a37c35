"""DeleteGroups (42): groups without members, with all that they have committed (KIP-229)."""

from __future__ import annotations

import asyncio

from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(42, "delete_groups", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    waiting = [(each, door.groups.delete(each)) for each in request.body.groups_names]
    return {
        "throttle_time": NO_TIME,
        "results": [
            {"group_id": each, "error_code": group_code(await asyncio.wrap_future(future))}
            for each, future in waiting
        ],
    }
