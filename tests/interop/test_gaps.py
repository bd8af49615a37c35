"""Logs that end or begin in a gap, as Kafka never makes them: clients reach the end.

Other engines delete rows of a topic's table, and Kafka's protocol has a batch for that: one of
which all clients skip the record, and count the offset.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import aiokafka
import confluent_kafka
import kafka
import pytest

import sparklog
from sparklog.broker.agent import Agent
from sparklog.clock import SystemClock
from sparklog.storage.objects import LocalStore
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.topic_table import TopicTable
from tests.support.jvms import class_path, command
from tests.support.kafkas import broker, close_leavings

COUNT: Final = 8
SECONDS: Final = 30.0
GROUP: Final = "g"
KEPT: Final = {
    "at the end": ([0, 1, 2, 3], 0),
    "everywhere": ([], 0),
    "in the middle": ([0, 6, 7], 0),
    "at a start within": ([6, 7], 3),
}
"""By the place of the gap: the records that are left, and the log start."""


@pytest.fixture(name="gap", params=KEPT, ids=lambda name: name.replace(" ", "-"))
def _gap(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Agent, list[int]]]:
    """A broker, and the offsets that another engine has left in its topic."""
    root, (left, start) = tmp_path / "root", KEPT[request.param]
    with broker(root) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        for number in range(COUNT):
            with log.producer() as producer:
                producer.send("t", str(number).encode(), partition=0).result()
            log.flush_to_table()
    table = TopicTable(LocalStore(root), "t", clock=SystemClock())
    gone = [file for file in table.refresh().files[0] if file.first not in left]
    assert len(gone) == COUNT - len(left)
    table.commit(lambda _: TableChange(adds=(), removes=tuple(gone), operation="DELETE"))
    with broker(root) as agent:
        if start:
            with sparklog.connect(agent.address) as log:
                log.delete_records("t", {0: start})
        yield agent, left


def by_librdkafka(address: str) -> tuple[list[int], int]:
    """Records and position of a consumer, which commits at the end."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["t"])
    found: list[int] = []
    while True:
        message = consumer.poll(SECONDS)
        assert message is not None
        if (error := message.error()) is not None:
            break
        found.append(message.offset() or 0)
    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF
    (at,) = consumer.position([confluent_kafka.TopicPartition("t", 0)])
    consumer.commit(asynchronous=False)
    consumer.close()
    return found, at.offset


def by_kafka_python(address: str) -> tuple[list[int], int]:
    """Likewise."""
    place = kafka.TopicPartition("t", 0)
    consumer = kafka.KafkaConsumer(
        "t",
        bootstrap_servers=address,
        group_id=GROUP,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    found: list[int] = []
    while place not in consumer.assignment() or consumer.position(place) < COUNT:
        for records in consumer.poll(1_000).values():
            found += [record.offset for record in records]
    at = consumer.position(place)
    consumer.commit()
    consumer.close()
    close_leavings()
    return found, at


def by_aiokafka(address: str) -> tuple[list[int], int]:
    """Likewise."""

    async def read() -> tuple[list[int], int]:
        place = aiokafka.TopicPartition("t", 0)
        consumer = aiokafka.AIOKafkaConsumer(
            "t",
            bootstrap_servers=address,
            group_id=GROUP,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        found: list[int] = []
        while await consumer.position(place) < COUNT:
            for records in (await consumer.getmany(timeout_ms=1_000)).values():
                found += [record.offset for record in records]
        at = await consumer.position(place)
        await consumer.commit()
        await consumer.stop()
        return found, at

    return asyncio.run(asyncio.wait_for(read(), SECONDS))


def by_java(address: str) -> tuple[list[int], int]:
    """Likewise; its position is what the group has committed."""
    tool = "org.apache.kafka.tools.consumer.ConsoleConsumer"
    shown = ("--property", "print.offset=true", "--property", "print.value=false")
    wanted = ("--topic", "t", "--group", GROUP, "--from-beginning", "--timeout-ms", "8000")
    done = subprocess.run(
        command(class_path(), tool, "--bootstrap-server", address, *wanted, *shown),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        check=True,
    )
    return [
        int(offset) for offset in re.findall(r"^Offset:(\d+)", done.stdout, re.MULTILINE)
    ], COUNT


@pytest.mark.parametrize(
    "client",
    [
        by_librdkafka,
        by_kafka_python,
        by_aiokafka,
        pytest.param(by_java, marks=pytest.mark.soak(mode="clients")),
    ],
)
def test_a_client_reaches_the_end(
    gap: tuple[Agent, list[int]], client: Callable[[str], tuple[list[int], int]]
) -> None:
    """It reads all records that are left, its position is the end, and its group has no lag."""
    agent, left = gap
    assert client(agent.kafka_address) == (left, COUNT)
    with sparklog.connect(agent.address) as log:
        assert log.group_offsets(GROUP) == {("t", 0): COUNT}
