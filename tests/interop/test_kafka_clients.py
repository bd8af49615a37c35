"""Kafka's clients, unmodified: librdkafka's, kafka-python and aiokafka, with a broker of ours."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import deltalake
import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition as AioPartition
from confluent_kafka import admin as confluent_admin
from confluent_kafka.admin import NewTopic, OffsetSpec  # type: ignore[attr-defined]

import sparklog
from benchmarks import jars
from sparklog.broker.agent import Agent
from tests.interop.test_old_clients import JAVA, OLD_KAFKA_PYTHON, OLD_LIBRDKAFKA
from tests.interop.test_stream_apps import PACKAGES
from tests.interop.test_suites import (
    AIOKAFKA,
    FRANZ_GO,
    KAFKA_GO,
    KAFKA_PYTHON,
    KAFKAJS,
    SARAMA,
)
from tests.support import fences
from tests.support.kafkas import broker, forget_producers

SECONDS = 30.0
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
AT_MS = 1_700_000_000_123

Headers = tuple[tuple[str, bytes], ...]


def _record(number: int) -> tuple[bytes | None, bytes | None, Headers]:
    """kafka-python wants a key or a value, at least."""
    key = b"k%d" % number if number % 3 else None
    value = b"v%d" % number if number % 5 or key is None else None
    return key, value, (("h", b"%d" % number), ("empty", b"")) if number % 2 else ()


RECORDS = [_record(number) for number in range(60)]


def test_page_names_the_releases_that_are_run() -> None:
    """Those of this environment, of `make soak`, and of Go's file."""
    in_soak = [*OLD_LIBRDKAFKA, OLD_KAFKA_PYTHON, *JAVA, jars.KAFKA_VERSION]
    in_soak += [KAFKA_PYTHON, AIOKAFKA, FRANZ_GO, SARAMA, KAFKA_GO, KAFKAJS]
    in_soak += [each.partition("==")[2] for packages in PACKAGES.values() for each in packages]
    modules = (fences.ROOT / "tests/interop/go/go.mod").read_text("utf-8")
    newest = [
        confluent_kafka.libversion()[0],
        *(importlib.metadata.version(each) for each in ("kafka-python", "aiokafka")),
        *re.findall(r"franz-go(?:/pkg/kadm)? v([\d.]+)$", modules, re.MULTILINE),
    ]
    assert len(newest) == 5
    page = (fences.ROOT / "docs/kafka.md").read_text("utf-8").splitlines()
    rows = "".join(line for line in page if line.endswith(("`make test` |", "`make soak` |")))
    for each in (*newest, *in_soak):
        assert re.search(rf"\b{re.escape(each.removeprefix('v'))}\b", rows), each


# ------------------------------------------------------------------------------ each client


def send_confluent(address: str, topic: str, codec: str) -> None:
    """By librdkafka, idempotent."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "compression.type": codec, "enable.idempotence": True}
    )
    for number, (key, value, headers) in enumerate(RECORDS):
        producer.produce(
            topic,
            value,
            key,
            partition=number % 2,
            timestamp=AT_MS + number,
            headers=list(headers),
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    assert producer.flush(SECONDS) == 0
    assert not failed


def send_kafka_python(address: str, topic: str, codec: str) -> None:
    """By kafka-python, idempotent."""
    chosen = None if codec == "none" else codec
    with_id = {"enable_idempotence": True, "acks": "all"}
    producer = kafka.KafkaProducer(bootstrap_servers=address, compression_type=chosen, **with_id)
    futures = [
        producer.send(
            topic,
            value,
            key,
            partition=number % 2,
            timestamp_ms=AT_MS + number,
            headers=list(headers),
        )
        for number, (key, value, headers) in enumerate(RECORDS)
    ]
    for future in futures:
        future.get(SECONDS)
    producer.close()


def send_aiokafka(address: str, topic: str, codec: str) -> None:
    """By aiokafka, idempotent."""

    async def send() -> None:
        chosen = None if codec == "none" else codec
        producer = AIOKafkaProducer(
            bootstrap_servers=address, compression_type=chosen, enable_idempotence=True
        )
        async with producer:
            futures = [
                await producer.send(
                    topic,
                    value,
                    key,
                    partition=number % 2,
                    timestamp_ms=AT_MS + number,
                    headers=list(headers),
                )
                for number, (key, value, headers) in enumerate(RECORDS)
            ]
            await asyncio.gather(*futures)

    asyncio.run(send())


Found = dict[int, list[tuple[int, int, bytes | None, bytes | None, Any]]]
"""By partition: offset, time, key, value, headers."""


def read_confluent(address: str, topic: str, starts: list[int], count: int) -> Found:
    """By librdkafka."""
    given = {"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(given)
    places = enumerate(starts)
    consumer.assign([confluent_kafka.TopicPartition(topic, *place) for place in places])
    found: Found = {0: [], 1: []}
    deadline = time.monotonic() + SECONDS
    while sum(map(len, found.values())) < count and time.monotonic() < deadline:
        for each in consumer.consume(count, 0.5):
            assert each.error() is None
            partition, offset = each.partition(), each.offset()
            assert partition is not None
            assert offset is not None
            row = offset, each.timestamp()[1], each.key(), each.value()
            found[partition].append((*row, tuple(each.headers() or ())))
    consumer.close()
    return found


def read_kafka_python(address: str, topic: str, starts: list[int], count: int) -> Found:
    """By kafka-python."""
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    places = [kafka.TopicPartition(topic, number) for number in range(len(starts))]
    consumer.assign(places)
    for place, offset in zip(places, starts, strict=True):
        consumer.seek(place, offset)
    found: Found = {0: [], 1: []}
    deadline = time.monotonic() + SECONDS
    while sum(map(len, found.values())) < count and time.monotonic() < deadline:
        for place, batch in consumer.poll(500).items():
            found[place.partition] += [
                (each.offset, each.timestamp, each.key, each.value, tuple(each.headers))
                for each in batch
            ]
    consumer.close()
    return found


def read_aiokafka(address: str, topic: str, starts: list[int], count: int) -> Found:
    """By aiokafka."""
    found: Found = {0: [], 1: []}

    async def read() -> None:
        async with AIOKafkaConsumer(bootstrap_servers=address) as consumer:
            places = [AioPartition(topic, number) for number in range(len(starts))]
            consumer.assign(places)
            for place, offset in zip(places, starts, strict=True):
                consumer.seek(place, offset)
            deadline = time.monotonic() + SECONDS
            while sum(map(len, found.values())) < count and time.monotonic() < deadline:
                for place, batch in (await consumer.getmany(timeout_ms=500)).items():
                    found[place.partition] += [
                        (each.offset, each.timestamp, each.key, each.value, tuple(each.headers))
                        for each in batch
                    ]

    asyncio.run(read())
    return found


SENDERS = [send_confluent, send_kafka_python, send_aiokafka]
READERS = [read_confluent, read_kafka_python, read_aiokafka]
Send = Callable[[str, str, str], None]
Read = Callable[[str, str, list[int], int], Found]


def expected(starts: list[int]) -> Found:
    """Returns the records of the topic from these offsets."""
    found: Found = {0: [], 1: []}
    for number, (key, value, headers) in enumerate(RECORDS):
        offset = number // 2
        if offset >= starts[number % 2]:
            found[number % 2].append((offset, AT_MS + number, key, value, headers))
    return found


@pytest.mark.parametrize("send", SENDERS)
@pytest.mark.parametrize("codec", CODECS)
def test_what_one_client_sends_all_read(
    log: sparklog.Log, address: str, send: Send, codec: str
) -> None:
    """Keys, values, headers, nulls and times, in every codec: hot, and out of the table."""
    log.create_topic("t", partitions=2)
    send(address, "t", codec)
    for read in READERS:
        assert read(address, "t", [0, 0], 60) == expected([0, 0])
    rows = log.read("t").to_pylist()
    assert sorted((row["partition"], row["offset"]) for row in rows) == [
        (number, offset) for number in (0, 1) for offset in range(30)
    ]
    for row in rows:
        key, value, headers = RECORDS[2 * row["offset"] + row["partition"]]
        assert (row["key"], row["value"]) == (key, value)
        assert tuple((h["key"], h["value"]) for h in row["headers"] or ()) == headers


@pytest.mark.parametrize("read", READERS)
def test_old_offsets_come_from_the_table(tmp_path: Path, read: Read) -> None:
    """After a restart nothing is hot, and any offset may be asked for."""
    with broker(tmp_path / "root") as agent:
        with sparklog.connect(agent.address) as log:
            log.create_topic("t", partitions=2)
        send_confluent(agent.kafka_address, "t", "lz4")
    with broker(tmp_path / "root") as agent:
        for starts in ([0, 0], [7, 29], [30, 11]):
            count = 60 - sum(starts)
            assert read(agent.kafka_address, "t", starts, count) == expected(starts)
    uri = str(tmp_path / "root" / "topics" / "t")
    table = deltalake.DeltaTable(uri).to_pyarrow_table()
    assert table.num_rows == 60
    assert table.column("value").null_count == sum(value is None for _, value, _ in RECORDS)


def test_what_our_client_sends_kafkas_read(log: sparklog.Log, address: str) -> None:
    """Arrow columns become record batches, while they are hot and later."""
    log.create_topic("t", partitions=2)
    with log.producer() as producer:
        for number in range(20):
            producer.send("t", f"v{number}".encode(), partition=number % 2)
    for _ in range(2):
        for read in READERS:
            found = read(address, "t", [0, 0], 20)
            values = [value for rows in found.values() for _, _, _, value, _ in rows]
            assert sorted(values, key=str) == sorted((b"v%d" % n for n in range(20)), key=str)
        log.flush_to_table("t")


def test_the_classic_first_program(tmp_path: Path) -> None:
    """JSON in, a restart, JSON out: as anybody begins with Kafka."""
    with broker(tmp_path / "root") as agent:
        producer = kafka.KafkaProducer(bootstrap_servers=agent.kafka_address)
        for number in range(100):
            producer.send("offering_new", json.dumps({"n": number}).encode())
        producer.flush()
        producer.close()
    with broker(tmp_path / "root") as agent:
        consumer = kafka.KafkaConsumer(
            "offering_new",
            bootstrap_servers=agent.kafka_address,
            auto_offset_reset="earliest",
            consumer_timeout_ms=3_000,
        )
        assert sorted(json.loads(each.value)["n"] for each in consumer) == list(range(100))
        consumer.close()


SendOne = Callable[[bytes], int]
"""Sends a value to t-0 and returns its offset once it is acked."""


@contextmanager
def sending_confluent(address: str) -> Iterator[SendOne]:
    """By librdkafka, idempotent."""
    outcomes: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": address, "enable.idempotence": True})

    def send(value: bytes) -> int:
        producer.produce(
            "t", value, partition=0, on_delivery=lambda *outcome: outcomes.append(outcome)
        )
        assert producer.flush(SECONDS) == 0
        error, message = outcomes[-1]
        assert error is None, error
        return int(message.offset())

    yield send


@contextmanager
def sending_kafka_python(address: str) -> Iterator[SendOne]:
    """By kafka-python, idempotent."""
    with_id = {"enable_idempotence": True, "acks": "all"}
    producer = kafka.KafkaProducer(bootstrap_servers=address, **with_id)
    yield lambda value: int(producer.send("t", value, partition=0).get(SECONDS).offset)
    producer.close()


@contextmanager
def sending_aiokafka(address: str) -> Iterator[SendOne]:
    """By aiokafka, idempotent."""
    with asyncio.Runner() as runner:

        async def start() -> AIOKafkaProducer:
            producer = AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True)
            await producer.start()
            return producer

        producer = runner.run(start())

        def send(value: bytes) -> int:
            sent = producer.send_and_wait("t", value, partition=0)
            return int(runner.run(asyncio.wait_for(sent, SECONDS)).offset)

        yield send
        runner.run(producer.stop())


@pytest.mark.parametrize("sending", [sending_confluent, sending_kafka_python, sending_aiokafka])
def test_a_producer_that_was_forgotten_goes_on(
    agent: Agent,
    log: sparklog.Log,
    address: str,
    sending: Callable[[str], AbstractContextManager[SendOne]],
) -> None:
    """After a quiet day, after its records were deleted, and in a topic that was created again."""
    log.create_topic("t", partitions=2)
    with sending(address) as send:
        assert [send(value) for value in (b"a", b"b", b"c")] == [0, 1, 2]
        forget_producers(agent)
        assert [send(value) for value in (b"d", b"e")] == [3, 4]
        log.delete_records("t", {0: 5})
        assert send(b"f") == 5
        log.delete_records("t", {0: 6})
        forget_producers(agent)
        assert [send(value) for value in (b"g", b"h")] == [6, 7]
        assert log.read("t").column("value").to_pylist() == [b"g", b"h"]
        log.delete_topic("t")
        log.create_topic("t", partitions=2)
        assert [send(value) for value in (b"i", b"j")] == [0, 1]
    assert log.read("t").column("value").to_pylist() == [b"i", b"j"]


# ------------------------------------------------------------------------------ offsets, admin


def test_offsets_by_time(log: sparklog.Log, address: str) -> None:
    """Beginning, end, the first at or after a time, and none after the last."""
    log.create_topic("t", partitions=2)
    send_kafka_python(address, "t", "none")
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    place = kafka.TopicPartition("t", 1)
    assert consumer.beginning_offsets([place]) == {place: 0}
    assert consumer.end_offsets([place]) == {place: 30}
    for _ in range(2):
        found = consumer.offsets_for_times({place: AT_MS + 10})[place]
        assert (found.offset, found.timestamp) == (5, AT_MS + 11)
        assert consumer.offsets_for_times({place: AT_MS + 60})[place] is None
        log.flush_to_table("t")
    consumer.close()
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    latest_spec = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
    wanted = {confluent_kafka.TopicPartition("t", 1): latest_spec}
    (latest,) = admin.list_offsets(wanted).values()
    assert (latest.result().offset, latest.result().timestamp) == (29, AT_MS + 59)


def test_topics_come_and_go(log: sparklog.Log, address: str) -> None:
    """Created with partitions and configuration, refused by Kafka's own codes, deleted."""
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    config = {"message.timestamp.type": "LogAppendTime"}
    new = NewTopic("t", num_partitions=3, config=config)
    admin.create_topics([new])["t"].result(SECONDS)
    assert log.describe("t").config == config
    assert len(admin.list_topics(timeout=SECONDS).topics["t"].partitions) == 3
    refusals = {
        "t": confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS,
        "no/name": confluent_kafka.KafkaError.TOPIC_EXCEPTION,
    }
    for name, code in refusals.items():
        with pytest.raises(confluent_kafka.KafkaException) as refused:
            admin.create_topics([NewTopic(name, 1)])[name].result(SECONDS)
        assert refused.value.args[0].code() == code
    wrong = NewTopic("u", 1, config={"no.such.key": "1"})
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.create_topics([wrong])["u"].result(SECONDS)
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.INVALID_CONFIG
    admin.delete_topics(["t"])["t"].result(SECONDS)
    assert "t" not in log.topics()
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.delete_topics(["t"])["t"].result(SECONDS)
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART


def test_the_time_of_the_append(log: sparklog.Log, address: str) -> None:
    """In a topic with LogAppendTime the producer's time gives way, in batch, ack and table."""
    log.create_topic("t", partitions=2, config={"message.timestamp.type": "LogAppendTime"})
    before_ms = time.time() * 1_000 - 1
    send_kafka_python(address, "t", "gzip")
    for rows in read_kafka_python(address, "t", [0, 0], 60).values():
        assert all(row[1] >= before_ms for row in rows)
    assert set(log.read("t").column("timestampType").to_pylist()) == {1}


@pytest.mark.parametrize("size", [-1, 2**31 - 1, 100 * 1024 * 1024 + 1])
def test_a_frame_that_lies_about_its_size_ends_its_connection(address: str, size: int) -> None:
    """Reads its own records and no others."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), SECONDS) as stranger:
        stranger.sendall(size.to_bytes(4, "big", signed=True))
        stranger.settimeout(SECONDS)
        assert stranger.recv(1) == b""
    kafka.KafkaConsumer(bootstrap_servers=address).close()
