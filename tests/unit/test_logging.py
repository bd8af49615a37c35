from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import msgspec
import pytest
import structlog

from sparklog.broker.logging import configure
from sparklog.settings import LogSettings


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a test configures does not outlive it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_lines_follow_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that has written before writes to where standard error is now, a line of JSON."""
    configure(LogSettings(format="json", level="info"))
    log = structlog.get_logger("sparklog.test")
    for number in range(2):
        error = io.StringIO()
        monkeypatch.setattr(sys, "stderr", error)
        log.info("serving", number=number)
        log.debug("nobody asked for this")
        line = msgspec.json.decode(error.getvalue())
        assert (line["event"], line["number"], line["level"]) == ("serving", number, "info")
        error.close()
