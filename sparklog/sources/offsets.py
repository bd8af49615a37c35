"""Position of a streaming query in every partition, and its form in the checkpoint.

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}}}

It contains the topic's id, because the same offsets in another topic are other records. Equal
positions are encoded equally, because Spark compares strings.

The end of a query's first micro-batch also contains the start of that batch, by topic:

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}, "from": {"0": 20, "1": 40}}}

Spark logs the end of a batch before running it, but not the start of the first one: it asks the
source again for that start, and the source's options may no longer resolve (ADR 19).

The end of the log, as reported in progress, also contains the time of the first record that a
query has not read, in ms since 1970, for each partition that has one:

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}, "unreadSince": {"0": 1357016400000}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from sparklog import errors


class TopicOffsets(msgspec.Struct, frozen=True):
    """Next offset to read, for each partition that is read."""

    id: str
    offsets: Mapping[int, int]


Position: TypeAlias = Mapping[str, TopicOffsets]
"""Offsets by topic."""


class _Stored(msgspec.Struct, frozen=True):
    id: str
    offsets: dict[int, int]
    begin: dict[int, int] | None = msgspec.field(default=None, name="from")
    unread_since: dict[int, int] = msgspec.field(default_factory=dict, name="unreadSince")


def encode(position: Position) -> dict[str, Any]:
    """Returns the form that Spark stores."""
    return {
        topic: {"id": position[topic].id, "offsets": _encoded(position[topic].offsets)}
        for topic in sorted(position)
    }


def encode_first(start: Position, end: Position) -> dict[str, Any]:
    """Returns the stored form of `end`, with the start of the batch that ends there.

    A topic that `start` lacks, or has under another id, is read from its log start, as is a
    partition missing from its `from`.
    """
    stored = encode(end)
    for topic, each in stored.items():
        known = start.get(topic)
        if known is None or known.id != each["id"]:
            each["from"] = {}
        else:
            each["from"] = _encoded(known.offsets)
    return stored


def encode_latest(end: Position, unread_since: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Returns the stored end of the log, with the times of first unread records, in ms."""
    stored = encode(end)
    for topic, times in unread_since.items():
        if times:
            stored[topic]["unreadSince"] = _encoded(times)
    return stored


def unread_since(stored: Mapping[str, Any]) -> Mapping[str, Mapping[int, int]]:
    """Returns the times of `encode_latest` by topic and partition. Raises what `decode` raises."""
    return {topic: each.unread_since for topic, each in _decoded(stored).items()}


def _encoded(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def decode(stored: Mapping[str, Any]) -> Position:
    """Returns the position. Raises `BadRequest` for the checkpoint of another source."""
    return {topic: TopicOffsets(each.id, each.offsets) for topic, each in _decoded(stored).items()}


def start_within(end: Mapping[str, Any]) -> Position | None:
    """Returns the start of the batch that ends at `end`, or None if only Spark knows it.

    A batch without topics needs no start. Raises what `decode` raises.
    """
    found = _decoded(end)
    starts = {
        topic: TopicOffsets(each.id, each.begin)
        for topic, each in found.items()
        if each.begin is not None
    }
    return starts if len(starts) == len(found) else None


def _decoded(stored: Mapping[str, Any]) -> Mapping[str, _Stored]:
    try:
        return msgspec.convert(stored, dict[str, _Stored], str_keys=True)
    except msgspec.ValidationError as error:
        raise errors.BadRequest(
            reason="the query's checkpoint was written by another source; use a new checkpoint:"
            f" {error}: {stored}"
        ) from error


def count(start: Position, end: Position) -> int:
    """Returns the number of offsets between the two positions."""
    return sum(
        at - start[topic].offsets[number]
        for topic, each in end.items()
        for number, at in each.offsets.items()
    )


def share(start: Position, end: Position, most: int) -> Position:
    """Returns a position between `start` and `end` with about `most` offsets after `start`.

    Each partition gets a share in proportion to its backlog, and at least one offset if it has any,
    so that none starves; as in Spark's Kafka source (`rateLimit`).
    """
    total = count(start, end)
    if total <= most:
        return end

    def limited(topic: str, number: int, last: int) -> int:
        first = start[topic].offsets[number]
        return min(last, first + max(most * (last - first) // total, 1))

    return _moved(end, limited)


def clip(position: Position, low: Position, high: Position) -> Position:
    """Returns `position`, limited to offsets from `low` to `high`."""
    return _moved(
        position,
        lambda topic, number, at: max(
            low[topic].offsets[number], min(at, high[topic].offsets[number])
        ),
    )


def upto(start: Position, end: Position, target: Position) -> Position:
    """Returns `end`, limited to `target`; partitions that the target lacks stay at `start`."""

    def limited(topic: str, number: int, last: int) -> int:
        first, goal = start[topic].offsets[number], target.get(topic)
        if goal is None or goal.id != end[topic].id:
            return first
        return max(first, min(last, goal.offsets.get(number, first)))

    return _moved(end, limited)


def _moved(position: Position, to: Callable[[str, int, int], int]) -> Position:
    """Returns the same partitions with the offsets that `to` returns."""
    return {
        topic: TopicOffsets(
            each.id, {number: to(topic, number, at) for number, at in each.offsets.items()}
        )
        for topic, each in position.items()
    }
