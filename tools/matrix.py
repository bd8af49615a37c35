"""Runs the Spark tests with each Spark version: `python -m tools.matrix [--only 4.0] [PYTEST …]`.

Each version has its own environment in build/matrix, with everything else as pinned in
requirements.lock. Tests of features that a version lacks are skipped, and counted in the final
table.

The environment `lowest` contains the oldest version of each package that pyproject.toml allows, and
runs the unit tests and some tests of Spark and of the listeners.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "build" / "matrix"
_LOWEST: Final = "lowest"
_UV: Final = (sys.executable, "-m", "uv", "--quiet")
_TESTS: Final = ("tests/spark", "-k", "not kill and not docs and not notebooks")
"""Tests that depend on the Spark version; kills do not, and take minutes."""
_TESTS_OF_LOWEST: Final = (
    *("tests/unit", "--ignore", "tests/unit/test_plots.py"),  # plots depend on the numpy version
    *("tests/contract/test_flight_listener.py", "tests/contract/test_kafka_listener.py"),
    *("tests/contract/test_metrics_port.py", "tests/contract/test_objects.py"),
    *("tests/interop/test_check.py", "tests/interop/test_deltalake.py"),
    *("tests/spark/test_read.py", "tests/spark/test_write.py", "tests/spark/test_values.py"),
)
_PYTEST: Final = (
    *("-q", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadgroup"),
    *("--timeout", "300"),
    # Spark 4.0's client leaves sockets to the garbage collector.
    *("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
)
_OF_A_RUN: Final = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "SPARK_HOME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Compatible versions; `delta`: None if no delta-spark has a jar for this Spark yet."""

    spark: str
    delta: str | None
    name: str = ""
    """The name of the environment, if it is not the Spark version."""

    @property
    def packages(self) -> list[str]:
        found = [f"pyspark=={self.spark}"]
        return found if self.delta is None else [*found, f"delta-spark=={self.delta}"]

    @property
    def label(self) -> str:
        return f"{self.name} {', '.join(self.packages)}".strip()

    @property
    def folder(self) -> Path:
        return FOLDER / (self.name or self.spark)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


MATRIX: Final = (
    Versions(spark="4.0.5", delta="4.4.0"),
    Versions(spark="4.1.4", delta="4.4.0"),
    Versions(spark="4.2.0", delta="4.4.0"),
    Versions(spark="4.3.0", delta=None),
    Versions(spark="4.2.0", delta="4.4.0", name=_LOWEST),
)


def install(versions: Versions) -> None:
    """Creates an environment, unless it already matches requirements.lock."""
    lock = (ROOT / "requirements.lock").read_text()
    ours = _lowest() if versions.name == _LOWEST else versions.packages
    wanted = "\n".join([*ours, lock])
    stamp = versions.folder / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    # Without hashes, which are not allowed in constraints, and without the versions under test.
    names = tuple(f"{each.partition('==')[0]}==" for each in ours)
    pins = [
        line.removesuffix(" \\")
        for line in lock.splitlines()
        if "==" in line and not line.startswith(names)
    ]
    subprocess.run(
        [*_UV, "venv", "--clear", "--python", sys.executable, versions.folder], check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        constraints, overrides = Path(folder, "constraints.txt"), Path(folder, "overrides.txt")
        constraints.write_text("\n".join(pins))
        overrides.write_text("\n".join(ours))
        command = [*_UV, "pip", "install", "--python", str(versions.python)]
        command += ["--constraint", str(constraints), "--override", str(overrides)]
        command += ["--group", "dev"]
        command += ["--editable", ".[all]", *versions.packages]
        subprocess.run(command, check=True, cwd=ROOT)
    stamp.write_text(wanted)


def _lowest() -> list[str]:
    """Returns the oldest versions that pyproject.toml allows, with their dependencies."""
    command = [*_UV, "pip", "compile", "pyproject.toml", "--extra", "all", "--extra", "local-spark"]
    command += ["--resolution", "lowest-direct", "--python-version", "3.11"]
    command += ["--no-header", "--no-annotate"]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()


def run(versions: Versions, arguments: list[str]) -> tuple[str, bool]:
    """Runs the tests. Returns their counts, and whether all passed."""
    report = versions.folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [str(versions.python), "-m", "pytest", *_PYTEST, f"--junit-xml={report}"]
    began = time.monotonic()
    # Independent of a surrounding run: without its Python path and options.
    clean = {key: value for key, value in os.environ.items() if key not in _OF_A_RUN}
    command += arguments or (_TESTS_OF_LOWEST if versions.name == _LOWEST else _TESTS)
    code = subprocess.run(command, check=False, cwd=ROOT, env=clean).returncode
    minutes = (time.monotonic() - began) / 60
    if not report.is_file():
        return f"pytest exited with {code}, without a report", False
    suite = next(ET.parse(report).iter("testsuite"))
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = count - skipped - failed
    text = f"{passed} passed, {skipped} skipped, {failed} failed, {minutes:.1f} minutes"
    return text, code == 0


def main() -> int:
    """Runs the chosen environments. Returns 1 if a test has failed."""
    parser = argparse.ArgumentParser(description="Runs the Spark tests with each Spark version.")
    parser.add_argument("--only", metavar="4.0", action="append", help="run only this environment")
    chosen, arguments = parser.parse_known_args()
    found = [
        each
        for each in MATRIX
        if chosen.only is None or any(each.folder.name.startswith(only) for only in chosen.only)
    ]
    if not found:
        parser.error(f"the environments are {', '.join(each.folder.name for each in MATRIX)}")
    results: list[tuple[Versions, str, bool]] = []
    for versions in found:
        print(versions.label, flush=True)
        install(versions)
        results.append((versions, *run(versions, arguments)))
    print()
    for versions, text, _ in results:
        print(f"{versions.label:45} {text}")
    return 0 if all(is_good for _, _, is_good in results) else 1


if __name__ == "__main__":
    sys.exit(main())
