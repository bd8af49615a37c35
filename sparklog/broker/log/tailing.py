"""Follows partitions: the records that exist from some offsets on, and those appended later.

A tail costs nothing while it waits. Each of its partitions notifies it when records are appended,
so the cost of a flush depends on the tails of its partitions, not on all tails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import pyarrow as pa

from sparklog import errors
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """Rows of one partition for a reader; `end` is the next offset to read."""

    topic: str
    partition: int
    first: int
    end: int
    high_watermark: int
    rows: pa.RecordBatch


NextBatches = Callable[[Topic, Partition, int, int], tuple[Iterator[ReadBatch], bool]]
"""Returns batches of a partition from an offset up to an end, and whether they are few rows in
memory, so that reading them neither blocks nor takes a long time."""


class Place(NamedTuple):
    """Offsets of a partition that are read next."""

    topic_id: str
    partition: int
    offset: int
    end: int


class Tail:
    """The records of some partitions as they are appended, indefinitely.

    Used by one thread at a time. `notify` is called from any thread, under the lock of the led
    partitions, when a partition of a tail that has reached its end has grown, or its topic was
    deleted: it must not block. It may be called more than once for the same growth.
    """

    def __init__(
        self,
        led_partitions: LedPartitions,
        partitions: Sequence[tuple[Topic, Partition]],
        offsets: Sequence[int],
        next_batches: NextBatches,
        notify: Callable[[], None],
    ) -> None:
        self._led_partitions = led_partitions
        self._partitions = partitions
        self._offsets = list(offsets)
        self._next_batches = next_batches
        self._notify = notify
        self._ready = deque(range(len(partitions)))
        """The partitions that may have records; each is read in its turn."""
        self._queued = set(self._ready)
        self._index: int | None = None
        """The partition that is being read."""
        self._batches: Iterator[ReadBatch] | None = None
        """The rest of its batches, once reading has begun."""
        self._is_quick = True
        self._end = 0
        """The end of the partition that is being read, when its turn began."""
        self.read: Place | None = None
        """The place of the batch that `next` returned last."""
        self._followers = [self._follower(index) for index in range(len(partitions))]
        self._growths = led_partitions.growths.follow(
            [partition for _, partition in partitions], self._followers
        )

    def close(self) -> None:
        """Stops following the partitions."""
        self._led_partitions.growths.unfollow(self._growths, self._followers)
        self._batches = None

    def place(self) -> Place | None:
        """Returns the offsets to read next; None: all partitions have been read to their ends.

        Raises `UnknownTopic` if a topic was deleted, `NotLeader` if another broker leads a
        partition now, and `MetadataChanged` if a partition has moved away and back.
        """
        if self._index is not None and self._offsets[self._index] >= self._end:
            self._leave()
        while self._index is None:
            if not self._ready:
                return None
            index = self._ready.popleft()
            self._queued.discard(index)  # before its end is read: later records queue it again
            topic, partition = self._partitions[index]
            if self._led_partitions.by_id(topic.topic_id) is not topic:
                raise errors.UnknownTopic(topic=topic.name)
            if topic.partitions.get(partition.number) is not partition:
                topic.partition(partition.number)  # raises `NotLeader`, unless it is back
                raise errors.MetadataChanged
            if partition.growth is not self._growths[index]:
                raise errors.MetadataChanged  # it was away for a moment, and no longer notifies us
            self._end = partition.end
            if self._offsets[index] < self._end:
                self._index = index
        topic, partition = self._partitions[self._index]
        return Place(topic.topic_id, partition.number, self._offsets[self._index], self._end)

    def is_quick(self) -> bool:
        """Returns whether `next` takes little time and does not block.

        Raises what `place` raises, and `OffsetOutOfRange`.
        """
        return self._begin() is None or self._is_quick

    def next(self, *, only_quick: bool = False) -> ReadBatch | None:
        """Returns the next batch; None: all partitions have been read to their ends.

        Raises what `is_quick` raises, and any read error.

        Args:
            only_quick: also returns None before a partition whose reading may block.
        """
        while (batches := self._begin()) is not None:
            if only_quick and not self._is_quick:
                return None
            batch = next(batches, None)
            if batch is not None:
                assert self._index is not None
                topic, partition = self._partitions[self._index]
                offset = self._offsets[self._index]
                self.read = Place(topic.topic_id, partition.number, offset, self._end)
                self._offsets[self._index] = batch.end
                return batch
            self._leave()
        return None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReadBatch | None:
        """Returns the result of `next`. Never raises StopIteration."""
        return self.next()

    def count(self, size_bytes: int) -> None:
        """Counts bytes of records that were sent from the partition of `place`."""
        assert self._index is not None
        self._partitions[self._index][0].counts.bytes_out += size_bytes

    def again(self) -> None:
        """Returns to the place of the batch that `next` returned last."""
        assert self._index is not None
        assert self.read is not None
        self._offsets[self._index] = self.read.offset
        self._batches = None

    def rest(self) -> None:
        """Keeps only a few records in memory, because the next may be requested much later."""
        if not self._is_quick:
            self._batches = None

    def skip(self, end: int) -> None:
        """Continues at `end` in the partition of `place`, whose records the caller already has."""
        assert self._index is not None
        self._offsets[self._index] = end
        self._leave()

    def _begin(self) -> Iterator[ReadBatch] | None:
        """Returns the batches of the next partition that has records, or None."""
        if self._batches is None:
            place = self.place()
            if place is None:
                return None
            assert self._index is not None
            topic, partition = self._partitions[self._index]
            self._batches, self._is_quick = self._next_batches(
                topic, partition, place.offset, place.end
            )
        return self._batches

    def _leave(self) -> None:
        """Ends the turn of a partition; its next one follows the turns of the others."""
        assert self._index is not None
        self._grown(self._index)
        self._index = self._batches = None

    def _follower(self, index: int) -> Callable[[], None]:
        def grown() -> None:
            self._grown(index)
            self._notify()

        return grown

    def _grown(self, index: int) -> None:
        if index not in self._queued:
            self._queued.add(index)
            self._ready.append(index)
