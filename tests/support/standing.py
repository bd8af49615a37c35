"""`sparklog broker` as a process that a test starts and ends, and whose output it reads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import preloaded

_SECONDS = 30.0


class Standing:
    """`sparklog broker` on a root, at any free address."""

    def __init__(self, root: Path, *options: str, kafka: str = "") -> None:
        command = ["sparklog", "broker", "--root", str(root)]
        command += ["--flight", "127.0.0.1:0", "--kafka", kafka, *options]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SPARKLOG_")}
        environment.pop("PYTHONUNBUFFERED", None)  # a broker may be started without it
        self._process = preloaded.start(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.flight = self.kafka = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def await_start(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        found = re.search(r"Flight at (\S+)", line)
        assert found is not None, self.end(signal.SIGKILL)
        self.flight = found[1]
        kafka = re.search(r"Kafka at ([^\s,]+)", line)
        self.kafka = kafka[1] if kafka else ""

    def await_end(self) -> tuple[int, str]:
        """Returns the exit code and standard error."""
        _, told = self._process.communicate(timeout=_SECONDS)
        return self._process.wait(), told.decode()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, how: signal.Signals) -> tuple[int, str]:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(how)
        return self.await_end()


@contextlib.contextmanager
def standing(root: Path, *options: str, kafka: str = "") -> Iterator[Standing]:
    """Yields a broker that serves, and ends it after the block."""
    broker = Standing(root, *options, kafka=kafka)
    try:
        broker.await_start()
        yield broker
    finally:
        if broker.is_running:
            broker.end(signal.SIGTERM)
