"""The topic `__consumer_offsets`: the records of consumer groups, written and read back.

It is a topic like any other, with key compaction, so its table can answer questions about groups.
It is created when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from sparklog import errors
from sparklog.broker.broker import Append, Broker, PendingAppend
from sparklog.formats import consumer_offsets
from sparklog.formats.consumer_offsets import TOPIC, Key, Value

_SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_READ_ROWS = 1_000_000
_READ_BYTES = 64 << 20
"""Limits of the portions of a partition that are searched for the last record of each key."""


class OffsetsTopic:
    """Encodes, stores and reads the records; all methods may be called from any thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def ensure(self) -> None:
        """Creates the topic if it is missing. Raises what `TopicAdmin.create` raises."""
        self._broker.topics.ensure_offsets_topic()

    def partition_of(self, group: str) -> int:
        """Returns the partition of a group's records. Raises `UnknownTopic`."""
        return consumer_offsets.partition_of(group, self._broker.partitions.count(TOPIC))

    def find_partition(self, group: str) -> int | None:
        """Returns the partition of a group's records, or None if the topic does not exist yet."""
        try:
            return self.partition_of(group)
        except errors.UnknownTopic:
            return None

    def leader_of(self, group: str) -> int:
        """Returns the id of the broker that leads the partition of a group's records.

        That is this broker if the topic does not exist yet.
        """
        partition = self.find_partition(group)
        if partition is None:
            return self._broker.broker_id
        return self._broker.partitions.statuses(TOPIC)[partition].leader

    def led(self) -> Mapping[int, int]:
        """Returns the partitions that this broker serves, with their leader epochs."""
        return self._broker.partitions.led(TOPIC)

    def empty(self) -> Mapping[int, int]:
        """Returns those of the `led` partitions that have never had a record."""
        statuses = self._broker.partitions.statuses(TOPIC)
        return {n: epoch for n, epoch in self.led().items() if statuses[n].end == 0}

    def prepare(self, group: str, records: Mapping[Key, Value | None]) -> Append:
        """Encodes records, which become durable together; a value of None deletes its key.

        Slow for many records. Raises `UnknownTopic`, `RecordTooLarge` and `BatchTooLarge`.
        """
        keys = [consumer_offsets.encode_key(key) for key in records]
        values = [
            None if value is None else consumer_offsets.encode_value(value)
            for value in records.values()
        ]
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        return self._broker.prepare_internal(TOPIC, self.partition_of(group), batch)

    def submit(self, append: Append) -> PendingAppend:
        """Queues prepared records. Raises the error that ended the writer."""
        return self._broker.submit_internal(append)

    def read(self, number: int) -> Iterator[tuple[Key, bytes]]:
        """Yields the last value of each key of a partition, in no particular order.

        Raises what `Broker.read` raises.
        """
        partition = self._broker.partitions.status(TOPIC, number)
        found: dict[bytes, bytes | None] = {}
        for rows in self._read_portions(number, partition.start, partition.end):
            found.update(consumer_offsets.last_of_each_key(rows))
        for data, value in found.items():
            key = consumer_offsets.decode_key(data)
            if key is not None and value is not None:
                yield key, value

    def _read_portions(self, number: int, start: int, end: int) -> Iterator[pa.Table]:
        portion: list[pa.RecordBatch] = []
        rows = size_bytes = 0
        columns = ["partition", "offset", "key", "value"]
        for batch in self._broker.read(TOPIC, number, start, end, columns=columns):
            portion.append(batch.rows)
            rows += batch.rows.num_rows
            size_bytes += batch.rows.nbytes
            if rows >= _READ_ROWS or size_bytes >= _READ_BYTES:
                yield pa.Table.from_batches(portion)
                portion, rows, size_bytes = [], 0, 0
        if portion:
            yield pa.Table.from_batches(portion)
