"""Retention and deletion: how the log start of a partition moves, and what leaves with it.

Rules of this room, which are those of Kafka's `UnifiedLog` where it has them:

- Records leave from the log start on, in order of offsets, whatever consumers have read. What is
  not in the table yet stays.
- *Retention* drops whole files: by time, those whose newest record is older than `retention.ms`
  (where no record has a time, those that were written before);
  by size, the oldest, as long as those that are left have `retention.bytes` or more. The newest
  file goes by time only. A topic whose `cleanup.policy` does not name `delete` keeps everything.
- *Deletion* (Kafka's DeleteRecords) goes up to an offset. Files below it leave, and a file that has
  rows on both sides of it is replaced by one with those that stay. So no reader of the table, of
  whatever engine, finds deleted records in it, and once the grace of removed files is over their
  bytes are gone.
- One commit removes the files and moves the `txn` `sparklog/<topic id>/<p>/start`. It lands only
  where exactly the files that were chosen hold the rows below the new start in the version just
  before it. Otherwise it is decided anew, and what it wrote removed.
- The log start never goes back. Rows that another engine has brought back below it (it may restore
  a version of the past) are no records: readers pass over them, and `sweep_below` removes them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sparklog import arrow, errors, limits
from sparklog.storage import compaction, publish
from sparklog.storage.objects import ObjectMissing
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import (
    Change,
    Table,
    data_path,
    maintenance_app_id,
    start_app_id,
)

_FOR_EVER: Final = -1

# ------------------------------------------------------------------------------ what to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a topic is told to keep, under Kafka's names; -1: no bound."""

    retention_ms: int = _FOR_EVER
    retention_bytes: int = _FOR_EVER
    """Of each partition: the sizes of its data files, as they are compressed."""


def policy_of(config: Mapping[str, str]) -> Policy:
    """What a topic of that configuration keeps. Raises `BadOption` for a number that is none."""
    if "delete" not in config.get("cleanup.policy", "delete").split(","):
        return Policy()
    return Policy(
        retention_ms=_number(config, "retention.ms"),
        retention_bytes=_number(config, "retention.bytes"),
    )


def _number(config: Mapping[str, str], key: str) -> int:
    value = config.get(key)
    if value is None:
        return _FOR_EVER
    try:
        return max(int(value), _FOR_EVER)
    except ValueError:
        raise errors.BadOption(option=key, value=value, reason="not a number") from None


def span_us(config: Mapping[str, str]) -> int | None:
    """How far the times of records in one file should lie apart at most; None: as they like.

    A file leaves when its newest record is too old, so the others outstay `retention.ms` by this.
    Raises `BadOption` for a number that is none.
    """
    retention_ms = policy_of(config).retention_ms
    return None if retention_ms == _FOR_EVER else retention_ms * 1_000 // limits.RETENTION_SPANS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What leaves one partition, whole files only, and where its log starts then."""

    partition: int
    files: tuple[TableFile, ...]
    start: int


def choose(snapshot: TableSnapshot, *, now_us: int) -> list[Cut]:
    """The files that the topic's configuration no longer keeps, or that lie below the log start.

    Files whose offsets overlap leave together. Where one has no statistics nothing leaves: it may
    hold any offset, until compaction has given it some. Raises `BadOption` where the topic's
    configuration makes no sense.
    """
    policy = policy_of(snapshot.config)
    cuts = []
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
                Cut(
                    partition=partition,
                    files=tuple(file for each in clusters[:count] for file in each.files),
                    start=max(start, first_left),
                )
            )
    return cuts


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Files that have offsets among each other's, so that none can leave alone."""

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
    """In order of offsets; none where a file without statistics may belong to each of them."""
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


def _count_old(clusters: Iterable[_Cluster], policy: Policy, now_us: int) -> int:
    if policy.retention_ms == _FOR_EVER:
        return 0
    kept_since_us = now_us - policy.retention_ms * 1_000
    return sum(
        1 for _ in itertools.takewhile(lambda each: each.newest_us < kept_since_us, clusters)
    )


def _count_beyond(clusters: Sequence[_Cluster], policy: Policy) -> int:
    if policy.retention_bytes == _FOR_EVER:
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


def retain(table: Table) -> int:
    """Drops what the topic no longer keeps, in one commit; how many files left.

    Raises `BadOption` where the topic's configuration makes no sense, and what `Table.commit` does.
    """
    count = 0

    def decide(snapshot: TableSnapshot) -> Change | None:
        nonlocal count
        cuts = choose(snapshot, now_us=table.clock.now_us())
        count = sum(len(cut.files) for cut in cuts)
        if not cuts or snapshot.topic_id is None:
            return None
        starts = {cut.partition: cut.start for cut in cuts}
        return Change(
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


def delete_records(table: Table, topic_id: str, offsets: Mapping[int, int]) -> TableSnapshot:
    """Deletes, of each partition that is named, the records below its offset; the version then.

    The log start is there when this returns, and stays there through a power cut. An offset at or
    below it changes nothing. All that is below the offsets must be in the table.

    Raises `UnknownTopic` where the table is not the topic's any more, `OffsetOutOfRange` beyond the
    table's end, `MissingObject` and `CorruptObject` where a file cannot be rewritten because it is
    not what the log says, and what `Table.commit` does.
    """
    for _ in range(limits.DELETE_ATTEMPTS):
        deletion = _deletion(table.topic, topic_id, table.refresh(), offsets)
        if deletion is None:
            table.settle()  # whoever moved it before us may have died before that was durable
            return table.snapshot
        found = _Deleting(table, topic_id, offsets, deletion).run()
        if found is not None:
            return found
    raise errors.StorageUnavailable(
        operation="delete records",
        path=table.folder,
        reason=f"others have rewritten the files {limits.DELETE_ATTEMPTS} times",
    )


def sweep_below(table: Table) -> None:
    """Removes rows below the log start that files on both sides of it hold; in the newest version.

    Only another engine can have brought them there. Raises what `delete_records` does.
    """
    snapshot = table.snapshot
    if snapshot.topic_id is None:
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
    """What a deletion comes to in one version of the table."""

    starts: Mapping[int, int]
    """By partition: where the log is to start."""
    below: tuple[TableFile, ...]
    """No row of them stays."""
    straddling: tuple[TableFile, ...]
    """Rows of them may stay, and others go."""


def _deletion(
    topic: str, topic_id: str, snapshot: TableSnapshot, offsets: Mapping[int, int]
) -> _Deletion | None:
    """None where there is nothing to be done."""
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
    """One attempt, on the version that `deletion` was made of."""

    def __init__(
        self, table: Table, topic_id: str, offsets: Mapping[int, int], deletion: _Deletion
    ) -> None:
        self._table = table
        self._topic_id = topic_id
        self._offsets = offsets
        self._deletion = deletion
        self._ends = table.snapshot.ends
        self._adds: list[TableFile] = []

    def run(self) -> TableSnapshot | None:
        """The version with the change; None: given up, because the files are not the same now."""
        table, deletion = self._table, self._deletion
        removes = list(deletion.below)
        is_wanted = False

        def decide(snapshot: TableSnapshot) -> Change | None:
            nonlocal is_wanted
            now = _deletion(table.topic, self._topic_id, snapshot, self._offsets)
            is_wanted = now == deletion
            if not is_wanted:
                return None
            return Change(
                adds=tuple(self._adds),
                removes=tuple(removes),
                txns=_txns(snapshot, self._topic_id, deletion.starts),
                data_change=False,
                drops_rows=True,
                operation="DELETE RECORDS",
            )

        try:
            removes += [file for file in deletion.straddling if self._rewrite(file)]
            is_wanted = True  # from here on nobody knows, until `decide` or the commit says no
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
                with contextlib.suppress(errors.Retriable):  # or else they are swept as orphans
                    table.store.delete([data_path(table.topic, file) for file in self._adds])
        return found if is_wanted else None

    def _is_current(self, snapshot: TableSnapshot) -> bool:
        now = _deletion(self._table.topic, self._topic_id, snapshot, self._offsets)
        return now == self._deletion

    def _rewrite(self, file: TableFile) -> bool:
        """Writes the rows that stay to a file of their own; False where all of them do."""
        table, start = self._table, self._deletion.starts[file.partition]
        is_large = 2 * file.size_bytes > limits.COMPACT_TARGET_BYTES
        encoder = publish.Encoder(level=publish.SMALL_LEVEL if is_large else publish.FAST_LEVEL)
        left = gone = 0
        path = data_path(table.topic, file)
        for batch in compaction.read_rows(table.store, path, file, self._ends[file.partition]):
            cut = int(np.searchsorted(arrow.as_numpy(batch.column("offset")), start))
            gone += cut
            left += batch.num_rows - cut
            if cut < batch.num_rows:
                encoder.add(batch.slice(cut))
        if not gone:
            return False
        if left:
            encoded = encoder.finish()
            assert (encoded.rows, encoded.first >= start) == (left, True)
            self._adds.append(
                publish.put_file(
                    table.store,
                    encoded,
                    topic=table.topic,
                    topic_id=self._topic_id,
                    partition=file.partition,
                    clock=table.clock,
                )
            )
        return True
