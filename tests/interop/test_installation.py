"""Installs the package in environments of its own, as README describes.

Left out of ordinary runs, because it downloads some hundred megabytes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer

from tests.support import containers

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.slow]

PROJECT = Path(__file__).parents[2]
INSTALL_SECONDS = 600.0
COMMAND_SECONDS = 60.0
HEAVY = ("hypothesis", "llvmlite", "numba", "pandas", "pyspark")
SOURCE_ONLY = ("benchmarks", "examples", "jobs", "tests")

EMBEDDED = """
import sparklog
with sparklog.connect("./embedded") as log:
    log.create_topic("t", partitions=2)
    with log.producer() as producer:
        producer.send("t", b"hello").result()
    print(log.read("t").num_rows)
"""


class Installed:
    """sparklog in a new environment, and a folder to use it in."""

    def __init__(self, folder: Path, extras: str = "") -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        self.packages = self.bin.parent / "lib" / f"python3.{sys.version_info.minor}"
        self.run("python", "-m", "pip", "install", "--quiet", f"{PROJECT}{extras}")

    @property
    def environment(self) -> dict[str, str]:
        """The test's own sources must not be found."""
        hidden = {"PYTHONPATH", "SPARKLOG_ROOT", "SPARKLOG_BOOTSTRAP", "VIRTUAL_ENV"}
        return {name: value for name, value in os.environ.items() if name not in hidden}

    def run(
        self, command: str, *arguments: str, check: bool = True, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command), *arguments],
            cwd=self.folder,
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS if "pip" in arguments else COMMAND_SECONDS,
            check=check,
        )

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.bin / "sparklog"), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def has(self, package: str) -> bool:
        return (self.packages / "site-packages" / package).exists()


@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_base_install_is_a_client(tmp_path: Path) -> None:
    """A base install has the command line and embedded brokers, and names the extra for more."""
    installed = Installed(tmp_path)
    assert [name for name in HEAVY if installed.has(name)] == []
    assert [name for name in SOURCE_ONLY if installed.has(name)] == []
    assert installed.run("python", "-m", "pip", "check").stdout == "No broken requirements found.\n"
    assert installed.run("sparklog", "--help").stderr == ""
    assert installed.run("python", "-c", EMBEDDED).stdout == "1\n"
    installed.run("sparklog", "produce", "t", "--root", "./embedded", text="from the pipe\n")
    consumed = installed.run("sparklog", "consume", "t", "--root", "./embedded")
    assert sorted(consumed.stdout.split("\n")) == ["", "from the pipe", "hello"]
    refused = installed.run("sparklog", "broker", "--root", "./root", check=False)
    assert refused.returncode == 1
    assert "pip install 'sparklog[broker]'" in refused.stderr


@pytest.mark.timeout(2 * INSTALL_SECONDS)
def test_broker_install_serves_kafka(tmp_path: Path) -> None:
    """With the extra of the image, a broker serves Kafka's and its own clients."""
    assert containers.pip_line() == ["pip", "install", "--no-cache-dir", "/src[broker]"]
    installed = Installed(tmp_path, f"[{containers.extra()}]")
    assert installed.run("python", "-m", "pip", "check").stdout == "No broken requirements found.\n"
    ports = ["--kafka", "127.0.0.1:0", "--flight", "127.0.0.1:0"]
    broker = installed.start(["broker", "--root", "./root", *ports])
    try:
        assert broker.stdout is not None
        served = broker.stdout.readline()
        kafka = served.partition("Kafka at ")[2].partition(",")[0]
        assert kafka, served
        producer = KafkaProducer(bootstrap_servers=kafka)
        producer.send("t", b"hello").get(COMMAND_SECONDS)
        producer.close()
        consumer = KafkaConsumer(
            "t", bootstrap_servers=kafka, auto_offset_reset="earliest", group_id=None
        )
        assert next(consumer).value == b"hello"
        consumer.close()
        assert installed.run("sparklog", "consume", "t", "--root", "./root").stdout == "hello\n"
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(COMMAND_SECONDS) == 0
    finally:
        broker.kill()
        broker.wait()
        with suppress(OSError):
            broker.communicate()
    assert sorted(path.name for path in installed.folder.iterdir()) == ["root"]
