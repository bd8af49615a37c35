"""OffsetFetch (9): the committed offsets of groups (KIP-447, KIP-709).

All offsets are stable, because there are no transactions. A request for all offsets of a group
leaves out the topics that the client may not describe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kio.schema.errors import ErrorCode

from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka.error_codes import group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats.consumer_offsets import CommittedOffset
from sparklog.limits import GROUP_OFFSETS_STEP
from sparklog.security.acl import Operation, ResourceType

_Offsets: TypeAlias = Mapping[TopicPartition, CommittedOffset]
_Found: TypeAlias = _Offsets | GroupError | ErrorCode
"""The offsets of a group, or the reason why there are none."""


@serves(9, "offset_fetch", max_version=9, is_repeatable=True, needs_proof=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, access = request.body, request.access
    has_groups = hasattr(body, "groups")
    groups = (
        tuple({each.group_id: each for each in body.groups}.values()) if has_groups else (body,)
    )
    refused_groups = await access.refused(
        Operation.DESCRIBE, ResourceType.GROUP, (each.group_id for each in groups)
    )
    allowed = (each for each in groups if each.group_id not in refused_groups)
    refused_topics = await access.refused(
        Operation.DESCRIBE,
        ResourceType.TOPIC,
        (topic.name for each in allowed for topic in each.topics or ()),
    )
    prefetched = await _prefetch(context, groups, refused_groups)
    make = partial(_group, context, request, prefetched, refused_topics)
    if has_groups:
        is_slow = any(each.topics is None for each in groups)  # all offsets of a group
        replies = LazyArray(make, groups, is_slow=is_slow)
        return {"throttle_time": NO_TIME, "groups": replies}
    if body.topics is None:
        await context.scheduler.wait_turn()
    return {"throttle_time": NO_TIME, **make(body)}


async def _prefetch(
    context: HandlerContext, groups: Sequence[Any], refused: Collection[str]
) -> dict[str, _Found]:
    """Fetches the offsets of groups that have many of them, outside the event loop.

    The result also has the error of each group in `refused`.
    """
    offsets: dict[str, _Found] = dict.fromkeys(refused, ErrorCode.group_authorization_failed)
    async for each in context.scheduler.iterate(groups):
        if each.group_id in refused:
            continue
        partitions = _requested_partitions(each)
        is_large = (
            context.groups.has_many_offsets(each.group_id)
            if partitions is None
            else len(partitions) > GROUP_OFFSETS_STEP
        )
        if is_large:
            call = partial(context.groups.committed, each.group_id, partitions)
            offsets[each.group_id] = await context.run_blocking(WorkerPool.LARGE_REQUEST, call)
    return offsets


def _requested_partitions(group: Any) -> list[TopicPartition] | None:
    """Returns the partitions of a group's request; None if it requests all."""
    if group.topics is None:
        return None
    return [(each.name, number) for each in group.topics for number in each.partition_indexes]


def _group(
    context: HandlerContext,
    request: Request,
    prefetched: Mapping[str, _Found],
    refused: Collection[str],
    group: Any,
) -> Fields:
    """Returns the fields of a group. `refused`: topics that the client may not describe."""
    offsets = prefetched.get(group.group_id)
    if offsets is None:
        offsets = context.groups.committed(group.group_id, _requested_partitions(group))
    code = ErrorCode.none
    if isinstance(offsets, GroupError):
        offsets = group_code(offsets)
    if isinstance(offsets, ErrorCode):
        code, offsets = offsets, {}
        if request.version >= 2:  # in older versions each partition carries the error
            return {"group_id": group.group_id, "error_code": code, "topics": ()}
    by_topic = _by_topic(group.topics, offsets)
    if group.topics is None and request.access.is_limited:
        by_topic = {
            name: numbers
            for name, numbers in by_topic.items()
            if request.access.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
        }
    make = partial(_topic, offsets, code, refused)
    topics = LazyArray(make, tuple(by_topic.items()))
    return {"group_id": group.group_id, "error_code": code, "topics": topics}


def _topic(
    offsets: _Offsets,
    code: ErrorCode,
    refused: Collection[str],
    partitions: tuple[str, list[int]],
) -> Fields:
    topic, numbers = partitions
    if topic in refused:
        offsets, code = {}, ErrorCode.topic_authorization_failed
    return {
        "name": topic,
        "partitions": LazyArray(partial(_partition, offsets, topic, code), numbers),
    }


def _by_topic(topics: Any, offsets: _Offsets) -> Mapping[str, list[int]]:
    """Returns the requested partitions by topic; for null, all that have an offset."""
    if topics is not None:
        return {each.name: list(dict.fromkeys(each.partition_indexes)) for each in topics}
    all_offsets: dict[str, list[int]] = {}
    for topic, number in offsets:
        all_offsets.setdefault(topic, []).append(number)
    return all_offsets


def _partition(offsets: _Offsets, topic: str, code: ErrorCode, number: int) -> Fields:
    value = offsets.get((topic, number))
    return {
        "partition_index": number,
        "committed_offset": value.offset if value is not None else -1,
        "committed_leader_epoch": value.leader_epoch if value is not None else -1,
        "metadata": value.metadata if value is not None else "",
        "error_code": code,
    }
