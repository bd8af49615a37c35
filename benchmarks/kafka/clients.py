"""Workloads of Kafka's clients on one topic: each returns records per second, or wait times."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from benchmarks import jars
from benchmarks.kafka_process import java
from sparklog.bench.report import Times

if TYPE_CHECKING:
    import confluent_kafka

TOPIC: Final = "bench"
VALUE_BYTES: Final = 100
_SECONDS: Final = 120.0
_PATIENCE_SECONDS: Final = 600.0
_RATE: Final = re.compile(r"([0-9.]+) records/sec")


def create(
    address: str,
    partitions: int,
    topic: str = TOPIC,
    *,
    config: Mapping[str, str] | None = None,
    client: Mapping[str, str] | None = None,
) -> None:
    """Creates a topic with this configuration, and waits until it is listed.

    `client`: further settings of the client.
    """
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": address, **(client or {})})
    wanted = NewTopic(
        topic, num_partitions=partitions, replication_factor=1, config=dict(config or {})
    )
    made = admin.create_topics([wanted])
    made[topic].result(_SECONDS)
    while len(admin.list_topics(topic, timeout=_SECONDS).topics[topic].partitions) < partitions:
        time.sleep(0.05)


# ------------------------------------------------------------------------------ Java


def java_produce(address: str, count: int, **options: object) -> float:
    """Runs `ProducerPerformance` at full speed; underscores in option names mean dots."""
    given = {"bootstrap.servers": address, "acks": "all"}
    given |= {name.replace("_", "."): str(value) for name, value in options.items()}
    output = _run(
        "ProducerPerformance",
        *("--topic", TOPIC, "--num-records", str(count), "--record-size", str(VALUE_BYTES)),
        *("--throughput", "-1", "--producer-props"),
        *(f"{name}={value}" for name, value in given.items()),
    )
    return float(_RATE.findall(output)[-1])


def java_consume(address: str, count: int, consumers: int = 1) -> float:
    """Returns the total rate of concurrent `ConsumerPerformance` runs, each reading everything."""

    def one(_: int) -> float:
        output = _run(
            "ConsumerPerformance",
            *("--bootstrap-server", address, "--topic", TOPIC, "--messages", str(count)),
            *("--group", f"g-{uuid.uuid4()}", "--timeout", "60000"),
        )
        header, figures = [line.split(", ") for line in output.strip().splitlines()[-2:]]
        found = dict(zip(header, figures, strict=True))
        assert int(found["data.consumed.in.nMsg"]) >= count, output
        return float(found["fetch.nMsg.sec"])

    with ThreadPoolExecutor(consumers) as pool:
        return sum(pool.map(one, range(consumers)))


def _run(tool: str, *arguments: str) -> str:
    command = [java(), "-Xmx512m", "-cp", os.pathsep.join(jars.find_tools())]
    done = subprocess.run(
        [*command, f"org.apache.kafka.tools.{tool}", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{tool}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout


# ------------------------------------------------------------------------------ librdkafka


def confluent_produce(address: str, count: int, client: Mapping[str, str] | None = None) -> float:
    """Default settings, except for a queue so large that the program never waits for it.

    `client`: further settings.
    """
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "acks": "all",
            "linger.ms": 5,
            "queue.buffering.max.messages": count,
            "queue.buffering.max.kbytes": 2_000_000,
            **(client or {}),
        }
    )
    value = os.urandom(VALUE_BYTES)
    began = time.perf_counter()
    for _ in range(count):
        producer.produce(TOPIC, value)
    producer.flush(_SECONDS)
    seconds = time.perf_counter() - began
    if len(producer):
        raise RuntimeError(f"{len(producer)} records were not sent")
    return count / seconds


def confluent_consume(address: str, count: int, client: Mapping[str, str] | None = None) -> float:
    """Reads from the beginning, in batches. `client`: further settings."""
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"g-{uuid.uuid4()}",
            "enable.auto.commit": False,
            **(client or {}),
        }
    )
    numbers = consumer.list_topics(TOPIC, timeout=_SECONDS).topics[TOPIC].partitions
    places = [confluent_kafka.TopicPartition(TOPIC, each, 0) for each in numbers]
    consumer.assign(places)
    found, began = 0, time.perf_counter()
    while found < count:
        found += len(consumer.consume(10_000, 0.1))
        _check(began)
    seconds = time.perf_counter() - began
    consumer.close()
    return found / seconds


def one_at_a_time(address: str, count: int, client: Mapping[str, str] | None = None) -> Times:
    """Sends each record after the ack of the previous one; the first tenth is not counted.

    `client`: further settings.
    """
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "acks": "all", "linger.ms": 0, **(client or {})}
    )
    value, times = os.urandom(VALUE_BYTES), Times()
    for number in range(count + count // 10):
        began = time.perf_counter()
        producer.produce(TOPIC, value, partition=0)
        producer.flush(_SECONDS)
        if number >= count // 10:
            times.add(time.perf_counter() - began)
    return times


def first_acks(address: str, count: int, partitions: int) -> float:
    """Starts idempotent producers concurrently. Returns the seconds until each has an ack."""
    import confluent_kafka

    config: dict[str, Any] = {
        "bootstrap.servers": address,
        "enable.idempotence": True,
        "linger.ms": 0,
    }
    value = os.urandom(VALUE_BYTES)
    began = time.perf_counter()
    producers = [confluent_kafka.Producer(config) for _ in range(count)]
    for number, each in enumerate(producers):
        each.produce(TOPIC, value, partition=number % partitions)
    for each in producers:
        if each.flush(_SECONDS):
            raise RuntimeError("a record was not acked")
    return time.perf_counter() - began


# ------------------------------------------------------------------------------ Python's


def kafka_python_produce(address: str, count: int) -> float:
    """Default settings, acks=all."""
    import kafka

    producer = kafka.KafkaProducer(bootstrap_servers=address, acks="all")
    value = os.urandom(VALUE_BYTES)
    producer.send(TOPIC, value).get(_SECONDS)
    began = time.perf_counter()
    for _ in range(count):
        producer.send(TOPIC, value)
    producer.flush(_SECONDS)
    seconds = time.perf_counter() - began
    producer.close()
    return count / seconds


def kafka_python_consume(address: str, count: int) -> float:
    """Reads from the beginning, without a group."""
    import kafka

    consumer = kafka.KafkaConsumer(bootstrap_servers=address, max_poll_records=10_000)
    places = [kafka.TopicPartition(TOPIC, n) for n in consumer.partitions_for_topic(TOPIC)]
    consumer.assign(places)
    consumer.seek_to_beginning()
    found, began = 0, time.perf_counter()
    while found < count:
        found += sum(len(batch) for batch in consumer.poll(1_000, max_records=10_000).values())
        _check(began)
    seconds = time.perf_counter() - began
    consumer.close()
    return found / seconds


def aiokafka_produce(address: str, count: int) -> float:
    """Default settings, acks=all, with a linger for its batches."""
    from aiokafka import AIOKafkaProducer

    async def produce() -> float:
        value = os.urandom(VALUE_BYTES)
        producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", linger_ms=5)
        async with producer:
            await producer.send_and_wait(TOPIC, value)
            began = time.perf_counter()
            waiting: Any = None
            for _ in range(count):
                waiting = await producer.send(TOPIC, value)
            await producer.flush()
            await waiting
            return count / (time.perf_counter() - began)

    return asyncio.run(produce())


def aiokafka_consume(address: str, count: int) -> float:
    """Reads from the beginning, without a group."""
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def consume() -> float:
        async with AIOKafkaConsumer(bootstrap_servers=address) as consumer:
            await consumer._client.force_metadata_update()
            numbers = consumer._client.cluster.partitions_for_topic(TOPIC) or range(4)
            consumer.assign([TopicPartition(TOPIC, number) for number in numbers])
            await consumer.seek_to_beginning()
            found, began = 0, time.perf_counter()
            while found < count:
                got = await consumer.getmany(timeout_ms=1_000, max_records=10_000)
                found += sum(map(len, got.values()))
                _check(began)
            return found / (time.perf_counter() - began)

    return asyncio.run(consume())


def _check(began: float) -> None:
    if time.perf_counter() - began > _SECONDS:
        raise RuntimeError(f"not everything was read within {_SECONDS:g} s")


# ------------------------------------------------------------------------------ groups


def members(address: str, groups: Sequence[str]) -> list[confluent_kafka.Consumer]:
    """Subscribes a consumer per group name, with frequent heartbeats if all share one group."""
    import confluent_kafka

    found = []
    for group in groups:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                "auto.offset.reset": "latest",
                "heartbeat.interval.ms": 3_000 if len(set(groups)) > 1 else 100,
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([TOPIC])
        found.append(consumer)
    return found


def poll_until(
    consumers: Sequence[confluent_kafka.Consumer], is_settled: Callable[[], bool]
) -> float:
    """Polls all consumers until `is_settled`. Returns the seconds that it took."""
    began = time.perf_counter()
    while not is_settled():
        for each in consumers:
            each.poll(0)
        time.sleep(0.002)
        _check(began)
    return time.perf_counter() - began
