"""Liveness: whether the broker that leads a root still runs. A hint, never safety.

The newest metadata names the leader; nobody else can ack a record. Rules:

- A leader that said goodbye, or whose process has ended on this machine, is dead at once.
- On the machine of the leader, the time since its last heartbeat is read from the monotonic clock
  that both share.
- From any other machine a heartbeat counts when it *changes* while it is watched. Wall clocks of
  two hosts are never compared: one that is a minute ahead would take every broker for dead.

What safety there is comes from the fence alone (`broker/lease.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog.clock import Clock
from sparklog.storage.meta import Broker, Metadata, MetaStore
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.processes import Fate, Process, fate_of, is_of_this_machine

_LOOK_LOCAL_SECONDS: Final = 0.05
_LOOK_REMOTE_SECONDS: Final = 0.25


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`heartbeats/<broker>.json`, overwritten by its own broker: that it runs, and where."""

    broker: int
    epoch: int
    flight: str
    at_us: int
    """Wall time of its host: makes each heartbeat another one, and is compared with nothing."""
    monotonic_seconds: float = 0.0
    """The same on the monotonic clock of `process.machine`."""
    process: Process = Process()
    kafka: str = ""
    """Where Kafka's clients connect; empty while that door is closed."""
    version: str = ""
    log: str = ""
    """The file of its log lines; empty: standard error."""
    newest_sequence: int = -1
    stopped: bool = False
    """Left in good order: nothing needs to be waited for."""


def write_heartbeat(store: Store, heartbeat: Heartbeat) -> None:
    """Raises `PutUnresolved` too, which matters to nobody: the next one follows."""
    store.put(_path(heartbeat.broker), msgspec.json.encode(heartbeat), durable=False)


def read_heartbeat(store: Store, broker: int) -> Heartbeat | None:
    """The newest heartbeat of that broker; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(store.get(_path(broker)), type=Heartbeat)
    except (ObjectMissing, msgspec.MsgspecError):
        return None


def read_heartbeats(store: Store) -> Mapping[int, Heartbeat]:
    """The newest heartbeat of every broker that there ever was; unreadable ones are skipped."""
    ids = [int(name) for stat in store.list_after("heartbeats") if (name := _id_of(stat.name))]
    found = {broker: read_heartbeat(store, broker) for broker in ids}
    return {broker: heartbeat for broker, heartbeat in found.items() if heartbeat is not None}


def _id_of(name: str) -> str:
    number, _, suffix = name.partition(".")
    return number if suffix == "json" and number.isdecimal() else ""


def _path(broker: int) -> str:
    return f"heartbeats/{broker}.json"


# ------------------------------------------------------------------------------ the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The broker that the newest metadata names, and the newest heartbeat of its epoch."""

    broker: int
    known: Broker
    heartbeat: Heartbeat | None = None

    @classmethod
    def of(cls, metadata: Metadata, store: Store) -> Leader | None:
        """None where no broker has ever led the root."""
        known = metadata.brokers.get(metadata.controller)
        if known is None:
            return None
        found = read_heartbeat(store, metadata.controller)
        beats = found is not None and found.epoch == known.epoch
        return cls(broker=metadata.controller, known=known, heartbeat=found if beats else None)

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
        """Whether it has said goodbye."""
        return self.heartbeat is not None and self.heartbeat.stopped


def describe(leader: Leader, *, now_us: int) -> str:
    """The leader in words, for messages: id, kind, epoch, process, address, age."""
    return describe_broker(leader.broker, leader.known, now_us=now_us)


def describe_broker(broker: int, known: Broker, *, now_us: int | None = None) -> str:
    """As `describe`, of any broker that the metadata knows; without `now_us`, not its age."""
    words = [f"broker {broker} ({known.kind}, epoch {known.epoch})"]
    if known.process.pid:
        words.append(f"pid {known.process.pid} on host {known.process.host}")
    words.append(f"Flight at {known.flight}")
    if known.started_us and now_us is not None:
        words.append(f"started {age(now_us - known.started_us)} ago")
    return ", ".join(words)


def age(since_us: int) -> str:
    """A span of time in words, such as `3 min`. Clocks of two hosts may make it less than zero."""
    seconds = max(since_us, 0) / 1e6
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# ------------------------------------------------------------------------------ alive or dead


class State(enum.Enum):
    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()
    """Not watched for long enough to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One look at the leader."""

    leader: Leader
    state: State


class Watch:
    """Looks at the leader of a root, again and again, and remembers when it saw a change.

    Args:
        store: of the root.
        clock: the observer's own; only its monotonic time counts.
        dead_after_seconds: a leader that is silent for so long, or for as long as it has said
            itself if that is longer, is dead.
    """

    def __init__(self, store: Store, *, clock: Clock, dead_after_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._dead_after_seconds = dead_after_seconds
        self._meta = MetaStore(store, clock=clock)
        self._watched: tuple[int, int] | None = None
        self._seen: Heartbeat | None = None
        self._seen_at = 0.0
        self._has_changed = False

    def patience_seconds(self, leader: Leader) -> float:
        return max(self._dead_after_seconds, leader.known.dead_after_seconds)

    def look(self, metadata: Metadata | None = None) -> Sighting | None:
        """The leader as it is now; None where no broker has ever led the root.

        `metadata`: the newest; read if it is not given. Raises what the store raises.
        """
        leader = Leader.of(self._meta.reload() if metadata is None else metadata, self._store)
        if leader is None:
            return None
        self._note(leader)
        return Sighting(
            leader=leader,
            state=judge(
                leader,
                now=self._clock.monotonic(),
                patience_seconds=self.patience_seconds(leader),
                seen_at=self._seen_at,
                has_changed=self._has_changed,
            ),
        )

    def _note(self, leader: Leader) -> None:
        watched = leader.broker, leader.epoch
        if watched != self._watched:
            self._watched, self._has_changed = watched, False
        elif leader.heartbeat in (None, self._seen):
            return  # one that cannot be read is no sign of life
        else:
            self._has_changed = True
        self._seen, self._seen_at = leader.heartbeat, self._clock.monotonic()

    def settle(
        self, metadata: Metadata | None = None, *, waits: Callable[[Leader, float], object]
    ) -> Sighting | None:
        """Looks until it is known whether the leader is alive: for `patience_seconds` at most.

        `waits` is called once, with the leader and the longest wait in seconds, if that takes time.
        """
        told = False
        while True:
            found = self.look(metadata)
            if found is None or found.state is not State.UNKNOWN:
                return found
            if not told:
                waits(found.leader, self.patience_seconds(found.leader))
                told = True
            self.pause()

    def pause(self) -> None:
        """Waits between two looks."""
        is_local = self._store.is_local
        self._clock.sleep(_LOOK_LOCAL_SECONDS if is_local else _LOOK_REMOTE_SECONDS)


def judge(
    leader: Leader, *, now: float, patience_seconds: float, seen_at: float, has_changed: bool
) -> State:
    """Whether the leader is alive.

    Args:
        leader: with its newest heartbeat.
        now: the observer's monotonic time, in seconds.
        patience_seconds: after so long a silence it is dead.
        seen_at: since when the heartbeat is as it is, as far as it was watched.
        has_changed: whether it was seen to change since it was watched first.
    """
    heartbeat = leader.heartbeat
    if leader.stopped or fate_of(leader.process) is Fate.GONE:
        return State.DEAD
    if heartbeat is not None and is_of_this_machine(heartbeat.process):
        silent_seconds = now - heartbeat.monotonic_seconds
        if silent_seconds >= 0:
            return State.ALIVE if silent_seconds <= patience_seconds else State.DEAD
    if now - seen_at > patience_seconds:
        return State.DEAD
    return State.ALIVE if has_changed else State.UNKNOWN


def find_live_broker(
    store: Store, *, clock: Clock, dead_after_seconds: float
) -> tuple[int, str] | None:
    """(id, Flight address) of the root's live broker, or None; may wait to see which."""
    watch = Watch(store, clock=clock, dead_after_seconds=dead_after_seconds)
    found = watch.settle(waits=lambda _leader, _seconds: None)
    if found is None or found.state is State.DEAD:
        return None
    return found.leader.broker, found.leader.flight
