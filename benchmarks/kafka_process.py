"""A real Kafka broker, or a cluster of them.

Each node is both controller and broker, on free loopback ports, with the settings and the heap of
Kafka's own scripts. As usual with Kafka, it acks before anything is flushed to disk.
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
from typing import IO, NamedTuple, Self

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
    """Returns the path of the Java executable."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


class Node(NamedTuple):
    """The number and ports of a broker in its cluster."""

    number: int
    port: int
    controller_port: int

    @property
    def voter(self) -> str:
        """Its entry in the controller quorum."""
        return f"{self.number}@127.0.0.1:{self.controller_port}"


class KafkaProcess:
    """A broker with its data in `folder`, which must not exist; it serves once `start` returns.

    `settings` take precedence over the defaults. `start` raises RuntimeError on failure.
    """

    def __init__(
        self,
        jars: Sequence[str],
        folder: Path,
        settings: Mapping[str, str] | None = None,
        *,
        protocol: str = "PLAINTEXT",
        node: Node | None = None,
        cluster_id: str = "",
    ) -> None:
        """`node` and `cluster_id` are for brokers of a `KafkaCluster`."""
        self._protocol = protocol
        self._settings = dict(settings or {})
        self._java = [java(), *_JVM_FLAGS, "-cp", os.pathsep.join(jars)]
        self._folder = folder
        self._config = folder / "server.properties"
        self._node = node
        self._cluster_id = cluster_id or _new_cluster_id()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        self.launch()
        self.await_up()
        return self

    def restart(self) -> None:
        """Shuts it down cleanly, and starts it with the same data at the same address."""
        self.stop()
        self.start()

    def launch(self) -> None:
        """Starts the process, without waiting until it serves. The first time, formats its data."""
        with self._starting() as output:
            if not self._config.exists():
                self._format(output)
            self._process = self._run(output, "kafka.Kafka", str(self._config))

    def await_up(self) -> None:
        """Returns once the broker accepts connections."""
        with self._starting():
            assert self._process is not None
            assert self._node is not None
            deadline = time.monotonic() + _START_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                with socket.socket() as asking:
                    if asking.connect_ex(("127.0.0.1", self._node.port)) == 0:
                        return
                time.sleep(_LOOK_SECONDS)
            raise RuntimeError(f"exit {self._process.poll()}")

    def _format(self, output: IO[bytes]) -> None:
        node = self._node = self._node or _free_nodes(1)[0]
        self.address = f"127.0.0.1:{node.port}"
        settings = _settings(self._folder / "data", node, self._protocol) | self._settings
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._config.write_text("".join(lines), "utf-8")
        command = ("kafka.tools.StorageTool", "format", "--config", str(self._config))
        self._run(output, *command, "--cluster-id", self._cluster_id).wait(_START_SECONDS)

    @contextmanager
    def _starting(self) -> Iterator[IO[bytes]]:
        """Yields the file for its output, whose last line is added to an error."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "output.log"
        with path.open("ab") as output:
            try:
                yield output
            except (OSError, subprocess.TimeoutExpired, RuntimeError) as error:
                self.stop()
                lines = path.read_text("utf-8", "replace").strip().splitlines() or [str(error)]
                raise RuntimeError(f"Kafka did not start: {lines[-1]}") from error
            except BaseException:
                self.stop()
                raise

    def _run(self, output: IO[bytes], *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._java, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        """Ends it as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

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


class KafkaCluster:
    """Brokers 1 to `count`, each also a controller; all serve once the context is entered."""

    def __init__(
        self,
        jars: Sequence[str],
        folder: Path,
        settings: Mapping[str, str] | None = None,
        *,
        count: int = 3,
        advertised: Mapping[int, str] | None = None,
    ) -> None:
        """`advertised`: addresses by number, for clients, instead of the brokers' own."""
        nodes, cluster_id = _free_nodes(count), _new_cluster_id()
        common = {
            "controller.quorum.voters": ",".join(each.voter for each in nodes),
            "default.replication.factor": str(count),
            "min.insync.replicas": str(count // 2 + 1),
            "offsets.topic.replication.factor": str(count),
        }
        of_each = {
            number: {"advertised.listeners": f"PLAINTEXT://{address}"}
            for number, address in (advertised or {}).items()
        }
        self.brokers = {
            each.number: KafkaProcess(
                jars,
                folder / str(each.number),
                {**common, **of_each.get(each.number, {}), **(settings or {})},
                node=each,
                cluster_id=cluster_id,
            )
            for each in nodes
        }

    @property
    def address(self) -> str:
        return ",".join(each.address for each in self.brokers.values())

    def __enter__(self) -> Self:
        try:
            for each in self.brokers.values():  # none serves until most of them are running
                each.launch()
            for each in self.brokers.values():
                each.await_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills all brokers: in a clean shutdown, the last would wait in vain for the others."""
        for each in self.brokers.values():
            each.kill()


def _settings(data: Path, node: Node, protocol: str) -> dict[str, str]:
    broker, controller = node.port, node.controller_port
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.number),
        "controller.quorum.voters": node.voter,
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{protocol}://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"{protocol}://127.0.0.1:{broker}",
        "listener.security.protocol.map": f"{protocol}:{protocol},CONTROLLER:PLAINTEXT",
        "security.inter.broker.protocol": protocol,
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
    }


def _free_nodes(count: int) -> list[Node]:
    """Returns brokers 1 to `count`, on currently free ports."""
    ports = _free_ports(2 * count)
    return [Node(at + 1, ports[2 * at], ports[2 * at + 1]) for at in range(count)]


def _new_cluster_id() -> str:
    """Returns random bits in Kafka's encoding; a leading '-' would be taken for an option."""
    return "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
