"""Topic tables for tests, and small changes to them in one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import numpy as np
import pyarrow as pa

from sparklog.clock import Clock, ManualClock
from sparklog.formats.record import rows
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import TableChange, create_change
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.topic_table import TopicTable

TOPIC_ID = "0f3a9c"
START_US = 1_700_000_000_123_456

_numbers = itertools.count()


def table_file(
    clock: Clock, partition: int, first: int, last: int, *, topic_id: str = TOPIC_ID
) -> TableFile:
    """A file as `write_file` would report it, without any bytes behind it."""
    return TableFile(
        path=f"partition={partition}/{topic_id}-{first}-{last}-{next(_numbers):016x}.parquet",
        partition=partition,
        size_bytes=100 * (last - first + 1),
        rows=last - first + 1,
        first=first,
        last=last,
        min_timestamp_us=START_US + first,
        max_timestamp_us=START_US + last,
        modified_us=clock.now_us() // 1_000 * 1_000,
    )


def no_table(topic: str = "t") -> TopicTable:
    """A table that does not exist, for topics whose table is never used."""
    clock = ManualClock()
    return TopicTable(MemoryStore(clock), topic, clock=clock)


def create(table: TopicTable, partitions: int = 2, *, topic_id: str = TOPIC_ID) -> TableSnapshot:
    """Commits a topic's first version."""
    return table.commit(lambda _: create_change(topic_id, partitions, {"retention.ms": "1000"}))


def appending(
    clock: Clock, rows_per_partition: int = 10
) -> Callable[[TableSnapshot], TableChange | None]:
    """Returns a decision that adds one file at the current end of every partition."""

    def decide(snapshot: TableSnapshot) -> TableChange:
        topic_id = snapshot.topic_id
        assert topic_id is not None
        files = tuple(
            table_file(clock, partition, end, end + rows_per_partition - 1, topic_id=topic_id)
            for partition, end in enumerate(snapshot.ends)
        )
        ends = {end_app_id(topic_id, file.partition): (file.last or 0) + 1 for file in files}
        return TableChange(adds=files, txns=ends)

    return decide


def append(table: TopicTable, times: int = 1) -> TableSnapshot:
    """Makes this many commits, each with a file of ten generated rows for every partition."""
    for _ in range(times):
        table.commit(appending(table.clock))
    return table.snapshot


def record_batch(
    partition: int, first: int, count: int, *, seed: int = 0, value_bytes: int = 20
) -> pa.RecordBatch:
    """Rows of `ROW_SCHEMA` with keys that repeat, headers and incompressible values."""
    random = np.random.default_rng([seed, partition, first])
    payload = pa.record_batch(
        {
            "timestamp": pa.array(
                START_US + first + np.arange(count), pa.timestamp("us", tz="UTC")
            ),
            "key": pa.array([b"key-%d" % (number % 7) for number in range(count)], pa.binary()),
            "value": pa.array([random.bytes(value_bytes) for _ in range(count)], pa.binary()),
            "headers": pa.array(
                [[{"key": "trace", "value": b"%d" % number}] for number in range(count)],
                pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
            ),
        }
    )
    return rows(payload, partition=partition, base_offset=first, timestamp_us=0, timestamp_type=0)


def with_nulls(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """The rows with nulls in these columns."""
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(batch.num_rows, field.type) if field.name in names else batch.column(number)
            for number, field in enumerate(batch.schema)
        ],
        schema=batch.schema,
    )


def publish_rows(
    table: TopicTable, partition: int, count: int, *, seed: int = 0, nulls: Collection[str] = ()
) -> TableFile:
    """Writes and commits a real file at the end of the partition. Returns its table entry.

    `nulls`: columns that are null in all rows.
    """
    topic_id = table.snapshot.topic_id
    assert topic_id is not None
    first = table.snapshot.ends[partition]
    file = data_file.write_file(
        table.store,
        topic=table.topic,
        topic_id=topic_id,
        partition=partition,
        batches=[with_nulls(record_batch(partition, first, count, seed=seed), nulls)],
        clock=table.clock,
    )
    txns = {end_app_id(topic_id, partition): first + count}
    table.commit(lambda _: TableChange(adds=(file,), txns=txns))
    return file


def manual_clock(*, at_us: int = START_US) -> ManualClock:
    """A manual clock at a whole millisecond, the precision of file times in the log."""
    return ManualClock(now_us=at_us // 1_000 * 1_000)
