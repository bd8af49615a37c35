"""A log as a broker shows it from afar, over Flight, where the root is out of reach."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.client.connection import Connection
from sparklog.client.reading import describe, read_range
from sparklog.sources.views import Choose, Committed, GroupOffsets, TopicView
from sparklog.storage.snapshot import RowGroup, Slice, Source


@functools.lru_cache(maxsize=4)
def connection(bootstrap: str) -> Connection:
    """One for all that a process asks of the broker."""
    return Connection.to(bootstrap)


def read(bootstrap: str, piece: Slice, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in order; `columns` of `ROW_SCHEMA`, `offset` among them.

    Raises `TopicChanged`, `UnknownTopic`, `OffsetOutOfRange`, and `Retriable` after a while.
    """
    channel = connection(bootstrap)
    info = describe(channel, piece.topic)
    if info.topic_id != piece.topic_id:
        raise errors.TopicChanged(topic=piece.topic, expected=piece.topic_id, found=info.topic_id)
    return read_range(
        channel, info, piece.partition, start=piece.first, end=piece.end, columns=columns
    )


class BrokerView:
    """Asks a broker, over Flight."""

    poll_interval_seconds = limits.POLL_INTERVAL_REMOTE_SECONDS

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._infos: Mapping[str, wire.TopicInfo] = {}

    def names(self) -> Collection[str]:
        listed: wire.TopicNames = self._connection.action("topics.list")
        return listed.topics

    def refresh(self, choose: Choose, *, anew: bool) -> Mapping[str, TopicView]:
        del anew  # nothing is remembered
        self._infos = {name: describe(self._connection, name) for name in choose(self.names())}
        return {
            name: TopicView(
                info.topic_id,
                tuple(each.start for each in info.partitions),
                tuple(each.published for each in info.partitions),
                tuple(each.end for each in info.partitions),
            )
            for name, info in self._infos.items()
        }

    def slices(self, topic: str, partition: int, first: int, end: int) -> list[Slice]:
        return [
            Slice(
                topic=topic,
                topic_id=self._infos[topic].topic_id,
                partition=partition,
                first=first,
                end=end,
                source=Source.BROKER,
            )
        ]

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        return [() for _ in slices]  # files are the broker's business

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        request = wire.OffsetsForTimes(topic=topic, timestamps_us={partition: timestamp_us})
        found: wire.Offsets = self._connection.action("offsets.for_times", request)
        return None if found.offsets[partition] < 0 else found.offsets[partition]

    def committed(self, group: str) -> GroupOffsets | None:
        name = wire.GroupName(group=group)
        try:
            self._connection.action("groups.describe", name)
        except errors.GroupRefused:
            return None
        # The broker tells only of topics that are still those that the group has read. What has
        # the name of one by now may be another than it was at our last look, which then counts.
        found: wire.GroupOffsets = self._connection.action("groups.offsets", name)
        return {
            (each.topic, each.partition): Committed(self._infos[each.topic].topic_id, each.offset)
            for each in found.offsets
            if each.topic in self._infos
        }
