"""CreateTopics (19): topics with partitions and a configuration (KIP-4, KIP-525)."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import kafka_id


@serves(19, "create_topics", last=7)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    names = [each.name for each in body.topics]
    only_checks = getattr(body, "validate_only", False)
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _create(door, each, twice=names.count(each.name) > 1, only_checks=only_checks)
            for each in body.topics
        ],
    }


async def _create(door: Door, topic: Any, *, twice: bool, only_checks: bool) -> Fields:
    try:
        wanted = _wanted(topic, twice=twice)
        if only_checks:
            door.core.check_topic(wanted)
            return _answer(topic.name, count=wanted.partitions)
        info = await door.blocking(door.core.create_topic, wanted)
    except errors.SparklogError as error:
        return _answer(topic.name, code=code_of(error), message=str(error))
    config = [
        {
            "name": name,
            "value": value,
            "read_only": False,
            "config_source": 5,
            "is_sensitive": False,
        }
        for name, value in sorted(info.config.items())
    ]
    return _answer(
        topic.name, topic_id=kafka_id(info.topic_id), count=len(info.partitions), config=config
    )


def _wanted(topic: Any, *, twice: bool) -> wire.CreateTopic:
    if twice:
        raise errors.BadRequest(reason=f"topic {topic.name} is named twice")
    count = topic.num_partitions
    if topic.assignments:
        # Who leads what is for the brokers to agree on; how many there are is the client's to say.
        numbers = sorted(each.partition_index for each in topic.assignments)
        if count != -1 or numbers != list(range(len(numbers))):
            raise errors.BadRequest(reason="an assignment names all partitions, and no count")
        count = len(numbers)
    elif count == 0 or count < -1:
        raise errors.BadPartitionCount(topic=topic.name, requested=count, reason="1 at least")
    return wire.CreateTopic(
        topic=topic.name,
        partitions=count,
        config={each.name: each.value or "" for each in topic.configs},
    )


def _answer(
    name: str,
    *,
    code: ErrorCode = ErrorCode.none,
    message: str | None = None,
    topic_id: Any = None,
    count: int = -1,
    config: Any = None,
) -> Fields:
    return {
        "name": name,
        "topic_id": topic_id,
        "error_code": code,
        "error_message": message,
        "num_partitions": count,
        "replication_factor": -1 if code else 1,
        "configs": config,
    }
