"""SyncGroup (14): accepts the leader's assignment and returns each member's (KIP-345, KIP-559)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.groups.messages import GroupError, SyncReply, SyncRequest
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType

_FIRST_WITH_PROTOCOLS: Final = 5
"""The first version that requires the protocol's type and name (KIP-559)."""


@serves(14, "sync_group", max_version=5, is_blind=True, may_wait=True, needs_no_acls=True)
async def _handle(context: HandlerContext, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    if request.version >= _FIRST_WITH_PROTOCOLS and None in (
        body.protocol_type,
        body.protocol_name,
    ):
        return _fields(SyncReply(), group_code(GroupError.INCONSISTENT_GROUP_PROTOCOL))
    try:
        await request.access.check(Operation.READ, ResourceType.GROUP, body.group_id)
    except errors.NotAuthorized as error:
        return _fields(SyncReply(), code_of(error))
    group_request = SyncRequest(
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id,
        protocol_type=getattr(body, "protocol_type", None),
        protocol=getattr(body, "protocol_name", None),
        assignments={each.member_id: each.assignment for each in body.assignments},
    )
    return _reply(context.groups.sync(body.group_id, group_request))


async def _reply(waiting: Future[SyncReply]) -> Fields:
    reply = await asyncio.wrap_future(waiting)
    return _fields(reply, group_code(reply.error))


def _fields(reply: SyncReply, code: ErrorCode) -> Fields:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol,
        "assignment": reply.assignment,
    }
