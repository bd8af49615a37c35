"""DeleteGroups (42): groups without members, with all that they have committed (KIP-229)."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(42, "delete_groups", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    names = request.body.groups_names
    waiting = []
    async for each in door.turns.over(names):
        if door.groups.has_many_offsets(each):  # takes long, and others are served meanwhile
            waiting.append(await door.blocking(Work.ASIDE, door.groups.delete, each))
        else:
            waiting.append(door.groups.delete(each))
    codes = [group_code(await asyncio.wrap_future(each)) for each in waiting]
    return {
        "throttle_time": NO_TIME,
        "results": Each(_result, tuple(zip(names, codes, strict=True))),
    }


def _result(found: tuple[str, ErrorCode]) -> Fields:
    group_id, code = found
    return {"group_id": group_id, "error_code": code}
