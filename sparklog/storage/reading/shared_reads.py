"""Reads the payloads of entries that are close together in an object with one request for all.

A flush contains entries of many partitions, so a reader of many of them would otherwise make a
request for each entry, although all of them are in a few objects. Where requests cost nothing, each
entry is read on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from sparklog import limits
from sparklog.storage import wal
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import Located

SPAN_BYTES: Final = 1 * limits.MIB  # of one request for several entries
HELD_BYTES: Final = 16 * limits.MIB  # of all such requests, until their entries have been returned
_GAP_BYTES: Final = 64 * limits.KIB  # of other entries that are read along between two


@dataclass(slots=True)
class _Span:
    """Bytes of an object that are read with one request."""

    path: str
    first: int
    end: int
    left: int = 1
    """The number of payloads in it that have not been returned yet."""
    data: pa.Buffer | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during the request, which other threads wait for."""


class SharedReads:
    """The payloads of `entries`, each of which is requested once, in any order. Thread-safe."""

    def __init__(self, store: Store, entries: Iterable[Located]) -> None:
        self._store = store
        self._spans: dict[tuple[str, int], _Span] = {}
        """By the path and the first byte of each entry that shares its request with others."""
        if store.requests_at_once > 1:
            self._plan(entries)

    def _plan(self, entries: Iterable[Located]) -> None:
        places = sorted(wal.payload_place(each) for each in entries)
        spans: list[tuple[_Span, list[int]]] = []
        for path, first, length in places:
            span, members = spans[-1] if spans else (None, [])
            if (
                span is not None
                and span.path == path
                and first - span.end <= _GAP_BYTES
                and first + length - span.first <= SPAN_BYTES
            ):
                span.end = max(span.end, first + length)
                span.left += 1
                members.append(first)
            else:
                spans.append((_Span(path, first, first + length), [first]))
        left_bytes = HELD_BYTES
        for span, members in sorted(spans, key=lambda each: -each[0].left):
            left_bytes -= span.end - span.first
            if span.left == 1 or left_bytes < 0:
                break
            for first in members:
                self._spans[span.path, first] = span

    def payload(self, located: Located) -> pa.Buffer:
        """Returns the bytes of the entry. Raises what `wal.read_payload` raises."""
        path, first, length = wal.payload_place(located)
        span = self._spans.get((path, first))
        if span is None or not length:
            return wal.read_payload(self._store, located)
        with span.lock:
            data = span.data
            if data is None:
                data = self._store.get_range(path, span.first, span.end - span.first)
            span.left -= 1
            span.data = data if span.left > 0 else None
        start = min(first - span.first, data.size)
        found = data.slice(start, min(length, data.size - start))
        return wal.check_payload(located, found)
