"""The agent: builds a broker in order, runs its threads, and takes it down in reverse.

Four threads beside the doors' own: the publisher, the WAL's keeper, the janitor, and the heartbeat,
which also notices that a newer broker has taken over. What ends the writer ends the broker.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import structlog

from sparklog import errors, limits
from sparklog.broker import lease as leases
from sparklog.broker.core import Core, TopicDefaults
from sparklog.broker.flight import FlightDoor
from sparklog.broker.hot import HotTail
from sparklog.broker.janitor import Janitor
from sparklog.broker.partitions import Ledger, Topic
from sparklog.broker.publisher import Publisher
from sparklog.broker.walkeeper import KeeperLimits, WalKeeper
from sparklog.broker.writer import Writer, WriterLimits
from sparklog.clock import Clock, SystemClock
from sparklog.settings import BrokerSettings
from sparklog.storage import wal
from sparklog.storage.meta import Heartbeat, MetaStore, write_heartbeat
from sparklog.storage.objects import Store, SyncFailed, open_store
from sparklog.storage.snapshot import Entry, Kind
from sparklog.storage.table import Table

_log = structlog.get_logger("sparklog.broker")
_PUBLISH_TICK_SECONDS = 0.02
_KEEP_TICK_SECONDS = 0.5
_RETRY_SECONDS = 1.0
_SWITCH_INTERVAL_SECONDS = 0.001
"""Python's own is 5 ms: too long for an ack that waits while the publisher computes."""


class Agent:
    """One broker in this process. `start` returns when it serves; `stop` when it has left."""

    def __init__(
        self, settings: BrokerSettings, *, store: Store | None = None, clock: Clock | None = None
    ) -> None:
        self.settings = settings
        self._store = store if store is not None else open_store(settings.root, settings.storage)
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._publish_now = threading.Event()
        self._threads: list[threading.Thread] = []
        self._door: FlightDoor | None = None
        self.failure: BaseException | None = None
        """Why the broker stopped by itself."""

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Takes the root, recovers, and serves.

        Raises `BrokerAlive`, `RootNotWritable`, `FormatTooNew`, `CorruptObject`, `BrokerFenced`,
        and `BadOption` where the Flight address is taken.
        """
        settings, store, clock = self.settings, self._store, self._clock
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))
        listen = _with_port(settings.flight.listen)
        self.address = settings.flight.advertised or listen
        self._meta = MetaStore(store, clock=clock)
        self._lease = leases.acquire(
            store,
            self._meta,
            broker=settings.id,
            flight=self.address,
            clock=clock,
            dead_after_seconds=settings.liveness.dead_after_seconds,
        )
        self._beat()
        tables: dict[str, Table] = {}
        self._ledger = leases.recover(store, self._meta.current, self._lease, tables, clock=clock)
        self._build(tables)
        self._appender.append([(Entry(kind=Kind.OPEN), wal.EMPTY)])
        _wait_until_free(listen, self.settings.liveness.dead_after_seconds)
        self._door = FlightDoor(self._core, listen)
        self._run("publisher", self._publish_loop)
        self._run("wal-keeper", self._keep_loop)
        self._run("heartbeat", self._heartbeat_loop)
        if settings.janitor.enabled:
            self._run("janitor", self._janitor_loop)

    def _build(self, tables: dict[str, Table]) -> None:
        settings, store, clock = self.settings, self._store, self._clock
        writer = settings.writer
        self._appender = wal.Appender(
            store,
            broker=self._lease.broker,
            epoch=self._lease.epoch,
            clock=clock,
            stopping=self._stopping.is_set,
        )
        self._hot = HotTail(limit_bytes=settings.hot_tail.bytes)
        self._writer = Writer(
            store,
            self._appender,
            self._ledger,
            self._hot,
            clock=clock,
            bounds=WriterLimits(
                flush_max_bytes=writer.flush_max_bytes,
                linger_seconds=writer.linger_ms_on(local=store.is_local) / 1e3,
                queue_bytes=writer.queue_bytes,
                unpublished_bytes=settings.publisher.unpublished_bytes,
                max_record_bytes=writer.max_record_bytes,
                max_batch_bytes=writer.max_batch_bytes,
                free_space_reserve_bytes=writer.free_space_reserve_bytes,
            ),
        )
        self._publisher = Publisher(
            store, self._ledger, self._hot, clock=clock, tables=tables.values()
        )
        self._keeper = WalKeeper(
            store,
            MetaStore(store, clock=clock),
            self._lease,
            self._appender,
            self._ledger,
            self._writer,
            clock=clock,
            bounds=KeeperLimits(
                checkpoint_every_seconds=writer.checkpoint_every_seconds,
                trim_grace_seconds=writer.trim_grace_seconds,
            ),
        )
        self._janitor = Janitor(store, self._ledger, settings.janitor, clock=clock)
        self._core = Core(
            store,
            self._meta,
            self._lease,
            self._ledger,
            self._writer,
            self._publisher,
            self._hot,
            clock=clock,
            defaults=TopicDefaults(
                auto_create=settings.topics.auto_create,
                partitions=settings.topics.default_partitions,
            ),
        )
        self._core.publish_now = self._publish_now.set

    def _run(self, name: str, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(loop,), name=f"sparklog-{name}")
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._fail(error)

    # -------------------------------------------------------------------------- loops

    def _publish_loop(self) -> None:
        publisher = self.settings.publisher
        retry_at: dict[str, float] = {}
        while not self._stopping.is_set():
            now = self._publish_now.wait(_PUBLISH_TICK_SECONDS)
            self._publish_now.clear()
            due = self._publisher.due(
                interval_seconds=0.0 if now else publisher.interval_seconds,
                publish_bytes=publisher.publish_bytes,
            )
            for topic in due:
                if self._clock.monotonic() < retry_at.get(topic.topic_id, 0.0):
                    continue
                if not self._publish(topic):
                    retry_at[topic.topic_id] = self._clock.monotonic() + _RETRY_SECONDS

    def _publish(self, topic: Topic) -> bool:
        """One commit; False where it failed and should be tried again later."""
        try:
            self._publisher.publish(topic)
        except errors.Fenced:
            raise
        except (errors.SparklogError, OSError) as error:
            if topic.held_back != str(error):
                _log.error("cannot publish", topic=topic.name, reason=str(error))
            topic.held_back = str(error)
            return False
        if topic.held_back is not None:
            _log.info("publishing again", topic=topic.name)
            topic.held_back = None
        self._writer.published_more()
        return True

    def _keep_loop(self) -> None:
        while not self._stopping.wait(_KEEP_TICK_SECONDS):
            try:
                self._keeper.tick()
                ticket = self._keeper.carry()
                if ticket is not None:
                    self._writer.wait(ticket)
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                _log.warning("the write-ahead log's upkeep waits", reason=str(error))

    def _janitor_loop(self) -> None:
        while not self._stopping.wait(self.settings.janitor.interval_seconds):
            self._janitor.tick(should_stop=self._stopping.is_set)

    def _heartbeat_loop(self) -> None:
        liveness = self.settings.liveness
        watch = MetaStore(self._store, clock=self._clock)
        busy_at, calls = time.monotonic(), -1
        while not self._stopping.wait(liveness.heartbeat_seconds):
            try:
                self._beat()
                self._check_lease(watch)
            except (errors.Retriable, errors.OutcomeUnknown, OSError) as error:
                _log.warning("no heartbeat", reason=str(error))
            if self._core.failure is not None:
                raise self._core.failure
            assert self._door is not None
            if self._door.calls != calls or self._door.open_calls:
                busy_at, calls = time.monotonic(), self._door.calls
            idle_seconds = time.monotonic() - busy_at
            if liveness.idle_exit_seconds and idle_seconds > liveness.idle_exit_seconds:
                _log.info("idle, leaving", idle_seconds=round(idle_seconds))
                threading.Thread(target=self.stop, name="sparklog-leave").start()
                return

    def _beat(self, *, stopped: bool = False) -> None:
        write_heartbeat(
            self._store,
            Heartbeat(
                broker=self._lease.broker,
                epoch=self._lease.epoch,
                flight=self.address,
                at_us=self._clock.now_us(),
                host=socket.gethostname(),
                pid=os.getpid(),
                newest_sequence=self._ledger.applied_sequence if self._door else -1,
                stopped=stopped,
            ),
        )

    def _check_lease(self, watch: MetaStore) -> None:
        known = watch.refresh().brokers.get(self._lease.broker)
        replaced = known is not None and known.epoch != self._lease.epoch
        if replaced or watch.current.controller != self._lease.broker:
            raise errors.BrokerFenced(broker=self._lease.broker, epoch=self._lease.epoch)

    # -------------------------------------------------------------------------- stopping

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Returns when the broker has stopped. Raises what stopped it, if it did so by itself."""
        stopped = self._stopped.wait(timeout_seconds)
        if self.failure is not None:
            raise self.failure
        return stopped

    def _fail(self, error: BaseException) -> None:
        if self._stopping.is_set():
            return
        self.failure = error
        _log.error("the broker stops", reason=str(error) or repr(error))
        self._writer.fail(error)
        threading.Thread(target=self._halt, name="sparklog-halt").start()

    def _halt(self) -> None:
        self._stopping.set()
        self._core.close()
        if self._door is not None:
            self._door.shutdown()
        self._stopped.set()

    def stop(self) -> None:
        """Leaves in good order: refuses new records, publishes all, trims, and says goodbye."""
        if self._stopping.is_set():
            self._stopped.wait()
            return
        self._writer.close(errors.BrokerClosing(broker=self._lease.broker))
        self._stopping.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        try:
            self._publish_everything()
            self._keeper.checkpoint()
            self._keeper.tick()
            self._beat(stopped=True)
        except (errors.SparklogError, SyncFailed, OSError) as error:
            _log.warning("left without publishing everything", reason=str(error))
        self._core.close()
        if self._door is not None:
            self._door.shutdown()
        self._stopped.set()

    def _publish_everything(self) -> None:
        deadline = self._clock.monotonic() + limits.STOP_SECONDS
        for topic in self._ledger.topics():
            while any(each.unpublished for each in topic.partitions):
                if self._clock.monotonic() > deadline or not self._publish(topic):
                    break

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# ------------------------------------------------------------------------------ addresses


def _with_port(listen: str) -> str:
    """`listen` with a real port where it asks for any."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _wait_until_free(listen: str, timeout_seconds: float) -> None:
    """gRPC shares a port that another process listens on, silently; so it is tried first.

    A broker that has just been replaced needs a moment to leave it. Raises `BadOption`.
    """
    host, _, port = listen.rpartition(":")
    deadline = time.monotonic() + timeout_seconds
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise errors.BadOption(
                        option="flight.listen", value=listen, reason=str(error)
                    ) from error
        time.sleep(0.05)
