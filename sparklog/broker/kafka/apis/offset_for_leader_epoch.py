"""OffsetForLeaderEpoch (23): the end offsets of leader epochs (KIP-101, KIP-279, KIP-320)."""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(23, "offset_for_leader_epoch", max_version=4, is_repeatable=True, needs_proof=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": LazyArray(partial(_topic, context), request.body.topics),
    }


def _topic(context: HandlerContext, topic: Any) -> Fields:
    return {
        "topic": topic.topic,
        "partitions": LazyArray(partial(_partition, context, topic.topic), topic.partitions),
    }


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
    return {
        "error_code": code,
        "partition": number,
        "leader_epoch": leader_epoch,
        "end_offset": end_offset,
    }
