"""A broker without threads or doors, on any store: every step happens when a test asks for it.

`Rig` is one broker in one epoch, built as the agent builds it. `rig.successor()` takes the root
over, after which the first is a zombie that may still be used: it is fenced, and must not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparklog import wire
from sparklog.broker import lease as leases
from sparklog.broker.confirming import Confirmer
from sparklog.broker.core import Core, TopicDefaults
from sparklog.broker.hot import HotTail
from sparklog.broker.janitor import Janitor
from sparklog.broker.partitions import Topic
from sparklog.broker.producers import Stamp
from sparklog.broker.publisher import Publisher
from sparklog.broker.reading import Batch
from sparklog.broker.walkeeper import KeeperLimits, WalKeeper
from sparklog.broker.writer import Append, Appended, Ticket, Writer, WriterLimits
from sparklog.clock import Clock, ManualClock
from sparklog.record import PAYLOAD_SCHEMA
from sparklog.settings import JanitorSettings
from sparklog.storage import plan, wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.meta import MetaStore
from sparklog.storage.objects import Store
from sparklog.storage.read import read_slice
from sparklog.storage.snapshot import BatchId, Slice, StagedRef, TableSnapshot
from sparklog.storage.table import Table

START_US = 1_700_000_000_123_456
GRACE_SECONDS = 10.0

_WRITER = WriterLimits()
_KEEPER = KeeperLimits(trim_grace_seconds=GRACE_SECONDS)
_JANITOR = JanitorSettings()
_TOPICS = TopicDefaults()

Row = tuple[int, bytes | None]
"""Offset and value."""


def payload(values: Sequence[bytes | str | None], **columns: Sequence[Any]) -> pa.RecordBatch:
    """Rows of those values, with further columns of `PAYLOAD_SCHEMA` by name."""
    given: Mapping[str, Sequence[Any]] = {
        "value": [v.encode() if isinstance(v, str) else v for v in values],
        **columns,
    }
    schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in given])
    arrays = [pa.array(given[field.name], field.type) for field in schema]
    return pa.record_batch(arrays, schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class RigOptions:
    """How a rig differs from the usual."""

    writer: WriterLimits = _WRITER
    keeper: KeeperLimits = _KEEPER
    janitor: JanitorSettings = _JANITOR
    topics: TopicDefaults = _TOPICS
    hot_bytes: int = 1 << 20
    commit_bytes: int = 1 << 20
    file_bytes: int = 1 << 20
    pool: Executor | None = None
    submit_timeout_seconds: float = 0.0


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
        self.meta = MetaStore(store, clock=clock)
        self.lease = leases.acquire(
            store,
            self.meta,
            broker=broker,
            flight=f"127.0.0.1:{broker}",
            clock=clock,
            dead_after_seconds=5.0,
            check_alive=check_alive,
        )
        tables: dict[str, Table] = {}
        self.ledger = leases.recover(store, self.meta.current, self.lease, tables, clock=clock)
        self.hot = HotTail(limit_bytes=options.hot_bytes)
        self.appender = wal.Appender(
            store, broker=broker, epoch=self.lease.epoch, clock=clock, stopping=lambda: False
        )
        self.writer = Writer(
            store, self.appender, self.ledger, self.hot, clock=clock, bounds=options.writer
        )
        self.publisher = Publisher(
            store,
            self.ledger,
            self.hot,
            clock=clock,
            tables=tables.values(),
            commit_bytes=options.commit_bytes,
            file_bytes=options.file_bytes,
            pool=options.pool,
        )
        self.confirmer = Confirmer(store, self.ledger, self.publisher)
        self.keeper = WalKeeper(
            store,
            MetaStore(store, clock=clock),
            self.lease,
            self.appender,
            self.ledger,
            self.writer,
            confirm=self.confirmer.confirm,
            clock=clock,
            bounds=options.keeper,
        )
        self.core = Core(
            store,
            self.meta,
            self.lease,
            self.ledger,
            self.writer,
            self.publisher,
            self.hot,
            clock=clock,
            defaults=options.topics,
            submit_timeout_seconds=options.submit_timeout_seconds,
        )
        self.janitor = Janitor(
            store,
            self.ledger,
            options.janitor,
            clock=clock,
            bury=self.core.bury,
        )
        self.core.publish_now = self.publish
        self.writer.open()

    def successor(
        self, *, broker: int | None = None, store: Store | None = None, **options: Any
    ) -> Rig:
        """The next broker of the root, of the same id unless another is named."""
        return Rig(
            store if store is not None else self.store,
            self.clock,
            broker=self.lease.broker if broker is None else broker,
            options=RigOptions(**options) if options else self.options,
        )

    # -------------------------------------------------------------------------- writing

    def create(self, name: str = "t", partitions: int = 1, **config: str) -> Topic:
        """A topic; underscores in keys of `config` stand for dots."""
        named = {key.replace("_", "."): value for key, value in config.items()}
        self.core.create_topic(wire.CreateTopic(topic=name, partitions=partitions, config=named))
        return self.ledger.topic(name)

    def submit(
        self,
        values: Sequence[bytes | str | None],
        *,
        topic: str = "t",
        partition: int = 0,
        stamp: tuple[int, int, int] | None = None,
        **columns: Sequence[Any],
    ) -> Ticket:
        """Queues one batch. `stamp`: producer id, epoch, base sequence."""
        named = Stamp(*stamp) if stamp else None
        return self.core.append(topic, partition, payload(values, **columns), named)

    def append(self, values: Sequence[bytes | str | None], **where: Any) -> Appended:
        """One batch, acked; `where` is `submit`'s."""
        return self.core.wait(self.submit(values, **where))[0]

    def stage(
        self,
        sections: Sequence[tuple[int, Sequence[bytes | str | None]]],
        *,
        batch: int,
        query: str = "q",
        topic: str = "t",
    ) -> list[Append]:
        """One staged append for each (partition, values), all of one batch of a query."""
        known = self.ledger.topic(topic)
        appends = []
        for number, (partition, values) in enumerate(sections):
            data = wal.encode_payload(payload(values))
            path = f"staging/{query}/{batch}/{number}-{self.lease.epoch}.arrow"
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

    def adopt(
        self, sections: Sequence[tuple[int, Sequence[bytes | str | None]]], **batch: Any
    ) -> list[Appended]:
        """One batch of a query, acked; `batch` is `stage`'s."""
        return self.writer.wait(self.writer.submit(self.stage(sections, **batch)))

    def publish(self) -> None:
        """Everything that waits, in as many commits as it takes."""
        for topic in self.ledger.topics():
            while any(each.unpublished for each in topic.partitions):
                self.publisher.publish(topic)

    def trim(self) -> None:
        """A checkpoint, its grace, and what goes after that."""
        self.keeper.checkpoint()
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(GRACE_SECONDS)
        self.keeper.tick()

    # -------------------------------------------------------------------------- looking

    def read(self, topic: str = "t", partition: int = 0, start: int = 0) -> list[Row]:
        """The partition from `start` on, as this broker serves it."""
        end = self.ledger.topic(topic).partition(partition).end
        return rows_of(self.core.read(topic, partition, start, end))

    def end(self, topic: str = "t", partition: int = 0) -> int:
        return self.ledger.topic(topic).partition(partition).end


def rows_of(batches: Iterable[Batch | None]) -> list[Row]:
    """Offsets and values; asserts that the batches follow one another."""
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
    """What stands in the topic's table, and nowhere else, as far as its `txn`."""
    snapshot = Table(store, topic, clock=clock).refresh()
    return _rows(store, plan_of_table(topic, snapshot, partition))


def plan_of_table(topic: str, snapshot: TableSnapshot, partition: int) -> list[Slice]:
    """Slices of all that is in the table."""
    return plan.plan(
        topic=topic,
        snapshot=snapshot,
        tail=(),
        partition=partition,
        start=snapshot.starts[partition],
        end=snapshot.ends[partition],
    )


def rows_of_root(store: Store, clock: Clock, topic: str = "t", partition: int = 0) -> list[Row]:
    """What a reader without a broker sees: table and write-ahead logs."""
    return rows_followed(RootFollower(store, clock=clock), store, topic, partition)


def rows_followed(
    follower: RootFollower, store: Store, topic: str = "t", partition: int = 0
) -> list[Row]:
    """The same by somebody who may have been looking for long."""
    snapshot = follower.refresh([topic])[topic]
    end = follower.ends(snapshot)[partition]
    slices = follower.plan(topic, snapshot, partition, snapshot.starts[partition], end)
    return _rows(store, slices)


def _rows(store: Store, slices: Iterable[Slice]) -> list[Row]:
    found: list[Row] = []
    for piece in slices:
        for batch in read_slice(store, piece, columns=["offset", "value"]):
            columns = batch.to_pydict()
            found += zip(columns["offset"], columns["value"], strict=True)
    return found


def paths(store: Store, folder: str) -> list[str]:
    """Every object below the folder, sorted, by its path from there."""
    return sorted(stat.name for stat in store.walk(folder))


def flip(store: Store, path: str, position: int) -> None:
    """Changes one byte of an object; negative positions count from its end."""
    data = bytearray(store.get(path))
    data[position] ^= 0xFF
    store.put(path, bytes(data))
