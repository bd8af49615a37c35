"""Produce (0): record batches into partitions, acked when they are durable (KIP-98, KIP-516).

Requests of a connection are queued in their order, and the next is read while one becomes durable.
Each is checked whole before anything of it is queued, and queued by the loop itself, so that there
is never a ticket that nobody will have made durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import Append, TakesLong, Ticket
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Outcome, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME, moment
from sparklog.broker.kafka.topics import name_of, named
from sparklog.record import LOG_APPEND_TIME

_Prepared = list[tuple[Any, list[tuple[int, Append | errors.SparklogError]]]]
"""As the request has them: of each topic, by partition."""
_Queued = list[tuple[Any, list[tuple[int, Ticket | errors.SparklogError]]]]
_FIRST_WITH_ZSTD: Final = 7
"""Version from which on a batch may be compressed with zstd."""
_CODEC_AT: Final = 22
"""The lower byte of a batch's attributes, whose lowest bits name the codec."""
_CODEC_BITS: Final = 0x07
_ZSTD: Final = 4
_TURN_SECONDS: Final = 0.005
"""For which one request keeps the loop from the others while its batches are checked."""
_LOOK_SECONDS: Final = 0.01
"""How often the first of those who wait for room looks for it."""


@serves(0, "produce", last=13, overlaps=True, keeps_bytes=True)
async def _handle(door: Door, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    prepared = await _prepare(door, request)
    tickets: list[Ticket] = []
    try:
        queued = await _queue(door, prepared, tickets)
    finally:
        # Also where nobody wants to know, or the client has left: or nothing would be written.
        ended = door.durable(tickets)
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


async def _prepare(door: Door, request: Request) -> _Prepared:
    body = request.body
    refusal = _refusal(body)
    prepared: _Prepared = []
    began = time.monotonic()
    for topic in body.topic_data:
        of_topic = []
        for each in topic.partition_data:
            outcome: Append | errors.SparklogError
            try:
                if refusal is not None:
                    raise refusal
                name = name_of(door.core, topic)
                if not each.records:
                    raise errors.BadBatch(reason="there is none")
                if request.version < _FIRST_WITH_ZSTD:
                    _check_codec(each.records, request.version)
                outcome = await _checked(door, name, each.index, bytes(each.records))
            except errors.SparklogError as error:
                outcome = errors.bare(error)
            of_topic.append((each.index, outcome))
            if time.monotonic() - began > _TURN_SECONDS:
                await door.turns.pause()
                began = time.monotonic()
        prepared.append((topic, of_topic))
    return prepared


def _check_codec(data: bytes, version: int) -> None:
    """Raises `CodecTooNew`: who writes so does not know zstd, nor may those who read (KIP-110)."""
    if len(data) > _CODEC_AT and data[_CODEC_AT] & _CODEC_BITS == _ZSTD:
        raise errors.CodecTooNew(codec="zstd", needed=_FIRST_WITH_ZSTD, version=version)


async def _checked(door: Door, topic: str, partition: int, data: bytes) -> Append:
    try:
        return door.core.prepare_kafka(topic, partition, data, only_quick=True)
    except TakesLong:
        return await door.blocking(Work.CHECK, door.core.prepare_kafka, topic, partition, data)


async def _queue(door: Door, prepared: _Prepared, tickets: list[Ticket]) -> _Queued:
    """`tickets`: where those go that are queued, also if it is cancelled then."""
    deadline = time.monotonic() + door.core.submit_timeout_seconds
    queued: _Queued = []
    for topic, appends in prepared:
        of_topic: list[tuple[int, Ticket | errors.SparklogError]] = []
        async for index, append in door.turns.over(appends):
            outcome: Ticket | errors.SparklogError
            try:
                if isinstance(append, errors.SparklogError):
                    raise append
                outcome = await _submit(door, append, tickets, deadline)
                tickets.append(outcome)
            except errors.SparklogError as error:
                outcome = errors.bare(error)
            of_topic.append((index, outcome))
        queued.append((topic, of_topic))
    return queued


async def _submit(door: Door, append: Append, tickets: list[Ticket], deadline: float) -> Ticket:
    """Raises `QueueFull` where there is no room until the deadline, and what ended the writer.

    Who finds the queue full waits here, in turn, and takes no thread from those who only read.
    """
    if not door.room.locked():
        with suppress(errors.QueueFull):
            return door.core.submit(append)
    if tickets:
        door.durable(tickets[-1:])  # with all before it: they may be what fills the queue
    try:
        async with asyncio.timeout(deadline - time.monotonic()), door.room:
            while True:
                try:
                    return door.core.submit(append)
                except errors.QueueFull:
                    await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        return door.core.submit(append)


async def _answer(door: Door, queued: _Queued, durable: asyncio.Future[list[Outcome]]) -> Reply:
    ended = iter(await durable)
    responses = []
    for topic, of_topic in queued:
        found = [
            (index, each if isinstance(each, Exception) else next(ended))
            async for index, each in door.turns.over(of_topic)
        ]
        outcomes = Each(partial(_outcome, door, topic), found)
        responses.append({**named(topic), "partition_responses": outcomes})
    return {"responses": responses, "throttle_time": NO_TIME}


def _outcome(door: Door, topic: Any, ended: tuple[int, Outcome]) -> Fields:
    index, outcome = ended
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
