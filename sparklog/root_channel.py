"""A channel without a broker: answers a client's requests by reading the root itself.

For a root that no broker serves and on which this process cannot start one, because it may not
write there. Requests that only read are answered from the newest state of the root, by the same
steps as in Spark's source. All others are rejected with `RootReadOnly`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.client.connection import Channel
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA
from sparklog.formats.schema_messages import SchemasReply, TopicSchemas
from sparklog.storage import schema_texts
from sparklog.storage.follow import TABLE_AGE_SECONDS, RootFollower
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.reading.read import first_since, neighbours, read_slice, read_slices
from sparklog.storage.reading.shared_reads import SharedReads
from sparklog.storage.snapshot import ReadSource, Slice, TableSnapshot
from sparklog.storage.table.names import table_folder
from sparklog.version import VERSION

_POLL_INTERVAL_LOCAL_SECONDS = 0.1  # of a client that follows a local root without a broker

_IDLE: Final = flight_messages.encode(flight_messages.TailHeader(idle=True))


class RootChannel(Channel):
    """The channel of one root. Thread-safe.

    `reason`: why this process cannot write to the root. Raises `NotARoot`, `FormatTooNew` and
    `CorruptObject`, and the store's errors.
    """

    def __init__(self, store: Store, *, clock: Clock, reason: str) -> None:
        self.address = store.uri
        self._store = store
        self._clock = clock
        self._reason = reason
        self._table_age_seconds = 0.0 if store.is_local else TABLE_AGE_SECONDS
        self._lock = threading.Lock()
        self._follower = RootFollower(store, clock=clock)
        self._answers: dict[str, Callable[[Any], msgspec.Struct]] = {
            "cluster": lambda _: self._cluster(),
            "topics.list": lambda _: self._names(),
            "topics.describe": lambda request: self._describe(request.topic),
            "topics.schemas": self._schemas,
            "offsets.for_times": self._offsets_for_times,
        }

    def action(self, name: str, request: msgspec.Struct, *, timeout_seconds: float) -> Any:
        del timeout_seconds  # a store has its own timeouts
        answer = self._answers.get(name)
        if answer is None:
            raise self._refusal(name)
        return answer(request)

    def append(self, topic: str, schema: pa.Schema) -> tuple[Any, Any]:
        del schema
        raise self._refusal(f"a record for topic {topic!r}")

    def read(self, ticket: flight_messages.ReadTicket) -> Any:
        rows = self._rows(ticket, ticket.start, ticket.end, ticket.columns)
        return _Reader(lambda _: map(_Chunk, rows))

    def tail(self, request: flight_messages.TailRequest) -> tuple[Any, Any]:
        return _Writer(), _Reader(lambda cancelled: self._tail(request, cancelled))

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _refusal(self, what: str) -> errors.RootReadOnly:
        return errors.RootReadOnly(root=self.address, what=what, reason=self._reason)

    # -------------------------------------------------------------------------- topics

    def _cluster(self) -> flight_messages.ClusterInfo:
        cluster_id = self._follower.cluster.cluster_id
        return flight_messages.ClusterInfo(
            cluster_id=cluster_id, root=self.address, version=VERSION
        )

    def _names(self) -> flight_messages.TopicNames:
        # A follower for this call, because one that searches for records also reads the logs.
        newest = RootFollower(self._store, clock=self._clock).metadata
        return flight_messages.TopicNames(topics=sorted(newest.topics))

    def _describe(self, topic: str) -> flight_messages.TopicInfo:
        with self._lock:
            snapshot = self._refresh([topic])[topic]
            ends = self._follower.ends(snapshot)
            known = self._follower.metadata.topic(topic)
        files = [file for files in snapshot.files for file in files]
        return flight_messages.TopicInfo(
            topic=topic,
            topic_id=snapshot.topic_id or "",
            config=dict(known.config),
            partitions=[
                flight_messages.PartitionInfo(
                    partition=number,
                    start=snapshot.starts[number],
                    end=ends[number],
                    published=snapshot.ends[number],
                )
                for number in range(snapshot.partitions)
            ],
            table_uri=f"{self.address}/{table_folder(topic)}",
            table_version=snapshot.version,
            table_files=len(files),
            table_bytes=sum(file.size_bytes for file in files),
            columns=flight_messages.columns_info(snapshot.columns),
            misfits=snapshot.misfits,
            unfilled_rows=snapshot.unfilled_rows,
            formats=flight_messages.formats_of(snapshot.columns),
            waiting_rows=snapshot.waiting_rows,
        )

    def _schemas(self, request: TopicSchemas) -> SchemasReply:
        return SchemasReply(texts=schema_texts.of(self._store).stored(request.ids))

    def _offsets_for_times(
        self, request: flight_messages.OffsetsForTimes
    ) -> flight_messages.Offsets:
        found = {}
        for partition, timestamp_us in request.timestamps_us.items():
            offset = self._first_since(request.topic, partition, timestamp_us)
            found[partition] = -1 if offset is None else offset
        return flight_messages.Offsets(offsets=found)

    def _first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        for _ in range(limits.REPLAN_ATTEMPTS):
            try:
                return first_since(self._store, self._all_slices(topic, partition), timestamp_us)
            except ObjectMissing as missing:  # compacted or trimmed since
                path = missing.path
        raise _gone(path)

    # -------------------------------------------------------------------------- plans

    def _refresh(self, topics: Iterable[str]) -> dict[str, TableSnapshot]:
        """Returns the current tables. Requires `_lock`: a follower has one user at a time."""
        return dict(self._follower.refresh(topics))

    def _all_slices(self, topic: str, partition: int) -> list[Slice]:
        with self._lock:
            snapshot = self._refresh([topic])[topic]
            _check_partition(snapshot, topic, partition)
            start, end = snapshot.starts[partition], self._follower.ends(snapshot)[partition]
            return self._follower.plan(topic, snapshot, partition, start, end)

    def _slices(self, place: _Place, start: int, end: int) -> list[Slice]:
        with self._lock:
            snapshot = self._refresh([place.topic])[place.topic]
            _check_id(snapshot, place)
            return self._follower.plan(place.topic, snapshot, place.partition, start, end)

    def _plans(self, places: Sequence[_Place], offsets: Sequence[int]) -> list[_Plan]:
        """Plans the next batch of each place from an offset on, all on one state of the root."""
        plans = []
        with self._lock:
            snapshots = self._follower.refresh(
                {each.topic for each in places}, table_age_seconds=self._table_age_seconds
            )
            ends = {name: self._follower.ends(each) for name, each in snapshots.items()}
            for place, offset in zip(places, offsets, strict=True):
                snapshot = snapshots[place.topic]
                _check_id(snapshot, place)
                _check_partition(snapshot, place.topic, place.partition)
                end = ends[place.topic][place.partition]
                until = min(end, offset + limits.SCAN_BATCH_ROWS)
                slices = []
                if offset != end:  # raises if it is beyond
                    slices = self._follower.plan(
                        place.topic, snapshot, place.partition, offset, until
                    )
                plans.append(_Plan(end, until, slices))
        return plans

    # -------------------------------------------------------------------------- records

    def _rows(
        self, place: _Place, start: int, end: int, columns: list[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a range, in order, and plans again if an object is gone.

        `columns`: including `offset`; None: all.
        """
        attempts = 0
        while start < end:
            attempts += 1
            try:
                for batch in self._batches(self._slices(place, start, end), columns):
                    if batch.num_rows:
                        yield batch
                        start, attempts = batch.column("offset")[-1].as_py() + 1, 0
                return
            except ObjectMissing as missing:
                if attempts == limits.REPLAN_ATTEMPTS:
                    raise _gone(missing.path) from None

    def _planned_rows(
        self, place: _Place, start: int, plan: _Plan, columns: list[str] | None, shared: SharedReads
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a plan, in order, and of a new one if an object is gone."""
        try:
            for batch in self._batches(plan.slices, columns, shared):
                if batch.num_rows:
                    yield batch
                    start = batch.column("offset")[-1].as_py() + 1
        except ObjectMissing:
            yield from self._rows(place, start, plan.until, columns)

    def _batches(
        self, slices: list[Slice], columns: list[str] | None, shared: SharedReads | None = None
    ) -> Iterator[pa.RecordBatch]:
        for run in neighbours(slices, limits.SCAN_BATCH_ROWS, with_gaps=False):
            if run[0].source is ReadSource.FILES:
                yield from read_slices(self._store, run, columns=columns)
            else:
                for piece in run:
                    yield from read_slice(self._store, piece, columns=columns, shared=shared)

    def _tail(
        self, request: flight_messages.TailRequest, cancelled: threading.Event
    ) -> Iterator[_Chunk]:
        """Yields new records of the partitions in turn, and an idle chunk when there are none."""
        schema = pa.schema([ROW_SCHEMA.field(name) for name in request.columns or ROW_SCHEMA.names])
        nothing = pa.RecordBatch.from_pylist([], schema)
        pause_seconds = (
            _POLL_INTERVAL_LOCAL_SECONDS
            if self._store.is_local
            else limits.POLL_INTERVAL_REMOTE_SECONDS
        )
        offsets = [each.offset for each in request.positions]
        while not cancelled.is_set():
            plans = self._plans(request.positions, offsets)
            entries = (piece.entry for plan in plans for piece in plan.slices)
            shared = SharedReads(self._store, (each for each in entries if each is not None))
            for number, plan in enumerate(plans):
                place, offset = request.positions[number], offsets[number]
                rows = self._planned_rows(place, offset, plan, request.columns, shared)
                for batch in rows:
                    last = batch.column("offset")[-1].as_py() + 1
                    yield _Chunk(batch, _header(place, offset, last, plan.end))
                    offset = last
                if offset < plan.until:  # a gap in the offsets follows the last record
                    yield _Chunk(nothing, _header(place, offset, plan.until, plan.end))
                offsets[number] = max(offset, plan.until)
            if offsets == [plan.end for plan in plans]:
                yield _Chunk(nothing, _IDLE)
                cancelled.wait(pause_seconds)


_Place = flight_messages.ReadTicket | flight_messages.TailPosition
"""A partition of a topic, and the topic's id if it is known."""


class _Plan(NamedTuple):
    """The next records of a place."""

    end: int
    """The high watermark."""
    until: int
    """The end of the slices."""
    slices: list[Slice]


class _Chunk(NamedTuple):
    """A batch as Flight returns it."""

    data: pa.RecordBatch
    app_metadata: bytes | None = None


class _Reader:
    """Reader of chunks, which ends with `StopIteration` like a Flight reader."""

    def __init__(self, chunks: Callable[[threading.Event], Iterator[_Chunk]]) -> None:
        """`chunks` returns them; its argument is set when the reader is cancelled."""
        self._cancelled = threading.Event()
        self._chunks = chunks(self._cancelled)

    def read_chunk(self) -> _Chunk:
        if self._cancelled.is_set():
            raise StopIteration
        return next(self._chunks)

    def cancel(self) -> None:
        self._cancelled.set()


class _Writer:
    """Writer of a tail, on which a client sends nothing."""

    def close(self) -> None:
        """Does nothing: the reader is cancelled."""


def _header(place: _Place, first: int, end: int, high_watermark: int) -> bytes:
    return flight_messages.encode(
        flight_messages.TailHeader(
            topic=place.topic,
            partition=place.partition,
            first=first,
            end=end,
            high_watermark=high_watermark,
        )
    )


def _check_id(snapshot: TableSnapshot, place: _Place) -> None:
    """Raises `TopicChanged` if the place belongs to an older topic of that name."""
    found = snapshot.topic_id or ""
    if place.topic_id not in (None, found):
        raise errors.TopicChanged(topic=place.topic, expected=place.topic_id, found=found)


def _check_partition(snapshot: TableSnapshot, topic: str, partition: int) -> None:
    if not 0 <= partition < snapshot.partitions:
        raise errors.UnknownPartition(
            topic=topic, partition=partition, last=snapshot.partitions - 1
        )


def _gone(path: str) -> errors.MissingObject:
    reason = f"it was named by each of {limits.REPLAN_ATTEMPTS} plans"
    return errors.MissingObject(path=path, reason=reason)
