"""What a seed lets go wrong, and the store as each simulated process sees it.

Rules of this room:

- Only honest faults: what a caller is told is true of what has happened. `StorageUnavailable` and
  `StorageFull` mean no effect, `PutUnresolved` may mean any, `SyncFailed` means visible and perhaps
  not durable. A put without an answer may also land later, when its process is long dead.
- A power cut exists on a local root only, and takes what nobody has made durable: puts that are
  visible, and removals too, so that what was deleted may stand again.
- Another engine flushes nothing: a power cut may leave its commit empty, and its data file too,
  but for a file whose commit survives by mere luck: nobody could tell that from a file of ours.
- Some refusals and mistakes happen only behind the scenes, to what a broker does by itself.
- A profile turns most kinds off, so that each run is about a few of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from sparklog import errors
from sparklog.storage.objects import MemoryStore, ObjectExists, Payload, PutUnresolved, SyncFailed
from sparklog.storage.objects.base import pieces
from sparklog.storage.objects.memory import Moment, Operation
from tests.simulation.scheduler import Crashed, Process, Scheduler

_PUTS = frozenset({"put_new", "put"})
_BACKGROUND = frozenset(
    f"sparklog-{name}" for name in ("publisher", "files", "wal-keeper", "janitor", "heartbeat")
)
"""Names of the threads that a broker works in when nobody asks for anything."""

SKEW_SECONDS = 0.2
"""How wrong a process's date may be; a part of the orphan grace, as its rule asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Chances of each fault, at each step of a process at the store."""

    crash: float = 0.0
    power_cut: float = 0.0
    freeze: float = 0.0
    stall: float = 0.0
    jump: float = 0.0
    skew: float = 0.0
    unavailable: float = 0.0
    full: float = 0.0
    unresolved: float = 0.0
    late: float = 0.0
    sync_failed: float = 0.0
    outage: float = 0.0
    forbidden: float = 0.0
    surprise: float = 0.0

    @classmethod
    def draw(cls, chance: random.Random, *, is_local: bool) -> Rates:
        """Some kinds, each rare or frequent."""
        impossible = _REMOTE_ONLY if is_local else _LOCAL_ONLY
        found = {}
        for kind in cls.kinds():
            is_on, rate = chance.random() < 0.5, 10 ** chance.uniform(-3.2, -1.7)
            if is_on and kind not in impossible:
                found[kind] = rate * _WEIGHTS.get(kind, 1.0)
        return cls(**found)

    @classmethod
    def kinds(cls) -> list[str]:
        """The names of all kinds of faults."""
        return [each.name for each in fields(cls)]


_LOCAL_ONLY = frozenset({"power_cut", "sync_failed"})
_REMOTE_ONLY = frozenset({"unresolved", "late"})
AIMS = (
    "after delete",
    "after put_new meta",
    "after put_new topics",
    "after put_new wal",
    "before put_new topics",
    "between put_new topics",
    "between put_new wal",
    "checkpoint",
    "staging",
)
"""Steps that are worth a death or a long pause."""
_AIMED = 10.0
"""How much more often that happens there, if the run aims at it."""
_PLACES = ("meta", "staging", "topics/t0", "topics/t0/_delta_log", "topics/t1", "wal")
_WEIGHTS = {"power_cut": 0.2, "crash": 0.6, "sync_failed": 0.3, "unresolved": 3.0, "late": 2.0}


class Faults:
    """Decides at every step at the store, while it is `active`."""

    def __init__(
        self, scheduler: Scheduler, chance: random.Random, rates: Rates, aim: str, disk: Disk
    ) -> None:
        self.active = False
        self.broken = ""
        """Where no broker's own threads can put anything, for as long as this says so."""
        self.injected: Counter[str] = Counter()
        self._scheduler = scheduler
        self._chance = chance
        self._rates = rates
        self._aim = aim
        self._disk = disk
        self._full_until = 0.0
        self._outages: list[tuple[str, float]] = []
        """Where the store does not answer at the moment, and until when."""

    def strike(self, process: Process, moment: Moment, operation: Operation, path: str) -> None:
        """Raises what goes wrong, or lets it happen to the process."""
        is_put = operation in _PUTS and moment == "before"
        current = self._scheduler.current
        is_hidden = current is not None and current.name in _BACKGROUND
        if self.broken and is_put and is_hidden and path.startswith(self.broken):
            raise pa.ArrowInvalid(f"{path} is out of order")
        if not self.active or not process.alive:
            return
        rates = self._rates
        if self._hits("power_cut", rates.power_cut):
            self._disk.power_cut()
            raise Crashed
        is_aimed_at = self._aim and self._aim in f"{moment} {operation} {path}"
        weight = (_AIMED if is_aimed_at else 0.0) if self._aim else 1.0
        if self._hits("crash", weight * rates.crash):
            process.alive = False
            raise Crashed
        if self._hits("freeze", weight * rates.freeze):
            process.frozen_until = self._scheduler.now + self._duration_seconds()
            self._scheduler.sleep(0)
        if self._hits("stall", weight * rates.stall):
            self._scheduler.sleep(self._duration_seconds())
        if self._hits("jump", rates.jump):
            self._scheduler.clock.advance(self._duration_seconds())
        if self._hits("skew", rates.skew):
            bound_us = round(SKEW_SECONDS * 1e6)
            process.skew_us = self._chance.randint(-bound_us, bound_us)
        if self._hits("full", rates.full):
            self._full_until = self._scheduler.now + self._duration_seconds()
        if self._hits("outage", rates.outage):
            until = self._scheduler.now + self._duration_seconds()
            self._outages.append((self._chance.choice(_PLACES), until))
        self._refuse(moment, operation, path)

    def _refuse(self, moment: Moment, operation: Operation, path: str) -> None:
        rates = self._rates
        is_put = operation in _PUTS
        if moment == "before":
            now = self._scheduler.now
            is_out = any(path.startswith(place) and now < until for place, until in self._outages)
            if is_out or self._hits("unavailable", rates.unavailable):
                raise errors.StorageUnavailable(operation=operation, path=path, reason="simulated")
            self._upset(path)
            if is_put and self.is_full() and self._chance.random() < 0.5:
                raise errors.StorageFull(root="memory://", free_bytes=0, reserve_bytes=0)
            if is_put and self._hits("unresolved", rates.unresolved / 2):
                raise PutUnresolved(path, "simulated, and lost")
        elif moment == "between":
            if self._hits("sync_failed", rates.sync_failed):
                raise SyncFailed(path, "simulated")
        elif is_put and self._hits("unresolved", rates.unresolved / 2):
            raise PutUnresolved(path, "simulated, and landed")

    def _upset(self, path: str) -> None:
        """What a broker's own threads meet, each of which must go on with everything else."""
        current = self._scheduler.current
        if current is None or current.name not in _BACKGROUND:
            return
        if self._hits("forbidden", self._rates.forbidden):
            raise errors.RootNotWritable(root="memory://", reason=f"403 for {path}")
        if path.startswith("topics/") and self._hits("surprise", self._rates.surprise):
            raise self._chance.choice([pa.ArrowInvalid, MemoryError, AssertionError])("simulated")

    def is_full(self) -> bool:
        """Whether only the reserve is left, and sometimes not even that."""
        return self.active and self._scheduler.now < self._full_until

    def is_late(self, process: Process) -> bool:
        """Whether a put gets no answer now, and takes effect some time later."""
        return self.active and process.alive and self._hits("late", self._rates.late)

    def late_by_seconds(self) -> float:
        return self._duration_seconds()

    def _hits(self, kind: str, rate: float) -> bool:
        if not rate or self._chance.random() >= rate:
            return False
        self.injected[kind] += 1
        self._disk.note("fault", kind)
        return True

    def _duration_seconds(self) -> float:
        """From less than a flush to longer than every grace."""
        return float(10 ** self._chance.uniform(-2, 0.9))


# ------------------------------------------------------------------------------ the disk


class Disk:
    """The one content that all processes see, and what a power cut does to it."""

    def __init__(
        self,
        scheduler: Scheduler,
        chance: random.Random,
        *,
        is_local: bool,
        after_cut: Callable[[], None],
    ) -> None:
        self._after_cut = after_cut
        self.scheduler = scheduler
        self.trace: list[tuple[object, ...]] = []
        self.processes: list[Process] = []
        self.zombies: set[str] = set()
        """Objects that stand again although they were removed, or that landed late."""
        self.late_puts = 0
        """How many have not landed yet."""
        self.network = Process(scheduler, "network")
        self.base = MemoryStore(scheduler.clock, name="simulation", is_local=is_local)
        self._chance = chance
        self.foreign: dict[str, str] = {}
        """Data files of other engines, and the commit that adds each."""
        self._removed: dict[str, Any] = {}
        """What was removed and would stand again after a power cut."""

    def note(self, *what: object) -> None:
        """One line of the trace."""
        scheduler = self.scheduler
        self.trace.append((round(scheduler.now, 6), repr(scheduler.current), *what))

    def view(self, process: Process, faults: Faults) -> ProcessStore:
        """The store as `process` sees it; the process now has a part in the power's fate."""
        self.processes.append(process)
        return ProcessStore(self, process, faults)

    def power_cut(self) -> None:
        """Everybody dies, and the disk keeps what is durable and some of the rest."""
        for process in self.processes:
            process.alive = False
        objects = self.base._objects
        safe = {path for path, each in objects.items() if each.durable and each.flushed}

        def loses(path: str) -> bool:
            commit = self.foreign.get(path)
            if commit is not None and commit not in safe:
                found = objects.get(commit)
                if found is not None and found.data.size:
                    return False
            return self._chance.random() < 0.5

        self.base.lose_unsynced(loses)
        for path in sorted(self._removed):
            if self._chance.random() < 0.5 and path not in self.base._objects:
                self.base._objects[path] = self._removed[path]
                self.zombies.add(path)
                self.note("stands again", path)
        self._removed.clear()
        self._after_cut()

    def land_later(self, path: str, data: bytes, seconds: float) -> None:
        """A put that takes effect when nobody waits for it any more."""
        self.late_puts += 1

        def body() -> None:
            self.scheduler.sleep(seconds)
            self.late_puts -= 1
            try:
                self.base.put_new(path, data)
            except ObjectExists:
                return
            self.zombies.add(path)
            self.note("lands", path)

        self.scheduler.spawn(self.network, "late put", body)

    def remember_removal(self, path: str) -> None:
        found = self.base._objects.get(path)
        if self.base.is_local and found is not None and found.durable:
            self._removed[path] = found

    def settle_removals(self, folder: str) -> None:
        """A flush of the folder makes removals durable too."""
        for path in [each for each in self._removed if each.rpartition("/")[0] == folder]:
            del self._removed[path]


class _Hooks:
    """`memory.Faults` for one process."""

    def __init__(self, disk: Disk, process: Process, faults: Faults) -> None:
        self._disk = disk
        self._process = process
        self._faults = faults

    def before(self, operation: Operation, path: str, /) -> None:
        self._reach("before", operation, path)

    def between(self, operation: Operation, path: str, /) -> None:
        self._reach("between", operation, path)

    def after(self, operation: Operation, path: str, /) -> None:
        self._reach("after", operation, path)

    def _reach(self, moment: Moment, operation: Operation, path: str) -> None:
        self._disk.scheduler.step()
        self._disk.note(moment, operation, path)
        self._faults.strike(self._process, moment, operation, path)


class ProcessStore(MemoryStore):
    """The disk's content through the eyes of one process."""

    def __init__(self, disk: Disk, process: Process, faults: Faults) -> None:
        base = disk.base
        super().__init__(
            disk.scheduler.clock,
            name="simulation",
            is_local=base.is_local,
            faults=_Hooks(disk, process, faults),
        )
        self._objects = base._objects
        self._disk = disk
        self._process = process
        self._fate = faults

    def put_new(self, path: str, data: Payload) -> None:
        if self._fate.is_late(self._process):
            whole = b"".join(pieces(data))
            self._disk.land_later(path, whole, self._fate.late_by_seconds())
            raise PutUnresolved(path, "simulated, and late")
        super().put_new(path, data)
        self._disk.settle_removals(path.rpartition("/")[0])

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._disk.remember_removal(path)
            super().delete([path])

    def free_bytes(self) -> int | None:
        return 0 if self._fate.is_full() else None

    def settle(self, folder: str) -> None:
        super().settle(folder)
        self._disk.settle_removals(folder)
