"""The command `sparklog bench`: names, groups, the report and SIGTERM. Measures nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparklog import bench
from sparklog.bench.command import run_measures, select
from sparklog.bench.report import BenchOptions, Measurement

OPTIONS = BenchOptions(folder=Path())


def figures_of(*names: str) -> Callable[[BenchOptions], Iterator[Measurement]]:
    """A measure with one figure for each name."""
    return lambda _: (Measurement(name=name, value="1") for name in names)


@pytest.fixture(name="groups")
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"disk": figures_of("d"), "table-a": figures_of("a", "b"), "table-b": figures_of("c")}
    monkeypatch.setattr(bench, "MEASURES", found)


@pytest.mark.usefixtures("groups")
def test_a_folder_to_measure_exists(tmp_path: Path) -> None:
    """A misspelt folder is refused and not created: it would be on another disk."""
    found = CliRunner().invoke(bench.app, ["disk", "--folder", str(tmp_path / "none")])
    assert found.exit_code == 2
    assert "does not exist" in " ".join(found.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "tab", "table-", "tables"])
def test_names_of_no_measure(name: str) -> None:
    """A part of a name selects nothing."""
    with pytest.raises(KeyError):
        select({"table-a": figures_of("a")}, name)


def test_figures_are_printed_as_soon_as_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure is on standard error before the measure computes the next one."""
    seen: list[str] = []

    def measure(_: BenchOptions) -> Iterator[Measurement]:
        for name in "ab":
            yield Measurement(name=name, value="1")
            seen.append(capsys.readouterr().err.strip())

    run_measures({"m": measure}, ["m"], OPTIONS)
    assert seen == ["· a: 1", "· b: 1"]


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("names", "expected"), [([], "dabc"), (["table"], "abc"), (["table-b", "disk"], "cd")]
)
def test_command_line_names_measures_and_groups(names: list[str], expected: str) -> None:
    """The report has the figures of the named measures, in that order."""
    result = CliRunner().invoke(bench.app, [*names, "--markdown"])
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert "".join(row.split(" | ")[0][2:] for row in rows) == expected


@pytest.mark.usefixtures("groups")
def test_command_line_refuses_an_unknown_name() -> None:
    """An unknown measure is a usage error that lists the measures."""
    result = CliRunner().invoke(bench.app, ["disk", "dusk"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "There is no measure 'dusk': use one of disk, table-a, table-b." in result.stderr


def test_sigterm_unwinds_a_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM runs the measure's cleanup, which stops its broker processes."""
    ended = threading.Event()

    def measure(_: BenchOptions) -> Iterator[Measurement]:
        try:
            os.kill(os.getpid(), 15)
            time.sleep(30)
            yield Measurement(name="never", value="")
        finally:
            ended.set()

    monkeypatch.setattr(bench, "MEASURES", {"long": measure})
    result = CliRunner().invoke(bench.app, ["long"])
    assert result.exit_code == 128 + 15
    assert ended.is_set()
