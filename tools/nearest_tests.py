"""Selects the tests closest to a change, up to two minutes' worth.

The tests of a module are those that the mutation suite runs for it (tests/mutation/suites.py):
tests that import it or share its name, then those of its neighbours, then those of whole brokers.
A changed test file comes first. The durations are those of the last full run on this machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tests.mutation.suites import ROOT, stages

_SECONDS: Final = 150.0
"""Budget of all workers together: two finish within two minutes, including startup."""
_UNKNOWN_SECONDS: Final = 5.0
_SIMULATION: Final = "tests/simulation/test_simulation.py"


def changed() -> list[str]:
    """Returns the files that differ from `main`, or on `main` those of the last commit."""
    base = _git("merge-base", "HEAD", "main")
    if base == _git("rev-parse", "HEAD") and not _git("status", "--porcelain"):
        base = _git("rev-parse", "HEAD~1")
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", base).splitlines(), *new.splitlines()})


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def nearest(files: Iterable[str], file_seconds: Mapping[str, float]) -> list[str]:
    """Returns test files for the changed files, closest first, within the time budget.

    Args:
        files: paths relative to the project root.
        file_seconds: the durations of test files, as far as known.
    """
    ranks: dict[str, int] = {}
    for file in files:
        for rank, test in _tests_of(file):
            ranks[test] = min(rank, ranks.get(test, rank))
    found, left = [], _SECONDS
    for test in sorted(ranks, key=lambda each: (ranks[each], each)):
        seconds = file_seconds.get(test, _UNKNOWN_SECONDS)
        if seconds <= left:
            found.append(test)
            left -= seconds
    return found


def _tests_of(file: str) -> Iterable[tuple[int, str]]:
    """Returns the distance and path of each related test file; 0 is closest."""
    path = Path(file)
    if path.suffix == ".md":
        return [(1, "tests/unit/test_docs.py"), (9, "tests/contract/test_pages.py")]
    if path.suffix != ".py" or not (ROOT / file).exists():
        return []
    if path.name.startswith("test_"):
        return [(0, file)]
    if file.startswith("tests/simulation/"):
        return [(1, _SIMULATION), (1, "tests/simulation/test_cluster.py")]
    if file.startswith("sparklog/"):
        words = [word for stage in stages(file) for word in stage if word.startswith("tests")]
        tests = [_SIMULATION if word == "tests.simulation" else word for word in words]
        return list(enumerate(tests, start=1))
    name = ".".join(path.with_suffix("").parts)
    package, _, module = name.rpartition(".")
    imports = re.compile(rf"(from|import) {name}\b|from {package} import (\([^)]*|.*)\b{module}\b")
    return [
        (1, str(test.relative_to(ROOT)))
        for test in (ROOT / "tests").rglob("test_*.py")
        if imports.search(test.read_text())
    ]
