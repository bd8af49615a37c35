"""The janitor: keeps what has been published cheap to read and small, one little piece a tick.

Each topic gets, when due: a checkpoint of its Delta log, the log's cleaning, the sweeping of files
that nobody needs, and one merge of small files; before that, the files go that it no longer keeps,
and where it is compacted by keys, the records that later ones supersede. A topic whose upkeep fails
is named in the log and left alone for a while; the others go on. Besides, staged files of Spark
batches go once all their records are published, and abandoned ones after a day; the files of
deleted topics, after the graces that all files have; and what crashed puts have left, once it is
old.

A broker that was replaced may not know it yet, nor what its successor has made since. So nothing
goes because this broker does not know it: only the metadata can say that a topic is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from sparklog import limits
from sparklog.broker.partitions import Ledger, Topic
from sparklog.clock import Clock
from sparklog.settings import JanitorSettings
from sparklog.storage import compaction, keycompaction, retention, staging, upkeep
from sparklog.storage.manifest import Manifest, Section
from sparklog.storage.meta import MetaStore, TopicMeta
from sparklog.storage.objects import Store, SyncFailed
from sparklog.storage.snapshot import BatchId, BatchKind, TableSnapshot
from sparklog.storage.table import Table

_log = structlog.get_logger("sparklog.janitor")
_FOLDERS: Final = ("heartbeats", "meta", "staging", "topics", "wal")
"""Where objects are put over and over. A root may hold what is not ours, and not to be read."""


@dataclass(slots=True)
class _Chores:
    """What is known of one topic's upkeep, and when each chore is due again (monotonic seconds)."""

    table: Table
    due: dict[str, float] = field(default_factory=dict)
    seen_version: int = -1
    seen_keys_version: int = -1
    in_order: set[str] = field(default_factory=set)
    """Files of other engines that were looked over and need no sorting."""


class Janitor:
    """One caller at a time. `tick` does what is due and returns."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        settings: JanitorSettings,
        *,
        clock: Clock,
        bury: Callable[[str], None],
    ) -> None:
        """`bury` ends what a table says of a topic that there is not."""
        self._store = store
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._bury = bury
        self._topics: dict[str, _Chores] = {}
        self._buried: set[str] = set()
        """Names of deleted topics that have left nothing but their log."""
        self._is_busy = False
        self._watched_at, self._watched_bytes = clock.monotonic(), 0
        self._staging_due = clock.monotonic() + limits.SWEEP_EVERY_SECONDS

    def tick(self, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Everything that is due, topic by topic."""
        self._watch()
        topics = self._ledger.topics()
        for gone in self._topics.keys() - {topic.topic_id for topic in topics}:
            del self._topics[gone]
        self._buried -= {topic.name for topic in topics}
        for topic in topics:
            if should_stop():
                return
            chores = self._chores(topic)
            if topic.is_compacted:
                self._try(topic, chores, "keys", self._compact_keys, should_stop)
            self._try(topic, chores, "topic", self._tend, should_stop)
        if self._clock.monotonic() >= self._staging_due and not should_stop():
            self._staging_due = self._clock.monotonic() + limits.SWEEP_EVERY_SECONDS
            self._sweep_staging()
            self._sweep_deleted(should_stop)
            self._sweep_temporaries()

    def _watch(self) -> None:
        """Notes whether we are busy: by the rate since the last tick."""
        now, written = self._clock.monotonic(), self._ledger.written_bytes
        seconds = max(now - self._watched_at, 1e-3)
        rate = (written - self._watched_bytes) / seconds
        self._is_busy = rate > limits.BUSY_BYTES_PER_SECOND
        self._watched_at, self._watched_bytes = now, written

    def _chores(self, topic: Topic) -> _Chores:
        found = self._topics.get(topic.topic_id)
        if found is None:
            found = self._topics[topic.topic_id] = _Chores(self._table(topic.name))
            # What a predecessor left is as old as it is: no topic's sweep is due at once.
            found.due["sweep"] = self._clock.monotonic() + limits.SWEEP_EVERY_SECONDS
        return found

    def _table(self, name: str) -> Table:
        return Table(
            self._store,
            name,
            clock=self._clock,
            removed_file_grace_seconds=self._settings.removed_file_grace_seconds,
            orphan_grace_seconds=self._settings.orphan_grace_seconds,
        )

    def _try(
        self,
        topic: Topic,
        chores: _Chores,
        what: str,
        tend: Callable[[_Chores, Callable[[], bool]], None],
        should_stop: Callable[[], bool],
    ) -> None:
        """Does it, unless it has failed a short while ago."""
        if self._clock.monotonic() < chores.due.get(what, 0.0):
            return
        try:
            tend(chores, should_stop)
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("upkeep failed", topic=topic.name, reason=str(error) or repr(error))
            chores.due[what] = self._clock.monotonic() + limits.UPKEEP_RETRY_SECONDS

    def _note_starts(self, table: Table) -> None:
        """Lets the ledger know where the logs start, whoever has moved that."""
        snapshot = table.snapshot
        topic = self._ledger.by_id(snapshot.topic_id) if snapshot.topic_id is not None else None
        if topic is not None and any(
            start > each.start
            for each, start in zip(topic.partitions, snapshot.starts, strict=False)
        ):
            table.settle()
            self._ledger.started(topic, snapshot.starts)

    def _compact_keys(self, chores: _Chores, should_stop: Callable[[], bool]) -> None:
        table = chores.table
        snapshot = table.refresh()
        now = self._clock.monotonic()
        is_settling = now >= chores.due.get("settle keys", 0.0)
        if (snapshot.version == chores.seen_keys_version and not is_settling) or not self._has_time(
            snapshot
        ):
            return
        chores.seen_keys_version = snapshot.version
        passes = keycompaction.choose(
            table,
            compact_files=self._settings.compact_files,
            target_bytes=self._settings.compact_target_bytes,
            settled_before_us=self._settled_before_us(),
        )
        for each in passes:
            if should_stop():
                return
            keycompaction.compact(table, each, should_stop=should_stop)
        if is_settling:
            chores.due["settle keys"] = now + limits.SETTLE_EVERY_SECONDS

    def _tend(self, chores: _Chores, should_stop: Callable[[], bool]) -> None:
        table = chores.table
        snapshot = table.refresh()
        if snapshot.topic_id is None:
            return
        self._note_starts(table)
        now = self._clock.monotonic()
        if upkeep.checkpoint_due(table, every=self._settings.table_checkpoint_every):
            table.checkpoint()
            upkeep.clean_log(table)
        if now >= chores.due.get("sweep", 0.0):
            chores.due["sweep"] = now + limits.SWEEP_EVERY_SECONDS
            upkeep.sweep_replaced(table)
            upkeep.sweep_orphans(table)
        if now >= chores.due.get("retention", 0.0):
            chores.due["retention"] = now + limits.RETENTION_EVERY_SECONDS
            retention.retain(table)
            retention.sweep_below(table)
            self._note_starts(table)
            snapshot = table.snapshot
        # Last: a file that cannot be merged is in the way of other merges only.
        is_settling = now >= chores.due.get("settle", 0.0)
        if (snapshot.version != chores.seen_version or is_settling) and self._has_time(snapshot):
            chores.seen_version = snapshot.version
            groups = compaction.choose(
                snapshot,
                compact_files=self._settings.compact_files,
                target_bytes=self._settings.compact_target_bytes,
                settled_before_us=self._settled_before_us() if is_settling else None,
                borders=keycompaction.borders(table),
                span_us=retention.span_us(snapshot.config),
            )
            for group in groups:
                if should_stop():
                    return
                compaction.compact(table, group)
            self._put_in_order(chores, should_stop)
            if is_settling:
                chores.due["settle"] = now + limits.SETTLE_EVERY_SECONDS

    def _put_in_order(self, chores: _Chores, should_stop: Callable[[], bool]) -> None:
        """Sorts what another engine has left in no order, once, instead of in every read."""
        table = chores.table
        found = compaction.disordered(
            table.store,
            table.topic,
            table.snapshot,
            in_order=chores.in_order,
            target_bytes=self._settings.compact_target_bytes,
        )
        if found is None or should_stop():
            return
        files = compaction.put_in_order(
            table,
            found,
            target_bytes=self._settings.compact_target_bytes,
            border=keycompaction.borders(table)[found.partition],
            should_stop=should_stop,
        )
        if files:
            _log.info(
                "another engine's files put in order",
                topic=table.topic,
                partition=found.partition,
                replaced=len(found.files),
                files=len(files),
            )

    def _has_time(self, snapshot: TableSnapshot) -> bool:
        """Whether merging may take its share of the machine: not while very much is coming in.

        Producers feel a busy disk sooner than readers feel many files; but there is a bound.
        """
        files = sum(len(each) for each in snapshot.files)
        return not self._is_busy or files > limits.FILES_BEFORE_PATIENCE_ENDS

    def _settled_before_us(self) -> int:
        return self._clock.now_us() - round(limits.COMPACT_SETTLED_SECONDS * 1e6)

    def _sweep_deleted(self, should_stop: Callable[[], bool]) -> None:
        living = {topic.name for topic in self._ledger.topics()}
        try:
            graves = set(self._store.folders("topics")) - living - self._buried
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("looking for deleted topics failed", reason=str(error) or repr(error))
            return
        for name in sorted(graves):
            if should_stop():
                return
            try:
                self._sweep_grave(name)
            except SyncFailed:
                raise
            except Exception as error:
                _log.warning(
                    "sweeping of a deleted topic failed",
                    topic=name,
                    reason=str(error) or repr(error),
                )

    def _sweep_grave(self, name: str) -> None:
        self._bury(name)
        table = self._table(name)
        upkeep.sweep_replaced(table)
        upkeep.sweep_orphans(table)
        if not upkeep.has_files(table):
            self._buried.add(name)

    def _sweep_staging(self) -> None:
        try:
            staging.sweep(
                self._store,
                is_published=self._is_published,
                abandoned_seconds=self._settings.staging_abandoned_seconds,
                clock=self._clock,
            )
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning("sweeping of staged files failed", reason=str(error) or repr(error))

    def _is_published(self, batch: Manifest, decided_us: int) -> bool:
        """Whether the batch's records are in their tables; so too those whose place is gone.

        That is so where some topic has had the batch, or a later one, and no entry of the log waits
        for its table any more. Writes that are not numbered are forgotten in time, and by then
        nobody may commit them.
        """
        topics = MetaStore(self._store, clock=self._clock).reload().topics
        batch_id = BatchId(batch.query, batch.batch)
        alive = [topic for each in topics.values() if (topic := self._ours(each))]
        forgotten_us = self._clock.now_us() - round(limits.BATCH_MEMORY_SECONDS * 1e6)
        is_over = (
            any(topic.standing.is_past(batch_id) for topic in alive)
            or (batch.kind is not BatchKind.NUMBERED and decided_us < forgotten_us)
            or any(self._has(topics, each, batch_id) for each in batch.sections)
            or all(self._is_gone(topics, each) for each in batch.sections)
        )
        # Last: what is appended after this look is no batch that is over.
        return is_over and not self._ledger.is_staged(batch_id)

    def _has(self, topics: Mapping[str, TopicMeta], section: Section, batch_id: BatchId) -> bool:
        """Whether the section's partition remembers the batch; then all others have it, too."""
        known = topics.get(section.topic)
        topic = self._ours(known) if known is not None else None
        if topic is None or section.partition >= len(topic.partitions):
            return False
        with self._ledger.lock:
            return topic.partitions[section.partition].batches.find(batch_id) is not None

    def _is_gone(self, topics: Mapping[str, TopicMeta], section: Section) -> bool:
        """Whether the section's partition does not exist; another broker may have made it."""
        known = topics.get(section.topic)
        return known is None or section.partition >= len(known.partitions)

    def _ours(self, known: TopicMeta) -> Topic | None:
        return self._ledger.by_id(known.topic_id)

    def _sweep_temporaries(self) -> None:
        older_than_us = self._clock.now_us() - round(limits.TEMPORARY_KEPT_SECONDS * 1e6)
        try:
            for folder in _FOLDERS:
                self._store.sweep_temporaries(folder, older_than_us)
        except SyncFailed:
            raise
        except Exception as error:
            _log.warning(
                "sweeping of what crashed puts left failed", reason=str(error) or repr(error)
            )
