"""Restores the files that a merge replaced, if the merged file is lost.

Between the put of a merged file and the commit that adds it, no version of the table names the
file. Another engine's VACUUM with zero retention (`RETAIN 0 HOURS`) may remove it, and the commit
then names a missing file. No row is lost, for these reasons:

- For a VACUUM that has not seen the commit, the replaced files are part of the table.
- A VACUUM that has seen it keeps them too: the commit dates their removal an hour in the future
  (`limits.REPLACED_KEPT_SECONDS`), and an engine keeps a removed file until that date is older than
  the VACUUM's retention. Our own sweeper uses the time of the commit.
- So either one removes only the merged file. It is checked right after the commit, and by each
  sweep until the grace period of removed files is over, since a VACUUM that began before the commit
  may still be running; the last check precedes the deletion of the replaced files. If the file is
  missing, one commit removes it and adds the replaced files again.

This holds as long as a VACUUM takes no longer than the grace period of removed files, and a broker
checks within the hour. A commit that changes data is not undone, since its rows are in no other
file. If a key compaction is undone, the superseded records exist until the next pass; if a deletion
is undone, the deleted records are below the log start, and the next sweep removes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sparklog import errors, limits
from sparklog.storage.objects import ObjectMissing, Store, in_parallel
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import delta_log
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.delta_log import Add, Remove
from sparklog.storage.table.names import (
    data_path,
    is_our_file,
    maintenance_app_id,
    tombstones_app_id,
)
from sparklog.storage.table.topic_table import TopicTable

_FILES_ASKED_FOR = 12  # in each folder, on average; for more, a listing is cheaper, as S3 bills


def torn(store: Store, sizes: Mapping[str, int]) -> set[str]:
    """Returns the data files that do not exist, are smaller than in `sizes`, or lack a footer.

    After a power cut, a file that another engine put without a flush may be empty, truncated, or
    end in zeros. The last is checked on a local root only, in files without a name of ours. On an
    object store, a few files are checked individually, and more by listing their folders.
    """
    at_once = limits.TABLE_REQUESTS_AT_ONCE
    folders = sorted({path.rpartition("/")[0] for path in sizes})
    if store.is_local or len(sizes) <= _FILES_ASKED_FOR * len(folders):
        looked = in_parallel(store, lambda path: _size(store, path), sizes, at_once=at_once)
        found = dict(zip(sizes, looked, strict=True))
    else:
        listed = in_parallel(store, store.list_after, folders, at_once=at_once)
        found = {
            f"{folder}/{stat.name}": stat.size_bytes
            for folder, stats in zip(folders, listed, strict=True)
            for stat in stats
        }
    gone = {path for path, size in sizes.items() if found.get(path, -1) < size}
    if store.is_local:
        theirs = (path for path in sizes if not is_our_file(path.split("/", 2)[-1]))
        gone |= {path for path in theirs if path not in gone and _footer(store, path) is None}
    return gone


def _footer(store: Store, path: str) -> pq.FileMetaData | None:
    try:
        with store.open(path) as source:
            return pq.read_metadata(source)
    except (ObjectMissing, FileNotFoundError, pa.ArrowException, OSError):
        return None


def _size(store: Store, path: str) -> int:
    try:
        return store.stat(path).size_bytes
    except ObjectMissing:
        return -1


# ------------------------------------------------------------------------------ after a commit


def verify(table: TopicTable, merged: Sequence[TableFile], replaced: Sequence[TableFile]) -> None:
    """Checks that the files of the last commit exist; undoes the commit if one is gone.

    `replaced` contains every row of `merged`. If a file is gone, raises `CorruptObject`, which says
    whether the commit was undone. Raises what `TopicTable.commit` raises.
    """
    gone = torn(table.store, {data_path(table.topic, each): each.size_bytes for each in merged})
    if not gone:
        return
    is_back = True
    for partition in {each.partition for each in merged}:
        outputs = [unquote(each.path) for each in merged if each.partition == partition]
        inputs = [each for each in replaced if each.partition == partition]
        is_back &= _put_back(table, partition, outputs, inputs)
    raise lost(min(gone), is_back=is_back)


def lost(path: str, *, is_back: bool) -> errors.CorruptObject:
    """Returns the error for a merged file that is gone, with the state of the files it replaced."""
    check = (
        "it is missing, shorter than the table says, or truncated, after a VACUUM with zero"
        " retention or a power cut"
    )
    advice = (
        "The files that it replaced are in the table again; nothing needs to be done"
        if is_back
        else "The files that it replaced could not be put back, and are kept; restore the table"
    )
    return errors.CorruptObject(path=path, check=check, advice=advice)


def _put_back(
    table: TopicTable, partition: int, outputs: Sequence[str], inputs: Sequence[TableFile]
) -> bool:
    """Removes `outputs` and adds `inputs` in one commit. Returns False if that is impossible."""
    topic_id = table.snapshot.topic_id
    sizes = {data_path(table.topic, each): each.size_bytes for each in inputs}
    if topic_id is None or not inputs or torn(table.store, sizes):
        return False
    table.store.sync_files(sizes)  # another engine may have written them without a flush
    is_made = False

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        nonlocal is_made
        is_made = False
        if snapshot.topic_id != topic_id:
            return None
        active = {unquote(each.path): each for each in snapshot.files[partition]}
        if any(path not in active for path in outputs):
            return None
        if any(unquote(each.path) in active for each in inputs):
            return None
        is_made = True
        txns = {maintenance_app_id(topic_id): snapshot.version + 1}
        # A tombstone may come back together with the record that it deleted: its wait starts over.
        tombstones = table.txn(tombstones_app_id(topic_id, partition))
        if tombstones is not None:
            txns[tombstones_app_id(topic_id, partition)] = tombstones.version
        return TableChange(
            adds=tuple(inputs),
            removes=tuple(active[path] for path in outputs),
            txns=txns,
            data_change=False,
            restores=True,
            operation="RESTORE FILES",
        )

    table.commit(decide)
    return is_made


# ------------------------------------------------------------------------------ from the log


def restore(table: TopicTable, gone: Collection[str]) -> set[str]:
    """Undoes the commits that added these files, as far as possible.

    `gone` are paths in the table's folder, not percent-encoded, of active files that do not exist
    or are torn. Returns those that are no longer in the table afterwards. Raises what
    `TopicTable.commit` raises.
    """
    waiting = set(gone)
    starts = table.snapshot.starts
    for adds, removes in _rewrites(table):
        for partition in {each.partition for each in adds if unquote(each.path) in waiting}:
            outputs = [each for each in adds if each.partition == partition]
            for group in _groups(outputs, _replaced(table, removes, partition, starts[partition])):
                paths = [unquote(each.path) for each in group.outputs]
                if not waiting.isdisjoint(paths):
                    _put_back(table, partition, paths, group.inputs)
        waiting -= {unquote(each.path) for each in adds}
        if not waiting:
            break
    active = {unquote(file.path) for files in table.snapshot.files for file in files}
    return set(gone) - active


def _rewrites(table: TopicTable) -> Iterator[tuple[list[TableFile], Sequence[Remove]]]:
    """Yields adds and removes of commits that change no data, newest first."""
    for version in range(table.snapshot.version, -1, -1):
        path = f"{table.log_folder}/{delta_log.commit_name(version)}"
        try:
            actions = delta_log.decode_commit(table.store.get(path), path)
        except (ObjectMissing, errors.CorruptObject):
            return  # the log has been cleaned up to here
        if not any(each.data_change for each in actions.adds):
            adds = [file for each in actions.adds if (file := _file_of(each)) is not None]
            yield adds, actions.removes


def _file_of(add: Add) -> TableFile | None:
    try:
        return delta_log.file_of(add)
    except ValueError:
        return None


def _replaced(
    table: TopicTable, removes: Sequence[Remove], partition: int, start: int
) -> list[TableFile]:
    """Returns the files of the partition that a commit has replaced; none if one is missing.

    Files below the log `start`, whose rows are deleted, are omitted.
    """
    found = []
    for each in removes:
        if _partition_of(each) == str(partition):
            file = _file_from_footer(table, each, partition)
            if file is None:
                return []
            if file.last is None or file.last >= start:
                found.append(file)
    return found


def _partition_of(remove: Remove) -> str | None:
    if remove.partition_values is not None:
        return remove.partition_values.get("partition")
    return unquote(remove.path).partition("/")[0].removeprefix("partition=")


def _file_from_footer(table: TopicTable, remove: Remove, partition: int) -> TableFile | None:
    """Returns the file as described by its footer; None if it is missing or torn."""
    path = f"{table.folder}/{unquote(remove.path)}"
    footer = _footer(table.store, path)
    try:
        stat = table.store.stat(path)
    except ObjectMissing:
        return None
    if footer is None or stat.size_bytes < (remove.size or 0):
        return None
    offsets = _bounds(footer, "offset")
    # Other engines write times in other units; ours are in microseconds.
    times = _bounds(footer, "timestamp") if is_our_file(unquote(remove.path)) else None
    return TableFile(
        path=remove.path,
        partition=partition,
        size_bytes=stat.size_bytes,
        rows=footer.num_rows,
        first=offsets[0] if offsets else None,
        last=offsets[1] if offsets else None,
        min_timestamp_us=times[0] if times else None,
        max_timestamp_us=times[1] if times else None,
        modified_us=stat.modified_us // 1_000 * 1_000,
        columns=delta_log.columns_tag(remove),
    )


def _bounds(footer: pq.FileMetaData, name: str) -> tuple[int, int] | None:
    """Returns the minimum and maximum of an integer column, from row group statistics."""
    lows, highs = [], []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            if column.path_in_schema == name:
                found = column.statistics
                if found is None or not found.has_min_max or column.physical_type != "INT64":
                    return None
                lows.append(found.min_raw)
                highs.append(found.max_raw)
    return (min(lows), max(highs)) if lows else None


@dataclass(frozen=True, slots=True)
class _Group:
    """Files of one commit that contain the same rows before and after it."""

    outputs: list[TableFile]
    inputs: list[TableFile]


def _groups(outputs: Sequence[TableFile], inputs: Sequence[TableFile]) -> Iterator[_Group]:
    """Splits a commit's files into non-overlapping ranges; one group if a bound is unknown."""
    files = [*outputs, *inputs]
    if any(each.first is None or each.last is None for each in files):
        yield _Group(list(outputs), list(inputs))
        return
    files.sort(key=lambda each: each.first or 0)
    ends = list(itertools.accumulate((each.last or 0 for each in files), max))
    cuts = [at for at in range(1, len(files)) if (files[at].first or 0) > ends[at - 1]]
    for low, high in itertools.pairwise([0, *cuts, len(files)]):
        group = files[low:high]
        yield _Group(
            [each for each in group if each in outputs], [each for each in group if each in inputs]
        )
