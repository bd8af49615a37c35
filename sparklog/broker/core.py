"""The façade: everything that a door may ask of this broker, in the log's own terms.

A door translates and decides nothing; what is refused is refused here, by a typed error, with no
side effect. All methods may be called from any thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

import sparklog
from sparklog import errors, limits, wire
from sparklog.broker import topicconfig
from sparklog.broker.hot import HotTail
from sparklog.broker.lease import Lease
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.producers import Stamp
from sparklog.broker.publisher import Publisher
from sparklog.broker.writer import Append, Appended, Ticket, Writer
from sparklog.clock import Clock
from sparklog.record import check_topic_name, rows_of_run
from sparklog.storage import compaction, manifest, plan
from sparklog.storage.meta import Broker, Metadata, MetaStore, PartitionMeta, TopicMeta
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.read import read_slice
from sparklog.storage.snapshot import BatchId, TableSnapshot
from sparklog.storage.table import (
    Change,
    Table,
    create_change,
    delete_change,
    describe_change,
    table_folder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefaults:
    auto_create: bool = False
    partitions: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one partition on their way to a reader; `end` is the next offset to ask for."""

    topic: str
    partition: int
    first: int
    end: int
    high_watermark: int
    rows: pa.RecordBatch


class Core:
    """One broker in one epoch."""

    def __init__(
        self,
        store: Store,
        meta: MetaStore,
        lease: Lease,
        ledger: Ledger,
        writer: Writer,
        publisher: Publisher,
        hot: HotTail,
        *,
        clock: Clock,
        defaults: TopicDefaults,
        submit_timeout_seconds: float = 30.0,
    ) -> None:
        self._store = store
        self._meta = meta
        self._lease = lease
        self._ledger = ledger
        self._writer = writer
        self._publisher = publisher
        self._hot = hot
        self._clock = clock
        self._defaults = defaults
        self._submit_timeout_seconds = submit_timeout_seconds
        self._admin = threading.Lock()
        """Serialises changes of topics; the only lock that is held across I/O, by admin calls."""
        self._readers: dict[str, _TableReader] = {}
        self._closing = threading.Event()
        self.publish_now: Callable[[], None] = lambda: None
        """Asks the publishing thread to begin at once; set by whoever runs it."""

    # -------------------------------------------------------------------------- appending

    def append(
        self, topic: str, partition: int, batch: pa.RecordBatch, stamp: Stamp | None = None
    ) -> Ticket:
        """Queues a payload batch; `wait` for it. Raises what `Writer.prepare` and `submit` raise."""
        prepared = self._writer.prepare(self._topic_for_write(topic), partition, batch, stamp)
        return self._writer.submit([prepared], timeout_seconds=self._submit_timeout_seconds)

    def wait(self, ticket: Ticket) -> list[Appended]:
        """Returns once the ticket is durable. Raises what refused it."""
        return self._writer.wait(ticket)

    def _topic_for_write(self, name: str) -> Topic:
        try:
            return self._ledger.topic(name)
        except errors.UnknownTopic:
            if not self._defaults.auto_create:
                raise
            self.create_topic(wire.CreateTopic(topic=name, if_absent=True))
            return self._ledger.topic(name)

    def new_producer(self) -> wire.ProducerIdentity:
        """A producer id that nobody has had before."""

        def decide(metadata: Metadata) -> Metadata:
            self._check_lease(metadata)
            return msgspec.structs.replace(metadata, next_producer_id=metadata.next_producer_id + 1)

        with self._admin:
            metadata = self._meta.change(decide)
        return wire.ProducerIdentity(producer_id=metadata.next_producer_id - 1)

    def adopt(self, request: wire.Adopt) -> wire.Adopted:
        """Appends what a manifest names, by reference, once. See DESIGN of the Spark sink.

        Raises `BadRequest`, `UnknownTopic`, `UnknownPartition`, `CorruptObject`, `MissingObject`.
        """
        found = manifest.read(self._store, request.manifest)
        found.check_files(self._store)
        batch_id = BatchId(found.query, found.batch)
        appends = [self._staged(section, batch_id) for section in found.sections if section.rows]
        if not appends:
            return wire.Adopted(ranges={})
        ticket = self._writer.submit(appends, timeout_seconds=self._submit_timeout_seconds)
        results = self._writer.wait(ticket)
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for section, result in zip(
            (each for each in found.sections if each.rows), results, strict=True
        ):
            of_topic = ranges.setdefault(section.topic, {})
            first, count = of_topic.get(section.partition, (result.base_offset, 0))
            of_topic[section.partition] = first, count + section.rows
        return wire.Adopted(ranges=ranges, skipped=all(each.duplicate for each in results))

    def _staged(self, section: manifest.Section, batch_id: BatchId) -> Append:
        topic = self._topic_for_write(section.topic)
        topic.partition(section.partition)
        arrival_us = self._clock.now_us()
        return Append(
            topic_id=topic.topic_id,
            partition=section.partition,
            count=section.rows,
            arrival_us=arrival_us,
            min_timestamp_us=min(section.min_timestamp_us or arrival_us, arrival_us),
            max_timestamp_us=max(section.max_timestamp_us or arrival_us, arrival_us),
            timestamp_type=topic.timestamp_type,
            staged=section.ref(),
            batch_id=batch_id,
        )

    # -------------------------------------------------------------------------- reading

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        topic_id: str | None = None,
    ) -> Iterator[Batch]:
        """Every record of the range, in order, from memory, WAL or table.

        Raises `UnknownTopic`, `TopicChanged`, `UnknownPartition`, `OffsetOutOfRange`.
        """
        known = self._topic(topic, topic_id)
        place = known.partition(partition)
        self._check_range(known, place, start, end)
        while start < end:
            for batch in self._read_some(known, place, start, end, columns):
                yield batch
                start = batch.end

    def _read_some(
        self,
        topic: Topic,
        partition: Partition,
        start: int,
        end: int,
        columns: Sequence[str] | None,
    ) -> Iterator[Batch]:
        """The next batches from `start`: hot ones, or those of one planned slice; at least one."""
        hot = self._hot.run(
            topic.topic_id,
            partition.number,
            start,
            rows=min(end - start, limits.SCAN_BATCH_ROWS),
        )
        if hot:
            run = [(e.base_offset, e.arrival_us, e.timestamp_type, p) for e, p in hot]
            for rows in rows_of_run(run, partition=partition.number):
                rows = rows.slice(0, end - start)
                if rows.num_rows:
                    first, start = start, start + rows.num_rows
                    yield self._batch(topic, partition, first, start, _select(rows, columns))
            return
        reader = self._reader(topic)
        for _ in range(_PLAN_ATTEMPTS):
            snapshot, pieces = reader.plan(self._ledger, topic, partition, start, end)
            try:
                for piece in pieces[:1]:
                    for rows in read_slice(self._store, piece, columns=_with_offset(columns)):
                        offsets = rows.column("offset")
                        first, start = start, offsets[-1].as_py() + 1
                        yield self._batch(topic, partition, first, start, _select(rows, columns))
                # Whatever the slice lacks up to its end is a gap.
                stop = pieces[0].end if pieces else max(end, start)
                if start < stop:
                    empty = _empty(columns)
                    yield self._batch(topic, partition, start, stop, empty)
                return
            except ObjectMissing as missing:
                gone = missing.path
                reader.refresh()
        raise errors.MissingObject(path=gone, reason="the table names it still")

    def _batch(
        self, topic: Topic, partition: Partition, first: int, end: int, rows: pa.RecordBatch
    ) -> Batch:
        return Batch(
            topic=topic.name,
            partition=partition.number,
            first=first,
            end=end,
            high_watermark=partition.end,
            rows=rows,
        )

    def _reader(self, topic: Topic) -> _TableReader:
        found = self._readers.get(topic.topic_id)
        if found is None:
            table = Table(self._store, topic.name, clock=self._clock)
            found = self._readers.setdefault(topic.topic_id, _TableReader(table))
        return found

    def _check_range(self, topic: Topic, partition: Partition, start: int, end: int) -> None:
        for offset in (start, end):
            if not partition.start <= offset <= partition.end:
                raise errors.OffsetOutOfRange(
                    topic=topic.name,
                    partition=partition.number,
                    offset=offset,
                    start=partition.start,
                    end=partition.end,
                )

    def tail(
        self,
        positions: Sequence[wire.TailPosition],
        *,
        columns: Sequence[str] | None = None,
        idle_seconds: float = 0.5,
    ) -> Iterator[Batch | None]:
        """Records of all `positions` as they come, for ever; None whenever nothing came for a while.

        Ends when the broker stops. Raises what `read` raises.
        """
        places = [
            (topic, topic.partition(each.partition), each.offset)
            for each in positions
            for topic in (self._topic(each.topic, each.topic_id),)
        ]
        offsets = [offset for _, _, offset in places]
        for topic, partition, offset in places:
            self._check_range(topic, partition, offset, partition.end)
        while not self._closing.is_set():
            moved = False
            for index, (topic, partition, _) in enumerate(places):
                if self._ledger.by_id(topic.topic_id) is not topic:
                    raise errors.UnknownTopic(topic=topic.name)
                end = partition.end
                if offsets[index] < end:
                    self._check_range(topic, partition, offsets[index], end)
                    for batch in self._read_some(topic, partition, offsets[index], end, columns):
                        offsets[index] = batch.end
                        moved = True
                        yield batch
            if not moved and not self._wait_for_more(places, offsets, idle_seconds):
                yield None

    def _wait_for_more(
        self,
        places: Sequence[tuple[Topic, Partition, int]],
        offsets: Sequence[int],
        timeout_seconds: float,
    ) -> bool:
        def grown() -> bool:
            return self._closing.is_set() or any(
                partition.end > offset or self._ledger.by_id(topic.topic_id) is not topic
                for (topic, partition, _), offset in zip(places, offsets, strict=True)
            )

        with self._ledger.grown:
            return self._ledger.grown.wait_for(grown, timeout_seconds)

    def offsets_for_times(self, request: wire.OffsetsForTimes) -> wire.Offsets:
        """Per partition, the first offset whose timestamp is at or after the one asked for.

        -1 where no record is that late. As Kafka's `ListOffsets`, the earliest such *offset* counts.
        """
        topic = self._ledger.topic(request.topic)
        return wire.Offsets(
            offsets={
                number: self._offset_for_time(topic, topic.partition(number), timestamp_us)
                for number, timestamp_us in request.timestamps_us.items()
            }
        )

    def _offset_for_time(self, topic: Topic, partition: Partition, timestamp_us: int) -> int:
        reader = self._reader(topic)
        reader.refresh()
        _, pieces = reader.plan(self._ledger, topic, partition, partition.start, partition.end)
        for piece in pieces:
            if plan.latest_timestamp_us(piece) < timestamp_us:
                continue
            wanted = ("offset", "timestamp")
            for batch in self.read(
                topic.name, partition.number, piece.first, piece.end, columns=wanted
            ):
                stamps = batch.rows.column("timestamp").view(pa.int64()).to_numpy()
                late = np.flatnonzero(stamps >= timestamp_us)
                if len(late):
                    return int(batch.rows.column("offset")[int(late[0])].as_py())
        return -1

    # -------------------------------------------------------------------------- topics

    def cluster(self) -> wire.ClusterInfo:
        metadata = self._meta.current
        return wire.ClusterInfo(
            cluster_id=self._lease.cluster.cluster_id,
            root=self._store.uri,
            version=sparklog.__version__,
            brokers=[
                wire.BrokerInfo(broker=self._lease.broker, epoch=known.epoch, address=known.flight)
                for known in [metadata.brokers.get(self._lease.broker, Broker(epoch=0))]
            ],
        )

    def topics(self) -> wire.TopicNames:
        return wire.TopicNames(topics=sorted(topic.name for topic in self._ledger.topics()))

    def describe(self, name: str) -> wire.TopicInfo:
        """Raises `UnknownTopic`."""
        topic = self._ledger.topic(name)
        snapshot = self._publisher.table(topic).snapshot
        files = [file for files in snapshot.files for file in files]
        return wire.TopicInfo(
            topic=topic.name,
            topic_id=topic.topic_id,
            config=dict(topic.config),
            partitions=[
                wire.PartitionInfo(
                    partition=each.number,
                    leader=self._lease.broker,
                    leader_epoch=each.leader_epoch,
                    start=each.start,
                    end=each.end,
                    published=each.published,
                )
                for each in topic.partitions
            ],
            table_uri=f"{self._store.uri}/{table_folder(topic.name)}",
            table_version=snapshot.version,
            table_files=len(files),
            table_bytes=sum(file.size_bytes for file in files),
        )

    def create_topic(self, request: wire.CreateTopic) -> wire.TopicInfo:
        """Raises `BadTopicName`, `TopicExists`, `BadPartitionCount`, `UnknownOption`, `BadOption`."""
        name = check_topic_name(request.topic)
        count = self._defaults.partitions if request.partitions == -1 else request.partitions
        _check_count(name, count)
        config = topicconfig.check(request.config)
        with self._admin:
            if any(topic.name == name for topic in self._ledger.topics()):
                if request.if_absent:
                    return self.describe(name)
                raise errors.TopicExists(topic=name)
            topic_id = secrets.token_hex(8)
            snapshot = self._make_table(name, topic_id, count, config)
            known = TopicMeta(
                topic_id=topic_id,
                partitions=tuple(
                    PartitionMeta(leader=self._lease.broker, leader_epoch=0) for _ in range(count)
                ),
                config=dict(config),
            )
            self._change_topics(lambda topics: {**topics, name: known})
            topic = Topic(name, topic_id, dict(config))
            self._ledger.add_partitions(topic, snapshot, [0] * count)
            self._ledger.add_topic(topic)
            self._publisher.table(topic).refresh()
        return self.describe(name)

    def _make_table(
        self, name: str, topic_id: str, count: int, config: Mapping[str, str]
    ) -> TableSnapshot:
        """The table first, the metadata after: a topic that the metadata names has its table.

        The lease is judged after the snapshot was taken: a broker that has been replaced must not
        clear away a topic that its successor has made in the meantime.
        """

        def clear(before: TableSnapshot) -> Change | None:
            self._check_lease(self._meta.reload())
            # A topic that the metadata does not name: its creation or deletion was cut short.
            return delete_change(before) if before.topic_id is not None else None

        def create(before: TableSnapshot) -> Change:
            self._check_lease(self._meta.reload())
            if before.topic_id is not None:
                raise errors.TopicExists(topic=name)
            return create_change(topic_id, count, config)

        table = Table(self._store, name, clock=self._clock)
        table.commit(clear)
        return table.commit(create)

    def add_partitions(self, request: wire.AddPartitions) -> wire.TopicInfo:
        """Raises `UnknownTopic`, `BadPartitionCount`. Existing records stay where they are."""
        _check_count(request.topic, request.partitions)
        with self._admin:
            topic = self._ledger.topic(request.topic)
            if request.partitions <= len(topic.partitions):
                raise errors.BadPartitionCount(
                    topic=topic.name,
                    requested=request.partitions,
                    reason=f"it has {len(topic.partitions)} already, and they never become fewer",
                )
            table = Table(self._store, topic.name, clock=self._clock)
            snapshot = table.commit(
                lambda before: describe_change(
                    self._ours(before, topic), request.partitions, topic.config
                )
            )
            epochs = [each.leader_epoch for each in topic.partitions]
            epochs += [0] * (request.partitions - len(epochs))
            known = TopicMeta(
                topic_id=topic.topic_id,
                partitions=tuple(
                    PartitionMeta(leader=self._lease.broker, leader_epoch=each) for each in epochs
                ),
                config=topic.config,
            )
            self._change_topics(lambda topics: {**topics, topic.name: known})
            self._ledger.add_partitions(topic, snapshot, epochs)
        return self.describe(topic.name)

    def alter(self, request: wire.AlterTopic) -> wire.TopicInfo:
        """Raises `UnknownTopic`, `UnknownOption`, `BadOption`."""
        with self._admin:
            topic = self._ledger.topic(request.topic)
            config = dict(topic.config)
            for key, value in request.config.items():
                if value is None:
                    topicconfig.check({key: topicconfig.default(key)})
                    config.pop(key, None)
                else:
                    config[key] = value
            config = topicconfig.check(config)
            table = Table(self._store, topic.name, clock=self._clock)
            table.commit(
                lambda before: describe_change(
                    self._ours(before, topic), len(topic.partitions), config
                )
            )

            def replace(topics: dict[str, TopicMeta]) -> dict[str, TopicMeta]:
                known = msgspec.structs.replace(topics[topic.name], config=config)
                return {**topics, topic.name: known}

            self._change_topics(replace)
            topic.config = config
        return self.describe(topic.name)

    def compact(self, name: str) -> wire.TopicInfo:
        """Merges the small files of the topic's table now; returns when that is done."""
        topic = self._ledger.topic(name)
        table = Table(self._store, name, clock=self._clock)
        for group in compaction.choose(self._ours(table.refresh(), topic), everything=True):
            compaction.compact(table, group)
        self._publisher.table(topic).refresh()
        return self.describe(name)

    def delete_topic(self, name: str) -> None:
        """Raises `UnknownTopic`. Its files go once the grace of replaced files has passed."""
        with self._admin:
            topic = self._ledger.topic(name)
            self._change_topics(
                lambda topics: {key: each for key, each in topics.items() if key != name}
            )
            self._ledger.remove_topic(topic)
            self._publisher.forget(topic)
            self._readers.pop(topic.topic_id, None)
            table = Table(self._store, name, clock=self._clock)
            table.commit(
                lambda before: delete_change(before) if before.topic_id == topic.topic_id else None
            )

    def _ours(self, before: TableSnapshot, topic: Topic) -> TableSnapshot:
        """`before`, if it is still this topic's. Raises `UnknownTopic`."""
        if before.topic_id != topic.topic_id:
            raise errors.UnknownTopic(topic=topic.name)
        return before

    def _change_topics(
        self, change: Callable[[dict[str, TopicMeta]], dict[str, TopicMeta]]
    ) -> None:
        def decide(metadata: Metadata) -> Metadata:
            self._check_lease(metadata)
            return msgspec.structs.replace(metadata, topics=change(metadata.topics))

        self._meta.change(decide)

    def _check_lease(self, metadata: Metadata) -> None:
        """Raises `BrokerFenced` where `metadata` names a newer epoch than ours."""
        known = metadata.brokers.get(self._lease.broker)
        if (
            metadata.controller != self._lease.broker
            or known is None
            or known.epoch != self._lease.epoch
        ):
            error = errors.BrokerFenced(broker=self._lease.broker, epoch=self._lease.epoch)
            self._writer.fail(error)
            raise error

    # -------------------------------------------------------------------------- publishing

    def publish_all(self, request: wire.PublishNow) -> None:
        """Returns when everything that was acked before is in the tables. Raises `TimedOut`."""
        wanted = self._ledger.topics()
        if request.topics is not None:
            wanted = [self._ledger.topic(name) for name in request.topics]
        goals = [(topic, [each.end for each in topic.partitions]) for topic in wanted]
        deadline = self._clock.monotonic() + request.timeout_seconds
        while not self._closing.is_set():
            if all(self._reached(topic, ends) for topic, ends in goals):
                return
            if self._clock.monotonic() > deadline:
                raise errors.TimedOut(what="publishing", timeout_seconds=request.timeout_seconds)
            self.publish_now()
            self._clock.sleep(0.005)
        raise errors.BrokerClosing(broker=self._lease.broker)

    def _reached(self, topic: Topic, ends: Sequence[int]) -> bool:
        if self._ledger.by_id(topic.topic_id) is not topic:
            return True
        return all(each.published >= end for each, end in zip(topic.partitions, ends, strict=False))

    # -------------------------------------------------------------------------- ending

    @property
    def failure(self) -> BaseException | None:
        """What ended the writer, if it has ended."""
        return self._writer.failure

    def close(self) -> None:
        """Wakes everybody who waits; nothing is accepted any more."""
        self._closing.set()
        self._writer.fail(errors.BrokerClosing(broker=self._lease.broker))
        with self._ledger.grown:
            self._ledger.grown.notify_all()

    def _topic(self, name: str, topic_id: str | None) -> Topic:
        topic = self._ledger.topic(name)
        if topic_id is not None and topic.topic_id != topic_id:
            raise errors.TopicChanged(topic=name, expected=topic_id, found=topic.topic_id)
        return topic


_PLAN_ATTEMPTS = 5


class _TableReader:
    """A topic's table as readers of this broker see it; refreshed when it falls behind."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()

    def refresh(self) -> TableSnapshot:
        with self._lock:
            return self._table.refresh()

    def plan(
        self, ledger: Ledger, topic: Topic, partition: Partition, start: int, end: int
    ) -> tuple[TableSnapshot, list[plan.Slice]]:
        """Slices of the range. The tail is taken first: what leaves it is in the table then."""
        with ledger.lock:
            tail = tuple(partition.unpublished)
            published = partition.published
        snapshot = self._table.snapshot
        if snapshot.topic_id is None or snapshot.ends[partition.number] < published:
            snapshot = self.refresh()
        if snapshot.topic_id != topic.topic_id:
            raise errors.UnknownTopic(topic=topic.name)
        tail = plan.join_tail(snapshot.ends[partition.number], tail)
        return snapshot, plan.plan(
            topic=topic.name,
            snapshot=snapshot,
            tail=tail,
            partition=partition.number,
            start=start,
            end=end,
        )


def _check_count(topic: str, count: int) -> None:
    if not 1 <= count <= limits.PARTITIONS_PER_TOPIC:
        raise errors.BadPartitionCount(
            topic=topic,
            requested=count,
            reason=f"a topic has 1 to {limits.PARTITIONS_PER_TOPIC}",
        )


def _with_offset(columns: Sequence[str] | None) -> Sequence[str] | None:
    return columns if columns is None or "offset" in columns else [*columns, "offset"]


def _select(rows: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    return rows if columns is None else rows.select(list(columns))


def _empty(columns: Sequence[str] | None) -> pa.RecordBatch:
    from sparklog.record import ROW_SCHEMA

    return _select(ROW_SCHEMA.empty_table().to_batches()[0], columns)
