"""Runs the long tests, one mode at a time: `python -m tools.soak --minutes 240`.

This is `make soak`, to be run overnight. Open-ended modes, such as simulation seeds and kills at
random moments, share the minutes that the others leave; each runs for at least one. At the end, a
table shows what the modes ran and found; it is also written to build/soak/summary.txt, with each
mode's output next to it. The exit code is 1 if a mode has found something.

`--list` shows the modes, `--only kills clusters` selects some. With pytest arguments instead of
modes, the selected long tests run: `python -m tools.soak tests/contract/test_year.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "build" / "soak"
_PYTEST: Final = ("-m", "pytest", "--timeout=0", "-o", "faulthandler_timeout=0")
_NO_TESTS: Final = 5
_JOBS: Final = str(os.cpu_count() or 1)
_FOUND: Final = re.compile(r"^(?:FAILED|ERROR|seed) .*$", re.MULTILINE)
_COUNTED: Final = re.compile(
    r"^(?:=+ )?(.*(?:passed|failed|violations|killed).*?)(?: =+)?$", re.MULTILINE
)
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A program that searches for faults for the given time, or until it is done."""

    name: str
    about: str
    command: Sequence[str]
    """Arguments of Python; `{minutes}` is replaced by the mode's minutes."""
    share: float = 0.0
    """Share of the minutes left for open-ended modes; 0 if the mode ends on its own."""
    minutes: float = 0.0
    """Duration of a mode that ends on its own."""
    split: int = 1
    """Number of tests that divide the mode's minutes among them."""
    environment: Mapping[str, str] | None = None


def _marked(mode: str, *more: str) -> Sequence[str]:
    return (*_PYTEST, "-m", f'soak(mode="{mode}")', *more)


_TIMED_TESTS_OF_KILLS: Final = 6
"""Tests of the mode that take SPARKLOG_SOAK_MINUTES each; the others count kills."""
MODES: Final = (
    Mode(
        name="seeds",
        about="new seeds of the simulation, with one broker",
        command=("-m", "tests.simulation", "--new", "--minutes={minutes}", "--jobs", _JOBS),
        share=0.15,
    ),
    Mode(
        name="clusters",
        about="new seeds of the simulation, with several brokers",
        command=(
            *("-m", "tests.simulation", "--new", "--cluster"),
            *("--minutes={minutes}", "--jobs", _JOBS),
        ),
        share=0.25,
    ),
    Mode(
        name="kills",
        about="kill -9 of brokers, drivers and members at random moments, with clients at work",
        command=_marked("kills"),
        share=0.35,
        split=_TIMED_TESTS_OF_KILLS,
    ),
    Mode(
        name="mutations",
        about="mutations of the code that the tests must detect, a new sample each day",
        command=(
            *("-m", "tests.mutation", "--count", "10000", "--minutes={minutes}"),
            *("--seed", time.strftime("%Y%m%d"), "--at-least", "0.8", "--jobs", _JOBS),
        ),
        share=0.25,
    ),
    Mode(
        name="planted",
        about="planted bugs that the simulation must detect",
        command=_marked("planted", "--numprocesses", _JOBS),
        minutes=5,
    ),
    Mode(
        name="examples",
        about="the property tests, with ten times as many examples",
        command=(*_PYTEST, "-m", "hypothesis", "--numprocesses", _JOBS),
        minutes=10,
        environment={"SPARKLOG_EXAMPLES": "10"},
    ),
    Mode(
        name="models",
        about="the models of leadership and of the write-ahead log, with millions of states",
        command=_marked("models", "--numprocesses", _JOBS),
        minutes=15,
    ),
    Mode(
        name="jobs",
        about="each Spark job killed twenty times, and programs in the documentation",
        command=_marked("jobs"),
        minutes=35,
    ),
    Mode(
        name="clients",
        about="a real Kafka, its Java and Go clients, MirrorMaker, Streams, and an installed wheel",
        command=_marked("clients"),
        minutes=25,
    ),
    Mode(
        name="suites",
        about="the test suites of Kafka's clients, against a real Kafka and against our broker",
        command=_marked("suites"),
        minutes=30,
    ),
    Mode(
        name="stores",
        about="the contract of object stores on the servers that are installed, and a kill on each",
        command=_marked("stores"),
        minutes=10,
    ),
    Mode(
        name="limits",
        about="hostile clients on a quiet machine, memory bounds, and a year of publishing",
        command=_marked("limits"),
        minutes=30,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a mode: its exit code and output."""

    mode: Mode
    seconds: float
    code: int
    text: str

    @property
    def found(self) -> list[str]:
        return _FOUND.findall(self.text)

    @property
    def is_good(self) -> bool:
        return self.code in (0, _NO_TESTS)

    def lines(self) -> list[str]:
        """Returns a row of the table, and a line per finding."""
        counted = _COUNTED.findall(self.text)
        verdict = "ok" if self.is_good else "FAILED"
        row = f"{self.mode.name:10} {self.seconds / 60:7.1f} min  {verdict:7}"
        rows = [f"{row} {counted[-1] if counted else f'exit code {self.code}'}"]
        found = self.found
        rows += [f"    {each[:300]}" for each in found[:_SHOWN]]
        if len(found) > _SHOWN:
            rows.append(f"    and {len(found) - _SHOWN} more: build/soak/{self.mode.name}.log")
        return rows


def minutes_of(modes: Sequence[Mode], minutes: float) -> dict[str, float]:
    """Distributes `minutes` over the modes."""
    left = max(minutes - sum(each.minutes for each in modes), 0.0)
    shares = sum(each.share for each in modes)
    return {
        each.name: max(left * each.share / shares, 1.0) if each.share else each.minutes
        for each in modes
    }


def run(mode: Mode, minutes: float) -> Outcome:
    """Runs a mode until it ends."""
    each = f"{minutes / mode.split:.2f}"
    command = [sys.executable, *(word.replace("{minutes}", each) for word in mode.command)]
    environment = {**os.environ, "SPARKLOG_SOAK_MINUTES": each, **(mode.environment or {})}
    log = RESULTS / f"{mode.name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output,
        ).returncode  # fmt: skip
    return Outcome(
        mode=mode,
        seconds=time.monotonic() - began,
        code=code,
        text=log.read_text(errors="replace"),
    )


def main() -> int:
    """Runs the selected modes. Returns exit code 1 if one has found something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=240.0, help="for all modes; default: 240")
    names = [each.name for each in MODES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="MODE", default=names)
    parser.add_argument("--list", action="store_true", help="show the modes without running them")
    given, of_pytest = parser.parse_known_args()
    modes = [each for each in MODES if each.name in given.only]
    if of_pytest:
        about = "the selected long tests"
        command = (*_PYTEST, "-m", "soak", *of_pytest)
        modes = [Mode(name="named", about=about, command=command, share=1.0)]
    minutes = minutes_of(modes, given.minutes)
    if given.list:
        for mode in modes:
            print(f"{mode.name:10} {minutes[mode.name]:5.0f} min  {mode.about}")
        return 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    is_good = True
    for mode in modes:
        print(f"{mode.name}: {mode.about}, about {minutes[mode.name]:.0f} min", flush=True)
        outcome = run(mode, minutes[mode.name])
        is_good = is_good and outcome.is_good
        lines += outcome.lines()
        print("\n".join(outcome.lines()), flush=True)
    summary = "\n".join(lines)
    (RESULTS / "summary.txt").write_text(f"{summary}\n")
    print(
        f"\n{'found nothing' if is_good else 'FOUND FAULTS'}; {RESULTS / 'summary.txt'}\n{summary}"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
