"""`sparklog.jobs.windows`: the checkpoint of a job that reads a topic in windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog import errors
from sparklog.jobs.ranges import Range
from sparklog.jobs.windows import Checkpoint

_JOB = {"topic": "t", "table": "/t"}
_PART = Range(starts={0: 0, 1: 5}, ends={0: 3, 1: 5})


@pytest.fixture(name="uri")
def _uri(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


def test_a_window_is_found_again(uri: str) -> None:
    """With its offsets and columns, and whether it is done; the name stays."""
    first = Checkpoint(uri)
    assert first.last() == (None, True)
    name = first.open(_JOB)
    plan = first.plan(0, _PART, "{}")
    again = Checkpoint(uri)
    assert again.open(_JOB) == name
    assert again.last() == (plan, False)
    assert plan.part == _PART
    again.finish(0)
    assert Checkpoint(uri).last() == (plan, True)
    assert Checkpoint(uri + "2").open(_JOB) != name


def test_a_number_is_planned_once(uri: str) -> None:
    """A second run with the checkpoint is refused."""
    first, second = Checkpoint(uri), Checkpoint(uri)
    first.plan(0, _PART, "{}")
    with pytest.raises(errors.BadRequest, match="Another run uses the checkpoint"):
        second.plan(0, _PART, "{}")


def test_a_checkpoint_is_of_one_job(uri: str) -> None:
    """Another topic or table is refused; nothing is made by the check."""
    Checkpoint(uri).check(_JOB)
    assert not Path(uri).exists()
    Checkpoint(uri).open(_JOB)
    Checkpoint(uri).check(_JOB)
    with pytest.raises(errors.BadRequest, match="belongs to a job with table '/t'"):
        Checkpoint(uri).check({**_JOB, "table": "/u"})


def test_what_a_job_left_open_may_be_chosen_later(uri: str) -> None:
    """Once: such as the dead letters, for which the first bad record asks."""
    name = Checkpoint(uri).open({**_JOB, "dead letters": None})
    chosen = {**_JOB, "dead letters": "dead"}
    Checkpoint(uri).check(chosen)
    assert Checkpoint(uri).open(chosen) == name
    for other in ("other", None):
        with pytest.raises(errors.BadRequest, match="belongs to a job with dead letters 'dead'"):
            Checkpoint(uri).check({**_JOB, "dead letters": other})


def test_old_windows_are_forgotten(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint does not grow with its age."""
    monkeypatch.setattr("sparklog.jobs.windows.WINDOWS_KEPT", 3)
    kept = Checkpoint(uri)
    for number in range(10):
        kept.plan(number, _PART, "{}")
        kept.finish(number)
    assert len([*Path(uri).iterdir()]) == 6
    window, is_done = kept.last()
    assert is_done
    assert window is not None
    assert window.number == 9


@pytest.mark.parametrize("name", ["checkpoint.json", f"{0:020}.json"])
def test_a_damaged_file_is_named(uri: str, name: str) -> None:
    """It is not taken for none."""
    kept = Checkpoint(uri)
    kept.open(_JOB)
    kept.plan(0, _PART, "{}")
    Path(uri, name).write_text("{")
    with pytest.raises(errors.CorruptObject, match=name):
        kept.last() if name != "checkpoint.json" else kept.check(_JOB)
