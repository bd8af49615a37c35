"""`sparklog.jobs.load`: records made up at a given rate."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog.jobs.load import Outcome, Shape, load, records
from sparklog.jobs.running import app_of

_APP = app_of(load, needs_spark=False)


def run(root: Path, *arguments: object) -> Result:
    """Runs the job in this process."""
    given = ["--root", str(root), "--topic=t", "--partitions=2"]
    return CliRunner().invoke(_APP, [*given, *map(str, arguments)])


def test_keys_follow_their_distribution() -> None:
    """With an exponent of 1 the first of 10 keys has 0.34 of the records, with 0 each has 0.1."""
    for zipf, share in ((1.0, 0.341), (0.0, 0.1)):
        made = records(Shape(sizes=(1, 1), keys=10, zipf=zipf), seed=1)
        counts = Counter(key for key, _ in itertools.islice(made, 50_000))
        assert len(counts) == 10
        assert counts[b"key-0"] / 50_000 == pytest.approx(share, abs=0.01)


def test_sizes_are_within_their_bounds() -> None:
    """Both bounds occur; the same seed makes the same records, and values differ."""
    shape = Shape(sizes=(10, 12), keys=0, zipf=0.0)
    made = list(itertools.islice(records(shape, seed=3), 1_000))
    assert {len(value) for _, value in made} == {10, 11, 12}
    assert {key for key, _ in made} == {None}
    assert len({value for _, value in made}) > 990
    assert list(itertools.islice(records(shape, seed=3), 1_000)) == made


def test_a_rate_is_kept(tmp_path: Path) -> None:
    """The outcome has all records that are in the topic, and the times of some acks."""
    result = run(tmp_path / "root", "--rate=500", "--seconds=1", "--size=10-20", "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert 400 <= outcome["records"] <= 500
    assert outcome["failed"] == 0
    assert 0 < outcome["ack_ms"]["p50"] <= outcome["ack_ms"]["p99"] <= outcome["ack_ms"]["max"]
    with sparklog.connect(tmp_path / "root") as log:
        sizes = [len(value) for value in log.read("t")["value"].to_pylist()]
    assert len(sizes) == outcome["records"]
    assert {*sizes} <= {*range(10, 21)}


def test_without_a_rate_the_broker_sets_it(tmp_path: Path) -> None:
    """The last line has the figures."""
    result = run(tmp_path / "root", "--seconds=0.3", "--keys=5")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("t: ")
    assert "records/s" in result.stdout
    assert "acks p50" in result.stdout


@pytest.mark.parametrize("size", ["ten", "20-10", "99999999999"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    """Before a root is made."""
    result = run(tmp_path / "root", f"--size={size}")
    assert result.exit_code == 2
    assert not (tmp_path / "root").exists()


def test_failed_records_are_named() -> None:
    """They are in the last line."""
    found = Outcome(records=3, bytes=30, failed=2, seconds=1.0, ack_ms={})
    assert str(found) == "3 records in 1.0 s (3 records/s, 0.0 MB/s); 2 failed"
