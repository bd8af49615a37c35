"""Growing files in a `MemoryStore`, with every failure that `files` describes. For tests.

An append is visible immediately, and durable after a sync. Hooks run as in `memory`: for `append`
before its effect, between visible and durable, and after; for `sync` before and after. An OSError
from `between` is a failed sync: the bytes stay visible until `drop_cached`, but no sync saves them.
As on Linux, the next sync through each descriptor open at the time also fails, but not through
descriptors opened later.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from sparklog.storage.objects.base import ObjectMissing, SyncFailed, checked_path
from sparklog.storage.objects.faults import Faults
from sparklog.storage.objects.files import BLOCK_BYTES, Access, Appended, FileId


@dataclass(slots=True)
class MemoryObject:
    """An object of a `MemoryStore`."""

    data: pa.Buffer
    modified_us: int
    durable: bool = False
    flushed: bool = True
    """True if its bytes are durable; otherwise a power cut may leave it empty."""
    replaced: MemoryObject | None = None
    """The durable object that a power cut restores."""
    number: int = field(default_factory=itertools.count().__next__)
    """Its identity, like an inode number."""
    durable_bytes: bytes | None = None
    """The durable content of a file that has grown since the last power cut; None: all of it."""
    failed_syncs: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Byte ranges lost by a failed sync but still visible."""

    def make_durable(self) -> None:
        self.durable, self.replaced = True, None


class MemoryFiles:
    """Implements `LogFiles`."""

    def __init__(self, find: Callable[[str], MemoryObject | None], faults: Faults) -> None:
        """`find`: returns the object at a path. `faults`: the hooks of the store."""
        self._find = find
        self.faults = faults
        self.space_bytes: int | None = None
        """Space for appends; None: unlimited."""
        self.can_sync = True
        """False: this process cannot sync files."""

    def open(self, path: str, access: Access) -> MemoryFile:
        self.faults.before("open", checked_path(path))
        found = self._find(path)
        if found is None:
            raise ObjectMissing(path)
        self.faults.after("open", path)
        return MemoryFile(self, path, found, access)

    def identity(self, path: str) -> FileId | None:
        found = self._find(path)
        return None if found is None else FileId(0, found.number)

    def is_shared(self, path: str) -> bool:  # noqa: ARG002 - nothing has two names here
        return False


class MemoryFile:
    """Implements `LogFile`."""

    def __init__(self, files: MemoryFiles, path: str, found: MemoryObject, access: Access) -> None:
        self._files = files
        self._path = path
        self._object = found
        self._access = access
        self._failed_syncs = found.failed_syncs
        """Failed syncs that this descriptor has reported, or that preceded it."""
        self.identity = FileId(0, found.number)

    def size_bytes(self) -> int:
        return self._object.data.size

    def read(self, start: int, length: int) -> bytes:
        data = self._object.data
        start = min(start, data.size)
        return data.slice(start, min(length, data.size - start)).to_pybytes()

    def append(self, pieces: Sequence[memoryview]) -> Appended:
        assert self._access is not Access.READ
        return self._append(pieces, durable=self._access is Access.WRITE)

    def append_part(self, pieces: Sequence[memoryview]) -> Appended:
        assert self._access is Access.WRITE
        assert sum(map(len, pieces)) % BLOCK_BYTES == 0
        return self._append(pieces, durable=False)

    def _append(self, pieces: Sequence[memoryview], *, durable: bool) -> Appended:
        faults, given = self._files.faults, b"".join(pieces)
        faults.before("append", self._path)
        room = self._files.space_bytes
        if room is not None:
            if given and not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            given = given[:room]
            self._files.space_bytes = room - len(given)
        found = self._object
        before = found.data.to_pybytes()
        if found.durable_bytes is None:
            found.durable_bytes = before
        found.data = pa.py_buffer(before + given)
        try:
            faults.between("append", self._path)
        except OSError:
            self._lose(len(before))
            raise
        if durable:
            self._make_durable()
        faults.after("append", self._path)
        return Appended(len(given), len(before) + len(given))

    def sync(self) -> bool:
        if not self._files.can_sync:
            return False
        faults = self._files.faults
        try:
            try:
                faults.before("sync", self._path)
            except OSError:
                durable = self._object.durable_bytes
                if durable is not None:
                    self._lose(len(durable))
                raise
            self._make_durable()
        except OSError as error:
            raise SyncFailed(self._path, str(error)) from error
        faults.after("sync", self._path)
        return True

    def _lose(self, start: int) -> None:
        """Simulates a failed sync of the bytes from `start` on, reported by this descriptor."""
        self._object.lost.append((start, self._object.data.size))
        self._object.failed_syncs += 1
        self._failed_syncs = self._object.failed_syncs

    def _make_durable(self) -> None:
        """Makes all bytes durable except lost ones. Raises OSError if another sync has failed."""
        self._object.durable_bytes = _zeroed(self._object)
        if self._failed_syncs != self._object.failed_syncs:
            self._failed_syncs = self._object.failed_syncs
            raise OSError(errno.EIO, os.strerror(errno.EIO), self._path)

    def drop_cached(self, start: int = 0, length: int = 0) -> None:
        found = self._object
        end = start + length if length else found.data.size
        content, kept = bytearray(found.data.to_pybytes()), []
        for first, last in found.lost:
            low, high = max(first, start), min(last, end)
            if low >= high:
                kept.append((first, last))
                continue
            content[low:high] = bytes(high - low)
            kept += [(first, low)] * (first < low) + [(high, last)] * (high < last)
        found.data, found.lost = pa.py_buffer(bytes(content)), kept

    def allocate(self, end: int) -> None:
        room = self._files.space_bytes
        if room is not None and end - self._object.data.size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def close(self) -> None:
        """Does nothing: an open file holds only its object."""


def cut_power(found: MemoryObject, path: str, choose: Callable[[str], bool]) -> None:
    """Loses the non-durable pages of a file that are chosen; all others become durable.

    A lost page before one that survives reads as zeros.
    """
    durable = found.durable_bytes
    if durable is None:
        return
    content, kept = bytearray(_zeroed(found)), len(durable)
    start = len(durable)
    while start < len(content):
        end = min(start // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES, len(content))
        if choose(path):
            content[start:end] = bytes(end - start)
        else:
            kept = end
        start = end
    found.data, found.durable_bytes = pa.py_buffer(bytes(content[:kept])), None
    found.lost.clear()


def _zeroed(found: MemoryObject) -> bytes:
    """Returns the content, with zeros for the bytes that a failed sync has lost."""
    content = bytearray(found.data.to_pybytes())
    for start, end in found.lost:
        content[start:end] = bytes(end - start)
    return bytes(content)
