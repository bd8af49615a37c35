"""Reads record batches in Kafka's encoding, for Kafka consumers.

Batches that Kafka clients wrote are in the hot tail as they came, and are sent unchanged. All other
records are rows, in the hot tail, WAL or table: many of them are read and encoded at once, and the
batches that a fetch does not take are kept for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from sparklog import limits
from sparklog.broker.counts import Budget
from sparklog.broker.log.batch_cache import BatchCache, EncodedBatch, TopicPartition
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.partitions import Partition, PartitionTable, Topic
from sparklog.broker.log.readers import LogReader, ReadBatch, check_range
from sparklog.clock import Clock

if TYPE_CHECKING:
    from sparklog.formats.record_batch import Raw

_FEW_ROWS: Final = 8_192
"""Rows that are read at once if the cache has no space for their batches."""


class Fetched(NamedTuple):
    """Consecutive record batches."""

    pieces: Sequence[Raw]
    """The bytes of all batches, in pieces."""
    end: int
    """The next offset that a consumer asks for."""


class KafkaReader:
    """Reads the partitions that this broker leads. Thread-safe."""

    def __init__(
        self, reader: LogReader, partition_table: PartitionTable, hot: HotTail, *, clock: Clock
    ) -> None:
        self._reader = reader
        self._partition_table = partition_table
        self._hot = hot
        self._cache = BatchCache(limit_bytes=limits.KAFKA_AHEAD_BYTES, clock=clock)
        self._encoding: dict[tuple[str, int, int], threading.Lock] = {}
        """Locks of the offsets that are being encoded; a second reader of an offset waits."""

    def budget(self) -> Budget:
        """Returns the memory of batches that were encoded ahead."""
        return Budget("encoded_ahead", self._cache.held_bytes, self._cache.limit_bytes)

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
        """Returns record batches from `offset` on, of at most `limit_bytes` together.

        Returns only some of many small batches; the caller asks again, in turns. The first batch
        may begin below `offset`. Returns no batch at the end of the log, and None if `only_memory`
        is set and the batches must be read from storage, which may take longer than the caller can
        wait.

        Args:
            name: the topic.
            number: the partition.
            offset: the first offset to read.
            limit_bytes: the largest sum of all batches.
            at_least_one: returns the first batch whatever its size.
            only_memory: returns None rather than read from storage.

        Raises `UnknownTopic`, `UnknownPartition`, `OffsetOutOfRange`.
        """
        topic = self._partition_table.topic(name)
        partition = topic.partition(number)
        end = partition.end
        check_range(topic, partition, offset, end)
        nothing = Fetched((), offset)
        if offset == end:
            return nothing
        key = topic.topic_id, number
        # The cache first: it continues where Arrow and Kafka batches alternate in the hot tail.
        found = _fetched(self._cache.run(key, offset, limit_bytes=limit_bytes))
        found = found or self._as_they_came(key, offset, end, limit_bytes)
        if found is None:
            if only_memory:
                return None
            found = _fetched(self._encode(topic, partition, offset, limit_bytes)) or nothing
        size = sum(map(len, found.pieces))
        # Above the limit only if a single batch is larger.
        return found if at_least_one or size <= limit_bytes else nothing

    def _as_they_came(
        self, key: TopicPartition, offset: int, end: int, limit_bytes: int
    ) -> Fetched | None:
        """Reads consecutive batches in Kafka's encoding from the hot tail."""
        from sparklog.formats import record_batch  # compiled loops; only Kafka clients need them

        run = self._hot.run(
            *key,
            offset,
            rows=end - offset,
            limit_bytes=limit_bytes,
            only_kafka=True,
            most_batches=limits.KAFKA_PORTION_BATCHES,
        )
        pieces: list[Raw] = []
        for entry, records in run:
            assert not isinstance(records, pa.RecordBatch)
            pieces += record_batch.placed(
                records, base_offset=entry.base_offset, leader_epoch=entry.leader_epoch
            )
        are_small = sum(map(len, pieces)) < len(pieces) * limits.KAFKA_SMALL_PIECE_BYTES
        if are_small and len(run) > limits.KAFKA_FEW_BATCHES:
            pieces = [b"".join(pieces)]  # one object takes less memory than many
        return Fetched(pieces, run[-1].entry.end) if run else None

    def _encode(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> Sequence[EncodedBatch]:
        """Reads rows from any storage and encodes them; keeps the batches beyond the limit."""
        of_partition = topic.topic_id, partition.number
        key = *of_partition, offset
        lock = self._encoding.setdefault(key, threading.Lock())
        try:
            with lock:
                found = self._cache.run(of_partition, offset, limit_bytes=limit_bytes)
                if found:
                    return found
                with self._cache.reserve(limits.ROW_GROUP_BYTES) as free_bytes:
                    least = max(limit_bytes, min(free_bytes, limits.KAFKA_MADE_BYTES))
                    most = max(limit_bytes, free_bytes)
                    encoded = list(self._batches(topic, partition, offset, least, most))
                self._cache.put(of_partition, offset, encoded)
                return _within(encoded, limit_bytes)
        finally:
            self._encoding.pop(key, None)

    def _batches(
        self, topic: Topic, partition: Partition, offset: int, least_bytes: int, most_bytes: int
    ) -> Iterator[EncodedBatch]:
        """Encodes at least `least_bytes`, and up to `most_bytes` of the rows read with them."""
        from sparklog.formats import record_batch

        end = partition.end
        batch_rows = limits.SCAN_BATCH_ROWS if most_bytes >= limits.ROW_GROUP_BYTES else _FEW_ROWS
        size = read_bytes = 0
        for read in self._reader.read(
            topic.name, partition.number, offset, end, batch_rows=batch_rows
        ):
            for batch in _encoded(read, topic, partition.leader_epoch):
                encoded = EncodedBatch(batch, record_batch.read_header(batch).next_offset)
                yield encoded
                size += encoded.size
                if size >= most_bytes:
                    return
            # If the topic compresses, a megabyte of batches may take a gigabyte of rows.
            read_bytes += read.rows.nbytes
            if size >= least_bytes or read_bytes >= limits.ROW_GROUP_BYTES:
                return


def _fetched(batches: Sequence[EncodedBatch]) -> Fetched | None:
    return Fetched([each.batch for each in batches], batches[-1].end) if batches else None


def _encoded(read: ReadBatch, topic: Topic, leader_epoch: int) -> Iterator[bytearray]:
    """Encodes rows as record batches, in the topic's codec if it names one."""
    from sparklog.formats import record_batch

    if read.rows.num_rows == 0:
        yield record_batch.gap(read.first, read.end, leader_epoch=leader_epoch)
        return
    batches = record_batch.encode(
        read.rows, leader_epoch=leader_epoch, limit_bytes=limits.KAFKA_BATCH_BYTES
    )
    wanted = topic.compression
    if wanted is None:
        yield from batches
    else:
        codec, level = record_batch.Codec[wanted[0].upper()], wanted[1]
        yield from (record_batch.encoded_in(batch, codec, level) for batch in batches)


def _within(batches: Sequence[EncodedBatch], limit_bytes: int) -> Sequence[EncodedBatch]:
    """Returns the first batches that fit into `limit_bytes`, at least one."""
    sizes = accumulate(len(each.batch) for each in batches)
    count = sum(1 for _ in takewhile(lambda size: size <= limit_bytes, sizes))
    return batches[: max(count, 1)]
