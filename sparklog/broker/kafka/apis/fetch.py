"""Fetch (1): record batches from offsets on, waited for if there are none (KIP-74, KIP-227)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.core import Fetched
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Pieces, Raw, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.sessions import Key, Session
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import name_of_id, named
from sparklog.limits import KAFKA_FETCH_BYTES, KAFKA_QUICK_ITEMS, KAFKA_WAIT_SECONDS

_READ_COMMITTED: Final = 1
_NOT_READ: Final = {
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.unknown_topic_id,
    ErrorCode.unsupported_compression_type,
}
"""What is said of partitions that were not looked at."""
_NO_SESSION: Final = -1
_NEW_SESSION: Final = 0
"""Epochs of a request that is whole, and ends the session that it names."""
_FIRST_WITH_ZSTD: Final = 10
"""Version from which on a client reads zstd (KIP-110)."""
_ATTEMPTS: Final = 4
"""At reading a batch that is larger than there was room taken for, while batches come and go."""


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
    grown_bytes: int = 0
    """Of its partition, when it was looked at."""
    size: int = 0
    """Bytes of `pieces`, or that there would be, while more is waited for."""
    pieces: Sequence[Raw] = ()
    """Of record batches that follow one another."""
    told: tuple[int, int] | None = None
    """Log start offset and high watermark as the client heard them last."""


@serves(1, "fetch", last=18, waits=True)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    number, epoch = getattr(body, "session_id", 0), getattr(body, "session_epoch", _NO_SESSION)
    asked = await _asked(door, body)
    session = None
    if epoch in (_NO_SESSION, _NEW_SESSION):
        door.sessions.end(number)
        wishes = asked
    else:
        session = door.sessions.find(number)
        if session is None:
            return _refused(ErrorCode.fetch_session_id_not_found)
        if session.epoch != epoch:
            return _refused(ErrorCode.invalid_fetch_session_epoch)
        session.move_on()
        more = sum(key not in session.wishes for key in asked)
        if more and not door.sessions.has_room(more):
            door.sessions.end(number)
            return _refused(ErrorCode.fetch_session_id_not_found)
        async for key, wish in door.turns.over(asked.items()):
            before = session.wishes.get(key)
            wish.told = before.told if before is not None else None
            session.wishes[key] = wish
        for key in _forgotten(body):
            session.wishes.pop(key, None)
        wishes = session.wishes
    await _fill(door, list(wishes.values()), request)
    if session is not None:
        return await _answer(door, await _news(door, session), session, body)
    if epoch == _NEW_SESSION:
        session = door.sessions.open(wishes)
    return await _answer(door, list(wishes.values()), session, body)


async def _asked(door: Door, body: Any) -> dict[Key, _Wish]:
    asked: dict[Key, _Wish] = {}
    for topic in body.topics:
        names, identity = named(topic), _identity(topic)
        async for each in door.turns.over(topic.partitions):
            asked[identity, each.partition] = _Wish(
                topic=names,
                identity=identity,
                number=each.partition,
                offset=each.fetch_offset,
                limit_bytes=max(each.partition_max_bytes, 0),
                leader_epoch=getattr(each, "current_leader_epoch", -1),
            )
    return asked


def _forgotten(body: Any) -> Iterator[Key]:
    for topic in getattr(body, "forgotten_topics_data", ()):
        for number in topic.partitions:
            yield _identity(topic), number


def _identity(topic: Any) -> str | uuid.UUID:
    """What the version calls it by."""
    return topic.topic if hasattr(topic, "topic") else topic.topic_id or uuid.UUID(int=0)


async def _news(door: Door, session: Session) -> list[_Wish]:
    """What a client has not been told yet."""
    found = []
    async for key, wish in door.turns.over(list(session.wishes.items())):
        if wish.pieces or wish.code or wish.told != (wish.start, wish.end):
            found.append(wish)
        if wish.pieces:
            session.put_last(key)
    return found


async def _fill(door: Door, wishes: Sequence[_Wish], request: Request) -> None:
    """Returns with as many bytes as are wanted, or fit in, with an error, or when time is over.

    Bytes are counted as they come, and read when there are enough of them. What was there before
    anybody counted is read once, to know how much it is, and not kept while more is waited for.
    """
    body = request.body
    most_bytes = max(min(getattr(body, "max_bytes", KAFKA_FETCH_BYTES), KAFKA_FETCH_BYTES), 0)
    wanted_bytes = min(body.min_bytes, most_bytes)
    deadline = time.monotonic() + min(body.max_wait.total_seconds(), KAFKA_WAIT_SECONDS)
    while True:
        has_more = False
        async for wish in door.turns.over(wishes):
            _look(door, wish, request.version)
            has_more |= not wish.code and wish.offset < wish.end
        left_seconds = deadline - time.monotonic()
        size, is_full = 0, False
        if has_more and (left_seconds <= 0 or not _is_too_little(door, wishes, wanted_bytes)):
            size, is_full = await _taken(door, wishes, request, most_bytes)
            left_seconds = deadline - time.monotonic()
        elif has_more:
            size = sum(wish.size for wish in wishes)
        if size >= wanted_bytes or is_full or left_seconds <= 0:
            return
        if any(wish.code for wish in wishes):
            return
        for wish in wishes:
            wish.pieces = ()
        request.room.give_records()
        lacking_bytes = min(wanted_bytes - size, *(wish.limit_bytes - wish.size for wish in wishes))
        await door.grown(
            {(wish.name, wish.number): wish.grown_bytes for wish in wishes},
            max(lacking_bytes, 1),
            left_seconds,
        )


def _is_too_little(door: Door, wishes: Sequence[_Wish], wanted_bytes: int) -> bool:
    """Whether less is there than is wanted, as far as that is known without reading it."""
    if wanted_bytes <= 1 or len(wishes) > KAFKA_QUICK_ITEMS or any(wish.code for wish in wishes):
        return False
    for wish in wishes:
        if wish.offset < wish.end:
            size = door.core.bytes_from(wish.name, wish.number, wish.offset)
            if size is None or size >= wish.limit_bytes:
                return False
            wish.size = size
    return sum(wish.size for wish in wishes) < wanted_bytes


async def _taken(
    door: Door, wishes: Sequence[_Wish], request: Request, most_bytes: int
) -> tuple[int, bool]:
    """Fills the wishes when there is room for that: (bytes, whether more does not fit in).

    The first batch may be larger than anybody wants at a time; then there has to be room for that.
    """
    room_bytes = min(most_bytes, sum(wish.limit_bytes for wish in wishes))
    for _ in range(_ATTEMPTS):
        await request.room.take_records(room_bytes)
        size, is_full = await _read(door, wishes, most_bytes)
        if size <= room_bytes:
            break
        for wish in wishes:
            wish.pieces = ()
        request.room.give_records()
        room_bytes = size
    else:
        size, is_full = 0, True  # the client asks again
    request.room.give_records(size)
    return size, is_full


async def _read(door: Door, wishes: Sequence[_Wish], most_bytes: int) -> tuple[int, bool]:
    """Fills the wishes with what is there: (bytes, whether there is more that does not fit in)."""
    size, is_full = 0, False
    async for wish in door.turns.over(wishes):
        wish.size = 0
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
            wish.size = sum(map(len, found.pieces))
            size += wish.size
            is_full |= found.end < wish.end
    return size, is_full


def _look(door: Door, wish: _Wish, version: int) -> None:
    """Where its partition begins and ends now."""
    wish.code, wish.pieces, wish.size = ErrorCode.none, (), 0
    try:
        _place(door, wish)
        if version < _FIRST_WITH_ZSTD and door.core.codec_of(wish.name) == "zstd":
            wish.code = ErrorCode.unsupported_compression_type
    except errors.SparklogError as error:
        wish.code = code_of(error)


def _place(door: Door, wish: _Wish) -> None:
    identity = wish.identity
    wish.name = identity if isinstance(identity, str) else name_of_id(door.core, identity)
    door.core.check_leader_epoch(wish.name, wish.number, wish.leader_epoch)
    place = door.core.place(wish.name, wish.number)
    wish.start, wish.end, wish.grown_bytes = place.start, place.end, place.grown_bytes
    if not wish.start <= wish.offset <= wish.end:
        raise errors.OffsetOutOfRange(
            topic=wish.name,
            partition=wish.number,
            offset=wish.offset,
            start=wish.start,
            end=wish.end,
        )


async def _fetched(door: Door, wish: _Wish, limit_bytes: int, *, at_least_one: bool) -> Fetched:
    """As much as is wanted, in portions; what is not in memory is one portion alone."""
    pieces: list[Raw] = []
    size, end = 0, wish.offset
    async for _ in door.turns.over(count()):
        fetch = partial(
            door.core.fetch_kafka,
            *(wish.name, wish.number, end),
            limit_bytes=limit_bytes - size,
            at_least_one=at_least_one and not pieces,
        )
        found = fetch(only_memory=True)
        if found is None and not pieces:
            found = await door.blocking(Work.READ, fetch)
        if found is None or not found.pieces:
            break
        pieces += found.pieces
        size += sum(map(len, found.pieces))
        end = found.end
        if end >= wish.end or size >= limit_bytes:
            break
    return Fetched(pieces, end)


class _Told(NamedTuple):
    """A wish as it is answered: a session goes on while its answer is sent."""

    number: int
    code: ErrorCode
    start: int
    end: int
    pieces: Sequence[Raw]


async def _answer(
    door: Door, wishes: Sequence[_Wish], session: Session | None, body: Any
) -> Fields:
    partition = partial(_partition, body.isolation_level == _READ_COMMITTED)
    topics: dict[str | uuid.UUID, tuple[Mapping[str, Any], list[_Told]]] = {}
    async for wish in door.turns.over(wishes):
        _, told = topics.setdefault(wish.identity, (wish.topic, []))
        told.append(_Told(wish.number, wish.code, wish.start, wish.end, wish.pieces))
        wish.told, wish.pieces = (wish.start, wish.end), ()
    return {
        "throttle_time": NO_TIME,
        "error_code": ErrorCode.none,
        "session_id": session.number if session is not None else 0,
        "responses": [
            {**names, "partitions": Each(partition, told)} for names, told in topics.values()
        ],
    }


def _refused(code: ErrorCode) -> Fields:
    return {"throttle_time": NO_TIME, "error_code": code, "session_id": 0, "responses": ()}


def _partition(committed: bool, told: _Told) -> Fields:
    refused = told.code != ErrorCode.none
    return {
        "partition_index": told.number,
        "error_code": told.code,
        "high_watermark": -1 if refused else told.end,
        "last_stable_offset": -1 if refused else told.end,
        "log_start_offset": -1 if refused else told.start,
        "aborted_transactions": _aborted(committed, told.code),
        "records": Pieces(told.pieces),
    }


def _aborted(committed: bool, code: ErrorCode) -> tuple[()] | None:
    """None are, as there are no transactions; null says, as in Kafka, that nobody has looked."""
    if code != ErrorCode.none:
        return () if code in _NOT_READ else None
    return () if committed else None
