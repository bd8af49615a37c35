"""A real Kafka broker.

One node, controller and broker at once, on loopback and free ports, with the settings and the heap
that Kafka's own scripts give it. As Kafka does, it acks before anything is flushed to the disk.
"""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

_JVM_FLAGS = (
    "-server",
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-Djava.awt.headless=true",
)
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.1


def java() -> str:
    """The program that runs Java's."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


class KafkaProcess:
    """A broker with its data in `folder`, which must not exist; serving when `start` returns.

    `settings` go before those that it has otherwise. Raises RuntimeError where it does not come up.
    """

    def __init__(
        self, jars: Sequence[str], folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = dict(settings or {})
        self._java = [java(), *_JVM_FLAGS, "-cp", os.pathsep.join(jars)]
        self._folder = folder
        self._config = folder / "server.properties"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        self._port, controller_port = _free_ports(2)
        self._folder.mkdir(parents=True)
        self._config.write_text(
            _properties(self._folder / "data", self._port, controller_port, self._settings),
            "utf-8",
        )
        format_storage = ("kafka.tools.StorageTool", "format", "--config", str(self._config))
        with self._starting() as output:
            self._run(output, *format_storage, "--cluster-id", _cluster_id()).wait(_START_SECONDS)
            self._serve(output)
        return self

    def restart(self) -> None:
        """Stops it in good order, and starts it on the same data at the same address."""
        self.stop()
        with self._starting() as output:
            self._serve(output)

    @contextmanager
    def _starting(self) -> Iterator[IO[bytes]]:
        """Yields the file of its output; an error ends with the last line of it."""
        path = self._folder / "output.log"
        with path.open("wb") as output:
            try:
                yield output
            except (OSError, subprocess.TimeoutExpired, RuntimeError) as error:
                self.stop()
                lines = path.read_text("utf-8", "replace").strip().splitlines() or [str(error)]
                raise RuntimeError(f"Kafka did not start: {lines[-1]}") from error
            except BaseException:
                self.stop()
                raise

    def _serve(self, output: IO[bytes]) -> None:
        self._process = self._run(output, "kafka.Kafka", str(self._config))
        self._await(self._port)
        self.address = f"127.0.0.1:{self._port}"

    def _run(self, output: IO[bytes], *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._java, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _await(self, port: int) -> None:
        """Returns when the broker answers at its port."""
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as asking:
                if asking.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(_LOOK_SECONDS)
        raise RuntimeError(f"exit {self._process.poll()}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stop()


def _properties(data: Path, port: int, controller_port: int, more: Mapping[str, str]) -> str:
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        **more,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _cluster_id() -> str:
    """128 random bits as Kafka writes them; a first '-' would be taken for an option."""
    return "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
