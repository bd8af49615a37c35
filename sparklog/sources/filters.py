"""What a query's filters leave of a plan: slices that no wanted row can be in are not read.

Filters only skip here; Spark applies all of them to the rows, so a filter that is not understood
costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from sparklog import limits
from sparklog.client.times import datetime_us
from sparklog.sources.batch import BatchReader
from sparklog.sources.options import SourceOptions
from sparklog.sources.scan import Scan
from sparklog.storage.plan import earliest_timestamp_us, latest_timestamp_us
from sparklog.storage.snapshot import Slice

_T = TypeVar("_T")

_OFFSET_MAX: Final = 2**63 - 1
_BELOW: Final = (LessThan, LessThanOrEqual)
_ABOVE: Final = (GreaterThan, GreaterThanOrEqual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Bounds of the rows that can pass, all included."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offsets: tuple[int, int] = (0, _OFFSET_MAX)
    timestamps_us: tuple[int, int] = (limits.TIMESTAMP_MIN_US, limits.TIMESTAMP_MAX_US)

    def narrowed(self, each: Filter) -> Wanted:
        """With one more filter; the same where that is of no use here."""
        path: tuple[str, ...] = getattr(each, "attribute", ())
        match path[0] if len(path) == 1 else "":
            case "topic" if isinstance(each, EqualTo | In):
                return replace(self, topics=_common(self.topics, each))
            case "partition" if isinstance(each, EqualTo | In):
                return replace(self, partitions=_common(self.partitions, each))
            case "offset":
                return replace(self, offsets=_narrowed(self.offsets, each, int))
            case "timestamp" if _has_zone(each):
                return replace(self, timestamps_us=_narrowed(self.timestamps_us, each, datetime_us))
        return self

    def slices(self, planned: Sequence[Slice]) -> list[Slice]:
        """What of a plan may hold such rows, cut to their offsets."""
        return [
            msgspec.structs.replace(
                each,
                first=max(each.first, self.offsets[0]),
                end=min(each.end, self.offsets[1] + 1),
            )
            for each in planned
            if self._may_be_in(each)
        ]

    def _may_be_in(self, each: Slice) -> bool:
        first, last = self.offsets
        earliest, latest = self.timestamps_us
        return (
            (self.topics is None or each.topic in self.topics)
            and (self.partitions is None or each.partition in self.partitions)
            and max(each.first, first) < min(each.end, last + 1)
            and earliest_timestamp_us(each) <= latest
            and latest_timestamp_us(each) >= earliest
        )


def _common(known: frozenset[_T] | None, each: EqualTo | In) -> frozenset[_T]:
    values: frozenset[_T] = frozenset(each.value if isinstance(each, In) else (each.value,))
    return values if known is None else known & values


def _narrowed(bounds: tuple[int, int], each: Filter, number: Any) -> tuple[int, int]:
    low, high = bounds
    if isinstance(each, In):
        values = [number(value) for value in each.value if value is not None]
        return (max(low, min(values)), min(high, max(values))) if values else (1, 0)
    if not isinstance(each, (EqualTo, *_ABOVE, *_BELOW)) or each.value is None:
        return bounds
    value = number(each.value)
    if isinstance(each, (EqualTo, *_ABOVE)):
        low = max(low, value + isinstance(each, GreaterThan))
    if isinstance(each, (EqualTo, *_BELOW)):
        high = min(high, value - isinstance(each, LessThan))
    return low, high


def _has_zone(each: Filter) -> bool:
    """Whether what the filter compares with are points in time, which a local time is not."""
    values = each.value if isinstance(each, In) else (getattr(each, "value", None),)
    return all(isinstance(value, datetime) and value.tzinfo is not None for value in values)


class FilteringReader(BatchReader):
    """A batch's reader for a session that hands filters on."""

    def __init__(self, options: SourceOptions, scan: Scan) -> None:
        super().__init__(options, scan)
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        for each in filters:
            self._wanted = self._wanted.narrowed(each)
        return filters  # all are still to be applied to the rows

    def wanted(self, planned: Sequence[Slice]) -> Sequence[Slice]:
        return self._wanted.slices(planned)
