"""Seeds that must pass, the same run from the same seed, and checks that notice every mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.simulation.history import ensure
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import Outcome, World, run

_SEEDS = 1_000
_FIRST_SEEDS = 200
_SEEDS_PER_TEST = 50
_SEEDS_PER_MUTATION = 60
_SOAK_BEGINS_AT = 1_000_000
_ROOT = Path(__file__).parents[2]


def _replay(outcome: Outcome) -> str:
    """Returns the command that repeats the failure."""
    command = f"{sys.executable} -m tests.simulation --seed {outcome.seed} --trace"
    return f"seed {outcome.seed} breaks a promise: {outcome.violation}\nreplay it with: {command}"


@pytest.mark.parametrize("first", range(_FIRST_SEEDS, _SEEDS, _SEEDS_PER_TEST))
def test_promises_hold(first: int) -> None:
    """No seed's faults in brokers, clients, readers and store break a promise."""
    for seed in range(first, first + _SEEDS_PER_TEST):
        outcome = run(seed)
        assert outcome.violation is None, _replay(outcome)


def test_the_first_seeds_do_much_and_keep_promises() -> None:
    """Seeds do much, and every kind of fault occurs among a few of them."""
    outcomes = [run(seed) for seed in range(_FIRST_SEEDS)]
    for outcome in outcomes:
        assert outcome.violation is None, _replay(outcome)
    injected = sum((outcome.injected for outcome in outcomes), Counter[str]())
    assert sum(outcome.acks for outcome in outcomes) > 10 * len(outcomes)
    assert sum(outcome.seen for outcome in outcomes) > 30 * len(outcomes)
    assert sum(outcome.deletions for outcome in outcomes) > len(outcomes) / 8
    assert sum(outcome.retained for outcome in outcomes) > len(outcomes) / 8
    assert sum(outcome.torn > 0 for outcome in outcomes) > len(outcomes) / 100
    assert sum(outcome.steps for outcome in outcomes) > 500 * len(outcomes)
    kinds = outcomes[0].profile.rates.kinds()
    assert not [kind for kind in kinds if not injected[kind]]


@pytest.mark.parametrize("seed", [3, 14, 15])
def test_a_seed_is_one_run(seed: int) -> None:
    """Each seed gives one run, step by step, within a process and in another one."""
    digest = run(seed).digest
    assert run(seed).digest == digest
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--digest"]
    # Another order of everything that is hashed.
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    answer = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(seed), digest]


@pytest.mark.parametrize("seed", [6, 7, 11, 13, 18])
def test_another_reader_agrees(seed: int, tmp_path: Path) -> None:
    """In the end delta-rs finds in every topic's table exactly the log that everybody saw."""
    compared: list[int] = []

    def inspect(world: World) -> None:
        for stat in world.disk.base.walk("topics"):
            path = tmp_path / stat.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(world.disk.base.get(f"topics/{stat.name}"))
        for name, topic_id, table in world.topics():
            rows = DeltaTable(tmp_path / name).to_pyarrow_table(
                columns=["partition", "offset", "value"]
            )
            theirs = sorted(zip(*(column.to_pylist() for column in rows.columns), strict=True))
            ours = [
                (partition, offset, row.value)
                for partition, bounds in enumerate(zip(table.starts, table.ends, strict=True))
                for offset, row in world.history.log((topic_id, partition), *bounds)
            ]
            ensure(theirs == ours, f"{name} holds {theirs} for delta-rs, and {ours} for us")
            compared.append(len(ours))

    outcome = run(seed, inspect=inspect)
    assert outcome.violation is None, _replay(outcome)
    assert sum(compared) > 0


@pytest.mark.timeout(480)  # a run in which little gets done takes long, and some need many runs
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_noticed(mutation: Mutation) -> None:
    """Each line of defence is needed: without it, some seed soon breaks a promise."""
    with mutation.applied():
        assert any(run(seed, mutation.change).violation for seed in range(_SEEDS_PER_MUTATION))


@pytest.mark.soak
def test_promises_hold_for_long() -> None:
    """No promise is broken by any seed that there is time for (`SPARKLOG_SOAK_MINUTES`)."""
    deadline = time.monotonic() + 60 * float(os.environ.get("SPARKLOG_SOAK_MINUTES", "1"))
    # Workers that run beside each other, and runs on other days, take other seeds.
    seed = _SOAK_BEGINS_AT + time.time_ns() // 1_000_000 % 10**9 * 1_000
    while time.monotonic() < deadline:
        outcome = run(seed)
        assert outcome.violation is None, _replay(outcome)
        seed += 1
