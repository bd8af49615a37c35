"""Counts for the broker's metrics: plain numbers on objects that exist anyway.

A count is incremented where its event happens, and read when metrics are collected. Nothing here
takes a lock. In CPython with a GIL, one thread's addition to an attribute is not interrupted by
another thread; elsewhere, a count could at worst be lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from sparklog.storage.snapshot import TableFile

_STEPS_BITS: Final = 3
_STEPS: Final = 1 << _STEPS_BITS
"""Buckets of a `Distribution` per power of two, so that a bucket spans at most an eighth of it."""
_MOST_BITS: Final = 40
_BUCKETS: Final = (_MOST_BITS - _STEPS_BITS) * _STEPS + _STEPS
_WINDOW_SECONDS: Final = 60.0
_SAMPLE_SECONDS: Final = 10.0


class Budget(NamedTuple):
    """A memory budget: the bytes currently held, and their limit."""

    name: str
    held_bytes: int
    limit_bytes: int


class TopicCounts:
    """Traffic of one topic since this broker began to lead it."""

    __slots__ = (
        "batches_in",
        "bytes_in",
        "bytes_out",
        "failed_fetches",
        "failed_produces",
        "fetches",
        "records_in",
    )

    def __init__(self) -> None:
        self.batches_in = 0
        """Batches appended: one per partition in a produce request."""
        self.records_in = 0
        self.bytes_in = 0
        """Bytes of the appended records, as stored in the write-ahead log."""
        self.bytes_out = 0
        """Bytes of records sent to consumers."""
        self.failed_produces = 0
        """Batches that were rejected."""
        self.fetches = 0
        """Partitions in fetch requests, and reads over the native protocol."""
        self.failed_fetches = 0

    def add(self, other: TopicCounts) -> None:
        """Adds the counts of another topic."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class UpkeepCounts:
    """Bytes and files written to the tables, by publishing and by compaction."""

    __slots__ = ("commits", "merged_bytes", "merged_files", "published_bytes", "published_files")

    def __init__(self) -> None:
        self.commits = 0
        self.published_files = 0
        self.published_bytes = 0
        self.merged_files = 0
        """Files that replaced others in compactions."""
        self.merged_bytes = 0

    def add_published(self, sizes_bytes: Sequence[int]) -> None:
        """Counts a commit of records in files of these sizes."""
        size, files = sum(sizes_bytes), len(sizes_bytes)
        self.commits += 1
        self.published_files += files
        self.published_bytes += size

    def add_merged(self, files: Iterable[TableFile]) -> None:
        """Counts the files written by a file compaction or a key compaction."""
        for each in files:
            self.merged_files += 1
            self.merged_bytes += each.size_bytes

    @property
    def amplification(self) -> float:
        """The bytes written per byte published; 1 before anything is published."""
        written_bytes = self.published_bytes + self.merged_bytes
        return written_bytes / self.published_bytes if self.published_bytes else 1.0


class Distribution:
    """A distribution of non-negative integers, such as durations in µs.

    Each number is counted in a bucket that spans at most an eighth of its power of two; numbers
    below 16 have individual buckets.
    """

    __slots__ = ("buckets", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.buckets = [0] * _BUCKETS

    def add(self, value: int) -> None:
        """Counts one number; a negative one counts as 0."""
        value = max(value, 0)
        self.buckets[min(_index(value), _BUCKETS - 1)] += 1
        self.count += 1
        self.total += value

    def below(self, power: int) -> int:
        """Returns how many numbers are below 2 ** `power`, exactly."""
        return sum(self.buckets[: _index(1 << power)])


def _index(value: int) -> int:
    if value < _STEPS:
        return value
    shift = value.bit_length() - _STEPS_BITS - 1
    return (shift << _STEPS_BITS) + (value >> shift)


def _middle(index: int) -> float:
    """Returns the midpoint of the numbers that fall into a bucket."""
    if index < 2 * _STEPS:
        return float(index)
    shift = (index >> _STEPS_BITS) - 1
    low = (_STEPS + (index & (_STEPS - 1))) << shift
    return low + ((1 << shift) - 1) / 2


class RecentQuantiles:
    """Quantiles of a distribution over about the last minute, for a reader that asks repeatedly.

    The writer of the distribution pays nothing: the reader keeps earlier snapshots of it.
    """

    __slots__ = ("_distribution", "_states")

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._states: deque[tuple[float, Sequence[int]]] = deque([(float("-inf"), ())])

    def at(self, now_seconds: float, quantiles: Sequence[float]) -> list[float]:
        """Returns the quantiles of the last minute's numbers; 0 if there are none."""
        buckets = list(self._distribution.buckets)
        states = self._states
        while len(states) > 1 and states[1][0] <= now_seconds - _WINDOW_SECONDS:
            states.popleft()
        before = states[0][1]
        recent = [now - then for now, then in zip(buckets, before, strict=True)] if before else None
        if now_seconds - states[-1][0] >= _SAMPLE_SECONDS:
            states.append((now_seconds, buckets))
        return _quantiles(buckets if recent is None else recent, quantiles)


def _quantiles(buckets: Sequence[int], quantiles: Sequence[float]) -> list[float]:
    """Returns the midpoint of the bucket of each quantile; `quantiles` must be sorted."""
    left = sum(buckets)
    if not left:
        return [0.0] * len(quantiles)
    found: list[float] = []
    total, passed, index = left, buckets[0], 0
    for quantile in quantiles:
        while passed < quantile * total:
            index += 1
            passed += buckets[index]
        found.append(_middle(index))
    return found


class ApiCounts:
    """Requests with one API key."""

    __slots__ = ("times_us", "versions")

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        """Answered requests, by version."""
        self.times_us = Distribution()
        """From the arrival of a request's last byte until its response is written."""


class ListenerCounts:
    """Metrics of the Kafka listener, all counted in its event loop."""

    __slots__ = (
        "apis",
        "authentications",
        "authentications_failed",
        "connections_opened",
        "errors",
        "idle_share",
        "loop_delay_us",
        "names",
        "reauthentications",
        "reauthentications_failed",
    )

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        """The names of the APIs, as Kafka's metrics spell them, by API key."""
        self.apis: dict[int, ApiCounts] = {}
        """By API key; only those that were requested."""
        self.errors: Counter[tuple[int, str]] = Counter()
        """Errors in responses, by API key and the error's name; for produce and fetch requests, one
        per partition."""
        self.connections_opened = 0
        self.authentications = 0
        """Connections that completed a TLS handshake, a login or both."""
        self.authentications_failed = 0
        """Those whose handshake or login failed or did not end in time."""
        self.reauthentications = 0
        """Logins on connections that had logged in before (KIP-368)."""
        self.reauthentications_failed = 0
        """Those that failed or did not end in time."""
        self.loop_delay_us = Distribution()
        """The delay of the event loop's timers."""
        self.idle_share = 1.0
        """The share of time during which the event loop's thread used no CPU."""

    def answered(self, key: int, version: int, seconds: float) -> None:
        """Counts a request that was answered."""
        found = self.apis.get(key)
        if found is None:
            found = self.apis[key] = ApiCounts()
        found.versions[version] += 1
        found.times_us.add(int(seconds * 1e6))
