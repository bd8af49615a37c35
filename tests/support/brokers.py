"""A broker without threads or listeners, on any store: each step happens when a test asks for it.

`Rig` is one broker in one epoch, built as the agent builds it. `rig.successor()` takes over
the root; the first rig remains usable as a zombie that is fenced without having noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from sparklog import limits
from sparklog.broker.broker import Broker, TopicDefaults
from sparklog.broker.failover.controller import Controller
from sparklog.broker.failover.handover import Handovers
from sparklog.broker.failover.reconciler import Reconciler
from sparklog.broker.log import recovery, takeover
from sparklog.broker.log.appends import Append, AppendResult, PendingAppend
from sparklog.broker.log.backlog import Backlog
from sparklog.broker.log.confirmer import Confirmer
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.janitor import Janitor
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.producer_state import ProducerSequence
from sparklog.broker.log.publish_loop import PublishLoop, PublishPace
from sparklog.broker.log.publish_queue import PublishBounds
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.tailing import ReadBatch
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.upkeep_duties import UnfinishedChanges
from sparklog.broker.log.wal_cleaner import WalCleaner, WalCleanerLimits
from sparklog.broker.log.writer import Writer
from sparklog.clock import Clock, ManualClock
from sparklog.formats import flight_messages
from sparklog.formats.record import PAYLOAD_SCHEMA
from sparklog.settings import JanitorSettings
from sparklog.storage import wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.liveness import Heartbeat, Readiness, readiness, write_heartbeat
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata, Membership
from sparklog.storage.metadata.processes import Process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.reading import plan
from sparklog.storage.reading.read import read_slice
from sparklog.storage.snapshot import BatchId, Slice, StagedRef, TableSnapshot, WalKind
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.objects import ObjectAppender

START_US = 1_700_000_000_123_456
GRACE_SECONDS = 10.0

_WRITER = WriterLimits()
_KEEPER = WalCleanerLimits(trim_grace_seconds=GRACE_SECONDS)
_JANITOR = JanitorSettings()
_TOPICS = TopicDefaults()

Row = tuple[int, bytes | None]
"""Offset and value."""


def payload(values: Sequence[bytes | str | None], **columns: Sequence[Any]) -> pa.RecordBatch:
    """Returns rows of those values, with further columns of `PAYLOAD_SCHEMA` by name."""
    given: Mapping[str, Sequence[Any]] = {
        "value": [v.encode() if isinstance(v, str) else v for v in values],
        **columns,
    }
    schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in given])
    arrays = [pa.array(given[field.name], field.type) for field in schema]
    return pa.record_batch(arrays, schema=schema)


def registration(
    broker: int,
    *,
    flight: str | None = None,
    process: Process | None = None,
    is_member: bool = False,
) -> BrokerRegistration:
    """Returns the registration of a broker that counts as dead after five silent seconds."""
    return BrokerRegistration(
        epoch=0,
        flight=flight or f"h:{broker}",
        membership=Membership() if is_member else msgspec.UNSET,
        process=process or Process(),
        dead_after_seconds=5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RigOptions:
    """Settings of a rig."""

    writer: WriterLimits = _WRITER
    wal_cleaner: WalCleanerLimits = _KEEPER
    janitor: JanitorSettings = _JANITOR
    topics: TopicDefaults = _TOPICS
    hot_bytes: int = 1 << 20
    commit_bytes: int = 1 << 20
    file_bytes: int = 1 << 20
    pool: Executor | None = None
    submit_timeout_seconds: float = 0.0
    confirm_after_seconds: float = 0.0
    log: WalKind = WalKind.OBJECTS
    is_member: bool = False
    quiet_seconds: float = 0.0
    budget: PutBudget | None = None


class Rig:
    """One broker in one epoch."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        broker: int = 1,
        options: RigOptions | None = None,
        check_alive: bool = False,
    ) -> None:
        self.store = store
        self.clock = clock
        self.options = options = options or RigOptions()
        self.meta = MetadataStore(store, clock=clock)
        self.leadership = takeover.acquire(
            store,
            self.meta,
            broker,
            registration(broker, flight=f"127.0.0.1:{broker}", is_member=options.is_member),
            clock=clock,
            check_alive=check_alive,
            choose_log=lambda: options.log,
        )
        removed_files = RemovedFileRetention(options.janitor.removed_file_kept_seconds)
        open_table = functools.partial(
            TopicTable,
            store,
            clock=clock,
            removed_file_grace_seconds=options.janitor.removed_file_grace_seconds,
            retention=removed_files,
        )
        taken = takeover.take(store, self.meta, self.leadership, clock=clock)
        self.leadership = taken.leadership
        self.led_partitions = recovery.recover(store, taken, clock=clock, open_table=open_table)
        self.hot = HotTail(limit_bytes=options.hot_bytes)
        self.appender = wal.of(store, clock, self.leadership.log).appender(
            broker, self.leadership.epoch
        )
        self.writer = Writer(
            store,
            self.appender,
            self.led_partitions,
            self.hot,
            clock=clock,
            bounds=options.writer,
            budget=options.budget,
        )
        self.publisher = Publisher(
            store,
            self.led_partitions,
            self.hot,
            clock=clock,
            commit_bytes=options.commit_bytes,
            file_bytes=options.file_bytes,
            pool=options.pool,
        )
        self.confirmer = Confirmer(
            store,
            self.led_partitions,
            self.publisher,
            clock=clock,
            after_seconds=options.confirm_after_seconds,
            store_now_us=clock.now_us if self.leadership.inherited else None,
        )
        self.wal_cleaner = WalCleaner(
            store,
            MetadataStore(store, clock=clock),
            self.leadership,
            self.appender,
            self.led_partitions,
            self.writer,
            confirm=self.confirmer.confirm,
            clock=clock,
            bounds=options.wal_cleaner,
        )
        log = LogParts(
            led_partitions=self.led_partitions,
            hot=self.hot,
            writer=self.writer,
            publisher=self.publisher,
        )
        self.broker = Broker(
            store,
            self.meta,
            self.leadership,
            log,
            clock=clock,
            open_table=open_table,
            defaults=options.topics,
            submit_timeout_seconds=options.submit_timeout_seconds,
        )
        self.janitor = Janitor(
            store,
            self.led_partitions,
            options.janitor,
            clock=clock,
            open_table=open_table,
            unfinished=UnfinishedChanges(
                finish_deletion=self.broker.topics.finish_deletion,
                settle_doubts=self.broker.topics.settle_doubts,
                settle_config=self.broker.topics.config_changes.settle,
            ),
            quiet_seconds=options.quiet_seconds,
            removed_files=removed_files,
        )
        self.broker.publishing.publish_now = self.publish
        self.histories = Histories(store, clock=clock)
        self.reconciler = Reconciler(
            store,
            self.broker.metadata,
            self.leadership,
            log,
            inherit=self.wal_cleaner.inherit,
            open_table=open_table,
            clock=clock,
            seen=taken.metadata,
            on_change=lambda: None,
            readiness=functools.partial(readiness, store),
            histories=self.histories,
        )
        self.broker.metadata.lead = self.reconciler.lead
        self.broker.metadata.apply = self.reconciler.apply
        self.handovers = Handovers(
            self.broker.metadata,
            self.leadership,
            self.led_partitions,
            self.writer,
            self.wal_cleaner,
            clock=clock,
            readiness=all_serve,
        )
        self.controller = Controller(
            store,
            self.broker.metadata,
            self.leadership,
            clock=clock,
            dead_after_seconds=5.0,
            is_sound=lambda: True,
            histories=self.histories,
            readiness=all_serve,
        )
        self.writer.open()
        takeover.check_opened(self.meta, self.leadership)

    def successor(
        self, *, broker: int | None = None, store: Store | None = None, **options: Any
    ) -> Rig:
        """Starts the root's next broker, with the same id unless another is given."""
        return Rig(
            store if store is not None else self.store,
            self.clock,
            broker=self.leadership.broker if broker is None else broker,
            options=RigOptions(**options) if options else self.options,
        )

    def append_to(self, store: Store) -> Store:
        """Makes the object appender use another view of the store; returns the previous one."""
        assert isinstance(self.appender, ObjectAppender)
        before, self.appender._store = self.appender._store, store
        return before

    def publish_to(self, store: Store) -> None:
        """Makes the publisher put its files and commits through another view of the store."""
        self.publisher._store = self.publisher._runs._store = store

    def administer_on(self, store: Store) -> None:
        """Makes topic administration open tables in another view of the store."""
        topics = self.broker.topics
        topics._store = store
        topics._open_table = functools.partial(TopicTable, store, clock=self.clock)

    def maintain_on(self, store: Store) -> None:
        """Makes the janitor, and with it the views of all tables, use another view of the store."""
        self.janitor._store = self.janitor._staging._store = store
        for topic in self.led_partitions.topics():
            topic.table.store = topic.table.log_reader.store = store

    # -------------------------------------------------------------------------- writing

    def create(self, name: str = "t", partitions: int = 1, **config: str) -> Topic:
        """Creates a topic; underscores in keys of `config` stand for dots."""
        named = {key.replace("_", "."): value for key, value in config.items()}
        self.broker.topics.create(
            flight_messages.CreateTopic(topic=name, partitions=partitions, config=named)
        )
        return self.led_partitions.topic(name)

    def submit(
        self,
        values: Sequence[bytes | str | None],
        *,
        topic: str = "t",
        partition: int = 0,
        producer_sequence: tuple[int, int, int] | None = None,
        **columns: Sequence[Any],
    ) -> PendingAppend:
        """Queues one batch. `producer_sequence`: producer id, epoch, base sequence."""
        named = ProducerSequence(*producer_sequence) if producer_sequence else None
        return self.broker.append(topic, partition, payload(values, **columns), named)

    def append(self, values: Sequence[bytes | str | None], **where: Any) -> AppendResult:
        """Appends one batch and waits for its ack; `where` is passed to `submit`."""
        return self.broker.wait(self.submit(values, **where))[0]

    def stage(
        self,
        sections: Sequence[tuple[int, Sequence[bytes | str | None]]],
        *,
        batch: int,
        query: str = "q",
        topic: str = "t",
    ) -> list[Append]:
        """Returns a staged append for each (partition, values), all of one batch of a query."""
        known = self.led_partitions.topic(topic)
        appends = []
        for number, (partition, values) in enumerate(sections):
            data = wal.encode_payload(payload(values))
            path = f"staging/{query}/{batch}/{number}-{self.leadership.epoch}.arrow"
            self.store.put(path, data.pieces)
            now_us = self.clock.now_us()
            appends.append(
                Append(
                    topic=topic,
                    topic_id=known.topic_id,
                    partition=partition,
                    count=len(values),
                    arrival_us=now_us,
                    min_timestamp_us=now_us,
                    max_timestamp_us=now_us,
                    timestamp_type=known.timestamp_type,
                    staged=StagedRef(path, 0, data.length, data.crc32c),
                    batch_id=BatchId(query, batch),
                )
            )
        return appends

    def append_staged(
        self, sections: Sequence[tuple[int, Sequence[bytes | str | None]]], **batch: Any
    ) -> list[AppendResult]:
        """Appends one batch of a query and waits for its acks; `batch` is passed to `stage`."""
        return self.writer.wait(self.writer.submit(self.stage(sections, **batch)))

    def publish(self) -> None:
        """Publishes everything pending, in as many commits as it takes."""
        for topic in self.led_partitions.topics():
            while any(each.unpublished for each in topic.partitions.values()):
                self.publisher.publish(topic)

    def trim(self) -> None:
        """Writes a checkpoint, lets its grace period pass, and trims the log."""
        self.wal_cleaner.checkpoint()
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(GRACE_SECONDS)
        self.wal_cleaner.tick()

    # -------------------------------------------------------------------------- reading

    def read(self, topic: str = "t", partition: int = 0, start: int = 0) -> list[Row]:
        """Returns the partition's rows from `start` on, as this broker serves them."""
        end = self.led_partitions.topic(topic).partition(partition).end
        return rows_of(self.broker.read(topic, partition, start, end))

    def end(self, topic: str = "t", partition: int = 0) -> int:
        return self.led_partitions.topic(topic).partition(partition).end


def beat(rig: Rig, **changed: Any) -> None:
    """Writes a heartbeat for that member."""
    heartbeat = Heartbeat(
        broker=rig.leadership.broker,
        epoch=rig.leadership.epoch,
        flight="127.0.0.1:1",
        at_us=rig.clock.now_us(),
    )
    write_heartbeat(rig.store, msgspec.structs.replace(heartbeat, **changed))


def all_serve(_metadata: ClusterMetadata, brokers: Iterable[int]) -> dict[int, Readiness]:
    """Reports all brokers as serving: members here write no heartbeats that would."""
    return dict.fromkeys(brokers, Readiness.SERVES)


def follow(members: Iterable[Rig]) -> None:
    """Makes members of a cluster apply the newest metadata."""
    for each in members:
        each.reconciler.tick()


def publishing(
    rig: Rig,
    wake: Callable[[], None] = lambda: None,
    *,
    check: Callable[[], None] | None = None,
    pace: PublishPace | None = None,
    unpublished_bytes: int = limits.UNPUBLISHED_BYTES,
    workers: Executor | None = None,
) -> PublishLoop:
    """A publish loop as the agent builds it, by default with an interval of one second."""

    def check_leadership() -> None:
        takeover.check_leadership(rig.meta.reload(), rig.leadership)

    return PublishLoop(
        rig.publisher,
        rig.led_partitions,
        pace=pace or PublishPace(1.0, rig.clock),
        unpublished_bytes=unpublished_bytes,
        check_leadership=check
        or (lambda: takeover.check_leadership(rig.meta.reload(), rig.leadership)),
        on_published=wake,
        clock=rig.clock,
        retry_seconds=1.0,
        workers=workers,
    )


def due(
    backlog: Backlog, interval_seconds: float, *, publish_bytes: int = limits.PUBLISH_BYTES
) -> list[Topic]:
    """Returns the topics to publish now, on a broker with that interval."""
    backlog.set_bounds(PublishBounds(usual_seconds=interval_seconds, publish_bytes=publish_bytes))
    found = backlog.due(interval_seconds=interval_seconds)
    return [*found.urgent, *(each.topic for each in (*found.prompt, *found.turns))]


def led_by(rig: Rig, topic: str = "t") -> int:
    """Returns the lowest partition that the member serves."""
    return min(rig.led_partitions.topic(topic).partitions)


def rows_of(batches: Iterable[ReadBatch | None]) -> list[Row]:
    """Returns offsets and values; asserts that the batches are contiguous."""
    found: list[Row] = []
    end: int | None = None
    for batch in batches:
        assert batch is not None
        assert end is None or batch.first == end
        end = batch.end
        offsets = batch.rows.column("offset").to_pylist()
        assert all(batch.first <= offset < batch.end for offset in offsets)
        found += zip(offsets, batch.rows.column("value").to_pylist(), strict=True)
    return found


def rows_of_table(store: Store, clock: Clock, topic: str = "t", partition: int = 0) -> list[Row]:
    """Returns the rows in the topic's table alone, up to its `txn`."""
    snapshot = TopicTable(store, topic, clock=clock).refresh()
    return rows_of_slices(store, plan_of_table(topic, snapshot, partition))


def plan_of_table(topic: str, snapshot: TableSnapshot, partition: int) -> list[Slice]:
    """Returns slices of all rows in the table."""
    return plan.plan(
        topic=topic,
        snapshot=snapshot,
        tail=(),
        partition=partition,
        start=snapshot.starts[partition],
        end=snapshot.ends[partition],
    )


def rows_of_root(store: Store, clock: Clock, topic: str = "t", partition: int = 0) -> list[Row]:
    """Returns the rows that a reader without a broker sees: table and write-ahead logs."""
    return rows_followed(RootFollower(store, clock=clock), store, topic, partition)


def rows_followed(
    follower: RootFollower, store: Store, topic: str = "t", partition: int = 0
) -> list[Row]:
    """Returns the rows as seen by a reader that may have started long ago."""
    snapshot = follower.refresh([topic])[topic]
    end = follower.ends(snapshot)[partition]
    slices = follower.plan(topic, snapshot, partition, snapshot.starts[partition], end)
    return rows_of_slices(store, slices)


def rows_of_slices(store: Store, slices: Iterable[Slice]) -> list[Row]:
    """Returns the rows of planned slices."""
    found: list[Row] = []
    for piece in slices:
        for batch in read_slice(store, piece, columns=["offset", "value"]):
            columns = batch.to_pydict()
            found += zip(columns["offset"], columns["value"], strict=True)
    return found


def open_ids(meta: MetadataStore) -> list[tuple[int, int]]:
    """Broker id and epoch of each open epoch, as of now."""
    return [each.id for each in meta.reload().open_epochs]


def paths(store: Store, folder: str) -> list[str]:
    """Paths of all objects below the folder, relative to it and sorted."""
    return sorted(stat.name for stat in store.walk(folder))


def flip(store: Store, path: str, position: int) -> None:
    """Changes one byte of an object; negative positions count from its end."""
    data = bytearray(store.get(path))
    data[position] ^= 0xFF
    store.put(path, bytes(data))
