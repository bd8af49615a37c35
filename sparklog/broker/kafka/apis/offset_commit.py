"""OffsetCommit (8): note, durably, how far a group has read (KIP-320)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog.broker.coordinator import Commit, Errors
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.limits import GROUP_OFFSETS_STEP

_FIRST_THAT_KNOWS_MISSING_GROUPS: Final = 9


@serves(8, "offset_commit", last=9, overlaps=True)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    count = sum(len(topic.partitions) for topic in body.topics)
    if count > GROUP_OFFSETS_STEP:  # takes long, and others are served meanwhile
        return _answer(await door.blocking(Work.ASIDE, _commit, door, body), request)
    return _answer(_commit(door, body), request)


def _commit(door: Door, body: Any) -> Future[Errors]:
    offsets = {
        (topic.name, each.partition_index): Commit(
            offset=each.committed_offset,
            leader_epoch=getattr(each, "committed_leader_epoch", -1),
            metadata=each.committed_metadata or "",
        )
        for topic in body.topics
        for each in topic.partitions
    }
    return door.groups.commit(
        body.group_id,
        offsets,
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id_or_member_epoch,
    )


async def _answer(waiting: Future[Errors], request: Request) -> Fields:
    found = await asyncio.wrap_future(waiting)
    topics = Each(partial(_topic, found, request.version), request.body.topics)
    return {"throttle_time": NO_TIME, "topics": topics}


def _topic(found: Errors, version: int, topic: Any) -> Fields:
    partitions = Each(partial(_partition, found, version, topic.name), topic.partitions)
    return {"name": topic.name, "partitions": partitions}


def _partition(found: Errors, version: int, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    return {"partition_index": number, "error_code": _code(found[topic, number], version)}


def _code(error: GroupError | None, version: int) -> ErrorCode:
    if error is GroupError.GROUP_ID_NOT_FOUND and version < _FIRST_THAT_KNOWS_MISSING_GROUPS:
        return ErrorCode.illegal_generation
    return group_code(error)
