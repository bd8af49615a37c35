"""A root made by hand: topics, log objects and tables, step by step as a broker leaves them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from sparklog.clock import Clock
from sparklog.formats.record import PAYLOAD_SCHEMA, rows_of_run, timestamp_range_us
from sparklog.storage import wal
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    Epoch,
    TopicMetadata,
)
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import Entry, EntryKind, Located
from sparklog.storage.table.changes import TableChange, create_change, delete_change
from sparklog.storage.table.data_file import write_file
from sparklog.storage.table.names import end_app_id
from sparklog.storage.table.names import start_app_id as log_start_app_id
from sparklog.storage.table.topic_table import TopicTable

BROKER = 1
EPOCH = 1

Append = tuple[str, int, pa.RecordBatch]


def payload(values: Sequence[bytes | None], **columns: Any) -> pa.RecordBatch:
    """Returns rows of those values, with further columns of `PAYLOAD_SCHEMA` by name."""
    given: Mapping[str, Any] = {"value": values, **columns}
    schema = pa.schema([field for field in PAYLOAD_SCHEMA if field.name in given])
    return pa.record_batch(
        [pa.array(given[field.name], field.type) for field in schema], schema=schema
    )


class HandmadeRoot:
    """Writes the root that a broker would write under `store`, without background work."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self._ids = itertools.count()
        self._meta = MetadataStore(store, clock=clock)
        open_cluster(store, clock=clock, create=True)
        self._meta.change(
            lambda before: msgspec.structs.replace(
                before,
                brokers={BROKER: BrokerRegistration(epoch=EPOCH)},
                open_epochs=(Epoch(BROKER, EPOCH),),
                controller=BROKER,
            )
        )
        self._log = wal.of(store, clock).appender(BROKER, EPOCH)
        self._log.append([(Entry(kind=EntryKind.OPEN), wal.EMPTY)])
        self._checkpoint = -1
        self._ends: dict[tuple[str, int], int] = {}
        self._unpublished: dict[tuple[str, int], list[Located]] = {}

    # -------------------------------------------------------------------------- topics

    def create_topic(self, topic: str, partitions: int = 2) -> str:
        """Creates a topic and returns its id."""
        topic_id = f"{next(self._ids):016x}"
        self._table(topic).commit(lambda _: create_change(topic_id, partitions, {}))
        self._set_topic(topic, topic_id, partitions)
        return topic_id

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Increases the partitions to this many in total."""
        topic_id = self.topic_id(topic)
        before = self._meta.current.topic(topic).partition_count
        app_ids = [
            name(topic_id, partition)
            for partition in range(before, partitions)
            for name in (end_app_id, log_start_app_id)
        ]
        properties = {"sparklog.partitions": str(partitions)}
        change = TableChange(txns=dict.fromkeys(app_ids, 0), properties=properties)
        self._table(topic).commit(lambda _: change)
        self._set_topic(topic, topic_id, partitions)

    def delete_topic(self, topic: str) -> None:
        self._meta.change(
            lambda before: msgspec.structs.replace(
                before,
                topics={name: each for name, each in before.topics.items() if name != topic},
            )
        )
        self._table(topic).commit(delete_change)

    def topic_id(self, topic: str) -> str:
        return self._meta.current.topic(topic).topic_id

    def _set_topic(self, topic: str, topic_id: str, partitions: int) -> None:
        known = TopicMetadata(
            topic_id=topic_id, leaders=(BROKER,) * partitions, leader_epochs=(0,) * partitions
        )
        self._meta.change(
            lambda before: msgspec.structs.replace(before, topics={**before.topics, topic: known})
        )

    def _table(self, topic: str) -> TopicTable:
        table = TopicTable(self.store, topic, clock=self.clock)
        table.refresh()
        return table

    # -------------------------------------------------------------------------- records

    def append(self, *appends: Append) -> None:
        """Appends one object to the log, with an entry for each (topic, partition, payload)."""
        entries = []
        for topic, partition, batch in appends:
            key = self.topic_id(topic), partition
            base = self._ends.get(key, 0)
            arrival_us = self.clock.now_us()
            low, high = timestamp_range_us(batch, arrival_us)
            entry = Entry(
                kind=EntryKind.RECORDS,
                topic_id=key[0],
                partition=partition,
                base_offset=base,
                count=batch.num_rows,
                min_timestamp_us=low,
                max_timestamp_us=high,
                arrival_us=arrival_us,
            )
            entries.append((entry, wal.encode_payload(batch)))
            self._ends[key] = base + batch.num_rows
        for each in self._log.append(entries).located:
            key = each.entry.topic_id, each.entry.partition
            self._unpublished.setdefault(key, []).append(each)

    def publish(self, topic: str) -> None:
        """Makes one commit, with a file for each partition that has unpublished records."""
        topic_id = self.topic_id(topic)
        files, txns = [], {}
        for key in [key for key in self._unpublished if key[0] == topic_id]:
            run = []
            for located in self._unpublished.pop(key):
                entry = located.entry
                batch = wal.decode_payload(entry, wal.read_payload(self.store, located))
                run.append((entry.base_offset, entry.arrival_us, entry.timestamp_type, batch))
            file = write_file(
                self.store,
                topic=topic,
                topic_id=topic_id,
                partition=key[1],
                batches=rows_of_run(run, partition=key[1]),
                clock=self.clock,
            )
            files.append(file)
            txns[end_app_id(topic_id, key[1])] = self._ends[key]
        if files:
            self._table(topic).commit(lambda _: TableChange(adds=tuple(files), txns=txns))

    def trim(self) -> None:
        """Removes log objects whose entries have all been published."""
        needed = sorted(
            {each.at.sequence for entries in self._unpublished.values() for each in entries}
        )
        newest = self._log.next_sequence - 1
        if newest == self._checkpoint:
            return
        self._checkpoint = newest
        self._log.checkpoint(newest, needed, b"")
        checkpoint = wal.Checkpoint(sequence=newest, needed=tuple(needed), state=b"")
        self._log.trim(checkpoint)

    def move_start(self, topic: str, partition: int, offset: int) -> None:
        """Moves the log start, as retention does, and removes files that are entirely below it."""
        table = self._table(topic)
        gone = [
            file
            for file in table.snapshot.files[partition]
            if file.last is not None and file.last < offset
        ]
        txns = {log_start_app_id(self.topic_id(topic), partition): offset}
        table.commit(lambda _: TableChange(removes=tuple(gone), txns=txns))
        self.store.delete(f"topics/{topic}/{file.path}" for file in gone)
