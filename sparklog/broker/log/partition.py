"""A partition led by this broker: its offsets, and the entries that readers and publisher need.

The lock of the `LedPartitions` guards every change. Offsets may be read without it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from sparklog import errors
from sparklog.broker.log.growth import Growth
from sparklog.broker.log.partition_state import PartitionEvent, PartitionState, after
from sparklog.broker.log.producer_state import Producers
from sparklog.broker.log.spark_batches import PartitionSparkBatches
from sparklog.storage.snapshot import BatchId, Bounds, Entry, Located

LEADER_EPOCHS_REMEMBERED = 32  # of a partition, with their first offsets


class Partition:
    """One partition, with `start` <= `published` <= `end`."""

    __slots__ = (
        "batches",
        "blocked",
        "end",
        "epochs",
        "growth",
        "inherited_end",
        "is_end_known",
        "leader_epoch",
        "number",
        "producers",
        "published",
        "since_version",
        "start",
        "state",
        "stranded",
        "taken_seconds",
        "unconfirmed",
        "unpublished",
        "unpublished_batches",
    )

    def __init__(
        self,
        number: int,
        *,
        leader_epoch: int,
        start: int,
        published: int,
        since_version: int = -1,
    ) -> None:
        self.number = number
        self.state = PartitionState.AWAITED
        self.since_version = since_version
        """The version of the table that `start` and `published` were first taken from."""
        self.leader_epoch = leader_epoch
        self.epochs: list[tuple[int, int]] = []
        """(leader epoch, its first offset) of the newest leader epochs with records."""
        self.start = start
        self.published = published
        self.end = published
        self.growth = Growth()
        """Bytes appended since this broker began to lead the partition."""
        self.inherited_end = published
        """Records below it were written by predecessors, with arrival times by their clocks."""
        self.unpublished: list[Located] = []
        """Entries that continue the table contiguously from `published` on."""
        self.unpublished_batches: dict[BatchId, tuple[int, int]] = {}
        """(first offset, end) of each Spark batch that is not completely published."""
        self.unconfirmed: list[Located] = []
        """Published entries, up to `published`, whose data files have not been seen since."""
        self.blocked: errors.SparklogError | None = None
        """Why no record may be appended or published; set in the state BLOCKED only."""
        self.stranded: list[Located] = []
        """Entries of a blocked partition that do not connect to the table."""
        self.is_end_known = True
        """False only for a blocked partition whose end is in neither its table nor the logs."""
        self.producers = Producers()
        self.batches = PartitionSparkBatches()
        self.taken_seconds = -math.inf
        """When this running broker received the partition from another, in monotonic seconds."""

    def move(self, event: PartitionEvent) -> None:
        """Enters the state that follows the event. Requires the lock of the led partitions."""
        self.state = after(self.state, event)
        is_blocked = self.state is PartitionState.BLOCKED
        assert is_blocked == (self.blocked is not None), f"{self.state.name}: {self.blocked}"

    def unpublished_in(self, start: int, end: int) -> list[Located]:
        """Returns the unpublished entries with an offset in [`start`, `end`)."""
        first = bisect_right(self.unpublished, start, key=end_of)
        return self.unpublished[first : bisect_left(self.unpublished, end, lo=first, key=base_of)]

    def unpublished_below(self, end: int) -> tuple[Located, ...]:
        """Returns the unpublished entries that end at or before `end`."""
        return tuple(self.unpublished[: bisect_right(self.unpublished, end, key=end_of)])

    def note_batch(self, entry: Entry) -> None:
        """Records the Spark batch, if any, of an unpublished entry."""
        if entry.batch_id is not None:
            first, _ = self.unpublished_batches.get(entry.batch_id, (entry.base_offset, 0))
            self.unpublished_batches[entry.batch_id] = first, entry.end

    def note_epoch(self, entry: Entry) -> None:
        """Records where a leader epoch begins. Call it with entries in the order of offsets."""
        if not self.epochs or self.epochs[-1][0] < entry.leader_epoch:
            self.epochs.append((entry.leader_epoch, entry.base_offset))
            del self.epochs[:-LEADER_EPOCHS_REMEMBERED]

    def epoch_end(self, leader_epoch: int) -> tuple[int, int]:
        """Returns (leader epoch, end offset) of that epoch, or of the last known one before it.

        Follows Kafka's `LeaderEpochFileCache`: (-1, -1) for a future epoch; for an epoch older than
        all known ones, that epoch and the offset where the first known epoch begins.
        """
        if leader_epoch == self.leader_epoch:
            return leader_epoch, self.end
        if not 0 <= leader_epoch < self.leader_epoch:
            return -1, -1
        begins = {self.leader_epoch: self.end} | dict(self.epochs)
        known = max((each for each in begins if each <= leader_epoch), default=leader_epoch)
        end = begins[min(each for each in begins if each > leader_epoch)]
        return known, max(end, self.start)

    def drop_published_batches(self, end: int) -> None:
        """Drops the batches that end at or before `end`: they are published."""
        batches = self.unpublished_batches  # in the order of their offsets
        while batches:
            batch_id, (_, batch_end) = next(iter(batches.items()))
            if batch_end > end:
                return
            del batches[batch_id]

    def bounds(self) -> Bounds:
        """Returns the bounds for a checkpoint."""
        kept = self.unconfirmed[0].entry.base_offset if self.unconfirmed else None
        return Bounds(
            start=self.start,
            published=self.published if kept is None else kept,
            end=self.end if self.is_end_known else -1,
            leader_epoch=self.leader_epoch,
            epochs=tuple(self.epochs),
        )


def payload_bytes(entry: Entry) -> int:
    """Returns the bytes of the entry's records, in the WAL or in staged files."""
    return entry.length if entry.staged is None else entry.staged.length


def base_of(located: Located) -> int:
    """Returns the first offset of an entry."""
    return located.entry.base_offset


def end_of(located: Located) -> int:
    """Returns the offset after an entry."""
    return located.entry.end
