"""The mutations are what they say, a mistake is noticed, and enough of a sample is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import Site, Tree, all_sites, main, sample
from tests.mutation.equivalents import Equivalents
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


@pytest.mark.parametrize(
    ("steps", "swaps"),
    [
        ("self.rows += 1\n    self.waiting.append(row)", 0),
        ("self.ready.clear()\n    self.changed.notify_all()", 0),
        ("self.rows += 1\n    self.ends[self.rows] = end", 1),
        ("self.rows += 1\n    self.put(row)", 1),
        ("self.put(row)\n    self.sync()", 1),
        ("self.last = self.find(row)\n    self.rows += 1", 1),
    ],
)
def test_changes_of_memory_have_no_order(steps: str, swaps: int) -> None:
    """Two changes of memory change places only where one of them touches the other's."""
    found = mutations_of(f"def add(self, row):\n    {steps}\n".encode())
    assert [each.operator for each in found].count("swapped steps") == swaps


@pytest.mark.parametrize(
    ("line", "boundaries"),
    [
        ("while self.size > limits.GROUP_BYTES: self.cut()", 0),
        ("if room_bytes < size and rows > 1: self.cut()", 1),
        ("if size > limits.VALUE_BYTES: raise TooLarge(size=size)", 1),
        ("if clock.monotonic() > deadline: return False", 0),
        ("if offset > end: self.wait()", 1),
    ],
)
def test_boundaries(line: str, boundaries: int) -> None:
    """Moments have no boundary, nor have sizes by which work is cut; a refused size has one."""
    found = mutations_of(f"def add(self, size):\n    {line}\n".encode())
    assert [each.operator for each in found].count("boundary") == boundaries


def test_equivalent_mutations_exist() -> None:
    """Each entry of the list fits a mutation of today's source, and has a reason."""
    equivalents = Equivalents.read()
    assert equivalents.unknown((each.module, each.mutation) for each in all_sites()) == []
    assert all(equivalents.reasons.values())


def test_an_equivalent_mutation_is_known_by_its_text(tmp_path: Path) -> None:
    """An entry fits on whatever line its code is, and fits nothing once the code has changed."""
    place = tmp_path / "equivalent.toml"
    place.write_text(
        '[[equivalent]]\nwhy = "No record is at the end."\n'
        '[[equivalent.at]]\nmodule = "log.py"\nfunction = "read"\n'
        'before = "return log.rows[start:end]"\nafter = "return log.rows[start:end + 1]"\n'
    )
    equivalents = Equivalents.read(place)
    moved = [("log.py", each) for each in mutations_of(f"import os\n{_SOURCE}".encode())]
    assert [each.line for _, each in moved if equivalents.reason("log.py", each)] == [20]
    assert equivalents.unknown(moved) == []
    changed = _SOURCE.replace("log.rows[start:end]", "log.rows[start:][: end - start]")
    found = [("log.py", each) for each in mutations_of(changed.encode())]
    assert equivalents.unknown(found) == ["log.py read: return log.rows[start:end]"]


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
    assert {str(each) for each in sample(40, 7)} != {str(each) for each in sample(40, 8)}


def test_a_sample_of_rooms() -> None:
    """A sample of a room names nothing else, and of two it is what each has at the head."""
    room = sample(30, 7, ["sparklog/sources"])
    assert all(each.module.startswith("sparklog/sources/") for each in room)
    both = sample(60, 7, ["sparklog/sources", "sparklog/storage"])
    shared = [str(each) for each in both if each.module.startswith("sparklog/sources/")]
    assert shared
    assert set(shared) <= {str(each) for each in sample(60, 7, ["sparklog/sources"])}


def test_survivors_are_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Survivors of an earlier run are found by their text, those that were killed are left out."""
    one, other = sample(2, 7)
    results = tmp_path / "results.jsonl"
    moved = str(one).replace(f":{one.mutation.line} ", ":99999 ")
    lines = [{"site": moved, "killer": ""}, {"site": str(other), "killer": "test_a"}]
    results.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    monkeypatch.setattr(sys, "argv", ["mutation", "--list", "--again", str(results)])
    assert main() == 0
    assert capsys.readouterr().out == f"{one}\n"


@pytest.mark.slow
def test_a_mutation_is_killed(tmp_path: Path) -> None:
    """A mistake is noticed in the copy of the tree, and gone from it afterwards."""
    module = "sparklog/broker/log/producer_state.py"
    source = (ROOT / module).read_bytes()
    mutation = next(
        each for each in mutations_of(source) if "state.epoch" in each.before and each.after
    )
    tree = Tree(tmp_path / "tree")
    verdict = tree.judge(Site(module=module, mutation=mutation))
    assert "test_producer_state" in verdict.killer
    assert (tree.folder / module).read_bytes() == source
