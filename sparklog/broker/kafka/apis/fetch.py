"""Fetch (1): record batches from offsets on, waiting for them if there are none (KIP-74, KIP-227).

Nobody is given a session: every request is whole, which clients of all ages accept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import name_of, named

_LONGEST_SECONDS: Final = 600.0


@dataclass(slots=True, kw_only=True)
class _Wish:
    """A partition that is asked for, and what has been found of it."""

    topic: Any
    number: int
    offset: int
    limit_bytes: int
    leader_epoch: int
    name: str = ""
    code: ErrorCode = ErrorCode.none
    start: int = -1
    end: int = -1
    batches: tuple[bytes, ...] = ()


@serves(1, "fetch", last=17)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    if getattr(body, "session_id", 0) != 0:
        return _answer([], code=ErrorCode.fetch_session_id_not_found)
    wishes = [
        _Wish(
            topic=topic,
            number=each.partition,
            offset=each.fetch_offset,
            limit_bytes=each.partition_max_bytes,
            leader_epoch=getattr(each, "current_leader_epoch", -1),
        )
        for topic in body.topics
        for each in topic.partitions
    ]
    wait_seconds = min(body.max_wait.total_seconds(), _LONGEST_SECONDS)
    deadline = time.monotonic() + wait_seconds
    while True:
        seen = door.growth
        size = await _look(door, wishes, body.max_bytes)
        left_seconds = deadline - time.monotonic()
        if size >= body.min_bytes or left_seconds <= 0 or any(each.code for each in wishes):
            return _answer(wishes)
        await door.grown(seen, left_seconds)


async def _look(door: Door, wishes: list[_Wish], most_bytes: int) -> int:
    """Fills the wishes with what is there now; how many bytes that is."""
    size = 0
    for wish in wishes:
        wish.code, wish.batches = ErrorCode.none, ()
        try:
            _place(door, wish)
            limit_bytes = min(wish.limit_bytes, most_bytes - size)
            # The first batch of all is given however large it is, or nobody could go on.
            if wish.offset < wish.end and (limit_bytes > 0 or size == 0):
                wish.batches = await _batches(door, wish, max(limit_bytes, 1), first=size == 0)
        except errors.SparklogError as error:
            wish.code = code_of(error)
        size += sum(map(len, wish.batches))
    return size


def _place(door: Door, wish: _Wish) -> None:
    wish.name = name_of(door.core, wish.topic)
    place = door.core.place(wish.name, wish.number)
    wish.start, wish.end, epoch = place.start, place.end, place.leader_epoch
    if wish.leader_epoch not in (-1, epoch):
        newer = wish.leader_epoch > epoch
        kind = errors.UnknownLeaderEpoch if newer else errors.FencedLeaderEpoch
        raise kind(topic=wish.name, partition=wish.number, found=wish.leader_epoch, current=epoch)
    if not wish.start <= wish.offset <= wish.end:
        raise errors.OffsetOutOfRange(
            topic=wish.name,
            partition=wish.number,
            offset=wish.offset,
            start=wish.start,
            end=wish.end,
        )


async def _batches(door: Door, wish: _Wish, limit_bytes: int, *, first: bool) -> tuple[bytes, ...]:
    place = wish.name, wish.number, wish.offset
    found = door.core.fetch_kafka(*place, limit_bytes=limit_bytes, only_hot=True)
    if found is None:
        found = await door.blocking(
            lambda: door.core.fetch_kafka(*place, limit_bytes=limit_bytes, only_hot=False)
        )
    if found and not first and len(found[0]) > limit_bytes:
        return ()
    return tuple(found or ())


def _answer(wishes: list[_Wish], code: ErrorCode = ErrorCode.none) -> Fields:
    topics: dict[int, tuple[Any, list[_Wish]]] = {}
    for wish in wishes:
        topics.setdefault(id(wish.topic), (wish.topic, []))[1].append(wish)
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "session_id": 0,
        "responses": [
            {**named(topic), "partitions": [_partition(wish) for wish in of_topic]}
            for topic, of_topic in topics.values()
        ],
    }


def _partition(wish: _Wish) -> Fields:
    refused = wish.code != ErrorCode.none
    return {
        "partition_index": wish.number,
        "error_code": wish.code,
        "high_watermark": -1 if refused else wish.end,
        "last_stable_offset": -1 if refused else wish.end,
        "log_start_offset": -1 if refused else wish.start,
        "aborted_transactions": None,
        "records": b"".join(wish.batches),
    }
