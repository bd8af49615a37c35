"""OffsetFetch (9): how far groups have read, by their own word (KIP-447, KIP-709)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog.broker.coordinator import TopicPartition
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.consumeroffsets import CommittedOffset
from sparklog.limits import GROUP_OFFSETS_STEP

_Found = Mapping[TopicPartition, CommittedOffset]


@serves(9, "offset_fetch", last=9)
async def _handle(door: Door, request: Request) -> Reply:
    body, version = request.body, request.version
    if hasattr(body, "groups"):
        wanted = tuple({each.group_id: each for each in body.groups}.values())
        groups = Each(partial(_named, door, version, await _many(door, wanted)), wanted)
        return {"throttle_time": NO_TIME, "groups": groups}
    return {"throttle_time": NO_TIME, **_group(door, body, version, await _many(door, [body]))}


async def _many(door: Door, wanted: Sequence[Any]) -> dict[str, _Found | GroupError]:
    """What is found of groups of which many offsets are wanted: others are served meanwhile."""
    found: dict[str, _Found | GroupError] = {}
    async for each in door.turns.over(wanted):
        places = _places(each)
        is_large = (
            door.groups.has_many_offsets(each.group_id)
            if places is None
            else len(places) > GROUP_OFFSETS_STEP
        )
        if is_large:
            look = partial(door.groups.committed, each.group_id, places)
            found[each.group_id] = await door.blocking(Work.ASIDE, look)
    return found


def _places(wanted: Any) -> list[TopicPartition] | None:
    """None where all are wanted."""
    if wanted.topics is None:
        return None
    return [(each.name, number) for each in wanted.topics for number in each.partition_indexes]


def _named(
    door: Door, version: int, many: Mapping[str, _Found | GroupError], wanted: Any
) -> Fields:
    return {"group_id": wanted.group_id, **_group(door, wanted, version, many)}


def _group(
    door: Door, wanted: Any, version: int, many: Mapping[str, _Found | GroupError]
) -> Fields:
    found = many.get(wanted.group_id)
    if found is None:
        found = door.groups.committed(wanted.group_id, _places(wanted))
    code = ErrorCode.none
    if isinstance(found, GroupError):
        code, found = group_code(found), {}
        if version >= 2:  # before, each partition says what is wrong, and from then on its group
            return {"error_code": code, "topics": ()}
    return {
        "error_code": code,
        "topics": Each(partial(_topic, found, code), tuple(_wanted(wanted.topics, found).items())),
    }


def _topic(found: _Found, code: ErrorCode, wanted: tuple[str, list[int]]) -> Fields:
    topic, numbers = wanted
    return {"name": topic, "partitions": Each(partial(_partition, found, topic, code), numbers)}


def _wanted(topics: Any, found: _Found) -> Mapping[str, list[int]]:
    """Null means whatever there is."""
    if topics is not None:
        return {each.name: list(dict.fromkeys(each.partition_indexes)) for each in topics}
    everything: dict[str, list[int]] = {}
    for topic, number in found:
        everything.setdefault(topic, []).append(number)
    return everything


def _partition(found: _Found, topic: str, code: ErrorCode, number: int) -> Fields:
    value = found.get((topic, number))
    return {
        "partition_index": number,
        "committed_offset": value.offset if value is not None else -1,
        "committed_leader_epoch": value.leader_epoch if value is not None else -1,
        "metadata": value.metadata if value is not None else "",
        "error_code": code,
    }
