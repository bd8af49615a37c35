"""DeleteGroups (42): deletes groups without members, and their committed offsets (KIP-229)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from kio.schema.errors import ErrorCode

from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka.error_codes import group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType


@serves(42, "delete_groups", max_version=2)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    names = request.body.groups_names
    refused = await request.access.refused(Operation.DELETE, ResourceType.GROUP, names)
    waiting: list[Future[GroupError | None] | None] = []
    async for each in context.scheduler.iterate(names):
        if each in refused or await request.access.still_refused(
            Operation.DELETE, ResourceType.GROUP, (each,)
        ):
            waiting.append(None)
        elif context.groups.has_many_offsets(each):  # takes too long for the event loop
            waiting.append(
                await context.run_blocking(WorkerPool.LARGE_REQUEST, context.groups.delete, each)
            )
        else:
            waiting.append(context.groups.delete(each))
    codes = [
        group_code(await asyncio.wrap_future(each))
        if each is not None
        else ErrorCode.group_authorization_failed
        for each in waiting
    ]
    return {
        "throttle_time": NO_TIME,
        "results": LazyArray(_result, tuple(zip(names, codes, strict=True))),
    }


def _result(group: tuple[str, ErrorCode]) -> Fields:
    group_id, code = group
    return {"group_id": group_id, "error_code": code}
