"""Measurements of both sides with Kafka's clients."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchmarks.compare import sooner
from benchmarks.kafka import clients
from benchmarks.kafka.sides import PARTITIONS, KafkaSetup, Ours, Side, Theirs, measure, more
from benchmarks.processes import cpu_seconds
from benchmarks.progress import doing
from sparklog.bench.report import Measurement, Times

_IDLE: Final = 500
_GROUPS: Final = 50
_STARTED: Final = 300
_STARTS: Final = 3
_Client: TypeAlias = Callable[[str, int], float]
_READS: Final = 5
"""Each takes a fraction of a second, so a single one is easily disturbed."""
_WARM: Final = 20
"""The unmeasured warm-up sends one record for every this many measured ones."""


@measure
def produce(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures producers at full speed, acks=all."""
    count = setup.options.rows // 10

    def java(side: Side, **options: object) -> float:
        clients.create(side.address, PARTITIONS)
        clients.java_produce(side.address, count // _WARM, **options)
        return clients.java_produce(side.address, count, **options)

    def confluent(side: Side) -> float:
        clients.create(side.address, PARTITIONS)
        clients.confluent_produce(side.address, count // _WARM)
        return clients.confluent_produce(side.address, count)

    what = "Java ProducerPerformance, acks=all"
    yield more(f"{what}, batches of 16 kB", setup.best(what, java), least=0.8)
    large = partial(java, batch_size=256 * 1024, linger_ms=5)
    yield more(f"{what}, 256 kB and linger 5", setup.best(f"{what}, 256 kB", large), least=0.8)
    yield more("confluent-kafka, produce", setup.best("confluent-kafka", confluent), least=1.0)


@measure
def consume(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures consumers of recent records, and of records that are only in the table."""
    count = setup.options.rows // 4
    hot: dict[str, float] = {}
    four: dict[str, float] = {}
    cold: dict[str, float] = {}
    for kind in setup.sides:
        with doing(f"Java ConsumerPerformance, {kind.name}"), setup.one(kind) as side:
            clients.create(side.address, PARTITIONS)
            clients.java_produce(side.address, count, batch_size=64 * 1024, linger_ms=5)
            once = partial(clients.java_consume, count=count)
            hot[side.name] = max(once(side.address) for _ in range(3))
            four[side.name] = max(once(side.address, consumers=4) for _ in range(2))
            cold[side.name] = max(_cold(side, once) for _ in range(3))
    yield more("Java ConsumerPerformance, from the hot tail", hot, least=0.8)
    yield more("four Java ConsumerPerformance at once, from the hot tail", four, least=0.8)
    yield more("Java ConsumerPerformance, from the table after a restart", cold, least=0.4)


def _cold(side: Side, once: Callable[[str], float]) -> float:
    side.restart()
    return once(side.address)


@measure
def python(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures clients written in Python."""
    count = setup.options.rows // 50
    yield from _sent_and_read(
        setup, "kafka-python", clients.kafka_python_produce, clients.kafka_python_consume, count
    )
    yield from _sent_and_read(
        setup, "aiokafka", clients.aiokafka_produce, clients.aiokafka_consume, count
    )


def _sent_and_read(
    setup: KafkaSetup, name: str, send: _Client, read: _Client, count: int
) -> Iterator[Measurement]:
    read_at: dict[str, float] = {}

    def both(side: Side) -> float:
        clients.create(side.address, PARTITIONS)
        send(side.address, count // _WARM)
        sent = send(side.address, count)
        found = max(read(side.address, count) for _ in range(_READS))
        read_at[side.name] = max(found, read_at.get(side.name, 0.0))
        return sent

    sent = setup.best(name, both)
    yield more(f"{name}, produce", sent, least=0.95, unit="k records/s", per=1e3)
    yield more(f"{name}, consume", read_at, least=0.95, unit="k records/s", per=1e3)


@measure
def single(setup: KafkaSetup) -> Iterator[Measurement]:
    """One record at a time, acked before the next."""
    count = round(300 * setup.options.seconds)

    def times(side: Side, config: Mapping[str, str]) -> Times:
        clients.create(side.address, PARTITIONS, config=config)
        return clients.one_at_a_time(side.address, count)

    what = "confluent-kafka, one record at a time, acked"
    found = setup.each("one record at a time", partial(times, config={}))
    ours, theirs = found[Ours.name], found.get(Theirs.name)
    yield sooner(what, ours, theirs, most={50: 1.0, 99: 1.0}, than="Kafka")
    found = setup.each("the same, flushed", partial(times, config={"flush.messages": "1"}))
    ours, theirs = found[Ours.name], found.get(Theirs.name)
    yield sooner(
        f"{what}, flush.messages=1", ours, theirs, most={50: math.inf, 99: math.inf}, than="Kafka"
    )


@measure
def start(setup: KafkaSetup) -> Iterator[Measurement]:
    """Starts idempotent producers concurrently, each with one record."""

    def times(side: Side) -> Times:
        clients.create(side.address, PARTITIONS)
        clients.first_acks(side.address, _STARTED // _WARM, PARTITIONS)
        return Times(
            [clients.first_acks(side.address, _STARTED, PARTITIONS) for _ in range(_STARTS)]
        )

    found = setup.each(f"{_STARTED} producers start", times)
    yield sooner(
        f"{_STARTED} idempotent producers start at once: until all have their first ack",
        found[Ours.name],
        found.get(Theirs.name),
        most={50: 1.2},
        than="Kafka",
    )


@measure
def idle(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures the cost of idle connections and groups."""
    with setup.one(Ours) as side, doing(f"{_IDLE} idle connections, {_GROUPS} groups"):
        clients.create(side.address, PARTITIONS)
        clients.confluent_produce(side.address, 1_000)
        before = _resident_bytes(side.pid)
        host, _, port = side.address.rpartition(":")
        connections = [socket.create_connection((host, int(port))) for _ in range(_IDLE)]
        groups = [f"g{number}" for number in range(_GROUPS)]
        consumers = clients.members(side.address, groups)
        clients.poll_until(consumers, lambda: all(each.assignment() for each in consumers))
        time.sleep(2.0)
        used, began = cpu_seconds(side.pid)[side.pid], time.perf_counter()
        time.sleep(setup.options.seconds)
        share = (cpu_seconds(side.pid)[side.pid] - used) / (time.perf_counter() - began)
        grown = _resident_bytes(side.pid) - before
        for each in connections:
            each.close()
        for consumer in consumers:
            consumer.close()
    what = f"{_IDLE} idle connections and {_GROUPS} groups with a member each"
    yield Measurement(
        name=what, value=f"{100 * share:.1f} % of a core", target="< 10 %", met=share < 0.1
    )
    yield Measurement(
        name="the same: memory more than without",
        value=f"{grown / 2**20:.0f} MiB",
        target="≤ 300 MiB",
        met=grown <= 300 * 2**20,
    )


@measure
def rebalance(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures the time from a fiftieth member's join until all fifty have their partition."""

    def seconds(side: Side) -> float:
        clients.create(side.address, _GROUPS)
        consumers = clients.members(side.address, ["g"] * (_GROUPS - 1))

        def counts() -> list[int]:
            return [len(each.assignment()) for each in consumers]

        clients.poll_until(consumers, lambda: sum(counts()) == _GROUPS and min(counts()) > 0)
        consumers += clients.members(side.address, ["g"])
        found = clients.poll_until(consumers, lambda: counts() == [1] * _GROUPS)
        for each in consumers:
            each.close()
        return found

    found = {name: Times([value]) for name, value in setup.each("a rebalance", seconds).items()}
    yield sooner(
        f"a rebalance of {_GROUPS} members",
        found[Ours.name],
        found.get(Theirs.name),
        most={50: 2.0},
        than="Kafka",
    )


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
