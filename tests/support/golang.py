"""Programs in Go: built with the modules that Go gets, as far as its settings let it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PROGRAMS: Final = Path(__file__).parents[1] / "interop" / "go"
BUILD_SECONDS: Final = 240.0


def go() -> str:
    """The path of the command; skips the test where there is no Go."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        pytest.skip("Go is not installed")
    return found


def built(folder: Path, program: str, package: str = ".") -> Path:
    """The program of that folder of `PROGRAMS`, or a package that its module names, in `folder`.

    Skips the test where there is no Go, or a module cannot be got.
    """
    found = go()
    made = folder / "program"
    done = subprocess.run(
        [found, "build", "-mod=readonly", "-o", str(made), package],
        cwd=PROGRAMS / program,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if "dial tcp" in done.stderr or "Forbidden" in done.stderr:
        pytest.skip(f"a module cannot be got: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return made
