"""A topic's Delta table: its state at a version, and commits of further versions.

Rules:

- The log is replayed here from commits and checkpoints, with the same code for every store, in
  microseconds per commit. Other engines' commits count like ours. An unsupported feature is an
  error that names it (`ForeignTable`), and the last valid snapshot remains.
- Version v is put only if absent, by a writer that has seen v-1, and all assumptions of a change
  are checked against the snapshot of exactly v-1. So two contradictory changes are never both
  committed, whichever writers make them.
- Only other engines set `delta.appendOnly`. While it is true, a change that removes rows is
  rejected (`PolicyViolation`) unless it ends the topic; all other changes are allowed.
- Old commits are removed, oldest first. After that, a put of an old version v succeeds although v
  existed before, so a commit counts only if its predecessor still exists after the put.
- A file is added only while it is younger than half the orphan grace period, or if it was
  *prepared*: its name contains the number of a preparation that is open in the version right before
  the commit. `maintenance.sweeping` explains why.
- Other engines do not flush: delta-rs writes data files and commits that a power cut may leave
  empty. All state that our next step depends on is made durable first (`sync`), data files before
  the commit that names them, so that a commit never exists without its rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import Clock
from sparklog.storage.objects import PutUnresolved, Store, claim, in_parallel
from sparklog.storage.snapshot import BatchId, BatchKind, TableSnapshot
from sparklog.storage.table import delta_log, removed_files
from sparklog.storage.table.changes import Decide, TableChange
from sparklog.storage.table.delta_log import Actions, Txn
from sparklog.storage.table.durability import ReadBacks, SyncState, Unsynced
from sparklog.storage.table.encoding import PreparedCommit, check, encode
from sparklog.storage.table.log_reader import LogReader
from sparklog.storage.table.names import (
    begun_app_id,
    is_our_file,
    key_app_id,
    preparation_of,
    query_app_id,
    table_folder,
)
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.replay import NO_TABLE, Replay

TABLE_COMMIT_ATTEMPTS = 100
TOMBSTONE_SECONDS = 3600.0  # beyond the grace period of removed files
_SURPLUS: Final = 2
"""Up to this many times the permitted number of removed files are remembered until a sweep."""


class TopicTable:
    """The table of a topic. Thread-safe: a broker has one for each topic.

    Each method reads and changes the state under one lock, and the state only advances. So two
    calls may see different versions: a caller that needs one version for several queries holds on
    to a `snapshot`, or queries in `decide`, which runs under the lock on exactly the version that
    it is given. `snapshot` is replaced as a whole once it has been checked, and needs no lock: it
    remains the last valid one if another thread finds that the log cannot be read.

    The lock is held during the requests that find or put the next version: another thread that
    wants to advance the table would have to read that version anyway. It is not held while files
    are checked, commits are read back, or a checkpoint is encoded and put. `decide` acquires no
    lock whose holder may be waiting for a table. A broker's acks do not wait for any table.

    `only_reads`: do not remember removed files. Readers do not need them, and they are most of an
    old table's checkpoint. `orphan_grace_seconds` applies to writers; a sweeper may wait longer.
    `retention` applies to removed files, beyond `removed_file_grace_seconds`.
    """

    def __init__(
        self,
        store: Store,
        topic: str,
        *,
        clock: Clock,
        only_reads: bool = False,
        orphan_grace_seconds: float = limits.ORPHAN_GRACE_SECONDS,
        removed_file_grace_seconds: float = limits.REMOVED_FILE_GRACE_SECONDS,
        retention: RemovedFileRetention = removed_files.NO_RETENTION,
    ) -> None:
        self.store = store
        self.topic = topic
        self.clock = clock
        self._only_reads = only_reads
        self.orphan_grace_seconds = orphan_grace_seconds
        self.removed_file_grace_seconds = removed_file_grace_seconds
        self._retention = retention
        self.folder = table_folder(topic)
        self.log_reader = LogReader(store, topic, with_removes=not only_reads)
        self.log_folder = self.log_reader.folder
        self._replay = Replay(remembers_removed=not only_reads)
        self._syncs_files = not only_reads and store.is_local
        """True if other engines may have added files that are not durable."""
        self._sync = SyncState()
        self._read_backs = ReadBacks(may_differ=not store.is_local)
        self._looked_at: dict[str, float | None] = {}
        """The monotonic time of the first check of each active file; None: no further checks."""
        self._snapshot = NO_TABLE
        self._checkpoint_version = -1
        self._refresh_began = -float("inf")
        """When the last `refresh` began, in monotonic seconds."""
        self._lock = threading.RLock()

    def through(self, store: Store) -> TopicTable:
        """Returns this table with another view of its store, so that its requests count there.

        Both have the same state: each sees what the other has read and committed.
        """
        return self if store is self.store else _View(self, store)

    @property
    def snapshot(self) -> TableSnapshot:
        """The table as last read, without access to the store."""
        return self._snapshot

    @property
    def checkpoint_version(self) -> int:
        """The newest checkpoint that was loaded or written; -1 if there was none."""
        return self._checkpoint_version

    @property
    def look_age_seconds(self) -> float:
        """The time since the last `refresh` began, whether or not it succeeded."""
        return self.clock.monotonic() - self._refresh_began

    def bounds(self, topic_id: str, partitions: int) -> TableSnapshot | None:
        """Returns starts and ends of the partitions, without files, even for an unsupported table.

        Each `txn` is valid whatever another engine did to the schema or protocol; None if one is
        missing.
        """
        with self._lock:
            return self._replay.bounds(topic_id, range(partitions))

    def txn(self, app_id: str) -> Txn | None:
        """Returns the `txn` of `app_id` in the last read version."""
        return self._replay.txns.get(app_id)

    def unnoted_gaps(self) -> dict[str, int]:
        """Returns the `txn` to commit for rows that other engines have removed, by `app_id`."""
        with self._lock:
            return self._replay.unnoted_gaps()

    def batches(self, topic_id: str) -> list[tuple[BatchId, BatchKind, int]]:
        """Returns the newest batch of each Spark query, and all keys, in the last read version.

        Each comes with its kind and its publish time in µs, in the order of that time.
        """
        found = []
        with self._lock:
            for app_id, txn in self._replay.txns.items():
                for kind, prefix in (
                    (BatchKind.NUMBERED, query_app_id(topic_id, "")),
                    (BatchKind.NUMBERED_PART, begun_app_id(topic_id, "")),
                    (BatchKind.NAMED, key_app_id(topic_id, "")),
                ):
                    if app_id.startswith(prefix):
                        batch_id = BatchId(app_id.removeprefix(prefix), txn.version)
                        found.append((batch_id, kind, (txn.last_updated or 0) * 1_000))
        return sorted(found, key=lambda each: each[2])

    # -------------------------------------------------------------------------- reading

    def refresh(self) -> TableSnapshot:
        """Reads and returns the newest version.

        Raises `ForeignTable`; `CorruptObject` for an incomplete commit (`snapshot` is then the
        version before it) or if no checkpoint is complete; and `MissingObject` for a commit that
        later versions need.
        """
        with self._lock:
            self._refresh_began = self.clock.monotonic()
            try:
                self._advance()
            except errors.CorruptObject:
                self._observe()
                raise
            return self._observe()

    def sync(self) -> None:
        """Makes the state that was read durable, so that it survives a power cut.

        A commit is visible before it is durable, and its writer may die in between. Other engines
        flush neither their commits nor the data files that these add. So this must precede any
        irreversible step that depends on that state. Raises `SyncFailed`.
        """
        with self._lock:
            if not self._sync.is_synced:
                self._sync_files()

    def _sync_files(self) -> None:
        unsynced = self.unsynced()
        self.store.sync_files(unsynced.files)
        self.store.sync_files(unsynced.log)
        self.note_synced(unsynced.version)

    def unsynced(self) -> Unsynced:
        """Returns the paths that `sync` makes durable: first the files, then the log."""
        with self._lock:
            version, sync = self._replay.version, self._sync
            if sync.is_synced:
                return Unsynced(version, [], [])
            files = [f"{self.folder}/{path}" for path in sync.files(self._replay.active)]
            commits = map(self.log_reader.commit_path, range(sync.version + 1, version + 1))
            return Unsynced(version, files, [*sync.base, *commits])

    def note_synced(self, version: int) -> None:
        """Records that the paths that `unsynced` returned for this version are durable.

        Does nothing if a later version has since been read.
        """
        with self._lock:
            if version == self._replay.version:
                self._sync.note_synced(version)

    def confirm(self, until: float | None = None) -> None:
        """Reads back commits on a store where another engine may overwrite one.

        These are our commits, and any that remove files, if they were put or read by `until`
        (monotonic seconds): another engine's put may still be in flight after ours. Each is read
        back once; without `until`, a young one is read back again by a later call. Raises
        `ForeignTable` if a version's content has changed, so that the table lacks changes that were
        committed.
        """
        with self._lock:
            noted = self._read_backs.due(until)
            if until is None:
                until = self.clock.monotonic() - limits.CONFIRM_AFTER_SECONDS
        at_once = limits.TABLE_REQUESTS_AT_ONCE
        found = in_parallel(self.store, self.log_reader.checksum, noted, at_once=at_once)
        for (version, (expected, _)), checksum in zip(noted.items(), found, strict=True):
            if checksum not in (None, expected):
                reason = (
                    f"another engine has overwritten commit {version}, because it does not"
                    " commit conditionally; restart the broker to publish it again"
                )
                raise errors.ForeignTable(topic=self.topic, reason=reason)
        with self._lock:
            self._read_backs.confirmed(noted, until)

    def forget_read_backs(self) -> None:
        """Drops the commits that `confirm` would read back, for a broker that publishes none."""
        with self._lock:
            self._read_backs.clear()

    def lost_files(self, torn: Callable[[Mapping[str, int]], Collection[str]]) -> set[str]:
        """Checks the table's new files, and returns the paths of the lost ones.

        Another engine may have started to remove files before the table named them, and may take a
        while. So every call checks each file, until the grace period of removed files has passed
        since its first check. On an object store, where a check costs a request, that does not
        include files of records that a broker has published: it checks them itself before the
        write-ahead log drops the records, and no removed file contains them. `torn` returns the
        paths that do not exist, or are shorter than the log says.
        """
        with self._lock:
            active, now = self._replay.active, self.clock.monotonic()
            for path in [path for path in self._looked_at if path not in active]:
                del self._looked_at[path]
            due = self._unchecked()
            sizes = {f"{self.folder}/{path}": active[path].size for path in due}
        missing = set(torn(sizes))
        with self._lock:
            active = self._replay.active  # a file may have been removed since
            found = [path for path in due if path in active]
            lost = {path for path in found if f"{self.folder}/{path}" in missing}
            for path in found:
                began = self._looked_at.setdefault(path, now)
                assert began is not None
                is_over = now - began >= self.removed_file_grace_seconds
                self._looked_at[path] = None if is_over and path not in lost else began
            return lost

    def may_be_swept(self, *, is_retained: bool = True) -> bool:
        """Returns whether a sweep of replaced files would have anything to check or to delete.

        That is a file or a commit that has not been checked for long enough, or a removed file that
        no longer needs to be retained (see `expired`).
        """
        with self._lock:
            if self._read_backs or self._unchecked():
                return True
        return bool(self.expired(is_retained=is_retained))

    def _unchecked(self) -> list[str]:
        """Returns the paths of the files that `lost_files` checks next, sorted."""
        is_local, looked_at = self.store.is_local, self._looked_at
        return sorted(
            path
            for path, add in self._replay.active.items()
            if looked_at.get(path, 0.0) is not None
            and (is_local or not (add.data_change and is_our_file(path)))
        )

    def _observe(self) -> TableSnapshot:
        if self._snapshot.version != self._replay.version:
            self._snapshot = self._replay.snapshot(self.topic)
        return self._snapshot

    def _advance(self) -> None:
        """Replays the commits after the current version, by probing for the next ones.

        A probe does not rely on a listing that already includes the newest puts. The log ends
        before version v if commit v is absent and v-1 exists afterwards: commits are removed oldest
        first, so v was not removed. If v-1 is gone, the newest checkpoint is loaded.

        On an object store, as many commits are read concurrently as this call has found so far. A
        commit counts only if all before it were found, so their order of arrival does not matter.
        """
        if self._replay.version < 0:
            self._load()
        most = min(self.store.requests_at_once, limits.TABLE_REQUESTS_AT_ONCE)
        count = 0
        while True:
            first = self._replay.version + 1
            found = self.log_reader.read_commits(first, max(min(count, most), 1))
            for version, data in enumerate(found, first):
                self._replay_commit(version, data)
            count += len(found)
            if not found and (self.log_reader.exists(first - 1) or not self._load()):
                return

    def _replay_commit(self, version: int, data: pa.Buffer) -> None:
        actions = delta_log.decode_commit(data, self.log_reader.commit_path(version))
        self._sync.is_synced = False
        self._apply(version, actions)
        if self._syncs_files:
            self._sync.note_files(actions.adds)
        if actions.removes and not self._only_reads:
            self._read_backs.note(version, data, self.clock.monotonic())

    def _load(self) -> bool:
        """Loads the newest checkpoint. Returns False if it is not newer than the current state."""
        version, actions, names = self.log_reader.load(self._replay.version)
        self._checkpoint_version = max(self._checkpoint_version, version)
        if version <= self._replay.version:
            return False
        replay = Replay(remembers_removed=not self._only_reads)
        replay.apply(version, actions)
        if replay.topic_id == self._replay.topic_id:
            replay.add_gaps(self._replay.gaps)  # including those not noted yet
        self._replay = replay
        self._forget_old_tombstones()
        self._sync.restart(version, [f"{self.log_folder}/{name}" for name in names])
        if self._syncs_files:
            self._sync.note_files(actions.adds)
        return True

    def _apply(self, version: int, actions: Actions) -> None:
        self._replay.apply(version, actions)
        if version % limits.TABLE_CHECKPOINT_EVERY == 0:
            self._forget_old_tombstones()

    # -------------------------------------------------------------------------- writing

    def commit(self, decide: Decide) -> TableSnapshot:
        """Commits the change that `decide` returns, as the version after the one it was given.

        `decide` first receives the last read version, then a newer one each time another writer was
        faster. It raises or returns None to abandon the change. Returns the snapshot with the
        change, or the one on which `decide` abandoned it.

        Raises what `refresh` raises. Without effect: `StorageUnavailable` (also after too many lost
        races), `StorageFull`, `PolicyViolation` for a removal of rows from an append-only table,
        and `TimedOut` for a file that has become too old to be added: write it again. With an
        unknown effect: `OutcomeUnknown`; check for your own files or `txn`.
        """
        assert not self._only_reads
        with self._lock:
            snapshot = self._newest()
            for _ in range(TABLE_COMMIT_ATTEMPTS):
                change = decide(snapshot)
                if change is None:
                    return snapshot
                self.sync()
                prepared = self._encode(snapshot.version + 1, change)
                is_put = claim(self.store, prepared.path, prepared.data, clock=self.clock)
                if is_put and self._finish(prepared):
                    return self._observe()
                snapshot = self.refresh()
            raise overtaken(self)

    def _newest(self) -> TableSnapshot:
        """Returns the last read version; reads the newest one if the last read was incomplete."""
        is_fresh = 0 <= self._snapshot.version == self._replay.version
        return self._snapshot if is_fresh else self.refresh()

    def prepare_commit(self, decide: Decide) -> PreparedCommit | TableSnapshot:
        """Returns the commit of the change that `decide` returns; it still has to be claimed.

        Returns the snapshot instead if `decide` abandoned the change on it. Raises what `commit`
        raises. If another commit comes in between, `finish_commit` finds that this one was too
        late.
        """
        assert not self._only_reads
        with self._lock:
            snapshot = self._newest()
            change = decide(snapshot)
            if change is None:
                return snapshot
            self.sync()
            return self._encode(snapshot.version + 1, change)

    def finish_commit(self, prepared: PreparedCommit) -> TableSnapshot | None:
        """Returns the snapshot with a commit whose put has succeeded; None if it does not count.

        Raises `OutcomeUnknown`.
        """
        with self._lock:
            return self._observe() if self._finish(prepared) else None

    def _finish(self, prepared: PreparedCommit) -> bool:
        """Returns whether a commit that was put counts; the replay then includes it."""
        version = prepared.version
        files = [unquote(file.path) for file in prepared.change.adds]
        self._read_backs.note(version, prepared.data, self.clock.monotonic())
        try:
            if self._replay.version >= version:
                # Another thread has read it by now, unless its version was already gone.
                return any(map(self.is_named, files))
            if self._replay.version == version - 1 and self.log_reader.follows(version):
                self._apply(version, prepared.actions)
                if self._sync.is_synced:
                    self._sync.version = version  # `claim` has made ours durable
                return True
            self._load()
            if self._replay.version >= version:
                # A checkpoint may include our commit: if so, it names the files that we added.
                return any(map(self.is_named, files))
            self._advance()
        except errors.SparklogError as error:  # also after a rejection: the put may have succeeded
            path = prepared.path
            raise errors.OutcomeUnknown(what=f"commit of {path}", reason=str(error)) from error
        return True

    def _encode(self, version: int, change: TableChange) -> PreparedCommit:
        now_us = self.clock.now_us()
        check(
            change,
            self._replay,
            topic=self.topic,
            now_us=now_us,
            orphan_grace_seconds=self.orphan_grace_seconds,
        )
        path = self.log_reader.commit_path(version)
        return encode(change, self._replay, version, path, now_us=now_us)

    # -------------------------------------------------------------------------- preparations

    @property
    def preparations(self) -> Mapping[str, int]:
        """The numbers of each broker's last preparation in the last read version, by `app_id`."""
        return self._replay.preparations

    @property
    def open_preparations(self) -> Mapping[int, str]:
        """The `app_id` of each open preparation in the last read version, by its number."""
        return self._replay.open_preparations

    def is_prepared(self, path: str) -> bool:
        """Returns whether a commit may still add the file, because its preparation is open."""
        return preparation_of(path) in self.open_preparations

    # -------------------------------------------------------------------------- upkeep

    def checkpoint(self) -> None:
        """Writes a checkpoint of the last read version, and reads it back before the hint names it.

        Raises `ForeignTable`, `CorruptObject` if the stored checkpoint differs, `SyncFailed`, and
        `OutcomeUnknown`, after which a checkpoint of a later version is just as good.
        """
        assert not self._only_reads
        with self._lock:
            version = self._replay.version
            if version < 0:
                return
            self._replay.snapshot(self.topic)
            self.sync()  # a checkpoint must not exist without its files either
            self._forget_old_tombstones()
            self._replay.forget_keys(self.clock.now_us() // 1_000)
            whole = self._replay.compacted()
        name = delta_log.checkpoint_name(version)
        path = f"{self.log_folder}/{name}"
        data = delta_log.encode_checkpoint(whole)
        # Another writer's checkpoint is just as good, if it is complete.
        claim(self.store, path, data, clock=self.clock)
        found = self.log_reader.read_checkpoint([name])
        if {unquote(add.path) for add in found.adds} != {unquote(add.path) for add in whole.adds}:
            count = len(whole.adds)
            check = f"it names {len(found.adds)} files, not the {count} of version {version}"
            raise errors.CorruptObject(path=path, check=check)
        with self._lock:
            self._checkpoint_version = max(self._checkpoint_version, version)
        if (self.log_reader.last_checkpoint() or 0) <= version:
            with contextlib.suppress(PutUnresolved):  # only a hint: a listing finds it too
                self.store.put(
                    f"{self.log_folder}/{delta_log.LAST_CHECKPOINT}",
                    delta_log.encode_last_checkpoint(version, found.count),
                )

    def is_needed(self, path: str) -> bool:
        """Returns whether the last read version names the file, or a later commit may.

        `path` is relative to the table's folder and not percent-encoded, as in the three methods
        below.
        """
        with self._lock:  # on one version: with a commit in between, both could be False
            return self.is_named(path) or self.is_prepared(path)

    def is_named(self, path: str) -> bool:
        """Returns whether the last read version contains the file, or its removal."""
        assert not self._only_reads
        with self._lock:
            return path in self._replay.active or path in self._replay.removed

    def expired(self, *, is_retained: bool = True) -> list[str]:
        """Returns remembered removed files that no longer need to be retained, oldest first.

        `is_retained`: False if they are retained for their grace period only.
        """
        assert not self._only_reads
        with self._lock:
            replay, removed = self._replay, dict(self._replay.removed)
            table_bytes = sum(add.size for add in replay.active.values())
        return removed_files.expired(
            removed,
            self._retention if is_retained else removed_files.NO_RETENTION,
            now_ms=self.clock.now_us() // 1_000,
            grace_seconds=self.removed_file_grace_seconds,
            property_seconds=replay.file_retention_seconds if is_retained else None,
            table_bytes=table_bytes,
        )

    @property
    def removed_count(self) -> int:
        """The number of removed files that are remembered."""
        return len(self._replay.removed)

    def forget_removed(self, paths: Iterable[str]) -> None:
        """Forgets files that no longer exist, so that checkpoints omit them."""
        with self._lock:
            for path in paths:
                self._replay.removed.pop(path, None)

    def _forget_old_tombstones(self) -> None:
        """Forgets tombstones long after their files should be gone, to allow for a late sweeper.

        A file that still exists by then is an orphan. Brokers that do not maintain the table never
        learn that a file is gone.
        """
        own_seconds = self._replay.file_retention_seconds
        kept_seconds = max(self._retention.seconds_of(own_seconds), self.removed_file_grace_seconds)
        kept_seconds += TOMBSTONE_SECONDS
        now_ms = self.clock.now_us() // 1_000
        self._replay.forget_removed(
            now_ms - round(kept_seconds * 1_000),
            young_ms=now_ms - round(self.removed_file_grace_seconds * 1_000),
            most=self._retention.files_of(own_seconds) * _SURPLUS,
        )


class _View(TopicTable):
    """A table with another view of its store. All else is read and set in the table itself."""

    def __init__(self, table: TopicTable, store: Store) -> None:
        log_reader = LogReader(store, table.topic, with_removes=not table._only_reads)
        vars(self).update(_table=table, store=store, log_reader=log_reader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._table, name, value)


OpenTable: TypeAlias = Callable[[str], TopicTable]
"""Returns the table of a topic, by name, without reading it."""


def overtaken(table: TopicTable) -> errors.StorageUnavailable:
    """Returns the error for a commit that lost every race with other writers."""
    return errors.StorageUnavailable(
        operation="commit",
        path=table.log_folder,
        reason=f"other writers were faster {TABLE_COMMIT_ATTEMPTS} times",
    )
