"""Liveness of the broker that leads a root. A hint only: safety never depends on it.

The newest metadata names the leader; no other broker can ack a record. The rules are:

- A leader whose last heartbeat says that it stopped, or whose process has ended on this machine, is
  dead immediately.
- On the leader's machine, the age of its last heartbeat is measured with the monotonic clock that
  both processes share.
- On any other machine, only a heartbeat that *changes* while it is watched proves that the leader
  is alive. The wall clocks of two hosts are never compared: to a clock that is a minute ahead,
  every broker would seem dead.
- A heartbeat of a later epoch overwrites that of the leader, which may still be alive. It means
  that the metadata is stale, not that the leader is silent.
- Silence is a reason to ask, not proof of death: a file system that is full, or frozen for a
  snapshot, stops heartbeats but not brokers. A silent broker that answers at its address is alive,
  and so is one that started on this machine within the last minute and has no port yet.

Safety comes from the fence alone (`broker/log/takeover.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from sparklog.clock import Clock
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.processes import Fate, Process, fate_of, is_of_this_machine
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import ObjectMissing, Store, in_parallel

STARTING_SECONDS = 60.0  # a running broker without heartbeats may be starting for this long

_LOOK_LOCAL_SECONDS: Final = 0.05
_LOOK_REMOTE_SECONDS: Final = 0.25
_ANSWER_SECONDS: Final = 1.0
"""The time for which a silent broker's answer is valid."""


class Phase(enum.StrEnum):
    """Phase of a live broker. Older releases report none, which means that the broker serves."""

    STARTING = "starting"
    """It is recovering, and does not serve clients yet."""
    SERVING = ""
    DRAINING = "draining"
    """It is handing over its partitions, and then stops."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`heartbeats/<broker>.json`: shows that a broker runs, and where. The broker overwrites it."""

    broker: int
    epoch: int
    flight: str
    at_us: int
    """Wall time of its host. Makes each heartbeat differ from the one before; never compared."""
    monotonic_seconds: float = 0.0
    """The time of the heartbeat on the monotonic clock of `process.machine`."""
    process: Process = Process()
    kafka: str = ""
    """Address of the first Kafka listener; empty if it is closed."""
    kafka_listeners: str = ""
    """All of them with their advertised addresses, as `sparklog.listeners` writes them."""
    flight_listeners: str = ""
    """All Flight listeners, in the same form, if there are several."""
    metrics: str = ""
    """Address of the HTTP port for metrics, as `sparklog.listeners` writes it; empty if it is
    closed."""
    version: str = ""
    log: str = ""
    """Path of the broker's log file; empty for standard error."""
    newest_sequence: int = -1
    stopped: bool = False
    """True if the broker was shut down cleanly; there is then no need to wait."""
    phase: str = Phase.SERVING
    """One of `Phase`. A hint for observers, and for members that hand over or take partitions."""
    is_stuck: bool = False
    """True if it cannot take over the partitions assigned to it."""
    nonces: tuple[str, ...] = ()
    """Newest nonces of programs that have asked which root it serves; see `identity`."""


_decoder = msgspec.json.Decoder(Heartbeat)


def write_heartbeat(store: Store, heartbeat: Heartbeat) -> None:
    """Overwrites the heartbeat. A `PutUnresolved` needs no handling: the next heartbeat follows."""
    store.put(_path(heartbeat.broker), msgspec.json.encode(heartbeat), durable=False)


def read_heartbeat(store: Store, broker: int) -> Heartbeat | None:
    """Returns the newest heartbeat of that broker; None if it is missing or unreadable."""
    try:
        return _decoder.decode(store.get(_path(broker)))
    except (ObjectMissing, msgspec.MsgspecError):
        return None


def heartbeat_time_us(store: Store, broker: int) -> int:
    """Returns when the broker's heartbeat was last put, by the store's clock; 0: never."""
    try:
        return store.stat(_path(broker)).modified_us
    except ObjectMissing:
        return 0


def read_heartbeats(store: Store) -> Mapping[int, Heartbeat]:
    """Returns the newest heartbeat of every broker of the root; skips unreadable ones."""
    ids = [int(name) for stat in store.list_after("heartbeats") if (name := _id_of(stat.name))]
    found = {broker: read_heartbeat(store, broker) for broker in ids}
    return {broker: heartbeat for broker, heartbeat in found.items() if heartbeat is not None}


class Readiness(enum.Enum):
    """Readiness of a broker, which is up in the metadata, to serve partitions assigned to it."""

    SERVES = enum.auto()
    WAITS = enum.auto()
    """It has not started to serve, or cannot take over partitions assigned to it before."""
    LEAVES = enum.auto()
    """It is stopping, or has stopped."""


AskReadiness: TypeAlias = Callable[[ClusterMetadata, Iterable[int]], Mapping[int, Readiness]]
"""Returns the readiness of each of the brokers. Raises the store's errors."""


def readiness(
    store: Store, metadata: ClusterMetadata, brokers: Iterable[int]
) -> dict[int, Readiness]:
    """Returns the readiness of each of the brokers, as far as it is known without waiting.

    Raises the store's errors.
    """
    leaders = in_parallel(store, lambda each: Leader.of(metadata, store, broker=each), brokers)
    return {each.broker: each.readiness for each in leaders if each is not None}


def _id_of(name: str) -> str:
    number, _, suffix = name.partition(".")
    return number if suffix == "json" and number.isdecimal() else ""


def _path(broker: int) -> str:
    return f"heartbeats/{broker}.json"


# ------------------------------------------------------------------------------ the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leader that the newest metadata names, and the newest heartbeat of its epoch."""

    broker: int
    known: BrokerRegistration
    heartbeat: Heartbeat | None = None
    is_replaced: bool = False
    """True if a heartbeat of a later epoch has overwritten the leader's."""

    @classmethod
    def of(
        cls, metadata: ClusterMetadata, store: Store, *, broker: int | None = None
    ) -> Leader | None:
        """Reads the leader's heartbeat. Returns None if no broker has ever led the root.

        `broker`: the id of a broker to check instead of the leader. If it has never registered,
        returns None.
        """
        broker = metadata.controller if broker is None else broker
        known = metadata.brokers.get(broker)
        if known is None:
            return None
        found = read_heartbeat(store, broker)
        epoch = found.epoch if found is not None else -1
        return cls(
            broker=broker,
            known=known,
            heartbeat=found if epoch == known.epoch else None,
            is_replaced=epoch > known.epoch,
        )

    @property
    def epoch(self) -> int:
        return self.known.epoch

    @property
    def flight(self) -> str:
        return self.known.flight

    @property
    def process(self) -> Process:
        return self.known.process

    @property
    def stopped(self) -> bool:
        """Returns whether its last heartbeat says that it was shut down."""
        return self.heartbeat is not None and self.heartbeat.stopped

    @property
    def has_ended(self) -> bool:
        """Returns whether it shut down cleanly, or its process has ended on this machine."""
        return self.stopped or fate_of(self.process) is Fate.GONE

    @property
    def is_starting(self) -> bool:
        """Returns whether its process runs on this machine, but has not opened its port yet."""
        is_early = self.heartbeat is None or self.heartbeat.phase == Phase.STARTING
        return is_early and fate_of(self.process) is Fate.RUNS

    @property
    def is_leaving(self) -> bool:
        """Returns whether it reports that it is stopping or has stopped, or its process ended."""
        is_draining = self.heartbeat is not None and self.heartbeat.phase == Phase.DRAINING
        return is_draining or self.has_ended

    @property
    def readiness(self) -> Readiness:
        if self.is_leaving:
            return Readiness.LEAVES
        found = self.heartbeat
        is_ready = found is not None and found.phase != Phase.STARTING and not found.is_stuck
        return Readiness.SERVES if is_ready else Readiness.WAITS


def describe(leader: Leader, *, now_us: int) -> str:
    """Describes the leader for messages: id, kind, epoch, process, address, age."""
    return describe_broker(leader.broker, leader.known, now_us=now_us)


def describe_broker(broker: int, known: BrokerRegistration, *, now_us: int | None = None) -> str:
    """Describes any registered broker, as `describe` does; without `now_us`, omits the age."""
    words = [f"broker {broker} ({known.kind}, epoch {known.epoch})"]
    if known.process.pid:
        words.append(f"pid {known.process.pid} on host {known.process.host}")
    words.append(f"Flight at {known.flight}")
    if known.started_us and now_us is not None:
        words.append(f"started {age(now_us - known.started_us)} ago")
    return ", ".join(words)


def age(since_us: int) -> str:
    """Formats a duration, such as `3 min`. A negative one, from two hosts' clocks, is `0 s`."""
    seconds = max(since_us, 0) / 1e6
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# ------------------------------------------------------------------------------ alive or dead


class LeaderState(enum.Enum):
    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()
    """Not watched for long enough to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Result of one poll of the leader."""

    leader: Leader
    state: LeaderState


Answers: TypeAlias = Callable[[Leader], bool]
"""Asks a broker at its address, and returns whether it answers as a broker of this root."""


class LeaderWatch:
    """Watches the leader of a root, and remembers when it last saw the heartbeat change.

    Args:
        store: the store of the root.
        clock: the observer's own clock; only its monotonic time is used.
        dead_after_seconds: a leader that is silent for longer is dead. If the leader has registered
            a longer time for itself, that one applies.
        broker: the id of the broker to watch, if it is not the leader.
        answers: asks a silent broker; None: silence means death.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        dead_after_seconds: float,
        broker: int | None = None,
        answers: Answers | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self.broker = broker
        self._dead_after_seconds = dead_after_seconds
        self._meta = MetadataStore(store, clock=clock)
        self._watched: tuple[int, int] | None = None
        self._seen: Heartbeat | None = None
        self._seen_at = 0.0
        self._has_changed = False
        self._answers = answers
        self._answered_at = -float("inf")

    @property
    def metadata(self) -> ClusterMetadata:
        """The newest version that the watch itself has read."""
        return self._meta.current

    def patience_seconds(self, leader: Leader) -> float:
        return max(self._dead_after_seconds, leader.known.dead_after_seconds)

    def poll(self, metadata: ClusterMetadata | None = None) -> Sighting | None:
        """Reads the heartbeat of the leader once. Returns None if no broker has ever led the root.

        `metadata`: the newest metadata that the caller knows; read from the store if not given, or
        if it proves to be stale. Raises the store's errors.
        """
        known = self._meta.refresh() if metadata is None else metadata
        while True:
            asked_at = self._clock.monotonic()
            leader = Leader.of(known, self._store, broker=self.broker)
            if leader is None or not leader.is_replaced:
                break
            newest = self._meta.refresh()
            if newest.version <= known.version:
                break  # no version of the metadata has the heartbeat's epoch
            known = newest
        if leader is None:
            return None
        self._observe(leader)
        state = state_of(
            leader,
            asked_at=asked_at,
            now=self._clock.monotonic(),
            patience_seconds=self.patience_seconds(leader),
            seen_at=self._seen_at,
            has_changed=self._has_changed,
        )
        if state is LeaderState.DEAD and not leader.has_ended and self._is_answered(leader):
            state = LeaderState.ALIVE
        return Sighting(leader=leader, state=state)

    def _is_answered(self, leader: Leader) -> bool:
        """Returns whether a silent broker has answered, now or a moment ago."""
        if self._answers is None:
            return False
        if self._clock.monotonic() - self._answered_at >= _ANSWER_SECONDS:
            # It runs on our machine, so we share a clock.
            started_seconds = (self._clock.now_us() - leader.known.started_us) / 1e6
            may_start = leader.is_starting and started_seconds < STARTING_SECONDS
            if not (may_start or self._answers(leader)):
                return False
            self._answered_at = self._clock.monotonic()
        return True

    def _observe(self, leader: Leader) -> None:
        watched = leader.broker, leader.epoch
        if watched != self._watched:
            self._watched, self._has_changed = watched, False
            self._answered_at = -float("inf")
        elif leader.heartbeat in (None, self._seen):
            return  # an unreadable heartbeat is not a sign of life
        else:
            self._has_changed = True
        self._seen, self._seen_at = leader.heartbeat, self._clock.monotonic()

    def wait_for_state(
        self, metadata: ClusterMetadata | None = None, *, on_wait: Callable[[Leader, float], object]
    ) -> Sighting | None:
        """Polls until the leader is known to be alive or dead: for `patience_seconds` at most.

        If another broker replaces the leader during the wait, that one is watched for just as long.
        `metadata` is as in `poll`, and is used for the first poll only.

        `on_wait` is called once, with the leader and the maximum wait in seconds, if a wait is
        needed.
        """
        has_reported = False
        while True:
            found = self.poll(metadata)
            if found is None or found.state is not LeaderState.UNKNOWN:
                return found
            if not has_reported:
                on_wait(found.leader, self.patience_seconds(found.leader))
                has_reported = True
            self.pause()
            metadata = None

    def pause(self) -> None:
        """Waits between two polls."""
        is_local = self._store.is_local
        self._clock.sleep(_LOOK_LOCAL_SECONDS if is_local else _LOOK_REMOTE_SECONDS)


def state_of(
    leader: Leader,
    *,
    asked_at: float,
    now: float,
    patience_seconds: float,
    seen_at: float,
    has_changed: bool,
) -> LeaderState:
    """Decides whether the leader is alive.

    Args:
        leader: the leader with its newest heartbeat.
        asked_at: the observer's monotonic time, in seconds, just before the heartbeat was read. A
            slow answer, or a pause of the observer, does not count as silence of the leader.
        now: the observer's monotonic time after the heartbeat was read.
        patience_seconds: a leader that is silent for longer is dead.
        seen_at: the time since which the heartbeat has not changed, as far as it was watched.
        has_changed: whether the heartbeat changed while it was watched.
    """
    heartbeat = leader.heartbeat
    if leader.has_ended:
        return LeaderState.DEAD
    if (
        heartbeat is not None
        and is_of_this_machine(heartbeat.process)
        and heartbeat.monotonic_seconds <= now
    ):
        silent_seconds = asked_at - heartbeat.monotonic_seconds
        return LeaderState.ALIVE if silent_seconds <= patience_seconds else LeaderState.DEAD
    if asked_at - seen_at > patience_seconds:
        return LeaderState.DEAD
    return LeaderState.ALIVE if has_changed else LeaderState.UNKNOWN


def find_live_broker(
    store: Store, *, clock: Clock, dead_after_seconds: float
) -> tuple[int, str] | None:
    """Returns (id, Flight address) of the root's live broker, or None; may wait to find out."""
    watch = LeaderWatch(store, clock=clock, dead_after_seconds=dead_after_seconds)
    found = watch.wait_for_state(on_wait=lambda _leader, _seconds: None)
    if found is None or found.state is LeaderState.DEAD:
        return None
    return found.leader.broker, found.leader.flight
