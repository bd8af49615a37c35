"""`sparklog.jobs.compact`: tables are compacted by Spark's tasks, alongside their brokers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.jobs.compact import compact
from sparklog.jobs.running import app_of
from sparklog.jobs.verify import verify
from sparklog.storage.objects import LocalStore
from sparklog.storage.table.topic_table import TopicTable
from tests.support.jobs import KILLS, failed, succeeded, survive
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

_CONFIG = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
_PARTITIONS = 5
_KEYS = 50
"""A key is in one partition, because their number divides this one."""


def run(root: Path, *arguments: str, job: Any = compact) -> Result:
    """Runs a job in this process, with its session."""
    return CliRunner().invoke(app_of(job), [f"--root={root}", *arguments])


def check(root: Path) -> None:
    """Every record is there once, and is as the table's log says."""
    assert succeeded(run(root, "--values", job=verify)).endswith("no fault")


def publish(log: Log, topic: str, numbers: range, partitions: int = 2) -> None:
    """Publishes a file for each partition, with the numbers as values, and keys that repeat."""
    with log.producer() as producer:
        for number in numbers:
            key = b"%d" % (number % _KEYS)
            producer.send(topic, b"%d" % number, key=key, partition=number % partitions)
    log.flush_to_table(topic)


def files_of(root: Path, topic: str) -> list[int]:
    """The number of files of each partition."""
    table = TopicTable(LocalStore(str(root)), topic, clock=SystemClock())
    return [len(files) for files in table.refresh().files]


@contextmanager
def publishing(log: Log, first: int) -> Iterator[list[int]]:
    """Publishes 20 records again and again meanwhile; the item is the number after the last."""
    end, is_over = [first], threading.Event()

    def work() -> None:
        while not is_over.is_set():
            publish(log, "t", range(end[0], end[0] + 20))
            end[0] += 20

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield end
    finally:
        is_over.set()
        thread.join()


def test_beside_a_broker_that_publishes(root: Path, log: Log) -> None:
    """No record is lost, doubled or moved; then nothing is left to do."""
    for number in range(6):
        publish(log, "t", range(20 * number, 20 * (number + 1)))
    with publishing(log, 120) as end:
        said = succeeded(run(root, "t"))
    assert said.startswith("t: ")
    assert "files in place of" in said
    found = log.read("t").sort_by([("partition", "ascending"), ("offset", "ascending")])
    assert found.column("offset").to_pylist() == [*range(end[0] // 2)] * 2
    expected = [b"%d" % number for each in (0, 1) for number in range(each, end[0], 2)]
    assert found.column("value").to_pylist() == expected
    while "left for another run" in succeeded(run(root, "t")):
        pass  # The broker has merged the same new files meanwhile.
    assert files_of(root, "t") == [1, 1]
    assert succeeded(run(root, "t")) == "t: nothing to compact"
    assert pl.read_delta(str(root / "topics" / "t")).height == end[0]
    check(root)


def test_wrong_arguments_are_refused(root: Path, log: Log, tmp_path: Path) -> None:
    """By name; nothing is made of a misspelt path."""
    assert "'missing'" in failed(run(root, "missing"))
    failed(run(tmp_path / "none", "t"))
    assert not (tmp_path / "none").exists()
    assert succeeded(run(root, "--dry-run", "t")) == "t: nothing was written"


def command(root: Path) -> list[str]:
    """The job on topic c as a program."""
    return [sys.executable, "-m", "sparklog.jobs.compact", f"--root={root}", "c"]


def check_compacted(root: Path, end: int) -> None:
    """The last record of each key is left, at its offset, in one file of each partition."""
    assert files_of(root, "c") == [1] * _PARTITIONS
    with sparklog.connect(root) as log:
        found = log.read("c").to_pylist()
    assert {row["key"]: (row["value"], row["offset"]) for row in found} == {
        b"%d" % (number % _KEYS): (b"%d" % number, number // _PARTITIONS)
        for number in range(end - _KEYS, end)
    }
    assert len(found) == _KEYS
    check(root)


@pytest.mark.spark_program
@pytest.mark.soak(mode="jobs")
def test_a_job_that_is_killed_is_run_again(root: Path) -> None:
    """Between its commits, as a program; the next run does the rest."""
    with sparklog.connect(root) as log:
        log.create_topic("c", partitions=_PARTITIONS, config=_CONFIG)
        for number in range(3):
            publish(log, "c", range(500 * number, 500 * (number + 1)), _PARTITIONS)
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    job = subprocess.Popen(command(root), env=environment, start_new_session=True)
    try:
        wait_until(lambda: 1 in files_of(root, "c"), "the job commits something")
    finally:
        os.killpg(job.pid, 9)
    assert job.wait() == -9
    assert sum(files_of(root, "c")) > _PARTITIONS
    assert "superseded records removed" in succeeded(run(root, "c"))
    check_compacted(root, 1500)


@pytest.mark.timeout(1_800)
@pytest.mark.spark_program
@pytest.mark.soak(mode="jobs")
def test_a_job_that_is_killed_often(root: Path) -> None:
    """At any point, alongside a broker that publishes and compacts too."""
    with sparklog.connect(root) as log:
        log.create_topic("c", partitions=_PARTITIONS, config=_CONFIG)

        def publish_more(number: int) -> None:
            for part in range(10 * number, 10 * (number + 1)):
                publish(log, "c", range(500 * part, 500 * (part + 1)), _PARTITIONS)

        survive(command(root), kills=KILLS, pauses=(4.0, 12.0), seed=6, before=publish_more)
        run(root, "c")
    check_compacted(root, 5_000 * KILLS)
