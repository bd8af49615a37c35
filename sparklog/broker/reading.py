"""Reading for a broker's clients: from memory while it is hot, else from WAL and table by a plan.

What was planned may be compacted or trimmed before it is read; then the same offsets are planned
again. A table that cannot be read on (another engine's commit is torn) still serves as far as it
was read, because what came later is in the WAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from sparklog import arrow, errors, limits, wire
from sparklog.broker.hot import HotBatch, HotTail
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.room import Room
from sparklog.clock import Clock
from sparklog.record import ROW_SCHEMA, rows_of_run
from sparklog.storage import plan, wal
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.read import first_row_since, read_slice
from sparklog.storage.snapshot import Encoding, Entry, Located, Slice, Source, TableSnapshot
from sparklog.storage.table import Table

_PLAN_ATTEMPTS: Final = 5

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one partition on their way to a reader; `end` is the next offset to ask for."""

    topic: str
    partition: int
    first: int
    end: int
    high_watermark: int
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What a reader wants of the rows."""

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
    """Reads what this broker leads. All methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        hot: HotTail,
        *,
        clock: Clock,
        is_closing: Callable[[], bool],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._hot = hot
        self._clock = clock
        self._is_closing = is_closing
        self._decoding = Room(limits.DECODE_BYTES)
        self._tables: dict[str, Table] = {}

    def forget(self, topic: Topic) -> None:
        """The topic is gone."""
        self._tables.pop(topic.topic_id, None)

    # -------------------------------------------------------------------------- a range

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
    ) -> Iterator[Batch]:
        """Every record of the range, in order. Refuses at once, before the first batch.

        Raises `UnknownTopic`, `TopicChanged`, `UnknownPartition`, `OffsetOutOfRange`; the last also
        in the middle, where the log start has moved beyond what is to be read next.
        """
        topic = self._topic(name, topic_id)
        place = topic.partition(partition)
        check_range(topic, place, start, end)
        wish = _Wish(columns=columns, batch_rows=batch_rows)
        return self._all(topic, place, start, end, wish)

    def _topic(self, name: str, topic_id: str | None) -> Topic:
        topic = self._ledger.topic(name)
        if topic_id is not None and topic.topic_id != topic_id:
            raise errors.TopicChanged(topic=name, expected=topic_id, found=topic.topic_id)
        return topic

    def _all(
        self, topic: Topic, partition: Partition, start: int, end: int, wish: _Wish
    ) -> Iterator[Batch]:
        while start < end:
            for batch in self._some(topic, partition, start, end, wish):
                check_range(topic, partition, start, end)  # it may be deleted while it is read
                yield batch
                start = batch.end

    def _some(
        self, topic: Topic, partition: Partition, start: int, end: int, wish: _Wish
    ) -> Iterator[Batch]:
        """The next batches from `start`, one at least: hot ones, or what a plan finds."""
        count = min(end - start, wish.batch_rows)
        hot = self._hot.run(
            topic.topic_id,
            partition.number,
            start,
            rows=count,
            limit_bytes=limits.READ_RUN_BYTES,
        )
        if hot:
            return self._hot_rows(topic, partition, hot, end, wish)
        return self._planned_rows(topic, partition, start, end, wish)

    def _hot_rows(
        self, topic: Topic, partition: Partition, hot: Sequence[HotBatch], end: int, wish: _Wish
    ) -> Iterator[Batch]:
        start = hot[0].entry.base_offset
        if _is_packed(hot[0].entry):  # and so the only one of the run
            (entry, _), load = hot[0], lambda: hot[0].payload
            rows = self._unpacked(entry, load, start, end, wish)
            yield _batch(topic, partition, start, start + rows.num_rows, wish.select(rows))
            return
        run = [
            (e.entry.base_offset, e.entry.arrival_us, e.entry.timestamp_type, e.payload)
            for e in hot
        ]
        for rows in _cut(rows_of_run(run, partition=partition.number), wish.batch_rows):
            wanted = rows.slice(0, end - start)
            if wanted.num_rows:
                first, start = start, start + wanted.num_rows
                yield _batch(topic, partition, first, start, wish.select(wanted))

    def _planned_rows(
        self, topic: Topic, partition: Partition, start: int, end: int, wish: _Wish
    ) -> Iterator[Batch]:
        """Batches up to `end`, or to the first slice that makes `batch_rows` offsets full."""
        for _ in range(_PLAN_ATTEMPTS):
            enough = min(start + wish.batch_rows, end)
            pieces, until = self._plan(topic, partition, start, end, enough)
            try:
                for run in _runs(pieces, wish.batch_rows):
                    for rows in self._rows_of(run, wish):
                        first, start = start, rows.column("offset")[-1].as_py() + 1
                        yield _batch(topic, partition, first, start, wish.select(rows))
                    if run[-1].end >= enough:
                        until = run[-1].end
                        break
            except ObjectMissing as missing:
                gone = missing.path
                self._refresh(topic)
                continue
            if start < until:  # what no slice has is a gap
                nothing = pa.RecordBatch.from_pylist([], ROW_SCHEMA)
                yield _batch(topic, partition, start, until, wish.select(nothing))
            return
        raise errors.MissingObject(path=gone, reason="the log names it still")

    def _rows_of(self, run: Sequence[Slice], wish: _Wish) -> Iterator[pa.RecordBatch]:
        """The rows of a file's slice, or of entries that follow one another."""
        if run[0].source is Source.FILES:
            return read_slice(
                self._store, run[0], columns=wish.with_offset, batch_rows=wish.batch_rows
            )
        if len(run) == 1 and run[0].entry is not None and _is_packed(run[0].entry.entry):
            return self._unpacked_rows(run[0], run[0].entry, wish)
        parts = []
        for piece in run:
            assert piece.entry is not None
            entry = piece.entry.entry
            payload = wal.decode_payload(entry, wal.read_payload(self._store, piece.entry))
            wanted = payload.slice(piece.first - entry.base_offset, piece.end - piece.first)
            parts.append((piece.first, entry.arrival_us, entry.timestamp_type, wanted))
        return _cut(rows_of_run(parts, partition=run[0].partition), wish.batch_rows)

    def _unpacked_rows(
        self, piece: Slice, located: Located, wish: _Wish
    ) -> Iterator[pa.RecordBatch]:
        def load() -> pa.RecordBatch:
            return wal.decode_payload(located.entry, wal.read_payload(self._store, located))

        first = piece.first
        while first < piece.end:
            found = self._unpacked(located.entry, load, first, piece.end, wish)
            first += found.num_rows
            yield found

    def _unpacked(
        self,
        entry: Entry,
        load: Callable[[], pa.RecordBatch],
        first: int,
        end: int,
        wish: _Wish,
    ) -> pa.RecordBatch:
        """The first rows from `first` on of an entry that is large out of compression.

        All of it is in memory only while they are taken from it: a reader may be slow with what it
        is given, and many may read at once. So each batch costs that again.
        """
        with self._decoding.hold(2 * entry.memory_bytes):
            payload = load().slice(first - entry.base_offset, min(end - first, wish.batch_rows))
            taken = payload.slice(0, _light_rows(payload))
            taken = pa.ipc.read_record_batch(taken.serialize(), taken.schema)  # without the rest
            del payload
        (found,) = rows_of_run(
            [(first, entry.arrival_us, entry.timestamp_type, taken)], partition=entry.partition
        )
        return found

    # -------------------------------------------------------------------------- planning

    def _plan(
        self, topic: Topic, partition: Partition, start: int, end: int, enough: int
    ) -> tuple[Iterator[Slice], int]:
        """Slices from `start` on, and where they end: at `enough` or beyond, at `end` at most.

        A backlog may have very many entries, so no more of it is taken than up to `enough`; and it
        is taken before the table is looked at, because what leaves it is in the table then.
        """
        number = partition.number
        with self._ledger.lock:
            tail = partition.unpublished_in(start, enough)
            published = partition.published
        until = min(end, max(published, tail[-1].entry.end if tail else 0))
        snapshot = self._table(topic).snapshot
        if not _reaches(snapshot, topic, number, published):
            snapshot = self._refresh(topic)
        if self._is_gone(topic):
            raise errors.UnknownTopic(topic=topic.name)
        if not _reaches(snapshot, topic, number, published):
            reason = f"offsets of partition {number} below {published} were in it, and are not now"
            raise errors.ForeignTable(topic=topic.name, reason=reason)
        pieces = plan.slices(
            topic=topic.name,
            snapshot=snapshot,
            tail=tail,
            partition=number,
            start=start,
            end=until,
        )
        return pieces, until

    def _table(self, topic: Topic) -> Table:
        found = self._tables.get(topic.topic_id)
        if found is None:
            table = Table(self._store, topic.name, clock=self._clock, only_reads=True)
            found = self._tables.setdefault(topic.topic_id, table)
        return found

    def _refresh(self, topic: Topic) -> TableSnapshot:
        table = self._table(topic)
        try:
            return table.refresh()
        except errors.Corrupt:
            if table.snapshot.topic_id != topic.topic_id:
                raise
            return table.snapshot

    # -------------------------------------------------------------------------- as it comes

    def tail(
        self,
        positions: Sequence[wire.TailPosition],
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
        idle_seconds: float = 0.5,
    ) -> Iterator[Batch | None]:
        """Records of all `positions` as they come, for ever; None when nothing came for a while.

        Ends when the broker stops. Raises what `read` raises, and `UnknownTopic` when one of the
        topics is deleted.
        """
        topics = [self._topic(each.topic, each.topic_id) for each in positions]
        places = [
            (topic, topic.partition(each.partition))
            for topic, each in zip(topics, positions, strict=True)
        ]
        offsets = [each.offset for each in positions]
        for (topic, partition), offset in zip(places, offsets, strict=True):
            check_range(topic, partition, offset, partition.end)
        return self._follow(
            places, offsets, _Wish(columns=columns, batch_rows=batch_rows), idle_seconds
        )

    def _follow(
        self,
        places: Sequence[tuple[Topic, Partition]],
        offsets: list[int],
        wish: _Wish,
        idle_seconds: float,
    ) -> Iterator[Batch | None]:
        while not self._is_closing():
            moved = False
            for index, (topic, partition) in enumerate(places):
                if self._is_gone(topic):
                    raise errors.UnknownTopic(topic=topic.name)
                end = partition.end
                if offsets[index] < end:
                    check_range(topic, partition, offsets[index], end)
                    for batch in self._some(topic, partition, offsets[index], end, wish):
                        offsets[index] = batch.end
                        moved = True
                        yield batch
            if not moved and not self._wait_for_more(places, offsets, idle_seconds):
                yield None

    def _wait_for_more(
        self,
        places: Sequence[tuple[Topic, Partition]],
        offsets: Sequence[int],
        timeout_seconds: float,
    ) -> bool:
        def grown() -> bool:
            return self._is_closing() or any(
                partition.end > offset or self._is_gone(topic)
                for (topic, partition), offset in zip(places, offsets, strict=True)
            )

        with self._ledger.grown:
            return self._ledger.grown.wait_for(grown, timeout_seconds)

    def _is_gone(self, topic: Topic) -> bool:
        return self._ledger.by_id(topic.topic_id) is not topic

    # -------------------------------------------------------------------------- by time

    def offsets_for_times(self, request: wire.OffsetsForTimes) -> wire.Offsets:
        """Per partition, the first offset whose timestamp is at or after the one asked for.

        -1 where no record is that late. As in Kafka's `ListOffsets`, the least *offset* counts.
        """
        topic = self._ledger.topic(request.topic)
        return wire.Offsets(
            offsets={
                number: self._offset_for_time(topic, topic.partition(number), timestamp_us)
                for number, timestamp_us in request.timestamps_us.items()
            }
        )

    def _offset_for_time(self, topic: Topic, partition: Partition, timestamp_us: int) -> int:
        wish = _Wish(columns=("offset", "timestamp"), batch_rows=limits.SCAN_BATCH_ROWS)

        def look(start: int, end: int) -> int:
            pieces, _ = self._plan(topic, partition, start, end, enough=end)
            for piece in pieces:
                if plan.latest_timestamp_us(piece) < timestamp_us:
                    continue
                for batch in self._all(topic, partition, piece.first, piece.end, wish):
                    offset = first_row_since(batch.rows, timestamp_us)
                    if offset is not None:
                        return offset
            return -1

        return _from_start(partition, look)

    def greatest_time(self, name: str, number: int) -> tuple[int, int]:
        """(time in ms, offset) of the first record with the greatest time; -1, -1 if there is none.

        As in Kafka's `ListOffsets` for the timestamp -3 (KIP-734).
        """
        topic = self._ledger.topic(name)
        partition = topic.partition(number)
        wish = _Wish(columns=("offset", "timestamp"), batch_rows=limits.SCAN_BATCH_ROWS)

        def look(start: int, end: int) -> tuple[int, int]:
            pieces, _ = self._plan(topic, partition, start, end, enough=end)
            found: tuple[int, int] | None = None
            for piece in sorted(pieces, key=plan.latest_timestamp_us, reverse=True):
                if found is not None and plan.latest_timestamp_us(piece) < found[0]:
                    break
                for batch in self._all(topic, partition, piece.first, piece.end, wish):
                    if batch.rows.num_rows:
                        stamp_us, offset = _latest(batch.rows)
                        if found is None or (stamp_us, -offset) > (found[0], -found[1]):
                            found = stamp_us, offset
            return (-1, -1) if found is None else (found[0] // 1_000, found[1])

        return _from_start(partition, look)


def _from_start(partition: Partition, look: Callable[[int, int], _Found]) -> _Found:
    """What `look` finds in the whole partition; anew where its start moves while it looks."""
    start = partition.start
    while True:
        try:
            return look(start, partition.end)
        except errors.OffsetOutOfRange as moved:
            if moved.start <= start:
                raise
            start = moved.start


def _latest(rows: pa.RecordBatch) -> tuple[int, int]:
    """(greatest timestamp in µs, the first offset that has it)."""
    stamps = arrow.as_numpy(rows.column("timestamp").view(pa.int64()))
    at = int(stamps.argmax())
    return int(stamps[at]), rows.column("offset")[at].as_py()


def _batch(topic: Topic, partition: Partition, first: int, end: int, rows: pa.RecordBatch) -> Batch:
    return Batch(
        topic=topic.name,
        partition=partition.number,
        first=first,
        end=end,
        high_watermark=partition.end,
        rows=rows,
    )


def _cut(batches: Iterable[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of so many at most, none much heavier than `READ_RUN_BYTES`."""
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            part = batch.slice(at, batch_rows)
            part = part.slice(0, _light_rows(part))
            yield part
            at += part.num_rows


def _light_rows(batch: pa.RecordBatch) -> int:
    """How many rows of the batch are no heavier than `READ_RUN_BYTES`; one at least."""
    while batch.num_rows > 1 and batch.nbytes > limits.READ_RUN_BYTES:
        batch = batch.slice(0, batch.num_rows // 2)
    return int(batch.num_rows)


def _is_packed(entry: Entry) -> bool:
    """Whether the entry's records are to be decoded, and too large to be kept while they are read.

    What came as columns is in the hot tail as it is.
    """
    return entry.encoding is Encoding.KAFKA and entry.memory_bytes > limits.READ_RUN_BYTES


def _runs(pieces: Iterable[Slice], batch_rows: int) -> Iterator[list[Slice]]:
    """Slices to be read in one go: a file alone, small neighbours in the WAL together."""
    run: list[Slice] = []
    size = 0
    for piece in pieces:
        more = piece.entry.entry.memory_bytes if piece.entry is not None else 0
        if run and not (
            piece.source is run[0].source is Source.WAL
            and piece.end - run[0].first <= batch_rows
            and size + more <= limits.READ_RUN_BYTES
        ):
            yield run
            run, size = [], 0
        run.append(piece)
        size += more
    if run:
        yield run


def check_range(topic: Topic, partition: Partition, start: int, end: int) -> None:
    """Raises `OffsetOutOfRange` where a reader may not begin or end."""
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
    """Whether the snapshot is of the topic, and has the partition's records below `end`."""
    return (
        snapshot.topic_id == topic.topic_id
        and partition < snapshot.partitions
        and snapshot.ends[partition] >= end
    )
