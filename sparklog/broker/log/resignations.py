"""Partitions that this broker resigns, so that another member leads them.

The state of a resigned partition stays in our checkpoints, and its entries in our log, until its
next leader has both in its own (`handover` describes the whole procedure).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparklog.broker.log.backlog import Backlog
from sparklog.broker.log.checkpoint_changes import CheckpointChanges
from sparklog.broker.log.duplicates import Duplicates
from sparklog.broker.log.growth import Growth
from sparklog.broker.log.partition import Partition
from sparklog.broker.log.partition_state import PartitionEvent, PartitionState
from sparklog.broker.log.topic import Topic
from sparklog.clock import Clock


class Resignations:
    """The partitions that are moving away from this broker, and those that its log retains."""

    def __init__(
        self,
        lock: threading.RLock,
        changes: CheckpointChanges,
        backlog: Backlog,
        duplicates: Duplicates,
        find: Callable[[str], Topic | None],
        *,
        clock: Clock,
    ) -> None:
        """`lock`: the lock of the `LedPartitions`; `find`: returns a topic by its id."""
        self._lock = lock
        self._changes = changes
        self._backlog = backlog
        self._duplicates = duplicates
        self._find = find
        self._clock = clock
        self._retained: dict[str, dict[int, Partition]] = {}
        """Partitions that were resigned, by topic id and number."""

    # -------------------------------------------------------------------------- a move

    def begin(self, topic: Topic, number: int) -> None:
        """Stops accepting requests for a partition, unless it is blocked at present."""
        with self._lock:
            partition = topic.partitions[number]
            if partition.state is PartitionState.SERVING:
                partition.move(PartitionEvent.MOVE_BEGAN)

    def abandon(self, topic: Topic, number: int) -> None:
        """Resumes serving a partition, as before `begin`."""
        with self._lock:
            partition = topic.partitions[number]
            # Batches rejected since `begin` may be retried after later ones.
            partition.taken_seconds = self._clock.monotonic()
            if partition.state is PartitionState.RESIGNING:
                partition.move(PartitionEvent.MOVE_ABANDONED)

    def complete(self, topic: Topic, number: int) -> bool:
        """Stops serving a drained partition, from which its next leader continues.

        No append to it may be under way. Returns False if the topic has been deleted, or the
        partition blocked; a blocked one is still served here.
        """
        with self._lock:
            partition = topic.partitions[number]
            is_deleted = self._find(topic.topic_id) is not topic
            if is_deleted or partition.state is not PartitionState.RESIGNING:
                return False
            topic.partitions = {n: each for n, each in topic.partitions.items() if n != number}
            self._backlog.leave(topic, partition)
            self._duplicates.leave(partition)
            # The next checkpoint includes its last state and bounds.
            self._changes.note_state(topic.topic_id, partition)
            self._changes.note_bounds(topic, partition)
            partition.move(PartitionEvent.DRAINED)
            self._retained.setdefault(topic.topic_id, {})[number] = partition
            partition.growth.close()
            return True

    def revoke(self, topic_id: str, number: int) -> bool:
        """Resumes serving a resigned partition, because no other broker has led it since.

        Returns False if its topic was deleted.
        """
        with self._lock:
            topic = self._find(topic_id)
            if topic is None:
                return False
            partition = self._take(topic_id, number)
            partition.move(PartitionEvent.REINSTATED)
            partition.taken_seconds = self._clock.monotonic()
            self._backlog.rejoin(topic, partition)
            self._duplicates.rejoin(topic, partition)
            partition.growth = Growth()
            topic.partitions = dict(sorted({**topic.partitions, number: partition}.items()))
            return True

    def undecided(self) -> list[tuple[str, Partition]]:
        """Returns the partitions in the state RESIGNED, with the ids of their topics."""
        return [each for each in self._all() if each[1].state is PartitionState.RESIGNED]

    def is_undecided(self, topic: Topic, number: int) -> bool:
        """Returns whether a partition is in the state RESIGNED."""
        return self._state(topic, number) is PartitionState.RESIGNED

    # -------------------------------------------------------------------------- afterwards

    def note_leaders(self, topic: Topic) -> None:
        """Marks resigned partitions as succeeded once the topic has their next leaders.

        Requires the lock.
        """
        for number, partition in self._retained.get(topic.topic_id, {}).items():
            is_succeeded = partition.leader_epoch < topic.leader_epochs[number]
            if is_succeeded and partition.state is PartitionState.RESIGNED:
                partition.move(PartitionEvent.SUCCEEDED)

    def retained(self) -> list[tuple[str, int]]:
        """Returns (topic id, number) of partitions that our log retains for known leaders."""
        return [
            (topic_id, each.number)
            for topic_id, each in self._all()
            if each.state is PartitionState.ELSEWHERE
        ]

    def is_retained(self, topic: Topic, number: int) -> bool:
        """Returns whether this broker has recently led a partition, and knows its next leader."""
        return self._state(topic, number) is PartitionState.ELSEWHERE

    def release(self, topic_id: str, number: int) -> None:
        """Forgets a partition, if it is retained: no other broker needs our log for it."""
        with self._lock:
            if number in self._retained.get(topic_id, {}):
                self._drop(topic_id, self._take(topic_id, number))

    def forget_topic(self, topic: Topic) -> None:
        """Forgets the partitions of a deleted topic. Requires the lock."""
        for partition in self._retained.pop(topic.topic_id, {}).values():
            self._drop(topic.topic_id, partition)

    def _state(self, topic: Topic, number: int) -> PartitionState | None:
        """Returns the state in which a partition is retained; None if it is not."""
        partition = self._retained.get(topic.topic_id, {}).get(number)
        return None if partition is None else partition.state

    def _all(self) -> list[tuple[str, Partition]]:
        with self._lock:
            return [
                (topic_id, partition)
                for topic_id, of_topic in self._retained.items()
                for partition in of_topic.values()
            ]

    def _take(self, topic_id: str, number: int) -> Partition:
        of_topic = self._retained[topic_id]
        partition = of_topic.pop(number)
        if not of_topic:
            del self._retained[topic_id]
        return partition

    def _drop(self, topic_id: str, partition: Partition) -> None:
        self._backlog.release(partition)
        self._changes.drop(topic_id, partition)
