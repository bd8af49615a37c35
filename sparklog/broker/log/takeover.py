"""Takeover of a root: the right to write, in the next epoch of a broker id.

Heartbeats only decide when to try (`storage/liveness.py`). The fence in the WAL of each open epoch
makes the takeover safe: after it, no other broker can ack a record of our partitions.

A live leader refuses every other broker, with two exceptions: a standing broker replaces embedded
and detached ones, because their programs continue as its clients, and `take_over` replaces any
leader. The steps are:

1. Register the new epoch in the metadata, as leader of every partition.
2. Fence every other open epoch, in the order in which they were opened, and read their WALs
   (`recovery`).
3. Connect each partition's WAL entries to its table, and take over the producers' states.
4. Write the first flush of the new epoch, and check the metadata (`check_opened`). From then on the
   broker may serve.

The older epochs are closed later, when all their entries are published and the new WAL has a
checkpoint of the states that were taken over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.cluster import Cluster, open_cluster, raise_format
from sparklog.storage.liveness import Leader, LeaderState, LeaderWatch, describe, describe_broker
from sparklog.storage.metadata import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
)
from sparklog.storage.metadata_store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.processes import Process
from sparklog.storage.snapshot import WalKind

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
