"""DescribeQuorum (55): the brokers that agree on the metadata (KIP-595, KIP-836, KIP-853).

A root's metadata is a sequence of versions in its store. Every member can write the next version,
so all are voters, and the controller is their leader. The offset is the version.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.topics import nodes
from sparklog.security.acl import Operation

_TOPIC: Final = "__cluster_metadata"
_UNKNOWN: Final = -1


@serves(55, "describe_quorum", max_version=2, is_repeatable=True, follows=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    try:
        await request.access.check(Operation.DESCRIBE)
    except errors.NotAuthorized as error:
        return {
            "error_code": code_of(error),
            "error_message": str(error),
            "topics": (),
            "nodes": (),
        }
    topics = request.body.topics
    # Kafka answers only a request for this one partition.
    is_known = [each.topic_name for each in topics[:2]] == [_TOPIC] and [
        each.partition_index for each in topics[0].partitions[:2]
    ] == [0]
    quorum = _quorum(context.broker) if is_known else _NO_QUORUM
    listeners = nodes(context.broker, request.listener) if is_known else ()
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "topics": [
            {
                "topic_name": topic.topic_name,
                "partitions": [
                    {"partition_index": each.partition_index, **quorum}
                    async for each in context.scheduler.iterate(topic.partitions)
                ],
            }
            async for topic in context.scheduler.iterate(topics)
        ],
        "nodes": [
            {
                "node_id": each.broker,
                "listeners": (
                    {"name": request.listener.name, "host": each.host, "port": each.port},
                ),
            }
            for each in listeners
        ],
    }


_NO_QUORUM: Final[Fields] = {
    "error_code": ErrorCode.unknown_topic_or_partition,
    "error_message": f"only partition 0 of {_TOPIC} has a quorum",
    "leader_id": 0,
    "leader_epoch": 0,
    "high_watermark": 0,
    "current_voters": (),
    "observers": (),
}


def _quorum(broker: Broker) -> Fields:
    metadata, members = broker.metadata.known, broker.members.up()
    controller = metadata.controller if metadata.controller in members else _UNKNOWN
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "leader_id": controller,
        "leader_epoch": members[controller].epoch if controller in members else 0,
        "high_watermark": metadata.version,
        "current_voters": [
            {
                "replica_id": each,
                "replica_directory_id": None,
                "log_end_offset": metadata.version,
                "last_fetch_timestamp": _UNKNOWN,
                "last_caught_up_timestamp": _UNKNOWN,
            }
            for each in members
        ],
        "observers": (),
    }
