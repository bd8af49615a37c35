"""Writes that keep the offsets of their rows: the offsets they cover, and their sections.

Tasks stage the rows of a partition in any number of sections, in any order. The driver sorts the
sections by offset. Sections without rows cover the offsets between them, and those at the beginning
and the end of the range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from sparklog import arrow, errors, limits
from sparklog.formats.record import OFFSET
from sparklog.formats.topic_names import check_topic_name, unknown_topic
from sparklog.storage.staging.manifest import Section

OffsetRanges: TypeAlias = Mapping[str, Mapping[int, tuple[int, int]]]
"""First offset and end of each partition, by topic."""

_OPTION = "offsetRanges"


def parse_ranges(value: str | None, topic: str | None) -> OffsetRanges:
    """Returns the option `offsetRanges`, in which only `topic` may occur, unless it is None.

    Raises `BadOption` and `BadTopicName`.
    """
    try:
        found = msgspec.json.decode(value or "", type=dict[str, dict[int, tuple[int, int]]])
    except msgspec.MsgspecError:
        reason = (
            "with offsets = keep, name the offsets that the write covers, first and end, of each"
            ' partition: {"orders": {"0": [0, 1000]}}'
        )
        raise errors.BadOption(option=_OPTION, value=value, reason=reason) from None
    for name, partitions in found.items():
        check_topic_name(name)
        if topic is not None and name != topic:
            reason = f"it names topic {name!r}, but the write goes to {topic!r}"
            raise errors.BadOption(option=_OPTION, value=value, reason=reason)
        for number, (first, end) in partitions.items():
            if number < 0 or not 0 <= first <= end <= limits.OFFSET_MAX:
                reason = f"[{first}, {end}] of partition {number} is not a range of offsets"
                raise errors.BadOption(option=_OPTION, value=value, reason=reason)
    return found


def check_partitions(ranges: OffsetRanges, counts: Mapping[str, int]) -> None:
    """Raises `UnknownTopic` and `UnknownPartition` for ranges of partitions that do not exist."""
    for topic, partitions in ranges.items():
        count = counts.get(topic)
        if count is None:
            raise unknown_topic(topic, counts)
        for number in partitions:
            if number >= count:
                raise errors.UnknownPartition(topic=topic, partition=number, last=count - 1)


def with_offsets(payload: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the payload of the given rows, plus their offsets. Raises `WrongSchema`."""
    for name in ("partition", OFFSET.name):
        if name not in rows.schema.names or rows.column(name).null_count:
            reason = f"offsets = keep needs a column {name!r} without nulls"
            raise errors.WrongSchema(reason=reason)
    return payload.append_column(OFFSET, rows.column(OFFSET.name).cast(OFFSET.type))


def check_order(topic: str, partition: int, payload: pa.RecordBatch) -> None:
    """Raises `WrongSchema` if the offsets of a partition's rows do not strictly increase."""
    offsets = arrow.as_numpy(payload.column(OFFSET.name))
    falls = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if len(falls):
        at = int(falls[0])
        reason = (
            f"offset {offsets[at + 1]} of {topic}-{partition} follows {offsets[at]} in one task."
            " Offsets must strictly increase: use sortWithinPartitions('partition', 'offset')"
        )
        raise errors.WrongSchema(reason=reason)


def covering(sections: Sequence[Section], ranges: OffsetRanges) -> list[Section]:
    """Returns sections that cover exactly the ranges, in the order of their offsets.

    Args:
        sections: with rows, in any order.
        ranges: the offsets that the write covers.

    Raises `BadRequest` if sections overlap, or have offsets outside the ranges.
    """
    staged: dict[tuple[str, int], list[tuple[int, int, Section]]] = {}
    for section in sections:
        assert section.offsets is not None
        staged.setdefault((section.topic, section.partition), []).append(
            (*section.offsets, section)
        )
    found: list[Section] = []
    for topic, partitions in ranges.items():
        for partition, (first, end) in partitions.items():
            of_partition = staged.pop((topic, partition), [])
            of_partition.sort(key=lambda each: each[0])
            found += _covering(topic, partition, of_partition, first, end)
    for topic, partition in staged:
        raise errors.BadRequest(
            reason=f"there are rows of {topic}-{partition}, which {_OPTION} does not name"
        )
    return found


def _covering(
    topic: str, partition: int, staged: Sequence[tuple[int, int, Section]], first: int, end: int
) -> Iterator[Section]:
    at = first
    for low, high, section in staged:
        if low < first or high > end:
            raise errors.BadRequest(
                reason=f"rows of {topic}-{partition} have offsets {low} to {high - 1}, but"
                f" {_OPTION} covers {first} to {end - 1}"
            )
        if low < at:
            raise errors.BadRequest(
                reason=f"two tasks have rows of {topic}-{partition} between offsets {low} and"
                f" {at - 1}: give each task offsets of its own, in order"
            )
        if low > at:
            yield Section(topic=topic, partition=partition, rows=0, offsets=(at, low))
        yield section
        at = high
    if at < end:
        yield Section(topic=topic, partition=partition, rows=0, offsets=(at, end))
