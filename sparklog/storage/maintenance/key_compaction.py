"""Key compaction: keeps the last record of each key in a partition, without changing offsets.

Rules, which follow Kafka's log cleaner where it has an equivalent:

- A *pass* covers all of a partition's rows in the table below an offset, its end. It removes a
  record if it covers one with the same key at a higher offset. Records without a key are kept. Keys
  are compared byte for byte, not by hash.
- A partition is compacted when more than `min.cleanable.dirty.ratio` of its bytes are dirty: at or
  beyond the end of the last pass. That end is the `txn` `sparklog/<topic id>/<p>/compacted`, so the
  table itself records it, and merges of small files do not span it. Records younger than
  `min.compaction.lag.ms`, and all from the first file with such records on, wait for a later pass.
- A pass is one commit, or a few for a very large partition. Their order does not matter, because
  the record that supersedes another is kept; the last commit records the end of the pass. A commit
  is made only if, in the version right before it, exactly the files that the pass has read or
  written contain the partition's rows below the end, the topic is still compacted, and its table is
  not append-only. Otherwise the pass is abandoned, and its new files are removed.
- Removed rows are in no other file, so `dataChange` is true for removed files. It is false for
  added files, since all their rows existed before. So another engine's stream never reads a row
  twice, and one that ignores deletes continues.
- Memory is bounded except for three bytes per record: keys are compared in parts, by hash
  (`newest_records`).

**Tombstones** (records with a key but no value). The `txn` `…/tombstones` is a horizon H, set at
time t by a pass that left tombstones below H, its end. A later pass removes a tombstone if

1. it is the only record of its key among all rows of the pass, including those below it;
2. it is below H, and t is at least `delete.retention.ms` ago.

The record right below the table's end does not count as a tombstone: it is kept while it is the
last one. Kafka's cleaner leaves the active segment alone, and librdkafka's consumers rely on a
record there: their position ends up right after the last record, so it would remain below the end
of a log that ends in a gap.

If tombstones remain once t is that old, H and t become the end and the time of that pass. So a
tombstone waits for one to two times `delete.retention.ms`, regardless of the number of passes.

No deleted key comes back, for these reasons. *In the table*: let a commit remove a tombstone of key
k. By 1, and because the commit is made only on the files that were read, no other record of k is
below the end in the version right before the commit, and so none is in later versions. Records are
published in offset order, so later ones are beyond the end and newer than the tombstone. Merges
move rows and create none. The records that the tombstone deletes were removed in an earlier
version, or never existed. *For a reader* of the log: it saw an older record of k in a version
before the commit at t, which kept one record of each key below H: for k, the tombstone or a later
record. Until that one is removed, after `delete.retention.ms` or more, the reader finds it or a
newer one. (As in Kafka, a reader that takes longer to get from an old record to the end may miss a
delete. Records from an older version of the table, or from a broker's memory, count as read at that
earlier time.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog import arrow, errors, limits
from sparklog.clock import Clock
from sparklog.formats.values.columns import ColumnSet
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import file_compaction, restoring
from sparklog.storage.maintenance.newest_records import Newest, Records
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import GapCause, TableFile, TableSnapshot
from sparklog.storage.table import data_file, gaps
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import (
    compacted_app_id,
    data_path,
    maintenance_app_id,
    tombstones_app_id,
)
from sparklog.storage.table.topic_table import TopicTable

COMPACT_STEP_BYTES = 1 * limits.GIB  # of files that one commit of a key compaction replaces
_MILLISECONDS_MAX = 2**63 - 1  # an int64, as in Kafka

# ------------------------------------------------------------------------------ when to compact


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """The settings of a compacted topic, under Kafka's names."""

    min_cleanable_dirty_ratio: float = limits.MIN_CLEANABLE_DIRTY_RATIO
    min_compaction_lag_ms: int = limits.MIN_COMPACTION_LAG_MS
    max_compaction_lag_ms: int = _MILLISECONDS_MAX
    delete_retention_ms: int = limits.DELETE_RETENTION_MS


def policy_of(config: Mapping[str, str]) -> CompactionPolicy | None:
    """Returns the policy of a topic's configuration, or None if it is not compacted.

    Raises `BadOption` for an invalid number.
    """
    if "compact" not in config.get("cleanup.policy", "").split(","):
        return None
    usual = CompactionPolicy()
    return CompactionPolicy(
        min_cleanable_dirty_ratio=_number(
            config, "min.cleanable.dirty.ratio", float, usual.min_cleanable_dirty_ratio
        ),
        min_compaction_lag_ms=_number(
            config, "min.compaction.lag.ms", int, usual.min_compaction_lag_ms
        ),
        max_compaction_lag_ms=_number(
            config, "max.compaction.lag.ms", int, usual.max_compaction_lag_ms
        ),
        delete_retention_ms=_number(config, "delete.retention.ms", int, usual.delete_retention_ms),
    )


_Number = TypeVar("_Number", int, float)


def _number(
    config: Mapping[str, str], key: str, kind: Callable[[str], _Number], usual: _Number
) -> _Number:
    value = config.get(key)
    if value is None:
        return usual
    try:
        return kind(value)
    except ValueError:
        raise errors.BadOption(option=key, value=value, reason="expected a number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionProgress:
    """The progress that earlier passes recorded in the table; times are by the brokers' clocks."""

    compacted: int = 0
    """The end of the last pass, below which it left one record of each key."""
    compacted_ms: int = 0
    horizon: int = 0
    """The offset below which tombstones have been waiting since `horizon_ms`."""
    horizon_ms: int | None = None

    def has_waited(self, retention_ms: int, at_ms: int) -> bool:
        """Returns whether tombstones below the horizon may be removed at that time."""
        return self.horizon_ms is not None and at_ms - self.horizon_ms >= retention_ms

    def had_its_pass(self, retention_ms: int) -> bool:
        """Returns whether the last pass was later than the horizon's and could remove them."""
        is_later = self.horizon_ms is None or self.compacted_ms > self.horizon_ms
        return is_later and self.has_waited(retention_ms, self.compacted_ms)


def progress_of(table: TopicTable, topic_id: str, partition: int) -> CompactionProgress:
    """Returns the progress in the last read version of `table`."""
    compacted = table.txn(compacted_app_id(topic_id, partition))
    tombstones = table.txn(tombstones_app_id(topic_id, partition))
    return CompactionProgress(
        compacted=compacted.version if compacted else 0,
        compacted_ms=(compacted.last_updated or 0) if compacted else 0,
        horizon=tombstones.version if tombstones else 0,
        horizon_ms=tombstones.last_updated if tombstones else None,
    )


def borders(table: TopicTable, snapshot: TableSnapshot) -> tuple[int, ...]:
    """Returns the end of the last pass for each partition, which no merge should span.

    `snapshot` determines the partitions.
    """
    return tuple(
        progress_of(table, snapshot.topic_id or "", partition).compacted
        for partition in range(snapshot.partitions)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPass:
    """A compaction of one partition that is to be run."""

    topic_id: str
    partition: int
    files: tuple[TableFile, ...]
    """All files that may have rows below `end`, in the snapshot's order."""
    end: int
    table_end: int
    progress: CompactionProgress
    """The progress before the pass."""
    tombstones_go: bool
    """True to remove tombstones below the horizon that are the only record of their key."""
    target_bytes: int
    columns: ColumnSet | None = None
    """The typed columns of the table."""


def choose(
    table: TopicTable,
    *,
    compact_files: int = limits.COMPACT_FILES,
    target_bytes: int = limits.COMPACT_TARGET_BYTES,
    settled_before_us: int | None = None,
    everything: bool = False,
    before_us: int | None = None,
) -> list[CompactionPass]:
    """Returns the passes to run now, on the last read version of `table`.

    A partition qualifies if its dirty ratio is high enough, and its dirty part has at least
    `compact_files` files, exceeds half of `target_bytes`, or has a file older than
    `settled_before_us`. So a topic with a record per second is not compacted every second. It also
    qualifies if dirty records have waited as long as the topic allows, or if tombstones have waited
    long enough without a pass since. With `everything`, dirty records suffice. `before_us`: records
    in files written since then wait for a later pass. No partition of an append-only table
    qualifies. Raises `BadOption` if the topic's configuration is invalid.
    """
    snapshot, now_us = table.snapshot, table.clock.now_us()
    policy = policy_of(snapshot.config)
    if policy is None or snapshot.topic_id is None or snapshot.append_only:
        return []
    found = []
    for partition, files in enumerate(snapshot.files):
        progress = progress_of(table, snapshot.topic_id, partition)
        end = _end(files, snapshot.ends[partition], progress, policy, now_us, before_us)
        taken = tuple(file for file in files if file.first is None or file.first < end)
        dirty = [file for file in taken if file.last is None or file.last >= progress.compacted]
        is_due = bool(dirty) if everything else _is_dirty_enough(taken, dirty, policy)
        if is_due and not everything:
            is_due = (
                len(dirty) >= compact_files
                or 2 * _size(dirty) > target_bytes
                or min(file.modified_us for file in dirty) < (settled_before_us or 0)
            )
        is_due = is_due or _is_overdue(dirty, progress, policy, now_us)
        waited = progress.has_waited(policy.delete_retention_ms, now_us // 1_000)
        had_its_pass = progress.had_its_pass(policy.delete_retention_ms)
        if taken and (is_due or (waited and not had_its_pass)):
            found.append(
                CompactionPass(
                    topic_id=snapshot.topic_id,
                    partition=partition,
                    files=taken,
                    end=end,
                    table_end=snapshot.ends[partition],
                    progress=progress,
                    tombstones_go=waited,
                    target_bytes=target_bytes,
                    columns=snapshot.columns,
                )
            )
    return found


def _end(
    files: Sequence[TableFile],
    table_end: int,
    progress: CompactionProgress,
    policy: CompactionPolicy,
    now_us: int,
    before_us: int | None,
) -> int:
    """Returns the end of a pass that excludes records younger than the lag, and newer files."""
    end = table_end
    lag_ms = policy.min_compaction_lag_ms
    for file in files if lag_ms or before_us is not None else ():
        is_young = lag_ms and file.newest_us > now_us - lag_ms * 1_000
        is_young = is_young or (before_us is not None and file.modified_us >= before_us)
        if is_young and (file.last is None or file.last >= progress.compacted):
            end = min(end, file.first or 0)
    return max(end, progress.compacted)


def _is_dirty_enough(
    files: Sequence[TableFile], dirty: Sequence[TableFile], policy: CompactionPolicy
) -> bool:
    return bool(dirty) and _size(dirty) > policy.min_cleanable_dirty_ratio * _size(files)


def _is_overdue(
    dirty: Sequence[TableFile], progress: CompactionProgress, policy: CompactionPolicy, now_us: int
) -> bool:
    """Returns whether a record has waited for its pass as long as the topic allows.

    Records may have old timestamps, and a flush of such records must not trigger a pass: records
    that arrived after the last pass have waited at most since then.
    """
    before_us = now_us - policy.max_compaction_lag_ms * 1_000
    oldest_us = min((file.oldest_us for file in dirty), default=now_us)
    return progress.compacted_ms * 1_000 <= before_us and oldest_us <= before_us


def _size(files: Sequence[TableFile]) -> int:
    return sum(file.size_bytes for file in files)


# ------------------------------------------------------------------------------ a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionStep:
    """Newly written files that replace others in one commit of a pass."""

    adds: tuple[TableFile, ...]
    removes: tuple[TableFile, ...]
    rows: int
    """The number of records that are only in the replaced files."""
    txns: Mapping[str, int]
    """The progress that the last step of a pass records; empty in the others."""


def compact(
    table: TopicTable,
    each: CompactionPass,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_commit: Callable[[Sequence[TableFile]], None] = lambda _: None,
) -> int | None:
    """Runs the pass and commits it. Returns the number of removed records.

    None if it was abandoned, because the partition's files or the topic have changed, or because of
    `should_stop`. Calls `on_commit` and raises what `commit` raises.
    """
    steps = rewrite(table.store, table.topic, each, clock=table.clock, should_stop=should_stop)
    return commit(table, each, steps, on_commit=on_commit)


def commit(
    table: TopicTable,
    each: CompactionPass,
    steps: Iterable[CompactionStep],
    *,
    on_commit: Callable[[Sequence[TableFile]], None] = lambda _: None,
) -> int | None:
    """Commits the steps of a pass, each before the next is requested.

    Calls `on_commit` after each commit, with the files that it added. Returns the number of removed
    records; None if the pass was abandoned, because the partition's files or the topic have
    changed. Raises what `rewrite` and `TopicTable.commit` raise, and `MissingObject` for an active
    file that does not exist.
    """
    paths = {file.path for file in each.files}
    removed = 0
    try:
        for step in steps:
            if not _is_committed(table, each, paths, step):
                return None
            on_commit(step.adds)
            restoring.verify(table, step.adds, step.removes)
            paths -= {file.path for file in step.removes}
            paths |= {file.path for file in step.adds}
            removed += step.rows
    except _Abandoned:
        return None
    except ObjectMissing as error:
        table.refresh()
        if _is_as_it_was(table, each, {file.path for file in each.files}):
            raise errors.MissingObject(path=error.path, reason="the table names it") from error
        return None
    return removed


def _is_committed(
    table: TopicTable, each: CompactionPass, paths: set[str], step: CompactionStep
) -> bool:
    """Replaces a step's files and records the progress; removes its new files if not allowed to.

    `paths` are the files expected to contain the partition's rows below the end.
    """
    is_wanted = True  # the outcome is unknown, unless `decide` or the commit refuses

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        nonlocal is_wanted
        is_wanted = _is_as_it_was(table, each, paths)
        if not is_wanted:
            return None
        cause = GapCause.COMPACTION
        until = max(each.end, snapshot.gaps.get((each.partition, cause), 0))
        return TableChange(
            adds=step.adds,
            removes=step.removes,
            txns={
                maintenance_app_id(each.topic_id): snapshot.version + 1,
                gaps.app_id(each.topic_id, each.partition, cause): until,
                **step.txns,
            },
            data_change=False,
            drops_rows=True,
            operation="COMPACT KEYS",
        )

    try:
        table.commit(decide)
    except errors.Retriable:
        is_wanted = False
        raise
    finally:
        if not is_wanted:
            _delete(table.store, table.topic, step.adds)
    return is_wanted


def discard(table: TopicTable, steps: Iterable[CompactionStep]) -> None:
    """Removes the new files of written steps that `commit` did not request."""
    for step in steps:
        _delete(table.store, table.topic, step.adds)


def _delete(store: Store, topic: str, files: Iterable[TableFile]) -> None:
    with contextlib.suppress(errors.SparklogError):  # otherwise they are swept as orphans
        store.delete([data_path(topic, file) for file in files])


class _Abandoned(Exception):
    """The pass ends without its last commit."""


def _is_as_it_was(table: TopicTable, each: CompactionPass, paths: set[str]) -> bool:
    """Returns whether exactly the files with these paths contain the rows below the end."""
    snapshot = table.snapshot
    if snapshot.topic_id != each.topic_id or policy_of(snapshot.config) is None:
        return False
    if snapshot.append_only:
        return False
    files = snapshot.files[each.partition]
    taken = {file.path for file in files if file.first is None or file.first < each.end}
    return taken == paths and progress_of(table, each.topic_id, each.partition) == each.progress


@dataclass(frozen=True, slots=True)
class _Input:
    """A file, and its rows to keep."""

    file: TableFile
    stays: npt.NDArray[np.bool_]

    @property
    def left(self) -> int:
        return int(np.count_nonzero(self.stays))

    @property
    def loses(self) -> bool:
        return not self.stays.all()

    @property
    def size_bytes(self) -> int:
        """The estimated size of the kept rows."""
        return self.file.size_bytes * self.left // max(len(self.stays), 1)


def rewrite(
    store: Store,
    topic: str,
    each: CompactionPass,
    *,
    clock: Clock,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[CompactionStep]:
    """Yields the steps of a pass for `commit`, each once its new files are durable.

    Does not need the table's log. Raises `ObjectMissing` for a file that does not exist, and
    `CorruptObject` for one that differs from the log. `commit` abandons the pass once `should_stop`
    returns True.
    """
    yield from _Rewrite(store, topic, each, clock, should_stop).run()


class _Rewrite:
    def __init__(
        self,
        store: Store,
        topic: str,
        each: CompactionPass,
        clock: Clock,
        should_stop: Callable[[], bool],
    ) -> None:
        self._store = store
        self._topic = topic
        self._pass = each
        self._clock = clock
        self._should_stop = should_stop

    def run(self) -> Iterator[CompactionStep]:
        inputs, tombstones_stay = self._choose_rows()
        steps = list(_steps(list(_packs(inputs, self._pass.target_bytes))))
        for packs in steps[:-1]:
            yield self._step(packs, {})
        yield self._step(steps[-1] if steps else [], self._new_txns(tombstones_stay))

    def _new_txns(self, tombstones_stay: bool) -> dict[str, int]:
        each = self._pass
        txns = {compacted_app_id(each.topic_id, each.partition): each.end}
        if tombstones_stay and (each.progress.horizon_ms is None or each.tombstones_go):
            txns[tombstones_app_id(each.topic_id, each.partition)] = each.end
        return txns

    # -------------------------------------------------------------------------- choosing rows

    def _choose_rows(self) -> tuple[list[_Input], bool]:
        """Returns the rows to keep from each file, and whether tombstones are among them."""
        each = self._pass
        records = self._scan()
        for part in records.parts():
            newest = Newest(records)
            for position, batch in self._batches(["offset", "key"]):
                rows = np.flatnonzero(records.is_in(part, position, batch.num_rows))
                if len(rows):
                    chosen = batch.take(arrow.numbers(rows, pa.int64()))
                    offsets = arrow.as_numpy(chosen.column("offset"))
                    newest.add(chosen.column("key"), offsets, position + rows)
            newest.finish()
        stays, tombstones_stay = records.verdict(tombstones_go=each.tombstones_go)
        ends = np.cumsum(records.file_rows)
        parts = np.split(stays, ends[:-1]) if len(ends) else []
        inputs = [_Input(file, part) for file, part in zip(each.files, parts, strict=True)]
        return inputs, tombstones_stay

    def _scan(self) -> Records:
        """Reads all rows once, to count keys and find tombstones."""
        each = self._pass
        records = Records(end=each.end, table_end=each.table_end, horizon=each.progress.horizon)
        for _, batch in self._batches(["offset", "key", "value"], records.file_rows):
            records.add(batch)
        records.close()
        return records

    def _batches(
        self, columns: Sequence[str], counts: list[int] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields the rows of all files, each batch with the number of rows before it."""
        position = 0
        for file in self._pass.files:
            before = position
            path = data_path(self._topic, file)
            for batch in file_compaction.read_rows(
                self._store, path, file, self._pass.table_end, columns=columns
            ):
                if self._should_stop():
                    raise _Abandoned
                yield position, batch
                position += batch.num_rows
            if counts is not None:
                counts.append(position - before)

    # -------------------------------------------------------------------------- writing

    def _step(self, packs: Sequence[Sequence[_Input]], txns: Mapping[str, int]) -> CompactionStep:
        """Writes the new files of a step; leaves none of them if one fails."""
        adds: list[TableFile] = []
        is_done = False
        try:
            for pack in packs:
                if self._should_stop():
                    raise _Abandoned
                if any(one.left for one in pack):
                    adds.append(self._rewrite(pack))
            is_done = True
        finally:
            if not is_done:
                _delete(self._store, self._topic, adds)
        inputs = [one for pack in packs for one in pack]
        return CompactionStep(
            adds=tuple(adds),
            removes=tuple(one.file for one in inputs),
            rows=sum(len(one.stays) - one.left for one in inputs),
            txns=txns,
        )

    def _rewrite(self, pack: Sequence[_Input]) -> TableFile:
        """Writes the kept rows of the files as one file."""
        store, topic, each = self._store, self._topic, self._pass
        is_last = 2 * sum(one.size_bytes for one in pack) > each.target_bytes
        plan = data_file.plan_for(each.columns, (one.file for one in pack))
        encoder = data_file.Encoder(
            level=data_file.SMALL_LEVEL if is_last else data_file.FAST_LEVEL,
            plan=plan,
            schemas=schema_texts.for_rewrite(store, plan),
        )
        for one in pack:
            at = 0
            path = data_path(topic, one.file)
            for batch in file_compaction.read_rows(store, path, one.file, each.table_end):
                stays = one.stays[at : at + batch.num_rows]
                at += batch.num_rows
                if stays.all():
                    encoder.add(batch)
                elif stays.any():
                    encoder.add(batch.filter(arrow.booleans(stays)))
            if at != len(one.stays):
                check = f"it holds {at} rows, but held {len(one.stays)}"
                raise errors.CorruptObject(path=path, check=check)
        encoded = encoder.finish()
        assert encoded.rows == sum(one.left for one in pack)
        data_file.check_rewrite(encoded, [one.file for one in pack])
        return data_file.put_file(
            store,
            encoded,
            topic=topic,
            topic_id=each.topic_id,
            partition=each.partition,
            clock=self._clock,
        )


def _packs(inputs: Sequence[_Input], target_bytes: int) -> Iterator[list[_Input]]:
    """Yields neighbours to merge into one file; the first and the last of them lose rows.

    Files that overlap, or have no statistics, are rewritten individually.
    """
    pack: list[_Input] = []
    room_bytes, end = 0, 0
    for each in inputs:
        first, last = each.file.first, each.file.last
        is_free = first is not None and first >= end
        is_large = not each.loses and 2 * each.file.size_bytes > target_bytes
        if not is_free or is_large or each.size_bytes > room_bytes:
            yield from _trimmed(pack)
            pack, room_bytes = [], target_bytes
        if not is_large:
            pack.append(each)
            room_bytes -= each.size_bytes
        if first is None or last is None:
            room_bytes = 0
        end = max(end, 0 if last is None else last + 1)
    yield from _trimmed(pack)


def _trimmed(pack: Sequence[_Input]) -> Iterator[list[_Input]]:
    losing = [number for number, each in enumerate(pack) if each.loses]
    if losing:
        yield list(pack[losing[0] : losing[-1] + 1])


def _steps(packs: Sequence[list[_Input]]) -> Iterator[list[list[_Input]]]:
    """Yields the groups of files for each commit."""
    step: list[list[_Input]] = []
    size_bytes = 0
    for pack in packs:
        step.append(pack)
        size_bytes += _size([each.file for each in pack])
        if size_bytes >= COMPACT_STEP_BYTES:
            yield step
            step, size_bytes = [], 0
    if step:
        yield step
