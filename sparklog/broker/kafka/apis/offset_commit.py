"""OffsetCommit (8): note, durably, how far a group has read (KIP-320)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.coordinator import Commit, Errors
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_FIRST_THAT_KNOWS_MISSING_GROUPS: Final = 9


@serves(8, "offset_commit", last=9, overlaps=True)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    offsets = {
        (topic.name, each.partition_index): Commit(
            offset=each.committed_offset,
            leader_epoch=getattr(each, "committed_leader_epoch", -1),
            metadata=each.committed_metadata or "",
        )
        for topic in body.topics
        for each in topic.partitions
    }
    waiting = door.groups.commit(
        body.group_id,
        offsets,
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id_or_member_epoch,
    )
    return _answer(waiting, request)


async def _answer(waiting: Future[Errors], request: Request) -> Fields:
    found = await asyncio.wrap_future(waiting)
    return {
        "throttle_time": NO_TIME,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": each.partition_index,
                        "error_code": _code(
                            found[topic.name, each.partition_index], request.version
                        ),
                    }
                    for each in topic.partitions
                ],
            }
            for topic in request.body.topics
        ],
    }


def _code(error: GroupError | None, version: int) -> ErrorCode:
    if error is GroupError.GROUP_ID_NOT_FOUND and version < _FIRST_THAT_KNOWS_MISSING_GROUPS:
        return ErrorCode.illegal_generation
    return group_code(error)
