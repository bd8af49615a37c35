"""Partition table: ends, producers and unpublished entries of the partitions this broker leads.

One lock (`PartitionTable.lock`) guards all of it. Acks wait for it, so no thread holds it during
I/O, nor while it takes a lock that is held during I/O, as that of a topic's table is. Only durable
facts are recorded here: the writer applies a flush after its object is durable, the publisher a
commit after it is in the Delta log.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors
from sparklog.broker.counts import TopicCounts
from sparklog.broker.log.growth import Growth
from sparklog.broker.log.producer_state import (
    NO_PRODUCER,
    Producers,
    ProducerState,
    SequencedBatch,
    advance,
)
from sparklog.broker.log.spark_batches import PartitionSparkBatches, SparkBatch, TopicSparkBatches
from sparklog.broker.log.wal_references import WalReferences
from sparklog.clock import Clock, SystemClock
from sparklog.formats import topic_config
from sparklog.formats.record import CREATE_TIME, LOG_APPEND_TIME
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.storage import assign
from sparklog.storage.metadata import ClusterMetadata, TopicMetadata
from sparklog.storage.plan import join_head, join_tail
from sparklog.storage.retention import removes_records
from sparklog.storage.snapshot import (
    NOT_LED,
    BatchId,
    Bounds,
    Entry,
    EntryKind,
    Located,
    TableSnapshot,
)
from sparklog.storage.table import APPEND_ONLY_REASON, NO_TABLE, TopicTable
from sparklog.storage.wal import WalObject

_PRODUCER_EXPIRY_SECONDS = 24 * 3600.0  # idle idempotent producers; checked at each WAL checkpoint
PRODUCERS_PER_PARTITION = 20_000  # the least recently active ones are dropped first
PRODUCERS_IN_ALL = 100_000  # of all partitions together: ~1 kB each
_PRODUCERS_FORGOTTEN = 2_000  # expired producers that a checkpoint drops at most
LEADER_EPOCHS_REMEMBERED = 32  # of a partition, with their first offsets
_DELETED_NAME_SECONDS = 1.0  # in which no client's mention creates a deleted topic again

_OVERHEAD_BYTES = 640
"""Memory of a waiting entry beside its records, measured on 300,000 entries."""


class Partition:
    """One partition, with `start` <= `published` <= `end`."""

    __slots__ = (
        "batches",
        "blocked",
        "end",
        "epochs",
        "growth",
        "inherited_end",
        "is_end_known",
        "leader_epoch",
        "number",
        "producers",
        "published",
        "since_version",
        "start",
        "stranded",
        "taken_seconds",
        "unconfirmed",
        "unpublished",
        "unpublished_batches",
    )

    def __init__(
        self,
        number: int,
        *,
        leader_epoch: int,
        start: int,
        published: int,
        since_version: int = -1,
    ) -> None:
        self.number = number
        self.since_version = since_version
        """The version of the table that `start` and `published` were first taken from."""
        self.leader_epoch = leader_epoch
        self.epochs: list[tuple[int, int]] = []
        """(leader epoch, its first offset) of the newest leader epochs with records."""
        self.start = start
        self.published = published
        self.end = published
        self.growth = Growth()
        """Bytes that were appended while this broker leads the partition."""
        self.inherited_end = published
        """Records below were written by predecessors, and have arrival times of their clocks."""
        self.unpublished: list[Located] = []
        """Entries that continue the table from `published` on, without a hole."""
        self.unpublished_batches: dict[BatchId, tuple[int, int]] = {}
        """(first offset, end) of each Spark batch that is not published completely."""
        self.unconfirmed: list[Located] = []
        """Published entries, up to `published`, whose data files have not been seen since."""
        self.blocked: errors.SparklogError | None = None
        """Why no record may be appended or published: table and logs do not connect."""
        self.stranded: list[Located] = []
        """Entries of a blocked partition that do not connect to the table."""
        self.is_end_known = True
        """False only for a blocked partition whose end neither table nor logs say."""
        self.producers = Producers()
        self.batches = PartitionSparkBatches()
        self.taken_seconds = -math.inf
        """When another broker's change brought it while this one served, in monotonic seconds."""

    def unpublished_in(self, start: int, end: int) -> list[Located]:
        """Returns the unpublished entries with an offset in [`start`, `end`)."""
        first = bisect_right(self.unpublished, start, key=_end)
        return self.unpublished[first : bisect_left(self.unpublished, end, lo=first, key=_base)]

    def unpublished_below(self, end: int) -> tuple[Located, ...]:
        """Returns the unpublished entries that end at `end` or before."""
        return tuple(self.unpublished[: bisect_right(self.unpublished, end, key=_end)])

    def note_batch(self, entry: Entry) -> None:
        """Records the Spark batch of an entry that is not published, if it has one."""
        if entry.batch_id is not None:
            first, _ = self.unpublished_batches.get(entry.batch_id, (entry.base_offset, 0))
            self.unpublished_batches[entry.batch_id] = first, entry.end

    def note_epoch(self, entry: Entry) -> None:
        """Records where a leader epoch begins. Entries come in the order of their offsets."""
        if not self.epochs or self.epochs[-1][0] < entry.leader_epoch:
            self.epochs.append((entry.leader_epoch, entry.base_offset))
            del self.epochs[:-LEADER_EPOCHS_REMEMBERED]

    def epoch_end(self, leader_epoch: int) -> tuple[int, int]:
        """Returns (leader epoch, end offset) of that epoch, or of the last known one before it.

        Follows Kafka's `LeaderEpochFileCache`: (-1, -1) for a future epoch; for an epoch older than
        all known ones, that epoch and the offset where the first known epoch begins.
        """
        if leader_epoch == self.leader_epoch:
            return leader_epoch, self.end
        if not 0 <= leader_epoch < self.leader_epoch:
            return -1, -1
        begins = {self.leader_epoch: self.end} | dict(self.epochs)
        known = max((each for each in begins if each <= leader_epoch), default=leader_epoch)
        end = begins[min(each for each in begins if each > leader_epoch)]
        return known, max(end, self.start)


class Topic:
    """A live topic, and those of its partitions that this broker leads."""

    __slots__ = (
        "config",
        "counts",
        "held_back",
        "in_doubt",
        "last_read",
        "leader_epochs",
        "leaders",
        "name",
        "partitions",
        "resigning",
        "spark_batches",
        "staged_bytes",
        "table",
        "topic_id",
        "unconfirmed",
        "unpublished_bytes",
        "version",
        "waiting",
        "waiting_partitions",
        "waiting_since",
    )

    def __init__(self, name: str, topic_id: str, config: dict[str, str], table: TopicTable) -> None:
        self.name = name
        self.topic_id = topic_id
        self.config = config
        self.table = table
        """The broker's only view of the topic's table: publisher, janitor and readers share it.

        So a commit of one is known to all without a request. No thread holds the partition table's
        lock while it waits for the table.
        """
        self.version = 0
        """The version of the metadata that `leaders` are of: an older one says nothing about it."""
        self.last_read = NO_TABLE
        """The last version that was published or planned with. The next one may be spoilt."""
        self.leaders: tuple[int, ...] = ()
        """Broker ids, one per partition, as the metadata have them."""
        self.leader_epochs: tuple[int, ...] = ()
        """One per partition, like `leaders`."""
        self.partitions: dict[int, Partition] = {}
        """The partitions that this broker leads, by number, in order.

        It is replaced, and never changed, because threads iterate over it without a lock.
        """
        self.resigning: frozenset[int] = frozenset()
        """Those of them that accept no request any more, because another broker gets them."""
        self.spark_batches = TopicSparkBatches()
        self.counts = TopicCounts()
        self.unpublished_bytes = 0
        """Memory and WAL space of the records that wait for the table, without staged ones."""
        self.staged_bytes = 0
        """Bytes of the records that wait for the table in staged files."""
        self.waiting = 0
        """The number of unpublished entries."""
        self.waiting_partitions: dict[int, Partition] = {}
        """The partitions with unpublished entries, by number.

        In the order in which they wait for a commit.
        """
        self.waiting_since = -math.inf
        """Since when its oldest unpublished entry waits, in monotonic seconds, or longer.

        Entries of predecessors have waited for ever, because their clocks may have been wrong.
        """
        self.unconfirmed = 0
        """The number of entries that are published and not confirmed."""
        self.held_back: str | None = None
        """Why the topic's table cannot be written at present."""
        self.in_doubt: str | None = None
        """Why it is unknown if the topic still exists; it accepts no record until that is known."""

    @property
    def refusal(self) -> str | None:
        """Why this broker cannot write the topic's table; None also where others lead all of it."""
        return self.in_doubt or (self.held_back if self.partitions else None)

    @property
    def deletion_refusal(self) -> str | None:
        """Why records stay that retention or key compaction should remove; None if none should."""
        is_append_only = self.table.snapshot.append_only
        return APPEND_ONLY_REASON if is_append_only and removes_records(self.config) else None

    @property
    def timestamp_type(self) -> int:
        wanted = topic_config.value_of(self.config, "message.timestamp.type")
        return LOG_APPEND_TIME if wanted == "LogAppendTime" else CREATE_TIME

    @property
    def is_compacted(self) -> bool:
        """Returns whether only the last record of each key is kept, so that keys are required."""
        return topic_config.is_compacted(self.config)

    @property
    def mirror_source(self) -> str | None:
        """The source whose records and offsets the topic mirrors; None if it is no mirror."""
        return self.config.get(MIRROR_SOURCE) or None

    @property
    def max_message_bytes(self) -> int | None:
        """The topic's own limit; None if only the broker's limits apply."""
        wanted = self.config.get("max.message.bytes")
        return int(wanted) if wanted is not None else None

    @property
    def compression(self) -> tuple[str, int] | None:
        """(codec, level) for Kafka batches; None keeps them as the producers sent them."""
        return topic_config.compression_of(self.config)

    def time_bounds_ms(self, now_us: int) -> tuple[int, int]:
        """Returns the first and the last timestamp that a record may have now."""
        before = topic_config.number_of(self.config, "message.timestamp.before.max.ms")
        after = topic_config.number_of(self.config, "message.timestamp.after.max.ms")
        now_ms = now_us // 1_000
        return now_ms - before, now_ms + after

    def check_times(self, low_us: int, high_us: int, now_us: int) -> None:
        """Raises `BadTimestamp` if the timestamps are too far from the broker's clock."""
        first_ms, last_ms = self.time_bounds_ms(now_us)
        low_ms, high_ms = low_us // 1_000, high_us // 1_000
        if low_ms < first_ms or high_ms > last_ms:
            reason = (
                f"timestamps of {low_ms} to {high_ms} ms; topic {self.name} now accepts"
                f" {first_ms} to {last_ms} ms"
            )
            raise errors.BadTimestamp(reason=reason)

    def check_keys(self, partition: int, keyless: int) -> None:
        """Raises `KeylessRecord` if records without a key are sent to a compacted topic."""
        if keyless and self.is_compacted:
            raise errors.KeylessRecord(topic=self.name, partition=partition, count=keyless)

    @property
    def count(self) -> int:
        """The number of all partitions, whichever broker leads them."""
        return len(self.leaders)

    @property
    def is_shared(self) -> bool:
        """True if other brokers lead partitions of it too."""
        return len(self.partitions) < self.count

    @property
    def has_blocked(self) -> bool:
        """Returns whether a partition accepts no record, because its table and log differ."""
        return any(each.blocked is not None for each in self.partitions.values())

    def is_moving(self, number: int, broker: int) -> bool:
        """Returns whether `broker` is the leader in the metadata, and does not serve a partition.

        It is giving it to another broker, or has just got it.
        """
        is_served = number in self.partitions and number not in self.resigning
        return not is_served and 0 <= number < self.count and self.leaders[number] == broker

    def partition(self, number: int) -> Partition:
        """Returns a partition that this broker leads. Raises `UnknownPartition`, `NotLeader`."""
        found = self.partitions.get(number)
        if found is not None and number not in self.resigning:
            return found
        if not 0 <= number < self.count:
            raise errors.UnknownPartition(topic=self.name, partition=number, last=self.count - 1)
        raise errors.NotLeader(topic=self.name, partition=number, leader=self.leaders[number])


_Batches = Mapping[str, tuple[SparkBatch, ...]]


class _PartitionState(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: tuple[dict[int, ProducerState], ...]
    """In blocks, each of which is encoded by its own call."""
    batches: dict[str, tuple[SparkBatch, ...]]


class _State(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    """Time of the checkpoint, on the clock of `ProducerState.seen_ms`. Brokers' clocks differ."""
    partitions: tuple[_PartitionState, ...]


class _EncodedPartition(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: list[msgspec.Raw]
    batches: msgspec.Raw


class _EncodedState(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    partitions: list[_EncodedPartition]


class _PartitionStateV1(msgspec.Struct, frozen=True, array_like=True):
    """Format 1, a plain list of these, without a version before it."""

    topic_id: str
    partition: int
    producers: dict[int, ProducerState]
    batches: dict[str, tuple[SparkBatch, ...]]


_STATE_MARK: Final = b"\xc1\x02"
"""Precedes a state, with the number of its format; no msgpack value begins with 0xC1."""
_state_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(_State)
_state_v1_decoder = msgspec.msgpack.Decoder(tuple[_PartitionStateV1, ...])
_NO_BATCHES: Final = msgspec.Raw(_state_encoder.encode({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """Changes of a partition's state since the last checkpoint."""

    producers: Mapping[int, Mapping[int, ProducerState]]
    """Blocks by number; an empty block was removed."""
    batches: _Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Immutable producer and Spark batch states of one moment."""

    now_ms: int
    alive: frozenset[str]
    """Ids of all topics."""
    changed: Mapping[tuple[str, int], _Changed]
    """By topic id and partition."""
    dropped: frozenset[tuple[str, int]] = frozenset()
    """Partitions whose earlier states no successor needs any more."""


class _Encoded:
    """The encoded blocks of a partition's state, and the changes that are not encoded yet."""

    __slots__ = ("batches", "blocks", "changed_batches", "changed_blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, msgspec.Raw] = {}
        self.batches = _NO_BATCHES
        self.changed_blocks: dict[int, Mapping[int, ProducerState]] = {}
        self.changed_batches: _Batches | None = None

    def encode(self) -> None:
        """Encodes block by block, so that other threads can run in between."""
        while self.changed_blocks:
            number, block = next(iter(self.changed_blocks.items()))
            if block:
                self.blocks[number] = msgspec.Raw(_state_encoder.encode(block))
            else:
                self.blocks.pop(number, None)
            del self.changed_blocks[number]
        if self.changed_batches is not None:
            self.batches = msgspec.Raw(_state_encoder.encode(self.changed_batches))
            self.changed_batches = None

    @property
    def is_empty(self) -> bool:
        return not self.blocks and self.batches == _NO_BATCHES


class StateEncoder:
    """Encodes snapshots of one partition table, in order. Encodes only changed blocks again.

    Works without the table's lock, in many small steps: a single call of the encoder would block
    all threads of the process for its whole duration.
    """

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], _Encoded] = {}

    def encode(self, snapshot: StateSnapshot) -> bytes:
        """Returns the state for a WAL checkpoint."""
        for key in snapshot.dropped:
            self._partitions.pop(key, None)
        # If this call fails later, the next one continues with the changes recorded here.
        for key, changed in snapshot.changed.items():
            known = self._partitions.setdefault(key, _Encoded())
            known.changed_blocks.update(changed.producers)
            known.changed_batches = changed.batches
        for known in self._partitions.values():
            known.encode()
        self._partitions = {
            key: each
            for key, each in self._partitions.items()
            if key[0] in snapshot.alive and not each.is_empty
        }
        partitions = [
            _EncodedPartition(topic_id, number, list(each.blocks.values()), each.batches)
            for (topic_id, number), each in self._partitions.items()
        ]
        return _STATE_MARK + _state_encoder.encode(_EncodedState(snapshot.now_ms, partitions))


def _decoded(data: bytes) -> _State:
    if data.startswith(_STATE_MARK):
        return _state_decoder.decode(memoryview(data)[len(_STATE_MARK) :])
    partitions = tuple(
        _PartitionState(each.topic_id, each.partition, (each.producers,), each.batches)
        for each in _state_v1_decoder.decode(data)
    )
    return _State(0, partitions)  # format 1 has no times: each producer counts as just seen


class PartitionTable:
    """All topics, the partitions that this broker leads, and the WAL objects that they need."""

    def __init__(self, broker: int, *, clock: Clock | None = None) -> None:
        """`clock`: its monotonic time decides when producers expire."""
        self.broker = broker
        self._clock = clock or SystemClock()
        self._producers: OrderedDict[tuple[Partition, int], str] = OrderedDict()
        """(partition, producer id), the longest silent first, with the topic's id."""
        self._state_changed: dict[Partition, str] = {}
        """Partitions whose state has changed since the last checkpoint, with their topic's id."""
        self._with_batches: dict[Partition, Topic] = {}
        """Partitions with Spark batches, which may expire."""
        self.lock = threading.RLock()
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[str, Topic] = {}
        self._unpublished_references = WalReferences()
        """References of unpublished entries."""
        self._unconfirmed_references = WalReferences()
        """References of unconfirmed and stranded entries."""
        self.unconfirmed_count = 0
        """The number of entries that are published and not confirmed."""
        self._waiting: dict[str, Topic] = {}
        """Topics with an unpublished entry or a blocked partition, by id.

        In the order of `Topic.waiting_since`.
        """
        self._waiting_partitions = 0
        """The number of partitions with an unpublished entry, of all topics."""
        self._removed: dict[str, float] = {}
        """When topics were removed, in monotonic seconds by name; of `_DELETED_NAME_SECONDS`."""
        self.topics_version = 0
        """Rises when a topic is added or removed."""
        self.on_leaders: Callable[[], None] = lambda: None
        """Called when partitions have other leaders, or are served from now on."""
        self.is_takeover_stuck = False
        """True while partitions that this broker has got cannot be restored."""
        self._commits: dict[str, int] = {}
        """The number of our commits since `take_commits`, by topic id."""
        self._blocked: dict[str, Topic] = {}
        """Topics with a blocked partition, by id."""
        self._unconfirmed: dict[str, Topic] = {}
        """Topics with entries that are published and not confirmed, by id."""
        self._bounds: dict[str, tuple[Bounds, ...]] = {}
        """Bounds of each partition, by topic id, as `bounds` last returned them."""
        self._bounds_changed: dict[Partition, Topic] = {}
        """Partitions whose bounds may differ from those."""
        self._given: dict[tuple[str, int], Partition] = {}
        """Partitions that were given to other brokers, which may still need our log for them."""
        self._state_dropped: set[tuple[str, int]] = set()
        """Partitions whose states are to leave the checkpoints."""
        self.unpublished_bytes = 0
        """Memory of the unpublished records and entries, without staged records.

        Staged records lie in files of their own and take none of the memory that producers share.
        """
        self.staged_bytes = 0
        """Bytes of unpublished staged records."""
        self.written_bytes = 0
        """Bytes of all records ever appended; its rate shows how busy the broker is."""
        self.taken_seconds = -math.inf
        """When this broker last got a partition of a predecessor (monotonic seconds)."""
        self.applied_sequence = -1
        """The newest object of our own WAL that this table reflects."""
        self.removed_counts = TopicCounts()
        """The sums of topics that were deleted, so that the broker's sums never fall."""

    # -------------------------------------------------------------------------- topics

    def topics(self) -> list[Topic]:
        with self.lock:
            return list(self._topics.values())

    def topic(self, name: str) -> Topic:
        """Raises `UnknownTopic`."""
        found = self._topics.get(name)
        if found is None:
            raise errors.UnknownTopic(topic=name)
        return found

    def has_topic(self, name: str) -> bool:
        return name in self._topics

    def _note_removed(self, name: str) -> None:
        now = self._clock.monotonic()
        while self._removed and not self.was_just_removed(next(iter(self._removed))):
            del self._removed[next(iter(self._removed))]
        self._removed.pop(name, None)
        self._removed[name] = now  # the newest last

    def was_just_removed(self, name: str) -> bool:
        """Returns whether a topic of that name was removed within `_DELETED_NAME_SECONDS`."""
        removed = self._removed.get(name)
        now = self._clock.monotonic()
        return removed is not None and now - removed < _DELETED_NAME_SECONDS

    def by_id(self, topic_id: str) -> Topic | None:
        return self._by_id.get(topic_id)

    def add_topic(self, topic: Topic) -> None:
        """Adds a topic, unless it is there already."""
        with self.lock:
            if topic.topic_id in self._by_id:
                return
            self._topics[topic.name] = topic
            self._by_id[topic.topic_id] = topic
            self._update_waiting(topic)  # it may be held back already
            self._bounds_changed.update(dict.fromkeys(topic.partitions.values(), topic))
            self.topics_version += 1

    def add_partitions(
        self,
        topic: Topic,
        snapshot: TableSnapshot,
        metadata: ClusterMetadata,
    ) -> None:
        """Adds the partitions that `metadata` have beyond those of `topic`.

        Of these, the topic gets those that this broker leads and that no broker has led before,
        with the bounds of `snapshot`. Those of a predecessor come from `recovery`. If there are
        other brokers, their clients may have known the partitions before this broker did.
        """
        known = metadata.topics[topic.name]
        are_others = any(each.broker != self.broker for each in assign.candidates(metadata))
        taken_seconds = self._clock.monotonic() if are_others else -math.inf
        with self.lock:
            added = {
                number: Partition(
                    number,
                    leader_epoch=0,
                    start=snapshot.starts[number],
                    published=snapshot.ends[number],
                    since_version=snapshot.version,
                )
                for number in range(topic.count, known.partition_count)
                if known.leaders[number] == self.broker and not known.leader_epochs[number]
            }
            for partition in added.values():
                partition.taken_seconds = taken_seconds
            self.lead(topic, known, added, version=metadata.version)

    def lead(
        self,
        topic: Topic,
        known: TopicMetadata,
        added: Mapping[int, Partition] | None = None,
        *,
        version: int,
    ) -> None:
        """Records the leaders of a topic's partitions, and serves those of `added` from now on.

        Their states are complete by then, because other threads find them without the lock. Ignores
        the leaders of a `version` of the metadata that is older than the one recorded.
        """
        with self.lock:
            for partition in (added or {}).values():
                # Our checkpoints may have a state of an earlier time: it is not continued.
                if (topic.topic_id, partition.number) in self._given:
                    self._release((topic.topic_id, partition.number))
            if added:
                assert not added.keys() & topic.partitions.keys(), "their records would be lost"
                topic.partitions = dict(sorted({**topic.partitions, **added}.items()))
                self._bounds_changed.update(dict.fromkeys(added.values(), topic))
            if version >= topic.version:
                topic.version = version
                # In this order: `count` is that of the leaders, and is read without the lock.
                topic.leader_epochs = known.leader_epochs
                topic.leaders = known.leaders
        self.on_leaders()

    def lead_known(self, topic: Topic, known: TopicMetadata, *, version: int) -> bool:
        """Records the leaders of the partitions that the topic has, as `lead` does.

        Returns whether there are others than before.
        """
        with self.lock:
            was, count = (topic.leaders, topic.leader_epochs), topic.count
            if known.partition_count > count:
                known = msgspec.structs.replace(
                    known, leaders=known.leaders[:count], leader_epochs=known.leader_epochs[:count]
                )
            self.lead(topic, known, version=version)
            return (topic.leaders, topic.leader_epochs) != was

    def remove_topic(self, topic: Topic) -> None:
        """Removes a topic, if it is there. The entries of a deleted topic count as published."""
        with self.lock:
            if self._by_id.get(topic.topic_id) is not topic:
                return
            if self._topics.get(topic.name) is topic:
                del self._topics[topic.name]
                self._note_removed(topic.name)
            del self._by_id[topic.topic_id]
            self.topics_version += 1
            for of_topic in (self._waiting, self._blocked, self._unconfirmed):
                of_topic.pop(topic.topic_id, None)
            self._commits.pop(topic.topic_id, None)
            self._bounds.pop(topic.topic_id, None)
            self._waiting_partitions -= len(topic.waiting_partitions)
            topic.waiting_partitions.clear()
            topic.unconfirmed = 0
            self.removed_counts.add(topic.counts)
            for partition in topic.partitions.values():
                self._release_unpublished(topic, partition.unpublished)
                self._release_unconfirmed(partition.unconfirmed)
                self.unconfirmed_count -= len(partition.unconfirmed)
                self._release_unconfirmed(partition.stranded)
                for entries in (partition.unpublished, partition.unconfirmed, partition.stranded):
                    entries.clear()
                self._state_changed.pop(partition, None)
                self._bounds_changed.pop(partition, None)
                self._with_batches.pop(partition, None)
                partition.growth.close()
            for key in [key for key in self._given if key[0] == topic.topic_id]:
                self._release(key)
        for partition in topic.partitions.values():
            with self.lock:  # for one at a time, because others wait for it
                for producer_id in partition.producers:
                    self._producers.pop((partition, producer_id), None)

    # -------------------------------------------------------------------------- other leaders

    def give(self, topic: Topic, number: int) -> None:
        """Serves a partition no more. Its state stays in our checkpoints, and its entries needed.

        No append of it may be under way. Its next leader continues from both.
        """
        with self.lock:
            partition = topic.partitions[number]
            assert partition.blocked is None, "its end is unknown"
            topic.partitions = {n: each for n, each in topic.partitions.items() if n != number}
            topic.resigning -= {number}
            self._end_wait(topic, partition)
            self._release_unpublished(topic, partition.unpublished)
            for each in partition.unpublished:
                self._unconfirmed_references.add(each)
            self._count_unconfirmed(topic, -len(partition.unconfirmed))
            if not topic.partitions:
                topic.held_back = None  # by others, if the table is still not writable
            self._update_waiting(topic)
            for producer_id in partition.producers:
                del self._producers[partition, producer_id]
            self._with_batches.pop(partition, None)
            # The next checkpoint has its last state and bounds.
            self._state_changed[partition] = topic.topic_id
            self._bounds_changed[partition] = topic
            self._given[topic.topic_id, number] = partition
            partition.growth.close()

    def take_back(self, topic: Topic, number: int, now_seconds: float) -> None:
        """Serves a partition again that was given in vain: no other broker has led it since."""
        with self.lock:
            partition = self._given.pop((topic.topic_id, number))
            partition.taken_seconds = now_seconds
            unpublished, partition.unpublished = partition.unpublished, []
            for each in unpublished:
                self._unconfirmed_references.remove(each)
                self._add_unpublished(topic, partition, each)
            self._count_unconfirmed(topic, len(partition.unconfirmed))
            for producer_id in partition.producers:
                self._producers[partition, producer_id] = topic.topic_id
            if partition.batches:
                self._with_batches[partition] = topic
            partition.growth = Growth()
            topic.partitions = dict(sorted({**topic.partitions, number: partition}.items()))
        self.on_leaders()

    def given(self) -> list[tuple[str, int]]:
        """Returns (topic id, number) of the partitions that were given to other brokers."""
        with self.lock:
            return list(self._given)

    def is_giving(self, topic: Topic, number: int) -> bool:
        """Returns whether a partition is given, and no other broker leads it yet."""
        with self.lock:
            partition = self._given.get((topic.topic_id, number))
            return partition is not None and partition.leader_epoch == topic.leader_epochs[number]

    def has_given(self, topic: Topic, number: int) -> bool:
        """Returns whether a partition that was given has a new leader, and needs our log yet."""
        partition = self._given.get((topic.topic_id, number))
        return partition is not None and partition.leader_epoch < topic.leader_epochs[number]

    def release(self, topic_id: str, number: int) -> None:
        """Forgets a partition that was given: no other broker needs our log for it any more."""
        with self.lock:
            if (topic_id, number) in self._given:
                self._release((topic_id, number))

    def _release(self, key: tuple[str, int]) -> None:
        partition = self._given.pop(key)
        self._release_unconfirmed([*partition.unconfirmed, *partition.unpublished])
        self._state_changed.pop(partition, None)
        self._bounds_changed.pop(partition, None)
        self._state_dropped.add(key)
        known = self._bounds.get(key[0], ())
        if key[1] < len(known):
            self._bounds[key[0]] = (*known[: key[1]], NOT_LED, *known[key[1] + 1 :])

    def _count_unconfirmed(self, topic: Topic, more: int) -> None:
        self.unconfirmed_count += more
        topic.unconfirmed += more
        if topic.unconfirmed:
            self._unconfirmed[topic.topic_id] = topic
        else:
            self._unconfirmed.pop(topic.topic_id, None)

    # -------------------------------------------------------------------------- durable facts

    def apply(self, written: WalObject) -> None:
        """Applies the next object of our WAL, which is durable."""
        with self.lock:
            self.applied_sequence = written.at.sequence
            for each in written.located:
                entry = each.entry
                if entry.kind is not EntryKind.RECORDS and entry.kind is not EntryKind.STAGED:
                    continue
                topic = self._by_id.get(entry.topic_id)
                if topic is None:
                    continue  # deleted while the flush was under way
                if entry.carried and entry.partition not in topic.partitions:
                    continue  # given to another broker while the flush was under way
                partition = topic.partitions[entry.partition]
                self._record_batch(topic, partition, entry)
                if entry.carried:
                    self._replace_with_copy(partition, each)
                    continue
                partition.note_epoch(entry)
                assert entry.base_offset == partition.end, (
                    f"{topic.name}-{entry.partition}: {entry.base_offset} after {partition.end}"
                )
                partition.end = entry.end
                self._add_unpublished(topic, partition, each)
                size = payload_bytes(entry)
                partition.growth.add(size, entry.base_offset)
                counts = topic.counts
                counts.batches_in += 1
                counts.records_in += entry.rows
                counts.bytes_in += size

    def restore_tail(self, topic: Topic, partition: Partition, tail: Iterable[Located]) -> None:
        """Adds the entries that recovery found beyond the table of `partition`."""
        with self.lock:
            for each in tail:
                partition.end = partition.inherited_end = each.entry.end
                self._add_unpublished(topic, partition, each)
                _record_spark_batch(topic, each.entry)
            topic.waiting_since = -math.inf

    def advance_published(self, topic: Topic, moved: Iterable[tuple[Partition, int]]) -> None:
        """Records that the table of `topic` holds everything below these ends of partitions."""
        with self.lock:
            self._commits[topic.topic_id] = self._commits.get(topic.topic_id, 0) + 1
            for partition, end in moved:
                is_led = topic.partitions.get(partition.number) is partition
                if partition.blocked is not None or not is_led:
                    continue
                partition.published = max(partition.published, end)
                count = bisect_right(partition.unpublished, end, key=_end)
                done = partition.unpublished[:count]
                del partition.unpublished[:count]
                if done:
                    self._end_wait(topic, partition)
                    if partition.unpublished:  # it waits again, behind the others
                        self._begin_wait(topic, partition)
                _drop_published_batches(partition, end)
                self._add_unconfirmed(topic, partition, done)
                self._release_unpublished(topic, done)
            self._update_waiting(topic)

    def take_commits(self) -> dict[str, int]:
        """Returns the number of our commits to each topic's table since the last call, by id."""
        with self.lock:
            found, self._commits = self._commits, {}
            return found

    def restore_unconfirmed(
        self, topic: Topic, partition: Partition, entries: Iterable[Located]
    ) -> None:
        """Adds the published entries that recovery found in the logs, in order."""
        with self.lock:
            self._add_unconfirmed(topic, partition, entries)

    def advance_confirmed(self, topic: Topic, ends: Mapping[int, int]) -> None:
        """Records that the data files below these ends of partitions have been seen.

        Their WAL objects may go.
        """
        with self.lock:
            for number, end in ends.items():
                partition = topic.partitions.get(number)
                if partition is None:
                    continue  # given to another broker meanwhile
                count = bisect_right(partition.unconfirmed, end, key=_end)
                self._release_unconfirmed(partition.unconfirmed[:count])
                del partition.unconfirmed[:count]
                self._count_unconfirmed(topic, -count)
                self._bounds_changed[partition] = topic

    def unconfirmed(self) -> list[Topic]:
        """Returns the topics with entries that are published and not confirmed."""
        with self.lock:
            return list(self._unconfirmed.values())

    # -------------------------------------------------------------------------- blocked partitions

    def block(
        self,
        topic: Topic,
        partition: Partition,
        reason: errors.SparklogError,
        *,
        end: int,
        stranded: Iterable[Located] = (),
        is_end_known: bool = True,
    ) -> None:
        """Stops appends to the partition and its publishing until `reconnect` succeeds.

        `end`: the end of the known records; more may exist if `is_end_known` is False.
        """
        with self.lock:
            partition.blocked = reason
            if end > partition.end:
                partition.end = partition.inherited_end = end
            partition.is_end_known = is_end_known
            for each in stranded:
                partition.stranded.append(each)
                partition.note_batch(each.entry)
                self._unconfirmed_references.add(each)
            self._blocked[topic.topic_id] = topic
            self._bounds_changed[partition] = topic
            self._update_waiting(topic)

    def reconnect(self, topic: Topic, partition: Partition, end: int) -> bool:
        """Unblocks the partition if its entries continue a table that ends at `end`.

        Returns whether they do.
        """
        with self.lock:
            entries = [*partition.unpublished, *partition.stranded]
            tail = join_tail(end, entries)
            reached = tail[-1].entry.end if tail else end
            if reached < partition.end or (reached > partition.end and partition.is_end_known):
                return False
            # These entries were published meanwhile, and their files have not been seen.
            self._add_unconfirmed(topic, partition, join_head(partition.published, end, entries))
            self._release_unpublished(topic, partition.unpublished)
            self._release_unconfirmed(partition.stranded)
            partition.unpublished, partition.stranded = [], []
            self._end_wait(topic, partition)
            partition.unpublished_batches.clear()
            partition.published, partition.end = end, reached
            partition.blocked, partition.is_end_known = None, True
            for each in tail:
                self._add_unpublished(topic, partition, each)
            if not topic.has_blocked:
                self._blocked.pop(topic.topic_id, None)
            self._update_waiting(topic)
            partition.growth.notify_followers()
            return True

    def hold_back(self, topic: Topic, reason: str | None) -> None:
        """Notes why the topic's table cannot be written, until a turn of the topic succeeds.

        So it has turns also while it has nothing to publish. None: the table can be written.
        """
        with self.lock:
            topic.held_back = reason
            if self._by_id.get(topic.topic_id) is topic:
                self._update_waiting(topic)

    def waiting(self) -> list[Topic]:
        """Returns topics that are held back, or have unpublished entries or blocked partitions."""
        with self.lock:
            return list(self._waiting.values())

    @property
    def waiting_objects(self) -> int:
        """The number of objects to put: a commit of each `waiting` topic, and their files."""
        return len(self._waiting) + self._waiting_partitions

    @property
    def partition_count(self) -> int:
        """The number of partitions that this broker leads."""
        return sum(len(topic.partitions) for topic in self.topics())

    def due(
        self, *, interval_seconds: float, publish_bytes: int, requested: Collection[str] = ()
    ) -> list[Topic]:
        """Returns the topics to publish now; looks at no others, unless much is unpublished.

        These are topics whose oldest entry has waited for the interval, or whose unpublished
        records exceed `publish_bytes`, the `requested` ones with an unpublished entry, by id, and
        those that are held back or have a blocked partition, whose table may be repaired by now.
        """
        with self.lock:
            found = dict(self._blocked)
            for topic_id in requested:
                if topic_id in self._waiting:
                    found[topic_id] = self._waiting[topic_id]
            since = self._clock.monotonic() - interval_seconds
            for topic_id, topic in self._waiting.items():
                if topic.waiting_since > since:
                    break
                found[topic_id] = topic
            if self.unpublished_bytes + self.staged_bytes >= publish_bytes:
                found |= {
                    topic_id: topic
                    for topic_id, topic in self._waiting.items()
                    if topic.unpublished_bytes + topic.staged_bytes >= publish_bytes
                }
            return list(found.values())

    def restart_wait(self, topic: Topic) -> None:
        """Has the topic's wait begin now, because its present entries are being published."""
        with self.lock:
            if self._waiting.pop(topic.topic_id, None) is not None:
                self._put_last(topic)

    def _put_last(self, topic: Topic) -> None:
        topic.waiting_since = self._clock.monotonic()
        self._waiting[topic.topic_id] = topic

    def _update_waiting(self, topic: Topic) -> None:
        is_idle = not topic.waiting and topic.topic_id not in self._blocked
        if is_idle and topic.held_back is None:
            self._waiting.pop(topic.topic_id, None)
        elif topic.topic_id not in self._waiting:
            self._put_last(topic)

    def _begin_wait(self, topic: Topic, partition: Partition) -> None:
        topic.waiting_partitions[partition.number] = partition
        self._waiting_partitions += 1

    def _end_wait(self, topic: Topic, partition: Partition) -> None:
        if topic.waiting_partitions.pop(partition.number, None) is not None:
            self._waiting_partitions -= 1

    def bounds(self) -> dict[str, tuple[Bounds, ...]]:
        """Returns the bounds of each partition of each topic, by topic id, for a checkpoint.

        Looks only at the partitions that have changed since the last call.
        """
        with self.lock:
            found: dict[str, list[Bounds]] = {}
            for partition, topic in self._bounds_changed.items():
                if self._by_id.get(topic.topic_id) is not topic:
                    continue  # deleted meanwhile
                known = found.get(topic.topic_id)
                if known is None:
                    known = found[topic.topic_id] = list(self._bounds.get(topic.topic_id, ()))
                    known += [NOT_LED] * (topic.count - len(known))
                known[partition.number] = _bounds(partition)
            self._bounds_changed.clear()
            self._bounds |= {topic_id: tuple(each) for topic_id, each in found.items()}
            return self._bounds.copy()

    def advance_start(self, topic: Topic, starts: Sequence[int]) -> None:
        """Records the log starts that a durable version of the table has, one per partition.

        A start never moves back. A start beyond our end was set by a successor of this broker.
        """
        with self.lock:
            for number, partition in topic.partitions.items():
                # Partitions may have been added since that version.
                start = starts[number] if number < len(starts) else 0
                if start > partition.start:
                    partition.start = max(partition.start, min(start, partition.end))
                    self._bounds_changed[partition] = topic

    def _add_unpublished(self, topic: Topic, partition: Partition, located: Located) -> None:
        if not partition.unpublished:
            self._begin_wait(topic, partition)
        partition.unpublished.append(located)
        self._bounds_changed[partition] = topic
        self._unpublished_references.add(located)
        partition.note_batch(located.entry)
        topic.waiting += 1
        if topic.topic_id not in self._waiting:
            self._put_last(topic)
        self.written_bytes += payload_bytes(located.entry)
        self._count_bytes(topic, located.entry, 1)

    def _replace_with_copy(self, partition: Partition, copy: Located) -> None:
        """Replaces an entry by its carried copy, unless the entry was published meanwhile."""
        waiting, base = partition.unpublished, copy.entry.base_offset
        index = bisect_left(waiting, base, key=_base)
        if index < len(waiting) and waiting[index].entry.base_offset == base:
            self._unpublished_references.remove(waiting[index])
            self._unpublished_references.add(copy)
            waiting[index] = copy

    def _release_unpublished(self, topic: Topic, done: Sequence[Located]) -> None:
        topic.waiting -= len(done)
        for each in done:
            self._unpublished_references.remove(each)
            self._count_bytes(topic, each.entry, -1)

    def _count_bytes(self, topic: Topic, entry: Entry, sign: int) -> None:
        staged = 0 if entry.staged is None else entry.staged.length
        size = _OVERHEAD_BYTES + (entry.length if entry.staged is None else 0)
        for each in (topic, self):
            each.unpublished_bytes += sign * size
            each.staged_bytes += sign * staged

    def _add_unconfirmed(
        self, topic: Topic, partition: Partition, entries: Iterable[Located]
    ) -> None:
        self._bounds_changed[partition] = topic
        for each in entries:
            partition.unconfirmed.append(each)
            self._unconfirmed_references.add(each)
            self._count_unconfirmed(topic, 1)

    def _release_unconfirmed(self, done: Iterable[Located]) -> None:
        for each in done:
            self._unconfirmed_references.remove(each)

    # -------------------------------------------------------------------------- for the WAL cleaner

    def is_staged(self, batch_id: BatchId) -> bool:
        """Returns whether an unconfirmed entry names the batch, and so needs its staged files."""
        return self._unpublished_references.has_batch(
            batch_id
        ) or self._unconfirmed_references.has_batch(batch_id)

    def unpublished(self) -> list[Located]:
        """Returns all unpublished entries."""
        with self.lock:
            return [
                each
                for topic in self._waiting.values()
                for partition in topic.partitions.values()
                for each in partition.unpublished
            ]

    def is_unpublished(self, located: Located) -> bool:
        """Returns whether exactly this entry, not a copy of it, is still to be published."""
        entry = located.entry
        with self.lock:
            topic = self._by_id.get(entry.topic_id)
            if topic is None:
                return False
            partition = topic.partitions.get(entry.partition)
            waiting = partition.unpublished if partition is not None else []
            index = bisect_left(waiting, entry.base_offset, key=_base)
            return index < len(waiting) and waiting[index].at == located.at

    def may_carry(self, located: Located) -> bool:
        """Returns whether a copy of an entry may replace it: its partition is not about to move."""
        with self.lock:
            topic = self._by_id.get(located.entry.topic_id)
            is_moving = topic is not None and located.entry.partition in topic.resigning
            return not is_moving and self.is_unpublished(located)

    def oldest_unpublished(self, broker: int, epoch: int, count: int) -> list[int]:
        """Returns the first `count` objects of our own epoch that have unpublished entries."""
        with self.lock:
            return list(itertools.islice(self._unpublished_references.oldest(broker, epoch), count))

    def needed(self, broker: int, epoch: int) -> list[int]:
        """Returns the sequences of that epoch's objects with unconfirmed entries, sorted."""
        with self.lock:
            return sorted(
                self._unpublished_references.sequences(broker, epoch)
                | self._unconfirmed_references.sequences(broker, epoch)
            )

    def is_needed(self, broker: int, epoch: int) -> bool:
        """Returns whether `needed` is not empty for that epoch."""
        with self.lock:
            return self._unpublished_references.has_epoch(
                broker, epoch
            ) or self._unconfirmed_references.has_epoch(broker, epoch)

    # -------------------------------------------------------------------------- duplicate detection

    def restore_entries(
        self,
        topic: Topic,
        partition: Partition,
        epochs: Iterable[tuple[int, int]],
        entries: Iterable[Entry],
    ) -> None:
        """Adds to a restored state what later entries, in the order of offsets, say.

        `epochs`: the leader epochs before, with their first offsets.
        """
        with self.lock:
            partition.epochs = list(epochs)
            for entry in entries:
                self._record_batch(topic, partition, entry)
                partition.note_epoch(entry)

    def _record_batch(self, topic: Topic, partition: Partition, entry: Entry) -> None:
        if entry.carried:
            return  # recorded when it was first written
        if entry.producer_id != NO_PRODUCER:
            state = partition.producers.get(entry.producer_id)
            written = SequencedBatch(
                entry.base_sequence, entry.count, entry.base_offset, entry.arrival_us
            )
            state = advance(state, entry.producer_epoch, written, seen_ms=self._now_ms())
            self._put_producer(topic, partition, entry.producer_id, state)
        if entry.batch_id is not None:
            partition.batches.remember(entry, published=partition.published)
            topic.spark_batches.record(entry.batch_id, entry.batch_kind, entry.arrival_us)
            self._state_changed[partition] = topic.topic_id
            self._with_batches[partition] = topic

    def _put_producer(
        self, topic: Topic, partition: Partition, producer_id: int, state: ProducerState
    ) -> None:
        """Sets a producer's state; if there are too many, drops the longest silent producer."""
        key = partition, producer_id
        partition.producers.put(producer_id, state)
        self._producers[key] = topic.topic_id
        self._producers.move_to_end(key)
        self._state_changed[partition] = topic.topic_id
        if len(partition.producers) > PRODUCERS_PER_PARTITION:
            oldest = partition.producers.oldest()
            assert oldest is not None
            self._drop_producer(partition, oldest)
        if len(self._producers) > PRODUCERS_IN_ALL:
            self._drop_producer(*next(iter(self._producers)))

    def _drop_producer(self, partition: Partition, producer_id: int) -> None:
        self._state_changed[partition] = self._producers.pop((partition, producer_id))
        partition.producers.drop(producer_id)

    def expire_producers(self, horizon_ms: int) -> None:
        """Drops producers that were last seen before `horizon_ms`, on this table's clock.

        Drops a bounded number per call, because other threads wait for the lock.
        """
        for _ in range(_PRODUCERS_FORGOTTEN):
            oldest = next(iter(self._producers), None)
            if oldest is None:
                return
            partition, producer_id = oldest
            state = partition.producers.get(producer_id)
            if state is not None and state.seen_ms >= horizon_ms:
                return
            self._drop_producer(partition, producer_id)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1e3)

    def snapshot_state(self, *, now_us: int) -> StateSnapshot:
        """Returns the producer and Spark batch states for the next checkpoint.

        Drops expired ones first. A snapshot holds only the changes since the one before, so all
        snapshots must go to one `StateEncoder`.
        """
        now_ms = self._now_ms()
        with self.lock:
            self.expire_producers(now_ms - round(_PRODUCER_EXPIRY_SECONDS * 1e3))
            for partition, topic in list(self._with_batches.items()):
                if partition.batches.expire(now_us, published=partition.published):
                    self._state_changed[partition] = topic.topic_id
                if not partition.batches:
                    del self._with_batches[partition]
            for topic in self._topics.values():
                topic.spark_batches.expire(now_us)
            changed, self._state_changed = self._state_changed, {}
            dropped, self._state_dropped = frozenset(self._state_dropped), set()
            return StateSnapshot(
                dropped=dropped,
                now_ms=now_ms,
                alive=frozenset(self._by_id),
                changed={
                    (topic_id, partition.number): _Changed(
                        producers=partition.producers.changed(), batches=partition.batches.state()
                    )
                    for partition, topic_id in changed.items()
                },
            )

    def restore_states(
        self,
        states: Iterable[tuple[bytes, Container[tuple[str, int]]]],
        restored: Mapping[tuple[str, int], tuple[Topic, Partition]],
    ) -> None:
        """Restores the states of earlier checkpoints in partitions that are not served yet.

        `states`: each with the (topic id, partition) to take from it; no two have one in common.
        """
        now_ms = self._now_ms()
        with self.lock:
            seen: list[tuple[int, Topic, Partition, int, ProducerState]] = []
            for data, wanted in states:
                state = _decoded(data)
                for each in state.partitions:
                    key = each.topic_id, each.partition
                    if key not in wanted or key not in restored:
                        continue
                    topic, partition = restored[key]
                    self._restore_batches(topic, partition, each.batches)
                    for block in each.producers:
                        for producer_id, known in block.items():
                            silent_ms = max(state.now_ms - known.seen_ms, 0)
                            seen.append((now_ms - silent_ms, topic, partition, producer_id, known))
            for seen_ms, topic, partition, producer_id, known in sorted(seen, key=lambda x: x[0]):
                known = msgspec.structs.replace(known, seen_ms=seen_ms)
                self._put_producer(topic, partition, producer_id, known)

    def _restore_batches(self, topic: Topic, partition: Partition, batches: _Batches) -> None:
        partition.batches.restore(batches)
        self._with_batches[partition] = topic
        for batch in partition.batches:
            topic.spark_batches.record(batch.batch_id, batch.kind, batch.arrival_us)
        self._state_changed[partition] = topic.topic_id


def payload_bytes(entry: Entry) -> int:
    """Returns the bytes of the entry's records, in the WAL or in staged files."""
    return entry.length if entry.staged is None else entry.staged.length


def _record_spark_batch(topic: Topic, entry: Entry) -> None:
    if entry.batch_id is not None:
        topic.spark_batches.record(entry.batch_id, entry.batch_kind, entry.arrival_us)


def _drop_published_batches(partition: Partition, end: int) -> None:
    """Drops the batches that are published now; they are in the order of their offsets."""
    batches = partition.unpublished_batches
    while batches:
        batch_id, (_, batch_end) = next(iter(batches.items()))
        if batch_end > end:
            return
        del batches[batch_id]


def _bounds(partition: Partition) -> Bounds:
    kept = partition.unconfirmed[0].entry.base_offset if partition.unconfirmed else None
    return Bounds(
        start=partition.start,
        published=partition.published if kept is None else kept,
        end=partition.end if partition.is_end_known else -1,
        leader_epoch=partition.leader_epoch,
        epochs=tuple(partition.epochs),
    )


def _base(located: Located) -> int:
    return located.entry.base_offset


def _end(located: Located) -> int:
    return located.entry.end
