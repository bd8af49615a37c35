"""Growing files of a local root, built on system calls. `files` defines the contract.

- O_APPEND makes concurrent appends atomic: the kernel chooses the position and writes under the
  inode lock. After the write, the position of the descriptor is the end of the bytes.
- O_DSYNC makes a write durable before it returns, including the size, in one call.
- FALLOC_FL_KEEP_SIZE reserves blocks beyond the end, so that an append does not change the
  allocation and its sync does not write to the journal. Python does not expose it, and
  posix_fallocate(3) changes the size.
- On macOS, O_DSYNC does not reach the disk, so an append is followed by F_FULLFSYNC.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from sparklog import errors
from sparklog.storage.objects import direct
from sparklog.storage.objects.base import ObjectMissing, SyncFailed
from sparklog.storage.objects.files import Access, Appended, FileId
from sparklog.storage.objects.mounts import file_system, is_unsuited

_IS_MAC: Final = sys.platform == "darwin"
_CLOEXEC: Final = os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
_DSYNC: Final = 0 if _IS_MAC else os.O_DSYNC
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE: Final = 1
_PIECES_PER_CALL: Final = os.sysconf("SC_IOV_MAX")
_CANNOT_ALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_CANNOT_SYNC: Final = (errno.EBADF, errno.EINVAL, errno.EROFS, errno.EACCES, errno.EPERM)


class LocalFiles:
    """Implements `LogFiles` below a folder."""

    def __init__(self, root: str, requests: Counter[str]) -> None:
        """`requests` counts the operations by name."""
        self._root = root
        self._requests = requests
        self._can_sync: bool | None = None
        """False: a sync on this machine does not reach the disk. None: not known yet."""

    def open(self, path: str, access: Access) -> LocalFile:
        full_path = f"{self._root}/{path}"
        self._requests["open"] += 1
        try:
            return LocalFile(path, full_path, access, self._requests, can_sync=self._reaches_disk())
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(path) from None
        except PermissionError as error:
            reason = (
                f"{path} cannot be opened: {error}. A broker appends to the files of its"
                " predecessor: run both as the same user, or give this one write permission on them"
            )
            raise errors.RootNotWritable(root=f"file://{self._root}", reason=reason) from error

    def _reaches_disk(self) -> bool:
        """Returns whether a sync reaches the disk; on a network mount it may not."""
        if self._can_sync is None:
            self._can_sync = not is_unsuited(file_system(self._root))
        return self._can_sync

    def identity(self, path: str) -> FileId | None:
        try:
            found = os.stat(f"{self._root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileId(found.st_dev, found.st_ino)

    def is_shared(self, path: str) -> bool:
        try:
            return os.stat(f"{self._root}/{path}").st_nlink > 1
        except (FileNotFoundError, NotADirectoryError):
            return False


class LocalFile:
    """Implements `LogFile`."""

    def __init__(
        self,
        path: str,
        full_path: str,
        access: Access,
        requests: Counter[str],
        *,
        can_sync: bool,
    ) -> None:
        self._path = path
        self._requests = requests
        self._can_sync = can_sync
        self._read = self._append = self._direct = -1
        try:
            self._read = os.open(full_path, os.O_RDONLY | _CLOEXEC)
            self.identity = _identity(self._read)
            if access is Access.WRITE:
                self._append = self._open_again(full_path, _APPEND | _DSYNC)
                if _DIRECT:
                    with contextlib.suppress(OSError):
                        self._direct = self._open_again(full_path, _APPEND | _DIRECT)
            elif access is Access.FENCE:
                self._append = self._open_again(full_path, _APPEND)
        except BaseException:
            self.close()
            raise
        self._syncs_appends = access is Access.WRITE and _IS_MAC

    def _open_again(self, full_path: str, flags: int) -> int:
        descriptor = os.open(full_path, flags)
        if _identity(descriptor) != self.identity:
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "the file was replaced", full_path)
        return descriptor

    def size_bytes(self) -> int:
        return os.fstat(self._read).st_size

    def read(self, start: int, length: int) -> bytes:
        self._requests["read"] += 1
        data = os.pread(self._read, length, start)
        if len(data) == length or not data:
            return data
        parts = [data]
        start, length = start + len(data), length - len(data)
        while length and (data := os.pread(self._read, length, start)):
            parts.append(data)
            start, length = start + len(data), length - len(data)
        return b"".join(parts)

    def append(self, pieces: Sequence[memoryview]) -> Appended:
        self._requests["append"] += 1
        written = os.writev(self._append, _few(pieces))
        end = os.lseek(self._append, 0, os.SEEK_CUR)
        if self._syncs_appends:
            _full_sync(self._append)
        return Appended(written, end)

    def append_part(self, pieces: Sequence[memoryview]) -> Appended:
        self._requests["append"] += 1
        descriptor = self._direct
        if descriptor >= 0:
            written = direct.write_blocks(descriptor, pieces)
            if written is None:  # the file system rejects it after all
                os.close(descriptor)
                self._direct = descriptor = -1
        if descriptor < 0:
            descriptor = self._append
            written = os.writev(descriptor, _few(pieces))
        assert written is not None
        return Appended(written, os.lseek(descriptor, 0, os.SEEK_CUR))

    def sync(self) -> bool:
        if not self._can_sync:
            return False
        self._requests["sync"] += 1
        try:
            _full_sync(self._read) if _IS_MAC else os.fdatasync(self._read)
        except OSError as error:
            if error.errno in _CANNOT_SYNC:
                return False
            raise SyncFailed(self._path, f"flush of its bytes: {error}") from error
        return True

    def drop_cached(self, start: int = 0, length: int = 0) -> None:
        if hasattr(os, "posix_fadvise"):
            # Partial pages are not dropped, and on some machines a page is many blocks.
            first = start - start % mmap.PAGESIZE
            if length:
                length = -(-(start + length) // mmap.PAGESIZE) * mmap.PAGESIZE - first
            with contextlib.suppress(OSError):  # advice that some file systems reject
                os.posix_fadvise(self._read, first, length, os.POSIX_FADV_DONTNEED)

    def allocate(self, end: int) -> None:
        start = self.size_bytes()
        if end > start and _fallocate is not None:
            failed = _fallocate(self._append, start, end - start)
            if failed and failed not in _CANNOT_ALLOCATE:
                raise OSError(failed, os.strerror(failed), self._path)

    def close(self) -> None:
        for descriptor in (self._read, self._append, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._append = self._direct = -1

    def __del__(self) -> None:
        self.close()


def _identity(descriptor: int) -> FileId:
    found = os.fstat(descriptor)
    return FileId(found.st_dev, found.st_ino)


def _few(pieces: Sequence[memoryview]) -> Sequence[memoryview]:
    """Returns the pieces, joined if they are too many for one call."""
    if len(pieces) <= _PIECES_PER_CALL:
        return pieces
    return [memoryview(b"".join(pieces))]


def _full_sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def _load_fallocate() -> Callable[[int, int, int], int] | None:
    """Returns fallocate(2) with KEEP_SIZE, which returns 0 or an errno; None if unavailable."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int

    def fallocate(descriptor: int, start: int, length: int) -> int:
        done = call(descriptor, _KEEP_SIZE, start, length)
        return 0 if done == 0 else ctypes.get_errno()

    return fallocate


_fallocate: Final = _load_fallocate()
