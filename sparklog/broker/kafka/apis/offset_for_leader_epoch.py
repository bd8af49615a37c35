"""OffsetForLeaderEpoch (23): where a leader epoch has ended (KIP-101, KIP-279, KIP-320)."""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(23, "offset_for_leader_epoch", last=4)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": Each(partial(_topic, door), request.body.topics),
    }


def _topic(door: Door, topic: Any) -> Fields:
    return {
        "topic": topic.topic,
        "partitions": Each(partial(_partition, door, topic.topic), topic.partitions),
    }


def _partition(door: Door, topic: str, wanted: Any) -> Fields:
    number = wanted.partition
    code, leader_epoch, end_offset = ErrorCode.none, -1, -1
    try:
        door.core.check_leader_epoch(topic, number, wanted.current_leader_epoch)
        leader_epoch, end_offset = door.core.epoch_end(topic, number, wanted.leader_epoch)
    except errors.SparklogError as error:
        code = code_of(error)
    return {
        "error_code": code,
        "partition": number,
        "leader_epoch": leader_epoch,
        "end_offset": end_offset,
    }
