"""The broker's log lines: on standard error or in a file, coloured for people or JSON for machines.

A log file is bounded: once it reaches `LOG_FILE_BYTES` it is renamed to `<name>.1`, which is
renamed to `<name>.2`, and the oldest is removed. A logger must not stop a broker, so lines that
cannot be written are lost.

The level can change while the process runs. A program that embeds a broker may have configured
structlog itself; the level is then the program's, and is not changed here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

from sparklog import errors, limits
from sparklog.settings import LogSettings

LOG_FILE_BYTES = 10 * limits.MIB  # of a log file before it is rotated
_LOG_FILES_KEPT = 3  # older log files

_CLASSES: Final = {
    level: structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
    for level in ("debug", "info", "warning", "error")
}
"""The logger class for each minimum level."""
_audit = structlog.wrap_logger(
    None, wrapper_class=_CLASSES["debug"], logger_factory_args=("sparklog.logging",)
)
"""Writes whatever the level is."""
NOT_OURS: Final = "the program that runs this broker has configured its logging itself"
"""The reason why the level cannot be changed if `level` returns None."""


def configure(settings: LogSettings, *, broker_id: int | None = None) -> LogFile | None:
    """Configures structlog, for a process that has not configured it itself.

    `broker_id`, if given, is in every line, because several brokers write to the same place.
    Returns the log file, if any. Raises `BadOption` if it cannot be written.
    """
    in_file = LogFile(Path(settings.file)) if settings.file else None
    to_terminal = in_file is None and sys.stderr.isatty()
    as_console = settings.format == "console" or (settings.format == "auto" and to_terminal)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=to_terminal)
        if as_console
        else structlog.processors.JSONRenderer()
    )
    name_broker: list[structlog.typing.Processor] = []
    if broker_id is not None:
        name_broker = [lambda _logger, _method, line: {"broker_id": broker_id, **line}]
    structlog.configure(
        processors=[
            *name_broker,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=_CLASSES[settings.level],
        logger_factory=_LoggerFactory(cast("TextIO", in_file or _StandardError())),
        cache_logger_on_first_use=False,
    )
    return in_file


class _LoggerFactory:
    """Creates the loggers of our configuration, and identifies it as ours.

    A line and its newline are one write, because several brokers write to the same place.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, *_name: object) -> structlog.WriteLogger:
        return structlog.WriteLogger(self._file)


def level() -> str | None:
    """Returns the minimum level of written lines; None if a program has configured logging."""
    found = structlog.get_config()
    if not isinstance(found["logger_factory"], _LoggerFactory):
        return None
    classes = (name for name, each in _CLASSES.items() if each is found["wrapper_class"])
    return next(classes, None)


def set_level(wanted: str, *, client: str) -> None:
    """Changes the level of this process until it ends, and logs the client that asked for it.

    The line is written whatever the level is. Does nothing if `level` returns None.
    """
    before = level()
    if before is None:
        return
    structlog.configure(**{**structlog.get_config(), "wrapper_class": _CLASSES[wanted]})
    _audit.info("altered the log level", before=before, now=wanted, client=client)


def is_debug() -> bool:
    """Returns whether lines at level DEBUG are written; cheaper than logging a suppressed one."""
    found = structlog.get_config()
    return found["wrapper_class"] is _CLASSES["debug"] and isinstance(
        found["logger_factory"], _LoggerFactory
    )


class _StandardError:
    """The standard error of the process, which may be a terminal that has since been closed.

    Looked up for each line: a program with an embedded broker may replace it.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class LogFile:
    """An append-only text file of bounded size. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises `BadOption` if it cannot be opened for writing."""
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
        """Appends text, rotating the file first if it would grow too large."""
        data = text.encode("utf-8", "backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(self._file).st_size + len(data) > LOG_FILE_BYTES:
                self._rotate()
            os.write(self._file, data)
        return len(text)

    def flush(self) -> None:
        """Does nothing: `write` does not buffer."""

    def _rotate(self) -> None:
        for number in range(_LOG_FILES_KEPT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number).rename(self._numbered(number + 1))
        # Another process may have just rotated them; then its new file is renamed, and nothing
        # lost.
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
        """Redirects the standard error of this process, libraries included, to the file."""
        self._holds_stderr = True
        os.dup2(self._file, 2)
