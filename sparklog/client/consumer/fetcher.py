"""Reads ahead for a consumer: threads that fetch, and a bounded buffer of batches.

A *position* is a partition, and how far it has been fetched and consumed. All threads together are
a *reading*. A seek, a pause, a new partition or a new leader ends the reading and starts a new one
from the current positions. Batches from a reading that is over are dropped, so no record is
returned twice; positions move only with the batches put into the buffer, so no record is skipped.

A reading that follows has one thread and one DoExchange per leading broker; a bounded one has a few
threads, each of which reads one position at a time to its end with DoGet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import errors, limits
from sparklog.client.connection import (
    Backoff,
    Connection,
    RetryLog,
    is_of_the_broker,
    may_pass,
)
from sparklog.client.consumer.reading import read_range
from sparklog.client.offsets import TopicPartition, describe
from sparklog.formats import flight_messages

_log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class FetchPosition:
    """A partition, and the offsets up to which it has been fetched and consumed."""

    topic: str
    partition: int
    fetched: int
    """The next offset to fetch."""
    next_offset: int
    """The next offset to consume."""
    end: int | None
    """The offset to stop at, if any."""
    high_watermark: int
    """The last known end of the partition."""
    is_paused: bool = False

    @property
    def lag(self) -> int:
        """Offsets from the next one to the high watermark."""
        return max(self.high_watermark - self.next_offset, 0)

    @property
    def is_to_be_read(self) -> bool:
        return not self.is_paused and (self.end is None or self.fetched < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows of one position; `end` is the offset after them, maybe with a gap after the last row."""

    position: FetchPosition
    rows: pa.RecordBatch
    end: int
    size_bytes: int
    """The memory of the rows."""


class _Reading:
    """The threads of one reading, and the streams to cancel when it is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self._streams: list[Any] = []
        # Re-entrant, because a finalizer may call `end` in the middle of the other methods.
        self._lock = threading.RLock()

    def add(self, stream: Any) -> None:
        with self._lock:
            self._streams.append(stream)
            is_over = self.over.is_set()
        if is_over:
            stream.cancel()

    def remove(self, stream: Any) -> None:
        with self._lock:
            self._streams.remove(stream)

    def end(self) -> None:
        self.over.set()
        with self._lock:
            for stream in self._streams:
                stream.cancel()


class Fetcher:
    """Fetches batches of several partitions, in order within each, for one thread to take."""

    def __init__(
        self,
        connection: Connection,
        topics: Iterable[flight_messages.TopicInfo],
        offsets: dict[TopicPartition, int],
        *,
        follow: bool,
        columns: list[str] | None,
        buffer_bytes: int,
        metadata_age_seconds: float,
        takes_new_partitions: bool = True,
    ) -> None:
        self._connection = connection
        self._clock = connection.clock
        self._topics = {info.topic: info for info in topics}
        self._follow = follow
        self._columns = columns
        self._buffer_bytes = buffer_bytes
        self._metadata_age_seconds = metadata_age_seconds
        self._takes_new_partitions = takes_new_partitions
        self._changed = threading.Condition()
        self._is_woken = False
        self._chunks: deque[Chunk] = deque()
        self._buffered_bytes = 0
        self._failure: errors.SparklogError | None = None
        self._closed: errors.SparklogError | None = None
        self.positions = self._positions_at(offsets)
        self._metadata_expires_at = self._clock.monotonic() + metadata_age_seconds
        self._reading = _Reading()
        with self._changed:
            self._begin()
        _fetchers.add(self)

    # -------------------------------------------------------------------------- for the consumer

    def take(self, deadline: float | None) -> Chunk | None:
        """Returns the next chunk; None: none arrived by `deadline` (monotonic seconds), every
        partition has been read to its end, or `wake` was called.

        Raises the failure that ended the reading, once all chunks read before it were taken.
        """
        with self._changed:
            while self._closed is None and not self._chunks and not self._is_woken:
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                is_late = deadline is not None and deadline <= self._clock.monotonic()
                if is_late or self._is_all_fetched():
                    return None
                self._clock.wait_until(self._changed, deadline)
            if self._closed is not None:
                raise self._closed
            if self._is_woken:
                self._is_woken = False
                return None
            chunk = self._chunks.popleft()
            self._buffered_bytes -= chunk.size_bytes
            self._changed.notify_all()
            return chunk

    def wake(self) -> None:
        """Makes the current or next `take` return None. Any thread may call it."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def assign(
        self,
        topics: Iterable[flight_messages.TopicInfo],
        offsets: dict[TopicPartition, int],
        *,
        keep: Collection[TopicPartition] = (),
        is_all_of_topics: bool | None = None,
    ) -> None:
        """From now on reads only these partitions, and those to `keep` from where they are.

        `is_all_of_topics`: partitions added to the topics later are read too; None: as before.
        Raises `OffsetOutOfRange`, without changing anything, for an offset beyond the end if the
        consumer does not follow.
        """
        with self._changed:
            before = self._topics
            kept = {key: at for key, at in self.positions.items() if key in keep}
            kept_topics = {name: before[name] for name, _ in kept}
            # A re-created topic is a different one: kept positions retain the old id.
            self._topics = kept_topics | {
                info.topic: msgspec.structs.replace(
                    info, topic_id=kept_topics.get(info.topic, info).topic_id
                )
                for info in topics
            }
            try:
                self.positions = kept | self._positions_at(offsets)
            except errors.OffsetOutOfRange:
                self._topics = before
                raise
            if is_all_of_topics is not None:
                self._takes_new_partitions = is_all_of_topics
            self._chunks = deque(each for each in self._chunks if self.has(each.position))
            self._buffered_bytes = sum(each.size_bytes for each in self._chunks)
            self._begin()

    def has(self, position: FetchPosition) -> bool:
        """Returns whether `position` is still being read, and has not been replaced."""
        return self.positions.get((position.topic, position.partition)) is position

    @property
    def buffered_bytes(self) -> int:
        """Memory of the records that are read ahead."""
        return self._buffered_bytes

    @property
    def lag(self) -> int:
        """Offsets between position and high watermark, summed over all partitions."""
        return sum(position.lag for position in list(self.positions.values()))

    @property
    def is_at_end(self) -> bool:
        """True once every partition has been read to its end and no chunk is left."""
        with self._changed:
            return not self._chunks and self._failure is None and self._is_all_fetched()

    def seek(self, position: FetchPosition, offset: int) -> None:
        """Raises `OffsetOutOfRange` beyond the end; for other invalid offsets `take` raises."""
        self._check_end(position, offset)
        with self._changed:
            position.next_offset = offset
            self._forget(position)
            self._begin()

    def pause(self, positions: Iterable[FetchPosition], *, is_paused: bool) -> None:
        with self._changed:
            for position in positions:
                position.is_paused = is_paused
                self._forget(position)
            self._begin()

    def close(self) -> None:
        self.end(errors.BadRequest(reason="the consumer is closed"))
        with self._changed:
            self._changed.notify_all()
        for thread in self._reading.threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def end(self, reason: errors.SparklogError) -> None:
        """Has all threads end. Acquires no lock, because a finalizer may call it."""
        self._closed = reason
        self._reading.end()

    def after_fork(self) -> None:
        """Makes every call fail in a child process, which has none of these threads."""
        self._changed = threading.Condition()
        self._closed = errors.BadRequest(reason="this consumer belongs to the parent process")
        self._chunks.clear()
        self._reading = _Reading()

    def _positions_at(
        self, offsets: dict[TopicPartition, int]
    ) -> dict[TopicPartition, FetchPosition]:
        positions = {
            (topic, partition): FetchPosition(
                topic=topic,
                partition=partition,
                fetched=offset,
                next_offset=offset,
                end=None if self._follow else self._topics[topic].partitions[partition].end,
                high_watermark=self._topics[topic].partitions[partition].end,
            )
            for (topic, partition), offset in offsets.items()
        }
        for position in positions.values():
            self._check_end(position, position.next_offset)
        return positions

    def _check_end(self, position: FetchPosition, offset: int) -> None:
        # Beyond its end a partition is not read, so no broker would reject the offset.
        if position.end is not None and offset > position.end:
            raise errors.OffsetOutOfRange(
                topic=position.topic,
                partition=position.partition,
                offset=offset,
                start=self._topics[position.topic].partitions[position.partition].start,
                end=position.end,
            )

    def _forget(self, position: FetchPosition) -> None:
        """Drops the chunks that were read ahead for this position."""
        position.fetched = position.next_offset
        kept = [chunk for chunk in self._chunks if chunk.position is not position]
        self._chunks = deque(kept)
        self._buffered_bytes = sum(chunk.size_bytes for chunk in kept)

    def _is_all_fetched(self) -> bool:
        return not self._follow and all(
            position.end is not None and position.fetched >= position.end
            for position in self.positions.values()
        )

    # -------------------------------------------------------------------------- readings

    def _begin(self) -> None:
        """Starts a new reading from the current positions. Requires `_changed`."""
        before = self._reading
        before.end()
        self._failure = None
        self._changed.notify_all()
        if self._closed is not None:
            return
        reading = self._reading = _Reading()
        # For `close`, which waits for every thread to end.
        reading.threads += [each for each in before.threads if each.is_alive()]
        positions = [position for position in self.positions.values() if position.is_to_be_read]
        if self._follow:
            by_leader = defaultdict(list)
            for position in positions:
                leader = self._topics[position.topic].partitions[position.partition].leader
                by_leader[leader].append(position)
            for leader, led in by_leader.items():
                self._start(reading, self._follow_broker, leader, led)
        else:
            waiting = deque(positions)
            for _ in range(min(len(positions), limits.READ_THREADS)):
                self._start(reading, self._read_to_end, waiting)

    def _start(self, reading: _Reading, target: Any, *arguments: Any) -> None:
        def read() -> None:
            try:
                target(reading, *arguments)
            except errors.SparklogError as error:
                self._fail(reading, error)
            except Exception as error:
                # A bug in our code must not leave the consumer waiting.
                _log.exception("reading failed")
                self._fail(reading, errors.UnexpectedError(reason=f"reading failed: {error!r}"))

        thread = threading.Thread(target=read, name="sparklog-read", daemon=True)
        reading.threads.append(thread)
        thread.start()

    def _put(
        self, reading: _Reading, position: FetchPosition, rows: pa.RecordBatch, first: int, end: int
    ) -> bool:
        """Adds a chunk once there is memory; returns False if the reading is over.

        `first`: no row has a smaller offset.
        """
        with self._changed:
            while self._buffered_bytes >= self._buffer_bytes and not reading.over.is_set():
                self._changed.wait(limits.BACKOFF_MAX_SECONDS)
            if reading.over.is_set() or reading is not self._reading:
                return False
            if end <= position.fetched:
                return True
            if first < position.fetched:
                rows = rows.filter(pc.greater_equal(rows.column("offset"), position.fetched))
            size = rows.get_total_buffer_size()  # many times faster than `nbytes`
            self._chunks.append(Chunk(position=position, rows=rows, end=end, size_bytes=size))
            self._buffered_bytes += size
            position.fetched = end
            self._changed.notify_all()
            return True

    def _fail(self, reading: _Reading, error: errors.SparklogError) -> None:
        with self._changed:
            if reading is self._reading and not reading.over.is_set():
                self._failure = error
                self._changed.notify_all()
                reading.end()

    # -------------------------------------------------------------------------- bounded

    def _read_to_end(self, reading: _Reading, waiting: deque[FetchPosition]) -> None:
        """Reads positions of `waiting`, which several threads share."""
        while not reading.over.is_set():
            try:
                position = waiting.popleft()
            except IndexError:
                return
            self._read_range(reading, position)

    def _read_range(self, reading: _Reading, position: FetchPosition) -> None:
        assert position.end is not None
        with self._changed:
            if reading.over.is_set():  # `_topics` may be those of a later one
                return
            topic = self._topics[position.topic]
        batches = read_range(
            self._connection,
            topic,
            position.partition,
            start=position.fetched,
            end=position.end,
            columns=self._columns,
        )
        for rows in batches:
            offsets = rows.column("offset")
            if not self._put(reading, position, rows, offsets[0].as_py(), offsets[-1].as_py() + 1):
                return
        # A gap in the offsets may follow the last record.
        nothing = pa.RecordBatch.from_pylist([], pa.schema([pa.field("offset", pa.int64())]))
        self._put(reading, position, nothing, position.end, position.end)

    # -------------------------------------------------------------------------- following

    def _follow_broker(
        self, reading: _Reading, broker: int, positions: list[FetchPosition]
    ) -> None:
        backoff, log = self._connection.backoff(), RetryLog(self._clock)
        while not reading.over.is_set():
            try:
                self._follow_stream(reading, broker, positions, backoff)
                return
            except errors.SparklogError as error:
                if reading.over.is_set():
                    return
                if not may_pass(error):
                    raise
                if log.is_due():
                    _log.warning("reading failed, and is retried: %s", error)
                if self._connection.may_have_moved(error):
                    self._metadata_expires_at = 0.0
                wait_seconds = backoff.next_seconds(error)
            reading.over.wait(wait_seconds)
            self._refresh_metadata(reading)

    def _follow_stream(
        self, reading: _Reading, broker: int, positions: list[FetchPosition], backoff: Backoff
    ) -> None:
        """Reads a stream until the reading is over; raises if the stream ends first."""
        channel = self._connection.channel(broker)
        with self._changed:
            if reading.over.is_set():  # `_topics` may be those of a later one
                return
            tail_positions = [
                flight_messages.TailPosition(
                    topic=position.topic,
                    partition=position.partition,
                    offset=position.fetched,
                    topic_id=self._topics[position.topic].topic_id,
                )
                for position in positions
            ]
        request = flight_messages.TailRequest(positions=tail_positions, columns=self._columns)
        try:
            writer, reader = channel.tail(request)
            reading.add(reader)
            try:
                while self._follow_chunk(reading, reader.read_chunk()):
                    backoff.reset()
                    self._refresh_metadata(reading)
            finally:
                reading.remove(reader)
                reader.cancel()
                _close_quietly(writer)
        except StopIteration:
            raise errors.BrokerUnavailable(
                address=channel.address, reason="it ended the stream"
            ) from None
        except (pa.ArrowException, OSError) as error:
            failure = channel.failure_of(error)
            if is_of_the_broker(failure) and not reading.over.is_set():
                self._connection.broke(channel)
            raise failure from error

    def _follow_chunk(self, reading: _Reading, chunk: Any) -> bool:
        header = flight_messages.decode(flight_messages.TailHeader, chunk.app_metadata)
        if header.idle:
            return not reading.over.is_set()
        # None: the assignment has changed since.
        position = self.positions.get((header.topic, header.partition))
        if position is None:
            return False
        position.high_watermark = max(position.high_watermark, header.high_watermark)
        return self._put(reading, position, chunk.data, header.first, header.end)

    def _refresh_metadata(self, reading: _Reading) -> None:
        """Starts a new reading if partitions were added, or have new leaders."""
        if self._clock.monotonic() < self._metadata_expires_at:
            return
        self._metadata_expires_at = self._clock.monotonic() + self._metadata_age_seconds
        try:
            topics = {name: self._described(info) for name, info in self._topics.items()}
        except errors.TopicChanged as error:
            self._fail(reading, error)
            return
        except errors.SparklogError as error:
            # A stream of the topic fails with the same error.
            _log.warning("cannot describe the followed topics: %s", error)
            return
        with self._changed:
            if reading is not self._reading or reading.over.is_set():
                return
            is_changed = any(
                _leaders(topics[name]) != _leaders(info) for name, info in self._topics.items()
            )
            if not is_changed:
                return
            self._topics = {
                name: msgspec.structs.replace(info, topic_id=self._topics[name].topic_id)
                for name, info in topics.items()
            }
            for name, info in topics.items():
                for each in info.partitions if self._takes_new_partitions else ():
                    if (name, each.partition) not in self.positions:
                        self.positions[name, each.partition] = FetchPosition(
                            topic=name,
                            partition=each.partition,
                            fetched=each.start,
                            next_offset=each.start,
                            end=None,
                            high_watermark=each.end,
                        )
            self._begin()

    def _described(self, known: flight_messages.TopicInfo) -> flight_messages.TopicInfo:
        """Describes a topic again; asks all leaders only if there are new partitions.

        Raises `TopicChanged` if it was re-created.
        """
        info: flight_messages.TopicInfo = self._connection.action(
            "topics.describe", flight_messages.TopicName(topic=known.topic)
        )
        info.check_id(known.topic_id)
        self._connection.learn_leaders(info)
        if self._takes_new_partitions and len(info.partitions) > len(known.partitions):
            return describe(self._connection, known.topic)
        return info


def _leaders(info: flight_messages.TopicInfo) -> list[int]:
    return [each.leader for each in info.partitions]


def _close_quietly(writer: Any) -> None:
    # Closing a stream that was cancelled, or broke, raises that error again.
    with contextlib.suppress(pa.ArrowException, OSError):
        writer.close()


# ------------------------------------------------------------------------------ forks

_fetchers: weakref.WeakSet[Fetcher] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for fetcher in list(_fetchers):
        fetcher.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
