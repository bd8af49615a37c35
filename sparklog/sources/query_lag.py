"""Lag of a streaming query, from its progress, as the metrics of Spark's Kafka source.

Spark leaves `sources[].metrics` of a Python source empty, so the metrics are computed from the
offsets in the progress. The source adds the time of each partition's first unread record to its
`latestOffset` (`offsets.encode_latest`), because offsets say nothing about time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from sparklog import errors
from sparklog.client.lag import PartitionLag
from sparklog.client.times import datetime_us
from sparklog.sources import offsets

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLag:
    """Lag of a streaming query, as of its newest progress."""

    query: str
    """The name of the query, or its id if it has none."""
    batch: int
    """The number of the micro-batch."""
    partitions: tuple[PartitionLag, ...]
    """In order of source, topic and number; `committed` is the end of the micro-batch."""
    lag_seconds: float | None
    """Estimated age of the oldest unread record when the micro-batch was planned; 0 if all had
    been read, None if unknown, as through `bootstrap`."""

    @property
    def total(self) -> int:
        """The sum of the partitions' lags."""
        return sum(each.lag or 0 for each in self.partitions)

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics by name: those of Spark's Kafka source, and `lagSeconds` if known."""
        lags = [each.lag or 0 for each in self.partitions]
        found = {
            "minOffsetsBehindLatest": float(min(lags)),
            "maxOffsetsBehindLatest": float(max(lags)),
            "avgOffsetsBehindLatest": sum(lags) / len(lags),
        }
        return found if self.lag_seconds is None else found | {"lagSeconds": self.lag_seconds}


def lag(query: StreamingQuery | Mapping[str, Any]) -> QueryLag | None:
    """Returns the lag of a query in the topics that it reads.

    Args:
        query: a streaming query, or its progress, such as `query.lastProgress` or a listener's
            `event.progress`.

    Returns None before the first micro-batch, and for a query that reads no partition of a topic.
    The lag is as of the planning of the query's last finished micro-batch.
    """
    progress = query if isinstance(query, Mapping) else query.lastProgress
    if progress is None:
        return None
    planned_us = datetime_us(datetime.fromisoformat(progress["timestamp"]))
    partitions: list[PartitionLag] = []
    ages: list[float | None] = []
    for source in progress["sources"]:
        for found, unread_since_ms in _partitions(source):
            partitions.append(found)
            if unread_since_ms is not None:
                ages.append(max(planned_us / 1e6 - unread_since_ms / 1e3, 0.0))
            else:
                ages.append(None if found.lag else 0.0)
    if not partitions:
        return None
    known = [age for age in ages if age is not None]
    return QueryLag(
        query=progress["name"] or str(progress["id"]),
        batch=progress["batchId"],
        partitions=tuple(partitions),
        lag_seconds=max(known) if len(known) == len(ages) else None,
    )


def _partitions(source: Mapping[str, Any]) -> Iterator[tuple[PartitionLag, int | None]]:
    """Yields each partition's lag and the time of its first unread record; none for other sources.

    A partition that was unknown to the micro-batch counts as unread from offset 0.
    """
    try:
        read = offsets.decode(json.loads(source["endOffset"]))
        latest = json.loads(source["latestOffset"])
        ends, since_ms = offsets.decode(latest), offsets.unread_since(latest)
    except (errors.BadRequest, ValueError, TypeError):
        return
    for topic, each in ends.items():
        known = read[topic].offsets if topic in read and read[topic].id == each.id else {}
        for number, end in each.offsets.items():
            at = known.get(number, 0)
            lag = max(end - at, 0)
            found = PartitionLag(topic=topic, partition=number, committed=at, end=end, lag=lag)
            yield found, since_ms[topic].get(number)


class LagListener(StreamingQueryListener):
    """Passes the lag of queries that read topics to a function, once for each micro-batch.

    Args:
        report: called in the thread of Spark's listeners. Spark logs its errors.

    Use it as `spark.streams.addListener(LagListener(report))`.
    """

    def __init__(self, report: Callable[[QueryLag], None]) -> None:
        self._report = report

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        del event

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        found = lag(event.progress)
        if found is not None:
            self._report(found)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        del event
