"""Status of a root or an address: the broker that leads it, its process, and its topics.

The brokers themselves are asked first. If none answers, the root's metadata and the last heartbeat
show which broker led it, and whether it is alive.
"""

from __future__ import annotations

import enum
import functools
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors, kafka_port, limits, listeners
from sparklog.client.connection import ask
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.formats.schema_messages import RegistryInfo
from sparklog.formats.store_bill import StoreBill
from sparklog.listeners import Listener
from sparklog.options import is_loopback
from sparklog.security.credentials import Credentials
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.identity import Answer
from sparklog.storage.metadata.leadership import other_members
from sparklog.storage.metadata.liveness import Leader, LeaderState, LeaderWatch, Phase
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.root_credentials import RootCredentials

_ANSWER_SECONDS: Final = 10.0
_ASKED_AT_ONCE: Final = 32


class LeaderStatus(enum.StrEnum):
    """State of a broker; a root has the state of its brokers that comes first here."""

    SERVED = "served"
    SILENT = "silent"
    """A broker is alive, but does not answer from here."""
    DIED = "died"
    """The last broker ended without shutting down cleanly; the next one recovers."""
    STOPPED = "stopped"
    """The last broker shut down cleanly."""
    NEVER = "never"
    """No broker has led it yet."""


_ORDER: Final = (*LeaderStatus,)


class StatusReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Status in the form that `sparklog status --json` prints."""

    state: LeaderStatus
    root: str
    cluster_id: str
    broker: flight_messages.BrokerInfo | None = None
    """The broker that leads, or led last; if several answer, preferably the controller."""
    brokers: int = 0
    """The number of brokers that answered."""
    uptime_seconds: float | None = None
    topics: int = 0
    partitions: int = 0
    unpublished_bytes: int | None = None
    """None if no broker answered."""
    held_back: list[flight_messages.HeldBack] = []
    refused: list[flight_messages.Refused] = []
    """Work that brokers refuse now; if several answer, the reasons name the broker."""
    kept_records: list[flight_messages.KeptRecords] = []
    """Topics whose retention and key compaction are refused, because their table is append-only."""
    reason: str = ""
    """The reason why a live broker did not answer; others may have answered."""
    answered: list[flight_messages.BrokerInfo] = []
    """The brokers that answered, the controller first."""
    unmet: str = ""
    """The reason why no Kafka listener answers, if one is required."""
    bills: list[StoreBill] = []
    """The requests of each broker that answered, and their price; empty on a local root."""
    registries: list[RegistryInfo] = []
    """The schema registry as each broker that answered knows it."""


def of_address(address: str) -> StatusReport:
    """Returns the status of the broker at `host:port`. Raises `BrokerUnavailable`, `WrongPort`."""
    return _served(_ask(address))


def of_root(
    store: Store, clock: Clock, *, waits: Callable[[Leader, float], object]
) -> StatusReport:
    """Returns the status of a root, from all brokers that may be alive, and changes nothing.

    `waits` is called, from several threads, for each broker if it takes time to see whether it is
    alive. Raises `NotARoot`, `FormatTooNew`, `CorruptObject`, and the store's errors.
    """
    meta = MetadataStore(store, clock=clock)
    cluster_id = open_cluster(store, clock=clock, create=False).cluster_id
    metadata = meta.reload()
    credentials = RootCredentials(store, lambda: metadata, clock=clock)
    is_answered = identity.answers(
        store, _asking_which_root(credentials), timeout_seconds=limits.PROBE_TIMEOUT_SECONDS
    )

    def look_at(broker: int) -> _Asked | None:
        watch = LeaderWatch(
            store,
            clock=clock,
            dead_after_seconds=limits.DEAD_AFTER_SECONDS,
            broker=broker,
            answers=is_answered,
        )
        return _ask_leader(store, watch, metadata, waits, credentials)

    brokers = [metadata.controller, *other_members(metadata)]
    # Not bounded by the requests that the store allows: these threads wait for brokers.
    with ThreadPoolExecutor(min(len(brokers), _ASKED_AT_ONCE)) as pool:
        found = [each for each in pool.map(look_at, brokers) if each is not None]
    answers = [each.status for each in found if each.status is not None]
    silent = [each for each in found if each.state is LeaderStatus.SILENT]
    state = min((each.state for each in found), key=_ORDER.index, default=LeaderStatus.NEVER)
    first = next((each for each in found if each.state is state), None)
    return StatusReport(
        state=state,
        root=store.uri,
        cluster_id=cluster_id,
        broker=first.info(metadata) if first is not None else None,
        brokers=len(answers),
        uptime_seconds=answers[0].uptime_seconds if answers else None,
        topics=len(metadata.topics),
        partitions=sum(topic.partition_count for topic in metadata.topics.values()),
        unpublished_bytes=sum(each.unpublished_bytes for each in answers) if answers else None,
        # Each leader of a partition reports a table that it cannot write, with its own reason.
        held_back=list(
            {each.topic: each for status in answers for each in status.held_back}.values()
        ),
        refused=[
            msgspec.structs.replace(each, reason=f"broker {status.broker.broker}: {each.reason}")
            if len(answers) > 1
            else each
            for status in answers
            for each in status.refused
        ],
        kept_records=list(
            {each.topic: each for status in answers for each in status.kept_records}.values()
        ),
        reason="; ".join(
            f"broker {each.leader.broker}: {each.reason}" if len(found) > 1 else each.reason
            for each in silent
        ),
        answered=[each.broker for each in answers],
        bills=[each.bill for each in answers if each.bill is not None],
        registries=[each.registry for each in answers if each.registry is not None],
    )


def requiring_kafka(report: StatusReport) -> StatusReport:
    """Returns the report, with a reason in `unmet` if none of its Kafka listeners answers."""
    found = [
        listener
        for each in report.answered
        for listener in listeners.parse(each.kafka_listeners or each.kafka)
    ]
    unmet = "" if found else "no broker that answers has a Kafka listener"
    if found:
        with ThreadPoolExecutor(min(len(found), _ASKED_AT_ONCE)) as pool:
            reasons = list(pool.map(_kafka_silence, found))
        if all(reasons):
            unmet = "; ".join(reasons)
    return msgspec.structs.replace(report, unmet=unmet)


def _kafka_silence(listener: Listener) -> str:
    """Returns the reason why a Kafka listener does not answer; empty if it does."""
    silence = f"no Kafka listener answers at {listener}"
    try:
        found = kafka_port.answers(listener, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS)
    except OSError as error:
        return f"{silence}: {error.strerror or error}"
    return "" if found else silence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """State of one broker of a root, and its answer."""

    state: LeaderStatus
    leader: Leader
    status: flight_messages.BrokerStatus | None = None
    reason: str = ""

    def info(self, metadata: ClusterMetadata) -> flight_messages.BrokerInfo:
        if self.status is not None:
            return self.status.broker
        return _as_recorded(self.leader, metadata)


def _ask_leader(
    store: Store,
    watch: LeaderWatch,
    metadata: ClusterMetadata,
    waits: Callable[[Leader, float], object],
    credentials: RootCredentials,
) -> _Asked | None:
    """Asks one broker, unless it is dead; None if no broker has started."""
    found, asked, reason = watch.poll(metadata), None, ""
    # A broker that restarts meanwhile is asked at its new address.
    while found is not None and found.state is not LeaderState.DEAD and asked != found.leader.known:
        leader, asked = found.leader, found.leader.known
        try:
            served = identity.ask_broker(
                store, leader, _asking_which_root(credentials), timeout_seconds=_ANSWER_SECONDS
            )
            if served.error is not None:
                raise served.error
            if served.answer in identity.LIVES:
                status = _ask(leader.flight, credentials)
                return _Asked(state=LeaderStatus.SERVED, leader=leader, status=status)
            copied = ", of which this root is a copy" if served.answer is Answer.ORIGINAL else ""
            reason = f"the broker at its address, {leader.flight}, serves {served.root}{copied}"
        except errors.SparklogError as error:
            reason = str(error)
            there = leader.process.host
            if there != socket.gethostname() and is_loopback(leader.flight):
                reason = f"it listens at {leader.flight}, which only host {there!r} can reach"
        found = watch.wait_for_state(on_wait=waits)
    if found is None:
        return None
    state = LeaderStatus.SILENT
    if found.state is LeaderState.DEAD:
        state = LeaderStatus.STOPPED if found.leader.stopped else LeaderStatus.DIED
    elif found.leader.heartbeat is not None and found.leader.heartbeat.phase == Phase.STARTING:
        reason = "it is starting"
    return _Asked(state=state, leader=found.leader, reason=reason)


def _asking_which_root(credentials: RootCredentials) -> identity.Ask:
    """Returns a function that asks a broker before it is known which root it serves."""
    return functools.partial(ask, credentials=credentials.without_tokens())


def figures_of(
    address: str, *, timeout_seconds: float, credentials: Credentials | None = None
) -> flight_messages.BrokerFigures:
    """Returns the metrics of a broker. `credentials`: None: those of the environment.

    Raises `BrokerUnavailable` and `WrongPort`.
    """
    found: flight_messages.BrokerFigures = ask(
        address,
        "figures",
        flight_messages.Empty(),
        timeout_seconds=timeout_seconds,
        credentials=credentials,
    )
    return found


def _ask(address: str, credentials: Credentials | None = None) -> flight_messages.BrokerStatus:
    status: flight_messages.BrokerStatus = ask(
        address,
        "status",
        flight_messages.Empty(),
        timeout_seconds=_ANSWER_SECONDS,
        credentials=credentials,
    )
    return status


def _served(status: flight_messages.BrokerStatus) -> StatusReport:
    return StatusReport(
        state=LeaderStatus.SERVED,
        root=status.root,
        cluster_id=status.cluster_id,
        broker=status.broker,
        brokers=1,
        uptime_seconds=status.uptime_seconds,
        topics=status.topics,
        partitions=status.partitions,
        unpublished_bytes=status.unpublished_bytes,
        held_back=status.held_back,
        refused=status.refused,
        kept_records=status.kept_records,
        answered=[status.broker],
        bills=[status.bill] if status.bill is not None else [],
        registries=[status.registry] if status.registry is not None else [],
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
