from __future__ import annotations

import pytest

from tests.models.leadership import MISTAKES, Run, Violation


def visit(run: Run) -> int:
    """Returns the number of states."""
    return sum(1 for _ in run.states())


def test_every_interleaving_of_one_partition_keeps_the_invariants() -> None:
    """Three starts of up to three brokers, with a record, and two changes of its leader at most."""
    assert visit(Run(registrations=3, leader_epochs=2, records=1)) == 302_061


@pytest.mark.parametrize(
    ("run", "states"),
    [
        (Run(registrations=2, leader_epochs=2, records=1, splits_seals=True), 19_292),
        (Run(registrations=4, leader_epochs=3, records=2, depth=7), 26_306),
        (Run(partitions=2, registrations=3, leader_epochs=2, records=1, depth=6), 9_765),
    ],
    ids=["fences between", "more of all", "two partitions"],
)
def test_interleavings_to_a_depth_keep_the_invariants(run: Run, states: int) -> None:
    """More brokers, records, leader epochs and partitions, within fewer steps."""
    assert visit(run) == states


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rule_is_needed(mistake: str) -> None:
    """The model finds the broken invariant once any rule is left out."""
    with pytest.raises(Violation, match=MISTAKES[mistake]):
        visit(Run(registrations=3, leader_epochs=2, records=1, mistake=mistake, splits_seals=True))


@pytest.mark.soak(mode="models")
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(
    "run",
    [
        Run(registrations=3, leader_epochs=2, records=1, splits_seals=True),
        Run(registrations=3, leader_epochs=3, records=2, depth=14),
        Run(registrations=5, leader_epochs=4, records=2, depth=11),
        Run(registrations=9, leader_epochs=4, records=2, depth=10),
        Run(partitions=2, registrations=4, leader_epochs=2, records=1, depth=9),
    ],
    ids=["fences between", "long", "more starts", "three starts each", "two partitions"],
)
def test_long_interleavings_keep_the_invariants(run: Run) -> None:
    """More of all, over millions of states."""
    assert visit(run)
