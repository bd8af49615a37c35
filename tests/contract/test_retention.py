"""A log start that moves under a whole broker: for its clients, successors, and Delta readers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.clock import SystemClock
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LogSettings,
    PublisherSettings,
)
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from tests.support.brokers import rows_followed, rows_of_table

CLOCK = SystemClock()
SECONDS = 30.0


def broker(root: Path, **changed: Any) -> Agent:
    """A broker that looks after its tables all the time."""
    known: dict[str, Any] = {
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen=""),
        "publisher": PublisherSettings(interval_seconds=0.05),
        "janitor": JanitorSettings(
            interval_seconds=0.05, removed_file_grace_seconds=0.1, removed_file_kept_seconds=0.0
        ),
        "log": LogSettings(level="error"),
    }
    return Agent(BrokerSettings(root=str(root), id=1, **(known | changed)))


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for something that happens in another thread."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def send(log: sparklog.Log, first: int, end: int, topic: str = "t") -> None:
    """Records whose values are their offsets, all of them acked."""
    with log.producer() as producer:
        for number in range(first, end):
            producer.send(topic, b"%d" % number, partition=0)


def values(first: int, end: int) -> list[bytes]:
    """Returns the records that `send` has sent."""
    return [b"%d" % number for number in range(first, end)]


def rows_for_delta(root: Path, topic: str = "t") -> list[int]:
    """The offsets that another engine finds in the table."""
    table = DeltaTable(str(root / "topics" / topic)).to_pyarrow_table(columns=["offset"])
    return sorted(table["offset"].to_pylist())


def test_deleted_records_are_gone(tmp_path: Path) -> None:
    """For a client, for a reader of the root, and for Delta; also after a restart."""
    store = LocalStore(tmp_path)
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=2)
        send(log, 0, 60)
        log.flush_to_table()
        send(log, 60, 100)
        follower = RootFollower(store, clock=CLOCK)
        assert len(rows_followed(follower, store)) == 100
        assert log.delete_records("t", {0: 75}) == {0: 75}
        assert rows_for_delta(tmp_path) == list(range(75, 100))
        assert [offset for offset, _ in rows_followed(follower, store)] == list(range(75, 100))
        assert log.read("t")["value"].to_pylist() == values(75, 100)
        with pytest.raises(errors.OffsetOutOfRange):
            log.read("t", start=74, partitions=[0])
        send(log, 100, 110)
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        assert log.describe("t").partitions[0].start == 75
        assert log.read("t")["value"].to_pylist() == values(75, 110)
        assert log.delete_records("t", {0: 75, 1: 0}) == {0: 75, 1: 0}
        assert log.delete_records("t", {0: -1, 1: -1}) == {0: 110, 1: 0}
        assert log.read("t").num_rows == 0
    assert rows_of_table(store, CLOCK) == []
    assert rows_for_delta(tmp_path) == []


def test_a_consumer_behind_the_start_is_told(tmp_path: Path) -> None:
    """Returns the log start; a consumer that starts at the earliest offset may continue from
    there.
    """
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        send(log, 0, 50)
        with log.consumer("t", max_poll_rows=10, buffer_bytes=1) as consumer:
            assert [record.offset for record in consumer.poll(SECONDS)] == list(range(10))
            log.delete_records("t", {0: 40})
            consumer.seek("t", 0, consumer.position("t", 0))
            with pytest.raises(errors.OffsetOutOfRange) as refused:
                consumer.poll(SECONDS)
            assert (refused.value.start, refused.value.end) == (40, 50)
            assert consumer.beginning_offsets() == {("t", 0): 40}
            consumer.seek("t", 0, "earliest")
            assert [record.offset for record in consumer.poll(SECONDS)] == list(range(40, 50))
        with log.consumer("t", follow=False) as consumer:
            assert [record.value for record in consumer] == values(40, 50)


def test_old_records_leave_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the topic's configuration, as soon as it says so; then their files leave the disk."""
    monkeypatch.setattr("sparklog.broker.log.janitor.RETENTION_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("sparklog.broker.log.janitor.SWEEP_EVERY_SECONDS", 0.05)
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", partitions=1)
        for first in range(0, 30, 10):
            send(log, first, first + 10)
            log.flush_to_table()
        assert log.describe("t").partitions[0].start == 0
        log.alter("t", {"retention.bytes": 1})

        def start() -> int:
            return log.describe("t").partitions[0].start

        until(lambda: start() == 20, "the newest file stays")
        assert log.read("t")["value"].to_pylist() == values(20, 30)
        log.alter("t", {"retention.bytes": None, "retention.ms": 1})
        until(lambda: start() == 30, "it is old as well")
        log.alter("t", {"retention.ms": -1})
        send(log, 30, 31)
        assert log.consumer("t").poll(SECONDS)[0].offset == 30
        assert start() == 30

        def files() -> list[Path]:
            return list((tmp_path / "topics" / "t" / "partition=0").glob("*.parquet"))

        until(lambda: len(files()) <= 1, "files go after a grace")


_PROGRAM = """
import os, signal, sys
from pathlib import Path

import sparklog
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.storage.maintenance import retention
from tests.contract.test_retention import broker, send

root, point = Path(sys.argv[1]), sys.argv[2]
if point == "published":
    retention.delete_records = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with broker(root) as agent, sparklog.connect(agent.address) as log:
    log.create_topic("t", partitions=1)
    send(log, 0, 50)
    if point == "committed":
        log.flush_to_table()  # or else the publisher would come to the point first
        LedPartitions.advance_start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    log.delete_records("t", {0: 35})
"""


@pytest.mark.parametrize(("point", "start"), [("published", 0), ("committed", 35)])
def test_killed_in_the_middle(tmp_path: Path, point: str, start: int) -> None:
    """Before the commit nothing has happened, after it all has; a retry ends it either way."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), point]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -signal.SIGKILL
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        assert log.describe("t").partitions[0].start == start
        assert log.read("t")["value"].to_pylist() == values(start, 50)
        assert log.delete_records("t", {0: 35}) == {0: 35}
        assert log.read("t")["value"].to_pylist() == values(35, 50)
    assert rows_for_delta(tmp_path) == list(range(35, 50))
