"""DeleteTopics (20): by name, or by id since version 6 (KIP-516)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import name_of_id


@serves(20, "delete_topics", last=6)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    wanted = (
        [(each.name, each.topic_id) for each in body.topics]
        if hasattr(body, "topics")
        else [(name, None) for name in body.topic_names]
    )
    counts = Counter(wanted)
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _delete(door, *each, twice=count > 1)
            async for each, count in door.turns.over(counts.items())
        ],
    }


async def _delete(door: Door, name: str | None, topic_id: Any, *, twice: bool) -> Fields:
    code, message = ErrorCode.none, None
    try:
        if (name is None) == (topic_id is None):
            raise errors.BadRequest(reason="a topic is named, or told by its id")
        if twice:
            raise errors.BadRequest(reason=f"topic {name or topic_id} is named twice")
        name = name if name is not None else name_of_id(door.core, topic_id)
        await door.blocking(Work.CHANGE, door.core.delete_topic, name)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}
