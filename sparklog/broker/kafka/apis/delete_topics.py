"""DeleteTopics (20): deletes topics by name, or by id since version 6 (KIP-516)."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import topic_name_of_id


@serves(20, "delete_topics", max_version=6, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    topics = (
        [(each.name, each.topic_id) for each in body.topics]
        if hasattr(body, "topics")
        else [(name, None) for name in body.topic_names]
    )
    counts = Counter(topics)
    return {
        "throttle_time": NO_TIME,
        "responses": [
            await _delete(context, *each, is_repeated=count > 1, client=request.client)
            async for each, count in context.scheduler.iterate(counts.items())
        ],
    }


async def _delete(
    context: HandlerContext, name: str | None, topic_id: Any, *, is_repeated: bool, client: str
) -> Fields:
    code, message = ErrorCode.none, None
    try:
        if (name is None) == (topic_id is None):
            raise errors.BadRequest(reason="specify either a topic's name or its id, not both")
        if is_repeated:
            raise errors.BadRequest(reason=f"topic {name or topic_id} is named twice")
        name = name if name is not None else topic_name_of_id(context.broker, topic_id)
        delete = partial(context.broker.topics.delete, client=client)
        await context.run_blocking(WorkerPool.CHANGE, delete, name)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}
