"""Publisher: moves durable entries from the WAL into the topics' Delta tables.

The WAL determines the rows of a commit, so it does not matter which broker writes them: a commit of
a fenced predecessor that lands late is as good as ours. In the version right before it, a commit
must find the topic's id, and every partition's `txn` where its run of entries begins. Otherwise it
is not made, and a new run is chosen from the table's current end.

Several topics are published together: the files of all of them are encoded, then put with a few
rounds of parallel flushes, then all commits likewise. A topic that fails affects no other. If much
is waiting, a separate process does this for the broker (`publish_process`). A topic with many
partitions has several commits, each for some of them, with turns of other topics in between.

A Spark batch is published whole, however large. If it exceeds one commit's share, its files are
written in several turns, with turns of other topics in between, and one commit finally adds them.
`storage/maintenance/sweeping.py` explains how the sweeper spares the files of such a *preparation*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import structlog

from sparklog import errors, limits
from sparklog.broker.counts import Budget, UpkeepCounts
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log import run_choice
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.publish_process import PublishProcess
from sparklog.broker.log.run_writer import Run, RunWriter, WrittenRun
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.log.table_commit import TableCommit
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.formats import topic_config
from sparklog.storage.maintenance import restoring
from sparklog.storage.objects import Store, SyncFailed, put_together
from sparklog.storage.snapshot import (
    Located,
    TableFile,
    TableSnapshot,
)
from sparklog.storage.table import preparations
from sparklog.storage.table.data_file import plan_for
from sparklog.storage.table.names import (
    data_path,
)
from sparklog.storage.table.together import commit_all

PUBLISH_MAX_ENTRIES = 65_536  # per partition, in one commit
PUBLISH_IN_PARALLEL_BYTES = 4 * limits.MIB
PUBLISH_QUIET_SECONDS = 0.25
PUBLISH_PRESSED_BYTES = 3 * limits.GIB

_log = structlog.get_logger("sparklog.publisher")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """Size of one commit; all 0 if more files must be written before the commit."""

    rows: int = 0
    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Turn:
    """A topic's part in publishing several topics together."""

    topic: Topic
    pending: TableCommit | None = None
    """Its next commit; None if there is nothing, or nothing more, to commit."""
    error: Exception | None = None


class Publisher:
    """Publishes topics, one commit at a time. One caller at a time per topic."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        hot: HotTail,
        *,
        clock: Clock,
        commit_bytes: int = limits.PUBLISH_MAX_BYTES,
        file_bytes: int = limits.PUBLISH_FILE_BYTES,
        pool: Executor | None = None,
        counts: UpkeepCounts | None = None,
        process: PublishProcess | None = None,
        schemas: SchemaKeeper | None = None,
    ) -> None:
        """`pool` writes the files of a large commit in parallel, `process` those of light ones.

        `schemas`: of a registry; without them, records with unknown schemas never wait.
        """
        self._store = store
        self._led_partitions = led_partitions
        self._backlog = led_partitions.backlog
        self._clock = clock
        self._commit_bytes = commit_bytes
        self._file_bytes = file_bytes
        self._pool = pool
        self.counts = counts or UpkeepCounts()
        self._memory = DecodeMemory(commit_bytes)
        self._runs = RunWriter(store, hot, clock=clock, memory=self._memory, file_bytes=file_bytes)
        self.schemas = schemas
        self.process = process
        """The publishing process; None if there cannot be one."""
        self._rounds: dict[str, int] = {}
        """The number of partitions left to publish in a topic's current round, by topic id."""
        self._pending: dict[str, TableCommit] = {}
        """By topic id."""
        self._refused: dict[str, Exception] = {}
        """Why a topic is not published at present, by topic id."""
        self._unreadable: dict[str, dict[int, WrittenRun]] = {}
        """Entries that could not be read, and so kept batches out of a table, by topic id and
        partition. Until they can be read, no file is written that could not be committed.
        """

    def budgets(self) -> list[Budget]:
        """Returns the memory for rows that are being written to tables, and for their files."""
        rows, files = self._memory, self._runs.putting
        return [
            Budget("publishing", rows.held_bytes, rows.limit_bytes),
            Budget("publishing_files", files.held_bytes, files.limit_bytes),
        ]

    @property
    def has_process(self) -> bool:
        """True while the files of light topics are written by another process, or soon will be."""
        return self.process is not None and self.process.is_started

    def warm_up(self) -> None:
        """Starts the publishing process, if there can be one, when it may get work at any time."""
        if self.process is not None and not self.process.is_started:
            self.process.look(partitions=self._led_partitions.partition_count)

    def remove_topic(self, topic: Topic) -> None:
        """Drops the state and the uncommitted files of a deleted topic."""
        self._rounds.pop(topic.topic_id, None)
        pending = self._pending.pop(topic.topic_id, None)
        if pending is not None:
            self._discard(pending)
        self._refused.pop(topic.topic_id, None)
        self._unreadable.pop(topic.topic_id, None)

    def publish(self, topic: Topic) -> PublishResult:
        """Commits the oldest entries of `topic`; does nothing if none are unpublished.

        For a large batch, each call writes some files, and the last one commits. Raises
        `PublisherFenced` if the table is ahead of all known entries, `ForeignTable`,
        `CorruptObject` and the reason a partition is blocked (after the entries before it are
        published), and the store's errors.
        """
        self._rounds.pop(topic.topic_id, None)
        self._begin_turn(topic)
        has_unreadable = topic.topic_id in self._unreadable
        if topic.held_back is not None or has_unreadable:
            # Check the table first, so that one that cannot be written costs no files and no time.
            # If it could not be read at the takeover, its log start is known from here on.
            self._apply_snapshot(topic, topic.table.refresh())
        if has_unreadable:
            self._read_again(topic)
        published = self._publish_some(self._resume(topic) or self._begin(topic))
        self._check_stopped(topic)
        return published

    def _begin_turn(self, topic: Topic) -> None:
        """Raises the reason the topic is not published at present, if there is one."""
        self._backlog.begin_turn(topic, restarts_wait=topic.topic_id not in self._rounds)
        refusal = self._refused.get(topic.topic_id)
        if refusal is not None:
            raise refusal.with_traceback(None)

    def _read_again(self, topic: Topic) -> None:
        """Forgets unreadable entries of a topic that can now be read, or have been published."""
        found: dict[int, WrittenRun] = {}
        for number, each in self._unreadable.get(topic.topic_id, {}).items():
            partition, first = topic.partitions.get(number), each.first_unreadable
            if partition is None:
                continue  # another broker leads it now
            entries = self._backlog.unpublished_in(partition, first, first + 1)
            if entries:
                again = WrittenRun(self._run(topic, partition, first, tuple(entries)))
                self._runs.read(again)
                if again.error is not None:
                    found[number] = again
        if found:
            self._unreadable[topic.topic_id] = found
        else:
            self._unreadable.pop(topic.topic_id, None)  # a deletion may have been faster

    def _check_stopped(self, topic: Topic) -> None:
        """Raises the reason some records of a topic cannot be published, if one is known."""
        for unreadable in self._unreadable.get(topic.topic_id, {}).values():
            _check_readable(topic, unreadable)
        for each in topic.partitions.values():
            if each.blocked is not None:
                raise each.blocked.with_traceback(None)

    def publish_together(self, topics: Sequence[Topic]) -> list[Exception | None]:
        """Makes one commit for each topic, as `publish` does, but all of them durable together.

        Returns for each topic the error that `publish` would have raised, or None. `PutUnresolved`:
        a file's put was rejected, or its outcome is unknown; `publish` retries. A topic whose
        commit is large, or that was held back, is published separately. Raises `SyncFailed`.
        """
        turns = [_Turn(topic) for topic in topics]
        for turn in turns:
            with _failing(turn):
                turn.pending = self._begin_light(turn.topic)
        begun = [(turn, turn.pending) for turn in turns if turn.pending is not None]
        written = [pending.written for _, pending in begun]
        process = self._process_if_ready()
        if process is not None:
            outcomes = process.write_together(written, self._runs)
        else:
            outcomes = self._runs.write_together(written)
        for (turn, _), error in zip(begun, outcomes, strict=True):
            if isinstance(error, errors.SchemasAwaited):
                self._note_awaited(turn.topic, error)
                turn.pending = None
            elif error is not None:
                turn.error, turn.pending = error, None
        self._commit_all([turn for turn in turns if turn.pending is not None])
        return [turn.error for turn in turns]

    def _process_if_ready(self) -> PublishProcess | None:
        process = self.process
        if process is None:
            return None
        process.look(self._led_partitions.backlog.waiting_objects)
        return process if process.is_ready else None

    def _begin_light(self, topic: Topic) -> TableCommit | None:
        """Returns the next commit of a topic; publishes a topic that needs more, and returns None.

        None of the commit's files are written yet. Waiting partitions are committed some at a time,
        and the topic is requested until all that were waiting when the round began have had their
        turn.
        """
        needs_more = topic.topic_id in self._pending or topic.topic_id in self._unreadable
        if topic.held_back is not None or needs_more:
            self.publish(topic)
            return None
        self._begin_turn(topic)
        left = self._rounds.pop(topic.topic_id, 0) or len(topic.waiting_partitions)
        most = limits.PUBLISH_PARTITIONS_TOGETHER
        pending = self._begin(topic, most_partitions=most)
        if pending is not None and len(pending.written) == most < left:
            self._rounds[topic.topic_id] = left - most
            self._backlog.request(topic)
        if pending is None:
            self._check_stopped(topic)
        elif pending.preparation is not None or pending.memory_bytes > limits.PUBLISH_LIGHT_BYTES:
            self._publish_some(pending)
            self._check_stopped(topic)
            return None
        return pending

    def _commit_all(self, turns: Sequence[_Turn]) -> None:
        """Commits the files of several topics, which are already in the store."""
        commits: list[tuple[_Turn, TableCommit]] = []
        for turn in turns:
            with _failing(turn):
                pending = turn.pending
                assert pending is not None
                if pending.splits_batch:
                    turn.pending = None
                    self._publish_before_unreadable(pending)
                    self._check_stopped(turn.topic)
                elif pending.is_empty:
                    self._conclude(pending, turn.topic.table.refresh())
                else:
                    commits.append((turn, pending))
        process = self._process_if_ready()
        outcomes = commit_all(
            self._store,
            [(turn.topic.table, each.decide) for turn, each in commits],
            clock=self._clock,
            stale=[turn.topic.table for turn, _ in commits if turn.topic.is_shared],
            put_all_new=process.put_all_new if process is not None else None,
        )
        for (turn, commit), outcome in zip(commits, outcomes, strict=True):
            with _failing(turn):
                self._conclude(commit, outcome)
                self._check_stopped(turn.topic)

    def _conclude(self, commit: TableCommit, outcome: TableSnapshot | Exception) -> None:
        """Applies the outcome of a commit. Raises it, if it is an error."""
        topic = commit.topic
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if not commit.has_landed:
                # An earlier commit of these files whose outcome is unknown may have landed.
                unneeded = [
                    file for file in commit.files if not topic.table.is_named(unquote(file.path))
                ]
                self._store.delete(data_path(topic.name, file) for file in unneeded)
        except errors.SparklogError as error:
            # After a `Retriable` no commit has the files. They are removed, because the next
            # attempt writes others, and they would fill the disk.
            commit.may_have_landed |= not isinstance(error, errors.Retriable)
            if commit.survives(error) or isinstance(error, errors.Retriable):
                self._suspend(commit, keep=commit.survives(error))
            raise
        if commit.has_landed:
            self.counts.add_published([file.size_bytes for file in commit.files])
            if self.schemas is not None and topic_config.is_avro(topic.config):
                self.schemas.published(topic, commit.files)
        self._apply_snapshot(topic, outcome)
        for each in commit.written:
            _check_readable(topic, each)

    def _publish_some(self, pending: TableCommit | None) -> PublishResult:
        """Writes files of a commit, and makes the commit once all are written."""
        if pending is None:
            return PublishResult()
        try:
            self._write_all(pending)
        except errors.SchemasAwaited as error:
            self._discard(pending)
            self._note_awaited(pending.topic, error)
            return PublishResult()
        except Exception as error:
            self._suspend(pending, keep=pending.survives(error))
            raise
        if not pending.is_complete:
            self._suspend(pending, keep=True)
            return PublishResult()
        if pending.splits_batch:
            return self._publish_before_unreadable(pending)
        files, table = pending.files, pending.topic.table
        outcome: TableSnapshot | Exception
        try:
            if pending.preparation is not None and self._has_lost_files(pending):
                self._discard(pending)
                return PublishResult()
            # An unreadable object may be gone because a predecessor has published its entries.
            outcome = table.refresh() if pending.is_empty else table.commit(pending.decide)
        except errors.SparklogError as error:
            outcome = error
        self._conclude(pending, outcome)
        return PublishResult(
            rows=sum(file.rows or 0 for file in files),
            files=len(files),
            bytes=sum(file.size_bytes for file in files),
        )

    def _publish_before_unreadable(self, pending: TableCommit) -> PublishResult:
        """Publishes again, without the batches that are partly unreadable."""
        topic = pending.topic
        self._discard(pending)
        self._unreadable.setdefault(topic.topic_id, {}).update(
            (each.run.partition, each.unreadable)
            for each in pending.written
            if each.error is not None
        )
        before = self._begin(topic)
        if before is None:
            # The batches may already be published.
            self._apply_snapshot(topic, topic.table.refresh())
        return self._publish_some(before)

    def _begin(self, topic: Topic, most_partitions: int | None = None) -> TableCommit | None:
        """Returns the topic's next commit, with no file written. Arguments as for `_choose`."""
        if self._waits(topic):
            return None
        runs = self._choose(topic, most_partitions)
        pending = TableCommit(topic, [WrittenRun(run) for run in runs])
        if not pending.written:
            return None
        if pending.count > 1 and pending.memory_bytes > 2 * self._commit_bytes:
            pending.preparation = preparations.prepare(
                topic.table, topic.topic_id, self._led_partitions.broker
            )
            pending.renewed_at = self._clock.monotonic()
        self._with_waits(pending)
        return pending

    def _resume(self, topic: Topic) -> TableCommit | None:
        """Returns the suspended commit, if it can still be made."""
        pending = self._pending.pop(topic.topic_id, None)
        if pending is None:
            return None
        table = topic.table
        assert pending.preparation is not None
        try:
            if pending.may_have_landed:
                self._apply_snapshot(topic, table.refresh())
            if not self._relocate_entries(pending):
                self._discard(pending)
                return None
            now = self._clock.monotonic()
            if now - pending.renewed_at > table.orphan_grace_seconds / 4:
                preparations.renew(table, pending.preparation)
                pending.renewed_at = now
        except errors.SparklogError as error:
            self._suspend(pending, keep=pending.survives(error))
            raise
        return pending

    def _relocate_entries(self, pending: TableCommit) -> bool:
        """Updates the runs to use carried copies. Returns whether they still continue the table."""
        for each in pending.written:
            run, partition = each.run, pending.topic.partitions.get(each.run.partition)
            if partition is None:
                return False
            published, entries = self._backlog.oldest_of(partition, len(run.entries))
            if published != run.first or not entries or entries[-1].entry.end != run.end:
                return False
            each.run = msgspec.structs.replace(run, entries=entries)
        return True

    def _has_lost_files(self, pending: TableCommit) -> bool:
        """Returns whether another engine's VACUUM has removed uncommitted files."""
        topic = pending.topic.name
        sizes = {data_path(topic, file): file.size_bytes for file in pending.files}
        missing = restoring.torn(self._store, sizes)
        if missing:
            _log.warning(
                "uncommitted files of a large batch are missing",
                topic=topic,
                count=len(missing),
            )
        return bool(missing)

    def _suspend(self, pending: TableCommit, *, keep: bool) -> None:
        """Keeps the written files for the next turn, or removes them."""
        topic = pending.topic
        if keep and self._led_partitions.by_id(topic.topic_id) is topic:
            self._pending[topic.topic_id] = pending
            self._backlog.request(topic)  # its next turn need not wait for the interval
        else:
            self._discard(pending)

    def set_refusal(self, topic: Topic, error: Exception | None) -> None:
        """Stops publishing the topic due to `error`, unless it is deleted; None allows it again."""
        if error is None or self._led_partitions.by_id(topic.topic_id) is not topic:
            self._refused.pop(topic.topic_id, None)
        else:
            self._refused[topic.topic_id] = error

    def retain_refusals(self, topic_ids: Collection[str]) -> None:
        """Allows all refused topics again, except these."""
        for gone in self._refused.keys() - set(topic_ids):
            self._refused.pop(gone, None)

    def is_writing(self, topic: Topic) -> bool:
        """Returns whether files are being written for a large commit that a later turn makes."""
        return topic.topic_id in self._pending

    def rewrite(
        self,
        topic: Topic,
        partition: Partition,
        first: int,
        entries: Sequence[Located],
        *,
        lost: TableFile,
    ) -> list[TableFile]:
        """Writes files with the rows of `entries` from offset `first` on, and commits nothing.

        They replace the `lost` file, and have all typed columns that it had.

        Raises `CorruptObject` and `MissingObject` if an entry cannot be read, and the store's
        errors.
        """
        written = WrittenRun(self._run(topic, partition, first, tuple(entries), lost=[lost]))
        try:
            self._runs.write(written)
            if written.error is not None:
                raise written.error
        except errors.SparklogError:
            self._runs.discard([written])
            raise
        return written.files

    # -------------------------------------------------------------------------- choosing

    def _choose(self, topic: Topic, most_partitions: int | None = None) -> list[Run]:
        """Chooses the next run of each partition, about `commit_bytes` in total, batches whole.

        No run contains an entry that is known to be unreadable or is in a blocked partition, nor a
        part of a batch with such an entry. `most_partitions`: the maximum number, those that have
        waited longest; ignored if a Spark batch may span more of them.
        """
        unreadable = self._unreadable.get(topic.topic_id, {})
        blocked = [each for each in topic.partitions.values() if each.blocked is not None]
        heads, batches = self._backlog.heads(
            topic, blocked, most_partitions=most_partitions, most_entries=PUBLISH_MAX_ENTRIES
        )
        if not heads:
            return []
        chosen = [each.partition for each in heads]
        share = self._commit_bytes // len(chosen)
        ends = [each.entries[run_choice.cut(each.entries, share) - 1].entry.end for each in heads]
        ends += [each.published for each in blocked]
        run_choice.keep_batches_whole(batches, ends)
        if unreadable or blocked:
            stops = {number: each.first_unreadable for number, each in unreadable.items()}
            stops |= {each.number: each.published for each in blocked}
            ends = [
                min(end, stops.get(partition.number, end))
                for partition, end in zip((*chosen, *blocked), ends, strict=True)
            ]
            run_choice.leave_out_cut_batches(batches, ends)
        runs = [
            self._run(
                topic, each.partition, each.published, self._backlog.below(each.partition, end)
            )
            for each, end in zip(heads, ends, strict=False)
        ]
        return [each for each in runs if each.entries]

    def _run(
        self,
        topic: Topic,
        partition: Partition,
        first: int,
        entries: tuple[Located, ...],
        lost: Sequence[TableFile] = (),
    ) -> Run:
        plan, schemas = plan_for(topic.table.snapshot.columns, lost), self.schemas
        if plan is not None and schemas is not None and schemas.withheld:
            plan = msgspec.structs.replace(plan, withheld=schemas.withheld)
        return Run(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=partition.number,
            first=first,
            entries=entries,
            plan=plan,
        )

    # -------------------------------------------------------------------------- schemas

    def _waits(self, topic: Topic) -> bool:
        """Returns whether the topic's records wait for schemas that were asked for."""
        return self.schemas is not None and self.schemas.pauses(topic)

    def _note_awaited(self, topic: Topic, error: errors.SchemasAwaited) -> None:
        assert self.schemas is not None
        self.schemas.awaits(topic, error.ids)

    def _with_waits(self, pending: TableCommit) -> None:
        """Makes the runs of a small commit wait for schemas that are met for the first time."""
        schemas, topic = self.schemas, pending.topic
        is_avro = topic_config.is_avro(topic.config)
        if schemas is None or pending.preparation is not None or not is_avro:
            return
        known = schemas.waits_for(topic)
        if known is not None:
            for each in pending.written:
                each.run = msgspec.structs.replace(each.run, waits=True, not_for=tuple(known))

    # -------------------------------------------------------------------------- writing

    def _write_all(self, pending: TableCommit) -> None:
        """Writes all files of a commit; for a preparation, one file each of some partitions."""
        topic = pending.topic
        written = [each for each in pending.written if not each.is_complete]
        if pending.preparation is not None:
            written = written[: max(self._commit_bytes // self._file_bytes, 1)]
        else:
            self._write_together(topic, [each for each in written if each.run.is_small])
            written = [each for each in written if not each.is_complete]
        self._write_some(topic, written, pending.preparation)

    def _write_some(
        self, topic: Topic, written: Sequence[WrittenRun], preparation: int | None
    ) -> None:
        pool = self._pool
        if pool is None or not self._is_worth_a_pool(topic, written):
            for each in written:
                self._runs.write(each, preparation)
            return
        writing = [pool.submit(self._runs.write, each, preparation) for each in written]
        for future in writing:
            future.exception()  # waits, so that no write continues after a failure
        for future in writing:
            future.result()

    def _write_together(self, topic: Topic, written: Sequence[WrittenRun]) -> None:
        """Writes small files, and puts them with a few rounds of flushes: a topic may have many."""
        count = limits.PUBLISH_ENCODED_BYTES // limits.PUBLISH_SMALL_BYTES
        for first in range(0, len(written), count):
            some = written[first : first + count]
            objects: list[tuple[str, pa.Buffer]] = []
            for each in some:
                each.encoded = objects
            self._write_some(topic, some, None)
            for each in some:
                each.encoded = None
            put_together(self._store, objects, clock=self._clock)

    def _is_worth_a_pool(self, topic: Topic, written: Sequence[WrittenRun]) -> bool:
        """Returns whether to write in parallel: on a local root, not for few rows nor in a burst.

        In a burst producers need the cores more, until so much is unpublished that they would soon
        be throttled.
        """
        if not self._store.is_local:
            return True
        entries = [located.entry for each in written for located in each.run.entries]
        if sum(entry.memory_bytes for entry in entries) < PUBLISH_IN_PARALLEL_BYTES:
            return False
        partitions = [topic.partitions.get(each.run.partition) for each in written]
        newest = [found for each in partitions if each for found in each.unpublished[-1:]]
        newest_us = max((each.entry.arrival_us for each in newest), default=0)
        is_quiet = self._clock.now_us() - newest_us > PUBLISH_QUIET_SECONDS * 1e6
        return is_quiet or self._led_partitions.backlog.unpublished_bytes > PUBLISH_PRESSED_BYTES

    def _discard(self, pending: TableCommit) -> None:
        """Removes files that no commit contains or will contain.

        If that is unknown, leaves them to the sweeper, which waits until no commit can land.
        """
        if not pending.may_have_landed:
            self._runs.discard(pending.written)

    # -------------------------------------------------------------------------- committing

    def _apply_snapshot(self, topic: Topic, snapshot: TableSnapshot) -> None:
        """Advances the topic's partitions to the table's version, whichever broker committed it."""
        if self._led_partitions.by_id(topic.topic_id) is not topic:
            return  # deleted since
        if snapshot.partitions < topic.count:
            snapshot = topic.table.refresh()  # partitions have been added since
        if snapshot.topic_id != topic.topic_id or snapshot.partitions < topic.count:
            raise errors.ForeignTable(
                topic=topic.name,
                reason=(
                    f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions;"
                    f" it was {topic.topic_id}, with {topic.count}"
                ),
            )
        moved = [
            (partition, end)
            for partition in topic.partitions.values()
            # A partition that has since arrived from another broker may be ahead of this version.
            if partition.since_version <= snapshot.version
            and (
                (end := snapshot.ends[partition.number]) != partition.published
                or partition.blocked is not None
            )
        ]
        for partition, end in moved:
            if partition.blocked is not None:
                if self._led_partitions.backlog.reconnect(topic, partition, end):
                    _log.info(
                        "the partition is unblocked: its table and log connect again",
                        topic=topic.name,
                        partition=partition.number,
                    )
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
        topic.last_read = snapshot
        # The WAL is trimmed by these ends, and a predecessor may have died during this commit.
        topic.table.sync()
        self._led_partitions.backlog.advance_published(topic, moved)
        self._led_partitions.advance_start(topic, snapshot.starts)


def _check_readable(topic: Topic, written: WrittenRun) -> None:
    """Raises the error of the first unreadable entry, unless it has been published by now."""
    partition = topic.partitions.get(written.run.partition)
    published = partition.published if partition is not None else written.run.end
    if written.error is not None and published < written.run.entries[written.count].entry.end:
        raise written.error.with_traceback(None)


@contextlib.contextmanager
def _failing(turn: _Turn) -> Iterator[None]:
    """Records an error as the topic's, and drops its pending commit."""
    try:
        yield
    except SyncFailed:
        raise
    except Exception as error:
        turn.error, turn.pending = error, None
