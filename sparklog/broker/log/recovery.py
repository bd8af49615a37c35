"""Recovery: restores the state of every partition from earlier epochs' logs and the tables.

The logs are read first, up to their fences, and the tables afterwards, so that records published
and trimmed in between are found in the tables.

The producers of a partition, its Spark batches and the first offsets of its leader epochs come from
one checkpoint: the one with the greatest (leader epoch, end) for that partition. Every later entry
is applied to them, in the order of offsets. The order in which brokers opened their epochs does not
matter, because another broker may have led the partition in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sparklog import errors
from sparklog.broker.log.led_partitions import (
    Block,
    InheritedPartition,
    InheritedTopic,
    LedPartitions,
)
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.takeover import Taken
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.metadata.cluster_file import read_cluster
from sparklog.storage.metadata.model import ClusterMetadata, Epoch, TopicMetadata
from sparklog.storage.objects import Store, SyncFailed, in_parallel
from sparklog.storage.reading.plan import join_head, join_tail
from sparklog.storage.snapshot import (
    NOT_LED,
    BatchId,
    BatchKind,
    Bounds,
    Entry,
    EntryKind,
    Located,
    TableSnapshot,
)
from sparklog.storage.table.together import sync_all
from sparklog.storage.table.topic_table import OpenTable, TopicTable


def recover(store: Store, taken: Taken, *, clock: Clock, open_table: OpenTable) -> LedPartitions:
    """Returns the state of every partition that this broker leads.

    Reads the table of every topic. Raises what `restore` raises.
    """
    metadata, broker = taken.metadata, taken.leadership.broker
    led_partitions = LedPartitions(broker, clock=clock)
    for name, known in metadata.topics.items():
        led_partitions.add_topic(Topic(name, known.topic_id, known.config, open_table(name)))
    led = {
        name: [number for number, leader in enumerate(known.leaders) if leader == broker]
        for name, known in metadata.topics.items()
    }
    restore(store, led_partitions, taken, led)
    return led_partitions


def restore(
    store: Store,
    led_partitions: LedPartitions,
    taken: Taken,
    wanted: Mapping[str, Iterable[int]],
    *,
    now_seconds: float = -math.inf,
) -> list[Located]:
    """Adds partitions of known topics, all together, and returns their unpublished entries.

    Reads the tables of these topics. A topic whose table cannot be written is held back. A
    partition is blocked, and accepts no records, if its end is unknown or if acked records are
    missing from both table and logs. Raises the store's errors.

    `wanted`: the numbers of the partitions assigned to this broker, by topic. `now_seconds`: the
    monotonic time, if it already serves clients.
    """
    metadata, logs = taken.metadata, _Logs()
    for epoch, (checkpoint, flushes) in zip(
        taken.leadership.inherited, taken.histories, strict=True
    ):
        logs.add(epoch, flushes, checkpoint)
    pasts = {
        name: {number: logs.past_of(metadata.topics[name].topic_id, number) for number in numbers}
        for name, numbers in wanted.items()
    }
    topics = {
        name: topic
        for name in wanted
        # A topic that was recreated under the name is a different one.
        if (topic := led_partitions.by_id(metadata.topics[name].topic_id)) is not None
    }
    refusals = refresh_all(store, [topic.table for topic in topics.values()])
    tables = {
        name: _read_table(
            topic.table,
            metadata.topics[name],
            {number: past.bounds for number, past in pasts[name].items()},
            refusals[name],
        )
        for name, topic in topics.items()
    }
    inherited = [
        _inherited(topic, metadata.topics[name], tables[name], pasts[name])
        for name, topic in topics.items()
    ]
    return led_partitions.inherit(
        inherited, logs.states(metadata, pasts), version=metadata.version, now_seconds=now_seconds
    )


def _inherited(
    topic: Topic, known: TopicMetadata, table: _Table, pasts: Mapping[int, _Past]
) -> InheritedTopic:
    """Returns the partitions of a topic, with the entries that continue its table."""
    return InheritedTopic(
        topic=topic,
        known=known,
        held_back=str(table.refusal) if table.refusal is not None and pasts else None,
        batches=table.batches,
        are_batches_known=table.is_known,
        partitions=[
            _connected(
                topic,
                Partition(
                    number,
                    leader_epoch=known.leader_epochs[number],
                    start=table.snapshot.starts[number],
                    published=table.snapshot.ends[number],
                    since_version=table.snapshot.version,
                ),
                table,
                past,
            )
            for number, past in pasts.items()
        ],
    )


# ------------------------------------------------------------------------------ logs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """A partition in the logs of earlier epochs."""

    state: int
    """The number in `_Logs` of the checkpoint with the partition's state; -1 if there is none."""
    bounds: Bounds | None
    """The partition's bounds in that checkpoint; None if its end is unknown."""
    epochs: tuple[tuple[int, int], ...]
    """(leader epoch, its first offset), as of that checkpoint."""
    found: Sequence[Located]
    """The entries that still exist."""
    later: Sequence[Entry]
    """Those of them that the checkpoint does not reflect, in the order of offsets."""


class _Logs:
    """Entries and checkpoints of the inherited epochs."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], list[Located]] = {}
        """By topic id and partition."""
        self._opened: dict[tuple[int, int], int] = {}
        """The order in which the epochs were opened."""
        self._checkpoints: list[tuple[Epoch, wal.Checkpoint]] = []

    def add(
        self, epoch: Epoch, flushes: Sequence[wal.WalObject], checkpoint: wal.Checkpoint | None
    ) -> None:
        """Adds an epoch. Epochs must be added in the order in which they were opened."""
        self._opened[epoch.broker, epoch.epoch] = len(self._opened)
        if checkpoint is not None:
            self._checkpoints.append((epoch, checkpoint))
        for flush in flushes:
            for each in flush.located:
                if each.entry.kind in (EntryKind.RECORDS, EntryKind.STAGED):
                    key = each.entry.topic_id, each.entry.partition
                    self._entries.setdefault(key, []).append(each)

    def past_of(self, topic_id: str, partition: int) -> _Past:
        """Returns the partition as found in the logs.

        A partition that no checkpoint names was created later, or no epoch was ever closed. In both
        cases the logs contain it from offset 0 on.
        """
        found = self._entries.get((topic_id, partition), [])
        state, newest = -1, Bounds(0, 0, 0)
        start = published = 0
        for number, (_, checkpoint) in enumerate(self._checkpoints):
            bounds = _bounds_in(checkpoint, topic_id, partition)
            if bounds is None:
                continue
            start, published = max(start, bounds.start), max(published, bounds.published)
            if state < 0 or _age(newest) <= _age(bounds):
                state, newest = number, bounds
        # A leader that could not read the table knew less about it than its predecessors, whose
        # logs have dropped what they had published.
        newest = msgspec.structs.replace(newest, start=start, published=published)
        if newest.end >= 0:
            later = [each.entry for each in found if each.entry.base_offset >= newest.end]
        else:
            later = [each.entry for each in found if self._follows(each, state)]
        return _Past(
            state=state,
            bounds=newest if newest.end >= 0 else None,
            epochs=newest.epochs,
            found=found,
            later=sorted(later, key=lambda entry: entry.base_offset),
        )

    def _follows(self, located: Located, state: int) -> bool:
        """Returns whether an entry was written after a checkpoint without the partition's end."""
        epoch, checkpoint = self._checkpoints[state]
        at = located.at
        written = self._opened[at.broker, at.epoch], at.sequence
        return written > (self._opened[epoch.broker, epoch.epoch], checkpoint.sequence)

    def states(
        self, metadata: ClusterMetadata, pasts: Mapping[str, Mapping[int, _Past]]
    ) -> Iterator[tuple[bytes, Container[tuple[str, int]]]]:
        """Yields each checkpoint's state, with the (topic id, partition) pairs to use from it."""
        wanted: dict[int, set[tuple[str, int]]] = {}
        for name, of_topic in pasts.items():
            topic_id = metadata.topics[name].topic_id
            for partition, past in of_topic.items():
                wanted.setdefault(past.state, set()).add((topic_id, partition))
        for number, (_, checkpoint) in enumerate(self._checkpoints):
            if number in wanted:
                yield checkpoint.state, wanted[number]


def _bounds_in(checkpoint: wal.Checkpoint, topic_id: str, partition: int) -> Bounds | None:
    """Returns a partition's bounds in a checkpoint, with an end of -1 if unknown; None: absent."""
    if checkpoint.bounds is None:
        return Bounds(0, 0, -1)
    of_topic = checkpoint.bounds.get(topic_id, ())
    found = of_topic[partition] if partition < len(of_topic) else NOT_LED
    return found if found != NOT_LED else None


def _age(bounds: Bounds) -> tuple[int, int]:
    """Orders the checkpoints of one partition. Each leader epoch belongs to a single leader."""
    return bounds.leader_epoch, bounds.end


# ------------------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True)
class _Table:
    """A topic's table, as it was read."""

    snapshot: TableSnapshot
    refusal: Exception | None
    """The reason the table cannot be written; None if it can."""
    is_known: bool
    """True if `snapshot` has the ends of its partitions."""
    batches: Sequence[tuple[BatchId, BatchKind, int]]
    """See `TopicTable.batches`."""


def refresh_all(store: Store, tables: Sequence[TopicTable]) -> dict[str, Exception | None]:
    """Reads tables, and makes their state durable.

    Returns, by topic, why its table cannot be written; None if it can be, as far as is known.
    The requests are made through `store`.
    """
    tables = [table.through(store) for table in tables]
    refusals = dict(in_parallel(store, _refresh, tables))
    sync_all(store, [table for table in tables if refusals[table.topic] is None])
    return refusals


def _refresh(table: TopicTable) -> tuple[str, Exception | None]:
    """Reads a table. Returns the topic, and the reason the table cannot be written, or None."""
    return table.topic, refusal_of(table.store, table.refresh)


def refusal_of(store: Store, use: Callable[[], object]) -> Exception | None:
    """Uses a table, and returns the error if that fails, else None.

    An error in one table does not stop the work on others, even if the store refuses one folder
    (EIO, or a bucket's 503 for one prefix). Raises errors that are not specific to the table: of a
    store that does not return the root's identity either, or whose syncs fail.
    """
    try:
        use()
    except (errors.Fenced, SyncFailed):
        raise
    except errors.Retriable as error:
        read_cluster(store)
        return error
    except Exception as error:
        return error
    return None


def _read_table(
    table: TopicTable,
    known: TopicMetadata,
    checkpointed: Mapping[int, Bounds | None],
    refusal: Exception | None,
) -> _Table:
    """Reads the bounds and batches in a table that has been refreshed.

    The `txn` actions of a readable table record where its partitions end; if the table is
    unreadable, the WAL's checkpoint does. `refusal`: why it cannot be written, as far as is known.
    """
    snapshot = table.snapshot
    if refusal is None:
        refusal = refusal_of(table.store, table.sync)
    # An earlier read of it may lack records that the logs no longer have.
    is_stale = isinstance(refusal, errors.Retriable)
    is_same = snapshot.topic_id == known.topic_id and snapshot.partitions >= known.partition_count
    if is_same and not is_stale:
        return _Table(snapshot, refusal, is_known=True, batches=table.batches(known.topic_id))
    if refusal is None:
        reason = (
            f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions; it"
            f" was {known.topic_id}, with {known.partition_count}"
        )
        refusal = errors.ForeignTable(topic=table.topic, reason=reason)
    bounds = table.bounds(known.topic_id, known.partition_count)
    if bounds is not None and not is_stale:
        return _Table(bounds, refusal, is_known=True, batches=table.batches(known.topic_id))
    count = known.partition_count
    at = [checkpointed.get(number) or Bounds(0, 0, 0) for number in range(count)]
    snapshot = TableSnapshot(
        version=-1,
        topic_id=known.topic_id,
        partitions=count,
        starts=tuple(each.start for each in at),
        ends=tuple(each.published for each in at),
        files=((),) * count,
    )
    return _Table(snapshot, refusal, is_known=False, batches=table.batches(known.topic_id))


def _connected(
    topic: Topic, partition: Partition, table: _Table, past: _Past
) -> InheritedPartition:
    """Returns a partition with the entries that continue the table, or with its block."""
    published, found, bounds = partition.published, past.found, past.bounds
    if bounds is None and not table.is_known:
        block = _unknown_end(topic, partition, found, table.refusal)
        return InheritedPartition(
            partition=partition, block=block, epochs=past.epochs, later=past.later
        )
    tail = join_tail(published, found)
    end = tail[-1].entry.end if tail else published
    expected = max([*(each.entry.end for each in found), bounds.end if bounds else 0, end])
    if expected > end:
        beyond = [each.entry.base_offset for each in found if each.entry.end > end]
        hole_end = min(beyond, default=expected)
        hole = errors.MissingObject(
            path=f"{topic.name}-{partition.number}, offsets {end} to {hole_end}",
            reason="neither the table nor any write-ahead log holds them",
        )
        stranded = [each for each in found if each.entry.end > published]
        return InheritedPartition(
            partition=partition,
            block=Block(reason=hole, end=expected, stranded=stranded),
            epochs=past.epochs,
            later=past.later,
        )
    # A published file may be lost before it is confirmed; the logs then still have its rows. They
    # are needed from the checkpoint's offset on; older entries may be gone with their closed epoch.
    kept_from = bounds.published if bounds else 0
    return InheritedPartition(
        partition=partition,
        tail=tail,
        unconfirmed=[*join_head(kept_from, published, found)],
        epochs=past.epochs,
        later=past.later,
    )


def _unknown_end(
    topic: Topic, partition: Partition, found: Sequence[Located], refusal: Exception | None
) -> Block:
    """Returns the block of a partition whose end is in neither a checkpoint nor its table."""
    assert refusal is not None
    unknown = errors.MissingObject(
        path=f"the end of {topic.name}-{partition.number}",
        reason=f"no checkpoint of a write-ahead log has it, and its table is unreadable: {refusal}",
    )
    end = max((each.entry.end for each in found), default=0)
    return Block(reason=unknown, end=end, stranded=found, is_end_known=False)
