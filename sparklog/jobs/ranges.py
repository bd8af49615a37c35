"""Ranges of a topic's offsets, which jobs read with Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from sparklog import errors
from sparklog.sources.starting_offsets import encode_partitions, encode_pinned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparklog.client.log import Log
    from sparklog.formats.flight_messages import TopicInfo

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Offsets of a topic by partition, from `starts` up to `ends`."""

    starts: Mapping[int, int]
    ends: Mapping[int, int]

    @property
    def count(self) -> int:
        return sum(self.ends[each] - start for each, start in self.starts.items())

    def between(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Range:
        """Returns the part of the range from `starts` up to `ends`."""
        firsts = {each: max(start, starts[each]) for each, start in self.starts.items()}
        return Range(
            starts=firsts,
            ends={
                each: max(first, min(self.ends[each], ends[each])) for each, first in firsts.items()
            },
        )

    def gone(self, info: TopicInfo) -> tuple[int, int, int] | None:
        """Returns a partition whose log starts after offsets of the range, and those; or None."""
        for each in info.partitions:
            start = self.starts.get(each.partition, each.start)
            until = min(each.start, self.ends.get(each.partition, each.start))
            if start < until:
                return each.partition, start, until
        return None

    def check_exists(self, info: TopicInfo, option: str) -> None:
        """Raises `DataLoss` if offsets of the range are gone.

        `option`: the one that the advice combines with --start, such as `a new --checkpoint`.
        """
        gone = self.gone(info)
        if gone is None:
            return
        partition, start, until = gone
        remaining = {
            each.partition: max(self.starts.get(each.partition, each.start), each.start)
            for each in info.partitions
        }
        reason = (
            f"the log now starts later; {option} with --start"
            f" '{msgspec.json.encode(remaining).decode()}' continues with the records that remain"
        )
        raise errors.DataLoss(
            topic=info.topic, partition=partition, start=start, end=until, reason=reason
        )


def fair_shares(sizes: Sequence[int], most: int) -> list[int]:
    """Returns how many to take of each: about `most` in total, at least one of each that has any.

    Shares are equal; those with less leave the rest to the others.
    """
    shares = [0] * len(sizes)
    waiting = sorted(range(len(sizes)), key=sizes.__getitem__)
    for taken, index in enumerate(waiting):
        share = max(most // (len(waiting) - taken), 1)
        shares[index] = min(sizes[index], share)
        most -= shares[index]
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A topic to read. `topic_id`: the id of the topic that the offsets belong to."""

    root: str
    topic: str
    topic_id: str

    def frame(self, spark: SparkSession, part: Range, **options: str) -> DataFrame:
        """Returns the records of `part`; `options` are further ones of the source.

        Spark raises `TopicChanged` when it plans the read, if the topic was created again.
        """
        starts, ends = (
            encode_pinned({self.topic: each}, {self.topic: self.topic_id})
            for each in (part.starts, part.ends)
        )
        return (
            spark.read.format("sparklog")
            # Other partitions may have been added.
            .options(root=self.root, assign=encode_partitions({self.topic: sorted(part.starts)}))
            .options(startingOffsets=starts, endingOffsets=ends, **options)
            .load()
        )

    def describe(self, log: Log) -> TopicInfo:
        """Returns the topic as it is now. Raises `TopicChanged` if it was created again."""
        info = log.describe(self.topic)
        info.check_id(self.topic_id)
        return info


def range_of(log: Log, info: TopicInfo, start: str, end: str) -> Range:
    """Returns the offsets between two points of a topic.

    A point is `earliest`, `latest`, a time in ISO 8601, or JSON with an offset for each partition.
    Raises `BadOption`.
    """
    starts, ends = _offsets(log, info, "--start", start), _offsets(log, info, "--end", end)
    for each in info.partitions:
        number = each.partition
        reason = f"partition {number} has the offsets from {each.start} up to {each.end}"
        if not each.start <= starts[number] <= each.end:
            raise errors.BadOption(option="--start", value=start, reason=reason)
        if ends[number] > each.end:
            raise errors.BadOption(option="--end", value=end, reason=reason)
        ends[number] = max(starts[number], ends[number])
    return Range(starts=starts, ends=ends)


def _offsets(log: Log, info: TopicInfo, option: str, text: str) -> dict[int, int]:
    if text == EARLIEST:
        return {each.partition: each.start for each in info.partitions}
    if text == LATEST:
        return {each.partition: each.end for each in info.partitions}
    if not text.startswith("{"):
        try:
            return log.offsets_for_times(info.topic, text)
        except errors.BadOption:  # its message names the parameter
            reason = "expected earliest, latest, a time in ISO 8601, or offsets as JSON"
            raise errors.BadOption(option=option, value=text, reason=reason) from None
    try:
        found = msgspec.json.decode(text, type=dict[int, int])
    except msgspec.MsgspecError as error:
        raise errors.BadOption(option=option, value=text, reason=str(error)) from None
    if found.keys() != {each.partition for each in info.partitions}:
        reason = f"expected an offset for each of the {len(info.partitions)} partitions"
        raise errors.BadOption(option=option, value=text, reason=reason)
    return found
