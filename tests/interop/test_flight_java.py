"""Arrow Flight's client for Java with a broker of ours.

Maven brings it, as far as its settings let it; where there is none, the test says so.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from benchmarks.kafka_process import java
from sparklog.listeners import TLS_SCHEME
from tests.support.secured import check_nothing_is_held, flight_agent

PROGRAM: Final = Path(__file__).parent / "java" / "flight"
MAVEN_SECONDS: Final = 240.0
PATIENCE_SECONDS: Final = 180.0


def class_path(folder: Path) -> str:
    """The jars of `pom.xml`. Skips the test where they cannot be got."""
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("Maven is not installed")
    shutil.copy(PROGRAM / "pom.xml", folder)
    found = folder / "class-path"
    goal = ["dependency:build-classpath", f"-Dmdep.outputFile={found}"]
    try:
        done = subprocess.run(
            [maven, "-q", "-B", *goal],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAVEN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"Maven has not got Arrow Flight in {MAVEN_SECONDS:.0f} s")
    if done.returncode or not found.exists():
        lines = [line for line in done.stdout.splitlines() if "ERROR" in line]
        pytest.skip(f"Maven cannot get Arrow Flight: {lines[0] if lines else done.stderr}")
    return found.read_text()


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_login", [False, True], ids=["open", "login"])
def test_a_program_with_arrow_flight(
    tmp_path: Path, request: pytest.FixtureRequest, has_login: bool
) -> None:
    """Actions, records, large batches, refusals, cancellation and deadlines.

    Cancelled and refused calls leave nothing behind. With a login, the same over TLS.
    """
    agent, *login = flight_agent(request, tmp_path, has_login=has_login)
    host, _, port = agent.address.removeprefix(TLS_SCHEME).rpartition(":")
    arguments = ["-Xmx1g", "--add-opens=java.base/java.nio=ALL-UNNAMED", "-cp"]
    done = subprocess.run(
        [
            *(java(), *arguments, class_path(tmp_path), str(PROGRAM / "FlightClients.java")),
            *(host, port, *login),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["done"], done.stdout + done.stderr
    check_nothing_is_held(agent)
