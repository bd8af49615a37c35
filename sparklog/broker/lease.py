"""Taking a root: the next epoch of a broker id, and everything that earlier epochs left behind.

Clocks and heartbeats only decide whether to try. What makes the takeover safe is the fence in each
open epoch's WAL: after it, nobody but us can ack a record of our partitions. The order:

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

import msgspec

from sparklog import errors
from sparklog.broker.partitions import Ledger, Partition, Topic
from sparklog.clock import Clock
from sparklog.storage import wal
from sparklog.storage.meta import (
    Broker,
    Cluster,
    Epoch,
    Metadata,
    MetaStore,
    PartitionMeta,
    TopicMeta,
    find_live_broker,
)
from sparklog.storage.objects import Store
from sparklog.storage.plan import join_tail
from sparklog.storage.snapshot import Kind, Located, TableSnapshot
from sparklog.storage.table import Table


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
    check_alive: bool = True,
    replaces: bool = True,
) -> Lease:
    """Registers the next epoch of `broker`. Raises `BrokerAlive`, and what `MetaStore.open` raises.

    A live broker of another id is in the way; one of the same id is replaced, if it may be.
    """
    cluster = meta.open(create=True)

    def decide(metadata: Metadata) -> Metadata:
        if check_alive:
            alive = find_live_broker(store, clock=clock, dead_after_seconds=dead_after_seconds)
            if alive is not None and not (replaces and alive[0] == broker):
                raise errors.BrokerAlive(root=store.uri, broker=alive[0], address=alive[1])
        known = metadata.brokers.get(broker)
        epoch = known.epoch + 1 if known else 1
        return msgspec.structs.replace(
            metadata,
            brokers={
                **metadata.brokers,
                broker: Broker(epoch=epoch, flight=flight, started_us=clock.now_us()),
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


def recover(
    store: Store, metadata: Metadata, lease: Lease, tables: dict[str, Table], *, clock: Clock
) -> Ledger:
    """Fences what `lease` inherits, and says what every partition holds.

    `tables` is filled with a refreshed table for every topic; a topic whose table cannot be written
    is held back. Raises `CorruptObject`, `MissingObject` and `ForeignTable` where acked records
    cannot be found: a person must look.
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
    for name, known in metadata.topics.items():
        table = tables[name] = Table(store, name, clock=clock)
        snapshot, held_back = _look_at(table, known)
        table.settle()
        topic = Topic(name, known.topic_id, known.config)
        topic.held_back = held_back
        ledger.add_topic(topic)
        for batch_id, kind, at_us in table.batches(known.topic_id):
            topic.standing.note(batch_id, kind, at_us)
        ledger.add_partitions(topic, snapshot, [each.leader_epoch for each in known.partitions])
        for partition in topic.partitions:
            found = entries.get((known.topic_id, partition.number), [])
            ledger.restore_tail(topic, partition, _connect(topic, partition, found))

    for checkpoint, objects in histories:
        if checkpoint is not None:
            ledger.restore_state(checkpoint.state)
        for located in _all_entries(objects):
            if checkpoint is None or located.at.sequence > checkpoint.sequence:
                ledger.remember(located.entry)
    return ledger


def _all_entries(objects: Iterable[wal.WalObject]) -> Iterator[Located]:
    return itertools.chain.from_iterable(each.located for each in objects)


def _look_at(table: Table, known: TopicMeta) -> tuple[TableSnapshot, str | None]:
    """What the topic's table holds, and why nobody can write it, if so.

    Our commits are whole, so none of ours lies beyond another's that is torn; and what we have
    written is told by `txn` in any table.
    """
    try:
        snapshot, held_back = table.refresh(), None
    except errors.Corrupt as error:
        snapshot, held_back = table.snapshot, error
    if snapshot.topic_id != known.topic_id or snapshot.partitions < len(known.partitions):
        refusal = held_back or errors.ForeignTable(
            topic=table.topic,
            reason=(
                f"its topic id is {snapshot.topic_id}, with {snapshot.partitions} partitions; it"
                f" was {known.topic_id}, with {len(known.partitions)}"
            ),
        )
        bounds = table.bounds(known.topic_id, len(known.partitions))
        if bounds is None:
            raise refusal
        snapshot, held_back = bounds, refusal
    return snapshot, str(held_back) if held_back is not None else None


def _connect(topic: Topic, partition: Partition, found: Sequence[Located]) -> tuple[Located, ...]:
    """The entries that continue the table, without a hole up to the last one that was acked."""
    tail = join_tail(partition.published, found)
    end = tail[-1].entry.end if tail else partition.published
    beyond = [each.entry.base_offset for each in found if each.entry.end > end]
    if beyond:
        raise errors.MissingObject(
            path=f"{topic.name}-{partition.number}, offsets {end} to {min(beyond)}",
            reason="neither the table nor any write-ahead log holds them",
        )
    return tail


def check_lease(metadata: Metadata, lease: Lease) -> None:
    """Raises `BrokerFenced` where `metadata` knows a newer epoch of the broker, or another."""
    known = metadata.brokers.get(lease.broker)
    if metadata.controller != lease.broker or known is None or known.epoch != lease.epoch:
        raise errors.BrokerFenced(broker=lease.broker, epoch=lease.epoch)


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
