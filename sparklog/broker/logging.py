"""The broker's log lines on standard error: coloured for people, and JSON for machines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from sparklog.settings import LogSettings


def configure(settings: LogSettings) -> None:
    """For a process that is a broker, or holds one and has not configured structlog itself."""
    as_console = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.level.upper()]
        ),
        # Looked up for each line: a program that holds a broker may change its standard error.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
