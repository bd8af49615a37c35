"""DescribeProducers (61): the idempotent producers that partitions remember (KIP-664)."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(61, "describe_producers", last=0)
async def _handle(door: Door, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    _partition(door, topic.name, number) for number in topic.partition_indexes
                ],
            }
            for topic in request.body.topics
        ],
    }


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
        "active_producers": [
            {
                "producer_id": each.producer_id,
                "producer_epoch": each.epoch,
                "last_sequence": each.last_sequence,
                "last_timestamp": each.last_us // 1_000,
                "coordinator_epoch": -1,  # of a transaction, as is what follows
                "current_txn_start_offset": -1,
            }
            for each in producers
        ],
    }
