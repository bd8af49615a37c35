"""DeleteRecords (21): moves the log start of partitions to offsets (KIP-107, KIP-204)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_NOWHERE: Final = -1


@serves(21, "delete_records", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    timeout_seconds = request.body.timeout.total_seconds()
    return {
        "throttle_time": NO_TIME,
        "topics": [await _delete(door, topic, timeout_seconds) for topic in request.body.topics],
    }


async def _delete(door: Door, topic: Any, timeout_seconds: float) -> Fields:
    """All partitions in one go, but for those that are refused alone."""
    codes: dict[int, ErrorCode] = {}
    offsets: dict[int, int] = {}
    for each in topic.partitions:
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
            starts = (await door.blocking(door.core.delete_records, wanted)).starts
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
