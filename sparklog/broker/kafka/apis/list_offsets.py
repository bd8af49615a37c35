"""ListOffsets (2): where a partition begins, ends, or is at a time (KIP-79, KIP-734, KIP-405)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME

_NO_EPOCH: Final = -1
_GREATEST_TIME: Final = -3
_SINCE_VERSION: Final[Mapping[int, int]] = {-1: 1, -2: 1, _GREATEST_TIME: 7, -4: 8, -5: 9}
"""Times that mean something else, by the first version that knows them."""


@serves(2, "list_offsets", last=10)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _topic(door, each, request.version)
            async for each in door.turns.over(request.body.topics)
        ],
    }


async def _topic(door: Door, topic: Any, version: int) -> Fields:
    """A partition that is named more than once is refused, once."""
    counts = Counter(each.partition_index for each in topic.partitions)
    found = {}
    async for each in door.turns.over(topic.partitions):
        number = each.partition_index
        if counts[number] > 1:
            found[number] = _refused(number, ErrorCode.invalid_request)
        elif each.timestamp < 0 and not _SINCE_VERSION.get(each.timestamp, version + 1) <= version:
            found[number] = _refused(number, ErrorCode.unsupported_version)
        else:
            found[number] = await _partition(door, topic.name, each)
    return {"name": topic.name, "partitions": list(found.values())}


async def _partition(door: Door, topic: str, wanted: Any) -> Fields:
    number = wanted.partition_index
    timestamp_ms, offset = -1, -1
    try:
        place = door.core.place(topic, number)
        door.core.check_leader_epoch(
            topic, number, getattr(wanted, "current_leader_epoch", _NO_EPOCH)
        )
        leader_epoch = place.leader_epoch
        match wanted.timestamp:
            case -1:
                offset = place.end
            case -2 | -4:
                offset = place.start
            case -5:
                offset = -1
            case asked_ms:
                timestamp_ms, offset = await door.blocking(
                    Work.READ, _at_time, door, topic, number, asked_ms
                )
    except errors.SparklogError as error:
        return _refused(number, code_of(error))
    return {
        "partition_index": number,
        "error_code": ErrorCode.none,
        "timestamp": timestamp_ms,
        "offset": offset,
        "leader_epoch": leader_epoch if offset >= 0 else _NO_EPOCH,
        "old_style_offsets": (),
    }


def _refused(number: int, code: ErrorCode) -> Fields:
    return {
        "partition_index": number,
        "error_code": code,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": _NO_EPOCH,
        "old_style_offsets": (),
    }


def _at_time(door: Door, topic: str, number: int, asked_ms: int) -> tuple[int, int]:
    """(its time in ms, offset) of the first record that is not older; -1 and -1: there is none.

    For -3: of the record with the greatest time.
    """
    if asked_ms == _GREATEST_TIME:
        return door.core.greatest_time(topic, number)
    request = wire.OffsetsForTimes(topic=topic, timestamps_us={number: asked_ms * 1_000})
    offset = door.core.offsets_for_times(request).offsets[number]
    if offset < 0:
        return -1, -1
    for batch in door.core.read(topic, number, offset, offset + 1, columns=["timestamp"]):
        for timestamp_us in batch.rows.column("timestamp").view("int64").to_pylist():
            return timestamp_us // 1_000, offset
    return _at_time(door, topic, number, asked_ms)  # it has just been removed
