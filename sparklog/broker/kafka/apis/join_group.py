"""JoinGroup (11): joins a group and waits for its next generation (KIP-345, 394, 800, 814)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.groups.messages import JoinReply, JoinRequest, MemberProtocol
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME, to_ms
from sparklog.security.acl import Operation, ResourceType


@serves(11, "join_group", max_version=9, is_blind=True, may_wait=True, needs_no_acls=True)
async def _handle(context: HandlerContext, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    try:
        await request.access.check(Operation.READ, ResourceType.GROUP, body.group_id)
    except errors.NotAuthorized as error:
        return _fields(JoinReply(member_id=""), code_of(error), request.version)
    group_request = JoinRequest(
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        client_id=request.client_id,
        client_host=request.client_host,
        session_timeout_ms=to_ms(body.session_timeout),
        rebalance_timeout_ms=to_ms(body.rebalance_timeout)
        if hasattr(body, "rebalance_timeout")
        else -1,
        protocol_type=body.protocol_type,
        protocols=tuple(MemberProtocol(each.name, each.metadata) for each in body.protocols),
        member_id_required=request.version >= 4,
        skips_assignment=request.version >= 9,
        reason=getattr(body, "reason", None),
        is_gone=request.is_gone,
    )
    return _reply(context.groups.join(body.group_id, group_request), request.version)


async def _reply(waiting: Future[JoinReply], version: int) -> Fields:
    reply = await asyncio.wrap_future(waiting)
    return _fields(reply, group_code(reply.error), version)


def _fields(reply: JoinReply, code: ErrorCode, version: int) -> Fields:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "generation_id": reply.generation,
        "protocol_type": reply.protocol_type,
        # Nullable since version 7.
        "protocol_name": reply.protocol if version >= 7 else reply.protocol or "",
        "leader": reply.leader,
        "skip_assignment": reply.skip_assignment,
        "member_id": reply.member_id,
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "metadata": each.metadata,
            }
            for each in reply.members
        ],
    }
