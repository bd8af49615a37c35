"""A small in-memory root for tests of the Spark source, and the rows to be read from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from sparklog import limits
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats import consumer_offsets
from sparklog.formats.consumer_offsets import CommittedOffset, OffsetKey
from sparklog.sources import tasks
from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.options import LogLocation
from sparklog.sources.planner import Planner
from sparklog.sources.scan import Scan
from sparklog.sources.selection import Selection
from sparklog.sources.views import RootView
from sparklog.storage.objects import open_store
from sparklog.storage.snapshot import Slice
from tests.support.roots import HandmadeRoot, payload

_names = itertools.count()

SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)

Row = tuple[bytes, str, int, int]


@dataclass
class World:
    """An in-memory root with one topic of two partitions, and every value appended to it."""

    uri: str = field(default_factory=lambda: f"memory://source-{next(_names)}")
    values: dict[int, list[bytes]] = field(default_factory=lambda: {0: [], 1: []})
    _has_groups: bool = False

    def __post_init__(self) -> None:
        self.root = HandmadeRoot(open_store(self.uri), clock=SystemClock())
        self.root.create_topic("t")

    def append(self, *sizes: int) -> None:
        """Appends one object to the log, with this many records for each partition."""
        batches = []
        for partition, size in enumerate(sizes):
            known = self.values[partition]
            values = [b"%d/%d" % (partition, len(known) + number) for number in range(size)]
            known += values
            if values:
                batches.append(("t", partition, payload(values)))
        if batches:
            self.root.append(*batches)

    def commit(self, group: str, offsets: Mapping[int, int | None], *, topic_id: str = "") -> None:
        """Commits a group's offsets for partitions of `t`, in one object; None deletes a commit.

        `topic_id`: the id of an earlier topic of that name.
        """
        if not self._has_groups:
            self.root.create_topic(consumer_offsets.TOPIC, limits.OFFSETS_PARTITIONS)
            self._has_groups = True
        values: list[bytes | None] = []
        for offset in offsets.values():
            value = None
            if offset is not None:
                known = topic_id or self.root.topic_id("t")
                committed = CommittedOffset(offset=offset, commit_ms=0, topic_id=known)
                value = consumer_offsets.encode_offset(committed)
            values.append(value)
        keys = [consumer_offsets.encode_key(OffsetKey(group, "t", number)) for number in offsets]
        number = consumer_offsets.partition_of(group, limits.OFFSETS_PARTITIONS)
        self.root.append((consumer_offsets.TOPIC, number, payload(values, key=keys)))

    def publish_groups(self) -> None:
        """Publishes the commits of groups so far."""
        if self._has_groups:
            self.root.publish(consumer_offsets.TOPIC)

    def planner(self, *topics: str, pattern: str | None = None, fail: bool = True) -> Planner:
        """Returns a planner that has been refreshed."""
        view = RootView(open_store(self.uri), clock=ManualClock())
        selection = Selection(topics=() if pattern else topics or ("t",), pattern=pattern)
        planner = Planner(view, selection, fail_on_data_loss=fail)
        planner.refresh()
        return planner

    def scan(self, *, fail: bool = True) -> Scan:
        """Returns a scan of the columns of `SCHEMA`."""
        place = LogLocation(root=self.uri)
        return Scan(location=place, schema=SCHEMA, values=None, fail_on_data_loss=fail)

    def read(self, slices: Sequence[Slice], *, fail: bool = True) -> list[Row]:
        """Returns one task's rows, after encoding and decoding its slices as for an executor."""
        found: list[Row] = []
        for batch in self.scan(fail=fail).batches(tasks.decode(tasks.encode(slices))):
            assert batch.schema.equals(SCHEMA)
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        return found

    def rows(self, partition: int, first: int, end: int) -> list[Row]:
        """Returns the expected rows."""
        values = self.values[partition]
        return [(values[offset], "t", partition, offset) for offset in range(first, end)]


def position(topic_id: str, *at: int) -> Position:
    """Returns these offsets of topic `t`, from partition 0 on."""
    return {"t": TopicOffsets(topic_id, dict(enumerate(at)))}


class WatchedClock(ManualClock):
    """Records sleeps, and calls `meanwhile` during each."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.slept_seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_seconds.append(seconds)
        self.advance(seconds)
        self.meanwhile()
