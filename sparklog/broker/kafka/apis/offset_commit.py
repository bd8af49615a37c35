"""OffsetCommit (8): stores the offsets of a group, and replies when they are durable (KIP-320)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog.broker.groups.coordinator import Commit, Errors
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka.error_codes import group_code, noted
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.limits import GROUP_OFFSETS_STEP
from sparklog.security.acl import Operation, ResourceType

_FIRST_WITH_GROUP_NOT_FOUND: Final = 9


@serves(8, "offset_commit", max_version=9, is_pipelined=True)
async def _handle(context: HandlerContext, request: Request) -> Reply | Awaitable[Reply]:
    body, access = request.body, request.access
    if await access.refused(Operation.READ, ResourceType.GROUP, (body.group_id,)):
        make = partial(_topic_with_code, ErrorCode.group_authorization_failed)
        return {"throttle_time": NO_TIME, "topics": LazyArray(make, body.topics)}
    refused = await access.refused(
        Operation.READ, ResourceType.TOPIC, (each.name for each in body.topics)
    )
    count = sum(len(topic.partitions) for topic in body.topics)
    if count > GROUP_OFFSETS_STEP:  # takes too long for the event loop
        waiting = await context.run_blocking(
            WorkerPool.LARGE_REQUEST, _commit, context, body, refused
        )
        return _reply(waiting, request, refused)
    return _reply(_commit(context, body, refused), request, refused)


def _commit(context: HandlerContext, body: Any, refused: Collection[str]) -> Future[Errors]:
    offsets = {
        (topic.name, each.partition_index): Commit(
            offset=each.committed_offset,
            leader_epoch=getattr(each, "committed_leader_epoch", -1),
            metadata=each.committed_metadata or "",
        )
        for topic in body.topics
        if topic.name not in refused
        for each in topic.partitions
    }
    return context.groups.commit(
        body.group_id,
        offsets,
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id_or_member_epoch,
    )


async def _reply(waiting: Future[Errors], request: Request, refused: Collection[str]) -> Fields:
    results = await asyncio.wrap_future(waiting)
    topics = LazyArray(partial(_topic, results, request.version, refused), request.body.topics)
    return {"throttle_time": NO_TIME, "topics": topics}


def _topic_with_code(code: ErrorCode, topic: Any) -> Fields:
    def make(partition: Any) -> Fields:
        return {"partition_index": partition.partition_index, "error_code": code}

    return {"name": topic.name, "partitions": LazyArray(make, topic.partitions)}


def _topic(results: Errors, version: int, refused: Collection[str], topic: Any) -> Fields:
    if topic.name in refused:
        return _topic_with_code(ErrorCode.topic_authorization_failed, topic)
    partitions = LazyArray(partial(_partition, results, version, topic.name), topic.partitions)
    return {"name": topic.name, "partitions": partitions}


def _partition(results: Errors, version: int, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    return {"partition_index": number, "error_code": _code(results[topic, number], version)}


def _code(error: GroupError | None, version: int) -> ErrorCode:
    if error is GroupError.GROUP_ID_NOT_FOUND and version < _FIRST_WITH_GROUP_NOT_FOUND:
        return noted(ErrorCode.illegal_generation)
    return group_code(error)
