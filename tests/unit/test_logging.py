from __future__ import annotations

import errno
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from sparklog import errors
from sparklog.broker import logging
from sparklog.broker.logging import LogFile, configure
from sparklog.settings import LogSettings
from tests.support.logs import logging_restored


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restores the logging configuration after each test."""
    with logging_restored():
        yield


def test_lines_follow_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that has written before writes to where standard error is now, a line of JSON."""
    configure(LogSettings(format="json", level="info"))
    log = structlog.get_logger("sparklog.test")
    for number in range(2):
        error = io.StringIO()
        monkeypatch.setattr(sys, "stderr", error)
        log.info("serving", number=number)
        log.debug("below the level")
        line = msgspec.json.decode(error.getvalue())
        assert (line["event"], line["number"], line["level"]) == ("serving", number, "info")
        error.close()


def test_lines_of_several_brokers_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line names its broker where several write to one place, and no broker otherwise."""
    for broker_id in (2, None):
        configure(LogSettings(format="json", level="info"), broker_id=broker_id)
        structlog.get_logger("sparklog.test").info("serving")
    first, second = map(msgspec.json.decode, capsys.readouterr().err.splitlines())
    assert (first["broker_id"], first["event"]) == (2, "serving")
    assert "broker_id" not in second


def test_the_level_changes_while_the_process_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Loggers that exist follow it, and the change is logged with its client at any level."""
    configure(LogSettings(format="json", level="error"), broker_id=2)
    log = structlog.get_logger("sparklog.test")
    seen = []
    for level in ("debug", "warning", "error"):
        logging.set_level(level, client="'ops' at 127.0.0.1")
        seen.append((logging.level(), logging.is_debug()))
        log.debug("at debug")
        log.warning("at warning")
    assert seen == [("debug", True), ("warning", False), ("error", False)]
    lines = [*map(msgspec.json.decode, capsys.readouterr().err.splitlines())]
    change = {"broker_id": 2, "event": "altered the log level", "client": "'ops' at 127.0.0.1"}
    assert lines[0].items() >= {**change, "before": "error", "now": "debug"}.items()
    events = [each["event"] for each in lines]
    altered = change["event"]
    assert events == [altered, "at debug", "at warning", altered, "at warning", altered]


def test_a_program_keeps_the_level_that_it_has_configured() -> None:
    """Logging of a program with a broker of its own is not changed by clients of the broker."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(20))
    before = structlog.get_config()
    assert (logging.level(), logging.is_debug()) == (None, False)
    logging.set_level("debug", client="c")
    assert structlog.get_config() == before


def test_a_closed_terminal_stops_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that standard error does not take any more are lost, without an error."""

    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    configure(LogSettings(format="json", level="info"))
    monkeypatch.setattr(sys, "stderr", Closed())
    structlog.get_logger("sparklog.test").info("stopping")


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of brokers that write to one place do not get into each other."""
    written: list[str] = []
    monkeypatch.setattr(LogFile, "write", lambda _file, text: written.append(text))
    configure(LogSettings(file=str(tmp_path / "broker.log"), format="json", level="info"))
    structlog.get_logger("sparklog.test").info("serving")
    (line,) = written
    assert line.endswith("}\n")


def test_a_log_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is full becomes the first of the older ones, of which the oldest goes."""
    monkeypatch.setattr("sparklog.broker.logging.LOG_FILE_BYTES", 2_000)
    path = tmp_path / "new" / "broker.log"
    assert configure(LogSettings(file=str(path), format="json", level="info")) is not None
    log = structlog.get_logger("sparklog.test")
    for number in range(400):
        log.info("serving", number=number)
    files = sorted(path.parent.iterdir())
    assert [each.name for each in files] == ["broker.log", *(f"broker.log.{n}" for n in (1, 2, 3))]
    assert all(each.stat().st_size <= 2_000 for each in files)
    newest = [msgspec.json.decode(line)["number"] for line in path.read_bytes().splitlines()]
    before = [msgspec.json.decode(line)["number"] for line in files[1].read_bytes().splitlines()]
    assert newest[-1] == 399
    assert before[-1] + 1 == newest[0]


def test_a_log_file_takes_what_libraries_say(tmp_path: Path) -> None:
    """Messages of libraries to standard error are in the log file too, also after a rotation."""
    path = tmp_path / "broker.log"
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sparklog.broker import logging\n"
        "from sparklog.broker.logging import LogFile\n"
        "logging.LOG_FILE_BYTES = 100\n"
        "file = LogFile(Path(sys.argv[1]))\n"
        "file.take_stderr()\n"
        "os.write(2, b'one\\n')\n"
        "file.write('x' * 99 + '\\n')\n"
        "os.write(2, b'two\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    assert path.with_name("broker.log.1").read_text() == "one\n"
    assert path.read_text() == "x" * 99 + "\ntwo\n"


def test_a_log_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The setting and the file are in the error."""
    (tmp_path / "file").touch()
    with pytest.raises(errors.BadOption) as refused:
        configure(LogSettings(file=str(tmp_path / "file" / "broker.log")))
    assert refused.value.option == "log.file"
