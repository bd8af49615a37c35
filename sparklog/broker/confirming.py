"""Confirmation: the data files of our commits are seen to exist before the WAL forgets their rows.

Between the put of a data file and the commit that adds it, no table names the file. Another engine
that removes such files without waiting (`VACUUM … RETAIN 0 HOURS`) takes it, and the commit then
adds what is not there. The rows are still in the WAL, so they are written again. Each file is
looked at once. On an object store our commits are read back too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from sparklog import errors
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.broker.publisher import Publisher
from sparklog.broker.retrying import ENDS_THE_BROKER
from sparklog.storage import upkeep
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import Located, TableFile, TableSnapshot
from sparklog.storage.table import Change, Table, data_path

_log = structlog.get_logger("sparklog.publisher")


class Confirmer:
    """One caller at a time; the publisher may work meanwhile."""

    def __init__(self, store: Store, ledger: Ledger, publisher: Publisher) -> None:
        self._store = store
        self._ledger = ledger
        self._publisher = publisher
        self._seen: dict[str, set[str]] = {}
        """By topic id: the paths that the last look has found."""

    def confirm(self) -> None:
        """Has the ledger forget what is published and has been seen since.

        A topic where that fails keeps what it needs in the WAL, and the others go on. It is not
        published further until its files are there, or else what is kept would grow.
        """
        topics = self._ledger.unconfirmed()
        for gone in self._seen.keys() - {topic.topic_id for topic in topics}:
            del self._seen[gone]
        for topic in topics:
            try:
                self._confirm(topic)
            except errors.Retriable as error:
                _log.warning("cannot look at data files", topic=topic.name, reason=str(error))
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                reason = str(error) or repr(error)
                _log.error("published records are not seen", topic=topic.name, reason=reason)
                self._publisher.refuse(topic, error)
            else:
                self._publisher.refuse(topic, None)

    def _confirm(self, topic: Topic) -> None:
        with self._ledger.lock:
            ends = [each.published for each in topic.partitions]
            ranges = {
                each.number: (each.unconfirmed[0].entry.base_offset, each.published)
                for each in topic.partitions
                if each.unconfirmed
            }
        table = self._publisher.table(topic)
        table.confirm()
        if self._missing(topic, table.snapshot, ranges):
            table.refresh()
            table.settle()
            for file in self._missing(topic, table.snapshot, ranges):
                self._replace(topic, table, file)
        self._ledger.confirmed(topic, ends)

    def _missing(
        self, topic: Topic, snapshot: TableSnapshot, ranges: Mapping[int, tuple[int, int]]
    ) -> list[TableFile]:
        """Files of the table that may hold offsets of these ranges, and are not there or torn."""
        files = [
            file
            for number, (start, end) in ranges.items()
            if number < len(snapshot.files)
            for file in snapshot.files[number]
            if file.first is None or file.last is None or (file.first < end and file.last >= start)
        ]
        seen = self._seen.get(topic.topic_id, set())
        new = {
            data_path(topic.name, file): file.size_bytes for file in files if file.path not in seen
        }
        gone = upkeep.torn(self._store, new)
        missing = [file for file in files if data_path(topic.name, file) in gone]
        self._seen[topic.topic_id] = {file.path for file in files} - {file.path for file in missing}
        return missing

    def _replace(self, topic: Topic, table: Table, file: TableFile) -> None:
        """Writes a missing file's rows again, from the WAL. Raises `MissingObject`."""
        partition = topic.partitions[file.partition]
        entries = self._entries_of(partition, file)
        if entries is None:
            reason = "the table names it, and the write-ahead logs do not have all of its rows"
            raise errors.MissingObject(path=data_path(topic.name, file), reason=reason)
        assert file.first is not None
        files = self._publisher.write_again(topic, partition, file.first, entries)
        landed = False

        def decide(before: TableSnapshot) -> Change | None:
            nonlocal landed
            landed = before.topic_id == topic.topic_id and file in before.files[file.partition]
            if not landed:
                return None
            return Change(
                adds=tuple(files), removes=(file,), data_change=False, operation="RESTORE FILE"
            )

        try:
            table.commit(decide)
        except errors.Retriable:
            landed = False
            raise
        finally:
            if not landed:
                self._store.delete([data_path(topic.name, each) for each in files])
        path = data_path(topic.name, file)
        _log.warning("a data file was gone, and is written again", topic=topic.name, file=path)

    def _entries_of(self, partition: Partition, file: TableFile) -> Sequence[Located] | None:
        """Entries that together have all rows of the file, and no row behind; None without them.

        Of a file with gaps nobody knows which rows it had: somebody has deleted some.
        """
        first, last = file.first, file.last
        if first is None or last is None or file.rows != last + 1 - first:
            return None
        with self._ledger.lock:
            found = [
                each
                for each in partition.unconfirmed
                if each.entry.end > first and each.entry.base_offset <= last
            ]
        is_whole = found and found[0].entry.base_offset <= first and found[-1].entry.end == last + 1
        return found if is_whole else None
