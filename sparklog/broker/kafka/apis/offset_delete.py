"""OffsetDelete (47): deletes a group's offsets for topics that it no longer uses (KIP-496)."""

from __future__ import annotations

import asyncio
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
    body = request.body
    partitions = [
        (topic.name, each.partition_index) for topic in body.topics for each in topic.partitions
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
        "topics": LazyArray(partial(_topic, context, results), topics),
    }


def _error_of_group(context: HandlerContext, group_id: str) -> GroupError | None:
    """Returns the error for a request that names no partitions."""
    if not group_id:
        return GroupError.INVALID_GROUP_ID
    found = context.groups.describe(group_id)
    return found if isinstance(found, GroupError) else None


def _topic(context: HandlerContext, results: Errors, topic: Any) -> Fields:
    partitions = LazyArray(partial(_partition, context, results, topic.name), topic.partitions)
    return {"name": topic.name, "partitions": partitions}


def _partition(context: HandlerContext, results: Errors, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    return {"partition_index": number, "error_code": _code(context, topic, number, results)}
