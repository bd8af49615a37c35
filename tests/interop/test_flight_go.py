"""arrow-go, Arrow Flight's client for Go over gRPC's of Go, with a broker of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparklog.broker.agent import Agent
from tests.support.golang import built
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 240.0


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(600)
def test_a_program_with_arrow_go(agent: Agent, tmp_path: Path) -> None:
    """Actions, records, large batches, many headers, cancellation, deadlines and keepalive.

    Cancelled and refused calls leave nothing behind.
    """
    program = built(tmp_path, "flight")
    done = subprocess.run(
        [str(program), agent.address],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["done"], done.stderr
    door = agent.listeners.flight
    assert door is not None
    wait_until(lambda: door.open_calls == 0, "no call is served any more")
    assert door._server._calls == 0
    assert door._server.message_memory._held_bytes == 0
