"""DescribeTopicPartitions (75): topics' partitions, so many at a time (KIP-966)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.operations import NOT_ASKED, ON_TOPIC
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import described
from sparklog.record import check_topic_name

_MOST_PARTITIONS: Final = 2_000
"""Kafka's `max.request.partition.size.limit`."""


@serves(75, "describe_topic_partitions", last=0)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    asked = sorted({each.name for each in body.topics})
    cursor = body.cursor
    if cursor is not None and (
        cursor.partition_index < 0 or (asked and cursor.topic_name not in asked)
    ):
        refused = [_refused(name, ErrorCode.invalid_request) for name in asked]
        return _answer(refused, None)
    names = asked or door.core.topics().topics
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
    left = max(min(body.response_partition_limit, _MOST_PARTITIONS), 1)
    found: list[Fields] = []
    for name in names:
        if left == 0:
            return _answer(found, (name, 0))
        first = cursor.partition_index if cursor is not None and name == cursor.topic_name else 0
        try:
            places = door.core.places(check_topic_name(name))
        except errors.SparklogError as error:
            if asked:
                found.append(_refused(name, code_of(error)))
            continue
        taken = places[first : first + left]
        topic = described(door.core, name, taken, first=first)
        found.append({**topic, "topic_authorized_operations": ON_TOPIC})
        if first + left < len(places):
            return _answer(found, (name, first + left))
        left -= len(taken)
    return _answer(found, None)


def _answer(topics: list[Fields], cursor: tuple[str, int] | None) -> Fields:
    following: Any = None
    if cursor is not None:
        following = {"topic_name": cursor[0], "partition_index": cursor[1]}
    return {"throttle_time": NO_TIME, "topics": topics, "next_cursor": following}


def _refused(name: str, code: ErrorCode) -> Fields:
    return {
        "error_code": code,
        "name": name,
        "topic_id": None,
        "partitions": (),
        "topic_authorized_operations": NOT_ASKED,
    }
