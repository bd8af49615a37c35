"""Status of a root or an address: which broker leads it, as what it runs, and how its topics are.

The broker itself is asked where it answers. Where it does not, the root's metadata and its last
heartbeat say which one it was, and whether it is alive.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable

import msgspec

from sparklog import errors, limits, wire
from sparklog.client.connection import Connection
from sparklog.clock import Clock
from sparklog.options import is_loopback
from sparklog.storage.liveness import Leader, State, Watch
from sparklog.storage.meta import MetaStore
from sparklog.storage.objects import Store

_ANSWER_SECONDS = 10.0


class Led(enum.StrEnum):
    """Whether a broker leads the root."""

    SERVED = "served"
    SILENT = "silent"
    """A broker is alive, and does not answer from here."""
    STOPPED = "stopped"
    """The last broker left in good order."""
    DIED = "died"
    """The last broker ended without a goodbye; the next one to start recovers."""
    NEVER = "never"
    """No broker has led it yet."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """What is known; as JSON it is what `sparklog status --json` prints."""

    state: Led
    root: str
    cluster_id: str
    broker: wire.BrokerInfo | None = None
    """The broker that leads, or was the last to."""
    uptime_seconds: float | None = None
    topics: int = 0
    partitions: int = 0
    unpublished_bytes: int | None = None
    """None where no broker said."""
    held_back: list[wire.HeldBack] = []
    reason: str = ""
    """Why a broker that is alive did not answer."""


def of_address(address: str) -> Report:
    """Of the broker at `host:port`. Raises `BrokerUnavailable` and `WrongPort`."""
    return _served(_ask(address))


def of_root(store: Store, clock: Clock, *, waits: Callable[[Leader, float], object]) -> Report:
    """Of a root; changes nothing.

    `waits` is called where it takes time to see whether a broker is alive. Raises `NotARoot`,
    `FormatTooNew`, `CorruptObject`, and what the store raises.
    """
    meta = MetaStore(store, clock=clock)
    cluster_id = meta.open(create=False).cluster_id
    metadata = meta.reload()
    watch = Watch(store, clock=clock, dead_after_seconds=limits.DEAD_AFTER_SECONDS)
    found = watch.look(metadata)
    reason = ""
    if found is not None and found.state is not State.DEAD:
        try:
            status = _ask(found.leader.flight)
            if status.cluster_id == cluster_id and status.broker.epoch == found.leader.epoch:
                return _served(status)
            other = f"broker {status.broker.broker} (epoch {status.broker.epoch}) of {status.root}"
            reason = f"{other} answers at its address, {found.leader.flight}"
        except errors.SparklogError as error:
            reason = str(error)
            there = found.leader.process.host
            if there != socket.gethostname() and is_loopback(found.leader.flight):
                reason = f"it listens at {found.leader.flight}, which only host {there!r} reaches"
        found = watch.settle(waits=waits)
    leader = found.leader if found is not None else None
    state = Led.NEVER
    if found is not None:
        state = Led.SILENT
        if found.state is State.DEAD:
            state = Led.STOPPED if found.leader.stopped else Led.DIED
    return Report(
        state=state,
        root=store.uri,
        cluster_id=cluster_id,
        broker=None if leader is None else _as_recorded(leader),
        topics=len(metadata.topics),
        partitions=sum(len(topic.partitions) for topic in metadata.topics.values()),
        reason=reason if state is Led.SILENT else "",
    )


def _ask(address: str) -> wire.Status:
    with Connection.to(address) as connection:
        status: wire.Status = connection.channel().action(
            "status", wire.Empty(), timeout_seconds=_ANSWER_SECONDS
        )
    return status


def _served(status: wire.Status) -> Report:
    return Report(
        state=Led.SERVED,
        root=status.root,
        cluster_id=status.cluster_id,
        broker=status.broker,
        uptime_seconds=status.uptime_seconds,
        topics=status.topics,
        partitions=status.partitions,
        unpublished_bytes=status.unpublished_bytes,
        held_back=status.held_back,
    )


def _as_recorded(leader: Leader) -> wire.BrokerInfo:
    heartbeat = leader.heartbeat
    return wire.BrokerInfo(
        broker=leader.broker,
        epoch=leader.epoch,
        address=leader.flight,
        kafka=heartbeat.kafka if heartbeat else "",
        kind=leader.known.kind,
        version=heartbeat.version if heartbeat else "",
        host=leader.process.host,
        pid=leader.process.pid,
        started_us=leader.known.started_us,
        log=heartbeat.log if heartbeat else "",
    )
