"""What every object store gives, and `claim`, which the log is built on.

Rules of this room:

- An object appears whole or not at all, and `put_new` makes it only where none stands. Write-ahead
  log, cluster metadata and Delta log rest on this and nothing else.
- Durable means: survives a power cut. What `put_new` returned from is durable; what somebody else
  just made visible may not be yet, until `settle`, and if that was another program, until `harden`.
- An error tells what is known. Surely no effect: `StorageFull`, `StorageUnavailable`,
  `RootNotWritable`. Perhaps an effect: `PutUnresolved`. Perhaps an effect that a power cut undoes,
  and nobody can find out: `SyncFailed`.
- Once a put of an object was issued, only the same bytes may be tried again at its path: the first
  try may still be under way. `claim` keeps to that.
- A path is relative to the root, POSIX, and never leaves the root; "" is the root as a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock

Piece: TypeAlias = bytes | memoryview | pa.Buffer
Payload: TypeAlias = Piece | Sequence[Piece]
"""The content of an object: one buffer, or several that are written one after another, unjoined."""

TEMPORARY: Final = ".tmp-"
"""How the names of files begin that are being written; no listing shows them."""


class ObjectExists(Exception):
    """The put was refused, because something stands at `path` or a put of another is under way.

    It may be our own earlier try that stands there, so compare before you draw conclusions.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class ObjectMissing(Exception):
    """Nothing stands at `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PutUnresolved(Exception):
    """No answer to a put: it may have landed, may land later, or may be lost."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class SyncFailed(Exception):
    """The disk failed to make `path` durable; no later answer of it can be trusted, so stop."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """An object, as a listing shows it; `name` is relative to the folder that was listed."""

    name: str
    size_bytes: int
    modified_us: int
    """By the store's clock, since the Unix epoch, UTC; some stores round to whole seconds."""


class Store(Protocol):
    """The objects under one root. Safe to use from many threads.

    Every operation may raise `StorageUnavailable` (try again), `RootNotWritable` (no permission)
    and ValueError (a path that leaves the root). What else it raises is told beside it.
    """

    @property
    def uri(self) -> str:
        """The root's name: canonical, without credentials; `open_store` takes it back."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether a put costs a disk's flush, not a network's round trip."""
        ...

    def put_new(self, path: str, data: Payload) -> None:
        """Create an object where none stands; it is durable when this returns.

        Raises `ObjectExists`, `PutUnresolved`, `SyncFailed` and `StorageFull`.
        """
        ...

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        """Create or replace an object; readers see the old or the new one, whole.

        Not for anything that two may write: only for hints, such as heartbeats. Without `durable`
        a power cut may leave the old object, the new one, or an empty one.

        Raises `PutUnresolved`, `SyncFailed` and `StorageFull`.
        """
        ...

    def get(self, path: str) -> pa.Buffer:
        """The whole object. Raises `ObjectMissing`."""
        ...

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        """`length` bytes from `start`, fewer or none at the end. Raises `ObjectMissing`."""
        ...

    def open(self, path: str) -> pa.NativeFile:
        """The object for random access, as Parquet wants it. Raises `ObjectMissing`."""
        ...

    def stat(self, path: str) -> Stat:
        """Size and age, under the path as given. Raises `ObjectMissing`."""
        ...

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        """The objects right in the folder whose names are greater than `after`, sorted by name."""
        ...

    def folders(self, folder: str) -> list[str]:
        """The names of the folders right in the folder, sorted; a local one may be empty."""
        ...

    def walk(self, folder: str) -> Iterator[Stat]:
        """All objects below the folder, in no particular order."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; missing ones are no error, and a power cut may bring some back.

        Where some cannot be removed the others are, as far as possible, before this raises.
        """
        ...

    def settle(self, folder: str) -> None:
        """What is right in the folder now, put by whomever, survives a power cut after this.

        Only names: the bytes of an object that this class has put are durable before its name is,
        and those of any other are not. Raises `SyncFailed`.
        """
        ...

    def harden(self, paths: Iterable[str]) -> None:
        """Make objects durable that another program may have written without any flush.

        Bytes and names survive a power cut after this. Missing objects are passed over. Raises
        `SyncFailed`.
        """
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove the folder if it is empty, where folders exist without objects in them.

        A put into it that is under way makes it again; one that holds anything stays.
        """
        ...

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        """Remove what crashed puts left below the folder, last written before that time; how many.

        0 where a crash leaves nothing. A put that is under way may lose its bytes, and does its
        work again: let the time lie well in the past.
        """
        ...

    def free_bytes(self) -> int | None:
        """Space left for us; None where nobody knows."""
        ...


def checked_path(path: str) -> str:
    """The path of an object, as it came; ValueError for one that a store must not follow."""
    parts = path.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is no path of an object: relative, POSIX, within the root")
    if parts[-1].startswith(TEMPORARY):
        raise ValueError(f"{path!r} is a name for files that are being written")
    return path


def checked_folder(folder: str) -> str:
    """The path of a folder, as it came; "" is the root."""
    return checked_path(folder) if folder else folder


def pieces(data: Payload) -> list[memoryview]:
    """The payload as views of bytes, without the empty ones; nothing is copied."""
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
    attempts: int = limits.CLAIM_ATTEMPTS,
    doubtful: bool = False,
) -> bool:
    """Whether *our* bytes stand at `path`, durably: False if others do.

    A put without an answer is resolved by reading back, and while nothing stands there, the same
    bytes are tried again. Ours are told from others by comparing all of them, so `data` must carry
    something that nobody else writes: the id of a flush, a random number.

    Raises `StorageFull`, `StorageUnavailable` and `RootNotWritable` only where no try can have
    had an effect; `OutcomeUnknown` after the last attempt; `SyncFailed`.

    Args:
        store: where to.
        path: of the object.
        data: its bytes.
        clock: for the pauses between two tries.
        attempts: how often to try.
        doubtful: whether an earlier call with the same bytes may have had an effect.
    """
    reason = ""
    for attempt in range(attempts):
        if attempt:
            clock.sleep(_backoff_seconds(attempt))
        try:
            store.put_new(path, data)
        except ObjectExists:
            doubtful, reason = True, "a put was refused, yet nothing stands there"
        except PutUnresolved as error:
            doubtful, reason = True, error.reason
        except _REFUSALS as error:
            if not doubtful:
                raise
            reason = str(error)
        else:
            return True
        try:
            standing = store.get(path)
        except ObjectMissing:
            continue
        except _REFUSALS as error:
            reason = str(error)
            continue
        # Whoever put it may not have come to make it durable, and our caller builds on it.
        store.settle(path.rpartition("/")[0])
        return _is_equal(standing, data)
    raise errors.OutcomeUnknown(what=f"put of {path}", reason=reason)


_REFUSALS = (errors.StorageFull, errors.StorageUnavailable, errors.RootNotWritable)


def _backoff_seconds(attempt: int) -> float:
    return min(
        limits.CLAIM_BACKOFF_SECONDS * 2.0 ** (attempt - 1), limits.CLAIM_BACKOFF_MAX_SECONDS
    )


def _is_equal(standing: pa.Buffer, data: Payload) -> bool:
    views = pieces(data)
    if standing.size != sum(map(len, views)):  # and pyarrow does not check the bounds of a slice
        return False
    position = 0
    for view in views:
        if not standing.slice(position, len(view)).equals(pa.py_buffer(view)):
            return False
        position += len(view)
    return True


# ------------------------------------------------------------------------------ reading by ranges


def open_by_ranges(store: Store, path: str) -> pa.NativeFile:
    """The object for random access, where `get_range` is all there is. Raises `ObjectMissing`."""
    return pa.PythonFile(_RangedFile(store, path), mode="r")


class _RangedFile:
    """What `pa.PythonFile` asks of a file; it keeps one window, so small reads share a request."""

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
            asked = min(max(count, limits.RANGE_READ_BYTES), left)
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
        """Nothing is written, so nothing waits; pyarrow calls it when it closes."""

    def close(self) -> None:
        self.closed = True
        self._window = pa.py_buffer(b"")
