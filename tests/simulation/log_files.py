"""Files of the write-ahead log in the simulation, as the kernel and a disk treat them.

Rules, beyond those of `sparklog.storage.objects.files`:

- One append holds the file's lock, and becomes visible in some steps, between which other tasks
  run. A process that dies there leaves a prefix.
- A full disk leaves any prefix of an append, or nothing.
- An append whose sync fails is visible and lost; later syncs succeed.
- A power cut keeps each page that was not durable, or leaves zeros or an old page of another file
  in its place, and ends the file anywhere beyond its durable bytes.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from sparklog.storage.objects.files import BLOCK_BYTES, Access, Appended
from sparklog.storage.objects.memory_files import MemoryFile, MemoryFiles, MemoryObject

if TYPE_CHECKING:
    from tests.simulation.faults import ProcessStore
    from tests.simulation.scheduler import Process

_STEPS = 3
"""Most steps in which an append becomes visible."""
_TORN_RATE = 0.3
"""Probabilities that lost pages have old bytes, and that the file ends somewhere else."""
_SECTOR_BYTES = 512
_TRAILER_BYTES = 16


class SimulatedFiles(MemoryFiles):
    """The files of the disk as one process sees them."""

    def __init__(self, store: ProcessStore) -> None:
        super().__init__(store.find_object, store.hooks)
        self.store = store

    def open(self, path: str, access: Access) -> MemoryFile:
        opened = super().open(path, access)
        return SimulatedFile(self, path, opened._object, access)


class SimulatedFile(MemoryFile):
    """One open file."""

    def __init__(
        self, files: SimulatedFiles, path: str, found: MemoryObject, access: Access
    ) -> None:
        super().__init__(files, path, found, access)
        self._store = files.store

    def _append(self, pieces: Sequence[memoryview], *, durable: bool) -> Appended:
        store, found, given = self._store, self._object, b"".join(pieces)
        store.hooks.before("append", self._path)
        with store.disk.locks.held(found.number, store.process):
            if store.is_full():
                given = given[: _cut(store.chance, len(given))]
                if not given:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            before = found.data.to_pybytes()
            if found.durable_bytes is None:
                found.durable_bytes = before
            for end in _steps(store.chance, len(given)):
                found.data = pa.py_buffer(before + given[:end])
                if end < len(given):
                    store.hooks.between("append", self._path)
            try:
                store.hooks.between("append", self._path)
            except OSError:
                self._lose(len(before))
                raise
            if durable:
                self._make_durable()
        store.hooks.after("append", self._path)
        return Appended(len(given), len(before) + len(given))

    def allocate(self, end: int) -> None:
        if self._store.is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)


class FileLocks:
    """The locks of files, each held by one append; they end with its process."""

    def __init__(self) -> None:
        self._holders: dict[int, Process] = {}

    def held(self, number: int, process: Process) -> _Held:
        return _Held(self._holders, number, process)


class _Held:
    def __init__(self, holders: dict[int, Process], number: int, process: Process) -> None:
        self._holders = holders
        self._number = number
        self._process = process

    def __enter__(self) -> None:
        while (holder := self._holders.get(self._number)) is not None and holder.alive:
            self._process.clock.sleep(0.001)
        self._holders[self._number] = self._process

    def __exit__(self, *_: object) -> None:
        self._holders.pop(self._number, None)


def _cut(chance: random.Random, length: int) -> int:
    """Returns how much of an append a full disk takes: often nothing, or nearly all."""
    few = min(length, _TRAILER_BYTES)
    return chance.choice([0, chance.randrange(length), length - 1 - chance.randrange(few)])


def _steps(chance: random.Random, length: int) -> list[int]:
    """Returns the lengths that are visible one after another; the last is all."""
    count = chance.choice([0, 0, *range(_STEPS)])
    return [*sorted(chance.randrange(length) for _ in range(count)), length]


# ------------------------------------------------------------------------------ power cuts


def undurable(objects: Mapping[str, MemoryObject]) -> dict[str, int]:
    """Returns the durable size of each file that has bytes beyond it, by path."""
    return {
        path: len(each.durable_bytes)
        for path, each in sorted(objects.items())
        if each.durable_bytes is not None and len(each.durable_bytes) < each.data.size
    }


def contents(objects: Mapping[str, MemoryObject]) -> dict[str, bytes]:
    """Returns the bytes of the log's files, by path."""
    return {
        path: each.data.to_pybytes()
        for path, each in sorted(objects.items())
        if path.endswith(".seg")
    }


def tear(
    objects: Mapping[str, MemoryObject],
    durable_bytes: Mapping[str, int],
    old: Mapping[str, bytes],
    chance: random.Random,
) -> None:
    """Makes a power cut worse: old bytes in lost pages, and ends within a page.

    The old bytes had the same place in another file: of all old bytes, those are taken for the
    file's own most easily.

    Args:
        objects: after the cut.
        durable_bytes: of the files that had more, before it.
        old: bytes that the disk may show, by the path of their file.
    """
    for path, durable in durable_bytes.items():
        found = objects.get(path)
        if found is None:
            continue
        content = bytearray(found.data.to_pybytes())
        others = [each for other, each in old.items() if other != path and len(each) > durable]
        if others and chance.random() < _TORN_RATE:
            other = chance.choice(others)
            first = -(-durable // BLOCK_BYTES) * BLOCK_BYTES
            for start in range(first, len(content), BLOCK_BYTES):
                page = other[start : start + min(BLOCK_BYTES, len(content) - start)]
                if not any(content[start : start + BLOCK_BYTES]):
                    content[start : start + len(page)] = page
        if len(content) > durable and chance.random() < _TORN_RATE:
            end = chance.randrange(durable, len(content))
            del content[max(durable, end // _SECTOR_BYTES * _SECTOR_BYTES) :]
        found.data = pa.py_buffer(bytes(content))
