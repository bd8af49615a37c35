"""Where a streaming query is: a position in every partition, and its form in the checkpoint.

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}}}

The topic's id belongs to it: under another id the same numbers mean other records. Two equal
positions are the same text, because Spark compares texts.

The end of a query's first micro-batch also holds where that batch begins, by topic:

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}, "from": {"0": 20, "1": 40}}}

Spark logs the end of a batch before it runs it, but never where the first one begins: for that it
asks the source again (ADR 19).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from sparklog import errors


class TopicOffsets(msgspec.Struct, frozen=True):
    """The next offset to read of each partition that is read."""

    id: str
    offsets: Mapping[int, int]


Position: TypeAlias = Mapping[str, TopicOffsets]
"""By topic."""


class _Stored(msgspec.Struct, frozen=True):
    id: str
    offsets: dict[int, int]
    begin: dict[int, int] | None = msgspec.field(default=None, name="from")


def encode(position: Position) -> dict[str, Any]:
    """The form that Spark keeps."""
    return {
        topic: {"id": position[topic].id, "offsets": _encoded(position[topic].offsets)}
        for topic in sorted(position)
    }


def encode_first(start: Position, end: Position) -> dict[str, Any]:
    """The same of `end`, with the start of the batch that ends there.

    A topic that `start` does not have, or has under another id, is read from its log start: so is
    a partition that its `from` lacks.
    """
    stored = encode(end)
    for topic, each in stored.items():
        known = start.get(topic)
        is_same = known is not None and known.id == each["id"]
        each["from"] = _encoded(known.offsets) if known is not None and is_same else {}
    return stored


def _encoded(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(number): offsets[number] for number in sorted(offsets)}


def decode(stored: Mapping[str, Any]) -> Position:
    """Raises `BadRequest` for what `encode` has not made: another source's checkpoint."""
    return {topic: TopicOffsets(each.id, each.offsets) for topic, each in _decoded(stored).items()}


def start_within(end: Mapping[str, Any]) -> Position | None:
    """The start of the batch that ends there; None where only Spark knows it.

    Raises what `decode` raises.
    """
    found = _decoded(end)
    told = {
        topic: TopicOffsets(each.id, each.begin)
        for topic, each in found.items()
        if each.begin is not None
    }
    return told if found and len(told) == len(found) else None


def _decoded(stored: Mapping[str, Any]) -> Mapping[str, _Stored]:
    try:
        return msgspec.convert(stored, dict[str, _Stored], str_keys=True)
    except msgspec.ValidationError as error:
        raise errors.BadRequest(
            reason=f"the query's checkpoint is not of this source: {error}: {stored}"
        ) from error


def count(start: Position, end: Position) -> int:
    """How many offsets lie between the two."""
    return sum(
        at - start[topic].offsets[number]
        for topic, each in end.items()
        for number, at in each.offsets.items()
    )


def share(start: Position, end: Position, most: int) -> Position:
    """As far from `start` towards `end` as about `most` offsets reach, by what each has waiting.

    A partition with twice as many offsets waiting gets twice as many, and each that has some gets
    one at least, so that none starves: as Spark's Kafka source does it (`rateLimit`).
    """
    total = count(start, end)
    if total <= most:
        return end

    def limited(topic: str, number: int, last: int) -> int:
        first = start[topic].offsets[number]
        return min(last, first + max(most * (last - first) // total, 1))

    return _moved(end, limited)


def clip(position: Position, low: Position, high: Position) -> Position:
    """The same places, nowhere before `low` nor beyond `high`."""
    return _moved(
        position,
        lambda topic, number, at: max(
            low[topic].offsets[number], min(at, high[topic].offsets[number])
        ),
    )


def upto(start: Position, end: Position, target: Position) -> Position:
    """`end`, but nowhere beyond `target`, nor before `start`; what the target lacks stays put."""

    def limited(topic: str, number: int, last: int) -> int:
        first, goal = start[topic].offsets[number], target.get(topic)
        if goal is None or goal.id != end[topic].id:
            return first
        return max(first, min(last, goal.offsets.get(number, first)))

    return _moved(end, limited)


def _moved(position: Position, to: Callable[[str, int, int], int]) -> Position:
    """The same places, at other offsets."""
    return {
        topic: TopicOffsets(
            each.id, {number: to(topic, number, at) for number, at in each.offsets.items()}
        )
        for topic, each in position.items()
    }
