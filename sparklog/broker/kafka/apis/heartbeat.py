"""Heartbeat (12): a member lives, and hears whether it has to join again."""

from __future__ import annotations

from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(12, "heartbeat", last=4)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    error = door.groups.heartbeat(
        body.group_id,
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id,
    )
    return {"throttle_time": NO_TIME, "error_code": group_code(error)}
