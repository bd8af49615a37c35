"""Fixtures of unit tests; a module that needs another clock or store has its own of the name."""

from __future__ import annotations

import pytest

from sparklog.clock import ManualClock
from sparklog.storage.objects import MemoryStore


@pytest.fixture
def clock() -> ManualClock:
    """Returns a clock that a test moves."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """An empty root in memory."""
    return MemoryStore(clock)
