"""Keeping a topic's table small: checkpoints, old log entries, files that nobody needs any more.

Rules of this room:

- Nothing is removed that the newest version, a reader within the graces, or a commit still to come
  could need. Everything here may be run by several at once, and stopped anywhere.
- The log is removed oldest first, one object after another: while commit v stands, all after v do.
  `Table` rests on that.
- A *replaced* file has a remove action in the log. It goes after a grace; a reader that still knows
  it finds it missing and plans anew.
- An *orphan* was put and never committed: its writer died, or gave up. Its writer may also be
  frozen, and commit it later. Why it may go nevertheless: a writer adds a file only while it is
  younger than half the orphan grace. It checks that just before it puts the commit, which is put
  only if absent, as the version after the newest that the writer knows. Let a commit w stand that
  was made later than that. Every put that passed the check was issued before w stood, so for w or
  a version below; there it loses, or the table as of w has the file. After a lost put the check
  comes again, and fails. So, in this order: see the file, see that w stands (or put an empty
  commit), read the table, and remove the file if it is not named. Between half and three quarters
  of the grace there is room for clocks that disagree.
- A large batch may take longer to write than that. Its writer first opens a *preparation*, by a
  commit with a `txn`; its files have the number in their names, and the commit that adds them is
  made only if the version right before it has that preparation open, and closes it. So the log
  alone decides, and no clock: who sees a file, and reads the table after that, finds its
  preparation open, and lets the file be; or closed, and then the table names the file or no commit
  ever will. The writer renews it while it works. A sweeper closes one that was not renewed for a
  grace, and a writer opens its own over any other: a writer that is closed out begins again.
- Another engine makes no such promise, and may work for hours before it commits: only files with
  our kind of name count as orphans. The rest is left to that engine's VACUUM.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparklog import errors, limits
from sparklog.storage import deltalog
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.table import Change, Table, is_our_file


def checkpoint_due(table: Table, *, every: int = limits.TABLE_CHECKPOINT_EVERY) -> bool:
    """Whether so many commits came after the newest checkpoint that `table` knows."""
    return table.snapshot.version - max(table.checkpoint_version, 0) >= every


# ------------------------------------------------------------------------------ the log


def clean_log(
    table: Table,
    *,
    kept_seconds: float = limits.TABLE_LOG_KEPT_SECONDS,
    kept_versions: int = limits.TABLE_LOG_KEPT_VERSIONS,
) -> int:
    """Removes the log's past, up to a checkpoint that was read again; how many objects.

    A version stays if it is younger than `kept_seconds` and among the newest `kept_versions`, or
    needed to rebuild one that stays. So other engines may fall behind or travel in time for a day,
    and of a topic that commits every second for a quarter of an hour, which is longer than the
    files of an older version are there. The listing of the log, with which they all start, stays
    short. The two newest checkpoints stay in any case.
    """
    young_us = table.clock.now_us() - round(kept_seconds * 1e6)
    names: dict[str, int] = {}
    newest = oldest_young = table.snapshot.version
    for stat in table.store.list_after(table.log_folder):
        version = deltalog.version_of(stat.name)
        if version is not None:
            names[stat.name] = version
            if stat.modified_us >= young_us:
                oldest_young = min(oldest_young, version)
    cut = _cut(table, names, max(oldest_young, newest - kept_versions + 1))
    past = [name for name, version in names.items() if version < cut]
    if past:
        # The log is rebuilt from these, and another engine that has written some flushes nothing.
        checkpoints = deltalog.read_names(names).checkpoints
        kept = [name for version, parts in checkpoints.items() if version >= cut for name in parts]
        table.settle()
        table.store.harden(f"{table.log_folder}/{name}" for name in kept)
    for name in past:
        table.store.delete([f"{table.log_folder}/{name}"])
    return len(past)


def _cut(table: Table, names: Mapping[str, int], oldest_kept: int) -> int:
    """The newest checkpoint from which all that stays can be rebuilt, having read it; 0 if none."""
    checkpoints = deltalog.read_names(names).checkpoints
    begin = min(names.values(), default=0)
    if not any(begin < version <= oldest_kept for version in checkpoints):
        return 0
    verified = 0
    for version in reversed(checkpoints):
        if verified < limits.TABLE_CHECKPOINTS_KEPT or version <= oldest_kept:
            try:
                table.read_checkpoint(checkpoints[version])
            except (errors.CorruptObject, ObjectMissing):
                continue
            verified += 1
            if verified >= limits.TABLE_CHECKPOINTS_KEPT and version <= oldest_kept:
                return version
    return 0


# ------------------------------------------------------------------------------ data files


def torn(store: Store, sizes: Mapping[str, int]) -> set[str]:
    """Those of the objects that do not exist, or have less than so many bytes.

    What another engine has put without a flush may be empty, or end early, after a power cut. On an
    object store a few are asked for one by one, and more by a listing of their folders.
    """
    if store.is_local or len(sizes) <= limits.FILES_ASKED_FOR:
        found = {path: _size(store, path) for path in sizes}
    else:
        folders = {path.rpartition("/")[0] for path in sizes}
        found = {
            f"{folder}/{stat.name}": stat.size_bytes
            for folder in sorted(folders)
            for stat in store.list_after(folder)
        }
    return {path for path, size in sizes.items() if found.get(path, -1) < size}


def _size(store: Store, path: str) -> int:
    try:
        return store.stat(path).size_bytes
    except ObjectMissing:
        return -1


def sweep_replaced(table: Table) -> int:
    """Removes the files that left the table longer ago than its grace; how many.

    Nothing goes while a file of the table is missing, or shorter than the log says, whose rows the
    replaced ones may have: our commits are read back, and each file that came into the table is
    looked at once. Raises `CorruptObject` for such a file, what `Table.refresh` does, and
    `StorageUnavailable`.
    """
    table.refresh()
    table.confirm()
    grace_us = round(table.removed_file_grace_seconds * 1e6)
    gone = table.removed_before(table.clock.now_us() - grace_us)
    if gone:
        # Another engine's commit, or a file that it has added instead, may not be durable yet: a
        # power cut must not bring the names back, or take the rows away, and leave the files gone.
        table.settle()
        table.check_files(lambda sizes: torn(table.store, sizes))
        table.store.delete(f"{table.folder}/{path}" for path in gone)
        table.forget_removed(gone)
    return len(gone)


def sweep_orphans(table: Table) -> int:
    """Removes our files that no commit names and none will, as the header tells; how many.

    Lists all files of the table, so not for every minute. What was replaced so long ago that the
    log has forgotten it goes too, so nothing goes where `sweep_replaced` would raise. Raises what
    that and `Table.commit` do.
    """
    if table.refresh().version < 0:
        return 0
    grace_us = round(table.orphan_grace_seconds * 1e6)
    born_before_us = table.clock.now_us() - grace_us
    table.end_preparation(born_before_us)
    candidates = [
        stat
        for stat in table.store.walk(table.folder)
        if stat.modified_us < born_before_us
        and is_our_file(stat.name)
        and not _is_needed(table, stat.name)
    ]
    if not candidates:
        return 0
    _bar(table, max(stat.modified_us for stat in candidates) + grace_us * 3 // 4)
    orphans = [stat.name for stat in candidates if not _is_needed(table, stat.name)]
    if orphans:
        table.check_files(lambda sizes: torn(table.store, sizes))
    table.store.delete(f"{table.folder}/{name}" for name in orphans)
    return len(orphans)


def _is_needed(table: Table, path: str) -> bool:
    """Whether the version last seen names the file, or a later commit may."""
    return table.is_named(path) or table.is_prepared(path)


def has_files(table: Table) -> bool:
    """Whether the table still has data files of ours, active or not; lists all of them."""
    return any(is_our_file(stat.name) for stat in table.store.walk(table.folder))


def _bar(table: Table, moment_us: int) -> None:
    """Sees to it that a commit from after the moment stands, and that `table` has read it."""
    newest = f"{table.log_folder}/{deltalog.commit_name(table.snapshot.version)}"
    try:
        stands = table.store.stat(newest).modified_us > moment_us
    except ObjectMissing:
        stands = False
    if not stands:
        table.commit(lambda _: Change(operation="SWEEP"))
    table.refresh()
