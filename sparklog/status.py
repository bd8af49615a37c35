"""Status of a root or an address: the broker that leads it, its process, and its topics.

The broker itself is asked first. If it does not answer, the root's metadata and the last heartbeat
show which broker it was, and whether it is alive.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable

import msgspec

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.options import is_loopback
from sparklog.storage.cluster import open_cluster
from sparklog.storage.liveness import Leader, LeaderState, LeaderWatch
from sparklog.storage.metadata import ClusterMetadata
from sparklog.storage.metadata_store import MetadataStore
from sparklog.storage.objects import Store

_ANSWER_SECONDS = 10.0


class LeaderStatus(enum.StrEnum):
    """State of the broker that leads a root, or was the last to."""

    SERVED = "served"
    SILENT = "silent"
    """A broker is alive, and does not answer from here."""
    STOPPED = "stopped"
    """The last broker stopped in good order."""
    DIED = "died"
    """The last broker ended without stopping in good order; the next one recovers."""
    NEVER = "never"
    """No broker has led it yet."""


class StatusReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Status in the form that `sparklog status --json` prints."""

    state: LeaderStatus
    root: str
    cluster_id: str
    broker: flight_messages.BrokerInfo | None = None
    """The broker that leads, or was the last to."""
    uptime_seconds: float | None = None
    topics: int = 0
    partitions: int = 0
    unpublished_bytes: int | None = None
    """None if no broker answered."""
    held_back: list[flight_messages.HeldBack] = []
    reason: str = ""
    """The reason why a live broker did not answer."""


def of_address(address: str) -> StatusReport:
    """Returns the status of the broker at `host:port`. Raises `BrokerUnavailable`, `WrongPort`."""
    return _served(_ask(address))


def of_root(
    store: Store, clock: Clock, *, waits: Callable[[Leader, float], object]
) -> StatusReport:
    """Returns the status of a root, and changes nothing.

    `waits` is called if it takes time to see whether a broker is alive. Raises `NotARoot`,
    `FormatTooNew`, `CorruptObject`, and the errors of the store.
    """
    meta = MetadataStore(store, clock=clock)
    cluster_id = open_cluster(store, clock=clock, create=False).cluster_id
    metadata = meta.reload()
    watch = LeaderWatch(store, clock=clock, dead_after_seconds=limits.DEAD_AFTER_SECONDS)
    found = watch.poll(metadata)
    reason = ""
    if found is not None and found.state is not LeaderState.DEAD:
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
        found = watch.wait_for_state(on_wait=waits)
    leader = found.leader if found is not None else None
    state = LeaderStatus.NEVER
    if found is not None:
        state = LeaderStatus.SILENT
        if found.state is LeaderState.DEAD:
            state = LeaderStatus.STOPPED if found.leader.stopped else LeaderStatus.DIED
    return StatusReport(
        state=state,
        root=store.uri,
        cluster_id=cluster_id,
        broker=None if leader is None else _as_recorded(leader, metadata),
        topics=len(metadata.topics),
        partitions=sum(topic.partition_count for topic in metadata.topics.values()),
        reason=reason if state is LeaderStatus.SILENT else "",
    )


def figures_of(address: str) -> flight_messages.BrokerFigures:
    """Returns the figures of the broker at `host:port`.

    Raises `BrokerUnavailable` and `WrongPort`.
    """
    with Connection.to(address) as connection:
        found: flight_messages.BrokerFigures = connection.channel().action(
            "figures", flight_messages.Empty(), timeout_seconds=_ANSWER_SECONDS
        )
    return found


def _ask(address: str) -> flight_messages.BrokerStatus:
    with Connection.to(address) as connection:
        status: flight_messages.BrokerStatus = connection.channel().action(
            "status", flight_messages.Empty(), timeout_seconds=_ANSWER_SECONDS
        )
    return status


def _served(status: flight_messages.BrokerStatus) -> StatusReport:
    return StatusReport(
        state=LeaderStatus.SERVED,
        root=status.root,
        cluster_id=status.cluster_id,
        broker=status.broker,
        uptime_seconds=status.uptime_seconds,
        topics=status.topics,
        partitions=status.partitions,
        unpublished_bytes=status.unpublished_bytes,
        held_back=status.held_back,
    )


def _as_recorded(leader: Leader, metadata: ClusterMetadata) -> flight_messages.BrokerInfo:
    heartbeat = leader.heartbeat
    epochs = {(each.broker, each.epoch): each.log for each in metadata.open_epochs}
    return flight_messages.BrokerInfo(
        broker=leader.broker,
        epoch=leader.epoch,
        address=leader.flight,
        kafka=heartbeat.kafka if heartbeat else "",
        metrics=heartbeat.metrics if heartbeat else "",
        kind=leader.known.kind,
        version=heartbeat.version if heartbeat else "",
        host=leader.process.host,
        pid=leader.process.pid,
        started_us=leader.known.started_us,
        log=heartbeat.log if heartbeat else "",
        wal=epochs.get((leader.broker, leader.epoch), ""),
    )
