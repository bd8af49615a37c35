"""Maintenance of a topic's table: checkpoints, and removal of old log entries and unneeded files.

Rules:

- Nothing is removed that the newest version, a reader within the graces, or a future commit may
  need. Several processes may run each function at once, and may stop at any point.
- The log is removed oldest first, object by object: while commit v exists, all later ones do.
  `TopicTable` relies on it.
- A *replaced* file has a remove action in the log, and is removed after a grace. A reader that
  still refers to it finds it missing and plans again.
- An *orphan* was put but never committed, because its writer died or failed. The writer may also be
  suspended, and try to commit it later. Removing it is safe nevertheless: a writer adds a file only
  while it is younger than half the orphan grace. It checks this right before it puts the commit,
  which is put only if absent, as the version after the newest that the writer knows. Let w be a
  commit made later than that. Each put that passed the check was issued before w existed, so for w
  or a lower version; there it fails, or the table as of w has the file. After a failed put the
  writer checks again, and the check fails. So the order is: find the file, make sure that w exists
  (or put an empty commit), read the table, and remove the file if it is not named. The time between
  half and three quarters of the grace allows for clocks that differ.
- Writing a large batch may take longer than that. Its writer first opens a *preparation* by a
  commit with a `txn`; its files have the preparation's number in their names. The commit that adds
  them is made only if the version right before it has that preparation open, and closes it. So the
  log alone decides, and no clock: a process that finds a file and then reads the table finds the
  preparation open, and keeps the file; or closed, and then the table names the file or no commit
  will. The writer renews the preparation while it works. A sweeper closes one that is not renewed
  for a grace. Each broker has a preparation of its own, so that leaders of one topic do not end
  each other's. One that starts again ends its predecessor's; the writer of a closed one begins
  again.
- Another engine may work for hours before it commits, so only files with names of our kind count as
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
"""The note in the folder of a deleted topic. Engines ignore names that begin with `_`."""


def note_gaps(table: TopicTable) -> None:
    """Commits why offsets have no record, where another engine has removed rows; else nothing.

    The commit of that engine is kept for days only. Raises like `TopicTable.commit`.
    """
    if not table.unnoted_gaps():
        return

    def decide(_snapshot: TableSnapshot) -> TableChange | None:
        txns = table.unnoted_gaps()
        return TableChange(txns=txns, operation="NOTE GAPS") if txns else None

    table.commit(decide)


def checkpoint_due(table: TopicTable, *, every: int = limits.TABLE_CHECKPOINT_EVERY) -> bool:
    """Returns whether `every` commits follow the newest checkpoint that `table` knows."""
    return table.snapshot.version - max(table.log_reader.checkpoint_version, 0) >= every


# ------------------------------------------------------------------------------ the log


def clean_log(
    table: TopicTable,
    *,
    kept_seconds: float = TABLE_LOG_KEPT_SECONDS,
    kept_versions: int = _TABLE_LOG_KEPT_VERSIONS,
    most_versions: int = _TABLE_LOG_KEPT_VERSIONS,
    needed_seconds: float = 0.0,
) -> int:
    """Removes old log objects before a checkpoint that it has read back. Returns their number.

    A version is kept if it is younger than `kept_seconds` and among the newest `kept_versions`, or
    if a kept version needs it. So other engines may lag or use time travel for a day, or for almost
    three hours if the topic commits every second. It also bounds the listing of the log, with which
    all engines start. The table's own `delta.logRetentionDuration` replaces both bounds. Without
    it, at most `most_versions` are kept, which is the share of this table. The two newest
    checkpoints are always kept, and each version for `needed_seconds`, because it names the files
    that a merge has replaced and that may have to be restored.
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
        # The log is rebuilt from these, and other engines do not flush those that they write.
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
    """Removes the files that have left the table and need not stay. Returns their number.

    See `storage.table.removed_files`; `is_retained` is false if they stay for
    `janitor.removed_file_grace_seconds` only. `limits.REPLACED_KEPT_SECONDS` is another grace: it
    keeps replaced files from the VACUUM of other engines, by the dates in our commits.

    Removes nothing while a file of the table is missing or shorter than the log says, since the
    replaced files may have its rows. To that end our commits are read back, and each new file of
    the table is checked until its grace is over. If one is lost, the files that it replaced are
    restored, if they exist. Raises `CorruptObject` for such a file, like `TopicTable.commit`, and
    `StorageUnavailable`.
    """
    table.refresh()
    due = set(table.expired(is_retained=is_retained))
    table.confirm()
    # Another engine's commit or new file may not be durable yet. After a power cut the old names
    # must not be back, or the rows lost, with the files already removed.
    table.sync()
    _check_files(table)
    # Another thread may have read or made a commit meanwhile: it is checked the next time.
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
    """Removes our files that no commit names or will name. Returns their number.

    Lists all files of the table, so it is too expensive for each minute. It also removes replaced
    files that the log no longer mentions, and so removes nothing if `sweep_replaced` would raise.
    Raises like that and `TopicTable.commit`.
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
    """Notes that only the Delta log is left of a deleted topic, and will be at this version.

    The removals become durable first: no sweep looks for files that a power cut brings back later.
    """
    for folder in table.store.folders(table.folder):
        table.store.sync_folder(f"{table.folder}/{folder}")
    table.store.put(f"{table.folder}/{_EMPTIED}", b"%d" % table.snapshot.version)


def is_emptied(store: Store, topic: str) -> bool:
    """Returns whether only the Delta log is left of a deleted topic, by a note of an earlier sweep.

    The log has no newer version than the noted one: commits are removed oldest first, so the next
    one is missing only if it was never made.
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
    """Returns whether the newest commit is older than the grace.

    Until then a file that was to be in a commit may still arrive, from a put without an answer.
    """
    committed_us = _newest_commit_us(table)  # None: a checkpoint has replaced it
    return committed_us is None or committed_us < table.clock.now_us() - round(grace_seconds * 1e6)


def _ensure_commit_after(table: TopicTable, moment_us: int) -> None:
    """Makes sure that a commit from after the moment exists, and that `table` has read it."""
    committed_us = _newest_commit_us(table)
    if committed_us is None or committed_us <= moment_us:
        table.commit(lambda _: TableChange(operation="SWEEP"))
    table.refresh()


def _newest_commit_us(table: TopicTable) -> int | None:
    """Returns when the store got the newest commit that is known; None if it is gone."""
    newest = f"{table.log_folder}/{delta_log.commit_name(table.snapshot.version)}"
    try:
        return table.store.stat(newest).modified_us
    except ObjectMissing:
        return None
