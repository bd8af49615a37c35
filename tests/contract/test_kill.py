"""`kill -9` of a real broker at any moment, with producers and readers at work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killing import Consumer, Follower, Witness, survive


def witnesses() -> list[Witness]:
    """A new one of each kind."""
    return [Follower(), Consumer()]


@pytest.fixture(params=["objects", "segments"])
def log(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Brokers store their write-ahead logs in each way."""
    monkeypatch.setenv("SPARKLOG_WRITER_LOG", request.param)
    yield
    assert any(tmp_path.rglob("*.seg")) is (request.param == "segments")


@pytest.mark.slow
@pytest.mark.usefixtures("log")
def test_nothing_acked_is_lost_or_doubled(tmp_path: Path) -> None:
    """Through three kills each acked record exists once, in order, and the table equals the log."""
    survive(tmp_path, kills=3, minutes=0.0, seed=7, witnesses=witnesses())


@pytest.mark.soak(mode="kills")
@pytest.mark.usefixtures("log")
def test_nothing_acked_is_ever_lost_or_doubled(tmp_path: Path) -> None:
    """The promises hold for twenty kills, and for as many minutes as configured."""
    minutes = float(os.environ.get("SPARKLOG_SOAK_MINUTES", "0"))
    seed = int.from_bytes(os.urandom(4))
    survive(tmp_path, kills=20, minutes=minutes, seed=seed, witnesses=witnesses())
