"""DeleteRecords (21): moves the log start of partitions to offsets (KIP-107, KIP-204)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.limits import KAFKA_WAIT_SECONDS

_NOWHERE: Final = -1
_LOOK_FIRST_SECONDS: Final = 0.01
_LOOK_MOST_SECONDS: Final = 0.5
"""How often it is looked whether records are published that are to be deleted."""


@serves(21, "delete_records", last=2, waits=True)
async def _handle(door: Door, request: Request) -> Reply:
    timeout_seconds = min(request.body.timeout.total_seconds(), KAFKA_WAIT_SECONDS)
    deadline = time.monotonic() + timeout_seconds
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _delete(door, topic, deadline, timeout_seconds)
            async for topic in door.turns.over(request.body.topics)
        ],
    }


async def _delete(door: Door, topic: Any, deadline: float, timeout_seconds: float) -> Fields:
    """All partitions in one go, but for those that are refused alone."""
    codes: dict[int, ErrorCode] = {}
    offsets: dict[int, int] = {}
    async for each in door.turns.over(topic.partitions):
        number, offset = each.partition_index, each.offset
        try:
            place = door.core.place(topic.name, number)
            is_there = -1 <= offset <= place.end
        except errors.SparklogError as error:
            codes[number] = code_of(error)
        else:
            if is_there:
                offsets[number] = offset
            else:
                codes[number] = ErrorCode.offset_out_of_range
    starts: dict[int, int] = {}
    if offsets:
        wanted = wire.DeleteRecords(
            topic=topic.name, offsets=offsets, timeout_seconds=timeout_seconds
        )
        try:
            starts = (await _deleted(door, wanted, deadline)).starts
        except errors.SparklogError as error:
            codes |= dict.fromkeys(offsets, code_of(error))
    return {
        "name": topic.name,
        "partitions": [
            {
                "partition_index": each.partition_index,
                "low_watermark": starts.get(each.partition_index, _NOWHERE),
                "error_code": codes.get(each.partition_index, ErrorCode.none),
            }
            for each in topic.partitions
        ],
    }


async def _deleted(door: Door, wanted: wire.DeleteRecords, deadline: float) -> wire.LogStarts:
    """Holds no thread while it waits for the records to be published."""
    deletion = door.core.begin_deletion(wanted)
    pause_seconds = _LOOK_FIRST_SECONDS
    while not door.core.is_published(deletion):
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise door.core.not_published(deletion, wanted.timeout_seconds)
        await asyncio.sleep(min(pause_seconds, left_seconds))
        pause_seconds = min(2 * pause_seconds, _LOOK_MOST_SECONDS)
    return await door.blocking(Work.CHANGE, door.core.end_deletion, deletion)
