"""Fixtures that the tests of Kafka's clients share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.broker.agent import Agent
from tests.support.kafkas import broker, close_leavings
from tests.support.logs import errors_in


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test during which a broker has logged an error: no client may cause one."""
    report = yield
    if report.when == "teardown" and report.passed:
        found = errors_in(report.capstdout + report.capstderr)
        if found:
            report.outcome = "failed"
            report.longrepr = "\n".join(["a broker has logged errors:", *found])
    return report


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
