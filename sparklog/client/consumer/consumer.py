"""The consumer: reads records of topics, in offset order within each partition, each once.

It reads ahead on its own threads (`fetcher`) and tracks its positions itself; when a connection
breaks, it continues from them over a new one. A consumer must be used by one thread only.

In a group it reads its assigned partitions from the committed offsets (`group_fetcher`), and each
record at least once.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Self

import numpy as np
import pyarrow as pa

from sparklog import errors, limits
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.consumer.fetcher import Chunk, Fetcher, FetchPosition
from sparklog.client.consumer.group_fetcher import GroupFetcher, OnPartitions
from sparklog.client.consumer.membership import GroupOptions, Membership, Topics
from sparklog.client.consumer.reading import (
    Record,
    check_columns,
    records_of,
    wire_columns,
    with_typed_columns,
)
from sparklog.client.consumer.statistics import ConsumerStatistics
from sparklog.client.offsets import (
    OffsetAndMetadata,
    Point,
    Start,
    TopicPartition,
    check_offsets,
    check_point,
    check_start,
    check_time,
    describe,
    offsets_of,
    points_by_partition,
)
from sparklog.client.schemas import BrokerSchemas
from sparklog.client.serialize import Deserializer
from sparklog.client.times import utc
from sparklog.display import counted, html_table
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA

__all__ = ["Consumer", "Record"]


class Consumer:
    """Iterates over the records of topics: `for record in consumer`.

    Args:
        connection: to the brokers; stays open when the consumer is closed.
        topics: one or more names, which must exist; in a group also a compiled pattern, which
            matches whole names. None: only without a group; `assign` sets the partitions.
        start: where to begin: "earliest", "latest", an offset, a time (a datetime with a zone, or
            ISO 8601: the first record at that time or later), or one of these by partition, as
            `{("t", 0): 12}` or `{"t": {0: 12}}`; partitions not listed begin at the earliest
            offset. In a group it applies only if no offset is committed, or the committed one no
            longer exists; "error" raises in this case.
        follow: wait indefinitely for new records, including those of new partitions. False: stop at
            the end offsets as of when the consumer is opened or, in a group, is assigned the
            partitions.
        columns: the columns of `ROW_SCHEMA` to fetch; None: all. Records have None for the others.
            For a single topic also typed columns of its table, which only `batches` returns: those
            that the topic has when the consumer is opened.
        max_poll_rows: maximum number of records that `poll` returns.
        buffer_bytes: memory for records that are read ahead.
        key_deserializer: converts bytes to a key; a null key stays None.
        value_deserializer: converts bytes to a value; a tombstone stays None.
        metadata_age_seconds: how often to check for new partitions and, with a pattern, for new
            topics.
        group: shares the topics' partitions with all members of this group, including Kafka's
            consumers; the first poll joins it.
        auto_commit: commit positions periodically, and before partitions are revoked; False: only
            when `commit` is called.
        auto_commit_seconds: the interval between these commits.
        assignors: those that the leader of the group may use, in order of preference: "range",
            "roundrobin" and "cooperative-sticky", as in Kafka's consumers. With only
            "cooperative-sticky", members keep reading the partitions that do not move (KIP-429).
        instance_id: makes it a static member (KIP-345): when closed, it stays in the group, and
            keeps its partitions if it returns within the session timeout.
        client_id: its name in descriptions of the group.
        session_timeout_seconds: the group removes a member after this time without a heartbeat;
            within the bounds of the broker's settings.
        heartbeat_seconds: the interval between heartbeats, which continue however slowly records
            are processed.
        max_poll_interval_seconds: it leaves the group after this time without a poll, and rejoins
            at the next one. A rebalance waits for that long for members to join.
        on_assign: called with newly assigned partitions; it may `seek` in them.
        on_revoke: called with the partitions that it is about to lose; it may `commit`.
        on_lost: called with the partitions lost when the group has removed the consumer: other
            members may already be reading them, and a commit raises `MemberFenced`. None:
            `on_revoke` is called.

    Raises:
        errors.UnknownTopic, errors.UnknownPartition: a topic or partition does not exist.
        errors.OffsetOutOfRange: a start beyond the end, without `follow`.
        errors.BadOption, errors.WrongSchema: an invalid start, or an unknown column.
        errors.BadRequest: the connection is closed.
    """

    def __init__(
        self,
        connection: Connection,
        topics: str | Iterable[str] | re.Pattern[str] | None = None,
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
        on_lost: OnPartitions | None = None,
    ) -> None:
        connection.check_open()  # without topics it makes no request here
        self._connection = connection
        self._clock = connection.clock
        self._topics = Topics(topics)
        self._columns = None if columns is None else arguments.texts("columns", columns)
        self._with_typed: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None
        """Adds the typed columns of the topic to its rows, if `columns` names some."""
        self._max_poll_rows = arguments.whole("max_poll_rows", max_poll_rows, least=1)
        self._key_deserializer = arguments.function("key_deserializer", key_deserializer)
        self._value_deserializer = arguments.function("value_deserializer", value_deserializer)
        arguments.flag("follow", follow)
        arguments.flag("auto_commit", auto_commit)
        arguments.text("client_id", client_id)
        arguments.function("on_assign", on_assign)
        arguments.function("on_revoke", on_revoke)
        arguments.function("on_lost", on_lost)
        buffer_bytes = arguments.whole("buffer_bytes", buffer_bytes, least=1)
        metadata_age_seconds = arguments.number(
            "metadata_age_seconds", metadata_age_seconds, least=0, may_be_infinite=True
        )
        self._chunk: Chunk | None = None
        """The chunk behind `_records`; its end becomes the position after the last of them."""
        self._records: Iterator[Record] = iter(())
        self._start: Start = start
        self._records_count = self._bytes_count = 0
        """Those handed out from chunks before `_chunk`."""
        self._last_poll_us: int | None = None
        self._is_closed = False
        self._group: GroupFetcher | None = None
        options = None
        if group is None:
            _refuse_alone(
                topics=self._topics.pattern,
                instance_id=instance_id,
                on_assign=on_assign,
                on_revoke=on_revoke,
                on_lost=on_lost,
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
            self._topics.check_some()
        infos = self._describe()
        fetched = self._wire_columns(infos)
        self._fetcher = Fetcher(
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
            self._group = GroupFetcher(
                connection,
                self._fetcher,
                Membership(connection, options, self._topics, self._fetcher.wake),
                start=start,
                first_counts={info.topic: len(info.partitions) for info in infos},
                on_assign=on_assign,
                on_revoke=on_revoke,
                on_lost=on_lost,
            )

    # -------------------------------------------------------------------------- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """Returns the next record; waits for it, or stops at the end without `follow`.

        Raises what `poll` raises.
        """
        if self._group is not None:
            self._attend(None)
        while True:
            try:
                record = next(self._records, None)
            except BaseException:
                # Even on Ctrl-C in a deserializer: the chunk's other records would be lost.
                self._rewind()
                raise
            if record is not None:
                break
            if not self._load(None):
                raise StopIteration
        assert self._chunk is not None
        position = self._chunk.position
        position.next_offset = record.offset + 1
        if self._group is not None:
            self._group.handed = (position, record.offset)
        return record

    def poll(self, timeout: float | None = None) -> list[Record]:
        """Returns up to `max_poll_rows` records, as soon as there are any.

        Returns an empty list if none arrived in time, or if the end was reached.

        Args:
            timeout: seconds to wait for the first; None: no limit.

        Raises:
            errors.DeserializationFailed: a deserializer rejected the next record; those before it
                were returned. The position stays at the record, so each poll of its partition
                raises again; `seek(error.topic, error.partition, error.offset + 1)` skips it.
            errors.OffsetOutOfRange: a position is outside the partition's offsets; `seek`.
            errors.TopicChanged, errors.UnknownTopic: the topic was re-created, or deleted.
            errors.BadRequest: the consumer is closed.
            errors.GroupRefused: the group refuses the consumer; the error names the reason.
            errors.MemberFenced: another process has joined as the same static member.
        """
        self._last_poll_us = self._clock.now_us()
        seconds = arguments.timeout("timeout", timeout)
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        if not self._attend(deadline):
            return []
        records = self._next_records()
        while not records:
            if not self._load(deadline):
                return []
            records = self._next_records()
        return records

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows as Arrow batches of `ROW_SCHEMA`, or of the requested columns.

        A batch has rows of one partition; `topic` in its schema's metadata names the topic. Waits,
        ends and raises like iteration over records.
        """
        while True:
            self._attend(None)
            if self._chunk is None and not self._load(None):
                return
            chunk = self._chunk
            assert chunk is not None
            # Some rows may already have been handed out as records.
            first = chunk.position.next_offset
            offsets = chunk.rows.column("offset").to_numpy()
            rows = chunk.rows.slice(int(np.searchsorted(offsets, first)))
            self._finish_chunk()
            if self._group is not None:
                self._group.handed = (chunk.position, first)
            if rows.num_rows:
                if self._with_typed is not None:
                    rows = self._with_typed(rows)
                if self._columns is not None:
                    rows = rows.select(self._columns)
                yield rows.replace_schema_metadata({"topic": chunk.position.topic})

    def _next_records(self) -> list[Record]:
        records: list[Record] = []
        try:
            records.extend(islice(self._records, self._max_poll_rows))
        except BaseException as error:
            if not records or not isinstance(error, errors.DeserializationFailed):
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
        position = self._chunk.position
        position.next_offset = last.offset + 1
        if self._group is not None:
            self._group.handed = (position, first.offset)

    def _attend(self, deadline: float | None) -> bool:
        """Does what the group requires before more is handed out; False: not by `deadline`."""
        group = self._group
        if group is None or group.is_ready():
            return True
        try:
            return group.attend(deadline)
        finally:
            if self._chunk is not None and not self._fetcher.has(self._chunk.position):
                self._leave_chunk()

    def _rewind(self) -> None:
        """Fetches again from the position, so a record that was not deserialized is not skipped."""
        assert self._chunk is not None
        position = self._chunk.position
        self._leave_chunk()
        self._fetcher.seek(position, position.next_offset)

    def _load(self, deadline: float | None) -> bool:
        """Takes the next chunk; returns False if there is none by `deadline`."""
        self._finish_chunk()
        self._last_poll_us = self._clock.now_us()
        taker = self._fetcher if self._group is None else self._group
        chunk = taker.take(deadline)
        if chunk is None:
            return False
        self._chunk = chunk
        self._records = records_of(
            chunk.position.topic,
            chunk.position.partition,
            chunk.rows,
            self._key_deserializer,
            self._value_deserializer,
        )
        return True

    def _finish_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.position.next_offset = self._chunk.end
        self._leave_chunk()

    def _leave_chunk(self) -> None:
        records, size_bytes = self._taken()
        self._records_count += records
        self._bytes_count += size_bytes
        self._chunk, self._records = None, iter(())

    def _taken(self) -> tuple[int, int]:
        """Returns how many records of the current chunk were handed out, and their bytes."""
        chunk = self._chunk
        if chunk is None:
            return 0, 0
        if chunk.position.next_offset >= chunk.end:
            return chunk.rows.num_rows, chunk.size_bytes
        offsets = chunk.rows.column("offset").to_numpy()
        count = int(np.searchsorted(offsets, chunk.position.next_offset))
        return count, chunk.rows.slice(0, count).nbytes

    # -------------------------------------------------------------------------- positions

    def position(self, topic: str, partition: int = 0) -> int:
        """Returns the offset after the last record handed out."""
        return self._position_of(topic, partition).next_offset

    def seek(self, topic: str, partition: int, offset: Point) -> None:
        """Continues at `offset`, which may also be "earliest", "latest" or a time.

        If the offset does not exist, the next poll raises; if it is beyond the end and the consumer
        does not follow, `seek` itself raises `OffsetOutOfRange`. Raises `BadOption`.
        """
        position = self._position_of(topic, partition)
        offset = check_point("offset", offset)
        if not isinstance(offset, int):
            info = describe(self._connection, topic)
            offset = offsets_of(self._connection, info, {partition: offset})[partition]
        self._drop_chunk_of([position])
        self._fetcher.seek(position, offset)

    def pause(self, topic: str, *partitions: int) -> None:
        """Stops returning records of these partitions, or of the whole topic; positions stay.

        In a group this lasts until the partition is assigned again.
        """
        self._pause(topic, partitions, is_paused=True)

    def resume(self, topic: str, *partitions: int) -> None:
        """Ends a `pause`."""
        self._pause(topic, partitions, is_paused=False)

    def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Returns the first offset that exists in each partition."""
        return {
            (info.topic, each.partition): each.start
            for info in self._describe()
            for each in info.partitions
        }

    def end_offsets(self) -> dict[TopicPartition, int]:
        """Returns the offset of the next record to be written to each partition."""
        return {
            (info.topic, each.partition): each.end
            for info in self._describe()
            for each in info.partitions
        }

    def offsets_for_times(self, when: datetime | str) -> dict[TopicPartition, int]:
        """Returns, by partition, the offset of the first record at `when` or later, or the end.

        Raises `BadOption` if `when` is neither a datetime with a zone nor a time in ISO 8601.
        """
        when = check_time("when", when)
        return {
            (info.topic, partition): offset
            for info in self._describe()
            for partition, offset in offsets_of(
                self._connection, info, dict.fromkeys(range(len(info.partitions)), when)
            ).items()
        }

    def _describe(self) -> list[flight_messages.TopicInfo]:
        names = self._topics.names(self._connection)
        return [describe(self._connection, name) for name in names]

    def _wire_columns(self, infos: list[flight_messages.TopicInfo]) -> list[str] | None:
        """Returns the columns to fetch. Those of a single topic may include its typed columns."""
        names = self._columns
        if names is None or self._topics.pattern is not None or len(infos) != 1:
            return wire_columns(names)
        check_columns(infos[0], names)
        stored = [name for name in names if name in ROW_SCHEMA.names]
        if len(stored) == len(names):
            return wire_columns(stored)
        plan = infos[0].plan
        assert plan is not None
        schemas = BrokerSchemas(self._connection, infos[0].topic)
        self._with_typed = functools.partial(with_typed_columns, plan=plan, schemas=schemas)
        return wire_columns(dict.fromkeys([*stored, "value"]))

    def _position_of(self, topic: str, partition: int) -> FetchPosition:
        key = arguments.topic(topic), arguments.whole("partition", partition)
        position = self._fetcher.positions.get(key)
        if position is None:
            raise errors.BadOption(
                option="partition", value=f"{topic}-{partition}", reason="it is not being consumed"
            )
        return position

    def _pause(self, topic: str, partitions: Iterable[int], *, is_paused: bool) -> None:
        arguments.topic(topic)
        all_of_it = [number for name, number in self._fetcher.positions if name == topic]
        positions = [self._position_of(topic, number) for number in list(partitions) or all_of_it]
        self._drop_chunk_of(positions)
        self._fetcher.pause(positions, is_paused=is_paused)

    def _drop_chunk_of(self, positions: list[FetchPosition]) -> None:
        # Records that were not handed out from it are fetched again.
        if self._chunk is not None and self._chunk.position in positions:
            self._leave_chunk()

    # -------------------------------------------------------------------------- assignment

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions being read, sorted; in a group none before the first poll."""
        return sorted(self._fetcher.positions)

    def assign(self, partitions: Iterable[TopicPartition], start: Start | None = None) -> None:
        """From now on reads only these partitions, of any topics.

        Partitions already being read keep their positions. Partitions added to the topics later are
        not read.

        Args:
            partitions: as `[("orders", 0), ("orders", 3)]`; empty: none.
            start: where to begin in the others; None: the `start` that the consumer was opened
                with.

        Raises:
            errors.BadRequest: the consumer is in a group, which assigns its partitions.
            errors.UnknownTopic, errors.UnknownPartition: there is no such topic or partition.
            errors.OffsetOutOfRange: a start beyond the end, without `follow`.
            errors.BadOption: an argument of the wrong type.
        """
        if self._group is not None:
            raise errors.BadRequest(
                reason="assign() is for consumers without a group: a group assigns its partitions"
            )
        what = "a list of (topic, partition)"
        wanted = set(arguments.each("partitions", partitions, arguments.topic_partition, what))
        if self._with_typed is not None:
            topics = self._topics.names(self._connection)
            if other := sorted({topic for topic, _ in wanted}.difference(topics)):
                raise errors.BadOption(
                    option="partitions",
                    value=other[0],
                    reason=f"the consumer has typed columns of {topics[0]}",
                )
        infos = {topic: describe(self._connection, topic) for topic in {name for name, _ in wanted}}
        for topic, number in wanted:
            last = len(infos[topic].partitions) - 1
            if number > last:
                raise errors.UnknownPartition(topic=topic, partition=number, last=last)
        added = sorted(wanted - set(self._fetcher.positions))
        offsets = _offsets_at(
            self._connection, infos, added, self._start if start is None else start
        )
        self._fetcher.assign(infos.values(), offsets, keep=wanted, is_all_of_topics=False)
        self._topics = Topics(sorted(infos) or None)
        if self._chunk is not None and not self._fetcher.has(self._chunk.position):
            self._leave_chunk()

    # -------------------------------------------------------------------------- group

    def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata | tuple[int, str]] | None = None,
    ) -> None:
        """Commits offsets for its group; they are durable when it returns.

        Args:
            offsets: by (topic, partition), the next offset for the group to read, optionally with a
                string, as `OffsetAndMetadata` or a pair; None: the positions after all records
                handed out, for every partition being read.

        Raises:
            errors.MemberFenced: the group has removed the consumer; the next poll rejoins.
            errors.GroupRefused: a partition does not exist, or a string is too long.
            errors.GroupBusy: the group is rebalancing; the next poll waits for it to finish.
            errors.Retriable: no response in time, and no effect.
            errors.OutcomeUnknown: an answer was lost, and the offsets may be committed.
            errors.BadRequest: the consumer has no group, has not been polled yet, or is closed.
        """
        group = self._in_group("commit")
        wanted: Mapping[TopicPartition, int | OffsetAndMetadata] = (
            group.positions() if offsets is None else check_offsets(offsets)
        )
        if wanted:
            group.membership.commit(wanted)

    def committed(self) -> dict[TopicPartition, int]:
        """Returns the offsets that its group has committed, for all topics."""
        found = self._in_group("committed").membership.fetch_committed()
        return {key: each.offset for key, each in found.items()}

    def committed_metadata(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Returns the offsets that its group has committed, for all topics, with their strings."""
        return self._in_group("committed_metadata").membership.fetch_committed()

    def _in_group(self, call: str) -> GroupFetcher:
        if self._group is None:
            raise errors.BadRequest(reason=f"{call}() is for consumers in a group: name the group")
        return self._group

    # -------------------------------------------------------------------------- statistics

    def statistics(self) -> ConsumerStatistics:
        """Returns the consumer's statistics, without asking a broker."""
        records, size_bytes = self._taken()
        micros = self._last_poll_us
        return ConsumerStatistics(
            records=self._records_count + records,
            bytes=self._bytes_count + size_bytes,
            lag=self._fetcher.lag,
            rebalances=0 if self._group is None else self._group.rebalances,
            buffered_bytes=self._fetcher.buffered_bytes,
            last_poll=None if micros is None else utc(micros),
        )

    def __repr__(self) -> str:
        group = "" if self._group is None else f"group {self._group.membership.options.group!r}, "
        if self._is_closed:
            return f"Consumer({group}closed)"
        partitions = counted(len(self._fetcher.positions), "partition")
        return f"Consumer({group}{partitions}, lag {self._fetcher.lag:,})"

    def _repr_html_(self) -> str:
        rows = (
            (topic, number, position.next_offset, position.high_watermark, position.lag)
            for (topic, number), position in sorted(self._fetcher.positions.items())
        )
        return html_table(repr(self), ("topic", "partition", "position", "end", "lag"), rows)

    # -------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Stops the threads, and discards the records that were read ahead.

        In a group it first commits, with `auto_commit`, and leaves. A failure of that commit is
        logged: the group continues from the offsets committed previously.
        """
        self._close(is_processed=True)

    def _close(self, *, is_processed: bool) -> None:
        self._leave_chunk()
        self._is_closed = True
        try:
            if self._group is not None:
                self._group.close(is_processed=is_processed)
        finally:
            self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commits the last records handed out only if there was no error in processing them."""
        self._close(is_processed=kind is None)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the threads no longer run, and nothing can be imported
        group: GroupFetcher | None = getattr(self, "_group", None)
        if group is not None:
            group.membership.abandon()
        fetcher: Fetcher | None = getattr(self, "_fetcher", None)
        if fetcher is not None:
            fetcher.end(errors.BadRequest(reason="the consumer is gone"))


def _start_offsets(
    connection: Connection, infos: list[flight_messages.TopicInfo], start: Start
) -> dict[TopicPartition, int]:
    """Returns the offset to begin at in each partition of these topics."""
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


def _offsets_at(
    connection: Connection,
    infos: Mapping[str, flight_messages.TopicInfo],
    partitions: Iterable[TopicPartition],
    start: Start,
) -> dict[TopicPartition, int]:
    """Returns the offset to begin at in each of these partitions."""
    start = check_start(start)
    named = points_by_partition(start) if isinstance(start, Mapping) else {}
    otherwise: Point = "earliest" if isinstance(start, Mapping) else start
    points: dict[str, dict[int, Point]] = {topic: {} for topic in infos}
    for topic, number in partitions:
        points[topic][number] = named.get((topic, number), otherwise)
    return {
        (topic, number): offset
        for topic, of_topic in points.items()
        if of_topic
        for number, offset in offsets_of(connection, infos[topic], of_topic).items()
    }


def _refuse_alone(**given: object) -> None:
    for option, value in given.items():
        if value:
            raise errors.BadOption(
                option=option,
                value=value,
                reason="it is only for members of a group: name the group",
            )
