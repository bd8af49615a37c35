"""Kills a broker repeatedly while Kafka's clients work through its Kafka listener.

Idempotent producers write numbered records, a group of two reads and commits. In the end
each record exists once, in its producer's order, at its acked offset; no acked commit is ever lost;
and the group has processed everything.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from sparklog.check.analysis import analyse
from sparklog.check.driving import RunResult, Workload, drive
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from tests.support.brokers import Row, rows_followed, rows_of_table
from tests.support.killing import PATIENCE_SECONDS, BrokerProcess

TOPIC: Final = "t"
GROUP: Final = "g"
PARTITIONS: Final = 3
CODECS: Final = ("none", "lz4", "zstd")
"""One producer for each."""

_SOON: Final = {
    "SPARKLOG_GROUPS_MIN_SESSION_TIMEOUT_MS": "500",
    "SPARKLOG_GROUPS_INITIAL_REBALANCE_DELAY_MS": "100",
}
_FETCH_SECONDS: Final = 5.0
_EAGER_CLIENT: Final[Mapping[str, Any]] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "socket.timeout.ms": 5_000,
    "log_level": 0,
}
"""A broker that is killed is not to be news, and is to be found soon."""


def kafka_broker(root: Path, environment: Mapping[str, str] | None = None) -> BrokerProcess:
    """A broker that may be killed, with a Kafka listener always at the same address."""
    return BrokerProcess(root, {**_SOON, **(environment or {})}, kafka=_quiet_address())


def _quiet_address() -> str:
    """A free one that no client is given for its own end of a connection.

    A client that looks for a broker which is down may otherwise find itself, and keep the address.
    """
    chance = random.SystemRandom()
    while True:
        address = "127.0.0.1", chance.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(address):
            return f"{address[0]}:{address[1]}"


# ------------------------------------------------------------------------------ who writes


@dataclass(slots=True)
class _Producer:
    """An idempotent producer: the records it sent to each partition in order, and those acked."""

    number: int
    sent: list[list[bytes]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    acked: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Partition, offset, value."""
    failures: list[object] = field(default_factory=list)

    def run(self, address: str, ended: threading.Event, chance: random.Random) -> None:
        """Sends one by one, in bursts and after rests, until it is stopped."""
        producer = confluent_kafka.Producer(
            {
                **_EAGER_CLIENT,
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "compression.type": CODECS[self.number],
                "linger.ms": self.number,
                "message.timeout.ms": 600_000,
                "error_cb": self._failed,
            }
        )
        number = 0
        while not ended.is_set():
            for _ in range(chance.choice([1, 1, 3, 50])):
                partition = chance.randrange(PARTITIONS)
                value = b"%d:%d" % (self.number, number)
                self.sent[partition].append(value)
                producer.produce(TOPIC, value, partition=partition, on_delivery=self._delivered)
                number += 1
            producer.poll(0)
            if chance.random() < 0.2:
                producer.flush(PATIENCE_SECONDS)
            # So long a rest that meanwhile the log has been trimmed of all that it has written.
            ended.wait(3.0 if chance.random() < 0.003 else chance.random() * 0.02)
        if left := producer.flush(2 * PATIENCE_SECONDS):
            self.failures.append(f"{left} records were not acked")

    def _failed(self, error: confluent_kafka.KafkaError) -> None:
        if error.fatal():
            self.failures.append(error)

    def _delivered(
        self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message
    ) -> None:
        partition, offset, value = message.partition(), message.offset(), message.value()
        if error is not None or partition is None or offset is None or value is None:
            self.failures.append(error)
        else:
            self.acked.append((partition, offset, value))


# ------------------------------------------------------------------------------ who reads


class _Commits:
    """Acked commits of the group, and the commits that the broker reports."""

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
            offset = max(each.offset, 0)  # below: nothing was committed
            least = before[each.partition]
            assert offset >= least, f"{each.partition} went back from {least} to {offset}"
            with self._lock:
                self.acked[each.partition] = max(self.acked[each.partition], offset)


@dataclass(slots=True)
class _Member:
    """A member of the group, and all that it has processed."""

    number: int
    commits: _Commits
    seen: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Partition, offset, value."""
    failures: list[BaseException] = field(default_factory=list)

    def run(self, address: str, ended: threading.Event, chance: random.Random) -> None:
        """Processes some records, then commits them, until it is stopped."""
        consumer = confluent_kafka.Consumer(
            {
                **_EAGER_CLIENT,
                "bootstrap.servers": address,
                "group.id": GROUP,
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
        # The broker may be down: then the one that comes back is asked by the next.
        with contextlib.suppress(confluent_kafka.KafkaException):
            self.commits.check(lambda: consumer.committed(assigned, _FETCH_SECONDS))

    def _process(self, batch: Sequence[confluent_kafka.Message]) -> None:
        for each in batch:
            partition, offset, value = each.partition(), each.offset(), each.value()
            assert partition is not None
            assert offset is not None
            assert value is not None
            self.seen.append((partition, offset, value))

    def _commit(self, consumer: confluent_kafka.Consumer) -> None:
        """Commits its position; without an ack the outcome is unknown, and it continues."""
        with contextlib.suppress(confluent_kafka.KafkaException):
            for each in consumer.commit(asynchronous=False) or ():
                if each.error is None and each.offset >= 0:
                    self.commits.ack(each.partition, each.offset)


# ------------------------------------------------------------------------------ the whole


class KafkaWorld:
    """Producers and a group at work on a broker that may be killed."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self.broker = broker
        self.commits = _Commits()
        self.producers = [_Producer(number) for number in range(len(CODECS))]
        self.members = [_Member(number, self.commits) for number in range(2)]
        self._written, self._read = threading.Event(), threading.Event()
        address = broker.kafka_address
        self._asking = confluent_kafka.Consumer(
            {**_EAGER_CLIENT, "bootstrap.servers": address, "group.id": GROUP}
        )
        self._writers = [
            self._thread(each.run, self._written, seed + each.number) for each in self.producers
        ]
        self._readers = [
            self._thread(each.run, self._read, seed - each.number) for each in self.members
        ]

    def _thread(
        self,
        run: Callable[[str, threading.Event, random.Random], None],
        ended: threading.Event,
        seed: int,
    ) -> threading.Thread:
        address = self.broker.kafka_address
        return threading.Thread(target=run, args=(address, ended, random.Random(seed)), daemon=True)

    def begin(self) -> None:
        """Everybody is at work once this returns."""
        admin = AdminClient({"bootstrap.servers": self.broker.kafka_address})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(PATIENCE_SECONDS)
        for thread in self._writers + self._readers:
            thread.start()
        self.go_on()

    def go_on(self) -> None:
        """Returns once more was acked, read and committed: what follows is another kill."""
        before = self._progress()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(now <= then for now, then in zip(self._progress(), before, strict=True)):
            assert time.monotonic() < deadline, f"no client continues: {before}, {self._progress()}"
            self._check_failures()
            time.sleep(0.01)

    def _progress(self) -> list[int]:
        acked = [len(each.acked) for each in self.producers]
        return [*acked, sum(len(each.seen) for each in self.members), self.commits.count]

    def _check_failures(self) -> None:
        assert [failure for each in self.producers for failure in each.failures] == []
        assert [failure for each in self.members for failure in each.failures] == []

    def check_commits(self) -> None:
        """Asks the restarted broker until it answers."""
        places = [confluent_kafka.TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.commits.check(lambda: self._asking.committed(places, _FETCH_SECONDS))
            except confluent_kafka.KafkaException:
                assert time.monotonic() < deadline, "no broker reports the committed offsets"

    def end(self) -> None:
        """Everything is acked, processed and committed when this returns."""
        self._written.set()
        for thread in self._writers:
            thread.join(3 * PATIENCE_SECONDS)
        self._check_failures()
        counts = [sum(len(each.sent[p]) for each in self.producers) for p in range(PARTITIONS)]
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while self.commits.acked != counts:
            assert time.monotonic() < deadline, f"committed {self.commits.acked} of {counts}"
            time.sleep(0.05)
        self._check_failures()

    def close(self) -> None:
        """Stops all workers."""
        self._written.set()
        self._read.set()
        for thread in self._writers + self._readers:
            if thread.ident is not None:
                thread.join(3 * PATIENCE_SECONDS)
        self._asking.close()

    def judge(self) -> None:
        """Compares the records in the root, with all clients gone, with the acks."""
        store, clock = LocalStore(self.broker.root), SystemClock()
        follower = RootFollower(store, clock=clock)
        log = [rows_followed(follower, store, TOPIC, number) for number in range(PARTITIONS)]
        for partition, rows in enumerate(log):
            assert [offset for offset, _ in rows] == list(range(len(rows)))
            assert rows_of_table(store, clock, TOPIC, partition) == rows, "the table is not the log"
            for each in self.producers:
                name = b"%d:" % each.number
                mine = [value for _, value in rows if value and value.startswith(name)]
                assert mine == each.sent[partition], "a record is missing, doubled or out of order"
        for each in self.producers:
            assert len(each.acked) == sum(map(len, each.sent))
            for partition, offset, value in each.acked:
                assert log[partition][offset][1] == value
        seen = {place for each in self.members for place in each.seen}
        assert seen == set(_places(log)), "a record was not processed, or another one"


def _places(log: Sequence[Sequence[Row]]) -> Iterator[tuple[int, int, bytes | None]]:
    for partition, rows in enumerate(log):
        for offset, value in rows:
            yield partition, offset, value


def survive(root: Path, *, kills: int, minutes: float, seed: int) -> None:
    """Kills so many times, or for so long, at random moments; and then looks at what there is."""
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


def survive_a_check(root: Path, *, kills: int, seed: int) -> None:
    """Kills at random moments while `sparklog check` is at work, which then must find nothing."""
    chance = random.Random(seed)
    broker = kafka_broker(root)
    broker.start()
    workload = Workload(
        bootstrap=broker.kafka_address,
        seconds=3_600.0,
        rate=300.0,
        groups=2,
        seed=seed,
        patience_seconds=2 * PATIENCE_SECONDS,
    )
    ended = threading.Event()
    outcomes: list[RunResult | BaseException] = []

    def check() -> None:
        try:
            outcomes.append(drive(workload, lambda *_: None, ended))
        except BaseException as error:
            outcomes.append(error)

    checking = threading.Thread(target=check)
    checking.start()
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0.5, 3.0))
            broker.kill()
            broker.start()
        time.sleep(1.0)
        ended.set()
        checking.join(6 * PATIENCE_SECONDS)
        (outcome,) = outcomes
        assert isinstance(outcome, RunResult), outcome
        assert outcome.problems == (), f"seed {seed}"
        assert outcome.history.acked > 0
        assert len(outcome.history.commits) > 0
        assert analyse(outcome.history) == [], f"seed {seed}"
    finally:
        ended.set()
        checking.join(6 * PATIENCE_SECONDS)
        broker.stop()
