"""A topic as a broker knows it: configuration, leaders, and the partitions that this broker leads.

The lock of the `LedPartitions` guards every change.
"""

from __future__ import annotations

from sparklog import errors
from sparklog.broker.counts import TopicCounts
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.spark_batches import TopicSparkBatches
from sparklog.formats import topic_config
from sparklog.formats.record import CREATE_TIME, LOG_APPEND_TIME
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.storage.maintenance.retention import removes_records
from sparklog.storage.table.encoding import APPEND_ONLY_REASON
from sparklog.storage.table.replay import NO_TABLE
from sparklog.storage.table.topic_table import TopicTable


class Topic:
    """A live topic, and those of its partitions that this broker leads."""

    __slots__ = (
        "config",
        "counts",
        "held_back",
        "in_doubt",
        "is_asleep",
        "is_removed",
        "last_read",
        "leader_epochs",
        "leaders",
        "name",
        "partitions",
        "spark_batches",
        "staged_bytes",
        "table",
        "topic_id",
        "unconfirmed",
        "unpublished_bytes",
        "version",
        "waiting",
        "waiting_partitions",
    )

    def __init__(self, name: str, topic_id: str, config: dict[str, str], table: TopicTable) -> None:
        self.name = name
        self.topic_id = topic_id
        self.config = config
        self.table = table
        """The broker's only view of the topic's table: publisher, janitor and readers share it.

        So a commit by one is known to all without a request. No thread holds the lock of the led
        partitions while it waits for the table.
        """
        self.version = 0
        """The metadata version of `leaders`: an older version does not change them."""
        self.last_read = NO_TABLE
        """The last version that was published or planned with. The next one may be damaged."""
        self.leaders: tuple[int, ...] = ()
        """Broker ids, one per partition, as in the metadata."""
        self.leader_epochs: tuple[int, ...] = ()
        """One per partition, like `leaders`."""
        self.partitions: dict[int, Partition] = {}
        """The partitions in a `LED` state, by number, in order.

        Replaced, never modified, because threads iterate over it without a lock.
        """
        self.is_removed = False
        """True once the topic is deleted: threads that still publish it find nothing to do."""
        self.spark_batches = TopicSparkBatches()
        self.counts = TopicCounts()
        self.unpublished_bytes = 0
        """Memory and WAL space of the records waiting for the table, excluding staged ones."""
        self.staged_bytes = 0
        """Bytes of the records waiting for the table in staged files."""
        self.waiting = 0
        """The number of unpublished entries."""
        self.waiting_partitions: dict[int, Partition] = {}
        """The partitions with unpublished entries, by number.

        In the order in which they began to wait for a commit.
        """
        self.is_asleep = False
        """True while unpublished entries wait for a long interval; see `PublishQueue`."""
        self.unconfirmed = 0
        """The number of published but unconfirmed entries."""
        self.held_back: str | None = None
        """Why the topic's table cannot be written at present."""
        self.in_doubt: str | None = None
        """Why it is unknown if the topic still exists. Until it is known, records are rejected."""

    @property
    def refusal(self) -> str | None:
        """Why this broker cannot write the topic's table; None also if others lead all of it."""
        return self.in_doubt or (self.held_back if self.partitions else None)

    @property
    def deletion_refusal(self) -> str | None:
        """Why retention or key compaction cannot remove records; None if it can, or need not."""
        is_append_only = self.table.snapshot.append_only
        return APPEND_ONLY_REASON if is_append_only and removes_records(self.config) else None

    @property
    def timestamp_type(self) -> int:
        wanted = topic_config.value_of(self.config, "message.timestamp.type")
        return LOG_APPEND_TIME if wanted == "LogAppendTime" else CREATE_TIME

    @property
    def is_compacted(self) -> bool:
        """True if only the last record of each key is retained, so that keys are required."""
        return topic_config.is_compacted(self.config)

    @property
    def mirror_source(self) -> str | None:
        """The source whose records and offsets the topic mirrors; None if it is not a mirror."""
        return self.config.get(MIRROR_SOURCE) or None

    @property
    def max_message_bytes(self) -> int | None:
        """The topic's own limit; None if only the broker's limits apply."""
        wanted = self.config.get("max.message.bytes")
        return int(wanted) if wanted is not None else None

    @property
    def compression(self) -> tuple[str, int] | None:
        """(codec, level) for Kafka batches; None keeps them as the producers sent them."""
        return topic_config.compression_of(self.config)

    def publish_interval_seconds(self, usual_seconds: float) -> float:
        """Returns how long records wait for the table, on a broker with this interval."""
        return topic_config.publish_interval_seconds(self.config, usual_seconds=usual_seconds)

    def time_bounds_ms(self, now_us: int) -> tuple[int, int]:
        """Returns the first and the last timestamp that a record may have now."""
        before = topic_config.number_of(self.config, "message.timestamp.before.max.ms")
        after = topic_config.number_of(self.config, "message.timestamp.after.max.ms")
        now_ms = now_us // 1_000
        return now_ms - before, now_ms + after

    def check_times(self, low_us: int, high_us: int, now_us: int) -> None:
        """Raises `BadTimestamp` if the timestamps are too far from the broker's clock."""
        first_ms, last_ms = self.time_bounds_ms(now_us)
        low_ms, high_ms = low_us // 1_000, high_us // 1_000
        if low_ms < first_ms or high_ms > last_ms:
            reason = (
                f"timestamps of {low_ms} to {high_ms} ms; topic {self.name} now accepts"
                f" {first_ms} to {last_ms} ms"
            )
            raise errors.BadTimestamp(reason=reason)

    def check_keys(self, partition: int, keyless: int) -> None:
        """Raises `KeylessRecord` if records without a key are sent to a compacted topic."""
        if keyless and self.is_compacted:
            raise errors.KeylessRecord(topic=self.name, partition=partition, count=keyless)

    @property
    def count(self) -> int:
        """The number of all partitions, whichever broker leads them."""
        return len(self.leaders)

    @property
    def is_shared(self) -> bool:
        """True if other brokers also lead partitions of it."""
        return len(self.partitions) < self.count

    @property
    def has_blocked(self) -> bool:
        """True if a partition accepts no records, because its table and log do not connect."""
        return any(each.blocked is not None for each in self.partitions.values())

    def partition(self, number: int) -> Partition:
        """Returns a partition that this broker leads. Raises `UnknownPartition`, `NotLeader`."""
        found = self.partitions.get(number)
        if found is not None and found.state is not PartitionState.RESIGNING:
            return found
        if not 0 <= number < self.count:
            raise errors.UnknownPartition(topic=self.name, partition=number, last=self.count - 1)
        raise errors.NotLeader(topic=self.name, partition=number, leader=self.leaders[number])
