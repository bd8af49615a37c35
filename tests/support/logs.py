"""The logging configuration of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
