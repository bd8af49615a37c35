"""Runs the tests: `python -m tools.run_tests [--changed] [PYTEST …]`, which is `make test`.

Tests that wait run concurrently with CPU-bound tests, in separate processes with their own workers:
see tests/groups.toml, which also sets a time budget for each folder. A full run ends with a list of
the slowest tests and the time per folder, and fails if a folder exceeds its budget by half.
build/tests receives the output of each group, and one JUnit file for all of them.

Arguments are those of pytest. A path runs in the group that it belongs to; a single file runs
without workers. `--changed` runs the tests closest to the changes since `main`, up to two minutes'
worth.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools import nearest_tests

ROOT: Final = Path(__file__).resolve().parents[1]
GROUPS: Final = ROOT / "tests" / "groups.toml"
RESULTS: Final = ROOT / "build" / "tests"
_JUNIT: Final = "junit.xml"
_SLOWEST: Final = 20
_MESSAGE: Final = 500
"""Maximum characters of a failure that are repeated at the end."""
_EXCESS: Final = 1.5
_NO_TESTS: Final = 5
"""Exit code of pytest if no test was selected."""
_LOOK_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 30.0
"""Between two lines of progress, if there is no terminal for a bar."""
_LOOP: Final = """
import time
began = time.perf_counter()
for number in range(5_000_000):
    pass
print(time.perf_counter() - began)
"""
_PERCENT: Final = re.compile(r"\[ *(\d+)%\]$", re.MULTILINE)
_DOTS: Final = re.compile(r"^([.sxXFE]+)(?: +\[ *\d+%\])?$", re.MULTILINE)
_VALUED: Final = ("-k", "-m", "-n", "-o", "-p", "-W")
"""Options of pytest whose value is the next argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Folders of tests that share workers."""

    name: str
    workers: int
    budget_seconds: Mapping[str, float]

    def selected(self, paths: Sequence[str]) -> list[str]:
        """Returns the parts of the paths in the group's folders; without paths, all folders."""
        if not paths:
            return [*self.budget_seconds]
        # A test id works as a path here.
        both = [(Path(path), Path(folder)) for path in paths for folder in self.budget_seconds]
        return [
            str(max(path, folder, key=lambda each: len(each.parts)))
            for path, folder in both
            if path.is_relative_to(folder) or folder.is_relative_to(path)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The groups, and the seconds that `_LOOP` takes on their budgets' reference machine."""

    groups: tuple[Group, ...]
    loop_seconds: float

    @classmethod
    def read(cls, path: Path = GROUPS) -> Self:
        found = tomllib.loads(path.read_text())
        loop_seconds = found.pop("loop_seconds")
        groups = tuple(Group(name=name, **group) for name, group in found.items())
        return cls(groups=groups, loop_seconds=loop_seconds)

    def seconds(self) -> dict[str, float]:
        """Returns the budget of each folder."""
        return {folder: at for group in self.groups for folder, at in group.budget_seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test that has run; `seconds` includes its setup and teardown."""

    name: str
    seconds: float
    outcome: str
    """passed, failed or skipped."""
    message: str = ""
    """The reason it failed."""

    @property
    def folder(self) -> str:
        return "/".join(self.name.split("/")[:2])

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def read_cases(junit: Path) -> list[Case]:
    """Returns the tests of a JUnit file, as pytest writes it."""
    found = []
    for each in ET.parse(junit).iter("testcase"):
        module, test = each.attrib["classname"].replace(".", "/"), each.attrib["name"]
        outcomes = {child.tag: child.get("message", "") for child in each}
        failed = [tag for tag in ("failure", "error") if tag in outcomes]
        found.append(
            Case(
                name=f"{module}.py::{test}" if module else test,
                seconds=float(each.attrib["time"]),
                outcome="failed" if failed else ("skipped" if "skipped" in outcomes else "passed"),
                message=outcomes[failed[0]] if failed else "",
            )
        )
    return found


def merge(junits: Iterable[Path], into: Path) -> None:
    """Merges the suites of several JUnit files into one file."""
    whole = ET.Element("testsuites", name="sparklog")
    for junit in junits:
        whole.extend(ET.parse(junit).getroot())
    ET.ElementTree(whole).write(into, encoding="utf-8", xml_declaration=True)


# ------------------------------------------------------------------------------ running


class Run:
    """A pytest process that runs tests of one group."""

    def __init__(self, group: Group, paths: Sequence[str], options: Sequence[str]) -> None:
        self.group = group
        self.log = RESULTS / f"{group.name}.log"
        self.junit = RESULTS / f"{group.name}.xml"
        self.junit.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *paths]
        command += ["--numprocesses", str(group.workers), "--dist", "loadgroup"]
        command += ["--junitxml", str(self.junit), *options]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_good(self) -> bool:
        return self._process.returncode in (0, _NO_TESTS)

    def progress(self) -> tuple[int, int]:
        """Returns the completed percentage, and the number of failed tests."""
        text = self.log.read_text(errors="replace")
        percents = _PERCENT.findall(text)
        failed = sum(len(re.findall("[FE]", dots)) for dots in _DOTS.findall(text))
        return int(percents[-1]) if percents else 0, failed

    def end(self) -> None:
        """Waits for the process, which receives Ctrl-C as this one does."""
        self._process.wait()


def watch(runs: Sequence[Run]) -> None:
    """Shows the progress of the runs until they are over."""
    console = Console(stderr=True)
    columns = ("{task.description}", "{task.percentage:>3.0f} %", "{task.fields[failed]} failed")
    texts = map(TextColumn, columns)
    with Progress(
        next(texts), BarColumn(), *texts, TimeElapsedColumn(), console=console,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        tasks = {run: bar.add_task(run.group.name, total=100, failed=0) for run in runs}
        said = time.monotonic()
        while not all(run.is_over for run in runs):
            time.sleep(_LOOK_SECONDS)
            for run, task in tasks.items():
                percent, failed = run.progress()
                bar.update(task, completed=percent, failed=failed)
            if not console.is_terminal and time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                print(", ".join(_line(run) for run in runs), flush=True)


def _line(run: Run) -> str:
    percent, failed = run.progress()
    return f"{run.group.name} {percent} %" + (f", {failed} failed" if failed else "")


def slowness(loop_seconds: float) -> float:
    """Returns the time of `_LOOP` here, on all cores at once, as a multiple of `loop_seconds`."""
    loops = [
        subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE, text=True)
        for _ in range(os.cpu_count() or 1)
    ]
    return max(float(loop.communicate()[0]) for loop in loops) / loop_seconds


def machine_cpu_seconds() -> float:
    """Returns the CPU time of all processes since the machine booted; 0 except on Linux."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------ judging


def excesses(
    cases: Iterable[Case], budget_seconds: Mapping[str, float], factor: float
) -> dict[str, float]:
    """Returns the folders that exceed 1.5 × their budget, with their seconds."""
    spent = _spent(cases, lambda case: case.folder)
    return {
        folder: seconds
        for folder, seconds in spent.items()
        if seconds > _EXCESS * factor * budget_seconds.get(folder, 0.0)
    }


def _spent(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, float]:
    """Returns the total seconds of the tests by key."""
    spent: defaultdict[str, float] = defaultdict(float)
    for case in cases:
        spent[key(case)] += case.seconds
    return dict(spent)


def report(cases: Sequence[Case], budget_seconds: Mapping[str, float], factor: float) -> str:
    """Returns a list of the slowest tests and a table of the folders."""
    lines = [f"the {_SLOWEST} slowest tests"]
    slowest = sorted(cases, key=lambda case: -case.seconds)[:_SLOWEST]
    lines += [f"{case.seconds:8.1f} s  {case.name}" for case in slowest]
    lines += ["", f"{'folder':20} {'tests':>6} {'seconds':>8} {'budget':>7}"]
    counts = Counter(case.folder for case in cases)
    spent = _spent(cases, lambda case: case.folder)
    for folder, seconds in sorted(spent.items()):
        budget = budget_seconds.get(folder, 0.0)
        lines.append(f"{folder:20} {counts[folder]:6} {seconds:8.0f} {budget:7.0f}")
    total = sum(budget_seconds.values())
    lines.append(f"{'all':20} {len(cases):6} {sum(spent.values()):8.0f} {total:7.0f}")
    lines.append(f"this machine takes {factor:.2f} × the time of the budgets' reference machine")
    return "\n".join(lines)


def counted(cases: Iterable[Case]) -> str:
    """Returns one line with the count of each outcome."""
    found = Counter(case.outcome for case in cases)
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"


# ------------------------------------------------------------------------------ the whole


def run_all(budgets: Budgets, options: Sequence[str], *, is_whole: bool) -> int:
    """Runs the groups concurrently. Returns the exit code."""
    began, cpu_before = time.monotonic(), machine_cpu_seconds()
    before = slowness(budgets.loop_seconds)
    spark, loops = _prepare("spark"), _prepare("loops")
    loops.wait()
    runs = [Run(group, group.selected([]), options) for group in budgets.groups]
    try:
        watch(runs)
    finally:
        for run in runs:
            run.end()
        spark.wait()
    for run in runs:
        print(run.log.read_text(errors="replace"))
    merge((run.junit for run in runs if run.junit.exists()), RESULTS / _JUNIT)
    cases = read_cases(RESULTS / _JUNIT)
    factor = max(1.0, before, slowness(budgets.loop_seconds))
    print(report(cases, budgets.seconds(), factor))
    over = excesses(cases, budgets.seconds(), factor) if is_whole else {}
    for folder, seconds in over.items():
        print(f"FAILED: {folder} took {seconds:.0f} s, more than 1.5 × its budget")
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    spent = machine_cpu_seconds() - cpu_before
    print(f"{minutes}:{seconds:02} min, {spent:.0f} s of CPU time; {RESULTS / _JUNIT}")
    for case in cases:
        if case.outcome == "failed":
            print(f"FAILED {case.name}: {case.message[:_MESSAGE]}")
    print(counted(cases))
    if not cases:
        return _NO_TESTS
    return 1 if over or not all(run.is_good for run in runs) else 0


def _prepare(what: str) -> subprocess.Popen[bytes]:
    """Starts the preparation of something that many test processes need."""
    command = [sys.executable, "-m", "tests.support.prepare", what]
    with (RESULTS / f"{what}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def run_paths(budgets: Budgets, paths: Sequence[str], options: Sequence[str]) -> int:
    """Runs the selected tests, one group at a time, and shows pytest's own output."""
    codes = []
    for group in budgets.groups:
        if selected := group.selected(paths):
            files = len({path.partition("::")[0] for path in selected if ".py" in path})
            workers = 0 if files == len(selected) == 1 else group.workers
            command = [sys.executable, "-m", "pytest", *selected, *options]
            command += ["--numprocesses", str(workers), "--dist", "loadgroup"]
            codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return max((code for code in codes if code != _NO_TESTS), default=_NO_TESTS)


def run_changed(options: Sequence[str]) -> int:
    """Runs the tests closest to the change."""
    junit = RESULTS / _JUNIT
    known = read_cases(junit) if junit.exists() else []
    file_seconds = _spent(known, lambda case: case.file)
    paths = nearest_tests.nearest(nearest_tests.changed(), file_seconds)
    print("\n".join(paths) or "no change has tests")
    if not paths:
        return 0
    command = [sys.executable, "-m", "pytest", *paths, *options]
    command += ["--numprocesses", str(os.cpu_count()), "--dist", "loadgroup"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def paths_of(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into paths of tests and other arguments."""
    paths: list[str] = []
    options: list[str] = []
    is_value = False
    for each in arguments:
        is_path = not is_value and (ROOT / each.partition("::")[0]).exists()
        (paths if is_path else options).append(each)
        is_value = each in _VALUED
    return [os.path.relpath(path.rstrip("/"), ROOT) for path in paths], options


def main(arguments: Sequence[str]) -> int:
    """Runs the selected tests, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--changed", action="store_true", help="test the changes since main")
    given, others = parser.parse_known_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    budgets = Budgets.read()
    paths, options = paths_of(others)
    if given.changed:
        return run_changed(options)
    if paths:
        return run_paths(budgets, paths, options)
    return run_all(budgets, options, is_whole=not options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
