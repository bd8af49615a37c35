"""Consumers of large records, and of many partitions, from the hot tail and from the table."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.consumers.clients import TOPIC
from benchmarks.kafka import clients
from benchmarks.kafka.sides import PARTITIONS, KafkaSetup, Ours, Side, measure, more
from benchmarks.progress import doing
from sparklog.bench.report import Measurement

_SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
_BYTES_PER_ROW: Final = 50
"""Bytes read per row of `--rows`: 20 million rows are a gigabyte."""
_MANY: Final = {1_000: 2.0, 5_000: 6.0}
_MANY_RECORDS: Final = 60_000
_SECONDS: Final = 240.0


@measure
def large(bed: KafkaSetup) -> Iterator[Measurement]:
    """Consumes records of several sizes from four partitions concurrently."""
    total = bed.options.rows * _BYTES_PER_ROW
    for size in _SIZES:
        hot: dict[str, float] = {}
        cold: dict[str, float] = {}
        for kind in bed.sides:
            with doing(f"records of {size} bytes, {kind.name}"), bed.one(kind) as side:
                clients.create(side.address, PARTITIONS, TOPIC)
                count = _produce(side, size, total // size)
                hot[side.name] = size * count / _consume(side, count)
                side.restart()
                cold[side.name] = size * count / _consume(side, count)
        for what, found in (("right after", hot), ("from the table", cold)):
            name = f"consume records of {size:,} bytes, {what}"
            yield more(name, found, least=0.5, unit="MB/s")


@measure
def many(bed: KafkaSetup) -> Iterator[Measurement]:
    """Reads a whole topic of many partitions after a restart."""
    for partitions, most_seconds in _MANY.items():
        with doing(f"{partitions} partitions"), bed.one(Ours) as side:
            clients.create(side.address, partitions, TOPIC)
            for _ in range(5):  # several files in each partition
                _produce(side, 100, _MANY_RECORDS // 5, partitions)
                time.sleep(2.0)
            side.restart()
            seconds = _consume(side, _MANY_RECORDS, partitions)
        yield Measurement(
            name=f"{_MANY_RECORDS:,} records of {partitions:,} partitions, from the table",
            value=f"{seconds:.1f} s",
            target=f"≤ {most_seconds:g} s",
            met=seconds <= most_seconds,
        )


def _produce(side: Side, size: int, count: int, partitions: int = PARTITIONS) -> int:
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": side.address,
            "acks": "all",
            "linger.ms": 20,
            "message.max.bytes": 4_000_000,
            "queue.buffering.max.kbytes": 500_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    value = os.urandom(size)
    for number in range(count):
        while True:
            try:
                producer.produce(TOPIC, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(_SECONDS):
        raise RuntimeError("not all records were acked")
    return count


def _consume(side: Side, count: int, partitions: int = PARTITIONS) -> float:
    """Returns the seconds until all records had been consumed."""
    import confluent_kafka

    consumer: Any = confluent_kafka.Consumer(
        {
            "bootstrap.servers": side.address,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 5,
            "fetch.message.max.bytes": 1 << 20,
        }
    )
    first = confluent_kafka.OFFSET_BEGINNING
    began = time.perf_counter()
    consumer.assign(
        [confluent_kafka.TopicPartition(TOPIC, number, first) for number in range(partitions)]
    )
    found = 0
    while found < count:
        found += sum(1 for each in consumer.consume(10_000, 0.1) if not each.error())
        if time.perf_counter() - began > _SECONDS:
            raise RuntimeError(f"{found} of {count} records arrived within {_SECONDS:g} s")
    seconds = time.perf_counter() - began
    consumer.close()
    return seconds
