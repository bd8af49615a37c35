"""Reading for Kafka's consumers: the log as record batches in their encoding.

What a Kafka client wrote is in the hot tail as it came, and goes out so. All else is rows, in
memory, write-ahead log or table: they are read many at a time and encoded at once, and what a fetch
does not take waits for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sparklog import limits
from sparklog.broker.ahead import Ahead, Made, Place
from sparklog.broker.hot import HotTail
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.reading import LogReader, check_range
from sparklog.clock import Clock

if TYPE_CHECKING:
    from sparklog.recordbatch import Raw

_FEW_ROWS: Final = 8_192
"""So many are read at once where nothing can be kept of them."""


class KafkaReader:
    """Reads what this broker leads. Any thread may call it."""

    def __init__(self, reader: LogReader, ledger: Ledger, hot: HotTail, *, clock: Clock) -> None:
        self._reader = reader
        self._ledger = ledger
        self._hot = hot
        self._ahead = Ahead(limit_bytes=limits.KAFKA_AHEAD_BYTES, clock=clock)
        self._turns: dict[tuple[str, int, int], threading.Lock] = {}
        """Of those who read: whoever wants the same waits for it."""

    def fetch(
        self,
        name: str,
        number: int,
        offset: int,
        *,
        limit_bytes: int,
        at_least_one: bool = True,
        only_memory: bool = False,
    ) -> list[Raw] | None:
        """Record batches from `offset` on, of `limit_bytes` together, in pieces to be joined.

        The first batch may begin below `offset`. Nothing at the end; None where `only_memory` and
        there is none made yet, which takes longer than a caller may wait.

        Args:
            at_least_one: the first batch is given whatever its size.

        Raises `UnknownTopic`, `UnknownPartition`, `OffsetOutOfRange`.
        """
        topic = self._ledger.topic(name)
        partition = topic.partition(number)
        end = partition.end
        check_range(topic, partition, offset, end)
        if offset == end:
            return []
        place = topic.topic_id, number
        found: Sequence[Sequence[Raw]] = self._as_they_came(place, offset, end, limit_bytes)
        if not found:
            made = self._ahead.run(place, offset, limit_bytes=limit_bytes)
            if not made and only_memory:
                return None
            made = made or self._make(topic, partition, offset, limit_bytes)
            found = [(each,) for each in made]
        if found and not at_least_one and sum(map(len, found[0])) > limit_bytes:
            return []
        return [piece for batch in found for piece in batch]

    def _as_they_came(
        self, place: Place, offset: int, end: int, limit_bytes: int
    ) -> list[tuple[bytes, memoryview]]:
        """From the hot tail, as far as batches in Kafka's encoding follow one another there."""
        from sparklog import recordbatch  # compiled loops, which only this door needs

        run = self._hot.run(
            *place, offset, rows=end - offset, limit_bytes=limit_bytes, only_kafkas=True
        )
        found = []
        for entry, held in run:
            assert not isinstance(held, pa.RecordBatch)
            found.append(
                recordbatch.placed(
                    held, base_offset=entry.base_offset, leader_epoch=entry.leader_epoch
                )
            )
        return found

    def _make(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> list[bytearray]:
        """The same of rows, wherever they are."""
        place = topic.topic_id, partition.number
        key = *place, offset
        turn = self._turns.setdefault(key, threading.Lock())
        try:
            with turn:
                found = self._ahead.run(place, offset, limit_bytes=limit_bytes)
                if not found:
                    made = list(self._batches(topic, partition, offset, limit_bytes))
                    self._ahead.put(place, offset, made)
                    found = _within([each.batch for each in made], limit_bytes)
                return found
        finally:
            self._turns.pop(key, None)

    def _batches(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> Iterator[Made]:
        """What the fetch wants, and what is read with it as far as there is room to keep that."""
        from sparklog import recordbatch

        room_bytes = self._ahead.room_bytes
        batch_rows = limits.SCAN_BATCH_ROWS if room_bytes >= limits.ROW_GROUP_BYTES else _FEW_ROWS
        size = 0
        for read in self._reader.read(
            topic.name, partition.number, offset, partition.end, batch_rows=batch_rows
        ):
            for batch in _encoded(read.rows, topic, partition.leader_epoch):
                yield Made(batch, recordbatch.read_header(batch).next_offset)
                size += len(batch)
                if size >= max(limit_bytes, room_bytes):
                    return
            if size >= limit_bytes:
                return


def _encoded(rows: pa.RecordBatch, topic: Topic, leader_epoch: int) -> Iterator[bytearray]:
    """As the topic wants them compressed; they came in no codec of Kafka's."""
    from sparklog import recordbatch

    if rows.num_rows == 0:
        return
    batches = recordbatch.encode(
        rows, leader_epoch=leader_epoch, limit_bytes=limits.KAFKA_BATCH_BYTES
    )
    wanted = topic.compression
    if wanted is None:
        yield from batches
    else:
        codec, level = recordbatch.Codec[wanted[0].upper()], wanted[1]
        yield from (recordbatch.encoded_in(batch, codec, level) for batch in batches)


def _within(batches: Sequence[bytearray], limit_bytes: int) -> list[bytearray]:
    """As many as `limit_bytes` allow, and one at least."""
    found = list(batches[:1])
    limit_bytes -= sum(map(len, found))
    for batch in batches[1:]:
        limit_bytes -= len(batch)
        if limit_bytes < 0:
            break
        found.append(batch)
    return found
