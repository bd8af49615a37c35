"""Reads a whole root without a broker: metadata, the WAL of every open epoch, and tables.

This is how a reader without a broker sees the log up to the last acked record. `refresh` reads the
WALs before the tables, so that records that are published and trimmed in between are found in the
table: together, WALs and tables contain every record that was durable when the refresh began.

That is also true of a table that was read earlier, as long as no flush since then has been missed:
the entries that it lacks are still known, because they are dropped only once a table has them. On
an object store, a reader that follows many topics need not read all tables in each refresh.

A `RootFollower` is confined to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from sparklog import errors, limits
from sparklog.clock import NEVER, Clock, Moment
from sparklog.storage import wal
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store, in_parallel
from sparklog.storage.reading.plan import high_watermark, join_tail, plan
from sparklog.storage.snapshot import EntryKind, Located, Slice, TableSnapshot
from sparklog.storage.table.topic_table import TopicTable

_ATTEMPTS = 3
TABLE_AGE_SECONDS: Final = limits.TRIM_GRACE_SECONDS / 2
"""The age up to which a table need not be read again, for readers that accept that. An entry that
it lacks was not published then, so its bytes still exist for a while."""
_QUIET_TABLE_AGE_SECONDS: Final = 60.0
"""The age at which a table is read again that lacks no entry: only other engines and retention
change it."""


_Reach: TypeAlias = frozenset[tuple[tuple[int, int], int]]
"""The checkpoint that each open epoch was last read from: its sequence, or -1. As long as it stays
the same, no flush was missed: a reader skips some only by continuing from a newer checkpoint, and
none that follow a checkpoint are removed before there is a newer one.
"""


class RootFollower:
    """The state of a root as of the last `refresh`."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._meta = MetadataStore(store, clock=clock)
        self.cluster = open_cluster(store, clock=clock, create=False)
        self._meta.reload()
        self._epochs: dict[tuple[int, int], wal.Follower] = {}
        self._followed: set[str] = set()
        """Ids of the topics whose entries are kept: those requested so far."""
        self._entries: dict[tuple[str, int], list[Located]] = {}
        self._tables: dict[str, TopicTable] = {}
        self._tails: dict[tuple[str, int], tuple[Located, ...]] = {}
        self._joined: dict[tuple[str, int], tuple[int, int]] = {}
        """For each tail, the number of entries and the offset from which it was joined."""
        self._listed = NEVER
        self._reach: _Reach = frozenset()
        """The reach of the last refresh in the logs."""
        self._read_at: dict[str, _Reach] = {}
        """By topic: `_reach` when its table was read."""

    # -------------------------------------------------------------------------- refreshing

    @property
    def metadata(self) -> ClusterMetadata:
        return self._meta.current

    def refresh(
        self, topics: Iterable[str], *, table_age_seconds: float = 0.0
    ) -> Mapping[str, TableSnapshot]:
        """Reads new state, and returns the tables of `topics`.

        `table_age_seconds`: the age up to which a table need not be read again. It may then lack
        records that have since been published, which the log has, and changes by other engines.

        Raises `UnknownTopic`, `CorruptObject`, `ForeignTable`, `StorageUnavailable`.
        """
        names = list(topics)
        snapshots: Mapping[str, TableSnapshot] = {}
        attempts = 0
        judged: set[tuple[int, int]] = set()
        while True:
            failure: errors.SparklogError | None = None
            began = Moment.now(self._clock)
            try:
                self._read_wals(names)
                snapshots = self._read_tables(names, table_age_seconds if not attempts else 0.0)
            except (errors.MissingObject, errors.UnknownTopic) as error:
                failure = error
            else:
                joined = [self._join(snapshot) for snapshot in snapshots.values()]
                if all(joined) and began.age_seconds(self._clock) < limits.TRIM_GRACE_SECONDS:
                    return snapshots
            # Missing entries were published and trimmed, or are in an epoch that was closed or
            # opened since. A refresh that took too long may have missed either kind. List
            # everything again.
            self._listed = NEVER
            # Brokers may start and stop during each attempt; only failures with the same epochs
            # count.
            epochs = {each.id for each in self.metadata.open_epochs}
            attempts = attempts + 1 if epochs == judged else 1
            judged = epochs
            if attempts == _ATTEMPTS:
                if failure is not None:
                    raise failure
                return snapshots

    def _read_wals(self, names: Iterable[str]) -> None:
        """Reads the new entries of every open epoch, and periodically lists its folder.

        An object exists for at least `TRIM_GRACE_SECONDS`, so probing more often than that misses
        none. The folders are listed again once half of that time has passed.
        """
        began = Moment.now(self._clock)
        relist = self._listed.age_seconds(self._clock) > limits.TRIM_GRACE_SECONDS / 2
        metadata = self._meta.refresh()
        wanted = {metadata.topic(name).topic_id for name in names}
        if not wanted <= self._followed:
            # Their entries have been skipped so far.
            self._followed |= wanted
            self._epochs.clear()
            self._entries.clear()
            self._joined.clear()
        for gone in self._epochs.keys() - {each.id for each in metadata.open_epochs}:
            del self._epochs[gone]
        for epoch in metadata.open_epochs:
            follower = self._epochs.get(epoch.id)
            if follower is None:
                follower = wal.of(self._store, self._clock, epoch.log).follower(
                    epoch.broker, epoch.epoch
                )
                self._epochs[epoch.id] = follower
            for each in follower.poll(relist=relist):
                for located in each.located:
                    self._add(located)
        if relist:  # only after all folders are listed
            self._listed = began
        used = ((key, each.checkpoint) for key, each in self._epochs.items())
        self._reach = frozenset((key, -1 if each is None else each.sequence) for key, each in used)

    def _add(self, located: Located) -> None:
        entry = located.entry
        if entry.topic_id in self._followed and entry.kind in (EntryKind.RECORDS, EntryKind.STAGED):
            self._entries.setdefault((entry.topic_id, entry.partition), []).append(located)

    def _read_tables(self, names: Iterable[str], age_seconds: float) -> Mapping[str, TableSnapshot]:
        names = list(names)
        due = [name for name in names if self._is_table_due(name, age_seconds)]
        in_parallel(self._store, self._read_table, due)
        return {name: self._tables[name].snapshot for name in names}

    def _is_table_due(self, topic: str, age_seconds: float) -> bool:
        table = self._tables.get(topic)
        if table is None or self._read_at.get(topic) != self._reach:
            return True
        known, snapshot = self._meta.current.topic(topic), table.snapshot
        if known.topic_id != snapshot.topic_id or known.partition_count != snapshot.partitions:
            return True
        age = table.look_age_seconds
        if age < age_seconds:
            return False
        has_entries = any(
            self._entries.get((known.topic_id, number)) for number in range(known.partition_count)
        )
        return has_entries or age_seconds == 0.0 or age >= _QUIET_TABLE_AGE_SECONDS

    def _read_table(self, topic: str) -> None:
        known = self._meta.current.topic(topic)
        table = self._tables.get(topic)
        if table is None:
            table = self._tables[topic] = TopicTable(
                self._store, topic, clock=self._clock, only_reads=True
            )
        self._read_at.pop(topic, None)
        if table.refresh().topic_id != known.topic_id:
            raise errors.UnknownTopic(topic=topic)
        self._read_at[topic] = self._reach

    def _join(self, snapshot: TableSnapshot) -> bool:
        """Connects each partition's entries to its table. Returns False if some are missing."""
        is_complete = True
        for partition, published in enumerate(snapshot.ends):
            key = snapshot.topic_id or "", partition
            entries = self._entries.get(key, [])
            if self._joined.get(key) == (len(entries), published) or self._extend(key, published):
                continue
            kept = [each for each in entries if each.entry.end > published]
            tail = join_tail(published, kept)
            self._entries[key], self._tails[key] = kept, tail
            if len(tail) == len({each.entry.base_offset for each in kept}):
                self._joined[key] = len(kept), published
            else:
                self._joined.pop(key, None)
                is_complete = False
        return is_complete

    def _extend(self, key: tuple[str, int], published: int) -> bool:
        """Appends new entries to the joined ones in the common case where they directly follow."""
        known = self._joined.get(key)
        if known is None or known[1] != published:
            return False
        entries, tail = self._entries[key], self._tails[key]
        more = entries[known[0] :]
        end = tail[-1].entry.end if tail else published
        for each in more:
            if each.entry.base_offset != end:
                return False
            end = each.entry.end
        self._tails[key] = (*tail, *more)
        self._joined[key] = len(entries), published
        return True

    # -------------------------------------------------------------------------- queries

    def ends(self, snapshot: TableSnapshot) -> tuple[int, ...]:
        """The high watermark of each partition."""
        return tuple(
            high_watermark(snapshot, partition, self._tail(snapshot, partition))
            for partition in range(snapshot.partitions)
        )

    def beyond(self, snapshot: TableSnapshot, partition: int) -> int | None:
        """Returns the lowest offset of the log beyond its table's reach; None if there is none.

        If the log has no entries there, this is the end recorded in a checkpoint of the log.
        """
        end = high_watermark(snapshot, partition, self._tail(snapshot, partition))
        topic_id = snapshot.topic_id or ""
        entries = self._entries.get((topic_id, partition), ())
        bases = [each.entry.base_offset for each in entries if each.entry.end > end]
        if bases:
            return min(bases)
        checkpoints = [each.checkpoint for each in self._epochs.values() if each.checkpoint]
        bounds = [(each.bounds or {}).get(topic_id, ())[partition:] for each in checkpoints]
        return max((each[0].end for each in bounds if each and each[0].end > end), default=None)

    def next_sequences(self) -> dict[tuple[int, int], int]:
        """Returns, by broker and open epoch, the sequence after the newest flush of its log."""
        return {(each.broker, each.epoch): each.next_sequence for each in self._epochs.values()}

    def _tail(self, snapshot: TableSnapshot, partition: int) -> tuple[Located, ...]:
        return self._tails.get((snapshot.topic_id or "", partition), ())

    def plan(
        self, topic: str, snapshot: TableSnapshot, partition: int, start: int, end: int
    ) -> list[Slice]:
        """Calls `plan.plan` on the state that the last refresh found."""
        return plan(
            topic=topic,
            snapshot=snapshot,
            tail=self._tail(snapshot, partition),
            partition=partition,
            start=start,
            end=end,
        )
