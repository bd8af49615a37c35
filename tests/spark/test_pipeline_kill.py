"""A pipeline from topic to topic whose driver and broker are killed: each record comes out once.

The driver is a program of its own, `tests.support.pipeline`, with a JVM and Python workers of its
own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import sparklog
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore
from tests.support.killing import BrokerProcess
from tests.support.killpoints import KillPoints
from tests.support.piping import IN_PARTITIONS, OUT_PARTITIONS, Driver, Producer, drain
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.spark_program]


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
        outcome = drain(self._producer, self.driver, self.broker.address)
        self.broker.stop()
        outcome.judge(self._store)


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


@pytest.mark.soak(mode="kills")
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
            [(point, "driver") for point in DRIVER_POINTS],
            id="driver",
            marks=pytest.mark.soak(mode="kills"),
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
