"""Standing brokers as real processes: two on one root, restarts, and programs that come between."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog

SECONDS = 30.0


class Standing:
    """`sparklog broker` on a root, at any free address."""

    def __init__(self, root: Path, *options: str, kafka: str = "") -> None:
        command = [sys.executable, "-m", "sparklog", "broker", "--root", str(root)]
        command += ["--flight", "127.0.0.1:0", "--kafka", kafka, *options]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SPARKLOG_")}
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.flight = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_start(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        found = re.search(r"Flight at (\S+)", line)
        assert found is not None, self.end(signal.SIGKILL)
        self.flight = found[1]

    def await_end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, told = self._process.communicate(timeout=SECONDS)
        return self._process.returncode, told.decode()

    def end(self, how: signal.Signals) -> tuple[int, str]:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(how)
        return self.await_end()


@contextlib.contextmanager
def standing(root: Path, *options: str, kafka: str = "") -> Iterator[Standing]:
    """One that serves, until the end."""
    broker = Standing(root, *options, kafka=kafka)
    try:
        broker.await_start()
        yield broker
    finally:
        if broker._process.poll() is None:
            broker.end(signal.SIGTERM)


def test_the_same_command_twice_is_refused(tmp_path: Path) -> None:
    """The second one ends with the process, host, address and age of the first, which goes on."""
    with standing(tmp_path) as first:
        code, told = Standing(tmp_path).await_end()
        assert code == 1
        assert f"pid {first.pid} on host {socket.gethostname()}" in told
        assert f"Flight at {first.flight}" in told
        assert re.search(r"started \d+ s ago", told)
        assert "--take-over" in told
        assert "Traceback" not in told
        with sparklog.connect(first.flight) as log:
            log.create_topic("t")
        assert first._process.poll() is None


def test_a_takeover_on_purpose_is_told_to_the_one_that_was_replaced(tmp_path: Path) -> None:
    """`--take-over` replaces a live broker, whose last words name the new one."""
    with standing(tmp_path) as first, standing(tmp_path, "--take-over") as second:
        code, told = first.await_end()
        assert code == 1
        assert "was replaced by broker 0 (standing, epoch 2)" in told
        assert f"pid {second.pid} on host {socket.gethostname()}, Flight at {second.flight}" in told
        assert "Traceback" not in told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_broker_starts_again_at_once(tmp_path: Path, how: signal.Signals) -> None:
    """On the machine of the one that has ended nobody waits to see whether it is alive."""
    spent = []
    for _ in range(3):
        broker = Standing(tmp_path)
        began = time.monotonic()
        broker.await_start()
        spent.append(time.monotonic() - began)
        broker.end(how)
    assert min(spent[1:]) < spent[0] + 1.0
