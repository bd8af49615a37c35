"""The lines of errors that the tests of other clients look for in what brokers have logged."""

from __future__ import annotations

import io
from typing import Literal

import pytest
import structlog

from sparklog.broker.logging import configure
from sparklog.settings import LogSettings
from tests.support.logs import errors_in, logging_restored


@pytest.mark.parametrize("form", ["console", "json"])
def test_errors_are_found_in_the_log_of_a_broker(
    form: Literal["console", "json"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors and exceptions count, and a warning about an error does not."""
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    with logging_restored():
        configure(LogSettings(format=form))
        logger = structlog.get_logger("sparklog.test")
        logger.warning("an error of a client", reason="error")
        assert errors_in(output.getvalue()) == []
        logger.error("cannot write")
        try:
            raise KeyError("last")
        except KeyError:
            logger.exception("a connection is closed")
    first, second = errors_in(output.getvalue())
    assert "cannot write" in first
    assert "a connection is closed" in second
