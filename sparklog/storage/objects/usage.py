"""Counts of the requests to a store, by kind and by what they are for.

A store bills some kinds of requests, so its user wants to know which part of a broker makes them.
Each part gets its own view of the store, which counts in its own place: a request needs to carry no
purpose, and costs an increment. Bytes are counted only by stores that are not local.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, runtime_checkable

from sparklog.storage.objects.base import Store

_LISTS: Final = ("list_after", "folders", "walk")
_READS: Final = ("get", "get_range", "stat")
"""Deletions are in neither: stores do not bill them."""


class Purpose(enum.StrEnum):
    """The purpose of the requests through a view of a store."""

    LOG = "log"
    """Flushes of the write-ahead log."""
    TABLES = "tables"
    """Records on their way from the log to the tables: data files and commits."""
    UPKEEP = "upkeep"
    """Checkpoints, merged files, retention, and the removal of objects."""
    METADATA = "metadata"
    """Heartbeats, and the metadata, users and ACLs of the cluster."""
    READS = "reads"
    """Records for consumers and for queries that read through the broker."""
    RECOVERY = "recovery"
    """Logs and tables of partitions that the broker takes over, as at its start."""
    OTHER = "other"


@dataclass(slots=True)
class Usage:
    """Requests by operation, and the bytes in them, since the store was opened."""

    requests: Counter[str] = field(default_factory=Counter)
    written_bytes: int = 0
    read_bytes: int = 0

    @property
    def puts(self) -> int:
        """Requests that write an object."""
        return self.requests["put"] + self.requests["put_new"]

    @property
    def lists(self) -> int:
        """Requests that list objects; each page of a listing is one."""
        return sum(self.requests[each] for each in _LISTS)

    @property
    def reads(self) -> int:
        """Requests that read an object, a part of it, or its size."""
        return sum(self.requests[each] for each in _READS)

    def copy(self) -> Usage:
        """Returns the present counts."""
        return Usage(Counter(self.requests.copy()), self.written_bytes, self.read_bytes)

    def add(self, other: Usage) -> None:
        """Adds the counts of another usage."""
        self.requests.update(other.requests)
        self.written_bytes += other.written_bytes
        self.read_bytes += other.read_bytes

    def since(self, earlier: Usage) -> Usage:
        """Returns the counts without those of an earlier copy."""
        return Usage(
            self.requests - earlier.requests,
            self.written_bytes - earlier.written_bytes,
            self.read_bytes - earlier.read_bytes,
        )


@runtime_checkable
class CountsRequests(Protocol):
    """A store that counts its requests."""

    requests: Counter[str]
    """Those made through this view, by operation."""

    @property
    def usages(self) -> Mapping[Purpose, Usage]:
        """The requests made through all views, by purpose."""
        ...

    def counted_as(self, purpose: Purpose) -> Store:
        """Returns a view of the same objects whose requests count for `purpose`."""
        ...


class CountingStore:
    """Base of stores that count their requests."""

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}
        """Objects that all views of the store share, by name."""
        self._usages: dict[Purpose, Usage] = {Purpose.OTHER: Usage()}
        self._count_in(self._usages[Purpose.OTHER])

    @property
    def usages(self) -> Mapping[Purpose, Usage]:
        return self._usages

    def counted_as(self, purpose: Purpose) -> Self:
        view = copy.copy(self)
        view._count_in(self._usages.setdefault(purpose, Usage()))
        return view

    def _count_in(self, usage: Usage) -> None:
        self.usage = usage
        """The requests made through this view, and others for the same purpose."""
        self.requests = usage.requests
        """Those requests, by operation."""


def counted(store: Store, purpose: Purpose) -> Store:
    """Returns a view of a store that counts for `purpose`; the store itself if it never counts."""
    return store.counted_as(purpose) if isinstance(store, CountsRequests) else store


def usages(store: Store) -> dict[Purpose, Usage]:
    """Returns a copy of the requests by purpose so far; empty if the store never counts."""
    if not isinstance(store, CountsRequests):
        return {}
    return {purpose: usage.copy() for purpose, usage in list(store.usages.items())}


def total(found: Iterable[Usage]) -> Usage:
    """Returns the sum of counts."""
    whole = Usage()
    for each in found:
        whole.add(each)
    return whole
