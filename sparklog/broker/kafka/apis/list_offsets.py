"""ListOffsets (2): where a partition begins, ends, or is at a time (KIP-79, KIP-734, KIP-405)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_GREATEST_TIME: Final = -3


@serves(2, "list_offsets", last=10)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    await _partition(door, topic.name, each) for each in topic.partitions
                ],
            }
            for topic in request.body.topics
        ],
    }


async def _partition(door: Door, topic: str, wanted: Any) -> Fields:
    number = wanted.partition_index
    code, timestamp_ms, offset, leader_epoch = ErrorCode.none, -1, -1, -1
    try:
        place = door.core.place(topic, number)
        leader_epoch = place.leader_epoch
        match wanted.timestamp:
            case -1:
                offset = place.end
            case -2 | -4:
                offset = place.start
            case -5:
                offset = -1
            case asked_ms:
                timestamp_ms, offset = await door.blocking(_at_time, door, topic, number, asked_ms)
        if offset < 0:
            leader_epoch = -1
    except errors.SparklogError as error:
        code, offset, leader_epoch = code_of(error), -1, -1
    return {
        "partition_index": number,
        "error_code": code,
        "timestamp": timestamp_ms,
        "offset": offset,
        "leader_epoch": leader_epoch,
        "old_style_offsets": (),
    }


def _at_time(door: Door, topic: str, number: int, asked_ms: int) -> tuple[int, int]:
    """(its time in ms, offset) of the first record that is not older; -1 and -1: there is none.

    For -3: of the record with the greatest time.
    """
    if asked_ms == _GREATEST_TIME:
        return door.core.greatest_time(topic, number)
    if asked_ms < 0:
        raise errors.BadRequest(reason=f"{asked_ms} is no time")
    request = wire.OffsetsForTimes(topic=topic, timestamps_us={number: asked_ms * 1_000})
    offset = door.core.offsets_for_times(request).offsets[number]
    if offset < 0:
        return -1, -1
    (batch, *_) = door.core.read(topic, number, offset, offset + 1, columns=["offset", "timestamp"])
    (timestamp_us,) = batch.rows.column("timestamp").view("int64").to_pylist()
    return timestamp_us // 1_000, offset
