"""Records to be sent: the batch being filled, its parts by partition, and their futures.

A *batch* collects the records of one topic as they are sent, in plain lists. Once sealed, it turns
into Arrow columns and is split into *parts*, one per partition, in the order of sending. The broker
acks parts. A `RecordFuture` is a batch and a row: a record's metadata is computed on demand.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import repeat
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import errors
from sparklog.client import arguments
from sparklog.client.times import utc
from sparklog.clock import ThreadClock
from sparklog.display import html_table
from sparklog.formats import flight_messages
from sparklog.formats.partitioner import NO_KEY, parted, partitions_of
from sparklog.formats.record import HEADERS, LOG_APPEND_TIME, PAYLOAD_SCHEMA, TIMESTAMP

Header = tuple[str, bytes | None]
Callback = tuple[int, Callable[["RecordFuture"], object]]
"""The number of a row, and the function to call once its send has succeeded or failed."""
Split = tuple[dict[int, "PartitionBatch"], npt.NDArray[np.int32] | None]
"""Parts by partition, and the partition of each row if there are several."""

OnDelivery = Callable[["errors.SparklogError | None", "RecordMetadata | None"], object]

RECORD_OVERHEAD_BYTES: Final = 64
"""Memory per record on top of its bytes, so that empty records are bounded too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMetadata:
    """Position of a durable record in the log."""

    topic: str
    partition: int
    offset: int
    timestamp_us: int
    """Microseconds since 1970-01-01 UTC."""

    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as in Kafka's clients."""
        return self.timestamp_us // 1000

    @property
    def datetime(self) -> datetime:
        return utc(self.timestamp_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedRange:
    """Position of a table's durable rows in the log: `rows` of them, starting at `offset`."""

    topic: str
    partition: int
    offset: int
    rows: int


class Owner(Protocol):
    """The sender of a batch, as its futures see it."""

    clock: ThreadClock
    lock: threading.Lock
    topic: str

    def await_batch(
        self, batch: ProducerBatch, is_done: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Sends `batch` immediately; returns False if not done by `deadline` (monotonic)."""
        ...

    def expedite(self, batch: ProducerBatch) -> None:
        """Sends `batch` immediately."""
        ...


class PartitionBatch:
    """The records of a batch for one partition, and their outcome."""

    __slots__ = (
        "base_offset", "batch", "count", "deadline", "done", "error", "identity", "is_resent",
        "order", "partition", "payload", "rows", "sequence", "timestamp_type", "timestamp_us",
        "unanswered",
    )  # fmt: skip

    def __init__(
        self,
        batch: ProducerBatch,
        partition: int,
        payload: pa.RecordBatch,
        rows: npt.NDArray[np.intp] | None,
    ) -> None:
        self.batch = batch
        self.partition = partition
        self.payload = payload
        """None once it is done."""
        self.count: int = payload.num_rows
        self.rows = rows
        """Their row numbers in the batch, ascending; None: all rows."""
        self.deadline = batch.deadline
        self.order = -1
        """Its sequential number among the parts of its partition."""
        self.identity: flight_messages.ProducerIdentity | None = None
        self.sequence = -1
        """Sequence of the first record under `identity`; -1: not assigned yet."""
        self.is_resent = False
        """True once it has been sent."""
        self.unanswered = False
        """True if it was sent and an answer was lost: it may be in the log."""
        self.done = False
        self.error: errors.SparklogError | None = None
        self.base_offset = -1
        self.timestamp_us = -1
        self.timestamp_type = 0

    def succeed(self, reply: flight_messages.AppendReply) -> None:
        self.base_offset = reply.base_offset
        self.timestamp_us = reply.timestamp_us
        self.timestamp_type = reply.timestamp_type
        self._end()

    def fail(self, error: errors.SparklogError) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        # Futures may be kept for a long time; they must not retain the bytes.
        self.payload = None
        self.done = True


class ProducerBatch:
    """Records of one topic, in the order they were sent. Its owner's lock guards it."""

    __slots__ = (
        "bytes", "callbacks", "count", "deadline", "due", "headers", "is_sealed", "keys",
        "open_calls", "open_parts", "owner", "partition_of", "partitions", "parts", "table",
        "table_partitions", "timestamps", "values", "waiters",
    )  # fmt: skip

    def __init__(self, owner: Owner, *, due: float, deadline: float) -> None:
        self.owner = owner
        self.due = due
        """The time at which it is sent even if not full, monotonic seconds."""
        self.deadline = deadline
        """The time at which it is given up, monotonic seconds."""
        self.values: list[bytes | None] = []
        # Up to the last record that has one; empty: no record has.
        self.keys: list[bytes | None] = []
        self.headers: list[list[Header] | None] = []
        self.timestamps: list[int | None] = []
        self.partitions: list[int] = []
        self.table: pa.RecordBatch | None = None
        """A conforming payload instead of the lists."""
        self.table_partitions: npt.NDArray[np.int32] | None = None
        """-1: by the key."""
        self.bytes = 0
        self.count = 0
        """Number of rows, set when it is sealed."""
        self.is_sealed = False
        """True once it accepts no more records."""
        self.callbacks: list[Callback] = []
        self.waiters: list[threading.Lock] = []
        self.parts: dict[int, PartitionBatch] | None = None
        """The parts by partition; None until it is split."""
        self.partition_of: npt.NDArray[np.int32] | None = None
        """The partition of each row, if there are several parts."""
        self.open_parts = 0
        self.open_calls = 0

    # -------------------------------------------------------------------------- filling

    def add_details(
        self,
        row: int,
        headers: list[Header] | None,
        timestamp_us: int | None,
        partition: int | None,
        callbacks: tuple[Callable[[RecordFuture], object], ...],
    ) -> None:
        """Adds fields that most records do not have."""
        if headers is not None:
            _put_at(self.headers, row, headers)
        if timestamp_us is not None:
            _put_at(self.timestamps, row, timestamp_us)
        if partition is not None:
            _put_at(self.partitions, row, partition, filler=NO_KEY)
        if callbacks:
            self.callbacks.extend((row, callback) for callback in callbacks)

    def seal(self) -> None:
        self.is_sealed = True
        if self.table is not None:
            self.count = self.table.num_rows
            return
        self.count = len(self.values)
        for column in (self.keys, self.headers, self.timestamps):
            if column:
                column.extend(repeat(None, self.count - len(column)))
        if self.partitions:
            self.partitions.extend(repeat(NO_KEY, self.count - len(self.partitions)))

    @property
    def cost_bytes(self) -> int:
        return self.bytes + self.count * RECORD_OVERHEAD_BYTES

    # -------------------------------------------------------------------------- splitting

    def split(self, partition_count: int, sticky: int) -> Split:
        """Returns the parts. Needs no lock, because they join the batch only in `attach`.

        Args:
            partition_count: of the topic, for keys.
            sticky: the partition of records with neither key nor partition.
        """
        payload = self._payload()
        where = self._where(payload, partition_count, sticky)
        if where is None or (where == where[0]).all():
            partition = sticky if where is None else int(where[0])
            return {partition: PartitionBatch(self, partition, payload, None)}, None
        return self._parted(payload, where), where

    def attach(self, split: Split) -> Iterable[PartitionBatch]:
        """Stores the parts, and returns them."""
        self.parts, self.partition_of = split
        self.open_parts = len(self.parts)
        # The parts retain the bytes until they are acked; timestamps are needed for metadata.
        self.values, self.keys, self.headers, self.table = [], [], [], None
        return self.parts.values()

    def fail_unsplit(self, error: errors.SparklogError) -> PartitionBatch:
        """Fails a batch before it is split, as one part without a partition."""
        nothing = pa.RecordBatch.from_arrays([pa.nulls(0, pa.binary())], names=["value"])
        part = PartitionBatch(self, NO_KEY, nothing, None)
        part.fail(error)
        self.parts, self.partition_of = {NO_KEY: part}, None
        self.open_parts = 1
        return part

    def only_part(self) -> PartitionBatch:
        assert self.parts is not None
        (part,) = self.parts.values()
        return part

    def _payload(self) -> pa.RecordBatch:
        if self.table is not None:
            return self.table
        columns = {}
        if self.timestamps:
            columns["timestamp"] = pa.array(self.timestamps, pa.int64()).view(TIMESTAMP)
        if self.keys:
            columns["key"] = pa.array(self.keys, pa.binary())
        columns["value"] = pa.array(self.values, pa.binary())
        if self.headers:
            columns["headers"] = pa.array(self.headers, HEADERS)
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=_schema(tuple(columns)))

    def _where(
        self, payload: pa.RecordBatch, partition_count: int, sticky: int
    ) -> npt.NDArray[np.int32] | None:
        """Returns the partition of each row; None: `sticky` for all."""
        named: Any = self.partitions if self.table_partitions is None else self.table_partitions
        key = payload.schema.get_field_index("key")
        if key >= 0:
            where = partitions_of(payload.column(key), partition_count)
            where[where == NO_KEY] = sticky
        elif len(named):
            where = np.full(payload.num_rows, sticky, np.int32)
        else:
            return None
        if len(named):
            named = np.asarray(named, np.int32)
            where = np.where(named == NO_KEY, where, named)
        return where

    def _parted(
        self, payload: pa.RecordBatch, where: npt.NDArray[np.int32]
    ) -> dict[int, PartitionBatch]:
        return {
            partition: PartitionBatch(self, partition, piece, rows)
            for partition, rows, piece in parted(payload, where)
        }

    # -------------------------------------------------------------------------- outcome

    def part_of(self, row: int) -> PartitionBatch | None:
        """Returns the part of a row; None: the batch has not been split yet."""
        if self.parts is None:
            return None
        if self.partition_of is None:
            return self.only_part()
        return self.parts[int(self.partition_of[row])]

    def metadata(self, row: int, part: PartitionBatch) -> RecordMetadata:
        rank = row if part.rows is None else int(part.rows.searchsorted(row))
        own_us = None
        if self.timestamps and part.timestamp_type != LOG_APPEND_TIME:
            own_us = self.timestamps[row]
        return RecordMetadata(
            topic=self.owner.topic,
            partition=part.partition,
            offset=part.base_offset + rank,
            timestamp_us=part.timestamp_us if own_us is None else own_us,
        )

    def is_done(self) -> bool:
        return self.parts is not None and all(part.done for part in self.parts.values())

    def is_finished(self) -> bool:
        """Returns whether it is done and its callbacks have run."""
        return self.is_done() and not (self.open_parts or self.open_calls)

    def take_callbacks(self, part: PartitionBatch) -> list[Callback]:
        """Removes and returns the callbacks of `part`, which is done, in row order."""
        if not self.callbacks:
            return []
        mine = [each for each in self.callbacks if self.part_of(each[0]) is part]
        self.callbacks = [each for each in self.callbacks if self.part_of(each[0]) is not part]
        return sorted(mine, key=lambda each: each[0])


@cache
def _schema(names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([PAYLOAD_SCHEMA.field(name) for name in names])


def _put_at(column: list[Any], row: int, value: Any, *, filler: Any = None) -> None:
    """Appends `value` for `row`, after fillers for previous rows without a value."""
    if len(column) < row:
        column.extend(repeat(filler, row - len(column)))
    column.append(value)


# ------------------------------------------------------------------------------ futures


def delivery_callback(on_delivery: OnDelivery) -> Callable[[RecordFuture], object]:
    """Adapts `on_delivery` to the form that `add_done_callback` expects."""

    def deliver(future: RecordFuture) -> object:
        error = future.exception()
        return on_delivery(error, None if error else future.result())

    return deliver


def _deadline(clock: ThreadClock, timeout_seconds: float | None) -> float | None:
    seconds = arguments.timeout("timeout", timeout_seconds)
    return None if seconds is None else clock.monotonic() + seconds


class RecordFuture:
    """A future for one record; also awaitable."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: ProducerBatch, row: int) -> None:
        self._batch = batch
        self._row = row

    def done(self) -> bool:
        part = self._batch.part_of(self._row)
        return part is not None and part.done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Returns the position of the record in the log; waiting sends it immediately.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            errors.StillSending: it was not acked in time, and is still being sent: wait again.
            errors.TimedOut: it was given up unsent after `delivery_timeout_seconds`.
            errors.OutcomeUnknown: it was sent, but an answer was lost: it may be in the log.
            errors.SparklogError: the broker rejected it.
        """
        part = self._wait(timeout)
        if part.error is not None:
            # Many futures share the error, and each raise would lengthen its traceback.
            raise part.error.with_traceback(None)
        return self._batch.metadata(self._row, part)

    def exception(self, timeout: float | None = None) -> errors.SparklogError | None:
        """Returns the record's failure; None if it is in the log. Waits as `result` does."""
        return self._wait(timeout).error

    def add_done_callback(self, callback: Callable[[RecordFuture], object]) -> None:
        """Calls `callback(future)` on the producer's thread, or immediately here if already done.

        Exceptions that it raises are logged. It must not wait for deliveries to the same topic.
        """
        with self._batch.owner.lock:
            decided = self.done()
            if not decided:
                self._batch.callbacks.append((self._row, callback))
        if decided:
            callback(self)

    def __repr__(self) -> str:
        topic, part = self._batch.owner.topic, self._batch.part_of(self._row)
        if part is None or not part.done:
            return f"RecordFuture({topic!r}, pending)"
        if part.error is not None:
            return f"RecordFuture({topic!r}, {type(part.error).__name__}: {part.error})"
        metadata = self._batch.metadata(self._row, part)
        return f"RecordFuture({topic!r}, partition={part.partition}, offset={metadata.offset})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        import asyncio  # most programs wait in threads, and start faster without it

        loop = asyncio.get_running_loop()
        decided: asyncio.Future[None] = loop.create_future()

        def release() -> None:
            if not decided.done():
                decided.set_result(None)

        self.add_done_callback(lambda _: loop.call_soon_threadsafe(release))
        self._batch.owner.expedite(self._batch)
        yield from decided
        return self.result()

    def _wait(self, timeout_seconds: float | None) -> PartitionBatch:
        batch = self._batch
        if self.done():
            pass
        elif not batch.owner.await_batch(
            batch, self.done, _deadline(batch.owner.clock, timeout_seconds)
        ):
            raise errors.StillSending(
                what=f"a record to {batch.owner.topic}", timeout_seconds=timeout_seconds
            )
        part = batch.part_of(self._row)
        assert part is not None
        return part


class TableFuture:
    """A future for the rows of a table."""

    __slots__ = ("_batches", "_topic")

    def __init__(self, topic: str, batches: list[ProducerBatch]) -> None:
        self._topic = topic
        self._batches = batches

    def __repr__(self) -> str:
        rows = sum(each.count for each in self._batches)
        return f"TableFuture({self._topic!r}, {rows:,} rows, {self._state()})"

    def _repr_html_(self) -> str:
        parts = [part for batch in self._batches for part in (batch.parts or {}).values()]
        rows = (
            (part.partition, part.base_offset, part.count)
            for part in parts
            if part.done and part.error is None
        )
        return html_table(repr(self), ("partition", "offset", "rows"), rows)

    def _state(self) -> str:
        if not self.done():
            return "pending"
        failed = sum(
            part.count
            for batch in self._batches
            for part in (batch.parts or {}).values()
            if part.error is not None
        )
        return f"{failed:,} failed" if failed else "delivered"

    def done(self) -> bool:
        return all(batch.is_done() for batch in self._batches)

    def result(self, timeout: float | None = None) -> list[AppendedRange]:
        """Returns the positions of the rows, in their order: a range for each batch and partition.

        Raises the failure of the first rows that failed, once all have succeeded or failed; other
        rows may be in the log. `timeout`: seconds to wait; None: no limit. Raises `StillSending`
        when it expires; the rows are still being sent, so wait again.
        """
        deadline = _deadline(self._batches[0].owner.clock, timeout) if self._batches else None
        for batch in self._batches:
            if not batch.is_done() and not batch.owner.await_batch(batch, batch.is_done, deadline):
                raise errors.StillSending(
                    what=f"{sum(each.count for each in self._batches)} rows to {self._topic}",
                    timeout_seconds=timeout,
                )
        parts = [part for batch in self._batches for part in (batch.parts or {}).values()]
        for part in parts:
            if part.error is not None:
                raise part.error.with_traceback(None)
        return [
            AppendedRange(
                topic=self._topic,
                partition=part.partition,
                offset=part.base_offset,
                rows=part.count,
            )
            for part in parts
        ]
