"""Source and sink where tasks run in executors of their own, fail, and race each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog.clock import SystemClock
from sparklog.storage.objects import LocalStore
from tests.support import spark_programs
from tests.support.brokers import rows_of_root
from tests.support.on_executors import RACING_ROWS, ROWS

pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark_program,
    pytest.mark.since("4.2"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

PARTITIONS = 3


@dataclass(frozen=True, slots=True)
class Ran:
    """Results of the program."""

    root: Path
    notes: Path
    found: dict[str, Any]
    brokers: list[int]

    def values(self, topic: str) -> Counter[str]:
        """The first nine characters of each value in the topic, and how often they are there."""
        store, clock = LocalStore(self.root), SystemClock()
        return Counter(
            (value or b"")[:9].decode()
            for partition in range(PARTITIONS)
            for _, value in rows_of_root(store, clock, topic, partition)
        )


@pytest.fixture(name="ran", scope="module")
def _ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The program, run once on a root that no broker serves."""
    root, notes = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("notes")
    with sparklog.connect(root) as log:
        for topic in ("t", "u", "retried", "raced", "produced", "replayed"):
            log.create_topic(topic, partitions=PARTITIONS)
    try:
        found = spark_programs.run("on_executors", str(root), str(notes), timeout_seconds=360.0)
        yield Ran(root, notes, found, spark_programs.detached_brokers(root))
    finally:
        spark_programs.end_detached_brokers(root)


def each_once(count: int, width: int = 0) -> Counter[str]:
    """The numbers below `count`, each once."""
    return Counter(f"{number:0{width}d}" for number in range(count))


def test_executors_read_what_executors_wrote(ran: Ran) -> None:
    """Two executors, one broker that the sink has started, and every row once."""
    assert ran.found["executors"] == 2
    assert len(ran.brokers) == 1
    assert Counter(ran.found["read"]) == ran.values("t") == each_once(ROWS)


def test_a_stream_is_copied_by_executors(ran: Ran) -> None:
    """Each record once, over several micro-batches."""
    assert ran.values("u") == each_once(ROWS)


def test_a_task_that_failed_first_counts_once(ran: Ran) -> None:
    """Rows that the first attempt has handed over do not stand alongside the second one's."""
    assert (ran.notes / "failed").exists()
    assert ran.values("retried") == each_once(ROWS)


def test_attempts_that_race_stage_twice_and_count_once(ran: Ran) -> None:
    """The manifest names the files of one attempt; those of the other are not used."""
    assert (ran.notes / "attempt 0").exists()
    assert (ran.notes / "attempt 1").exists()
    manifest = json.loads((ran.notes / "manifest.json").read_bytes())
    named = {section["path"].rpartition("/")[2] for section in manifest["sections"]}
    losers = set(ran.found["staged"]) - named - {"manifest.json"}
    assert named <= set(ran.found["staged"])
    assert losers
    assert ran.values("raced") == each_once(2 * RACING_ROWS, width=9)


def test_jobs_run(ran: Ran) -> None:
    """They write from files and from topic to topic, and compact, with the session there is."""
    assert ran.found["jobs"] == [
        "produced: 3 records",
        "produced: nothing to write, this run's records are in the topic",
        "replayed: 3 records",
        "produced: 3 records",
        "produced: 6 records, 1 file in place of 2",
    ]
