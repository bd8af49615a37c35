"""Contract of every object store, and `claim`, on which the log is built.

- An object appears whole or not at all, and `put_new` creates it only if it is absent. The
  write-ahead log, the cluster metadata and the Delta log rely on this alone.
- Durable means that an object survives a power cut. An object is durable once its `put_new` has
  returned. One that another process has just made visible may not be durable before `sync_folder`
  or, if another program wrote it, before `sync_files`.
- The type of an error says whether the put took effect. No: `StorageFull`, `StorageUnavailable`,
  `RootNotWritable`. Unknown: `PutUnresolved`. Possibly, but a power cut may undo it, and there is
  no way to find out: `SyncFailed`.
- Once a put at a path has been issued, only the same bytes may be retried there, because the first
  attempt may still be in flight. `claim` follows this rule.
- A path is relative to the root, POSIX, and never leaves the root; "" is the root folder.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock

CLAIM_ATTEMPTS = 8
CLAIM_BACKOFF_SECONDS = 0.1  # doubled after each attempt
CLAIM_BACKOFF_MAX_SECONDS = 2.0
_RANGE_READ_BYTES = 256 * limits.KIB

Piece: TypeAlias = bytes | memoryview | pa.Buffer
Payload: TypeAlias = Piece | Sequence[Piece]
"""The content of an object: one buffer, or several that are concatenated."""

PutAllNew: TypeAlias = Callable[[Sequence[tuple[str, Payload]]], list[Exception | None]]
"""See `Store.put_all_new`."""

TEMPORARY: Final = ".tmp-"
"""Prefix of the names of unfinished files; listings omit them."""


class ObjectExists(Exception):
    """The put was rejected: an object exists at `path`, or another put there is in flight.

    The object may be from an earlier attempt at the same put, so compare its bytes.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class ObjectMissing(Exception):
    """No object exists at `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PutUnresolved(Exception):
    """The put's outcome is unknown: it may have landed, may land later, or may be lost."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class SyncFailed(Exception):
    """The disk failed to make `path` durable. Later syncs cannot be trusted: the process stops."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """An object in a listing; `name` is relative to the listed folder."""

    name: str
    size_bytes: int
    modified_us: int
    """By the store's clock, in µs since the Unix epoch.

    Some stores round to whole seconds, and others only in `stat`.
    """


class Store(Protocol):
    """The objects under one root. Thread-safe.

    Every operation may raise `StorageUnavailable` (retry), `RootNotWritable` (no permission) and
    ValueError (a path that leaves the root). Its docstring lists any other errors.
    """

    @property
    def uri(self) -> str:
        """Canonical URI of the root, without credentials. `open_store` accepts it."""
        ...

    @property
    def is_local(self) -> bool:
        """True if a put costs a disk flush, False if it costs a network round trip."""
        ...

    @property
    def requests_at_once(self) -> int:
        """The number of concurrent requests that take about as long as one; 1: run sequentially."""
        ...

    def put_new(self, path: str, data: Payload) -> None:
        """Creates an object if it is absent. It is durable when this returns.

        Raises `ObjectExists`, `PutUnresolved`, `SyncFailed` and `StorageFull`.
        """
        ...

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        """Creates each object if it is absent, and makes all of them durable together.

        On a local store this costs a few rounds of flushes, however many objects there are; on
        others, parallel requests. Returns, for each object, what `put_new` would have raised, or
        None. Raises `SyncFailed`, after which some may exist.
        """
        ...

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        """Creates or replaces an object. Readers see all of the old one or all of the new one.

        Only for hints such as heartbeats, because concurrent puts overwrite each other. Without
        `durable`, a power cut may leave the old object, the new one, or an empty one.

        Raises `PutUnresolved`, `SyncFailed` and `StorageFull`.
        """
        ...

    def get(self, path: str) -> pa.Buffer:
        """Returns the whole object. Raises `ObjectMissing`."""
        ...

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        """Returns `length` bytes from `start`, fewer at the end. Raises `ObjectMissing`."""
        ...

    def open(self, path: str) -> pa.NativeFile:
        """Opens the object for random access, as Parquet readers need. Raises `ObjectMissing`."""
        ...

    def stat(self, path: str) -> Stat:
        """Returns size and modification time, named by the path. Raises `ObjectMissing`."""
        ...

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        """Lists the objects directly in the folder with a name above `after`, sorted by name."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Lists the direct subfolders of the folder, sorted. On a local store some may be empty."""
        ...

    def walk(self, folder: str) -> Iterator[Stat]:
        """Iterates over all objects below the folder, in no particular order."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes objects. Ignores missing ones. A power cut may bring deleted ones back.

        If some cannot be deleted, deletes as many of the others as possible before raising.
        """
        ...

    def sync_folder(self, folder: str) -> None:
        """Makes the names of all objects directly in the folder durable, including others' puts.

        Only the names: the bytes of an object put by this class are durable before its name is,
        but those of other programs' objects may not be. Raises `SyncFailed`.
        """
        ...

    def sync_files(self, paths: Iterable[str]) -> None:
        """Makes bytes and names of objects durable that another program wrote without flushing.

        Ignores missing objects. Raises `SyncFailed`.
        """
        ...

    def remove_folder(self, folder: str) -> None:
        """Removes the folder if it is empty, on stores that have folders.

        A concurrent put into the folder recreates it. A folder with objects remains.
        """
        ...

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        """Removes files left by crashed puts below the folder, and returns their number.

        Only files last written before `older_than_us`, which should be well in the past: a put
        whose file is removed starts over. Returns 0 on stores without such files.
        """
        ...

    def free_bytes(self) -> int | None:
        """Returns the free space; None if unknown."""
        ...

    def free_inodes(self) -> int | None:
        """Returns the number of files that can still be created; None if unknown or unlimited."""
        ...


def shortage(error: OSError) -> str:
    """Returns the resource that a failed write ran out of: `StorageFull.missing`."""
    return "quota" if error.errno == errno.EDQUOT else "space"


def checked_path(path: str) -> str:
    """Returns the path of an object unchanged. Raises ValueError for an invalid one."""
    parts = path.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not an object path: it must be relative, POSIX, in the root")
    if parts[-1].startswith(TEMPORARY):
        raise ValueError(f"{path!r} is reserved for unfinished files")
    return path


def checked_folder(folder: str) -> str:
    """Returns the path of a folder unchanged; "" is the root. Raises ValueError."""
    return checked_path(folder) if folder else folder


def pieces(data: Payload) -> list[memoryview]:
    """Returns the payload as non-empty byte views, without copying."""
    given: Any = [data] if isinstance(data, bytes | memoryview | pa.Buffer) else data
    views = [memoryview(piece).cast("B") for piece in given]
    return [view for view in views if len(view)]


# ------------------------------------------------------------------------------ claim


def claim(
    store: Store,
    path: str,
    data: Payload,
    *,
    clock: Clock,
    attempts: int = CLAIM_ATTEMPTS,
    doubtful: bool = False,
    is_refused: bool = False,
) -> bool:
    """Puts `data` at `path` if nothing is there. Returns whether *these* bytes are there, durably.

    Resolves a put with an unknown outcome by reading back; while there is no object, retries with
    the same bytes. Compares all bytes to decide whose object it is, so `data` must contain
    something unique, such as the id of a flush.

    Raises `StorageFull`, `StorageUnavailable` and `RootNotWritable` only if no attempt can have
    taken effect; `OutcomeUnknown` after the last attempt; `SyncFailed`.

    Args:
        store: the store to put into.
        path: the path of the object.
        data: the bytes of the object.
        clock: sleeps between attempts.
        attempts: the maximum number of attempts.
        doubtful: whether an earlier call with the same bytes may have taken effect.
        is_refused: whether a put was just rejected because an object exists. It counts as the first
            attempt.
    """
    reason = ""
    for attempt in range(attempts):
        if attempt:
            clock.sleep(backoff_seconds(attempt))
        try:
            if is_refused and not attempt:
                raise ObjectExists(path)
            store.put_new(path, data)
        except ObjectExists:
            doubtful, reason = True, "a put was refused, but no object exists"
        except PutUnresolved as error:
            doubtful, reason = True, error.reason
        except _REFUSALS as error:
            if not doubtful:
                raise
            reason = str(error)
        else:
            return True
        try:
            found = store.get(path)
            # Its writer may have died before it was durable, but our caller relies on it.
            store.sync_folder(path.rpartition("/")[0])
        except ObjectMissing:
            continue
        except _REFUSALS as error:
            reason = str(error)
            continue
        return _is_equal(found, data)
    raise errors.OutcomeUnknown(what=f"put of {path}", reason=reason)


def claim_all(
    store: Store,
    objects: Sequence[tuple[str, Payload]],
    *,
    clock: Clock,
    put_all_new: PutAllNew | None = None,
) -> list[bool | Exception]:
    """Puts each object as `claim` does, but makes all of them durable together.

    Returns, for each, what `claim` would have returned or raised. An object whose put is rejected,
    or has an unknown outcome, is claimed individually, after all others. `put_all_new` makes the
    first attempt instead of the store's. Raises `SyncFailed`.
    """
    found: list[bool | Exception] = []
    outcomes = (put_all_new or store.put_all_new)(objects)
    for (path, data), outcome in zip(objects, outcomes, strict=True):
        if isinstance(outcome, ObjectExists | PutUnresolved):
            try:
                is_refused = isinstance(outcome, ObjectExists)
                found.append(
                    claim(store, path, data, clock=clock, doubtful=True, is_refused=is_refused)
                )
            except SyncFailed:
                raise
            except Exception as error:
                found.append(error)
        else:
            found.append(True if outcome is None else outcome)
    return found


def put_together(store: Store, objects: Sequence[tuple[str, Payload]], *, clock: Clock) -> None:
    """Puts objects under new names, and makes all of them durable together.

    Raises what `claim` raises for the first that fails, after which some of the others may exist.
    """
    outcomes = store.put_all_new(objects)
    for (path, data), outcome in zip(objects, outcomes, strict=True):
        if isinstance(outcome, ObjectExists | PutUnresolved):
            is_ours = claim(store, path, data, clock=clock, doubtful=True)
            assert is_ours, path
        elif outcome is not None:
            raise outcome


_REFUSALS = (errors.StorageFull, errors.StorageUnavailable, errors.RootNotWritable)


def backoff_seconds(attempt: int) -> float:
    """Returns the pause before the put that follows `attempt` failed ones."""
    doublings = min(attempt - 1, 16)  # too many would overflow a float
    most_seconds = CLAIM_BACKOFF_MAX_SECONDS
    return min(CLAIM_BACKOFF_SECONDS * 2.0**doublings, most_seconds)


def _is_equal(found: pa.Buffer, data: Payload) -> bool:
    views = pieces(data)
    if found.size != sum(map(len, views)):  # pyarrow does not check the bounds of a slice
        return False
    position = 0
    for view in views:
        if not found.slice(position, len(view)).equals(pa.py_buffer(view)):
            return False
        position += len(view)
    return True


# ------------------------------------------------------------------------------ reading by ranges


def open_by_ranges(store: Store, path: str) -> pa.NativeFile:
    """Opens an object for random access by `get_range` requests. Raises `ObjectMissing`."""
    return pa.PythonFile(_RangedFile(store, path), mode="r")


class _RangedFile:
    """File object for `pa.PythonFile`. Caches one window, so that small reads share a request."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self._size = store.stat(path).size_bytes
        self._position = 0
        self._window = pa.py_buffer(b"")
        self._window_start = 0
        self.closed = False

    def read(self, count: int = -1) -> bytes:
        return self.read_buffer(count).to_pybytes()

    def read_buffer(self, count: int = -1) -> pa.Buffer:
        left = max(0, self._size - self._position)
        count = left if count < 0 else min(count, left)
        start = self._position - self._window_start
        if start < 0 or start + count > self._window.size:
            asked = min(max(count, _RANGE_READ_BYTES), left)
            self._window = self._store.get_range(self._path, self._position, asked)
            self._window_start, start = self._position, 0
        found = self._window.slice(start, min(count, self._window.size - start))
        self._position += found.size
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        """Does nothing; pyarrow calls it when it closes the file."""

    def close(self) -> None:
        self.closed = True
        self._window = pa.py_buffer(b"")
