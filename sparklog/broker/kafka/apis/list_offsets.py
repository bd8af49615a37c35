"""ListOffsets (2): the offsets at the start, at the end or at a time (KIP-79, KIP-734, KIP-405).

The local log start (-4) is the log start offset. There is no tiered offset (-5): the reply is -1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats import flight_messages
from sparklog.security.acl import Operation, ResourceType

_NO_EPOCH: Final = -1
_GREATEST_TIME: Final = -3
_SINCE_VERSION: Final[Mapping[int, int]] = {-1: 1, -2: 1, _GREATEST_TIME: 7, -4: 8, -5: 9}
"""Timestamps with a special meaning, and the first version that supports them."""


@serves(2, "list_offsets", max_version=10, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    refused = await request.access.refused(
        Operation.DESCRIBE, ResourceType.TOPIC, (each.name for each in request.body.topics)
    )
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _topic(context, each, request.version, refused)
            async for each in context.scheduler.iterate(request.body.topics)
        ],
    }


async def _topic(
    context: HandlerContext, topic: Any, version: int, refused: Collection[str]
) -> Fields:
    """Returns each partition once, with an error if the request names it more than once."""
    counts = Counter(each.partition_index for each in topic.partitions)
    is_refused = topic.name in refused
    results = {}
    async for each in context.scheduler.iterate(topic.partitions):
        number = each.partition_index
        if is_refused:
            results[number] = _error_fields(number, ErrorCode.topic_authorization_failed)
        elif counts[number] > 1:
            results[number] = _error_fields(number, ErrorCode.invalid_request)
        elif each.timestamp < 0 and not _SINCE_VERSION.get(each.timestamp, version + 1) <= version:
            results[number] = _error_fields(number, ErrorCode.unsupported_version)
        else:
            results[number] = await _look_up(context, topic.name, each)
    return {"name": topic.name, "partitions": list(results.values())}


async def _look_up(context: HandlerContext, topic: str, partition: Any) -> Fields:
    number = partition.partition_index
    timestamp_ms, offset = -1, -1
    try:
        status = context.broker.partitions.status(topic, number)
        context.broker.partitions.check_leader_epoch(
            topic, number, getattr(partition, "current_leader_epoch", _NO_EPOCH)
        )
        leader_epoch = status.leader_epoch
        match partition.timestamp:
            case -1:
                offset = status.end
            case -2 | -4:
                offset = status.start
            case -5:
                offset = -1
            case requested_ms:
                timestamp_ms, offset = await context.run_blocking(
                    WorkerPool.SEEK, _at_time, context, topic, number, requested_ms
                )
    except errors.SparklogError as error:
        return _error_fields(number, code_of(error))
    return {
        "partition_index": number,
        "error_code": ErrorCode.none,
        "timestamp": timestamp_ms,
        "offset": offset,
        "leader_epoch": leader_epoch if offset >= 0 else _NO_EPOCH,
        "old_style_offsets": (),
    }


def _error_fields(number: int, code: ErrorCode) -> Fields:
    return {
        "partition_index": number,
        "error_code": code,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": _NO_EPOCH,
        "old_style_offsets": (),
    }


def _at_time(
    context: HandlerContext, topic: str, number: int, requested_ms: int
) -> tuple[int, int]:
    """Returns (timestamp in ms, offset) of the first record at or after a time, or (-1, -1).

    For -3, returns those of the record with the greatest timestamp.
    """
    if requested_ms == _GREATEST_TIME:
        return context.broker.greatest_time(topic, number)
    request = flight_messages.OffsetsForTimes(
        topic=topic, timestamps_us={number: requested_ms * 1_000}
    )
    offset = context.broker.offsets_for_times(request).offsets[number]
    if offset < 0:
        return -1, -1
    for batch in context.broker.read(topic, number, offset, offset + 1, columns=["timestamp"]):
        for timestamp_us in batch.rows.column("timestamp").view("int64").to_pylist():
            return timestamp_us // 1_000, offset
    return _at_time(context, topic, number, requested_ms)  # the record has just been deleted
