"""SyncGroup (14): give, as the leader, or get what a member is to read (KIP-345, KIP-559)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future

from sparklog.broker.groups import SyncReply, SyncRequest
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(14, "sync_group", last=5)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    wanted = SyncRequest(
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id,
        protocol_type=getattr(body, "protocol_type", None),
        protocol=getattr(body, "protocol_name", None),
        assignments={each.member_id: each.assignment for each in body.assignments},
    )
    return _answer(door.groups.sync(body.group_id, wanted))


async def _answer(waiting: Future[SyncReply]) -> Fields:
    reply = await asyncio.wrap_future(waiting)
    return {
        "throttle_time": NO_TIME,
        "error_code": group_code(reply.error),
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol,
        "assignment": reply.assignment,
    }
