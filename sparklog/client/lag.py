"""Lag of a consumer group: how many records it has not read yet, by partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from sparklog import errors
from sparklog.client.consumer.assignors import decode_assignment
from sparklog.client.offsets import TopicPartition
from sparklog.display import counted, html_table
from sparklog.formats import flight_messages, group_messages

_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("committed", pa.int64()),
        pa.field("end", pa.int64()),
        pa.field("lag", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLag:
    """Position of a group in one partition."""

    topic: str
    partition: int
    committed: int | None
    """The next offset that the group will read; None if it has not committed one."""
    end: int
    """The high watermark: the offset of the next record to be written."""
    lag: int | None
    """Number of offsets from `committed`, or the log start if higher, to `end`; None without a
    commit. A compacted topic may have fewer records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLag:
    """Lag of a group: a sequence of its partitions, ordered by topic and number."""

    group: str
    state: str
    """Kafka's name, such as Empty or Stable."""
    partitions: tuple[PartitionLag, ...]

    @property
    def total(self) -> int:
        """The sum of the known lags."""
        return sum(each.lag or 0 for each in self.partitions)

    def to_table(self) -> pa.Table:
        """Returns columns `topic` (string), `partition` (int32), `committed`, `end`, `lag` (int64).

        `committed` and `lag` are null if the group has not committed an offset.
        """
        rows = [{name: getattr(each, name) for name in _SCHEMA.names} for each in self.partitions]
        return pa.Table.from_pylist(rows, _SCHEMA)

    def __iter__(self) -> Iterator[PartitionLag]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)

    def __getitem__(self, index: int) -> PartitionLag:
        return self.partitions[index]

    def __repr__(self) -> str:
        return f"GroupLag({self.group!r}, {counted(len(self), 'partition')}, lag {self.total:,})"

    def _repr_html_(self) -> str:
        names = _SCHEMA.names
        rows = [[getattr(each, name) for name in names] for each in self.partitions]
        return html_table(f"{self.group} ({self.state}), lag {self.total:,}", names, rows)


def assigned(member: group_messages.GroupMember) -> list[TopicPartition]:
    """Returns the member's partitions; none if it does not use the consumer protocol."""
    try:
        return decode_assignment(member.assignment)
    except errors.CorruptRecord:
        return []


def partitions_of(
    info: group_messages.GroupInfo, committed: Mapping[TopicPartition, int]
) -> list[TopicPartition]:
    """Returns the partitions with a committed offset or a member, in order.

    Some may not exist: a member may still be assigned partitions of a deleted topic.
    """
    return sorted(
        committed.keys() | {partition for each in info.members for partition in assigned(each)}
    )


def group_lag(
    info: group_messages.GroupInfo,
    committed: Mapping[TopicPartition, int],
    topics: Mapping[str, flight_messages.TopicInfo],
) -> GroupLag:
    """Returns the lag in those of a group's partitions that exist.

    Args:
        info: the group with its members.
        committed: the next offset to be read, by partition.
        topics: the topics of `partitions_of` that exist, by name.
    """
    return GroupLag(
        group=info.group,
        state=info.state,
        partitions=tuple(
            _partition_lag(topic, topics[topic].partitions[number], committed.get((topic, number)))
            for topic, number in partitions_of(info, committed)
            if topic in topics and number < len(topics[topic].partitions)
        ),
    )


def _partition_lag(
    topic: str, partition: flight_messages.PartitionInfo, committed: int | None
) -> PartitionLag:
    lag = None
    if committed is not None:
        lag = max(partition.end - max(committed, partition.start), 0)
    return PartitionLag(
        topic=topic,
        partition=partition.partition,
        committed=committed,
        end=partition.end,
        lag=lag,
    )
