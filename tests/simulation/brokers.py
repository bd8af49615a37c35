"""A broker: the real agent, with greenlets for threads and no sockets.

`Agent` starts, runs, fails and stops as it always does. Only its surroundings are not real: the
door is a task as well, `Broker.call` runs one request inside the broker, and the caller waits
outside, where an answer may be lost, or come after the caller has given up.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from sparklog import wire
from sparklog.broker import agent as agents
from sparklog.broker import lease as leases
from sparklog.broker import ports
from sparklog.broker.agent import Agent
from sparklog.broker.coordinator import Coordinator
from sparklog.broker.core import Core
from sparklog.broker.partitions import Ledger
from sparklog.broker.publisher import Publisher
from sparklog.broker.walkeeper import KeeperLimits
from sparklog.broker.writer import WriterLimits
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    HotTailSettings,
    JanitorSettings,
    KafkaSettings,
    LivenessSettings,
    PublisherSettings,
    WriterSettings,
)
from sparklog.storage.processes import Process as ProcessId
from tests.simulation.history import Place
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

REMOVED_FILE_GRACE_SECONDS = 0.5
ORPHAN_GRACE_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often every broker does what, in simulated seconds, and how much at once."""

    settings: BrokerSettings
    keeper: dict[str, Any]
    publisher: dict[str, Any]
    flush_max_entries: int

    @classmethod
    def draw(cls, chance: random.Random) -> Pace:
        commit_bytes = chance.choice([300, 1_000_000])
        settings = BrokerSettings(
            root="memory://simulation",
            flight=FlightSettings(listen="127.0.0.1:1"),
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
                orphan_grace_seconds=ORPHAN_GRACE_SECONDS,
                staging_abandoned_seconds=1.0,
                table_checkpoint_every=chance.choice([2, 5]),
            ),
            liveness=LivenessSettings(heartbeat_seconds=0.5, dead_after_seconds=2.0),
        )
        return cls(
            settings=settings,
            keeper={
                "checkpoint_every_objects": chance.choice([1, 3, 8]),
                "carry_after_seconds": chance.choice([0.2, 1.0, 300.0]),
                "carry_bytes": chance.choice([100, 1_000_000]),
            },
            publisher={
                "commit_bytes": commit_bytes,
                "file_bytes": chance.choice([1_000, 1_000_000]),
            },
            flush_max_entries=chance.choice([1, 6, 4_096]),
        )


def _settings(world: World, broker_id: int) -> BrokerSettings:
    settings = world.profile.pace.settings
    janitor = settings.janitor
    if world.profile.has_vacuum:
        # Neither enough files nor enough bytes for a merge.
        janitor = msgspec.structs.replace(
            janitor, compact_files=1_000_000, compact_target_bytes=1 << 40
        )
    return msgspec.structs.replace(settings, id=broker_id, janitor=janitor)


class Call:
    """A request on its way, and what was answered."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class Broker:
    """One process that starts a broker, and ends with it."""

    def __init__(self, world: World, *, name: str, broker_id: int, check_alive: bool) -> None:
        self.process = Process(world.scheduler, name)
        self.check_alive = check_alive
        self.lease: leases.Lease | None = None
        self.failure: Exception | None = None
        self.starts: dict[Place, int] = {}
        """Where it must take logs to start, at least: it was so before it began, or it said so."""
        self._world = world
        self._core: Core | None = None
        self._agent = Agent(
            _settings(world, broker_id),
            store=world.disk.view(self.process, world.faults),
            clock=self.process.clock,
        )
        world.scheduler.spawn(self.process, "main", self._main)

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def serving(self) -> bool:
        """Whether it has begun to; it may have ended since."""
        return self._core is not None

    @property
    def ledger(self) -> Ledger:
        return self._agent._ledger

    @property
    def core(self) -> Core:
        assert self._core is not None, "it does not serve yet"
        return self._core

    def _main(self) -> None:
        """What `run_broker` does."""
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

    def check_starts(self, who: str, info: wire.TopicInfo) -> None:
        """`who` was told this by the broker."""
        for each in info.partitions:
            place = info.topic_id, each.partition
            least = self.starts.get(place, 0)
            self._world.history.check_start(who, info.topic, place, each.start, least)
            self.starts[place] = each.start

    def serve(self, core: Core) -> None:
        """The door opens."""
        self._core = core

    def stop(self) -> None:
        """Leaves in good order, by a task of the broker's own."""
        self._world.scheduler.spawn(self.process, "leave", self._agent.stop)

    def call(self, what: str, body: Callable[[Core], Any], *, delay_seconds: float = 0.0) -> Call:
        """Runs `body` as a request in the broker; it begins when it arrives there."""
        call = Call(self)

        def run() -> None:
            if delay_seconds:
                self.process.clock.sleep(delay_seconds)
            try:
                call.result = body(self.core)
            except Exception as error:
                call.error = error
            call.done = True

        self._world.scheduler.spawn(self.process, what, run)
        return call


# ------------------------------------------------------------------------------ surroundings


class _Door:
    """Stands where the Flight door would."""

    calls = 0
    open_calls = 0

    def __init__(self, core: Core, _groups: Coordinator, _listen: str, **_bounds: object) -> None:
        _broker().serve(core)

    def close(self) -> None:
        """Requests are tasks of the process, and end with it."""


class _Pool:
    """Stands for `ThreadPoolExecutor`: every piece of work is a task of its own."""

    def __init__(self, _size: int, *, thread_name_prefix: str) -> None:
        self._name = thread_name_prefix

    def submit(self, work: Callable[..., Any], *args: Any) -> _Future:
        assert _world is not None
        return _Future(_world, functools.partial(work, *args), self._name)

    def shutdown(self) -> None:
        """Nobody hands in work any more."""


class _Future:
    """What becomes of work in a pool."""

    def __init__(self, world: World, work: Callable[[], Any], name: str) -> None:
        self._result: Any = None
        self._failure: BaseException | None = None
        self._work = work
        self._thread = world.scheduler.threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._failure = error

    def exception(self) -> BaseException | None:
        self._thread.join()
        return self._failure

    def result(self) -> Any:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result


def _this_process() -> ProcessId:
    """On a machine of its own: no broker may ask whether another's process is alive."""
    return ProcessId(host="a host of the simulation", machine=_broker().process.name)


_world: World | None = None


def _broker() -> Broker:
    """The broker whose task is running."""
    assert _world is not None
    current = _world.scheduler.current
    assert current is not None
    return _world.broker_of(current.process)


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The surroundings of all brokers of `world`."""
    global _world
    acquire, pace = leases.acquire, world.profile.pace

    def acquire_boldly(*args: Any, **kwargs: Any) -> leases.Lease:
        """Takes the root without a look at who is alive, if the broker was told to."""
        broker = _broker()
        broker.lease = acquire(*args, **kwargs, check_alive=broker.check_alive)
        return broker.lease

    replaced = {
        "FlightDoor": _Door,
        "ThreadPoolExecutor": _Pool,
        "this_process": _this_process,
        "KeeperLimits": functools.partial(KeeperLimits, **pace.keeper),
        "Publisher": functools.partial(Publisher, **pace.publisher),
        "WriterLimits": functools.partial(WriterLimits, flush_max_entries=pace.flush_max_entries),
        "_PUBLISH_TICK_SECONDS": 0.05,
        "_KEEP_TICK_SECONDS": 0.2,
        "_RETRY_SECONDS": 0.2,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(agents, name, value))
        stack.enter_context(mock.patch.object(ports, "check_free"))
        stack.enter_context(mock.patch.object(sys, "setswitchinterval"))
        stack.enter_context(mock.patch.object(leases, "acquire", acquire_boldly))
        _world = world
        try:
            yield
        finally:
            _world = None
