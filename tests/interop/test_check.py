"""`sparklog check` on real brokers: ours, one of ours that loses records, and a real Kafka."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from sparklog.bench import jars
from sparklog.bench.kafkaprocess import KafkaProcess
from sparklog.check.analysis import analyse
from sparklog.check.driving import Workload, drive
from sparklog.cli import app
from sparklog.cli.shared import ExitCode
from tests.support.kafkas import broker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIGHT = ("--seconds", "4", "--rate", "500")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a broker of ours."""
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
    assert "clean: nothing was lost, doubled, moved or reordered" in again.stdout


def test_a_log_that_loses_records_is_found_out(address: str) -> None:
    """Records that somebody deletes meanwhile are what a broker would have lost."""
    admin = AdminClient({"bootstrap.servers": address})
    ended = threading.Event()

    def lose() -> None:
        deadline = time.monotonic() + 30.0
        while not ended.is_set() and time.monotonic() < deadline:
            time.sleep(0.5)
            names = [name for name in admin.list_topics().topics if name.startswith("doomed-")]
            places = [TopicPartition(name, 0, 50) for name in names]
            if places and all(
                each.exception(10.0) is None for each in admin.delete_records(places).values()
            ):
                time.sleep(1.0)
                ended.set()

    losing = threading.Thread(target=lose)
    losing.start()
    workload = Workload(
        bootstrap=address,
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


def test_nobody_there_is_told_at_once() -> None:
    """A closed port is one line within a second."""
    began = time.monotonic()
    result = CliRunner().invoke(app, ["check", "--bootstrap", "127.0.0.1:1"])
    assert time.monotonic() - began < 1.0
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.startswith(
        "sparklog: no answer from the broker at 127.0.0.1:1: Connection"
    )


def test_another_port_is_told_at_once(tmp_path: Path) -> None:
    """The Flight port of a broker is none of Kafka's, and that is found out in time."""
    with broker(tmp_path) as agent:
        began = time.monotonic()
        result = CliRunner().invoke(app, ["check", "--bootstrap", agent.address])
        assert time.monotonic() - began < 4.0
    assert result.exit_code == ExitCode.FAILED
    assert "not its Kafka port" in result.stderr or "as Kafka does" in result.stderr


@pytest.mark.soak
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
