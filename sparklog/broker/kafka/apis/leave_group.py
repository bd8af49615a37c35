"""LeaveGroup (13): ends one or more memberships, static ones included (KIP-345, KIP-800)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future

from sparklog import errors
from sparklog.broker.groups.messages import Leaver, LeaveReply
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType


@serves(13, "leave_group", max_version=5, is_blind=True, needs_no_acls=True)
async def _handle(context: HandlerContext, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    try:
        await request.access.check(Operation.READ, ResourceType.GROUP, body.group_id)
    except errors.NotAuthorized as error:
        return {"throttle_time": NO_TIME, "error_code": code_of(error), "members": ()}
    leavers = [
        Leaver(
            member_id=each.member_id,
            instance_id=getattr(each, "group_instance_id", None),
            reason=getattr(each, "reason", None),
        )
        for each in getattr(body, "members", (body,))
    ]
    return _reply(context.groups.leave(body.group_id, leavers), request.version)


async def _reply(waiting: Future[LeaveReply], version: int) -> Fields:
    reply = await asyncio.wrap_future(waiting)
    error = reply.error
    if error is None and version < 3 and reply.members:
        error = reply.members[0].error
    return {
        "throttle_time": NO_TIME,
        "error_code": group_code(error),
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "error_code": group_code(each.error),
            }
            for each in reply.members
        ],
    }
