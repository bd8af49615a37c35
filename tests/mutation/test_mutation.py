"""The mutations are what they say, a mistake is noticed, and enough of a sample is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import Site, Tree, all_sites, sample
from tests.mutation.operators import Mutation, mutations_of
from tests.mutation.suites import ROOT, stages

_SOURCE = '''
"""A docstring."""

def append(log, offset, limit):
    """Another."""
    if offset > limit:
        raise ValueError(f"{offset + 1} is too far")
    _log.info("appending", offset=offset)
    check_limit(limit)
    log.write(offset=offset)
    log.fsync()
    log.ready = True
    assert offset < limit
    return offset + 1

def read(log, start, end):
    if not log.ready and start == end:
        return []
    return log.rows[start:end]
'''


def _found(operator: str) -> list[Mutation]:
    return [each for each in mutations_of(_SOURCE.encode()) if each.operator == operator]


@pytest.mark.parametrize(
    ("operator", "after"),
    [
        ("boundary", ["if offset >= limit:"]),
        ("comparison", ["if not log.ready and start != end:"]),
        ("off by one", ["log.write(offset=offset + 1)", "return offset + 0"]),
        ("dropped check", ["if False and (offset > limit):", "pass"]),
        ("missing sync", ["pass"]),
        ("logic", ["if log.ready and start == end:", "if not log.ready or start == end:"]),
    ],
)
def test_operators(operator: str, after: list[str]) -> None:
    """Each kind of mistake is made where it can be made, and nowhere else."""
    found = [each.after for each in _found(operator)]
    assert found[: len(after)] == after
    assert not any("too far" in each or "info" in each or "assert" in each for each in found)


def test_swapped_steps_change_places() -> None:
    """Neighbouring steps change places, and the rest of the text stays as it is."""
    swapped = [each.apply(_SOURCE.encode()).decode() for each in _found("swapped steps")]
    one = "log.fsync()\n    log.write(offset=offset)"
    assert any(one in each for each in swapped)
    assert all(sorted(each.splitlines()) == sorted(_SOURCE.splitlines()) for each in swapped)


def test_every_mutation_is_another_program() -> None:
    """Every mutation of every module changes its file, and each module has tests of its own."""
    sites = list(all_sites())
    assert len(sites) > 1_000
    for site in sites:
        source = (ROOT / site.module).read_bytes()
        assert site.mutation.apply(source) != source
    for site in sites[::50]:
        compile(site.mutation.apply((ROOT / site.module).read_bytes()), site.module, "exec")
    assert all(stages(module) for module in {site.module for site in sites})


def test_a_sample_is_the_same_for_a_seed() -> None:
    """A seed stands for one sample, in which every operator has its share."""
    assert [str(each) for each in sample(40, 7)] == [str(each) for each in sample(40, 7)]
    assert len({each.mutation.operator for each in sample(40, 7)}) == 7


@pytest.mark.slow
def test_a_mutation_is_killed(tmp_path: Path) -> None:
    """A mistake is noticed in the copy of the tree, and gone from it afterwards."""
    module = "sparklog/broker/producers.py"
    source = (ROOT / module).read_bytes()
    mutation = next(
        each for each in mutations_of(source) if "state.epoch" in each.before and each.after
    )
    tree = Tree(tmp_path / "tree")
    verdict = tree.judge(Site(module=module, mutation=mutation))
    assert "test_producers" in verdict.killer
    assert (tree.folder / module).read_bytes() == source


@pytest.mark.soak
def test_mutations_are_killed() -> None:
    """Of a sample of 120 mutations, 95 % are noticed by the tests."""
    count = os.environ.get("SPARKLOG_MUTATIONS", "120")
    command = [sys.executable, "-m", "tests.mutation", "--count", count]
    subprocess.run(command, cwd=ROOT, check=True)
