"""OffsetFetch (9): the committed offsets of groups (KIP-447, KIP-709).

All offsets are stable, because there are no transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.groups.messages import GroupError
from sparklog.broker.kafka.error_codes import group_code
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats.consumer_offsets import CommittedOffset
from sparklog.limits import GROUP_OFFSETS_STEP

_Offsets = Mapping[TopicPartition, CommittedOffset]


@serves(9, "offset_fetch", max_version=9, is_repeatable=True, needs_proof=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body, version = request.body, request.version
    if hasattr(body, "groups"):
        groups = tuple({each.group_id: each for each in body.groups}.values())
        prefetched = await _prefetch(context, groups)
        is_slow = any(each.topics is None for each in groups)  # all offsets of a group
        make = partial(_group_with_id, context, version, prefetched)
        replies = LazyArray(make, groups, is_slow=is_slow)
        return {"throttle_time": NO_TIME, "groups": replies}
    prefetched = await _prefetch(context, [body])
    if body.topics is None:
        await context.scheduler.wait_turn()
    return {"throttle_time": NO_TIME, **_group(context, body, version, prefetched)}


async def _prefetch(
    context: HandlerContext, groups: Sequence[Any]
) -> dict[str, _Offsets | GroupError]:
    """Fetches the offsets of groups that have many of them, outside the event loop."""
    offsets: dict[str, _Offsets | GroupError] = {}
    async for each in context.scheduler.iterate(groups):
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


def _group_with_id(
    context: HandlerContext,
    version: int,
    prefetched: Mapping[str, _Offsets | GroupError],
    group: Any,
) -> Fields:
    return {"group_id": group.group_id, **_group(context, group, version, prefetched)}


def _group(
    context: HandlerContext,
    group: Any,
    version: int,
    prefetched: Mapping[str, _Offsets | GroupError],
) -> Fields:
    offsets = prefetched.get(group.group_id)
    if offsets is None:
        offsets = context.groups.committed(group.group_id, _requested_partitions(group))
    code = ErrorCode.none
    if isinstance(offsets, GroupError):
        code, offsets = group_code(offsets), {}
        if version >= 2:  # in older versions each partition carries the error
            return {"error_code": code, "topics": ()}
    topics = tuple(_by_topic(group.topics, offsets).items())
    return {"error_code": code, "topics": LazyArray(partial(_topic, offsets, code), topics)}


def _topic(offsets: _Offsets, code: ErrorCode, partitions: tuple[str, list[int]]) -> Fields:
    topic, numbers = partitions
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
