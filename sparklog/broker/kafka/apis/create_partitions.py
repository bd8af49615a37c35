"""CreatePartitions (37): more partitions for topics that there are (KIP-195)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import check_brokers


@serves(37, "create_partitions", last=3)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    counts = Counter(each.name for each in body.topics)
    return {
        "throttle_time": NO_TIME,
        "results": [
            await _widen(door, each, twice=counts[each.name] > 1, only_checks=body.validate_only)
            async for each in door.turns.over(body.topics)
        ],
    }


async def _widen(door: Door, topic: Any, *, twice: bool, only_checks: bool) -> Fields:
    code, message = ErrorCode.none, None
    wanted = wire.AddPartitions(topic=topic.name, partitions=topic.count)
    try:
        if twice:
            raise errors.BadRequest(reason=f"topic {topic.name} is named twice")
        door.core.check_partitions(wanted)
        _check_assignments(door, topic)
        if not only_checks:
            await door.blocking(Work.CHANGE, door.core.add_partitions, wanted)
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"name": topic.name, "error_code": code, "error_message": message}


def _check_assignments(door: Door, topic: Any) -> None:
    """Who leads what is for the brokers to agree on; an assignment must fit the count, though."""
    more = topic.count - len(door.core.places(topic.name))
    if topic.assignments is not None and len(topic.assignments) != more:
        raise errors.BadAssignment(
            topic=topic.name,
            reason=f"{more} partitions more, and brokers are given for {len(topic.assignments)}",
        )
    check_brokers(topic.name, topic.assignments or ())
