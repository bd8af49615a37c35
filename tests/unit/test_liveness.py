from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from sparklog import errors
from sparklog.broker.log import takeover
from sparklog.clock import Clock, ManualClock
from sparklog.storage.metadata.liveness import (
    STARTING_SECONDS,
    Heartbeat,
    Leader,
    LeaderState,
    LeaderWatch,
    Phase,
    age,
    describe,
    find_live_broker,
    read_heartbeat,
    read_heartbeats,
    write_heartbeat,
)
from sparklog.storage.metadata.model import BrokerKind, BrokerRegistration
from sparklog.storage.metadata.processes import Process, this_process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.objects.faults import NoFaults, Operation

DEAD_AFTER_SECONDS = 5.0
ELSEWHERE = Process(host="elsewhere", pid=7, machine="another boot", started="1")
HOUR_US = 3_600_000_000


class Peer:
    """A broker with its own clocks."""

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
        self.leadership = takeover.acquire(
            store,
            MetadataStore(store, clock=clock),
            broker,
            BrokerRegistration(
                epoch=0,
                flight=f"h:{broker}",
                kind=kind,
                process=process,
                dead_after_seconds=dead_after_seconds,
            ),
            clock=clock,
            check_alive=False,
        )

    def beat(self, **changed: object) -> None:
        known: dict[str, object] = {
            "broker": self.leadership.broker,
            "epoch": self.leadership.epoch,
            "flight": f"h:{self.leadership.broker}",
            "at_us": self._clock.now_us() + self._skew_us,
            "monotonic_seconds": self._clock.monotonic(),
            "process": msgspec.to_builtins(self._process),
        }
        write_heartbeat(self._store, msgspec.convert(known | changed, Heartbeat))


def test_other_files_among_the_heartbeats_are_ignored(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Only readable files named `<broker>.json` are heartbeats."""
    beat = Heartbeat(broker=7, epoch=1, flight="h:7", at_us=0)
    write_heartbeat(store, beat)
    for name in ("readme.json", "8.txt", "9", "10.json"):
        store.put(f"heartbeats/{name}", b"{}")
    assert read_heartbeats(store) == {7: beat}


def watch(store: MemoryStore, clock: Clock) -> LeaderWatch:
    """An observer that has seen nothing yet."""
    return LeaderWatch(store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS)


def state(found: LeaderWatch) -> LeaderState:
    """The state of the leader after one look."""
    sighting = found.poll()
    assert sighting is not None
    return sighting.state


# ------------------------------------------------------------------------------ silence


def answering(*replies: bool) -> tuple[Callable[[Leader], bool], list[int]]:
    """A broker that replies so, and the list of brokers that were asked."""
    left, asked = list(replies), list[int]()

    def answers(leader: Leader) -> bool:
        asked.append(leader.broker)
        return left.pop(0)

    return answers, asked


def test_a_silent_broker_that_answers_is_alive(store: MemoryStore, clock: ManualClock) -> None:
    """It is asked once a second while it is silent, and dead as soon as it does not answer."""
    peer = Peer(store, clock)
    answers, asked = answering(True, True, False)
    observer = LeaderWatch(
        store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS, answers=answers
    )
    peer.beat()
    assert state(observer) is LeaderState.UNKNOWN
    clock.advance(DEAD_AFTER_SECONDS + 0.1)
    for _ in range(4):
        assert state(observer) is LeaderState.ALIVE
        clock.advance(0.4)
    assert asked == [1, 1]
    clock.advance(1.0)
    assert state(observer) is LeaderState.DEAD
    assert asked == [1, 1, 1]


def test_a_broker_that_has_ended_is_not_asked(store: MemoryStore, clock: ManualClock) -> None:
    """A stop in good order is not silence."""
    Peer(store, clock).beat(stopped=True)
    answers, asked = answering()
    observer = LeaderWatch(
        store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS, answers=answers
    )
    assert state(observer) is LeaderState.DEAD
    assert asked == []


def test_a_silent_broker_that_starts_on_this_machine_is_alive(
    store: MemoryStore, clock: ManualClock
) -> None:
    """It has no port yet, so its process counts for a minute; then it has to answer."""
    Peer(store, clock, process=this_process()).beat(phase=Phase.STARTING)
    clock.advance(30.0)
    answers, asked = answering()
    for given, expected in ((answers, LeaderState.ALIVE), (None, LeaderState.DEAD)):
        observer = LeaderWatch(
            store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS, answers=given
        )
        assert state(observer) is expected
    assert asked == []
    clock.advance(STARTING_SECONDS)
    answers, asked = answering(False)
    observer = LeaderWatch(
        store, clock=clock, dead_after_seconds=DEAD_AFTER_SECONDS, answers=answers
    )
    assert state(observer) is LeaderState.DEAD
    assert asked == [1]


# ------------------------------------------------------------------------------ another machine


@pytest.mark.parametrize("skew_us", [-HOUR_US, -6_000_000, 0, 6_000_000, HOUR_US])
def test_clocks_of_two_hosts_are_not_compared(
    store: MemoryStore, clock: ManualClock, skew_us: int
) -> None:
    """A broker is alive while its heartbeat changes, however wrong its host's clock is."""
    peer = Peer(store, clock, skew_us=skew_us)
    observer = watch(store, clock)
    peer.beat()
    assert state(observer) is LeaderState.UNKNOWN
    for _ in range(20):
        clock.advance(1.0)
        peer.beat()
        assert state(observer) is LeaderState.ALIVE
    clock.advance(DEAD_AFTER_SECONDS)
    assert state(observer) is LeaderState.ALIVE
    clock.advance(0.001)
    assert state(observer) is LeaderState.DEAD


def test_silence_is_watched_to_its_end(store: MemoryStore, clock: ManualClock) -> None:
    """An old heartbeat proves nothing until it was watched for the whole patience."""
    Peer(store, clock).beat()
    clock.advance(3_600)
    waits: list[tuple[int, float]] = []
    began = clock.monotonic()
    found = watch(store, clock).wait_for_state(
        on_wait=lambda leader, seconds: waits.append((leader.broker, seconds))
    )
    assert found is not None
    assert found.state is LeaderState.DEAD
    assert DEAD_AFTER_SECONDS < clock.monotonic() - began < DEAD_AFTER_SECONDS + 0.5
    assert waits == [(1, DEAD_AFTER_SECONDS)]


def test_a_broker_that_starts_is_alive_before_its_first_heartbeat(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A leader without a heartbeat of its own epoch is waited for."""
    old = Peer(store, clock)
    old.beat(stopped=True)
    new = Peer(store, clock)
    observer = watch(store, clock)
    assert state(observer) is LeaderState.UNKNOWN
    clock.advance(4.0)
    new.beat()
    assert state(observer) is LeaderState.ALIVE


def test_another_leader_is_watched_from_the_beginning(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Observations of one leader do not count for the next one."""
    first = Peer(store, clock)
    first.beat()
    observer = watch(store, clock)
    state(observer)
    clock.advance(DEAD_AFTER_SECONDS + 1)
    assert state(observer) is LeaderState.DEAD
    Peer(store, clock, broker=2).beat()
    assert state(observer) is LeaderState.UNKNOWN


def test_a_leader_registers_how_long_it_may_be_silent(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A leader that registered a longer silence is given that time by every observer."""
    Peer(store, clock, dead_after_seconds=60.0).beat()
    observer = watch(store, clock)
    state(observer)
    clock.advance(60.0)
    assert state(observer) is LeaderState.UNKNOWN
    clock.advance(0.1)
    assert state(observer) is LeaderState.DEAD


class _Sleeper(NoFaults):
    """Delays the answer to one read of a heartbeat, while its broker continues."""

    def __init__(self, clock: ManualClock, peer: Peer) -> None:
        self._clock = clock
        self._peer = peer
        self.is_due = False

    def after(self, operation: Operation, path: str, /) -> None:
        if self.is_due and operation == "get" and path.startswith("heartbeats/"):
            self.is_due = False
            for _ in range(10):
                self._clock.advance(1.0)
                self._peer.beat()


@pytest.mark.parametrize("process", [ELSEWHERE, this_process()], ids=["elsewhere", "here"])
def test_an_observer_that_was_suspended_has_seen_no_silence(
    store: MemoryStore, clock: ManualClock, process: Process
) -> None:
    """A heartbeat that is judged late is judged by the time at which it was read."""
    peer = Peer(store, clock, process=process)
    sleeper = _Sleeper(clock, peer)
    observer = watch(store.view(sleeper), clock)
    peer.beat()
    state(observer)
    clock.advance(1.0)
    sleeper.is_due = True
    assert state(observer) is not LeaderState.DEAD
    clock.advance(1.0)
    assert state(observer) is LeaderState.ALIVE
    clock.advance(DEAD_AFTER_SECONDS + 0.1)
    assert state(observer) is LeaderState.DEAD


class _Replacer(NoFaults):
    """Starts a successor while an observer reads a heartbeat."""

    def __init__(self) -> None:
        self.comes: list[Callable[[], object]] = []

    def before(self, operation: Operation, path: str, /) -> None:
        if self.comes and operation == "get" and path.startswith("heartbeats/"):
            self.comes.pop()()


@pytest.mark.parametrize("process", [ELSEWHERE, this_process()], ids=["elsewhere", "here"])
def test_a_leader_whose_heartbeat_a_successor_has_overwritten_is_not_silent(
    store: MemoryStore, clock: ManualClock, process: Process
) -> None:
    """A heartbeat of a later epoch means that the metadata is old; the newest leader is judged."""
    peer = Peer(store, clock, process=process)
    replacer = _Replacer()
    observer = watch(store.view(replacer), clock)
    peer.beat()
    state(observer)
    clock.advance(DEAD_AFTER_SECONDS + 1.0)
    peer.beat()
    replacer.comes.append(lambda: Peer(store, clock).beat())
    found = observer.poll()
    assert found is not None
    assert (found.leader.epoch, found.state) == (2, LeaderState.UNKNOWN)


def test_a_heartbeat_of_an_unknown_epoch_causes_no_wait(
    store: MemoryStore, clock: ManualClock
) -> None:
    """If the metadata knows no later leader, the leader that it names counts as silent."""
    Peer(store, clock).beat(epoch=7)
    found = watch(store, clock).wait_for_state(on_wait=lambda _leader, _seconds: None)
    assert found is not None
    assert (found.leader.epoch, found.state) == (1, LeaderState.DEAD)


# ------------------------------------------------------------------------------ this machine


def test_on_one_machine_the_silence_is_known_at_once(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Processes of one machine share a monotonic clock, so the silence is known at once."""
    peer = Peer(store, clock, process=this_process(), skew_us=HOUR_US)
    peer.beat()
    assert state(watch(store, clock)) is LeaderState.ALIVE
    clock.advance(DEAD_AFTER_SECONDS)
    assert state(watch(store, clock)) is LeaderState.ALIVE
    clock.advance(0.001)
    assert state(watch(store, clock)) is LeaderState.DEAD


def test_a_killed_process_is_dead_at_once(store: MemoryStore, clock: ManualClock) -> None:
    """A killed process is dead, however fresh its heartbeat is, and even without one."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    process = msgspec.structs.replace(this_process(), pid=child.pid, started="1")
    peer = Peer(store, clock, process=process)
    assert state(watch(store, clock)) is LeaderState.DEAD
    peer.beat()
    assert state(watch(store, clock)) is LeaderState.DEAD
    assert clock.monotonic() == 0.0


def test_a_broker_that_was_shut_down_is_not_waited_for(
    store: MemoryStore, clock: ManualClock
) -> None:
    """A broker that was shut down in order is dead at once, on any machine."""
    Peer(store, clock).beat(stopped=True)
    assert state(watch(store, clock)) is LeaderState.DEAD


# ------------------------------------------------------------------------------ who leads


def test_only_the_leader_counts(store: MemoryStore, clock: ManualClock) -> None:
    """Heartbeats of replaced brokers, and damaged ones, are ignored."""
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
    assert state(observer) is LeaderState.DEAD


def test_an_empty_root_has_no_leader(store: MemoryStore, clock: ManualClock) -> None:
    """A root without any broker needs no wait."""
    assert watch(store, clock).poll() is None
    assert find_live_broker(store, clock=clock, dead_after_seconds=5.0) is None
    assert clock.monotonic() == 0.0


def test_a_leader_in_words(store: MemoryStore, clock: ManualClock) -> None:
    """The description names the process, its address, and how long it has run."""
    Peer(store, clock, kind=BrokerKind.EMBEDDED)
    clock.advance(185)
    leader = Leader.of(MetadataStore(store, clock=clock).reload(), store)
    assert leader is not None
    assert describe(leader, now_us=clock.now_us()) == (
        "broker 1 (embedded, epoch 1), pid 7 on host elsewhere, Flight at h:1, started 3 min ago"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_ages_in_words(seconds: int, words: str) -> None:
    """A span of time uses the largest unit of which it has at least two."""
    assert age(seconds * 1_000_000) == words


# ------------------------------------------------------------------------------ taking over


def acquire(
    store: MemoryStore,
    clock: Clock,
    *,
    kind: BrokerKind = BrokerKind.STANDING,
    take_over: bool = False,
) -> takeover.Leadership:
    """Registers the next epoch of broker 1."""
    return takeover.acquire(
        store,
        MetadataStore(store, clock=clock),
        1,
        BrokerRegistration(
            epoch=0, flight="h:new", kind=kind, dead_after_seconds=DEAD_AFTER_SECONDS
        ),
        clock=clock,
        take_over=take_over,
    )


class Beating(ManualClock):
    """The observer's clock; a peer sends heartbeats while it sleeps."""

    peer: Peer | None = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.peer is not None:
            self.peer.beat()


@pytest.mark.parametrize("holder", BrokerKind)
@pytest.mark.parametrize("comer", BrokerKind)
@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("skew_us", [-HOUR_US, HOUR_US])
def test_which_leader_gives_way(
    holder: BrokerKind, comer: BrokerKind, alive: bool, skew_us: int
) -> None:
    """A live leader refuses all but a standing broker that meets an embedded or detached one."""
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


@pytest.mark.parametrize("broker", [1, 2])
@pytest.mark.parametrize("kind", BrokerKind)
def test_a_successor_that_comes_during_the_wait_is_found(broker: int, kind: BrokerKind) -> None:
    """A broker that waits for a leader sees its successor, and does not wait twice."""
    clock = Beating()
    store = MemoryStore(clock)
    Peer(store, clock).beat()  # which is silent from then on
    replacer = _Replacer()

    def come() -> None:
        clock.peer = Peer(store, clock, broker=broker, kind=kind)
        clock.peer.beat()

    replacer.comes = [come, lambda: None, lambda: None]
    view = store.view(replacer)
    if kind is not BrokerKind.STANDING:
        assert acquire(view, clock).epoch == (3 if broker == 1 else 2)
    else:
        with pytest.raises(errors.BrokerAlive) as refused:
            acquire(view, clock)
        assert f"Flight at h:{broker}" in str(refused.value)
        assert f"epoch {2 if broker == 1 else 1}" in str(refused.value)
    assert clock.monotonic() < DEAD_AFTER_SECONDS


def test_the_error_of_a_replaced_broker_names_its_successor(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The error of a replaced broker names the successor's process, host, address and epoch."""
    peer = Peer(store, clock)
    Peer(store, clock, process=Process(host="there", pid=9))
    with pytest.raises(errors.BrokerFenced) as fenced:
        takeover.check_leadership(MetadataStore(store, clock=clock).reload(), peer.leadership)
    assert str(fenced.value) == (
        "Broker 1 (epoch 1) was replaced by broker 1 (standing, epoch 2), pid 9 on host there,"
        " Flight at h:1, and stops."
    )
    again = errors.revive(fenced.value.code, fenced.value.facts)
    assert str(again) == str(fenced.value)
