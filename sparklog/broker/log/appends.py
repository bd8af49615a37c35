"""Appends to the log: checked and encoded records, and their outcome."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sparklog import errors
from sparklog.broker.log.hot_tail import HotRecords
from sparklog.broker.log.producer_state import NO_PRODUCER, ProducerSequence
from sparklog.storage import wal
from sparklog.storage.snapshot import (
    BatchId,
    BatchKind,
    Encoding,
    Entry,
    EntryKind,
    Located,
    StagedRef,
)


@dataclass(frozen=True, slots=True)
class KeptOffsets:
    """The first offset of an append that keeps its offsets, and the number of its rows.

    Offsets without a row are gaps.
    """

    first: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Records for one partition, checked and encoded, without offsets."""

    topic: str
    topic_id: str
    partition: int
    count: int
    arrival_us: int
    min_timestamp_us: int
    max_timestamp_us: int
    timestamp_type: int
    payload: wal.Payload = wal.EMPTY
    encoding: Encoding = Encoding.ARROW
    hot_records: HotRecords | None = None
    """The records for the hot tail; None for staged records."""
    decoded_bytes: int = 0
    """Bytes of the records as Arrow columns, decompressed; 0 if unknown."""
    producer_sequence: ProducerSequence | None = None
    staged: StagedRef | None = None
    batch_id: BatchId | None = None
    batch_kind: BatchKind = BatchKind.NUMBERED
    kept: KeptOffsets | None = None
    """Set if the append keeps its offsets, of which there are `count`."""

    def entry(self, *, base_offset: int, leader_epoch: int) -> Entry:
        producer_sequence = self.producer_sequence
        return Entry(
            kind=EntryKind.RECORDS if self.staged is None else EntryKind.STAGED,
            topic_id=self.topic_id,
            partition=self.partition,
            base_offset=base_offset,
            count=self.count,
            min_timestamp_us=self.min_timestamp_us,
            max_timestamp_us=self.max_timestamp_us,
            arrival_us=self.arrival_us,
            timestamp_type=self.timestamp_type,
            leader_epoch=leader_epoch,
            producer_id=producer_sequence.producer_id if producer_sequence else NO_PRODUCER,
            producer_epoch=producer_sequence.epoch if producer_sequence else -1,
            base_sequence=producer_sequence.base_sequence if producer_sequence else -1,
            batch_id=self.batch_id,
            batch_kind=self.batch_kind,
            encoding=self.encoding,
            staged=self.staged,
            decoded_bytes=self.decoded_bytes,
            kept_rows=self.kept.rows if self.kept is not None else -1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedEntry:
    """An older entry, appended again with the same offsets so that its object can be removed."""

    located: Located
    payload: wal.Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyObject:
    """An object without records.

    A checkpoint can follow it just as it can follow one with records. It becomes durable only after
    all earlier appends.
    """

    payload: wal.Payload = wal.EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """Offsets of an append. `duplicate`: an earlier append had already written the records."""

    base_offset: int
    count: int
    arrival_us: int
    timestamp_type: int
    duplicate: bool = False


class PendingAppend:
    """Appends that become durable together or not at all, and their results."""

    __slots__ = (
        "appends",
        "bytes",
        "done",
        "error",
        "gate",
        "is_queued",
        "is_staged",
        "results",
        "waiting",
    )

    def __init__(self, appends: Sequence[Append | CarriedEntry | EmptyObject]) -> None:
        self.appends = appends
        self.bytes = sum(each.payload.length for each in appends)
        self.is_staged = any(isinstance(each, Append) and each.staged for each in appends)
        self.results: list[AppendResult] = []
        self.error: BaseException | None = None
        self.is_queued = True
        """False once a flush has dequeued it."""
        self.done = False
        self.waiting = False
        self.gate = threading.Lock()
        self.gate.acquire()

    def outcome(self) -> list[AppendResult]:
        """Returns one result per append. Raises their error, or `OutcomeUnknown` if unexpected."""
        assert self.done
        if self.error is None:
            return self.results
        if isinstance(self.error, errors.SparklogError):
            raise self.error
        raise errors.OutcomeUnknown(what="an append", reason=repr(self.error)) from self.error

    def wake(self) -> None:
        """Wakes the thread that is waiting for the outcome, or to lead a flush."""
        if self.gate.locked():
            self.gate.release()
