from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from sparklog import errors
from sparklog.broker import lease as leases
from sparklog.clock import Clock, ManualClock
from sparklog.storage.liveness import (
    Heartbeat,
    Leader,
    State,
    Watch,
    age,
    describe,
    find_live_broker,
    read_heartbeat,
    write_heartbeat,
)
from sparklog.storage.meta import BrokerKind, MetaStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.processes import Process, this_process

DEAD_AFTER_SECONDS = 5.0
ELSEWHERE = Process(host="elsewhere", pid=7, machine="another boot", started="1")
HOUR_US = 3_600_000_000


@pytest.fixture
def clock() -> ManualClock:
    """The observer's clock, which stands still."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty place."""
    return MemoryStore(clock)


class Peer:
    """A broker whose clocks are its own."""

    def __init__(
        self,
        store: MemoryStore,
        clock: ManualClock,
        *,
        broker: int = 1,
        process: Process = ELSEWHERE,
        skew_us: int = 0,
        dead_after_seconds: float = DEAD_AFTER_SECONDS,
        kind: BrokerKind = BrokerKind.STANDING,
    ) -> None:
        self._store = store
        self._clock = clock
        self._process = process
        self._skew_us = skew_us
        self.lease = leases.acquire(
            store,
            MetaStore(store, clock=clock),
            broker=broker,
            flight=f"h:{broker}",
            clock=clock,
            dead_after_seconds=dead_after_seconds,
            kind=kind,
            process=process,
            check_alive=False,
        )

    def beat(self, **changed: object) -> None:
        known: dict[str, object] = {
            "broker": self.lease.broker,
            "epoch": self.lease.epoch,
            "flight": f"h:{self.lease.broker}",
            "at_us": self._clock.now_us() + self._skew_us,
            "monotonic_seconds": self._clock.monotonic(),
            "process": msgspec.to_builtins(self._process),
        }
        write_heartbeat(self._store, msgspec.convert(known | changed, Heartbeat))


def watch(store: MemoryStore, clock: Clock) -> Watch:
    """An observer who has seen nothing yet."""
    return Watch(store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS)


def state(found: Watch) -> State:
    """What a look says of the leader, which exists."""
    sighting = found.look()
    assert sighting is not None
    return sighting.state


# ------------------------------------------------------------------------------ another machine


@pytest.mark.parametrize("skew_us", [-HOUR_US, -6_000_000, 0, 6_000_000, HOUR_US])
def test_clocks_of_two_hosts_are_not_compared(
    store: MemoryStore, clock: ManualClock, skew_us: int
) -> None:
    """However wrong a host's clock is, its broker is alive while it beats, and dead afterwards."""
    peer = Peer(store, clock, skew_us=skew_us)
    observer = watch(store, clock)
    peer.beat()
    assert state(observer) is State.UNKNOWN
    for _ in range(20):
        clock.advance(1.0)
        peer.beat()
        assert state(observer) is State.ALIVE
    clock.advance(DEAD_AFTER_SECONDS)
    assert state(observer) is State.ALIVE
    clock.advance(0.001)
    assert state(observer) is State.DEAD


def test_silence_is_watched_to_its_end(store: MemoryStore, clock: ManualClock) -> None:
    """A heartbeat that was left behind says nothing until it was watched for long enough."""
    Peer(store, clock).beat()
    clock.advance(3_600)
    told: list[tuple[int, float]] = []
    began = clock.monotonic()
    found = watch(store, clock).settle(
        waits=lambda leader, seconds: told.append((leader.broker, seconds))
    )
    assert found is not None
    assert found.state is State.DEAD
    assert DEAD_AFTER_SECONDS < clock.monotonic() - began < DEAD_AFTER_SECONDS + 0.5
    assert told == [(1, DEAD_AFTER_SECONDS)]


def test_a_broker_that_starts_is_alive_before_its_first_heartbeat(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A leader without a heartbeat of its own epoch is waited for."""
    old = Peer(store, clock)
    old.beat(stopped=True)
    new = Peer(store, clock)
    observer = watch(store, clock)
    assert state(observer) is State.UNKNOWN
    clock.advance(4.0)
    new.beat()
    assert state(observer) is State.ALIVE


def test_another_leader_is_watched_from_the_beginning(
    store: MemoryStore, clock: ManualClock
) -> None:
    """What was seen of a leader says nothing of the next one."""
    first = Peer(store, clock)
    first.beat()
    observer = watch(store, clock)
    state(observer)
    clock.advance(DEAD_AFTER_SECONDS + 1)
    assert state(observer) is State.DEAD
    Peer(store, clock, broker=2).beat()
    assert state(observer) is State.UNKNOWN


def test_a_leader_says_how_long_it_may_be_silent(store: MemoryStore, clock: ManualClock) -> None:
    """One that beats seldom by its own settings is given that time by all others."""
    Peer(store, clock, dead_after_seconds=60.0).beat()
    observer = watch(store, clock)
    state(observer)
    clock.advance(60.0)
    assert state(observer) is State.UNKNOWN
    clock.advance(0.1)
    assert state(observer) is State.DEAD


# ------------------------------------------------------------------------------ this machine


def test_on_one_machine_the_silence_is_known_at_once(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Processes of one machine share a monotonic clock, so nothing needs to be watched."""
    peer = Peer(store, clock, process=this_process(), skew_us=HOUR_US)
    peer.beat()
    assert state(watch(store, clock)) is State.ALIVE
    clock.advance(DEAD_AFTER_SECONDS)
    assert state(watch(store, clock)) is State.ALIVE
    clock.advance(0.001)
    assert state(watch(store, clock)) is State.DEAD


def test_a_killed_process_is_dead_at_once(store: MemoryStore, clock: ManualClock) -> None:
    """However fresh its heartbeat is, and whether or not it has written one."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    process = msgspec.structs.replace(this_process(), pid=child.pid, started="1")
    peer = Peer(store, clock, process=process)
    assert state(watch(store, clock)) is State.DEAD
    peer.beat()
    assert state(watch(store, clock)) is State.DEAD
    assert clock.monotonic() == 0.0


def test_a_broker_that_said_goodbye_is_not_waited_for(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A broker that has left in good order is dead at once, wherever it was."""
    Peer(store, clock).beat(stopped=True)
    assert state(watch(store, clock)) is State.DEAD


# ------------------------------------------------------------------------------ who leads


def test_only_the_leader_counts(store: MemoryStore, clock: ManualClock) -> None:
    """Heartbeats of brokers that were replaced, or are damaged, are in nobody's way."""
    replaced = Peer(store, clock, broker=1)
    leader = Peer(store, clock, broker=2)
    observer = watch(store, clock)
    for _ in range(2):
        replaced.beat()
        leader.beat()
        state(observer)
        clock.advance(1.0)
    assert find_live_broker(store, clock=clock, dead_after_seconds=5.0) is None  # it is silent
    store.put("heartbeats/2.json", b"torn")
    assert read_heartbeat(store, 2) is None
    assert state(observer) is State.DEAD


def test_an_empty_root_has_no_leader(store: MemoryStore, clock: ManualClock) -> None:
    """Where no broker has ever been, nothing is waited for."""
    assert watch(store, clock).look() is None
    assert find_live_broker(store, clock=clock, dead_after_seconds=5.0) is None
    assert clock.monotonic() == 0.0


def test_a_leader_in_words(store: MemoryStore, clock: ManualClock) -> None:
    """A message about a leader says which process it is, where, and for how long."""
    Peer(store, clock, kind=BrokerKind.EMBEDDED)
    clock.advance(185)
    leader = Leader.of(MetaStore(store, clock=clock).reload(), store)
    assert leader is not None
    assert describe(leader, now_us=clock.now_us()) == (
        "broker 1 (embedded, epoch 1), pid 7 on host elsewhere, Flight at h:1, started 3 min ago"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_ages_in_words(seconds: int, words: str) -> None:
    """Spans of time are told in the largest unit of which there are two."""
    assert age(seconds * 1_000_000) == words


# ------------------------------------------------------------------------------ taking over


def acquire(
    store: MemoryStore,
    clock: Clock,
    *,
    kind: BrokerKind = BrokerKind.STANDING,
    take_over: bool = False,
) -> leases.Lease:
    """The next epoch of broker 1."""
    return leases.acquire(
        store,
        MetaStore(store, clock=clock),
        broker=1,
        flight="h:new",
        clock=clock,
        dead_after_seconds=DEAD_AFTER_SECONDS,
        kind=kind,
        take_over=take_over,
    )


class Beating(ManualClock):
    """The observer's clock; while time passes, a peer goes on beating."""

    peer: Peer | None = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.peer is not None:
            self.peer.beat()


@pytest.mark.parametrize("holder", BrokerKind)
@pytest.mark.parametrize("comer", BrokerKind)
@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("skew_us", [-HOUR_US, HOUR_US])
def test_who_gives_way(holder: BrokerKind, comer: BrokerKind, alive: bool, skew_us: int) -> None:
    """A live broker is in the way of all but a standing one that meets an embedded or detached."""
    clock = Beating()
    store = MemoryStore(clock)
    peer = Peer(store, clock, kind=holder, skew_us=skew_us)
    peer.beat()
    clock.peer = peer if alive else None
    wins = not alive or (comer is BrokerKind.STANDING and holder is not BrokerKind.STANDING)
    if wins:
        assert acquire(store, clock, kind=comer).epoch == 2
    else:
        with pytest.raises(errors.BrokerAlive) as refused:
            acquire(store, clock, kind=comer)
        assert "pid 7 on host elsewhere, Flight at h:1" in str(refused.value)
        assert "--take-over" in str(refused.value)
        assert acquire(store, clock, kind=comer, take_over=True).epoch == 2


def test_the_replaced_one_is_told_by_what(store: MemoryStore, clock: ManualClock) -> None:
    """The error of a broker that was replaced names the process, host, address and epoch."""
    peer = Peer(store, clock)
    Peer(store, clock, process=Process(host="there", pid=9))
    with pytest.raises(errors.BrokerFenced) as fenced:
        leases.check_lease(MetaStore(store, clock=clock).reload(), peer.lease)
    assert str(fenced.value) == (
        "broker 1 (epoch 1) was replaced by broker 1 (standing, epoch 2), pid 9 on host there,"
        " Flight at h:1"
    )
    again = errors.revive(fenced.value.code, fenced.value.facts)
    assert str(again) == str(fenced.value)
