"""`sparklog check` on real brokers: ours, one of ours that loses records, and a real Kafka."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from typer.testing import CliRunner

import sparklog
from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog import errors
from sparklog.broker.logging import configure
from sparklog.check.analysis import analyse
from sparklog.check.driving import Workload, drive
from sparklog.cli import app
from sparklog.client.log import Log
from sparklog.settings import LogSettings
from sparklog.terminal.commands import ExitCode
from tests.support.kafkas import broker
from tests.support.logs import logging_restored
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIGHT = ("--seconds", "4", "--rate", "500")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Opens a log on a broker of ours, whose log lines are not among a command's output."""
    with logging_restored():
        configure(LogSettings(level="error"))
        with broker(tmp_path) as agent:
            yield agent.kafka_address


def test_ours_is_clean(address: str, tmp_path: Path) -> None:
    """Producers, consumers and groups see a log; the topic is gone then, the history is kept."""
    kept = tmp_path / "history.npz"
    arguments = ("check", "--bootstrap", address, *LIGHT, "--groups", "2", "--history", str(kept))
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == ExitCode.OK, result.output
    found = msgspec.json.decode(result.stdout)
    assert (found["verdict"], found["findings"], found["problems"]) == ("clean", [], [])
    assert found["acked"] == found["sent"] > 500
    assert found["commits"] > 0
    assert found["topic"] not in AdminClient({"bootstrap.servers": address}).list_topics().topics
    again = CliRunner().invoke(app, ["check", "--replay", str(kept)])
    assert again.exit_code == ExitCode.OK
    assert "clean: nothing was lost, duplicated, moved or reordered" in again.stdout


def test_a_log_that_loses_records_is_found_out(tmp_path: Path) -> None:
    """Records that are deleted meanwhile are reported as a broker's loss would be."""
    ended = threading.Event()

    def lose(log: Log) -> None:
        deadline = time.monotonic() + 30.0
        while not ended.is_set() and time.monotonic() < deadline:
            time.sleep(0.5)
            with contextlib.suppress(errors.OffsetOutOfRange):
                for name in log.topics():
                    log.delete_records(name, {0: 50})
                    time.sleep(1.0)
                    ended.set()

    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        losing = threading.Thread(target=lose, args=(log,))
        losing.start()
        workload = Workload(
            bootstrap=agent.kafka_address,
            seconds=60.0,
            rate=500.0,
            partitions=1,
            topic_prefix="doomed",
            patience_seconds=5.0,
        )
        outcome = drive(workload, lambda *_: None, ended)
        losing.join()
    kinds = {each.kind for each in analyse(outcome.history)}
    assert "start-moved" in kinds
    assert "lost-write" in kinds


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupted_run_leaves_no_topic_and_no_group(address: str, keep: bool) -> None:
    """Ctrl-C ends the check within seconds and reports the fate of its topic."""
    command = [sys.executable, "-m", "sparklog", "check", "--bootstrap", address, "--seconds", "99"]
    admin = AdminClient({"bootstrap.servers": address})

    def topics() -> list[str]:
        return [name for name in admin.list_topics().topics if name.startswith("sparklog-check-")]

    def groups() -> list[str]:
        found = admin.list_consumer_groups().result(10.0)
        return [
            each.group_id for each in found.valid if each.group_id.startswith("sparklog-check-")
        ]

    process = subprocess.Popen(
        [*command, *(["--keep-topic"] if keep else [])], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: bool(topics()), "the topic is there")
        (topic,) = topics()
        (described,) = admin.describe_configs(
            [ConfigResource(ConfigResource.Type.TOPIC, topic)]
        ).values()
        retention = described.result(10.0)["retention.ms"]
        assert (retention.value, retention.is_default) == ("-1", False)
        wait_until(lambda: bool(groups()), "its group is there")
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20.0)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED
    assert told == f"sparklog: interrupted; topic {topic} is {'kept' if keep else 'deleted'}\n"
    assert topics() == ([topic] if keep else [])
    assert groups() == ([f"{topic}-0"] if keep else [])


def test_an_interrupted_run_does_not_wait_for_a_broker_that_is_gone(tmp_path: Path) -> None:
    """If the broker does not answer, Ctrl-C takes some seconds and names the topic that may
    remain.
    """
    with broker(tmp_path) as agent:
        address = agent.kafka_address
        command = [sys.executable, "-m", "sparklog", "check", "--bootstrap", address]
        process = subprocess.Popen([*command, "--seconds", "99"], stderr=subprocess.PIPE, text=True)
        admin = AdminClient({"bootstrap.servers": address})
        wait_until(
            lambda: any(name.startswith("sparklog-check-") for name in admin.list_topics().topics),
            "the topic is there",
        )
        time.sleep(1.0)
    try:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20.0)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED
    assert "may still exist; delete it yourself" in told
    assert "Traceback" not in told


def test_nobody_there_is_told_at_once() -> None:
    """A closed port is one line, and not waited for."""
    began = time.monotonic()
    result = CliRunner().invoke(app, ["check", "--bootstrap", "127.0.0.1:1"])
    assert time.monotonic() - began < 10.0
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith("sparklog: No broker answers at 127.0.0.1:1: Connection")


def test_another_port_is_told_at_once(tmp_path: Path) -> None:
    """The Flight port of a broker is none of Kafka's, and that is found out in time."""
    with broker(tmp_path) as agent:
        began = time.monotonic()
        result = CliRunner().invoke(app, ["check", "--bootstrap", agent.address])
        assert time.monotonic() - began < 20.0
    assert result.exit_code == ExitCode.FAILED
    assert "not its Kafka port" in result.stderr or "not answer like Kafka" in result.stderr


@pytest.mark.soak(mode="clients")
def test_a_real_kafka_is_clean(tmp_path: Path) -> None:
    """The checker finds nothing in what the real one does."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    with KafkaProcess(found.broker, tmp_path / "kafka") as kafka:
        arguments = ("check", "--bootstrap", kafka.address, "--seconds", "20", "--groups", "2")
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == ExitCode.OK, result.output
        assert json.loads(result.stdout)["acked"] > 10_000
