"""The logging configuration during a test, and the errors that brokers have logged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog


@contextmanager
def logging_restored() -> Iterator[None]:
    """Restores the configuration at its end. If there was none, brokers can choose one again."""
    was_configured, known = structlog.is_configured(), structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**known)
        if not was_configured:
            structlog.reset_defaults()


_ERROR: Final = re.compile(
    r"^.*(?:\[(?:error|critical) *\]|\"level\": \"(?:error|critical)\"|Exception in thread).*$",
    re.MULTILINE,
)


def errors_in(output: str) -> list[str]:
    """Returns brokers' error lines: text from this process, JSON from others."""
    return _ERROR.findall(output)
