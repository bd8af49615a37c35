"""Takeover of a root: takes the next epoch of a broker id and recovers what earlier epochs left.

Heartbeats only decide when to try (`storage/liveness.py`). The fence in the WAL of each open epoch
makes the takeover safe: after it, no other broker can ack a record of our partitions.

A live leader refuses every other broker, with two exceptions: a standing broker replaces embedded
and detached ones, because their programs continue as its clients, and `take_over` replaces any
leader. The steps are:

1. Register the new epoch in the metadata, as leader of every partition.
2. Fence every other open epoch, in the order in which they were opened, and read their WALs.
3. Connect each partition's WAL entries to its table, and take over the producers' states.
4. Write the first flush of the new epoch, and check the metadata (`check_opened`). From then on the
   broker may serve.

The older epochs are closed later, when all their entries are published and the new WAL has a
checkpoint of the states that were taken over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from sparklog import errors
from sparklog.broker.log.partitions import Partition, PartitionTable, Topic
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.cluster import Cluster, open_cluster, raise_format
from sparklog.storage.liveness import Leader, LeaderState, LeaderWatch, describe, describe_broker
from sparklog.storage.metadata import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    TopicMetadata,
)
from sparklog.storage.metadata_store import MetadataStore
from sparklog.storage.objects import Store, SyncFailed, in_parallel
from sparklog.storage.plan import join_head, join_tail
from sparklog.storage.processes import Process
from sparklog.storage.snapshot import Bounds, EntryKind, Located, TableSnapshot, WalKind
from sparklog.storage.table import OpenTable, TopicTable, sync_all

_log = structlog.get_logger("sparklog.takeover")
_ON_DEMAND: Final = (BrokerKind.EMBEDDED, BrokerKind.DETACHED)
"""Brokers that programs start for themselves; those programs can use another broker instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The right to write as `broker` in `epoch`, until another broker fences the epoch."""

    cluster: Cluster
    broker: int
    epoch: int
    inherited: tuple[Epoch, ...]
    """Epochs that are fenced and not closed yet."""
    log: WalKind = WalKind.OBJECTS
    """Storage of the epoch's write-ahead log."""


def acquire(
    store: Store,
    meta: MetadataStore,
    *,
    broker: int,
    flight: str,
    clock: Clock,
    dead_after_seconds: float,
    kind: BrokerKind = BrokerKind.STANDING,
    process: Process | None = None,
    take_over: bool = False,
    allow_non_empty: bool = False,
    watch: LeaderWatch | None = None,
    check_alive: bool = True,
    choose_log: Callable[[], WalKind] = lambda: WalKind.OBJECTS,
) -> Leadership:
    """Registers the next epoch of `broker`.

    Raises `BrokerAlive` and the errors of `open_cluster`.

    Args:
        store: the store of the root.
        meta: the root's metadata.
        broker: the broker id.
        flight: the `host:port` that clients connect to.
        clock: gives the wall time of the registration; its monotonic time watches a live leader.
        dead_after_seconds: a leader that is silent for so long is dead; also registered for this
            broker.
        kind: how the broker was started.
        process: the broker's process.
        take_over: replace a live leader of any kind.
        allow_non_empty: create a root even in a folder that holds other programs' files.
        watch: earlier observations of the leader; None starts without any.
        check_alive: False skips the check whether the leader is alive.
        choose_log: returns the storage of the epoch's write-ahead log, once the root exists.
    """
    open_cluster(store, clock=clock, create=True, allow_non_empty=allow_non_empty)
    log = choose_log()
    cluster = raise_format(store, clock=clock)
    watch = watch or LeaderWatch(store, clock=clock, dead_after_seconds=dead_after_seconds)

    def decide(metadata: ClusterMetadata) -> ClusterMetadata:
        if check_alive and not take_over:
            _check_leader(store, watch, metadata, kind, clock)
        known = metadata.brokers.get(broker)
        epoch = known.epoch + 1 if known else 1
        return msgspec.structs.replace(
            metadata,
            brokers={
                **metadata.brokers,
                broker: BrokerRegistration(
                    epoch=epoch,
                    flight=flight,
                    started_us=clock.now_us(),
                    kind=kind,
                    process=process or Process(),
                    dead_after_seconds=dead_after_seconds,
                ),
            },
            open_epochs=(*metadata.open_epochs, Epoch(broker, epoch, log)),
            controller=broker,
            topics={
                name: msgspec.structs.replace(
                    topic,
                    leaders=(broker,) * topic.partition_count,
                    leader_epochs=tuple(each + 1 for each in topic.leader_epochs),
                )
                for name, topic in metadata.topics.items()
            },
        )

    metadata = meta.change(decide)
    epoch = metadata.brokers[broker].epoch
    return Leadership(
        cluster=cluster,
        broker=broker,
        epoch=epoch,
        inherited=tuple(each for each in metadata.open_epochs if each != Epoch(broker, epoch, log)),
        log=log,
    )


def _check_leader(
    store: Store, watch: LeaderWatch, metadata: ClusterMetadata, kind: BrokerKind, clock: Clock
) -> None:
    """Raises `BrokerAlive` if the leader is alive and does not give way to `kind`."""

    def log_wait(leader: Leader, seconds: float) -> None:
        _log.warning(
            "waiting to see whether the root's last broker is alive",
            broker=describe(leader, now_us=clock.now_us()),
            at_most_seconds=seconds,
        )

    leader = Leader.of(metadata, store)
    if leader is None or _gives_way(leader, kind):
        return
    found = watch.wait_for_state(metadata, on_wait=log_wait)
    # The leader may have changed meanwhile. If the new one gives way, `MetadataStore.change`
    # calls this function again with the newest metadata.
    if (
        found is not None
        and found.state is LeaderState.ALIVE
        and not _gives_way(found.leader, kind)
    ):
        raise errors.BrokerAlive(
            root=store.uri,
            broker=found.leader.broker,
            address=found.leader.flight,
            leader=describe(found.leader, now_us=clock.now_us()),
        )


def _gives_way(leader: Leader, kind: BrokerKind) -> bool:
    return kind is BrokerKind.STANDING and leader.known.kind in _ON_DEMAND


def recover(
    store: Store,
    metadata: ClusterMetadata,
    leadership: Leadership,
    *,
    clock: Clock,
    open_table: OpenTable,
) -> PartitionTable:
    """Fences the epochs that `leadership` inherits, and returns the state of every partition.

    Reads the table of every topic. A topic whose table cannot be written is held back. A partition
    is blocked, and accepts no record, if its end is unknown or if acked records are missing from
    both table and logs. Raises `CorruptObject` and `MissingObject` if a write-ahead log cannot be
    read: an operator must look.
    """
    histories = []
    entries: dict[tuple[str, int], list[Located]] = {}
    for epoch in leadership.inherited:
        follower = wal.of(store, clock, epoch.log).follower(epoch.broker, epoch.epoch)
        objects = follower.fence()
        histories.append((follower.checkpoint, objects))
        for located in _all_entries(objects):
            if located.entry.kind in (EntryKind.RECORDS, EntryKind.STAGED):
                key = located.entry.topic_id, located.entry.partition
                entries.setdefault(key, []).append(located)

    # Tables are read after the WALs, so that records published and trimmed meanwhile are in them.
    partition_table = PartitionTable(clock=clock)
    checkpoints = [checkpoint for checkpoint, _ in histories if checkpoint is not None]
    bounds_of = {
        name: [_checkpointed(checkpoints, known.topic_id, n) for n in range(known.partition_count)]
        for name, known in metadata.topics.items()
    }
    tables = {name: open_table(name) for name in metadata.topics}
    refusals = dict(in_parallel(store, _refresh, tables.values()))
    sync_all(store, [tables[name] for name, refusal in refusals.items() if refusal is None])
    for name, known in metadata.topics.items():
        table, checkpointed = tables[name], bounds_of[name]
        snapshot, refusal, is_known = _read_table(table, known, checkpointed, refusals[name])
        topic = Topic(name, known.topic_id, known.config, table)
        topic.held_back = str(refusal) if refusal is not None else None
        partition_table.add_topic(topic)
        topic.spark_batches.record_all(table.batches(known.topic_id))
        topic.spark_batches.is_known = is_known
        partition_table.add_partitions(topic, snapshot, known.leader_epochs)
        for partition in topic.partitions:
            found = entries.get((known.topic_id, partition.number), [])
            bounds = checkpointed[partition.number]
            if bounds is None and not is_known:
                assert refusal is not None
                _block_unknown_end(partition_table, topic, partition, found, refusal)
            else:
                _connect(partition_table, topic, partition, found, bounds)

    for checkpoint, objects in histories:
        if checkpoint is not None:
            partition_table.restore_state(checkpoint.state)
        for located in _all_entries(objects):
            if checkpoint is None or located.at.sequence > checkpoint.sequence:
                partition_table.restore_batch(located.entry)
    return partition_table


def _all_entries(objects: Iterable[wal.WalObject]) -> Iterator[Located]:
    return itertools.chain.from_iterable(each.located for each in objects)


def _checkpointed(
    checkpoints: Sequence[wal.Checkpoint], topic_id: str, partition: int
) -> Bounds | None:
    """Returns the partition's bounds in the newest checkpoint; None if they are unknown.

    A topic that the checkpoint does not name was created later. Without any checkpoint, no epoch
    was ever closed. In both cases the logs hold the partition from offset 0 on.
    """
    if not checkpoints:
        return Bounds(0, 0, 0)
    known = checkpoints[-1].bounds
    if known is None:
        return None
    of_topic = known.get(topic_id, ())
    if partition >= len(of_topic):
        return Bounds(0, 0, 0)
    found = of_topic[partition]
    return found if found.end >= 0 else None


def _refresh(table: TopicTable) -> tuple[str, Exception | None]:
    """Reads a table. Returns the topic, and why the table cannot be written, if so.

    An error in one table does not stop the start of the others.
    """
    try:
        table.refresh()
    except (errors.Retriable, errors.Fenced, SyncFailed):
        raise
    except Exception as error:
        return table.topic, error
    return table.topic, None


def _read_table(
    table: TopicTable,
    known: TopicMetadata,
    checkpointed: Sequence[Bounds | None],
    refusal: Exception | None,
) -> tuple[TableSnapshot, Exception | None, bool]:
    """Returns the table's snapshot, why it cannot be written, if so, and if its ends are known.

    The `txn` actions of a readable table say where its partitions end; if the table is unreadable,
    the WAL's checkpoint does. `refusal`: why it cannot be written, as far as it is known.
    """
    snapshot = table.snapshot
    if refusal is None:
        try:
            table.sync()
        except (errors.Retriable, errors.Fenced, SyncFailed):
            raise
        except Exception as error:
            refusal = error
    if snapshot.topic_id == known.topic_id and snapshot.partitions >= known.partition_count:
        return snapshot, refusal, True
    if refusal is None:
        reason = (
            f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions; it"
            f" was {known.topic_id}, with {known.partition_count}"
        )
        refusal = errors.ForeignTable(topic=table.topic, reason=reason)
    bounds = table.bounds(known.topic_id, known.partition_count)
    if bounds is not None:
        return bounds, refusal, True
    snapshot = TableSnapshot(
        version=-1,
        topic_id=known.topic_id,
        partitions=len(checkpointed),
        starts=tuple(each.start if each else 0 for each in checkpointed),
        ends=tuple(each.published if each else 0 for each in checkpointed),
        files=((),) * len(checkpointed),
    )
    return snapshot, refusal, False


def _connect(
    partition_table: PartitionTable,
    topic: Topic,
    partition: Partition,
    found: Sequence[Located],
    checkpointed: Bounds | None,
) -> None:
    """Adds the entries that continue the table; blocks the partition if records are missing."""
    published = partition.published
    tail = join_tail(published, found)
    end = tail[-1].entry.end if tail else published
    expected = max(
        [*(each.entry.end for each in found), checkpointed.end if checkpointed else 0, end]
    )
    if expected > end:
        beyond = [each.entry.base_offset for each in found if each.entry.end > end]
        hole_end = min(beyond, default=expected)
        hole = errors.MissingObject(
            path=f"{topic.name}-{partition.number}, offsets {end} to {hole_end}",
            reason="neither the table nor any write-ahead log holds them",
        )
        stranded = [each for each in found if each.entry.end > published]
        partition_table.block(topic, partition, hole, end=expected, stranded=stranded)
        topic.held_back = topic.held_back or str(hole)
        return
    partition_table.restore_tail(topic, partition, tail)
    # A published file may be lost before it was confirmed; the logs still have its rows then. They
    # are needed from the checkpoint's offset on; older entries may be gone with their closed epoch.
    kept_from = checkpointed.published if checkpointed else 0
    partition_table.restore_unconfirmed(topic, partition, join_head(kept_from, published, found))


def _block_unknown_end(
    partition_table: PartitionTable,
    topic: Topic,
    partition: Partition,
    found: Sequence[Located],
    refusal: Exception,
) -> None:
    """Blocks a partition whose end neither a checkpoint nor its table says."""
    unknown = errors.MissingObject(
        path=f"the end of {topic.name}-{partition.number}",
        reason=f"no checkpoint of a write-ahead log has it, and its table is unreadable: {refusal}",
    )
    end = max((each.entry.end for each in found), default=0)
    partition_table.block(topic, partition, unknown, end=end, stranded=found, is_end_known=False)


def check_leadership(metadata: ClusterMetadata, leadership: Leadership) -> None:
    """Raises `BrokerFenced`, naming the successor, if `metadata` has a newer leader."""
    known = metadata.brokers.get(metadata.controller)
    if known is None:
        raise errors.BrokerFenced(broker=leadership.broker, epoch=leadership.epoch)
    if metadata.controller != leadership.broker or known.epoch != leadership.epoch:
        raise errors.BrokerFenced(
            broker=leadership.broker,
            epoch=leadership.epoch,
            successor=describe_broker(metadata.controller, known),
        )


def check_opened(meta: MetadataStore, leadership: Leadership) -> None:
    """Checks, after the first flush of our epoch, that no successor has closed it before.

    The folder of a closed epoch in segments is removed, with its fence. So a broker that was
    suspended before its first flush could begin the log again. A successor that takes over from now
    on finds our segment, and puts its fence there. Raises `BrokerFenced`.
    """
    if leadership.log is WalKind.SEGMENTS:
        metadata = meta.reload()
        check_leadership(metadata, leadership)
        if Epoch(leadership.broker, leadership.epoch, leadership.log) not in metadata.open_epochs:
            raise errors.BrokerFenced(broker=leadership.broker, epoch=leadership.epoch)


def close_epochs(meta: MetadataStore, leadership: Leadership, epochs: tuple[Epoch, ...]) -> None:
    """Removes fenced and published epochs from the metadata.

    Raises `BrokerFenced` if a successor has inherited the epochs: it still needs their entries.
    """
    closed = set(epochs)

    def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
        check_leadership(metadata, leadership)
        left = tuple(each for each in metadata.open_epochs if each not in closed)
        if left == metadata.open_epochs:
            return None
        return msgspec.structs.replace(metadata, open_epochs=left)

    meta.change(decide)
