"""The consumer: records of topics in order of their offsets within each partition, each once.

It reads ahead in threads of its own (`client.feed`) and keeps its positions itself; a connection
that breaks is opened anew from there. A consumer belongs to one thread.

In a group it reads the partitions that it is assigned, from what the group has committed on
(`client.groupfeed`), and each record at least once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Self

import numpy as np
import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.feed import Chunk, Feed, Place
from sparklog.client.groupfeed import GroupFeed, OnPartitions
from sparklog.client.membership import GroupOptions, Membership, Topics
from sparklog.client.reading import (
    Point,
    Record,
    Start,
    TopicPartition,
    check_offsets,
    check_point,
    check_start,
    check_time,
    describe,
    offsets_of,
    points_by_partition,
    records_of,
    wire_columns,
)
from sparklog.client.serialize import Deserializer

__all__ = ["Consumer", "Record"]


class Consumer:
    """Iterates over the records of topics: `for record in consumer`.

    Args:
        connection: to the brokers; stays open when the consumer is closed.
        topics: one name or several, which must exist; in a group also a compiled pattern, which
            matches whole names.
        start: where to begin: "earliest", "latest", an offset, a time (a datetime with a zone, or
            ISO 8601: the first record that is not older), or one of these for each of some
            partitions, as `{("t", 0): 12}` or `{"t": {0: 12}}`; others begin at the earliest. In a
            group only where nothing is committed, or it is not there any more; "error" raises then.
        follow: wait for new records, for ever, and in new partitions too; False: end at the
            records that stand when the consumer is made, or in a group when it is assigned them.
        columns: of `ROW_SCHEMA`, what is fetched; None: all. Records have None for the others.
        max_poll_rows: the most records that `poll` returns.
        buffer_bytes: how much is read ahead.
        key_deserializer: makes keys from bytes; a null key stays None.
        value_deserializer: makes values from bytes; a tombstone stays None.
        metadata_age_seconds: how soon partitions that were added are noticed, and topics that
            match a pattern.
        group: shares the topics' partitions with all members of this group, Kafka's consumers
            too; it is joined by the first poll.
        auto_commit: commits positions from time to time, and before partitions are given up;
            False: `commit` alone does.
        auto_commit_seconds: from what time to what time.
        assignors: how the member that leads the group may assign partitions, the best first:
            "range" and "roundrobin", as Kafka's consumers know them.
        instance_id: makes it a static member (KIP-345): closed, it stays in the group, and has its
            partitions again if it is back within the session timeout.
        client_id: tells people who it is.
        session_timeout_seconds: the group goes on without a member that it has not heard for so
            long; within what the broker's settings allow.
        heartbeat_seconds: how often the group hears it, however slow its user is.
        max_poll_interval_seconds: it leaves the group if it is not polled for so long, and joins
            again with the next poll. A rebalance waits so long for members to join.
        on_assign: called with the partitions that it has from now on; it may seek there.
        on_revoke: called with the partitions that it is about to lose; it may `commit`, which
            raises `MemberFenced` if the group has gone on without it.

    Raises:
        errors.UnknownTopic, errors.UnknownPartition: there is no such.
        errors.OffsetOutOfRange: a start beyond the end, if it does not follow.
        errors.BadOption, errors.WrongSchema: a start or a column that is none.
    """

    def __init__(
        self,
        connection: Connection,
        topics: str | Iterable[str] | re.Pattern[str],
        *,
        start: Start = "earliest",
        follow: bool = True,
        columns: Iterable[str] | None = None,
        max_poll_rows: int = limits.CONSUMER_POLL_ROWS,
        buffer_bytes: int = limits.CONSUMER_BUFFER_BYTES,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        metadata_age_seconds: float = limits.METADATA_AGE_SECONDS,
        group: str | None = None,
        auto_commit: bool = True,
        auto_commit_seconds: float = limits.AUTO_COMMIT_SECONDS,
        assignors: Iterable[str] = ("range", "roundrobin"),
        instance_id: str | None = None,
        client_id: str = "sparklog",
        session_timeout_seconds: float = limits.SESSION_TIMEOUT_SECONDS,
        heartbeat_seconds: float = limits.GROUP_HEARTBEAT_SECONDS,
        max_poll_interval_seconds: float = limits.MAX_POLL_INTERVAL_SECONDS,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
    ) -> None:
        self._connection = connection
        self._topics = Topics(topics)
        fetched = wire_columns(columns)
        self._columns = None if columns is None else list(columns)
        self._max_poll_rows = arguments.whole("max_poll_rows", max_poll_rows, least=1)
        self._key_deserializer = arguments.function("key_deserializer", key_deserializer)
        self._value_deserializer = arguments.function("value_deserializer", value_deserializer)
        arguments.flag("follow", follow)
        arguments.flag("auto_commit", auto_commit)
        arguments.text("client_id", client_id)
        arguments.function("on_assign", on_assign)
        arguments.function("on_revoke", on_revoke)
        buffer_bytes = arguments.whole("buffer_bytes", buffer_bytes, least=1)
        metadata_age_seconds = arguments.number(
            "metadata_age_seconds", metadata_age_seconds, least=0, may_be_infinite=True
        )
        self._chunk: Chunk | None = None
        """What `_records` are of; its end becomes the position after the last of them."""
        self._records: Iterator[Record] = iter(())
        self._group: GroupFeed | None = None
        options = None
        if group is None:
            _refuse_alone(
                topics=self._topics.pattern,
                instance_id=instance_id,
                on_assign=on_assign,
                on_revoke=on_revoke,
            )
        else:
            options = GroupOptions(
                group=group,
                instance_id=instance_id,
                client_id=client_id,
                assignors=tuple(arguments.texts("assignors", assignors)),
                session_timeout_seconds=session_timeout_seconds,
                heartbeat_seconds=heartbeat_seconds,
                max_poll_interval_seconds=max_poll_interval_seconds,
                auto_commit=auto_commit,
                auto_commit_seconds=auto_commit_seconds,
                metadata_age_seconds=metadata_age_seconds,
            )
            options.check()
        infos = self._describe()
        self._feed = Feed(
            connection,
            infos if options is None else (),
            _start_offsets(connection, infos, start) if options is None else {},
            follow=follow,
            columns=fetched,
            buffer_bytes=buffer_bytes,
            metadata_age_seconds=metadata_age_seconds,
            takes_new_partitions=options is None,
        )
        if options is not None:
            self._group = GroupFeed(
                connection,
                self._feed,
                Membership(connection, options, self._topics, self._feed.wake),
                start=start,
                first_counts={info.topic: len(info.partitions) for info in infos},
                on_assign=on_assign,
                on_revoke=on_revoke,
            )

    # -------------------------------------------------------------------------- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """The next record; waits for it when it follows, and stops at the end when it does not.

        Raises as `poll` does.
        """
        if self._group is not None:
            self._attend(None)
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
        place = self._chunk.place
        place.position = record.offset + 1
        if self._group is not None:
            self._group.handed = (place, record.offset)
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
            errors.GroupRefused: the group does not take it, and says why.
            errors.MemberFenced: another process has come as the same static member.
        """
        seconds = arguments.timeout("timeout", timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        if not self._attend(deadline):
            return []
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
            self._attend(None)
            if self._chunk is None and not self._load(None):
                return
            chunk = self._chunk
            assert chunk is not None
            # Some of it may have been taken as records already.
            first = chunk.place.position
            offsets = chunk.rows.column("offset").to_numpy()
            rows = chunk.rows.slice(int(np.searchsorted(offsets, first)))
            self._finish_chunk()
            if self._group is not None:
                self._group.handed = (chunk.place, first)
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
            self._hand_out(records[0], records[-1])
            self._rewind()
            return records
        if records:
            self._hand_out(records[0], records[-1])
        return records

    def _hand_out(self, first: Record, last: Record) -> None:
        assert self._chunk is not None
        place = self._chunk.place
        place.position = last.offset + 1
        if self._group is not None:
            self._group.handed = (place, first.offset)

    def _attend(self, deadline: float | None) -> bool:
        """What its group wants done before more is handed out; False: not ready by then."""
        group = self._group
        if group is None or group.is_ready():
            return True
        try:
            return group.attend(deadline)
        finally:
            if self._chunk is not None and not self._feed.has(self._chunk.place):
                self._chunk, self._records = None, iter(())

    def _rewind(self) -> None:
        """What could not be deserialized is not skipped: the position stays before it."""
        assert self._chunk is not None
        place = self._chunk.place
        self._chunk, self._records = None, iter(())
        self._feed.seek(place, place.position)

    def _load(self, deadline: float | None) -> bool:
        """Goes on to the next chunk; False: there is none, or not by then."""
        self._finish_chunk()
        taker = self._feed if self._group is None else self._group
        chunk = taker.take(deadline)
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
        """Goes on at `offset`, which may also be "earliest", "latest" or a time.

        Whether it exists turns out when it is read, and here where it is beyond the end of a
        consumer that does not follow. Raises `BadOption`, `OffsetOutOfRange`.
        """
        place = self._place(topic, partition)
        offset = check_point("offset", offset)
        if not isinstance(offset, int):
            info = describe(self._connection, topic)
            offset = offsets_of(self._connection, info, {partition: offset})[partition]
        self._drop_chunk_of([place])
        self._feed.seek(place, offset)

    def pause(self, topic: str, *partitions: int) -> None:
        """Gives no more records of these partitions, or of all of the topic; positions stay.

        In a group, until partitions are assigned anew.
        """
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

    def offsets_for_times(self, when: datetime | str) -> dict[TopicPartition, int]:
        """Of each partition the first record that is not older than `when`, or the end.

        Raises `BadOption` where `when` is no datetime with a zone, nor a time in ISO 8601.
        """
        when = check_time("when", when)
        return {
            (info.topic, partition): offset
            for info in self._describe()
            for partition, offset in offsets_of(
                self._connection, info, dict.fromkeys(range(len(info.partitions)), when)
            ).items()
        }

    def _describe(self) -> list[wire.TopicInfo]:
        names = self._topics.names(self._connection)
        return [describe(self._connection, name) for name in names]

    def _place(self, topic: str, partition: int) -> Place:
        key = arguments.topic(topic), arguments.whole("partition", partition)
        place = self._feed.places.get(key)
        if place is None:
            raise errors.BadOption(
                option="partition", value=f"{topic}-{partition}", reason="it is not being consumed"
            )
        return place

    def _pause(self, topic: str, partitions: Iterable[int], *, is_paused: bool) -> None:
        arguments.topic(topic)
        all_of_it = [number for name, number in self._feed.places if name == topic]
        places = [self._place(topic, number) for number in list(partitions) or all_of_it]
        self._drop_chunk_of(places)
        self._feed.pause(places, is_paused=is_paused)

    def _drop_chunk_of(self, places: list[Place]) -> None:
        # Not finished: what was not taken from it will be fetched again.
        if self._chunk is not None and self._chunk.place in places:
            self._chunk, self._records = None, iter(())

    # -------------------------------------------------------------------------- the group

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions that it reads now, sorted; in a group none before the first poll."""
        return sorted(self._feed.places)

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Tells the group where to go on; durable when it returns.

        Args:
            offsets: by (topic, partition), the next offset that the group is to read; None: after
                all that was handed out, of every partition that it reads.

        Raises:
            errors.MemberFenced: the group has gone on without it; the next poll joins again.
            errors.GroupRefused: a partition that does not exist.
            errors.GroupBusy: it is being assigned anew; the next poll waits for that.
            errors.Retriable: no answer in time, and no effect.
            errors.OutcomeUnknown: an answer was lost, and it may be committed.
            errors.BadRequest: it is in no group, or was not polled yet, or is closed.
        """
        group = self._in_group("commit")
        wanted = group.positions() if offsets is None else check_offsets(offsets)
        if wanted:
            group.membership.commit(wanted)

    def committed(self) -> dict[TopicPartition, int]:
        """What its group has committed, of whatever topics: the next offset of each partition."""
        return self._in_group("committed").membership.fetch_committed()

    def _in_group(self, call: str) -> GroupFeed:
        if self._group is None:
            raise errors.BadRequest(reason=f"{call}() is for consumers in a group: name the group")
        return self._group

    # -------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Ends the threads; what was read ahead is forgotten.

        In a group it commits first, if it does so by itself, and leaves. A failure of that commit
        is logged: the group reads from what was committed before.
        """
        self._close(is_dealt_with=True)

    def _close(self, *, is_dealt_with: bool) -> None:
        self._chunk, self._records = None, iter(())
        try:
            if self._group is not None:
                self._group.close(is_dealt_with=is_dealt_with)
        finally:
            self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, what was handed out last is not committed: it may not be dealt with."""
        self._close(is_dealt_with=kind is None)

    def __del__(self) -> None:
        group: GroupFeed | None = getattr(self, "_group", None)
        if group is not None:
            group.membership.abandon()
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
    start = check_start(start)
    if not isinstance(start, Mapping):
        for of_topic in points.values():
            of_topic.update(dict.fromkeys(of_topic, start))
    else:
        for (topic, partition), point in points_by_partition(start).items():
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


def _refuse_alone(**given: object) -> None:
    for option, value in given.items():
        if value:
            raise errors.BadOption(
                option=option, value=value, reason="it is for members of a group: name the group"
            )
