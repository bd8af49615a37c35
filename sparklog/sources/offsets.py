"""Where a streaming query is: a position in every partition, and its form in the checkpoint.

    {"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}}}

The topic's id belongs to it: under another id the same numbers mean other records. Two equal
positions are the same text, because Spark compares texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from sparklog import errors


class TopicOffsets(msgspec.Struct, frozen=True):
    """The next offset to read of each partition, from partition 0 on."""

    id: str
    offsets: tuple[int, ...]


Position: TypeAlias = Mapping[str, TopicOffsets]
"""By topic."""


class _Stored(msgspec.Struct, frozen=True):
    id: str
    offsets: dict[int, int]


def encode(position: Position) -> dict[str, Any]:
    """The form that Spark keeps."""
    return {
        topic: {
            "id": position[topic].id,
            "offsets": {str(number): at for number, at in enumerate(position[topic].offsets)},
        }
        for topic in sorted(position)
    }


def decode(stored: Mapping[str, Any]) -> Position:
    """Raises `BadRequest` for what `encode` has not made: another source's checkpoint."""
    try:
        found = msgspec.convert(stored, dict[str, _Stored], str_keys=True)
        return {
            topic: TopicOffsets(
                each.id, tuple(each.offsets[number] for number in range(len(each.offsets)))
            )
            for topic, each in found.items()
        }
    except (msgspec.ValidationError, KeyError) as error:
        raise errors.BadRequest(
            reason=f"the query's checkpoint is not of this source: {error}: {stored}"
        ) from error


def share(start: Position, end: Position, most: int) -> Position:
    """As far from `start` towards `end` as `most` offsets reach, each partition by what it has.

    A partition with twice as many offsets waiting gets twice as many, as in Spark's Kafka source;
    what the division leaves over goes to those that it wronged most, so that exactly `most` are
    given where there are as many.
    """
    waiting = {
        (topic, number): at - start[topic].offsets[number]
        for topic, each in end.items()
        for number, at in enumerate(each.offsets)
    }
    total = sum(waiting.values())
    if total <= most:
        return end
    given = {place: most * count // total for place, count in waiting.items()}
    wronged = sorted(waiting, key=lambda place: (-(most * waiting[place] % total), place))
    for place in wronged[: most - sum(given.values())]:
        given[place] += 1
    return {
        topic: TopicOffsets(
            each.id,
            tuple(
                start[topic].offsets[number] + given[topic, number]
                for number in range(len(each.offsets))
            ),
        )
        for topic, each in end.items()
    }
