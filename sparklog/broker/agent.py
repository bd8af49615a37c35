"""The agent: builds a broker in order, runs its threads, and takes it down in reverse.

Five threads beside the doors' own: the publisher, which has others write its larger files, the
WAL's keeper, the janitor, the groups' coordinator, and the heartbeat, which also notices that a
newer broker has taken over.
What ends the writer ends the broker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa
import structlog

from sparklog import errors, limits, wire
from sparklog.broker import lease as leases
from sparklog.broker import ports
from sparklog.broker.confirming import Confirmer
from sparklog.broker.coordinator import Coordinator
from sparklog.broker.core import Core, TopicDefaults
from sparklog.broker.flight import FlightDoor
from sparklog.broker.hot import HotTail
from sparklog.broker.janitor import Janitor
from sparklog.broker.logging import configure
from sparklog.broker.partitions import Ledger
from sparklog.broker.publisher import Publisher
from sparklog.broker.publishing import Publishing
from sparklog.broker.retrying import ENDS_THE_BROKER, Backoff
from sparklog.broker.streams import StreamBounds
from sparklog.broker.walkeeper import KeeperLimits, WalKeeper
from sparklog.broker.writer import Writer, WriterLimits
from sparklog.clock import Clock, SystemClock
from sparklog.settings import BrokerSettings, KafkaSettings
from sparklog.storage import wal
from sparklog.storage.liveness import Heartbeat, State, Watch, write_heartbeat
from sparklog.storage.meta import BrokerKind, MetaStore
from sparklog.storage.objects import PutUnresolved, Store, open_store
from sparklog.storage.processes import this_process
from sparklog.storage.table import Table
from sparklog.version import VERSION

if TYPE_CHECKING:
    from sparklog.broker.kafka.door import KafkaDoor

KAFKA_PACKAGES: Final = ("cramjam", "kio", "numba", "uvloop")
"""Those of the extra `broker`, which the Kafka listener needs."""

_log = structlog.get_logger("sparklog.broker")
_PUBLISH_TICK_SECONDS = 0.02
_KEEP_TICK_SECONDS = 0.5
_GROUPS_TICK_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_SLOW_SECONDS = 1.0
_LEAVING_SECONDS = 0.7
"""So long a broker may keep its ports after it has said that it has stopped."""
_SWITCH_INTERVAL_SECONDS = 0.001
"""Python's own is 5 ms: too long for an ack that waits while the publisher computes."""


class Agent:
    """One broker in this process. `start` returns when it serves; `stop` when it has left."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        kind: BrokerKind = BrokerKind.STANDING,
        take_over: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """A broker that has not started.

        Args:
            settings: all that it is told.
            store: of the root; None: as the settings say.
            clock: None: the machine's own.
            kind: how it is started: a standing broker takes over from the other kinds.
            take_over: replace the live leader of the root, whatever it is.
            watch: what has been seen of the leader so far; None: nothing.
        """
        self.settings = settings
        self.kind = kind
        self._take_over = take_over
        self._store = store if store is not None else open_store(settings.root, settings.storage)
        self._clock = clock or SystemClock()
        self._watch = watch or Watch(
            self._store,
            clock=self._clock,
            dead_after_seconds=settings.liveness.dead_after_seconds,
        )
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._publish_now = threading.Event()
        self._ending = threading.Lock()
        """Held by whoever takes the broker down."""
        self._beating = threading.Lock()
        self._said_goodbye = False
        self._threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(
            limits.PUBLISH_THREADS if self._store.is_local else limits.PUBLISH_THREADS_REMOTE,
            thread_name_prefix="sparklog-files",
        )
        self._core: Core | None = None
        self._door: FlightDoor | None = None
        self._kafka: KafkaDoor | None = None
        self.failure: BaseException | None = None
        """Why the broker stopped by itself."""

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Takes the root, recovers, and serves.

        Raises `BrokerAlive`, `RootNotWritable`, `FormatTooNew`, `CorruptObject`, `MissingObject`,
        `ForeignTable`, `BrokerFenced`, `NotInstalled`, and `BadOption` where an address to listen
        at is taken, or is none of this machine's.
        """
        settings, store, clock = self.settings, self._store, self._clock
        began = clock.monotonic()
        _check_installed(settings.kafka)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_SECONDS))
        listen = ports.with_port(settings.flight.listen)
        self.address = _advertised(settings.flight.advertised, listen)
        self._check_ports(listen)
        if settings.kafka.listen:
            _compile_loops()  # before the root is taken: whoever leads it until then goes on
        self._meta = MetaStore(store, clock=clock)
        self._lease = leases.acquire(
            store,
            self._meta,
            broker=settings.id,
            flight=self.address,
            clock=clock,
            dead_after_seconds=settings.liveness.dead_after_seconds,
            kind=self.kind,
            process=this_process(),
            take_over=self._take_over,
            watch=self._watch,
        )
        try:
            with contextlib.suppress(errors.Retriable, PutUnresolved):  # the next one follows
                self._beat()
            # Recovery may take longer than a silent broker is taken for alive.
            self._run("heartbeat", self._heartbeat_loop)
            leased_at = clock.monotonic()
            self._serve(listen)
            with contextlib.suppress(errors.Retriable, PutUnresolved):
                self._beat()  # where its listeners are
        except BaseException as error:
            self._stopping.set()
            self._say_goodbye()
            self._close_doors()
            explained = self._explained(error)
            if explained is not error:
                raise explained from error
            raise
        _log.info(
            "serving",
            version=VERSION,
            root=store.uri,
            broker=self._lease.broker,
            epoch=self._lease.epoch,
            kind=self.kind.value,
            flight=self.address,
            kafka=self.kafka_address or None,
            took_seconds=round(clock.monotonic() - began, 3),
            recovery_seconds=round(clock.monotonic() - leased_at, 3),
        )

    def _addresses(self, listen: str) -> list[tuple[str, str]]:
        """The setting and `host:port` of every listener."""
        found = [("flight.listen", listen), ("kafka.listen", self.settings.kafka.listen)]
        return [(option, address) for option, address in found if address]

    def _check_ports(self, listen: str) -> None:
        """Raises `BadOption` for a port that another program holds, while nothing is changed yet.

        A live broker of this root holds its own: whether it is replaced, the lease decides.
        """
        for option, address in self._addresses(listen):
            try:
                ports.check_free(option, address, patience_seconds=0.0)
            except errors.BadOption:
                if ports.port_of(address) in self._ports_of_leader():
                    continue
                ports.check_free(option, address, patience_seconds=_LEAVING_SECONDS)

    def _described(self) -> wire.BrokerInfo:
        process = this_process()
        return wire.BrokerInfo(
            broker=self._lease.broker,
            epoch=self._lease.epoch,
            address=self.address,
            kafka=self.kafka_address,
            kind=self.kind,
            version=VERSION,
            host=process.host,
            pid=process.pid,
            started_us=self._meta.current.brokers[self._lease.broker].started_us,
            log=self.settings.log.file,
        )

    def _ports_of_leader(self) -> set[int]:
        """Where the root's leader listens, unless it is known dead."""
        found = self._watch.look()
        if found is None or found.state is State.DEAD:
            return set()
        heartbeat = found.leader.heartbeat
        told = (found.leader.flight, heartbeat.kafka if heartbeat is not None else "")
        return {ports.port_of(address) for address in told if address}

    def _serve(self, listen: str) -> None:
        tables: dict[str, Table] = {}
        metadata = self._meta.current
        ledger = leases.recover(self._store, metadata, self._lease, tables, clock=self._clock)
        for topic in ledger.topics():
            if topic.held_back is not None:
                _log.error("cannot publish", topic=topic.name, reason=topic.held_back)
        core = self._build(ledger, tables)
        self._writer.open()
        for option, address in self._addresses(listen):
            # A broker that has just been replaced needs a moment to leave them.
            ports.check_free(
                option, address, patience_seconds=self.settings.liveness.dead_after_seconds
            )
        groups = Coordinator(core, settings=self.settings.groups, clock=self._clock)
        try:
            if self.settings.kafka.listen:
                self._kafka = _kafka_door(core, groups, self.settings.kafka)
                self._kafka.start()
            # Known before the Flight door opens: its first client may ask for it.
            core.serving = self._described()
            self._core, self._door = core, self._flight_door(core, groups, listen)
        except BaseException:
            core.close()  # or else those that wait in it would keep the Kafka door from closing
            raise
        if self.failure is not None:  # the heartbeat has found a successor
            raise self.failure
        self._run("publisher", self._publish_loop)
        self._run("wal-keeper", self._keep_loop)
        self._run("groups", lambda: self._coordinate(groups))
        if self.settings.janitor.enabled:
            self._run("janitor", self._janitor_loop)

    def _flight_door(self, core: Core, groups: Coordinator, listen: str) -> FlightDoor:
        return FlightDoor(
            core,
            groups,
            listen,
            bounds=StreamBounds(
                streams=self.settings.flight.max_streams,
                message_bytes=_message_bytes(self.settings.writer.max_batch_bytes),
            ),
        )

    def _build(self, ledger: Ledger, tables: dict[str, Table]) -> Core:
        settings, store, clock = self.settings, self._store, self._clock
        writer = settings.writer
        self._ledger = ledger
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
                staged_bytes=settings.publisher.staged_bytes,
                max_record_bytes=writer.max_record_bytes,
                max_batch_bytes=writer.max_batch_bytes,
                free_space_reserve_bytes=writer.free_space_reserve_bytes,
            ),
        )
        self._publisher = Publisher(
            store, self._ledger, self._hot, clock=clock, tables=tables.values(), pool=self._pool
        )
        self._keeper = WalKeeper(
            store,
            MetaStore(store, clock=clock),
            self._lease,
            self._appender,
            self._ledger,
            self._writer,
            confirm=Confirmer(store, self._ledger, self._publisher).confirm,
            clock=clock,
            bounds=KeeperLimits(
                checkpoint_every_seconds=writer.checkpoint_every_seconds,
                trim_grace_seconds=writer.trim_grace_seconds,
            ),
        )
        core = Core(
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
                refuse_replication=settings.topics.refuse_replication,
            ),
            settings=settings,
        )
        self._publishing = Publishing(
            self._publisher,
            self._ledger,
            settings=settings.publisher,
            check_lease=self._check_lease,
            published_more=self._writer.published_more,
            clock=clock,
            retry_seconds=_RETRY_SECONDS,
        )
        core.publish_now = self._publish_now.set
        self._janitor = Janitor(store, self._ledger, settings.janitor, clock=clock, bury=core.bury)
        return core

    def _check_lease(self) -> None:
        """Raises `BrokerFenced` where a newer broker has taken over."""
        leases.check_lease(MetaStore(self._store, clock=self._clock).reload(), self._lease)

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

    @property
    def kafka_address(self) -> str:
        """Where Kafka clients are told to come; empty where that door is closed."""
        return self._kafka.address if self._kafka is not None else ""

    # -------------------------------------------------------------------------- loops

    def _publish_loop(self) -> None:
        while not self._stopping.is_set():
            self._publish_now.wait(_PUBLISH_TICK_SECONDS)
            self._publish_now.clear()
            self._publishing.tick()

    def _keep_loop(self) -> None:
        self._repeat("the write-ahead log's upkeep", _KEEP_TICK_SECONDS, self._keep)

    def _keep(self) -> None:
        self._keeper.tick()
        ticket = self._keeper.carry()
        if ticket is not None:
            self._writer.wait(ticket)

    def _repeat(self, what: str, seconds: float, work: Callable[[], None]) -> None:
        """Does it time and again; what goes wrong is tried again, unless it ends the broker."""
        backoff = Backoff(self._clock, first_seconds=_RETRY_SECONDS)
        while not self._stopping.wait(seconds):
            if backoff.is_waiting(what):
                continue
            try:
                work()
            except ENDS_THE_BROKER:
                raise
            except (errors.Retriable, errors.OutcomeUnknown) as error:
                _log.warning(f"{what} waits", reason=str(error))
            except Exception as error:
                _log.error(f"{what} failed", reason=str(error) or repr(error))
                backoff.failed(what)
            else:
                backoff.succeeded(what)

    def _coordinate(self, groups: Coordinator) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    groups.tick(_GROUPS_TICK_SECONDS)
                except ENDS_THE_BROKER:
                    raise
                except Exception as error:
                    _log.error("a group is left alone", reason=str(error) or repr(error))
                    self._stopping.wait(_GROUPS_TICK_SECONDS)
        finally:
            groups.close()

    def _janitor_loop(self) -> None:
        self._repeat(
            "the tables' upkeep",
            self.settings.janitor.interval_seconds,
            lambda: self._janitor.tick(should_stop=self._stopping.is_set),
        )

    def _heartbeat_loop(self) -> None:
        liveness = self.settings.liveness
        watch = MetaStore(self._store, clock=self._clock)
        busy_at, calls = time.monotonic(), -1
        while not self._stopping.wait(liveness.heartbeat_seconds):
            try:
                # The file is our successor's as well, if it has our id.
                leases.check_lease(watch.reload(), self._lease)
                self._beat()
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                _log.warning("no heartbeat", reason=str(error) or repr(error))
            if self._core is None or self._door is None:
                continue
            if self._core.failure is not None:
                raise self._core.failure
            if self._door.calls != calls or self._door.open_calls:
                busy_at, calls = time.monotonic(), self._door.calls
            idle_seconds = time.monotonic() - busy_at
            if liveness.idle_exit_seconds and idle_seconds > liveness.idle_exit_seconds:
                reason = f"no client for {idle_seconds:.0f} s"
                leave = functools.partial(self.stop, reason=reason)
                threading.Thread(target=leave, name="sparklog-leave").start()
                return

    def _beat(self, *, stopped: bool = False) -> None:
        with self._beating:
            if self._said_goodbye:
                return  # a beat that comes late would call us alive
            self._said_goodbye = stopped
            write_heartbeat(
                self._store,
                Heartbeat(
                    broker=self._lease.broker,
                    epoch=self._lease.epoch,
                    flight=self.address,
                    at_us=self._clock.now_us(),
                    monotonic_seconds=self._clock.monotonic(),
                    process=this_process(),
                    kafka=self.kafka_address,
                    version=VERSION,
                    log=self.settings.log.file,
                    newest_sequence=self._ledger.applied_sequence if self._core else -1,
                    stopped=stopped,
                ),
            )

    def _say_goodbye(self) -> None:
        """Tells others not to wait for us, unless one of them has taken over."""
        try:
            leases.check_lease(self._meta.reload(), self._lease)
            self._beat(stopped=True)
        except errors.BrokerFenced:
            pass
        except Exception as error:
            _log.warning("left without a word", reason=str(error) or repr(error))

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
        error = self._explained(error)
        self.failure = error
        if isinstance(error, errors.BrokerFenced) and self.kind is BrokerKind.EMBEDDED:
            _log.warning("this program goes on as a client", reason=str(error))
        else:
            _log.error("the broker stops", reason=str(error) or repr(error))
        if self._core is not None:  # or else `start` is under way, and meets the same error
            self._writer.fail(error)
            threading.Thread(target=self._halt, name="sparklog-halt").start()

    def _explained(self, error: BaseException) -> BaseException:
        """A fence does not say whose it is; the metadata, which changed before it, does."""
        if isinstance(error, errors.BrokerFenced):
            with contextlib.suppress(Exception):  # whatever hinders it, the broker must stop
                try:
                    leases.check_lease(
                        MetaStore(self._store, clock=self._clock).reload(), self._lease
                    )
                except errors.BrokerFenced as named:
                    return named
        return error

    def _halt(self) -> None:
        """Leaves at once, for a reason that leaves no choice."""
        with self._ending:
            if not self._stopped.is_set():
                self._stopping.set()
                self._say_goodbye()
                self._close_doors()
                _log.info("stopped", reason=str(self.failure), root=self._store.uri)

    def stop(self, reason: str = "it was told to") -> None:
        """Leaves in good order: refuses new records, publishes all, trims, and says goodbye.

        `reason` is for the log.
        """
        with self._ending:
            if self._stopped.is_set() or self._core is None:
                return
            self._stopping.set()
            _log.info("stopping", reason=reason, root=self._store.uri)
            self._writer.close(errors.BrokerClosing(broker=self._lease.broker))
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
            try:
                self._publish_everything()
                self._keeper.checkpoint()
                self._keeper.tick()
            except Exception as error:
                _log.warning("left without publishing everything", reason=str(error))
            finally:
                self._say_goodbye()
                self._close_doors()
                _log.info("stopped", reason=reason, root=self._store.uri)

    def _close_doors(self) -> None:
        if self._core is not None:
            self._core.close()
        for door in (self._kafka, self._door):
            if door is not None:
                door.close()
        self._pool.shutdown()
        self._stopped.set()

    def _publish_everything(self) -> None:
        deadline = self._clock.monotonic() + limits.STOP_SECONDS
        for topic in self._ledger.topics():
            while any(each.unpublished for each in topic.partitions):
                if self._clock.monotonic() > deadline or not self._publishing.publish(topic):
                    break

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# ------------------------------------------------------------------------------ addresses


def _message_bytes(max_batch_bytes: int) -> int:
    """Bytes that a Flight client may send without a message being whole, by the largest batch."""
    return 2 * max_batch_bytes + limits.FLIGHT_WINDOW_BYTES


def _advertised(advertised: str, listen: str) -> str:
    """The address that clients are told; its port 0 stands for the port that was taken."""
    host, _, port = advertised.rpartition(":")
    return f"{host}:{ports.port_of(listen)}" if port == "0" else advertised or listen


# ------------------------------------------------------------------------------ the Kafka listener


def _check_installed(settings: KafkaSettings) -> None:
    """Raises `NotInstalled` where the Kafka listener is wanted and its packages are missing."""
    missing = [name for name in KAFKA_PACKAGES if importlib.util.find_spec(name) is None]
    if settings.listen and missing:
        raise errors.NotInstalled(
            what=f"the Kafka listener at {settings.listen}",
            missing=", ".join(missing),
            hint="pip install 'sparklog[broker]', or start the broker without it by --kafka ''",
        )


def _compile_loops() -> None:
    """Has the loops over Kafka's records compiled, which else the first client would wait for."""
    began = time.monotonic()
    slow = threading.Timer(
        _SLOW_SECONDS,
        lambda: _log.info(
            "compiling the loops over Kafka's records, which takes some seconds once per machine"
        ),
    )
    slow.daemon = True
    slow.start()
    try:
        from sparklog import loopcache, recordbatch, recordloops

        unkept = recordbatch.compile_loops()
    finally:
        slow.cancel()
    seconds = round(time.monotonic() - began, 1)
    folder = recordloops.CACHE
    if folder is None or unkept is not None:
        _log.warning(
            "the loops over Kafka's records cannot be kept, and are compiled at each start: set"
            " NUMBA_CACHE_DIR to a folder that this user can write",
            folder=str(folder),
            reason=str(unkept) if unkept is not None else "no folder can be written",
            seconds=seconds,
        )
    elif loopcache.is_temporary(folder):
        _log.warning(
            "the loops over Kafka's records are kept in a temporary folder, because neither the"
            " installation nor the user's cache can be written: set NUMBA_CACHE_DIR to another",
            folder=str(folder),
            seconds=seconds,
        )
    elif seconds >= _SLOW_SECONDS:
        _log.info("compiled the loops over Kafka's records", folder=str(folder), seconds=seconds)


def _kafka_door(core: Core, groups: Coordinator, settings: KafkaSettings) -> KafkaDoor:
    from sparklog.broker.kafka.door import KafkaDoor

    return KafkaDoor(
        core,
        groups,
        settings.listen,
        advertised=settings.advertised,
        request_max_bytes=settings.request_max_bytes,
        memory_bytes=settings.memory_bytes,
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )


def run_broker(settings: BrokerSettings, *, take_over: bool = False) -> None:
    """A broker as the whole process: says one line when it serves, leaves on SIGTERM or SIGINT.

    With `take_over` it replaces a live broker. Raises what `Agent.start` and `Agent.wait` raise.
    """
    log_file = configure(settings.log)
    _keep_pandas_out()
    # A broker that leaves when it is idle was started on demand, and gives way to any other.
    kind = BrokerKind.DETACHED if settings.liveness.idle_exit_seconds else BrokerKind.STANDING
    agent = Agent(settings, kind=kind, take_over=take_over)

    def leave(received: int, _frame: object) -> None:
        stop = functools.partial(agent.stop, reason=signal.Signals(received).name)
        threading.Thread(target=stop, name="sparklog-leave").start()

    agent.start()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, leave)
    if log_file is not None:
        log_file.take_stderr()
    kafka = f", Kafka at {agent.kafka_address}" if agent.kafka_address else ""
    served = f"sparklog broker {settings.id} serves {settings.root}{kafka}"
    _forget_what_stays()
    sys.stdout.write(f"{served}, Flight at {agent.address}\n")
    sys.stdout.flush()
    while not agent.wait(1.0):
        pass  # a wait without an end would keep signals from being handled


def _forget_what_stays() -> None:
    """Takes what is there by now out of the collector's sight: modules, for the most part.

    It would go over half a million objects that never go, for a tenth of a second, in the middle of
    somebody's ack.
    """
    gc.collect()
    gc.freeze()


def _keep_pandas_out() -> None:
    """Lets pyarrow find that there is no pandas, in this process that never needs it.

    Otherwise its first scalar imports pandas: a second of computing in the middle of somebody's
    ack, and 60 MB. pyarrow looks once.
    """
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas())
        pa.scalar(0)
        del sys.meta_path[0]


class _NoPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
