"""Applications of Quix Streams and Faust, unmodified, over a kill of theirs and one of the broker.

Each keeps its state in a changelog topic, and gets it back from there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest

import sparklog
from tests.support.kafkakilling import kafka_broker
from tests.support.suites import SUITES, python_with
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="suites"), pytest.mark.timeout(900)]

KEYS: Final = 10
PARTITIONS: Final = 4
PART: Final = 300
PACKAGES: Final[Mapping[str, Sequence[str]]] = {
    "quix_app.py": ("quixstreams==3.28.1",),
    "faust_app.py": ("faust-streaming==0.15.3",),
}
HASTY: Final = ("faust_app.py",)
"""Those that commit a record before the results of it are acked: a kill at work loses some, with
any broker.
"""


@contextmanager
def running(python: Path, program: str, address: str, state: Path) -> Iterator[Callable[[], None]]:
    """The application with an empty folder for its state; killed at the end.

    Yields a function that fails if it has ended by itself.
    """
    state.mkdir()
    with (state / "output.log").open("wb") as output:
        process = subprocess.Popen(
            [str(python), str(SUITES / program), address, str(state)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

        def check() -> None:
            assert process.poll() is None, (state / "output.log").read_text()[-2_000:]

        try:
            yield check
        finally:
            process.kill()
            process.wait()


def send(address: str, numbers: range) -> None:
    """Writes the numbers, each under one of `KEYS` keys."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    for number in numbers:
        producer.produce(
            "in",
            key=b"k%d" % (number % KEYS),
            value=b"%d" % number,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    assert producer.flush(60.0) == 0
    assert not failed


class Counts:
    """The last count of each key that has come out."""

    def __init__(self, address: str) -> None:
        self.found: dict[bytes, int] = {}
        self._consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False}
        )
        self._consumer.assign(
            [confluent_kafka.TopicPartition("out", number, 0) for number in range(PARTITIONS)]
        )

    def wait_for(self, count: int, check: Callable[[], None]) -> None:
        """Returns once each key has had so many numbers."""

        def are_there() -> bool:
            check()
            return self._are(count)

        wait_until(are_there, f"{count} numbers of each key are counted: {self.found}")

    def _are(self, count: int) -> bool:
        for message in self._consumer.consume(1_000, 0.1):
            key, value = message.key(), message.value()
            if message.error() is None and key is not None and value is not None:
                self.found[key] = int(value)
        return self.found == {b"k%d" % number: count for number in range(KEYS)}

    def close(self) -> None:
        self._consumer.close()


@pytest.mark.parametrize("program", PACKAGES)
def test_an_application_survives_kills(tmp_path: Path, program: str) -> None:
    """It counts each number once, with the state that its changelog has."""
    python = python_with(tmp_path, *PACKAGES[program])
    broker = kafka_broker(tmp_path / "root")
    broker.start()
    try:
        address = broker.kafka_address
        with sparklog.connect(broker.address) as log:
            for topic in ("in", "out"):
                log.create_topic(topic, partitions=PARTITIONS)
        counts = Counts(address)
        send(address, range(PART))
        with running(python, program, address, tmp_path / "first") as check:
            counts.wait_for(PART // KEYS, check)
            send(address, range(PART, 2 * PART))
            if program in HASTY:
                counts.wait_for(2 * PART // KEYS, check)
        with running(python, program, address, tmp_path / "second") as check:
            send(address, range(2 * PART, 3 * PART))
            counts.wait_for(3 * PART // KEYS, check)
            broker.kill()
            broker.start()
            send(address, range(3 * PART, 4 * PART))
            counts.wait_for(4 * PART // KEYS, check)
        counts.close()
    finally:
        if broker.is_running:
            broker.stop()
