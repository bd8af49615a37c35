"""Deaths, freezes and stops of real brokers of a cluster, with clients of all kinds at work."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusterkilling import KINDS, survive
from tests.support.kafkas import close_leavings

# kafka-python leaves sockets of brokers that are down to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(autouse=True)
def _leavings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Lets no log line of kafka-python keep its sockets: it logs each broker that is down."""
    caplog.set_level(logging.CRITICAL + 1, "kafka")
    yield
    close_leavings()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_keeps_what_it_has_acked(tmp_path: Path) -> None:
    """A kill, a freeze and a stop, one of the controller: nothing is lost, doubled or moved."""
    found = survive(tmp_path, disturbances=3, minutes=0.0, seed=3, jvms=False)
    assert [found[kind] for kind in KINDS] == [1, 1, 1]
    assert found["controller"] > 0


@pytest.mark.soak(mode="kills")
@pytest.mark.spark
def test_a_cluster_always_keeps_what_it_has_acked(tmp_path: Path) -> None:
    """The promises hold for a hundred disturbances, and for as many minutes as configured."""
    minutes = float(os.environ.get("SPARKLOG_SOAK_MINUTES", "0"))
    seed = int.from_bytes(os.urandom(4))
    found = survive(tmp_path, disturbances=100, minutes=minutes, seed=seed, jvms=True)
    print(f"seed {seed}: {dict(found)}")  # noqa: T201 - for those who run it with -s
    assert found["controller"] >= 33
