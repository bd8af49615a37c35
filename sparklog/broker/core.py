"""The façade: everything that a door may ask of this broker, in the log's own terms.

A door translates and decides nothing; what is refused is refused here, by a typed error, with no
side effect. All methods may be called from any thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import structlog

from sparklog import consumeroffsets, errors, limits, wire
from sparklog.broker import configs, topicconfig
from sparklog.broker.configs import ConfigEntry, Source
from sparklog.broker.growth import Watch
from sparklog.broker.hot import HotTail
from sparklog.broker.kafkareading import Fetched, KafkaReader
from sparklog.broker.lease import Lease, check_lease
from sparklog.broker.partitions import Ledger, Partition, Topic, payload_bytes
from sparklog.broker.producers import Stamp
from sparklog.broker.publisher import Publisher
from sparklog.broker.reading import Batch, LogReader
from sparklog.broker.topicconfig import Edit, Kind
from sparklog.broker.writer import Append, Appended, TakesLong, Ticket, Writer
from sparklog.clock import Clock
from sparklog.record import CREATE_TIME, check_topic_name
from sparklog.settings import BrokerSettings
from sparklog.storage import compaction, keycompaction, manifest, retention
from sparklog.storage.meta import Broker, Metadata, MetaStore, PartitionMeta, TopicMeta
from sparklog.storage.objects import ObjectMissing, Store, SyncFailed
from sparklog.storage.snapshot import BatchId, BatchKind, TableSnapshot
from sparklog.storage.table import (
    Change,
    Table,
    create_change,
    delete_change,
    describe_change,
    table_folder,
)
from sparklog.version import VERSION

INTERNAL_TOPICS = frozenset({consumeroffsets.TOPIC})
_RESERVED_TOPICS = INTERNAL_TOPICS | {"__transaction_state"}
"""Nobody else may create them: they need a configuration that only the broker knows."""

__all__ = [
    "INTERNAL_TOPICS",
    "Append",
    "Appended",
    "Batch",
    "ConfigEntry",
    "Core",
    "Edit",
    "Fetched",
    "Kind",
    "Place",
    "Producer",
    "Source",
    "TakesLong",
    "Ticket",
    "TopicDefaults",
]
"""What a door knows of this broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefaults:
    auto_create: bool = False
    partitions: int = 4
    refuse_replication: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A partition: who leads it, its log start offset and its high watermark."""

    leader: int
    leader_epoch: int
    start: int
    end: int
    grown_bytes: int
    """Bytes of records appended while we lead it, for `watch_growth`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Records of a topic that are to be deleted, once they are published."""

    topic: Topic
    offsets: Mapping[int, int]
    """Below which all is to go, by partition."""
    moved: Mapping[int, int]
    """The same of partitions whose log start is not there yet."""

    @property
    def goals(self) -> tuple[Topic, Sequence[int]]:
        """Up to where each partition has to be published."""
        return self.topic, [self.moved.get(each.number, 0) for each in self.topic.partitions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """An idempotent producer, as a partition remembers it."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_us: int
    """When its newest batch came, µs since the Unix epoch."""


_USUAL = BrokerSettings()
_log = structlog.get_logger("sparklog.core")


class Core:
    """One broker in one epoch."""

    def __init__(
        self,
        store: Store,
        meta: MetaStore,
        lease: Lease,
        ledger: Ledger,
        writer: Writer,
        publisher: Publisher,
        hot: HotTail,
        *,
        clock: Clock,
        defaults: TopicDefaults,
        settings: BrokerSettings = _USUAL,
        submit_timeout_seconds: float = 30.0,
    ) -> None:
        self._store = store
        self._meta = meta
        self._lease = lease
        self._ledger = ledger
        self._writer = writer
        self._publisher = publisher
        self._clock = clock
        self._defaults = defaults
        self._settings = settings
        self._submit_timeout_seconds = submit_timeout_seconds
        self._admin = threading.Lock()
        """Serialises changes of topics; the only lock that is held across I/O, by admin calls."""
        self._doubtful: set[str] = set()
        """Names of topics whose creation may have come to be in the metadata, or not."""
        self._taking_ids = threading.Lock()
        """Held by the one that takes a block of producer ids; others wait for it."""
        self._ids: Iterator[int] = iter(())
        """Of the block, that were not given out yet; `next` of it is atomic."""
        self._closing = threading.Event()
        self._reader = LogReader(store, ledger, hot, clock=clock, is_closing=self._closing.is_set)
        self._kafka_reader = KafkaReader(self._reader, ledger, hot, clock=clock)
        self.publish_now: Callable[[], None] = lambda: None
        """Asks the publishing thread to begin at once; set by whoever runs it."""
        self.serving: wire.BrokerInfo | None = None
        """How this broker is reached, and as what it runs; set by whoever opens its doors."""
        self._began_at = clock.monotonic()

    # -------------------------------------------------------------------------- appending

    def append(
        self, topic: str, partition: int, batch: pa.RecordBatch, stamp: Stamp | None = None
    ) -> Ticket:
        """Queues a payload batch, to be waited for.

        Raises `UnknownTopic`, `InternalTopic`, and what `Writer.prepare` and `Writer.submit` raise.
        """
        _check_not_internal(topic, "write to")
        prepared = self._writer.prepare(self._ledger.topic(topic), partition, batch, stamp)
        return self._writer.submit([prepared], timeout_seconds=self._submit_timeout_seconds)

    def prepare_internal(self, topic: str, partition: int, batch: pa.RecordBatch) -> Append:
        """Checks and encodes records for a topic of the brokers' own; nothing is queued yet.

        Raises `UnknownTopic`, and what `Writer.prepare` raises.
        """
        return self._writer.prepare(self._ledger.topic(topic), partition, batch, None)

    def submit_internal(self, append: Append) -> Ticket:
        """Queues what `prepare_internal` made, whether there is room in the queue or not.

        Raises what ended the writer.
        """
        # While producers are held back, consumers must go on: their groups would fall apart. Such
        # records are small, and who asks for one waits for its answer, so they cannot pile up.
        return self._writer.submit([append], is_bounded=False)

    def prepare_kafka(
        self, topic: str, partition: int, data: bytes, *, only_quick: bool = False
    ) -> Append:
        """Checks a record batch in Kafka's encoding, for `submit`; nothing is queued yet.

        Raises `UnknownTopic`, `InternalTopic`, and what `Writer.prepare_kafka` raises: `TakesLong`
        where `only_quick` is given and it is not.
        """
        _check_not_internal(topic, "write to")
        found = self._ledger.topic(topic)
        return self._writer.prepare_kafka(found, partition, data, only_quick=only_quick)

    def submit(self, append: Append) -> Ticket:
        """Queues what is prepared, to be waited for, and never waits for room itself.

        Raises `QueueFull`, and what ended the writer.
        """
        return self._writer.submit([append])

    @property
    def submit_timeout_seconds(self) -> float:
        """How long an append waits for room in the queue."""
        return self._submit_timeout_seconds

    def wait(self, ticket: Ticket) -> list[Appended]:
        """Returns once the ticket is durable. Raises what refused it, and `OutcomeUnknown`."""
        return self._writer.wait(ticket)

    def new_producer(self) -> wire.ProducerIdentity:
        """A producer id that nobody has had before.

        Ids come from a block that the metadata gives to this broker, as in Kafka (KIP-730). May
        wait for storage, where the block is used up; what is left of it at the end is never used.
        """
        while True:
            with self._taking_ids:
                found = self.producer_at_hand()
                if found is None:
                    self._take_ids()
            if found is not None:
                return found

    def producer_at_hand(self) -> wire.ProducerIdentity | None:
        """The same without waiting; None where the block is used up."""
        producer_id = next(self._ids, None)
        return None if producer_id is None else wire.ProducerIdentity(producer_id=producer_id)

    def _take_ids(self) -> None:
        def decide(metadata: Metadata) -> Metadata:
            self._check_lease(metadata)
            following = metadata.next_producer_id + limits.PRODUCER_IDS_TAKEN
            return msgspec.structs.replace(metadata, next_producer_id=following)

        with self._changing("producer ids"):
            end = self._meta.change(decide).next_producer_id
        self._ids = iter(range(end - limits.PRODUCER_IDS_TAKEN, end))

    def adopt(self, request: wire.Adopt) -> wire.Adopted:
        """Appends what a manifest names, by reference, once; all of it becomes durable together.

        Raises `BadRequest`, `UnknownTopic`, `UnknownPartition`, `KeylessRecord`, `CorruptObject`,
        `MissingObject`, and what `Writer.submit` and `wait` raise.
        """
        # One that was adopted may have been swept since, and a rerun deals out its rows anew: to
        # other partitions, which remember nothing. So any that remembers it speaks for all.
        named = manifest.batch_of(request.manifest)
        self._learn_batches()
        before = self._adopted_before(named)
        if before.ranges:
            return before
        self._check_remembered(named)
        found = manifest.read(self._store, request.manifest)
        self._check_age(found)
        self._check_known(found)
        appends = [self._staged(section, found) for section in found.sections if section.rows]
        if not appends:
            return wire.Adopted(ranges={})
        found.check_files(self._store)
        ticket = self._writer.submit(appends, timeout_seconds=self._submit_timeout_seconds)
        results = self._writer.wait(ticket)
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for section, result in zip(
            (each for each in found.sections if each.rows), results, strict=True
        ):
            of_topic = ranges.setdefault(section.topic, {})
            first, count = of_topic.get(section.partition, (result.base_offset, 0))
            of_topic[section.partition] = first, count + section.rows
        return wire.Adopted(ranges=ranges, skipped=all(each.duplicate for each in results))

    def _adopted_before(self, batch_id: BatchId) -> wire.Adopted:
        """The topics that have the batch, and where in them, as far as partitions remember it."""
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for topic in self._ledger.topics():
            with self._ledger.lock:  # for one topic: there may be many
                if topic.standing.has(batch_id):
                    ranges[topic.name] = {}
                for partition in topic.partitions:
                    batch = partition.batches.find(batch_id)
                    if batch is not None:
                        of_topic = ranges.setdefault(topic.name, {})
                        of_topic[partition.number] = batch.base_offset, batch.count
        return wire.Adopted(ranges=ranges, skipped=True)

    def _check_remembered(self, batch_id: BatchId) -> None:
        """Raises `BadRequest` for a batch that is older than its query's newest, and not known.

        Batches of a query rise; one that comes after newer ones is of a checkpoint, or of a
        program, that went back in time.
        """
        newest = max(
            (topic.standing.newest(batch_id.query) for topic in self._ledger.topics()),
            default=-1,
        )
        if batch_id.batch < newest:
            reason = (
                f"batch {batch_id.batch} of {batch_id.query} comes after batch {newest}, and where"
                " it would be is not remembered: it may have been written already. Look whether its"
                " rows are there, and if not, write them as a batch of another query"
            )
            raise errors.BadRequest(reason=reason)

    def _learn_batches(self) -> None:
        """Asks the tables that could not be read when this broker started, if they can be now."""
        for topic in self._ledger.topics():
            if topic.standing.is_known:
                continue
            table = Table(self._store, topic.name, clock=self._clock, only_reads=True)
            try:
                self._ours(table.refresh(), topic)
            except errors.SparklogError:
                continue
            with self._ledger.lock:
                topic.standing.learn(table.batches(topic.topic_id))

    def _check_known(self, found: manifest.Manifest) -> None:
        """Raises `TopicHeldBack` where nobody can tell whether a topic has the batch."""
        if found.kind is BatchKind.UNNAMED:
            return
        for name in {section.topic for section in found.sections}:
            topic = self._ledger.topic(name)
            if not topic.standing.is_known:
                reason = topic.held_back or "its table says which batches it has"
                raise errors.TopicHeldBack(topic=name, reason=reason)

    def _check_age(self, found: manifest.Manifest) -> None:
        """Raises `BadRequest` for a write so old that it may be forgotten, and its files swept."""
        if found.kind is BatchKind.NUMBERED:
            return
        try:
            decided_us = self._store.stat(found.path).modified_us
        except ObjectMissing:
            raise errors.BadRequest(reason=f"there is no manifest at {found.path}") from None
        age_seconds = (self._clock.now_us() - decided_us) / 1e6
        if age_seconds > limits.ADOPTED_WITHIN_SECONDS:
            reason = (
                f"write {found.query} was staged {age_seconds / 86_400:.0f} days ago, so long that"
                " it may have been appended and forgotten: look whether its rows are there, and if"
                " not, write them again under another name"
            )
            raise errors.BadRequest(reason=reason)

    def _staged(self, section: manifest.Section, found: manifest.Manifest) -> Append:
        _check_not_internal(section.topic, "write to")
        topic = self._ledger.topic(section.topic)
        topic.partition(section.partition)
        topic.check_keys(section.partition, section.keyless)
        arrival_us = self._clock.now_us()
        timestamp_type = topic.timestamp_type
        times_us = [arrival_us]  # of rows that brought none
        if timestamp_type == CREATE_TIME:
            bounds_us = (section.min_timestamp_us, section.max_timestamp_us)
            times_us += [each for each in bounds_us if each is not None]
            topic.check_times(min(times_us), max(times_us), arrival_us)
        return Append(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=section.partition,
            count=section.rows,
            arrival_us=arrival_us,
            min_timestamp_us=min(times_us),
            max_timestamp_us=max(times_us),
            timestamp_type=timestamp_type,
            staged=section.ref(),
            batch_id=BatchId(found.query, found.batch),
            batch_kind=found.kind,
        )

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
    ) -> Iterator[Batch]:
        """Every record of the range, in order. Raises what `LogReader.read` raises."""
        return self._reader.read(topic, partition, start, end, columns=columns, topic_id=topic_id)

    def tail(
        self,
        positions: Sequence[wire.TailPosition],
        *,
        columns: Sequence[str] | None = None,
        batch_rows: int = limits.SCAN_BATCH_ROWS,
        idle_seconds: float = 0.5,
    ) -> Iterator[Batch | None]:
        """Records as they come, for ever. Raises what `LogReader.tail` raises."""
        return self._reader.tail(
            positions, columns=columns, batch_rows=batch_rows, idle_seconds=idle_seconds
        )

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
        """Record batches from `offset` on. Says and raises what `KafkaReader.fetch` does."""
        return self._kafka_reader.fetch(
            topic,
            partition,
            offset,
            limit_bytes=limit_bytes,
            at_least_one=at_least_one,
            only_memory=only_memory,
        )

    def watch_growth(
        self,
        seen: Mapping[tuple[str, int], int],
        lacking_bytes: int,
        tell: Callable[[], None],
    ) -> Watch:
        """Has `tell` called, once, when the partitions have grown by `lacking_bytes` together.

        It is called under the ledger's lock, maybe at once, and also where one of the topics is
        deleted: it must not wait for anything. To be ended by `stop_watching`.

        Args:
            seen: `Place.grown_bytes` of each, by topic and partition, when it was looked at.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        with self._ledger.lock:
            places = [
                (self._ledger.topic(topic).partition(number).growth, before)
                for (topic, number), before in seen.items()
            ]
            watch = Watch(places, lacking_bytes, tell)
            watch.start()
        return watch

    def bytes_from(self, topic: str, partition: int, offset: int) -> int | None:
        """Bytes of records from that offset on, or somewhat more; None where that is not known.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        return self._ledger.topic(topic).partition(partition).growth.bytes_from(offset)

    def stop_watching(self, watch: Watch) -> None:
        """Nothing is called for it any more."""
        with self._ledger.lock:
            watch.stop()

    def place(self, topic: str, partition: int) -> Place:
        """Where a partition begins and ends now. Raises `UnknownTopic`, `UnknownPartition`."""
        return self._place(self._ledger.topic(topic).partition(partition))

    def places(self, topic: str) -> list[Place]:
        """The same of all partitions, in order. Raises `UnknownTopic`."""
        return [self._place(each) for each in self._ledger.topic(topic).partitions]

    def _place(self, partition: Partition) -> Place:
        grown_bytes = partition.growth.grown_bytes  # before `end`: what comes between counts later
        return Place(
            grown_bytes=grown_bytes,
            leader=self._lease.broker,
            leader_epoch=partition.leader_epoch,
            start=partition.start,
            end=partition.end,
        )

    def partition_count(self, topic: str) -> int:
        """How many partitions the topic has. Raises `UnknownTopic`."""
        return len(self._ledger.topic(topic).partitions)

    def _is_there(self, topic: str) -> bool:
        """Whether it lives, without a look at all the others."""
        try:
            self._ledger.topic(topic)
        except errors.UnknownTopic:
            return False
        return True

    def codec_of(self, topic: str) -> str | None:
        """How the topic wants Kafka's batches compressed; None: as they come.

        Raises `UnknownTopic`.
        """
        wanted = self._ledger.topic(topic).compression
        return wanted[0] if wanted is not None else None

    def id_of(self, topic: str) -> str:
        """The id of the topic with that name. Raises `UnknownTopic`."""
        return self._ledger.topic(topic).topic_id

    def topic_of(self, topic_id: str) -> str | None:
        """The name of the topic with that id, if it lives."""
        topic = self._ledger.by_id(topic_id)
        return topic.name if topic is not None else None

    def greatest_time(self, topic: str, partition: int) -> tuple[int, int]:
        """(time in ms, offset) of the first record with the greatest time; -1, -1 if there is none.

        Raises `UnknownTopic` and `UnknownPartition`.
        """
        return self._reader.greatest_time(topic, partition)

    def offsets_for_times(self, request: wire.OffsetsForTimes) -> wire.Offsets:
        """The first offsets at or after given times. Raises `UnknownTopic`, `UnknownPartition`."""
        return self._reader.offsets_for_times(request)

    # -------------------------------------------------------------------------- topics

    @property
    def broker(self) -> int:
        """This broker's id."""
        return self._lease.broker

    def cluster(self) -> wire.ClusterInfo:
        """This broker: where it is, and of what cluster."""
        return wire.ClusterInfo(
            cluster_id=self._lease.cluster.cluster_id,
            root=self._store.uri,
            version=VERSION,
            brokers=[self._itself()],
        )

    def _itself(self) -> wire.BrokerInfo:
        if self.serving is not None:
            return self.serving
        known = self._meta.current.brokers.get(self._lease.broker, Broker(epoch=0))
        return wire.BrokerInfo(
            broker=self._lease.broker, epoch=self._lease.epoch, address=known.flight
        )

    def status(self) -> wire.Status:
        """How this broker and its topics are."""
        topics = self._ledger.topics()
        held_back = [
            wire.HeldBack(topic=topic.name, reason=reason)
            for topic in topics
            if (reason := topic.held_back) is not None
        ]
        return wire.Status(
            cluster_id=self._lease.cluster.cluster_id,
            root=self._store.uri,
            broker=self._itself(),
            uptime_seconds=round(self._clock.monotonic() - self._began_at, 3),
            topics=len(topics),
            partitions=sum(len(topic.partitions) for topic in topics),
            unpublished_bytes=self._ledger.unpublished_bytes,
            held_back=held_back[: limits.STATUS_TOPICS],
        )

    def topics(self) -> wire.TopicNames:
        """The names of all topics, sorted."""
        return wire.TopicNames(topics=sorted(topic.name for topic in self._ledger.topics()))

    def describe(self, name: str) -> wire.TopicInfo:
        """Raises `UnknownTopic`."""
        topic = self._ledger.topic(name)
        snapshot = self._publisher.table(topic).snapshot
        files = [file for files in snapshot.files for file in files]
        return wire.TopicInfo(
            topic=topic.name,
            topic_id=topic.topic_id,
            config=dict(topic.config),
            partitions=[
                wire.PartitionInfo(
                    partition=each.number,
                    leader=self._lease.broker,
                    leader_epoch=each.leader_epoch,
                    start=each.start,
                    end=each.end,
                    published=each.published,
                )
                for each in topic.partitions
            ],
            table_uri=f"{self._store.uri}/{table_folder(topic.name)}",
            table_version=snapshot.version,
            table_files=len(files),
            table_bytes=sum(file.size_bytes for file in files),
            max_record_bytes=self._max_record_bytes(topic),
        )

    def _max_record_bytes(self, topic: Topic) -> int:
        of_broker, of_topic = self._writer.max_record_bytes, topic.max_message_bytes
        return of_broker if of_topic is None else min(of_broker, of_topic)

    @property
    def creates_topics(self) -> bool:
        """Whether topics are created that Kafka's clients ask for."""
        return self._defaults.auto_create

    def has_topic(self, name: str) -> bool:
        """Whether there is a topic of that name."""
        return self._ledger.has_topic(name)

    def auto_create(self, name: str, *, client: str = "") -> None:
        """Creates a topic that a Kafka client has asked for, where that is wanted.

        `client` says in the log which one it was. Raises `UnknownTopic` where topics are not
        created so, and what `create_topic` raises.
        """
        if not self._defaults.auto_create or name in _RESERVED_TOPICS - INTERNAL_TOPICS:
            raise errors.UnknownTopic(topic=name)
        if name in INTERNAL_TOPICS:
            self.ensure_offsets_topic()
        else:
            self._create_and_tell(name, client)

    def _create_and_tell(self, name: str, client: str) -> None:
        with suppress(errors.TopicExists):
            made = self.create_topic(wire.CreateTopic(topic=name))
            _log.info(
                "created a topic that a client asked for (topics.auto_create)",
                topic=name,
                partitions=len(made.partitions),
                client=client,
            )

    def ensure_offsets_topic(self) -> None:
        """Creates `__consumer_offsets` where it is missing, and has it compacted.

        Raises what `create_topic` and `edit_config` raise.
        """
        name, config = consumeroffsets.TOPIC, {"cleanup.policy": "compact"}
        if not self._is_there(name):
            request = wire.CreateTopic(
                topic=name, partitions=limits.OFFSETS_PARTITIONS, config=config, if_absent=True
            )
            self._create_topic(request)
        elif not self._ledger.topic(name).is_compacted:  # an earlier version let clients create it
            edits = [(Edit.SET, key, value) for key, value in config.items()]
            self.edit_config(name, edits, only_checks=False)

    def create_topic(self, request: wire.CreateTopic) -> wire.TopicInfo:
        """What `describe` tells of the new topic.

        Raises `BadTopicName`, `TopicExists`, `BadPartitionCount`, `UnknownOption`, `BadOption`,
        `InternalTopic`; `OutcomeUnknown` where it may exist: the next call, or the janitor, finds
        out.
        """
        _check_not_reserved(request.topic)
        return self._create_topic(request)

    def _create_topic(self, request: wire.CreateTopic) -> wire.TopicInfo:
        name = request.topic
        count, config = self._new_topic(request)
        with self._changing(f"creation of topic {name}"):
            self._settle_doubt(name)
            if self._exists(name):
                if request.if_absent:
                    return self.describe(name)
                raise errors.TopicExists(topic=name)
            topic_id = secrets.token_hex(8)
            table = self._make_table(name, topic_id, count, config)
            known = TopicMeta(
                topic_id=topic_id,
                partitions=tuple(
                    PartitionMeta(leader=self._lease.broker, leader_epoch=0) for _ in range(count)
                ),
                config=dict(config),
            )
            try:
                self._change_topics(lambda topics: {**topics, name: known})
            except errors.OutcomeUnknown:
                self._doubtful.add(name)
                raise
            self._serve_topic(name, known, table)
        return self.describe(name)

    def _serve_topic(self, name: str, known: TopicMeta, table: Table) -> None:
        """Takes up a topic that the metadata has named in this epoch, and nobody has written to."""
        topic = Topic(name, known.topic_id, dict(known.config))
        leader_epochs = [each.leader_epoch for each in known.partitions]
        self._ledger.add_partitions(topic, table.snapshot, leader_epochs)
        self._publisher.take(topic, table)
        self._ledger.add_topic(topic)

    def _settle_doubt(self, name: str) -> None:
        """Finds out whether a creation took effect whose outcome was not known.

        The put may still be under way, so a version of the metadata is put that excludes it.
        """
        if name not in self._doubtful:
            return

        def decide(metadata: Metadata) -> Metadata:
            self._check_lease(metadata)
            return metadata

        known = self._meta.change(decide).topics.get(name)
        if known is not None and not self._exists(name):
            table = Table(self._store, name, clock=self._clock)
            if table.refresh().topic_id != known.topic_id:
                reason = f"the metadata names topic {known.topic_id}, and its table does not"
                raise errors.ForeignTable(topic=name, reason=reason)
            self._serve_topic(name, known, table)
        self._doubtful.discard(name)

    def check_topic(self, request: wire.CreateTopic) -> tuple[int, dict[str, str]]:
        """How many partitions the topic would get, and its configuration; creates nothing.

        Raises what `create_topic` would.
        """
        _check_not_reserved(request.topic)
        count, config = self._new_topic(request)
        if self._exists(request.topic):
            raise errors.TopicExists(topic=request.topic)
        return count, config

    def check_replication(self, topic: str, factor: int) -> None:
        """Raises `BadReplicationFactor`. Any factor is met: the root's storage replicates."""
        reason = ""
        if factor == 0 or factor < -1:
            reason = "1 and more are known, and -1 for the default"
        elif factor > 1 and self._defaults.refuse_replication:
            reason = "a partition has one replica (setting topics.refuse_replication)"
        if reason:
            raise errors.BadReplicationFactor(topic=topic, requested=factor, reason=reason)

    def _new_topic(self, request: wire.CreateTopic) -> tuple[int, dict[str, str]]:
        """How many partitions it gets, and its configuration."""
        name = check_topic_name(request.topic)
        count = self._defaults.partitions if request.partitions == -1 else request.partitions
        _check_count(name, count)
        return count, topicconfig.check(request.config)

    def _exists(self, name: str) -> bool:
        return any(topic.name == name for topic in self._ledger.topics())

    def _make_table(self, name: str, topic_id: str, count: int, config: Mapping[str, str]) -> Table:
        """The table first, the metadata after: a topic that the metadata names has its table.

        The lease is judged after the snapshot was taken: a broker that has been replaced must not
        clear away a topic that its successor has made in the meantime.
        """

        def create(before: TableSnapshot) -> Change:
            self._check_lease(self._meta.reload())
            if before.topic_id is not None:
                raise errors.TopicExists(topic=name)
            return create_change(topic_id, count, config)

        table = Table(self._store, name, clock=self._clock)
        table.commit(self._clear)
        table.commit(create)
        return table

    def _clear(self, before: TableSnapshot) -> Change | None:
        """Ends a topic that the metadata does not name: its creation or deletion was cut short."""
        metadata = self._meta.reload()
        self._check_lease(metadata)
        # Only the metadata can say that a topic is gone: we may not know one that lives.
        alive = {known.topic_id for known in metadata.topics.values()}
        is_dead = before.topic_id is not None and before.topic_id not in alive
        return delete_change(before) if is_dead else None

    def add_partitions(self, request: wire.AddPartitions) -> wire.TopicInfo:
        """Existing records stay where they are.

        Raises `UnknownTopic`, `BadPartitionCount`, `InternalTopic`: groups would move.
        """
        _check_not_internal(request.topic, "add partitions to")
        _check_count(request.topic, request.partitions)
        with self._changing(f"partitions for topic {request.topic}"):
            topic = self._ledger.topic(request.topic)
            if request.partitions <= len(topic.partitions):
                raise _too_few(request, len(topic.partitions))

            def widen(before: TableSnapshot) -> Change:
                # More than we know of, where an earlier call was cut short: it may be repeated.
                if request.partitions < self._ours(before, topic).partitions:
                    raise _too_few(request, before.partitions)
                return describe_change(before, request.partitions, topic.config)

            snapshot = Table(self._store, topic.name, clock=self._clock).commit(widen)
            epochs = [each.leader_epoch for each in topic.partitions]
            epochs += [0] * (request.partitions - len(epochs))
            known = TopicMeta(
                topic_id=topic.topic_id,
                partitions=tuple(
                    PartitionMeta(leader=self._lease.broker, leader_epoch=each) for each in epochs
                ),
                config=topic.config,
            )
            self._change_topics(lambda topics: {**topics, topic.name: known})
            self._ledger.add_partitions(topic, snapshot, epochs)
        return self.describe(topic.name)

    def check_partitions(self, request: wire.AddPartitions) -> None:
        """Raises what `add_partitions` would, and adds none."""
        _check_count(request.topic, request.partitions)
        topic = self._ledger.topic(request.topic)
        if request.partitions <= len(topic.partitions):
            raise _too_few(request, len(topic.partitions))

    def alter(self, request: wire.AlterTopic) -> wire.TopicInfo:
        """Raises `UnknownTopic`, `UnknownOption`, `BadOption`."""

        def change(config: Mapping[str, str]) -> dict[str, str]:
            changed = dict(config)
            for key, value in request.config.items():
                topicconfig.check_key(key)
                if value is None:
                    changed.pop(key, None)
                else:
                    changed[key] = value
            return changed

        self._change_config(request.topic, change, only_checks=False)
        return self.describe(request.topic)

    def edit_config(
        self, topic: str, edits: Sequence[tuple[Edit, str, str | None]], *, only_checks: bool
    ) -> None:
        """Changes single keys: (edit, key, value) of each; or only says whether that would go.

        Raises `BadTopicName`, `UnknownTopic`, `UnknownOption`, `BadOption`.
        """
        check_topic_name(topic)
        self._change_config(
            topic, lambda config: topicconfig.edited(config, edits), only_checks=only_checks
        )

    def replace_config(self, topic: str, config: Mapping[str, str], *, only_checks: bool) -> None:
        """The same of the whole configuration: what it does not name goes back to its default."""
        check_topic_name(topic)
        self._change_config(topic, lambda _: config, only_checks=only_checks)

    def _change_config(
        self,
        name: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
        *,
        only_checks: bool,
    ) -> None:
        with self._changing(f"configuration of topic {name}"):
            topic = self._ledger.topic(name)
            config = topicconfig.check(change(topic.config))
            if only_checks:
                return
            table = Table(self._store, topic.name, clock=self._clock)
            table.commit(
                lambda before: describe_change(self._ours(before, topic), before.partitions, config)
            )

            def replace(topics: dict[str, TopicMeta]) -> dict[str, TopicMeta]:
                known = msgspec.structs.replace(topics[topic.name], config=config)
                return {**topics, topic.name: known}

            self._change_topics(replace)
            topic.config = config

    def topic_configs(self, name: str) -> list[ConfigEntry]:
        """Every configuration key of a topic. Raises `UnknownTopic`."""
        return configs.topic_entries(self._ledger.topic(name).config, self._settings)

    def new_topic_configs(self, config: Mapping[str, str]) -> list[ConfigEntry]:
        """The same of a topic that would have that configuration."""
        return configs.topic_entries(config, self._settings)

    def broker_configs(self, listener: str) -> list[ConfigEntry]:
        """This broker's settings; `listener`: where Kafka's clients are told to come."""
        return configs.broker_entries(self._settings, listener)

    def group_configs(self) -> list[ConfigEntry]:
        """The configuration of any consumer group."""
        return configs.group_entries()

    def metrics_configs(self) -> list[ConfigEntry]:
        """The configuration of any subscription to clients' metrics."""
        return configs.metrics_entries()

    def compact(self, name: str) -> wire.TopicInfo:
        """Merges the small files of the topic's table now; returns when that is done.

        Where the topic is compacted by keys, of each key all but the last record go first. Raises
        `UnknownTopic`, and what `compaction.compact` raises.
        """
        topic = self._ledger.topic(name)
        table = Table(self._store, name, clock=self._clock)
        with self._stopping_on_sync_failure(f"compaction of topic {name}"):
            self._ours(table.refresh(), topic)
            for each in keycompaction.choose(table, everything=True):
                keycompaction.compact(table, each, should_stop=self._closing.is_set)
            snapshot = self._ours(table.refresh(), topic)
            groups = compaction.choose(
                snapshot,
                everything=True,
                borders=keycompaction.borders(table),
                span_us=retention.span_us(snapshot.config),
            )
            for group in groups:
                compaction.compact(table, group)
            self._publisher.table(topic).refresh()
        return self.describe(name)

    def delete_records(self, request: wire.DeleteRecords) -> wire.LogStarts:
        """Moves the log start of partitions, and says where it is then.

        What is below it is in nobody's reach any more, and gone from the topic's table; its files
        go once the grace of replaced files has passed. A repetition changes nothing.

        Raises, with no effect, `UnknownTopic`, `InternalTopic`, `UnknownPartition`,
        `PolicyViolation` where the topic's `cleanup.policy` does not name `delete`,
        `OffsetOutOfRange` beyond the high watermark, `TimedOut` where the records cannot be
        published first; and what `retention.delete_records` raises.
        """
        deletion = self.begin_deletion(request)
        if deletion.moved:
            self._publish_up_to([deletion.goals], request.timeout_seconds)
        return self.end_deletion(deletion)

    def begin_deletion(self, request: wire.DeleteRecords) -> Deletion:
        """Checks it, for `is_published` and then `end_deletion`: for those who wait elsewhere.

        Raises what `delete_records` does before it publishes.
        """
        _check_not_internal(request.topic, "delete records of")
        topic = self._ledger.topic(request.topic)
        if "delete" not in topicconfig.value_of(topic.config, "cleanup.policy").split(","):
            reason = "its cleanup.policy is not delete, so its records stay but for newer ones"
            raise errors.PolicyViolation(topic=topic.name, reason=reason)
        offsets = {
            number: _deletion_offset(topic, topic.partition(number), offset)
            for number, offset in request.offsets.items()
        }
        moved = {
            number: offset
            for number, offset in offsets.items()
            if offset > topic.partition(number).start
        }
        return Deletion(topic=topic, offsets=offsets, moved=moved)

    def is_published(self, deletion: Deletion) -> bool:
        """Whether all that is to go is in the table; asks for it to be published if not."""
        return not self._missing([deletion.goals])

    def not_published(self, deletion: Deletion, timeout_seconds: float) -> errors.TimedOut:
        """Why it is not, to be raised when its time is over."""
        return _not_published([deletion.topic], timeout_seconds)

    def end_deletion(self, deletion: Deletion) -> wire.LogStarts:
        """Moves the log start of what is published. Raises what `retention.delete_records` does."""
        topic, offsets, moved = deletion.topic, deletion.offsets, deletion.moved
        if moved:
            with self._stopping_on_sync_failure(f"deletion of records of topic {topic.name}"):
                self._check_lease(self._meta.reload())
                table = Table(self._store, topic.name, clock=self._clock)
                found = retention.delete_records(table, topic.topic_id, moved)
                self._ledger.started(topic, found.starts)
        return wire.LogStarts(starts={number: topic.partition(number).start for number in offsets})

    def delete_topic(self, name: str) -> None:
        """Deletes it; its files go once the grace of replaced files has passed.

        Raises `UnknownTopic`, `InternalTopic`; `OutcomeUnknown` where the topic is gone and its
        table is not.
        """
        _check_not_internal(name, "delete")
        with self._changing(f"deletion of topic {name}"):
            self._settle_doubt(name)
            topic = self._ledger.topic(name)
            try:
                self._change_topics(
                    lambda topics: {key: each for key, each in topics.items() if key != name}
                )
            except errors.OutcomeUnknown as error:
                # The topic may be gone, and then nothing more must be acked for it; or not, and
                # then nothing of it must be trimmed. A restart will know.
                self._writer.fail(error)
                raise
            self._ledger.remove_topic(topic)
            self._publisher.forget(topic)
            self._reader.forget(topic)
            table = Table(self._store, name, clock=self._clock)
            try:
                table.commit(
                    lambda before: (
                        delete_change(before) if before.topic_id == topic.topic_id else None
                    )
                )
            except errors.SparklogError as error:
                what = f"deletion of topic {name}: it is gone, but its table stands"
                raise errors.OutcomeUnknown(what=what, reason=str(error)) from error

    def bury(self, name: str) -> None:
        """Sees to it that the table says so too, where there is no topic of that name.

        Raises `ForeignTable`, `CorruptObject`, and what the store raises.
        """
        with self._changing(f"burial of topic {name}"):
            self._settle_doubt(name)
            if not self._exists(name):
                Table(self._store, name, clock=self._clock).commit(self._clear)

    def _ours(self, before: TableSnapshot, topic: Topic) -> TableSnapshot:
        """`before`, if it is still this topic's. Raises `UnknownTopic`."""
        if before.topic_id != topic.topic_id:
            raise errors.UnknownTopic(topic=topic.name)
        return before

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """One change of the metadata at a time."""
        with self._admin, self._stopping_on_sync_failure(what):
            yield

    @contextmanager
    def _stopping_on_sync_failure(self, what: str) -> Iterator[None]:
        """A disk that failed to keep something is not to be trusted with records either."""
        try:
            yield
        except SyncFailed as error:
            self._writer.fail(error)
            raise errors.OutcomeUnknown(what=what, reason=str(error)) from error

    def _change_topics(
        self, change: Callable[[dict[str, TopicMeta]], dict[str, TopicMeta]]
    ) -> None:
        def decide(metadata: Metadata) -> Metadata:
            self._check_lease(metadata)
            return msgspec.structs.replace(metadata, topics=change(metadata.topics))

        self._meta.change(decide)

    def _check_lease(self, metadata: Metadata) -> None:
        """Raises `BrokerFenced`, which ends the writer, where `metadata` names somebody newer."""
        try:
            check_lease(metadata, self._lease)
        except errors.BrokerFenced as error:
            self._writer.fail(error)
            raise

    # -------------------------------------------------------------------------- looking inside

    def producers(self, topic: str, partition: int) -> list[Producer]:
        """The idempotent producers that a partition remembers, by their ids.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        found = self._ledger.topic(topic).partition(partition)
        with self._ledger.lock:
            blocks = found.producers.blocks()
        states = sorted(each for block in blocks for each in block.items())
        return [
            Producer(
                producer_id=producer_id,
                epoch=state.epoch,
                last_sequence=state.last_sequence,
                last_us=state.last_us,
            )
            for producer_id, state in states
        ]

    def log_bytes(self) -> dict[str, list[int]]:
        """What each partition of each topic takes: its table's files, and what waits in the WAL."""
        found = {}
        for topic in self._ledger.topics():
            files = self._publisher.table(topic).snapshot.files
            with self._ledger.lock:
                sizes = [
                    sum(payload_bytes(waiting.entry) for waiting in each.unpublished)
                    for each in topic.partitions
                ]
            for number, of_partition in enumerate(files[: len(sizes)]):
                sizes[number] += sum(file.size_bytes for file in of_partition)
            found[topic.name] = sizes
        return found

    def check_leader_epoch(self, topic: str, partition: int, leader_epoch: int) -> None:
        """That it is the current one, which is what a client means by it; -1 says nothing.

        Raises `UnknownTopic`, `UnknownPartition`, `UnknownLeaderEpoch`, `FencedLeaderEpoch`.
        """
        current = self._ledger.topic(topic).partition(partition).leader_epoch
        if leader_epoch in (-1, current):
            return
        kind = errors.UnknownLeaderEpoch if leader_epoch > current else errors.FencedLeaderEpoch
        raise kind(topic=topic, partition=partition, found=leader_epoch, current=current)

    def free_bytes(self) -> int | None:
        """Space left under the root; None where nobody knows."""
        return self._store.free_bytes()

    def epoch_end(self, topic: str, partition: int, leader_epoch: int) -> tuple[int, int]:
        """(leader epoch, the offset where it ended), of that epoch or the last before it.

        For one that is still to come -1, -1. Raises `UnknownTopic`, `UnknownPartition`.
        """
        found = self._ledger.topic(topic).partition(partition)
        with self._ledger.lock:
            return found.epoch_end(leader_epoch)

    # -------------------------------------------------------------------------- publishing

    def publish_all(self, request: wire.PublishNow) -> None:
        """Returns when everything that was acked before is in the tables. Raises `TimedOut`."""
        wanted = self._ledger.topics()
        if request.topics is not None:
            wanted = [self._ledger.topic(name) for name in request.topics]
        goals = [(topic, [each.end for each in topic.partitions]) for topic in wanted]
        self._publish_up_to(goals, request.timeout_seconds)

    def _publish_up_to(
        self, goals: Sequence[tuple[Topic, Sequence[int]]], timeout_seconds: float
    ) -> None:
        """Returns when each topic's table has what is below the ends, per partition."""
        deadline = self._clock.monotonic() + timeout_seconds
        while missing := self._missing(goals):
            if self._clock.monotonic() > deadline:
                raise _not_published(missing, timeout_seconds)
            self._clock.sleep(0.005)

    def _missing(self, goals: Sequence[tuple[Topic, Sequence[int]]]) -> list[Topic]:
        """Topics whose table is not that far; they are published next.

        Raises `BrokerClosing`.
        """
        if self._closing.is_set():
            raise errors.BrokerClosing(broker=self._lease.broker)
        missing = [topic for topic, ends in goals if not self._reached(topic, ends)]
        for topic in missing:
            self._publisher.want(topic)
        if missing:
            self.publish_now()
        return missing

    def _reached(self, topic: Topic, ends: Sequence[int]) -> bool:
        if self._ledger.by_id(topic.topic_id) is not topic:
            return True
        return all(each.published >= end for each, end in zip(topic.partitions, ends, strict=False))

    # -------------------------------------------------------------------------- ending

    @property
    def failure(self) -> BaseException | None:
        """What ended the writer, if it has ended."""
        return self._writer.failure

    def close(self) -> None:
        """Wakes everybody who waits; nothing is accepted any more."""
        self._closing.set()
        self._writer.fail(errors.BrokerClosing(broker=self._lease.broker))
        with self._ledger.grown:
            self._ledger.grown.notify_all()


def _not_published(missing: Sequence[Topic], timeout_seconds: float) -> errors.TimedOut:
    reasons = [f"; {each.name}: {each.held_back}" for each in missing if each.held_back]
    return errors.TimedOut(what="publishing" + "".join(reasons), timeout_seconds=timeout_seconds)


def _check_not_internal(topic: str, what: str) -> None:
    """Groups are kept in such a topic, and go wrong if others meddle with it, as in Kafka."""
    if topic in INTERNAL_TOPICS:
        raise errors.InternalTopic(topic=topic, what=what)


def _check_not_reserved(topic: str) -> None:
    """Raises `InternalTopic`."""
    if topic in _RESERVED_TOPICS:
        raise errors.InternalTopic(topic=topic, what="create")


def _deletion_offset(topic: Topic, partition: Partition, offset: int) -> int:
    """Below which offset records are to be deleted; -1 means all. Raises `OffsetOutOfRange`."""
    end = partition.end
    if not -1 <= offset <= end:
        raise errors.OffsetOutOfRange(
            topic=topic.name,
            partition=partition.number,
            offset=offset,
            start=partition.start,
            end=end,
        )
    return end if offset == -1 else offset


def _too_few(request: wire.AddPartitions, count: int) -> errors.BadPartitionCount:
    return errors.BadPartitionCount(
        topic=request.topic,
        requested=request.partitions,
        reason=f"it has {count} already, and they never become fewer",
    )


def _check_count(topic: str, count: int) -> None:
    if not 1 <= count <= limits.PARTITIONS_PER_TOPIC:
        raise errors.BadPartitionCount(
            topic=topic,
            requested=count,
            reason=f"a topic has 1 to {limits.PARTITIONS_PER_TOPIC}",
        )
