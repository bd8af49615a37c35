"""JoinGroup (11): become a member, and wait for the generation (KIP-345, 394, 800, 814)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future

from sparklog.broker.groups import JoinReply, JoinRequest, Protocol
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME, to_ms


@serves(11, "join_group", last=9, waits=True)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    wanted = JoinRequest(
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        client_id=request.client_id,
        client_host=request.client_host,
        session_timeout_ms=to_ms(body.session_timeout),
        rebalance_timeout_ms=to_ms(body.rebalance_timeout)
        if hasattr(body, "rebalance_timeout")
        else -1,
        protocol_type=body.protocol_type,
        protocols=tuple(Protocol(each.name, each.metadata) for each in body.protocols),
        member_id_required=request.version >= 4,
        skips_assignment=request.version >= 9,
        reason=getattr(body, "reason", None),
    )
    return _answer(door.groups.join(body.group_id, wanted), request.version)


async def _answer(waiting: Future[JoinReply], version: int) -> Fields:
    reply = await asyncio.wrap_future(waiting)
    return {
        "throttle_time": NO_TIME,
        "error_code": group_code(reply.error),
        "generation_id": reply.generation,
        "protocol_type": reply.protocol_type,
        # Null only where the version knows it.
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
