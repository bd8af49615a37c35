"""Takeover of a root: the right to write, in the next epoch of a broker id.

Heartbeats only decide when to try (`storage/metadata/liveness.py`). The fences in the WALs of all
open epochs make the takeover safe: once they are put, no other broker can ack a record of our
partitions.

A live leader refuses every other broker, with two exceptions: a standing broker replaces embedded
and detached ones, because their programs continue as its clients, and `take_over` replaces any
leader. The steps are:

1. Register the new epoch in the metadata. It leads nothing yet (`acquire`).
2. Fence every other epoch that may still write, and read its log. Then, in one metadata change,
   take over the partitions of all of them and become the heir to their epochs (`take`). A member of
   a cluster takes over only those of its own id, and of brokers that lead the root alone.
3. Connect each partition's WAL entries to its table, and take over the producers' states
   (`recovery`).
4. Write the first flush of the new epoch, and check the metadata (`check_opened`). From then on the
   broker may serve.

So no partition gets a new leader before its old one can no longer write
(`storage/metadata/leadership.py`). If a broker crashes between two steps, the partitions remain
with the old leader, whose log may already have a fence, or with the crashed broker; the next start
repeats the steps.

If two brokers start concurrently, the one that registered last takes over: it fences the other one,
which gives up as soon as it finds the later registration, and never fences a later one itself. If
each fenced the other, neither would serve.

Members of a cluster lead a root together. While it serves, a member may be assigned partitions of
another one that has died: the controller has fenced the log of the dead member
(`broker/failover/controller.py`), and each successor reads that log once the metadata names it as
the leader (`read_inherited`).

A broker leaves an older epoch later (`leave_epochs`), once all entries of the epoch are published
and the new WAL has a checkpoint of the states that were taken over. An epoch without heirs is
closed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import ENDS_THE_BROKER
from sparklog.broker.log.histories import Histories, History
from sparklog.clock import Clock
from sparklog.storage.metadata.cluster_file import (
    Cluster,
    level_of_new,
    open_cluster,
    raise_format,
)
from sparklog.storage.metadata.leadership import (
    check_lease,
    elect,
    failover,
    inherit,
    inherited_by,
    is_open,
    leave,
    other_members,
    register,
    succeed,
)
from sparklog.storage.metadata.liveness import (
    Leader,
    LeaderState,
    LeaderWatch,
    describe,
    describe_broker,
)
from sparklog.storage.metadata.model import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    Membership,
)
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
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
    inherited: tuple[Epoch, ...] = ()
    """Epochs that this broker is heir to, oldest first; none before `take`."""
    log: WalKind = WalKind.OBJECTS
    """Storage of the epoch's write-ahead log."""
    is_member: bool = False
    """True if the broker shares the root with others; False if it leads all partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Partitions that were taken over."""

    leadership: Leadership
    metadata: ClusterMetadata
    """The version that names the broker as their leader."""
    histories: Sequence[History]
    """Contents of the logs of the inherited epochs, in the same order."""


def acquire(
    store: Store,
    meta: MetadataStore,
    broker: int,
    registration: BrokerRegistration,
    *,
    clock: Clock,
    take_over: bool = False,
    allow_non_empty: bool = False,
    watch: LeaderWatch | None = None,
    watch_of: Callable[[int], LeaderWatch] | None = None,
    check_alive: bool = True,
    choose_log: Callable[[], WalKind] = lambda: WalKind.OBJECTS,
) -> Leadership:
    """Registers the next epoch of `broker`, which others watch from now on.

    A member is refused by a live broker of the same id, and by one that leads the root alone; any
    other broker by the live leader of the root, and by live members. Raises `BrokerAlive`, what
    `open_cluster` raises, and `FormatTooNew` if the root has a feature level that this release does
    not support.

    Args:
        store: the store of the root.
        meta: the root's metadata.
        broker: the broker id.
        registration: the broker's addresses, kind, process and `dead_after_seconds`, after which a
            silent leader counts as dead here too. Its epoch, time and level are set here.
        clock: its wall time is recorded in the registration; its monotonic time watches a leader.
        take_over: replace a live leader of any kind.
        allow_non_empty: create a root even in a folder that contains other programs' files.
        watch: earlier observations of the leader, or of a member's own id; None: none.
        watch_of: returns a watch over another broker; None: one that treats silence as death.
        check_alive: False skips the check whether the leader is alive.
        choose_log: returns the storage of the epoch's write-ahead log, once the root exists.
    """
    open_cluster(
        store,
        clock=clock,
        create=True,
        allow_non_empty=allow_non_empty,
        on_created=lambda: _log.info("created a new log", root=store.uri),
    )
    log = choose_log()
    cluster = raise_format(store, 1, clock=clock)
    is_member, dead_after_seconds = registration.is_member, registration.dead_after_seconds
    registration = msgspec.structs.replace(
        registration,
        started_us=clock.now_us(),
        known_level=limits.LEVEL if limits.LEVEL > 1 else msgspec.UNSET,
    )

    def silent_watch(other: int | None) -> LeaderWatch:
        return LeaderWatch(store, clock=clock, dead_after_seconds=dead_after_seconds, broker=other)

    watch = watch or silent_watch(broker if is_member else None)
    watch_other = functools.cache(watch_of or silent_watch)
    tried: list[BrokerRegistration] = []
    """Our attempted registrations; it may be unknown which of them were made."""

    def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
        if check_alive and not take_over:
            others = _lone_leader(metadata) if is_member else other_members(metadata)
            watches = [watch, *(watch_other(other) for other in others)]
            if others:
                for each in watches:
                    each.poll(metadata)  # so that the silence of all of them counts from now on
            for each in watches:
                _check_leader(store, each, metadata, broker, registration.kind, clock, tried)
        level = metadata.level if metadata.version else level_of_new(cluster)
        registered = register(metadata, broker, _at_level(registration, level), log)
        registered = msgspec.structs.replace(registered, level=level)
        tried.append(registered.brokers[broker])
        if is_member and _has_controller(metadata, broker):
            return registered
        return elect(registered, broker, registered.brokers[broker].epoch) or registered

    metadata = _change(meta, decide)
    epoch = metadata.brokers[broker].epoch
    return Leadership(cluster=cluster, broker=broker, epoch=epoch, log=log, is_member=is_member)


def _at_level(registration: BrokerRegistration, level: int) -> BrokerRegistration:
    """Returns the registration that a root of this level may contain.

    Raises `NeedsFeatureLevel` for a member with several listeners, which others have to know.
    """
    membership = registration.membership
    if level >= limits.LISTENERS_LEVEL or not isinstance(membership, Membership):
        return registration
    if len(membership.listeners) > 1 or membership.flight:
        raise errors.NeedsFeatureLevel(
            what="a member of a cluster with several listeners of one protocol",
            needed=limits.LISTENERS_LEVEL,
            level=level,
        )
    return msgspec.structs.replace(
        registration, membership=msgspec.structs.replace(membership, listeners={})
    )


def _lone_leader(metadata: ClusterMetadata) -> list[int]:
    """Returns the controller, if it leads the root alone."""
    known = metadata.brokers.get(metadata.controller)
    return [metadata.controller] if known is not None and not known.is_member else []


def _has_controller(metadata: ClusterMetadata, broker: int) -> bool:
    """Returns whether another member is the controller: others judge whether it is alive."""
    known = metadata.brokers.get(metadata.controller)
    return known is not None and known.is_member and metadata.controller != broker


def _check_leader(
    store: Store,
    watch: LeaderWatch,
    metadata: ClusterMetadata,
    broker: int,
    kind: str,
    clock: Clock,
    ours: Sequence[BrokerRegistration],
) -> None:
    """Raises `BrokerAlive` if the watched broker is alive and does not give way to `kind`.

    `broker`: the id of the starting broker.
    `ours`: the registrations of this start, which is itself alive.
    """

    def log_wait(leader: Leader, seconds: float) -> None:
        _log.warning(
            "waiting to see whether the root's last broker is alive",
            broker=describe(leader, now_us=clock.now_us()),
            at_most_seconds=seconds,
        )

    leader = Leader.of(metadata, store, broker=watch.broker)
    # A broker whose epoch is fenced was replaced: it can no longer write, but may still be running.
    is_fenced = leader is not None and not is_open(metadata, (leader.broker, leader.epoch))
    if leader is None or is_fenced or leader.known in ours or gives_way(leader.known, kind):
        return
    found = watch.wait_for_state(metadata, on_wait=log_wait)
    # The leader may have changed since. If the new one gives way, `MetadataStore.change` calls this
    # function again with the newest metadata.
    if (
        found is not None
        and found.state is LeaderState.ALIVE
        and not gives_way(found.leader.known, kind)
    ):
        has_another_id = found.leader.broker != broker
        raise errors.BrokerAlive(
            root=store.uri,
            condition=" unless one of them has cluster.join = false" if has_another_id else "",
            broker=found.leader.broker,
            address=found.leader.flight,
            leader=describe(found.leader, now_us=clock.now_us()),
        )


def gives_way(known: BrokerRegistration, kind: str) -> bool:
    """Returns whether a registered broker, even if alive, gives way to one of `kind`."""
    return kind == BrokerKind.STANDING and known.kind in _ON_DEMAND


def take(store: Store, meta: MetadataStore, leadership: Leadership, *, clock: Clock) -> Taken:
    """Fences all other epochs, and makes the broker the leader of every partition.

    A member leaves the epochs and partitions of other members to them. Raises `BrokerFenced`,
    naming the successor, if another broker has since replaced this one, and `CorruptObject` or
    `MissingObject` if a write-ahead log cannot be read: an operator must intervene.
    """
    broker, own = leadership.broker, (leadership.broker, leadership.epoch)
    histories, read = Histories(store, clock=clock), set[tuple[int, int]]()
    known = meta.current
    _check_newest(known, leadership)

    def is_others(metadata: ClusterMetadata, id_: int) -> bool:
        return leadership.is_member and id_ != broker and metadata.brokers[id_].is_member

    for epoch in known.open_epochs:
        if not epoch.fenced and epoch.id != own and not is_others(known, epoch.broker):
            histories.fence(epoch)
            read.add(epoch.id)

    def decide(before: ClusterMetadata) -> ClusterMetadata | None:
        _check_newest(before, leadership)
        # Before heirs were recorded, a leader inherited epochs of brokers that led nothing.
        after = inherit(before, broker, read)
        after = succeed(after, *own, sealed=read) or after
        led = _led(before)
        for dead in {*led, *(each.broker for each in before.open_epochs if not each.fenced)}:
            if dead != broker and not is_others(before, dead):
                epoch = before.brokers[dead].epoch
                successors = dict.fromkeys(led.get(dead, ()), broker)
                after = (
                    failover(after, dead, epoch=epoch, sealed=read, successors=successors) or after
                )
        return after if after != before else None

    is_alone = not read and _led(known).keys() <= {broker}
    metadata = known if is_alone else _change(meta, decide)
    # Since the fences, no other broker can have left an epoch: see `leave_epochs`.
    return read_inherited(histories, leadership, metadata)


def read_inherited(
    histories: Histories, leadership: Leadership, metadata: ClusterMetadata
) -> Taken:
    """Reads the logs of all epochs that the broker is heir to in `metadata`.

    A member reads an epoch only after the change that made it an heir, or after the epoch was
    fenced: until then that epoch's broker may put a checkpoint and leave. Raises what `take`
    raises.

    A live leader keeps writing its log, but no entries of the partitions that it has handed over.
    """
    inherited = inherited_by(metadata, leadership.broker)
    return Taken(
        leadership=replace(leadership, inherited=inherited),
        metadata=metadata,
        histories=[histories.read(each) for each in inherited],
    )


def _change(
    meta: MetadataStore, decide: Callable[[ClusterMetadata], ClusterMetadata | None]
) -> ClusterMetadata:
    """Makes a metadata change during a start; repeats it once if its outcome is unknown.

    A registration that was made twice leaves one more epoch of ours to fence.
    """
    try:
        return meta.change(decide)
    except errors.OutcomeUnknown as error:
        _log.warning("repeating a change to the metadata", reason=str(error))
        return meta.change(decide)


def _led(metadata: ClusterMetadata) -> dict[int, list[tuple[str, int]]]:
    """Returns the (topic, partition) pairs that each leader leads."""
    found: dict[int, list[tuple[str, int]]] = {}
    for name, topic in metadata.topics.items():
        for partition, leader in enumerate(topic.leaders):
            found.setdefault(leader, []).append((name, partition))
    return found


def check_leadership(metadata: ClusterMetadata, leadership: Leadership) -> None:
    """Raises `BrokerFenced`, naming the successor, if our epoch has ended in `metadata`."""
    try:
        check_lease(metadata, leadership.broker, leadership.epoch)
    except errors.BrokerFenced:
        raise replaced(metadata, leadership) from None


def replaced(metadata: ClusterMetadata, leadership: Leadership) -> errors.BrokerFenced:
    """Returns the error for a broker whose epoch has ended, naming its successor.

    The successor is the broker that registered last: no epoch is fenced before such a registration.
    """
    known = metadata.brokers.get(metadata.controller)
    own = leadership.broker, leadership.epoch
    if known is None or (metadata.controller, known.epoch) == own:
        return errors.BrokerFenced(broker=leadership.broker, epoch=leadership.epoch)
    return errors.BrokerFenced(
        broker=leadership.broker,
        epoch=leadership.epoch,
        successor=describe_broker(metadata.controller, known),
    )


def explained(error: BaseException, store: MetadataStore, leadership: Leadership) -> BaseException:
    """Returns `BrokerFenced` with the successor, if another broker has replaced this one.

    The metadata names the successor; a fence does not. A broker that was suspended for long enough
    does not even find a fence: its successor has deleted its log, which causes `SyncFailed`.
    """
    if isinstance(error, ENDS_THE_BROKER):
        with contextlib.suppress(Exception):  # the broker must stop anyway
            metadata = store.reload()
            try:
                check_leadership(metadata, leadership)
            except errors.BrokerFenced as fenced:
                return fenced
            if isinstance(error, errors.BrokerFenced):
                return replaced(metadata, leadership)
    return error


def _check_newest(metadata: ClusterMetadata, leadership: Leadership) -> None:
    """Raises `BrokerFenced`, naming the successor, if a broker has registered to replace ours.

    A broker that leads the root alone replaces all others.
    """
    check_leadership(metadata, leadership)
    controller = metadata.brokers.get(metadata.controller)
    is_beside = leadership.is_member and controller is not None and controller.is_member
    if metadata.controller != leadership.broker and not is_beside:
        raise replaced(metadata, leadership)


def check_opened(meta: MetadataStore, leadership: Leadership) -> None:
    """Checks, after the first flush of our epoch, that no successor had already closed it.

    The folder of a closed epoch in segments is removed, including its fence. So a broker that was
    suspended before its first flush could start the log again. A successor that takes over from now
    on finds our segment, and puts its fence there. Raises `BrokerFenced`.
    """
    if leadership.log is WalKind.SEGMENTS:
        check_leadership(meta.reload(), leadership)


def leave_epochs(
    meta: MetadataStore,
    leadership: Leadership,
    epochs: Iterable[Epoch],
    *,
    covered: Mapping[str, Mapping[int, int]],
) -> list[Epoch]:
    """Leaves inherited epochs that no entry needs; those without other heirs are closed.

    Returns the epochs that the broker is still heir to: all of them if it leads a partition that is
    not in `covered`. Raises `BrokerFenced` if a successor has registered: it will need their
    entries and states.

    `covered`: the leader epoch of each partition whose state is in a checkpoint of our own epoch,
    by topic id and number.
    """
    left = {each.id for each in epochs}

    def decide(metadata: ClusterMetadata) -> ClusterMetadata | None:
        # A successor reads our log when it fences it, which may be before our checkpoint.
        _check_newest(metadata, leadership)
        return leave(metadata, leadership.broker, leadership.epoch, left, covered=covered)

    return list(inherited_by(meta.change(decide), leadership.broker))
