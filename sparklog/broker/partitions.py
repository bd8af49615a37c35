"""What this broker leads: each partition's ends, producers and what is not yet in its table.

The one lock (`Ledger.lock`) guards all of it and is never held across I/O. What is written here is
durable already: the writer applies a flush only after it stands, the publisher a commit likewise.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sparklog import errors, limits
from sparklog.broker import topicconfig
from sparklog.broker.batches import Batches, Standing, WrittenBatch
from sparklog.broker.growth import Growth
from sparklog.broker.needs import Needs
from sparklog.broker.producers import NO_PRODUCER, Producers, ProducerState, Written, advance
from sparklog.clock import Clock, SystemClock
from sparklog.record import CREATE_TIME, LOG_APPEND_TIME
from sparklog.storage.plan import join_tail
from sparklog.storage.snapshot import (
    BatchId,
    Bounds,
    Entry,
    Kind,
    Located,
    TableSnapshot,
)
from sparklog.storage.wal import WalObject

_OVERHEAD_BYTES = 640
"""What an entry costs in memory beside its records while it waits, measured on 300,000 of them."""


class Partition:
    """One partition. `start` <= `published` <= `end`."""

    __slots__ = (
        "batches",
        "blocked",
        "end",
        "growth",
        "inherited_end",
        "is_end_known",
        "leader_epoch",
        "number",
        "producers",
        "published",
        "start",
        "stranded",
        "unconfirmed",
        "unpublished",
        "waiting_batches",
    )

    def __init__(self, number: int, *, leader_epoch: int, start: int, published: int) -> None:
        self.number = number
        self.leader_epoch = leader_epoch
        self.start = start
        self.published = published
        self.end = published
        self.growth = Growth()
        """By what is appended while we lead it."""
        self.inherited_end = published
        """What lies below was written by predecessors, and has the time of their clocks."""
        self.unpublished: list[Located] = []
        """Continues the table from `published` without a hole."""
        self.waiting_batches: dict[BatchId, tuple[int, int]] = {}
        """First offset and end of each query's batch that is not published, or not all of it."""
        self.unconfirmed: list[Located] = []
        """Published, and the files with their rows have not been seen since; up to `published`."""
        self.blocked: errors.SparklogError | None = None
        """Why no record may be written, or published: table and logs do not connect."""
        self.stranded: list[Located] = []
        """Entries that nothing connects to the table while the partition is blocked."""
        self.is_end_known = True
        """Whether `end` is sure; if not, the partition is blocked."""
        self.producers = Producers()
        self.batches = Batches()

    def unpublished_in(self, start: int, end: int) -> list[Located]:
        """Unpublished entries that hold an offset of `start` … `end`."""
        first = bisect_right(self.unpublished, start, key=_end)
        return self.unpublished[first : bisect_left(self.unpublished, end, lo=first, key=_base)]

    def unpublished_below(self, end: int) -> tuple[Located, ...]:
        """Unpublished entries that end at `end` at the latest."""
        return tuple(self.unpublished[: bisect_right(self.unpublished, end, key=_end)])

    def epoch_end(self, leader_epoch: int) -> tuple[int, int]:
        """(leader epoch, the offset where it ended), of that epoch or the last before it.

        As Kafka's `LeaderEpochFileCache` says it: -1, -1 for an epoch that is still to come, and
        for one older than all that are known the epoch itself, and where the first known begins.
        Known are the current one and those of entries that are not published yet; the table
        remembers none. So of older ones the answer may lie behind their end, never before it.
        """
        if leader_epoch == self.leader_epoch:
            return leader_epoch, self.end
        if not 0 <= leader_epoch < self.leader_epoch:
            return -1, -1
        begins = {self.leader_epoch: self.inherited_end}
        for waiting in self.unpublished:
            if waiting.entry.base_offset >= self.inherited_end:
                break
            begins.setdefault(waiting.entry.leader_epoch, waiting.entry.base_offset)
        known = max((each for each in begins if each <= leader_epoch), default=leader_epoch)
        end = begins[min(each for each in begins if each > leader_epoch)]
        return known, max(end, self.start)


class Topic:
    """A live topic, all of whose partitions this broker leads."""

    __slots__ = (
        "config",
        "held_back",
        "name",
        "partitions",
        "staged_bytes",
        "standing",
        "topic_id",
        "unpublished_bytes",
        "waiting",
    )

    def __init__(self, name: str, topic_id: str, config: dict[str, str]) -> None:
        self.name = name
        self.topic_id = topic_id
        self.config = config
        self.partitions: list[Partition] = []
        self.standing = Standing()
        self.unpublished_bytes = 0
        """Bytes of records that wait for the table, and take memory or space in the WAL."""
        self.staged_bytes = 0
        """The same of records that wait where Spark's tasks have staged them."""
        self.waiting = 0
        """How many entries are not published."""
        self.held_back: str | None = None
        """Why the topic's table cannot be written at the moment."""

    @property
    def timestamp_type(self) -> int:
        wanted = topicconfig.value_of(self.config, "message.timestamp.type")
        return LOG_APPEND_TIME if wanted == "LogAppendTime" else CREATE_TIME

    @property
    def is_compacted(self) -> bool:
        """Whether of each key the last record stays, so that each record needs one."""
        return topicconfig.is_compacted(self.config)

    @property
    def max_message_bytes(self) -> int | None:
        """What the topic says; None: nothing, and the broker's own bounds are all there are."""
        wanted = self.config.get("max.message.bytes")
        return int(wanted) if wanted is not None else None

    @property
    def compression(self) -> tuple[str, int] | None:
        """(codec, level) that Kafka's batches are to have; None: as they came."""
        return topicconfig.compression_of(self.config)

    def time_bounds_ms(self, now_us: int) -> tuple[int, int]:
        """The first and the last time that a producer may give a record now."""
        before = topicconfig.number_of(self.config, "message.timestamp.before.max.ms")
        after = topicconfig.number_of(self.config, "message.timestamp.after.max.ms")
        now_ms = now_us // 1_000
        return now_ms - before, now_ms + after

    def check_times(self, low_us: int, high_us: int, now_us: int) -> None:
        """Raises `BadTimestamp` where a producer's times are too far from the broker's."""
        first_ms, last_ms = self.time_bounds_ms(now_us)
        low_ms, high_ms = low_us // 1_000, high_us // 1_000
        if low_ms < first_ms or high_ms > last_ms:
            reason = (
                f"{low_ms} to {high_ms} ms; topic {self.name} takes {first_ms} to {last_ms} ms now"
            )
            raise errors.BadTimestamp(reason=reason)

    def check_keys(self, partition: int, keyless: int) -> None:
        """Raises `KeylessRecord` where records are sent to a compacted topic without a key."""
        if keyless and self.is_compacted:
            raise errors.KeylessRecord(topic=self.name, partition=partition, count=keyless)

    def partition(self, number: int) -> Partition:
        """Raises `UnknownPartition`."""
        if not 0 <= number < len(self.partitions):
            raise errors.UnknownPartition(
                topic=self.name, partition=number, last=len(self.partitions) - 1
            )
        return self.partitions[number]


_Batches = Mapping[str, tuple[WrittenBatch, ...]]


class _PartitionState(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: tuple[dict[int, ProducerState], ...]
    """In blocks, which are encoded one by one."""
    batches: dict[str, tuple[WrittenBatch, ...]]


class _State(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    """On the clock of `ProducerState.seen_ms`: the next broker has another."""
    partitions: tuple[_PartitionState, ...]


class _EncodedPartition(msgspec.Struct, frozen=True, array_like=True):
    topic_id: str
    partition: int
    producers: list[msgspec.Raw]
    batches: msgspec.Raw


class _EncodedState(msgspec.Struct, frozen=True, array_like=True):
    now_ms: int
    partitions: list[_EncodedPartition]


class _FirstPartitionState(msgspec.Struct, frozen=True, array_like=True):
    """The first format: a list of these, without a mark before it."""

    topic_id: str
    partition: int
    producers: dict[int, ProducerState]
    batches: dict[str, tuple[WrittenBatch, ...]]


_STATE_MARK: Final = b"\xc1\x02"
"""Begins a state with its format's number; no msgpack value begins with 0xC1."""
_state_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(_State)
_first_state_decoder = msgspec.msgpack.Decoder(tuple[_FirstPartitionState, ...])
_NO_BATCHES: Final = msgspec.Raw(_state_encoder.encode({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """What of a partition's state the last checkpoint does not hold."""

    producers: Mapping[int, Mapping[int, ProducerState]]
    """Blocks by number; an empty one is gone."""
    batches: _Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Producer and batch states as of one moment; nothing in it changes any more."""

    now_ms: int
    alive: frozenset[str]
    """Ids of all topics."""
    changed: Mapping[tuple[str, int], _Changed]
    """By topic id and partition."""


class _Encoded:
    """A partition's state in pieces as they were encoded last, and what is to be encoded."""

    __slots__ = ("batches", "blocks", "changed_batches", "changed_blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, msgspec.Raw] = {}
        self.batches = _NO_BATCHES
        self.changed_blocks: dict[int, Mapping[int, ProducerState]] = {}
        self.changed_batches: _Batches | None = None

    def encode(self) -> None:
        """Block by block, so that other threads have their turn between them."""
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
    """Encodes snapshots of one ledger, in their order; what has not changed is not encoded again.

    Works without the ledger's lock, in many small steps: one encoder call would keep all threads
    of the process waiting for as long as it takes.
    """

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], _Encoded] = {}

    def encode(self, snapshot: StateSnapshot) -> bytes:
        """The state for a WAL checkpoint."""
        # Whatever fails from here on, the next call goes on with what this one was given.
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
        for each in _first_state_decoder.decode(data)
    )
    return _State(0, partitions)  # as if each producer had been seen just before


class Ledger:
    """All topics of this broker, and which WAL objects are still needed for them."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        """`clock`: by its monotonic time producers are forgotten."""
        self._clock = clock or SystemClock()
        self._producers: OrderedDict[tuple[Partition, int], str] = OrderedDict()
        """Partition and producer id, from the longest silent to the newest, with the topic's id."""
        self._state_changed: dict[Partition, str] = {}
        """Partitions whose state the last checkpoint does not hold, with their topic's id."""
        self.lock = threading.RLock()
        self.grown = threading.Condition(self.lock)
        """Notified whenever some partition's end has risen, for followers."""
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[str, Topic] = {}
        self._needs = Needs()
        """Of entries that are not published."""
        self._kept = Needs()
        """Of entries that are not confirmed, or stranded."""
        self.unconfirmed_count = 0
        """How many published entries are not confirmed."""
        self._waiting: dict[str, Topic] = {}
        """Topics with an entry that is not published, or with a blocked partition, by id."""
        self.unpublished_bytes = 0
        """Bytes of records that wait, with what their entries cost in memory, but for staged ones.

        Those lie in files of their own and take none of what producers share.
        """
        self.staged_bytes = 0
        """Bytes of staged records that wait."""
        self.written_bytes = 0
        """Bytes of records that were ever written; how busy we are is its rate."""
        self.applied_sequence = -1
        """The newest object of our own WAL; all that is here is as of it."""

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

    def by_id(self, topic_id: str) -> Topic | None:
        return self._by_id.get(topic_id)

    def add_topic(self, topic: Topic) -> None:
        with self.lock:
            self._topics[topic.name] = topic
            self._by_id[topic.topic_id] = topic

    def add_partitions(
        self, topic: Topic, snapshot: TableSnapshot, leader_epochs: list[int]
    ) -> None:
        """Brings `topic` to as many partitions as its table and `leader_epochs` tell of."""
        with self.lock:
            for number in range(len(topic.partitions), len(leader_epochs)):
                topic.partitions.append(
                    Partition(
                        number,
                        leader_epoch=leader_epochs[number],
                        start=snapshot.starts[number],
                        published=snapshot.ends[number],
                    )
                )

    def remove_topic(self, topic: Topic) -> None:
        """Entries of a dead topic count as published."""
        with self.lock:
            self._topics.pop(topic.name, None)
            self._by_id.pop(topic.topic_id, None)
            self._waiting.pop(topic.topic_id, None)
            for partition in topic.partitions:
                self._release(topic, partition.unpublished)
                self._drop_kept(partition.unconfirmed)
                self.unconfirmed_count -= len(partition.unconfirmed)
                self._drop_kept(partition.stranded)
                for entries in (partition.unpublished, partition.unconfirmed, partition.stranded):
                    entries.clear()
                self._state_changed.pop(partition, None)
                partition.growth.end()
            self.grown.notify_all()
        for partition in topic.partitions:  # one by one, as others wait for the lock
            with self.lock:
                for producer_id in partition.producers:
                    self._producers.pop((partition, producer_id), None)

    # -------------------------------------------------------------------------- durable facts

    def wrote(self, written: WalObject) -> None:
        """Our WAL's next object stands durably."""
        with self.grown:
            self.applied_sequence = written.at.sequence
            for each in written.located:
                entry = each.entry
                if entry.kind is not Kind.RECORDS and entry.kind is not Kind.STAGED:
                    continue
                topic = self._by_id.get(entry.topic_id)
                if topic is None:
                    continue  # deleted while the flush was under way
                partition = topic.partitions[entry.partition]
                self._remember(topic, partition, entry)
                if entry.carried:
                    self._replace(partition, each)
                    continue
                assert entry.base_offset == partition.end, (
                    f"{topic.name}-{entry.partition}: {entry.base_offset} after {partition.end}"
                )
                partition.end = entry.end
                self._need(topic, partition, each)
                partition.growth.add(payload_bytes(entry), entry.base_offset)
            self.grown.notify_all()

    def restore_tail(self, topic: Topic, partition: Partition, tail: Iterable[Located]) -> None:
        """What recovery found beyond the table of `partition`."""
        with self.lock:
            for each in tail:
                partition.end = partition.inherited_end = each.entry.end
                self._need(topic, partition, each)
                _note(topic, each.entry)

    def published(self, topic: Topic, ends: Iterable[int]) -> None:
        """The table of `topic` holds everything below `ends`, per partition."""
        with self.lock:
            for partition, end in zip(topic.partitions, ends, strict=False):
                if partition.blocked is not None:
                    continue
                partition.published = max(partition.published, end)
                count = bisect_right(partition.unpublished, end, key=_end)
                done = partition.unpublished[:count]
                del partition.unpublished[:count]
                _forget_batches(partition, end)
                self._keep_unconfirmed(partition, done)
                self._release(topic, done)
            self._note_waiting(topic)

    def restore_unconfirmed(self, partition: Partition, entries: Iterable[Located]) -> None:
        """What recovery found in the logs and the table holds too, in order, up to `published`."""
        with self.lock:
            self._keep_unconfirmed(partition, entries)

    def confirmed(self, topic: Topic, ends: Iterable[int]) -> None:
        """The files with the rows below `ends` have been seen, per partition: the WAL may go."""
        with self.lock:
            for partition, end in zip(topic.partitions, ends, strict=False):
                count = bisect_right(partition.unconfirmed, end, key=_end)
                self._drop_kept(partition.unconfirmed[:count])
                del partition.unconfirmed[:count]
                self.unconfirmed_count -= count

    def unconfirmed(self) -> list[Topic]:
        """Topics with published entries that are not confirmed."""
        with self.lock:
            return [
                topic
                for topic in self._topics.values()
                if any(each.unconfirmed for each in topic.partitions)
            ]

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
        """Nothing is written to the partition until `reconnect` finds it whole.

        `end`: up to where records are known of; more may have come since.
        """
        with self.lock:
            partition.blocked = reason
            if end > partition.end:
                partition.end = partition.inherited_end = end
            partition.is_end_known = is_end_known
            for each in stranded:
                partition.stranded.append(each)
                self._kept.hold(each)
            self._note_waiting(topic)

    def reconnect(self, topic: Topic, partition: Partition, end: int) -> bool:
        """Whether a blocked partition is whole again, now that its table ends at `end`."""
        with self.lock:
            entries = [*partition.unpublished, *partition.stranded]
            tail = join_tail(end, entries)
            reached = tail[-1].entry.end if tail else end
            if reached < partition.end or (reached > partition.end and partition.is_end_known):
                return False
            self._release(topic, partition.unpublished)
            self._drop_kept(partition.stranded)
            partition.unpublished, partition.stranded = [], []
            partition.waiting_batches.clear()
            partition.published, partition.end = end, reached
            partition.blocked, partition.is_end_known = None, True
            for each in tail:
                self._need(topic, partition, each)
            self._note_waiting(topic)
            self.grown.notify_all()
            return True

    def waiting(self) -> list[Topic]:
        """Topics with an entry that is not published, or with a blocked partition."""
        with self.lock:
            return list(self._waiting.values())

    def _note_waiting(self, topic: Topic) -> None:
        if topic.waiting or any(each.blocked is not None for each in topic.partitions):
            self._waiting[topic.topic_id] = topic
        else:
            self._waiting.pop(topic.topic_id, None)

    def bounds(self) -> dict[str, tuple[Bounds, ...]]:
        """Where each partition of each topic starts, is kept from, and ends, by topic id."""
        with self.lock:
            return {
                topic.topic_id: tuple(map(_bounds, topic.partitions))
                for topic in self._topics.values()
            }

    def started(self, topic: Topic, starts: Iterable[int]) -> None:
        """By a durable version of its table the logs of `topic` start there, per partition.

        A start never goes back; one beyond our end was moved by who has replaced us.
        """
        with self.lock:
            for partition, start in zip(topic.partitions, starts, strict=False):
                partition.start = max(partition.start, min(start, partition.end))

    def _need(self, topic: Topic, partition: Partition, located: Located) -> None:
        partition.unpublished.append(located)
        self._needs.hold(located)
        entry = located.entry
        if entry.batch_id is not None:
            first, _ = partition.waiting_batches.get(entry.batch_id, (entry.base_offset, 0))
            partition.waiting_batches[entry.batch_id] = first, entry.end
        topic.waiting += 1
        self._waiting[topic.topic_id] = topic
        self.written_bytes += payload_bytes(located.entry)
        self._count(topic, located.entry, 1)

    def _replace(self, partition: Partition, copy: Located) -> None:
        """Puts a copy in the place of its entry, unless that has been published meanwhile."""
        waiting, base = partition.unpublished, copy.entry.base_offset
        index = bisect_left(waiting, base, key=_base)
        if index < len(waiting) and waiting[index].entry.base_offset == base:
            self._needs.release(waiting[index])
            self._needs.hold(copy)
            waiting[index] = copy

    def _release(self, topic: Topic, done: Sequence[Located]) -> None:
        topic.waiting -= len(done)
        for each in done:
            self._needs.release(each)
            self._count(topic, each.entry, -1)

    def _count(self, topic: Topic, entry: Entry, sign: int) -> None:
        staged = 0 if entry.staged is None else entry.staged.length
        size = _OVERHEAD_BYTES + (entry.length if entry.staged is None else 0)
        for each in (topic, self):
            each.unpublished_bytes += sign * size
            each.staged_bytes += sign * staged

    def _keep_unconfirmed(self, partition: Partition, entries: Iterable[Located]) -> None:
        for each in entries:
            partition.unconfirmed.append(each)
            self._kept.hold(each)
            self.unconfirmed_count += 1

    def _drop_kept(self, done: Iterable[Located]) -> None:
        for each in done:
            self._kept.release(each)

    # -------------------------------------------------------------------------- the WAL's upkeep

    def is_staged(self, batch_id: BatchId) -> bool:
        """Whether an entry that is not confirmed names the batch, and so needs its files."""
        return self._needs.has_batch(batch_id) or self._kept.has_batch(batch_id)

    def inherited(self) -> list[Located]:
        """Entries that are not published and not from `applied_sequence` on, as recovered."""
        with self.lock:
            return [
                each
                for topic in self._waiting.values()
                for partition in topic.partitions
                for each in partition.unpublished
                if each.entry.base_offset < partition.inherited_end
            ]

    def is_waiting(self, located: Located) -> bool:
        """Whether exactly this entry, and no copy of it, is still to be published."""
        entry = located.entry
        with self.lock:
            topic = self._by_id.get(entry.topic_id)
            if topic is None:
                return False
            waiting = topic.partitions[entry.partition].unpublished
            index = bisect_left(waiting, entry.base_offset, key=_base)
            return index < len(waiting) and waiting[index].at == located.at

    def oldest_waiting(self, broker: int, epoch: int, count: int) -> list[int]:
        """The first `count` objects of one's own epoch with entries that are not published."""
        with self.lock:
            return list(itertools.islice(self._needs.oldest(broker, epoch), count))

    def needed(self, broker: int, epoch: int) -> list[int]:
        """Sequences of that epoch's objects with entries that are not confirmed, rising."""
        with self.lock:
            needs, kept = self._needs, self._kept
            return sorted(needs.sequences(broker, epoch) | kept.sequences(broker, epoch))

    def is_needed(self, broker: int, epoch: int) -> bool:
        """Whether `needed` names any."""
        with self.lock:
            return self._needs.has_epoch(broker, epoch) or self._kept.has_epoch(broker, epoch)

    # -------------------------------------------------------------------------- who wrote what

    def remember(self, entry: Entry) -> None:
        """Takes note of who wrote an inherited `entry`, for retries; they come in order."""
        with self.lock:
            topic = self._by_id.get(entry.topic_id)
            if topic is not None and entry.partition < len(topic.partitions):
                self._remember(topic, topic.partitions[entry.partition], entry)

    def _remember(self, topic: Topic, partition: Partition, entry: Entry) -> None:
        if entry.carried:
            return  # noted when it was written first
        if entry.producer_id != NO_PRODUCER:
            state = partition.producers.get(entry.producer_id)
            written = Written(entry.base_sequence, entry.count, entry.base_offset, entry.arrival_us)
            state = advance(state, entry.producer_epoch, written, seen_ms=self._now_ms())
            self._keep(topic, partition, entry.producer_id, state)
        if entry.batch_id is not None:
            partition.batches.remember(entry, published=partition.published)
            topic.standing.note(entry.batch_id, entry.batch_kind, entry.arrival_us)
            self._state_changed[partition] = topic.topic_id

    def _keep(
        self, topic: Topic, partition: Partition, producer_id: int, state: ProducerState
    ) -> None:
        """Remembers a producer, and forgets the longest silent where there are too many."""
        key = partition, producer_id
        partition.producers.put(producer_id, state)
        self._producers[key] = topic.topic_id
        self._producers.move_to_end(key)
        self._state_changed[partition] = topic.topic_id
        if len(partition.producers) > limits.PRODUCERS_PER_PARTITION:
            oldest = partition.producers.oldest()
            assert oldest is not None
            self._forget(partition, oldest)
        if len(self._producers) > limits.PRODUCERS_IN_ALL:
            self._forget(*next(iter(self._producers)))

    def _forget(self, partition: Partition, producer_id: int) -> None:
        self._state_changed[partition] = self._producers.pop((partition, producer_id))
        partition.producers.drop(producer_id)

    def forget_silent(self, horizon_ms: int) -> None:
        """Forgets producers that were seen last before then, on the ledger's clock.

        Only so many at a time, because others wait for the lock.
        """
        for _ in range(limits.PRODUCERS_FORGOTTEN):
            oldest = next(iter(self._producers), None)
            if oldest is None:
                return
            partition, producer_id = oldest
            state = partition.producers.get(producer_id)
            if state is not None and state.seen_ms >= horizon_ms:
                return
            self._forget(partition, producer_id)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1e3)

    def snapshot_state(self, *, now_us: int) -> StateSnapshot:
        """Producer and batch states, without the expired ones, as the next checkpoint has them.

        Each snapshot holds only what has changed since the one before: for one `StateEncoder`.
        """
        now_ms = self._now_ms()
        with self.lock:
            self.forget_silent(now_ms - round(limits.PRODUCER_EXPIRY_SECONDS * 1e3))
            for topic in self._topics.values():
                for partition in topic.partitions:
                    if partition.batches.forget(now_us, published=partition.published):
                        self._state_changed[partition] = topic.topic_id
                topic.standing.forget(now_us)
            changed, self._state_changed = self._state_changed, {}
            return StateSnapshot(
                now_ms=now_ms,
                alive=frozenset(self._by_id),
                changed={
                    (topic_id, partition.number): _Changed(
                        producers=partition.producers.changed(), batches=partition.batches.state()
                    )
                    for partition, topic_id in changed.items()
                },
            )

    def restore_state(self, data: bytes) -> None:
        """Takes over what a checkpoint of an earlier epoch remembers."""
        state = _decoded(data)
        now_ms = self._now_ms()
        with self.lock:
            seen: list[tuple[int, Topic, Partition, int, ProducerState]] = []
            for each in state.partitions:
                topic = self._by_id.get(each.topic_id)
                if topic is None or each.partition >= len(topic.partitions):
                    continue
                partition = topic.partitions[each.partition]
                for producer_id in list(partition.producers):
                    self._forget(partition, producer_id)
                partition.batches.restore(each.batches)
                for batch in partition.batches:
                    topic.standing.note(batch.batch_id, batch.kind, batch.arrival_us)
                self._state_changed[partition] = topic.topic_id
                for block in each.producers:
                    for producer_id, known in block.items():
                        silent_ms = max(state.now_ms - known.seen_ms, 0)
                        seen.append((now_ms - silent_ms, topic, partition, producer_id, known))
            for seen_ms, topic, partition, producer_id, known in sorted(seen, key=lambda x: x[0]):
                known = msgspec.structs.replace(known, seen_ms=seen_ms)
                self._keep(topic, partition, producer_id, known)


def payload_bytes(entry: Entry) -> int:
    """Bytes of the entry's records, wherever they lie."""
    return entry.length if entry.staged is None else entry.staged.length


def _note(topic: Topic, entry: Entry) -> None:
    if entry.batch_id is not None:
        topic.standing.note(entry.batch_id, entry.batch_kind, entry.arrival_us)


def _forget_batches(partition: Partition, end: int) -> None:
    """Takes out the batches that are published now; they came in order of their offsets."""
    batches = partition.waiting_batches
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
    )


def _base(located: Located) -> int:
    return located.entry.base_offset


def _end(located: Located) -> int:
    return located.entry.end
