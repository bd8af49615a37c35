"""The scripts that look for Java and Python before `make setup`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import fences

_TOOLS = fences.ROOT / "tools"


def _run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    without_home = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return subprocess.run(
        [_TOOLS / script, *arguments],
        env={**without_home, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _java(folder: Path, version: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2023-10-17' >&2\n", "utf-8")
    program.chmod(0o755)
    return folder


def test_an_old_java_is_named_with_its_version_and_the_variable_that_chose_it(
    tmp_path: Path,
) -> None:
    """JAVA_HOME comes before PATH, where a newer one may be."""
    home = _java(tmp_path, "1.8.0_392")

    run = _run("check-java", JAVA_HOME=str(home))

    assert run.returncode == 1
    assert f"{home}/bin/java is Java 1.8.0_392" in run.stderr
    assert "unset JAVA_HOME" in run.stderr


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    """The error names the path where java was looked for."""
    run = _run("check-java", JAVA_HOME=str(tmp_path))

    assert run.returncode == 1
    assert f"{tmp_path}/bin/java does not run" in run.stderr


def test_a_new_java_is_taken(tmp_path: Path) -> None:
    """Also one of an early build, whose version has no dots."""
    run = _run("check-java", JAVA_HOME=str(_java(tmp_path, "21-ea")))

    assert (run.returncode, run.stderr) == (0, "")


def test_the_python_that_is_asked_for_is_taken() -> None:
    """PYTHON=… may be a path."""
    assert _run("find-python", sys.executable).stdout.strip() == sys.executable


def test_a_python_that_is_asked_for_and_does_not_run_is_not_replaced() -> None:
    """Another Python than the one that PYTHON=… names would surprise."""
    run = _run("find-python", "python3.99")

    assert (run.returncode, run.stdout) == (1, "")
    assert "PYTHON=python3.99" in run.stderr
