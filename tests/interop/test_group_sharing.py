"""One group of our own consumers and of Kafka's clients, unmodified: they share its partitions."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import confluent_kafka
import kafka
import pytest

import sparklog
from sparklog.broker.agent import Agent
from sparklog.settings import GroupSettings
from tests.support.kafkas import broker

SECONDS = 30.0
PARTITIONS = 4
EACH = 25


class Client(Protocol):
    """A member of group g."""

    def poll(self) -> list[bytes]: ...

    def assignment(self) -> set[tuple[str, int]]: ...

    def close(self) -> None: ...


class Ours:
    """Our own consumer."""

    def __init__(self, agent: Agent, log: sparklog.Log, **options: Any) -> None:
        self._consumer = log.consumer("t", group="g", heartbeat_seconds=0.1, **options)

    def poll(self) -> list[bytes]:
        return [each.value for each in self._consumer.poll(0.1)]

    def assignment(self) -> set[tuple[str, int]]:
        return set(self._consumer.assignment)

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """kafka-python, with its defaults."""

    def __init__(self, agent: Agent, log: sparklog.Log) -> None:
        self._consumer = kafka.KafkaConsumer(
            "t",
            bootstrap_servers=agent.kafka_address,
            group_id="g",
            auto_offset_reset="earliest",
            heartbeat_interval_ms=100,
        )

    def poll(self) -> list[bytes]:
        # A poll that ends before the others have joined would make it join once more.
        batches = self._consumer.poll(500).values()
        return [each.value for batch in batches for each in batch]

    def assignment(self) -> set[tuple[str, int]]:
        return {(each.topic, each.partition) for each in self._consumer.assignment()}

    def close(self) -> None:
        self._consumer.close()


class Confluent:
    """librdkafka, with its defaults."""

    def __init__(self, agent: Agent, log: sparklog.Log, **options: Any) -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": agent.kafka_address,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "heartbeat.interval.ms": 100,
                **options,
            }
        )
        self._consumer.subscribe(["t"])

    def poll(self) -> list[bytes]:
        found: list[Any] = []
        for each in self._consumer.consume(100, 0.1):
            assert each.error() is None
            found.append(each.value())
        return found

    def assignment(self) -> set[tuple[str, int]]:
        return {(each.topic, each.partition) for each in self._consumer.assignment()}

    def close(self) -> None:
        self._consumer.close()


class OursCooperative(Ours):
    """Our own consumer, which keeps its partitions in a rebalance."""

    def __init__(self, agent: Agent, log: sparklog.Log) -> None:
        super().__init__(agent, log, assignors=["cooperative-sticky"])


class ConfluentCooperative(Confluent):
    """librdkafka, which keeps its partitions in a rebalance."""

    def __init__(self, agent: Agent, log: sparklog.Log) -> None:
        options = {"partition.assignment.strategy": "cooperative-sticky"}
        super().__init__(agent, log, **options)


class Reader:
    """Polls a client in a thread of its own, as a process of its own would."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self.values: list[bytes] = []
        self.assignment: set[tuple[str, int]] = set()
        self.failure: BaseException | None = None
        self._make = make
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            client = self._make()
            while not self._over.is_set():
                self.values += client.poll()
                self.assignment = client.assignment()
            client.close()
        except BaseException as error:
            self.failure = error

    def close(self) -> None:
        self._over.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        assert self.failure is None, self.failure


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    groups = GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=500)
    with broker(tmp_path / "root", groups=groups) as agent:
        yield agent


@pytest.fixture(name="log")
def _log(agent: Agent) -> Iterator[sparklog.Log]:
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=PARTITIONS)
        yield log


def fill(log: sparklog.Log, name: str) -> set[bytes]:
    """Adds 25 records to each partition; their values."""
    places = list(itertools.product(range(PARTITIONS), range(EACH)))
    with log.producer() as producer:
        for partition, number in places:
            producer.send("t", f"{name}-{partition}-{number}".encode(), partition=partition)
    return {f"{name}-{partition}-{number}".encode() for partition, number in places}


def wait(*readers: Reader, until: Callable[[], object]) -> None:
    """Until something holds."""
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline, [each.assignment for each in readers]
        assert not any(each.failure for each in readers), [each.failure for each in readers]
        time.sleep(0.01)


def is_shared(*readers: Reader) -> bool:
    """Returns true if each member has its part of the partitions."""
    parts = [each.assignment for each in readers]
    return all(parts) and sum(map(len, parts)) == PARTITIONS == len(set().union(*parts))


KINDS = [
    (Ours, KafkaPython),
    (KafkaPython, Ours),
    (Ours, Confluent),
    (Confluent, Ours),
    (KafkaPython, Ours, Confluent),
    (OursCooperative, ConfluentCooperative),
    (ConfluentCooperative, OursCooperative, OursCooperative),
]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(k.__name__ for k in kinds))
def test_one_group(
    agent: Agent, log: sparklog.Log, kinds: tuple[Callable[[Agent, sparklog.Log], Client], ...]
) -> None:
    """Each record is read by one member, whichever leads; a leaving member's partitions move to
    the others.
    """
    before = fill(log, "before")
    readers: list[Reader] = []
    for kind in kinds:
        readers.append(Reader(partial(kind, agent, log)))
        wait(*readers, until=lambda: is_shared(*readers))
    is_cooperative = kinds[0] in (OursCooperative, ConfluentCooperative)
    protocol = "cooperative-sticky" if is_cooperative else "range"
    assert log.describe_group("g").protocol == protocol
    after = fill(log, "after")

    gone: list[Reader] = []

    def times() -> Counter[bytes]:
        return Counter(value for each in (*readers, *gone) for value in each.values)

    wait(*readers, until=lambda: times().keys() >= before | after)
    # All but one go, and it has all partitions, from where the others were. One after another:
    # as in Kafka, a commit amid a rebalance may be refused, and its records are read again.
    while len(readers) > 1:
        gone.append(readers.pop(0))
        gone[-1].close()
        wait(*readers, until=lambda: is_shared(*readers))
    last = readers[-1]
    end = fill(log, "end")
    wait(last, until=lambda: end <= set(last.values))
    last.close()
    assert max(times()[value] for value in after | end) == 1
