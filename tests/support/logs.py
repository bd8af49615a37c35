"""The logging configuration of a test, and what brokers have logged meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog


@contextmanager
def logging_restored() -> Iterator[None]:
    """Restores the configuration at its end, and that there was none: brokers then choose one."""
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
    """The lines of errors of brokers in this process, as text, and in others, as JSON."""
    return _ERROR.findall(output)
