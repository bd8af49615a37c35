"""Deleted and expired records as Kafka's clients see it: admin clients, consumers, producers."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import kafka
import pytest
from confluent_kafka import admin as confluent_admin
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]
from kafka.errors import OffsetOutOfRangeError
from kio.schema.errors import ErrorCode

import sparklog
from sparklog.broker.agent import Agent
from sparklog.settings import JanitorSettings
from tests.support.batches import Record, built
from tests.support.kafkas import SECONDS, Frames, broker

PRODUCE = 0
DELETE_RECORDS = 21


@pytest.fixture(name="agent")
def _agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr("sparklog.broker.log.janitor.RETENTION_EVERY_SECONDS", 0.05)
    with broker(tmp_path / "root", janitor=JanitorSettings(interval_seconds=0.05)) as agent:
        yield agent


@pytest.fixture(name="log")
def _log(agent: Agent) -> Iterator[sparklog.Log]:
    with sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
        with log.producer() as producer:
            for number in range(40):
                producer.send("t", b"%d" % number, partition=number % 2)
        yield log


def place(
    partition: int, offset: int = confluent_kafka.OFFSET_INVALID
) -> confluent_kafka.TopicPartition:
    """A partition of t, as librdkafka names it."""
    return confluent_kafka.TopicPartition("t", partition, offset)


def offsets(
    address: str, starts: list[int], count: int, *, reset: str = "earliest"
) -> list[tuple[int, int]]:
    """(partition, offset) of what kafka-python reads from there on, `count` records at least."""
    consumer = kafka.KafkaConsumer(bootstrap_servers=address, auto_offset_reset=reset)
    places = [kafka.TopicPartition("t", number) for number in range(len(starts))]
    consumer.assign(places)
    for each, start in zip(places, starts, strict=True):
        consumer.seek(each, start)
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + SECONDS
    try:
        while len(found) < count and time.monotonic() < deadline:
            for each, batch in consumer.poll(500).items():
                found += [(each.partition, record.offset) for record in batch]
    finally:
        consumer.close()
    return sorted(found)


def rows(first: int, second: int, end: int = 20) -> list[tuple[int, int]]:
    """Returns the remaining records, given the partitions' starts."""
    starts = (first, second)
    return [(number, offset) for number in (0, 1) for offset in range(starts[number], end)]


def test_librdkafka_deletes_records(log: sparklog.Log, address: str) -> None:
    """Below an offset, and all there are; each partition is answered for itself."""
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    wanted = [place(0, 7), place(1, confluent_kafka.OFFSET_END)]
    answers = admin.delete_records(wanted, operation_timeout=SECONDS)
    lows = {each.partition: found.result(SECONDS).low_watermark for each, found in answers.items()}
    assert lows == {0: 7, 1: 20}
    assert [each.start for each in log.describe("t").partitions] == [7, 20]
    again = admin.delete_records([place(0, 5), place(1, 21)])
    results = {each.partition: found for each, found in again.items()}
    assert results[0].result(SECONDS).low_watermark == 7
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        results[1].result(SECONDS)
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "none"})
    assert consumer.get_watermark_offsets(place(0), timeout=SECONDS) == (7, 20)
    assert consumer.get_watermark_offsets(place(1), timeout=SECONDS) == (20, 20)
    consumer.close()


def test_kafka_python_deletes_records(log: sparklog.Log, address: str) -> None:
    """A consumer continues at the log start, or reports that its offset is out of range."""
    admin = kafka.KafkaAdminClient(bootstrap_servers=address)
    first, second = (kafka.TopicPartition("t", number) for number in (0, 1))
    admin.delete_records({first: 12, second: 3})
    admin.close()
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    assert consumer.beginning_offsets([first, second]) == {first: 12, second: 3}
    consumer.close()
    for _ in range(2):
        assert offsets(address, [0, 0], 25) == rows(12, 3)
        log.flush_to_table("t")
    with pytest.raises(OffsetOutOfRangeError):
        offsets(address, [0, 0], 25, reset="none")


def test_records_that_expire(log: sparklog.Log, address: str) -> None:
    """After `retention.ms`, ListOffsets returns the new log start, and clients continue there."""
    admin = confluent_admin.AdminClient({"bootstrap.servers": address})
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "none"})
    log.alter("t", {"retention.ms": 1})
    deadline = time.monotonic() + SECONDS
    while [each.start for each in log.describe("t").partitions] != [20, 20]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    log.alter("t", {"retention.ms": -1})
    earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    (found,) = admin.list_offsets({place(1): earliest}).values()
    assert found.result(SECONDS).offset == 20
    assert consumer.get_watermark_offsets(place(0), timeout=SECONDS) == (20, 20)
    consumer.close()
    producer = kafka.KafkaProducer(bootstrap_servers=address)
    assert producer.send("t", b"next", partition=0).get(SECONDS).offset == 20
    producer.close()
    assert offsets(address, [0, 0], 1) == [(0, 20)]


@pytest.mark.parametrize("version", range(3))
def test_every_version(log: sparklog.Log, address: str, version: int) -> None:
    """Codes and log starts of each partition that is named, whatever is wrong with another."""
    log.create_topic("c", partitions=1, config={"cleanup.policy": "compact"})

    def ask(topic: str, *offsets: tuple[int, int]) -> list[tuple[int, int, ErrorCode]]:
        partitions = [{"partition_index": each, "offset": offset} for each, offset in offsets]
        fields = {
            "topics": [{"name": topic, "partitions": partitions}],
            "timeout": dt.timedelta(seconds=SECONDS),
        }
        (answer,) = frames.ask(DELETE_RECORDS, version, fields).topics
        assert answer.name == topic
        return [
            (each.partition_index, each.low_watermark, each.error_code)
            for each in answer.partitions
        ]

    frames = Frames(address)
    assert ask("t", (1, 5), (0, 21), (7, 0), (0, -2)) == [
        (1, 5, ErrorCode.none),
        (0, -1, ErrorCode.offset_out_of_range),
        (7, -1, ErrorCode.unknown_topic_or_partition),
        (0, -1, ErrorCode.offset_out_of_range),
    ]
    assert ask("nope", (0, 0)) == [(0, -1, ErrorCode.unknown_topic_or_partition)]
    assert ask("c", (0, 0)) == [(0, -1, ErrorCode.policy_violation)]
    assert ask("t", (0, -1)) == [(0, 20, ErrorCode.none)]
    frames.close()


def test_an_ack_tells_where_the_log_starts(log: sparklog.Log, address: str) -> None:
    """Returns the state of the partition that was written to."""
    log.delete_records("t", {1: 11})
    batch = built([Record(1_700_000_000_000, None, b"next")])
    fields = {
        "transactional_id": None,
        "acks": -1,
        "timeout": dt.timedelta(seconds=SECONDS),
        "topic_data": [
            {
                "name": "t",
                "partition_data": [{"index": each, "records": batch} for each in (0, 1)],
            }
        ],
    }
    frames = Frames(address)
    (answer,) = frames.ask(PRODUCE, 9, fields).responses
    found = [(each.base_offset, each.log_start_offset) for each in answer.partition_responses]
    assert found == [(20, 0), (20, 11)]
    frames.close()
