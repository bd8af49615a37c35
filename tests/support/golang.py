"""Go programs, built with the modules that Go's settings let it download."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

PROGRAMS: Final = Path(__file__).parents[1] / "interop" / "go"
BUILD_SECONDS: Final = 240.0


def go() -> str:
    """Returns the path of the `go` command; skips the test if Go is not installed."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        pytest.skip("Go is not installed")
    return found


def built(folder: Path, program: str, package: str = ".") -> Path:
    """Builds that folder of `PROGRAMS`, or a package that its module requires, into `folder`.

    Skips the test if Go is not installed or a module cannot be downloaded.
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
