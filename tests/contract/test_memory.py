"""The memory of a broker for records that are small when compressed and large when decoded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparklog.clock import SystemClock
from sparklog.storage.objects import LocalStore
from sparklog.storage.table.topic_table import TopicTable
from tests.support import kafkarequests
from tests.support.batches import bomb
from tests.support.kafkakilling import kafka_broker
from tests.support.kafkas import Frames
from tests.support.killing import BrokerProcess
from tests.support.processes import MIB, Peak, resident_bytes

BATCH_BYTES = 60 * MIB
BATCHES = [
    pytest.param(8, 250 * MIB),
    pytest.param(22, 400 * MIB, marks=pytest.mark.soak(mode="limits")),
]
"""Half a gigabyte, and 1.3: how many batches, and what a broker may take for them."""
VALUE_BYTES = 1_000
PARTITIONS = 4
SECONDS = 120.0
NOT_NOW = {
    "SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "3600",
    "SPARKLOG_PUBLISHER_PUBLISH_BYTES": str(1 << 29),
}


@contextlib.contextmanager
def running(root: Path, environment: dict[str, str] | None = None) -> Iterator[BrokerProcess]:
    """A broker with a Kafka listener, which is killed in the end."""
    broker = kafka_broker(root, environment)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


@contextlib.contextmanager
def frames(broker: BrokerProcess) -> Iterator[Frames]:
    """A connection to its Kafka listener."""
    found = Frames(broker.kafka_address)
    try:
        yield found
    finally:
        found.close()


def pid(broker: BrokerProcess) -> int:
    """Its process."""
    assert broker._process is not None
    return broker._process.pid


def warm(broker: BrokerProcess, root: Path) -> None:
    """Has it load all that it needs to take records and to publish them."""
    with frames(broker) as client:
        kafkarequests.create(client, "warm")
        assert not kafkarequests.produce(client, "warm", 0, bomb(MIB)).error_code
    await_published(root, "warm", MIB // VALUE_BYTES)


def produce(broker: BrokerProcess, count: int) -> None:
    """Sends so many batches of zeros from four connections."""
    batch = bomb(BATCH_BYTES, value_bytes=VALUE_BYTES)
    assert len(batch) < MIB

    def send(first: int) -> None:
        with frames(broker) as client:
            for number in range(first, count, 4):
                found = kafkarequests.produce(client, "t", number % PARTITIONS, batch)
                assert not found.error_code, found.error_message

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))


def await_published(root: Path, topic: str, rows: int) -> None:
    """Returns when the topic's table has so many."""
    table = TopicTable(LocalStore(root), topic, clock=SystemClock(), only_reads=True)
    deadline = time.monotonic() + SECONDS
    while sum(table.refresh().ends) < rows:
        assert time.monotonic() < deadline, table.snapshot.ends
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most_bytes"), BATCHES)
def test_zeros_in_zstd_are_produced_and_published(
    tmp_path: Path, count: int, most_bytes: int
) -> None:
    """The broker takes a bounded amount of memory, whatever a batch holds when decompressed."""
    with running(tmp_path) as broker:
        warm(broker, tmp_path)
        with frames(broker) as client:
            kafkarequests.create(client, "t", PARTITIONS)
        with Peak(pid(broker)).watched() as peak:
            produce(broker, count)
            await_published(tmp_path, "t", count * (BATCH_BYTES // VALUE_BYTES))
    print(f"{count} batches of {BATCH_BYTES // MIB} MiB: + {peak.appended_bytes // MIB} MiB")  # noqa: T201
    assert peak.appended_bytes <= most_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most_bytes"), BATCHES)
def test_zeros_in_zstd_are_published_after_a_restart(
    tmp_path: Path, count: int, most_bytes: int
) -> None:
    """A backlog from before a restart costs no more memory than a new one."""
    with running(tmp_path) as broker:
        warm(broker, tmp_path)
        usual_bytes = resident_bytes(pid(broker))
    with running(tmp_path, NOT_NOW) as broker:
        with frames(broker) as client:
            kafkarequests.create(client, "t", PARTITIONS)
        produce(broker, count)
    with running(tmp_path) as broker, Peak(pid(broker)).watched() as peak:
        await_published(tmp_path, "t", count * (BATCH_BYTES // VALUE_BYTES))
    appended_bytes = peak.most_bytes - usual_bytes
    print(f"{count} batches of {BATCH_BYTES // MIB} MiB: + {appended_bytes // MIB} MiB")  # noqa: T201
    assert appended_bytes <= most_bytes
