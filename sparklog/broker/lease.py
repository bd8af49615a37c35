"""Taking a root: the next epoch of a broker id, and everything that earlier epochs left behind.

Heartbeats only decide whether to try (`storage/liveness.py`). What makes the takeover safe is the
fence in each open epoch's WAL: after it, nobody but us can ack a record of our partitions.

A live leader is in the way of everybody, but for two: a standing broker takes over from embedded
and detached ones by itself, because their programs go on as its clients; and one that was told to
take over does. The order:

1. register the new epoch in the metadata, as leader of every partition;
2. fence every other open epoch, in the order in which they were opened, and read what they hold;
3. connect each partition's WAL entries to its table, and take over the producers' states;
4. put the *open* object of our own epoch. Now we may serve.

The older epochs are closed later, once all they hold is published and our own WAL has a checkpoint
of the states that we took over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from sparklog import errors
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.liveness import Leader, State, Watch, describe, describe_broker
from sparklog.storage.meta import (
    Broker,
    BrokerKind,
    Cluster,
    Epoch,
    Metadata,
    MetaStore,
    PartitionMeta,
    TopicMeta,
)
from sparklog.storage.objects import Store, SyncFailed
from sparklog.storage.plan import join_tail
from sparklog.storage.processes import Process
from sparklog.storage.snapshot import Bounds, Kind, Located, TableSnapshot
from sparklog.storage.table import Table

_log = structlog.get_logger("sparklog.lease")
_ON_DEMAND: Final = (BrokerKind.EMBEDDED, BrokerKind.DETACHED)
"""Brokers that programs have started for themselves: they can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write as `broker` in `epoch`, until somebody fences it."""

    cluster: Cluster
    broker: int
    epoch: int
    inherited: tuple[Epoch, ...]
    """Epochs that are fenced and not yet closed."""


def acquire(
    store: Store,
    meta: MetaStore,
    *,
    broker: int,
    flight: str,
    clock: Clock,
    dead_after_seconds: float,
    kind: BrokerKind = BrokerKind.STANDING,
    process: Process | None = None,
    take_over: bool = False,
    watch: Watch | None = None,
    check_alive: bool = True,
) -> Lease:
    """Registers the next epoch of `broker`. Raises `BrokerAlive`, and what `MetaStore.open` raises.

    Args:
        store: of the root.
        meta: the root's metadata.
        broker: the id.
        flight: `host:port` that clients are told.
        clock: for its own wall time, and to watch a live leader by monotonic time.
        dead_after_seconds: after how long a silent leader is dead; also said of this broker.
        kind: how the broker was started.
        process: of the broker.
        take_over: replace a live leader, whatever it is.
        watch: what has been seen of the leader so far; None: nothing.
        check_alive: False: do not look whether the leader is alive.
    """
    cluster = meta.open(create=True)
    watch = watch or Watch(store, clock=clock, dead_after_seconds=dead_after_seconds)

    def decide(metadata: Metadata) -> Metadata:
        if check_alive and not take_over:
            _check_leader(store, watch, metadata, kind, clock)
        known = metadata.brokers.get(broker)
        epoch = known.epoch + 1 if known else 1
        return msgspec.structs.replace(
            metadata,
            brokers={
                **metadata.brokers,
                broker: Broker(
                    epoch=epoch,
                    flight=flight,
                    started_us=clock.now_us(),
                    kind=kind,
                    process=process or Process(),
                    dead_after_seconds=dead_after_seconds,
                ),
            },
            open_epochs=(*metadata.open_epochs, Epoch(broker, epoch)),
            controller=broker,
            topics={
                name: msgspec.structs.replace(
                    topic,
                    partitions=tuple(
                        PartitionMeta(leader=broker, leader_epoch=each.leader_epoch + 1)
                        for each in topic.partitions
                    ),
                )
                for name, topic in metadata.topics.items()
            },
        )

    metadata = meta.change(decide)
    epoch = metadata.brokers[broker].epoch
    return Lease(
        cluster=cluster,
        broker=broker,
        epoch=epoch,
        inherited=tuple(each for each in metadata.open_epochs if each != Epoch(broker, epoch)),
    )


def _check_leader(
    store: Store, watch: Watch, metadata: Metadata, kind: BrokerKind, clock: Clock
) -> None:
    """Raises `BrokerAlive` where the leader is alive and does not give way to `kind`."""

    def waits(leader: Leader, seconds: float) -> None:
        _log.warning(
            "waiting to see whether the root's last broker is alive",
            broker=describe(leader, now_us=clock.now_us()),
            at_most_seconds=seconds,
        )

    leader = Leader.of(metadata, store)
    if leader is None or _gives_way(leader, kind):
        return
    found = watch.settle(metadata, waits=waits)
    if found is not None and found.state is State.ALIVE:
        raise errors.BrokerAlive(
            root=store.uri,
            broker=found.leader.broker,
            address=found.leader.flight,
            leader=describe(found.leader, now_us=clock.now_us()),
        )


def _gives_way(leader: Leader, kind: BrokerKind) -> bool:
    return kind is BrokerKind.STANDING and leader.known.kind in (
        BrokerKind.EMBEDDED,
        BrokerKind.DETACHED,
    )


def recover(
    store: Store, metadata: Metadata, lease: Lease, tables: dict[str, Table], *, clock: Clock
) -> Ledger:
    """Fences what `lease` inherits, and says what every partition holds.

    `tables` is filled with a refreshed table for every topic. A topic whose table cannot be written
    is held back; a partition is blocked, and takes no record, where its end is not known or acked
    records can be found nowhere. Raises `CorruptObject` and `MissingObject` where a write-ahead log
    cannot be read: a person must look.
    """
    histories = []
    entries: dict[tuple[str, int], list[Located]] = {}
    for epoch in lease.inherited:
        follower = wal.Follower(store, epoch.broker, epoch.epoch)
        objects = wal.fence(store, follower, clock=clock)
        histories.append((follower.checkpoint, objects))
        for located in _all_entries(objects):
            if located.entry.kind in (Kind.RECORDS, Kind.STAGED):
                key = located.entry.topic_id, located.entry.partition
                entries.setdefault(key, []).append(located)

    # The tables come after the WALs: what was published and trimmed meanwhile is then in them.
    ledger = Ledger(clock=clock)
    checkpoints = [checkpoint for checkpoint, _ in histories if checkpoint is not None]
    for name, known in metadata.topics.items():
        table = tables[name] = Table(store, name, clock=clock)
        told = [_told(checkpoints, known.topic_id, each) for each in range(len(known.partitions))]
        snapshot, refusal, is_known = _look_at(table, known, told)
        topic = Topic(name, known.topic_id, known.config)
        topic.held_back = str(refusal) if refusal is not None else None
        ledger.add_topic(topic)
        topic.standing.learn(table.batches(known.topic_id))
        topic.standing.is_known = is_known
        ledger.add_partitions(topic, snapshot, [each.leader_epoch for each in known.partitions])
        for partition in topic.partitions:
            found = entries.get((known.topic_id, partition.number), [])
            bounds = told[partition.number]
            if bounds is None and not is_known:
                assert refusal is not None
                _strand(ledger, topic, partition, found, refusal)
            else:
                _connect(ledger, topic, partition, found, bounds)

    for checkpoint, objects in histories:
        if checkpoint is not None:
            ledger.restore_state(checkpoint.state)
        for located in _all_entries(objects):
            if checkpoint is None or located.at.sequence > checkpoint.sequence:
                ledger.remember(located.entry)
    return ledger


def _all_entries(objects: Iterable[wal.WalObject]) -> Iterator[Located]:
    return itertools.chain.from_iterable(each.located for each in objects)


def _told(checkpoints: Sequence[wal.Checkpoint], topic_id: str, partition: int) -> Bounds | None:
    """What the newest checkpoint says of the partition; None where that is not known.

    A topic that it does not name was created later, and without any checkpoint no epoch was ever
    closed: then the logs hold all of it, from offset 0 on.
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


def _look_at(
    table: Table, known: TopicMeta, told: Sequence[Bounds | None]
) -> tuple[TableSnapshot, Exception | None, bool]:
    """What the topic's table holds, why nobody can write it, if so, and if its ends are known.

    What we have written is told by `txn` in any table that can be read at all; where it cannot, by
    the write-ahead log's checkpoint. Whatever is wrong with one table, the others are served.
    """
    refusal: Exception | None = None
    try:
        snapshot = table.refresh()
        table.settle()
    except (errors.Retriable, errors.Fenced, SyncFailed):
        raise
    except Exception as error:
        snapshot, refusal = table.snapshot, error
    if snapshot.topic_id == known.topic_id and snapshot.partitions >= len(known.partitions):
        return snapshot, refusal, True
    if refusal is None:
        reason = (
            f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions; it"
            f" was {known.topic_id}, with {len(known.partitions)}"
        )
        refusal = errors.ForeignTable(topic=table.topic, reason=reason)
    bounds = table.bounds(known.topic_id, len(known.partitions))
    if bounds is not None:
        return bounds, refusal, True
    snapshot = TableSnapshot(
        version=-1,
        topic_id=known.topic_id,
        partitions=len(told),
        starts=tuple(each.start if each else 0 for each in told),
        ends=tuple(each.published if each else 0 for each in told),
        files=((),) * len(told),
    )
    return snapshot, refusal, False


def _connect(
    ledger: Ledger,
    topic: Topic,
    partition: Partition,
    found: Sequence[Located],
    told: Bounds | None,
) -> None:
    """Takes up the entries that continue the table, without a hole up to the last acked record."""
    published = partition.published
    tail = join_tail(published, found)
    end = tail[-1].entry.end if tail else published
    expected = max([*(each.entry.end for each in found), told.end if told else 0, end])
    if expected > end:
        beyond = [each.entry.base_offset for each in found if each.entry.end > end]
        hole_end = min(beyond, default=expected)
        hole = errors.MissingObject(
            path=f"{topic.name}-{partition.number}, offsets {end} to {hole_end}",
            reason="neither the table nor any write-ahead log holds them",
        )
        stranded = [each for each in found if each.entry.end > published]
        ledger.block(topic, partition, hole, end=expected, stranded=stranded)
        topic.held_back = topic.held_back or str(hole)
        return
    ledger.restore_tail(topic, partition, tail)
    # Their files may have gone before anybody looked, and then the logs still have the rows.
    kept_from = min((each.entry.base_offset for each in found), default=published)
    kept = join_tail(told.published if told else kept_from, found)
    ledger.restore_unconfirmed(
        partition, [each for each in kept if each.entry.end <= partition.published]
    )


def _strand(
    ledger: Ledger,
    topic: Topic,
    partition: Partition,
    found: Sequence[Located],
    refusal: Exception,
) -> None:
    """Blocks a partition of which nobody knows where it ends."""
    unknown = errors.MissingObject(
        path=f"the end of {topic.name}-{partition.number}",
        reason=f"no checkpoint of a write-ahead log has it, and its table is unreadable: {refusal}",
    )
    end = max((each.entry.end for each in found), default=0)
    ledger.block(topic, partition, unknown, end=end, stranded=found, is_end_known=False)


def check_lease(metadata: Metadata, lease: Lease) -> None:
    """Raises `BrokerFenced`, which names it, where `metadata` knows a newer leader."""
    known = metadata.brokers.get(metadata.controller)
    if known is None:
        raise errors.BrokerFenced(broker=lease.broker, epoch=lease.epoch)
    if metadata.controller != lease.broker or known.epoch != lease.epoch:
        raise errors.BrokerFenced(
            broker=lease.broker,
            epoch=lease.epoch,
            successor=describe_broker(metadata.controller, known),
        )


def close_epochs(meta: MetaStore, lease: Lease, epochs: tuple[Epoch, ...]) -> None:
    """Takes fenced and published epochs out of the metadata.

    Raises `BrokerFenced`: a successor that has inherited them still builds on what they hold.
    """
    gone = set(epochs)

    def decide(metadata: Metadata) -> Metadata | None:
        check_lease(metadata, lease)
        left = tuple(each for each in metadata.open_epochs if each not in gone)
        if left == metadata.open_epochs:
            return None
        return msgspec.structs.replace(metadata, open_epochs=left)

    meta.change(decide)
