"""Answers listeners' queries about topics, partitions and producers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

from sparklog import errors
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.producer_state import ProducerState
from sparklog.broker.log.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """A partition's leader, log start offset and high watermark."""

    leader: int
    leader_epoch: int
    start: int
    end: int
    appended_bytes: int
    """Bytes of records appended while this broker leads the partition, for `watch_growth`."""


class PartitionStatuses(Sequence[PartitionStatus]):
    """Statuses of partitions, each computed when it is accessed."""

    __slots__ = ("_numbers", "_status_of")

    def __init__(self, numbers: Sequence[int], status_of: Callable[[int], PartitionStatus]) -> None:
        self._numbers = numbers
        self._status_of = status_of

    @overload
    def __getitem__(self, index: int) -> PartitionStatus: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PartitionStatus]: ...

    def __getitem__(self, index: int | slice) -> PartitionStatus | Sequence[PartitionStatus]:
        if isinstance(index, slice):
            return PartitionStatuses(self._numbers[index], self._status_of)
        return self._status_of(self._numbers[index])

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveProducer:
    """An idempotent producer, as remembered by a partition."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_us: int
    """When its newest batch arrived, µs since the Unix epoch."""


class ActiveProducers(Collection[ActiveProducer]):
    """Producers of consecutive blocks of ids, each created when it is accessed."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Mapping[int, ProducerState]]) -> None:
        self._blocks = blocks

    def __contains__(self, other: object) -> bool:
        return any(each == other for each in self)

    def __iter__(self) -> Iterator[ActiveProducer]:
        for block in self._blocks:
            for producer_id, state in sorted(block.items()):
                yield ActiveProducer(
                    producer_id=producer_id,
                    epoch=state.epoch,
                    last_sequence=state.last_sequence,
                    last_us=state.last_us,
                )

    def __len__(self) -> int:
        return sum(map(len, self._blocks))


class Partitions:
    """Answers listeners' queries about topics and partitions, as this broker knows them now."""

    def __init__(self, led_partitions: LedPartitions) -> None:
        self._led_partitions = led_partitions

    def id_of(self, topic: str) -> str:
        """Returns the id of the topic with that name. Raises `UnknownTopic`."""
        return self._led_partitions.topic(topic).topic_id

    def topic_of(self, topic_id: str) -> str | None:
        """Returns the name of the topic with that id, or None."""
        topic = self._led_partitions.by_id(topic_id)
        return topic.name if topic is not None else None

    def count(self, topic: str) -> int:
        """Returns the topic's number of partitions. Raises `UnknownTopic`."""
        return self._led_partitions.topic(topic).count

    def led(self, topic: str) -> Mapping[int, int]:
        """Returns the partitions of a topic that this broker serves, with their leader epochs.

        Empty for an unknown topic.
        """
        if not self._led_partitions.has_topic(topic):
            return {}
        found = self._led_partitions.topic(topic)
        return {
            number: each.leader_epoch
            for number, each in found.partitions.items()
            if each.state is not PartitionState.RESIGNING
        }

    def status(self, topic: str, partition: int) -> PartitionStatus:
        """Returns the state of a partition that this broker leads.

        Raises `UnknownTopic`, `UnknownPartition`, `NotLeader`.
        """
        found = self._led_partitions.topic(topic)
        return self._status_of(found.partition(partition))

    def statuses(self, topic: str) -> Sequence[PartitionStatus]:
        """Returns the statuses of all partitions, in order, each computed when it is accessed.

        The offsets of partitions that other brokers lead are -1. Raises `UnknownTopic`.
        """
        found = self._led_partitions.topic(topic)
        return PartitionStatuses(range(found.count), partial(self._status_at, found))

    def _status_at(self, topic: Topic, number: int) -> PartitionStatus:
        partition = topic.partitions.get(number)
        if partition is not None:
            return self._status_of(partition)
        return PartitionStatus(
            appended_bytes=0,
            leader=topic.leaders[number],
            leader_epoch=topic.leader_epochs[number],
            start=-1,
            end=-1,
        )

    def _status_of(self, partition: Partition) -> PartitionStatus:
        # Read before `end`, so that records that arrive in between count as growth.
        appended_bytes = partition.growth.appended_bytes
        return PartitionStatus(
            appended_bytes=appended_bytes,
            leader=self._led_partitions.broker,
            leader_epoch=partition.leader_epoch,
            start=partition.start,
            end=partition.end,
        )

    def check_leader_epoch(self, topic: str, partition: int, leader_epoch: int) -> None:
        """Checks a client's leader epoch against the current one; -1 is not checked.

        Raises `UnknownTopic`, `UnknownPartition`, `UnknownLeaderEpoch`, `FencedLeaderEpoch`.
        """
        current = self._led_partitions.topic(topic).partition(partition).leader_epoch
        if leader_epoch in (-1, current):
            return
        kind = errors.UnknownLeaderEpoch if leader_epoch > current else errors.FencedLeaderEpoch
        raise kind(topic=topic, partition=partition, found=leader_epoch, current=current)

    def epoch_end(self, topic: str, partition: int, leader_epoch: int) -> tuple[int, int]:
        """Returns the end of `leader_epoch`, or of the last earlier epoch that has records.

        The result is (leader epoch, end offset), or (-1, -1) for a future epoch. Raises
        `UnknownTopic`, `UnknownPartition`.
        """
        found = self._led_partitions.topic(topic).partition(partition)
        return self._led_partitions.epoch_end(found, leader_epoch)

    def producers(self, topic: str, partition: int) -> Collection[ActiveProducer]:
        """Returns the idempotent producers that a partition remembers now, by id.

        Each is created when it is accessed. Raises `UnknownTopic`, `UnknownPartition`.
        """
        found = self._led_partitions.topic(topic).partition(partition)
        return ActiveProducers(sorted(self._led_partitions.producers(found), key=min))

    def log_bytes(self) -> dict[str, dict[int, int]]:
        """Returns the bytes of each partition that this broker leads, by topic and number.

        Counts table files and unpublished entries.
        """
        found = {}
        for topic in self._led_partitions.topics():
            files = topic.table.snapshot.files
            sizes = self._led_partitions.backlog.bytes_of(topic)
            for number, of_partition in enumerate(files):
                if number in sizes:
                    sizes[number] += sum(file.size_bytes for file in of_partition)
            found[topic.name] = sizes
        return found

    def leader_of(self, topic: str, partition: int) -> tuple[int, int]:
        """Returns the id of a partition's leader and its leader epoch, as known to this broker.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        found = self._led_partitions.topic(topic)
        leaders, epochs = found.leaders, found.leader_epochs
        if not 0 <= partition < min(len(leaders), len(epochs)):
            raise errors.UnknownPartition(topic=topic, partition=partition, last=len(leaders) - 1)
        return leaders[partition], epochs[partition]

    def is_moving(self, topic: str, partition: int) -> bool:
        """Returns whether this broker is handing a partition over to another one, or receiving it.

        False for a partition that cannot be restored, or does not exist.
        """
        return (
            self._led_partitions.has_topic(topic)
            and not self._led_partitions.is_takeover_stuck
            and self._led_partitions.is_moving(self._led_partitions.topic(topic), partition)
        )

    def has_resigned(self, topic: str, partition: int) -> bool:
        """Returns whether this broker led a partition recently, and knows its next leader."""
        led = self._led_partitions
        return led.has_topic(topic) and led.resignations.is_retained(led.topic(topic), partition)

    def watch_leaders(self, notify: Callable[[], None]) -> None:
        """Calls `notify` when partitions get new leaders, or when this broker begins to serve them.

        It must not block.
        """
        self._led_partitions.on_leaders = notify

    def bytes_from(self, topic: str, partition: int, offset: int) -> int | None:
        """Returns the bytes of records from `offset` on, or slightly more; None if unknown.

        Raises `UnknownTopic`, `UnknownPartition`.
        """
        return self._led_partitions.topic(topic).partition(partition).growth.bytes_from(offset)
