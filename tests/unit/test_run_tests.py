"""`make test`: which tests run where, the JUnit files of the groups, and their budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import nearest_tests, run_tests, soak
from tools.run_tests import Budgets, Case, Group

_ROOT = run_tests.ROOT
_SUITE = """<testsuites><testsuite name="pytest">
<testcase classname="tests.unit.test_a" name="test_x[1.5]" time="2.5"/>
<testcase classname="tests.unit.test_a" name="test_y" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.spark.test_b" name="test_z" time="0"><skipped message="no"/></testcase>
</testsuite></testsuites>
"""


def _group(**budget_seconds: float) -> Group:
    return Group(
        name="g",
        workers=2,
        budget_seconds={f"tests/{name}": seconds for name, seconds in budget_seconds.items()},
    )


def _case(folder: str, seconds: float, outcome: str = "passed") -> Case:
    return Case(name=f"tests/{folder}/test_a.py::test_x", seconds=seconds, outcome=outcome)


def test_every_folder_of_tests_has_a_group_and_a_budget() -> None:
    """A new folder is not forgotten, and none runs twice."""
    folders = [each for group in Budgets.read().groups for each in group.budget_seconds]
    with_tests = {
        str(path.parent.relative_to(_ROOT)) for path in (_ROOT / "tests").rglob("test_*.py")
    }
    assert sorted(folders) == sorted(with_tests)


@pytest.mark.parametrize(
    ("arguments", "paths", "options"),
    [
        ([], [], []),
        (["-k", "tests"], [], ["-k", "tests"]),
        (["tests/unit", "-x"], ["tests/unit"], ["-x"]),
        (["tests/unit/test_docs.py::test_x"], ["tests/unit/test_docs.py::test_x"], []),
        (["-m", "soak", "tests/spark/"], ["tests/spark"], ["-m", "soak"]),
    ],
)
def test_paths_are_told_from_options(
    arguments: list[str], paths: list[str], options: list[str]
) -> None:
    """The value of an option is not a path, even if a folder has its name."""
    assert run_tests.paths_of(arguments) == (paths, options)


def test_a_path_runs_in_its_group() -> None:
    """A group has the paths in its folders, and all its folders where none is named."""
    group = _group(unit=1.0, spark=1.0)
    assert group.selected([]) == ["tests/unit", "tests/spark"]
    paths = ["tests/unit/test_a.py", "tests/units/test_a.py", "tests/spark"]
    assert group.selected(paths) == ["tests/unit/test_a.py", "tests/spark"]
    assert group.selected(["tests"]) == ["tests/unit", "tests/spark"]


def test_junit_files_are_merged(tmp_path: Path) -> None:
    """All tests of both are in the result, with their folders, times and outcomes."""
    one, other, both = (tmp_path / f"{name}.xml" for name in ("one", "other", "both"))
    one.write_text(_SUITE)
    other.write_text(_SUITE.replace("tests.unit", "tests.contract"))
    run_tests.merge([one, other], both)
    cases = run_tests.read_cases(both)
    assert [case.folder for case in cases] == [
        *("tests/unit", "tests/unit", "tests/spark"),
        *("tests/contract", "tests/contract", "tests/spark"),
    ]
    assert cases[0] == Case(name="tests/unit/test_a.py::test_x[1.5]", seconds=2.5, outcome="passed")
    assert [case.message for case in cases[:3]] == ["", "no", ""]
    assert run_tests.counted(cases) == "2 passed, 2 failed, 2 skipped"


@pytest.mark.parametrize(
    ("seconds", "factor", "exceeds"), [(15.0, 1.0, False), (15.1, 1.0, True), (15.1, 2.0, False)]
)
def test_a_budget_may_be_exceeded_by_half(seconds: float, factor: float, exceeds: bool) -> None:
    """More than 1.5 × the budget fails a run, and a machine of half the speed doubles it."""
    cases = [_case("unit", seconds - 5.0), _case("unit", 5.0), _case("spark", 1.0)]
    found = run_tests.excesses(cases, {"tests/unit": 10.0, "tests/spark": 10.0}, factor)
    assert found == ({"tests/unit": seconds} if exceeds else {})
    assert "tests/unit" in run_tests.report(cases, {"tests/unit": 10.0}, factor)


def test_the_nearest_tests_of_a_module_come_first() -> None:
    """Its own, those that import it, then those of whole brokers, within the time that there is."""
    own, module = "tests/unit/test_wal_cleaner.py", "sparklog/broker/log/wal_cleaner.py"
    found = nearest_tests.nearest([module, "tests/unit/test_cli.py", "README.md"], {})
    assert found[0] == "tests/unit/test_cli.py"
    assert own in found[1:3]
    assert found.index(own) < found.index("tests/contract/test_agent.py")
    assert own not in nearest_tests.nearest([module], {own: 1_000.0})
    assert nearest_tests.nearest(["Makefile"], {}) == []


def test_modes_share_the_minutes() -> None:
    """Modes without an end have what the others leave, each at least one minute."""
    minutes = soak.minutes_of(soak.MODES, 240.0)
    assert sum(minutes.values()) == pytest.approx(240.0)
    fixed = {each.name for each in soak.MODES if not each.share}
    short = soak.minutes_of(soak.MODES, 10.0)
    assert {name for name, given in short.items() if given == 1.0} == minutes.keys() - fixed


def test_every_long_test_has_a_mode() -> None:
    """The mark names a mode of `make soak`, which runs it."""
    names = {each.name for each in soak.MODES}
    for path in (_ROOT / "tests").rglob("*.py"):
        for part in path.read_text().split("mark." + "soak")[1:]:
            assert part.startswith('(mode="'), path
            assert part.split('"')[1] in names, path


def test_findings_of_a_mode_are_in_the_summary() -> None:
    """Its row has the verdict and the counts, and below it are the failures."""
    text = "..F\nFAILED tests/a.py::test_x - assert 1\n=== 1 failed, 2 passed in 3.00s ===\n"
    outcome = soak.Outcome(mode=soak.MODES[0], seconds=90.0, code=1, text=text)
    row, failure = outcome.lines()
    assert row.split()[:4] == ["seeds", "1.5", "min", "FAILED"]
    assert row.endswith("1 failed, 2 passed in 3.00s")
    assert failure.strip() == "FAILED tests/a.py::test_x - assert 1"
    assert not outcome.is_good
