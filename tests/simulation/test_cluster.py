"""Seeds of clusters that must pass, and checks that notice every mistake of their members."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.simulation.cluster import run_cluster
from tests.simulation.cluster_mutations import CLUSTER_MUTATIONS
from tests.simulation.mutation import Mutation

_SEEDS = 1_000
_SEEDS_PER_TEST = 20
_SEEDS_PER_MUTATION = 60


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


@pytest.mark.timeout(480)
@pytest.mark.parametrize("mutation", CLUSTER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_noticed(mutation: Mutation) -> None:
    """Each rule of failover is needed: without it, some seed soon breaks a promise."""
    with mutation.applied():
        seeds = range(_SEEDS_PER_MUTATION)
        assert any(run_cluster(seed, mutation.change).violation for seed in seeds)
