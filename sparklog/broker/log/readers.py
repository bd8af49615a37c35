"""Reads records for a broker's clients: from the hot tail, else from WAL and table by a plan.

A planned file may be compacted, or a planned object trimmed, before it is read; the same offsets
are then planned again. If another engine has left a table that cannot be read, or that has lost
records, reads use the last version that was published or planned with, because later records are
in the WAL.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from sparklog import arrow, errors, limits
from sparklog.broker.counts import Budget
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log.hot_tail import HotBatch, HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.tailing import ReadBatch, Tail
from sparklog.broker.log.topic import Topic
from sparklog.formats import flight_messages
from sparklog.formats.record import ROW_SCHEMA, between, rows_of_run
from sparklog.storage import wal
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.reading import plan
from sparklog.storage.reading.read import first_row_since, neighbours, read_runs, read_slices
from sparklog.storage.reading.read_ahead import ReadAhead
from sparklog.storage.snapshot import Encoding, Entry, Located, ReadSource, Slice, TableSnapshot

_PLAN_ATTEMPTS: Final = 5
_TABLE_AGE_SECONDS: Final = 60.0
"""On an object store, the age of a look at a table from which on a read looks for newer commits."""

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """The columns and the batch size that a reader wants."""

    columns: Sequence[str] | None
    batch_rows: int

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows if self.columns is None else rows.select(list(self.columns))

    @property
    def with_offset(self) -> Sequence[str] | None:
        if self.columns is None or "offset" in self.columns:
            return self.columns
        return [*self.columns, "offset"]


class LogReader:
    """Reads the partitions that this broker leads. Thread-safe."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        hot: HotTail,
    ) -> None:
        self._store = store
        self._led_partitions = led_partitions
        self._hot = hot
        # On a local root the janitor looks as often as that.
        self._table_age_seconds = math.inf if store.is_local else _TABLE_AGE_SECONDS
        self._decoding = DecodeMemory(limits.DECODE_BYTES)

    def budget(self) -> Budget:
        """Returns the memory for decoding large entries."""
        return Budget("read_decoding", self._decoding.held_bytes, self._decoding.limit_bytes)

    # -------------------------------------------------------------------------- offset ranges

    def read(
        self,
        name: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
        topic_id: str | None = None,
    ) -> Iterator[ReadBatch]:
        """Reads every record of the range, in order. Checks the range before the first batch.

        Raises `UnknownTopic`, `TopicChanged`, `UnknownPartition`, `OffsetOutOfRange`; the last one
        also during the read, if the log start moves beyond the next offset.
        """
        topic = self._topic(name, topic_id)
        led_partition = topic.partition(partition)
        check_range(topic, led_partition, start, end)
        projection = _Projection(columns=columns, batch_rows=batch_rows)
        return self._all_batches(topic, led_partition, start, end, projection)

    def read_together(
        self, places: Sequence[tuple[str, int, int]], *, columns: Sequence[str]
    ) -> list[ReadBatch]:
        """Returns the next rows of several partitions, if they are in small files of their tables.

        Takes less time than reading each separately. Errors and other partitions are left to
        `read`, as are those beyond the size of one small file in total.

        Args:
            places: topic, partition, and the first offset of each.
            columns: as for `read`.
        """
        projection = _Projection(columns=columns, batch_rows=limits.SCAN_BATCH_ROWS)
        planned: list[tuple[Topic, Partition, int]] = []
        runs: list[list[Slice]] = []
        left_bytes = limits.SMALL_FILE_BYTES
        for name, number, start in places:
            with contextlib.suppress(errors.SparklogError):
                topic = self._topic(name, None)
                partition = topic.partition(number)
                run = self._next_files(topic, partition, start, projection)
                size = sum(file.size_bytes for piece in run for file in piece.files)
                if run and size <= left_bytes:
                    left_bytes -= size
                    planned.append((topic, partition, start))
                    runs.append(run)
        found = []
        read = read_runs(
            self._store, runs, columns=projection.with_offset, batch_rows=projection.batch_rows
        )
        for (topic, partition, start), rows in zip(planned, read, strict=True):
            if rows is not None:
                end = rows.column("offset")[-1].as_py() + 1
                with contextlib.suppress(errors.SparklogError):  # records may have been deleted
                    check_range(topic, partition, start, end)
                    found.append(_batch(topic, partition, start, end, projection.select(rows)))
        return found

    def _next_files(
        self, topic: Topic, partition: Partition, start: int, projection: _Projection
    ) -> list[Slice]:
        """Returns the slices of files that a read from `start` on begins with, if any."""
        end = partition.end
        check_range(topic, partition, start, end)
        if start == end or self._hot_run(topic, partition, start, end, projection):
            return []
        enough = min(start + projection.batch_rows, end)
        pieces, _ = self._plan(topic, partition, start, end, enough)
        run = next(neighbours(pieces, projection.batch_rows, with_gaps=True), [])
        return run if run and run[0].source is ReadSource.FILES else []

    def _topic(self, name: str, topic_id: str | None) -> Topic:
        topic = self._led_partitions.topic(name)
        if topic_id is not None and topic.topic_id != topic_id:
            raise errors.TopicChanged(topic=name, expected=topic_id, found=topic.topic_id)
        return topic

    def _all_batches(
        self, topic: Topic, partition: Partition, start: int, end: int, projection: _Projection
    ) -> Iterator[ReadBatch]:
        while start < end:
            for batch in self._next_batches(topic, partition, start, end, projection):
                check_range(topic, partition, start, end)  # records may have been deleted
                yield batch
                start = batch.end

    def _next_batches(
        self, topic: Topic, partition: Partition, start: int, end: int, projection: _Projection
    ) -> Iterator[ReadBatch]:
        """Reads the next batches from `start`, at least one, from the hot tail or by a plan."""
        hot = self._hot_run(topic, partition, start, end, projection)
        return self._next_of(topic, partition, hot, start, end, projection)

    def _hot_run(
        self, topic: Topic, partition: Partition, start: int, end: int, projection: _Projection
    ) -> Sequence[HotBatch]:
        return self._hot.run(
            topic.topic_id,
            partition.number,
            start,
            rows=min(end - start, projection.batch_rows),
            limit_bytes=limits.READ_RUN_BYTES,
        )

    def _next_of(
        self,
        topic: Topic,
        partition: Partition,
        hot: Sequence[HotBatch],
        start: int,
        end: int,
        projection: _Projection,
    ) -> Iterator[ReadBatch]:
        if hot:
            return self._hot_rows(topic, partition, hot, end, projection)
        return self._planned_rows(topic, partition, start, end, projection)

    def _hot_rows(
        self,
        topic: Topic,
        partition: Partition,
        hot: Sequence[HotBatch],
        end: int,
        projection: _Projection,
    ) -> Iterator[ReadBatch]:
        start = hot[0].entry.base_offset
        if _is_packed(hot[0].entry):  # such a batch is the only one of its run
            (entry, _), load = hot[0], lambda: hot[0].payload
            rows = self._unpacked(entry, load, start, end, projection)
            yield _batch(topic, partition, start, start + rows.num_rows, projection.select(rows))
            return
        run = [
            (e.entry.base_offset, e.entry.arrival_us, e.entry.timestamp_type, e.payload)
            for e in hot
        ]
        for rows in _cut(rows_of_run(run, partition=partition.number), projection.batch_rows):
            wanted = rows.slice(0, end - start)
            if wanted.num_rows:
                first, start = start, start + wanted.num_rows
                yield _batch(topic, partition, first, start, projection.select(wanted))

    def _planned_rows(
        self, topic: Topic, partition: Partition, start: int, end: int, projection: _Projection
    ) -> Iterator[ReadBatch]:
        """Reads batches up to `end`, or to the first slice that completes `batch_rows` offsets."""
        for _ in range(_PLAN_ATTEMPTS):
            enough = min(start + projection.batch_rows, end)
            pieces, until = self._plan(topic, partition, start, end, enough)
            try:
                for run in neighbours(pieces, projection.batch_rows, with_gaps=True):
                    for rows in self._rows_of(run, projection):
                        first, start = start, rows.column("offset")[-1].as_py() + 1
                        yield _batch(topic, partition, first, start, projection.select(rows))
                    if run[-1].end >= enough:
                        until = run[-1].end
                        break
            except ObjectMissing as missing:
                gone = missing.path
                # A newer version may name other files.
                with contextlib.suppress(errors.Corrupt):
                    topic.table.through(self._store).refresh()
                continue
            if start < until:  # offsets in no slice are a gap
                nothing = pa.RecordBatch.from_pylist([], ROW_SCHEMA)
                yield _batch(topic, partition, start, until, projection.select(nothing))
            return
        raise errors.MissingObject(path=gone, reason="the log still names it")

    def _rows_of(self, run: Sequence[Slice], projection: _Projection) -> Iterator[pa.RecordBatch]:
        """Reads the rows of consecutive slices of files, or of consecutive entries."""
        if run[0].source is ReadSource.FILES:
            return read_slices(
                self._store, run, columns=projection.with_offset, batch_rows=projection.batch_rows
            )
        if len(run) == 1 and run[0].entry is not None and _is_packed(run[0].entry.entry):
            return self._unpacked_rows(run[0], run[0].entry, projection)
        parts = []
        ahead = ReadAhead(self._store, [piece.entry for piece in run if piece.entry is not None])
        for piece in run:
            assert piece.entry is not None
            entry = piece.entry.entry
            payload = wal.decode_payload(entry, ahead.payload(piece.entry))
            wanted = between(payload, piece.first, piece.end, base_offset=entry.base_offset)
            parts.append((piece.first, entry.arrival_us, entry.timestamp_type, wanted))
        return _cut(rows_of_run(parts, partition=run[0].partition), projection.batch_rows)

    def _unpacked_rows(
        self, piece: Slice, located: Located, projection: _Projection
    ) -> Iterator[pa.RecordBatch]:
        def load() -> pa.RecordBatch:
            return wal.decode_payload(located.entry, wal.read_payload(self._store, located))

        first = piece.first
        while first < piece.end:
            found = self._unpacked(located.entry, load, first, piece.end, projection)
            first += found.num_rows
            yield found

    def _unpacked(
        self,
        entry: Entry,
        load: Callable[[], pa.RecordBatch],
        first: int,
        end: int,
        projection: _Projection,
    ) -> pa.RecordBatch:
        """Decodes the first rows, from `first` on, of an entry that is large when decoded.

        The whole entry is in memory only while the rows are copied from it, because a reader may
        be slow, and many may read concurrently. So each batch decodes the entry again.
        """
        with self._decoding.hold(2 * entry.memory_bytes):
            payload = load().slice(
                first - entry.base_offset, min(end - first, projection.batch_rows)
            )
            taken = payload.slice(0, _light_rows(payload))
            # Copied, so that the rest of the payload is freed.
            taken = pa.ipc.read_record_batch(taken.serialize(), taken.schema)
            del payload
        (found,) = rows_of_run(
            [(first, entry.arrival_us, entry.timestamp_type, taken)], partition=entry.partition
        )
        return found

    # -------------------------------------------------------------------------- planning

    def _plan(
        self, topic: Topic, partition: Partition, start: int, end: int, enough: int
    ) -> tuple[Iterator[Slice], int]:
        """Plans slices from `start` on. Returns them and their end: `enough` or later, up to `end`.

        Copies only the entries up to `enough`, because a backlog may have very many. Copies them
        before it reads the table: entries that have left the backlog are then in the table. Raises
        the reason why a partition is blocked if its records from `start` on are known nowhere.
        """
        number = partition.number
        tail, published, blocked = self._led_partitions.backlog.view(partition, start, enough)
        until = min(end, max(published, tail[-1].entry.end if tail else 0))
        if until <= start and blocked is not None:
            raise blocked.with_traceback(None)  # later records are in neither table nor log
        snapshot = self._snapshot(topic, number, published)
        pieces = plan.slices(
            topic=topic.name,
            snapshot=snapshot,
            tail=tail,
            partition=number,
            start=start,
            end=until,
        )
        return pieces, until

    def _snapshot(self, topic: Topic, number: int, published: int) -> TableSnapshot:
        """Returns a version of the table that has the published records of a partition.

        It is the last known one, unless that is old or lacks some of them. Raises `ForeignTable` or
        `CorruptObject` if no known version has them.
        """
        snapshot = topic.table.snapshot
        failure: errors.SparklogError | None = None
        is_old = topic.table.look_age_seconds > self._table_age_seconds
        if is_old or not _reaches(snapshot, topic, number, published):
            try:
                snapshot = topic.table.through(self._store).refresh()
            except (errors.Corrupt, errors.Retriable) as error:
                failure = error
        if self._is_gone(topic):
            raise errors.UnknownTopic(topic=topic.name)
        if _reaches(snapshot, topic, number, published):
            topic.last_read = snapshot
            return snapshot
        last = topic.last_read
        if _reaches(last, topic, number, published):
            return last
        reason = f"it has lost offsets of partition {number} below {published}"
        raise failure or errors.ForeignTable(topic=topic.name, reason=reason)

    # -------------------------------------------------------------------------- following

    def tail(
        self,
        positions: Sequence[flight_messages.TailPosition],
        notify: Callable[[], None],
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
    ) -> Tail:
        """Reads records from all `positions` as they are appended, indefinitely.

        Args:
            notify: called when a partition has grown; see `Tail`.

        Raises what `read` raises.
        """
        topics = [self._topic(each.topic, each.topic_id) for each in positions]
        partitions = [
            (topic, topic.partition(each.partition))
            for topic, each in zip(topics, positions, strict=True)
        ]
        offsets = [each.offset for each in positions]
        for (topic, partition), offset in zip(partitions, offsets, strict=True):
            check_range(topic, partition, offset, partition.end)
        projection = _Projection(columns=columns, batch_rows=batch_rows)

        def next_batches(
            topic: Topic, partition: Partition, start: int, end: int
        ) -> tuple[Iterator[ReadBatch], bool]:
            check_range(topic, partition, start, end)
            hot = self._hot_run(topic, partition, start, end, projection)
            size = sum(
                each.entry.memory_bytes + limits.ROW_BYTES * each.entry.count for each in hot
            )
            is_quick = 0 < size <= limits.FLIGHT_FREE_ROWS_BYTES
            return self._next_of(topic, partition, hot, start, end, projection), is_quick

        return Tail(self._led_partitions, partitions, offsets, next_batches, notify)

    def _is_gone(self, topic: Topic) -> bool:
        return self._led_partitions.by_id(topic.topic_id) is not topic

    # -------------------------------------------------------------------------- timestamps

    def offsets_for_times(
        self, request: flight_messages.OffsetsForTimes
    ) -> flight_messages.Offsets:
        """Returns per partition the first offset whose timestamp is at or after the given one.

        -1 if no record is that late. As in Kafka's `ListOffsets`, the lowest *offset* counts.
        """
        topic = self._led_partitions.topic(request.topic)
        return flight_messages.Offsets(
            offsets={
                number: self._offset_for_time(topic, topic.partition(number), timestamp_us)
                for number, timestamp_us in request.timestamps_us.items()
            }
        )

    def _offset_for_time(self, topic: Topic, partition: Partition, timestamp_us: int) -> int:
        projection = _Projection(columns=("offset", "timestamp"), batch_rows=limits.SCAN_BATCH_ROWS)

        def look(start: int, end: int) -> int:
            pieces, _ = self._plan(topic, partition, start, end, enough=end)
            for piece in pieces:
                if plan.latest_timestamp_us(piece) < timestamp_us:
                    continue
                for batch in self._all_batches(
                    topic, partition, piece.first, piece.end, projection
                ):
                    offset = first_row_since(batch.rows, timestamp_us)
                    if offset is not None:
                        return offset
            return -1

        return _from_start(partition, look)

    def greatest_time(self, name: str, number: int) -> tuple[int, int]:
        """Returns (timestamp in ms, offset) of the first record with the greatest timestamp.

        (-1, -1) if there is no record. As in Kafka's `ListOffsets` for the timestamp -3 (KIP-734).
        """
        topic = self._led_partitions.topic(name)
        partition = topic.partition(number)
        projection = _Projection(columns=("offset", "timestamp"), batch_rows=limits.SCAN_BATCH_ROWS)

        def look(start: int, end: int) -> tuple[int, int]:
            pieces, _ = self._plan(topic, partition, start, end, enough=end)
            found: tuple[int, int] | None = None
            for piece in sorted(pieces, key=plan.latest_timestamp_us, reverse=True):
                if found is not None and plan.latest_timestamp_us(piece) < found[0]:
                    break
                for batch in self._all_batches(
                    topic, partition, piece.first, piece.end, projection
                ):
                    if batch.rows.num_rows:
                        stamp_us, offset = _latest(batch.rows)
                        if found is None or (stamp_us, -offset) > (found[0], -found[1]):
                            found = stamp_us, offset
            return (-1, -1) if found is None else (found[0] // 1_000, found[1])

        return _from_start(partition, look)


def _from_start(partition: Partition, look: Callable[[int, int], _Found]) -> _Found:
    """Applies `look` to the whole partition; repeats it if the log start moves in between."""
    start = partition.start
    while True:
        try:
            return look(start, partition.end)
        except errors.OffsetOutOfRange as moved:
            if moved.start <= start:
                raise
            start = moved.start


def _latest(rows: pa.RecordBatch) -> tuple[int, int]:
    """Returns (greatest timestamp in µs, the first offset that has it)."""
    timestamps = arrow.as_numpy(rows.column("timestamp").view(pa.int64()))
    at = int(timestamps.argmax())
    return int(timestamps[at]), rows.column("offset")[at].as_py()


def _batch(
    topic: Topic, partition: Partition, first: int, end: int, rows: pa.RecordBatch
) -> ReadBatch:
    return ReadBatch(
        topic=topic.name,
        partition=partition.number,
        first=first,
        end=end,
        high_watermark=partition.end,
        rows=rows,
    )


def _cut(batches: Iterable[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Splits rows into batches of at most `batch_rows`, none much above `READ_RUN_BYTES`."""
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            part = batch.slice(at, batch_rows)
            part = part.slice(0, _light_rows(part))
            yield part
            at += part.num_rows


def _light_rows(batch: pa.RecordBatch) -> int:
    """Returns how many rows of the batch fit into `READ_RUN_BYTES`, at least one."""
    while batch.num_rows > 1 and batch.nbytes > limits.READ_RUN_BYTES:
        batch = batch.slice(0, batch.num_rows // 2)
    return int(batch.num_rows)


def _is_packed(entry: Entry) -> bool:
    """Returns whether the entry must be decoded, and is too large to stay decoded during a read.

    False for Arrow batches, which are in the hot tail as they are.
    """
    return entry.encoding is Encoding.KAFKA and entry.memory_bytes > limits.READ_RUN_BYTES


def check_range(topic: Topic, partition: Partition, start: int, end: int) -> None:
    """Raises `OffsetOutOfRange` if `start` or `end` is outside the partition."""
    for offset in (start, end):
        if not partition.start <= offset <= partition.end:
            raise errors.OffsetOutOfRange(
                topic=topic.name,
                partition=partition.number,
                offset=offset,
                start=partition.start,
                end=partition.end,
            )


def _reaches(snapshot: TableSnapshot, topic: Topic, partition: int, end: int) -> bool:
    """Returns whether the snapshot is of the topic and has the partition's records below `end`."""
    return (
        snapshot.topic_id == topic.topic_id
        and partition < snapshot.partitions
        and snapshot.ends[partition] >= end
    )
