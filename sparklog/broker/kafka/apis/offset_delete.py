"""OffsetDelete (47): deletes a group's offsets for topics that it no longer uses (KIP-496)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.groups.coordinator import Errors
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka.error_codes import code_of, group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.limits import GROUP_OFFSETS_STEP
from sparklog.security.acl import Operation, ResourceType

_GROUP_ERRORS = {
    GroupError.COORDINATOR_LOAD_IN_PROGRESS,
    GroupError.COORDINATOR_NOT_AVAILABLE,
    GroupError.GROUP_ID_NOT_FOUND,
    GroupError.INVALID_GROUP_ID,
    GroupError.NON_EMPTY_GROUP,
    GroupError.NOT_COORDINATOR,
}


def _code(context: HandlerContext, topic: str, number: int, results: Errors) -> ErrorCode:
    """Returns the error for a nonexistent partition, or else the group's result."""
    try:
        count = context.broker.partitions.count(topic)
        if not 0 <= number < count:
            raise errors.UnknownPartition(topic=topic, partition=number, last=count - 1)
    except errors.Invalid as error:
        return code_of(error)
    return group_code(results[topic, number])


@serves(47, "offset_delete", max_version=0)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    try:
        await access.check(Operation.DELETE, ResourceType.GROUP, body.group_id)
    except errors.NotAuthorized as error:
        return {"error_code": code_of(error), "throttle_time": NO_TIME, "topics": ()}
    refused = await access.refused(
        Operation.READ, ResourceType.TOPIC, (each.name for each in body.topics)
    )
    partitions = [
        (topic.name, each.partition_index)
        for topic in body.topics
        if topic.name not in refused
        for each in topic.partitions
    ]
    if len(partitions) > GROUP_OFFSETS_STEP:  # takes too long for the event loop
        waiting = await context.run_blocking(
            WorkerPool.LARGE_REQUEST, context.groups.delete_offsets, body.group_id, partitions
        )
    else:
        waiting = context.groups.delete_offsets(body.group_id, partitions)
    results = await asyncio.wrap_future(waiting)
    answers = results.values() if partitions else (_error_of_group(context, body.group_id),)
    group_error = next((each for each in answers if each in _GROUP_ERRORS), None)
    topics = body.topics if group_error is None else ()
    return {
        "error_code": group_code(group_error),
        "throttle_time": NO_TIME,
        "topics": LazyArray(partial(_topic, context, results, refused), topics),
    }


def _error_of_group(context: HandlerContext, group_id: str) -> GroupError | None:
    """Returns the error for a request that names no partitions."""
    if not group_id:
        return GroupError.INVALID_GROUP_ID
    found = context.groups.describe(group_id)
    return found if isinstance(found, GroupError) else None


def _topic(
    context: HandlerContext, results: Errors, refused: Collection[str], topic: Any
) -> Fields:
    is_refused = topic.name in refused
    make = _not_authorized if is_refused else partial(_partition, context, results, topic.name)
    return {"name": topic.name, "partitions": LazyArray(make, topic.partitions)}


def _not_authorized(partition: Any) -> Fields:
    code = ErrorCode.topic_authorization_failed
    return {"partition_index": partition.partition_index, "error_code": code}


def _partition(context: HandlerContext, results: Errors, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    return {"partition_index": number, "error_code": _code(context, topic, number, results)}
