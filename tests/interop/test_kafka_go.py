"""franz-go, Kafka's client for Go, with a broker of ours.

Go brings its own modules, as far as its settings let it; where there is no Go, the test says so.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparklog.settings import GroupSettings
from tests.support.golang import built
from tests.support.kafkas import broker

PATIENCE_SECONDS = 240.0


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(600)
def test_a_program_with_franz_go(tmp_path: Path) -> None:
    """Administration, every codec, an eager and a cooperative group."""
    program = built(tmp_path, ".")
    groups = GroupSettings(initial_rebalance_delay_ms=200, min_session_timeout_ms=1_000)
    with broker(tmp_path / "root", groups=groups) as agent:
        done = subprocess.run(
            [str(program), agent.kafka_address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert done.stdout.split() == ["done"], done.stderr
