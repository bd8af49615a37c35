"""One run: a calm start, chaos, recovery, and the checks at the end.

The chaos ends after so many steps at the store. Then the faults stop, one more broker takes the
root, and everything has to come right: every request gets its answer, every record its place in a
table, every inherited epoch is closed, and nothing is left lying about past its grace.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import secrets
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pyarrow as pa

from sparklog import errors, limits, wire
from sparklog.broker.core import Core
from sparklog.storage import deltalog, manifest, table, upkeep, wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.meta import Epoch, Metadata, MetaStore
from sparklog.storage.objects import SyncFailed
from sparklog.storage.plan import plan
from sparklog.storage.snapshot import TableSnapshot
from tests.simulation.brokers import (
    ORPHAN_GRACE_SECONDS,
    REMOVED_FILE_GRACE_SECONDS,
    Broker,
    Call,
    Pace,
    simulated,
)
from tests.simulation.clients import Administrator, Client, Consumer, Producer, Query
from tests.simulation.engines import NAME, Engine
from tests.simulation.faults import AIMS, Disk, Faults, ProcessStore, Rates
from tests.simulation.history import History, Row, Value, Violation, ensure
from tests.simulation.readers import Reader, read
from tests.simulation.scheduler import Process, ProcessClock, Scheduler

_LIMITS = {
    "TRIM_GRACE_SECONDS": 0.3,
    "META_VERSIONS_KEPT": 8,
    "SWEEP_EVERY_SECONDS": 0.5,
    "SETTLE_EVERY_SECONDS": 0.5,
    "UPKEEP_RETRY_SECONDS": 0.3,
    "RETENTION_EVERY_SECONDS": 0.4,
    "COMPACT_SETTLED_SECONDS": 0.5,
    "TOMBSTONE_SECONDS": 1.0,
    "RETRY_MAX_SECONDS": 1.0,
    "CLAIM_BACKOFF_SECONDS": 0.02,
    "CLAIM_BACKOFF_MAX_SECONDS": 0.2,
    "BATCHES_REMEMBERED": 2,
    "QUERIES_REMEMBERED": 1,
    "KAFKA_BATCH_BYTES": 300,
    "KAFKA_AHEAD_BYTES": 3_000,
}
"""Bounds and graces so tight that a short run goes past them."""

_CONFIGS: list[dict[str, str]] = [
    *[{}] * 7,
    {"retention.ms": "1000"},
    {"retention.bytes": "1"},
    {"retention.bytes": "4000"},
]

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a seed's world is made of."""

    is_local: bool
    rates: Rates
    aim: str
    """Where crashes, freezes and stalls hit, if not anywhere."""
    pace: Pace
    brokers: int
    partitions: tuple[int, ...]
    """Of each topic to begin with; the first is never deleted, and the query writes to it."""
    config: dict[str, str]
    """Of each topic to begin with."""
    idempotent: int
    simple: int
    queries: int
    consumers: int
    readers: int
    engines: int
    has_vacuum: bool
    """Whether another engine removes what a table does not name; nobody merges files then."""
    administrators: int
    switch_rate: float
    steps: int

    @classmethod
    def draw(cls, chance: random.Random) -> Profile:
        is_local = chance.random() < 0.5
        has_vacuum = chance.random() < 0.1
        return cls(
            is_local=is_local,
            rates=Rates.draw(chance, is_local=is_local),
            aim=chance.choice(AIMS) if chance.random() < 0.3 else "",
            pace=Pace.draw(chance),
            brokers=chance.choice([1, 2, 3]),
            partitions=(2, *(chance.randint(1, 3) for _ in range(chance.choice([0, 1])))),
            config=chance.choice(_CONFIGS),
            idempotent=chance.choice([1, 2]),
            simple=chance.choice([0, 0, 1]),
            queries=chance.choice([0, 0, 1]),
            consumers=chance.choice([0, 1]),
            readers=chance.choice([0, 1, 1, 2]),
            engines=1 if has_vacuum else chance.choice([0, 0, 1]),
            has_vacuum=has_vacuum,
            administrators=0 if has_vacuum else chance.choice([0, 1]),
            switch_rate=chance.choice([0.3, 0.7, 1.0]),
            steps=chance.randint(250, 900) * (4 if chance.random() < 0.05 else 1),
        )


class Machine:
    """A process that is no broker, and its view of the store."""

    def __init__(self, process: Process, store: ProcessStore) -> None:
        self.process = process
        self.store = store
        self.clock: ProcessClock = process.clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    seed: int
    profile: Profile
    violation: str | None
    trace: list[tuple[object, ...]]
    injected: Counter[str]
    steps: int
    acks: int
    seen: int
    deletions: int
    retained: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()


def run(
    seed: int,
    change: Callable[[Profile], Profile] = lambda drawn: drawn,
    *,
    inspect: Callable[[World], None] = lambda _world: None,
) -> Outcome:
    """The seed's run, from an empty root to the last check, in the world that it draws.

    `inspect` may have a look of its own at what is left in the end.
    """
    chance = random.Random(seed)
    profile = change(Profile.draw(chance))
    world = World(chance, profile)
    violation = None
    with _deterministic(world, random.Random(seed + 1)):
        try:
            world.run()
            inspect(world)
        except Violation as error:
            violation = str(error)
        except Exception:
            # Whatever the real code lets out and nobody expects is a violation too.
            violation = traceback.format_exc()
        finally:
            world.scheduler.end()
    return Outcome(
        seed=seed,
        profile=profile,
        violation=violation,
        trace=world.disk.trace,
        injected=world.faults.injected,
        steps=world.scheduler.steps,
        acks=world.history.acks,
        seen=world.history.seen,
        deletions=world.history.deletions,
        retained=world.history.retained,
    )


def _create(request: wire.CreateTopic, core: Core) -> wire.TopicInfo:
    return core.create_topic(request)


class World:
    """Everything there is in one run."""

    def __init__(self, chance: random.Random, profile: Profile) -> None:
        self.chance = chance
        self.profile = profile
        self.scheduler = Scheduler(chance, switch_rate=profile.switch_rate)
        self.disk = Disk(
            self.scheduler, chance, is_local=profile.is_local, after_cut=self.note_torn
        )
        self.faults = Faults(self.scheduler, chance, profile.rates, profile.aim, self.disk)
        self.history = History()
        self.closing = False
        self._is_operated = True
        self.torn: set[str] = set()
        """Topics whose log a power cut has once left with an empty commit, or with a hole."""
        self.producer_ids: set[int] = set()
        self.deletions: list[Call] = []
        """Of topics, as they were asked for."""
        self.topic_names = [f"t{number}" for number in range(len(profile.partitions))]
        self.mortal_topics = self.topic_names[1:]
        self._brokers: list[Broker] = []
        self._others: list[Reader | Engine] = []
        self._clients: list[Client] = []
        self._nonce = 0

    # -------------------------------------------------------------------------- for everybody

    def nonce(self) -> int:
        """A number that was never used before."""
        self._nonce += 1
        return self._nonce

    def machine(self, name: str) -> Machine:
        """A new process that lives until it dies."""
        process = Process(self.scheduler, name)
        return Machine(process, self.disk.view(process, self.faults))

    def find_broker(self) -> Broker | None:
        """A broker that serves: mostly the newest, sometimes one that was replaced."""
        serving = [each for each in self._brokers if each.alive and each.serving]
        if not serving:
            return None
        if self.closing or self.chance.random() < 0.8:
            return serving[-1]
        return self.chance.choice(serving)

    def is_replaced(self, broker: Broker) -> bool:
        """Whether a newer epoch than the broker's has been opened."""
        lease, metadata = broker.lease, self._metadata()
        if lease is None:
            return False
        is_newest = metadata.brokers[lease.broker].epoch == lease.epoch
        return metadata.controller != lease.broker or not is_newest

    def is_deleted(self, topic_id: str) -> bool:
        """Whether the topic is gone, by a deletion that is over."""
        if any(not call.done and call.broker.alive for call in self.deletions):
            return False
        return all(known.topic_id != topic_id for known in self._metadata().topics.values())

    def broker_of(self, process: Process) -> Broker:
        """The broker that is this process."""
        return next(each for each in self._brokers if each.process is process)

    def topics(self) -> list[tuple[str, str, TableSnapshot]]:
        """(name, id, table) of every topic that there is."""
        clock = self.scheduler.clock
        return [
            (name, known.topic_id, table.Table(self.disk.base, name, clock=clock).refresh())
            for name, known in self._metadata().topics.items()
        ]

    def _metadata(self) -> Metadata:
        return MetaStore(self.disk.base, clock=self.scheduler.clock).reload()

    # -------------------------------------------------------------------------- torn logs

    def note_torn(self) -> None:
        """Keeps in mind whose log is not whole; what nobody built on may be lost in a power cut."""
        for topic in self.disk.base.folders("topics"):
            if self._beyond_damage(topic):
                self.torn.add(topic)

    def explains(self, error: errors.Corrupt) -> bool:
        """Whether it is of a torn log, or of a data file that a VACUUM may have taken."""
        told = str(error)
        if self.profile.has_vacuum and isinstance(error, errors.MissingObject):
            return ".parquet" in told
        return any(
            mark in told
            for topic in self.torn
            for mark in (f"topics/{topic}/", f"topic {topic!r}", f"{topic}-")
        )

    def _mend(self) -> None:
        """What a person does: takes away the torn end of a log."""
        for topic in sorted(self.torn):
            beyond = self._beyond_damage(topic)
            if beyond:
                self.disk.note("mended", beyond)
                self.disk.base.delete(beyond)

    def _beyond_damage(self, topic: str) -> list[str]:
        """Commits that are empty, or behind one that is or that is missing."""
        folder = f"topics/{topic}/_delta_log"
        stats = {stat.name: stat for stat in self.disk.base.list_after(folder)}
        listing = deltalog.read_names(stats)
        version = max(listing.checkpoints, default=-1)
        while (stat := stats.get(deltalog.commit_name(version + 1))) and stat.size_bytes:
            version += 1
        names = (deltalog.commit_name(each) for each in sorted(listing.commits) if each > version)
        return [f"{folder}/{name}" for name in names]

    # -------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Raises `Violation`, `Stuck`, and whatever the real code raises and nobody expects."""
        self._begin()
        self.faults.active = True
        self._populate()
        self.scheduler.run(lambda: self.scheduler.steps >= self.profile.steps)
        self.disk.note("the chaos is over")
        self.faults.active = self._is_operated = False
        self._recover()
        self._check()

    def _begin(self) -> None:
        first = self._start_broker(check_alive=True)
        self._until(lambda: first.serving, "the first broker serves")
        for name, count in zip(self.topic_names, self.profile.partitions, strict=True):
            request = wire.CreateTopic(topic=name, partitions=count, config=self.profile.config)
            if self.profile.config:
                self.history.keeps_nothing(name)
            self._ask(first, f"create {name}", functools.partial(_create, request))

    def _populate(self) -> None:
        profile = self.profile
        for number in range(profile.idempotent):
            self._clients.append(Producer(self, f"producer{number}", idempotent=True))
        for number in range(profile.simple):
            self._clients.append(Producer(self, f"simple{number}", idempotent=False))
        for number in range(profile.queries):
            self._clients.append(Query(self, f"query{number}", self.topic_names[0]))
        for number in range(profile.consumers):
            self._clients.append(Consumer(self, f"consumer{number}"))
        for number in range(profile.administrators):
            self._clients.append(Administrator(self, f"admin{number}"))
        self._spawn_operator()

    def _spawn_operator(self) -> None:
        """Starts brokers and readers where there are too few, and sometimes too many."""
        operator = Process(self.scheduler, "operator")

        def body() -> None:
            while self._is_operated:
                self._replenish()
                if self.torn and self.chance.random() < 0.1:
                    self._mend()
                alive = [each for each in self._brokers if each.alive]
                odds = self.chance.random()
                if not alive or (len(alive) < self.profile.brokers and odds < 0.2):
                    self._start_broker(check_alive=self.chance.random() < 0.3)
                elif odds > 0.97 and alive[0].serving:
                    alive[0].stop()
                self.scheduler.sleep(self.chance.uniform(0.05, 0.6))

        self.scheduler.spawn(operator, "operator", body)

    def _replenish(self) -> None:
        """Others take the places of readers and engines that have died."""
        self._others = [each for each in self._others if each.process.alive]
        for kind, count in ((Reader, self.profile.readers), (Engine, self.profile.engines)):
            alive = sum(isinstance(each, kind) for each in self._others)
            for _ in range(count - alive):
                self._others.append(kind(self, f"{kind.__name__.lower()}{self.nonce()}"))

    def _start_broker(self, *, check_alive: bool) -> Broker:
        broker = Broker(
            self,
            name=f"broker{len(self._brokers)}",
            broker_id=self.chance.choice([1, 1, 2]),
            check_alive=check_alive,
        )
        self._brokers.append(broker)
        return broker

    def judge(self, broker: Broker, error: Exception) -> None:
        """Only what the design names may end a broker."""
        expected: tuple[type[Exception], ...] = (
            errors.BrokerClosing,
            errors.Fenced,
            errors.OutcomeUnknown,  # of a change of the metadata: it no longer knows its topics
            SyncFailed,
        )
        if not broker.serving:
            expected += (errors.Retriable, errors.BrokerAlive)
        if isinstance(error, errors.Corrupt) and self.is_replaced(broker):
            return  # its successor tidied up behind it
        if not isinstance(error, expected):
            raise error

    # -------------------------------------------------------------------------- recovery

    def _recover(self) -> None:
        if self.chance.random() < 0.5:
            for each in self._brokers:
                each.process.alive = False
        for each in self._brokers:
            each.process.frozen_until = 0.0
        self._mend()
        # Who has begun to take the root may still take it away from the last.
        self._until(
            lambda: all(each.serving or not each.alive for each in self._brokers),
            "brokers that have begun to start serve or end",
        )
        last = self._replace()
        if self.mortal_topics and self.chance.random() < 0.3:
            self._check_progress(last)
        self.closing = True
        self._until(
            lambda: all(each.finished for each in self._clients), "every client gets its answers"
        )
        self._ask(last, "publish all", lambda core: core.publish_all(wire.PublishNow()))
        for other in self._others:
            other.process.alive = False
        self._until(lambda: not self.disk.late_puts, "all late puts have landed")
        self._until(
            lambda: not any(each.alive for each in self._brokers if each is not last),
            "brokers that were replaced notice it",
        )
        last.process.alive = False
        self.last = self._replace()
        # A log is trimmed up to its newest checkpoint, and that comes with the next record.
        self._ask(self.last, "one more", self._append_one)
        for _ in range(2):
            self._pass(1.5)
            self.scheduler.clock.advance(ORPHAN_GRACE_SECONDS)
        self._pass(3.0)  # what has just become too old for its topic has a grace as well

    def _check_progress(self, broker: Broker) -> None:
        """While the table of one topic cannot be written, the others are published."""
        self.faults.broken = f"topics/{self.mortal_topics[0]}/"
        self._ask(broker, "one record", self._append_one)
        request = wire.PublishNow(topics=self.topic_names[:1])
        self._ask(broker, "publish the others", lambda core: core.publish_all(request))
        self.faults.broken = ""

    def _replace(self) -> Broker:
        """One more broker, which serves."""
        last = self._start_broker(check_alive=False)
        self._until(lambda: last.serving or not last.alive, "the last broker serves")
        ensure(last.alive, f"the last broker does not start: {last.failure!r}")
        return last

    def _append_one(self, core: Core) -> None:
        topic_id = core.describe(self.topic_names[0]).topic_id
        nonce = self.nonce()
        value = Value(topic_id=topic_id, sender="end", partition=0, sequence=nonce, nonce=nonce)
        batch = pa.record_batch({"value": pa.array([value.encode()], pa.binary())})
        (found,) = core.wait(core.append(self.topic_names[0], 0, batch))
        row = Row(value.encode(), None, found.arrival_us)
        self.history.ack("the end", (topic_id, 0), found.base_offset, [row])

    def _until(self, is_reached: Callable[[], bool], what: str) -> None:
        deadline = self.scheduler.now + _PATIENCE_SECONDS
        self.scheduler.run(lambda: is_reached() or self.scheduler.now > deadline)
        ensure(is_reached(), f"this does not come about in {_PATIENCE_SECONDS} s: {what}")

    def _pass(self, seconds: float) -> None:
        end = self.scheduler.now + seconds
        self.scheduler.run(lambda: self.scheduler.now >= end)

    def _ask(self, broker: Broker, what: str, body: Callable[[Core], Any]) -> None:
        call = broker.call(what, body)
        self._until(lambda: call.done or not broker.alive, what)
        ensure(call.done and call.error is None, f"{what}: {call.error!r}, {broker.failure!r}")

    # -------------------------------------------------------------------------- the checks

    def _check(self) -> None:
        metadata = self._metadata()
        self._check_logs(metadata)
        self._check_bounds()
        self._check_epochs(metadata)
        self._check_leftovers()

    def _check_logs(self, metadata: Metadata) -> None:
        """Every topic's log, as four tell it, is one, and keeps all promises."""
        base = self.disk.base
        follower = RootFollower(base, clock=self.scheduler.clock)
        for name, known in metadata.topics.items():
            snapshot = follower.refresh([name])[name]
            ends = follower.ends(snapshot)
            ensure(ends == snapshot.ends, f"{name}: the table ends at {snapshot.ends} of {ends}")
            info = self.last.core.describe(name)
            self.last.check_starts("the end", info)
            told = {each.partition: (each.start, each.end) for each in info.partitions}
            for partition, (start, end) in enumerate(zip(snapshot.starts, ends, strict=True)):
                place = known.topic_id, partition
                least = self.history.starts[place]
                self.history.check_start("the table at the end", name, place, start, least)
                pieces = plan(
                    topic=name,
                    snapshot=snapshot,
                    tail=(),
                    partition=partition,
                    start=start,
                    end=end,
                )
                read(base, self.history, "the table at the end", pieces, start, end)
                log = self.history.log(place, start, end)
                self.history.check_log("the log at the end", place, start, log)
                ensure(
                    told.get(partition, (0, 0)) == (start, end),
                    f"{place}: is from {start} to {end}, told was {told}",
                )

    def _check_bounds(self) -> None:
        """Nothing is kept in memory for what is long over."""
        ledger = self.last.ledger
        ensure(not ledger.unpublished_bytes, f"{ledger.unpublished_bytes} bytes wait")
        ensure(not ledger.waiting(), f"these wait: {[each.name for each in ledger.waiting()]}")
        count = ledger.unconfirmed_count
        ensure(not count, f"{count} published entries are kept")
        for topic in ledger.topics():
            ensure(topic.held_back is None, f"{topic.name} is held back: {topic.held_back}")

    def _check_epochs(self, metadata: Metadata) -> None:
        lease = self.last.lease
        assert lease is not None
        own = Epoch(lease.broker, lease.epoch)
        ensure(metadata.open_epochs == (own,), f"epochs are still open: {metadata.open_epochs}")
        base = self.disk.base
        for broker in base.folders("wal"):
            for epoch in base.folders(f"wal/{broker}"):
                folder = f"wal/{broker}/{epoch}"
                names = [stat.name for stat in base.list_after(folder)]
                left = [name for name in names if f"{folder}/{name}" not in self.disk.zombies]
                is_own = folder == wal.folder(own.broker, own.epoch)
                ensure(len(left) <= 1 + is_own, f"{folder} still holds {left}")

    def _check_leftovers(self) -> None:
        base = self.disk.base
        for topic in base.folders("topics"):
            found = table.Table(base, topic, clock=self.scheduler.clock)
            snapshot = found.refresh()
            named = {table.data_path(topic, file) for files in snapshot.files for file in files}
            stored = {
                f"topics/{topic}/{stat.name}"
                for stat in base.walk(f"topics/{topic}")
                if stat.name.endswith(".parquet") and "_delta_log" not in stat.name
            }
            # What another engine has put and not committed is for its own VACUUM.
            stored = {path for path in stored if path in named or f"/{NAME}" not in path}
            ensure(named <= stored, f"{topic}: these are gone: {sorted(named - stored)}")
            ensure(stored <= named, f"{topic}: these are orphans: {sorted(stored - named)}")
        staged = [f"staging/{stat.name}" for stat in base.walk("staging")]
        ensure(all(map(self._is_refusal, staged)), f"still staged: {staged}")

    def _is_refusal(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return name == manifest.NAME and manifest.load(self.disk.base, path).refused


# ------------------------------------------------------------------------------ determinism


class _TraceLog:
    """Takes the place of a module's logger."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def warning(self, event: str, **facts: object) -> None:
        self._disk.note("log", event, repr(facts))

    error = warning
    info = warning


@contextlib.contextmanager
def _deterministic(world: World, chance: random.Random) -> Iterator[None]:
    """Everything that the real code takes from its surroundings comes from the seed."""
    log = _TraceLog(world.disk)
    with contextlib.ExitStack() as stack:

        def patch(target: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        for name, module in sorted(sys.modules.items()):
            if name.startswith(("sparklog.broker.", "sparklog.storage.")):
                stand_ins = {
                    "threading": world.scheduler.threading,
                    "queue": world.scheduler.queue,
                    "_log": log,
                }
                for known, value in stand_ins.items():
                    if hasattr(module, known):
                        patch(module, known, value)
        for name, bound in _LIMITS.items():
            patch(limits, name, bound)
        if world.profile.has_vacuum:
            patch(limits, "COMPACT_SETTLED_SECONDS", 1e9)
        defaults = table.Table.__init__.__kwdefaults__ or {}
        # A writer goes by the default, whatever the janitor was told.
        graces = {
            "orphan_grace_seconds": ORPHAN_GRACE_SECONDS,
            "removed_file_grace_seconds": REMOVED_FILE_GRACE_SECONDS,
        }
        patch(table.Table.__init__, "__kwdefaults__", {**defaults, **graces})
        patch(upkeep.clean_log, "__kwdefaults__", {"kept_seconds": 1.0, "kept_versions": 4})
        stack.enter_context(simulated(world))
        patch(os, "urandom", chance.randbytes)
        patch(secrets, "token_bytes", lambda count=32: chance.randbytes(count))
        yield
