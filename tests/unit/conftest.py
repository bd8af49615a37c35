"""Fixtures of unit tests; a module that needs another clock or store has its own of the name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from sparklog import limits
from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore
from tests.support import lock_order, tables
from tests.support.brokers import Rig, RigOptions
from tests.support.live import SLICE_ROWS, LiveBroker


@pytest.fixture(autouse=True)
def _lock_order() -> Iterator[None]:
    """No thread takes the lock of a table under one that acks wait for."""
    with lock_order.checked():
        yield


@pytest.fixture
def clock() -> ManualClock:
    """Returns a clock that a test moves."""
    return tables.manual_clock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root in memory."""
    return MemoryStore(clock)


@pytest.fixture
def rig(request: pytest.FixtureRequest, store: MemoryStore, clock: ManualClock) -> Rig:
    """Returns a broker with topic t of one partition, or as the mark `rig` of the module says."""
    mark = request.node.get_closest_marker("rig")
    options = {} if mark is None else dict(mark.kwargs)
    topics = options.pop("topics", {"t": 1})
    rig = Rig(store, clock, options=RigOptions(**options))
    for topic, partitions in topics.items():
        rig.create(topic, partitions)
    return rig


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    """Returns a broker without topics, which sends each batch of `fill` as one."""
    monkeypatch.setattr(limits, "READ_RUN_BYTES", 60 * SLICE_ROWS)
    with LiveBroker() as broker:
        yield broker


@pytest.fixture
def logged() -> Iterator[Callable[[], list[tuple[str, str | None]]]]:
    """Returns a function that returns the logged events, of any level, each with its topic."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
    with capture_logs() as lines:
        yield lambda: [(line["event"], line.get("topic")) for line in lines]
