"""Fetch (1): record batches from given offsets on (KIP-74), with fetch sessions (KIP-227).

A request that finds less than `min.bytes` waits until its partitions have grown, or for `max.wait`.
Differences from Kafka: there are no other replicas to read from, and no transactions, so
`read_committed` returns the same records. Limits: `FETCH_BYTES` per response, and
`KAFKA_WAIT_SECONDS` of waiting.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors, limits
from sparklog.broker.broker import Fetched
from sparklog.broker.kafka import leaders
from sparklog.broker.kafka.error_codes import code_of, noted
from sparklog.broker.kafka.leaders import Leader
from sparklog.broker.kafka.messages import ChunkedBytes, FetchReply, Fields, LazyArray, Raw, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.sessions import FetchSession, Key
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import identity_fields, topic_name_of_id
from sparklog.limits import (
    KAFKA_LITTLE_ITEMS,
    KAFKA_QUICK_ITEMS,
    KAFKA_SHORT_RECORDS_BYTES,
    KAFKA_WAIT_SECONDS,
)
from sparklog.security.acl import Operation, ResourceType

READ_AHEAD_PARTITIONS = 64  # of a fetch that one read-ahead covers
READ_SECONDS = 2.0  # after which a fetch is answered with the partitions read so far
READ_TOGETHER = 4  # partitions of a fetch that are read from storage concurrently
FETCH_BYTES = 8 * limits.MIB  # of records in one reply; a larger batch gets its own reply

_READ_COMMITTED: Final = 1
_NOT_AUTHORIZED: Final = ErrorCode.topic_authorization_failed
_UNKNOWN_ID: Final = ErrorCode.unknown_topic_id
_REFUSED_BEFORE_READING: Final = {
    _NOT_AUTHORIZED,
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.unknown_topic_id,
}
"""Errors for which Kafka returns an empty list of aborted transactions instead of null."""
_NO_SESSION: Final = -1
_NEW_SESSION: Final = 0
"""The epochs of a full request, which closes the session that it names."""
_ATTEMPTS: Final = 4
"""Attempts to read a batch that is larger than the memory acquired for it."""


@dataclass(slots=True, kw_only=True)
class _FetchPartition:
    """A partition of a request or a session, and the records found for it."""

    topic: Mapping[str, Any]
    """Its topic's name or id, as fields of the response."""
    identity: str | uuid.UUID
    number: int
    offset: int
    limit_bytes: int
    leader_epoch: int
    name: str = ""
    code: ErrorCode = ErrorCode.none
    start: int = -1
    end: int = -1
    appended_bytes: int = 0
    """`PartitionStatus.appended_bytes` at the last lookup."""
    size: int = 0
    """The bytes of `chunks`, or of the existing records while the request waits for more."""
    chunks: Sequence[Raw] = ()
    """Consecutive record batches."""
    last_sent: tuple[int, int] | None = None
    """The log start offset and high watermark of the client's last response."""


@serves(1, "fetch", max_version=18, may_wait=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    session_id = getattr(body, "session_id", 0)
    epoch = getattr(body, "session_epoch", _NO_SESSION)
    requested = await _requested_partitions(context, body)
    session = None
    if epoch in (_NO_SESSION, _NEW_SESSION):
        context.sessions.close(session_id, request.access.principal)
        partitions = requested
    else:
        session = context.sessions.find(session_id, request.access.principal)
        if session is None:
            return _error_reply(ErrorCode.fetch_session_id_not_found)
        if session.epoch != epoch:
            return _error_reply(ErrorCode.invalid_fetch_session_epoch)
        context.sessions.advance(session)
        added = sum(key not in session.partitions for key in requested)
        if added and not context.sessions.has_capacity(added):
            context.sessions.close(session_id, request.access.principal)
            return _error_reply(ErrorCode.fetch_session_id_not_found)
        async for key, partition in context.scheduler.iterate(requested.items()):
            before = session.partitions.get(key)
            partition.last_sent = before.last_sent if before is not None else None
            session.partitions[key] = partition
        for key in _forgotten_partitions(body):
            session.partitions.pop(key, None)
        partitions = session.partitions
    throttle_time = NO_TIME
    if partitions:  # none: the client closes its session
        may_be_sent, throttle_time = await _collect_in_quota(
            context, list(partitions.values()), request
        )
        if not may_be_sent:
            return _throttled_reply(throttle_time, session)
    await _count(context, list(partitions.values()))
    if session is not None:
        changed = await _changed(context, session)
        return await _reply(context, changed, session, request, throttle_time)
    if epoch == _NEW_SESSION:
        session = context.sessions.open(_allowed(partitions), request.access.principal)
    return await _reply(context, list(partitions.values()), session, request, throttle_time)


async def _count(context: HandlerContext, partitions: Sequence[_FetchPartition]) -> None:
    """Counts the partitions of a reply for the metrics."""
    async for partition in context.scheduler.iterate(partitions):
        size = partition.size if partition.chunks else 0
        context.broker.count_fetch(partition.name, size, failed=bool(partition.code))
        if partition.code:
            context.counts.errors[1, partition.code.name] += 1


async def _collect_in_quota(
    context: HandlerContext, partitions: Sequence[_FetchPartition], request: Request
) -> tuple[bool, dt.timedelta]:
    """Reads records. Returns whether they may be sent by the client's quota, and its throttle time.

    Records that may not be sent are dropped. A client that is throttled waits for none.
    """
    throttle, most_bytes = request.throttle, FETCH_BYTES
    if not throttle.has_quotas:
        await _collect_allowed(context, partitions, request, most_bytes)
        return True, NO_TIME
    most_bytes, throttle_time = throttle.fetch_allowance(request.client_id, most_bytes)
    if throttle_time:
        return False, throttle_time
    await _collect_allowed(context, partitions, request, most_bytes)
    size = sum(each.size for each in partitions if each.chunks)
    may_be_sent, throttle_time = throttle.fetched(request.client_id, size)
    if not may_be_sent:
        for each in partitions:
            each.chunks = ()
        request.memory.release_records()
    return may_be_sent, throttle_time


async def _collect_allowed(
    context: HandlerContext,
    partitions: Sequence[_FetchPartition],
    request: Request,
    most_bytes: int,
) -> None:
    """Reads records, and drops those that the client may not read any more when they are there."""
    await _collect(context, partitions, request, most_bytes)
    judged = await _judge(context, request, partitions)
    if judged.refused:
        for partition in partitions:
            if partition.identity in judged.refused:
                _refuse(partition)


def _allowed(partitions: dict[Key, _FetchPartition]) -> dict[Key, _FetchPartition]:
    """Returns the partitions of a session: a client must not fill them with those of others."""
    if all(each.code != _NOT_AUTHORIZED for each in partitions.values()):
        return partitions
    return {key: each for key, each in partitions.items() if each.code != _NOT_AUTHORIZED}


async def _requested_partitions(context: HandlerContext, body: Any) -> dict[Key, _FetchPartition]:
    partitions: dict[Key, _FetchPartition] = {}
    for topic in body.topics:
        fields, identity = identity_fields(topic), _identity(topic)
        async for each in context.scheduler.iterate(topic.partitions):
            partitions[identity, each.partition] = _FetchPartition(
                topic=fields,
                identity=identity,
                number=each.partition,
                offset=each.fetch_offset,
                limit_bytes=max(each.partition_max_bytes, 0),
                leader_epoch=getattr(each, "current_leader_epoch", -1),
            )
    return partitions


def _forgotten_partitions(body: Any) -> Iterator[Key]:
    for topic in getattr(body, "forgotten_topics_data", ()):
        for number in topic.partitions:
            yield _identity(topic), number


def _identity(topic: Any) -> str | uuid.UUID:
    """Returns the topic's name, or its id in the versions that have ids."""
    return topic.topic if hasattr(topic, "topic") else topic.topic_id or uuid.UUID(int=0)


async def _changed(context: HandlerContext, session: FetchSession) -> list[_FetchPartition]:
    """Returns the partitions with records, an error, or offsets that the client has not seen."""
    changed = []
    async for key, partition in context.scheduler.iterate(list(session.partitions.items())):
        offsets = partition.start, partition.end
        if partition.chunks or partition.code or partition.last_sent != offsets:
            changed.append(partition)
        if partition.chunks:
            session.move_last(key)
    return changed


async def _collect(
    context: HandlerContext,
    partitions: Sequence[_FetchPartition],
    request: Request,
    most_bytes: int,
) -> None:
    """Reads records into the partitions, about `most_bytes` at most.

    Returns with at least `min_bytes`, with as much as fits into a response, with an error, or when
    the time is up. If fewer bytes exist, they are counted without reading them where possible, and
    records that were read are dropped while the request waits for more.
    """
    body = request.body
    most_bytes = max(min(getattr(body, "max_bytes", FETCH_BYTES), most_bytes), 0)
    min_bytes = min(body.min_bytes, most_bytes)
    deadline = time.monotonic() + min(body.max_wait.total_seconds(), KAFKA_WAIT_SECONDS)
    has_turn = False
    while True:
        judged = await _judge(context, request, partitions)
        has_records = await _refresh_all(context, partitions, judged)
        if has_records and not has_turn and _finds_little(context, partitions):
            has_turn = True
            if await context.wait_fetch_turn():
                continue  # with the records that have arrived since
        left_seconds = deadline - time.monotonic()
        size, is_full = 0, False
        if has_records and (left_seconds <= 0 or not _has_too_few(context, partitions, min_bytes)):
            size, is_full = await _read_in_memory_bounds(context, partitions, request, most_bytes)
            left_seconds = deadline - time.monotonic()
        elif has_records:
            size = sum(partition.size for partition in partitions)
        if size >= min_bytes or is_full or left_seconds <= 0:
            return
        if any(partition.code for partition in partitions):
            return
        for partition in partitions:
            partition.chunks = ()
        request.memory.release_records()
        request.memory.release_parsed()  # `wait_for_append` bounds the partitions that wait
        lacking_bytes = min(
            min_bytes - size, *(each.limit_bytes - each.size for each in partitions)
        )
        if not await context.wait_for_append(
            {(each.name, each.number): each.appended_bytes for each in partitions},
            max(lacking_bytes, 1),
            left_seconds,
        ):
            return  # without records: the client fetches again
        has_turn = True


def _finds_little(context: HandlerContext, partitions: Sequence[_FetchPartition]) -> bool:
    """Returns whether the fetch looks like that of a consumer at the end of a few partitions."""
    if len(partitions) > KAFKA_LITTLE_ITEMS:
        return False
    found_bytes = sum(_readable_bytes(context, partition) for partition in partitions)
    return found_bytes <= KAFKA_SHORT_RECORDS_BYTES


def _has_too_few(
    context: HandlerContext, partitions: Sequence[_FetchPartition], min_bytes: int
) -> bool:
    """Returns whether fewer than `min_bytes` exist, if that is known without reading them."""
    if min_bytes <= 1 or len(partitions) > KAFKA_QUICK_ITEMS:
        return False
    if any(partition.code for partition in partitions):
        return False
    for partition in partitions:
        if partition.offset < partition.end:
            try:
                size = context.broker.partitions.bytes_from(
                    partition.name, partition.number, partition.offset
                )
            except (errors.Invalid, errors.NotLeader):  # it has just been deleted, or has moved
                return False
            if size is None or size >= partition.limit_bytes:
                return False
            partition.size = size
    return sum(partition.size for partition in partitions) < min_bytes


async def _read_in_memory_bounds(
    context: HandlerContext,
    partitions: Sequence[_FetchPartition],
    request: Request,
    most_bytes: int,
) -> tuple[int, bool]:
    """Acquires memory and reads the partitions. Returns (bytes, whether more did not fit).

    The first batch is returned even if it exceeds all limits, once there is memory for it (KIP-74).
    """
    usual_bytes = min(most_bytes, sum(partition.limit_bytes for partition in partitions))
    granted_bytes = usual_bytes
    if len(partitions) <= KAFKA_QUICK_ITEMS:
        known_bytes = sum(_readable_bytes(context, partition) for partition in partitions)
        if known_bytes <= KAFKA_SHORT_RECORDS_BYTES:
            granted_bytes = min(known_bytes, usual_bytes)  # so that it waits for no slow reader
    for _ in range(_ATTEMPTS):
        await request.memory.take_records(granted_bytes)
        size, is_full = await _read(context, partitions, most_bytes)
        if size <= granted_bytes:
            break
        for partition in partitions:
            partition.chunks = ()
        request.memory.release_records()
        granted_bytes = max(size, usual_bytes)
    else:
        size, is_full = 0, True  # the client fetches again
    request.memory.release_records(size)
    return size, is_full


def _readable_bytes(context: HandlerContext, partition: _FetchPartition) -> int:
    """Returns an upper bound on the bytes that a read returns, determined without reading."""
    if partition.code or partition.offset >= partition.end:
        return 0
    try:
        size = context.broker.partitions.bytes_from(
            partition.name, partition.number, partition.offset
        )
    except (errors.Invalid, errors.NotLeader):  # it has just been deleted, or has moved
        return 0
    return partition.limit_bytes if size is None else min(partition.limit_bytes, size)


async def _read(
    context: HandlerContext, partitions: Sequence[_FetchPartition], most_bytes: int
) -> tuple[int, bool]:
    """Reads the partitions in order. Returns (bytes, whether more did not fit).

    Once the time is up, the remaining partitions are read only from memory; other records count as
    not fitting. A client that waits too long for its response repeats the request, and would make
    no progress.
    """
    size, is_full, has_error = 0, False, False
    deadline = time.monotonic() + READ_SECONDS
    ahead = _ReadAhead(context, partitions, deadline)
    async for index, partition in _numbered(context, partitions):
        partition.size = 0
        if partition.code or partition.offset >= partition.end:
            continue
        limit_bytes = min(partition.limit_bytes, most_bytes - size)
        # The first batch is returned however large it is; otherwise a consumer could not continue.
        if limit_bytes <= 0 and size:
            return size, True
        is_late = bool(size or has_error) and time.monotonic() >= deadline
        try:
            if not is_late:
                await ahead.read(index, limit_bytes)
            fetched = await _fetch(
                *(context, partition, limit_bytes), at_least_one=size == 0, only_memory=is_late
            )
        except errors.SparklogError as error:
            partition.code = code_of(error)
            has_error = True
        else:
            partition.chunks = fetched.pieces
            partition.size = sum(map(len, fetched.pieces))
            size += partition.size
            is_full |= fetched.end < partition.end
    return size, is_full


async def _numbered(
    context: HandlerContext, partitions: Sequence[_FetchPartition]
) -> AsyncIterator[tuple[int, _FetchPartition]]:
    index = 0
    async for partition in context.scheduler.iterate(partitions):
        yield index, partition
        index += 1


class _ReadAhead:
    """Reads records that are not in memory, for a few partitions concurrently.

    They are read into the cache of encoded batches, and from there in the partitions' order. A
    response may have no room for all of them; the next request finds the others. A thread reads one
    partition after another, because each hand-over takes as long as reading a few records. But
    first it reads the small files of some partitions together, which is faster.
    """

    def __init__(
        self, context: HandlerContext, partitions: Sequence[_FetchPartition], deadline: float
    ) -> None:
        """`deadline`: in monotonic seconds; no further partition is read after it."""
        self._context = context
        self._partitions = partitions
        self._deadline = deadline
        self._end = 0
        """The partition after the last one examined."""

    async def read(self, index: int, limit_bytes: int) -> None:
        """Reads a partition and the next ones, unless this has been done or it is in memory."""
        if index < self._end or len(self._partitions) == 1 or self._is_late():
            return
        self._end = index + READ_AHEAD_PARTITIONS
        fetches: list[tuple[int, partial[Fetched | None]]] = []
        for number, each in enumerate(self._partitions[index : self._end], index):
            if each.code or each.offset >= each.end:
                continue
            fetch = partial(
                self._context.broker.fetch_kafka,
                *(each.name, each.number, each.offset),
                limit_bytes=min(each.limit_bytes, limit_bytes),
            )
            with suppress(errors.SparklogError):  # it is raised in the partition's turn
                # This blocks the loop, so only one batch is tried: it shows where the records are.
                if fetch(only_memory=True, limit_bytes=1) is None:
                    fetches.append((number, fetch))
        if len(fetches) < 2:
            return  # there is nothing to do concurrently
        threads = min(len(fetches), READ_TOGETHER)
        places = [fetch.args for _, fetch in fetches]
        groups = iter([places[first::threads] for first in range(threads)])
        unread = iter(fetches)  # hands each item to one thread, like `groups`
        left_bytes = limit_bytes

        def work() -> None:
            nonlocal left_bytes
            while not self._is_late() and (group := next(groups, None)):
                with suppress(errors.SparklogError):
                    self._context.broker.read_kafka_together(group)
            while left_bytes > 0 and not self._is_late() and (item := next(unread, None)):
                with suppress(errors.SparklogError):  # it is raised in the partition's turn
                    fetched = item[1]()
                    left_bytes -= sum(map(len, fetched.pieces)) if fetched is not None else 0

        await asyncio.gather(
            *(self._context.run_blocking(WorkerPool.READ, work) for _ in range(threads)),
            return_exceptions=True,
        )
        self._end = next(unread, (self._end, None))[0]

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline


class _Judged(NamedTuple):
    """The topics of a fetch that are not read now: by their names, or the ids that it has used."""

    refused: Collection[str | uuid.UUID] = ()
    unknown: Collection[str | uuid.UUID] = ()
    """Ids that no topic had when the others were authorized."""


_ALL_ALLOWED: Final = _Judged()


async def _judge(
    context: HandlerContext, request: Request, partitions: Sequence[_FetchPartition]
) -> _Judged:
    """Returns the topics that the client may not read. Raises what `still_refused` raises."""
    if not request.access.is_evaluated:
        return _ALL_ALLOWED
    names: dict[str | uuid.UUID, str] = {}
    unknown: set[str | uuid.UUID] = set()
    async for partition in context.scheduler.iterate(partitions):
        if partition.identity not in names and partition.identity not in unknown:
            try:
                names[partition.identity] = _name(context, partition.identity)
            except errors.TopicChanged:
                unknown.add(partition.identity)
    refused = await request.access.still_refused(Operation.READ, ResourceType.TOPIC, names.values())
    return _Judged({each for each, name in names.items() if name in refused}, unknown)


def _refuse(partition: _FetchPartition) -> None:
    partition.code, partition.chunks, partition.size = _NOT_AUTHORIZED, (), 0
    partition.start = partition.end = -1


async def _refresh_all(
    context: HandlerContext,
    partitions: Sequence[_FetchPartition],
    judged: _Judged,
) -> bool:
    """Looks up the partitions, moving ones twice. Returns whether any of them has records."""
    moving = []
    async for partition in context.scheduler.iterate(partitions):
        if judged is not _ALL_ALLOWED and partition.identity in judged.refused:
            _refuse(partition)
            continue
        if judged is not _ALL_ALLOWED and partition.identity in judged.unknown:
            partition.code, partition.chunks, partition.size = noted(_UNKNOWN_ID), (), 0
            continue
        _refresh(context, partition)
        if partition.code == ErrorCode.not_leader_or_follower:
            moving.append(partition)
    if moving:
        await leaders.settle(context, [(each.name, each.number) for each in moving])
        async for partition in context.scheduler.iterate(moving):
            _refresh(context, partition)
    return any(not each.code and each.offset < each.end for each in partitions)


def _refresh(context: HandlerContext, partition: _FetchPartition) -> None:
    """Looks up the current offsets of a partition, or the error for the response."""
    partition.code, partition.chunks, partition.size = ErrorCode.none, (), 0
    try:
        _look_up(context, partition)
    except errors.SparklogError as error:
        partition.code = code_of(error)


def _look_up(context: HandlerContext, partition: _FetchPartition) -> None:
    partition.name = _name(context, partition.identity)
    context.broker.partitions.check_leader_epoch(
        partition.name, partition.number, partition.leader_epoch
    )
    status = context.broker.partitions.status(partition.name, partition.number)
    partition.start, partition.end = status.start, status.end
    partition.appended_bytes = status.appended_bytes
    if not status.start <= partition.offset <= status.end:
        raise errors.OffsetOutOfRange(
            topic=partition.name,
            partition=partition.number,
            offset=partition.offset,
            start=status.start,
            end=status.end,
        )


def _name(context: HandlerContext, identity: str | uuid.UUID) -> str:
    """Returns the name of a topic. Raises `TopicChanged` if no topic has that id."""
    if isinstance(identity, str):
        return identity
    return topic_name_of_id(context.broker, identity)


async def _fetch(
    context: HandlerContext,
    partition: _FetchPartition,
    limit_bytes: int,
    *,
    at_least_one: bool,
    only_memory: bool,
) -> Fetched:
    """Reads up to `limit_bytes` from memory in several portions, or one portion from storage."""
    chunks: list[Raw] = []
    size, end = 0, partition.offset
    for portion in count():
        if portion:  # the first is little work, as for a consumer at the end of its log
            await context.scheduler.wait_turn()
        fetch = partial(
            context.broker.fetch_kafka,
            *(partition.name, partition.number, end),
            limit_bytes=limit_bytes - size,
            at_least_one=at_least_one and not chunks,
        )
        fetched = fetch(only_memory=True)
        if fetched is None and not chunks and not only_memory:
            fetched = await context.run_blocking(WorkerPool.READ, fetch)
        if fetched is None or not fetched.pieces:
            break
        chunks += fetched.pieces
        size += sum(map(len, fetched.pieces))
        end = fetched.end
        if end >= partition.end or size >= limit_bytes:
            break
    return Fetched(chunks, end)


class _SentPartition(NamedTuple):
    """A partition of a response. Its session may change while the response is being sent."""

    number: int
    code: ErrorCode
    start: int
    end: int
    chunks: Sequence[Raw]
    leader: Leader | None
    """The partition's leader, if the client asked a different broker."""


_OTHER_LEADER: Final = (ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch)


async def _reply(
    context: HandlerContext,
    partitions: Sequence[_FetchPartition],
    session: FetchSession | None,
    request: Request,
    throttle_time: dt.timedelta,
) -> Fields:
    make = partial(_partition_fields, request.body.isolation_level == _READ_COMMITTED)
    topics: dict[str | uuid.UUID, tuple[Mapping[str, Any], list[_SentPartition]]] = {}
    others: list[Leader | None] = []
    async for each in context.scheduler.iterate(partitions):
        _, sent = topics.setdefault(each.identity, (each.topic, []))
        leader = None
        if each.code in _OTHER_LEADER:
            leader = leaders.leader_of(context.broker, each.name, each.number)
            others.append(leader)
        sent.append(
            _SentPartition(each.number, each.code, each.start, each.end, each.chunks, leader)
        )
        each.last_sent, each.chunks = (each.start, each.end), ()
    return _fields(
        ErrorCode.none,
        session.session_id if session is not None else 0,
        [{**fields, "partitions": LazyArray(make, sent)} for fields, sent in topics.values()],
        len(topics) + len(partitions),
        leaders.endpoints(context, request.listener, others),
        throttle_time,
    )


def _error_reply(code: ErrorCode) -> Fields:
    return _fields(code, 0, (), 0, (), NO_TIME)


def _throttled_reply(throttle_time: dt.timedelta, session: FetchSession | None) -> Fields:
    """Returns an empty reply: a session stays as it is, and none is opened, as in Kafka."""
    session_id = session.session_id if session is not None else 0
    return _fields(ErrorCode.none, session_id, (), 0, (), throttle_time)


def _fields(
    code: ErrorCode,
    session_id: int,
    responses: Sequence[Fields],
    items: int,
    endpoints: Sequence[Fields],
    throttle_time: dt.timedelta,
) -> FetchReply:
    fields: dict[str, Any] = {
        "throttle_time": throttle_time,
        "error_code": code,
        "session_id": session_id,
        "responses": responses,
    }
    if endpoints:
        fields["node_endpoints"] = endpoints
    return FetchReply(fields, items)


def _partition_fields(is_committed: bool, sent: _SentPartition) -> Fields:
    is_error = sent.code != ErrorCode.none
    fields: dict[str, Any] = {
        "partition_index": sent.number,
        "error_code": sent.code,
        "high_watermark": -1 if is_error else sent.end,
        "last_stable_offset": -1 if is_error else sent.end,
        "log_start_offset": -1 if is_error else sent.start,
        "aborted_transactions": _aborted_transactions(is_committed, sent.code),
        "records": ChunkedBytes(sent.chunks),
    }
    if sent.leader is not None:
        fields["current_leader"] = sent.leader.fields()
    return fields


def _aborted_transactions(is_committed: bool, code: ErrorCode) -> tuple[()] | None:
    """Returns the empty list or null, as Kafka does if there are no transactions."""
    if code != ErrorCode.none:
        return () if code in _REFUSED_BEFORE_READING else None
    return () if is_committed else None
