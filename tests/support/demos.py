"""The flights demo with a cluster, as a program in its own session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.support.processes import arguments, processes_of
from tests.support.spark_programs import environment

REPOSITORY: Final = Path(__file__).parents[2]


def brokers_of(root: Path) -> list[int]:
    """Returns the processes with this root in their command, such as its brokers."""
    return [each for each in processes_of(os.getsid(0)) if str(root) in arguments(each)]


@contextmanager
def demo_with_cluster(root: Path, *, limit: int) -> Iterator[subprocess.Popen[str]]:
    """Yields the program, which leads its session; kills the whole session after the block."""
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
