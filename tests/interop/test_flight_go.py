"""arrow-go, Arrow Flight's client for Go over gRPC's of Go, with a broker of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparklog.listeners import TLS_SCHEME
from tests.support.golang import built
from tests.support.secured import check_nothing_is_held, flight_agent

PATIENCE_SECONDS = 240.0


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_login", [False, True], ids=["open", "login"])
def test_a_program_with_arrow_go(
    tmp_path: Path, request: pytest.FixtureRequest, has_login: bool
) -> None:
    """Actions, records, large batches, many headers, cancellation, deadlines and keepalive.

    Cancelled and refused calls leave nothing behind. With a login, the same over TLS.
    """
    agent, *login = flight_agent(request, tmp_path, has_login=has_login)
    program = built(tmp_path, "flight")
    done = subprocess.run(
        [str(program), agent.address.removeprefix(TLS_SCHEME), *login],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["done"], done.stderr
    check_nothing_is_held(agent)
