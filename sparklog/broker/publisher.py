"""The publisher: moves what is durable in the WAL into the topics' tables.

The rows of a commit are determined by the WAL, so it does not matter which broker writes them: a
predecessor that wakes up after its fence may land a commit still, and it is as good as ours. What a
commit must find at the version before it: the topic's id, and every partition's `txn` where this
run of entries begins. Otherwise it is not made, and the run is chosen anew from where the table is.

A query's batch is published whole, however large. What is more than a commit's worth is written in
several turns, between which other topics have theirs, and one commit adds it in the end; `upkeep`
says what keeps the files of such a *preparation* from the sweeper.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa
import structlog

from sparklog import errors, limits
from sparklog.broker.hot import HotTail
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.room import Room
from sparklog.clock import Clock
from sparklog.record import LOG_APPEND_TIME, rows_of_run
from sparklog.storage import upkeep, wal
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.publish import write_file
from sparklog.storage.snapshot import BatchId, BatchKind, Located, TableFile, TableSnapshot
from sparklog.storage.table import Change, Table, data_path, end_app_id, key_app_id, query_app_id

_log = structlog.get_logger("sparklog.publisher")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Entries of one partition that go into the next commit. `first`: where its table ends now."""

    partition: Partition
    first: int
    entries: tuple[Located, ...]

    @property
    def end(self) -> int:
        return self.entries[-1].entry.end


@dataclass(slots=True)
class _Written:
    """What became of a run: files with its rows, up to an entry that cannot be read."""

    run: _Run
    sound: int = 0
    """The number of its entries that are in `files`."""
    files: list[TableFile] = field(default_factory=list)
    error: errors.SparklogError | None = None

    @property
    def sound_run(self) -> _Run:
        run = self.run
        return _Run(partition=run.partition, first=run.first, entries=run.entries[: self.sound])

    @property
    def is_whole(self) -> bool:
        """Whether nothing more can be written of the run."""
        return self.error is not None or self.sound == len(self.run.entries)

    def check(self) -> None:
        """Raises what is wrong with the first entry that is not sound, if it still waits."""
        partition = self.run.partition
        if self.error is not None and partition.published < self.run.entries[self.sound].entry.end:
            raise self.error


@dataclass(slots=True)
class _Pending:
    """A commit in the making."""

    written: list[_Written]
    preparation: int | None = None
    """The number in its files' names, where they are written in several turns."""
    renewed_at: float = 0.0
    may_have_landed: bool = False
    """Whether a commit of these files got no answer: then they may be the table's."""

    @property
    def files(self) -> list[TableFile]:
        return [file for each in self.written for file in each.files]

    @property
    def is_whole(self) -> bool:
        return all(each.is_whole for each in self.written)

    @property
    def count(self) -> int:
        return sum(len(each.run.entries) for each in self.written)

    @property
    def memory_bytes(self) -> int:
        return sum(
            located.entry.memory_bytes for each in self.written for located in each.run.entries
        )

    def survives(self, error: BaseException) -> bool:
        """Whether to go on with what is written, when there was such an error."""
        return (
            self.preparation is not None
            and isinstance(error, errors.SparklogError | ObjectMissing)
            # Begun again: what took too long, and what others need the space of.
            and not isinstance(error, errors.TimedOut | errors.StorageFull | errors.Fenced)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one commit came to; nothing where more must be written before there is one."""

    rows: int = 0
    files: int = 0
    bytes: int = 0


class Publisher:
    """Publishes topics one commit at a time. One caller at a time for a topic."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        hot: HotTail,
        *,
        clock: Clock,
        tables: Iterable[Table] = (),
        commit_bytes: int = limits.PUBLISH_MAX_BYTES,
        file_bytes: int = limits.PUBLISH_FILE_BYTES,
        pool: Executor | None = None,
    ) -> None:
        """`pool`: where the files of a large commit are written beside each other."""
        self._store = store
        self._ledger = ledger
        self._hot = hot
        self._clock = clock
        self._commit_bytes = commit_bytes
        self._file_bytes = file_bytes
        self._pool = pool
        self._room = Room(commit_bytes)
        self._wanted: set[str] = set()
        self._pending: dict[str, _Pending] = {}
        """By topic id."""
        self._refused: dict[str, Exception] = {}
        """Why nothing of a topic is published at the moment, by topic id."""
        self._tables = {table.snapshot.topic_id or "": table for table in tables}

    def table(self, topic: Topic) -> Table:
        """The publisher's own view of the topic's table; others may look, but not commit by it."""
        found = self._tables.get(topic.topic_id)
        if found is None:
            found = self._tables[topic.topic_id] = Table(self._store, topic.name, clock=self._clock)
        return found

    def take(self, topic: Topic, table: Table) -> None:
        """The view to use from now on; nobody else commits by it any more."""
        self._tables[topic.topic_id] = table

    def forget(self, topic: Topic) -> None:
        """The topic is gone."""
        self._tables.pop(topic.topic_id, None)
        pending = self._pending.pop(topic.topic_id, None)
        if pending is not None:
            self._discard(topic, pending)
        self._refused.pop(topic.topic_id, None)

    def want(self, topic: Topic) -> None:
        """Somebody waits for the topic: it is due next time, whatever the bounds."""
        with self._ledger.lock:
            self._wanted.add(topic.topic_id)

    def due(self, *, interval_seconds: float, publish_bytes: int) -> list[Topic]:
        """Topics whose oldest unpublished record, or whose backlog, is over the bounds.

        So too those with a blocked partition: a look at the table may find it mended.

        A record from the future was taken by a predecessor whose clock is ahead of ours.
        """
        now_us = self._clock.now_us()
        horizon_us = now_us - round(interval_seconds * 1e6)
        found = []
        with self._ledger.lock:
            for topic in self._ledger.waiting():
                waiting = [p.unpublished[0].entry for p in topic.partitions if p.unpublished]
                if (
                    topic.topic_id in self._wanted
                    or any(each.blocked is not None for each in topic.partitions)
                    or topic.unpublished_bytes + topic.staged_bytes >= publish_bytes
                    or any(not horizon_us < entry.arrival_us <= now_us for entry in waiting)
                ):
                    found.append(topic)
            self._wanted.clear()
        return found

    def publish(self, topic: Topic) -> Published:
        """One commit of the oldest entries of `topic`; nothing where nothing waits.

        Of a large batch it is one turn of the writing, and the last one commits. Raises
        `PublisherFenced` when the table is ahead of all we know, `ForeignTable`, `CorruptObject`
        and what blocks a partition (after what precedes it is published), and what the store
        raises.
        """
        refusal = self._refused.get(topic.topic_id)
        if refusal is not None:
            raise refusal.with_traceback(None)
        if topic.held_back is not None:
            # No files for a table that cannot be written still, and no look at a long backlog.
            snapshot = self.table(topic).refresh()
            if any(each.blocked is not None for each in topic.partitions):
                self._settle(topic, snapshot)
        published = self._publish_some(topic)
        for each in topic.partitions:
            if each.blocked is not None:
                raise each.blocked.with_traceback(None)
        return published

    def _publish_some(self, topic: Topic) -> Published:
        pending = self._resume(topic) or self._begin(topic)
        if pending is None:
            return Published()
        try:
            self._write_all(topic, pending)
        except Exception as error:
            self._put_aside(topic, pending, keep=pending.survives(error))
            raise
        if not pending.is_whole:
            self._put_aside(topic, pending, keep=True)
            return Published()
        files = pending.files
        sound = [each.sound_run for each in pending.written if each.sound]
        try:
            if pending.preparation is not None and self._has_lost_files(topic, pending):
                self._discard(topic, pending)
                return Published()
            # What cannot be read may be gone because a predecessor has published it since.
            snapshot = self._commit(topic, sound, pending) if sound else self.table(topic).refresh()
        except errors.SparklogError as error:
            # After a `Retriable` the files surely are in no commit, and the next try would write
            # others: a disk would fill.
            pending.may_have_landed |= not isinstance(error, errors.Retriable)
            if pending.survives(error) or isinstance(error, errors.Retriable):
                self._put_aside(topic, pending, keep=pending.survives(error))
            raise
        self._settle(topic, snapshot)
        for each in pending.written:
            each.check()
        return Published(
            rows=sum(file.rows or 0 for file in files),
            files=len(files),
            bytes=sum(file.size_bytes for file in files),
        )

    def _begin(self, topic: Topic) -> _Pending | None:
        """The next commit of the topic, of which nothing is written."""
        pending = _Pending([_Written(run) for run in self._choose(topic)])
        if not pending.written:
            return None
        if pending.count > 1 and pending.memory_bytes > 2 * self._commit_bytes:
            pending.preparation = self.table(topic).prepare(topic.topic_id)
            pending.renewed_at = self._clock.monotonic()
        return pending

    def _resume(self, topic: Topic) -> _Pending | None:
        """The commit that was put aside, as far as it can still be made."""
        pending = self._pending.pop(topic.topic_id, None)
        if pending is None:
            return None
        table = self.table(topic)
        assert pending.preparation is not None
        try:
            if pending.may_have_landed:
                self._settle(topic, table.refresh())
            if not self._bring_up_to_date(pending):
                self._discard(topic, pending)
                return None
            now = self._clock.monotonic()
            if now - pending.renewed_at > table.orphan_grace_seconds / 4:
                table.renew(pending.preparation)
                pending.renewed_at = now
        except errors.SparklogError as error:
            self._put_aside(topic, pending, keep=pending.survives(error))
            raise
        return pending

    def _bring_up_to_date(self, pending: _Pending) -> bool:
        """Whether the runs still continue the table; entries may lie elsewhere by now."""
        with self._ledger.lock:
            for each in pending.written:
                run = each.run
                entries = tuple(run.partition.unpublished[: len(run.entries)])
                if run.partition.published != run.first or not entries:
                    return False
                if entries[-1].entry.end != run.end:
                    return False
                each.run = _Run(partition=run.partition, first=run.first, entries=entries)
        return True

    def _has_lost_files(self, topic: Topic, pending: _Pending) -> bool:
        """Whether another engine's VACUUM has taken what no version of the table names yet."""
        sizes = {data_path(topic.name, file): file.size_bytes for file in pending.files}
        missing = upkeep.torn(self._store, sizes)
        if missing:
            _log.warning("files of a large batch are gone", topic=topic.name, count=len(missing))
        return bool(missing)

    def _put_aside(self, topic: Topic, pending: _Pending, *, keep: bool) -> None:
        """Keeps what is written for the next turn, or removes it."""
        if keep and self._ledger.by_id(topic.topic_id) is topic:
            self._pending[topic.topic_id] = pending
        else:
            self._discard(topic, pending)

    def refuse(self, topic: Topic, error: Exception | None) -> None:
        """Publishes nothing of the topic as long as there is this error."""
        if error is None:
            self._refused.pop(topic.topic_id, None)
        else:
            self._refused[topic.topic_id] = error

    def write_again(
        self, topic: Topic, partition: Partition, first: int, entries: Sequence[Located]
    ) -> list[TableFile]:
        """Files with the rows of `entries` from offset `first` on; in no commit yet.

        Raises `CorruptObject` and `MissingObject` where an entry cannot be read, and what the store
        raises.
        """
        written = _Written(_Run(partition=partition, first=first, entries=tuple(entries)))
        try:
            self._write(topic, written, None)
            if written.error is not None:
                raise written.error
        except errors.SparklogError:
            self._discard(topic, _Pending([written]))
            raise
        return written.files

    # -------------------------------------------------------------------------- choosing

    def _choose(self, topic: Topic) -> list[_Run]:
        """The next run of each partition, some `commit_bytes` in all; no query's batch is split."""
        with self._ledger.lock:
            chosen = [each for each in topic.partitions if each.unpublished and not each.blocked]
            firsts = [each.published for each in chosen]
            # A long backlog is not gone through, nor copied, for a commit of its beginning.
            heads = [each.unpublished[: limits.PUBLISH_MAX_ENTRIES] for each in chosen]
            batches = [dict(each.waiting_batches) for each in chosen]
        if not chosen:
            return []
        share = self._commit_bytes // len(chosen)
        ends = [head[_cut(head, share) - 1].entry.end for head in heads]
        _keep_batches_whole(batches, ends)
        with self._ledger.lock:
            return [
                _Run(partition=partition, first=first, entries=partition.unpublished_below(end))
                for partition, first, end in zip(chosen, firsts, ends, strict=True)
            ]

    # -------------------------------------------------------------------------- writing

    def _write_all(self, topic: Topic, pending: _Pending) -> None:
        """Writes all of a commit, or of a large one some files of as many partitions."""
        written = [each for each in pending.written if not each.is_whole]
        if pending.preparation is not None:
            written = written[: max(self._commit_bytes // self._file_bytes, 1)]
        pool = self._pool
        if pool is None or not self._is_worth_a_pool(written):
            for each in written:
                self._write(topic, each, pending.preparation)
            return
        writing = [pool.submit(self._write, topic, each, pending.preparation) for each in written]
        for future in writing:
            future.exception()  # waits: nothing is left running behind a failure
        for future in writing:
            future.result()

    def _is_worth_a_pool(self, written: Sequence[_Written]) -> bool:
        """On a local root: not a few rows, and not while producers need the cores more.

        They do in a burst, until so much waits that they would soon be slowed.
        """
        if not self._store.is_local:
            return True
        entries = [located.entry for each in written for located in each.run.entries]
        if sum(entry.memory_bytes for entry in entries) < limits.PUBLISH_IN_PARALLEL_BYTES:
            return False
        newest = [found for each in written for found in each.run.partition.unpublished[-1:]]
        newest_us = max((each.entry.arrival_us for each in newest), default=0)
        is_quiet = self._clock.now_us() - newest_us > limits.PUBLISH_QUIET_SECONDS * 1e6
        return is_quiet or self._ledger.unpublished_bytes > limits.PUBLISH_PRESSED_BYTES

    def _discard(self, topic: Topic, pending: _Pending) -> None:
        """Removes files that are in no commit, and will be in none.

        Where nobody can tell, a sweeper can: once no commit that names them may land any more.
        """
        if pending.may_have_landed:
            return
        with contextlib.suppress(errors.Retriable):  # or else they are swept as orphans
            self._store.delete(data_path(topic.name, file) for file in pending.files)

    def _write(self, topic: Topic, written: _Written, preparation: int | None) -> None:
        """Writes the rows of a run, up to the first entry that cannot be read."""
        entries = [each.entry for each in written.run.entries[written.sound :]]
        sizes = [each.memory_bytes for each in entries]
        # One file at a time, which ends before an entry that would be too much; and beside it an
        # entry's records twice while they are decoded, which what is staged need not be.
        largest = max(sizes)
        decoded = max((each.memory_bytes for each in entries if each.staged is None), default=0)
        needed = decoded + max(largest, min(sum(sizes), self._file_bytes))
        with self._room.hold(needed):
            self._write_run(topic, written, preparation)
            if largest > limits.LARGE_BYTES and written.is_whole:
                pa.default_memory_pool().release_unused()  # it would keep them for this thread

    def _write_run(self, topic: Topic, written: _Written, preparation: int | None) -> None:
        """Goes on with the run's files; of a preparation it writes one."""
        run = written.run
        size = count = 0
        payloads: list[tuple[int, int, int, pa.RecordBatch]] = []

        def write() -> None:
            nonlocal size, count
            if payloads:
                batches = rows_of_run(payloads, partition=run.partition.number)
                written.files.append(self._write_file(topic, run, batches, preparation))
                payloads.clear()
            written.sound += count
            size = count = 0

        begun = len(written.files)
        try:
            for portion, batches in self._portions(run.entries[written.sound :]):
                if size + sum(each.entry.memory_bytes for each in portion) > self._file_bytes:
                    write()
                if preparation is not None and len(written.files) > begun:
                    break
                for entries, payload in self._decoded(portion, batches):
                    first = entries[0].entry
                    skip = max(run.first - first.base_offset, 0)
                    count += len(entries)
                    # What it came to: an entry's own word may be an estimate.
                    size += payload.nbytes + payload.num_rows * limits.ROW_BYTES
                    payloads.append(
                        (
                            first.base_offset + skip,
                            first.arrival_us,
                            first.timestamp_type,
                            payload.slice(skip) if skip else payload,
                        )
                    )
                    del payload  # or it lives on while the next one is decoded
                    if size >= self._file_bytes:
                        write()
        except errors.CorruptObject as error:
            written.error = error
        except ObjectMissing as missing:
            reason = "it is not published yet"
            written.error = errors.MissingObject(path=missing.path, reason=reason)
        write()

    def _write_file(
        self,
        topic: Topic,
        run: _Run,
        batches: Sequence[pa.RecordBatch],
        preparation: int | None,
    ) -> TableFile:
        return write_file(
            self._store,
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=run.partition.number,
            batches=batches,
            clock=self._clock,
            preparation=preparation,
        )

    def _portions(
        self, entries: Sequence[Located]
    ) -> Iterator[tuple[Sequence[Located], Sequence[bytes | bytearray]]]:
        """Entries to be decoded together, and where they are Kafka's and in memory, their batches.

        Those are small ones; any other entry comes alone, and without its records.
        """
        at = 0
        while at < len(entries):
            batches = self._hot_from_kafka(itertools.islice(entries, at, None))
            count = max(len(batches), 1)
            yield entries[at : at + count], batches
            at += count

    def _hot_from_kafka(self, entries: Iterable[Located]) -> list[bytes | bytearray]:
        """The batches of the first of these, as long as they can be decoded together."""
        found: list[bytes | bytearray] = []
        size = 0
        for each in entries:
            batch = self._hot.find(each.entry)
            size += each.entry.memory_bytes
            if (
                batch is None
                or isinstance(batch.held, pa.RecordBatch)
                or each.entry.timestamp_type == LOG_APPEND_TIME
                or (found and size > limits.PUBLISH_TOGETHER_BYTES)
            ):
                break
            found.append(batch.held)
        return found

    def _decoded(
        self, portion: Sequence[Located], batches: Sequence[bytes | bytearray]
    ) -> Iterator[tuple[Sequence[Located], pa.RecordBatch]]:
        """The records of a portion: together, or where one of them is corrupt one by one."""
        if len(batches) > 1:
            with contextlib.suppress(errors.CorruptObject):
                yield portion, wal.decode_kafka([each.entry for each in portion], batches)
                return
        for each in portion:
            yield [each], self._payload(each)

    def _payload(self, located: Located) -> pa.RecordBatch:
        held = self._hot.find(located.entry)
        if held is not None:
            return held.payload
        return wal.decode_payload(located.entry, wal.read_payload(self._store, located))

    # -------------------------------------------------------------------------- committing

    def _commit(self, topic: Topic, runs: Sequence[_Run], pending: _Pending) -> TableSnapshot:
        landed = False
        files = pending.files

        def decide(before: TableSnapshot) -> Change | None:
            nonlocal landed
            landed = False
            if before.topic_id != topic.topic_id or before.partitions < len(topic.partitions):
                return None
            if any(before.ends[run.partition.number] != run.first for run in runs):
                return None
            landed = True
            ends = {end_app_id(topic.topic_id, run.partition.number): run.end for run in runs}
            return Change(
                adds=tuple(files),
                txns={**ends, **_batch_txns(topic, runs, table)},
                preparation=pending.preparation,
            )

        table = self.table(topic)
        if table.snapshot.partitions < len(topic.partitions):
            table.refresh()  # some were added since
        snapshot = table.commit(decide)
        if not landed:
            # A commit that got no answer may have landed by now, with these files.
            unneeded = [file for file in files if not table.is_named(unquote(file.path))]
            self._store.delete(data_path(topic.name, file) for file in unneeded)
        return snapshot

    def _settle(self, topic: Topic, snapshot: TableSnapshot) -> None:
        """Brings the ledger to where the table is now, whoever brought the table there."""
        if self._ledger.by_id(topic.topic_id) is not topic:
            return  # deleted meanwhile
        if snapshot.topic_id != topic.topic_id or snapshot.partitions < len(topic.partitions):
            raise errors.ForeignTable(
                topic=topic.name,
                reason=(
                    f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions;"
                    f" it was {topic.topic_id}, with {len(topic.partitions)}"
                ),
            )
        for partition, end in zip(topic.partitions, snapshot.ends, strict=False):
            if partition.blocked is not None:
                if self._ledger.reconnect(topic, partition, end):
                    _log.info("whole again", topic=topic.name, partition=partition.number)
            elif end > partition.end:
                raise errors.PublisherFenced(
                    topic=topic.name, partition=partition.number, end=partition.end, found=end
                )
            elif end < partition.published:
                raise errors.ForeignTable(
                    topic=topic.name,
                    reason=(
                        f"partition {partition.number} ends at {end} in the table, and was"
                        f" published up to {partition.published}: another engine has set its txn"
                        " back"
                    ),
                )
        # The WAL is trimmed by what the ledger says, and a dying predecessor may have committed it.
        self.table(topic).settle()
        self._ledger.published(topic, snapshot.ends)
        self._ledger.started(topic, snapshot.starts)


def _batch_txns(topic: Topic, runs: Iterable[_Run], table: Table) -> dict[str, int]:
    """The `txn` of each Spark batch in the runs that must be known for long."""
    found: dict[str, int] = {}
    for run in runs:
        for located in run.entries:
            batch_id, kind = located.entry.batch_id, located.entry.batch_kind
            if batch_id is None or kind is BatchKind.UNNAMED:
                continue
            name = query_app_id if kind is BatchKind.NUMBERED else key_app_id
            app_id = name(topic.topic_id, batch_id.query)
            before = found.get(app_id)
            if before is None:
                txn = table.txn(app_id)
                before = txn.version if txn is not None else -1
            found[app_id] = max(before, batch_id.batch)
    return found


def _cut(entries: Sequence[Located], budget_bytes: int) -> int:
    """How many of `entries` fit into the budget; one at least, where there is one.

    Rows cost memory while they are written, so the budget is of rows as they are in memory.
    """
    size = 0
    for index, each in enumerate(entries):
        size += each.entry.memory_bytes
        if size > budget_bytes and index:
            return index
    return len(entries)


def _keep_batches_whole(
    batches: Sequence[Mapping[BatchId, tuple[int, int]]], ends: list[int]
) -> None:
    """Raises `ends` until every query's batch that is in is in with all its entries.

    `batches`: of each partition, the first offset and the end of those that wait.
    """
    spans: dict[BatchId, list[tuple[int, int, int]]] = {}
    for index, of_partition in enumerate(batches):
        for batch_id, (first, end) in of_partition.items():
            spans.setdefault(batch_id, []).append((index, first, end))
    changed = bool(spans)
    while changed:
        changed = False
        for span in spans.values():
            if any(first < ends[index] for index, first, _ in span):
                for index, _, end in span:
                    if ends[index] < end:
                        ends[index] = end
                        changed = True
