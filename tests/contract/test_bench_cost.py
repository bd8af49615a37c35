"""The measure `cost` of `sparklog bench`, in short: its figures, and the store of large rates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparklog import bench
from sparklog.bench import cost
from sparklog.bench.report import BenchOptions, Measurement, Workload
from sparklog.bench.workload import SpillingStore
from sparklog.clock import ManualClock
from sparklog.prices import SECONDS_PER_MONTH
from sparklog.storage.objects import ObjectMissing

TINY = Workload(topics=2, partitions=1, records_per_second=400, record_bytes=2_000, brokers=2)


def test_a_workload_is_priced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two brokers are billed together, for each purpose, and a large rate by the byte too."""
    monkeypatch.setattr(cost, "DELAY_SECONDS", 0.001)
    monkeypatch.setattr(cost, "_WARM_SECONDS", 0.2)
    monkeypatch.setattr(cost, "_LARGE_SECONDS", 1)
    options = BenchOptions(
        folder=tmp_path,
        seconds=1.2,
        workload=TINY,
        settings={"requests.profile": "fast", "prices.store": "gcs-standard"},
    )
    bill, ack, lag, puts, written = cost.cost(options)
    what = "2 × 1 partitions, 400 records/s each of 2,000 bytes, 2 brokers"
    assert bill.name == f"{what}: requests, per month"
    dollars = float(bill.value.partition(" ")[0].replace(",", ""))
    puts_per_second = float(bill.detail.partition(" puts/s")[0])
    assert dollars > puts_per_second * 5 / 1e6 * SECONDS_PER_MONTH * 0.9 > 0  # with two digits
    assert "log " in bill.detail
    assert "p99" in ack.value
    assert 0 < float(lag.value.split()[-2]) < 30
    assert float(puts.value.replace(",", "")) > 10
    assert float(written.value) >= 0.9  # all but the last records are in the log
    assert {each.met for each in (bill, ack, lag, puts, written)} == {None}
    assert list(tmp_path.iterdir()) == []  # its files have no names


def test_a_full_disk_is_noticed_before(tmp_path: Path) -> None:
    """A rate whose records do not fit below --folder is not run."""
    huge = Workload(topics=1_000, records_per_second=1_000_000, record_bytes=1 << 20)
    (found,) = cost.cost(BenchOptions(folder=tmp_path, workload=huge))
    assert found.value == "skipped"
    assert "GiB" in found.detail


def open_files() -> int:
    """The open files of this process; 0 where the system does not show them."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def test_large_objects_are_in_files(tmp_path: Path) -> None:
    """They need no open file each, and are read as they were put."""
    store = SpillingStore(ManualClock(), tmp_path)
    before = open_files()
    content = {f"t/{number}": os.urandom(100_000 * (number % 2)) + b"end" for number in range(20)}
    for path, data in content.items():
        store.put_new(path, [data[:7], data[7:]])
    assert {path: store.get(path).to_pybytes() for path in content} == content
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before
    store.delete(content)
    with pytest.raises(ObjectMissing):
        store.get("t/1")


def test_the_command_line_makes_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that are not given have the values of the first documented case."""
    seen: list[BenchOptions] = []

    def measure(options: BenchOptions) -> list[Measurement]:
        seen.append(options)
        return []

    monkeypatch.setattr(bench, "MEASURES", {"cost": measure, "disk": measure})

    def run(*arguments: str) -> str:
        found = CliRunner().invoke(bench.app, [*arguments], env={"COLUMNS": "300"})
        return found.stderr if found.exit_code else ""

    assert (
        run("cost", "--topics", "20", "--rate", "0.5", "--setting", "prices.store=azure-blob-hot")
        == ""
    )
    assert seen[-1].workload == Workload(topics=20, records_per_second=0.5)
    assert seen[-1].settings == {"prices.store": "azure-blob-hot"}
    assert run("cost") == ""
    assert seen[-1].workload is None
    assert "for the measure `cost` alone" in run("disk", "--topics", "2")
    assert "write KEY=VALUE" in run("cost", "--setting", "requests.profile")
    assert len(seen) == 2
