"""OffsetDelete (47): forget what a group has committed of topics it has left (KIP-496)."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.coordinator import Errors
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import code_of, group_code
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_OF_THE_GROUP = {
    GroupError.COORDINATOR_LOAD_IN_PROGRESS,
    GroupError.COORDINATOR_NOT_AVAILABLE,
    GroupError.GROUP_ID_NOT_FOUND,
    GroupError.NON_EMPTY_GROUP,
    GroupError.NOT_COORDINATOR,
}


def _code(door: Door, topic: str, number: int, found: Errors) -> ErrorCode:
    """What is not there is not there; with a topic its offsets have gone."""
    try:
        door.core.place(topic, number)
    except errors.Invalid as error:
        return code_of(error)
    return group_code(found[topic, number])


@serves(47, "offset_delete", last=0)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    places = [
        (topic.name, each.partition_index) for topic in body.topics for each in topic.partitions
    ]
    found = await asyncio.wrap_future(door.groups.forget(body.group_id, places))
    whole = next((each for each in found.values() if each in _OF_THE_GROUP), None)
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": each.partition_index,
                    "error_code": _code(door, topic.name, each.partition_index, found),
                }
                for each in topic.partitions
            ],
        }
        for topic in body.topics
    ]
    return {
        "error_code": group_code(whole),
        "throttle_time": NO_TIME,
        "topics": topics if whole is None else [],
    }
