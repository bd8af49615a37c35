"""Frozen values of the storage layer: table snapshots, WAL entries and slices to read.

Nothing here does I/O. Offsets are 64-bit, ranges are half-open (`first` … `end`, `end` excluded),
times are microseconds since the Unix epoch, UTC.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from sparklog import limits

if TYPE_CHECKING:  # it loads pyarrow.compute, which most commands do without
    from sparklog.formats.values.columns import ColumnSet

COMPRESSION_EXPECTED = 16  # the assumed ratio if the decompressed size is unknown

# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """An active data file of a topic's table.

    `first` and `last` are its lowest and highest offsets according to its statistics, both
    inclusive. None: another engine wrote it without statistics, so it may contain any offset of its
    partition.
    """

    path: str
    """Relative to the table's folder, as written in the Delta log (percent-encoded)."""
    partition: int
    size_bytes: int
    rows: int | None
    first: int | None
    last: int | None
    min_timestamp_us: int | None = None
    max_timestamp_us: int | None = None
    modified_us: int = 0
    columns: str | None = None
    """The tag of the typed columns that it has (`formats.values.columns`); None: it has none."""
    misfits: int | None = None
    """The number of rows with an error in a typed column; None: unknown, or no typed columns."""
    statistics: str | None = field(default=None, compare=False)
    """The statistics of its typed columns, as JSON (`delta_log.ColumnStatistics`).

    Only a file that no commit has added yet has them here; afterwards they are in the log alone.
    """
    schemas: tuple[int, ...] = field(default=(), compare=False)
    """Some of the schemas of a registry that its values refer to; also only until it is added."""

    @property
    def newest_us(self) -> int:
        """The timestamp of the newest record, for retention; the write time if no record has one.

        Kafka's `LogSegment.largestTimestamp` follows the same rule: records without a timestamp
        have -1 ms. Another engine may truncate an upper bound to ms and add 1 ms, which turns -1
        into 0.
        """
        latest_us = self.max_timestamp_us
        return self.modified_us if latest_us is None or latest_us <= 0 else latest_us

    @property
    def oldest_us(self) -> int:
        """The timestamp of the oldest record, by the same rule; `newest_us` if unknown."""
        earliest_us = self.min_timestamp_us
        return self.newest_us if earliest_us is None or earliest_us < 0 else earliest_us


class GapCause(enum.StrEnum):
    """Reasons for offsets without a record. The values are part of the format."""

    SOURCE = "source"
    """The topic is or was a mirror, and its source has no record there."""
    COMPACTION = "compaction"
    """A later record had the same key."""
    ENGINE = "engine"
    """Another engine has removed rows from the table."""


Gaps: TypeAlias = Mapping[tuple[int, GapCause], int]
"""The offset below which a cause explains gaps, by partition and cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """A part of a data file that is read as a unit; both offset bounds are inclusive."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A topic's table at one Delta version.

    `ends[p]` is the `txn` of partition p: the next offset to be published. Below it, a missing
    offset is a gap; from there on, the WAL continues. `starts[p]` is the log start offset.
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
    creator: tuple[int, int] | None = None
    """The id and epoch of the broker that created it; None if an older release did."""
    gaps: Gaps = field(default_factory=lambda: MappingProxyType({}))
    """See `storage.table.gaps`."""
    append_only: bool = False
    """True if commits may add records and rearrange files, but not remove records."""
    file_retention_seconds: float | None = None
    """`delta.deletedFileRetentionDuration`: how long removed files are retained; None: not set."""
    log_retention_seconds: float | None = None
    """`delta.logRetentionDuration`: how long versions are retained; None: not set."""
    columns: ColumnSet | None = None
    """The typed columns; None if the topic has never had any."""

    @property
    def misfits(self) -> int:
        """The number of rows with an error in a typed column."""
        return sum(file.misfits or 0 for files in self.files for file in files)

    @property
    def waiting_rows(self) -> int:
        """The number of rows whose schema is not known yet."""
        if self.columns is None or not self.columns.formats:
            return 0
        from sparklog.formats.values.columns import waiting_of

        return sum(waiting_of(file.columns).rows for files in self.files for file in files)

    @property
    def unfilled_rows(self) -> int:
        """The number of rows in files without all typed columns that new files have."""
        return sum(file.rows or 0 for files in self.files for file in self.unfilled(files))

    def unfilled(self, files: Iterable[TableFile]) -> list[TableFile]:
        """Returns the files without all typed columns that new files have."""
        if self.columns is None:
            return []
        is_full = functools.cache(self.columns.is_full)  # most files have the same tag
        return [file for file in files if not is_full(file.columns)]


# ------------------------------------------------------------------------------ the WAL


class WalKind(enum.StrEnum):
    """Kinds of storage for an epoch's write-ahead log. The values are part of the format."""

    OBJECTS = "objects"
    """One object per flush."""
    SEGMENTS = "segments"
    """One append per flush, to files on a local root."""


class EntryKind(enum.IntEnum):
    """Kinds of WAL entries. The numbers are part of the format."""

    OPEN = 0
    RECORDS = 1
    STAGED = 2
    CONTROL = 3
    RESIGN = 4
    FENCE = 5


class Encoding(enum.IntEnum):
    """Encodings of an entry's records. The numbers are part of the format."""

    ARROW = 0
    KAFKA = 1


class BatchKind(enum.IntEnum):
    """Ways in which a Spark batch can be repeated. The numbers are part of the format."""

    NUMBERED = 0
    """One of an increasing series, from a streaming query or from a job that numbers its writes."""
    NAMED = 1
    """The only one with its name: a write with an idempotency key."""
    UNNAMED = 2
    """A write under a random name, which only its own driver can repeat."""
    NUMBERED_PART = 3
    """One leader's part of a numbered batch that several leaders append."""
    NAMED_PART = 4
    UNNAMED_PART = 5

    @property
    def is_part(self) -> bool:
        """True if other partitions may lack the batch even though this one has it."""
        return self >= BatchKind.NUMBERED_PART

    @property
    def is_numbered(self) -> bool:
        return self in (BatchKind.NUMBERED, BatchKind.NUMBERED_PART)

    @property
    def as_part(self) -> BatchKind:
        """The corresponding kind for a batch that several leaders append."""
        return self if self.is_part else BatchKind(self + BatchKind.NUMBERED_PART)


class BatchId(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a Spark batch; a second commit of the batch is skipped."""

    query: str
    batch: int


class StagedRef(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one partition in a file staged by a Spark task."""

    path: str
    start: int
    length: int
    crc32c: int


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A line in a WAL object's index: the entry's byte range and its metadata."""

    kind: EntryKind
    topic_id: str = ""
    partition: int = 0
    base_offset: int = 0
    count: int = 0
    min_timestamp_us: int = 0
    max_timestamp_us: int = 0
    arrival_us: int = 0
    """The broker's time at the append: the timestamp of rows without one."""
    timestamp_type: int = 0
    leader_epoch: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    transactional: bool = False
    batch_id: BatchId | None = None
    encoding: Encoding = Encoding.ARROW
    start: int = 0
    """First byte of the payload, relative to the end of the object's index."""
    length: int = 0
    crc32c: int = 0
    staged: StagedRef | None = None
    carried: bool = False
    """An older entry that is appended again, so that its old object can be removed."""
    batch_kind: BatchKind = BatchKind.NUMBERED
    decoded_bytes: int = 0
    """Size of its records as decompressed Arrow columns; 0 if the writer did not record it."""
    kept_rows: int = -1
    """The number of rows in an append that kept its rows' offsets, which may have gaps.

    -1: an ordinary append, with a row for each of the `count` offsets.
    """

    @property
    def end(self) -> int:
        return self.base_offset + self.count

    @property
    def rows(self) -> int:
        """The number of its rows: `count`, unless there are gaps."""
        return self.count if self.kept_rows < 0 else self.kept_rows

    @property
    def memory_bytes(self) -> int:
        """The memory that its records occupy as rows.

        An estimate for compressed records without `decoded_bytes`; decoding yields the exact size.
        """
        size = self.decoded_bytes
        if not size:
            size = self.length if self.staged is None else self.staged.length
            if self.encoding is Encoding.KAFKA:
                size = min(size * COMPRESSION_EXPECTED, limits.MAX_BATCH_BYTES)
        return size + self.rows * limits.ROW_BYTES


@dataclass(frozen=True, slots=True, order=True)
class WalPosition:
    """The position of a flush in the write-ahead logs."""

    broker: int
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Located:
    """An entry, its flush, and the location of its bytes."""

    entry: Entry
    at: WalPosition
    origin: int
    """The end of the index, which `entry.start` is relative to."""
    ordinal: int = -1
    """The segment that contains the entry; -1 if it is in the object of its flush."""


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """A partition's offsets in a WAL checkpoint, known even if the table cannot be read."""

    start: int
    """The log start offset."""
    published: int
    """The write-ahead logs contain every record from this offset on."""
    end: int
    """The next offset; -1: unknown."""
    leader_epoch: int = -1
    """The epoch of the leader that wrote the checkpoint; -1 if an old release did."""
    epochs: tuple[tuple[int, int], ...] = ()
    """(leader epoch, first offset) for each of the newest leader epochs with records, in order."""


NOT_LED: Final = Bounds(-1, -1, -1)
"""The placeholder for a partition that the checkpoint's broker does not lead."""


# ------------------------------------------------------------------------------ what to read


class ReadSource(enum.Enum):
    FILES = "files"
    WAL = "wal"
    BROKER = "broker"
    """Any source: a remote planner leaves the choice to the broker."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):  # the fast kind: a plan creates thousands
    """A range of offsets of one partition, with its location.

    It is identified by (topic id, partition, first, end). `files` and `entry` are hints: a reader
    that finds one of them missing plans the slice again. If there are several files, their offsets
    overlap because another engine rewrote the table, and the reader merges them.
    """

    topic: str
    topic_id: str
    partition: int
    first: int
    end: int
    source: ReadSource
    files: tuple[TableFile, ...] = ()
    entry: Located | None = None
