"""Mirrors read by other programs: each of them sees the offsets of the source, gaps included."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import deltalake
import duckdb
import kafka
import pyarrow as pa
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition as AioPartition
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.settings import PublisherSettings
from sparklog.sinks import datasink
from tests.support.kafkas import broker

SECONDS = 30.0
FAR = 2**62
OFFSETS = [3, 4, 9, 2**31 + 20, 2**33, FAR]
END = FAR + 2**40
SCHEMA = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("value", StringType()),
    ]
)

Position = int
Found = tuple[list[tuple[int, bytes | None]], Position]
"""The rows, and the consumer's position after them."""


def keep(root: Path, offsets: list[int], first: int, end: int, *, tasks: int = 1) -> None:
    """Writes rows with these offsets as Spark's sink does, in tasks that end in any order."""
    ranges = json.dumps({"m": {"0": [first, end]}})
    options = {"root": str(root), "topic": "m", "offsets": "keep", "offsetRanges": ranges}
    writer = datasink.batch_writer(options, SCHEMA, overwrite=False)
    size = -(-len(offsets) // tasks) or 1
    parts = [offsets[at : at + size] for at in range(0, len(offsets), size)]
    messages: list[WriterCommitMessage | None] = [
        writer.write(
            iter(
                [
                    pa.record_batch(
                        {
                            "partition": pa.array([0] * len(part), pa.int32()),
                            "offset": pa.array(part, pa.int64()),
                            "value": pa.array([str(each) for each in part]),
                        }
                    )
                ]
            )
        )
        for part in reversed(parts)
    ]
    writer.commit(messages)


@contextmanager
def mirror(root: Path, *, publishes: bool) -> Iterator[tuple[Agent, sparklog.Log]]:
    """A broker whose topic m is a mirror with `OFFSETS`, in the log only or in the table."""
    seconds = 0.1 if publishes else 3600.0
    with (
        broker(root, publisher=PublisherSettings(interval_seconds=seconds)) as agent,
        sparklog.connect(agent.address) as log,
    ):
        log.create_topic("m", 1, config={"mirror.source": "cluster c, topic m"})
        keep(root, OFFSETS[:4], 0, 2**31 + 30, tasks=3)
        keep(root, OFFSETS[4:], 2**31 + 30, END)
        if publishes:
            log.flush_to_table()
        yield agent, log


def read_confluent(address: str) -> Found:
    """By librdkafka."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "none",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("m", 0, 0)])
    found: list[tuple[int, bytes | None]] = []
    while True:
        each = consumer.poll(SECONDS)
        assert each is not None
        if (error := each.error()) is not None:
            break
        offset = each.offset()
        assert offset is not None
        found.append((offset, each.value()))
    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF
    (at,) = consumer.position([confluent_kafka.TopicPartition("m", 0)])
    consumer.close()
    return found, at.offset


def read_kafka_python(address: str) -> Found:
    """By kafka-python."""
    consumer = kafka.KafkaConsumer(bootstrap_servers=address)
    place = kafka.TopicPartition("m", 0)
    consumer.assign([place])
    consumer.seek(place, 0)
    found: list[tuple[int, bytes | None]] = []
    deadline = time.monotonic() + SECONDS
    while consumer.position(place) < END and time.monotonic() < deadline:
        for batch in consumer.poll(500).values():
            found += [(each.offset, each.value) for each in batch]
    position = consumer.position(place)
    consumer.close()
    return found, position


def read_aiokafka(address: str) -> Found:
    """By aiokafka."""
    found: list[tuple[int, bytes | None]] = []

    async def read() -> int:
        async with AIOKafkaConsumer(bootstrap_servers=address) as consumer:
            place = AioPartition("m", 0)
            consumer.assign([place])
            consumer.seek(place, 0)
            deadline = time.monotonic() + SECONDS
            while await consumer.position(place) < END and time.monotonic() < deadline:
                for batch in (await consumer.getmany(timeout_ms=500)).values():
                    found.extend((each.offset, each.value) for each in batch)
            return int(await consumer.position(place))

    return found, asyncio.run(read())


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("read", [read_confluent, read_kafka_python, read_aiokafka])
def test_kafka_consumers_see_the_offsets_of_the_source(
    tmp_path: Path, read: Callable[[str], Found], *, publishes: bool
) -> None:
    """From the log and from the table, over gaps of more offsets than a batch can have."""
    with mirror(tmp_path / "root", publishes=publishes) as (agent, _):
        assert read(agent.kafka_address) == ([(each, b"%d" % each) for each in OFFSETS], END)


@pytest.mark.parametrize("publishes", [False, True])
def test_clients_of_flight_see_the_offsets_of_the_source(
    tmp_path: Path, *, publishes: bool
) -> None:
    """All of a topic, parts of it, and a consumer that follows it."""
    with mirror(tmp_path / "root", publishes=publishes) as (_, log):
        assert log.read("m")["offset"].to_pylist() == OFFSETS
        with log.consumer("m", start="earliest") as consumer:
            found: list[int] = []
            deadline = time.monotonic() + SECONDS
            while len(found) < len(OFFSETS) and time.monotonic() < deadline:
                found += [each.offset for each in consumer.poll(timeout=1.0)]
        assert found == OFFSETS


def test_other_engines_read_the_offsets_of_the_source(tmp_path: Path) -> None:
    """Its table is a Delta table like any other."""
    root = tmp_path / "root"
    with mirror(root, publishes=True):
        pass
    table = deltalake.DeltaTable(root / "topics" / "m")
    assert sorted(table.to_pyarrow_table(columns=["offset"])["offset"].to_pylist()) == OFFSETS
    files = str(root / "topics" / "m" / "partition=0" / "*.parquet")
    rows = duckdb.sql(f"select \"offset\", value from '{files}' order by all")
    assert rows is not None
    assert rows.fetchall() == [(each, b"%d" % each) for each in OFFSETS]


def test_a_kafka_producer_is_told_that_the_topic_is_a_mirror(tmp_path: Path) -> None:
    """The error is not retried, and a client of Flight gets one of its own."""
    with mirror(tmp_path / "root", publishes=False) as (agent, log):
        producer = kafka.KafkaProducer(bootstrap_servers=agent.kafka_address)
        with pytest.raises(kafka.errors.PolicyViolationError):
            producer.send("m", b"v").get(SECONDS)
        producer.close()
        with log.producer() as flight, pytest.raises(errors.TopicIsMirror, match="cluster c"):
            flight.send("m", b"v").result(SECONDS)
        assert log.describe("m").partitions[0].end == END
