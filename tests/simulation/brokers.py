"""A broker: the real agent, with greenlets for threads and no sockets.

`Agent` starts, runs, fails and stops as it always does. Only its surroundings are not real: the
listener is a task as well, `SimulatedBroker.call` runs one request inside the broker, and the
caller waits outside, where an answer may be lost, or come after the caller has given up.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from sparklog import errors
from sparklog.broker import ports
from sparklog.broker.agent import Agent
from sparklog.broker.assembly import Surroundings
from sparklog.broker.broker import Broker
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.log import publish_process, takeover
from sparklog.broker.log.backlog import Backlog
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.publish_process import PublishProcess
from sparklog.broker.log.publish_worker import Answer, PutAll, Worker, WorkerLost, WriteTogether
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.wal_cleaner import WalCleanerLimits
from sparklog.formats import flight_messages
from sparklog.settings import (
    BrokerSettings,
    ClusterSettings,
    FlightSettings,
    HotTailSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    RequestSettings,
    WriterSettings,
)
from sparklog.storage.metadata import liveness, observer
from sparklog.storage.metadata.liveness import Heartbeat, Leader, LeaderState, LeaderWatch, Sighting
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.observer import Observer
from sparklog.storage.metadata.processes import Fate
from sparklog.storage.metadata.processes import Process as ProcessId
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from tests.simulation import puts, scales
from tests.simulation.history import Place
from tests.simulation.scheduler import Process, Task

if TYPE_CHECKING:
    from tests.simulation.world import World

DEAD_AFTER_SECONDS = 2.0
REMOVED_FILE_GRACE_SECONDS = 0.5
_LITTLE = {"commit_bytes": 300, "file_bytes": 600}
"""Bytes of a staged batch per publisher turn: small, so that a large batch outlasts every grace
period.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Intervals and sizes of a broker's periodic work, in simulated seconds."""

    settings: BrokerSettings
    wal_cleaner: dict[str, Any]
    publisher: dict[str, Any]
    flush_max_entries: int
    flush_interval_seconds: float

    @classmethod
    def draw(cls, chance: random.Random) -> Pace:
        commit_bytes = chance.choice([300, 1_000_000])
        settings = BrokerSettings(
            root="memory://simulation",
            kafka=KafkaSettings(listen=""),
            writer=WriterSettings(
                linger_ms=chance.choice([0, 0, 10]),
                checkpoint_every_seconds=chance.choice([0.3, 1.0]),
                trim_grace_seconds=chance.choice([0.3, 1.0]),
                free_space_reserve_bytes=1,
            ),
            publisher=PublisherSettings(
                interval_seconds=chance.choice([0.02, 0.1, 0.5]), publish_bytes=commit_bytes
            ),
            hot_tail=HotTailSettings(bytes=chance.choice([0, 4_000, 1_000_000])),
            janitor=JanitorSettings(
                interval_seconds=chance.choice([0.2, 0.5]),
                compact_files=2,
                compact_target_bytes=chance.choice([5_000, 1_000_000]),
                removed_file_grace_seconds=REMOVED_FILE_GRACE_SECONDS,
                removed_file_kept_seconds=chance.choice([0.0, 0.0, 2.0]),
                table_checkpoint_every=chance.choice([2, 5]),
            ),
            liveness=LivenessSettings(heartbeat_seconds=0.5, dead_after_seconds=DEAD_AFTER_SECONDS),
        )
        return cls(
            settings=settings,
            wal_cleaner={
                "checkpoint_every_objects": chance.choice([1, 3, 8]),
                "carry_after_seconds": chance.choice([0.2, 1.0, 300.0]),
                "carry_bytes": chance.choice([100, 1_000_000]),
            },
            publisher={
                "commit_bytes": commit_bytes,
                # Some files in a commit, not hundreds: those are older than half the grace of
                # orphans, which is as short here as the commit, before all of them are written.
                "file_bytes": max(chance.choice([1_000, 1_000_000]), commit_bytes // 50),
            },
            flush_max_entries=chance.choice([1, 6, 4_096]),
            flush_interval_seconds=0.0,
        )


def _settings(world: World, broker_id: int, address: str) -> BrokerSettings:
    settings = world.profile.pace.settings
    janitor = msgspec.structs.replace(
        settings.janitor,
        orphan_grace_seconds=world.profile.orphan_grace_seconds,
        staging_abandoned_seconds=world.profile.abandoned_seconds,
    )
    if world.profile.cut_rate:
        # Something must be left for the other engine.
        janitor = msgspec.structs.replace(janitor, compact_files=6)
    # A root may have epochs of both kinds.
    has_segments = world.profile.segment_blocks and world.chance.random() < 0.8
    writer = msgspec.structs.replace(settings.writer, log="segments" if has_segments else "objects")
    if world.profile.is_heavy:
        writer = msgspec.structs.replace(
            writer,
            max_batch_bytes=scales.MAX_BATCH_BYTES,
            max_record_bytes=scales.MAX_BATCH_BYTES,
        )
    cluster = ClusterSettings(join=world.profile.is_cluster)
    publisher, requests = settings.publisher, RequestSettings(profile="fast")
    if world.profile.puts_per_second:
        publisher = msgspec.structs.replace(publisher, publish_bytes=puts.PUBLISH_BYTES)
        requests = RequestSettings(puts_per_second=world.profile.puts_per_second)
    return msgspec.structs.replace(
        settings,
        publisher=publisher,
        requests=requests,
        id=broker_id,
        flight=FlightSettings(listen=address),
        janitor=janitor,
        writer=writer,
        cluster=cluster,
    )


class Call:
    """A request in flight, and its answer."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self.broker = broker
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class SimulatedBroker:
    """One process that starts a broker, and ends with it."""

    def __init__(self, world: World, *, name: str, broker_id: int, check_alive: bool) -> None:
        self.process = Process(world.scheduler, name)
        self.check_alive = check_alive
        self.leadership: takeover.Leadership | None = None
        self.failure: Exception | None = None
        self._leaving: Task | None = None
        self.starts: dict[Place, int] = {}
        """Lower bounds of the log starts: as of before the broker started, or as it has reported.
        """
        self.stuck_until: float | None = None
        """Until when it cannot read logs of others; None: not drawn yet."""
        self._world = world
        if world.profile.is_skewed:
            world.faults.skew(self.process)
        self._core: Broker | None = None
        self._agent = Agent(
            _settings(world, broker_id, f"{name}:1"),
            store=world.disk.view(self.process, world.faults),
            clock=self.process.clock,
            ask=world.ask if world.profile.asks else None,
        )
        self.settings = self._agent.settings
        world.scheduler.spawn(self.process, "main", self._main)

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def is_leaving(self) -> bool:
        """True from the call of `stop` on: its threads end some time after that has returned."""
        return self._leaving is not None

    @property
    def serving(self) -> bool:
        """Returns true once the start has begun, also after it has ended."""
        return self._core is not None

    @property
    def led_partitions(self) -> LedPartitions:
        return self._agent.parts.led_partitions

    @property
    def core(self) -> Broker:
        assert self._core is not None, "it does not serve yet"
        return self._core

    def _main(self) -> None:
        """Runs the broker as `run_broker` does."""
        self.starts = dict(self._world.history.starts)
        try:
            self._agent.start()
            self._agent.wait()
        except Exception as error:
            self.failure = error
        self._world.disk.note("ends", repr(self.failure))
        self.process.alive = False
        if self.failure is not None:
            self._world.judge(self, self.failure)

    def check_starts(self, who: str, info: flight_messages.TopicInfo) -> None:
        """Records that the broker reported this to `who`."""
        for each in info.partitions:
            if each.end < 0:
                continue  # another broker leads it
            place = info.topic_id, each.partition
            least = self.starts.get(place, 0)
            if self._has_not_read_table_of(info.topic_id, each.partition):
                self._world.history.check_start(who, info.topic, place, each.start, 0)
                continue
            self._world.history.check_start(who, info.topic, place, each.start, least)
            self.starts[place] = each.start

    def _has_not_read_table_of(self, topic_id: str, partition: int) -> bool:
        """Returns whether the topic is held back since a takeover that did not find its table.

        Its log start is then as old as the predecessor's last checkpoint.
        """
        topic = self.led_partitions.by_id(topic_id)
        if topic is None or topic.held_back is None or partition not in topic.partitions:
            return False
        return topic.partitions[partition].since_version < 0

    def serve(self, core: Broker) -> None:
        """Opens the broker for calls."""
        self._core = core

    def stop(self) -> None:
        """Leaves in good order, by a task of the broker's own."""
        self._leaving = self._world.scheduler.spawn(self.process, "leave", self._agent.stop)

    def call(self, what: str, body: Callable[[Broker], Any], *, delay_seconds: float = 0.0) -> Call:
        """Runs `body` as a request in the broker; it begins when it arrives there."""
        call = Call(self)

        def run() -> None:
            if delay_seconds:
                self.process.clock.sleep(delay_seconds)
            try:
                call.result = self._answer(body)
            except Exception as error:
                call.error = error
            call.done = True

        self._world.scheduler.spawn(self.process, what, run)
        return call

    def _answer(self, body: Callable[[Broker], Any]) -> Any:
        """Does what a listener does: it looks at the metadata before it sends some refusals."""
        core = self.core
        looks = core.metadata.looks
        try:
            return body(core)
        except errors.SparklogError as error:
            if error.needs_proof:
                core.metadata.prove(looks)
            raise


# ------------------------------------------------------------------------------ publishing


class SimulatedWorker:
    """A publishing process: it dies, freezes and loses answers by itself, and may outlive its end.

    It also outlives its broker, until its work is done.
    """

    def __init__(self, world: World, broker: SimulatedBroker) -> None:
        self._world = world
        self._process = Process(world.scheduler, f"{broker.process}-worker{world.nonce()}")
        store = world.disk.view(self._process, world.faults)
        self._worker = Worker(store, clock=self._process.clock)
        self._process.skew_us = broker.process.skew_us  # one machine has one clock
        world.workers.append((broker.process, self._process))

    def is_ready(self) -> bool:
        if not self._process.alive:
            raise WorkerLost("it is dead")
        return True

    def ask(self, request: WriteTogether | PutAll) -> Answer:
        answers: list[Answer] = []
        scheduler = self._world.scheduler
        scheduler.spawn(
            self._process, "sparklog-publisher", lambda: answers.append(self._worker.serve(request))
        )
        seconds = publish_process.REQUEST_SECONDS
        if not scheduler.wait(lambda: bool(answers) or not self._process.alive, seconds):
            raise WorkerLost("it does not answer")
        if not answers or self._world.faults.loses_answer():
            raise WorkerLost("it is dead")
        return answers[0]

    def end(self) -> None:
        """Kills it; what it waits for at the disk may take effect for a while."""
        if self._world.chance.random() < 0.5:
            self._process.alive = False
            return

        def body() -> None:
            self._world.scheduler.sleep(self._world.faults.late_by_seconds())
            self._process.alive = False

        self._world.scheduler.spawn(self._world.disk.network, "late kill", body)


def _publish_process(given: Surroundings, hot: HotTail) -> PublishProcess | None:
    assert _world is not None
    if not _world.profile.has_worker:
        return None
    start = functools.partial(SimulatedWorker, _world, _broker())
    return PublishProcess(hot, start, clock=given.clock, objects=1, after_seconds=0.0)


# ------------------------------------------------------------------------------ surroundings


class _Door:
    """Replaces the Flight listener."""

    calls = 0
    open_calls = 1
    """A client is always connected: a member that stops lets the others read ahead."""

    def __init__(self, core: Broker, _groups: Coordinator, _at: None, **_bounds: object) -> None:
        _broker().serve(core)

    def close(self) -> None:
        """Requests are tasks of the process, and end with it."""


class _Listener:
    """Stands for a listener's socket: every broker has the address that it asks for."""

    def __init__(self, _option: str, listen: str) -> None:
        self.address = listen

    def try_bind(self) -> bool:
        return True

    def bind(self, *, patience_seconds: float) -> None:
        """It is bound."""

    def listen(self, *, patience_seconds: float) -> None:
        """Does nothing: no socket is needed."""

    def overlaps(self, _other: object) -> bool:
        return False

    def close(self) -> None:
        """There is nothing to give back."""


class _Pool:
    """Stands for `ThreadPoolExecutor`: every piece of work is a task of its own."""

    def __init__(self, _size: int, *, thread_name_prefix: str) -> None:
        self._name = thread_name_prefix

    def submit(self, work: Callable[..., Any], *args: Any) -> _Future:
        assert _world is not None
        return _Future(_world, functools.partial(work, *args), self._name)

    def shutdown(self) -> None:
        """Does nothing: no more work is submitted."""


class _PoolInTurn(contextlib.nullcontext[Any]):
    """Stands for a `ThreadPoolExecutor` whose work is short."""

    def __init__(self, _size: int) -> None:
        super().__init__(self)

    map = staticmethod(map)


class _Future:
    """The result of work in a pool."""

    def __init__(self, world: World, work: Callable[[], Any], name: str) -> None:
        self._result: Any = None
        self._failure: BaseException | None = None
        self._is_done = False
        self._work = work
        self._thread = world.scheduler.threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._failure = error
        self._is_done = True

    def done(self) -> bool:
        return self._is_done

    def exception(self) -> BaseException | None:
        self._thread.join()
        return self._failure

    def result(self) -> Any:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result


def _this_process() -> ProcessId:
    """On a machine of its own, or where the seed says so on one with all other brokers."""
    assert _world is not None
    broker = _broker()
    machine = "the machine" if _world.profile.is_one_machine else broker.process.name
    return ProcessId(host="a host", machine=machine, pid=_world.number_of(broker) + 1)


def _is_of_this_machine(process: ProcessId) -> bool:
    return process.machine == _this_process().machine


def _fate_of(process: ProcessId) -> Fate:
    if not process.pid or not _is_of_this_machine(process):
        return Fate.UNKNOWN
    assert _world is not None
    return Fate.RUNS if _world.broker_at(process.pid - 1).alive else Fate.GONE


_world: World | None = None


def _broker() -> SimulatedBroker:
    """The broker whose task is running."""
    assert _world is not None
    current = _world.scheduler.current
    assert current is not None
    return _world.broker_of(current.process)


_read_inherited = takeover.read_inherited


def _read_unless_stuck(*arguments: Any, **options: Any) -> takeover.Taken:
    """Reads logs of other brokers, which some brokers cannot do for some time."""
    assert _world is not None
    broker, rate = _broker(), _world.profile.stuck_rate
    if rate and broker.serving:
        if broker.stuck_until is None:
            is_stuck = _world.chance.random() < rate
            seconds = _world.chance.uniform(0.5, 15.0) if is_stuck else 0.0
            broker.stuck_until = _world.scheduler.now + seconds
        if _world.scheduler.now < broker.stuck_until:
            _world.faults.injected["stuck"] += 1
            raise errors.StorageUnavailable(operation="get", path="wal", reason="no permission")
    return _read_inherited(*arguments, **options)


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The surroundings of all brokers of `world`."""
    global _world
    acquire, poll, pace = takeover.acquire, LeaderWatch.poll, world.profile.pace

    publisher = _LITTLE if world.profile.has_large_batches else pace.publisher
    flush_max_entries = pace.flush_max_entries
    if world.profile.puts_per_second:
        publisher = {**publisher, "file_bytes": puts.PUBLISH_BYTES}
        flush_max_entries = puts.FLUSH_ENTRIES

    def acquire_boldly(*args: Any, **kwargs: Any) -> takeover.Leadership:
        """Takes the root without a liveness check, if the broker is configured to take over."""
        broker = _broker()
        broker.leadership = acquire(*args, **kwargs, check_alive=broker.check_alive)
        return broker.leadership

    read_heartbeat, asked_at = liveness.read_heartbeat, dict[Task | None, float]()

    def read_timed(store: Store, broker: int) -> Heartbeat | None:
        asked_at[world.scheduler.current] = world.scheduler.now
        return read_heartbeat(store, broker)

    def poll_checked(
        watch: LeaderWatch, metadata: ClusterMetadata | None = None
    ) -> Sighting | None:
        found = poll(watch, metadata)
        if found is not None and found.state is LeaderState.DEAD:
            world.check_dead(found.leader, asked_at[world.scheduler.current])
        return found

    dead, change, request = Observer.dead, MetadataStore.change, Backlog.request

    def request_noted(backlog: Backlog, topic: Topic) -> None:
        world.puts.note_request(_broker().process, topic.name)
        request(backlog, topic)

    def change_noted(store: MetadataStore, decide: Callable[..., Any]) -> ClusterMetadata:
        try:
            return change(store, decide)
        finally:
            world.note_metadata()

    def dead_checked(
        watching: Observer, metadata: ClusterMetadata, brokers: Collection[int]
    ) -> dict[int, int]:
        began = world.scheduler.now
        before = {key for key, each in watching._seen.items() if each.is_dead}
        found = dead(watching, metadata, brokers)
        for each in found:
            peer = Leader.of(metadata, world.disk.base, broker=each)
            assert peer is not None
            world.check_dead(peer, began, is_new=(each, peer.epoch) not in before)
        return found

    replaced = {
        "pools.ThreadPoolExecutor": _Pool,
        "agent.this_process": _this_process,
        "log.publish_loop._TICK_SECONDS": 0.05,
        "log.writer._PACED_SLEEP_SECONDS": (0.001, 0.1),
        "serving_loops._WAL_TICK_SECONDS": 0.2,
        "assembly.WalCleanerLimits": functools.partial(WalCleanerLimits, **pace.wal_cleaner),
        "assembly.Publisher": functools.partial(Publisher, **publisher),
        "assembly.WriterLimits": functools.partial(
            WriterLimits,
            flush_max_entries=flush_max_entries,
            flush_interval_seconds=pace.flush_interval_seconds,
        ),
        "assembly.publish_process": _publish_process,
        "listening.FlightListener": _Door,
        "loops.RETRY_SECONDS": 0.2,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(f"sparklog.broker.{name}", value))
        stack.enter_context(mock.patch.object(ports, "BoundPort", _Listener))
        stack.enter_context(mock.patch.object(sys, "setswitchinterval"))
        stack.enter_context(mock.patch.object(takeover, "acquire", acquire_boldly))
        stack.enter_context(mock.patch.object(takeover, "read_inherited", _read_unless_stuck))
        stack.enter_context(mock.patch("sparklog.broker.failover.reconciler.STUCK_SECONDS", 1.5))
        stack.enter_context(mock.patch("sparklog.broker.failover.reconciler.UNFIT_SECONDS", 10.0))
        stack.enter_context(mock.patch.object(liveness, "read_heartbeat", read_timed))
        stack.enter_context(mock.patch.object(LeaderWatch, "poll", poll_checked))
        stack.enter_context(mock.patch.object(liveness, "is_of_this_machine", _is_of_this_machine))
        stack.enter_context(mock.patch.object(liveness, "fate_of", _fate_of))
        stack.enter_context(mock.patch.object(observer, "ThreadPoolExecutor", _PoolInTurn))
        stack.enter_context(mock.patch.object(Observer, "dead", dead_checked))
        stack.enter_context(mock.patch.object(MetadataStore, "change", change_noted))
        stack.enter_context(mock.patch.object(Backlog, "request", request_noted))
        _world = world
        try:
            yield
        finally:
            _world = None
