"""What reads ahead for a consumer: threads that fetch, and a bounded buffer of batches.

A *place* is a partition, and how far it was fetched and consumed. All threads together are a
*reading*: whatever changes what is to be read (a seek, a pause, a partition more, a leader moved)
ends the reading and begins another from the places as they are. Batches of a reading that is over
are dropped, so nothing comes twice; places move only with the batches put into the buffer, so
nothing is left out.

Following, a reading has one thread and one DoExchange for each broker that leads; bounded, it has
a few threads that read one place after the other to its end by DoGet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparklog import errors, limits, wire
from sparklog.client.connection import Backoff, Connection, failure_of, is_of_the_broker, may_pass
from sparklog.client.reading import TopicPartition, describe, read_range

_log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """A partition, and how far it is read."""

    topic: str
    partition: int
    fetched: int
    """The next offset to fetch."""
    position: int
    """The next offset to consume."""
    end: int | None
    """Where to stop; None: never."""
    is_paused: bool = False

    @property
    def is_to_be_read(self) -> bool:
        return not self.is_paused and (self.end is None or self.fetched < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows of one place; `end` is the offset after them, which may be beyond the last row's."""

    place: Place
    rows: pa.RecordBatch
    end: int


class _Reading:
    """The threads of one reading, and the streams to be cancelled when it is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self._streams: list[Any] = []
        # Re-entrant, because a finalizer may call `end` in the middle of the others.
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


class Feed:
    """Batches of several partitions, in order within each. One thread takes them."""

    def __init__(
        self,
        connection: Connection,
        topics: Iterable[wire.TopicInfo],
        offsets: dict[TopicPartition, int],
        *,
        follow: bool,
        columns: list[str] | None,
        buffer_bytes: int,
        metadata_age_seconds: float,
        takes_new_partitions: bool = True,
    ) -> None:
        self._connection = connection
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
        self.places = self._places(offsets)
        self._fresh_until = time.monotonic() + metadata_age_seconds
        self._reading = _Reading()
        with self._changed:
            self._begin()
        _feeds.add(self)

    # -------------------------------------------------------------------------- for the consumer

    def take(self, deadline: float | None) -> Chunk | None:
        """The next batch; None: nothing came by `deadline` (monotonic seconds), or all is read, or
        `wake` was called.

        Raises what ended the reading, after all that was read before.
        """
        with self._changed:
            while self._closed is None and not self._chunks and not self._is_woken:
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                left_seconds = None if deadline is None else deadline - time.monotonic()
                if self._is_all_fetched() or (left_seconds is not None and left_seconds <= 0.0):
                    return None
                self._changed.wait(left_seconds)
            if self._closed is not None:
                raise self._closed
            if self._is_woken:
                self._is_woken = False
                return None
            chunk = self._chunks.popleft()
            self._buffered_bytes -= chunk.rows.nbytes
            self._changed.notify_all()
            return chunk

    def wake(self) -> None:
        """Whoever takes, or will take next, has something else to do first. From any thread."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def assign(self, topics: Iterable[wire.TopicInfo], offsets: dict[TopicPartition, int]) -> None:
        """Reads these partitions of these topics from now on, and no others.

        Raises `OffsetOutOfRange` beyond the end of what does not follow; nothing has changed then.
        """
        with self._changed:
            before = self._topics
            self._topics = {info.topic: info for info in topics}
            try:
                self.places = self._places(offsets)
            except errors.OffsetOutOfRange:
                self._topics = before
                raise
            self._chunks.clear()
            self._buffered_bytes = 0
            self._begin()

    def has(self, place: Place) -> bool:
        """Whether it is read still, and not assigned anew."""
        return self.places.get((place.topic, place.partition)) is place

    @property
    def is_at_end(self) -> bool:
        """Nothing will ever come."""
        with self._changed:
            return not self._chunks and self._failure is None and self._is_all_fetched()

    def seek(self, place: Place, offset: int) -> None:
        """Raises `OffsetOutOfRange` beyond the end; what else is wrong turns out in reading."""
        self._check_end(place, offset)
        with self._changed:
            place.position = offset
            self._forget(place)
            self._begin()

    def pause(self, places: Iterable[Place], *, is_paused: bool) -> None:
        with self._changed:
            for place in places:
                place.is_paused = is_paused
                self._forget(place)
            self._begin()

    def close(self) -> None:
        self.end(errors.BadRequest(reason="the consumer is closed"))
        with self._changed:
            self._changed.notify_all()
        for thread in self._reading.threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def end(self, reason: errors.SparklogError) -> None:
        """Lets all threads end. Does not take `_changed`: a finalizer may call it anywhere."""
        self._closed = reason
        self._reading.end()

    def after_fork(self) -> None:
        """In a child, which has none of these threads."""
        self._changed = threading.Condition()
        self._closed = errors.BadRequest(reason="this consumer belongs to the parent process")
        self._chunks.clear()
        self._reading = _Reading()

    def _places(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, Place]:
        places = {
            (topic, partition): Place(
                topic=topic,
                partition=partition,
                fetched=offset,
                position=offset,
                end=None if self._follow else self._topics[topic].partitions[partition].end,
            )
            for (topic, partition), offset in offsets.items()
        }
        for place in places.values():
            self._check_end(place, place.position)
        return places

    def _check_end(self, place: Place, offset: int) -> None:
        # Where nothing is left to be read nobody else would say it.
        if place.end is not None and offset > place.end:
            raise errors.OffsetOutOfRange(
                topic=place.topic,
                partition=place.partition,
                offset=offset,
                start=self._topics[place.topic].partitions[place.partition].start,
                end=place.end,
            )

    def _forget(self, place: Place) -> None:
        """Drops what was read ahead of the position."""
        place.fetched = place.position
        kept = [chunk for chunk in self._chunks if chunk.place is not place]
        self._chunks = deque(kept)
        self._buffered_bytes = sum(chunk.rows.nbytes for chunk in kept)

    def _is_all_fetched(self) -> bool:
        return not self._follow and all(
            place.end is not None and place.fetched >= place.end for place in self.places.values()
        )

    # -------------------------------------------------------------------------- readings

    def _begin(self) -> None:
        """Begins a new reading, from the places as they are. `_changed` is held."""
        before = self._reading
        before.end()
        self._failure = None
        self._changed.notify_all()
        if self._closed is not None:
            return
        reading = self._reading = _Reading()
        # For `close`, which waits until each thread has ended.
        reading.threads += [each for each in before.threads if each.is_alive()]
        places = [place for place in self.places.values() if place.is_to_be_read]
        if self._follow:
            by_leader = defaultdict(list)
            for place in places:
                leader = self._topics[place.topic].partitions[place.partition].leader
                by_leader[leader].append(place)
            for leader, led in by_leader.items():
                self._start(reading, self._follow_broker, leader, led)
        else:
            waiting = deque(places)
            for _ in range(min(len(places), limits.READ_THREADS)):
                self._start(reading, self._read_to_end, waiting)

    def _start(self, reading: _Reading, target: Any, *arguments: Any) -> None:
        def read() -> None:
            try:
                target(reading, *arguments)
            except errors.SparklogError as error:
                self._fail(reading, error)
            except Exception as error:
                # A fault of ours must not leave anybody waiting.
                _log.exception("reading failed")
                self._fail(reading, errors.SparklogError(reason=f"reading failed: {error!r}"))

        thread = threading.Thread(target=read, name="sparklog-read", daemon=True)
        reading.threads.append(thread)
        thread.start()

    def _put(self, reading: _Reading, place: Place, rows: pa.RecordBatch, end: int) -> bool:
        """False: the reading is over, and its batches are not wanted."""
        with self._changed:
            while self._buffered_bytes >= self._buffer_bytes and not reading.over.is_set():
                self._changed.wait(limits.BACKOFF_MAX_SECONDS)
            if reading.over.is_set() or reading is not self._reading:
                return False
            if end <= place.fetched:
                return True
            if rows.num_rows and rows.column("offset")[0].as_py() < place.fetched:
                rows = rows.filter(pc.greater_equal(rows.column("offset"), place.fetched))
            self._chunks.append(Chunk(place=place, rows=rows, end=end))
            self._buffered_bytes += rows.nbytes
            place.fetched = end
            self._changed.notify_all()
            return True

    def _fail(self, reading: _Reading, error: errors.SparklogError) -> None:
        with self._changed:
            if reading is self._reading and not reading.over.is_set():
                self._failure = error
                self._changed.notify_all()
                reading.end()

    # -------------------------------------------------------------------------- bounded

    def _read_to_end(self, reading: _Reading, waiting: deque[Place]) -> None:
        """One of several threads that share the places in `waiting`."""
        while not reading.over.is_set():
            try:
                place = waiting.popleft()
            except IndexError:
                return
            self._read_place(reading, place)

    def _read_place(self, reading: _Reading, place: Place) -> None:
        assert place.end is not None
        batches = read_range(
            self._connection,
            self._topics[place.topic],
            place.partition,
            start=place.fetched,
            end=place.end,
            columns=self._columns,
        )
        for rows in batches:
            if not self._put(reading, place, rows, rows.column("offset")[-1].as_py() + 1):
                return
        # Behind the last record there may be a gap.
        nothing = pa.RecordBatch.from_pylist([], pa.schema([pa.field("offset", pa.int64())]))
        self._put(reading, place, nothing, place.end)

    # -------------------------------------------------------------------------- following

    def _follow_broker(self, reading: _Reading, broker: int, places: list[Place]) -> None:
        backoff = self._connection.backoff()
        while not reading.over.is_set():
            try:
                self._follow_stream(reading, broker, places, backoff)
                return
            except errors.SparklogError as error:
                if reading.over.is_set():
                    return
                if not may_pass(error):
                    raise
                _log.warning("reading broke off, and begins again: %s", error)
                if isinstance(error, errors.NotLeader):
                    self._fresh_until = 0.0
            reading.over.wait(backoff.next_seconds())
            self._look_if_old(reading)

    def _follow_stream(
        self, reading: _Reading, broker: int, places: list[Place], backoff: Backoff
    ) -> None:
        """Returns when the reading is over; raises when the stream is."""
        channel = self._connection.channel(broker)
        with self._changed:
            positions = [
                wire.TailPosition(
                    topic=place.topic,
                    partition=place.partition,
                    offset=place.fetched,
                    topic_id=self._topics[place.topic].topic_id,
                )
                for place in places
            ]
        request = wire.TailRequest(positions=positions, columns=self._columns)
        try:
            writer, reader = channel.tail(request)
            reading.add(reader)
            try:
                while self._follow_chunk(reading, reader.read_chunk()):
                    backoff.reset()
                    self._look_if_old(reading)
            finally:
                reading.remove(reader)
                reader.cancel()
                _close_quietly(writer)
        except StopIteration:
            raise errors.BrokerUnavailable(
                address=channel.address, reason="it ended the stream"
            ) from None
        except (pa.ArrowException, OSError) as error:
            failure = failure_of(error, channel.address)
            if is_of_the_broker(failure) and not reading.over.is_set():
                self._connection.broke(channel)
            raise failure from error

    def _follow_chunk(self, reading: _Reading, chunk: Any) -> bool:
        header = wire.decode(wire.TailHeader, chunk.app_metadata)
        if header.idle:
            return not reading.over.is_set()
        # None: what is read was assigned anew meanwhile.
        place = self.places.get((header.topic, header.partition))
        return place is not None and self._put(reading, place, chunk.data, header.end)

    def _look_if_old(self, reading: _Reading) -> None:
        """Begins a new reading if partitions were added, or are led by others."""
        if time.monotonic() < self._fresh_until:
            return
        self._fresh_until = time.monotonic() + self._metadata_age_seconds
        try:
            topics = {name: describe(self._connection, name) for name in self._topics}
        except errors.SparklogError as error:
            # What is wrong with a topic, its stream says too.
            _log.warning("cannot look at the topics that are followed: %s", error)
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
                    if (name, each.partition) not in self.places:
                        self.places[name, each.partition] = Place(
                            topic=name,
                            partition=each.partition,
                            fetched=each.start,
                            position=each.start,
                            end=None,
                        )
            self._begin()


def _leaders(info: wire.TopicInfo) -> list[int]:
    return [each.leader for each in info.partitions]


def _close_quietly(writer: Any) -> None:
    # A stream that was cancelled, or broke, says so once more when it is closed.
    with contextlib.suppress(pa.ArrowException, OSError):
        writer.close()


# ------------------------------------------------------------------------------ forks

_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for feed in list(_feeds):
        feed.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
