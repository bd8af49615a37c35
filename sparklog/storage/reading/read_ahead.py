"""Reads ahead the payloads of WAL entries, so that a backlog does not cost a round trip each.

On an object store, each entry of a backlog costs a request, because consecutive entries of a
partition are in different objects. A `ReadAhead` reads the next entries concurrently with the
requested one, up to a limit on requests and bytes. On a disk, it reads one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from sparklog import errors, limits
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store, in_parallel
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import Located

READ_AHEAD_BYTES = 16 * limits.MIB  # of log entries that are read along with the requested one


class ReadAhead:
    """The payloads of `entries`, to be requested in this order; some may be skipped.

    Confined to one thread. `is_wanted` returns whether an entry is worth reading ahead. `shared`:
    reads that other threads share, for entries of several partitions.
    """

    def __init__(
        self,
        store: Store,
        entries: Sequence[Located],
        *,
        is_wanted: Callable[[Located], bool] = lambda _located: True,
        shared: SharedReads | None = None,
    ) -> None:
        self._store = store
        self._payload = (
            shared.payload if shared is not None else functools.partial(wal.read_payload, store)
        )
        self._entries = entries
        self._is_wanted = is_wanted
        self._read: dict[int, pa.Buffer | Exception] = {}
        """Payloads and errors that were read ahead, by index in `entries`."""

    @functools.cached_property
    def _places(self) -> Mapping[int, int]:
        return {id(each): place for place, each in enumerate(self._entries)}

    def payload(self, located: Located) -> pa.Buffer:
        """Returns the bytes of the entry. Raises what `wal.read_payload` raises."""
        if self._store.requests_at_once == 1 or len(self._entries) == 1:
            return self._payload(located)
        place = self._places[id(located)]
        if place not in self._read:
            places = self._next_places(place)
            entries = [self._entries[each] for each in places]
            read = in_parallel(self._store, self._try, entries)
            self._read = dict(zip(places, read, strict=True))
        found = self._read.pop(place)
        if isinstance(found, Exception):
            raise found
        return found

    def _next_places(self, place: int) -> list[int]:
        """Chooses the entry at `place`, and later entries to read along with it."""
        chosen, size = [place], _size(self._entries[place])
        for each in range(place + 1, len(self._entries)):
            if len(chosen) == self._store.requests_at_once:
                break
            if self._is_wanted(self._entries[each]):
                size += _size(self._entries[each])
                if size > READ_AHEAD_BYTES:
                    break
                chosen.append(each)
        return chosen

    def _try(self, located: Located) -> pa.Buffer | Exception:
        try:
            return self._payload(located)
        except (errors.SparklogError, ObjectMissing) as error:
            return error


def _size(located: Located) -> int:
    entry = located.entry
    return entry.length if entry.staged is None else entry.staged.length
