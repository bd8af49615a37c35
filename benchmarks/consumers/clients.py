"""Consumers in separate processes, so that they do not share the producer's interpreter."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeAlias

import sparklog

TOPIC: Final = "tailed"
_WARM: Final = b"warm"
_START_SECONDS: Final = 90.0
_POLL_SECONDS: Final = 0.2
_IN_ONE_PROCESS: Final = 25
"""Consumers in one process share an interpreter, which serves one of them at a time."""

_Poll: TypeAlias = Callable[[], list[bytes]]
"""Waits briefly for records of one consumer, and returns their values."""


class Tails:
    """Consumers that tail a topic, and the delays of the records they received.

    A record's value is the time it was sent, by `time.monotonic_ns`.
    """

    def __init__(self, kind: str, address: str, count: int) -> None:
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for first in range(0, count, _IN_ONE_PROCESS):
            some = min(_IN_ONE_PROCESS, count - first)
            pipe, theirs = context.Pipe()
            process = context.Process(target=_run, args=(kind, address, some, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, pipe))

    def wait_until_ready(self, send: Callable[[bytes], None]) -> None:
        """Sends records until each consumer has received one."""
        deadline = time.monotonic() + _START_SECONDS
        for _, pipe in self._processes:
            while not pipe.poll(0.1):
                send(_WARM)
                if time.monotonic() > deadline:
                    raise RuntimeError("the consumers did not start reading")
            pipe.recv()

    def delays_seconds(self) -> list[float]:
        """Ends the consumers. Returns the delays of all records they received."""
        for _, pipe in self._processes:
            pipe.send("end")
        found = [each for _, pipe in self._processes for each in pipe.recv()]
        self.close()
        return found

    def close(self) -> None:
        for process, _ in self._processes:
            process.terminate()
        for process, _ in self._processes:
            process.join()


@contextmanager
def tails(kind: str, address: str, count: int) -> Iterator[Tails]:
    """Yields this many consumers of `kind`: "kafka" or "native"."""
    found = Tails(kind, address, count)
    try:
        yield found
    finally:
        found.close()


def _run(kind: str, address: str, count: int, pipe: Connection) -> None:
    opened = _kafka(address, count) if kind == "kafka" else _native(address, count)
    delays: list[list[float]] = [[] for _ in range(count)]
    ready = [threading.Event() for _ in range(count)]
    is_over = threading.Event()

    def follow(number: int, poll: _Poll) -> None:
        mine, is_ready = delays[number], ready[number]
        while not is_over.is_set():
            for value in poll():
                if value == _WARM:
                    is_ready.set()
                else:
                    mine.append((time.monotonic_ns() - int(value)) / 1e9)

    for number, poll in enumerate(opened):
        threading.Thread(target=follow, args=(number, poll), daemon=True).start()
    for each in ready:
        each.wait()
    pipe.send("ready")
    pipe.recv()
    is_over.set()
    pipe.send([each for mine in delays for each in mine])
    time.sleep(_START_SECONDS)  # until terminated, without closing each consumer


def _kafka(address: str, count: int) -> Iterator[_Poll]:
    import confluent_kafka

    for _ in range(count):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "unused",
                "enable.auto.commit": False,
                "auto.offset.reset": "latest",
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, confluent_kafka.OFFSET_END)])

        def poll(consumer: Any = consumer) -> list[bytes]:
            message = consumer.poll(_POLL_SECONDS)
            return [] if message is None or message.error() else [message.value()]

        yield poll


def _native(address: str, count: int) -> Iterator[_Poll]:
    log = sparklog.connect(address)
    for _ in range(count):
        consumer = log.consumer(TOPIC, start="latest")

        def poll(consumer: Any = consumer) -> list[bytes]:
            return [record.value for record in consumer.poll(_POLL_SECONDS)]

        yield poll
