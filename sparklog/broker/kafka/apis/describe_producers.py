"""DescribeProducers (61): the idempotent producers that partitions remember (KIP-664)."""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import Producer
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(61, "describe_producers", last=0)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": Each(partial(_topic, door), request.body.topics),
    }


def _topic(door: Door, topic: Any) -> Fields:
    numbers = tuple(dict.fromkeys(topic.partition_indexes))
    return {"name": topic.name, "partitions": Each(partial(_partition, door, topic.name), numbers)}


def _partition(door: Door, topic: str, number: int) -> Fields:
    try:
        producers = door.core.producers(topic, number)
    except errors.SparklogError as error:
        return {
            "partition_index": number,
            "error_code": code_of(error),
            "error_message": str(error),
            "active_producers": (),
        }
    return {
        "partition_index": number,
        "error_code": ErrorCode.none,
        "error_message": None,
        "active_producers": Each(_producer, producers),
    }


def _producer(producer: Producer) -> Fields:
    return {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "last_sequence": producer.last_sequence,
        "last_timestamp": producer.last_us // 1_000,
        "coordinator_epoch": -1,  # of a transaction, as is what follows
        "current_txn_start_offset": -1,
    }
