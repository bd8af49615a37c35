"""Helpers for tests of the Spark source: distinct records, and the rows of a query."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from sparklog.client.log import Log

_MAX_ERROR: Final = 500
AT = datetime(2013, 1, 1, 5, 15, tzinfo=UTC)


def send(log: Log, first: int, end: int, topic: str = "t", at: datetime = AT) -> None:
    """Sends records `first` … `end` - 1, alternating between two partitions, with one timestamp."""
    with log.producer() as producer:
        for number in range(first, end):
            producer.send(
                topic,
                key=b"k%d" % number,
                value=b"v%d" % number,
                partition=number % 2,
                timestamp=at,
                headers=[("h", b"%d" % number)],
            )


def values(frame: DataFrame) -> list[str]:
    """The frame's values, sorted by number."""
    rows = frame.selectExpr("cast(value as string) as value").collect()
    return sorted((row.value for row in rows), key=lambda value: int(value[1:]))


def sent(first: int, end: int) -> list[str]:
    """Returns the expected `values`."""
    return [f"v{number}" for number in range(first, end)]


class Collected:
    """Rows of a query's batches; `rows` are (partition, offset, value)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, str]] = []
        self.sizes: list[int] = []

    def __call__(self, batch: DataFrame, number: int) -> None:
        del number
        found = batch.selectExpr("partition", "offset", "cast(value as string)").collect()
        self.rows += [tuple(row) for row in found]
        self.sizes.append(len(found))

    def once(self) -> list[str]:
        """Returns the values, sorted; asserts that no (partition, offset) occurs twice."""
        places = sorted(row[:2] for row in self.rows)
        assert len(set(places)) == len(places)
        return sorted((row[2] for row in self.rows), key=lambda value: int(value[1:]))


def start(
    frame: DataFrame, checkpoint: Path, sink: Callable[[DataFrame, int], None], **trigger: Any
) -> StreamingQuery:
    """Starts a query that hands its batches to `sink`.

    An error in `sink` is printed, and a shortened one ends the query. On a long traceback, the
    regular expression `StreamExecution.PROXY_ERROR` overflows the stack of the query's thread,
    after which the query stays active and has no exception.
    """

    def take(batch: DataFrame, number: int) -> None:
        try:
            sink(batch, number)
        except BaseException as error:
            traceback.print_exc()
            raise RuntimeError(f"{type(error).__name__}: {error}"[:_MAX_ERROR]) from None

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    return writer.trigger(**trigger).start() if trigger else writer.start()
