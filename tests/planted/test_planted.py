"""The simulation notices every planted mistake: see `tests/simulation/planted.py`."""

from __future__ import annotations

import pytest

from tests.simulation import planted
from tests.simulation.cluster import run_cluster
from tests.simulation.cluster_mutations import CLUSTER_MUTATIONS
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import run

_WHEN = pytest.mark.soak(mode="planted") if planted.are_proven() else pytest.mark.slow
# A run in which little gets done takes long, and some mistakes need many runs.
pytestmark = [_WHEN, pytest.mark.timeout(1_200)]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_noticed(mutation: Mutation) -> None:
    """Each line of defence is needed: without it, some seed soon breaks a promise."""
    with mutation.applied():
        assert any(run(seed, mutation.change).violation for seed in planted.SEEDS)


@pytest.mark.parametrize("mutation", CLUSTER_MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_in_a_cluster_is_noticed(mutation: Mutation) -> None:
    """Each rule of failover is needed: without it, some seed soon breaks a promise."""
    with mutation.applied():
        assert any(run_cluster(seed, mutation.change).violation for seed in planted.SEEDS)
