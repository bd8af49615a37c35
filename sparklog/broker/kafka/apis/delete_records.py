"""DeleteRecords (21): moves the log start offset of partitions (KIP-107, KIP-204).

Records are published to the topic's table before they are deleted; the request waits for that, up
to its timeout and at most `KAFKA_WAIT_SECONDS`. The log starts of a topic move in one commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of, noted
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats import flight_messages
from sparklog.limits import KAFKA_WAIT_SECONDS
from sparklog.security.acl import Operation, ResourceType

_NO_OFFSET: Final = -1
_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.5
"""The pauses between checks of the published offsets; each is twice the one before it."""


@serves(21, "delete_records", max_version=2, may_wait=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    refused = await request.access.refused(
        Operation.DELETE, ResourceType.TOPIC, (each.name for each in request.body.topics)
    )
    timeout_seconds = min(request.body.timeout.total_seconds(), KAFKA_WAIT_SECONDS)
    deadline = time.monotonic() + timeout_seconds
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _delete(context, request, topic, deadline, timeout_seconds)
            if topic.name not in refused
            else _not_authorized(topic)
            async for topic in context.scheduler.iterate(request.body.topics)
        ],
    }


async def _delete(
    context: HandlerContext, request: Request, topic: Any, deadline: float, timeout_seconds: float
) -> Fields:
    """Deletes records of all partitions together, except those that are rejected individually."""
    codes: dict[int, ErrorCode] = {}
    offsets: dict[int, int] = {}
    async for each in context.scheduler.iterate(topic.partitions):
        number, offset = each.partition_index, each.offset
        try:
            status = context.broker.partitions.status(topic.name, number)
            is_in_range = -1 <= offset <= status.end
        except errors.SparklogError as error:
            codes[number] = code_of(error)
        else:
            if is_in_range:
                offsets[number] = offset
            else:
                codes[number] = noted(ErrorCode.offset_out_of_range)
    starts: dict[int, int] = {}
    if offsets:
        deletion_request = flight_messages.DeleteRecords(
            topic=topic.name, offsets=offsets, timeout_seconds=timeout_seconds
        )
        try:
            starts = (await _delete_published(context, request, deletion_request, deadline)).starts
        except errors.SparklogError as error:
            codes |= dict.fromkeys(offsets, code_of(error))
    return _fields(topic, codes, starts)


def _not_authorized(topic: Any) -> Fields:
    numbers = (each.partition_index for each in topic.partitions)
    return _fields(topic, dict.fromkeys(numbers, ErrorCode.topic_authorization_failed), {})


def _fields(topic: Any, codes: Mapping[int, ErrorCode], starts: Mapping[int, int]) -> Fields:
    return {
        "name": topic.name,
        "partitions": [
            {
                "partition_index": each.partition_index,
                "low_watermark": starts.get(each.partition_index, _NO_OFFSET),
                "error_code": codes.get(each.partition_index, ErrorCode.none),
            }
            for each in topic.partitions
        ],
    }


async def _delete_published(
    context: HandlerContext,
    request: Request,
    deletion_request: flight_messages.DeleteRecords,
    deadline: float,
) -> flight_messages.LogStarts:
    """Waits, without occupying a thread, until the records are published, and deletes them."""
    deletion = context.broker.deletion.begin(deletion_request)
    pause_seconds = _FIRST_PAUSE_SECONDS
    while not context.broker.deletion.is_published(deletion):
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise context.broker.deletion.timed_out(deletion, deletion_request.timeout_seconds)
        await asyncio.sleep(min(pause_seconds, left_seconds))
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    topic = deletion_request.topic
    if await request.access.still_refused(Operation.DELETE, ResourceType.TOPIC, (topic,)):
        raise request.access.error(Operation.DELETE, ResourceType.TOPIC, topic)
    return await context.run_blocking(WorkerPool.CHANGE, context.broker.deletion.end, deletion)
