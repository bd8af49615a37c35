"""Fixtures that the tests of Kafka's clients share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.broker.agent import Agent
from tests.support.kafkas import broker, close_leavings


@pytest.fixture(autouse=True)
def _leavings() -> Iterator[None]:
    yield
    close_leavings()


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    with broker(tmp_path / "root") as agent:
        yield agent


@pytest.fixture(name="address")
def _address(agent: Agent) -> str:
    return agent.kafka_address


@pytest.fixture(name="log")
def _log(agent: Agent) -> Iterator[sparklog.Log]:
    with sparklog.connect(agent.address) as log:
        yield log
