"""Writes that bypass the page cache (`O_DIRECT`), for objects too large to copy into it cheaply.

Bytes written through the cache take fresh pages even if they are never read: a quarter of the cost
of a burst. Few large objects are read soon, because consumers and the publisher have their rows in
memory; a later reader pays for the pages it reads.

The kernel requires addresses, lengths and file positions to be multiples of a block. So bytes go
through an aligned buffer, and those after the last whole block through the cache. On a file system
without direct I/O, or with larger blocks, everything goes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sparklog import limits

_DIRECT_BUFFERS_KEPT = 4

_BLOCK_BYTES: Final = 4_096
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_BUFFERS_PER_CALL: Final = os.sysconf("SC_IOV_MAX")

_Bytes = npt.NDArray[np.uint8]
_idle: deque[_Bytes] = deque(maxlen=_DIRECT_BUFFERS_KEPT)


def write(file: int, views: list[memoryview]) -> None:
    """Writes `views` to the empty `file`; directly if that pays off. Raises OSError."""
    if sum(map(len, views)) < limits.DIRECT_WRITE_BYTES or not _set_direct(file, on=True):
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


def write_blocks(file: int, views: Sequence[memoryview]) -> int | None:
    """Writes whole blocks, at most one buffer's worth, to a file opened for direct I/O.

    Returns the number of bytes written, or None if the file system rejects direct writes of this
    size or at this position. Raises OSError.
    """
    try:
        buffer = _idle.pop()
    except IndexError:
        buffer = _new_buffer()
    try:
        filled = 0
        for view in views:
            buffer[filled : filled + len(view)] = np.frombuffer(view, np.uint8)
            filled += len(view)
        return os.write(file, buffer[:filled].data)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    finally:
        _idle.append(buffer)


def _new_buffer() -> _Bytes:
    # MAP_PRIVATE: with Python's default, a process and its forks would share the buffer.
    pages = mmap.mmap(-1, limits.DIRECT_BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def _write_through(file: int, views: list[memoryview], buffer: _Bytes) -> None:
    filled = 0
    for view in views:
        data = np.frombuffer(view, np.uint8)
        while len(data):
            count = min(len(data), len(buffer) - filled)
            buffer[filled : filled + count] = data[:count]  # releases the GIL
            filled += count
            data = data[count:]
            if filled == len(buffer):
                _write_blocks(file, buffer)
                filled = 0
    whole = filled // _BLOCK_BYTES * _BLOCK_BYTES
    _write_blocks(file, buffer[:whole])
    if filled > whole:
        _set_direct(file, on=False)
        _write_cached(file, [buffer[whole:filled].data])


def _write_blocks(file: int, blocks: _Bytes) -> None:
    try:
        written = os.write(file, blocks.data) if len(blocks) else 0
    except OSError:
        if not _set_direct(file, on=False):
            raise
        written = 0  # if the block size was not the cause, the cached write fails as well
    if written < len(blocks):
        _set_direct(file, on=False)
        _write_cached(file, [blocks[written:].data])


def _set_direct(file: int, *, on: bool) -> bool:
    """Turns direct I/O on or off. Returns False if the file does not support it."""
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
