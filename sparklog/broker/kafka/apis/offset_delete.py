"""OffsetDelete (47): forget what a group has committed of topics it has left (KIP-496)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.coordinator import Errors
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import code_of, group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.limits import GROUP_OFFSETS_STEP

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
    if len(places) > GROUP_OFFSETS_STEP:  # takes long, and others are served meanwhile
        waiting = await door.blocking(Work.ASIDE, door.groups.forget, body.group_id, places)
    else:
        waiting = door.groups.forget(body.group_id, places)
    found = await asyncio.wrap_future(waiting)
    whole = next((each for each in found.values() if each in _OF_THE_GROUP), None)
    topics = body.topics if whole is None else ()
    return {
        "error_code": group_code(whole),
        "throttle_time": NO_TIME,
        "topics": Each(partial(_topic, door, found), topics),
    }


def _topic(door: Door, found: Errors, topic: Any) -> Fields:
    partitions = Each(partial(_partition, door, found, topic.name), topic.partitions)
    return {"name": topic.name, "partitions": partitions}


def _partition(door: Door, found: Errors, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    return {"partition_index": number, "error_code": _code(door, topic, number, found)}
