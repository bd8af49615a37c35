"""ElectLeaders (43): elects leaders of partitions (KIP-183, KIP-460).

A partition has one replica, which is its leader: no election is needed while that broker is up.
Otherwise the controller moves the partition to another broker on its own.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import partition_status
from sparklog.security.acl import Operation

_PREFERRED: Final = 0
_UNAVAILABLE: Final = {
    _PREFERRED: ErrorCode.preferred_leader_not_available,
    1: ErrorCode.eligible_leaders_not_available,
}
"""The error for a partition whose leader is gone, by `ElectionType`."""


@serves(43, "elect_leaders", max_version=2, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, broker = request.body, context.broker
    try:
        await request.access.check(Operation.ALTER)
    except errors.NotAuthorized as error:
        return await _not_authorized(context, body, error)
    kind = getattr(body, "election_type", _PREFERRED)
    results: list[Fields] = []
    if body.topic_partitions is None:
        if kind in _UNAVAILABLE:
            async for name in context.scheduler.iterate(broker.topics.names()):
                with contextlib.suppress(errors.UnknownTopic):  # deleted since
                    results += _without_leaders(broker, name, kind)
    else:
        async for each in context.scheduler.iterate(body.topic_partitions):
            partitions = [
                _partition(broker, each.topic, number, kind)
                async for number in context.scheduler.iterate(each.partitions)
            ]
            results.append({"topic": each.topic, "partition_result": partitions})
    is_known = kind in _UNAVAILABLE or body.topic_partitions == ()
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.none if is_known else ErrorCode.invalid_request,
        "replica_election_results": results,
    }


async def _not_authorized(
    context: HandlerContext, body: Any, error: errors.NotAuthorized
) -> Fields:
    code, message = code_of(error), str(error)
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "replica_election_results": [
            {
                "topic": each.topic,
                "partition_result": [
                    {"partition_id": number, "error_code": code, "error_message": message}
                    for number in each.partitions
                ],
            }
            async for each in context.scheduler.iterate(body.topic_partitions or ())
        ],
    }


def _without_leaders(broker: Broker, name: str, kind: int) -> list[Fields]:
    """Returns the partitions of a topic that have no leader, as one topic or none.

    A request for all partitions is answered with those that need another leader.
    """
    members = broker.members.up()
    found = [
        {"partition_id": number, "error_code": _UNAVAILABLE[kind], "error_message": _NO_LEADER}
        for number, each in enumerate(broker.partitions.statuses(name))
        if each.leader not in members
    ]
    return [{"topic": name, "partition_result": found}] if found else []


_NO_LEADER: Final = "its leader is gone; the cluster chooses another on its own"


def _partition(broker: Broker, name: str, number: int, kind: int) -> Fields:
    code, message = ErrorCode.election_not_needed, "the partition's only replica leads it"
    try:
        if kind not in _UNAVAILABLE:
            raise errors.BadRequest(reason=f"election type {kind} is unknown: use 0 or 1")
        if partition_status(broker, name, number).leader not in broker.members.up():
            code, message = _UNAVAILABLE[kind], _NO_LEADER
    except errors.SparklogError as error:
        code, message = code_of(error), str(error)
    return {"partition_id": number, "error_code": code, "error_message": message}
