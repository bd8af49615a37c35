"""The faults of a seed, and the store as each simulated process sees it.

Rules:

- Only honest faults: an error is true of the operation's effect. `StorageUnavailable` and
  `StorageFull` mean no effect, `PutUnresolved` may mean any, `SyncFailed` means visible and perhaps
  not durable. A put without an answer may also land later, when its process is long dead.
- The files of a local root's log have faults of their own (`log_files`); a call of the system fails
  there with OSError.
- A power cut exists on a local root only, and undoes everything that was not synced: visible puts,
  and removals too, so that deleted objects may reappear.
- Another engine flushes nothing: a power cut may leave its commit empty, and of its data files a
  part, nothing, or no name, also where the commit survives. Such *damage* is excused, and mended by
  a person, as long as nothing of ours was built upon that commit.
- Some refusals and errors happen only to the work of a broker's own threads.
- A profile turns most kinds off, so that each run is about a few of them.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from sparklog import errors
from sparklog.storage.objects import MemoryStore, ObjectExists, Payload, PutUnresolved, SyncFailed
from sparklog.storage.objects.base import pieces
from sparklog.storage.objects.faults import Moment, Operation
from sparklog.storage.objects.memory_files import MemoryObject
from sparklog.storage.snapshot import TableFile
from tests.simulation import log_files
from tests.simulation.scheduler import Crashed, Process, Scheduler

_PUTS = frozenset({"put_new", "put"})
_CALLS = frozenset({"open", "append", "sync"})
"""Operations at files of the log; they fail with OSError."""
_BACKGROUND = frozenset(
    f"sparklog-{name}"
    for name in (
        "publisher",
        "publish",
        "files",
        "wal-cleaner",
        "janitor",
        "compact",
        "heartbeat",
    )
)
"""Names of the broker's threads that work without being asked."""

_PUT_SECONDS = 0.1
_LONGEST = 0.9
LONGEST_SECONDS = 10**_LONGEST
"""The longest effect of a fault, except a `mute` one."""

SKEW_SECONDS = 0.2
"""Largest clock error of a process in most runs: a part of the orphan grace period, as its rule
requires.
"""


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
    lost_answer: float = 0.0
    mute: float = 0.0
    """A process can write no heartbeat for some seconds."""

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
    "append",
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
"""Factor of the fault's probability at that place, if the run aims at it."""
_PLACES = ("meta", "staging", "topics/t0", "topics/t0/_delta_log", "topics/t1", "wal")
_MUTE_SECONDS = (1.0, 8.0)
_WEIGHTS = {
    "mute": 0.5,
    "lost_answer": 10.0,
    "power_cut": 0.2,
    "crash": 0.6,
    "sync_failed": 0.3,
    "unresolved": 3.0,
    "late": 2.0,
}


class Faults:
    """Decides at every step at the store, while it is `active`."""

    def __init__(
        self,
        scheduler: Scheduler,
        chance: random.Random,
        rates: Rates,
        aim: str,
        disk: Disk,
        *,
        skew_seconds: float,
    ) -> None:
        self.active = False
        self.broken = ""
        """Prefix below which a broker's own threads can put nothing while this is set."""
        self.injected: Counter[str] = Counter()
        self._scheduler = scheduler
        self._chance = chance
        self._rates = rates
        self._aim = aim
        self._disk = disk
        self._skew_seconds = skew_seconds
        self._full_until = 0.0
        self._mute_until: dict[Process, float] = {}
        self._outages: list[tuple[str, float]] = []
        """Prefix for which the store does not answer at the moment, and until when."""

    def strike(self, process: Process, moment: Moment, operation: Operation, path: str) -> None:
        """Raises an injected fault, or applies it to the process."""
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
            self.skew(process)
        self._begin_outages(process)
        is_mute = self._scheduler.now < self._mute_until.get(process, 0.0)
        if is_mute and is_put and path.startswith("heartbeats/"):
            raise errors.StorageFull(root="memory://", free_bytes=0, reserve_bytes=0)
        self._refuse(moment, operation, path)

    def _begin_outages(self, process: Process) -> None:
        """Perhaps begins a time in which the store refuses more than this operation."""
        rates, now = self._rates, self._scheduler.now
        if self._hits("full", rates.full):
            self._full_until = now + self._duration_seconds()
        if self._hits("outage", rates.outage):
            until = now + self._duration_seconds()
            self._outages.append((self._chance.choice(_PLACES), until))
        if self._hits("mute", rates.mute):
            self._mute_until[process] = now + self._chance.uniform(*_MUTE_SECONDS)

    def skew(self, process: Process) -> None:
        """Sets the date of the process wrong, by as much as the seed allows."""
        bound_us = round(self._skew_seconds * 1e6)
        process.skew_us = self._chance.randint(-bound_us, bound_us)

    def _refuse(self, moment: Moment, operation: Operation, path: str) -> None:
        if operation in _CALLS and path.startswith("wal/"):
            self._refuse_call(moment, operation, path)
            return
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

    def _refuse_call(self, moment: Moment, operation: Operation, path: str) -> None:
        """Raises OSError. An append with a sync fails in its sync, too."""
        if moment == ("before" if operation == "sync" else "between"):
            if self._hits("sync_failed", self._rates.sync_failed):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        elif moment == "before":
            if self._hits("unavailable", self._rates.unavailable):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            current = self._scheduler.current
            is_hidden = current is not None and current.name in _BACKGROUND
            if is_hidden and self._hits("forbidden", self._rates.forbidden):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _upset(self, path: str) -> None:
        """Faults of a broker's own threads; each thread must continue with everything else."""
        current = self._scheduler.current
        if current is None or current.name not in _BACKGROUND:
            return
        if self._hits("forbidden", self._rates.forbidden):
            raise errors.RootNotWritable(root="memory://", reason=f"403 for {path}")
        if path.startswith("topics/") and self._hits("surprise", self._rates.surprise):
            raise self._chance.choice([pa.ArrowInvalid, MemoryError, AssertionError])("simulated")

    def loses_answer(self) -> bool:
        """Returns true if a publishing process dies after its work, before its answer arrives."""
        return self.active and self._hits("lost_answer", self._rates.lost_answer)

    def is_full(self) -> bool:
        """Returns true if only the reserve is left, and sometimes not even that."""
        return self.active and self._scheduler.now < self._full_until

    def is_late(self, process: Process) -> bool:
        """Returns true if a put gets no answer now and takes effect some time later."""
        return self.active and process.alive and self._hits("late", self._rates.late)

    def delay_put(self, path: str) -> None:
        """Delays a put of the log on an object store, so that a later one overtakes it."""
        if self.active and path.startswith("wal/") and not self._disk.base.is_local:
            self._scheduler.sleep(self._chance.random() * _PUT_SECONDS)

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
        return float(10 ** self._chance.uniform(-2, _LONGEST))


# ------------------------------------------------------------------------------ the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A data file that another engine has put, its commit, and the files that it replaces."""

    topic: str
    path: str
    commit: str
    size_bytes: int
    replaced: Sequence[TableFile]


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
        self.beats: dict[str, list[tuple[float, bytes]]] = {}
        """Heartbeats by path: when each was visible, and what it says."""
        self.zombies: set[str] = set()
        """Objects that stand again although they were removed, or that landed late."""
        self.late_puts = 0
        """Number of puts that have not landed yet."""
        self.network = Process(scheduler, "network")
        self.base = MemoryStore(
            scheduler.clock, name="simulation", is_local=is_local, has_files=is_local
        )
        self.locks = log_files.FileLocks()
        self._chance = self.chance = chance
        self.foreign: dict[str, Rewritten] = {}
        """Data files of other engines, by path."""
        self.damaged: set[str] = set()
        """Those of them that a power cut has taken, or left torn, below a commit that survived."""
        self.ever_damaged: set[str] = set()
        """Number of puts that have not landed yet, including restored ones, whose answers may
        come later.
        """
        self.watchers: list[Callable[[str], None]] = []
        """Callbacks for each object that was put."""
        self.defects: list[str] = []
        """Errors of code that a broker has logged, and continued."""
        self._removed: dict[str, Any] = {}
        """Removed objects that would reappear after a power cut."""

    def note(self, *what: object) -> None:
        """One line of the trace."""
        scheduler = self.scheduler
        self.trace.append((round(scheduler.now, 6), repr(scheduler.current), *what))

    def note_beat(self, path: str) -> None:
        """A heartbeat can be seen from now on."""
        data = self.base._objects[path].data.to_pybytes()
        self.beats.setdefault(path, []).append((self.scheduler.now, data))

    def view(self, process: Process, faults: Faults) -> ProcessStore:
        """The store as `process` sees it; the process now has a part in the power's fate."""
        self.processes.append(process)
        return ProcessStore(self, process, faults)

    def power_cut(self) -> None:
        """Kills every process; the disk keeps everything durable and some of the rest."""
        for process in self.processes:
            process.alive = False
        objects = self.base._objects
        safe = {path for path, each in objects.items() if each.durable and each.flushed}
        whole = {path: each.data for path, each in objects.items() if not each.flushed}
        sizes = log_files.undurable(objects)
        old = log_files.contents({**objects, **self._removed})
        self.base.lose_unsynced(lambda _path: self._chance.random() < 0.4)
        log_files.tear(objects, sizes, old, self._chance)
        for path, data in sorted(whole.items()):
            if path in self.foreign and path in objects and not objects[path].data.size:
                left = self._chance.choice([0, self._chance.randrange(data.size)])
                objects[path].data = data.slice(0, left)
        self._note_damage(safe)
        for path in sorted(self._removed):
            if self._chance.random() < 0.5 and path not in self.base._objects:
                self.base._objects[path] = self._removed[path]
                self.zombies.add(path)
                self.note("is back", path)
        self._removed.clear()
        self._after_cut()

    def _note_damage(self, safe: set[str]) -> None:
        """Records the files of other engines that differ from their commits.

        `safe`: the objects that were durable before. The commits that ours was built upon had to be
        among them.
        """
        newest: dict[str, str] = {}
        for path in safe:
            folder, _, name = path.rpartition("/")
            newest[folder] = max(newest.get(folder, ""), name if name[:20].isdigit() else "")
        for path, each in sorted(self.foreign.items()):
            folder, _, name = each.commit.rpartition("/")
            is_built_upon = newest.get(folder, "") >= name
            if each.commit in self.base._objects and not is_built_upon and not self.is_whole(path):
                self.damaged.add(path)
                self.ever_damaged.add(path)
                self.note("damaged", path)

    def is_whole(self, path: str) -> bool:
        """Returns true if a file of another engine has all its bytes."""
        found = self.base._objects.get(path)
        return found is not None and found.data.size == self.foreign[path].size_bytes

    def land_later(self, path: str, data: bytes, seconds: float) -> None:
        """A put that takes effect after its caller has given up."""
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

    def emptied_folders(self, folder: str) -> set[str]:
        """Names of the folders directly in the folder from which objects were removed.

        A disk keeps such a folder, even if it is empty.
        """
        within = f"{folder}/" if folder else ""
        below = (each.removeprefix(within) for each in self._removed if each.startswith(within))
        return {each.partition("/")[0] for each in below if "/" in each}

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
        if path.startswith("heartbeats/"):
            self._disk.note_beat(path)
        self._reach("between", operation, path)

    def after(self, operation: Operation, path: str, /) -> None:
        if operation == "put_new":
            for watcher in self._disk.watchers:
                watcher(path)
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
        self.share_objects(base)
        self.hooks = self._faults
        self.disk = disk
        self.process = process
        self.chance = disk.chance
        self._fate = faults
        if base.files is not None:
            self.files = log_files.SimulatedFiles(self)

    def find_object(self, path: str) -> MemoryObject | None:
        return self._objects.get(path)

    def is_full(self) -> bool:
        """Returns true if a write finds no space, perhaps after a part of it."""
        return self._fate.is_full() and self.chance.random() < 0.5

    def put_new(self, path: str, data: Payload) -> None:
        self._fate.delay_put(path)
        if self._fate.is_late(self.process):
            whole = b"".join(pieces(data))
            self.disk.land_later(path, whole, self._fate.late_by_seconds())
            raise PutUnresolved(path, "simulated, and late")
        super().put_new(path, data)
        self.disk.settle_removals(path.rpartition("/")[0])

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        """Some of them may land late, each by itself."""
        found: list[Exception | None] = [None] * len(objects)
        punctual = []
        for number, (path, data) in enumerate(objects):
            if self._fate.is_late(self.process):
                whole = b"".join(pieces(data))
                self.disk.land_later(path, whole, self._fate.late_by_seconds())
                found[number] = PutUnresolved(path, "simulated, and late")
            else:
                punctual.append(number)
        outcomes = super().put_all_new([objects[number] for number in punctual])
        for number, outcome in zip(punctual, outcomes, strict=True):
            found[number] = outcome
            if outcome is None:
                self.disk.settle_removals(objects[number][0].rpartition("/")[0])
        return found

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.disk.remember_removal(path)
            super().delete([path])

    def folders(self, folder: str) -> list[str]:
        return sorted({*super().folders(folder), *self.disk.emptied_folders(folder)})

    def free_bytes(self) -> int | None:
        return 0 if self.is_full() else None

    def sync_folder(self, folder: str) -> None:
        super().sync_folder(folder)
        self.disk.settle_removals(folder)
