"""A broker as `sparklog.broker.agent` puts it together, with tasks for threads and no door.

Its loops are the agent's: what they catch, what ends the broker, what is tried again. A door is a
task as well: `Broker.call` runs one request inside the broker, and the caller waits outside, where
an answer may be lost, or come after the caller has given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparklog import errors
from sparklog.broker import lease as leases
from sparklog.broker.core import Core, TopicDefaults
from sparklog.broker.hot import HotTail
from sparklog.broker.janitor import Janitor
from sparklog.broker.partitions import Ledger, Topic
from sparklog.broker.publisher import Publisher
from sparklog.broker.walkeeper import KeeperLimits, WalKeeper
from sparklog.broker.writer import Writer, WriterLimits
from sparklog.settings import JanitorSettings
from sparklog.storage import wal
from sparklog.storage.meta import Heartbeat, MetaStore, write_heartbeat
from sparklog.storage.objects import PutUnresolved, SyncFailed
from sparklog.storage.snapshot import Entry, Kind
from sparklog.storage.table import Table
from tests.simulation.faults import Disk, Faults
from tests.simulation.scheduler import Process, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a broker does what, in simulated seconds, and how much at once."""

    publish_tick_seconds: float
    publish_interval_seconds: float
    keep_tick_seconds: float
    janitor_tick_seconds: float
    heartbeat_seconds: float
    linger_seconds: float
    hot_bytes: int
    commit_bytes: int
    file_bytes: int
    keeper: KeeperLimits
    janitor: JanitorSettings

    @classmethod
    def draw(cls, chance: random.Random) -> Pace:
        return cls(
            publish_tick_seconds=0.05,
            publish_interval_seconds=chance.choice([0.02, 0.1, 0.5]),
            keep_tick_seconds=0.2,
            janitor_tick_seconds=chance.choice([0.2, 0.5]),
            heartbeat_seconds=0.5,
            linger_seconds=chance.choice([0.0, 0.0, 0.01]),
            hot_bytes=chance.choice([0, 4_000, 1_000_000]),
            commit_bytes=chance.choice([300, 1_000_000]),
            file_bytes=chance.choice([200, 1_000_000]),
            keeper=KeeperLimits(
                checkpoint_every_objects=chance.choice([1, 3, 8]),
                checkpoint_every_seconds=chance.choice([0.3, 1.0]),
                trim_grace_seconds=chance.choice([0.3, 1.0]),
                carry_after_seconds=chance.choice([0.2, 1.0, 300.0]),
                carry_bytes=chance.choice([100, 1_000_000]),
            ),
            janitor=JanitorSettings(
                compact_files=2,
                compact_target_bytes=chance.choice([5_000, 1_000_000]),
                removed_file_grace_seconds=REMOVED_FILE_GRACE_SECONDS,
                orphan_grace_seconds=ORPHAN_GRACE_SECONDS,
                staging_abandoned_seconds=1.0,
                table_checkpoint_every=chance.choice([2, 5]),
            ),
        )


REMOVED_FILE_GRACE_SECONDS = 0.5
ORPHAN_GRACE_SECONDS = 2.0


class Call:
    """A request on its way: `error` is what the broker answered, if it was that."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class Broker:
    """One process with a broker in it, from its start on."""

    def __init__(
        self,
        scheduler: Scheduler,
        disk: Disk,
        faults: Faults,
        *,
        name: str,
        broker_id: int,
        check_alive: bool,
        pace: Pace,
        on_failure: Callable[[Broker, Exception], None],
    ) -> None:
        self.process = Process(scheduler, name)
        self.serving = False
        self.failure: BaseException | None = None
        self.core: Core
        self.ledger: Ledger
        self.lease: leases.Lease
        self._scheduler = scheduler
        self._disk = disk
        self._store = disk.view(self.process, faults)
        self._clock = self.process.clock
        self._id = broker_id
        self._check_alive = check_alive
        self._pace = pace
        self._on_failure = on_failure
        self._leaving = False
        self._publish_now = scheduler.threading.Event()
        scheduler.spawn(self.process, "start", self._guarded(self._start))

    @property
    def alive(self) -> bool:
        return self.process.alive

    # -------------------------------------------------------------------------- starting

    def _start(self) -> None:
        store, clock, pace = self._store, self._clock, self._pace
        self.meta = MetaStore(store, clock=clock)
        self.lease = leases.acquire(
            store,
            self.meta,
            broker=self._id,
            flight=self.process.name,
            clock=clock,
            dead_after_seconds=4 * pace.heartbeat_seconds,
            check_alive=self._check_alive,
        )
        self._beat()
        tables: dict[str, Table] = {}
        self.ledger = leases.recover(store, self.meta.current, self.lease, tables, clock=clock)
        self._build(tables)
        self._appender.append([(Entry(kind=Kind.OPEN), wal.EMPTY)])
        self.serving = True
        self._threads = [
            self._scheduler.spawn(self.process, name, self._guarded(loop))
            for name, loop in (
                ("publisher", self._publish_loop),
                ("keeper", self._keep_loop),
                ("heartbeat", self._heartbeat_loop),
                ("janitor", self._janitor_loop),
            )
        ]

    def _build(self, tables: dict[str, Table]) -> None:
        store, clock, pace = self._store, self._clock, self._pace
        hot = HotTail(limit_bytes=pace.hot_bytes)
        self._appender = wal.Appender(
            store, broker=self.lease.broker, epoch=self.lease.epoch, clock=clock
        )
        self.writer = Writer(
            store,
            self._appender,
            self.ledger,
            hot,
            clock=clock,
            bounds=WriterLimits(linger_seconds=pace.linger_seconds, flush_max_entries=6),
        )
        self._publisher = Publisher(
            store,
            self.ledger,
            hot,
            clock=clock,
            tables=tables.values(),
            commit_bytes=pace.commit_bytes,
            file_bytes=pace.file_bytes,
        )
        self._keeper = WalKeeper(
            store,
            MetaStore(store, clock=clock),
            self.lease,
            self._appender,
            self.ledger,
            self.writer,
            clock=clock,
            bounds=pace.keeper,
        )
        self._janitor = Janitor(store, self.ledger, pace.janitor, clock=clock)
        self.core = Core(
            store,
            self.meta,
            self.lease,
            self.ledger,
            self.writer,
            self._publisher,
            hot,
            clock=clock,
            defaults=TopicDefaults(),
            submit_timeout_seconds=1.0,
        )
        self.core.publish_now = self._publish_now.set

    # -------------------------------------------------------------------------- loops

    def _publish_loop(self) -> None:
        retry_at: dict[str, float] = {}
        while not self._leaving:
            now = self._publish_now.wait(self._pace.publish_tick_seconds)
            self._publish_now.clear()
            due = self._publisher.due(
                interval_seconds=0.0 if now else self._pace.publish_interval_seconds,
                publish_bytes=self._pace.commit_bytes,
            )
            for topic in due:
                if self._clock.monotonic() < retry_at.get(topic.topic_id, 0.0):
                    continue
                if not self._publish(topic):
                    retry_at[topic.topic_id] = self._clock.monotonic() + 0.2

    def _publish(self, topic: Topic) -> bool:
        try:
            self._publisher.publish(topic)
        except errors.Fenced:
            raise
        except (errors.SparklogError, OSError) as error:
            self._disk.note("cannot publish", topic.name, str(error))
            topic.held_back = str(error)
            return False
        topic.held_back = None
        self.writer.published_more()
        return True

    def _keep_loop(self) -> None:
        while not self._leaving:
            self._scheduler.sleep(self._pace.keep_tick_seconds)
            try:
                self._keeper.tick()
                ticket = self._keeper.carry()
                if ticket is not None:
                    self.writer.wait(ticket)
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                self._disk.note("upkeep of the log waits", str(error))

    def _janitor_loop(self) -> None:
        while not self._leaving:
            self._scheduler.sleep(self._pace.janitor_tick_seconds)
            self._janitor.tick(should_stop=lambda: self._leaving)

    def _heartbeat_loop(self) -> None:
        watch = MetaStore(self._store, clock=self._clock)
        while not self._leaving:
            self._scheduler.sleep(self._pace.heartbeat_seconds)
            try:
                self._beat()
                self._check_lease(watch)
            except (errors.Retriable, errors.OutcomeUnknown, PutUnresolved, OSError) as error:
                self._disk.note("no heartbeat", str(error))
            if self.core.failure is not None:
                raise self.core.failure

    def _beat(self, *, stopped: bool = False) -> None:
        write_heartbeat(
            self._store,
            Heartbeat(
                broker=self.lease.broker,
                epoch=self.lease.epoch,
                flight=self.process.name,
                at_us=self._clock.now_us(),
                host="elsewhere",
                stopped=stopped,
            ),
        )

    def _check_lease(self, watch: MetaStore) -> None:
        known = watch.refresh().brokers.get(self.lease.broker)
        replaced = known is not None and known.epoch != self.lease.epoch
        if replaced or watch.current.controller != self.lease.broker:
            raise errors.BrokerFenced(broker=self.lease.broker, epoch=self.lease.epoch)

    # -------------------------------------------------------------------------- ending

    def _guarded(self, loop: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                loop()
            except Exception as error:
                self.failure = self.failure or error
                self._disk.note("stops", repr(error))
                self.process.alive = False
                self._on_failure(self, error)

        return body

    def leave(self) -> None:
        """Stops in good order, from a task of the broker's own."""
        self.writer.close(errors.BrokerClosing(broker=self.lease.broker))
        self._leaving = True
        self._scheduler.wait(lambda: all(thread.done for thread in self._threads))
        try:
            for topic in self.ledger.topics():
                while any(each.unpublished for each in topic.partitions):
                    if not self._publish(topic):
                        break
            self._keeper.checkpoint()
            self._keeper.tick()
            self._beat(stopped=True)
        except (errors.SparklogError, SyncFailed, OSError) as error:
            self._disk.note("left without publishing everything", str(error))
        self._disk.note("left")
        self.process.alive = False

    # -------------------------------------------------------------------------- the door

    def call(self, what: str, body: Callable[[Broker], Any], *, delay_seconds: float = 0.0) -> Call:
        """Runs `body` as a request in the broker; it begins when it arrives there."""
        call = Call(self)

        def run() -> None:
            if delay_seconds:
                self._scheduler.sleep(delay_seconds)
            try:
                call.result = body(self)
            except Exception as error:
                call.error = error
            call.done = True

        self._scheduler.spawn(self.process, what, run)
        return call
