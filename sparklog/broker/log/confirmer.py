"""Confirmer: checks that committed data files exist before the WAL drops their rows.

Between the put of a data file and the commit that adds it, no table version names the file. Another
engine's `VACUUM … RETAIN 0 HOURS` can delete it in that window, and the commit then adds a missing
file. The rows are still in the WAL, so the file is written again. Each file is checked once, some
seconds after its commit, because an engine that listed the files earlier takes a while to delete
them. A rewritten file is checked as well. On an object store our commits are read back too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import ENDS_THE_BROKER, FailureLog
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage.maintenance import restoring
from sparklog.storage.objects import Store, in_parallel
from sparklog.storage.reading.plan import join_tail
from sparklog.storage.snapshot import Located, TableFile, TableSnapshot
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable

_log = structlog.get_logger("sparklog.publisher")
_SAMPLES = 4
"""Samples of the published ends that are retained per `after_seconds`."""


class Confirmer:
    """Confirms published entries. One caller at a time; the publisher may run concurrently."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        publisher: Publisher,
        *,
        clock: Clock,
        after_seconds: float,
        store_now_us: Callable[[], int] | None = None,
    ) -> None:
        """`after_seconds`: the time from a commit to the check of its files. `store_now_us` returns
        a recent time by a local store's clock, for a broker that has predecessors.
        """
        self._store = store
        self._after_seconds = after_seconds
        self._store_now_us = store_now_us
        self._began = clock.monotonic()
        self._led_partitions = led_partitions
        self._publisher = publisher
        self._clock = clock
        self._published_ends: dict[str, deque[tuple[float, dict[int, int]]]] = {}
        """By topic id: samples of (monotonic seconds, published end of each partition)."""
        self._failure_log = FailureLog()
        self._seen: dict[str, set[str]] = {}
        """By topic id: the paths that the last check found."""

    def confirm(self) -> None:
        """Confirms entries that were published some time ago and whose files exist.

        Checks earlier if too many entries are unconfirmed. If the check of a topic fails, the WAL
        retains its rows, and the other topics continue. If files of a topic are missing, publishing
        it stops, because its unconfirmed entries would otherwise grow without bound.
        """
        topics = self._led_partitions.backlog.unconfirmed()
        topic_ids = {topic.topic_id for topic in topics}
        self._failure_log.retain(topic_ids)
        # The partition with the missing file may have moved to another broker.
        self._publisher.retain_refusals(topic_ids)
        for each in (self._seen, self._published_ends):
            for gone in each.keys() - topic_ids:
                del each[gone]
        in_parallel(self._store, self._try_confirm, topics)

    def _try_confirm(self, topic: Topic) -> None:
        try:
            self._confirm(topic)
        except errors.Retriable as error:
            if self._failure_log.is_new(topic.topic_id, str(error)):
                _log.warning("cannot check data files", topic=topic.name, reason=str(error))
        except ENDS_THE_BROKER:
            raise
        except Exception as error:
            reason = str(error) or repr(error)
            if self._failure_log.is_new(topic.topic_id, reason):
                _log.error(
                    "data files of published records are missing",
                    topic=topic.name,
                    reason=reason,
                )
            self._publisher.set_refusal(topic, error)
        else:
            self._publisher.set_refusal(topic, None)
            if self._failure_log.recovered(topic.topic_id):
                _log.info("data files of published records exist again", topic=topic.name)

    def _ends_to_confirm(self, topic: Topic) -> tuple[float, dict[int, int]]:
        """Returns a time long enough ago, and the partitions' published ends as of that time."""
        ends = {each.number: each.published for each in topic.partitions.values()}
        is_crowded = self._led_partitions.backlog.unconfirmed_count >= limits.UNCONFIRMED_ENTRIES
        now = self._clock.monotonic()  # the commits up to these ends are all older
        samples = self._published_ends.get(topic.topic_id)
        if samples is None:
            samples = deque([(now, self._old_ends(topic))])
            self._published_ends[topic.topic_id] = samples
        if now - samples[-1][0] >= self._after_seconds / _SAMPLES or len(samples) == 1:
            samples.append((now, ends))
        while len(samples) > 1 and samples[1][0] <= now - self._after_seconds:
            samples.popleft()
        return (now, ends) if is_crowded else samples[0]

    def _old_ends(self, topic: Topic) -> dict[int, int]:
        """Returns the ends that earlier brokers published long enough ago.

        Otherwise a broker that lives for less than `after_seconds` would confirm nothing, nor would
        its successors. Commit times and the current time are both by the store's clock. An object
        store has no local clock, and its commits would have to be read back.
        """
        if self._store_now_us is None or not self._store.is_local or not topic.unconfirmed:
            return {}
        if self._clock.monotonic() - self._began > self._after_seconds:
            return {}  # from here on, samples by our own clock suffice
        horizon_us = self._store_now_us() - round(self._after_seconds * 1e6)
        table = topic.table.through(self._store)
        return table.log_reader.ends_before(table.snapshot, horizon_us)

    def _confirm(self, topic: Topic) -> None:
        until, ends = self._ends_to_confirm(topic)
        ranges = self._led_partitions.backlog.unconfirmed_ranges(topic, ends)
        if not ranges:
            return
        table = topic.table.through(self._store)
        table.confirm(until)
        snapshot = table.snapshot
        table.sync()  # the janitor may have read files that another engine has not made durable
        if self._missing(topic, snapshot, ranges):
            snapshot = table.refresh()
            table.sync()
            missing = self._missing(topic, snapshot, ranges)
            for file in missing:
                self._replace(topic, table, file)
            if missing:
                # The same VACUUM may delete the new files too: they are checked after a full delay.
                self._published_ends.pop(topic.topic_id, None)
                return
        seen = {number: end for number, (_, end) in ranges.items()}
        self._led_partitions.backlog.advance_confirmed(topic, seen)

    def _missing(
        self, topic: Topic, snapshot: TableSnapshot, ranges: Mapping[int, tuple[int, int]]
    ) -> list[TableFile]:
        """Returns the table's files for these offset ranges that are missing or truncated."""
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
        gone = restoring.torn(self._store, new)
        missing = [file for file in files if data_path(topic.name, file) in gone]
        self._seen[topic.topic_id] = {file.path for file in files} - {file.path for file in missing}
        return missing

    def _replace(self, topic: Topic, table: TopicTable, file: TableFile) -> None:
        """Rewrites a missing file from the WAL, or undoes the merge that created it.

        Raises `MissingObject` if neither is possible.
        """
        facts = {"topic": topic.name, "file": data_path(topic.name, file)}
        partition = topic.partitions.get(file.partition)
        if partition is None:
            return  # another broker leads it now
        entries = self._entries_of(partition, file)
        if entries is None:
            if restoring.restore(table, {unquote(file.path)}):
                _log.warning("a merged file was missing; the merge was undone", **facts)
                return
            reason = "the table names it, but the write-ahead logs do not have all of its rows"
            raise errors.MissingObject(path=facts["file"], reason=reason)
        assert file.first is not None
        files = self._publisher.rewrite(topic, partition, file.first, entries, lost=file)
        landed = False

        def decide(before: TableSnapshot) -> TableChange | None:
            nonlocal landed
            landed = before.topic_id == topic.topic_id and file in before.files[file.partition]
            if not landed:
                return None
            return TableChange(
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
        _log.warning("a data file was missing; it was written again", **facts)

    def _entries_of(self, partition: Partition, file: TableFile) -> Sequence[Located] | None:
        """Returns entries that together contain all rows of the file; None if there are none.

        Also None if the file has fewer rows than its entries: another engine has deleted some, and
        it is unknown which.
        """
        first, last = file.first, file.last
        if first is None or last is None:
            return None
        found = self._led_partitions.backlog.unconfirmed_in(partition, first, last + 1)
        joined = join_tail(first, found)
        is_whole = (
            joined
            and joined[0].entry.base_offset <= first
            and joined[-1].entry.end > last
            and file.rows == sum(min(each.entry.rows, each.entry.end - first) for each in joined)
        )
        return joined if is_whole else None
