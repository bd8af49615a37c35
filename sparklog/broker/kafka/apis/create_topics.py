"""CreateTopics (19): topics with partitions and a configuration (KIP-4, KIP-525)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.resources import entry_fields
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import check_brokers, kafka_id


@serves(19, "create_topics", last=7)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    counts = Counter(each.name for each in body.topics)
    only_checks = getattr(body, "validate_only", False)
    topics = {each.name: each for each in body.topics}  # who is named twice is refused once
    return {
        "throttle_time": NO_TIME,
        "topics": [
            await _create(door, each, twice=counts[each.name] > 1, only_checks=only_checks)
            async for each in door.turns.over(topics.values())
        ],
    }


async def _create(door: Door, topic: Any, *, twice: bool, only_checks: bool) -> Fields:
    topic_id = None
    try:
        wanted = _wanted(topic, twice=twice)
        door.core.check_replication(topic.name, topic.replication_factor)
        if only_checks:
            count, config = door.core.check_topic(wanted)
        else:
            info = await door.blocking(Work.CHANGE, door.core.create_topic, wanted)
            count, config = len(info.partitions), info.config
            topic_id = kafka_id(info.topic_id)
    except errors.SparklogError as error:
        return {
            "name": topic.name,
            "topic_id": None,
            "error_code": code_of(error),
            "error_message": str(error),
            "num_partitions": -1,
            "replication_factor": -1,
            "configs": (),
        }
    entries = door.core.new_topic_configs(config)
    return {
        "name": topic.name,
        "topic_id": topic_id,
        "error_code": ErrorCode.none,
        "error_message": None,
        "num_partitions": count,
        "replication_factor": 1,
        "configs": [entry_fields(entry) for entry in sorted(entries, key=lambda entry: entry.name)],
    }


def _wanted(topic: Any, *, twice: bool) -> wire.CreateTopic:
    if twice:
        raise errors.BadRequest(reason=f"topic {topic.name} is named twice")
    count = topic.num_partitions
    if topic.assignments:
        count = _assigned(topic)
    elif count == 0 or count < -1:
        raise errors.BadPartitionCount(topic=topic.name, requested=count, reason="1 at least")
    config = {each.name: each.value for each in topic.configs}
    for key, value in config.items():
        if value is None:
            raise errors.BadOption(option=key, value=None, reason="it needs a value")
    return wire.CreateTopic(topic=topic.name, partitions=count, config=config)


def _assigned(topic: Any) -> int:
    """How many partitions are assigned. Who leads them is for the brokers to agree on."""
    if topic.num_partitions != -1 or topic.replication_factor != -1:
        reason = "an assignment says how many partitions and replicas there are, and nothing else"
        raise errors.BadRequest(reason=reason)
    numbers = sorted(each.partition_index for each in topic.assignments)
    if numbers != list(range(len(numbers))):
        raise errors.BadAssignment(topic=topic.name, reason=f"it is of partitions {numbers}")
    check_brokers(topic.name, topic.assignments)
    return len(numbers)
