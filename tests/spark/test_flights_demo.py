"""The flights demo with a cluster, as `make demo` runs it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Final

import pytest

from tests.support.demos import demo_with_cluster
from tests.support.processes import processes_of

pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark_program,
    pytest.mark.delta,
    pytest.mark.since("4.2"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

_FLIGHTS: Final = 10_000
_CHECKS: Final = 6
_PATIENCE_SECONDS: Final = 240.0


def test_demo_with_a_cluster(tmp_path: Path) -> None:
    """One of three brokers is killed while flights are sent, and everything is right in the end."""
    with demo_with_cluster(tmp_path / "root", limit=_FLIGHTS) as program:
        output, _ = program.communicate(timeout=_PATIENCE_SECONDS)
        assert program.returncode == 0, output
        assert re.search(r"^3 brokers serve .* at \S+:\d+,\S+:\d+,\S+:\d+$", output, re.MULTILINE)
        assert re.search(
            r"^kill -9 of broker [123], which leads partitions \[", output, re.MULTILINE
        )
        assert re.search(r"without an ack for \d+\.\d\d s$", output, re.MULTILINE)
        assert len(re.findall("^right ", output, re.MULTILINE)) == _CHECKS
        assert "WRONG" not in output
        assert processes_of(program.pid) == []


@pytest.mark.soak(mode="jobs")
def test_interruption_after_the_kill(tmp_path: Path) -> None:
    """Neither brokers nor Spark are left after Ctrl-C."""
    with demo_with_cluster(tmp_path / "root", limit=_FLIGHTS) as program:
        assert program.stdout is not None
        output = ""
        while "kill -9 of broker" not in output:
            line = program.stdout.readline()
            assert line, output
            output += line
        program.send_signal(signal.SIGINT)
        output += program.communicate(timeout=_PATIENCE_SECONDS)[0]
        assert program.returncode == 130, output
        assert processes_of(program.pid) == []
