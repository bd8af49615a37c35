"""The flights demo with a cluster as a program, in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.support.spark_programs import environment

REPOSITORY: Final = Path(__file__).parents[2]


def session(process: int) -> int:
    """Returns the session of a process, -1 if it has ended."""
    with suppress(OSError):
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return -1 if state in "ZX" else int(numbers[2])
    return -1


def processes_of(wanted: int) -> list[int]:
    """Returns the processes of a session."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [each for each in numbers if session(each) == wanted]


@contextmanager
def demo_with_cluster(root: Path, *, limit: int) -> Iterator[subprocess.Popen[str]]:
    """The program; its pid is that of its session, of which nothing is left after the block."""
    command = [sys.executable, "-m", "examples.flights_demo", "--cluster", "--root", str(root)]
    program = subprocess.Popen(
        [*command, "--limit", str(limit)],
        cwd=REPOSITORY,
        env=environment(COLUMNS="200", PYTHONPATH=str(REPOSITORY)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with program:
        try:
            yield program
        finally:
            for each in processes_of(program.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
