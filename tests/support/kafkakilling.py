"""Kills a broker repeatedly while Kafka's clients work through its Kafka listener.

Idempotent producers write numbered records, a group of two reads and commits. In the end
each record exists once, in its producer's order, at its acked offset; no acked commit is ever lost;
and the group has processed everything. A test of a cluster adds clients of other kinds.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from sparklog.check import history as histories
from sparklog.check.analysis import analyse
from sparklog.check.driving import RunResult, Workload, drive
from sparklog.check.history import NO_OFFSET, History
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from tests.support.brokers import rows_followed, rows_of_table
from tests.support.killing import PATIENCE_SECONDS, BrokerProcess, Log
from tests.support.ports import quiet_address

TOPIC: Final = "t"
GROUP: Final = "g"
PARTITIONS: Final = 6
"""Each broker of a cluster leads two."""
CODECS: Final = ("none", "lz4", "zstd")
"""One producer for each."""

SOON: Final = {
    "SPARKLOG_GROUPS_MIN_SESSION_TIMEOUT_MS": "500",
    "SPARKLOG_GROUPS_INITIAL_REBALANCE_DELAY_MS": "100",
}
FETCH_SECONDS: Final = 5.0
EAGER_CLIENT: Final[Mapping[str, Any]] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "socket.timeout.ms": 5_000,
    "log_level": 0,
}
"""Kills of a broker are not logged, and the restarted broker is found soon."""


def kafka_broker(
    root: Path,
    environment: Mapping[str, str] | None = None,
    *,
    limits: Mapping[str, float] | None = None,
) -> BrokerProcess:
    """Returns a broker to be killed, with a Kafka listener always at the same address."""
    given = {**SOON, **(environment or {})}
    return BrokerProcess(root, given, kafka=quiet_address(), limits=limits)


class Served(Protocol):
    """A broker, or all brokers of a cluster, with comma-separated lists as addresses."""

    @property
    def root(self) -> Path: ...

    @property
    def address(self) -> str: ...

    @property
    def kafka_address(self) -> str: ...


# ------------------------------------------------------------------------------ writers


@dataclass(slots=True)
class Writer:
    """An idempotent producer: the records it sent to each partition in order, and those acked."""

    number: int
    """The writer's own; the values that it sends begin with it."""
    rest_seconds: float = 0.02
    """The longest pause between two bursts."""
    sent: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    acked: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Partition, offset (or `NO_OFFSET`), value."""
    failures: list[object] = field(default_factory=list)
    _next: int = 0

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        """Sends until it is stopped; on return, every record is acked or a failure."""
        raise NotImplementedError

    def burst(self, chance: random.Random) -> Iterator[tuple[int, bytes]]:
        """Yields the next records to send, one or more: partition and value."""
        for _ in range(chance.choice([1, 1, 3, 50])):
            partition = chance.randrange(PARTITIONS)
            value = b"%d:%d" % (self.number, self._next)
            self._next += 1
            self.sent[partition].append(value)
            yield partition, value

    def rest(self, ended: threading.Event, chance: random.Random) -> None:
        """Pauses, occasionally so long that all its records have been trimmed from the log."""
        ended.wait(3.0 if chance.random() < 0.003 else chance.random() * self.rest_seconds)


class _Producer(Writer):
    """librdkafka's producer."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        """Sends single records and bursts, with rests in between, until it is stopped."""
        producer = confluent_kafka.Producer(
            {
                **EAGER_CLIENT,
                "bootstrap.servers": served.kafka_address,
                "enable.idempotence": True,
                "compression.type": CODECS[self.number],
                "linger.ms": self.number,
                "message.timeout.ms": 600_000,
                "error_cb": self._failed,
            }
        )
        while not ended.is_set():
            for partition, value in self.burst(chance):
                producer.produce(TOPIC, value, partition=partition, on_delivery=self._delivered)
            producer.poll(0)
            if chance.random() < 0.2:
                producer.flush(PATIENCE_SECONDS)
            self.rest(ended, chance)
        if left := producer.flush(2 * PATIENCE_SECONDS):
            self.failures.append(f"{left} records were not acked")

    def _failed(self, error: confluent_kafka.KafkaError) -> None:
        if error.fatal():
            self.failures.append(error)

    def _delivered(
        self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message
    ) -> None:
        partition, offset, value = message.partition(), message.offset(), message.value()
        if error is not None or partition is None or value is None:
            self.failures.append(error)
        else:
            # Without an offset if an ack was lost and a later batch's ack implies it.
            self.acked.append((partition, NO_OFFSET if offset is None else offset, value))


# ------------------------------------------------------------------------------ readers


class Commits:
    """Acked commits of a group, and the commits that the broker reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acked = [0] * PARTITIONS
        self.count = 0

    def ack(self, partition: int, offset: int) -> None:
        with self._lock:
            self.acked[partition] = max(self.acked[partition], offset)
            self.count += 1

    def check(self, fetch: Callable[[], Sequence[confluent_kafka.TopicPartition]]) -> None:
        """Asserts that no reported commit is below one acked or reported before the request."""
        with self._lock:
            before = list(self.acked)
        for each in fetch():
            assert each.error is None, each.error
            offset = max(each.offset, 0)  # negative: nothing was committed
            least = before[each.partition]
            assert offset >= least, f"{each.partition} went back from {least} to {offset}"
            with self._lock:
                self.acked[each.partition] = max(self.acked[each.partition], offset)


@dataclass(slots=True)
class Member:
    """A member of a group, and everything that it has processed."""

    number: int
    commits: Commits
    group: str = GROUP
    seen: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Partition, offset, value."""
    failures: list[BaseException] = field(default_factory=list)

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        """Processes records and commits them, until it is stopped."""
        raise NotImplementedError


class _ConfluentMember(Member):
    """librdkafka's consumer in a group."""

    __slots__ = ()

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        """Processes some records, then commits them, until it is stopped."""
        consumer = confluent_kafka.Consumer(
            {
                **EAGER_CLIENT,
                "bootstrap.servers": served.kafka_address,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 3_000,
                "heartbeat.interval.ms": 300,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )

        try:
            consumer.subscribe([TOPIC], on_assign=self._assigned)
            while not ended.is_set():
                batch = consumer.consume(chance.choice([1, 10, 200]), 0.1)
                self._process([each for each in batch if each.error() is None])
                if chance.random() < 0.5:
                    self._commit(consumer)
        except BaseException as error:
            self.failures.append(error)
        finally:
            consumer.close()

    def _assigned(
        self,
        consumer: confluent_kafka.Consumer,
        assigned: list[confluent_kafka.TopicPartition],
    ) -> None:
        # The broker may be down; in that case the next assignment checks again.
        with contextlib.suppress(confluent_kafka.KafkaException):
            self.commits.check(lambda: consumer.committed(assigned, FETCH_SECONDS))

    def _process(self, batch: Sequence[confluent_kafka.Message]) -> None:
        for each in batch:
            partition, offset, value = each.partition(), each.offset(), each.value()
            assert partition is not None
            assert offset is not None
            assert value is not None
            self.seen.append((partition, offset, value))

    def _commit(self, consumer: confluent_kafka.Consumer) -> None:
        """Commits its position; without an ack, the outcome is unknown and it continues."""
        with contextlib.suppress(confluent_kafka.KafkaException):
            for each in consumer.commit(asynchronous=False) or ():
                if each.error is None and each.offset >= 0:
                    self.commits.ack(each.partition, each.offset)


@dataclass(slots=True)
class Reader:
    """A consumer without a group, which reads each partition from its start."""

    name: str
    seen: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    """By partition, the values at offsets 0, 1, 2, …"""
    failures: list[BaseException] = field(default_factory=list)

    def run(self, served: Served, ended: threading.Event, chance: random.Random) -> None:
        """Reads until it is stopped."""
        raise NotImplementedError

    def take(self, partition: int, offset: int, value: bytes | None) -> None:
        """Notes a record of the partition; fails if it is not the next one."""
        seen = self.seen[partition]
        assert offset == len(seen), f"{self.name} got {partition}/{offset} after {len(seen) - 1}"
        assert value is not None
        seen.append(value)


# ------------------------------------------------------------------------------ the whole


class KafkaWorld:
    """Clients that use brokers while these are killed.

    Three producers and a group of two, all librdkafka's, in addition to those given.
    """

    def __init__(
        self,
        served: Served,
        seed: int,
        *,
        writers: Sequence[Writer] = (),
        members: Sequence[Member] = (),
        readers: Sequence[Reader] = (),
        rest_seconds: float = 0.02,
    ) -> None:
        commits = Commits()
        self.served = served
        self.writers: list[Writer] = [_Producer(each, rest_seconds) for each in range(len(CODECS))]
        self.writers += writers
        self.members: list[Member] = [_ConfluentMember(number, commits) for number in range(2)]
        self.members += members
        self.readers = list(readers)
        self.groups = {each.group: each.commits for each in self.members}
        self._written, self._read = threading.Event(), threading.Event()
        self._asking = {
            group: confluent_kafka.Consumer(
                {
                    **EAGER_CLIENT,
                    "bootstrap.servers": served.kafka_address,
                    "group.id": group,
                }
            )
            for group in self.groups
        }
        self._writing = [
            self._thread(each.run, self._written, seed + number)
            for number, each in enumerate(self.writers)
        ]
        runs = [each.run for each in self.members] + [each.run for each in self.readers]
        self._reading = [
            self._thread(run, self._read, seed - number) for number, run in enumerate(runs)
        ]

    def _thread(
        self,
        run: Callable[[Served, threading.Event, random.Random], None],
        ended: threading.Event,
        seed: int,
    ) -> threading.Thread:
        arguments = (self.served, ended, random.Random(seed))
        return threading.Thread(target=run, args=arguments, daemon=True)

    def begin(self) -> None:
        """Starts all clients, and waits until each makes progress."""
        admin = AdminClient({**EAGER_CLIENT, "bootstrap.servers": self.served.kafka_address})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(PATIENCE_SECONDS)
        for thread in self._writing + self._reading:
            thread.start()
        self.go_on()

    def go_on(self) -> None:
        """Waits until more has been acked, read and committed, before another kill."""
        before = self._progress()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while stuck := [name for name, now in self._progress().items() if now <= before[name]]:
            assert time.monotonic() < deadline, f"no progress of {stuck} since {before}"
            self.check_failures()
            time.sleep(0.01)

    def _progress(self) -> dict[str, int]:
        found = {f"writer {each.number}": len(each.acked) for each in self.writers}
        for group, commits in self.groups.items():
            members = [each for each in self.members if each.group == group]
            found[f"group {group}"] = sum(len(each.seen) for each in members)
            found[f"commits of {group}"] = commits.count
        for reader in self.readers:
            found[f"reader {reader.name}"] = sum(map(len, reader.seen))
        return found

    def check_failures(self) -> None:
        """Asserts that no client has failed."""
        workers: list[Writer | Member | Reader] = [*self.writers, *self.members, *self.readers]
        for each in workers:
            for failure in each.failures:
                if isinstance(failure, BaseException):
                    failure.add_note(f"of {type(each).__name__}")
                    raise failure
                raise AssertionError(f"{type(each).__name__}: {failure}")

    def check_commits(self) -> None:
        """Checks the committed offsets of each group, and retries until a broker responds."""
        places = [confluent_kafka.TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        for group, commits in self.groups.items():
            fetch = functools.partial(self._asking[group].committed, places, FETCH_SECONDS)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    commits.check(fetch)
                    break
                except confluent_kafka.KafkaException:
                    assert time.monotonic() < deadline, "no broker reports the committed offsets"

    @property
    def acked(self) -> int:
        return sum(len(each.acked) for each in self.writers)

    def end(self) -> None:
        """Stops writing, and waits until everything is acked, processed and committed."""
        self._written.set()
        for thread in self._writing:
            thread.join(3 * PATIENCE_SECONDS)
        self.check_failures()
        counts = [sum(len(each.sent[p]) for each in self.writers) for p in range(PARTITIONS)]
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while left := self._left(counts):
            assert time.monotonic() < deadline, f"of {counts}, only {left}"
            self.check_failures()
            time.sleep(0.05)

    def _left(self, counts: Sequence[int]) -> dict[str, list[int]]:
        """Positions of the groups and readers that are not done yet."""
        found = {f"group {group}": commits.acked for group, commits in self.groups.items()}
        found |= {f"reader {each.name}": list(map(len, each.seen)) for each in self.readers}
        return {name: done for name, done in found.items() if done != counts}

    def close(self) -> None:
        """Stops all workers."""
        self._written.set()
        self._read.set()
        for thread in self._writing + self._reading:
            if thread.ident is not None:
                thread.join(3 * PATIENCE_SECONDS)
        for each in self._asking.values():
            each.close()

    def judge(self) -> Log:
        """Compares the records in the root with the acks, once all clients are gone."""
        store, clock = LocalStore(self.served.root), SystemClock()
        follower = RootFollower(store, clock=clock)
        log = [rows_followed(follower, store, TOPIC, number) for number in range(PARTITIONS)]
        for partition, rows in enumerate(log):
            assert [offset for offset, _ in rows] == list(range(len(rows)))
            assert rows_of_table(store, clock, TOPIC, partition) == rows, "the table is not the log"
            by_writer: dict[bytes, list[bytes]] = {}
            for _, value in rows:
                assert value is not None
                by_writer.setdefault(value.partition(b":")[0], []).append(value)
            for each in self.writers:
                mine = by_writer.pop(b"%d" % each.number, [])
                assert mine == each.sent[partition], "a record is missing, doubled or out of order"
            assert not by_writer, "a record that no writer has sent"
        for each in self.writers:
            assert len(each.acked) == sum(map(len, each.sent))
            for partition, offset, value in each.acked:
                assert offset == NO_OFFSET or log[partition][offset][1] == value
        places = set(_places(log))
        for group in self.groups:
            members = [each for each in self.members if each.group == group]
            seen = {place for each in members for place in each.seen}
            left, others = sorted(places - seen)[:9], sorted(seen - places)[:9]
            assert seen == places, f"group {group} did not process {left}, but {others}"
        for reader in self.readers:
            values = [[value for _, value in rows] for rows in log]
            assert reader.seen == values, f"{reader.name} did not read the log"
        return log


def _places(log: Log) -> Iterator[tuple[int, int, bytes | None]]:
    for partition, rows in enumerate(log):
        for offset, value in rows:
            yield partition, offset, value


def survive(root: Path, *, kills: int, minutes: float, seed: int) -> None:
    """Kills at random moments, at least this many times and this long; then judges the result."""
    chance = random.Random(seed)
    broker = kafka_broker(root)
    broker.start()
    world = KafkaWorld(broker, seed)
    try:
        world.begin()
        deadline = time.monotonic() + minutes * 60
        killed = 0
        while killed < kills or time.monotonic() < deadline:
            time.sleep(chance.uniform(0.05, 1.2))
            broker.kill()
            killed += 1
            broker.start()
            world.check_commits()
            world.go_on()
        world.end()
        world.check_commits()
        world.close()
        broker.stop()
        world.judge()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        world.close()
        broker.stop()


# ------------------------------------------------------------------------------ with a checker


class Checking:
    """`sparklog check`, running in its own topic while brokers are killed."""

    def __init__(self, served: Served, seed: int, *, rate: float = 300.0) -> None:
        self._seed = seed
        self._root = served.root
        self._workload = Workload(
            bootstrap=served.kafka_address,
            seconds=1e9,
            rate=rate,
            groups=2,
            seed=seed,
            patience_seconds=2 * PATIENCE_SECONDS,
        )
        self._ended = threading.Event()
        self._outcomes: list[RunResult | BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcomes.append(drive(self._workload, lambda *_: None, self._ended))
        except BaseException as error:
            self._outcomes.append(error)

    def stop(self) -> None:
        """Stops it, and waits until it has ended."""
        self._ended.set()
        self._thread.join(6 * PATIENCE_SECONDS)

    def judge(self) -> History:
        """Stops it and returns the history; asserts that it contains no anomaly."""
        self.stop()
        assert self._outcomes, "the checker does not end"
        (outcome,) = self._outcomes
        assert isinstance(outcome, RunResult), outcome
        assert outcome.problems == (), f"seed {self._seed}: {outcome.problems}"
        assert outcome.history.acked > 0
        assert len(outcome.history.commits) > 0
        found = analyse(outcome.history)
        if found:  # `sparklog check --replay` shows them again
            histories.save(outcome.history, self._root.with_name("history.npz"))
        assert found == [], f"seed {self._seed}: {found}"
        return outcome.history


def survive_a_check(root: Path, *, kills: int, seed: int) -> None:
    """Kills at random moments while `sparklog check` runs, which must find no anomaly."""
    chance = random.Random(seed)
    broker = kafka_broker(root)
    broker.start()
    checking = Checking(broker, seed)
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0.5, 3.0))
            broker.kill()
            broker.start()
        time.sleep(1.0)
        checking.judge()
    finally:
        checking.stop()
        broker.stop()
