"""Plain values of the storage floor: what a table holds, what a WAL object holds, what to read.

Nothing here reads or writes; everything is frozen. Offsets are 64-bit, ranges are half open
(`first` … `end`, `end` excluded), times are microseconds since the Unix epoch, UTC.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from sparklog import limits

# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """One active data file of a topic's table.

    `first` and `last` are the least and greatest offset in it by its statistics (both included);
    None where another writer left none, and then it may hold any offset of its partition.
    """

    path: str
    """Relative to the table's folder, as the Delta log spells it (percent-encoded)."""
    partition: int
    size_bytes: int
    rows: int | None
    first: int | None
    last: int | None
    min_timestamp_us: int | None = None
    max_timestamp_us: int | None = None
    modified_us: int = 0

    @property
    def newest_us(self) -> int:
        """The time of its newest record, for retention; when it was written where none has one.

        Kafka's `LogSegment.largestTimestamp` has the same rule: records without a time have -1 ms.
        An upper bound of another engine may be cut to ms and then raised by one, up to 0.
        """
        latest_us = self.max_timestamp_us
        return self.modified_us if latest_us is None or latest_us <= 0 else latest_us

    @property
    def oldest_us(self) -> int:
        """The time of its oldest record, likewise; `newest_us` where that is not known."""
        earliest_us = self.min_timestamp_us
        return self.newest_us if earliest_us is None or earliest_us < 0 else earliest_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """A part of a data file that is read as a whole; both bounds of its offsets are included."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A topic's table at one Delta version.

    `ends[p]` is the `txn` of partition p: the next offset to be published. Below it a missing
    offset is a gap; from it on the WAL continues. `starts[p]` is the log start offset.
    """

    version: int
    """-1: no table yet."""
    topic_id: str | None
    """None: no table, or a deleted topic."""
    partitions: int = 0
    config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ends: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    files: tuple[tuple[TableFile, ...], ...] = ()
    """Per partition, ordered by first offset; those without statistics come first."""


# ------------------------------------------------------------------------------ the WAL


class Kind(enum.IntEnum):
    """Kinds of WAL entries. The numbers are part of the format."""

    OPEN = 0
    RECORDS = 1
    STAGED = 2
    CONTROL = 3
    RESIGN = 4
    FENCE = 5


class Encoding(enum.IntEnum):
    """How an entry's records are written. The numbers are part of the format."""

    ARROW = 0
    KAFKA = 1


class BatchKind(enum.IntEnum):
    """How a batch of a Spark query may come again. The numbers are part of the format."""

    NUMBERED = 0
    """One of a rising series: of a streaming query, or of a job that numbers its writes."""
    NAMED = 1
    """The only one of its name: a write with an idempotency key."""
    UNNAMED = 2
    """A write under a random name, which only its own driver can repeat."""


class BatchId(msgspec.Struct, frozen=True, array_like=True):
    """Names a batch that a Spark query writes once: the second commit of it is skipped."""

    query: str
    batch: int


class StagedRef(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one partition in a file that a Spark task staged."""

    path: str
    start: int
    length: int
    crc32c: int


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One line of a WAL object's index: where the entry lies and all that is known without it."""

    kind: Kind
    topic_id: str = ""
    partition: int = 0
    base_offset: int = 0
    count: int = 0
    min_timestamp_us: int = 0
    max_timestamp_us: int = 0
    arrival_us: int = 0
    """The broker's time of the append: the timestamp of rows that brought none."""
    timestamp_type: int = 0
    leader_epoch: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    transactional: bool = False
    batch_id: BatchId | None = None
    encoding: Encoding = Encoding.ARROW
    start: int = 0
    """First byte of the payload, counted from the end of the object's index."""
    length: int = 0
    crc32c: int = 0
    staged: StagedRef | None = None
    carried: bool = False
    """An older entry appended again, so that its old object can go."""
    batch_kind: BatchKind = BatchKind.NUMBERED
    decoded_bytes: int = 0
    """Bytes of its records as Arrow columns, out of compression; 0 where the writer did not say."""

    @property
    def end(self) -> int:
        return self.base_offset + self.count

    @property
    def memory_bytes(self) -> int:
        """Bytes that its records take as rows in memory.

        An estimate for compressed records of a writer that did not say: whoever decodes them counts
        what they came to.
        """
        size = self.decoded_bytes
        if not size:
            size = self.length if self.staged is None else self.staged.length
            if self.encoding is Encoding.KAFKA:
                size = min(size * limits.COMPRESSION_EXPECTED, limits.MAX_BATCH_BYTES)
        return size + self.count * limits.ROW_BYTES


@dataclass(frozen=True, slots=True, order=True)
class WalPosition:
    """Where a WAL object stands: `wal/<broker>/<epoch>/<sequence>`."""

    broker: int
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Located:
    """An entry and the object that holds it."""

    entry: Entry
    at: WalPosition
    origin: int
    """Where the object's index ends: the byte that `entry.start` counts from."""


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """A partition in a WAL checkpoint, which knows it even where the table cannot be read."""

    start: int
    """Its log start offset."""
    published: int
    """From here on the write-ahead logs hold every record."""
    end: int
    """The next offset; -1: not known."""


# ------------------------------------------------------------------------------ what to read


class Source(enum.Enum):
    FILES = "files"
    WAL = "wal"
    BROKER = "broker"
    """Wherever it is: who plans from afar leaves that to the broker that is asked for it."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):  # a plan makes thousands: the fast kind
    """A run of offsets of one partition and where it lies.

    Named by (topic id, partition, first, end); `files` and `entry` are hints: a reader that finds
    one of them gone plans the slice again. More than one file: their offsets overlap (another
    engine rewrote the table), and the reader merges them.
    """

    topic: str
    topic_id: str
    partition: int
    first: int
    end: int
    source: Source
    files: tuple[TableFile, ...] = ()
    entry: Located | None = None
