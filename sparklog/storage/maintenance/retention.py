"""Retention and deletion of records, which move the log start of a partition.

Rules, which follow Kafka's `UnifiedLog` where it has an equivalent:

- Records are removed from the log start on, in offset order, whatever consumers have read. Records
  that are not yet in the table are kept.
- *Retention* removes whole files. By time: those whose newest record is older than `retention.ms`,
  or that were written before then if no record has a timestamp. By size: the oldest, as long as the
  remaining ones total at least `retention.bytes`. The newest file is removed by time only. A topic
  whose `cleanup.policy` does not include `delete` keeps all records.
- *Deletion* (Kafka's DeleteRecords) removes records below an offset. Files below it are removed,
  and a file with rows on both sides is replaced by one with the remaining rows. So no engine finds
  deleted records in the table, and after the grace period of removed files their bytes are gone.
- One commit removes the files and moves the `txn` `sparklog/<topic id>/<p>/start`. It is made only
  if, in the version right before it, exactly the chosen files contain the rows below the new start.
  Otherwise files are chosen again, and the new files are removed.
- No record is removed from an append-only table (`delta.appendOnly`): retention waits until the
  property is unset, and a deletion is an error. The log start does not move either, since it would
  hide records that the table has to keep. The current log start remains in effect.
- The log start never moves back. Rows below it that another engine brings back by restoring an
  older version are not records: readers skip them, and `sweep_below` removes them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sparklog import arrow, errors, limits
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import file_compaction, restoring
from sparklog.storage.objects import ObjectMissing
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.encoding import APPEND_ONLY_REASON
from sparklog.storage.table.names import data_path, maintenance_app_id, start_app_id
from sparklog.storage.table.topic_table import TopicTable

_RETENTION_SPANS = 10  # file spans in `retention.ms`, which a record outlasts by at most one
DELETE_ATTEMPTS = 5  # while others rewrite files with records to delete

_UNLIMITED: Final = -1

# ------------------------------------------------------------------------------ what to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The bounds on a topic, under Kafka's names; -1: unlimited."""

    retention_ms: int = _UNLIMITED
    retention_bytes: int = _UNLIMITED
    """The bound on each partition, in bytes of its compressed data files."""


def policy_of(config: Mapping[str, str]) -> RetentionPolicy:
    """Returns the policy of a topic's configuration. Raises `BadOption` for an invalid number."""
    if "delete" not in config.get("cleanup.policy", "delete").split(","):
        return RetentionPolicy()
    return RetentionPolicy(
        retention_ms=_number(config, "retention.ms"),
        retention_bytes=_number(config, "retention.bytes"),
    )


def removes_records(config: Mapping[str, str]) -> bool:
    """Returns whether a topic with this configuration loses records, by retention or compaction.

    Raises what `policy_of` raises.
    """
    is_compacted = "compact" in config.get("cleanup.policy", "").split(",")
    return is_compacted or policy_of(config) != RetentionPolicy()


def _number(config: Mapping[str, str], key: str) -> int:
    value = config.get(key)
    if value is None:
        return _UNLIMITED
    try:
        return max(int(value), _UNLIMITED)
    except ValueError:
        raise errors.BadOption(option=key, value=value, reason="expected a number") from None


def span_us(config: Mapping[str, str]) -> int | None:
    """Returns the maximum range of timestamps in one file; None: unlimited.

    A file is removed when its newest record is too old, so its other records may outlast
    `retention.ms` by up to this range. Raises `BadOption` for an invalid number.
    """
    retention_ms = policy_of(config).retention_ms
    return None if retention_ms == _UNLIMITED else retention_ms * 1_000 // _RETENTION_SPANS


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionCut:
    """The files to remove from a partition, and its new log start."""

    partition: int
    files: tuple[TableFile, ...]
    start: int


def choose(snapshot: TableSnapshot, *, now_us: int) -> list[RetentionCut]:
    """Returns the files that exceed the topic's bounds, or are below the log start.

    Files with overlapping offsets are removed together. A partition with a file without statistics
    is skipped until compaction adds them, because the file may contain any offset. No file of an
    append-only table is returned. Raises `BadOption` if the topic's configuration is invalid.
    """
    policy = policy_of(snapshot.config)
    cuts: list[RetentionCut] = []
    if snapshot.append_only:
        return cuts
    for partition, files in enumerate(snapshot.files):
        clusters = _clusters(files)
        start = snapshot.starts[partition]
        count = _count_below(clusters, start)
        count += _count_beyond(clusters[count:], policy)
        count += _count_old(clusters[count:], policy, now_us)
        if count:
            rest = clusters[count:]
            first_left = rest[0].first if rest else snapshot.ends[partition]
            cuts.append(
                RetentionCut(
                    partition=partition,
                    files=tuple(file for each in clusters[:count] for file in each.files),
                    start=max(start, first_left),
                )
            )
    return cuts


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Files with overlapping offsets, which are removed together."""

    files: tuple[TableFile, ...]
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def newest_us(self) -> int:
        return max(file.newest_us for file in self.files)


def _clusters(files: Sequence[TableFile]) -> list[_Cluster]:
    """Returns clusters in offset order; none if a file lacks statistics, as it may be in any."""
    found: list[_Cluster] = []
    for file in files:
        if file.first is None or file.last is None:
            return []
        if found and file.first <= found[-1].last:
            before = found.pop()
            last = max(before.last, file.last)
            found.append(_Cluster((*before.files, file), before.first, last))
        else:
            found.append(_Cluster((file,), file.first, file.last))
    return found


def _count_below(clusters: Iterable[_Cluster], start: int) -> int:
    return sum(1 for _ in itertools.takewhile(lambda each: each.last < start, clusters))


def _count_old(clusters: Iterable[_Cluster], policy: RetentionPolicy, now_us: int) -> int:
    if policy.retention_ms == _UNLIMITED:
        return 0
    kept_since_us = now_us - policy.retention_ms * 1_000
    return sum(
        1 for _ in itertools.takewhile(lambda each: each.newest_us < kept_since_us, clusters)
    )


def _count_beyond(clusters: Sequence[_Cluster], policy: RetentionPolicy) -> int:
    if policy.retention_bytes == _UNLIMITED:
        return 0
    excess_bytes = sum(each.size_bytes for each in clusters) - policy.retention_bytes
    count = 0
    for each in clusters[:-1]:
        excess_bytes -= each.size_bytes
        if excess_bytes < 0:
            break
        count += 1
    return count


# ------------------------------------------------------------------------------ retention


def retain(table: TopicTable) -> int:
    """Removes the files that exceed the topic's bounds, in one commit. Returns their number.

    Raises `BadOption` if the topic's configuration is invalid, and like `TopicTable.commit`.
    """
    count = 0

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        nonlocal count
        cuts = choose(snapshot, now_us=table.clock.now_us())
        count = sum(len(cut.files) for cut in cuts)
        if not cuts or snapshot.topic_id is None:
            return None
        starts = {cut.partition: cut.start for cut in cuts}
        return TableChange(
            removes=tuple(file for cut in cuts for file in cut.files),
            txns=_txns(snapshot, snapshot.topic_id, starts),
            operation="RETENTION",
        )

    table.commit(decide)
    return count


def _txns(snapshot: TableSnapshot, topic_id: str, starts: Mapping[int, int]) -> dict[str, int]:
    moved = {start_app_id(topic_id, number): start for number, start in starts.items()}
    return {maintenance_app_id(topic_id): snapshot.version + 1, **moved}


# ------------------------------------------------------------------------------ deletion


def delete_records(table: TopicTable, topic_id: str, offsets: Mapping[int, int]) -> TableSnapshot:
    """Deletes the records below the offset of each named partition. Returns the new version.

    When this returns, the move of the log start is durable and survives a power cut. An offset at
    or below the log start has no effect. All records below the offsets must be in the table.

    Raises `UnknownTopic` if the table is no longer that of the topic, `PolicyViolation` if it is
    append-only, `OffsetOutOfRange` for an offset beyond the table's end, `MissingObject` and
    `CorruptObject` if a file cannot be rewritten because it does not match the log, and like
    `TopicTable.commit`.
    """
    for _ in range(DELETE_ATTEMPTS):
        snapshot = table.refresh()
        deletion = _deletion(table.topic, topic_id, snapshot, offsets)
        if deletion is None:
            table.sync()  # the process that moved it may have died before the move was durable
            return snapshot
        if snapshot.append_only:
            raise errors.PolicyViolation(topic=table.topic, reason=APPEND_ONLY_REASON)
        found = _Deleting(table, topic_id, offsets, deletion, snapshot.ends).run()
        if found is not None:
            return found
    raise errors.StorageUnavailable(
        operation="delete records",
        path=table.folder,
        reason=f"other writers have rewritten the files {DELETE_ATTEMPTS} times",
    )


def sweep_below(table: TopicTable) -> None:
    """Removes rows below the log start from the newest version, unless it is append-only.

    Only another engine can have restored them. Raises what `delete_records` raises.
    """
    snapshot = table.snapshot
    if snapshot.topic_id is None or snapshot.append_only:
        return
    found = {
        partition: start
        for partition, (start, files) in enumerate(
            zip(snapshot.starts, snapshot.files, strict=True)
        )
        if any(file.first is not None and file.first < start for file in files)
    }
    if found:
        delete_records(table, snapshot.topic_id, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deletion:
    """The effect of a deletion on one version of the table."""

    starts: Mapping[int, int]
    """The new log start by partition."""
    below: tuple[TableFile, ...]
    """Files from which no row is kept."""
    straddling: tuple[TableFile, ...]
    """Files from which some rows may be kept."""


def _deletion(
    topic: str, topic_id: str, snapshot: TableSnapshot, offsets: Mapping[int, int]
) -> _Deletion | None:
    """Returns None if there is nothing to do."""
    if snapshot.topic_id != topic_id:
        raise errors.UnknownTopic(topic=topic)
    starts: dict[int, int] = {}
    below: list[TableFile] = []
    straddling: list[TableFile] = []
    for partition, offset in offsets.items():
        start, end = snapshot.starts[partition], snapshot.ends[partition]
        if offset > end:
            raise errors.OffsetOutOfRange(
                topic=topic, partition=partition, offset=offset, start=start, end=end
            )
        if offset < start:
            continue
        moves = offset > start
        before = len(below) + len(straddling)
        for file in snapshot.files[partition]:
            if file.last is not None and file.last < offset:
                below.append(file)
            elif moves if file.first is None else file.first < offset:
                straddling.append(file)
        if moves or len(below) + len(straddling) > before:
            starts[partition] = offset
    if not starts:
        return None
    return _Deletion(starts=starts, below=tuple(below), straddling=tuple(straddling))


class _Deleting:
    """One attempt at a deletion, on the version that it was computed for."""

    def __init__(
        self,
        table: TopicTable,
        topic_id: str,
        offsets: Mapping[int, int],
        deletion: _Deletion,
        ends: Sequence[int],
    ) -> None:
        self._table = table
        self._topic_id = topic_id
        self._offsets = offsets
        self._deletion = deletion
        self._ends = ends
        self._adds: list[TableFile] = []

    def run(self) -> TableSnapshot | None:
        """Returns the version with the change; None if abandoned because the files have changed."""
        table, deletion = self._table, self._deletion
        removes = list(deletion.below)
        rewritten: list[TableFile] = []
        is_wanted = False

        def decide(snapshot: TableSnapshot) -> TableChange | None:
            nonlocal is_wanted
            now = _deletion(table.topic, self._topic_id, snapshot, self._offsets)
            is_wanted = now == deletion
            if not is_wanted:
                return None
            return TableChange(
                adds=tuple(self._adds),
                removes=tuple(removes),
                txns=_txns(snapshot, self._topic_id, deletion.starts),
                data_change=False,
                drops_rows=True,
                operation="DELETE RECORDS",
            )

        try:
            rewritten += [file for file in deletion.straddling if self._rewrite(file)]
            removes += rewritten
            is_wanted = (
                True  # from here on the outcome is unknown, unless `decide` or the commit refuses
            )
            found = table.commit(decide)
        except ObjectMissing as error:
            is_wanted = False
            if self._is_current(table.refresh()):
                raise errors.MissingObject(path=error.path, reason="the table names it") from error
            return None
        except (errors.Retriable, errors.Invalid):
            is_wanted = False
            raise
        finally:
            if not is_wanted:
                with contextlib.suppress(
                    errors.SparklogError
                ):  # otherwise they are swept as orphans
                    table.store.delete([data_path(table.topic, file) for file in self._adds])
        if not is_wanted:
            return None
        try:
            restoring.verify(table, self._adds, rewritten)
        except errors.CorruptObject:
            return None  # if the files were restored, they are rewritten again
        return found

    def _is_current(self, snapshot: TableSnapshot) -> bool:
        now = _deletion(self._table.topic, self._topic_id, snapshot, self._offsets)
        return now == self._deletion

    def _rewrite(self, file: TableFile) -> bool:
        """Writes the remaining rows to a new file. Returns False if all rows remain."""
        table, start = self._table, self._deletion.starts[file.partition]
        is_large = 2 * file.size_bytes > limits.COMPACT_TARGET_BYTES
        plan = data_file.plan_for(table.snapshot.columns, [file])
        encoder = data_file.Encoder(
            level=data_file.SMALL_LEVEL if is_large else data_file.FAST_LEVEL,
            plan=plan,
            schemas=schema_texts.for_rewrite(table.store, plan),
        )
        kept = deleted = 0
        path = data_path(table.topic, file)
        for batch in file_compaction.read_rows(table.store, path, file, self._ends[file.partition]):
            cut = int(np.searchsorted(arrow.as_numpy(batch.column("offset")), start))
            deleted += cut
            kept += batch.num_rows - cut
            if cut < batch.num_rows:
                encoder.add(batch.slice(cut))
        if not deleted:
            return False
        if kept:
            encoded = encoder.finish()
            assert (encoded.rows, encoded.first >= start) == (kept, True)
            data_file.check_rewrite(encoded, [file])
            self._adds.append(
                data_file.put_file(
                    table.store,
                    encoded,
                    topic=table.topic,
                    topic_id=self._topic_id,
                    partition=file.partition,
                    clock=table.clock,
                )
            )
        return True
