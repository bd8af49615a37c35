"""DescribeProducers (61): the states of idempotent producers in partitions (KIP-664)."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import ActiveProducer, Broker
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation, ResourceType


@serves(61, "describe_producers", max_version=0, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    refused = await request.access.refused(
        Operation.READ, ResourceType.TOPIC, (each.name for each in request.body.topics)
    )
    make = partial(_topic, context.broker, request.access, refused)
    return {"throttle_time": NO_TIME, "topics": LazyArray(make, request.body.topics)}


def _topic(broker: Broker, access: Access, refused: Collection[str], topic: Any) -> Fields:
    numbers = tuple(dict.fromkeys(topic.partition_indexes))
    make = partial(_partition, broker, topic.name)
    if topic.name in refused:
        make = partial(_error_fields, access.error(Operation.READ, ResourceType.TOPIC, topic.name))
    return {"name": topic.name, "partitions": LazyArray(make, numbers, is_slow=True)}


def _error_fields(error: errors.SparklogError, number: int) -> Fields:
    return {
        "partition_index": number,
        "error_code": code_of(error),
        "error_message": str(error),
        "active_producers": (),
    }


def _partition(broker: Broker, topic: str, number: int) -> Fields:
    try:
        producers = broker.partitions.producers(topic, number)
    except errors.SparklogError as error:
        return _error_fields(error, number)
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
