"""A commit that the publisher makes: the files of some runs of entries, if these fit the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sparklog import errors
from sparklog.broker.log.run_writer import Run, WrittenRun
from sparklog.broker.log.topic import Topic
from sparklog.storage.objects import ObjectMissing
from sparklog.storage.snapshot import BatchKind, GapCause, TableFile, TableSnapshot
from sparklog.storage.table import gaps
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import begun_app_id, end_app_id, key_app_id, query_app_id

_WRITTEN_AGAIN: Final = (
    errors.TimedOut,
    errors.StorageFull,
    errors.Fenced,
    errors.ColumnsChanged,
)
"""After these, all files of a commit are written again: they took too long, say, or need space."""


@dataclass(slots=True)
class TableCommit:
    """A commit to the table of a topic, from the choice of its entries to its outcome."""

    topic: Topic
    written: list[WrittenRun]
    preparation: int | None = None
    """The number in its files' names, if they are written in several turns."""
    renewed_at: float = 0.0
    may_have_landed: bool = False
    """True if the outcome of a commit of these files is unknown: they may be in the table."""
    has_landed: bool = False
    """True if the table had the version that `decide` returned a change for."""

    @property
    def is_empty(self) -> bool:
        """True if no entry could be read."""
        return not any(each.count for each in self.written)

    @property
    def runs(self) -> list[Run]:
        """The entries that could be read, and so are committed."""
        return [each.readable_run for each in self.written if each.count]

    @property
    def files(self) -> list[TableFile]:
        return [file for each in self.written for file in each.files]

    @property
    def is_complete(self) -> bool:
        return all(each.is_complete for each in self.written)

    @property
    def count(self) -> int:
        return sum(len(each.run.entries) for each in self.written)

    @property
    def memory_bytes(self) -> int:
        return sum(
            located.entry.memory_bytes for each in self.written for located in each.run.entries
        )

    @property
    def splits_batch(self) -> bool:
        """True if part of a Spark batch has been written, and another part cannot be read."""
        unreadable = {
            located.entry.batch_id
            for each in self.written
            if each.error is not None
            for located in each.run.entries[each.count :]
        }
        unreadable.discard(None)
        return bool(unreadable) and any(
            located.entry.batch_id in unreadable
            for each in self.written
            for located in each.run.entries[: each.count]
        )

    def survives(self, error: BaseException) -> bool:
        """Returns whether the next turn may continue with these files after `error`."""
        return (
            self.preparation is not None
            and isinstance(error, errors.SparklogError | ObjectMissing)
            and not isinstance(error, _WRITTEN_AGAIN)
        )

    def decide(self, before: TableSnapshot) -> TableChange | None:
        """Returns the change that adds the files, or None if the runs do not fit this version."""
        topic, runs = self.topic, self.runs
        self.has_landed = False
        if before.topic_id != topic.topic_id or before.partitions < topic.count:
            return None
        if any(before.ends[run.partition] != run.first for run in runs):
            return None
        self.has_landed = True
        ends = {end_app_id(topic.topic_id, run.partition): run.end for run in runs}
        sparse = {
            gaps.app_id(topic.topic_id, run.partition, GapCause.SOURCE): run.end
            for run in runs
            if any(each.entry.rows < each.entry.count for each in run.entries)
        }
        return TableChange(
            adds=tuple(self.files),
            txns={**ends, **sparse, **_batch_txns(topic, runs)},
            preparation=self.preparation,
        )


_APP_IDS: Final = {
    BatchKind.NUMBERED: query_app_id,
    BatchKind.NUMBERED_PART: begun_app_id,
    BatchKind.NAMED: key_app_id,
}
"""The names of the `txn` actions of batches that a table records."""


def _batch_txns(topic: Topic, runs: Iterable[Run]) -> dict[str, int]:
    """Returns the `txn` of each Spark batch in the runs that the table must record."""
    found: dict[str, int] = {}
    for run in runs:
        for located in run.entries:
            batch_id, kind = located.entry.batch_id, located.entry.batch_kind
            name = _APP_IDS.get(kind)
            if batch_id is None or name is None:
                continue
            app_id = name(topic.topic_id, batch_id.query)
            before = found.get(app_id)
            if before is None:
                txn = topic.table.txn(app_id)
                before = txn.version if txn is not None else -1
            found[app_id] = max(before, batch_id.batch)
    return found
