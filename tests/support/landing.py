"""Puts of a broker's log that take effect when a test says so."""

from __future__ import annotations

import threading

from sparklog.storage.objects import NoFaults
from sparklog.storage.objects.faults import Operation

OURS = "wal/1/0000000001"
"""The folder of the first epoch of broker 1."""


class Landing(NoFaults):
    """Puts of the log that take effect when a test says so, in any order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: list[int] = []
        """Sequences whose put has been issued; each attempt counts."""
        self._allowed: dict[int, BaseException | None] = {}
        self._all_allowed = False

    def before(self, operation: Operation, path: str, /) -> None:
        folder, _, name = path.rpartition("/")
        if operation != "put_new" or folder != OURS or not name.isdigit():
            return
        sequence = int(name)
        with self.changed:
            self.arrived.append(sequence)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self._all_allowed or sequence in self._allowed, 10)
            error = self._allowed.get(sequence)
            if error is not None:
                del self._allowed[sequence]  # the next attempt waits again
                raise error

    def allow(self, sequence: int, error: BaseException | None = None) -> None:
        """Lets the put of that sequence take effect, or fail."""
        with self.changed:
            self._allowed[sequence] = error
            self.changed.notify_all()

    def allow_all(self) -> None:
        """Lets all puts take effect from now on."""
        with self.changed:
            self._all_allowed = True
            self.changed.notify_all()

    def wait_for_count(self, count: int) -> None:
        """Waits until this many puts have been issued."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.arrived) >= count, 10)

    def wait_for(self, *sequences: int) -> None:
        """Waits until these puts, and no others, have been issued, in any order."""
        self.wait_for_count(len(sequences))
        assert sorted(self.arrived) == list(sequences)
