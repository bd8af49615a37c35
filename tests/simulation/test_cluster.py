"""Seeds of clusters that must pass."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.simulation.cluster import run_cluster

_SEEDS = 200
_SEEDS_PER_TEST = 20


@pytest.mark.timeout(480)
@pytest.mark.parametrize("first", range(0, _SEEDS, _SEEDS_PER_TEST))
def test_promises_hold(first: int) -> None:
    """No faults of members, clients, readers and store break a promise."""
    injected = Counter[str]()
    for seed in range(first, first + _SEEDS_PER_TEST):
        outcome = run_cluster(seed)
        command = f"{sys.executable} -m tests.simulation --cluster --seed {seed} --trace"
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}; replay: {command}"
        injected += outcome.injected
    assert injected.total() > _SEEDS_PER_TEST
