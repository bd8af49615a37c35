"""The agent starts a broker, runs its threads, and stops it in reverse order.

The heartbeat is the first thread to start: recovery can take longer than a broker without
heartbeats counts as alive. It also detects that a newer broker has taken over. The others follow
once the broker serves (`serving_loops.py`). An error that ends the writer stops the broker.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker import serving_loops
from sparklog.broker.access_control import AccessControl, AskWithCredentials
from sparklog.broker.assembly import (
    ClusterParts,
    Parts,
    Surroundings,
    assemble,
    cluster_parts,
    recent_bill,
    reconciler_of,
    sources_of,
)
from sparklog.broker.backoff import ENDS_THE_BROKER
from sparklog.broker.counts import UpkeepCounts
from sparklog.broker.failover.heartbeats import Heartbeats
from sparklog.broker.failover.reconciler import Reconciler
from sparklog.broker.flight.hooks import RequestHooks
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.idle_exit import IdleExit
from sparklog.broker.listening import Listeners, check_installed, compile_loops, ports_of
from sparklog.broker.log import recovery, takeover
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.loops import Loops
from sparklog.broker.metrics.collection import Collector, FlushCounts, Sources
from sparklog.broker.metrics.overview import BrokerOverview
from sparklog.broker.pools import Pools
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock, SystemClock
from sparklog.formats.values import derive
from sparklog.listeners import text_of
from sparklog.settings import BrokerSettings
from sparklog.storage import wal
from sparklog.storage.metadata.liveness import (
    Heartbeat,
    LeaderState,
    LeaderWatch,
    Phase,
)
from sparklog.storage.metadata.model import BrokerKind, BrokerRegistration
from sparklog.storage.metadata.processes import this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Purpose, PutUnresolved, Store, counted, open_store
from sparklog.storage.snapshot import WalKind
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.choice import choose
from sparklog.version import VERSION

REDIRECT_SECONDS = 1.0  # for which a broker still names the leaders of partitions it handed over

_log = structlog.get_logger("sparklog.broker")
_SWITCH_INTERVAL_SECONDS = 0.001
"""Python's default of 5 ms is too long for an ack that waits for the publisher to yield the GIL."""
_PAUSE_SECONDS = 0.001
"""A pause of the publisher between values that are slow to decode, in which an ack can end."""


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
        ask: AskWithCredentials | None = None,
    ) -> None:
        """Creates a broker without starting it.

        Args:
            settings: the broker's settings.
            store: the root's store; None: the one named in the settings.
            clock: None: the machine's clock.
            kind: how it is started; a standing broker takes over from the other kinds.
            take_over: replace the live leader of the root, whatever its kind.
            allow_non_empty: also create the root in a folder that contains other programs' files.
            watch: earlier observations of the leader; None: none.
            hooks: called for each request from a Flight client; for tests.
            ask: sends requests to other brokers. Without it, silent brokers count as dead, and
                other brokers' metrics are unknown.
        """
        self.settings = settings
        self.kind = kind
        self._take_over = take_over
        self._allow_non_empty = allow_non_empty
        self._store = counted(
            store if store is not None else open_store(settings.root, settings.storage),
            Purpose.METADATA,
        )
        self._clock = clock or SystemClock()
        self._liveness = settings.liveness.on(local=self._store.is_local)
        self._alone_seconds = settings.liveness.alone_seconds_on(local=self._store.is_local)
        self._is_member = settings.cluster.join and kind is BrokerKind.STANDING
        self._refused = RefusedWork(self._clock)
        self._access = AccessControl(
            settings, self._store, clock=self._clock, refused=self._refused
        )
        self._answers = self._access.answers(ask) if ask is not None else None
        self._watch = watch or self._watch_of(settings.id if self._is_member else None)
        self._leader_watch = self._watch_of(None)
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._publish_now = threading.Event()
        self._recovery_store = counted(self._store, Purpose.RECOVERY)
        self._histories = Histories(self._recovery_store, clock=self._clock)
        """Logs of other brokers, for the thread that follows the cluster."""
        self._follow_now = threading.Event()
        self._removed_files = RemovedFileRetention(settings.janitor.removed_file_kept_seconds)
        self._stop_lock = threading.Lock()
        """Held while the broker is being stopped."""
        self._ask_member = self._access.asking(ask) if ask is not None else None
        self._phase = Phase.STARTING
        self._recovered_at = -float("inf")
        """When the log was recovered, in monotonic seconds."""
        self._flushed_at = -float("inf")
        """When the last flush became durable, in monotonic seconds."""
        self._wal = ""
        """The kind of storage of the write-ahead log, and the reason for it."""
        self._pools = Pools(is_local=self._store.is_local)
        self._loops = Loops(self._clock, self._stopping, self._on_failure)
        self.listeners = Listeners(settings, hooks=hooks)
        self._parts: Parts | None = None
        """Set once the broker serves."""
        self._cluster: ClusterParts | None = None
        self._groups: Coordinator | None = None
        self._collect: Callable[[], Sequence[bytes]] | None = None
        """Returns the metrics as text; set once the broker serves."""
        self._sources: Sources | None = None
        """The sources of metrics; set once the broker serves."""
        self._is_serving = False
        """True while all listeners serve clients."""
        self._flushes, self._upkeep = FlushCounts(), UpkeepCounts()
        self.failure: BaseException | None = None
        """The error that stopped the broker, if it stopped on its own."""

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Takes over the root, recovers, and serves.

        Raises `BrokerAlive`, `NotARoot`, `RootNotEmpty`, `RootNotWritable`, `FormatTooNew`,
        `CorruptObject`, `MissingObject`, `ForeignTable`, `BrokerFenced`, `NotInstalled`, and
        `BadOption` if a listener's address is in use or does not belong to this machine, or if
        clients should log in and there are no users.
        """
        settings, store, clock = self.settings, self._store, self._clock
        began = clock.monotonic()
        check_installed(settings)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))
        derive.set_pause(functools.partial(time.sleep, _PAUSE_SECONDS))
        try:
            # Before the takeover, so that the root is unchanged if a port is in use.
            self.listeners.bind(self._ports_of_leader)
            self.address = self.listeners.flight_address
            if settings.kafka.listen and self._ports_of_leader():
                compile_loops()  # while the root's current leader still serves
            self._access.open(self._watch.metadata)
            self._leadership = self._acquire()
            self._access.follow_metadata(lambda: self._meta.current)
        except BaseException:
            self.listeners.close()
            self._access.close()
            raise
        self._heartbeats = Heartbeats(
            store,
            self._leadership,
            clock=clock,
            dead_after_seconds=self._liveness.dead_after_seconds,
            describe=self._heartbeat,
            wrote_at=lambda: self._flushed_at,
            check_leadership=self._check_known_leadership,
            refused=self._refused,
        )
        try:
            with contextlib.suppress(errors.Retriable, PutUnresolved):  # the loop writes the next
                self._heartbeats.write()
            # Recovery can take longer than a broker without heartbeats counts as alive.
            self._loops.start("heartbeat", self._heartbeat_loop)
            self._access.follow(self._loops)  # the wait for a predecessor may have been long
            leading_since = clock.monotonic()
            self._open_metrics(patience_seconds=None)
            self._start_serving()
            self._phase = Phase.SERVING
            if self.kind is not BrokerKind.EMBEDDED:  # its program stops it
                self.parts.broker.cluster_admin.stop = self.stop_soon
            with contextlib.suppress(errors.Retriable, PutUnresolved):
                self._heartbeats.write()  # now with the listeners' addresses
        except BaseException as error:
            self._stopping.set()
            self._mark_stopped()
            self._close()
            self._stopped.set()
            explained = takeover.explained(error, self._meta, self._leadership)
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

    def _acquire(self) -> Leadership:
        """Takes over the root in a new epoch. Raises what `takeover.acquire` raises."""
        self._meta = MetadataStore(self._store, clock=self._clock)

        def choose_log() -> WalKind:
            chosen = choose(self._store, self.settings.writer.log, clock=self._clock)
            kind, reason = chosen.kind.value, chosen.reason
            _log.info("storage of the write-ahead log", kind=kind, reason=reason)
            self._wal = f"{kind}: {reason}"
            return chosen.kind

        return takeover.acquire(
            self._store,
            self._meta,
            self.settings.id,
            BrokerRegistration(
                epoch=0,
                flight=self.address,
                membership=self.listeners.membership() if self._is_member else msgspec.UNSET,
                kind=self.kind,
                process=this_process(),
                dead_after_seconds=self._liveness.dead_after_seconds,
            ),
            clock=self._clock,
            take_over=self._take_over,
            allow_non_empty=self._allow_non_empty,
            watch=self._watch,
            watch_of=self._watch_of,
            choose_log=choose_log,
        )

    def _watch_of(self, broker: int | None) -> LeaderWatch:
        """Returns a watch on a broker of the root; None: on its controller."""
        return LeaderWatch(
            self._store,
            clock=self._clock,
            dead_after_seconds=self._liveness.dead_after_seconds,
            broker=broker,
            answers=self._answers,
        )

    def _ports_of_leader(self) -> set[int]:
        """Returns the ports of the brokers that this one replaces, except those known to be dead.

        Normally that is the root's leader. A member replaces the previous broker with its id, and a
        leader that is embedded or detached.
        """
        found = [self._watch.poll()]
        if self._is_member:
            leader = self._leader_watch.poll()
            if leader is not None and leader.leader.known.kind != BrokerKind.STANDING:
                found.append(leader)
        return ports_of(
            each.leader for each in found if each and each.state is not LeaderState.DEAD
        )

    def _start_serving(self) -> None:
        open_table = functools.partial(
            TopicTable,
            counted(self._store, Purpose.TABLES),
            clock=self._clock,
            removed_file_grace_seconds=self.settings.janitor.removed_file_grace_seconds,
            retention=self._removed_files,
        )
        store = self._recovery_store
        taken = takeover.take(store, self._meta, self._leadership, clock=self._clock)
        self._leadership = taken.leadership
        led_partitions = recovery.recover(store, taken, clock=self._clock, open_table=open_table)
        for topic in led_partitions.topics():
            if topic.refusal is not None:
                _log.error("cannot publish", topic=topic.name, reason=topic.refusal)
        given = self._surroundings()
        parts = assemble(given, led_partitions, open_table)
        # Before the first client can ask for a topic that another broker has just created.
        reconciler = reconciler_of(
            given,
            parts,
            taken.metadata,
            open_table,
            histories=self._histories,
            on_change=self._follow_now.set,
        )
        parts.writer.open()
        takeover.check_opened(self._meta, self._leadership)
        self._recovered_at = self._clock.monotonic()
        groups = self._open_listeners(given, parts)
        self._open_metrics(patience_seconds=self._liveness.dead_after_seconds)
        serving_loops.start_flushing(parts, self._loops)
        if self._is_member:  # before compiling: others already hand it partitions
            self._join_cluster(given, parts, reconciler)
        else:
            serving_loops.start_taking(reconciler, self._loops, wake=self._follow_now)
        if (kafka := self.listeners.kafka) is not None:
            compile_loops()  # while Flight clients are served, and before the backlog is published
            if self.failure is not None:  # a thread hit it, and closed the listeners
                raise self.failure
            kafka.start()
        self._groups = groups
        serving_loops.start_loops(given, parts, groups, self._loops)
        if parts.schemas is not None:
            parts.schemas.follow(self._loops)
        self.listeners.watch_certificate(self._loops)
        self._is_serving = True

    def _surroundings(self) -> Surroundings:
        def on_flush(written: wal.WalObject, seconds: float) -> None:
            self._flushed_at = self._clock.monotonic()
            self._flushes.count(written, seconds)

        return Surroundings(
            settings=self.settings,
            store=self._store,
            clock=self._clock,
            kind=self.kind,
            meta=self._meta,
            leadership=self._leadership,
            heartbeats=self._heartbeats,
            refused=self._refused,
            stopping=self._stopping,
            publish_now=self._publish_now,
            pools=self._pools,
            removed_files=self._removed_files,
            flushes=self._flushes,
            upkeep=self._upkeep,
            on_flush=on_flush,
        )

    def _open_listeners(self, given: Surroundings, parts: Parts) -> Coordinator:
        """Opens the Kafka and Flight listeners, and returns the group coordinator that they use."""
        broker, listeners = parts.broker, self.listeners
        # A broker that has just been replaced needs a moment to close its ports.
        patience_seconds = self._liveness.dead_after_seconds
        listeners.bind_all(patience_seconds=patience_seconds)
        groups = Coordinator(broker, settings=self.settings.groups, clock=self._clock)
        try:
            listeners.open_kafka(broker, groups, self._access, patience_seconds=patience_seconds)
            # Set before the Flight listener opens: its first client may ask for it.
            started_us = self._meta.current.brokers[self._leadership.broker].started_us
            broker.serving = listeners.info(
                self._leadership, kind=self.kind, started_us=started_us, wal=self._wal
            )
            broker.prove = self._heartbeats.prove
            broker.cluster_admin.answers = self._answers
            broker.security_version = lambda: self._access.watch.state.version
            self._refused.watch(
                self._heartbeats.note_if_silent,
                parts.writer.note_if_full,
                self._access.note_if_stale,
            )
            gate = self._access.gate(self._leadership, self.address)
            flight = listeners.open_flight(
                broker, groups, gate, self._access, patience_seconds=patience_seconds
            )
            self._parts = parts
        except BaseException:
            broker.close()  # waiting requests would keep the Kafka listener from closing
            raise
        if self.failure is not None:  # the heartbeat thread has found a successor
            raise self.failure
        bill = recent_bill(given)
        if bill is not None:
            broker.bill = bill.at_present
            serving_loops.start_sampling(bill, self._loops)
        self._sources = sources_of(
            given,
            parts,
            groups,
            kafka=listeners.kafka,
            flight=flight,
            authorization=self._access.authorization,
            quotas=self._access.quotas,
            budgets=lambda: [*broker.budgets(), *listeners.budgets(), *groups.budgets()],
            ask=self._ask_member,
            dead=lambda: self._cluster.controller.dead if self._cluster is not None else {},
            certificate=listeners.tls,
            bill=bill,
        )
        broker.collect_figures = BrokerOverview(self._sources).figures
        if listeners.has_metrics:
            from sparklog.broker.metrics.exposition import Exposition

            self._collect = Exposition(Collector(self._sources)).text
        return groups

    def _join_cluster(self, given: Surroundings, parts: Parts, reconciler: Reconciler) -> None:
        """Starts to follow the metadata and to watch the other members."""
        cluster = self._cluster = cluster_parts(
            given,
            parts,
            liveness=self._liveness,
            histories=self._histories,
            ask=self._ask_member,
        )
        serving_loops.start_following(
            given,
            parts,
            cluster,
            reconciler,
            self._loops,
            liveness=self._liveness,
            is_draining=lambda: self._phase is Phase.DRAINING,
            wake=self._follow_now,
        )

    def _open_metrics(self, *, patience_seconds: float | None) -> None:
        self.listeners.open_metrics(
            collect=lambda: self._collect() if self._collect is not None else None,
            is_healthy=lambda: self.failure is None,
            is_ready=lambda: self._is_serving and not self._stopping.is_set(),
            access=self._access,
            patience_seconds=patience_seconds,
        )

    @property
    def parts(self) -> Parts:
        """The parts of the broker, once it serves."""
        assert self._parts is not None, "the broker does not serve yet"
        return self._parts

    @property
    def cluster(self) -> ClusterParts:
        """The parts of a member of a cluster, once it serves."""
        assert self._cluster is not None, "the broker is not a serving member"
        return self._cluster

    @property
    def kafka_address(self) -> str:
        """The address of the first listener for Kafka clients; empty without one."""
        return self.listeners.kafka_address

    @property
    def metrics_address(self) -> str:
        """The address of the HTTP port for metrics, after its protocol; empty without one."""
        return self.listeners.metrics_address

    # -------------------------------------------------------------------------- heartbeats

    def _check_known_leadership(self) -> None:
        """Raises `BrokerFenced` if a newer broker has taken over.

        The metadata that it checks is at most a heartbeat interval old. A successor with our id
        writes the same heartbeat file.
        """
        heartbeat_seconds, parts = self._liveness.heartbeat_seconds, self._parts
        if parts is not None and not self._is_member:
            metadata = parts.broker.metadata
            if metadata.look_age_seconds > heartbeat_seconds:
                metadata.follow()
        elif self._meta.look_age_seconds > heartbeat_seconds:
            self._meta.refresh()  # a member's work on the changes must not delay a heartbeat
        takeover.check_leadership(self._meta.current, self._leadership)

    def _heartbeat_seconds(self) -> float:
        """Returns the time until the next heartbeat."""
        parts = self._parts
        is_alone = parts is not None and len(parts.broker.members.up()) <= 1
        return self._alone_seconds if is_alone else self._liveness.heartbeat_seconds

    def _heartbeat_loop(self) -> None:
        """Shows that this broker is alive, and checks whether it still should be."""
        idle = IdleExit(
            after_seconds=self._liveness.idle_exit_seconds,
            clock=self._clock,
            publish_all=self._publish_all,
            stop_soon=self.stop_soon,
        )
        while not self._stopping.wait(self._heartbeat_seconds()):
            try:
                self._check_known_leadership()
                self._heartbeats.write()
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                self._refused.note(Work.HEARTBEATS, str(error) or repr(error))
            parts, flight = self._parts, self.listeners.flight
            if parts is None or flight is None:
                continue
            self._refused.states()  # logs those that have begun or ended
            if parts.broker.failure is not None:
                raise parts.broker.failure
            if idle.tick(flight):
                return

    def _publish_all(self) -> bool:
        """Requests to publish all records that wait; returns whether there are any."""
        is_waiting = self.parts.led_partitions.backlog.request_all()
        if is_waiting:
            self._publish_now.set()
        return is_waiting

    def _heartbeat(self) -> Heartbeat:
        led = self._parts.led_partitions if self._parts is not None else None
        return Heartbeat(
            broker=self._leadership.broker,
            epoch=self._leadership.epoch,
            flight=self.address,
            at_us=self._clock.now_us(),
            monotonic_seconds=self._clock.monotonic(),
            process=this_process(),
            kafka=self.kafka_address,
            kafka_listeners=text_of(self.listeners.kafka_open),
            flight_listeners=self.listeners.flight_listeners_text,
            metrics=self.metrics_address,
            version=VERSION,
            log=self.settings.log.file,
            newest_sequence=led.applied_sequence if led is not None else -1,
            phase=self._phase,
            is_stuck=led is not None and led.is_takeover_stuck,
        )

    def _mark_stopped(self) -> None:
        """Marks the heartbeat as stopped, so that no other broker waits for this one.

        Does nothing if a newer broker has taken over.
        """
        try:
            takeover.check_leadership(self._meta.refresh(), self._leadership)
            self._heartbeats.write(stopped=True)
        except errors.BrokerFenced:
            pass
        except Exception as error:
            _log.warning("stopped without marking the heartbeat", reason=str(error) or repr(error))

    # -------------------------------------------------------------------------- stopping

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until the broker has stopped, and returns whether it has.

        Raises the error that stopped it, if it stopped on its own.
        """
        stopped = self._stopped.wait(timeout_seconds)
        if stopped and self.failure is not None:
            raise self.failure
        return stopped

    def may_return(self) -> bool:
        """Returns whether this fenced broker may rejoin its cluster in a new epoch.

        The other members have declared it dead, for example after a suspension, and have its
        partitions. It stays away if another process has taken over its id, or if a standing broker
        leads alone: the two would replace each other forever. An embedded or detached broker gives
        way to it, as to any standing one. Blocks until this broker has closed its ports.
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
        error = takeover.explained(error, self._meta, self._leadership)
        known, self.failure = self.failure, error
        if known is not None and str(known) == str(error):
            pass  # another thread hit the same error and logged it
        elif isinstance(error, errors.BrokerFenced) and self.kind is BrokerKind.EMBEDDED:
            _log.warning("this program continues as a client", reason=str(error))
        else:
            _log.error("the broker stops", reason=str(error) or repr(error))
        if self._parts is not None:  # otherwise `start` is running, and raises this error
            self._parts.writer.fail(error)
            threading.Thread(target=self._stop_after_failure, name="sparklog-failed").start()

    def _stop_after_failure(self) -> None:
        """Stops immediately after a failure."""
        with self._stop_lock:
            if not self._stopped.is_set():
                self._stopping.set()
                self._finish(str(self.failure))

    def stop(self, reason: str = "stop was called", *, leaving: Collection[int] = ()) -> None:
        """Shuts down cleanly: rejects new records, publishes all, trims, marks its heartbeat.

        `reason` is logged. A member hands its partitions over to other members, except `leaving`.
        """
        with self._stop_lock:
            parts = self._parts
            if self._stopped.is_set() or parts is None:
                return
            _log.info("stopping", reason=reason, root=self._store.uri)
            self._is_serving = False
            self._drain(leaving)
            self._stopping.set()
            parts.writer.close(errors.BrokerClosing(broker=self._leadership.broker))
            self._join_threads()
            try:
                parts.publishing.publish_everything(self._clock.monotonic() + limits.STOP_SECONDS)
                parts.wal_cleaner.checkpoint()
                parts.wal_cleaner.tick()
            except Exception as error:
                _log.warning("stopped without publishing everything", reason=str(error))
            finally:
                self._finish(reason)

    def stop_soon(self, reason: str, *, leaving: Collection[int] = ()) -> None:
        """Stops in its own thread; see `stop` for the arguments."""
        stop = functools.partial(self.stop, reason=reason, leaving=leaving)
        threading.Thread(target=stop, name="sparklog-stop").start()

    def _drain(self, leaving: Collection[int]) -> None:
        """Hands a member's partitions over to others, which serve them immediately."""
        if self._cluster is None or self._stopping.is_set():
            return
        self._phase = Phase.DRAINING
        with contextlib.suppress(Exception):  # a hint, for operators and for the other members
            self._heartbeats.write()
        has_clients = self.listeners.has_clients
        others = self.parts.broker.members.up().keys() - {self._leadership.broker, *leaving}
        if self._store.is_local and has_clients() and others:
            self._clock.sleep(limits.PREPARE_SECONDS)
        try:
            deadline = self._clock.monotonic() + limits.DRAIN_SECONDS
            given = self._cluster.handovers.drain(deadline, leaving=leaving)
        except Exception as error:
            _log.warning("stopped without handing over all partitions", reason=str(error))
        else:
            if given and has_clients():
                follow_seconds = (
                    0.0 if self._store.is_local else serving_loops.FOLLOW_REMOTE_SECONDS
                )
                self._clock.sleep(REDIRECT_SECONDS + follow_seconds)

    def _join_threads(self) -> None:
        if self._groups is not None:
            self._groups.wake()
        self._publish_now.set()
        self._follow_now.set()
        if self._parts is not None and self._parts.schemas is not None:
            self._parts.schemas.wake.set()
        self._loops.join()

    def crash(self) -> None:
        """Ends the way a killed process does; for tests.

        Connections are cut, so no client learns the outcome of its requests. Nothing is published,
        and the heartbeat is not marked as stopped.
        """
        with self._stop_lock:
            if self._stopped.is_set() or self._parts is None:
                return
            self._stopping.set()
            self.listeners.cut_connections()
            self._close_listeners()
            self._join_threads()
            self._close_pools()
            self._stopped.set()

    def _finish(self, reason: str) -> None:
        try:
            self._mark_stopped()
            self._close()
            _log.info("stopped", reason=reason, root=self._store.uri)
        finally:
            # Last: the process may exit as soon as it is set, and take this thread with it.
            self._stopped.set()

    def _close(self) -> None:
        self._close_listeners()
        self._close_pools()

    def _close_pools(self) -> None:
        self._access.close()
        self._pools.close()
        if self._parts is not None and self._parts.publish_process is not None:
            self._parts.publish_process.close()

    def _close_listeners(self) -> None:
        if self._parts is not None:
            self._parts.broker.close()
            self._parts.appender.close()
        self.listeners.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
