"""The façade of the broker: everything a listener can ask of it, in the log's own terms.

A listener only translates and decides nothing. A request is rejected here, with a typed error and
without side effects. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from sparklog import errors, limits, listeners
from sparklog.broker import described
from sparklog.broker.cluster_admin import ClusterAdmin
from sparklog.broker.counts import Budget, TopicCounts
from sparklog.broker.described import ConfigEntry, ConfigSource
from sparklog.broker.group_configs import GroupConfigs
from sparklog.broker.inspection import (
    ActiveProducer,
    Partitions,
    PartitionStatus,
)
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.live_members import LiveMembers
from sparklog.broker.log.appends import Append, AppendResult, PendingAppend
from sparklog.broker.log.growth import GrowthWatch
from sparklog.broker.log.kafka_readers import Fetched, KafkaReader
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.preparing import WouldBlock
from sparklog.broker.log.producer_state import NO_PRODUCER, ProducerSequence
from sparklog.broker.log.readers import LogReader
from sparklog.broker.log.record_times import RecordTimes
from sparklog.broker.log.tailing import ReadBatch, Tail
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.position_lag import LagAnswers
from sparklog.broker.producer_ids import ProducerIds
from sparklog.broker.publishing import PublishWaiter
from sparklog.broker.record_deletion import RecordDeletion
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.broker.staged import StagedBatches
from sparklog.broker.topic_checks import INTERNAL_TOPICS, check_not_internal
from sparklog.broker.topics import TopicAdmin, TopicDefaults
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.formats.config_rules import ConfigType, Edit
from sparklog.formats.schema_messages import RegistryInfo
from sparklog.formats.store_bill import StoreBill
from sparklog.listeners import Listener
from sparklog.settings import BrokerSettings
from sparklog.storage.metadata.model import BrokerRegistration
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Purpose, Store, counted
from sparklog.storage.table.topic_table import OpenTable
from sparklog.version import VERSION

__all__ = [
    "INTERNAL_TOPICS",
    "NO_PRODUCER",
    "ActiveProducer",
    "Append",
    "AppendResult",
    "Broker",
    "ConfigEntry",
    "ConfigSource",
    "ConfigType",
    "Edit",
    "Fetched",
    "GrowthWatch",
    "PartitionStatus",
    "PendingAppend",
    "ProducerSequence",
    "ReadBatch",
    "Tail",
    "TopicDefaults",
    "WouldBlock",
]
"""The names that listeners use."""

_DEFAULT_SETTINGS = BrokerSettings()


class Broker:
    """One broker in one epoch."""

    def __init__(
        self,
        store: Store,
        meta: MetadataStore,
        leadership: Leadership,
        log: LogParts,
        *,
        clock: Clock,
        open_table: OpenTable,
        defaults: TopicDefaults,
        settings: BrokerSettings = _DEFAULT_SETTINGS,
        submit_timeout_seconds: float = 30.0,
        refused: RefusedWork | None = None,
        read_store: Store | None = None,
    ) -> None:
        """`read_store`: the view of the store for records that clients read; None: `store`."""
        self._store = store
        self._leadership = leadership
        self._led_partitions = led_partitions = log.led_partitions
        self._writer = writer = log.writer
        self._publisher = log.publisher
        self._hot = hot = log.hot
        self._clock = clock
        self._settings = settings
        self._submit_timeout_seconds = submit_timeout_seconds
        self._closing = threading.Event()
        self.refused = refused or RefusedWork(clock)
        """The work that this broker currently refuses."""
        self._reader = LogReader(read_store or store, led_partitions, hot)
        self._kafka_reader = KafkaReader(self._reader, led_partitions, hot, clock=clock)
        sight_seconds = settings.liveness.on(local=store.is_local).sight_seconds
        self.metadata = LeaderMetadata(
            meta, leadership, writer, clock=clock, sight_seconds=sight_seconds
        )
        """The cluster's metadata, as this broker knows it."""
        self.members = LiveMembers(self.metadata, leadership, clock=clock)
        self.partitions = Partitions(led_partitions)
        """Answers queries about topics and partitions, as this broker knows them."""
        self.topics = TopicAdmin(
            store,
            self.metadata,
            log,
            open_table=open_table,
            leadership=leadership,
            clock=clock,
            defaults=defaults,
            settings=settings,
            should_stop=self._closing.is_set,
        )
        self.group_configs = GroupConfigs(self.metadata)
        self.producer_ids = ProducerIds(self.metadata)
        self.staged = StagedBatches(
            counted(store, Purpose.TABLES),
            led_partitions,
            writer,
            clock=clock,
            submit_timeout_seconds=submit_timeout_seconds,
            has_others=lambda: len(self.members.up()) > 1,
        )
        self.publishing = PublishWaiter(
            log, clock=clock, check_open=self._check_open, members=self.members.up
        )
        self.deletion = RecordDeletion(self.metadata, led_partitions, self.publishing)
        self.cluster_admin = ClusterAdmin(
            store, self.metadata, leadership, clock=clock, check_open=self._check_open
        )
        self.lags = LagAnswers(led_partitions, self.record_times())
        self.serving: flight_messages.BrokerInfo | None = None
        """The addresses and process of this broker; set once its listeners are open."""
        self.prove: Callable[[flight_messages.ProveRoot], flight_messages.RootProof] | None = None
        """Proves which root this broker serves; set by the owner once it serves."""
        self.collect_figures: Callable[[], flight_messages.BrokerFigures] | None = None
        """Returns this broker's metrics; set by the owner once it serves."""
        self.bill: Callable[[], StoreBill | None] = lambda: None
        """Returns the present bill of the object store, if there is one; set by the owner."""
        self.registry: Callable[[], RegistryInfo | None] = lambda: None
        """Returns the state of the schema registry, if there is one; set by the owner."""
        self.security_version: Callable[[], int] = lambda: 0
        """Returns the version of the users and ACLs that are in force; set by the owner."""
        self._started_at = clock.monotonic()

    # -------------------------------------------------------------------------- this broker

    @property
    def broker_id(self) -> int:
        """This broker's id."""
        return self._leadership.broker

    def cluster(self, listener: str = "") -> flight_messages.ClusterInfo:
        """Returns the cluster's id and root, and its brokers that are up, this one first.

        `listener`: the name of the Flight listener whose addresses are returned; other brokers
        without such a listener are left out. Empty: the first listener of each.
        """
        own = self._broker_info()
        at = {each.name: each for each in listeners.parse(own.flight_listeners)}
        has_tls = listener in at and at[listener].has_tls
        if listener in at:
            own = msgspec.structs.replace(own, address=at[listener].client_address)
        others = [
            flight_messages.BrokerInfo(
                broker=broker,
                epoch=known.epoch,
                address=address,
                kafka=known.kafka,
                kind=known.kind,
                host=known.process.host,
                pid=known.process.pid,
                started_us=known.started_us,
            )
            for broker, known in self.members.up().items()
            if broker != self._leadership.broker
            and (
                address := known.flight_at(listener, has_tls=has_tls) if listener else known.flight
            )
        ]
        return flight_messages.ClusterInfo(
            cluster_id=self._leadership.cluster.cluster_id,
            root=self._store.uri,
            version=VERSION,
            brokers=[own, *others],
        )

    @property
    def is_member(self) -> bool:
        """True if this broker shares the root with others."""
        return self._leadership.is_member

    def _broker_info(self) -> flight_messages.BrokerInfo:
        if self.serving is not None:
            return self.serving
        known = self.metadata.known.brokers.get(
            self._leadership.broker, BrokerRegistration(epoch=0)
        )
        return flight_messages.BrokerInfo(
            broker=self._leadership.broker, epoch=self._leadership.epoch, address=known.flight
        )

    @property
    def uptime_seconds(self) -> float:
        """Time since this broker was built."""
        return self._clock.monotonic() - self._started_at

    def prove_root(self, request: flight_messages.ProveRoot) -> flight_messages.RootProof:
        """Proves which root this broker serves. Raises `StorageUnavailable` before it serves."""
        if self.prove is None:
            raise errors.StorageUnavailable(
                operation="prove", path="", reason="the broker is starting"
            )
        return self.prove(request)

    def figures(self) -> flight_messages.BrokerFigures:
        """Returns the counts of this broker. Raises `StorageUnavailable` while it starts."""
        if self.collect_figures is None:
            raise errors.StorageUnavailable(
                operation="figures", path="", reason="the broker is starting"
            )
        return self.collect_figures()

    def budgets(self) -> list[Budget]:
        """Returns the memory budgets for records."""
        hot = Budget("hot_tail", self._hot.bytes, self._hot.limit_bytes)
        return [
            *self._writer.budgets(),
            hot,
            *self._publisher.budgets(),
            self._reader.budget(),
            self._kafka_reader.budget(),
        ]

    def record_times(self) -> RecordTimes:
        """Returns a lookup of records' timestamps, for use by one caller."""
        return RecordTimes(self._reader, self._led_partitions)

    def status(self) -> flight_messages.BrokerStatus:
        """Returns counts of topics, partitions and unpublished bytes, and refused work."""
        topics = self._led_partitions.topics()
        held_back = [
            flight_messages.HeldBack(topic=topic.name, reason=reason)
            for topic in topics
            if (reason := topic.refusal) is not None
        ]
        kept_records = [
            flight_messages.KeptRecords(topic=topic.name, reason=reason)
            for topic in topics
            if (reason := topic.deletion_refusal) is not None
        ]
        return flight_messages.BrokerStatus(
            cluster_id=self._leadership.cluster.cluster_id,
            root=self._store.uri,
            broker=self._broker_info(),
            uptime_seconds=round(self.uptime_seconds, 3),
            topics=len(topics),
            partitions=self._led_partitions.partition_count,
            unpublished_bytes=self._led_partitions.backlog.unpublished_bytes,
            held_back=held_back[: limits.STATUS_TOPICS],
            refused=[
                flight_messages.Refused(work=work, reason=reason)
                for work, reason in self.refused.states().items()
            ],
            kept_records=kept_records[: limits.STATUS_TOPICS],
            security_version=self.security_version(),
            bill=self.bill(),
            registry=self.registry(),
        )

    def configs(self, advertised: Sequence[Listener]) -> list[ConfigEntry]:
        """Returns the settings of this broker.

        `advertised`: its listeners, with the addresses that Kafka clients connect to.
        """
        return described.broker_entries(self._settings, advertised)

    def free_bytes(self) -> int | None:
        """Returns the free space under the root, or None if unknown."""
        return self._store.free_bytes()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the writer, if it has ended."""
        return self._writer.failure

    # -------------------------------------------------------------------------- leadership

    def close(self) -> None:
        """Wakes all waiting calls; no further requests are accepted."""
        self._closing.set()
        self._writer.fail(errors.BrokerClosing(broker=self._leadership.broker))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise errors.BrokerClosing(broker=self._leadership.broker)

    # -------------------------------------------------------------------------- appending

    def append(
        self,
        topic: str,
        partition: int,
        batch: pa.RecordBatch,
        producer_sequence: ProducerSequence | None = None,
    ) -> PendingAppend:
        """Queues a payload batch.

        Raises `UnknownTopic`, `InternalTopic`, and what `AppendPreparer.prepare` and
        `Writer.submit` raise.
        """
        check_not_internal(topic, "write to")
        found = self._led_partitions.topic(topic)
        try:
            prepared = self._writer.preparer.prepare(found, partition, batch, producer_sequence)
            return self._writer.submit([prepared], timeout_seconds=self._submit_timeout_seconds)
        except errors.SparklogError:
            found.counts.failed_produces += 1
            raise

    def prepare_internal(self, topic: str, partition: int, batch: pa.RecordBatch) -> Append:
        """Checks and encodes records for one of the broker's own topics; queues nothing yet.

        Raises `UnknownTopic`, and what `AppendPreparer.prepare` raises.
        """
        return self._writer.preparer.prepare(
            self._led_partitions.topic(topic), partition, batch, None
        )

    def submit_internal(self, append: Append) -> PendingAppend:
        """Queues an append from `prepare_internal`, even if the queue is full.

        Raises the error that ended the writer.
        """
        # While producers are throttled, consumers must continue: their groups would fall apart.
        # Such records are small and cannot pile up, because a client waits for each of its own.
        return self._writer.submit([append], is_bounded=False)

    def prepare_kafka(
        self, topic: str, partition: int, data: bytes, *, only_quick: bool = False
    ) -> Append:
        """Checks a record batch in Kafka's encoding, for `submit`; queues nothing yet.

        Raises `UnknownTopic`, `InternalTopic`, and what `AppendPreparer` raises: `WouldBlock` if
        `only_quick` is set and the check would take a long time.
        """
        check_not_internal(topic, "write to")
        found = self._led_partitions.topic(topic)
        try:
            return self._writer.preparer.prepare_kafka(
                found, partition, data, only_quick=only_quick
            )
        except errors.SparklogError:
            found.counts.failed_produces += 1
            raise

    def submit(self, append: Append) -> PendingAppend:
        """Queues a prepared append without waiting for space in the queue.

        Raises `QueueFull`, and the error that ended the writer.
        """
        return self._writer.submit([append])

    def flush_if_quick(self) -> None:
        """Makes the queued appends durable if that barely delays an event loop. Never raises.

        Appends that are not `done` afterwards need a `wait`.
        """
        self._writer.flush_if_quick()

    @property
    def submit_timeout_seconds(self) -> float:
        """The maximum time that an append waits for space in the queue."""
        return self._submit_timeout_seconds

    def wait(self, pending: PendingAppend) -> list[AppendResult]:
        """Waits until the append is durable. Raises the rejection's error, or `OutcomeUnknown`."""
        return self._writer.wait(pending)

    # -------------------------------------------------------------------------- reading

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        topic_id: str | None = None,
    ) -> Iterator[ReadBatch]:
        """Yields every record in the range, in order. Raises what `LogReader.read` raises."""
        counts = self._counts_of(topic)
        counts.fetches += 1
        found = self._reader.read(topic, partition, start, end, columns=columns, topic_id=topic_id)
        return _counting_bytes(found, counts)

    def tail(
        self,
        positions: Sequence[flight_messages.TailPosition],
        notify: Callable[[], None] = lambda: None,
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
    ) -> Tail:
        """Follows partitions. Raises what `LogReader.tail` raises."""
        for topic in {each.topic for each in positions}:
            self._counts_of(topic).fetches += 1
        return self._reader.tail(positions, notify, columns=columns, batch_rows=batch_rows)

    def _counts_of(self, topic: str) -> TopicCounts:
        """Returns the counts of a topic; for an unknown one, counts that are discarded."""
        if not self._led_partitions.has_topic(topic):
            return TopicCounts()
        return self._led_partitions.topic(topic).counts

    def count_full_queue(self, topic: str) -> None:
        """Counts a batch that was rejected because the queue stayed full for too long."""
        self._counts_of(topic).failed_produces += 1
        self.refused.note(
            Work.WRITES, "the writer's queue was full for as long as a producer waits"
        )

    def count_fetch(self, topic: str, sent_bytes: int, *, failed: bool) -> None:
        """Counts one partition of a fetch request, and the bytes of its records."""
        counts = self._counts_of(topic)
        counts.fetches += 1
        counts.bytes_out += sent_bytes
        if failed:
            counts.failed_fetches += 1

    def fetch_kafka(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        limit_bytes: int,
        at_least_one: bool = True,
        only_memory: bool = False,
    ) -> Fetched | None:
        """Returns record batches from `offset` on. Raises what `KafkaReader.fetch` raises."""
        return self._kafka_reader.fetch(
            topic,
            partition,
            offset,
            limit_bytes=limit_bytes,
            at_least_one=at_least_one,
            only_memory=only_memory,
        )

    def read_kafka_together(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Speeds up `fetch_kafka` for several partitions; see `KafkaReader.read_together`."""
        self._kafka_reader.read_together(places)

    def watch_growth(
        self,
        seen: Mapping[tuple[str, int], int],
        lacking_bytes: int,
        notify: Callable[[], None],
    ) -> GrowthWatch:
        """Calls `notify` once when the partitions together have grown by `lacking_bytes`.

        It is called under the lock of the led partitions, possibly right away, and also if one of
        their topics is deleted; it must not block. End the watch with `stop_watching`.

        Args:
            seen: the last known `PartitionStatus.appended_bytes` of each partition, by topic and
                number.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        return self._led_partitions.growths.watch(seen, lacking_bytes, notify)

    def stop_watching(self, watch: GrowthWatch) -> None:
        """Ends a watch: its `notify` is no longer called."""
        self._led_partitions.growths.stop(watch)

    def greatest_time(self, topic: str, partition: int) -> tuple[int, int]:
        """Returns (timestamp in ms, offset) of the first record with the maximum timestamp.

        Returns (-1, -1) if there are no records. Raises `UnknownTopic` and `UnknownPartition`.
        """
        return self._reader.greatest_time(topic, partition)

    def offsets_for_times(
        self, request: flight_messages.OffsetsForTimes
    ) -> flight_messages.Offsets:
        """Returns the first offsets at or after the given timestamps.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        return self._reader.offsets_for_times(request)


def _counting_bytes(batches: Iterator[ReadBatch], counts: TopicCounts) -> Iterator[ReadBatch]:
    """Yields the batches, and counts the bytes that a native reader receives."""
    for batch in batches:
        counts.bytes_out += batch.rows.nbytes
        yield batch
