"""Tracks the parts of a table that may not be durable, or may be overwritten. Pure.

Other engines do not flush: delta-rs writes data files and commits that a power cut may leave empty.
On a store that is not local, they may also overwrite commits, because not all of them write commits
with a conditional put.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import crc32c
import pyarrow as pa

from sparklog.storage.table.delta_log import Add
from sparklog.storage.table.names import is_our_file


class Unsynced(NamedTuple):
    """Paths of a version of a table that may not be durable yet."""

    version: int
    files: list[str]
    log: list[str]


class SyncState:
    """The commits, checkpoints and data files of the replayed state that may not be durable."""

    def __init__(self) -> None:
        self.is_synced = False
        self.version = -1
        """The version up to which the replayed commits are durable."""
        self.base: list[str] = []
        """The paths of the checkpoint from which the replay started."""
        self._files: set[str] = set()
        """Data files that other engines have added, percent-decoded."""

    def restart(self, version: int, base: Iterable[str]) -> None:
        """Notes that the state is that of the checkpoint with the paths `base`."""
        self.is_synced, self.version, self.base = False, version, [*base]
        self._files.clear()

    def note_files(self, adds: Sequence[Add]) -> None:
        """Notes the data files that other engines have added."""
        paths = (unquote(add.path) for add in adds)
        self._files.update(path for path in paths if not is_our_file(path))

    def files(self, active: Collection[str]) -> list[str]:
        """Returns the `active` files that may not be durable."""
        return sorted(path for path in self._files if path in active)

    def note_synced(self, version: int) -> None:
        """Notes that everything up to a version is durable."""
        self.is_synced, self.version = True, version
        self._files.clear()
        self.base.clear()


class ReadBacks:
    """Commits to read back: ours, and those that remove files.

    `may_differ`: False on a store where no engine can overwrite a commit; none is noted then.
    """

    def __init__(self, *, may_differ: bool) -> None:
        self._may_differ = may_differ
        self._noted: dict[int, tuple[int, float]] = {}
        """By version: the CRC32C, and the monotonic time at which the commit was put or read."""

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, version: int, data: pa.Buffer | bytes, now: float) -> None:
        if self._may_differ:
            self._noted[version] = crc32c.crc32c(data), now

    def due(self, until: float | None) -> dict[int, tuple[int, float]]:
        """Returns the commits that were noted by `until`, or all if it is None."""
        return {
            version: each
            for version, each in sorted(self._noted.items())
            if until is None or each[1] <= until
        }

    def confirmed(self, noted: dict[int, tuple[int, float]], until: float) -> None:
        """Forgets commits that were read back, unless younger than `until` or noted again."""
        for version, each in noted.items():
            if each[1] <= until and self._noted.get(version) == each:
                del self._noted[version]

    def clear(self) -> None:
        self._noted.clear()
