"""The consumer: records of topics in order of their offsets within each partition, each once.

It reads ahead in threads of its own (`client.feed`) and keeps its positions itself; a connection
that breaks is opened anew from there. A consumer belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, Self

import numpy as np
import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.client.connection import Connection
from sparklog.client.feed import Chunk, Feed, Place
from sparklog.client.reading import (
    Point,
    Record,
    Start,
    TopicPartition,
    describe,
    offsets_of,
    records_of,
    wire_columns,
)
from sparklog.client.serialize import Deserializer

__all__ = ["Consumer", "Record"]


class Consumer:
    """Iterates over the records of topics: `for record in consumer`.

    Args:
        connection: to the brokers; stays open when the consumer is closed.
        topics: one name or several; they must exist.
        start: where to begin: "earliest", "latest", an offset, a datetime with a zone (the first
            record that is not older), or one of these for each of some partitions, as
            `{("t", 0): 12}` or `{"t": {0: 12}}`; others begin at the earliest.
        follow: wait for new records, for ever, and in new partitions too; False: end at the
            records that stand when the consumer is made.
        columns: of `ROW_SCHEMA`, what is fetched; None: all. Records have None for the others.
        max_poll_rows: the most records that `poll` returns.
        buffer_bytes: how much is read ahead.
        key_deserializer: makes keys from bytes; a null key stays None.
        value_deserializer: makes values from bytes; a tombstone stays None.
        metadata_age_seconds: how soon partitions that were added are noticed.

    Raises:
        errors.UnknownTopic, errors.UnknownPartition: there is no such.
        errors.OffsetOutOfRange: a start beyond the end, if it does not follow.
        errors.BadOption, errors.WrongSchema: a start or a column that is none.
    """

    def __init__(
        self,
        connection: Connection,
        topics: str | Iterable[str],
        *,
        start: Start = "earliest",
        follow: bool = True,
        columns: Iterable[str] | None = None,
        max_poll_rows: int = limits.CONSUMER_POLL_ROWS,
        buffer_bytes: int = limits.CONSUMER_BUFFER_BYTES,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        metadata_age_seconds: float = limits.METADATA_AGE_SECONDS,
    ) -> None:
        self._connection = connection
        self._names = [topics] if isinstance(topics, str) else list(topics)
        self._columns = None if columns is None else list(columns)
        self._max_poll_rows = max_poll_rows
        self._key_deserializer = key_deserializer
        self._value_deserializer = value_deserializer
        fetched = wire_columns(self._columns)
        infos = self._describe()
        self._feed = Feed(
            connection,
            infos,
            _start_offsets(connection, infos, start),
            follow=follow,
            columns=fetched,
            buffer_bytes=buffer_bytes,
            metadata_age_seconds=metadata_age_seconds,
        )
        self._chunk: Chunk | None = None
        """What `_records` are of; its end becomes the position after the last of them."""
        self._records: Iterator[Record] = iter(())

    # -------------------------------------------------------------------------- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """The next record; waits for it when it follows, and stops at the end when it does not.

        Raises as `poll` does.
        """
        while True:
            try:
                record = next(self._records, None)
            except Exception:
                self._rewind()
                raise
            if record is not None:
                break
            if not self._load(None):
                raise StopIteration
        assert self._chunk is not None
        self._chunk.place.position = record.offset + 1
        return record

    def poll(self, timeout: float | None = None) -> list[Record]:
        """Up to `max_poll_rows` records, as soon as there are any.

        Args:
            timeout: seconds to wait for the first; None: as long as it takes.

        Returns:
            Nothing if none came in time, or if the end was reached.

        Raises:
            errors.OffsetOutOfRange: a position is outside what exists, which it names; `seek`.
            errors.TopicChanged, errors.UnknownTopic: the topic was deleted, or made anew.
            errors.BadRequest: the consumer is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        records = self._next_records()
        while not records:
            if not self._load(deadline):
                return []
            records = self._next_records()
        return records

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow batches of `ROW_SCHEMA`, or of the columns asked for.

        A batch is of one partition; the metadata of its schema name the topic, as `topic`. Waits,
        ends and raises as iterating over records does.
        """
        while True:
            if self._chunk is None and not self._load(None):
                return
            chunk = self._chunk
            assert chunk is not None
            # Some of it may have been taken as records already.
            offsets = chunk.rows.column("offset").to_numpy()
            rows = chunk.rows.slice(int(np.searchsorted(offsets, chunk.place.position)))
            self._finish_chunk()
            if rows.num_rows:
                if self._columns is not None:
                    rows = rows.select(self._columns)
                yield rows.replace_schema_metadata({"topic": chunk.place.topic})

    def _next_records(self) -> list[Record]:
        records: list[Record] = []
        try:
            records.extend(islice(self._records, self._max_poll_rows))
        except Exception:
            if not records:
                self._rewind()
                raise
            # The record that failed is the first of the next poll.
            self._move_past(records[-1])
            self._rewind()
            return records
        if records:
            self._move_past(records[-1])
        return records

    def _move_past(self, record: Record) -> None:
        assert self._chunk is not None
        self._chunk.place.position = record.offset + 1

    def _rewind(self) -> None:
        """What could not be deserialized is not skipped: the position stays before it."""
        assert self._chunk is not None
        place = self._chunk.place
        self._chunk, self._records = None, iter(())
        self._feed.seek(place, place.position)

    def _load(self, deadline: float | None) -> bool:
        """Goes on to the next chunk; False: there is none, or not by then."""
        self._finish_chunk()
        chunk = self._feed.take(deadline)
        if chunk is None:
            return False
        self._chunk = chunk
        self._records = records_of(
            chunk.place.topic,
            chunk.place.partition,
            chunk.rows,
            self._key_deserializer,
            self._value_deserializer,
        )
        return True

    def _finish_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.place.position = self._chunk.end
        self._chunk, self._records = None, iter(())

    # -------------------------------------------------------------------------- positions

    def position(self, topic: str, partition: int = 0) -> int:
        """The offset after the last record that was taken."""
        return self._place(topic, partition).position

    def seek(self, topic: str, partition: int, offset: Point) -> None:
        """Goes on at `offset`, which may also be "earliest", "latest" or a datetime.

        Whether it exists turns out when it is read, and here where it is beyond the end of a
        consumer that does not follow. Raises `BadOption`, `OffsetOutOfRange`.
        """
        place = self._place(topic, partition)
        if not isinstance(offset, int):
            info = describe(self._connection, topic)
            offset = offsets_of(self._connection, info, {partition: offset})[partition]
        self._drop_chunk_of([place])
        self._feed.seek(place, offset)

    def pause(self, topic: str, *partitions: int) -> None:
        """Gives no more records of these partitions, or of all of the topic; positions stay."""
        self._pause(topic, partitions, is_paused=True)

    def resume(self, topic: str, *partitions: int) -> None:
        """Takes `pause` back."""
        self._pause(topic, partitions, is_paused=False)

    def beginning_offsets(self) -> dict[TopicPartition, int]:
        """The first offset that exists now, of each partition."""
        return {
            (info.topic, each.partition): each.start
            for info in self._describe()
            for each in info.partitions
        }

    def end_offsets(self) -> dict[TopicPartition, int]:
        """The offset that the next record will have, as of now, of each partition."""
        return {
            (info.topic, each.partition): each.end
            for info in self._describe()
            for each in info.partitions
        }

    def offsets_for_times(self, when: datetime) -> dict[TopicPartition, int]:
        """Of each partition the first record that is not older than `when`, or the end."""
        return {
            (info.topic, partition): offset
            for info in self._describe()
            for partition, offset in offsets_of(
                self._connection, info, dict.fromkeys(range(len(info.partitions)), when)
            ).items()
        }

    def _describe(self) -> list[wire.TopicInfo]:
        return [describe(self._connection, name) for name in self._names]

    def _place(self, topic: str, partition: int) -> Place:
        place = self._feed.places.get((topic, partition))
        if place is None:
            raise errors.BadOption(
                option="partition", value=f"{topic}-{partition}", reason="it is not being consumed"
            )
        return place

    def _pause(self, topic: str, partitions: Iterable[int], *, is_paused: bool) -> None:
        all_of_it = [number for name, number in self._feed.places if name == topic]
        places = [self._place(topic, number) for number in list(partitions) or all_of_it]
        self._drop_chunk_of(places)
        self._feed.pause(places, is_paused=is_paused)

    def _drop_chunk_of(self, places: list[Place]) -> None:
        # Not finished: what was not taken from it will be fetched again.
        if self._chunk is not None and self._chunk.place in places:
            self._chunk, self._records = None, iter(())

    # -------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Ends the threads; what was read ahead is forgotten."""
        self._chunk, self._records = None, iter(())
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        feed: Feed | None = getattr(self, "_feed", None)
        if feed is not None:
            feed.end(errors.BadRequest(reason="the consumer is gone"))


def _start_offsets(
    connection: Connection, infos: list[wire.TopicInfo], start: Start
) -> dict[TopicPartition, int]:
    """The offset to begin at, of every partition."""
    points: dict[str, dict[int, Point]] = {
        info.topic: dict.fromkeys(range(len(info.partitions)), "earliest") for info in infos
    }
    if not isinstance(start, Mapping):
        for of_topic in points.values():
            of_topic.update(dict.fromkeys(of_topic, start))
    else:
        entries: Mapping[Any, Any] = start
        for key, value in entries.items():
            named = {key: value} if isinstance(key, tuple) else _named(key, value)
            for (topic, partition), point in named.items():
                if topic not in points:
                    raise errors.BadOption(
                        option="start", value=topic, reason="that topic is not being consumed"
                    )
                points[topic][partition] = point
    return {
        (info.topic, partition): offset
        for info in infos
        for partition, offset in offsets_of(connection, info, points[info.topic]).items()
    }


def _named(topic: str, points: Any) -> dict[TopicPartition, Point]:
    if not isinstance(points, Mapping):
        reason = "expected offsets by partition: {topic: {partition: offset}}"
        raise errors.BadOption(option="start", value=points, reason=reason)
    return {(topic, partition): point for partition, point in points.items()}
