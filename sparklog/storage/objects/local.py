"""The store that is a folder of this machine, told in system calls.

Rules of this room:

- An object is written under a hidden name in its own folder, flushed, linked to its name, and the
  folder is flushed: four steps, in this order. `link` refuses a name that is taken, atomically.
- Everything of one put goes through one descriptor of the folder, so that a folder which is moved
  or removed meanwhile cannot tear it. Opening it costs 2 µs; a cache of descriptors would cost as
  much, and write into a folder that has since been moved away.
- A folder's own entry is durable before anything in it is: whoever uses a folder first, in each
  process, flushes the folders above it, because who made them may not have come to it.
- A flush that fails is never tried again. The kernel has dropped what it could not write, and the
  second try would succeed without it (https://www.usenix.org/conference/atc20/presentation/rebello).
- A crash leaves hidden files behind; `sweep_temporaries` removes them when they are old.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

from sparklog import errors, limits
from sparklog.storage.objects import direct
from sparklog.storage.objects.base import (
    TEMPORARY,
    ObjectExists,
    ObjectMissing,
    Payload,
    Stat,
    SyncFailed,
    checked_folder,
    checked_path,
    pieces,
)

_Show: TypeAlias = Callable[[int, str, str, str], None]
"""(folder, temporary name, name, path): makes the written file visible under its name."""

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NOT_EMPTY: Final = {errno.ENOTEMPTY, errno.EEXIST}
_NO_FOLDER: Final = {errno.ENOENT, errno.ENOTDIR}
_SURELY_NOT_SHOWN: Final = _FULL | _FORBIDDEN | _NO_LINKS | {errno.ENOENT}


class LocalStore:
    """The objects under a folder, which the first put makes."""

    is_local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.uri = Path(self.root).as_uri()
        self._links = True
        # Folders that stand durably. No lock: its steps are atomic, and to work twice is harmless.
        self._founded: set[str] = set()

    # -------------------------------------------------------------------------- writing

    def put_new(self, path: str, data: Payload) -> None:
        self._put(path, data, self._link_new if self._links else self._rename_new, durable=True)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        self._put(path, data, _replace, durable=durable)

    def _put(self, path: str, data: Payload, show: _Show, *, durable: bool) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        try:
            for _ in range(limits.LOCAL_PUT_ATTEMPTS):
                descriptor = -1
                try:
                    descriptor = self._enter(self._place(folder))
                    _put_in(descriptor, name, path, data, show, durable=durable)
                except FileNotFoundError:
                    # The folder was removed behind us, or a sweeper took our temporary file.
                    self._founded.clear()
                else:
                    return
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
        except OSError as error:
            raise self._refusal("put", path, error) from error
        raise errors.StorageUnavailable(
            operation="put", path=path, reason="its folder is removed while it is written"
        )

    def _enter(self, place: str) -> int:
        if place not in self._founded:
            self._found(place)
        return os.open(place, _OPEN_FOLDER)

    def _found(self, place: str) -> None:
        """Make a missing folder, and its entry durable, and the same above it, up to the root."""
        above, inside = os.path.dirname(place), len(place) > len(self.root)
        if above not in self._founded and (inside or not os.path.isdir(above)):
            self._found(above)
        made = False
        if not os.path.isdir(place):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place)
                made = True
        try:
            _flush_folder_at(above)
        except PermissionError:
            # A root that somebody prepared for us may lie in a folder that we cannot read.
            if inside or made:
                raise
        if len(self._founded) >= limits.LOCAL_FOLDERS_REMEMBERED:
            self._founded.clear()
        self._founded.add(place)

    def _link_new(self, folder: int, temporary: str, name: str, path: str) -> None:
        try:
            with _showing(path):
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_new(folder, temporary, name, path)
            self._links = False
            return
        try:
            os.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SyncFailed(path, f"linked, then unlink: {error}") from error

    def _rename_new(self, folder: int, temporary: str, name: str, path: str) -> None:
        """For file systems without hard links, where Linux can rename without replacing."""
        failed = _rename_noreplace(folder, temporary, name)
        if failed in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP):
            reason = (
                "put-if-absent needs hard links or RENAME_NOREPLACE, and its file system has none"
            )
            raise errors.RootNotWritable(root=self.uri, reason=reason)
        with _showing(path):
            if failed:
                raise OSError(failed, os.strerror(failed))

    # -------------------------------------------------------------------------- reading

    def get(self, path: str) -> pa.Buffer:
        try:
            with self.open(path) as file:
                return file.read_buffer()
        except OSError as error:
            raise self._refusal("get", path, error) from error

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        try:
            with self.open(path) as file:
                file.seek(start)
                return file.read_buffer(max(0, min(length, file.size() - start)))
        except OSError as error:
            raise self._refusal("get", path, error) from error

    def open(self, path: str) -> pa.NativeFile:
        place = self._place(checked_path(path))
        try:
            return pa.OSFile(place)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(path) from None
        except OSError as error:
            if os.path.isdir(place):
                raise ObjectMissing(path) from None
            raise self._refusal("open", path, error) from error

    def stat(self, path: str) -> Stat:
        try:
            found = os.stat(self._place(checked_path(path)))
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(path) from None
        except OSError as error:
            raise self._refusal("stat", path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise ObjectMissing(path)
        return _stat(path, found)

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        return sorted(
            (
                _stat(entry.name, found)
                for entry in self._scan(folder)
                if entry.name > after and (found := _stat_of_object(entry))
            ),
            key=lambda entry: entry.name,
        )

    def folders(self, folder: str) -> list[str]:
        return sorted(entry.name for entry in self._scan(folder) if entry.is_dir())

    def walk(self, folder: str) -> Iterator[Stat]:
        for name, entry in self._scan_below(folder):
            if found := _stat_of_object(entry):
                yield _stat(name, found)

    def _scan_below(self, folder: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        for entry in self._scan(folder):
            name = prefix + entry.name
            if entry.is_dir():
                below = f"{folder}/{entry.name}" if folder else entry.name
                yield from self._scan_below(below, name + "/")
            else:
                yield name, entry

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._place(checked_folder(folder))) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refusal("list", folder, error) from error

    # -------------------------------------------------------------------------- keeping

    def delete(self, paths: Iterable[str]) -> None:
        refusal = None
        for path in paths:
            try:
                os.unlink(self._place(checked_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                refusal = self._refusal("delete", path, error)
        if refusal:
            raise refusal

    def settle(self, folder: str) -> None:
        place = self._place(checked_folder(folder))
        try:
            with contextlib.suppress(FileNotFoundError):
                _flush_folder_at(place)
                self._found(place)
        except OSError as error:
            raise self._refusal("settle", folder, error) from error

    def harden(self, paths: Iterable[str]) -> None:
        folders: set[str] = set()
        for path in paths:
            try:
                _flush_written(self._place(checked_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._refusal("harden", path, error) from error
            folders.add(path.rpartition("/")[0])
        for folder in sorted(folders):
            self.settle(folder)

    def remove_folder(self, folder: str) -> None:
        place = self._place(checked_path(folder))
        try:
            os.rmdir(place)
        except OSError as error:
            if error.errno not in _NOT_EMPTY | _NO_FOLDER:
                raise self._refusal("delete", folder, error) from error
        else:
            self._founded.discard(place)

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        """Remove what crashed puts left below the folder, last written before that time; how many.

        A put that is under way and loses its file is done again by its writer, once or twice: let
        the time lie well in the past.
        """
        swept = 0
        for _, entry in self._scan_below(folder):
            if entry.name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime_ns // 1_000 < older_than_us:
                        os.unlink(entry.path)
                        swept += 1
        return swept

    def free_bytes(self) -> int | None:
        place = self.root
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        try:
            space = os.statvfs(place)
        except OSError as error:
            raise self._refusal("statvfs", "", error) from error
        return space.f_bavail * space.f_frsize

    # -------------------------------------------------------------------------- small things

    def _place(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _refusal(self, operation: str, path: str, error: OSError) -> errors.SparklogError:
        """What to report of a system call that surely had no effect."""
        if error.errno in _FULL:
            return errors.StorageFull(
                root=self.uri, free_bytes=self.free_bytes() or 0, reserve_bytes=0
            )
        if error.errno in _FORBIDDEN:
            return errors.RootNotWritable(root=self.uri, reason=f"{operation} of {path}: {error}")
        return errors.StorageUnavailable(operation=operation, path=path, reason=str(error))


def _put_in(
    folder: int, name: str, path: str, data: Payload, show: _Show, *, durable: bool
) -> None:
    temporary = TEMPORARY + os.urandom(8).hex()
    try:
        _write_new(folder, temporary, path, data, durable=durable)
        show(folder, temporary, name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    if durable:
        _flush_folder(folder, path)


def _write_new(folder: int, temporary: str, path: str, data: Payload, *, durable: bool) -> None:
    file = os.open(temporary, _OPEN_NEW, 0o666, dir_fd=folder)
    try:
        direct.write(file, pieces(data))
        if durable:
            _flush_data(file, path)
    finally:
        os.close(file)


def _replace(folder: int, temporary: str, name: str, path: str) -> None:
    with _showing(path):
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _showing(path: str) -> Iterator[None]:
    """What a failed link or rename means: some errors leave open whether the entry is on disk."""
    try:
        yield
    except FileExistsError:
        raise ObjectExists(path) from None
    except OSError as error:
        if error.errno in _SURELY_NOT_SHOWN:
            raise
        raise SyncFailed(path, f"its entry: {error}") from error


def _flush_data(file: int, path: str) -> None:
    try:
        if sys.platform == "darwin":  # where fsync stops at the cache of the disk
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(file)
    except OSError as error:
        if error.errno in _FULL:  # where space is given out late; nothing is visible yet
            raise
        raise SyncFailed(path, f"flush of its bytes: {error}") from error


def _flush_written(place: str) -> None:
    """Flush a visible file. Here a full disk is a failed flush too: its bytes are lost."""
    file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flush_data(file, place)
    except OSError as error:
        raise SyncFailed(place, f"flush of its bytes: {error}") from error
    finally:
        os.close(file)


def _flush_folder(folder: int, path: str) -> None:
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(folder, fcntl.F_FULLFSYNC)
        else:
            os.fsync(folder)
    except OSError as error:
        raise SyncFailed(path, f"flush of its folder: {error}") from error


def _flush_folder_at(place: str) -> None:
    folder = os.open(place, _OPEN_FOLDER)
    try:
        _flush_folder(folder, place)
    finally:
        os.close(folder)


def _rename_noreplace(folder: int, temporary: str, name: str) -> int:
    """renameat2(2) with RENAME_NOREPLACE, which Python does not offer; 0 or an errno."""
    if sys.platform != "linux":
        return errno.ENOSYS
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return errno.ENOSYS
    renamed = rename(folder, os.fsencode(temporary), folder, os.fsencode(name), 1)
    return 0 if renamed == 0 else ctypes.get_errno()


def _stat(name: str, found: os.stat_result) -> Stat:
    return Stat(name=name, size_bytes=found.st_size, modified_us=found.st_mtime_ns // 1_000)


def _stat_of_object(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None for folders, hidden temporary files, and what has been removed since it was listed."""
    if entry.name.startswith(TEMPORARY) or not entry.is_file():
        return None
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
