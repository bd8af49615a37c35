"""Maintenance of a topic's table: checkpoints, and removal of old log entries and unneeded files.

Rules:

- Nothing is removed that the newest version, a reader within the grace periods, or a future commit
  may need. Several processes may run each function concurrently, and may stop at any point.
- The log is removed oldest first, object by object: while commit v exists, so do all later ones.
  `TopicTable` relies on this.
- A *replaced* file has a remove action in the log, and is deleted after a grace period. A reader
  that still refers to it finds it missing and plans again.
- An *orphan* was put but never committed, because its writer died or failed. The writer may also be
  merely suspended, and try to commit it later. Removing it is still safe: a writer adds a file only
  while it is younger than half the orphan grace period. It checks this right before it puts the
  commit, which is put only if absent, as the version after the newest that the writer knows. Let w
  be a commit made once the file was older than that. Each put that passed the check was issued
  before w existed, and so for w's version or a lower one: either it fails, or the table as of w
  contains the file. After a failed put the writer checks again, and the check fails. So the order
  is: find the file, make sure that w exists (or put an empty commit), read the table, and remove
  the file if it is not named. The time between half and three quarters of the grace period allows
  for clock skew.
- Writing a large batch may take longer than that. Its writer first opens a *preparation* with a
  commit of a `txn`; the names of its files contain the preparation's number. The commit that adds
  them is made only if that preparation is open in the version right before it, and closes it. So
  the log alone decides, not a clock: a process that finds a file and then reads the table finds the
  preparation either open, and keeps the file, or closed, in which case the table names the file or
  no commit ever will. The writer renews the preparation while it works. A sweeper closes one that
  has not been renewed for a grace period. Each broker has its own preparation, so that leaders of
  one topic do not close each other's. A restarted broker closes its predecessor's; the writer of a
  closed one starts over.
- Another engine may work for hours before it commits, so only files with names of ours count as
  orphans. Other files are left to that engine's VACUUM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sparklog import errors, limits
from sparklog.storage.maintenance import restoring
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table import delta_log, preparations
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import is_our_file, table_folder
from sparklog.storage.table.topic_table import TopicTable

_TABLE_CHECKPOINTS_KEPT = 2
TABLE_LOG_KEPT_SECONDS = 24 * 3600.0
_TABLE_LOG_KEPT_VERSIONS = 10_000

_EMPTIED: Final = "_emptied"
"""The marker in the folder of a deleted topic. Engines ignore names that begin with `_`."""


def note_gaps(table: TopicTable) -> None:
    """Commits the cause of gaps where another engine has removed rows; otherwise does nothing.

    That engine's own commit is kept only for days. Raises what `TopicTable.commit` raises.
    """
    if not table.unnoted_gaps():
        return

    def decide(_snapshot: TableSnapshot) -> TableChange | None:
        txns = table.unnoted_gaps()
        return TableChange(txns=txns, operation="NOTE GAPS") if txns else None

    table.commit(decide)


def checkpoint_due(table: TopicTable, *, every: int = limits.TABLE_CHECKPOINT_EVERY) -> bool:
    """Returns whether at least `every` commits follow the newest checkpoint that `table` knows."""
    return table.snapshot.version - max(table.checkpoint_version, 0) >= every


# ------------------------------------------------------------------------------ the log


def clean_log(
    table: TopicTable,
    *,
    kept_seconds: float = TABLE_LOG_KEPT_SECONDS,
    kept_versions: int = _TABLE_LOG_KEPT_VERSIONS,
    most_versions: int = _TABLE_LOG_KEPT_VERSIONS,
    needed_seconds: float = 0.0,
) -> int:
    """Removes old log objects before a checkpoint that was read back. Returns their number.

    A version is kept if it is younger than `kept_seconds` and among the newest `kept_versions`, or
    if a kept version needs it. So other engines can lag or time travel by up to a day, or by almost
    three hours if the topic commits every second. This also bounds the listing of the log that
    every engine starts with. The table's own `delta.logRetentionDuration` replaces both bounds.
    Without it, at most `most_versions`, this table's share, are kept. The two newest checkpoints
    are always kept, and so is each version for `needed_seconds`, because it names files that a
    merge has replaced and that may have to be restored.
    """
    kept_versions = min(kept_versions, most_versions)
    if table.snapshot.log_retention_seconds is not None:
        kept_seconds, kept_versions = table.snapshot.log_retention_seconds, table.snapshot.version
    now_us = table.clock.now_us()
    young_us = now_us - round(kept_seconds * 1e6)
    needed_us = now_us - round(needed_seconds * 1e6)
    names: dict[str, int] = {}
    newest = oldest_young = oldest_needed = table.snapshot.version
    for stat in table.store.list_after(table.log_folder):
        version = delta_log.version_of(stat.name)
        if version is not None:
            names[stat.name] = version
            if stat.modified_us >= young_us:
                oldest_young = min(oldest_young, version)
            if stat.modified_us > needed_us:
                oldest_needed = min(oldest_needed, version)
    oldest_kept = min(max(oldest_young, newest - kept_versions + 1), oldest_needed)
    cut = _cut(table, names, oldest_kept)
    past = [name for name, version in names.items() if version < cut]
    if past:
        # The log is rebuilt from these, and other engines do not flush the ones they write.
        checkpoints = delta_log.read_names(names).checkpoints
        kept = [name for version, parts in checkpoints.items() if version >= cut for name in parts]
        table.sync()
        table.store.sync_files(f"{table.log_folder}/{name}" for name in kept)
    for name in past:
        table.store.delete([f"{table.log_folder}/{name}"])
    return len(past)


def _cut(table: TopicTable, names: Mapping[str, int], oldest_kept: int) -> int:
    """Returns the newest readable checkpoint at or before the oldest kept version; 0 if none."""
    checkpoints = delta_log.read_names(names).checkpoints
    begin = min(names.values(), default=0)
    if not any(begin < version <= oldest_kept for version in checkpoints):
        return 0
    verified = 0
    for version in reversed(checkpoints):
        if verified < _TABLE_CHECKPOINTS_KEPT or version <= oldest_kept:
            try:
                table.log_reader.read_checkpoint(checkpoints[version])
            except (errors.CorruptObject, ObjectMissing):
                continue
            verified += 1
            if verified >= _TABLE_CHECKPOINTS_KEPT and version <= oldest_kept:
                return version
    return 0


# ------------------------------------------------------------------------------ data files


def sweep_replaced(table: TopicTable, *, is_retained: bool = True) -> int:
    """Deletes removed files that no longer need to be retained. Returns their number.

    See `storage.table.removed_files`; `is_retained` is False if they are retained for
    `janitor.removed_file_grace_seconds` only. `limits.REPLACED_KEPT_SECONDS` is a different grace
    period: it protects replaced files from other engines' VACUUM, by the dates in our commits.

    Deletes nothing while a file of the table is missing or shorter than the log says, since the
    replaced files may contain its rows. To that end, our commits are read back, and each new file
    of the table is checked until its grace period is over. If one is lost, the files that it
    replaced are restored, if they exist. Raises `CorruptObject` for such a file,
    `StorageUnavailable`, and like `TopicTable.commit`.
    """
    table.refresh()
    due = set(table.expired(is_retained=is_retained))
    table.confirm()
    # Another engine's commit or new file may not be durable yet. Once the replaced files are
    # deleted, a power cut must not bring their names back, or lose the rows.
    table.sync()
    _check_files(table)
    # Another thread may have read or made a commit since: it is checked next time.
    gone = [path for path in table.expired(is_retained=is_retained) if path in due]
    if gone:
        table.store.delete(f"{table.folder}/{path}" for path in gone)
        table.forget_removed(gone)
    return len(gone)


def _check_files(table: TopicTable) -> None:
    """Raises `CorruptObject` for a lost file, after restoring the files that it replaced."""
    lost = table.lost_files(lambda sizes: restoring.torn(table.store, sizes))
    if lost:
        restored = restoring.restore(table, lost)
        path = min(lost - restored or restored)
        raise restoring.lost(f"{table.folder}/{path}", is_back=path in restored)


def sweep_orphans(table: TopicTable, *, grace_seconds: float = limits.ORPHAN_GRACE_SECONDS) -> int:
    """Deletes our files that no commit names or will name. Returns their number.

    Lists all files of the table, so it is too expensive to run every minute. It also deletes
    replaced files that the log no longer names, and so deletes nothing if `sweep_replaced` would
    raise. Raises what `sweep_replaced` and `TopicTable.commit` raise.
    """
    if table.refresh().version < 0:
        return 0
    grace_us = round(grace_seconds * 1e6)
    born_before_us = table.clock.now_us() - grace_us
    preparations.end_old(table, born_before_us)
    candidates = [
        stat
        for stat in table.store.walk(table.folder)
        if stat.modified_us < born_before_us
        and is_our_file(stat.name)
        and not table.is_needed(stat.name)
    ]
    if not candidates:
        return 0
    _ensure_commit_after(table, max(stat.modified_us for stat in candidates) + grace_us * 3 // 4)
    orphans = [stat.name for stat in candidates if not table.is_needed(stat.name)]
    if orphans:
        _check_files(table)
    table.store.delete(f"{table.folder}/{name}" for name in orphans)
    return len(orphans)


def has_files(table: TopicTable) -> bool:
    """Returns whether data files of ours exist, active or not; lists all files."""
    return any(is_our_file(stat.name) for stat in table.store.walk(table.folder))


def note_emptied(table: TopicTable) -> None:
    """Notes that only the Delta log is left of a deleted topic, as of the current version.

    The removals are made durable first: no later sweep searches for files that a power cut brings
    back.
    """
    for folder in table.store.folders(table.folder):
        table.store.sync_folder(f"{table.folder}/{folder}")
    table.store.put(f"{table.folder}/{_EMPTIED}", b"%d" % table.snapshot.version)


def is_emptied(store: Store, topic: str) -> bool:
    """Returns whether only the Delta log is left of a deleted topic, as noted by an earlier sweep.

    This requires that the log has no newer version than the noted one: commits are removed oldest
    first, so the next one is missing only if it was never made.
    """
    folder = table_folder(topic)
    try:
        version = int(store.get(f"{folder}/{_EMPTIED}").to_pybytes())
        store.stat(f"{folder}/{delta_log.LOG_FOLDER}/{delta_log.commit_name(version)}")
    except (ObjectMissing, ValueError):
        return False
    try:
        store.stat(f"{folder}/{delta_log.LOG_FOLDER}/{delta_log.commit_name(version + 1)}")
    except ObjectMissing:
        return True
    return False


def has_rested(table: TopicTable, *, grace_seconds: float) -> bool:
    """Returns whether the newest commit is older than the grace period.

    Until then, a file meant for a commit may still arrive, from a put that got no response.
    """
    committed_us = _newest_commit_us(table)  # None: a checkpoint has replaced it
    return committed_us is None or committed_us < table.clock.now_us() - round(grace_seconds * 1e6)


def _ensure_commit_after(table: TopicTable, moment_us: int) -> None:
    """Makes sure that a commit made after `moment_us` exists, and that `table` has read it."""
    committed_us = _newest_commit_us(table)
    if committed_us is None or committed_us <= moment_us:
        table.commit(lambda _: TableChange(operation="SWEEP"))
    table.refresh()


def _newest_commit_us(table: TopicTable) -> int | None:
    """Returns the store's time of the newest known commit; None if that is gone."""
    newest = f"{table.log_folder}/{delta_log.commit_name(table.snapshot.version)}"
    try:
        return table.store.stat(newest).modified_us
    except ObjectMissing:
        return None
