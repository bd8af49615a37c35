"""DeleteTopics (20): deletes topics by name, or by id since version 6 (KIP-516).

A client that may not describe a topic learns nothing about it, except that an id exists. A client
that may describe a topic but not delete it learns whether the topic exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.throttle import Mutations
from sparklog.broker.kafka.topics import known_name, unknown_id
from sparklog.security.acl import Operation, ResourceType

_FIRST_STRICT: Final = 5
"""The first version whose clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


@serves(20, "delete_topics", max_version=6, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    topics = (
        [(each.name, each.topic_id) for each in body.topics]
        if hasattr(body, "topics")
        else [(name, None) for name in body.topic_names]
    )
    counts = Counter(topics)
    names = {
        (name, topic_id): name if name is not None else known_name(context.broker, topic_id)
        for name, topic_id in counts
    }
    judged = _Judged(
        hidden=await access.refused(
            Operation.DESCRIBE,
            ResourceType.TOPIC,
            filter(None, names.values()),
            or_cluster=Operation.DELETE,
        ),
        refused=await access.refused(
            Operation.DELETE,
            ResourceType.TOPIC,
            filter(None, names.values()),
            or_cluster=Operation.DELETE,
        ),
    )
    mutations = request.mutations(first_strict=_FIRST_STRICT)
    responses = [
        await _delete(
            context, request, *each, names[each], judged, mutations, is_repeated=count > 1
        )
        async for each, count in context.scheduler.iterate(counts.items())
    ]
    return {"throttle_time": mutations.end(), "responses": responses}


class _Judged(NamedTuple):
    """The names of topics that the client may not describe, and of those it may not delete."""

    hidden: Collection[str]
    refused: Collection[str]


async def _delete(
    context: HandlerContext,
    request: Request,
    name: str | None,
    topic_id: Any,
    found: str | None,
    judged: _Judged,
    mutations: Mutations,
    *,
    is_repeated: bool,
) -> Fields:
    """Deletes a topic. `found`: its name, which has been judged; None if no topic had that id."""
    broker = context.broker
    code, message = ErrorCode.none, None
    try:
        if (name is None) == (topic_id is None):
            raise errors.BadRequest(reason="specify either a topic's name or its id, not both")
        if is_repeated:
            raise errors.BadRequest(reason=f"topic {name or topic_id} is named twice")
        if found is None or (name is None and known_name(broker, topic_id) != found):
            raise unknown_id(topic_id)
        is_hidden = found in judged.hidden
        if found in judged.refused or (is_hidden and name is not None):
            if name is not None and not is_hidden and not broker.topics.exists(found):
                raise errors.UnknownTopic(topic=found)
            name = name if is_hidden else found
            error_name = name if name is not None else str(topic_id)
            raise request.access.error(Operation.DELETE, ResourceType.TOPIC, error_name)
        if await request.access.still_refused(
            Operation.DELETE, ResourceType.TOPIC, (found,), or_cluster=Operation.DELETE
        ):
            error_name = name if name is not None else str(topic_id)
            raise request.access.error(Operation.DELETE, ResourceType.TOPIC, error_name)
        name = found
        if mutations.has_quotas:
            mutations.check(len(broker.partitions.statuses(found)))
        delete = partial(broker.topics.delete, client=request.client)
        await context.run_blocking(WorkerPool.CHANGE, delete, found)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}
