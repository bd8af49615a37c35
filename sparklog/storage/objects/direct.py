"""Writing past the page cache (`O_DIRECT`), for objects so large that the copy into it is dear.

Through the cache, bytes cost a fresh page each, whether anybody reads them again or not: a quarter
of all that a burst costs. Of large objects few are read soon, because consumers and the publisher
have their rows in memory; whoever reads one pays for its pages then.

The kernel wants addresses, lengths and places in the file that are multiples of a block. So bytes
go through a buffer that is, and what is left after the last whole block goes through the cache.
A file system that has no direct writing, or wants larger blocks, gets all of it through the cache.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from sparklog import limits

_BLOCK_BYTES: Final = 4_096
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_BUFFERS_PER_CALL: Final = os.sysconf("SC_IOV_MAX")

_Bytes = npt.NDArray[np.uint8]
_idle: deque[_Bytes] = deque(maxlen=limits.DIRECT_BUFFERS_KEPT)


def write(file: int, views: list[memoryview]) -> None:
    """Writes `views` to `file`, which is empty; directly where that is worth it. Raises OSError."""
    if sum(map(len, views)) < limits.DIRECT_WRITE_BYTES or not _turn(file, on=True):
        _write_cached(file, views)
        return
    try:
        buffer = _idle.pop()
    except IndexError:
        buffer = _new_buffer()
    try:
        _write_through(file, views, buffer)
    finally:
        _idle.append(buffer)


def _new_buffer() -> _Bytes:
    # Private: what Python takes by default, a process and its forks would write into together.
    pages = mmap.mmap(-1, limits.DIRECT_BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _write_through(file: int, views: list[memoryview], buffer: _Bytes) -> None:
    filled = 0
    for view in views:
        data = np.frombuffer(view, np.uint8)
        while len(data):
            count = min(len(data), len(buffer) - filled)
            buffer[filled : filled + count] = data[:count]  # without Python's lock
            filled += count
            data = data[count:]
            if filled == len(buffer):
                _write_blocks(file, buffer)
                filled = 0
    whole = filled // _BLOCK_BYTES * _BLOCK_BYTES
    _write_blocks(file, buffer[:whole])
    if filled > whole:
        _turn(file, on=False)
        _write_cached(file, [buffer[whole:filled].data])


def _write_blocks(file: int, blocks: _Bytes) -> None:
    try:
        written = os.write(file, blocks.data) if len(blocks) else 0
    except OSError:
        if not _turn(file, on=False):
            raise
        written = 0  # nothing of it: what is wrong, besides the size of blocks, shows up again
    if written < len(blocks):
        _turn(file, on=False)
        _write_cached(file, [blocks[written:].data])


def _turn(file: int, *, on: bool) -> bool:
    """Whether direct writing was turned on, or off; False where it is not to be had."""
    try:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return _O_DIRECT != 0


def _write_cached(file: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.writev(file, views[first : first + _BUFFERS_PER_CALL])
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
