"""A dedicated broker for a measure: a real process on a fresh root."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import sparklog
from sparklog.client.log import Log
from sparklog.clock import SystemClock
from sparklog.limits import DEAD_AFTER_SECONDS
from sparklog.options import storage_options
from sparklog.storage.metadata.liveness import find_live_broker
from sparklog.storage.objects import open_store


class BrokerProcess:
    """`sparklog broker` on `root`, a folder or a URI, serving when `start` returns.

    `settings` are environment variables, such as `SPARKLOG_PUBLISHER_INTERVAL_SECONDS`. `prefix`
    is a command, such as `taskset`, that executes the command after it in the same process.
    """

    def __init__(
        self,
        root: Path | str,
        settings: Mapping[str, str] | None = None,
        *,
        flight: str = "127.0.0.1:0",
        kafka: str = "",
        prefix: Sequence[str] = (),
    ) -> None:
        self.root = Path(root)
        self._uri = str(root)
        self._settings = dict(settings or {})
        self._doors = ["--flight", flight, "--kafka", kafka]
        self._prefix = list(prefix)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.kafka_address = ""

    def start(self) -> Self:
        command = [
            *self._prefix,
            sys.executable,
            "-m",
            "sparklog",
            "broker",
            "--root",
            self._uri,
        ]
        command += self._doors
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "SPARKLOG_LOG_LEVEL": "warning", **self._settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            return self._served()
        except BaseException:
            self.kill()
            raise

    def _served(self) -> Self:
        """Waits until the process is serving, and records its addresses."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = self._live()
        if not line or found is None:
            code = self._process.poll() if line else self._process.wait()
            raise RuntimeError(f"the broker did not start: exit {code}")
        self.address = found[1]
        match = re.search(rb"Kafka at ([^ ,]+)", line)
        self.kafka_address = match[1].decode() if match else ""
        return self

    def _live(self) -> tuple[int, str] | None:
        store = open_store(self._uri, storage_options(self._uri, environment=self._settings))
        return find_live_broker(store, clock=SystemClock(), dead_after_seconds=DEAD_AFTER_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def connect(self) -> Log:
        return sparklog.connect(self.address)

    def rss_bytes(self) -> int:
        """Current resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Ends the process as a power cut would, without a clean shutdown."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()


def free_address() -> str:
    """Returns a local address that several brokers can use in turn."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


class FreshRoot:
    """A folder for one measure, removed after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = Path(tempfile.mkdtemp(prefix="bench-", dir=self._folder))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
