"""Processes of this machine, as listed by Linux in /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
# Indexes among the fields of /proc/…/stat after the state.
_PARENT, _SESSION = 0, 2


def _fields(pid: int) -> list[int] | None:
    """Returns a process's fields after its state; None if it has ended or is a zombie."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        state, *numbers = stat.rpartition(")")[2].split()
        return None if state in "ZX" else [int(each) for each in numbers]
    return None


def is_running(pid: int) -> bool:
    """Returns true if the process is running; a zombie is not."""
    return _fields(pid) is not None


def children_of(parent: int) -> list[int]:
    """Returns the running processes that were started by this process itself."""
    return _with(_PARENT, parent)


def processes_of(session: int) -> list[int]:
    """Returns the running processes of a session."""
    return _with(_SESSION, session)


def _with(field: int, value: int) -> list[int]:
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [pid for pid in pids if (fields := _fields(pid)) is not None and fields[field] == value]


def arguments(pid: int) -> list[str]:
    """Returns the words of the process's command; none if it has ended."""
    with suppress(OSError):
        return [
            os.fsdecode(each) for each in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
    return []


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    (line,) = (each for each in status.splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


class Peak:
    """The peak memory of a process while it is watched, and its growth since the start."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.began_bytes = self.most_bytes = resident_bytes(pid)

    @property
    def appended_bytes(self) -> int:
        return self.most_bytes - self.began_bytes

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """Polls every few milliseconds until the block ends."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.005):
                self.most_bytes = max(self.most_bytes, resident_bytes(self._pid))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield self
        finally:
            ended.set()
            watching.join()
