"""DescribeTopicPartitions (75): the partitions of topics, in pages (KIP-966).

Topics that the client may not describe follow the others on each page, as in Kafka; a request for
all topics leaves them out.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.operations import NOT_REQUESTED
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import topic_fields
from sparklog.formats.topic_names import check_topic_name
from sparklog.security.acl import Operation, ResourceType

_MOST_PARTITIONS: Final = 2_000
"""Kafka's `max.request.partition.size.limit`."""


@serves(75, "describe_topic_partitions", max_version=0, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    requested = sorted({each.name for each in body.topics})
    cursor = body.cursor
    if cursor is not None and (
        cursor.partition_index < 0 or (requested and cursor.topic_name not in requested)
    ):
        invalid = [_error_fields(name, ErrorCode.invalid_request) for name in requested]
        return _reply(invalid, None)
    names = requested or context.broker.topics.names()
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
    refused = await access.refused(
        Operation.DESCRIBE, ResourceType.TOPIC, names if requested else ()
    )
    last = [_error_fields(name, ErrorCode.topic_authorization_failed) for name in sorted(refused)]
    left = max(min(body.response_partition_limit, _MOST_PARTITIONS), 1)
    topics: list[Fields] = []
    async for name in context.scheduler.iterate(names):
        is_visible = (
            name not in refused
            if requested
            else access.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
        )
        if not is_visible:
            continue
        if left == 0:
            return _reply([*topics, *last], (name, 0))
        first = cursor.partition_index if cursor is not None and name == cursor.topic_name else 0
        operations = access.authorized_operations(ResourceType.TOPIC, name)
        try:
            statuses = context.broker.partitions.statuses(check_topic_name(name))
        except errors.SparklogError as error:
            if requested:
                topics.append(_error_fields(name, code_of(error), operations))
            continue
        page = statuses[first : first + left]
        topic = topic_fields(context.broker, name, page, request.listener, first=first)
        topics.append({**topic, "topic_authorized_operations": operations})
        if first + left < len(statuses):
            return _reply([*topics, *last], (name, first + left))
        left -= len(page)
    return _reply([*topics, *last], None)


def _reply(topics: list[Fields], cursor: tuple[str, int] | None) -> Fields:
    following: Any = None
    if cursor is not None:
        following = {"topic_name": cursor[0], "partition_index": cursor[1]}
    return {"throttle_time": NO_TIME, "topics": topics, "next_cursor": following}


def _error_fields(name: str, code: ErrorCode, operations: int = NOT_REQUESTED) -> Fields:
    return {
        "error_code": code,
        "name": name,
        "topic_id": None,
        "partitions": (),
        "topic_authorized_operations": operations,
    }
