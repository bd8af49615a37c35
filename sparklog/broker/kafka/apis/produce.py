"""Produce (0): appends record batches, and replies when they are durable (KIP-98, KIP-516).

acks=1 and acks=all mean the same. Transactional batches are rejected. A connection's requests are
queued in order, and the next one is read while one becomes durable. A request is checked as a whole
before any of its batches is queued, and the event loop queues the batches itself, so each pending
append is waited for and none is lost with a thread.

A request may name 150,000 partitions. The garbage collector visits every object that exists for one
of them, and nothing else runs meanwhile. So a rejected partition has only one tuple, which is
passed on, and shares its error with others that lack records.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.broker import Append, PendingAppend, WouldBlock
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.kafka import leaders
from sparklog.broker.kafka.access import Access
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.leaders import Leader
from sparklog.broker.kafka.messages import Fields, LazyArray, PlainProduceReply, Request
from sparklog.broker.kafka.registry import HandlerContext, Outcome, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME, moment
from sparklog.broker.kafka.topics import identity_fields, known_name, topic_name, unknown_id
from sparklog.formats.record import LOG_APPEND_TIME
from sparklog.limits import KAFKA_LITTLE_ITEMS
from sparklog.listeners import Listener
from sparklog.security.acl import Operation, ResourceType

_Prepared = tuple[int, Append | errors.SparklogError]
"""A partition, and its checked batch or the error with which it is rejected."""
_Queued = tuple[int, PendingAppend | errors.SparklogError]
_PreparedTopics = list[tuple[Any, list[_Prepared]]]
_QueuedTopics = list[tuple[Any, list[_Queued]]]
_FIRST_WITH_ZSTD: Final = 7
"""The first version whose batches may be compressed with zstd (KIP-110)."""
_TOPIC: Final = ResourceType.TOPIC
_CODEC_AT: Final = 22
"""The position of the lower byte of a batch's attributes, whose lowest bits are the codec."""
_CODEC_BITS: Final = 0x07
_ZSTD: Final = 4
_RETRY_SECONDS: Final = 0.01
"""The pause before the first request that waits for space in the queue retries."""


@serves(0, "produce", max_version=13, is_pipelined=True, keeps_frame=True, is_blind=True)
async def _handle(context: HandlerContext, request: Request) -> Reply | Awaitable[Reply]:
    body = request.body
    throttle_time = NO_TIME
    if request.throttle.has_quotas:
        throttle_time = request.throttle.produced(request.client_id, request.size_bytes)
    prepared = await _prepare(context, request)
    pending_appends: list[PendingAppend] = []
    try:
        queued = await _queue(context, request.access, prepared, pending_appends)
    finally:
        # Always, even with acks=0 or after the client has left: this makes the batches durable.
        durable = context.when_durable(pending_appends)
    if body.acks == 0:
        _check_all_queued(queued)
        return None
    return _reply(context, request.listener, queued, durable, throttle_time)


def _check_all_queued(queued: _QueuedTopics) -> None:
    """Raises the first error of a request with acks=0: it ends the connection, as in Kafka."""
    for _, partitions in queued:
        for _, outcome in partitions:
            if isinstance(outcome, errors.SparklogError):
                raise outcome


def _refusal(body: Any) -> errors.SparklogError | None:
    if body.transactional_id is not None:
        return errors.BadRequest(reason="transactions are not supported")
    if body.acks not in (-1, 0, 1):
        return errors.BadAcks(acks=body.acks)
    return None


async def _prepare(context: HandlerContext, request: Request) -> _PreparedTopics:
    body = request.body
    # Once, so that a topic that becomes known meanwhile is not written to without being authorized.
    names = [_known_name(context, topic) for topic in body.topic_data]
    refused = await request.access.refused(Operation.WRITE, _TOPIC, filter(None, names))
    invalid = _refusal(body)
    no_records = errors.BadBatch(reason="the partition has no records")
    prepared: _PreparedTopics = []
    moving: list[tuple[list[_Prepared], int, Any]] = []
    for topic, name in zip(body.topic_data, names, strict=True):
        partitions: list[_Prepared] = []
        refusal = invalid
        if name is None:
            refusal = unknown_id(topic.topic_id)
        elif name in refused:
            named = name if hasattr(topic, "name") else str(topic.topic_id)
            refusal = request.access.error(Operation.WRITE, _TOPIC, named)
        async for each in context.scheduler.iterate(topic.partition_data):
            outcome = refusal or await _outcome(
                context, request.version, name or "", each, no_records
            )
            if isinstance(outcome, errors.NotLeader):
                moving.append((partitions, len(partitions), (name, each)))
            partitions.append((each.index, outcome))
        prepared.append((topic, partitions))
    if moving:
        await leaders.settle(context, [_place(of[at][1]) for of, at, _ in moving])
        async for of, at, (name, each) in context.scheduler.iterate(moving):
            outcome = await _outcome(context, request.version, name, each, no_records)
            of[at] = each.index, outcome
    return prepared


def _known_name(context: HandlerContext, topic: Any) -> str | None:
    """Returns the name of a topic; None for an id that no topic has."""
    return topic.name if hasattr(topic, "name") else known_name(context.broker, topic.topic_id)


def _place(error: Append | errors.SparklogError) -> TopicPartition:
    """Returns the partition that a `NotLeader` names."""
    assert isinstance(error, errors.NotLeader)
    return error.topic, error.partition


async def _outcome(
    context: HandlerContext, version: int, name: str, each: Any, no_records: errors.BadBatch
) -> Append | errors.SparklogError:
    """Returns the checked batch of a partition, or the error with which it is rejected."""
    try:
        if not each.records:
            return no_records
        if version < _FIRST_WITH_ZSTD:
            _check_codec(each.records, version)
        return await _checked(context, name, each.index, bytes(each.records))
    except errors.SparklogError as error:
        return errors.bare(error)


def _check_codec(data: bytes, version: int) -> None:
    """Raises `CodecTooNew` for zstd in a version that does not support it (KIP-110)."""
    if len(data) > _CODEC_AT and data[_CODEC_AT] & _CODEC_BITS == _ZSTD:
        raise errors.CodecTooNew(codec="zstd", needed=_FIRST_WITH_ZSTD, version=version)


async def _checked(context: HandlerContext, topic: str, partition: int, data: bytes) -> Append:
    try:
        return context.broker.prepare_kafka(topic, partition, data, only_quick=True)
    except WouldBlock:
        return await context.run_blocking(
            WorkerPool.CHECK, context.broker.prepare_kafka, topic, partition, data
        )


async def _queue(
    context: HandlerContext,
    access: Access,
    prepared: _PreparedTopics,
    pending_appends: list[PendingAppend],
) -> _QueuedTopics:
    """Queues the appends with the writer, adding each to `pending_appends`."""
    deadline = time.monotonic() + context.broker.submit_timeout_seconds
    queued: _QueuedTopics = []
    for topic, appends in prepared:
        partitions: list[_Queued] = []
        async for each in context.scheduler.iterate(appends):
            index, append = each
            if isinstance(append, errors.SparklogError):
                partitions.append(cast(_Queued, each))
                continue
            outcome: PendingAppend | errors.SparklogError
            try:
                outcome = await _submit(context, access, append, pending_appends, deadline)
                pending_appends.append(outcome)
            except errors.SparklogError as error:
                outcome = errors.bare(error)
                if isinstance(error, errors.QueueFull):
                    context.broker.count_full_queue(append.topic)
            partitions.append((index, outcome))
        queued.append((topic, partitions))
    return queued


async def _submit(
    context: HandlerContext,
    access: Access,
    append: Append,
    pending_appends: list[PendingAppend],
    deadline: float,
) -> PendingAppend:
    """Queues one append. Raises `QueueFull` if the queue stays full until the deadline.

    Requests wait for space in order, without occupying a thread.
    """
    if not context.writer_queue_lock.locked():
        with suppress(errors.QueueFull):
            return context.broker.submit(append)
    if pending_appends:
        # This flushes the request's own batches, which may be the ones that fill the queue.
        context.when_durable(pending_appends[-1:])
    try:
        async with asyncio.timeout(deadline - time.monotonic()), context.writer_queue_lock:
            while True:
                if await access.still_refused(Operation.WRITE, _TOPIC, (append.topic,)):
                    raise access.error(Operation.WRITE, _TOPIC, append.topic)
                try:
                    return context.broker.submit(append)
                except errors.QueueFull:
                    await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        return context.broker.submit(append)


async def _reply(
    context: HandlerContext,
    listener: Listener,
    queued: _QueuedTopics,
    durable: asyncio.Future[list[Outcome]],
    throttle_time: dt.timedelta,
) -> Reply:
    outcomes = iter(await durable)
    ended: list[tuple[Any, list[tuple[int, Outcome]]]] = []
    items, is_plain = len(queued), True
    moved: list[TopicPartition] = []
    for topic, partitions in queued:
        results = [
            cast(tuple[int, Outcome], each)
            if isinstance(each[1], Exception)
            else (each[0], next(outcomes))
            async for each in context.scheduler.iterate(partitions)
        ]
        items += len(results)
        is_plain = is_plain and not any(isinstance(each, Exception) for _, each in results)
        moved += [_place(each) for _, each in results if isinstance(each, errors.NotLeader)]
        ended.append((topic, results))
    found: dict[TopicPartition, Leader | None] = {}
    if moved:
        await leaders.settle(context, moved)
        found = {each: leaders.leader_of(context.broker, *each) for each in moved}
    responses = [
        {
            **identity_fields(topic),
            "partition_responses": LazyArray(
                partial(_partition_fields, context, topic, found), results
            ),
        }
        for topic, results in ended
    ]
    fields = {"responses": responses, "throttle_time": throttle_time}
    if named := leaders.endpoints(context, listener, found.values()):
        fields["node_endpoints"] = named
    return PlainProduceReply(fields) if is_plain and items <= KAFKA_LITTLE_ITEMS else fields


def _partition_fields(
    context: HandlerContext,
    topic: Any,
    found: Mapping[TopicPartition, Leader | None],
    ended: tuple[int, Outcome],
) -> Fields:
    index, outcome = ended
    if isinstance(outcome, Exception):
        code = code_of(outcome)
        context.counts.errors[0, code.name] += 1
        fields: dict[str, Any] = {
            "index": index,
            "error_code": code,
            "base_offset": -1,
            "log_append_time": None,
            "log_start_offset": -1,
            "record_errors": [
                {"batch_index": at, "batch_index_error_message": reason}
                for at, reason in getattr(outcome, "records", ())
            ],
            "error_message": str(outcome),
        }
        leader = found.get(_place(outcome)) if isinstance(outcome, errors.NotLeader) else None
        if leader is not None:
            fields["current_leader"] = leader.fields()
        return fields
    (result,) = outcome
    append_time = result.timestamp_type == LOG_APPEND_TIME
    return {
        "index": index,
        "error_code": ErrorCode.none,
        "base_offset": result.base_offset,
        "log_append_time": moment(result.arrival_us // 1_000) if append_time else None,
        "log_start_offset": _log_start(context, topic, index),
        "record_errors": (),
        "error_message": None,
    }


def _log_start(context: HandlerContext, topic: Any, index: int) -> int:
    try:
        return context.broker.partitions.status(topic_name(context.broker, topic), index).start
    except (errors.Invalid, errors.NotLeader):  # it has just been deleted, or has moved
        return -1
