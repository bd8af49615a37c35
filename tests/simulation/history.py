"""Answers to clients and observations of readers, with the invariants that they must satisfy.

Every value names its topic id, its sender, its position in the sender's order, and a number that is
never used twice. So each observed row is checked by itself, at once:

- an offset of a partition always holds the same record;
- a table has the rows of a query's batch for all partitions, or for none;
- a record has one offset in one partition, in the topic that it was sent to.

A log start is checked when it is observed: it never moves back, is never below an acked deletion of
records, and never above the offsets that clients have asked to delete.

The rest is checked at the end, on the log of each topic from its start: no acked or observed record
is missing, offsets have no gaps, and the records of one sender are in the sender's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

Place = tuple[str, int]
"""(topic id, partition)."""

SOURCE: Final = "source"
"""The sender of all records of a mirror; the sequence of each is its offset."""

_EVERYTHING: Final = 2**62


class Violation(AssertionError):
    """A promise was broken."""


def ensure(condition: bool, what: str) -> None:
    """Raises `Violation` where a promise is broken."""
    if not condition:
        raise Violation(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Sender and number that a record's value carries; `topic_id` is "" where any topic will do."""

    topic_id: str
    sender: str
    partition: int
    sequence: int
    nonce: int

    def encode(self) -> bytes:
        parts = (self.topic_id, self.sender, self.partition, self.sequence, self.nonce)
        return "|".join(map(str, parts)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Value:
        """Returns the value that `data` is, or contains as a string of JSON."""
        if data[:1] in (b"{", b'"'):
            data = next(each for each in data.split(b'"') if b"|" in each)
        # Anything after it only makes the record large.
        topic_id, sender, partition, sequence, nonce = data.decode().split("|")[:5]
        return cls(
            topic_id=topic_id,
            sender=sender,
            partition=int(partition),
            sequence=int(sequence),
            nonce=int(nonce),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A record as a reader saw it; a time is None if the reader was not given one."""

    value: bytes | None
    key: bytes | None
    timestamp_us: int | None

    @property
    def identity(self) -> bytes:
        """The bytes that hold its `Value`: of a tombstone, the key."""
        found = self.key if self.value is None else self.value
        assert found is not None
        return found

    def is_same(self, other: Row) -> bool:
        times = {self.timestamp_us, other.timestamp_us} - {None}
        return (self.value, self.key) == (other.value, other.key) and len(times) <= 1


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[int, Row]]:
    """(offset, row) of a batch of `ROW_SCHEMA`."""
    columns = (
        batch.column("offset").to_pylist(),
        batch.column("value").to_pylist(),
        batch.column("key").to_pylist(),
        batch.column("timestamp").cast(pa.int64()).to_pylist(),
    )
    for offset, value, key, timestamp_us in zip(*columns, strict=True):
        yield offset, Row(value, key, timestamp_us)


def is_at_source(partition: int, offset: int) -> bool:
    """Returns whether the source of a mirror has a record there; it has gaps of any length."""
    return (offset * 7 + partition) % 5 < 3 and offset // 16 % 3 != partition


class History:
    """All observations so far; a contradiction raises `Violation` at once."""

    def __init__(self) -> None:
        self.acked: dict[Place, int] = defaultdict(int)
        """The offset after the last that was acked."""
        self.starts: dict[Place, int] = defaultdict(int)
        """Lower bounds of log start offsets that a client has been given."""
        self.mirrors: set[str] = set()
        """Ids of topics that are mirrors."""
        self.deletions = 0
        self.acks = 0
        self.seen = 0
        self._wishes: dict[tuple[str, int], int] = defaultdict(int)
        """Offsets up to which clients asked to delete records, by topic name and partition; the
        outcome of such a request may be unknown."""
        self._mortal: set[str] = set()
        """Names of topics that had a retention once."""
        self.retained = 0
        """Number of observed log starts that no client had asked for by offset."""
        self._retained: dict[Place, int] = defaultdict(int)
        self._batches: dict[str, dict[str, Mapping[int, tuple[int, int]]]] = defaultdict(dict)
        """Places of query batches, by topic id and name: first offset and count."""
        self._rows: dict[Place, dict[int, Row]] = defaultdict(dict)
        self._places: dict[tuple[str, bytes], tuple[int, int]] = {}

    def ack(self, who: str, place: Place, first: int, rows: Sequence[Row]) -> None:
        """Records an ack: `rows` are durable from offset `first`."""
        self.saw(f"{who}, acked", place, enumerate(rows, first))
        self.acked[place] = max(self.acked[place], first + len(rows))
        self.acks += len(rows)

    def mirrored(self, who: str, place: Place, rows: Mapping[int, Row], end: int) -> None:
        """Records an ack of a mirror's write, with rows at these offsets, up to `end`."""
        self.saw(f"{who}, acked", place, rows.items())
        self.acked[place] = max(self.acked[place], end)
        self.acks += len(rows)

    def offsets(self, place: Place, start: int, end: int) -> list[int]:
        """Returns the offsets of a partition that have a record, if it has them all."""
        topic_id, partition = place
        if topic_id not in self.mirrors:
            return list(range(start, end))
        return [offset for offset in range(start, end) if is_at_source(partition, offset)]

    def adopted(self, batch: str, topic_id: str, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Records an ack of a query's batch: its offsets by partition."""
        if len(ranges) > 1:
            self._batches[topic_id][batch] = ranges

    def check_ends(self, who: str, topic_id: str, ends: Sequence[int]) -> None:
        """Records an observed end of the topic's table, which contains a query's batch as a
        whole.
        """
        for batch, ranges in self._batches.get(topic_id, {}).items():
            has = {ends[partition] >= first + count for partition, (first, count) in ranges.items()}
            begun = any(ends[partition] > first for partition, (first, _) in ranges.items())
            ensure(
                has == {begun},
                f"{who}: the table of {topic_id} ends at {ends}, within batch {batch}: {ranges}",
            )

    def wish(self, topic: str, partition: int, offset: int) -> None:
        """Records a request to delete all records below the offset, in any incarnation of the
        topic; -1: all.
        """
        wished = self._wishes[topic, partition]
        self._wishes[topic, partition] = max(wished, _EVERYTHING if offset == -1 else offset)

    def keeps_nothing(self, topic: str) -> None:
        """Records a request for retention in any topic of that name."""
        self._mortal.add(topic)

    def deleted(self, place: Place, start: int) -> None:
        """Records an ack of a log start, which is durable then."""
        self.starts[place] = max(self.starts[place], start)
        self.deletions += start > 0

    def check_start(self, who: str, topic: str, place: Place, start: int, least: int) -> None:
        """Records an observed log start, where `least` was to be expected at least."""
        ensure(start >= least, f"{who}: {place} starts at {start}, and at {least} before")
        wished = self._wishes[topic, place[1]]
        is_wished = start <= wished or topic in self._mortal
        ensure(is_wished, f"{who}: {place} starts at {start}, wanted was {wished}")
        self.retained += start > max(wished, self._retained[place])
        self._retained[place] = max(start, self._retained[place])

    def saw(self, who: str, place: Place, rows: Iterable[tuple[int, Row]]) -> None:
        """Records that a reader saw `rows` at these offsets."""
        topic_id, partition = place
        known = self._rows[place]
        for offset, row in rows:
            self.seen += 1
            before = known.get(offset)
            if before is not None:
                ensure(row.is_same(before), f"{who}: {place} {offset} is {row} and was {before}")
                if before.timestamp_us is None:
                    known[offset] = row
                continue
            known[offset] = row
            value = Value.decode(row.identity)
            ensure(value.topic_id in ("", topic_id), f"{who}: {place} {offset} holds {value}")
            ensure(value.partition == partition, f"{who}: {place} {offset} holds {value}")
            is_there = value.sender != SOURCE or value.sequence == offset
            ensure(is_there, f"{who}: {place} {offset} holds {value}")
            other = self._places.setdefault((topic_id, row.identity), (partition, offset))
            ensure(
                other == (partition, offset),
                f"{who}: {row.identity!r} is at {(partition, offset)} and at {other}",
            )

    def is_whole(self, place: Place) -> bool:
        """Returns true if the log still starts at its first record, as far as observed."""
        return not self.starts[place] and not self._retained[place]

    def rows(self, place: Place) -> Iterable[Row]:
        """Everything that has been seen of a partition."""
        return self._rows[place].values()

    def log(self, place: Place, start: int, end: int) -> list[tuple[int, Row]]:
        """Returns the observed records of a partition from `start` to `end`, in order."""
        rows = self._rows[place]
        return [(offset, rows[offset]) for offset in sorted(rows) if start <= offset < end]

    def check_log(
        self, who: str, place: Place, start: int, end: int, log: Sequence[tuple[int, Row]]
    ) -> None:
        """`log` is all of a partition, from its `start` to its `end`, as it was seen at the end."""
        offsets = [offset for offset, _ in log]
        ensure(
            offsets == self.offsets(place, start, end),
            f"{who}: {place} is from {start} to {end} and has offsets {offsets}",
        )
        missing = sorted(offset for offset in self._rows[place] if offset >= end)
        ensure(
            not missing and self.acked[place] <= end,
            f"{who}: {place} ends at {end}, acked to {self.acked[place]}, seen {missing}",
        )
        newest: dict[str, int] = {}
        for offset, row in log:
            value = Value.decode(row.identity)
            before = newest.get(value.sender, -1)
            ensure(
                value.sequence > before,
                f"{who}: {place} {offset} holds {value}, after its sequence {before}",
            )
            newest[value.sender] = value.sequence
