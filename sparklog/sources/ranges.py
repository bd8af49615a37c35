"""Rows for `rows` = `ranges`: a micro-batch's offsets by partition, instead of its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sparklog.sources.offsets import Position, TopicOffsets
from sparklog.sources.tasks import Task
from sparklog.spark_compat import arrow_schema
from sparklog.storage.snapshot import Slice

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

DDL: Final = "topic STRING, id STRING, partition INT, first BIGINT, `end` BIGINT"
"""Columns of a row; `id` is the topic id, and `end` is exclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeScan:
    """Scan that returns a row for each slice, and reads no records."""

    schema: pa.Schema

    def batches(self, task: Task) -> Iterator[pa.RecordBatch]:
        """Yields one batch of `schema`."""
        rows = [
            {
                "topic": each.topic,
                "id": each.topic_id,
                "partition": each.partition,
                "first": each.first,
                "end": each.end,
            }
            for each in task.slices
        ]
        yield pa.RecordBatch.from_pylist(rows, schema=self.schema)


def scan(wanted: StructType) -> RangeScan:
    """Returns the scan.

    Args:
        wanted: the columns of `DDL`.
    """
    return RangeScan(schema=arrow_schema(wanted))


def positions(slices: Iterable[Slice]) -> tuple[Position, Position]:
    """Returns the start and the end of the given slices, each of a different partition."""
    ids: dict[str, str] = {}
    firsts: dict[str, dict[int, int]] = {}
    ends: dict[str, dict[int, int]] = {}
    for each in slices:
        ids[each.topic] = each.topic_id
        firsts.setdefault(each.topic, {})[each.partition] = each.first
        ends.setdefault(each.topic, {})[each.partition] = each.end
    start, end = (
        {topic: TopicOffsets(ids[topic], offsets) for topic, offsets in found.items()}
        for found in (firsts, ends)
    )
    return start, end
