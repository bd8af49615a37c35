"""Mutates storage, broker and sources, and shows which tests notice.

`python -m tests.mutation --count 120 --seed 1 --jobs 2` takes a sample. A seed gives every mutation
a rank of its own, so a change of the source leaves the rest of the sample as it was. Each job has a
copy of the tree. `--list` shows the sample and runs nothing; `--only PATH:LINE` runs all mutations
of a line, `--again RESULTS` those that survived an earlier run; `--rooms` restricts samples to some
folders. Mutations that no test can notice are listed in equivalent.toml with the
reason; they are shown and not counted. Exit code 1 where less than `--at-least` of the others are
killed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.equivalents import Equivalents
from tests.mutation.operators import Mutation, mutations_of
from tests.mutation.suites import ROOT, stages

_ROOMS = ("sparklog/storage", "sparklog/broker", "sparklog/sources")
_LEFT_OUT = {
    "sparklog/broker/logging.py",
    "sparklog/storage/objects/memory.py",  # the tests' own store
}
_COPIED = ("sparklog", "pyspark_sparklog", "tests", "conf", "docs", "jobs", "pyproject.toml")
_STAGE_SECONDS = 300.0
_times = count(time.time_ns() // 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A mutation, and the module that it is of."""

    module: str
    mutation: Mutation

    def __str__(self) -> str:
        found = self.mutation
        return (
            f"{self.module}:{found.line} {found.function} [{found.operator}]\n"
            f"    - {found.before}\n    + {found.after}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a mutation; `killer` is the test that noticed it, empty if none did."""

    site: Site
    killer: str
    seconds: float


def sample(size: int, seed: int, rooms: Sequence[str] = _ROOMS) -> list[Site]:
    """Mutations of `rooms` drawn by `seed`, of all operators in turn."""
    by_operator: defaultdict[str, list[tuple[bytes, Site]]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for site in all_sites(rooms):
        text = "\0".join((site.module, site.mutation.function, site.mutation.after))
        seen[text] += 1
        rank = blake2b(f"{seed}\0{seen[text]}\0{text}".encode()).digest()
        by_operator[site.mutation.operator].append((rank, site))
    for ranked in by_operator.values():
        ranked.sort(key=lambda each: each[0], reverse=True)
    found: list[Site] = []
    while len(found) < size and any(by_operator.values()):
        for _, ranked in sorted(by_operator.items()):
            if ranked and len(found) < size:
                found.append(ranked.pop()[1])
    return found


def all_sites(rooms: Sequence[str] = _ROOMS) -> Iterable[Site]:
    """Every mutation of every module of `rooms`."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            module = str(path.relative_to(ROOT))
            if module not in _LEFT_OUT:
                for mutation in _mutations_of(path):
                    yield Site(module=module, mutation=mutation)


@functools.cache
def _mutations_of(path: Path) -> Sequence[Mutation]:
    return list(mutations_of(path.read_bytes()))


# ------------------------------------------------------------------------------ running


class Tree:
    """A copy of the project in which one file at a time is mutated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy2(source, folder / name)

    def judge(self, site: Site) -> Verdict:
        """Runs the tests of the module on the mutated file, stage by stage."""
        began = time.monotonic()
        path = self.folder / site.module
        original = path.read_bytes()
        self._write(path, site.mutation.apply(original))
        try:
            for stage in stages(site.module):
                killer = self._run(stage)
                if killer:
                    return Verdict(site=site, killer=killer, seconds=time.monotonic() - began)
        finally:
            self._write(path, original)
        return Verdict(site=site, killer="", seconds=time.monotonic() - began)

    def check(self, modules: Iterable[str]) -> str:
        """Runs all stages on the unmutated source; tests that fail there can kill nothing."""
        every = {tuple(stage) for module in modules for stage in stages(module)}
        return next((killer for stage in sorted(every) if (killer := self._run(stage))), "")

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        changed = next(_times)  # another than ever before, or compiled code of the last one is used
        os.utime(path, (changed, changed))

    def _run(self, arguments: Sequence[str]) -> str:
        """Returns the failures in one line; empty if there are none."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONHASHSEED": "0"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            run = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_STAGE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {_STAGE_SECONDS:.0f} s"
        if run.returncode in (0, 5):  # 5: pytest has found no tests
            return ""
        marks = ("FAILED ", "ERROR ", "seed ")
        named = [line for line in run.stdout.splitlines() if line.startswith(marks)]
        return (named or run.stdout.splitlines()[-1:] or [f"exit code {run.returncode}"])[0][:160]


def judge_all(
    sites: Sequence[Site], jobs: int, deadline: float = float("inf")
) -> Iterable[Verdict]:
    """A verdict on each that begins before the deadline, as they come."""
    with tempfile.TemporaryDirectory(prefix="sparklog-mutation-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number)))

        def judge(site: Site) -> Verdict | None:
            if time.monotonic() > deadline:
                return None
            tree = trees.get()
            try:
                return tree.judge(site)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            yield from (each for each in pool.map(judge, sites) if each is not None)


def report(verdicts: Sequence[Verdict]) -> float:
    """Prints what survived, and the share that was killed of each kind; returns that of all."""
    totals = Counter(each.site.mutation.operator for each in verdicts)
    killed = Counter(each.site.mutation.operator for each in verdicts if each.killer)
    print("\nsurvivors:")  # noqa: T201
    for each in verdicts:
        if not each.killer:
            print(each.site)  # noqa: T201
    print()  # noqa: T201
    for operator, total in sorted(totals.items()):
        print(f"{operator:16} {killed[operator]:4} of {total:4} killed")  # noqa: T201
    share = killed.total() / max(totals.total(), 1)
    print(f"{'all':16} {killed.total():4} of {totals.total():4} killed, {share:.1%}")  # noqa: T201
    return share


def main() -> int:
    """Returns exit code 1 if too many mutations survive, 2 if a list names unknown ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--minutes", type=float, help="take no more mutations after that time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rooms", nargs="+", default=_ROOMS, help="folders, as sparklog/storage")
    parser.add_argument("--at-least", type=float, default=0.95, help="the share to be killed")
    parser.add_argument("--only", help="PATH:LINE, all mutations there")
    parser.add_argument("--again", type=Path, help="results of which the survivors are run again")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    parser.add_argument("--results", type=Path, help="a file that gets a line of JSON for each")
    arguments = parser.parse_args()
    every = list(all_sites())
    equivalents = Equivalents.read()
    if unknown := equivalents.unknown((each.module, each.mutation) for each in every):
        print("equivalent.toml names mutations that do not exist:", *unknown, sep="\n")  # noqa: T201
        return 2
    if arguments.only:
        module, _, line = arguments.only.rpartition(":")
        drawn = [s for s in every if (s.module, s.mutation.line) == (module, int(line))]
    elif arguments.again:
        drawn = _survivors(arguments.again, all_sites(arguments.rooms))
    else:
        drawn = sample(arguments.count, arguments.seed, arguments.rooms)
    sites = []
    for site in drawn:
        if reason := equivalents.reason(site.module, site.mutation):
            print(f"not counted: {site}\n    {reason}")  # noqa: T201
        else:
            sites.append(site)
    if arguments.list:
        for site in sites:
            print(site)  # noqa: T201
        return 0
    verdicts = []
    minutes = float("inf") if arguments.minutes is None else arguments.minutes
    for verdict in judge_all(sites, arguments.jobs, time.monotonic() + 60 * minutes):
        verdicts.append(verdict)
        fate = f"killed by {verdict.killer}" if verdict.killer else "SURVIVED"
        print(f"{len(verdicts)}/{len(sites)} {verdict.seconds:.0f} s {verdict.site}")  # noqa: T201
        print(f"    {fate}", flush=True)  # noqa: T201
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps({"site": str(verdict.site), "killer": verdict.killer}) + "\n")
    return 0 if report(verdicts) >= arguments.at_least else 1


def _survivors(results: Path, sites: Iterable[Site]) -> list[Site]:
    """The survivors that `results` names, as far as they are still there, on whatever line."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    survived = {_without_line(each["site"]) for each in lines if not each["killer"]}
    return [site for site in sites if _without_line(str(site)) in survived]


def _without_line(site: str) -> str:
    return re.sub(r":\d+ ", " ", site, count=1)


if __name__ == "__main__":
    sys.exit(main())
