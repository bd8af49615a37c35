"""DescribeProducers (61): the states of idempotent producers in partitions (KIP-664)."""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import ActiveProducer
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(61, "describe_producers", max_version=0, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "topics": LazyArray(partial(_topic, context), request.body.topics),
    }


def _topic(context: HandlerContext, topic: Any) -> Fields:
    numbers = tuple(dict.fromkeys(topic.partition_indexes))
    partitions = LazyArray(partial(_partition, context, topic.name), numbers, is_slow=True)
    return {"name": topic.name, "partitions": partitions}


def _partition(context: HandlerContext, topic: str, number: int) -> Fields:
    try:
        producers = context.broker.partitions.producers(topic, number)
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
        "active_producers": LazyArray(_producer, producers),
    }


def _producer(producer: ActiveProducer) -> Fields:
    return {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "last_sequence": producer.last_sequence,
        "last_timestamp": producer.last_us // 1_000,
        "coordinator_epoch": -1,  # there are no transactions
        "current_txn_start_offset": -1,
    }
