"""CreatePartitions (37): adds partitions to existing topics (KIP-195).

A replica assignment is checked and otherwise ignored: the brokers agree on leaders among
themselves.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.throttle import Mutations
from sparklog.broker.kafka.topics import check_assignment
from sparklog.formats import flight_messages
from sparklog.security.acl import Operation, ResourceType

_FIRST_STRICT: Final = 3
"""The first version whose clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""


@serves(37, "create_partitions", max_version=3, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    counts = Counter(each.name for each in body.topics)
    refused = await request.access.refused(
        Operation.ALTER, ResourceType.TOPIC, (name for name, count in counts.items() if count == 1)
    )
    mutations = request.mutations(first_strict=_FIRST_STRICT)
    results = [
        await _widen(
            context,
            request,
            each,
            mutations,
            is_repeated=counts[each.name] > 1,
            is_refused=each.name in refused,
        )
        async for each in context.scheduler.iterate(body.topics)
    ]
    return {"throttle_time": mutations.end(), "results": results}


async def _widen(
    context: HandlerContext,
    request: Request,
    topic: Any,
    mutations: Mutations,
    *,
    is_repeated: bool,
    is_refused: bool,
) -> Fields:
    code, message = ErrorCode.none, None
    change = flight_messages.AddPartitions(topic=topic.name, partitions=topic.count)
    try:
        if is_repeated:
            raise errors.BadRequest(reason=f"topic {topic.name} is named twice")
        if is_refused:
            raise request.access.error(Operation.ALTER, ResourceType.TOPIC, topic.name)
        context.broker.topics.check_partitions(change)
        _check_assignments(context, topic)
        if await request.access.still_refused(Operation.ALTER, ResourceType.TOPIC, (topic.name,)):
            raise request.access.error(Operation.ALTER, ResourceType.TOPIC, topic.name)
        if not request.body.validate_only:
            if mutations.has_quotas:
                mutations.check(_added(context, topic))
            add_partitions = partial(context.broker.topics.add_partitions, client=request.client)
            await context.run_blocking(WorkerPool.CHANGE, add_partitions, change)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"name": topic.name, "error_code": code, "error_message": message}


def _added(context: HandlerContext, topic: Any) -> int:
    return int(topic.count) - len(context.broker.partitions.statuses(topic.name))


def _check_assignments(context: HandlerContext, topic: Any) -> None:
    """Raises `BadAssignment` if the assignments do not match the number of new partitions."""
    added = _added(context, topic)
    if topic.assignments is not None and len(topic.assignments) != added:
        raise errors.BadAssignment(
            topic=topic.name,
            reason=f"{added} partitions are added, but {len(topic.assignments)} are assigned",
        )
    check_assignment(topic.name, [each.broker_ids for each in topic.assignments or ()])
