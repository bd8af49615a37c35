"""Timestamps of individual records, for measuring consumer lag in time.

A record's timestamp never changes, so each one is cached. That of an unpublished record is in the
statistics of its batch, if all records of the batch have the same timestamp; any other record is
read, from memory or from the table.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final, TypeAlias

import pyarrow as pa

from sparklog import errors
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.readers import LogReader

_RECORD_TIMES_REMEMBERED = 65_536

RecordKey: TypeAlias = tuple[str, str, int, int]
"""A record: topic, topic id, partition and offset."""
_COLUMNS: Final = ("offset", "timestamp")


class RecordTimes:
    """Looks up the timestamp of the first record from an offset on. One caller at a time."""

    def __init__(self, reader: LogReader, led_partitions: LedPartitions) -> None:
        self._reader = reader
        self._led_partitions = led_partitions
        self._known: OrderedDict[RecordKey, int] = OrderedDict()
        """In µs since the Unix epoch, least recently used first."""

    def known_us(self, key: RecordKey) -> int | None:
        """Returns the record's timestamp if that requires no read, else None."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            return found
        _, topic_id, number, offset = key
        topic = self._led_partitions.by_id(topic_id)
        partition = topic.partitions.get(number) if topic is not None else None
        if partition is None:
            return None
        waiting = self._led_partitions.backlog.unpublished_in(partition, offset, offset + 1)
        if not waiting or waiting[0].entry.base_offset > offset:
            return None
        entry = waiting[0].entry
        if entry.rows < entry.count:
            return None  # the first record from there on may be in a later entry
        return entry.min_timestamp_us if entry.min_timestamp_us == entry.max_timestamp_us else None

    def read_us(self, key: RecordKey) -> int | None:
        """Returns the timestamp of the first record from the offset on, and remembers it.

        None if there is no such record, or if it cannot be read now.
        """
        topic, topic_id, number, offset = key
        with contextlib.suppress(errors.SparklogError, OSError, pa.ArrowException):
            partition = self._led_partitions.topic(topic).partition(number)
            start = max(offset, partition.start)
            batches = self._reader.read(
                topic, number, start, partition.end,
                columns=_COLUMNS, batch_rows=1, topic_id=topic_id,
            )  # fmt: skip
            for batch in batches:  # the first ones may be gaps, without a row
                if batch.rows.num_rows:
                    found = int(batch.rows.column("timestamp").view(pa.int64())[0].as_py())
                    self._remember(key, found)
                    return found
        return None

    def _remember(self, key: RecordKey, timestamp_us: int) -> None:
        self._known[key] = timestamp_us
        if len(self._known) > _RECORD_TIMES_REMEMBERED:
            self._known.popitem(last=False)
