"""A pipeline from topic to topic whose driver and broker are killed: each record comes out once.

The driver is a program of its own, `tests.support.pipeline`, with a JVM and Python workers of its
own; producers, kills and checks are here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import pytest

import sparklog
from sparklog.client.producer.producer import RecordFuture
from sparklog.clock import SystemClock
from sparklog.formats.partitioner import murmur2, to_positive
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from tests.support.brokers import rows_of_table
from tests.support.killing import BrokerProcess
from tests.support.killpoints import KillPoints
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.spark

KEYS = 7
IN_PARTITIONS = 2
OUT_PARTITIONS = 3

Record: TypeAlias = tuple[int, int, str, str]
"""Partition, offset, key and value."""


# ------------------------------------------------------------------------------ who writes


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
        """Returns when it has ended, with what it was about."""
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)

    def check(self) -> None:
        assert self._failures == []

    def end(self) -> list[Record]:
        """All that was acked, in the order in which it was sent."""
        self.stop()
        self.check()
        acked = [(key, value, future.result(0.0)) for key, value, future in self._sent]
        return [(place.partition, place.offset, key, value) for key, value, place in acked]


# ------------------------------------------------------------------------------ who transforms


class Driver:
    """The program with its JVM and its workers; their output is in a file."""

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
        """All of it at once, whatever it does."""
        assert self._process is not None
        for group in _groups_below(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.await_end()

    def await_end(self) -> int:
        """Waits for the exit code of the driver."""
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
    """The process groups of a process and all that it has started: Spark's workers have others."""
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


# ------------------------------------------------------------------------------ the whole


class Pipeline:
    """Broker, producer and driver on one root."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._seed = seed
        self._chance = random.Random(seed)
        self._store = LocalStore(folder / "root")
        self._open = contextlib.ExitStack()
        self.points = KillPoints(folder / "points")
        self.broker = BrokerProcess(folder / "root", self.points.environment("broker"))
        self.driver = Driver(folder / "root", folder / "driver", self.points)
        self._seen = 0

    def __enter__(self) -> Self:
        with self._open:
            self._open.callback(self.broker.stop)
            self.broker.start()
            with sparklog.connect(self.broker.address) as log:
                log.create_topic("in", partitions=IN_PARTITIONS)
                log.create_topic("out", partitions=OUT_PARTITIONS)
            self._producer = Producer(self.broker.address, random.Random(self._seed))
            self._open.callback(self._producer.stop)
            self._open.callback(self._kill_driver)
            self.driver.start()
            self._follower = RootFollower(self._store, clock=SystemClock())
            self._open = self._open.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"seed {self._seed}; the driver said:\n{self.driver.said()}")
        self._open.close()

    def _kill_driver(self) -> None:
        if self.driver.is_running:
            self.driver.kill()

    def await_progress(self) -> None:
        """Returns once more has come out than at the last time; the driver must be alive."""

        def has_moved() -> bool:
            assert self.driver.is_running, "the driver stopped by itself"
            self._producer.check()
            return self._ended_at() > self._seen

        wait_until(has_moved, "something comes out")
        self._seen = self._ended_at()

    def _ended_at(self) -> int:
        return sum(self._follower.ends(self._follower.refresh(["out"])["out"]))

    def kill(self, *victims: str) -> None:
        """Kills the victims some time from now, and restarts them."""
        time.sleep(self._chance.uniform(0.0, 1.5))
        if "driver" in victims:
            self.driver.kill()
        if "broker" in victims:
            self.broker.kill()
            self.broker.start()
        if "driver" in victims:
            self.driver.start()
        self._seen = self._ended_at()

    def kill_at(self, point: str, victim: str) -> None:
        """Kills the next process at the point and restarts it; the pipeline continues."""
        self.points.arm(point, victim)
        wait_until(lambda: self.points.was_met(point, victim), f"{point} is met")
        if victim == "driver":
            assert self.driver.await_end() == -signal.SIGKILL
            self.driver.start()
        elif victim == "broker":
            self.broker.await_end()
            self.broker.start()
        self._seen = self._ended_at()
        self.await_progress()

    def judge(self) -> None:
        """Drains it; each acked record came out once, in order, and there are no others."""
        acked = self._producer.end()
        by_spark = self.driver.drain()
        with sparklog.connect(self.broker.address) as log:
            taken, given = _read(log, "in"), _read(log, "out")
        self.broker.stop()
        assert sorted(taken) == sorted(acked)
        assert _by_key(taken) == _by_key(acked)
        _check_offsets(taken, IN_PARTITIONS)
        _check_offsets(given, OUT_PARTITIONS)
        assert sorted(by_spark) == given
        assert self._table() == [(place, offset, value) for place, offset, _, value in given]
        wanted = [(0, 0, key, f"{part}/{offset}/{value}") for part, offset, key, value in taken]
        assert _by_key(given) == _by_key(wanted)
        for partition, _, key, _ in given:
            assert partition == to_positive(murmur2(key.encode())) % OUT_PARTITIONS

    def _table(self) -> list[tuple[int, int, str]]:
        """Returns partition, offset and value of the rows in the table of `out`."""
        return [
            (partition, offset, (value or b"").decode())
            for partition in range(OUT_PARTITIONS)
            for offset, value in rows_of_table(self._store, SystemClock(), "out", partition)
        ]


def _read(log: sparklog.Log, topic: str) -> list[Record]:
    """All of a topic as the client reads it, by partition and offset."""
    columns = log.read(topic).to_pydict()
    names = ("partition", "offset", "key", "value")
    return sorted(
        (partition, offset, key.decode(), value.decode())
        for partition, offset, key, value in zip(*(columns[name] for name in names), strict=True)
    )


def _check_offsets(rows: Iterable[Record], partitions: int) -> None:
    """Each partition has something, and its offsets have no hole."""
    found: list[list[int]] = [[] for _ in range(partitions)]
    for partition, offset, _, _ in rows:
        found[partition].append(offset)
    assert found == [list(range(len(each))) for each in found]
    assert all(found)


def _by_key(rows: Iterable[Record]) -> dict[str, list[str]]:
    """The values of each key in their order, which is that of one partition."""
    found: dict[str, list[str]] = defaultdict(list)
    for _, _, key, value in rows:
        found[key].append(value)
    return found


def survive(folder: Path, *, kills: int, minutes: float, seed: int) -> None:
    """Kills driver, broker and both in turn, so many times or for so long, at random moments."""
    with Pipeline(folder, seed=seed) as pipeline:
        turns = itertools.cycle([["driver"], ["broker"], ["driver", "broker"]])
        deadline = time.monotonic() + minutes * 60
        killed = 0
        while killed < kills or time.monotonic() < deadline:
            pipeline.await_progress()
            pipeline.kill(*next(turns))
            killed += 1
        pipeline.await_progress()
        pipeline.judge()


@pytest.mark.soak
def test_a_pipeline_lives_through_kills(tmp_path: Path) -> None:
    """The promises hold for sixty kills, and for as many minutes as configured."""
    minutes = float(os.environ.get("SPARKLOG_SOAK_MINUTES", "0"))
    survive(tmp_path, kills=60, minutes=minutes, seed=int.from_bytes(os.urandom(4)))


DRIVER_POINTS = ["undecided", "decided", "answered"]
"""From the last task's end to Spark's own log of the batch."""

WORKER_POINTS = ["planned", "staged", "undecided", "decided", "answered"]
BROKER_POINTS = ["asked", "appended"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(
            [("decided", "driver")]
            + [(point, "worker") for point in WORKER_POINTS]
            + [(point, "broker") for point in BROKER_POINTS],
            id="all",
        ),
        # Each of these starts a JVM and its Python workers.
        pytest.param(
            [(point, "driver") for point in DRIVER_POINTS], id="driver", marks=pytest.mark.soak
        ),
    ],
)
def test_a_batch_stands_once_wherever_it_is_cut_off(
    tmp_path: Path, deaths: Sequence[tuple[str, str]]
) -> None:
    """After a kill at any step from plan to answer, the batch is completed, and never twice."""
    with Pipeline(tmp_path, seed=3) as pipeline:
        for point, victim in deaths:
            pipeline.kill_at(point, victim)
        pipeline.judge()
