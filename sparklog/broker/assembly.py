"""Builds the parts of a broker that has taken over its root, in order of their dependencies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import limits
from sparklog.broker import loops
from sparklog.broker.authorization import Authorization
from sparklog.broker.broker import Broker, TopicDefaults
from sparklog.broker.counts import Budget, UpkeepCounts
from sparklog.broker.failover.controller import Controller
from sparklog.broker.failover.handover import Handovers
from sparklog.broker.failover.heartbeats import Heartbeats
from sparklog.broker.failover.reconciler import Reconciler
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.log import takeover
from sparklog.broker.log.confirmer import Confirmer
from sparklog.broker.log.flush import WriterLimits
from sparklog.broker.log.histories import Histories
from sparklog.broker.log.hot_tail import HotTail
from sparklog.broker.log.janitor import Janitor
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.publish_loop import PublishLoop, PublishPace
from sparklog.broker.log.publish_process import PublishProcess, WorkerProcess
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.put_budget import PutBudget
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.upkeep_duties import Duties, UnfinishedChanges
from sparklog.broker.log.wal_cleaner import WalCleaner, WalCleanerLimits
from sparklog.broker.log.writer import Writer
from sparklog.broker.metrics.bill import RecentBill
from sparklog.broker.metrics.collection import (
    Certificate,
    FlightFigures,
    FlushCounts,
    KafkaFigures,
    Sources,
)
from sparklog.broker.pools import Pools
from sparklog.broker.quotas import Quotas
from sparklog.broker.refused_work import RefusedWork
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.clock import Clock
from sparklog.settings import BrokerSettings, LivenessSettings
from sparklog.storage import schema_texts, wal
from sparklog.storage.metadata import identity
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.liveness import heartbeat_time_us, readiness
from sparklog.storage.metadata.model import BrokerKind, ClusterMetadata
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    CountsRequests,
    LocalStore,
    Purpose,
    Store,
    counted,
    usages,
)
from sparklog.storage.table.removed_files import RemovedFileRetention
from sparklog.storage.table.topic_table import OpenTable
from sparklog.storage.wal.base import Appender

FLUSHES_AT_ONCE_REMOTE = 4  # concurrent puts of WAL objects
_PUBLISH_SHARE_REMOTE = 1.0  # waiting for a store takes no CPU from producers
UPKEEP_QUIET_REMOTE_SECONDS = 20.0  # between checks of a table without new commits
_FREE_INODES_RESERVE = 100_000  # with fewer, removed files stay for their grace period only
_SILENT_ASK_SECONDS = 0.5  # timeout for asking a silent member before its partitions move
_LOOK: Final = 0.15
"""The interval of heartbeat checks on an object store, as a share of `dead_after_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The settings, the store and the thread pools that a broker is built with."""

    settings: BrokerSettings
    store: Store
    """Each part gets its own view of it, which counts the requests for the part's purpose."""
    clock: Clock
    kind: BrokerKind
    meta: MetadataStore
    leadership: Leadership
    heartbeats: Heartbeats
    refused: RefusedWork
    stopping: threading.Event
    """Set once the broker stops."""
    publish_now: threading.Event
    """Set when a request waits for publication to the tables."""
    pools: Pools
    removed_files: RemovedFileRetention
    flushes: FlushCounts
    upkeep: UpkeepCounts
    on_flush: Callable[[wal.WalObject, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a broker, complete."""

    led_partitions: LedPartitions
    appender: Appender
    hot: HotTail
    writer: Writer
    publisher: Publisher
    publishing: PublishLoop
    publish_process: PublishProcess | None
    schemas: SchemaKeeper | None
    wal_cleaner: WalCleaner
    janitor: Janitor
    broker: Broker
    """The façade that listeners see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """The parts of a broker that shares its root with others."""

    controller: Controller
    handovers: Handovers


def sources_of(
    given: Surroundings,
    parts: Parts,
    groups: Coordinator,
    *,
    kafka: KafkaFigures | None,
    flight: FlightFigures,
    authorization: Authorization,
    quotas: Quotas,
    budgets: Callable[[], Iterable[Budget]],
    ask: Ask | None,
    dead: Callable[[], Mapping[int, int]],
    certificate: Certificate | None,
    bill: RecentBill | None,
) -> Sources:
    """Returns the sources of a broker's metrics; see `Sources` for the arguments."""
    janitor = given.settings.janitor
    return Sources(
        broker=parts.broker,
        led_partitions=parts.led_partitions,
        publisher=parts.publisher,
        publishing=parts.publishing,
        schemas=parts.schemas,
        groups=groups,
        flushes=given.flushes,
        upkeep=given.upkeep,
        budgets=budgets,
        store=given.store,
        kafka=kafka,
        flight=flight,
        authorization=authorization,
        quotas=quotas,
        cluster_id=given.leadership.cluster.cluster_id,
        epoch=given.leadership.epoch,
        small_file_bytes=janitor.compact_target_bytes // 2,
        compact_files=janitor.compact_files,
        clock=given.clock,
        ask=ask,
        dead=dead,
        certificate=certificate,
        bill=bill,
    )


def recent_bill(given: Surroundings) -> RecentBill | None:
    """Returns the bill from now on; None if the store bills no requests, or counts none."""
    store, prices = given.store, given.settings.prices
    if store.is_local or not isinstance(store, CountsRequests):
        return None
    return RecentBill(
        functools.partial(usages, store),
        prices.of(store.uri),
        clock=given.clock,
        warn_dollars_per_month=prices.warn_dollars_per_month,
    )


def assemble(given: Surroundings, led_partitions: LedPartitions, open_table: OpenTable) -> Parts:
    """Returns the parts of a broker, none of them running yet."""
    settings, store, clock = given.settings, given.store, given.clock
    hot = HotTail(limit_bytes=settings.hot_tail.bytes)
    budget = put_budget(settings, local=store.is_local)
    publish_interval_seconds = settings.publish_interval_seconds_on(local=store.is_local)
    appender, writer = _writer(given, led_partitions, hot, budget)
    process = publish_process(given, hot)
    schemas = _schemas(given, led_partitions)
    publisher = Publisher(
        counted(store, Purpose.TABLES),
        led_partitions,
        hot,
        clock=clock,
        pool=given.pools.files,
        counts=given.upkeep,
        process=process,
        schemas=schemas,
    )
    broker = Broker(
        counted(store, Purpose.METADATA),
        given.meta,
        given.leadership,
        LogParts(led_partitions=led_partitions, hot=hot, writer=writer, publisher=publisher),
        clock=clock,
        open_table=open_table,
        refused=given.refused,
        read_store=counted(store, Purpose.READS),
        defaults=TopicDefaults(
            auto_create=settings.topics.auto_create,
            partitions=settings.topics.default_partitions,
            refuse_replication=settings.topics.refuse_replication,
        ),
        settings=settings,
    )
    broker.metadata.heartbeat_age_seconds = lambda: given.heartbeats.newest.age_seconds(clock)
    broker.publishing.publish_now = given.publish_now.set
    if schemas is not None:
        broker.registry = schemas.info
    return Parts(
        led_partitions=led_partitions,
        appender=appender,
        hot=hot,
        writer=writer,
        publisher=publisher,
        publishing=PublishLoop(
            publisher,
            led_partitions,
            pace=PublishPace(publish_interval_seconds, clock, budget),
            publish_bytes=settings.publisher.publish_bytes,
            unpublished_bytes=settings.publisher.unpublished_bytes,
            check_leadership=lambda: takeover.check_leadership(
                given.meta.reload(), given.leadership
            ),
            on_published=writer.notify_published,
            clock=clock,
            retry_seconds=loops.RETRY_SECONDS,
            workers=given.pools.publishers,
            share=limits.PUBLISH_SHARE if store.is_local else _PUBLISH_SHARE_REMOTE,
        ),
        publish_process=process,
        schemas=schemas,
        wal_cleaner=_wal_cleaner(given, led_partitions, appender, writer, publisher),
        janitor=_janitor(given, led_partitions, broker, open_table, schemas),
        broker=broker,
    )


def put_budget(settings: BrokerSettings, *, local: bool) -> PutBudget | None:
    """Returns the budget of puts; None if there is none."""
    if not settings.is_thrifty_on(local=local):
        return None
    return PutBudget(
        settings.requests.puts_per_second,
        longest_wait_seconds=settings.writer.linger_max_ms / 1e3,
    )


def _writer(
    given: Surroundings, led_partitions: LedPartitions, hot: HotTail, budget: PutBudget | None
) -> tuple[Appender, Writer]:
    settings, leadership = given.settings, given.leadership
    store = counted(given.store, Purpose.LOG)
    appender = wal.of(store, given.clock, leadership.log).appender(
        leadership.broker, leadership.epoch, stopping=given.stopping.is_set
    )
    writer = Writer(
        store,
        appender,
        led_partitions,
        hot,
        clock=given.clock,
        bounds=WriterLimits(
            flush_max_bytes=settings.writer.flush_max_bytes,
            linger_seconds=settings.writer.linger_ms_on(local=store.is_local) / 1e3,
            flushes_at_once=1 if store.is_local else FLUSHES_AT_ONCE_REMOTE,
            queue_bytes=settings.writer.queue_bytes,
            unpublished_bytes=settings.publisher.unpublished_bytes,
            staged_bytes=settings.publisher.staged_bytes,
            max_record_bytes=settings.writer.max_record_bytes,
            max_batch_bytes=settings.writer.max_batch_bytes,
            free_space_reserve_bytes=settings.writer.free_space_reserve_bytes,
        ),
        on_flush=given.on_flush,
        refused=given.refused,
        budget=budget,
    )
    return appender, writer


def publish_process(given: Surroundings, hot: HotTail) -> PublishProcess | None:
    """Returns the publishing process, which starts once it has work; None if off or unsupported."""
    store, settings = given.store, given.settings
    is_possible = given.kind is BrokerKind.STANDING and isinstance(store, LocalStore)
    if settings.publisher.process == "off" or not is_possible:
        return None
    start = functools.partial(WorkerProcess, store.uri)
    interval_seconds = settings.publish_interval_seconds_on(local=store.is_local)
    return PublishProcess(hot, start, clock=given.clock, interval_seconds=interval_seconds)


def _wal_cleaner(
    given: Surroundings,
    led_partitions: LedPartitions,
    appender: Appender,
    writer: Writer,
    publisher: Publisher,
) -> WalCleaner:
    settings, leadership = given.settings.writer, given.leadership
    store = counted(given.store, Purpose.UPKEEP)
    confirmer = Confirmer(
        store,
        led_partitions,
        publisher,
        clock=given.clock,
        after_seconds=limits.CONFIRM_AFTER_SECONDS,
        store_now_us=(
            functools.partial(heartbeat_time_us, store, leadership.broker)
            if leadership.inherited
            else None
        ),
    )
    return WalCleaner(
        store,
        given.meta,
        leadership,
        appender,
        led_partitions,
        writer,
        confirm=confirmer.confirm,
        clock=given.clock,
        bounds=WalCleanerLimits(
            checkpoint_every_seconds=settings.checkpoint_every_seconds,
            trim_grace_seconds=settings.trim_grace_seconds,
        ),
        is_controller=functools.partial(_is_controller, given),
    )


def _schemas(given: Surroundings, led_partitions: LedPartitions) -> SchemaKeeper | None:
    """Returns the keeper of schemas; None without a registry."""
    settings = given.settings.registry
    if not settings.is_configured:
        return None
    return SchemaKeeper(
        SchemaRegistry(settings),
        schema_texts.of(given.store),
        led_partitions,
        clock=given.clock,
        is_stopping=given.stopping.is_set,
    )


def _janitor(
    given: Surroundings,
    led_partitions: LedPartitions,
    broker: Broker,
    open_table: OpenTable,
    schemas: SchemaKeeper | None,
) -> Janitor:
    store = counted(given.store, Purpose.UPKEEP)

    def owns(topic: Topic) -> bool:
        """Returns whether this broker maintains the topic's table; only one broker does."""
        return topic.leaders[:1] == (given.leadership.broker,)

    return Janitor(
        store,
        led_partitions,
        given.settings.janitor,
        clock=given.clock,
        open_table=open_table,
        unfinished=UnfinishedChanges(
            finish_deletion=broker.topics.finish_deletion,
            settle_doubts=broker.topics.settle_doubts,
            settle_config=broker.topics.config_changes.settle,
            add_columns=broker.topics.config_changes.add_columns,
            ready_schemas=schemas.ready if schemas is not None else lambda _topic, ids: ids,
        ),
        workers=given.pools.compactors,
        counts=given.upkeep,
        duties=Duties(owns=owns, is_controller=functools.partial(_is_controller, given)),
        quiet_seconds=0.0 if store.is_local else UPKEEP_QUIET_REMOTE_SECONDS,
        removed_files=given.removed_files,
        is_short_of_space=functools.partial(_is_short_of_space, given),
    )


def _is_controller(given: Surroundings) -> bool:
    return given.meta.current.controller == given.leadership.broker


def _is_short_of_space(given: Surroundings) -> bool:
    """Returns whether appends are rejected, or soon will be."""
    free_bytes, free_inodes = given.store.free_bytes(), given.store.free_inodes()
    reserve_bytes = given.settings.writer.free_space_reserve_bytes
    has_bytes = free_bytes is None or free_bytes >= 2 * reserve_bytes
    return not has_bytes or (free_inodes is not None and free_inodes < _FREE_INODES_RESERVE)


# ------------------------------------------------------------------------------ of a cluster


def reconciler_of(
    given: Surroundings,
    parts: Parts,
    recovered: ClusterMetadata,
    open_table: OpenTable,
    *,
    histories: Histories,
    on_change: Callable[[], None],
) -> Reconciler:
    """Returns the reconciler, which follows the metadata; requests use it from now on.

    Args:
        given: as for `assemble`.
        parts: the other parts.
        recovered: the metadata as of the takeover.
        open_table: returns the table of a topic.
        histories: the logs of other brokers.
        on_change: called when the reconciler's `take` has work to do.
    """
    reconciler = Reconciler(
        counted(given.store, Purpose.RECOVERY),
        parts.broker.metadata,
        given.leadership,
        LogParts(
            led_partitions=parts.led_partitions,
            hot=parts.hot,
            writer=parts.writer,
            publisher=parts.publisher,
        ),
        inherit=parts.wal_cleaner.inherit,
        open_table=open_table,
        clock=given.clock,
        seen=recovered,
        on_change=on_change,
        readiness=functools.partial(readiness, counted(given.store, Purpose.METADATA)),
        histories=histories,
    )
    # Also for a sole broker: it may not know the outcome of its own change.
    metadata = parts.broker.metadata
    metadata.lead, metadata.apply = reconciler.lead, reconciler.apply
    return reconciler


def cluster_parts(
    given: Surroundings,
    parts: Parts,
    *,
    liveness: LivenessSettings,
    histories: Histories,
    ask: Ask | None,
) -> ClusterParts:
    """Returns the parts of a member.

    `liveness`: as for this store. `ask`: sends requests to other brokers; None: not possible.
    """
    clock, broker = given.clock, parts.broker
    store = counted(given.store, Purpose.METADATA)
    dead_after_seconds = liveness.dead_after_seconds
    ask_readiness = functools.partial(readiness, store)
    controller = Controller(
        store,
        broker.metadata,
        given.leadership,
        clock=clock,
        dead_after_seconds=dead_after_seconds,
        readiness=ask_readiness,
        every_seconds=limits.WATCH_SECONDS if store.is_local else dead_after_seconds * _LOOK,
        is_sound=lambda: given.heartbeats.newest.age_seconds(clock) < liveness.sound_seconds,
        histories=histories,
        answers=(
            identity.writes(store, ask, timeout_seconds=_SILENT_ASK_SECONDS)
            if ask is not None
            else None
        ),
    )
    handovers = Handovers(
        broker.metadata,
        given.leadership,
        parts.led_partitions,
        parts.writer,
        parts.wal_cleaner,
        clock=clock,
        readiness=ask_readiness,
    )
    broker.cluster_admin.handovers, broker.cluster_admin.ask = handovers, ask
    return ClusterParts(controller=controller, handovers=handovers)
