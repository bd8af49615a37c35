"""A running pipeline from topic to topic: its producer, and its driver with its own JVM.

The records that come out are compared with those acked. `tests.support.pipeline` is the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import sparklog
from sparklog.client.producer.producer import RecordFuture
from sparklog.clock import SystemClock
from sparklog.formats.partitioner import murmur2, to_positive
from sparklog.storage.objects import Store
from tests.support.brokers import rows_of_table
from tests.support.killpoints import KillPoints
from tests.support.waiting import PATIENCE_SECONDS

KEYS: Final = 7
IN_PARTITIONS: Final = 2
OUT_PARTITIONS: Final = 3

Record: TypeAlias = tuple[int, int, str, str]
"""Partition, offset, key and value."""


# ------------------------------------------------------------------------------ producer


class Producer:
    """Sends numbered records of several keys, in bursts, and waits for each burst's acks."""

    def __init__(self, address: str, chance: random.Random) -> None:
        self._address = address
        self._chance = chance
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._sent: list[tuple[str, str, RecordFuture]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        numbers = [0] * KEYS
        try:
            with sparklog.connect(self._address) as log, log.producer(linger_ms=1) as producer:
                while not self._ended.wait(self._chance.random() * 0.2):
                    burst = []
                    for _ in range(self._chance.choice([1, 2, 20])):
                        which = self._chance.randrange(KEYS)
                        key, value = f"k{which}", f"{which}:{numbers[which]}"
                        numbers[which] += 1
                        burst.append(
                            (key, value, producer.send("in", value.encode(), key=key.encode()))
                        )
                    for _, _, future in burst:
                        future.result(PATIENCE_SECONDS)
                    self._sent += burst
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        """Stops it, and waits until the current burst is acked."""
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)

    def check(self) -> None:
        assert self._failures == []

    def end(self) -> list[Record]:
        """Stops it. Returns all acked records, in the order in which they were sent."""
        self.stop()
        self.check()
        acked = [(key, value, future.result(0.0)) for key, value, future in self._sent]
        return [(place.partition, place.offset, key, value) for key, value, place in acked]


# ------------------------------------------------------------------------------ driver


class Driver:
    """The program with its JVM and its workers; their output goes to a file."""

    def __init__(self, root: Path, folder: Path, points: KillPoints) -> None:
        folder.mkdir()
        self._folder = folder
        self._report = folder / "report.jsonl"
        self._said = folder / "said.txt"
        self._command = [sys.executable, "-m", "tests.support.pipeline", str(root)]
        self._command += [str(folder / "checkpoint"), str(self._report)]
        local = {"SPARK_LOCAL_DIRS": str(folder), "TMPDIR": str(folder)}
        local["JDK_JAVA_OPTIONS"] = f"-Djava.io.tmpdir={folder}"
        self._environment = {**os.environ, **points.environment("spark"), **local}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kills all its processes, whatever they are doing."""
        assert self._process is not None
        for group in _groups_below(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.await_end()

    def await_end(self) -> int:
        """Waits until the driver has ended. Returns its exit code."""
        assert self._process is not None
        assert self._process.stdin is not None
        code = self._process.wait(PATIENCE_SECONDS)
        self._process.stdin.close()
        return code

    def drain(self) -> list[Record]:
        """Lets it process the rest and end. Returns the records of `out` as Spark has read them."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.await_end() == 0
        return [tuple(json.loads(line)) for line in self._report.read_text().splitlines()]

    def said(self) -> str:
        return self._said.read_text(errors="replace")[-6_000:]


def _groups_below(pid: int) -> list[int]:
    """The process groups of a process and its descendants: Spark's workers have their own."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid=,pgid="], text=True)
    processes = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family, groups = {pid}, {pid: None}
    found = True
    while found:
        found = False
        for each, parent, group in processes:
            if parent in family and each not in family:
                family.add(each)
                groups[group] = None
                found = True
    return list(groups)


# ------------------------------------------------------------------------------ the outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All acked records, and the records of both topics."""

    acked: Sequence[Record]
    taken: Sequence[Record]
    """The records of `in`, as the client reads them."""
    given: Sequence[Record]
    """The records of `out`, as the client reads them."""
    by_spark: Sequence[Record]
    """The records of `out`, as Spark has read them."""

    def judge(self, store: Store) -> None:
        """Asserts that each acked record came out once, in order, and no others.

        Called once no broker serves the root, when everything has been published.
        """
        assert sorted(self.taken) == sorted(self.acked)
        assert _by_key(self.taken) == _by_key(self.acked)
        _check_offsets(self.taken, IN_PARTITIONS)
        _check_offsets(self.given, OUT_PARTITIONS)
        assert sorted(self.by_spark) == self.given
        wanted = [
            (0, 0, key, f"{part}/{offset}/{value}") for part, offset, key, value in self.taken
        ]
        assert _by_key(self.given) == _by_key(wanted)
        for partition, _, key, _ in self.given:
            assert partition == to_positive(murmur2(key.encode())) % OUT_PARTITIONS
        assert _table(store) == [(place, offset, value) for place, offset, _, value in self.given]


def drain(producer: Producer, driver: Driver, address: str) -> Outcome:
    """Ends the producer, lets the driver process the rest and end, and reads both topics."""
    acked = producer.end()
    by_spark = driver.drain()
    with sparklog.connect(address) as log:
        return Outcome(
            acked=acked, taken=_read(log, "in"), given=_read(log, "out"), by_spark=by_spark
        )


def _table(store: Store) -> list[tuple[int, int, str]]:
    """Returns partition, offset and value of the rows in the table of `out`."""
    return [
        (partition, offset, (value or b"").decode())
        for partition in range(OUT_PARTITIONS)
        for offset, value in rows_of_table(store, SystemClock(), "out", partition)
    ]


def _read(log: sparklog.Log, topic: str) -> list[Record]:
    """All records of a topic as the client reads them, by partition and offset."""
    columns = log.read(topic).to_pydict()
    names = ("partition", "offset", "key", "value")
    return sorted(
        (partition, offset, key.decode(), value.decode())
        for partition, offset, key, value in zip(*(columns[name] for name in names), strict=True)
    )


def _check_offsets(rows: Iterable[Record], partitions: int) -> None:
    """Asserts that each partition has records, and no gap in its offsets."""
    found: list[list[int]] = [[] for _ in range(partitions)]
    for partition, offset, _, _ in rows:
        found[partition].append(offset)
    assert found == [list(range(len(each))) for each in found]
    assert all(found)


def _by_key(rows: Iterable[Record]) -> dict[str, list[str]]:
    """The values of each key in order; all are in one partition."""
    found: dict[str, list[str]] = defaultdict(list)
    for _, _, key, value in rows:
        found[key].append(value)
    return found
