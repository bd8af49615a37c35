"""File compaction: merges small data files of a partition into larger ones, with the same rows.

Rules:

- Only files that are neighbours in offset order are merged. So order and offsets do not change, and
  readers that skip by statistics can skip more.
- The result of a merge is at least twice as large as every input, so a byte is rewritten at most
  once per doubling; in practice about once per `compact_files`-fold growth, because a tier is
  merged only when it has that many files of similar size.
- Rows are counted before and after, bounds are compared, and page checksums verified. A merge is
  committed only if all agree. If a file differs from its log entry, an error names it before any of
  its rows are copied.
- The commit is made only if every input is active in the version right before it. Otherwise the
  merge is abandoned, and its output, which no commit names, is removed.
- The replaced files are kept for readers that refer to them; `sweeping` removes them later.
  Until then they are restored if the merged file is lost (`restoring`).
- Another engine's unordered rows, in overlapping files or in huge row groups, are sorted once,
  since otherwise every read would have to sort them. Names are only hints: a file is examined
  unless its name is one of ours, and the caller remembers the result.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import arrow, errors, limits
from sparklog.clock import Clock
from sparklog.formats.record import FILE_SCHEMA
from sparklog.formats.values.columns import ColumnSet, Plan
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import restoring
from sparklog.storage.objects import ObjectMissing, Store, in_parallel, put_together
from sparklog.storage.reading import sorting
from sparklog.storage.reading.decode_bounds import light_rows
from sparklog.storage.reading.read import open_data_file, open_parquet
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path, maintenance_app_id
from sparklog.storage.table.topic_table import TopicTable

COMPACT_GROUPS_TOGETHER = 64  # groups of files merged by one commit,
COMPACT_TOGETHER_BYTES = 8 * limits.MIB  # of files in all these groups together
WHOLE_FILE_BYTES = 16 * limits.MIB  # of a file that is read with one request if each is billed
FILES_BEFORE_SPANS_END = 200  # in a partition; beyond that, records may outlast retention by more
SORT_FILES_BYTES = 16 * limits.GIB  # of another engine's files that the janitor sorts together
FOREIGN_GROUP_BYTES = 256 * limits.MIB  # of another engine's row group; larger ones are split

_ALL: Final = tuple(FILE_SCHEMA.names)

# ------------------------------------------------------------------------------ what to merge


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Neighbouring files of one partition to be merged into one."""

    topic_id: str
    partition: int
    files: tuple[TableFile, ...]
    end: int
    """The end offset of the partition, which is above all offsets in the files."""
    is_last: bool
    """True if the result is unlikely to be merged again, and so is compressed well."""
    columns: ColumnSet | None = None
    """The typed columns of the table."""

    @property
    def plan(self) -> Plan | None:
        """The typed columns of the result."""
        return data_file.plan_for(self.columns, self.files)


def choose(
    snapshot: TableSnapshot,
    since: TableSnapshot | None = None,
    *,
    compact_files: int = limits.COMPACT_FILES,
    target_bytes: int = limits.COMPACT_TARGET_BYTES,
    settled_before_us: int | None = None,
    everything: bool = False,
    borders: Sequence[int] = (),
    span_us: int | None = None,
) -> list[FileGroup]:
    """Returns disjoint groups of files to merge now, none of which spans a border.

    `compact_files` neighbours of about the same size are merged, into files of at most
    `target_bytes`. Fewer are merged if all of them are older than `settled_before_us`, because a
    quiet partition may never fill a tier. With `everything`, all files below half of `target_bytes`
    are merged, or at least encoded again, as are larger files that lack a typed column. A file
    without statistics, which every reader must open, is always rewritten with statistics.
    `borders`: for each partition, the offset up to which keys have been compacted. `span_us`: the
    maximum range of record timestamps in one file, because retention removes files as a whole; a
    partition whose timestamps vary so much that this leaves it with many files is merged anyway.
    `since`: an older snapshot that has already been examined; partitions with unchanged files are
    skipped.
    """
    groups: list[FileGroup] = []
    for partition, files in _changed(snapshot, since):
        border = borders[partition] if borders else 0
        packs = [
            [file] for file in files if not _is_known(file) and file.size_bytes <= target_bytes
        ]
        span = span_us if len(files) <= FILES_BEFORE_SPANS_END else None
        for run in _runs(files, target_bytes, border, span):
            if everything:
                packs += _packs(run, target_bytes)
            else:
                packs += _tiered(run, compact_files, target_bytes) or _settled(
                    run, target_bytes, settled_before_us
                )
        if everything:
            chosen = {file.path for pack in packs for file in pack}
            packs += [
                [file]
                for file in snapshot.unfilled(files)
                if _is_known(file) and file.path not in chosen
            ]
        groups += [
            FileGroup(
                topic_id=snapshot.topic_id or "",
                partition=partition,
                files=tuple(pack),
                end=snapshot.ends[partition],
                is_last=everything or 2 * _size(pack) > target_bytes,
                columns=snapshot.columns,
            )
            for pack in packs
        ]
    return groups


def _changed(
    snapshot: TableSnapshot, since: TableSnapshot | None
) -> Iterator[tuple[int, tuple[TableFile, ...]]]:
    """Yields the partitions whose files differ from those in an older snapshot of the table."""
    known = since.files if since is not None else ()
    for partition, files in enumerate(snapshot.files):
        # Snapshots of one table share the files of partitions that have not changed.
        if partition >= len(known) or files is not known[partition]:
            yield partition, files


def _is_known(file: TableFile) -> bool:
    return file.first is not None and file.last is not None


def _size(files: Sequence[TableFile]) -> int:
    return sum(file.size_bytes for file in files)


def _runs(
    files: Sequence[TableFile], target_bytes: int, border: int, span_us: int | None
) -> list[list[TableFile]]:
    """Returns mergeable neighbours: up to half the target, with statistics, without overlap."""
    runs: list[list[TableFile]] = [[]]
    end = -1
    for file in files:
        if file.first is None or file.last is None:
            continue
        is_far = span_us is not None and _span_us([*runs[-1], file]) > span_us
        if file.first <= end:
            runs[-1] = runs[-1][:-1]
            runs.append([])
        elif 2 * file.size_bytes > target_bytes:
            runs.append([])
        elif end < border <= file.first or is_far:
            runs.append([file])
        else:
            runs[-1].append(file)
        end = max(end, file.last)
    return [run for run in runs if run]


def _span_us(files: Sequence[TableFile]) -> int:
    """Returns the range of timestamps in the files, according to their statistics."""
    return max(file.newest_us for file in files) - min(file.oldest_us for file in files)


def _tiered(
    run: Sequence[TableFile], compact_files: int, target_bytes: int
) -> list[list[TableFile]]:
    """Returns groups of neighbours in the smallest tier that has enough, or in lower tiers."""
    tiers = [int(math.log(max(file.size_bytes, 1), max(compact_files, 2))) for file in run]
    for tier in sorted(set(tiers)):
        packs = [
            pack
            for is_low, stretch in itertools.groupby(
                zip(tiers, run, strict=True), key=lambda pair: pair[0] <= tier
            )
            if is_low
            for pack in _packs([file for _, file in stretch], target_bytes)
            if (len(pack) >= compact_files or 2 * _size(pack) > target_bytes) and _doubles(pack)
        ]
        if packs:
            return packs
    return []


def _settled(
    run: Sequence[TableFile], target_bytes: int, before_us: int | None
) -> list[list[TableFile]]:
    """Returns old neighbours that a merge at least doubles; leaves a few, decreasing in size."""
    old = list(itertools.takewhile(lambda file: file.modified_us < (before_us or 0), run))
    for start in range(len(old)):
        pack = _packs(old[start:], target_bytes)[0]
        if _doubles(pack):
            return [pack]
    return []


def _packs(files: Sequence[TableFile], target_bytes: int) -> list[list[TableFile]]:
    """Groups neighbours up to the target size."""
    packs: list[list[TableFile]] = []
    free_bytes = 0
    for file in files:
        if not packs or file.size_bytes > free_bytes:
            packs.append([])
            free_bytes = target_bytes
        packs[-1].append(file)
        free_bytes -= file.size_bytes
    return packs


def _doubles(pack: Sequence[TableFile]) -> bool:
    return 2 * max(file.size_bytes for file in pack) <= _size(pack)


# ------------------------------------------------------------------------------ merging


@dataclass(frozen=True, slots=True)
class Merge:
    """A group, and the files written to replace it."""

    group: FileGroup
    files: tuple[TableFile, ...] = ()
    """Empty if the group has no rows; its files are then only removed."""
    failure: errors.SparklogError | ObjectMissing | None = None
    """The error that prevented the merge; None if it succeeded."""


def together(groups: Sequence[FileGroup]) -> Iterator[list[FileGroup]]:
    """Yields lists of groups to be merged by one commit each: small groups together."""
    found: list[FileGroup] = []
    size = 0
    for group in groups:
        size += _size(group.files)
        is_full = len(found) >= COMPACT_GROUPS_TOGETHER
        if found and (is_full or size > COMPACT_TOGETHER_BYTES):
            yield found
            found, size = [], _size(group.files)
        found.append(group)
    if found:
        yield found


def compact(table: TopicTable, groups: Sequence[FileGroup]) -> list[TableFile]:
    """Merges each group's files into one, and commits all merges together. Returns the new files.

    Raises what `merge` and `commit` raise.
    """
    merges = merge(table.store, table.topic, groups, clock=table.clock)
    return [file for each in commit(table, merges) for file in each.files]


def merge(store: Store, topic: str, groups: Sequence[FileGroup], *, clock: Clock) -> list[Merge]:
    """Writes a file for each group, all made durable together; does not need the table's log.

    A failure to merge a group is part of the result. Raises what `put_together` raises.
    """
    found = in_parallel(
        store, partial(_try_merge, store, topic), groups, at_once=limits.TABLE_REQUESTS_AT_ONCE
    )
    merges: list[Merge] = []
    objects: list[tuple[str, pa.Buffer]] = []
    for group, outcome in zip(groups, found, strict=True):
        if isinstance(outcome, errors.SparklogError | ObjectMissing):
            merges.append(Merge(group, failure=outcome))
        elif outcome is None:
            merges.append(Merge(group))
        else:
            file = data_file.new_file(
                outcome, topic_id=group.topic_id, partition=group.partition, clock=clock
            )
            merges.append(Merge(group, (file,)))
            objects.append((data_path(topic, file), outcome.data))
    _put(store, objects, clock)
    return merges


def commit(table: TopicTable, merges: Sequence[Merge]) -> list[Merge]:
    """Commits the merges together, and returns those that were committed.

    A merge is left out if another commit replaced or removed one of its group's files; its new file
    is removed. Once the others are committed, the failure of a merge is raised: `MissingObject` for
    an active file that does not exist, `CorruptObject` for one that differs from the log, or a
    store error. Raises what `TopicTable.commit` raises, and `CorruptObject` if a merged file is
    already lost.
    """
    failures: list[errors.SparklogError] = []
    for each in merges:
        if isinstance(each.failure, ObjectMissing):
            if _are_active(each.group, table.refresh()):
                reason = "the table names it"
                failures.append(errors.MissingObject(path=each.failure.path, reason=reason))
        elif each.failure is not None:
            failures.append(each.failure)
    merged = [each for each in merges if each.failure is None]
    done = _replace(table, merged) if merged else []
    for failure in failures:
        raise failure
    return done


def _try_merge(
    store: Store, topic: str, group: FileGroup
) -> data_file.Encoded | errors.SparklogError | ObjectMissing | None:
    try:
        return _merge(store, topic, group)
    except (errors.SparklogError, ObjectMissing) as error:
        return error


def _put(store: Store, objects: Sequence[tuple[str, pa.Buffer]], clock: Clock) -> None:
    """Puts new files durably together; deletes all of them if one fails."""
    try:
        put_together(store, objects, clock=clock)
    except Exception:
        with contextlib.suppress(errors.SparklogError):  # the sweeper removes them as orphans
            store.delete(path for path, _ in objects)
        raise


def _replace(table: TopicTable, merges: Sequence[Merge]) -> list[Merge]:
    """Commits the merges whose files are still active; deletes the new files of the others."""
    wanted = list(merges)

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        nonlocal wanted
        wanted = [each for each in merges if _are_active(each.group, snapshot)]
        if not wanted:
            return None
        return TableChange(
            adds=tuple(file for each in wanted for file in each.files),
            removes=tuple(file for each in wanted for file in each.group.files),
            txns={maintenance_app_id(wanted[0].group.topic_id): snapshot.version + 1},
            data_change=False,
            operation="OPTIMIZE",
        )

    try:
        table.commit(decide)
    except errors.Retriable:
        wanted = []
        raise
    finally:
        _delete(table, [file for each in merges if each not in wanted for file in each.files])
        pa.default_memory_pool().release_unused()  # it would hold on to the merge's memory
    restoring.verify(
        table,
        [file for each in wanted for file in each.files],
        [file for each in wanted for file in each.group.files],
    )
    return wanted


def _delete(table: TopicTable, files: Sequence[TableFile]) -> None:
    table.store.delete([data_path(table.topic, file) for file in files])


def _are_active(group: FileGroup, snapshot: TableSnapshot) -> bool:
    if snapshot.topic_id != group.topic_id or group.partition >= snapshot.partitions:
        return False
    active = {file.path for file in snapshot.files[group.partition]}
    return all(file.path in active for file in group.files)


def _merge(store: Store, topic: str, group: FileGroup) -> data_file.Encoded | None:
    """Encodes all rows of the group's files as one file; None if there are none."""
    level = data_file.SMALL_LEVEL if group.is_last else data_file.FAST_LEVEL
    plan = group.plan
    schemas = schema_texts.for_rewrite(store, plan)
    encoder = data_file.Encoder(level=level, plan=plan, schemas=schemas)
    total = 0
    for file in group.files:
        for batch in read_rows(store, data_path(topic, file), file, group.end):
            encoder.add(batch)
            total += batch.num_rows
    if not total:
        return None
    encoded = encoder.finish()
    data_file.check_rewrite(encoded, group.files)
    return encoded


def read_rows(
    store: Store, path: str, file: TableFile, end: int, *, columns: Sequence[str] = _ALL
) -> Iterator[pa.RecordBatch]:
    """Yields the file's rows in offset order, whatever its writer and its own order.

    Rows have the named columns of `FILE_SCHEMA`, of which `offset` must be one. Repeated reads of a
    file yield the same rows in the same order, whatever the columns. Raises `ObjectMissing`, and
    `CorruptObject` if the file differs from the log, or has offsets at or beyond `end`.
    """
    try:
        whole_bytes = limits.SMALL_FILE_BYTES if store.is_local else WHOLE_FILE_BYTES
        with open_data_file(store, path, file, whole_bytes=whole_bytes) as source:
            parquet = open_parquet(source, is_local=store.is_local, pre_buffer=False)
            offsets = _offsets(parquet, path)
            is_sorted = _rises(offsets)
            _check_offsets(offsets if is_sorted else np.sort(offsets), path, file, end)
            missing = len(offsets)
            batches = (
                _batches(parquet, columns)
                if is_sorted
                else _sorted_batches(parquet, columns, offsets)
            )
            for batch in batches:
                if batch.num_rows:
                    conformed = _conform(batch, columns)
                    if "timestamp" in columns:
                        _check_times(conformed.column("timestamp"), path)
                    missing -= batch.num_rows
                    yield conformed
            if missing:
                check = f"it holds {len(offsets)} offsets, but {missing} fewer rows"
                raise errors.CorruptObject(path=path, check=check)
    except errors.SparklogError:
        raise
    except FileNotFoundError as error:
        raise ObjectMissing(path) from error
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise errors.CorruptObject(
            path=path, check=f"it is not a complete data file: {error}"
        ) from error


def _batches(parquet: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows in file order, in small batches."""
    for number in range(parquet.num_row_groups):
        yield from _group_batches(parquet, number, columns)


def _group_batches(
    parquet: pq.ParquetFile, number: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    yield from parquet.iter_batches(
        batch_size=min(light_rows(parquet.metadata, [number]), limits.ROW_GROUP_ROWS),
        row_groups=[number],
        columns=list(columns),
        use_threads=False,
    )


def _sorted_batches(
    parquet: pq.ParquetFile, columns: Sequence[str], offsets: npt.NDArray[np.int64]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows in offset order, reading each row group once."""
    parts = []
    at = 0
    for number in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(number).num_rows
        inside = offsets[at : at + rows]
        at += rows
        if rows:
            parts.append(
                sorting.RowChunk(
                    first=int(inside.min()),
                    last=int(inside.max()),
                    rises=_rises(inside),
                    read=partial(_group_batches, parquet, number, columns),
                )
            )
    return sorting.in_order(parts, batch_rows=limits.ROW_GROUP_ROWS)


def _conform(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Returns the rows with `FILE_SCHEMA`'s types; in Delta, a file may lack an all-null column."""
    schema = pa.schema([FILE_SCHEMA.field(name) for name in columns])
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# ------------------------------------------------------------------------------ sorting


def disordered(
    store: Store,
    topic: str,
    snapshot: TableSnapshot,
    since: TableSnapshot | None = None,
    *,
    in_order: set[str],
    target_bytes: int = limits.COMPACT_TARGET_BYTES,
) -> FileGroup | None:
    """Returns another engine's files in one partition that every read has to sort.

    They overlap, or their rows are unordered or in huge row groups. None if there are none, or only
    ones of more than `SORT_FILES_BYTES` together.

    Args:
        since: an older snapshot in which there were none; partitions with unchanged files are
            skipped.
        in_order: paths of files that have been examined and need no sorting; updated, and reduced
            to files that the table names.

    Raises `CorruptObject` for a file that cannot be examined.
    """
    if in_order:  # usually empty: only other engines' files are examined
        in_order &= {file.path for files in snapshot.files for file in files}
    for partition, files in _changed(snapshot, since):
        for found in _overlapping(files):
            if all(_has_our_name(file, snapshot) or file.path in in_order for file in found):
                continue
            if _size(found) > SORT_FILES_BYTES:
                continue
            if len(found) == 1 and not _must_be_sorted(store, topic, found[0]):
                in_order.add(found[0].path)
                continue
            return FileGroup(
                topic_id=snapshot.topic_id or "",
                partition=partition,
                files=tuple(found),
                end=snapshot.ends[partition],
                is_last=2 * _size(found) > target_bytes,
                columns=snapshot.columns,
            )
    return None


def _overlapping(files: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """Yields files with overlapping offsets together, and every other file on its own."""
    found: list[TableFile] = []
    end = -1
    for file in files:
        if file.first is None or file.last is None:
            yield [file]
            continue
        if found and file.first > end:
            yield found
            found = []
        found.append(file)
        end = max(end, file.last)
    if found:
        yield found


def _has_our_name(file: TableFile, snapshot: TableSnapshot) -> bool:
    ours = f"partition={file.partition}/{snapshot.topic_id}-{file.first}-{file.last}-"
    return file.path.startswith(ours)


def _must_be_sorted(store: Store, topic: str, file: TableFile) -> bool:
    path = data_path(topic, file)
    try:
        with store.open(path) as source:
            parquet = open_parquet(source, is_local=store.is_local, pre_buffer=False)
            metadata = parquet.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            if any(group.total_byte_size > FOREIGN_GROUP_BYTES for group in groups):
                return True
            return not _rises(_offsets(parquet, path))
    except (FileNotFoundError, ObjectMissing):
        return False  # the process that removed it has replaced it
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise errors.CorruptObject(
            path=path, check=f"it is not a complete data file: {error}"
        ) from error


def put_in_order(
    table: TopicTable,
    group: FileGroup,
    *,
    target_bytes: int = limits.COMPACT_TARGET_BYTES,
    border: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[TableFile, ...]:
    """Replaces the group's files with sorted files of about `target_bytes`, and returns these.

    None of them spans `border`. Returns none if the work was abandoned, because another commit
    replaced or removed one of the files, or because of `should_stop`. Raises what `compact` raises.
    """
    merged: list[TableFile] = []
    is_done = False
    try:
        for encoded in _encoded(table, group, target_bytes, border):
            merged.append(
                data_file.put_file(
                    table.store,
                    encoded,
                    topic=table.topic,
                    topic_id=group.topic_id,
                    partition=group.partition,
                    clock=table.clock,
                )
            )
            if should_stop():
                return ()
        is_done = True
    except ObjectMissing as error:
        if _are_active(group, table.refresh()):
            raise errors.MissingObject(path=error.path, reason="the table names it") from error
        return ()
    finally:
        if not is_done:
            _delete(table, merged)
    return tuple(merged) if _replace(table, [Merge(group, tuple(merged))]) else ()


def _encoded(
    table: TopicTable, group: FileGroup, target_bytes: int, border: int
) -> Iterator[data_file.Encoded]:
    """Encodes all rows of the group's files, in order, as several files."""
    parts = [
        sorting.RowChunk(
            first=file.first or 0,
            last=group.end if file.last is None else file.last,
            rises=True,
            read=partial(read_rows, table.store, data_path(table.topic, file), file, group.end),
        )
        for file in group.files
    ]
    level = data_file.SMALL_LEVEL if group.is_last else data_file.FAST_LEVEL
    # Rows in the encoder's buffer, and further ones, are added once the target has been reached.
    capacity_bytes = target_bytes + 4 * limits.ROW_GROUP_BYTES
    plan = group.plan
    schemas = schema_texts.for_rewrite(table.store, plan)
    encoder: data_file.Encoder | None = None
    began_beyond = False

    def finished(one: data_file.Encoder) -> data_file.Encoded:
        encoded = one.finish()
        data_file.check_rewrite(encoded, group.files)
        return encoded

    for batch in sorting.in_order(parts, batch_rows=limits.ROW_GROUP_ROWS):
        offsets = arrow.as_numpy(batch.column("offset"))
        if not _rises(offsets):  # batches never share an offset, but one may contain it twice
            paths = ", ".join(file.path for file in group.files)
            raise errors.CorruptObject(
                path=table.folder, check=f"it holds an offset twice: {paths}"
            )
        cut = int(np.searchsorted(offsets, border))
        for rows in (batch.slice(0, cut), batch.slice(cut)):
            if not rows.num_rows:
                continue
            is_beyond = rows.column("offset")[0].as_py() >= border
            if encoder is not None and (
                encoder.size_bytes >= target_bytes or (is_beyond and not began_beyond)
            ):
                yield finished(encoder)
                encoder = None
            if encoder is None:
                encoder = data_file.Encoder(
                    level=level, capacity_bytes=capacity_bytes, plan=plan, schemas=schemas
                )
                began_beyond = is_beyond
            encoder.add(rows)
    if encoder is not None:
        yield finished(encoder)


# ------------------------------------------------------------------------------ checking


def _offsets(parquet: pq.ParquetFile, path: str) -> npt.NDArray[np.int64]:
    column = parquet.read(columns=["offset"], use_threads=False).column("offset").cast(pa.int64())
    if column.null_count:
        raise errors.CorruptObject(path=path, check="it holds a record without an offset")
    return arrow.as_numpy(column)


def _rises(offsets: npt.NDArray[np.int64]) -> bool:
    return bool(np.all(offsets[1:] > offsets[:-1]))


def _check_offsets(offsets: npt.NDArray[np.int64], path: str, file: TableFile, end: int) -> None:
    """Raises `CorruptObject` if the sorted offsets differ from those in the log."""
    if not _rises(offsets):
        raise errors.CorruptObject(path=path, check="it holds an offset twice")
    rows = len(offsets)
    first, last = (int(offsets[0]), int(offsets[-1])) if rows else (None, None)
    if (rows, first, last) != (
        rows if file.rows is None else file.rows,
        first if file.first is None else file.first,
        last if file.last is None else file.last,
    ):
        raise errors.CorruptObject(
            path=path,
            check=f"it holds {rows} rows of offsets {first} to {last}, but the log says "
            f"{file.rows}, {file.first} to {file.last}",
        )
    if rows and (offsets[0] < 0 or offsets[-1] >= end):
        check = f"it holds offsets {first} to {last}, but its partition ends at {end}"
        raise errors.CorruptObject(path=path, check=check)


def _check_times(times: pa.Array, path: str) -> None:
    """Raises `CorruptObject` if a row has no timestamp, or one outside the years 1 to 9999."""
    if times.null_count:
        raise errors.CorruptObject(path=path, check="it holds a record without a time")
    bounds = pc.min_max(times.cast(pa.int64()))
    for bound_us in (bounds["min"].as_py(), bounds["max"].as_py()):
        if not limits.TIMESTAMP_MIN_US <= bound_us <= limits.TIMESTAMP_MAX_US:
            check = f"it holds timestamp {bound_us} µs, outside the years 1 to 9999"
            raise errors.CorruptObject(path=path, check=check)
