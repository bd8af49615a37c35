"""`sparklog.jobs.replay`: a range of a topic's records becomes records of another."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog.client.log import Log
from sparklog.jobs import replay as jobs
from sparklog.jobs.running import app_of
from tests.support.jobs import KILLS, succeeded, survive

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]

_APP = app_of(jobs.replay)
_AT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
_COLUMNS = ["partition", "key", "value", "headers", "timestamp"]


def run(root: Path, *arguments: object) -> Result:
    """Runs the job in this process, with its session."""
    given = ["--root", str(root), "--from", "t", "--to", "u"]
    return CliRunner().invoke(_APP, [*given, *map(str, arguments)])


def succeed(root: Path, *arguments: object) -> str:
    """Returns the job's last line."""
    return succeeded(run(root, *arguments))


def rows(log: Log, topic: str) -> list[dict[str, Any]]:
    """The records of a topic, in the order of each partition."""
    table = log.read(topic).sort_by([("partition", "ascending"), ("offset", "ascending")])
    return table.select(_COLUMNS).to_pylist()


@pytest.fixture(name="log")
def _log(log: Log) -> Log:
    """Ten records in t, a second apart, and an empty topic u."""
    log.create_topic("u", partitions=2)
    with log.producer() as producer:
        for number in range(10):
            producer.send(
                "t",
                b"%d" % number,
                key=None if number % 3 else b"k",
                headers=[("n", b"%d" % number)],
                partition=number % 2,
                timestamp=_AT + timedelta(seconds=number),
            )
    return log


def test_all_of_a_topic(root: Path, log: Log) -> None:
    """All that a record has stays, and the order; a second run does nothing."""
    assert succeed(root).startswith("u: 10 records in ")
    assert rows(log, "u") == rows(log, "t")
    assert "nothing to write" in succeed(root)
    assert len(rows(log, "u")) == 10


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["--start=2026-01-02T03:04:08Z", "--end=2026-01-02T03:04:10Z"], [3, 4]),
        (['--start={"0": 4, "1": 5}'], [8]),
        (['--end={"0": 1, "1": 0}'], [0]),
        (["--start=latest"], []),
    ],
)
def test_a_range(root: Path, log: Log, arguments: list[str], numbers: list[int]) -> None:
    """It is one of times, or of offsets by partition."""
    succeed(root, *arguments)
    assert sorted(int(each["value"]) for each in rows(log, "u")) == numbers


def test_another_number_of_partitions(root: Path, log: Log) -> None:
    """Records are distributed by their keys, in a topic that is created."""
    result = CliRunner().invoke(
        _APP, ["--root", str(root), "--from=t", "--to=new", "--partitions=3"]
    )
    assert result.exit_code == 0, result.output
    found = rows(log, "new")
    assert len(found) == 10
    assert len({each["partition"] for each in found if each["key"]}) == 1


def test_times(root: Path, log: Log) -> None:
    """Shifted times keep their distances, and the last one is now; or all are of the arrival."""
    before = datetime.now(UTC)
    succeed(root, "--times=shift")
    found = sorted(each["timestamp"] for each in rows(log, "u"))
    assert before <= found[-1] <= datetime.now(UTC)
    assert found[-1] - found[0] == timedelta(seconds=9)
    succeed(root, "--times=now")
    newest = sorted(each["timestamp"] for each in rows(log, "u"))[10:]
    assert newest[0] >= before


def test_a_pace(root: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are written when their turns come; a run that is repeated writes nothing more."""
    monkeypatch.setattr(jobs, "_WINDOW_SECONDS", 0.5)
    began = time.monotonic()
    assert "it takes 2 seconds" in run(root, "--speed=4", "--times=shift").stderr
    assert 1.9 <= time.monotonic() - began <= 60
    found = rows(log, "u")
    assert [each["value"] for each in found] == [each["value"] for each in rows(log, "t")]
    assert "nothing to write" in succeed(root, "--speed=4", "--times=shift")
    with log.producer() as producer:
        producer.send("t", b"late", partition=0, timestamp=_AT + timedelta(minutes=1))
    assert succeed(root, "--speed=100", "--times=shift").startswith("u: 11 ")  # another run
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert "nothing to write" in succeed(root, "--speed=4", "--times=shift")  # it had its end


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--start=yesterday"], 1, "yesterday"),
        (['--start={"0": 4}'], 1, "each of the 2 partitions"),
        (['--start={"0": 9, "1": 0}'], 1, "partition 0 has the offsets"),
        (["--to=t"], 2, "into itself"),
        (["--to=missing"], 1, "pass --partitions N"),
    ],
)
def test_a_wrong_argument_is_refused(
    root: Path, log: Log, arguments: list[str], code: int, words: str
) -> None:
    """Before anything is written."""
    result = run(root, *arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not rows(log, "u")


def test_a_dry_run_writes_nothing(root: Path, log: Log) -> None:
    """It shows the number of records, and how they are distributed."""
    result = run(root, "--dry-run")
    assert "at most 10 records" in result.stderr
    assert "the same partitions" in result.stderr
    assert not rows(log, "u")


@pytest.mark.timeout(1_800)
@pytest.mark.spark_program
@pytest.mark.soak(mode="jobs")
def test_a_replay_that_is_killed_is_run_again(tmp_path: Path) -> None:
    """Whenever it is killed, each record is written once."""
    root = tmp_path / "root"
    with sparklog.connect(root) as log:
        log.create_topic("t", partitions=2)
        log.create_topic("u", partitions=2)
        with log.producer() as producer:
            for number in range(100 * KILLS):
                at = _AT + timedelta(milliseconds=10 * number)
                producer.send("t", b"%d" % number, partition=number % 2, timestamp=at)
        command = [sys.executable, "-m", "sparklog.jobs.replay", f"--root={root}"]
        command += ["--from=t", "--to=u", "--speed=0.2"]
        survive(command, kills=KILLS, pauses=(5.0, 10.0), seed=6)
        assert rows(log, "u") == rows(log, "t")
