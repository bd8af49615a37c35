"""The memory of a process, as Linux counts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    (line,) = (each for each in status.splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most that a process has had in memory while it was watched, above where it began."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.began_bytes = self.most_bytes = resident_bytes(pid)

    @property
    def appended_bytes(self) -> int:
        return self.most_bytes - self.began_bytes

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """Looks every few milliseconds until the block ends."""
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
