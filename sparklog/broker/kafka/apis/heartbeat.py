"""Heartbeat (12): keeps a member in its group; the reply says whether it must rejoin."""

from __future__ import annotations

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType


@serves(12, "heartbeat", max_version=4, is_blind=True, needs_no_acls=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    try:
        await request.access.check(Operation.READ, ResourceType.GROUP, body.group_id)
    except errors.NotAuthorized as error:
        return {"throttle_time": NO_TIME, "error_code": code_of(error)}
    failure = context.groups.heartbeat(
        body.group_id,
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id,
    )
    return {"throttle_time": NO_TIME, "error_code": group_code(failure)}
