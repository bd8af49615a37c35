"""The topic `__consumer_offsets`: what groups have committed, written and read back.

It is a topic like any other, compacted by keys, so that its table answers questions about groups.
It is created when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from sparklog import consumeroffsets, errors
from sparklog.broker.core import Append, Core, Ticket
from sparklog.consumeroffsets import TOPIC, Key, Value

_SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_READ_ROWS = 1_000_000
"""Of a partition, that are looked through together for the last of each key."""


class OffsetsTopic:
    """All methods may be called from any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ensure(self) -> None:
        """Creates the topic where it is missing. Raises what `Core.create_topic` raises."""
        self._core.ensure_offsets_topic()

    def partition_of(self, group: str) -> int:
        """Where a group's records go. Raises `UnknownTopic`."""
        return consumeroffsets.partition_of(group, len(self._core.places(TOPIC)))

    def prepare(self, group: str, records: Mapping[Key, Value | None]) -> Append:
        """Encodes the records, which become durable together; None: what the key names is gone.

        Takes long for many. Raises `UnknownTopic`, `RecordTooLarge` and `BatchTooLarge`.
        """
        keys = [consumeroffsets.encode_key(key) for key in records]
        values = [
            None if value is None else consumeroffsets.encode_value(value)
            for value in records.values()
        ]
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        return self._core.prepare_internal(TOPIC, self.partition_of(group), batch)

    def submit(self, append: Append) -> Ticket:
        """Queues the records, to be waited for. Raises what ended the writer."""
        return self._core.submit_internal(append)

    def read(self) -> Iterator[tuple[Key, bytes]]:
        """What stands for each key, in no order. Raises what `Core.read` raises."""
        try:
            places = self._core.places(TOPIC)
        except errors.UnknownTopic:
            return
        for number, place in enumerate(places):
            found: dict[bytes, bytes | None] = {}
            for rows in self._in_portions(number, place.start, place.end):
                found.update(consumeroffsets.last_of_each_key(rows))
            for data, value in found.items():
                key = consumeroffsets.decode_key(data)
                if key is not None and value is not None:
                    yield key, value

    def _in_portions(self, number: int, start: int, end: int) -> Iterator[pa.Table]:
        portion: list[pa.RecordBatch] = []
        columns = ["partition", "offset", "key", "value"]
        for batch in self._core.read(TOPIC, number, start, end, columns=columns):
            portion.append(batch.rows)
            if sum(each.num_rows for each in portion) >= _READ_ROWS:
                yield pa.Table.from_batches(portion)
                portion = []
        if portion:
            yield pa.Table.from_batches(portion)
