"""OffsetForLeaderEpoch (23): the end offsets of leader epochs (KIP-101, KIP-279, KIP-320)."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType


@serves(23, "offset_for_leader_epoch", max_version=4, is_repeatable=True, needs_proof=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    refused = await request.access.refused(
        Operation.DESCRIBE,
        ResourceType.TOPIC,
        (each.topic for each in request.body.topics),
        or_cluster=Operation.CLUSTER_ACTION,
    )
    topics = LazyArray(partial(_topic, context, refused), request.body.topics)
    return {"throttle_time": NO_TIME, "topics": topics}


def _topic(context: HandlerContext, refused: Collection[str], topic: Any) -> Fields:
    make = _not_authorized if topic.topic in refused else partial(_partition, context, topic.topic)
    return {"topic": topic.topic, "partitions": LazyArray(make, topic.partitions)}


def _not_authorized(partition: Any) -> Fields:
    return _fields(partition, ErrorCode.topic_authorization_failed, -1, -1)


def _partition(context: HandlerContext, topic: str, partition: Any) -> Fields:
    number = partition.partition
    code, leader_epoch, end_offset = ErrorCode.none, -1, -1
    try:
        context.broker.partitions.check_leader_epoch(topic, number, partition.current_leader_epoch)
        leader_epoch, end_offset = context.broker.partitions.epoch_end(
            topic, number, partition.leader_epoch
        )
    except errors.SparklogError as error:
        code = code_of(error)
    return _fields(partition, code, leader_epoch, end_offset)


def _fields(partition: Any, code: ErrorCode, leader_epoch: int, end_offset: int) -> Fields:
    return {
        "error_code": code,
        "partition": partition.partition,
        "leader_epoch": leader_epoch,
        "end_offset": end_offset,
    }
