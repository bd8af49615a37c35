"""The broker's log lines: on standard error or in a file, coloured for people or JSON for machines.

A file is bounded: when it has grown to `limits.LOG_FILE_BYTES` it becomes `<name>.1`, which becomes
`<name>.2`, and the oldest goes. A logger must not stop a broker, so what cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from sparklog import errors, limits
from sparklog.settings import LogSettings


def configure(settings: LogSettings) -> LogFile | None:
    """For a process that is a broker, or holds one and has not configured structlog itself.

    Returns the log file, if there is one. Raises `BadOption` where it cannot be written.
    """
    in_file = LogFile(Path(settings.file)) if settings.file else None
    to_terminal = in_file is None and sys.stderr.isatty()
    as_console = settings.format == "console" or (settings.format == "auto" and to_terminal)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=to_terminal)
        if as_console
        else structlog.processors.JSONRenderer()
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
        logger_factory=lambda *_: structlog.PrintLogger(cast("TextIO", in_file or sys.stderr)),
        cache_logger_on_first_use=False,
    )
    return in_file


class LogFile:
    """A text file that is appended to, of bounded size. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises `BadOption` where it cannot be opened for writing."""
        self._path = path
        self._lock = threading.Lock()
        self._holds_stderr = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            reason = f"{error}; name a file that can be written"
            raise errors.BadOption(option="log.file", value=str(path), reason=reason) from error

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(self._file).st_size + len(data) > limits.LOG_FILE_BYTES:
                self._rotate()
            os.write(self._file, data)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def _rotate(self) -> None:
        for number in range(limits.LOG_FILES_KEPT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number).rename(self._numbered(number + 1))
        # Another process may have done so just now; then its new file is moved, and nothing lost.
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._numbered(1))
        old = self._file
        self._open()
        os.close(old)
        if self._holds_stderr:
            self.take_stderr()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def take_stderr(self) -> None:
        """Sends to the file what this process, libraries included, writes to standard error."""
        self._holds_stderr = True
        os.dup2(self._file, 2)
