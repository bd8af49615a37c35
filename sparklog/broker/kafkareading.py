"""Reading for Kafka's consumers: the log as record batches in their encoding.

What a Kafka client wrote is in the hot tail as it came, and goes out so. All else is rows, in
memory, write-ahead log or table: they are read many at a time and encoded at once, and what a fetch
does not take waits for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from sparklog import limits
from sparklog.broker.ahead import Ahead, Made, Place
from sparklog.broker.hot import HotTail
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.reading import Batch, LogReader, check_range
from sparklog.clock import Clock

if TYPE_CHECKING:
    from sparklog.recordbatch import Raw

_FEW_ROWS: Final = 8_192
"""So many are read at once where nothing can be kept of them."""


class Fetched(NamedTuple):
    """Record batches that follow one another."""

    pieces: Sequence[Raw]
    """Of them all, to be joined."""
    end: int
    """The offset that a consumer asks for after them."""


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
    ) -> Fetched | None:
        """Record batches from `offset` on, of `limit_bytes` together.

        Not all that would fit in, where they are many and small: the caller asks on, in turns.
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
        nothing = Fetched((), offset)
        if offset == end:
            return nothing
        place = topic.topic_id, number
        # First what is made already: where rows and batches alternate, it goes on over both.
        found = _of(self._ahead.run(place, offset, limit_bytes=limit_bytes))
        found = found or self._as_they_came(place, offset, end, limit_bytes)
        if found is None:
            if only_memory:
                return None
            found = _of(self._make(topic, partition, offset, limit_bytes)) or nothing
        size = sum(map(len, found.pieces))
        # No more than the limit, or it is one batch that is larger.
        return found if at_least_one or size <= limit_bytes else nothing

    def _as_they_came(
        self, place: Place, offset: int, end: int, limit_bytes: int
    ) -> Fetched | None:
        """From the hot tail, as far as batches in Kafka's encoding follow one another there."""
        from sparklog import recordbatch  # compiled loops, which only this door needs

        run = self._hot.run(
            *place,
            offset,
            rows=end - offset,
            limit_bytes=limit_bytes,
            only_kafkas=True,
            most_batches=limits.KAFKA_PORTION_BATCHES,
        )
        pieces: list[Raw] = []
        for entry, held in run:
            assert not isinstance(held, pa.RecordBatch)
            pieces += recordbatch.placed(
                held, base_offset=entry.base_offset, leader_epoch=entry.leader_epoch
            )
        are_small = sum(map(len, pieces)) < len(pieces) * limits.KAFKA_SMALL_PIECE_BYTES
        if are_small and len(run) > limits.KAFKA_FEW_BATCHES:
            pieces = [b"".join(pieces)]  # as objects of their own they would take more memory
        return Fetched(pieces, run[-1].entry.end) if run else None

    def _make(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> Sequence[Made]:
        """The same of rows, wherever they are."""
        place = topic.topic_id, partition.number
        key = *place, offset
        turn = self._turns.setdefault(key, threading.Lock())
        try:
            with turn:
                found = self._ahead.run(place, offset, limit_bytes=limit_bytes)
                if found:
                    return found
                with self._ahead.reserved(limits.ROW_GROUP_BYTES) as room_bytes:
                    least = max(limit_bytes, min(room_bytes, limits.KAFKA_MADE_BYTES))
                    most = max(limit_bytes, room_bytes)
                    made = list(self._batches(topic, partition, offset, least, most))
                self._ahead.put(place, offset, made)
                return _within(made, limit_bytes)
        finally:
            self._turns.pop(key, None)

    def _batches(
        self, topic: Topic, partition: Partition, offset: int, least_bytes: int, most_bytes: int
    ) -> Iterator[Made]:
        """As many bytes as are wanted, and what is read with them, as far as that can be kept."""
        from sparklog import recordbatch

        end = partition.end
        batch_rows = limits.SCAN_BATCH_ROWS if most_bytes >= limits.ROW_GROUP_BYTES else _FEW_ROWS
        size = read_bytes = 0
        for read in self._reader.read(
            topic.name, partition.number, offset, end, batch_rows=batch_rows
        ):
            for batch in _encoded(read, topic, partition.leader_epoch):
                made = Made(batch, recordbatch.read_header(batch).next_offset)
                yield made
                size += made.size
                if size >= most_bytes:
                    return
            # Where the topic compresses, a megabyte may be a gigabyte that is read for it.
            read_bytes += read.rows.nbytes
            if size >= least_bytes or read_bytes >= limits.ROW_GROUP_BYTES:
                return


def _of(made: Sequence[Made]) -> Fetched | None:
    return Fetched([each.batch for each in made], made[-1].end) if made else None


def _encoded(read: Batch, topic: Topic, leader_epoch: int) -> Iterator[bytearray]:
    """As the topic wants them compressed; they came in no codec of Kafka's."""
    from sparklog import recordbatch

    if read.rows.num_rows == 0:
        yield recordbatch.gap(read.first, read.end, leader_epoch=leader_epoch)
        return
    batches = recordbatch.encode(
        read.rows, leader_epoch=leader_epoch, limit_bytes=limits.KAFKA_BATCH_BYTES
    )
    wanted = topic.compression
    if wanted is None:
        yield from batches
    else:
        codec, level = recordbatch.Codec[wanted[0].upper()], wanted[1]
        yield from (recordbatch.encoded_in(batch, codec, level) for batch in batches)


def _within(made: Sequence[Made], limit_bytes: int) -> Sequence[Made]:
    """As many as `limit_bytes` allow, and one at least."""
    sizes = accumulate(len(each.batch) for each in made)
    count = sum(1 for _ in takewhile(lambda size: size <= limit_bytes, sizes))
    return made[: max(count, 1)]
