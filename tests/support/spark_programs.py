"""Spark programs in separate processes: their sessions must not interfere with the tests'.

A program is a module in `tests.support`; its last line of output has its findings as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyspark

from sparklog.storage.metadata.liveness import read_heartbeats
from sparklog.storage.objects import LocalStore
from tests.support.spark_variables import spark_variables

_REPOSITORY = Path(__file__).parents[2]
_SPARK_HOME = Path(pyspark.__file__).parent
_OURS = ("SPARK_", "PYSPARK_", "SPARKLOG_")
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"

_SERVER_SETTINGS = {
    "spark.driver.memory": "768m",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
}
START_SECONDS = 120.0

_Process = subprocess.Popen[bytes]


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, without what its Spark session or its user set there."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return own | spark_variables() | more


@contextmanager
def _started(command: list[str], env: Mapping[str, str], output: IO[str]) -> Iterator[_Process]:
    """Yields the process, whose whole group is killed at the end of the block."""
    process = subprocess.Popen(
        command,
        cwd=_REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(program: str, *arguments: str, timeout_seconds: float) -> Any:
    """Runs a program and returns its findings; on failure, fails with all its output."""
    command = [sys.executable, "-m", f"tests.support.{program}", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        with _started(command, environment(), output) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_seconds)
            code = process.poll()
        output.seek(0)
        lines = output.read().splitlines()
    assert code == 0, f"{program} ended with {code}:\n" + "\n".join(lines)
    return json.loads(lines[-1])


@contextmanager
def connect_server(**more: str) -> Iterator[str]:
    """Yields the address of a Spark Connect server with two cores. `more`: its environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {**_SERVER_SETTINGS, "spark.connect.grpc.binding.port": str(port)}
    command = [str(_SPARK_HOME / "bin" / "spark-submit"), "--class", _SERVER]
    command += ["--master", "local[2]"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    with (
        tempfile.TemporaryDirectory() as warehouse,
        tempfile.TemporaryFile("w+") as output,
        _started(
            [*command, "--conf", f"spark.sql.warehouse.dir={warehouse}"],
            environment(**more),
            output,
        ) as process,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                output.seek(0)
                raise AssertionError(f"the server did not start:\n{output.read()}")
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def detached_brokers(root: Path) -> list[int]:
    """The processes of the root's live brokers, except this one."""
    found = read_heartbeats(LocalStore(root)).values()
    return [
        each.process.pid for each in found if not each.stopped and each.process.pid != os.getpid()
    ]


def end_detached_brokers(root: Path) -> None:
    """Terminates the brokers that a sink has started."""
    for pid in detached_brokers(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
