"""The agent builds a broker in order, runs its threads, and stops it in reverse.

Beside the threads of the listeners there are five: the publisher, which has pools for large topics
and files, the WAL cleaner, the janitor, the groups' coordinator, and the heartbeat, which also
notices that a newer broker has taken over. A member of a cluster has one more, which follows the
metadata and watches the other members. An error that ends the writer ends the broker.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

import structlog

from sparklog import errors, limits
from sparklog.broker import ports
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog, RetrySchedule, run_each
from sparklog.broker.broker import Broker, TopicDefaults
from sparklog.broker.controller import Controller
from sparklog.broker.counts import Budget, UpkeepCounts
from sparklog.broker.flight.hooks import RequestHooks
from sparklog.broker.flight.listener import FlightListener
from sparklog.broker.flight.streams import StreamBounds
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.handover import Handovers
from sparklog.broker.heartbeats import Heartbeats
from sparklog.broker.log import recovery, takeover
from sparklog.broker.log.confirmer import Confirmer
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.janitor import Janitor
from sparklog.broker.log.partitions import PartitionTable
from sparklog.broker.log.publish_loop import PublishLoop
from sparklog.broker.log.publish_process import PublishProcess, WorkerProcess
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_cleaner import WalCleaner, WalCleanerLimits
from sparklog.broker.log.writer import Writer, WriterLimits
from sparklog.broker.metrics.collection import Collector, FlushCounts, Sources
from sparklog.broker.metrics.overview import BrokerOverview
from sparklog.broker.reconciler import Reconciler
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock, SystemClock
from sparklog.formats import flight_messages
from sparklog.settings import BrokerSettings, KafkaSettings
from sparklog.storage import wal
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.liveness import (
    Heartbeat,
    LeaderState,
    LeaderWatch,
    Phase,
    heartbeat_time_us,
    readiness,
)
from sparklog.storage.metadata.model import BrokerKind, ClusterMetadata
from sparklog.storage.metadata.observer import PAUSE
from sparklog.storage.metadata.processes import this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore, PutUnresolved, Store, open_store
from sparklog.storage.snapshot import WalKind
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.topic_table import OpenTable, TopicTable
from sparklog.storage.wal.choice import choose
from sparklog.version import VERSION

if TYPE_CHECKING:
    from sparklog.broker.kafka.listener import KafkaListener
    from sparklog.broker.metrics.server import MetricsServer

FLUSHES_AT_ONCE_REMOTE = 4  # puts of the log that are under way at the same time
_PUBLISH_BESIDE = 2  # topics that are published beside the others, because they have much
_PUBLISH_BESIDE_REMOTE = 8
_PUBLISH_SHARE_REMOTE = 1.0  # waiting for a store takes no processor from producers
_PUBLISH_THREADS = 2
_PUBLISH_THREADS_REMOTE = 8
_SILENT_ASK_SECONDS = 0.5  # for which a silent member is asked, before its partitions move
_FOLLOW_SECONDS = 0.02  # between two looks at the metadata, of a member that is not alone
FOLLOW_REMOTE_SECONDS = 1.0
REDIRECT_SECONDS = 1.0  # for which a broker that gave its partitions away still names their leaders
UPKEEP_QUIET_REMOTE_SECONDS = 20.0  # between two looks at a table to which nothing was committed
_UPKEEP_BESIDE = 1  # compactions by key that run beside the janitor
_FREE_INODES_RESERVE = 100_000  # with fewer, files that may stay go

KAFKA_PACKAGES: Final = ("cramjam", "kio", "numba", "uvloop")
"""Packages of the extra `broker`, which the Kafka listener needs."""
METRICS_PACKAGES: Final = ("prometheus_client", "starlette", "uvicorn")
"""Packages of the extra `broker`, which the port for metrics needs."""

_log = structlog.get_logger("sparklog.broker")
_PUBLISH_TICK_SECONDS = 0.02
_PUBLISH_IDLE_SECONDS = 0.1
"""Between two looks while no record waits, or a tenth of the publish interval if that is less."""
_WAL_TICK_SECONDS = 0.5
_GROUPS_TICK_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_SLOW_SECONDS = 3.0
_LEAVING_SECONDS = 0.7
"""Time in which a broker closes its ports after it has marked its heartbeat as stopped."""
_LOOK: Final = 0.15
"""The pause between two looks at heartbeats on an object store, in shares of the time of death."""
_SWITCH_INTERVAL_SECONDS = 0.001
"""Python's default of 5 ms is too long for an ack that waits while the publisher computes."""


class Agent:
    """One broker in this process. `start` returns once it serves, `stop` once it has stopped."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        kind: BrokerKind = BrokerKind.STANDING,
        take_over: bool = False,
        allow_non_empty: bool = False,
        watch: LeaderWatch | None = None,
        hooks: RequestHooks | None = None,
        ask: Ask | None = None,
    ) -> None:
        """Creates a broker that has not started.

        Args:
            settings: the broker's settings.
            store: the root's store; None: the one that the settings name.
            clock: None: the machine's clock.
            kind: how it is started: a standing broker takes over from the other kinds.
            take_over: replace the live leader of the root, whatever its kind.
            allow_non_empty: also make a root of a folder that holds files of other programs.
            watch: earlier observations of the leader; None: none.
            hooks: called for each request of a Flight client; for tests.
            ask: sends requests to other brokers: to silent ones, which are dead without it, and for
                figures, which are unknown without it.
        """
        self.settings = settings
        self.kind = kind
        self._take_over = take_over
        self._allow_non_empty = allow_non_empty
        self._hooks = hooks
        self._ask = ask
        self._store = store if store is not None else open_store(settings.root, settings.storage)
        self._clock = clock or SystemClock()
        self._liveness = settings.liveness.on(local=self._store.is_local)
        self._is_member = settings.cluster.join and kind is BrokerKind.STANDING
        self._answers = (
            identity.answers(self._store, ask, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS)
            if ask is not None
            else None
        )
        self._watch = watch or self._watch_of(settings.id if self._is_member else None)
        self._leader_watch = self._watch_of(None)
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._publish_now = threading.Event()
        self._histories = Histories(self._store, clock=self._clock)
        """Logs of others, for the thread that follows the cluster."""
        self._follow_now = threading.Event()
        self._removed_files = RemovedFileRetention(settings.janitor.removed_file_kept_seconds)
        self._stop_lock = threading.Lock()
        """Held by the thread that stops the broker."""
        self._refused = RefusedWork(self._clock)
        self._phase = Phase.STARTING
        self._recovered_at = -float("inf")
        """When the log was recovered, in monotonic seconds."""
        self._flushed_at = -float("inf")
        """When the last flush was durable, in monotonic seconds."""
        self._wal = ""
        """The storage of the write-ahead log, and why."""
        self._threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(
            _PUBLISH_THREADS if self._store.is_local else _PUBLISH_THREADS_REMOTE,
            thread_name_prefix="sparklog-files",
        )
        self._compactors = ThreadPoolExecutor(_UPKEEP_BESIDE, thread_name_prefix="sparklog-compact")
        self._publishers = ThreadPoolExecutor(
            _PUBLISH_BESIDE if self._store.is_local else _PUBLISH_BESIDE_REMOTE,
            thread_name_prefix="sparklog-publish",
        )
        self._publish_process: PublishProcess | None = None
        self._handovers: Handovers | None = None
        self._controller: Controller | None = None
        self._broker: Broker | None = None
        self._flight_listener = ports.BoundPort("flight.listen", settings.flight.listen)
        self._kafka_listener = (
            ports.BoundPort("kafka.listen", settings.kafka.listen)
            if settings.kafka.listen
            else None
        )
        self._metrics_listener = (
            ports.BoundPort("metrics.listen", settings.metrics.listen)
            if settings.metrics.listen
            else None
        )
        self._flight: FlightListener | None = None
        self._kafka: KafkaListener | None = None
        self._groups: Coordinator | None = None
        self._metrics: MetricsServer | None = None
        self._collect: Callable[[], Sequence[bytes]] | None = None
        """Returns the text of the metrics; set once the broker serves."""
        self._sources: Sources | None = None
        """The sources of figures, once the broker serves."""
        self._is_serving = False
        """Set while all listeners serve clients."""
        self._flushes = FlushCounts()
        self._upkeep = UpkeepCounts()
        self.failure: BaseException | None = None
        """The error that stopped the broker, if it stopped by itself."""

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Takes over the root, recovers, and serves.

        Raises `BrokerAlive`, `NotARoot`, `RootNotEmpty`, `RootNotWritable`, `FormatTooNew`,
        `CorruptObject`, `MissingObject`, `ForeignTable`, `BrokerFenced`, `NotInstalled`, and
        `BadOption` where the address of a listener is taken, or not one of this machine.
        """
        settings, store, clock = self.settings, self._store, self._clock
        began = clock.monotonic()
        _check_installed(settings)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))
        try:
            self._bind_ports()
            self.address = _advertised(settings.flight.advertised, self._flight_listener.address)
            if settings.kafka.listen and self._ports_of_leader():
                _compile_loops()  # while the present leader of the root still serves
            self._meta = MetadataStore(store, clock=clock)
            self._leadership = takeover.acquire(
                store,
                self._meta,
                broker=settings.id,
                flight=self.address,
                kafka=self._kafka_advertised,
                rack=settings.cluster.rack,
                is_member=self._is_member,
                clock=clock,
                dead_after_seconds=self._liveness.dead_after_seconds,
                kind=self.kind,
                process=this_process(),
                take_over=self._take_over,
                allow_non_empty=self._allow_non_empty,
                watch=self._watch,
                watch_of=self._watch_of,
                choose_log=self._choose_log,
            )
        except BaseException:
            self._close_ports()
            raise
        self._heartbeats = Heartbeats(
            store,
            self._leadership,
            clock=clock,
            dead_after_seconds=self._liveness.dead_after_seconds,
            describe=self._heartbeat,
            wrote_at=lambda: self._flushed_at,
            check_leadership=self._check_known_leadership,
        )
        try:
            with contextlib.suppress(errors.Retriable, PutUnresolved):  # another one follows
                self._write_heartbeat()
            # Recovery may take longer than a broker without heartbeats counts as alive.
            self._start_thread("heartbeat", self._heartbeat_loop)
            leading_since = clock.monotonic()
            if self._metrics_listener is not None and self._metrics_listener.is_bound:
                self._start_metrics(patience_seconds=0.0)
            self._start_serving()
            self._phase = Phase.SERVING
            self._accept_drains()
            with contextlib.suppress(errors.Retriable, PutUnresolved):
                self._write_heartbeat()  # with the addresses of its listeners
        except BaseException as error:
            self._stopping.set()
            self._mark_stopped()
            self._close()
            self._stopped.set()
            explained = self._with_successor(error)
            if explained is not error:
                raise explained from error
            raise
        _log.info(
            "serving",
            version=VERSION,
            root=store.uri,
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            kind=self.kind.value,
            flight=self.address,
            kafka=self.kafka_address or None,
            metrics=self.metrics_address or None,
            took_seconds=round(clock.monotonic() - began, 3),
            recovery_seconds=round(self._recovered_at - leading_since, 3),
        )

    def _watch_of(self, broker: int | None) -> LeaderWatch:
        """Returns a watch over a broker of the root; None: over its controller."""
        return LeaderWatch(
            self._store,
            clock=self._clock,
            dead_after_seconds=self._liveness.dead_after_seconds,
            broker=broker,
            answers=self._answers,
        )

    def _choose_log(self) -> WalKind:
        chosen = choose(self._store, self.settings.writer.log, clock=self._clock)
        _log.info("storage of the write-ahead log", kind=chosen.kind.value, reason=chosen.reason)
        self._wal = f"{chosen.kind}: {chosen.reason}"
        return chosen.kind

    @property
    def _kafka_advertised(self) -> str:
        """The address for Kafka clients, before its listener is open; empty without one."""
        listener = self._kafka_listener
        if listener is None:
            return ""
        return _advertised(self.settings.kafka.advertised, listener.address)

    def _ports(self) -> list[ports.BoundPort]:
        found = (self._flight_listener, self._kafka_listener, self._metrics_listener)
        return [each for each in found if each is not None]

    def _bind_ports(self) -> None:
        """Binds the ports. Raises `BadOption` for one that another program holds.

        The root has not been changed then. A port that the live leader of this root holds is bound
        later, once that broker has been replaced and has closed it.
        """
        for each in self._ports():
            if not each.try_bind() and each.port not in self._ports_of_leader():
                each.bind(patience_seconds=_LEAVING_SECONDS)
        for each, other in itertools.combinations(self._ports(), 2):
            if other.overlaps(each):
                reason = f"{each.option} has the same port; each listener needs one of its own"
                raise errors.BadOption(
                    option=other.option, value=other.listen_address, reason=reason
                )

    def _broker_info(self) -> flight_messages.BrokerInfo:
        process = this_process()
        return flight_messages.BrokerInfo(
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            address=self.address,
            kafka=self.kafka_address,
            metrics=self.metrics_address,
            kind=self.kind,
            version=VERSION,
            host=process.host,
            pid=process.pid,
            started_us=self._meta.current.brokers[self._leadership.broker].started_us,
            log=self.settings.log.file,
            wal=self._wal,
        )

    def _ports_of_leader(self) -> set[int]:
        """Returns the ports of the broker that this one replaces, unless it is known to be dead.

        That is the root's leader, or of a member the one with its id, or a broker of a program.
        """
        found = [self._watch.poll()]
        if self._is_member:
            leader = self._leader_watch.poll()
            if leader is not None and leader.leader.known.kind != BrokerKind.STANDING:
                found.append(leader)
        addresses: list[str] = []
        for each in found:
            if each is not None and each.state is not LeaderState.DEAD:
                addresses.append(each.leader.flight)
                if (heartbeat := each.leader.heartbeat) is not None:
                    addresses += [heartbeat.kafka, heartbeat.metrics]
        return {ports.port_of(address) for address in addresses if address}

    def _start_serving(self) -> None:
        open_table = functools.partial(
            TopicTable,
            self._store,
            clock=self._clock,
            removed_file_grace_seconds=self.settings.janitor.removed_file_grace_seconds,
            retention=self._removed_files,
        )
        taken = takeover.take(self._store, self._meta, self._leadership, clock=self._clock)
        self._leadership = taken.leadership
        partition_table = recovery.recover(
            self._store, taken, clock=self._clock, open_table=open_table
        )
        for topic in partition_table.topics():
            if topic.refusal is not None:
                _log.error("cannot publish", topic=topic.name, reason=topic.refusal)
        broker = self._build_broker(partition_table, open_table)
        # Before the first client may ask for a topic that another broker has just created.
        reconciler = self._reconciler(broker, taken.metadata, open_table)
        self._writer.open()
        takeover.check_opened(self._meta, self._leadership)
        self._recovered_at = self._clock.monotonic()
        # A broker that has just been replaced needs a moment to close its ports.
        patience_seconds = self._liveness.dead_after_seconds
        for each in self._ports():
            each.bind(patience_seconds=patience_seconds)
        groups = Coordinator(broker, settings=self.settings.groups, clock=self._clock)
        try:
            if (kafka := self._kafka_listener) is not None:
                listening = kafka.listen(patience_seconds=patience_seconds)
                address = self.settings.kafka.advertised or kafka.address
                self._kafka = _kafka_server(broker, groups, listening, address, self.settings.kafka)
            # Set before the Flight listener opens: its first client may ask for them.
            broker.serving = self._broker_info()
            broker.prove = self._heartbeats.prove
            broker.cluster_admin.answers = self._answers
            self._refused.look = self._look_for_refusals
            listening = self._flight_listener.listen(patience_seconds=patience_seconds)
            self._broker, self._flight = broker, self._flight_server(broker, groups, listening)
        except BaseException:
            broker.close()  # requests that wait would keep the Kafka listener from closing
            raise
        if self.failure is not None:  # the heartbeat has found a successor
            raise self.failure
        self._measure(broker, groups, self._flight)
        self._start_metrics(patience_seconds=patience_seconds)
        for number in range(self._writer.leaders):
            self._start_thread(f"flush-{number}", self._writer.lead_flushes)
        if self._is_member:  # before the compilation: others already give it partitions
            self._join_cluster(broker, reconciler)
        if self._kafka is not None:
            _compile_loops()  # while native clients are served, and before the backlog is published
            if self.failure is not None:  # a thread has met it, and closed the listeners
                raise self.failure
            self._kafka.start()
        self._start_thread("publisher", self._publish_loop)
        self._start_thread("wal-cleaner", self._wal_loop)
        self._groups = groups
        self._start_thread("groups", lambda: self._groups_loop(groups))
        if self.settings.janitor.enabled:
            self._start_thread("janitor", self._janitor_loop)
        self._is_serving = True

    def _reconciler(
        self, broker: Broker, recovered: ClusterMetadata, open_table: OpenTable
    ) -> Reconciler:
        """Returns what follows the metadata for a member, which requests use from now on."""
        reconciler = Reconciler(
            self._store,
            broker.metadata,
            self._leadership,
            self._partition_table,
            self._publisher,
            self._writer,
            inherit=self._wal_cleaner.inherit,
            open_table=open_table,
            clock=self._clock,
            seen=recovered,
            on_change=self._follow_now.set,
            readiness=functools.partial(readiness, self._store),
            histories=self._histories,
        )
        if self._is_member:
            broker.metadata.lead, broker.metadata.apply = reconciler.lead, reconciler.apply
        return reconciler

    def _join_cluster(self, broker: Broker, reconciler: Reconciler) -> None:
        """Follows the metadata, and watches the other members, from now on."""
        liveness = self._liveness

        def has_beaten() -> bool:
            silent_seconds = self._heartbeats.newest.age_seconds(self._clock)
            return silent_seconds < liveness.dead_after_seconds / 2

        ask_readiness = functools.partial(readiness, self._store)
        controller = self._controller = Controller(
            self._store,
            broker.metadata,
            self._leadership,
            clock=self._clock,
            dead_after_seconds=liveness.dead_after_seconds,
            readiness=ask_readiness,
            every_seconds=(
                limits.WATCH_SECONDS
                if self._store.is_local
                else liveness.dead_after_seconds * _LOOK
            ),
            is_sound=has_beaten,
            histories=self._histories,
            answers=(
                identity.writes(self._store, self._ask, timeout_seconds=_SILENT_ASK_SECONDS)
                if self._ask is not None
                else None
            ),
        )

        self._handovers = Handovers(
            broker.metadata,
            self._leadership,
            self._partition_table,
            self._writer,
            self._wal_cleaner,
            clock=self._clock,
            readiness=ask_readiness,
        )
        handovers = broker.cluster_admin.handovers = self._handovers
        broker.cluster_admin.ask = self._ask

        def follow() -> None:
            reconciler.tick()
            controller.tick()
            handovers.tick()
            # Elsewhere each look costs requests. A broker that stops gets no partitions.
            if self._store.is_local and self._phase is not Phase.DRAINING:
                reconciler.prepare()

        def every_seconds() -> float:
            often_seconds = _FOLLOW_SECONDS if len(broker.members()) > 1 else limits.WATCH_SECONDS
            wanted = often_seconds if self._store.is_local else FOLLOW_REMOTE_SECONDS
            longest = liveness.dead_after_seconds * PAUSE / 2
            return min(wanted, longest, controller.seconds_to_death())

        self._start_thread(
            "cluster",
            lambda: self._repeat("the cluster", every_seconds, follow, wake=self._follow_now),
        )

    def _measure(self, broker: Broker, groups: Coordinator, flight: FlightListener) -> None:
        """Prepares the broker's figures."""
        kafka = self._kafka

        def budgets() -> list[Budget]:
            of_kafka = kafka.memory.budgets() if kafka is not None else []
            return [*broker.budgets(), *of_kafka, *flight.budgets(), *groups.budgets()]

        janitor = self.settings.janitor
        sources = Sources(
            broker=broker,
            partition_table=self._partition_table,
            publisher=self._publisher,
            groups=groups,
            flushes=self._flushes,
            upkeep=self._upkeep,
            budgets=budgets,
            store=self._store,
            kafka=kafka,
            flight=flight,
            cluster_id=self._leadership.cluster.cluster_id,
            epoch=self._leadership.epoch,
            small_file_bytes=janitor.compact_target_bytes // 2,
            compact_files=janitor.compact_files,
            clock=self._clock,
            ask=self._ask,
            dead=lambda: self._controller.dead if self._controller is not None else {},
        )
        self._sources = sources
        broker.collect_figures = BrokerOverview(sources).figures
        if self._metrics_listener is not None:
            from sparklog.broker.metrics.exposition import Exposition

            self._collect = Exposition(Collector(sources)).text

    def _start_metrics(self, *, patience_seconds: float) -> None:
        """Opens the HTTP port for metrics, if there is one and it is not open."""
        if self._metrics_listener is None or self._metrics is not None:
            return
        from sparklog.broker.metrics.server import MetricsServer

        self._metrics = MetricsServer(
            self._metrics_listener.listen(patience_seconds=patience_seconds),
            collect=lambda: self._collect() if self._collect is not None else None,
            is_healthy=lambda: self.failure is None,
            is_ready=lambda: self._is_serving and not self._stopping.is_set(),
        )
        self._metrics.start()

    def _flight_server(
        self, broker: Broker, groups: Coordinator, listening: socket.socket
    ) -> FlightListener:
        return FlightListener(
            broker,
            groups,
            listening,
            bounds=StreamBounds(streams=self.settings.flight.max_streams),
            max_batch_bytes=self.settings.writer.max_batch_bytes,
            hooks=self._hooks,
        )

    def _build_broker(self, partition_table: PartitionTable, open_table: OpenTable) -> Broker:
        settings, store, clock = self.settings, self._store, self._clock
        writer = settings.writer
        self._partition_table = partition_table
        self._appender = wal.of(store, clock, self._leadership.log).appender(
            self._leadership.broker, self._leadership.epoch, stopping=self._stopping.is_set
        )
        self._hot = HotTail(limit_bytes=settings.hot_tail.bytes)
        self._writer = Writer(
            store,
            self._appender,
            self._partition_table,
            self._hot,
            clock=clock,
            bounds=WriterLimits(
                flush_max_bytes=writer.flush_max_bytes,
                linger_seconds=writer.linger_ms_on(local=store.is_local) / 1e3,
                flushes_at_once=1 if store.is_local else FLUSHES_AT_ONCE_REMOTE,
                queue_bytes=writer.queue_bytes,
                unpublished_bytes=settings.publisher.unpublished_bytes,
                staged_bytes=settings.publisher.staged_bytes,
                max_record_bytes=writer.max_record_bytes,
                max_batch_bytes=writer.max_batch_bytes,
                free_space_reserve_bytes=writer.free_space_reserve_bytes,
            ),
            on_flush=self._on_flush,
            refused=self._refused,
        )
        self._publish_process = self._new_publish_process()
        self._publisher = Publisher(
            store,
            self._partition_table,
            self._hot,
            clock=clock,
            pool=self._pool,
            counts=self._upkeep,
            process=self._publish_process,
        )
        self._wal_cleaner = WalCleaner(
            store,
            self._meta,
            self._leadership,
            self._appender,
            self._partition_table,
            self._writer,
            confirm=Confirmer(
                store,
                self._partition_table,
                self._publisher,
                clock=clock,
                after_seconds=limits.CONFIRM_AFTER_SECONDS,
                store_now_us=(
                    functools.partial(heartbeat_time_us, store, self._leadership.broker)
                    if self._leadership.inherited
                    else None
                ),
            ).confirm,
            clock=clock,
            bounds=WalCleanerLimits(
                checkpoint_every_seconds=writer.checkpoint_every_seconds,
                trim_grace_seconds=writer.trim_grace_seconds,
            ),
            is_controller=self._is_controller,
        )
        broker = Broker(
            store,
            self._meta,
            self._leadership,
            self._partition_table,
            self._writer,
            self._publisher,
            self._hot,
            clock=clock,
            open_table=open_table,
            refused=self._refused,
            defaults=TopicDefaults(
                auto_create=settings.topics.auto_create,
                partitions=settings.topics.default_partitions,
                refuse_replication=settings.topics.refuse_replication,
            ),
            settings=settings,
        )
        broker.metadata.heartbeat_age_seconds = lambda: self._heartbeats.newest.age_seconds(clock)
        self._publishing = PublishLoop(
            self._publisher,
            self._partition_table,
            settings=settings.publisher,
            check_leadership=self._check_leadership,
            on_published=self._writer.notify_published,
            clock=clock,
            retry_seconds=_RETRY_SECONDS,
            workers=self._publishers,
            share=limits.PUBLISH_SHARE if store.is_local else _PUBLISH_SHARE_REMOTE,
        )
        broker.publishing.publish_now = self._publish_now.set
        self._janitor = Janitor(
            store,
            self._partition_table,
            settings.janitor,
            clock=clock,
            open_table=open_table,
            finish_deletion=broker.topics.finish_deletion,
            settle_doubts=broker.topics.settle_doubts,
            settle_config=broker.topics.settle_config,
            workers=self._compactors,
            counts=self._upkeep,
            owns=self._owns_table,
            quiet_seconds=0.0 if store.is_local else UPKEEP_QUIET_REMOTE_SECONDS,
            is_controller=self._is_controller,
            removed_files=self._removed_files,
            is_short_of_space=self._is_short_of_space,
        )
        return broker

    def _on_flush(self, written: wal.WalObject, seconds: float) -> None:
        self._flushed_at = self._clock.monotonic()
        self._flushes.count(written, seconds)

    def _owns_table(self, topic: Topic) -> bool:
        """Returns whether this broker maintains the topic's table: one broker does."""
        return topic.leaders[:1] == (self._leadership.broker,)

    def _is_short_of_space(self) -> bool:
        """Returns whether appends will soon be refused, or are."""
        free_bytes, free_inodes = self._store.free_bytes(), self._store.free_inodes()
        reserve_bytes = self.settings.writer.free_space_reserve_bytes
        has_bytes = free_bytes is None or free_bytes >= 2 * reserve_bytes
        return not has_bytes or (free_inodes is not None and free_inodes < _FREE_INODES_RESERVE)

    def _is_controller(self) -> bool:
        return self._meta.current.controller == self._leadership.broker

    def _new_publish_process(self) -> PublishProcess | None:
        """Returns the publishing process, which starts with work for it; None if none is wanted."""
        is_possible = self.kind is BrokerKind.STANDING and isinstance(self._store, LocalStore)
        if self.settings.publisher.process == "off" or not is_possible:
            return None
        start = functools.partial(WorkerProcess, self._store.uri)
        return PublishProcess(
            self._hot,
            start,
            clock=self._clock,
            interval_seconds=self.settings.publisher.interval_seconds,
        )

    def _check_leadership(self) -> None:
        """Raises `BrokerFenced` where a newer broker has taken over."""
        takeover.check_leadership(self._meta.reload(), self._leadership)

    def _start_thread(self, name: str, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run_guarded, args=(loop,), name=f"sparklog-{name}")
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def _run_guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._on_failure(error)

    @property
    def kafka_address(self) -> str:
        """The address advertised to Kafka clients; empty without a Kafka listener."""
        return self._kafka.address if self._kafka is not None else ""

    @property
    def metrics_address(self) -> str:
        """The address of the HTTP port for metrics; empty without one."""
        return self._metrics_listener.address if self._metrics_listener is not None else ""

    # -------------------------------------------------------------------------- loops

    def _publish_loop(self) -> None:
        interval_seconds = self.settings.publisher.interval_seconds
        while not self._stopping.is_set():
            waiting = self._partition_table.backlog.waiting_objects
            self._publish_now.wait(publish_pause_seconds(waiting, interval_seconds))
            self._publish_now.clear()
            self._publishing.tick()

    def _wal_loop(self) -> None:
        self._repeat("the write-ahead log's cleaning", _WAL_TICK_SECONDS, self._clean_wal)

    def _clean_wal(self) -> None:
        run_each((self._wal_cleaner.tick, self._carry))

    def _carry(self) -> None:
        pending = self._wal_cleaner.carry()
        if pending is not None:
            self._writer.wait(pending)

    def _repeat(
        self,
        what: str,
        seconds: float | Callable[[], float],
        work: Callable[[], None],
        *,
        wake: threading.Event | None = None,
    ) -> None:
        """Repeats `work`, also after errors, except those that end the broker.

        `wake`: set where the next repetition is due before `seconds` have passed.
        """
        backoff, failures = RetrySchedule(self._clock, first_seconds=_RETRY_SECONDS), FailureLog()
        due = wake or self._stopping
        while True:
            due.wait(seconds() if callable(seconds) else seconds)
            if self._stopping.is_set():
                return
            if wake is not None:
                wake.clear()
            if backoff.is_waiting(what):
                continue
            try:
                work()
            except ENDS_THE_BROKER:
                raise
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                if failures.is_new(what, str(error)):
                    _log.warning(f"{what} waits", reason=str(error))
            except Exception as error:
                reason = str(error) or repr(error)
                if failures.is_new(what, reason):
                    _log.error(f"{what} failed", reason=reason)
                backoff.failed(what)
            else:
                backoff.succeeded(what)
                if failures.recovered(what):
                    _log.info(f"{what} works again")

    def _groups_loop(self, groups: Coordinator) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    groups.tick(_GROUPS_TICK_SECONDS)
                except ENDS_THE_BROKER:
                    raise
                except Exception as error:
                    _log.error("an event of a group failed", reason=str(error) or repr(error))
                    self._stopping.wait(_GROUPS_TICK_SECONDS)
        finally:
            groups.close()

    def _janitor_loop(self) -> None:
        self._repeat(
            "the tables' maintenance",
            self.settings.janitor.interval_seconds,
            lambda: self._janitor.tick(should_stop=self._stopping.is_set),
        )

    def _check_known_leadership(self) -> None:
        """Raises `BrokerFenced` if a newer broker has taken over, by metadata as young as a beat.

        A successor with our id writes the same heartbeat file.
        """
        heartbeat_seconds, broker = self._liveness.heartbeat_seconds, self._broker
        if broker is not None and not self._is_member:
            if broker.metadata.look_age_seconds > heartbeat_seconds:
                broker.metadata.follow()
        elif self._meta.look_age_seconds > heartbeat_seconds:
            self._meta.refresh()  # what a member has to do then must delay no heartbeat
        takeover.check_leadership(self._meta.current, self._leadership)

    def _look_for_refusals(self) -> None:
        """Notes states in which work would be refused, though none is tried."""
        if not self._heartbeats.is_writing:
            reason = "none could be written, and nothing else either"
            failure = self._heartbeats.failure  # None also while a write hangs
            self._refused.note(Work.HEARTBEATS, f"{reason}: {failure}" if failure else reason)
        try:
            self._writer.check_space()
        except errors.SparklogError as error:
            self._refused.note(Work.WRITES, str(error))

    def _heartbeat_loop(self) -> None:
        liveness = self._liveness
        busy_at, calls = time.monotonic(), -1
        while not self._stopping.wait(liveness.heartbeat_seconds):
            try:
                self._check_known_leadership()
                self._write_heartbeat()
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                self._refused.note(Work.HEARTBEATS, str(error) or repr(error))
            if self._broker is None or self._flight is None:
                continue
            self._refused.states()
            if self._broker.failure is not None:
                raise self._broker.failure
            if self._flight.calls != calls or self._flight.open_calls:
                busy_at, calls = time.monotonic(), self._flight.calls
            idle_seconds = time.monotonic() - busy_at
            is_idle = 0 < liveness.idle_exit_seconds < idle_seconds
            if is_idle and not self._requests_publication():
                reason = f"no client for {idle_seconds:.0f} s"
                self.stop_soon(reason)
                return

    def _requests_publication(self) -> bool:
        """Requests publication of all records that can be published; returns false if none wait.

        A large batch takes longer than a stop may, and the next broker would begin it again.
        """
        backlog = self._partition_table.backlog
        waiting = [each for each in backlog.waiting() if each.waiting and not each.held_back]
        for topic in waiting:
            backlog.request(topic)
        if waiting:
            self._publish_now.set()
        return bool(waiting)

    def _write_heartbeat(self, *, stopped: bool = False) -> None:
        self._heartbeats.write(stopped=stopped)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            flight=self.address,
            at_us=self._clock.now_us(),
            monotonic_seconds=self._clock.monotonic(),
            process=this_process(),
            kafka=self.kafka_address,
            metrics=self.metrics_address,
            version=VERSION,
            log=self.settings.log.file,
            newest_sequence=self._partition_table.applied_sequence if self._broker else -1,
            phase=self._phase,
            is_stuck=self._broker is not None and self._partition_table.is_takeover_stuck,
        )

    def _mark_stopped(self) -> None:
        """Marks the heartbeat as stopped, so that no broker waits for this one.

        Does nothing if a newer broker has taken over.
        """
        try:
            takeover.check_leadership(self._meta.refresh(), self._leadership)
            self._write_heartbeat(stopped=True)
        except errors.BrokerFenced:
            pass
        except Exception as error:
            _log.warning("stopped without marking the heartbeat", reason=str(error) or repr(error))

    # -------------------------------------------------------------------------- stopping

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Returns when the broker has stopped. Raises what stopped it, if it did so by itself."""
        stopped = self._stopped.wait(timeout_seconds)
        if stopped and self.failure is not None:
            raise self.failure
        return stopped

    def may_return(self) -> bool:
        """Returns whether this broker, which was fenced, may join its cluster in a new epoch.

        The others have found it dead, for example after a suspension, and have its partitions. It
        stays away where another process has taken its id over, or where a standing broker leads
        alone: both would take turns for ever. A broker that a program has started for itself gives
        way to it, as to any standing one. Returns once this broker has closed its ports.
        """
        self._stopped.wait()
        if self.kind is not BrokerKind.STANDING:
            return False
        try:
            metadata = self._meta.reload()
        except errors.Retriable:
            return True  # the next start finds out
        except errors.SparklogError:
            return False
        known = metadata.brokers.get(self._leadership.broker)
        controller = metadata.brokers.get(metadata.controller)
        if known is None or known.epoch != self._leadership.epoch or controller is None:
            return False
        return takeover.gives_way(controller, BrokerKind.STANDING) or (
            self._is_member and controller.is_member
        )

    def _on_failure(self, error: BaseException) -> None:
        if self._stopping.is_set():
            return
        error = self._with_successor(error)
        known, self.failure = self.failure, error
        if known is not None and str(known) == str(error):
            pass  # another thread has met and logged it
        elif isinstance(error, errors.BrokerFenced) and self.kind is BrokerKind.EMBEDDED:
            _log.warning("this program continues as a client", reason=str(error))
        else:
            _log.error("the broker stops", reason=str(error) or repr(error))
        if self._broker is not None:  # otherwise `start` is running, and meets the same error
            self._writer.fail(error)
            threading.Thread(target=self._stop_after_failure, name="sparklog-failed").start()

    def _with_successor(self, error: BaseException) -> BaseException:
        """Returns `BrokerFenced` with the successor, if another broker has replaced this one.

        The metadata name it, and a fence does not. A broker that was suspended for long enough
        finds no fence either: the successor has deleted its log, and `SyncFailed` says so.
        """
        if isinstance(error, ENDS_THE_BROKER):
            with contextlib.suppress(Exception):  # the broker must stop in any case
                metadata = self._meta.reload()
                try:
                    takeover.check_leadership(metadata, self._leadership)
                except errors.BrokerFenced as fenced:
                    return fenced
                if isinstance(error, errors.BrokerFenced):
                    return takeover.replaced(metadata, self._leadership)
        return error

    def _stop_after_failure(self) -> None:
        """Stops at once after a failure."""
        with self._stop_lock:
            if not self._stopped.is_set():
                self._stopping.set()
                self._finish(str(self.failure))

    def stop(self, reason: str = "stop was called", *, leaving: Collection[int] = ()) -> None:
        """Stops in order: refuses new records, publishes all, trims, and marks the heartbeat.

        `reason` is logged. A member gives its partitions to other members, except to `leaving`.
        """
        with self._stop_lock:
            if self._stopped.is_set() or self._broker is None:
                return
            _log.info("stopping", reason=reason, root=self._store.uri)
            self._is_serving = False
            self._drain(leaving)
            self._stopping.set()
            self._writer.close(errors.BrokerClosing(broker=self._leadership.broker))
            self._join_threads()
            try:
                self._publish_everything()
                self._wal_cleaner.checkpoint()
                self._wal_cleaner.tick()
            except Exception as error:
                _log.warning("stopped without publishing everything", reason=str(error))
            finally:
                self._finish(reason)

    def _accept_drains(self) -> None:
        """Lets an operator stop this broker, unless it belongs to a program."""
        if self._broker is not None and self.kind is not BrokerKind.EMBEDDED:
            self._broker.cluster_admin.stop = self.stop_soon

    def stop_soon(self, reason: str, *, leaving: Collection[int] = ()) -> None:
        """Stops in a thread of its own; for the arguments see `stop`."""
        stop = functools.partial(self.stop, reason=reason, leaving=leaving)
        threading.Thread(target=stop, name="sparklog-stop").start()

    def _drain(self, leaving: Collection[int]) -> None:
        """Gives the partitions of a member to others, which serve them at once."""
        if self._handovers is None or self._stopping.is_set():
            return
        self._phase = Phase.DRAINING
        with contextlib.suppress(Exception):  # a hint, for operators and for the other members
            self._write_heartbeat()
        if self._store.is_local and self._has_clients() and self._has_others(leaving):
            self._clock.sleep(limits.PREPARE_SECONDS)
        try:
            deadline = self._clock.monotonic() + limits.DRAIN_SECONDS
            given = self._handovers.drain(deadline, leaving=leaving)
        except Exception as error:
            _log.warning("stopped without giving all partitions away", reason=str(error))
        else:
            if given and self._has_clients():
                follow_seconds = 0.0 if self._store.is_local else FOLLOW_REMOTE_SECONDS
                self._clock.sleep(REDIRECT_SECONDS + follow_seconds)

    def _has_others(self, leaving: Collection[int]) -> bool:
        """Returns whether another member is up that continues when this broker and those stop."""
        members = self._broker.members() if self._broker is not None else {}
        return bool(members.keys() - {self._leadership.broker, *leaving})

    def _has_clients(self) -> bool:
        """Returns whether a client is connected whose requests have to be redirected.

        Each request is answered with the new leader of its partition. If the connection were closed
        instead, a client would ask any other member for the leaders, and believe one that does not
        know of the change yet.
        """
        return (self._kafka is not None and self._kafka.connection_count > 0) or (
            self._flight is not None and self._flight.open_calls > 0
        )

    def _join_threads(self) -> None:
        if self._groups is not None:
            self._groups.wake()
        self._publish_now.set()
        self._follow_now.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def crash(self) -> None:
        """Ends as a killed process does, for tests.

        Connections are cut, so no client learns the outcome of its requests. Nothing is published,
        and the heartbeat is not marked as stopped.
        """
        with self._stop_lock:
            if self._stopped.is_set() or self._broker is None:
                return
            self._stopping.set()
            self.cut_connections()
            self._close_listeners()
            self._join_threads()
            self._close_pools()
            self._stopped.set()

    def cut_connections(self) -> None:
        """Cuts the connections of all clients, which may connect again; for tests."""
        for listener in (self._kafka, self._flight):
            if listener is not None:
                listener.cut_connections()

    def _finish(self, reason: str) -> None:
        try:
            self._mark_stopped()
            self._close()
            _log.info("stopped", reason=reason, root=self._store.uri)
        finally:
            # Last: the process may end as soon as it is set, and take this thread with it.
            self._stopped.set()

    def _close(self) -> None:
        self._close_listeners()
        self._close_pools()

    def _close_pools(self) -> None:
        self._compactors.shutdown()
        self._publishers.shutdown()  # their work uses the other pool
        self._pool.shutdown()
        if self._publish_process is not None:
            self._publish_process.close()

    def _close_listeners(self) -> None:
        if self._broker is not None:
            self._broker.close()
            self._appender.close()
        for listener in (self._kafka, self._flight, self._metrics):
            if listener is not None:
                listener.close()
        self._close_ports()

    def _close_ports(self) -> None:
        for each in self._ports():
            each.close()

    def _publish_everything(self) -> None:
        self._publishing.publish_everything(self._clock.monotonic() + limits.STOP_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# ------------------------------------------------------------------------------ publishing


def publish_pause_seconds(waiting: int, interval_seconds: float) -> float:
    """Returns the time until the next look for topics to publish, of which so many wait now."""
    idle_seconds = min(interval_seconds / 10, _PUBLISH_IDLE_SECONDS)
    return _PUBLISH_TICK_SECONDS if waiting else max(idle_seconds, _PUBLISH_TICK_SECONDS)


# ------------------------------------------------------------------------------ addresses


def _advertised(advertised: str, listen: str) -> str:
    """Returns the address for clients; port 0 of `advertised` means the port that was bound."""
    host, _, port = advertised.rpartition(":")
    return f"{host}:{ports.port_of(listen)}" if port == "0" else advertised or listen


# ------------------------------------------------------------------------------ the Kafka listener


def _check_installed(settings: BrokerSettings) -> None:
    """Raises `NotInstalled` where a listener is wanted and its packages are missing."""
    for what, listen, packages, without in (
        ("the Kafka listener", settings.kafka.listen, KAFKA_PACKAGES, "--kafka ''"),
        ("the port for metrics", settings.metrics.listen, METRICS_PACKAGES, 'metrics.listen = ""'),
    ):
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if listen and missing:
            raise errors.NotInstalled(
                what=f"{what} at {listen}",
                missing=", ".join(missing),
                hint=f"pip install 'sparklog[broker]', or start the broker without it by {without}",
            )


@functools.cache
def _compile_loops() -> None:
    """Loads or compiles the loops over Kafka's records, before the first client needs them."""
    began = time.monotonic()
    slow = threading.Timer(
        _SLOW_SECONDS,
        lambda: _log.info(
            "loading the loops over Kafka's records; compiling them takes some seconds, once per"
            " machine"
        ),
    )
    slow.daemon = True
    slow.start()
    try:
        from sparklog.formats import kernel_cache, record_batch, record_kernels

        unsaved = record_batch.compile_loops()
    finally:
        slow.cancel()
    seconds = round(time.monotonic() - began, 1)
    folder = record_kernels.CACHE
    if folder is None or unsaved is not None:
        _log.warning(
            "the loops over Kafka's records cannot be kept, and are compiled at each start: set"
            " NUMBA_CACHE_DIR to a folder that this user can write",
            folder=str(folder),
            reason=str(unsaved) if unsaved is not None else "no folder can be written",
            seconds=seconds,
        )
    elif kernel_cache.is_temporary(folder):
        _log.warning(
            "the loops over Kafka's records are kept in a temporary folder, because neither the"
            " installation nor the user's cache can be written: set NUMBA_CACHE_DIR to another",
            folder=str(folder),
            seconds=seconds,
        )
    elif seconds >= _SLOW_SECONDS:
        _log.info("loaded the loops over Kafka's records", folder=str(folder), seconds=seconds)


def _kafka_server(
    broker: Broker,
    groups: Coordinator,
    listening: socket.socket,
    address: str,
    settings: KafkaSettings,
) -> KafkaListener:
    from sparklog.broker.kafka.listener import KafkaListener

    return KafkaListener(
        broker,
        groups,
        listening,
        address=address,
        request_max_bytes=settings.request_max_bytes,
        memory_bytes=settings.memory_bytes,
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )
