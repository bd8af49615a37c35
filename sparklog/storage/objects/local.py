"""Object store in a folder on this machine, built on system calls.

- An object is written under a hidden name in its own folder, flushed, and linked to its name; then
  the folder is flushed. `link` atomically rejects a name that exists.
- Several objects are put together by performing each of these steps for all of them before the
  next, so that flushes run in parallel and the file system's journal commits once for many.
- All steps of a put use one descriptor of the folder, so that moving or removing the folder
  concurrently cannot tear the put. Opening it costs 2 µs; a cache of descriptors would cost as
  much, and could write into a folder that has been moved away.
- A folder's own entry is durable before any object in it: before first using a folder, each process
  flushes the folders above it, because their creator may have died before doing so.
- A failed flush is never retried. The kernel has dropped the data that it could not write, and a
  second flush would succeed without it
  (https://www.usenix.org/conference/atc20/presentation/rebello).
- A crash leaves hidden files behind; `sweep_temporaries` removes them once they are old.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

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
    shortage,
)
from sparklog.storage.objects.files import LogFiles
from sparklog.storage.objects.local_files import LocalFiles
from sparklog.storage.objects.usage import CountingStore, Usage

_FLUSH_THREADS = 16  # for the files of a joint put; more would not share disk flushes any better
_PUTS_TOGETHER = 128  # objects of a joint put that are open concurrently
LOCAL_PUT_ATTEMPTS = 3  # if the folder is removed during the put
LOCAL_FOLDERS_REMEMBERED = 65_536
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
PRIVATE_FOLDERS: Final = ("security",)
"""Folders of the root whose contents only the user of the brokers may read (modes 0700 and 0600).
Everything else gets the modes that the process's umask leaves."""

_Item = TypeVar("_Item")

_MakeVisible: TypeAlias = Callable[[int, str, str, str], None]
"""Gives the written file its name. Arguments: folder, temporary name, name, path."""

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NOT_EMPTY: Final = {errno.ENOTEMPTY, errno.EEXIST}
_NO_FOLDER: Final = {errno.ENOENT, errno.ENOTDIR}
_SURELY_NOT_SHOWN: Final = _FULL | _FORBIDDEN | _NO_LINKS | {errno.ENOENT}


class LocalStore(CountingStore):
    """The objects under a folder, which the first put creates."""

    is_local = True
    requests_at_once = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.uri = Path(self.root).as_uri()
        super().__init__()
        self._has_hard_links = True
        # Folders whose entries are durable. Needs no lock: updates are atomic and idempotent.
        self._durable_folders: set[str] = set()
        self._flushers = _Flushers()

    def _count_in(self, usage: Usage) -> None:
        super()._count_in(usage)
        self.files: LogFiles | None = LocalFiles(self.root, self.requests)

    # -------------------------------------------------------------------------- writing

    def put_new(self, path: str, data: Payload) -> None:
        self.requests["put_new"] += 1
        make_visible = self._link_new if self._has_hard_links else self._rename_new
        self._put(path, data, make_visible, durable=True)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        self.requests["put"] += 1
        self._put(path, data, _replace, durable=durable)

    def _put(self, path: str, data: Payload, make_visible: _MakeVisible, *, durable: bool) -> None:
        folder, _, name = checked_path(path).rpartition("/")
        try:
            for _ in range(LOCAL_PUT_ATTEMPTS):
                descriptor = -1
                try:
                    descriptor = self._open_folder(self._absolute(folder))
                    _put_in(descriptor, name, path, data, make_visible, durable=durable)
                except FileNotFoundError:
                    # The folder was removed concurrently, or a sweeper removed our temporary file.
                    self._durable_folders.clear()
                else:
                    return
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
        except OSError as error:
            if isinstance(error, NotADirectoryError):
                self._check_is_no_file()
            raise self._refusal("put", path, error) from error
        raise errors.StorageUnavailable(
            operation="put", path=path, reason="its folder is repeatedly removed during the put"
        )

    def _open_folder(self, full_path: str) -> int:
        if full_path not in self._durable_folders:
            self._create_folder(full_path)
        return os.open(full_path, _OPEN_FOLDER)

    def _create_folder(self, full_path: str) -> None:
        """Creates a missing folder, and makes its entry and those up to the root durable."""
        above, inside = os.path.dirname(full_path), len(full_path) > len(self.root)
        if above not in self._durable_folders and (inside or not os.path.isdir(above)):
            self._create_folder(above)
        created = False
        if not os.path.isdir(full_path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(full_path, self._mode_of_folder(full_path))
                created = True
        try:
            _flush_folder_at(above)
        except PermissionError:
            # An existing root may be in a folder that we are not permitted to read.
            if inside or created:
                raise
        if len(self._durable_folders) >= LOCAL_FOLDERS_REMEMBERED:
            self._durable_folders.clear()
        self._durable_folders.add(full_path)

    def make_private(self, folder: str) -> list[str]:
        """Takes the permissions of other users from a private folder, and from all in it.

        Returns the paths that had some, as after a copy by `cp`. Those that belong to another user,
        or to a read-only file system, keep them.
        """
        found = []
        for above, folders, names in os.walk(os.path.join(self.root, folder)):
            for path in (above, *(os.path.join(above, name) for name in (*folders, *names))):
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    mode = os.lstat(path).st_mode
                    if stat.S_ISLNK(mode) or not mode & _OF_OTHERS:
                        continue
                    found.append(path)
                    with contextlib.suppress(OSError):
                        os.chmod(path, stat.S_IMODE(mode) & ~_OF_OTHERS)
        return found

    def identity_of(self, folder: str) -> str:
        """Returns a text that a copy of the folder differs in: its inode. Creates it if needed."""
        full_path = os.path.join(self.root, folder)
        with _translated_errors(folder):
            if not os.path.isdir(full_path):
                self._create_folder(full_path)
            return f"inode {os.stat(full_path).st_ino}"

    def _mode_of_folder(self, full_path: str) -> int:
        return 0o700 if _is_private(os.path.relpath(full_path, self.root)) else 0o777

    def _link_new(self, folder: int, temporary: str, name: str, path: str) -> None:
        try:
            with _translated_errors(path):
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_new(folder, temporary, name, path)
            self._has_hard_links = False
            return
        try:
            os.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SyncFailed(path, f"linked, then unlink: {error}") from error

    def _rename_new(self, folder: int, temporary: str, name: str, path: str) -> None:
        """Renames without replacing, for Linux file systems without hard links."""
        failed = _rename_noreplace(folder, temporary, name)
        if failed in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP):
            reason = (
                "put-if-absent needs hard links or RENAME_NOREPLACE; its file system supports"
                " neither"
            )
            raise errors.RootNotWritable(root=self.uri, reason=reason)
        with _translated_errors(path):
            if failed:
                raise OSError(failed, os.strerror(failed))

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        found: list[Exception | None] = []
        for first in range(0, len(objects), _PUTS_TOGETHER):
            found += self._put_together(objects[first : first + _PUTS_TOGETHER])
        return found

    def _put_together(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        if len(objects) == 1 or not self._has_hard_links:
            return [self._put_alone(path, data) for path, data in objects]
        written: list[_Written | None] = []
        self._create_folders({path.rpartition("/")[0] for path, _ in objects})
        try:
            for path, data in objects:
                written.append(self._write_hidden(path, data))
            whole = [each for each in written if each is not None]
            self._in_parallel(_Written.flush, whole)
            for each in whole:
                each.link()
            # One object per folder flushes the names of all objects in it.
            folders = {each.folder_path: each for each in whole if each.is_linked}
            self._in_parallel(_Written.flush_folder, list(folders.values()))
        finally:
            for hidden in written:
                if hidden is not None:
                    hidden.close()
        self.requests["put_new"] += sum(each is not None and each.is_linked for each in written)
        return [
            # One that failed for any reason is put again individually, which reveals the reason.
            None if each is not None and each.is_linked else self._put_alone(path, data)
            for each, (path, data) in zip(written, objects, strict=True)
        ]

    def _create_folders(self, folders: Iterable[str]) -> None:
        """Creates missing folders, and makes their entries durable together.

        Those that cannot be created here are left to the puts of their objects.
        """
        missing: set[str] = set()
        for folder in folders:
            full_path = self._absolute(checked_path(folder))
            while full_path not in self._durable_folders and len(full_path) > len(self.root):
                missing.add(full_path)
                full_path = os.path.dirname(full_path)
        if not missing or self.root not in self._durable_folders:
            return
        created = []
        for full_path in sorted(missing):  # parents come first
            try:
                os.mkdir(full_path, self._mode_of_folder(full_path))
            except FileExistsError:
                if not os.path.isdir(full_path):
                    continue
            except OSError:
                continue
            created.append(full_path)
        failed: set[str] = set()

        def flush(parent: str) -> None:
            try:
                _flush_folder_at(parent)
            except OSError:  # too many open files, for example
                failed.add(parent)

        self._in_parallel(flush, sorted(set(map(os.path.dirname, created))))
        created = [each for each in created if os.path.dirname(each) not in failed]
        if len(self._durable_folders) + len(created) > LOCAL_FOLDERS_REMEMBERED:
            self._durable_folders.clear()
        self._durable_folders.update(created)

    def _put_alone(self, path: str, data: Payload) -> Exception | None:
        try:
            self.put_new(path, data)
        except SyncFailed:
            raise
        except Exception as error:
            return error
        return None

    def _write_hidden(self, path: str, data: Payload) -> _Written | None:
        """Writes the bytes under a hidden name, without flushing; None if that fails."""
        folder, _, name = checked_path(path).rpartition("/")
        descriptor = -1
        try:
            descriptor = self._open_folder(self._absolute(folder))
            written = _Written(folder, descriptor, path, name)
            descriptor = -1
            written.write(data)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return None
        return written

    def _in_parallel(self, work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
        """Runs `work` for every item, and raises the first error once all have finished.

        A `SyncFailed` takes precedence over any other error.
        """
        count = min(_FLUSH_THREADS, len(items))
        if count <= 1:
            for each in items:
                work(each)
            return

        def run(number: int) -> None:
            for each in items[number::count]:
                work(each)

        pool, running = self._flushers.pool(), list[Future[None]]()
        try:
            # If no thread can be started, as at interpreter shutdown, this one does the rest.
            with contextlib.suppress(RuntimeError):
                for number in range(count):
                    running.append(pool.submit(run, number))
            for number in range(len(running), count):
                run(number)
        finally:
            wait(running)
        failures = [error for future in running if (error := future.exception()) is not None]
        # The system reports a failed flush only once, so another error must not hide it.
        for error in sorted(failures, key=lambda each: not isinstance(each, SyncFailed)):
            raise error

    # -------------------------------------------------------------------------- reading

    def get(self, path: str) -> pa.Buffer:
        self.requests["get"] += 1
        try:
            with self._open(path) as file:
                return file.read_buffer()
        except OSError as error:
            raise self._refusal("get", path, error) from error

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        self.requests["get_range"] += 1
        try:
            with self._open(path) as file:
                file.seek(start)
                return file.read_buffer(max(0, min(length, file.size() - start)))
        except OSError as error:
            raise self._refusal("get", path, error) from error

    def open(self, path: str) -> pa.NativeFile:
        self.requests["open"] += 1
        return self._open(path)

    def _open(self, path: str) -> pa.NativeFile:
        full_path = self._absolute(checked_path(path))
        try:
            return pa.OSFile(full_path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, NotADirectoryError):
                self._check_is_no_file()
            raise ObjectMissing(path) from None
        except OSError as error:
            if os.path.isdir(full_path):
                raise ObjectMissing(path) from None
            raise self._refusal("open", path, error) from error

    def stat(self, path: str) -> Stat:
        self.requests["stat"] += 1
        try:
            found = os.stat(self._absolute(checked_path(path)))
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(path) from None
        except OSError as error:
            raise self._refusal("stat", path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise ObjectMissing(path)
        return _stat(path, found)

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        self.requests["list_after"] += 1
        return sorted(
            (
                _stat(entry.name, found)
                for entry in self._scan(folder)
                if entry.name > after and (found := _stat_of_object(entry))
            ),
            key=lambda entry: entry.name,
        )

    def folders(self, folder: str) -> list[str]:
        self.requests["folders"] += 1
        return sorted(entry.name for entry in self._scan(folder) if entry.is_dir())

    def walk(self, folder: str) -> Iterator[Stat]:
        self.requests["walk"] += 1
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
            with os.scandir(self._absolute(checked_folder(folder))) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refusal("list", folder, error) from error

    # -------------------------------------------------------------------------- maintenance

    def delete(self, paths: Iterable[str]) -> None:
        self.requests["delete"] += 1
        refusal = None
        for path in paths:
            try:
                os.unlink(self._absolute(checked_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                refusal = self._refusal("delete", path, error)
        if refusal:
            raise refusal

    def sync_folder(self, folder: str) -> None:
        self.requests["sync_folder"] += 1
        full_path = self._absolute(checked_folder(folder))
        try:
            with contextlib.suppress(FileNotFoundError):
                _flush_folder_at(full_path)
                self._create_folder(full_path)
        except OSError as error:
            raise self._refusal("sync_folder", folder, error) from error

    def sync_files(self, paths: Iterable[str]) -> None:
        self.requests["sync_files"] += 1
        folders: set[str] = set()

        def flush(path: str) -> None:
            try:
                _flush_written(self._absolute(checked_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError as error:
                raise self._refusal("sync_files", path, error) from error
            folders.add(path.rpartition("/")[0])

        self._in_parallel(flush, list(paths))
        self._in_parallel(self.sync_folder, sorted(folders))

    def remove_folder(self, folder: str) -> None:
        full_path = self._absolute(checked_path(folder))
        try:
            os.rmdir(full_path)
        except OSError as error:
            if error.errno not in _NOT_EMPTY | _NO_FOLDER:
                raise self._refusal("delete", folder, error) from error
        else:
            self._durable_folders.discard(full_path)

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        """Removes files left by crashed puts below the folder, and returns their number.

        Only files last written before `older_than_us`, which should be well in the past: a put
        that loses its file rewrites it, a limited number of times.
        """
        swept = 0
        for _, entry in self._scan_below(folder):
            if entry.name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime_ns // 1_000 < older_than_us:
                        os.unlink(entry.path)
                        swept += 1
        return swept

    def free_bytes(self) -> int:
        space = self._statvfs()
        return space.f_bavail * space.f_frsize

    def free_inodes(self) -> int | None:
        space = self._statvfs()
        return space.f_favail if space.f_files else None  # some file systems create them on demand

    def _statvfs(self) -> os.statvfs_result:
        full_path = self.root
        while not os.path.isdir(full_path):
            full_path = os.path.dirname(full_path)
        try:
            return os.statvfs(full_path)
        except OSError as error:
            raise self._refusal("statvfs", "", error) from error

    # -------------------------------------------------------------------------- helpers

    def _absolute(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _check_is_no_file(self) -> None:
        """Raises `NotARoot` if the root, or a folder above it, is a file."""
        full_path = self.root
        while not os.path.lexists(full_path):
            full_path = os.path.dirname(full_path)
        if not os.path.isdir(full_path):
            raise errors.NotARoot(
                root=self.uri,
                reason=f"{full_path} is a file",
                advice="name a folder, or one that does not exist yet",
            )

    def _refusal(self, operation: str, path: str, error: OSError) -> errors.SparklogError:
        """Returns the error to raise for a system call that certainly had no effect."""
        if error.errno in _FULL:
            return self._full(error)
        if error.errno in _FORBIDDEN:
            return errors.RootNotWritable(root=self.uri, reason=f"{operation} of {path}: {error}")
        return errors.StorageUnavailable(operation=operation, path=path, reason=str(error))

    def _full(self, error: OSError) -> errors.StorageFull:
        """Returns the error for a lack of space, quota or inodes: each put creates a file."""
        missing, free_bytes = shortage(error), self.free_bytes()
        free_inodes = self.free_inodes()
        has_few = free_inodes is not None and free_inodes < limits.FEW_INODES
        # XFS, for example, has no free inodes when it is out of space.
        if missing == "space" and has_few and free_bytes >= limits.MIB:
            missing = "inode"
        return errors.StorageFull(
            root=self.uri, missing=missing, free_bytes=free_bytes, reserve_bytes=0
        )


class _Flushers:
    """The threads that flush files, of all views of a store."""

    def __init__(self) -> None:
        self._pool: tuple[int, ThreadPoolExecutor | None] = 0, None
        """The pid of the process that started the threads, and the threads."""

    def pool(self) -> ThreadPoolExecutor:
        """Returns the threads; a forked process gets its own."""
        process, pool = self._pool
        if pool is None or process != os.getpid():
            pool = ThreadPoolExecutor(_FLUSH_THREADS, thread_name_prefix="sparklog-flush")
            # Two threads may get here concurrently; each then uses its own pool the first time.
            self._pool = os.getpid(), pool
        return pool


class _Written:
    """A file of a joint put, written under a hidden name and then linked to its own name."""

    def __init__(self, folder_path: str, folder: int, path: str, name: str) -> None:
        """Takes ownership of the descriptor `folder`."""
        self.folder_path = folder_path
        self.is_linked = False
        self._folder = folder
        self._path = path
        self._name = name
        self._temporary = TEMPORARY + os.urandom(8).hex()
        self._file = -1
        self._is_flushed = False

    def write(self, data: Payload) -> None:
        """Writes the bytes. Raises OSError after removing the file again."""
        try:
            self._file = os.open(
                self._temporary, _OPEN_NEW, _mode_of_file(self._path), dir_fd=self._folder
            )
            direct.write(self._file, pieces(data))
        except OSError:
            self.close()
            raise

    def flush(self) -> None:
        """Makes the bytes durable; if there is no space for them, the file will not be linked."""
        with contextlib.suppress(OSError):  # `_flush_data` raises any other failure as SyncFailed
            _flush_data(self._file, self._path)
            self._is_flushed = True

    def link(self) -> None:
        """Gives a flushed file its name, if the name is free and the folder exists."""
        if not self._is_flushed:
            return
        try:
            with _translated_errors(self._path):
                os.link(
                    self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder
                )
        except (OSError, ObjectExists):
            return
        self.is_linked = True
        self._remove_hidden()

    def _remove_hidden(self) -> None:
        with contextlib.suppress(OSError):  # the sweeper removes it
            os.unlink(self._temporary, dir_fd=self._folder)

    def flush_folder(self) -> None:
        """Makes the names of all linked files of the folder durable."""
        _flush_folder(self._folder, self._path)

    def close(self) -> None:
        """Closes the descriptors, and removes the file if it was not linked."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not self.is_linked:
                self._remove_hidden()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def _is_private(path: str) -> bool:
    """Returns whether only the broker's own user may read the files at a path of the root."""
    return path.partition("/")[0] in PRIVATE_FOLDERS


def _mode_of_file(path: str) -> int:
    return 0o600 if _is_private(path) else 0o666


def _put_in(
    folder: int,
    name: str,
    path: str,
    data: Payload,
    make_visible: _MakeVisible,
    *,
    durable: bool,
) -> None:
    temporary = TEMPORARY + os.urandom(8).hex()
    try:
        _write_new(folder, temporary, path, data, durable=durable)
        make_visible(folder, temporary, name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    if durable:
        _flush_folder(folder, path)


def _write_new(folder: int, temporary: str, path: str, data: Payload, *, durable: bool) -> None:
    file = os.open(temporary, _OPEN_NEW, _mode_of_file(path), dir_fd=folder)
    try:
        direct.write(file, pieces(data))
        if durable:
            _flush_data(file, path)
    finally:
        os.close(file)


def _replace(folder: int, temporary: str, name: str, path: str) -> None:
    with _translated_errors(path):
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    """Translates link or rename errors. After some, it is unknown if the entry is on disk."""
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
        if sys.platform == "darwin":  # where fsync does not flush the disk's cache
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(file)
    except OSError as error:
        if error.errno in _FULL:  # some file systems allocate late; nothing is visible yet
            raise
        raise SyncFailed(path, f"flush of its bytes: {error}") from error


def _flush_written(full_path: str) -> None:
    """Flushes a visible file. A full disk counts as a failed flush too: the bytes are lost."""
    file = os.open(full_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flush_data(file, full_path)
    except OSError as error:
        raise SyncFailed(full_path, f"flush of its bytes: {error}") from error
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


def _flush_folder_at(full_path: str) -> None:
    folder = os.open(full_path, _OPEN_FOLDER)
    try:
        _flush_folder(folder, full_path)
    finally:
        os.close(folder)


def _rename_noreplace(folder: int, temporary: str, name: str) -> int:
    """Calls renameat2(2) with RENAME_NOREPLACE, which Python lacks. Returns 0 or an errno."""
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
    """Returns None for folders, hidden temporary files, and files removed since the listing."""
    if entry.name.startswith(TEMPORARY) or not entry.is_file():
        return None
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
