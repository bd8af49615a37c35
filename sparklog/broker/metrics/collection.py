"""Collects a broker's metrics from counts and states that exist anyway.

A collection runs in its own thread while the broker serves. It holds a lock only for one topic or
one group at a time, reads nothing from the storage but the records whose age it needs, and pauses
after every few thousand values, so that no other thread waits for long.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sparklog import errors
from sparklog.broker.authorization import Authorization
from sparklog.broker.broker import Broker
from sparklog.broker.counts import (
    Budget,
    Distribution,
    ListenerCounts,
    RecentQuantiles,
    TopicCounts,
    UpkeepCounts,
)
from sparklog.broker.groups.coordinator import Coordinator, GroupFigures
from sparklog.broker.groups.messages import Description
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.publish_loop import PublishLoop
from sparklog.broker.log.publisher import Publisher
from sparklog.broker.log.record_times import RecordKey
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.log.topic import Topic
from sparklog.broker.metrics import elsewhere
from sparklog.broker.metrics.bill import RecentBill
from sparklog.broker.quotas import Quotas
from sparklog.clock import Clock
from sparklog.formats import consumer_offsets
from sparklog.formats.flight_messages import GroupPosition, PositionLag
from sparklog.formats.values.columns import waiting_of
from sparklog.listeners import Listener
from sparklog.storage import wal
from sparklog.storage.metadata.identity import Ask
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.metadata.placement import Loads
from sparklog.storage.objects import Purpose, Store, Usage, usages
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.wal import WalObject

LAG_SECONDS = 1.0  # per collection, to read timestamps of records in tables
LINES_AT_ONCE = 4_096  # lines written in succession before other threads may run
_PAUSE_SECONDS = 1e-4  # after which the next lines are written


class KafkaFigures(Protocol):
    """The parts of the Kafka listener that metrics are collected from."""

    counts: ListenerCounts

    @property
    def listeners(self) -> Sequence[Listener]: ...

    @property
    def connection_count(self) -> int: ...

    @property
    def pending_count(self) -> int: ...


class Certificate(Protocol):
    """The certificate of the listeners."""

    failure: str
    """The reason why its files cannot be loaded as they are now; empty if they can."""

    @property
    def expires_at(self) -> float:
        """When it expires, in seconds since 1970."""


class FlightFigures(Protocol):
    """The part of the Flight listener that metrics are collected from."""

    @property
    def stream_count(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCounts:
    """Distributions of the flushes of the write-ahead log."""

    times_us: Distribution = field(default_factory=Distribution)
    sizes_bytes: Distribution = field(default_factory=Distribution)

    def count(self, written: WalObject, seconds: float) -> None:
        """Counts a flush."""
        self.times_us.add(int(seconds * 1e6))
        self.sizes_bytes.add(sum(each.entry.length for each in written.located))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that metrics are collected from."""

    broker: Broker
    led_partitions: LedPartitions
    publisher: Publisher
    publishing: PublishLoop
    groups: Coordinator
    flushes: FlushCounts
    upkeep: UpkeepCounts
    budgets: Callable[[], Iterable[Budget]]
    """Returns the memory budgets, with the bytes held."""
    store: Store
    kafka: KafkaFigures | None
    flight: FlightFigures
    authorization: Authorization
    cluster_id: str
    epoch: int
    small_file_bytes: int
    """Data files below this size are small: a compaction would merge them."""
    compact_files: int
    """The number of small files in a partition from which they are merged."""
    clock: Clock
    ask: Ask | None = None
    """Asks another broker for the lag in its partitions; if None, it stays unknown."""
    quotas: Quotas | None = None
    """None if clients have none."""
    certificate: Certificate | None = None
    """That of the listeners; None if they use no TLS."""
    dead: Callable[[], Mapping[int, int]] = dict
    """Returns the brokers that this one, as controller, considers dead, with their epochs."""

    schemas: SchemaKeeper | None = None
    """None without a schema registry."""
    bill: RecentBill | None = None
    """None if the store bills no requests."""

    def usages(self) -> dict[Purpose, Usage]:
        """Returns the storage operations by purpose; empty if they are not counted."""
        found = usages(self.store)
        if self.publisher.process is not None:
            of_process = Usage(Counter(self.publisher.process.requests.copy()))
            found.setdefault(Purpose.TABLES, Usage()).add(of_process)
        return found


def age_seconds(since_us: int | None, now_us: int) -> float:
    """Returns the time since a moment; 0 for None, and for a moment in the future."""
    return 0.0 if since_us is None else max(now_us - since_us, 0) / 1e6


class Pacer:
    """Lets other threads run after every few thousand values."""

    def __init__(self, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._pause_seconds = pause_seconds
        self._left = LINES_AT_ONCE

    def spend(self, values: int) -> None:
        """Counts values that were produced, and pauses after every `LINES_AT_ONCE`."""
        self._left -= values
        if self._left <= 0:
            self._left = LINES_AT_ONCE
            time.sleep(self._pause_seconds)


# ------------------------------------------------------------------------------ topics


class TableFigures:
    """Sizes of a table's data files at one version, in the partitions that a broker leads."""

    __slots__ = (
        *("bytes", "debt_bytes", "files", "files_of", "numbers", "sizes"),
        *("misfits", "small_files", "snapshot", "unfilled_rows", "waiting_rows"),
    )

    def __init__(self, snapshot: TableSnapshot, numbers: tuple[int, ...]) -> None:
        self.snapshot = snapshot
        self.numbers = numbers
        """The partitions, in the order of the lists."""
        self.sizes = [0] * len(numbers)
        """Bytes by partition."""
        self.files_of = [0] * len(numbers)
        """The number of files by partition."""
        self.files = self.bytes = self.small_files = self.debt_bytes = 0
        self.misfits = self.unfilled_rows = self.waiting_rows = 0

    def count(self, at: int, files: Sequence[TableFile], small_bytes: int, enough: int) -> None:
        """Counts the files of `numbers[at]`; `enough` or more small ones will be merged."""
        small = [each.size_bytes for each in files if each.size_bytes < small_bytes]
        size = sum(each.size_bytes for each in files)
        self.sizes[at] = size
        self.files_of[at] = len(files)
        self.files += len(files)
        self.bytes += size
        self.small_files += len(small)
        self.debt_bytes += sum(small) if len(small) >= enough else 0
        if self.snapshot.columns is not None:
            self.misfits += sum(each.misfits or 0 for each in files)
            self.unfilled_rows += sum(each.rows or 0 for each in self.snapshot.unfilled(files))
            if self.snapshot.columns.formats:
                self.waiting_rows += sum(waiting_of(each.columns).rows for each in files)


@dataclass(slots=True, kw_only=True)
class TopicState:
    """A topic at one moment; lists have one value for each partition."""

    name: str
    topic_id: str
    labels: Sequence[str]
    """The labels of each partition, in Prometheus's text format."""
    starts: Sequence[int]
    ends: Sequence[int]
    published: Sequence[int]
    sizes: Sequence[int]
    counts: TopicCounts
    lag_records: int
    oldest_us: int | None
    """When the oldest record that is not in the table arrived."""
    table: TableFigures
    held_back: bool
    deletions_refused: bool
    longest_publish_seconds: float | None
    """See `PublishLoop.longest_seconds`; None for a topic without an interval of its own."""
    offline: int
    """Partitions that accept no records."""
    stuck: int
    """Partitions moved here from another leader that this broker cannot restore."""


@dataclass(slots=True, kw_only=True)
class GroupOffset:
    """The position of a group in a partition."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    lag: int | None
    """None if another broker leads the partition, and did not answer."""
    member: tuple[str, str, str]
    """Host, member id and client id of the member that reads it; empty if there is none."""
    lag_seconds: float | None
    """None if the age of the first unread record is unknown, or has to be read first."""

    @property
    def key(self) -> RecordKey:
        return self.topic, self.topic_id, self.partition, self.offset


@dataclass(slots=True, kw_only=True)
class Sums:
    """The sums of all topics."""

    counts: TopicCounts
    """Deleted topics included."""
    topics: int = 0
    partitions: int = 0
    offline: int = 0
    stuck: int = 0
    held_back: int = 0
    oldest_us: int | None = None
    """When the oldest record that is not in its table arrived."""

    def add(self, topic: TopicState) -> None:
        """Adds a topic."""
        self.counts.add(topic.counts)
        self.topics += 1
        self.partitions += len(topic.ends)
        self.offline += topic.offline
        self.stuck += topic.stuck
        self.held_back += topic.held_back
        if topic.oldest_us is not None:
            self.oldest_us = min(self.oldest_us or topic.oldest_us, topic.oldest_us)


@dataclass(slots=True, frozen=True, kw_only=True)
class ClusterFigures:
    """The cluster, as this broker sees it."""

    is_controller: bool
    brokers: int
    """Brokers that are up."""
    topics: int
    partitions: int
    leaderless: int
    """Partitions whose leader is not up."""


class Collector:
    """Collects a broker's metrics. One caller at a time.

    Topics and positions of groups are yielded one at a time, and must be dropped one at a time:
    many objects that live as long as a collection make the garbage collector visit all objects of
    the process, which stops every thread for a tenth of a second.
    """

    def __init__(self, sources: Sources, *, pacer: Pacer | None = None) -> None:
        self.sources = sources
        self.pacer = pacer or Pacer()
        self._quantiles: dict[object, RecentQuantiles] = {}
        self._labels: dict[str, tuple[tuple[int, ...], list[str]]] = {}
        self._tables: dict[str, TableFigures] = {}
        self._times = sources.broker.record_times()
        self._loads: tuple[ClusterMetadata | None, Loads] = (None, Loads())
        """The number of partitions of each leader, as of a version of the metadata."""
        self._turn = 0
        """The position where reading ages begins, so that every partition gets its turn."""

    def recent(
        self, key: object, distribution: Distribution, quantiles: Sequence[float]
    ) -> list[float]:
        """Returns quantiles over about the last minute; `key` names the distribution."""
        found = self._quantiles.get(key)
        if found is None:
            found = self._quantiles[key] = RecentQuantiles(distribution)
        return found.at(time.monotonic(), quantiles)

    def wal_bytes(self) -> int | None:
        """Returns the bytes of the files of all write-ahead logs below a local root.

        None on an object store, where listing would cost requests, and if listing fails.
        """
        store = self.sources.store
        if not store.is_local:
            return None
        size = 0
        try:
            for stat in store.walk(wal.FOLDER):
                size += stat.size_bytes
                self.pacer.spend(1)
        except errors.SparklogError:
            return None
        return size

    def cluster(self) -> ClusterFigures:
        """Returns the cluster's metrics."""
        broker = self.sources.broker
        metadata, has_sight = broker.metadata.known, broker.metadata.has_sight
        dead = self.sources.dead() if has_sight else {}
        members = {
            number for number, each in broker.members.up().items() if each.epoch != dead.get(number)
        }
        if self._loads[0] is not metadata:
            self._loads = metadata, Loads.of(metadata.topics.values())
        loads = self._loads[1]
        return ClusterFigures(
            # Without sight of the metadata: another broker may be the controller by now.
            is_controller=metadata.controller == broker.broker_id and has_sight,
            brokers=len(members),
            topics=len(metadata.topics),
            partitions=loads.total(),
            leaderless=sum(count for leader, count in loads.items() if leader not in members),
        )

    # -------------------------------------------------------------------------- topics

    def topics(self) -> tuple[Iterator[TopicState], Sums]:
        """Returns the topics and their sums, which are complete once all have been yielded."""
        led = self.sources.led_partitions
        sums = Sums(counts=TopicCounts())
        topics, removed = led.topics_and_removed()
        sums.counts.add(removed)
        return self._states(topics, sums), sums

    def _states(self, topics: Sequence[Topic], sums: Sums) -> Iterator[TopicState]:
        alive = {topic.topic_id for topic in topics}
        for gone in (self._labels.keys() | self._tables.keys()) - alive:
            self._labels.pop(gone, None)
            self._tables.pop(gone, None)
        for topic in topics:
            state = self._topic(topic)
            sums.add(state)
            yield state
            self.pacer.spend(4 + len(topic.partitions))

    def _topic(self, topic: Topic) -> TopicState:
        partitions = tuple(topic.partitions.values())
        numbers = tuple(each.number for each in partitions)
        oldest_us = None
        if topic.waiting:
            oldest_us = self.sources.led_partitions.backlog.oldest_arrival_us(partitions)
        table = self._table(topic, numbers)
        # Positions before ends: an end that rises in between cannot make a difference negative.
        starts = [each.start for each in partitions]
        published = [each.published for each in partitions]
        ends = [each.end for each in partitions]
        sizes = table.sizes
        if published != ends:
            sizes = [
                size if each.published == each.end
                else size + (each.growth.bytes_from(each.published) or 0)
                for size, each in zip(sizes, partitions, strict=True)
            ]  # fmt: skip
        blocked = sum(each.blocked is not None for each in partitions)
        return TopicState(
            name=topic.name,
            topic_id=topic.topic_id,
            labels=self._labels_of(topic, numbers),
            starts=starts,
            ends=ends,
            published=published,
            sizes=sizes,
            counts=topic.counts,
            lag_records=sum(ends) - sum(published),
            oldest_us=oldest_us,
            table=table,
            held_back=topic.refusal is not None,
            deletions_refused=topic.deletion_refusal is not None,
            longest_publish_seconds=self._longest_publish_seconds(topic),
            offline=len(partitions) if topic.in_doubt is not None else blocked,
            stuck=self._stuck(topic),
        )

    def _longest_publish_seconds(self, topic: Topic) -> float | None:
        publishing = self.sources.publishing
        has_own = publishing.own_interval_seconds(topic) is not None
        return publishing.longest_seconds(topic) if has_own else None

    def _stuck(self, topic: Topic) -> int:
        led = self.sources.led_partitions
        if not led.is_takeover_stuck:
            return 0
        return sum(led.is_moving(topic, number) for number in range(topic.count))

    def _labels_of(self, topic: Topic, numbers: tuple[int, ...]) -> Sequence[str]:
        known = self._labels.get(topic.topic_id)
        if known is None or known[0] != numbers:
            labels = [f'{{topic="{topic.name}",partition="{number}"}}' for number in numbers]
            known = self._labels[topic.topic_id] = numbers, labels
        return known[1]

    def _table(self, topic: Topic, numbers: tuple[int, ...]) -> TableFigures:
        """Counts the files of the last seen version of the table, once per version."""
        snapshot = topic.table.snapshot
        found = self._tables.get(topic.topic_id)
        if found is None or found.snapshot is not snapshot or found.numbers != numbers:
            found = TableFigures(snapshot, numbers)
            for at, number in enumerate(numbers):
                # Partitions may have been added since that version.
                files = snapshot.files[number] if number < len(snapshot.files) else ()
                found.count(at, files, self.sources.small_file_bytes, self.sources.compact_files)
                self.pacer.spend(1 + len(files))
            self._tables[topic.topic_id] = found
        return found

    # -------------------------------------------------------------------------- groups

    def groups(self) -> Iterator[tuple[Description, Iterator[GroupOffset]]]:
        """Yields the groups, each with its positions."""
        groups, others = self.sources.groups.figures(), dict[GroupPosition, PositionLag]()
        if self.sources.ask is not None and len(self.sources.broker.members.up()) > 1:
            kept = list(groups)  # fixes the offsets that leaders are asked about
            groups, others = iter(kept), self._lags_elsewhere(kept, self.sources.ask)
        for each in groups:
            yield each.description, self._offsets(each, others)

    def _lags_elsewhere(
        self, groups: Sequence[GroupFigures], ask: Ask
    ) -> dict[GroupPosition, PositionLag]:
        """Asks the other brokers that lead partitions of the groups."""
        broker = self.sources.broker
        members = broker.members.up()
        positions: dict[str, set[GroupPosition]] = {}
        for each in groups:
            for topic, number, offset in self._positions(each):
                leader = topic.leaders[number]
                if leader in members and leader != broker.broker_id:
                    found = positions.setdefault(members[leader].flight, set())
                    found.add(GroupPosition(topic.topic_id, number, offset))
        return elsewhere.lags(ask, positions)

    def _positions(self, figures: GroupFigures) -> Iterator[tuple[Topic, int, int]]:
        """Yields topic, partition and offset of each position in a partition that exists."""
        for name, of_topic in figures.offsets.items():
            topic = self._find(name)
            if topic is None:
                continue
            for number, committed in of_topic.items():
                self.pacer.spend(1)
                if committed.topic_id in ("", topic.topic_id) and number < topic.count:
                    yield topic, number, committed.offset

    def _offsets(
        self, figures: GroupFigures, others: Mapping[GroupPosition, PositionLag]
    ) -> Iterator[GroupOffset]:
        members = self._readers(figures.description)
        now_us = self.sources.clock.now_us()
        for topic, number, offset in self._positions(figures):
            here = topic.partitions.get(number)
            there = others.get(GroupPosition(topic.topic_id, number, offset))
            end = here.end if here is not None else there.end if there is not None else None
            lag = None if end is None else max(end - offset, 0)
            made_us = None
            if lag == 0:
                made_us = now_us
            elif here is not None:
                made_us = self._times.known_us((topic.name, topic.topic_id, number, offset))
            elif there is not None:
                made_us = there.made_us
            yield GroupOffset(
                topic=topic.name,
                topic_id=topic.topic_id,
                partition=number,
                offset=offset,
                lag=lag,
                member=members.get((topic.name, number), ("", "", "")),
                lag_seconds=None if made_us is None else age_seconds(made_us, now_us),
            )

    def _find(self, name: str) -> Topic | None:
        try:
            return self.sources.led_partitions.topic(name)
        except errors.UnknownTopic:
            return None

    def _readers(self, group: Description) -> dict[tuple[str, int], tuple[str, str, str]]:
        """Returns the member that reads each partition: host, member id and client id."""
        found = {}
        for member in group.members:
            reader = member.client_host, member.member_id, member.client_id
            try:
                for each in consumer_offsets.assigned_partitions(member.assignment):
                    found[each] = reader
                    self.pacer.spend(1)
            except errors.CorruptRecord:  # not the consumer protocol
                continue
        return found

    def read_ages(self, offsets: Sequence[GroupOffset]) -> int:
        """Reads the positions' missing ages; returns how many could not be read in time."""
        deadline = time.monotonic() + LAG_SECONDS
        first = self._turn % len(offsets) if offsets else 0
        unread = 0
        for each in itertools.chain(offsets[first:], offsets[:first]):
            if time.monotonic() < deadline:
                self._turn += 1
                made_us = self._times.read_us(each.key)
                if made_us is not None:
                    each.lag_seconds = age_seconds(made_us, self.sources.clock.now_us())
            unread += each.lag_seconds is None
        return unread
