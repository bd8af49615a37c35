"""Object store in memory, with every failure that a real store can have. For tests.

- A set of objects can have any number of views: one per simulated process, each with its own
  faults. `lose_unsynced` is a power cut for all of them.
- A fault is a hook that is called before an operation, between its effect and the effect's
  durability, and after it, before the caller learns the result. It may raise any error, block, or
  let another greenlet run.
- Everything is deterministic: no threads, no locks, no clock but the given one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import pyarrow as pa

from sparklog import limits
from sparklog.clock import Clock, SystemClock
from sparklog.storage.objects.base import (
    ObjectExists,
    ObjectMissing,
    Payload,
    Stat,
    Store,
    SyncFailed,
    checked_folder,
    checked_path,
    open_by_ranges,
    pieces,
)
from sparklog.storage.objects.faults import Faults, NoFaults, Operation
from sparklog.storage.objects.memory_files import MemoryFiles, MemoryObject, cut_power
from sparklog.storage.objects.parallel import in_parallel
from sparklog.storage.objects.usage import CountingStore

_Listed = TypeVar("_Listed")
_PAGE: Final = 1_000
"""Objects per page of a bucket's listing, and per delete request."""

# ------------------------------------------------------------------------------ the store


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


class MemoryStore:
    """Objects in a dict. `is_local` only determines how users of the store treat it."""

    requests_at_once = 1

    def __init__(
        self,
        clock: Clock,
        *,
        name: str = "store",
        is_local: bool = False,
        faults: Faults | None = None,
        has_files: bool = False,
    ) -> None:
        """Creates an empty store. `has_files`: it also supports growing files, as a folder does."""
        self.uri = f"memory://{name}"
        self.is_local = is_local
        self._name = name
        self._clock = clock
        self._faults = faults or NoFaults()
        # Threads share the dict without a lock, because its operations are atomic in CPython.
        self._objects: dict[str, MemoryObject] = {}
        self._unsynced: dict[str, dict[str, MemoryObject]] = {}
        """Objects whose names are visible but not durable, by folder and path."""
        self.files: MemoryFiles | None = (
            MemoryFiles(self._find_object, self._faults) if has_files else None
        )

    def _find_object(self, path: str) -> MemoryObject | None:
        return self._objects.get(path)

    def view(self, faults: Faults) -> MemoryStore:
        """Returns another process's view of the same objects, with its own faults."""
        other = MemoryStore(
            self._clock,
            name=self._name,
            is_local=self.is_local,
            faults=faults,
            has_files=self.files is not None,
        )
        other.share_objects(self)
        return other

    def share_objects(self, other: MemoryStore) -> None:
        """Switches this store to the objects of another."""
        self._objects, self._unsynced = other._objects, other._unsynced

    def _note_name(self, path: str, created: MemoryObject) -> None:
        """Notes that a visible name is not durable yet."""
        self._unsynced.setdefault(_folder_of(path), {})[path] = created

    def _sync_names(self, folder: str) -> None:
        """Makes the names in a folder durable: a disk flushes a folder as a whole."""
        for each in self._unsynced.pop(folder, {}).values():
            each.make_durable()

    def lose_unsynced(self, choose: Callable[[str], bool]) -> None:
        """Simulates a power cut: removes the chosen objects that are not durable.

        All others become durable. An object whose bytes were never flushed becomes empty if chosen.
        """
        for path, found in sorted(self._objects.items()):
            if not found.durable and choose(path):
                if found.replaced:
                    self._objects[path] = found.replaced
                else:
                    del self._objects[path]
                continue
            if not found.flushed and choose(path):
                found.data = pa.py_buffer(b"")
            found.flushed = True
            cut_power(found, path, choose)
            found.make_durable()

    # -------------------------------------------------------------------------- writing

    def put_new(self, path: str, data: Payload) -> None:
        created = self._new_object(data)
        self._faults.before("put_new", checked_path(path))
        self._show(path, created)
        self._faults.between("put_new", path)
        self._sync_names(_folder_of(path))
        self._faults.after("put_new", path)

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        """As on a disk: all become visible, one at a time, and then durable together."""
        visible: list[int] = []
        found: list[Exception | None] = [None] * len(objects)

        def attempt(number: int, step: Callable[[], None]) -> None:
            try:
                step()
            except SyncFailed:
                raise
            except Exception as error:
                found[number] = error

        for number, (path, data) in enumerate(objects):
            attempt(number, functools.partial(self._show_one, number, path, data, visible))
        for number in visible:
            attempt(number, functools.partial(self._faults.between, "put_new", objects[number][0]))
        for number in visible:
            if found[number] is None:
                self._sync_names(_folder_of(objects[number][0]))
        for number in visible:
            if found[number] is None:
                path = objects[number][0]
                attempt(number, functools.partial(self._faults.after, "put_new", path))
        return found

    def _show_one(self, number: int, path: str, data: Payload, visible: list[int]) -> None:
        """Makes an object of a joint put visible."""
        self._faults.before("put_new", checked_path(path))
        self._show(path, self._new_object(data))
        visible.append(number)

    def _show(self, path: str, created: MemoryObject) -> None:
        if self._objects.setdefault(path, created) is not created:
            raise ObjectExists(path)
        self._note_name(path, created)

    def put_unflushed(self, path: str, data: Payload) -> None:
        """Puts a new object the way a program that never flushes does, such as delta-rs."""
        created = self._new_object(data)
        created.flushed = False
        self._faults.before("put_new", checked_path(path))
        self._show(path, created)
        self._faults.after("put_new", path)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        created = self._new_object(data)
        self._faults.before("put", checked_path(path))
        old = self._objects.get(path)
        created.replaced = old if old is None or old.durable else old.replaced
        self._objects[path] = created
        self._note_name(path, created)
        self._faults.between("put", path)
        if durable:
            self._sync_names(_folder_of(path))
        self._faults.after("put", path)

    def _new_object(self, data: Payload) -> MemoryObject:
        return MemoryObject(pa.py_buffer(b"".join(pieces(data))), self._clock.now_us())

    # -------------------------------------------------------------------------- reading

    def get(self, path: str) -> pa.Buffer:
        return self._find("get", path).data

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        data = self._find("get_range", path).data
        start = min(start, data.size)
        return data.slice(start, max(0, min(length, data.size - start)))

    def open(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self._find("open", path).data)

    def stat(self, path: str) -> Stat:
        return _stat(path, self._find("stat", path))

    def _find(self, operation: Operation, path: str) -> MemoryObject:
        self._faults.before(operation, checked_path(path))
        found = self._objects.get(path)
        if found is None:
            raise ObjectMissing(path)
        self._faults.after(operation, path)
        return found

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        return [
            _stat(name, found)
            for name, found in self._below("list_after", folder)
            if "/" not in name and name > after
        ]

    def folders(self, folder: str) -> list[str]:
        below = self._below("folders", folder)
        return sorted({name.partition("/")[0] for name, _ in below if "/" in name})

    def walk(self, folder: str) -> Iterator[Stat]:
        return iter([_stat(name, found) for name, found in self._below("walk", folder)])

    def _below(self, operation: Operation, folder: str) -> list[tuple[str, MemoryObject]]:
        self._faults.before(operation, checked_folder(folder))
        found = self._inside(folder)
        self._faults.after(operation, folder)
        return found

    def _inside(self, folder: str) -> list[tuple[str, MemoryObject]]:
        within = f"{folder}/" if folder else ""
        return sorted(
            (path.removeprefix(within), found)
            for path, found in self._objects.copy().items()
            if path.startswith(within)
        )

    # -------------------------------------------------------------------------- maintenance

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._faults.before("delete", checked_path(path))
            self._objects.pop(path, None)
            self._faults.after("delete", path)

    def sync_folder(self, folder: str) -> None:
        self._faults.before("sync_folder", checked_folder(folder))
        self._sync_names(folder)
        self._faults.after("sync_folder", folder)

    def sync_files(self, paths: Iterable[str]) -> None:
        folders: set[str] = set()
        for path in paths:
            self._faults.before("sync_files", checked_path(path))
            found = self._objects.get(path)
            if found is not None:
                found.flushed = True
                folders.add(_folder_of(path))
            self._faults.after("sync_files", path)
        for folder in sorted(folders):
            self.sync_folder(folder)

    def remove_folder(self, folder: str) -> None:
        checked_path(folder)  # folders exist only in the names of objects

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        del older_than_us  # a put leaves no unfinished files
        checked_folder(folder)
        return 0

    def free_bytes(self) -> int | None:
        return None

    def free_inodes(self) -> int | None:
        return None


def _stat(name: str, found: MemoryObject) -> Stat:
    return Stat(name=name, size_bytes=found.data.size, modified_us=found.modified_us)


def _size(data: Payload) -> int:
    return sum(map(len, pieces(data)))


_NAMED: dict[str, MemoryStore] = {}


def named_store(name: str) -> MemoryStore:
    """Returns the process's store of this name; it lives as long as the process."""
    return _NAMED.setdefault(name, MemoryStore(SystemClock(), name=name))


# ------------------------------------------------------------------------------ a slow store


@dataclass(slots=True)
class _InFlight:
    """Requests that are in flight through all views of a store."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    most: int = 0


class DelayedStore(CountingStore):
    """Delays each request to another store, and counts requests as a bucket would bill them.

    - `requests` counts them by operation. A listing costs a request per page of 1,000 objects;
      opening an object costs a `stat`, and reading it a `get_range` per window.
    - Calls that are not requests to a bucket, such as `sync_folder`, are not delayed or counted.
    """

    def __init__(
        self,
        inner: Store,
        seconds: float,
        clock: Clock | None = None,
        *,
        requests_at_once: int | None = None,
    ) -> None:
        """Delays each request by `seconds` on the clock, by default the machine's.

        `requests_at_once` defaults to that of a bucket, or to 1 if `inner` is local.
        """
        super().__init__()
        self.uri = inner.uri
        self.is_local = inner.is_local
        if requests_at_once is None:
            requests_at_once = 1 if inner.is_local else limits.STORE_REQUESTS_AT_ONCE
        self.requests_at_once = requests_at_once
        self._in_flight = _InFlight()
        self._inner = inner
        self._seconds = seconds
        self._clock = clock or SystemClock()

    @property
    def most_at_once(self) -> int:
        """The highest number of requests that were in flight concurrently, since it was set."""
        return self._in_flight.most

    @most_at_once.setter
    def most_at_once(self, count: int) -> None:
        self._in_flight.most = count

    @contextlib.contextmanager
    def _request(self, operation: Operation, *, written_bytes: int = 0) -> Iterator[None]:
        flight = self._in_flight
        with flight.lock:
            self.requests[operation] += 1
            self.usage.written_bytes += written_bytes
            flight.count += 1
            flight.most = max(flight.most, flight.count)
        try:
            self._clock.sleep(self._seconds)
            yield
        finally:
            with flight.lock:
                flight.count -= 1

    def _counted(self, read: pa.Buffer) -> pa.Buffer:
        with self._in_flight.lock:
            self.usage.read_bytes += read.size
        return read

    def _paged(self, operation: Operation, found: list[_Listed]) -> list[_Listed]:
        """Makes the requests for the remaining pages of a listing."""
        for _ in range(_PAGE, len(found), _PAGE):
            with self._request(operation):
                pass
        return found

    def put_new(self, path: str, data: Payload) -> None:
        with self._request("put_new", written_bytes=_size(data)):
            self._inner.put_new(path, data)

    def put_all_new(self, objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        def put(item: tuple[str, Payload]) -> Exception | None:
            with self._request("put_new", written_bytes=_size(item[1])):
                return self._inner.put_all_new([item])[0]

        return in_parallel(self, put, objects)

    def put(self, path: str, data: Payload, *, durable: bool = True) -> None:
        with self._request("put", written_bytes=_size(data)):
            self._inner.put(path, data, durable=durable)

    def get(self, path: str) -> pa.Buffer:
        with self._request("get"):
            return self._counted(self._inner.get(path))

    def get_range(self, path: str, start: int, length: int) -> pa.Buffer:
        with self._request("get_range"):
            return self._counted(self._inner.get_range(path, start, length))

    def open(self, path: str) -> pa.NativeFile:
        return open_by_ranges(self, path)

    def stat(self, path: str) -> Stat:
        with self._request("stat"):
            return self._inner.stat(path)

    def list_after(self, folder: str, after: str = "") -> list[Stat]:
        with self._request("list_after"):
            found = self._inner.list_after(folder, after)
        return self._paged("list_after", found)

    def folders(self, folder: str) -> list[str]:
        with self._request("folders"):
            found = self._inner.folders(folder)
        return self._paged("folders", found)

    def walk(self, folder: str) -> Iterator[Stat]:
        number = -1
        for number, each in enumerate(self._inner.walk(folder)):
            if number % _PAGE == 0:
                with self._request("walk"):
                    pass
            yield each
        if number < 0:
            with self._request("walk"):
                pass

    def delete(self, paths: Iterable[str]) -> None:
        left = list(paths)
        for first in range(0, len(left), _PAGE):
            with self._request("delete"):
                self._inner.delete(left[first : first + _PAGE])

    def sync_folder(self, folder: str) -> None:
        self._inner.sync_folder(folder)

    def sync_files(self, paths: Iterable[str]) -> None:
        self._inner.sync_files(paths)

    def remove_folder(self, folder: str) -> None:
        self._inner.remove_folder(folder)

    def sweep_temporaries(self, folder: str, older_than_us: int) -> int:
        return self._inner.sweep_temporaries(folder, older_than_us)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def free_inodes(self) -> int | None:
        return self._inner.free_inodes()
