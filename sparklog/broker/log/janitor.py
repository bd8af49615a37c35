"""Janitor: background maintenance of tables and files, in small steps.

For each topic, when due, it sweeps unneeded files, applies retention, writes a Delta checkpoint,
cleans the Delta log, and merges small files. In a topic with key compaction, it first removes
superseded records. A task that fails for a topic is logged and not retried for a while; the topic's
other tasks and the other topics continue. So space is still freed on a disk that is too full for a
checkpoint.

A tick visits a bounded number of topics: those with several new commits, and some of the others in
rotation, so that each is visited within a minute. It has a time limit, and the next tick continues.
A visit looks for commits of others. On an object store each look costs requests, so the looks at a
table become rarer while they find nothing. The broker's own commits are known without a look.
Removing superseded records, and sorting the files of another engine, can take a long time, and run
alongside everything else.

It also removes the staged files of Spark batches, once all their records are published or, if they
have no manifest, after `janitor.staging_abandoned_seconds` (`storage.staging.sweep`); the files of
deleted topics, after the grace periods of all files; and old files left by crashed puts. The names
of data files determine which of them may be orphans (`storage.table.names`).

A replaced broker may not yet know that it was replaced, nor know the topics and partitions that its
successor has created. So no file is removed because this broker does not know it: only the metadata
determines that a topic is deleted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final

import crc32c
import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import FailureLog, LookSchedule, RetrySchedule
from sparklog.broker.counts import UpkeepCounts
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.staged_outcomes import StagedOutcomes
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.upkeep_duties import Duties, UnfinishedChanges
from sparklog.clock import Clock
from sparklog.settings import JanitorSettings
from sparklog.storage.maintenance import (
    file_compaction,
    first_columns,
    key_compaction,
    retention,
    sweeping,
    waiting_rows,
)
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store, SyncFailed
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.staging import manifest
from sparklog.storage.staging.sweep import StagingSweep
from sparklog.storage.table import removed_files
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.topic_table import OpenTable, TopicTable
from sparklog.storage.wal.choice import sweep_probes

UPKEEP_SECONDS = 1.0  # after which a tick leaves the remaining topics to the next one
_UPKEEP_ROUND_SECONDS = 60.0  # within which each topic has its turn
UPKEEP_TOPICS = 20  # that a tick visits at least, or all if there are fewer
_TABLE_LOG_LEAST_VERSIONS = 1_000  # that each table may retain, however many tables there are
_TABLE_LOGS_VERSIONS = 200_000  # shared by all tables of a broker
_DELETED_TOPICS_LEARNT = 20  # per sweep, of the topics deleted before the start
_BUSY_BYTES_PER_SECOND = 48 * limits.MIB
BUSY_AFTER_TAKEOVER_SECONDS = 10.0
_FILES_BEFORE_PATIENCE_ENDS = 2_000
COMPACT_SETTLED_SECONDS = 3600.0
SWEEP_EVERY_SECONDS = 300.0
LOOK_FIRST = 3  # times `quiet_seconds`: a minute from a commit to the first look for others',
LOOK_MOST = 180  # and up to an hour between two looks at a table that does not change,
LOOK_MOST_EXPIRING = 15  # or 5 minutes if others may move its log start, or let us move it
SETTLE_EVERY_SECONDS = 60.0
FILL_EVERY_SECONDS = 10.0  # between looks for the schemas that rows of a table wait for
UPKEEP_RETRY_SECONDS = 30.0
UPKEEP_RETRY_MAX_SECONDS = 600.0  # between attempts after repeated failures
RETENTION_EVERY_SECONDS = 60.0  # Kafka's log.retention.check.interval.ms is 5 minutes
TEMPORARY_KEPT_SECONDS = 3600.0  # longer than any put takes

_ALL: Final = Duties()
_log = structlog.get_logger("sparklog.janitor")
_FOLDERS: Final = (
    *("heartbeats", "meta", "schemas", "security"),
    *(manifest.FOLDER, "topics", "wal"),
)
"""The folders with frequent puts. Other folders of a root may belong to other programs."""


@dataclass(slots=True)
class _TopicMaintenance:
    """State of one topic's maintenance, and when each task is due again (monotonic seconds)."""

    table: TopicTable
    backoff: RetrySchedule
    due: dict[str, float] = field(default_factory=dict)
    looks: LookSchedule = field(default_factory=LookSchedule)
    """Looks for commits of others."""
    looked_version: int = -1
    """The version of the table that the last look found."""
    swept: LookSchedule = field(default_factory=LookSchedule)
    """Searches for orphans, which list all files of the table."""
    swept_version: int = -1
    merged: TableSnapshot | None = None
    """The last snapshot that was fully searched for files to merge or sort."""
    seen_keys_version: int = -1
    in_order: set[str] = field(default_factory=set)
    """Files of other engines that were checked and need no sorting."""
    disordered: file_compaction.FileGroup | None = None
    """Files of another engine that need it."""
    failure_log: FailureLog = field(default_factory=FailureLog)
    filled_version: int = -1
    """The last version of the table in which no row waited for a schema."""
    commits: int = 0
    """Our commits since the last visit to the topic."""
    deletions_refused: bool = False
    """True if the last visit found the table append-only, and this has been logged."""
    compacting: Future[None] | None = None
    """The removal of superseded records, or a sort, if it runs alongside the other tasks."""


class Janitor:
    """Runs the maintenance that is due. One caller at a time."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        settings: JanitorSettings,
        *,
        clock: Clock,
        open_table: OpenTable,
        unfinished: UnfinishedChanges,
        workers: Executor | None = None,
        counts: UpkeepCounts | None = None,
        duties: Duties = _ALL,
        quiet_seconds: float = 0.0,
        removed_files: RemovedFileRetention | None = None,
        is_short_of_space: Callable[[], bool] = lambda: False,
    ) -> None:
        """Creates a janitor that has visited no table yet.

        Args:
            store: the root's store.
            led_partitions: the topics of this broker.
            settings: its settings.
            clock: its clock.
            open_table: opens the table of a deleted topic.
            unfinished: completes changes of topics.
            workers: remove superseded records; None: the caller of `tick` does.
            counts: what the janitor has done; None: its own.
            duties: what this broker maintains.
            quiet_seconds: the pause between two visits to a table to which this broker has
                committed nothing, where requests cost money; otherwise 0.
            removed_files: how long they stay in this broker's tables.
            is_short_of_space: while it returns true, they stay for their grace period only.
        """
        self._store = store
        self._meta = MetadataStore(store, clock=clock, notes_topics=True)
        self._led_partitions = led_partitions
        self._settings = settings
        self._clock = clock
        self._open_table = open_table
        self._unfinished = unfinished
        self._workers = workers
        self._counts = counts or UpkeepCounts()
        self._duties = duties
        self._quiet_seconds = quiet_seconds
        self._removed_files = removed_files
        self._share_due = -math.inf
        self._is_short_of_space = is_short_of_space
        self._topics: dict[str, _TopicMaintenance] = {}
        self._rotation: deque[str] = deque()
        """Ids of all topics, least recently visited first."""
        self._ready: dict[str, None] = {}
        """Ids of the topics to visit next, in order."""
        self._topics_version = -1
        """`LedPartitions.topics_version` as of `_rotation`."""
        self._failure: BaseException | None = None
        self._cleared: set[str] = set()
        """Folders of deleted topics whose tables are empty."""
        self._emptied: set[str] = set()
        """Names of deleted topics of which only the Delta log is left."""
        self._known: set[str] = set()
        """Names of topics that have existed since the start, or that a sweep has picked up."""
        self._is_busy = False
        self._measured_at, self._measured_bytes = clock.monotonic(), 0
        self._staging_due = self._first_sweep(manifest.FOLDER)
        outcomes = StagedOutcomes(
            store, led_partitions, self._meta, clock=clock, open_table=open_table
        )
        self._staging = StagingSweep(
            store,
            topics=lambda: manifest.destinations(self._meta.refresh().topics),
            is_published=outcomes.is_published,
            abandoned_seconds=settings.staging_abandoned_seconds,
            clock=clock,
            sweeps_receipts=duties.is_controller,
        )

    def tick(self, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Maintains the topics whose turn it is, for a limited time."""
        if self._failure is not None:
            raise self._failure
        self._measure_rate()
        self._share_removed_files()
        self._try_settle_doubts()
        self._choose_topics()
        deadline = self._clock.monotonic() + UPKEEP_SECONDS

        def is_over() -> bool:
            return should_stop() or self._clock.monotonic() >= deadline

        while self._ready:
            topic_id = next(iter(self._ready))
            del self._ready[topic_id]
            topic = self._led_partitions.by_id(topic_id)
            if topic is not None:
                self._look_at(topic, is_over, should_stop)
            if is_over():
                break
        if self._clock.monotonic() >= self._staging_due and not should_stop():
            self._staging_due = self._clock.monotonic() + SWEEP_EVERY_SECONDS
            self._sweep_staging(should_stop)
            self._sweep_deleted(should_stop)
            if self._duties.is_controller():
                self._sweep_temporaries()

    def _choose_topics(self) -> None:
        """Adds the topics to visit in this tick to those left over from the last one."""
        version = self._led_partitions.topics_version
        if version != self._topics_version:
            self._topics_version = version
            topics = {topic.topic_id: topic for topic in self._led_partitions.topics()}
            for gone in self._topics.keys() - topics.keys():
                del self._topics[gone]
            known = set(self._rotation)
            new = [topic_id for topic_id in topics if topic_id not in known]
            self._rotation = deque([*new, *(each for each in self._rotation if each in topics)])
            present = {topic.name for topic in topics.values()}
            self._cleared -= present
            self._emptied -= present
        enough = max(self._settings.compact_files // 4, 1)
        for topic_id, count in self._led_partitions.backlog.take_commits().items():
            state = self._topics.get(topic_id)
            if state is not None:
                state.commits += count
                if state.commits >= enough:
                    self._ready[topic_id] = None
        share = _UPKEEP_ROUND_SECONDS / self._settings.interval_seconds
        for _ in range(max(UPKEEP_TOPICS, math.ceil(len(self._rotation) / share))):
            if not self._rotation or len(self._ready) >= len(self._rotation):
                break
            self._rotation.rotate(-1)
            self._ready[self._rotation[-1]] = None
        if len(self._rotation) <= UPKEEP_TOPICS:
            self._ready |= dict.fromkeys(self._rotation)

    def _look_at(
        self, topic: Topic, is_over: Callable[[], bool], should_stop: Callable[[], bool]
    ) -> None:
        state = self._state(topic)
        if state.compacting is not None:
            if not state.compacting.done():
                return  # it works on the same files
            state.compacting = None
        now = self._clock.monotonic()
        if not state.commits and now < state.due.get("visit", 0.0):
            return
        state.due["visit"] = now + self._quiet_seconds
        state.commits = 0
        if not self._duties.owns(topic):
            if not topic.partitions:
                state.table.forget_read_backs()  # no entry of ours waits for them
            self._try(topic, state, "starts", self._follow_starts, is_over)
            return
        if topic.is_compacted and not state.backoff.is_waiting("keys"):
            if self._workers is not None:
                state.compacting = self._workers.submit(
                    self._compact_beside, topic, state, should_stop
                )
                return
            self._try(topic, state, "keys", self._compact_keys, should_stop)
        self._maintain(topic, state, is_over)
        if state.disordered is None or state.backoff.is_waiting("sort"):
            return
        if self._workers is not None:
            state.compacting = self._workers.submit(self._sort_beside, topic, state, should_stop)
        else:
            self._try(topic, state, "sort", self._sort_files, should_stop)

    def _maintain(
        self, topic: Topic, state: _TopicMaintenance, should_stop: Callable[[], bool]
    ) -> None:
        """Runs a topic's tasks, those that free space first."""
        self._try(topic, state, "sweep", self._sweep, should_stop)
        self._try(topic, state, "retention", self._retain, should_stop)
        self._try(topic, state, "topic", self._checkpoint_and_merge, should_stop)
        self._try(topic, state, "columns", self._find_columns, should_stop)
        self._try(topic, state, "schemas", self._fill_waiting, should_stop)
        self._note_refusal(topic, state)

    def _note_refusal(self, topic: Topic, state: _TopicMaintenance) -> None:
        """Logs once when deletions begin to be refused, and once when they no longer are."""
        reason = topic.deletion_refusal
        if reason is not None and not state.deletions_refused:
            _log.warning("deletions are refused", topic=topic.name, reason=reason)
        elif reason is None and state.deletions_refused:
            _log.info("deletions are accepted again", topic=topic.name)
        state.deletions_refused = reason is not None

    def _look(self, state: _TopicMaintenance) -> TableSnapshot:
        """Returns the table, after a look for commits of others, if one is due.

        A view that has advanced was the newest at that moment, by a commit or a read: that counts
        as a look. Raises what `TopicTable.refresh` raises.
        """
        table, now, quiet_seconds = state.table, self._clock.monotonic(), self._quiet_seconds
        if not quiet_seconds:
            return table.refresh()
        first_seconds = quiet_seconds * LOOK_FIRST
        snapshot, known = table.snapshot, state.looked_version
        if snapshot.version == known:
            if not state.looks.is_due(now, first_seconds=first_seconds):
                return snapshot
            snapshot = table.refresh()
        may_wait = not (snapshot.append_only or retention.removes_records(snapshot.config))
        state.looks.looked(
            now,
            found=snapshot.version != known,
            first_seconds=first_seconds,
            most_seconds=quiet_seconds * (LOOK_MOST if may_wait else LOOK_MOST_EXPIRING),
        )
        state.looked_version = snapshot.version
        return snapshot

    def _compact_beside(
        self, topic: Topic, state: _TopicMaintenance, should_stop: Callable[[], bool]
    ) -> None:
        try:
            self._try(topic, state, "keys", self._compact_keys, should_stop)
            self._maintain(topic, state, should_stop)
            if state.disordered is not None:
                self._try(topic, state, "sort", self._sort_files, should_stop)
        except SyncFailed as error:
            self._failure = error

    def _sort_beside(
        self, topic: Topic, state: _TopicMaintenance, should_stop: Callable[[], bool]
    ) -> None:
        try:
            self._try(topic, state, "sort", self._sort_files, should_stop)
        except SyncFailed as error:
            self._failure = error

    def wait(self) -> None:
        """Waits for the work that runs alongside the ticks."""
        for state in list(self._topics.values()):
            if state.compacting is not None:
                state.compacting.result()

    def _measure_rate(self) -> None:
        """Decides from the write rate since the last tick whether the broker is busy.

        It also counts as busy right after it has received partitions, because clients then send the
        records that they could not send during the move.
        """
        now, written = self._clock.monotonic(), self._led_partitions.backlog.written_bytes
        seconds = max(now - self._measured_at, 1e-3)
        rate = (written - self._measured_bytes) / seconds
        is_new = now - self._led_partitions.taken_seconds < BUSY_AFTER_TAKEOVER_SECONDS
        self._is_busy = is_new or rate > _BUSY_BYTES_PER_SECOND
        self._measured_at, self._measured_bytes = now, written

    def _log_versions(self) -> int:
        """Returns how many versions each table may retain in its Delta log."""
        share = _TABLE_LOGS_VERSIONS // max(len(self._rotation), 1)
        least = _TABLE_LOG_LEAST_VERSIONS
        return least if self._is_short_of_space() else max(share, least)

    def _share_removed_files(self) -> None:
        now = self._clock.monotonic()
        if self._removed_files is not None and now >= self._share_due:
            self._share_due = now + SWEEP_EVERY_SECONDS
            counts = (topic.table.removed_count for topic in self._led_partitions.topics())
            self._removed_files.files = removed_files.fair_number(counts)

    def _try_settle_doubts(self) -> None:
        try:
            self._unfinished.settle_doubts()
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("cannot find out which topics exist", reason=str(error) or repr(error))

    def _state(self, topic: Topic) -> _TopicMaintenance:
        found = self._topics.get(topic.topic_id)
        if found is None:
            backoff = RetrySchedule(
                self._clock,
                first_seconds=UPKEEP_RETRY_SECONDS,
                most_seconds=UPKEEP_RETRY_MAX_SECONDS,
            )
            table = topic.table.through(self._store)
            found = self._topics[topic.topic_id] = _TopicMaintenance(table, backoff)
            found.due["sweep"] = self._first_sweep(f"topics/{topic.name}")
        return found

    def _first_sweep(self, folder: str) -> float:
        """Returns when to sweep the folder first, in monotonic seconds: within one interval.

        Spread over the interval, so that not all sweeps run right after a start. Not all at its
        end, because embedded brokers may never live that long, and would leave their files behind.
        """
        share = crc32c.crc32c(f"{folder} {self._clock.now_us()}".encode()) / 2**32
        return self._clock.monotonic() + share * SWEEP_EVERY_SECONDS

    def _try(
        self,
        topic: Topic,
        state: _TopicMaintenance,
        task: str,
        run: Callable[[_TopicMaintenance, Callable[[], bool]], None],
        should_stop: Callable[[], bool],
    ) -> None:
        """Runs a task, unless it has failed recently. Logs each reason once."""
        if state.backoff.is_waiting(task):
            return
        try:
            run(state, should_stop)
        except SyncFailed:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            is_known = state.failure_log.has(reason)  # several tasks may fail for the same one
            if state.failure_log.is_new(task, reason) and not is_known:
                _log.warning("maintenance failed", topic=topic.name, reason=reason)
            state.backoff.failed(task)
        else:
            state.backoff.succeeded(task)
            if state.failure_log.recovered(task) and not state.failure_log:
                _log.info("maintenance works again", topic=topic.name)

    def _update_starts(self, table: TopicTable) -> None:
        """Advances the log starts to those of the table, whichever process moved them."""
        snapshot = table.snapshot
        topic = (
            self._led_partitions.by_id(snapshot.topic_id) if snapshot.topic_id is not None else None
        )
        if topic is not None and any(
            start > topic.partitions[number].start
            for number, start in enumerate(snapshot.starts)
            if number in topic.partitions
        ):
            table.sync()
            self._led_partitions.advance_start(topic, snapshot.starts)

    def _follow_starts(self, state: _TopicMaintenance, _should_stop: Callable[[], bool]) -> None:
        """Follows the log starts that the owner of a table has set.

        Makes the owner's commits durable, so that a takeover need not sync a whole day's commits.
        """
        self._look(state)
        state.table.sync()
        self._update_starts(state.table)

    def _compact_keys(self, state: _TopicMaintenance, should_stop: Callable[[], bool]) -> None:
        table, snapshot = state.table, self._look(state)
        now = self._clock.monotonic()
        is_settling = now >= state.due.get("settle keys", 0.0)
        if (snapshot.version == state.seen_keys_version and not is_settling) or not self._has_time(
            snapshot
        ):
            return
        state.seen_keys_version = snapshot.version
        passes = key_compaction.choose(
            table,
            compact_files=self._settings.compact_files,
            target_bytes=self._settings.compact_target_bytes,
            settled_before_us=self._settled_before_us(),
        )
        for each in passes:
            if should_stop():
                return
            key_compaction.compact(
                table, each, should_stop=should_stop, on_commit=self._counts.add_merged
            )
        if is_settling:
            state.due["settle keys"] = now + SETTLE_EVERY_SECONDS

    def _sweep(self, state: _TopicMaintenance, _should_stop: Callable[[], bool]) -> None:
        table, now = state.table, self._clock.monotonic()
        is_due, is_short = now >= state.due.get("sweep", 0.0), self._is_short_of_space()
        is_full = is_short and bool(table.expired(is_retained=False))
        if not (is_due or is_full) or self._look(state).topic_id is None:
            return
        if is_due:
            state.due["sweep"] = now + SWEEP_EVERY_SECONDS
        if not self._quiet_seconds or table.may_be_swept(is_retained=not is_short):
            sweeping.sweep_replaced(table, is_retained=not is_short)
        if is_due:
            self._sweep_orphans(state)

    def _sweep_orphans(self, state: _TopicMaintenance) -> None:
        """Removes orphans, if a search is due.

        Where a listing costs a request, the searches become rarer while the table does not change.
        """
        table, now = state.table, self._clock.monotonic()
        grace_seconds, first_seconds = self._settings.orphan_grace_seconds, 0.0
        if self._quiet_seconds:  # none is removed before that age anyway
            first_seconds = grace_seconds
        if table.snapshot.version != state.swept_version:
            state.swept.changed()
        if not state.swept.is_due(now, first_seconds=first_seconds):
            return
        count = sweeping.sweep_orphans(table, grace_seconds=grace_seconds)
        version = table.snapshot.version
        state.swept.looked(
            now,
            found=count > 0 or version != state.swept_version,
            first_seconds=first_seconds,
            most_seconds=max(first_seconds, self._settings.removed_file_kept_seconds),
        )
        state.swept_version = version

    def _find_columns(self, state: _TopicMaintenance, _should_stop: Callable[[], bool]) -> None:
        table, now = state.table, self._clock.monotonic()
        if not first_columns.are_wanted(table.snapshot) or now < state.due.get("columns", 0.0):
            return
        schema = first_columns.find(table)
        if schema:
            self._unfinished.add_columns(table.topic, schema)
        state.due["columns"] = now + first_columns.ENOUGH_SECONDS

    def _fill_waiting(self, state: _TopicMaintenance, should_stop: Callable[[], bool]) -> None:
        """Writes files again whose rows waited for a schema that is known now."""
        table, now = state.table, self._clock.monotonic()
        snapshot = table.snapshot
        if snapshot.version == state.filled_version or now < state.due.get("schemas", 0.0):
            return
        state.due["schemas"] = now + FILL_EVERY_SECONDS
        wanted = waiting_rows.schemas_of(snapshot)
        if not wanted:
            state.filled_version = snapshot.version
            return
        ready = self._unfinished.ready_schemas(snapshot.topic_id or "", wanted)
        for together in waiting_rows.fillable(table, ready):
            if should_stop():
                return
            self._counts.add_merged(file_compaction.compact(table, together))

    def _retain(self, state: _TopicMaintenance, _should_stop: Callable[[], bool]) -> None:
        table, now = state.table, self._clock.monotonic()
        if now < state.due.get("retention", 0.0) or self._look(state).topic_id is None:
            return
        state.due["retention"] = now + RETENTION_EVERY_SECONDS
        self._unfinished.settle_config(table.topic)
        retention.retain(table)
        retention.sweep_below(table)
        self._update_starts(table)

    def _checkpoint_and_merge(
        self, state: _TopicMaintenance, should_stop: Callable[[], bool]
    ) -> None:
        table, snapshot = state.table, self._look(state)
        topic_id = snapshot.topic_id
        if topic_id is None:
            return
        self._update_starts(table)
        sweeping.note_gaps(table)
        now = self._clock.monotonic()
        if sweeping.checkpoint_due(table, every=self._settings.table_checkpoint_every):
            try:
                table.checkpoint()
            except errors.StorageFull:
                state.due["sweep"] = state.due["retention"] = 0.0
                raise
            # Checks merged files first, while the Delta log still names the files they replaced.
            sweeping.sweep_replaced(table)
            sweeping.clean_log(
                table,
                most_versions=self._log_versions(),
                needed_seconds=self._settings.removed_file_grace_seconds,
            )
        # Merging comes last: a file that cannot be merged then affects only other merges.
        is_settling = now >= state.due.get("settle", 0.0)
        since = None if is_settling else state.merged
        if (since is None or since.version != snapshot.version) and self._has_time(snapshot):
            groups = file_compaction.choose(
                snapshot,
                since,
                compact_files=self._settings.compact_files,
                target_bytes=self._settings.compact_target_bytes,
                settled_before_us=self._settled_before_us() if is_settling else None,
                borders=key_compaction.borders(table, snapshot),
                span_us=retention.span_us(snapshot.config),
            )
            for together in file_compaction.together(groups):
                if should_stop():
                    self._ready[topic_id] = None  # the others come first
                    return
                self._counts.add_merged(file_compaction.compact(table, together))
            state.merged = snapshot
            # A group whose sort has failed is tried again: only changed partitions are searched.
            state.disordered = state.disordered or file_compaction.disordered(
                table.store,
                table.topic,
                snapshot,
                since,
                in_order=state.in_order,
                target_bytes=self._settings.compact_target_bytes,
            )
            if is_settling:
                state.due["settle"] = now + SETTLE_EVERY_SECONDS

    def _sort_files(self, state: _TopicMaintenance, should_stop: Callable[[], bool]) -> None:
        """Sorts files that another engine has left unsorted, once instead of in every read.

        A sort that is stopped starts over, so only the end of the broker may stop one.
        """
        table, found = state.table, state.disordered
        assert found is not None
        files: tuple[TableFile, ...] = ()
        borders = key_compaction.borders(table, table.snapshot)
        if found.partition < len(borders):  # otherwise the topic was deleted, or restored
            files = file_compaction.put_in_order(
                table,
                found,
                target_bytes=self._settings.compact_target_bytes,
                border=borders[found.partition],
                should_stop=should_stop,
            )
        state.disordered = state.merged = None  # there may be more
        self._counts.add_merged(files)
        if files:
            _log.info(
                "sorted the files of another engine",
                topic=table.topic,
                partition=found.partition,
                replaced=len(found.files),
                files=len(files),
            )

    def _has_time(self, snapshot: TableSnapshot) -> bool:
        """Returns whether merging may use the machine: not while many records are coming in.

        Producers notice a busy disk sooner than readers notice many files. With too many files,
        merging proceeds anyway.
        """
        files = sum(len(each) for each in snapshot.files)
        return not self._is_busy or files > _FILES_BEFORE_PATIENCE_ENDS

    def _settled_before_us(self) -> int:
        return self._clock.now_us() - round(COMPACT_SETTLED_SECONDS * 1e6)

    def _sweep_deleted(self, should_stop: Callable[[], bool]) -> None:
        try:
            found = set(self._store.folders("topics"))
            live = self._meta.refresh().topics.keys()  # other brokers lead some of them
            again = self._meta.take_noted()
            if again is None:  # any of them may have been created, and deleted again
                again = self._cleared | self._emptied
            self._cleared -= live | again
            self._emptied -= live | again
            self._known |= live
            deleted = (
                found - live - (self._emptied if self._duties.is_controller() else self._cleared)
            )
            # Right after a start, these are all topics that were ever deleted.
            self._known.update(sorted(deleted - self._known)[:_DELETED_TOPICS_LEARNT])
            deleted &= self._known
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("cannot list deleted topics", reason=str(error) or repr(error))
            return
        for name in sorted(deleted):
            if should_stop():
                return
            try:
                self._sweep_topic(name)
            except SyncFailed:
                raise
            except Exception as error:
                _log.warning(
                    "cannot sweep the files of a deleted topic",
                    topic=name,
                    reason=str(error) or repr(error),
                )

    def _sweep_topic(self, name: str) -> None:
        """Empties the table of a deleted topic; while its creator is alive, only the creator does.

        The controller removes the files.
        """
        if name not in self._cleared:
            if sweeping.is_emptied(self._store, name):
                self._cleared.add(name)
                self._emptied.add(name)
                return
            self._unfinished.finish_deletion(name)
        table = self._open_table(name).through(self._store)
        if table.refresh().topic_id is not None:
            return  # its creator may still add it to the metadata
        self._cleared.add(name)
        if not self._duties.is_controller():
            return
        grace_seconds = self._settings.orphan_grace_seconds
        sweeping.sweep_replaced(table, is_retained=False)
        sweeping.sweep_orphans(table, grace_seconds=grace_seconds)
        has_rested = sweeping.has_rested(table, grace_seconds=grace_seconds)
        if has_rested and not sweeping.has_files(table):
            sweeping.note_emptied(table)
            self._emptied.add(name)

    def _sweep_staging(self, should_stop: Callable[[], bool]) -> None:
        try:
            self._staging.run(should_stop)
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("cannot sweep staged files", reason=str(error) or repr(error))

    def _sweep_temporaries(self) -> None:
        older_than_us = self._clock.now_us() - round(TEMPORARY_KEPT_SECONDS * 1e6)
        try:
            for folder in _FOLDERS:
                self._store.sweep_temporaries(folder, older_than_us)
            sweep_probes(self._store, older_than_us)
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning(
                "cannot sweep the files of crashed puts and starts",
                reason=str(error) or repr(error),
            )
