"""One run: a calm start, chaos, recovery, and the checks at the end.

The chaos ends after so many steps at the store. Then the faults stop, one more broker takes the
root, and everything has to come right: every request gets its answer, every record its place in a
table, every inherited epoch is closed, and nothing is left lying about past its grace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import secrets
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.broker import Broker
from sparklog.formats import flight_messages
from sparklog.formats.record_batch import compile_loops
from sparklog.formats.topic_config import PUBLISH_INTERVAL
from sparklog.storage import wal
from sparklog.storage.follow import RootFollower
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.metadata.liveness import Heartbeat, Leader
from sparklog.storage.metadata.model import ClusterMetadata, Epoch
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import SyncFailed
from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.reading.plan import plan
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.staging import manifest
from sparklog.storage.table import delta_log
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal import frames
from tests.simulation import columns, puts, scales, typed
from tests.simulation.brokers import (
    DEAD_AFTER_SECONDS,
    REMOVED_FILE_GRACE_SECONDS,
    Call,
    Pace,
    SimulatedBroker,
    simulated,
)
from tests.simulation.clients import Administrator, Client, Consumer, Mirror, Producer, Query
from tests.simulation.columns import ColumnWatch
from tests.simulation.engines import NAME, Engine, restore
from tests.simulation.faults import AIMS, SKEW_SECONDS, Disk, Faults, ProcessStore, Rates
from tests.simulation.history import History, Place, Row, Value, Violation, ensure
from tests.simulation.readers import Reader, read
from tests.simulation.scheduler import Process, ProcessClock, Scheduler

_LIMITS = {
    "sparklog.limits.TRIM_GRACE_SECONDS": 0.3,
    "sparklog.storage.metadata.store.META_SNAPSHOT_EVERY": 4,
    "sparklog.storage.version_chain.KEPT_SECONDS": 1.0,
    "sparklog.storage.version_chain.LOOK_SECONDS": 0.2,
    "sparklog.storage.version_chain.LIST_SECONDS": 0.5,
    "sparklog.broker.log.janitor.SWEEP_EVERY_SECONDS": 0.5,
    "sparklog.broker.assembly.UPKEEP_QUIET_REMOTE_SECONDS": 0.5,
    "sparklog.broker.log.janitor.SETTLE_EVERY_SECONDS": 0.5,
    "sparklog.broker.log.janitor.UPKEEP_RETRY_SECONDS": 0.3,
    "sparklog.broker.log.janitor.UPKEEP_RETRY_MAX_SECONDS": 1.0,
    "sparklog.broker.log.janitor.RETENTION_EVERY_SECONDS": 0.4,
    "sparklog.broker.log.janitor.COMPACT_SETTLED_SECONDS": 0.5,
    "sparklog.storage.table.topic_table.TOMBSTONE_SECONDS": 1.0,
    "sparklog.storage.table.removed_files.REMOVED_FILES": 12,
    "sparklog.storage.table.removed_files.REMOVED_FILES_OF_TABLE": 6,
    "sparklog.broker.backoff.RETRY_MAX_SECONDS": 1.0,
    "sparklog.broker.log.publish_process.REQUEST_SECONDS": 1.5,
    "sparklog.broker.log.publish_process.RETRY_MAX_SECONDS": 1.0,
    "sparklog.storage.objects.base.CLAIM_BACKOFF_SECONDS": 0.02,
    "sparklog.storage.objects.base.CLAIM_BACKOFF_MAX_SECONDS": 0.2,
    "sparklog.broker.log.spark_batches.BATCHES_REMEMBERED": 2,
    "sparklog.broker.log.spark_batches.QUERIES_REMEMBERED": 1,
    "sparklog.broker.log.kafka_readers.BATCH_BYTES": 300,
    "sparklog.broker.log.kafka_readers.AHEAD_BYTES": 3_000,
    "sparklog.storage.wal.segment_appender.SEGMENT_ALLOCATED_BYTES": 2 * BLOCK_BYTES,
    "sparklog.limits.DIRECT_WRITE_BYTES": 3 * BLOCK_BYTES,
    "sparklog.limits.DIRECT_BUFFER_BYTES": BLOCK_BYTES,
    "sparklog.broker.serving_loops.FOLLOW_REMOTE_SECONDS": 0.2,
    "sparklog.broker.failover.handover.BALANCE_SECONDS": 0.6,
}
"""Bounds and graces so tight that a short run goes past them."""

MIRROR: Final = "mirror"
"""A topic that no other client writes to, administers or rewrites."""

_CONFIGS: list[dict[str, str]] = [
    *[{}] * 7,
    {"retention.ms": "1000"},
    {"retention.bytes": "1"},
    {"retention.bytes": "4000"},
]

_EVEN_BLOCKS = 30
"""Blocks of segments whose frames have their usual length, which is one block for most."""
PATIENCE_SECONDS = 60.0
BACKLOG_SECONDS: Final = 600.0
"""Until all is published: the backlog of a topic that was held back may be hundreds of files, each
of as few rows as the smallest bounds allow, and each a dozen requests to the store."""
_CONFIRM_AFTER_SECONDS = 0.2
"""Longer than a VACUUM takes. Without one, the WAL lets go sooner than it does by default."""
QUIET_SECONDS = 3.0
"""Longer than upkeep pauses: a merge leads to others, and each has files to sweep after a grace."""
_WRONG_SECONDS = 1_800.0
"""Largest clock error of a broker in runs about clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Parameters of a seed's world."""

    is_local: bool
    rates: Rates
    aim: str
    """Place that crashes, freezes and stalls aim at; "": any."""
    pace: Pace
    brokers: int
    partitions: tuple[int, ...]
    """Partitions of each initial topic; the first topic is never deleted."""
    config: dict[str, str]
    """Configuration of each initial topic."""
    idempotent: int
    simple: int
    queries: int
    is_heavy: bool
    """True if producers send batches as Kafka's do, small when compressed and large when decoded.
    """
    has_large_batches: bool
    """True if some batches of the query take long to publish."""
    clone: str
    """Target of a copied query checkpoint: the "same" topic, an "other" one, or none."""
    consumers: int
    readers: int
    engines: int
    cut_rate: float
    """Probability of a power cut soon after a commit of another engine."""
    has_vacuum: bool
    """True if another engine runs VACUUM."""
    administrators: int
    is_one_machine: bool
    """True if all brokers are on one machine, where processes can be probed."""
    skew_seconds: float
    """Largest clock error of a process."""
    switch_rate: float
    steps: int
    segment_blocks: int
    """Size of a segment of the log, in blocks; 0: the log is in objects."""
    is_brief: bool
    """True if brokers live for moments."""
    is_rewritten: bool
    """True if the query writes to a topic that is deleted and created again."""
    has_worker: bool
    """True if brokers publish by a process of their own."""
    has_mirror: bool
    """True if there is a topic that is a mirror."""
    is_cluster: bool = False
    """True if several brokers lead the root together."""
    asks: bool = True
    """True if brokers ask silent ones, and do not only wait for their heartbeats."""
    stuck_rate: float = 0.0
    """Probability that a member cannot read the logs of others for some time once it serves."""
    puts_per_second: float = puts.NO_BUDGET
    """The budget of puts of each broker, on an object store."""
    own_interval_ms: str = ""
    """The last topic's own interval of publishing; "": that of the broker. Only with a budget."""
    has_burst: bool = False
    """True if a pause is followed by many records; only with a budget."""
    typed: tuple[str, ...] = ()
    """The typed columns of each initial topic, as `value.schema`; "": none. (): no topic has any.
    """

    @property
    def is_skewed(self) -> bool:
        """Returns true if every broker's clock is wrong by more than a silent broker is waited
        for.
        """
        return self.skew_seconds > SKEW_SECONDS

    @property
    def orphan_grace_seconds(self) -> float:
        """Clocks may differ by a quarter of it."""
        if self.has_large_batches:
            return 0.8  # shorter than their preparations
        return 10 * self.skew_seconds if self.is_skewed else 3.0

    @property
    def abandoned_seconds(self) -> float:
        return 8 * self.skew_seconds if self.is_skewed else 1.0

    @classmethod
    def draw(cls, chance: random.Random) -> Profile:
        of_puts = random.Random(_peek(chance))
        of_types = random.Random(_peek(chance) + 1)
        is_local = chance.random() < 0.5
        has_vacuum = chance.random() < 0.1
        clone = chance.choice(["same", "other"]) if chance.random() < 0.08 else ""
        is_heavy = chance.random() < 0.04
        has_large_batches = chance.random() < 0.015
        is_skewed = chance.random() < 0.1 and not has_vacuum
        skew_seconds = _WRONG_SECONDS if is_skewed else SKEW_SECONDS
        if has_large_batches:
            skew_seconds = SKEW_SECONDS / 4
        others = [chance.randint(1, 3) for _ in range(chance.choice([0, 1]))]
        cut_rate = 0.7 if is_local and not has_vacuum and chance.random() < 0.25 else 0.0
        may_have_budget = not (is_local or is_heavy or has_large_batches or clone)
        puts_per_second = puts.draw(of_puts) if may_have_budget else puts.NO_BUDGET
        if puts_per_second:
            others += [of_puts.randint(1, 3) for _ in range(of_puts.choice([1, 2]))]
        partitions = (2, 2) if clone else (2, *others)
        may_be_typed = not (is_heavy or has_large_batches)
        kinds = typed.draw(of_types, len(partitions)) if may_be_typed else ()
        return cls(
            is_local=is_local,
            rates=Rates.draw(chance, is_local=is_local),
            aim=chance.choice(AIMS) if chance.random() < 0.3 else "",
            pace=Pace.draw(chance),
            brokers=chance.choice([1, 2, 3]),
            partitions=partitions,
            config=chance.choice(_CONFIGS),
            idempotent=chance.choice([1, 2]),
            simple=chance.choice([0, 0, 1]),
            queries=1 if clone or has_large_batches else chance.choice([0, 0, 1]),
            is_heavy=is_heavy,
            has_large_batches=has_large_batches,
            clone=clone,
            consumers=chance.choice([0, 1]),
            readers=chance.choice([0, 1, 1, 2]),
            engines=1 if has_vacuum or cut_rate else chance.choice([0, 0, 1]),
            cut_rate=cut_rate,
            has_vacuum=has_vacuum,
            administrators=max(chance.choice([0, 1]), len(kinds) > 0),
            is_one_machine=chance.random() < 0.3,
            skew_seconds=skew_seconds,
            switch_rate=chance.choice([0.3, 0.7, 1.0]),
            steps=chance.randint(600 if cut_rate else 250, 900)
            * (4 if chance.random() < 0.05 else 1),
            segment_blocks=chance.choice([0, 4, 8, _EVEN_BLOCKS]) if is_local else 0,
            has_worker=chance.random() < 0.4 and not puts_per_second,
            has_mirror=_peek(chance) < 0.2,
            asks=_peek(chance) * 10 % 1 < 0.7,
            is_brief=_peek(chance) * 1_000 % 1 < 0.08,
            is_rewritten=bool(others) and not clone and _peek(chance) * 100 % 1 < 0.5,
            puts_per_second=puts_per_second,
            own_interval_ms=of_puts.choice(puts.OWN_INTERVALS_MS) if puts_per_second else "",
            has_burst=of_puts.random() < 0.2,
            typed=kinds,
        )


def _peek(chance: random.Random) -> float:
    """Returns a random number, and leaves those that `chance` draws next as they are."""
    other = random.Random()
    other.setstate(chance.getstate())
    return other.random()


class Machine:
    """A process that is not a broker, and its view of the store."""

    def __init__(self, process: Process, store: ProcessStore) -> None:
        self.process = process
        self.store = store
        self.clock: ProcessClock = process.clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run."""

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
    torn: int
    """Files of other engines that were damaged below commits that survived."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()


def run(
    seed: int,
    change: Callable[[Profile], Profile] = lambda drawn: drawn,
    *,
    inspect: Callable[[World], None] = lambda _world: None,
    kind: Callable[[random.Random, Profile], World] | None = None,
) -> Outcome:
    """The seed's run, from an empty root to the last check, in the world that it draws.

    `inspect` may examine the store at the end. `kind`: a subclass of `World`.
    """
    chance = random.Random(seed)
    profile = change(Profile.draw(chance))
    world = (kind or World)(chance, profile)
    violation = None
    with _deterministic(world, random.Random(seed + 1)):
        try:
            world.run()
            inspect(world)
        except Violation as error:
            violation = str(error)
        except Exception:
            # An unexpected error of the real code is a violation too.
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
        torn=len(world.disk.ever_damaged),
    )


def _is_over(call: Call) -> bool:
    return call.done or not call.broker.alive


def _compact(name: str, core: Broker) -> flight_messages.TopicInfo:
    return core.topics.compact(name)


def create(request: flight_messages.CreateTopic, core: Broker) -> flight_messages.TopicInfo:
    """Creates a topic."""
    return core.topics.create(request)


class World:
    """Everything there is in one run."""

    def __init__(self, chance: random.Random, profile: Profile) -> None:
        self.chance = chance
        self.profile = profile
        self.scheduler = Scheduler(chance, switch_rate=profile.switch_rate)
        assert profile.is_local or not profile.segment_blocks, "an object store has no files"
        self.disk = Disk(self.scheduler, chance, is_local=profile.is_local, after_cut=self.note_cut)
        self.faults = Faults(
            self.scheduler,
            chance,
            profile.rates,
            profile.aim,
            self.disk,
            skew_seconds=profile.skew_seconds,
        )
        self.history = History()
        self.closing = False
        self._is_operated = True
        self.torn: set[str] = set()
        """Topics whose log a power cut has once left with an empty commit, or with a hole."""
        self.producer_ids: set[int] = set()
        self.deletions: list[Call] = []
        """Requested configurations of topics."""
        self._follower = MetadataStore(self.disk.base, clock=self.scheduler.clock)
        self._followed: tuple[frozenset[str], ClusterMetadata] | None = None
        """Objects of the metadata when they were last read, and the version that they hold."""
        self.topic_names = [f"t{number}" for number in range(len(profile.partitions))]
        self.read_names = [*self.topic_names, *([MIRROR] if profile.has_mirror else [])]
        self.mortal_topics = [] if profile.clone else self.topic_names[1:]
        self.own_topic = self.topic_names[-1]
        """The topic with `Profile.own_interval_ms`."""
        self.written: dict[tuple[str, str, int], Counter[int]] = {}
        """Rows by partition of each query batch that was acked: topic id, sender and number."""
        self.stagings: dict[bytes, int] = {}
        """Values that a query staged together, by value."""
        self.puts = puts.PutWatch(self)
        self.columns = ColumnWatch(self, random.Random(_peek(chance)))
        self._brokers: list[SimulatedBroker] = []
        self._misjudged: list[str] = []
        """Violations of `check_dead`."""
        self._asked: dict[tuple[str, str], tuple[float, bool]] = {}
        """When each broker was last asked whether it lives, and whether it has answered, by the
        names of the process that asked and of the broker's.
        """
        self.workers: list[tuple[Process, Process]] = []
        """(process of the broker, publishing process) of all publishing processes."""
        self._others: list[Reader | Engine] = []
        self._clients: list[Client] = []
        self._nonce = 0

    def note_metadata(self) -> None:
        """Is called after each put of a version of the metadata."""

    # -------------------------------------------------------------------------- for everybody

    def nonce(self) -> int:
        """A number that was never used before."""
        self._nonce += 1
        return self._nonce

    def machine(self, name: str) -> Machine:
        """A new process that lives until it dies."""
        process = Process(self.scheduler, name)
        return Machine(process, self.disk.view(process, self.faults))

    def config_of(self, name: str) -> dict[str, str]:
        """Returns the configuration of an initial topic."""
        config = self.profile.config | self.columns.config_of(name)
        if self.profile.own_interval_ms and name == self.own_topic:
            config[PUBLISH_INTERVAL] = self.profile.own_interval_ms
        return config

    def encode(self, topic: str, value: Value) -> bytes | None:
        """Returns the bytes of a value for the topic; None: it is a tombstone."""
        return typed.encode(value) if self.columns.config_of(topic) else value.encode()

    def find_broker(self, _place: Place | None = None) -> SimulatedBroker | None:
        """A broker that serves: mostly the newest, sometimes one that was replaced."""
        serving = [each for each in self._brokers if each.alive and each.serving]
        if not serving:
            return None
        if self.closing or self.chance.random() < 0.8:
            return serving[-1]
        return self.chance.choice(serving)

    def find_member(self, broker_id: int) -> SimulatedBroker | None:
        """Returns the member of that id that serves; of -1, any."""
        for each in self._brokers:
            leadership = each.leadership if each.alive and each.serving else None
            if broker_id >= 0 and leadership is not None and leadership.broker == broker_id:
                return each
        return self.find_broker() if broker_id < 0 else None

    def is_replaced(self, broker: SimulatedBroker) -> bool:
        """Returns true if a newer epoch than the broker's has been opened."""
        leadership, metadata = broker.leadership, self.metadata()
        if leadership is None:
            return False
        is_newest = metadata.brokers[leadership.broker].epoch == leadership.epoch
        return metadata.controller != leadership.broker or not is_newest

    def may_know_less(self, broker: SimulatedBroker, _topic_id: str) -> bool:
        """Returns true if the broker may not know a topic that exists."""
        return self.is_replaced(broker)

    def is_deleted(self, topic_id: str) -> bool:
        """Returns true if the topic's deletion is finished."""
        if any(not call.done and call.broker.alive for call in self.deletions):
            return False
        return all(known.topic_id != topic_id for known in self.metadata().topics.values())

    def broker_of(self, process: Process) -> SimulatedBroker:
        """The broker that is this process."""
        return next(each for each in self._brokers if each.process is process)

    def number_of(self, broker: SimulatedBroker) -> int:
        """Its place among all brokers that there ever were."""
        return self._brokers.index(broker)

    def broker_at(self, number: int) -> SimulatedBroker:
        return self._brokers[number]

    def check_dead(self, leader: Leader, asked_at: float, *, is_new: bool = True) -> None:
        """Checks that a leader may be taken for dead, by a process that asked for its heartbeat
        then. A violation is kept too: some threads of brokers survive any error.

        `is_new`: it was not dead at the look before.
        """
        try:
            self._check_dead(leader, asked_at, is_new=is_new)
        except Violation as error:
            self._misjudged.append(str(error))
            raise

    def _check_dead(self, leader: Leader, asked_at: float, *, is_new: bool) -> None:
        named = leader.broker, leader.epoch
        known = {
            (each.leadership.broker, each.leadership.epoch): each
            for each in self._brokers
            if each.leadership
        }
        broker = known.get(named)
        if leader.stopped or broker is None or not broker.alive:
            return
        place = self._asker(), broker.process.name
        asked_again_at, has_answered = self._asked.get(place, (-1.0, False))
        ensure(
            not (is_new and self.profile.asks and broker.serving)
            or (asked_again_at >= asked_at and not has_answered),
            f"{broker.process} is taken for dead, and was not asked, or has answered",
        )
        for landed_at, data in self.disk.beats.get(f"heartbeats/{leader.broker}.json", ()):
            beat = msgspec.json.decode(data, type=Heartbeat)
            silent_seconds = asked_at - beat.monotonic_seconds
            ensure(
                beat.epoch != leader.epoch
                or landed_at > asked_at
                or silent_seconds >= DEAD_AFTER_SECONDS,
                f"{broker.process} is taken for dead {silent_seconds} s after a heartbeat",
            )

    def ask(
        self,
        address: str,
        action: str,
        request: msgspec.Struct,
        *,
        timeout_seconds: float,
        credentials: object = None,
    ) -> flight_messages.RootProof:
        """Asks a broker for a proof, as one that takes it for dead does."""
        assert action == "root.prove", action
        assert isinstance(request, flight_messages.ProveRoot)
        name = address.partition(":")[0]
        broker = next(each for each in self._brokers if each.process.name == name)
        place = self._asker(), name
        began, self._asked[place] = self.scheduler.now, (self.scheduler.now, False)
        if broker.alive and broker.serving:
            call = broker.call("prove", lambda core: core.prove_root(request))
            self.scheduler.wait(lambda: call.done or not broker.alive, timeout_seconds)
            if call.done and call.error is None:
                proof: flight_messages.RootProof = call.result
                if proof.is_writing:
                    self._asked[place] = began, True
                return proof
        raise errors.BrokerUnavailable(address=address, reason="it does not answer")

    def _asker(self) -> str:
        """Returns the name of the process that runs."""
        current = self.scheduler.current
        assert current is not None
        return current.process.name

    def is_broker(self, process: Process) -> bool:
        return any(each.process is process for each in self._brokers)

    def topics(self) -> list[tuple[str, str, TableSnapshot]]:
        """(name, id, table) of every topic that there is."""
        clock = self.scheduler.clock
        return [
            (name, known.topic_id, TopicTable(self.disk.base, name, clock=clock).refresh())
            for name, known in self.metadata().topics.items()
        ]

    def metadata(self) -> ClusterMetadata:
        """The newest version, as a new reader and one that has followed all of them agree."""
        stored = frozenset(path for path in self.disk.base._objects if path.startswith("meta/"))
        if self._followed is None or self._followed[0] != stored:
            found = MetadataStore(self.disk.base, clock=self.scheduler.clock).reload()
            followed = self._follower.refresh()
            ensure(followed == found, f"two readers of the metadata differ: {followed}, {found}")
            self._followed = stored, found
        return self._followed[1]

    def copy(self, query: Query) -> None:
        """Runs a copy of the query's checkpoint."""
        topic = self.topic_names[self.profile.clone == "other"]
        self._clients.append(Query(self, f"{query.name}-copy", topic, original=query))

    # -------------------------------------------------------------------------- torn logs

    def cut_soon(self) -> None:
        """Another engine has committed: maybe the power goes, at once or some moments later."""
        if not self.faults.active or self.chance.random() >= self.profile.cut_rate:
            return
        seconds = 10 ** self.chance.uniform(-3, -1)

        def body() -> None:
            self.scheduler.sleep(seconds)
            if self.faults.active:
                self.faults.injected["power_cut"] += 1
                self.disk.note("fault", "power_cut")
                self.disk.power_cut()

        self.scheduler.spawn(Process(self.scheduler, "power"), "cut", body)

    def note_cut(self) -> None:
        """Forgets what no process remembers, after a power cut, and remembers torn logs.

        A commit that nothing was built on may be lost, and so may a version of the metadata.
        """
        self._follower = MetadataStore(self.disk.base, clock=self.scheduler.clock)
        self._followed = None
        self.columns.forget()
        for topic in self.disk.base.folders("topics"):
            if self._beyond_damage(topic):
                self.torn.add(topic)

    def explains(self, error: errors.Corrupt) -> bool:
        """Returns true if the error is about a torn log, or a data file lost to another cause.

        Such a file was removed by a VACUUM, or damaged by a power cut.
        """
        told = str(error)
        if any(path in told for path in self.disk.ever_damaged):
            return True
        if self.profile.has_vacuum and isinstance(
            error, errors.MissingObject | errors.CorruptObject
        ):
            return ".parquet" in told
        return any(
            mark in told
            for topic in self.torn
            for mark in (f"topics/{topic}/", f"topic {topic!r}", f"{topic}-")
        )

    def _mend(self) -> None:
        """Repairs as an operator does: removes the torn end of a log, restores damaged files."""
        for topic in sorted(self.torn):
            beyond = self._beyond_damage(topic)
            if beyond:
                self.disk.note("mended", beyond)
                self.disk.base.delete(beyond)
                self.columns.forget()
        restore(self)

    def _beyond_damage(self, topic: str) -> list[str]:
        """Commits that are empty, or behind one that is or that is missing."""
        folder = f"topics/{topic}/_delta_log"
        stats = {stat.name: stat for stat in self.disk.base.list_after(folder)}
        listing = delta_log.read_names(stats)
        version = max(listing.checkpoints, default=-1)
        while (stat := stats.get(delta_log.commit_name(version + 1))) and stat.size_bytes:
            version += 1
        names = (delta_log.commit_name(each) for each in sorted(listing.commits) if each > version)
        return [f"{folder}/{name}" for name in names]

    # -------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Raises `Violation`, `Stuck`, and unexpected errors of the real code."""
        self._begin()
        self.faults.active = True
        self._populate()
        self.scheduler.run(lambda: self.scheduler.steps >= self.profile.steps)
        self.disk.note("the chaos is over")
        self.faults.active = self._is_operated = False
        ensure(not self._misjudged, "; ".join(self._misjudged))
        self._check_defects()
        self._recover()
        self._check()

    def _begin(self) -> None:
        first = self._start_broker(check_alive=True)
        self._until(lambda: first.serving, "the first broker serves")
        for name, count in zip(self.topic_names, self.profile.partitions, strict=True):
            request = flight_messages.CreateTopic(
                topic=name, partitions=count, config=self.config_of(name)
            )
            if self.profile.config:
                self.history.keeps_nothing(name)
            self._ask(first, f"create {name}", functools.partial(create, request))
        if self.profile.has_mirror:
            request = flight_messages.CreateTopic(
                topic=MIRROR, partitions=2, config={"mirror.source": "a source"}
            )
            self._ask(first, "create a mirror", functools.partial(create, request))
            self.history.mirrors.add(self.metadata().topics[MIRROR].topic_id)

    def _populate(self) -> None:
        profile = self.profile
        for number in range(profile.idempotent):
            self._clients.append(Producer(self, f"producer{number}", idempotent=True))
        for number in range(profile.simple):
            self._clients.append(Producer(self, f"simple{number}", idempotent=False))
        for number in range(profile.queries):
            topic = self.topic_names[self.profile.is_rewritten]
            self._clients.append(Query(self, f"query{number}", topic))
        if profile.has_mirror:
            self._clients.append(Mirror(self, "mirror", MIRROR))
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
                if (self.torn or self.disk.damaged) and self.chance.random() < 0.1:
                    self._mend()
                alive = [each for each in self._brokers if each.alive]
                odds = self.chance.random()
                if not alive or (len(alive) < self.profile.brokers and odds < 0.2):
                    self._start_broker(check_alive=self.chance.random() < 0.3)
                elif odds > (0.6 if self.profile.is_brief else 0.97) and alive[0].serving:
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

    def _start_broker(self, *, check_alive: bool) -> SimulatedBroker:
        broker = SimulatedBroker(
            self,
            name=f"broker{len(self._brokers)}",
            broker_id=self.chance.choice([1, 1, 2]),
            check_alive=check_alive,
        )
        self._brokers.append(broker)
        return broker

    def judge(self, broker: SimulatedBroker, error: Exception) -> None:
        """Only what the design names may end a broker."""
        expected: tuple[type[Exception], ...] = (
            errors.BrokerClosing,
            errors.Fenced,
            SyncFailed,
        )
        if not broker.serving:
            expected += (errors.Retriable, errors.BrokerAlive, errors.OutcomeUnknown)
        if isinstance(error, errors.Corrupt) and self.is_replaced(broker):
            return  # its successor tidied up behind it
        if isinstance(error, errors.Fenced):
            ensure(
                self.is_replaced(broker), f"{broker.process} is fenced without a successor: {error}"
            )
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
        # A broker that has begun to take the root may still replace the last one.
        self._until(
            lambda: all(each.serving or not each.alive for each in self._brokers),
            "brokers that have begun to start serve or end",
        )
        last = self._replace()
        self._check_turns()
        if self.mortal_topics and self.chance.random() < 0.3:
            self._check_progress(last)
        self.closing = True
        self._until(
            lambda: all(each.finished for each in self._clients), "every client gets its answers"
        )
        self._check_burst(last)
        request = flight_messages.PublishNow(timeout_seconds=BACKLOG_SECONDS)
        self._ask(
            last, "publish all", lambda core: core.publishing.publish(request), BACKLOG_SECONDS
        )
        for other in self._others:
            other.process.alive = False
        self._until(lambda: not self.disk.late_puts, "all late puts have landed")
        self._until(
            lambda: not any(each.alive for each in self._brokers if each is not last),
            "brokers that were replaced notice it",
        )
        last.process.alive = False
        for broker, worker in self.workers:  # files that they write now would be swept much later
            worker.alive &= broker.alive
        self.last = self._replace(check_alive=True)
        # A log is trimmed up to its newest checkpoint, and that comes with the next record.
        self._ask(self.last, "one more", self._append_one)
        for _ in range(2):
            self._pass(1.5)
            self.scheduler.clock.advance(
                self.profile.orphan_grace_seconds + 2 * self.profile.skew_seconds
            )
        self._backfill()
        self._rest(QUIET_SECONDS)

    def _check_progress(self, broker: SimulatedBroker) -> None:
        """While the table of one topic cannot be written, the others are published."""
        self.faults.broken = f"topics/{self.mortal_topics[0]}/"
        self._ask(broker, "one record", self._append_one)
        request = flight_messages.PublishNow(topics=self.topic_names[:1])
        self._ask(broker, "publish the others", lambda core: core.publishing.publish(request))
        self.faults.broken = ""

    def _check_turns(self, seconds: float = 0.0) -> None:
        """Each topic has its turn while clients write on, with a budget of puts.

        `seconds`: after which no fault of the chaos has an effect.
        """
        if not self.profile.puts_per_second:
            return
        calm_since = self.scheduler.now + seconds
        self.puts.begin_calm(calm_since)
        for _ in range(puts.ROUNDS):
            self._fill()
            for turn_seconds, goals in self.puts.goals():
                self._until(
                    functools.partial(self.puts.are_reached, goals),
                    f"each topic has its turn: {goals} of {self.puts.bounds}",
                    max(calm_since - self.scheduler.now, 0.0) + turn_seconds,
                )

    def _fill(self) -> None:
        """Appends to all partitions, so that all topics wait for a turn."""
        for each in [each for each in self._brokers if each.alive and each.serving]:
            call = each.call("fill", self._append_one_to_each)
            self._until(functools.partial(_is_over, call), "an answer")
            # A broker that was replaced refuses, and so does one whose topics change.
            expected = errors.Retriable | errors.Fenced | errors.Invalid | errors.OutcomeUnknown
            ensure(call.error is None or isinstance(call.error, expected), repr(call.error))

    def _check_burst(self, broker: SimulatedBroker) -> None:
        """Many records come after a pause, and the puts that were not made are not made up for."""
        if not (self.profile.puts_per_second and self.profile.has_burst):
            return
        self._pass(self.puts.bounds.pause_seconds)
        for _ in range(puts.RECORDS_AFTER_PAUSE):
            self._ask(broker, "one record of a burst", self._append_one_to_each)
            self._pass(self.puts.bounds.interval_seconds)

    def _backfill(self) -> None:
        """Has the files of typed tables rewritten, as `topics columns --backfill` does."""
        for name in self.columns.topics():
            self._ask(self.last, f"backfill {name}", functools.partial(_compact, name))

    def _replace(self, *, check_alive: bool = False) -> SimulatedBroker:
        """One more broker, which serves."""
        last = self._start_broker(check_alive=check_alive)
        self._until(lambda: last.serving or not last.alive, "the last broker serves")
        ensure(last.alive, f"the last broker does not start: {last.failure!r}")
        return last

    def _append_one(self, core: Broker) -> None:
        self._append(core, [(self.topic_names[0], 0)])

    def _append_one_to_each(self, core: Broker) -> None:
        """Appends a record to each partition of the initial topics that the broker leads."""
        led_partitions = [
            (name, each.partition)
            for name in self.topic_names
            if name in self.metadata().topics
            for each in core.topics.describe(name).partitions
            if each.end >= 0
        ]
        self._append(core, led_partitions)

    def _append(self, core: Broker, partitions: Sequence[tuple[str, int]]) -> None:
        """Appends a record to each of these partitions, and waits for all of them."""
        appended = []
        for name, partition in partitions:
            place = core.topics.describe(name).topic_id, partition
            nonce = self.nonce()
            value = Value(
                topic_id=place[0], sender="end", partition=partition, sequence=nonce, nonce=nonce
            )
            row = Row(self.encode(name, value) or value.encode(), None, None)
            batch = pa.record_batch({"value": pa.array([row.value], pa.binary())})
            appended.append((place, row, core.append(name, partition, batch)))
        for place, row, pending in appended:
            (found,) = core.wait(pending)
            row = dataclasses.replace(row, timestamp_us=found.arrival_us)
            self.history.ack("the end", place, found.base_offset, [row])

    def _until(
        self, is_reached: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        deadline = self.scheduler.now + seconds
        self.scheduler.run(lambda: is_reached() or self.scheduler.now > deadline)
        self._check_defects()  # they are why something does not come about
        ensure(is_reached(), f"this does not come about in {seconds} s: {what}")

    def _pass(self, seconds: float) -> None:
        end = self.scheduler.now + seconds
        self.scheduler.run(lambda: self.scheduler.now >= end)

    def _rest(self, seconds: float) -> None:
        """Waits until nothing was put into tables or staging, or removed there, for so long."""
        files, since = self._files(), self.scheduler.now

        def is_quiet() -> bool:
            nonlocal files, since
            found = self._files()
            if found != files:
                files, since = found, self.scheduler.now
            return self.scheduler.now - since >= seconds

        self._until(is_quiet, "upkeep has nothing left to do")

    def _files(self) -> set[str]:
        objects = self.disk.base._objects
        return {path for path in objects if path.startswith(("topics/", "staging/"))}

    def _ask(
        self,
        broker: SimulatedBroker,
        what: str,
        body: Callable[[Broker], Any],
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        call = broker.call(what, body)
        self._until(lambda: call.done or not broker.alive, what, seconds)
        ensure(call.done and call.error is None, f"{what}: {call.error!r}, {broker.failure!r}")

    # -------------------------------------------------------------------------- the checks

    def _check(self) -> None:
        ensure(not self.puts.wrong, "; ".join(self.puts.wrong[:3]))
        self.columns.check(self.last.core)
        metadata = self.metadata()
        self._check_logs(metadata)
        self._check_batches(metadata)
        self._check_bounds()
        self._check_epochs(metadata)
        self._check_leftovers()
        self._check_defects()

    def _check_logs(self, metadata: ClusterMetadata) -> None:
        """Every topic's log, as four tell it, is one, and keeps all promises."""
        base = self.disk.base
        follower = RootFollower(base, clock=self.scheduler.clock)
        for name, known in metadata.topics.items():
            snapshot = follower.refresh([name])[name]
            ends = follower.ends(snapshot)
            ensure(ends == snapshot.ends, f"{name}: the table ends at {snapshot.ends} of {ends}")
            info = self.last.core.topics.describe(name)
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
                read(base, self.history, "the table at the end", place, pieces, start, end)
                log = self.history.log(place, start, end)
                self.history.check_log("the log at the end", place, start, end, log)
                ensure(
                    told.get(partition, (0, 0)) == (start, end),
                    f"{place}: is from {start} to {end}, reported was {told}",
                )

    def _check_batches(self, metadata: ClusterMetadata) -> None:
        """Checks that each batch of a query exists once and whole in its topic, and in no other."""
        found: Counter[tuple[str, str, int, int]] = Counter()
        stagings: dict[tuple[str, str, int], int] = {}
        whole: set[Place] = set()
        for name, known in metadata.topics.items():
            for partition in range(known.partition_count):
                place = known.topic_id, partition
                if self.history.is_whole(place):
                    whole.add(place)
                for row in self.history.rows(place):
                    value = Value.decode(row.identity)
                    staging = self.stagings.get(row.identity)
                    if staging is None:
                        continue
                    what = f"{name}: batch {value.nonce} of {value.sender}"
                    ensure(value.sender.endswith(f"@{name}"), what)
                    found[known.topic_id, value.sender, value.nonce, partition] += 1
                    before = stagings.setdefault((name, value.sender, value.nonce), staging)
                    ensure(before == staging, f"{what} was staged as {before} and as {staging}")
        for (topic_id, sender, batch), rows in self.written.items():
            for partition in (0, 1):
                wanted = rows[partition]
                count = found[topic_id, sender, batch, partition]
                ensure(
                    count == wanted or (topic_id, partition) not in whole,
                    f"batch {batch} of {sender} has {count} rows in {topic_id}-{partition}:"
                    f" {wanted}",
                )
        drivers = [each for each in self._clients if isinstance(each, Query)]
        for sender in {each.sender for each in drivers}:
            refused = [each.is_refused for each in drivers if each.sender == sender]
            ensure(not all(refused), f"every driver of {sender} was refused")

    def _check_bounds(self) -> None:
        """Checks that nothing is kept in memory for finished work."""
        led_partitions = self.last.led_partitions
        ensure(
            not led_partitions.backlog.unpublished_bytes,
            f"{led_partitions.backlog.unpublished_bytes} bytes wait",
        )
        ensure(
            not led_partitions.backlog.waiting(),
            f"these wait: {[each.name for each in led_partitions.backlog.waiting()]}",
        )
        count = led_partitions.backlog.unconfirmed_count
        ensure(not count, f"{count} published entries are kept")
        for topic in led_partitions.topics():
            ensure(topic.held_back is None, f"{topic.name} is held back: {topic.held_back}")

    def _check_epochs(self, metadata: ClusterMetadata) -> None:
        leadership = self.last.leadership
        assert leadership is not None
        own = Epoch(leadership.broker, leadership.epoch, leadership.log)
        ensure(metadata.open_epochs == (own,), f"epochs are still open: {metadata.open_epochs}")
        base = self.disk.base
        for broker in base.folders("wal"):
            for epoch in base.folders(f"wal/{broker}"):
                folder = f"wal/{broker}/{epoch}"
                names = [stat.name for stat in base.list_after(folder)]
                left = [name for name in names if f"{folder}/{name}" not in self.disk.zombies]
                is_own = folder == wal.folder(own.broker, own.epoch)
                is_in_segments = any(name.endswith(wal.base.SEGMENT) for name in left)
                # The end of a log in objects, and its checkpoint; a segment made ahead as well.
                allowed = (3 if is_own else 0) if is_in_segments else 1 + is_own
                ensure(len(left) <= allowed, f"{folder} still holds {left}")

    def _check_defects(self) -> None:
        ensure(not self.disk.defects, "; ".join(self.disk.defects))

    def _check_leftovers(self) -> None:
        base = self.disk.base
        for topic in base.folders("topics"):
            found = TopicTable(base, topic, clock=self.scheduler.clock)
            snapshot = found.refresh()
            named = {data_path(topic, file) for files in snapshot.files for file in files}
            stored = {
                f"topics/{topic}/{stat.name}"
                for stat in base.walk(f"topics/{topic}")
                if stat.name.endswith(".parquet") and "_delta_log" not in stat.name
            }
            # Uncommitted files of another engine are for its own VACUUM.
            stored = {path for path in stored if path in named or f"/{NAME}" not in path}
            ensure(named <= stored, f"{topic}: these are gone: {sorted(named - stored)}")
            if maintenance.is_emptied(base, topic):
                # Nothing looks at a deleted topic again once it was emptied for good, so what a
                # store applies long after its client has given up stays.
                stored -= self.disk.zombies
            ensure(stored <= named, f"{topic}: these are orphans: {sorted(stored - named)}")
        staged = [f"staging/{stat.name}" for stat in base.walk("staging")]
        left = [path for path in staged if not self.may_stay_staged(path)]
        ensure(not left, f"still staged: {left}")

    def may_stay_staged(self, path: str) -> bool:
        """Returns whether a staged object is kept for 30 days: the end of an attempt.

        An attempt ends by a refusal, and by topics that were created again.
        """
        if not manifest.is_manifest(path.rpartition("/")[2]):
            return False
        found = manifest.load(self.disk.base, path)
        topics = self.metadata().topics
        is_for_another = any(map(topics.get, found.topic_ids))
        return found.refused or (is_for_another and found.is_void(manifest.destinations(topics)))


# ------------------------------------------------------------------------------ determinism


_OF_CODE: Final = (AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Errors that no fault of a store explains."""


class _TraceLog:
    """Takes the place of a module's logger."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def warning(self, event: str, **facts: object) -> None:
        self._disk.note("log", event, repr(facts))
        error = sys.exc_info()[1]
        if isinstance(error, _OF_CODE) and str(error) != "simulated":
            self._disk.defects.append(f"{event}: {error!r}")

    error = warning
    info = warning


def _frame_bytes(index_bytes: int, payload_bytes: int) -> int:
    """Returns the length of a frame that has one to three blocks, whatever it holds."""
    spare = (index_bytes + payload_bytes) % 3 * BLOCK_BYTES
    return frames.round_up(index_bytes + payload_bytes + 2 * frames.HEADER_BYTES) + spare


_compile_loops = functools.cache(compile_loops)


@contextlib.contextmanager
def _deterministic(world: World, chance: random.Random) -> Iterator[None]:
    """Everything that the real code takes from its surroundings comes from the seed."""
    _compile_loops()  # numba takes random numbers where it saves a loop, and would take the seed's
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
        for target, bound in (_LIMITS | columns.LIMITS).items():
            stack.enter_context(mock.patch(target, bound))
        after_seconds = _CONFIRM_AFTER_SECONDS if world.profile.has_vacuum else 0.0
        patch(limits, "CONFIRM_AFTER_SECONDS", after_seconds)
        if world.profile.is_heavy:
            for target, bound in scales.LIMITS.items():
                stack.enter_context(mock.patch(target, bound))
            stack.enter_context(scales.installed(world))
        defaults = TopicTable.__init__.__kwdefaults__ or {}
        # A writer uses the default, regardless of the janitor's setting.
        graces = {
            "orphan_grace_seconds": world.profile.orphan_grace_seconds,
            "removed_file_grace_seconds": REMOVED_FILE_GRACE_SECONDS,
        }
        patch(TopicTable.__init__, "__kwdefaults__", {**defaults, **graces})
        patch(
            wal.segments.SegmentWal.__init__,
            "__kwdefaults__",
            {"segment_bytes": world.profile.segment_blocks * BLOCK_BYTES},
        )
        if world.profile.segment_blocks < _EVEN_BLOCKS:
            patch(wal.frames, "frame_bytes", _frame_bytes)
        patch(maintenance.clean_log, "__kwdefaults__", {"kept_seconds": 1.0, "kept_versions": 4})
        stack.enter_context(simulated(world))
        patch(os, "urandom", chance.randbytes)
        patch(secrets, "token_hex", lambda count=32: chance.randbytes(count).hex())
        patch(secrets, "token_bytes", lambda count=32: chance.randbytes(count))
        yield
