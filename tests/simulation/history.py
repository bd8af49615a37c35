"""What clients were told and readers saw, and what may never be otherwise.

Every value says what it is: which topic id it was meant for, who sent it, where in the sender's
order it stands, and a number that is never used twice. So each row that anybody sees can be judged
by itself, at once:

- an offset of a partition holds one record, for ever, whoever tells of it;
- a record stands at one place of a topic only, in the topic that it was sent to.

A log start is judged where it is seen: it never goes back, not behind what somebody was told who
deleted records, and not beyond what anybody has asked for.

The rest is judged at the end, on the log of each topic from its start on: nothing that was acked or
seen is missing, offsets have no gaps, and the records of one sender stand in the sender's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

Place = tuple[str, int]
"""(topic id, partition)."""

_EVERYTHING: Final = 2**62


class Violation(AssertionError):
    """A promise was broken."""


def ensure(condition: bool, what: str) -> None:
    """Raises `Violation` where a promise is broken."""
    if not condition:
        raise Violation(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a record's value says of it; `topic_id` is "" where any will do."""

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
        topic_id, sender, partition, sequence, nonce = data.decode().split("|")
        return cls(
            topic_id=topic_id,
            sender=sender,
            partition=int(partition),
            sequence=int(sequence),
            nonce=int(nonce),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A record as somebody saw it; a time of None was not told."""

    value: bytes
    key: bytes | None
    timestamp_us: int | None

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


class History:
    """All that was ever told; whatever contradicts it raises `Violation` at once."""

    def __init__(self) -> None:
        self.acked: dict[Place, int] = defaultdict(int)
        """The offset after the last that was acked."""
        self.starts: dict[Place, int] = defaultdict(int)
        """Where the log starts at least: somebody was told so."""
        self.deletions = 0
        self.acks = 0
        self.seen = 0
        self._wishes: dict[tuple[str, int], int] = defaultdict(int)
        """Up to which offset somebody has asked for records to go, by topic's name and partition;
        whether that was done he may not know."""
        self._mortal: set[str] = set()
        """Names of topics that had a retention once."""
        self.retained = 0
        """How often a log start was seen that nobody had asked for by its offset."""
        self._retained: dict[Place, int] = defaultdict(int)
        self._rows: dict[Place, dict[int, Row]] = defaultdict(dict)
        self._places: dict[tuple[str, bytes], tuple[int, int]] = {}

    def ack(self, who: str, place: Place, first: int, rows: Sequence[Row]) -> None:
        """Somebody was told that `rows` stand durably from `first` on."""
        self.saw(f"{who}, acked", place, enumerate(rows, first))
        self.acked[place] = max(self.acked[place], first + len(rows))
        self.acks += len(rows)

    def wish(self, topic: str, partition: int, offset: int) -> None:
        """Somebody asks for the records below it to go, of whatever topic it is; -1: all."""
        wished = self._wishes[topic, partition]
        self._wishes[topic, partition] = max(wished, _EVERYTHING if offset == -1 else offset)

    def keeps_nothing(self, topic: str) -> None:
        """Somebody asks for records of whatever topic has that name to go by themselves."""
        self._mortal.add(topic)

    def deleted(self, place: Place, start: int) -> None:
        """Somebody was told that the log starts there, and so durably."""
        self.starts[place] = max(self.starts[place], start)
        self.deletions += start > 0

    def check_start(self, who: str, topic: str, place: Place, start: int, least: int) -> None:
        """Somebody sees the log start there, and has reason to expect it at `least` there."""
        ensure(start >= least, f"{who}: {place} starts at {start}, and at {least} before")
        wished = self._wishes[topic, place[1]]
        is_wished = start <= wished or topic in self._mortal
        ensure(is_wished, f"{who}: {place} starts at {start}, wanted was {wished}")
        self.retained += start > max(wished, self._retained[place])
        self._retained[place] = max(start, self._retained[place])

    def saw(self, who: str, place: Place, rows: Iterable[tuple[int, Row]]) -> None:
        """Somebody saw `rows` at these offsets."""
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
            value = Value.decode(row.value)
            ensure(value.topic_id in ("", topic_id), f"{who}: {place} {offset} holds {value}")
            ensure(value.partition == partition, f"{who}: {place} {offset} holds {value}")
            other = self._places.setdefault((topic_id, row.value), (partition, offset))
            ensure(
                other == (partition, offset),
                f"{who}: {row.value!r} stands at {(partition, offset)} and at {other}",
            )

    def log(self, place: Place, start: int, end: int) -> list[tuple[int, Row]]:
        """What has been seen of a partition from `start` to `end`, in order."""
        rows = self._rows[place]
        return [(offset, rows[offset]) for offset in sorted(rows) if start <= offset < end]

    def check_log(self, who: str, place: Place, start: int, log: Sequence[tuple[int, Row]]) -> None:
        """`log` is all of a partition, from its `start` on, as it was seen at the end."""
        offsets, end = [offset for offset, _ in log], start + len(log)
        ensure(
            offsets == list(range(start, end)),
            f"{who}: {place} starts at {start} and has offsets {offsets}",
        )
        missing = sorted(offset for offset in self._rows[place] if offset >= end)
        ensure(
            not missing and self.acked[place] <= end,
            f"{who}: {place} ends at {end}, acked to {self.acked[place]}, seen {missing}",
        )
        newest: dict[str, int] = {}
        for offset, row in log:
            value = Value.decode(row.value)
            before = newest.get(value.sender, -1)
            ensure(
                value.sequence > before,
                f"{who}: {place} {offset} holds {value}, after its sequence {before}",
            )
            newest[value.sender] = value.sequence
