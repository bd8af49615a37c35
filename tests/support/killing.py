"""Kills a real broker repeatedly while clients write and read, and checks the promises.

Nothing acked is lost or duplicated, each producer's order is preserved, and in the end the table
equals the log. A test of another reader passes a `Witness`: it starts before the first kill, ends
after the last record, and then compares its records with the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import sparklog
from sparklog.bench.broker import free_address
from sparklog.client.producer.producer import RecordFuture
from sparklog.clock import SystemClock
from sparklog.storage.follow import RootFollower
from sparklog.storage.objects import LocalStore, ObjectMissing
from sparklog.storage.reading.read import read_slice
from tests.support import preloaded
from tests.support.brokers import Row, rows_followed, rows_of_table
from tests.support.waiting import wait_until

TOPIC = "t"
PARTITIONS = 2
PRODUCERS = 3
PATIENCE_SECONDS = 60.0

_EAGER = {
    "SPARKLOG_PUBLISHER_INTERVAL_SECONDS": "0.2",
    "SPARKLOG_JANITOR_INTERVAL_SECONDS": "0.2",
    "SPARKLOG_JANITOR_COMPACT_FILES": "3",
    "SPARKLOG_JANITOR_TABLE_CHECKPOINT_EVERY": "5",
    "SPARKLOG_WRITER_CHECKPOINT_EVERY_SECONDS": "0.3",
    "SPARKLOG_LOG_LEVEL": "warning",
}
"""Everything happens often, so that kills interrupt all of it."""

_WITH_LIMITS = """
import json, sys
from sparklog import limits

for name, value in json.loads(sys.argv.pop(1)).items():
    assert hasattr(limits, name), name
    setattr(limits, name, value)

from sparklog.cli import main

main()
"""

Log = Sequence[Sequence[Row]]
"""Per partition: offset and value of every record."""


class Witness(Protocol):
    """A reader that runs through all kills."""

    def begin(self, root: Path, address: str) -> None:
        """Starts reading; writers are running, and the first kill comes after this."""
        ...

    def go_on(self) -> None:
        """Waits until it has seen more than at the last kill, before another one."""
        ...

    def end(self, log: Log) -> None:
        """Ends reading; asserts that its records are those of this complete log."""
        ...


# ------------------------------------------------------------------------------ the broker


class BrokerProcess:
    """`sparklog broker` on a root, always at the same address.

    `said`: the file for its log lines, which otherwise go to the standard error of the tests.
    `limits`: other values for some names of `sparklog.limits`, such as times that tests wait for.
    """

    def __init__(
        self,
        root: Path,
        environment: Mapping[str, str] | None = None,
        *,
        flight: str = "",
        kafka: str = "",
        broker: int = 1,
        said: Path | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.root = root
        self.broker = broker
        self.kafka_address = kafka
        self._environment = {**os.environ, **_EAGER, **(environment or {})}
        self._said = said
        self._limits = dict(limits or {})
        self.address = flight or free_address()
        self._process: preloaded.Process | None = None

    def start(self) -> None:
        """Starts it, and waits until it serves."""
        command = ["-c", _WITH_LIMITS, json.dumps(self._limits)] if self._limits else ["sparklog"]
        command += ["broker", "--root", str(self.root)]
        command += ["--id", str(self.broker), "--flight", self.address]
        command += ["--kafka", self.kafka_address]
        with contextlib.ExitStack() as closing:
            said = closing.enter_context(self._said.open("ab")) if self._said else None
            self._process = preloaded.start(
                command, env=self._environment, stdout=subprocess.PIPE, stderr=said
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the broker did not start"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_started(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Kills the process, whatever it is doing."""
        assert self.is_running, "the broker stopped by itself"
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Shuts the process down cleanly. Returns its exit code."""
        return self._end(signal.SIGTERM) if self.is_running else 0

    def freeze(self) -> None:
        """Suspends the process until `thaw`, whatever it is doing."""
        assert self.is_running, "the broker stopped by itself"
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resumes the process, as if no time had passed."""
        self._send(signal.SIGCONT)

    def _send(self, signal_number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signal_number)

    def _end(self, how: signal.Signals) -> int:
        self._send(how)
        return self.await_end()

    def await_end(self) -> int:
        """Waits until the process has ended, for whatever reason. Returns its exit code."""
        assert self._process is not None
        code = self._process.wait(PATIENCE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


# ------------------------------------------------------------------------------ writers


@dataclass(slots=True)
class _Writing:
    """Records that one producer has sent to its partition, in order, and their outcomes."""

    producer: int
    partition: int
    sent: list[tuple[bytes, RecordFuture]] = field(default_factory=list)


def _write(address: str, writing: _Writing, ended: threading.Event, chance: random.Random) -> None:
    """Sends numbered records, singly and in bursts, until it is stopped."""
    with sparklog.connect(address) as log, log.producer(linger_ms=1) as producer:
        number = 0
        while not ended.is_set():
            for _ in range(chance.choice([1, 1, 3, 50])):
                value = b"%d:%d" % (writing.producer, number)
                future = producer.send(TOPIC, value=value, partition=writing.partition)
                writing.sent.append((value, future))
                number += 1
            if chance.random() < 0.3:
                writing.sent[-1][1].exception(PATIENCE_SECONDS)
            time.sleep(chance.random() * 0.01)
        producer.flush(PATIENCE_SECONDS)


# ------------------------------------------------------------------------------ the whole


def survive(
    root: Path, *, kills: int, minutes: float, seed: int, witnesses: Sequence[Witness]
) -> None:
    """Kills at random moments, at least this many times and this long; then judges the result."""
    chance = random.Random(seed)
    broker = BrokerProcess(root)
    broker.start()
    with sparklog.connect(broker.address) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS)
    ended = threading.Event()
    writings = [_Writing(number, number % PARTITIONS) for number in range(PRODUCERS)]
    threads = [
        threading.Thread(
            target=_write, args=(broker.address, each, ended, random.Random(seed + each.producer))
        )
        for each in writings
    ]
    try:
        for thread in threads:
            thread.start()
        for witness in witnesses:
            witness.begin(root, broker.address)
        deadline = time.monotonic() + minutes * 60
        killed = 0
        while killed < kills or time.monotonic() < deadline:
            for witness in witnesses:
                witness.go_on()
            time.sleep(chance.uniform(0.05, 1.2))
            broker.kill()
            killed += 1
            broker.start()
        for witness in witnesses:
            witness.go_on()
        ended.set()
        for thread in threads:
            thread.join(2 * PATIENCE_SECONDS)
        broker.stop()
        _judge(root, writings, witnesses)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        ended.set()
        broker.stop()


def _judge(root: Path, writings: Sequence[_Writing], witnesses: Sequence[Witness]) -> None:
    store, clock = LocalStore(root), SystemClock()
    follower = RootFollower(store, clock=clock)
    log = [rows_followed(follower, store, TOPIC, number) for number in range(PARTITIONS)]
    for partition, rows in enumerate(log):
        assert [offset for offset, _ in rows] == list(range(len(rows)))
        assert len({value for _, value in rows}) == len(rows), "a record is there twice"
        assert rows_of_table(store, clock, TOPIC, partition) == rows, "the table is not the log"
    for writing in writings:
        assert writing.sent, "no producer has written"
        rows = log[writing.partition]
        mine = [value for _, value in rows if value and value.startswith(b"%d:" % writing.producer)]
        assert mine == [value for value, _ in writing.sent], "a record is missing, or out of order"
        for value, future in writing.sent:
            assert rows[future.result(0.0).offset][1] == value
    for witness in witnesses:
        witness.end(log)


# ------------------------------------------------------------------------------ readers


class Follower:
    """A reader of the root that needs no broker and polls continuously."""

    def __init__(self, partitions: int = PARTITIONS) -> None:
        self._ended = threading.Event()
        self._seen: list[list[Row]] = [[] for _ in range(partitions)]
        self._failures: list[BaseException] = []
        self._looks = 0

    def begin(self, root: Path, address: str) -> None:
        del address
        self._store = LocalStore(root)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        follower = RootFollower(self._store, clock=SystemClock())
        try:
            while not self._ended.is_set():
                with contextlib.suppress(ObjectMissing):  # compacted between plan and read
                    self._look(follower)
                time.sleep(0.01)
            self._look(follower)
        except BaseException as error:
            self._failures.append(error)

    def _look(self, follower: RootFollower) -> None:
        snapshot = follower.refresh([TOPIC])[TOPIC]
        for partition, end in enumerate(follower.ends(snapshot)):
            seen = self._seen[partition]
            assert end >= len(seen), "the log became shorter"
            found: list[Row] = []
            for piece in follower.plan(TOPIC, snapshot, partition, len(seen), end):
                for batch in read_slice(self._store, piece, columns=["offset", "value"]):
                    columns = batch.to_pydict()
                    found += zip(columns["offset"], columns["value"], strict=True)
            seen += found
        self._looks += 1

    def go_on(self) -> None:
        """Does nothing: it polls every few milliseconds."""

    def end(self, log: Log) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)
        for failure in self._failures:
            raise failure
        assert self._looks > 10
        assert self._seen == log


class Consumer:
    """A client's consumer of the whole topic."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._seen: list[list[Row]] = [[] for _ in range(PARTITIONS)]
        self._counted = 0
        """Records seen at the last kill."""
        self._failures: list[BaseException] = []

    def begin(self, root: Path, address: str) -> None:
        del root
        self._thread = threading.Thread(target=self._consume, args=(address,), daemon=True)
        self._thread.start()

    def _consume(self, address: str) -> None:
        try:
            with sparklog.connect(address) as log, log.consumer(TOPIC) as consumer:
                while not self._ended.is_set():
                    for record in consumer.poll(0.1):
                        self._seen[record.partition].append((record.offset, record.value))
        except BaseException as error:
            self._failures.append(error)

    def go_on(self) -> None:
        """Waits for new records; it may take a while to find the broker again."""
        before = self._counted
        wait_until(lambda: self._count() > before or bool(self._failures), "the consumer continues")
        self._counted = self._count()

    def _count(self) -> int:
        return sum(map(len, self._seen))

    def end(self, log: Log) -> None:
        """Asserts that it read the log; with the broker gone, the last records may be missing."""
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)
        for failure in self._failures:
            raise failure
        for seen, rows in zip(self._seen, log, strict=True):
            assert seen
            assert seen == rows[: len(seen)]
