"""`sparklog.jobs.verify`: the records of a root are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner, Result

from sparklog.client.log import Log
from sparklog.jobs.running import app_of
from sparklog.jobs.verify import verify

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

_APP = app_of(verify)


def run(root: Path, *arguments: str) -> Result:
    """Runs the job in this process, with its session."""
    return CliRunner().invoke(_APP, [f"--root={root}", *arguments])


def send(log: Log, topic: str, count: int) -> None:
    """Sends records with keys of their own to both partitions of a topic."""
    with log.producer() as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, key=b"%d" % (number % 3), partition=number % 2)


def test_records_of_table_and_log(root: Path, log: Log) -> None:
    """All is well, with a broker that serves; then one file is lost, and is named."""
    send(log, "t", 100)
    log.flush_to_table("t")
    send(log, "t", 50)
    result = run(root, "--values")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["ok", "t", "2", "partitions,", "150", "records"]
    assert lines[-1].endswith("no fault")
    log.flush_to_table("t")
    lost = min((root / "topics" / "t").glob("partition=1/*.parquet"))
    lost.unlink()
    result = run(root, "t")
    assert result.exit_code == 3, result.output
    assert f"{lost.name} does not exist" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("1 fault")
    assert "Traceback" not in result.output


def test_offsets_of_a_delete(root: Path, log: Log) -> None:
    """They are not a fault, and the line of the topic says why they have no record."""
    send(log, "t", 20)
    log.flush_to_table("t")
    DeltaTable(root / "topics" / "t").delete("offset in (3, 4) and partition = 1")
    result = run(root, "t")
    assert result.exit_code == 0, result.output
    said = "18 records, 2 offsets without a record (removed by another engine)"
    assert said in result.stdout


def test_what_is_no_root_or_topic_is_refused(root: Path, log: Log, tmp_path: Path) -> None:
    """By name; nothing is made of a misspelt path."""
    result = run(root, "missing")
    assert result.exit_code == 1
    assert "'missing'" in result.stderr
    assert run(tmp_path / "none").exit_code == 1
    assert not (tmp_path / "none").exists()
    assert run(root, "--dry-run").stdout.splitlines()[-1].endswith("no fault")
    assert log.topics() == ["t"]
