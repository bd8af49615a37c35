"""Reads record batches in Kafka's encoding, for Kafka consumers.

Batches that Kafka clients wrote are in the hot tail as they arrived, and are sent unchanged. All
other records are rows, in the hot tail, WAL or table. They are read and encoded in portions; the
batches that a fetch does not return are kept for the next one, as is the place in their file.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.counts import Budget
from sparklog.broker.log.batch_cache import KEPT_SECONDS, BatchCache, EncodedBatch, TopicPartition
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.readers import LogReader, check_range
from sparklog.broker.log.tailing import ReadBatch
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock

if TYPE_CHECKING:
    from sparklog.formats.record_batch import Raw

BATCH_BYTES = 256 * limits.KIB  # of a batch encoded from rows; a larger record gets its own
MADE_BYTES = 1 * limits.MIB  # of such batches that are encoded at a time
AHEAD_BYTES = 128 * limits.MIB  # of such batches that are cached for sequential readers
CURSORS_KEPT = 4  # sequential readers whose place in a file is kept between fetches
_PORTION_BATCHES = 512  # that are read at a time, unchanged
_FEW_BATCHES = 32  # up to this many are sent without joining, whatever their size
_SMALL_PIECE_BYTES = 1 * limits.KIB  # smaller parts of batches are joined; a batch has two


_FEW_ROWS: Final = 8_192
"""Rows that are read at a time if the cache has no space for their batches."""


class Fetched(NamedTuple):
    """Consecutive record batches."""

    pieces: Sequence[Raw]
    """The bytes of all batches, in pieces."""
    end: int
    """The offset that a consumer fetches next."""


class KafkaReader:
    """Reads the partitions that this broker leads. Thread-safe."""

    def __init__(
        self, reader: LogReader, led_partitions: LedPartitions, hot: HotTail, *, clock: Clock
    ) -> None:
        self._reader = reader
        self._led_partitions = led_partitions
        self._hot = hot
        self._cache = BatchCache(limit_bytes=AHEAD_BYTES, clock=clock)
        self._cursors = _Cursors(clock)
        self.read_bytes = 0
        """Bytes of rows that were read to be encoded."""
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

        If there are many small batches, returns only some; the caller asks again, in turns. The
        first batch may begin below `offset`. Returns no batch at the end of the log, and None if
        `only_memory` is set and the batches must be read from storage, which may take longer than
        the caller can wait.

        Args:
            name: the topic.
            number: the partition.
            offset: the first offset to read.
            limit_bytes: the maximum total size of the batches.
            at_least_one: returns the first batch whatever its size.
            only_memory: returns None rather than read from storage.

        Raises `UnknownTopic`, `UnknownPartition`, `OffsetOutOfRange`.
        """
        topic = self._led_partitions.topic(name)
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

    def read_together(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Encodes the next records of several partitions for `fetch`, if they are in small files.

        Takes less time than fetching each separately. All others, and errors, are left to `fetch`.

        Args:
            places: topic, partition, and the offset of each.
        """
        from sparklog.formats import record_batch

        with self._cache.reserve(limits.READ_RUN_BYTES) as free_bytes, self._alone(places) as ours:
            if free_bytes < limits.READ_RUN_BYTES:
                return
            places = [place for _, place in ours]
            topics = {place[0]: topic for topic, place in ours}
            for read in self._reader.read_together(places, columns=record_batch.COLUMNS):
                self.read_bytes += read.rows.nbytes
                topic = topics[read.topic]  # another topic may have this name by now
                epoch = topic.partition(read.partition).leader_epoch
                encoded = [
                    EncodedBatch(batch, record_batch.read_header(batch).next_offset)
                    for batch in _encoded(read, topic, epoch)
                ]
                self._cache.put((topic.topic_id, read.partition), read.first, encoded)

    @contextlib.contextmanager
    def _alone(
        self, places: Sequence[tuple[str, int, int]]
    ) -> Iterator[list[tuple[Topic, tuple[str, int, int]]]]:
        """Yields the places that no other reader is encoding; other readers wait for them."""
        locks: dict[tuple[str, int, int], threading.Lock] = {}
        ours = []
        try:
            for name, number, offset in places:
                with contextlib.suppress(errors.UnknownTopic):
                    topic = self._led_partitions.topic(name)
                    key = topic.topic_id, number, offset
                    lock = self._encoding.setdefault(key, threading.Lock())
                    if lock.acquire(blocking=False):
                        locks[key] = lock
                        ours.append((topic, (name, number, offset)))
            yield ours
        finally:
            for key, lock in locks.items():
                self._encoding.pop(key, None)
                lock.release()

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
            most_batches=_PORTION_BATCHES,
        )
        pieces: list[Raw] = []
        for entry, records in run:
            assert not isinstance(records, pa.RecordBatch)
            pieces += record_batch.placed(
                records, base_offset=entry.base_offset, leader_epoch=entry.leader_epoch
            )
        are_small = sum(map(len, pieces)) < len(pieces) * _SMALL_PIECE_BYTES
        if are_small and len(run) > _FEW_BATCHES:
            pieces = [b"".join(pieces)]  # one object takes less memory than many
        return Fetched(pieces, run[-1].entry.end) if run else None

    def _encode(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> Sequence[EncodedBatch]:
        """Reads rows from any storage and encodes them; caches the batches beyond the limit.

        A sequential reader continues where its last fetch ended.
        """
        of_partition = topic.topic_id, partition.number
        key = *of_partition, offset
        lock = self._encoding.setdefault(key, threading.Lock())
        try:
            with lock:
                found = self._cache.run(of_partition, offset, limit_bytes=limit_bytes)
                if found:
                    return found
                cursor = self._cursors.take(key)
                if cursor is None and not self._cursors.has_room():
                    encoded = self._encode_ahead(topic, partition, offset, limit_bytes)
                    self._cache.put(of_partition, offset, encoded)
                    return _within(encoded, limit_bytes)
                with self._cache.reserve(MADE_BYTES) as free_bytes:
                    least_bytes = max(limit_bytes, free_bytes)
                    encoded = cursor.take(least_bytes) if cursor is not None else ()
                    if not encoded:  # a kept cursor ends where the partition used to end
                        cursor = _Cursor(self._batches(topic, partition, offset))
                        encoded = cursor.take(least_bytes)
                self._cache.put(of_partition, offset, encoded)
                if encoded and cursor is not None:
                    self._cursors.put((*of_partition, encoded[-1].end), cursor)
                return _within(encoded, limit_bytes)
        finally:
            self._encoding.pop(key, None)

    def _encode_ahead(
        self, topic: Topic, partition: Partition, offset: int, limit_bytes: int
    ) -> Sequence[EncodedBatch]:
        """Encodes the rows that are read together, as far as the cache has space for them.

        For readers whose place in a file is not kept, because there are too many of them.
        """
        with self._cache.reserve(limits.ROW_GROUP_BYTES) as free_bytes:
            is_free = free_bytes >= limits.ROW_GROUP_BYTES
            batch_rows = limits.SCAN_BATCH_ROWS if is_free else _FEW_ROWS
            cursor = _Cursor(self._batches(topic, partition, offset, batch_rows))
            least_bytes = max(limit_bytes, min(free_bytes, MADE_BYTES))
            return cursor.take(least_bytes, max(limit_bytes, free_bytes))

    def _batches(
        self,
        topic: Topic,
        partition: Partition,
        offset: int,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
    ) -> Iterator[_Made]:
        """Encodes all batches from `offset` on."""
        from sparklog.formats import record_batch

        for read in self._reader.read(
            *(topic.name, partition.number, offset, partition.end),
            columns=record_batch.COLUMNS,
            batch_rows=batch_rows,
        ):
            read_bytes, rows = read.rows.nbytes, max(read.rows.num_rows, 1)
            self.read_bytes += read_bytes
            for batch in _encoded(read, topic, partition.leader_epoch):
                header = record_batch.read_header(batch)
                end = header.next_offset
                row_bytes = read_bytes * header.record_count // rows
                yield _Made(EncodedBatch(batch, end), row_bytes, end >= read.end)


class _Made(NamedTuple):
    """A batch that was encoded from rows."""

    encoded: EncodedBatch
    row_bytes: int
    """The bytes of its rows, which may be far more than those of the batch."""
    is_last: bool
    """True for the last batch of rows that were read together."""


class _Cursor:
    """Encoded batches of a partition, which a sequential reader takes a few at a time.

    Keeps its place in a file between fetches, so that each row group is decoded only once.
    """

    def __init__(self, batches: Iterator[_Made]) -> None:
        self._batches = batches

    def take(self, least_bytes: int, rest_bytes: int | None = None) -> Sequence[EncodedBatch]:
        """Returns the next batches, of at least `least_bytes` or from `ROW_GROUP_BYTES` of rows.

        Args:
            rest_bytes: continues up to this size, with rows that have been read anyway.

        Raises the reader's errors for the first batch; later errors end the cursor.
        """
        found: list[EncodedBatch] = []
        size = decoded_bytes = 0
        try:
            for encoded, row_bytes, is_last in self._batches:
                found.append(encoded)
                size += encoded.size
                # If the topic is compressed, a megabyte of batches may need a gigabyte of rows.
                decoded_bytes += row_bytes
                is_enough = size >= least_bytes or decoded_bytes >= limits.ROW_GROUP_BYTES
                if is_enough and (rest_bytes is None or is_last or size >= rest_bytes):
                    break
        except errors.SparklogError:
            if not found:
                raise
        return found


class _Cursors:
    """The cursors of a few sequential readers, by the offset at which each continues.

    A cursor keeps a file open, and rows that may since have been removed from the table. So it is
    dropped after some seconds, like cached batches. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cursors: OrderedDict[tuple[str, int, int], tuple[_Cursor, float]] = OrderedDict()

    def take(self, key: tuple[str, int, int]) -> _Cursor | None:
        """Removes and returns the cursor that continues at an offset, if it has not expired."""
        with self._lock:
            expired_at = self._clock.monotonic() - KEPT_SECONDS
            while self._cursors and next(iter(self._cursors.values()))[1] <= expired_at:
                self._cursors.popitem(last=False)
            found = self._cursors.pop(key, None)
        return found[0] if found is not None else None

    def has_room(self) -> bool:
        """Returns whether there is room for another cursor."""
        with self._lock:
            return len(self._cursors) < CURSORS_KEPT

    def put(self, key: tuple[str, int, int], cursor: _Cursor) -> None:
        """Adds a cursor; drops the oldest if there are too many."""
        with self._lock:
            self._cursors[key] = cursor, self._clock.monotonic()
            self._cursors.move_to_end(key)
            while len(self._cursors) > CURSORS_KEPT:
                self._cursors.popitem(last=False)


def _fetched(batches: Sequence[EncodedBatch]) -> Fetched | None:
    return Fetched([each.batch for each in batches], batches[-1].end) if batches else None


def _encoded(read: ReadBatch, topic: Topic, leader_epoch: int) -> Iterator[bytearray]:
    """Encodes rows as record batches, in the topic's codec if it names one."""
    from sparklog.formats import record_batch

    if read.rows.num_rows == 0:
        yield record_batch.gap(read.first, read.end, leader_epoch=leader_epoch)
        return
    batches = record_batch.encode(read.rows, leader_epoch=leader_epoch, limit_bytes=BATCH_BYTES)
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
