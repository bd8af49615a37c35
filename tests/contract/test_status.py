"""`sparklog status` and the doctor's word on a root's broker, alive, stopped, killed and silent."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog import doctor, limits
from sparklog.cli import app
from sparklog.clock import SystemClock
from sparklog.doctor import CheckResult, CheckState
from sparklog.status import of_address, requiring_kafka
from sparklog.storage.objects import LocalStore
from sparklog.terminal.commands import ExitCode
from sparklog.version import VERSION
from tests.support.standing import standing
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's environment variables for logging."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


def status(*arguments: str) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, ["status", *arguments])


def printed_json(*arguments: str) -> dict[str, object]:
    """Returns the JSON that a command prints."""
    found: dict[str, object] = json.loads(status(*arguments, "--json").stdout)
    return found


def findings(root: Path) -> list[CheckResult]:
    """Returns the doctor's findings about the root's broker."""
    return list(doctor.check_broker(LocalStore(root), SystemClock()))


@pytest.fixture
def torn_table(tmp_path: Path) -> Iterator[Path]:
    """A commit in topic t that no reader can read."""
    path = tmp_path / "topics" / "t" / "_delta_log" / f"{1:020d}.json"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of settings for a write-ahead log in objects."""
    path = tmp_path_factory.mktemp("config") / "broker.toml"
    path.write_text('[writer]\nlog = "objects"\n')
    return str(path)


def test_a_live_broker_is_described(tmp_path: Path, config: str) -> None:
    """By root and by address alike: process, addresses, version, age, log and topics."""
    with standing(tmp_path, "--config", config, kafka="127.0.0.1:0") as broker:
        with sparklog.connect(broker.flight) as log:
            log.create_topic("t", partitions=3)
        for target in (("--root", str(tmp_path)), ("--bootstrap", broker.flight)):
            result = status(*target)
            assert result.exit_code == ExitCode.OK, result.output
            words = " ".join(result.stdout.split())
            assert f"pid {broker.pid} on host {socket.gethostname()}, started" in words
            assert f"Flight {broker.flight}" in words
            assert f"Kafka {broker.kafka}" in words
            assert "WAL objects: writer.log says so" in words
            assert "1, of 3 partitions" in words
            found = printed_json(*target)
            assert found["state"] == "served"
            assert found["broker"]["version"] == VERSION  # type: ignore[index]
            assert found["broker"]["kind"] == "standing"  # type: ignore[index]
        (finding,) = findings(tmp_path)
        assert finding.state is CheckState.OK
        assert f"pid {broker.pid} on host" in finding.found
        assert broker.flight in finding.found


def test_a_kafka_listener_may_be_required(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A served log without one, or whose listener does not answer, has exit code 3 then."""
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_SECONDS", 0.5)
    required = ("--root", str(tmp_path), "--require", "kafka")
    with standing(tmp_path, "--config", config):
        assert status("--root", str(tmp_path)).exit_code == ExitCode.OK
        result = status(*required)
        assert result.exit_code == ExitCode.UNHEALTHY
        assert "required     no broker that answers has a Kafka listener\n" in result.stdout
    assert status(*required).exit_code == ExitCode.NO_BROKER
    with standing(tmp_path, "--config", config, kafka="127.0.0.1:0") as broker:
        for target in (required, ("--bootstrap", broker.flight, "--require", "kafka")):
            result = status(*target)
            assert result.exit_code == ExitCode.OK, result.output
        answered = printed_json(*required)["answered"]
        assert [each["kafka"] for each in answered] == [broker.kafka]  # type: ignore[attr-defined]
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
            silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
            report = of_address(broker.flight)
            (answering,) = report.answered
            without = msgspec.structs.replace(
                answering, kafka=silent_address, kafka_listeners=silent_address
            )
            report = msgspec.structs.replace(report, answered=[without])
            assert silent_address in requiring_kafka(report).unmet
            report = msgspec.structs.replace(report, answered=[without, answering])
            assert not requiring_kafka(report).unmet


@pytest.mark.parametrize(
    ("how", "state"), [(signal.SIGTERM, "stopped"), (signal.SIGKILL, "died")], ids=str
)
def test_a_root_without_a_broker(
    tmp_path: Path, config: str, how: signal.Signals, state: str
) -> None:
    """The last broker is named, nothing is waited for, none is started, and the exit code is 4."""
    with standing(tmp_path, "--config", config) as broker:
        broker.end(how)
    result = status("--root", str(tmp_path))
    assert result.exit_code == ExitCode.NO_BROKER
    assert f"pid {broker.pid}" in result.stdout
    assert "WAL          objects\n" in result.stdout
    assert printed_json("--root", str(tmp_path))["state"] == state
    (finding,) = findings(tmp_path)
    assert finding.state is CheckState.OK
    assert "none runs" in finding.found


def test_a_folder_that_is_no_root(tmp_path: Path) -> None:
    """Nothing is made of it, and the exit code is that of every refusal."""
    result = status("--root", str(tmp_path / "no"))
    assert result.exit_code == ExitCode.FAILED
    assert not (tmp_path / "no").exists()
    (finding,) = findings(tmp_path)
    assert finding.state is CheckState.OK


def test_a_frozen_broker_is_alive_and_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live process that does not answer is a problem, with its reason."""
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_SECONDS", 0.3)
    with standing(tmp_path) as broker:
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            result = status("--root", str(tmp_path))
            assert result.exit_code == ExitCode.UNHEALTHY
            assert "does not answer requests from here" in result.stdout
            (finding,) = findings(tmp_path)
            assert finding.state is CheckState.WARN
        finally:
            os.kill(broker.pid, signal.SIGCONT)


def test_topics_that_are_held_back_are_named(tmp_path: Path, torn_table: Path) -> None:
    """A topic whose table cannot be written is reported with its reason, and the exit code is 3."""
    with standing(tmp_path) as broker, sparklog.connect(broker.flight) as log:
        log.create_topic("t", partitions=1)
        torn_table.write_bytes(b'{"add": {"path": "parti')
        with log.producer() as producer:
            producer.send("t", value=b"a").result(30)
        root = ("--root", str(tmp_path))
        wait_until(lambda: status(*root).exit_code == ExitCode.UNHEALTHY, "it is held back")
        assert torn_table.name in status(*root).stdout
        found = printed_json(*root)
        assert found["held_back"][0]["topic"] == "t"  # type: ignore[index]
        assert found["unpublished_bytes"] != 0
        (served, held) = findings(tmp_path)
        assert (served.state, held.state) == (CheckState.OK, CheckState.WARN)
        assert held.found.startswith("t: ")
        torn_table.unlink()
        wait_until(lambda: status(*root).exit_code == ExitCode.OK, "it is published again")
