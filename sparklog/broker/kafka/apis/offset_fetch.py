"""OffsetFetch (9): how far groups have read, by their own word (KIP-447, KIP-709)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog.broker.coordinator import TopicPartition
from sparklog.broker.groups import GroupError
from sparklog.broker.kafka.codes import group_code
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.consumeroffsets import CommittedOffset

_Found = Mapping[TopicPartition, CommittedOffset]


@serves(9, "offset_fetch", last=9)
async def _handle(door: Door, request: Request) -> Reply:
    body, version = request.body, request.version
    if hasattr(body, "groups"):
        wanted = tuple({each.group_id: each for each in body.groups}.values())
        return {"throttle_time": NO_TIME, "groups": Each(partial(_named, door, version), wanted)}
    return {"throttle_time": NO_TIME, **_group(door, body, version)}


def _named(door: Door, version: int, wanted: Any) -> Fields:
    return {"group_id": wanted.group_id, **_group(door, wanted, version)}


def _group(door: Door, wanted: Any, version: int) -> Fields:
    found = door.groups.committed(wanted.group_id)
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
