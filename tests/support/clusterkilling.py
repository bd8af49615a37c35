"""Disturbs the three brokers of a cluster in turn while clients of all kinds use it.

A victim is killed, frozen until the others have replaced it, or shut down cleanly; it is restarted
later. Clients must continue while it is away, and again once it is back. In the end the promises
of `KafkaWorld` must hold, and `sparklog check` must find no anomaly in its clients' history.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import sparklog
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.metadata.leadership import is_up
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore
from tests.support.kafkakilling import (
    PARTITIONS,
    SOON,
    Checking,
    Commits,
    KafkaWorld,
    Member,
    Reader,
    Writer,
)
from tests.support.kafkaworkers import (
    ConfluentReader,
    JavaClients,
    OwnMember,
    OwnReader,
    OwnWriter,
    PythonMember,
    PythonReader,
    PythonWriter,
)
from tests.support.killing import BrokerProcess, Follower
from tests.support.killpoints import KillPoints
from tests.support.piping import IN_PARTITIONS, OUT_PARTITIONS, Driver, Outcome, Producer, drain
from tests.support.ports import quiet_address
from tests.support.waiting import wait_until

BROKERS: Final = (1, 2, 3)
KINDS: Final = ("kill", "freeze", "stop")
DEAD_AFTER_SECONDS: Final = 3.0
_REST_SECONDS: Final = 0.3
"""The longest pause of a writer between two bursts: many clients share the machine."""
_START_SECONDS: Final = 300.0
"""The limit for Spark's start, while everything else starts alongside."""
_CHECK_RATE: Final = 100.0
_SAID_CHARACTERS: Final = 3_000
_MEMBER: Final = {
    **SOON,
    "SPARKLOG_LIVENESS_HEARTBEAT_SECONDS": "0.3",
    "SPARKLOG_LIVENESS_DEAD_AFTER_SECONDS": str(DEAD_AFTER_SECONDS),
    "SPARKLOG_LOG_LEVEL": "info",
}


# ------------------------------------------------------------------------------ the brokers


class Cluster:
    """Three brokers on a root, which log to files in `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.root = root
        self._folder = folder
        self._metadata = MetadataStore(LocalStore(root), clock=SystemClock())
        self.brokers = {broker: self._process(broker) for broker in BROKERS}

    def _process(self, broker: int) -> BrokerProcess:
        return BrokerProcess(
            self.root,
            {**_MEMBER, "SPARKLOG_CLUSTER_RACK": f"rack {broker}"},
            flight=quiet_address(),
            kafka=quiet_address(),
            broker=broker,
            said=self._folder / f"broker-{broker}.log",
        )

    @property
    def address(self) -> str:
        return ",".join(each.address for each in self.brokers.values())

    @property
    def kafka_address(self) -> str:
        return ",".join(each.kafka_address for each in self.brokers.values())

    @property
    def metadata(self) -> ClusterMetadata:
        """The newest version."""
        return self._metadata.reload()

    def start(self) -> None:
        for each in self.brokers.values():
            each.start()
        self.await_up()

    def await_up(self) -> None:
        """Waits until all brokers can lead partitions; one that was replaced rejoins first."""

        def are_up() -> bool:
            for broker, process in self.brokers.items():
                assert process.is_running, f"broker {broker} ended: {process.await_end()}"
            metadata = self.metadata
            return all(is_up(metadata, broker) for broker in BROKERS)

        wait_until(are_up, "all brokers are up")

    def close(self) -> None:
        """Shuts down all brokers cleanly, one at a time, including frozen ones."""
        for each in self.brokers.values():
            if each.is_running:
                each.thaw()
                each.stop()

    def exceptions(self) -> list[str]:
        """The log lines with a traceback: nothing that happens here should cause one."""
        return [
            line
            for path in sorted(self._folder.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if '"exception":' in line
        ]

    def said(self) -> str:
        """The last log lines of each broker."""
        return "\n".join(
            f"{path}:\n{path.read_text(errors='replace')[-_SAID_CHARACTERS:]}"
            for path in sorted(self._folder.glob("*.log"))
        )


# ------------------------------------------------------------------------------ with Spark


class SparkPipeline:
    """A streaming query from topic to topic, and a producer for its input."""

    def __init__(self, cluster: Cluster, folder: Path, chance: random.Random) -> None:
        self._cluster = cluster
        with sparklog.connect(cluster.address) as log:
            log.create_topic("in", partitions=IN_PARTITIONS)
            log.create_topic("out", partitions=OUT_PARTITIONS)
        points = KillPoints(folder / "points")  # none of which is armed
        self.driver = Driver(cluster.root, folder / "driver", points)
        self._producer = Producer(cluster.address, chance)
        self._follower = RootFollower(LocalStore(cluster.root), clock=SystemClock())
        self._seen = 0
        self.driver.start()

    def begin(self) -> None:
        """Waits for the first output: a JVM and Python workers have to start first."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._has_moved():
            assert time.monotonic() < deadline, f"Spark does not start: {self.driver.said()}"
            time.sleep(1.0)
        self._seen = self._ended_at()

    def go_on(self) -> None:
        """Waits until there is more output than last time."""
        wait_until(self._has_moved, "something comes out of the pipeline")
        self._seen = self._ended_at()

    def _has_moved(self) -> bool:
        assert self.driver.is_running, f"the driver stopped: {self.driver.said()}"
        self._producer.check()
        return self._ended_at() > self._seen

    def _ended_at(self) -> int:
        return sum(self._follower.ends(self._follower.refresh(["out"])["out"]))

    def drain(self) -> Outcome:
        return drain(self._producer, self.driver, self._cluster.address)

    def close(self) -> None:
        """Ends it, whatever its state."""
        self._producer.stop()
        if self.driver.is_running:
            self.driver.kill()


# ------------------------------------------------------------------------------ disturbances


@dataclass(slots=True)
class Disturber:
    """Disturbs one broker at a time: each kind equally often, every third time the controller."""

    cluster: Cluster
    world: KafkaWorld
    pipeline: SparkPipeline | None
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    """Disturbances of each kind, and how many of them hit the controller."""
    _kinds: list[str] = field(default_factory=list)
    _victims: list[int | None] = field(default_factory=list)
    """None: the controller."""

    def disturb(self) -> None:
        """Disturbs a victim, and waits until it is back and all clients have continued."""
        if not self._kinds:
            self._kinds = self.chance.sample(KINDS, len(KINDS))
            in_turn = BROKERS[self.counts.total() % len(BROKERS)]
            self._victims = [None, in_turn, self.chance.choice(BROKERS)]
            self.chance.shuffle(self._victims)
        kind, victim = self._kinds.pop(), self._victims.pop()
        controller = self.cluster.metadata.controller
        victim = controller if victim is None else victim
        self.counts[kind] += 1
        self.counts["controller"] += victim == controller
        time.sleep(self.chance.uniform(0.05, 1.2))
        getattr(self, f"_{kind}")(victim, self.cluster.brokers[victim])
        self.cluster.await_up()
        self._go_on()

    def _go_on(self) -> None:
        self.world.check_commits()
        self.world.go_on()
        if self.pipeline is not None:
            self.pipeline.go_on()

    def _kill(self, victim: int, process: BrokerProcess) -> None:
        process.kill()
        self._be_away(victim)
        process.start()

    def _stop(self, victim: int, process: BrokerProcess) -> None:
        assert process.stop() == 0, "a broker did not leave in good order"
        self._be_away(victim)
        process.start()

    def _freeze(self, victim: int, process: BrokerProcess) -> None:
        """Thaws the victim after it has been replaced, a moment or some time later."""
        epoch = self.cluster.metadata.brokers[victim].epoch
        process.freeze()
        wait_until(lambda: not is_up(self.cluster.metadata, victim), "a frozen broker is replaced")
        self._be_away(victim)
        process.thaw()
        wait_until(
            lambda: self.cluster.metadata.brokers[victim].epoch > epoch, "it joins again by itself"
        )

    def _be_away(self, victim: int) -> None:
        """Waits for a moment, for longer, or until all clients continue without the victim."""
        how = self.chance.randrange(3)
        if how == 1:
            time.sleep(self.chance.uniform(0.0, 2.0))
        elif how == 2:
            wait_until(lambda: not is_up(self.cluster.metadata, victim), "a broker is replaced")
            self._go_on()


# ------------------------------------------------------------------------------ the whole


@contextlib.contextmanager
def _told(cluster: Cluster, seed: int) -> Iterator[None]:
    """Adds the seed and the brokers' last log lines to a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}\n{cluster.said()}")
        raise


def survive(
    folder: Path, *, disturbances: int, minutes: float, seed: int, jvms: bool
) -> Counter[str]:
    """Disturbs at least this many times and for this long, then checks all promises.

    `jvms`: with Java clients and Spark as well, which take some time to start.
    Returns the counts of disturbances and of acked records.
    """
    chance = random.Random(seed)
    cluster = Cluster(folder / "root", folder / "logs")
    writers: list[Writer] = [PythonWriter(10, _REST_SECONDS), OwnWriter(11, _REST_SECONDS)]
    members: list[Member] = [
        PythonMember(0, Commits(), "kafka-python"),
        OwnMember(0, Commits(), "sparklog"),
    ]
    readers: list[Reader] = [
        ConfluentReader("librdkafka"),
        PythonReader("kafka-python"),
        OwnReader("sparklog"),
    ]
    with contextlib.ExitStack() as closing, _told(cluster, seed):
        if jvms:
            clients = JavaClients(12, rest_seconds=_REST_SECONDS)
            closing.callback(clients.close)
            writers.append(clients.writer)
            members.append(clients.member)
            readers.append(clients.reader)
        closing.callback(cluster.close)
        cluster.start()
        world = KafkaWorld(
            cluster,
            seed,
            writers=writers,
            members=members,
            readers=readers,
            rest_seconds=_REST_SECONDS,
        )
        closing.callback(world.close)
        world.begin()
        checking = Checking(cluster, seed, rate=_CHECK_RATE)
        closing.callback(checking.stop)
        follower = Follower(PARTITIONS)
        follower.begin(cluster.root, cluster.address)
        pipeline = SparkPipeline(cluster, folder, random.Random(seed)) if jvms else None
        if pipeline is not None:
            closing.callback(pipeline.close)
            pipeline.begin()
        disturber = Disturber(cluster, world, pipeline, chance)
        deadline = time.monotonic() + minutes * 60
        done = 0
        while done < disturbances or time.monotonic() < deadline:
            disturber.disturb()
            done += 1
        history = checking.judge()
        world.end()
        world.check_commits()
        world.close()
        outcome = pipeline.drain() if pipeline is not None else None
        cluster.close()
        log = world.judge()
        follower.end(log)
        if outcome is not None:
            outcome.judge(LocalStore(cluster.root))
        assert not cluster.exceptions(), "a broker has logged an unexpected error"
        found = Counter(disturber.counts)
        found["acked"] = world.acked
        found["acked to the checker"] = history.acked
        found["out of the pipeline"] = len(outcome.given) if outcome is not None else 0
        return found
