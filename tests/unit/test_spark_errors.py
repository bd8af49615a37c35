"""Errors in Spark's Python workers: the sentence alone for ours, frames for all others."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator

import pytest
from pyspark.util import handle_worker_exception

from sparklog import errors
from sparklog.spark_errors import rows_sentence_first, sentence_first


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the switch as it was."""
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")


@sentence_first
def fail(error: Exception) -> None:
    """A function that Spark calls."""
    raise error


@rows_sentence_first
def fail_late(error: Exception) -> Iterator[int]:
    """An iterator that Spark takes rows from."""
    yield 1
    raise error


def told(error: Exception, *, late: bool = False) -> str:
    """Returns the text that a worker passes to Spark."""
    sink = io.BytesIO()
    try:
        list(fail_late(error)) if late else fail(error)
    except Exception as failure:
        handle_worker_exception(failure, sink)
    # A code, the length of the text, and the text.
    _, length = struct.unpack(">ii", sink.getvalue()[:8])
    return sink.getvalue()[8 : 8 + length].decode()


OURS = errors.BadOption(option="columns", value="x", reason="a row has offset")
SENTENCE = "sparklog.errors.BadOption: Invalid option columns = 'x': a row has offset.\n"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("variable", ["PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SECRET"])
def test_a_worker_shows_the_sentence_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, late: bool
) -> None:
    """Errors of sparklog are shown without frames, wherever they are raised."""
    monkeypatch.setenv(variable, "1")
    assert told(OURS, late=late) == SENTENCE


@pytest.mark.parametrize("late", [False, True])
def test_other_errors_keep_their_frames(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """They are defects: where they come from is all that helps."""
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_PORT", "1")
    found = told(ZeroDivisionError("ouch"), late=late)
    assert found.startswith("Traceback")
    assert "test_spark_errors.py" in found


def test_outside_of_a_worker_nothing_is_hidden() -> None:
    """The switch is process-wide, and a user's own program continues after an error."""
    assert told(OURS).startswith("Traceback")
    assert not os.environ["SPARK_HIDE_TRACEBACK"]
