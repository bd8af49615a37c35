"""Produce (0): record batches into partitions, acked when they are durable (KIP-98, KIP-516).

Requests of a connection are queued in their order, and the next is read while one becomes durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import Ticket
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Outcome, Reply, serves
from sparklog.broker.kafka.times import NO_TIME, moment
from sparklog.broker.kafka.topics import name_of, named
from sparklog.record import LOG_APPEND_TIME

_Queued = list[tuple[Any, list[tuple[int, Ticket | errors.SparklogError]]]]


@serves(0, "produce", last=13)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    refusal = _refusal(body)
    queued: _Queued = []
    for topic in body.topic_data:
        of_topic = []
        for each in topic.partition_data:
            outcome: Ticket | errors.SparklogError
            try:
                if refusal is not None:
                    raise refusal
                name = name_of(door.core, topic)
                if not each.records:
                    raise errors.BadBatch(reason="there is none")
                outcome = await _append(door, name, each.index, bytes(each.records))
            except errors.SparklogError as error:
                outcome = error
            of_topic.append((each.index, outcome))
        queued.append((topic, of_topic))
    tickets = [each for _, of_topic in queued for _, each in of_topic if isinstance(each, Ticket)]
    ended = door.durable(tickets)  # also where nobody wants to know: or nothing would be written
    if body.acks == 0:
        _check_all_queued(queued)
        return None
    return _answer(door, queued, ended)


def _check_all_queued(queued: _Queued) -> None:
    """Who wants no answer hears of an error by the end of the connection, as with Kafka."""
    for _, of_topic in queued:
        for _, outcome in of_topic:
            if isinstance(outcome, errors.SparklogError):
                raise outcome


def _refusal(body: Any) -> errors.SparklogError | None:
    if body.transactional_id is not None:
        return errors.BadRequest(reason="there are no transactions here")
    if body.acks not in (-1, 0, 1):
        return errors.BadAcks(acks=body.acks)
    return None


async def _append(door: Door, topic: str, partition: int, data: bytes) -> Ticket:
    try:
        if door.core.compresses(topic):
            return await door.blocking(
                lambda: door.core.append_kafka(topic, partition, data, wait=False)
            )
        return door.core.append_kafka(topic, partition, data, wait=False)
    except errors.QueueFull:
        return await door.blocking(
            lambda: door.core.append_kafka(topic, partition, data, wait=True)
        )


async def _answer(door: Door, queued: _Queued, durable: asyncio.Future[list[Outcome]]) -> Reply:
    ended = iter(await durable)
    return {
        "responses": [
            {
                **named(topic),
                "partition_responses": [
                    _outcome(
                        door, topic, index, each if isinstance(each, Exception) else next(ended)
                    )
                    for index, each in of_topic
                ],
            }
            for topic, of_topic in queued
        ],
        "throttle_time": NO_TIME,
    }


def _outcome(door: Door, topic: Any, index: int, outcome: Outcome) -> Fields:
    if isinstance(outcome, Exception):
        return {
            "index": index,
            "error_code": code_of(outcome),
            "base_offset": -1,
            "log_append_time": None,
            "log_start_offset": -1,
            "record_errors": [
                {"batch_index": at, "batch_index_error_message": reason}
                for at, reason in getattr(outcome, "records", ())
            ],
            "error_message": str(outcome),
        }
    (stands,) = outcome
    append_time = stands.timestamp_type == LOG_APPEND_TIME
    return {
        "index": index,
        "error_code": ErrorCode.none,
        "base_offset": stands.base_offset,
        "log_append_time": moment(stands.arrival_us // 1_000) if append_time else None,
        "log_start_offset": _log_start(door, topic, index),
        "record_errors": (),
        "error_message": None,
    }


def _log_start(door: Door, topic: Any, index: int) -> int:
    try:
        return door.core.place(name_of(door.core, topic), index).start
    except errors.Invalid:  # the topic was deleted since
        return -1
