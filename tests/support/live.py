"""A real broker on an in-memory store, with the setup and checks that tests of clients need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
import pyarrow as pa

from sparklog import testing
from sparklog.clock import SystemClock
from sparklog.formats import flight_messages, record
from sparklog.storage.follow import RootFollower
from sparklog.storage.reading.read import read_slice
from tests.support.flights import BrokerClient, Stream

SLICE_ROWS = 1_000
"""Rows per batch of `fill`, so that streams to consumers have several batches."""


class LiveBroker(testing.Broker):
    """Records the requests of clients; `fault` sees each one before it takes effect.

    It ends with a crash, because publishing all that a test wrote would take longer than the test.
    """

    def __init__(self, settings: Mapping[str, int] | None = None) -> None:
        super().__init__(kafka=False, settings=settings or {})
        self.requests: list[testing.Request] = []
        self.fault: Callable[[testing.Request], None] = lambda _: None
        self.on_request = self._note

    def _note(self, request: testing.Request) -> None:
        self.requests.append(request)
        self.fault(request)

    def __enter__(self) -> Self:
        self.restart()
        return self

    def close(self) -> None:
        self.crash()
        super().close()

    def move(self) -> None:
        """Restarts at another address."""
        self._settings = msgspec.structs.replace(
            self._settings,
            flight=msgspec.structs.replace(self._settings.flight, listen="127.0.0.1:0"),
        )
        self.restart()

    # -------------------------------------------------------------------------- setup

    def create(self, topic: str, partitions: int = 1, **config: str) -> None:
        """Creates a topic; underscores in keys of `config` stand for dots."""
        with BrokerClient(self.address) as client:
            client.create(topic, partitions, **config)

    def delete(self, topic: str) -> None:
        with BrokerClient(self.address) as client:
            client.action("topics.delete", flight_messages.TopicName(topic=topic))

    def trim(self, topic: str, partition: int, start: int) -> None:
        """Moves the log start."""
        request = flight_messages.DeleteRecords(topic=topic, offsets={partition: start})
        with BrokerClient(self.address) as client:
            client.action("records.delete", request)

    def fill(self, topic: str, rows: int, partition: int = 0, **columns: Any) -> None:
        """Appends values "0", "1", ... from the partition's end on."""
        with BrokerClient(self.address) as client:
            end = client.describe(topic).partitions[partition].end
        values = [b"%d" % i for i in range(end, end + rows)]
        self.append(topic, pa.RecordBatch.from_pydict({"value": values} | columns), partition)

    def append(self, topic: str, batch: pa.RecordBatch, partition: int = 0) -> None:
        """Appends payload columns, in batches of `SLICE_ROWS`."""
        batch = record.conform_payload(batch)
        header = flight_messages.AppendHeader(partition=partition)
        with BrokerClient(self.address) as client, Stream(client, topic, batch.schema) as stream:
            for start in range(0, batch.num_rows, SLICE_ROWS):
                stream.append(batch.slice(start, SLICE_ROWS), header)

    # -------------------------------------------------------------------------- inspection

    def names(self) -> list[str]:
        """The names of the requests."""
        return [each.name for each in self.requests]

    def appended(self, topic: str = "") -> list[testing.Request]:
        """The requests to append a batch."""
        return [
            each for each in self.requests if each.name == "append" and topic in ("", each.topic)
        ]

    def rows(self, topic: str, partition: int = 0) -> list[dict[str, Any]]:
        """All rows of a partition in the store, in the order of offsets."""
        follower = RootFollower(self._store, clock=SystemClock())
        snapshot = follower.refresh([topic])[topic]
        start, end = snapshot.starts[partition], follower.ends(snapshot)[partition]
        slices = follower.plan(topic, snapshot, partition, start, end)
        return [
            row
            for piece in slices
            for batch in read_slice(self._store, piece)
            for row in batch.to_pylist()
        ]

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [row["value"] for row in self.rows(topic, partition)]
