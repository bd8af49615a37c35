"""Fetch (1): record batches from offsets on, waited for if there are none (KIP-74, KIP-227)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import Fetched
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Fields, Pieces, Raw, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.sessions import Key, Session
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import name_of_id, named
from sparklog.limits import KAFKA_FETCH_BYTES

_NO_SESSION: Final = -1
_NEW_SESSION: Final = 0
"""Epochs of a request that is whole, and ends the session that it names."""
_LONGEST_SECONDS: Final = 600.0


@dataclass(slots=True, kw_only=True)
class _Wish:
    """A partition that is asked for, and what has been found of it."""

    topic: Mapping[str, Any]
    """Its name or id, as the answer says it."""
    identity: str | uuid.UUID
    number: int
    offset: int
    limit_bytes: int
    leader_epoch: int
    name: str = ""
    code: ErrorCode = ErrorCode.none
    start: int = -1
    end: int = -1
    pieces: Sequence[Raw] = ()
    """Of record batches that follow one another."""
    told: tuple[int, int] | None = None
    """Log start offset and high watermark as the client heard them last."""


@serves(1, "fetch", last=18)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    number, epoch = getattr(body, "session_id", 0), getattr(body, "session_epoch", _NO_SESSION)
    asked = _asked(body)
    session = None
    if epoch in (_NO_SESSION, _NEW_SESSION):
        door.sessions.end(number)
        wishes = asked
    else:
        session = door.sessions.find(number)
        if session is None:
            return _answer([], code=ErrorCode.fetch_session_id_not_found)
        if session.epoch != epoch:
            return _answer([], code=ErrorCode.invalid_fetch_session_epoch)
        session.move_on()
        for key, wish in asked.items():
            before = session.wishes.get(key)
            wish.told = before.told if before is not None else None
            session.wishes[key] = wish
        for key in _forgotten(body):
            session.wishes.pop(key, None)
        wishes = session.wishes
    await _fill(door, list(wishes.values()), request)
    if session is not None:
        reply = _answer(_news(session), session=session)
    else:
        if epoch == _NEW_SESSION:
            session = door.sessions.open(wishes)
        reply = _answer(list(wishes.values()), session=session)
    for wish in wishes.values():
        wish.told, wish.pieces = (wish.start, wish.end), ()  # a session lives on
    return reply


def _asked(body: Any) -> dict[Key, _Wish]:
    return {
        (_identity(topic), each.partition): _Wish(
            topic=named(topic),
            identity=_identity(topic),
            number=each.partition,
            offset=each.fetch_offset,
            limit_bytes=max(each.partition_max_bytes, 0),
            leader_epoch=getattr(each, "current_leader_epoch", -1),
        )
        for topic in body.topics
        for each in topic.partitions
    }


def _forgotten(body: Any) -> Iterator[Key]:
    for topic in getattr(body, "forgotten_topics_data", ()):
        for number in topic.partitions:
            yield _identity(topic), number


def _identity(topic: Any) -> str | uuid.UUID:
    """What the version calls it by."""
    return topic.topic if hasattr(topic, "topic") else topic.topic_id or uuid.UUID(int=0)


def _news(session: Session) -> list[_Wish]:
    """What a client has not been told yet."""
    found = []
    for key, wish in list(session.wishes.items()):
        if wish.pieces or wish.code or wish.told != (wish.start, wish.end):
            found.append(wish)
        if wish.pieces:
            session.put_last(key)
    return found


async def _fill(door: Door, wishes: Sequence[_Wish], request: Request) -> None:
    """Returns with as many bytes as are wanted, or fit in, with an error, or when time is over."""
    body = request.body
    most_bytes = max(min(getattr(body, "max_bytes", KAFKA_FETCH_BYTES), KAFKA_FETCH_BYTES), 0)
    deadline = time.monotonic() + min(body.max_wait.total_seconds(), _LONGEST_SECONDS)
    reserved = False
    while True:
        seen = door.growth
        for wish in wishes:
            _look(door, wish)
        if not reserved and any(not wish.code and wish.offset < wish.end for wish in wishes):
            reserved = True
            await request.reserve(min(most_bytes, sum(wish.limit_bytes for wish in wishes)))
        size, is_full = await _read(door, wishes, most_bytes)
        left_seconds = deadline - time.monotonic()
        if size >= body.min_bytes or is_full or left_seconds <= 0:
            return
        if any(wish.code for wish in wishes):
            return
        await door.grown(seen, [(wish.name, wish.number) for wish in wishes], left_seconds)


async def _read(door: Door, wishes: Sequence[_Wish], most_bytes: int) -> tuple[int, bool]:
    """Fills the wishes with what is there: (bytes, whether there is more that does not fit in)."""
    size, is_full = 0, False
    for wish in wishes:
        if wish.code or wish.offset >= wish.end:
            continue
        limit_bytes = min(wish.limit_bytes, most_bytes - size)
        # The first batch of all is given however large it is, or nobody could go on.
        if limit_bytes <= 0 and size:
            return size, True
        try:
            found = await _fetched(door, wish, limit_bytes, at_least_one=size == 0)
        except errors.SparklogError as error:
            wish.code = code_of(error)
        else:
            wish.pieces = found.pieces
            size += sum(map(len, found.pieces))
            is_full |= found.end < wish.end
    return size, is_full


def _look(door: Door, wish: _Wish) -> None:
    """Where its partition begins and ends now."""
    wish.code, wish.pieces = ErrorCode.none, ()
    try:
        _place(door, wish)
    except errors.SparklogError as error:
        wish.code = code_of(error)


def _place(door: Door, wish: _Wish) -> None:
    identity = wish.identity
    wish.name = identity if isinstance(identity, str) else name_of_id(door.core, identity)
    door.core.check_leader_epoch(wish.name, wish.number, wish.leader_epoch)
    place = door.core.place(wish.name, wish.number)
    wish.start, wish.end = place.start, place.end
    if not wish.start <= wish.offset <= wish.end:
        raise errors.OffsetOutOfRange(
            topic=wish.name,
            partition=wish.number,
            offset=wish.offset,
            start=wish.start,
            end=wish.end,
        )


async def _fetched(door: Door, wish: _Wish, limit_bytes: int, *, at_least_one: bool) -> Fetched:
    fetch = partial(
        door.core.fetch_kafka,
        *(wish.name, wish.number, wish.offset),
        limit_bytes=limit_bytes,
        at_least_one=at_least_one,
    )
    found = fetch(only_memory=True) or await door.blocking(fetch)
    assert found is not None, "only memory may not have it"
    return found


def _answer(
    wishes: list[_Wish], *, session: Session | None = None, code: ErrorCode = ErrorCode.none
) -> Fields:
    topics: dict[str | uuid.UUID, list[_Wish]] = {}
    for wish in wishes:
        topics.setdefault(wish.identity, []).append(wish)
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "session_id": session.number if session is not None else 0,
        "responses": [
            {**of_topic[0].topic, "partitions": [_partition(wish) for wish in of_topic]}
            for of_topic in topics.values()
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
        "records": Pieces(wish.pieces),
    }
